"""The server behind a control socket, without grpc: guard and coordinator have one each.

Reading (snapshot, events, queries) is for whoever may open the socket. A query's argument that is not known, not of its
type or out of range is a UsageError, and says so without quoting it: what is quoted would be shown on an operator's
terminal (threat T37). null stands for an argument that was left out.

A change is a signed command, and in this order: verify certificate and signature under the site CA, expiry by
max(seen, now) so a clock set back revives nothing (T41), the request id (same request: same reply; another under the
same id: refused), the role, then the handler. With a journal both survive a restart, so a captured command cannot be
replayed into a fresh process (T36).

The journal has one JSON object a line: {"seen"} | {"accepted"} | {"id","digest","expires","seen"} | {"id","reply"} |
{"id","until"}, begun before the work, finished after it, each durable. A line torn by a power cut is dropped at the
next start; a command begun and never finished is reported as such and not carried out anew. Entries go an hour after
the last command under their request id has expired: the verification refuses each of them by itself then, whoever
captured it, and whoever asks again, signed anew, is given the reply until then. `seen` never goes back (T41), but where
a person accepted a clock that had been found wrong.

Thread-safe. Commands run one at a time; reading never waits for a command.
Does not cover: who may open the socket (`fedsilo.control.socket_server`).
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from certs.commands import VerifiedCommand, verify_command
from certs.roles import ACTIONS, Roles, may
from fedsilo.audit.record import COUNT_MAX
from fedsilo.control.answers import Answer, to_json
from fedsilo.files.durable import write_all, write_durably
from fedsilo.files.logs import QuietLog, about
from fedsilo.protocol import errors
from fedsilo.protocol._generated import control_pb2
from fedsilo.protocol.clocks import COMMAND_TIME, TOLD_SECONDS, in_words
from fedsilo.protocol.errors import (
    ConflictError,
    FedSiloError,
    NotAllowedError,
    NotFoundError,
    OperationError,
    UsageError,
)

TEXT_CHARACTERS_MAX = 256


class QueryArguments:
    """The arguments of one query.

    Args:
        arguments: as they came.
        known: names that this query takes.

    Raises:
        UsageError: another name.
    """

    def __init__(self, arguments: Mapping[str, Any], *known: str) -> None:
        self._arguments = arguments
        if unknown := arguments.keys() - set(known):
            takes = f"it takes {', '.join(known)}" if known else "it takes none"
            raise UsageError(f"{len(unknown)} of the query's arguments are not known: {takes}")

    def number(self, name: str, *, default: int | None = None, least: int = 0, most: int = COUNT_MAX) -> int | None:
        """A whole number from `least` to `most`. Raises UsageError."""
        value = self._arguments.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise UsageError(f"{name} is a whole number from {least} to {most}")
        return value

    def limit(self, *, default: int, most: int) -> int:
        """Return the greatest number of rows. Raises UsageError."""
        value = self.number("limit", default=default, least=1, most=most)
        return default if value is None else value

    def flag(self, name: str) -> bool:
        """Return a truth value. Raises UsageError."""
        value = self._arguments.get(name)
        if value is not None and not isinstance(value, bool):
            raise UsageError(f"{name} is true or false")
        return bool(value)

    def text(self, name: str, *, among: Collection[str] = (), most: int = TEXT_CHARACTERS_MAX) -> str:
        """Printable text of at most `most` characters, empty where there is none; one of `among`, where that is given.
        Raises UsageError."""
        value = self._arguments.get(name)
        if value is None:
            return ""
        if not isinstance(value, str) or len(value) > most or not value.isprintable():
            raise UsageError(f"{name} is printable text of at most {most} characters")
        if value and among and value not in among:
            raise UsageError(f"{name} is one of: {', '.join(sorted(among))}")
        return value


# ---- which commands were seen ----------------------------------------------------------------------------------------


PRIVATE_MODE = 0o600
KEPT_AFTER_EXPIRY = timedelta(hours=1)


@dataclass(frozen=True)
class RememberedRequest:
    """`expires` is that of the command signed for longest. `reply` is None while, or for ever after a crash in which,
    the command is not finished."""

    digest: str
    expires: datetime
    reply: bytes | None = None


class RequestJournal:
    """The memory of one control server, whose lock guards it.

    Args:
        path: its file, or None to remember in this process only.
        now: time of the start; entries that expired an hour before are forgotten.

    Raises:
        ConflictError: the file is damaged before its last line.
        OperationError: it cannot be read or written.
    """

    def __init__(self, path: Path | None, *, now: datetime) -> None:
        self._path = path
        self._seen = now
        self._requests: dict[str, RememberedRequest] = {}
        if path is not None:
            self._load(path)
            self._forget_expired()
            self._compact(path)

    def latest(self, now: datetime) -> datetime:
        """max(seen, now): time as far as this server is concerned."""
        self._seen = max(self._seen, now)
        return self._seen

    def accept(self, now: datetime) -> None:
        """A person accepted the clock as it is: no later time is seen any more, durably. Raises OperationError."""
        self._append({"accepted": now.isoformat()})
        self._seen = now

    def find(self, request_id: str) -> RememberedRequest | None:
        self._forget_expired()
        return self._requests.get(request_id)

    def begin(self, command: VerifiedCommand, now: datetime) -> None:
        """Remember, durably, that the work on `command` starts. Raises OperationError: then it must not start."""
        self._append(
            {
                "id": command.request_id,
                "digest": command.digest,
                "expires": command.expires.isoformat(),
                "seen": now.isoformat(),
            }
        )
        self._requests[command.request_id] = RememberedRequest(command.digest, command.expires)

    def extend(self, command: VerifiedCommand) -> None:
        """Keep the entry of a request id that is asked again for as long as the later signature counts, durably.

        Raises:
            OperationError: then the signature must not be answered either: it would outlive what is remembered.
        """
        known = self._requests[command.request_id]
        if command.expires <= known.expires:
            return
        self._append({"id": command.request_id, "until": command.expires.isoformat()})
        self._requests[command.request_id] = replace(known, expires=command.expires)

    def finish(self, request_id: str, reply: bytes) -> None:
        """Remember the reply, durably. Raises OperationError."""
        self._requests[request_id] = replace(self._requests[request_id], reply=reply)
        self._append({"id": request_id, "reply": reply.hex()})

    def _forget_expired(self) -> None:
        self._requests = {
            identifier: request
            for identifier, request in self._requests.items()
            if request.expires + KEPT_AFTER_EXPIRY > self._seen
        }

    def _load(self, path: Path) -> None:
        try:
            lines = path.read_bytes().split(b"\n")
        except FileNotFoundError:
            return
        except OSError as error:
            raise OperationError(f"cannot read {path}: {error.strerror}") from error
        # What follows the last newline is empty, or a line that a crash tore: its command was never carried out.
        for number, line in enumerate(lines[:-1], start=1):
            try:
                self._take(json.loads(line))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ConflictError(
                    f"{path}:{number}: damaged",
                    hint="move it away when no signed command of the last hour can be replayed any more",
                ) from error

    def _take(self, entry: dict[str, str]) -> None:
        if "reply" in entry:
            known = self._requests.get(entry["id"])
            if known is not None:
                self._requests[entry["id"]] = replace(known, reply=bytes.fromhex(entry["reply"]))
            return
        if "accepted" in entry:
            self._seen = datetime.fromisoformat(entry["accepted"])
            return
        if "until" in entry:
            known = self._requests[entry["id"]]
            expires = max(known.expires, datetime.fromisoformat(entry["until"]))
            self._requests[entry["id"]] = replace(known, expires=expires)
            return
        self._seen = max(self._seen, datetime.fromisoformat(entry["seen"]))
        if "id" in entry:
            self._requests[entry["id"]] = RememberedRequest(entry["digest"], datetime.fromisoformat(entry["expires"]))

    def _compact(self, path: Path) -> None:
        entries: list[dict[str, str]] = [{"seen": self._seen.isoformat()}]
        for identifier, request in self._requests.items():
            entries.append(
                {
                    "id": identifier,
                    "digest": request.digest,
                    "expires": request.expires.isoformat(),
                    "seen": self._seen.isoformat(),
                }
            )
            if request.reply is not None:
                entries.append({"id": identifier, "reply": request.reply.hex()})
        write_durably(path, b"".join(_line(entry) for entry in entries), PRIVATE_MODE)

    def _append(self, entry: dict[str, str]) -> None:
        if self._path is None:
            return
        try:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                before = os.fstat(descriptor).st_size
                try:
                    write_all(descriptor, _line(entry))
                    os.fsync(descriptor)
                except OSError:
                    # A half-written line would hide the next one from the reader.
                    os.ftruncate(descriptor, before)
                    raise
            finally:
                os.close(descriptor)
        except OSError as error:
            raise OperationError(
                f"cannot write {self._path}: {error.strerror}", hint="no command is carried out until it can be"
            ) from error


def _line(entry: dict[str, str]) -> bytes:
    return json.dumps(entry, separators=(",", ":")).encode("ascii") + b"\n"


# ---- the server ------------------------------------------------------------------------------------------------------


_log = logging.getLogger("fedsilo.control")

EVENTS_KEPT_MAX = 4096
# Sequences of a daemon that is started for the n-th time begin behind n - 1 times so many: a reader's number is of one
# life of it, and those of a later one do not pass for what came next.
EVENTS_A_LIFE = 10**9
# Refusals logged word for word, of one person or of all whose command does not verify, before they are only counted.
REFUSALS_LOGGED_MAX = 10
# Names of events that the control server itself makes, for a reader that fell behind or outlived a restart.
EVENTS_MISSED = "events.missed"

Publish = Callable[[str, Mapping[str, Any]], object]  # an event by its name, with its fields
QueryHandler = Callable[[Mapping[str, Any]], Any]
CommandHandler = Callable[[VerifiedCommand], Any]
Clock = Callable[[], datetime]

_ERROR_TYPES: dict[str, type[FedSiloError]] = {
    kind.default_code: kind
    for kind in (
        errors.OperationError,
        errors.UsageError,
        errors.UnreachableError,
        errors.NotAllowedError,
        errors.DeniedError,
        errors.ConflictError,
        errors.VerificationError,
        errors.NotFoundError,
        errors.HeldError,
    )
}


@dataclass(frozen=True)
class _Command:
    action: str
    handler: CommandHandler
    by_clock: bool


class ControlServer:
    """The state, events, queries and commands of one daemon.

    Args:
        site: whose people may command it.
        site_ca_pem: the root their certificates hang from.
        roles: what each may do.
        clock: UTC time, timezone-aware, that may be remembered.
        journal: remembers requests over a restart; without one, only in this process.
        shows: what the clock shows, where that is no time to be remembered yet; a command is judged by the later one.
        wall: what the clock shows, believed or not; for commands that are judged by it alone.
        federation: whose daemon this is; an order for another one is refused, and so is one that names none.

    Attributes:
        before_snapshot: called before the state is read, in the asking thread, so that it need not be made up for
            nobody; it may call `set_state`.
    """

    def __init__(
        self,
        site: str,
        site_ca_pem: bytes,
        roles: Roles,
        clock: Clock,
        *,
        journal: Path | None = None,
        shows: Clock | None = None,
        wall: Clock | None = None,
        federation: str = "",
    ) -> None:
        if roles.site != site:
            raise UsageError(f"roles.yaml is of site {roles.site!r}, this daemon serves {site!r}")
        self._site = site
        self._federation = federation
        self._site_ca_pem = site_ca_pem
        self._roles = roles
        self._clock, self._shows, self._wall = clock, shows or clock, wall or clock
        self._reading = threading.Condition()
        self._events: deque[control_pb2.Event] = deque(maxlen=EVENTS_KEPT_MAX)
        self._sequence = self._before = (_life_of(journal) - 1) * EVENTS_A_LIFE if journal is not None else 0
        self._state_json = "{}"
        self._policy_digest = ""
        self._closed = False
        self.before_snapshot: Callable[[], None] = lambda: None
        self._commanding = threading.Lock()
        self._queries: dict[str, QueryHandler] = {}
        self._commands: dict[str, _Command] = {}
        self._requests = RequestJournal(journal, now=clock())
        self._quiet = QuietLog(_log, lines_max=REFUSALS_LOGGED_MAX)

    # ---- what the daemon says ----------------------------------------------------------------------

    def publish(self, name: str, fields: Mapping[str, Any]) -> int:
        """Append an event for all watchers; returns its sequence. Raises TypeError, ValueError for non-JSON fields."""
        fields_json = _json_text(fields)
        time = _text(self._shows())
        self._quiet.flush()
        with self._reading:
            self._sequence += 1
            event = control_pb2.Event(sequence=self._sequence, time=time, name=name, fields_json=fields_json)
            self._events.append(event)
            self._reading.notify_all()
            return self._sequence

    def set_state(self, state: Mapping[str, Any] | Answer, *, policy_digest: str | None = None) -> None:
        """Replace the snapshot; a policy digest stays until another is given. Raises TypeError, ValueError."""
        state_json = _json_text(state)
        with self._reading:
            self._state_json = state_json
            if policy_digest is not None:
                self._policy_digest = policy_digest

    def close(self) -> None:
        """Wake all waiting readers for good: the daemon ends."""
        self._quiet.flush(everything=True)
        with self._reading:
            self._closed = True
            self._reading.notify_all()

    # ---- reading -----------------------------------------------------------------------------------

    def snapshot(self) -> control_pb2.Snapshot:
        """The state and the sequence of the last event it may already contain; watch from there on."""
        self.before_snapshot()
        time = _text(self._shows())
        with self._reading:
            return control_pb2.Snapshot(
                sequence=self._sequence, time=time, policy_digest=self._policy_digest, state_json=self._state_json
            )

    def events_since(self, sequence: int, timeout: float) -> list[control_pb2.Event]:
        """Events after `sequence`, oldest first; waits up to `timeout` seconds for the first one.

        A reader that fell behind the ring, or whose sequence is from before a restart, first gets one `events.missed`
        with {"missed": n} (-1 when unknown), and should read the snapshot again.
        """
        with self._reading:
            self._reading.wait_for(lambda: self._sequence != max(sequence, self._before) or self._closed, timeout)
            if sequence > self._sequence or 0 < sequence < self._before:
                return [self._missed(self._before, -1), *self._events]
            sequence = max(sequence, self._before)
            # from the newest back: whoever keeps up looks at what is new, not at all that is kept
            newer = itertools.takewhile(lambda event: event.sequence > sequence, reversed(self._events))
            found = list(newer)[::-1]
            missed = self._sequence - sequence - len(found)
            return [self._missed(sequence + missed, missed), *found] if missed else found

    @property
    def closed(self) -> bool:
        return self._closed

    def register_query(self, name: str, handler: QueryHandler) -> None:
        """Answer `name` by `handler(arguments)`. It runs in the asking thread and must only read. Once per name."""
        if name in self._queries:
            raise ValueError(f"query {name!r} is registered already")
        self._queries[name] = handler

    def query(self, name: str, arguments_json: str) -> control_pb2.QueryReply:
        """Answer a read; a FedSiloError of the handler becomes the reply's error."""
        try:
            handler = self._queries.get(name)
            if handler is None:
                raise NotFoundError(f"there is no query {name!r}", hint=f"known: {', '.join(sorted(self._queries))}")
            return control_pb2.QueryReply(data_json=_json_text(handler(_arguments(arguments_json))))
        except FedSiloError as error:
            return control_pb2.QueryReply(error_code=_code_of(error), error_message=error.message)

    # ---- commands ----------------------------------------------------------------------------------

    def register_command(self, name: str, action: str, handler: CommandHandler, *, by_clock: bool = False) -> None:
        """Let people whose role allows `action` call `handler`. Its return value is the reply's JSON result.

        by_clock: it is judged by what the clock shows, whatever later time was seen: it is about the clock.

        Raises:
            ValueError: the action is not in `certs.roles.ACTIONS`, or the name is taken.
        """
        if action not in ACTIONS:
            raise ValueError(f"{action!r} is not an action of certs.roles.ACTIONS")
        if name in self._commands:
            raise ValueError(f"command {name!r} is registered already")
        self._commands[name] = _Command(action, handler, by_clock)

    def accept_clock(self) -> None:
        """For the handler of such a command: times later than the clock's no longer count (T41).

        Raises:
            OperationError: the journal takes nothing.
        """
        self._requests.accept(self._wall())

    def execute(self, command: control_pb2.Command) -> control_pb2.CommandReply:
        """Verify and carry out a command, or say why not.

        Refusals before the handler are not remembered, and logged a few at a time (T24).
        """
        with self._commanding:
            person, now = "", self._clock()
            try:
                now = self._requests.latest(self._clock())
                known = self._commands.get(command.name)
                by = self._wall() if known is not None and known.by_clock else max(now, self._shows())
                verified = verify_command(
                    command,
                    federation=self._federation,
                    site=self._site,
                    site_ca_pem=self._site_ca_pem,
                    roles=self._roles,
                    now=by,
                )
                person = verified.person
                remembered = self._requests.find(verified.request_id)
                if remembered is not None:
                    # also of a command that is refused: its signature must not outlive the reason for that
                    self._requests.extend(verified)
                    return _replay(remembered, verified)
                entry = self._allowed(verified)
                self._requests.begin(verified, now)
            except FedSiloError as error:
                still = (now - self._wall()).total_seconds()
                if error.code == COMMAND_TIME and still > TOLD_SECONDS:
                    error.hint = (
                        f"the latest time seen here is {in_words(still)} ahead of this daemon's clock, and time stands "
                        "still until that has caught up"
                    )
                who = person or "somebody whose command does not verify"
                line = f"refused the command {command.name[:64]!r}: {error.line} [{error.code}]"
                self._quiet.say(person, f"refused commands of {who}", line)
                return error_reply(error)
            try:
                with about(request=verified.request_id):
                    reply = control_pb2.CommandReply(result_json=_json_text(entry.handler(verified)))
            except FedSiloError as error:
                reply = error_reply(error)
            try:
                self._requests.finish(verified.request_id, reply.SerializeToString(deterministic=True))
            except FedSiloError as error:
                return error_reply(error)
            return reply

    def _allowed(self, command: VerifiedCommand) -> _Command:
        entry = self._commands.get(command.name)
        if entry is None:
            raise NotFoundError(
                f"there is no command {command.name!r}", hint=f"known: {', '.join(sorted(self._commands))}"
            )
        if not may(command.roles, entry.action):
            has = ", ".join(sorted(command.roles)) or "no role"
            who = ", ".join(self._roles.who_may(entry.action)) or "nobody"
            raise NotAllowedError(
                f"{command.person} ({has}) may not {entry.action} at {self._site}",
                hint=f"it takes {' or '.join(sorted(ACTIONS[entry.action]))}; at this site: {who}",
            )
        return entry

    def _missed(self, sequence: int, missed: int) -> control_pb2.Event:
        return control_pb2.Event(
            sequence=sequence, time=_text(self._shows()), name=EVENTS_MISSED, fields_json=_json_text({"missed": missed})
        )


