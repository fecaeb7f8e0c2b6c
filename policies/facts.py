"""`measure`: what a message is, in numbers, booleans, digests and names from closed lists.

Facts go into the audit log and are all that `decide` sees, so they never hold text, tensor values or a tensor name.
A name or kind that is not of its closed form becomes "" or "unknown" and is counted instead.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from google.protobuf.message import Message as ProtobufMessage

from fedsilo.treaty.errors import FedSiloError
from fedsilo.treaty.methods import METHODS
from fedsilo.treaty.plan import Plan, plan_from_canonical
from fedsilo.treaty.wire._generated import federation_pb2 as pb
from fedsilo.treaty.wire.codec import Array
from fedsilo.treaty.wire.services import TENSOR_KINDS
from policies.catalogue import KINDS, fields_at_fault, is_name
from policies.schema import LoraSchema

Facts = dict[str, Any]

FINAL = "final"  # the exact values that go out, or came in
OFFERED = "offered"  # before the transforms: limits that a transform establishes are not judged yet

# A failure of any of these while measuring or judging is a refusal (threat model B5). Anything else propagates, and
# then there is no decision either.
EVALUATION_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    FedSiloError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)

_TILE_ELEMENTS = 1 << 20
_METRICS_MAX = 256
_NAMES_MAX = 64
_SPIFFE = re.compile(r"spiffe://[a-z0-9_-]{1,63}/(silo|coordinator)/[a-z0-9_-]{1,63}")


@dataclass(frozen=True)
class Message:
    """One release or arrival.

    Attributes:
        direction: egress (this party is about to send it) or ingress (it has come in).
        kind, run, round, step, sender: as in the envelope.
        payload_bytes: whole payload, tensors included.
        body: parsed payload; for a tensor kind its `Factors` header.
        tensors: float32 arrays by wire name, for a tensor kind. Read one at a time, so it may load lazily.
    """

    direction: str
    kind: str
    run: str
    round: int
    step: int
    sender: str
    payload_bytes: int
    body: ProtobufMessage
    tensors: Mapping[str, Array] | None = None


@dataclass(frozen=True)
class Context:
    """What the measuring party knows. A default is the strictest: what is unknown here leads to a refusal.

    Attributes:
        plan: of the run that is open; None outside one.
        schema: the site's LoRA schema.
        base_digest: adapter that the open round starts from.
        base_l2: its L2 norm over all factors, as `measure` gave it for global.adapter; None if unknown.
        open_round, open_step: where the run stands; open_step is the public step whose exchange is open, else 0.
        open_steps: rows that each public step of the open round asks for, as its round.open said.
        refused_round: the last round whose round.open was not let in, which the party may say; 0 is none.
        evaluated_digest: for metrics.eval of a round: the adapter that this round came to; "" if it came to none.
        public_set_sha256, public_set_rows: of the party's own copy of the public set.
        public_prompt_indices: rows that the open public step asks for, in its order.
        verdicts: the party's own grading, one for each response in message order (for public.donors: one for each
            donor that carries a response); None if it has not graded them.
        token_counts: tokens of each response in the same order; None without a tokenizer (then bytes bound them).
        topics: topic labels of the held-out set.
        now_seconds: UTC; the caller passes max(last seen, clock).
        expected_sender: this party's own SPIFFE id on egress, the certificate's on ingress.
    """

    now_seconds: float
    expected_sender: str
    plan: Plan | None = None
    schema: LoraSchema | None = None
    base_digest: str = ""
    base_l2: float | None = None
    open_round: int = 0
    open_step: int = 0
    open_steps: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    refused_round: int = 0
    evaluated_digest: str = ""
    public_set_sha256: str = ""
    public_set_rows: int = 0
    public_prompt_indices: tuple[int, ...] = ()
    verdicts: tuple[bool, ...] | None = None
    token_counts: tuple[int, ...] | None = None
    topics: frozenset[str] = field(default_factory=frozenset)


def measure(message: Message, context: Context, *, stage: str = FINAL) -> Facts:
    """Facts of a message, JSON-able. Never raises for what a message holds: a failure becomes a fact that denies."""
    known = message.kind in KINDS
    plan = context.plan
    facts: Facts = {
        "direction": message.direction if message.direction in ("egress", "ingress") else "unknown",
        "stage": stage,
        "kind": message.kind if known else "unknown",
        "run": message.run if is_name(message.run) else "",
        "round": message.round,
        "step": message.step,
        "sender": message.sender if _SPIFFE.fullmatch(message.sender) else "",
        "sender_expected": bool(context.expected_sender) and message.sender == context.expected_sender,
        "now": float(context.now_seconds),
        "payload_bytes": message.payload_bytes,
        "run_is_open": plan is not None and message.run == plan.run,
        "open_round": context.open_round,
        "open_step": context.open_step,
        "measured": False,
    }
    if not known or type(message.body) is not KINDS[message.kind]:
        return facts
    try:
        facts["fields_at_fault"] = fields_at_fault(message.body)
        if message.kind in TENSOR_KINDS:
            facts.update(_tensor_facts(message, context))
        elif isinstance(message.body, pb.PublicResponses):
            facts.update(_response_facts(message.body, context))
        elif isinstance(message.body, pb.PublicDonors):
            facts.update(_donor_facts(message.body, context))
        elif isinstance(message.body, pb.MetricsEval):
            facts.update(_metric_facts(message.body, message.round, context))
        elif isinstance(message.body, pb.RunPlan):
            facts.update(_plan_facts(message.body, message.run))
        elif isinstance(message.body, pb.RoundOpen):
            facts.update(_round_facts(message.body, message.round, context))
        elif isinstance(message.body, pb.RoundResult):
            facts["names"], facts["names_at_fault"] = _names(message.body.participants)
        elif message.kind.startswith("control."):
            facts.update(_control_facts(message, context))
        facts["measured"] = True
    except EVALUATION_ERRORS as error:
        facts["measure_error"] = type(error).__name__
    return facts


def _names(values: Iterable[str]) -> tuple[list[str], int]:
    distinct = sorted(set(values))
    good = [value for value in distinct if is_name(value)][:_NAMES_MAX]
    return good, len(distinct) - len(good)


# ---- tensors ---------------------------------------------------------------------------------------


def _tensor_facts(message: Message, context: Context) -> Facts:
    header = message.body
    assert isinstance(header, pb.Factors)  # noqa: S101  # `measure` has compared the type
    schema = context.schema
    shapes = schema.shapes if schema else {}
    names = [entry.name for entry in header.tensors]
    given = message.tensors
    facts: Facts = {
        "schema_sha256": schema.digest if schema else "",
        "header_schema_sha256": header.schema_sha256,
        "dtype": header.dtype,
        "dtype_of_schema": schema is not None and header.dtype == schema.dtype,
        "rank": header.rank,
        "rank_of_schema": schema is not None and header.rank == schema.rank,
        "scale_of_schema": schema is not None and bool(np.float32(header.scale) == np.float32(schema.scale)),
        "base_digest_empty": header.base_digest == "",
        "base_digest_of_round": bool(context.base_digest) and header.base_digest == context.base_digest,
        "tensors": len(names),
        "tensors_missing": len(shapes.keys() - set(names)),
        "tensors_unexpected": len([name for name in names if name not in shapes]),
        "tensors_repeated": len(names) - len(set(names)),
        "tensors_given": given is not None and sorted(given) == names,
        "shapes_wrong": sum(shapes.get(entry.name) != tuple(entry.shape) for entry in header.tensors),
    }
    elements = not_finite = not_canonical = off_bfloat16 = 0
    squares = square_max = 0.0
    for entry in header.tensors if given is not None and facts["tensors_given"] else ():
        array = given[entry.name] if given is not None else np.zeros(0, np.float32)
        if array.dtype != np.float32 or tuple(array.shape) != tuple(entry.shape):
            facts["shapes_wrong"] += 1
            continue
        square = 0.0
        flat = np.ascontiguousarray(array).reshape(-1)
        for start in range(0, flat.size, _TILE_ELEMENTS):
            tile = flat[start : start + _TILE_ELEMENTS]
            bits = tile.view(np.uint32)
            exponent = bits & np.uint32(0x7F800000)
            not_finite += int(np.count_nonzero(exponent == np.uint32(0x7F800000)))
            not_canonical += int(np.count_nonzero((exponent == 0) & (bits != 0)))  # -0 and denormals (T4)
            off_bfloat16 += int(np.count_nonzero(bits & np.uint32(0xFFFF)))
            wide = tile.astype(np.float64)
            square += float(np.dot(wide, wide))
        elements += flat.size
        squares += square
        square_max = max(square_max, square)
    finite = not_finite == 0 and math.isfinite(squares)
    l2 = math.sqrt(squares) if finite else None
    # The factors themselves are base + delta, whose norm is at most the sum: an upper bound without the base's values.
    total = None if l2 is None or context.base_l2 is None else l2 + context.base_l2
    facts.update(
        elements=elements,
        values_not_finite=not_finite,
        values_not_canonical=not_canonical,
        values_off_bfloat16=off_bfloat16,
        l2=l2,
        tensor_l2_max=math.sqrt(square_max) if finite else None,
        total_l2_max=total,
    )
    return facts


# ---- text ------------------------------------------------------------------------------------------


def _text_facts(responses: list[pb.Response], context: Context) -> Facts:
    """Counts over responses in message order."""
    sizes = [len(response.text.encode()) for response in responses]
    counts, verdicts = context.token_counts, context.verdicts
    counted = counts is not None and len(counts) == len(responses)
    # A byte-level tokenizer makes at least one byte of each token, so bytes bound tokens where nobody has counted.
    tokens = list(counts) if counts is not None and counted else sizes
    graded = verdicts is not None and len(verdicts) == len(responses)
    correct = sum(bool(verdict) for verdict in verdicts) if verdicts is not None and graded else 0
    return {
        "responses": len(responses),
        "text_bytes": sum(sizes),
        "text_bytes_max": max(sizes, default=0),
        "tokens": int(sum(tokens)),
        "tokens_max": int(max(tokens, default=0)),
        "tokens_counted": counted,
        "graded": graded,
        "responses_correct": correct,
        "responses_wrong": len(responses) - correct,
        "finish_unspecified": sum(response.finish == pb.FINISH_UNSPECIFIED for response in responses),
    }


def _index_facts(indices: list[int], context: Context) -> Facts:
    return {
        "prompts": len(indices),
        "prompts_repeated": len(indices) - len(set(indices)),
        "prompts_not_of_step": sum(index not in context.public_prompt_indices for index in indices),
        "prompts_out_of_order": _out_of_order(indices, context.public_prompt_indices),
        "prompts_not_in_set": sum(index >= context.public_set_rows for index in indices),
        "public_set_sha256": context.public_set_sha256,
    }


def _out_of_order(indices: list[int], order: tuple[int, ...]) -> int:
    """How often a row comes after one that the order has behind it. Rows that it has not are counted elsewhere."""
    place = {index: position for position, index in enumerate(order)}
    places = [place[index] for index in indices if index in place]
    return sum(later < earlier for earlier, later in itertools.pairwise(places))


def _response_facts(body: pb.PublicResponses, context: Context) -> Facts:
    plan = context.plan
    return {
        **_text_facts([response for prompt in body.prompts for response in prompt.responses], context),
        **_index_facts([prompt.prompt_index for prompt in body.prompts], context),
        "header_set_sha256": body.public_set_sha256,
        "samples_max": max((prompt.samples for prompt in body.prompts), default=0),
        "responses_per_prompt_max": max((len(prompt.responses) for prompt in body.prompts), default=0),
        "prompts_over_samples": sum(len(prompt.responses) > prompt.samples for prompt in body.prompts),
        "plan_prompts_per_step": plan.prompts_per_step if plan else 0,
        "plan_samples_per_prompt": plan.samples_per_prompt if plan else 0,
        "plan_max_new_tokens": plan.rollout.max_new_tokens if plan else 0,
        "step_is_public": plan is not None and context.open_step in plan.public_steps(),
    }


def _donor_facts(body: pb.PublicDonors, context: Context) -> Facts:
    donors = [donor for prompt in body.prompts for donor in prompt.donors]
    written = [donor for donor in donors if donor.HasField("response")]
    names, at_fault = _names(donor.origin for donor in donors)
    own = {donor.origin for donor in donors if not donor.HasField("response")}
    return {
        **_text_facts([donor.response for donor in written], context),
        **_index_facts([prompt.prompt_index for prompt in body.prompts], context),
        "donors": len(donors),
        "donors_per_prompt_max": max((len(prompt.donors) for prompt in body.prompts), default=0),
        "origins_without_response": len(own),
        "names": names,
        "names_at_fault": at_fault,
    }


# ---- numbers ---------------------------------------------------------------------------------------


def _metric_facts(body: pb.MetricsEval, round_number: int, context: Context) -> Facts:
    metrics: list[list[Any]] = []
    at_fault = 0
    for metric in body.metrics:
        known_topic = metric.topic == "" or metric.topic in context.topics
        if is_name(metric.name) and known_topic and math.isfinite(metric.value) and len(metrics) < _METRICS_MAX:
            # -0.0 equals 0.0 but is another bit pattern, so it is told apart here (T9).
            negative_zero = metric.value == 0 and math.copysign(1.0, metric.value) < 0
            metrics.append([metric.name, metric.topic, metric.value, negative_zero])
        else:
            at_fault += 1
    # Round 0 is the base model, which has no digest; a round that came to no adapter has nothing to evaluate.
    expected = body.adapter_digest == (context.evaluated_digest if round_number else "")
    return {
        "split": body.split if body.split == "held_out" else "",
        "adapter_digest_expected": expected and (round_number == 0 or context.evaluated_digest != ""),
        "metrics": metrics,
        "metrics_at_fault": at_fault,
        "metrics_out_of_order": sum(
            (one.topic, one.name) >= (two.topic, two.name) for one, two in itertools.pairwise(body.metrics)
        ),
    }


# ---- control ---------------------------------------------------------------------------------------


def _control_facts(message: Message, context: Context) -> Facts:
    """Whether round and step of the envelope are free numbers: what bounds them, and whether the body repeats them."""
    body, place = message.body, (message.round, message.step)
    placed = isinstance(body, pb.Progress | pb.Declined | pb.Abstain)
    said = (body.round, body.step) if isinstance(body, pb.Progress | pb.Declined | pb.Abstain) else place
    return {
        "refused_round": context.refused_round,
        "plan_local_steps": context.plan.local_steps if context.plan else 0,
        "place_in_body": placed,
        "place_of_body": said == place,
    }


# ---- from the coordinator --------------------------------------------------------------------------


def _plan_facts(body: pb.RunPlan, run: str) -> Facts:
    plan = plan_from_canonical(body.canonical_json)
    method = METHODS.get(plan.method)
    return {
        "plan_sha256": plan.digest,
        "method": method.name if method else "",
        "method_kinds": sorted(method.kinds) if method else [],
        "method_sends_wrong_answers": method is not None and method.sends_wrong_answers,
        "plan_run_matches": plan.run == run,
        "names": list(plan.silos[:_NAMES_MAX]),
        "names_at_fault": max(0, len(plan.silos) - _NAMES_MAX),
        "federation": plan.federation,
        "rounds": plan.rounds,
        "local_steps": plan.local_steps,
        "public_steps": len(plan.public_steps()),
        "prompts_per_step": plan.prompts_per_step,
        "samples_per_prompt": plan.samples_per_prompt,
        "max_new_tokens": plan.rollout.max_new_tokens,
        "temperature": plan.rollout.temperature,
        "learning_rate": plan.optimiser.learning_rate,
        "wire_dtype": plan.wire_dtype,
        "rank": plan.lora.rank,
        "base_model_sha256": plan.base_model_sha256,
        "tokenizer_sha256": plan.tokenizer_sha256,
        "template_sha256": plan.template_sha256,
        "schema_sha256": plan.lora.schema_sha256,
        "public_set_sha256": plan.public_set_sha256,
        "public_set_rows": plan.public_set_rows,
        "held_out_sha256": plan.held_out_sha256,
    }


def _round_facts(body: pb.RoundOpen, round_number: int, context: Context) -> Facts:
    plan = context.plan
    steps = [step.step for step in body.public_steps]
    indices = [index for step in body.public_steps for index in step.prompt_indices]
    return {
        "base_digest_empty": body.base_digest == "",
        "round_in_plan": plan is not None and 1 <= round_number <= plan.rounds,
        "repeats_open_round": round_number == context.open_round
        and body.base_digest == context.base_digest
        and {step.step: tuple(step.prompt_indices) for step in body.public_steps} == dict(context.open_steps),
        "steps_repeated": len(steps) - len(set(steps)),
        "steps_not_in_plan": sum(plan is None or step not in plan.public_steps() for step in steps),
        "prompts": len(indices),
        "prompts_not_in_set": sum(index >= context.public_set_rows for index in indices),
        "prompts_repeated": sum(len(step.prompt_indices) - len(set(step.prompt_indices)) for step in body.public_steps),
        "prompts_per_step_max": max((len(step.prompt_indices) for step in body.public_steps), default=0),
        "plan_prompts_per_step": plan.prompts_per_step if plan else 0,
        "public_set_sha256": context.public_set_sha256,
    }
