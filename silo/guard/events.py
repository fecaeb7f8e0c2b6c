"""What the guard's loop waits for: the trainer's words and its end, work that people or queries ask for, a wake-up."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from silo.guard.supervisor import TrainerGone, TrainerSaid


@dataclass
class Command:
    """Something a person or a query wants done on the loop's thread."""

    work: Callable[[], Any]
    result: Future[Any] = field(default_factory=Future)


@dataclass(frozen=True)
class Wake:
    """Nothing but: look again."""


@dataclass(eq=False)
class Done:
    """Work that was done aside is done. noticed: by whoever waits for it, or for other work that began later."""

    noticed: bool = False


Event = TrainerSaid | TrainerGone | Command | Wake | Done
