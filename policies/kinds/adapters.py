"""Adapter factors: `lora.factors`, `lora.factor_a`, `lora.factor_b` and `lora.core_r` leave a silo as differences to
what a round started from; `global.adapter` comes in whole.

Exactly the schema's tensors, finite, within the norms, trained on enough records, and what is frozen unchanged (T1,
T2, T4, T6, T7, T20). Before it leaves an update is clipped, rounded, and its low bits are overwritten. What the rules
do not stop: information in the low bits of allowed values (N1), and a trainer that lies about its records
(silo/sampling.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, model_validator

from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.codec import DTYPE_ITEM_BYTES, Array, from_bfloat16_bits, to_bfloat16_bits
from fedsilo.protocol.errors import UsageError
from fedsilo.protocol.factors import (
    KINDS_OF_FREEZE,
    TURNS,
    UPDATE_KIND,
    Freeze,
    FrozenDigest,
    fixed_in,
    initial_factors,
    is_drawn,
    is_fixed,
    is_shift,
)
from fedsilo.protocol.kinds import UPDATE_KINDS
from fedsilo.protocol.products import l2_between, l2_most
from fedsilo.protocol.strict_yaml import Path
from policies import kind as k
from policies import lattice
from policies.fields import Approvals, Closed, Integer, Least, Limit, NormLimit, PinnedText, is_zero
from policies.grids import MANTISSA_BITS, BitPatterns, Bits, grid_points
from policies.history import History
from policies.message import Context, Facts, Message
from policies.model import UNLIMITED, Policy, SchemaPin

_F = k.FieldClass
_UPDATES = tuple(sorted(UPDATE_KINDS))
CLIP_MARGIN = 1 + 2**-6  # rounding to bfloat16 may move a clipped norm up by this factor at most
_TILE_ELEMENTS = 1 << 16  # in float64 half a MiB, which stays in the processor's cache
_EXPONENT = np.uint32(0x7F800000)
_SAMPLE = 4096  # values of an update; a bit of a random payload that survives in all of them is no accident
_SIGN_BIT, _MANTISSA_WIRE_BITS = 31, 23
_LEAST_EXPONENT = -126  # of a normal float32


FIELDS: k.FieldTable = {
    "Factors": {
        "base_digest": _F.DIGEST,
        "schema_sha256": _F.DIGEST,
        "rank": _F.NUMBER,
        "scale": _F.NUMBER,
        "dtype": frozenset({"float32", "bfloat16"}),
    },
    "TensorEntry": {"name": _F.TENSOR_NAME, "shape": _F.SHAPE},
}


class Quantise(Closed):
    grid: Annotated[Literal["float32", "bfloat16"], lattice.ladder("bfloat16", "float32")]


class LoraFactors(Closed):
    """An update of adapter factors. What is not said of its training is denied: absent, `min_records` is more than any
    site has, and `max_local_epochs` and `max_steps` are 0.

    Attributes:
        randomise_low_bits: of each value's mantissa, after rounding; the lowest of it are overwritten by random bits.
            More than the grid's mantissa has means the whole of it. Absent: none.
        min_records: distinct private records that a round which trains on any must have been given.
        max_local_epochs: how often a record may have been given in the round.
        max_steps: private and public steps of the round.
    """

    schema_name: PinnedText = Field(alias="schema")
    clip_l2: NormLimit
    max_l2: NormLimit
    max_tensor_l2: NormLimit
    max_total_l2: NormLimit
    quantise: Quantise
    randomise_low_bits: Annotated[Integer, Field(le=MANTISSA_BITS["float32"]), lattice.LARGEST] = 0
    min_records: Least = UNLIMITED
    max_local_epochs: Limit = 0
    max_steps: Limit = 0
    per_round: Limit
    secure_aggregation: Annotated[Literal["allowed", "forbidden"], lattice.ladder("forbidden", "allowed")]
    approvals: Approvals

    @model_validator(mode="after")
    def _room_for_rounding(self) -> LoraFactors:
        if self.max_l2 < self.clip_l2 * CLIP_MARGIN:
            raise ValueError(f"max_l2 must be at least clip_l2 x (1 + 2**-6) = {self.clip_l2 * CLIP_MARGIN:g}")
        return self


class GlobalAdapter(Closed):
    """Limits of an adapter that comes in.

    Attributes:
        max_l2: of the whole adapter.
        max_step_l2: of what changed in it since the last one that was let in, for each round in between, where the plan
            has no server optimiser; else of what a round's updates come to.
        max_shift_l2: of what it adds to the base's weights besides, scale times the product of the shift's factors.
        max_shift_step_l2: of what changed in that, for each round in between; before the first round it is 0.
    """

    schema_name: PinnedText = Field(alias="schema")
    max_l2: NormLimit
    max_step_l2: NormLimit
    max_shift_l2: Annotated[NormLimit, Field(exclude_if=is_zero)] = 0.0
    max_shift_step_l2: Annotated[NormLimit, Field(exclude_if=is_zero)] = 0.0


# ---- facts --------------------------------------------------------------------------------


def measure(header: pb.Factors, message: Message, context: Context) -> Facts:
    schema = context.schema
    shapes = schema.shapes_of(message.place.kind) if schema else {}
    freeze = schema.freeze if schema else ""
    names = [entry.name for entry in header.tensors]
    tensors = message.tensors
    facts: Facts = {
        "schema_sha256": schema.digest if schema else "",
        "header_schema_sha256": k.digest_of(header.schema_sha256),
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
        "tensors_given": tensors is not None and sorted(tensors) == names,
        "shapes_wrong": sum(shapes.get(entry.name) != tuple(entry.shape) for entry in header.tensors),
    }
    patterns, elements = BitPatterns(), 0
    squares = square_max = 0.0
    step = _Step(context.last_adapter if message.place.kind == "global.adapter" else None, names)
    frozen = FrozenDigest()
    room = np.empty(_TILE_ELEMENTS)  # memory that is new for each tile costs more than the sums
    for entry in header.tensors if tensors is not None and facts["tensors_given"] else ():
        array = tensors[entry.name] if tensors is not None else np.zeros(0, np.float32)
        if array.dtype != np.float32 or tuple(array.shape) != tuple(entry.shape):
            facts["shapes_wrong"] += 1
            continue
        is_kept = schema is not None and is_drawn(entry.name, schema.freeze)
        is_of_shift = is_shift(entry.name)
        if is_kept:
            frozen.start(entry.name, entry.shape)
        square = 0.0
        flat = np.ascontiguousarray(array).reshape(-1)
        if not is_of_shift:
            step.start(entry.name, array.shape)
        for start in range(0, flat.size, _TILE_ELEMENTS):
            tile = flat[start : start + _TILE_ELEMENTS]
            wide = room[: tile.size]
            wide[:] = tile
            of_tile = float(np.dot(wide, wide))  # which no finite values overflow
            square += of_tile
            patterns.add(tile, finite=math.isfinite(of_tile))
            if not is_of_shift:
                step.add(wide, start)
            if is_kept:
                frozen.add(tile)
        elements += flat.size
        if not is_of_shift:  # two factors of one product: neither's length says anything
            squares += square
            square_max = max(square_max, square)
    finite = patterns.not_finite == 0 and math.isfinite(squares)
    l2 = math.sqrt(squares) if finite else None
    # The factors themselves are base + delta, whose norm is at most the sum: an upper bound without the base's values.
    total = None if l2 is None or context.base_l2 is None else l2 + context.base_l2
    facts.update(
        elements=elements,
        **patterns.facts(),
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
            **k.server_step(plan, schema),
        )
        if schema is not None and len(TURNS[schema.freeze]) > 1:
            fixed = fixed_in(schema.freeze, max(context.adapter_round, 1))
            facts.update(
                adapter_round=context.adapter_round,
                fixed_changed=None if step.l2 is None else sum(is_fixed(name, fixed) for name in step.changed),
            )
        if schema is not None and schema.shift_rank:
            is_good = finite and facts["tensors_given"] and not facts["shapes_wrong"]
            facts.update(
                adapter_round=context.adapter_round,
                shift_rank=schema.shift_rank,
                shift_l2=_shift_l2(tensors, None, schema.scale) if is_good and tensors is not None else None,
                shift_step_l2=_shift_l2(tensors, context.last_adapter, schema.scale)
                if is_good and tensors is not None and context.last_adapter is not None
                else None,
            )
    return facts


def _shift_l2(tensors: Mapping[str, Array], last: Mapping[str, Array] | None, scale: float) -> float | None:
    """L2, at most, of what an adapter adds to the base's weights besides its factors, or of what changed in that since
    another one; None where that one is of another form. Factors whose product rounding could hide count by their own
    size (`products.l2_most`)."""
    squares = 0.0
    for name in tensors:
        if not name.endswith(".shift_A"):
            continue
        other = f"{name[:-1]}B"
        if last is None:
            squares += l2_most((tensors[name], tensors[other])) ** 2
            continue
        if name not in last or last[name].shape != tensors[name].shape:
            return None
        squares += l2_between((tensors[name], tensors[other]), (last[name], last[other])) ** 2
    return scale * math.sqrt(squares)


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
        self._squares, self._name = 0.0, ""
        self.changed: set[str] = set()  # names of the tensors that differ

    def start(self, name: str, shape: tuple[int, ...]) -> None:
        if self._last is None:
            return
        before, self._name = self._last[name], name
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
            of_tile = float(np.dot(change, change))
            self._squares += of_tile
            if of_tile:
                self.changed.add(self._name)

    @property
    def l2(self) -> float | None:
        return math.sqrt(self._squares) if self._last is not None and math.isfinite(self._squares) else None


# ---- rules --------------------------------------------------------------------------------


def _pin(facts: Facts, policy: Policy) -> tuple[SchemaPin, tuple[str, ...]] | None:
    """The schema that this kind's block names, and its place in the file."""
    block, _ = k.block_of(facts, policy)
    if block is None:
        return None
    return policy.file.lora_schemas[block.schema_name], ("lora_schemas", block.schema_name)


