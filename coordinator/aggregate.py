"""Arithmetic on adapters, tile by tile: the first one, the next one, the folder people load, and how far the silos of a
committed round drifted apart.

The master is float32 whatever the wire dtype, uploads are deltas against it, and they are combined in roster order,
because float addition is not associative. Held at a time are a tile of each upload, at most `TILES_ELEMENTS` together,
and what combining them takes. What a round fixes is in no upload and is copied from master to master byte for byte.

The drift is a note of the run record, read from the uploads that were averaged, one module at a time. The
figures are the coordinator's own, which has every upload anyway: they tell a reader of the run record how much two
silos' updates differ, and nothing of a single one. It is noted as the round is committed, under the driver's lock:
other runs of this coordinator wait for about a second where 16 silos sent 70 MB each. Of a model with many modules,
`MODULES_MAX` are read, the same in every round: those whose names have the smallest SHA-256, so no kind or depth is
preferred. Distances are then scaled to all modules; the note says of how many they are.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from coordinator.blobs import AnyPayload, Blobs, FilePayload
from fedsilo.files.adapter_folder import CONFIG, WEIGHTS, adapter_config, adapter_pieces, name_in_folder
from fedsilo.files.durable import fsync_directory, write_durably
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.aggregation import Aggregate, ElementWise, TensorWise
from fedsilo.protocol.codec import (
    Array,
    FactorsReader,
    TensorPlace,
    canonical_values,
    factors_start,
    sha256_hex,
)
from fedsilo.protocol.errors import OperationError
from fedsilo.protocol.factors import DriftSums, Fixed, FrozenDigest, Pair, initial_factors, is_fixed, is_shift
from fedsilo.protocol.products import l2_of
from policies.schema import LoraSchema

TILE_ELEMENTS = 1 << 17  # at most, of each upload: 512 KiB, which takes no longer than more at a time
TILES_ELEMENTS = 1 << 21  # at most, of all uploads together: 8 MiB
SUMMED_ELEMENTS = 1 << 16  # in float64 half a MiB, which stays in the processor's cache


class AggregateRefusedError(OperationError):
    """The uploads do not make an adapter. A disk that fails is another error: a restart may help there, not here."""

    default_code = "AGGREGATE_REFUSED"


class LazyTensors(Mapping[str, Array]):
    """The tensors of a payload by name, each read when asked for, so that rules see one at a time."""

    def __init__(self, reader: FactorsReader) -> None:
        self._reader = reader
        self._places = {place.name: place for place in reader.places}

    def __getitem__(self, name: str) -> Array:
        place = self._places[name]
        return self._reader.tile(place, 0, place.elements).reshape(place.shape)

    def __contains__(self, name: object) -> bool:
        return name in self._places  # `Mapping` would read the tensor to know

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def read_factors(payload: AnyPayload) -> FactorsReader:
    """Open an update's factors. Raises PeerError as `FactorsReader` does."""
    return FactorsReader(payload, payload.size_bytes)


