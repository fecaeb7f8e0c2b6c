"""T10, B1: from inside the trainer's sandbox every way out is refused; outside the same attempt succeeds. Which
system calls its filter closes is told by an interpreter of BPF, written from the classic instruction set, in the C
headers' numbers.
"""

from __future__ import annotations

import errno
import json
import os
import pwd
import re
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedsilo.protocol.errors import UsageError
from fedsilo.protocol.isolation import isolates_at_least
from fedsilo.sandbox import filters
from fedsilo.sandbox.filters import trainer_filter
from silo.guard.trainer_process import probing, sandbox
from silo.link import LinkMessage, Listener, dial
from tests.security.sandbox_harness import PROBES_FILE, Site, probe, probing_program, reachable_site, run_inside

REPOSITORY = Path(__file__).parents[2]
BUILT_HERE = ("namespaces", "user")
PROBES = {
    "tcp_connect", "udp_send", "dns_lookup", "vsock", "enter_namespaces", "ptrace", "memory", "signal", "key_files",
    "identity_folder", "control_socket",
}  # fmt: skip
# What a process can read of its own sandbox, as a program that runs inside.
SURROUNDINGS = """
import json, os, socket
def surroundings():
    status = dict(line.strip().split(":", 1) for line in open("/proc/self/status") if ":" in line)
    try:
        interfaces = [name for _, name in socket.if_nameindex()]
    except OSError:  # behind a system-call filter the question itself is refused
        interfaces = []
    return {"user_id": os.getuid(), "capabilities": status["CapEff"], "interfaces": interfaces,
            "no_new_privileges": status["NoNewPrivs"].strip() == "1",
            "system_call_filter": status["Seccomp"].strip() == "2"}
"""
# Succeed outside on any machine. Left out: what needs root (setns), a permissive yama (ptrace), a kernel with vsock.
OPEN_OUTSIDE = PROBES - {"vsock", "enter_namespaces", "ptrace", "memory"}


