"""Rules on what the coordinator sends: plans within ranges, prompts by index, donors checked (T12, T13, T20, T21)."""

from __future__ import annotations

import math

from fedsilo.protocol.kinds import KINDS, UPDATE_KINDS
from policies.history import History
from policies.load import Policy
from policies.message import OFFERED, Facts
from policies.model import Egress, Ingress, PublicDonors
from policies.rules.base import (
    Judgement,
    Rule,
    at_least,
    at_most,
    block_of,
    equal,
    holds,
    none_of,
    not_applicable,
    not_judged_yet,
    rule,
    within,
)

_RANGES = (
    "rounds",
    "local_steps",
    "prompts_per_step",
    "samples_per_prompt",
    "max_new_tokens",
    "temperature",
    "learning_rate",
)


def _range_rule(key: str) -> Rule:
    @rule(f"plan {key.replace('_', ' ')}", "PLAN_RANGE", "run.plan")
    def check(facts: Facts, policy: Policy, history: History) -> Judgement:
        block, path = block_of(facts, policy)
        return not_applicable() if block is None else within(facts[key], getattr(block, key), (*path, key))

    return check


@rule("plan of no round", "PLAN_ROUND", "run.plan")
def plan_round(facts: Facts, policy: Policy, history: History) -> Judgement:
    """A plan comes before all rounds; a number here would be the coordinator's own."""
    _, path = block_of(facts, policy)
    place = f"{facts['round']}.{facts['step']}"
    return equal(place, "0.0", path)


@rule("plan stands", "PLAN_CHANGED", "run.plan")
def plan_stands(facts: Facts, policy: Policy, history: History) -> Judgement:
    """A plan that was accepted stays as it was until its run is over (T13); the same plan again changes nothing."""
    _, path = block_of(facts, policy)
    return holds(facts["plan_of_open_run_changed"] is False, path)


# A run goes on without these.
_MAY_BE_KEPT_BACK = frozenset({"metrics.eval"})


def _named(side: Egress | Ingress, kind: str) -> object:
    return getattr(side, kind.replace(".", "_"), None)


def _schemas_trained(facts: Facts, policy: Policy) -> list[tuple[str, str]]:
    """(kind of update, name of its schema) under egress for each update that the method sends. A method that sends none
    trains a pinned schema all the same, of which nothing leaves."""
    sent = sorted(UPDATE_KINDS.intersection(facts["method_kinds"]))
    if not sent:
        return [("", name) for name in policy.file.lora_schemas]
    updates = policy.file.egress.updates
    return [(kind, updates[kind].schema_name) for kind in sent if kind in updates]


@rule("plan method", "PLAN_METHOD", "run.plan")
def plan_method(facts: Facts, policy: Policy, history: History) -> Judgement:
    """The method is one of this version, and what it lives on is not denied later, after the training.

    Metrics may be kept back: a run goes on without them.
    """
    method, egress, ingress = facts["method"], policy.file.egress, policy.file.ingress
    if not method:
        return holds(False, (), measured="unknown", limit="a method of this version")
    unused = {"public.responses"} if facts["public_steps"] == 0 else set()
    for kind in sorted(set(facts["method_kinds"]) - _MAY_BE_KEPT_BACK - unused):
        if _named(egress, kind) is None:
            return holds(False, ("egress",), measured=method, limit=f"{kind} under egress")
        asks = KINDS[kind].asked_by
        if asks and _named(ingress, asks) is None:
            return holds(False, ("ingress",), measured=method, limit=f"{asks} under ingress")
    if ingress.round_open is not None and ingress.round_agreed is None:
        return holds(False, ("ingress",), measured=method, limit="round.agreed under ingress")
    if "public.responses" not in facts["method_kinds"] or facts["public_steps"] == 0:
        return holds(True, ("egress",), measured=method)
    if egress.public_responses is None:
        return holds(False, ("egress",), measured=method, limit="public.responses under egress")
    if ingress.public_donors is None:
        return holds(False, ("ingress",), measured=method, limit="public.donors under ingress")
    if facts["method_sends_wrong_answers"] and egress.public_responses.send_only_verified:
        path: tuple[str, ...] = ("egress", "public.responses", "send_only_verified")
        return holds(False, path, measured=method, limit="wrong answers are let out")
    if facts["method_sends_wrong_answers"] and ingress.public_donors.verify_locally:
        path = ("ingress", "public.donors", "verify_locally")
        return holds(False, path, measured=method, limit="wrong answers are let in")
    return holds(True, ("egress", "public.responses"), measured=method)