@k.rule("schema", "SCHEMA_MISMATCH")
def schema(facts: Facts, policy: Policy, history: History) -> k.Judgement:
    """The schema measured against, and the one the header names, are the pinned one."""
    pinned = _pin(facts, policy)
    if pinned is None:
        return k.not_applicable()
    pin, path = pinned
    key = "schema_sha256" if facts["schema_sha256"] != pin.sha256 else "header_schema_sha256"
    return k.equal(facts[key], pin.sha256, (*path, "sha256"))


@k.facts_rule("tensor set", "TENSOR_SET")
def tensor_set(facts: Facts, path: Path) -> k.Judgement:
    """No tensor missing, added, renamed or repeated, and values given for each."""
    if facts["tensors_given"] is not True or facts["tensors"] < 1:
        return k.holds(False, (*path, "schema"))
    wrong = facts["tensors_missing"] + facts["tensors_unexpected"] + facts["tensors_repeated"]
    return k.none_of(wrong, (*path, "schema"))


@k.rule("frozen factors", "FROZEN")
def frozen(facts: Facts, policy: Policy, history: History) -> k.Judgement:
    """What the pinned schema freezes is in no update, and in every global adapter what the plan's seed draws (T6).

    Where factors take turns, what the last round fixed is as it was before that round. Where more than one round lies
    between this adapter and the last one that was let in, and where that one is none, nothing says what it must be; but
    the first two rounds start from an A that the seed draws.
    """
    pinned = _pin(facts, policy)
    if pinned is None:
        return k.not_applicable()
    pin, path = pinned[0], (*pinned[1], "freeze")
    if facts["freeze"] != pin.freeze:
        return k.equal(facts["freeze"], pin.freeze, path)
    if facts["kind"] != "global.adapter":
        kind, turns = facts["kind"], len(TURNS[pin.freeze])
        is_due = turns == 1 or UPDATE_KIND[fixed_in(pin.freeze, facts["round"])] == kind
        of_kind = next(freeze for freeze, kinds in KINDS_OF_FREEZE.items() if kind in kinds)
        fits = is_due and kind in KINDS_OF_FREEZE[pin.freeze]
        return k.equal(pin.freeze if fits else of_kind, pin.freeze, path)
    if pin.freeze == "none":
        return k.not_applicable(path)
    if len(TURNS[pin.freeze]) == 1:
        return k.holds(facts["frozen_as_planned"], path)
    if facts["first_of_run"] is True:
        return k.holds(facts["frozen_as_planned"], path) if facts["adapter_round"] <= 1 else k.not_applicable(path)
    return k.none_of(facts["fixed_changed"], path) if facts["step_rounds"] == 1 else k.not_applicable(path)


