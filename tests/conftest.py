"""For all tests: an example may take as long as it takes. How fast the machine is decides no result."""

from __future__ import annotations

import gc
import os
import random
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import pytest
from hypothesis import settings

from tests.postgres_server import PostgresServer, programs

if TYPE_CHECKING:
    from xdist.remote import Producer

    from tests.scheduling import FederationsBesideTheRest
    from tests.world import Bench, Loop

settings.register_profile("fedsilo", deadline=None)
settings.load_profile("fedsilo")

MEMORY_FOLDER = Path("/dev/shm")  # noqa: S108  # a folder of ours is made in it, as in /tmp
MEMORY_BYTES_MIN = 4 << 30
COORDINATOR_PARTS = "tests.simulated.coordinator_parts"  # not loaded for tests that need none of it
GARBAGE_THRESHOLD = 20_000  # new objects between two searches
ALL_CASES = "--all-cases"
T = TypeVar("T")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(ALL_CASES, action="store_true", help="every case of what is exhaustive, not a sample")


def a_sample(cases: Sequence[T], keep: int, name: str) -> list[T]:
    """Draw so many cases, in their order: the same ones in each process, and others in another test."""
    return [cases[place] for place in sorted(random.Random(name).sample(range(len(cases)), min(keep, len(cases))))]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of the cases of a test marked `exhaustive` leave out all but a sample; of one marked `quick` make all but a
    sample slow. Cases that are named are left as they are."""
    if any("[" in argument for argument in config.args):
        return
    if not config.getoption(ALL_CASES):
        left_out = set(_beyond_the_sample(items, "exhaustive"))
        if left_out:
            config.hook.pytest_deselected(items=list(left_out))
            items[:] = [item for item in items if item not in left_out]
    for item in _beyond_the_sample(items, "quick"):
        item.add_marker(pytest.mark.slow)


def _beyond_the_sample(items: Sequence[pytest.Item], mark: str) -> Iterator[pytest.Item]:
    """Yield the cases of each test with this mark that are not among the `keep` that are drawn of them."""
    cases: dict[str, list[pytest.Item]] = {}
    keep: dict[str, int] = {}
    for item in items:
        if found := item.get_closest_marker(mark):
            name = item.nodeid.partition("[")[0]
            cases.setdefault(name, []).append(item)
            keep[name] = found.kwargs["keep"]
    for name, of_test in cases.items():
        yield from set(of_test) - set(a_sample(of_test, keep[name], name))


@pytest.fixture
def sampled(request: pytest.FixtureRequest) -> Callable[[Sequence[T], int], list[T]]:
    """sampled(cases, keep): what a test that goes through them itself takes of them; with `--all-cases`, all."""
    if request.config.getoption(ALL_CASES):
        return lambda cases, keep: list(cases)
    return lambda cases, keep: a_sample(cases, keep, request.node.nodeid)


def pytest_configure(config: pytest.Config) -> None:
    """Temporary folders lie in memory where there is room: each record of each log is written through to the disk. What
    a kill leaves is the same there; what a power cut leaves no test asks. `--basetemp` says another place."""
    if config.option.basetemp is None and "PYTEST_DEBUG_TEMPROOT" not in os.environ and _has_room():
        os.environ["PYTEST_DEBUG_TEMPROOT"] = str(MEMORY_FOLDER)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> FederationsBesideTheRest:
    """For `--numprocesses`."""
    from tests.scheduling import FederationsBesideTheRest

    return FederationsBesideTheRest(config, log)


def pytest_collection_finish() -> None:
    """Libraries, modules and thousands of tests stay to the end: each search for garbage would walk them all, which is
    a tenth of the suite's processor time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(GARBAGE_THRESHOLD, 20, 20)


def _has_room() -> bool:
    return os.access(MEMORY_FOLDER, os.W_OK | os.X_OK) and shutil.disk_usage(MEMORY_FOLDER).free >= MEMORY_BYTES_MIN


@pytest.fixture(scope="session")
def postgresql() -> Iterator[PostgresServer]:
    """A server of this process's own; where there is none, what needs it is skipped and says so."""
    binaries = programs()
    if binaries is None:
        pytest.skip("NO POSTGRESQL: the coordinator's store is not tested on it (apt-get install postgresql)")
    with PostgresServer(binaries) as server:
        yield server


@pytest.fixture
def postgresql_url(postgresql: PostgresServer) -> Iterator[str]:
    """Of an empty database."""
    with postgresql.database() as url:
        yield url


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """A gate with its ledger and log, under the tests' own policy."""
    from tests.policies import setting
    from tests.world import Bench

    with closing(Bench(tmp_path / "a", setting.policy_of(setting.policy_text()))) as made:
        yield made


@pytest.fixture
def holding(tmp_path: Path) -> Iterator[Bench]:
    """The same under a policy by which a person approves the first update."""
    from tests.policies import setting
    from tests.world import Bench

    with closing(Bench(tmp_path / "a", setting.policy_of(setting.policy_text(first_rounds=1)))) as made:
        yield made


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[Loop]:
    """A whole guard under the same policy, without processes."""
    from tests.policies import setting
    from tests.world import Loop

    with closing(Loop(tmp_path / "a", setting.policy_of(setting.policy_text()))) as made:
        yield made


@pytest.fixture(autouse=True)
def _close_houses() -> Iterator[None]:
    """Close the coordinators in memory that a test has made, and none of those that several tests share."""
    before = set(getattr(sys.modules.get(COORDINATOR_PARTS), "OPEN_HOUSES", ()))
    yield
    houses = dict(getattr(sys.modules.get(COORDINATOR_PARTS), "OPEN_HOUSES", {}))
    for key in houses.keys() - before:
        houses[key].close()
