"""T36: a yes counts beside its findings when its person has opened each of them, also those that a later look
brings.
"""

from __future__ import annotations

import dataclasses
import json
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
from fedsilo.control.answers import Finding, read, to_json
from fedsilo.control.server import ControlServer
from fedsilo.protocol.errors import (
    ConflictError,
    NotAllowedError,
    NotFoundError,
    OperationError,
    UsageError,
    VerificationError,
)
from silo.guard.answers.queries import ledger_page, release_page
from silo.guard.archive import EDGES, TICKET_SECONDS, Tickets, payload_view
from silo.guard.commands import HeldPayloads
from silo.guard.findings import finding_id
from silo.guard.ledger import Approval, Ledger, Release
from tests.simulated import screening
from tests.simulated.test_release_view import earlier
from tests.world import Bench, Loop, at_once, command, failing

CANARY = screening.PLANTED["canary"]


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with closing(Site(tmp_path / "site", "run-1", 3, policy())) as made:
        earlier(made)
        yield made


def ids(site: Site, release: Release) -> list[str]:
    return site.bench.opened(release.id)["acknowledged"]


def refused(site: Site, release: Release, **more: Any) -> str:
    with pytest.raises(ConflictError) as error:
        site.bench.approve(release, "bob", opened=False, **more)
    assert site.bench.ledger.approvals(release.id) == [] and site.bench.events("approval.grant")[2:] == []
    assert error.value.exit_code == 6
    return error.value.code


def test_T36_an_approval_counts_only_with_every_finding_opened(site: Site) -> None:
    site.bench.releases.destination["address"] = "198.51.100.23:7443"
    held = site.hold_factors(3.0)
    opened = ids(site, held)
    assert [one.partition("-")[0] for one in opened] == ["NEW_DESTINATION", "NORM_OUTLIER"]
    for acknowledged in ([], opened[:1], opened[1:], ["NEW_DESTINATION-00000000", *opened[1:]], [held.id]):
        assert refused(site, held, acknowledged=acknowledged) == "FINDINGS_UNREAD"
    assert refused(site, held) == "FINDINGS_UNREAD"
    settled = site.bench.approve(held, "bob", opened=False, acknowledged=[*opened, "SOMETHING-else"])
    assert settled is not None and settled.release.state == "approved" and settled.allowed is not None
    # the record has what was opened here, and nothing of what else the person sent
    assert site.bench.events("approval.grant")[-1]["detail"]["acknowledged"] == opened


def test_T36_without_findings_nothing_has_to_be_opened(site: Site) -> None:
    held = site.hold_factors(1.0)
    assert ids(site, held) == []
    assert site.bench.approve(held, opened=False) is not None
    assert "acknowledged" not in site.bench.events("approval.grant")[-1]["detail"]


@pytest.mark.parametrize("given", ["NEW_DESTINATION", [1], ["x"] * 65, {"a": 1}])
def test_acknowledged_is_a_list_of_ids(site: Site, given: Any) -> None:
    with pytest.raises(UsageError):
        site.bench.approve(site.hold_factors(1.0), opened=False, acknowledged=given)


def test_T36_a_finding_that_came_since_the_person_looked_counts_as_not_opened(site: Site) -> None:
    """Neither bytes nor policy nor revision say so."""
    held = site.hold_factors(1.0)
    first = ids(site, held)
    site.bench.releases.destination["certificate"] = "ab" * 32
    second = ids(site, held)
    assert (first, len(second)) == ([], 1)
    assert refused(site, held, acknowledged=first) == "FINDINGS_UNREAD"
    # another certificate, of the same first digits as people are shown them, is another finding
    site.bench.releases.destination["certificate"] = "ab" * 31 + "ac"
    assert refused(site, held, acknowledged=second) == "FINDINGS_UNREAD"
    assert site.bench.approve(held) is not None


def test_T36_an_id_is_of_one_release_and_stays_over_a_restart(site: Site) -> None:
    site.bench.releases.destination["address"] = "198.51.100.23:7443"
    first, second = site.hold_factors(1.0), site.hold_responses(12, 14)
    assert not set(ids(site, first)) & set(ids(site, second))
    assert refused(site, second, acknowledged=ids(site, first)) == "FINDINGS_UNREAD"
    before = ids(site, first)
    site.bench.ledger.close()
    again = site.bench.restart()
    again.releases.destination = dict(site.bench.releases.destination)
    assert again.opened(first.id)["acknowledged"] == before
    again.close()


