"""The parts of `silo check` that look at the model and the rows: can it be computed, does it fit, what do rows say."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence

from fedsilo.edge.data_findings import HELD_OUT, PRIVATE, find
from fedsilo.edge.model_facts import ModelFacts, read_model_facts
from fedsilo.edge.own_verifiers import find_verifier
from fedsilo.edge.prompt_template import read_template
from fedsilo.edge.reference_checks import our_parts_check
from fedsilo.edge.task_files import FieldNames, TaskFile, listed, read_tasks, read_usable
from fedsilo.treaty.errors import FedSiloError, UsageError
from fedsilo.treaty.plan import Plan, plan_from_canonical
from policies.load import Policy
from silo.config import Acceptance, SiloConfig, place_of
from silo.guard import rollout_checks
from silo.guard.ledger import Ledger
from silo.guard.prompt_preview import Lengths, Preview, preview
from silo.guard.public_grader import public_grader
from silo.guard.startup import LEDGER, own_verifiers
from silo.memory_estimate import Settings, Shapes, estimate, judge, machine, require_card, size_text

TOPICS_SHOWN_MAX = 6


class NotTriedHere(Exception):
    """A check that this machine cannot make, and need not: why."""


def field_names(config: SiloConfig) -> FieldNames:
    return FieldNames(**config.data.fields.model_dump())


def rows_of(config: SiloConfig, place: int, warnings: list[str]) -> tuple[TaskFile, str]:
    """One private file as the trainer will read it: which rows are left out, and why, joins the warnings."""
    path, verifier = config.data.private[place], config.data.verifier
    # a package's verifier is not asked: its code has no place in the guard, and the trainer asks it when it starts
    (tasks,) = read_usable([path], our_parts_check(verifier), field_names(config))
    if tasks.problems:
        warnings.append(f"{path}: {listed(tasks.problems, tasks.unit)}")
    groups = len({task.group for task in tasks.rows if task.group})
    grouped = f" of {groups} groups" if groups else ""
    return tasks, f"{len(tasks.rows)} rows{grouped}, {len(tasks.problems)} {tasks.unit}s left out"


def verifiers(config: SiloConfig) -> str:
    """What grades, and what the coordinator has to agree to where packages brought parts of it.

    Raises:
        UsageError, OperationError: public answers are programs, and there are no walls to run them behind.
    """
    names = {
        "private": config.data.verifier, "public": config.data.public.verifier, "held-out": config.held_out_verifier,
    }  # fmt: skip
    told = ", ".join(f"{which} {name}" for which, name in names.items())
    if find_verifier(config.data.public.verifier).executes:
        public_grader(config).close()
        told += "; public answers run as programs behind walls of their own"
    origins = sorted({each for name in names.values() for each in find_verifier(name).origin})
    if not origins:
        return told
    return f"{told}; by {', '.join(origins)}: own_verifiers_sha256 {own_verifiers(config)}"


def overlaps(config: SiloConfig, private: Sequence[TaskFile], warnings: list[str]) -> str:
    """Duplicates and leaks. None of them is refused: which of two rows is the right one is for a person to say."""
    found = find(private, read_tasks(config.data.public.path), read_tasks(config.data.held_out.path))
    warnings += [each.words(ids=True) for each in found]
    leaked = sum(each.rows for each in found if (each.where, each.also) == (PRIVATE, HELD_OUT))
    other = sum(each.rows for each in found) - leaked
    if not found:
        return "no prompt stands twice, or in two of the sets"
    measured = f"{leaked} private prompts are held-out ones, so that what is measured is too good" if leaked else ""
    return "; ".join(each for each in (measured, f"{other} other prompts stand twice" if other else "") if each)


def acceptance(config: SiloConfig, limits: Acceptance, private: Sequence[TaskFile], warnings: list[str]) -> str:
    """On how many prompts an incoming adapter would be tried (T52). With too few each one is held."""
    plan = _known_plan(config)
    rows = {
        "private": round(sum(len(each.rows) for each in private) * config.data.holdout_share),
        "held_out": len(read_tasks(config.data.held_out.path).rows),
    }
    if plan is not None:
        rows["held_out"] = min(rows["held_out"], plan.evaluation.prompts)
    least = limits.prompts_min
    for name in limits.prompts:
        if rows[name] < least:
            warnings.append(
                f"{place_of(config, 'acceptance')}: about {rows[name]} {name} prompts to try an adapter on, "
                f"acceptance.prompts_min is {least}: each one would be held"
            )
    return ", ".join(f"on about {rows[name]} {name} prompts" for name in limits.prompts)


def base_model(config: SiloConfig, warnings: list[str]) -> tuple[ModelFacts, str]:
    """Whether the decoder computes what the folder holds, and the template that is used."""
    facts = read_model_facts(config.model.path)
    template = read_template(config.data.template, config.model.path)
    if template.reads_clock:
        warnings.append(
            f"the template ({template.source}) reads the date, so prompts differ from day to day under one hash; "
            "data.template: a copy with a fixed date"
        )
    _compare_load(config, _known_plan(config))
    head = "tied" if facts.tied else "own"
    return facts, (
        f"{facts.architecture}, {facts.parameters / 1e6:.1f} M parameters, {head} head, context "
        f"{facts.context_tokens}, template {template.source}, loaded as {config.model.load} (the coordinator compares "
        "that with the federation's at the first hello)"
    )


def _compare_load(config: SiloConfig, plan: Plan | None) -> None:
    """Of a site's own files none says how the federation loads the base model; a run that is open does."""
    if plan is not None and plan.load != config.model.load and plan.mixed_base == "refuse":
        raise UsageError(
            f"{place_of(config, 'model.load')}: model.load is {config.model.load}, that of run {plan.run} {plan.load}",
            hint=f"model.load: {plan.load}, or a run whose plan says mixed_base: allow",
            code="LOAD_MISMATCH",
        )