class _Drawn(Mapping[str, Array]):
    """The initial factors by name, each drawn when asked for."""

    def __init__(self, schema: LoraSchema, seed: int) -> None:
        self._shapes, self._seed, self._freeze = dict(schema.tensors), seed, schema.freeze

    def __getitem__(self, name: str) -> Array:
        return initial_factors([(name, self._shapes[name])], self._seed, self._freeze)[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def initial_pieces(schema: LoraSchema, seed: int) -> Iterator[bytes | memoryview]:
    """The adapter every silo starts from, drawn once and broadcast: independently drawn A would break averaging.
    The payload's bytes from front to back, of which one tensor is held at a time."""
    return adapter_pieces(schema, _Drawn(schema, seed))


def initial_adapter(schema: LoraSchema, seed: int) -> bytes:
    """The same as a whole."""
    return b"".join(initial_pieces(schema, seed))


@dataclass
class ServerState:
    """Numbers that are kept beside each trained number of the master, from one round to the next: one payload, in which
    a tensor of shape [...] is one of shape [..., how many].

    Attributes:
        before: what the last committed round left; None before there is one: all are 0.
        after: what this one leaves, once it is kept.
    """

    before: AnyPayload | None = None
    after: FilePayload | None = None


def aggregate(
    blobs: Blobs,
    master: AnyPayload | None,
    uploads: Sequence[AnyPayload],
    how: Aggregate,
    *,
    fixed: Fixed = "none",
    tile_elements: int | None = None,
    state: ServerState | None = None,
) -> FilePayload:
    """Combine the uploads, and keep the result under its digest: the next master, or one silo's own result.

    A tile goes over the ends of tensors, which are many and small.

    Args:
        blobs: where the result is kept.
        master: float32 `global.adapter` payload; None where the uploads stand by themselves.
        uploads: payloads of updates in roster order, float32 or bfloat16, all against this master.
        how: of the method.
        fixed: what the round neither trains nor sends; the uploads hold exactly the other tensors.
        tile_elements: n at most; the result does not depend on it. By default what the constants of this module say.
        state: where `how` keeps some; takes in what is left, which is durable when this returns.

    Raises:
        AggregateRefusedError: no upload, one against another base or with other tensors, or a result not finite.
        DiskFullError: no space for the result; the old one stays.
        OperationError: the disk failed in another way; the old one stays.
    """
    if not uploads:
        raise AggregateRefusedError("a round without uploads cannot be committed")
    readers = [read_factors(upload) for upload in uploads]
    base = readers[0] if master is None else read_factors(master)
    base_digest = readers[0].header.base_digest if master is None else master.digest
    shapes = [(place.name, place.shape) for place in base.places if not is_fixed(place.name, fixed)]
    for reader in readers:
        if reader.header.base_digest != base_digest:
            raise AggregateRefusedError("an upload is a delta against another adapter than the master")
        if [(place.name, place.shape) for place in reader.places] != shapes:
            raise AggregateRefusedError("an upload has other tensors than those that the run trains")
    # proto floats are stored as given, so copying the header keeps the scale bit for bit
    header = pb.Factors()
    header.CopyFrom(base.header)
    header.base_digest, header.dtype = "", "float32"
    tiles: Iterator[tuple[Array, ...]]
    if isinstance(how, ElementWise):
        before = read_factors(state.before) if state is not None and state.before is not None else None
        tile_elements = tile_elements or max(1, min(TILE_ELEMENTS, TILES_ELEMENTS // len(uploads)))
        tiles = _combined(base, readers, how, before, fixed, tile_elements)
    else:
        result = _as_wholes(base if how.master else None, readers, how, fixed)
        _set_tensors(header, {name: np.shape(result[name]) for name in sorted(result)})
        tiles = ((canonical_values(result[name]).reshape(-1),) for name in sorted(result))
    with ExitStack() as stack:
        spool, beside = stack.enter_context(blobs.spool()), None
        spool.write(factors_start(header))
        if isinstance(how, ElementWise) and how.state and state is not None:
            beside = stack.enter_context(blobs.spool())
            _set_tensors(header, {name: (*shape, how.state) for name, shape in shapes})
            header.base_digest = base_digest
            beside.write(factors_start(header))
        for values, *state_values in tiles:
            spool.write(values.astype("<f4", copy=False).data)
            if state_values and beside is not None:
                beside.write(np.stack(state_values, axis=-1).astype("<f4", copy=False).data)
        if state is not None and beside is not None:
            state.after = blobs.keep(beside.finish())
        return blobs.keep(spool.finish())


def _set_tensors(header: pb.Factors, shapes: Mapping[str, tuple[int, ...]]) -> None:
    del header.tensors[:]
    header.tensors.extend(pb.TensorEntry(name=name, shape=shape) for name, shape in shapes.items())


def _combined(
    base: FactorsReader,
    readers: Sequence[FactorsReader],
    how: ElementWise,
    before: FactorsReader | None,
    fixed: Fixed,
    tile_elements: int,
) -> Iterator[tuple[Array, ...]]:
    """The new master's values from front to back, canonical, each tile with its elements' state."""
    in_uploads = 0  # elements of the uploads that are passed: they hold the trained tensors in the same order
    for is_copied, group in itertools.groupby(base.places, lambda place: is_fixed(place.name, fixed)):
        places = list(group)
        elements = sum(place.elements for place in places)
        for start in range(0, elements, tile_elements):
            stop = min(start + tile_elements, elements)
            tile = base.tile(places[0], start, stop)
            if is_copied:
                yield (tile,)
                continue
            first, last = in_uploads + start, in_uploads + stop
            uploads = [reader.tile(reader.places[0], first, last) for reader in readers]
            state = _state_of_elements(before, how.state, first, last)
            results = tuple(np.asarray(each, dtype=np.float32) for each in how.combine(tile, uploads, state))
            for each in results:
                if not np.isfinite(each).all():
                    name = _place_of(places, start + int(np.argmin(np.isfinite(each)))).name
                    raise _not_finite(name)
            yield canonical_values(results[0]), *results[1:]  # as encode_factors does (T4)
        in_uploads += 0 if is_copied else elements


def _state_of_elements(before: FactorsReader | None, count: int, start: int, stop: int) -> list[Array]:
    """Return the state of elements of the uploads, `count` arrays of [stop - start]; zeros where there is none."""
    if before is None:
        return [np.zeros(stop - start, np.float32) for _ in range(count)]
    tile = before.tile(before.places[0], count * start, count * stop)
    return [np.ascontiguousarray(each) for each in tile.reshape(-1, count).T]


def _as_wholes(
    base: FactorsReader | None, readers: Sequence[FactorsReader], how: TensorWise, fixed: Fixed
) -> dict[str, Array]:
    """The result's tensors by name, and those that are fixed."""
    master = None if base is None else LazyTensors(base)
    try:
        combined = how.combine(master, [LazyTensors(reader) for reader in readers])
    except ValueError as error:
        raise AggregateRefusedError(f"the updates have no result: {error}") from error
    result = {name: np.asarray(combined[name], dtype=np.float32) for name in combined}
    for name, values in result.items():
        if not np.isfinite(values).all():
            raise _not_finite(name)
    return result if master is None else {name: master[name] for name in master if is_fixed(name, fixed)} | result


def _not_finite(name: str) -> AggregateRefusedError:
    return AggregateRefusedError(f"the aggregate of {name} is not finite; the round is not committed")


def _place_of(places: Sequence[TensorPlace], element: int) -> TensorPlace:
    """The tensor that an element of neighbouring ones is in."""
    ends = itertools.accumulate(place.elements for place in places)
    return next(place for place, end in zip(places, ends, strict=True) if element < end)


def l2_norm(payload: AnyPayload) -> float:
    """L2 norm, in float64, over all tensors but those of a base's shift, which are two factors of one product."""
    reader, squares = read_factors(payload), 0.0
    for is_left_out, group in itertools.groupby(reader.places, lambda place: is_shift(place.name)):
        places = list(group)  # which lie one behind the other
        elements = 0 if is_left_out else sum(place.elements for place in places)
        for start in range(0, elements, SUMMED_ELEMENTS):
            stop = min(start + SUMMED_ELEMENTS, elements)
            values = reader.tile(places[0], start, stop).astype(np.float64)
            squares += float(np.dot(values, values))
    return math.sqrt(squares)


class PeftFactors(Mapping[str, Array]):
    """An adapter as A and B of each module, by wire name, each made when asked for. A core is part of A; a shift of the
    base is further rows of A and columns of B, up to the same rank everywhere.

    Attributes:
        shapes: by wire name.
    """

    def __init__(self, reader: FactorsReader) -> None:
        self._tensors = LazyTensors(reader)
        stored = {place.name: place.shape for place in reader.places}
        self._further = max((shape[0] for name, shape in stored.items() if name.endswith(".shift_A")), default=0)
        self.shapes = {
            name: (shape[0] + self._further, shape[1]) if name[-1] == "A" else (shape[0], shape[1] + self._further)
            for name, shape in stored.items()
            if name.endswith((".lora_A", ".lora_B"))
        }

    def __getitem__(self, name: str) -> Array:
        module, _, side = name.rpartition(".")
        values, core, shift = self._tensors[name], f"{module}.lora_R", f"{module}.shift_{side[-1]}"
        if side == "lora_A" and core in self._tensors:
            return self._tensors[core] @ values
        if shift not in self._tensors:
            return values
        whole = np.zeros(self.shapes[name], np.float32)
        further = self._tensors[shift]
        whole[: len(values), : values.shape[1]] = values
        if side == "lora_A":
            whole[len(values) : len(values) + len(further)] = further
        else:
            whole[:, values.shape[1] : values.shape[1] + further.shape[1]] = further
        return whole

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


def _write_safetensors(file: BinaryIO, factors: PeftFactors) -> None:
    """The safetensors format (https://huggingface.co/docs/safetensors), tensor by tensor; its library holds copies."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in factors:
        start, end, shape = end, end + 4 * math.prod(factors.shapes[name]), factors.shapes[name]
        header[name_in_folder(name)] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for name in factors:
        file.write(np.ascontiguousarray(factors[name], "<f4").data)


def write_peft_folder(folder: Path, adapter: AnyPayload, schema: LoraSchema, base_model: str) -> None:
    """A standard PEFT adapter folder, as `PeftModel.from_pretrained` and vLLM read it, written without torch.

    Args:
        folder: made if it is not there.
        adapter: float32 `global.adapter` payload.
        schema: rank and alpha.
        base_model: what `base_model_name_or_path` shall say; a name for people, nothing is loaded from it.

    Raises:
        UsageError: a tensor name of the schema is not a LoRA factor's.
        OperationError: the disk refused.
    """
    factors = PeftFactors(read_factors(adapter))
    # a base's shift is scaled as the factors are, so alpha grows with the rank
    rank = schema.rank + schema.shift_rank
    alpha = schema.alpha if rank == schema.rank else schema.scale * rank
    config = adapter_config(iter(factors), rank=rank, alpha=alpha, base_model=base_model)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / WEIGHTS).open("wb") as file:
            _write_safetensors(file, factors)
            file.flush()
            os.fsync(file.fileno())  # on the disk before the database says that the run has ended
        fsync_directory(folder)
    except OSError as error:
        raise OperationError(f"cannot write {folder}: {error.strerror}") from error
    write_durably(folder / CONFIG, json.dumps(config, indent=2, sort_keys=True).encode() + b"\n")


# ---- how far silos drifted apart ---------------------------------------------------------------------------------

NAME = "drift"
MODULES_MAX = 28  # of all 196 of a 28-layer model it took a quarter of a round's time here with 4 silos, half with 16
DIGITS = 6  # that mean something


def drift_note(silos: Sequence[str], master: AnyPayload, uploads: Sequence[AnyPayload]) -> dict[str, Any]:
    """Fields of the note: distances between silos by factors and by products, and what averaging factors apart costs.

    Args:
        silos: in the order of the uploads.
        master: the adapter that the round began with.
        uploads: differences to it, in float32 or bfloat16; a factor that is frozen is in none of them. A core counts as
            part of A.

    Returns:
        silos, factors, products and aggregation_error as `fedsilo.protocol.factors.Drift` has them; modules,
        of_modules: how many were read, of how many.
    """
    base, readers = read_factors(master), [read_factors(upload) for upload in uploads]
    own, *others = (LazyTensors(reader) for reader in (base, *readers))
    sums = DriftSums(len(readers), base.header.scale)
    stems = [name.removesuffix(".lora_A") for name in own if name.endswith(".lora_A")]
    modules = [stem for stem in stems if f"{stem}.lora_B" in own]
    read = sorted(modules, key=lambda module: sha256_hex(module.encode()))[:MODULES_MAX]
    for module in sorted(read):
        a, b, core = own[f"{module}.lora_A"], own[f"{module}.lora_B"], f"{module}.lora_R"
        if core in own:
            none = np.zeros_like(b)
            sums.add((own[core] @ a, b), [(other[core] @ a, none) for other in others])
        else:
            sums.add((a, b), [_change(module, (a, b), other) for other in others])
    drift, whole = sums.drift(), math.sqrt(len(modules) / max(1, len(read)))  # squares of distances add up over modules
    return {
        "silos": list(silos),
        "factors": [[_rounded(whole * value) for value in row] for row in drift.factors.tolist()],
        "products": [[_rounded(whole * value) for value in row] for row in drift.products.tolist()],
        "aggregation_error": _rounded(drift.aggregation_error),
        "modules": len(read),
        "of_modules": len(modules),
    }


def shift_note(adapter: AnyPayload) -> dict[str, Any]:
    """Fields of the note on a base's shift: sha256 of its factors (name and shape as canonical JSON, then the values in
    little-endian order, tensor after tensor in name order), its norm, and the highest rank of a matrix."""
    tensors, digest, squares, rank = LazyTensors(read_factors(adapter)), FrozenDigest(), 0.0, 0
    for name in (name for name in tensors if is_shift(name)):
        values = tensors[name]
        digest.start(name, values.shape)
        digest.add(values)
        if name.endswith(".shift_A"):
            squares += l2_of((values, tensors[f"{name[:-1]}B"])) ** 2
            rank = max(rank, int(np.count_nonzero(values.any(axis=1))))
    scale = read_factors(adapter).header.scale
    return {"sha256": digest.hex, "l2": _rounded(scale * math.sqrt(squares)), "rank": rank}


def _change(module: str, factors: Pair, upload: LazyTensors) -> Pair:
    """Return what a silo added to a module's factors; 0 for one that is frozen."""
    a, b = (
        upload[name] if (name := f"{module}.{side}") in upload else np.zeros_like(own)
        for side, own in zip(("lora_A", "lora_B"), factors, strict=True)
    )
    return a, b


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
