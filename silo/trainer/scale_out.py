"""Several processes, of one accelerator or some cores each, train one silo's adapter as one process would.

Process 0 holds the link to the guard and passes every message on; the others do as it does (`Leader`, `Follower`).
Answers are sampled, graded and trained on by whole prompts, dealt out by tokens. Weights of a step's rows are those of
its whole batch, so the sum of the processes' gradients is the gradient of the batch, in another order of addition.
Every process then takes the same optimiser step, and a digest proves that all hold the same factors. Draws are keyed,
so an answer does not hang on who samples it (but for rounding, see `rollout.embedded`). With `trainer.shard_base` each
process keeps its share of the frozen weights alone (`sharding`).

`accelerate` finds device and backend, and joins processes that `accelerate launch` or torchrun started, also on several
hosts. Processes that this trainer starts itself meet by a file of its scratch folder and talk over the loopback alone,
so they work in a sandbox without a network; at isolation level `user` no socket can be made, and there is one process
only.

What goes between them is JSON and plain tensors, never pickle (T22). It does not stop: a process of the same machine
that may connect to the loopback of an unwalled trainer (gloo asks for no proof), or of the same network for several
hosts: give those a network of their own.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fedsilo.protocol.errors import FedSiloError, OperationError, PeerError, UsageError
from silo.link import LinkClosed, LinkMessage, MessageLink

if TYPE_CHECKING:
    from torch import Tensor

OUT_OF_MEMORY = "OUT_OF_MEMORY"  # code of a failure for want of memory
BAD_TASK = "BAD_TASK"  # code of a task that is refused as it stands, before any work
PROCESSES_MAX = 1024
# Between two messages of the guard nobody talks, maybe for days. A process that dies closes its connections, and those
# who wait for it fail at once; this is for nothing else.
TIMEOUT = timedelta(days=30)
LOOPBACK = "lo"
_PR_SET_PDEATHSIG = 1
_PASSED_ON = frozenset({"configure", "plan", "task", "stop"})  # what a probe finds holds for all: one sandbox

T = TypeVar("T")


class ProcessLost(RuntimeError):
    """The processes cannot go on together. No error of this trainer's messages: it ends, and is started again."""


@dataclass(frozen=True)
class Place:
    """This process among all. rendezvous: URL where they meet; empty where whoever started them says it otherwise."""

    rank: int
    size: int
    rendezvous: str = ""


def started_by_a_launcher(environment: Mapping[str, str]) -> Place | None:
    """The place that torchrun or `accelerate launch` gave this process; None: it was started alone.

    Raises:
        UsageError: it is not readable.
    """
    try:
        size, rank = int(environment.get("WORLD_SIZE", "1")), int(environment.get("RANK", "0"))
    except ValueError as error:
        raise UsageError("WORLD_SIZE or RANK is no number", hint="unset both, or start with torchrun") from error
    if size <= 1:
        return None
    if not 0 <= rank < size <= PROCESSES_MAX:
        raise UsageError(f"RANK {rank} of WORLD_SIZE {size} cannot be")
    return Place(rank, size)


def start_others(size: int) -> Place:
    """Split this process into `size`; returns in each. To be called before torch is loaded or a thread runs.

    The others end with the first. Raises UsageError: not a number of processes.
    """
    if not 1 <= size <= PROCESSES_MAX:
        raise UsageError(f"{size} processes cannot be", hint=f"trainer.processes is 1 to {PROCESSES_MAX}")
    folder = tempfile.mkdtemp(prefix="processes-")  # 0700; in a sandbox TMPDIR is the scratch folder
    parent = os.getpid()
    for rank in range(1, size):
        if os.fork() == 0:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
            if os.getppid() != parent:
                os._exit(1)
            return Place(rank, size, f"file://{folder}/meet")
    return Place(0, size, f"file://{folder}/meet")


