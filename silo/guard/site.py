"""Reads a site's files at the start and checks them: policy, keys, hashes, disk; says where the files are.

A site whose policy is missing or wrong, whose public set is not the pinned one, or whose model is not the one that the
policy names does not start, and the refusal says what to do. Nothing here dials out, so `silo report` may use it.

The site's own certificate is told in its audit log: in use, replaced by another, soon to expire. What
the log holds already is read from the log itself, so a start that changes nothing adds nothing, and no other file can
disagree. A certificate that was renewed on the disk counts from the next start on, as everywhere in the guard.

Does not check that the data are what they claim to be. Does not stop a key that somebody copied; only its certificate
is compared. The guard looks once an hour, so one of less than three hours may expire without a warning.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

import fedsilo
from certs.encoding import read_one_certificate, warn_before
from certs.identity import Identity
from certs.roles import Roles
from fedsilo.audit.reader import read_lines
from fedsilo.audit.record import parse_record
from fedsilo.files.durable import make_private_directory, read_private, require_authority, write_private
from fedsilo.files.identity_files import load_coordinator_key, load_identity, load_site
from fedsilo.files.model_folder import Fingerprints, lora_schema_of, read_fingerprints, read_template
from fedsilo.files.site_policy import read_effective, read_pinned_schema, read_policy
from fedsilo.files.task_files import PUBLIC, FieldNames, TaskFile, read_tasks
from fedsilo.grading.own_verifiers import find_verifier, own_verifiers_sha256
from fedsilo.protocol.codec import canonical_json, sha256_hex
from fedsilo.protocol.errors import NotAllowedError, UsageError
from fedsilo.protocol.isolation import isolates_at_least
from fedsilo.protocol.methods import require_exchange
from fedsilo.protocol.plan import Plan
from policies.load import custom_of
from policies.model import Policy
from policies.schema import LoraSchema
from silo.config import SiloConfig
from silo.guard.messages import TlsFiles

AUDIT = "audit"  # below state_dir
LEDGER = "ledger.sqlite3"  # below state_dir
LOCK = "lock"  # below state_dir; held by the daemon
SITE_SECRET_BYTES = 32


@dataclass(frozen=True)
class Site:
    """Everything that a guard needs, read and checked. `policy` is the effective one, as it was at the start."""

    config: SiloConfig
    policy: Policy
    identity: Identity
    coordinator_key: Ed25519PublicKey
    site_ca_pem: bytes
    roles: Roles
    schema: LoraSchema
    fingerprints: Fingerprints
    public: TaskFile
    held_out: TaskFile
    site_secret: bytes

    @property
    def tls(self) -> TlsFiles:
        files = self.config.identity
        return TlsFiles(files.certificate, files.key, files.federation_ca)


def load_site_parts(config: SiloConfig, *, now: datetime | None = None, make_secret: bool = True) -> Site:
    """Read and check everything, cheap and decisive things first.

    Args:
        config: the site.
        now: time to judge certificates by.
        make_secret: write the site secret into `state_dir` if there is none yet.

    Raises:
        UsageError: a missing or wrong policy, a public set or model that is not the pinned one.
        NotAllowedError, NotFoundError: keys and certificates.
        OperationError: the disk refused the site secret.
    """
    policy = effective_policy(config)
    files = config.identity
    identity = site_identity(config, now)
    coordinator_key = load_coordinator_key(files.coordinator_key)
    _check_coordinator_key(config, policy, coordinator_key)
    site_ca_pem, roles = load_site(files.site_ca, files.operators, site=config.silo)
    public = read_tasks(config.data.public.path, PUBLIC)
    _check_public_set(config, policy, public)
    held_out = read_tasks(config.data.held_out.path)
    _check_held_out(config, policy, held_out)
    fingerprints = site_fingerprints(config)
    _check_model(config, policy, fingerprints)
    schema = site_schema(config, policy)
    _check_verifiers(config, policy)
    make_private_directory(config.state_dir)
    secret = site_secret(config, make=make_secret)
    return Site(
        config, policy, identity, coordinator_key, site_ca_pem, roles, schema, fingerprints, public, held_out, secret
    )


def require_authority_files(config: SiloConfig) -> None:
    """Require that nobody else can change what this site obeys: configuration, policy with what it names, charter,
    people, CA certificates and the coordinator's key (T59). Whatever else it reads is pinned by a hash in one of these.

    Raises:
        NotAllowedError: which one others may write, and the command that mends it.
        UsageError: the policy is missing or wrong.
    """
    files = config.identity
    for path in (
        config.source, config.policy, *([config.charter] if config.charter is not None else []), files.operators,
        files.federation_ca, files.site_ca, files.coordinator_key,
    ):  # fmt: skip
        require_authority(path)
    if (custom := custom_of(read_policy(config.policy).file)) is not None:
        require_authority(config.policy.parent / custom.file)


def _check_verifiers(config: SiloConfig, policy: Policy) -> None:
    """Check the verifiers. Raises UsageError: unknown, or one of the public set that the guard may not have run.

    Public answers are graded again for the guard (`public_grader` of silo/guard/trainer_process/supervisor.py). They
    come from other silos' models too, so programs among them are run only where the policy says so (T22). No code of a
    package grades them: the coordinator has none of it, and the sandbox is for programs.
    """
    for verifier in {config.data.verifier, config.held_out_verifier}:
        find_verifier(verifier)
    public = find_verifier(config.data.public.verifier)
    if public.origin:
        raise UsageError(
            f"{config.source.name}: data.public.verifier {public.name!r} is brought by {', '.join(public.origin)}; the "
            "guard has public answers graded again beside its keys, and loads no package there",
            hint="use math, choice, exact, final, numeric, format, code or a mixture of them; data.verifier may be any",
        )
    if public.executes:
        for name, pin in policy.file.public_sets.items():
            if pin.sha256 == config.data.public.sha256 and pin.programs == "refuse":
                line = policy.line_of(("public_sets", name, "programs"))
                raise UsageError(
                    f"{config.source.name}: data.public.verifier {public.name!r} runs programs that models of other "
                    f"silos wrote; {policy.source}:{line}: public_sets.{name}.programs is refuse",
                    hint="programs: sandbox, in the policy and in the charter where there is one, lets them run in a "
                    "sandbox; or use math, choice, exact, final, numeric or format",
                    code="VERIFIER_EXECUTES",
                )


def effective_policy(config: SiloConfig) -> Policy:
    """The site's own policy, tightened by the federation's charter where the configuration names one (T34, D8).

    Raises:
        UsageError: a file is missing or wrong, they have nothing in common, or they are for another federation.
    """
    policy = read_effective(config.policy, config.charter, config.charter_sha256)
    if policy.file.federation.id != config.federation:
        raise UsageError(
            f"{config.policy}:{policy.line_of(('federation', 'id'))}: the policy is for federation "
            f"{policy.file.federation.id!r}, {config.source.name} says {config.federation!r}"
        )
    return policy


def check_policy(site: Site, policy: Policy) -> None:
    """Return whether what this site was started with is what `policy` pins, so that it could be started with it.

    Raises:
        UsageError, NotAllowedError: as `load_site_parts`.
    """
    _check_coordinator_key(site.config, policy, site.coordinator_key)
    _check_public_set(site.config, policy, site.public)
    _check_held_out(site.config, policy, site.held_out)
    _check_model(site.config, policy, site.fingerprints)
    _check_verifiers(site.config, policy)
    pins = [pin.sha256 for pin in policy.file.lora_schemas.values()]
    if policy.file.egress.updates and site.schema.digest not in pins:
        raise UsageError(
            f"{policy.source}:{policy.line_of(('lora_schemas',))}: it does not pin the LoRA schema "
            f"{site.schema.digest[:12]} that this silo was started with"
        )


def site_identity(config: SiloConfig, now: datetime | None = None) -> Identity:
    """The site's own certificate and keys. Raises NotAllowedError, NotFoundError."""
    files = config.identity
    identity = load_identity(files.certificate, files.key, files.signing_key, files.federation_ca, role="silo", now=now)
    if identity.spiffe_id != config.spiffe_id:
        raise NotAllowedError(
            f"{files.certificate} is the certificate of {identity.spiffe_id}, the configuration says {config.spiffe_id}"
        )
    return identity


