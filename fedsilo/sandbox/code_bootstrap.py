"""Runs between the grading process and one program: builds the sandbox, then becomes the program. Executed as a script
by `fedsilo/grading/code_sandbox.py`, with `python -I -S`: standard library only, and nothing of the project.

    grading process ─▶ keeper ─ dies with ─▶ first process of a pid namespace: the program     (namespaces)
    grading process ─▶ the program                                                             (landlock)

A specification comes on standard input as JSON. What cannot be built is written to the status pipe as one line, and
nothing runs; an end of file there means that the sandbox stands. code_sandbox.py says what the sandbox does not stop.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
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

_EMPTY = "/empty"


def _build_tree(readable: list[str]) -> None:
    """A root of its own, read-only: an empty folder to stand in, and what Python needs to import its own library."""
    kernel.mount_privately()
    new = "/tmp"  # noqa: S108  # a mount point that every machine has; what it holds is hidden, not used
    handles = [(path, os.open(path, os.O_PATH | os.O_CLOEXEC)) for path in readable]
    kernel.mount("tmpfs", new, "tmpfs", kernel.QUIET, "mode=0111,size=1m")
    os.mkdir(new + _EMPTY, 0o555)  # noqa: PTH102
    for path, handle in handles:
        is_folder = os.path.isdir(f"/proc/self/fd/{handle}")  # noqa: PTH112
        # the folders on the way can be passed and not listed: they may be somebody's home
        parts = path.strip("/").split("/")
        for depth in range(1, len(parts) + is_folder):
            with contextlib.suppress(FileExistsError):
                os.mkdir("/".join([new, *parts[:depth]]), 0o711)  # noqa: PTH102
        if not is_folder:
            os.close(os.open(new + path, os.O_CREAT | os.O_WRONLY, 0o444))
        kernel.bind(f"/proc/self/fd/{handle}", new + path, kernel.READ_ONLY | kernel.QUIET, recursive=False)
        os.close(handle)
    for path in readable:
        parts = path.strip("/").split("/")
        for depth in range(1, len(parts)):
            os.chmod("/".join([new, *parts[:depth]]), 0o111)  # noqa: PTH101, S103  # passing on, no listing
    kernel.seal_root(new, "the machine's tree")
    os.chdir(_EMPTY)


def _limit(limits: dict[str, int]) -> None:
    for name, most in limits.items():
        kind = getattr(resource, name)
        hard = resource.getrlimit(kind)[1]
        value = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (value, value))


def _become(spec: dict[str, Any], status: int) -> NoReturn:
    """Enter the sandbox, then become the program. What it does with this process afterwards is its own affair."""
    source = compile(spec["source"], "<role>", "exec")
    if spec["level"] == "namespaces":
        _build_tree(spec["readable"])
    else:
        os.chdir("/")
        kernel.restrict_files(bytes.fromhex(spec["landlock"]), spec["rules"])
    kernel.drop_capabilities()
    _limit(spec["limits"])
    kernel.replace_output(spec["descriptors"]["nothing"])
    kernel.close_descriptors_except([status, *spec["descriptors"].values()])
    os.environ.clear()  # Python sets a variable of its own where the locale is "C"
    kernel.filter_system_calls(bytes.fromhex(spec["seccomp"]))
    os.close(status)
    namespace: dict[str, Any] = {"__name__": "role"}
    exec(source, namespace)  # noqa: S102  # read by the grading process from beside this file
    namespace["main"](spec["role"], spec["program"], spec["descriptors"])
    os._exit(0)


def _keep(child: int) -> NoReturn:
    """Wait for the program; end it when asked to. Its own end is its parent's business too, so it leaves no zombie."""

    def end(*_: object) -> None:
        with contextlib.suppress(ProcessLookupError):  # it ended by itself a moment ago
            os.kill(child, signal.SIGKILL)

    signal.signal(signal.SIGTERM, end)
    os.waitpid(child, 0)
    os._exit(0)


def main() -> None:
    kernel.die_with_parent("the grading process")
    spec = json.load(sys.stdin.buffer)
    status = spec["status"]
    if os.getppid() != spec["parent"]:
        os._exit(1)  # it died before that wish was known
    try:
        if spec["level"] != "namespaces":
            _become(spec, status)
        kernel.enter_namespaces("program")
        wake, waker = os.pipe()
        child = os.fork()
        if not child:
            os.close(waker)
            kernel.die_with_parent("the keeper")
            if not os.read(wake, 1):
                os._exit(1)
            _become(spec, status)
        os.close(status)
        for descriptor in spec["descriptors"].values():
            os.close(descriptor)
        os.write(waker, b"1")
        _keep(child)
    except (kernel.SandboxError, OSError, ValueError) as error:
        os.write(status, str(error).encode()[:2000] or b"?")
        os._exit(126)


if __name__ == "__main__":
    main()