@k.facts_rule("tensor shapes", "TENSOR_SHAPE")
def shapes(facts: Facts, path: Path) -> k.Judgement:
    return k.none_of(facts["shapes_wrong"], (*path, "schema"))


@k.rule("tensor dtype", "TENSOR_DTYPE")
def dtype(facts: Facts, policy: Policy, history: History) -> k.Judgement:
    pinned = _pin(facts, policy)
    if pinned is None:
        return k.not_applicable()
    pin, path = pinned
    if facts["kind"] == "global.adapter" and facts["dtype"] == "float32":
        # The coordinator's master is float32 whatever the deltas travel in.
        return k.equal("float32", "float32", (*path, "dtype"))
    if facts["dtype_of_schema"] is not True:
        return k.holds(False, (*path, "dtype"), measured=facts["dtype"], limit=pin.dtype)
    return k.equal(facts["dtype"], pin.dtype, (*path, "dtype"))


@k.rule("rank and scale", "RANK")
def rank(facts: Facts, policy: Policy, history: History) -> k.Judgement:
    pinned = _pin(facts, policy)
    if pinned is None:
        return k.not_applicable()
    pin, path = pinned
    if facts.get("shift_rank", pin.shift_rank) != pin.shift_rank:
        return k.equal(facts["shift_rank"], pin.shift_rank, (*path, "shift_rank"))
    if facts["rank_of_schema"] is not True or facts["scale_of_schema"] is not True:
        return k.holds(False, (*path, "rank"), measured=facts["rank"], limit=pin.rank)
    return k.equal(facts["rank"], pin.rank, (*path, "rank"))


