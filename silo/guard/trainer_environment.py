"""The environment of the trainer, and of what runs beside it behind walls."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from silo.link import OFFLINE

# What the trainer's process may see of the environment: where programs and libraries are, nothing of this site.
_ENVIRONMENT_KEPT = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ", "CUDA_VISIBLE_DEVICES", "VIRTUAL_ENV")
# Telemetry and hub downloads off (threat T10); threads are set beside them.
_ENVIRONMENT_SET = {**OFFLINE, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1"}


def trainer_environment(outer: Mapping[str, str], *, threads: int, scratch: Path) -> dict[str, str]:
    """The environment of the trainer: a short allow-list, offline switches, one thread count for every library."""
    environment = {name: outer[name] for name in _ENVIRONMENT_KEPT if name in outer}
    environment.update(_ENVIRONMENT_SET)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        environment[name] = str(threads)
    # A home and a cache of its own: libraries look there, and the real one is outside the walls.
    for name in ("HOME", "HF_HOME", "XDG_CACHE_HOME", "TMPDIR", "TORCHINDUCTOR_CACHE_DIR"):
        environment[name] = str(scratch)
    return environment
