"""Runs between the guard and the trainer: builds the walls, then becomes the trainer. Executed as a script, by
`silo/guard/trainer_process/sandbox.py`, with `python -I -S`: standard library only, and nothing of the project.

    guard ─ leash ─▶ keeper ─ dies with ─▶ first process of the pid namespace ─▶ trainer       (rung namespaces)
    guard ─ leash ─▶ keeper ─ dies with ─▶ trainer                                             (rungs user, waived)

The keeper stays outside, forwards SIGTERM, SIGINT and SIGHUP and returns the trainer's exit status (128 + n after
signal n). The leash is a pipe whose other end only the guard holds, so the keeper sees the guard die however it dies;
PR_SET_PDEATHSIG would do for the guard's main thread only. The keeper's own child does hang on PR_SET_PDEATHSIG.
What is wrong on the way is written to the status pipe as one line; an end of file there means: the trainer runs.
What it does not stop: what `silo/guard/trainer_process/sandbox.py` says of each rung; and a trainer that kills the
keeper where both are one user (rung waived, and rung user below Landlock version 6) only ends itself with it.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import platform
import resource
import select
import signal
import socket
import struct
import sys
from typing import Any, NoReturn

_libc = ctypes.CDLL(None, use_errno=True)

_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
_CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REMOUNT = 1, 2, 4, 8, 32
_MS_BIND, _MS_REC, _MS_PRIVATE = 4096, 16384, 1 << 18
_MNT_DETACH = 2
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_MOUNT_SETATTR, _LANDLOCK_ADD_RULE, _LANDLOCK_CREATE, _LANDLOCK_RESTRICT = 442, 445, 444, 446
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_CAPBSET_DROP, _PR_SET_SECUREBITS = 1, 22, 24, 28
_PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT = 36, 38, 47
_SECCOMP_MODE_FILTER, _CAP_AMBIENT_CLEAR_ALL = 2, 4
# noroot, no_setuid_fixup, keep_caps (off), no_cap_ambient_raise, each with its lock
_SECUREBITS = 0b11101111
_CAPABILITY_VERSION_3 = 0x20080522
_LANDLOCK_PATH_BENEATH = 1
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1

_OLD, _NEW = "/old", "/new"
_ETC = {
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
    "hosts": "127.0.0.1 localhost\n::1 localhost\n",
    "passwd": "trainer:x:{uid}:{gid}:trainer:/tmp:/usr/sbin/nologin\n",
    "group": "trainer:x:{gid}:\n",
}


class WallError(Exception):
    """A wall cannot be built; the text names the step and the system's answer."""


def _checked(result: int, step: str) -> int:
    if result < 0:
        raise WallError(f"{step}: {os.strerror(ctypes.get_errno())}")
    return result


def _syscall(step: str, number: int, *arguments: Any) -> int:
    converted = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    return _checked(int(_libc.syscall(ctypes.c_long(number), *converted)), step)


def _prctl(step: str, option: int, *arguments: int) -> None:
    padded = [*arguments, 0, 0, 0, 0][:4]
    _checked(_libc.prctl(option, *(ctypes.c_ulong(each) for each in padded)), step)


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str = "") -> None:
    encoded = [None if each is None else os.fsencode(each) for each in (source, target, kind)]
    result = _libc.mount(*encoded, ctypes.c_ulong(flags), os.fsencode(options) if options else None)
    _checked(result, f"mount {kind or ''} {target}".replace("  ", " "))


# ---- namespaces --------------------------------------------------------------------------------------


def _enter_namespaces() -> None:
    """New user, mount, network, pid, ipc and host-name namespaces. The user keeps its number inside."""
    uid, gid = os.geteuid(), os.getegid()
    rest = _CLONE_NEWNS | _CLONE_NEWPID | _CLONE_NEWNET | _CLONE_NEWIPC | _CLONE_NEWUTS
    if _libc.unshare(_CLONE_NEWUSER | rest) == 0:
        _write("/proc/self/uid_map", f"{uid} {uid} 1")
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/gid_map", f"{gid} {gid} 1")
    elif uid != 0:
        raise WallError(f"unshare: {os.strerror(ctypes.get_errno())}")
    else:
        # root can have the others where user namespaces are switched off
        _checked(_libc.unshare(rest), "unshare")
    _libc.sethostname(b"trainer", ctypes.c_size_t(7))


def _write(path: str, text: str) -> None:
    try:
        with open(path, "w") as file:  # noqa: PTH123  # pathlib would cost half the start-up time
            file.write(text)
    except OSError as error:
        raise WallError(f"write {path}: {error.strerror}") from error


