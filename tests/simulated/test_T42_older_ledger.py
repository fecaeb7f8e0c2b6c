"""An older ledger beside today's audit log: halts would vanish, and budgets begin anew (threat T42)."""

from __future__ import annotations

import errno
import json
import os
import signal
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedsilo.audit import segments as audit_segments
from fedsilo.audit.audit_verify import verify_logs
from fedsilo.audit.orders import check_orders
from fedsilo.audit.reader import typed_records
from fedsilo.audit.record import RecordError
from fedsilo.audit.segments import SegmentWriter
from fedsilo.cli import silo as cli_silo
from fedsilo.protocol.errors import ConflictError, NotAllowedError, OperationError
from silo.guard import ledger_check, signed_files
from silo.guard.checks import check_site
from silo.guard.ledger import Ledger
from silo.guard.messages import Allowed, Denied
from tests.simulated.policy_site import PolicySite, text_of
from tests.simulated.test_X05_faults import in_a_child
from tests.world import Bench, Killed, MemoryChannel, failing

LEDGER = "ledger.sqlite3"


def run(*arguments: object) -> tuple[int, dict[str, Any]]:
    answer = CliRunner().invoke(cli_silo.app, [*map(str, arguments), "--json"])
    return answer.exit_code, json.loads(answer.stdout)


TIGHTER = ("min_peers: 2", "min_peers: 3")
ALWAYS = ("2026-12-01T00:00:00Z", "2020-01-01T00:00:00Z"), ("2027-12-01T00:00:00Z", "2099-01-01T00:00:00Z")


@pytest.fixture
def place(tmp_path: Path) -> PolicySite:
    site = PolicySite(tmp_path / "site")
    site.policy_is(text_of(*ALWAYS))
    site.start()
    return site


def working(place: PolicySite) -> Bench:
    """The gate of the running silo; a restart in the same second is another process."""
    policy, sequence = place.site().policy, len(place.records("ingress.decision"))
    return Bench(
        place.folder / "state", policy, MemoryChannel(sequence=sequence), clock_now=place.now.timestamp(),
    )  # fmt: skip


def files_of(place: PolicySite) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in (place.folder / "state").glob(f"{LEDGER}*")}


def put_back(place: PolicySite, files: dict[Path, bytes]) -> None:
    for path in files_of(place):
        path.unlink()
    for path, content in files.items():
        path.write_bytes(content)


def sends_an_update(place: PolicySite) -> None:
    with closing(working(place)) as bench:
        offered = bench.factors()
        assert isinstance(offered, Allowed)
        bench.gate.transmit(offered)


@pytest.fixture
def older(place: PolicySite) -> Iterator[dict[Path, bytes]]:
    """Yesterday's ledger; since then the round's one update has left."""
    kept = files_of(place)
    sends_an_update(place)
    yield kept


def refused(place: PolicySite) -> NotAllowedError:
    """A start that is; it leaves the ledger as it was."""
    path = place.folder / "state" / LEDGER
    before = files_of(place).get(path)
    with pytest.raises(NotAllowedError) as error:
        place.start()
    assert files_of(place).get(path) == before
    return error.value


def disagreement(place: PolicySite) -> ledger_check.Disagreement:
    named = ledger_check.named_in_folder(place.folder / "state" / "audit")
    found = ledger_check.disagreement(place.config, named)
    assert found is not None
    return found


def accepts(place: PolicySite, person: str, found: ledger_check.Disagreement | None = None) -> Path:
    shown = found or disagreement(place)
    expires = place.now + timedelta(hours=4)
    signed = place.signs(person, ledger_check.ACCEPT, shown.arguments, expires, place.config.federation)
    return ledger_check.write_approval(place.config, shown, signed, place.people())


def two_accept(place: PolicySite) -> None:
    for person in ("alice", "bob"):
        accepts(place, person)


# ---- refused, and its counterpart --------------------------------------------------------------------------------