FINITE = k.zero_rule("finite values", "NOT_FINITE", "values_not_finite")


@k.facts_rule("base adapter", "BASE_DIGEST")
def base(facts: Facts, path: Path) -> k.Judgement:
    """A delta names the adapter that the open round started from; whole factors name none."""
    key = "base_digest_empty" if facts["kind"] == "global.adapter" else "base_digest_of_round"
    return k.holds(facts[key], path)


@k.block_rule("value grid", "VALUE_GRID", *_UPDATES)
def grid(facts: Facts, block: LoraFactors, path: Path) -> k.Judgement:
    if block.quantise.grid == "float32" or k.before_transforms(facts):
        return k.not_applicable()
    return k.none_of(facts["values_off_bfloat16"], (*path, "quantise"))


DELTA_L2 = k.limit_rule("L2 of the delta", "DELTA_L2", "max_l2", k.fact("l2"), *_UPDATES, unless=k.before_transforms)
TENSOR_L2 = k.limit_rule(
    "L2 of one tensor", "TENSOR_L2", "max_tensor_l2", k.fact("tensor_l2_max"), *_UPDATES, unless=k.before_transforms
)
TOTAL_L2 = k.limit_rule(
    "L2 of base and delta",
    "TOTAL_L2",
    "max_total_l2",
    k.fact("total_l2_max"),
    *_UPDATES,
    unless=k.before_transforms,
    why="Upper bound: norm of the base plus norm of the delta.",
)


