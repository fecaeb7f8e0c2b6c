"""`fedsilo demo`: the whole federation on one machine."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedsilo.cli.output import JsonOption, emit, guarded
from fedsilo.protocol.text import harmless

if TYPE_CHECKING:
    from fedsilo.demo.sites import Site

_OUT = Path("fedsilo-demo")


def demo(
    silos: Annotated[int, typer.Option("--silos", min=1, max=16, help="Silos of the demo's own set.")] = 4,
    rounds: Annotated[int | None, typer.Option("--rounds", min=1, help="Rounds; default 3, with --data 2.")] = None,
    local_steps: Annotated[
        int | None,
        typer.Option("--local-steps", min=1, help="GRPO steps of a silo in a round; default 20, with --data 2."),
    ] = None,
    method: Annotated[str, typer.Option("--method", help="pubswap, pubswap-random, public-no-swap, fedavg-grpo.")] = (
        "pubswap"
    ),
    exchange: Annotated[
        str, typer.Option("--exchange", help="step, or round_end: silos wait for nobody inside a round.")
    ] = "step",
    seed: Annotated[int, typer.Option("--seed", min=0, help="Data split, rollouts and site secrets follow.")] = 0,
    out: Annotated[Path | None, typer.Option("--out", help="Empty folder for everything; it stays.")] = None,
    data: Annotated[Path | None, typer.Option("--data", help="Folder of `fedsilo data from-sets`.")] = None,
    compare: Annotated[str, typer.Option("--compare", help="A second method from the same start.")] = "",
    leak: Annotated[bool, typer.Option("--leak", help="One silo's trainer tries to get private data out.")] = False,
    attack: Annotated[
        list[str],
        typer.Option(
            "--attack",
            help="One attempt of --leak: prompt_as_response, prompt_in_tensor_name, extra_tensor, off_grid_number.",
        ),
    ] = [],  # noqa: B006  # typer reads the default, nobody changes it
    record: Annotated[
        bool, typer.Option("--record", help="Plant canaries, record what crosses in the clear, search it.")
    ] = False,
    replay: Annotated[bool, typer.Option("--replay", help="Run nothing; play a recording in 30 seconds.")] = False,
    no_console: Annotated[bool, typer.Option("--no-console", help="Hold nothing, open no console.")] = False,
    answer_minutes: Annotated[
        float,
        typer.Option(
            "--answer-minutes", min=0.1, help="End so long after the console was left with a release unanswered."
        ),
    ] = 10.0,
    json_output: JsonOption = False,
) -> None:
    """Four organisations post-train one adapter over mTLS; see what left each, and check it."""
    with guarded("demo", json_output=json_output):
        from fedsilo.cli.own_names import refuse_foreign_names

        refuse_foreign_names()
        if replay:
            _play()
            return
        from fedsilo.cli.demo_report import report
        from fedsilo.demo.attacks import LEAK
        from fedsilo.demo.run import DemoOptions, run_demo

        on_terminal = sys.stdin.isatty() and sys.stdout.isatty() and not json_output and not no_console
        folder = out or _OUT / time.strftime("%Y%m%d-%H%M%S")
        started = time.monotonic()

        def say(line: str) -> None:
            sys.stderr.write(f"[{time.monotonic() - started:6.1f} s] {harmless(line, lines=True)}\n")
            sys.stderr.flush()

        # A demo that is told to end takes its processes along, whoever tells it: a closed terminal, a service manager,
        # or a script that started it in the background, where the shell has Ctrl-C ignored.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, _interrupt)
        options = DemoOptions(
            out=folder.absolute(),
            seed=seed,
            silos=silos,
            rounds=rounds,
            local_steps=local_steps,
            method=method,
            exchange=exchange,
            data=data.absolute() if data else None,
            compare=compare,
            hold=on_terminal,
            answer_minutes=answer_minutes,
            record=record,
            attacks=tuple(dict.fromkeys(attack)) or (tuple(LEAK) if leak else ()),
        )
        result = run_demo(options, say, attend=_open_console if on_terminal else None)
        emit(
            "demo",
            result.data,
            json_output=json_output,
            text=lambda: "\n" + report(result.data),
            error=result.error,
        )


def _play() -> None:
    """Raises UsageError: no terminal. NotFoundError: this installation has no recording."""
    from fedsilo.cli.console import need_terminal

    need_terminal()
    from fedsilo.cli.standard_streams import takes_signs
    from fedsilo.demo.playing import play

    play(ascii_only=not takes_signs(), theme_name="fed-mono" if "NO_COLOR" in os.environ else "fed-dark")


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def _open_console(site: Site) -> None:
    """The console in the foreground, on the silo that holds a release; when it is left, the demo follows the run."""
    from fedsilo.cli.console import open_console

    identities = site.folder / "id"
    sys.stderr.write(
        f"{site.name} holds its first release: a, Enter to read it; L to unlock as alice; A or R to answer; "
        f"ctrl+q to leave: the result follows here, and what is unanswered stays held\n"
    )
    open_console(
        site.control_socket,
        certificate=identities / "alice.crt",
        key=identities / "alice.key",
        site=site.name,
        leaving="ctrl+q for the demo's result",
    )
