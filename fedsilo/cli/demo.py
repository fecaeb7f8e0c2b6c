"""`fedsilo demo`: the whole federation on one machine, and a table of what it learned and what left."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedsilo.cli.output import emit, running, table, takes_signs
from fedsilo.cli.silo import isolation_text
from fedsilo.protocol.text import harmless

if TYPE_CHECKING:
    from fedsilo.demo.sites import Site


# ---- the closing table -----------------------------------------------------------------------------------------------


def report(data: dict[str, Any]) -> str:
    """Text of the closing table. `data` is what `fedsilo demo --json` carries."""
    parts = [_learned(data), _left(data), _verified(data)]
    if "attacks" in data:
        parts.append(_attacks(data))
    if "wire" in data:
        parts.append(_wire(data))
    return "\n\n".join([*parts, _adapter(data)])


def _points(row: dict[str, float]) -> list[str]:
    change = 100 * (row["after"] - row["before"])
    return [f"{100 * row['before']:.1f}", f"{100 * row['after']:.1f}", f"{change:+.1f}"]


def _learned(data: dict[str, Any]) -> str:
    rows: list[list[str]] = [["all silos", *_points(data["pass_at_1"])]]
    rows.append(["  greedy", *_points(data["pass_at_1_greedy"])])
    if "compared" in data:
        rows.append([f"  control {data['compared']['method']}", *_points(data["compared"]["pass_at_1"])])
    rows += [[silo, *_points(row)] for silo, row in data["per_silo"].items()]
    rows += [[f"topic {topic}", *_points(row)] for topic, row in data["per_topic"].items()]
    rounds = len(data["rounds"])
    heading = f"pass@1 on held-out prompts, % ({data['method']}, {rounds} round{'s' if rounds != 1 else ''})"
    lines = [heading, table(("", "before", "after", "points"), rows)]
    for silo, reasons in data["rows_left_out"].items():
        if reasons:
            lines.append(f"{silo} left out {', '.join(f'{count} {reason}' for reason, count in reasons.items())} rows")
    return "\n".join([*lines, *_without(data)])


def _without(data: dict[str, Any]) -> list[str]:
    """Return a line for each silo of the plan that had no part in a round that others committed: it left, or was
    late."""
    committed = [row for row in data["rounds"] if row["participants"]]
    missed = {
        silo: [str(row["round"]) for row in committed if silo not in row["participants"]]
        for silo in data["donors_trained"]
    }
    return [f"{silo} had no part in round {', '.join(rounds)}" for silo, rounds in missed.items() if rounds]


def _left(data: dict[str, Any]) -> str:
    silos = list(dict.fromkeys(row["silo"] for row in data["left"]))
    cells = {(row["kind"], row["silo"]): f"{row['messages']} / {row['bytes']:,}" for row in data["left"]}
    kinds = sorted({kind for kind, _ in cells}, key=lambda kind: (kind.startswith("control."), kind))
    totals = [f"{sum(row['bytes'] for row in data['left'] if row['silo'] == silo):,} bytes" for silo in silos]
    heading = "what left each silo, messages / bytes (its own audit log; the coordinator's log says the same)"
    # Four silos fit a terminal of 80 columns side by side; more stand below each other.
    parts = []
    for start in range(0, len(silos), 4):
        some = silos[start : start + 4]
        rows = [[kind, *(cells.get((kind, silo), "-") for silo in some)] for kind in kinds]
        parts.append(table(("", *some), [*rows, ["all", *totals[start : start + 4]]]))
    return "\n".join([heading, *parts])


def _verified(data: dict[str, Any]) -> str:
    rows = [
        [row["log"], "verified" if row["verified"] else "DOES NOT VERIFY", "; ".join(row["problems"]) or row["path"]]
        for row in data["audit"]
    ]
    trained = ", ".join(f"{silo} {count}" for silo, count in data["donors_trained"].items())
    roots = {str(Path(row["path"]).parents[2]) for row in data["audit"]}
    again = f"check them again: fedsilo audit verify {' '.join(f'{root}/*/state' for root in sorted(roots))}"
    return f"audit logs\n{table(('log', 'verdict', ''), rows)}\n{again}\ndonor answers trained on: {trained}"


def _attacks(data: dict[str, Any]) -> str:
    rows = [
        [
            row["name"],
            "denied" if row["decision"] == "deny" else row["decision"].upper(),
            row["rule"] + (f" and {len(row['rules']) - 1} more" if len(row["rules"]) > 1 else "") or "-",
            f"{row['round']}.{row['step']}" if row["step"] else str(row["round"]),
            str(row["record"]),
        ]
        for row in data["attacks"]
    ]
    attacker = data["attacker"]
    kept = all(row["decision"] == "deny" for row in data["attacks"])
    who = f"what {attacker}'s hostile trainer tried{'; its guard sent none of it' if kept else ''}"
    lines = [who, table(("attempt", "decision", "by", "round.step", "record"), rows)]
    recorded = next((row for row in data["attacks"] if row["record"] is not None and row["rules"]), None)
    log = next((Path(row["path"]) for row in data["audit"] if recorded and row["log"] == recorded["silo"]), None)
    if log is not None and recorded is not None:
        site = log.parent.parent
        lines += [
            "every rule's verdict on one of them:",
            f"  fedsilo policy explain {recorded['record']} --log {log} --policy {site / 'policy.yaml'} "
            f"--charter {site / 'charter.yaml'}",
        ]
    return "\n".join([*lines, *textwrap.wrap(data["not_stopped"], 80)])


def _wire(data: dict[str, Any]) -> str:
    wire = data["wire"]
    if wire["unreadable"]:
        return f"the wire: NOT SEARCHED, {wire['unreadable']}"
    control = "found" if data["positive_control_found"] else "NOT FOUND"
    return (
        f"the wire, in the clear: {wire['messages']} messages from silos, {wire['bytes']:,} bytes both ways\n"
        f"{wire['canaries']} planted texts searched for as {', '.join(wire['forms'])}: "
        f"{data['canaries_on_wire']} found{'; ' if wire['found'] else ''}{'; '.join(wire['found'][:4])}\n"
        f"positive control, planted in the run's name: {control}"
    )


def _adapter(data: dict[str, Any]) -> str:
    adapter = "none: each silo keeps what it trains\n"
    if data["adapter"]:
        adapter = f"{data['adapter']}\nload it     {load_line(data)}\n"
    return (
        f"adapter     {adapter}"
        f"run record  {data['run_record']}\n"
        f"isolation   {isolation_text(data['isolation'])}\n"
        f"{data['processes']} processes, {data['seconds']:.0f} s after set-up"
    )


def load_line(data: dict[str, Any]) -> str:
    """Return the line that loads base model and adapter, after `from transformers import ...; from peft import ...`."""
    base = f'AutoModelForCausalLM.from_pretrained("{data["base_model"]}")'
    return f'PeftModel.from_pretrained({base}, "{data["adapter"]}")'


# ---- `fedsilo demo` --------------------------------------------------------------------------------------------------


_OUT = Path("fedsilo-demo")


def demo(
    silos: Annotated[int, typer.Option("--silos", min=1, max=16, help="Silos of the demo's own set.")] = 4,
    rounds: Annotated[int | None, typer.Option("--rounds", min=1, help="Rounds; default 3, with --data 2.")] = None,
    local_steps: Annotated[
        int | None,
        typer.Option("--local-steps", min=1, help="GRPO steps of a silo in a round; default 20, with --data 2."),
    ] = None,
    method: Annotated[
        str,
        typer.Option(
            "--method",
            help="pubswap, pubswap-random, public-no-swap, self-swap, key-swap, public-sft, fedavg-grpo, fedsa-lora, "
            "local-only, responses-only.",
        ),
    ] = ("pubswap"),
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
) -> None:
    """Four organisations post-train one adapter over mTLS; see what left each, and check it."""
    from fedsilo.cli.own_names import refuse_foreign_names

    refuse_foreign_names()
    if replay:
        _play()
        return
    from fedsilo.demo.attacks import LEAK
    from fedsilo.demo.run import DemoOptions, run_demo

    on_terminal = sys.stdin.isatty() and sys.stdout.isatty() and not running().json_output and not no_console
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
    emit(result.data, lambda: "\n" + report(result.data), error=result.error)


def _play() -> None:
    """Raises UsageError: no terminal. NotFoundError: this installation has no recording."""
    from fedsilo.cli.console import need_terminal

    need_terminal()
    from fedsilo.demo.playing import play

    play(ascii_only=not takes_signs(), theme_name="fed-mono" if "NO_COLOR" in os.environ else "fed-dark")


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def _open_console(site: Site) -> None:
    """The console in the foreground, on the silo that holds a release; when it is left, the demo follows the run."""
    from fedsilo.cli.console import need_terminal

    need_terminal()
    from console.app import FedConsole
    from console.feed import Signer, connect_to
    from console.lock import KeyFiles

    identities = site.folder / "id"
    sys.stderr.write(
        f"{site.name} holds its first release: a, Enter to read it; L to unlock as alice; A or R to answer; "
        f"ctrl+q to leave: the result follows here, and what is unanswered stays held\n"
    )
    console = FedConsole(
        signer=Signer(site.control_socket),
        key_files=KeyFiles(identities / "alice.crt", identities / "alice.key"),
        site=site.name,
        waits_for=str(site.control_socket),
        leaving="ctrl+q for the demo's result",
        ascii_only=not takes_signs(),
    )
    console.run_on(connect_to(site.control_socket))
