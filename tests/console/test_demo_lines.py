"""What the demo says of a run: who holds a release is said with the commands that answer it, and a demo that nobody
answers ends by itself."""

from __future__ import annotations

import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedsilo.demo import run as demo
from fedsilo.demo.sites import Site
from fedsilo.protocol.errors import HeldError

SUMMARY = {"round": 1, "rounds": 3, "state": "running", "method": "pubswap"}


class Watched:
    """A demo of one silo whose state is given, in place of being asked of its socket."""

    def __init__(self, folder: Path, *, answer_minutes: float = 10.0) -> None:
        self.site = Site(
            "hospital_a", folder / "a b", folder / "a b" / "silo.yaml", folder / "a b" / "control.sock", folder / "log"
        )
        self.said: list[str] = []
        self.follow = demo.Follow(SimpleNamespace(silos=(self.site,)), self.said.append, answer_minutes)  # type: ignore[arg-type]

    def shows(self, *held: str, now: float = 0.0, **state: Any) -> list[str]:
        """What is said at `now` of a silo that holds these."""
        self.follow.local = {"hospital_a": {"held": [{"id": each} for each in held], **state}}
        self.said.clear()
        self.follow.show(SUMMARY, now)
        self.follow.end_if_unanswered(now)
        return list(self.said)


def test_a_held_release_is_said_with_the_commands_that_answer_it_and_again_on_change(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    assert len(watched.shows()) == 1
    told = watched.shows("r1/hospital_a/0")
    assert "hospital_a" in told[0] and "r1/hospital_a/0" in told[0]
    commands = [shlex.split(line) for line in told if line.startswith("  ")]
    assert [Path(words[0]).name for words in commands] == ["fedconsole", "silo"]
    assert all(Path(words[0]).is_file() for words in commands)  # a new terminal has no virtual environment active
    console, plain = commands
    assert console[console.index("--operator-key") + 1] == f"{tmp_path}/a b/id/alice.key"
    assert plain[1:4] == ["approvals", "approve", "r1/hospital_a/0"]
    assert plain[plain.index("--config") + 1] == f"{tmp_path}/a b/silo.yaml"
    assert "10 min" in told[-1] and "exit status 9" in told[-1]

    assert watched.shows("r1/hospital_a/0") == watched.shows("r1/hospital_a/0") == []
    assert "r1/hospital_a/1" in watched.shows("r1/hospital_a/1")[0]
    assert watched.shows() == ["hospital_a holds nothing any more"]
    assert "step 4" in watched.shows(now=60.0, step=4)[-1]


def test_while_nobody_answers_the_time_that_is_left_is_said_each_minute(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    watched.shows("r1/hospital_a/0", now=100.0)
    assert watched.shows("r1/hospital_a/0", now=159.0) == []
    (line,) = watched.shows("r1/hospital_a/0", now=160.0)
    assert "r1/hospital_a/0 of hospital_a" in line and "9 min" in line
    assert watched.shows("r1/hospital_a/0", now=219.0) == []
    assert "8 min" in watched.shows("r1/hospital_a/0", now=220.0)[0]


def test_a_demo_that_nobody_answers_ends_as_held_and_one_that_is_answered_goes_on(tmp_path: Path) -> None:
    watched = Watched(tmp_path, answer_minutes=2.0)
    watched.shows("r1/hospital_a/0", now=0.0)
    watched.shows("r1/hospital_a/0", now=119.9)
    with pytest.raises(HeldError, match="r1/hospital_a/0 of hospital_a was not answered within 2 min") as refused:
        watched.shows("r1/hospital_a/0", now=120.0)
    assert refused.value.exit_code == 9

    answered = Watched(tmp_path, answer_minutes=2.0)
    answered.shows("r1/hospital_a/0", now=0.0)
    answered.shows(now=119.0)
    answered.shows(now=7000.0)
    answered.shows("r2/hospital_a/0", now=7000.0)  # the next one has the whole time again
    answered.shows("r2/hospital_a/0", now=7119.0)
    with pytest.raises(HeldError, match="r2/hospital_a/0"):
        answered.shows("r2/hospital_a/0", now=7120.0)
