"""Makes a site's policy and LoRA schema from its own files: what `policy init`, `silo init` and the demo share."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

from fedsilo.files.durable import read_regular
from fedsilo.files.model_facts import ModelFacts, read_model_facts
from fedsilo.files.model_folder import lora_schema_of, read_fingerprints, read_template
from fedsilo.files.task_files import PUBLIC, read_tasks
from fedsilo.protocol import strict_yaml
from fedsilo.protocol.codec import sha256_hex
from fedsilo.protocol.errors import UsageError
from fedsilo.protocol.factors import Freeze, freeze_named
from policies.capacity import record_warnings, text_warnings
from policies.compare import effective
from policies.load import Beside, load_policy
from policies.model import Policy
from policies.render import PlanSize, SiteFacts, delta_limits, render_policy, ruleset_name
from policies.schema import LoraSchema, schema_from_json

DAY_SECONDS = 86400
ROUNDS_OF_SHIFT = 8  # that a base's shift takes whole, in matrices that have room for more


@dataclass(frozen=True)
class SitePolicy:
    """Texts of the two files of a site; the caller writes them.

    Attributes:
        size: the largest plan that the limits allow.
        warnings: for the person who asked: where the site is looser than its federation, and how much text may leave.
    """

    policy_text: str
    schema_text: bytes
    schema: LoraSchema
    size: PlanSize
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class SiteInputs:
    """What a new site policy is made from.

    Attributes:
        bundle: federation.json, written by `coordinator init`.
        schema_file: name of the schema file, as it will stand in the policy.
        valid_days: from now_seconds on, less one day for clocks that differ.
        limits: numbers of a plan's size that the site says itself; all others come from the bundle.
        dtype: of an update's values on the wire; empty takes the ruleset's own, or float32.
        template: as `data.template` of a silo; None: the model folder's.
    """

    ruleset: str
    model: Path
    public: Path
    bundle: Path
    now_seconds: float
    site: str = "this site"
    held_out: Path | None = None
    schema_file: str = "lora_schema.json"
    rank: int = 32
    alpha: float = 64.0
    targets: str = "all-linear"
    dtype: str = ""
    min_peers: int | None = None
    least_isolation: str = "namespaces"
    first_rounds: int = 1
    valid_days: int = 180
    limits: Mapping[str, float] = field(default_factory=dict)
    template: str | Path | None = None
    server_optimisers: tuple[str, ...] = ()


def make_site_policy(inputs: SiteInputs, bundle: Mapping[str, Any] | None = None) -> SitePolicy:
    """Read model, public set, held-out set and federation bundle, and write policy and schema as text.

    Args:
        inputs: what the site has.
        bundle: the federation's; None reads it from its file.

    Raises:
        UsageError: a file is missing or wrong, or the model is none that can be trained; names it.
    """
    ruleset = read_ruleset(inputs.ruleset)
    bundle = read_bundle(inputs.bundle) if bundle is None else bundle
    model = read_model_facts(inputs.model)
    intended = within_context(plan_size_of(bundle, inputs.bundle), model)
    intent = intended.changed(inputs.limits, f"policy of {inputs.site}")
    size = within_context(intent, model)
    prints = read_fingerprints(inputs.model)
    dtype, freeze, shifts = _updates_of(ruleset, inputs.dtype)
    peers = tuple(bundle["peers"])
    schema = lora_schema_of(
        inputs.model,
        inputs.rank,
        inputs.alpha,
        inputs.targets,
        dtype=dtype,
        freeze=freeze,
        shift_rank=shift_rank_of(inputs.rank, len(peers)) if shifts else 0,
        base_model_sha256=prints.base_model_sha256,
    )
    public = read_tasks(inputs.public, PUBLIC)
    held_out = read_tasks(inputs.held_out) if inputs.held_out else None
    if held_out and held_out.sha256 == public.sha256:
        raise UsageError(
            f"{inputs.held_out} is the public set, {inputs.public}: a model would be judged by what it is trained on",
            hint="give other questions as --held-out",
        )
    facts = SiteFacts(
        site=inputs.site,
        federation=bundle["federation"],
        coordinator=bundle["coordinator_spiffe_id"],
        coordinator_key_sha256=sha256_hex(bytes.fromhex(bundle["coordinator_signing_key_hex"])),
        peers=peers,
        schema=schema,
        schema_file=inputs.schema_file,
        tokenizer_sha256=prints.tokenizer_sha256,
        template_sha256=read_template(inputs.template, inputs.model).sha256 or prints.template_sha256,
        public_file=str(inputs.public.absolute()),
        public_sha256=public.sha256,
        public_rows=len(public.rows),
        valid_from=_utc(inputs.now_seconds - DAY_SECONDS),
        valid_until=_utc(inputs.now_seconds + inputs.valid_days * DAY_SECONDS),
        held_out_file=str(inputs.held_out.absolute()) if inputs.held_out else "",
        held_out_sha256=held_out.sha256 if held_out else "",
        held_out_rows=len(held_out.rows) if held_out else 0,
        hidden_shape=(model.layers, model.hidden),
        topics=tuple(sorted({task.topic for task in held_out.rows if task.topic})) if held_out else (),
        min_peers=min(2, len(peers)) if inputs.min_peers is None else inputs.min_peers,
        least_isolation=inputs.least_isolation,
        first_rounds=inputs.first_rounds,
        size=size,
        server_optimisers=inputs.server_optimisers,
        peers_max_l2=_peers_max_l2(bundle, inputs.bundle, intended, schema),
    )
    text = render_policy(ruleset, facts)
    warnings = []
    if size != intent:
        warnings.append(f"max_new_tokens {intent.max_new_tokens} is beyond the model's context: {size.max_new_tokens}")
    if looser := size.looser_than(intended):
        warnings.append(f"looser than the federation's bundle: {', '.join(looser)}")
    made = load_policy(text.encode(), f"policy of {inputs.site}")
    warnings += [*text_warnings(made), *record_warnings(made)]
    return SitePolicy(text, schema.canonical() + b"\n", schema, size, tuple(warnings))


def _peers_max_l2(bundle: Mapping[str, Any], source: Path, intended: PlanSize, schema: LoraSchema) -> float:
    """Return the longest delta that a peer may send: the charter binds all of them; without one, the intended size."""
    charter = charter_of(bundle, source)
    if charter is None:
        return delta_limits(intended, schema)[1]
    return max((block.max_l2 for block in charter.policy.file.egress.updates.values()), default=0.0)


def shift_rank_of(rank: int, silos: int) -> int:
    """Return the rank of a base's shift that takes all that some rounds leave over, of however many silos."""
    return ROUNDS_OF_SHIFT * rank * silos


