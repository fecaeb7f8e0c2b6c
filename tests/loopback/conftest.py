"""Fixtures that cost a federation: made once, shared by every test that can share them."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tests.loopback.federation import Demo, Federation, demo, federation

SEED = 1
HOLDS = "hospital_a"


def pytest_configure() -> None:
    """A suite that is told to end ends its daemons too, as Ctrl-C does."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


@pytest.fixture(scope="session")
def finished_demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    """`fedsilo demo` with its default options, and what it left on disk."""
    return demo(tmp_path_factory.mktemp("demo") / "out", "--seed", str(SEED))


@pytest.fixture(scope="session")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """Three running silos; hospital_a holds the first factor release of each run. A run names the silos it takes.

    The ruleset is the widest of those the methods need; the demo runs under `pubswap` itself.
    """
    root = tmp_path_factory.mktemp("sites")
    with federation(root, silos=3, ruleset="pubswap-random", holds=HOLDS, viewer="dave") as running:
        yield running