def test_T40_an_id_cannot_be_found_by_guessing_what_it_says(site: Site) -> None:
    held = site.hold_responses(12, 14, planted=CANARY)
    (finding,) = [one for one in site.bench.view(held)["noticed"] if one["code"] == "SCREEN_HIT"]
    assert finding_id(site.bench.ledger.finding_key(), held, read(Finding, finding)) == finding["id"]
    assert finding_id(b"", held, read(Finding, finding)) != finding["id"] and CANARY not in json.dumps(finding)
    assert len(site.bench.ledger.finding_key()) == 32


def test_T36_two_persons_each_open_every_finding(pair: Bench) -> None:
    release = pair.hold(pair.responses((1, (CANARY,)), (4, ()), (7, ())))
    assert pair.approve(release, "alice") is None
    for person, opened, code in (("carol", False, "FINDINGS_UNREAD"), ("alice", True, "CONFLICT")):
        with pytest.raises(ConflictError) as refused:
            pair.approve(release, person, opened=opened)
        assert refused.value.code == code
    assert pair.approve(release, "carol") is not None


def test_a_no_needs_nothing_opened(site: Site) -> None:
    held = site.hold_factors(3.0)
    assert ids(site, held)
    assert site.bench.reject(held).release.state == "rejected"


# ---- later ------------------------------------------------------------------------------------------


def later(site: Site, release: Release, seconds: Any, person: str = "bob", **more: Any) -> None:
    until = site.bench.clock_now + seconds if isinstance(seconds, float) else seconds
    order = site.bench.answer(release, "defer", person=person, opened=False, until_seconds=until, **more)
    site.bench.releases.defer(order)


def test_to_put_off_is_recorded_is_for_one_person_and_stops_no_clock(site: Site) -> None:
    held = site.hold_factors(1.0)
    before = site.bench.view(held)
    assert before["deferred"] == {}
    later(site, held, 600.0)
    view = site.bench.view(site.bench.ledger.release(held.id))
    assert view["deferred"] == {"bob": site.bench.clock_now + 600.0}
    assert {**view, "deferred": {}} == before  # same digest, revision, expiry: a view that was read still counts
    (record,) = site.bench.events("release.defer")
    assert record["detail"]["person"] == "bob" and record["detail"]["until"] == int(site.bench.clock_now + 600)
    later(site, held, 60.0, person="alice")
    assert set(site.bench.ledger.deferred(held.id)) == {"alice", "bob"}
    site.wait(3601.0)
    assert [one.outcome for one in site.bench.releases.expire()] == ["missed"]


@pytest.mark.parametrize("until", [None, "soon", True, -1.0, 0.0, float("inf"), float("nan")])
def test_to_put_off_needs_a_time_to_come(site: Site, until: Any) -> None:
    held = site.hold_factors(1.0)
    with pytest.raises(UsageError):
        later(site, held, until)
    assert site.bench.ledger.deferred(held.id) == {} and site.bench.events("release.defer") == []


def test_T41_nobody_puts_off_past_the_end_of_the_hold_or_what_is_not_held(site: Site) -> None:
    held = site.hold_factors(1.0)

    def code(seconds: float, **more: Any) -> str:
        with pytest.raises(ConflictError) as error:
            later(site, held, seconds, **more)
        return error.value.code

    assert code(3600.0) == code(7200.0) == "TOO_LATE"
    assert code(60.0, digest="0" * 64) == "STALE_VIEW"
    site.bench.approve(held)
    assert code(60.0) == "NOT_HELD" and site.bench.events("release.defer") == []


# ---- what would leave -------------------------------------------------------------------------------


def reading(bench: Bench) -> HeldPayloads:
    return HeldPayloads(
        bench.ledger, bench.audit, lambda: bench.judge.site.public.tasks.rows, record=bench.judge.record
    )


def asked(release: Release, person: str = "vera", **changes: Any) -> Any:
    return command("approvals.payload", {"release": release.id, "digest": release.digest, **changes}, person=person)


