"""A guard that was killed in a round goes on inside it: the same rows, the same donors, and every message once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsilo.protocol import codec
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.errors import UnreachableError
from silo.guard.trainer_process.supervisor import Given
from silo.link import LinkMessage
from silo.sampling import PrivateSampler
from tests.policies import setting
from tests.world import ADAPTER, Loop

UPDATE = codec.encode_factors(
    {name: values * np.float32(1e-3) for name, values in codec.decode_factors(ADAPTER).tensors.items()},
    base_digest=codec.sha256_hex(ADAPTER), schema_sha256=setting.SCHEMA.digest, rank=2, scale=2.0, dtype="float32",
)  # fmt: skip
# What a trainer is asked for in a round of four steps, the second and the last of them public.
TASKS = ["LoadAdapter", "PrivateStep", "GeneratePublic", "PublicStep", "PrivateStep", "GeneratePublic", "PublicStep",
         "ExportDelta"]  # fmt: skip
CONTENT = ("metrics.eval", "public.responses", "lora.factors")


def begin(loop: Loop) -> None:
    loop.offer_plan()
    loop.open_round()
    loop.coordinator.says("control.fetch", "global.adapter", ADAPTER, run="run-1", round=1)
    loop.base_evaluated()


def given(loop: Loop) -> list[LinkMessage]:
    return [message for message in loop.trainer.told if message.type == "task"]


def answers(step: int) -> bytes:
    rows = ((1, ("12",)), (4, ()), (7, ())) if step == 2 else ((0, ()), (2, ()), (3, ()))
    return codec.encode(setting.responses_body(*rows))


def donors(step: int) -> pb.PublicDonors:
    body = pb.PublicDonors()
    if step == 2:
        right = pb.Response(text="12", finish=pb.FINISH_STOP)
        body.prompts.add(prompt_index=1).donors.add(origin="hospital_b").response.CopyFrom(right)
    return body


def evaluation() -> bytes:
    body = pb.MetricsEval(split="held_out")
    body.metrics.add(name="pass_at_1", value=0.25)
    return codec.encode(body)


def do(loop: Loop) -> str:
    """The trainer finishes the task in hand; after its answers, donors come with the next poll."""
    task = given(loop)[-1].fields
    name, step = str(task["task"]), int(task.get("step", 0))
    body = {"GeneratePublic": answers(step), "ExportDelta": UPDATE, "Evaluate": evaluation()}.get(name, b"")
    loop.coordinator.script.pop("control.poll", None)
    if name == "GeneratePublic":
        loop.coordinator.says("control.poll", "public.donors", donors(step), run="run-1", round=1, step=step)
    loop.trainer_says("done", body, task=name, round=task["round"], metrics={})
    return name


def sent(loop: Loop) -> list[tuple[str, int, bytes]]:
    """Content that crossed: kind, step, payload."""
    return [(envelope.kind, envelope.step, bytes(payload)) for envelope, payload in loop.coordinator.sent
            if envelope.kind in CONTENT]  # fmt: skip


def all_of(loop: Loop, limit: int = 20) -> tuple[list[dict[str, Any]], list[bytes]]:
    """The round to its end: fields and bodies of the tasks in it."""
    while do(loop) != "ExportDelta" and limit:
        limit -= 1
    told = [message for message in given(loop) if message.fields["task"] in TASKS]
    return [message.fields for message in told], [message.body for message in told]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], list[bytes], Any]:
    loop = Loop(tmp_path_factory.mktemp("whole") / "a", setting.policy_of(setting.policy_text()))
    begin(loop)
    fields, bodies = all_of(loop)
    crossed = sent(loop)
    loop.close()
    assert [each["task"] for each in fields] == TASKS
    assert [kind for kind, *_ in crossed] == ["metrics.eval", "public.responses", "public.responses", "lora.factors"]
    return fields, bodies, crossed


def planned(loop: Loop, resumed: dict[str, Any] | None) -> None:
    (plan,) = [message for message in loop.trainer.told if message.type == "plan"]
    assert plan.fields["resume"] is True
    loop.trainer_says("planned", overlong={}, private_prompts=40, resumed=resumed)


@pytest.mark.quick(keep=4)
@pytest.mark.parametrize("done", range(len(TASKS)))
def test_what_a_trainer_that_kept_nothing_is_given_again_is_the_same_and_nothing_is_sent_twice(
    loop: Loop, undisturbed: tuple[list[dict[str, Any]], list[bytes], Any], done: int
) -> None:
    begin(loop)
    for _ in range(done):
        do(loop)
    before = sent(loop)
    loop.restart()
    planned(loop, None)
    fields, bodies = all_of(loop)
    assert (fields, bodies) == undisturbed[:2]
    assert before + sent(loop) == undisturbed[2]
    assert not loop.coordinator.bodies("control.abstain")


@pytest.mark.parametrize("done", range(1, len(TASKS) - 1))
def test_a_trainer_that_kept_its_state_is_given_only_what_comes_after_it(
    loop: Loop, undisturbed: tuple[list[dict[str, Any]], list[bytes], Any], done: int
) -> None:
    """The task that it did last is asked for again only where answers came of it, and it answers the same."""
    begin(loop)
    for _ in range(done):
        do(loop)
    before, stands = sent(loop), undisturbed[0][done - 1]
    loop.restart()
    planned(loop, {"task": stands["task"], "round": 1, "step": stands.get("step", 0), "exact": True})
    fields, bodies = all_of(loop)
    first = done - (stands["task"] == "GeneratePublic")
    assert (fields, bodies) == (undisturbed[0][first:], undisturbed[1][first:])
    assert before + sent(loop) == undisturbed[2]
    view = loop.bench.judge.view
    assert view.training is not None and (view.training.records, view.training.steps) == (6, 4)


def test_a_round_that_was_left_is_not_gone_on_with(loop: Loop) -> None:
    begin(loop)
    do(loop)
    loop.guard._shut_down()  # an orderly stop, which says so
    assert [(body.round, body.step) for _, raw in loop.coordinator.bodies("control.abstain")
            for body in (pb.Abstain.FromString(raw),)] == [(1, 0)]  # fmt: skip
    loop.restart()
    (plan,) = [message for message in loop.trainer.told if message.type == "plan"]
    assert "resume" not in plan.fields
    loop.trainer_says("planned", overlong={}, private_prompts=40)
    assert given(loop) == []


def test_a_kill_between_the_agreement_and_the_first_task_loses_no_round(loop: Loop) -> None:
    """The transcript says that the round has begun, and nothing else does yet."""
    loop.offer_plan()
    loop.show_round(1, codec.sha256_hex(ADAPTER))
    loop.turn()
    feeding = loop.guard.runs.run
    assert feeding is not None
    feeding.feed = lambda *events: (_ for _ in ()).throw(KeyboardInterrupt)  # type: ignore[method-assign]
    loop.coordinator.says("control.poll", "round.agreed", loop.signed_by("hospital_b", "hospital_c", "hospital_d"),
                          run="run-1", round=1)  # fmt: skip
    with pytest.raises(KeyboardInterrupt):
        loop.turn()
    loop.restart()
    planned(loop, None)
    assert [message.fields["task"] for message in given(loop)] == ["Evaluate"]


def test_a_repeated_round_that_ends_early_takes_no_rows_from_the_next(tmp_path: Path) -> None:
    file = tmp_path / "sampler.json"
    whole = PrivateSampler(40, b"s" * 32, 1)
    expected = []
    for number in (1, 2):
        whole.start_round(number)
        expected.append([whole.draw(3) for _ in range(4)])
    first = PrivateSampler(40, b"s" * 32, 1, file)
    first.start_round(1)
    assert [first.draw(3) for _ in range(4)] == expected[0]
    again = PrivateSampler(40, b"s" * 32, 1, file)
    again.start_round(1)
    assert again.draw(3) == expected[0][0]  # and killed
    third = PrivateSampler(40, b"s" * 32, 1, file)
    third.start_round(2)
    assert [third.draw(3) for _ in range(4)] == expected[1]


def test_a_trainer_that_dies_where_its_guard_does_not_know_the_rounds_beginning_is_not_led_astray() -> None:
    """After a guard's restart the first tasks are not known: only the trainer's own state leads back."""
    place = {"task": "PrivateStep", "round": 1, "step": 1, "exact": True}
    told, task = Given(), LinkMessage("task", {"task": "GeneratePublic", "round": 1, "step": 2})
    told.sent(LinkMessage("plan", {"canonical_json": "{}"}))
    told.heard(LinkMessage("planned", {"resumed": place}))
    told.sent(task)
    assert told.to_repeat(place) == [] and told.to_repeat(None) is None
    told.heard(LinkMessage("done", {"task": "GeneratePublic"}))
    told.sent(LinkMessage("task", {"task": "PublicStep", "round": 1, "step": 2}))
    assert told.to_repeat({**place, "task": "GeneratePublic", "step": 2}) == []
    assert told.to_repeat(place) is None and told.to_repeat(None) is None
    load = LinkMessage("task", {"task": "LoadAdapter", "round": 2, "step": 0})
    told.sent(load)
    told.heard(LinkMessage("done", {"task": "LoadAdapter"}))
    told.sent(LinkMessage("task", {"task": "PrivateStep", "round": 2, "step": 1}))
    assert told.to_repeat(None) == [load]


@pytest.mark.parametrize("lost", [False, True])
def test_T38_a_round_that_ends_while_the_line_is_lost_is_witnessed_all_the_same(loop: Loop, lost: bool) -> None:
    """Else the next round.open may meet a log that nobody has countersigned, and this silo stands aside for nothing."""
    begin(loop)
    while do(loop) != "ExportDelta":
        pass
    adapter = codec.encode_factors(
        {name: values + np.float32(1e-3) for name, values in codec.decode_factors(ADAPTER).tensors.items()},
        base_digest="", schema_sha256=setting.SCHEMA.digest, rank=2, scale=2.0, dtype="float32",
    )  # fmt: skip
    loop.coordinator.script.clear()
    result = loop.ended(committed=True, adapter_digest=codec.sha256_hex(adapter))
    for _ in range(1 + lost):  # not acknowledged, it comes again
        loop.coordinator.says("control.poll", "round.result", result, run="run-1", round=1)
    if lost:
        loop.coordinator.fails_at("control.fetch", UnreachableError("cut"))
    loop.coordinator.says("control.fetch", "global.adapter", adapter, run="run-1", round=1)
    before = len(loop.coordinator.sent)
    loop.turn(1 + lost)
    assert given(loop)[-1].fields["task"] == "Evaluate"
    done = pb.MetricsEval.FromString(evaluation())
    done.adapter_digest = codec.sha256_hex(adapter)
    loop.trainer_says("done", codec.encode(done), task="Evaluate", round=1, metrics={})
    said = [envelope.kind for envelope, _ in loop.coordinator.sent[before:]]
    assert [said.count(kind) for kind in ("control.fetch", "metrics.eval", "control.checkpoint")] == [1 + lost, 1, 1]
