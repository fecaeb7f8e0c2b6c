"""Every rule seen passing and failing, by messages that differ in one thing from a good one."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.codec import canonical_json
from fedsilo.protocol.plan import Optimiser, Rollout
from policies.engine import OFFERED, Approval, Decision, History, decide, measure
from policies.grids import on_grid
from policies.model import Policy
from policies.rules import RULES, SCREENS
from tests.policies.kinds import FURTHER_RULES
from tests.policies.setting import (
    COORDINATOR,
    FROM_COORDINATOR,
    GRADED,
    HASH,
    PLAN,
    SCHEMA,
    SILO,
    context,
    donors_message,
    edited,
    good_cases,
    inbound,
    judged,
    metrics_message,
    policy_of,
    policy_text,
    responses_body,
    responses_message,
    small_message,
    tensor_message,
    zeros,
)

POLICY = policy_of(policy_text())
DONORS = {**FROM_COORDINATOR, "verdicts": (True,)}
A, B = (name for name, _ in SCHEMA.tensors)


def _with(name: str, values: Any) -> dict[str, np.ndarray[Any, np.dtype[Any]]]:
    tensors = zeros()
    tensors[name] = values
    return tensors


def _filled(name: str, value: float) -> dict[str, np.ndarray[Any, np.dtype[Any]]]:
    tensors = zeros()
    tensors[name].flat[3] = value
    return tensors


def _renamed() -> dict[str, np.ndarray[Any, np.dtype[Any]]]:
    tensors = zeros()
    tensors[A.upper()] = tensors.pop(A)
    return tensors


def _plan(**changes: Any) -> Decision:
    plan = PLAN.model_copy(update=changes)
    run = changes.get("run", "run-1")
    return judged(inbound("run.plan", pb.RunPlan(canonical_json=plan.canonical()), run=run), POLICY, **FROM_COORDINATOR)


def _round(*steps: tuple[int, list[int]], number: int = 2, digest: str = "cd" * 32) -> Decision:
    body = pb.RoundOpen(
        base_digest=digest, public_steps=[pb.PublicStep(step=step, prompt_indices=rows) for step, rows in steps]
    )
    return judged(inbound("round.open", body, round_number=number), POLICY, **FROM_COORDINATOR)


def _agreed(*silos: str, few: bool = False, **changes: Any) -> Decision:
    """round.agreed with a row of each of these; few: of a run without the last silo."""
    rows = [pb.Countersignature(silo=silo, signature=bytes(64)) for silo in silos]
    message = inbound("round.agreed", pb.RoundAgreed(countersignatures=rows), round_number=1)
    if few:
        changes["plan"] = PLAN.model_copy(update={"silos": PLAN.silos[:-1]})
    return judged(message, POLICY, **FROM_COORDINATOR, **changes)


def _ended(**fields: Any) -> Decision:
    return judged(inbound("round.result", pb.RoundResult(**fields), round_number=1), POLICY, **FROM_COORDINATOR)


def _adapter(**changes: Any) -> Decision:
    changes = {"kind": "global.adapter", "direction": "ingress", "sender": COORDINATOR, "base_digest": "", **changes}
    return judged(tensor_message(**changes), POLICY, **FROM_COORDINATOR, last_adapter_first=True)


def _further(**changes: Any) -> Decision:
    """global.adapter 1.0 from the last one, whose limit is 0.019, but for what of the setting is changed."""
    message, known = good_cases()["global.adapter"]
    moved = {name: values.copy() for name, values in zeros().items()}
    moved[A].flat[0] = 1.0
    return judged(message, POLICY, **(known | {"last_adapter": moved} | changes))


def _answers(policy: Policy = POLICY, history: History | None = None, **changes: Any) -> Decision:
    return judged(responses_message(), policy, history=history, **{**GRADED, **changes})


def _texts(*texts: str, samples: int = 4) -> Decision:
    message = responses_message((1, texts), samples=samples)
    graded = {"verdicts": (True,) * len(texts), "token_counts": tuple(len(text) for text in texts)}
    return judged(message, POLICY, **graded)


def _tighter(old: str, new: str, **changes: Any) -> Decision:
    return _answers(edited(old, new, **changes))


POLL = small_message("control.poll", pb.Poll(wait_milliseconds=1), run="")
EMPTY_PLAN = inbound("run.plan", pb.RunPlan())
GOOD_PLAN = inbound("run.plan", pb.RunPlan(canonical_json=PLAN.canonical()))
GOOD_PLAN_OF_ROUND_2 = inbound("run.plan", pb.RunPlan(canonical_json=PLAN.canonical()), round_number=2)
HEARTBEAT_OF_ROUND_1 = small_message("control.heartbeat", pb.Heartbeat(), round_number=1)
FREE_TEXT = small_message("control.error", pb.ErrorReport(code="x"))
TWO = History(messages_in_round=2)


def _countersigned(size: int, *, countersigns: bool) -> Decision:
    """A poll with so many bytes of signature, while a round waits for it or not."""
    message = small_message("control.poll", pb.Poll(countersignature=bytes(size)), run="")
    return judged(message, POLICY, countersigns=countersigns)


# (rule, what is wrong, decision)
def opened_witnessed(count: int | None) -> Decision:
    """round.open of a further round, when so many parties have countersigned this site's log."""
    message, changes = good_cases()["round.open"]
    return judged(message, POLICY, **(changes | {"witnesses": count}))


