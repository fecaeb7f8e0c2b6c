"""What a command or a daemon loads when it starts: the torch stack takes seconds, and only the trainer may need it."""

from __future__ import annotations

import pytest

from fedsilo.cli.own_names import TOP_LEVEL_NAMES
from tests.house.tree import HEAVY, SETTINGS, Tree, modules

# An experiment's process has trainers in it, and no party imports it.
_WITH_TRAINERS = ("silo.trainer", "fedsilo.experiment.cell", "fedsilo.experiment.perform", "fedsilo.experiment.rates")
WITHOUT_TORCH = [name for name in modules() if not name.startswith(_WITH_TRAINERS)]
ENTRY_POINTS: dict[str, str] = SETTINGS["project"]["scripts"]

# Enough to see that the walk below reaches every depth of every application.
SOME_COMMANDS = {
    "fedsilo": {"", "demo", "grade", "run", "run submit", "policy init", "audit verify", "certs sign", "model build"},
    "silo": {"", "init", "start", "status", "approvals", "approvals approve"},
    "coordinator": {"", "init", "start", "status", "silos list"},
    "fedconsole": {""},
}

IMPORT_EACH = """
import importlib, sys
for name in {names}:
    importlib.import_module(name)
    if loaded := {heavy} & sys.modules.keys():
        print(name, *sorted(loaded))
        break
else:
    print("none loads any;", *{{sys.modules[name].__path__[0] for name in {packages}}})
"""

# Runs an entry point as its script does, then `--help` of every command below it. The application is taken from that
# first call, so that a command is found without saying here where it is registered.
HELP_OF_EACH = """
import contextlib, importlib, io, sys
import typer

applications = []
call = typer.Typer.__call__
typer.Typer.__call__ = lambda self, *a, **k: (applications.append(self), call(self, *a, **k))[1]
module, _, function = {entry_point!r}.partition(":")
main = getattr(importlib.import_module(module), function)

def help_of(show, *words):
    with contextlib.redirect_stdout(io.StringIO()) as shown, contextlib.suppress(SystemExit):
        show()
    assert "Usage: " + " ".join(({command!r}, *words)) in shown.getvalue(), shown.getvalue()
    print(*words, "|", *sorted({watched} & sys.modules.keys()))

def below(command, *words):
    for name, inner in getattr(command, "commands", {{}}).items():
        help_of(lambda: whole.main([*words, name, "--help"], prog_name={command!r}), *words, name)
        below(inner, *words, name)

sys.argv = [{command!r}, "--help"]
help_of(main)
whole = typer.main.get_command(applications[0])
below(whole)
"""


def _import_each(tree: Tree, names: list[str]) -> list[str]:
    """["MODULE torch ..."] for the first module after which one of the torch stack stands in sys.modules."""
    return tree.loaded_after(IMPORT_EACH.format(names=names, heavy=set(HEAVY), packages=TOP_LEVEL_NAMES))


def test_nothing_but_the_trainer_loads_torch(clean_tree: Tree) -> None:
    [line] = _import_each(clean_tree, WITHOUT_TORCH)
    homes = {str(clean_tree.root / name) for name in TOP_LEVEL_NAMES}
    assert set(line.removeprefix("none loads any; ").split()) == homes


@pytest.mark.slow
def test_a_module_that_loads_torch_is_named(tree: Tree) -> None:
    (tree.root / "torch.py").write_text('"""Stands in for the real one, which takes seconds."""\n')
    tree.plant("coordinator.planted", "import torch")
    names = ["coordinator.ingress", "coordinator.planted", "coordinator.store"]
    assert _import_each(tree, names) == ["coordinator.planted torch"]


def _help_of_each(tree: Tree, command: str, watched: set[str]) -> dict[str, set[str]]:
    """Words of each command of an entry point -> which of `watched` are loaded once its help was shown."""
    lines = tree.loaded_after(HELP_OF_EACH.format(command=command, entry_point=ENTRY_POINTS[command], watched=watched))
    return {words.strip(): set(loaded.split()) for words, _, loaded in (line.partition("|") for line in lines)}


@pytest.mark.slow
@pytest.mark.parametrize("command", ENTRY_POINTS)
def test_help_of_every_command_loads_nothing_heavy(command: str, clean_tree: Tree) -> None:
    """`COMMAND --help` is to show within 0.3 s, and none of these is needed for it. (Below a group typer itself loads
    pydantic and what that needs.)"""
    by_ours = {*HEAVY, "textual", "grpc", "numpy", "cryptography", "sqlalchemy", "yaml", "google.protobuf"}
    by_typer = {"pydantic", "importlib.metadata"}
    helps = _help_of_each(clean_tree, command, by_ours | by_typer)
    assert helps[""] == set()
    assert {words: loaded & by_ours for words, loaded in helps.items() if loaded & by_ours} == {}
    assert helps.keys() >= SOME_COMMANDS[command]


def test_a_command_that_loads_torch_is_named(tree: Tree) -> None:
    (tree.root / "torch.py").write_text('"""Stands in for the real one, which takes seconds."""\n')
    tree.plant("fedsilo.cli.console", "import torch")
    assert _help_of_each(tree, "fedconsole", set(HEAVY)) == {"": {"torch"}, "serve": {"torch"}}
