"""Options that `coordinator init` and `silo init` share, beside those of size."""

from __future__ import annotations

from typing import Annotated

import typer

# As a constant, since a command's help must not load the graders; a test compares.
VERIFIERS = "math, choice, exact, numeric, format, code, or a mixture such as math*0.9+format*0.1"

TemplateOption = Annotated[
    str,
    typer.Option("--template", help="How a prompt becomes text: chat, plain or a file. Default: the model folder's."),
]