FAILURES: list[tuple[str, str, Callable[[], Decision]]] = [
    ("kind", "no such kind", lambda: judged(small_message("logs.upload", pb.Heartbeat()), POLICY)),
    ("kind", "kind not named", lambda: judged(POLL, policy_of(policy_text("deny_all")))),
    ("kind", "control kind not named", lambda: judged(POLL, edited("hello, poll, fetch", "hello, fetch"))),
    (
        "kind",
        "T28 a silo sends what only the coordinator may",
        lambda: judged(small_message("run.end", pb.RunEnd(outcome="finished")), POLICY),
    ),
    ("measured", "body of another kind", lambda: judged(small_message("control.poll", pb.Heartbeat()), POLICY)),
    ("measured", "plan that does not parse", lambda: judged(EMPTY_PLAN, POLICY, **FROM_COORDINATOR)),
    ("fields", "T8 free text in a code", lambda: judged(FREE_TEXT, POLICY)),
    ("sender", "not the certificate's", lambda: judged(tensor_message(), POLICY, expected_sender=COORDINATOR)),
    (
        "sender",
        "not a peer",
        lambda: judged(tensor_message(sender=SILO + "2"), POLICY, expected_sender=SILO + "2"),
    ),
    ("valid", "too early", lambda: judged(POLL, POLICY, now_seconds=1_700_000_000.0)),
    ("valid", "expired", lambda: judged(POLL, POLICY, now_seconds=1_900_000_000.0)),
    ("run", "no run", lambda: judged(tensor_message(), POLICY, plan=None)),
    ("run", "another run", lambda: judged(tensor_message(run="run-2"), POLICY)),
    ("round", "round over", lambda: judged(tensor_message(), POLICY, open_round=2)),
    ("round", "step over", lambda: _answers(open_step=4)),
    ("round", "result of a future round", lambda: judged(metrics_message(round_number=2), POLICY)),
    ("place of a control message", "T9", lambda: judged(HEARTBEAT_OF_ROUND_1, POLICY)),
    ("message bytes", "T11", lambda: judged(tensor_message(payload_bytes=65537), POLICY)),
    ("round bytes", "T11", lambda: judged(tensor_message(), POLICY, history=History(round_bytes=10**9))),
    ("day bytes", "T11", lambda: judged(POLL, POLICY, history=History(day_bytes=10**12))),
    ("messages per minute", "T11 polls", lambda: judged(POLL, POLICY, history=History(messages_in_minute=1200))),
    ("messages per minute", "T11", lambda: _answers(history=History(messages_in_minute=600))),
    ("schema", "unknown here", lambda: judged(tensor_message(), POLICY, schema=None)),
    ("schema", "header names another", lambda: judged(tensor_message(schema_sha256="ef" * 32), POLICY)),
    ("tensor set", "T1 missing", lambda: judged(tensor_message({A: zeros()[A]}), POLICY)),
    ("tensor set", "T1 added", lambda: judged(tensor_message(_with("model.embed", np.ones(2, np.float32))), POLICY)),
    ("tensor set", "T1 renamed", lambda: judged(tensor_message(_renamed()), POLICY)),
    ("tensor set", "no values", lambda: judged(tensor_message(tensors=None, through_codec=True), POLICY, schema=None)),
    ("tensor shapes", "T2 larger rank", lambda: judged(tensor_message(_with(A, np.ones((3, 6), np.float32))), POLICY)),
    ("tensor shapes", "T2 empty", lambda: judged(tensor_message(_with(A, np.ones((0, 6), np.float32))), POLICY)),
    ("tensor dtype", "T2", lambda: judged(tensor_message(dtype="bfloat16"), POLICY)),
    ("rank and scale", "T2 rank", lambda: judged(tensor_message(rank=3), POLICY)),
    ("rank and scale", "scale", lambda: judged(tensor_message(scale=2.5), POLICY)),
    ("finite values", "T4 NaN", lambda: judged(tensor_message(_filled(A, np.nan), through_codec=False), POLICY)),
    ("finite values", "T4 infinity", lambda: judged(tensor_message(_filled(B, -np.inf), through_codec=False), POLICY)),
    ("canonical values", "T4 -0", lambda: judged(tensor_message(_filled(A, -0.0), through_codec=False), POLICY)),
    ("canonical values", "T4 denormal", lambda: judged(tensor_message(_filled(A, 1e-40), through_codec=False), POLICY)),
    ("base adapter", "another base", lambda: judged(tensor_message(base_digest="ee" * 32), POLICY)),
    ("base adapter", "whole factors name none", lambda: _adapter(base_digest="ee" * 32)),
    (
        "value grid",
        "T5 low bits",
        lambda: judged(
            tensor_message(_filled(A, 0.0010001)), edited('grid: "float32"', "grid: bfloat16")
        ),
    ),
    ("L2 of the delta", "T7", lambda: judged(tensor_message(_filled(A, 5.0)), POLICY)),
    ("L2 of one tensor", "T7", lambda: judged(tensor_message(_filled(B, 5.0)), POLICY)),
    ("L2 of base and delta", "T7", lambda: judged(tensor_message(), POLICY, base_l2=1e6)),
    ("L2 of base and delta", "unknown base", lambda: judged(tensor_message(), POLICY, base_l2=None)),
    ("L2 of the adapter", "T20", lambda: _adapter(tensors=_filled(A, 1e6))),
    ("L2 of the step", "T20", _further),
    ("L2 of the step", "T20 nobody knows the last one", lambda: _further(last_adapter=None)),
    ("L2 of the step", "T20 nobody knows how long ago", lambda: _further(last_adapter=zeros(), last_adapter_rounds=0)),
    ("frozen factors", "T6", lambda: judged(tensor_message(), POLICY, schema=replace(SCHEMA, freeze="A"))),
    ("records of the round", "T7 one", lambda: judged(tensor_message(), POLICY, records=1)),
    ("records of the round", "T7 not known", lambda: judged(tensor_message(), POLICY, records=None)),
    ("local epochs of the round", "T7", lambda: judged(tensor_message(), POLICY, epochs=6)),
    ("local epochs of the round", "T7 not known", lambda: judged(tensor_message(), POLICY, epochs=None)),
    ("steps of the round", "T7", lambda: judged(tensor_message(), POLICY, steps=5)),
    ("steps of the round", "T7 not known", lambda: judged(tensor_message(), POLICY, steps=None)),
    ("factor sets per round", "second", lambda: judged(tensor_message(), POLICY, history=History(messages_in_round=1))),
    ("public set", "T12 own copy differs", lambda: _answers(public_set_sha256=HASH["held"])),
    (
        "public set",
        "T12 names another",
        lambda: judged(
            small_message(
                "public.responses", pb.PublicResponses(public_set_sha256=HASH["held"]), round_number=1, step=2
            ),
            POLICY,
            verdicts=(),
        ),
    ),
    ("public prompts of the open step", "T12 not asked", lambda: _answers(public_prompt_indices=(1, 4))),
    ("public prompts of the open step", "T12 beyond the set", lambda: _answers(public_set_rows=7)),
    (
        "public prompts of the open step",
        "twice",
        lambda: judged(responses_message((1, ("1",)), (1, ("2",))), POLICY, verdicts=(True, True)),
    ),
    ("prompts in the step's order", "T9 another order", lambda: _answers(public_prompt_indices=(4, 1, 7))),
    ("answers graded again", "one wrong", lambda: _answers(verdicts=(True, False, True))),
    ("answers graded again", "not graded", lambda: _answers(verdicts=None)),
    ("answers graded again", "too few verdicts", lambda: _answers(verdicts=(True, True))),
    (
        "finish reasons",
        "unset",
        lambda: judged(
            small_message(
                "public.responses",
                pb.PublicResponses(
                    public_set_sha256=HASH["public"],
                    prompts=[pb.PromptResponses(prompt_index=1, samples=1, responses=[pb.Response(text="1")])],
                ),
                round_number=1,
                step=2,
            ),
            POLICY,
            verdicts=(True,),
        ),
    ),
    ("one message per step", "second", lambda: _answers(history=History(messages_in_step=1))),
    ("as the plan asks", "more answers than samples", lambda: _texts("1", "2", samples=1)),
    ("as the plan asks", "more samples than the plan", lambda: _texts("1", samples=5)),
    ("as the plan asks", "longer than the plan", lambda: _texts("1" * 33)),
    ("tokens of one response", "too long", lambda: _tighter("max_new_tokens: 32", "max_new_tokens: 1")),
    ("tokens of one response", "uncounted bytes bound tokens", lambda: judged(
        responses_message((1, ("1" * 33,))), POLICY, verdicts=(True,))),
    ("samples per prompt", "too many", lambda: _tighter("samples_per_prompt: 4", "samples_per_prompt: 3")),
    ("prompts per step", "too many", lambda: _tighter("max_prompts_per_step: 3", "max_prompts_per_step: 2")),
    ("responses per step", "too many", lambda: _tighter("max_responses_per_step: 12", "max_responses_per_step: 2")),
    ("responses per round", "too many", lambda: _answers(history=History(responses=22))),
    ("tokens per step", "too many", lambda: _tighter("max_tokens_per_step: 384", "max_tokens_per_step: 4")),
    ("tokens per round", "too many", lambda: _answers(history=History(tokens=764))),
    ("bytes of one response", "too many", lambda: _tighter("max_bytes_per_response: 512", "max_bytes_per_response: 1")),
    ("bytes per step", "too many", lambda: _tighter("max_bytes_per_step: 3840", "max_bytes_per_step: 70")),
    ("bytes of responses per round", "too many", lambda: _answers(history=History(text_bytes=7676))),
    ("bytes of responses per day", "too many", lambda: _tighter("max_bytes_per_day: 1536000", "max_bytes_per_day: 4")),
    (
        "metric split",
        "private",
        lambda: judged(small_message("metrics.eval", pb.MetricsEval(split="private"), round_number=1), POLICY),
    ),
    ("metrics of the round's adapter", "T9", lambda: judged(metrics_message(), POLICY, evaluated_digest="cd" * 32)),
    ("metric names and topics", "T9 name", lambda: judged(metrics_message(("reward", "", 0.5)), POLICY)),
    ("metric names and topics", "T9 topic", lambda: judged(metrics_message(("pass_at_1", "Mr Smith", 0.5)), POLICY)),
    (
        "metric names and topics",
        "T9 twice",
        lambda: judged(metrics_message(("pass_at_1", "", 0.5), ("pass_at_1", "", 0.25)), POLICY),
    ),
    (
        "metrics in order",
        "T9",
        lambda: judged(metrics_message(("pass_at_1", "rotate", 0.5), ("pass_at_1", "", 0.5)), POLICY),
    ),
    ("metric range", "T9", lambda: judged(metrics_message(("pass_at_1", "", 1.5)), POLICY)),
    ("metric grid", "T9", lambda: judged(metrics_message(("pass_at_1", "", 0.12345)), POLICY)),
    ("metric grid", "T9 one ulp", lambda: judged(metrics_message(("pass_at_1", "", np.nextafter(0.5, 1))), POLICY)),
    ("metric grid", "T9 -0", lambda: judged(metrics_message(("pass_at_1", "", -0.0)), POLICY)),
    ("metric messages per round", "third", lambda: judged(metrics_message(), POLICY, history=TWO)),
    ("plan rounds", "T19", lambda: _plan(rounds=201)),
    ("plan local steps", "T19", lambda: _plan(local_steps=5)),
    ("plan prompts per step", "T19", lambda: _plan(prompts_per_step=4)),
    ("plan samples per prompt", "T13", lambda: _plan(samples_per_prompt=5)),
    ("plan max new tokens", "T13", lambda: _plan(rollout=Rollout(max_new_tokens=33))),
    ("plan temperature", "T13", lambda: _plan(rollout=Rollout(max_new_tokens=32, temperature=3.0))),
    ("plan learning rate", "T19", lambda: _plan(optimiser=Optimiser(learning_rate=0.01))),
    ("plan stands", "T13", lambda: _plan(rollout=Rollout(max_new_tokens=32, temperature=0.9))),
    ("plan frozen factors", "T6 not drawn", lambda: judged(GOOD_PLAN, POLICY, **FROM_COORDINATOR, schema=None)),
    (
        "plan gives enough records",
        "T7",
        lambda: judged(GOOD_PLAN, edited("min_records: 2 ", "min_records: 7 "), **FROM_COORDINATOR),
    ),
    (
        "plan gives enough records",
        "T7 a silo of fewer steps",
        lambda: judged(
            inbound(
                "run.plan",
                pb.RunPlan(canonical_json=PLAN.model_copy(update={"silo_steps": {"hospital_b": 1}}).canonical()),
            ),
            edited("min_records: 2 ", "min_records: 4 "),
            **FROM_COORDINATOR,
        ),
    ),
    (
        "plan gives enough records",
        "T7 steps",
        lambda: judged(GOOD_PLAN, edited("max_steps: 4", "max_steps: 3"), **FROM_COORDINATOR),
    ),
    ("plan of no round", "T36", lambda: judged(GOOD_PLAN_OF_ROUND_2, POLICY, **FROM_COORDINATOR)),
    ("plan method", "no such method", lambda: _plan(method="gossip")),
    ("plan federation", "another", lambda: _plan(federation="other-net")),
    (
        "plan federation",
        "envelope of another run",
        lambda: judged(
            inbound("run.plan", pb.RunPlan(canonical_json=PLAN.canonical()), run="run-2"), POLICY, **FROM_COORDINATOR
        ),
    ),
    ("plan model", "T13 template", lambda: _plan(template_sha256=HASH["base"])),
    ("plan model", "tokenizer", lambda: _plan(tokenizer_sha256=HASH["base"])),
    ("plan schema", "another", lambda: _plan(lora=PLAN.lora.model_copy(update={"schema_sha256": HASH["base"]}))),
    ("plan schema", "dtype", lambda: _plan(wire_dtype="bfloat16")),
    ("plan sets", "T12 public", lambda: _plan(public_set_sha256=HASH["base"])),
    ("plan sets", "T12 rows", lambda: _plan(public_set_rows=11)),
    ("plan sets", "held out", lambda: _plan(held_out_sha256=HASH["base"])),
    ("plan peers", "T48 stranger", lambda: _plan(silos=("hospital_a", "hospital_z"))),
    ("plan peers", "T48 too few", lambda: _plan(silos=("hospital_a",), quorum=1)),
    ("plan asks for enough updates", "T58 one", lambda: _plan(quorum=1)),
    ("plan fits the round's limits", "every step public", lambda: _plan(swap_period=1)),
    ("round is of the plan", "beyond it", lambda: _round(number=4)),
    ("round is of the plan", "no base", lambda: _round(digest="")),
    ("rounds go forward", "the open one, changed", lambda: _round((2, [1]), number=1)),
    ("public steps of the plan", "private step", lambda: _round((3, [1]))),
    ("public steps of the plan", "twice", lambda: _round((2, [1]), (2, [3]))),
    ("prompts are rows of the public set", "T12", lambda: _round((2, [10]))),
    ("prompts are rows of the public set", "T12 twice", lambda: _round((2, [1, 1]))),
    (
        "prompts are rows of the public set",
        "T12 own copy differs",
        lambda: judged(donors_message((1, "hospital_b", "1")), POLICY, **DONORS, public_set_sha256=HASH["held"]),
    ),
    ("prompts per public step", "T19", lambda: _round((2, [1, 2, 3, 4]))),
    ("donors of the open step", "T12", lambda: judged(donors_message((2, "hospital_b", "1")), POLICY, **DONORS)),
    ("donors are peers", "T21", lambda: judged(donors_message((1, "hospital_z", "1")), POLICY, **DONORS)),
    (
        "donors are peers",
        "two own",
        lambda: judged(
            donors_message((1, "hospital_a", None), (4, "hospital_b", None)), POLICY, **{**DONORS, "verdicts": ()}
        ),
    ),
    ("silos of the plan, each once", "T20 two signatures of one silo", lambda: _agreed("hospital_b", "hospital_b")),
    ("silos of the plan, each once", "T20 a peer that the plan does not name", lambda: _agreed("hospital_d", few=True)),
    ("silos of the plan, each once", "T20 no plan", lambda: _agreed("hospital_b", plan=None)),
    (
        "silos of the plan, each once",
        "T24 a survivor 5000 times",
        lambda: _ended(participants=["hospital_b"] * 5000),
    ),
    (
        "silos of the plan, each once",
        "T20 two verdicts on one silo",
        lambda: _ended(verdicts=[pb.SiloVerdict(silo="hospital_b", verdict="absent")] * 2),
    ),
    (
        "donors graded here",
        "T21 wrong",
        lambda: judged(donors_message((1, "hospital_b", "1")), POLICY, **{**DONORS, "verdicts": (False,)}),
    ),
    (
        "donors graded here",
        "T21 not graded",
        lambda: judged(donors_message((1, "hospital_b", "1")), POLICY, **FROM_COORDINATOR),
    ),
    (
        "donors per prompt",
        "T21",
        lambda: judged(
            donors_message(*[(1, "hospital_b", "1")] * 5), POLICY, **{**DONORS, "verdicts": (True,) * 5}
        ),
    ),
    (
        "donors of one peer",
        "T21",
        lambda: judged(
            donors_message((1, "hospital_b", "1")),
            edited("    verify_locally:", "    max_share_per_peer: 0.2\n    verify_locally:"), **DONORS,
        ),
    ),
    (
        "bytes of one donor",
        "T21",
        lambda: judged(donors_message((1, "hospital_b", "1" * 513)), POLICY, **DONORS),
    ),
    (
        "kind of the method",
        "answers in a run without public steps",
        lambda: judged(responses_message(), POLICY, **GRADED, plan=PLAN.model_copy(update={"method": "fedavg-grpo"})),
    ),
    ("witnesses", "nobody", lambda: opened_witnessed(0)),
    ("witnesses", "unknown", lambda: opened_witnessed(None)),
    (
        "checkpoints of others",
        "shown by a silo",
        lambda: judged(small_message("control.checkpoint", pb.Checkpoint(peers=[pb.PeerLog()]), run=""), POLICY),
    ),
    (
        "checkpoints of others",
        "more than there are",
        lambda: judged(small_message("control.checkpoint", pb.Checkpoint(countersigned=[""] * 4), run=""), POLICY),
    ),
    ("countersignature", "T20 no round waits for it", lambda: _countersigned(64, countersigns=False)),
    ("countersignature", "T09 longer than a signature", lambda: _countersigned(65, countersigns=True)),
    ("countersignature", "T09 a few bytes", lambda: _countersigned(3, countersigns=True)),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "wrong", "decision"), FAILURES, ids=[f"{rule}: {why}" for rule, why, _ in FAILURES])
