"""What the tests of the rollout client share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from silo.trainer.adapters.lora import LoraAdapter
    from tests.algorithms.scripted_server import Scripted


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Scripted]:
    from tests.algorithms.scripted_server import Scripted

    server = Scripted(tmp_path / "server.sock")
    yield server
    server.close()


@pytest.fixture(scope="module")
def adapter() -> LoraAdapter:
    from tests.algorithms import tiny

    return tiny.make_adapter()
