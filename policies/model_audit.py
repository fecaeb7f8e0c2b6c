"""The blocks `audit` and `retention` of a policy: how this site's log is witnessed, and how long what stays here."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from policies import lattice
from policies.fields import Closed, Demand, Least, PositiveLimit


class CheckpointEvery(Closed):
    records: PositiveLimit = 100
    rounds: PositiveLimit = 1


class Audit(Closed):
    """Attributes:
    payload_archive: released payload bytes are kept at the site.
    witnesses: whose cosignatures count.
    min_witnesses: so many have countersigned the log as it was after the last round, or no further round opens.
    """

    payload_archive: Demand = True
    checkpoint_every: CheckpointEvery = CheckpointEvery()
    witnesses: Annotated[tuple[Literal["coordinator", "peers"], ...], Field(min_length=1), lattice.INTERSECTION] = (
        "coordinator",
        "peers",
    )
    min_witnesses: Least = 1


class Retention(Closed):
    """Attributes:
    records_years: records are kept for at least so long; leaf hashes for good.
    payload_days: archived payloads are kept for at most so long.
    outbox_max_gb: outbox and archive together, in 10^9 bytes.
    """

    records_years: Least = 6
    payload_days: PositiveLimit = 90
    outbox_max_gb: PositiveLimit = 50
