"""`run.plan`: the coordinator proposes a run, which the site's limits and pins must allow (T13, T20, T48, T58)."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.aggregation import shift_bound
from fedsilo.protocol.factors import initial_frozen_sha256
from fedsilo.protocol.kinds import KINDS as ROWS
from fedsilo.protocol.kinds import UPDATE_KINDS
from fedsilo.protocol.method import Method
from fedsilo.protocol.methods import METHODS
from fedsilo.protocol.plan import SHIFTING, Plan, plan_from_canonical
from fedsilo.protocol.strict_yaml import Path
from policies import kind as k
from policies import lattice
from policies.fields import Approvals, Closed, FloatRange, Range, Sha256
from policies.history import History
from policies.message import Context, Facts, Message
from policies.model import Policy

_F = k.FieldClass
FIELDS: k.FieldTable = {
    "RunPlan": {"canonical_json": _F.PLAN},
}


_RANGES = (
    "rounds",
    "local_steps",
    "prompts_per_step",
    "samples_per_prompt",
    "max_new_tokens",
    "temperature",
    "learning_rate",
)


def _is_empty(value: Any) -> bool:
    return not value


class RunPlan(Closed):
    rounds: Range
    local_steps: Range
    prompts_per_step: Range
    samples_per_prompt: Range
    max_new_tokens: Range
    temperature: FloatRange
    learning_rate: FloatRange
    start_adapter: Annotated[
        tuple[Sha256 | Literal["any"], ...],
        lattice.INTERSECTION_OR_ANY,
        Field(
            description="digests of adapters that a run may start from in place of the one drawn from its seed; "
            "`[any]` allows every one, none is allowed by default",
            exclude_if=_is_empty,  # a policy that never spoke of it keeps its digest
        ),
    ] = ()
    server_optimiser: Annotated[
        tuple[Literal["momentum", "nesterov", "adam"], ...],
        lattice.INTERSECTION,
        Field(
            description="server optimisers that a plan may move the adapter by; none is allowed by default",
            exclude_if=_is_empty,  # as of start_adapter
        ),
    ] = ()
    approvals: Approvals


def measure(body: pb.RunPlan, message: Message, context: Context) -> Facts:
    plan, accepted = plan_from_canonical(body.canonical_json), context.plan
    method = METHODS.get(plan.method)
    model = plan.model_of(context.silo)
    fewest = min(plan.steps_of(silo) for silo in plan.silos)
    return {
        "plan_sha256": plan.digest,
        "method": method.name if method else "",
        "method_kinds": sorted(method.kinds_under(plan)) if method else [],
        "method_sends_wrong_answers": method is not None and method.sends_wrong_answers,
        "plan_run_matches": plan.run == message.place.run,
        "plan_of_open_run_changed": accepted is not None and accepted.run == plan.run and accepted != plan,
        "names": list(plan.silos[: k.NAMES_MAX]),
        "names_at_fault": max(0, len(plan.silos) - k.NAMES_MAX),
        "federation": plan.federation,
        "rounds": plan.rounds,
        "local_steps": plan.local_steps,
        "quorum": plan.quorum,
        "public_steps": len(plan.public_steps()),
        "fewest_steps": fewest,  # of any silo; each records what all of them are asked for
        "fewest_public_steps": sum(step <= fewest for step in plan.public_steps()),
        "prompts_per_step": plan.prompts_per_step,
        "samples_per_prompt": plan.samples_per_prompt,
        **(_asked_by_options(method, plan) if method else {}),
        "max_new_tokens": plan.rollout.max_new_tokens,
        "temperature": plan.rollout.temperature,
        "learning_rate": plan.optimiser.learning_rate,
        "wire_dtype": plan.wire_dtype,
        "rank": plan.lora.rank,
        "base_model_sha256": model.base_model_sha256,
        "tokenizer_sha256": model.tokenizer_sha256,
        "template_sha256": model.template_sha256,
        "schema_sha256": model.lora_schema_sha256,
        "start_adapter_sha256": plan.start_adapter_sha256,
        "server_optimiser": plan.server_optimiser.name,
        "aggregate": plan.aggregate,
        **({"shift_scale": plan.lora.alpha / plan.lora.rank} if plan.aggregate in SHIFTING else {}),
        "freeze": plan.lora.freeze,
        "frozen_of_seed": context.schema is not None
        and plan.lora.frozen_sha256 == initial_frozen_sha256(context.schema.tensors, plan.seed, context.schema.freeze),
        "public_set_sha256": plan.public_set_sha256,
        "public_set_rows": plan.public_set_rows,
        "held_out_sha256": plan.held_out_sha256,
        **k.server_step(plan, context.schema),
    }


def _range_rule(key: str) -> k.Rule:
    @k.block_rule(f"plan {key.replace('_', ' ')}", "PLAN_RANGE")
    def check(facts: Facts, block: RunPlan, path: Path) -> k.Judgement:
        judgement = k.within(facts[key], getattr(block, key), (*path, key))
        most = facts.get(f"stated_{key}", facts[key])  # more, where the method's options ask for further ones
        return judgement if judgement.outcome == "deny" else k.within(most, getattr(block, key), (*path, key))

    return check


def _asked_by_options(method: Method, plan: Plan) -> Facts:
    """What the method's own options ask for; that they are none of its own, where they do not parse."""
    try:
        samples = method.options.samples(plan)
    except ValidationError as error:
        return {"options_at_fault": error.error_count()}
    return {} if samples == plan.samples_per_prompt else {"stated_samples_per_prompt": samples}


