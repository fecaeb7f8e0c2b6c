"""Rules on adapter factors: exactly the schema's tensors, finite, within the norms, trained on enough records, and what
is frozen unchanged (threats T1, T2, T4, T6, T7, T20).

They judge updates (deltas against the round's base) and global.adapter (whole factors, from the coordinator).
What they do not stop: information in the low bits of allowed values (N1), and a trainer that lies about its records
(silo/sampling.py).
"""

from __future__ import annotations

from fedsilo.protocol.freezing import FREEZE_OF_KIND
from fedsilo.protocol.kinds import FACTOR_KINDS, UPDATE_KINDS
from policies.history import History
from policies.load import Policy
from policies.message import OFFERED, Facts
from policies.model import SchemaPin
from policies.rules.base import (
    Judgement,
    at_least,
    at_most,
    block_of,
    equal,
    holds,
    none_of,
    not_applicable,
    rule,
)

_TENSORS = tuple(sorted(FACTOR_KINDS))
_UPDATES = tuple(sorted(UPDATE_KINDS))


def _pin(facts: Facts, policy: Policy) -> tuple[SchemaPin, tuple[str, ...]] | None:
    """The schema that this kind's block names, and its place in the file."""
    block, _ = block_of(facts, policy)
    if block is None:
        return None
    return policy.file.lora_schemas[block.schema_name], ("lora_schemas", block.schema_name)


def _before_transforms(facts: Facts) -> bool:
    """Only a sender transforms, so only its offer is spared the limits that the transform establishes."""
    return bool(facts["stage"] == OFFERED and facts["direction"] == "egress")


@rule("schema", "SCHEMA_MISMATCH", *_TENSORS)
def schema(facts: Facts, policy: Policy, history: History) -> Judgement:
    """The schema measured against, and the one the header names, are the pinned one."""
    pinned = _pin(facts, policy)
    if pinned is None:
        return not_applicable()
    pin, path = pinned
    key = "schema_sha256" if facts["schema_sha256"] != pin.sha256 else "header_schema_sha256"
    return equal(facts[key], pin.sha256, (*path, "sha256"))


@rule("tensor set", "TENSOR_SET", *_TENSORS)
def tensor_set(facts: Facts, policy: Policy, history: History) -> Judgement:
    """No tensor missing, added, renamed or repeated, and values given for each."""
    _, path = block_of(facts, policy)
    if facts["tensors_given"] is not True or facts["tensors"] < 1:
        return holds(False, (*path, "schema"))
    wrong = facts["tensors_missing"] + facts["tensors_unexpected"] + facts["tensors_repeated"]
    return none_of(wrong, (*path, "schema"))


@rule("frozen factors", "FROZEN", *_TENSORS)
def frozen(facts: Facts, policy: Policy, history: History) -> Judgement:
    """What the pinned schema freezes is in no update, and in every global adapter what the plan's seed draws (T6)."""
    pinned = _pin(facts, policy)
    if pinned is None:
        return not_applicable()
    pin, path = pinned[0], (*pinned[1], "freeze")
    if facts["freeze"] != pin.freeze:
        return equal(facts["freeze"], pin.freeze, path)
    if facts["kind"] != "global.adapter":
        return equal(FREEZE_OF_KIND[facts["kind"]], pin.freeze, path)
    if pin.freeze == "none":
        return not_applicable(path)
    return holds(facts["frozen_as_planned"], path)


@rule("tensor shapes", "TENSOR_SHAPE", *_TENSORS)
def shapes(facts: Facts, policy: Policy, history: History) -> Judgement:
    _, path = block_of(facts, policy)
    return none_of(facts["shapes_wrong"], (*path, "schema"))


@rule("tensor dtype", "TENSOR_DTYPE", *_TENSORS)
def dtype(facts: Facts, policy: Policy, history: History) -> Judgement:
    pinned = _pin(facts, policy)
    if pinned is None:
        return not_applicable()
    pin, path = pinned
    if facts["kind"] == "global.adapter" and facts["dtype"] == "float32":
        # The coordinator's master is float32 whatever the deltas travel in.
        return equal("float32", "float32", (*path, "dtype"))
    if facts["dtype_of_schema"] is not True:
        return holds(False, (*path, "dtype"), measured=facts["dtype"], limit=pin.dtype)
    return equal(facts["dtype"], pin.dtype, (*path, "dtype"))


@rule("rank and scale", "RANK", *_TENSORS)
def rank(facts: Facts, policy: Policy, history: History) -> Judgement:
    pinned = _pin(facts, policy)
    if pinned is None:
        return not_applicable()
    pin, path = pinned
    if facts["rank_of_schema"] is not True or facts["scale_of_schema"] is not True:
        return holds(False, (*path, "rank"), measured=facts["rank"], limit=pin.rank)
    return equal(facts["rank"], pin.rank, (*path, "rank"))


@rule("finite values", "NOT_FINITE", *_TENSORS)
def finite(facts: Facts, policy: Policy, history: History) -> Judgement:
    _, path = block_of(facts, policy)
    return none_of(facts["values_not_finite"], path)


@rule("canonical values", "NOT_CANONICAL", *_TENSORS)
def canonical(facts: Facts, policy: Policy, history: History) -> Judgement:
    """No -0 and no denormal: both are a bit pattern more than the number needs."""
    _, path = block_of(facts, policy)
    return not_applicable(path) if _before_transforms(facts) else none_of(facts["values_not_canonical"], path)


