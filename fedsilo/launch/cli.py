"""Entry points of the four commands. Nothing heavy is imported before a command runs, so that help stays quick."""

from __future__ import annotations

import gc
import sys

import typer

from fedsilo.launch.common_options import no_color
from fedsilo.launch.output import ended_by, in_one_envelope
from fedsilo.launch.standard_streams import open_all

# Objects made and not freed between two looks for garbage (Python's own: 700). In cycles they may hold some 10 MB.
GARBAGE_THRESHOLD = 100_000


def _begin(app: typer.Typer) -> None:
    """Hand a program its command line.

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
            if json_output:
                sys.exit(in_one_envelope(app))
            app()
    finally:
        gc.freeze()


def fedsilo_main() -> None:
    from fedsilo.launch import cli_fedsilo

    _begin(cli_fedsilo.app)


def silo_main() -> None:
    from fedsilo.launch import cli_silo

    _begin(cli_silo.app)


def coordinator_main() -> None:
    from fedsilo.launch import cli_coordinator

    _begin(cli_coordinator.app)


def console_main() -> None:
    from fedsilo.launch import cli_serve

    _begin(cli_serve.program)
