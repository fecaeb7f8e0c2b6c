"""`coordinator`: set up, check, start, look at, copy and restore the federation's coordinator."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedsilo.cli import doctor
from fedsilo.cli import messages as cli_messages
from fedsilo.cli import transfer as cli_transfer
from fedsilo.cli.daemons import (
    COORDINATOR_YAML,
    ContextOption,
    CoordinatorOption,
    OperatorOption,
    RequestOption,
    clock_now,
    confirm,
    context_daemon,
    coordinator_client,
    coordinator_command,
    coordinator_query,
)
from fedsilo.cli.options import (
    VERIFIERS,
    LearningRateOption,
    LocalStepsOption,
    PromptsOption,
    RoundsOption,
    SamplesOption,
    SwapPeriodOption,
    TemplateOption,
    TokensOption,
    given,
    read_document,
    size_text,
)
from fedsilo.cli.output import (
    PersonOption,
    TimeoutOption,
    command,
    emit,
    facts_text,
    recorded,
    table,
    takes_version,
)
from fedsilo.files.durable import free_bytes, holder_of, read_private, undone_on_failure
from fedsilo.protocol.clocks import utc
from fedsilo.protocol.errors import NotFoundError, UnreachableError, UsageError

if TYPE_CHECKING:
    from coordinator.backup import Kept
    from coordinator.config import CoordinatorConfig
    from coordinator.main import Ready
    from fedsilo.control.answers import FreeForm, MemberRow
    from fedsilo.control.client import ControlClient


# ---- `coordinator backup` and `restore` ------------------------------------------------------------------------------


def backup(
    out: Annotated[Path, typer.Option("--out", help="New folder; it holds what silos sent, so keep it as state_dir.")],
    config: CoordinatorOption = COORDINATOR_YAML,
    with_keys: Annotated[
        bool, typer.Option("--with-keys", help="The private keys too: who has the backup is then the coordinator.")
    ] = False,
) -> None:
    """Copy database, audit log, payloads, results and files into a folder, signed; the coordinator may run meanwhile.

    Run it as the user of the coordinator. Only the backup of a coordinator that has ended can take over from it.
    """
    from certs.encoding import load_signing_key
    from coordinator.backup import make_backup, put_into
    from coordinator.config import load_config

    loaded = load_config(config)
    key = load_signing_key(read_private(loaded.identity.signing_key))
    left_out: list[str] = []
    manifest = make_backup(
        _kept(loaded),
        key,
        out,
        now=utc(time.time()),
        also=lambda folder: left_out.extend(put_into(folder, loaded, with_keys=with_keys)),
    )
    warnings = []
    if manifest["running"]:
        warnings.append(
            "the coordinator runs: what it takes from now on is not in this backup, so that silos will not go on with "
            "a coordinator restored from it; for that, stop it and make another"
        )
    if manifest["payloads"]:
        warnings.append(f"payloads lie at {manifest['payloads']} and are not in this backup")
    size = sum(each["bytes"] for each in manifest["files"].values())
    data = {
        "folder": str(out),
        "running": manifest["running"],
        "log_size": manifest["log"]["size"],
        "log_root": manifest["log"]["root"],
        "files": len(manifest["files"]),
        "bytes": size,
        "with_keys": with_keys,
    }
    text = f"wrote {out}: {data['files']} files, {size} bytes, an audit log of {data['log_size']} records"
    text += "" if with_keys else "; no private key"
    emit(data, text, warnings=[*warnings, *left_out])


def restore(
    folder: Annotated[Path, typer.Argument(metavar="BACKUP", help="Folder that `coordinator backup` wrote.")],
    config: CoordinatorOption = COORDINATOR_YAML,
    key: Annotated[
        Path | None,
        typer.Option("--key", help="coordinator.pub from elsewhere than the backup. Default: id/ beside --config."),
    ] = None,
    witnessed: Annotated[
        list[Path] | None,
        typer.Option(
            "--witnessed",
            metavar="NOTE",
            help="This coordinator's .note in audit/witnessed/ of a silo's state_dir: nothing older is restored.",
        ),
    ] = None,
) -> None:
    """Fill an empty state_dir and database from a backup; where --config is missing, from its files too.

    Be sure that the first coordinator has ended: two of them would sign two histories, and silos stop at that.
    """
    from coordinator.backup import private_files, restore_backup, take_back, take_out, verified_backup
    from coordinator.config import load_config
    from fedsilo.files.identity_files import load_coordinator_key

    public_key = load_coordinator_key(key or config.parent / "id" / "coordinator.pub")
    manifest = verified_backup(folder, public_key)
    written = take_out(folder, manifest["files"], config.parent) if not config.is_file() else []
    try:
        loaded = load_config(config)
        restore_backup(folder, manifest, _kept(loaded), public_key, seen=witnessed or ())
    except BaseException:
        take_back(written, config.parent)
        raise
    missing = [str(path) for path in private_files(loaded) if not path.is_file()]
    warnings = [f"{path} is missing: bring it before `coordinator start`, mode 0600" for path in missing]
    if manifest["running"]:
        warnings.append(
            f"this backup was made at {manifest['made_at']} while the coordinator ran; silos that saw more of its log "
            "than this refuse to go on"
        )
    data = {
        "state_dir": str(loaded.state_dir),
        "made_at": manifest["made_at"],
        "running": manifest["running"],
        "log_size": manifest["log"]["size"],
        "log_root": manifest["log"]["root"],
        "files": [str(path) for path in written],
        "missing": missing,
    }
    text = f"{loaded.state_dir} is as of {manifest['made_at']}, with an audit log of {data['log_size']} records\n"
    text += f"next: coordinator check --config {config}"
    emit(data, text, warnings=warnings)


def _kept(config: CoordinatorConfig) -> Kept:
    from coordinator.backup import Kept

    return Kept(config.spiffe_id, config.state_dir, config.database_url, config.payloads)


# ---- commands --------------------------------------------------------------------------------------------------------


MINUTES_FROM_SECONDS = 120  # an age is told in minutes from here on

app = typer.Typer(no_args_is_help=True, help="Set up, start and look at the coordinator of a federation.")
silos_app = typer.Typer(no_args_is_help=True, help="The silos of the federation.")
takes_version(app)
app.add_typer(silos_app, name="silos")
doctor.add_to(app, "coordinator")

_messages = cli_messages.Program(
    "coordinator",
    COORDINATOR_YAML,
    CoordinatorOption,
    coordinator_query,
    {
        "outbox": "What was sent to each silo, and what still waits for one.",
        "inbox": "Every message that came in and the rules that judged it.",
        "outbox list": "What was sent, newest round first: one row for each round, kind and silo. Each silo judges "
        "what comes to it.",
        "outbox show": "What went to one silo of one kind in one round, and what of it waits.",
        "inbox list": "What silos sent, newest first, and what the charter decided on each.",
        "inbox show": "One decision with every rule's verdict, and what would have been let in.",
        "audit list": cli_messages.RECORDS_HELP.format("coordinator"),
        "audit show": cli_messages.RECORD_HELP.format("coordinator"),
        "certs": "The coordinator's certificates, the authorities above them, and what each silo showed last.",
        "settings": "Every setting that a running coordinator uses, and where it comes from.",
    },
)
cli_messages.add_to(app, _messages)
command(app, "coordinator backup")(backup)
command(app, "coordinator restore")(restore)
cli_transfer.add_to_coordinator(app)


@command(app, "coordinator init")
def init(
    federation: Annotated[str, typer.Option("--federation", help="Name of the federation.")],
    silos: Annotated[str, typer.Option("--silos", help="Names with commas; aggregation follows this order.")],
    model: Annotated[Path, typer.Option("--model", help="Model folder; read for its hashes and shapes only.")],
    public: Annotated[Path, typer.Option("--public", help="Public prompts: JSON lines, one JSON array, or Parquet.")],
    held_out: Annotated[Path, typer.Option("--held-out", help="Held-out prompts; read for hash and topics.")],
    verifier: Annotated[
        str, typer.Option("--verifier", help=f"How answers to public prompts are checked: {VERIFIERS}.")
    ],
    out: Annotated[Path, typer.Option("--out", help="Folder that holds id/ and gets the files.")] = Path(),
    name: Annotated[str, typer.Option("--name", help="Name of the coordinator.")] = "main",
    listen: Annotated[str, typer.Option("--listen", help="host:port; port 0 takes a free one.")] = "127.0.0.1:8443",
    advertise: Annotated[str, typer.Option("--advertise", help="host:port the sites dial; default: --listen.")] = "",
    ruleset: Annotated[str, typer.Option("--ruleset", help="pubswap, pubswap-strict, fedavg ...")] = "pubswap",
    load: Annotated[str, typer.Option("--load", help="How every silo loads the base: fp32, bf16, nf4, fp8.")] = "fp32",
    rank: Annotated[int, typer.Option("--rank", help="LoRA rank.")] = 32,
    alpha: Annotated[float, typer.Option("--alpha", help="LoRA alpha; the scale is alpha / rank.")] = 64.0,
    targets: Annotated[str, typer.Option("--targets", help='"all-linear" or names with commas.')] = "all-linear",
    dtype: Annotated[str, typer.Option("--dtype", help="Values of updates: float32 or bfloat16.")] = "",
    least_isolation: Annotated[
        str, typer.Option("--least-isolation", help="Of each site's trainer; waived leaves it to each site.")
    ] = "waived",
    run: Annotated[
        Path | None, typer.Option("--run", help="run.yaml that will be submitted; the limits follow from its sizes.")
    ] = None,
    rounds: RoundsOption = None,
    local_steps: LocalStepsOption = None,
    swap_period: SwapPeriodOption = None,
    prompts_per_step: PromptsOption = None,
    samples_per_prompt: SamplesOption = None,
    max_new_tokens: TokensOption = None,
    learning_rate: LearningRateOption = None,
    template: TemplateOption = "",
    person: PersonOption = [],  # noqa: B006  # typer reads the default, nobody changes it
    force: Annotated[bool, typer.Option("--force", help="Replace files that exist.")] = False,
) -> None:
    """Write federation.json (for the sites), coordinator.yaml, charter.yaml and lora_schema.json.

    --run says how large the runs will be: the limits of every site's policy follow from it unless the site says
    otherwise. Without it they hold the run that `fedsilo run init` writes; --rounds to --learning-rate change a number.
    """
    from coordinator.setup import InitInputs, init_coordinator
    from fedsilo.demo.provision import people_of, write_coordinator_key, write_roles
    from fedsilo.files.model_folder import choice_of
    from fedsilo.files.run_request import EXAMPLE, size_of_run
    from policies.render import PlanSize

    sizes = size_of_run(read_document(run).encode(), str(run)) if run else size_of_run(EXAMPLE.encode(), "run.yaml")
    if run and max_new_tokens is None:
        _require_context(run, int(sizes["max_new_tokens"]), model)
    limits = sizes | given(
        rounds=rounds,
        local_steps=local_steps,
        swap_period=swap_period,
        prompts_per_step=prompts_per_step,
        samples_per_prompt=samples_per_prompt,
        max_new_tokens=max_new_tokens,
        learning_rate=learning_rate,
    )
    # of what init_coordinator itself writes it takes care
    with undone_on_failure(out, [out / "id" / "coordinator.pub", out / "id" / "roles.yaml"]):
        if not (out / "id" / "coordinator.pub").exists():
            write_coordinator_key(out / "id", name)
        if person:
            write_roles(out / "id", name, people_of(person))

        result = init_coordinator(
            InitInputs(
                directory=out,
                federation=federation,
                silos=tuple(part.strip() for part in silos.split(",") if part.strip()),
                model=model,
                public=public,
                held_out=held_out,
                verifier=verifier,
                now_seconds=time.time(),
                coordinator=name,
                listen=listen,
                advertise=advertise,
                ruleset=ruleset,
                load=load,
                rank=rank,
                alpha=alpha,
                targets=targets,
                dtype=dtype,
                least_isolation=least_isolation,
                template=choice_of(template),
                size=PlanSize().changed(limits, "coordinator init"),
            ),
            force=force,
        )
    emit(
        result,
        f"wrote {result['config']}, {result['charter']}, {result['schema']}\n"
        f"{size_text(result['plan_size'])}\n"
        f"give {result['bundle']} to every site\nnext: coordinator check --config {result['config']}",
    )


def _require_context(run: Path, asked_tokens: int, model: Path) -> None:
    """A run whose answers may be longer than the model's context is refused when it is submitted: rather now."""
    from fedsilo.files.model_facts import read_model_facts
    from fedsilo.files.run_request import read_request

    context = read_model_facts(model).context_tokens
    if asked_tokens > context:
        place = read_request(read_document(run).encode(), str(run)).place(("rollout", "max_new_tokens"))
        raise UsageError(
            f"{place}: rollout.max_new_tokens is {asked_tokens}, and the context of {model} is {context} tokens",
            hint="write a shorter answer into the file, or say --max-new-tokens",
        )


