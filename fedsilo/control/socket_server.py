"""A daemon's control socket: a thin gRPC face of the `ControlServer` on a unix socket.

Whoever may open the socket may read; a change is a command that carries an operator's signature, which the
`ControlServer` verifies. What fails here leaves as a bare status, never with a text (threats T8, T24). Nothing of the
network is served.

A watch holds its thread for as long as somebody watches, and a query for as long as the daemon's loop takes. Each kind
has so many slots, and one call more is refused at once; the threads beyond those are the commands'.
Does not stop: somebody in the socket's group who takes all slots of one kind; reading is then refused, and commands are
not.
"""

from __future__ import annotations

import contextlib
import grp
import logging
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc

from fedsilo.control.server import ControlServer
from fedsilo.files.logs import QuietLog
from fedsilo.protocol import services
from fedsilo.protocol._generated import control_pb2
from fedsilo.protocol.errors import ConflictError, OperationError

WATCH_SLICE_SECONDS = 1.0
STOP_GRACE_SECONDS = 1.0
WATCHERS_MAX = 64
READERS_MAX = 32
_FOR_COMMANDS = 16  # one is carried out at a time, the others wait for it; a call that is refused is through at once
THREADS = WATCHERS_MAX + READERS_MAX + _FOR_COMMANDS


class NoSlotError(OperationError):
    """Too many calls of the kind are open already."""

    default_code = "TOO_MANY_CALLS"


class CallSlots:
    """The slots of one kind of call.

    Args:
        kind: in words.
        most: how many may be open at a time.
    """

    def __init__(self, kind: str, most: int) -> None:
        self._cause = f"{most} {kind} of the control socket are open, which is the most"
        self._free = threading.Semaphore(most)

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Hold a slot while the block runs. Raises NoSlotError."""
        if not self._free.acquire(blocking=False):
            raise NoSlotError(self._cause, hint="end some of those that watch")
        try:
            yield
        finally:
            self._free.release()


class CallBoundary:
    """Ends a call whose handler failed with a bare status; the text stays in this process's log (T8, T24).

    Subclasses give other failures a status of their own.
    """

    def __init__(self, context: grpc.ServicerContext, quiet: QuietLog) -> None:
        self.context = context
        self.quiet = quiet

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, GeneratorExit):
            return
        if isinstance(error, NoSlotError):
            self.quiet.say(error.message, error.message, error.message)
            self.context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "")
        self.failed(error)

    def failed(self, error: BaseException) -> None:
        """Log the failure and abort the call."""
        cause = f"control calls that failed by {type(error).__name__}"
        self.quiet.say(cause, cause, "a control call failed", level=logging.ERROR, error=error)
        self.context.abort(grpc.StatusCode.INTERNAL, "")


class ControlSocket:
    """Serves from `start` until `close`.

    Args:
        server: state, events, queries, commands.
        path: the socket; 0660 for `group` where that group exists and we may give it away, else 0600.
        group: operating-system group of the site's operators.
        log: gets what fails here.

    Raises:
        ConflictError: the socket cannot be made.
    """

    def __init__(self, server: ControlServer, path: Path, group: str, *, log: logging.Logger) -> None:
        self._control = server
        self._quiet = QuietLog(log)
        self._path = path
        self._watchers, self._readers = CallSlots("watches", WATCHERS_MAX), CallSlots("queries", READERS_MAX)
        self._server = grpc.server(ThreadPoolExecutor(THREADS, thread_name_prefix="control"))
        behaviours: dict[str, Any] = {
            "Snapshot": self._snapshot,
            "Watch": self._watch,
            "Query": self._query,
            "Execute": self._execute,
        }
        handlers = {}
        methods: dict[str, tuple[Any, Any, bool]] = dict(services.CONTROL_METHODS)
        for name, (request, reply, streams) in methods.items():
            make = grpc.unary_stream_rpc_method_handler if streams else grpc.unary_unary_rpc_method_handler
            handlers[name] = make(
                behaviours[name], request_deserializer=request.FromString, response_serializer=reply.SerializeToString
            )
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(services.CONTROL_SERVICE, handlers),)
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)  # the state folder's lock is held: no other daemon can be behind it
        # Nobody may connect between the socket's making and its mode.
        before = os.umask(0o177)
        try:
            self._server.add_insecure_port(f"unix:{path}")
        except RuntimeError as error:
            raise ConflictError(f"cannot listen on the control socket {path}") from error
        finally:
            os.umask(before)
        with contextlib.suppress(KeyError, PermissionError):
            os.chown(path, -1, grp.getgrnam(group).gr_gid)
            path.chmod(0o660)

    def start(self) -> ControlSocket:
        self._server.start()
        return self

    def close(self, grace_seconds: float = STOP_GRACE_SECONDS) -> None:
        """End all calls and remove the socket."""
        self._control.close()
        self._server.stop(grace_seconds).wait()
        self._path.unlink(missing_ok=True)

    def _snapshot(self, _request: control_pb2.SnapshotRequest, context: grpc.ServicerContext) -> control_pb2.Snapshot:
        with CallBoundary(context, self._quiet), self._readers.taken():
            return self._control.snapshot()

    def _watch(self, request: control_pb2.WatchRequest, context: grpc.ServicerContext) -> Iterator[control_pb2.Event]:
        with CallBoundary(context, self._quiet), self._watchers.taken():
            sequence = request.since_sequence
            while context.is_active() and not self._control.closed:
                for event in self._control.events_since(sequence, WATCH_SLICE_SECONDS):
                    sequence = event.sequence
                    yield event

    def _query(self, request: control_pb2.QueryRequest, context: grpc.ServicerContext) -> control_pb2.QueryReply:
        with CallBoundary(context, self._quiet), self._readers.taken():
            return self._control.query(request.name, request.arguments_json)

    def _execute(self, request: control_pb2.Command, context: grpc.ServicerContext) -> control_pb2.CommandReply:
        with CallBoundary(context, self._quiet):
            return self._control.execute(request)
