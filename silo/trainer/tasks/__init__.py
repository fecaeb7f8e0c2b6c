"""How each task is carried out: the table of tasks, and the task that a message of the guard names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fedsilo.protocol.codec import Buffer
from fedsilo.protocol.errors import OperationError
from fedsilo.protocol.tasks import (
    AnswerAhead,
    Evaluate,
    EvaluateOwn,
    ExportDelta,
    GeneratePublic,
    LikelihoodStep,
    LoadAdapter,
    LoadOwn,
    LoadReference,
    PrivateStep,
    PublicStep,
    TrainerTask,
)
from silo.measuring import MeasureHoldout
from silo.trainer.run import Done, Run
from silo.trainer.scale_out import BAD_TASK
from silo.trainer.tasks import (
    adapter,
    evaluate,
    likelihood_step,
    private_step,
    public_answers,
    public_step,
)

# A new task is one line here.
CARRIED_OUT: Mapping[type[TrainerTask], Callable[[Run, Any, Buffer], Done]] = {
    LoadAdapter: adapter.load,
    LoadOwn: adapter.load_own,
    LoadReference: adapter.load_reference,
    PrivateStep: private_step.carry_out,
    GeneratePublic: public_answers.generate,
    PublicStep: public_step.carry_out,
    LikelihoodStep: likelihood_step.carry_out,
    AnswerAhead: public_answers.answer_ahead,
    ExportDelta: adapter.export_delta,
    Evaluate: evaluate.evaluate,
    EvaluateOwn: evaluate.evaluate_own,
    MeasureHoldout: evaluate.measure_holdout,
}
_BY_NAME = {kind.name: kind for kind in CARRIED_OUT}


def task_from_fields(fields: Mapping[str, Any], body: Buffer) -> TrainerTask:
    """The task that a link message names.

    Raises:
        OperationError: no such task, or its fields are not the task's.
        PeerError: its body does not parse.
    """
    kind = _BY_NAME.get(str(fields.get("task")))
    if kind is None:
        raise OperationError(f"there is no task {str(fields.get('task'))[:40]!r}", code=BAD_TASK)
    try:
        return kind.read(fields, body)
    except (KeyError, TypeError, ValueError) as error:
        raise OperationError(f"a task's field is missing or of another type: {error}", code=BAD_TASK) from error
