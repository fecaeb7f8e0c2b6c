"""The plan of one run: what the coordinator signs and every silo checks against its own policy.

Every choice that the papers leave open is a field here with its default, so that the run record states it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator

from fedsilo.protocol.codec import canonical_json, sha256_hex
from fedsilo.protocol.errors import PeerError, WireCode
from fedsilo.protocol.factors import UPDATE_KIND, Fixed, Freeze, fixed_in
from fedsilo.protocol.transcript import needed

PLAN_CHARACTERS_MAX = 65536
SHIFTING = ("fedex", "flora")  # ways to aggregate that shift the base's weights
FEWEST_STEPS_SHARE = 8  # a silo takes at least one in so many of a round's steps

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]{0,62}$")]


class _Closed(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


_LATER_KEYS = ("ratio", "clip", "importance_correction", "importance_cap")


class Objective(_Closed):
    """GRPO objective (docs/explain/objective.md)."""

    clip_low: float = Field(0.2, gt=0, lt=1)
    clip_high: float = Field(0.25, gt=0, lt=10)
    kl_coefficient: float = Field(1e-4, ge=0)
    # What the KL term is against, in all rounds: the base model, adapter off, or the adapter that the run starts from.
    kl_reference: Literal["frozen_base", "start_adapter"] = "frozen_base"
    entropy_coefficient: float = Field(0.0, ge=0)
    advantage_std: Literal["sample", "population", "none"] = "sample"
    advantage_epsilon: float = Field(1e-6, gt=0)
    token_aggregation: Literal["response-mean", "token-mean", "constant"] = "response-mean"
    dual_clip: float | None = Field(None, gt=1)
    mask_truncated: bool = False
    proximal_mu: float = Field(0.0, ge=0)  # FedProx; 0 is off
    ratio: Literal["token", "sequence"] = "token"
    clip: Literal["ppo", "cispo"] = "ppo"
    # Own answers' tokens are weighted by how the trainer's probabilities differ from the rollout engine's.
    importance_correction: Literal["none", "truncate", "mask"] = "none"
    importance_cap: float = Field(2.0, ge=1)

    @model_validator(mode="after")
    def _fits_together(self) -> Objective:
        if self.clip == "cispo" and self.dual_clip is not None:
            raise ValueError("clip: cispo has no dual_clip")
        if self.importance_correction == "none" and self.importance_cap != 2.0:
            raise ValueError("importance_cap goes with importance_correction: truncate or mask")
        return self

    def stated(self) -> dict[str, Any]:
        """Return the fields as a plan holds them. Those that earlier plans did not know are absent at their defaults,
        so that such a plan keeps its digest."""
        later = ("kl_reference", *_LATER_KEYS)
        fields = self.model_dump(mode="json")
        return {
            name: value
            for name, value in fields.items()
            if name not in later or value != type(self).model_fields[name].default
        }


class Optimiser(_Closed):
    """AdamW."""

    learning_rate: float = Field(1e-5, gt=0)
    weight_decay: float = Field(0.01, ge=0)
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    adam_beta2: float = Field(0.999, ge=0, lt=1)
    adam_epsilon: float = Field(1e-8, gt=0)
    grad_norm_max: float = Field(1.0, gt=0)
    epochs: int = Field(2, ge=1, le=16)
    state: Literal["reset", "keep"] = "reset"


class ServerOptimiser(_Closed):
    """How the coordinator moves the adapter by what a round's updates come to (`fedsilo.protocol.aggregation`). Each
    name has fields of its own; those of another stay at their defaults."""

    name: Literal["none", "momentum", "nesterov", "adam"] = "none"
    learning_rate: float = Field(1.0, gt=0)
    momentum: float = Field(0.9, ge=0, lt=1)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.99, ge=0, lt=1)
    tau: float = Field(1e-3, gt=0)

    @property
    def own(self) -> dict[str, float]:
        """Return the fields of this optimiser."""
        return {name: getattr(self, name) for name in SERVER_FIELDS[self.name]}

    @model_validator(mode="after")
    def _no_other_s_fields(self) -> ServerOptimiser:
        for name in sorted(self.model_fields_set - {"name", *SERVER_FIELDS[self.name]}):
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"server_optimiser: {self.name} has no {name}")
        return self


SERVER_FIELDS: dict[str, tuple[str, ...]] = {
    "none": (),
    "momentum": ("learning_rate", "momentum"),
    "nesterov": ("learning_rate", "momentum"),
    "adam": ("learning_rate", "beta1", "beta2", "tau"),
}


class Rollout(_Closed):
    temperature: float = Field(0.7, gt=0)
    max_prompt_tokens: int = Field(1024, ge=1)
    max_new_tokens: int = Field(2048, ge=1)


class Lora(_Closed):
    """`freeze` is the schema's; `frozen_sha256` names the factors that the first round fixes, which follow from the
    plan's seed (`factors.initial_frozen_sha256`), and is empty where nothing is frozen."""

    rank: int = Field(32, ge=1, le=1024)
    alpha: float = Field(64.0, gt=0)
    schema_sha256: Sha256
    freeze: Freeze = "none"
    frozen_sha256: Sha256 | Literal[""] = ""

    @model_validator(mode="after")
    def _frozen_is_named(self) -> Lora:
        if (self.freeze == "none") != (self.frozen_sha256 == ""):
            raise ValueError(f"freeze is {self.freeze} and frozen_sha256 is {self.frozen_sha256[:12] or 'empty'}")
        return self

    def fixed_in(self, number: int) -> Fixed:
        """Return what is neither trained nor sent in a round."""
        return fixed_in(self.freeze, number)

    def update_kind(self, number: int, stays: Fixed = "none") -> str:
        """Return the kind of the message by which a round's update leaves a silo.

        Args:
            number: of the round.
            stays: what the method trains and leaves at each silo.
        """
        return UPDATE_KIND[self.fixed_in(number) if stays == "none" else stays]


