"""Saves a session at each step boundary in one file, so that a killed trainer goes on bit for bit.

What there is at all: the factors and the round's start, the optimiser's moments, where the run stands, the own answers
that wait for donors while a public step is open, and what the proof of agreement has found so far. No generator has a
state: every draw is keyed by the plan's seed, round, step, sample, and the prompt's place in the step or its public
row, and a private step's rows come with its task (`silo/sampling.py` keeps how far those went).

The file is replaced in one step after every task that changes any of this, before the guard hears that the task is
done. So what the guard was told is never ahead of the file, and the file is at most one task ahead: the answer to that
task lies in it and is given again. Tensors are whole, however many processes train (`scale_out`), so another number of
processes can go on. It is safetensors and JSON under a key of the site (T22): nothing is parsed before it proves to be
whole and this site's own.

Equal bits need the same machine, libraries, threads and number of processes; `same_surroundings` says whether they are.
Does not stop: an earlier file of the same run put back by whoever may write there (the guard compares the step with
what it was told), or a disk that says it has written what it has not. The file holds factors trained on private rows,
and stays in the trainer's scratch folder, mode 0600, until another run begins there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import hmac
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import safetensors.torch
import torch
from torch import Tensor

from fedsilo.files.durable import make_private_directory, read_private, remove_durably, write_durably
from fedsilo.protocol.codec import Buffer
from fedsilo.protocol.errors import FedSiloError, NotFoundError, OperationError
from fedsilo.protocol.methods import TASKS
from silo.link import LinkMessage
from silo.trainer.adapters import TrainedState
from silo.trainer.agreement import PREFIX
from silo.trainer.data import PromptSet
from silo.trainer.grpo import Answer
from silo.trainer.run import OpenStep, OwnAnswers, Position, Run
from silo.trainer.scale_out import Processes

# Raised whenever facts or tensors are laid out otherwise, so that another version's state is refused and not misread.
FORMAT = 2
FOLDER, FILE = "session", "state"
_MAC_BYTES = 32
_BODY = "answer.body"


class StateRefused(OperationError):
    """A kept state cannot be gone on from; the message says why. The round is to be started over."""

    default_code = "STATE_REFUSED"


@dataclass(frozen=True)
class AnsweredTask:
    """A finished task and what was answered: fields of the two link messages, and the answer's body."""

    task: dict[str, Any]
    task_body_sha256: str
    answer: dict[str, Any]
    body: Buffer

    def answers(self, task: Mapping[str, Any], body: Buffer) -> bool:
        """Return whether this is the answer to that task, given once more."""
        return dict(task) == self.task and hashlib.sha256(body).hexdigest() == self.task_body_sha256


@dataclass(frozen=True)
class SessionState:
    """State of a session. facts: JSON. tensors: on the CPU, by name. answered: the last task with its answer, for
    whoever speaks to a guard.

    What a method may rely on: `facts["position"]` is {task, round, step}; the rest is between `state_of` and `restore`.
    """

    facts: dict[str, Any]
    tensors: dict[str, Tensor]
    answered: AnsweredTask | None = None

    @property
    def position(self) -> Position:
        return Position(**self.facts["position"])


def state_of(run: Run) -> SessionState:
    """Copies, so that the run may go on. Raises OperationError: no task has changed anything yet."""
    if run.position is None:
        raise OperationError("no adapter was loaded, so there is no state to keep")
    agreed, agreement_tensors = run.agreement.state()
    facts = {
        "format": FORMAT,
        "run": run.plan.run,
        "plan": run.plan.digest,
        "silo": run.material.silo,
        "split": run.split.digest,
        "position": dataclasses.asdict(run.position),
        "base_digest": run.base_digest,
        "donors_trained": run.donors_trained,
        "open_step": None if run.open_step is None else _open_step_fields(run.open_step),
        "agreement": agreed,
        "surroundings": surroundings(run.adapter, run.processes),
    }
    return SessionState(facts, run.adapter.state() | run.learner.state() | agreement_tensors)


