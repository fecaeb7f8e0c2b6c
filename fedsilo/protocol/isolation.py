"""The isolation levels of a trainer, in one order that silo, policy and coordinator share."""

from __future__ import annotations

from typing import Final, Literal, get_args

IsolationLevel = Literal["namespaces", "user", "container", "waived"]

ISOLATION_LEVELS: Final[tuple[IsolationLevel, ...]] = get_args(IsolationLevel)  # best first


def isolation_level(name: str) -> IsolationLevel:
    """Return the isolation level of that name.

    Raises:
        ValueError: no isolation level is called that; the message lists those that exist.
    """
    for level in ISOLATION_LEVELS:
        if level == name:
            return level
    raise ValueError(f"unknown isolation level {name!r}; known: {', '.join(ISOLATION_LEVELS)}")


def isolates_at_least(got: str, least: str) -> bool:
    """Return True if `got` isolates no less than `least`; a word that names no isolation level isolates from nothing.

    Raises:
        ValueError: `least` names no isolation level, so that nothing can be said to meet it.
    """
    floor = ISOLATION_LEVELS.index(isolation_level(least))
    return any(level == got for level in ISOLATION_LEVELS[: floor + 1])
