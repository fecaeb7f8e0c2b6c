"""Every rule at its limit and just over it: one table of good messages, each bent in one thing."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.codec import Array
from fedsilo.protocol.plan import Optimiser, Rollout, ServerOptimiser, plan_from_canonical
from policies.examples import CANARIES, CORPUS, screened
from policies.message import Requests, Screened
from tests.policies.messages import (
    ASKED,
    SHIFT_SCHEMA,
    TAKES,
    Case,
    answers,
    candidates,
    donors,
    entries,
    exemplars,
    good,
    metrics,
    prompts,
    rewards,
    ruleset_text,
    scores,
)
from tests.policies.setting import COORDINATOR, HASH, SCHEMA, SILO

OTHER = "cd" * 32
A, B = (name for name, _ in SCHEMA.tensors)
ZEROS = {name: np.zeros(shape, np.float32) for name, shape in SCHEMA.tensors}


@dataclass(frozen=True)
class Bound:
    """Attributes:
    rule: that refuses what is over.
    what: is over its limit.
    at, over: a message at the limit, and one just over it.
    """

    rule: str
    what: str
    at: Case
    over: Case


def of(made: Case, *rows: tuple[Any, ...]) -> list[Bound]:
    """Args:
    made: the good message.
    rows: (rule, what is over, the changes that make it so, and those of the limit: by default none).
    """
    return [Bound(rule, what, bent(made, *at), bent(made, over)) for rule, what, over, *at in rows]


def bent(made: Case, change: Case | dict[str, Any] | None = None) -> Case:
    return change if isinstance(change, Case) else made.but(**change or {})


def up(value: float) -> float:
    return float(np.nextafter(np.float32(value), np.float32(np.inf)))


# ---- adapters ----------------------------------------------------------------------------------------

FACTORS, ADAPTER = good("lora.factors"), good("global.adapter")
PAYLOAD = FACTORS.message.payload_bytes
BUDGETS = FACTORS.policy.file.budgets
L2 = float(np.float32(0.0185))  # the norm of a single value is that value exactly: its square fits a double


def one(name: str, value: float) -> dict[str, Array]:
    """All zeros but one value."""
    tensors = {key: values.copy() for key, values in ZEROS.items()}
    tensors[name].flat[3] = value
    return tensors


def raw(name: str, value: float) -> dict[str, Any]:
    """A value that no honest sender encodes, put behind the codec."""
    return {"tensors": one(name, value)}


def beside(name: str, values: Array) -> Case:
    return FACTORS.carrying({**ZEROS, name: values})


ON_GRID = FACTORS.under('grid: "float32"', "grid: bfloat16")
DELTA = FACTORS.under("max_l2: 0.019 ", f"max_l2: {L2!r} ")
TENSOR = FACTORS.limit("max_tensor_l2", L2)
LAST = {"last_adapter_first": False, "last_adapter": one(A, 1.0), "last_adapter_rounds": 1}
NEAR = ADAPTER.carrying(one(A, 1.0)).but(**LAST)  # not moved at all; the furthest step: test_T20_adapter_step
SHIFTED = good("global.adapter", "fedex")
SHIFT_LIMITS = SHIFTED.policy.file.ingress.global_adapter
assert SHIFT_LIMITS is not None  # the ruleset takes adapters in
SHIFT_MOST, SHIFT_STEP = SHIFT_LIMITS.max_shift_l2 * (1 - 2**-20), SHIFT_LIMITS.max_shift_step_l2 * (1 - 2**-20)
OVER = 1 + 2**-16
ZERO_SHIFT = {name: np.zeros(shape, np.float32) for name, shape in SHIFT_SCHEMA.tensors}


def shift_of(l2: float) -> dict[str, Array]:
    """An adapter that is nothing but a shift of this length, scale and all."""
    tensors = {name: values.copy() for name, values in ZERO_SHIFT.items()}
    factor_a, factor_b = (name for name in tensors if "shift" in name)
    tensors[factor_a][0, 0], tensors[factor_b][0, 0] = 1.0, l2 / SHIFT_SCHEMA.scale
    return tensors


def hidden_shift() -> dict[str, Array]:
    """An adapter whose shift is 2^77 long, of which the Gram matrices of its factors show nothing."""
    tensors = {name: values.copy() for name, values in ZERO_SHIFT.items()}
    factor_a, factor_b = (name for name in tensors if "shift" in name)
    tensors[factor_a][:2, 0], tensors[factor_a][:2, 1] = 2.0**20, (1, 1 + 2.0**-23)
    tensors[factor_b][0, :2] = 2.0**100, -(2.0**100)
    return tensors


def after(tensors: dict[str, Array], last: dict[str, Array] = ZERO_SHIFT) -> Case:
    """A round after the adapter `last`."""
    return SHIFTED.carrying(tensors).but(last_adapter_first=False, last_adapter=last, last_adapter_rounds=1)


def shifted_by(l2: float, last: float | None = None) -> Case:
    """A round after an adapter with a shift of `last`; None: of as much."""
    return after(shift_of(l2), shift_of(l2 if last is None else last))


ADAPTERS = [
    *of(
        FACTORS,
        ("sender", "not the certificate's", {"expected_sender": COORDINATOR}),
        ("sender", "not a peer", {"sender": f"{SILO}2", "expected_sender": f"{SILO}2"}),
        ("run", "no run", {"plan": None}),
        ("run", "another run", {"run": "run-2"}),
        ("round", "round over", {"open_round": 2}),
        ("message bytes", "T11", {"payload_bytes": 65537}, {"payload_bytes": 65536}),
        (
            "round bytes",
            "T11",
            {"round_bytes": BUDGETS.round_bytes - PAYLOAD + 1},
            {"round_bytes": BUDGETS.round_bytes - PAYLOAD},
        ),
        (
            "day bytes",
            "T11",
            {"day_bytes": BUDGETS.day_bytes - PAYLOAD + 1},
            {"day_bytes": BUDGETS.day_bytes - PAYLOAD},
        ),
        ("messages per minute", "T11", {"messages_in_minute": 600}, {"messages_in_minute": 599}),
        ("schema", "unknown here", {"schema": None}),
        ("schema", "header names another", {"schema_sha256": OTHER}),
        ("tensor set", "T1 missing", FACTORS.carrying({A: ZEROS[A]})),
        ("tensor set", "T1 added", beside("model.embed", np.ones(2, np.float32))),
        ("tensor set", "T1 renamed", FACTORS.carrying({A.upper(): ZEROS[A], B: ZEROS[B]})),
        ("tensor set", "no values", {"tensors": None}),
        ("tensor shapes", "T2 larger rank", beside(A, np.ones((3, 6), np.float32))),
        ("tensor shapes", "T2 empty", beside(A, np.ones((0, 6), np.float32))),
        ("tensor dtype", "T2", {"dtype": "bfloat16"}),
        ("rank and scale", "T2 rank", {"rank": 3}),
        ("rank and scale", "scale", {"scale": 2.5}),
        ("finite values", "T4 NaN", raw(A, math.nan), raw(A, 0.0)),
        ("finite values", "T4 infinity", raw(B, -math.inf)),
        ("canonical values", "T4 -0", raw(A, -0.0)),
        ("canonical values", "T4 denormal", raw(A, 1e-40)),
        ("base adapter", "another base", {"base_digest": OTHER}),
        ("value grid", "T5 low bits", ON_GRID.carrying(one(A, 0.0010001)), ON_GRID.carrying(one(A, 2.0**-9))),
        ("L2 of the delta", "T7 one ulp", DELTA.carrying(one(A, up(L2))), DELTA.carrying(one(A, L2))),
        ("L2 of one tensor", "T7 one ulp", TENSOR.carrying(one(B, up(L2))), TENSOR.carrying(one(B, L2))),
        ("L2 of base and delta", "T7", {"base_l2": 5.5}, {"base_l2": 5.48}),
        ("L2 of base and delta", "unknown base", {"base_l2": None}),
        ("frozen factors", "T6", {"schema": replace(SCHEMA, freeze="A")}),
        ("records of the round", "T7", {"records": 1}, {"records": 2}),
        ("records of the round", "T7 not known", {"records": None}),
        ("local epochs of the round", "T7", {"epochs": 6}, {"epochs": 5}),
        ("local epochs of the round", "T7 not known", {"epochs": None}),
        ("steps of the round", "T7", {"steps": 5}, {"steps": 4}),
        ("steps of the round", "T7 not known", {"steps": None}),
        ("factor sets per round", "second", {"messages_in_round": 1}),
    ),
    *of(
        ADAPTER,
        ("base adapter", "whole factors name none", {"base_digest": OTHER}),
        ("L2 of the adapter", "T20", ADAPTER.carrying(one(A, up(5.5))), ADAPTER.carrying(one(A, 5.5))),
        ("L2 of the step", "T20", ADAPTER.but(**LAST), NEAR),
        ("L2 of the step", "T20 nobody knows the last one", NEAR.but(last_adapter=None), NEAR),
        ("L2 of the step", "T20 nobody knows how long ago", NEAR.but(last_adapter_rounds=0), NEAR),
    ),
    *of(
        SHIFTED,
        ("L2 of the base's shift", "T20", shifted_by(SHIFT_MOST * OVER), shifted_by(SHIFT_MOST)),
        ("L2 of the base's shift", "T20 hidden by cancellation", after(hidden_shift()), shifted_by(SHIFT_MOST)),
        ("L2 of the shift's step", "T20", shifted_by(SHIFT_STEP * OVER, 0.0), shifted_by(SHIFT_STEP, 0.0)),
        ("L2 of the shift's step", "T20 hidden by cancellation", after(hidden_shift()), shifted_by(SHIFT_STEP, 0.0)),
    ),
]

# ---- answers, donors, metrics ------------------------------------------------------------------------

RESPONSES, DONORS, METRICS = good("public.responses"), good("public.donors"), good("metrics.eval")
TEXT = 16 * 3  # bytes of the three answers
SCREENED = good("public.responses", "pubswap-strict")
CLEAN = screened(SCREENED.message, SCREENED.policy, CORPUS, CANARIES)
assert CLEAN is not None
PLAN_OF_ROUND = RESPONSES.context.plan
assert PLAN_OF_ROUND is not None
TEXTS = [
    *of(
        RESPONSES,
        ("round", "step over", {"open_step": 4}),
        (
            "kind of the method",
            "answers in a run without public steps",
            {"plan": PLAN_OF_ROUND.model_copy(update={"method": "fedavg-grpo"})},
        ),
        ("public set", "T12 own copy differs", RESPONSES.knowing(public_set_sha256=OTHER)),
        ("public set", "T12 names another", {"public_set_sha256": OTHER}),
        ("public prompts of the open step", "T12 not asked", {"public_prompt_indices": (0, 1)}),
        ("public prompts of the open step", "T12 beyond the set", {"public_set_rows": 2}, {"public_set_rows": 3}),
        ("public prompts of the open step", "twice", prompts((0, ("1",)), (0, ("2",)))),
        ("prompts in the step's order", "T9 another order", {"public_prompt_indices": (1, 0, 2)}),
        ("answers graded again", "one wrong", {"verdicts": (True, False, True)}),
        ("answers graded again", "not graded", {"verdicts": None}),
        ("answers graded again", "too few verdicts", {"verdicts": (True, True)}),
        (
            "finish reasons",
            "unset",
            prompts((0, ("1",)), finish=pb.FINISH_UNSPECIFIED),
            prompts((0, ("1",)), finish=pb.FINISH_LENGTH),
        ),
        ("one message per step", "second", {"messages_in_step": 1}),
        (
            "as the plan asks",
            "more answers than samples",
            prompts((0, ("1", "2")), samples=1),
            prompts((0, ("1", "2")), samples=2),
        ),
        ("as the plan asks", "more samples than the plan", prompts((0, ("1",)), samples=5)),
        ("as the plan asks", "longer than the plan", {"token_counts": (33, 1, 1)}, {"token_counts": (32, 1, 1)}),
        ("tokens of one response", "too long", {"token_counts": (33, 1, 1)}),
        (
            "tokens of one response",
            "uncounted bytes bound tokens",
            prompts((0, ("1" * 33,))) | {"token_counts": None},
            prompts((0, ("1" * 32,))) | {"token_counts": None},
        ),
        ("samples per prompt", "too many", RESPONSES.limit("samples_per_prompt", 3)),
        ("prompts per step", "too many", RESPONSES.limit("max_prompts_per_step", 2)),
        (
            "responses per step",
            "too many",
            RESPONSES.limit("max_responses_per_step", 2),
            RESPONSES.limit("max_responses_per_step", 3),
        ),
        ("responses per round", "too many", {"responses": 22}, {"responses": 21}),
        (
            "tokens per step",
            "too many",
            RESPONSES.limit("max_tokens_per_step", 2),
            RESPONSES.limit("max_tokens_per_step", 3),
        ),
        ("tokens per round", "too many", {"tokens": 766}, {"tokens": 765}),
        (
            "bytes of one response",
            "too many",
            RESPONSES.limit("max_bytes_per_response", 15),
            RESPONSES.limit("max_bytes_per_response", 16),
        ),
        (
            "bytes per step",
            "too many",
            RESPONSES.limit("max_bytes_per_step", RESPONSES.message.payload_bytes - 1),
            RESPONSES.limit("max_bytes_per_step", RESPONSES.message.payload_bytes),
        ),
        ("bytes of responses per round", "too many", {"text_bytes": 7681 - TEXT}, {"text_bytes": 7680 - TEXT}),
        (
            "bytes of responses per day",
            "too many",
            {"units_in_day": 1_536_001 - TEXT},
            {"units_in_day": 1_536_000 - TEXT},
        ),
    ),
    *of(
        DONORS,
        ("prompts are rows of the public set", "T12 own copy differs", {"public_set_sha256": OTHER}),
        ("donors of the open step", "T12", donors((3, "hospital_b", "1")), donors((2, "hospital_b", "1"))),
        ("donors are peers", "T21", donors((1, "hospital_z", "1"))),
        (
            "donors are peers",
            "two own",
            donors((1, "hospital_a", None), (2, "hospital_b", None)),
            donors((1, "hospital_b", "1"), (2, "hospital_a", None)),
        ),
        ("donors graded here", "T21 wrong", {"verdicts": (False, True, True)}),
        ("donors graded here", "T21 not graded", {"verdicts": None}),
        ("donors per prompt", "T21", donors(*[(1, "hospital_b", "1")] * 5), donors(*[(1, "hospital_b", "1")] * 4)),
        (
            "donors of one peer",
            "T21",
            DONORS.under("    verify_locally:", "    max_share_per_peer: 0.2\n    verify_locally:"),
            DONORS.under("    verify_locally:", "    max_share_per_peer: 0.25\n    verify_locally:"),
        ),
        ("donors of one peer", "T21 no plan", {"plan": None}),
        ("bytes of one donor", "T21", donors((1, "hospital_b", "1" * 513)), donors((1, "hospital_b", "1" * 512))),
    ),
    *of(
        SCREENED,
        ("screens ran", "T15 none", {"screened": Screened({}, (), ())}, {"screened": CLEAN}),
        ("screens ran", "T15 set otherwise", {"screened": replace(CLEAN, ran={**CLEAN.ran, "charset": OTHER})}),
        ("screens ran", "T15 over a text less", {"screened": replace(CLEAN, hits=CLEAN.hits[1:])}),
        ("screen hits", "T15", {"screened": replace(CLEAN, hits=({"charset/control": 2}, *CLEAN.hits[1:]))}),
        ("screen hits per day", "T18", {"screen_hits_in_day": 6}, {"screen_hits_in_day": 5}),
        ("screen hits per day", "T18 halted", {"screen_halted": True}),
    ),
    *of(
        METRICS,
        ("round", "result of a future round", {"round": 2}),
        ("metric split", "private", {"split": "private"}),
        ("metrics of the round's adapter", "T9", {"evaluated_digest": OTHER}),
        ("metric names and topics", "T9 name", metrics(("reward", "", 0.5)), metrics(("pass_at_1", "", 0.5))),
        (
            "metric names and topics",
            "T9 topic",
            metrics(("pass_at_1", "Mr Smith", 0.5)),
            metrics(("pass_at_1", "rotate", 0.5)),
        ),
        ("metric names and topics", "T9 twice", metrics(("pass_at_1", "", 0.5), ("pass_at_1", "", 0.25))),
        (
            "metrics in order",
            "T9",
            metrics(("pass_at_1", "rotate", 0.5), ("pass_at_1", "", 0.5)),
            metrics(("pass_at_1", "", 0.5), ("pass_at_1", "rotate", 0.5)),
        ),
        ("metric range", "T9", metrics(("pass_at_1", "", 1.0001)), metrics(("pass_at_1", "", 1.0))),
        ("metric grid", "T9", metrics(("pass_at_1", "", 0.12345)), metrics(("pass_at_1", "", 0.1234))),
        ("metric grid", "T9 one ulp", metrics(("pass_at_1", "", math.nextafter(0.5, 1)))),
        ("metric grid", "T9 -0", metrics(("pass_at_1", "", -0.0)), metrics(("pass_at_1", "", 0.0))),
        ("metric messages per round", "third", {"messages_in_round": 2}, {"messages_in_round": 1}),
    ),
]

# ---- plans, rounds, control --------------------------------------------------------------------------

PLANNED, OPENED = good("run.plan"), good("round.open")
assert isinstance(PLANNED.message.body, pb.RunPlan)
PLAN = plan_from_canonical(PLANNED.message.body.canonical_json)
ROLORA, FROZEN = good("run.plan", "rolora"), good("run.plan", "ffa-lora")
STEPS = {2: (0, 1, 2), 4: (0, 1, 2)}
AGAIN = OPENED.knowing(open_round=1, open_steps=STEPS)  # the open round, said once more


def plan(**changes: Any) -> dict[str, Any]:
    return {"canonical_json": PLAN.model_copy(update=changes).canonical()}


def self_swap(samples: int = PLAN.samples_per_prompt, **options: int) -> dict[str, Any]:
    return plan(method="self-swap", samples_per_prompt=samples, options=options)


def lora(**changes: Any) -> dict[str, Any]:
    return plan(lora=PLAN.lora.model_copy(update=changes))


def other_freeze() -> Case:
    """The plan of FFA-LoRA that says RoLoRA: what the first round freezes is the same."""
    assert isinstance(FROZEN.message.body, pb.RunPlan)
    made = plan_from_canonical(FROZEN.message.body.canonical_json)
    lora = made.lora.model_copy(update={"freeze": "alternate"})
    return FROZEN.but(canonical_json=made.model_copy(update={"lora": lora}).canonical())


def rollout(**changes: Any) -> dict[str, Any]:
    return plan(rollout=Rollout(**{**PLAN.rollout.model_dump(), **changes}))


def started(allowed: str = "") -> Case:
    """A plan that starts from an adapter, under a policy that allows these."""
    line = f"start_adapter: {allowed}\n    " if allowed else ""
    return PLANNED.under("learning_rate: [", f"{line}learning_rate: [").but(**plan(start_adapter_sha256=OTHER))


def optimised(allowed: str = "", **fields: Any) -> Case:
    """A plan with a server optimiser, under a policy that allows these."""
    line = f"server_optimiser: {allowed}\n    " if allowed else ""
    optimiser = ServerOptimiser(**{"name": "momentum", "learning_rate": 0.1, **fields})
    return PLANNED.under("learning_rate: [", f"{line}learning_rate: [").but(**plan(server_optimiser=optimiser))


def shifting(ruleset: str, aggregate: str, most: float | None = None) -> Case:
    """A plan that shifts the base, under a ruleset, of updates up to 0.019 long and shifts up to `most` a round."""
    case = good("run.plan", ruleset)
    assert isinstance(case.message.body, pb.RunPlan)
    made = plan_from_canonical(case.message.body.canonical_json).model_copy(update={"aggregate": aggregate})
    limited = case if most is None else case.limit("max_step_l2", 0.019).limit("max_shift_step_l2", most)
    return limited.but(canonical_json=made.canonical())


def steps(*rows: tuple[int, tuple[int, ...]]) -> dict[str, Any]:
    return {"public_steps": [pb.PublicStep(step=step, prompt_indices=indices) for step, indices in rows]}


def signed(*silos: str) -> dict[str, Any]:
    return {"countersignatures": [pb.Countersignature(silo=silo, signature=bytes(64)) for silo in silos]}


def judged(*silos: str) -> dict[str, Any]:
    return {"verdicts": [pb.SiloVerdict(silo=silo, verdict="absent") for silo in silos]}


def said(size: int, *, waits: bool = True) -> dict[str, Any]:
    """So many bytes of a signature, where a round waits for one or does not."""
    return {"countersignature": bytes(size), "countersigns": waits}


RUNS = [
    *of(
        PLANNED,
        ("measured", "plan that does not parse", {"canonical_json": ""}),
        ("plan rounds", "T19", plan(rounds=201)),
        ("plan local steps", "T19", plan(local_steps=5)),
        ("plan prompts per step", "T19", plan(prompts_per_step=4)),
        ("plan samples per prompt", "T13", plan(samples_per_prompt=5)),
        ("plan samples per prompt", "T13 further ones", self_swap(further=1), self_swap(2, further=1)),
        ("plan samples per prompt", "T13 further ones by default", self_swap(5), self_swap()),
        (
            "plan samples per prompt",
            "T13 too few beside further ones",
            PLANNED.under("samples_per_prompt: [1,", "samples_per_prompt: [2,").but(**self_swap(1, further=1)),
            PLANNED.under("samples_per_prompt: [1,", "samples_per_prompt: [2,").but(**self_swap(2, further=1)),
        ),
        ("plan method", "more further answers than there may be", self_swap(1, further=65), self_swap(1, further=3)),
        ("plan method", "an option of another", plan(options={"further": 1}), plan(options={})),
        ("plan max new tokens", "T13", rollout(max_new_tokens=33)),
        ("plan temperature", "T13", rollout(temperature=2.1), rollout(temperature=2.0)),
        ("plan learning rate", "T19", plan(optimiser=Optimiser(learning_rate=0.0011))),
        ("plan stands", "T13", {"plan": PLAN, **rollout(temperature=0.9)}, {"plan": PLAN}),
        ("plan frozen factors", "T6 not drawn", {"schema": None}),
        ("plan start adapter", "T20 none is allowed", started(), PLANNED),
        (
            "plan start adapter",
            "T20 another",
            started(f"['{HASH['held']}']"),
            started(f"['{HASH['held']}', '{OTHER}']"),
        ),
        ("plan start adapter", "T20 any", started("[]"), started("[any]")),
        ("plan aggregate", "T20 no shift", plan(aggregate="fedex"), PLANNED),
        ("plan aggregate", "T20 no shift", plan(aggregate="flora"), plan(aggregate="median", quorum=3)),
        ("plan aggregate", "T20 of another", shifting("fedex", "flora"), shifting("flora", "flora")),
        # scale 2, rank 2: 2 x 0.019^2 / 2 = 0.000361, and 2 x 0.019 (2 x 0.816497 + 0.019) = 0.062776
        ("plan aggregate", "T20 fedex", shifting("fedex", "fedex", 0.00036), shifting("fedex", "fedex", 0.000362)),
        ("plan aggregate", "T20 flora", shifting("flora", "flora", 0.0627), shifting("flora", "flora", 0.0628)),
        ("plan server optimiser", "T20 none is allowed", optimised(), PLANNED),
        ("plan server optimiser", "T20 another", optimised("[nesterov, adam]"), optimised("[momentum]")),
        ("plan gives enough records", "T7", PLANNED.limit("min_records", 7), PLANNED.limit("min_records", 6)),
        (
            "plan gives enough records",
            "T7 a silo of fewer steps",
            PLANNED.limit("min_records", 4).but(**plan(silo_steps={"hospital_b": 1})),
            PLANNED.limit("min_records", 3).but(**plan(silo_steps={"hospital_b": 1})),
        ),
        ("plan gives enough records", "T7 steps", PLANNED.limit("max_steps", 3)),
        ("plan of no round", "T36", {"round": 2}),
        ("plan method", "no such method", plan(method="gossip")),
        ("plan federation", "another", plan(federation="other-net")),
        ("plan federation", "envelope of another run", {"run": "run-2"}),
        ("plan model", "T13 template", plan(template_sha256=HASH["base"])),
        ("plan model", "tokenizer", plan(tokenizer_sha256=HASH["base"])),
        ("plan schema", "another", lora(schema_sha256=HASH["base"])),
        ("plan schema", "dtype", plan(wire_dtype="bfloat16")),
        ("plan schema", "T6 another freeze", other_freeze(), FROZEN),
        ("plan gives enough records", "T7 the other factor", ROLORA.limit("min_records", 1000), ROLORA),
        ("plan sets", "T12 public", plan(public_set_sha256=HASH["base"])),
        ("plan sets", "T12 rows", plan(public_set_rows=11)),
        ("plan sets", "held out", plan(held_out_sha256=HASH["base"])),
        (
            "plan peers",
            "T48 stranger",
            plan(silos=("hospital_a", "hospital_z")),
            plan(silos=("hospital_a", "hospital_d")),
        ),
        ("plan peers", "T48 too few", plan(silos=("hospital_a",), quorum=1)),
        ("plan asks for enough updates", "T58 one", plan(quorum=1), plan(quorum=2)),
        ("plan fits the round's limits", "every step public", plan(swap_period=1)),
        (
            "plan's longest step",
            "T20 a step longer than an adapter",
            optimised("[momentum]", learning_rate=1e3),
            optimised("[momentum]"),
        ),
    ),
    *of(
        OPENED,
        ("witnesses", "nobody", {"round": 2, "witnesses": 0}, {"round": 2, "witnesses": 1}),
        ("witnesses", "unknown", {"round": 2, "witnesses": None}),
        ("round is of the plan", "beyond it", {"round": PLAN.rounds + 1}, {"round": PLAN.rounds}),
        ("round is of the plan", "no base", {"base_digest": ""}),
        (
            "first round starts from the plan's adapter",
            "T20 another",
            OPENED.knowing(plan=PLAN.model_copy(update={"start_adapter_sha256": OTHER})),
            OPENED.but(base_digest=OTHER).knowing(plan=PLAN.model_copy(update={"start_adapter_sha256": OTHER})),
        ),
        ("rounds go forward", "the open one, changed", AGAIN.but(**steps((2, (1,)))), AGAIN),
        ("public steps of the plan", "private step", steps((3, (1,))), steps((2, (1,)))),
        ("public steps of the plan", "twice", steps((2, (1,)), (2, (3,)))),
        ("prompts are rows of the public set", "T12", steps((2, (10,))), steps((2, (9,)))),
        ("prompts are rows of the public set", "T12 twice", steps((2, (1, 1)))),
        ("prompts per public step", "T19", steps((2, (1, 2, 3, 4))), steps((2, (1, 2, 3)))),
    ),
    *of(
        good("round.agreed"),
        ("silos of the plan, each once", "T20 two of one", signed(*PLAN.silos, PLAN.silos[1]), signed(*PLAN.silos)),
        (
            "silos of the plan, each once",
            "T20 a peer that the plan does not name",
            {"plan": PLAN.model_copy(update={"silos": PLAN.silos[1:]})},
        ),
        ("silos of the plan, each once", "T20 no plan", {"plan": None}),
        ("donors are peers", "T20 a stranger", signed("hospital_z")),
    ),
    *of(
        good("round.result"),
        (
            "silos of the plan, each once",
            "T24 a survivor 5000 times",
            {"participants": ["hospital_b"] * 5000},
            {"participants": PLAN.silos},
        ),
        ("silos of the plan, each once", "T20 two verdicts", judged("hospital_b", "hospital_b"), judged(*PLAN.silos)),
        ("a round ends in one way", "T20 both", {"closed": True}, {"committed": False, "closed": True}),
    ),
    *of(
        good("control.poll"),
        ("kind", "control kind not named", good("control.poll").under("hello, poll, fetch", "hello, fetch")),
        ("kind", "no such kind", {"kind": "logs.upload"}),
        ("kind", "kind not named", replace(good("control.poll"), text=ruleset_text("deny_all"))),
        ("measured", "body of another kind", {"body": pb.Heartbeat()}),
        ("valid", "too early", {"now_seconds": 1_700_000_000.0}),
        ("valid", "expired", {"now_seconds": 1_900_000_000.0}),
        ("messages per minute", "T11 polls", {"messages_in_minute": 1200}, {"messages_in_minute": 1199}),
        ("countersignature", "T20 no round waits for it", said(64, waits=False), said(64)),
        ("countersignature", "T09 longer than a signature", said(65)),
        ("countersignature", "T09 a few bytes", said(3)),
    ),
    *of(
        good("run.end"),
        (
            "kind",
            "T28 a silo sends what only the coordinator may",
            {"direction": "egress", "sender": SILO, "expected_sender": SILO},
        ),
    ),
    *of(good("control.heartbeat"), ("place of a control message", "T9", {"round": 1})),
    *of(good("control.error"), ("fields", "T8 free text in a code", {"code": "x"})),
    *of(
        good("control.checkpoint"),
        ("checkpoints of others", "shown by a silo", {"peers": [pb.PeerLog()]}),
        ("checkpoints of others", "more than there are", {"countersigned": [""] * 4}, {"countersigned": [""] * 3}),
    ),
]

# ---- competence and rewards --------------------------------------------------------------------------

SCORE, ANSWERS, REWARDS = good("competence.score"), good("competence.answers"), good("reward.scalar")
ASK, REWARD_ASK = good("competence.ask"), good("reward.ask")
FINE = REWARDS.limit("quantum", 0.25)
FEW, ASKS_FEW = (
    replace(made, text=made.text.replace("exemplars: [5, 100]", "exemplars: [5, 6]")) for made in (SCORE, ASK)
)
ONE_QUESTION = REWARDS.limit("max_questions_per_step", 1)
THREE_CANDIDATES = REWARDS.limit("max_candidates_per_question", 3)
Y = "y" * 512


def asked(**changes: Any) -> dict[str, Any]:
    return {"asked": replace(ASKED, **changes)}


def each_scored(count: int) -> dict[str, Any]:
    every = dict.fromkeys(range(count), (0, 1, 2, 3, 4))
    return {**scores(*((question, 0) for question in every)), **asked(exemplars=every)}


QUESTIONS = [
    *of(
        SCORE,
        ("run", "of another run", {"run": "run-2"}),
        ("pinned set", "another", {"exemplar_set_sha256": OTHER}),
        ("pinned set", "own copy", {"public_set_sha256": OTHER}),
        ("one message of the kind per step", "a second", {"messages_in_step": 1}),
        ("messages of the kind per round", "one more", {"messages_in_round": 4}, {"messages_in_round": 3}),
        ("round", "another", {"round": 2}),
        ("round", "a step that nobody asked", {"step": 3}),
        ("only what was asked", "another question", scores((5, 1)), scores((4, 1))),
        ("only what was asked", "twice", scores((4, 1), (4, 1))),
        ("only what was asked", "nothing asked", {"asked": Requests(step=1)}),
        ("in the order asked", "the other way round", scores((7, 1), (4, 1)), scores((4, 1), (7, 1))),
        (
            "exemplars behind a score",
            "too few",
            {**scores((4, 1)), **asked(exemplars={4: (0, 1, 2, 3)})},
            {**scores((4, 1)), **asked(exemplars={4: (0, 1, 2, 3, 4)})},
        ),
        (
            "exemplars behind a score",
            "too many",
            FEW.but(**scores((7, 1)), **asked(exemplars={7: tuple(range(7))})),
            FEW.but(**scores((7, 1)), **asked(exemplars={7: tuple(range(6))})),
        ),
        ("matches within the exemplars", "one more", scores((4, 6)), scores((4, 5))),
        ("scores or answers per step", "one more", each_scored(4), each_scored(3)),
        ("scores or answers per day", "one more", {"units_in_day": 2399}, {"units_in_day": 2398}),
    ),
    *of(
        ANSWERS,
        ("pinned set", "another", {"exemplar_set_sha256": OTHER}),
        ("one message of the kind per step", "a second", {"messages_in_step": 1}),
        ("messages of the kind per round", "one more", {"messages_in_round": 2}, {"messages_in_round": 1}),
        ("round", "before any question", {"step": 0, **asked(step=0)}),
        ("only what was asked", "another exemplar", answers((6, "")), answers((5, ""))),
        ("in the order asked", "the other way round", answers((9, ""), (5, "")), answers((5, ""), (9, ""))),
        (
            "scores or answers per step",
            "one more",
            answers(*((n, "") for n in (0, 1, 2, 3, 5, 9, 8))),
            answers(*((n, "") for n in (0, 1, 2, 3, 5, 9))),
        ),
        ("scores or answers per day", "one more", {"units_in_day": 99}, {"units_in_day": 98}),
        ("bytes of one answer", "one more", answers((0, "x" * 65)), answers((0, "x" * 64))),
        ("bytes of one answer", "bytes, not characters", answers((0, "\u00e4" * 33)), answers((0, "\u00e4" * 32))),
        ("bytes of answers per step", "one more", {"payload_bytes": 257}, {"payload_bytes": 256}),
        (
            "finish reasons of answers",
            "unset",
            answers((0, "1"), finish=pb.FINISH_UNSPECIFIED),
            answers((0, "1"), finish=pb.FINISH_LENGTH),
        ),
    ),
    *of(
        REWARDS,
        ("one message of the kind per step", "a second", {"messages_in_step": 1}),
        ("messages of the kind per round", "one more", {"messages_in_round": 4}, {"messages_in_round": 3}),
        ("round", "a step that nobody asked", {"step": 2}),
        ("only what was asked", "another question", rewards((5, (0, 0, 0))), rewards((4, (0, 0, 0)))),
        ("in the order asked", "the other way round", rewards((7, None), (4, None)), rewards((4, None), (7, None))),
        ("scores or answers per day", "one more", {"units_in_day": 9598}, {"units_in_day": 9597}),
        ("a reward for each candidate", "one less", rewards((4, (0, 0)))),
        ("a reward for each candidate", "one more", rewards((4, (0, 0, 0, 0)))),
        (
            "a reward for each candidate",
            "abstains and scores",
            {"questions": [pb.QuestionRewards(question=4, rewards=[0, 0, 0], abstained=True)]},
            rewards((4, None)),
        ),
        (
            "abstaining",
            "where it may not",
            REWARDS.limit("abstain", "denied"),
            REWARDS.limit("abstain", "denied").but(**rewards((4, (0, 0, 0)))),
        ),
        ("reward range", "not a number", rewards((4, (math.nan, 0, 1)))),
        ("reward range", "above", FINE.but(**rewards((4, (0, 0.25, 1.25)))), FINE.but(**rewards((4, (0, 0.25, 1))))),
        ("reward range", "below", FINE.but(**rewards((4, (0, -0.25, 1))))),
        ("reward grid", "between", FINE.but(**rewards((4, (0, 0.26, 1))))),
        ("reward grid", "one ulp beside", FINE.but(**rewards((4, (0, math.nextafter(0.25, 1), 1))))),
        ("reward grid", "negative zero", rewards((4, (-0.0, 0, 1))), rewards((4, (0.0, 0, 1)))),
        ("reward grid", "not a number", rewards((4, (math.nan, 0, 1)))),
        ("questions per step", "one more", ONE_QUESTION, ONE_QUESTION.but(**rewards((4, None)))),
        (
            "candidates per question",
            "one more",
            THREE_CANDIDATES.but(**rewards((7, (0, 0, 0, 0)))),
            THREE_CANDIDATES.but(**rewards((4, (0, 0, 0)))),
        ),
    ),
    *of(
        ASK,
        ("pinned set", "another", {"exemplar_set_sha256": OTHER}),
        ("round", "another", {"round": 2}),
        ("exemplars behind a score", "too few", exemplars((1, (0, 1, 2, 3))), exemplars((1, (0, 1, 2, 3, 4)))),
        (
            "exemplars behind a score",
            "too many",
            ASKS_FEW.but(**exemplars((1, tuple(range(7))))),
            ASKS_FEW.but(**exemplars((1, tuple(range(6))))),
        ),
        ("questions are rows of the set", "no row", exemplars((1, (6, 7, 8, 9, 10))), exemplars((1, (5, 6, 7, 8, 9)))),
        ("questions are rows of the set", "a row twice", exemplars((1, (5, 6, 7, 8, 9, 9)))),
        (
            "questions asked",
            "one more",
            exemplars(*((n, tuple(range(5))) for n in range(4))),
            exemplars(*((n, tuple(range(5))) for n in range(3))),
        ),
    ),
    *of(
        REWARD_ASK,
        ("pinned set", "another", {"question_set_sha256": OTHER}),
        ("pinned set", "own copy", {"public_set_sha256": OTHER}),
        ("round", "behind the last step of the plan", {"step": 5}, {"step": 4}),
        ("round", "of no step", {"step": 0}),
        (
            "finish reasons of answers",
            "unset",
            candidates((4, ("1",)), finish=pb.FINISH_UNSPECIFIED),
            candidates((4, ("1",)), finish=pb.FINISH_LENGTH),
        ),
        ("candidates per question", "one more", candidates((1, tuple("abcde"))), candidates((1, tuple("abcd")))),
        ("questions are rows of the set", "no row", candidates((10, ("a",))), candidates((9, ("a",)))),
        ("questions are rows of the set", "a row twice", candidates((9, ("a",)), (9, ("b",)))),
        ("candidates differ", "twice", candidates((1, ("a", "a"))), candidates((1, ("a", "b")))),
        (
            "questions asked",
            "one more",
            candidates(*((n, ()) for n in range(4))),
            candidates(*((n, ()) for n in range(3))),
        ),
        ("bytes of one candidate", "one more", candidates((1, (Y + "y",))), candidates((1, (Y,)))),
    ),
]

# ---- profiles, matches, packages ---------------------------------------------------------------------

PROFILE, WORTH, DIRECTIVE = good("profile.vector", "knexa"), good("bandit.reward"), good("match.directive")
PACKAGE, CENTRAL = good("knowledge.package", "knexa"), good("knowledge.package", "fedid-central")
PACKAGE_IN, CENTRAL_IN = (good("knowledge.package", name, "ingress") for name in ("knexa", "fedid-central"))


def dynamic(value: float, count: int = 12) -> dict[str, Any]:
    return {"dynamic": (value,) * count}


def histogram(*bins: int, count: int = 12) -> dict[str, Any]:
    return {"histogram": (*bins, *(0,) * (count - len(bins)))}


def among(*silos: str) -> dict[str, Any]:
    found = DIRECTIVE.context.plan
    assert found is not None
    return {"plan": found.model_copy(update={"silos": silos})}


def of_a_package(made: Case) -> list[tuple[Any, ...]]:
    """What holds of a package in both directions."""
    fewer = replace(made, text=made.text.replace("max_entries: 10", "max_entries: 2"))
    size = made.message.payload_bytes
    tight = replace(made, text=made.text.replace("max_bytes: 3200", f"max_bytes: {size}"))
    return [
        ("pinned set", "another", {"transfer_set_sha256": OTHER}),
        ("package of the open match", "another match", {"match": 2}),
        ("package to or from the matched peer", "another peer", {"peer": "hospital_c"}),
        ("package prompts", "no row", entries((10, "")), entries((9, ""))),
        ("entries of a package", "one more", fewer.but(**entries((0, ""), (1, ""), (2, ""))), fewer),
        ("bytes of a package", "one more", tight.but(**entries((0, "def f(): pass!"), (9, ""))), tight),
        ("bytes of one answer", "one more", entries((0, Y + "y")), entries((0, Y))),
    ]


MATCHES = [
    *of(
        PROFILE,
        ("messages of the kind per round", "one more", {"messages_in_round": 1}),
        ("round", "another", {"round": 2}),
        ("round", "a step", {"step": 1}),
        ("profile shape", "a figure more", dynamic(0.25, 13), dynamic(0.25, 12)),
        ("profile shape", "a figure less", dynamic(0.25, 11)),
        ("profile shape", "a bin more", histogram(100, count=13), histogram(100, count=12)),
        ("profile shape", "a bin less", histogram(100, count=11)),
        ("profile shape", "family", {"family": 8}, {"family": 7}),
        ("profile range", "above", dynamic(1.01), dynamic(1.0)),
        ("profile range", "below", dynamic(-1.01), dynamic(-1.0)),
        ("profile range", "infinite", dynamic(math.inf)),
        ("profile grid", "between", dynamic(0.333), dynamic(0.33)),
        ("profile grid", "negative zero", dynamic(-0.0), dynamic(0.0)),
        ("histogram adds up", "one part more", histogram(100, 1), histogram(99, 1)),
        ("histogram adds up", "counts of records", histogram(12, 30)),
        ("records behind the profile", "one less", {"usable_records": 9}, {"usable_records": 10}),
        ("records behind the profile", "not known", {"usable_records": None}),
    ),
    *of(good("profile.vector", "knexa-heuristic"), ("profile shape", "no family told", {"family": 1})),
    *of(
        DIRECTIVE,
        ("round", "another", {"round": 2}),
        ("match goes forward", "without a part", {"part": ""}),
        ("match goes forward", "an earlier one", {"match": 2}),
        ("match goes forward", "the same with another peer", {"match": 3}, {"match": 3, "peer": "hospital_b"}),
        ("match goes forward", "none", {"match": 0, "asked": Requests()}, {"match": 1, "asked": Requests()}),
        ("match is with a peer", "not of the plan", among("hospital_a", "hospital_b")),
        ("match is with a peer", "not of the policy", {"peer": "hospital_z", **among("hospital_a", "hospital_z")}),
    ),
    *of(
        WORTH,
        ("round", "a step", {"step": 1}),
        ("round", "not yet", {"round": 2}, {"open_round": 2}),
        ("round", "no round", {"round": 0}),
        ("reward of the open match", "another match", {"match": 2}),
        ("reward of the open match", "the giver's", {"asked": ASKED}),
        ("reward of the open match", "no match", {"match": 0, "asked": Requests()}),
        ("worth of a match", "above", {"value": 10.001}, {"value": 10.0}),
        ("worth of a match", "below", {"value": -10.001}, {"value": -10.0}),
        ("worth of a match", "infinite", {"value": math.inf}),
        ("worth on the grid", "between", {"value": 0.0011}, {"value": 0.001}),
        ("worth on the grid", "negative zero", {"value": -0.0}, {"value": 0.0}),
        ("rewards per match", "a second", {"messages_in_match": 1}),
    ),
    *of(
        PACKAGE,
        *of_a_package(PACKAGE),
        ("pinned set", "own copy", {"public_set_sha256": OTHER}),
        ("messages of the kind per round", "one more", {"messages_in_round": 1}),
        ("round", "another", {"round": 2}),
        ("round", "a step", {"step": 2}),
        (
            "finish reasons of answers",
            "unset",
            entries((0, ""), finish=pb.FINISH_UNSPECIFIED),
            entries((0, ""), finish=pb.FINISH_LENGTH),
        ),
        ("package of the open match", "the taker's", {"asked": TAKES}),
        ("package of the open match", "no match", {"match": 0, "asked": Requests(peer="hospital_b", part="give")}),
        ("package to or from the matched peer", "nobody", {"peer": ""}),
        ("package prompts", "a row twice", entries((9, ""), (9, ""))),
        ("package in order", "the other way round", entries((9, ""), (0, ""))),
        ("package confidence", "where none may be told", entries((0, ""), confidence=0.0), entries((0, ""))),
    ),
    *of(
        CENTRAL,
        ("package of the open match", "a match of the coordinator's", {"match": 3}),
        ("package to or from the matched peer", "a peer", {"peer": "hospital_b"}),
        ("package confidence", "above", entries((0, ""), confidence=1.01), entries((0, ""), confidence=1.0)),
        ("package confidence", "between", entries((0, ""), confidence=0.333), entries((0, ""), confidence=0.33)),
        ("package confidence", "negative zero", entries((0, ""), confidence=-0.0), entries((0, ""), confidence=0.0)),
    ),
    *of(PACKAGE_IN, *of_a_package(PACKAGE_IN), ("package of the open match", "the giver's", {"asked": ASKED})),
    *of(CENTRAL_IN, ("package of the open match", "a match of the coordinator's", {"match": 3})),
]

# ---- interventions -----------------------------------------------------------------------------------

REFT, AGGREGATE = good("reft.intervention"), good("reft.aggregate")
R, W, BIAS = (f"layers.0.prefix.{part}" for part in "RWb")
LIMITS = REFT.policy.file.egress.reft_intervention
assert LIMITS is not None
LARGEST = float(np.float32(LIMITS.max_tensor_l2))
FREE = {name: np.asarray(values) for name, values in (REFT.message.tensors or {}).items()}
ROUNDED = REFT.under('dtype: "float32"\n    max_l2', "dtype: bfloat16\n    max_l2").but(dtype="bfloat16")


def with_tensors(made: Case = REFT, **changes: Any) -> Case:
    """With other tensors of layer 0's prefix, by their part; None leaves it out."""
    named = {f"layers.0.prefix.{part}": values for part, values in changes.items()}
    return made.carrying({name: values for name, values in {**FREE, **named}.items() if values is not None})