def _updates_of(ruleset: str, asked_dtype: str) -> tuple[str, Freeze, bool]:
    """(dtype, freeze, whether the base is shifted) of the schema that a ruleset is for.

    Raises:
        UsageError: another dtype was asked for.
    """
    schemas = strict_yaml.load(ruleset.encode(), "ruleset").value["lora_schemas"]
    pins = list(schemas.values()) if isinstance(schemas, dict) else []
    fixed = {str(pin["dtype"]) for pin in pins} - {"$dtype"}
    if asked_dtype and fixed - {asked_dtype}:
        raise UsageError(f"this ruleset's updates are {', '.join(fixed)}, not {asked_dtype}", hint="leave --dtype out")
    freezes = [pin.get("freeze", "none") for pin in pins]
    freeze = freeze_named(freezes[0] if freezes else "none")
    return asked_dtype or next(iter(fixed), "float32"), freeze, any("shift_rank" in pin for pin in pins)


def within_context(size: PlanSize, model: ModelFacts) -> PlanSize:
    """Return the size with no longer answer than the model's context."""
    return replace(size, max_new_tokens=min(size.max_new_tokens, model.context_tokens))


def plan_size_of(bundle: Mapping[str, Any], source: Path) -> PlanSize:
    """The size of plan that the federation means to run; the defaults for what its bundle does not say.

    Raises:
        UsageError: a number that is none.
    """
    stated = bundle.get("plan_size", {})
    if not isinstance(stated, dict):
        raise UsageError(f"{source}: plan_size is a mapping", hint="`coordinator init` writes federation.json")
    return PlanSize().changed(stated, f"{source}: plan_size")


def read_ruleset(name: str) -> str:
    """Text of a shipped ruleset. Raises UsageError for a name there is none of."""
    file = resources.files("policies").joinpath("rulesets", f"{ruleset_name(name)}.yaml")
    return file.read_text(encoding="utf-8")


def read_policy(path: Path, *, kept: bool = False) -> Policy:
    """Read a policy file. Raises UsageError: no such file, no plain one, or a mistake in it or in what it names, with
    line and hint."""
    return load_policy(_text_of(path), str(path), files_beside(path), kept=kept)


def _text_of(path: Path) -> bytes | None:
    """The bytes of a policy or charter; None where nothing is there. Raises UsageError: no file is."""
    return read_regular(path, hint="name a file, such as policy.yaml") if path.exists() else None


def files_beside(policy: Path) -> Beside:
    """Reads a file by its name in a policy's own folder. Links are followed there, as the policy itself may be one."""

    def read(name: str) -> tuple[bytes, str]:
        place = policy.parent / name
        hint = "it belongs into the policy's folder, readable for whoever reads the policy; the guard in a container "
        hint += "sees it only where both are mounted"
        if not place.exists():
            raise UsageError(f"{place} is not there, as far as this program can see", hint=hint)
        return read_regular(place, hint=hint, bytes_max=strict_yaml.BYTES_MAX), str(place)

    return read


def read_charter(path: Path, *, kept: bool = False) -> Policy:
    """The federation's charter. It goes from hand to hand as one text, so no file of a folder belongs to it.

    Raises:
        UsageError: as `read_policy`, or it names a file of own patterns.
    """
    return load_policy(_text_of(path), str(path), kept=kept)