@command(app, "coordinator check")
def check(config: CoordinatorOption = COORDINATOR_YAML) -> None:
    """Read everything a start needs and compare it; changes nothing."""
    from coordinator.config import load_config
    from coordinator.main import check as check_files

    checked = check_files(load_config(config))
    data = {
        "spiffe_id": checked.identity.spiffe_id,
        "certificate_not_after": utc(checked.identity.not_after.timestamp()),
        "charter_sha256": checked.charter.digest,
        "lora_schema_sha256": checked.schema.digest,
        "public_rows": len(checked.public.rows),
        "silos": list(checked.config.silos),
        "state_dir_free_bytes": free_bytes(checked.config.state_dir),
    }
    emit(
        data, lambda: table(("what", "value"), ((key, value) for key, value in data.items())), warnings=checked.warnings
    )


@command(app, "coordinator start")
def start(config: CoordinatorOption = COORDINATOR_YAML) -> None:
    """Serve until SIGTERM or Ctrl-C. Prints one line when silos may dial."""
    import logging

    # gRPC reads this when it loads, and what it says of failed handshakes becomes lines of our own log.
    from coordinator.native_log import ENVIRONMENT

    os.environ.update(ENVIRONMENT)
    from fedsilo.cli.own_names import refuse_foreign_names
    from fedsilo.files.long_lived import one_thread_for_sums

    one_thread_for_sums(os.environ)
    refuse_foreign_names()
    from coordinator.main import run_coordinator

    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")

    def ready(where: Ready) -> None:
        emit(
            {
                "federation": where.federation,
                "coordinator": where.coordinator,
                "address": where.address,
                "port": where.port,
                "control_socket": where.control_socket,
            },
            f"coordinator {where.federation}/{where.coordinator} ready on {where.address}, "
            f"control socket {where.control_socket}",
        )

    run_coordinator(config, ready=ready)