@k.facts_rule("plan of no round", "PLAN_ROUND")
def plan_round(facts: Facts, path: Path) -> k.Judgement:
    """A plan comes before all rounds; a number here would be the coordinator's own."""
    place = f"{facts['round']}.{facts['step']}"
    return k.equal(place, "0.0", path)


@k.facts_rule("plan stands", "PLAN_CHANGED")
def plan_stands(facts: Facts, path: Path) -> k.Judgement:
    """A plan that was accepted stays as it was until its run is over (T13); the same plan again changes nothing."""
    return k.holds(facts["plan_of_open_run_changed"] is False, path)


# A run goes on without these.
_MAY_BE_KEPT_BACK = frozenset({"metrics.eval"})


def _schemas_trained(facts: Facts, policy: Policy) -> list[tuple[str, str]]:
    """(kind of update, name of its schema) under egress for each update that the method sends. A method that sends none
    trains a pinned schema all the same, of which nothing leaves."""
    sent = sorted(UPDATE_KINDS.intersection(facts["method_kinds"]))
    if not sent:
        return [("", name) for name in policy.file.lora_schemas]
    updates = policy.file.egress.updates
    return [(kind, updates[kind].schema_name) for kind in sent if kind in updates]


@k.rule("plan method", "PLAN_METHOD")
def plan_method(facts: Facts, policy: Policy, history: History) -> k.Judgement:
    """The method is one of this version, and what it lives on is not denied later, after the training.

    Metrics may be kept back: a run goes on without them.
    """
    method, egress, ingress = facts["method"], policy.file.egress, policy.file.ingress
    if not method:
        return k.holds(False, (), measured="unknown", limit="a method of this version")
    if "options_at_fault" in facts:
        return k.holds(False, (), measured=method, limit="options of this method")
    unused = {"public.responses"} if facts["public_steps"] == 0 else set()
    for kind in sorted(set(facts["method_kinds"]) - _MAY_BE_KEPT_BACK - unused):
        if egress.block(kind) is None:
            return k.holds(False, ("egress",), measured=method, limit=f"{kind} under egress")
        asks = ROWS[kind].asked_by
        if asks and ingress.block(asks) is None:
            return k.holds(False, ("ingress",), measured=method, limit=f"{asks} under ingress")
    if ingress.round_open is not None and ingress.round_agreed is None:
        return k.holds(False, ("ingress",), measured=method, limit="round.agreed under ingress")
    if "public.responses" not in facts["method_kinds"] or facts["public_steps"] == 0:
        return k.holds(True, ("egress",), measured=method)
    if egress.public_responses is None:
        return k.holds(False, ("egress",), measured=method, limit="public.responses under egress")
    if ingress.public_donors is None:
        return k.holds(False, ("ingress",), measured=method, limit="public.donors under ingress")
    if facts["method_sends_wrong_answers"] and egress.public_responses.send_only_verified:
        path: tuple[str, ...] = ("egress", "public.responses", "send_only_verified")
        return k.holds(False, path, measured=method, limit="wrong answers are let out")
    if facts["method_sends_wrong_answers"] and ingress.public_donors.verify_locally:
        path = ("ingress", "public.donors", "verify_locally")
        return k.holds(False, path, measured=method, limit="wrong answers are let in")
    return k.holds(True, ("egress", "public.responses"), measured=method)


@k.rule("plan federation", "PLAN_FEDERATION")
def plan_federation(facts: Facts, policy: Policy, history: History) -> k.Judgement:
    if facts["plan_run_matches"] is not True:
        return k.holds(False, ("federation", "id"))
    return k.equal(facts["federation"], policy.file.federation.id, ("federation", "id"))