@k.block_rule("L2 of the adapter", "ADAPTER_L2", "global.adapter")
def adapter_l2(facts: Facts, block: GlobalAdapter, path: Path) -> k.Judgement:
    return k.at_most(facts["l2"], block.max_l2, (*path, "max_l2"))


@k.block_rule("L2 of the step", "ADAPTER_STEP", "global.adapter")
def adapter_step(facts: Facts, block: GlobalAdapter, path: Path) -> k.Judgement:
    """How far an adapter is from the last one that was let in in this run, for each round in between (threat T20).

    So after n rounds it is at most n steps from the run's first adapter, whatever each round brought. That one has none
    before it: its own norm, the frozen factors and the round's transcript bound it. A step that cannot be measured,
    since the last adapter is gone or of another form, is refused.

    `max_step_l2` is the longest that what a round's updates come to may be. Where the signed plan has a server
    optimiser, takes a median or a trimmed mean, or weights silos by their steps, the limit of a step follows from it
    (`fedsilo.protocol.aggregation.step_bound`).
    """
    path = (*path, "max_step_l2")
    if facts["first_of_run"] is True:
        return k.not_applicable(path)
    step, rounds = facts["step_l2"], facts["step_rounds"]
    return k.at_most(
        step / rounds if step is not None and rounds >= 1 else None, k.step_limit(facts, block.max_step_l2), path
    )


@k.block_rule("L2 of the base's shift", "SHIFT_L2", "global.adapter")
def shift_l2(facts: Facts, block: GlobalAdapter, path: Path) -> k.Judgement:
    """How far the base's weights are shifted in all (threat T20). No silo trains or sends a shift: it is the mean of
    what the silos' products are beyond their factors' means."""
    path = (*path, "max_shift_l2")
    return k.at_most(facts["shift_l2"], block.max_shift_l2, path) if "shift_l2" in facts else k.not_applicable(path)


@k.block_rule("L2 of the shift's step", "SHIFT_STEP", "global.adapter")
def shift_step(facts: Facts, block: GlobalAdapter, path: Path) -> k.Judgement:
    """How far the shift is from that of the last adapter that was let in, or, before there is one, from none, for each
    round in between. A run begins without a shift; what cannot be measured is refused."""
    path = (*path, "max_shift_step_l2")
    if "shift_l2" not in facts:
        return k.not_applicable(path)
    if facts["first_of_run"] is True:
        rounds, step = facts["adapter_round"], facts["shift_l2"]
        return k.at_most(step, rounds * block.max_shift_step_l2, path)
    step, rounds = facts["shift_step_l2"], facts["step_rounds"]
    return k.at_most(step / rounds if step is not None and rounds >= 1 else None, block.max_shift_step_l2, path)


PER_ROUND = k.limit_rule("factor sets per round", "PER_ROUND", "per_round", k.next_of_round, *_UPDATES)


def _elsewhere(facts: Facts) -> bool:
    """Only the site that trained knows on what, and the numbers do not cross the wire (threat T9)."""
    return bool(facts["direction"] != "egress")


@k.block_rule("records of the round", "MIN_RECORDS", *_UPDATES)
def records(facts: Facts, block: LoraFactors, path: Path) -> k.Judgement:
    """Enough distinct private records, so that no update is one record's. Public steps alone are nobody's."""
    if _elsewhere(facts):
        return k.not_applicable()
    path = (*path, "min_records")
    if facts["records"] == 0:
        return k.Judgement("ok", 0, block.min_records, path)
    return k.at_least(facts["records"], block.min_records, path)