@command(app, "coordinator status")
def status(
    config: Annotated[
        Path | None,
        typer.Option(
            "--config", help="Default: coordinator.yaml here, else the current context, if it is a coordinator."
        ),
    ] = None,
    context: ContextOption = "",
) -> None:
    """State of the running coordinator: address, silos, runs."""
    chosen = context_daemon("coordinator", context, config, here=COORDINATOR_YAML)
    state, now = _state(chosen.connect() if chosen else coordinator_client(config or COORDINATOR_YAML))

    emit(state, lambda: status_text(state, now))


def status_text(state: FreeForm, now: str) -> str:
    """Linear text of `coordinator status`."""
    from fedsilo.control.answers import CoordinatorStatus, read

    status = read(CoordinatorStatus, state)
    lines = [f"coordinator {status.federation}/{status.coordinator} on {status.address}"]
    if status.halted:
        ends = "nothing is taken from any silo until that is put right and the coordinator started again"
        lines.append(f"HALTED: {status.halted}; {ends}")
    if status.waits:
        lines.append(f"WAITS: {status.waits}")
    if clock := status.clock:
        condition = "the clock is right by now" if "ahead_seconds" in clock else "that time was wrong"
        lines.append(f"CLOCK: {clock['told']}; if {condition}: coordinator accept-clock --operator NAME")
    lines.append(_silo_table(status.silos, now))
    runs = [(run.run, run.state, f"{run.round}/{run.rounds}", run.method) for run in status.runs]
    lines.append(table(("run", "state", "round", "method"), runs) if runs else "no runs yet")
    return "\n".join(lines)


