"""Numbers that the coordinator or a trainer could choose freely: approvals, rounds, digests, order, methods, norms.

Each refusal stands beside the passing message it differs from by one thing (threats T9, T36).
"""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.codec import canonical_json
from fedsilo.protocol.methods import METHODS
from policies.engine import Approval, Context, Decision, Facts, History, HistoryBook, Message, decide, measure
from policies.model import Policy
from policies.render import PlanSize
from tests.policies.setting import (
    BASE_DIGEST,
    COORDINATOR,
    FROM_COORDINATOR,
    PLAN,
    SCHEMA,
    SIZE,
    context,
    edited,
    inbound,
    judged,
    metrics_message,
    policy_of,
    policy_text,
    responses_body,
    small_message,
    tensor_message,
)

POLICY = policy_of(policy_text())
ADA = Approval("ada", ("approver",))


class Releasing:
    """A party that decides with its book, and replays each decision from the JSON that a log keeps."""

    def __init__(self, policy: Policy) -> None:
        self.policy, self.book = policy, HistoryBook()

    def decide(self, message: Message, context: Context, *approvals: Approval) -> str:
        facts = measure(message, context)
        history = self.book.view(facts, approvals)
        decision = decide(facts, self.policy, history)
        read_facts: Facts = json.loads(canonical_json(facts))
        read_history = History.from_json(json.loads(canonical_json(history.to_json())))
        assert decide(read_facts, self.policy, read_history).to_json() == decision.to_json()
        if decision.may_leave:
            self.book.record(facts)
            self.book = HistoryBook.from_json(json.loads(json.dumps(self.book.to_json())))
        return decision.verdict

    def factors(self, number: int, *approvals: Approval, run: str = "run-1") -> str:
        plan = PLAN.model_copy(update={"run": run, "rounds": 200})
        return self.decide(tensor_message(round=number, run=run), context(open_round=number, plan=plan), *approvals)

    def answers(self, number: int, step: int, *approvals: Approval) -> str:
        body = responses_body((1, ("12",)))
        message = small_message("public.responses", body, round_number=number, step=step)
        here = context(open_round=number, open_step=step, verdicts=(True,), token_counts=(2,))
        return self.decide(message, here, *approvals)


# ---- approvals -------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [1, 2, 7, 200])
def test_T36_the_first_release_waits_whatever_number_the_coordinator_gives_its_round(number: int) -> None:
    party = Releasing(policy_of(policy_text(first_rounds=1)))
    assert party.factors(number) == "hold"
    assert party.factors(number, ADA) == "allow"
    assert party.factors(number + 1) == "allow"  # the counterpart: one round has been released
    assert party.factors(number, run="run-2") == "hold"  # each run anew


def test_T36_rounds_are_counted_by_releases_of_the_kind_in_the_run() -> None:
    party = Releasing(policy_of(policy_text(first_rounds=2).replace("then: 0", "then: 3", 1)))
    waits = []
    # Numbers with gaps; a round that was held and never released does not count.
    assert party.factors(3) == "hold"
    for number in (5, 6, 9, 20, 21, 30, 31, 32):
        waits.append(party.factors(number))
        assert waits[-1] == "allow" or party.factors(number, ADA) == "allow"
    hold, allow = "hold", "allow"
    # the first two, and each third one: 3rd, 6th
    assert waits == [hold, hold, hold, allow, allow, hold, allow, allow]


def test_T36_every_step_of_a_first_round_waits_and_none_of_the_next() -> None:
    text = policy_text()
    head, tail = text.split("send_only_verified: true", 1)
    party = Releasing(
        policy_of(head + "send_only_verified: true" + tail.replace("first_rounds: 0", "first_rounds: 1", 1))
    )
    assert [party.answers(4, 2), party.answers(4, 2, ADA)] == ["hold", "allow"]
    assert [party.answers(4, 4), party.answers(4, 4, ADA)] == ["hold", "allow"]
    assert [party.answers(5, 2), party.answers(5, 4)] == ["allow", "allow"]
    # What is released of one kind does not stand for another.
    assert party.factors(5) == "allow"


