"""A site's folder with policy, charter, people and their certificates, and the part of a start that is about policy."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from certs.authority import create_ca
from certs.commands import sign_command
from certs.encoding import private_key_pem
from certs.enrolment import EnrolmentKeys
from certs.roles import load_roles, render_roles
from fedsilo.audit.log import AuditLog
from fedsilo.files.durable import write_private
from fedsilo.protocol._generated import control_pb2
from fedsilo.protocol.codec import sha256_hex
from policies.compare import effective
from policies.load import load_policy
from silo.config import SiloConfig, load_config
from silo.guard import policy_change, signed_files
from silo.guard.ledger import Ledger
from silo.guard.ledger_check import open_ledger
from silo.guard.policy_change import Step, take_over
from silo.guard.site import effective_policy
from tests.policies import setting
from tests.world import COORDINATOR_KEY, OUR_KEY

PEOPLE: dict[str, Any] = {
    "alice": ["approver", "operator"], "bob": ["approver"], "carol": ["approver"], "dave": ["operator"],
    "vera": ["viewer"],
}  # fmt: skip
PINNED_KEY = sha256_hex(COORDINATOR_KEY.public_key().public_bytes_raw())
CONFIG = """\
silo: hospital_a
federation: cardio-net
coordinator: {{address: "host:1"}}
state_dir: state
identity:
  certificate: id/hospital_a.crt
  key: id/hospital_a.key
  signing_key: id/hospital_a.ed25519
  federation_ca: id/federation_ca.crt
  site_ca: id/site_ca.crt
  operators: id/roles.yaml
policy: policy.yaml
charter: {charter}
charter_sha256: {charter_sha256}
data:
  collection: c
  private: [private.jsonl]
  verifier: exact
  public: {{path: public.jsonl, sha256: "{public}", verifier: choice}}
  held_out: {{path: held_out.jsonl, sha256: "{held}"}}
