"""`silo`: set up, check, run and steer one site. Reading goes to the daemon's control socket; every change is a command
signed with a person's key (`--operator`), so an approval names somebody."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedsilo.cli import adapters as cli_adapters
from fedsilo.cli import approvals as cli_approvals
from fedsilo.cli import curves as cli_curves
from fedsilo.cli import doctor
from fedsilo.cli import report as cli_report
from fedsilo.cli import silo_messages as cli_silo_messages
from fedsilo.cli import transfer as cli_transfer
from fedsilo.cli.daemons import ContextOption, context_daemon
from fedsilo.cli.desk_answers import recorded
from fedsilo.cli.output import JsonOption, PersonOption, TimeoutOption, emit, guarded, table, takes_version
from fedsilo.cli.silo_control import (
    CONFIG_DEFAULT,
    ConfigOption,
    OperatorOption,
    RequestOption,
    client_of,
    command,
    load_site,
)
from fedsilo.cli.site_options import VERIFIERS, TemplateOption
from fedsilo.cli.size_options import (
    LearningRateOption,
    LocalStepsOption,
    PromptsOption,
    RoundsOption,
    SamplesOption,
    SwapPeriodOption,
    TokensOption,
    given,
    size_text,
)
from fedsilo.cli.typed_back import clock_now, confirm
from fedsilo.protocol.errors import NotFoundError, UsageError

if TYPE_CHECKING:
    from silo.config import SiloConfig

app = typer.Typer(no_args_is_help=True, help="One site: guard and trainer, approvals, what left and what was held.")
takes_version(app)
app.add_typer(cli_approvals.app, name="approvals")
cli_silo_messages.add_to(app)
app.command("round")(cli_curves.silo_round)
app.add_typer(cli_report.app, name="report")
cli_adapters.add_to(app)
cli_transfer.add_to_silo(app)
doctor.add_to(app, "silo")


# ---- set up ----------------------------------------------------------------------------------------


@app.command()
@guarded("silo init")
def init(
    name: Annotated[str, typer.Argument(help="The site's name.")],
    model: Annotated[Path, typer.Option("--model", help="Hugging Face model folder.")],
    private: Annotated[
        Path, typer.Option("--private", help="Private prompts: JSON lines, one JSON array, or Parquet.")
    ],
    public: Annotated[Path, typer.Option("--public", help="Public prompts, in the same forms.")],
    held_out: Annotated[Path, typer.Option("--held-out", help="Held-out prompts, in the same forms.")],
    verifier: Annotated[
        str, typer.Option("--verifier", help=f"How answers are graded: {VERIFIERS}, or one that a package brings.")
    ],
    federation: Annotated[Path, typer.Option("--federation", help="federation.json from `coordinator init`.")],
    ruleset: Annotated[str, typer.Option("--ruleset", help="pubswap, pubswap-strict, fedavg ...")] = "pubswap",
    public_verifier: Annotated[str, typer.Option("--public-verifier", help="Default: the same.")] = "",
    holdout_share: Annotated[
        float, typer.Option("--holdout-share", min=0.0, max=0.5, help="Private rows never trained on, to report on.")
    ] = 0.1,
    load: Annotated[
        str, typer.Option("--load", help="fp32, bf16, nf4 or fp8. Default: as the federation's bundle says.")
    ] = "",
    template: TemplateOption = "",
    fields: Annotated[
        list[str] | None,
        typer.Option(
            "--field",
            metavar="NAME=COLUMN",
            help="What the private file calls id, prompt, answer, topic or group, such as prompt=question; repeatable.",
        ),
    ] = None,
    rank: Annotated[int, typer.Option("--rank", help="LoRA rank.")] = 32,
    alpha: Annotated[float, typer.Option("--alpha", help="LoRA alpha.")] = 64.0,
    least_isolation: Annotated[
        str, typer.Option("--least-isolation", help="Least accepted isolation level.")
    ] = "namespaces",
    first_rounds: Annotated[int, typer.Option("--first-rounds", help="Rounds in which a person approves.")] = 1,
    silos_on_this_host: Annotated[
        int, typer.Option("--silos-on-this-host", min=1, help="They share the cores: torch threads follow from it.")
    ] = 1,
    rounds: RoundsOption = None,
    local_steps: LocalStepsOption = None,
    swap_period: SwapPeriodOption = None,
    prompts_per_step: PromptsOption = None,
    samples_per_prompt: SamplesOption = None,
    max_new_tokens: TokensOption = None,
    learning_rate: LearningRateOption = None,
    out: Annotated[Path, typer.Option("--out", help="Folder to write into.")] = Path(),
    person: PersonOption = [],  # noqa: B006  # typer reads the default, nobody changes it
    json_output: JsonOption = False,
) -> None:
    """Write the site's configuration, policy, LoRA schema and canaries. Keys come from `fedsilo certs`.

    The policy's limits follow from the size of plan that the federation's bundle states; the options from --rounds to
    --learning-rate put the site's own numbers in its place.
    """
    from fedsilo.demo.provision import people_of, take_from_bundle, write_roles
    from fedsilo.demo.sites import SiloFiles, write_silo_files
    from fedsilo.files.durable import undone_on_failure
    from fedsilo.files.prompt_template import choice_of
    from fedsilo.files.site_policy import read_bundle

    taken = [out / "id" / each for each in ("federation_ca.crt", "coordinator.pub", "roles.yaml")]
    written_here = ("silo.yaml", "policy.yaml", "charter.yaml", "lora_schema.json", "canaries.txt")
    with undone_on_failure(out, [*taken, *(out / each for each in written_here)]):
        take_from_bundle(out / "id", read_bundle(federation))
        if person:
            write_roles(out / "id", name, people_of(person))
        written = write_silo_files(
            SiloFiles(
                name=name,
                out=out,
                bundle=federation,
                model=model,
                private=private,
                verifier=verifier,
                public=public,
                public_verifier=public_verifier or verifier,
                held_out=held_out,
                holdout_share=holdout_share,
                ruleset=ruleset,
                load=load,
                template=choice_of(template),
                fields=_fields_of(fields or ()),
                rank=rank,
                alpha=alpha,
                least_isolation=least_isolation,
                first_rounds=first_rounds,
                silos_on_this_host=silos_on_this_host,
                limits=given(
                    rounds=rounds, local_steps=local_steps, swap_period=swap_period, prompts_per_step=prompts_per_step,
                    samples_per_prompt=samples_per_prompt, max_new_tokens=max_new_tokens, learning_rate=learning_rate,
                ),
            ),
            now_seconds=time.time(),
        )  # fmt: skip
    warnings = written.pop("warnings")
    config = written["config"]
    keys = "" if (out / "id" / f"{name}.key").exists() else f"fedsilo certs request --token TOKEN --out {out / 'id'}; "
    emit(
        "silo init",
        written,
        json_output=json_output,
        warnings=warnings,
        text=f"wrote {written['config']}, {written['policy']}, {written['schema']}, {written['canaries']}\n"
        f"{size_text(written['plan_size'])}\n"
        f"next: read the policy; plant canaries; {keys}silo check --config {config}; silo start --config {config}",
    )


def _fields_of(given_fields: Sequence[str]) -> dict[str, str]:
    """Raises UsageError: one is not NAME=COLUMN, or stands twice. Which names there are, the configuration says."""
    from fedsilo.protocol.errors import UsageError

    found: dict[str, str] = {}
    for each in given_fields:
        name, is_given, column = each.partition("=")
        if not is_given or not column or name in found:
            raise UsageError(
                f"--field {each!r} is not NAME=COLUMN, each name once", hint="as in --field prompt=question"
            )
        found[name] = column
    return found


@app.command()
@guarded("silo join")
def join(config: ConfigOption = CONFIG_DEFAULT, json_output: JsonOption = False) -> None:
    """Dial the coordinator once, judge its certificate and compare it with the policy's pins. Sends no message."""
    from datetime import UTC, datetime

    from fedsilo.protocol.errors import UsageError
    from silo.guard.checks import look_at_coordinator
    from silo.guard.site import load_site_parts

    read = load_site(config)
    if read.coordinator.by_files:
        raise UsageError(
            f"{read.source} says `address: files`: this silo dials nobody",
            hint="silo start, then silo export-release says hello",
        )
    site = load_site_parts(read, make_secret=False)
    fingerprint = look_at_coordinator(site, datetime.now(UTC))["certificate"]
    data = {
        "silo": site.config.silo,
        "coordinator": site.policy.file.federation.coordinator,
        "address": site.config.coordinator.address,
        "certificate": fingerprint,
        "key_pinned": True,
    }
    emit(
        "silo join", data, json_output=json_output,
        text=f"{data['address']} is {data['coordinator']}, certificate {fingerprint[:16]}, key as pinned; "
        f"`silo start` says hello",
    )  # fmt: skip


