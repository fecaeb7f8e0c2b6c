"""What a side of `benchmarks.transport` found, and the figures that are made of it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MIB = 1 << 20
GB = 1e9
LARGE, SMALL = 69.6, 6.96
FEW, MANY = 4, 16
REQUIRED_MOST = {"n4_seconds": 2.0, "n16_seconds": 6.0, "cpu_seconds_per_gb": 4.0, "empty_round_seconds": 0.2}
REQUIRED_LEAST = {
    "ratio_nvflare_n4": 3.0, "ratio_nvflare_n16": 3.0, "ratio_flower_n4": 20.0, "ratio_flower_one_array_n4": 3.0,
}  # fmt: skip
PAYLOADS_MOST = 4  # peak memory of the server: its base and so many payloads, whatever N


@dataclass(frozen=True)
class Job:
    """One run of one side; its mean was right.

    Attributes:
        seconds: of each round.
        server_cpu_seconds: from the submission to the end, of the server and all its processes.
        crossed_bytes: payloads up and down, all silos and rounds together.
        server_base_bytes: resident before the submission.
        server_peak_bytes: at most, until the end.
        idle: while all wait: server_mib, client_mib, server_cpu_share, client_cpu_share.
    """

    seconds: Sequence[float]
    server_cpu_seconds: float
    crossed_bytes: float
    server_base_bytes: int
    server_peak_bytes: int
    idle: Mapping[str, float] = field(default_factory=dict)

    def row(self) -> dict[str, Any]:
        return {
            "round_seconds": [round(value, 3) for value in self.seconds],
            "server_cpu_seconds": round(self.server_cpu_seconds, 2),
            # of an empty round it says nothing
            "server_cpu_seconds_per_gb": round(self.server_cpu_seconds / (self.crossed_bytes / GB), 3)
            if self.crossed_bytes >= MIB
            else None,
            "server_base_mib": round(self.server_base_bytes / MIB, 1),
            "server_peak_mib": round(self.server_peak_bytes / MIB, 1),
            "idle": {name: round(value, 3) for name, value in self.idle.items()},
        }


@dataclass(frozen=True)
class Place:
    """Which job: `side` is ours, nvflare, flower or flower_one_array; `megabytes` 0 is the empty round."""

    side: str
    megabytes: float
    silos: int

    @property
    def name(self) -> str:
        return f"{self.side}_{self.megabytes:g}mb_n{self.silos}"


def figures_of(jobs: Mapping[Place, Sequence[Job]], *, light: int | None = None) -> dict[str, Any]:
    """The figures; None where a side or a size was not run. Of several jobs in one place, their median."""

    def seconds(side: str, silos: int, megabytes: float = LARGE) -> float | None:
        found = [value for job in jobs.get(Place(side, megabytes, silos), ()) for value in job.seconds]
        return statistics.median(found) if found else None

    def ratio(side: str, silos: int, megabytes: float = LARGE) -> float | None:
        """Of jobs that ran one after the other: the median over the pairs."""
        pairs = zip(
            jobs.get(Place(side, megabytes, silos), ()), jobs.get(Place("ours", megabytes, silos), ()), strict=False
        )
        found = [statistics.median(theirs.seconds) / statistics.median(ours.seconds) for theirs, ours in pairs]
        return round(statistics.median(found), 2) if found else None

    def of_ours(silos: int, name: str) -> list[float]:
        return [getattr(job, name) for job in jobs.get(Place("ours", LARGE, silos), ())]

    per_gb = [
        job.server_cpu_seconds / (job.crossed_bytes / GB)
        for silos in (FEW, MANY)
        for job in jobs.get(Place("ours", LARGE, silos), ())
    ]
    base = of_ours(FEW, "server_base_bytes") or of_ours(MANY, "server_base_bytes")
    return {
        "n4_seconds": _rounded(seconds("ours", FEW)),
        "n16_seconds": _rounded(seconds("ours", MANY)),
        "ratio_nvflare_n4": ratio("nvflare", FEW),
        "ratio_nvflare_n16": ratio("nvflare", MANY),
        "ratio_flower_n4": ratio("flower", FEW),
        "ratio_flower_one_array_n4": ratio("flower_one_array", FEW),
        "cpu_seconds_per_gb": _rounded(max(per_gb) if per_gb else None),
        "base_mib": _mib(base),
        "peak_mib_n4": _mib(of_ours(FEW, "server_peak_bytes")),
        "peak_mib_n16": _mib(of_ours(MANY, "server_peak_bytes")),
        "empty_round_seconds": _rounded(seconds("ours", FEW, 0.0)),
        "light_seconds": _rounded(seconds("ours", light, 0.0)) if light else None,
        "small_n4_seconds": _rounded(seconds("ours", FEW, SMALL)),
        "small_n16_seconds": _rounded(seconds("ours", MANY, SMALL)),
        "small_ratio_nvflare_n4": ratio("nvflare", FEW, SMALL),
        "small_ratio_nvflare_n16": ratio("nvflare", MANY, SMALL),
        "small_ratio_flower_n4": ratio("flower", FEW, SMALL),
    }


def memory_of(jobs: Mapping[Place, Sequence[Job]], payload_bytes: Mapping[float, int]) -> dict[str, Any]:
    """What our server held at most beside what it may: its base and `PAYLOADS_MOST` payloads, whatever N."""
    return {
        place.name: {
            "peak_mib": _mib([job.server_peak_bytes for job in found]),
            "bound_mib": _mib([found[0].server_base_bytes + PAYLOADS_MOST * payload_bytes[place.megabytes]]),
        }
        for place, found in jobs.items()
        if place.side == "ours" and place.megabytes >= LARGE
    }


def least_seconds(limits: Mapping[str, float], payload_bytes: int, silos: int, cores: int) -> float:
    """What a round takes at least on this machine: each payload crosses up and down once over mTLS, and has its SHA-256
    taken by who lets it out and by who takes it in (an adapter that goes to all, once), with all cores busy throughout.

    Args:
        limits: of `transport_limits`.
        payload_bytes: of one update, and of one adapter.
        silos: N.
        cores: that the processes share.
    """
    streams = limits["raw_grpc_receiver_cpu_seconds_per_gb"] + limits["raw_grpc_sender_cpu_seconds_per_gb"]
    hashed = (3 * silos + 1) / limits["sha256_gb_per_second"]
    return payload_bytes / GB * (2 * silos * streams + hashed) / cores


def kept_of(figures: Mapping[str, Any], payload_bytes: int) -> dict[str, bool]:
    """Whether each goal whose figure is there was reached."""
    kept = {name: figures[name] <= most for name, most in REQUIRED_MOST.items() if figures.get(name) is not None}
    kept |= {name: figures[name] >= least for name, least in REQUIRED_LEAST.items() if figures.get(name) is not None}
    for name in ("peak_mib_n4", "peak_mib_n16"):
        if figures.get(name) is not None:
            kept[name] = figures[name] <= figures["base_mib"] + PAYLOADS_MOST * payload_bytes / MIB
    return kept


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def _mib(values: Sequence[float]) -> float | None:
    return round(max(values) / MIB, 1) if values else None