def put(name: str, value: float) -> dict[str, Array]:
    values = FREE[name].copy()
    values.flat[0] = value
    return {**FREE, name: values}


def every_w(value: float) -> dict[str, Array]:
    made = {name: values.copy() for name, values in FREE.items()}
    for name in made:
        if name.endswith(".W"):
            made[name][0, 0] = value
    return made


def tilted(angle: float) -> Case:
    """R whose first two rows are `angle` from orthogonal: the largest entry of |R R^T - I| is sin(angle)."""
    r = np.eye(8, 16, dtype=np.float32)
    r[1, :2] = math.sin(angle), math.cos(angle)
    return with_tensors(R=r)


def of_interventions(made: Case) -> list[tuple[Any, ...]]:
    """What holds of them in both directions."""
    return [
        ("round", "another", {"round": 2}),
        ("interventions", "a part missing", with_tensors(made, b=None)),
        ("finite interventions", "infinite", made.carrying(put(BIAS, math.inf))),
        (
            "L2 of the interventions",
            "twice",
            made.carrying(every_w(LIMITS.max_l2 / 1.999)),
            made.carrying(every_w(LIMITS.max_l2 / 2.001)),
        ),
    ]


PARTS = [(layer, group, part) for layer in (0, 1) for group in ("prefix", "suffix") for part in "RWb"]
INTERVENTIONS = [
    *of(
        REFT,
        *of_interventions(REFT),
        ("messages of the kind per round", "one more", {"messages_in_round": 1}),
        *(
            ("interventions", what, REFT.carrying(tensors))
            for what, tensors in {
                "a layer more": {**FREE, **{f"layers.2.{g}.{p}": FREE[f"layers.1.{g}.{p}"] for _, g, p in PARTS}},
                "a layer less": {name: values for name, values in FREE.items() if "layers.1" not in name},
                "another group": {**FREE, **{f"layers.0.tied.{p}": FREE[f"layers.0.prefix.{p}"] for p in "RWb"}},
                "a name of no form": {**FREE, "mr-smith": FREE[BIAS]},
                "leading zero": {"layers.00.prefix.b" if name == BIAS else name: each for name, each in FREE.items()},
            }.items()
        ),
        ("interventions", "values not given", {"tensors": None}),
        ("intervention shapes", "rank", REFT.carrying({name: values[:7] for name, values in FREE.items()})),
        (
            "intervention shapes",
            "width",
            REFT.carrying({name: values[..., :15] if values.ndim == 2 else values for name, values in FREE.items()}),
        ),
        ("intervention shapes", "one W transposed", with_tensors(W=FREE[W].T.copy())),
        ("intervention shapes", "b is a matrix", with_tensors(b=np.zeros((8, 1)))),
        ("intervention shapes", "values of another shape", {"tensors": {**FREE, W: np.zeros((16, 8), np.float32)}}),
        ("intervention header", "dtype", {"dtype": "bfloat16"}),
        ("intervention header", "rank", {"rank": 7}),
        ("intervention header", "scale", {"scale": 1.5}),
        ("intervention header", "base", {"base_digest": OTHER}),
        ("intervention header", "schema", {"schema_sha256": OTHER}),
        ("finite interventions", "not a number", REFT.carrying(put(W, math.nan))),
        ("finite interventions", "infinite R", REFT.carrying(put(R, math.inf))),
        ("canonical interventions", "negative zero", {"tensors": put(W, -0.0)}, {"tensors": put(W, 0.0)}),
        ("canonical interventions", "denormal", {"tensors": put(W, 1e-40)}),
        (
            "intervention grid",
            "off bfloat16",
            ROUNDED.but(tensors={**FREE, BIAS: np.full(8, 0.1, np.float32)}),
            ROUNDED.but(tensors={**FREE, BIAS: np.full(8, 0.25, np.float32)}),
        ),
        (
            "L2 of one intervention tensor",
            "one ulp",
            REFT.carrying(put(W, up(LARGEST))),
            REFT.carrying(put(W, LARGEST)),
        ),
        ("rows of R orthonormal", "tilted", tilted(1.1e-4), tilted(0.9e-4)),
        ("rows of R orthonormal", "a row of length 0", REFT.carrying(put(R, 0.0))),
        ("rows of R orthonormal", "a row twice", with_tensors(R=np.vstack([np.eye(7, 16), np.eye(1, 16)]))),
    ),
    *of(AGGREGATE, *of_interventions(AGGREGATE)),
]

BOUNDS = [*ADAPTERS, *TEXTS, *RUNS, *QUESTIONS, *MATCHES, *INTERVENTIONS]
