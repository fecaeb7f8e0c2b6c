"""A silo without a line: its whole guard in memory, a coordinator whose files the test writes, a scripted trainer."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import Message

from fedsilo.files.transfer_file import Header, TransferBroken, TransferFile, TransferWriter
from fedsilo.protocol import codec
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.errors import ConflictError, FedSiloError, OperationError, PeerError, UsageError
from fedsilo.protocol.kinds import OUTBOUND_KINDS
from fedsilo.protocol.transcript import is_signed, transcript_from_canonical
from tests.policies import setting
from tests.simulated.carried_files import carried_by_a_thief, without_its_signature, without_the_first
from tests.simulated.test_round_end import PLAN, POOL, Work
from tests.simulated.test_T34_T36_held_plans import approve, asking_policy, held
from tests.world import ADAPTER, COORDINATOR_KEY, OUR_KEY, Loop, countersigned

UPDATE, ANSWERS = "lora.factors", "public.responses"
Line = tuple[str, Message | bytes, dict[str, Any], tuple[str, int] | None]


class Post:
    """Carries files between one guard and a coordinator that the test plays."""

    def __init__(self, loop: Loop, folder: Path) -> None:
        self.loop, self.folder, self.sequence, self.files = loop, folder, 0, 0
        (loop.folder / "own.crt").write_text("its certificate")

    def sealed(self, kind: str, payload: bytes, routing: dict[str, Any], **changes: Any) -> pb.Envelope:
        self.sequence += 1
        envelope = pb.Envelope(
            federation="cardio-net", kind=kind, sender=setting.COORDINATOR, sequence=self.sequence, attempt=1,
            payload_digest=bytes.fromhex(codec.sha256_hex(payload)), **routing,
        )  # fmt: skip
        for name, value in changes.items():
            setattr(envelope, name, value)
        envelope.signature = COORDINATOR_KEY.sign(codec.signing_bytes(envelope))
        return envelope

    def write(self, *lines: Line, receiver: str = setting.SILO, adapter: bytes = b"", **changes: Any) -> Path:
        """A file with these messages, then what the loop's coordinator was told to say, then an adapter."""
        self.files += 1
        path = self.folder / f"plan_{self.files}.zip"
        script = self.loop.coordinator.script.pop("control.poll", [])
        items: list[Line] = [(kind, body, routing, None) for kind, body, routing in script]  # type: ignore[misc]
        if adapter:
            items.append(("global.adapter", adapter, {"run": "run-1"}, None))
        header = Header("cardio-net", setting.COORDINATOR, receiver, "2026-01-01T00:00:00Z")
        with TransferWriter(path, header, COORDINATOR_KEY) as file:
            for kind, body, routing, answers in (*lines, *items):
                payload = body if isinstance(body, bytes) else codec.encode(body)
                file.add(self.sealed(kind, payload, routing, **changes), payload, answers=answers)
            file.finish()
        return path

    def carry_in(self, path: Path) -> dict[str, Any]:
        assert self.loop.guard.files is not None
        told = self.loop.guard.files.take(path, recording(self.loop, "transfer.import"))
        self.loop.turn(1 + len(told["messages"]))
        return told

    def carry_out(self) -> TransferFile:
        assert self.loop.guard.files is not None
        self.files += 1
        path = self.folder / f"release_{self.files}.zip"
        self.loop.guard.files.export(path, recording(self.loop, "transfer.export"))
        return TransferFile(path)


def recording(loop: Loop, event: str) -> Any:
    def record(told: Any) -> dict[str, int]:
        return {"record": loop.bench.judge.record(event, detail=dict(told))}

    return record


def bodies(file: TransferFile) -> dict[str, Any]:
    """By kind; of the update, its payload."""
    return {
        message.envelope.kind: file.read(message)
        if message.envelope.kind == UPDATE
        else codec.decode(OUTBOUND_KINDS[message.envelope.kind], file.read(message))
        for message in file.messages
    }


