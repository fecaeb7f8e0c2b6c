"""T10, B1: a trainer behind walls that somebody else built, over a unix path as another user and over TLS.

The worker is the real one, the link is the real one, and the guard's own code judges. Each wall is also taken away
alone: exactly what it held back is then reported as reachable, and a policy that asks for a container starts no run.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedsilo.launch.silo_text import status_text
from fedsilo.treaty.errors import FedSiloError, NotAllowedError
from silo.config import SiloConfig, load_config
from silo.guard import isolation, isolation_controls, service, trainer_link
from silo.guard.isolation_controls import Controls
from silo.guard.service import SupervisedTrainer
from silo.guard.supervisor import Supervisor
from silo.link import LinkMessage
from silo.trainer import walls
from tests.security import container_harness, network_harness
from tests.security.link_harness import EXTERNAL, LINK, at, write_config
from tests.security.link_harness import Site as Identities
from tests.security.network_harness import COORDINATOR, COORDINATOR_PORT, GUARD, NAME_SERVER, Networks
from tests.security.wall_harness import Site, reachable_site

REPOSITORY = Path(__file__).parents[2]
SOMEBODY = 65534
NETWORK_PROBES = {"tcp_connect", "udp_send", "dns_lookup"}
# What the user's number holds back, and what only the rights of root open.
FILE_PROBES = {"key_files", "identity_folder", "control_socket"}
PROCESS_PROBES = {"enter_namespaces", "ptrace", "memory", "signal"}

SOON = ("  start_timeout_seconds: 180", "  start_timeout_seconds: 20")

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root can stand for a container runtime")


class Enough(FedSiloError):
    """Ends a start once the rung is known, before data and model are loaded."""


@dataclass(frozen=True)
class Probed:
    rung: str
    results: dict[str, Any]
    controls: Controls

    def escaped(self) -> set[str]:
        return set(isolation.escaped(self.results, self.controls))


def probed(config: SiloConfig, fields: dict[str, Any]) -> Probed:
    """Wait for the external trainer as the guard does, and stop once it has been probed."""
    supervisor = Supervisor(config, lambda event: None)

    def enough(rung: str) -> None:
        raise Enough(rung)

    try:
        with pytest.raises(Enough):
            supervisor.start(b"s", fields, accepted=enough)
    finally:
        supervisor.stop()
    return Probed(supervisor.state.rung, supervisor.state.probes, supervisor.state.controls)


@dataclass(frozen=True)
class Container:
    """How somebody starts the trainer; by default in every wall."""

    network: str | None = ""
    user: int | None = SOMEBODY
    vsock: bool = False
    resolver_file: Path | None = None

    @contextlib.contextmanager
    def running(self, folder: Path, *words: object) -> Iterator[subprocess.Popen[str]]:
        """The worker in it, `words` being its arguments; ends with the link, or is ended.

        Interpreter, program and libraries are shown at paths that another user can pass to, as an image would.
        """
        places = {name: folder / "image" / name for name in ("python", "code", "site")}
        for place in places.values():
            place.mkdir(parents=True, exist_ok=True)
        sources = (sys.base_prefix, str(REPOSITORY), sysconfig.get_paths()["purelib"])
        binds = [[source, str(place)] for source, place in zip(sources, places.values(), strict=True)]
        if self.resolver_file is not None:
            binds.append([str(self.resolver_file), "/etc/resolv.conf"])
        python = places["python"] / "bin" / Path(os.path.realpath(sys.executable)).name
        spec = {
            "network": self.network, "user": self.user, "vsock": self.vsock, "binds": binds,
            "argv": [str(python), "-P", "-m", "silo.trainer.worker", *map(str, words), "--wait-seconds", "30"],
            "env": {"PYTHONPATH": f"{places['code']}:{places['site']}", "PYTHONDONTWRITEBYTECODE": "1",
                    "LD_LIBRARY_PATH": str(places["python"] / "lib"),
                    "OMP_NUM_THREADS": "1"},
        }  # fmt: skip
        with subprocess.Popen(
            [sys.executable, "-I", "-S", container_harness.__file__, json.dumps(spec)],
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            try:
                yield process
                complaint = process.communicate(timeout=30)[1]
                assert process.returncode in (0, NotAllowedError.exit_code), complaint
            except BaseException:
                process.kill()
                sys.stderr.write(process.communicate()[1])  # shown with the failed test
                raise


# ---- over a unix path --------------------------------------------------------------------------------


@pytest.fixture
def home() -> Iterator[Path]:
    """Short, since a unix socket's path is, and open to another user, who must pass through it."""
    with tempfile.TemporaryDirectory(prefix="box-") as name:
        Path(name).chmod(0o755)
        (Path(name) / "run").mkdir()
        yield Path(name)


