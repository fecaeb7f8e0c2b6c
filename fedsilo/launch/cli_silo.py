"""`silo`: set up, check, run and steer one site. Reading goes to the daemon's control socket; every change is a command
signed with a person's key (`--operator`), so an approval names somebody."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedsilo.launch import cli_report
from fedsilo.launch.output import JsonOption, PersonOption, emit, guarded, table

if TYPE_CHECKING:
    from console.client import ControlClient
    from silo.config import SiloConfig

app = typer.Typer(no_args_is_help=True, help="One site: guard and trainer, approvals, what left and what was held.")
approvals_app = typer.Typer(no_args_is_help=True, help="Releases that wait for persons.")
outbox_app = typer.Typer(no_args_is_help=True, help="Every outbound message and the rules that judged it.")
ledger_app = typer.Typer(no_args_is_help=True, help="What the guard remembers: runs, budgets, outgoing content.")
app.add_typer(approvals_app, name="approvals")
app.add_typer(outbox_app, name="outbox")
app.add_typer(ledger_app, name="ledger")
app.add_typer(cli_report.app, name="report")

ConfigOption = Annotated[Path, typer.Option("--config", help="The site's configuration file.")]
OperatorOption = Annotated[
    str, typer.Option("--operator", help="Who signs: id/NAME.crt and id/NAME.key beside the site's own certificate.")
]
RequestOption = Annotated[
    str, typer.Option("--request-id", help="Give the same again to repeat a request without doing it twice.")
]
_CONFIG_DEFAULT = Path("silo.yaml")


# ---- set up ----------------------------------------------------------------------------------------


@app.command()
@guarded("silo init")
def init(
    name: Annotated[str, typer.Argument(help="The site's name.")],
    model: Annotated[Path, typer.Option("--model", help="Hugging Face model folder.")],
    private: Annotated[Path, typer.Option("--private", help="Private prompts, JSONL.")],
    public: Annotated[Path, typer.Option("--public", help="Public prompts, JSONL.")],
    held_out: Annotated[Path, typer.Option("--held-out", help="Held-out prompts, JSONL.")],
    verifier: Annotated[str, typer.Option("--verifier", help="How answers are graded.")],
    federation: Annotated[Path, typer.Option("--federation", help="federation.json from `coordinator init`.")],
    ruleset: Annotated[str, typer.Option("--ruleset", help="pubswap, pubswap-random or deny_all.")] = "pubswap",
    public_verifier: Annotated[str, typer.Option("--public-verifier", help="Default: the same.")] = "",
    holdout_share: Annotated[
        float, typer.Option("--holdout-share", min=0.0, max=0.5, help="Private rows never trained on, to report on.")
    ] = 0.1,
    load: Annotated[str, typer.Option("--load", help="fp32, bf16, nf4 or fp8.")] = "fp32",
    rank: Annotated[int, typer.Option("--rank", help="LoRA rank.")] = 32,
    alpha: Annotated[float, typer.Option("--alpha", help="LoRA alpha.")] = 64.0,
    least_isolation: Annotated[str, typer.Option("--least-isolation", help="Least accepted rung.")] = "namespaces",
    first_rounds: Annotated[int, typer.Option("--first-rounds", help="Rounds in which a person approves.")] = 1,
    silos_on_this_host: Annotated[
        int, typer.Option("--silos-on-this-host", min=1, help="They share the cores: torch threads follow from it.")
    ] = 1,
    out: Annotated[Path, typer.Option("--out", help="Folder to write into.")] = Path(),
    person: PersonOption = [],  # noqa: B006  # typer reads the default, nobody changes it
    json_output: JsonOption = False,
) -> None:
    """Write the site's configuration, policy and LoRA schema from its own files. Keys come from `fedsilo certs`."""
    from fedsilo.edge.site_policy import read_bundle
    from fedsilo.launch.provision import people_of, take_from_bundle, write_roles
    from fedsilo.launch.silo_files import SiloFiles, write_silo_files

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
            rank=rank,
            alpha=alpha,
            least_isolation=least_isolation,
            first_rounds=first_rounds,
            silos_on_this_host=silos_on_this_host,
        ),
        now_seconds=time.time(),
    )
    config = written["config"]
    keys = "" if (out / "id" / f"{name}.key").exists() else f"fedsilo certs request --token TOKEN --out {out / 'id'}; "
    emit(
        "silo init",
        written,
        json_output=json_output,
        text=f"wrote {written['config']}, {written['policy']}, {written['schema']}\n"
        f"next: read the policy; {keys}silo check --config {config}; silo start --config {config}",
    )