def test_T42_yesterdays_ledger_beside_todays_log_is_refused_and_todays_is_not(
    place: PolicySite, older: dict[Path, bytes]
) -> None:
    newest = files_of(place)
    put_back(place, older)
    error = refused(place)
    assert error.code == "LEDGER_BEHIND" and "silo ledger accept" in error.hint
    (checked,) = place.records("ledger.check")
    assert checked["reasons"] == ["LEDGER_BEHIND"] and "ledger" not in checked
    assert refused(place).code == "LEDGER_BEHIND", "the record of a refusal vouches for nothing"
    put_back(place, newest)
    assert place.start().how == "same"


def test_T42_silo_check_says_beforehand_what_a_start_would_say(place: PolicySite, older: dict[Path, bytes]) -> None:
    def checked() -> dict[str, Any]:
        results, _, _ = check_site(place.config, reach_coordinator=False)
        (found,) = [result for result in results if result["check"] == "ledger against the log"]
        return found

    assert checked()["ok"] is True
    put_back(place, older)
    assert (checked()["ok"], checked()["code"]) == (False, "LEDGER_BEHIND")


def test_T42_a_ledger_that_was_taken_away_is_no_new_beginning(place: PolicySite, older: dict[Path, bytes]) -> None:
    kept = files_of(place)
    put_back(place, {})
    error = refused(place)
    assert error.code == "LEDGER_LOST" and not files_of(place)
    put_back(place, kept)
    assert place.start().how == "same"


def test_T42_a_ledger_of_another_history_is_refused(place: PolicySite, tmp_path: Path) -> None:
    """As many groups, and others: a copy that was started elsewhere meanwhile."""
    copied = files_of(place)
    sends_an_update(place)
    (other := tmp_path / "other").mkdir()
    for path, content in copied.items():
        (other / path.name).write_bytes(content)
    groups = disagreement_groups(place)
    with closing(Ledger(other / LEDGER)) as fork:
        for number in range(groups + 5):
            fork.next_sequence(f"run-{number}")
            with fork.naming():
                pass
        assert fork.heads is not None and fork.heads.newest.groups > groups
    put_back(place, {place.folder / "state" / LEDGER: (other / LEDGER).read_bytes()})
    assert refused(place).code == "LEDGER_BEHIND"


def disagreement_groups(place: PolicySite) -> int:
    named = ledger_check.named_in_folder(place.folder / "state" / "audit")
    assert named is not None
    return int(named["groups"])


@pytest.mark.parametrize(
    "statement",
    ["DELETE FROM facts WHERE name='history_book'", "UPDATE sequences SET value=value-1 WHERE direction='out'",
     "INSERT OR REPLACE INTO facts VALUES ('equivocation', '{}')", "SELECT 1"],
)  # fmt: skip
def test_T42_counters_halts_and_budgets_changed_by_hand_are_noticed(
    place: PolicySite, older: dict[Path, bytes], statement: str
) -> None:
    with closing(sqlite3.connect(place.folder / "state" / LEDGER)) as database:
        database.execute(statement)
        database.commit()
    if statement == "SELECT 1":
        assert place.start().how == "same"
    else:
        with pytest.raises(NotAllowedError) as error:
            place.start()
        assert error.value.code == "LEDGER_CHANGED"


def test_T42_a_log_of_an_earlier_version_gets_its_first_head_without_a_person(place: PolicySite) -> None:
    """Its ledger has no heads, and its records name none."""
    with closing(sqlite3.connect(place.folder / "state" / LEDGER)) as database:
        database.execute("DELETE FROM facts WHERE name='head'")
        database.commit()
    old = PolicySite(place.folder.parent / "old")
    old.policy_is(text_of(*ALWAYS))
    with old.audit() as audit:
        audit.append("start", detail={"version": "0"})
        effective = old.site().policy.digest
        audit.append("policy.load", policy={"effective": effective})
    with pytest.raises(NotAllowedError) as lost:
        old.start()
    assert lost.value.code == "LEDGER_LOST"
    for path, content in files_of(place).items():
        (old.folder / "state" / path.name).write_bytes(content)
    with closing(Ledger(old.folder / "state" / LEDGER, read_only=True)) as ledger:
        assert ledger.heads is None
    assert old.start().how == "same"
    records = old.records()
    assert ["ledger" in record for record in records] == [False, False, False, True, False]
    (result,) = verify_logs([old.folder / "state" / "audit"])
    assert result["verified"], result["problems"]
    kept = files_of(old)
    sends_an_update(old)
    put_back(old, kept)
    assert refused(old).code == "LEDGER_BEHIND"


