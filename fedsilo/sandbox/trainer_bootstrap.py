"""Runs between the guard and the trainer: builds the sandbox, then becomes the trainer. Executed as a script, by
`silo/guard/trainer_process/sandbox.py`, with `python -I -S`: standard library only, and nothing of the project.

    guard ─ leash ─▶ keeper ─ dies with ─▶ first process of the pid namespace ─▶ trainer       (namespaces)
    guard ─ leash ─▶ keeper ─ dies with ─▶ trainer                                             (user, waived)

The keeper stays outside, forwards SIGTERM, SIGINT and SIGHUP and returns the trainer's exit status (128 + n after
signal n). The leash is a pipe whose other end only the guard holds, so the keeper sees the guard die however it dies;
PR_SET_PDEATHSIG would do for the guard's main thread only. The keeper's own child does hang on PR_SET_PDEATHSIG.
What is wrong on the way is written to the status pipe as one line; an end of file there means: the trainer runs.
What it does not stop: what `silo/guard/trainer_process/sandbox.py` says of each isolation level; and a trainer that
kills the keeper where both are one user (`waived`, and `user` below Landlock version 6) only ends itself with it.
"""

from __future__ import annotations

import fcntl
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
from importlib.util import module_from_spec, spec_from_file_location
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from fedsilo.sandbox import kernel
else:
    # By its path beside this file: the search path stays the standard library's, and no other folder can supply it.
    _found = spec_from_file_location("kernel", os.path.join(os.path.dirname(__file__), "kernel.py"))  # noqa: PTH118, PTH120
    kernel = module_from_spec(_found)
    _found.loader.exec_module(kernel)

_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1

_OLD, _NEW = "/old", "/new"
_ETC = {
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
    "hosts": "127.0.0.1 localhost\n::1 localhost\n",
    "passwd": "trainer:x:{uid}:{gid}:trainer:/tmp:/usr/sbin/nologin\n",
    "group": "trainer:x:{gid}:\n",
}


# ---- namespaces --------------------------------------------------------------------------------------


def _raise_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        request = struct.pack("16sh14x", b"lo", 0)
        _, flags = struct.unpack_from("16sh", fcntl.ioctl(handle, _SIOCGIFFLAGS, request))
        fcntl.ioctl(handle, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags | _IFF_UP))


def _build_tree(spec: dict[str, Any]) -> None:
    """A root of its own with nothing in it but what `spec` lists; called in the new namespaces."""
    kernel.mount_privately()
    # After the first pivot the machine's tree is /old with nothing hidden, so paths below /tmp can be bound too.
    kernel.mount("tmpfs", "/tmp", "tmpfs", kernel.QUIET, "mode=0755")  # noqa: S108
    os.mkdir(f"/tmp{_OLD}")  # noqa: PTH102, S108
    os.mkdir(f"/tmp{_NEW}")  # noqa: PTH102, S108
    kernel.mount("tmpfs", f"/tmp{_NEW}", "tmpfs", kernel.QUIET, "mode=0755")  # noqa: S108
    kernel.pivot("/tmp", f"/tmp{_OLD}")  # noqa: S108
    os.chdir("/")
    for folder, mode in (("/tmp", "1777"), ("/dev", "0755"), ("/dev/shm", "1777")):  # noqa: S108
        os.mkdir(_NEW + folder)  # noqa: PTH102
        kernel.mount("tmpfs", _NEW + folder, "tmpfs", kernel.QUIET, f"mode={mode}")
    for folder in ("/proc", "/etc", "/var"):
        os.mkdir(_NEW + folder)  # noqa: PTH102
    os.symlink("/tmp", f"{_NEW}/var/tmp")  # noqa: PTH211, S108
    for name, number in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
        os.symlink(f"/proc/self/fd{number}", f"{_NEW}/dev/{name}")  # noqa: PTH211
    for name, text in _ETC.items():
        kernel.write(f"{_NEW}/etc/{name}", text.format(uid=os.geteuid(), gid=os.getegid()))
    for link, target in spec["links"]:
        os.makedirs(os.path.dirname(_NEW + link), exist_ok=True)  # noqa: PTH103, PTH120
        if not os.path.lexists(_NEW + link):
            os.symlink(target, _NEW + link)  # noqa: PTH211
    for path, mode in spec["binds"]:
        _bind(path, mode)
    # Read-only as a whole: without a capability, user 0 may still write what user 0 owns in /proc/sys.
    kernel.mount("proc", f"{_NEW}/proc", "proc", kernel.READ_ONLY | kernel.QUIET | kernel.NO_EXECUTION)
    kernel.unmount(_OLD, "the machine's tree")
    kernel.seal_root(_NEW, "the first root")


def _bind(path: str, mode: str) -> None:
    """Show one file or folder of the machine at its own path; mode is `read`, `write` or `device`."""
    source, target = _OLD + path, _NEW + path
    try:
        if os.path.isdir(source):  # noqa: PTH112
            os.makedirs(target, exist_ok=True)  # noqa: PTH103
        elif not os.path.exists(target):  # noqa: PTH110
            os.makedirs(os.path.dirname(target), exist_ok=True)  # noqa: PTH103, PTH120
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o600))
    except OSError as error:
        raise kernel.SandboxError(f"make room for {path}: {error.strerror}") from error
    flags = kernel.NO_SETUID | (0 if mode == "device" else kernel.NO_DEVICES)
    flags |= kernel.READ_ONLY if mode == "read" else 0
    kernel.bind(source, target, flags, recursive=True)