@k.rule("plan model", "PLAN_MODEL")
def plan_model(facts: Facts, policy: Policy, history: History) -> k.Judgement:
    """Base model, tokenizer and chat template that the plan names for this silo are the pinned ones."""
    for key in ("base_model_sha256", "tokenizer_sha256", "template_sha256"):
        judgement = k.equal(facts[key], getattr(policy.file.model, key), ("model", key))
        if judgement.outcome == "deny":
            return judgement
    return judgement


def _is_schema(facts: Facts, policy: Policy, name: str) -> bool:
    return bool(facts["schema_sha256"] == policy.file.lora_schemas[name].sha256)


@k.rule("plan schema", "PLAN_SCHEMA")
def plan_schema(facts: Facts, policy: Policy, history: History) -> k.Judgement:
    """The plan trains, in all of its rounds, the schema that this site may send, on the dtype that it may send, and
    freezes what that schema freezes."""
    schemas = _schemas_trained(facts, policy)
    if not schemas:
        # A site that sends no factors cannot be asked to train any for a method that sends them.
        return k.holds(False, ("egress",), measured=facts["schema_sha256"], limit="a schema under egress")
    names = [name for _, name in schemas]
    if not schemas[0][0]:  # nothing leaves, so any of them
        names = [next((name for name in names if _is_schema(facts, policy, name)), names[0])]
    for name in names:
        pin, path = policy.file.lora_schemas[name], ("lora_schemas", name)
        for fact, key in (("wire_dtype", "dtype"), ("rank", "rank"), ("freeze", "freeze"), ("schema_sha256", "sha256")):
            judgement = k.equal(facts[fact], getattr(pin, key), (*path, key))
            if judgement.outcome == "deny":
                return judgement
    return judgement


@k.rule("plan frozen factors", "PLAN_SCHEMA")
def plan_frozen(facts: Facts, policy: Policy, history: History) -> k.Judgement:
    """What is frozen is what this party draws from the plan's seed itself: nobody has chosen it (T6, T20)."""
    return k.holds(facts["frozen_of_seed"], ("lora_schemas",), measured=facts["freeze"], limit="as the seed draws it")


@k.block_rule("plan start adapter", "PLAN_START")
def plan_start(facts: Facts, block: RunPlan, path: Path) -> k.Judgement:
    """A run starts from the adapter that its seed draws, or from one that this site has allowed (T20, T52). That the
    first round opens on that adapter is a rule of `round.open`.

    What it does not stop: a coordinator whose plan names none and that opens the first round on another adapter than
    the drawn one, within the norm that the policy allows; the site's acceptance gate measures that adapter (T52)."""
    path = (*path, "start_adapter")
    if "start_adapter_sha256" not in facts:
        return k.not_applicable(path)  # measured by a version that did not look at it
    digest, allowed = facts["start_adapter_sha256"], block.start_adapter
    is_allowed = digest == "" or lattice.ANY in allowed or digest in allowed
    return k.holds(is_allowed, path, measured=digest or "as the seed draws it", limit=", ".join(allowed) or "none")


@k.block_rule("plan server optimiser", "PLAN_OPTIMISER")
def plan_optimiser(facts: Facts, block: RunPlan, path: Path) -> k.Judgement:
    """A plan moves the adapter by its mean update, or by a server optimiser that this site has allowed: such a plan
    raises the limit of a step (T20), which its signature alone must not do."""
    path = (*path, "server_optimiser")
    if "server_optimiser" not in facts:
        return k.not_applicable(path)  # measured by a version that did not look at it
    name, allowed = facts["server_optimiser"], block.server_optimiser
    return k.holds(name == "none" or name in allowed, path, measured=name, limit=", ".join(allowed) or "none")


@k.rule("plan aggregate", "PLAN_AGGREGATE")
def plan_aggregate(facts: Facts, policy: Policy, history: History) -> k.Judgement:
    """A plan whose rounds shift the base's weights is taken where the shift of updates as long as they may be here fits
    its limit for a round: else its adapters would be refused after the training."""
    path, adapter = ("ingress", "global.adapter", "max_shift_step_l2"), policy.file.ingress.global_adapter
    if "aggregate" not in facts:
        return k.not_applicable(path)  # measured by a version that did not look at it
    if facts["aggregate"] not in SHIFTING:
        return k.holds(True, path, measured=facts["aggregate"])
    if adapter is None or "shift_scale" not in facts:
        return k.holds(False, path, measured=facts["aggregate"])
    step = shift_bound(facts["aggregate"], facts["shift_scale"], facts["rank"], adapter.max_step_l2)
    return k.at_most(step if math.isfinite(step) else None, adapter.max_shift_step_l2, path)


