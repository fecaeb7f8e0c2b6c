"""The one way that is opened for a trainer whose rollouts come from a server: that path, and no other (T10)."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedsilo.sandbox.probes import run_probes
from silo.guard.trainer_process import probing, sandbox

HOOK = (
    "import sys, socket\n"
    "from pathlib import Path\n"
    "from silo.trainer.worker import Refusals\n"
    "from silo.unix_http import ServerGone, ask\n"
    "fences = Refusals()\n"
    "if sys.argv[1]: fences.allow(Path(sys.argv[1]))\n"
    "fences.install()\n"
    "allowed, other = sys.argv[2:4]\n"
)


@pytest.fixture
def sockets(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """Two that listen, in folders of their own: the server's, and some other."""
    found = []
    with socket.socket(socket.AF_UNIX) as first, socket.socket(socket.AF_UNIX) as second:
        for name, each in (("server", first), ("other", second)):
            path = tmp_path / name / "it.sock"
            path.parent.mkdir()
            each.bind(str(path))
            each.listen()
            found.append(path)
        yield found[0], found[1]


def behind_the_hook(sockets: tuple[Path, Path], attempt: str, *, allow: bool = True) -> str:
    code = HOOK + f"try:\n    {attempt}\n    print('done')\nexcept PermissionError as error: print(error)\n"
    arguments = [str(sockets[0]) if allow else "", *map(str, sockets)]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


CONNECT = "socket.socket(socket.AF_UNIX, socket.SOCK_STREAM).connect({})"
REFUSED = {
    "another path": (CONNECT.format("other"), "socket.connect"),
    "its own folder, another name": (CONNECT.format("allowed + '2'"), "socket.connect"),
    "the same file by another path": (CONNECT.format("allowed.replace('/it', '/../server/it')"), "socket.connect"),
    "an abstract name": (CONNECT.format("'\\0' + allowed"), "socket.connect"),
    "a datagram socket": ("socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)", "socket.__new__"),
    "the internet": ("socket.socket(socket.AF_INET, socket.SOCK_STREAM)", "socket.__new__"),
    "a listener": ("socket.socket(socket.AF_UNIX, socket.SOCK_STREAM).bind(other + '2')", "socket.bind"),
    "a name": ("socket.getaddrinfo('example.org', 80)", "socket.getaddrinfo"),
    "a program": ("import subprocess; subprocess.run(['true'])", "subprocess.Popen"),
}


@pytest.mark.quick(keep=3)
@pytest.mark.parametrize(("attempt", "event"), REFUSED.values(), ids=REFUSED)
def test_T10_the_hook_refuses_all_but_the_servers_socket(sockets: tuple[Path, Path], attempt: str, event: str) -> None:
    assert behind_the_hook(sockets, attempt) == f"the trainer may not do this: {event}"


@pytest.mark.slow
def test_the_servers_socket_may_be_connected_to_where_it_was_named_and_else_not(sockets: tuple[Path, Path]) -> None:
    attempt = CONNECT.format("allowed")
    assert behind_the_hook(sockets, attempt) == "done"
    assert behind_the_hook(sockets, attempt, allow=False) == "the trainer may not do this: socket.__new__"


# ---- the probe ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_probe_says_whether_the_server_is_reached(sockets: tuple[Path, Path], tmp_path: Path) -> None:
    assert "rollout_sockets" not in run_probes({})
    reached = run_probes({"rollout_sockets": [str(each) for each in sockets]})["rollout_sockets"]
    assert (reached["outcome"], reached["tried"]) == ("allowed", 2)
    found = run_probes({"rollout_sockets": [str(sockets[0]), str(tmp_path / "absent")]})["rollout_sockets"]
    assert (found["outcome"], found["errno"]) == ("unreached", "ENOENT")


def test_an_allowed_way_is_no_escape_and_another_is() -> None:
    refused = {"outcome": "refused", "errno": "EPERM", "tried": 1}
    tried = ("tcp_connect", "udp_send", "dns_lookup", "enter_namespaces", "key_files", "control_socket")
    results: dict[str, Any] = dict.fromkeys(tried, refused)
    results["rollout_sockets"] = {"outcome": "allowed", "errno": "", "tried": 1}
    assert probing.proven_level("namespaces", results) == "namespaces"
    assert probing.escaped({**results, "control_socket": {"outcome": "allowed"}}) == ["control_socket"]


@pytest.mark.skipif(
    bool(probing.sandbox_trial("namespaces")), reason=f"no namespaces here: {probing.sandbox_trial('namespaces')}"
)
def test_T10_behind_namespaces_only_the_folder_that_is_shown_is_reached(sockets: tuple[Path, Path]) -> None:
    process = sandbox.launch_in_sandbox(
        [sys.executable, "-P", "-m", "fedsilo.sandbox.probes"],
        level="namespaces",
        readable=[sockets[0].parent],
        env={name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ},
        accelerators=False,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    fields = {"rollout_sockets": [str(sockets[0])], "control_socket": str(sockets[1])}
    answer, _ = process.communicate(json.dumps(fields).encode(), timeout=60)
    results = json.loads(answer)
    assert results["rollout_sockets"]["outcome"] == "allowed"
    assert (results["control_socket"]["outcome"], results["control_socket"]["errno"]) == ("refused", "ENOENT")
    assert results["tcp_connect"]["outcome"] == "refused"