def test_rule_refuses(rule: str, wrong: str, decision: Callable[[], Decision]) -> None:
    outcome = decision()
    assert outcome.verdict == "deny" and not outcome.may_leave
    result = next(result for result in outcome.results if result.rule == rule)
    assert result.outcome == "deny"
    assert result.reason in outcome.reasons
    assert result.file == "policy.yaml" and (result.line > 0 or result.reason == "RULE_FAILED")


@pytest.mark.parametrize("name", good_cases())
def test_the_good_message_of_each_kind_passes(name: str) -> None:
    message, changes = good_cases()[name]
    decision = judged(message, POLICY, **changes)
    assert (decision.verdict, decision.explain()) == ("allow", "")
    assert decision.may_leave


def test_every_rule_is_seen_passing_and_failing() -> None:
    grid = judged(tensor_message(_filled(A, 2.0**-9)), edited('grid: "float32"', "grid: bfloat16"))
    decisions = [judged(message, POLICY, **changes) for message, changes in good_cases().values()] + [grid]
    passing = {result.rule for decision in decisions for result in decision.results if result.outcome == "ok"}
    assert len({rule.name for rule in RULES}) == len(RULES)
    # those: tests/policies/test_kinds.py, tests/policies/test_screening.py
    names = [rule.name for rule in RULES if rule not in (*FURTHER_RULES, *SCREENS)]
    assert passing == set(names)
    assert {rule for rule, _, _ in FAILURES} | {"approvals"} == set(names)


