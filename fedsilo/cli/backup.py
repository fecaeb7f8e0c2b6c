"""`coordinator backup` and `restore`: a copy of all that a coordinator keeps, and a second machine from it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedsilo.cli.coordinator_messages import CONFIG_DEFAULT, ConfigOption
from fedsilo.cli.output import JsonOption, emit, guarded

if TYPE_CHECKING:
    from coordinator.backup import Kept
    from coordinator.config import CoordinatorConfig


def add_to(app: typer.Typer) -> None:
    """Make these commands part of `coordinator`."""
    app.command()(backup)
    app.command()(restore)


@guarded("coordinator backup")
def backup(
    out: Annotated[Path, typer.Option("--out", help="New folder; it holds what silos sent, so keep it as state_dir.")],
    config: ConfigOption = CONFIG_DEFAULT,
    with_keys: Annotated[
        bool, typer.Option("--with-keys", help="The private keys too: who has the backup is then the coordinator.")
    ] = False,
    json_output: JsonOption = False,
) -> None:
    """Copy database, audit log, payloads, results and files into a folder, signed; the coordinator may run meanwhile.

    Run it as the user of the coordinator. Only the backup of a coordinator that has ended can take over from it.
    """
    from datetime import UTC, datetime

    from certs.encoding import load_signing_key
    from coordinator.backup import make_backup, put_into
    from coordinator.config import load_config
    from fedsilo.files.durable import read_private

    loaded = load_config(config)
    key = load_signing_key(read_private(loaded.identity.signing_key))
    left_out: list[str] = []
    manifest = make_backup(
        _kept(loaded), key, out, now=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        also=lambda folder: left_out.extend(put_into(folder, loaded, with_keys=with_keys)),
    )  # fmt: skip
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
        "folder": str(out), "running": manifest["running"], "log_size": manifest["log"]["size"],
        "log_root": manifest["log"]["root"], "files": len(manifest["files"]), "bytes": size, "with_keys": with_keys,
    }  # fmt: skip
    text = f"wrote {out}: {data['files']} files, {size} bytes, an audit log of {data['log_size']} records"
    text += "" if with_keys else "; no private key"
    emit("coordinator backup", data, json_output=json_output, text=text, warnings=[*warnings, *left_out])


@guarded("coordinator restore")
def restore(
    folder: Annotated[Path, typer.Argument(metavar="BACKUP", help="Folder that `coordinator backup` wrote.")],
    config: ConfigOption = CONFIG_DEFAULT,
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
    json_output: JsonOption = False,
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
        "state_dir": str(loaded.state_dir), "made_at": manifest["made_at"], "running": manifest["running"],
        "log_size": manifest["log"]["size"], "log_root": manifest["log"]["root"],
        "files": [str(path) for path in written], "missing": missing,
    }  # fmt: skip
    text = f"{loaded.state_dir} is as of {manifest['made_at']}, with an audit log of {data['log_size']} records\n"
    text += f"next: coordinator check --config {config}"
    emit("coordinator restore", data, json_output=json_output, text=text, warnings=warnings)


def _kept(config: CoordinatorConfig) -> Kept:
    from coordinator.backup import Kept

    return Kept(config.spiffe_id, config.state_dir, config.database_url, config.payloads)
