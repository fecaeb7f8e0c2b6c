"""The guard's loop against a coordinator that answers wrongly or not at all, and a trainer that says nonsense."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fedsilo.protocol import codec
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.errors import DeniedError, FedSiloError, UnreachableError
from fedsilo.protocol.tasks import ExportDelta
from silo.config import SiloConfig
from silo.guard import loop as guard_loop
from silo.guard.site import never_shown
from silo.guard.trainer_process.supervisor import TrainerGone
from silo.sampling import PrivateSampler, Training
from tests.policies import setting
from tests.world import ADAPTER, Loop

LOST = UnreachableError("the line is down")
WRONG_ADAPTER = codec.encode_factors(
    {"other": next(iter(codec.decode_factors(ADAPTER).tensors.values()))},
    base_digest="", schema_sha256=setting.SCHEMA.digest, rank=2, scale=2.0, dtype="float32",
)  # fmt: skip


def in_round(loop: Loop, adapter: bytes = ADAPTER) -> None:
    """Plan accepted, round 1 open, base evaluated; the adapter's fetch is answered with `adapter`."""
    loop.offer_plan()
    loop.open_round(adapter=adapter)
    loop.coordinator.says("control.fetch", "global.adapter", adapter, run="run-1", round=1)
    loop.base_evaluated()


def abstained(loop: Loop) -> list[tuple[int, int]]:
    return [(body.round, body.step) for _, raw in loop.coordinator.bodies("control.abstain")
            for body in (pb.Abstain.FromString(raw),)]  # fmt: skip


# ---- progress ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("said", [3, 0xDEADBEEF, -1, "x", None])
def test_T09_progress_carries_the_step_that_was_given_and_not_what_the_trainer_says(loop: Loop, said: object) -> None:
    in_round(loop)
    loop.trainer_says("done", task="LoadAdapter", round=1, metrics={})
    loop.trainer_says("step", round=said, step=said, phase="rollout")
    envelope, payload = loop.coordinator.bodies("control.progress")[-1]
    told = pb.Progress.FromString(payload)
    assert (told.round, told.step, envelope.round, envelope.step) == (1, 1, 1, 1)


# ---- what a round is trained on ---------------------------------------------------------------------


def test_T07_the_guard_hands_out_the_rows_and_an_update_is_judged_by_them(loop: Loop) -> None:
    plan = setting.PLAN.model_copy(update={"method": "fedavg-grpo"})
    loop.offer_plan(plan)
    loop.open_round(plan=plan, public=False)
    loop.coordinator.says("control.fetch", "global.adapter", ADAPTER, run="run-1", round=1)
    loop.base_evaluated()
    for task in ("LoadAdapter", *["PrivateStep"] * 4):
        assert loop.bench.judge.view.training is None
        loop.trainer_says("done", task=task, round=1, metrics={})
    handed = [message.fields["rows"] for message in loop.trainer.told if message.fields.get("task") == "PrivateStep"]
    sampler = PrivateSampler(40, b"s" * 32, setting.PLAN.seed)  # the trainer said that it has 40
    assert handed == [sampler.draw(3) for _ in range(4)]
    update = codec.encode_factors(
        {name: values * np.float32(1e-3) for name, values in codec.decode_factors(ADAPTER).tensors.items()},
        base_digest=codec.sha256_hex(ADAPTER), schema_sha256=setting.SCHEMA.digest, rank=2, scale=2.0, dtype="float32",
    )  # fmt: skip
    loop.trainer_says("done", update, task="ExportDelta", round=1, metrics={"records": 1})
    (decided,) = [each for each in loop.bench.events("egress.decision") if each["kind"] == "lora.factors"]
    facts = decided["facts"]["final"]
    assert (decided["decision"], facts["records"], facts["epochs"], facts["steps"]) == ("allow", 12, 1, 4)
    loop.restart()
    assert loop.bench.judge.view.training == Training(12, 1, 4, of=40), (
        "a release that is held over a restart is judged alike"
    )


def test_T07_no_private_step_is_given_before_the_trainer_has_said_how_many_prompts_it_has(loop: Loop) -> None:
    in_round(loop)
    run = loop.guard.runs.run
    assert run is not None
    run._task_giver = None
    loop.trainer_says("done", task="LoadAdapter", round=1, metrics={})
    assert loop.guard.failure is not None and loop.guard.failure.code == "TRAINER_CONFUSED"
    assert "PrivateStep" not in loop.trainer.tasks()