@pytest.fixture
def site(home: Path) -> Iterator[Site]:
    with reachable_site(home / "site") as built:
        yield built


def over_unix(home: Path, user: int | None) -> SiloConfig:
    allowed = ("  user: null", f'  user: "{os.getuid() if user is None else user}"')
    return load_config(write_config(home, EXTERNAL, SOON, at(f"unix:{home}/run/t.sock"), allowed))


def vsock_exists() -> bool:
    try:
        socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM).close()
    except OSError:
        return False
    return True


WITHOUT: dict[str, tuple[Container, set[str]]] = {
    "nothing": (Container(), set()),
    "network of its own": (Container(network=None), NETWORK_PROBES),
    "user of its own": (Container(user=None), FILE_PROBES | PROCESS_PROBES),
    "filter of the hypervisor's sockets": (Container(vsock=True), {"vsock"}),
    "any wall": (
        Container(network=None, user=None, vsock=True), NETWORK_PROBES | FILE_PROBES | PROCESS_PROBES | {"vsock"},
    ),
}  # fmt: skip


@root_only
@pytest.mark.parametrize("missing", WITHOUT)
def test_T10_a_container_over_a_unix_path_holds_by_each_of_its_walls(missing: str, home: Path, site: Site) -> None:
    container, open_ways = WITHOUT[missing]
    if not vsock_exists():
        if open_ways == {"vsock"}:
            pytest.skip("this kernel has no sockets to a hypervisor, so there is nothing to filter")
        open_ways = open_ways - {"vsock"}
    config = over_unix(home, container.user)
    with container.running(home, "--address", config.trainer.address):
        found = probed(config, site.fields)
    assert (found.rung, found.escaped()) == ("waived" if open_ways else "container", open_ways)
    assert {name for name, result in found.results.items() if result["outcome"] == "refused"} == (
        NETWORK_PROBES | FILE_PROBES | PROCESS_PROBES | {"vsock"}
    ) - open_ways


@root_only
def test_T10_below_the_policys_least_rung_no_run_starts_and_people_read_why(
    home: Path, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "probe_fields", lambda config, process: site.fields)
    container = Container(network=None)
    config = over_unix(home, container.user)
    trainer = started(config, least="container")
    with container.running(home, "--address", config.trainer.address):
        with pytest.raises(NotAllowedError, match="isolation is waived; the policy accepts no less") as caught:
            trainer.start()
        trainer.stop()
    assert "reachable from inside: dns_lookup, tcp_connect, udp_send" in caught.value.hint
    # The site's people see the same beside the word, in text and in JSON alike.
    assert (trainer.rung, trainer.description["isolation"]) == ("waived", "waived")
    assert "isolation waived: reachable from inside: dns_lookup" in shown(trainer)


def started(config: SiloConfig, *, least: str) -> SupervisedTrainer:
    policy = SimpleNamespace(file=SimpleNamespace(trainer=SimpleNamespace(least_isolation=least)))
    parts: Any = SimpleNamespace(
        config=config, policy=policy, site_secret=b"s", schema=SimpleNamespace(payload_bytes=0)
    )
    return SupervisedTrainer(parts, queue.Queue(), lambda: False)


def shown(trainer: SupervisedTrainer) -> str:
    """The text of `silo status`."""
    return status_text({"trainer": trainer.description, "held": []})


@pytest.mark.parametrize("inside", ["escaped", "refused"])
def test_T10_the_rung_is_what_was_probed_and_not_what_the_trainer_says(inside: str, home: Path) -> None:
    config = over_unix(home, None)
    results = {name: {"outcome": "refused", "errno": "EPERM"} for name in walls.run_probes({})}
    results["tcp_connect"] = {"outcome": inside, "errno": ""}

    def boast() -> None:
        link = walls_dial(config.trainer.address)
        assert link.receive().type == "probe"
        link.send(LinkMessage("probed", {"results": results, "rung": "namespaces", "isolation": "namespaces"}))
        assert link.receive().type == "configure"
        link.send(LinkMessage("ready", {"isolation": "namespaces", "rung": "namespaces", "probes": {}}))
        assert link.receive().type == "stop"

    trainer = started(config, least="waived")
    thread = threading.Thread(target=boast)
    thread.start()
    trainer.start()
    trainer.stop()
    thread.join(30)
    rung = "container" if inside == "refused" else "waived"
    # `rung` is what hello says; the description is the `trainer` of `silo status --json`.
    assert (trainer.rung, trainer.description["isolation"]) == (rung, rung)
    assert trainer.description["probes"]["tcp_connect"]["outcome"] == inside
    assert f"isolation {rung}: " in shown(trainer)


