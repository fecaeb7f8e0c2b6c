"""All rules, in the order of threat model 4. An empty list would deny; the engine sees to that."""

from __future__ import annotations

from policies.rules import approvals, envelope, ingress, metrics, responses, tensors, volume
from policies.rules.base import Rule

RULES: tuple[Rule, ...] = (
    *envelope.RULES,
    *volume.RULES,
    *tensors.RULES,
    *responses.RULES,
    *metrics.RULES,
    *ingress.RULES,
    *approvals.RULES,
)