# ---- processes ---------------------------------------------------------------------------------------


def _dial(path: str) -> int:
    """Connect before sockets are refused; the number of the descriptor goes to the trainer instead of the path."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(path)
    except OSError as error:
        raise kernel.SandboxError(f"connect {path}: {error.strerror}") from error
    return connection.detach()


def _wait_and_forward(child: int, leash: int | None) -> int:
    """Wait for `child`, reaping others, passing signals on. Ends it when the leash breaks. Returns its exit code."""
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    os.set_blocking(wake_read, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda received, _: os.kill(child, received))
    poll = select.poll()
    poll.register(wake_read, select.POLLIN)
    if leash is not None:
        poll.register(leash, select.POLLIN)
    while True:
        # Reap before waiting: a child that ended before the handler stood sends no second signal.
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == child:
                code = os.waitstatus_to_exitcode(ended[1])
                return code if code >= 0 else 128 - code
        for descriptor, _ in poll.poll():
            if descriptor == wake_read:
                os.read(wake_read, 512)
            elif not os.read(descriptor, 1):
                os.kill(child, signal.SIGKILL)
                poll.unregister(descriptor)


def _let_go_of_output(nothing: int) -> None:
    """The trainer's output must end with the trainer, not with those who wait for it. nothing: /dev/null, open."""
    kernel.replace_output(nothing)
    os.close(nothing)


def _end_orphans() -> None:
    """Kill what the trainer left behind; its orphans became the keeper's children."""
    while True:
        try:
            with open(f"/proc/self/task/{os.getpid()}/children") as file:  # noqa: PTH123
                left = [int(each) for each in file.read().split()]
            for each in left:
                os.kill(each, signal.SIGKILL)
            os.waitpid(-1, 0)
        except (OSError, ValueError):
            return


def _execute(spec: dict[str, Any], argv: list[str], kept: list[int], status: int) -> NoReturn:
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    kernel.close_descriptors_except([*kept, status])
    # a core dump would hold the private data
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.chdir("/")
    try:
        os.execvpe(argv[0], argv, spec["env"])  # noqa: S606  # an argument list is the point
    except OSError as error:
        raise kernel.SandboxError(f"start {argv[0]}: {error.strerror}") from error


def _inside(spec: dict[str, Any], go: int, status: int) -> NoReturn:
    """Enter the sandbox as the keeper's child, then become the trainer."""
    kernel.die_with_parent("the keeper")
    if not os.read(go, 1):
        os._exit(1)  # the keeper died before that wish was known
    argv: list[str] = spec["argv"]
    kept: list[int] = []
    if spec["level"] == "namespaces":
        _raise_loopback()
        _build_tree(spec)
        kernel.drop_capabilities()
        kernel.filter_system_calls(bytes.fromhex(spec["seccomp"]))
        trainer = os.fork()
        if trainer:
            os.close(status)
            _let_go_of_output(os.open(os.devnull, os.O_RDWR))
            os._exit(_wait_and_forward(trainer, None))
    elif spec["level"] == "user":
        if spec["dial"]:
            kept = [_dial(spec["dial"])]
            os.set_inheritable(kept[0], True)
            argv = [f"fd:{kept[0]}" if each == f"unix:{spec['dial']}" else each for each in argv]
        # Rules name files that another user may not be able to open, so they come before the change of user.
        kernel.restrict_files(bytes.fromhex(spec["landlock"]), spec["rules"])
        if spec["user"]:
            uid, gid = spec["user"]
            os.setgroups([])
            os.setresgid(gid, gid, gid)
            os.setresuid(uid, uid, uid)
            kernel.die_with_parent("the keeper")  # a change of user clears it
        kernel.drop_capabilities()
        kernel.filter_system_calls(bytes.fromhex(spec["seccomp"]))
    _execute(spec, argv, kept, status)


def main() -> NoReturn:
    leash, status = int(sys.argv[1]), int(sys.argv[2])
    for descriptor in (leash, status):
        os.set_inheritable(descriptor, False)
    line = bytearray()
    while not line.endswith(b"\n"):
        part = os.read(leash, 65536)
        if not part:
            os._exit(1)
        line += part
    spec = json.loads(line)
    try:
        if spec["level"] == "namespaces":
            kernel.enter_namespaces("trainer")
        else:
            kernel.adopt_orphans()
        go_read, go_write = os.pipe()
        # Opened now: the child soon changes the root of all that share its mounts, and for a moment it has no /dev.
        nothing = os.open(os.devnull, os.O_RDWR)
        child = os.fork()
        if not child:
            os.close(leash)
            os.close(go_write)
            _inside(spec, go_read, status)
        os.close(go_read)
        os.close(status)
        os.write(go_write, b"1")
        _let_go_of_output(nothing)
        code = _wait_and_forward(child, leash)
        _end_orphans()
        os._exit(code)
    except (kernel.SandboxError, OSError) as error:
        os.write(status, str(error).encode()[:4000])
        os._exit(126)


if __name__ == "__main__":
    main()
