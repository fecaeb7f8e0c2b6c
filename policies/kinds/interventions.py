"""Facts of LoReFT interventions: layers and groups, shapes, finiteness, norms, and whether R is orthonormal.

`reft.intervention` leaves a silo, `reft.aggregate` comes in; whole values both, finite, within the norms, R
orthonormal (T1, T2, T4, T7). What the rules do not stop: information in the low bits of allowed values, and in the
choice of R among rotations that do the same (N1).
"""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, model_validator

from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.codec import DTYPE_ITEM_BYTES
from fedsilo.protocol.strict_yaml import Path
from policies import kind as k
from policies import lattice
from policies.fields import Approvals, Closed, Integer, Limit, NormLimit, PinnedNumber
from policies.grids import BitPatterns, Bits, grid_points
from policies.message import Context, Facts, Message

_F = k.FieldClass
LAYERS_MAX = 256
PARTS = ("R", "W", "b")
_NAME = re.compile(r"layers\.(0|[1-9][0-9]{0,2})\.(prefix|suffix|tied)\.([RWb])")
_TENSOR_HEADER_BYTES = 48
FIELDS: k.FieldTable = {}  # the header is that of adapters


class Interventions(Closed):
    """Exactly these tensors: W and R (rank x width) and b (rank) of each layer and group, no others."""

    layers: Annotated[
        tuple[Annotated[Integer, Field(lt=1000)], ...], Field(min_length=1, max_length=LAYERS_MAX), lattice.SAME
    ]
    groups: Annotated[tuple[Literal["prefix", "suffix", "tied"], ...], Field(min_length=1), lattice.SAME]
    rank: PinnedNumber
    width: PinnedNumber
    dtype: Annotated[Literal["float32", "bfloat16"], lattice.SAME]
    max_l2: NormLimit  # of all W and b
    max_tensor_l2: NormLimit  # of one W or b

    @model_validator(mode="after")
    def _sorted(self) -> Interventions:
        for name, values in (("layers", self.layers), ("groups", self.groups)):
            if tuple(sorted(set(values))) != values:
                raise ValueError(f"{name} must be in ascending order, each once")
        if self.rank > self.width:
            raise ValueError("rank is above width")
        return self


class ReftIntervention(Interventions):
    """Limits of whole interventions. max_orthonormality_error: largest entry of |R R^T - I|."""

    max_orthonormality_error: NormLimit
    per_round: Limit
    approvals: Approvals


class ReftAggregate(Interventions):
    """The aggregate of the other silos' interventions. Its R need not be orthonormal: the silo makes it."""


def measure(header: pb.Factors, message: Message, context: Context) -> Facts:
    names = [entry.name for entry in header.tensors]
    matched = {name: match.groups() for name in names if (match := _NAME.fullmatch(name))}
    layers = sorted({int(layer) for layer, _, _ in matched.values()})[:LAYERS_MAX]
    groups = sorted({group for _, group, _ in matched.values()})
    whole = {f"layers.{layer}.{group}.{part}" for layer, group, part in itertools.product(layers, groups, PARTS)}
    shapes = [(entry.name, tuple(entry.shape)) for entry in header.tensors]
    sides = {shape for name, shape in shapes if not name.endswith(".b")}
    rank, width = next(iter(sides)) if len(sides) == 1 and len(next(iter(sides))) == 2 else (0, 0)
    tensors = message.tensors
    facts: Facts = {
        "base_digest_empty": header.base_digest == "",
        "header_schema_empty": header.schema_sha256 == "",
        "header_rank": header.rank,
        "header_scale": header.scale if math.isfinite(header.scale) else None,
        "dtype": header.dtype if header.dtype in DTYPE_ITEM_BYTES else "",
        "layers": layers,
        "groups": groups,
        "rank": rank,
        "width": width,
        "tensors": len(names),
        "tensors_missing": len(whole - set(names)),
        "tensors_unexpected": len(names) - sum(name in whole for name in names),
        "tensors_given": tensors is not None and sorted(tensors) == names,
        "shapes_wrong": sum(shape != ((rank,) if name.endswith(".b") else (rank, width)) for name, shape in shapes),
    }
    patterns = BitPatterns()
    squares = square_max = distance_max = 0.0
    for entry in header.tensors if facts["tensors_given"] else ():
        array = tensors[entry.name] if tensors is not None else np.zeros(0, np.float32)
        if array.dtype != np.float32 or tuple(array.shape) != tuple(entry.shape):
            facts["shapes_wrong"] += 1
            continue
        patterns.add(np.ascontiguousarray(array).reshape(-1))
        wide = array.astype(np.float64)
        if entry.name.endswith(".R"):
            # its norm follows from its rank; what may differ is how far its rows are from orthonormal
            distance_max = max(distance_max, _from_orthonormal(wide))
        else:
            square = float(np.sum(wide * wide))
            squares += square
            square_max = max(square_max, square)
    finite = patterns.not_finite == 0  # squares of float32 values do not overflow a double
    facts.update(
        **patterns.facts(),
        l2=math.sqrt(squares) if finite else None,
        tensor_l2_max=math.sqrt(square_max) if finite else None,
        orthonormality_error=distance_max if finite and math.isfinite(distance_max) else None,
    )
    return facts


