"""The checks of a site: every check of a start, and further ones, each with what it found. What `silo check` runs.

`_table` lists them in order, with what each needs; whoever looks for a check finds its function there. A check may dial
the coordinator, and says nothing but a TLS hello there. Prompts are rendered, and vLLM is imported, by a process behind
the trainer's sandbox: it reads a model folder's template (threat T22), so of its answer nothing is taken but numbers
and texts of the expected form, and who shows a text makes it printable first (T37).

Does not stop: where the machine builds no sandbox (`waived`), a template that breaks out of transformers' sandbox may
do what the person may who runs `silo check`.
"""

from __future__ import annotations

import json
import os
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict

from certs.identity import peer_identity
from fedsilo.files.durable import holder_of, require_space
from fedsilo.files.identity_files import load_site
from fedsilo.files.model_facts import ModelFacts, read_model_facts
from fedsilo.files.model_folder import read_template
from fedsilo.files.task_files import PUBLIC, TaskFile, listed, read_tasks, read_usable
from fedsilo.grading.data_findings import HELD_OUT, PRIVATE, find
from fedsilo.grading.own_verifiers import find_verifier
from fedsilo.grading.worker import our_parts_check
from fedsilo.protocol.clocks import utc
from fedsilo.protocol.errors import FedSiloError, NotAllowedError, OperationError, UsageError
from fedsilo.protocol.isolation import isolates_at_least
from fedsilo.protocol.plan import Plan, plan_from_canonical
from policies.compare import compare
from policies.model import Policy
from silo.config import SiloConfig, place_of
from silo.guard.clock_watch import look_offline
from silo.guard.gate import coordinator_leaf
from silo.guard.ledger import Ledger
from silo.guard.ledger_check import disagreement, named_in_folder
from silo.guard.policy_change import Seen, step_to
from silo.guard.screens import check_screens
from silo.guard.site import (
    AUDIT,
    LEDGER,
    LOCK,
    Site,
    effective_policy,
    field_names,
    load_site_parts,
    never_shown,
    own_verifiers,
    require_authority_files,
    site_identity,
    thread_warning,
)
from silo.guard.trainer_process import probing, sandbox
from silo.guard.trainer_process.rollout_server import check as check_rollout
from silo.guard.trainer_process.rollout_server import environment_of
from silo.guard.trainer_process.sandbox import trainer_environment
from silo.guard.trainer_process.supervisor import public_grader
from silo.guard.trainer_process.trainer_link import check as check_trainer_link
from silo.guard.trainer_report import PROMPT_SETS
from silo.memory_estimate import Settings, Shapes, estimate, judge, machine, require_card, size_text

# names of checks that others need
PINNED = "pinned files"
BASE_MODEL = "base model"
TOPICS_SHOWN_MAX = 6
PREVIEW_SECONDS = 600.0
ANSWER_BYTES_MAX = 16 << 20  # of a process in a sandbox
IMPORT_SECONDS = 300.0  # vLLM loads torch; from a cold disk that takes a minute or two
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # those of vLLM 0.32's --max-lora-rank
PAGE = "docs/how-to/vllm.md"


class NotTriedHere(Exception):
    """A check that this machine cannot make, and need not: why."""


@dataclass
class Look:
    """State that the checks of one site share, so that nothing is read twice. A check that reads something says so in
    `_table`, and whoever uses it needs that check.

    Attributes:
        config: the site.
        show_prompts: so many private prompts are rendered.
        warnings: what is no fault, and a person should know.
        private: private files, as they were read.
        site: everything that is pinned.
        facts: of the base model.
        preview: lengths of the prompts, and some as text.
    """

    config: SiloConfig
    show_prompts: int = 0
    warnings: list[str] = field(default_factory=list)
    private: list[TaskFile] = field(default_factory=list)
    site: Site | None = None
    facts: ModelFacts | None = None
    preview: Preview | None = None

    @cached_property
    def policy(self) -> Policy:
        """The effective policy. Raises UsageError."""
        return effective_policy(self.config)

    @cached_property
    def plan(self) -> Plan | None:
        """Plan of the open run."""
        path = self.config.state_dir / LEDGER
        if not path.is_file():
            return None
        try:
            with closing(Ledger(path, read_only=True)) as ledger:
                opened = ledger.open_run()
            return None if opened is None else plan_from_canonical(opened[1])
        except (FedSiloError, sqlite3.Error, json.JSONDecodeError):
            return None  # another check says what is wrong with the ledger

    @property
    def model(self) -> ModelFacts:
        if self.facts is None:
            raise ValueError(f"it needs {BASE_MODEL}")
        return self.facts


