"""`silo check`: every check of a start, and further ones, each with what it found. It may dial the coordinator; it says
nothing but a TLS hello there."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from certs.identity import peer_identity
from fedsilo.edge.disk_space import require_space
from fedsilo.edge.files import holder_of
from fedsilo.edge.identity_files import load_site
from fedsilo.edge.model_facts import ModelFacts
from fedsilo.edge.task_files import TaskFile
from fedsilo.treaty.errors import FedSiloError, NotAllowedError, UsageError
from fedsilo.treaty.isolation import rung_at_least
from policies.compare import compare
from policies.load import Policy
from silo.config import SiloConfig
from silo.guard import isolation, rollout_checks, site_checks
from silo.guard.clock_watch import look_offline
from silo.guard.gate import coordinator_leaf
from silo.guard.in_force import Seen, step_to
from silo.guard.ledger import Ledger
from silo.guard.ledger_check import disagreement, named_in_folder
from silo.guard.prompt_preview import Preview
from silo.guard.rollout_server import check as check_rollout
from silo.guard.screens import check_screens
from silo.guard.startup import (
    AUDIT,
    LEDGER,
    LOCK,
    Site,
    effective_policy,
    load_site_parts,
    require_authority_files,
    site_identity,
    thread_warning,
)
from silo.guard.trainer_link import check as check_trainer_link

# names of checks that others need
PINNED = "pinned files"
BASE_MODEL = "base model"


def check_coordinator(site: Site, now: datetime) -> str:
    """Who answers at the coordinator's address; its certificate's fingerprint. As `look_at_coordinator`."""
    return look_at_coordinator(site, now)["certificate"]


def look_at_coordinator(site: Site, now: datetime) -> dict[str, str]:
    """Who answers at the coordinator's address (threat T30): what a release's view says of its destination.

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