def test_T09_the_grid_is_the_nearest_double_of_each_multiple() -> None:
    assert all(on_grid(round(multiple / 10_000, 4), 0.0001) for multiple in range(10_001))
    assert on_grid(0.0, 0.0001) and not on_grid(0.1 + 0.2, 0.1)


def test_pubswap_random_sends_wrong_answers_and_pubswap_does_not() -> None:
    wrong = {**GRADED, "verdicts": (True, False, True)}
    assert judged(responses_message(), policy_of(policy_text("pubswap-random")), **wrong).verdict == "allow"
    assert judged(responses_message(), POLICY, **wrong).reasons == ("NOT_VERIFIED",)


def test_T07_norm_at_the_limit_and_one_ulp_beside_it() -> None:
    # The norm of a single value is that value exactly: its square fits a double.
    limit = float(np.float32(0.0185))
    policy = edited("max_l2: 0.019 ", f"max_l2: {limit!r} ")
    for value, verdict in (
        (np.nextafter(np.float32(limit), np.float32(0)), "allow"),
        (np.float32(limit), "allow"),
        (np.nextafter(np.float32(limit), np.float32(1)), "deny"),
    ):
        decision = judged(tensor_message(_filled(A, float(value))), policy)
        assert decision.verdict == verdict
        assert ("DELTA_L2" in decision.reasons) == (verdict == "deny")


