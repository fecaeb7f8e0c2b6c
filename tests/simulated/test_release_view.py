"""What a person is shown of a held release beside the last one of its kind: each finding, and the ordinary release
that has none."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from benchmarks.release_site import Site, policy
from certs.roles import Roles
from fedsilo.treaty.wire.services import OUTBOUND_KINDS
from silo.guard import release_findings
from silo.guard.ledger import PolicyInForce, Release
from silo.guard.messages import parsed
from silo.guard.release_view import COSINE_BYTES_MAX, ON_REJECT
from silo.guard.releases import Releases
from tests.simulated import screening

WORDS = 14


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """A silo that has sent an answer and an update in its first round; its second one is open."""
    with closing(Site(tmp_path / "site", "run-1", 3, policy())) as made:
        certificate_until(made, timedelta(days=7))
        earlier(made)
        yield made


def certificate_until(site: Site, left: timedelta) -> None:
    until = datetime.fromtimestamp(site.bench.clock_now, UTC) + left
    site.bench.releases.destination["not_after"] = f"{until:%Y-%m-%dT%H:%M:%SZ}"


def earlier(site: Site) -> None:
    site.let_go(site.hold_responses(12, WORDS))
    site.let_go(site.hold_factors(1.0))
    site.wait(600.0)
    site.open_round(site.round + 1)


def view(site: Site, release: Release) -> dict[str, Any]:
    shown = site.bench.releases.view(site.bench.ledger.release(release.id))
    json.dumps(shown)
    assert [row["reason"] for row in shown["policy"]["rules"] if row["outcome"] == "look"] == codes(shown)
    assert shown["policy"]["counts"]["look"] == len(shown["noticed"])
    return shown


def codes(shown: dict[str, Any]) -> list[str]:
    assert {one["outcome"] for one in shown["noticed"]} <= {"look"}
    return [one["code"] for one in shown["noticed"]]


def says(shown: dict[str, Any], code: str) -> str:
    return next(str(one["says"]) for one in shown["noticed"] if one["code"] == code)


def test_an_ordinary_release_has_no_finding_and_says_what_is_the_same(site: Site) -> None:
    first_answers = view(site, held := site.hold_responses(13, WORDS))
    assert codes(first_answers) == []
    assert "answers 12->13" in first_answers["difference"] and "prompts 3->3" in first_answers["difference"]
    site.let_go(held)
    shown = view(site, site.hold_factors(1.1))
    assert codes(shown) == []
    assert shown["difference"].startswith("+0 bytes against round 1 of this run; L2 ")
    assert "+10 %" in shown["difference"] and "form, base, policy same" in shown["difference"]
    assert "far end since round 1; cert to 20" in shown["difference"]
    assert shown["leaves"]["destination"]["since_round"] == 1
    assert shown["base"] == {"now": site.bases[1], "before": site.bases[1]}


def test_the_first_release_is_compared_with_nothing(tmp_path: Path) -> None:
    with closing(Site(tmp_path / "site", "run-1", 3, policy())) as site:
        for release in (site.hold_responses(12, WORDS), site.hold_factors(1.0)):
            shown = view(site, release)
            assert codes(shown) == []
            assert shown["difference"].startswith("first release, nothing to compare; cert to 20")
        site.bench.releases.destination.clear()  # a state folder holds no address
        assert view(site, release)["difference"] == "first release, nothing to compare"


def test_it_says_who_may_answer_and_how_many_silos_the_round_needs(site: Site) -> None:
    held, bench = site.hold_factors(1.0), site.bench
    shown = view(site, held)
    assert shown["approvers"]["people"] == []  # of a reader who does not know the site's people
    assert shown["consequences"]["reject"] == ON_REJECT  # nor the run's plan
    bench.ledger.start_run(held.run, json.dumps({"quorum": 3, "silos": ["hospital_a", "b", "c", "d"]}))
    roles = Roles("hospital_a", {
        "zoe": frozenset({"approver", "operator"}), "bob": frozenset({"operator", "viewer"}),
        "alice": frozenset({"approver"}),
    })  # fmt: skip
    shown = Releases(bench.gate, bench.ledger, silo="hospital_a", destination={}, roles=roles).view(held)
    assert shown["approvers"]["people"] == ["alice", "zoe"] and shown["approvers"]["roles"] == ["approver"]
    assert shown["consequences"]["reject"] == f"{ON_REJECT}: 3 of 4 silos"


@pytest.mark.parametrize(
    ("left", "code"),
    [
        (timedelta(seconds=-1), ["FAR_END_EXPIRED"]),
        (timedelta(hours=20), ["FAR_END_EXPIRES"]),
        (timedelta(hours=25), []),  # a day and more: the coordinator's own renewal comes first (T33)
    ],
)
def test_the_end_of_the_far_ends_certificate(site: Site, left: timedelta, code: list[str]) -> None:
    certificate_until(site, left)
    shown = view(site, site.hold_factors(1.0))
    assert codes(shown) == code
    assert shown["leaves"]["destination"]["not_after"][:10] in shown["difference"]


def test_another_address_and_another_certificate_are_said_apart(site: Site) -> None:
    site.bench.releases.destination["address"] = "198.51.100.23:7443"
    shown = view(site, held := site.hold_factors(1.0))
    assert codes(shown) == ["NEW_DESTINATION"]
    assert "198.51.100.23:7443; round 1 went to coordinator.example:7443" in says(shown, "NEW_DESTINATION")
    assert "since_round" not in shown["leaves"]["destination"] and "far end since" not in shown["difference"]
    site.let_go(held)
    site.open_round(3)
    settled = view(site, held := site.hold_factors(1.0))
    assert codes(settled) == [] and settled["leaves"]["destination"]["since_round"] == 2
    site.bench.releases.destination["certificate"] = "ab" * 32
    assert codes(view(site, held)) == ["NEW_CERTIFICATE"]


def test_a_base_that_is_not_what_the_last_round_ended_in(site: Site) -> None:
    site.open_round(site.round, base="ba5e" * 16)
    shown = view(site, site.hold_factors(1.0))
    assert codes(shown) == ["BASE_DIFFERS"] and "ba5eba5e" in says(shown, "BASE_DIFFERS")
    assert site.bases[1][:8] in says(shown, "BASE_DIFFERS") and "base DIFFERS" in shown["difference"]


def test_what_the_last_round_ended_in_may_be_unknown(site: Site) -> None:
    site.open_round(site.round + 1, base="ba5e" * 16)  # a round that this silo missed came between
    site.bench.gate.view.evaluated.pop(site.round - 1)  # type: ignore[attr-defined]
    shown = view(site, site.hold_factors(1.0))
    assert codes(shown) == [] and "last base unknown" in shown["difference"]


def test_a_changed_policy_names_its_fields_looser_ones_first(site: Site) -> None:
    block = site.bench.gate.policy.file.egress.lora_factors
    assert block is not None
    before = site.bench.gate.policy.digest
    site.bench.gate.adopt(policy({f"    max_l2: {block.max_l2:g} ": f"    max_l2: {8 * block.max_l2:g} "}))
    shown = view(site, site.hold_factors(0.125))
    assert codes(shown) == ["POLICY_CHANGED"] and shown["policy"]["before"] == before
    assert f"{before[:4]}->{site.bench.gate.policy.digest[:4]}: max_l2 " in says(shown, "POLICY_CHANGED")
    assert "looser" in says(shown, "POLICY_CHANGED")
    assert says(shown, "POLICY_CHANGED").endswith("; reject or defer if nobody at your site announced it")


def test_every_limit_that_was_loosened_is_listed_and_of_the_others_so_many(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(release_findings, "EVIDENCE_MAX", 2)
    block = site.bench.gate.policy.file.egress.lora_factors
    assert block is not None
    edits = {f"    max_l2: {block.max_l2:g} ": f"    max_l2: {8 * block.max_l2:g} "}
    edits |= {f"min_records: {block.min_records} ": "min_records: 1 ", "day_bytes: 360000": "day_bytes: 360001"}
    site.bench.gate.adopt(policy(edits | {"max_local_epochs: 5": "max_local_epochs: 4"}))
    (finding,) = [one for one in view(site, site.hold_factors(0.125))["noticed"] if one["code"] == "POLICY_CHANGED"]
    told = [each["what"].rpartition(" ") for each in finding["evidence"][1:]]
    assert {name.rpartition(".")[2] for name, _, _ in told} == {"max_l2", "min_records", "day_bytes"}
    assert {direction for _, _, direction in told} == {"looser"}


def test_a_changed_policy_whose_content_is_gone_is_still_said(site: Site) -> None:
    site.bench.ledger.keep_policy_of_sent("lora.factors", PolicyInForce("0" * 64, {}, ""))
    site.bench.gate.adopt(policy({"  day_bytes: 360000": "  day_bytes: 360001"}))
    shown = view(site, site.hold_factors(1.0))
    assert codes(shown) == ["POLICY_CHANGED"] and ":" not in says(shown, "POLICY_CHANGED")


def test_another_form_and_another_run(site: Site) -> None:
    site.restart(policy(rank=16), run="run-2", rank=16)
    shown = view(site, site.hold_factors(0.7))
    assert codes(shown) == ["POLICY_CHANGED", "FORM_DIFFERS"]
    assert says(shown, "FORM_DIFFERS").endswith(
        "round 1 of run-1: rank 8->16, elements 8192->16384; reject unless another run or plan was announced"
    )
    assert "no cosine: other shapes" in shown["difference"]


@pytest.mark.parametrize(("times", "code"), [(1.45, []), (1.55, ["NORM_OUTLIER"])])
def test_a_norm_of_more_than_one_and_a_half_times(site: Site, times: float, code: list[str]) -> None:
    shown = view(site, site.hold_factors(times))
    assert codes(shown) == code
    if code:
        assert "1.6 TIMES" in says(shown, "NORM_OUTLIER") or "1.5 TIMES" in says(shown, "NORM_OUTLIER")


def test_the_cosine_is_told_of_what_is_archived(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = site.bench.ledger
    held = site.hold_factors(1.0)
    assert "; cosine " in view(site, held)["difference"]
    last = next(item for item in reversed(ledger.outbox()) if item.kind == "lora.factors")
    site.bench.releases._shows._cosines.clear()
    monkeypatch.setattr("silo.guard.release_view.COSINE_BYTES_MAX", 2 * held.payload_bytes - 1)
    assert "cosine not computed: too big" in view(site, held)["difference"]
    monkeypatch.setattr("silo.guard.release_view.COSINE_BYTES_MAX", COSINE_BYTES_MAX)
    site.bench.releases._shows._cosines.clear()
    ledger.drop_payloads([last.digest], archived=True)
    assert "cosine unknown: not archived" in view(site, held)["difference"]


def test_the_same_update_again_has_cosine_one(site: Site) -> None:
    site.let_go(site.hold_factors(1.0))
    state = site._rows.bit_generator.state
    site.open_round(3)
    site.let_go(site.hold_factors(1.0))
    site._rows.bit_generator.state = state
    site.open_round(4)
    assert "cosine 1.00" in view(site, site.hold_factors(1.2))["difference"]


def test_answers_of_more_than_three_times_the_size(site: Site) -> None:
    shown = view(site, site.hold_responses(24, 3 * WORDS))
    assert codes(shown) == ["SIZE_JUMP"]
    assert "bytes " in says(shown, "SIZE_JUMP") and "tokens " in says(shown, "SIZE_JUMP")


def test_a_release_that_takes_more_than_a_third_of_what_is_left_of_the_day(site: Site) -> None:
    shown = view(site, held := site.hold_factors(1.0))
    day = next(rule for rule in shown["policy"]["rules"] if rule["rule"] == "day bytes")
    assert codes(shown) == [] and shown["budget"].startswith("DP off; round 0->33K of 124K 27 %; day ")
    assert "; sets 0->1 of 2 50 %" in shown["budget"]
    used = day["measured"] - held.payload_bytes
    tight = {"  day_bytes: 360000": f"  day_bytes: {used + 3 * held.payload_bytes - 1}"}
    site.bench.releases.miss("run-1", 2, 0)
    site.bench.gate.adopt(policy(tight))
    shown = view(site, site.hold_factors(1.0))
    assert codes(shown) == ["POLICY_CHANGED", "BUDGET"]
    share = 100 * (used + held.payload_bytes) / (used + 3 * held.payload_bytes - 1)
    assert says(shown, "BUDGET") == (
        f"{share:.0f} % of today's bytes would be USED, this alone takes 33 % of what is left; room for 1 more like it"
    )
    (budget,) = (one for one in shown["noticed"] if one["code"] == "BUDGET")
    about = [round(count, 1 - int(math.log10(count))) for count in (used, used + held.payload_bytes)]  # two digits
    assert [budget["evidence"][0][name] for name in ("before", "now")] == [f"{count:,}" for count in about]


def test_the_second_release_of_a_round_also_when_the_first_went_after_it_was_held(site: Site) -> None:
    first, second = site.hold_factors(1.0), site.hold_factors(1.0)
    assert codes(view(site, first)) == codes(view(site, second)) == []
    site.let_go(first)
    assert codes(view(site, second)) == ["SECOND_RELEASE"]
    assert codes(view(site, first)) == []


@pytest.mark.parametrize("screen", ["overlap", "canary", "pii_basic"])
def test_a_hit_names_row_answer_and_screen_and_no_text(site: Site, screen: str) -> None:
    release = site.hold_responses(12, WORDS, planted=screening.PLANTED[screen])
    shown = view(site, release)
    assert "SCREEN_HIT" in codes(shown)
    told = says(shown, "SCREEN_HIT")
    assert f"HIT {screen}/" in told and ": row " in told and " answer " in told
    assert all(word not in json.dumps(shown) for word in ("harbour", "jane", "knee"))
    # The place is the planted text's, as the message itself has it.
    payload = site.bench.ledger.payloads.read(release.digest)
    row, answer = (int(told.split(f"{name} ")[1].split()[0]) for name in ("row", "answer"))
    body: Any = parsed(release.kind, payload, OUTBOUND_KINDS)[0]
    texts = next(prompt.responses for prompt in body.prompts if prompt.prompt_index == row)
    assert texts[answer - 1].text == screening.PLANTED[screen]


def test_what_was_kept_outlives_the_process(site: Site) -> None:
    site.bench = site.bench.restart()
    site.bench.releases.destination.update({"address": "coordinator.example:7443", "certificate": "cd" * 32})
    site.open_round(2)
    shown = view(site, site.hold_factors(1.0))
    assert codes(shown) == ["NEW_CERTIFICATE"]
