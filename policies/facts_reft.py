"""Facts of interventions (methods 5.1): layers and groups, shapes, finiteness, norms, and whether R is orthonormal.

Wire names are `layers.L.GROUP.PART` with PART one of W, R (r x d) and b (r). A name of another form is counted, never
kept. Layers are numbers of the sender's choice, so their list is bounded.
"""

from __future__ import annotations

import itertools
import math
import re

import numpy as np

from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.codec import DTYPE_ITEM_BYTES
from policies.bit_patterns import BitPatterns
from policies.message import Facts, Message

LAYERS_MAX = 256
PARTS = ("R", "W", "b")
_NAME = re.compile(r"layers\.(0|[1-9][0-9]{0,2})\.(prefix|suffix|tied)\.([RWb])")


def reft_facts(message: Message) -> Facts:
    header = message.body
    assert isinstance(header, pb.Factors)  # noqa: S101  # `measure` has compared the type
    names = [entry.name for entry in header.tensors]
    found = {name: match.groups() for name in names if (match := _NAME.fullmatch(name))}
    layers = sorted({int(layer) for layer, _, _ in found.values()})[:LAYERS_MAX]
    groups = sorted({group for _, group, _ in found.values()})
    whole = {f"layers.{layer}.{group}.{part}" for layer, group, part in itertools.product(layers, groups, PARTS)}
    shapes = [(entry.name, tuple(entry.shape)) for entry in header.tensors]
    sides = {shape for name, shape in shapes if not name.endswith(".b")}
    rank, width = next(iter(sides)) if len(sides) == 1 and len(next(iter(sides))) == 2 else (0, 0)
    given = message.tensors
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
        "tensors_given": given is not None and sorted(given) == names,
        "shapes_wrong": sum(shape != ((rank,) if name.endswith(".b") else (rank, width)) for name, shape in shapes),
    }
    patterns = BitPatterns()
    squares = square_max = distance_max = 0.0
    for entry in header.tensors if facts["tensors_given"] else ():
        array = given[entry.name] if given is not None else np.zeros(0, np.float32)
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
        values_not_finite=patterns.not_finite,
        values_not_canonical=patterns.not_canonical,
        values_off_bfloat16=patterns.off_bfloat16,
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