@rule("plan federation", "PLAN_FEDERATION", "run.plan")
def plan_federation(facts: Facts, policy: Policy, history: History) -> Judgement:
    if facts["plan_run_matches"] is not True:
        return holds(False, ("federation", "id"))
    return equal(facts["federation"], policy.file.federation.id, ("federation", "id"))


@rule("plan model", "PLAN_MODEL", "run.plan")
def plan_model(facts: Facts, policy: Policy, history: History) -> Judgement:
    """Base model, tokenizer and chat template are the pinned ones."""
    for key in ("base_model_sha256", "tokenizer_sha256", "template_sha256"):
        judgement = equal(facts[key], getattr(policy.file.model, key), ("model", key))
        if judgement.outcome == "deny":
            return judgement
    return judgement


def _is_schema(facts: Facts, policy: Policy, name: str) -> bool:
    return bool(facts["schema_sha256"] == policy.file.lora_schemas[name].sha256)


@rule("plan schema", "PLAN_SCHEMA", "run.plan")
def plan_schema(facts: Facts, policy: Policy, history: History) -> Judgement:
    """The plan trains the schema that this site may send, on the dtype that it may send."""
    schemas = _schemas_trained(facts, policy)
    if not schemas:
        # A site that sends no factors cannot be asked to train any for a method that sends them.
        return holds(False, ("egress",), measured=facts["schema_sha256"], limit="a schema under egress")
    name = next((name for _, name in schemas if _is_schema(facts, policy, name)), schemas[0][1])
    pin, path = policy.file.lora_schemas[name], ("lora_schemas", name)
    if facts["wire_dtype"] != pin.dtype:
        return equal(facts["wire_dtype"], pin.dtype, (*path, "dtype"))
    if facts["rank"] != pin.rank:
        return equal(facts["rank"], pin.rank, (*path, "rank"))
    return equal(facts["schema_sha256"], pin.sha256, (*path, "sha256"))


@rule("plan frozen factors", "PLAN_SCHEMA", "run.plan")
def plan_frozen(facts: Facts, policy: Policy, history: History) -> Judgement:
    """What is frozen is what this party draws from the plan's seed itself: nobody has chosen it (T6, T20)."""
    return holds(facts["frozen_of_seed"], ("lora_schemas",), measured=facts["freeze"], limit="as the seed draws it")


@rule("plan sets", "PLAN_SETS", "run.plan")
def plan_sets(facts: Facts, policy: Policy, history: History) -> Judgement:
    """The public set is pinned here with the same number of rows; so is the held-out set, where the policy has one."""
    for name, pin in policy.file.public_sets.items():
        if pin.sha256 == facts["public_set_sha256"]:
            if facts["public_set_rows"] != pin.rows:
                return equal(facts["public_set_rows"], pin.rows, ("public_sets", name, "rows"))
            break
    else:
        return holds(False, ("public_sets",), measured=facts["public_set_sha256"], limit="a pinned public set")
    if policy.file.held_out is None:
        return holds(True, ("public_sets",))
    return equal(facts["held_out_sha256"], policy.file.held_out.sha256, ("held_out", "sha256"))


@rule("plan peers", "PLAN_PEERS", "run.plan")
def plan_peers(facts: Facts, policy: Policy, history: History) -> Judgement:
    """Every silo of the roster is a listed peer, and there are enough of them (T48)."""
    strangers = _strangers(facts, policy)
    if strangers:
        return none_of(strangers, ("federation", "peers"))
    return at_least(len(facts["names"]), policy.file.federation.min_peers, ("federation", "min_peers"))


@rule("plan asks for enough updates", "MIN_UPDATES", "run.plan")
def plan_updates(facts: Facts, policy: Policy, history: History) -> Judgement:
    """No round of the plan may be committed with fewer updates than this site's own enters a mean over (T58). What
    comes of each round is compared with its signed result (`silo/guard/round_agreement.py`)."""
    path = ("federation", "min_updates")
    if "quorum" not in facts:
        return not_applicable(path)  # measured by a version that did not look at it
    return at_least(facts["quorum"], policy.file.federation.min_updates, path)


