"""Drift between silos in the run record, against the factors of each written out (methods 2.8)."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.round_drift import drift_note
from tests.policies.setting import SCHEMA
from tests.simulated.coordinator_parts import SILOS, federation, until_quiet
from tests.simulated.test_aggregate import drawn, factors

MODULES = sorted({name.rpartition(".")[0] for name, _ in SCHEMA.tensors})


def written_out(master: dict[str, Any], deltas: list[dict[str, Any]]) -> tuple[list[list[float]], float]:
    """Distances by products, scale 2, and the aggregation error."""
    wide = [{name: master[name].astype(np.float64) + delta.get(name, 0.0) for name in master} for delta in deltas]
    products = [{each: own[f"{each}.lora_B"] @ own[f"{each}.lora_A"] for each in MODULES} for own in wide]
    apart = [
        [2 * sum(((one[each] - other[each]) ** 2).sum() for each in MODULES) ** 0.5 for other in products]
        for one in products
    ]
    lost = whole = 0.0
    for each in MODULES:
        mean = sum(own[each] for own in products) / len(products)
        a, b = (sum(own[f"{each}.{name}"] for own in wide) / len(wide) for name in ("lora_A", "lora_B"))
        lost, whole = lost + ((mean - b @ a) ** 2).sum(), whole + (mean**2).sum()
    return apart, (lost / whole) ** 0.5


@pytest.mark.parametrize("frozen", [False, True])
def test_the_note_equals_the_adapters_written_out(frozen: bool) -> None:
    master = drawn(0)
    deltas = [
        {name: value for name, value in drawn(seed, 1e-3).items() if not frozen or name.endswith("lora_B")}
        for seed in (1, 2, 3)
    ]
    base = factors(master, "")
    note = drift_note(("a", "b", "c"), base, [factors(delta, base.digest) for delta in deltas])
    apart, error = written_out(master, deltas)
    assert note["silos"] == ["a", "b", "c"]
    assert np.allclose(note["products"], apart, rtol=1e-5)  # six digits are kept
    assert note["aggregation_error"] == pytest.approx(error, rel=1e-5, abs=1e-9)
    assert (note["aggregation_error"] < 1e-9) is frozen  # with a common A the mean of products is their product
    for one, other in itertools.combinations(range(3), 2):
        square = sum(((deltas[one][name] - deltas[other][name]).astype(np.float64) ** 2).sum() for name in deltas[0])
        assert note["factors"][one][other] == note["factors"][other][one] == pytest.approx(square**0.5, rel=1e-5)


def test_tensors_that_are_no_pair_are_left_out() -> None:
    master = drawn(0)
    odd = {"x.lora_A": np.ones((2, 3), np.float32), **master}
    base = factors(odd, "")
    note = drift_note(("a",), base, [factors(drawn(1), base.digest)])
    assert note["products"] == [[0.0]]


def test_a_committed_round_has_its_drift_in_the_record(tmp_path: Path) -> None:
    house, silos = federation(tmp_path)
    house.submit()
    for silo in silos:
        silo.join()
    until_quiet(silos)
    for row in house.record()["rounds"]:
        [note] = [note for note in row["notes"] if note["name"] == "drift"]
        assert note["silos"] == list(SILOS)
        assert all(note["products"][place][place] == 0 for place in range(len(SILOS)))
        assert note["factors"][0][1] > 0
