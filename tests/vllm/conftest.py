"""Real servers, for `make test-vllm` only: VLLM_VENV names a virtual environment that has vLLM.

Without it nothing here is collected: these tests need an installation of gigabytes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

VENV = os.environ.get("VLLM_VENV", "")
if not VENV:
    collect_ignore_glob = ["test_*.py"]


@dataclass(frozen=True)
class Served:
    """One server for private and public prompts, kept by the guard's own supervision."""

    config: object
    servers: object
    socket: Path


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The tests share it: a start takes half a minute on a quiet machine and minutes on a busy one."""
    from silo.config import Model, Rollout, SiloConfig, Trainer
    from silo.guard.trainer_process import probing
    from silo.guard.trainer_process.rollout_server import RolloutServers
    from tests.vllm.small import CONTEXT_TOKENS, write_model

    home = tmp_path_factory.mktemp("vllm")
    model = write_model(home / "model")
    socket = home / "run" / "server.sock"
    url = f"unix:{socket}"
    config = SiloConfig.model_construct(
        state_dir=home,
        silos_on_this_host=1,
        model=Model(path=model),
        trainer=Trainer(devices="cpu", threads=1),
        rollout=Rollout(
            url=url, public_url=url, python=Path(VENV).absolute() / "bin" / "python", max_lora_rank=8,
            max_model_tokens=CONTEXT_TOKENS, kv_cache_bytes=256 << 20,
        ),
    )  # fmt: skip
    # the sandbox that a trainer gets here; isolation level user has no way to a server, so there only `waived` is left
    level = "namespaces" if probing.best_level() == "namespaces" else "waived"
    servers = RolloutServers(
        config,
        level=level,
        never=[],
    )
    servers.start()
    try:
        servers.wait_ready()
        yield Served(config, servers, socket)
    finally:
        servers.stop()
