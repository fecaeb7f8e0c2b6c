"""`measure`: what a message is, in numbers, booleans, digests and names from closed lists.

Facts go into the audit log and are all that `decide` sees, so they never hold text, tensor values or a tensor name.
A name or kind that is not of its closed form becomes "" or "unknown" and is counted instead.
"""

from __future__ import annotations

import itertools
import math
import re
from typing import Any

from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.averaging import initial_frozen_sha256
from fedsilo.protocol.kinds import FACTOR_KINDS, MESSAGES, REFT_KINDS
from fedsilo.protocol.methods import METHODS
from fedsilo.protocol.plan import Plan, plan_from_canonical
from policies.catalogue import NAMES_MAX, fields_at_fault, is_name, names_of
from policies.facts_kinds import kind_facts
from policies.facts_reft import reft_facts
from policies.facts_tensors import tensor_facts
from policies.facts_text import donor_facts, response_facts
from policies.message import EVALUATION_ERRORS, FINAL, Context, Facts, Message

_METRICS_MAX = 256
_SPIFFE = re.compile(r"spiffe://[a-z0-9_-]{1,63}/(silo|coordinator)/[a-z0-9_-]{1,63}")


def measure(message: Message, context: Context, *, stage: str = FINAL) -> Facts:
    """Facts of a message, JSON-able. Never raises for what a message holds: a failure becomes a fact that denies."""
    known = message.place.kind in MESSAGES
    plan = context.plan
    facts: Facts = {
        "direction": message.direction if message.direction in ("egress", "ingress") else "unknown",
        "stage": stage,
        "kind": message.place.kind if known else "unknown",
        "run": message.place.run if is_name(message.place.run) else "",
        "round": message.place.round,
        "step": message.place.step,
        "sender": message.sender if _SPIFFE.fullmatch(message.sender) else "",
        "sender_expected": bool(context.expected_sender) and message.sender == context.expected_sender,
        "now": float(context.now_seconds),
        "payload_bytes": message.payload_bytes,
        "run_is_open": plan is not None and message.place.run == plan.run,
        "kind_of_method": _kind_of_method(message.place.kind, plan),
        "open_round": context.open_round,
        "open_step": context.open_step,
        "asked_step": context.asked.step,
        "plan_local_steps": plan.local_steps if plan else 0,
        "measured": False,
    }
    if not known or type(message.body) is not MESSAGES[message.place.kind]:
        return facts
    try:
        facts["fields_at_fault"] = fields_at_fault(message.body)
        if message.place.kind in FACTOR_KINDS:
            facts.update(tensor_facts(message, context))
        elif message.place.kind in REFT_KINDS:
            facts.update(reft_facts(message))
        elif isinstance(message.body, pb.PublicResponses):
            facts.update(response_facts(message.body, context))
        elif isinstance(message.body, pb.PublicDonors):
            facts.update(donor_facts(message.body, context))
        elif isinstance(message.body, pb.MetricsEval):
            facts.update(_metric_facts(message.body, message.place.round, context))
        elif isinstance(message.body, pb.RunPlan):
            facts.update(_plan_facts(message.body, message.place.run, context))
        elif isinstance(message.body, pb.RoundOpen):
            facts.update(_round_facts(message.body, message.place.round, context))
        elif isinstance(message.body, pb.RoundAgreed):
            facts.update(_roster_facts([row.silo for row in message.body.countersignatures], plan=plan))
        elif isinstance(message.body, pb.RoundResult):
            judged = [row.silo for row in message.body.verdicts]
            facts.update(_roster_facts(list(message.body.participants), judged, plan=plan))
        elif message.place.kind.startswith("control."):
            facts.update(_control_facts(message, context))
        else:
            facts.update(kind_facts(message, context))
        facts["measured"] = True
    except EVALUATION_ERRORS as error:
        facts["measure_error"] = type(error).__name__
    return facts


def _kind_of_method(kind: str, plan: Plan | None) -> bool:
    """Whether the method of the open run offers this kind."""
    method = METHODS.get(plan.method) if plan else None
    return plan is not None and method is not None and kind in method.kinds_under(plan)


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
    body, place = message.body, (message.place.round, message.place.step)
    placed = isinstance(body, pb.Progress | pb.Declined | pb.Abstain)
    said = (body.round, body.step) if isinstance(body, pb.Progress | pb.Declined | pb.Abstain) else place
    carried: Facts = {}
    if isinstance(body, pb.Checkpoint):
        carried = {"peer_logs": len(body.peers), "countersigned": len(body.countersigned)}
    if isinstance(body, pb.Poll):
        carried = {"countersignature_bytes": len(body.countersignature), "countersigns": context.countersigns}
    return carried | {
        "refused_round": context.refused_round,
        "place_in_body": placed,
        "place_of_body": said == place,
    }


# ---- from the coordinator --------------------------------------------------------------------------


def _plan_facts(body: pb.RunPlan, run: str, context: Context) -> Facts:
    plan, accepted = plan_from_canonical(body.canonical_json), context.plan
    method = METHODS.get(plan.method)
    fewest = min(plan.steps_of(silo) for silo in plan.silos)
    return {
        "plan_sha256": plan.digest,
        "method": method.name if method else "",
        "method_kinds": sorted(method.kinds_under(plan)) if method else [],
        "method_sends_wrong_answers": method is not None and method.sends_wrong_answers,
        "plan_run_matches": plan.run == run,
        "plan_of_open_run_changed": accepted is not None and accepted.run == plan.run and accepted != plan,
        "names": list(plan.silos[:NAMES_MAX]),
        "names_at_fault": max(0, len(plan.silos) - NAMES_MAX),
        "federation": plan.federation,
        "rounds": plan.rounds,
        "local_steps": plan.local_steps,
        "quorum": plan.quorum,
        "public_steps": len(plan.public_steps()),
        "fewest_steps": fewest,  # of any silo; each records what all of them are asked for
        "fewest_public_steps": sum(step <= fewest for step in plan.public_steps()),
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
        "freeze": plan.lora.freeze,
        "frozen_of_seed": context.schema is not None
        and plan.lora.frozen_sha256 == initial_frozen_sha256(context.schema.tensors, plan.seed, context.schema.freeze),
        "public_set_sha256": plan.public_set_sha256,
        "public_set_rows": plan.public_set_rows,
        "held_out_sha256": plan.held_out_sha256,
    }


def _roster_facts(*lists: list[str], plan: Plan | None) -> Facts:
    """Silos that a message lists, one row for each of them in each list."""
    distinct = [set(each) for each in lists]
    named = set().union(*distinct)
    names, at_fault = names_of(named)
    return {
        "names": names,
        "names_at_fault": at_fault,
        "names_repeated": sum(map(len, lists)) - sum(map(len, distinct)),
        "names_not_in_plan": len(named.difference(plan.silos if plan else ())),
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
        "witnesses": context.witnesses,
    }
