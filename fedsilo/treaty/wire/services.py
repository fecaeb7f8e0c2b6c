"""Names and serialisers of the two gRPC services, without grpc: the four modules that import grpc build their
generic handlers and stubs from this table."""

from __future__ import annotations

from fedsilo.treaty.wire._generated import control_pb2 as control
from fedsilo.treaty.wire._generated import federation_pb2 as federation

PROTOCOL_VERSION = 1

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

# The payload message of each kind. lora.factors and global.adapter carry a Factors header and tensor bytes.
OUTBOUND_KINDS = {
    "control.hello": federation.Hello,
    "control.poll": federation.Poll,
    "control.fetch": federation.Fetch,
    "control.heartbeat": federation.Heartbeat,
    "control.progress": federation.Progress,
    "control.declined": federation.Declined,
    "control.abstain": federation.Abstain,
    "control.error": federation.ErrorReport,
    "control.checkpoint": federation.Checkpoint,
    "lora.factors": federation.Factors,
    "public.responses": federation.PublicResponses,
    "metrics.eval": federation.MetricsEval,
}
INBOUND_KINDS = {
    "control.ack": federation.Ack,
    "control.refusal": federation.Refusal,
    "control.checkpoint": federation.Checkpoint,
    "run.plan": federation.RunPlan,
    "round.open": federation.RoundOpen,
    "global.adapter": federation.Factors,
    "public.donors": federation.PublicDonors,
    "round.result": federation.RoundResult,
    "run.end": federation.RunEnd,
}
TENSOR_KINDS = frozenset({"lora.factors", "global.adapter"})
