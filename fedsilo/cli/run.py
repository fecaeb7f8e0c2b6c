"""`fedsilo run`: submit, watch and steer runs through the coordinator's control socket."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from fedsilo.cli.daemons import COORDINATOR_YAML, RequestOption, coordinator_client, coordinator_command
from fedsilo.cli.options import named_as_input, read_document
from fedsilo.cli.output import (
    command,
    emit,
    existing,
    facts_text,
    recorded,
    running,
    table,
    write_err,
)
from fedsilo.files.durable import holder_of, read_regular, removed_on_failure, write_durably
from fedsilo.protocol.errors import (
    ConflictError,
    FedSiloError,
    NotFoundError,
    OperationError,
    UnreachableError,
    UsageError,
    VerificationError,
)

app = typer.Typer(no_args_is_help=True, help="Submit, watch and steer runs of the federation.")

SocketOption = Annotated[
    Path | None, typer.Option("--socket", envvar="FEDSILO_CONTROL", help="The coordinator's control socket.")
]
ConfigOption = Annotated[Path, typer.Option("--config", help="coordinator.yaml, read for its control socket.")]
AsOption = Annotated[
    str, typer.Option("--as", envvar="FEDSILO_OPERATOR", help="Who signs: a person, or the path of a certificate.")
]
RunArgument = Annotated[str, typer.Argument(help="Name of the run.")]
ENDED = ("finished", "failed", "aborted")
_DIRECTIONS = {"in": "from the silo", "out": "to the silo"}


@command(app, "run init")
def init(
    out: Annotated[Path, typer.Option("--out", help="File to write.")] = Path("run.yaml"),
    force: Annotated[bool, typer.Option("--force", help="Replace a file that exists.")] = False,
) -> None:
    """Write an example of a run, for `coordinator init --run` and `fedsilo run submit`."""
    from fedsilo.files.run_request import EXAMPLE

    if out.exists() and not force:
        raise ConflictError(f"{out} exists already", hint="give --force to replace it")
    write_durably(out, EXAMPLE.encode())
    emit({"run": str(out)}, f"wrote {out}\nnext: change it, then coordinator init --run {out} ...")


@command(app, "run submit")
def submit(
    file: Annotated[Path, typer.Argument(help="run.yaml.")],
    person: AsOption,
    config: ConfigOption = COORDINATOR_YAML,
    socket: SocketOption = None,
    request_id: RequestOption = "",
) -> None:
    """Submit a run; it starts when the silos it names have joined. --dry-run checks it as the coordinator will."""
    arguments = {"text": read_document(file), "source": str(file)[:128]}
    if running().dry_run:
        _check_request(arguments["text"], arguments["source"], config)
    result = coordinator_command(config, person, "run.submit", arguments, request_id, socket)
    emit(result, f"run {result['run']} waits for {len(result['silos'])} silos{recorded(result)}")


def _check_request(text: str, source: str, config: Path) -> None:
    """Judge a run by the federation's files beside coordinator.yaml, or by its form where there are none.

    Raises:
        UsageError: it cannot be a run here.
    """
    from fedsilo.files.run_request import check_form, check_request, read_request, read_start, with_start

    document = read_request(text.encode(), source)
    document = replace(document, value={"run": "unnamed", **document.value})
    if not config.is_file():
        write_err(f"warning: there is no {config}: of {source} only the form is checked\n")
        check_form(document)
        return
    from coordinator.config import load_config
    from coordinator.main import check_shared

    settings = load_config(config)
    fixed = check_shared(settings).fixed
    start = read_start(document, settings.source.parent, fixed.schema, lambda piece: None)
    check_request(with_start(document, start), fixed, start)


@command(app, "run list")
def list_runs(config: ConfigOption = COORDINATOR_YAML, socket: SocketOption = None) -> None:
    """List all runs, oldest first."""
    with coordinator_client(config, socket) as client:
        runs = client.query("runs")
    rows = [
        (run["run"], run["state"], f"{run['round']}/{run['rounds']}", run["committed"], run["method"], _reason(run))
        for run in runs
    ]
    emit(
        runs, lambda: table(("run", "state", "round", "committed", "method", "reason"), rows) if rows else "no runs yet"
    )


@command(app, "run show")
def show(
    run: RunArgument,
    number: Annotated[int | None, typer.Option("--round", help="Only this round.")] = None,
    config: ConfigOption = COORDINATOR_YAML,
    socket: SocketOption = None,
) -> None:
    """Show one run: plan, rounds, pass@1, bytes; of one round, also each silo's phases, who is awaited, and digests."""
    from fedsilo.cli.curves import round_text

    with coordinator_client(config, socket) as client:
        record = client.query("run", {"run": run})
        found = [row for row in record["rounds"] if row["round"] == number]
        progress = client.query("round", {"run": run, "round": number}) if found else {}
    if number is not None:
        if not found:
            raise NotFoundError(f"run {run} has no round {number}")
        data = found[0] | {"progress": progress}
        emit(data, lambda: f"{_rounds_text(found)}\n{round_text(progress)}")
        return
    emit(record, lambda: _record_text(record))