LOCAL_EPOCHS = k.limit_rule(
    "local epochs of the round",
    "LOCAL_EPOCHS",
    "max_local_epochs",
    k.fact("epochs"),
    *_UPDATES,
    unless=_elsewhere,
    why="No record was given more often than this.",
)
STEPS = k.limit_rule("steps of the round", "STEPS", "max_steps", k.fact("steps"), *_UPDATES, unless=_elsewhere)


# ---- what is done to an update before it leaves ----------------------------------------


def clip_factor(l2: float | None, clip_l2: float) -> float:
    """Return the factor for every value of a delta, so that its L2 norm is at most clip_l2: 1.0 within the limit.

    Args:
        l2: norm over all tensors; None where a value is not finite.
        clip_l2: the limit; 0 makes every value 0.

    Raises:
        ValueError: a value is not finite, so there is no norm to clip to.
    """
    if l2 is None or not math.isfinite(l2):
        raise ValueError("a delta that is not finite cannot be clipped")
    return 1.0 if l2 <= clip_l2 else clip_l2 / l2


def quantise(values: Array, grid: str) -> Array:
    """Round float32 values to the nearest one of the grid: float32 (unchanged) or bfloat16.

    Raises:
        ValueError: no such grid.
    """
    if grid not in MANTISSA_BITS:
        raise ValueError(f"there is no grid {grid!r}")
    return from_bfloat16_bits(to_bfloat16_bits(values)) if grid == "bfloat16" else values


def randomise_low_bits(values: Array, bits: int, grid: str, random_bytes: Callable[[int], bytes]) -> Array:
    """Overwrite the lowest bits of each value's mantissa, on its grid, by random ones (threat T5).

    Sign and exponent stay, and so does zero, whose exponent is that of denormals. What was written into these bits is
    gone. What this does not stop: a payload in the bits above, in the choice of zeros, or spread over many values as a
    small change of each (N1): such a one is read out of the sum, in which the random bits cancel.

    Args:
        values: float32 values of the grid.
        bits: how many; more than the grid's mantissa has means all of it.
        grid: float32 or bfloat16.
        random_bytes: (count) -> that many bytes, from a source that nobody can predict.
    """
    mantissa = MANTISSA_BITS[grid]
    bits = min(bits, mantissa)
    shift = np.uint32(MANTISSA_BITS["float32"] - mantissa)
    mask = np.uint32(((1 << bits) - 1) << int(shift))
    width = np.dtype("<u1" if bits <= 8 else "<u2" if bits <= 16 else "<u4")
    result = np.array(values, dtype=np.float32)
    pattern = result.reshape(-1).view(np.uint32)
    noise = np.frombuffer(random_bytes(pattern.size * width.itemsize), dtype=width).astype(np.uint32)
    overwritten = (pattern & ~mask) | ((noise << shift) & mask)
    np.copyto(pattern, overwritten, where=(pattern & _EXPONENT) != 0)
    return result


def transform_factors(
    l2: float | None, rules: LoraFactors, random_bytes: Callable[[int], bytes]
) -> tuple[Callable[[Array], Array], dict[str, Any]]:
    """Clip, quantise and overwrite low bits, as the policy's block for the update says.

    Args:
        l2: norm of the delta over all its tensors, as `measure` found it.
        rules: the block.
        random_bytes: (count) -> that many bytes; asked only where the block wants low bits overwritten.

    Returns:
        what makes float32 values fit, to be applied once to each, a tile at a time and so without a second copy of
        the delta; and the record of it.

    Raises:
        ValueError: a value is not finite.
    """
    bits, grid = rules.randomise_low_bits, rules.quantise.grid
    # Random bits may lengthen a value by this factor at most, so that what was clipped still fits max_l2.
    clip_l2 = rules.clip_l2 / _growth(bits, grid)
    factor = clip_factor(l2, clip_l2)

    def fit(values: Array) -> Array:
        scaled = values if factor == 1.0 else (values.astype(np.float64) * factor).astype(np.float32)
        rounded = quantise(scaled, grid)
        return randomise_low_bits(rounded, bits, grid, random_bytes) if bits else rounded

    record = {
        "l2_before": l2,
        "clip_l2": clip_l2,
        "clipped": factor != 1.0,
        "grid": grid,
        "randomised_low_bits": min(bits, MANTISSA_BITS[grid]),
    }
    return fit, record


