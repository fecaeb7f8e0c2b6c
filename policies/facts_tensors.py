"""Facts of adapter factors: names against the schema, finiteness, bit patterns, norms, how far an adapter is from the
last one, what is frozen, and what an update was trained on. One pass over the values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.codec import DTYPE_ITEM_BYTES, Array
from fedsilo.protocol.freezing import FrozenDigest, is_frozen
from fedsilo.protocol.kinds import UPDATE_KINDS
from policies.bit_patterns import BitPatterns
from policies.catalogue import digest_of
from policies.message import Context, Facts, Message

_TILE_ELEMENTS = 1 << 16  # in float64 half a MiB, which stays in the processor's cache


def tensor_facts(message: Message, context: Context) -> Facts:
    header = message.body
    assert isinstance(header, pb.Factors)  # noqa: S101  # `measure` has compared the type
    schema = context.schema
    shapes = schema.shapes_of(message.place.kind) if schema else {}
    freeze = schema.freeze if schema else ""
    names = [entry.name for entry in header.tensors]
    given = message.tensors
    facts: Facts = {
        "schema_sha256": schema.digest if schema else "",
        "header_schema_sha256": digest_of(header.schema_sha256),
        "freeze": freeze,
        "dtype": header.dtype if header.dtype in DTYPE_ITEM_BYTES else "",
        "dtype_of_schema": schema is not None and header.dtype == schema.dtype,
        "rank": header.rank,
        "rank_of_schema": schema is not None and header.rank == schema.rank,
        "scale_of_schema": schema is not None and bool(np.float32(header.scale) == np.float32(schema.scale)),
        "base_digest_empty": header.base_digest == "",
        "base_digest_of_round": bool(context.base_digest) and header.base_digest == context.base_digest,
        "tensors": len(names),
        "tensors_missing": len(shapes.keys() - set(names)),
        "tensors_unexpected": len([name for name in names if name not in shapes]),
        "tensors_repeated": len(names) - len(set(names)),
        "tensors_given": given is not None and sorted(given) == names,
        "shapes_wrong": sum(shapes.get(entry.name) != tuple(entry.shape) for entry in header.tensors),
    }
    patterns, elements = BitPatterns(), 0
    squares = square_max = 0.0
    step = _Step(context.last_adapter if message.place.kind == "global.adapter" else None, names)
    frozen = FrozenDigest()
    room = np.empty(_TILE_ELEMENTS)  # memory that is new for each tile costs more than the sums
    for entry in header.tensors if given is not None and facts["tensors_given"] else ():
        array = given[entry.name] if given is not None else np.zeros(0, np.float32)
        if array.dtype != np.float32 or tuple(array.shape) != tuple(entry.shape):
            facts["shapes_wrong"] += 1
            continue
        is_kept = is_frozen(entry.name, freeze)
        if is_kept:
            frozen.start(entry.name, entry.shape)
        square = 0.0
        flat = np.ascontiguousarray(array).reshape(-1)
        step.start(entry.name, array.shape)
        for start in range(0, flat.size, _TILE_ELEMENTS):
            tile = flat[start : start + _TILE_ELEMENTS]
            wide = room[: tile.size]
            wide[:] = tile
            of_tile = float(np.dot(wide, wide))  # which no finite values overflow
            square += of_tile
            patterns.add(tile, finite=math.isfinite(of_tile))
            step.add(wide, start)
            if is_kept:
                frozen.add(tile)
        elements += flat.size
        squares += square
        square_max = max(square_max, square)
    finite = patterns.not_finite == 0 and math.isfinite(squares)
    l2 = math.sqrt(squares) if finite else None
    # The factors themselves are base + delta, whose norm is at most the sum: an upper bound without the base's values.
    total = None if l2 is None or context.base_l2 is None else l2 + context.base_l2
    facts.update(
        elements=elements,
        values_not_finite=patterns.not_finite,
        values_not_canonical=patterns.not_canonical,
        values_off_bfloat16=patterns.off_bfloat16,
        l2=l2,
        tensor_l2_max=math.sqrt(square_max) if finite else None,
        total_l2_max=total,
    )
    if message.place.kind in UPDATE_KINDS:
        facts.update(records=context.records, epochs=context.epochs, steps=context.steps)
    else:
        plan = context.plan
        facts["frozen_as_planned"] = plan is not None and frozen.hex == plan.lora.frozen_sha256
        facts.update(
            first_of_run=context.last_adapter_first,
            step_l2=step.l2 if finite and not facts["shapes_wrong"] and facts["tensors_given"] else None,
            step_rounds=context.last_adapter_rounds,
        )
    return facts


class _Step:
    """L2 of what changed since the last adapter, of which one tensor at a time is looked at.

    Args:
        last: factors of that adapter; None if unknown.
        names: of the tensors that are compared with it.
    """

    def __init__(self, last: Mapping[str, Array] | None, names: Sequence[str]) -> None:
        # A tensor that only one of the two has leaves the distance unknown.
        self._last = last if last is not None and sorted(last) == list(names) else None
        self._before: Array | None = None
        self._room = np.empty(_TILE_ELEMENTS)
        self._squares = 0.0

    def start(self, name: str, shape: tuple[int, ...]) -> None:
        if self._last is None:
            return
        before = self._last[name]
        if tuple(before.shape) != tuple(shape):
            self._last = None
        else:
            self._before = np.ascontiguousarray(before).reshape(-1)

    def add(self, wide: Array, start: int) -> None:
        """A tile of the tensor that was started, in float64, and where it begins."""
        if self._last is not None and self._before is not None:
            change = self._room[: wide.size]
            change[:] = self._before[start : start + wide.size]  # widened first: twice as fast as both at once
            np.subtract(wide, change, out=change)
            self._squares += float(np.dot(change, change))

    @property
    def l2(self) -> float | None:
        return math.sqrt(self._squares) if self._last is not None and math.isfinite(self._squares) else None
