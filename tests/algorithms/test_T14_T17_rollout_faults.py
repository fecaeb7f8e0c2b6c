"""A trainer whose rollout is broken, in front of the real gate: what belongs to a private prompt, what ids could say.

The engine is a fake; session, message, gate, screens and index are the real ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from fedsilo.protocol import codec
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.tasks import GeneratePublic, LoadAdapter
from silo.guard.messages import Allowed, Denied
from silo.trainer.agreement import Limits
from silo.trainer.rollout.engine import Question, Rollout
from silo.trainer.session import Session
from tests.algorithms.tiny import Row, make_session, start_payload
from tests.policies import setting
from tests.simulated import screening as site

pytestmark = pytest.mark.torch

ALIAS = 100_000  # an id that much higher decodes to the same word: a tokenisation that no encoder makes
END = 1


class WordCodec:
    """One id a word; each word has a second id beside the one that encoding gives."""

    def __init__(self) -> None:
        self.stop_ids, self.end_id = frozenset({END}), END
        self._words = ["<pad>", "<end>"]

    def prompt_ids(self, prompt: str) -> tuple[int, ...]:
        return self.answer_ids(prompt, finished=False)

    def answer_ids(self, text: str, *, finished: bool) -> tuple[int, ...]:
        for word in text.split():
            if word not in self._words:
                self._words.append(word)
        return (*(self._words.index(word) for word in text.split()), *((END,) if finished else ()))

    def text_of(self, ids: Sequence[int]) -> str:
        return " ".join(self._words[number % ALIAS] for number in ids if number != END)


class Engine:
    """Answers every question with the same texts, as ids. `leaks`: the place in the batch that gets a foreign one."""

    def __init__(
        self, words: WordCodec, texts: Sequence[str], *, leaks: dict[int, str], name: str, alias: int = 0
    ) -> None:
        self._words, self._texts, self._leaks, self._name, self._alias = words, texts, leaks, name, alias

    def use(self, source: str) -> None: ...

    def rest(self) -> None: ...

    def generate(self, questions: Sequence[Question], **_settings: Any) -> list[tuple[Rollout, ...]]:
        answers = []
        for place, question in enumerate(questions):
            texts = [self._texts[sample % len(self._texts)] for sample in range(len(question.draws))]
            if place in self._leaks:
                texts[0] = self._leaks[place]
            answers.append(tuple(Rollout(self._ids(text), True, adapter=self._name) for text in texts))
        return answers

    def _ids(self, text: str) -> tuple[int, ...]:
        ids = self._words.answer_ids(text, finished=True)
        return (*(number + self._alias for number in ids[:-1]), END)


def right(pairs: Any) -> list[bool]:
    return [text.endswith(reference) for text, reference in pairs]


def public_message(*, leaks: dict[int, str] | None = None, alias: int = 0, grader: Any = right) -> pb.PublicResponses:
    """What a trainer with this engine offers for the rows 1, 4 and 7 of the public set."""
    words = WordCodec()
    plan = setting.PLAN.model_copy(
        update={"rollout": setting.PLAN.rollout.model_copy(update={"max_prompt_tokens": 24, "max_new_tokens": 32})}
    )
    session: Session
    session, shape = make_session(
        "hospital_a", plan, codec=words,
        private=[Row(task.id, task.prompt, task.answer) for task in site.PRIVATE],
        public=[Row(str(number), f"prompt {number}", "12") for number in range(10)],
        public_grader=grader, private_grader=right, held_out_grader=right,
        agreement=Limits(share=0.0),  # nobody drew these answers, so they have no log-probabilities
    )  # fmt: skip
    payload, digest = start_payload(shape)
    session.carry_out(LoadAdapter(1, digest), payload)
    assert session._run is not None
    session._run.engine = Engine(
        words, ["it is 12", "it is 9"], leaks=leaks or {}, name=session._run.adapter.name(), alias=alias
    )
    return codec.decode(pb.PublicResponses, session.carry_out(GeneratePublic(1, 2, (1, 4, 7), "correct")).body)


def offered(folder: Path, message: pb.PublicResponses, names: Sequence[str] = ("overlap",)) -> Any:
    with closing(site.bench(folder, site.policy(names))) as bench:
        return bench.gate.offer(bench.judge.view.place("public.responses", 1, 2), message)


def texts(payload: bytes) -> list[str]:
    return [
        response.text for prompt in codec.decode(pb.PublicResponses, payload).prompts for response in prompt.responses
    ]


def test_T14_a_private_text_in_a_public_batch_is_withheld_by_the_overlap_screen(tmp_path: Path) -> None:
    """The cross-batch fault: row 4 is answered with the tokens of a private prompt, and ends in the right answer."""
    leaked = f"{site.PRIVATE[0].prompt} 12"
    faulty = public_message(leaks={1: leaked})
    assert leaked in texts(codec.encode(faulty))  # graded right here, so the trainer offers it
    kept = offered(tmp_path / "screened", faulty)
    assert isinstance(kept, Allowed)
    # Two prompts keep both right answers, the faulty one keeps the one that is its own.
    assert texts(kept.payload) == ["it is 12"] * 5
    sound = offered(tmp_path / "sound", public_message())
    assert isinstance(sound, Allowed)
    assert texts(sound.payload) == ["it is 12"] * 6
    unscreened = offered(tmp_path / "unscreened", faulty, ("charset",))
    assert isinstance(unscreened, Allowed)
    assert leaked in texts(unscreened.payload)


def test_T14_an_answer_to_another_prompt_is_denied_by_the_binding_of_answers_to_rows(tmp_path: Path) -> None:
    """A whole private answer under a public row, called right by a trainer that has mixed its batches up."""
    mixed = public_message(
        leaks={2: site.PRIVATE[1].prompt}, grader=lambda pairs: [not text.endswith("9") for text, _ in pairs]
    )
    denied = offered(tmp_path, mixed, ("charset",))
    assert isinstance(denied, Denied)
    assert denied.decision.reasons == ("NOT_VERIFIED",)


def test_T17_ids_that_no_encoder_makes_leave_no_trace_on_the_wire(tmp_path: Path) -> None:
    plain, odd = public_message(), public_message(alias=ALIAS)
    assert codec.encode(plain) == codec.encode(odd)
    first, second = offered(tmp_path / "plain", plain), offered(tmp_path / "odd", odd)
    assert isinstance(first, Allowed)
    assert isinstance(second, Allowed)
    assert first.payload == second.payload
