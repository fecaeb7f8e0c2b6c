"""Names and serialisers of the two gRPC services, without grpc: the four modules that import grpc build their
generic handlers and stubs from this table."""

from __future__ import annotations

from fedsilo.protocol._generated import control_pb2 as control
from fedsilo.protocol._generated import federation_pb2 as federation

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

# The payload message of each kind. Those of TENSOR_KINDS carry a Factors header and tensor bytes.
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
    "lora.factor_a": federation.Factors,
    "lora.factor_b": federation.Factors,
    "lora.core_r": federation.Factors,
    "reft.intervention": federation.Factors,
    "public.responses": federation.PublicResponses,
    "competence.score": federation.CompetenceScore,
    "competence.answers": federation.CompetenceAnswers,
    "reward.scalar": federation.RewardScalar,
    "profile.vector": federation.ProfileVector,
    "bandit.reward": federation.BanditReward,
    "knowledge.package": federation.KnowledgePackage,
    "metrics.eval": federation.MetricsEval,
}
INBOUND_KINDS = {
    "control.ack": federation.Ack,
    "control.refusal": federation.Refusal,
    "control.checkpoint": federation.Checkpoint,
    "run.plan": federation.RunPlan,
    "round.open": federation.RoundOpen,
    "round.agreed": federation.RoundAgreed,
    "global.adapter": federation.Factors,
    "reft.aggregate": federation.Factors,
    "public.donors": federation.PublicDonors,
    "competence.ask": federation.CompetenceAsk,
    "reward.ask": federation.RewardAsk,
    "match.directive": federation.MatchDirective,
    "knowledge.package": federation.KnowledgePackage,
    "round.result": federation.RoundResult,
    "run.end": federation.RunEnd,
}
# What a round's training changed, as differences to the adapter that the round started from.
UPDATE_KINDS = frozenset({"lora.factors", "lora.factor_a", "lora.factor_b", "lora.core_r"})
# Whole interventions, not differences: there is no adapter that all silos share.
REFT_KINDS = frozenset({"reft.intervention", "reft.aggregate"})
FACTOR_KINDS = UPDATE_KINDS | {"global.adapter"}
TENSOR_KINDS = FACTOR_KINDS | REFT_KINDS
