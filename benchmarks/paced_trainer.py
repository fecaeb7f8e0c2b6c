"""A trainer that only takes its time, for `benchmarks.efficiency`: each GRPO step lasts so many seconds, and it knows
the answers to the public prompts. All else is `transport_trainer`'s.

    python -m benchmarks.paced_trainer --address unix:PATH --constant 0.00006103515625 --step-seconds 1.5 --times FILE

It waits instead of computing, so that sites share no processor. FILE gets a line for each task: name, begun, ended.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.transport_trainer import ConstantTrainer, dial_again_and_again
from fedsilo.files.task_files import read_tasks
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.codec import encode
from fedsilo.protocol.plan import plan_from_canonical
from silo.link import LinkMessage, MessageLink

# A quarter of a step is sampling (`benchmarks.grpo_step`); an answer is sampled for held-out prompts, too.
SAMPLING_SHARE = 0.25


class PacedTrainer(ConstantTrainer):
    """Args:
    step_seconds: of a GRPO step, private or public, its sampling among it.
    times: where the tasks' times are written, seconds of the machine's monotonic clock.
    """

    def __init__(self, link: MessageLink, constant: float, step_seconds: float, times: Path) -> None:
        super().__init__(link, constant)
        self._step_seconds, self._times = step_seconds, times
        self._samples, self._step_answers, self._evaluated = 0, 1, 0
        self._references: list[str] = []
        self._public_sha256 = ""

    def _answer(self, message: LinkMessage) -> LinkMessage:
        if message.type == "configure":
            self._references = [row.answer for row in read_tasks(Path(message.fields["public"]["path"])).rows]
        return super()._answer(message)

    def _plan(self, fields: dict[str, Any]) -> LinkMessage:
        answer = super()._plan(fields)
        plan = plan_from_canonical(str(fields["canonical_json"]))
        self._samples, self._public_sha256 = plan.samples_per_prompt, plan.public_set_sha256
        self._step_answers = plan.prompts_per_step * plan.samples_per_prompt
        self._evaluated = plan.evaluation.prompts * plan.evaluation.samples
        return answer

    def _task(self, message: LinkMessage) -> LinkMessage:
        begun = time.monotonic()
        task = str(message.fields["task"])
        answer = super()._task(message)
        if task in ("GeneratePublic", "AnswerAhead"):
            answer = LinkMessage(answer.type, answer.fields, encode(self._responses(message.fields)))
        time.sleep(self._step_seconds * self._share(task))
        with self._times.open("a") as file:
            file.write(f"{task} {begun} {time.monotonic()}\n")
        return answer

    def _share(self, task: str) -> float:
        """Of a step's time."""
        evaluation = SAMPLING_SHARE * self._evaluated / self._step_answers
        shares = {
            "PrivateStep": 1.0, "GeneratePublic": SAMPLING_SHARE, "PublicStep": 1.0 - SAMPLING_SHARE,
            "AnswerAhead": SAMPLING_SHARE, "Evaluate": evaluation,
        }  # fmt: skip
        return shares.get(task, 0.0)

    def _responses(self, fields: dict[str, Any]) -> pb.PublicResponses:
        """Half of the answers right: those are offered."""
        found = pb.PublicResponses(public_set_sha256=self._public_sha256)
        for index in fields["prompt_indices"]:
            row = found.prompts.add(prompt_index=index, samples=self._samples)
            for _ in range(self._samples // 2):
                row.responses.add(text=self._references[index], finish=pb.FINISH_STOP)
        return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--address", required=True, help="the guard: unix:PATH")
    parser.add_argument("--constant", type=float, required=True, help="every number of its update")
    parser.add_argument("--step-seconds", type=float, required=True, help="of a GRPO step")
    parser.add_argument("--times", type=Path, required=True, help="file for the tasks' times")
    given = parser.parse_args(arguments)
    dial_again_and_again(
        given.address, lambda link: PacedTrainer(link, given.constant, given.step_seconds, given.times)
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