@app.command()
@guarded("silo join")
def join(config: ConfigOption = _CONFIG_DEFAULT, json_output: JsonOption = False) -> None:
    """Dial the coordinator once, judge its certificate and compare it with the policy's pins. Sends no message."""
    from datetime import UTC, datetime

    from silo.guard.preflight import check_coordinator
    from silo.guard.startup import load_site_parts

    site = load_site_parts(_load(config), make_secret=False)
    fingerprint = check_coordinator(site, datetime.now(UTC))
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
    config: ConfigOption = _CONFIG_DEFAULT,
    offline: Annotated[bool, typer.Option("--offline", help="Do not dial the coordinator.")] = False,
    json_output: JsonOption = False,
) -> None:
    """Try everything that `silo start` needs, without starting or sending anything."""
    from fedsilo.treaty.errors import OperationError
    from silo.guard.preflight import preflight

    results, warnings = preflight(_load(config), reach_coordinator=not offline)
    failed = [result for result in results if not result["ok"]]
    error = None
    if failed:
        error = OperationError(
            f"{len(failed)} of {len(results)} checks failed: {failed[0]['check']}: {failed[0]['found']}",
            hint=failed[0]["hint"],
            code=failed[0].get("code", "CHECK_FAILED"),
        )
    rows = [("ok" if result["ok"] else "FAILED", result["check"], result["found"]) for result in results]
    emit(
        "silo check", {"checks": results}, json_output=json_output, text=lambda: table(("", "check", "found"), rows),
        warnings=warnings, error=error,
    )  # fmt: skip


@app.command()
@guarded("silo start")
def start(
    config: ConfigOption = _CONFIG_DEFAULT,
    quiet: Annotated[bool, typer.Option("--quiet", help="Log to the file in state_dir only.")] = False,
    json_output: JsonOption = False,
) -> None:
    """Run guard and trainer in the foreground until Ctrl-C, SIGTERM or `silo stop`."""
    # gRPC's own lines on stderr would stand beside ours, which name the cause; it reads this when it loads.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from fedsilo.launch.own_names import refuse_foreign_names

    refuse_foreign_names()
    from fedsilo.launch.silo_text import private_text
    from silo.guard.service import prepare_logging, serve
    from silo.guard.startup import thread_warning

    loaded = _load(config)
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
def status(config: ConfigOption = _CONFIG_DEFAULT, json_output: JsonOption = False) -> None:
    """What the silo does now, what waits for persons, what left."""
    from fedsilo.launch.silo_text import status_text

    with _client(_load(config)) as client:
        snapshot = client.snapshot()
    state = {**snapshot.state, "time": snapshot.time}
    emit("silo status", state, json_output=json_output, text=lambda: status_text(state))


@approvals_app.command("list")
@guarded("silo approvals list")
def approvals_list(
    config: ConfigOption = _CONFIG_DEFAULT,
    everything: Annotated[bool, typer.Option("--all", help="Settled ones too.")] = False,
    json_output: JsonOption = False,
) -> None:
    """Releases that wait for persons."""
    with _client(_load(config)) as client:
        data = client.query("approvals", {} if everything else {"state": "held"})
    rows = [
        (
            row["id"],
            row["kind"],
            row["bytes"],
            row["state"],
            f"{len(row['given'])} of {row['needed']}",
            row["digest"][:12],
        )
        for row in data["releases"]
    ]
    header = ("release", "kind", "bytes", "state", "approvals", "sha256")
    emit(
        "silo approvals list", data, json_output=json_output,
        text=lambda: table(header, rows) if rows else "nothing is held",
    )  # fmt: skip


@approvals_app.command("show")
@guarded("silo approvals show")
def approvals_show(
    release: Annotated[str, typer.Argument(help="Such as r1/hospital_a/0.")],
    config: ConfigOption = _CONFIG_DEFAULT,
    json_output: JsonOption = False,
) -> None:
    """Every fact a person needs before answering; never the content itself."""
    with _client(_load(config)) as client:
        data = client.query("approval", {"release": release})
    emit("silo approvals show", data, json_output=json_output, text=lambda: _release_text(data))


def _release_text(data: Mapping[str, Any]) -> str:
    leaves, policy = data["leaves"], data["policy"]
    counts = " ".join(f"{count} {name}" for name, count in policy["counts"].items())
    lines = [
        f"release {data['id']}  sha256:{data['digest']}  {data['state']}, revision {data['revision']}",
        f"asked by {data['asked_by']}; expires {_utc(data['expires_at'])}",
        f"approvals {len(data['approvers']['given'])} of {data['approvers']['needed']}, by "
        f"{' or '.join(data['approvers']['roles'])}",
        f"leaves {leaves['bytes']} bytes to {leaves['destination'].get('address')} "
        f"(certificate {str(leaves['destination'].get('certificate', 'not seen yet'))[:16]})",
        *(_kind_line(row) for row in leaves["kinds"]),
        f"stays {', '.join(leaves['stays'])}",
        f"policy {policy['name']} {policy['digest']}: {counts}",
        *(_rule_line(rule) for rule in policy["rules"]),
        f"budget {data['budget']}",
        f"findings {data['findings']}",
        f"difference {data['difference']}",
        f"approve: {data['consequences']['approve']}",
        f"reject: {data['consequences']['reject']}",
    ]  # fmt: skip
    return "\n".join(lines)


