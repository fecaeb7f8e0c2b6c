"""T10, B1: a trainer in a sandbox that somebody else built, over a unix path as another user and over TLS.

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
import stat
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedsilo.cli.silo import status_text
from fedsilo.protocol.errors import FedSiloError, NotAllowedError
from fedsilo.sandbox import probes
from silo.config import SiloConfig, load_config
from silo.guard import main
from silo.guard.main import SupervisedTrainer
from silo.guard.trainer_process import probing, sandbox, trainer_link
from silo.guard.trainer_process.probing import Controls
from silo.guard.trainer_process.supervisor import Supervisor
from silo.link import LinkMessage
from tests.security import container_harness, network_harness
from tests.security.link_harness import EXTERNAL, LINK, at, write_config
from tests.security.link_harness import Site as Identities
from tests.security.network_harness import (
    COORDINATOR,
    COORDINATOR_6,
    COORDINATOR_PORT,
    GUARD,
    NAME_SERVER,
    NAME_SERVER_6,
    Networks,
)
from tests.security.probing_guard import Probed, probed, probed_by
from tests.security.sandbox_harness import Site, reachable_site

REPOSITORY = Path(__file__).parents[2]
SOMEBODY = 65534
NETWORK_PROBES = {"tcp_connect", "udp_send", "dns_lookup"}
# What the user's number holds back, and what only the rights of root open.
FILE_PROBES = {"key_files", "identity_folder", "control_socket"}
PROCESS_PROBES = {"enter_namespaces", "ptrace", "memory", "signal"}
# A trainer whose every way out was refused.
REFUSED = {
    name: {"outcome": "refused", "errno": "EPERM"} for name in NETWORK_PROBES | FILE_PROBES | PROCESS_PROBES | {"vsock"}
}

SOON = ("  start_timeout_seconds: 180", "  start_timeout_seconds: 20")

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root can stand for a container runtime")


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


@pytest.mark.quick(keep=3)
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
    assert (found.isolation, found.escaped()) == ("waived" if open_ways else "container", open_ways)
    assert {name for name, result in found.results.items() if result["outcome"] == "refused"} == (
        NETWORK_PROBES | FILE_PROBES | PROCESS_PROBES | {"vsock"}
    ) - open_ways


@pytest.mark.slow
@root_only
def test_T10_below_the_policys_least_level_no_run_starts_and_people_read_why(
    home: Path, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main, "probe_fields", lambda config, process: site.fields)
    container = Container(network=None)
    config = over_unix(home, container.user)
    trainer = started(config, least="container")
    with container.running(home, "--address", config.trainer.address):
        with pytest.raises(NotAllowedError, match="isolation is waived; the policy accepts no less") as caught:
            trainer.start()
        trainer.stop()
    assert "reachable from inside: dns_lookup, tcp_connect, udp_send" in caught.value.hint
    # The site's people see the same beside the word, in text and in JSON alike.
    assert (trainer.isolation, trainer.description["isolation"]) == ("waived", "waived")
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
def test_T10_the_level_is_what_was_probed_and_not_what_the_trainer_says(inside: str, home: Path) -> None:
    config = over_unix(home, None)
    results = REFUSED | {"tcp_connect": {"outcome": inside, "errno": ""}}

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
    level = "container" if inside == "refused" else "waived"
    # `isolation` is what hello says; the description is the `trainer` of `silo status --json`.
    assert (trainer.isolation, trainer.description["isolation"]) == (level, level)
    assert trainer.description["probes"]["tcp_connect"]["outcome"] == inside
    assert f"isolation {level}: " in shown(trainer)


def walls_dial(address: str) -> Any:
    from silo.trainer.worker import dial_patiently

    return dial_patiently(address, None, 30)


@pytest.mark.parametrize(
    "results",
    [["refused"], {"tcp_connect": "refused"}, {"a\nb": {}}, {"x" * 65: {}}, {str(n): {} for n in range(33)}],
    ids=["a list", "a word", "a line break", "a long name", "many"],
)
def test_T10_answers_of_another_shape_are_not_taken_for_results(results: Any) -> None:
    assert not probing.are_results(results)
    assert probing.are_results(REFUSED)


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
    config: Path
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
            return probed_by(partial(self.made.run, "guard"), self.config, self.resolver_file, fields)


@pytest.fixture
def over_tls(home: Path, site: Site, made: Networks, identities: Identities) -> OverTls:
    (home / "id").symlink_to(identities.folder / "id")
    if not (identities.folder / "id" / "hospital_a.crt").exists():
        from fedsilo.demo import provision

        provision.init_ca(home / "federation", name="cardio-net", kind="federation")
        provision.enrol_silo(home / "federation", identities.folder / "id", "hospital_a")
    theirs = home / "theirs"
    shutil.copytree(identities.folder / "theirs", theirs)
    address = f"tls:{GUARD}:7443"
    config = write_config(
        home, EXTERNAL, SOON, LINK, at(address),
        ("coordinator.example.org:8443", f"{COORDINATOR}:{COORDINATOR_PORT}"),
    )  # fmt: skip
    resolver_file = home / "resolv.conf"
    resolver_file.write_text(f"nameserver {NAME_SERVER}\n")
    words = ("--address", address, "--certificate", theirs / "trainer.crt", "--key", theirs / "trainer.key",
             "--site-ca", theirs / "site_ca.crt")  # fmt: skip
    return OverTls(home, made, config, site, words, resolver_file)


@pytest.mark.slow
def test_T10_over_tls_without_a_way_but_to_the_guard_it_is_a_container(over_tls: OverTls) -> None:
    found = over_tls.trainer()  # nobody outside needs to answer: the trainer's own system knows no way
    assert (found.isolation, found.controls) == ("container", probing.NO_CONTROLS)
    outcomes = {name: result["outcome"] for name, result in found.results.items()}
    # a number of a process of another machine means nothing, so three are not asked for
    assert outcomes == dict.fromkeys(NETWORK_PROBES | FILE_PROBES | {"vsock", "enter_namespaces"}, "refused") | (
        dict.fromkeys(PROCESS_PROBES - {"enter_namespaces"}, "untried")
    )
    assert {found.results[name]["errno"] for name in ("tcp_connect", "udp_send")} == {"ENETUNREACH"}
    key_in_sight = over_tls.trainer(user=None)
    assert key_in_sight.isolation == "waived"
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


@pytest.mark.quick(keep=1)
@pytest.mark.parametrize("case", DROPPED)
def test_T10_over_tls_silence_counts_only_where_the_guard_is_answered(case: str, over_tls: OverTls) -> None:
    around, level, open_ways = DROPPED[case]
    with contextlib.ExitStack() as stack:
        stack.enter_context(over_tls.made.trainer_sends_everything_to_the_guard())
        for way in around:
            stack.enter_context(way(over_tls.made))
        found = over_tls.trainer()
    assert (found.isolation, found.escaped()) == (level, open_ways)
    if case == "everything dropped":
        assert found.controls == Controls(((COORDINATOR, COORDINATOR_PORT),), ((NAME_SERVER, 53),))
        assert {name for name, result in found.results.items() if result["outcome"] == "silent"} == NETWORK_PROBES
        assert probing.proven_level("container", found.results) == "waived"  # without the controls
    if case == "coordinator down":
        why = probing.why_waived(found.results, found.controls)
        assert "no answer, and nothing that answers the guard was tried" in why and "tcp_connect" in why


@pytest.mark.slow
def test_T10_a_routers_no_is_an_answer_and_no_route_is_not(made: Networks) -> None:
    """ENETUNREACH both times: said by a router, the packet was out; said by the trainer's own system, it was not."""
    assert made.inside("trainer", lambda: probes.run_probes({}))["tcp_connect"] == {
        "outcome": "refused", "errno": "ENETUNREACH", "tried": 2, "silent": [],
    }  # fmt: skip
    with made.trainer_sends_everything_to_the_guard(), made.guard_forwards():
        # the guard's network has no route to this one, forwards nothing there, and says so
        results = made.inside(
            "trainer", lambda: probes.run_probes({"tcp": [["100.64.0.1", 9]], "udp": [["100.64.0.1", 9]]})
        )
    assert (results["tcp_connect"]["outcome"], results["tcp_connect"]["errno"]) == ("escaped", "ENETUNREACH")
    assert results["udp_send"]["outcome"] == "silent"  # of datagrams, Linux tells a program of a closed port only


