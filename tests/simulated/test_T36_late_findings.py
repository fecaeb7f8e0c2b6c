"""What is found after a person looked counts as not opened, and a yes counts as it stands in the log (T15, T36)."""

from __future__ import annotations

import dataclasses
import re
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from benchmarks.release_site import Site, policy
from certs.roles import Roles
from fedsilo.audit.segments import LogFullError
from fedsilo.control.server import ControlServer
from fedsilo.protocol.errors import ConflictError, NotAllowedError, OperationError
from silo.guard.archive import TICKET_SECONDS, Tickets
from silo.guard.commands import HeldPayloads
from silo.guard.ledger import Approval, Ledger, Release
from silo.guard.releases import Settled
from tests.simulated import screening
from tests.simulated.test_release_view import earlier
from tests.world import Bench, Loop, command

CANARY = screening.PLANTED["canary"]
LATE_CANARY = "silver-orchard-kettle-9052"


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with closing(Site(tmp_path / "site", "run-1", 3, policy())) as made:
        earlier(made)
        yield made


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Bench]:
    """A site whose answers two persons let go."""
    with closing(screening.bench(tmp_path, screening.policy(on_hit="hold", persons=2))) as bench:
        yield bench


def answers_held(bench: Bench) -> Release:
    held: Any = bench.responses((1, (CANARY,)), (4, ()), (7, ()))
    return bench.releases.hold(held, deadline_seconds=None)


def answer(bench: Bench, release: Release, person: str = "bob", **more: Any) -> Any:
    shown = {
        "release": release.id,
        "digest": release.digest,
        "policy_digest": bench.gate.policy.digest,
        **bench.shown(release),
    }
    return command("approvals.approve", shown | more, person=person)


def say_yes(bench: Bench, release: Release, person: str = "bob") -> Settled | None:
    return bench.releases.approve(answer(bench, release, person, **bench.opened(release.id)))[1]


def given(bench: Bench, release: Release) -> list[str]:
    view = bench.view(bench.ledger.release(release.id))
    return [one["person"] for one in view["approvers"]["given"]]


def codes(bench: Bench, release: Release) -> list[str]:
    return [one["code"] for one in bench.view(bench.ledger.release(release.id))["noticed"]]


# ---- a text that is a hit by now --------------------------------------------------------------------


@contextmanager
def started_again_with(site: Site, *canaries: str) -> Iterator[Bench]:
    view, destination = site.bench.gate.view, dict(site.bench.releases.destination)
    site.bench.screens = screening.screens(site.folder / "s2", canaries=(screening.CANARY, *canaries))
    site.bench = site.bench.restart()
    site.bench.gate.view = view
    site.bench.releases.destination.update(destination)
    yield site.bench


def test_T15_T36_a_hit_that_the_screens_find_later_is_shown_before_a_yes_counts(site: Site) -> None:
    held = site.hold_responses(6, 5, planted=f"the word is {LATE_CANARY} and 12")
    assert codes(site.bench, held) == []
    with started_again_with(site, LATE_CANARY) as bench:
        sent = len(bench.events("egress.decision"))
        with pytest.raises(ConflictError) as error:
            say_yes(bench, held)
        assert error.value.code == "STALE_VIEW" and bench.ledger.approvals(held.id) == []
        now = bench.ledger.release(held.id)
        assert (now.revision, now.state, now.facts["responses_hit"]) == (held.revision + 1, "held", 1)
        (finding,) = bench.view(now)["noticed"]
        assert finding["code"] == "SCREEN_HIT" and "canary/canary: row" in finding["says"]
        assert bench.events("approval.request")[-1]["reasons"] == ["SCREEN_HIT"]
        with pytest.raises(ConflictError) as error:
            bench.releases.approve(answer(bench, held))
        assert error.value.code == "FINDINGS_UNREAD" and len(bench.events("egress.decision")) == sent
        assert say_yes(bench, held) is not None
        assert bench.events("approval.grant")[-1]["detail"]["acknowledged"] == [finding["id"]]


def test_T36_screens_that_find_the_same_as_before_change_nothing(site: Site) -> None:
    held = site.hold_responses(6, 5, planted=CANARY)
    with started_again_with(site, LATE_CANARY) as bench:
        assert say_yes(bench, held) is not None and len(bench.events("approval.grant")) == 3


