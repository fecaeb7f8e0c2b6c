"""The closed schema of a policy file (threat model 4) as pydantic models.

Every limit is required unless it has a strictest default; nothing is an expression. The coordinator's charter has the
same schema. A key stands here only when a rule in `policies/rules` enforces it. Each field's type carries the order
(policies/lattice.py) by which two files compare.
"""

from __future__ import annotations

import calendar
import re
import time
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from fedsilo.treaty.isolation import RUNGS, Rung
from policies import lattice

CLIP_MARGIN = 1 + 2**-6  # rounding to bfloat16 may move a clipped norm up by this factor at most

_SPIFFE = re.compile(r"spiffe://[a-z][a-z0-9_-]{0,62}/(silo|coordinator)/[a-z][a-z0-9_-]{0,62}")
_UTC = re.compile(r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}Z")


def _plain_integer(value: Any) -> Any:
    # Lax validation would take "5", 5.0 and true for 5.
    if type(value) is not int:
        raise ValueError("must be a whole number without unit or quotes")
    return value


def _plain_number(value: Any) -> Any:
    if type(value) not in (int, float):
        raise ValueError("must be a number without unit or quotes")
    if value != value or value in (float("inf"), float("-inf")):
        raise ValueError("must be finite")
    return value


def _plain_text(value: Any) -> Any:
    if not isinstance(value, str):
        raise ValueError("must be text; quote it")
    return value


def _plain_boolean(value: Any) -> Any:
    if type(value) is not bool:
        raise ValueError("must be true or false")
    return value


def _ascending(value: tuple[float, float]) -> tuple[float, float]:
    if value[0] > value[1]:
        raise ValueError("the first number of a range is the smaller one")
    return value


def _spiffe(value: str) -> str:
    if not _SPIFFE.fullmatch(value):
        raise ValueError("must look like spiffe://FEDERATION/silo/NAME or spiffe://FEDERATION/coordinator/NAME")
    return value


def _utc(value: str) -> str:
    if not _UTC.fullmatch(value):
        raise ValueError('must look like "2027-06-01T00:00:00Z"')
    time.strptime(value, "%Y-%m-%dT%H:%M:%SZ")
    return value


def epoch_seconds(utc: str) -> int:
    return calendar.timegm(time.strptime(utc, "%Y-%m-%dT%H:%M:%SZ"))


Integer = Annotated[int, BeforeValidator(_plain_integer), Field(ge=0, le=2**53)]
Positive = Annotated[int, BeforeValidator(_plain_integer), Field(ge=1, le=2**53)]
Number = Annotated[float, BeforeValidator(_plain_number)]
NotNegative = Annotated[float, BeforeValidator(_plain_number), Field(ge=0)]
Boolean = Annotated[bool, BeforeValidator(_plain_boolean)]
Text = Annotated[str, BeforeValidator(_plain_text), Field(max_length=256)]
Sha256 = Annotated[str, BeforeValidator(_plain_text), Field(pattern=r"^[0-9a-f]{64}$")]
SpiffeId = Annotated[str, BeforeValidator(_plain_text), AfterValidator(_spiffe)]
UtcTime = Annotated[str, BeforeValidator(_plain_text), AfterValidator(_utc)]
IntegerRange = Annotated[tuple[Integer, Integer], AfterValidator(_ascending)]
NumberRange = Annotated[tuple[Number, Number], AfterValidator(_ascending)]


# The same with the order in which they tighten: a largest allowed number, a smallest required one, and so on.
Limit = Annotated[Integer, lattice.SMALLEST]
PositiveLimit = Annotated[Positive, lattice.SMALLEST]
NormLimit = Annotated[NotNegative, lattice.SMALLEST]
Least = Annotated[Positive, lattice.LARGEST]
Pinned = Annotated[Sha256, lattice.SAME]
PinnedText = Annotated[Text, lattice.SAME]
PinnedNumber = Annotated[Positive, lattice.SAME]
Label = Annotated[Text, lattice.LABEL]
Range = Annotated[IntegerRange, lattice.OVERLAP]
FloatRange = Annotated[NumberRange, lattice.OVERLAP]
Demand = Annotated[Boolean, lattice.BOTH]


class _Closed(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=False)


class Trainer(_Closed):
    least_isolation: Annotated[Rung, lattice.ladder(*RUNGS)]


class Federation(_Closed):
    id: PinnedText
    coordinator: Annotated[SpiffeId, lattice.SAME]
    coordinator_key_sha256: Annotated[tuple[Sha256, ...], Field(min_length=1), lattice.INTERSECTION]
    peers: Annotated[tuple[SpiffeId, ...], Field(min_length=1), lattice.INTERSECTION]
    min_peers: Least


class Valid(_Closed):
    from_: Annotated[UtcTime, lattice.LATEST] = Field(alias="from")
    until: Annotated[UtcTime, lattice.EARLIEST]


class Budgets(_Closed):
    message_bytes: Limit
    control_message_bytes: Limit
    round_bytes: Limit
    day_bytes: Limit
    messages_per_minute: Limit
    control_messages_per_minute: Limit
    polls_per_minute: Limit


class ModelPins(_Closed):
    base_model_sha256: Pinned
    tokenizer_sha256: Pinned
    template_sha256: Pinned


class SchemaPin(_Closed):
    file: Label
    sha256: Pinned
    base_model_sha256: Pinned
    rank: PinnedNumber
    dtype: Annotated[Literal["float32", "bfloat16"], lattice.SAME]