def test_T04_an_update_of_zeros_passes() -> None:
    assert judged(tensor_message(zeros()), POLICY).verdict == "allow"


def test_T07_before_the_transforms_a_large_delta_is_no_refusal_and_lets_nothing_out() -> None:
    facts = measure(tensor_message(_filled(A, 5.0)), context(), stage=OFFERED)
    decision = decide(facts, POLICY, History())
    assert decision.verdict == "allow" and not decision.may_leave
    arrived = {**facts, "direction": "ingress"}
    assert "DELTA_L2" in decide(arrived, POLICY, History()).reasons


def test_T21_wrong_donors_are_looked_at_before_they_are_dropped_and_refused_after() -> None:
    message = donors_message((1, "hospital_b", "1"))
    changes = {**FROM_COORDINATOR, "verdicts": (False,)}
    offered = decide(measure(message, context(**changes), stage=OFFERED), POLICY, History())
    assert [result.outcome for result in offered.results if result.rule == "donors graded here"] == ["look"]
    assert offered.verdict == "allow" and not offered.may_leave
    assert judged(message, POLICY, **changes).reasons == ("NOT_VERIFIED",)


def test_a_refusal_names_file_line_measured_and_limit() -> None:
    text = policy_text()
    line = next(number for number, part in enumerate(text.splitlines(), 1) if "max_total_l2" in part)
    decision = judged(tensor_message(), POLICY, base_l2=1e6)
    sentence = decision.explain()
    assert sentence.startswith(f"policy.yaml:{line}: L2 of base and delta: measured 1000000.0")
    assert "[TOTAL_L2]" in sentence and "limit " in sentence


