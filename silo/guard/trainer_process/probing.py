"""What the probes try from inside the trainer's sandbox, and how far the guard believes their answers.

Controls are addresses outside the sandbox that answer the guard: they make silence inside worth something.

A network that drops packets gives a probe no answer, and so does an address where nobody is. So the guard asks first
itself, and again afterwards: whoever answered it both times and stays silent towards the trainer cannot be reached
from there. For TCP this is the federation's coordinator, for UDP and names a name server of this machine; and, for
either, what the site names in `trainer.must_not_reach`. Silence over IPv4 says nothing of IPv6, nor the other way
round: each family in which the trainer's packets went out needs a control of its own. Only for a trainer that somebody
else started; the sandbox that the guard builds must refuse outright.

A private address (RFC 1918, 4193, 6598) may belong to somebody else, or to nobody, where the trainer is; and a network
may well drop private addresses and let the internet pass. So for a trainer on another machine it is no control unless
the site names it.

What this does not show: that other addresses are dropped too (a network that bars just these lets the rest pass
unseen); other ports of the guard's own address; an answer that takes the trainer longer than the probe waits. Nothing
of this site is sent: a connection that is closed at once, and one question for a name that does not exist.
"""

from __future__ import annotations

import contextlib
import functools
import grp
import ipaddress
import json
import os
import socket
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedsilo.protocol.errors import UsageError
from fedsilo.protocol.isolation import IsolationLevel, isolation_level
from fedsilo.sandbox.probes import IPV4, IPV6, QUESTION, Address, address_text, family_of, name_servers
from silo.config import SiloConfig
from silo.guard.trainer_process.sandbox import IsolationError, run_in_sandbox
from silo.link import host_and_port

TRIAL_TIMEOUT_SECONDS = 20.0
ANSWER_WAIT_SECONDS = 2.0
_EACH_MAX = 2  # of a family
# Where systemd-resolved stands in between, resolv.conf names its loopback address, and this file those behind it.
_RESOLVER_FILES = ("/etc/resolv.conf", "/run/systemd/resolve/resolv.conf")
_CONTROL_OF = {"tcp_connect": "tcp", "udp_send": "udp", "dns_lookup": "udp"}
# RFC 1918, RFC 6598 (carriers), RFC 4193, and RFC 3879 (site-local). Not `is_private`: that knows more kinds.
_PRIVATE = tuple(
    ipaddress.ip_network(each)
    for each in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "fc00::/7", "fec0::/10")
)
# fields of the `probe` message that name paths, and the probe that tries them
_PATHS_TRIED = {"key_paths": "key_files", "identity_folder": "identity_folder", "control_socket": "control_socket"}
# an isolation level is believed only when at least these were tried
_ESSENTIAL = ("tcp_connect", "udp_send", "dns_lookup", "enter_namespaces", "key_files", "control_socket")
_PROBES_MAX = 32
ROLLOUT_SOCKETS = "rollout_sockets"  # the probe whose `allowed` is no escape
_TEXT_MAX = 64


