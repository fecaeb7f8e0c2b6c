"""All rules, in the order of threat model 4. An empty list would deny; the engine sees to that."""

from __future__ import annotations

from policies.rules import (
    approvals,
    audit,
    envelope,
    ingress,
    kinds,
    kinds_knowledge,
    kinds_reft,
    kinds_scores,
    metrics,
    responses,
    screens,
    tensors,
    volume,
)
from policies.rules.base import Rule

# Of the kinds that methods beside PubSwap send and take in.
RULES_OF_KINDS: tuple[Rule, ...] = (
    *kinds.RULES,
    *kinds_reft.RULES,
    *kinds_scores.RULES,
    *kinds_knowledge.RULES,
)
RULES: tuple[Rule, ...] = (
    *envelope.RULES,
    *volume.RULES,
    *tensors.RULES,
    *responses.RULES,
    *metrics.RULES,
    *RULES_OF_KINDS,
    *ingress.RULES,
    *audit.RULES,
    *screens.RULES,
    *approvals.RULES,
)