class Processes:
    """The processes, joined. Every method is called by all of them, in the same order.

    Args:
        place: of this one.

    Attributes:
        rank, size: of this one among all.
    """

    def __init__(self, place: Place) -> None:
        import torch
        import torch.distributed as dist
        from accelerate import PartialState  # type: ignore[import-untyped]

        self.rank, self.size = place.rank, place.size
        options: dict[str, Any] = {"timeout": TIMEOUT}
        if place.rendezvous:
            # Inside one machine. Bound to the loopback: gloo would take the address of the machine's name.
            os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = LOOPBACK
            for name, value in (("RANK", place.rank), ("LOCAL_RANK", place.rank)):
                os.environ[name] = str(value)
            os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = str(place.size)
            options |= {"init_method": place.rendezvous, "rank": place.rank, "world_size": place.size}
        on_cpu = torch.cuda.device_count() == 0
        if not on_cpu and place.rendezvous and place.size > torch.cuda.device_count():
            raise UsageError(
                f"{place.size} processes, and this machine has {torch.cuda.device_count()} accelerators",
                hint="trainer.processes is at most their number",
            )
        self.device = PartialState(cpu=on_cpu, **options).device
        # What is no gradient goes over gloo: it notices at once that another process has died.
        self._control = dist.group.WORLD if on_cpu else dist.new_group(backend="gloo", timeout=TIMEOUT)
        self._dist, self._torch = dist, torch
        self._agreed: Exception | None = None
        self.gather(None)
        if place.rendezvous and place.rank == 0:
            shutil.rmtree(Path(place.rendezvous.removeprefix("file://")).parent, ignore_errors=True)

    def broadcast(self, data: bytes = b"") -> bytes:
        """Return process 0's value in every process."""
        size = self._torch.tensor([len(data)])
        self._dist.broadcast(size, src=0, group=self._control)
        content = self._torch.empty(int(size), dtype=self._torch.uint8)
        if self.rank == 0 and data:
            content.copy_(self._torch.frombuffer(bytearray(data), dtype=self._torch.uint8))
        if len(content):
            self._dist.broadcast(content, src=0, group=self._control)
        return content.numpy().tobytes()

    def gather(self, value: Any) -> list[Any]:
        """Return every process's value in every process, in the order of their ranks; as JSON brings it back."""
        data = json.dumps(value).encode()
        sizes = [self._torch.zeros(1, dtype=self._torch.long) for _ in range(self.size)]
        self._dist.all_gather(sizes, self._torch.tensor([len(data)]), group=self._control)
        longest = max(int(size) for size in sizes)
        own = self._torch.zeros(longest, dtype=self._torch.uint8)
        own[: len(data)] = self._torch.frombuffer(bytearray(data), dtype=self._torch.uint8)
        shares = [self._torch.empty_like(own) for _ in range(self.size)]
        self._dist.all_gather(shares, own, group=self._control)
        return [json.loads(each[: int(size)].numpy().tobytes()) for each, size in zip(shares, sizes, strict=True)]

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Make each tensor the sum of all processes', in place; the same bits everywhere."""
        flat = self._torch.cat([each.flatten() for each in tensors])
        self._dist.all_reduce(flat)
        start = 0
        for each in tensors:
            each.copy_(flat[start : start + each.numel()].view_as(each))
            start += each.numel()

    def whole(self, own: Tensor, out: Tensor) -> None:
        """Gather the shares of a tensor. out: all processes' `own` one after the other. Both flat, of the same
        dtype."""
        uint8 = self._torch.uint8
        self._dist.all_gather_single(out.view(uint8), own.view(uint8))

    def together(self, work: Callable[[], T]) -> T:
        """Work that needs no other process while it lasts; if one fails at it, all raise.

        Raises:
            OperationError: another process failed; its code, and its sentence.
        """
        result: T | None = None
        failure: Exception | None = None
        try:
            result = work()
        except Exception as error:  # noqa: BLE001  # whatever it is, the others must not wait for ever; it is raised below
            failure = error
        failed = None
        if isinstance(failure, FedSiloError):
            failed = [failure.code, failure.message]
        elif failure is not None:
            name = type(failure).__name__
            failed = [OUT_OF_MEMORY if is_memory_failure(failure) else "PROCESS_FAILED", name]
        others = self.gather(failed)
        for rank, other in enumerate(others):
            if failure is None and other is not None:
                failure = OperationError(f"process {rank} of the trainer failed: {other[1]}", code=str(other[0]))
        if failure is not None:
            self._agreed = failure
            raise failure
        return result  # type: ignore[return-value]

    def require_agreed(self, error: Exception) -> None:
        """Tell all processes the error with which a task failed, so that all are at the same place again.

        Known is what `together` raised, and a task or an adapter refused before any work: all were told it alike. An
        own error of any other kind proves nothing: a disk, a server or a model may have failed here and nowhere else.

        Raises:
            ProcessLost: the others may wait for this one, inside a pass or a sum; it has to end for them to notice.
        """
        refused = isinstance(error, PeerError) or (isinstance(error, FedSiloError) and error.code == BAD_TASK)
        if error is not self._agreed and not refused:
            raise ProcessLost(f"process {self.rank} failed by itself: {type(error).__name__}: {error}") from error

    @contextlib.contextmanager
    def lost_on_failure(self) -> Iterator[None]:
        """Around work in which the processes need each other. Raises ProcessLost: this one cannot do its part, so that
        it has to end for the others to notice."""
        try:
            yield
        except Exception as error:
            raise ProcessLost(f"process {self.rank} failed: {error}") from error

    def require_equal(self, tensors: Sequence[Tensor]) -> None:
        """Compare the tensors of all processes. Raises ProcessLost: not all processes hold the same bits."""
        digest = hashlib.sha256()
        for each in tensors:
            digest.update(each.detach().cpu().contiguous().numpy().data)
        if len(set(self.gather(digest.hexdigest()))) > 1:
            raise ProcessLost("the processes' factors have come apart")


