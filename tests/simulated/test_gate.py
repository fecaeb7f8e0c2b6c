"""The gate with an in-memory channel: each refusal beside the passing message it differs from by one thing."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsilo.audit.log import sent_by_kind
from fedsilo.audit.record import Record
from fedsilo.audit.segments import LogFullError
from fedsilo.protocol import codec
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.errors import (
    ConflictError,
    DeniedError,
    NotAllowedError,
    OperationError,
    PeerError,
    UnreachableError,
)
from fedsilo.protocol.place import Place
from policies.grids import BitPatterns
from policies.kinds import adapters
from policies.message import Requests
from policies.model import Policy
from silo.guard import gate
from silo.guard.decisions import RunView
from silo.guard.gate import is_rebuilt
from silo.guard.messages import Allowed, Denied, Held, IngressDenied
from silo.sampling import Training
from tests.policies import setting
from tests.simulated.coordinator_parts import federation, played, until_quiet
from tests.world import OUR_KEY, Bench, Killed, failing, small_factors

A = "model.layers.0.self_attn.q_proj.lora_A"
B = "model.layers.0.self_attn.q_proj.lora_B"


def reasons(denied: object) -> tuple[str, ...]:
    assert isinstance(denied, Denied)
    return denied.decision.reasons


# ---- what leaves, and how -------------------------------------------------------------------------


def test_an_allowed_message_is_signed_recorded_first_and_counted(bench: Bench) -> None:
    seen_at_sending: list[str] = []
    bench.channel.on_send = lambda: seen_at_sending.extend(record["event"] for record in bench.audit.records())
    offered = bench.factors()
    assert isinstance(offered, Allowed)
    bench.gate.transmit(offered)
    envelope, payload = bench.channel.sent[0]
    OUR_KEY.public_key().verify(envelope.signature, codec.signing_bytes(envelope))
    assert envelope.payload_digest == hashlib.sha256(payload).digest()
    assert seen_at_sending == ["egress.decision"]  # durable before the bytes, the outcome after them
    assert [record["event"] for record in bench.audit.records()][1:] == [
        "egress.sent", "ingress.decision", "egress.acked",
    ]  # fmt: skip
    assert sent_by_kind(map(Record, bench.audit.records())) == {"lora.factors": (1, len(payload))}
    decision = bench.events("egress.decision")[0]
    assert decision["facts"]["final"]["l2"] == pytest.approx(0.001 * np.sqrt(12 + 8), rel=1e-6)
    assert {rule["rule"] for rule in decision["rules"]} >= {"kind", "sender"}


def test_T07_a_delta_over_the_limit_is_clipped_and_the_clipped_bytes_are_judged_and_sent(bench: Bench) -> None:
    block = bench.policy.file.egress.lora_factors
    assert block is not None
    offered = bench.factors(small_factors(10.0))
    assert isinstance(offered, Allowed)
    values = np.concatenate([array.ravel() for array in codec.decode_factors(offered.payload).tensors.values()])
    assert float(np.sqrt((values.astype(float) ** 2).sum())) == pytest.approx(block.clip_l2, rel=1e-4)
    record = bench.events("egress.decision")[0]
    assert record["facts"]["offered"]["l2"] == pytest.approx(10.0 * np.sqrt(20))
    assert record["payload"]["sha256"] != record["payload"]["sha256_before"]


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda t: t | {"extra": np.zeros(3, np.float32)}, "TENSOR_SET"),
        (lambda t: t | {A: np.zeros((3, 6), np.float32)}, "TENSOR_SHAPE"),
        (lambda t: t | {B: np.full((4, 2), np.nan, np.float32)}, "NOT_FINITE"),
    ],
    ids=["T01-extra", "T02-shape", "T04-nan"],
)
def test_T01_T02_T04_a_wrong_tensor_denies_and_nothing_is_sent(
    bench: Bench, change: Callable[[Tensors], Tensors], code: str
) -> None:
    denied = reasons(bench.factors(change(small_factors())))
    assert code in denied or "TRANSFORM_FAILED" in denied, denied
    assert bench.channel.sent == []
    record = bench.events("egress.decision")[0]
    assert (record["decision"], tuple(record["reasons"])) == ("deny", denied)
    assert len(record["rules"]) > 10  # every rule's verdict, not the first refusal only


def test_T03_equal_values_make_equal_bytes_whatever_the_trainer_put_around_them(bench: Bench) -> None:
    noisy = {name: np.asfortranarray(array) for name, array in reversed(list(small_factors().items()))}
    first, second = bench.factors(), bench.factors(noisy)
    assert isinstance(first, Allowed)
    # The second of the round is denied by count; its bytes in the record are the same.
    assert isinstance(second, Denied)
    of_first, of_second = (record["payload"] for record in bench.events("egress.decision"))
    assert of_first["sha256_before"] == of_second["sha256"]


def test_T12_answers_leave_only_to_the_prompts_of_the_open_step_and_only_right_ones(bench: Bench) -> None:
    assert isinstance(bench.responses((5, ("12",))), Denied)  # a public row, but not of this step
    assert isinstance(bench.responses((1, ("12", "patient 17"))), Denied)  # graded again here: wrong
    assert isinstance(bench.responses((1, ("12",)), step=4), Denied)  # not the open step
    assert isinstance(bench.responses((4, ()), (1, ("12",)), (7, ())), Denied)  # T9: in another order
    assert isinstance(bench.factors(base="cd" * 32), Denied)
    assert bench.channel.sent == []
    assert isinstance(bench.responses(), Allowed) and isinstance(bench.factors(), Allowed)


def test_T09_a_metric_off_the_grid_is_denied_and_on_it_passes(bench: Bench) -> None:
    def offered(value: float) -> object:
        body = pb.MetricsEval(split="held_out", adapter_digest=setting.BASE_DIGEST)
        body.metrics.add(name="pass_at_1", value=value)
        return bench.gate.offer(bench.judge.view.place("metrics.eval", 1), body)

    assert isinstance(offered(0.28171234567), Denied)
    assert isinstance(offered(0.2817), Allowed)


def test_T40_no_answer_and_no_plain_digest_of_it_is_in_the_log(bench: Bench) -> None:
    secret = "canary-5512"
    bench.responses((1, (secret,)))
    bench.responses((1, ("12",)))
    text = json.dumps(list(bench.audit.records()))
    assert secret not in text
    payload = codec.encode(setting.responses_body((1, ("12",))))
    assert hashlib.sha256(payload).hexdigest() not in text


def test_a_policy_that_names_no_kind_lets_not_even_a_poll_out(tmp_path: Path) -> None:
    with closing(Bench(tmp_path / "a", setting.policy_of(setting.policy_text("deny_all")))) as bench:
        with pytest.raises(DeniedError):
            bench.poll()
        assert bench.channel.sent == []
        assert bench.events("egress.decision")[0]["decision"] == "deny"


# ---- sequences, crashes ---------------------------------------------------------------------------


def test_T29_the_sequence_goes_on_after_a_restart(bench: Bench) -> None:
    bench.poll()
    bench.poll()
    with closing(bench.restart()) as again:
        again.poll()
        numbers = [envelope.sequence for envelope, _ in bench.channel.sent + again.channel.sent]
        assert numbers == sorted(set(numbers)) and len(numbers) == 3


def test_T39_killed_between_record_and_send_is_indeterminate_and_the_same_bytes_go_out_later(bench: Bench) -> None:
    offered = bench.factors()
    assert isinstance(offered, Allowed)
    bench.channel.fails, bench.channel.before_sending = Killed(), True
    with pytest.raises(Killed):
        bench.gate.transmit(offered)
    again = bench.restart()
    assert [record["link"]["decision"] for record in again.events("egress.indeterminate")] == [offered.decision_seq]
    (item,) = again.ledger.outbox("allowed")
    again.gate.retry(item)
    envelope, payload = again.channel.sent[0]
    assert payload == offered.payload
    assert envelope.sequence > offered.sequence and envelope.attempt == 1
    assert again.ledger.outbox("allowed") == []
    # The count of the round was made before the kill and stands.
    assert isinstance(again.factors(small_factors(0.002)), Denied)
    again.close()


def test_an_unreachable_coordinator_leaves_the_message_in_the_outbox(bench: Bench) -> None:
    offered = bench.factors()
    assert isinstance(offered, Allowed)
    bench.channel.fails = UnreachableError("nothing listens there")
    with pytest.raises(UnreachableError):
        bench.gate.transmit(offered)
    assert [record["event"] for record in bench.audit.records()][-1] == "egress.indeterminate"
    bench.channel.fails = None
    bench.gate.retry(bench.ledger.outbox("allowed")[0])
    assert sent_by_kind(map(Record, bench.audit.records()))["lora.factors"][0] == 1


def test_T39_what_cannot_be_recorded_is_not_sent_and_the_gate_stays_halted(bench: Bench) -> None:
    with failing(bench.audit, "append", LogFullError("no space to record it")), pytest.raises(LogFullError):
        bench.poll()
    with pytest.raises(OperationError) as refused:
        bench.poll()
    assert refused.value.code == "HALTED"
    assert bench.channel.sent == []


# ---- the way in -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "code"),
    [
        ("sender", "spiffe://cardio-net/silo/hospital_b", "SENDER_MISMATCH"),
        ("federation", "other-net", "SENDER_MISMATCH"),
        ("round", 3, "SIGNATURE_INVALID"),
        ("payload_digest", b"\0" * 32, "DIGEST_MISMATCH"),
    ],
)
def test_T29_T30_an_answer_changed_on_the_way_is_refused(bench: Bench, field: str, value: object, code: str) -> None:
    bench.channel.tamper = lambda envelope: setattr(envelope, field, value)
    with pytest.raises(PeerError) as refused:
        bench.poll()
    assert refused.value.code == code
    assert bench.events("ingress.decision")[-1]["reasons"] == [code]


def test_T30_another_partys_valid_signature_is_refused(bench: Bench) -> None:
    bench.channel.key = OUR_KEY
    with pytest.raises(PeerError) as refused:
        bench.poll()
    assert refused.value.code == "SIGNATURE_INVALID"


def test_T29_a_replayed_answer_is_refused(bench: Bench) -> None:
    bench.poll()
    bench.channel.sequence -= 1
    with pytest.raises(PeerError) as refused:
        bench.poll()
    assert refused.value.code == "SEQUENCE_REPLAYED"


def test_T12_a_round_that_names_rows_outside_the_public_set_is_denied(bench: Bench) -> None:
    def opens(row: int) -> Any:
        step = pb.PublicStep(step=2, prompt_indices=[row])
        return bench.poll("round.open", pb.RoundOpen(base_digest="cd" * 32, public_steps=[step]), round=2)

    with pytest.raises(IngressDenied):
        opens(10)  # the set has rows 0 to 9
    assert isinstance(opens(9), pb.RoundOpen)


@pytest.mark.parametrize(("ruleset", "wrong"), [("pubswap", False), ("pubswap-random", True)])
def test_T21_donors_that_grade_wrong_here_are_dropped_and_counted(tmp_path: Path, ruleset: str, wrong: bool) -> None:
    """They survive where the policy does not verify them."""
    body = setting.donors_message((1, "hospital_b", "12"), (1, "hospital_b", "13")).body
    with closing(Bench(tmp_path / "a", setting.policy_of(setting.policy_text(ruleset)))) as bench:
        taken = bench.poll("public.donors", body, step=2)
        assert [donor.response.text for donor in taken.prompts[0].donors] == ["12", "13"][: 1 + wrong]
        dropped = bench.events("ingress.decision")[-1]["facts"]["transform"]["donors_dropped"]
        assert dropped == ({} if wrong else {"hospital_b": 1})


def test_an_answer_that_is_refused_leaves_nothing_in_the_outbox(bench: Bench) -> None:
    offered = bench.factors()
    assert isinstance(offered, Allowed)
    bench.channel.tamper = lambda envelope: setattr(envelope, "federation", "other-net")
    with pytest.raises(PeerError):
        bench.gate.transmit(offered)
    assert bench.ledger.outbox("allowed") == []
    assert sent_by_kind(map(Record, bench.audit.records()))["lora.factors"][0] == 1


@pytest.mark.parametrize("error", [ValueError("no norm"), OverflowError("too large")])
def test_T07_what_cannot_be_made_fit_is_denied_and_recorded(bench: Bench, error: Exception) -> None:
    with failing(gate, "transform_factors", error):
        offered = bench.factors()
    record = bench.events("egress.decision")[0]
    assert reasons(offered) == ("TRANSFORM_FAILED",)
    assert (record["decision"], record["reasons"]) == ("deny", ["TRANSFORM_FAILED"])
    assert record["rules"][-1]["measured"] == type(error).__name__
    assert bench.channel.sent == [] and isinstance(bench.factors(), Allowed)


# ---- approvals ------------------------------------------------------------------------------------


def test_T36_a_held_release_goes_out_byte_for_byte_after_one_approval(holding: Bench) -> None:
    release = holding.hold(holding.factors())
    assert release.id == "r1/hospital_a/0" and holding.channel.sent == []
    settled = holding.approve(release)
    assert settled is not None and settled.allowed is not None
    holding.gate.transmit(settled.allowed)
    assert codec.sha256_hex(holding.channel.sent[0][1]) == release.digest
    decision = holding.events("egress.decision")[-1]
    (grant,) = holding.events("approval.grant")
    assert decision["decision"] == "allow" and decision["link"]["approvals"] == [grant["seq"]]
    assert grant["detail"]["person"] == "alice"
    with pytest.raises(ConflictError):  # single use
        holding.approve(release, "bob")


def test_T40_no_plain_digest_of_a_held_answer_is_in_the_log(tmp_path: Path) -> None:
    """A held factor set is too long to guess and keeps its plain digest; answers to public prompts do not."""
    text = setting.policy_text(first_rounds=1)
    place = text.index("  public.responses:")
    text = text[:place] + text[place:].replace("first_rounds: 0", "first_rounds: 1", 1)
    with closing(Bench(tmp_path / "a", setting.policy_of(text))) as bench:
        answers = bench.hold(bench.responses((1, ("12",))))
        assert answers.digest not in json.dumps(list(bench.audit.records()))
        update = bench.hold(bench.factors())
        of_answers, of_update = (asked["payload"] for asked in bench.events("approval.request"))
        assert set(of_answers) == {"bytes", "hmac_sha256"} and of_update["sha256"] == update.digest


def test_T36_held_survives_a_restart_and_is_sent_as_it_was(holding: Bench) -> None:
    release = holding.hold(holding.factors())
    yes = holding.answer(release)
    with closing(holding.restart()) as again:
        again.releases.rejudge_held()
        _, settled = again.releases.approve(yes)
        assert settled is not None and settled.allowed is not None
        assert codec.sha256_hex(settled.allowed.payload) == release.digest


def test_T36_an_approval_of_other_digests_or_by_the_wrong_person_frees_nothing(holding: Bench) -> None:
    release = holding.hold(holding.factors())
    for wrong in ({"digest": "0" * 64}, {"policy_digest": "0" * 64}):
        with pytest.raises(ConflictError) as refused:
            holding.approve(release, **wrong)
        assert refused.value.code == "STALE_VIEW"
    with pytest.raises(NotAllowedError):
        holding.releases.approve(replace(holding.answer(release), roles=frozenset({"operator"})))
    assert holding.ledger.releases("held") and holding.channel.sent == []


def test_T36_stored_bytes_changed_under_the_approval_are_not_sent(holding: Bench) -> None:
    release = holding.hold(holding.factors())
    yes = holding.answer(release)
    (holding.folder / "payloads" / release.digest).write_bytes(b"other")
    with pytest.raises(ConflictError) as refused:
        holding.releases.approve(yes)
    assert refused.value.code == "TAMPERED"
    assert holding.channel.sent == []
    assert holding.ledger.release(release.id).state == "denied"


def test_T36_a_changed_policy_voids_the_view_that_was_approved(holding: Bench) -> None:
    release = holding.hold(holding.factors())
    yes = holding.answer(release)
    with closing(holding.restart(setting.policy_of(setting.policy_text(first_rounds=2)))) as again:
        again.releases.rejudge_held()
        with pytest.raises(ConflictError):
            again.releases.approve(yes)
        assert again.approve(release, revision=again.ledger.release(release.id).revision) is not None


def test_a_rejection_ends_the_hold_and_sends_nothing(holding: Bench) -> None:
    release = holding.hold(holding.factors())
    assert holding.reject(release).outcome == "denied" and holding.ledger.release(release.id).state == "rejected"
    assert holding.channel.sent == []
    assert holding.events("approval.deny")[0]["reasons"] == ["CONTENT"]


def test_T36_silence_is_a_no_and_a_clock_set_back_revives_nothing(holding: Bench) -> None:
    release = holding.hold(holding.factors())
    yes = holding.answer(release)
    holding.clock_now += holding.policy.file.approvals.expiry_hours * 3600 + 1
    (settled,) = holding.releases.expire()
    assert settled.outcome == "denied" and holding.ledger.release(release.id).state == "expired"
    holding.clock_now = setting.NOW
    with pytest.raises(ConflictError):
        holding.releases.approve(yes)


def test_a_person_is_told_which_run_the_difference_is_against(holding: Bench) -> None:
    held = holding.hold(holding.factors())
    holding.clock_now += 1
    settled = holding.approve(held)
    assert settled is not None and settled.allowed is not None
    holding.gate.transmit(settled.allowed)
    first = holding.view(holding.ledger.release(held.id))
    assert first["difference"] == "first release, nothing to compare"  # what left afterwards is no earlier release
    approvals = next(rule for rule in first["policy"]["rules"] if rule["rule"] == "approvals")
    assert (approvals["outcome"], approvals["measured"], first["policy"]["counts"]["hold"]) == ("ok", 1, 0)
    for run, against in (("run-1", "round 1 of this run"), ("run-2", "round 1 of the earlier run run-1")):
        later = replace(
            held, id=f"r7/{run}", place=Place(run, 7, 0, "lora.factors"), digest="1" * 64,
            payload_bytes=held.payload_bytes + 5, requested_at=holding.clock_now + 1,
        )  # fmt: skip
        assert holding.view(later)["difference"].startswith(f"+5 bytes against {against}; ")


def test_the_ledger_names_the_newest_run_also_when_it_is_over(bench: Bench) -> None:
    assert bench.ledger.last_run() == ("", "")
    bench.ledger.start_run("run-1", "{}")
    assert bench.ledger.last_run() == ("run-1", "running")
    bench.ledger.end_run("run-1", "finished")
    assert bench.ledger.last_run() == ("run-1", "finished")
    bench.ledger.decline_run("run-2")
    assert bench.ledger.last_run() == ("run-2", "declined")


def evaluation(digest: str) -> pb.MetricsEval:
    return pb.MetricsEval(split="held_out", adapter_digest=digest, metrics=[pb.Metric(name="pass_at_1", value=0.25)])


def test_T09_an_evaluation_leaves_with_the_digest_that_the_coordinator_announced_and_no_other(bench: Bench) -> None:
    def leaves(number: int, digest: str) -> bool:
        return isinstance(bench.gate.offer(bench.judge.view.place("metrics.eval", number), evaluation(digest)), Allowed)

    first, second = "ab" * 32, "cd" * 32
    bench.judge.view = RunView(setting.PLAN).opened(1, pb.RoundOpen(base_digest="ef" * 32))
    assert not leaves(1, first)
    bench.judge.view = bench.judge.view.evaluating(first)
    assert not leaves(1, second)
    # The next round opens while the trainer still evaluates, and the silo is started again.
    bench.judge.view = bench.judge.view.opened(2, pb.RoundOpen(base_digest=first)).evaluating(second)
    bench.judge.view = RunView.from_json(setting.PLAN, json.loads(json.dumps(bench.judge.view.to_json())))
    assert leaves(1, first)
    assert not leaves(2, first) and leaves(2, second)
    assert not leaves(0, first) and leaves(0, "")


def test_T09_progress_beyond_the_plan_is_not_said(bench: Bench) -> None:
    bench.gate.send(bench.judge.view.place("control.progress", 1, 4), pb.Progress(round=1, step=4))
    for number, step in ((1, 5), (2, 1)):
        body = pb.Progress(round=number, step=step)
        with pytest.raises(DeniedError):
            bench.gate.send(bench.judge.view.place("control.progress", number, step), body)
    with pytest.raises(DeniedError):
        bench.gate.send(bench.judge.view.place("control.progress", 1, 4), pb.Progress(round=1, step=3))
    assert bench.channel.kinds() == ["control.progress"]


def test_a_view_comes_back_from_the_ledger_in_the_bytes_of_the_first_version() -> None:
    view = RunView(
        setting.PLAN, 7, "base", 1.5, steps={2: (1, 4), 10: ()}, last_adapter="last", last_adapter_round=5,
        told_adapter="told", told_round=6, open_step=2, agreeing=True, pool=frozenset("cab"), evaluated={10: "x"},
        asked=Requests(2, {1: (2, 3)}, {4: 5}, 1, "peer", "give"), usable_records=40, training=Training(6, 1, 4, 40),
        refused_round=8, witnesses=2,
    )  # fmt: skip
    stored = (
        '{"round": 7, "base_digest": "base", "base_l2": 1.5, "steps": {"2": [1, 4], "10": []}, "last_adapter": "last", '
        '"last_adapter_round": 5, "told_adapter": "told", "told_round": 6, "open_step": 2, "agreeing": true, '
        '"pool": ["a", "b", "c"], "evaluated": {"10": "x"}, "asked": {"step": 2, "exemplars": [[1, [2, 3]]], '
        '"candidates": [[4, 5]], "match": 1, "peer": "peer", "part": "give"}, "usable_records": 40, '
        '"training": {"records": 6, "epochs": 1, "steps": 4, "of": 40}}'
    )
    assert json.dumps(view.to_json()) == stored
    assert RunView.from_json(setting.PLAN, json.loads(stored)) == replace(view, refused_round=0, witnesses=None)
    assert RunView.from_json(setting.PLAN, {}) == RunView(setting.PLAN), "as of a version that kept none of these"


def test_T36_opening_round_2_first_does_not_free_the_first_release(holding: Bench) -> None:
    holding.judge.view = RunView(setting.PLAN, 2, setting.BASE_DIGEST, 1.0, training=Training(6, 1, 4))
    header = pb.Factors(base_digest=setting.BASE_DIGEST)
    offered = holding.gate.offer(holding.judge.view.place("lora.factors", 2), header, tensors=small_factors())
    assert isinstance(offered, Held)


def test_a_round_that_opens_again_is_its_redelivery_or_not_let_in(bench: Bench) -> None:
    steps = [pb.PublicStep(step=2, prompt_indices=[1, 4, 7]), pb.PublicStep(step=4, prompt_indices=[0, 2, 3])]
    body = pb.RoundOpen(base_digest="cd" * 32, public_steps=steps)
    bench.poll("round.open", body, round=2)
    bench.judge.view = bench.judge.view.opened(2, body)
    bench.poll("round.open", body, round=2)
    restored = RunView.from_json(setting.PLAN, json.loads(json.dumps(bench.judge.view.to_json())))
    assert restored.witnesses is None  # nobody's word is carried over a restart: joining asks again
    bench.judge.view = restored.witnessed(1)
    bench.poll("round.open", body, round=2)  # killed before the acknowledgement was sent
    for changed, number in ((pb.RoundOpen(base_digest="ef" * 32, public_steps=steps), 2), (body, 1)):
        with pytest.raises(IngressDenied):
            bench.poll("round.open", changed, round=number)
    bench.poll("round.open", body, round=3)


def test_a_round_that_was_not_let_in_can_be_abstained_from(bench: Bench) -> None:
    body = pb.Abstain(round=3)
    with pytest.raises(DeniedError):
        bench.gate.send(Place("run-1", 3, 0, "control.abstain"), body)
    for view in (bench.judge.view.refused(3), RunView().refused(3)):
        bench.judge.view = view
        bench.gate.send(Place("run-1", 3, 0, "control.abstain"), body)
    bench.judge.view = bench.judge.view.refused(3)
    with pytest.raises(DeniedError):
        bench.gate.send(Place("run-1", 4, 0, "control.abstain"), pb.Abstain(round=4))


@pytest.mark.slow
def test_T09_the_coordinator_takes_no_evaluation_that_names_another_adapter(tmp_path: Path) -> None:
    house, silos = played(tmp_path, mute={3: {"metrics.eval"}})
    committed = house.round(1).adapter_digest
    body = evaluation("cd" * 32)
    refused = silos[3].say("metrics.eval", body, run="run-1", number=1)
    assert isinstance(refused, pb.Refusal) and refused.code == "INGRESS_DENIED"
    body.adapter_digest = committed
    assert isinstance(silos[3].say("metrics.eval", body, run="run-1", number=1), pb.Ack)
    body.adapter_digest = committed
    assert isinstance(silos[3].say("metrics.eval", body, run="run-1", number=0), pb.Refusal)
    body.adapter_digest = ""
    assert isinstance(silos[3].say("metrics.eval", body, run="run-1", number=0), pb.Ack)


@pytest.mark.slow
def test_what_a_late_silo_says_of_an_earlier_round_is_taken_and_of_a_later_one_not(tmp_path: Path) -> None:
    house, silos = federation(tmp_path)
    house.submit()
    silos[3].mute = {"metrics.eval"}
    for silo in silos:
        silo.join()
    until_quiet(silos)
    assert house.round(2).state == "committed"
    for number, answer in ((1, pb.Ack), (2, pb.Ack), (3, pb.Refusal)):
        said = silos[3].say("control.progress", pb.Progress(round=number, step=1), run="run-1", number=number, step=1)
        assert isinstance(said, answer), number


FLOAT32 = setting.policy_of(setting.policy_text())
BFLOAT16 = setting.edited('grid: "float32"', 'grid: "bfloat16"')
Tensors = dict[str, np.ndarray[Any, Any]]


def drawn(scale: float = 1e-3) -> Tensors:
    draws = np.random.default_rng(3)
    return {name: (scale * draws.standard_normal(shape)).astype(np.float32) for name, shape in setting.SCHEMA.tensors}


def body_of(tensors: Tensors, **changes: Any) -> bytes:
    """As a trainer writes it."""
    schema = setting.SCHEMA
    header: dict[str, Any] = {
        "base_digest": setting.BASE_DIGEST, "schema_sha256": schema.digest, "rank": schema.rank, "scale": schema.scale,
        "dtype": schema.dtype,
    }  # fmt: skip
    return codec.encode_factors(tensors, **header | changes)


def offered(folder: Path, policy: Policy, body: bytes, read_from: bytes | None) -> tuple[Any, dict[str, Any]]:
    """What became of it, and its record without what each record has of its own."""
    bench = Bench(folder, policy)
    try:
        factors = codec.decode_factors(body)
        made = bench.gate.offer(
            bench.judge.view.place("lora.factors", 1), factors.header, tensors=factors.tensors,
            read_from=factors.payload if read_from is None else read_from,
        )  # fmt: skip
        record = bench.events("egress.decision")[0]
    finally:
        bench.close()
    return made, {name: value for name, value in record.items() if name not in ("ledger", "mono", "salt", "time")}


def test_T03_canonical_bytes_leave_as_they_came_and_the_record_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = []
    add = BitPatterns.add
    monkeypatch.setattr(
        adapters.BitPatterns, "add", lambda self, values, **known: passes.append(add(self, values, **known))
    )
    body = body_of(drawn())
    once, record = offered(tmp_path / "once", FLOAT32, body, None)
    measured_once = len(passes)
    again, rebuilt = offered(tmp_path / "again", FLOAT32, body, b"")
    assert isinstance(once, Allowed) and isinstance(again, Allowed)
    assert once.payload is body and again.payload is not body
    assert (bytes(again.payload), again.digest) == (body, once.digest)
    assert record == rebuilt
    assert len(passes) - measured_once == 2 * measured_once > 0


def minus_zero(tensors: Tensors) -> Tensors:
    next(iter(tensors.values())).flat[0] = -0.0
    return tensors


def denormal(tensors: Tensors) -> Tensors:
    list(tensors.values())[-1].flat[-1] = np.float32(1e-40)
    return tensors


def raw(tensors: Tensors, **changes: Any) -> bytes:
    """The same with values as they are: `encode_factors` would make them canonical."""
    placeholder = codec.decode_factors(body_of(small_factors(), **changes))
    return codec.factors_start(placeholder.header) + b"".join(tensors[name].tobytes() for name in sorted(tensors))


@pytest.mark.parametrize(
    ("policy", "body"),
    [
        (FLOAT32, raw(minus_zero(drawn()))),
        (FLOAT32, raw(denormal(drawn()))),
        (FLOAT32, body_of(drawn(10.0))),  # clipped
        (BFLOAT16, body_of(drawn())),  # rounded
        (FLOAT32, body_of(drawn(), schema_sha256="")),  # of the header only what the rules judge is taken over
        (FLOAT32, body_of(drawn(), scale=setting.SCHEMA.scale * 2)),
    ],
    ids=["T04-minus-zero", "T04-denormal", "clipped", "rounded", "schema", "scale"],
)
def test_T03_T04_anything_else_is_rebuilt(tmp_path: Path, policy: Policy, body: bytes) -> None:
    made, record = offered(tmp_path / "offered", policy, body, None)
    again, rebuilt = offered(tmp_path / "again", policy, body, b"")
    assert isinstance(made, Allowed) and isinstance(again, Allowed)
    assert record == rebuilt
    assert made.payload is not body and bytes(made.payload) == bytes(again.payload) != body


@pytest.mark.parametrize("change", [lambda body: body + b"\0", lambda body: body[:-1]], ids=["longer", "shorter"])
def test_T03_what_is_no_payload_is_not_sent(tmp_path: Path, change: Callable[[bytes], bytes]) -> None:
    body = body_of(drawn())
    with pytest.raises(PeerError, match="its header says"):
        offered(tmp_path / "offered", FLOAT32, body, change(body))


def test_T04_what_is_judged_is_what_the_bytes_hold_and_nothing_that_is_said_of_them(tmp_path: Path) -> None:
    """Other values than were named beside the bytes are those that are judged."""
    tensors = drawn()
    tensors[min(tensors)].flat[1] = np.nan
    made, record = offered(tmp_path / "offered", FLOAT32, body_of(drawn()), raw(tensors))
    assert isinstance(made, Denied)
    assert any("FINITE" in reason for reason in record["reasons"])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_T04_what_is_not_finite_is_denied_as_before(tmp_path: Path, value: float) -> None:
    tensors = drawn()
    tensors[min(tensors)].flat[1] = value
    made, record = offered(tmp_path / "offered", FLOAT32, raw(tensors), None)
    again, rebuilt = offered(tmp_path / "again", FLOAT32, raw(tensors), b"")
    assert isinstance(made, Denied) and isinstance(again, Denied)
    assert record == rebuilt


@pytest.mark.parametrize("change", [lambda row: row | {"elements": row["elements"] - 1}, lambda row: {}])
def test_facts_that_do_not_cover_each_value_let_nothing_leave_as_it_came(
    change: Callable[[dict[str, Any]], dict[str, Any]],
) -> None:
    body = body_of(drawn())
    header = codec.decode_factors(body).header
    facts = {"values_not_canonical": 0, "elements": sum(array.size for array in drawn().values())}
    assert is_rebuilt(body, header, len(body), facts)
    assert not is_rebuilt(body, header, len(body), change(facts))
