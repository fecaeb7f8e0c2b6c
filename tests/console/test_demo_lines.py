"""What the demo says of a run: who holds a release is said once, with the command that answers, and again on change."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fedsilo.launch import demo
from fedsilo.launch.demo_sites import Site


class Read(demo.Follow):
    """The states of the silos are given, in place of being asked of their sockets."""

    def _read(self) -> None:
        pass


def test_a_held_release_is_said_once_with_its_command_and_again_on_change(tmp_path: Path, monkeypatch: Any) -> None:
    site = Site("hospital_a", tmp_path / "a b", tmp_path / "c", tmp_path / "a b" / "control.sock", tmp_path / "log")
    said: list[str] = []
    follow = Read(SimpleNamespace(silos=(site,)), said.append)  # type: ignore[arg-type]
    monkeypatch.setattr(demo, "LINE_SECONDS", 0.0)
    summary = {"round": 1, "rounds": 3, "state": "running", "method": "pubswap"}

    def shows(*held: str) -> list[str]:
        follow.local = {"hospital_a": {"silo": "hospital_a", "held": [{"id": each} for each in held]}}
        said.clear()
        follow.show(summary)
        return list(said)

    assert len(shows()) == 1
    (told,) = shows("r1/hospital_a/0")
    assert told.startswith("hospital_a holds r1/hospital_a/0 until people answer: fedconsole --socket '")
    assert f"--operator-key '{tmp_path}/a b/id/alice.key'" in told
    assert shows("r1/hospital_a/0") == shows("r1/hospital_a/0") == []
    assert "r1/hospital_a/1" in shows("r1/hospital_a/1")[0]
    assert shows() == ["hospital_a holds nothing any more"]
    follow.local = {"hospital_a": {"silo": "hospital_a", "step": 4}}
    follow.show(summary)
    assert "step 4" in said[-1]