def _check_coordinator_key(config: SiloConfig, policy: Policy, key: Ed25519PublicKey) -> None:
    digest = sha256_hex(key.public_bytes_raw())
    if digest not in policy.file.federation.coordinator_key_sha256:
        line = policy.line_of(("federation", "coordinator_key_sha256"))
        raise NotAllowedError(
            f"{config.identity.coordinator_key} has SHA-256 {digest}; {policy.source}:{line} pins "
            f"{', '.join(policy.file.federation.coordinator_key_sha256)}",
            hint="compare the key with the coordinator's people by another way than the network",
        )


def _check_public_set(config: SiloConfig, policy: Policy, tasks: TaskFile) -> None:
    pins = {name: pin.sha256 for name, pin in policy.file.public_sets.items()}
    if tasks.sha256 != config.data.public.sha256:
        pinned = f"{config.source.name} says {config.data.public.sha256}"
    elif tasks.sha256 not in pins.values():
        named = ", ".join(f"{name}: {digest}" for name, digest in pins.items())
        pinned = f"the policy {policy.source} pins {named or 'none'}"
    else:
        return
    raise UsageError(
        f"public set {tasks.path} has SHA-256 {tasks.sha256}; {pinned}",
        hint="get the agreed file; a changed set enters only by a new policy",
        code="PUBLIC_SET_MISMATCH",
    )