def test_T42_a_record_names_the_head_once_and_one_that_fails_names_none(place: PolicySite) -> None:
    with closing(working(place)) as bench:
        bench.ledger.next_sequence("run-1")
        with pytest.raises(RecordError):
            bench.audit.append("no.such.event")
        first, second = bench.audit.append("silo.pause"), bench.audit.append("silo.resume")
        records = {record["seq"]: record for record in bench.audit.records()}
        assert "ledger" in records[first] and "ledger" not in records[second]
        assert bench.ledger.heads is not None and records[first]["ledger"] == bench.ledger.heads.newest._asdict()
    (result,) = verify_logs([place.folder / "state" / "audit"])
    assert result["verified"]


@pytest.mark.parametrize(("owner", "name"), [(audit_segments, "write_all"), (os, "fdatasync")])
def test_T42_a_record_that_failed_leaves_an_honest_ledger_that_starts(place: PolicySite, owner: Any, name: str) -> None:
    kept = files_of(place)
    with closing(working(place)) as bench:
        bench.ledger.next_sequence("run-1")
        broken = OSError(errno.EIO, os.strerror(errno.EIO))
        with failing(owner, name, broken), pytest.raises(OperationError):
            bench.audit.append("silo.pause")
        for _ in range(2):  # as a guard that ends does
            bench.ledger.next_sequence("run-1")
    newest = files_of(place)
    if name == "fdatasync":  # the record stands all the same, and names what an older copy lacks
        put_back(place, kept)
        assert refused(place).code == "LEDGER_BEHIND"
        put_back(place, newest)
    assert place.start().how == "same"
    with closing(working(place)) as bench:
        bench.audit.append("silo.pause")
        bench.ledger.next_sequence("run-1")
        assert bench.ledger.heads is not None and len(bench.ledger.heads.logged) == 1
    assert place.start().how == "same"


@pytest.mark.parametrize("records", range(1, 5))
def test_T42_a_guard_killed_between_ledger_and_log_starts_again_and_its_older_ledger_does_not(
    place: PolicySite, records: int
) -> None:
    """A real process, killed as it begins to write its n-th record: what that one is about is in the ledger."""
    kept, named = files_of(place), disagreement_groups(place)

    def work() -> None:
        bench = working(place)
        write, written = SegmentWriter.append, 0

        def fatal(writer: SegmentWriter, line: bytes) -> None:
            nonlocal written
            written += 1
            if written == records:
                os.kill(os.getpid(), signal.SIGKILL)
            write(writer, line)

        SegmentWriter.append = fatal  # type: ignore[method-assign]
        offered = bench.factors()
        assert isinstance(offered, Allowed)
        bench.gate.transmit(offered)
        bench.judge.record("silo.pause")

    assert in_a_child(work) == -signal.SIGKILL
    newest = files_of(place)
    assert newest != kept
    if disagreement_groups(place) > named:
        put_back(place, kept)
        assert refused(place).code == "LEDGER_BEHIND"
        put_back(place, newest)
    else:
        assert records == 1  # of what the older one lacks nothing is in the log, and nothing left
    assert place.start().how == "same"


def test_T42_starts_that_are_refused_do_not_make_the_ledger_grow(place: PolicySite) -> None:
    place.policy_is(text_of(*ALWAYS, ("min_peers: 2", "min_peers: 1")))
    sizes = []
    for _ in range(4):
        place.now += timedelta(minutes=1)
        with pytest.raises(NotAllowedError) as error:
            place.start()
        assert error.value.code == "POLICY_LOOSER"
        with closing(Ledger(place.folder / "state" / LEDGER, read_only=True)) as ledger:
            assert ledger.heads is not None
            sizes.append(len(ledger.heads.logged))
    assert len(set(sizes)) == 1
    place.policy_is(text_of(*ALWAYS))
    assert place.start().how == "same"


# ---- a legitimate restore ----------------------------------------------------------------------------------------