@pytest.fixture(scope="module", params=BUILT_HERE)
def level(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if reason := probing.sandbox_trial(name):
        pytest.skip(f"this machine cannot build it: {reason}")
    return name


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    # below /tmp, which is private inside; short, since a unix socket's path is
    with tempfile.TemporaryDirectory(prefix="sandbox-") as folder, reachable_site(Path(folder)) as built:
        yield built


def test_T10_every_probe_is_refused_inside(level: str, site: Site) -> None:
    results = probe(level, site)
    assert set(results) == PROBES
    assert {name: each["outcome"] for name, each in results.items()} == dict.fromkeys(PROBES, "refused")
    assert probing.proven_level(level, results) == level


def test_T10_the_same_probes_succeed_outside(site: Site) -> None:
    results = probe("waived", site)
    assert set(probing.escaped(results)) >= OPEN_OUTSIDE
    if os.geteuid() == 0:
        assert results["enter_namespaces"]["outcome"] == "escaped"
    # a sandbox that is claimed but not there is named for what it is
    assert probing.proven_level("namespaces", results) == "waived"


def test_T10_a_probe_that_was_not_tried_proves_nothing() -> None:
    refused = {name: {"outcome": "refused", "errno": "EPERM"} for name in PROBES}
    assert probing.proven_level("user", refused) == "user"
    assert probing.proven_level("user", refused | {"key_files": {"outcome": "untried"}}) == "waived"
    assert probing.proven_level("user", {}) == "waived"


@pytest.fixture(scope="module")
def seen_by_an_ordinary_user() -> dict[str, Any]:
    """What each isolation level holds when its guard is an ordinary user: {level: results, or why not}."""
    if os.geteuid() != 0 or not Path("/usr/bin/python3").exists():
        pytest.skip("needs root to become a user, and the system's Python, which that user can run")
    with tempfile.TemporaryDirectory(prefix="sandbox-") as folder:
        for name in ("fedsilo/protocol", "fedsilo/sandbox", "silo/guard/trainer_process", "tests/security"):
            ignored = shutil.ignore_patterns("__pycache__", "wire")
            shutil.copytree(REPOSITORY / name, Path(folder, "code", name), ignore=ignored)
            for package in ("", *(str(each) for each in Path(name).parents)):
                Path(folder, "code", package, "__init__.py").touch()
        for name in ("link.py", "reusable_buffer.py"):
            shutil.copy(REPOSITORY / "silo" / name, Path(folder, "code", "silo", name))
        Path(folder).chmod(0o755)
        work = Path(folder, "work")
        work.mkdir()
        os.chown(work, 65534, 65534)
        answer = subprocess.run(
            ["/usr/bin/python3", "-P", "-m", "tests.security.sandbox_harness", str(work / "site")],
            env={"PYTHONPATH": f"{folder}/code", "TMPDIR": str(work), "PYTHONDONTWRITEBYTECODE": "1"},
            cwd=folder, user=65534, group=65534, extra_groups=[], capture_output=True, text=True, timeout=60,
            check=False,
        )  # fmt: skip
        assert answer.returncode == 0, answer.stderr
    report: dict[str, Any] = json.loads(answer.stdout)
    assert report["uid"] == 65534
    return report


@pytest.mark.parametrize("built", BUILT_HERE)
def test_T10_an_ordinary_user_builds_the_same_sandboxes(built: str, seen_by_an_ordinary_user: dict[str, Any]) -> None:
    results = seen_by_an_ordinary_user[built]
    if isinstance(results, str):
        pytest.skip(f"this machine does not let ordinary users build it: {results}")
    assert {name: each["outcome"] for name, each in results.items()} == dict.fromkeys(PROBES, "refused")
    assert set(probing.escaped(seen_by_an_ordinary_user["waived"])) >= OPEN_OUTSIDE


@pytest.mark.skipif(os.geteuid() != 0 or not Path("/usr/bin/python3").exists(), reason="needs root to become a user")
def test_T10_a_root_guard_gives_the_trainer_another_user(site: Site) -> None:
    if reason := probing.sandbox_trial("user"):
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(prefix="sandbox-") as folder:
        Path(folder).chmod(0o755)
        shutil.copy(PROBES_FILE, folder)
        mine = Path(folder, "mine")
        mine.write_text("readable only for root")
        mine.chmod(0o600)
        program = (
            f"{probing_program(Path(folder, PROBES_FILE.name))}\n"
            f"{SURROUNDINGS}\n"
            "try: open(sys.argv[1])\n"
            "except PermissionError: print('\\n' + json.dumps(surroundings()))\n"
        )
        process = sandbox.launch_in_sandbox(
            ["/usr/bin/python3", "-c", program, str(mine)],
            level="user", user="nobody", readable=[Path(folder)], env={}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        output, _ = process.communicate(json.dumps(site.fields).encode(), 30)
    results, seen = map(json.loads, output.splitlines())
    assert seen["user_id"] == pwd.getpwnam("nobody").pw_uid
    assert int(seen["capabilities"], 16) == 0
    assert probing.proven_level("user", results) == "user"


def test_T10_the_link_to_the_guard_crosses_the_sandbox(level: str) -> None:
    trainer = (
        "import sys; from silo.link import LinkMessage, dial\n"
        "link = dial(sys.argv[1]); asked = link.receive()\n"
        "link.send(LinkMessage('probed', {'results': asked.fields}, asked.body * 2)); link.receive()"
    )
    with tempfile.TemporaryDirectory(prefix="sandbox-") as folder:
        address = f"unix:{folder}/trainer.sock"
        listener = Listener(address, user_ids=frozenset({os.getuid()}))
        process = sandbox.launch_in_sandbox(
            [sys.executable, "-c", trainer, address], level=level, socket_dir=Path(folder), env={}
        )
        link = listener.accept(30)
        link.send(LinkMessage("probe", {"n": 7}, b"body"))
        heard = link.receive()
        assert (heard.type, heard.fields, heard.body) == ("probed", {"results": {"n": 7}}, b"bodybody")
        link.send(LinkMessage("stop"))
        assert process.wait(30) == 0
        listener.close()


def test_dial_takes_a_connected_descriptor() -> None:
    here, there = socket.socketpair()
    with here:
        link = dial(f"fd:{there.detach()}")
        link.send(LinkMessage("ready"))
        assert here.recv(100).endswith(b'{"type": "ready"}')
        link.close()


@pytest.mark.parametrize("below", ["/tmp", str(Path.home())])  # noqa: S108
def test_T10_given_paths_are_there_with_given_rights_and_others_are_not(level: str, below: str) -> None:
    with tempfile.TemporaryDirectory(prefix="sandbox-", dir=below) as name:
        folder = Path(name)
        for place in ("model", "blobs", "scratch", "other", "elsewhere"):
            (folder / place).mkdir()
        (folder / "blobs" / "weights").write_text("weights")
        (folder / "model" / "weights").symlink_to("../blobs/weights")  # as in a model cache
        (folder / "elsewhere" / "train.jsonl").write_text("rows")
        (folder / "data").symlink_to("elsewhere")  # a link on the way
        (folder / "other" / "secret").write_text("secret")
        (folder / "scratch" / "trap").symlink_to(folder / "other" / "secret")
        program = (
            "import sys; from pathlib import Path; folder = Path(sys.argv[1])\n"
            "print((folder / 'model/weights').read_text(), (folder / 'data/train.jsonl').read_text())\n"
            "(folder / 'scratch/made').write_text('made')\n"
            "try: (folder / 'new').write_text('lands nowhere or in the private /tmp')\n"
            "except OSError: pass\n"
            "for refused in (lambda: (folder / 'model/new').write_text(''),\n"
            "                lambda: (folder / 'other/secret').read_text(),\n"
            "                lambda: (folder / 'data/train.jsonl').write_text(''),\n"
            "                lambda: (folder / 'scratch/trap').read_text(),\n"
            "                lambda: Path('/proc/sys/kernel/core_pattern').open('r+').close()):\n"
            "    try: refused()\n"
            "    except OSError as error: print('refused')\n"
            "    else: print('allowed')\n"
        )
        output = run_inside(
            level, "-c", program, name,
            readable=[folder / "model", folder / "data" / "train.jsonl"], writable=[folder / "scratch"],
        ).splitlines()  # fmt: skip
        assert output == ["weights rows", *["refused"] * 5]
        assert (folder / "scratch" / "made").read_text() == "made"
        assert not (folder / "new").exists()
        assert (folder / "elsewhere" / "train.jsonl").read_text() == "rows"


def test_T10_no_capability_no_descriptor_no_privilege(level: str, tmp_path: Path) -> None:
    program = (
        f"{SURROUNDINGS}\nprint(json.dumps([surroundings(), len(os.listdir('/proc/self/fd')), sorted(os.environ)]))"
    )
    with (tmp_path / "held").open("w") as held:
        os.set_inheritable(held.fileno(), True)
        seen, descriptors, environment = json.loads(run_inside(level, "-c", program, env={"GIVEN": "1"}))
    assert int(seen["capabilities"], 16) == 0
    assert seen["no_new_privileges"] and seen["system_call_filter"]
    assert set(seen["interfaces"]) <= {"lo"}
    assert descriptors == 4  # input, output, errors, and the listing itself
    assert set(environment) - {"LC_CTYPE"} == {"GIVEN", "PYTHONNOUSERSITE", "PYTHONSAFEPATH"}


@pytest.mark.skipif(not Path("/dev/tty").exists(), reason="needs a device that the sandbox does not show by itself")
def test_devices_of_an_accelerator_are_passed_in(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = "import os, stat; print(os.path.exists('/dev/tty') and stat.S_ISCHR(os.stat('/dev/tty').st_mode))"
    hidden = "True" if level == "user" else "False"  # Landlock hides no names
    monkeypatch.setattr(sandbox, "_ACCELERATORS", ("/dev/tt[y]",))
    assert run_inside(level, "-c", program).strip() == "True"
    assert run_inside(level, "-c", program, accelerators=False).strip() == hidden


def test_T10_a_child_of_the_trainer_works_inside_and_ends_with_it(level: str) -> None:
    program = (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'print(input()); input()'], stdin=subprocess.PIPE,"
        " stdout=subprocess.PIPE, text=True)\n"
        "child.stdin.write('seen\\n'); child.stdin.flush(); print(child.stdout.readline(), end='', flush=True); input()"
    )
    process = sandbox.launch_in_sandbox(
        [sys.executable, "-c", program], level=level, env={}, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"seen\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 128 + signal.SIGTERM
    process.stdout.close()


@pytest.mark.parametrize("level", [*BUILT_HERE, "waived"])
def test_the_trainer_dies_when_its_guard_is_killed(level: str) -> None:
    if level != "waived" and (reason := probing.sandbox_trial(level)):
        pytest.skip(reason)
    # The trainer holds the write end of this pipe, by its output, as nobody else does once the guard is gone.
    guard = (
        "import sys; from silo.guard.trainer_process import sandbox\n"
        "program = 'print(\"up\", flush=True); import threading; threading.Event().wait()'\n"
        f"process = sandbox.launch_in_sandbox([sys.executable, '-c', program], level={level!r}, env={{}})\n"
        "sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", guard], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        process.kill()
        assert process.stdout.read() == b""  # returns only when the last holder is gone


def test_T10_no_file_of_another_folder_builds_the_sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("kernel.py", "ctypes.py"):
        (tmp_path / name).write_text("raise SystemExit('planted')\n")
    monkeypatch.chdir(tmp_path)
    assert run_inside("waived", "-c", "print('ran')", env={"PYTHONPATH": str(tmp_path)}) == "ran\n"


def test_T31_X11_paths_that_would_show_a_key_are_refused(tmp_path: Path) -> None:
    key = tmp_path / "id" / "site.key"
    key.parent.mkdir()
    key.touch(0o600)
    with pytest.raises(UsageError, match="would show"):
        sandbox.launch_in_sandbox([sys.executable], level="namespaces", readable=[tmp_path], env={}, never=[key])
    with pytest.raises(UsageError, match="whole machine"):
        sandbox.launch_in_sandbox([sys.executable], level="user", readable=[Path("/")], env={})


def test_errors_name_what_is_missing(level: str, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="absent"):
        sandbox.launch_in_sandbox([sys.executable], level=level, readable=[tmp_path / "absent"], env={})
    program = tmp_path / "program"
    program.write_text("not a program")
    program.chmod(0o755)
    sandbox._program_paths.cache_clear()
    with pytest.raises(sandbox.IsolationError):
        sandbox.launch_in_sandbox([str(program)], level=level, env={})
    with pytest.raises(ValueError, match="not built here"):
        sandbox.launch_in_sandbox([sys.executable], level="container", env={})


def test_the_ladder_is_ordered() -> None:
    ladder = ["waived", "container", "user", "namespaces"]
    for got_place, got in enumerate(ladder):
        for least_place, least in enumerate(ladder):
            assert isolates_at_least(got, least) == (got_place >= least_place)
    assert not isolates_at_least("moat", "waived")
    with pytest.raises(ValueError, match="unknown isolation level"):
        isolates_at_least("user", "moat")


def test_best_level_is_the_first_whose_trial_holds() -> None:
    held = [level for level in BUILT_HERE if not probing.sandbox_trial(level)]
    assert probing.best_level() == (held[0] if held else "waived")


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize("network", [True, False])
def test_every_path_of_the_filter_ends_in_a_return(machine: str, network: bool) -> None:
    """Walk each step as the kernel's checker does (bpf_check_classic): jumps stay inside, the last step returns."""
    program = trainer_filter(network_by_namespace=network, machine=machine)
    steps = [program[at : at + 8] for at in range(0, len(program), 8)]
    assert len(steps) < 4096 and steps[-1][0] == 0x06
    for place, step in enumerate(steps):
        if step[0] in (0x15, 0x35, 0x45):
            assert max(step[2], step[3]) + place + 1 < len(steps)


def test_filter_of_an_unknown_machine_is_refused() -> None:
    with pytest.raises(ValueError, match="riscv64"):
        trainer_filter(network_by_namespace=True, machine="riscv64")


def test_file_rules_follow_the_version(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert [len(filters.ruleset(version)) for version in (1, 3, 4, 5, 6, 7)] == [8, 8, 16, 16, 24, 24]
    allowed = (filters.READ_AND_EXECUTE, [tmp_path]), (filters.every_access(7), [tmp_path / "file"])
    rules = dict(filters.rules(7, *allowed))
    # read, list and execute a folder; and for a file nothing that only fits folders (make, remove: bits 4 to 12)
    assert rules[str(tmp_path)] == 1 | 4 | 8
    assert rules[str(tmp_path / "file")] & 0b1111111111000 == 0


def test_probe_program_needs_the_standard_library_only() -> None:
    with tempfile.TemporaryDirectory() as folder:
        answer = subprocess.run(
            [sys.executable, "-I", "-S", "-c", probing_program()], input="{}", capture_output=True, text=True,
            cwd=folder, timeout=60, check=True,
        )  # fmt: skip
    assert set(json.loads(answer.stdout)) == PROBES


HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}
ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # AUDIT_ARCH_*, linux/audit.h
CLOSED = [
    "ptrace",
    "process_vm_readv",
    "process_vm_writev",
    "pidfd_getfd",
    "process_madvise",
    "kcmp",
    "mount",
    "umount2",
    "pivot_root",
    "chroot",
    "setns",
    "unshare",
    "open_tree",
    "move_mount",
    "fsopen",
    "fsconfig",
    "fsmount",
    "fspick",
    "mount_setattr",
    "open_by_handle_at",
    "fanotify_init",
    "quotactl",
    "quotactl_fd",
    "swapon",
    "swapoff",
    "acct",
    "bpf",
    "perf_event_open",
    "userfaultfd",
    "io_uring_setup",
    "io_uring_enter",
    "io_uring_register",
    "add_key",
    "request_key",
    "keyctl",
    "kexec_load",
    "kexec_file_load",
    "init_module",
    "finit_module",
    "delete_module",
    "reboot",
    "sethostname",
    "setdomainname",
    "syslog",
    "settimeofday",
    "clock_settime",
    "clock_adjtime",
    "adjtimex",
]
CLOSED_X86 = ["iopl", "ioperm"]
NEWER = {"open_tree_attr": 467}  # of Linux 6.15, which the headers of a machine may not have yet
OPEN = [
    "read",
    "write",
    "openat",
    "close",
    "mmap",
    "mprotect",
    "futex",
    "clone",
    "execve",
    "exit_group",
    "getpid",
    "socketpair",
    "recvmsg",
    "sendmsg",
]
ALLOW = 0x7FFF0000
X32 = 0x40000000


def numbers(machine: str) -> dict[str, int]:
    header = HEADERS[machine]
    if not header.exists():
        pytest.skip(f"{header} is missing: install linux-libc-dev")
    found = re.findall(r"^#define __NR(?:3264)?_(\w+)\s+(\d+)", header.read_text(), flags=re.MULTILINE)
    return {name: int(number) for name, number in found} | NEWER


def verdict(program: bytes, machine: str, call: int, *arguments: int, architecture: int | None = None) -> int:
    """What the kernel returns for a call: `ALLOW`, or minus the error number."""
    data = struct.pack("=iIQ6Q", call & 0xFFFFFFFF if call < 2**31 else call - 2**32,
                       ARCHITECTURE[machine] if architecture is None else architecture, 0,
                       *(*arguments, 0, 0, 0, 0, 0, 0)[:6])  # fmt: skip
    accumulator, place = 0, 0
    while True:
        code, if_true, if_false, value = struct.unpack_from("=HBBI", program, 8 * place)
        place += 1
        if code == 0x06:
            return ALLOW if value == ALLOW else -(value & 0xFFFF)
        if code == 0x20:
            (accumulator,) = struct.unpack_from("=I", data, value)
        elif code == 0x54:
            accumulator &= value
        else:
            holds = {0x15: accumulator == value, 0x35: accumulator >= value, 0x45: bool(accumulator & value)}[code]
            place += if_true if holds else if_false


machines = pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
networks = pytest.mark.parametrize("network", [True, False], ids=["namespaces", "user"])


@machines
@networks
def test_T10_each_closed_call_is_refused_and_ordinary_ones_are_not(machine: str, network: bool) -> None:
    program, number = trainer_filter(network_by_namespace=network, machine=machine), numbers(machine)
    closed = [*CLOSED, *NEWER, *(CLOSED_X86 if machine == "x86_64" else [])]
    if not network:
        closed += ["socket", "connect", "bind", "listen"]
    assert {name: verdict(program, machine, number[name]) for name in closed} == dict.fromkeys(closed, -errno.EPERM)
    names = [name for name in OPEN if name != "socketpair"]
    assert {name: verdict(program, machine, number[name]) for name in names} == dict.fromkeys(names, ALLOW)


@machines
@networks
def test_T10_what_is_closed_is_what_this_list_says(machine: str, network: bool) -> None:
    """The counterpart of the list: each call that is refused whatever its arguments are is named above."""
    program, number = trainer_filter(network_by_namespace=network, machine=machine), numbers(machine)
    refused = {name for name, call in number.items() if verdict(program, machine, call, 1, 1, 1) == -errno.EPERM}
    refused -= set() if network else {"socket", "connect", "bind", "listen"}
    assert refused - {"socketpair"} <= {*CLOSED, *CLOSED_X86, *NEWER}


@machines
def test_T10_calls_in_another_numbering_are_refused(machine: str) -> None:
    program, number = trainer_filter(network_by_namespace=True, machine=machine), numbers(machine)
    for call in number.values():
        assert verdict(program, machine, call, architecture=0x40000003) == -errno.EPERM  # AUDIT_ARCH_I386
        if machine == "x86_64":
            assert verdict(program, machine, call | X32) == -errno.ENOSYS


@machines
def test_T10_arguments_decide_where_a_call_is_needed_in_part(machine: str) -> None:
    number = numbers(machine)
    sandboxed, bare = (trainer_filter(network_by_namespace=each, machine=machine) for each in (True, False))
    thread, namespaces = 0x3D0F00, (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000)
    assert verdict(sandboxed, machine, number["clone"], thread) == ALLOW
    for flag in namespaces:
        assert verdict(sandboxed, machine, number["clone"], thread | flag) == -errno.EPERM
    assert verdict(sandboxed, machine, number["clone3"], 1, 88) == -errno.ENOSYS
    for request, expected in ((0x5412, -errno.EPERM), (0x541C, -errno.EPERM), (0x5413, ALLOW)):
        assert verdict(sandboxed, machine, number["ioctl"], 0, request) == expected
    families = {family: verdict(sandboxed, machine, number["socket"], family, 1) for family in range(46)}
    assert {family for family, result in families.items() if result == ALLOW} == {1, 2, 10, 16}
    kinds = {kind: verdict(bare, machine, number["socketpair"], 1, kind) for kind in (1, 1 | 0o2000000, 2, 5)}
    assert kinds == {1: ALLOW, 1 | 0o2000000: ALLOW, 2: -errno.EPERM, 5: -errno.EPERM}
    assert verdict(bare, machine, number["socketpair"], 2, 1) == -errno.EPERM


@pytest.mark.parametrize("level", ["namespaces", "user", "waived"])
def test_T10_a_trainer_leaves_no_core_dump(level: str) -> None:
    if level != "waived" and (reason := probing.sandbox_trial(level)):
        pytest.skip(f"this machine cannot build it: {reason}")
    before = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (before[1], before[1]))
    try:
        inside = run_inside(level, "-c", "import resource; print(resource.getrlimit(resource.RLIMIT_CORE))")
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, before)
    assert inside.strip() == "(0, 0)"
    assert before[1] != 0, "this machine allows no core dump to anybody: the test shows nothing"


@pytest.mark.parametrize("level", ["namespaces", "user"])
def test_T10_the_kernel_refuses_io_uring_inside(level: str) -> None:
    if reason := probing.sandbox_trial(level):
        pytest.skip(f"this machine cannot build it: {reason}")
    program = (
        "import ctypes, errno; call = ctypes.CDLL(None, use_errno=True).syscall\n"
        "print([(call(n, 0, 0), errno.errorcode[ctypes.get_errno()])[1] for n in (425, 426, 427)])"
    )
    assert run_inside(level, "-c", program).strip() == str(["EPERM"] * 3)