class Check(NamedTuple):
    """One line of `silo check`.

    Attributes:
        look: says what is as it should be, or raises a FedSiloError, or NotTriedHere.
        needs: names of the checks that have to have passed.
        wanted: whether the site has what it looks at.
    """

    name: str
    look: Callable[[Look], str]
    needs: tuple[str, ...] = ()
    wanted: bool = True


def check_site(
    config: SiloConfig, *, reach_coordinator: bool = True, read_prompts: bool = False, show_prompts: int = 0
) -> tuple[list[dict[str, Any]], Look, list[FedSiloError]]:
    """Run every check.

    Args:
        config: the site.
        reach_coordinator: also dial the coordinator and judge its certificate.
        read_prompts: also look at the prompts' token lengths, which takes seconds.
        show_prompts: so many private prompts are rendered with that.

    Returns:
        Each check's name, whether it passed (None: not tried) and what it found; what the checks read, with their
        warnings; the faults.
    """
    look = Look(config, show_prompts, [text for text in (thread_warning(config),) if text])
    results: list[dict[str, Any]] = []
    errors: list[FedSiloError] = []
    passed: set[str] = set()
    for check in _table(config, reach_coordinator=reach_coordinator, read_prompts=read_prompts):
        result: dict[str, Any] = {"check": check.name, "ok": None, "found": "", "hint": ""}
        if lacking := [each for each in check.needs if each not in passed]:
            result["found"] = f"not tried: it needs {' and '.join(lacking)}"
        else:
            try:
                result |= {"found": check.look(look), "ok": True}
                passed.add(check.name)
            except NotTriedHere as reason:
                result["found"] = f"not tried: {reason}"
            except FedSiloError as error:
                result |= {"ok": False, "found": error.message, "hint": error.hint, "code": error.code}
                errors.append(error)
        results.append(result)
    return results, look, errors


def _table(config: SiloConfig, *, reach_coordinator: bool, read_prompts: bool) -> list[Check]:
    """The checks of a site, in the order in which they are made."""
    files = tuple(f"private data {path.name}" for path in config.data.private)
    by_files, vllm = config.coordinator.by_files, config.rollout.chosen == "vllm"
    table = [
        *(Check(name, partial(_rows, place=place)) for place, name in enumerate(files)),
        Check("policy", _policy),
        Check("clock", _clock),
        Check("updates in a mean", _updates_in_a_mean, ("policy",)),
        Check("certificate", _certificate),
        Check("disk", lambda look: require_space(look.config.state_dir)),
        Check("files that rule this site", _authority, ("policy",)),
        Check("ledger against the log", _ledger_named),
        Check("policy against the one last in force", _policy_change, ("policy",)),
        Check(PINNED, _pinned, ("policy", "certificate")),
        Check(BASE_MODEL, _base_model),
        Check("memory", memory, ("policy", BASE_MODEL)),
        Check("prompts in two places", _overlaps, (*files, PINNED)),
        Check("acceptance", acceptance, (*files, PINNED), wanted=config.acceptance is not None),
        Check("prompts", prompts, (*files, BASE_MODEL, PINNED), wanted=read_prompts),
        Check("text screens", lambda look: check_screens(look.config, look.policy), ("policy",)),
        Check("verifiers", verifiers, (PINNED,)),
        Check("rollout engine", lambda look: check_rollout(look.config)),
        Check("rollout limits", rollout_limits, ("policy", BASE_MODEL), wanted=vllm),
        Check("vLLM", vllm_there, ("rollout engine",), wanted=starts_vllm(config)),
        Check("trainer link", lambda look: check_trainer_link(look.config), wanted=config.trainer.launch == "external"),
        Check("trainer isolation", _isolation, ("policy",)),
        Check("coordinator", lambda look: "by files: nothing is dialled", wanted=by_files),
        Check("coordinator", _coordinator, (PINNED,), wanted=reach_coordinator and not by_files),
    ]
    return [check for check in table if check.wanted]