def test_both_ends_ask_the_same_question_and_write_addresses_alike() -> None:
    # the bytes as RFC 1035, 4.1 lays them out, by hand
    assert probes.QUESTION.hex() == "0f5d01000001000000000000" + (
        "0d" + b"fedsilo-probe".hex() + "07" + b"invalid".hex() + "00" + "0001" + "0001"
    )
    text = "# nameserver 192.0.2.9\nnameserver 10.0.0.2\nnameserver ::1\nnameserver fe80::1%eth0\nnameserver\nsearch x"
    assert probes.name_servers(text) == [("10.0.0.2", 53), ("::1", 53)]
    for address, written, family in ((("10.0.0.2", 53), "10.0.0.2:53", "IPv4"), (("::1", 53), "[::1]:53", "IPv6")):
        assert (probes.address_text(address), probes.family_of(written)) == (written, family)
    assert [probes.family_of(each) for each in ("the C library's resolver", "10.0.0.2", "10.0.0.2:", "")] == [None] * 4


def test_controls_are_addresses_that_mean_the_same_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resolver_file = tmp_path / "resolv.conf"
    resolver_file.write_text("nameserver 127.0.0.53\nnameserver 10.0.0.2\nnameserver fe80::1%eth0\noptions edns0\n")
    monkeypatch.setattr(probing, "_RESOLVER_FILES", (str(resolver_file), str(tmp_path / "absent")))
    found = probing.candidates("203.0.113.7", 443, same_machine=True)
    assert found == Controls((("203.0.113.7", 443),), (("10.0.0.2", 53),))
    assert probing.candidates("localhost", 443, same_machine=True).tcp == ()