def acks(file: TransferFile, *kinds: str, code: str = "") -> list[Line]:
    """What a coordinator answers to the messages of those kinds."""
    lines: list[Line] = []
    for message in file.messages:
        envelope = message.envelope
        if envelope.kind in kinds:
            asked = (envelope.run, envelope.sequence)
            ack: tuple[str, Message] = ("control.ack", pb.Ack(acknowledged_sequence=envelope.sequence, record=7))
            kind, body = ("control.refusal", pb.Refusal(code=code)) if code else ack
            lines.append((kind, body, {}, asked))
    return lines


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[Loop]:
    made = Loop(tmp_path / "a", setting.policy_of(setting.policy_text()), by_files=True)
    yield made
    made.close()


@pytest.fixture
def post(loop: Loop, tmp_path: Path) -> Post:
    return Post(loop, tmp_path)


def plan_line(plan: Any = PLAN) -> Line:
    return "run.plan", pb.RunPlan(canonical_json=plan.canonical()), {"run": plan.run}, None


def begun(post: Post) -> Work:
    """One file with everything of round 1, whose transcript enough others had signed."""
    loop = post.loop
    post.carry_in(post.write(plan_line()))
    loop.show_round(1, codec.sha256_hex(ADAPTER), plan=PLAN)
    agreed = loop.signed_by("hospital_b", "hospital_c", "hospital_d")
    loop.coordinator.says("control.poll", "round.agreed", agreed, run="run-1", round=1)
    post.carry_in(post.write(adapter=ADAPTER))
    loop.base_evaluated()
    work = Work(loop)
    work.done = 1
    return work


# ---- nothing is said without a file -----------------------------------------------------------------


def test_without_an_export_nothing_is_decided_recorded_or_sent(loop: Loop) -> None:
    size = loop.bench.audit.size
    loop.turn(5)
    assert loop.bench.audit.size == size
    assert loop.guard._patience() > 0, "a loop that has nothing to do does not spin"


def test_an_export_says_hello_shows_the_log_and_says_what_was_taken_in(loop: Loop, post: Post) -> None:
    with post.carry_out() as file:
        assert [message.envelope.kind for message in file.messages] == [
            "control.hello", "control.checkpoint", "control.poll",
        ]  # fmt: skip
        assert (file.header.sender, file.header.receiver) == (setting.SILO, setting.COORDINATOR)
        assert file.header.certificate_pem == "its certificate"
        for message in file.messages:
            assert message.envelope.payload_digest.hex() == codec.sha256_hex(file.read(message))
            OUR_KEY.public_key().verify(message.envelope.signature, codec.signing_bytes(message.envelope))
        sent = [(each["kind"], each["sequence"]) for each in loop.bench.events("egress.sent")]
        assert sent == [(message.envelope.kind, message.envelope.sequence) for message in file.messages]
    assert not loop.bench.events("egress.indeterminate")
    assert [each["detail"]["sha256"] for each in loop.bench.events("transfer.export")] == [
        codec.sha256_hex((post.folder / "release_1.zip").read_bytes())
    ]


def test_a_silo_with_a_line_writes_and_takes_no_files(tmp_path: Path) -> None:
    loop = Loop(tmp_path / "a", setting.policy_of(setting.policy_text()))
    try:
        command: Any = type("Command", (), {"arguments": {"path": str(tmp_path / "x.zip")}})()
        for order in (loop.guard.orders.export_release, loop.guard.orders.import_plan):
            with pytest.raises(UsageError, match="dials its coordinator"):
                order(command)
        with pytest.raises(UsageError, match="dials its coordinator"):
            loop.bench.gate.writing_into(tmp_path / "x.zip", Header("cardio-net", "a", "b", "now"))
    finally:
        loop.close()


# ---- a round by files -------------------------------------------------------------------------------


def test_a_round_begins_with_one_file_and_ends_with_one(loop: Loop, post: Post) -> None:
    work = begun(post)
    assert work.tasks[1]["task"] == "LoadAdapter"
    work.until()
    assert {item.kind for item in loop.bench.ledger.outbox("allowed")} >= {UPDATE, ANSWERS, "metrics.eval"}
    sent = {each["kind"] for each in loop.bench.events("egress.sent")}
    assert sent == set(), "it was let out, and waits for a file"
    assert not loop.bench.events("egress.indeterminate")
    with post.carry_out() as file:
        said = bodies(file)
        assert {UPDATE, ANSWERS, "metrics.eval"} <= set(said)
        assert said["control.poll"].acknowledged_sequence == loop.bench.ledger.acknowledged > 0
        shown = transcript_from_canonical(loop.shown.canonical())
        # the round began before anybody out there had our signature: it comes with the update
        assert is_signed(shown, setting.SILO, OUR_KEY.public_key(), said["control.poll"].countersignature)
        order = [message.envelope.kind for message in file.messages]
        assert order.index("control.poll") < order.index(UPDATE)


