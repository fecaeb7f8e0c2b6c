"""Names and serialisers of the two gRPC services, without grpc: the four modules that import grpc build their
generic handlers and stubs from this table."""

from __future__ import annotations

from fedsilo.protocol._generated import control_pb2 as control

NOTE_SIGNATURES_MAX = 100  # of a signed checkpoint of an audit log
PROTOCOL_VERSION = 2  # 2: a hello names min_updates, and so does each transcript (decision 22)

FEDERATION_SERVICE = "fedsilo.federation.v1.Federation"
EXCHANGE = f"/{FEDERATION_SERVICE}/Exchange"  # stream Frame -> stream Frame

CONTROL_SERVICE = "fedsilo.control.v1.Control"
# method -> (request type, reply type, whether the reply is a stream)
CONTROL_METHODS = {
    "Snapshot": (control.SnapshotRequest, control.Snapshot, False),
    "Watch": (control.WatchRequest, control.Event, True),
    "Query": (control.QueryRequest, control.QueryReply, False),
    "Execute": (control.Command, control.CommandReply, False),
}
