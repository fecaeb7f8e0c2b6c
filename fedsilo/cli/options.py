"""Options that several commands share, and files that somebody names on the command line."""

from __future__ import annotations

import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from fedsilo.files.durable import read_regular
from fedsilo.protocol.errors import NotAllowedError, NotFoundError, UsageError

# ---- of `init` -------------------------------------------------------------------------------------------------------


# As a constant, since a command's help must not load the graders; a test compares.
VERIFIERS = "math, choice, exact, final, numeric, format, code, or a mixture such as math*0.9+format*0.1"

TemplateOption = Annotated[
    str,
    typer.Option("--template", help="How a prompt becomes text: chat, plain or a file. Default: the model folder's."),
]


# ---- the size of runs ------------------------------------------------------------------------------------------------


# None takes what the federation means to run, from its bundle.
RoundsOption = Annotated[int | None, typer.Option("--rounds", min=1, help="Most rounds of a run.")]
LocalStepsOption = Annotated[int | None, typer.Option("--local-steps", min=1, help="Most steps of a round (tau).")]
SwapPeriodOption = Annotated[int | None, typer.Option("--swap-period", min=1, help="Every n-th step is public.")]
PromptsOption = Annotated[int | None, typer.Option("--prompts-per-step", min=1, help="Most prompts of a step (b).")]
SamplesOption = Annotated[int | None, typer.Option("--samples-per-prompt", min=1, help="Most answers a prompt (K).")]
TokensOption = Annotated[
    int | None, typer.Option("--max-new-tokens", min=1, help="Longest answer; never above the model's context.")
]
LearningRateOption = Annotated[
    float | None, typer.Option("--learning-rate", help="Largest; the clip limit follows from it.")
]


def given(**limits: float | None) -> dict[str, float]:
    """Return the options that were given."""
    return {name: value for name, value in limits.items() if value is not None}


def size_text(size: Mapping[str, float]) -> str:
    """Return a model's size as one line for people."""
    return (
        f"limits hold runs of up to {size['rounds']} rounds of {size['local_steps']} steps, {size['prompts_per_step']} "
        f"prompts x {size['samples_per_prompt']} answers of {size['max_new_tokens']} tokens, learning rate "
        f"{size['learning_rate']:g}"
    )


# ---- files that are named --------------------------------------------------------------------------------------------


DOCUMENT_BYTES_MAX = 1 << 20


def read_document(path: Path) -> str:
    """The text of a file. Raises NotFoundError: none; UsageError: no plain file, too large, or not UTF-8."""
    data = read_regular(path, bytes_max=DOCUMENT_BYTES_MAX)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise UsageError(f"{path}:{line}: not UTF-8 text", hint="is it the right file? save it as UTF-8") from error


def require_plain_file(path: Path, hint: str = "") -> None:
    """Before a file is opened that would be waited for if it were a pipe.

    Does not stop: that it becomes one before it is opened.

    Raises:
        NotFoundError: nothing is there. UsageError: a folder, pipe, device or socket, or below one that is closed.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError as error:
        raise NotFoundError(f"{path} does not exist", hint=hint) from error
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", hint=hint) from error
    if not stat.S_ISREG(mode):
        what = "a folder" if stat.S_ISDIR(mode) else "a pipe, a device or a socket"
        raise UsageError(f"cannot read {path}: it is {what}, not a file", hint=hint)


@contextmanager
def named_as_input(path: Path) -> Iterator[None]:
    """Around reading a file that is only looked at: of another type it is a wrong argument, not a missing right.

    Raises:
        UsageError: in place of NotAllowedError, which says that a person or a party is not who it must be.
    """
    try:
        yield
    except NotAllowedError as error:
        told = error.message if str(path) in error.message else f"{path}: {error.message}"
        raise UsageError(told, hint=error.hint) from error
