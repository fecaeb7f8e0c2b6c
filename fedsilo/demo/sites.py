"""Writes the files of a new site (configuration, policy, LoRA schema, canaries), as `silo init` does, and the demo's
whole sites, by the functions behind `fedsilo certs`, `coordinator init` and `silo init`.

A site's configuration is `examples/hospital_a.yaml` in content; its comments are written along, so that the site's own
file explains itself.
"""

from __future__ import annotations

import json
import secrets
import socket
import string
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from certs.roles import Role
from coordinator.setup import InitInputs, init_coordinator
from fedsilo.demo.data import DataFolder
from fedsilo.demo.provision import init_ca, provision_site
from fedsilo.files.durable import make_private_directory, write_durably, write_private
from fedsilo.files.site_policy import SiteInputs, charter_of, make_site_policy, read_bundle
from fedsilo.files.task_files import read_tasks
from fedsilo.protocol.errors import ConflictError, UsageError
from fedsilo.protocol.randomness import seed_of
from fedsilo.protocol.transcript import silo_id
from policies.compare import effective
from policies.load import load_policy
from policies.render import PlanSize
from silo.config import config_from
from silo.guard.screens import read_canaries

CANARIES = "canaries.txt"
_CANARIES = 8
# 117 random bits; as letters alone, since digits read as letters are one and the same to the screen.
_CANARY_GROUPS = _CANARY_LETTERS = 5

HOLDOUT_SHARE = 0.1  # what `silo init` writes; a configuration that says nothing sets nothing aside


@dataclass(frozen=True)
class SiloFiles:
    """The files of a new silo.

    Attributes:
        site: what the policy is made from; `site.site` is the silo's name.
        out: folder of the site; keys are expected in `out/id`.
        address: of the coordinator; empty takes the bundle's.
        sockets: folder for the sockets, where paths below `out` would be too long for the kernel.
        site_secret: file with the site secret; None lets the guard make one.
    """

    site: SiteInputs
    out: Path
    private: Path
    verifier: str
    public_verifier: str
    held_out: Path
    held_out_verifier: str = ""
    holdout_share: float = HOLDOUT_SHARE
    role: str = "member"
    load: str = ""  # empty takes the bundle's, or fp32
    address: str = ""
    collection: str = ""
    threads: int | str = "auto"
    microbatch_tokens: int = 16384
    silos_on_this_host: int = 1
    sockets: Path | None = None
    site_secret: Path | None = None
    fields: Mapping[str, str] = field(default_factory=dict)  # name of a field -> what the private file calls it


def write_silo_files(files: SiloFiles) -> dict[str, Any]:
    """Write `silo.yaml`, `policy.yaml`, `lora_schema.json` and `canaries.txt` into the site's folder, and the
    federation's charter beside them where the bundle carries one. Canaries that are there already stay: they may be
    planted by now.

    Args:
        files: what the site has.

    Returns:
        {"config", "policy", "schema", "canaries", "control_socket"} and perhaps "charter": paths; "plan_size": what
        the limits allow; "warnings": of the policy, for a person.

    Raises:
        ConflictError: one of the files exists.
        UsageError, NotAllowedError: a named file is missing or wrong, or the canaries that are there.
    """
    out, site = files.out, replace(files.site, held_out=files.held_out)
    paths = {"config": out / "silo.yaml", "policy": out / "policy.yaml", "schema": out / "lora_schema.json"}
    bundle = read_bundle(site.bundle)
    charter = charter_of(bundle, site.bundle)
    if silo_id(bundle["federation"], site.site) not in bundle["peers"]:
        raise UsageError(
            f"{site.bundle} names no silo {site.site}: {', '.join(bundle['peers'])}",
            hint="give one of these names, or ask the coordinator for a federation.json that names this site",
        )
    if charter is not None:
        paths["charter"] = out / "charter.yaml"
    for path in paths.values():
        if path.exists():
            raise ConflictError(f"{path} exists already", hint="write into an empty folder, or move it away")
    made = make_site_policy(replace(site, schema_file=paths["schema"].name))
    canaries = out / CANARIES
    if canaries.exists():
        read_canaries(canaries)
    address = files.address or str(bundle.get("coordinator_address", ""))
    if charter is not None:
        effective(load_policy(made.policy_text.encode(), str(paths["policy"])), charter.policy)
    stated = str(bundle.get("load", "fp32"))
    warnings = list(made.warnings)
    if files.load and files.load != stated and "load" in bundle:
        warnings.append(
            f"the federation's bundle says load: {stated}, and this silo says {files.load}: the coordinator compares "
            "them and refuses another one, unless its mixed_base is allow"
        )
    files = replace(files, load=files.load or stated)
    text = _config_text(files, str(bundle["federation"]), address, charter.policy.digest if charter else "")
    socket = config_from(text.encode(), paths["config"]).control.socket  # before anything is written
    make_private_directory(out)
    if charter is not None:
        write_durably(paths["charter"], charter.text)
    write_durably(paths["schema"], made.schema_text)
    write_durably(paths["policy"], made.policy_text.encode())
    if not canaries.exists():
        write_private(canaries, "".join(f"{random_canary()}\n" for _ in range(_CANARIES)).encode())
    write_durably(paths["config"], text.encode())
    return {
        **{name: str(path) for name, path in paths.items()},
        "canaries": str(canaries),
        "control_socket": str(socket),
        "plan_size": made.size.to_json(),
        "warnings": warnings,
    }