def walls_dial(address: str) -> Any:
    from silo.trainer.worker import dial_patiently

    return dial_patiently(address, None, 30)


@pytest.mark.parametrize(
    "results",
    [["refused"], {"tcp_connect": "refused"}, {"a\nb": {}}, {"x" * 65: {}}, {str(n): {} for n in range(33)}],
    ids=["a list", "a word", "a line break", "a long name", "many"],
)
def test_T10_answers_of_another_shape_are_not_taken_for_results(results: Any) -> None:
    assert not isolation.are_results(results)
    assert isolation.are_results(walls.run_probes({}))


# ---- over TLS ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made() -> Iterator[Networks]:
    if reason := network_harness.why_not():
        pytest.skip(reason)
    with network_harness.networks() as built:
        yield built


@pytest.fixture(scope="module")
def identities(tmp_path_factory: pytest.TempPathFactory) -> Identities:
    return Identities(tmp_path_factory.mktemp("identities"))


@dataclass(frozen=True)
class OverTls:
    """A site whose trainer is another user of another network, and everything it takes to start that one."""

    home: Path
    made: Networks
    config: SiloConfig
    site: Site
    words: Sequence[object]
    resolver_file: Path

    def trainer(self, **changes: Any) -> Probed:
        container = replace(Container(network=self.made.file("trainer"), resolver_file=self.resolver_file), **changes)
        owner = os.getuid() if container.user is None else container.user
        for path in (self.home / "theirs", *(self.home / "theirs").iterdir()):
            os.chown(path, owner, owner)
        fields = {name: value for name, value in self.site.fields.items() if name not in ("guard_pid", "tcp", "udp")}
        with container.running(self.home, *self.words):
            return self.made.inside("guard", lambda: probed(self.config, fields))


@pytest.fixture
def over_tls(
    home: Path, site: Site, made: Networks, identities: Identities, monkeypatch: pytest.MonkeyPatch
) -> OverTls:
    (home / "id").symlink_to(identities.folder / "id")
    if not (identities.folder / "id" / "hospital_a.crt").exists():
        from fedsilo.launch import provision

        provision.init_ca(home / "federation", name="cardio-net", kind="federation")
        provision.enrol_silo(home / "federation", identities.folder / "id", "hospital_a")
    theirs = home / "theirs"
    shutil.copytree(identities.folder / "theirs", theirs)
    address = f"tls:{GUARD}:7443"
    config = load_config(
        write_config(
            home, EXTERNAL, SOON, LINK, at(address),
            ("coordinator.example.org:8443", f"{COORDINATOR}:{COORDINATOR_PORT}"),
        )
    )  # fmt: skip
    resolver_file = home / "resolv.conf"
    resolver_file.write_text(f"nameserver {NAME_SERVER}\n")
    monkeypatch.setattr(isolation_controls, "_RESOLVER_FILES", (str(resolver_file),))
    words = ("--address", address, "--certificate", theirs / "trainer.crt", "--key", theirs / "trainer.key",
             "--site-ca", theirs / "site_ca.crt")  # fmt: skip
    return OverTls(home, made, config, site, words, resolver_file)


def test_T10_over_tls_without_a_way_but_to_the_guard_it_is_a_container(over_tls: OverTls) -> None:
    found = over_tls.trainer()  # nobody outside needs to answer: the trainer's own system knows no way
    assert (found.rung, found.controls) == ("container", isolation_controls.NO_CONTROLS)
    outcomes = {name: result["outcome"] for name, result in found.results.items()}
    # a number of a process of another machine means nothing, so three are not asked for
    assert outcomes == dict.fromkeys(NETWORK_PROBES | FILE_PROBES | {"vsock", "enter_namespaces"}, "refused") | (
        dict.fromkeys(PROCESS_PROBES - {"enter_namespaces"}, "untried")
    )
    assert {found.results[name]["errno"] for name in ("tcp_connect", "udp_send")} == {"ENETUNREACH"}
    key_in_sight = over_tls.trainer(user=None)
    assert key_in_sight.rung == "waived"
    # whether root may enter the first process's namespaces is for the machine to say
    assert key_in_sight.escaped() - {"enter_namespaces"} == FILE_PROBES