def _kind_line(row: Mapping[str, Any]) -> str:
    return f"  {row['kind']}: {row['items']}, {row['bytes']} bytes, epsilon covers it: {row['covered_by_epsilon']}"


def _rule_line(rule: Mapping[str, Any]) -> str:
    return f"  {rule['outcome']:5} {rule['rule']}: {rule['measured']} (limit {rule['limit']})"


@outbox_app.command("list")
@guarded("silo outbox list")
def outbox_list(
    config: ConfigOption = _CONFIG_DEFAULT,
    limit: Annotated[int, typer.Option("--limit", help="Newest so many.")] = 100,
    control: Annotated[bool, typer.Option("--control", help="Polls and heartbeats too.")] = False,
    json_output: JsonOption = False,
) -> None:
    """Outbound messages, what was decided on each, and whether it left."""
    with _client(_load(config)) as client:
        data = client.query("outbox", {"limit": limit, "control": control})
    header = ("seq", "time", "kind", "round", "bytes", "verdict", "outcome", "deciding rule")
    rows = [
        (
            *(row[name] for name in ("seq", "time", "kind", "round", "bytes", "verdict", "outcome")),
            " ".join(row["rules"]),
        )
        for row in data["messages"]
    ]
    emit("silo outbox list", data, json_output=json_output, text=lambda: table(header, rows))


@outbox_app.command("show")
@guarded("silo outbox show")
def outbox_show(
    seq: Annotated[int, typer.Argument(help="Number of the decision, from `silo outbox list`.")],
    config: ConfigOption = _CONFIG_DEFAULT,
    json_output: JsonOption = False,
) -> None:
    """One decision with every rule's verdict."""
    with _client(_load(config)) as client:
        data = client.query("outbox", {"seq": seq})
    message = data["message"]
    rows = [
        (rule["outcome"], rule["rule"], rule.get("measured"), rule.get("limit"), rule.get("line"))
        for rule in message["rules"]
    ]
    emit(
        "silo outbox show", data, json_output=json_output,
        text=lambda: f"{message['kind']} {message['decision']} {' '.join(message['reasons'])}\n"
        + table(("outcome", "rule", "measured", "limit", "line"), rows),
    )  # fmt: skip


@ledger_app.command("show")
@guarded("silo ledger show")
def ledger_show(config: ConfigOption = _CONFIG_DEFAULT, json_output: JsonOption = False) -> None:
    """Runs, budget counts and outgoing content, as remembered over restarts."""
    with _client(_load(config)) as client:
        data = client.query("ledger")
    rows = [(row["kind"], row["run"], row["round"], row["bytes"], row["state"], row["at"]) for row in data["content"]]
    emit(
        "silo ledger show", data, json_output=json_output,
        text=lambda: f"DP {data['dp']}\n" + table(("kind", "run", "round", "bytes", "state", "at"), rows),
    )  # fmt: skip


@app.command()
@guarded("silo logs")
def logs(
    config: ConfigOption = _CONFIG_DEFAULT,
    lines: Annotated[int, typer.Option("--lines", help="Last so many.")] = 50,
    trainer: Annotated[bool, typer.Option("--trainer", help="The trainer's log in place of the guard's.")] = False,
    json_output: JsonOption = False,
) -> None:
    """The end of the guard's or trainer's log. Logs stay at the site; nothing uploads them."""
    from fedsilo.treaty.errors import NotFoundError

    path = _load(config).state_dir / "logs" / ("trainer.log" if trainer else "guard.log")
    if not path.is_file():
        raise NotFoundError(f"{path} does not exist", hint="the silo has not been started yet")
    shown = path.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:]
    emit("silo logs", {"path": str(path), "lines": shown}, json_output=json_output, text="\n".join(shown))


# ---- change ----------------------------------------------------------------------------------------