def dealt(costs: Sequence[int], size: int) -> list[list[int]]:
    """Places of `costs` for each of `size` processes: the dearest first, each to whoever has least. Same everywhere."""
    shares: list[list[int]] = [[] for _ in range(size)]
    loads = [0] * size
    for place in sorted(range(len(costs)), key=lambda place: (-costs[place], place)):
        least = loads.index(min(loads))
        shares[least].append(place)
        loads[least] += costs[place]
    return [sorted(share) for share in shares]


# ---- the link ----------------------------------------------------------------------------------------


class Leader:
    """Process 0's link to the guard. What the others need to know is passed on as it is heard."""

    def __init__(self, link: MessageLink, place: Place) -> None:
        self._link = link
        self._place = place
        self.group: Processes | None = None

    def send(self, message: LinkMessage) -> None:
        self._link.send(message)

    def receive(self) -> LinkMessage:
        try:
            message = self._link.receive()
        except LinkClosed:
            self._pass_on(LinkMessage("stop"))
            raise
        if message.type in _PASSED_ON:
            self._pass_on(message)
        return message

    def _pass_on(self, message: LinkMessage) -> None:
        if self.group is None:
            if message.type == "stop":
                return  # the others wait for the first message, and end with this process
            self.group = Processes(self._place)
        self.group.broadcast(json.dumps([message.type, message.fields]).encode())
        self.group.broadcast(bytes(message.body))


class Follower:
    """The link of any other process: it hears what process 0 heard, and what it says goes nowhere."""

    def __init__(self, place: Place) -> None:
        self.group = Processes(place)

    def send(self, message: LinkMessage) -> None:
        pass

    def receive(self) -> LinkMessage:
        kind, fields = json.loads(self.group.broadcast())
        return LinkMessage(kind, fields, self.group.broadcast())

    def close(self) -> None:
        pass


def left_alone(error: RuntimeError) -> bool:
    """Return whether a process failed because another one had ended; torch says so by a plain RuntimeError of its
    backend."""
    words = str(error).lower()
    return not isinstance(error, ProcessLost) and any(word in words for word in ("gloo", "connection", "nccl"))


# torch raises a class of its own for an accelerator alone; for the machine's memory a plain RuntimeError.
_CPU_WORDS = ("defaultcpuallocator", "can't allocate memory")


def is_memory_failure(error: BaseException) -> bool:
    """Return True if a failure is about memory, as torch, numpy or Python itself raise it.

    What it does not see: a process that the kernel kills, which raises nothing.
    """
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    words = str(error).lower()
    return isinstance(error, RuntimeError) and any(each in words for each in _CPU_WORDS)
