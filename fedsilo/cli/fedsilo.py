"""`fedsilo`: the commands that belong to no single party."""

from __future__ import annotations

import typer

from fedsilo.cli import audit as cli_audit
from fedsilo.cli import bundle as cli_bundle
from fedsilo.cli import certs as cli_certs
from fedsilo.cli import config as cli_config
from fedsilo.cli import curves as cli_curves
from fedsilo.cli import data as cli_data
from fedsilo.cli import demo as cli_demo
from fedsilo.cli import doctor
from fedsilo.cli import experiment as cli_experiment
from fedsilo.cli import grade as cli_grade
from fedsilo.cli import metrics as cli_metrics
from fedsilo.cli import policy as cli_policy
from fedsilo.cli import public as cli_public
from fedsilo.cli import run as cli_run
from fedsilo.cli import watch as cli_watch
from fedsilo.cli.output import command, emit, table, takes_version

app = typer.Typer(
    name="fedsilo",
    no_args_is_help=True,
    help="Post-train one model together; let out only what each site's own policy names.",
)
takes_version(app)
command(app, "demo")(cli_demo.demo)
command(app, "watch")(cli_watch.watch)
command(app, "curves")(cli_curves.curves)
command(app, "metrics")(cli_metrics.metrics)
app.add_typer(cli_run.app, name="run")
app.add_typer(cli_experiment.app, name="experiment")
app.add_typer(cli_policy.app, name="policy")
app.add_typer(cli_audit.app, name="audit")
app.add_typer(cli_certs.app, name="certs")
app.add_typer(cli_data.model_app, name="model")
app.add_typer(cli_data.data_app, name="data")
app.add_typer(cli_public.app, name="public")
command(app, "grade")(cli_grade.grade)
app.add_typer(cli_config.app, name="config")
app.add_typer(cli_config.context_app, name="context")
command(app, "bundle")(cli_bundle.bundle)
doctor.add_to(app, "fedsilo")


@command(app, "version")
def version() -> None:
    """Versions of FedSilo and of the libraries its results depend on, and where the examples lie."""
    from fedsilo.cli.crash import versions_of
    from fedsilo.demo.data import examples_folder

    versions = versions_of("torch", "transformers", "grpcio", "protobuf", "cryptography", "numpy")
    versions["examples"] = str(examples_folder())
    emit(versions, lambda: table(("part", "version"), versions.items()))