@pytest.mark.parametrize(("first", "then", "verdict"), [(1, 0, "hold"), (0, 5, "hold"), (0, 0, "allow")])
def test_T36_a_plan_waits_if_any_round_does(first: int, then: int, verdict: str) -> None:
    head, tail = policy_text().split("ingress:", 1)
    tail = tail.replace("first_rounds: 0", f"first_rounds: {first}", 1).replace("then: 0", f"then: {then}", 1)
    policy = policy_of(f"{head}ingress:{tail}")
    body = pb.RunPlan(canonical_json=PLAN.canonical())
    assert judged(inbound("run.plan", body), policy, **FROM_COORDINATOR).verdict == verdict
    for round_number, step in ((1, 0), (2, 0), (0, 1)):
        message = inbound("run.plan", body, round_number=round_number, step=step)
        for approvals in ((), (ADA,)):
            decision = judged(message, policy, history=History(approvals=approvals), **FROM_COORDINATOR)
            assert (decision.verdict, decision.reasons) == ("deny", ("PLAN_ROUND",))


# ---- evaluations -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "named", "expected", "verdict"),
    [
        (1, BASE_DIGEST, BASE_DIGEST, "allow"),
        (1, "ab" * 31 + "cd", BASE_DIGEST, "deny"),
        (1, "", BASE_DIGEST, "deny"),
        (1, "", "", "deny"),  # the round came to nothing, or is not known here
        (0, "", "", "allow"),
        (0, "", BASE_DIGEST, "allow"),  # the base model, whatever the newest adapter is
        (0, BASE_DIGEST, BASE_DIGEST, "deny"),
    ],
)
@pytest.mark.parametrize("direction", ["egress", "ingress"])
def test_T09_an_evaluation_names_the_adapter_of_its_round(
    direction: str, number: int, named: str, expected: str, verdict: str
) -> None:
    message = metrics_message(round_number=number, direction=direction)
    assert isinstance(message.body, pb.MetricsEval)
    message.body.adapter_digest = named
    decision = judged(message, POLICY, evaluated_digest=expected)
    assert (decision.verdict, decision.reasons) == (verdict, ("ADAPTER_DIGEST",) if verdict == "deny" else ())


# ---- control messages ------------------------------------------------------------------------------


def _said(body: Any, number: int, step: int = 0, *, run: str = "run-1", direction: str = "egress", **where: Any) -> str:
    kind = {
        pb.Progress: "progress", pb.Declined: "declined", pb.Abstain: "abstain", pb.Poll: "poll", pb.Hello: "hello",
        pb.Fetch: "fetch", pb.Heartbeat: "heartbeat", pb.ErrorReport: "error", pb.Checkpoint: "checkpoint",
    }[type(body)]  # fmt: skip
    message = small_message(f"control.{kind}", body, round_number=number, step=step, run=run, direction=direction)
    decision = judged(message, POLICY, **{"open_round": 2, **where})
    assert decision.reasons in ((), ("CONTROL_PLACE",)), decision.explain()
    return decision.verdict


def test_T09_round_and_step_of_a_control_message_say_where_the_run_stands_and_nothing_else() -> None:
    for number, step, verdict in (
        (2, 0, "allow"), (2, 4, "allow"), (1, 3, "allow"), (0, 0, "allow"),
        (3, 0, "deny"), (2, 5, "deny"), (0, 1, "deny"), (2**32 - 1, 0, "deny"), (2, 2**32 - 1, "deny"),
    ):  # fmt: skip
        for body in (
            pb.Progress(round=number, step=step),
            pb.Abstain(round=number, step=step),
            pb.Declined(kind="lora.factors", round=number, step=step),
        ):
            for direction in ("egress", "ingress"):
                assert _said(body, number, step, direction=direction) == verdict, (number, step, body, direction)


