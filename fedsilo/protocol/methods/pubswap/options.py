"""Options of PubSwap's controls."""

from __future__ import annotations

from pydantic import Field

from fedsilo.protocol.plan import Options, Plan


class SelfSwap(Options):
    """further: the donors of a public prompt are the correct ones among so many times K further answers; None: as many
    times as there are other silos, whose answers swapping would bring."""

    further: int | None = Field(None, ge=0, le=64)

    @classmethod
    def samples(cls, plan: Plan) -> int:
        further = cls.of(plan).further
        return plan.samples_per_prompt * (1 + (further or 0))

    @classmethod
    def times(cls, plan: Plan) -> int:
        """Return how often K further answers are drawn."""
        further = cls.of(plan).further
        return len(plan.silos) - 1 if further is None else further
