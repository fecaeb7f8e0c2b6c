"""`fedsilo public`: the public set, before a site agrees to it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedsilo.cli.output import JsonOption, emit, guarded, table
from fedsilo.protocol.errors import OperationError, UsageError

app = typer.Typer(no_args_is_help=True, help="The public set, before a site agrees to it.")

_SHOWN_MAX = 50
_N_MIN, _N_MAX = 3, 64


@app.callback()
def _public() -> None:
    """The public set, before a site agrees to it."""


@app.command("lint")
@guarded("public lint")
def lint(
    file: Annotated[Path, typer.Argument(help="The public set, JSONL.")],
    private: Annotated[
        list[Path] | None, typer.Option("--private", help="Task file of this site to compare with; may be repeated.")
    ] = None,
    canaries: Annotated[
        Path | None, typer.Option("--canaries", help="Texts that must never leave, one a line; mode 0600.")
    ] = None,
    n: Annotated[int, typer.Option("--n", help="Words in a row that count as overlap with a private record.")] = 8,
    json_output: JsonOption = False,
) -> None:
    """Look for orders to a model, passages of private records, canaries, hidden characters, duplicates and size.

    Exit code 1 where anything is found. Findings are lines, codes and counts; the text itself is not shown.
    """
    from fedsilo.cli import public_lint
    from silo.guard.screens import read_canaries

    if not _N_MIN <= n <= _N_MAX:
        raise UsageError(f"--n {n} is not {_N_MIN} to {_N_MAX}")
    known = read_canaries(canaries) if canaries is not None else ()
    findings = public_lint.lint(file, private=private or [], canaries=known, n=n)
    rows = [{"line": finding.line, "code": finding.code, "count": finding.count} for finding in findings]
    data = {
        "file": str(file),
        "compared_with": [str(path) for path in private or []],
        "canaries": len(known),
        "findings": rows,
    }
    error = None
    if findings:
        error = OperationError(
            f"{file}: {len(findings)} findings in {len({finding.line for finding in findings})} lines",
            hint="look at these lines with a viewer that shows control characters; change the set, not the policy",
            code="LINT_FINDINGS",
        )
    shown = [
        (f"{file}:{row['line']}", row["code"], row["count"], public_lint.MEANINGS[str(row["code"])]) for row in rows
    ]
    left = f"\n... and {len(shown) - _SHOWN_MAX} more (--json has them all)" if len(shown) > _SHOWN_MAX else ""
    emit(
        "public lint", data, json_output=json_output, error=error,
        text=lambda: table(("where", "code", "count", "what"), shown[:_SHOWN_MAX]) + left if shown else "nothing found",
    )  # fmt: skip
