"""The closed schema of a policy file as pydantic models.

Every limit is required unless it has a strictest default; nothing is an expression. The coordinator's charter has the
same schema. A key stands here only when a rule in `policies/rules` enforces it. Each field's type carries the order
(policies/lattice.py) by which two files compare.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import (
    BeforeValidator,
    Field,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    field_validator,
    model_serializer,
)
from pydantic.json_schema import SkipJsonSchema

from fedsilo.protocol.codec import canonical_json, sha256_hex
from fedsilo.protocol.factors import Freeze
from fedsilo.protocol.isolation import ISOLATION_LEVELS, IsolationLevel
from fedsilo.protocol.kinds import UPDATE_KINDS
from fedsilo.protocol.strict_yaml import Path
from policies import lattice
from policies.custom_patterns import CustomFile
from policies.fields import (
    Closed,
    Demand,
    Grid,
    Integer,
    Label,
    Least,
    Limit,
    Pinned,
    PinnedNumber,
    PinnedText,
    PositiveLimit,
    Sha256,
    SpiffeId,
    Text,
    UtcTime,
    epoch_seconds,
    is_zero,
    plain_integer,
    plain_number,
)

# Kinds that no method sends any more: null in a policy's digest and in what a ledger keeps of one, refused when a file
# names them, replayed when an old log has them. Their names and protobuf numbers are not given to another kind. Each
# with the kind behind which its null stands in a policy that is printed.
GONE = {
    "public.rewards": "reft.intervention",
    "diag.drift": "knowledge.package",
    "count.examples": "knowledge.package",
}


class _GoneError(ValueError):
    hint = "take the block out: nothing of that kind leaves or comes in"


def _gone(block: object) -> None:
    """Refuse a block of a kind that no method sends any more."""
    if block is not None:
        raise _GoneError("no method of this version sends this kind")


# Such a kind's block: null, as it was where no policy named the kind, so that such a policy is still the same.
Gone = Annotated[None, BeforeValidator(_gone), SkipJsonSchema()]


def without_gone(content: dict[str, Any]) -> dict[str, Any]:
    """A policy as an older version kept it, without its blocks of such kinds: to take one out only tightens."""
    return {**content, "egress": {**content.get("egress", {}), **dict.fromkeys(GONE)}}


class _PublicRewards(Closed):
    set: PinnedText
    max_prompts_per_step: Limit
    samples_per_prompt: Limit
    per_round: Limit


class _DiagDrift(Closed):
    fields: dict[str, Grid]
    per_round: Limit


class _CountExamples(Closed):
    values: Grid
    per_round: Limit


class GoneBlocks(Closed):
    """Such blocks of a policy that a site kept: they allow nothing, and are part of the digest that its log names."""

    public_rewards: _PublicRewards | None = Field(None, alias="public.rewards")
    diag_drift: _DiagDrift | None = Field(None, alias="diag.drift")
    count_examples: _CountExamples | None = Field(None, alias="count.examples")


NO_GONE_BLOCKS = GoneBlocks()


MIN_UPDATES = 2  # with one update in it, the global adapter is that silo's own
UNLIMITED = 2**52 - 1  # the largest number that a policy may say


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
    # of the base's shift, which a plan's `aggregate: fedex` or `flora` fills; 0: there is none
    shift_rank: Annotated[Integer, lattice.SAME, Field(exclude_if=is_zero)] = 0


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


class Side(Closed):
    """The blocks of one direction, by kind: `policies/kinds` makes one model of them for egress and one for ingress."""

    if TYPE_CHECKING:

        def __getattr__(self, kind: str) -> Any:
            """A kind's block, None where the policy does not name it."""

    def block(self, kind: str) -> Any:
        """A kind's block; None where the policy does not name it, or there is no such kind."""
        return getattr(self, kind.replace(".", "_"), None)

    @property
    def updates(self) -> dict[str, Any]:
        """Blocks of the adapter updates that may leave, by kind."""
        blocks = {kind: self.block(kind) for kind in sorted(UPDATE_KINDS)}
        return {kind: block for kind, block in blocks.items() if block is not None}


# ---- text_screens: how each text screen is set; that it runs, a kind's key `screens` says ---------
# A block that is present says how its screen is set; a message kind's key `screens` says that it runs. So a block can
# only tighten: of two files, the meet has every block that either has, with the tighter settings of both. A kind that
# names a screen without a block is denied. The screens are in policies/screens, with what each does not stop.

