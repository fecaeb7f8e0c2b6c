"""Entry points of the four commands. Nothing heavy is imported before a command runs, so that help stays quick."""

from __future__ import annotations

import gc
import sys

import typer

import fedsilo
from fedsilo.launch import (
    cli_audit,
    cli_bundle,
    cli_certs,
    cli_config,
    cli_context,
    cli_curves,
    cli_data,
    cli_demo,
    cli_grade,
    cli_metrics,
    cli_policy,
    cli_public,
    cli_run,
    cli_watch,
    doctor,
)
from fedsilo.launch.common_options import no_color
from fedsilo.launch.output import JsonOption, emit, ended_by, guarded, in_one_envelope, table, takes_version
from fedsilo.launch.standard_streams import open_all

# Objects made and not freed between two looks for garbage (Python's own: 700). In cycles they may hold some 10 MB.
GARBAGE_THRESHOLD = 100_000

fedsilo_app = typer.Typer(
    name="fedsilo",
    no_args_is_help=True,
    help="Post-train one model together; let out only what each site's own policy names.",
)
takes_version(fedsilo_app)
fedsilo_app.command("demo")(guarded("demo")(cli_demo.demo))
fedsilo_app.command("watch")(cli_watch.watch)
fedsilo_app.command("curves")(cli_curves.curves)
fedsilo_app.command("metrics")(cli_metrics.metrics)
fedsilo_app.add_typer(cli_run.app, name="run")
fedsilo_app.add_typer(cli_policy.app, name="policy")
fedsilo_app.add_typer(cli_audit.app, name="audit")
fedsilo_app.add_typer(cli_certs.app, name="certs")
fedsilo_app.add_typer(cli_data.model_app, name="model")
fedsilo_app.add_typer(cli_data.data_app, name="data")
fedsilo_app.add_typer(cli_public.app, name="public")
fedsilo_app.command("grade")(cli_grade.grade)
fedsilo_app.add_typer(cli_config.app, name="config")
fedsilo_app.add_typer(cli_context.app, name="context")
fedsilo_app.command("bundle")(cli_bundle.bundle)
doctor.add_to(fedsilo_app, "fedsilo")


@fedsilo_app.command("version")
@guarded("version")
def version(json_output: JsonOption = False) -> None:
    """Versions of FedSilo and of the libraries its results depend on."""
    import platform
    from importlib import metadata

    libraries = ("torch", "transformers", "grpcio", "protobuf", "cryptography", "numpy")
    versions = {"fedsilo": fedsilo.__version__, "python": platform.python_version()}
    for name in libraries:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    emit("version", versions, json_output=json_output, text=lambda: table(("part", "version"), versions.items()))


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
    _begin(fedsilo_app)


def silo_main() -> None:
    from fedsilo.launch import cli_silo

    _begin(cli_silo.app)


def coordinator_main() -> None:
    from fedsilo.launch import cli_coordinator

    _begin(cli_coordinator.app)


def console_main() -> None:
    from fedsilo.launch import cli_serve

    _begin(cli_serve.program)