def test_what_has_no_answer_yet_is_in_every_file_and_what_has_one_in_none(loop: Loop, post: Post) -> None:
    begun(post).until()
    with post.carry_out() as lost, post.carry_out() as again:
        first, second = bodies(lost), bodies(again)
        assert first[UPDATE] == second[UPDATE]
        sequences = [
            next(message.envelope.sequence for message in file.messages if message.envelope.kind == UPDATE)
            for file in (lost, again)
        ]
        assert sequences[0] < sequences[1]
        post.carry_in(post.write(*acks(again, UPDATE)))
    assert UPDATE not in {item.kind for item in loop.bench.ledger.outbox("allowed")}
    (acked,) = loop.bench.events("egress.acked")
    assert (acked["kind"], acked["sequence"], acked["link"]["peer_event"]) == (UPDATE, sequences[1], 7)
    with post.carry_out() as third:
        assert UPDATE not in bodies(third) and ANSWERS in bodies(third)


def test_an_answer_to_an_earlier_file_counts_as_well(loop: Loop, post: Post) -> None:
    begun(post).until()
    with post.carry_out() as first, post.carry_out():
        post.carry_in(post.write(*acks(first, UPDATE)))
    assert UPDATE not in {item.kind for item in loop.bench.ledger.outbox("allowed")}


@pytest.mark.parametrize(("code", "stays"), [("ROUND_CLOSED", False), ("INGRESS_DENIED", False), ("HALTED", True)])
def test_a_refusal_settles_what_left_unless_the_coordinator_took_nothing(
    loop: Loop, post: Post, code: str, stays: bool
) -> None:
    begun(post).until()
    with post.carry_out() as file:
        post.carry_in(post.write(*acks(file, UPDATE, code=code)))
    assert (UPDATE in {item.kind for item in loop.bench.ledger.outbox("allowed")}) is stays


def test_a_word_that_a_halted_coordinator_did_not_take_is_said_again(loop: Loop, post: Post) -> None:
    post.carry_in(post.write(plan_line(setting.PLAN)))
    with post.carry_out() as file:
        post.carry_in(post.write(*acks(file, "control.abstain", code="HALTED")))
    with post.carry_out() as again:
        assert "control.abstain" in bodies(again)
        post.carry_in(post.write(*acks(again, "control.abstain")))
    with post.carry_out() as last:
        assert "control.abstain" not in bodies(last)


def test_an_answer_to_what_is_not_kept_any_more_settles_it(loop: Loop, post: Post) -> None:
    begun(post).until()
    with post.carry_out() as file:
        (update,) = (item for item in loop.bench.ledger.outbox("allowed") if item.kind == UPDATE)
        (kept,) = (path for path in loop.folder.rglob("*") if path.is_file() and update.digest in path.name)
        kept.unlink()
        post.carry_in(post.write(*acks(file, UPDATE)))
    assert UPDATE not in {item.kind for item in loop.bench.ledger.outbox("allowed")} and not loop.bench.judge.halted
    assert [event["reasons"] for event in loop.bench.events("egress.indeterminate")] == [["NOT_FOUND"]]


