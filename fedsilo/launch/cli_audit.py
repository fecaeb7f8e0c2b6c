"""`fedsilo audit`: check, read and hand out audit logs, offline and without the daemon."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedsilo.launch.output import JsonOption, emit, guarded, table

if TYPE_CHECKING:
    from fedsilo.treaty.audit.merkle import MerkleTree

app = typer.Typer(no_args_is_help=True, help="Check, read and hand out audit logs, offline.")

LogOption = Annotated[Path, typer.Option("--log", help="Folder of the audit log, or the state folder around it.")]


@app.command()
@guarded("audit verify")
def verify(
    logs: Annotated[list[Path], typer.Argument(metavar="LOG...", help="Log folders; given together they vouch.")],
    json_output: JsonOption = False,
) -> None:
    """Check logs alone and against each other. Exit status 7 if anything is wrong."""
    from fedsilo.edge.audit_verify import verify_logs
    from fedsilo.treaty.errors import VerificationError

    results = verify_logs([log_folder(log) for log in logs])
    failed = [result["log"] for result in results if not result["verified"]]
    error = (
        VerificationError(
            f"{len(failed)} of {len(results)} logs do not verify: {', '.join(failed)}",
            hint="compare with the other parties' logs: `fedsilo audit verify` with all of them together",
        )
        if failed
        else None
    )
    warnings = [
        f"{result['log']}: {result['unsigned']} newest records not signed yet"
        for result in results
        if result["unsigned"]
    ]
    emit(
        "audit verify",
        results,
        json_output=json_output,
        text=lambda: _verification_text(results),
        warnings=warnings,
        error=error,
    )


@app.command()
@guarded("audit show")
def show(
    seq: Annotated[int, typer.Argument(min=0, help="Number of the record.")],
    log: LogOption,
    json_output: JsonOption = False,
) -> None:
    """One record, in full."""
    record = _record(log_folder(log), seq)
    emit("audit show", record, json_output=json_output, text=lambda: json.dumps(record, indent=2, ensure_ascii=False))


@app.command()
@guarded("audit tail")
def tail(
    log: LogOption,
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, help="How many of the newest records.")] = 20,
    json_output: JsonOption = False,
) -> None:
    """The newest records, a line each."""
    from collections import deque

    from fedsilo.edge.audit_segments import read_records

    records = list(deque(read_records(log_folder(log)), maxlen=lines))
    emit("audit tail", records, json_output=json_output, text=lambda: _records_text(records))


@app.command()
@guarded("audit replay")
def replay(
    log: LogOption,
    policy: Annotated[Path, typer.Option("--policy", help="The policy to ask; a draft, or the one in force.")],
    since: Annotated[int, typer.Option("--since", min=0, help="First record to look at.")] = 0,
    json_output: JsonOption = False,
) -> None:
    """Judge every recorded message again by another policy and list the decisions that change."""
    from fedsilo.edge.audit_segments import read_records
    from fedsilo.edge.site_policy import read_policy
    from policies.replay import replay as decide_again

    judged = list(decide_again(read_records(log_folder(log), since), read_policy(policy)))
    changed = [row.to_json() for row in judged if row.changed]
    passed_over = [row.to_json() for row in judged if row.decision is None]
    data = {"decisions": len(judged), "changed": changed, "not_replayed": passed_over}
    emit("audit replay", data, json_output=json_output, text=lambda: _replay_text(data))


@app.command()
@guarded("audit prove")
def prove(
    seq: Annotated[int, typer.Argument(min=0, help="Number of the record.")],
    log: LogOption,
    json_output: JsonOption = False,
) -> None:
    """A record with the proof that it is in the log under a signed checkpoint; needs nothing else of the log."""
    folder = log_folder(log)
    data = _proof(folder, _tree(folder), seq)
    emit("audit prove", data, json_output=json_output, text=lambda: json.dumps(data, indent=2, ensure_ascii=False))


@app.command()
@guarded("audit export")
def export(
    log: LogOption,
    out: Annotated[Path, typer.Option("--out", help="New folder for records.jsonl and proofs.json.")],
    first: Annotated[int, typer.Option("--first", min=0, help="First record.")] = 0,
    last: Annotated[int | None, typer.Option("--last", min=0, help="Last record; by default the newest.")] = None,
    json_output: JsonOption = False,
) -> None:
    """A range of records with a proof for each that a signed checkpoint covers."""
    from fedsilo.edge.audit_segments import read_lines
    from fedsilo.edge.files import write_durably
    from fedsilo.treaty.errors import ConflictError, NotFoundError

    folder = log_folder(log)
    if out.exists():
        raise ConflictError(f"{out} exists already")
    lines = [(seq, line) for seq, line in read_lines(folder, first) if last is None or seq <= last]
    if not lines:
        raise NotFoundError(f"{folder} has no records in that range")
    tree = _tree(folder)
    note, size = _covering_note(folder, lines[-1][0]) or _covering_note(folder, lines[0][0], newest=True) or ("", 0)
    if size > tree.size:
        raise NotFoundError(f"{folder}: the newest checkpoint covers more records than there are; verify the log")
    proofs = [
        {"seq": seq, "inclusion": [part.hex() for part in tree.inclusion(seq, size)]} for seq, _ in lines if seq < size
    ]
    out.mkdir(parents=True)
    write_durably(out / "records.jsonl", b"".join(line + b"\n" for _, line in lines))
    bundle = {"note": note, "size": size, "keys": _keys(folder), "proofs": proofs}
    write_durably(out / "proofs.json", json.dumps(bundle, indent=1, ensure_ascii=False).encode() + b"\n")
    data = {"out": str(out), "records": len(lines), "proved": len(proofs), "checkpoint_size": size}
    emit(
        "audit export",
        data,
        json_output=json_output,
        text=f"{len(lines)} records, {len(proofs)} of them proved against the checkpoint at {size}, in {out}",
    )


def log_folder(path: Path) -> Path:
    """The log folder itself where the state folder around it was named."""
    inner = path / "audit"
    return inner if not (path / "keys" / "log.vkey").exists() and (inner / "keys" / "log.vkey").exists() else path


def _record(folder: Path, seq: int) -> dict[str, Any]:
    from fedsilo.edge.audit_segments import read_records
    from fedsilo.treaty.errors import NotFoundError

    record = next(read_records(folder, seq), None)
    if record is None:
        raise NotFoundError(f"{folder} has no record {seq}")
    return record


def _tree(folder: Path) -> MerkleTree:
    from fedsilo.edge.audit_segments import read_lines
    from fedsilo.treaty.audit.merkle import MerkleTree, leaf_hash

    tree = MerkleTree()
    for _, line in read_lines(folder):
        tree.append(leaf_hash(line))
    return tree


def _covering_note(folder: Path, seq: int, *, newest: bool = False) -> tuple[str, int] | None:
    """The (note, size) that covers record `seq`: the earliest with a cosignature if there is one, else the earliest."""
    paths = sorted(path for path in (folder / "checkpoints").glob("*.note") if int(path.stem) > seq)
    if not paths:
        return None
    from fedsilo.edge.audit_loading import read_note

    notes = [(read_note(path), int(path.stem)) for path in (paths[-1:] if newest else paths)]
    return next((item for item in notes if item[0].rpartition("\n\n")[2].count("\n") > 1), notes[0])


def _keys(folder: Path) -> list[str]:
    return [line for path in sorted((folder / "keys").glob("*.vkey")) for line in path.read_text("utf-8").splitlines()]


def _proof(folder: Path, tree: MerkleTree, seq: int) -> dict[str, Any]:
    from fedsilo.edge.audit_segments import read_lines
    from fedsilo.treaty.audit.checkpoint import open_checkpoint, parse_verifier_key
    from fedsilo.treaty.audit.merkle import verify_inclusion
    from fedsilo.treaty.errors import NotFoundError, VerificationError

    found = next(read_lines(folder, seq), None)
    if found is None:
        raise NotFoundError(f"{folder} has no record {seq}")
    covering = _covering_note(folder, seq)
    if covering is None:
        raise NotFoundError(f"no signed checkpoint covers record {seq} yet", hint="one is made every round and at stop")
    note, size = covering
    keys = _keys(folder)
    own = parse_verifier_key((folder / "keys" / "log.vkey").read_text(encoding="utf-8").splitlines()[0])
    checkpoint = open_checkpoint(note, own)
    proof = tree.inclusion(seq, size) if size <= tree.size else []
    if checkpoint.size != size or not verify_inclusion(tree.leaf(seq), seq, size, proof, checkpoint.root):
        raise VerificationError(f"{folder}: record {seq} is not what the checkpoint at {size} covers")
    return {
        "seq": seq,
        "record": found[1].decode(),
        "leaf": tree.leaf(seq).hex(),
        "size": size,
        "inclusion": [part.hex() for part in proof],
        "note": note,
        "keys": keys,
    }


def _verification_text(results: list[dict[str, Any]]) -> str:
    rows = [
        (
            result["log"],
            "verified" if result["verified"] else "NOT VERIFIED",
            result["size"],
            max(result["cosigned"].values(), default=0),
            result["key"][:16],
            result["path"],
        )
        for result in results
    ]
    problems = [f"{result['log']}: {problem}" for result in results for problem in result["problems"]]
    return "\n".join([table(("log", "result", "records", "countersigned to", "key", "path"), rows), *problems])


def _records_text(records: list[dict[str, Any]]) -> str:
    from datetime import UTC, datetime

    def row(record: dict[str, Any]) -> tuple[Any, ...]:
        when = datetime.fromtimestamp(record["t"] / 1000, UTC).isoformat(timespec="milliseconds")
        place = "/".join(str(record[name]) for name in ("run", "round", "step") if record.get(name))
        size = record.get("payload", {}).get("bytes", "")
        what = (record["seq"], when, record["event"], record.get("kind", ""), record.get("decision", ""))
        return (*what, size, place, ",".join(record.get("reasons", [])))

    return table(("seq", "time", "event", "kind", "decision", "bytes", "run/round/step", "reasons"), map(row, records))


def _replay_text(data: dict[str, Any]) -> str:
    rows = [
        [str(row["seq"]), row["kind"], f"{row['round']}.{row['step']}", row["recorded"], row["replayed"],
         ", ".join(row["reasons"] or row["recorded_reasons"])]
        for row in data["changed"]
    ]  # fmt: skip
    again = data["decisions"] - len(data["not_replayed"])
    lines = [f"{again} decisions judged again, {len(rows)} change"]
    if rows:
        lines.append(table(("record", "kind", "round.step", "was", "would be", "reasons"), rows))
    if data["not_replayed"]:
        lines.append(f"{len(data['not_replayed'])} cannot be judged from facts (--json lists them)")
    return "\n".join(lines)