@dataclass(frozen=True)
class Controls:
    """Addresses that the guard reaches: where the trainer's probes must fail, the way out is really closed.

    Attributes:
        tcp: addresses with a listener.
        udp: name servers.
        private: private addresses that would have been controls for a trainer on this machine.
    """

    tcp: tuple[Address, ...] = ()
    udp: tuple[Address, ...] = ()
    private: tuple[Address, ...] = ()

    def as_fields(self) -> dict[str, list[list[Any]]]:
        """Return the fields of the `probe` message."""
        return {"tcp": [list(each) for each in self.tcp], "udp": [list(each) for each in self.udp]}

    def as_text(self) -> dict[str, list[str]]:
        """Return the addresses as texts for people."""
        return {"tcp": [*map(address_text, self.tcp)], "udp": [*map(address_text, self.udp)]}

    def and_also(self, more: Controls) -> Controls:
        tcp, udp = (*self.tcp, *more.tcp), (*self.udp, *more.udp)
        left = [each for each in self.private if each not in tcp and each not in udp]
        return Controls(tuple(dict.fromkeys(tcp)), tuple(dict.fromkeys(udp)), tuple(left))

    def prove(self, probe: str, result: Mapping[str, Any]) -> bool:
        """Return whether a probe's silence is proof: in every family that it was silent in, it was so at one of
        these."""
        return result.get("outcome") == "silent" and not self._unproven(probe, result)

    def _unproven(self, probe: str, result: Mapping[str, Any]) -> set[str]:
        """The families in which nothing is proven; both where nothing is proven at all and no address is named."""
        listed = result.get("silent")
        silent = {each for each in listed if isinstance(each, str)} if isinstance(listed, list) else set()
        heard = {family for each in silent if (family := family_of(each))}
        known = silent.intersection(self.as_text().get(_CONTROL_OF.get(probe, ""), []))
        proven = {family for each in known if (family := family_of(each))}
        return heard - proven if proven else heard or {IPV4, IPV6}

    def why_unproven(self, silent: Mapping[str, Mapping[str, Any]]) -> str:
        """Say for people what is missing for the silence of these probes to count. silent: their results."""
        families = set().union(*(self._unproven(probe, result) for probe, result in silent.items()))
        text = f"no answer, and nothing that answers the guard was tried over {' and '.join(sorted(families))}"
        if not self.private:
            return f"{text} (is the coordinator up?)"
        private = ", ".join(map(address_text, self.private))
        return f"{text} (private addresses such as {private} count only if trainer.must_not_reach names them)"

    def still_answering(self) -> Controls:
        """Return the addresses that answer this process now. Takes up to ANSWER_WAIT_SECONDS for each that does not."""
        return replace(self, tcp=tuple(filter(_accepts, self.tcp)), udp=tuple(filter(_answers, self.udp)))


NO_CONTROLS = Controls()


def candidates(host: str, port: int, *, same_machine: bool) -> Controls:
    """Return where the coordinator and this machine's name servers are, as addresses that mean the same to the trainer.

    Args:
        host: of the coordinator, a name or an address.
        port: of the coordinator.
        same_machine: whether the trainer runs on this machine, so that private addresses are the same ones.
    """
    addresses: list[Address] = []
    with contextlib.suppress(OSError):
        for family, *_, place in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            if family in (socket.AF_INET, socket.AF_INET6):
                addresses.append((str(place[0]), int(place[1])))
    servers: list[Address] = []
    for file in _RESOLVER_FILES:
        with contextlib.suppress(OSError):
            servers += name_servers(Path(file).read_text(encoding="utf-8", errors="replace"))
    tcp, udp = _elsewhere(addresses), _elsewhere(servers)
    if same_machine:
        return Controls(_few(tcp), _few(udp))
    return Controls(
        _few(each for each in tcp if not _is_private(each)),
        _few(each for each in udp if not _is_private(each)),
        _few(each for each in (*tcp, *udp) if _is_private(each)),
    )


def named(texts: Iterable[str]) -> Controls:
    """Return what `trainer.must_not_reach` lists: `tcp:ADDRESS:PORT`, `udp:ADDRESS:PORT` (a name server)."""
    by_protocol: dict[str, list[Address]] = {"tcp": [], "udp": []}
    for text in texts:
        kind, _, place = text.partition(":")
        host, port = host_and_port(place)
        by_protocol[kind].append((str(_plain(host)), port))
    return Controls(tuple(by_protocol["tcp"]), tuple(by_protocol["udp"]))


def _elsewhere(addresses: list[Address]) -> list[Address]:
    """Return the addresses without this machine's own, and without those of one wire."""
    others: list[Address] = []
    for address in addresses:
        with contextlib.suppress(ValueError):
            place = _plain(address[0])
            if not (place.is_loopback or place.is_unspecified or place.is_link_local):
                others.append((str(place), address[1]))
    return list(dict.fromkeys(others))


def _few(addresses: Iterable[Address]) -> tuple[Address, ...]:
    """The first ones of each family."""
    by_family: dict[bool, list[Address]] = {False: [], True: []}
    for address in addresses:
        by_family[":" in address[0]].append(address)
    return (*by_family[False][:_EACH_MAX], *by_family[True][:_EACH_MAX])