def test_T09_body_and_envelope_of_a_control_message_agree() -> None:
    assert _said(pb.Progress(round=2, step=3), 2, 3) == "allow"
    for body in (pb.Progress(round=2, step=4), pb.Progress(round=1, step=3), pb.Abstain(round=2), pb.Declined()):
        for direction in ("egress", "ingress"):
            assert _said(body, 2, 3, direction=direction) == "deny"


def test_T09_kinds_that_belong_to_no_round_have_none() -> None:
    for body in (pb.Poll(), pb.Fetch(), pb.Heartbeat(), pb.ErrorReport(code="INTERNAL"), pb.Checkpoint()):
        assert _said(body, 0) == "allow"
        assert _said(body, 0, run="") == "allow"
        assert [_said(body, 1), _said(body, 2, 1), _said(body, 0, 1)] == ["deny"] * 3


def test_T09_without_an_open_run_there_is_no_round_to_say() -> None:
    for where in ({"plan": None, "open_round": 0}, {}):
        run = "run-1" if where else "run-9"
        assert _said(pb.Abstain(), 0, run=run, **where) == "allow"  # no to a plan
        assert _said(pb.Abstain(round=1), 1, run=run, **where) == "deny"
        assert _said(pb.Progress(round=1, step=1), 1, 1, run=run, **where) == "deny"
    # The receiver of a run that is over bounds nothing: what was sent before its end came may still arrive.
    gone: dict[str, Any] = {"plan": None, "open_round": 0, "direction": "ingress"}
    assert _said(pb.Progress(round=3, step=1), 3, 1, **gone) == "allow"
    assert _said(pb.Progress(round=3, step=2), 3, 1, **gone) == "deny"
    assert _said(pb.Progress(round=3, step=1), 3, 1, run="", **gone) == "deny"
    assert _said(pb.Heartbeat(), 3, **gone) == "deny"


def test_a_silo_may_abstain_from_the_round_that_it_did_not_let_in() -> None:
    for where in ({"refused_round": 3}, {"refused_round": 3, "plan": None, "open_round": 0}):
        assert _said(pb.Abstain(round=3), 3, **where) == "allow"
        assert _said(pb.Abstain(round=4), 4, **where) == "deny"
        assert _said(pb.Abstain(round=3, step=1), 3, 1, **where) == "deny"
        assert _said(pb.Progress(round=3), 3, **where) == "deny"


# ---- rounds ----------------------------------------------------------------------------------------


def _opened(
    number: int, *, rows: tuple[int, ...] = (1, 4, 7), base: str = BASE_DIGEST, open_round: int = 2
) -> Decision:
    steps = [pb.PublicStep(step=2, prompt_indices=rows), pb.PublicStep(step=4, prompt_indices=[0, 9, 2])]
    message = inbound("round.open", pb.RoundOpen(base_digest=base, public_steps=steps), round_number=number)
    return judged(message, POLICY, open_round=open_round, witnesses=1, **FROM_COORDINATOR)


def test_T20_a_round_opens_once_and_rounds_go_forward() -> None:
    assert _opened(3).verdict == "allow"
    assert _opened(3, open_round=1).verdict == "allow"  # one that this silo never heard of lies between
    assert _opened(1).reasons == ("ROUND_NOT_OPEN",)
    assert _opened(2).verdict == "allow"  # the same once more: its acknowledgement was lost
    for changed in (_opened(2, rows=(1, 4, 8)), _opened(2, rows=(4, 1, 7)), _opened(2, base="cd" * 32)):
        assert (changed.verdict, changed.reasons) == ("deny", ("ROUND_NOT_OPEN",))


# ---- the size of a long run ------------------------------------------------------------------------