def test_T36_approvals_hold_until_enough_different_people_said_yes() -> None:
    policy = policy_of(policy_text(first_rounds=1).replace("persons: 1", "persons: 2", 1))
    ada, bob, eve = Approval("ada", ("approver",)), Approval("bob", ("approver",)), Approval("eve", ("viewer",))
    for approvals, verdict in (
        ((), "hold"),
        ((ada,), "hold"),
        ((ada, ada), "hold"),
        ((ada, eve), "hold"),
        ((ada, bob), "allow"),
    ):
        decision = judged(tensor_message(), policy, history=History(approvals=approvals))
        assert decision.verdict == verdict
        assert decision.may_leave == (verdict == "allow")
    second = judged(tensor_message(round=2), policy, open_round=2, history=History(rounds_released=1))
    assert second.verdict == "allow"
    # The number is the coordinator's: a run that begins at round 2 has released nothing yet.
    assert judged(tensor_message(round=2), policy, open_round=2).verdict == "hold"
    # A refusal stays a refusal whoever approves it.
    denied = judged(tensor_message(rank=3), policy, history=History(approvals=(ada, bob)))
    assert denied.verdict == "deny"
    # The coordinator runs the same charter and approves for nobody.
    assert judged(tensor_message(direction="ingress"), policy).verdict == "allow"