def _check_held_out(config: SiloConfig, policy: Policy, tasks: TaskFile) -> None:
    pinned = {config.data.held_out.sha256, *([policy.file.held_out.sha256] if policy.file.held_out else [])}
    if {tasks.sha256} != pinned:
        raise UsageError(
            f"held-out set {tasks.path} has SHA-256 {tasks.sha256}; pinned: {', '.join(sorted(pinned))}",
            hint="every silo evaluates on the same file; get the agreed one",
            code="HELD_OUT_MISMATCH",
        )


def _check_model(config: SiloConfig, policy: Policy, found: Fingerprints) -> None:
    for name in ("base_model_sha256", "tokenizer_sha256", "template_sha256"):
        pinned, got = getattr(policy.file.model, name), getattr(found, name)
        if pinned != got:
            raise UsageError(
                f"model folder {config.model.path}: {name} is {got}; {policy.source}:{policy.line_of(('model', name))} "
                f"pins {pinned}",
                hint="use the agreed model folder, or write a new policy for this one",
                code="MODEL_MISMATCH",
            )


def field_names(config: SiloConfig) -> FieldNames:
    """Names of a task's fields in the site's private files."""
    return FieldNames(**config.data.fields.model_dump())


def site_schema(config: SiloConfig, policy: Policy) -> LoraSchema:
    """The schema that the policy pins. A policy that lets no factors out pins one for ingress, or needs none."""
    if policy.own.file.egress.updates:
        return read_pinned_schema(policy.own, config.policy.parent)
    for pin in policy.file.lora_schemas.values():
        return lora_schema_of(
            config.model.path,
            pin.rank,
            2.0 * pin.rank,
            freeze=pin.freeze,
            shift_rank=pin.shift_rank,
            base_model_sha256=pin.base_model_sha256,
        )
    raise UsageError(f"{policy.source}: it pins no LoRA schema", hint="fedsilo policy schema make")


def site_fingerprints(config: SiloConfig) -> Fingerprints:
    """Return the fingerprints of the model folder, with the hash of the template that is used in place of the folder's
    own (T13)."""
    prints = read_fingerprints(config.model.path)
    template = read_template(config.data.template, config.model.path).sha256
    return prints if template is None else replace(prints, template_sha256=template)


def site_secret_path(config: SiloConfig) -> Path:
    return config.site_secret or config.state_dir / "site.secret"


def site_secret(config: SiloConfig, *, make: bool) -> bytes:
    """32 bytes that key the choice of private prompts and the digests of short payloads in the log.

    Raises:
        UsageError: the file does not hold 32 bytes as hex.
        NotAllowedError: others may read it.
    """
    path = site_secret_path(config)
    if not path.exists() and config.site_secret is None and make:
        make_private_directory(config.state_dir)
        write_private(path, secrets.token_hex(SITE_SECRET_BYTES).encode())
    if not path.exists() and config.site_secret is None:
        return bytes(SITE_SECRET_BYTES)  # `silo check` before the first start: nothing is keyed by it
    try:
        value = bytes.fromhex(read_private(path).decode("ascii").strip())
    except ValueError as error:
        raise UsageError(f"{path} does not hold hex digits") from error
    if len(value) != SITE_SECRET_BYTES:
        raise UsageError(f"{path} holds {len(value)} bytes, {SITE_SECRET_BYTES} are needed")
    return value


def require_isolation(level: str, policy: Policy, why: str = "") -> None:
    """Raises NotAllowedError: less than the policy's least isolation of a trainer. why: what the probes showed."""
    least = policy.file.trainer.least_isolation
    if not isolates_at_least(level, least):
        raise NotAllowedError(
            f"the trainer's isolation is {level}; the policy accepts no less than {least}",
            hint=f"{why}{'; ' if why else ''}run on a machine that gives it, or let an approver change "
            "trainer.least_isolation",
            code="ISOLATION",
        )


def never_shown(config: SiloConfig) -> list[Path]:
    """Return what no path that the trainer is given may contain: keys, secret, records, and what rules this site."""
    link_key = config.identity.link_key
    return [
        *config.key_files,
        *([link_key] if link_key is not None else []),
        site_secret_path(config),
        config.control.socket,
        config.state_dir / LEDGER,
        config.state_dir / AUDIT,
        config.policy,
        *([config.charter] if config.charter is not None else []),
        config.identity.operators,
        *([config.data.canaries] if config.data.canaries is not None else []),
    ]


def own_verifiers(config: SiloConfig) -> str:
    """Digest of the verifiers that packages brought here, whatever they grade; empty where all are FedSilo's."""
    return own_verifiers_sha256((config.data.verifier, config.data.public.verifier, config.held_out_verifier))


