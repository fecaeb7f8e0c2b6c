"""What a wheel carries beside the code, and which Python `make` takes."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from setuptools import PEP420PackageFinder

from fedsilo.demo import data
from tests.house.tree import ROOT, SETTINGS


def test_every_example_is_in_the_wheel_under_the_folder_that_version_names(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = {
        Path(target) / path.name: path
        for target, patterns in SETTINGS["tool"]["setuptools"]["data-files"].items()
        for pattern in patterns
        for path in ROOT.glob(pattern)
    }
    kept = subprocess.run(
        ["git", "ls-files", "examples"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split()  # fmt: skip
    assert data.examples_folder() == ROOT / "examples"
    monkeypatch.setattr(data, "__file__", "/env/lib/python3/site-packages/fedsilo/demo/data.py")
    installed = data.examples_folder().relative_to(sysconfig.get_path("data"))
    assert {target: path.relative_to(ROOT) for target, path in packed.items()} == {
        installed / Path(name).relative_to("examples"): Path(name)
        for name in kept
        if not name.endswith(".results.jsonl")  # what they came to stays in the repository
    }


def test_a_wheel_has_the_packages_and_no_folder_that_lies_beside_them(tmp_path: Path) -> None:
    wanted = SETTINGS["tool"]["setuptools"]["packages"]["find"]["include"]
    for name in ("fedsilo/protocol", "silo/guard", "fedsilo-demo/hospital_a", "silo-trial/id", "coordinator_old"):
        (tmp_path / name).mkdir(parents=True)
    found = PEP420PackageFinder.find(str(tmp_path), include=wanted)
    assert sorted(found) == ["fedsilo", "fedsilo.protocol", "silo", "silo.guard"]


def test_every_file_of_a_package_that_is_no_code_is_in_the_wheel() -> None:
    """Templates, rulesets and recordings are read where they lie: a wheel without one fails when it is used."""
    wanted = SETTINGS["tool"]["setuptools"]["packages"]["find"]["include"]
    kept = subprocess.run(
        ["git", "ls-files", *(name for name in wanted if "." not in name)], cwd=ROOT, check=True, capture_output=True,
        text=True,
    ).stdout.split()  # fmt: skip
    others = [Path(name) for name in kept if not name.endswith(".py")]
    patterns = SETTINGS["tool"]["setuptools"]["package-data"]["*"]
    assert Path("fedsilo/cli/audit_report.html") in others
    assert [path for path in others if not any(path.match(pattern) for pattern in patterns)] == []


def _interpreter(folder: Path, name: str, version: tuple[int, int]) -> Path:
    """A Python that says it is of that version."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    code = f"import sys; sys.version_info = {(*version, 0)}; exec(sys.argv[1])"
    path.write_text(f"#!/bin/sh\nshift\nexec {sys.executable} -c '{code}' \"$1\"\n")
    path.chmod(0o755)
    return path


def _make(folder: Path, *arguments: str, path: str = "/usr/bin:/bin") -> subprocess.CompletedProcess[str]:
    """Only as far as the check of the interpreter: the target is the environment's own Python."""
    return subprocess.run(
        ["make", "--silent", "--file", ROOT / "Makefile", f"VENV={folder / 'venv'}", f"{folder / 'venv'}/bin/python",
         *arguments],
        check=False, cwd=folder, capture_output=True, text=True, env={"PATH": path},
    )  # fmt: skip


@pytest.mark.parametrize("version", [(3, 11), (3, 12), (3, 13)])
def test_make_takes_the_versions_that_work(version: tuple[int, int], tmp_path: Path) -> None:
    python = _interpreter(tmp_path / "bin", "some-python", version)
    assert "is not Python" not in _make(tmp_path, f"PYTHON={python}").stderr


@pytest.mark.parametrize("version", [(3, 10), (3, 14), (2, 7)])
def test_make_refuses_others_and_says_which_it_takes(version: tuple[int, int], tmp_path: Path) -> None:
    python = _interpreter(tmp_path / "bin", "some-python", version)
    refused = _make(tmp_path, f"PYTHON={python}")
    assert refused.returncode and f"{python} is not Python 3.11, 3.12 or 3.13" in refused.stderr


def test_make_finds_a_python_that_runs_and_passes_over_a_name_that_does_not(tmp_path: Path) -> None:
    shims = tmp_path / "shims"
    for name in ("python3.11", "python3.12"):
        shims.mkdir(exist_ok=True)
        (shims / name).write_text("#!/bin/sh\nexit 127\n")
        (shims / name).chmod(0o755)
    _interpreter(shims, "python3.13", (3, 13))
    found = _make(tmp_path, "--dry-run", path=f"{shims}:/usr/bin:/bin")
    assert "python3.13 -m venv" in found.stdout
