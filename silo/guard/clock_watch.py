"""The guard's clock, held against what knows better than it (threat T41); the decision is in `fedsilo.protocol.clocks`.

`time` is what everything here judges and stores by: the clock while it is believed, else what it should show. So a
wrong answer of a time server reaches neither ledger nor log nor a person's command. The guard looks at `fault` between
two messages and halts; an approver's `silo resume --accept-clock` ends that.

Does not stop: a jump below the limits; whoever may set the clock and keep the coordinator away at a start, who can make
things expire early (nothing that has expired comes back).
"""

from __future__ import annotations

import secrets
import threading
import time as system_time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from certs.commands import VerifiedCommand
from fedsilo.protocol import clocks
from fedsilo.protocol.clocks import HALTING, Judged, Verdict, apart, in_words, judge, utc
from fedsilo.protocol.codec import canonical_json, sha256_hex
from fedsilo.protocol.errors import ConflictError, NotFoundError, OperationError
from silo.guard.ledger import Ledger

RELEASE_HINT = (
    "set right the clock that is wrong, this machine's or the coordinator's; an approver ends it: "
    "silo resume --accept-clock --operator NAME"
)
SLEPT_SECONDS_MIN = 60.0  # a suspend: shorter, and the machine only stuttered


@dataclass(frozen=True)
class ClockHalt:
    """A halt for the clock, and its reason. `nonce`: no acceptance of another halt fits this one (T36)."""

    code: str
    seconds: float  # by how much the clock was off
    showed: float  # UTC seconds that it showed
    should: float  # UTC seconds that it should have shown
    against: str
    nonce: str

    @property
    def digest(self) -> str:
        """Digest that an acceptance is signed over."""
        return sha256_hex(canonical_json(["fedsilo clock", self.code, self.showed, self.should, self.nonce]))

    @property
    def message(self) -> str:
        if self.code == Verdict.STORED_AHEAD:
            words = f"the latest time seen here is {in_words(self.seconds)} ahead of the clock, which showed"
            return f"{words} {utc(self.showed)}"
        word = "ahead of" if self.code == Verdict.AHEAD else "behind"
        return f"the clock showed {utc(self.showed)}, {in_words(self.seconds)} {word} {self.against}"


def look_offline(ledger: Ledger, now: float) -> tuple[str, str]:
    """Return what a ledger says of this machine's clock, for a check beside the daemon: words, and a warning or
    nothing.

    Args:
        ledger: it may be open for reading only.
        now: UTC seconds that the clock shows.

    Raises:
        OperationError: the silo is halted for its clock, or would be at its start.
    """
    halt, stored, compared = ledger.clock_halt, ledger.latest_time, ledger.clock_difference
    if halt:
        raise OperationError(ClockHalt(**halt).message, hint=RELEASE_HINT, code=str(halt["code"]))
    if (judged := judge(now, stored=stored, offline=True)).verdict in HALTING:
        words_of_halt = f"the latest time seen here, {utc(stored)}, is {in_words(judged.seconds)} ahead of the clock"
        raise OperationError(words_of_halt, hint=RELEASE_HINT, code=str(judged.verdict))
    words, warning = utc(now), ""
    if stored - now > clocks.TOLD_SECONDS:
        warning = (
            f"this machine's clock is {in_words(stored - now)} behind the latest time seen: time stands still here"
        )
    if compared:
        off, at = compared["seconds"], utc(compared["at"])
        as_theirs = abs(off) <= clocks.TOLD_SECONDS
        words += f"; {'as' if as_theirs else apart(off)} the coordinator's when they were compared, {at}"
        if not as_theirs and not warning:
            warning = f"this machine's clock was {apart(off)} the coordinator's at {at}: beyond 1 h a start halts"
    return words, warning


def slept() -> float:
    """Seconds that this machine was suspended since it was started."""
    boot = getattr(system_time, "CLOCK_BOOTTIME", system_time.CLOCK_MONOTONIC)
    return system_time.clock_gettime(boot) - system_time.clock_gettime(system_time.CLOCK_MONOTONIC)