def restore(run: Run, state: SessionState) -> None:
    """Make a run that has just begun stand where the state was taken. Raises StateRefused: nothing was changed."""
    facts, silo = state.facts, run.material.silo
    for name, mine in (("format", FORMAT), ("run", run.plan.run), ("plan", run.plan.digest), ("silo", silo)):
        if facts.get(name) != mine:
            raise StateRefused(f"the kept state is of {name} {str(facts.get(name))[:64]!r}, not {str(mine)[:64]!r}")
    if facts.get("split") != run.split.digest:
        raise StateRefused("the private rows, or which of them are held out, are not those of the kept state")
    try:
        run.adapter.take_turn(state.position.round)
    except (KeyError, TypeError) as error:
        raise StateRefused(f"the kept state lacks or misstates {error}") from error
    adapter_names, shapes = run.adapter.state(), {name: tuple(each.shape) for name, each in state.tensors.items()}
    lacking = sorted(name for name, each in adapter_names.items() if shapes.get(name) != tuple(each.shape))
    if lacking:
        raise StateRefused(f"the kept state has no tensor {lacking[0]!r} of this schema's shape")
    try:
        opened = None if facts["open_step"] is None else _open_step_from(facts["open_step"], run.public)
        position, donors_trained = Position(**facts["position"]), int(facts["donors_trained"])
        base_digest = str(facts["base_digest"])
        others = {name: each for name, each in state.tensors.items() if name not in adapter_names}
        restore_watch = run.agreement.ready_to_restore(facts["agreement"], others)
        run.learner.restore({name: each for name, each in others.items() if not name.startswith(PREFIX)})
    except (KeyError, TypeError, ValueError) as error:
        raise StateRefused(f"the kept state lacks or misstates {error}") from error
    restore_watch()
    run.adapter.restore(state.tensors)
    run.base_digest, run.open_step, run.donors_trained, run.position = base_digest, opened, donors_trained, position


def surroundings(adapter: TrainedState, processes: int) -> dict[str, Any]:
    """Return the versions and devices on which equal bits depend, besides the state itself."""
    weight = adapter.decoder.embedding
    return {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "processes": processes,
        "device": weight.device.type,
        "dtype": str(weight.dtype),
        "machine": os.uname().nodename if weight.device.type == "cpu" else torch.cuda.get_device_name(weight.device),
    }


def same_surroundings(state: SessionState, adapter: TrainedState, processes: int) -> bool:
    """Return whether what follows has the bits of an undisturbed run, and not only its values to rounding."""
    return bool(state.facts.get("surroundings") == surroundings(adapter, processes))


def _open_step_fields(opened: OpenStep) -> dict[str, Any]:
    own = [{"row": one.prompt.row, "answers": [_answer_fields(each) for each in one.answers]} for one in opened.own]
    return {"round": opened.round, "step": opened.step, "offer": opened.offer, "own": own}


def _answer_fields(one: Answer) -> list[Any]:
    return [list(one.ids), one.text, one.finished, one.reward, one.correct, *([list(one.logp)] if one.logp else [])]


def _open_step_from(fields: Mapping[str, Any], public: PromptSet) -> OpenStep:
    own = [
        OwnAnswers(
            public.by_row[int(one["row"])],
            tuple(
                Answer(
                    tuple(map(int, ids)),
                    str(text),
                    bool(finished),
                    float(reward),
                    correct=bool(correct),
                    logp=tuple(float(each) for values in logp for each in values),
                )
                for ids, text, finished, reward, correct, *logp in one["answers"]
            ),
        )
        for one in fields["own"]
    ]
    return OpenStep(int(fields["round"]), int(fields["step"]), str(fields["offer"]), tuple(own))


# ---- the file ----------------------------------------------------------------------------------------


class StateFile:
    """The file in which a trainer keeps its state between two tasks.

    Args:
        scratch: the trainer's own folder.
        site_secret: keys the file; another site's, or a changed one, is refused.
        group: the processes that train together, of which process 0 writes, and all go on from what it reads.
    """

    def __init__(self, scratch: Path, site_secret: bytes, group: Processes | None = None) -> None:
        self.path = scratch / FOLDER / FILE
        self.is_written_here = group is None or group.rank == 0  # the others need not so much as make the copies
        self._group = group
        self._key = hmac.new(site_secret, b"fedsilo session state", hashlib.sha256).digest()

    def save(self, state: SessionState) -> None:
        """Write the state. Raises OperationError, UsageError: it cannot be written; the earlier file stays."""
        if not self.is_written_here:
            return
        make_private_directory(self.path.parent)
        content = content_of(state)
        write_durably(self.path, content, mode=0o600, tail=hmac.digest(self._key, content, "sha256"))

    def load(self) -> SessionState | None:
        """Return the state; None: there is none. Raises StateRefused, NotAllowedError: what is there cannot be gone on
        from."""
        data = self.read()
        return None if data is None else from_bytes(data, self._key)

    def read(self) -> bytes | None:
        """Return the file's bytes; None: there is none. Raises NotAllowedError: others may read or write it, or it is
        no plain file. Of several processes all raise StateRefused."""
        if self._group is None:
            return self._read()
        data, trouble = None, ""
        if self.is_written_here:
            try:
                data = self._read()
            except FedSiloError as error:
                trouble = error.message
        there, trouble = self._group.gather([data is not None, trouble])[0]
        if trouble:
            raise StateRefused(trouble)
        return self._group.broadcast(data or b"") if there else None

    def _read(self) -> bytes | None:
        try:
            return read_private(self.path)
        except NotFoundError:
            return None

    def discard(self) -> None:
        """Remove the file. Raises OperationError."""
        if self.is_written_here and self.path.parent.is_dir():
            remove_durably(self.path)