PRIVATE = ["10.0.0.2", "172.31.0.2", "192.168.1.1", "100.64.0.1", "fd00::2", "::ffff:a00:2"]
PUBLIC = ["203.0.113.7", "172.32.0.1", "100.128.0.1", "2001:db8::7", "::ffff:cb00:7107"]
# IPv4 addresses as IPv6 writes them
MAPPED = {"::ffff:a00:2": "10.0.0.2", "::ffff:cb00:7107": "203.0.113.7"}


@pytest.mark.parametrize("host", [*PRIVATE, *PUBLIC])
def test_T10_a_private_address_is_no_control_for_a_trainer_elsewhere(
    host: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the trainer is, nobody may have that address, or its network drops such addresses and passes the rest."""
    monkeypatch.setattr(probing, "_RESOLVER_FILES", ())
    monkeypatch.setattr(probing, "_accepts", lambda address: True)
    plain = MAPPED.get(host, host)
    place = f"[{host}]:8443" if ":" in host else f"{host}:8443"
    known = ("coordinator.example.org:8443", place)

    def controls(*changes: tuple[str, str]) -> Controls:
        return probing.controls(load_config(write_config(home, EXTERNAL, known, *changes)))

    over_tls = (LINK, at(f"tls:{GUARD}:7443"))
    named = ("  must_not_reach: []", f'  must_not_reach: ["tcp:{place}"]')
    assert controls().tcp == controls(*over_tls, named).tcp == ((plain, 8443),)
    elsewhere = controls(*over_tls)
    assert (elsewhere.tcp, elsewhere.private) == (((), ((plain, 8443),)) if host in PRIVATE else (((plain, 8443),), ()))

    text = f"[{plain}]:8443" if ":" in plain else f"{plain}:8443"
    results: dict[str, Any] = REFUSED | {"tcp_connect": {"outcome": "silent", "silent": [text]}}
    for found, counts in ((elsewhere, host in PUBLIC), (controls(), True), (controls(*over_tls, named), True)):
        assert probing.proven_level("container", results, found) == ("container" if counts else "waived")
    if host in PRIVATE:
        shown = status_text({"trainer": {"isolation": "waived", "why_waived": probing.why_waived(results, elsewhere)},
                             "held": []})  # fmt: skip
        assert f"private addresses such as {text} count only if trainer.must_not_reach names them" in shown


V4, V6 = "203.0.113.7:443", "[2001:db8::7]:443"
NOBODY_4, NOBODY_6 = "192.0.2.1:9", "[2001:db8:ffff::9]:9"
KNOWN = {"4": Controls(tcp=(("203.0.113.7", 443),)), "6": Controls(tcp=(("2001:db8::7", 443),))}
KNOWN["both"] = KNOWN["4"].and_also(KNOWN["6"])


@pytest.mark.parametrize(
    ("known", "silent", "missing"),
    [
        ("4", [NOBODY_4, V4], ""),
        ("6", [NOBODY_6, V6], ""),
        ("both", [NOBODY_4, NOBODY_6, V4, V6], ""),
        ("both", [NOBODY_4, V4], ""),
        ("4", [NOBODY_6], "IPv6"),
        ("4", [NOBODY_4, NOBODY_6, V4], "IPv6"),
        ("6", [NOBODY_4, NOBODY_6, V6], "IPv4"),
        ("both", [NOBODY_4, NOBODY_6, V4], "IPv6"),  # known, but the trainer was not silent there
        ("4", [NOBODY_4, NOBODY_6], "IPv4 and IPv6"),
        ("4", ["the C library's resolver"], "IPv4 and IPv6"),
        ("4", "203.0.113.7:443", "IPv4 and IPv6"),
        ("4", [None, 7], "IPv4 and IPv6"),
    ],
)
def test_T10_silence_over_one_family_says_nothing_of_the_other(known: str, silent: Any, missing: str) -> None:
    results: dict[str, Any] = REFUSED | {"tcp_connect": {"outcome": "silent", "silent": silent}}
    level = probing.proven_level("container", results, KNOWN[known])
    assert level == ("waived" if missing else "container")
    if missing:
        assert f"was tried over {missing} (" in probing.why_waived(results, KNOWN[known])


@pytest.mark.slow
def test_T10_an_open_ipv6_network_alone_is_no_container(made: Networks) -> None:
    """Every IPv4 way refused, as with a network that has IPv6 only: the other family is tried for itself."""

    def judged(controls: Controls) -> tuple[str, dict[str, str], dict[str, Any]]:
        seen = made.inside("trainer", lambda: probes.run_probes(controls.as_fields()))
        network: dict[str, Any] = {name: seen[name] for name in NETWORK_PROBES}
        outcomes = {name: str(result["outcome"]) for name, result in network.items()}
        answering = made.inside("guard", controls.still_answering)
        return probing.proven_level("container", REFUSED | network, answering), outcomes, network

    refused = dict.fromkeys(NETWORK_PROBES, "refused")
    assert judged(probing.NO_CONTROLS)[:2] == ("container", refused)
    outside = Controls(((COORDINATOR_6, COORDINATOR_PORT),), ((NAME_SERVER_6, 53),))
    with contextlib.ExitStack() as stack:
        stack.enter_context(made.trainer_sends_everything_to_the_guard("-6"))
        level, outcomes, _ = judged(probing.NO_CONTROLS)
        assert (level, outcomes) == ("waived", refused | {"tcp_connect": "silent", "udp_send": "silent"})
        stack.enter_context(network_harness.coordinator_outside(made, COORDINATOR_6))
        stack.enter_context(network_harness.name_server_outside(made, NAME_SERVER_6))
        level, outcomes, _ = judged(outside)  # dropped, where the guard is answered
        assert (level, outcomes) == ("container", dict.fromkeys(NETWORK_PROBES, "silent"))
        stack.enter_context(made.guard_forwards())
        level, outcomes, _ = judged(outside)
        assert (level, outcomes) == ("waived", dict.fromkeys(NETWORK_PROBES, "escaped"))


# ---- paths that may be missing -----------------------------------------------------------------------


@root_only
@pytest.mark.parametrize("missing", ["control_socket", "key_paths"])
def test_T10_a_path_where_nothing_is_shows_no_wall(missing: str, home: Path, site: Site) -> None:
    """The container of the first test, which holds; but "no such file" is no refusal."""
    absent = str(site.folder / "absent")
    fields = site.fields | {missing: [absent] if missing == "key_paths" else absent}
    config, container = over_unix(home, SOMEBODY), Container()
    with container.running(home, "--address", config.trainer.address):
        found = probed(config, fields)
    probe = {"key_paths": "key_files"}.get(missing, missing)
    assert (found.isolation, found.escaped(), found.results[probe]["outcome"]) == ("waived", set(), "untried")
    assert probing.why_waived(found.results) == f"not tried: {probe}"


def test_T10_a_path_that_goes_away_while_it_is_tried_shows_no_wall(site: Site) -> None:
    named = probing.only_what_exists(site.fields)
    assert named == site.fields
    assert probing.believable(REFUSED, named) == REFUSED
    Path(site.fields["control_socket"]).unlink()
    kept = probing.believable(REFUSED, named)
    assert set(REFUSED) - set(kept) == {"control_socket"}
    assert probing.proven_level("container", REFUSED) == "container"
    assert probing.proven_level("container", kept) == "waived"


@pytest.mark.slow
@root_only
@pytest.mark.parametrize("user", [SOMEBODY, None])
def test_T10_a_report_without_the_daemon_tries_a_decoy_of_its_control_socket(
    user: int | None, home: Path, site: Site
) -> None:
    config, container = over_unix(home, user), Container(user=user)
    assert not config.control.socket.exists()
    config.control.socket.parent.mkdir()
    with (
        probing.probe_fields_beside_the_daemon(config, site.fields["guard_pid"]) as fields,
        container.running(home, "--address", config.trainer.address),
    ):
        decoy = Path(fields["control_socket"])
        assert (decoy.parent, stat.S_IMODE(decoy.stat().st_mode)) == (config.control.socket.parent, 0o600)
        found = probed(config, fields | {"key_paths": site.fields["key_paths"]})
    assert not decoy.exists()
    # without a wall around files the decoy is reached, as the socket itself would be
    outcome = "escaped" if user is None else "refused"
    assert (found.isolation, found.results["control_socket"]["outcome"]) == (
        "waived" if user is None else "container", outcome,
    )  # fmt: skip


def test_the_daemons_own_control_socket_is_tried_where_there_is_one(home: Path) -> None:
    config = over_unix(home, None)
    config.control.socket.parent.mkdir()
    config.control.socket.touch()
    with probing.probe_fields_beside_the_daemon(config, 1) as fields:
        assert fields["control_socket"] == str(config.control.socket)
        assert list(config.control.socket.parent.iterdir()) == [config.control.socket]
    # where no decoy can be made nothing is tried, and so nothing claimed; what is no socket is not removed for it
    config.control.socket.rename(config.control.socket.with_name("decoy"))
    with probing.probe_fields_beside_the_daemon(config, 1) as fields:
        assert "control_socket" not in probing.only_what_exists(fields)
    assert config.control.socket.with_name("decoy").exists()
    nowhere = config.model_copy(update={"control": config.control.model_copy(update={"socket": home / "no" / "c"})})
    with probing.probe_fields_beside_the_daemon(nowhere, 1) as fields:
        assert "control_socket" not in probing.only_what_exists(fields)


# ---- whose program runs ------------------------------------------------------------------------------


@pytest.mark.slow
def test_T10_no_program_is_taken_from_the_working_folder(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainer, sandbox trial and the command for people: each would run a package that lies where it is started."""
    for folder, name in (("silo/trainer", "worker.py"), ("fedsilo/sandbox", "probes.py")):
        (home / folder).mkdir(parents=True, exist_ok=True)
        (home / folder).with_name("__init__.py").touch()
        (home / folder / "__init__.py").touch()
        (home / folder / name).write_text("print('planted')")
    commands: list[list[str]] = []

    def noted(argv: Sequence[str], **options: Any) -> None:
        commands.append(list(argv))
        raise OSError("only noted")

    monkeypatch.setattr(sandbox, "launch_in_sandbox", noted)
    probing.sandbox_trial.__wrapped__("user")
    config = load_config(write_config(home))
    config.state_dir.mkdir()
    with pytest.raises(FedSiloError, match="only noted"):
        Supervisor(config, lambda event: None)._launch("user", home, ())
    commands.append(trainer_link.start_command(config).split())
    assert [command[-1] if "probes" in command[-1] else "worker" for command in commands] == [
        "fedsilo.sandbox.probes", "worker", "worker",
    ]  # fmt: skip
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONSAFEPATH", "PYTHONPATH")}
    for command in commands:
        program = command[: command.index("-m") + 2]

        def ran(*argv: str) -> str:
            done = subprocess.run(
                [*argv, "--help"], cwd=home, env=environment, input="{}", capture_output=True, text=True, timeout=60,
                check=True,
            )  # fmt: skip
            return done.stdout

        assert "planted" not in ran(*program)
        assert ran(*(word for word in program if word != "-P")) == "planted\n"


def test_a_child_is_never_believed_for_its_silence(home: Path) -> None:
    config = load_config(write_config(home))
    assert probing.controls(config) == probing.NO_CONTROLS
    results: dict[str, Any] = REFUSED | {"tcp_connect": {"outcome": "silent", "silent": ["203.0.113.7:443"]}}
    told = Controls((("203.0.113.7", 443),), ())
    assert probing.trainer_level(config, "namespaces", results, told) == "waived"
    external = load_config(write_config(home, EXTERNAL))
    assert probing.trainer_level(external, "", results, told) == "container"