# ---- an adapter that is not let in ------------------------------------------------------------------


def test_an_adapter_that_is_let_in_is_loaded(loop: Loop) -> None:
    in_round(loop)
    assert loop.trainer.tasks() == ["Evaluate", "LoadAdapter"]
    assert abstained(loop) == []


def test_a_denied_adapter_ends_the_round_here_and_the_loop_polls_on(loop: Loop) -> None:
    in_round(loop, WRONG_ADAPTER)
    assert abstained(loop) == [(1, 0)]
    fetches, polls = len(loop.coordinator.bodies("control.fetch")), len(loop.coordinator.bodies("control.poll"))
    loop.turn(5)
    assert len(loop.coordinator.bodies("control.fetch")) == fetches == 1
    assert len(loop.coordinator.bodies("control.poll")) == polls + 5
    # The next round is one like any other.
    loop.coordinator.says("control.fetch", "global.adapter", ADAPTER, run="run-1", round=2)
    loop.open_round(2)
    loop.base_evaluated()
    assert loop.trainer.tasks()[-1] == "LoadAdapter"


def test_a_denied_answer_does_not_take_in_the_item_before_it(loop: Loop) -> None:
    loop.offer_plan()
    loop.open_round(adapter=WRONG_ADAPTER)
    loop.coordinator.says("control.fetch", "global.adapter", WRONG_ADAPTER, run="run-1", round=1)
    taken = loop.bench.ledger.acknowledged
    loop.base_evaluated()
    assert loop.bench.ledger.acknowledged == taken < loop.coordinator.sequence


def test_a_coordinator_that_has_no_adapter_does_not_silence_the_loop(loop: Loop) -> None:
    loop.offer_plan()
    loop.open_round()
    loop.coordinator.says("control.fetch", "control.refusal", pb.Refusal(code="NOT_FOUND"))
    loop.base_evaluated()
    assert abstained(loop) == [(1, 0)]
    polls = len(loop.coordinator.bodies("control.poll"))
    loop.turn(3)
    assert len(loop.coordinator.bodies("control.poll")) == polls + 3


def test_an_adapter_that_a_lost_line_kept_back_is_fetched_again(loop: Loop) -> None:
    loop.offer_plan()
    loop.open_round()
    loop.coordinator.fails_at("control.fetch", LOST)
    loop.coordinator.says("control.fetch", "global.adapter", ADAPTER, run="run-1", round=1)
    loop.base_evaluated()
    loop.turn(2)
    assert (loop.trainer.tasks()[-1], abstained(loop)) == ("LoadAdapter", [])


# ---- a hello that the policy does not let out --------------------------------------------------------


def after_hellos(loop: Loop, number: int) -> FedSiloError | None:
    """The guard's end, if so many hellos within a minute are one."""
    for _ in range(number):
        loop.guard._client.joined = False
        loop.turn()
    return loop.guard.failure


def test_T11_a_hello_over_the_rate_waits_and_ends_neither_silo_nor_run(tmp_path: Path) -> None:
    text = setting.policy_text().replace("control_messages_per_minute: 600", "control_messages_per_minute: 4")
    loop = Loop(tmp_path / "a", setting.policy_of(text))
    try:
        assert after_hellos(loop, 6) is None and not loop.guard._client.joined
        denied = [row for row in loop.bench.events("egress.decision") if row["decision"] == "deny"]
        assert {(row["kind"], *row["reasons"]) for row in denied} == {("control.hello", "MESSAGE_RATE")}
        loop.bench.clock_now += 61.0
        loop.turn()
        assert loop.guard._client.joined and loop.guard.failure is None
    finally:
        loop.close()


def test_a_first_hello_that_the_policy_does_not_name_is_the_end(tmp_path: Path) -> None:
    text = setting.policy_text().replace("[hello, poll,", "[poll,")
    loop = Loop(tmp_path / "a", setting.policy_of(text))
    try:
        failure = after_hellos(loop, 1)
        assert isinstance(failure, DeniedError) and failure.code != "MESSAGE_RATE"
    finally:
        loop.close()


# ---- an answer that is refused ----------------------------------------------------------------------


