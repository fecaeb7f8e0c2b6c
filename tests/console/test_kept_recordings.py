"""The console replays what consoles of an earlier version recorded, and reads the same states, answers and events.

`recordings/` of tests/vectors/before_folders.tar.xz: a silo and its coordinator while a run went on, with local data,
and the README's recording, as it was then.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from console.recording import Replay
from fedsilo.protocol.errors import UnreachableError
from tests.answers import ROOT, unpacked

ARCHIVE = ROOT / "tests/vectors/before_folders.tar.xz"
# SHA-256 of all states, answers and events that are read from a recording, in the order of their lines.
READ = {
    "hospital_a": "5a894957de5574c4774ff545c16f465bea0279682ea2248600e3a0835b008091",
    "main": "d370312782b14b3fa040c379c969e5996be9949eb506d39ae7b25af97e63fa34",
    "approve": "cca581b9aa72b10bf3356452773a01a00e4827af04822d4a7a76ecba708d8744",
}


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpacked(ARCHIVE, tmp_path_factory.mktemp("kept")) / "recordings"


@pytest.mark.parametrize("name", READ)
def test_every_state_and_answer_of_a_kept_recording_is_read_as_it_was(recordings: Path, name: str) -> None:
    path = recordings / f"{name}.fedrec"
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()][1:]
    replay = Replay(path)
    replay.pause()
    read: list[Any] = []
    for line in lines:
        replay.seek(line["at"])
        if "snapshot" in line:
            try:
                reading = replay.snapshot()
            except UnreachableError as error:
                read.append(error.message)
            else:
                read.append([reading.state, reading.policy_digest])
        elif "answer" in line and "data" in line["answer"]:
            read.append(replay.query(line["answer"]["name"], line["answer"]["arguments"]))
    events = sum("event" in line for line in lines)
    replay.seek(replay.duration)
    told = list(itertools.islice(replay.watch(), events))
    read += [[event.sequence, event.time, event.name, event.fields] for event in told]
    assert not replay.torn and {"snapshot", "answer", "event"} <= {key for line in lines for key in line}
    assert hashlib.sha256(json.dumps(read, sort_keys=True).encode()).hexdigest() == READ[name]


@pytest.mark.quick(keep=1)
@pytest.mark.parametrize("name", READ)
def test_the_console_shows_the_last_state_of_a_kept_recording(recordings: Path, name: str) -> None:
    path = recordings / f"{name}.fedrec"
    states = [line["snapshot"]["state"] for line in map(json.loads, path.open(encoding="utf-8")) if "snapshot" in line]
    command = [sys.executable, "-m", "fedsilo.cli", "fedconsole", "--replay", str(path), "--at", "3600", "--once"]
    as_json = subprocess.run([*command, "--json"], check=True, capture_output=True, text=True, timeout=60)
    assert json.loads(as_json.stdout)["data"]["state"] == states[-1]
    if name == "approve":
        as_text = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
        assert "REPLAY" in as_text.stdout and "hospital_a" in as_text.stdout
