"""What keeping and checking an audit log costs: `python -m benchmarks.audit_log --json`.

    audit_append_median_seconds    one record of a decision with all its rules and facts, flushed to disk at return
    audit_verify_million_seconds   a log of 10^6 records as a running silo writes them (decision, outcome, and
                                   the decision on the answer), a checkpoint every 100 records, each countersigned by
                                   three witnesses; by the verifier that an auditor runs, in a process of its own

The records are those of a real gate. The long log repeats them with their own numbers, salts and links, since to decide
a million times would measure the gate. Beside them: a bare write and flush of as many bytes on the same disk, the
processor's time and the largest memory of the verifying process: on a busy machine its seconds are others' work, too.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedsilo.audit import audit_verify
from fedsilo.audit.checkpoint import Checkpoint, cosign, cosigner_key, log_key, sign_checkpoint
from fedsilo.audit.log import SEGMENT_BYTES_MAX, AuditLog
from fedsilo.audit.merkle import MerkleTree, leaf_hash
from fedsilo.audit.record import NO_PREVIOUS
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.place import Place
from tests.policies import setting
from tests.world import Bench

RECORDS = 1_000_000
CHECKPOINT_RECORDS = 100
APPENDS = 2000
APPEND_SECONDS_MAX = 0.001
VERIFY_SECONDS_MAX = 60.0
_WITNESSES = ("coordinator/main", "silo/hospital_b", "silo/hospital_c")
_VARYING = ("seq", "salt", "t", "mono")


def _append_seconds(folder: Path) -> list[float]:
    fields = {key: value for key, value in _records_of_a_message(folder / "gate")[0].items() if key in _decided()}
    key = Ed25519PrivateKey.generate()
    seconds = []
    with AuditLog(folder / "log", origin=setting.SILO, key=key, actor=setting.SILO) as log:
        for _ in range(APPENDS):
            begun = time.perf_counter()
            log.append("egress.decision", **fields)
            seconds.append(time.perf_counter() - begun)
    return seconds


def _decided() -> frozenset[str]:
    return frozenset(
        {"run", "round", "step", "attempt", "kind", "sequence", "peer", "direction", "decision", "reasons", "rules",
         "facts", "policy", "payload", "detail"}
    )  # fmt: skip


def _records_of_a_message(folder: Path) -> list[dict[str, Any]]:
    """Decision, outcome and the decision on the answer, as a gate records them."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    bench = Bench(folder, setting.policy_of(setting.policy_text()))
    try:
        bench.gate.send(Place("", 0, 0, "control.checkpoint"), pb.Checkpoint())
        records = list(bench.audit.records())
    finally:
        bench.close()
    assert [record["event"] for record in records] == ["egress.decision", "egress.sent", "ingress.decision"]
    return records


