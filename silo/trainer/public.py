"""The trainer's half of a public step: what it offers, how it takes donors in (methods 2.2, 2.3, 2.4).

Donors are untrusted: each is encoded and graded here again. One that fails is dropped, the own answer stays, and
the silo that sent it is counted. Correct own answers are never removed and a silo is never its own donor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.swap import donors_wanted, replaced_positions
from silo.trainer.batch import Answer, Group
from silo.trainer.data import Prompt
from silo.trainer.grading import Grader, grade_distinct
from silo.trainer.text import TextCodec


@dataclass(frozen=True)
class OwnAnswers:
    """This silo's answers to one public prompt of the open step."""

    prompt: Prompt
    answers: tuple[Answer, ...]


@dataclass
class SwapFigures:
    """Counts over the prompts of one public step.

    Attributes:
        wanted: donors Balanced asks for, sum of m.
        found: donors the coordinator sent.
        used: donors trained on.
        rejected: {silo: donors of it that failed here}.
        alphas: m'/K of each prompt (methods 2.8).
    """

    wanted: int = 0
    found: int = 0
    used: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    alphas: list[float] = field(default_factory=list)


def offered_answers(own: OwnAnswers, offer: str) -> tuple[Answer, ...]:
    """What the message holds for this prompt, in the order `Donor.position` counts. offer: correct | all | none."""
    if offer == "correct":
        return tuple(answer for answer in own.answers if answer.correct)
    return own.answers if offer == "all" else ()


def responses_message(
    public_set_sha256: str, indices: Sequence[int], own: Mapping[int, OwnAnswers], offer: str
) -> pb.PublicResponses:
    """Every prompt of the step is listed with K', also one with nothing correct or overlong (methods 2.4)."""
    message = pb.PublicResponses(public_set_sha256=public_set_sha256)
    for index in indices:
        row = message.prompts.add(prompt_index=index)
        if index not in own:
            continue
        row.samples = len(own[index].answers)
        for answer in offered_answers(own[index], offer):
            row.responses.add(text=answer.text, finish=pb.FINISH_STOP if answer.finished else pb.FINISH_LENGTH)
    return message


class DonorIntake:
    """Turns donors into answers this silo may train on.

    Args:
        silo: own name.
        codec: the shared tokenizer.
        grader: own grading of public answers.
        max_new_tokens: a donor that encodes to more is refused.
    """

    def __init__(self, silo: str, codec: TextCodec, grader: Grader, max_new_tokens: int) -> None:
        self._silo = silo
        self._codec = codec
        self._grader = grader
        self._max_new_tokens = max_new_tokens

    def balanced(
        self,
        own: Sequence[OwnAnswers],
        donors: Mapping[int, Sequence[pb.Donor]],
        random_of: Callable[[Prompt], np.random.Generator],
    ) -> tuple[list[Group], SwapFigures]:
        """`swap: replace`: up to m verified donors take the place of wrong own answers, drawn uniformly.

        Args:
            own: this silo's answers, one entry a prompt.
            donors: by prompt index, in the coordinator's order.
            random_of: keyed generator for the choice of the answers that give way.
        """
        figures = SwapFigures()
        graded = self._graded(own, donors, figures)
        groups = []
        for one in own:
            correct = [answer.correct for answer in one.answers]
            wanted = donors_wanted(sum(correct), len(correct))
            good: list[Answer] = []
            for donor, answer in graded[one.prompt.row]:
                if donor.origin == self._silo or answer is None or not answer.correct:
                    figures.rejected[donor.origin] += 1
                elif len(good) < wanted:
                    good.append(answer)
            places = replaced_positions(correct, len(good), random_of(one.prompt))
            answers = list(one.answers)
            for place, answer in zip(places, good, strict=True):
                answers[place] = answer
            groups.append(Group(one.prompt.ids, tuple(answers)))
            figures.wanted += wanted
            figures.used += len(places)
            figures.alphas.append(len(places) / len(answers))
        return groups, figures

    def pooled(
        self, own: Sequence[OwnAnswers], donors: Mapping[int, Sequence[pb.Donor]], offer: str
    ) -> tuple[list[Group], SwapFigures]:
        """`swap: pool`: train on exactly the answers listed; wrong ones belong to the group too (methods 2.2, Random).

        At most K of a prompt count, each once: what a list holds beyond is refused, else its length would set how much
        one prompt weighs, and how much memory the update takes.

        Args:
            own: this silo's answers, one entry a prompt.
            donors: by prompt index, in the coordinator's order.
            offer: what this silo's own message held; own answers are named by their place in it.
        """
        figures = SwapFigures()
        within: dict[int, Sequence[pb.Donor]] = {}
        for one in own:
            listed, most = donors.get(one.prompt.row, ()), len(one.answers)
            within[one.prompt.row] = listed[:most]
            figures.found += sum(donor.origin != self._silo for donor in listed[most:])
            figures.rejected.update(donor.origin for donor in listed[most:])
        graded = self._graded(own, within, figures)
        groups = []
        for one in own:
            left = dict(enumerate(offered_answers(one, offer)))
            answers: list[Answer] = []
            for donor, answer in graded[one.prompt.row]:
                if donor.origin == self._silo and not donor.HasField("response") and donor.position in left:
                    answers.append(left.pop(donor.position))
                elif donor.origin == self._silo or answer is None:
                    figures.rejected[donor.origin] += 1
                else:
                    answers.append(answer)
            # an empty list is a prompt the coordinator pooled nothing for
            group = Group(one.prompt.ids, tuple(answers) or one.answers)
            used = sum(bool(answer.donor) for answer in group.answers)
            groups.append(group)
            figures.used += used
            figures.alphas.append(used / len(group.answers))
        return groups, figures

    def _graded(
        self, own: Sequence[OwnAnswers], donors: Mapping[int, Sequence[pb.Donor]], figures: SwapFigures
    ) -> dict[int, list[tuple[pb.Donor, Answer | None]]]:
        """Donors by prompt row, each encoded and graded here; None where it cannot be used, and for a repeat."""
        listed: list[tuple[int, pb.Donor, Answer | None, str]] = []
        for one in own:
            seen: set[tuple[str, int]] = set()
            for donor in donors.get(one.prompt.row, ()):
                figures.found += donor.origin != self._silo
                repeated = (donor.origin, donor.position) in seen
                seen.add((donor.origin, donor.position))
                answer = None if repeated or donor.origin == self._silo else self._encoded(donor)
                listed.append((one.prompt.row, donor, answer, one.prompt.reference))
        usable = [(answer.text, reference) for _, _, answer, reference in listed if answer is not None]
        marks = iter(grade_distinct(self._grader, usable))
        graded: dict[int, list[tuple[pb.Donor, Answer | None]]] = {one.prompt.row: [] for one in own}
        for row, donor, answer, _ in listed:
            scored = None if answer is None else replace(answer, **next(marks)._asdict())
            graded[row].append((donor, scored))
        return graded

    def _encoded(self, donor: pb.Donor) -> Answer | None:
        if not donor.origin:  # an answer of nobody's counts as an own one
            return None
        if not donor.HasField("response") or donor.response.finish == pb.FINISH_UNSPECIFIED:
            return None
        finished = donor.response.finish == pb.FINISH_STOP
        ids = self._codec.answer_ids(donor.response.text, finished=finished)
        if len(ids) > self._max_new_tokens or self._codec.has_special(ids, finished=finished):
            return None
        return Answer(ids, donor.response.text, finished, donor=donor.origin)
