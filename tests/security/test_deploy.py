"""The shipped recipes (deploy/) wall the trainer in: no network, no key, no policy; and the guard from the prompts.

The units and the compose file are read as their programs read them; where systemd-analyze is installed it verifies the
units too. What such a file really gives is shown by the probes at every start (test_T10_external_walls.py).
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from fedsilo.protocol import strict_yaml

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
LINK = "/run/fedsilo-link"
KEYS = ("/etc/fedsilo", "/var/lib/fedsilo")


def settings(unit: str) -> dict[str, list[str]]:
    """A unit's [Service] keys; a key may stand more than once."""
    found: dict[str, list[str]] = defaultdict(list)
    section = ""
    for line in (DEPLOY / "systemd" / unit).read_text().splitlines():
        if line.startswith("["):
            section = line
        elif section == "[Service]" and "=" in line and not line.startswith("#"):
            key, _, value = line.partition("=")
            found[key].append(value)
    return found


def services() -> dict[str, dict[str, Any]]:
    source = DEPLOY / "container" / "compose.yaml"
    return dict(strict_yaml.load(source.read_bytes(), source.name).value["services"])


def mounted(service: dict[str, Any]) -> list[str]:
    """What a container sees of the host: the source of each mount."""
    return [volume.replace("${SITE:?name the site}", "SITE").split(":")[0] for volume in service["volumes"]]


def test_T10_the_trainers_unit_has_no_network_and_no_keys() -> None:
    trainer = settings("fedsilo-trainer@.service")
    assert trainer["PrivateNetwork"] == ["yes"]
    assert trainer["RestrictAddressFamilies"] == ["AF_UNIX"]
    closed = " ".join(trainer["InaccessiblePaths"]).replace("-/", "/").split()
    assert set(KEYS) <= set(closed)
    assert trainer["User"] != settings("fedsilo-silo@.service")["User"]
    assert trainer["CapabilityBoundingSet"] == [""]
    assert trainer["NoNewPrivileges"] == ["yes"]


def test_T10_the_guards_unit_cannot_read_the_prompts() -> None:
    guard = settings("fedsilo-silo@.service")
    assert guard["InaccessiblePaths"] == ["-/srv/fedsilo/%i/private"]
    assert "PrivateNetwork" not in guard  # it dials out
    assert guard["NoNewPrivileges"] == ["yes"]


def test_T10_the_trainers_container_has_no_network_and_no_keys() -> None:
    guard, trainer = services()["guard"], services()["trainer"]
    assert trainer["network_mode"] == "none"
    assert "networks" not in trainer
    assert not [source for source in mounted(trainer) if source.startswith(KEYS)]
    assert any(source.startswith("/srv/fedsilo/SITE/private") for source in mounted(trainer))
    for service in (guard, trainer):
        assert service["cap_drop"] == ["ALL"]
        assert service["read_only"] is True
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert "ports" not in service  # a silo opens no port


def test_T10_the_guards_container_cannot_read_the_prompts() -> None:
    sources = mounted(services()["guard"])
    assert any(source.startswith("/etc/fedsilo/") for source in sources)
    assert not [source for source in sources if source.endswith("/private") or source == "/srv/fedsilo/SITE"]


@pytest.mark.slow
def test_the_commands_of_the_recipes_exist() -> None:
    """Every option that a recipe gives is one that the program takes."""
    binaries = Path(sys.executable).parent
    guard = settings("fedsilo-silo@.service")["ExecStart"][0].split()
    trainer = settings("fedsilo-trainer@.service")["ExecStart"][0].split()
    helped = subprocess.run([binaries / "silo", "start", "--help"], capture_output=True, text=True, check=True).stdout
    assert guard[1] == "start"
    assert all(word in helped for word in guard if word.startswith("--"))
    assert trainer[1:4] == ["-P", "-m", "silo.trainer.worker"]
    helped = subprocess.run(
        [sys.executable, *trainer[1:4], "--help"], capture_output=True, text=True, check=True
    ).stdout
    assert all(word in helped for word in trainer[4:] if word.startswith("--"))
    containers = (DEPLOY / "container" / "Containerfile").read_text()
    assert '["python", "-P", "-m", "silo.trainer.worker"]' in containers
    assert f"unix:{LINK}/trainer.sock" in containers


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed here")
@pytest.mark.parametrize(("unit", "exposure_max"), [("fedsilo-silo@", 2.0), ("fedsilo-trainer@", 1.0)])
def test_systemd_accepts_the_units_and_finds_them_tight(unit: str, exposure_max: float, tmp_path: Path) -> None:
    """exposure_max: of 10, by `systemd-analyze security`; measured 1.7 and 0.6, an ordinary service has 9.6."""
    for name in ("fedsilo-silo@", "fedsilo-trainer@"):
        text = (DEPLOY / "systemd" / f"{name}.service").read_text()
        # verified without being installed: only the folder of the programs differs
        text = text.replace("/opt/fedsilo/.venv/bin", str(Path(sys.executable).parent))
        (tmp_path / f"{name}.service").write_text(text)
        (tmp_path / f"{name}site.service").write_text(text)
    unit_file = f"./{unit}site.service"
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", unit_file], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    threshold = f"--threshold={round(10 * exposure_max)}"
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--no-pager", threshold, unit_file],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-400:]