@pytest.mark.parametrize("restarted", ["never", "between files", "after the answers"])
def test_the_pool_of_the_next_round_must_be_what_the_answers_say_was_taken(
    loop: Loop, post: Post, restarted: str
) -> None:
    """The acks come in the file of the next round, and are taken in before it; with them a cosignature of the log as
    the last export showed it, which counts over a restart."""
    begun(post).until()
    with post.carry_out() as file:
        digests = {
            str(message.envelope.step): message.digest for message in file.messages if message.envelope.kind == ANSWERS
        }
        own = codec.sha256_hex(json.dumps(digests, separators=(",", ":")).encode())
        assert loop.coordinator.log is not None
        shown = next(message for message in file.messages if message.envelope.kind == "control.checkpoint")
        witnessed = countersigned(loop.coordinator.log, pb.Checkpoint.FromString(file.read(shown)))
        asked = ("", shown.envelope.sequence)
        lines = [*acks(file, ANSWERS, UPDATE), ("control.checkpoint", witnessed, {}, asked)]
    if restarted == "after the answers":
        post.carry_in(post.write(*lines))
        lines = []
    if restarted != "never":
        shown_before = loop.shown
        loop.restart()
        loop.trainer_says("planned", overlong={}, private_prompts=40, resumed=None)
        loop.shown = shown_before
    loop.show_round(2, codec.sha256_hex(ADAPTER), plan=PLAN, pool=POOL | {"hospital_a": own})
    post.carry_in(post.write(*lines, adapter=ADAPTER))
    assert loop.guard._agreement.waiting is not None and loop.guard._agreement.waiting.transcript.round == 2


def test_a_run_whose_rounds_need_answers_in_between_is_declined_in_the_next_file(loop: Loop, post: Post) -> None:
    post.carry_in(post.write(plan_line(setting.PLAN)))
    assert loop.guard.runs.run is None
    with post.carry_out() as file:
        said = bodies(file)
        assert said["control.abstain"].round == 0 and said["control.error"].code == "DECLINED"
        words = acks(file, "control.abstain", "control.error")
    with post.carry_out() as again:
        assert "control.abstain" in bodies(again), "nobody has answered yet"
    post.carry_in(post.write(*words))
    with post.carry_out() as third:
        assert len(words) == 2 and {"control.abstain", "control.error"}.isdisjoint(bodies(third))


def test_a_goodbye_is_in_every_file_until_it_is_answered(loop: Loop, post: Post) -> None:
    begun(post)
    loop.guard.runs.leave("ORDERED", 1)
    for _ in range(2):
        with post.carry_out() as file:
            said = bodies(file)
            assert said["control.abstain"].round == 0 and UPDATE not in said
    post.carry_in(post.write(*acks(file, "control.abstain")))
    with post.carry_out() as after:
        assert "control.abstain" not in bodies(after)


# ---- bad files --------------------------------------------------------------------------------------


def changed(path: Path, where: bytes, by: bytes) -> Path:
    data = path.read_bytes()
    assert data.count(where) >= 1
    path.write_bytes(data.replace(where, by, 1))
    return path


def of_another_silo(post: Post) -> Path:
    return post.write(plan_line(), receiver=setting.SILO.replace("hospital_a", "hospital_b"))


def of_another_coordinator(post: Post) -> Path:
    return post.write(plan_line(), sender=setting.COORDINATOR + "2")


def signed_by_somebody(post: Post) -> Path:
    path = post.write(plan_line())
    with TransferFile(path) as file:
        (message,) = file.messages
        payload, header = file.read(message), file.header
    message.envelope.signature = OUR_KEY.sign(codec.signing_bytes(message.envelope))
    path.unlink()
    with TransferWriter(path, header, COORDINATOR_KEY) as writer:
        writer.add(message.envelope, payload)
        writer.finish()
    return path


def with_another_payload(post: Post) -> Path:
    return changed(post.write(plan_line()), b'"rounds":3', b'"rounds":9')


def cut_short(post: Post) -> Path:
    path = post.write(plan_line())
    path.write_bytes(path.read_bytes()[:-100])
    return path


def a_pipe(post: Post) -> Path:
    os.mkfifo(post.folder / "pipe")
    return post.folder / "pipe"


def two_items(post: Post) -> Path:
    return post.write(plan_line(), ("run.end", pb.RunEnd(outcome="aborted"), {"run": "run-0"}, None))


def with_one_left_out(post: Post) -> Path:
    """What is behind it would tell the coordinator that it was taken in, too."""
    return carried_by_a_thief(two_items(post), without_the_first)


def in_another_order(post: Post) -> Path:
    def change(manifest: dict[str, Any], entries: dict[str, bytes]) -> None:
        manifest["messages"].reverse()
        one, two = "messages/000001", "messages/000002"
        entries[one], entries[two] = entries[two], entries[one]

    return carried_by_a_thief(two_items(post), change)