def _raise_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        request = struct.pack("16sh14x", b"lo", 0)
        _, flags = struct.unpack_from("16sh", fcntl.ioctl(handle, _SIOCGIFFLAGS, request))
        fcntl.ioctl(handle, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags | _IFF_UP))


def _pivot(new_root: str, put_old: str) -> None:
    number = _PIVOT_ROOT.get(platform.machine())
    if number is None:
        raise WallError(f"pivot_root: not known on {platform.machine()}")
    _syscall(f"pivot_root {new_root}", number, os.fsencode(new_root), os.fsencode(put_old))


def _build_tree(spec: dict[str, Any]) -> None:
    """A root of its own with nothing in it but what `spec` lists; called in the new namespaces."""
    quiet = _MS_NOSUID | _MS_NODEV
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    # After the first pivot the machine's tree is /old with nothing hidden, so paths below /tmp can be bound too.
    _mount("tmpfs", "/tmp", "tmpfs", quiet, "mode=0755")  # noqa: S108
    os.mkdir(f"/tmp{_OLD}")  # noqa: PTH102, S108
    os.mkdir(f"/tmp{_NEW}")  # noqa: PTH102, S108
    _mount("tmpfs", f"/tmp{_NEW}", "tmpfs", quiet, "mode=0755")  # noqa: S108
    _pivot("/tmp", f"/tmp{_OLD}")  # noqa: S108
    os.chdir("/")
    for folder, mode in (("/tmp", "1777"), ("/dev", "0755"), ("/dev/shm", "1777")):  # noqa: S108
        os.mkdir(_NEW + folder)  # noqa: PTH102
        _mount("tmpfs", _NEW + folder, "tmpfs", quiet, f"mode={mode}")
    for folder in ("/proc", "/etc", "/var"):
        os.mkdir(_NEW + folder)  # noqa: PTH102
    os.symlink("/tmp", f"{_NEW}/var/tmp")  # noqa: PTH211, S108
    for name, number in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
        os.symlink(f"/proc/self/fd{number}", f"{_NEW}/dev/{name}")  # noqa: PTH211
    for name, text in _ETC.items():
        _write(f"{_NEW}/etc/{name}", text.format(uid=os.geteuid(), gid=os.getegid()))
    for link, target in spec["links"]:
        os.makedirs(os.path.dirname(_NEW + link), exist_ok=True)  # noqa: PTH103, PTH120
        if not os.path.lexists(_NEW + link):
            os.symlink(target, _NEW + link)  # noqa: PTH211
    for path, mode in spec["binds"]:
        _bind(path, mode)
    # Read-only as a whole: without a capability, user 0 may still write what user 0 owns in /proc/sys.
    _mount("proc", f"{_NEW}/proc", "proc", _MS_RDONLY | quiet | _MS_NOEXEC)
    _checked(_libc.umount2(os.fsencode(_OLD), _MNT_DETACH), "unmount the machine's tree")
    os.chdir(_NEW)
    _pivot(".", ".")
    _checked(_libc.umount2(b".", _MNT_DETACH), "unmount the first root")
    os.chdir("/")
    _mount(None, "/", None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | quiet)


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
        raise WallError(f"make room for {path}: {error.strerror}") from error
    read_only = _MS_RDONLY if mode == "read" else 0
    wanted = read_only | _MS_NOSUID | (0 if mode == "device" else _MS_NODEV)
    # mount_setattr (Linux 5.12) reaches what is mounted below, too. Its bits are those of the first MS_ flags.
    _mount(source, target, None, _MS_BIND | _MS_REC)
    attributes = ctypes.create_string_buffer(struct.pack("=QQQQ", wanted, 0, 0, 0), 32)
    size = ctypes.c_size_t(32)
    where = os.fsencode(target)
    if _libc.syscall(ctypes.c_long(_MOUNT_SETATTR), _AT_FDCWD, where, _AT_RECURSIVE, attributes, size) == 0:
        return
    # Older: bind again without what is mounted below, so that nothing stays writable by oversight.
    _checked(_libc.umount2(where, _MNT_DETACH), f"unmount {path}")
    _mount(source, target, None, _MS_BIND)
    # these flags of statvfs have the values of the MS_ flags; what the machine set must stay set
    kept = os.statvfs(target).f_flag & (_MS_RDONLY | _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    _mount(None, target, None, _MS_REMOUNT | _MS_BIND | kept | wanted)


# ---- what a process gives up -------------------------------------------------------------------------


def _drop_capabilities() -> None:
    """No capability now and none by a later exec, not even for user 0."""
    _libc.prctl(_PR_CAP_AMBIENT, _CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    # Both need a capability themselves: an ordinary user has none, and cannot get one past no_new_privs.
    _libc.prctl(_PR_SET_SECUREBITS, ctypes.c_ulong(_SECUREBITS), 0, 0, 0)
    for capability in range(64):
        _libc.prctl(_PR_CAPBSET_DROP, ctypes.c_ulong(capability), 0, 0, 0)
    header = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
    _checked(_libc.capset(header, bytes(24)), "drop capabilities")
    _prctl("no_new_privs", _PR_SET_NO_NEW_PRIVS, 1)


def _filter_system_calls(program: bytes) -> None:
    buffer = ctypes.create_string_buffer(program, len(program))
    head = ctypes.create_string_buffer(struct.pack("@HP", len(program) // 8, ctypes.addressof(buffer)))
    _prctl("seccomp", _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(head))


def _restrict_files(attributes: bytes, rules: list[tuple[str, int]]) -> None:
    _prctl("no_new_privs", _PR_SET_NO_NEW_PRIVS, 1)
    ruleset = _syscall("landlock_create_ruleset", _LANDLOCK_CREATE, attributes, len(attributes), 0)
    for path, access in rules:
        try:
            handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError as error:
            raise WallError(f"open {path}: {error.strerror}") from error
        rule = struct.pack("=Qi", access, handle)
        _syscall(f"landlock rule for {path}", _LANDLOCK_ADD_RULE, ruleset, _LANDLOCK_PATH_BENEATH, rule, 0)
        os.close(handle)
    # the process's own folder in /proc: threads libraries and allocators read their maps there
    own = os.open("/proc/self", os.O_PATH | os.O_CLOEXEC | os.O_DIRECTORY)
    _syscall("landlock rule", _LANDLOCK_ADD_RULE, ruleset, _LANDLOCK_PATH_BENEATH, struct.pack("=Qi", 4 | 8, own), 0)
    os.close(own)
    _syscall("landlock_restrict_self", _LANDLOCK_RESTRICT, ruleset, 0)
    os.close(ruleset)


def _dial(path: str) -> int:
    """Connect before sockets are refused; the number of the descriptor goes to the trainer instead of the path."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(path)
    except OSError as error:
        raise WallError(f"connect {path}: {error.strerror}") from error
    return connection.detach()


# ---- processes ---------------------------------------------------------------------------------------


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
    for standard in (0, 1, 2):
        os.dup2(nothing, standard)
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
    previous = 2
    for descriptor in [*sorted([*kept, status]), os.sysconf("SC_OPEN_MAX")]:
        os.closerange(previous + 1, descriptor)
        previous = descriptor
    # a core dump would hold the private data
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.chdir("/")
    try:
        os.execvpe(argv[0], argv, spec["env"])  # noqa: S606  # an argument list is the point
    except OSError as error:
        raise WallError(f"start {argv[0]}: {error.strerror}") from error


def _inside(spec: dict[str, Any], go: int, status: int) -> NoReturn:
    """The keeper's child: put up the walls of the rung, then run the trainer."""
    _prctl("die with the keeper", _PR_SET_PDEATHSIG, signal.SIGKILL)
    if not os.read(go, 1):
        os._exit(1)  # the keeper died before that wish was known
    argv: list[str] = spec["argv"]
    kept: list[int] = []
    if spec["rung"] == "namespaces":
        _raise_loopback()
        _build_tree(spec)
        _drop_capabilities()
        _filter_system_calls(bytes.fromhex(spec["seccomp"]))
        trainer = os.fork()
        if trainer:
            os.close(status)
            _let_go_of_output(os.open(os.devnull, os.O_RDWR))
            os._exit(_wait_and_forward(trainer, None))
    elif spec["rung"] == "user":
        if spec["dial"]:
            kept = [_dial(spec["dial"])]
            os.set_inheritable(kept[0], True)
            argv = [f"fd:{kept[0]}" if each == f"unix:{spec['dial']}" else each for each in argv]
        # Rules name files that another user may not be able to open, so they come before the change of user.
        _restrict_files(bytes.fromhex(spec["landlock"]), spec["rules"])
        if spec["user"]:
            uid, gid = spec["user"]
            os.setgroups([])
            os.setresgid(gid, gid, gid)
            os.setresuid(uid, uid, uid)
            _prctl("die with the keeper", _PR_SET_PDEATHSIG, signal.SIGKILL)  # a change of user clears it
        _drop_capabilities()
        _filter_system_calls(bytes.fromhex(spec["seccomp"]))
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
        if spec["rung"] == "namespaces":
            _enter_namespaces()
        else:
            _prctl("adopt orphans", _PR_SET_CHILD_SUBREAPER, 1)
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
    except (WallError, OSError) as error:
        os.write(status, str(error).encode()[:4000])
        os._exit(126)


if __name__ == "__main__":
    main()