def test_T42_two_approvers_let_a_restored_ledger_go_on_and_its_budgets_are_those_of_the_log(
    place: PolicySite, older: dict[Path, bytes]
) -> None:
    put_back(place, older)
    refused(place)
    accepts(place, "alice")
    assert "1 of 2" in refused(place).hint
    accepts(place, "bob")
    assert place.start().how == "same"
    (restored,) = [each for each in place.records("ledger.check") if each["reasons"] == ["LEDGER_RESTORED"]]
    assert restored["link"]["approvals"] == ["alice", "bob"] and len(restored["orders"]) == 2
    results, log = verify_logs([place.folder / "state" / "audit"]), place.folder / "state" / "audit"
    (verdicts,) = check_orders(results, [log], [place.authority.certificate_pem])
    assert verdicts[restored["seq"]] == "anchored" and results[0]["problems"] == []
    with closing(working(place)) as bench:
        again = bench.factors()
        assert isinstance(again, Denied), "the round's one update has left"
        assert [item.state for item in bench.ledger.outbox("allowed")] == []
    assert place.start().how == "same", "and from here on it is the ledger that the log names"
    (result,) = verify_logs([place.folder / "state" / "audit"])
    assert result["verified"]


def test_T42_the_same_signatures_serve_no_second_time(place: PolicySite, older: dict[Path, bytes]) -> None:
    put_back(place, older)
    two_accept(place)
    place.start()
    put_back(place, older)
    assert "0 of 2" in refused(place).hint


@pytest.mark.parametrize("who", ["one twice", "an operator", "of another ledger", "expired", "changed"])
def test_T42_what_is_no_second_approval(place: PolicySite, older: dict[Path, bytes], who: str) -> None:
    put_back(place, older)
    first = accepts(place, "alice")
    match who:
        case "one twice":
            with pytest.raises(ConflictError):
                accepts(place, "alice")
            first.with_name(first.name.replace("alice", "bob")).write_bytes(first.read_bytes())
        case "an operator":
            with pytest.raises(NotAllowedError):
                accepts(place, "dave")
        case "of another ledger":
            shown = disagreement(place)
            other, expires = {**shown.arguments, "code": "X"}, place.now + timedelta(hours=4)
            signed = place.signs("bob", ledger_check.ACCEPT, other, expires, place.config.federation)
            with pytest.raises(NotAllowedError):
                ledger_check.write_approval(place.config, shown, signed, place.people())
        case "expired":
            accepts(place, "bob")
            place.now += timedelta(hours=5)
        case "changed":
            content = json.loads(accepts(place, "bob").read_text())
            first.with_name(first.name.replace("alice", "bob")).write_text(
                json.dumps({"command": content["command"][:-8] + "AAAAAAA="})
            )
    assert refused(place).code == "LEDGER_BEHIND"


@pytest.mark.parametrize("federation", ["", "neuro-net", None])
def test_T29_T42_an_approval_of_a_ledger_names_this_federation(
    place: PolicySite, older: dict[Path, bytes], federation: str | None
) -> None:
    """No earlier version signed one, so none without a federation is taken; None here: its own."""
    put_back(place, older)
    accepts(place, "alice")
    shown, expires = disagreement(place), place.now + timedelta(hours=4)
    named = place.config.federation if federation is None else federation
    signed = place.signs("bob", ledger_check.ACCEPT, shown.arguments, expires, named)
    if federation is None:
        ledger_check.write_approval(place.config, shown, signed, place.people())
        assert place.start().how == "same"
        return
    with pytest.raises(NotAllowedError, match="federation"):
        ledger_check.write_approval(place.config, shown, signed, place.people())
    copied = place.folder / signed_files.PROPOSALS / f"ledger-{shown.digest[:16]}.bob.approval"
    signed_files.keep_signed(copied, signed)
    assert "1 of 2" in refused(place).hint


def test_T42_a_lost_ledger_is_rebuilt_from_the_log_by_two_approvers(
    place: PolicySite, older: dict[Path, bytes]
) -> None:
    put_back(place, {})
    assert refused(place).code == "LEDGER_LOST"
    two_accept(place)
    place.start()
    with closing(working(place)) as bench:
        assert isinstance(bench.factors(), Denied)


