"""What a worker does with its session's state: keep it after each task, go on from it, answer its last task again."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import sys
from pathlib import Path
from typing import Any

from fedsilo.protocol.errors import FedSiloError, OperationError
from fedsilo.protocol.method import CHANGING
from silo.link import LinkMessage
from silo.trainer.resume import Given, StateFile
from silo.trainer.scale_out import Processes
from silo.trainer.session import Session
from silo.trainer.shared_work import SharedStateFile


class KeptState:
    """Args:
    session: whose state it is.
    file: where it is kept.
    """

    def __init__(self, session: Session, file: StateFile) -> None:
        self._session = session
        self._file = file
        self._again: Given | None = None

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
        self._again = state.given
        return {"resumed": {**dataclasses.asdict(state.position), "exact": exact}}

    def answer_to(self, task: LinkMessage) -> LinkMessage | None:
        """The answer to a task that was done before the trainer was killed, if the guard asks for that one again."""
        given, self._again = self._again, None
        if given is None or not given.answers(task.fields, task.body):
            return None
        return LinkMessage("done", given.answer, given.body)

    def keep(self, task: LinkMessage, answer: LinkMessage) -> None:
        """Before the answer goes out. A disk that refuses costs the state and not the step: that is said in the log."""
        if task.fields.get("task") not in CHANGING or not self._file.is_written_here:
            return
        given = Given(task.fields, hashlib.sha256(task.body).hexdigest(), answer.fields, answer.body)
        try:
            self._file.save(dataclasses.replace(self._session.state(), given=given))
        except OperationError as error:
            with contextlib.suppress(OSError):  # the log may lie on the same disk
                sys.stderr.write(f"warning: the session's state is not kept: {error.message}\n")


def kept_state(
    session: Session, scratch: Path | None, site_secret: bytes, group: Processes | None = None
) -> KeptState | None:
    """None without a scratch folder: then nothing is kept, and a killed trainer starts the round over."""
    if scratch is None:
        return None
    file = StateFile(scratch, site_secret)
    return KeptState(session, file if group is None else SharedStateFile(file, group))
