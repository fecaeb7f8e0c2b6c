"""The site's control socket: a thin gRPC face of the `ControlServer` on a unix socket.

Whoever may open the socket may read; a change is a command that carries an operator's signature, which the desk
verifies. What fails here leaves as a bare status, never with a text (threat T8). Nothing of the network is served.
"""

from __future__ import annotations

import contextlib
import grp
import logging
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc

from fedsilo.control.server import THREADS as CONTROL_THREADS
from fedsilo.control.server import ControlServer, NoSlotError, query_slots, watch_slots
from fedsilo.protocol import services
from fedsilo.protocol._generated import control_pb2
from fedsilo.protocol.errors import ConflictError

_log = logging.getLogger("fedsilo.silo.control")

WATCH_SLICE_SECONDS = 1.0
STOP_GRACE_SECONDS = 1.0


class ControlSocket:
    """Serves until `close`.

    Args:
        desk: state, events, queries, commands.
        path: the socket; 0660 for `group` where that group exists and we may give it away, else 0600.
        group: operating-system group of the site's operators.

    Raises:
        ConflictError: the socket cannot be made.
    """

    def __init__(self, desk: ControlServer, path: Path, group: str) -> None:
        self._desk = desk
        self._path = path
        self._watchers, self._readers = watch_slots(), query_slots()
        self._server = grpc.server(ThreadPoolExecutor(CONTROL_THREADS, thread_name_prefix="control"))
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
        self._server.start()

    def close(self) -> None:
        """End all calls and remove the socket."""
        self._desk.close()
        self._server.stop(STOP_GRACE_SECONDS).wait()
        self._path.unlink(missing_ok=True)

    def _snapshot(self, _request: control_pb2.SnapshotRequest, context: grpc.ServicerContext) -> control_pb2.Snapshot:
        with _Boundary(context), self._readers.taken():
            return self._desk.snapshot()

    def _watch(self, request: control_pb2.WatchRequest, context: grpc.ServicerContext) -> Iterator[control_pb2.Event]:
        with _Boundary(context), self._watchers.taken():
            sequence = request.since_sequence
            while context.is_active() and not self._desk.closed:
                for event in self._desk.events_since(sequence, WATCH_SLICE_SECONDS):
                    sequence = event.sequence
                    yield event

    def _query(self, request: control_pb2.QueryRequest, context: grpc.ServicerContext) -> control_pb2.QueryReply:
        with _Boundary(context), self._readers.taken():
            return self._desk.query(request.name, request.arguments_json)

    def _execute(self, request: control_pb2.Command, context: grpc.ServicerContext) -> control_pb2.CommandReply:
        with _Boundary(context):
            return self._desk.execute(request)


class _Boundary:
    """Ends a call whose handler failed with a bare status; the text stays in this daemon's log."""

    def __init__(self, context: grpc.ServicerContext) -> None:
        self._context = context

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, GeneratorExit):
            return
        if isinstance(error, NoSlotError):
            self._context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "")
        _log.error("a control call failed", exc_info=(type(error), error, trace))
        self._context.abort(grpc.StatusCode.INTERNAL, "")
