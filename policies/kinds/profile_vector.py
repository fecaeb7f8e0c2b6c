"""`profile.vector`: what a matchmaker may know of a silo's model and data (threats T9, T15)."""

from __future__ import annotations

import math
from typing import Annotated

from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.strict_yaml import Path
from policies import kind as k
from policies import lattice
from policies.fields import Approvals, Closed, Grid, Integer, Least, Limit, Positive, PositiveLimit
from policies.grids import EXACT_BITS, Bits, log2_choices, lowest, points_of
from policies.message import Context, Facts, Message

_F = k.FieldClass
FIELDS: k.FieldTable = {
    "ProfileVector": {"family": _F.NUMBER, "dynamic": _F.NUMBER, "histogram": _F.NUMBER},
}


class ProfileVector(Closed):
    """The profile of this silo that a matchmaker may know.

    Attributes:
        families: of models; 1 where the family is not told.
        dynamic: how many recent figures, each of `values`.
        bins, parts: of the histogram of this silo's data; its whole numbers add up to `parts`, or there is none.
        min_records: private records behind the histogram.
    """

    families: PositiveLimit
    dynamic: Annotated[Integer, lattice.SAME]
    values: Grid
    bins: Annotated[Integer, lattice.SAME]
    parts: Annotated[Positive, lattice.SAME]
    min_records: Least
    per_round: Limit
    approvals: Approvals


def measure(body: pb.ProfileVector, message: Message, context: Context) -> Facts:
    return {
        **k.value_facts(body.dynamic),
        "family": body.family,
        "dynamic": len(body.dynamic),
        "bins": len(body.histogram),
        "parts": sum(body.histogram),
        "usable_records": context.usable_records,
    }


@k.block_rule("profile shape", "PROFILE_SHAPE", "profile.vector")
def profile_shape(facts: Facts, block: ProfileVector, path: Path) -> k.Judgement:
    """Judge the shape: as many figures and bins as the policy says, and a family among its number."""
    for key in ("dynamic", "bins"):
        if facts[key] != getattr(block, key):
            return k.equal(facts[key], getattr(block, key), (*path, key))
    return k.at_most(facts["family"], block.families - 1, (*path, "families"))


PROFILE_RANGE = k.range_rule("profile range", "PROFILE_RANGE")
PROFILE_GRID = k.grid_rule("profile grid", "PROFILE_GRID")


@k.block_rule("histogram adds up", "HISTOGRAM", "profile.vector")
def histogram(facts: Facts, block: ProfileVector, path: Path) -> k.Judgement:
    """Whole parts of one whole: no bin says how many records there are."""
    return k.equal(facts["parts"], block.parts if block.bins else 0, (*path, "parts"))


@k.block_rule("records behind the profile", "MIN_RECORDS", "profile.vector")
def profile_records(facts: Facts, block: ProfileVector, path: Path) -> k.Judgement:
    """Only the site knows how many it has, and the number does not cross the wire."""
    if facts["direction"] != "egress":
        return k.not_applicable()
    return k.at_least(facts["usable_records"], block.min_records, (*path, "min_records"))


def largest(block: ProfileVector, at: k.Figures) -> tuple[int, int]:
    return block.per_round, block.per_round * (block.dynamic * 8 + block.bins * 5 + 24)


def bits(block: ProfileVector, at: k.Figures) -> Bits:
    points = points_of(block.values)
    shares = log2_choices(block.parts + block.bins - 1, block.bins - 1) if block.bins else 0.0
    histograms = f"{round(2**shares)}" if shares < 53 else f"2^{shares:.1f}"
    because = f"{block.families} families, {block.dynamic} figures of {points} values, {histograms} histograms"
    one = math.log2(block.families) + block.dynamic * math.log2(max(1, points)) + shares
    one = one if one > EXACT_BITS else math.log2(2**one + 1)  # or no message
    return Bits(block.per_round * one, f"{block.per_round} x {because}")


def example(at: k.Around) -> k.Example:
    block = at.block
    histogram = [block.parts, *(0,) * (block.bins - 1)] if block.bins else []
    body = pb.ProfileVector(family=0, dynamic=[lowest(block.values)] * block.dynamic, histogram=histogram)
    return k.Example(body, {"usable_records": block.min_records})


KINDS = (
    k.PolicyKind(
        "profile.vector",
        example,
        sent=ProfileVector,
        measure=measure,
        rules=(k.some_per_round, profile_shape, PROFILE_RANGE, PROFILE_GRID, histogram, profile_records),
        largest=largest,
        bits=bits,
    ),
)