@rule("base adapter", "BASE_DIGEST", *_TENSORS)
def base(facts: Facts, policy: Policy, history: History) -> Judgement:
    """A delta names the adapter that the open round started from; whole factors name none."""
    _, path = block_of(facts, policy)
    key = "base_digest_empty" if facts["kind"] == "global.adapter" else "base_digest_of_round"
    return holds(facts[key], path)


@rule("value grid", "VALUE_GRID", *_UPDATES)
def grid(facts: Facts, policy: Policy, history: History) -> Judgement:
    block, path = block_of(facts, policy)
    if block is None or block.quantise.grid == "float32" or _before_transforms(facts):
        return not_applicable()
    return none_of(facts["values_off_bfloat16"], (*path, "quantise"))


@rule("L2 of the delta", "DELTA_L2", *_UPDATES)
def delta_l2(facts: Facts, policy: Policy, history: History) -> Judgement:
    block, path = block_of(facts, policy)
    if block is None or _before_transforms(facts):
        return not_applicable()
    return at_most(facts["l2"], block.max_l2, (*path, "max_l2"))


@rule("L2 of one tensor", "TENSOR_L2", *_UPDATES)
def tensor_l2(facts: Facts, policy: Policy, history: History) -> Judgement:
    block, path = block_of(facts, policy)
    if block is None or _before_transforms(facts):
        return not_applicable()
    return at_most(facts["tensor_l2_max"], block.max_tensor_l2, (*path, "max_tensor_l2"))


@rule("L2 of base and delta", "TOTAL_L2", *_UPDATES)
def total_l2(facts: Facts, policy: Policy, history: History) -> Judgement:
    """Upper bound: norm of the base plus norm of the delta."""
    block, path = block_of(facts, policy)
    if block is None or _before_transforms(facts):
        return not_applicable()
    return at_most(facts["total_l2_max"], block.max_total_l2, (*path, "max_total_l2"))


@rule("L2 of the adapter", "ADAPTER_L2", "global.adapter")
def adapter_l2(facts: Facts, policy: Policy, history: History) -> Judgement:
    block, path = block_of(facts, policy)
    return not_applicable() if block is None else at_most(facts["l2"], block.max_l2, (*path, "max_l2"))


@rule("L2 of the step", "ADAPTER_STEP", "global.adapter")
def adapter_step(facts: Facts, policy: Policy, history: History) -> Judgement:
    """How far an adapter is from the last one that was let in in this run, for each round in between (threat T20).

    So after n rounds it is at most n steps from the run's first adapter, whatever each round brought. That one has none
    before it: its own norm, the frozen factors and the round's transcript bound it. A step that cannot be measured,
    since the last adapter is gone or of another form, is refused.
    """
    block, path = block_of(facts, policy)
    if block is None:
        return not_applicable()
    path = (*path, "max_step_l2")
    if facts["first_of_run"] is True:
        return not_applicable(path)
    step, rounds = facts["step_l2"], facts["step_rounds"]
    return at_most(step / rounds if step is not None and rounds >= 1 else None, block.max_step_l2, path)


@rule("factor sets per round", "PER_ROUND", *_UPDATES)
def per_round(facts: Facts, policy: Policy, history: History) -> Judgement:
    block, path = block_of(facts, policy)
    if block is None:
        return not_applicable()
    return at_most(history.messages_in_round + 1, block.per_round, (*path, "per_round"))


def _elsewhere(facts: Facts) -> bool:
    """Only the site that trained knows on what, and the numbers do not cross the wire (threat T9)."""
    return bool(facts["direction"] != "egress")


@rule("records of the round", "MIN_RECORDS", *_UPDATES)
def records(facts: Facts, policy: Policy, history: History) -> Judgement:
    """Enough distinct private records, so that no update is one record's. Public steps alone are nobody's."""
    block, path = block_of(facts, policy)
    if block is None or _elsewhere(facts):
        return not_applicable()
    path = (*path, "min_records")
    if facts["records"] == 0:
        return Judgement("ok", 0, block.min_records, path)
    return at_least(facts["records"], block.min_records, path)


@rule("local epochs of the round", "LOCAL_EPOCHS", *_UPDATES)
def local_epochs(facts: Facts, policy: Policy, history: History) -> Judgement:
    """No record was given more often than this."""
    block, path = block_of(facts, policy)
    if block is None or _elsewhere(facts):
        return not_applicable()
    return at_most(facts["epochs"], block.max_local_epochs, (*path, "max_local_epochs"))


@rule("steps of the round", "STEPS", *_UPDATES)
def steps(facts: Facts, policy: Policy, history: History) -> Judgement:
    block, path = block_of(facts, policy)
    if block is None or _elsewhere(facts):
        return not_applicable()
    return at_most(facts["steps"], block.max_steps, (*path, "max_steps"))


RULES = (
    schema,
    tensor_set,
    frozen,
    shapes,
    dtype,
    rank,
    finite,
    canonical,
    base,
    grid,
    delta_l2,
    tensor_l2,
    total_l2,
    adapter_l2,
    adapter_step,
    per_round,
    records,
    local_epochs,
    steps,
)
