"""The life of a run and of a round as transition tables. The store keeps the state's name; a move that is not in the
table is a conflict, whoever asks for it."""

from __future__ import annotations

from collections.abc import Mapping

from fedsilo.treaty.errors import ConflictError

Table = Mapping[str, Mapping[str, str]]  # state -> event -> next state

RUN: Table = {
    "waiting": {"start": "running", "pause": "paused", "abort": "aborted", "fail": "failed"},
    "running": {"pause": "paused", "finish": "finished", "fail": "failed", "abort": "aborted"},
    "paused": {"resume": "running", "abort": "aborted", "fail": "failed"},
    "finished": {},
    "failed": {},
    "aborted": {},
}

ROUND: Table = {
    "open": {"commit": "committing", "abandon": "abandoned"},
    "committing": {"committed": "committed", "abandon": "abandoned"},
    "committed": {},
    "abandoned": {},
}


def advance(table: Table, state: str, event: str) -> str:
    """The next state. Raises ConflictError: the event is not possible in this state; the hint lists what is."""
    moves = table[state]
    if event not in moves:
        possible = ", ".join(moves) or "nothing, it has ended"
        raise ConflictError(f"cannot {event} what is {state}", hint=f"possible now: {possible}")
    return moves[event]


def is_terminal(table: Table, state: str) -> bool:
    return not table[state]
