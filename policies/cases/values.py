"""Tensors of a given norm, and texts that make a message of a given size."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from fedsilo.protocol.averaging import initial_factors
from fedsilo.protocol.codec import Array
from fedsilo.protocol.freezing import is_frozen
from policies.cases.format import TensorFault
from policies.schema import LoraSchema

Shapes = Mapping[str, tuple[int, ...]]

_SENTENCE = "the answer follows from the facts above "
# What a value is off by for its float32 rounding alone; so much nearer to zero it cannot round across a limit.
_ROUNDING = 1e-12
_ODD = {
    "nan": float("nan"),
    "infinity": float("inf"),
    "negative_zero": -0.0,
    "denormal": 2.0**-130,
}


@dataclass(frozen=True)
class Filled:
    """One tensor: a shape and its one value (or what `drawn` makes), but for the first element where `odd` says so."""

    shape: tuple[int, ...]
    value: float
    odd: float | None = None
    drawn: Callable[[], Array] | None = None

    def array(self) -> Array:
        array = np.full(self.shape, self.value, np.float32) if self.drawn is None else self.drawn()
        if self.odd is not None:
            array.flat[0] = self.odd
        return array


class Tensors(Mapping[str, Array]):
    """Arrays made when they are looked at, so that a model's whole adapter is never in memory."""

    def __init__(self, filled: Mapping[str, Filled]) -> None:
        self.filled = dict(filled)

    def __getitem__(self, name: str) -> Array:
        return self.filled[name].array()

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self.filled))

    def __len__(self) -> int:
        return len(self.filled)

    @property
    def elements(self) -> int:
        return sum(math.prod(each.shape) for each in self.filled.values())


def spread(shapes: Shapes, l2: float, dtype: str, *, upwards: bool) -> dict[str, Filled]:
    """All tensors with the same norm, together `l2`: so no tensor is longer than it has to be.

    Args:
        shapes: by name.
        dtype: bfloat16 gives values on that grid.
        l2: of all values together.
        upwards: round each value away from zero, so that the norm is at least l2; else it is at most l2.
    """
    return {
        name: Filled(shape, _value(l2 / math.sqrt(len(shapes) * math.prod(shape)), dtype, upwards))
        for name, shape in shapes.items()
    }


def one_tensor(shapes: Shapes, l2: float, dtype: str, *, upwards: bool) -> dict[str, Filled]:
    """The largest tensor with norm `l2`, zeros elsewhere."""
    largest = max(shapes, key=lambda name: math.prod(shapes[name]))
    return {
        name: Filled(shape, _value(l2 / math.sqrt(math.prod(shape)), dtype, upwards) if name == largest else 0.0)
        for name, shape in shapes.items()
    }


def with_drawn(
    filled: Mapping[str, Filled], schema: LoraSchema, seed: int, l2: float | None, *, upwards: bool
) -> dict[str, Filled]:
    """The frozen tensors as the seed draws them, and the others so that all together come to `l2`, if it is given."""
    frozen = {name: shape for name, shape in schema.tensors if is_frozen(name, schema.freeze)}
    if not frozen:
        return dict(filled)
    drawn = {name: Filled(shape, 0.0, drawn=partial(_drawn, name, shape, seed)) for name, shape in frozen.items()}
    trained = {name: each.shape for name, each in filled.items() if name not in frozen}
    length = math.sqrt(sum(float(np.dot(flat, flat)) for flat in map(_wide, drawn.values())))
    rest = 0.0 if l2 is None else math.sqrt(max(0.0, l2 * l2 - length * length))
    return drawn | spread(trained, rest, "float32", upwards=upwards)


def moved(filled: Mapping[str, Filled], schema: LoraSchema, l2: float, *, further: bool) -> dict[str, Filled]:
    """The same tensors with one value of one that is trained moved by `l2`.

    Args:
        filled: by name.
        schema: says what is frozen.
        l2: how far.
        further: round away from where it was, so that it is at least l2; else it is at most l2.
    """
    name = next(name for name in sorted(filled) if not is_frozen(name, schema.freeze))
    before = filled[name].value
    after = np.float32(before - l2)
    if further and before - float(after) < l2:
        after = np.nextafter(after, np.float32(-np.inf))
    if not further and before - float(after) > l2:
        after = np.nextafter(after, np.float32(np.inf))
    return {**filled, name: replace(filled[name], odd=float(after))}


