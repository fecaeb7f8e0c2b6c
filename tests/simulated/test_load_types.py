"""Silos that load the base model differently compute different functions: refused, unless the plan allows it."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import get_args

import pytest

from coordinator.ingress import check_hello
from fedsilo.protocol.errors import PeerError, UsageError
from silo.config import LoadType, config_from, load_config
from silo.guard.checks import compare_load
from silo.guard.site import require_part
from tests.algorithms.tiny import make_plan
from tests.simulated.coordinator_parts import AGREED, hello

LOADS = get_args(LoadType)
EXAMPLE = (Path(__file__).parents[2] / "examples" / "hospital_a.yaml").read_text()


@pytest.mark.parametrize(("agreed", "told"), list(itertools.product(LOADS, LOADS)))
def test_a_coordinator_takes_another_load_type_only_if_mixing_is_allowed(agreed: str, told: str) -> None:
    federation = dataclasses.replace(AGREED, load=agreed)
    check_hello(hello(load=told), dataclasses.replace(federation, mixed_base="allow"))
    if agreed == told:
        check_hello(hello(load=told), federation)
        return
    with pytest.raises(PeerError, match=f"load differs: expected {agreed}, got {told}"):
        check_hello(hello(load=told), federation)


@pytest.mark.parametrize(("planned", "own"), list(itertools.product(LOADS, LOADS)))
def test_a_silo_takes_a_plan_with_another_load_type_only_if_mixing_is_allowed(planned: str, own: str) -> None:
    config = config_from(EXAMPLE.replace("load: bf16", f"load: {own}").encode(), Path("/site/silo.yaml"))
    assert config.model.load == own
    plan = make_plan(load=planned, silos=(config.silo, "b"))
    require_part(plan.model_copy(update={"mixed_base": "allow"}), config)
    if planned == own:
        require_part(plan, config)
        return
    with pytest.raises(UsageError, match=f"the base model as {planned}, this silo as {own}"):
        require_part(plan, config)


@pytest.mark.parametrize(("planned", "own"), list(itertools.product(LOADS, LOADS)))
def test_silo_check_compares_with_the_run_that_is_open(planned: str, own: str, tmp_path: Path) -> None:
    path = tmp_path / "silo.yaml"
    path.write_text(EXAMPLE.replace("load: bf16", f"load: {own}"))
    config = load_config(path)
    plan = make_plan(load=planned, silos=(config.silo, "b"))
    compare_load(config, None)  # no run is open, and nothing else of a site says it
    compare_load(config, plan.model_copy(update={"mixed_base": "allow"}))
    if planned == own:
        compare_load(config, plan)
        return
    with pytest.raises(UsageError, match=f"model.load is {own}, that of run {plan.run} {planned}") as told:
        compare_load(config, plan)
    line = path.read_text().splitlines().index(f"  load: {own}") + 1
    assert told.value.message.startswith(f"{path}:{line}: ") and told.value.code == "LOAD_MISMATCH"
