"""Rules on interventions: the policy's layers and groups, finite, within the norms, R orthonormal (T1, T2, T4, T7).

They judge reft.intervention and reft.aggregate, whole values both. What they do not stop: information in the low bits
of allowed values, and in the choice of R among rotations that do the same (N1, methods 5.1).
"""

from __future__ import annotations

from policies.history import History
from policies.load import Policy
from policies.message import OFFERED, Facts
from policies.rules.base import (
    Judgement,
    block_of,
    equal,
    holds,
    none_of,
    not_applicable,
    rule,
)
from policies.rules.kinds import fact, limit_rule

_REFT = ("reft.intervention", "reft.aggregate")


@rule("interventions", "TENSOR_SET", *_REFT)
def tensor_set(facts: Facts, policy: Policy, history: History) -> Judgement:
    """W, R and b of each layer and group of the policy, once; none else, and values given for each."""
    block, path = block_of(facts, policy)
    if block is None:
        return not_applicable()
    for key in ("layers", "groups"):
        if tuple(facts[key]) != getattr(block, key):
            return holds(False, (*path, key), measured=len(facts[key]), limit=list(getattr(block, key)))
    wrong = facts["tensors_missing"] + facts["tensors_unexpected"]
    return holds(facts["tensors_given"], path) if wrong == 0 else none_of(wrong, (*path, "layers"))


@rule("intervention shapes", "TENSOR_SHAPE", *_REFT)
def shapes(facts: Facts, policy: Policy, history: History) -> Judgement:
    block, path = block_of(facts, policy)
    if block is None:
        return not_applicable()
    for key in ("rank", "width"):
        if facts[key] != getattr(block, key):
            return equal(facts[key], getattr(block, key), (*path, key))
    return none_of(facts["shapes_wrong"], path)


@rule("intervention header", "HEADER", *_REFT)
def header(facts: Facts, policy: Policy, history: History) -> Judgement:
    """dtype and rank are the policy's; base, schema and scale, which an intervention has not, say nothing."""
    block, path = block_of(facts, policy)
    if block is None:
        return not_applicable()
    if facts["dtype"] != block.dtype:
        return equal(facts["dtype"], block.dtype, (*path, "dtype"))
    if facts["header_rank"] != block.rank:
        return equal(facts["header_rank"], block.rank, (*path, "rank"))
    plain = facts["base_digest_empty"] is True and facts["header_schema_empty"] is True and facts["header_scale"] == 1
    return holds(plain, path)


@rule("finite interventions", "NOT_FINITE", *_REFT)
def finite(facts: Facts, policy: Policy, history: History) -> Judgement:
    _, path = block_of(facts, policy)
    return none_of(facts["values_not_finite"], path)


@rule("canonical interventions", "NOT_CANONICAL", *_REFT)
def canonical(facts: Facts, policy: Policy, history: History) -> Judgement:
    """No -0 and no denormal: both are a bit pattern more than the number needs."""
    _, path = block_of(facts, policy)
    if facts["stage"] == OFFERED and facts["direction"] == "egress":
        return not_applicable(path)  # the gate writes them as 0
    return none_of(facts["values_not_canonical"], path)


@rule("intervention grid", "VALUE_GRID", *_REFT)
def grid(facts: Facts, policy: Policy, history: History) -> Judgement:
    block, path = block_of(facts, policy)
    if block is None or block.dtype == "float32" or (facts["stage"] == OFFERED and facts["direction"] == "egress"):
        return not_applicable()
    return none_of(facts["values_off_bfloat16"], (*path, "dtype"))


RULES = (
    tensor_set,
    shapes,
    header,
    finite,
    canonical,
    grid,
    limit_rule("L2 of the interventions", "DELTA_L2", "max_l2", _REFT, fact("l2")),
    limit_rule("L2 of one intervention tensor", "TENSOR_L2", "max_tensor_l2", _REFT, fact("tensor_l2_max")),
    limit_rule(
        "rows of R orthonormal",
        "ORTHONORMAL",
        "max_orthonormality_error",
        ["reft.intervention"],
        fact("orthonormality_error"),
    ),
)