def test_T40_answers_stand_beside_our_own_prompts_and_the_reading_is_recorded(site: Site) -> None:
    held = site.hold_responses(6, 5, planted="\x1b]0;owned\x07 12")
    payloads = reading(site.bench)
    told = payloads.ask(asked(held), at_once)
    assert set(told) == {"ticket", "record", "audit_size"}  # what the desk remembers of the command holds no content
    (record,) = site.bench.events("payload.read")
    assert record["detail"] == {"person": "vera", "certificate": "f" * 64, "release": held.id}
    shown = to_json(payloads.fetch({"ticket": told["ticket"]}))
    assert [row["prompt"] for row in shown["answers"]] == [f"prompt {row['row']}" for row in shown["answers"]]
    assert sum(len(row["answers"]) for row in shown["answers"]) == 6 and shown["sha256"] == held.digest
    assert "\\u001b" in json.dumps(shown)
    with pytest.raises(NotAllowedError):
        payloads.fetch({"ticket": told["ticket"]})


def test_T36_a_payload_is_read_while_it_is_held_and_as_it_was_shown(site: Site) -> None:
    held, payloads = site.hold_factors(1.0), reading(site.bench)
    with pytest.raises(ConflictError) as error:
        payloads.ask(asked(held, digest="0" * 64), at_once)
    assert error.value.code == "STALE_VIEW"
    with pytest.raises(NotFoundError):
        payloads.ask(command("approvals.payload", {"release": "r9/none/0"}), at_once)
    assert payloads.ask(asked(held, digest=f"sha256:{held.digest}"), at_once)["ticket"]
    path = site.bench.folder / "payloads" / held.digest
    kept = path.read_bytes()
    path.write_bytes(kept[:-1] + b"x")
    with pytest.raises(VerificationError):
        payloads.ask(asked(held), at_once)
    path.write_bytes(kept)
    site.bench.approve(held)
    with pytest.raises(ConflictError) as error:
        payloads.ask(asked(held), at_once)
    assert error.value.code == "NOT_HELD" and len(site.bench.events("payload.read")) == 1


def test_of_tensors_no_value_is_shown(site: Site) -> None:
    held = site.hold_factors(1.0)
    shown = to_json(payload_view(held, site.bench.ledger.payloads.read(held.digest), ()))
    assert shown["edges"] == list(EDGES)
    for row in shown["tensors"]:
        counts = row["histogram"]
        assert sum(counts["negative"]) + sum(counts["positive"]) + counts["zero"] == row["shape"][0] * row["shape"][1]
        assert row["type"] == "float32" and counts["not_finite"] == 0 and len(counts["negative"]) == len(EDGES)
        assert set(row) == {"name", "shape", "type", "norm", "histogram"} and len(row["norm"]) <= 9
    assert 0 < sum(float(row["norm"]) ** 2 for row in shown["tensors"]) ** 0.5 < 2 * site.usual_l2


def test_a_row_that_the_public_set_does_not_have_has_no_prompt(site: Site) -> None:
    held = site.hold_responses(3, 5)
    shown = payload_view(held, site.bench.ledger.payloads.read(held.digest), ())
    assert {row.prompt for row in shown.answers} == {None}


# ---- beside the last one ----------------------------------------------------------------------------


def test_the_whole_comparison_names_who_approved_the_last_one_and_every_figure(site: Site) -> None:
    held = site.hold_factors(2.0)
    found = site.bench.comparison(held)
    json.dumps(to_json(found))
    assert found.against is not None and found.against.round == 1 and found.against.approved_by == ("bob",)
    rows = {row.what: row for row in found.rows}
    assert not rows["bytes"].differs and rows["sha256"].now == held.digest and rows["sha256"].differs
    assert not rows["policy"].differs and not rows["address"].differs
    assert rows["l2"].now == pytest.approx(2 * rows["l2"].before, rel=0.5)  # both are drawn near the usual norm
    assert found.note == ""
    again = site.bench.comparison  # of another release, so that nothing is remembered
    (site.bench.folder / "payloads" / found.against.digest).write_bytes(b"no message")
    unread = again(site.hold_factors(1.0))
    assert "cannot be read" in unread.note and unread.tensors == ()
    site.bench.ledger.drop_payloads([found.against.digest], archived=True)
    assert "not here" in again(site.hold_factors(1.0)).note


