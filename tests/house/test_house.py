"""The house's own rules: imports, names, generated code, what start-up may load."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("fedsilo", "silo", "coordinator", "console", "policies", "certs")
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for package in PACKAGES
    for path in (ROOT / package).rglob("*.py")
    if path.name not in {"__init__.py", "__main__.py"} and "_generated" not in path.parts
)
WITHOUT_TORCH = [name for name in MODULES if not name.startswith("silo.trainer")]


def test_import_contracts_hold() -> None:
    done = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"],
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout


def test_generated_code_is_up_to_date(tmp_path: Path) -> None:
    wire = ROOT / "fedsilo/treaty/wire"
    arguments = ["-I.", f"--python_out={tmp_path}", f"--pyi_out={tmp_path}", "federation.proto", "control.proto"]
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", *arguments], cwd=wire, check=True)
    for name in ("federation_pb2.py", "federation_pb2.pyi", "control_pb2.py", "control_pb2.pyi"):
        assert (tmp_path / name).read_text() == (wire / "_generated" / name).read_text(), f"{name}: run `make proto`"


@pytest.mark.parametrize("package", PACKAGES)
def test_top_level_names_are_ours_alone(package: str) -> None:
    assert set(metadata.packages_distributions().get(package, ["fedsilo"])) == {"fedsilo"}


def loaded_after(code: str) -> set[str]:
    """Top-level modules loaded in a fresh interpreter after `code`."""
    script = f"import sys\n{code}\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_nothing_but_the_trainer_loads_torch() -> None:
    imports = "\n".join(f"import {name}" for name in WITHOUT_TORCH)
    assert not loaded_after(imports) & {"torch", "transformers", "peft", "accelerate"}


def test_commands_start_without_torch_textual_and_grpc() -> None:
    assert not loaded_after("import fedsilo.launch.cli") & {"torch", "textual", "grpc", "numpy"}


def test_no_module_is_longer_than_five_hundred_lines() -> None:
    long = {
        name: lines
        for name in MODULES
        if (lines := len((ROOT / Path(*name.split("."))).with_suffix(".py").read_text().splitlines())) > 500
    }
    assert not long
