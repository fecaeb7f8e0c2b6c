"""A library of an extra that is not installed: whoever needs it says which extra, by which command."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedsilo.cli.output import ended_by
from fedsilo.demo import run as demo
from fedsilo.demo import tiny_model
from fedsilo.files import extras
from fedsilo.protocol.errors import UsageError
from silo.guard import checks
from silo.link import LinkMessage
from silo.trainer.worker import Worker
from tests.algorithms.test_worker import configuration
from tests.house.tree import SETTINGS
from tests.simulated.policy_site import PolicySite

COMMAND = "pip install 'fedsilo[silo]'"
CLONE = ".venv/bin/pip install -e '.[silo]' -c constraints.txt"


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Names libraries that are then as not installed."""

    def hide(*names: str) -> None:
        for name in names:
            monkeypatch.setitem(sys.modules, name, None)

    return hide


def test_every_library_is_one_of_its_extra() -> None:
    for library, extra in extras.EXTRA_OF.items():
        wanted = SETTINGS["project"]["optional-dependencies"][extra]
        assert library.replace("_", "-") in [re.split(r"[\[<>=!~]", each)[0] for each in wanted], library


@pytest.mark.parametrize("library", ["torch", "transformers"])
def test_the_demo_says_it_before_it_writes_anything(library: str, tmp_path: Path, without: Any) -> None:
    without(library)
    with pytest.raises(UsageError, match=f"{library} is not installed") as refused:
        demo.run_demo(demo.DemoOptions(out=tmp_path / "out"), lambda line: None)
    assert COMMAND in refused.value.hint and CLONE in refused.value.hint
    assert not (tmp_path / "out").exists()


def test_the_recorder_of_the_demo_is_an_extra_of_its_own(tmp_path: Path, without: Any) -> None:
    without("hpack")
    with pytest.raises(UsageError, match="hpack is not installed") as refused:
        demo.run_demo(demo.DemoOptions(out=tmp_path / "out", record=True), lambda line: None)
    assert "pip install 'fedsilo[demo]'" in refused.value.hint


def test_a_command_that_comes_upon_it_says_the_same_and_another_missing_module_is_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], without: Any
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    without("torch", "_no_such_part")
    with pytest.raises(SystemExit) as ended, ended_by(json_output=False):
        tiny_model.build_model(tiny_model.recipe_for("digits"), tmp_path / "model")
    told = capsys.readouterr().err
    assert ended.value.code == 2 and "torch is not installed [EXTRA_MISSING]" in told and COMMAND in told
    with pytest.raises(SystemExit) as ended, ended_by(json_output=False):
        import _no_such_part  # noqa: F401
    assert ended.value.code == 70


def test_the_trainer_tells_its_guard(tmp_path: Path, without: Any) -> None:
    without("torch")
    worker = Worker(SimpleNamespace(), None)  # type: ignore[arg-type]
    failed = worker._answer(LinkMessage("configure", configuration(tmp_path)))
    assert (failed.type, failed.fields["code"], failed.fields["input"]) == ("failed", "EXTRA_MISSING", True)
    assert failed.fields["message"] == "torch is not installed" and COMMAND in failed.fields["hint"]


@pytest.mark.slow
@pytest.mark.parametrize("library", ["torch", "transformers"])
def test_silo_start_says_it_before_anything_is_opened(library: str, tmp_path: Path) -> None:
    site = PolicySite(tmp_path)
    code = f"import sys; sys.modules[{library!r}] = None; from fedsilo.cli.__main__ import main; main()"
    started = subprocess.run(
        [sys.executable, "-c", code, "silo", "start", "--config", str(site.folder / "silo.yaml"), "--json"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    told = json.loads(started.stdout)["error"]
    assert started.returncode == 2 and told["code"] == "EXTRA_MISSING" and library in told["message"]
    assert list((site.folder / "state").iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("library", ["torch", "transformers"])
def test_silo_check_fails_by_it_where_the_trainer_is_a_child_of_this_guard(
    library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = f"import sys; sys.modules[{library!r}] = None; from silo.trainer.data import main; main()"
    asked = subprocess.run([sys.executable, "-c", code], input="{}", capture_output=True, text=True, check=True)
    told = json.loads(asked.stdout)["error"]
    assert told["code"] == "EXTRA_MISSING" and library in told["message"] and COMMAND in told["hint"]

    def not_there(*arguments: object, **options: object) -> None:
        raise UsageError(told["message"], hint=told["hint"], code=told["code"])

    def prompts(launch: str) -> None:
        config: Any = SimpleNamespace(trainer=SimpleNamespace(launch=launch))
        look = checks.Look(config, facts=SimpleNamespace(context_tokens=64))  # type: ignore[arg-type]
        look.plan = None
        checks.prompts(look)

    monkeypatch.setattr(checks, "preview", not_there)
    with pytest.raises(UsageError, match=library):
        prompts("child")
    with pytest.raises(checks.NotTriedHere, match=library):  # the trainer's own machine may have it
        prompts("external")