@pytest.mark.parametrize("answer", [b"\xff\xff", b""], ids=["not-canonical", "well-formed"])
def test_what_was_sent_is_not_offered_again_whatever_the_answer_is(loop: Loop, answer: bytes) -> None:
    loop.offer_plan()
    loop.open_round()
    loop.coordinator.says("metrics.eval", "control.ack", answer)
    loop.coordinator.says("control.fetch", "global.adapter", ADAPTER, run="run-1", round=1)
    loop.base_evaluated()
    loop.turn(4)
    assert loop.coordinator.kinds().count("metrics.eval") == 1
    assert [item.state for item in loop.bench.ledger.outbox()] == ["sent"]
    assert loop.trainer.tasks()[-1] == "LoadAdapter"


def test_what_a_lost_line_kept_back_is_sent_again_and_then_counts_as_sent(loop: Loop) -> None:
    loop.offer_plan()
    loop.open_round()
    loop.coordinator.fails_at("metrics.eval", LOST)
    loop.coordinator.says("metrics.eval", "control.ack", b"\xff\xff")
    loop.coordinator.says("control.fetch", "global.adapter", ADAPTER, run="run-1", round=1)
    loop.base_evaluated()
    loop.turn(4)
    assert loop.coordinator.kinds().count("metrics.eval") == 2
    assert loop.trainer.tasks()[-1] == "LoadAdapter"


# ---- a no stays a no --------------------------------------------------------------------------------


def test_a_second_plan_is_declined_and_the_run_that_is_open_goes_on(loop: Loop) -> None:
    loop.offer_plan()
    loop.open_round()
    other = setting.PLAN.model_copy(update={"run": "run-2"})
    loop.offer_plan(other)
    loop.turn()
    assert loop.guard.runs.run is not None and loop.bench.judge.view.round == 1
    assert [loop.bench.ledger.run_state(name) for name in ("run-1", "run-2")] == ["running", "declined"]
    assert [envelope.run for envelope, _ in loop.coordinator.bodies("control.abstain")] == ["run-2"]
    denied = [row for row in loop.bench.events("ingress.decision") if row["decision"] == "deny"]
    assert [(row["run"], row["kind"], row["reasons"]) for row in denied] == [("run-2", "run.plan", ["CONFLICT"])]


def test_a_plan_declined_here_is_acknowledged_only_when_the_no_was_heard(tmp_path: Path) -> None:
    loop = Loop(tmp_path / "a", setting.policy_of(setting.policy_text()), load="bf16")
    loop.coordinator.fails_at("control.abstain", LOST)
    loop.offer_plan()
    plan_sequence = loop.coordinator.sequence
    assert loop.bench.ledger.acknowledged < plan_sequence
    loop.turn()
    assert loop.coordinator.acknowledged() < plan_sequence
    loop.offer_plan()  # it comes again
    loop.turn()
    assert loop.coordinator.acknowledged() > plan_sequence
    assert len(abstained(loop)) == 2 and loop.bench.ledger.run_state("run-1") == "declined"
    loop.close()


def test_a_plan_that_fits_is_acknowledged_at_once(loop: Loop) -> None:
    loop.offer_plan()
    plan_sequence = loop.coordinator.sequence
    loop.turn()
    assert loop.coordinator.acknowledged() == plan_sequence
    assert abstained(loop) == [] and loop.bench.ledger.run_state("run-1") == "running"


def test_a_plan_that_the_policy_denies_is_acknowledged_only_when_the_no_was_heard(loop: Loop) -> None:
    strange = setting.PLAN.model_copy(update={"held_out_sha256": "9" * 64})
    loop.coordinator.fails_at("control.abstain", LOST)
    loop.offer_plan(strange)
    assert loop.bench.ledger.acknowledged == 0
    loop.offer_plan(strange)
    assert (
        loop.bench.ledger.acknowledged
        == [record["sequence"] for record in loop.bench.events("ingress.decision") if record["kind"] == "run.plan"][-1]
    )
    assert len(abstained(loop)) == 2


# ---- runs that are over ------------------------------------------------------------------------------


def test_T07_the_counts_of_a_run_go_with_it_and_its_name_stays_spent(loop: Loop) -> None:
    in_round(loop)
    of_run = [key for key in loop.bench.judge.book.counts if key.startswith("run-1/")]
    assert any(key.endswith("/metrics.eval") for key in of_run)
    loop.coordinator.says("control.poll", "run.end", pb.RunEnd(outcome="finished"), run="run-1", round=1)
    loop.turn()
    assert loop.guard.runs.run is None
    assert not [key for key in (loop.bench.ledger.book or {})["counts"] if key.startswith("run-1/")]
    told = len(loop.trainer.told)
    loop.offer_plan()
    assert loop.guard.runs.run is None and len(loop.trainer.told) == told
    assert abstained(loop) == [(0, 0)]  # silence would pass for a yes
    loop.offer_plan(setting.PLAN.model_copy(update={"run": "run-2"}))
    assert loop.bench.ledger.run_state("run-2") == "running"