def _from_orthonormal(rows: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> float:
    """Largest entry of |R R^T - I|; infinite where a value is not, and for what cannot have orthonormal rows.

    With no more rows than columns the product is no larger than R itself.
    """
    if rows.ndim != 2 or rows.shape[0] > rows.shape[1] or not np.isfinite(rows).all():
        return math.inf
    return float(np.max(np.abs(rows @ rows.T - np.eye(rows.shape[0])), initial=0.0))


@k.block_rule("interventions", "TENSOR_SET")
def tensor_set(facts: Facts, block: Interventions, path: Path) -> k.Judgement:
    """W, R and b of each layer and group of the policy, once; none else, and values given for each."""
    for key in ("layers", "groups"):
        if tuple(facts[key]) != getattr(block, key):
            return k.holds(False, (*path, key), measured=len(facts[key]), limit=list(getattr(block, key)))
    wrong = facts["tensors_missing"] + facts["tensors_unexpected"]
    return k.holds(facts["tensors_given"], path) if wrong == 0 else k.none_of(wrong, (*path, "layers"))


@k.block_rule("intervention shapes", "TENSOR_SHAPE")
def shapes(facts: Facts, block: Interventions, path: Path) -> k.Judgement:
    for key in ("rank", "width"):
        if facts[key] != getattr(block, key):
            return k.equal(facts[key], getattr(block, key), (*path, key))
    return k.none_of(facts["shapes_wrong"], path)


@k.block_rule("intervention header", "HEADER")
def header(facts: Facts, block: Interventions, path: Path) -> k.Judgement:
    """dtype and rank are the policy's; base, schema and scale, which an intervention has not, say nothing."""
    if facts["dtype"] != block.dtype:
        return k.equal(facts["dtype"], block.dtype, (*path, "dtype"))
    if facts["header_rank"] != block.rank:
        return k.equal(facts["header_rank"], block.rank, (*path, "rank"))
    plain = facts["base_digest_empty"] is True and facts["header_schema_empty"] is True and facts["header_scale"] == 1
    return k.holds(plain, path)


@k.block_rule("intervention grid", "VALUE_GRID")
def grid(facts: Facts, block: Interventions, path: Path) -> k.Judgement:
    if block.dtype == "float32" or k.before_transforms(facts):
        return k.not_applicable()
    return k.none_of(facts["values_off_bfloat16"], (*path, "dtype"))


FINITE = k.zero_rule("finite interventions", "NOT_FINITE", "values_not_finite")
L2 = k.limit_rule("L2 of the interventions", "DELTA_L2", "max_l2", k.fact("l2"))
TENSOR_L2 = k.limit_rule("L2 of one intervention tensor", "TENSOR_L2", "max_tensor_l2", k.fact("tensor_l2_max"))
ORTHONORMAL = k.limit_rule(
    "rows of R orthonormal", "ORTHONORMAL", "max_orthonormality_error", k.fact("orthonormality_error")
)
_RULES = (tensor_set, shapes, header, FINITE, replace(k.canonical, name="canonical interventions"), grid, L2, TENSOR_L2)


def largest(block: ReftIntervention, at: k.Figures) -> tuple[int, int]:
    places = len(block.layers) * len(block.groups)
    values = places * (2 * block.rank * block.width + block.rank)
    size = values * DTYPE_ITEM_BYTES[block.dtype] + places * 3 * _TENSOR_HEADER_BYTES + 64
    return block.per_round, block.per_round * size


def bits(block: ReftIntervention, at: k.Figures) -> Bits:
    places = len(block.layers) * len(block.groups)
    free = places * (block.rank * block.width + block.rank)  # W and b
    rotations = places * block.rank * block.width
    free_bits = math.log2(grid_points(min(block.max_tensor_l2, block.max_l2), block.dtype))
    # a row of R has length 1 within the tolerance, so none of its values is larger
    row_bits = math.log2(grid_points(math.sqrt(1 + block.max_orthonormality_error), block.dtype))
    because = f"{free} values of {free_bits:.1f} bits and {rotations} of {row_bits:.1f} ({block.dtype})"
    return Bits(block.per_round * (free * free_bits + rotations * row_bits), f"{block.per_round} x {because}")


def example(at: k.Around) -> k.Example:
    """Return interventions that change nothing: R is a part of the identity, W and b are 0."""
    block, tensors = at.block, {}
    for layer, group in itertools.product(block.layers, block.groups):
        place = f"layers.{layer}.{group}"
        tensors[f"{place}.R"] = np.eye(block.rank, block.width, dtype=np.float32)
        tensors[f"{place}.W"] = np.zeros((block.rank, block.width), np.float32)
        tensors[f"{place}.b"] = np.zeros(block.rank, np.float32)
    entries = [pb.TensorEntry(name=name, shape=tensors[name].shape) for name in sorted(tensors)]
    header = pb.Factors(rank=block.rank, scale=1.0, dtype=block.dtype, tensors=entries)
    return k.Example(header, tensors=tensors)


KINDS = (
    k.PolicyKind(
        "reft.intervention",
        example,
        sent=ReftIntervention,
        measure=measure,
        rules=(k.some_per_round, *_RULES, ORTHONORMAL),
        largest=largest,
        bits=bits,
    ),
    k.PolicyKind("reft.aggregate", example, taken=ReftAggregate, measure=measure, rules=_RULES),
)
