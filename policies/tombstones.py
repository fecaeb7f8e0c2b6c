"""Kinds that no method sends any more: null in a policy's digest and in what a ledger keeps of one, refused when a
file names them, replayed when an old log has them. Their names and protobuf numbers are not given to another kind.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field
from pydantic.json_schema import SkipJsonSchema

from policies.fields import Closed, Grid, Limit, PinnedText

# Each with the kind behind which its null stands in a policy that is printed.
GONE = {
    "public.rewards": "reft.intervention",
    "diag.drift": "knowledge.package",
    "count.examples": "knowledge.package",
}


class _GoneError(ValueError):
    hint = "take the block out: nothing of that kind leaves or comes in"


def _gone(block: object) -> None:
    """Refuse a block of a kind that no method sends any more."""
    if block is not None:
        raise _GoneError("no method of this version sends this kind")


# Such a kind's block: null, as it was where no policy named the kind, so that such a policy is still the same.
Gone = Annotated[None, BeforeValidator(_gone), SkipJsonSchema()]


def without_gone(content: dict[str, Any]) -> dict[str, Any]:
    """A policy as an older version kept it, without its blocks of such kinds: to take one out only tightens."""
    return {**content, "egress": {**content.get("egress", {}), **dict.fromkeys(GONE)}}


class _PublicRewards(Closed):
    set: PinnedText
    max_prompts_per_step: Limit
    samples_per_prompt: Limit
    per_round: Limit


class _DiagDrift(Closed):
    fields: dict[str, Grid]
    per_round: Limit


class _CountExamples(Closed):
    values: Grid
    per_round: Limit


class GoneBlocks(Closed):
    """Such blocks of a policy that a site kept: they allow nothing, and are part of the digest that its log names."""

    public_rewards: _PublicRewards | None = Field(None, alias="public.rewards")
    diag_drift: _DiagDrift | None = Field(None, alias="diag.drift")
    count_examples: _CountExamples | None = Field(None, alias="count.examples")


NO_GONE_BLOCKS = GoneBlocks()
