"""What a person may ask for around a held release without answering it: to be asked later, to read what would leave.

Both are signed, for the daemon's log says who did; both are off under the same conditions as an answer. Pure.
Does not stop: somebody who puts off until it expires. That is a refusal, and the log has both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from console.drawing import duration_text
from console.orders import Order
from console.reading import number
from console.signing import record_text
from console.values import Release, Snapshot, why_not_answer

MINUTES: Mapping[str, int] = {"1": 10, "2": 30, "3": 120}  # by the key that chooses them
_MINUTE_SECONDS = 60.0
SECONDS_MAX = 253_402_300_799  # the last second of the year 9999, beyond which `datetime` has none


@dataclass(frozen=True)
class ReleaseOrder(Order):
    """An order about one held release, as it was shown."""

    release: Release | None = None

    def why_not(self, snapshot: Snapshot, person: str, now: float) -> str:
        if self.release is None:
            return "there is no release"
        return why_not_answer(self.release, snapshot, now, approve=False)


@dataclass(frozen=True)
class Deferral(ReleaseOrder):
    def why_not(self, snapshot: Snapshot, person: str, now: float) -> str:
        if why := super().why_not(snapshot, person, now):
            return why
        until, time = number(self.bound.get("until_seconds")), snapshot.server_now(now)
        if until <= time:
            return "that time is over; choose again"
        if self.release is not None and until >= self.release.expires_at:
            left = duration_text(self.release.expires_at - time)
            return f"it expires before that, in {left}: choose a shorter time, or answer it"
        return ""

    def told(self, person: str, result: Mapping[str, Any]) -> str:
        until = number(result.get("deferred_until")) or number(self.bound.get("until_seconds"))
        return f"put off by {person} until {clock_text(until)}{record_text(result)}; it expires all the same"


@dataclass(frozen=True)
class PayloadReading(ReleaseOrder):
    def told(self, person: str, result: Mapping[str, Any]) -> str:
        return f"read by {person}{record_text(result)}"


def deferral(release: Release, minutes: int, time: float) -> Deferral:
    """Args:
    release: as it is shown.
    minutes: from then.
    time: seconds since 1970, the daemon's clock.
    """
    until = float(int(time + minutes * _MINUTE_SECONDS))
    return Deferral(
        "defer", "approvals.defer", release.id,
        f"until {clock_text(until)}, in {minutes} minutes, it does not count among what needs you. Others are asked as "
        "before, and it expires when it would",
        "It can be answered at any time.", "put off", "put off", _shown(release) | {"until_seconds": until}, key="d",
        release=release,
    )  # fmt: skip


def payload_reading(release: Release, person: str) -> PayloadReading:
    return PayloadReading(
        "payload", "approvals.payload", release.id,
        f"what would leave is shown here, and the audit log says that {person} read it; nothing is answered by it",
        "The record stays.", "read", "read", {"release": release.id, "digest": release.digest}, key="r",
        release=release,
    )  # fmt: skip


def choices(release: Release, time: float) -> dict[str, int]:
    """Minutes by key, those that end before the hold does."""
    return {key: minutes for key, minutes in MINUTES.items() if time + minutes * _MINUTE_SECONDS < release.expires_at}


def clock_text(seconds: float) -> str:
    """Such as 10:30Z, of seconds since 1970; a time that no calendar has becomes the nearest that one has."""
    return datetime.fromtimestamp(min(max(seconds, 0.0), SECONDS_MAX), UTC).strftime("%H:%MZ")


def _shown(release: Release) -> dict[str, Any]:
    return {
        "release": release.id, "digest": release.digest, "policy_digest": release.policy_digest,
        "revision": release.revision,
    }  # fmt: skip
