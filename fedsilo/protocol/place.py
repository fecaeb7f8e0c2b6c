"""The place of a message: the run, round, step and kind that its envelope, decision, log record and ledger row name."""

from __future__ import annotations

from typing import NamedTuple


class Place(NamedTuple):
    """One place in a federation.

    Attributes:
        run: empty outside of any.
        round, step: 0 outside of one.
        kind: of the message.
    """

    run: str
    round: int
    step: int
    kind: str


class Placed:
    """Base class of what has a place; its parts can be read from it directly."""

    place: Place

    @property
    def run(self) -> str:
        return self.place.run

    @property
    def round(self) -> int:
        return self.place.round

    @property
    def step(self) -> int:
        return self.place.step

    @property
    def kind(self) -> str:
        return self.place.kind
