"""The guard's own view of the public set: which answers verify, and how many tokens they have.

The guard grades answers again from its own copy of the public file (design 4.2), so a trainer that calls a wrong answer
right, or hides text in an answer, does not decide what leaves. Grading runs in a child process that can be killed, and
all answers of a message together take no longer than one budget.
Does not stop: private text inside an answer that is also correct (threat model N1, N3).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from fedsilo.files.task_files import TaskFile
from fedsilo.grading.answers import AnswerGrading, Place
from fedsilo.protocol._generated import federation_pb2 as pb


class Answer(NamedTuple):
    """row: of the public set, whose prompt it answers. silo: that wrote it."""

    row: int
    text: str
    silo: str


@dataclass(frozen=True)
class PublicView:
    """The public file of this site, graders for its verifier, and a token counter of the site's own tokenizer."""

    tasks: TaskFile
    grading: AnswerGrading
    count_tokens: Callable[[str], int]

    def judge(self, answers: Sequence[Answer], place: Place) -> tuple[tuple[bool | None, ...], tuple[int, ...]]:
        """Verdict and token count of each answer. It may take as long as the budget for so many answers of one silo.

        Args:
            answers: in the order of the message.
            place: of the step that they answer.

        Returns:
            Whether each answer is correct, None where it could not be graded in time, and its number of tokens. A row
            that does not exist counts as wrong.
        """
        rows, verdicts = self.tasks.rows, list[bool | None]([False] * len(answers))
        of_silo: dict[str, list[int]] = {}
        for i, answer in enumerate(answers):
            if answer.row < len(rows):
                of_silo.setdefault(answer.silo, []).append(i)
        pairs = {
            silo: [(answers[i].text, rows[answers[i].row].answer) for i in known] for silo, known in of_silo.items()
        }
        for silo, found in self.grading.grade_together(place, pairs).items():
            for i, verdict in zip(of_silo[silo], found, strict=True):
                verdicts[i] = verdict
        return tuple(verdicts), self.tokens(answer.text for answer in answers)

    def tokens(self, texts: Iterable[str]) -> tuple[int, ...]:
        return tuple(self.count_tokens(text) for text in texts)

    @property
    def topics(self) -> frozenset[str]:
        return frozenset(task.topic for task in self.tasks.rows)


def answers_of(body: pb.PublicResponses, silo: str) -> list[Answer]:
    """Every response of a silo's message, in message order."""
    return [Answer(row.prompt_index, response.text, silo) for row in body.prompts for response in row.responses]


def places_by_row(body: pb.PublicResponses, places: Sequence[int]) -> dict[int, list[int]]:
    """Where each response that is left stood among those to its prompt, by row of the public set.

    Args:
        body: the message as offered.
        places: positions of the responses that are left, in message order.
    """
    left, first, found = set(places), 0, dict[int, list[int]]()
    for prompt in body.prompts:
        found[prompt.prompt_index] = [place for place in range(len(prompt.responses)) if first + place in left]
        first += len(prompt.responses)
    return found


def donated_answers_of(body: pb.PublicDonors) -> list[Answer]:
    """Every donor that carries its text; what the receiver wrote itself has none."""
    return [
        Answer(row.prompt_index, donor.response.text, donor.origin)
        for row in body.prompts
        for donor in row.donors
        if donor.HasField("response")
    ]


def token_counter(model_folder: Path) -> Callable[[str], int]:
    """Counts tokens with the model folder's own `tokenizer.json`, without special tokens and without torch."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model_folder / "tokenizer.json"))

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False).ids)

    return count