@approvals_app.command("approve")
@guarded("silo approvals approve")
def approve(
    release: Annotated[str, typer.Argument(help="Such as r1/hospital_a/0.")],
    operator: OperatorOption,
    expect_digest: Annotated[str, typer.Option("--expect-digest", help="SHA-256 that you were shown.")] = "",
    expect_policy: Annotated[str, typer.Option("--expect-policy", help="Policy digest that you were shown.")] = "",
    request_id: RequestOption = "",
    config: ConfigOption = _CONFIG_DEFAULT,
    json_output: JsonOption = False,
) -> None:
    """Approve exactly these bytes under this policy. On a terminal the digest may be typed after reading the facts."""
    loaded = _load(config)
    arguments = _shown(loaded, release, expect_digest, expect_policy)
    data = _command(loaded, operator, "approvals.approve", arguments, request_id)
    emit(
        "silo approvals approve", data, json_output=json_output,
        text=f"{data['release']}: {data['state']}, {len(data['given'])} of {data['needed']} approvals",
    )  # fmt: skip


@approvals_app.command("reject")
@guarded("silo approvals reject")
def reject(
    release: Annotated[str, typer.Argument(help="Such as r1/hospital_a/0.")],
    operator: OperatorOption,
    reason_code: Annotated[str, typer.Option("--reason", help="CONTENT, TIMING, POLICY, UNEXPECTED or OTHER.")],
    text: Annotated[str, typer.Option("--text", help="For this site's log only; never sent.")] = "",
    expect_digest: Annotated[str, typer.Option("--expect-digest", help="SHA-256 that you were shown.")] = "",
    expect_policy: Annotated[str, typer.Option("--expect-policy", help="Policy digest that you were shown.")] = "",
    request_id: RequestOption = "",
    config: ConfigOption = _CONFIG_DEFAULT,
    json_output: JsonOption = False,
) -> None:
    """Say no. The coordinator learns only that this silo declined."""
    loaded = _load(config)
    arguments = _shown(loaded, release, expect_digest, expect_policy) | {"reason_code": reason_code, "reason": text}
    data = _command(loaded, operator, "approvals.reject", arguments, request_id)
    emit("silo approvals reject", data, json_output=json_output, text=f"{data['release']}: rejected")


def _shown(config: SiloConfig, release: str, digest: str, policy: str) -> dict[str, Any]:
    """Digests for a signed answer: as given, or, on a terminal, of what is shown now and typed back."""
    from fedsilo.treaty.errors import UsageError

    if digest and policy:
        return {
            "release": release,
            "digest": digest.removeprefix("sha256:"),
            "policy_digest": policy.removeprefix("sha256:"),
        }
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError(
            "without a terminal an answer needs --expect-digest and --expect-policy",
            hint=f"silo approvals show {release} --json names both",
        )
    with _client(config) as client:
        data = client.query("approval", {"release": release})
    typer.echo(_release_text(data))
    typed = typer.prompt("last 4 characters of the release's sha256").strip().lower()
    if typed != data["digest"][-4:]:
        raise UsageError("that is not the digest that was shown", hint="nothing was changed")
    return {
        "release": release,
        "digest": data["digest"],
        "policy_digest": data["policy"]["digest"],
        "revision": data["revision"],
    }


@app.command()
@guarded("silo pause")
def pause(
    operator: OperatorOption, config: ConfigOption = _CONFIG_DEFAULT, request_id: RequestOption = "",
    json_output: JsonOption = False,
) -> None:  # fmt: skip
    """Finish the step at hand and begin no other until `silo resume`."""
    data = _command(_load(config), operator, "pause", {}, request_id)
    emit("silo pause", data, json_output=json_output, text="paused: the trainer begins no further step")


@app.command()
@guarded("silo resume")
def resume(
    operator: OperatorOption, config: ConfigOption = _CONFIG_DEFAULT, request_id: RequestOption = "",
    json_output: JsonOption = False,
) -> None:  # fmt: skip
    """Go on after `silo pause`."""
    data = _command(_load(config), operator, "resume", {}, request_id)
    emit("silo resume", data, json_output=json_output, text="resumed")


@app.command()
@guarded("silo stop")
def stop(
    operator: OperatorOption, config: ConfigOption = _CONFIG_DEFAULT, request_id: RequestOption = "",
    json_output: JsonOption = False,
) -> None:  # fmt: skip
    """End guard and trainer. The open round goes on without this silo."""
    data = _command(_load(config), operator, "stop", {}, request_id)
    emit("silo stop", data, json_output=json_output, text="stopping")


# ---- plumbing --------------------------------------------------------------------------------------


def _load(path: Path) -> SiloConfig:
    from silo.config import load_config

    return load_config(path)


def _client(config: SiloConfig) -> ControlClient:
    from console.client import ControlClient

    return ControlClient(config.control.socket)


def _command(config: SiloConfig, operator: str, name: str, arguments: Mapping[str, Any], request_id: str) -> Any:
    from console.client import Operator, sign_as

    folder = config.identity.certificate.parent
    person = Operator(config.silo, folder / f"{operator}.crt", folder / f"{operator}.key")
    command = sign_as(person, name, arguments, request_id=request_id)
    with _client(config) as client:
        return client.execute(command)


def _utc(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
