"""What the daemons answer, asked over their real control sockets: real `silo start` and `coordinator start` on folders
that were kept (`tools.vectors`), under a clock that stands still (`tests.frozen`).

Reply and stored reply are compared as text, byte for byte, once two things are replaced: the folder in which the
archive lies, and the values under `VOLATILE`; and lines that this start of a silo logged are left out. A volatile value
keeps its key, so a field that is lost, renamed or moved is noticed there too.
Does not ask: a silo that exchanges files; events; commands that have the coordinator called.
"""

from __future__ import annotations

import json
import lzma
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc

from fedsilo.control.client import ControlClient, Operator, sign_as
from fedsilo.protocol import services
from fedsilo.protocol._generated import control_pb2

ROOT = Path(__file__).resolve().parents[1]
FOLDER = "/kept"  # stands for the folder in which the archive lies
CHANGES = "(changes)"  # stands for a value under `VOLATILE`
LIMIT_SECONDS = 180.0
Question = tuple[str, dict[str, Any]]

# Query -> paths of what differs from one machine, start or version of the code to the next; the state has no name. `*`
# is any key or place, `now` goes on only in a record that this start wrote: its time is that of the clock. The hello of
# this start names the trainer's isolation, so its size is the machine's, and so is a day's sum of bytes with it.
_OF_THIS_START = (
    "boot",
    "salt",
    "link.previous",
    "ledger.head",
    "payload.hmac_sha256",
    "payload.bytes",
    "facts.final.payload_bytes",
    "rules.*.measured",
    "policy.code",
    "detail.code",
    "detail.version",
    "detail.port",
)
VOLATILE: Mapping[str, Sequence[str]] = {
    "": (
        "address",
        "trainer.isolation",
        "trainer.probes.*.*",
        "trainer.controls.*",
        "trainer.why_waived",
        "trainer.ready.device",
        "trainer.ready.versions.*",
        "held.*.policy.rules.10.measured",
    ),
    "approval": ("policy.rules.10.measured",),
    "audit": tuple(f"records.*.now.{path}" for path in _OF_THIS_START),
    "audit.verify": ("verifying", "looked_at", "verified_to", "verified_at"),  # a thread of its own begins to look
    "ledger": ("history.days.*",),
    "limits": ("rows.1.used",),
    "outbox": tuple(f"message.now.{path}" for path in _OF_THIS_START),
    "run": ("versions.fedsilo",),
}
# All the queries there are; each has an answer that is no refusal.
_EITHER = "audit audit.status audit.verify certificates curves inbox logs outbox round settings"
_SILO = "adapters approval approval.comparison approvals approvals.payload halts ledger limits payload"
QUERIES: Mapping[str, frozenset[str]] = {
    "silo": frozenset(f"{_EITHER} {_SILO}".split()),
    "coordinator": frozenset(f"{_EITHER} run runs silos traffic".split()),
}


@dataclass(frozen=True)
class Party:
    """One daemon's folder in an archive.

    Attributes:
        folder: as the archive names it, such as held/hospital_a.
        seconds: what its clock shows, UTC.
    """

    folder: str
    seconds: float

    @property
    def program(self) -> str:
        return "coordinator" if self.folder.endswith("coordinator") else "silo"


def records_of(folder: Path) -> list[dict[str, Any]]:
    """All records of a party's log, as the files have them."""
    segments = sorted((folder / "state/audit").glob("*.jsonl"))
    return [json.loads(line) for segment in segments for line in segment.read_text(encoding="utf-8").splitlines()]


def unpacked(archive: Path, folder: Path) -> Path:
    """The archive's only folder, below `folder`."""
    with tarfile.open(archive) as opened:
        opened.extractall(folder, filter="data")
    return folder / archive.name.partition(".")[0]


@dataclass(frozen=True)
class Answer:
    """What was asked of a party, and the text that came."""

    party: Party
    name: str
    arguments: dict[str, Any]
    text: str


def kept_answers(file: Path) -> list[Answer]:
    with lzma.open(file, "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    return [Answer(Party(row["party"], row["seconds"]), row["query"], row["arguments"], row["text"]) for row in rows]


def keep_answers(file: Path, answers: Iterable[Answer]) -> None:
    rows = (
        {
            "party": one.party.folder,
            "seconds": one.party.seconds,
            "query": one.name,
            "arguments": one.arguments,
            "text": one.text,
        }
        for one in answers
    )
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    file.write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))


