"""Gate and coordinator with the place of a run: no number is left free, and what comes twice (threats T9, T36)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from coordinator import store as db
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.errors import DeniedError
from fedsilo.protocol.place import Place
from silo.guard.decisions import RunView
from silo.guard.messages import Allowed, Denied, Held, IngressDenied
from silo.sampling import Training
from tests.policies import setting
from tests.simulated.coordinator_parts import federation, until_quiet
from tests.world import Bench, small_factors


def evaluation(digest: str) -> pb.MetricsEval:
    return pb.MetricsEval(split="held_out", adapter_digest=digest, metrics=[pb.Metric(name="pass_at_1", value=0.25)])


def test_T09_an_evaluation_leaves_with_the_digest_that_the_coordinator_announced_and_no_other(bench: Bench) -> None:
    first, second = "ab" * 32, "cd" * 32
    bench.gate.view = RunView(setting.PLAN).opened(1, pb.RoundOpen(base_digest="ef" * 32))
    assert isinstance(bench.gate.offer(bench.gate.view.place("metrics.eval", 1), evaluation(first)), Denied)
    bench.gate.view = bench.gate.view.evaluating(first)
    assert isinstance(bench.gate.offer(bench.gate.view.place("metrics.eval", 1), evaluation(second)), Denied)
    # The next round opens while the trainer still evaluates, and the silo is started again.
    bench.gate.view = bench.gate.view.opened(2, pb.RoundOpen(base_digest=first)).evaluating(second)
    bench.gate.view = RunView.from_json(setting.PLAN, json.loads(json.dumps(bench.gate.view.to_json())))
    assert isinstance(bench.gate.offer(bench.gate.view.place("metrics.eval", 1), evaluation(first)), Allowed)
    assert isinstance(bench.gate.offer(bench.gate.view.place("metrics.eval", 2), evaluation(first)), Denied)
    assert isinstance(bench.gate.offer(bench.gate.view.place("metrics.eval", 2), evaluation(second)), Allowed)
    assert isinstance(bench.gate.offer(bench.gate.view.place("metrics.eval", 0), evaluation(first)), Denied)
    assert isinstance(bench.gate.offer(bench.gate.view.place("metrics.eval", 0), evaluation("")), Allowed)


def test_T09_progress_beyond_the_plan_is_not_said(bench: Bench) -> None:
    bench.gate.send(bench.gate.view.place("control.progress", 1, 4), pb.Progress(round=1, step=4))
    for number, step in ((1, 5), (2, 1)):
        body = pb.Progress(round=number, step=step)
        with pytest.raises(DeniedError):
            bench.gate.send(bench.gate.view.place("control.progress", number, step), body)
    with pytest.raises(DeniedError):
        bench.gate.send(bench.gate.view.place("control.progress", 1, 4), pb.Progress(round=1, step=3))
    assert bench.channel.kinds() == ["control.progress"]


def test_T09_answers_in_another_order_stay_here(bench: Bench) -> None:
    assert isinstance(bench.responses((4, ()), (1, ("12",)), (7, ())), Denied)
    assert isinstance(bench.responses((1, ("12",)), (4, ()), (7, ())), Allowed)


def test_T36_opening_round_2_first_does_not_free_the_first_release(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "a", setting.policy_of(setting.policy_text(first_rounds=1)))
    bench.gate.view = RunView(setting.PLAN, 2, setting.BASE_DIGEST, 1.0, {}, 0, training=Training(6, 1, 4))
    header = pb.Factors(base_digest=setting.BASE_DIGEST)
    offered = bench.gate.offer(bench.gate.view.place("lora.factors", 2), header, tensors=small_factors())
    assert isinstance(offered, Held)
    bench.close()


def test_a_round_that_opens_again_is_its_redelivery_or_not_let_in(bench: Bench) -> None:
    def deliver(body: pb.RoundOpen, number: int) -> None:
        bench.channel.routing = {"run": "run-1", "round": number}
        bench.channel.answer = ("round.open", body)
        bench.gate.send(bench.gate.view.place("control.poll"), pb.Poll())

    steps = [pb.PublicStep(step=2, prompt_indices=[1, 4, 7]), pb.PublicStep(step=4, prompt_indices=[0, 2, 3])]
    body = pb.RoundOpen(base_digest="cd" * 32, public_steps=steps)
    deliver(body, 2)
    bench.gate.view = bench.gate.view.opened(2, body)
    deliver(body, 2)
    restored = RunView.from_json(setting.PLAN, json.loads(json.dumps(bench.gate.view.to_json())))
    assert restored.witnesses is None  # nobody's word is carried over a restart: joining asks again
    bench.gate.view = restored.witnessed(1)
    deliver(body, 2)  # killed before the acknowledgement was sent
    for changed, number in ((pb.RoundOpen(base_digest="ef" * 32, public_steps=steps), 2), (body, 1)):
        with pytest.raises(IngressDenied):
            deliver(changed, number)
    deliver(body, 3)


def test_a_round_that_was_not_let_in_can_be_abstained_from(bench: Bench) -> None:
    body = pb.Abstain(round=3)
    with pytest.raises(DeniedError):
        bench.gate.send(Place("run-1", 3, 0, "control.abstain"), body)
    for view in (bench.gate.view.refused(3), RunView().refused(3)):
        bench.gate.view = view
        bench.gate.send(Place("run-1", 3, 0, "control.abstain"), body)
    bench.gate.view = bench.gate.view.refused(3)
    with pytest.raises(DeniedError):
        bench.gate.send(Place("run-1", 4, 0, "control.abstain"), pb.Abstain(round=4))


def test_T09_the_coordinator_takes_no_evaluation_that_names_another_adapter(tmp_path: Path) -> None:
    house, silos = federation(tmp_path)
    silos[3].mute = {"metrics.eval"}
    house.submit()
    for silo in silos:
        silo.join()
    until_quiet(silos)
    committed = house.rows(lambda session: session.get_one(db.Round, ("run-1", 1)).adapter_digest)
    body = evaluation("cd" * 32)
    refused = silos[3].say("metrics.eval", body, run="run-1", number=1)
    assert isinstance(refused, pb.Refusal) and refused.code == "INGRESS_DENIED"
    body.adapter_digest = committed
    assert isinstance(silos[3].say("metrics.eval", body, run="run-1", number=1), pb.Ack)
    body.adapter_digest = committed
    assert isinstance(silos[3].say("metrics.eval", body, run="run-1", number=0), pb.Refusal)
    body.adapter_digest = ""
    assert isinstance(silos[3].say("metrics.eval", body, run="run-1", number=0), pb.Ack)


def test_what_a_late_silo_says_of_an_earlier_round_is_taken_and_of_a_later_one_not(tmp_path: Path) -> None:
    house, silos = federation(tmp_path)
    house.submit()
    silos[3].mute = {"metrics.eval"}
    for silo in silos:
        silo.join()
    until_quiet(silos)
    assert house.rows(lambda session: session.get_one(db.Round, ("run-1", 2)).state) == "committed"
    for number, answer in ((1, pb.Ack), (2, pb.Ack), (3, pb.Refusal)):
        said = silos[3].say("control.progress", pb.Progress(round=number, step=1), run="run-1", number=number, step=1)
        assert isinstance(said, answer), number
