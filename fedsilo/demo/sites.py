"""The demo's five sites on disk: certificates, configurations and policies, made by the functions behind
`fedsilo certs`, `coordinator init` and `silo init`."""

from __future__ import annotations

import json
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from certs.roles import Role
from fedsilo.demo.data import DataFolder

FEDERATION = "demo"
COORDINATOR = "main"
COORDINATOR_PERSON = "carol"
SILO_PEOPLE: dict[str, tuple[Role, ...]] = {"alice": ("approver", "operator"), "bob": ("approver",)}


@dataclass(frozen=True)
class Site:
    """One party's folder and where it listens."""

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
class Wanted:
    """What the demo decides for all sites.

    Attributes:
        holds: the silo whose first factor release waits for a person; empty for none.
        seed: site secrets follow from it, so that a demo can be repeated (design 8.4); real sites draw theirs.
        advertise: where the silos dial the coordinator; empty for where it listens.
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


def make_sites(wanted: Wanted) -> Sites:
    """Write everything below `wanted.out`. Raises FedSiloError as the commands it stands for."""
    from coordinator.setup import InitInputs, init_coordinator
    from fedsilo.demo.provision import init_ca, provision_site
    from fedsilo.demo.silo_files import SiloFiles, write_silo_files
    from fedsilo.files.durable import write_private
    from fedsilo.protocol.randomness import seed_of
    from policies.render import PlanSize

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
                name=name,
                model=wanted.model,
                private=source.path,
                public=wanted.data.public.path,
                held_out=wanted.data.held_out.path,
                verifier=source.verifier,
                public_verifier=wanted.data.public.verifier,
                held_out_verifier=wanted.data.held_out.verifier,
                bundle=here / "federation.json",
                out=folder,
                ruleset=wanted.ruleset,
                role="member" if silos else "lead",
                rank=wanted.rank,
                alpha=wanted.alpha,
                least_isolation="waived",  # the best this machine gives; which one it is, is reported
                first_rounds=1 if name == wanted.holds else 0,
                threads=1,
                silos_on_this_host=len(wanted.data.private),
                site_secret=secret,
            ),
            now_seconds=time.time(),
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
    """run.yaml of a run; what is nested is written in flow style, which JSON is."""
    return "".join(f"{name}: {json.dumps(value)}\n" for name, value in plan_fields.items())