@command(app, "coordinator accept-clock")
def accept_clock(
    operator: OperatorOption,
    config: CoordinatorOption = COORDINATOR_YAML,
    expect_digest: Annotated[
        str, typer.Option("--expect-digest", help="Of the clock, as `coordinator status` showed it to you.")
    ] = "",
    request_id: RequestOption = "",
) -> None:
    """Go on by the clock as it is now: no later time that was seen is compared with any more, and a jump that was kept
    out is followed (approvers)."""
    digest = expect_digest.removeprefix("sha256:")
    if not digest:
        with coordinator_client(config) as client:
            stands = client.snapshot().state.get("clock")
        if not stands:
            raise NotFoundError("time does not stand still here", hint="`coordinator status` says where it does")
        digest, hint = str(stands["digest"]), "`coordinator status --json` names it: data.clock.digest"
        confirm(digest, "", f"{stands['told']}\n{clock_now()}", hint=hint)
    data = coordinator_command(config, operator, "clock.accept", {"halt": digest}, request_id)
    now, released = utc(data["accepted"]), utc(data["released"])
    emit(
        data,
        f"the clock counts as it is now, {now}; all went by {released} before, which is compared with no more"
        f"{recorded(data)}",
    )


@command(app, "coordinator stop")
def stop(config: CoordinatorOption = COORDINATOR_YAML, timeout: TimeoutOption = 30.0) -> None:
    """End the coordinator cleanly (SIGTERM by its own user); calls in flight may finish."""
    from coordinator.config import load_config
    from fedsilo.demo.processes import wait_for_end

    lock = load_config(config).state_dir / "lock"
    process_id = holder_of(lock)
    if process_id:
        os.kill(process_id, signal.SIGTERM)
        wait_for_end(lock, timeout)
    else:
        raise UnreachableError("no coordinator is running in this state_dir")
    emit({"process": process_id}, f"process {process_id} has ended")


