"""What the coordinator holds in memory of an upload does not depend on how large it is."""

from __future__ import annotations

import dataclasses
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsilo.protocol._generated import federation_pb2 as pb
from policies.schema import LoraSchema
from tests.simulated import lines
from tests.simulated.coordinator_parts import until_quiet
from tests.simulated.lines import LARGE, LineSilo, line_federation
from tests.simulated.test_T23_T24_uploads import NAMES, RUN

MIB = 1 << 20
# Of averaging, tiles of 512 KiB: the adapter's, two uploads', their sum, their mean and up to three of the new adapter,
# 4 MiB; before it a chunk as it is made here and as it is parsed there, 2 MiB.
HELD_BYTES_MAX = 5 * MIB


def of_layers(layers: int) -> LoraSchema:
    """128 KiB of float32 a layer, as real adapters have many tensors of this size."""
    sides = (("A", (2, 8192)), ("B", (8192, 2)))
    return dataclasses.replace(
        LARGE,
        tensors=tuple(
            (f"model.layers.{layer:03d}.self_attn.q_proj.lora_{side}", shape)
            for layer in range(layers)
            for side, shape in sides
        ),
    )


@pytest.mark.slow
@pytest.mark.parametrize("layers", [64, 128])  # 8 and 16 MiB
def test_T23_an_upload_is_on_disk_and_not_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layers: int
) -> None:
    schema, peaks = of_layers(layers), list[int]()
    monkeypatch.setattr(lines, "LARGE", schema)
    house, silos = line_federation(tmp_path, silos=NAMES)
    for silo in silos:
        silo.join()
        silo.deltas[1] = {name: np.full(shape, 1e-4, np.float32) for name, shape in schema.updates[0]}
    house.submit(RUN + "silos: [hospital_a, hospital_b]\n")
    exchange = LineSilo.exchange

    def measured(self: LineSilo, envelope: pb.Envelope, payload: bytes, into: Any = None) -> Any:
        if envelope.kind != "lora.factors":
            return exchange(self, envelope, payload, into)
        assert len(payload) > layers * MIB // 8
        tracemalloc.start()  # the payload itself, at the silo, is there already
        try:
            return exchange(self, envelope, payload, into)
        finally:
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()

    monkeypatch.setattr(LineSilo, "exchange", measured)
    until_quiet(list(silos))
    assert house.run().state == "finished"  # so with the second upload's also the mean was made and kept
    assert len(peaks) == len(NAMES) and max(peaks) < HELD_BYTES_MAX