class ClockWatch:
    """Thread-safe: people's commands are judged by it in threads of their own. The ledger is never asked under its
    mutex, since the audit log asks for the time while it holds the ledger.

    Args:
        ledger: knows the latest time, and a halt that stands.
        asks: whether there is a coordinator on a line, whose signed time comes.
        wall, monotonic, slept: seconds.

    Attributes:
        fault: why the clock is not believed; None while it is.
        difference: by how much the clock was ahead of the coordinator's when it was last compared; None: not yet.
        jumped: seconds of jumps and gaps below the limits that nobody has recorded yet.
    """

    def __init__(
        self,
        ledger: Ledger,
        *,
        asks: bool,
        wall: Callable[[], float] = system_time.time,
        monotonic: Callable[[], float] = system_time.monotonic,
        slept: Callable[[], float] = slept,
    ) -> None:
        self._ledger = ledger
        self._wall, self._monotonic, self._slept = wall, monotonic, slept
        self._mutex = threading.RLock()
        self._stored = ledger.latest_time
        self._believed: tuple[float, float] | None = None  # what the clock showed, and the monotonic one at that moment
        self._signed: tuple[float, float] | None = None  # the same of the coordinator's
        self._before: tuple[float, float] | None = None  # what was believed before an acceptance
        self._asks, self._offline, self._compared = asks, not asks, False
        self._slept_before = slept()
        self.difference: float | None = None
        self.jumped = self._ahead_told = 0.0
        halt = ledger.clock_halt
        self.fault: ClockHalt | None = ClockHalt(**halt) if halt else None

    def begin(self, latest: float) -> None:
        """Judge by the audit log's latest time, too, once that is known. latest: UTC seconds."""
        with self._mutex:
            self._stored, self._believed, self.jumped = max(self._stored, latest), None, 0.0
        self.look()

    # ---- what time it is ---------------------------------------------------------------------------

    def wall(self) -> float:
        """Return the time that the clock shows, believed or not, in UTC seconds."""
        return self._wall()

    def time(self) -> float:
        """UTC seconds to judge and store by."""
        return self.look().time

    def people_time(self) -> float:
        """UTC seconds that a person's command is judged by: what the clock shows, unless it is known to have jumped."""
        judged = self.look()
        with self._mutex:
            return self._wall() if self._believed is None else judged.time

    def look(self) -> Judged:
        """The clock at this moment. A jump is a `fault` from then on, also where it is right again a moment later."""
        self._notice_suspend()
        with self._mutex:
            wall, monotonic = self._wall(), self._monotonic()
            ran = None if self._believed is None else self._believed[0] + monotonic - self._believed[1]
            if self.fault is not None:
                should = self._stored if ran is None else max(ran, self._stored)
                return Judged(Verdict(self.fault.code), self.fault.seconds, should)
            judged = judge(wall, stored=self._stored, ran=ran, compared=self._compared, offline=self._offline)
            if judged.verdict in HALTING:
                known = "the latest time seen here" if ran is None else "what it should by the monotonic clock"
                self._is_wrong(judged, wall, known)
            elif judged.verdict == Verdict.GOOD and ran is None:
                self._believed, self._ahead_told = (wall, monotonic), 0.0
                if judged.seconds > clocks.SIGNED_SECONDS_MAX + clocks.SLACK_SECONDS:
                    self.jumped += judged.seconds  # nobody could vouch for it
            elif judged.verdict == Verdict.GOOD:
                self._ahead_told = min(self._ahead_told, judged.seconds)  # gone back: the next jump is news again
                if judged.seconds > self._ahead_told + clocks.TOLD_SECONDS:
                    self.jumped += judged.seconds - self._ahead_told
                    self._ahead_told = judged.seconds  # what it was believed at stays, so that small jumps add up
            return judged

    @property
    def unknown(self) -> bool:
        """Nobody has vouched for the clock yet: nothing expires by it, and nobody is answered by it."""
        return self.look().verdict == Verdict.UNKNOWN

    def _notice_suspend(self) -> None:
        slept = self._slept()
        stored = self._ledger.latest_time if slept - self._slept_before > SLEPT_SECONDS_MIN else 0.0
        with self._mutex:
            if slept - self._slept_before > SLEPT_SECONDS_MIN and self._believed is not None:
                self._stored = max(self._stored, stored)
                self._believed, self._compared, self._offline = None, False, not self._asks
            self._slept_before = max(slept, self._slept_before)

    def _is_wrong(self, judged: Judged, wall: float, known: str) -> None:
        """Stop believing the clock at once, not at the guard's next look: every later answer must be the same."""
        should = wall + (-judged.seconds if judged.verdict == Verdict.AHEAD else judged.seconds)
        self.fault = ClockHalt(str(judged.verdict), judged.seconds, wall, should, known, secrets.token_hex(16))

    # ---- what knows better -------------------------------------------------------------------------

    def compare(self, signed: float, took: float) -> None:
        """Take in a time that the coordinator signed. It decides after a start or a suspend; later, people are told.

        Args:
            signed: UTC, whole seconds.
            took: seconds between our asking and its answer, in which it signed.
        """
        latest, accepted = self._ledger.latest_time, self._ledger.clock_accepted
        with self._mutex:
            wall, monotonic = self._wall(), self._monotonic()
            # It signed at some moment in between; what that leaves open speaks for the clock.
            most, least = wall - signed, wall - signed - took - 1.0
            before, difference = self.difference, 0.0 if least <= 0.0 <= most else min(most, least, key=abs)
            self.difference, self._signed = difference, (wall - difference, monotonic)
            if not self._compared and self.fault is None:
                # An approver may have accepted that they differ; that the coordinator's is right by now is good, too.
                differs = min(difference, difference - accepted, key=abs)
                judged = judge(wall, stored=max(self._stored, latest), signed=wall - differs)
                if judged.verdict in HALTING:
                    self._is_wrong(judged, wall, "the coordinator's signed time")
                else:
                    self._compared, self._believed, self._ahead_told = True, (wall, monotonic), 0.0
        if before is None or abs(difference - before) > clocks.SLACK_SECONDS:
            self._ledger.keep_clock_difference(difference, wall)

    def nobody_answers(self) -> None:
        """The coordinator cannot be asked: a site that was off for a weekend goes on, and the gap is told of."""
        with self._mutex:
            self._offline = True

    # ---- people ------------------------------------------------------------------------------------

    def begin_acceptance(self, command: VerifiedCommand) -> ClockHalt:
        """A person accepts the clock as it is now: from here on it is believed. The halt that ends, for `restore`.

        Raises:
            NotFoundError: the clock is believed already.
            ConflictError: it is of another halt than the person was shown.
        """
        with self._mutex:
            fault = self.fault
            if fault is None:
                raise NotFoundError("nothing is halted for its clock here", hint="`silo status` shows what is")
            if str(command.arguments.get("halt", "")) != fault.digest:
                hint = "read it again: `silo status`"
                raise ConflictError("the clock's halt is not the one that was shown", hint=hint, code="STALE_VIEW")
            self._before = self._believed
            self.fault, self._believed = None, (self._wall(), self._monotonic())
            return fault

    def restore(self, fault: ClockHalt) -> None:
        """The acceptance could not be recorded: all is as before."""
        with self._mutex:
            self.fault, self._believed = fault, self._before

    def to_accept(self) -> tuple[float, float]:
        """Return what the clock shows, and by how much it differs from the coordinator's beyond the limit, which is
        accepted with it: 0 where they agree, or were not compared since the start."""
        with self._mutex:
            wall, monotonic = self._wall(), self._monotonic()
            differs = 0.0 if self._signed is None else wall - self._signed[0] - (monotonic - self._signed[1])
            return wall, differs if abs(differs) > clocks.SIGNED_SECONDS_MAX else 0.0

    def accepted(self, now: float) -> None:
        """End the acceptance, which is recorded and stored: no later time than this is compared with any more."""
        with self._mutex:
            self._stored, self.jumped, self._ahead_told = now, 0.0, 0.0
            self._compared, self._offline = False, True

    def state(self) -> dict[str, object]:
        """Return the present halt and what the coordinator's clock says, for people."""
        fault, differs = self.fault, self.difference
        return {
            "halt": None if fault is None else {**asdict(fault), "digest": fault.digest, "message": fault.message},
            "difference_seconds": None if differs is None else round(differs),
            "told": ""
            if differs is None or abs(differs) <= clocks.TOLD_SECONDS
            else f"{apart(differs)} the coordinator's",
        }
