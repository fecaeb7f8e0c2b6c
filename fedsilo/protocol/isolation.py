"""The isolation rungs a trainer may be under, in one order that silo, policy and coordinator share (threat_model 5)."""

from __future__ import annotations

from typing import Final, Literal, get_args

Rung = Literal["namespaces", "user", "container", "waived"]

RUNGS: Final[tuple[Rung, ...]] = get_args(Rung)  # best first


def rung_named(name: str) -> Rung:
    """The rung of that name.

    Raises:
        ValueError: no rung is called that; the message lists those that exist.
    """
    for rung in RUNGS:
        if rung == name:
            return rung
    raise ValueError(f"unknown rung {name!r}; known: {', '.join(RUNGS)}")


def rung_at_least(got: str, least: str) -> bool:
    """Whether `got` isolates no less than `least`; a word that names no rung isolates from nothing.

    Raises:
        ValueError: `least` names no rung, so that nothing can be said to meet it.
    """
    floor = RUNGS.index(rung_named(least))
    return any(rung == got for rung in RUNGS[: floor + 1])
