"""Starts programs in a sandbox, at one of these isolation levels (threats B1, T10, X11).

    namespaces   user, mount, network, pid, ipc and host-name namespaces; a tree of what is listed and nothing else; no
                 interface but `lo`; no capability, a system-call filter. Also when the guard is root.
    user         another OS user where the guard is root and the user `fedsilo-trainer` exists, else the guard's own;
                 Landlock rules for files, the system-call filter refuses every socket but the link to the guard.
    container    a container or unit without network that somebody else builds; here it is only probed. Over TLS its
                 network reaches the guard's address only: whatever else it sends has no route or is dropped.
    waived       no sandbox. The trainer still ends with the guard, and keeps no descriptor of it.

What each does not stop, besides bugs in the kernel:
    namespaces   timing and load seen by other processes of the machine; reading /usr (world-readable programs) and the
                 processor's description; with a GPU, whatever its driver lets one client learn of another.
    user         besides those: that a file exists, its size and times, can be seen (stat), and files the user owns
                 can be given another mode or time; below Landlock version 6 it may signal processes of its user.
                 The price: no further unix socket can be opened, so no vLLM server behind one; and our packages must
                 be installed, since a folder on PYTHONPATH cannot be listed.
    container    whatever the person who built it forgot and no probe tries; the probes are answered by the process
                 they judge; over TLS, other ports of the guard's own address; where packets are dropped, an address
                 beyond those that were tried (see `probing`).
    waived       anything the guard's user may do, keys and network included.
No isolation level stops what the trainer writes into the values it hands over: that is the gate's work.

In `namespaces` and `user` the trainer has the guard's user number (or the other user's) but no capability, so files
given as readable must be readable for that user by their mode: a root guard's power to override modes stays outside.
The trainer inherits no descriptor but its output, works in `/`, and takes no code from its working folder or home.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import glob
import inspect
import json
import os
import pwd
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from fedsilo.protocol.errors import OperationError, UsageError
from fedsilo.protocol.isolation import ISOLATION_LEVELS
from fedsilo.sandbox import filters
from fedsilo.sandbox.filters import trainer_filter
from fedsilo.sandbox.kernel import landlock_version
from silo.link import OFFLINE

TRAINER_USER = "fedsilo-trainer"
# a trainer needs these packages of ours; certificates, coordinator and console stay outside
_OWN_PACKAGES = ("fedsilo", "silo", "policies")
_SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin")
_SYSTEM_FILES = (
    "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/alternatives", "/etc/localtime",
    "/sys/devices/system/cpu", "/sys/devices/system/node",
)  # fmt: skip
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_ACCELERATORS = ("/dev/nvidia*", "/dev/dri", "/dev/kfd", "/dev/dxg")
_ACCELERATOR_FACTS = ("/sys/bus/pci", "/sys/class/drm", "/sys/class/kfd", "/sys/module/nvidia", "/sys/devices")
# readable under Landlock, where the machine's own /proc and /etc are in sight
_FACTS_BY_RULE = ("/proc/cpuinfo", "/proc/meminfo", "/proc/stat", "/proc/driver/nvidia", "/etc/passwd", "/etc/group",
                  "/etc/nsswitch.conf")  # fmt: skip
_BOOTSTRAP = Path(filters.__file__).with_name("trainer_bootstrap.py")
# What the trainer's process may see of the environment: where programs and libraries are, nothing of this site.
_ENVIRONMENT_KEPT = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ", "CUDA_VISIBLE_DEVICES", "VIRTUAL_ENV")
# Telemetry and hub downloads off (threat T10); threads are set beside them.
_ENVIRONMENT_SET = {**OFFLINE, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1"}


class IsolationError(OperationError):
    """The sandbox of an isolation level cannot be built on this machine, or the trainer cannot be started inside it."""

    default_code = "ISOLATION_FAILED"


class SandboxedProcess(subprocess.Popen[bytes]):
    """The trainer's keeper (fedsilo/sandbox/trainer_bootstrap.py).

    SIGTERM and SIGINT reach the trainer; SIGKILL ends both.
    `leash` is the guard's end of a pipe: when it closes, because the guard ended or this object went away, the
    trainer is killed.
    """

    leash: IO[bytes]


def launch_in_sandbox(
    argv: Sequence[str],
    *,
    level: str,
    readable: Sequence[Path] = (),
    writable: Sequence[Path] = (),
    socket_dir: Path | None = None,
    env: Mapping[str, str],
    never: Sequence[Path] = (),
    accelerators: bool = True,
    user: str | None = None,
    stdin: int | IO[bytes] | None = subprocess.DEVNULL,
    stdout: int | IO[bytes] | None = None,
    stderr: int | IO[bytes] | None = None,
) -> SandboxedProcess:
    """Start a Python program in a sandbox and return once it runs. Takes about 50 ms.

    Args:
        argv: `argv[0]` is an interpreter; its libraries and this project's packages become readable with it. At level
            `user` an argument `unix:PATH` with PATH in `socket_dir` is connected beforehand and becomes `fd:NUMBER`,
            since no socket can be made inside.
        level: `namespaces`, `user` or `waived`.
        readable: files and folders, seen inside at the same path. Links on the way, and links directly inside a
            folder to files elsewhere (a model cache), are followed.
        writable: likewise, to read and write; links inside a folder are not followed, since a trainer could lay them.
        socket_dir: folder of the unix socket on which the guard listens; keep other sockets out of it.
        env: the whole environment.
        never: keys and control socket: refused when a path above would show one of them.
        accelerators: whether GPU devices are passed in where the machine has them.
        user: for isolation level `user` and a root guard, the other user; default `fedsilo-trainer` where it exists.
        stdin: as in subprocess; by default nothing.
        stdout: as in subprocess.
        stderr: as in subprocess.

    Raises:
        IsolationError: a step of building the sandbox fails, or the program cannot be executed inside.
        FileNotFoundError: something to be shown does not exist.
        UsageError: `never` would be visible.
        ValueError: not an isolation level that can be built here.
    """
    if level not in ISOLATION_LEVELS or level == "container":
        raise ValueError(f"isolation level {level!r} is not built here; known: namespaces, user, waived")
    spec: dict[str, Any] = {"level": level, "argv": list(argv)}
    spec["env"] = {**env, "PYTHONSAFEPATH": "1", "PYTHONNOUSERSITE": "1"}
    shown, links = _with_links([*_program_paths(argv[0]), *map(_present, readable)])
    written, more_links = _with_links(map(_present, writable), look_inside=False)
    sockets, still_more = _with_links([_present(socket_dir)] if socket_dir else [], look_inside=False)
    if level != "waived":
        _refuse_to_show(never, [*shown, *written, *sockets])
    devices = [Path(each) for each in _DEVICES if Path(each).exists()]
    facts: list[Path] = []
    if accelerators and (found := [Path(each) for pattern in _ACCELERATORS for each in glob.glob(pattern)]):  # noqa: PTH207
        devices += found
        facts = [Path(each) for each in _ACCELERATOR_FACTS if Path(each).exists()]
    try:
        if level == "namespaces":
            spec["links"] = sorted({**links, **more_links, **still_more}.items())
            modes = dict.fromkeys([*shown, *facts, *sockets], "read") | dict.fromkeys(written, "write")
            modes |= dict.fromkeys(devices, "device")
            # parents first, so that a folder does not cover what was put below it
            spec["binds"] = sorted((os.fspath(path), mode) for path, mode in modes.items())
            spec["seccomp"] = trainer_filter(network_by_namespace=True).hex()
        elif level == "user":
            version = landlock_version()
            if version == 0:
                raise IsolationError("isolation level user: this kernel offers no Landlock")
            own = [Path(each) for each in _FACTS_BY_RULE if Path(each).exists()]
            spec["landlock"] = filters.ruleset(version).hex()
            spec["rules"] = filters.rules(
                version,
                (filters.READ_AND_EXECUTE, [*shown, *facts, *own]),
                (filters.every_access(version), [*written, *devices]),
                # its own folder in /proc: threads, libraries and allocators read their maps there
                (filters.READ, [Path("/proc/self")]),
            )
            spec["seccomp"] = trainer_filter(network_by_namespace=False).hex()
            spec["dial"] = _link_address(argv, socket_dir)
            spec["user"] = _other_user(user)
    except ValueError as error:
        raise IsolationError(f"isolation level {level}: {error}") from error
    return _start(spec, stdin, stdout, stderr)


def launch_over_pipes(argv: Sequence[str], *, env: Mapping[str, str], never: Sequence[Path] = ()) -> SandboxedProcess:
    """Start a program at level `namespaces` that sees nothing of the site and talks over standard input and output.

    Raises:
        as `launch_in_sandbox`.
    """
    return launch_in_sandbox(
        argv, level="namespaces", env=env, never=never, accelerators=False,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip


def run_in_sandbox(
    argv: Sequence[str],
    given: bytes,
    *,
    level: str,
    env: Mapping[str, str],
    never: Sequence[Path],
    timeout_seconds: float,
) -> tuple[bytes, bytes]:
    """Run a program to its end and return what it wrote to its standard output and error.

    Raises:
        as `launch_in_sandbox`; and IsolationError: it did not end in time.
    """
    pipe = subprocess.PIPE
    process = launch_in_sandbox(
        argv, level=level, env=env, never=never, accelerators=False, stdin=pipe, stdout=pipe, stderr=pipe
    )
    with process:
        try:
            return process.communicate(given, timeout_seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            raise IsolationError(f"the probes did not answer within {timeout_seconds:.0f} s") from None


def _start(
    spec: dict[str, Any],
    stdin: int | IO[bytes] | None,
    stdout: int | IO[bytes] | None,
    stderr: int | IO[bytes] | None,
) -> SandboxedProcess:
    leash_read, leash_write = os.pipe()
    status_read, status_write = os.pipe()
    try:
        process = SandboxedProcess(
            [sys.executable, "-I", "-S", "-B", os.fspath(_BOOTSTRAP), str(leash_read), str(status_write)],
            pass_fds=(leash_read, status_write),
            env=dict(spec["env"]),
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            # no terminal to type into, and a group of its own for the supervisor to end
            start_new_session=True,
        )
    except OSError:
        os.close(leash_write)
        os.close(status_read)
        raise
    finally:
        os.close(leash_read)
        os.close(status_write)
    process.leash = os.fdopen(leash_write, "wb", buffering=0)
    with os.fdopen(status_read, "rb") as status:
        with contextlib.suppress(BrokenPipeError):  # it ended early; the check below says so
            process.leash.write(json.dumps(spec).encode() + b"\n")
        complaint = status.read().decode("utf-8", "replace")
    if complaint:
        process.leash.close()
        process.wait()
        raise IsolationError(
            f"isolation level {spec['level']}: {complaint}",
            hint="`fedsilo doctor` lists the isolation levels this machine can build",
        )
    return process


# ---- what becomes visible ----------------------------------------------------------------------------


def _present(path: Path) -> Path:
    absolute = Path(os.path.abspath(path))  # noqa: PTH100  # not resolved: links on the way are reproduced
    if not absolute.exists():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    return absolute


def _follow(path: Path) -> tuple[Path, dict[str, str]]:
    """Return where `path` really is, and each symbolic link on the way with its text."""
    links: dict[str, str] = {}
    current, left = "/", [part for part in path.parts if part != "/"]
    while left:
        part = left.pop(0)
        if part == "..":
            current = os.path.dirname(current)  # noqa: PTH120
            continue
        step = os.path.join(current, part)  # noqa: PTH118
        if not os.path.islink(step):  # noqa: PTH114
            current = step
            continue
        if len(links) > 64:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
        links[step] = target = os.readlink(step)  # noqa: PTH115
        if target.startswith("/"):
            current = "/"
        left = [each for each in target.split("/") if each not in ("", ".")] + left
    return Path(current), links


def _with_links(paths: Iterable[Path], *, look_inside: bool = True) -> tuple[list[Path], dict[str, str]]:
    real: dict[Path, None] = {}
    links: dict[str, str] = {}
    for path in paths:
        place, passed = _follow(path)
        if place == Path("/"):
            raise UsageError(f"{path} is the whole machine", hint="name the files and folders the trainer needs")
        real[place] = None
        links |= passed
        if look_inside and place.is_dir() and not _is_system(place):
            for entry in os.scandir(place):
                if entry.is_symlink() and entry.is_file():
                    target, passed = _follow(Path(entry.path))
                    real[target] = None
                    links |= passed
    return [each for each in real if not any(parent in real for parent in each.parents)], links


def _is_system(place: Path) -> bool:
    return any(place.is_relative_to(each) for each in ("/usr", "/etc", "/sys", "/lib", "/lib64", "/lib32"))


def _refuse_to_show(never: Sequence[Path], shown: Sequence[Path]) -> None:
    for secret in never:
        place = Path(os.path.realpath(secret))
        for path in shown:
            if place.is_relative_to(path):
                raise UsageError(
                    f"{path} would show {secret} to the trainer", hint="keep keys, sockets and data in separate folders"
                )


@functools.cache
def _program_paths(python: str) -> tuple[Path, ...]:
    """Return the paths of a Python program of ours: system, interpreter, libraries, our packages one by one."""
    if python == sys.executable:
        facts = _interpreter_facts(_OWN_PACKAGES)
    else:
        # another interpreter may have its libraries elsewhere, and need not have what this module imports
        question = inspect.getsource(_interpreter_facts) + f"print(json.dumps(_interpreter_facts({_OWN_PACKAGES!r})))"
        try:
            answer = subprocess.run(
                [python, "-P", "-c", f"import json\n{question}"], capture_output=True, check=True, timeout=60, cwd="/"
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise IsolationError(f"{python} does not answer where its libraries are: {error}") from error
        facts = json.loads(answer.stdout.splitlines()[-1])
    paths = [Path(each) for each in (*_SYSTEM, *_SYSTEM_FILES, python, *facts)]
    return tuple(path for path in paths if path.exists())


def _interpreter_facts(packages: tuple[str, ...]) -> list[str]:
    """Folders of this interpreter, its libraries and the packages. Stands alone: other interpreters run its text."""
    import importlib.util
    import site
    import sys
    import sysconfig

    folders = [sys.prefix, sys.base_prefix, *site.getsitepackages(), *sysconfig.get_paths().values()]
    for name in packages:
        found_spec = importlib.util.find_spec(name)
        if found_spec is not None and found_spec.submodule_search_locations:
            folders += list(found_spec.submodule_search_locations)
    return [each for each in dict.fromkeys(folders) if each != "/"]


def _link_address(argv: Sequence[str], socket_dir: Path | None) -> str | None:
    for argument in argv:
        path = argument.removeprefix("unix:")
        if socket_dir and path != argument and Path(path).resolve().is_relative_to(socket_dir.resolve()):
            return path
    return None


def _other_user(name: str | None) -> tuple[int, int] | None:
    """(uid, gid) to change to; None: stay. Only root can change."""
    if os.geteuid() != 0:
        return None
    try:
        entry = pwd.getpwnam(name or TRAINER_USER)
    except KeyError:
        if name is not None:
            raise ValueError(f"no user {name!r} on this machine") from None
        return None
    return entry.pw_uid, entry.pw_gid


def end_process_group(process: subprocess.Popen[bytes], timeout_seconds: float) -> None:
    """Wait a moment for the child to end by itself, then SIGTERM, then SIGKILL, to its whole group if it leads one."""
    for signal_number in (None, signal.SIGTERM, signal.SIGKILL):
        if signal_number is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if os.getpgid(process.pid) == process.pid:
                    os.killpg(process.pid, signal_number)
                else:
                    process.send_signal(signal_number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout_seconds if signal_number is None or signal_number == signal.SIGTERM else None)
            return


def trainer_environment(outer: Mapping[str, str], *, threads: int, scratch: Path) -> dict[str, str]:
    """The environment of the trainer: a short allow-list, offline switches, one thread count for every library."""
    environment = {name: outer[name] for name in _ENVIRONMENT_KEPT if name in outer}
    environment.update(_ENVIRONMENT_SET)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        environment[name] = str(threads)
    # A home and a cache of its own: libraries look there, and the real one is outside the sandbox.
    for name in ("HOME", "HF_HOME", "XDG_CACHE_HOME", "TMPDIR", "TORCHINDUCTOR_CACHE_DIR"):
        environment[name] = str(scratch)
    return environment