@command(app, "run watch")
def watch(
    run: RunArgument,
    config: ConfigOption = COORDINATOR_YAML,
    socket: SocketOption = None,
    since: Annotated[
        int, typer.Option("--since", min=0, metavar="SEQUENCE", help="Go on after this event of an earlier watch.")
    ] = 0,
) -> None:
    """Events of a run until it ends; with --json one envelope a line. Exit 1 if it failed.

    Each has a sequence; a watch that broke off goes on with --since. Events that the coordinator has forgotten since,
    or that came faster than they were read, are said to be missing, with their number where it is known.
    """
    from fedsilo.cli.watch import EVENTS_MISSED, gap_text, gaps_told, up_to

    place = f" --socket {socket}" if socket else "" if config == COORDINATOR_YAML else f" --config {config}"
    last = since
    with coordinator_client(config, socket) as client:
        state, told = client.query("run", {"run": run})["state"], False
        over = state in ENDED
        try:
            newest = client.snapshot().sequence if over and since else 0
            # who goes on after a break is told what came since, also of a run that ended meanwhile
            if not over or since not in (0, newest):
                events = gaps_told(client.watch(since), since)
                for event in up_to(events, newest) if over else events:
                    last = event.sequence
                    if event.fields.get("run") not in (None, run):
                        continue
                    details = facts_text({key: value for key, value in event.fields.items() if key != "run"})
                    data = {"sequence": event.sequence, "time": event.time, "name": event.name, "fields": event.fields}
                    lost = event.name == EVENTS_MISSED
                    words = f"{gap_text(event.fields['missed'])}: fedsilo run show {run}" if lost else details
                    text = f"{event.sequence} {event.time} {event.name} {words}"
                    emit(data, text)
                    if told := event.name == "run.ended" and event.fields.get("run") == run:
                        break
                    # its end may be among them, and nothing of this run would come any more
                    if lost and not over and client.query("run", {"run": run})["state"] in ENDED:
                        break
            record = client.query("run", {"run": run})
            if (state := record["state"]) not in ENDED:
                raise UnreachableError("the coordinator ended its events while the run goes on")
        except UnreachableError as error:
            hint = f"go on, once the coordinator answers, with: fedsilo run watch {run} --since {last}{place}"
            raise UnreachableError(error.message, hint=hint, code=error.code) from error
    if not told:
        # Its events may be gone from the coordinator's memory; how it ended stands in its record.
        fields = {"run": run, "outcome": state, "reason": record["reason"]}
        data = {"sequence": None, "time": record["ended_at"], "name": "run.ended", "fields": fields}
        text = f"- {record['ended_at']} run.ended outcome={state}; `fedsilo run show {run}` shows its rounds"
        emit(data, text)
    if state != "finished":
        raise OperationError(
            f"run {run} has not finished: {state} {_reason(record)}".rstrip(),
            hint="why a silo said no stands in that silo's own log only: silo logs" if record["silo_errors"] else "",
        )
    if (done := _done(record)) != f"{len(record['rounds'])} of {len(record['rounds'])}":
        write_err(f"warning: {done} rounds were {_word(record)}: fedsilo run show {run}\n")


def _done(record: dict[str, Any]) -> str:
    """Return how many rounds ended as planned, of those that there were or, while the run goes on, of those planned.
    An abandoned round changed nothing."""
    from fedsilo.protocol.rounds import ROUND_DONE

    of = len(record["rounds"]) if record["state"] in ENDED else (record["plan"] or {}).get("rounds", 0)
    return f"{sum(row['state'] in ROUND_DONE for row in record['rounds'])} of {of}"


def _word(record: dict[str, Any]) -> str:
    """Return the word for how rounds of this run end: with an adapter, or without."""
    return "closed" if any(row["state"] == "closed" for row in record["rounds"]) else "committed"


def _steer(verb: str) -> None:
    @command(app, f"run {verb}", help=_HELP[verb])
    def steer(
        run: RunArgument,
        person: AsOption,
        config: ConfigOption = COORDINATOR_YAML,
        socket: SocketOption = None,
        request_id: RequestOption = "",
    ) -> None:
        result = coordinator_command(config, person, f"run.{verb}", {"run": run}, request_id, socket)
        state = result.get("state", "started")
        emit(result, f"run {run}: {state}{recorded(result)}")


_HELP = {
    "start": "Start a waiting run with the silos that have joined (at least the quorum).",
    "pause": "Deliver nothing more and let no deadline pass, until resumed.",
    "resume": "Go on with a paused run.",
}
for _verb in _HELP:
    _steer(_verb)