# ---- what rules this site ----------------------------------------------------------------------------


def _policy(look: Look) -> str:
    policy = look.policy
    if policy.charter is None:
        return f"{policy.file.name} {policy.digest[:12]}, no charter"
    own, charter = policy.parts
    tightened = [change for change in compare(own.file, policy.file) if change.direction != "cosmetic"]
    if apart := _apart(policy):
        look.warnings.append(f"{charter.source} and {own.source} have nothing in common for {', '.join(apart)}: denied")
    return (
        f"{policy.file.name} {policy.digest[:12]}: {own.source} {own.digest[:12]} with {charter.source} "
        f"{charter.digest[:12]}, which tightens {len(tightened)} field{'s' * (len(tightened) != 1)}"
    )


def _apart(policy: Policy) -> list[str]:
    """Kinds that site and charter both name, and of which nothing is left when both are in force."""
    own, charter = policy.parts
    return [
        f"{side} {field.alias or name}"
        for side in ("egress", "ingress")
        for name, field in type(getattr(own.file, side)).model_fields.items()
        if getattr(getattr(own.file, side), name) is not None
        and getattr(getattr(charter.file, side), name) is not None
        and getattr(getattr(policy.file, side), name) is None
    ]


def _updates_in_a_mean(look: Look) -> str:
    """The least number of updates that one of this site enters a mean over (T58).

    Raises:
        UsageError: MIN_UPDATES, there are fewer silos, so no round could be committed. Names the file.
    """
    policy = look.policy
    peers, least, place = len(policy.peers), policy.file.federation.min_updates, ("federation", "min_updates")
    if least > peers:
        part = max(policy.parts or (policy,), key=lambda part: part.file.federation.min_updates)
        raise UsageError(
            f"{part.source}:{part.line_of(place)}: it says {least} updates in a mean, and policy and charter have "
            f"{peers} silo{'s' * (peers != 1)} in common, so no round could be committed",
            hint="list more silos under federation.peers in both, or lower min_updates",
            code="MIN_UPDATES",
        )
    return f"at least {least} of {peers}"


def _certificate(look: Look) -> str:
    identity = site_identity(look.config)
    return f"{identity.spiffe_id} until {identity.not_after:%Y-%m-%dT%H:%M:%SZ}"


def _authority(look: Look) -> str:
    require_authority_files(look.config)
    return "nobody else may write them, or a folder on the way to them"


def _policy_change(look: Look) -> str:
    config, path = look.config, look.config.state_dir / LEDGER
    if not path.is_file():
        return "none was in force before"
    with closing(Ledger(path, read_only=True)) as ledger:
        step = step_to(
            look.policy,
            ledger,
            Seen.in_folder(config.state_dir / AUDIT),
            config,
            load_site(config.identity.site_ca, config.identity.operators, site=config.silo),
            max(ledger.latest_time, time.time()),
        )
    return f"{step.how}{f', {len(step.changes)} fields change' if step.changes else ''}"


def _pinned(look: Look) -> str:
    look.site = load_site_parts(look.config, make_secret=False)
    return "coordinator's key, model, schema, public and held-out set as pinned"


# ---- clock, ledger, coordinator ----------------------------------------------------------------------


def _clock(look: Look) -> str:
    path, now = look.config.state_dir / LEDGER, time.time()
    if not path.is_file():
        return f"{utc(now)}, not compared yet: a start compares it with the coordinator's"
    with closing(Ledger(path, read_only=True)) as ledger:
        words, warning = look_offline(ledger, now)
    look.warnings.extend([warning] * bool(warning))
    return words


def _ledger_named(look: Look) -> str:
    config = look.config
    if holder_of(config.state_dir / LOCK):  # it writes both meanwhile
        raise NotTriedHere("the silo runs, and compared the two when it started")
    difference = disagreement(config, named := named_in_folder(config.state_dir / AUDIT))
    if difference is not None:
        raise difference.error(config)
    return f"group {named['groups']}, as the log names it" if named else "the log names none yet"