def memory(config: SiloConfig, facts: ModelFacts, warnings: list[str]) -> str:
    """The estimate beside what the machine has.

    Raises:
        UsageError: it cannot fit (`silo.memory_estimate.judge`).
    """
    shapes = _shapes_of(_known_plan(config), facts)
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
    found = estimate(facts, settings, shapes)
    parts = ", ".join(
        f"{name} {size_text(size)}" for name, size in found.parts.items() if size >= found.peak_bytes // 100
    )
    if config.trainer.launch == "external":
        return f"about {size_text(found.peak_bytes)} where the trainer runs ({shapes.source}): {parts}"
    require_card(config.trainer.devices)
    if short := judge(found, has, settings, config.silos_on_this_host * settings.processes):
        warnings.append(short)
    owned = "what this machine has is not known" if has is None else f"{size_text(has.free_bytes)} of {has.kind} free"
    each = f" for each of {config.trainer.processes} processes" if config.trainer.processes > 1 else ""
    peak = f"about {size_text(found.peak_bytes)}{each} at its peak, in {found.phase}"
    return f"{peak}; {owned} ({shapes.source}): {parts}"


def _servers_here(config: SiloConfig) -> int:
    """Rollout servers that the guard starts: one for private prompts and one for public ones, or one for both."""
    rollout = config.rollout
    if rollout.chosen == "embedded" or rollout.launch == "external":
        return 0
    return 1 if rollout.url is not None and rollout.url == rollout.public_url else 2


def rollout_limits(config: SiloConfig, facts: ModelFacts, policy: Policy) -> str:
    return rollout_checks.limits(config, facts.context_tokens, policy, _known_plan(config))


def max_prompt_tokens(config: SiloConfig, facts: ModelFacts) -> int:
    return _shapes_of(_known_plan(config), facts).max_prompt_tokens


def _known_plan(config: SiloConfig) -> Plan | None:
    """Of the run that is under way."""
    path = config.state_dir / LEDGER
    if not path.is_file():
        return None
    try:
        ledger = Ledger(path, read_only=True)
        try:
            opened = ledger.open_run()
        finally:
            ledger.close()
        return None if opened is None else plan_from_canonical(opened[1])
    except (FedSiloError, sqlite3.Error, json.JSONDecodeError):
        return None  # another check says what is wrong with the ledger


def _shapes_of(plan: Plan | None, facts: ModelFacts) -> Shapes:
    """Of the plan; else a plan's defaults, cut to what the model's context takes."""
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


def prompts(config: SiloConfig, facts: ModelFacts, show: int, warnings: list[str]) -> tuple[Preview, str]:
    """Token lengths of the three sets, and some prompts as text.

    Raises:
        NotTriedHere: the trainer's libraries are not installed here, and it may run elsewhere.
        UsageError, OperationError: as `preview`.
    """
    limit = max_prompt_tokens(config, facts)
    try:
        found = preview(config, max_prompt_tokens=limit, show=show)
    except FedSiloError as error:
        if error.code == "EXTRA_MISSING" and config.trainer.launch == "external":
            raise NotTriedHere(error.message) from error
        raise
    overlong = {name: each.overlong for name, each in found.sets.items() if each.overlong}
    if overlong:
        many = ", ".join(f"{count} of {found.sets[name].rows} {name}" for name, count in overlong.items())
        warnings.append(f"prompts of more than {limit} tokens are left out: {many}")
    for name, each in found.sets.items():
        if each.ended:
            warnings.append(
                f"{each.ended} of {each.rows} {name} prompts end with the token that ends an answer, so their answers "
                "may be empty: take it out of the template, or out of what tokenizer.json puts after a text"
            )
        if each.without_text:
            warnings.append(f"{name} prompts whose text is not in what the template makes of them: {each.without_text}")
        if each.alike:
            warnings.append(f"{each.alike} {name} prompts become the same tokens as another one")
    private = found.sets[PRIVATE]
    return found, f"{_tokens(private)}; {_topics(private)}"


def _tokens(lengths: Lengths) -> str:
    if not lengths.prompt_tokens:
        return "no rows"
    low, median, most, nearly, high = lengths.prompt_tokens
    return f"tokens {low} to {high}, median {median}, 90 % within {most}, 99 % within {nearly}"


def _topics(lengths: Lengths) -> str:
    ordered = sorted(lengths.topics.items(), key=lambda each: (-each[1], each[0]))
    shown = ", ".join(f"{topic[:40]} {rows}" for topic, rows in ordered[:TOPICS_SHOWN_MAX])
    more = f" and {len(ordered) - TOPICS_SHOWN_MAX} more" if len(ordered) > TOPICS_SHOWN_MAX else ""
    return f"topics {shown}{more}"