class SetPin(_Closed):
    file: Label
    sha256: Pinned
    rows: PinnedNumber
    licence: Label = ""


class Approvals(_Closed):
    """first_rounds: rounds 1..n wait for people; then: so do rounds n, 2n, 3n, ...; 0 is none."""

    first_rounds: Integer
    then: Integer  # ordered together with first_rounds: lattice.rhythm
    persons: Least
    roles: Annotated[
        tuple[Literal["approver", "site-admin", "operator"], ...], Field(min_length=1), lattice.INTERSECTION
    ]


class Quantise(_Closed):
    grid: Annotated[Literal["float32", "bfloat16"], lattice.ladder("bfloat16", "float32")]


class LoraFactors(_Closed):
    schema_name: PinnedText = Field(alias="schema")
    clip_l2: NormLimit
    max_l2: NormLimit
    max_tensor_l2: NormLimit
    max_total_l2: NormLimit
    quantise: Quantise
    per_round: Limit
    secure_aggregation: Annotated[Literal["allowed", "forbidden"], lattice.ladder("forbidden", "allowed")]
    approvals: Approvals

    @model_validator(mode="after")
    def _room_for_rounding(self) -> LoraFactors:
        if self.max_l2 < self.clip_l2 * CLIP_MARGIN:
            raise ValueError(f"max_l2 must be at least clip_l2 x (1 + 2**-6) = {self.clip_l2 * CLIP_MARGIN:g}")
        return self


class Generation(_Closed):
    max_new_tokens: Limit
    samples_per_prompt: Limit


class PublicResponses(_Closed):
    set: PinnedText
    content: Annotated[Literal["full_text"], lattice.SAME]
    logprobs: Annotated[Literal["none"], lattice.SAME]
    generation: Generation
    max_prompts_per_step: Limit
    max_responses_per_step: Limit
    max_responses_per_round: Limit
    max_tokens_per_step: Limit
    max_tokens_per_round: Limit
    max_bytes_per_response: Limit
    max_bytes_per_step: Limit
    max_bytes_per_round: Limit
    send_only_verified: Demand
    approvals: Approvals


class MetricField(_Closed):
    min: Annotated[Number, lattice.LARGEST]
    max: Annotated[Number, lattice.SMALLEST]
    quantum: Annotated[float, BeforeValidator(_plain_number), Field(gt=0), lattice.MULTIPLE]


class MetricsEval(_Closed):
    splits: Annotated[tuple[Literal["held_out"], ...], lattice.INTERSECTION]
    fields: dict[str, MetricField]
    topics: Annotated[tuple[Text, ...], lattice.INTERSECTION]
    per_round: Limit


class OutboundControl(_Closed):
    kinds: Annotated[
        tuple[
            Literal["hello", "poll", "fetch", "heartbeat", "progress", "declined", "abstain", "error", "checkpoint"],
            ...,
        ],
        lattice.INTERSECTION,
    ]


class InboundControl(_Closed):
    kinds: Annotated[tuple[Literal["ack", "refusal", "checkpoint"], ...], lattice.INTERSECTION]


class Egress(_Closed):
    """A kind that is absent is denied."""

    lora_factors: LoraFactors | None = Field(None, alias="lora.factors")
    public_responses: PublicResponses | None = Field(None, alias="public.responses")
    metrics_eval: MetricsEval | None = Field(None, alias="metrics.eval")
    control: OutboundControl | None = None


class RunPlan(_Closed):
    rounds: Range
    local_steps: Range
    prompts_per_step: Range
    samples_per_prompt: Range
    max_new_tokens: Range
    temperature: FloatRange
    learning_rate: FloatRange
    approvals: Approvals


class RoundOpen(_Closed):
    set: PinnedText
    max_prompts_per_step: Limit


class GlobalAdapter(_Closed):
    schema_name: PinnedText = Field(alias="schema")
    max_l2: NormLimit


class PublicDonors(_Closed):
    set: PinnedText
    verify_locally: Demand
    max_donors_per_prompt: Limit
    max_bytes_per_response: Limit


class Announcement(_Closed):
    """round.result and run.end carry digests and names only; naming the kind is all there is to say."""


class Ingress(_Closed):
    run_plan: RunPlan | None = Field(None, alias="run.plan")
    round_open: RoundOpen | None = Field(None, alias="round.open")
    global_adapter: GlobalAdapter | None = Field(None, alias="global.adapter")
    public_donors: PublicDonors | None = Field(None, alias="public.donors")
    round_result: Announcement | None = Field(None, alias="round.result")
    run_end: Announcement | None = Field(None, alias="run.end")
    control: InboundControl | None = None


class PolicyFile(_Closed):
    policy_version: Annotated[Literal[1], BeforeValidator(_plain_integer), lattice.SAME]
    name: Label
    mode: Annotated[Literal["enforce", "shadow"], lattice.ladder("shadow", "enforce")]
    trainer: Trainer
    federation: Federation
    valid: Valid
    budgets: Budgets
    model: ModelPins
    lora_schemas: dict[str, SchemaPin]
    public_sets: dict[str, SetPin]
    held_out: Annotated[SetPin | None, lattice.PIN] = None  # absent: any held-out set
    egress: Egress
    ingress: Ingress
    approval_expiry_hours: PositiveLimit
