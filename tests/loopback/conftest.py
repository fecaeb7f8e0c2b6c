"""Fixtures that cost a federation: made once, shared by every test that can share them.

They end with the last test of this folder, since what runs after that computes.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hostile.attacks import named
from tests.hostile.federation import Attacked, attacked_by_coordinator
from tests.loopback.federation import Demo, Federation, demo, federation
from tests.scheduling import FIRST

SEED = 1
HOLDS = "hospital_a"
# What is tried in the federation that several tests read.
COORDINATOR_ATTACKS = ("temperature_out_of_range", "other_run", "wrong_key", "wrong_donors", "unknown_prompt_index")


def pytest_configure() -> None:
    """A suite that is told to end ends its daemons too, as Ctrl-C does."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the tests of this folder: what begins first to the front."""
    places = [place for place, item in enumerate(items) if item.path.is_relative_to(Path(__file__).parent)]
    ranks = {module: rank for rank, module in enumerate(FIRST)}
    ordered = sorted((items[place] for place in places), key=lambda item: ranks.get(item.path.stem, len(FIRST)))
    for place, item in zip(places, ordered, strict=True):
        items[place] = item


@pytest.fixture
def tmp_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Not named after the test: with a worker's name before it, the path of a socket below would be over 107 bytes."""
    return tmp_path_factory.mktemp("t")


@pytest.fixture(scope="package")
def finished_demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    """`fedsilo demo` of two rounds, else with its default options, and what it left on disk."""
    return demo(tmp_path_factory.mktemp("demo") / "out", "--seed", str(SEED), "--rounds", "2")


@pytest.fixture(scope="package")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Attacked:
    """A federation whose coordinator was hostile, and what it left on disk."""
    return attacked_by_coordinator(tmp_path_factory.mktemp("attacked"), named(*COORDINATOR_ATTACKS))


@pytest.fixture(scope="package")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """Three running silos; hospital_a holds the first factor release of each run. A run names the silos it takes.

    The ruleset is the widest of those the methods need; the demo runs under `pubswap` itself.
    """
    root = tmp_path_factory.mktemp("sites")
    with federation(root, silos=3, ruleset="pubswap-random", holds=HOLDS, viewer="dave") as running:
        yield running


@pytest.fixture(autouse=True)
def settled(request: pytest.FixtureRequest) -> Iterator[None]:
    """The shared federation is at rest before the next test has it."""
    yield
    if "sites" in request.fixturenames:
        request.getfixturevalue("sites").settle()
