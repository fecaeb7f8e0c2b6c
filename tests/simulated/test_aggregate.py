"""Aggregation: bit for bit the slow loop, whatever the tile size; and what it refuses."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

import coordinator.aggregate as aggregate_module
from coordinator.aggregate import (
    AggregateRefusedError,
    aggregate,
    initial_adapter,
    l2_norm,
    read_factors,
    write_peft_folder,
)
from coordinator.blobs import Blobs, BytesPayload, Spool
from fedsilo.files.durable import DiskFullError
from fedsilo.protocol import codec
from fedsilo.protocol.aggregation import ElementWise
from fedsilo.protocol.errors import OperationError
from fedsilo.protocol.factors import initial_factors, mean_delta
from fedsilo.protocol.methods import METHODS
from tests.policies.setting import MEAN, PLAN, SCHEMA


def factors(tensors: dict[str, Any], base: str, dtype: str = "float32") -> BytesPayload:
    return BytesPayload(
        codec.encode_factors(tensors, base_digest=base, schema_sha256=SCHEMA.digest, rank=2, scale=2.0, dtype=dtype)
    )


def drawn(seed: int, scale: float = 1.0) -> dict[str, Any]:
    draw = np.random.default_rng(seed)
    return {name: draw.normal(0, scale, shape).astype(np.float32) for name, shape in SCHEMA.tensors}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tile_elements", [1, 5, 12, 1 << 20])
def test_tiles_do_not_change_a_bit_of_the_slow_loop(tmp_path: Path, tile_elements: int, dtype: str) -> None:
    master = factors(drawn(0), "")
    uploads = [factors(drawn(seed, 1e-3), master.digest, dtype) for seed in (1, 2, 3)]
    made = aggregate(Blobs(tmp_path), master, uploads, MEAN, tile_elements=tile_elements)
    deltas = [codec.decode_factors(upload.data).tensors for upload in uploads]
    for name, values in read_factors(made).tensors():
        base = codec.decode_factors(master.data).tensors[name].reshape(-1)
        for position, value in enumerate(values.reshape(-1)):
            total = deltas[0][name].reshape(-1)[position]
            for delta in deltas[1:]:
                total = np.float32(total + delta[name].reshape(-1)[position])
            assert value == np.float32(base[position] + np.float32(total / np.float32(3)))
    # the header names a global adapter: no base, float32
    assert (read_factors(made).header.base_digest, read_factors(made).header.dtype) == ("", "float32")


def test_opposite_deltas_cancel_although_their_products_are_one(tmp_path: Path) -> None:
    """FedIT: (A, B) = (1, 1) and (-1, -1) average to (0, 0)."""
    master = factors({name: np.zeros(shape, np.float32) for name, shape in SCHEMA.tensors}, "")
    ones = {name: np.ones(shape, np.float32) for name, shape in SCHEMA.tensors}
    uploads = [factors(ones, master.digest), factors({name: -values for name, values in ones.items()}, master.digest)]
    made = aggregate(Blobs(tmp_path), master, uploads, MEAN)
    assert made.digest == master.digest


def test_one_silo_gives_base_plus_delta(tmp_path: Path) -> None:
    master = factors(drawn(0), "")
    upload = factors(drawn(1, 1e-3), master.digest)
    made = dict(read_factors(aggregate(Blobs(tmp_path), master, [upload], MEAN)).tensors())
    delta = codec.decode_factors(upload.data).tensors
    for name, values in codec.decode_factors(master.data).tensors.items():
        assert (values + delta[name]).tobytes() == made[name].tobytes()


def test_another_base_other_tensors_and_infinite_results_are_refused(tmp_path: Path) -> None:
    master, blobs = factors(drawn(0), ""), Blobs(tmp_path)
    with pytest.raises(AggregateRefusedError, match="another adapter"):
        aggregate(blobs, master, [factors(drawn(1), "0" * 64)], MEAN)
    less = dict(list(drawn(1).items())[:1])
    with pytest.raises(AggregateRefusedError, match="other tensors"):
        aggregate(blobs, master, [factors(less, master.digest)], MEAN)
    huge = {name: np.full(shape, 3e38, np.float32) for name, shape in SCHEMA.tensors}
    with np.errstate(over="ignore"), pytest.raises(AggregateRefusedError, match="not finite"):
        aggregate(blobs, master, [factors(huge, master.digest)] * 2, MEAN)
    with pytest.raises(AggregateRefusedError, match="without uploads"):
        aggregate(blobs, master, [], MEAN)


def test_a_full_disk_is_no_refusal_of_the_uploads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    master, blobs = factors(drawn(0), ""), Blobs(tmp_path)

    def full(*_: object) -> None:
        raise DiskFullError("no space left")

    upload = factors(drawn(1, 1e-3), master.digest)
    assert aggregate(blobs, master, [upload], MEAN).size_bytes == len(master.data)
    monkeypatch.setattr(blobs, "spool", full)
    with pytest.raises(OperationError) as caught:
        aggregate(blobs, master, [upload], MEAN)
    assert not isinstance(caught.value, AggregateRefusedError)


def test_the_adapter_folder_is_on_the_disk_when_it_is_said_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: dict[str, int] = {}
    real = os.fsync

    def fsync(descriptor: int) -> None:
        name = Path(f"/proc/self/fd/{descriptor}").readlink()
        flushed[name.name] = name.stat().st_size
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    write_peft_folder(tmp_path / "adapter", BytesPayload(initial_adapter(SCHEMA, 1)), SCHEMA, "tiny")
    weights = tmp_path / "adapter" / "adapter_model.safetensors"
    assert flushed[weights.name] == weights.stat().st_size > 0
    assert "adapter" in flushed, "its folder entry too"


@pytest.mark.parametrize("tile_elements", [3, 1 << 18])
def test_the_folder_s_weights_are_those_that_the_library_of_the_format_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tile_elements: int
) -> None:
    monkeypatch.setattr(aggregate_module, "TILE_ELEMENTS", tile_elements)
    tensors = drawn(5)
    write_peft_folder(tmp_path / "adapter", factors(tensors, ""), SCHEMA, "tiny")
    with safe_open(tmp_path / "adapter" / "adapter_model.safetensors", framework="numpy") as file:
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
        assert file.metadata() == {"format": "pt"}
    assert found.keys() == {f"base_model.model.{name}.weight" for name in tensors}
    for name, values in tensors.items():
        np.testing.assert_array_equal(found[f"base_model.model.{name}.weight"], values)


def test_the_initial_adapter_is_drawn_from_the_seed_alone_and_b_is_zero() -> None:
    first, again, other = (initial_adapter(SCHEMA, seed) for seed in (1, 1, 2))
    assert first == again != other
    whole = codec.encode_factors(
        initial_factors(SCHEMA.tensors, 1), base_digest="", schema_sha256=SCHEMA.digest, rank=SCHEMA.rank,
        scale=SCHEMA.scale, dtype="float32",
    )  # fmt: skip
    assert first == whole, "though it is written a tensor at a time"
    for name, values in codec.decode_factors(first).tensors.items():
        if name.endswith("lora_B"):
            assert not values.any()
        else:
            assert 0 < np.abs(values).max() <= 1 / np.sqrt(dict(SCHEMA.tensors)[name][1])


def test_the_norm_is_that_of_all_values_together() -> None:
    tensors = drawn(3)
    together = np.concatenate([values.reshape(-1) for values in tensors.values()]).astype(np.float64)
    assert l2_norm(factors(tensors, "")) == pytest.approx(np.sqrt((together**2).sum()), rel=1e-12)


def test_a_payload_on_a_local_disk_is_opened_once_and_closed_with_its_object(tmp_path: Path) -> None:
    kept = Blobs(tmp_path).keep(BytesPayload(b"0123456789"))

    place = Path(kept.path)

    def opened() -> int:
        return sum(link.is_symlink() and link.readlink() == place for link in Path("/proc/self/fd").iterdir())

    assert opened() == 0
    assert b"".join(kept.read_at(start, 3) for start in range(0, 12, 3)) == b"0123456789"  # and nothing behind its end
    assert opened() == 1
    del kept
    assert opened() == 0


@pytest.mark.parametrize("block", [1, 7, 64, 1 << 16])
def test_a_norm_is_the_root_of_all_squares_in_whatever_blocks(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(aggregate_module, "SUMMED_ELEMENTS", block)
    tensors = drawn(4)
    squares = math.fsum(float(value) ** 2 for values in tensors.values() for value in values.reshape(-1))
    # so many products and sums, each right to 2^-53 of itself
    assert l2_norm(factors(tensors, "")) == pytest.approx(math.sqrt(squares), rel=1e-13)


def test_arithmetic_that_fails_leaves_nothing(tmp_path: Path) -> None:
    master, blobs = factors(drawn(0), ""), Blobs(tmp_path)
    calls: list[int] = []

    def failing(tile: Any, deltas: Any, state: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise ZeroDivisionError
        return (tile + mean_delta(deltas),)

    with pytest.raises(ZeroDivisionError):
        aggregate(blobs, master, [factors(drawn(1), master.digest)], ElementWise(failing), tile_elements=2)
    assert list(blobs.arriving.iterdir()) == []


def test_many_uploads_have_smaller_tiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aggregate_module, "TILE_ELEMENTS", 8)
    monkeypatch.setattr(aggregate_module, "TILES_ELEMENTS", 24)
    master, held = factors(drawn(0), ""), list[int]()

    def noted(tile: Any, deltas: Any, state: Any) -> Any:
        held.append(sum(delta.size for delta in deltas))
        return (tile + mean_delta(deltas),)

    for silos, most in ((1, 8), (3, 24), (6, 24), (40, 40)):  # one number of each is the least
        held.clear()
        uploads = [factors(drawn(seed), master.digest) for seed in range(silos)]
        aggregate(Blobs(tmp_path), master, uploads, ElementWise(noted))
        assert max(held) == most


@pytest.mark.parametrize("name", sorted(METHODS))
def test_a_method_s_arithmetic_goes_element_by_element_into_memory_of_its_own(name: str) -> None:
    draw = np.random.default_rng(6)
    how = METHODS[name].aggregate(PLAN, PLAN.silos[:3])
    assert isinstance(how, ElementWise)
    tiles = [draw.normal(0, 1, (4, size)).astype(np.float32) for size in (6, 3)]
    apart = [how.combine(tile[0], list(tile[1:]), ())[0] for tile in tiles]
    together = np.concatenate(tiles, axis=1)
    kept = apart[0].copy()
    assert np.array_equal(how.combine(together[0], list(together[1:]), ())[0], np.concatenate(apart))
    assert np.array_equal(apart[0], kept), "what it returned is not written to again"
    assert not any(np.shares_memory(apart[0], other) for other in (apart[1], *tiles[0]))


def test_a_number_that_is_not_finite_is_told_of_its_own_tensor(tmp_path: Path) -> None:
    master = factors({name: np.zeros(shape, np.float32) for name, shape in SCHEMA.tensors}, "")
    for name, shape in SCHEMA.tensors:
        for place in (0, -1):
            bad = {each: np.zeros(other, np.float32) for each, other in SCHEMA.tensors}
            bad[name] = np.zeros(shape, np.float32)
            bad[name].reshape(-1)[place] = np.inf
            with pytest.raises(AggregateRefusedError, match=re.escape(f"the aggregate of {name} is")):
                aggregate(Blobs(tmp_path), master, [factors(bad, master.digest)], MEAN)


def test_a_disk_that_fills_up_while_a_tile_is_written_behind_is_told_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    master, blobs = factors(drawn(0), ""), Blobs(tmp_path)
    upload, real, calls = factors(drawn(1, 1e-3), master.digest), Spool.write, list[int]()

    def write(spool: Spool, chunk: codec.Buffer) -> None:
        calls.append(1)
        if len(calls) == 3:  # the header is the first
            spool.drop()
            raise DiskFullError("no space left")
        real(spool, chunk)

    monkeypatch.setattr(Spool, "write", write)
    with pytest.raises(DiskFullError):
        aggregate(blobs, master, [upload], MEAN, tile_elements=5)
    assert list(blobs.arriving.iterdir()) == []
    monkeypatch.undo()
    assert aggregate(blobs, master, [upload], MEAN, tile_elements=5).size_bytes == len(master.data)