@rule("plan fits the round's limits", "PLAN_SIZE", "run.plan")
def plan_fits(facts: Facts, policy: Policy, history: History) -> Judgement:
    """A plan that would later be denied for its number of responses is refused before any training."""
    outbound = policy.file.egress.public_responses
    if outbound is None or facts["public_steps"] == 0 or "public.responses" not in facts["method_kinds"]:
        return not_applicable()
    path = ("egress", "public.responses", "max_responses_per_round")
    most = facts["prompts_per_step"] * facts["samples_per_prompt"] * facts["public_steps"]
    return at_most(most, outbound.max_responses_per_round, path)


@rule("plan gives enough records", "PLAN_SIZE", "run.plan")
def plan_records(facts: Facts, policy: Policy, history: History) -> Judgement:
    """A plan whose rounds are too small, or too long, for their update to leave is refused before any training (T7)."""
    kind, _ = next(iter(_schemas_trained(facts, policy)), ("", ""))
    outbound, path = policy.file.egress.updates.get(kind), ("egress", kind)
    if outbound is None:
        return not_applicable()
    if facts["local_steps"] > outbound.max_steps:
        return at_most(facts["local_steps"], outbound.max_steps, (*path, "max_steps"))
    public = facts["fewest_public_steps"] if "public.responses" in facts["method_kinds"] else 0
    most = (facts["fewest_steps"] - public) * facts["prompts_per_step"]
    if most == 0:
        return not_applicable((*path, "min_records"))
    return at_least(most, outbound.min_records, (*path, "min_records"))


@rule("round is of the plan", "ROUND_NOT_OPEN", "round.open")
def round_of_plan(facts: Facts, policy: Policy, history: History) -> Judgement:
    """The round exists in the plan, and names the adapter it starts from where the policy takes one in."""
    _, path = block_of(facts, policy)
    named = facts["base_digest_empty"] is (policy.file.ingress.global_adapter is None)
    return holds(facts["round_in_plan"] is True and named, path)


@rule("rounds go forward", "ROUND_NOT_OPEN", "round.open")
def round_forward(facts: Facts, policy: Policy, history: History) -> Judgement:
    """A round opens once. The same round.open again is its redelivery and changes nothing."""
    _, path = block_of(facts, policy)
    fits = facts["round"] > facts["open_round"] or facts["repeats_open_round"] is True
    return holds(fits, path, measured=facts["round"], limit=f"above the open round {facts['open_round']}")


@rule("public steps of the plan", "PUBLIC_STEPS", "round.open")
def round_steps(facts: Facts, policy: Policy, history: History) -> Judgement:
    _, path = block_of(facts, policy)
    return none_of(facts["steps_repeated"] + facts["steps_not_in_plan"], path)


@rule("prompts are rows of the public set", "PROMPT_NOT_PUBLIC", "round.open", "public.donors")
def rows_of_set(facts: Facts, policy: Policy, history: History) -> Judgement:
    block, path = block_of(facts, policy)
    if block is None:
        return not_applicable()
    pin = policy.file.public_sets[block.set]
    if facts["public_set_sha256"] != pin.sha256:
        return equal(facts["public_set_sha256"], pin.sha256, ("public_sets", block.set, "sha256"))
    return none_of(facts["prompts_not_in_set"] + facts["prompts_repeated"], (*path, "set"))


@rule("prompts per public step", "PROMPTS", "round.open")
def round_prompts(facts: Facts, policy: Policy, history: History) -> Judgement:
    block, path = block_of(facts, policy)
    if block is None:
        return not_applicable()
    if facts["prompts_per_step_max"] > facts["plan_prompts_per_step"]:
        return at_most(facts["prompts_per_step_max"], facts["plan_prompts_per_step"], path)
    return at_most(facts["prompts_per_step_max"], block.max_prompts_per_step, (*path, "max_prompts_per_step"))