model: {{path: model}}
"""


def text_of(*edits: tuple[str, str], **facts: Any) -> str:
    """The shipped policy of this site, with lines changed."""
    text = setting.policy_text(coordinator_key_sha256=PINNED_KEY, **facts)
    for old, new in edits:
        assert text.count(old) >= 1, old
        text = text.replace(old, new, 1)
    return text


@dataclass
class PolicySite:
    """Attributes:
    folder: the site's.
    now: what its clock shows.
    """

    folder: Path
    now: datetime = field(default_factory=lambda: datetime.fromtimestamp(int(time.time()), UTC))

    def __post_init__(self) -> None:
        (self.folder / "id").mkdir(parents=True)
        (self.folder / "state").mkdir()
        self.authority = create_ca("hospital_a", kind="site", not_before=self.now - timedelta(days=1), days=365)
        (self.folder / "id" / "site_ca.crt").write_bytes(self.authority.certificate_pem)
        (self.folder / "id" / "roles.yaml").write_text(render_roles("hospital_a", PEOPLE))
        self.keys: dict[str, Any] = {}
        for person in PEOPLE:
            self.enrol(person)
        self.configure()

    def enrol(self, person: str) -> None:
        """A certificate of eight hours, as people get them; an older one is replaced."""
        key = ec.generate_private_key(ec.SECP256R1())
        issued = self.authority.issue(EnrolmentKeys(key.public_key(), None), "operator", person, now=self.now)
        self.keys[person] = key, issued.certificate_pem
        (self.folder / "id" / f"{person}.crt").write_bytes(issued.certificate_pem)
        (self.folder / "id" / f"{person}.key").unlink(missing_ok=True)
        write_private(self.folder / "id" / f"{person}.key", private_key_pem(key))

    def configure(self, *, charter: str | None = None, pinned: str | None = None) -> None:
        """Write the configuration; `charter` is the charter's text."""
        if charter is not None:
            (self.folder / "charter.yaml").write_text(charter)
        text = CONFIG.format(
            charter="null" if charter is None else "charter.yaml",
            charter_sha256="null" if pinned is None else f'"{pinned}"',
            public=setting.HASH["public"], held=setting.HASH["held"],
        )  # fmt: skip
        (self.folder / "silo.yaml").write_text(text)

    def policy_is(self, text: str) -> None:
        (self.folder / "policy.yaml").write_text(text)

    @property
    def config(self) -> SiloConfig:
        return load_config(self.folder / "silo.yaml")

    def site(self) -> Any:
        """What `load_site_parts` makes of the files, without model and data."""
        config = self.config
        return SimpleNamespace(
            config=config,
            policy=effective_policy(config),
            site_ca_pem=self.authority.certificate_pem,
            roles=load_roles((self.folder / "id" / "roles.yaml").read_bytes(), "roles.yaml"),
            schema=setting.SCHEMA,
            coordinator_key=COORDINATOR_KEY.public_key(),
            public=SimpleNamespace(path=Path("public.jsonl"), sha256=setting.HASH["public"]),
            held_out=SimpleNamespace(path=Path("held_out.jsonl"), sha256=setting.HASH["held"]),
            identity=SimpleNamespace(not_after=self.now),
            fingerprints=SimpleNamespace(
                base_model_sha256=setting.HASH["base"], tokenizer_sha256=setting.HASH["tokenizer"],
                template_sha256=setting.HASH["template"],
            ),
        )  # fmt: skip

    def ledger(self) -> Ledger:
        return Ledger(self.folder / "state" / "ledger.sqlite3")

    def audit(self, key: Ed25519PrivateKey = OUR_KEY, clock: Callable[[], float] | None = None) -> AuditLog:
        return AuditLog(
            self.folder / "state" / "audit", origin=setting.SILO, key=key, actor=setting.SILO,
            clock=clock or self.now.timestamp, reserve_bytes=0,
        )  # fmt: skip

    def start(self) -> Step:
        """One start of the guard, up to the record of its policy; raises what `silo start` would."""
        site = self.site()
        ledger = open_ledger(site, lambda clock: self.audit(clock=clock), self.now.timestamp())
        with closing(ledger), self.audit() as audit:
            return take_over(site, ledger, audit, now=self.now.timestamp(), started={"version": "0"}, program="0" * 64)

    def records(self, *events: str) -> list[dict[str, Any]]:
        with self.audit() as audit:
            return [record for record in audit.records() if not events or record["event"] in events]

    def in_force(self) -> str:
        with closing(self.ledger()) as ledger:
            last = ledger.policy_in_force
        return last.digest if last else ""

    # ---- proposals ----

    def people(self, hours: int = 24) -> signed_files.People:
        site = self.site()
        return signed_files.People("hospital_a", site.site_ca_pem, site.roles, self.now, hours, self.config.federation)

    def signs(
        self, person: str, name: str, arguments: dict[str, Any], expires: datetime, federation: str = ""
    ) -> control_pb2.Command:
        """Without a federation: as an earlier version signed."""
        key, certificate = self.keys[person]
        return sign_command(
            federation=federation, site="hospital_a", name=name, arguments=arguments, request_id=secrets.token_hex(8),
            expires=expires, operator_certificate_pem=certificate, operator_key=key,
        )  # fmt: skip

    def propose(
        self, text: str, person: str = "alice", *, before: str = "", charter: str | None = None, hours: float = 4
    ) -> tuple[Path, policy_change.Proposal]:
        """A proposal for `text` in place of what is in force."""
        place = self.config.charter
        beside = charter.encode() if charter is not None else place.read_bytes() if place else None
        policy = effective(
            load_policy(text.encode(), "new"), None if beside is None else load_policy(beside, "charter")
        )
        texts = policy_change.Texts(text, charter)
        arguments = policy_change.proposal_arguments(texts, before or self.in_force(), policy.digest)
        signed = self.signs(person, signed_files.PROPOSE, arguments, self.now + timedelta(hours=hours))
        return policy_change.write_proposal(self.folder / signed_files.PROPOSALS, texts, signed, self.people())

    def approve(self, path: Path, proposal: policy_change.Proposal, person: str) -> Path:
        arguments = policy_change.approval_arguments(proposal)
        signed = self.signs(person, signed_files.APPROVE, arguments, proposal.expires)
        return policy_change.write_approval(path, proposal, signed, self.people())