@app.command()
@guarded("silo check")
def check(
    config: ConfigOption = CONFIG_DEFAULT,
    offline: Annotated[bool, typer.Option("--offline", help="Do not dial the coordinator.")] = False,
    prompts: Annotated[
        int | None,
        typer.Option(
            "--prompts", min=0, max=20, help="Show so many private prompts. Default: 3 on a terminal, else 0."
        ),
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """Check files, keys, policy, data, model, isolation and the line to the coordinator; start and send nothing."""
    import copy

    from fedsilo.cli.silo_check_text import prompts_text
    from silo.guard.checks import as_fields, check_site

    # What is written to a file or to another program tends to be kept and sent on, so private prompts are not in it
    # unless somebody says so.
    shown = prompts if prompts is not None else 3 * (sys.stdout.isatty() and not json_output)
    results, look, errors = check_site(
        load_site(config), reach_coordinator=not offline, read_prompts=True, show_prompts=shown
    )
    error = copy.copy(errors[0]) if errors else None
    if error is not None:
        # The first fault decides code and exit status, as it would at `silo start`; its words stand in the table.
        failed = ", ".join(result["check"] for result in results if result["ok"] is False)
        untried = sum(result["ok"] is None for result in results)
        more = f", {untried} not tried" if untried else ""
        error.message = f"{len(errors)} of {len(results)} checks failed{more}: {failed}"
    words = {True: "ok", False: "FAILED", None: "-"}
    rows = [(words[result["ok"]], result["check"], result["found"]) for result in results]
    lengths = None if look.preview is None else as_fields(look.preview, with_prompts=bool(shown))
    data = {"checks": results, "data": lengths}
    emit(
        "silo check", data, json_output=json_output, warnings=look.warnings, error=error,
        text=lambda: table(("", "check", "found"), rows) + ("" if look.preview is None else prompts_text(look.preview)),
    )  # fmt: skip


@app.command()
@guarded("silo start")
def start(
    config: ConfigOption = CONFIG_DEFAULT,
    quiet: Annotated[bool, typer.Option("--quiet", help="Log to the file in state_dir only.")] = False,
    json_output: JsonOption = False,
) -> None:
    """Run guard and trainer in the foreground until Ctrl-C, SIGTERM or `silo stop`."""
    # gRPC's own lines on stderr would stand beside ours, which name the cause; it reads this when it loads.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from fedsilo.cli.own_names import refuse_foreign_names
    from fedsilo.files.extras import need
    from fedsilo.files.long_lived import one_thread_for_sums

    one_thread_for_sums(os.environ)
    refuse_foreign_names()
    from fedsilo.cli.silo_text import private_text
    from silo.guard.main import prepare_logging, serve
    from silo.guard.site import thread_warning

    loaded = load_site(config)
    if loaded.trainer.launch == "child":
        need("torch", "transformers")  # before anything is opened or dialled
    prepare_logging(loaded, to_stderr=not quiet)
    warning = thread_warning(loaded)

    def ready(facts: Mapping[str, Any]) -> None:
        emit(
            "silo start", dict(facts), json_output=json_output, warnings=[warning] if warning else [],
            text=f"ready: {facts['silo']} of {facts['federation']}, trainer {facts['isolation']}, policy "
            f"{facts['policy']['name']} {facts['policy']['digest'][:12]}, control {facts['control_socket']}, private "
            f"{private_text(facts['private'])}",
        )  # fmt: skip

    serve(loaded, ready=ready)


# ---- look ------------------------------------------------------------------------------------------


@app.command()
@guarded("silo status")
def status(
    config: Annotated[
        Path | None,
        typer.Option("--config", help="silo.yaml. Default: the one here, else the current context, if it is a silo."),
    ] = None,
    context: ContextOption = "",
    json_output: JsonOption = False,
) -> None:
    """What the silo does now, what waits for persons, what left."""
    from fedsilo.cli.silo_text import status_text

    chosen = context_daemon("silo", context, config, here=CONFIG_DEFAULT)
    with chosen.connect() if chosen is not None else client_of(load_site(config or CONFIG_DEFAULT)) as client:
        snapshot = client.snapshot()
    state = {**snapshot.state, "time": snapshot.time}
    file = config if chosen is None else chosen.config
    reached_by = f" --config {shlex.quote(str(file))}" if file is not None else ""
    if chosen is not None and file is None:
        reached_by = f", in the folder of {chosen.site}'s silo.yaml"
    emit("silo status", state, json_output=json_output, text=lambda: status_text(state, reached_by=reached_by))


@app.command()
@guarded("silo logs")
def logs(
    config: ConfigOption = CONFIG_DEFAULT,
    lines: Annotated[int, typer.Option("--lines", min=1, help="Last so many.")] = 50,
    trainer: Annotated[bool, typer.Option("--trainer", help="The trainer's log in place of the guard's.")] = False,
    json_output: JsonOption = False,
) -> None:
    """The end of the guard's or trainer's log. Logs stay at the site; nothing uploads them."""
    from fedsilo.protocol.errors import NotFoundError

    path = load_site(config).state_dir / "logs" / ("trainer.log" if trainer else "guard.log")
    if not path.is_file():
        raise NotFoundError(f"{path} does not exist", hint="the silo has not been started yet")
    shown = path.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:]
    emit("silo logs", {"path": str(path), "lines": shown}, json_output=json_output, text="\n".join(shown))


# ---- change ----------------------------------------------------------------------------------------


@app.command()
@guarded("silo pause")
def pause(
    operator: OperatorOption, config: ConfigOption = CONFIG_DEFAULT, request_id: RequestOption = "",
    json_output: JsonOption = False,
) -> None:  # fmt: skip
    """Finish the step at hand and begin no other until `silo resume`."""
    data = command(load_site(config), operator, "pause", {}, request_id)
    text = f"paused: the trainer begins no further step{recorded(data)}"
    warnings = [] if "record" in data else ["this silo is halted, so the order is not in its audit log: silo status"]
    if data.get("until_restart"):
        warnings.append("nor could it be kept: it ends with the guard")
    emit("silo pause", data, json_output=json_output, text=text, warnings=warnings)


@app.command()
@guarded("silo resume")
def resume(
    operator: OperatorOption, config: ConfigOption = CONFIG_DEFAULT, request_id: RequestOption = "",
    accept_clock: Annotated[
        bool,
        typer.Option("--accept-clock", help="Go on after a clock that was wrong: it counts as it is now (approvers)."),
    ] = False,
    expect_digest: Annotated[
        str, typer.Option("--expect-digest", help="Of the clock's halt, as you were shown it; with --accept-clock.")
    ] = "",
    json_output: JsonOption = False,
) -> None:  # fmt: skip
    """Go on after `silo pause`, or after a clock that was found wrong.

    Set the clock right before it is accepted: no later time that this site has seen is compared with after that.
    """
    site = load_site(config)
    if expect_digest and not accept_clock:
        raise UsageError("--expect-digest is of a clock's halt", hint="give --accept-clock too")
    if accept_clock:
        digest = expect_digest.removeprefix("sha256:") or _clock_halt_shown(site, json_output=json_output)
        data = command(site, operator, "clock.accept", {"halt": digest}, request_id)
        now, released = (
            time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(data[name])) for name in ("accepted", "released")
        )
        text = f"the clock counts as it is now, {now}; {released} is released and compared with no more{recorded(data)}"
        emit("silo resume", data, json_output=json_output, text=text)
        return
    data = command(site, operator, "resume", {}, request_id)
    emit("silo resume", data, json_output=json_output, text=f"resumed{recorded(data)}")


