"""Who may change something at this console, and when: the lock, keys typed alone, and the signing of an order.

It is locked until somebody unlocks it, and locks itself after 15 idle minutes. What is sent is signed with the person's
own key for this one request; the daemon verifies certificate, signature, expiry, role and request id (threat T36). A
request that may have arrived keeps its id for the next two minutes, so that giving it again cannot count twice.

A changing key is offered, and acts only when it stood alone: an unbracketed paste arrives as keys in a burst, so a key
that follows or precedes another by less than 40 ms changes nothing. After a screen change, or when the row under the
cursor went away, changing keys are inert for 400 ms, so that nobody confirms what has just slid under his finger.
What was refused or taken back is said each time.

Does not stop: somebody at the keyboard of a person who unlocked it. Pure but for the signer, which may wait; the time
comes in, and for a key that is when it was pressed: a busy console looks at a paste key by key, with pauses in between.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

from console.feed import Person, Signer, unlock
from console.orders import Order
from fedsilo.control.client import COMMAND_VALID_SECONDS
from fedsilo.protocol.errors import FedSiloError, NotAllowedError, UnreachableError
from fedsilo.views.overview import Lock

INERT_SECONDS = 0.4
BURST_SECONDS = 0.04
BURST = "keys came faster than hands type: nothing was done"


class KeyGate:
    def __init__(self) -> None:
        self._last = -inf
        self._previous = -inf
        self._changed = -inf
        self._pending: tuple[str, float] | None = None

    def key(self, now: float) -> str:
        """Some key was pressed. Call it for every key, before what the key does. Returns what to say when it takes back
        what the key before it offered, or nothing."""
        taken_back = self._pending is not None and now - self._pending[1] < BURST_SECONDS
        if taken_back:
            self._pending = None
        self._previous, self._last = self._last, now
        return BURST if taken_back else ""

    def in_burst(self, now: float) -> bool:
        """A key that is pressed now follows another one sooner than hands type."""
        return now - self._last < BURST_SECONDS

    def screen_changed(self, now: float) -> None:
        self._changed = now
        self._pending = None

    def offer(self, name: str, now: float) -> str:
        """A changing key asks to act; it acts at `settle`. Returns why it may not, or nothing."""
        if now - self._changed < INERT_SECONDS:
            return "the screen has just changed: look, then press it again"
        if now - self._previous < BURST_SECONDS:
            self._pending = None
            return BURST
        self._pending = (name, now)
        return ""

    def settle(self, now: float) -> str | None:
        """Return the offered key once it has stood alone long enough, and only once."""
        if self._pending is None or now - self._pending[1] < BURST_SECONDS:
            return None
        name = self._pending[0]
        self._pending = None
        return name


IDLE_LOCK_SECONDS = 15 * 60.0


@dataclass(frozen=True)
class KeyFiles:
    """The operator's certificate and key; who has them may unlock."""

    certificate: Path
    key: Path


@dataclass(frozen=True)
class Outcome:
    """The outcome of an order: a sentence for people, whether the daemon took it, and what it answered."""

    text: str
    ok: bool
    result: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Signing:
    """Args:
    signer: None for a console that can only look.
    key_files: of the person at this console.
    site: whose daemon this should be; empty for whichever answers.
    read_only: no unlocking.
    clock: monotonic seconds."""

    signer: Signer | None
    key_files: KeyFiles | None
    site: str
    read_only: bool
    clock: Callable[[], float]
    person: Person | None = None
    last_input: float = 0.0
    _unsure: tuple[str, str, float] = ("", "", 0.0)  # what may have arrived, its request id, and until when that holds

    def __post_init__(self) -> None:
        self.read_only = self.read_only or self.signer is None
        self.last_input = self.clock()

    # ---- the lock ----------------------------------------------------------------------------------

    @property
    def lock(self) -> Lock:
        left = max(self.last_input + IDLE_LOCK_SECONDS - self.clock(), 0.0)
        return Lock(self.person.name if self.person else "", left, self.read_only)

    def lock_when_idle(self) -> bool:
        """True when it locked itself just now."""
        if self.person is None or self.lock.seconds_left > 0:
            return False
        self.person = None
        return True

    def toggle(self, there: str = "") -> str:
        """Unlock or lock. Returns what there is to say, or nothing.

        Args:
            there: the site of the daemon that answers, once it is known; nobody of another one may sign for it.
        """
        if self.person is not None:
            self.person = None
            return "locked"
        if self.read_only:
            return "this console is read-only"
        if self.key_files is None:
            return "no key: start it with --operator-certificate FILE --operator-key FILE"
        try:
            person = unlock(self.key_files.certificate, self.key_files.key)
            if (self.site or there) and (wrong := _of_elsewhere(person, self.site or there)):
                raise NotAllowedError(wrong, hint=f"this is {self.site or there}")
        except FedSiloError as error:
            return f"stays locked: {error.message}. {error.hint}".strip()
        self.person, self.last_input = person, self.clock()
        return ""

    def why_not(self, site: str) -> str:
        """Why nobody can sign for a site here now, or nothing."""
        if self.read_only:
            return "this console is read-only"
        if not self.lock.open:
            return "LOCKED: press L to unlock"
        return _of_elsewhere(self.person, site) if self.person is not None else ""

    # ---- giving ------------------------------------------------------------------------------------

    def carry_out(self, order: Order, person: Person) -> Outcome:
        """Sign it and wait for the daemon. For a worker thread; one at a time."""
        if self.signer is None:
            return Outcome("this console is read-only", ok=False)
        arguments = order.arguments()
        same = json.dumps([person.name, order.command, dict(arguments)], sort_keys=True)
        before, request_id, until = self._unsure
        again = before == same and self.clock() < until
        request_id = request_id if again else order.request_id
        # the daemon answers a repetition with its first answer, so a second one under this id changes nothing
        unsure = (same, request_id, until if again else self.clock() + COMMAND_VALID_SECONDS)
        self._unsure = ("", "", 0.0)
        try:
            result = self.signer.carry_out(person, order.command, arguments, request_id)
            return Outcome(order.told(person.name, result), ok=True, result=result)
        except UnreachableError as error:
            why = error.message
        except FedSiloError as error:
            return Outcome(f"refused: {error.message} [{error.code}] {error.hint}".rstrip(), ok=False)
        except Exception as error:  # noqa: BLE001  # of a library, or an answer of another shape; its text is anybody's
            why = f"a fault of the console's own, {type(error).__name__}"
        self._unsure = unsure
        return Outcome(f"not known whether it arrived: {why}. Giving it again cannot count twice.", ok=False)


def _of_elsewhere(person: Person, site: str) -> str:
    """Why this person cannot sign at a site, or nothing."""
    home = person.operator.site
    return f"{person.name} is a person of {home}, not of this site" if home != site else ""