def with_an_answer_to_another(post: Post) -> Path:
    ack = ("control.ack", pb.Ack(acknowledged_sequence=1, record=7), {}, ("", 1))

    def change(manifest: dict[str, Any], _: dict[str, bytes]) -> None:
        manifest["messages"][0]["answers"]["sequence"] = 2

    return carried_by_a_thief(post.write(ack, plan_line()), change)


def unsigned(post: Post) -> Path:
    return carried_by_a_thief(post.write(plan_line()), without_its_signature)


def listing_another(post: Post) -> Path:
    return carried_by_a_thief(post.write(plan_line()), lambda manifest, _: manifest["messages"][0].update(round=7))


def listing(*rows: Any) -> Callable[[Post], Path]:
    def make(post: Post) -> Path:
        return carried_by_a_thief(post.write(plan_line()), lambda manifest, _: manifest.update(messages=list(rows)))

    return make


def no_archive(post: Post) -> Path:
    path = post.folder / "notes.txt"
    path.write_text("carry milk")
    return path


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (of_another_silo, UsageError),
        (of_another_coordinator, PeerError),
        (signed_by_somebody, PeerError),
        (with_another_payload, TransferBroken),
        (with_one_left_out, TransferBroken),
        (in_another_order, TransferBroken),
        (with_an_answer_to_another, TransferBroken),
        (unsigned, TransferBroken),
        (listing_another, TransferBroken),
        (listing("x"), TransferBroken),
        (listing([]), TransferBroken),
        (listing({"answers": {"run": "", "sequence": float("inf")}}), TransferBroken),
        (cut_short, TransferBroken),
        (no_archive, TransferBroken),
        (a_pipe, TransferBroken),
        (lambda post: post.folder, FedSiloError),
        (lambda post: post.folder / "missing.zip", FedSiloError),
    ],
)
def test_T29_a_file_that_is_not_whole_genuine_and_for_this_silo_changes_nothing(
    loop: Loop, post: Post, make: Any, error: type[FedSiloError]
) -> None:
    path = make(post)
    assert loop.guard.files is not None
    with pytest.raises(error):
        loop.guard.files.take(path, recording(loop, "transfer.import"))
    loop.turn(3)
    assert loop.guard.runs.run is None and not loop.bench.events("transfer.import")
    assert not loop.bench.events("ingress.decision")
    post.carry_in(post.write(plan_line()))
    assert loop.guard.runs.run is not None, "the good one is taken all the same"


def test_T29_an_older_file_is_refused_and_the_same_one_again_changes_nothing(loop: Loop, post: Post) -> None:
    old, new = post.write(plan_line()), post.write(plan_line())
    post.carry_in(new)
    size = len(loop.bench.events("ingress.decision"))
    with pytest.raises(ConflictError) as told:
        post.carry_in(old)
    assert told.value.code == "STALE_VIEW"
    rows = post.carry_in(new)["messages"]
    assert [row["taken_before"] for row in rows] == [True]
    assert len(loop.bench.events("ingress.decision")) == size


def test_an_answer_that_the_policy_does_not_let_in_is_refused_once_and_what_follows_is_taken(
    loop: Loop, post: Post
) -> None:
    out = post.carry_out()
    asked = next(m.envelope for m in out.messages if m.envelope.kind == "control.checkpoint")
    bad: Line = ("control.checkpoint", pb.Checkpoint(note="no note"), {}, (asked.run, asked.sequence))
    post.carry_in(post.write(bad, plan_line()))
    loop.turn(5)
    denied = [row for row in loop.bench.events("ingress.decision") if row["decision"] == "deny"]
    assert [(row["kind"], row["reasons"]) for row in denied] == [("control.checkpoint", ["FIELD_NOT_ALLOWED"])]
    assert loop.guard.runs.run is not None


def test_behind_an_item_that_cannot_be_read_nothing_counts_as_taken_in(loop: Loop, post: Post) -> None:
    """A later FedSilo may say more in a plan. It must not pass for taken in because something behind it was."""
    unknown = codec.encode(pb.RunPlan(canonical_json=PLAN.canonical())) + b"\xf8\x7f\x01"
    before = loop.bench.ledger.acknowledged
    post.carry_in(post.write(("run.plan", unknown, {"run": PLAN.run}, None), plan_line()))
    loop.turn(5)
    assert loop.guard.runs.run is None and loop.bench.ledger.acknowledged == before
    post.carry_in(post.write(plan_line()))
    assert loop.guard.runs.run is not None