@command(silos_app, "coordinator silos list")
def silos_list(config: CoordinatorOption = COORDINATOR_YAML) -> None:
    """List the silos that have joined, were refused (and why), or are absent."""
    from fedsilo.control.answers import MemberRow, read_rows

    state, now = _state(coordinator_client(config))
    rows = state["silos"]
    emit(rows, lambda: _silo_table(read_rows(MemberRow, rows), now))


@command(silos_app, "coordinator silos show")
def silos_show(
    name: Annotated[str, typer.Argument(help="Of the silo, from `coordinator silos list`.")],
    config: CoordinatorOption = COORDINATOR_YAML,
) -> None:
    """Show one silo: whether it joined, what it reported, and when it was last heard."""
    row = next((row for row in _state(coordinator_client(config))[0]["silos"] if row["silo"] == name), None)
    if row is None:
        raise NotFoundError(f"no silo of that name is listed: {name[:64]!r}", hint="coordinator silos list")

    def text() -> str:
        facts = {key: row[key] for key in ("silo", "state", "since", "last_seen", "round", "step", "error")}
        said = {f"said {key}": value for key, value in row["hello"].items()}
        rows = [*facts.items(), ("refused because", _reason(row["refusal"])), *said.items()]
        return table(("what", "value"), ((key, "-" if value in ("", None) else value) for key, value in rows))

    emit(row, text)


@command(app, "coordinator logs")
def logs(
    config: CoordinatorOption = COORDINATOR_YAML,
    follow: Annotated[bool, typer.Option("--follow", help="Go on as events happen.")] = False,
) -> None:
    """Events of the running coordinator, oldest first; with --json one envelope a line."""
    with coordinator_client(config) as client:
        last = client.snapshot().sequence
        if not follow and not last:
            return
        for event in client.watch(0):
            data = {"sequence": event.sequence, "time": event.time, "name": event.name, "fields": event.fields}
            text = f"{event.time} {event.name} {facts_text(event.fields)}"
            emit(data, text)
            if not follow and event.sequence >= last:
                return


def _state(daemon: ControlClient) -> tuple[dict[str, Any], str]:
    """The state, and the coordinator's time."""
    with daemon as client:
        reading = client.snapshot()
        return reading.state, reading.time


def seen_text(last_seen: str, now: str) -> str:
    """Return how long ago that was. `now` is the coordinator's time; it heard nothing since its own start where
    `last_seen` is empty."""
    try:
        seconds = (datetime.fromisoformat(now) - datetime.fromisoformat(last_seen)).total_seconds()
    except (ValueError, TypeError):
        return last_seen or "-"
    whole = max(int(seconds), 0)
    return f"{whole} s ago" if whole < MINUTES_FROM_SECONDS else f"{whole // 60} min ago"


def _silo_table(rows: Sequence[MemberRow], now: str) -> str:
    from fedsilo.views.overview import standing_text

    clocks = [f"the clock of {row.silo} is {row.clock}" for row in rows if row.clock]
    shown = table(
        ("silo", "state", "last seen", "round.step", "refused because"),
        (
            (
                row.silo,
                standing_text(row.state),
                seen_text(row.last_seen, now),
                f"{row.round}.{row.step}" if row.round else "-",
                _reason(row.refusal),
            )
            for row in rows
        ),
    )
    return "\n".join([shown, *clocks])


def _reason(refusal: FreeForm | None) -> str:
    if not refusal:
        return ""
    return f"{refusal['code']}: {refusal['field']} expected {refusal['expected']}, got {refusal['got']}"
