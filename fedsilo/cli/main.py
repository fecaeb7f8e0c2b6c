"""Entry points of the four commands. Nothing heavy is imported before a command runs, so that help stays quick."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable

import typer

from fedsilo.cli.output import ended_by, in_one_envelope, no_color, open_all
from fedsilo.cli.own_names import refuse_overwritten

# Objects made and not freed between two looks for garbage (Python's own: 700). In cycles they may hold some 10 MB.
GARBAGE_THRESHOLD = 100_000


def _begin(name: str, load: Callable[[], typer.Typer]) -> None:
    """Hand a program its name and command line; refuse, where packages are not ours alone, before `load` imports them.

    Importing makes hundreds of thousands of objects that all stay. Python would walk them again and again while they
    come, and once more at the end: a quarter of what a command costs. So garbage is looked for seldom, and not among
    what is left when the program ends.
    """
    gc.set_threshold(GARBAGE_THRESHOLD)
    open_all()
    json_output = "--json" in sys.argv[1:]
    no_color("--no-color" in sys.argv[1:])  # a command line that is not understood is told without colour, too
    try:
        with ended_by(json_output=json_output):
            refuse_overwritten()
            app = load()
            if json_output:
                sys.exit(in_one_envelope(app, name))
            app(prog_name=name)
    finally:
        gc.freeze()


def fedsilo_main() -> None:
    def load() -> typer.Typer:
        from fedsilo.cli import fedsilo as cli_fedsilo

        return cli_fedsilo.app

    _begin("fedsilo", load)


def silo_main() -> None:
    def load() -> typer.Typer:
        from fedsilo.cli import silo as cli_silo

        return cli_silo.app

    _begin("silo", load)


def coordinator_main() -> None:
    def load() -> typer.Typer:
        from fedsilo.cli import coordinator as cli_coordinator

        return cli_coordinator.app

    _begin("coordinator", load)


def console_main() -> None:
    def load() -> typer.Typer:
        from fedsilo.cli import console as cli_serve

        return cli_serve.program

    _begin("fedconsole", load)