def require_part(plan: Plan, config: SiloConfig) -> None:
    """Raises UsageError: the roster lacks this silo; another load type, or other verifiers by packages, and the plan
    allows no mixture of them; no such method or exchange; or answers inside a round, and no line to send them on."""
    if config.silo not in plan.silos:
        raise UsageError(f"{config.silo} is not in the roster")
    method = require_exchange(plan)
    if config.coordinator.by_files and method.swaps and plan.exchange == "step":
        raise UsageError("exchange: step needs answers inside a round, and this silo exchanges files between them")
    if plan.load != config.model.load and plan.mixed_base != "allow":
        raise UsageError(f"the plan loads the base model as {plan.load}, this silo as {config.model.load}")
    own = own_verifiers(config)
    if plan.own_verifiers_sha256 != own and plan.mixed_verifiers != "allow":
        raise UsageError(
            f"the plan has own verifiers {plan.own_verifiers_sha256[:12] or 'none'}, this silo {own[:12] or 'none'}",
            code="VERIFIER_MISMATCH",
        )


def trained_with(config: SiloConfig) -> str:
    """What a trainer here works with that no plan fixes: how answers are graded and how the base model is loaded."""
    settings = {
        "load": config.model.load,
        "verifier": config.data.verifier,
        "public_verifier": config.data.public.verifier,
    }
    # names and versions of the packages, never paths (T22)
    if origin := find_verifier(config.data.verifier).origin:
        settings["verifier_origin"] = ", ".join(origin)
    if own := own_verifiers(config):
        settings["own_verifiers_sha256"] = own
    return canonical_json(settings).decode()


def code_sha256() -> str:
    """Return one hash over the running program text: every module of this distribution, by name."""
    digest = hashlib.sha256()
    root = Path(fedsilo.__file__).parent.parent
    for package in ("certs", "fedsilo", "policies", "silo"):
        for path in sorted((root / package).rglob("*.py")):
            digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def thread_warning(config: SiloConfig) -> str:
    """Return why this machine will spin instead of train, or nothing."""
    cores = len(os.sched_getaffinity(0))
    trainers = config.silos_on_this_host * config.trainer.processes
    wanted = config.threads * trainers
    if wanted <= cores:
        return ""
    threads, several = config.threads, "trainer processes" if config.trainer.processes > 1 else "silos"
    return (
        f"{threads} {'thread' if threads == 1 else 'threads'} x {trainers} {several} on this host = {wanted} on "
        f"{cores} cores: they wait for each other by spinning, several times slower; "
        + ("set trainer.threads lower" if threads > 1 else "less of them at once would be faster")
    )


# ---- the site's own certificate ----------------------------------------------------------------------------------

_log = logging.getLogger("fedsilo.silo")

_MARK = b'"event":"key.'  # as canonical JSON spells it; so only few lines of a long log are parsed


class OwnCertificate:
    """Records a change of this silo's certificate or signing key, and warns before the certificate ends.

    Args:
        identity: in use from this start on.
        log: folder of this silo's audit log.

    Raises:
        FedSiloError: the log cannot be read.
    """

    def __init__(self, identity: Identity, log: Path) -> None:
        self._detail = {
            "identity": identity.spiffe_id,
            "fingerprint": identity.peer.fingerprint,
            "signing_key": identity.signing_key.public_key().public_bytes_raw().hex(),
            "not_after": f"{identity.not_after.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}",
        }
        certificate = read_one_certificate(identity.certificate_pem, what="this silo's certificate")
        self._warn_at = identity.not_after - warn_before(certificate)
        self._last: dict[str, Any] | None = None  # what the newest record of a certificate says of it
        self._warned = False
        for record in (parse_record(line) for _, line in read_lines(log) if _MARK in line):
            if record["event"] in ("key.enrol", "key.renew"):
                self._last = record["detail"]
            elif record["event"] == "key.expire_warn":
                self._warned |= record["detail"].get("fingerprint") == self._detail["fingerprint"]

    def look(self, record: Callable[..., int], now_seconds: float) -> None:
        """Record what the log does not say yet.

        Args:
            record: appends to the audit log.
            now_seconds: UTC.

        Raises:
            OperationError: it cannot be recorded.
        """
        if self._last != self._detail:
            record("key.enrol" if self._last is None else "key.renew", detail=self._detail)
            self._last = self._detail
        if not self._warned and datetime.fromtimestamp(now_seconds, UTC) > self._warn_at:
            until = self._detail["not_after"]
            record("key.expire_warn", detail=self._detail)
            self._warned = True
            _log.warning("this silo's certificate expires at %s; renew it (fedsilo certs renew)", until)
