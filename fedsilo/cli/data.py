"""`fedsilo model build` and `fedsilo data ...`: what a run needs before anything is federated."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from fedsilo.cli.output import command, emit, running, table

model_app = typer.Typer(no_args_is_help=True, help="The tiny base model of the demo.")
data_app = typer.Typer(no_args_is_help=True, help="Task files and data folders for the demo.")


_SeedOption = Annotated[int, typer.Option("--seed", min=0, help="Everything random follows from it.")]
_OutArgument = Annotated[Path, typer.Argument(help="Folder to write; must not exist, or be empty.")]


@model_app.callback()
def _model() -> None:
    """The tiny base model of the demo."""


@command(model_app, "model build")
def build(
    tokenizer: Annotated[
        Literal["digits", "bytes"],
        typer.Option("--tokenizer", help="digits: the demo's own set; bytes: any UTF-8 text."),
    ] = "digits",
    seed: _SeedOption = 0,
    out: Annotated[Path | None, typer.Option("--out", help="Folder to write; by default the cache.")] = None,
) -> None:
    """Build a small Qwen3 model from a seed, or find it in the cache. Needs the `silo` extra (torch)."""
    from fedsilo.demo import tiny_model

    recipe = tiny_model.recipe_for(tokenizer, seed=seed)
    built = False

    def show(done: int, total: int) -> None:
        nonlocal built
        built = True
        if not running().json_output and (done % 25 == 0 or done == total):
            sys.stderr.write(f"\rbuilding the base model: step {done} of {total}" + ("\n" if done == total else ""))
            sys.stderr.flush()

    if out is None:
        folder = tiny_model.cached_model(recipe, progress=show)
    else:
        tiny_model.build_model(recipe, out, progress=show)
        folder = out
    data = {"folder": str(folder), "recipe_sha256": recipe.digest, "built": built, "tokenizer": tokenizer}
    emit(data, str(folder))


@command(data_app, "data make-demo")
def make_demo(
    out: _OutArgument,
    seed: _SeedOption = 0,
    silos: Annotated[int, typer.Option("--silos", min=1, max=64, help="Number of private files.")] = 4,
) -> None:
    """Write the demo's own set: questions on digit strings in eight topics, split unevenly over the silos."""
    from fedsilo.demo.data import write_digit_folder

    folder = write_digit_folder(out, seed, silos=silos)
    _emit_folder(folder)


@command(data_app, "data from-sets")
def from_sets(
    out: _OutArgument,
    sets: Annotated[
        Path | None,
        typer.Option("--sets", help="Folder of the data sets; by default $FEDSILO_DATA, else the samples."),
    ] = None,
    private: Annotated[
        list[str] | None, typer.Option("--private", help="SILO=SET, once per silo; several may share one set.")
    ] = None,
    public: Annotated[str, typer.Option("--public", help="Set of the public prompts.")] = "gsm8k",
    held_out: Annotated[str, typer.Option("--held-out", help="Set to measure on; by default the public one.")] = "",
    rows_per_silo: Annotated[int, typer.Option("--rows", min=1, help="Rows of each private file, at most.")] = 200,
    public_rows: Annotated[int, typer.Option("--public-rows", min=1, help="At most.")] = 200,
    held_out_rows: Annotated[int, typer.Option("--held-out-rows", min=1, help="At most.")] = 64,
    seed: _SeedOption = 0,
) -> None:
    """Write a folder for `fedsilo demo --data` from public data sets (gsm8k, dmmath, medqa, ...)."""
    from fedsilo.demo.data import DEFAULT_PRIVATE, write_sets_folder

    folder = write_sets_folder(
        out,
        seed=seed,
        sets=sets,
        private=private or DEFAULT_PRIVATE,
        public=public,
        held_out=held_out,
        rows_per_silo=rows_per_silo,
        public_rows=public_rows,
        held_out_rows=held_out_rows,
    )
    _emit_folder(folder)


@command(data_app, "data check")
def check(
    file: Annotated[Path, typer.Argument(help="Task file, JSONL.")],
    verifier: Annotated[str, typer.Option("--verifier", help="As in silo.yaml: math, choice, math*0.9+format*0.1 ...")],
) -> None:
    """Read a task file as a silo would: count and list bad lines; 5 % or more is an error."""
    from fedsilo.files.task_files import PUBLIC, read_tasks, refuse_bad_references
    from fedsilo.grading.own_verifiers import find_verifier
    from fedsilo.grading.worker import GradingProcess, full_check

    executes, read = find_verifier(verifier).executes, read_tasks(file, PUBLIC)
    with full_check(verifier) as is_readable:
        if executes or not any(task.solution for task in read.rows):
            tasks = refuse_bad_references(read, is_readable)  # a program is run at a silo alone, in its sandbox
        else:
            with GradingProcess(verifier) as process:
                tasks = refuse_bad_references(read, is_readable, lambda *pair: process.grade(*pair).correct)
    data = {
        "file": str(file),
        "sha256": tasks.sha256,
        "rows": len(tasks.rows),
        "topics": sorted({task.topic for task in tasks.rows}),
        "problems": [{"line": line, "reason": reason} for line, reason in tasks.problems],
    }
    emit(
        data,
        f"{file}: {len(tasks.rows)} rows, sha256 {tasks.sha256}",
        warnings=[f"line {line}: {reason}" for line, reason in tasks.problems],
    )


def _emit_folder(folder: Any) -> None:
    """Show what a data folder holds; `folder` is a fedsilo.demo.data.DataFolder."""
    from fedsilo.files.task_files import read_tasks

    files = []
    for source in (*folder.private.values(), folder.public, folder.held_out):
        tasks = read_tasks(source.path)
        files.append(
            {
                "file": str(source.path.relative_to(folder.root)),
                "verifier": source.verifier,
                "rows": len(tasks.rows),
                "topics": len({task.topic for task in tasks.rows}),
                "sha256": tasks.sha256,
            }
        )
    emit(
        {"folder": str(folder.root), "tokenizer": folder.description.tokenizer, "files": files},
        lambda: table(
            ("file", "verifier", "rows", "topics", "sha256"),
            ([f["file"], f["verifier"], f["rows"], f["topics"], f["sha256"][:16]] for f in files),
        ),
    )