def changes_bytes(record: Mapping[str, Any], dtype: str) -> bool:
    """Return whether what a record of `transform_factors` tells of may leave other bytes than were offered.

    Args:
        record: empty where nothing was transformed.
        dtype: of the wire, whose rounding the offered bytes have too.
    """
    return bool(record) and (
        record["clipped"] or record["randomised_low_bits"] > 0 or record["grid"] not in ("float32", dtype)
    )


def _growth(bits: int, grid: str) -> float:
    """The most by which overwriting `bits` of a mantissa multiplies a value: from 1.0 with all of them 0 to all 1."""
    mantissa = MANTISSA_BITS[grid]
    return 1.0 if bits == 0 else 1.0 + ((1 << min(bits, mantissa)) - 1) / (1 << mantissa)


# ---- figures --------------------------------------------------------------------------------


def largest(block: LoraFactors, at: k.Figures) -> tuple[int, int]:
    size = at.schema.bytes_of(at.kind) if at.schema else at.file.budgets.message_bytes
    return block.per_round, block.per_round * size


def bits(block: LoraFactors, at: k.Figures) -> Bits:
    if at.schema is None:
        elements = at.file.budgets.message_bytes // DTYPE_ITEM_BYTES[block.quantise.grid]
    else:
        elements = at.schema.elements_of(at.kind)
    # an element is bound by the norm of its tensor; the norm of the whole narrows the vector, not each value
    limit = min(block.max_tensor_l2, block.max_l2)
    points = grid_points(limit, block.quantise.grid, block.randomise_low_bits)
    each = math.log2(points)
    random = f", lowest {block.randomise_low_bits} bits random" if block.randomise_low_bits else ""
    values = f"{elements} values of {each:.1f} bits ({block.quantise.grid}, at most {limit:g}{random})"
    return Bits(block.per_round * elements * each, f"{block.per_round} x {values}", *low_bits(block, elements))


def low_bits(block: LoraFactors, elements: int) -> tuple[float, str]:
    """Sign and mantissa of every value hold the payload; its exponent is one that no clipping changes (T5).

    Args:
        block: the policy's, of the update.
        elements: values of one update.
    """
    pattern, exponent = _payload(block, elements)
    values = pattern.view(np.float32)
    norm = float(np.linalg.norm(values.astype(np.float64))) * math.sqrt(max(elements, 1) / _SAMPLE)
    fit, _ = transform_factors(norm, block, np.random.default_rng(1).bytes)
    left = fit(values).view(np.uint32)
    places = [place for place in (*range(_MANTISSA_WIRE_BITS), _SIGN_BIT) if _same(pattern, left, place)]
    written = [place for place in places if exponent is not None and np.any((pattern >> place) & 1)]
    bits = block.per_round * elements * len(written)
    return bits, f"T5: the payload in {len(written)} bits of each value, read back from what was transformed"


def _payload(block: LoraFactors, elements: int) -> tuple[np.ndarray[tuple[int], np.dtype[np.uint32]], int | None]:
    """Patterns of values on the block's grid that are short enough as a whole, and their exponent (None: none is)."""
    limit = min(block.clip_l2, block.max_l2, block.max_tensor_l2)
    # a value is below 2 to the exponent plus 1, and random low bits shorten the limit by less than half
    most = limit / (4 * math.sqrt(max(elements, 1)))
    exponent = math.floor(math.log2(most)) if most > 0 else _LEAST_EXPONENT - 1
    if exponent < _LEAST_EXPONENT:
        return np.zeros(_SAMPLE, np.uint32), None
    draws = np.random.default_rng(0).integers(0, 1 << 32, _SAMPLE, dtype=np.uint32)
    dropped = _MANTISSA_WIRE_BITS - MANTISSA_BITS[block.quantise.grid]
    free = np.uint32((1 << _SIGN_BIT) | (((1 << _MANTISSA_WIRE_BITS) - 1) & ~((1 << dropped) - 1)))
    return (draws & free) | np.uint32((min(exponent, 0) + 127) << _MANTISSA_WIRE_BITS), exponent