def to_bytes(state: SessionState, key: bytes) -> bytes:
    """`content_of`, then HMAC-SHA-256 of it."""
    content = content_of(state)
    return content + hmac.digest(key, content, "sha256")


def content_of(state: SessionState) -> bytes:
    """A safetensors file whose metadata hold the facts as JSON."""
    answered, tensors = state.answered, dict(state.tensors)
    answer: dict[str, Any] | None = None
    if answered is not None:
        answer = {"task": answered.task, "task_body_sha256": answered.task_body_sha256, "answer": answered.answer}
        tensors[_BODY] = torch.frombuffer(bytearray(answered.body or b"\0"), dtype=torch.uint8)
        answer["body_bytes"] = len(answered.body)
    content: bytes = safetensors.torch.save(tensors, {"facts": json.dumps(state.facts), "given": json.dumps(answer)})
    return content


def from_bytes(data: bytes, key: bytes) -> SessionState:
    """Read a state. Raises StateRefused: it is torn or changed, or was written with another site's key."""
    content = data[:-_MAC_BYTES]
    if not hmac.compare_digest(hmac.digest(key, content, "sha256"), data[-_MAC_BYTES:]):
        raise StateRefused("the kept state is torn or changed, or another site's")
    try:
        header_bytes = int.from_bytes(content[:8], "little")
        metadata = json.loads(content[8 : 8 + header_bytes])["__metadata__"]
        facts, answer = json.loads(metadata["facts"]), json.loads(metadata["given"])
        tensors = safetensors.torch.load(content)
        answered = None
        if answer is not None:
            body = tensors.pop(_BODY).numpy().tobytes()[: answer["body_bytes"]]
            answered = AnsweredTask(answer["task"], answer["task_body_sha256"], answer["answer"], body)
    except (KeyError, TypeError, ValueError, safetensors.SafetensorError) as error:
        raise StateRefused(f"the kept state cannot be read: {str(error)[:200]}") from error
    return SessionState(facts, tensors, answered)


class Resumable(Protocol):
    """A session, as far as its state is kept and gone on from."""

    def state(self) -> SessionState: ...
    def restore(self, state: SessionState) -> bool: ...


class StateStore:
    """The state of a session on disk, kept after each task.

    Args:
        session: whose state it is.
        file: where it is kept.
    """

    def __init__(self, session: Resumable, file: StateFile) -> None:
        self._session = session
        self._file = file
        self._again: AnsweredTask | None = None

    def begin(self, *, resume: bool) -> dict[str, Any]:
        """After `begin_run`: go on from what is kept, or forget it.

        Returns:
            Fields of `planned`, none unless `resume`: `resumed` {task, round, step, exact}, or null and `not_resumed`,
            a sentence. exact: what follows has the bits of an undisturbed run.
        """
        try:
            if not resume:
                self._file.discard()
                return {}
            state = self._file.load()
            if state is None:
                return {"resumed": None, "not_resumed": "no state was kept"}
            exact = self._session.restore(state)
        except FedSiloError as error:
            return {"resumed": None, "not_resumed": error.message} if resume else {}
        self._again = state.answered
        return {"resumed": {**dataclasses.asdict(state.position), "exact": exact}}

    def answer_to(self, task: LinkMessage) -> LinkMessage | None:
        """The answer to a task that was done before the trainer was killed, if the guard asks for that one again."""
        answered, self._again = self._again, None
        if answered is None or not answered.answers(task.fields, task.body):
            return None
        return LinkMessage("done", answered.answer, answered.body)

    def keep(self, task: LinkMessage, answer: LinkMessage) -> None:
        """Before the answer goes out. A disk that refuses costs the state and not the step: that is said in the log."""
        kind = TASKS.get(str(task.fields.get("task")))
        if kind is None or not kind.changes or not self._file.is_written_here:
            return
        answered = AnsweredTask(task.fields, hashlib.sha256(task.body).hexdigest(), answer.fields, answer.body)
        try:
            self._file.save(dataclasses.replace(self._session.state(), answered=answered))
        except OperationError as error:
            with contextlib.suppress(OSError):  # the log may lie on the same disk
                sys.stderr.write(f"warning: the session's state is not kept: {error.message}\n")


def state_store(
    session: Resumable, scratch: Path | None, site_secret: bytes, group: Processes | None = None
) -> StateStore | None:
    """Return the state kept in a scratch folder; None without one: then nothing is kept, and a killed trainer starts
    the round over."""
    return None if scratch is None else StateStore(session, StateFile(scratch, site_secret, group))
