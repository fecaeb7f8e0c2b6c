"""A yes counts only with every finding opened; putting off stops no clock; what is compared and paged (threat T36)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from benchmarks.release_site import Site, policy
from fedsilo.control.answers import Finding, read
from fedsilo.protocol.errors import ConflictError, NotAllowedError, NotFoundError, UsageError, VerificationError
from silo.guard.answers.findings import finding_id
from silo.guard.answers.queries import ledger_page, release_page
from silo.guard.archive import EDGES, payload_view
from silo.guard.commands import HeldPayloads
from silo.guard.ledger import Release
from tests.simulated import screening
from tests.simulated.test_release_view import earlier
from tests.world import Bench, command

CANARY = screening.PLANTED["canary"]


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with closing(Site(tmp_path / "site", "run-1", 3, policy())) as made:
        earlier(made)
        yield made


def answer(site: Site, release: Release, person: str = "bob", **more: Any) -> Any:
    shown = {
        "release": release.id,
        "digest": release.digest,
        "policy_digest": site.bench.gate.policy.digest,
        **site.bench.shown(release),
    }
    return command("approvals.approve", {**shown, "revision": release.revision, **more}, person=person)


def ids(site: Site, release: Release) -> list[str]:
    return site.bench.opened(release.id)["acknowledged"]


def refused(site: Site, release: Release, **more: Any) -> str:
    with pytest.raises(ConflictError) as error:
        site.bench.releases.approve(answer(site, release, **more))
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
    released, settled = site.bench.releases.approve(answer(site, held, acknowledged=[*opened, "SOMETHING-else"]))
    assert released.state == "approved" and settled is not None and settled.allowed is not None
    # the record has what was opened here, and nothing of what else the person sent
    assert site.bench.events("approval.grant")[-1]["detail"]["acknowledged"] == opened


def test_T36_without_findings_nothing_has_to_be_opened(site: Site) -> None:
    held = site.hold_factors(1.0)
    assert ids(site, held) == []
    _, settled = site.bench.releases.approve(answer(site, held))
    assert settled is not None and "acknowledged" not in site.bench.events("approval.grant")[-1]["detail"]


@pytest.mark.parametrize("given", ["NEW_DESTINATION", [1], [None], ["x"] * 65, {"a": 1}])
def test_acknowledged_is_a_list_of_ids(site: Site, given: Any) -> None:
    with pytest.raises(UsageError):
        site.bench.releases.approve(answer(site, site.hold_factors(1.0), acknowledged=given))


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
    assert site.bench.releases.approve(answer(site, held, acknowledged=ids(site, held)))[1] is not None


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


def test_T36_two_persons_each_open_every_finding(tmp_path: Path) -> None:
    with closing(screening.bench(tmp_path, screening.policy(on_hit="hold", persons=2))) as bench:
        held: Any = bench.responses((1, (CANARY,)), (4, ()), (7, ()))
        release = bench.releases.hold(held, deadline_seconds=None)
        shown = {
            "release": release.id,
            "digest": release.digest,
            "policy_digest": bench.policy.digest,
            **bench.shown(release),
        }
        opened = shown | bench.opened(release.id)
        assert bench.releases.approve(command("approvals.approve", opened, person="alice"))[1] is None
        with pytest.raises(ConflictError, match="not opened"):
            bench.releases.approve(command("approvals.approve", shown, person="carol"))
        with pytest.raises(ConflictError, match="has answered"):
            bench.releases.approve(command("approvals.approve", opened, person="alice"))
        assert bench.releases.approve(command("approvals.approve", opened, person="carol"))[1] is not None


def test_a_no_needs_nothing_opened(site: Site) -> None:
    held = site.hold_factors(3.0)
    assert ids(site, held)
    no = answer(site, held, reason_code="CONTENT")
    assert site.bench.releases.reject(no).release.state == "rejected"


# ---- later ------------------------------------------------------------------------------------------


def later(site: Site, release: Release, seconds: Any, person: str = "bob", **more: Any) -> Any:
    shown = {
        "release": release.id,
        "digest": release.digest,
        "policy_digest": site.bench.gate.policy.digest,
        **site.bench.shown(release),
    }
    until = site.bench.clock_now + seconds if isinstance(seconds, float) else seconds
    return command("approvals.defer", {**shown, "until_seconds": until, **more}, person=person)


def test_to_put_off_is_recorded_is_for_one_person_and_stops_no_clock(site: Site) -> None:
    held = site.hold_factors(1.0)
    before = site.bench.view(held)
    assert before["deferred"] == {}
    site.bench.releases.defer(later(site, held, 600.0))
    view = site.bench.view(site.bench.ledger.release(held.id))
    assert view["deferred"] == {"bob": site.bench.clock_now + 600.0}
    assert {**view, "deferred": {}} == before  # same digest, revision, expiry: a view that was read still counts
    (record,) = site.bench.events("release.defer")
    assert record["detail"]["person"] == "bob" and record["detail"]["until"] == int(site.bench.clock_now + 600)
    site.bench.releases.defer(later(site, held, 60.0, person="alice"))
    assert set(site.bench.ledger.deferred(held.id)) == {"alice", "bob"}
    site.wait(3601.0)
    assert [one.outcome for one in site.bench.releases.expire()] == ["missed"]


@pytest.mark.parametrize("until", [None, "soon", True, -1.0, 0.0, float("inf"), float("nan")])
def test_to_put_off_needs_a_time_to_come(site: Site, until: Any) -> None:
    held = site.hold_factors(1.0)
    with pytest.raises(UsageError):
        site.bench.releases.defer(later(site, held, until))
    assert site.bench.ledger.deferred(held.id) == {} and site.bench.events("release.defer") == []


def test_T41_nobody_puts_off_past_the_end_of_the_hold_or_what_is_not_held(site: Site) -> None:
    held = site.hold_factors(1.0)
    for seconds, code in ((3600.0, "TOO_LATE"), (7200.0, "TOO_LATE")):
        with pytest.raises(ConflictError) as error:
            site.bench.releases.defer(later(site, held, seconds))
        assert error.value.code == code
    with pytest.raises(ConflictError) as error:
        site.bench.releases.defer(later(site, held, 60.0, digest="0" * 64))
    assert error.value.code == "STALE_VIEW"
    site.bench.releases.approve(answer(site, held))
    with pytest.raises(ConflictError) as error:
        site.bench.releases.defer(later(site, held, 60.0))
    assert error.value.code == "NOT_HELD" and site.bench.events("release.defer") == []


# ---- what would leave -------------------------------------------------------------------------------


def reading(bench: Bench) -> HeldPayloads:
    return HeldPayloads(bench.ledger, bench.audit, lambda: bench.gate._site.public.tasks.rows)


def ask(release: Release, person: str = "vera", **changes: Any) -> Any:
    return command("approvals.payload", {"release": release.id, "digest": release.digest, **changes}, person=person)


def test_T40_answers_stand_beside_our_own_prompts_and_the_reading_is_recorded(site: Site) -> None:
    held = site.hold_responses(6, 5, planted="\x1b]0;owned\x07 12")
    payloads = reading(site.bench)
    told = payloads.ask(ask(held))
    assert set(told) == {"ticket", "record", "audit_size"}  # what the desk remembers of the command holds no content
    (record,) = site.bench.events("payload.read")
    assert record["detail"] == {"person": "vera", "certificate": "f" * 64, "release": held.id}
    shown = payloads.fetch({"ticket": told["ticket"]})
    assert [row["prompt"] for row in shown["answers"]] == [f"prompt {row['row']}" for row in shown["answers"]]
    assert sum(len(row["answers"]) for row in shown["answers"]) == 6 and shown["sha256"] == held.digest
    assert "\\u001b" in json.dumps(shown)
    with pytest.raises(NotAllowedError):
        payloads.fetch({"ticket": told["ticket"]})


def test_T36_a_payload_is_read_while_it_is_held_and_as_it_was_shown(site: Site) -> None:
    held, payloads = site.hold_factors(1.0), reading(site.bench)
    with pytest.raises(ConflictError) as error:
        payloads.ask(ask(held, digest="0" * 64))
    assert error.value.code == "STALE_VIEW"
    with pytest.raises(NotFoundError):
        payloads.ask(command("approvals.payload", {"release": "r9/none/0"}))
    assert payloads.ask(ask(held, digest=f"sha256:{held.digest}"))["ticket"]
    path = site.bench.folder / "payloads" / held.digest
    kept = path.read_bytes()
    path.write_bytes(kept[:-1] + b"x")
    with pytest.raises(VerificationError):
        payloads.ask(ask(held))
    path.write_bytes(kept)
    site.bench.releases.approve(answer(site, held))
    with pytest.raises(ConflictError) as error:
        payloads.ask(ask(held))
    assert error.value.code == "NOT_HELD" and len(site.bench.events("payload.read")) == 1


def test_of_tensors_no_value_is_shown(site: Site) -> None:
    held = site.hold_factors(1.0)
    shown = payload_view(site.bench.ledger.payloads.read(held.digest), "lora.factors", ())
    assert shown["edges"] == list(EDGES)
    for row in shown["tensors"]:
        counts = row["histogram"]
        assert sum(counts["negative"]) + sum(counts["positive"]) + counts["zero"] == row["shape"][0] * row["shape"][1]
        assert row["type"] == "float32" and counts["not_finite"] == 0 and len(counts["negative"]) == len(EDGES)
        assert set(row) == {"name", "shape", "type", "norm", "histogram"} and len(row["norm"]) <= 9
    assert 0 < sum(float(row["norm"]) ** 2 for row in shown["tensors"]) ** 0.5 < 2 * site.usual_l2


def test_a_row_that_the_public_set_does_not_have_has_no_prompt(site: Site) -> None:
    held = site.hold_responses(3, 5)
    shown = payload_view(site.bench.ledger.payloads.read(held.digest), "public.responses", ())
    assert {row["prompt"] for row in shown["answers"]} == {None}


# ---- beside the last one ----------------------------------------------------------------------------


def test_the_whole_comparison_names_who_approved_the_last_one_and_every_figure(site: Site) -> None:
    held = site.hold_factors(2.0)
    found = site.bench.releases.comparison(held)
    json.dumps(found)
    assert found["against"]["round"] == 1 and found["against"]["approved_by"] == ["bob"]
    rows = {row["what"]: row for row in found["rows"]}
    assert not rows["bytes"]["differs"] and rows["sha256"]["now"] == held.digest and rows["sha256"]["differs"]
    assert not rows["policy"]["differs"] and not rows["address"]["differs"]
    assert rows["l2"]["now"] == pytest.approx(2 * rows["l2"]["before"], rel=0.5)  # both are drawn near the usual norm
    assert found["note"] == ""
    again = site.bench.releases.comparison  # of another release, so that nothing is remembered
    (site.bench.folder / "payloads" / found["against"]["digest"]).write_bytes(b"no message")
    unread = again(site.hold_factors(1.0))
    assert "cannot be read" in unread["note"] and unread["tensors"] == []
    site.bench.ledger.drop_payloads([found["against"]["digest"]], archived=True)
    assert "not here" in again(site.hold_factors(1.0))["note"]


def test_tensors_are_compared_by_their_norms_largest_change_first(site: Site) -> None:
    first = site.hold_factors(1.0)
    site.let_go(first)
    site.open_round(site.round + 1)
    found = site.bench.releases.comparison(held := site.hold_factors(2.0))
    times = [row["times"] for row in found["tensors"]]
    assert times == sorted(times, reverse=True) and len(times) == 12 < found["tensors_total"] == 16
    assert all(1.2 < one < 3.5 for one in times)  # twice, as far as norms of small random tensors tell
    assert site.bench.releases.comparison(held) == found


def test_the_first_release_has_nothing_beside_it(tmp_path: Path) -> None:
    with closing(Site(tmp_path / "site", "run-1", 3, policy())) as first:
        found = first.bench.releases.comparison(first.hold_factors(1.0))
        assert found["against"] is None and found["rows"] == [] and "first release" in found["note"]


# ---- pages ------------------------------------------------------------------------------------------


def test_pages_of_releases_hold_each_once_newest_first(site: Site) -> None:
    ledger = site.bench.ledger
    held = [site.hold_responses(3, 5).id for _ in range(4)]
    everything = [release.id for release in reversed(ledger.releases())]
    seen: list[str] = []
    before = None
    while True:
        page = release_page(ledger, {"limit": 2, "before": before})
        assert page["total"] == len(everything) and len(page["releases"]) <= 2
        seen += [row["id"] for row in page["releases"]]
        if (before := page["next"]) is None:
            break
        site.hold_responses(3, 5)  # what comes in meanwhile moves no page
        everything = [release.id for release in reversed(ledger.releases())]
    assert seen == [name for name in everything if name in seen] and len(seen) == len(set(seen)) == 6
    assert set(held) <= set(seen)
    sent = release_page(ledger, {"kind": "lora.factors", "state": "approved"})
    assert [row["kind"] for row in sent["releases"]] == ["lora.factors"] and sent["next"] is None
    (told,) = sent["releases"][0]["answers"]
    assert (told["person"], told["verdict"], told["at"][-1]) == ("bob", "approve", "Z")


def test_the_ledger_is_paged_as_well(site: Site) -> None:
    whole = ledger_page(site.bench.ledger, {})
    assert [row["kind"] for row in whole["content"]] == ["lora.factors", "public.responses"] and whole["next"] is None
    first = ledger_page(site.bench.ledger, {"limit": 1})
    second = ledger_page(site.bench.ledger, {"limit": 1, "before": first["next"]})
    assert [*first["content"], *second["content"]] == whole["content"] and second["next"] is None
    assert first["total"] == 2 and first["runs"] == whole["runs"]


@pytest.mark.parametrize("wrong", [{"limit": 0}, {"limit": 501}, {"before": -1}, {"state": "gone"}, {"x": 1}])
def test_a_wrong_argument_is_refused(site: Site, wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        release_page(site.bench.ledger, wrong)