@pytest.mark.parametrize("rounds", [1, 20, 200, 5000])
def test_T07_a_run_whose_every_round_goes_the_same_way_passes_to_its_last_round(rounds: int) -> None:
    size = PlanSize(
        rounds=rounds, local_steps=SIZE.local_steps, prompts_per_step=3, samples_per_prompt=4, max_new_tokens=32
    )
    policy = policy_of(policy_text(size=size))
    block, adapter = policy.file.egress.lora_factors, policy.file.ingress.global_adapter
    assert block is not None and adapter is not None
    # The longest start: A uniform within 1/sqrt(in), all values at the bound; B is 0.
    start = math.sqrt(sum(shape[0] for name, shape in SCHEMA.tensors if name.endswith("lora_A")))
    moved = block.max_l2
    before_last = start + (rounds - 1) * moved
    assert judged(tensor_message(), policy, base_l2=before_last).verdict == "allow"
    assert before_last + moved <= adapter.max_l2
    too_long = judged(tensor_message(), policy, base_l2=2 * start + 1.2 * rounds * moved)
    assert too_long.reasons == ("TOTAL_L2",)


# ---- methods ---------------------------------------------------------------------------------------


def _plan(policy: Policy, **changes: Any) -> tuple[str, int]:
    plan = PLAN.model_copy(update=changes)
    decision = judged(inbound("run.plan", pb.RunPlan(canonical_json=plan.canonical())), policy, **FROM_COORDINATOR)
    result = next(result for result in decision.results if result.rule == "plan method")
    assert ("PLAN_METHOD" in decision.reasons) == (result.outcome == "deny")
    return result.outcome, result.line


def test_a_plan_whose_method_the_policy_would_later_deny_is_refused_at_once() -> None:
    random = policy_of(policy_text("pubswap-random"))
    for name, method in METHODS.items():
        assert _plan(policy_of(policy_text(method.ruleset)), method=name)[0] == "ok", name
        wider = method.kinds <= set(random.file.egress.model_dump(by_alias=True, exclude_none=True))
        assert _plan(random, method=name)[0] == ("ok" if wider else "deny"), name
    text = policy_text()
    line = next(number for number, part in enumerate(text.splitlines(), 1) if "send_only_verified" in part)
    assert _plan(POLICY, method="pubswap-random") == ("deny", line)
    # Without a public step no answer leaves, so nothing will be denied.
    assert _plan(POLICY, method="pubswap-random", swap_period=5)[0] == "ok"
    out_only = edited("send_only_verified: true", "send_only_verified: false")
    assert _plan(out_only, method="pubswap-random")[0] == "deny"
    both = policy_of(policy_text().replace("send_only_verified: true", "send_only_verified: false").replace(
        "verify_locally: true", "verify_locally: false"))  # fmt: skip
    assert _plan(both, method="pubswap-random")[0] == "ok"
    assert _plan(POLICY, method="gossip")[0] == "deny"


@pytest.mark.parametrize(
    ("side", "kind", "refused"),
    [
        ("egress", "lora.factors", set(METHODS) - {"local-only", "responses-only"}),
        ("egress", "public.responses", {"pubswap", "pubswap-random", "responses-only"}),
        ("ingress", "public.donors", {"pubswap", "pubswap-random", "responses-only"}),
        ("egress", "metrics.eval", set()),
    ],
)
def test_a_plan_is_refused_where_a_kind_that_its_method_lives_on_is_not_named(
    side: str, kind: str, refused: set[str]
) -> None:
    whole = policy_of(policy_text("pubswap-random"))
    raw = whole.file.model_dump(mode="json", by_alias=True)
    del raw[side][kind]
    policy = Policy(type(whole.file).model_validate(raw), "policy.yaml", "", whole.lines)
    assert {name for name in METHODS if _plan(whole, method=name)[0] == "deny"} == {"fedsa-lora"}  # another kind yet
    assert {name for name in METHODS if _plan(policy, method=name)[0] == "deny"} == refused | {"fedsa-lora"}


def test_the_coordinator_sends_what_these_rules_take() -> None:
    """Answers of the coordinator, with any round that they answer to, are not bounded by the silo's place."""
    message = inbound("control.refusal", pb.Refusal(code="ROUND_CLOSED"), round_number=9, sender=COORDINATOR)
    assert judged(message, POLICY, **FROM_COORDINATOR).verdict == "allow"