class Daemon:
    """A daemon that runs on a kept folder: asked for the texts that it answers with."""

    def __init__(self, kept: Path, party: Party) -> None:
        self.party = party
        self._kept, self._folder = kept, kept / party.folder
        self.kept_records = len(records_of(self._folder))
        config = self._folder / f"{party.program}.yaml"
        arguments = [party.program, "start", "--config", str(config), "--json"]
        with (kept / f"{party.folder.replace('/', '_')}.log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.frozen", str(party.seconds), *arguments],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
            )
        self._stack = ExitStack()
        self._stack.callback(self._end)

    def ready(self) -> None:
        """Wait until it serves, and until a silo has found that nobody is where its coordinator was."""
        assert self._process.stdout is not None
        told = json.loads(self._process.stdout.readline())
        assert told["ok"], told
        socket = Path(told["data"]["control_socket"])
        self._client = self._stack.enter_context(ControlClient(socket))
        channel = self._stack.enter_context(grpc.insecure_channel(f"unix:{socket}"))
        methods: dict[str, tuple[Any, Any, bool]] = dict(services.CONTROL_METHODS)
        self._calls = {
            name: channel.unary_unary(
                f"/{services.CONTROL_SERVICE}/{name}",
                request_serializer=request.SerializeToString,
                response_deserializer=reply.FromString,
            )
            for name, (request, reply, streams) in methods.items()
            if not streams
        }
        if self.party.program == "silo":
            self._until(self._settled)

    def answer(self, name: str, arguments: Mapping[str, Any]) -> str:
        """The JSON text of the answer, or CODE: MESSAGE of the refusal.

        Args:
            name: of a query; empty for the state, and with a ! before it of a command.
            arguments: {order} of a payload: of the command that asks for it.
        """
        if not name:
            return self._plain(name, self._calls["Snapshot"](control_pb2.SnapshotRequest()).state_json)
        if name.startswith("!"):
            reply = self._ordered(name[1:], arguments)
            return self._here(reply.result_json or f"{reply.error_code}: {reply.error_message}")
        if "order" in arguments:  # a payload is fetched with the ticket that a command was answered with
            reply = self._ordered("payload.read" if name == "payload" else name, arguments["order"])
            if reply.error_code:
                return self._here(f"{reply.error_code}: {reply.error_message}")
            arguments = {"ticket": json.loads(reply.result_json)["ticket"]}
        reply = self._calls["Query"](control_pb2.QueryRequest(name=name, arguments_json=json.dumps(arguments)))
        if name == "audit.verify":
            self._until(lambda: not self.read("audit.status", {})["verifying"])
        if reply.error_code:
            return self._here(f"{reply.error_code}: {reply.error_message}")
        return self._plain(name, reply.data_json)

    def read(self, name: str, arguments: Mapping[str, Any]) -> Any:
        return self._client.query(name, arguments)

    def runs(self) -> list[str]:
        if self.party.program == "coordinator":
            return [row["run"] for row in self.read("runs", {})]
        return list(self.read("curves", {})["runs"])

    def _ordered(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """The reply to a command that a person of the site has signed."""
        silo = self.party.program == "silo"
        identities, person = self._folder / "id", "alice" if silo else "carol"
        site = self._folder.name if silo else "main"
        signer = Operator(site, identities / f"{person}.crt", identities / f"{person}.key", "demo")
        now = datetime.fromtimestamp(self.party.seconds, UTC)
        return self._calls["Execute"](sign_as(signer, name, arguments, now=now, expires=now + timedelta(seconds=60)))

    def close(self) -> None:
        self._stack.close()

    def _settled(self) -> bool:
        state = self._client.snapshot().state
        return bool(state["halted"]) or state["coordinator"]["link"] == "down"

    def _until(self, holds: Callable[[], bool]) -> None:
        end = time.monotonic() + LIMIT_SECONDS
        while not holds():
            assert time.monotonic() < end, f"{self.party.folder} does not come to it"

    def _plain(self, name: str, text: str) -> str:
        """An answer with its volatile values replaced; the rest of it is the text that came."""
        value = json.loads(text)
        assert _text(value) == text, f"{name}: not JSON as `json.dumps` writes it without spaces"
        for path in VOLATILE.get(name, ()):
            _replace(value, path.split("."), int(self.party.seconds * 1000))
        if name == "logs" and self.party.program == "silo":
            # what this start has logged, its threads wrote in any order, and some of it is about the machine
            now = datetime.fromtimestamp(self.party.seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.")
            value["lines"] = [line for line in value["lines"] if not line.startswith(now)]
        return self._here(_text(value))

    def _here(self, text: str) -> str:
        return text.replace(str(self._kept), FOLDER)

    def _end(self) -> None:
        self._process.kill()  # its trainer ends with it
        self._process.communicate()


def _replace(value: Any, path: Sequence[str], now: int) -> None:
    first, *rest = path
    if first == "now":
        if isinstance(value, dict) and value.get("t") == now:
            _replace(value, rest, now)
        return
    places: Sequence[Any] = ()
    if isinstance(value, dict):
        places = list(value) if first == "*" else [key for key in value if key == first]
    elif isinstance(value, list):
        places = [place for place in range(len(value)) if first in ("*", str(place))]
    for place in places:
        if rest:
            _replace(value[place], rest, now)
        else:
            value[place] = CHANGES


def _text(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def differences(kept: str, told: str) -> list[str]:
    """Where two answers differ, for people; nothing only where they are the same, byte for byte."""
    if kept == told:
        return []
    try:
        found = list(_apart(json.loads(kept), json.loads(told), ""))
    except ValueError:
        return [f"{kept!r} -> {told!r}"]
    return found or ["the same values, written otherwise"]


def _apart(kept: Any, told: Any, path: str) -> Iterator[str]:
    if isinstance(kept, dict) and isinstance(told, dict):
        if list(kept) != list(told):
            yield f"{path}: keys {list(kept)} -> {list(told)}"
        for key in kept.keys() & told.keys():
            yield from _apart(kept[key], told[key], f"{path}.{key}")
    elif isinstance(kept, list) and isinstance(told, list) and len(kept) == len(told):
        for place, (one, other) in enumerate(zip(kept, told, strict=True)):
            yield from _apart(one, other, f"{path}.{place}")
    elif kept != told or type(kept) is not type(told):
        yield f"{path}: {kept!r} -> {told!r}"


@contextmanager
def running(kept: Path, parties: Sequence[Party]) -> Iterator[dict[str, Daemon]]:
    """All of them side by side, by folder; ended whatever happens."""
    with ExitStack() as stack:
        daemons = {}
        for party in parties:
            daemons[party.folder] = daemon = Daemon(kept, party)
            stack.callback(daemon.close)
        for daemon in daemons.values():
            daemon.ready()
        yield daemons
