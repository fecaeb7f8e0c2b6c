"""The house's own rules: generated code and names that are ours alone."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fedsilo.audit.record import EVENTS
from fedsilo.cli import own_names
from fedsilo.protocol.errors import OperationError
from tests.house.tree import ROOT, SETTINGS, Tree

GENERATED = ("federation_pb2.py", "federation_pb2.pyi", "control_pb2.py", "control_pb2.pyi")


# ---- generated code --------------------------------------------------------------------------------


def _outdated(tree: Tree, scratch: Path) -> set[str]:
    """Generated files that the protocol descriptions of the tree would not give."""
    wire = tree.root / "fedsilo/protocol"
    scratch.mkdir()
    arguments = ["-I.", f"--python_out={scratch}", f"--pyi_out={scratch}", "federation.proto", "control.proto"]
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", *arguments], cwd=wire, check=True)
    return {name for name in GENERATED if (scratch / name).read_text() != (wire / "_generated" / name).read_text()}


def test_generated_code_is_up_to_date(clean_tree: Tree, tmp_path: Path) -> None:
    assert _outdated(clean_tree, tmp_path / "generated") == set(), "run `make proto`"
    assert {path.name for path in (clean_tree.root / "fedsilo/protocol/_generated").glob("*_pb2.py*")} == set(GENERATED)


def test_a_changed_protocol_is_noticed(tree: Tree, tmp_path: Path) -> None:
    proto = tree.root / "fedsilo/protocol/federation.proto"
    proto.write_text(proto.read_text().replace("message Heartbeat {}", "message Heartbeat { uint32 load = 1; }"))
    assert _outdated(tree, tmp_path / "generated") == {"federation_pb2.py", "federation_pb2.pyi"}


# ---- folders ---------------------------------------------------------------------------------------

FOLDERS = "|".join(("treaty", "edge", "launch"))
FORMER = re.compile(rf"\bfedsilo[./]({FOLDERS})\b|(?<![\w.])({FOLDERS})[./][a-z_]+\.(py|[A-Z])|`({FOLDERS})/")
WRITTEN = {".py", ".md", ".toml", ".yaml", ".proto", ".html", ""}


@pytest.mark.slow
def test_a_folder_that_was_renamed_is_named_in_the_changelog_alone() -> None:
    assert all(FORMER.search(planted.format("treaty")) for planted in ("from fedsilo.{}.x import y", "`{}/codec.py`"))
    assert _where(FORMER) == ["CHANGELOG.md"]


OURS = re.compile(rf"`((?:{'|'.join(own_names.TOP_LEVEL_NAMES)})(?:\.\w+)+)(?:\(\))?`")
# Names of other things that begin with one of ours: files, keys of a configuration, tags, and a group of entry points.
FILES = {"yaml", "db", "pgdump", "pub"}
OTHERS = {"fedsilo.verifiers", "fedsilo.run", "fedsilo.silo"}
OTHERS |= {f"coordinator.{key}" for key in ("address", "proxy", "proxy_credentials", "keepalive_seconds")}


def _is_there(name: str) -> bool:
    """Return whether a dotted name is a package, a module, or what one defines."""
    place, (*parts,) = ROOT, name.split(".")
    while parts and (place / parts[0]).is_dir():
        place /= parts.pop(0)
    module = place / f"{parts[0]}.py" if parts else place
    parts, module = (parts[1:], module) if module.is_file() else (parts, place / "__init__.py")
    inside: ast.AST | None = ast.parse(module.read_text()) if parts else None
    for part in parts:
        inside = next((node for node in ast.walk(inside) if part in _defines(node)), None) if inside else None
    return inside is not None or not parts


def _defines(node: ast.AST) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def test_a_name_of_ours_in_backticks_is_of_something_that_is_there() -> None:
    there = ("fedsilo.audit", "fedsilo.audit.record", "policies.kinds.CATALOGUE", "silo.guard.gate.Gate.offer")
    gone = ("fedsilo.gone", "fedsilo.audit.record.gone", "policies.kinds.gone", "silo.guard.gate.Gate.gone")
    assert all(map(_is_there, there)) and not any(map(_is_there, gone))
    assert OURS.findall("`{}`, `{}()`, {}".format("silo.gone", "fedsilo.audit.gone", "silo.bare")) == [
        "silo.gone",
        "fedsilo.audit.gone",
    ]
    named = {name: text.name for text in _texts() if text.name != "CHANGELOG.md" for name in OURS.findall(_read(text))}
    of_others = {name for name in named if name.partition(".")[2] in FILES} | OTHERS | EVENTS
    assert {name: text for name, text in named.items() if name not in of_others and not _is_there(name)} == {}


def _where(pattern: re.Pattern[str]) -> list[str]:
    """Names of the tracked texts in which the pattern is found."""
    return [path.name for path in _texts() if pattern.search(_read(path))]


def _texts() -> list[Path]:
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    return [ROOT / name for name in tracked if Path(name).suffix in WRITTEN and not name.startswith("tests/vectors")]


def _read(path: Path) -> str:
    return path.read_text(errors="replace")


CITED = re.compile(r"\b(methods|design|house|(console|threat)[ _](design|model))(\.md)?\s+§?\d")


def test_no_section_of_a_document_is_cited_that_the_project_does_not_have() -> None:
    planted = ("(methods {}.3)", "(console\ndesign {})", "(threat model {}, T20)", "house.md {}")
    assert all(CITED.search(each.format(1)) for each in planted)
    assert _where(CITED) == []


# ---- names -----------------------------------------------------------------------------------------


def _owners(**changed: list[str]) -> dict[str, list[str]]:
    return {"numpy": ["numpy"], **{name: ["fedsilo"] for name in own_names.TOP_LEVEL_NAMES}, **changed}


def test_names_are_the_packages_that_we_install() -> None:
    found = SETTINGS["tool"]["setuptools"]["packages"]["find"]["include"]
    assert {pattern for name in own_names.TOP_LEVEL_NAMES for pattern in (name, f"{name}.*")} == set(found)
    assert set(SETTINGS["tool"]["importlinter"]["root_packages"]) == set(own_names.TOP_LEVEL_NAMES)
    assert set(SETTINGS["tool"]["mypy"]["packages"]) == set(own_names.TOP_LEVEL_NAMES)


def test_top_level_names_are_ours_alone() -> None:
    own_names.refuse_foreign_names()


@pytest.mark.parametrize("name", own_names.TOP_LEVEL_NAMES)
def test_a_name_of_two_distributions_is_refused(name: str) -> None:
    own_names.refuse_shared(_owners())
    own_names.refuse_shared({})  # a checkout that is not installed
    own_names.refuse_shared(_owners(**{name: ["fedsilo", "fedsilo"]}))  # once in the environment, once as egg-info
    for owners in (["fedsilo", "stranger"], ["stranger", "fedsilo"], ["stranger"]):
        with pytest.raises(OperationError, match=f"'{name}' is installed by stranger too") as refused:
            own_names.refuse_shared(_owners(**{name: owners}))
        assert refused.value.code == "FOREIGN_PACKAGE"
        assert "pip uninstall stranger" in refused.value.hint


@pytest.mark.parametrize("name", own_names.TOP_LEVEL_NAMES)
def test_a_name_from_another_folder_is_refused(name: str, tmp_path: Path) -> None:
    ours = {each: [str(tmp_path / each)] for each in own_names.TOP_LEVEL_NAMES}
    own_names.refuse_strangers(ours, home=tmp_path)
    with pytest.raises(OperationError, match=f"'{name}' is taken from /elsewhere/{name}"):
        own_names.refuse_strangers({**ours, name: [f"/elsewhere/{name}"]}, home=tmp_path)
    with pytest.raises(OperationError, match=f"'{name}' is taken from /elsewhere/{name}"):
        own_names.refuse_strangers({**ours, name: [str(tmp_path / name), f"/elsewhere/{name}"]}, home=tmp_path)
    with pytest.raises(OperationError, match=f"no package '{name}'"):
        own_names.refuse_strangers({**ours, name: []}, home=tmp_path)


# a file that is not there, so that a start that nothing refuses ends with another error
STARTS = {
    "fedsilo": ("demo", "--no-console", "--data", "absent"),
    "silo": ("start", "--config", "absent.yaml"),
    "coordinator": ("start", "--config", "absent.yaml"),
}


def _start(command: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "fedsilo.cli", command, *STARTS[command]], check=False, cwd=folder,
        capture_output=True, text=True, env={**os.environ, **environment},
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("command", STARTS)
def test_a_distribution_that_claims_console_stops_every_start(command: str, tmp_path: Path) -> None:
    stranger = tmp_path / "site/console_tools-1.0.dist-info"
    stranger.mkdir(parents=True)
    (stranger / "METADATA").write_text("Metadata-Version: 2.1\nName: console-tools\nVersion: 1.0\n")
    (stranger / "top_level.txt").write_text("console\n")
    refused = _start(command, tmp_path, PYTHONPATH=str(stranger.parent))
    assert refused.returncode == 1
    assert "the package 'console' is installed by console-tools too" in refused.stderr
    assert "hint: pip uninstall console-tools;" in refused.stderr
    allowed = _start(command, tmp_path)
    assert "absent" in allowed.stderr and "console-tools" not in allowed.stderr


@pytest.mark.parametrize("command", STARTS)
def test_a_folder_named_like_a_package_stops_every_start(command: str, tmp_path: Path) -> None:
    (tmp_path / "policies").mkdir()
    (tmp_path / "policies/__init__.py").touch()
    refused = _start(command, tmp_path)
    assert refused.returncode == 1
    assert f"the package 'policies' is taken from {tmp_path / 'policies'}, not from {ROOT}" in refused.stderr


COMMANDS = {
    "fedsilo": ("version",),
    "silo": ("status", "--config", "absent.yaml"),
    "coordinator": ("--help",),
    "fedconsole": ("--once",),
}


def _run(command: str, folder: Path, *arguments: str, path: Path) -> subprocess.CompletedProcess[str]:
    """A command of the packages in `folder`, with `path` searched after them, as an installation has both."""
    code = f"import sys; sys.path.append({str(path)!r}); from fedsilo.cli.__main__ import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, command, *arguments], check=False, cwd=folder, capture_output=True, text=True
    )


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_a_console_of_pypi_beside_ours_stops_every_command(command: str, tree: Tree, tmp_path: Path) -> None:
    beside = tmp_path / "site"
    beside.mkdir()
    assert "FOREIGN_PACKAGE" not in _run(command, tree.root, *COMMANDS[command], path=beside).stderr
    stranger = beside / "console-0.9911.dist-info"
    stranger.mkdir()
    (stranger / "METADATA").write_text("Metadata-Version: 2.1\nName: console\nVersion: 0.9911\n")
    (stranger / "RECORD").write_text("console/__init__.py,,\n")
    # installed after ours, its files took the place of ours: then ours is refused, too, before it imports them
    for overwrites in (False, True):
        if overwrites:
            (tree.root / "console" / "__init__.py").write_text("raise RuntimeError('the console of another')\n")
        refused = _run(command, tree.root, *COMMANDS[command], path=beside)
        assert refused.returncode == 1
        assert "the package 'console' is installed by console too" in refused.stderr
        assert "hint: pip uninstall console;" in refused.stderr and "RuntimeError" not in refused.stderr


def test_a_package_overwritten_by_a_distribution_of_another_name_is_refused_by_every_command(
    tree: Tree, tmp_path: Path
) -> None:
    stranger = tmp_path / "site/terminal_tools-1.0.dist-info"
    stranger.mkdir(parents=True)
    (stranger / "METADATA").write_text("Metadata-Version: 2.1\nName: terminal-tools\nVersion: 1.0\n")
    (stranger / "top_level.txt").write_text("certs\n")
    (tree.root / "certs" / "__init__.py").write_text("VERSION = 1\n")
    refused = _run("fedsilo", tree.root, "version", path=stranger.parent)
    assert refused.returncode == 1 and "the package 'certs' is installed by terminal-tools too" in refused.stderr


def test_our_packages_begin_with_an_empty_file() -> None:
    """What another distribution put in its place is seen by that."""
    names = [name for name in own_names.TOP_LEVEL_NAMES if name != own_names.DISTRIBUTION]
    assert [name for name in names if (ROOT / name / "__init__.py").stat().st_size] == []