def _is_private(address: Address) -> bool:
    place = _plain(address[0])
    return any(place.version == network.version and place in network for network in _PRIVATE)


def _plain(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """`::ffff:10.0.0.1` is the IPv4 address. Raises ValueError."""
    place = ipaddress.ip_address(host)
    return getattr(place, "ipv4_mapped", None) or place


def _accepts(address: Address) -> bool:
    try:
        socket.create_connection(address, ANSWER_WAIT_SECONDS).close()
    except OSError:
        return False
    return True


def _answers(address: Address) -> bool:
    try:
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as connection:
            connection.settimeout(ANSWER_WAIT_SECONDS)
            connection.connect(address)
            connection.send(QUESTION)
            connection.recv(512)
    except OSError:
        return False
    return True


# ---- judging the answers ------------------------------------------------------------------------------


def escaped(results: Mapping[str, Mapping[str, Any]], controls: Controls = NO_CONTROLS) -> list[str]:
    """Return the names of the probes that got out; silence counts, unless proven. results: of `run_probes`."""
    return sorted(
        name
        for name, result in results.items()
        if name != ROLLOUT_SOCKETS  # the way that was opened for the trainer on purpose
        and result.get("outcome") not in ("refused", "untried")
        and not controls.prove(name, result)
    )


def proven_level(
    built: str, results: Mapping[str, Mapping[str, Any]], controls: Controls = NO_CONTROLS
) -> IsolationLevel:
    """The isolation level to report: the one that was built where every probe was refused, else `waived`.

    The answers come from the process inside. They show that the sandbox stands, not that the process is honest; so they
    are asked for before the trainer has seen data, and `best_level` asks a process of our own.

    Args:
        built: the isolation level that was built, by the guard or by somebody else.
        results: of the probes.
        controls: what answered the guard before and after the probes were silent there.
    """
    tried = all(results.get(name, {}).get("outcome", "untried") != "untried" for name in _ESSENTIAL)
    return isolation_level(built) if tried and not escaped(results, controls) else "waived"


def why_waived(results: Mapping[str, Mapping[str, Any]], controls: Controls = NO_CONTROLS) -> str:
    """Return one line for people: which probes were not refused, and how."""
    reached = escaped(results, controls)
    silent = [name for name in reached if results[name].get("outcome") == "silent"]
    out = [name for name in reached if name not in silent]
    untried = [name for name in _ESSENTIAL if results.get(name, {}).get("outcome", "untried") == "untried"]
    causes = [
        (out, "reachable from inside"),
        (silent, controls.why_unproven({name: results[name] for name in silent})),
        (untried, "not tried"),
    ]
    return "; ".join(f"{what}: {', '.join(names)}" for names, what in causes if names)


def are_results(value: object) -> bool:
    """Return whether what a trainer says has the shape of results: few, named in plain words."""
    return (
        isinstance(value, dict)
        and len(value) <= _PROBES_MAX
        and all(
            isinstance(name, str) and name.isprintable() and len(name) <= _TEXT_MAX and isinstance(result, dict)
            for name, result in value.items()
        )
    )


# ---- trying a sandbox that the guard builds -----------------------------------------------------------


def best_level() -> IsolationLevel:
    """The best isolation level this machine can build for this user, tried once per process (about 0.15 s each)."""
    for level in ("namespaces", "user"):
        if not sandbox_trial(level):
            return isolation_level(level)
    return "waived"


@functools.cache
def sandbox_trial(level: str) -> str:
    """Build a sandbox with decoys outside and run every probe inside. Returns why it does not hold, or ''."""
    with tempfile.TemporaryDirectory(prefix="fedsilo-sandbox-") as folder, socket.socket(socket.AF_UNIX) as control:
        secret = Path(folder, "identity", "decoy.key")
        secret.parent.mkdir()
        secret.touch(0o600)
        control.bind(str(Path(folder, "control.sock")))
        control.listen()
        fields = {
            "key_paths": [str(secret)],
            "control_socket": str(Path(folder, "control.sock")),
            "guard_pid": os.getpid(),
        }
        try:
            answer, complaint = run_in_sandbox(
                [sys.executable, "-P", "-m", "fedsilo.sandbox.probes"],
                json.dumps(fields).encode(),
                level=level,
                env={name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ},
                never=[secret],
                timeout_seconds=TRIAL_TIMEOUT_SECONDS,
            )
        except (IsolationError, UsageError, OSError) as error:
            return str(error)
    try:
        results = json.loads(answer)
    except ValueError:
        last = complaint.decode("utf-8", "replace").strip().splitlines()[-1:] or ["no message"]
        return f"Python does not start inside: {last[0]}"
    if proven_level(level, results) != level:
        return f"probes got out: {', '.join(escaped(results)) or 'not all were tried'}"
    return ""


# ---- what is tried ------------------------------------------------------------------------------------


def probe_fields(config: SiloConfig, guard_process: int) -> dict[str, Any]:
    """Return what the probes try to reach from inside the sandbox. A path may be shared by hosts; a process is not."""
    keys = [path for path in (*config.key_files, config.identity.link_key) if path is not None]
    fields: dict[str, Any] = {
        "key_paths": [str(path) for path in keys],
        "control_socket": str(config.control.socket),
    }
    if config.trainer.unix_path is not None:
        fields["guard_pid"] = guard_process
    return fields


@contextlib.contextmanager
def probe_fields_beside_the_daemon(config: SiloConfig, guard_process: int) -> Iterator[dict[str, Any]]:
    """`probe_fields` for a trainer that another process than the daemon starts, so the control socket may be missing.

    Then the probes try a decoy beside its place, which has the rights that the daemon gives its own and answers
    nothing. Where no decoy can be made, the probe has nothing to try, and no isolation level is claimed.
    """
    fields, control = probe_fields(config, guard_process), config.control
    decoy = control.socket.with_name("decoy")
    with contextlib.ExitStack() as stack:
        if not control.socket.exists():
            with contextlib.suppress(OSError):
                if decoy.is_socket():  # of a report that was killed
                    decoy.unlink()
                listener = stack.enter_context(socket.socket(socket.AF_UNIX))
                listener.bind(str(decoy))
                stack.callback(decoy.unlink, missing_ok=True)
                decoy.chmod(0o600)
                listener.listen()
                with contextlib.suppress(KeyError, PermissionError):
                    os.chown(decoy, -1, grp.getgrnam(control.group).gr_gid)
                    decoy.chmod(0o660)
                fields["control_socket"] = str(decoy)
        yield fields


def only_what_exists(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields without paths where nothing is: "no such file" would be said there without any sandbox."""
    known = dict(fields)
    for name in _PATHS_TRIED:
        value = fields.get(name)
        if isinstance(value, list):
            known[name] = [path for path in value if Path(path).exists()]
        elif value and not Path(value).exists():
            del known[name]
    return known


def believable(probes: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """The probes' results without those whose paths went away meanwhile. fields: of `only_what_exists`, before."""
    remain = only_what_exists(fields)
    gone = {probe for name, probe in _PATHS_TRIED.items() if remain.get(name) != fields.get(name)}
    return {name: result for name, result in probes.items() if name not in gone}


def controls(config: SiloConfig) -> Controls:
    """What answers the guard at this moment and must not answer an external trainer; some seconds where nobody does.

    Beside the coordinator and the name servers these are the addresses of `trainer.must_not_reach`.
    """
    trainer = config.trainer
    if trainer.launch == "child" or trainer.isolation == "waived":
        return NO_CONTROLS
    place = host_and_port(config.coordinator.first_hop)
    addresses = candidates(*place, same_machine=trainer.unix_path is not None)
    return addresses.and_also(named(trainer.must_not_reach)).still_answering()


def trainer_level(config: SiloConfig, built: str, probes: dict[str, Any], answering: Controls = NO_CONTROLS) -> str:
    """The isolation level to report. An external trainer has a container where every probe was refused, else nothing.

    Args:
        config: the site.
        built: for a child, the isolation level of its sandbox.
        probes: what it answered to the probes.
        answering: the `controls` that also answered the guard after the probes.
    """
    if config.trainer.launch == "child":
        return proven_level(built, probes)
    if config.trainer.isolation == "waived":
        return "waived"
    return proven_level("container", probes, answering)
