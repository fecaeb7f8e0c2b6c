"""The other methods of `--method` on real processes: they finish, and nothing leaves that they have no use for.

`public-no-swap` is the control of `--compare` in test_interrupt, which checks the same of it.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.loopback.federation import Federation, records

pytestmark = pytest.mark.slow

TAKES_PART = ["hospital_b", "hospital_c"]
CONTENT = {"lora.factors", "metrics.eval", "public.responses"}


def sent_in(sites: Federation, silo: str, run: str) -> list[dict[str, Any]]:
    lines = records(sites.site(silo).audit_log)
    return [line for line in lines if line["event"] == "egress.sent" and line["run"] == run]


@pytest.mark.parametrize(
    ("method", "kinds", "donors"),
    [
        ("pubswap-random", {"lora.factors", "metrics.eval", "public.responses"}, True),
        ("fedavg-grpo", {"lora.factors", "metrics.eval"}, False),
    ],
)
def test_a_method_finishes_and_only_its_kinds_leave(
    sites: Federation, method: str, kinds: set[str], donors: bool
) -> None:
    record = sites.run(method, method=method, silos=TAKES_PART)
    assert (record["state"], record["plan"]["method"]) == ("finished", method)
    assert [row["participants"] for row in record["rounds"]] == [TAKES_PART]
    # Private and public steps together are tau of each method; only swapping asks for answers of others.
    assert bool(sum(record["rounds"][0]["donors_sent"].values())) is donors
    for silo in TAKES_PART:
        sent = sent_in(sites, silo, method)
        assert {line["kind"] for line in sent} & CONTENT == kinds
        assert sum(line["kind"] == "lora.factors" for line in sent) == 1
        after = record["rounds"][0]["metrics"][silo]
        assert 0.0 <= after["pass_at_1"][""] <= 1.0 and 0.0 <= after["pass_at_1_greedy"][""] <= 1.0


def test_random_swap_sends_wrong_answers_too_and_the_receiver_still_grades_them(sites: Federation) -> None:
    """What leaves under `pubswap-random` is all K answers to each of b prompts, at each of two public steps."""
    for silo in TAKES_PART:
        lines = records(sites.site(silo).audit_log)
        offered = [
            line["facts"]["final"]["responses"]
            for line in lines
            if line["event"] == "egress.decision" and line["kind"] == "public.responses"
            and line["run"] == "pubswap-random"
        ]  # fmt: skip
        assert offered == [16, 16]


def test_answers_cross_at_the_rounds_end_and_are_the_next_rounds_donors(sites: Federation) -> None:
    record = sites.run("round-end", exchange="round_end", rounds=2, local_steps=2, silos=TAKES_PART)
    assert (record["state"], record["plan"]["exchange"]) == ("finished", "round_end")
    assert [row["participants"] for row in record["rounds"]] == [TAKES_PART] * 2
    asked = [sum(row["donors_sent"].values()) for row in record["rounds"]]
    trained = [sum(row["metrics"][silo]["donors_trained"][""] for silo in TAKES_PART) for row in record["rounds"]]
    assert asked[0] == trained[0] == 0 < asked[1] >= trained[1], "taken from a list that is as long as may be"
    for silo in TAKES_PART:
        content = [(line["kind"], line["round"], line["step"]) for line in sent_in(sites, silo, "round-end")
                   if line["kind"] in CONTENT]  # fmt: skip
        assert content == [
            ("metrics.eval", 0, 0), ("public.responses", 1, 2), ("lora.factors", 1, 0),
            ("metrics.eval", 1, 0), ("lora.factors", 2, 0), ("metrics.eval", 2, 0),
        ]  # fmt: skip
        decided = [
            (line["decision"], line["facts"]["final"])
            for line in records(sites.site(silo).audit_log)
            if line["event"] == "ingress.decision" and line["kind"] == "public.donors"
        ]
        donors = [(verdict, facts) for verdict, facts in decided if facts["run"] == "round-end"]
        # none where the other had nothing right
        assert {(verdict, facts["round"], facts["step"]) for verdict, facts in donors} <= {("allow", 2, 2)}
        assert all(facts["responses_wrong"] == 0 for _, facts in donors)