def _coordinator(look: Look) -> str:
    if look.site is None:
        raise ValueError(f"it needs {PINNED}")
    return f"certificate {look_at_coordinator(look.site, datetime.now(UTC))['certificate'][:16]}"


def look_at_coordinator(site: Site, now: datetime) -> dict[str, str]:
    """Return who answers at the coordinator's address (threat T30), as a release's destination shows it.

    Returns:
        {"certificate": fingerprint, "not_after": its end in UTC, ISO 8601}.

    Raises:
        UnreachableError: nobody, or TLS fails; the cause is named.
        NotAllowedError: it is not the coordinator that the policy names.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import Encoding

    leaf = x509.load_der_x509_certificate(coordinator_leaf(site.config.coordinator, site.tls))
    peer = peer_identity(leaf.public_bytes(Encoding.PEM), site.identity.trust_root_pem, now, role="coordinator")
    if peer.spiffe_id != site.policy.file.federation.coordinator:
        raise NotAllowedError(
            f"{site.config.coordinator.address} is {peer.spiffe_id}; the policy names "
            f"{site.policy.file.federation.coordinator}"
        )
    return {"certificate": peer.fingerprint, "not_after": f"{leaf.not_valid_after_utc:%Y-%m-%dT%H:%M:%SZ}"}


# ---- rows and model ----------------------------------------------------------------------------------


def _rows(look: Look, place: int) -> str:
    """Read one private file as the trainer will; the rows that are left out, and why, are added to the warnings."""
    config = look.config
    path, verifier = config.data.private[place], config.data.verifier
    # a package's verifier is not asked: its code has no place in the guard, and the trainer asks it when it starts
    (tasks,) = read_usable([path], our_parts_check(verifier), field_names(config))
    if tasks.problems:
        look.warnings.append(f"{path}: {listed(tasks.problems, tasks.unit)}")
    groups = len({task.group for task in tasks.rows if task.group})
    grouped = f" of {groups} groups" if groups else ""
    look.private.append(tasks)
    return f"{len(tasks.rows)} rows{grouped}, {len(tasks.problems)} {tasks.unit}s left out"


def verifiers(look: Look) -> str:
    """Say what grades, and what the coordinator has to agree to where packages brought parts of it.

    Raises:
        UsageError, OperationError: public answers are programs, and there is no sandbox to run them in.
    """
    config = look.config
    names = {
        "private": config.data.verifier,
        "public": config.data.public.verifier,
        "held-out": config.held_out_verifier,
    }
    words = ", ".join(f"{which} {name}" for which, name in names.items())
    if find_verifier(config.data.public.verifier).executes:
        public_grader(config).close()
        words += "; public answers run as programs in a sandbox"
    origins = sorted({each for name in names.values() for each in find_verifier(name).origin})
    if not origins:
        return words
    return f"{words}; by {', '.join(origins)}: own_verifiers_sha256 {own_verifiers(config)}"


def _overlaps(look: Look) -> str:
    """Duplicates and leaks. None of them is refused: which of two rows is the right one is for a person to say."""
    config = look.config
    overlap = find(look.private, read_tasks(config.data.public.path, PUBLIC), read_tasks(config.data.held_out.path))
    look.warnings += [each.words(ids=True) for each in overlap]
    leaked = sum(each.rows for each in overlap if (each.where, each.also) == (PRIVATE, HELD_OUT))
    other = sum(each.rows for each in overlap) - leaked
    if not overlap:
        return "no prompt stands twice, or in two of the sets"
    measured = f"{leaked} private prompts are held-out ones, so that what is measured is too good" if leaked else ""
    return "; ".join(each for each in (measured, f"{other} other prompts stand twice" if other else "") if each)


def acceptance(look: Look) -> str:
    """On how many prompts an incoming adapter would be tried (T52). With too few each one is held."""
    config, limits, plan = look.config, look.config.acceptance, look.plan
    if limits is None:
        raise NotTriedHere("the site tries no adapter")
    rows = {
        "private": round(sum(len(each.rows) for each in look.private) * config.data.holdout_share),
        "held_out": len(read_tasks(config.data.held_out.path).rows),
    }
    if plan is not None:
        rows["held_out"] = min(rows["held_out"], plan.evaluation.prompts)
    least = limits.prompts_min
    for name in limits.prompts:
        if rows[name] < least:
            look.warnings.append(
                f"{place_of(config, 'acceptance')}: about {rows[name]} {name} prompts to try an adapter on, "
                f"acceptance.prompts_min is {least}: each one would be held"
            )
    return ", ".join(f"on about {rows[name]} {name} prompts" for name in limits.prompts)


def _base_model(look: Look) -> str:
    """Return whether the decoder computes what the folder holds, and the template that is used."""
    config = look.config
    facts = look.facts = read_model_facts(config.model.path)
    template = read_template(config.data.template, config.model.path)
    if template.reads_clock:
        look.warnings.append(
            f"the template ({template.source}) reads the date, so prompts differ from day to day under one hash; "
            "data.template: a copy with a fixed date"
        )
    compare_load(config, look.plan)
    head = "tied" if facts.tied else "own"
    return (
        f"{facts.architecture}, {facts.parameters / 1e6:.1f} M parameters, {head} head, context "
        f"{facts.context_tokens}, template {template.source}, loaded as {config.model.load} (the coordinator compares "
        "that with the federation's at the first hello)"
    )


def compare_load(config: SiloConfig, plan: Plan | None) -> None:
    """Compare how the base model is loaded with the open run: no file of the site says how the federation loads it."""
    if plan is not None and plan.load != config.model.load and plan.mixed_base == "refuse":
        raise UsageError(
            f"{place_of(config, 'model.load')}: model.load is {config.model.load}, that of run {plan.run} {plan.load}",
            hint=f"model.load: {plan.load}, or a run whose plan says mixed_base: allow",
            code="LOAD_MISMATCH",
        )


def memory(look: Look) -> str:
    """The estimate beside what the machine has.

    Raises:
        UsageError: it cannot fit (`silo.memory_estimate.judge`).
    """
    config, facts = look.config, look.model
    shift_rank = max((pin.shift_rank for pin in look.policy.file.lora_schemas.values()), default=0)
    shapes = replace(_shapes_of(look.plan, facts), shift_rank=shift_rank)
    has = machine(config.trainer.devices)
    on_cuda = has is not None and has.kind == "CUDA"
    settings = Settings(
        load=config.model.load,
        microbatch_tokens=config.trainer.microbatch_tokens,
        cache_bytes=config.trainer.cache_bytes,
        checkpointing=config.trainer.checkpointing,
        on_cuda=on_cuda,
        samples_here=config.rollout.chosen == "embedded",
        servers=_servers_here(config),
        server_cache_bytes=config.rollout.kv_cache_bytes,
        processes=1 if on_cuda else config.trainer.processes,  # on cards each has one of its own
    )
    needs = estimate(facts, settings, shapes)
    shares = ", ".join(
        f"{name} {size_text(size)}" for name, size in needs.parts.items() if size >= needs.peak_bytes // 100
    )
    if config.trainer.launch == "external":
        return f"about {size_text(needs.peak_bytes)} where the trainer runs ({shapes.source}): {shares}"
    require_card(config.trainer.devices)
    if short := judge(needs, has, settings, config.silos_on_this_host * settings.processes):
        look.warnings.append(short)
    owned = "what this machine has is not known" if has is None else f"{size_text(has.free_bytes)} of {has.kind} free"
    each = f" for each of {config.trainer.processes} processes" if config.trainer.processes > 1 else ""
    peak = f"about {size_text(needs.peak_bytes)}{each} at its peak, in {needs.phase}"
    return f"{peak}; {owned} ({shapes.source}): {shares}"


def _servers_here(config: SiloConfig) -> int:
    """Rollout servers that the guard starts: one for private prompts and one for public ones, or one for both."""
    rollout = config.rollout
    if rollout.chosen == "embedded" or rollout.launch == "external":
        return 0
    return 1 if rollout.url is not None and rollout.url == rollout.public_url else 2


def _shapes_of(plan: Plan | None, facts: ModelFacts) -> Shapes:
    """Return the shapes of the plan; else a plan's defaults, cut to what the model's context takes."""
    if plan is None:
        usual = Shapes()
        prompt = min(usual.max_prompt_tokens, max(facts.context_tokens // 2, 1))
        new = min(usual.max_new_tokens, max(facts.context_tokens - prompt, 1))
        return Shapes(max_prompt_tokens=prompt, max_new_tokens=new, source="for a plan's defaults, no run is open")
    return Shapes(
        prompts_per_step=plan.prompts_per_step,
        samples_per_prompt=plan.samples_per_prompt,
        max_prompt_tokens=plan.rollout.max_prompt_tokens,
        max_new_tokens=plan.rollout.max_new_tokens,
        evaluation_answers=plan.evaluation.prompts * plan.evaluation.samples,
        rank=plan.lora.rank,
        with_entropy=plan.objective.entropy_coefficient > 0,
        source=f"for run {plan.run}",
    )


# ---- prompts -----------------------------------------------------------------------------------------


class _Report(BaseModel):
    model_config = ConfigDict(frozen=True, hide_input_in_errors=True)


Quantiles = tuple[int, int, int, int, int] | tuple[()]  # smallest, median, 90 %, 99 %, largest; () of no rows


class Lengths(_Report):
    """Prompt lengths of one set. `topics`: rows by topic. The other fields count prompts
    (`silo.trainer.data.preview`)."""

    rows: int
    prompt_tokens: Quantiles
    answer_tokens: Quantiles
    overlong: int
    topics: Mapping[str, int]
    ended: int
    alike: int
    without_text: int


class Shown(_Report):
    """A private prompt as the model reads it, cut where it is long."""

    id: str
    file: str
    line: int
    tokens: int
    text: str


class Preview(_Report):
    """Report of the process that renders prompts; its numbers and texts have the expected types."""

    sets: Mapping[str, Lengths]
    prompts: tuple[Shown, ...]


def prompts(look: Look) -> str:
    """Token lengths of the three sets, and some prompts as text.

    Raises:
        NotTriedHere: the trainer's libraries are not installed here, and it may run elsewhere.
        UsageError, OperationError: as `preview`.
    """
    config, limit = look.config, _shapes_of(look.plan, look.model).max_prompt_tokens
    try:
        preview_shown = look.preview = preview(config, max_prompt_tokens=limit, show=look.show_prompts)
    except FedSiloError as error:
        if error.code == "EXTRA_MISSING" and config.trainer.launch == "external":
            raise NotTriedHere(error.message) from error
        raise
    overlong = {name: each.overlong for name, each in preview_shown.sets.items() if each.overlong}
    if overlong:
        many = ", ".join(f"{count} of {preview_shown.sets[name].rows} {name}" for name, count in overlong.items())
        look.warnings.append(f"prompts of more than {limit} tokens are left out: {many}")
    for name, each in preview_shown.sets.items():
        if each.ended:
            look.warnings.append(
                f"{each.ended} of {each.rows} {name} prompts end with the token that ends an answer, so their answers "
                "may be empty: take it out of the template, or out of what tokenizer.json puts after a text"
            )
        if each.without_text:
            look.warnings.append(
                f"{name} prompts whose text is not in what the template makes of them: {each.without_text}"
            )
        if each.alike:
            look.warnings.append(f"{each.alike} {name} prompts become the same tokens as another one")
    private = preview_shown.sets[PRIVATE]
    return f"{_lengths(private)}; {_topics(private)}"


def _lengths(lengths: Lengths) -> str:
    if not lengths.prompt_tokens:
        return "no rows"
    low, median, most, nearly, high = lengths.prompt_tokens
    return f"tokens {low} to {high}, median {median}, 90 % within {most}, 99 % within {nearly}"


def _topics(lengths: Lengths) -> str:
    ordered = sorted(lengths.topics.items(), key=lambda each: (-each[1], each[0]))
    shown = ", ".join(f"{topic[:40]} {rows}" for topic, rows in ordered[:TOPICS_SHOWN_MAX])
    more = f" and {len(ordered) - TOPICS_SHOWN_MAX} more" if len(ordered) > TOPICS_SHOWN_MAX else ""
    return f"topics {shown}{more}"


def preview(config: SiloConfig, *, max_prompt_tokens: int, show: int) -> Preview:
    """Takes seconds, and some ten more for each 10,000 rows.

    Args:
        config: the site.
        max_prompt_tokens: of the plan; longer prompts are counted.
        show: so many prompts as text.

    Raises:
        UsageError: a file, the tokenizer or the template cannot be used.
        OperationError: no process could be started, or it gave no answer.
    """
    request = {
        "model": str(config.model.path),
        "template": read_template(config.data.template, config.model.path).text,
        "private": [str(path) for path in config.data.private],
        "fields": config.data.fields.model_dump(),
        "verifier": config.data.verifier,
        "public": str(config.data.public.path),
        "held_out": str(config.data.held_out.path),
        "max_prompt_tokens": max_prompt_tokens,
        "show": show,
    }
    python = str(config.trainer.python or sys.executable)
    content, status = _in_sandbox(
        config,
        [python, "-P", "-m", "silo.trainer.data"],
        lambda scratch: trainer_environment(os.environ, threads=1, scratch=scratch),
        seconds=PREVIEW_SECONDS,
        readable=[config.model.path, *config.data.private, config.data.public.path, config.data.held_out.path],
        question=json.dumps(request).encode(),
        fault=lambda why: OperationError(f"the prompts cannot be rendered: {why}", code="TRAINER_START"),
    )
    try:
        answer = json.loads(content)
        if "error" in answer:
            fault = {name: str(answer["error"][name])[:500] for name in ("message", "hint", "code")}
            raise UsageError(fault["message"], hint=fault["hint"], code=fault["code"])
        found = Preview.model_validate(answer)
        if found.sets.keys() != set(PROMPT_SETS):
            raise ValueError(f"sets are {', '.join(found.sets)[:200]}")
        return found
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise OperationError(f"the process that renders prompts ended with status {status} and no answer") from error


# ---- a vLLM server -----------------------------------------------------------------------------------
# vLLM itself says what does not fit only when a run has begun, in a log file of the server.

_IMPORT = """
import json
try:
    import vllm  # builds have distributions of other names, so the version is the package's own
    report = {"version": str(getattr(vllm, "__version__", "of no version"))}
