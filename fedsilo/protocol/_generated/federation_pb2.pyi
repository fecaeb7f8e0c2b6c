from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Finish(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_UNSPECIFIED: _ClassVar[Finish]
    FINISH_STOP: _ClassVar[Finish]
    FINISH_LENGTH: _ClassVar[Finish]
FINISH_UNSPECIFIED: Finish
FINISH_STOP: Finish
FINISH_LENGTH: Finish

class Envelope(_message.Message):
    __slots__ = ("federation", "run", "round", "step", "attempt", "kind", "sender", "sequence", "payload_digest", "signature")
    FEDERATION_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    SENDER_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_DIGEST_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    federation: str
    run: str
    round: int
    step: int
    attempt: int
    kind: str
    sender: str
    sequence: int
    payload_digest: bytes
    signature: bytes
    def __init__(self, federation: _Optional[str] = ..., run: _Optional[str] = ..., round: _Optional[int] = ..., step: _Optional[int] = ..., attempt: _Optional[int] = ..., kind: _Optional[str] = ..., sender: _Optional[str] = ..., sequence: _Optional[int] = ..., payload_digest: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class Opening(_message.Message):
    __slots__ = ("envelope", "payload_bytes", "offset")
    ENVELOPE_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    envelope: Envelope
    payload_bytes: int
    offset: int
    def __init__(self, envelope: _Optional[_Union[Envelope, _Mapping]] = ..., payload_bytes: _Optional[int] = ..., offset: _Optional[int] = ...) -> None: ...

class Admitted(_message.Message):
    __slots__ = ("offset",)
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    offset: int
    def __init__(self, offset: _Optional[int] = ...) -> None: ...

class Frame(_message.Message):
    __slots__ = ("opening", "chunk", "admitted")
    OPENING_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    opening: Opening
    chunk: bytes
    admitted: Admitted
    def __init__(self, opening: _Optional[_Union[Opening, _Mapping]] = ..., chunk: _Optional[bytes] = ..., admitted: _Optional[_Union[Admitted, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol_min", "protocol_max", "base_model_sha256", "tokenizer_sha256", "template_sha256", "load", "lora_schema_sha256", "public_set_sha256", "held_out_sha256", "code_sha256", "isolation", "role", "policy_sha256", "own_verifiers_sha256", "min_updates")
    PROTOCOL_MIN_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_MAX_FIELD_NUMBER: _ClassVar[int]
    BASE_MODEL_SHA256_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_SHA256_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_SHA256_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    LORA_SCHEMA_SHA256_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_SET_SHA256_FIELD_NUMBER: _ClassVar[int]
    HELD_OUT_SHA256_FIELD_NUMBER: _ClassVar[int]
    CODE_SHA256_FIELD_NUMBER: _ClassVar[int]
    ISOLATION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    POLICY_SHA256_FIELD_NUMBER: _ClassVar[int]
    OWN_VERIFIERS_SHA256_FIELD_NUMBER: _ClassVar[int]
    MIN_UPDATES_FIELD_NUMBER: _ClassVar[int]
    protocol_min: int
    protocol_max: int
    base_model_sha256: str
    tokenizer_sha256: str
    template_sha256: str
    load: str
    lora_schema_sha256: str
    public_set_sha256: str
    held_out_sha256: str
    code_sha256: str
    isolation: str
    role: str
    policy_sha256: str
    own_verifiers_sha256: str
    min_updates: int
    def __init__(self, protocol_min: _Optional[int] = ..., protocol_max: _Optional[int] = ..., base_model_sha256: _Optional[str] = ..., tokenizer_sha256: _Optional[str] = ..., template_sha256: _Optional[str] = ..., load: _Optional[str] = ..., lora_schema_sha256: _Optional[str] = ..., public_set_sha256: _Optional[str] = ..., held_out_sha256: _Optional[str] = ..., code_sha256: _Optional[str] = ..., isolation: _Optional[str] = ..., role: _Optional[str] = ..., policy_sha256: _Optional[str] = ..., own_verifiers_sha256: _Optional[str] = ..., min_updates: _Optional[int] = ...) -> None: ...

class Poll(_message.Message):
    __slots__ = ("wait_milliseconds", "acknowledged_sequence", "countersignature")
    WAIT_MILLISECONDS_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGED_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    COUNTERSIGNATURE_FIELD_NUMBER: _ClassVar[int]
    wait_milliseconds: int
    acknowledged_sequence: int
    countersignature: bytes
    def __init__(self, wait_milliseconds: _Optional[int] = ..., acknowledged_sequence: _Optional[int] = ..., countersignature: _Optional[bytes] = ...) -> None: ...

class Fetch(_message.Message):
    __slots__ = ("digest", "offset")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    digest: str
    offset: int
    def __init__(self, digest: _Optional[str] = ..., offset: _Optional[int] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Progress(_message.Message):
    __slots__ = ("round", "step")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    round: int
    step: int
    def __init__(self, round: _Optional[int] = ..., step: _Optional[int] = ...) -> None: ...

class Declined(_message.Message):
    __slots__ = ("kind", "round", "step")
    KIND_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    kind: str
    round: int
    step: int
    def __init__(self, kind: _Optional[str] = ..., round: _Optional[int] = ..., step: _Optional[int] = ...) -> None: ...

class Abstain(_message.Message):
    __slots__ = ("round", "step")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    round: int
    step: int
    def __init__(self, round: _Optional[int] = ..., step: _Optional[int] = ...) -> None: ...

class ErrorReport(_message.Message):
    __slots__ = ("code",)
    CODE_FIELD_NUMBER: _ClassVar[int]
    code: str
    def __init__(self, code: _Optional[str] = ...) -> None: ...

class Checkpoint(_message.Message):
    __slots__ = ("note", "previous_size", "consistency", "cosigned_note", "peers", "countersigned")
    NOTE_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_SIZE_FIELD_NUMBER: _ClassVar[int]
    CONSISTENCY_FIELD_NUMBER: _ClassVar[int]
    COSIGNED_NOTE_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    COUNTERSIGNED_FIELD_NUMBER: _ClassVar[int]
    note: str
    previous_size: int
    consistency: _containers.RepeatedScalarFieldContainer[bytes]
    cosigned_note: str
    peers: _containers.RepeatedCompositeFieldContainer[PeerLog]
    countersigned: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, note: _Optional[str] = ..., previous_size: _Optional[int] = ..., consistency: _Optional[_Iterable[bytes]] = ..., cosigned_note: _Optional[str] = ..., peers: _Optional[_Iterable[_Union[PeerLog, _Mapping]]] = ..., countersigned: _Optional[_Iterable[str]] = ...) -> None: ...

class PeerLog(_message.Message):
    __slots__ = ("certificate_pem", "steps")
    CERTIFICATE_PEM_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    certificate_pem: str
    steps: _containers.RepeatedCompositeFieldContainer[LogStep]
    def __init__(self, certificate_pem: _Optional[str] = ..., steps: _Optional[_Iterable[_Union[LogStep, _Mapping]]] = ...) -> None: ...

class LogStep(_message.Message):
    __slots__ = ("note", "previous_size", "consistency")
    NOTE_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_SIZE_FIELD_NUMBER: _ClassVar[int]
    CONSISTENCY_FIELD_NUMBER: _ClassVar[int]
    note: str
    previous_size: int
    consistency: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, note: _Optional[str] = ..., previous_size: _Optional[int] = ..., consistency: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Factors(_message.Message):
    __slots__ = ("base_digest", "schema_sha256", "rank", "scale", "dtype", "tensors")
    BASE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_SHA256_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    SCALE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    base_digest: str
    schema_sha256: str
    rank: int
    scale: float
    dtype: str
    tensors: _containers.RepeatedCompositeFieldContainer[TensorEntry]
    def __init__(self, base_digest: _Optional[str] = ..., schema_sha256: _Optional[str] = ..., rank: _Optional[int] = ..., scale: _Optional[float] = ..., dtype: _Optional[str] = ..., tensors: _Optional[_Iterable[_Union[TensorEntry, _Mapping]]] = ...) -> None: ...

class TensorEntry(_message.Message):
    __slots__ = ("name", "shape")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ...) -> None: ...

class Response(_message.Message):
    __slots__ = ("text", "finish")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    text: str
    finish: Finish
    def __init__(self, text: _Optional[str] = ..., finish: _Optional[_Union[Finish, str]] = ...) -> None: ...

class PromptResponses(_message.Message):
    __slots__ = ("prompt_index", "samples", "responses")
    PROMPT_INDEX_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    RESPONSES_FIELD_NUMBER: _ClassVar[int]
    prompt_index: int
    samples: int
    responses: _containers.RepeatedCompositeFieldContainer[Response]
    def __init__(self, prompt_index: _Optional[int] = ..., samples: _Optional[int] = ..., responses: _Optional[_Iterable[_Union[Response, _Mapping]]] = ...) -> None: ...

class PublicResponses(_message.Message):
    __slots__ = ("public_set_sha256", "prompts")
    PUBLIC_SET_SHA256_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    public_set_sha256: str
    prompts: _containers.RepeatedCompositeFieldContainer[PromptResponses]
    def __init__(self, public_set_sha256: _Optional[str] = ..., prompts: _Optional[_Iterable[_Union[PromptResponses, _Mapping]]] = ...) -> None: ...

class Metric(_message.Message):
    __slots__ = ("name", "topic", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    topic: str
    value: float
    def __init__(self, name: _Optional[str] = ..., topic: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...

class MetricsEval(_message.Message):
    __slots__ = ("split", "adapter_digest", "metrics")
    SPLIT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    split: str
    adapter_digest: str
    metrics: _containers.RepeatedCompositeFieldContainer[Metric]
    def __init__(self, split: _Optional[str] = ..., adapter_digest: _Optional[str] = ..., metrics: _Optional[_Iterable[_Union[Metric, _Mapping]]] = ...) -> None: ...

class QuestionScore(_message.Message):
    __slots__ = ("question", "matched")
    QUESTION_FIELD_NUMBER: _ClassVar[int]
    MATCHED_FIELD_NUMBER: _ClassVar[int]
    question: int
    matched: int
    def __init__(self, question: _Optional[int] = ..., matched: _Optional[int] = ...) -> None: ...

class CompetenceScore(_message.Message):
    __slots__ = ("exemplar_set_sha256", "scores")
    EXEMPLAR_SET_SHA256_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    exemplar_set_sha256: str
    scores: _containers.RepeatedCompositeFieldContainer[QuestionScore]
    def __init__(self, exemplar_set_sha256: _Optional[str] = ..., scores: _Optional[_Iterable[_Union[QuestionScore, _Mapping]]] = ...) -> None: ...

class ExemplarAnswer(_message.Message):
    __slots__ = ("exemplar", "answer")
    EXEMPLAR_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    exemplar: int
    answer: Response
    def __init__(self, exemplar: _Optional[int] = ..., answer: _Optional[_Union[Response, _Mapping]] = ...) -> None: ...

class CompetenceAnswers(_message.Message):
    __slots__ = ("exemplar_set_sha256", "answers")
    EXEMPLAR_SET_SHA256_FIELD_NUMBER: _ClassVar[int]
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    exemplar_set_sha256: str
    answers: _containers.RepeatedCompositeFieldContainer[ExemplarAnswer]
    def __init__(self, exemplar_set_sha256: _Optional[str] = ..., answers: _Optional[_Iterable[_Union[ExemplarAnswer, _Mapping]]] = ...) -> None: ...

class QuestionRewards(_message.Message):
    __slots__ = ("question", "rewards", "abstained")
    QUESTION_FIELD_NUMBER: _ClassVar[int]
    REWARDS_FIELD_NUMBER: _ClassVar[int]
    ABSTAINED_FIELD_NUMBER: _ClassVar[int]
    question: int
    rewards: _containers.RepeatedScalarFieldContainer[float]
    abstained: bool
    def __init__(self, question: _Optional[int] = ..., rewards: _Optional[_Iterable[float]] = ..., abstained: _Optional[bool] = ...) -> None: ...

class RewardScalar(_message.Message):
    __slots__ = ("questions",)
    QUESTIONS_FIELD_NUMBER: _ClassVar[int]
    questions: _containers.RepeatedCompositeFieldContainer[QuestionRewards]
    def __init__(self, questions: _Optional[_Iterable[_Union[QuestionRewards, _Mapping]]] = ...) -> None: ...

class ProfileVector(_message.Message):
    __slots__ = ("family", "dynamic", "histogram")
    FAMILY_FIELD_NUMBER: _ClassVar[int]
    DYNAMIC_FIELD_NUMBER: _ClassVar[int]
    HISTOGRAM_FIELD_NUMBER: _ClassVar[int]
    family: int
    dynamic: _containers.RepeatedScalarFieldContainer[float]
    histogram: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, family: _Optional[int] = ..., dynamic: _Optional[_Iterable[float]] = ..., histogram: _Optional[_Iterable[int]] = ...) -> None: ...

class BanditReward(_message.Message):
    __slots__ = ("match", "value")
    MATCH_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    match: int
    value: float
    def __init__(self, match: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...

class PackageEntry(_message.Message):
    __slots__ = ("prompt_index", "answer", "confidence")
    PROMPT_INDEX_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    CONFIDENCE_FIELD_NUMBER: _ClassVar[int]
    prompt_index: int
    answer: Response
    confidence: float
    def __init__(self, prompt_index: _Optional[int] = ..., answer: _Optional[_Union[Response, _Mapping]] = ..., confidence: _Optional[float] = ...) -> None: ...

class KnowledgePackage(_message.Message):
    __slots__ = ("transfer_set_sha256", "match", "peer", "entries")
    TRANSFER_SET_SHA256_FIELD_NUMBER: _ClassVar[int]
    MATCH_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    transfer_set_sha256: str
    match: int
    peer: str
    entries: _containers.RepeatedCompositeFieldContainer[PackageEntry]
    def __init__(self, transfer_set_sha256: _Optional[str] = ..., match: _Optional[int] = ..., peer: _Optional[str] = ..., entries: _Optional[_Iterable[_Union[PackageEntry, _Mapping]]] = ...) -> None: ...

class PublicRewards(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DiagDrift(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CountExamples(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Ack(_message.Message):
    __slots__ = ("acknowledged_sequence", "pending", "checkpoints", "record", "paused")
    ACKNOWLEDGED_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    PENDING_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    acknowledged_sequence: int
    pending: bool
    checkpoints: bool
    record: int
    paused: bool
    def __init__(self, acknowledged_sequence: _Optional[int] = ..., pending: _Optional[bool] = ..., checkpoints: _Optional[bool] = ..., record: _Optional[int] = ..., paused: _Optional[bool] = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("code", "field", "expected", "got")
    CODE_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    GOT_FIELD_NUMBER: _ClassVar[int]
    code: str
    field: str
    expected: str
    got: str
    def __init__(self, code: _Optional[str] = ..., field: _Optional[str] = ..., expected: _Optional[str] = ..., got: _Optional[str] = ...) -> None: ...

class RunPlan(_message.Message):
    __slots__ = ("canonical_json",)
    CANONICAL_JSON_FIELD_NUMBER: _ClassVar[int]
    canonical_json: str
    def __init__(self, canonical_json: _Optional[str] = ...) -> None: ...

class PublicStep(_message.Message):
    __slots__ = ("step", "prompt_indices")
    STEP_FIELD_NUMBER: _ClassVar[int]
    PROMPT_INDICES_FIELD_NUMBER: _ClassVar[int]
    step: int
    prompt_indices: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, step: _Optional[int] = ..., prompt_indices: _Optional[_Iterable[int]] = ...) -> None: ...

class RoundOpen(_message.Message):
    __slots__ = ("base_digest", "public_steps", "transcript", "transcript_signature")
    BASE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_STEPS_FIELD_NUMBER: _ClassVar[int]
    TRANSCRIPT_FIELD_NUMBER: _ClassVar[int]
    TRANSCRIPT_SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    base_digest: str
    public_steps: _containers.RepeatedCompositeFieldContainer[PublicStep]
    transcript: str
    transcript_signature: bytes
    def __init__(self, base_digest: _Optional[str] = ..., public_steps: _Optional[_Iterable[_Union[PublicStep, _Mapping]]] = ..., transcript: _Optional[str] = ..., transcript_signature: _Optional[bytes] = ...) -> None: ...

class Countersignature(_message.Message):
    __slots__ = ("silo", "transcript_sha256", "signature", "certificate_pem")
    SILO_FIELD_NUMBER: _ClassVar[int]
    TRANSCRIPT_SHA256_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_PEM_FIELD_NUMBER: _ClassVar[int]
    silo: str
    transcript_sha256: str
    signature: bytes
    certificate_pem: str
    def __init__(self, silo: _Optional[str] = ..., transcript_sha256: _Optional[str] = ..., signature: _Optional[bytes] = ..., certificate_pem: _Optional[str] = ...) -> None: ...

class RoundAgreed(_message.Message):
    __slots__ = ("transcript_sha256", "countersignatures")
    TRANSCRIPT_SHA256_FIELD_NUMBER: _ClassVar[int]
    COUNTERSIGNATURES_FIELD_NUMBER: _ClassVar[int]
    transcript_sha256: str
    countersignatures: _containers.RepeatedCompositeFieldContainer[Countersignature]
    def __init__(self, transcript_sha256: _Optional[str] = ..., countersignatures: _Optional[_Iterable[_Union[Countersignature, _Mapping]]] = ...) -> None: ...

class Donor(_message.Message):
    __slots__ = ("origin", "position", "response")
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    origin: str
    position: int
    response: Response
    def __init__(self, origin: _Optional[str] = ..., position: _Optional[int] = ..., response: _Optional[_Union[Response, _Mapping]] = ...) -> None: ...

class PromptDonors(_message.Message):
    __slots__ = ("prompt_index", "donors")
    PROMPT_INDEX_FIELD_NUMBER: _ClassVar[int]
    DONORS_FIELD_NUMBER: _ClassVar[int]
    prompt_index: int
    donors: _containers.RepeatedCompositeFieldContainer[Donor]
    def __init__(self, prompt_index: _Optional[int] = ..., donors: _Optional[_Iterable[_Union[Donor, _Mapping]]] = ...) -> None: ...

class PublicDonors(_message.Message):
    __slots__ = ("prompts",)
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    prompts: _containers.RepeatedCompositeFieldContainer[PromptDonors]
    def __init__(self, prompts: _Optional[_Iterable[_Union[PromptDonors, _Mapping]]] = ...) -> None: ...

class RoundResult(_message.Message):
    __slots__ = ("committed", "adapter_digest", "participants", "transcript_sha256", "verdicts", "result_signature", "closed", "results")
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    PARTICIPANTS_FIELD_NUMBER: _ClassVar[int]
    TRANSCRIPT_SHA256_FIELD_NUMBER: _ClassVar[int]
    VERDICTS_FIELD_NUMBER: _ClassVar[int]
    RESULT_SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    committed: bool
    adapter_digest: str
    participants: _containers.RepeatedScalarFieldContainer[str]
    transcript_sha256: str
    verdicts: _containers.RepeatedCompositeFieldContainer[SiloVerdict]
    result_signature: bytes
    closed: bool
    results: _containers.RepeatedCompositeFieldContainer[ResultOfSilo]
    def __init__(self, committed: _Optional[bool] = ..., adapter_digest: _Optional[str] = ..., participants: _Optional[_Iterable[str]] = ..., transcript_sha256: _Optional[str] = ..., verdicts: _Optional[_Iterable[_Union[SiloVerdict, _Mapping]]] = ..., result_signature: _Optional[bytes] = ..., closed: _Optional[bool] = ..., results: _Optional[_Iterable[_Union[ResultOfSilo, _Mapping]]] = ...) -> None: ...

class ResultOfSilo(_message.Message):
    __slots__ = ("receiver", "adapter_digest", "participants")
    RECEIVER_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    PARTICIPANTS_FIELD_NUMBER: _ClassVar[int]
    receiver: str
    adapter_digest: str
    participants: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, receiver: _Optional[str] = ..., adapter_digest: _Optional[str] = ..., participants: _Optional[_Iterable[str]] = ...) -> None: ...

class SiloVerdict(_message.Message):
    __slots__ = ("silo", "verdict")
    SILO_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    silo: str
    verdict: str
    def __init__(self, silo: _Optional[str] = ..., verdict: _Optional[str] = ...) -> None: ...

class RunEnd(_message.Message):
    __slots__ = ("outcome", "adapter_digest")
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    outcome: str
    adapter_digest: str
    def __init__(self, outcome: _Optional[str] = ..., adapter_digest: _Optional[str] = ...) -> None: ...

class QuestionExemplars(_message.Message):
    __slots__ = ("question", "exemplars")
    QUESTION_FIELD_NUMBER: _ClassVar[int]
    EXEMPLARS_FIELD_NUMBER: _ClassVar[int]
    question: int
    exemplars: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, question: _Optional[int] = ..., exemplars: _Optional[_Iterable[int]] = ...) -> None: ...

class CompetenceAsk(_message.Message):
    __slots__ = ("exemplar_set_sha256", "questions")
    EXEMPLAR_SET_SHA256_FIELD_NUMBER: _ClassVar[int]
    QUESTIONS_FIELD_NUMBER: _ClassVar[int]
    exemplar_set_sha256: str
    questions: _containers.RepeatedCompositeFieldContainer[QuestionExemplars]
    def __init__(self, exemplar_set_sha256: _Optional[str] = ..., questions: _Optional[_Iterable[_Union[QuestionExemplars, _Mapping]]] = ...) -> None: ...

class QuestionCandidates(_message.Message):
    __slots__ = ("question", "candidates")
    QUESTION_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    question: int
    candidates: _containers.RepeatedCompositeFieldContainer[Response]
    def __init__(self, question: _Optional[int] = ..., candidates: _Optional[_Iterable[_Union[Response, _Mapping]]] = ...) -> None: ...

class RewardAsk(_message.Message):
    __slots__ = ("question_set_sha256", "questions")
    QUESTION_SET_SHA256_FIELD_NUMBER: _ClassVar[int]
    QUESTIONS_FIELD_NUMBER: _ClassVar[int]
    question_set_sha256: str
    questions: _containers.RepeatedCompositeFieldContainer[QuestionCandidates]
    def __init__(self, question_set_sha256: _Optional[str] = ..., questions: _Optional[_Iterable[_Union[QuestionCandidates, _Mapping]]] = ...) -> None: ...

class MatchDirective(_message.Message):
    __slots__ = ("match", "peer", "part")
    MATCH_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    match: int
    peer: str
    part: str
    def __init__(self, match: _Optional[int] = ..., peer: _Optional[str] = ..., part: _Optional[str] = ...) -> None: ...
