"""A guard that waits for an external trainer, probes it and stops; as a program, in whatever network that is run in."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from fedsilo.protocol.errors import FedSiloError
from silo.config import SiloConfig, load_config
from silo.guard.trainer_process import probing
from silo.guard.trainer_process.probing import Controls
from silo.guard.trainer_process.supervisor import Supervisor

REPOSITORY = Path(__file__).parents[2]


class Enough(FedSiloError):
    """Ends a start once the isolation level is known, before data and model are loaded."""


@dataclass(frozen=True)
class Probed:
    isolation: str
    results: dict[str, Any]
    controls: Controls

    def escaped(self) -> set[str]:
        return set(probing.escaped(self.results, self.controls))


def probed(config: SiloConfig, fields: dict[str, Any]) -> Probed:
    """Wait for the external trainer as the guard does, and stop once it has been probed."""
    supervisor = Supervisor(config, lambda event: None)

    def enough(level: str) -> None:
        raise Enough(level)

    try:
        with pytest.raises(Enough):
            supervisor.start(b"s", fields, accepted=enough)
    finally:
        supervisor.stop()
    return Probed(supervisor.state.isolation, supervisor.state.probes, supervisor.state.controls)


def probed_by(run: Callable[..., str], config: Path, resolver_file: Path, fields: dict[str, Any]) -> Probed:
    """Probe in another process, which `run` starts and whose output it returns; names are served by `resolver_file`."""
    words = (str(config), str(resolver_file), json.dumps(fields))
    printed = json.loads(run("env", "-C", str(REPOSITORY), sys.executable, "-m", __name__, *words))
    found, controls = Probed(**printed), printed["controls"]
    # JSON knows no tuples
    return replace(found, controls=Controls(**{way: tuple(map(tuple, each)) for way, each in controls.items()}))


def main(config: str, resolver_file: str, fields: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probing, "_RESOLVER_FILES", (resolver_file,))
        print(json.dumps(asdict(probed(load_config(Path(config)), json.loads(fields)))))


if __name__ == "__main__":
    main(*sys.argv[1:])