def test_a_file_that_changes_while_it_is_copied_changes_nothing(
    loop: Loop, post: Post, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is checked is the silo's own copy: between two looks at a medium somebody else may write to it."""
    taken = post.carry_in(post.write(plan_line()))
    path = post.write(adapter=ADAPTER)
    whole, copy_to = path.read_bytes(), TransferFile.copy_to

    def changed(file: TransferFile, target: Path) -> None:
        copy_to(file, target)
        target.write_bytes(whole.replace(ADAPTER, bytes(len(ADAPTER))))

    with monkeypatch.context() as patched:
        patched.setattr(TransferFile, "copy_to", changed)
        with pytest.raises(TransferBroken, match=rf"{path}: the payload of global.adapter cannot be read"):
            post.carry_in(path)
    folder = loop.folder / "transfer"
    with TransferFile(folder / "imported.zip") as kept:
        assert kept.digest == taken["sha256"]
    assert not list(folder.glob("*.partial"))
    path.write_bytes(whole)
    assert post.carry_in(path)["messages"][-1]["kind"] == "global.adapter"


def test_a_file_whose_order_cannot_be_recorded_is_not_taken(loop: Loop, post: Post) -> None:
    assert loop.guard.files is not None

    def full(told: Any) -> dict[str, int]:
        raise OperationError("no space left", code="DISK_FULL")

    with pytest.raises(OperationError, match="no space left"):
        loop.guard.files.take(post.write(plan_line()), full)
    assert not loop.guard.files.waits
    assert not {path.name for path in (loop.folder / "transfer").iterdir()} & {
        "imported.zip",
        "imported.partial",
    }


def test_nothing_is_written_over(loop: Loop, post: Post) -> None:
    (post.folder / "release_1.zip").write_text("somebody's")
    with pytest.raises(ConflictError):
        post.carry_out()
    assert (post.folder / "release_1.zip").read_text() == "somebody's"
    assert not loop.bench.events("egress.sent") and not list(post.folder.glob(".*"))


# ---- kills ------------------------------------------------------------------------------------------


def test_a_silo_that_is_killed_goes_on_in_the_file_that_it_took(loop: Loop, post: Post) -> None:
    post.carry_in(post.write(plan_line()))
    loop.show_round(1, codec.sha256_hex(ADAPTER), plan=PLAN)
    agreed = loop.signed_by("hospital_b", "hospital_c", "hospital_d")
    loop.coordinator.says("control.poll", "round.agreed", agreed, run="run-1", round=1)
    assert loop.guard.files is not None
    loop.guard.files.take(post.write(adapter=ADAPTER), recording(loop, "transfer.import"))
    loop.turn()
    assert loop.guard._agreement.waiting is not None
    loop.restart()
    loop.turn(3)
    loop.base_evaluated()
    assert loop.trainer.tasks()[-1] == "LoadAdapter"


def test_what_left_before_a_kill_is_settled_by_an_answer_after_it(loop: Loop, post: Post) -> None:
    begun(post).until()
    with post.carry_out() as file:
        loop.restart()
        post.carry_in(post.write(*acks(file, UPDATE)))
    assert UPDATE not in {item.kind for item in loop.bench.ledger.outbox("allowed")}


def test_a_plan_that_waits_for_people_waits_over_a_kill(tmp_path: Path) -> None:
    loop = Loop(tmp_path / "a", asking_policy(), by_files=True)
    try:
        post = Post(loop, tmp_path)
        post.carry_in(post.write(plan_line()))
        assert loop.guard.runs.run is None and len(loop.bench.ledger.releases("held")) == 1
        before = len(loop.bench.events("ingress.decision"))
        loop.turn(5)
        assert len(loop.bench.events("ingress.decision")) == before, "it is not let in again while it waits"
        loop.restart()
        loop.turn(2)
        assert len(loop.bench.ledger.releases("held")) == 1
        approve(loop, held(loop, PLAN.run))
        loop.turn(2)
        assert loop.guard.runs.run is not None
    finally:
        loop.close()
