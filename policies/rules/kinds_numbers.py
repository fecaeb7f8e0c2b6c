"""Rules on figures of a silo's training beside metrics.eval: drift, and the number of examples (threat T9).

What they do not stop: what the figures say by being true. A number of examples discloses the size of a site's data.
"""

from __future__ import annotations

from policies.history import History
from policies.load import Policy
from policies.message import Facts
from policies.rules.base import Judgement, block_of, none_of, not_applicable, rule
from policies.rules.kinds import off_grid, out_of_range


@rule("drift figures", "METRIC_NAME", "diag.drift")
def names(facts: Facts, policy: Policy, history: History) -> Judgement:
    """Names from the policy, in order, each once."""
    block, path = block_of(facts, policy)
    if block is None:
        return not_applicable()
    unlisted = sum(name not in block.fields for name, _ in facts["diagnostics"])
    wrong = facts["diagnostics_at_fault"] + facts["diagnostics_out_of_order"] + unlisted
    return none_of(wrong, (*path, "fields"))


@rule("drift range", "METRIC_RANGE", "diag.drift")
def drift_range(facts: Facts, policy: Policy, history: History) -> Judgement:
    block, path = block_of(facts, policy)
    if block is None:
        return not_applicable()
    found = [([value], block.fields.get(name)) for name, value in facts["diagnostics"]]
    return none_of(sum(grid is None or out_of_range(value, grid) for value, grid in found), (*path, "fields"))


@rule("drift grid", "METRIC_GRID", "diag.drift")
def drift_grid(facts: Facts, policy: Policy, history: History) -> Judgement:
    block, path = block_of(facts, policy)
    if block is None:
        return not_applicable()
    found = [([value], block.fields.get(name)) for name, value in facts["diagnostics"]]
    return none_of(sum(grid is None or off_grid(value, grid) for value, grid in found), (*path, "fields"))


@rule("number of examples", "EXAMPLES", "count.examples")
def examples(facts: Facts, policy: Policy, history: History) -> Judgement:
    """In range, and rounded as the policy says."""
    block, path = block_of(facts, policy)
    if block is None:
        return not_applicable()
    wrong = out_of_range(facts["values"], block.values) + off_grid(facts["values"], block.values)
    return none_of(wrong, (*path, "values"))


RULES = (names, drift_range, drift_grid, examples)