def _clock_halt_shown(site: SiloConfig, *, json_output: bool) -> str:
    """The digest of the clock's halt, once it was shown and typed back. Raises NotFoundError: there is none."""
    with client_of(site) as client:
        halt = (client.snapshot().state.get("clock") or {}).get("halt")
    if not halt:
        raise NotFoundError("nothing is halted for its clock here", hint="`silo status` shows what is")
    digest = str(halt["digest"])
    hint = "`silo status --json` names it: data.clock.halt.digest"
    confirm(digest, "", f"{halt['message']}\n{clock_now()}", hint=hint, json_output=json_output)
    return digest


@app.command()
@guarded("silo leave")
def leave(
    operator: OperatorOption,
    run: Annotated[str, typer.Option("--run", help="Name of the run, as `silo status` shows it.")],
    config: ConfigOption = CONFIG_DEFAULT, request_id: RequestOption = "", json_output: JsonOption = False,
) -> None:  # fmt: skip
    """Leave the open run for good, tell the coordinator, and stay in the federation. It cannot be undone.

    What is held or not sent yet never leaves; what was sent stays with the others. The next run asks anew.
    """
    data = command(load_site(config), operator, "leave", {"run": run}, request_id)
    text = f"left run {run} for good; the coordinator is told{recorded(data)}"
    emit("silo leave", data, json_output=json_output, text=text)