def _flush_median_seconds(folder: Path, size: int) -> float:
    """What the disk alone takes for a line of that many bytes."""
    descriptor = os.open(folder / "bare", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    seconds = []
    try:
        for _ in range(APPENDS):
            data = secrets.token_bytes(size)
            begun = time.perf_counter()
            os.write(descriptor, data)
            os.fdatasync(descriptor)
            seconds.append(time.perf_counter() - begun)
    finally:
        os.close(descriptor)
    return statistics.median(seconds)


def write_log(folder: Path, templates: list[dict[str, Any]], records: int) -> int:
    """A log of many records, complete with checkpoints and cosignatures; returns its bytes."""
    for name in ("", "keys", "checkpoints", "witnessed"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    key, domain = Ed25519PrivateKey.generate(), setting.SILO.partition("/silo/")[0]
    witnesses = [(f"{domain}/{name}", Ed25519PrivateKey.generate()) for name in _WITNESSES]
    for stem, name, one in [("log", setting.SILO, key), *((f"w{i}", *item) for i, item in enumerate(witnesses))]:
        public = one.public_key()
        text = f"{log_key(name, public).text}\n{cosigner_key(name, public).text}\n"
        (folder / "keys" / f"{stem}.vkey").write_text(text, encoding="utf-8")
    pieces = [_pieces(template) for template in templates]
    tree, previous, written, first, total = MerkleTree(), NO_PREVIOUS, 0, 0, 0
    stream = (folder / f"{first:012d}.jsonl").open("wb")
    for seq in range(records):
        if written >= SEGMENT_BYTES_MAX:
            stream.close()
            first, written = seq, 0
            stream = (folder / f"{first:012d}.jsonl").open("wb")
        line = _filled(pieces[seq % len(pieces)], seq, previous)
        leaf = leaf_hash(line)
        tree.append(leaf)
        stream.write(line + b"\n")
        previous = leaf.hex()
        written, total = written + len(line) + 1, total + len(line) + 1
        if (seq + 1) % CHECKPOINT_RECORDS == 0 or seq + 1 == records:
            note = sign_checkpoint(Checkpoint(setting.SILO, seq + 1, tree.root()), key)
            for name, one in witnesses:
                note = cosign(note, name, one, 1_800_000_000)
            (folder / "checkpoints" / f"{seq + 1:012d}.note").write_text(note, encoding="utf-8")
    stream.close()
    return total


def _pieces(template: dict[str, Any]) -> list[bytes]:
    """The canonical line of a record, cut where number, salt, times and link stand."""
    marked = {**template, **{name: f"@{name}@" for name in _VARYING}}
    marked["link"] = {**template["link"], "previous": "@previous@"}
    text = json.dumps(marked, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    for name in ("seq", "t", "mono"):
        text = text.replace(f'"@{name}@"', f"@{name}@")
    return text.encode().split(b"@")


def _filled(pieces: list[bytes], seq: int, previous: str) -> bytes:
    values = {
        b"seq": b"%d" % seq, b"salt": secrets.token_hex(16).encode(), b"previous": previous.encode(),
        b"t": b"%d" % (1_800_000_000_000 + seq), b"mono": b"%d" % seq,
    }  # fmt: skip
    return b"".join(values.get(piece, piece) for piece in pieces)


def _verify(folder: Path, records: int) -> dict[str, float]:
    size = write_log(folder / "log", _records_of_a_message(folder / "gate"), records)
    script = Path(audit_verify.__file__)
    begun, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-I", str(script), "--min-witnesses", "3", str(folder / "log")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds, used = time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0 and f"verified, {records} records" in done.stdout, done.stdout[-2000:]
    cpu = used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": seconds, "cpu_seconds": cpu, "log_bytes": size, "peak_bytes": used.ru_maxrss * 1024}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="accepted for symmetry; the output is always JSON")
    parser.add_argument("--records", type=int, default=RECORDS, help="of the long log")
    parser.add_argument("--dir", type=Path, help="a folder on the disk to measure; by default the temporary one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fedsilo-audit-", dir=options.dir) as name:
        folder = Path(name)
        appends = _append_seconds(folder / "append")
        line_bytes = (folder / "append" / "log" / "000000000000.jsonl").stat().st_size // APPENDS
        bare = _flush_median_seconds(folder, line_bytes)
        verified = _verify(folder / "million", options.records)
    figures = {
        "audit_append_median_seconds": round(statistics.median(appends), 6),
        "audit_append_95th_percentile_seconds": round(statistics.quantiles(appends, n=20)[-1], 6),
        "bare_flush_median_seconds": round(bare, 6),
        "audit_verify_million_seconds": round(verified["seconds"] * RECORDS / options.records, 2),
        "verify_million_cpu_seconds": round(verified["cpu_seconds"] * RECORDS / options.records, 2),
        "verify_peak_bytes": verified["peak_bytes"],
    }
    limits = {"audit_append_median_seconds": APPEND_SECONDS_MAX, "audit_verify_million_seconds": VERIFY_SECONDS_MAX}
    kept = {name: figures[name] <= limit for name, limit in limits.items()}
    conditions = {
        "cores": os.cpu_count(), "load_average": round(os.getloadavg()[0], 1), "appends": APPENDS,
        "append_bytes": line_bytes, "records": options.records,
        "log_bytes": verified["log_bytes"], "limits": limits, "kept": kept,
    }  # fmt: skip
    sys.stdout.write(json.dumps({"name": "audit_log", "figures": figures, "conditions": conditions}) + "\n")
    return 0 if all(kept.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