def test_tensors_are_compared_by_their_norms_largest_change_first(site: Site) -> None:
    first = site.hold_factors(1.0)
    site.let_go(first)
    site.open_round(site.round + 1)
    found = site.bench.comparison(held := site.hold_factors(2.0))
    times = [row.times or 0.0 for row in found.tensors]
    assert times == sorted(times, reverse=True) and len(times) == 12 < found.tensors_total == 16
    assert all(1.2 < one < 3.5 for one in times)  # twice, as far as norms of small random tensors tell
    assert site.bench.comparison(held) == found


def test_the_first_release_has_nothing_beside_it(tmp_path: Path) -> None:
    with closing(Site(tmp_path / "site", "run-1", 3, policy())) as first:
        found = first.bench.comparison(first.hold_factors(1.0))
        assert found.against is None and found.rows == () and "first release" in found.note


# ---- pages ------------------------------------------------------------------------------------------


def test_pages_of_releases_hold_each_once_newest_first(site: Site) -> None:
    ledger = site.bench.ledger
    held = [site.hold_responses(3, 5).id for _ in range(4)]
    everything = [release.id for release in reversed(ledger.releases())]
    seen: list[str] = []
    before = None
    while True:
        page = release_page(ledger, {"limit": 2, "before": before})
        assert page.total == len(everything) and len(page.releases) <= 2
        seen += [row.id for row in page.releases]
        if (before := page.next) is None:
            break
        site.hold_responses(3, 5)  # what comes in meanwhile moves no page
        everything = [release.id for release in reversed(ledger.releases())]
    assert seen == [name for name in everything if name in seen] and len(seen) == len(set(seen)) == 6
    assert set(held) <= set(seen)
    sent = release_page(ledger, {"kind": "lora.factors", "state": "approved"})
    assert [row.kind for row in sent.releases] == ["lora.factors"] and sent.next is None
    (told,) = sent.releases[0].answers
    assert (told.person, told.verdict, told.at[-1]) == ("bob", "approve", "Z")


def test_the_ledger_is_paged_as_well(site: Site) -> None:
    whole = ledger_page(site.bench.ledger, {})
    assert [row.kind for row in whole.content] == ["lora.factors", "public.responses"] and whole.next is None
    first = ledger_page(site.bench.ledger, {"limit": 1})
    second = ledger_page(site.bench.ledger, {"limit": 1, "before": first.next})
    assert (*first.content, *second.content) == whole.content and second.next is None
    assert first.total == 2 and first.runs == whole.runs


@pytest.mark.parametrize("wrong", [{"limit": 0}, {"limit": 501}, {"before": -1}, {"state": "gone"}, {"x": 1}])
def test_a_wrong_argument_is_refused(site: Site, wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        release_page(site.bench.ledger, wrong)


LATE_CANARY = "silver-orchard-kettle-9052"


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Bench]:
    """A site whose answers two persons let go."""
    with closing(screening.bench(tmp_path, screening.policy(on_hit="hold", persons=2))) as bench:
        yield bench


def answers_held(bench: Bench) -> Release:
    return bench.hold(bench.responses((1, (CANARY,)), (4, ()), (7, ())))


def given(bench: Bench, release: Release) -> list[str]:
    view = bench.view(bench.ledger.release(release.id))
    return [one["person"] for one in view["approvers"]["given"]]


def codes(bench: Bench, release: Release) -> list[str]:
    return [one["code"] for one in bench.view(bench.ledger.release(release.id))["noticed"]]


# ---- a text that is a hit by now --------------------------------------------------------------------


@contextmanager
def started_again_with(site: Site, *canaries: str) -> Iterator[Bench]:
    view, destination = site.bench.judge.view, dict(site.bench.releases.destination)
    site.bench.screens = screening.screens(site.folder / "s2", canaries=(screening.CANARY, *canaries))
    site.bench = site.bench.restart()
    site.bench.judge.view = view
    site.bench.releases.destination.update(destination)
    yield site.bench