def _drawn(name: str, shape: tuple[int, ...], seed: int) -> Array:
    return initial_factors([(name, shape)], seed)[name]


def _wide(filled: Filled) -> Array:
    return filled.array().reshape(-1).astype(np.float64)


def norm(filled: Mapping[str, Filled]) -> float:
    """What `measure` finds, but for the rounding of its sum."""
    return math.sqrt(sum(math.prod(each.shape) * each.value**2 for each in filled.values()))


def _value(exact: float, dtype: str, upwards: bool) -> float:
    if exact == 0:
        return 0.0
    exact *= 1 + _ROUNDING if upwards else 1 - _ROUNDING
    nearest = np.float32(exact)
    rounded = float(nearest)
    if dtype == "bfloat16":
        bits = nearest.view(np.uint32) & np.uint32(0xFFFF0000)
        below = bits.view(np.float32)
        above = (bits + np.uint32(0x10000)).view(np.float32)
    else:
        below = above = nearest
        if upwards and rounded < exact:
            above = np.nextafter(nearest, np.float32(np.inf))
        if not upwards and rounded > exact:
            below = np.nextafter(nearest, np.float32(0))
    return float(above if upwards else below)


def faulty(filled: Mapping[str, Filled], fault: TensorFault, schema: LoraSchema) -> dict[str, Filled]:
    """The tensors with one thing wrong, as an attacker or a bug would have it (T1, T2, T4, T5, T6).

    Raises:
        ValueError: a fault of frozen tensors where there are none.
    """
    result = dict(filled)
    first = min(result)
    one = result[first]
    if fault == "extra_tensor":
        result[f"{max(result)}_more"] = Filled((2,), 0.0)
    elif fault == "missing_tensor":
        del result[first]
    elif fault == "renamed_tensor":
        result[first.upper()] = result.pop(first)
    elif fault == "empty_tensor":
        result[first] = Filled((0, *one.shape[1:]), 0.0)
    elif fault == "larger_tensor":
        result[first] = Filled((one.shape[0] + 1, *one.shape[1:]), one.value)
    elif fault == "frozen_tensor":
        sent = next(((name, shape) for name, shape in schema.tensors if name not in result), None)
        if sent is None:
            raise ValueError("the LoRA schema freezes no tensor")
        result[sent[0]] = Filled(sent[1], 0.0)
    elif fault == "frozen_changed":
        kept = next((name for name in sorted(result) if is_frozen(name, schema.freeze)), None)
        if kept is None:
            raise ValueError("the message holds no frozen tensor")
        result[kept] = replace(result[kept], odd=0.5)
    elif fault == "zeros":
        result = {name: Filled(each.shape, 0.0) for name, each in result.items()}
    elif fault == "low_bits":
        result[first] = Filled(one.shape, one.value, float(np.nextafter(np.float32(one.value), np.float32(0))))
    elif fault in _ODD:
        result[first] = replace(one, odd=_ODD[fault])
    return result


def sentence(size_bytes: int) -> str:
    """Plain words of exactly so many bytes."""
    return (_SENTENCE * (size_bytes // len(_SENTENCE) + 1))[:size_bytes]


def shares(total: int, parts: int) -> list[int]:
    """A whole number in nearly equal parts, the larger ones first."""
    if parts == 0:
        return []
    each, more = divmod(total, parts)
    return [each + (index < more) for index in range(parts)]


def fit(sizes: list[int], target: int, measured: Callable[[list[int]], int]) -> list[int]:
    """Text sizes with which a message measures `target` bytes, changed as evenly as can be.

    The length before a text takes a byte more at 128, at 16384 and so on, so spreading what is missing may step over
    the target; the next turn, and at last single texts, make up for it. Where even that cannot (no text left to
    change, or one text alone), the result measures the nearest below.
    """
    for _ in range(4):
        gap = target - measured(sizes)
        if gap == 0:
            return sizes
        sign = 1 if gap > 0 else -1
        changes = shares(abs(gap), len(sizes))
        sizes = [max(0, size + sign * change) for size, change in zip(sizes, changes, strict=True)]
    for index in range(len(sizes)):
        gap = target - measured(sizes)
        if gap == 0:
            return sizes
        sizes = [*sizes[:index], max(0, sizes[index] + gap), *sizes[index + 1 :]]
    while sizes and sizes[-1] > 0 and measured(sizes) > target:
        sizes = [*sizes[:-1], sizes[-1] - 1]
    return sizes