@command(app, "run abort")
def abort(
    run: RunArgument,
    person: AsOption,
    confirm: Annotated[
        str, typer.Option("--confirm", metavar="RUN", help="The run's name again; without a terminal it is needed.")
    ] = "",
    number: Annotated[
        int | None, typer.Option("--round", min=0, help="Only while this is its newest round; 0 before the first.")
    ] = None,
    config: ConfigOption = COORDINATOR_YAML,
    socket: SocketOption = None,
    request_id: RequestOption = "",
) -> None:
    """End a run now; the adapter of the last committed round stays. It cannot be undone: the name is typed twice."""
    if not confirm:
        if not (sys.stdin.isatty() and sys.stdout.isatty()):
            raise UsageError("without a terminal an abort needs --confirm", hint=f"--confirm {run}")
        confirm = typer.prompt("this cannot be undone; type the name of the run").strip()
    if confirm != run:
        raise UsageError(f"{confirm[:64]!r} is not {run[:64]!r}", hint="nothing was aborted; give the run's name twice")
    arguments = {"run": run} if number is None else {"run": run, "round": number}
    result = coordinator_command(config, person, "run.abort", arguments, request_id, socket)
    emit(result, f"run {run}: {result['state']}{recorded(result)}")


@command(app, "run export")
def export(
    run: RunArgument,
    out: Annotated[Path, typer.Argument(help="Folder to write: run_record.json, adapter/ and tensorboard/.")],
    config: ConfigOption = COORDINATOR_YAML,
    socket: SocketOption = None,
) -> None:
    """Copy a run's adapter folder and signed record out of the coordinator's state.

    With the `science` extra, its figures stand beside them in tensorboard/, as TensorBoard reads them.
    """
    import shutil
    from importlib.util import find_spec

    try:
        with coordinator_client(config, socket) as client:
            record = client.query("run", {"run": run})
            curves = client.query("curves", {"run": run})
    except UnreachableError as error:
        if socket is None and (folder := _ended_run(config, run)) is not None:
            hint = f"start the coordinator, or copy {folder}: the run's signed record, and its adapter if it has one"
            raise UnreachableError(error.message, hint=hint) from error
        raise
    if not record["folder"]:
        raise ConflictError(f"run {run} has not ended: it is {record['state']}")
    if out.exists() and any(out.iterdir()):
        raise ConflictError(f"{out} is not empty", hint="name a new folder")
    with removed_on_failure(out):
        shutil.copytree(record["folder"], out, dirs_exist_ok=True)
        if find_spec("tensorboard") is not None:
            from fedsilo.cli.curves import write_events
            from fedsilo.control.answers import Curves, read

            write_events(out / "tensorboard", read(Curves, curves))
    adapter = out / "adapter"
    data = {"run": run, "folder": str(out), "adapter": str(adapter) if adapter.exists() else ""}
    emit(data, f"wrote {out}")


@command(app, "run verify")
def verify(
    file: Annotated[Path, typer.Argument(help="run_record.json, as `fedsilo run export` wrote it.")],
    key: Annotated[Path, typer.Option("--key", help="The coordinator's public signing key, id/coordinator.pub.")],
    logs: Annotated[
        list[Path] | None,
        typer.Option("--log", metavar="LOG", help="Folder of a party's audit log, for its key and those it knows."),
    ] = None,
    ca: Annotated[
        Path | None, typer.Option("--ca", help="id/federation_ca.crt: every silo needs a certificate under it.")
    ] = None,
) -> None:
    """Check a run record's signature, those under the transcript of each round, and the adapter/ beside it, offline.
    Exit 7 if it is not the record that the coordinator signed, not what the silos signed, or another adapter.

    Without --log and --ca, silo keys are as the coordinator states them: then it may have invented the silos.
    """
    from fedsilo.audit.transcripts import silo_keys
    from fedsilo.cli.audit import log_folder
    from fedsilo.files.identity_files import load_coordinator_key
    from fedsilo.protocol.transcript import check_record, signer_of, verify_record

    with named_as_input(key):
        public_key = load_coordinator_key(key)
    document = read_regular(file)
    record = verify_record(document, public_key)
    keys, problems = silo_keys(record, [log_folder(existing(log)) for log in logs or ()], ca)
    found = check_record(
        record, signer=signer_of(document), public_key=public_key, keys=keys, exhaustive=ca is not None
    )
    problems += found.problems
    adapter, wrong = _adapter_beside(file, record)
    problems += wrong
    data = {name: record.get(name) for name in ("run", "state", "ended_at", "adapter_sha256")}
    sources = " and ".join(["given logs"] * bool(logs) + [f"certificates under {ca}"] * (ca is not None))
    stated = "silo keys as the coordinator states them"
    data |= {
        "transcripts": found.rounds,
        "silo_keys": f"silo keys from {sources}" if sources else stated,
        "keys_not_vouched_for": list(found.unvouched),
        "adapter": adapter,
        "problems": problems,
    }
    text = [
        f"run {data['run']}, {data['state']} {data['ended_at']}: the record is signed by the key in {key}; "
        f"{_done(record)} rounds {_word(record)}, {found.rounds} with a transcript whose signatures verify; "
        f"{data['silo_keys']}",
        f"adapter/ beside it: {adapter}",
        *(f"{stated}: {name}" for name in found.unvouched if sources),
        *problems,
    ]
    error = (
        VerificationError(
            f"{file} does not verify: {problems[0]}" + (f" (and {len(problems) - 1} more)" if problems[1:] else ""),
            hint="compare with the audit logs of all parties: `fedsilo audit verify LOG...`",
        )
        if problems
        else None
    )
    emit(data, "\n".join(text), error=error)