@pytest.mark.parametrize("lost", [False, True])
def test_T41_T42_a_start_with_a_disagreeing_ledger_stores_no_time_that_only_the_clock_shows(
    place: PolicySite, older: dict[Path, bytes], lost: bool
) -> None:
    right, newest = place.now, files_of(place)
    put_back(place, {} if lost else older)
    place.now = right + timedelta(days=400)
    assert refused(place).code == ("LEDGER_LOST" if lost else "LEDGER_BEHIND")
    place.now = right
    with place.audit() as audit:
        assert audit.latest_time <= right.timestamp() + 1
    put_back(place, newest)
    assert place.start().how == "same"


def test_T41_T42_a_restore_after_a_long_stop_is_accepted_and_recorded_at_the_last_time_known(
    place: PolicySite, older: dict[Path, bytes]
) -> None:
    """What people signed this week counts by the clock, and stores nothing by it."""
    stopped = place.now.timestamp()
    put_back(place, older)
    place.now += timedelta(days=7)
    for person in ("alice", "bob"):
        place.enrol(person)
        accepts(place, person)
    place.start()
    (checked,) = place.records("ledger.check")
    assert checked["reasons"] == ["LEDGER_RESTORED"] and checked["t"] / 1000 <= stopped + 1


def test_T41_T42_a_ledger_whose_clock_is_halted_lends_no_time_to_the_record(
    place: PolicySite, older: dict[Path, bytes]
) -> None:
    latest = place.now.timestamp()
    put_back(place, older)
    with closing(place.ledger()) as ledger:
        ledger.keep_clock_halt({"code": "CLOCK_AHEAD", "seconds": 1800.0, "showed": latest + 1800.0,
                                "should": latest, "against": "it", "nonce": "00"})  # fmt: skip
    place.now += timedelta(minutes=30)
    refused(place)
    (checked,) = place.records("ledger.check")
    assert checked["t"] / 1000 <= latest + 1


def test_T42_a_restored_ledger_brings_no_older_policy_back(place: PolicySite) -> None:
    kept = files_of(place)
    place.policy_is(text_of(*ALWAYS, TIGHTER))
    place.start()
    put_back(place, kept)
    two_accept(place)
    place.policy_is(text_of(*ALWAYS))
    assert "policy" in refused(place).message
    place.policy_is(text_of(*ALWAYS, TIGHTER))
    assert place.start().how == "same"


@pytest.mark.parametrize("restored", [True, False])
def test_T42_a_kind_that_was_halted_since_is_halted_in_a_restored_ledger(place: PolicySite, restored: bool) -> None:
    kept = files_of(place)
    with closing(working(place)) as bench:
        bench.ledger.next_sequence("run-1")
        bench.judge.record("halt", kind="public.responses", reasons=["SCREEN_HALT"], detail={"limit": 0})
    if restored:
        put_back(place, kept)
        for person in ("alice", "bob"):
            accepts(place, person)
    place.start()
    with closing(working(place)) as bench:
        assert list(bench.judge.book.screen_halts) == (["public.responses"] if restored else [])


def test_T42_what_the_restored_ledger_held_ends_and_is_recorded_as_ended(tmp_path: Path) -> None:
    place = PolicySite(tmp_path / "site")
    place.policy_is(text_of(*ALWAYS, first_rounds=1))
    place.start()
    with closing(working(place)) as bench:
        release = bench.hold(bench.factors())
    kept = files_of(place)
    with closing(working(place)) as bench:
        bench.judge.record("silo.pause")
        bench.ledger.next_sequence("run-1")
        bench.judge.record("silo.resume")
    put_back(place, kept)
    two_accept(place)
    place.start()
    (ended,) = place.records("approval.expire")
    assert (ended["detail"]["release"], ended["reasons"]) == (release.id, ["LEDGER_RESTORED"])
    with closing(working(place)) as bench:
        assert bench.ledger.release(release.id).state == "expired"
        assert bench.hold(bench.factors()).id == "r1/hospital_a/1"