ScreenName = Literal["pii_basic", "overlap", "canary", "charset"]
# Screens that read the text alone: a party without private data can run them too, and what they find tells nothing of
# anybody's.
TextOnlyName = Literal["pii_basic", "charset"]
TEXT_ONLY: frozenset[ScreenName] = frozenset(get_args(TextOnlyName))
PatternName = Literal["email", "phone", "ssn_us", "nhs_number", "iban", "mrn_like", "date_of_birth", "street_address"]
Decoder = Literal["base64", "hex", "reversed", "rot13"]
Alphabet = Literal[
    "latin",
    "greek",
    "cyrillic",
    "arabic",
    "hebrew",
    "devanagari",
    "thai",
    "han",
    "hiragana",
    "katakana",
    "hangul",
    "digits",
    "punctuation",
    "math",
    "symbols",
]

GRAM_WORDS_MIN, GRAM_WORDS_MAX = 3, 64
FALSE_POSITIVE_RATE_MAX = 0.01
EDITS_MAX = 4


# The key `screens` of a kind; absent: no screen. Each name needs its definition in `text_screens`.
ScreenNames = Annotated[tuple[ScreenName, ...], lattice.UNION]
# The same of what comes in and is refused whole: a screen that knows private data would tell its sender of them (T18).
TextOnlyNames = Annotated[tuple[TextOnlyName, ...], lattice.UNION]
# The key `max_hits_per_day` of a kind that leaves; needed where screens are named.
HitsPerDay = Annotated[Integer | None, lattice.SMALLEST_STATED]


def is_none(value: Any) -> bool:
    return value is None


class PiiBasic(Closed):
    """Shipped patterns, and a site's own: the policy names their file, and has its content once it is read."""

    patterns: Annotated[tuple[PatternName, ...], Field(min_length=1), lattice.UNION]
    custom_file: Annotated[
        CustomFile | None,
        lattice.DEMANDED,
        Field(
            description="name of a file in the policy's own folder that ends in `.patterns.yaml`, with a site's own "
            "patterns; its content is part of the policy and of its digest; or `null`",
            # a policy without own patterns is the same whether it says so or not, and so is its digest
            exclude_if=is_none,
        ),
    ] = None


class Overlap(Closed):
    """Passages of `n` words in a row that the private corpus has too.

    n: where n words in a row match, so do any fewer of them, so a smaller n is tighter.
    false_positive_rate: of one n-gram that is in neither corpus nor background; a finer index withholds less by
        mistake, so what it lets through is more: the larger rate is the tighter one.
    background_set: a public set whose own passages do not count; none subtracts nothing.
    """

    unit: Annotated[Literal["word"], lattice.SAME]
    n: Annotated[int, BeforeValidator(plain_integer), Field(ge=GRAM_WORDS_MIN, le=GRAM_WORDS_MAX), lattice.SMALLEST]
    max_matching_ngrams: Limit
    background_set: Annotated[Text | None, lattice.EXEMPTION] = None
    false_positive_rate: Annotated[
        float, BeforeValidator(plain_number), Field(gt=0, le=FALSE_POSITIVE_RATE_MAX), lattice.LARGEST
    ]


class Canary(Closed):
    """Planted strings. decode lists what is undone besides what every screen undoes (policies/screens/normalise.py)."""

    max_edit_distance: Annotated[Integer, Field(le=EDITS_MAX), lattice.LARGEST]
    decode: Annotated[tuple[Decoder, ...], lattice.UNION]


class Charset(Closed):
    """Allowed characters, and the longest run of characters that are neither letters nor digits."""

    allow: Annotated[tuple[Alphabet, ...], lattice.INTERSECTION]
    max_run_nonword: Limit


class TextScreens(Closed):
    pii_basic: Annotated[PiiBasic | None, lattice.DEMANDED] = None
    overlap: Annotated[Overlap | None, lattice.DEMANDED] = None
    canary: Annotated[Canary | None, lattice.DEMANDED] = None
    charset: Annotated[Charset | None, lattice.DEMANDED] = None


# ---- audit and retention: how this site's log is witnessed, and how long what stays here ----------


