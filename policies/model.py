"""The closed schema of a policy file (threat model 4) as pydantic models.

Every limit is required unless it has a strictest default; nothing is an expression. The coordinator's charter has the
same schema. A key stands here only when a rule in `policies/rules` enforces it. Each field's type carries the order
(policies/lattice.py) by which two files compare.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)

from fedsilo.protocol.freezing import Freeze
from fedsilo.protocol.isolation import ISOLATION_LEVELS, IsolationLevel
from fedsilo.protocol.kinds import UPDATE_KINDS
from policies import lattice
from policies.fields import (
    Approvals,
    Closed,
    Demand,
    FloatRange,
    Integer,
    Label,
    Least,
    Limit,
    MetricField,
    NormLimit,
    Pinned,
    PinnedNumber,
    PinnedText,
    PositiveLimit,
    Range,
    Sha256,
    ShareLimit,
    SpiffeId,
    Text,
    UtcTime,
    plain_integer,
)
from policies.model_audit import Audit, Retention
from policies.model_kinds import KindsIn, KindsOut
from policies.model_screens import HitsPerDay, ScreenNames, TextScreens

MANTISSA_BITS = {"float32": 23, "bfloat16": 7}  # stored ones
MIN_UPDATES = 2  # with one update in it, the global adapter is that silo's own
UNLIMITED = 2**52 - 1  # the largest number that a policy may say
CLIP_MARGIN = 1 + 2**-6  # rounding to bfloat16 may move a clipped norm up by this factor at most


class Trainer(Closed):
    least_isolation: Annotated[IsolationLevel, lattice.ladder(*ISOLATION_LEVELS)]


class Federation(Closed):
    id: PinnedText
    coordinator: Annotated[SpiffeId, lattice.SAME]
    coordinator_key_sha256: Annotated[tuple[Sha256, ...], Field(min_length=1), lattice.INTERSECTION]
    peers: Annotated[tuple[SpiffeId, ...], Field(min_length=1), lattice.INTERSECTION]
    min_peers: Annotated[
        Least, Field(description="above half of a plan's silos, no two groups agree on two transcripts of one round")
    ]
    min_updates: Annotated[
        Least,
        Field(
            description="an update of this site enters no mean over fewer; 1 where there is one silo, also by default",
            validate_default=True,
        ),
    ] = MIN_UPDATES

    @field_validator("min_updates")
    @classmethod
    def _of_one_silo(cls, count: int, found: ValidationInfo) -> int:
        """One silo gives one update. Here and not in `load`, so that it holds for what two policies have in common."""
        return 1 if count == MIN_UPDATES and len(found.data.get("peers", ())) == 1 else count

    @model_serializer(mode="wrap")
    def _as_before(self, fields: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without what a file need not say: a policy that never spoke of it keeps its digest."""
        content: dict[str, Any] = fields(self)
        if self.min_updates == min(MIN_UPDATES, len(self.peers)):
            del content["min_updates"]
        return content


class Valid(Closed):
    from_: Annotated[UtcTime, lattice.LATEST] = Field(alias="from")
    until: Annotated[UtcTime, lattice.EARLIEST]


class Budgets(Closed):
    message_bytes: Limit
    control_message_bytes: Limit
    round_bytes: Limit
    day_bytes: Limit
    messages_per_minute: Limit
    control_messages_per_minute: Limit
    polls_per_minute: Limit


class ModelPins(Closed):
    base_model_sha256: Pinned
    tokenizer_sha256: Pinned
    template_sha256: Pinned


class SchemaPin(Closed):
    file: Label
    sha256: Pinned
    base_model_sha256: Pinned
    rank: PinnedNumber
    dtype: Annotated[Literal["float32", "bfloat16"], lattice.SAME]
    freeze: Annotated[Freeze, lattice.SAME] = "none"  # A: only B is trained and leaves, as lora.factor_b


class SetPin(Closed):
    file: Label
    sha256: Pinned
    rows: PinnedNumber
    licence: Label = ""


class PublicSetPin(SetPin):
    programs: Annotated[
        Literal["refuse", "sandbox"],
        lattice.ladder("refuse", "sandbox"),
        Field(description="sandbox: answers of other silos' models may be run here as programs, in a sandbox"),
    ] = "refuse"


class Quantise(Closed):
    grid: Annotated[Literal["float32", "bfloat16"], lattice.ladder("bfloat16", "float32")]


class LoraFactors(Closed):
    """An update of adapter factors. What is not said of its training is denied: absent, `min_records` is more than any
    site has, and `max_local_epochs` and `max_steps` are 0.

    Attributes:
        randomise_low_bits: of each value's mantissa, after rounding; the lowest of it are overwritten by random bits.
            More than the grid's mantissa has means the whole of it. Absent: none.
        min_records: distinct private records that a round which trains on any must have been given.
        max_local_epochs: how often a record may have been given in the round.
        max_steps: private and public steps of the round.
    """

    schema_name: PinnedText = Field(alias="schema")
    clip_l2: NormLimit
    max_l2: NormLimit
    max_tensor_l2: NormLimit
    max_total_l2: NormLimit
    quantise: Quantise
    randomise_low_bits: Annotated[Integer, Field(le=MANTISSA_BITS["float32"]), lattice.LARGEST] = 0
    min_records: Least = UNLIMITED
    max_local_epochs: Limit = 0
    max_steps: Limit = 0
    per_round: Limit
    secure_aggregation: Annotated[Literal["allowed", "forbidden"], lattice.ladder("forbidden", "allowed")]
    approvals: Approvals

    @model_validator(mode="after")
    def _room_for_rounding(self) -> LoraFactors:
        if self.max_l2 < self.clip_l2 * CLIP_MARGIN:
            raise ValueError(f"max_l2 must be at least clip_l2 x (1 + 2**-6) = {self.clip_l2 * CLIP_MARGIN:g}")
        return self