def test_T15_T36_a_hit_that_the_screens_find_later_is_shown_before_a_yes_counts(site: Site) -> None:
    held = site.hold_responses(6, 5, planted=f"the word is {LATE_CANARY} and 12")
    assert codes(site.bench, held) == []
    with started_again_with(site, LATE_CANARY) as bench:
        sent = len(bench.events("egress.decision"))
        with pytest.raises(ConflictError) as error:
            bench.approve(held)
        assert error.value.code == "STALE_VIEW" and bench.ledger.approvals(held.id) == []
        now = bench.ledger.release(held.id)
        assert (now.revision, now.state, now.facts["responses_hit"]) == (held.revision + 1, "held", 1)
        (finding,) = bench.view(now)["noticed"]
        assert finding["code"] == "SCREEN_HIT" and "canary/canary: row" in finding["says"]
        assert bench.events("approval.request")[-1]["reasons"] == ["SCREEN_HIT"]
        with pytest.raises(ConflictError) as error:
            bench.approve(held, opened=False)
        assert error.value.code == "FINDINGS_UNREAD" and len(bench.events("egress.decision")) == sent
        assert bench.approve(held) is not None
        assert bench.events("approval.grant")[-1]["detail"]["acknowledged"] == [finding["id"]]


def test_T36_screens_that_find_the_same_as_before_change_nothing(site: Site) -> None:
    held = site.hold_responses(6, 5, planted=CANARY)
    with started_again_with(site, LATE_CANARY) as bench:
        assert bench.approve(held) is not None and len(bench.events("approval.grant")) == 3


@pytest.mark.parametrize(
    "canaries", [(screening.CANARY, LATE_CANARY), ("nothing like any of it",)], ids=["one more hit", "none any more"]
)
def test_T36_a_hit_that_comes_or_goes_between_two_persons_voids_the_first_yes(
    pair: Bench, canaries: tuple[str, ...]
) -> None:
    release = pair.hold(pair.responses((1, (f"{LATE_CANARY} 12",)), (4, (CANARY,)), (7, ())))
    assert pair.approve(release, "alice") is None and given(pair, release) == ["alice"]
    pair.judge._screens._canaries = canaries
    with pytest.raises(ConflictError) as error:
        pair.approve(release, "carol")
    assert error.value.code == "STALE_VIEW"
    assert given(pair, release) == [] and pair.ledger.release(release.id).state == "held"
    assert pair.approve(release, "carol") is None and pair.approve(release, "alice") is not None


# ---- two persons ------------------------------------------------------------------------------------


def test_T36_a_yes_from_before_a_finding_counts_no_more_and_is_asked_for_again(pair: Bench) -> None:
    release = answers_held(pair)
    assert pair.approve(release, "alice") is None
    expired = datetime.fromtimestamp(pair.judge.now() - 60, UTC)
    pair.releases.destination.update({"certificate": "cd" * 32, "not_after": f"{expired:%Y-%m-%dT%H:%M:%SZ}"})
    assert given(pair, release) == []  # at once, for whoever looks
    assert pair.approve(release, "bob") is None and pair.ledger.release(release.id).state == "held"
    assert given(pair, release) == ["bob"]
    (asked,) = [one for one in pair.events("approval.request") if one["reasons"] == ["FINDINGS_UNREAD"]]
    assert asked["detail"]["person"] == "alice"
    settled = pair.approve(release, "alice")
    assert settled is not None and settled.outcome == "allowed"
    named = pair.events("egress.decision")[-1]["link"]["approvals"]
    grants = {one["seq"]: one["detail"] for one in pair.events("approval.grant")}
    assert len(grants) == 3 and [grants[number]["person"] for number in named] == ["bob", "alice"]
    assert all(len(grants[number]["acknowledged"]) == 2 for number in named)


# ---- on record --------------------------------------------------------------------------------------


def test_T36_T39_a_yes_that_could_not_be_recorded_does_not_count_and_is_given_again(pair: Bench) -> None:
    release = answers_held(pair)
    with failing(pair.judge, "record", OperationError("no space")), pytest.raises(OperationError):
        pair.approve(release, "alice")
    assert pair.approve(release, "bob") is None and given(pair, release) == ["bob"]
    assert pair.approve(release, "alice") is not None
    assert [one["detail"]["person"] for one in pair.events("approval.grant")] == ["bob", "alice"]


