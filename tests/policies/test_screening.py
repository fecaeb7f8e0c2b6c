"""Screens as keys of a policy, as facts and as rules: what is asked, by whom, and what a gap in it comes to."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from fedsilo.protocol.errors import UsageError
from policies.compare import compare, meet
from policies.engine import History, HistoryBook, decide, measure
from policies.message import Screened
from policies.screens import NO_MATERIAL, Material, asked, kept, screen, screen_facts, settings_of
from tests.policies import setting
from tests.policies.setting import is_tightening
from tests.simulated import screening as site

DAY = 86400.0


def line_of(text: str, start: str) -> int:
    return next(number for number, line in enumerate(text.splitlines(), 1) if line.strip().startswith(start))


# ---- the file --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "said", "key"),
    [
        ({"definitions": ""}, "has no definition", "screens:"),
        ({"max_hits_per_day": None}, "screens need max_hits_per_day", "screens:"),
        ({"names": ("charset", "charset")}, "named twice", "screens:"),
        ({"names": ("spelling",)}, "must be 'pii_basic'", "screens:"),
        ({"on_hit": "shrug"}, "withhold", "on_hit:"),
        ({"share": 1.5}, "must be at most 1", "max_share_per_peer:"),
        ({"names": (), "max_hits_per_day": None, "donor_screens": ("charset",), "definitions": ""},
         "has no definition", "screens: [charset]"),
    ],
)  # fmt: skip
def test_T35_a_file_that_names_screens_by_half_is_refused_with_its_line(
    changes: dict[str, Any], said: str, key: str
) -> None:
    names = changes.pop("names", ("charset",))
    text = site.policy_text(names, **changes)
    with pytest.raises(UsageError) as refused:
        setting.policy_of(text)
    assert any(word in refused.value.message for word in said.split("|"))
    assert refused.value.message.startswith(f"policy.yaml:{line_of(text, key)}:")


def test_absent_keys_mean_withhold_and_no_screen() -> None:
    file = setting.policy_of(setting.policy_text()).file
    outbound, inbound = file.egress.public_responses, file.ingress.public_donors
    assert outbound is not None and inbound is not None
    assert (outbound.screens, outbound.on_hit, outbound.max_hits_per_day) == ((), "withhold", None)
    assert (inbound.screens, inbound.max_share_per_peer) == ((), 1.0)


def test_T34_what_either_policy_screens_for_both_together_screen_for() -> None:
    first = site.policy(["charset"], on_hit="hold", max_hits_per_day=5, share=0.5).file
    second = site.policy(["canary"], on_hit="withhold", max_hits_per_day=3, donor_screens=["charset"]).file
    plain = setting.policy_of(setting.policy_text()).file
    both = meet(first, second)
    outbound, inbound = both.egress.public_responses, both.ingress.public_donors
    assert outbound is not None and inbound is not None
    assert outbound.screens == ("canary", "charset")
    assert (outbound.on_hit, outbound.max_hits_per_day) == ("withhold", 3)
    assert (inbound.screens, inbound.max_share_per_peer) == (("charset",), 0.5)
    with_plain = meet(first, plain)
    assert with_plain == meet(plain, first)
    assert with_plain.egress.public_responses is not None
    assert with_plain.egress.public_responses.screens == ("charset",)
    assert with_plain.egress.public_responses.max_hits_per_day == 5
    assert settings_of(with_plain, "charset") == settings_of(first, "charset") != settings_of(plain, "charset")
    assert is_tightening(plain, with_plain)
    assert not is_tightening(with_plain, plain)


def test_diff_calls_a_further_screen_tighter_and_more_hits_looser() -> None:
    def directions(before: Any, after: Any) -> dict[str, str]:
        return {change.name.rpartition(".")[2]: change.direction for change in compare(before.file, after.file)}

    few, many = site.policy(["charset"]), site.policy(["charset", "canary"])
    assert directions(few, many) == {"screens": "tighter"}
    assert directions(many, few) == {"screens": "looser"}
    assert directions(few, site.policy(["charset"], max_hits_per_day=11)) == {"max_hits_per_day": "looser"}
    assert directions(few, site.policy(["charset"], on_hit="hold")) == {"on_hit": "looser"}
    assert directions(few, site.policy(["charset"], share=0.5)) == {"max_share_per_peer": "tighter"}


# ---- what ran, as facts ----------------------------------------------------------------------------


def test_facts_hold_counts_and_codes_and_no_text() -> None:
    policy = site.policy(["charset", "pii_basic"])
    texts = ["12", site.PLANTED["pii_basic"], site.PLANTED["charset"], site.PLANTED["pii_basic"]]
    facts = screen_facts(screen(policy.file, ("charset", "pii_basic"), texts, NO_MATERIAL), len(texts))
    assert facts["responses_hit"] == 3
    assert facts["screen_hits"]["pii_basic/email"] == 2
    assert "jane" not in json.dumps(facts)
    assert facts["screens"] == {name: settings_of(policy.file, name) for name in ("charset", "pii_basic")}


def test_a_result_for_another_number_of_texts_is_none() -> None:
    policy = site.policy(["charset"])
    result = screen(policy.file, ("charset",), ["a", "b"], NO_MATERIAL)
    assert screen_facts(result, 2)["screens"]
    assert screen_facts(result, 3)["screens"] == {}
    assert screen_facts(kept(result, [1]), 1)["screens"]
    assert screen_facts(None, 0)["screens"] == {}


def test_one_screen_that_cannot_run_leaves_nothing_known() -> None:
    policy = site.policy(["charset", "canary"])
    with_canaries = Material(canaries=(site.CANARY,))
    texts = [site.PLANTED["charset"]]
    assert screen(policy.file, ("canary", "charset"), texts, with_canaries).hits[0]
    failed = screen(policy.file, ("canary", "charset"), texts, NO_MATERIAL)
    assert failed == Screened({}, ("canary", "charset"), ())
    assert kept(failed, [0]) == failed


def test_a_receiver_without_private_data_runs_the_screens_that_need_none() -> None:
    block = site.policy().file.egress.public_responses
    assert asked(block, "public.responses", "egress") == site.NAMES
    assert asked(block, "public.responses", "ingress") == ("charset", "pii_basic")
    donors = site.policy([], max_hits_per_day=None, donor_screens=site.NAMES).file.ingress.public_donors
    assert asked(donors, "public.donors", "ingress") == site.NAMES
    assert asked(None, "public.donors", "ingress") == ()


# ---- rules -----------------------------------------------------------------------------------------


def verdict(policy: Any, hits: tuple[dict[str, int], ...], history: History | None = None, **changes: Any) -> Any:
    names = asked(policy.file.egress.public_responses, "public.responses", "egress")
    screened = Screened({name: settings_of(policy.file, name) for name in names}, (), hits)
    given = {**setting.GRADED, "screened": screened, **changes}
    facts = measure(setting.responses_message(), setting.context(**given))
    return decide(facts, policy, history or History())


CLEAN: tuple[dict[str, int], ...] = ({}, {}, {})
HIT: tuple[dict[str, int], ...] = ({}, {"charset/control": 2}, {})


def test_T15_hold_counts_persons_in_a_named_role_and_each_once() -> None:
    from policies.engine import Approval

    policy = site.policy(["charset"], on_hit="hold", persons=2)
    alice, carol = Approval("alice", ("approver",)), Approval("carol", ("approver",))
    assert verdict(policy, HIT).verdict == "hold"
    assert verdict(policy, HIT, History(approvals=(alice, dataclasses.replace(alice)))).verdict == "hold"
    assert verdict(policy, HIT, History(approvals=(alice, Approval("bob", ("operator",))))).verdict == "hold"
    assert verdict(policy, HIT, History(approvals=(alice, carol))).verdict == "allow"
    assert verdict(policy, CLEAN).verdict == "allow"


def test_T18_the_book_counts_by_kind_and_day_and_survives_as_json() -> None:
    book = HistoryBook()
    facts = {"kind": "public.responses", "run": "r", "round": 1, "step": 2, "now": setting.NOW}
    assert not book.count_hits("public.responses", setting.NOW, 2, 3)
    assert not book.count_hits("lora.factors", setting.NOW, 9, 9)
    assert book.view(facts).screen_hits_in_day == 2
    assert book.count_hits("public.responses", setting.NOW, 2, 3)
    assert not book.count_hits("public.responses", setting.NOW, 1, 3)  # halted already
    book = HistoryBook.from_json(json.loads(json.dumps(book.to_json())))
    later = {**facts, "now": setting.NOW + 10 * DAY}
    assert (book.view(later).screen_hits_in_day, book.view(later).screen_halted) == (0, True)
    assert not book.view({**later, "kind": "lora.factors"}).screen_halted
    for day in range(1, 6):
        book.count_hits("lora.factors", setting.NOW + day * DAY, 0, 1)
    assert len(book.screen_hits) == 3
    book.lift_halt("public.responses", setting.NOW + 5 * DAY)
    assert not book.view(later).screen_halted
    assert HistoryBook.from_json({"counts": {}}).screen_halts == {}  # as a ledger without these counts has it


def test_T18_the_history_of_a_decision_replays() -> None:
    history = History(screen_hits_in_day=2, screen_halted=True)
    assert History.from_json(json.loads(json.dumps(history.to_json()))) == history