def _adapter_beside(file: Path, record: dict[str, Any]) -> tuple[str, list[str]]:
    """Return the folder beside a record in words, and what is wrong with it."""
    from fedsilo.files.adapter_folder import adapter_sha256, further_files

    folder, recorded = file.parent / "adapter", record["adapter_sha256"]
    if not folder.is_dir():
        return "not there, not looked at", []
    if not record["plan"] or recorded == record["base_adapter_sha256"]:
        return "of no round of this run", [f"{folder} is there, and the record names no adapter of this run"]
    try:
        found = adapter_sha256(folder, record["plan"]["lora"])
    except FedSiloError as error:
        return "not one that can be told", [error.message]
    if found != recorded:
        return "another", [f"{folder} holds {found[:12]}, the record names {recorded[:12]}"]
    further = further_files(folder)
    return f"the one of the record, {recorded[:12]}{'; not looked at: ' if further else ''}{', '.join(further)}", []


def _ended_run(config: Path, run: str) -> Path | None:
    """The folder of a run that has ended, where no coordinator runs that could be asked."""
    from coordinator.config import load_config

    state_dir = load_config(config).state_dir
    folder = state_dir / "runs" / run
    is_one = folder.parent == state_dir / "runs" and (folder / "run_record.json").is_file()
    return folder if is_one and not holder_of(state_dir / "lock") else None


def _reason(run: dict[str, Any]) -> str:
    """The reason of the end, and which silo said what: codes, since nothing else of an error crosses."""
    told = ", ".join(f"{silo} {' '.join(codes)}" for silo, codes in run["silo_errors"].items())
    return f"{run['reason']} ({told})".strip() if told else str(run["reason"])


def _record_text(record: dict[str, Any]) -> str:
    from fedsilo.cli.silo import isolation_text

    plan = record["plan"] or record.get("request", {})  # it has no plan before it begins
    lines = [
        f"run {record['run']}: {record['state']} {_reason(record)}".rstrip(),
        f"method {plan.get('method', '-')}, seed {plan.get('seed', '-')}, submitted by {record['submitted_by']}; "
        f"{_done(record)} rounds {_word(record)}",
        f"isolation of the trainers: {isolation_text(record['isolation'])}",
    ]
    if record["rounds"]:
        lines.append(_rounds_text([record["before"], *record["rounds"]]))
    bytes_rows = [
        (row["silo"], _DIRECTIONS[row["direction"]], row["kind"], row["messages"], row["bytes"])
        for row in record["traffic"]
    ]
    if bytes_rows:
        lines.append("payload bytes of this run, as the coordinator counted them")
        lines.append(table(("silo", "direction", "kind", "messages", "bytes"), bytes_rows))
    if record["folder"]:
        lines.append(f"folder {record['folder']}")
    return "\n".join(lines)


def _rounds_text(rounds: list[dict[str, Any]]) -> str:
    """A line a round, and a sentence where a mean is of fewer silos than another: the two say nothing of a change."""
    rows, told = [], []
    for item in rounds:
        scores = {
            silo: values["pass_at_1"][""]
            for silo, values in item["metrics"].items()
            if "" in values.get("pass_at_1", {})
        }
        mean = f"{sum(scores.values()) / len(scores):.3f}" if scores else "-"
        donors = sum(item["donors_sent"].values())
        part = len(item["participants"]) if item["state"] else "-"
        rows.append((item["round"], item["state"] or "base", part, donors, mean, len(scores), item["seconds"]))
        told.append((item["round"], scores))
    most = max((max(len(item["participants"]), len(item["metrics"])) for item in rounds), default=0)
    notes = [
        f"round {number}: this mean is of {', '.join(sorted(scores))} only; do not compare it with one of {most} silos"
        for number, scores in told
        if 0 < len(scores) < most
    ]
    header = ("round", "state", "silos", "donors", "mean pass@1", "of silos", "seconds")
    return "\n".join([table(header, rows), *notes])