@pytest.mark.parametrize(
    "canaries", [(screening.CANARY, LATE_CANARY), ("nothing like any of it",)], ids=["one more hit", "none any more"]
)
def test_T36_a_hit_that_comes_or_goes_between_two_persons_voids_the_first_yes(
    pair: Bench, canaries: tuple[str, ...]
) -> None:
    held: Any = pair.responses((1, (f"{LATE_CANARY} 12",)), (4, (CANARY,)), (7, ()))
    release = pair.releases.hold(held, deadline_seconds=None)
    assert say_yes(pair, release, "alice") is None and given(pair, release) == ["alice"]
    pair.gate._screens._canaries = canaries
    with pytest.raises(ConflictError, match="find something else"):
        say_yes(pair, release, "carol")
    assert given(pair, release) == [] and pair.ledger.release(release.id).state == "held"
    assert say_yes(pair, release, "carol") is None and say_yes(pair, release, "alice") is not None


# ---- two persons ------------------------------------------------------------------------------------


def test_T36_a_yes_from_before_a_finding_counts_no_more_and_is_asked_for_again(pair: Bench) -> None:
    release = answers_held(pair)
    assert say_yes(pair, release, "alice") is None
    expired = datetime.fromtimestamp(pair.gate.now() - 60, UTC)
    pair.releases.destination.update({"certificate": "cd" * 32, "not_after": f"{expired:%Y-%m-%dT%H:%M:%SZ}"})
    assert given(pair, release) == []  # at once, for whoever looks
    assert say_yes(pair, release, "bob") is None and pair.ledger.release(release.id).state == "held"
    assert given(pair, release) == ["bob"]
    (asked,) = [one for one in pair.events("approval.request") if one["reasons"] == ["FINDINGS_UNREAD"]]
    assert asked["detail"]["person"] == "alice"
    settled = say_yes(pair, release, "alice")
    assert settled is not None and settled.outcome == "allowed"
    named = pair.events("egress.decision")[-1]["link"]["approvals"]
    grants = {one["seq"]: one["detail"] for one in pair.events("approval.grant")}
    assert len(grants) == 3 and [grants[number]["person"] for number in named] == ["bob", "alice"]
    assert all(len(grants[number]["acknowledged"]) == 2 for number in named)


# ---- on record --------------------------------------------------------------------------------------


