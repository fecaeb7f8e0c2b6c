"""Audit logs as a hostile owner may write them: any records, numbered, linked and signed with the owner's own key."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import rfc8785

from fedsilo.audit.checkpoint import Checkpoint, sign_checkpoint
from fedsilo.audit.merkle import MerkleTree, leaf_hash
from fedsilo.audit.record import parse_record
from fedsilo.protocol.errors import VerificationError
from tests.protocol.audit_parties import COORDINATOR, KEYS, SILO, open_log, segment

Record = dict[str, Any]
Place = tuple[str | int, ...]

JUNK: Sequence[Any] = (
    None, True, False, 0, 1, -1, 7, 0.5, -2.5, 1e308, (1 << 53) - 1, "", "x", "alice", "run-1", "0" * 64, "A" * 128,
    [], [[]], [["x"]], ["x", "x"], [5], [{}], [None], {}, {"x": "y"}, {"x": ["y"]}, {"x": {"y": {}}},
    {"polls_most": True},
)  # fmt: skip


def records_in(folder: Path) -> list[Record]:
    return [json.loads(line) for path in sorted(folder.glob("*.jsonl")) for line in path.read_bytes().splitlines()]


def line_of(record: Record) -> bytes:
    return rfc8785.dumps(record)


def is_record(record: Record) -> bool:
    """Whether the program's own reader takes it: what it refuses hides every record behind it."""
    try:
        return parse_record(line_of(record)) == record
    except (VerificationError, ValueError, TypeError):
        return False


def signed_log(folder: Path, records: Iterable[Record], origin: str = SILO) -> Path:
    """A log of these records, in which only what they say is wrong."""
    key = KEYS[origin]
    with open_log(folder, origin) as log:
        log.append("start")
    for path in (folder / "checkpoints").iterdir():
        path.unlink()
    tree, previous, lines = MerkleTree(), "0" * 64, []
    for number, each in enumerate(records):
        link = each.get("link")
        linked = {"link": {**link, "previous": previous}} if isinstance(link, dict) else {}
        line = line_of({**each, "seq": number, **linked})
        tree.append(leaf_hash(line))
        previous = leaf_hash(line).hex()
        lines.append(line)
    segment(folder).write_bytes(b"".join(line + b"\n" for line in lines))
    note = sign_checkpoint(Checkpoint(origin, len(lines), tree.root(len(lines))), key)
    (folder / "checkpoints" / f"{len(lines):012d}.note").write_text(note)
    return folder


def record(event: str, **fields: Any) -> Record:
    """A record as a party writes it, still without its number."""
    base = {"v": 1, "salt": "5a" * 16, "t": 1_800_000_000_000, "boot": "b", "mono": 5, "actor": SILO, "link": {}}
    return dict(json.loads(json.dumps(base | {"event": event} | fields)))


def window_of_polls(direction: str, decision: int) -> list[Record]:
    """The beginning and the end of a window. decision: number that the first of the two records will have."""
    routing: dict[str, Any] = {
        "kind": "control.poll", "run": "", "round": 0, "step": 0, "direction": direction,
        "peer": COORDINATOR if direction == "egress" else SILO,
    }  # fmt: skip
    opened = {"window": {"polls_most": 4096, "until": 1_800_003_600}}
    closed = {"polls": 3, "first": 50, "refused": 1, "polls_most": 4}
    return [
        record(f"{direction}.decision", decision="allow", sequence=50, detail=opened, **routing),
        record(
            "egress.sent" if direction == "egress" else "ingress.polls", sequence=53, payload={"bytes": 30},
            link={"decision": decision}, detail=closed, **routing,
        ),
    ]  # fmt: skip


def further_records() -> list[Record]:
    """Of what a log tells beside messages and people's answers."""
    found = [
        record("start", ledger={"groups": 3, "head": "0" * 64}, detail={"version": "1", "isolation": "user"}),
        record("retention.records", detail={"size": 5, "older_than_seconds": 40_000_000}),
        record("retention.payloads", detail={"payloads": 1, "bytes": 3}),
        record("screen.hit", kind="public.responses", run="run-1", round=3, step=2, detail={"hits": {"email": 2}}),
        record("payload.read", kind="public.responses", detail={"person": "alice"}, link={"decision": 3}),
        record("key.expire_warn", detail={"fingerprint": "0" * 64, "identity": SILO, "not_after": 1_800_000_000}),
        record("clock.jump", detail={"seconds": 5}),
        record("approval.deny", detail={"release": "r1", "note": "0" * 64, "person": "alice"}, reasons=["OTHER"]),
        record("round.transcript", run="run-1", round=1, detail={"sha256": "0" * 64, "party": COORDINATOR}),
        record("round.equivocation", run="run-1", round=1, detail={"known": {}, "shown": {"party": SILO}}),
        record(
            "ingress.decision", decision="allow", direction="ingress", kind="control.hello", peer=SILO, sequence=1,
            facts={"final": {"isolation": "user", "records": 5}, "transform": {"donors_dropped": {SILO: 1}}},
            rules=[{"rule": "approvals", "outcome": "ok", "limit": 1, "line": 3}], payload={"bytes": 3},
        ),
    ]  # fmt: skip
    for direction in ("egress", "ingress"):
        found += window_of_polls(direction, len(found))
    return found


def places(value: Any, at: Place = ()) -> Iterator[Place]:
    """Where in a record a value can be exchanged; what the log itself sets is left out."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, item in items:
        if at or name not in ("v", "seq", "salt"):
            yield (*at, name)
            yield from places(item, (*at, name))


def with_wrong_values(records: Sequence[Record], random: Random, count: int) -> list[Record]:
    """The same records, some values of which are others; each is one that the program's reader takes."""
    found = list(records)
    for _ in range(count):
        number = random.randrange(len(found))
        changed = exchanged(found[number], random, records)
        link = changed["link"] if isinstance(changed.get("link"), dict) else {}
        if is_record({**changed, "seq": number, "link": {**link, "previous": "0" * 64}}):
            found[number] = changed
    return found


def exchanged(record: Record, random: Random, others: Sequence[Record]) -> Record:
    """A record with one value removed, or another one in its place: any junk, or what stands there in another."""
    changed = copy.deepcopy(record)
    *way, last = random.choice(list(places(changed)))
    inner: Any = changed
    for step in way:
        inner = inner[step]
    match random.randrange(8):
        case 0:
            del inner[last]
        case 1:
            other: Any = random.choice(others)
            try:
                for step in (*way, last):
                    other = other[step]
                inner[last] = copy.deepcopy(other)
            except (KeyError, IndexError, TypeError):
                inner[last] = random.choice(JUNK)
        case 2 if isinstance(inner, dict):
            name = random.choice(["person", "release", "orders", "acknowledged", "detail", "link", "isolation", "x"])
            inner[name] = copy.deepcopy(random.choice(JUNK))
        case _:
            inner[last] = copy.deepcopy(random.choice(JUNK))
    return changed