class SiloModel(_Closed):
    """The model of a silo that has another than the plan's, and the schema of its own factors."""

    base_model_sha256: Sha256
    tokenizer_sha256: Sha256
    template_sha256: Sha256
    lora_schema_sha256: Sha256


class Evaluation(_Closed):
    prompts: int = Field(512, ge=1)
    samples: int = Field(4, ge=1)


class Options(_Closed):
    """The options of one method; a method that has some names a subclass (`Method.options`), and others have none."""

    @classmethod
    def of(cls, plan: Plan) -> Self:
        """Return what a plan says, and the defaults of the rest. Raises ValidationError: it says what is no option."""
        return cls.model_validate_json(canonical_json(plan.options))

    @classmethod
    def samples(cls, plan: Plan) -> int:
        """Return how many answers to one prompt a plan asks for by what it states. Raises ValidationError: as `of`."""
        cls.of(plan)
        return plan.samples_per_prompt

    def stated(self) -> dict[str, JsonValue]:
        """Return the options that differ from their defaults, as a plan holds them."""
        fields: dict[str, JsonValue] = self.model_dump(mode="json", exclude_defaults=True)
        return fields


class Plan(_Closed):
    """A run as signed by the coordinator. `silos` is the roster; aggregation follows its order."""

    plan_version: Literal[1] = 1
    run: Name
    federation: Name
    method: Name
    exchange: Literal["step", "round_end"] = "step"
    silos: tuple[Name, ...] = Field(min_length=1)
    rounds: int = Field(ge=1)
    local_steps: int = Field(ge=1)  # tau
    # Silos that take fewer steps a round, so that nobody waits for them. What each then counts: `silos`, all the same,
    # each update over its steps (FedNova, Wang et al. 2020, eq. 8); `steps`, by its steps, the plain mean of updates.
    silo_steps: dict[Name, int] = Field(default_factory=dict)
    silo_weights: Literal["silos", "steps"] = "silos"
    # What the silos' differences become: their mean; or, number by number, their median, or the mean of what is left
    # without the `trim` largest and the `trim` smallest. Few bad silos do not move these beyond the others (T51). Or
    # the mean of their products B A, exactly: what the factors cannot hold of it shifts the base (`products`).
    aggregate: Literal["mean", "median", "trimmed_mean", "fedex", "flora"] = "mean"
    trim: int = Field(0, ge=0)
    server_optimiser: ServerOptimiser = ServerOptimiser()  # what then becomes of the adapter
    swap_period: int = Field(2, ge=1)  # tau_swap
    prompts_per_step: int = Field(8, ge=1)  # b
    samples_per_prompt: int = Field(8, ge=1)  # K
    # What donors' tokens get in the place of pi_old: the receiver's own policy, the donor's as it wrote them, or 1,
    # plain or shaped.
    donor_denominator: Literal["local", "donor", "unit", "shaped"] = "local"
    seed: int = Field(ge=0, lt=2**53)
    options: dict[Name, JsonValue] = Field(default_factory=dict)  # the method's own (`Options`)
    # Of the adapter that the first round starts from, as `global.adapter` carries it; empty: it is drawn from the seed.
    start_adapter_sha256: Sha256 | Literal[""] = ""
    objective: Objective = Objective()
    optimiser: Optimiser = Optimiser()
    rollout: Rollout = Rollout()
    lora: Lora
    evaluation: Evaluation = Evaluation()
    base_model_sha256: Sha256
    tokenizer_sha256: Sha256
    template_sha256: Sha256
    models: dict[Name, SiloModel] = Field(default_factory=dict)  # of silos that have another, under some methods
    load: Literal["fp32", "bf16", "nf4", "fp8"] = "fp32"
    mixed_base: Literal["refuse", "allow"] = "refuse"
    own_verifiers_sha256: Sha256 | Literal[""] = ""  # of verifiers that packages bring; empty: no silo has one
    mixed_verifiers: Literal["refuse", "allow"] = "refuse"
    public_set_sha256: Sha256
    public_set_rows: int = Field(ge=1)
    held_out_sha256: Sha256
    wire_dtype: Literal["float32", "bfloat16"] = "float32"
    quorum: int = Field(
        1,
        ge=1,
        description="`n` are its silos; one where there is one",
        json_schema_extra={"of_a_request": "max(2, n // 2 + 1)"},  # who writes run.yaml meets this one
    )
    join_deadline_seconds: float = Field(300.0, gt=0)
    public_step_deadline_seconds: float = Field(600.0, gt=0)
    round_deadline_seconds: float = Field(7200.0, gt=0)

    @model_validator(mode="after")
    def _consistent(self) -> Plan:
        if len(set(self.silos)) != len(self.silos):
            raise ValueError("a silo is listed twice")
        if self.quorum > len(self.silos):
            raise ValueError(f"quorum {self.quorum} exceeds the {len(self.silos)} silos of the roster")
        return self

    @model_validator(mode="after")
    def _unlike_models_share_nothing(self) -> Plan:
        if strangers := sorted(self.models.keys() - set(self.silos)):
            raise ValueError(f"models: {strangers[0]} is not in the roster")
        if self.models and self.lora.freeze != "none":
            raise ValueError("models: factors that are frozen are drawn for one model")
        return self

    @model_validator(mode="after")
    def _turns_begin_afresh(self) -> Plan:
        if self.lora.freeze == "alternate" and self.optimiser.state == "keep":
            raise ValueError("lora.freeze: alternate trains other factors each round, so optimiser.state must be reset")
        return self

    @model_validator(mode="after")
    def _fewer_steps(self) -> Plan:
        # Fewer would be scaled up too far under `silos`: what noise or an attacker puts in, along with the rest.
        fewest = -(-self.local_steps // FEWEST_STEPS_SHARE)
        for silo, steps in self.silo_steps.items():
            if not fewest <= steps <= self.local_steps:
                raise ValueError(f"silo_steps: {steps} for {silo}, of {fewest} to {self.local_steps}")
        return self

    @model_validator(mode="after")
    def _can_be_robust(self) -> Plan:
        if (self.trim > 0) != (self.aggregate == "trimmed_mean"):
            raise ValueError(f"aggregate: {self.aggregate} with trim {self.trim}")
        if self.aggregate == "mean":
            return self
        if self.silo_steps:
            raise ValueError(f"aggregate: {self.aggregate} has no weights, which silo_steps asks for")
        if self.aggregate in SHIFTING:
            return self._can_shift()
        if self.quorum <= 2 * max(self.trim, 1):
            raise ValueError(
                f"aggregate: {self.aggregate} of {self.quorum} updates, which a quorum lets a round close with, takes "
                f"at least {2 * max(self.trim, 1) + 1}"
            )
        return self

    def _can_shift(self) -> Plan:
        if self.lora.freeze != "none":
            raise ValueError(
                f"aggregate: {self.aggregate} with lora.freeze {self.lora.freeze}, whose mean is exact as it is"
            )
        if self.load != "fp32":
            raise ValueError(f"aggregate: {self.aggregate} adds to the base's weights in float32, so load must be fp32")
        return self

    @model_validator(mode="after")
    def _reference_is_named(self) -> Plan:
        if self.objective.kl_reference == "start_adapter" and not self.start_adapter_sha256:
            raise ValueError("kl_reference: start_adapter, and the run starts from none")
        return self

    @model_validator(mode="after")
    def _server_keeps_what_is_trained(self) -> Plan:
        if self.server_optimiser.name != "none" and self.aggregate in SHIFTING:
            raise ValueError(
                f"server_optimiser: {self.server_optimiser.name} moves an adapter by a mean update, and aggregate: "
                f"{self.aggregate} makes none"
            )
        if self.server_optimiser.name != "none" and self.lora.freeze == "alternate":
            raise ValueError(
                f"server_optimiser: {self.server_optimiser.name} keeps numbers beside what is trained, which "
                "lora.freeze: alternate changes each round"
            )
        return self

    def canonical(self) -> str:
        fields = {**self.model_dump(mode="json"), "objective": self.objective.stated()}
        if self.server_optimiser.name == "none":
            del fields["server_optimiser"]
        if self.aggregate == "mean":  # not said: a plan that never spoke of it keeps its digest
            del fields["aggregate"], fields["trim"]
        for name in ("options", "models"):
            if not fields[name]:
                del fields[name]
        if not self.start_adapter_sha256:
            del fields["start_adapter_sha256"]
        return canonical_json(fields).decode()

    @property
    def digest(self) -> str:
        return sha256_hex(self.canonical().encode())

    @property
    def silos_min(self) -> int:
        """Fewest silos with which a round begins: the quorum and, where there are others, two signatures
        (`transcript.needed`)."""
        return needed(len(self.silos), min_peers=1, quorum=self.quorum)

    @property
    def reference_sha256(self) -> str:
        """Digest of the adapter that the KL term is against; empty: of none, or there is no such term."""
        wanted = self.objective.kl_reference == "start_adapter" and self.objective.kl_coefficient > 0
        return self.start_adapter_sha256 if wanted else ""

    def model_of(self, silo: str) -> SiloModel:
        """Return the model of a silo: its own entry, or what all others have."""
        common = (self.base_model_sha256, self.tokenizer_sha256, self.template_sha256, self.lora.schema_sha256)
        return self.models.get(silo) or SiloModel(**dict(zip(SiloModel.model_fields, common, strict=True)))

    def steps_of(self, silo: str) -> int:
        """GRPO steps of a silo in a round."""
        return self.silo_steps.get(silo, self.local_steps)

    @property
    def wants_logp(self) -> bool:
        """Return whether training takes the log-probabilities that answers were sampled with."""
        return self.objective.importance_correction != "none" or self.donor_denominator == "donor"

    def hold_seconds(self, step: int) -> float:
        """Return how long an offer may wait for people: until its step's deadline, or its round's where no step
        waits."""
        return self.public_step_deadline_seconds if step and self.exchange == "step" else self.round_deadline_seconds

    def public_steps(self) -> tuple[int, ...]:
        """Steps s in 1..tau with s mod tau_swap == 0; the count restarts each round."""
        return tuple(step for step in range(1, self.local_steps + 1) if step % self.swap_period == 0)


def plan_from_canonical(text: str) -> Plan:
    """Parse a plan received from the coordinator.

    Raises:
        PeerError: too long, not a valid plan, or not in canonical form.
    """
    if len(text) > PLAN_CHARACTERS_MAX:
        # a million keys that do not belong there make a million complaints, some gigabytes of them (T23)
        raise PeerError(WireCode.TOO_LARGE, f"the plan has {len(text)} characters, at most {PLAN_CHARACTERS_MAX} fit")
    try:
        plan = Plan.model_validate_json(text)
    except ValidationError as error:
        raise PeerError(WireCode.MALFORMED, f"the plan is not valid: {error.errors()[0]['msg']}") from error
    if plan.canonical() != text:
        raise PeerError(WireCode.MALFORMED, "the plan is not in canonical form")
    return plan


# ---- in the words in which people are told --------------------------------------------------------------------


def parameters_of(plan: Plan) -> dict[str, Any]:
    """Return the run's parameters, as the signed plan names them."""
    return {
        "method": plan.method, "exchange": plan.exchange, "rounds": plan.rounds, "local_steps": plan.local_steps,
        **_fewer_steps(plan), **_aggregate(plan), **_server_optimiser(plan),
        **{f"options.{name}": plan.options[name] for name in plan.options},
        "swap_period": plan.swap_period, "prompts_per_step": plan.prompts_per_step,
        "samples_per_prompt": plan.samples_per_prompt, "seed": plan.seed, "quorum": plan.quorum,
        "learning_rate": plan.optimiser.learning_rate, "kl_coefficient": plan.objective.kl_coefficient,
        **_objective(plan),
        "temperature": plan.rollout.temperature, "max_new_tokens": plan.rollout.max_new_tokens,
        "lora_rank": plan.lora.rank, "lora_alpha": plan.lora.alpha, "lora_freeze": plan.lora.freeze,
        "load": plan.load, "wire_dtype": plan.wire_dtype, "evaluation_prompts": plan.evaluation.prompts,
        "evaluation_samples": plan.evaluation.samples,
    }  # fmt: skip


def _fewer_steps(plan: Plan) -> dict[str, str]:
    if not plan.silo_steps:
        return {}
    steps = ", ".join(f"{silo} {steps}" for silo, steps in plan.silo_steps.items())
    return {"silo_steps": steps, "silo_weights": plan.silo_weights}


def _objective(plan: Plan) -> dict[str, str | float]:
    chosen = ("kl_reference", "advantage_std", "token_aggregation", *_LATER_KEYS)
    differs = plan.objective.model_dump(include=set(chosen), exclude_defaults=True)
    shown = {name: differs[name] for name in chosen if name in differs}
    return shown if plan.donor_denominator == "local" else {**shown, "donor_denominator": plan.donor_denominator}


def _aggregate(plan: Plan) -> dict[str, str | int]:
    if plan.aggregate == "mean":
        return {}
    return {"aggregate": plan.aggregate, **({"trim": plan.trim} if plan.trim else {})}


def _server_optimiser(plan: Plan) -> dict[str, object]:
    optimiser = plan.server_optimiser
    if optimiser.name == "none":
        return {}
    return {"server_optimiser": optimiser.name} | {
        f"server_optimiser.{name}": value for name, value in optimiser.own.items()
    }


def digests_of(plan: Plan) -> dict[str, str]:
    """Return the digests that the plan pins, by their place in it."""
    return {
        "plan": plan.digest, "base_model": plan.base_model_sha256, "tokenizer": plan.tokenizer_sha256,
        "template": plan.template_sha256, "lora_schema": plan.lora.schema_sha256,
        "public_set": plan.public_set_sha256, "held_out": plan.held_out_sha256,
        **({"start_adapter": plan.start_adapter_sha256} if plan.start_adapter_sha256 else {}),
        **{f"base_model of {silo}": model.base_model_sha256 for silo, model in plan.models.items()},
    }  # fmt: skip