@k.rule("plan sets", "PLAN_SETS")
def plan_sets(facts: Facts, policy: Policy, history: History) -> k.Judgement:
    """The public set is pinned here with the same number of rows; so is the held-out set, where the policy has one."""
    for name, pin in policy.file.public_sets.items():
        if pin.sha256 == facts["public_set_sha256"]:
            if facts["public_set_rows"] != pin.rows:
                return k.equal(facts["public_set_rows"], pin.rows, ("public_sets", name, "rows"))
            break
    else:
        return k.holds(False, ("public_sets",), measured=facts["public_set_sha256"], limit="a pinned public set")
    if policy.file.held_out is None:
        return k.holds(True, ("public_sets",))
    return k.equal(facts["held_out_sha256"], policy.file.held_out.sha256, ("held_out", "sha256"))


@k.rule("plan peers", "PLAN_PEERS")
def plan_peers(facts: Facts, policy: Policy, history: History) -> k.Judgement:
    """Every silo of the roster is a listed peer, and there are enough of them (T48)."""
    unknown = k.strangers(facts, policy)
    if unknown:
        return k.none_of(unknown, ("federation", "peers"))
    return k.at_least(len(facts["names"]), policy.file.federation.min_peers, ("federation", "min_peers"))


@k.rule("plan asks for enough updates", "MIN_UPDATES")
def plan_updates(facts: Facts, policy: Policy, history: History) -> k.Judgement:
    """No round of the plan may be committed with fewer updates than this site's own enters a mean over (T58). What
    comes of each round is compared with its signed result (`silo/guard/round_agreement.py`)."""
    path = ("federation", "min_updates")
    if "quorum" not in facts:
        return k.not_applicable(path)  # measured by a version that did not look at it
    return k.at_least(facts["quorum"], policy.file.federation.min_updates, path)


@k.rule("plan's longest step", "PLAN_STEP")
def plan_step(facts: Facts, policy: Policy, history: History) -> k.Judgement:
    """As the plan aggregates, and with its server optimiser, one round's step is never longer than a whole adapter may
    be here: a plan cannot make `max_step_l2` say nothing (T20)."""
    path, adapter = ("ingress", "global.adapter", "max_l2"), policy.file.ingress.global_adapter
    if adapter is None or "step_scale" not in facts:
        return k.not_applicable(path)
    step = k.step_limit(facts, adapter.max_step_l2)
    return k.at_most(step if math.isfinite(step) else None, adapter.max_l2, path)


@k.rule("plan fits the round's limits", "PLAN_SIZE")
def plan_fits(facts: Facts, policy: Policy, history: History) -> k.Judgement:
    """A plan that would later be denied for its number of responses is refused before any training."""
    outbound = policy.file.egress.public_responses
    if outbound is None or facts["public_steps"] == 0 or "public.responses" not in facts["method_kinds"]:
        return k.not_applicable()
    path = ("egress", "public.responses", "max_responses_per_round")
    most = facts["prompts_per_step"] * facts["samples_per_prompt"] * facts["public_steps"]
    return k.at_most(most, outbound.max_responses_per_round, path)


@k.rule("plan gives enough records", "PLAN_SIZE")
def plan_records(facts: Facts, policy: Policy, history: History) -> k.Judgement:
    """A plan whose rounds are too small, or too long, for their update to leave is refused before any training (T7)."""
    judgement = k.not_applicable()
    for kind, _ in _schemas_trained(facts, policy):
        if (outbound := policy.file.egress.updates.get(kind)) is not None:
            judgement = _gives_enough(facts, outbound, ("egress", kind))
        if judgement.outcome == "deny":
            break
    return judgement


def _gives_enough(facts: Facts, outbound: Any, path: Path) -> k.Judgement:
    if facts["local_steps"] > outbound.max_steps:
        return k.at_most(facts["local_steps"], outbound.max_steps, (*path, "max_steps"))
    public = facts["fewest_public_steps"] if "public.responses" in facts["method_kinds"] else 0
    most = (facts["fewest_steps"] - public) * facts["prompts_per_step"]
    if most == 0:
        return k.not_applicable((*path, "min_records"))
    return k.at_least(most, outbound.min_records, (*path, "min_records"))


RULES = (
    *(_range_rule(key) for key in _RANGES),
    plan_round,
    plan_stands,
    plan_method,
    plan_federation,
    plan_model,
    plan_schema,
    plan_frozen,
    plan_start,
    plan_optimiser,
    plan_aggregate,
    plan_sets,
    plan_peers,
    plan_updates,
    plan_step,
    plan_fits,
    plan_records,
)


def example(at: k.Around) -> k.Example:
    return k.Example(pb.RunPlan(canonical_json=at.plan.canonical()))


KINDS = (k.PolicyKind("run.plan", example, taken=RunPlan, measure=measure, rules=RULES),)
