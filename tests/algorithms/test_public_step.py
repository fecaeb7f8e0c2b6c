"""The receiver's half of the swap: Balanced and Random on hand-made groups, and donors nobody should train on."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.randomness import generator
from fedsilo.protocol.swap import balanced_donors, random_group
from silo.trainer.data import Prompt
from silo.trainer.grpo import Answer, group_advantages
from silo.trainer.run import OwnAnswers
from silo.trainer.tasks.public_answers import offered_answers, responses_message
from silo.trainer.tasks.public_step import DonorIntake
from tests.algorithms.tiny import make_codec

pytestmark = pytest.mark.torch
CODEC = make_codec()
K = 8


def grader(pairs: Sequence[tuple[str, str]]) -> list[bool]:
    return [text.startswith("1") for text, _ in pairs]


def own_answers(correct: int, samples: int = K, row: int = 0) -> OwnAnswers:
    """Wrong ones first, so that places among all and among the correct ones differ."""
    texts = [f"0{place}" for place in range(samples - correct)] + [f"1{place}" for place in range(correct)]
    answers = tuple(Answer(CODEC.answer_ids(text, finished=True), text, True, float(text[0] == "1")) for text in texts)
    return OwnAnswers(Prompt(row, f"q{row}", (5,), "1", "all"), answers)


def intake(silo: str = "s0", max_new_tokens: int = 6) -> DonorIntake:
    return DonorIntake(silo, CODEC, grader, max_new_tokens)


def donor(text: str, origin: str = "s1", position: int = 0, finish: pb.Finish = pb.FINISH_STOP) -> pb.Donor:
    return pb.Donor(origin=origin, position=position, response=pb.Response(text=text, finish=finish))


def balanced_for(counts: tuple[int, ...], receiver: int) -> tuple[OwnAnswers, tuple[Answer, ...]]:
    """Coordinator's draw and receiver's intake together: (before, after)."""
    owns = [own_answers(count) for count in counts]
    correct = {f"s{n}": [answer.text for answer in offered_answers(own, "correct")] for n, own in enumerate(owns)}
    drawn = balanced_donors(correct, f"s{receiver}", K, generator(receiver))
    donors = {0: [donor(text, origin, position) for origin, position, text in drawn]}
    groups, _ = intake(f"s{receiver}").balanced([owns[receiver]], donors, lambda prompt: generator(7))
    return owns[receiver], groups[0].answers


@pytest.mark.parametrize(
    ("counts", "replaced"), [((0, 4, 8, 1), (4, 0, 0, 3)), ((0, 0, 0, 1), (1, 1, 1, 0)), ((3,), (0,))]
)
def test_balanced_by_hand(counts: tuple[int, ...], replaced: tuple[int, ...]) -> None:
    for receiver, expected in enumerate(replaced):
        own, after = balanced_for(counts, receiver)
        assert sum(bool(answer.donor) for answer in after) == expected
        if expected == 0:
            assert after == own.answers
        assert len(after) == K


def test_a_group_filled_to_half_has_the_advantage_of_half() -> None:
    import torch

    _, after = balanced_for((0, 4, 8, 1), 0)
    rewards = torch.tensor([answer.reward for answer in after])
    assert int(rewards.sum()) == 4
    assert group_advantages(rewards, std="sample", epsilon=1e-6).abs().tolist() == pytest.approx([0.9354] * 8, abs=1e-4)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, K), min_size=1, max_size=5))
def test_balanced_properties(counts: list[int]) -> None:
    for receiver in range(len(counts)):
        own, after = balanced_for(tuple(counts), receiver)
        correct_after = sum(answer.reward for answer in after)
        assert correct_after <= max(counts[receiver], K // 2)
        assert {answer for answer in own.answers if answer.reward} <= set(after)
        assert len(after) == K
        donors = [answer for answer in after if answer.donor]
        assert all(one.donor != f"s{receiver}" and one.text.startswith("1") for one in donors)
        assert len(donors) <= K // 2
        assert not donors or counts[receiver] < K // 2


def test_wrong_answers_give_way_uniformly() -> None:
    counts = [0] * K
    own = own_answers(1)
    donors = {0: [donor("1", position=place) for place in range(3)]}
    for draw in range(700):
        (group,), _ = intake().balanced([own], donors, lambda prompt, seed=draw: generator(seed))
        for place, answer in enumerate(group.answers):
            counts[place] += bool(answer.donor)
    assert counts[-1] == 0
    assert all(240 < count < 360 for count in counts[:-1])  # 300 expected, standard deviation 13


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (donor("05"), "wrong by the receiver's own grading"),
        (donor("1", origin="s0"), "claims to be an own answer"),
        (donor("111111"), "longer than the plan allows once its end is added"),
        (donor("1<end>1"), "spells a control token"),
        (donor("1", finish=pb.FINISH_UNSPECIFIED), "does not say how it ended"),
        (pb.Donor(origin="s1", position=0), "has no text"),
        (donor("1", origin=""), "is nobody's, and would count as an own answer"),
    ],
)
def test_donor_that_fails_is_dropped_and_its_sender_counted(bad: pb.Donor, why: str) -> None:
    own = own_answers(0)
    (group,), figures = intake().balanced([own], {0: [bad]}, lambda prompt: generator(0))
    assert group.answers == own.answers, why
    assert dict(figures.rejected) == {bad.origin: 1}
    (group,), figures = intake().balanced([own], {0: [bad, donor("12", position=1)]}, lambda prompt: generator(0))
    assert sum(bool(answer.donor) for answer in group.answers) == figures.used == 1


def test_a_donor_listed_twice_is_used_once() -> None:
    _, figures = intake().balanced([own_answers(0)], {0: [donor("1"), donor("1")]}, lambda prompt: generator(0))
    assert (figures.used, dict(figures.rejected)) == (1, {"s1": 1})


def test_more_donors_than_wanted_are_not_used() -> None:
    donors = {0: [donor("1", position=place) for place in range(6)]}
    _, figures = intake().balanced([own_answers(2)], donors, lambda prompt: generator(0))
    assert (figures.wanted, figures.found, figures.used, figures.alphas) == (2, 6, 2, [0.25])


@pytest.mark.parametrize(("samples", "correct", "used"), [(5, 1, 1), (5, 2, 0), (3, 0, 1), (1, 0, 0)])
def test_target_follows_the_silos_own_number_of_answers(samples: int, correct: int, used: int) -> None:
    donors = {0: [donor("1", position=place) for place in range(4)]}
    (group,), figures = intake().balanced([own_answers(correct, samples)], donors, lambda prompt: generator(0))
    assert figures.used == used
    assert len(group.answers) == samples


def test_finished_donors_end_with_the_end_token_and_truncated_ones_do_not() -> None:
    donors = {0: [donor("12"), donor("13", position=1, finish=pb.FINISH_LENGTH)]}
    (group,), _ = intake().balanced([own_answers(0)], donors, lambda prompt: generator(0))
    by_text = {answer.text: answer for answer in group.answers if answer.donor}
    assert by_text["12"].ids == (*CODEC.answer_ids("12", finished=False), CODEC.end_id)
    assert by_text["13"].ids == CODEC.answer_ids("13", finished=False)
    assert not by_text["13"].finished


def test_random_gives_every_silo_the_same_group() -> None:
    owns = {name: own_answers(count) for name, count in (("s0", 1), ("s1", 5), ("s2", 8))}
    pool = {name: list(offered_answers(own, "all")) for name, own in owns.items()}
    drawn = random_group(pool, K, generator(11))
    texts = []
    for name, own in owns.items():
        donors = [
            pb.Donor(origin=origin, position=position) if origin == name else donor(answer.text, origin, position)
            for origin, position, answer in drawn
        ]
        (group,), figures = intake(name).pooled([own], {0: donors}, "all")
        assert not figures.rejected
        assert figures.used == sum(origin != name for origin, _, _ in drawn)
        texts.append([(answer.text, answer.reward, answer.ids) for answer in group.answers])
    assert texts[0] == texts[1] == texts[2]
    assert len(texts[0]) == K


def test_pool_keeps_wrong_donors_and_names_own_answers_by_place() -> None:
    own = own_answers(2)
    donors = [pb.Donor(origin="s0", position=7), donor("05"), pb.Donor(origin="s0", position=8)]
    (group,), figures = intake().pooled([own], {0: donors}, "all")
    assert [(answer.text, answer.reward) for answer in group.answers] == [("11", 1.0), ("05", 0.0)]
    assert dict(figures.rejected) == {"s0": 1}  # there is no ninth own answer


def test_pool_takes_each_own_answer_once_and_never_more_than_k() -> None:
    """Else the coordinator's list would set how much a prompt weighs, and how large an update is."""
    own = own_answers(4)
    whole = [pb.Donor(origin="s0", position=place) for place in range(K)]
    (group,), figures = intake().pooled([own], {0: whole}, "all")
    assert group.answers == own.answers and not figures.rejected
    (group,), figures = intake().pooled([own], {0: [whole[7]] * 40}, "all")
    assert [answer.text for answer in group.answers] == ["13"] and dict(figures.rejected) == {"s0": 39}
    strangers = [donor(f"1{place % 10}", position=place) for place in range(100)]
    (group,), figures = intake().pooled([own], {0: strangers}, "all")
    assert [answer.text for answer in group.answers] == [f"1{place}" for place in range(K)]
    assert (figures.found, figures.used, dict(figures.rejected)) == (100, K, {"s1": 100 - K})
    (group,), figures = intake().pooled([own], {0: [donor("11", origin="")]}, "all")
    assert group.answers == own.answers and dict(figures.rejected) == {"": 1}


@pytest.mark.parametrize(("offer", "texts"), [("correct", ["10", "11"]), ("all", None), ("none", [])])
def test_message_lists_every_prompt_with_its_number_of_answers(offer: str, texts: list[str] | None) -> None:
    own = {0: own_answers(2), 3: own_answers(0, row=3)}
    message = responses_message("ab", (0, 3, 5), own, offer)
    assert [(row.prompt_index, row.samples) for row in message.prompts] == [(0, K), (3, K), (5, 0)]
    expected = [answer.text for answer in own[0].answers] if texts is None else texts
    assert [response.text for response in message.prompts[0].responses] == expected
    assert len(message.prompts[1].responses) == (K if offer == "all" else 0)
