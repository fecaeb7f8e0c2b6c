"""Every parser of foreign bytes under a coverage-guided fuzzer: `python -m benchmarks.fuzz --json [--seconds 60]`.

    executions, executions_per_second   by target
    peak_rss_mib                        of the whole process, and rss_before_mib before the first input
    finding                             what it died of, or empty; the input lies under --keep

Each target is a process of its own under Atheris (libFuzzer): our modules, yaml and rfc8785 are instrumented while they
are imported, protobuf, pydantic, numpy and the safetensors format are reached through them. A target must answer, or
refuse in words of ours, within INPUT_SECONDS_MAX and RSS_MIB_MAX. Inputs start from good ones (`seeds`).
The suite has the same parsers under hypothesis (tests/security/test_X04_fuzz.py), for seconds instead of minutes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

SECONDS = 60
INPUT_BYTES_MAX = 16384
INPUT_SECONDS_MAX = 10
RSS_MIB_MAX = 1024
INSTRUMENTED = ["fedsilo", "policies", "silo", "yaml", "rfc8785"]
ROUTING: dict[str, Any] = {
    "seq": 0,
    "salt": bytes(16),
    "t": 1,
    "boot": "b",
    "mono": 1,
    "actor": "a",
    "event": "egress.decision",
}
INDEX_KEY = bytes(range(32))

Parse = Callable[[bytes], None]


def frames() -> tuple[Parse, list[bytes]]:
    """What a stream brings: frames, each behind two bytes of length; then the message that comes of them."""
    from google.protobuf.message import DecodeError

    from fedsilo.protocol import codec
    from fedsilo.protocol._generated import federation_pb2 as pb
    from fedsilo.protocol.kinds import INBOUND_KINDS, OUTBOUND_KINDS
    from silo.guard.channel import assemble
    from tests.policies.setting import responses_body

    kinds = {**OUTBOUND_KINDS, **INBOUND_KINDS}

    def parse(data: bytes) -> None:
        parts, place = [], 0
        while place < len(data):
            size = int.from_bytes(data[place : place + 2], "big")
            parts.append(data[place + 2 : place + 2 + size])
            place += 2 + size
        try:
            reply = assemble((codec.frame_of(part) for part in parts), 1 << 20)
        except DecodeError:
            return  # which gRPC's own layer answers, before our handler is asked
        codec.decode(kinds.get(reply.envelope.kind, pb.PublicResponses), reply.payload)

    payload = codec.encode(responses_body((1, ("12", "13")), (4, ())))
    seeds = []
    for kind in ("public.responses", "control.poll"):
        made = codec.frames(pb.Envelope(kind=kind), payload if kind == "public.responses" else b"")
        seeds.append(b"".join(len(part).to_bytes(2, "big") + part for part in map(codec.frame_bytes, made)))
    return parse, seeds


def factors() -> tuple[Parse, list[bytes]]:
    """Tensor payloads as they cross the wire, header and values, whole and tile by tile."""
    from fedsilo.protocol.codec import FactorsReader, InMemory, decode_factors, encode_factors
    from tests.policies.setting import SCHEMA, zeros

    def parse(data: bytes) -> None:
        decode_factors(data)
        reader = FactorsReader(InMemory(data), len(data))
        for place in reader.places:
            reader.tile(place, 0, min(4, place.elements))

    header: dict[str, Any] = {"base_digest": "ab" * 32, "schema_sha256": SCHEMA.digest, "rank": 2, "scale": 2.0}
    return parse, [encode_factors(zeros(), **header, dtype=dtype) for dtype in ("float32", "bfloat16")]


def model_folder() -> tuple[Parse, list[bytes]]:
    """The headers of safetensors files in a model folder, and the adapter's schema that follows from them."""
    import numpy as np
    from safetensors.numpy import save

    from fedsilo.files.model_folder import lora_schema_of

    folder = Path(tempfile.mkdtemp(prefix="fedsilo-fuzz-"))
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2", "hidden_size": 4}))
    weights = folder / "model.safetensors"

    def parse(data: bytes) -> None:
        weights.write_bytes(data)
        lora_schema_of(folder, 2, 4.0, "all-linear", base_model_sha256="0" * 64)

    name = "model.layers.0.self_attn.q_proj.weight"
    return parse, [save({name: np.zeros((3, 4), np.float32), "v": np.ones(2, np.float32)}), save({})]