def test_a_policy_in_shadow_sends_nothing_and_says_what_it_would() -> None:
    decision = judged(tensor_message(), edited("mode: enforce", "mode: shadow"))
    assert (decision.verdict, decision.would_be, decision.may_leave) == ("deny", "allow", False)


def test_T40_facts_hold_no_text_no_names_of_tensors_and_no_values() -> None:
    canary = "Mrs-Canary-0451"
    value = 0.0007654321
    messages = [
        (judged_facts(responses_message((1, (canary,)))), "responses"),
        (judged_facts(donors_message((1, "hospital_b", canary), (1, canary, canary))), "donors"),
        (judged_facts(metrics_message((canary, canary, 0.5), ("pass_at_1", canary, 0.5))), "metrics"),
        (judged_facts(tensor_message({canary: np.full((2, 6), value, np.float32)})), "tensors"),
        (judged_facts(small_message(canary, pb.Heartbeat(), run=canary, sender=canary)), "envelope"),
        (judged_facts(small_message("control.error", pb.ErrorReport(code=canary))), "control"),
        (judged_facts(inbound("run.plan", pb.RunPlan(canonical_json=canary))), "plan"),
    ]
    for facts, what in messages:
        text = canonical_json(facts).decode()
        assert canary not in text, what
        assert repr(value) not in text and repr(float(np.float32(value))) not in text, what