def test_T36_a_yes_of_a_ledger_without_record_numbers_does_not_count(pair: Bench) -> None:
    release = answers_held(pair)
    opened = tuple(pair.opened(release.id)["acknowledged"])
    yes = Approval(release.id, "alice", "f" * 64, release.digest, "approve", "", pair.judge.now(), opened)
    pair.ledger.approve(yes)
    assert given(pair, release) == [] and pair.approve(release, "bob") is None
    assert pair.approve(release, "alice") is not None


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
    seen, yes = releases.destination["certificate"], site.bench.answer(held)

    def changes_meanwhile(release: Release) -> Any:
        releases.destination["certificate"] = "ab" * 32
        return counted(release)

    with monkeypatch.context() as other_thread:
        other_thread.setattr(releases, "_given", changes_meanwhile)
        _, settled = releases.approve(yes)
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
        bench.judge.policy = policy({day: "  day_bytes: 89000"})
        assert bench.releases.rejudge_held() == []
        bench.releases.destination["address"] = "198.51.100.23:7443"
        settled = bench.approve(second)
        assert settled is not None and settled.outcome == "denied"
        then = bench.ledger.policy_of_sent("lora.factors")
        assert then is not None and then.digest != bench.judge.policy.digest
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
        bench.judge.policy = policy({day: "  day_bytes: 129000"})
        assert bench.releases.rejudge_held() == []
        assert "BUDGET" in codes(bench, second)
        kept = {rule.rule: rule.measured for rule in bench.ledger.release(second.id).rules}
        assert kept["factor sets per round"] == 2
        # some bytes of polls make no other finding of it
        opened = bench.opened(second.id)
        bench.judge.book.days = {name: used + 40 for name, used in bench.judge.book.days.items()}
        bench.ledger.keep_book(bench.judge.book.to_json())
        assert bench.opened(second.id) == opened


def test_showing_a_release_reads_neither_all_that_left_nor_all_that_was_approved(site: Site) -> None:
    held = site.hold_factors(1.0)
    before = site.bench.view(held), site.bench.comparison(held).against
    whole = AssertionError("the whole table is read")
    with failing(site.bench.ledger, "outbox", whole), failing(site.bench.ledger, "releases", whole):
        assert (site.bench.view(held), site.bench.comparison(held).against) == before
    assert before[1] is not None and before[1].approved_by == ("bob",)


def test_showing_a_release_writes_nothing(tmp_path: Path) -> None:
    with closing(Site(tmp_path / "site", "run-1", 3, policy())) as site:
        held, ledger = site.hold_factors(1.0), site.bench.ledger
        assert len(ledger.finding_key()) == 32
        ledger._database.execute("PRAGMA query_only=1")
        site.bench.view(held)
        site.show()
        ledger._database.execute("PRAGMA query_only=0")


# ---- reading what would leave -----------------------------------------------------------------------


def test_the_loop_only_checks_and_records_a_reading(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    held, on_loop = site.hold_factors(1.0), [False]
    bench = site.bench
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
    payloads = HeldPayloads(bench.ledger, bench.audit, lambda: (), record=appends)
    told = payloads.ask(asked(held), loop)
    assert to_json(payloads.fetch({"ticket": told["ticket"]}))["tensors_total"] == 16


def test_a_ticket_ends_with_its_hold_and_with_its_time(site: Site) -> None:
    held, bench = site.hold_responses(3, 5), site.bench
    payloads = HeldPayloads(bench.ledger, bench.audit, lambda: (), record=bench.judge.record)
    ticket = payloads.ask(asked(held), at_once)
    bench.reject(held)
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


def test_T39_a_reading_that_the_log_does_not_take_halts_the_gate(site: Site) -> None:
    held, bench = site.hold_responses(3, 5), site.bench
    desk = ControlServer("hospital_a", b"", Roles("hospital_a", {}), lambda: datetime.now(UTC))
    dataclasses.replace(site.guard.orders, on_loop=lambda work: work()).register(desk)
    ask = desk._commands["approvals.payload"].handler
    assert ask(asked(held))["ticket"] and bench.judge.halted == ""
    with failing(bench.audit, "append", LogFullError("no space")), pytest.raises(LogFullError):
        ask(asked(held))
    assert "no space" in bench.judge.halted


# ---- a pause ----------------------------------------------------------------------------------------


def test_a_pause_outlives_a_restart_and_ends_with_the_order_to_go_on(loop: Loop) -> None:
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
    with failing(loop.bench.ledger, "keep_paused", OperationError("no space", code="LEDGER_UNWRITABLE")):
        told, run = order("pause"), loop.guard.runs.run
        assert told["paused"] and told["until_restart"] and run is not None and run.paused
        with pytest.raises(OperationError):
            order("resume")
        assert run.paused