def read_effective(
    path: Path, charter: Path | None, charter_sha256: str | None = None, *, kept: bool = False
) -> Policy:
    """A site's policy, tightened by the federation's charter where there is one (T34, D8).

    Args:
        path: the site's own file.
        charter: the federation's.
        charter_sha256: digest of the charter's meaning, as agreed; None compares nothing.
        kept: as for `load_policy`.

    Raises:
        UsageError: a file is missing or wrong, the charter is not the agreed one, or both have nothing in common.
    """
    site = read_policy(path, kept=kept)
    if charter is None:
        return site
    if not charter.is_file():
        raise UsageError(
            f"{charter}: there is no such charter, and without it nothing says what the federation forbids",
            hint="take it from the federation's bundle (`charter` in federation.json), or ask the coordinator's people",
            code="NO_CHARTER",
        )
    charter_read = read_charter(charter, kept=kept)
    if charter_sha256 not in (None, charter_read.digest):
        raise UsageError(
            f"{charter} has digest {charter_read.digest}; charter_sha256 says {charter_sha256}",
            hint="`fedsilo policy diff` shows what differs from the charter that was agreed",
            code="CHARTER_MISMATCH",
        )
    return effective(site, charter_read)


def read_schema(path: Path) -> LoraSchema:
    """Read a LoRA schema. Raises UsageError: no such file, or not a schema."""
    if not path.is_file():
        raise UsageError(f"{path}: there is no such LoRA schema", hint="write it with `fedsilo policy schema make`")
    return schema_from_json(path.read_bytes(), str(path))


def read_pinned_schema(policy: Policy, folder: Path) -> LoraSchema:
    """The schema that the policy's egress names, read from `folder` and compared with its pinned hash.

    Raises:
        UsageError: no factor kind in the policy, file missing, or another hash than the pinned one.
    """
    block = next(iter(policy.file.egress.updates.values()), None)
    if block is None:
        raise UsageError(f"{policy.source}: it lets no factors out, so it names no LoRA schema")
    pin = policy.file.lora_schemas[block.schema_name]
    schema = read_schema(folder / pin.file)
    if schema.digest != pin.sha256:
        line = policy.line_of(("lora_schemas", block.schema_name, "sha256"))
        raise UsageError(
            f"{policy.source}:{line}: {folder / pin.file} has hash {schema.digest}, the policy pins {pin.sha256}",
            hint="fedsilo policy schema make",
        )
    return schema


@dataclass(frozen=True)
class Charter:
    """The federation's charter as its bundle carries it."""

    text: bytes
    policy: Policy


def charter_of(bundle: Mapping[str, Any], source: Path) -> Charter | None:
    """The charter in a federation's bundle; None in one that carries none.

    Raises:
        UsageError: it is no policy, or not the one whose digest stands beside it.
    """
    text = bundle.get("charter")
    if text is None:
        return None
    if not isinstance(text, str):
        raise UsageError(f"{source}: charter is the text of a policy", hint="`coordinator init` writes federation.json")
    policy = load_policy(text.encode(), f"{source}, charter")
    if policy.digest != bundle.get("charter_sha256"):
        raise UsageError(
            f"{source}: the charter has digest {policy.digest}, charter_sha256 says {bundle.get('charter_sha256')}",
            hint="get the bundle again from the coordinator's people",
            code="CHARTER_MISMATCH",
        )
    return Charter(text.encode(), policy)


def read_bundle(path: Path) -> dict[str, Any]:
    """The federation bundle. Raises UsageError: missing, not JSON, or a key lacking."""
    hint = "`coordinator init` writes federation.json"
    if not path.is_file():
        raise UsageError(f"{path}: there is no such federation bundle", hint=hint)
    try:
        bundle = json.loads(read_regular(path, hint=hint))
    except json.JSONDecodeError as error:
        raise UsageError(f"{path}:{error.lineno}: not a federation bundle, it is not JSON", hint=hint) from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not a federation bundle, it is not UTF-8 text", hint=hint) from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits; brackets in thousands of brackets
        message = f"{path}: not a federation bundle, it is nested too deep or holds too long a number"
        raise UsageError(message, hint=hint) from error
    if not isinstance(bundle, dict):
        raise UsageError(f"{path}: not a federation bundle, it is no block of keys", hint=hint)
    for key in ("federation", "coordinator_spiffe_id", "coordinator_signing_key_hex"):
        if not isinstance(bundle.get(key), str):
            wrong = "is no text" if key in bundle else "is missing"
            raise UsageError(f"{path}: not a federation bundle, {key!r} {wrong}", hint=hint)
    if not bundle.get("peers"):
        raise UsageError(f"{path}: not a federation bundle, 'peers' is missing or empty", hint=hint)
    try:
        bytes.fromhex(bundle["coordinator_signing_key_hex"])
    except ValueError as error:
        message = f"{path}: not a federation bundle, 'coordinator_signing_key_hex' is not hexadecimal"
        raise UsageError(message, hint=hint) from error
    return bundle


def _utc(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