def policy() -> tuple[Parse, list[bytes]]:
    """Policy files, strict YAML first."""
    from policies.load import load_policy
    from tests.policies.setting import policy_text

    return lambda data: void(load_policy(data, "policy.yaml")), [
        policy_text(name).encode() for name in ("pubswap", "deny_all")
    ]


def cases() -> tuple[Parse, list[bytes]]:
    """Case files of `fedsilo policy test`, and the messages that are made of them."""
    from fedsilo.protocol.errors import UsageError
    from policies.cases import judge, load_cases
    from policies.examples import Site
    from tests.policies.setting import SCHEMA, policy_of, policy_text

    site = Site(policy_of(policy_text()), SCHEMA)

    def parse(data: bytes) -> None:
        for case in load_cases(data, "cases.yaml"):
            try:
                list(judge([case], site))
            except UsageError:
                continue

    shipped = sorted((Path(__file__).parents[1] / "examples/policy_cases/pubswap").glob("*.yaml"))
    return parse, [part for file in shipped for part in _cases_of(file.read_text("utf-8"))]


def _cases_of(text: str) -> list[bytes]:
    """A case file as one file for each of its cases."""
    head, mark, rest = text.partition("cases:\n")
    bodies = re.split(r"^(?=  - )", rest, flags=re.MULTILINE)
    return [(head + mark + body).encode() for body in bodies if body.startswith("  - ")]