def random_canary() -> str:
    """A text that nobody writes by chance, and that a person can plant in a record: groups of letters."""
    groups = (
        "".join(secrets.choice(string.ascii_lowercase) for _ in range(_CANARY_LETTERS)) for _ in range(_CANARY_GROUPS)
    )
    return "-".join(groups)


def _config_text(files: SiloFiles, federation: str, address: str, charter_sha256: str) -> str:
    def quoted(value: object) -> str:
        # A JSON string is a YAML string, whatever is in it.
        return json.dumps(str(value))

    def at(path: Path) -> str:
        return quoted(path.absolute())

    name, site = files.site.site, files.site
    sockets = files.sockets.absolute() if files.sockets else None
    # The trainer's socket has a folder of its own: that folder is inside its sandbox.
    trainer = quoted(f"unix:{sockets}/run/trainer.sock" if sockets else "unix:run/trainer.sock")
    control = quoted(sockets / "control.sock" if sockets else "control.sock")
    fields = ", ".join(f"{each}: {quoted(column)}" for each, column in files.fields.items())
    fields = f"\n  # What the private files call the fields.\n  fields: {{{fields}}}" if fields else ""
    template = at(site.template) if isinstance(site.template, Path) else str(site.template or "")
    template = f"\n  # How a prompt becomes text; the policy pins its hash.\n  template: {template}" if template else ""
    secret = "null" if files.site_secret is None else at(files.site_secret)
    return f"""\
# The site {name}. `silo start --config silo.yaml` runs it; `silo check --config silo.yaml` tries all but starting.
# Relative paths are taken from this file's folder. examples/hospital_a.yaml explains every key at length.
silo: {name}
# member, or lead: trains like a member; no built-in method asks more of it yet.
role: {files.role}
federation: {federation}
coordinator: {{address: {quoted(address)}}}
# What must survive a restart: counters, held releases, audit log. One daemon at a time holds it.
state_dir: state
# Keys are made on this site by `fedsilo certs request` and never leave it; mode 0600.
identity:
  certificate: id/{name}.crt
  key: id/{name}.key
  signing_key: id/{name}.ed25519
  federation_ca: id/federation_ca.crt
  site_ca: id/site_ca.crt
  operators: id/roles.yaml
  coordinator_key: id/coordinator.pub
# What may leave and what is let in.
policy: policy.yaml
# The federation's charter: in force is what both allow. Its digest is that of the bundle; null: no charter.
charter: {"charter.yaml" if charter_sha256 else "null"}
charter_sha256: {quoted(charter_sha256) if charter_sha256 else "null"}
data:
  # Budgets are counted against this name, whatever the run.
  collection: {quoted(files.collection or name)}
  # Private prompts; they never leave this machine.
  private: [{at(files.private)}]
  # math | choice | exact | final | numeric | format | code, a mixture such as math*0.9+format*0.1, or a package's own
  # (docs/how-to/verifiers.md).
  verifier: {files.verifier}{fields}{template}
  # Share of the private rows (of the groups, where rows have one) that is never trained on, 0 to 0.5, so that
  # `silo report benefit` can tell whether joining helped. Changing it spoils the holdout for the runs before.
  holdout_share: {files.holdout_share}
  # This site's own copies; the policy pins the same hashes.
  public:
    path: {at(site.public)}
    sha256: "{read_tasks(site.public).sha256}"
    verifier: {files.public_verifier}
  held_out:
    path: {at(files.held_out)}
    sha256: "{read_tasks(files.held_out).sha256}"
    verifier: {files.held_out_verifier or files.public_verifier}
  # Random texts that must never leave, one a line. Plant some of them in records or files that nobody should repeat:
  # the screen `canary` of a policy stops every text that holds one. Keep the file secret, mode 0600; the guard alone
  # reads it. One of them found at anybody else's place proves that something of this site has leaked.
  canaries: {CANARIES}
model: {{path: {at(site.model)}, load: {files.load}}}
trainer:
  # child: the guard starts it in a sandbox. external: somebody else does, and it dials the address.
  launch: child
  address: {trainer}
  # Torch threads, or auto: the cores divided by silos_on_this_host.
  threads: {files.threads}
  microbatch_tokens: {files.microbatch_tokens}
control: {{socket: {control}}}
silos_on_this_host: {files.silos_on_this_host}
# File with 32 bytes as hex that key the choice of private prompts; null: made in state_dir.
site_secret: {secret}
"""


# ---- the sites of the demo -------------------------------------------------------------------------------------------

FEDERATION = "demo"
COORDINATOR = "main"
COORDINATOR_PERSON = "carol"
SILO_PEOPLE: dict[str, tuple[Role, ...]] = {"alice": ("approver", "operator"), "bob": ("approver",)}