@rule("donors of the open step", "PROMPT_NOT_PUBLIC", "public.donors")
def donors_of_step(facts: Facts, policy: Policy, history: History) -> Judgement:
    _, path = block_of(facts, policy)
    return none_of(facts["prompts_not_of_step"], path)


@rule("donors are peers", "NOT_A_PEER", "public.donors", "round.agreed", "round.result")
def donor_peers(facts: Facts, policy: Policy, history: History) -> Judgement:
    """Every silo named is a peer in the policy; at most one (the receiver) is named without its text."""
    strangers = _strangers(facts, policy) + max(0, facts.get("origins_without_response", 0) - 1)
    return none_of(strangers, ("federation", "peers"))


@rule("silos of the plan, each once", "ROSTER", "round.agreed", "round.result")
def roster(facts: Facts, policy: Policy, history: History) -> Judgement:
    """A list of silos names each at most once, and none that the plan does not name: what is recorded of it is bounded,
    and says one thing of each (T20)."""
    _, path = block_of(facts, policy)
    return none_of(facts["names_repeated"] + facts["names_not_in_plan"], path)


@rule("donors graded here", "NOT_VERIFIED", "public.donors")
def donors_verified(facts: Facts, policy: Policy, history: History) -> Judgement:
    """Wrong donors are dropped by `transform.drop_wrong_donors`; before that they are only looked at."""
    block, path = block_of(facts, policy)
    if block is None or not block.verify_locally:
        return not_applicable()
    path = (*path, "verify_locally")
    if facts["graded"] is not True:
        return not_judged_yet(facts, path)
    if facts["stage"] == OFFERED and facts["responses_wrong"] > 0:
        return Judgement("look", facts["responses_wrong"], 0, path)
    return none_of(facts["responses_wrong"], path)


@rule("donors per prompt", "DONORS", "public.donors")
def donors_per_prompt(facts: Facts, policy: Policy, history: History) -> Judgement:
    block, path = block_of(facts, policy)
    if block is None:
        return not_applicable()
    return at_most(facts["donors_per_prompt_max"], block.max_donors_per_prompt, (*path, "max_donors_per_prompt"))


@rule("donors of one peer", "DONOR_SHARE", "public.donors")
def donors_of_one_peer(facts: Facts, policy: Policy, history: History) -> Judgement:
    """Of all answers that the step trains on, one peer gives its share at most; the surplus was dropped (T21)."""
    block, path = block_of(facts, policy)
    if block is None:
        return not_applicable()
    path, most = (*path, "max_share_per_peer"), donors_of_one_peer_most(block, facts["answers_of_step"])
    if facts["stage"] == OFFERED and facts["donors_of_one_peer_max"] > most:
        return Judgement("look", facts["donors_of_one_peer_max"], most, path)
    return at_most(facts["donors_of_one_peer_max"], most, path)


@rule("bytes of one donor", "RESPONSE_BYTES", "public.donors")
def donor_bytes(facts: Facts, policy: Policy, history: History) -> Judgement:
    block, path = block_of(facts, policy)
    if block is None:
        return not_applicable()
    return at_most(facts["text_bytes_max"], block.max_bytes_per_response, (*path, "max_bytes_per_response"))


def donors_of_one_peer_most(block: PublicDonors, answers_of_step: int) -> int:
    """The largest number of donors of one peer in a step that trains on so many answers."""
    return math.floor(block.max_share_per_peer * answers_of_step)


def _strangers(facts: Facts, policy: Policy) -> int:
    prefix = f"spiffe://{policy.file.federation.id}/silo/"
    unlisted = sum(f"{prefix}{name}" not in policy.peers for name in facts["names"])
    return int(facts["names_at_fault"]) + unlisted


RULES = (
    *(_range_rule(key) for key in _RANGES),
    plan_round,
    plan_stands,
    plan_method,
    plan_federation,
    plan_model,
    plan_schema,
    plan_frozen,
    plan_sets,
    plan_peers,
    plan_updates,
    plan_fits,
    plan_records,
    round_of_plan,
    round_forward,
    round_steps,
    rows_of_set,
    round_prompts,
    donors_of_step,
    donor_peers,
    roster,
    donors_verified,
    donors_per_prompt,
    donors_of_one_peer,
    donor_bytes,
)