def _life_of(journal: Path) -> int:
    """Return how often a daemon was started with this folder, including this time."""
    path = journal.with_name("lives")
    text = path.read_text(encoding="ascii", errors="replace").strip() if path.exists() else ""
    life = (int(text) if text.isdigit() and len(text) < 10 else 0) + 1
    write_durably(path, f"{life}\n".encode(), mode=0o600)
    return life


def error_reply(error: FedSiloError) -> control_pb2.CommandReply:
    return control_pb2.CommandReply(error_code=_code_of(error), error_message=error.message, error_hint=error.hint)


def raise_for_reply(reply: control_pb2.CommandReply | control_pb2.QueryReply) -> None:
    """The client's half: turn the error of a reply back into its FedSiloError, so exit codes agree; else nothing."""
    if not reply.error_code:
        return
    type_code, _, code = reply.error_code.partition(":")
    hint = reply.error_hint if isinstance(reply, control_pb2.CommandReply) else ""
    raise _ERROR_TYPES.get(type_code, errors.OperationError)(reply.error_message, hint=hint, code=code or type_code)


def _code_of(error: FedSiloError) -> str:
    """`TYPE` or `TYPE:CODE`: the type decides the exit code, the finer code is for `--json`."""
    kind = next((kind for kind in _ERROR_TYPES.values() if isinstance(error, kind)), errors.OperationError)
    return kind.default_code if error.code == kind.default_code else f"{kind.default_code}:{error.code}"


def _replay(remembered: RememberedRequest, verified: VerifiedCommand) -> control_pb2.CommandReply:
    if remembered.digest != verified.digest:
        raise ConflictError(
            f"request id {verified.request_id} was used for another command",
            hint="give the command again with a new request id",
            code="REQUEST_ID_REUSED",
        )
    if remembered.reply is None:
        raise ConflictError(
            "the daemon stopped while it carried out this command; nobody knows how far it came",
            hint="look at the state, then give a new command if it is still needed",
            code="INDETERMINATE",
        )
    return control_pb2.CommandReply.FromString(remembered.reply)


def _arguments(text: str) -> Mapping[str, Any]:
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise UsageError("the arguments of the query are not JSON") from error
    if not isinstance(value, dict):
        raise UsageError("the arguments of the query are not a JSON object")
    return value


def _json_text(value: Any) -> str:
    return json.dumps(to_json(value), allow_nan=False, separators=(",", ":"), ensure_ascii=False)


def _text(time: datetime) -> str:
    return time.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"