class CheckpointEvery(Closed):
    records: PositiveLimit = 100
    rounds: PositiveLimit = 1


class Audit(Closed):
    """Settings of the audit log.

    Attributes:
        payload_archive: released payload bytes are kept at the site.
        witnesses: whose cosignatures count.
        min_witnesses: so many have countersigned the log as it was after the last round, or no further round opens.
    """

    payload_archive: Demand = True
    checkpoint_every: CheckpointEvery = CheckpointEvery()
    witnesses: Annotated[tuple[Literal["coordinator", "peers"], ...], Field(min_length=1), lattice.INTERSECTION] = (
        "coordinator",
        "peers",
    )
    min_witnesses: Least = 1


class Retention(Closed):
    """How long a site stores what it has.

    Attributes:
        records_years: records are kept for at least so long; leaf hashes for good.
        payload_days: archived payloads are kept for at most so long.
        outbox_max_gb: outbox and archive together, in 10^9 bytes.
    """

    records_years: Least = 6
    payload_days: PositiveLimit = 90
    outbox_max_gb: PositiveLimit = 50


# ---- the file --------------------------------------------------------------------------------


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
    """The content of a policy file; it is read by `policies.kinds.POLICY_FILE`, which has the blocks of all kinds."""

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
    egress: Side
    ingress: Side
    text_screens: TextScreens = Field(default_factory=TextScreens)
    approvals: SiteApprovals
    audit: Audit = Audit()
    retention: Retention = Retention()

    def blocks(self) -> Iterator[tuple[str, str, Any]]:
        """Yield (side, kind, block) of every kind that the policy names; control messages of one side are one kind."""
        for side in ("egress", "ingress"):
            half = getattr(self, side)
            for name, field in type(half).model_fields.items():
                if (block := getattr(half, name)) is not None:
                    yield side, field.alias or name, block

    @property
    def screens_named(self) -> set[ScreenName]:
        """Screens that run over messages of some kind."""
        return {name for _, _, block in self.blocks() for name in getattr(block, "screens", ())}


@dataclass(frozen=True)
class Policy:
    """A site's policy (or the coordinator's charter): the rules, and where each stands in its file.

    Attributes:
        file: the validated content.
        source: file name, for refusals.
        file_sha256: of the bytes as read; `digest` instead ignores comments and key order.
        parts: the site's own policy and the federation's charter, where this is what both allow together
            (`compare.effective`); source, lines and file_sha256 are then those of the site's own.
        custom_text: bytes of the file of own patterns, as read; None where the site's own policy names none.
        gone: of a kept policy, the blocks of kinds that are gone; part of its digest, and of nothing else.
    """

    file: PolicyFile
    source: str
    file_sha256: str
    lines: Mapping[Path, int]
    parts: tuple[Policy, ...] = ()
    custom_text: bytes | None = None
    gone: GoneBlocks = NO_GONE_BLOCKS

    def line_of(self, path: Path) -> int:
        """Line of a key, or of the nearest key above it that stands in the file."""
        while path not in self.lines and path:
            path = path[:-1]
        return self.lines.get(path, 1)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the canonical JSON after defaults: the policy's identity."""
        content = self.file.model_dump(mode="json", by_alias=True)
        content["egress"] |= self.gone.model_dump(mode="json", by_alias=True)
        return sha256_hex(canonical_json(content))

    @property
    def own(self) -> Policy:
        """The site's own policy: where files lie is each site's own matter, and a meet of two places is none."""
        return self.parts[0] if self.parts else self

    @property
    def charter(self) -> Policy | None:
        """The federation's charter that has a part in this policy."""
        return self.parts[-1] if self.parts else None

    @property
    def digests(self) -> dict[str, str]:
        """Return the digests that a record names: of the policy in force, and of the files that it is made of."""
        digests = {"effective": self.digest, "file": self.file_sha256}
        return digests | {"charter": self.charter.file_sha256} if self.charter else digests

    @cached_property
    def valid_from_seconds(self) -> int:
        return epoch_seconds(self.file.valid.from_)

    @cached_property
    def valid_until_seconds(self) -> int:
        return epoch_seconds(self.file.valid.until)

    @cached_property
    def peers(self) -> frozenset[str]:
        return frozenset(self.file.federation.peers)