@app.command("reload")
@guarded("silo reload")
def reload_(
    operator: OperatorOption, config: ConfigOption = CONFIG_DEFAULT, request_id: RequestOption = "",
    json_output: JsonOption = False,
) -> None:  # fmt: skip
    """Read policy and charter again and put them in force, if nothing in them is looser; else the old ones stay."""
    data = command(load_site(config), operator, "policy.reload", {}, request_id)
    fields = f": {', '.join(data['fields'])}" if data["fields"] else ""
    emit(
        "silo reload", data, json_output=json_output,
        text=f"policy {data['policy']} is in force, {data['change']}{fields}{recorded(data)}",
        warnings=[f"the silo ends: {data['ends']}"] if data["ends"] else [],
    )  # fmt: skip


@app.command()
@guarded("silo stop")
def stop(
    operator: OperatorOption, config: ConfigOption = CONFIG_DEFAULT, request_id: RequestOption = "",
    timeout: TimeoutOption = 30.0, json_output: JsonOption = False,
) -> None:  # fmt: skip
    """End guard and trainer, and wait for it. The open round goes on without this silo."""
    from fedsilo.demo.processes import wait_for_end

    site = load_site(config)
    data = command(site, operator, "stop", {}, request_id)
    lock = site.state_dir / "lock"
    # Who may command the daemon need not be a user of this machine who may see its files.
    seen = os.access(lock, os.W_OK)
    if seen:
        wait_for_end(lock, timeout)
    emit(
        "silo stop", data, json_output=json_output, text=("stopped" if seen else "stopping") + recorded(data),
        warnings=[] if seen else [f"{lock} is not yours to look at, so its end was not waited for"],
    )  # fmt: skip
