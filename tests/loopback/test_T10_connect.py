"""T10, X11 in a whole round: a silo's guard dials its coordinator and nobody else, its trainer the guard alone, and the
trainer opens no key. Seen by the kernel, so that it holds for gRPC's and torch's own code too."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from silo.config import SiloConfig, load_config
from silo.guard.trainer_process.probing import sandbox_trial
from tests.loopback.connects import Trace, read_trace, start_traced, unavailable
from tests.loopback.federation import Federation

pytestmark = pytest.mark.slow

SILO, OTHER, RUN = "hospital_b", "hospital_c", "watched"
PLANTED = "192.0.2.77:4077"  # of a block that is no network's (RFC 5737)
# The C library asks there who a user is; where the daemon of that name does not run, nothing answers.
NAME_SERVICE = "/var/run/nscd/socket"
# To the kernel, not to anybody: which interfaces there are.
KERNEL = "AF_NETLINK"
# Where the C library looks for a name when it is told of no server: the trainer's own loopback device, all that its
# network namespace has.
NO_SERVER = "127.0.0.1:53"


@dataclass(frozen=True)
class Watched:
    config: SiloConfig
    trace: Trace
    state: str

    @property
    def link(self) -> str:
        return self.config.trainer.address.partition(":")[2]

    def tried(self, program: str) -> set[str]:
        return {each.address for each in self.trace.dialled if each.program == program} - {NAME_SERVICE, KERNEL}

    def reached(self, program: str) -> set[str]:
        return {each.address for each in self.trace.dialled if each.program == program and not each.refused} - {KERNEL}

    def keys_opened(self, program: str) -> set[str]:
        """Names of the private keys that it was given."""
        return {
            Path(each.address).name for each in self.trace.opened
            if each.program == program and not each.refused and re.search(r"\.(key|pem)$|secret", each.address)
            and not each.address.startswith("/proc/") and Path(each.address).is_relative_to(self.config.source.parent)
        }  # fmt: skip


@pytest.fixture(scope="module")
def watched(sites: Federation, tmp_path_factory: pytest.TempPathFactory) -> Watched:
    """A round of two silos, one of them traced from its first instruction to the end of the run."""
    if reason := unavailable():
        pytest.skip(reason)
    sites.kill(SILO)
    file = start_traced(sites, SILO, tmp_path_factory.mktemp("trace"), planted=PLANTED)
    try:
        record = sites.run(RUN, silos=[SILO, OTHER])
        trace = read_trace(file, sites.pid(SILO))
    finally:
        sites.kill(SILO)
        sites.start(SILO)
    return Watched(load_config(sites.site(SILO).config), trace, str(record["state"]))


def test_T10_the_guard_dials_its_coordinator_and_what_was_planted_is_seen(watched: Watched) -> None:
    assert watched.state == "finished"
    assert watched.tried("guard") == {watched.config.coordinator.address, PLANTED}


def test_T10_the_trainer_reaches_its_guard_alone(watched: Watched) -> None:
    if reason := sandbox_trial("namespaces"):
        pytest.skip(f"this machine cannot build the trainer's own network: {reason}")
    assert watched.reached("trainer") - {NO_SERVER} == {watched.link}
    # It tries more, which also shows that its attempts are seen: the probes of its sandbox, each refused.
    assert watched.tried("trainer") > {watched.link}


def test_T10_nothing_else_of_the_silo_reaches_anybody(watched: Watched) -> None:
    """The grading worker, and whatever a library might start."""
    programs = {each.program for each in watched.trace.dialled} - {"guard", "trainer"}
    trials = {program for program in programs if "fedsilo.sandbox.probes" in program}
    assert {address for program in programs - trials for address in watched.reached(program)} == set()


def test_X11_the_trainer_opens_no_key_and_the_guard_does(watched: Watched) -> None:
    assert watched.keys_opened("trainer") == set()
    assert watched.keys_opened("guard")
