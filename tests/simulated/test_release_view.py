"""What a person is shown of a held release beside the last one of its kind: each finding, and the ordinary release
that has none."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.release_site import Site, policy, schema
from certs.roles import Roles
from fedsilo.control.answers import to_json
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.envelope import parsed
from fedsilo.protocol.kinds import OUTBOUND_KINDS
from policies.model import Policy
from silo.guard import findings, shown
from silo.guard.answers.release import BYTES_MAX, ReleaseView
from silo.guard.ledger import PolicyInForce, Release
from silo.guard.shown import ON_REJECT, on_approve
from tests.policies import setting
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


def say_no(site: Site, release: Release) -> None:
    site.bench.reject(release)


def view(site: Site, release: Release) -> dict[str, Any]:
    shown = site.bench.view(site.bench.ledger.release(release.id))
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


@pytest.mark.parametrize("ended", ["rejected", "missed"])
def test_after_a_release_that_did_not_leave_the_next_is_no_first_one(tmp_path: Path, ended: str) -> None:
    with closing(Site(tmp_path / "site", "run-1", 3, policy())) as site:
        first = site.hold_factors(1.0)
        if ended == "rejected":
            say_no(site, first)
        else:
            site.wait(1e6)
            site.bench.releases.expire()
        site.open_round(2)
        told = view(site, held := site.hold_factors(1.0))["difference"]
        assert "first release" not in told and f"that of round 1 was {ended}" in told
        assert "none of this kind has left yet" in told and "against round 1" in told and "L2 " in told
        compared = to_json(site.bench.comparison(held))
        against, rows = compared["against"], {row["what"]: row for row in compared["rows"]}
        assert (against["state"], against["round"], against["digest"]) == (ended, 1, first.digest)
        assert (against["approved_by"], against["rejected_by"]) == ([], ["bob"] if ended == "rejected" else [])
        assert (rows["l2"]["before"], rows["l2"]["now"]) == (first.facts["l2"], held.facts["l2"])
        assert f"none of this kind has left yet; that of round 1 was {ended}" in compared["note"]


def test_a_rejected_one_is_told_beside_the_last_that_left(site: Site) -> None:
    say_no(site, site.hold_factors(1.0))
    site.open_round(3)
    told = view(site, held := site.hold_factors(1.0))["difference"]
    assert "against round 1 of this run" in told and "that of round 2 was rejected" in told
    compared = to_json(site.bench.comparison(held))
    assert (compared["against"]["round"], compared["against"]["state"]) == (1, "left")
    assert "that of round 2 was rejected" in compared["note"]


def offered(site: Site, value: float) -> Any:
    """What the gate says to an update whose values are all the same."""
    tensors = {name: np.full(shape, value, np.float32) for name, shape in schema(site.rank).tensors}
    body = pb.Factors(base_digest=site.bench.judge.view.base_digest)
    return site.bench.gate.offer(site.bench.judge.view.place("lora.factors", site.round), body, tensors=tensors)


def test_T36_bytes_that_were_rejected_in_another_run_are_a_finding_that_names_who_said_no(site: Site) -> None:
    def held() -> Release:
        return site.bench.releases.hold(offered(site, 1e-3), deadline_seconds=9.0)

    base, rejected = site.bases[1], held()
    say_no(site, rejected)
    site.restart(site.policy, run="run-2", rank=8)
    site.open_round(1, base=base)
    again = held()
    assert again.digest == rejected.digest and again.id != rejected.id
    shown = view(site, again)
    told = f"same bytes as {rejected.id}, rejected by bob"
    assert says(shown, "REJECTED_BEFORE") == told and codes(shown)[0] == "REJECTED_BEFORE"
    assert told in shown["difference"] and told in to_json(site.bench.comparison(again))["note"]
    site.open_round(2, base=base)
    other = view(site, site.hold_factors(1.0))
    assert "REJECTED_BEFORE" not in codes(other) and "same bytes" not in other["difference"]


def test_it_is_compared_with_the_last_one_that_has_figures(tmp_path: Path) -> None:
    with closing(Site(tmp_path / "site", "run-1", 3, rhythm(1, 3))) as site:
        plan_of_rounds(site, 4)
        site.let_go(first := site.hold_factors(1.0))
        site.open_round(2)
        site.bench.gate.transmit(offered(site, 1e-3))  # nobody is asked in round 2
        site.open_round(3)
        held = site.hold_factors(1.0)
        shown, compared = view(site, held), to_json(site.bench.comparison(held))
        assert (compared["against"]["round"], compared["against"]["approved_by"]) == (1, ["bob"])
        rows = {row["what"]: row for row in compared["rows"]}
        assert (rows["l2"]["before"], rows["l2"]["now"]) == (first.facts["l2"], held.facts["l2"])
        for told in (shown["difference"], compared["note"]):
            assert "round 2 left after that one, and no person was asked" in told and "only its size" not in told
        assert "against round 1" in shown["difference"] and "L2 " in shown["difference"]


def test_a_base_is_compared_with_nothing_where_what_the_last_round_ended_in_is_not_known(site: Site) -> None:
    what = "base, and what the last round ended in"
    told = to_json(site.bench.comparison(site.hold_factors(1.0)))
    (row,) = [row for row in told["rows"] if row["what"] == what]
    assert row["before"] == row["now"] == site.bases[1] and not row["differs"]
    for run, known in (("run-1", True), ("run-2", False)):  # a first round comes after none
        if run != site.run:
            site.restart(site.policy, run=run, rank=8)
        site.open_round(site.round if run != "run-1" else site.round + 1)
        site.bench.judge.view.evaluated.pop(site.round - 1)  # type: ignore[attr-defined]
        told = to_json(site.bench.comparison(site.hold_factors(1.0)))
        assert what not in {row["what"] for row in told["rows"]}
        assert "" not in {row["before"] for row in told["rows"] if row["differs"]}
        assert ("what the round before ended in is not known" in told["note"]) is known


def test_what_is_measured_stands_beside_what_earlier_releases_that_left_had(site: Site) -> None:
    norm = next(
        rule for rule in view(site, site.hold_factors(2.0))["policy"]["rules"] if rule["rule"] == "L2 of the delta"
    )
    usual = norm["usual"]
    assert usual["releases"] == 1 and usual["least"] == usual["most"] and 1.9 < norm["measured"] / usual["most"] < 2.1
    others = {rule["rule"]: rule for rule in view(site, site.hold_responses(13, WORDS))["policy"]["rules"]}
    assert "usual" not in others["day bytes"] and "usual" not in others["approvals"], "they grow with what was sent"


def test_a_first_release_has_nothing_usual(tmp_path: Path) -> None:
    with closing(Site(tmp_path / "site", "run-1", 3, policy())) as site:
        say_no(site, site.hold_factors(9.0))  # nor is what people rejected
        site.open_round(2)
        assert {rule.get("usual") for rule in view(site, site.hold_factors(1.0))["policy"]["rules"]} == {None}


def test_it_says_in_a_sentence_what_leaves_and_who_is_there_by_name(site: Site) -> None:
    shown = view(site, site.hold_factors(1.0))
    (kind,) = shown["leaves"]["kinds"]
    assert kind["says"].startswith("changes to the model") and "the coordinator can read them" in kind["says"]
    assert "main topics" in kind["says"]  # N7
    spiffe = site.bench.judge.policy.file.federation.coordinator
    assert shown["leaves"]["destination"]["name"].split(" of ") == [
        " ".join(spiffe.split("/")[3:5]), spiffe.split("/")[2],
    ]  # fmt: skip
    answers = view(site, site.hold_responses(12, WORDS))["leaves"]["kinds"][0]["says"]
    assert answers.startswith("12 answers") and "3 public prompts" in answers and "the other silos can read" in answers


@pytest.mark.parametrize(
    ("facts", "of", "told"),
    [
        ({"records": 18, "steps": 6, "epochs": 1}, 78, ", trained on 18 of your 78 private records in 6 steps;"),
        ({"records": 4, "steps": 1, "epochs": 3}, 4, "4 of your 4 private records in 1 step, some used 3 times;"),
        ({"records": 4, "steps": 2, "epochs": 1}, 0, ", trained on 4 of your private records in 2 steps;"),
        ({"records": None}, 78, "changes to the model;"),
    ],
)
def test_how_much_of_a_sites_records_is_behind_an_update_is_in_its_sentence(
    facts: dict[str, Any], of: int, told: str
) -> None:
    assert told in shown.says("lora.factors", facts, of)


def test_a_message_with_text_that_no_screen_looked_at_is_told_as_that(tmp_path: Path) -> None:
    screened = f"    screens: [{', '.join(screening.NAMES)}]\n    on_hit: hold\n    max_hits_per_day: 10\n"
    with closing(Site(tmp_path / "screened", "run-1", 3, policy())) as site:
        assert view(site, site.hold_responses(12, WORDS))["unscreened"] is False
    with closing(Site(tmp_path / "site", "run-1", 3, policy({screened: ""}))) as site:
        assert view(site, site.hold_responses(12, WORDS))["unscreened"] is True
        assert view(site, site.hold_factors(1.0))["unscreened"] is False  # there is no text in it


def test_it_says_who_may_answer_and_how_many_silos_the_round_needs(site: Site) -> None:
    held, bench = site.hold_factors(1.0), site.bench
    shown = view(site, held)
    assert shown["approvers"]["people"] == []  # of a reader who does not know the site's people
    assert shown["consequences"]["reject"] == ON_REJECT  # nor the run's plan
    bench.ledger.start_run(held.run, setting.PLAN.model_copy(update={"quorum": 3}).canonical())
    roles = Roles("hospital_a", {
        "zoe": frozenset({"approver", "operator"}), "bob": frozenset({"operator", "viewer"}),
        "alice": frozenset({"approver"}),
    })  # fmt: skip
    shown = to_json(bench.view_of(held, people=roles.people))
    assert shown["approvers"]["people"] == ["alice", "zoe"] and shown["approvers"]["roles"] == ["approver"]
    assert shown["consequences"]["reject"] == f"{ON_REJECT}: 3 of 4 silos"


@pytest.mark.parametrize(("least", "told"), [(1, "alone"), (2, "a mean of 2"), (3, "a mean of 3")])
def test_T58_a_yes_to_an_update_says_what_others_get_of_it(least: int, told: str) -> None:
    federation = policy().file.federation.model_copy(update={"min_updates": least})
    asks = policy().file.model_copy(update={"federation": federation})
    assert told in on_approve("lora.factors", asks) and "cannot be called back" in on_approve("lora.factors", asks)
    for kind in ("public.responses", "run.plan"):  # nothing of the sort is so of them
        assert "others get" not in on_approve(kind, asks)


def plan_of_rounds(site: Site, rounds: int) -> None:
    site.bench.ledger.start_run(
        site.run, setting.PLAN.model_copy(update={"run": site.run, "rounds": rounds}).canonical()
    )


def rhythm(first: int, then: int) -> Policy:
    text = policy().file.model_copy(deep=True)
    block = text.egress.lora_factors
    assert block is not None
    asks = block.approvals.model_copy(update={"first_rounds": first, "then": then})
    egress = text.egress.model_copy(update={"lora_factors": block.model_copy(update={"approvals": asks})})
    return replace(policy(), file=text.model_copy(update={"egress": egress}))


@pytest.mark.parametrize(
    ("first", "then", "asked", "unasked"),
    [(1, 0, [], [2, 3, 4]), (1, 1, [2, 3, 4], []), (2, 0, [2], [3, 4]), (1, 3, [3], [2, 4])],
)
def test_T36_a_yes_says_which_later_rounds_leave_unasked_and_by_which_line(
    tmp_path: Path, first: int, then: int, asked: list[int], unasked: list[int]
) -> None:
    with closing(Site(tmp_path / "site", "run-1", 3, rhythm(first, then))) as site:
        plan_of_rounds(site, 4)
        shown = view(site, held := site.hold_factors(1.0))["consequences"]
        (later,) = shown["later_rounds"]
        assert (later["asked"], later["unasked"]) == (asked, unasked)
        place = site.policy.source, site.policy.line_of(("egress", "lora.factors", "approvals"))
        assert (later["file"], later["line"]) == place and f":{place[1]})" in shown["later"]
        assert ("UNASKED" in shown["later"]) is bool(unasked)
        site.let_go(held)
        assert site.bench.view(site.bench.ledger.release(held.id))["consequences"]["later_rounds"] == []


@pytest.mark.parametrize(
    ("freeze", "kind", "number", "asked", "unasked"),
    [
        ("none", "lora.factors", 1, [2], [3, 4, 5, 6]),
        ("alternate", "lora.factor_b", 1, [3], [5]),  # A is fixed in odd rounds, B in even ones
        ("alternate", "lora.factor_a", 2, [4], [6]),
        ("alternate", "public.responses", 1, [2], [3, 4, 5, 6]),  # no update: it leaves in each round
    ],
)
def test_T36_only_later_rounds_in_which_the_kind_may_leave_are_named(
    tmp_path: Path, freeze: Any, kind: str, number: int, asked: list[int], unasked: list[int]
) -> None:
    lora = setting.PLAN.lora.model_copy(
        update={"freeze": freeze, "frozen_sha256": "" if freeze == "none" else "f" * 64}
    )
    plan = setting.PLAN.model_copy(update={"rounds": 6, "lora": lora})
    in_force = rhythm(2, 0)
    block = in_force.file.egress.lora_factors
    names = ("lora_factors", "lora_factor_a", "lora_factor_b", "public_responses")
    egress = in_force.file.egress.model_copy(update=dict.fromkeys(names, block))
    in_force = replace(in_force, file=in_force.file.model_copy(update={"egress": egress}))
    with closing(Site(tmp_path / "site", "run-1", 3, rhythm(2, 0))) as site:
        held = site.hold_factors(1.0)
        release = replace(held, place=held.place._replace(kind=kind, round=number))
    (later,) = shown.later_rounds(release, in_force, released=0, plan=plan.canonical())
    assert (later.asked, later.unasked) == (tuple(asked), tuple(unasked))


def test_T36_a_round_that_was_refused_does_not_use_up_the_asking(tmp_path: Path) -> None:
    with closing(Site(tmp_path / "site", "run-1", 3, rhythm(1, 0))) as site:
        plan_of_rounds(site, 4)
        site.open_round(2)  # nothing left in round 1
        (later,) = view(site, site.hold_factors(1.0))["consequences"]["later_rounds"]
        assert later["unasked"] == [3, 4]


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
    site.bench.judge.view.evaluated.pop(site.round - 1)  # type: ignore[attr-defined]
    shown = view(site, site.hold_factors(1.0))
    assert codes(shown) == [] and "last base unknown" in shown["difference"]


def test_a_changed_policy_names_its_fields_looser_ones_first(site: Site) -> None:
    block = site.bench.judge.policy.file.egress.lora_factors
    assert block is not None
    before = site.bench.judge.policy.digest
    site.bench.judge.policy = policy({f"    max_l2: {block.max_l2:g} ": f"    max_l2: {8 * block.max_l2:g} "})
    shown = view(site, site.hold_factors(0.125))
    assert codes(shown) == ["POLICY_CHANGED"] and shown["policy"]["before"] == before
    assert f"{before[:4]}->{site.bench.judge.policy.digest[:4]}: max_l2 " in says(shown, "POLICY_CHANGED")
    assert "looser" in says(shown, "POLICY_CHANGED")
    assert says(shown, "POLICY_CHANGED").endswith("; reject or defer if nobody at your site announced it")


def test_every_limit_that_was_loosened_is_listed_and_of_the_others_so_many(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(findings, "EVIDENCE_MAX", 2)
    block = site.bench.judge.policy.file.egress.lora_factors
    assert block is not None
    edits = {f"    max_l2: {block.max_l2:g} ": f"    max_l2: {8 * block.max_l2:g} "}
    edits |= {f"min_records: {block.min_records} ": "min_records: 1 ", "day_bytes: 360000": "day_bytes: 360001"}
    site.bench.judge.policy = policy(edits | {"max_local_epochs: 5": "max_local_epochs: 4"})
    (finding,) = [one for one in view(site, site.hold_factors(0.125))["noticed"] if one["code"] == "POLICY_CHANGED"]
    told = [each["what"].rpartition(" ") for each in finding["evidence"][1:]]
    assert {name.rpartition(".")[2] for name, _, _ in told} == {"max_l2", "min_records", "day_bytes"}
    assert {direction for _, _, direction in told} == {"looser"}


def test_a_changed_policy_whose_content_is_gone_is_still_said(site: Site) -> None:
    site.bench.ledger.keep_policy_of_sent("lora.factors", PolicyInForce("0" * 64, {}, ""))
    site.bench.judge.policy = policy({"  day_bytes: 360000": "  day_bytes: 360001"})
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
    site.bench.shows = ReleaseView(ledger)  # nothing is remembered
    monkeypatch.setattr("silo.guard.answers.release.BYTES_MAX", 2 * held.payload_bytes - 1)
    assert "cosine not computed: too big" in view(site, held)["difference"]
    monkeypatch.setattr("silo.guard.answers.release.BYTES_MAX", BYTES_MAX)
    site.bench.shows = ReleaseView(ledger)  # nothing is remembered
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
    assert codes(shown) == [] and shown["uses"].startswith("round 0->33K of 124K 27 %")
    assert "sets" not in shown["uses"] and shown["budget"] == "DP off"
    used = day["measured"] - held.payload_bytes
    tight = {"  day_bytes: 360000": f"  day_bytes: {used + 3 * held.payload_bytes - 1}"}
    site.bench.releases.miss("run-1", 2, 0)
    site.bench.judge.policy = policy(tight)
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
