"""The guard's own view of the public set: which answers verify, and how many tokens they have.

The guard grades answers again from its own copy of the public file (design 4.2), so a trainer that calls a wrong answer
right, or hides text in an answer, does not decide what leaves. Grading runs in a child process that can be killed.
Does not stop: private text inside an answer that is also correct (threat model N1, N3).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from fedsilo.edge.task_files import TaskFile
from fedsilo.treaty.wire._generated import federation_pb2 as pb


class Verdict(Protocol):
    @property
    def correct(self) -> bool: ...


class Grader(Protocol):
    """What the gate needs of `fedsilo.edge.grading_process.GradingProcess`."""

    def grade_many(self, pairs: Sequence[tuple[str, str]]) -> Sequence[Verdict]: ...


@dataclass(frozen=True)
class PublicView:
    """The public file of this site, a grader for its verifier, and a token counter of the site's own tokenizer."""

    tasks: TaskFile
    grader: Grader
    count_tokens: Callable[[str], int]

    def judge(self, answers: Iterable[tuple[int, str]]) -> tuple[tuple[bool, ...], tuple[int, ...]]:
        """Verdict and token count of each answer.

        Args:
            answers: (row of the public set, text), in the order of the message.

        Returns:
            One boolean and one token count per answer. A row that does not exist counts as wrong.
        """
        answers = list(answers)
        rows = self.tasks.rows
        known = [(text, rows[index].answer) for index, text in answers if index < len(rows)]
        graded = iter(self.grader.grade_many(known) if known else ())
        verdicts = tuple(index < len(rows) and bool(next(graded).correct) for index, _ in answers)
        return verdicts, tuple(self.count_tokens(text) for _, text in answers)

    @property
    def topics(self) -> frozenset[str]:
        return frozenset(task.topic for task in self.tasks.rows)


def answers_of(body: pb.PublicResponses) -> list[tuple[int, str]]:
    """(prompt index, text) of every response, in message order."""
    return [(row.prompt_index, response.text) for row in body.prompts for response in row.responses]


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


def donated_answers_of(body: pb.PublicDonors) -> list[tuple[int, str]]:
    """(prompt index, text) of every donor that carries its text; what the receiver wrote itself has none."""
    return [
        (row.prompt_index, donor.response.text)
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