def test_T36_T39_a_yes_that_could_not_be_recorded_does_not_count_and_is_given_again(
    pair: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = answers_held(pair)

    def fails(*arguments: Any, **fields: Any) -> int:
        raise OperationError("no space")

    with monkeypatch.context() as failing:
        failing.setattr(pair.gate, "record", fails)
        with pytest.raises(OperationError):
            say_yes(pair, release, "alice")
    assert say_yes(pair, release, "bob") is None and given(pair, release) == ["bob"]
    assert say_yes(pair, release, "alice") is not None
    assert [one["detail"]["person"] for one in pair.events("approval.grant")] == ["bob", "alice"]


def test_T36_a_yes_of_a_ledger_without_record_numbers_does_not_count(pair: Bench) -> None:
    release = answers_held(pair)
    opened = tuple(pair.opened(release.id)["acknowledged"])
    yes = Approval(release.id, "alice", "f" * 64, release.digest, "approve", "", pair.gate.now(), opened)
    pair.ledger.approve(yes)
    assert given(pair, release) == [] and say_yes(pair, release, "bob") is None
    assert say_yes(pair, release, "alice") is not None


def test_an_older_ledger_is_opened_and_its_answers_are_read(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite3"
    with closing(sqlite3.connect(path)) as database, database:
        database.execute(
            "CREATE TABLE approvals (release_id TEXT, person TEXT, fingerprint TEXT NOT NULL, digest TEXT NOT NULL, "
            "verdict TEXT NOT NULL, reason TEXT NOT NULL, at REAL NOT NULL, PRIMARY KEY (release_id, person))"
        )
        database.execute("INSERT INTO approvals VALUES ('r1', 'alice', 'f', 'd', 'approve', '', 1.0)")
    before = Approval("r1", "alice", "f", "d", "approve", "", 1.0)
    with closing(Ledger(path, read_only=True)) as reader:
        assert reader.approvals("r1") == [before]
    opened = dataclasses.replace(before, person="bob", acknowledged=("A-1", "B-2"), record=7, at=2.0)
    for _ in range(2):
        with closing(Ledger(path)) as ledger:
            ledger.approve(opened, again=True)
            assert ledger.approvals("r1") == [before, opened]
            with pytest.raises(ConflictError):
                ledger.approve(opened)


# ---- where it went ----------------------------------------------------------------------------------


def test_T36_what_is_kept_of_a_release_is_where_it_went_when_its_findings_were_looked_at(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = site.hold_factors(1.0)
    releases, counted = site.bench.releases, site.bench.releases._given
    seen = releases.destination["certificate"]

    def changes_meanwhile(release: Release) -> Any:
        releases.destination["certificate"] = "ab" * 32
        return counted(release)

    with monkeypatch.context() as other_thread:
        other_thread.setattr(releases, "_given", changes_meanwhile)
        settled = say_yes(site.bench, held)
    assert settled is not None and settled.allowed is not None
    assert site.bench.ledger.kept_of_release(held.id)["destination"]["certificate"] == seen
    site.bench.gate.transmit(settled.allowed)
    site.open_round(site.round + 1)
    assert "NEW_CERTIFICATE" in codes(site.bench, site.hold_factors(1.0))


def test_T36_what_never_left_is_nothing_to_compare_with(tmp_path: Path) -> None:
    day = "  day_bytes: 360000"
    with closing(Site(tmp_path / "site", "run-1", 3, policy({day: "  day_bytes: 90000"}))) as site:
        earlier(site)
        bench, first, second = site.bench, site.hold_factors(1.0), site.hold_factors(1.0)
        site.let_go(first)
        far_end = bench.ledger.far_end
        bench.gate.adopt(policy({day: "  day_bytes: 89000"}))
        assert bench.releases.judge_again() == []
        bench.releases.destination["address"] = "198.51.100.23:7443"
        settled = say_yes(bench, second)
        assert settled is not None and settled.outcome == "denied"
        then = bench.ledger.policy_of_sent("lora.factors")
        assert then is not None and then.digest != bench.gate.policy.digest
        assert bench.ledger.far_end == far_end and "destination" not in bench.ledger.kept_of_release(second.id)


def test_since_when_the_far_end_is_used_begins_anew_with_another_one(site: Site) -> None:
    def since() -> Any:
        return site.bench.view(site.hold_responses(6, 5))["leaves"]["destination"].get("since_round")

    assert since() == 1
    site.bench.releases.destination["certificate"] = "ab" * 32
    assert since() is None
    site.let_go(site.hold_factors(1.0))
    assert since() == 2


# ---- counts of this moment --------------------------------------------------------------------------


def test_what_is_used_of_a_limit_is_told_in_the_unit_of_the_limit(tmp_path: Path) -> None:
    smaller = policy({"  day_bytes: 360000": "  day_bytes: 130000"})
    with closing(Site(tmp_path / "site", "run-1", 3, smaller)) as site:
        site.let_go(site.hold_responses(3, 14))
        used = site.bench.view(site.hold_factors(1.0))["uses"]
        assert re.search(r"day \d\.\dK->\d\dK of 127K", used), used


def test_the_counts_that_people_see_are_those_of_the_moment(tmp_path: Path) -> None:
    day = "  day_bytes: 360000"
    with closing(Site(tmp_path / "site", "run-1", 3, policy({day: "  day_bytes: 130000"}))) as site:
        earlier(site)
        bench, first, second = site.bench, site.hold_factors(1.0), site.hold_factors(1.0)
        assert "day 34K->67K of 127K" in bench.view(second)["uses"]
        before = bench.opened(second.id)
        site.let_go(first)
        shown = bench.view(second)
        assert "day 67K->99K" in shown["uses"]
        assert {one["code"] for one in shown["noticed"]} == {"BUDGET", "SECOND_RELEASE"}
        assert not set(before["acknowledged"]) & {one["id"] for one in shown["noticed"]}
        bench.gate.adopt(policy({day: "  day_bytes: 129000"}))
        assert bench.releases.judge_again() == []
        assert "BUDGET" in codes(bench, second)
        kept = {rule["rule"]: rule["measured"] for rule in bench.ledger.release(second.id).rules}
        assert kept["factor sets per round"] == 2
        # some bytes of polls make no other finding of it
        opened = bench.opened(second.id)
        bench.gate._judge.book.days = {name: used + 40 for name, used in bench.gate._judge.book.days.items()}
        bench.ledger.keep_book(bench.gate._judge.book.to_json())
        assert bench.opened(second.id) == opened


def test_showing_a_release_reads_neither_all_that_left_nor_all_that_was_approved(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = site.hold_factors(1.0)

    def unbounded(*arguments: Any) -> Any:
        raise AssertionError("the whole table is read")

    before = site.bench.view(held), site.bench.releases.comparison(held)["against"]
    with monkeypatch.context() as counted:
        counted.setattr(site.bench.ledger, "outbox", unbounded)
        counted.setattr(site.bench.ledger, "releases", unbounded)
        assert (site.bench.view(held), site.bench.releases.comparison(held)["against"]) == before
    assert before[1]["approved_by"] == ["bob"]


def test_showing_a_release_writes_nothing(tmp_path: Path) -> None:
    with closing(Site(tmp_path / "site", "run-1", 3, policy())) as site:
        held, ledger = site.hold_factors(1.0), site.bench.ledger
        assert len(ledger.finding_key()) == 32
        ledger._database.execute("PRAGMA query_only=1")
        site.bench.view(held)
        site.show()
        ledger._database.execute("PRAGMA query_only=0")


# ---- reading what would leave -----------------------------------------------------------------------


def asked(release: Release) -> Any:
    return command("approvals.payload", {"release": release.id, "digest": release.digest}, person="vera")


def test_the_loop_only_checks_and_records_a_reading(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    held, on_loop = site.hold_factors(1.0), [False]
    bench = site.bench
    payloads = HeldPayloads(bench.ledger, bench.audit, lambda: ())
    read, append = bench.ledger.payloads.read, bench.audit.append

    def loop(work: Callable[[], Any]) -> Any:
        on_loop[0] = True
        try:
            return work()
        finally:
            on_loop[0] = False

    def reads(digest: str) -> bytes:
        assert not on_loop[0]
        return read(digest)

    def appends(event: str, **fields: Any) -> int:
        assert on_loop[0]
        return append(event, **fields)

    monkeypatch.setattr(bench.ledger.payloads, "read", reads)
    payloads._record = appends
    told = payloads.ask(asked(held), loop)
    assert payloads.fetch({"ticket": told["ticket"]})["tensors_total"] == 16


def test_a_ticket_ends_with_its_hold_and_with_its_time(site: Site) -> None:
    held, bench = site.hold_responses(3, 5), site.bench
    payloads = HeldPayloads(bench.ledger, bench.audit, lambda: ())
    ticket = payloads.ask(asked(held))
    no = answer(bench, held, reason_code="CONTENT")
    bench.releases.reject(no)
    with pytest.raises(ConflictError) as error:
        payloads.fetch(ticket)
    assert error.value.code == "NOT_HELD"
    now = [0.0]
    tickets = Tickets(lambda: now[0])
    first, now[0] = tickets.hand_out(lambda: {"a": 1}), TICKET_SECONDS
    assert tickets.take({"ticket": first}) == {"a": 1}
    second, now[0] = tickets.hand_out(lambda: {"a": 2}), 2 * TICKET_SECONDS + 0.5
    with pytest.raises(NotAllowedError):
        tickets.take({"ticket": second})


def test_T39_a_reading_that_the_log_does_not_take_halts_the_gate(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    held, bench = site.hold_responses(3, 5), site.bench
    desk = ControlServer("hospital_a", b"", Roles("hospital_a", {}), lambda: datetime.now(UTC))
    dataclasses.replace(site.guard.orders, on_loop=lambda work: work()).register(desk)
    ask = desk._commands["approvals.payload"].handler
    assert ask(asked(held))["ticket"] and bench.gate.halted == ""

    def full(*arguments: Any, **fields: Any) -> int:
        raise LogFullError("no space")

    monkeypatch.setattr(bench.audit, "append", full)
    with pytest.raises(LogFullError):
        ask(asked(held))
    assert "no space" in bench.gate.halted


# ---- a pause ----------------------------------------------------------------------------------------


def test_a_pause_outlives_a_restart_and_ends_with_the_order_to_go_on(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:

    def order(name: str) -> dict[str, Any]:
        orders = dataclasses.replace(loop.guard.orders, on_loop=lambda work: work())
        told: dict[str, Any] = getattr(orders, name)(command(name, {}))
        return told

    def paused_after_restart() -> bool:
        loop.restart()
        loop.turn()
        assert loop.guard.runs.run is not None
        return loop.guard.runs.run.paused

    loop.offer_plan()
    loop.turn()
    assert not paused_after_restart()
    assert order("pause")["paused"] and paused_after_restart()
    assert not order("resume")["paused"] and not paused_after_restart()

    def full(*arguments: Any) -> None:
        raise OperationError("no space", code="LEDGER_UNWRITABLE")

    with monkeypatch.context() as failing:
        failing.setattr(loop.bench.ledger, "keep_paused", full)
        told, run = order("pause"), loop.guard.runs.run
        assert told["paused"] and told["until_restart"] and run is not None and run.paused
        with pytest.raises(OperationError):
            order("resume")
        assert run.paused
