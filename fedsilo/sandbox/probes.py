"""Probes of the sandbox, run inside the trainer: each tries one way out and reports whether it was refused.

    tcp_connect, udp_send, dns_lookup, vsock     a network
    enter_namespaces, ptrace, memory, signal     the guard's process (`guard_pid`) and process 1
    key_files, identity_folder, control_socket   what lies beside the guard
    rollout_sockets                              of the servers that sample: they alone must be reached

Outcome `refused`: the system said no, with the errno. `escaped`: it said yes, or an answer came from outside the
sandbox (a refusal by another host is an answer). `silent`: the system let it go and nobody answered, so it was dropped
on the way or nobody is there; the guard believes silence only at an address that answers itself
(`silo.guard.trainer_process.probing`), and over IPv4 and IPv6 each for itself. `untried`: the guard named nothing to
try, such as a file that does not exist.

What this does not show: a way out that is not on the list, a name server that takes longer than DNS_WAIT_SECONDS, and
anything about a process that lies in its answers; before it trusts a sandbox that it builds, the guard runs these
probes from a process of its own.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Address = tuple[str, int]
NAME = "fedsilo-probe.invalid"  # never exists (RFC 2606)
NAME_SERVER_PORT = 53
IPV4, IPV6 = "IPv4", "IPv6"
# One question (RFC 1035, 4.1): number, flags (recursion wished), one question, no records; then name, A, Internet.
QUESTION = (
    b"\x0f\x5d\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00"
    + b"".join(bytes([len(label)]) + label.encode() for label in NAME.split("."))
    + b"\x00\x00\x01\x00\x01"
)
# TEST-NET-1 (RFC 5737) and the documentation prefix (RFC 3849): no host answers there, so only our own system decides
# what happens. One of each family, since a network may have either alone.
NOWHERE: tuple[Address, ...] = (("192.0.2.1", 9), ("2001:db8:ffff::9", 9))
WAIT_SECONDS = 0.5
DNS_WAIT_SECONDS = 2.0
_RESOLVER = "the C library's resolver"
_RESOLVER_FILE = "/etc/resolv.conf"
_NAME_SERVERS_MAX = 3  # glibc asks no more (resolv.conf(5))
_PTRACE_SEIZE = 0x4206
_AF_VSOCK = 40
Result = dict[str, Any]
_REFUSED, _ESCAPED, _SILENT, _UNTRIED = "refused", "escaped", "silent", "untried"


# What only our own system says; any other error came from further away, unless it already found no route.
_OWN_REFUSALS = frozenset({errno.EPERM, errno.EACCES, errno.EAFNOSUPPORT, errno.EPROTONOSUPPORT, errno.ENOSYS})


def run_probes(fields: Mapping[str, Any]) -> dict[str, Result]:
    """Try every way out.

    Args:
        fields: `key_paths` (list), `identity_folder` (default: the folders of the keys), `control_socket`,
            `guard_pid`; and [host, port] pairs besides the addresses where nobody is: `tcp`, `udp` (which answers a DNS
            question) of listeners that the guard knows to answer.

    Returns:
        {probe: {"outcome": refused | escaped | silent | untried, "errno": name or "", "tried": how many,
        "silent": [HOST:PORT that gave no answer]}}
    """
    keys = [str(path) for path in fields.get("key_paths", [])]
    folders = [str(fields["identity_folder"])] if fields.get("identity_folder") else sorted({_parent(k) for k in keys})
    control = [str(fields["control_socket"])] if fields.get("control_socket") else []
    guard = [int(fields["guard_pid"])] if fields.get("guard_pid") else []
    listening, answering = ([_address(each) for each in fields.get(name, [])] for name in ("tcp", "udp"))
    return {
        "tcp_connect": _first_escape(_connect, [*NOWHERE, *listening]),
        "udp_send": _first_escape(_send, [*NOWHERE, *answering]),
        "dns_lookup": _first_escape(
            _look_up, [*dict.fromkeys([_RESOLVER, *_own_name_servers()[:_NAME_SERVERS_MAX], *answering])]
        ),
        "vsock": _first_escape(_make_vsock, [None]),
        "enter_namespaces": _first_escape(_enter, [1, *guard]),
        "ptrace": _first_escape(_trace, guard),
        "memory": _first_escape(lambda pid: _open(f"/proc/{pid}/mem"), guard),
        "signal": _first_escape(lambda pid: os.kill(pid, 0), guard),
        "key_files": _first_escape(_open, keys),
        "identity_folder": _first_escape(os.listdir, folders),
        "control_socket": _first_escape(_reach, control),
        **_rollout_sockets([str(path) for path in fields.get("rollout_sockets", [])]),
    }


def _rollout_sockets(paths: Sequence[str]) -> dict[str, Result]:
    """`allowed`: each of them was reached; `unreached`: one was not. Nothing where the guard named none."""
    result: Result = {"outcome": "allowed", "errno": "", "tried": len(paths), "silent": []}
    for path in paths:
        try:
            _reach(path)
        except (OSError, _Answered) as error:
            result |= {"outcome": "unreached", "errno": _name(error) if isinstance(error, OSError) else str(error)}
    return {"rollout_sockets": result} if paths else {}


class _Answered(Exception):
    """The attempt failed, but something outside the sandbox answered."""


def _first_escape(attempt: Callable[[Any], object], targets: Sequence[Any]) -> Result:
    """The worst outcome over the targets; the errno is that of the last refusal."""
    result: Result = {"outcome": _UNTRIED, "errno": "", "tried": len(targets), "silent": []}
    for target in targets:
        try:
            attempt(target)
        except _Answered as answer:
            return result | {"outcome": _ESCAPED, "errno": str(answer)}
        except TimeoutError:
            result["silent"].append(address_text(target) if isinstance(target, tuple) else str(target))
            result |= {"outcome": _SILENT, "errno": "ETIMEDOUT"}
        except OSError as error:
            if result["outcome"] != _SILENT:
                result |= {"outcome": _REFUSED, "errno": _name(error)}
        else:
            return result | {"outcome": _ESCAPED, "errno": ""}
    return result


def _name(error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return {number: name for name, number in vars(socket).items() if name.startswith("EAI_")}.get(
            error.errno or 0, "EAI"
        )
    return errno.errorcode.get(error.errno or 0, "?")


def _parent(path: str) -> str:
    return str(Path(path).parent)


def _address(value: Sequence[Any]) -> Address:
    return str(value[0]), int(value[1])


# ---- network -----------------------------------------------------------------------------------------


def _judge(error: OSError, host: str, routed: bool) -> None:
    """Pass on silence, and a refusal by our own system; anything else on the way to another host is an answer."""
    here = host.startswith("127.") or host == "::1" or not routed
    if isinstance(error, TimeoutError) or error.errno in _OWN_REFUSALS or here:
        raise error
    raise _Answered(_name(error))


def _is_routed(address: Address) -> bool:
    """Return whether our own system knows a way: connecting a datagram socket looks it up and sends nothing.

    A router's "unreachable" carries the same error number as no route, and would pass for one.
    """
    try:
        with socket.socket(_family(address[0]), socket.SOCK_DGRAM) as connection:
            connection.connect(address)
    except OSError:
        return False
    return True


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _connect(address: Address) -> None:
    routed = _is_routed(address)
    try:
        with socket.socket(_family(address[0]), socket.SOCK_STREAM) as connection:
            connection.settimeout(WAIT_SECONDS)
            connection.connect(address)
    except OSError as error:
        _judge(error, address[0], routed)


def _send(address: Address) -> None:
    routed = _is_routed(address)
    try:
        _ask_name_server(address)
    except OSError as error:
        _judge(error, address[0], routed)


def _ask_name_server(address: Address) -> None:
    """Send one question; any datagram that comes back is an answer. Raises OSError, TimeoutError among it."""
    with socket.socket(_family(address[0]), socket.SOCK_DGRAM) as connection:
        connection.settimeout(WAIT_SECONDS)
        connection.connect(address)
        connection.send(QUESTION)
        connection.recv(512)


def _own_name_servers() -> list[Address]:
    """Return those that resolv.conf(5) names, as far as it can be read."""
    try:
        return name_servers(Path(_RESOLVER_FILE).read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return []


def _look_up(name_server: Address | str) -> None:
    """Look a name up by the C library, in a process that can be abandoned; or by one question to a given server."""
    if isinstance(name_server, str):
        _in_child(_resolve)
    else:
        _send(name_server)


def _resolve() -> int:
    signal.setitimer(signal.ITIMER_REAL, DNS_WAIT_SECONDS)  # its default action ends this child: no answer came
    try:
        socket.getaddrinfo(NAME, 443)
    except socket.gaierror as error:
        # NONAME is what a name server says; the others say that none could be asked
        return 0 if error.errno == socket.EAI_NONAME else errno.ENETUNREACH
    return 0


def _make_vsock(_: object) -> None:
    """A socket to the hypervisor: network namespaces do not cover that family, so it must not be made at all."""
    socket.socket(_AF_VSOCK, socket.SOCK_STREAM).close()


# ---- processes ---------------------------------------------------------------------------------------


def _in_child(attempt: Callable[[], int]) -> None:
    """Run it in a forked child, so that a success changes nothing here. Raises OSError with the number it returns."""
    child = os.fork()
    if not child:
        number = errno.EIO
        try:
            number = attempt()
        except OSError as error:
            number = error.errno or errno.EIO
        finally:
            os._exit(number)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status:
        ended = errno.ETIMEDOUT if status == -signal.SIGALRM else errno.EPERM  # else the system ended it for trying
        number = status if status > 0 else ended
        raise OSError(number, os.strerror(number))


def _enter(pid: int) -> None:
    def attempt() -> int:
        libc = ctypes.CDLL(None, use_errno=True)
        number = errno.ENOENT
        for kind in ("net", "mnt", "user", "pid"):
            try:
                handle = os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY)
            except OSError as error:
                number = error.errno or errno.EIO
                continue
            if libc.setns(handle, 0) == 0:
                return 0
            number = ctypes.get_errno()
        return number

    _in_child(attempt)


def _trace(pid: int) -> None:
    def attempt() -> int:
        libc = ctypes.CDLL(None, use_errno=True)
        # SEIZE does not stop the traced process; it is let go when this child ends
        traced = libc.ptrace(_PTRACE_SEIZE, pid, None, None)
        return 0 if traced == 0 else ctypes.get_errno()

    _in_child(attempt)


# ---- files and sockets -------------------------------------------------------------------------------


def _open(path: str) -> None:
    os.close(os.open(path, os.O_RDONLY | os.O_CLOEXEC))


def _reach(path: str) -> None:
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(WAIT_SECONDS)
            connection.connect(path)
    except OSError as error:
        if error.errno in (errno.ECONNREFUSED, errno.EAGAIN):
            raise _Answered(_name(error)) from error  # the path was reached; only the listener was not
        raise


# ---- addresses ---------------------------------------------------------------------------------------


def name_servers(text: str) -> list[Address]:
    """Return those that a resolv.conf(5) names, without those of one interface only (`fe80::1%eth0`)."""
    lines = map(str.split, text.splitlines())
    return [
        (words[1], NAME_SERVER_PORT)
        for words in lines
        if len(words) > 1 and words[0] == "nameserver" and "%" not in words[1]
    ]


def address_text(address: Address) -> str:
    """HOST:PORT, or [HOST]:PORT for IPv6."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def family_of(text: str) -> str | None:
    """IPV4 or IPV6 of what `address_text` wrote; None for any other text."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal():
        return None
    return IPV6 if host.startswith("[") else IPV4


if __name__ == "__main__":
    json.dump(run_probes(json.load(sys.stdin)), sys.stdout)