def checkpoint() -> tuple[Parse, list[bytes]]:
    """C2SP notes of audit logs: note, checkpoint, key line, signature."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from fedsilo.audit.checkpoint import (
        Checkpoint,
        log_key,
        open_checkpoint,
        parse_checkpoint,
        parse_note,
        parse_verifier_key,
        sign_checkpoint,
    )
    from fedsilo.protocol.errors import FedSiloError

    key = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
    verifier = log_key("hospital_a/log", key.public_key())

    def parse(data: bytes) -> None:
        text = data.decode("utf-8", "replace")
        readers: tuple[Callable[[str], Any], ...] = (
            parse_note,
            parse_checkpoint,
            parse_verifier_key,
            lambda note: open_checkpoint(note, verifier),
        )
        for read in readers:
            try:
                read(text)
            except FedSiloError:
                continue

    return parse, [sign_checkpoint(Checkpoint("hospital_a/log", 7, bytes(32)), key).encode()]


def canonical() -> tuple[Parse, list[bytes]]:
    """Canonical JSON (RFC 8785): what is written once is written so again, and every record written is read back."""
    from fedsilo.audit.record import NO_PREVIOUS, parse_record, record_line
    from fedsilo.protocol.codec import canonical_json
    from fedsilo.protocol.errors import FedSiloError
    from fedsilo.protocol.plan import plan_from_canonical
    from tests.policies.setting import PLAN

    def parse(data: bytes) -> None:
        text = data.decode("utf-8", "replace")
        for read in (lambda: plan_from_canonical(text), lambda: parse_record(data)):
            try:
                read()
            except FedSiloError:
                continue
        try:
            value = json.loads(text)
            once = canonical_json(value)
        except (ValueError, RecursionError):
            return  # no JSON, a number that JSON cannot carry, or nested deeper than Python reads
        if canonical_json(json.loads(once, parse_int=float)) != once:  # JSON's numbers are doubles
            raise AssertionError("canonical bytes are not canonical")
        try:
            written = record_line(
                **ROUTING, previous=NO_PREVIOUS, fields={"decision": "deny", "facts": {"final": value}}
            )
        except FedSiloError:
            return  # text or a form that no record holds
        parse_record(written)

    record = b'{"actor":"a","boot":"b","event":"start","link":{},"mono":1,"salt":"00","seq":0,"t":1,"v":1}'
    return parse, [PLAN.canonical().encode(), record, b'{"a":[1,2.5e-7,null,"\\u20ac"],"b":{}}']


def index() -> tuple[Parse, list[bytes]]:
    """Overlap indexes of the text screens: as they come, and with the digest that their own key would give."""
    from fedsilo.protocol.errors import FedSiloError
    from policies.screens.overlap import OverlapIndex, build_index

    file_key = hashlib.blake2b(key=INDEX_KEY, person=b"file", digest_size=32).digest()

    def parse(data: bytes) -> None:
        for each in (data, data + hashlib.blake2b(data, key=file_key, digest_size=32).digest()):
            try:
                OverlapIndex.from_bytes(each, key=INDEX_KEY)
            except FedSiloError:
                continue

    records = ["the patient came on a monday and left on a friday", "nothing was found and nothing was done about it"]
    made = build_index(records, key=INDEX_KEY, n=3, false_positive_rate=1e-6)
    return parse, [made, made[:-32], build_index([], key=INDEX_KEY, n=8, false_positive_rate=1e-3)[:-32]]


TARGETS: dict[str, Callable[[], tuple[Parse, list[bytes]]]] = {
    "frames": frames,
    "factors": factors,
    "model_folder": model_folder,
    "policy": policy,
    "cases": cases,
    "checkpoint": checkpoint,
    "canonical_json": canonical,
    "screening_index": index,
}


def void(_: object) -> None: ...


def work(target: str, seconds: int, folder: Path) -> None:
    """One target, in this process, which the fuzzer ends."""
    import atheris

    with atheris.instrument_imports(include=INSTRUMENTED):
        from fedsilo.protocol.errors import FedSiloError

        parse, seeds = TARGETS[target]()

    def one_input(data: bytes) -> None:
        try:
            parse(data)
        except FedSiloError:
            return

    corpus = folder / "corpus"
    corpus.mkdir()
    for number, seed in enumerate(seeds):
        one_input(seed)
        (corpus / f"seed{number}").write_bytes(seed)
    sys.stderr.write(f"rss_before_kib {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}\n")
    sys.stderr.flush()
    atheris.Setup(
        [
            "fuzz", str(corpus), f"-max_total_time={seconds}", f"-max_len={INPUT_BYTES_MAX}", "-print_final_stats=1",
            f"-timeout={INPUT_SECONDS_MAX}", f"-rss_limit_mb={RSS_MIB_MAX}", f"-artifact_prefix={folder}/found-",
            "-seed=1",
        ],
        one_input,
    )  # fmt: skip
    atheris.Fuzz()


def measured(target: str, seconds: int, keep: Path | None) -> dict[str, Any]:
    """Run a target in a process of its own and read what the fuzzer says of it."""
    with tempfile.TemporaryDirectory(prefix="fedsilo-fuzz-") as folder:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.fuzz", "--work", folder, "--target", target, "--seconds", str(seconds)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", check=False,
            env={**os.environ, "TMPDIR": folder},
        )  # fmt: skip
        inputs = sorted(Path(folder).glob("found-*"))
        if keep is not None and inputs:
            keep.mkdir(parents=True, exist_ok=True)
            for path in inputs:
                (keep / f"{target}-{path.name}").write_bytes(path.read_bytes())
        found = [path.read_bytes()[:200].hex() for path in inputs]

    def figure(pattern: str) -> int:
        seen = re.search(pattern, done.stdout)
        return int(seen[1]) if seen else 0

    finding = ""
    if done.returncode or found:
        raised = re.search(r"=== Uncaught Python exception: ===\n(.*)", done.stdout)
        finding = raised[1] if raised else done.stdout[-500:]
    return {
        "executions": figure(r"stat::number_of_executed_units:\s+(\d+)"),
        "executions_per_second": figure(r"stat::average_exec_per_sec:\s+(\d+)"),
        "rss_before_mib": figure(r"rss_before_kib (\d+)") // 1024,
        "peak_rss_mib": figure(r"stat::peak_rss_mb:\s+(\d+)"),
        "edges": figure(r"(?s).* cov: (\d+)"),
        "finding": finding,
        "inputs": found,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="accepted for symmetry; the output is always JSON")
    parser.add_argument("--seconds", type=int, default=SECONDS, help="of each target")
    parser.add_argument("--target", choices=TARGETS, action="append", help="only these; else all")
    parser.add_argument("--keep", type=Path, help="folder for inputs that brought a target down")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work is not None:
        work(options.target[0], options.seconds, options.work)
        return 0
    rows = {name: measured(name, options.seconds, options.keep) for name in options.target or TARGETS}
    crashes = sum(bool(row["finding"]) for row in rows.values())
    report = {
        "name": "fuzz",
        "figures": {
            "targets": rows,
            "crashes": crashes,
            "peak_rss_mib_max": max(row["peak_rss_mib"] for row in rows.values()),
        },
        "conditions": {
            "seconds_each": options.seconds,
            "rss_limit_mib": RSS_MIB_MAX,
            "input_seconds_max": INPUT_SECONDS_MAX,
            "input_bytes_max": INPUT_BYTES_MAX,
            "atheris": version("atheris"),
            "cores": os.cpu_count(),
        },
    }
    sys.stdout.write(json.dumps(report) + "\n")
    return 1 if crashes else 0


if __name__ == "__main__":
    sys.exit(main())
