"""Where the shared data sets are, which are no part of this repository."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

VARIABLE = "FEDSILO_DATA"


def set_file(name: str) -> Path:
    """A file of the shared sets: in the folder that FEDSILO_DATA names, or `shared/data` beside the repository.

    Skips the test, and says why, where it is absent; a folder that the variable names must hold it.
    """
    named = os.environ.get(VARIABLE)
    folder = Path(named) if named else Path(__file__).parents[3] / "shared" / "data"
    if not (folder / name).is_file():
        if named:
            pytest.fail(f"{VARIABLE}={named} has no {name}")
        pytest.skip(f"{name} is not here: {VARIABLE} names the folder of the shared data sets")
    return folder / name