def test_T42_killed_while_the_restored_ledger_is_taken_over_the_start_is_done_again(
    place: PolicySite, older: dict[Path, bytes]
) -> None:
    put_back(place, older)
    two_accept(place)
    for step in ("raise_to", "put_in_force"):
        with failing(Ledger, step), pytest.raises(Killed):
            place.start()
    assert place.start().how == "same"
    assert len([each for each in place.records("ledger.check") if "orders" in each]) == 1, "an order counts once"
    with closing(working(place)) as bench:
        assert isinstance(bench.factors(), Denied)


def test_T42_a_changed_signature_under_an_accepted_ledger_does_not_verify(
    place: PolicySite, older: dict[Path, bytes]
) -> None:
    put_back(place, older)
    two_accept(place)
    with place.audit() as audit:
        shown = place.people()
        given, _ = ledger_check.approvals_of(place.config, disagreement(place), shown)
        orders = [dict(command.order) for command in given.values()]
        audit.append(
            "ledger.check", reasons=["LEDGER_RESTORED"], link={"approvals": list(given)},
            detail={"shown": "0" * 64}, orders=orders,
        )  # fmt: skip
    results = verify_logs([place.folder / "state" / "audit"])
    check_orders(results, [place.folder / "state" / "audit"])
    assert not results[0]["verified"] and "another ledger" in results[0]["problems"][0]


@pytest.mark.parametrize("killed", [True, False])
def test_T42_polls_that_shared_a_record_are_counted_and_their_numbers_are_not_used_again(
    place: PolicySite, killed: bool
) -> None:
    kept = files_of(place)
    with closing(working(place)) as bench:
        for _ in range(3):
            bench.poll()
        if not killed:
            bench.gate.close_windows()
        used = bench.channel.sent[-1][0].sequence
        days = dict(bench.ledger.book["days"] if bench.ledger.book else {})
    put_back(place, kept)
    place.audit().close()  # closes the window that a kill left open
    two_accept(place)
    place.start()
    with closing(working(place)) as bench:
        counted = bench.ledger.book
        assert counted is not None and all(counted["days"][day] >= size for day, size in days.items())
        bench.poll()
        assert bench.channel.sent[-1][0].sequence > used


# ---- by commands -------------------------------------------------------------------------------------------------


def test_T42_silo_ledger_accept_shows_what_the_ledger_forgot_and_needs_two_people(
    place: PolicySite, older: dict[Path, bytes]
) -> None:
    line = ("ledger", "accept", "--config", place.folder / "silo.yaml", "--operator")
    code, answer = run(*line, "alice")
    assert (code, answer["error"]["code"]) == (2, "NOTHING_TO_ACCEPT")
    put_back(place, older)
    digest = disagreement(place).digest
    code, answer = run(*line, "alice")
    assert code == 2 and digest in answer["error"]["hint"]
    assert run(*line, "alice", "--expect-digest", "0" * 64)[0] == 6
    code, answer = run(*line, "alice", "--expect-digest", digest, "--dry-run")
    assert code == 0, answer
    code, answer = run(*line, "dave", "--expect-digest", digest, "--dry-run")
    assert code == 4, answer
    code, answer = run(*line, "alice", "--expect-digest", digest)
    assert (code, answer["data"]["approvers"]) == (9, ["alice"])
    assert run(*line, "dave", "--expect-digest", digest)[0] == 4
    code, answer = run(*line, "bob", "--expect-digest", digest)
    assert (code, answer["data"]["approvers"]) == (0, ["alice", "bob"])
    for person in ("alice", "bob"):
        signed = signed_files.read_signed(
            place.folder / signed_files.PROPOSALS / f"ledger-{digest[:16]}.{person}.approval"
        )
        assert signed.federation == place.config.federation
    assert place.start().how == "same"


def test_T42_what_the_log_says_since_is_what_the_ledger_does_not_know(
    place: PolicySite, older: dict[Path, bytes]
) -> None:
    put_back(place, older)
    records = ledger_check.since(typed_records(place.folder / "state" / "audit"), disagreement(place))
    assert "egress.sent" in [record.event for record in records]
    assert "start" not in [record.event for record in records]


def test_T42_a_ledger_that_cannot_be_read_is_an_error_with_a_name(place: PolicySite, older: dict[Path, bytes]) -> None:
    put_back(place, {place.folder / "state" / LEDGER: b"no database" * 100})
    with pytest.raises(OperationError):
        place.start()
