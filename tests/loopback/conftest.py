"""Fixtures that cost a federation: made once, shared by every test that can share them; and who runs beside whom.

A federation waits half of its time, for a person, a deadline or a process that ends. So `make test` has three workers
on two cores, and tests that share one stay together.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from tests.loopback.federation import COORDINATOR_ATTACKS, SHORT, Demo, Federation, demo, federation

SEED = 1
HOLDS = "hospital_a"
# What the workers do, in this order. Long parts come first, so that the end finds all at work; and the first two need
# a base model each, which takes most of a minute where it was never built.
SHARE_ATTACKED = ("test_hostile_parties", "test_T38_logs")
SHARE_SITES = (
    "test_hold_and_approve", "test_killed_silo", "test_methods", "test_policy_reload", "test_report",
    "test_control_queries", "test_T10_connect", "test_console_terminal",
)  # fmt: skip
FIRST = (
    *SHARE_SITES,
    "test_other_peoples_text",
    *SHARE_ATTACKED,
    "test_demo",
    "test_interrupt",
    "test_tutorial",
)
# Each of their tests has a federation of its own, if it has one.
APART = ("test_interrupt", "test_tutorial", "test_bad_certificates", "test_bad_files", "test_bad_machine")


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


class SharingStaysTogether(LoadScopeScheduling):
    """Gives a worker all tests that share a federation, and hands out in the order of collection."""

    def __init__(self, config: pytest.Config, log: Producer | None = None) -> None:
        config.option.loadscopereorder = False
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        module = Path(file).stem
        if module in SHARE_SITES:
            return "sites"
        if module in SHARE_ATTACKED:
            return "attacked"
        return nodeid if module in APART else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> SharingStaysTogether:
    """For `--numprocesses`."""
    return SharingStaysTogether(config, log)


@pytest.fixture
def tmp_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Not named after the test: with a worker's name before it, the path of a socket below would be over 107 bytes."""
    return tmp_path_factory.mktemp("t")


@pytest.fixture(scope="session")
def finished_demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    """`fedsilo demo` with its default options, and what it left on disk."""
    return demo(tmp_path_factory.mktemp("demo") / "out", "--seed", str(SEED))


@pytest.fixture(scope="session")
def attacked_demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    """`fedsilo demo` with a hostile coordinator."""
    attacks = [part for name in COORDINATOR_ATTACKS for part in ("--attack", name)]
    # Three: where one refuses a round, the other two still agree on its transcript (T20).
    return demo(tmp_path_factory.mktemp("attacked") / "out", "--silos", "3", "--rounds", "4", *SHORT, *attacks)


@pytest.fixture(scope="session")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """Three running silos; hospital_a holds the first factor release of each run. A run names the silos it takes.

    The ruleset is the widest of those the methods need; the demo runs under `pubswap` itself.
    """
    root = tmp_path_factory.mktemp("sites")
    with federation(root, silos=3, ruleset="pubswap-random", holds=HOLDS, viewer="dave") as running:
        yield running
