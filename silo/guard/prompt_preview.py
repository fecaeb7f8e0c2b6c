"""Asks a process behind the trainer's walls what becomes of the site's prompts: token lengths, topics, a few as text.

Only `silo check` asks. The answer comes from a process that has rendered a model folder's template (threat T22), so of
it nothing is taken but numbers and texts of the expected form, and who shows a text makes it printable first (T37).
What this does not stop: where the machine builds no walls (`waived`), a template that breaks out of transformers'
sandbox may do what the person may who runs `silo check`.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fedsilo.edge.prompt_template import read_template
from fedsilo.treaty.errors import OperationError, UsageError
from silo.config import SiloConfig
from silo.guard import isolation
from silo.guard.startup import never_shown
from silo.guard.supervisor import end_process_group
from silo.guard.trainer_environment import trainer_environment

TIMEOUT_SECONDS = 600.0
ANSWER_BYTES_MAX = 16 << 20
SETS = ("private", "public", "held_out")


@dataclass(frozen=True)
class Lengths:
    """Of one set. Quantiles: smallest, median, 90 %, 99 %, largest. `topics`: rows by topic. The rest counts prompts
    (`silo.trainer.preview.preview`)."""

    rows: int
    prompt_tokens: tuple[int, ...]
    answer_tokens: tuple[int, ...]
    overlong: int
    topics: Mapping[str, int]
    ended: int = 0
    alike: int = 0
    without_text: int = 0


@dataclass(frozen=True)
class Shown:
    """A private prompt as the model reads it, cut where it is long."""

    id: str
    file: str
    line: int
    tokens: int
    text: str


@dataclass(frozen=True)
class Preview:
    sets: Mapping[str, Lengths]
    prompts: tuple[Shown, ...]


def preview(config: SiloConfig, *, max_prompt_tokens: int, show: int) -> Preview:
    """Takes seconds, and some ten more for each 10,000 rows.

    Args:
        config: the site.
        max_prompt_tokens: of the plan; longer prompts are counted.
        show: so many prompts as text.

    Raises:
        UsageError: a file, the tokenizer or the template cannot be used.
        OperationError: no process could be started, or it gave no answer.
    """
    request = {
        "model": str(config.model.path),
        "template": read_template(config.data.template, config.model.path).text,
        "private": [str(path) for path in config.data.private],
        "fields": config.data.fields.model_dump(),
        "verifier": config.data.verifier,
        "public": str(config.data.public.path),
        "held_out": str(config.data.held_out.path),
        "max_prompt_tokens": max_prompt_tokens,
        "show": show,
    }
    rung = isolation.best_rung() if config.trainer.isolation in ("auto", "container") else config.trainer.isolation
    python = str(config.trainer.python or sys.executable)
    with (
        tempfile.TemporaryDirectory(prefix="fedsilo-check-") as scratch,
        tempfile.TemporaryFile() as question,
        tempfile.TemporaryFile() as answer,
    ):
        question.write(json.dumps(request).encode())
        question.seek(0)
        try:
            process = isolation.launch_walled(
                [python, "-P", "-m", "silo.trainer.preview"],
                rung=rung,
                readable=[
                    config.model.path, *config.data.private, config.data.public.path, config.data.held_out.path,
                ],
                writable=[Path(scratch)],
                env=trainer_environment(os.environ, threads=1, scratch=Path(scratch)),
                never=never_shown(config),
                accelerators=False,
                stdin=question,
                stdout=answer,
                stderr=None,
            )  # fmt: skip
        except (OSError, ValueError) as error:
            raise OperationError(f"the prompts cannot be rendered: {error}", code="TRAINER_START") from error
        end_process_group(process, TIMEOUT_SECONDS)
        answer.seek(0)
        content = answer.read(ANSWER_BYTES_MAX + 1)
    try:
        told = json.loads(content)
        if "error" in told:
            fault = {name: str(told["error"][name])[:500] for name in ("message", "hint", "code")}
            raise UsageError(fault["message"], hint=fault["hint"], code=fault["code"])
        return _preview_of(told)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise OperationError(
            f"the process that renders prompts ended with status {process.returncode} and no answer"
        ) from error


def _preview_of(told: Any) -> Preview:
    sets = {
        name: Lengths(
            int(told["sets"][name]["rows"]),
            tuple(int(each) for each in told["sets"][name]["prompt_tokens"]),
            tuple(int(each) for each in told["sets"][name]["answer_tokens"]),
            int(told["sets"][name]["overlong"]),
            {str(topic): int(rows) for topic, rows in told["sets"][name]["topics"].items()},
            int(told["sets"][name]["ended"]),
            int(told["sets"][name]["alike"]),
            int(told["sets"][name]["without_text"]),
        )
        for name in SETS
    }
    prompts = [
        Shown(str(each["id"]), str(each["file"]), int(each["line"]), int(each["tokens"]), str(each["text"]))
        for each in told["prompts"]
    ]
    return Preview(sets, tuple(prompts))


def as_fields(found: Preview, *, with_prompts: bool) -> dict[str, Any]:
    """For --json. Without prompts, since what is printed there tends to be kept by other programs."""
    fields: dict[str, Any] = {"sets": {name: asdict(each) for name, each in found.sets.items()}}
    return fields | ({"prompts": [asdict(each) for each in found.prompts]} if with_prompts else {})