def judged_facts(message: Any) -> dict[str, Any]:
    facts = measure(message, context())
    assert json.loads(canonical_json(facts)) == json.loads(json.dumps(facts))
    return facts


def test_measured_numbers_agree_with_a_slow_count() -> None:
    tensors = {
        name: np.linspace(-0.5, 0.25, values.size, dtype=np.float32).reshape(values.shape)
        for name, values in zeros().items()
    }
    facts = measure(tensor_message(tensors), context())
    squares = [float(value) ** 2 for values in tensors.values() for value in values.flat]
    assert facts["l2"] == pytest.approx(sum(squares) ** 0.5, rel=1e-12)
    assert facts["total_l2_max"] == pytest.approx(1.0 + sum(squares) ** 0.5, rel=1e-12)
    body = responses_body((1, ("\u00e9", "abc")), (4, ()))
    facts = measure(small_message("public.responses", body, round_number=1, step=2), context())
    assert (facts["responses"], facts["text_bytes"], facts["text_bytes_max"], facts["tokens"]) == (2, 5, 3, 5)
    assert facts["prompts"] == 2 and facts["graded"] is False


def test_T20_every_silo_of_the_plan_may_be_named_once_in_each_list_of_a_result() -> None:
    verdicts = [pb.SiloVerdict(silo=name, verdict="accepted") for name in PLAN.silos]
    assert _ended(committed=True, participants=PLAN.silos, verdicts=verdicts).verdict == "allow"
    assert _agreed(*PLAN.silos).verdict == "allow"
    assert _agreed(*PLAN.silos, "hospital_b").reasons == ("ROSTER",)
