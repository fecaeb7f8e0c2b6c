"""`silo check` refuses a state folder that cannot be written, as a start would."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from fedsilo.files.durable import require_space

PROGRAM = """
import os, sys
from pathlib import Path
from fedsilo.files.durable import require_space
from fedsilo.protocol.errors import OperationError
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
try:
    require_space(Path(sys.argv[1]))
except OperationError as error:
    print(error.code, "cannot be written" in error.message)
else:
    print("ok")
"""


def asked(folder: Path) -> str:
    """By somebody whom modes bind, which root is not."""
    command = [sys.executable, "-c", PROGRAM, str(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()


@pytest.mark.parametrize("below", ["", "state", "deep/state"])
def test_a_state_folder_that_cannot_be_written_fails_the_check(below: str) -> None:
    with tempfile.TemporaryDirectory() as name:  # pytest's own folders are closed to other users
        folder = Path(name)
        folder.chmod(0o777)
        assert asked(folder / below) == "ok"
        folder.chmod(0o555)
        assert asked(folder / below) == "FAILED True"
        folder.chmod(0o777)
        if os.geteuid() == 0:
            assert "bytes free" in require_space(folder / below)