def preflight(
    config: SiloConfig,
    *,
    reach_coordinator: bool = True,
    shown_prompts: int = 0,
    previewed: list[Preview] | None = None,
) -> tuple[list[dict[str, Any]], list[str], list[FedSiloError]]:
    """`silo check`: each check's name, whether it passed (None: not tried), and what it found; warnings; the faults.

    Args:
        config: the site.
        reach_coordinator: also dial the coordinator and judge its certificate.
        shown_prompts: so many private prompts are rendered into `previewed`.
        previewed: given, the prompts' token lengths are looked at too, which takes seconds, and put here.
    """
    results: list[dict[str, Any]] = []
    warnings = [text for text in (thread_warning(config),) if text]
    errors: list[FedSiloError] = []
    passed: set[str] = set()
    parts: list[Site] = []
    private: list[TaskFile] = []
    models: list[ModelFacts] = []

    def run(name: str, check: Callable[[], str], *, needs: tuple[str, ...] = ()) -> None:
        lacking = [each for each in needs if each not in passed]
        if lacking:
            found = f"not tried: it needs {' and '.join(lacking)}"
            results.append({"check": name, "ok": None, "found": found, "hint": ""})
            return
        try:
            results.append({"check": name, "ok": True, "found": check(), "hint": ""})
            passed.add(name)
        except site_checks.NotTriedHere as reason:
            results.append({"check": name, "ok": None, "found": f"not tried: {reason}", "hint": ""})
        except FedSiloError as error:
            results.append({"check": name, "ok": False, "found": error.message, "hint": error.hint, "code": error.code})
            errors.append(error)

    def policy() -> str:
        found = effective_policy(config)
        if found.charter is None:
            return f"{found.file.name} {found.digest[:12]}, no charter"
        own, charter = found.parts
        tightened = [change for change in compare(own.file, found.file) if change.direction != "cosmetic"]
        if apart := _apart(found):
            warnings.append(f"{charter.source} and {own.source} have nothing in common for {', '.join(apart)}: denied")
        return (
            f"{found.file.name} {found.digest[:12]}: {own.source} {own.digest[:12]} with {charter.source} "
            f"{charter.digest[:12]}, which tightens {len(tightened)} field{'s' * (len(tightened) != 1)}"
        )

    def updates() -> str:
        return _updates_in_a_mean(effective_policy(config))

    def change() -> str:
        path = config.state_dir / LEDGER
        if not path.is_file():
            return "none was in force before"
        ledger = Ledger(path, read_only=True)
        try:
            step = step_to(
                effective_policy(config), ledger, Seen.in_folder(config.state_dir / AUDIT), config,
                load_site(config.identity.site_ca, config.identity.operators, site=config.silo),
                max(ledger.latest_time, time.time()),
            )  # fmt: skip
        finally:
            ledger.close()
        return f"{step.how}{f', {len(step.changes)} fields change' if step.changes else ''}"

    def clock() -> str:
        path, now = config.state_dir / LEDGER, time.time()
        if not path.is_file():
            told = f"{datetime.fromtimestamp(now, UTC):%Y-%m-%dT%H:%M:%SZ}"
            return f"{told}, not compared yet: a start compares it with the coordinator's"
        ledger = Ledger(path, read_only=True)
        try:
            words, warning = look_offline(ledger, now)
        finally:
            ledger.close()
        warnings.extend([warning] * bool(warning))
        return words

    def authority() -> str:
        require_authority_files(config)
        return "nobody else may write them, or a folder on the way to them"

    def ledger_named() -> str:
        if holder_of(config.state_dir / LOCK):  # it writes both meanwhile
            raise site_checks.NotTriedHere("the silo runs, and compared the two when it started")
        found = disagreement(config, named := named_in_folder(config.state_dir / AUDIT))
        if found is not None:
            raise found.error(config)
        return f"group {named['groups']}, as the log names it" if named else "the log names none yet"

    def certificate() -> str:
        identity = site_identity(config)
        return f"{identity.spiffe_id} until {identity.not_after:%Y-%m-%dT%H:%M:%SZ}"

    def load() -> str:
        parts.append(load_site_parts(config, make_secret=False))
        return "coordinator's key, model, schema, public and held-out set as pinned"

    def rows(place: int) -> str:
        tasks, found = site_checks.rows_of(config, place, warnings)
        private.append(tasks)
        return found

    def base_model() -> str:
        facts, found = site_checks.base_model(config, warnings)
        models.append(facts)
        return found

    def prompts() -> str:
        found, words = site_checks.prompts(config, models[0], shown_prompts, warnings)
        if previewed is not None:
            previewed.append(found)
        return words

    files = [f"private data {path.name}" for path in config.data.private]
    for place, name in enumerate(files):
        run(name, lambda place=place: rows(place))  # type: ignore[misc]
    run("policy", policy)
    run("clock", clock)
    run("updates in a mean", updates, needs=("policy",))
    run("certificate", certificate)
    run("disk", lambda: require_space(config.state_dir))
    run("files that rule this site", authority, needs=("policy",))
    run("ledger against the log", ledger_named)
    run("policy against the one last in force", change, needs=("policy",))
    run(PINNED, load, needs=("policy", "certificate"))
    run(BASE_MODEL, base_model)
    run("memory", lambda: site_checks.memory(config, models[0], warnings), needs=(BASE_MODEL,))
    run("prompts in two places", lambda: site_checks.overlaps(config, private, warnings), needs=(*files, PINNED))
    if (limits := config.acceptance) is not None:
        run("acceptance", lambda: site_checks.acceptance(config, limits, private, warnings), needs=(*files, PINNED))
    if previewed is not None:
        run("prompts", prompts, needs=(*files, BASE_MODEL, PINNED))
    run("text screens", lambda: check_screens(config, effective_policy(config)), needs=("policy",))
    run("verifiers", lambda: site_checks.verifiers(config), needs=(PINNED,))
    run("rollout engine", lambda: check_rollout(config))
    if config.rollout.chosen == "vllm":
        run(
            "rollout limits",
            lambda: site_checks.rollout_limits(config, models[0], effective_policy(config)),
            needs=("policy", BASE_MODEL),
        )
    if rollout_checks.built_in(config):
        run("vLLM", lambda: rollout_checks.vllm_there(config), needs=("rollout engine",))
    if config.trainer.launch == "external":
        run("trainer link", lambda: check_trainer_link(config))
    run("trainer isolation", lambda: _rung(config, effective_policy(config)), needs=("policy",))
    if config.coordinator.by_files:
        results.append({"check": "coordinator", "ok": True, "found": "by files: nothing is dialled", "hint": ""})
    elif reach_coordinator:
        run(
            "coordinator",
            lambda: f"certificate {check_coordinator(parts[0], datetime.now(UTC))[:16]}",
            needs=(PINNED,),
        )
    return results, warnings, errors


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


def _updates_in_a_mean(policy: Policy) -> str:
    """The least number of updates that one of this site enters a mean over (T58).

    Raises:
        UsageError: MIN_UPDATES, there are fewer silos, so no round could be committed. Names the file.
    """
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


def _rung(config: SiloConfig, policy: Policy) -> str:
    trainer, least = config.trainer, policy.file.trainer.least_isolation
    best = isolation.best_rung() if trainer.launch == "child" else "container"
    rung = best if trainer.isolation == "auto" else trainer.isolation
    if not rung_at_least(rung, least):
        giver = "this machine" if trainer.launch == "child" else "a trainer that somebody else starts"
        raise NotAllowedError(f"{giver} gives {rung}; the policy accepts no less than {least}")
    probed = " at best, known when it connects and is probed" if trainer.launch == "external" else ""
    return f"{rung}{probed} (policy: at least {least})"
