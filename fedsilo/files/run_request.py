"""Makes a plan from a `run.yaml`: the submitter's choices, the values that the federation fixes, and whether the run
can work at all.

The coordinator asks this when a run is submitted, and `fedsilo run submit --dry-run` asks the same without it. Pure,
but for `read_start`, which reads an adapter's folder: all other files are read by whoever calls. What it does not stop:
a site whose own policy is tighter than the charter refuses the plan all the same, and says so in its own log.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from fedsilo.files.adapter_folder import ImportedAdapter, import_adapter
from fedsilo.protocol import strict_yaml
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.errors import NotFoundError, UsageError
from fedsilo.protocol.factors import initial_frozen_sha256
from fedsilo.protocol.methods import method_named, require_exchange, require_solutions
from fedsilo.protocol.place import Place
from fedsilo.protocol.plan import SHIFTING, Plan, SiloModel
from policies.engine import Context, History, Message, decide, measure
from policies.model import Policy
from policies.rules import RULES
from policies.schema import LoraSchema

# What users of other trainers write -> the key here. Names as in TRL's GRPOConfig.
OUR_NAMES: Mapping[str, str] = {
    "beta": "objective.kl_coefficient",
    "epsilon": "objective.clip_low",
    "epsilon_high": "objective.clip_high",
    "delta": "objective.dual_clip",
    "entropy_coef": "objective.entropy_coefficient",
    "loss_type": "objective.token_aggregation",
    "scale_rewards": "objective.advantage_std",
    "importance_sampling_level": "objective.ratio",
    "vllm_importance_sampling_correction": "objective.importance_correction",
    "vllm_importance_sampling_clip_max": "objective.importance_cap",
    "mask_truncated_completions": "objective.mask_truncated",
    "num_iterations": "optimiser.epochs",
    "max_grad_norm": "optimiser.grad_norm_max",
    "adam_beta1": "optimiser.adam_beta1",
    "adam_beta2": "optimiser.adam_beta2",
    "adam_epsilon": "optimiser.adam_epsilon",
    "num_generations": "samples_per_prompt",
    "max_completion_length": "rollout.max_new_tokens",
    "max_prompt_length": "rollout.max_prompt_tokens",
    "max_steps": "local_steps",
}
EXPLAINED = "docs/explain/objective.md"
# Rules of a policy about a plan -> the key of run.yaml that they bound. Those left out judge what nobody chooses, the
# roster, which stands only when the run starts, or several keys together: of these each site's own limits decide.
_KEYS: Mapping[str, tuple[str, ...]] = {
    "plan rounds": ("rounds",),
    "plan local steps": ("local_steps",),
    "plan prompts per step": ("prompts_per_step",),
    "plan samples per prompt": ("samples_per_prompt",),
    "plan max new tokens": ("rollout", "max_new_tokens"),
    "plan temperature": ("rollout", "temperature"),
    "plan learning rate": ("optimiser", "learning_rate"),
    "plan method": ("method",),
    "plan start adapter": ("start_adapter",),
    "plan server optimiser": ("server_optimiser",),
    "plan aggregate": ("aggregate",),
    "plan peers": ("silos",),
}
START_ADAPTER = "start_adapter"  # key of a request alone: its plan has the digest of what lies in that folder
# How a plan begins what it says of two keys together -> the key of run.yaml that is wrong, and the hint.
_TOGETHER: Mapping[str, tuple[str, str]] = {
    "aggregate: ": (
        "aggregate",
        "trim goes with trimmed_mean; a median takes 3 updates, a trimmed mean more than twice its trim (quorum)",
    ),
    "models: ": ("method", "`models` is what coordinator.yaml expects of silos with another model"),
    "server_optimiser: ": ("server_optimiser", "what goes with it is in docs/decisions/0027-server-optimisers.md"),
    "silo_steps": (
        "silo_steps",
        "at least an eighth of local_steps, since an update counts the more the fewer steps made it",
    ),
    "kl_reference": ("objective", f"{START_ADAPTER}: PATH, or kl_reference: frozen_base"),
}
_OF_TURNS = (
    "the seed of the run that it is from, where that ended after its first round; later rounds train A, and no seed "
    "draws it: leave start_adapter out"
)
_RULES = tuple(rule for rule in RULES if rule.name in _KEYS)
_ANY_SHA256 = "0" * 64
ANY_SILOS_MAX = 10_000
ANY_SILOS = 64  # where neither silos nor quorum are said


# What `fedsilo run init` writes, and whose sizes the limits of a federation follow from where nobody names a run.
EXAMPLE = """\
# A run, for `coordinator init --run run.yaml` and then `fedsilo run submit run.yaml`. Change what you like before the
# first of them: the limits of every site's policy follow from these sizes. Keys left out have their defaults.
run: first
# or another method: `fedsilo demo --help` lists them
method: pubswap
rounds: 20
local_steps: 16            # of each round
swap_period: 2             # every 2nd step is public: there other sites' answers are swapped in
prompts_per_step: 8
samples_per_prompt: 8      # answers to each prompt
seed: 1
rollout: {temperature: 1.0, max_prompt_tokens: 512, max_new_tokens: 256}
optimiser: {learning_rate: 0.0001, epochs: 2}
objective: {kl_coefficient: 0.0}
"""


@dataclass(frozen=True)
class Agreed:
    """The files and settings that every silo must share; hashes are lower-case hex SHA-256."""

    base_model_sha256: str
    tokenizer_sha256: str
    template_sha256: str
    load: str
    mixed_base: str
    lora_schema_sha256: str
    public_set_sha256: str
    held_out_sha256: str
    own_verifiers_sha256: str = ""  # empty: no site brings a verifier of its own
    mixed_verifiers: str = "refuse"
    models: Mapping[str, SiloModel] = dataclasses.field(default_factory=dict)  # of silos that have another

    def of(self, silo: str) -> Agreed:
        """Return what this silo must have."""
        own = self.models.get(silo)
        return self if own is None else replace(self, **own.model_dump())


@dataclass(frozen=True)
class Fixed:
    """Values that a submitter cannot choose, since the silos agreed on them. `charter`: None is not asked. `unsolved`:
    of the public file, as of `TaskFile`."""

    federation: str
    silos: tuple[str, ...]
    agreed: Agreed
    schema: LoraSchema
    public_set_rows: int
    charter: Policy | None = None
    unsolved: str = ""

    def fields(self) -> dict[str, Any]:
        agreed = self.agreed
        return {
            "federation": self.federation,
            "lora": {
                "rank": self.schema.rank,
                "alpha": self.schema.alpha,
                "schema_sha256": self.schema.digest,
                "freeze": self.schema.freeze,
            },
            "base_model_sha256": agreed.base_model_sha256,
            "tokenizer_sha256": agreed.tokenizer_sha256,
            "template_sha256": agreed.template_sha256,
            "models": {silo: model.model_dump() for silo, model in agreed.models.items()},
            "load": agreed.load,
            "mixed_base": agreed.mixed_base,
            "own_verifiers_sha256": agreed.own_verifiers_sha256,
            "mixed_verifiers": agreed.mixed_verifiers,
            "public_set_sha256": agreed.public_set_sha256,
            "public_set_rows": self.public_set_rows,
            "held_out_sha256": agreed.held_out_sha256,
            "wire_dtype": self.schema.dtype,
        }


def read_request(text: bytes, source: str) -> strict_yaml.Document:
    """Read a request. Raises UsageError: not strict YAML, or no mapping of keys."""
    document = strict_yaml.load(text, source)
    if not isinstance(document.value, dict):
        raise UsageError(f"{source}: a run is a mapping of keys")
    return document


def _start_folder(document: strict_yaml.Document, beside: Path) -> Path | None:
    """The folder of the adapter that a request starts from; None: it names none.

    Args:
        document: the request.
        beside: where a relative path starts.

    Raises:
        UsageError: it is no path; or the request names the digest of an adapter, and not where that lies.
    """
    named = document.value.get(START_ADAPTER)
    if named is None and (START_ADAPTER in document.value or "start_adapter_sha256" in document.value):
        raise UsageError(
            f"{document.place((START_ADAPTER,))}: the run starts from an adapter that is in no folder",
            hint=f"{START_ADAPTER}: PATH of a PEFT adapter folder at the coordinator",
        )
    if named is not None and (not isinstance(named, str) or not named):
        raise UsageError(f"{document.place((START_ADAPTER,))}: {START_ADAPTER} is a path", hint="write it as text")
    return None if named is None else beside / named


def read_start(
    document: strict_yaml.Document, beside: Path, schema: LoraSchema, write: Callable[[bytes | memoryview], object]
) -> ImportedAdapter | None:
    """Read the adapter that a request starts from; None: it names none.

    Args:
        document: the request.
        beside: where a relative path starts.
        schema: of the federation.
        write: takes the payload's bytes, as of `import_adapter`.

    Raises:
        UsageError: no such folder, or no adapter that this federation can start from; names file and line.
    """
    if (folder := _start_folder(document, beside)) is None:
        return None
    try:
        return import_adapter(folder, schema, write)
    except (NotFoundError, UsageError) as error:
        raise UsageError(f"{document.place((START_ADAPTER,))}: {error.message}", hint=error.hint) from error


def with_start(document: strict_yaml.Document, start: ImportedAdapter | None) -> strict_yaml.Document:
    """The request with the digest of the adapter that it starts from in the place of its folder. Raises UsageError: it
    names another digest, too."""
    if start is None:
        return document
    value = {key: each for key, each in document.value.items() if key != START_ADAPTER}
    if value.setdefault("start_adapter_sha256", start.sha256) != start.sha256:
        raise UsageError(
            f"{document.place(('start_adapter_sha256',))}: the adapter of that folder is {start.sha256}",
            hint="another folder, or leave start_adapter_sha256 out",
        )
    return replace(document, value=value)


def check_request(document: strict_yaml.Document, fixed: Fixed, start: ImportedAdapter | None = None) -> Plan:
    """The plan of a request with all the silos that it names, where it can work.

    Args:
        document: the request, `with_start`.
        fixed: what cannot be chosen.
        start: the adapter that it starts from; None: the one that its seed draws.

    Raises:
        UsageError: as `plan_from_request`; no step could learn anything; the adapter cannot be this run's first; or the
            charter, which every silo puts beside its own policy, does not allow it. Names file, line and key.
    """
    plan = plan_from_request(document, fixed, silos_of(document, fixed.silos))
    _refuse_useless(plan, document)
    if start is not None and start.frozen_sha256 != plan.lora.frozen_sha256:
        raise UsageError(
            f"{document.place((START_ADAPTER,))}: its factors that the schema freezes are not those that seed "
            f"{plan.seed} draws",
            hint=_OF_TURNS if plan.lora.freeze == "alternate" else "the seed of the run that it is from",
        )
    if fixed.charter is not None:
        _refuse_by_charter(plan, fixed.charter, fixed.schema, document)
        if start is not None:
            _refuse_too_long(start, fixed.charter, document)
    return plan


def size_of_run(text: bytes, source: str) -> dict[str, int | float]:
    """Return the size of a run, by the names of `policies.render.PlanSize`. Raises UsageError as `check_form`."""
    document = read_request(text, source)
    # one without a name gets it when it is submitted
    plan = check_form(replace(document, value={"run": "any", **document.value}))
    return {
        "rounds": plan.rounds,
        "local_steps": plan.local_steps,
        "swap_period": plan.swap_period,
        "prompts_per_step": plan.prompts_per_step,
        "samples_per_prompt": plan.samples_per_prompt,
        "max_new_tokens": plan.rollout.max_new_tokens,
        "epochs": plan.optimiser.epochs,
        "learning_rate": plan.optimiser.learning_rate,
    }


def check_form(document: strict_yaml.Document) -> Plan:
    """Check a request where the federation's own files are not at hand, and return its plan with stand-ins for them.

    Raises:
        UsageError: an unknown key or a wrong value; no step could learn anything. Names file, line and key.
    """
    quorum = document.value.get("quorum", ANY_SILOS)  # a number of silos that nobody knows here: so many will do
    most = quorum if isinstance(quorum, int) and 1 <= quorum <= ANY_SILOS_MAX else 1
    silos = silos_of(document, tuple(f"any{number}" for number in range(most)))
    fixed: dict[str, Any] = {
        "federation": "any",
        "lora": {"schema_sha256": _ANY_SHA256},
        "base_model_sha256": _ANY_SHA256,
        "tokenizer_sha256": _ANY_SHA256,
        "template_sha256": _ANY_SHA256,
        "public_set_sha256": _ANY_SHA256,
        "public_set_rows": 1,
        "held_out_sha256": _ANY_SHA256,
    }
    fields = fixed | dict(document.value) | {"silos": list(silos)}
    if _start_folder(document, Path()) is not None:
        del fields[START_ADAPTER]
        fields.setdefault("start_adapter_sha256", _ANY_SHA256)
    if isinstance(fields["lora"], Mapping):
        fields["lora"] = {**fixed["lora"], **fields["lora"]}
    plan = _plan_of(fields, document)
    _refuse_useless(plan, document)
    return plan


def quorum_of(silos: int) -> int:
    """The quorum of a request that says none: more than half of its silos, and never one update alone where there are
    others, since the silos would be sent it as the global adapter (T58)."""
    return min(silos, max(2, silos // 2 + 1))


def silos_of(document: strict_yaml.Document, otherwise: tuple[str, ...]) -> tuple[str, ...]:
    named = document.value.get("silos", otherwise)
    if not isinstance(named, list | tuple) or not all(isinstance(silo, str) for silo in named):
        raise UsageError(f"{document.place(('silos',))}: silos is a list of names", hint="write [a, b]")
    return tuple(named)


def plan_from_request(document: strict_yaml.Document, fixed: Fixed, silos: tuple[str, ...]) -> Plan:
    """The plan of a request for these silos.

    Args:
        document: the request, a mapping, with its lines where they are known.
        fixed: what cannot be chosen.
        silos: the roster.

    Raises:
        UsageError: an unknown field, a wrong value, a silo that is not of the federation, a value that differs
            from what the federation fixes, or as `require_solutions`; named.
    """
    fields = dict(document.value)
    for name, value in fixed.fields().items():
        chosen = fields.get(name, value)
        if name == "lora" and isinstance(chosen, Mapping):
            chosen = {**value, **chosen}
        if chosen != value:
            raise UsageError(
                f"{document.place((name,))}: {name} is {chosen!r}; this federation has {value!r}",
                hint=f"leave {name} out of the file",
            )
        fields[name] = value
    fields["silos"] = list(silos)
    fields["models"] = {silo: model for silo, model in fields["models"].items() if silo in silos}
    _refuse_unknown(silos, "silos", fixed, document)
    if isinstance(steps := fields.get("silo_steps"), Mapping):
        _refuse_unknown(steps, "silo_steps", fixed, document)
        fields["silo_steps"] = {silo: count for silo, count in steps.items() if silo in silos}
    fields["lora"] = {**fields["lora"], "frozen_sha256": _frozen_sha256(fixed.schema, fields.get("seed"))}
    plan = _plan_of(fields, document)
    try:
        require_solutions(plan, fixed.unsolved)
    except UsageError as error:
        raise UsageError(f"{document.place(('method',))}: {error.message}", hint=error.hint, code=error.code) from error
    _refuse_without_room(plan, fixed.schema, document)
    return plan


def _refuse_without_room(plan: Plan, schema: LoraSchema, document: strict_yaml.Document) -> None:
    """A shift takes what all rounds leave over, or no round at all."""
    if plan.aggregate not in SHIFTING:
        return
    most = plan.rounds * plan.lora.rank * (len(plan.silos) - (plan.aggregate == "fedex"))
    if not schema.has_room_for(most):
        raise UsageError(
            f"{document.place(('aggregate',))}: aggregate: {plan.aggregate} shifts the base by a product of rank up to "
            f"{most}, and the federation's LoRA schema has room for {schema.shift_rank}",
            hint="fewer rounds, or sites made with a ruleset whose schema has the room (fedex, flora)",
        )


def _refuse_unknown(silos: Iterable[object], key: str, fixed: Fixed, document: strict_yaml.Document) -> None:
    if unknown := [silo for silo in silos if silo not in fixed.silos]:
        raise UsageError(
            f"{document.place((key,))}: {unknown[0]!r} is not a silo of this federation",
            hint=f"known: {', '.join(fixed.silos)}",
        )


def _frozen_sha256(schema: LoraSchema, seed: object) -> str:
    """Digest of the factors that the run freezes, which follow from its seed; that a seed is none, the plan says."""
    if schema.freeze == "none":
        return ""
    number = seed if isinstance(seed, int) and 0 <= seed < 2**53 else 0
    return initial_frozen_sha256(schema.tensors, number, schema.freeze)


def _plan_of(given: Mapping[str, Any], document: strict_yaml.Document) -> Plan:
    fields = {"quorum": quorum_of(len(given["silos"])), **given}
    try:
        plan = Plan.model_validate_json(json.dumps(fields))
    except ValidationError as error:
        raise _mistake(error, fields, document) from error
    try:
        method = method_named(plan.method)
    except UsageError as error:
        raise UsageError(f"{document.place(('method',))}: {error.message}", hint=error.hint) from error
    try:
        plan = plan.model_copy(update={"options": method.options.of(plan).stated()})
    except ValidationError as error:
        mistake = strict_yaml.mistake(method.options, error, document.below("options"))
        raise UsageError(f"{mistake.message} (options of {plan.method})", hint=mistake.hint) from error
    try:
        require_exchange(plan)
    except UsageError as error:
        keys = {
            "SILO_STEPS": "silo_steps",
            "AGGREGATE": "aggregate",
            "SERVER_OPTIMISER": "server_optimiser",
            "MODELS": "method",
            "START_ADAPTER": START_ADAPTER,
            "DONOR_DENOMINATOR": "donor_denominator",
        }
        key = keys.get(error.code, "exchange")
        raise UsageError(f"{document.place((key,))}: {error.message}", hint=error.hint) from error
    return plan


def _mistake(error: ValidationError, fields: Mapping[str, Any], document: strict_yaml.Document) -> UsageError:
    """As `strict_yaml.mistake`, with what other trainers call a key, and the line of what two keys say together."""
    errors = error.errors()
    unknown = next((each["loc"] for each in errors if each["type"] == "extra_forbidden"), ())
    mistake = strict_yaml.mistake(Plan, error, document)
    if unknown:
        name = str(unknown[-1])
        ours = OUR_NAMES.get(name) or next((place for place in _places() if place.rpartition(".")[2] == name), "")
        if ours:
            hint = f"it is {ours} here: {_written(ours)}" + (f" ({EXPLAINED})" if name in OUR_NAMES else "")
            return UsageError(mistake.message.partition(" (did you mean")[0], hint=hint)
        return mistake
    if errors[0]["loc"] != ():
        return mistake
    message = errors[0]["msg"].removeprefix("Value error, ")
    for beginning, (key, hint) in _TOGETHER.items():
        if message.startswith(beginning):
            is_of_the_mean = key == "aggregate" and ("lora.freeze" in message or "load" in message)
            return UsageError(
                f"{document.place((key,))}: {message}", hint="aggregate: mean" if is_of_the_mean else hint
            )
    silos = fields["silos"]
    twice = next((silo for silo in silos if silos.count(silo) > 1), "")
    if twice:
        return UsageError(f"{document.place(('silos',))}: silos: {twice!r} is listed twice", hint="list each once")
    return UsageError(
        f"{document.place(('quorum',))}: quorum: {fields['quorum']} of {len(silos)} silos",
        hint=f"a number from 1 to {len(silos)}",
    )


def _written(place: str) -> str:
    block, _, name = place.rpartition(".")
    return f"{block}: {{{name}: ...}}" if block else f"{name}: ..."


def _places(model: type[BaseModel] = Plan, before: str = "") -> list[str]:
    """Every key of a run, such as `rollout.temperature`."""
    lines: list[str] = []
    for name, field in model.model_fields.items():
        inner = field.annotation
        lines.append(before + name)
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            lines += _places(inner, f"{before}{name}.")
    return lines


def _refuse_useless(plan: Plan, document: strict_yaml.Document) -> None:
    if plan.samples_per_prompt == 1:
        raise UsageError(
            f"{document.place(('samples_per_prompt',))}: samples_per_prompt: 1 teaches nothing: the advantage of an "
            "answer is over the others to its prompt",
            hint=f"2 or more; {EXPLAINED}",
        )


def _refuse_by_charter(plan: Plan, charter: Policy, schema: LoraSchema, document: strict_yaml.Document) -> None:
    coordinator = charter.file.federation.coordinator
    text = plan.canonical()
    body = pb.RunPlan(canonical_json=text)
    message = Message("ingress", Place(plan.run, 0, 0, "run.plan"), coordinator, len(text), body)
    facts = measure(message, Context(now_seconds=0.0, expected_sender=coordinator, schema=schema))
    for result in decide(facts, charter, History(), rules=_RULES).results:
        if result.outcome == "deny":
            key = _KEYS[result.rule]
            limit = " to ".join(map(str, result.limit)) if isinstance(result.limit, list) else result.limit
            reason = f"{result.measured}" if result.reason == "PLAN_RANGE" else f"{result.rule}: {result.measured}"
            default = "" if not document.lines or key in document.lines else " (the default)"
            raise UsageError(
                f"{document.place(key)}: {'.'.join(key)}: {reason}{default}, and the charter allows {limit} "
                f"({Path(result.file).name}:{result.line}); every silo that has this charter would refuse it",
                hint="a value within that, or a charter that all sites agree on",
            )


def _refuse_too_long(start: ImportedAdapter, charter: Policy, document: strict_yaml.Document) -> None:
    """Raises UsageError: the charter lets no adapter of that norm in, or no update of it out."""
    adapter, updates = charter.file.ingress.global_adapter, charter.file.egress.updates
    limits = [(("ingress", "global.adapter", "max_l2"), adapter.max_l2)] if adapter is not None else []
    limits += [(("egress", kind, "max_total_l2"), block.max_total_l2) for kind, block in updates.items()]
    for path, limit in limits:
        if start.l2 > limit:
            raise UsageError(
                f"{document.place((START_ADAPTER,))}: its norm is {start.l2:g}, and the charter allows {limit:g} "
                f"({Path(charter.source).name}:{charter.line_of(path)})",
                hint="a larger limit in the charter and every policy, or an adapter that was trained less",
            )