except Exception as error:
    report = {"error": type(error).__name__ + ": " + str(error)[:300]}
print(json.dumps(report))
"""


def starts_vllm(config: SiloConfig) -> bool:
    """Return True if the guard starts vLLM with its own arguments."""
    rollout = config.rollout
    return rollout.chosen == "vllm" and rollout.launch == "child" and rollout.command is None


def vllm_there(look: Look) -> str:
    """Import vLLM with the interpreter that the servers get, in the sandbox they get.

    Raises:
        UsageError: it cannot be imported.
        OperationError: no process could be started.
    """
    config = look.config
    python = config.rollout.python or Path(sys.executable)
    hint = f"rollout.python: an interpreter that has vLLM; {PAGE}"
    answer, status = _in_sandbox(
        config,
        [str(python), "-P", "-c", _IMPORT],
        lambda scratch: environment_of(config, scratch),
        seconds=IMPORT_SECONDS,
        accelerators=config.trainer.devices != "cpu",
        errors_too=True,
        fault=lambda why: OperationError(f"{python} cannot be started: {why}", hint=hint, code="ROLLOUT_START"),
    )
    last_line = answer.decode("utf-8", "replace").strip().rpartition("\n")[2]
    try:
        report = json.loads(last_line)
        version, why = report.get("version"), str(report.get("error"))
    except (ValueError, AttributeError):
        version, why = None, f"it ended with status {status}: {last_line[:300] or 'no word'}"
    if version is None:
        place = place_of(config, "rollout.python")
        raise UsageError(f"{place}: {python} has no vLLM that can be imported: {why}", hint=hint, code="NOT_INSTALLED")
    return f"vLLM {str(version)[:40]} with {python}"


def rollout_limits(look: Look) -> str:
    """Compare what the servers take with the adapters and lengths of the open run, else of what the policy lets in.

    Raises:
        UsageError: they would not start, or a plan that is let in here could not be sampled; with the line.
    """
    config, policy, plan, context_tokens = look.config, look.policy, look.plan, look.model.context_tokens
    rollout = config.rollout
    schemas = policy.file.lora_schemas.values()
    rank = plan.lora.rank if plan is not None else max((schema.rank for schema in schemas), default=1)
    if starts_vllm(config):
        if rollout.max_lora_rank not in LORA_RANKS:
            known = ", ".join(map(str, LORA_RANKS))
            raise _wrong(config, "max_lora_rank", "is none that vLLM takes", f"one of {known}")
        if rollout.max_lora_rank < rank:
            least = next((each for each in LORA_RANKS if each >= rank), rank)
            raise _wrong(config, "max_lora_rank", f"is below the adapter's rank, {rank}", f"max_lora_rank: {least}")
        if rollout.max_model_tokens > context_tokens:
            context = f"is more than the model's context, {context_tokens}"
            raise _wrong(config, "max_model_tokens", context, f"max_model_tokens: {context_tokens} or less")
    wanted, whose = _tokens(policy, plan)
    if rollout.max_model_tokens < wanted:
        short = f"is less than {wanted} tokens of a prompt and its answer ({whose})"
        raise _wrong(config, "max_model_tokens", short, f"max_model_tokens: {wanted} or more")
    return f"rank {rank} of {rollout.max_lora_rank}, {wanted} of {rollout.max_model_tokens} tokens ({whose})"


def _tokens(policy: Policy, plan: Plan | None) -> tuple[int, str]:
    if plan is not None:
        return plan.rollout.max_prompt_tokens + plan.rollout.max_new_tokens, f"run {plan.run}"
    allowed = policy.file.ingress.run_plan
    # of prompts the policy says nothing: at least a token stands before an answer
    return (1 if allowed is None else allowed.max_new_tokens[1] + 1), "the longest answers that the policy lets in"


def _wrong(config: SiloConfig, key: str, what: str, hint: str) -> UsageError:
    value = getattr(config.rollout, key)
    place = place_of(config, f"rollout.{key}")
    return UsageError(f"{place}: rollout.{key}: {value} {what}", hint=f"{hint}; {PAGE}")


# ---- processes in a sandbox --------------------------------------------------------------------------


def _isolation(look: Look) -> str:
    trainer, least = look.config.trainer, look.policy.file.trainer.least_isolation
    best = probing.best_level() if trainer.launch == "child" else "container"
    level = best if trainer.isolation == "auto" else trainer.isolation
    if not isolates_at_least(level, least):
        giver = "this machine" if trainer.launch == "child" else "a trainer that somebody else starts"
        raise NotAllowedError(f"{giver} gives {level}; the policy accepts no less than {least}")
    probed = " at best, known when it connects and is probed" if trainer.launch == "external" else ""
    return f"{level}{probed} (policy: at least {least})"


def _in_sandbox(
    config: SiloConfig,
    command: list[str],
    environment: Callable[[Path], dict[str, str]],
    *,
    seconds: float,
    fault: Callable[[str], OperationError],
    readable: Sequence[Path] = (),
    question: bytes = b"",
    accelerators: bool = False,
    errors_too: bool = False,
) -> tuple[bytes, int | None]:
    """Run a program in the trainer's sandbox, and return the end of what it prints, and its exit status.

    Args:
        config: the site.
        command: the program.
        environment: made from the folder that it may write to.
        seconds: after which it is ended.
        fault: makes the error for a program that cannot be started, from the reason.
        readable: paths that it may read, besides the interpreter's.
        question: its standard input.
        accelerators: whether it may use a card.
        errors_too: its standard error is part of what it prints; else it goes where this process's goes.

    Raises:
        OperationError: it cannot be started.
    """
    level = probing.best_level() if config.trainer.isolation in ("auto", "container") else config.trainer.isolation
    with (
        tempfile.TemporaryDirectory(prefix="fedsilo-check-") as folder,
        tempfile.TemporaryFile() as request,
        tempfile.TemporaryFile() as answer,
    ):
        scratch = Path(folder)
        request.write(question)
        request.seek(0)
        try:
            process = sandbox.launch_in_sandbox(
                command, level=level, readable=readable, writable=[scratch], env=environment(scratch),
                never=never_shown(config), accelerators=accelerators, stdin=request, stdout=answer,
                stderr=answer if errors_too else None,
            )  # fmt: skip
        except (OSError, ValueError) as error:
            raise fault(str(error)) from error
        sandbox.end_process_group(process, seconds)
        size = answer.seek(0, os.SEEK_END)
        answer.seek(max(size - ANSWER_BYTES_MAX, 0))
        return answer.read(), process.returncode