def _same(
    sent: np.ndarray[tuple[int], np.dtype[np.uint32]], got: np.ndarray[tuple[int], np.dtype[np.uint32]], place: int
) -> bool:
    return not bool(np.any(((sent ^ got) >> place) & 1))


_RULES = (
    schema,
    tensor_set,
    frozen,
    shapes,
    dtype,
    rank,
    FINITE,
    replace(k.canonical, name="canonical values"),
    base,
    grid,
    DELTA_L2,
    TENSOR_L2,
    TOTAL_L2,
    adapter_l2,
    adapter_step,
    shift_l2,
    shift_step,
    PER_ROUND,
    records,
    LOCAL_EPOCHS,
    STEPS,
)


class _OneValue(Mapping[str, Array]):
    """Tensors full of one value, and the frozen ones as the seed draws them; made when they are looked at, so that a
    model's whole adapter is never in memory."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], value: float, freeze: Freeze, seed: int) -> None:
        self._shapes, self._value, self._freeze, self._seed = shapes, value, freeze, seed

    def __getitem__(self, name: str) -> Array:
        if is_shift(name):  # a run begins without
            return np.zeros(self._shapes[name], np.float32)
        if is_drawn(name, self._freeze):
            return initial_factors([(name, self._shapes[name])], self._seed, self._freeze)[name]
        return np.full(self._shapes[name], self._value, np.float32)

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._shapes))

    def __len__(self) -> int:
        return len(self._shapes)


def example(at: k.Around) -> k.Example:
    """Return an update, or a whole adapter, of half the length that it may have or less.

    Raises:
        UsageError: the schema is not at hand.
    """
    schema, block = at.schema, at.block
    if schema is None:
        raise UsageError(
            f"{at.kind} needs the policy's LoRA schema, which is not there",
            hint="put the schema file where the policy names it, or write it with `fedsilo policy schema make`",
        )
    shapes = schema.shapes_of(at.kind)
    longest = min(getattr(block, key) for key in ("max_l2", "max_tensor_l2", "max_total_l2") if hasattr(block, key))
    value = longest / 2 / math.sqrt(max(1, sum(math.prod(shape) for shape in shapes.values())))
    value = 2.0 ** math.floor(math.log2(value)) if value > 0 else 0.0  # which every grid has
    # a whole adapter travels as the coordinator's float32 master, whatever the deltas travel in
    header = pb.Factors(
        base_digest=k.BASE_DIGEST if at.sent else "",
        schema_sha256=schema.digest,
        rank=schema.rank,
        scale=schema.scale,
        dtype=schema.dtype if at.sent else "float32",
        tensors=[pb.TensorEntry(name=name, shape=shapes[name]) for name in sorted(shapes)],
    )
    known: Facts = {"last_adapter_first": True}
    if at.sent:
        trained = (("records", "min_records"), ("epochs", "max_local_epochs"), ("steps", "max_steps"))
        known = {"base_l2": 0.0, **{name: getattr(block, key) for name, key in trained}}
    return k.Example(header, known, _OneValue(shapes, value, "none" if at.sent else schema.freeze, at.plan.seed))


KINDS = (
    *(
        k.PolicyKind(kind, example, sent=LoraFactors, measure=measure, rules=_RULES, largest=largest, bits=bits)
        for kind in _UPDATES
    ),
    k.PolicyKind("global.adapter", example, taken=GlobalAdapter, measure=measure, rules=_RULES),
)
