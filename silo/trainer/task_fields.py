"""A task as a message of the link names it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.codec import Buffer, decode
from fedsilo.protocol.errors import OperationError
from fedsilo.protocol.method import (
    AnswerAhead,
    Evaluate,
    ExportDelta,
    GeneratePublic,
    LoadAdapter,
    PrivateStep,
    PublicStep,
    TrainerTask,
)
from silo.measuring import MeasureHoldout, PromptSet

_SETS: Mapping[str, PromptSet] = {"private": "private", "held_out": "held_out"}


def task_from_fields(fields: Mapping[str, Any], body: Buffer) -> TrainerTask | MeasureHoldout:
    """The task a link message names.

    Raises:
        OperationError: no such task, or its fields are not the task's.
        PeerError: the donors do not parse.
    """
    try:
        round_number, step = int(fields["round"]), int(fields.get("step", 0))
        match fields["task"]:
            case "LoadAdapter":
                return LoadAdapter(round_number, str(fields["digest"]))
            case "PrivateStep":
                return PrivateStep(round_number, step, tuple(int(row) for row in fields["rows"]))
            case "GeneratePublic":
                indices = tuple(int(index) for index in fields["prompt_indices"])
                return GeneratePublic(round_number, step, indices, str(fields["offer"]))
            case "PublicStep":
                return PublicStep(round_number, step, str(fields["swap"]), decode(pb.PublicDonors, body))
            case "AnswerAhead":
                indices = tuple(int(index) for index in fields["prompt_indices"])
                return AnswerAhead(round_number, int(fields["for_step"]), indices)
            case "ExportDelta":
                return ExportDelta(round_number)
            case "Evaluate":
                return Evaluate(round_number, str(fields["digest"]))
            case "MeasureHoldout":
                return MeasureHoldout(int(fields["samples"]), round_number, _SETS[str(fields.get("rows", "private"))])
    except (KeyError, TypeError, ValueError) as error:
        raise OperationError(f"a task's field is missing or of another type: {error}", code="BAD_TASK") from error
    raise OperationError(f"there is no task {str(fields['task'])[:40]!r}", code="BAD_TASK")