@dataclass(frozen=True)
class Site:
    """A party's folder and where it listens."""

    name: str
    folder: Path
    config: Path
    control_socket: Path
    audit_log: Path


@dataclass(frozen=True)
class Sites:
    """`listen`: where the coordinator serves, host:port."""

    coordinator: Site
    silos: tuple[Site, ...]
    listen: str

    def all(self) -> tuple[Site, ...]:
        return (*self.silos, self.coordinator)


@dataclass(frozen=True)
class DemoSettings:
    """Settings that the demo chooses for all sites.

    Attributes:
        holds: the silo whose first factor release waits for a person; empty for none.
        seed: site secrets follow from it, so that a demo can be repeated; real sites draw theirs.
        advertise: where the silos dial the coordinator; empty for where it listens.
        load: number format of the base model.
        holdout_share: of each silo's private rows, never trained on.
        server_optimisers: that all policies and the charter let a plan move the adapter by.
    """

    out: Path
    model: Path
    data: DataFolder
    ruleset: str
    seed: int
    rank: int
    alpha: float
    holds: str
    local_steps: int
    swap_period: int
    prompts_per_step: int
    samples_per_prompt: int
    learning_rate: float
    advertise: str = ""
    load: str = "fp32"
    holdout_share: float = HOLDOUT_SHARE
    server_optimisers: tuple[str, ...] = ()


def make_sites(wanted: DemoSettings) -> Sites:
    """Write everything below `wanted.out`. Raises FedSiloError as the commands it stands for."""
    size = PlanSize(
        local_steps=wanted.local_steps,
        swap_period=wanted.swap_period,
        prompts_per_step=wanted.prompts_per_step,
        samples_per_prompt=wanted.samples_per_prompt,
        max_new_tokens=wanted.data.description.lengths.max_new_tokens,
        learning_rate=wanted.learning_rate,
    )
    federation_ca = wanted.out / "federation_ca"
    init_ca(federation_ca, name=FEDERATION, kind="federation")
    here = wanted.out / "coordinator"
    identities = provision_site(
        here,
        site=COORDINATOR,
        federation_ca=federation_ca,
        people={COORDINATOR_PERSON: ("operator", "approver")},
        is_coordinator=True,
    )
    address = f"127.0.0.1:{free_port()}"
    init_coordinator(
        InitInputs(
            directory=here,
            federation=FEDERATION,
            silos=tuple(wanted.data.private),
            model=wanted.model,
            public=wanted.data.public.path,
            held_out=wanted.data.held_out.path,
            verifier=wanted.data.public.verifier,
            now_seconds=time.time(),
            coordinator=COORDINATOR,
            listen=address,
            advertise=wanted.advertise,
            ruleset=wanted.ruleset,
            rank=wanted.rank,
            alpha=wanted.alpha,
            size=size,
            load=wanted.load,
            server_optimisers=wanted.server_optimisers,
        )
    )
    silos: list[Site] = []
    for name, source in wanted.data.private.items():
        folder = wanted.out / name
        provision_site(
            folder,
            site=name,
            federation_ca=federation_ca,
            people=SILO_PEOPLE,
            coordinator_public_key=(identities / "coordinator.pub").read_bytes(),
        )
        secret = folder / "id" / "site.secret"
        write_private(secret, f"{seed_of(wanted.seed, 'site-secret', name):064x}".encode())
        written = write_silo_files(
            SiloFiles(
                site=SiteInputs(
                    ruleset=wanted.ruleset,
                    model=wanted.model,
                    public=wanted.data.public.path,
                    bundle=here / "federation.json",
                    now_seconds=time.time(),
                    site=name,
                    rank=wanted.rank,
                    alpha=wanted.alpha,
                    least_isolation="waived",  # the best this machine gives; which one it is, is reported
                    first_rounds=1 if name == wanted.holds else 0,
                    server_optimisers=wanted.server_optimisers,
                ),
                out=folder,
                private=source.path,
                verifier=source.verifier,
                public_verifier=wanted.data.public.verifier,
                held_out=wanted.data.held_out.path,
                held_out_verifier=wanted.data.held_out.verifier,
                holdout_share=wanted.holdout_share,
                role="member" if silos else "lead",
                threads=1,
                silos_on_this_host=len(wanted.data.private),
                site_secret=secret,
            )
        )
        silos.append(_site(name, folder, Path(written["config"])))
    return Sites(_site(COORDINATOR, here, here / "coordinator.yaml"), tuple(silos), address)


def _site(name: str, folder: Path, config: Path) -> Site:
    return Site(name, folder, config, folder / "state" / "control.sock", folder / "state" / "audit")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_text(plan_fields: dict[str, object]) -> str:
    """Return run.yaml of a run; what is nested is written in flow style, as JSON is but for small and large numbers."""
    return "".join(f"{name}: {_in_flow_style(value)}\n" for name, value in plan_fields.items())


def _in_flow_style(value: object) -> str:
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{json.dumps(name)}: {_in_flow_style(each)}' for name, each in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_in_flow_style, value))}]"
    text = json.dumps(value)
    # JSON's 1e-05 is a text in YAML
    return text.replace("e", ".0e") if isinstance(value, float) and "." not in text else text