# ---- the trainer's sandbox ---------------------------------------------------------------------------


def test_T10_the_coordinator_hears_of_another_isolation_before_anything_of_the_next_run(loop: Loop) -> None:
    loop.guard._client.joined = False
    loop.turn()
    in_round(loop)
    loop.coordinator.says("control.poll", "run.end", pb.RunEnd(outcome="finished"), run="run-1", round=1)
    loop.turn()
    loop.trainer.got = "waived"  # for run 2 somebody starts it without its sandbox
    loop.offer_plan(setting.PLAN.model_copy(update={"run": "run-2"}))
    assert loop.state()["trainer"] == {"isolation": "waived"}
    taken = loop.coordinator.acknowledged()
    loop.turn()
    hellos = [pb.Hello.FromString(payload).isolation for _, payload in loop.coordinator.bodies("control.hello")]
    assert hellos == ["namespaces", "waived"]
    assert loop.coordinator.acknowledged() == taken  # the plan is acknowledged, so begins, after it
    loop.turn()
    assert loop.coordinator.acknowledged() > taken
    assert len(loop.coordinator.bodies("control.hello")) == 2


# ---- donors -------------------------------------------------------------------------------------------


def answered_public_step(loop: Loop) -> None:
    in_round(loop)
    loop.trainer_says("done", task="LoadAdapter", round=1, metrics={})
    loop.trainer_says("done", task="PrivateStep", round=1, metrics={})
    body = setting.responses_body((1, ("12",)))
    loop.trainer_says("done", codec.encode(body), task="GeneratePublic", round=1, metrics={})


@pytest.mark.parametrize(("row", "swap"), [(9, "none"), (1, "replace")], ids=["denied", "let-in"])
def test_T21_a_step_whose_donors_are_denied_goes_on_without_them_at_once(loop: Loop, row: int, swap: str) -> None:
    answered_public_step(loop)
    body = pb.PublicDonors()
    body.prompts.add(prompt_index=row).donors.add(origin="hospital_b").response.CopyFrom(
        pb.Response(text="12", finish=pb.FINISH_STOP)
    )
    loop.clock = -1e6  # no deadline comes near
    loop.coordinator.says("control.poll", "public.donors", body, run="run-1", round=1, step=2)
    loop.guard._client.retry_at, loop.guard._client.poll_now = loop.clock, True
    loop.guard.turn()
    assert loop.trainer.tasks()[-1] == "PublicStep"
    assert loop.trainer.told[-1].fields["swap"] == swap


# ---- what a trainer says -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("metrics", "told"),
    [
        ({"donors_used": {"a": []}}, None),
        ({"reward_mean": "x"}, None),
        ({"tokens": 10**400}, None),
        ({"donors_rejected": [1]}, None),
        ([], None),
        ({"reward_mean": None, "donors_rejected": {"hospital_b": 2}, "donors_used": 1, "unheard_of": "x"}, 1),
    ],
)
def test_a_metric_that_is_nonsense_is_a_failure_of_the_trainer(loop: Loop, metrics: Any, told: int | None) -> None:
    loop.offer_plan()
    loop.open_round()
    body = pb.MetricsEval(split="held_out")
    loop.coordinator.says("control.fetch", "global.adapter", ADAPTER, run="run-1", round=1)
    loop.trainer_says("done", codec.encode(body), task="Evaluate", round=0, metrics=metrics)
    if told is None:
        assert loop.guard.failure is not None and loop.guard.failure.code == "TRAINER_CONFUSED"
        assert loop.bench.ledger.run_state("run-1") == "left"
        assert loop.coordinator.kinds()[-3:] == ["control.error", "control.abstain", "control.checkpoint"]
    else:
        assert loop.guard.failure is None and loop.state()["donors"]["used"] == told


