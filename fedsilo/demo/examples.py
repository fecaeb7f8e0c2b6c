"""Where the examples lie: beside the packages in a clone, below the environment's `share/` where a wheel put them."""

from __future__ import annotations

import sysconfig
from pathlib import Path

_SURELY_OURS = "hospital_a.yaml"  # another distribution may have a folder `examples` beside our packages


def examples_folder() -> Path:
    """The folder with the configuration, policy cases and samples that come along; it may be missing."""
    clone = Path(__file__).resolve().parents[2] / "examples"
    if (clone / _SURELY_OURS).is_file():
        return clone
    return Path(sysconfig.get_path("data")) / "share" / "fedsilo" / "examples"