class Generation(Closed):
    max_new_tokens: Limit
    samples_per_prompt: Limit


class PublicResponses(Closed):
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
    max_bytes_per_day: Annotated[Limit, Field(description="absent: as many as the budgets let through")] = UNLIMITED
    send_only_verified: Demand
    screens: ScreenNames = ()
    on_hit: Annotated[Literal["withhold", "hold"], lattice.ladder("withhold", "hold")] = "withhold"
    max_hits_per_day: HitsPerDay = None
    approvals: Approvals

    @model_serializer(mode="wrap")
    def _as_before(self, fields: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without what a file need not say: a policy that never spoke of it keeps its digest."""
        content: dict[str, Any] = fields(self)
        if self.max_bytes_per_day == UNLIMITED:
            del content["max_bytes_per_day"]
        return content


class MetricsEval(Closed):
    splits: Annotated[tuple[Literal["held_out"], ...], lattice.INTERSECTION]
    fields: dict[str, MetricField]
    topics: Annotated[tuple[Text, ...], lattice.INTERSECTION]
    per_round: Limit


class OutboundControl(Closed):
    kinds: Annotated[
        tuple[
            Literal["hello", "poll", "fetch", "heartbeat", "progress", "declined", "abstain", "error", "checkpoint"],
            ...,
        ],
        lattice.INTERSECTION,
    ]


class InboundControl(Closed):
    kinds: Annotated[tuple[Literal["ack", "refusal", "checkpoint"], ...], lattice.INTERSECTION]


class Egress(KindsOut):
    """A kind that is absent is denied."""

    lora_factors: LoraFactors | None = Field(None, alias="lora.factors")
    lora_factor_a: LoraFactors | None = Field(None, alias="lora.factor_a")
    lora_factor_b: LoraFactors | None = Field(None, alias="lora.factor_b")
    lora_core_r: LoraFactors | None = Field(None, alias="lora.core_r")
    public_responses: PublicResponses | None = Field(None, alias="public.responses")
    metrics_eval: MetricsEval | None = Field(None, alias="metrics.eval")
    control: OutboundControl | None = None

    @property
    def updates(self) -> dict[str, LoraFactors]:
        """Blocks of the adapter updates that may leave, by kind."""
        blocks = {kind: getattr(self, kind.replace(".", "_")) for kind in sorted(UPDATE_KINDS)}
        return {kind: block for kind, block in blocks.items() if block is not None}


class RunPlan(Closed):
    rounds: Range
    local_steps: Range
    prompts_per_step: Range
    samples_per_prompt: Range
    max_new_tokens: Range
    temperature: FloatRange
    learning_rate: FloatRange
    approvals: Approvals


class RoundOpen(Closed):
    set: PinnedText
    max_prompts_per_step: Limit


class GlobalAdapter(Closed):
    """Attributes:
    max_l2: of the whole adapter.
    max_step_l2: of what changed in it since the last one that was let in, for each round in between.
    """

    schema_name: PinnedText = Field(alias="schema")
    max_l2: NormLimit
    max_step_l2: NormLimit


class PublicDonors(Closed):
    set: PinnedText
    verify_locally: Demand
    max_donors_per_prompt: Limit
    max_bytes_per_response: Limit
    max_share_per_peer: ShareLimit = 1.0  # of all answers that a public step trains on; absent: no peer is limited
    screens: ScreenNames = ()


class Announcement(Closed):
    """round.agreed, round.result and run.end carry digests, names and signatures only; naming the kind is all there is
    to say."""


class Ingress(KindsIn):
    run_plan: RunPlan | None = Field(None, alias="run.plan")
    round_open: RoundOpen | None = Field(None, alias="round.open")
    global_adapter: GlobalAdapter | None = Field(None, alias="global.adapter")
    public_donors: PublicDonors | None = Field(None, alias="public.donors")
    round_agreed: Announcement | None = Field(None, alias="round.agreed")
    round_result: Announcement | None = Field(None, alias="round.result")
    run_end: Announcement | None = Field(None, alias="run.end")
    control: InboundControl | None = None


class SiteApprovals(Closed):
    """Persons that a change at this site takes, and how long what waits for them waits (threats T34, T36).

    Attributes:
        policy_change: approvers, none of them the proposer, before a looser policy may come into force.
        release_after_halt: approvers before a kind that its screens halted may leave again.
        expiry_hours: after which a held release is denied, and a proposed policy needs its signatures anew.
    """

    policy_change: Least
    release_after_halt: Least
    expiry_hours: PositiveLimit


class PolicyFile(Closed):
    policy_version: Annotated[Literal[1], BeforeValidator(plain_integer), lattice.SAME]
    name: Label
    mode: Annotated[Literal["enforce", "shadow"], lattice.ladder("shadow", "enforce")]
    trainer: Trainer
    federation: Federation
    valid: Valid
    budgets: Budgets
    model: ModelPins
    lora_schemas: dict[str, SchemaPin]
    public_sets: dict[str, PublicSetPin]
    held_out: Annotated[SetPin | None, lattice.PIN] = None  # absent: any held-out set
    egress: Egress
    ingress: Ingress
    text_screens: TextScreens = Field(default_factory=TextScreens)
    approvals: SiteApprovals
    audit: Audit = Audit()
    retention: Retention = Retention()