Way = Callable[[Networks], contextlib.AbstractContextManager[None]]


def forwarding(made: Networks) -> contextlib.AbstractContextManager[None]:
    return made.guard_forwards()


@contextlib.contextmanager
def forwarding_to_all_but_the_coordinator(made: Networks) -> Iterator[None]:
    with made.guard_forwards(), made.guard_drops(COORDINATOR):
        yield


OUTSIDE: tuple[Way, ...] = (network_harness.coordinator_outside, network_harness.name_server_outside)
# What lies around a trainer that sends everything to its guard's machine: who answers outside, what is passed on.
DROPPED: dict[str, tuple[Sequence[Way], str, set[str]]] = {
    "everything dropped": (OUTSIDE, "container", set()),
    "coordinator down": (OUTSIDE[1:], "waived", {"tcp_connect"}),
    "no name server": (OUTSIDE[:1], "waived", {"udp_send", "dns_lookup"}),
    "everything passed on": ((*OUTSIDE, forwarding), "waived", NETWORK_PROBES),
    "only the coordinator dropped": (
        (*OUTSIDE, forwarding_to_all_but_the_coordinator), "waived", {"udp_send", "dns_lookup"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", DROPPED)
def test_T10_over_tls_silence_counts_only_where_the_guard_is_answered(case: str, over_tls: OverTls) -> None:
    around, rung, open_ways = DROPPED[case]
    with contextlib.ExitStack() as stack:
        stack.enter_context(over_tls.made.trainer_sends_everything_to_the_guard())
        for way in around:
            stack.enter_context(way(over_tls.made))
        found = over_tls.trainer()
    assert (found.rung, found.escaped()) == (rung, open_ways)
    if case == "everything dropped":
        assert found.controls == Controls(((COORDINATOR, COORDINATOR_PORT),), ((NAME_SERVER, 53),))
        assert {name for name, result in found.results.items() if result["outcome"] == "silent"} == NETWORK_PROBES
        assert isolation.rung_really_got("container", found.results) == "waived"  # without the controls
    if case == "coordinator down":
        why = isolation.why_waived(found.results, found.controls)
        assert "no answer, and nothing that answers the guard was tried" in why and "tcp_connect" in why


def test_T10_a_routers_no_is_an_answer_and_no_route_is_not(made: Networks) -> None:
    """ENETUNREACH both times: said by a router, the packet was out; said by the trainer's own system, it was not."""
    assert made.inside("trainer", lambda: walls.run_probes({}))["tcp_connect"] == {
        "outcome": "refused", "errno": "ENETUNREACH", "tried": 1, "silent": [],
    }  # fmt: skip
    with made.trainer_sends_everything_to_the_guard(), made.guard_forwards():
        # the guard's network has no route to this one, forwards nothing there, and says so
        results = made.inside(
            "trainer", lambda: walls.run_probes({"tcp": [["100.64.0.1", 9]], "udp": [["100.64.0.1", 9]]})
        )
    assert (results["tcp_connect"]["outcome"], results["tcp_connect"]["errno"]) == ("escaped", "ENETUNREACH")
    assert results["udp_send"]["outcome"] == "silent"  # of datagrams, Linux tells a program of a closed port only


def test_controls_are_addresses_that_mean_the_same_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resolver_file = tmp_path / "resolv.conf"
    resolver_file.write_text("nameserver 127.0.0.53\nnameserver 10.0.0.2\nnameserver fe80::1%eth0\noptions edns0\n")
    monkeypatch.setattr(isolation_controls, "_RESOLVER_FILES", (str(resolver_file), str(tmp_path / "absent")))
    assert isolation_controls.candidates("203.0.113.7", 443) == Controls((("203.0.113.7", 443),), (("10.0.0.2", 53),))
    assert isolation_controls.candidates("localhost", 443).tcp == ()


def test_a_child_is_never_believed_for_its_silence(home: Path) -> None:
    config = load_config(write_config(home))
    assert trainer_link.controls(config) == isolation_controls.NO_CONTROLS
    results: dict[str, Any] = {name: {"outcome": "refused", "errno": "EPERM"} for name in walls.run_probes({})}
    results["tcp_connect"] = {"outcome": "silent", "silent": ["203.0.113.7:443"]}
    told = Controls((("203.0.113.7", 443),), ())
    assert trainer_link.rung_got(config, "namespaces", results, told) == "waived"
    external = load_config(write_config(home, EXTERNAL))
    assert trainer_link.rung_got(external, "", results, told) == "container"