@pytest.mark.parametrize(
    ("kind", "fields", "confused"),
    [
        ("step", {"phase": ["rollout"]}, True),
        ("step", {"phase": "rollout"}, False),
        ("planned", {"overlong": 3, "private_prompts": 40}, True),
        ("planned", {"overlong": {"private": 3}, "private_prompts": 40}, False),
        ("planned", {"overlong": {}}, True),
        *(("planned", {"overlong": {}, "private_prompts": count}, True) for count in (0, -1, "4", 4.0, True, 1 << 40)),
    ],
)
def test_a_report_that_cannot_be_shown_is_a_failure_of_the_trainer(
    loop: Loop, kind: str, fields: dict[str, Any], confused: bool
) -> None:
    loop.offer_plan()
    loop.open_round()
    loop.trainer_says(kind, **fields)
    assert (loop.guard.failure is not None and loop.guard.failure.code == "TRAINER_CONFUSED") is confused


@pytest.mark.parametrize("shape", [(0, 1 << 62), (1,) * 70], ids=["huge-side", "too-many-sides"])
def test_T02_a_shape_that_no_array_can_have_is_a_failure_of_the_trainer(loop: Loop, shape: tuple[int, ...]) -> None:
    header = pb.Factors(dtype="float32", rank=2, scale=2.0)
    header.tensors.append(pb.TensorEntry(name="a", shape=[side & 0xFFFFFFFF for side in shape]))
    head = codec.encode(header)
    body = len(head).to_bytes(8, "little") + head + b"\0" * (4 if 0 not in shape else 0)
    in_round(loop)
    run = loop.guard.runs.run
    assert run is not None
    run.task = ExportDelta(1)
    loop.trainer_says("done", body, task="ExportDelta", round=1, metrics={})
    assert loop.guard.failure is None or loop.guard.failure.code == "TRAINER_CONFUSED"
    assert "lora.factors" not in loop.coordinator.kinds()


def test_a_trainer_that_breaks_the_link_ends_the_run_cleanly(loop: Loop) -> None:
    loop.offer_plan()
    loop.events.put(TrainerGone(None, "a frame's header is not a message"))
    loop.turn()
    assert loop.guard.failure is not None and loop.guard.failure.code == "TRAINER_CONFUSED"
    assert loop.bench.ledger.run_state("run-1") == "left"


# ---- commands ----------------------------------------------------------------------------------------


def test_a_command_that_nobody_waits_for_any_more_is_not_carried_out(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    monkeypatch.setattr(guard_loop, "COMMAND_TIMEOUT_SECONDS", 0.0)
    with pytest.raises(UnreachableError) as refused:
        loop.guard.on_loop(lambda: done.append("late"))
    assert refused.value.hint == "give a new command"
    loop.turn()
    assert done == []


def test_a_command_in_time_is_carried_out_once(loop: Loop) -> None:
    done: list[str] = []
    waiting = threading.Thread(target=lambda: loop.guard.on_loop(lambda: done.append("done")))
    waiting.start()
    while loop.events.empty():
        pass
    loop.turn()
    waiting.join()
    assert done == ["done"]


# ---- what the sandbox must not show --------------------------------------------------------------------


def test_T10_keys_secret_records_and_rules_are_kept_out_of_the_sandbox(tmp_path: Path) -> None:
    identity = SimpleNamespace(key=tmp_path / "id/a.key", signing_key=tmp_path / "id/a.ed25519",
                               link_key=tmp_path / "id/guard.key", operators=tmp_path / "id/roles.yaml")  # fmt: skip
    config: Any = SimpleNamespace(
        identity=identity, state_dir=tmp_path / "state", site_secret=None, policy=tmp_path / "policy.yaml",
        charter=tmp_path / "charter.yaml", control=SimpleNamespace(socket=tmp_path / "state/control.sock"),
        data=SimpleNamespace(canaries=tmp_path / "canaries.txt"),
        coordinator=SimpleNamespace(proxy_credentials=tmp_path / "proxy.txt"),
    )  # fmt: skip
    config.key_files = SiloConfig.key_files.fget(config)
    named = {path.relative_to(tmp_path).as_posix() for path in never_shown(config)}
    assert named == {
        "id/a.key", "id/a.ed25519", "id/guard.key", "id/roles.yaml", "policy.yaml", "charter.yaml",
        "state/control.sock", "state/site.secret", "state/ledger.sqlite3", "state/audit", "canaries.txt", "proxy.txt",
    }  # fmt: skip
    identity.link_key = None
    assert len(never_shown(config)) == len(named) - 1
