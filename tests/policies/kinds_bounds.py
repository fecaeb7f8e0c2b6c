"""Every bound of every further kind: (rule, what, policy, a message at the limit, one beyond it)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from fedsilo.protocol._generated import federation_pb2 as pb
from policies.engine import History
from policies.message import Asked
from policies.model import Policy
from tests.policies.kinds import (
    ASKED,
    TAKES,
    Case,
    answers,
    competence_ask,
    directive,
    further_text,
    package,
    policy_named,
    profile,
    reft,
    reft_tensors,
    reward_ask,
    rewards,
    ruleset_text,
    score,
    worth,
)
from tests.policies.setting import COORDINATOR, PLAN, policy_of, with_changes

FURTHER, GRPO, KNEXA, REFT = (policy_named(name) for name in ("further", "fedgrpo", "knexa", "fedreft"))
CENTRAL, HEURISTIC = policy_named("fedid-central"), policy_named("knexa-heuristic")


def changed(old: str, new: str, ruleset: str = "fedgrpo") -> Policy:
    text = further_text() if ruleset == "further" else ruleset_text(ruleset)
    assert old in text, old
    return policy_of(text.replace(old, new, 1))


FEW = changed("exemplars: [5, 100]", "exemplars: [5, 6]")
ASKS_FEW = policy_of(ruleset_text("fedgrpo").replace("exemplars: [5, 100]", "exemplars: [5, 6]"))
FINE_REWARDS = changed("max: 1\n      quantum: 1\n", "max: 1\n      quantum: 0.25\n")
BF16 = changed('dtype: "float32"\n    max_l2', "dtype: bfloat16\n    max_l2", "fedreft")


def changed_reft(change: Callable[[dict[str, Any]], None], kind: str = "reft.intervention") -> Case:
    tensors = reft_tensors()
    change(tensors)
    return reft(kind, tensors)


def setting(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(tensors: dict[str, Any]) -> None:
        tensors[name] = np.asarray(value, np.float32)

    return change


def _put(name: str, value: float) -> Callable[[dict[str, Any]], None]:
    def change(tensors: dict[str, Any]) -> None:
        tensors[name].flat[0] = value

    return change


def _raw(name: str, value: float) -> Case:
    """A value that no honest sender encodes, put behind the codec."""
    case = reft()
    assert case.message.tensors is not None
    tensors = {key: np.array(values) for key, values in case.message.tensors.items()}
    tensors[name].flat[0] = value
    return case.but(tensors=tensors)


REFT_L2 = REFT.file.egress.reft_intervention
assert REFT_L2 is not None
RIGHT_W = np.zeros((8, 16), np.float32)
LARGEST = float(np.float32(REFT_L2.max_tensor_l2))
LARGEST = LARGEST if REFT_L2.max_tensor_l2 >= LARGEST else float(np.nextafter(np.float32(LARGEST), np.float32(0)))


def _w(value: float) -> Case:
    w = RIGHT_W.copy()
    w[0, 0] = value
    return changed_reft(setting("layers.0.prefix.W", w))


def _all_w(value: float) -> Case:
    tensors = reft_tensors()
    for name in tensors:
        if not name.endswith(".R"):
            tensors[name] = np.zeros_like(tensors[name])
            if name.endswith(".W"):
                tensors[name][0, 0] = value
    return reft(tensors=tensors)


def tilted(angle: float) -> Case:
    """R whose first two rows are `angle` from orthogonal: the largest entry of |R R^T - I| is sin(angle)."""
    r = np.eye(8, 16, dtype=np.float32)
    r[1, :2] = math.sin(angle), math.cos(angle)
    return changed_reft(setting("layers.0.prefix.R", r))


DAY = GRPO.file.egress.competence_score
REWARDS_DAY = GRPO.file.egress.reward_scalar
PACKAGE = KNEXA.file.egress.knowledge_package
assert DAY is not None and REWARDS_DAY is not None and PACKAGE is not None
X = "x" * PACKAGE.max_bytes_per_answer
Y = "y" * 512
assert len(Y) == 512 == PACKAGE.max_bytes_per_answer
SMALL = changed("max_entries: 10", "max_entries: 2", "knexa")
TIGHT = changed(f"max_bytes: {PACKAGE.max_bytes}", f"max_bytes: {package().message.payload_bytes}", "knexa")
IN_SMALL = policy_of(ruleset_text("knexa").replace("max_entries: 10", "max_entries: 2"))
IN_TIGHT = policy_of(
    ruleset_text("knexa").replace(f"max_bytes: {PACKAGE.max_bytes}", f"max_bytes: {package().message.payload_bytes}")
)
SILENT = changed("abstain: allowed", "abstain: denied")
STEP = History(messages_in_step=1)
OTHER = "cd" * 32


def in_round(count: int) -> History:
    return History(messages_in_round=count)


# (rule, what is at the limit or beyond, policy, at the limit, beyond it)
Bound = tuple[str, str, Policy, Case, Case]
SETS: list[Bound] = [
    (
        "pinned set",
        f"{make.__name__}{' in' * extra.get('inbound', False)}",
        policy,
        make(**extra),
        make(sha256=OTHER, **extra),
    )
    for make, policy, extra in [
        (score, GRPO, {}),
        (answers, FURTHER, {}),
        (package, KNEXA, {}),
        (package, KNEXA, {"inbound": True}),
        (competence_ask, GRPO, {}),
        (reward_ask, GRPO, {}),
    ]
]
OWN_SETS: list[Bound] = [
    ("pinned set", f"own copy, {case.message.kind}", policy, case, case.but(public_set_sha256=OTHER))
    for case, policy in [(score(), GRPO), (package(), KNEXA), (reward_ask(), GRPO)]
]
STEPS: list[Bound] = [
    ("one message of the kind per step", case.message.kind, policy, case, case.but(history=STEP))
    for case, policy in [(score(), GRPO), (answers(), FURTHER), (rewards(), GRPO)]
]
ROUNDS: list[Bound] = [
    (
        "messages of the kind per round",
        case.message.kind,
        policy,
        case.but(history=in_round(most - 1)),
        case.but(history=in_round(most)),
    )
    for case, policy, most in [
        (score(), GRPO, 4),
        (answers(), FURTHER, 2),
        (rewards(), GRPO, 4),
        (reft(), REFT, 1),
        (profile(), KNEXA, 1),
        (package(), KNEXA, 1),
    ]
]
PLACES: list[Bound] = [
    *[
        ("round", f"{case.message.kind} of another round", policy, case, case.but(round=2))
        for case, policy in [
            (score(), GRPO),
            (reft(), REFT),
            (profile(), KNEXA),
            (package(), KNEXA),
            (competence_ask(), GRPO),
            (directive(), KNEXA),
            (reft("reft.aggregate"), REFT),
        ]
    ],
    ("round", "score of a step that nobody asked", GRPO, score(), score().but(step=3)),
    (
        "round",
        "answers before any question",
        FURTHER,
        answers(),
        answers().but(step=0, asked=dataclasses.replace(ASKED, step=0)),
    ),
    ("round", "rewards of a step that nobody asked", GRPO, rewards(), rewards().but(step=1)),
    ("round", "profile of a step", KNEXA, profile(), profile().but(step=1)),
    ("round", "package of a step", KNEXA, package(), package().but(step=2)),
    ("round", "worth of a step", KNEXA, worth(), worth().but(step=1)),
    ("round", "worth, late", KNEXA, worth().but(open_round=2), worth().but(round=2)),
    ("round", "worth of no round", KNEXA, worth(), worth().but(round=0)),
    ("round", "last step of the plan", GRPO, reward_ask().but(step=4), reward_ask().but(step=5)),
    ("round", "a question of no step", GRPO, reward_ask().but(step=1), reward_ask().but(step=0)),
    ("run", "of another run", GRPO, score(), score().but(run="run-2")),
]
SCORES: list[Bound] = [
    ("only what was asked", "a score of another question", GRPO, score((4, 1)), score((5, 1))),
    ("only what was asked", "a score twice", GRPO, score((4, 1)), score((4, 1), (4, 1))),
    ("only what was asked", "an answer to another exemplar", FURTHER, answers((5, "")), answers((6, ""))),
    ("only what was asked", "a reward of another question", GRPO, rewards((4, (0, 0, 0))), rewards((5, (0, 0, 0)))),
    ("only what was asked", "nothing asked", GRPO, score(), score().but(asked=Asked(step=2))),
    ("in the order asked", "scores", GRPO, score((4, 1), (7, 1)), score((7, 1), (4, 1))),
    ("in the order asked", "answers", FURTHER, answers((5, ""), (9, "")), answers((9, ""), (5, ""))),
    ("in the order asked", "rewards", GRPO, rewards((4, None), (7, None)), rewards((7, None), (4, None))),
    (
        "exemplars behind a score",
        "too few",
        GRPO,
        score((4, 1)),
        score((4, 1)).but(asked=dataclasses.replace(ASKED, exemplars={4: (0, 1, 2, 3)})),
    ),
    (
        "exemplars behind a score",
        "too many",
        FEW,
        score((7, 1)),
        score((7, 1)).but(asked=dataclasses.replace(ASKED, exemplars={7: tuple(range(7))})),
    ),
    (
        "exemplars behind a score",
        "asked, too few",
        GRPO,
        competence_ask((1, tuple(range(5)))),
        competence_ask((1, tuple(range(4)))),
    ),
    (
        "exemplars behind a score",
        "asked, too many",
        ASKS_FEW,
        competence_ask((1, tuple(range(6)))),
        competence_ask((1, tuple(range(7)))),
    ),
    ("matches within the exemplars", "one more", GRPO, score((4, 5)), score((4, 6))),
    (
        "scores or answers per step",
        "scores",
        GRPO,
        score(),
        score(*((n, 0) for n in range(4))).but(
            asked=dataclasses.replace(ASKED, exemplars=dict.fromkeys(range(4), (0, 1, 2, 3, 4)))
        ),
    ),
    (
        "scores or answers per step",
        "answers",
        FURTHER,
        answers(*((n, "") for n in (0, 1, 2, 3, 5, 9))),
        answers(*((n, "") for n in (0, 1, 2, 3, 5, 9, 8))),
    ),
    (
        "scores or answers per day",
        "scores",
        GRPO,
        score().but(history=History(units_in_day=DAY.max_per_day - 2)),
        score().but(history=History(units_in_day=DAY.max_per_day - 1)),
    ),
    (
        "scores or answers per day",
        "answers",
        FURTHER,
        answers().but(history=History(units_in_day=98)),
        answers().but(history=History(units_in_day=99)),
    ),
    (
        "scores or answers per day",
        "rewards",
        GRPO,
        rewards().but(history=History(units_in_day=REWARDS_DAY.max_per_day - 3)),
        rewards().but(history=History(units_in_day=REWARDS_DAY.max_per_day - 2)),
    ),
    ("bytes of one answer", "answers", FURTHER, answers((0, "x" * 64)), answers((0, "x" * 65))),
    ("bytes of one answer", "bytes, not characters", FURTHER, answers((0, "\u00e4" * 32)), answers((0, "\u00e4" * 33))),
    (
        "bytes of answers per step",
        "one more",
        FURTHER,
        answers().but(payload_bytes=256),
        answers().but(payload_bytes=257),
    ),
    (
        "finish reasons of answers",
        "answers",
        FURTHER,
        answers(finish=pb.FINISH_LENGTH),
        answers(finish=pb.FINISH_UNSPECIFIED),
    ),
    (
        "finish reasons of answers",
        "package",
        KNEXA,
        package(finish=pb.FINISH_LENGTH),
        package(finish=pb.FINISH_UNSPECIFIED),
    ),
    (
        "finish reasons of answers",
        "candidates",
        GRPO,
        reward_ask(finish=pb.FINISH_LENGTH),
        reward_ask(finish=pb.FINISH_UNSPECIFIED),
    ),
    ("a reward for each candidate", "one less", GRPO, rewards((4, (0, 0, 0))), rewards((4, (0, 0)))),
    ("a reward for each candidate", "one more", GRPO, rewards((4, (0, 0, 0))), rewards((4, (0, 0, 0, 0)))),
    (
        "a reward for each candidate",
        "abstains and scores",
        GRPO,
        rewards((4, None)),
        Case(
            dataclasses.replace(
                rewards().message,
                body=pb.RewardScalar(questions=[pb.QuestionRewards(question=4, rewards=[0, 0, 0], abstained=True)]),
            )
        ),
    ),
    ("abstaining", "where it may not", SILENT, rewards((4, (0, 0, 0))), rewards((4, None))),
    ("reward range", "not a number", GRPO, rewards((4, (0.0, 0, 1))), rewards((4, (math.nan, 0, 1)))),
    ("profile range", "infinite", KNEXA, profile(), profile(dynamic=(math.inf,) * 12)),
    ("reward range", "above", FINE_REWARDS, rewards((4, (0, 0.25, 1))), rewards((4, (0, 0.25, 1.25)))),
    ("reward range", "below", FINE_REWARDS, rewards((4, (0, 0.25, 1))), rewards((4, (0, -0.25, 1)))),
    ("reward grid", "between", FINE_REWARDS, rewards((4, (0, 0.25, 1))), rewards((4, (0, 0.26, 1)))),
    (
        "reward grid",
        "one ulp beside",
        FINE_REWARDS,
        rewards((4, (0, 0.25, 1))),
        rewards((4, (0, math.nextafter(0.25, 1), 1))),
    ),
    ("reward grid", "negative zero", GRPO, rewards((4, (0.0, 0, 1))), rewards((4, (-0.0, 0, 1)))),
    ("reward grid", "not a number", GRPO, rewards((4, (0.0, 0, 1))), rewards((4, (math.nan, 0, 1)))),
    (
        "questions per step",
        "one more",
        changed("max_questions_per_step: 3", "max_questions_per_step: 1"),
        rewards((4, None)),
        rewards((4, None), (7, None)),
    ),
    (
        "candidates per question",
        "rewards",
        changed("max_candidates_per_question: 4", "max_candidates_per_question: 3"),
        rewards((4, (0, 0, 0))),
        rewards((7, (0, 0, 0, 0))),
    ),
    (
        "candidates per question",
        "asked",
        GRPO,
        reward_ask((1, ("a", "b", "c", "d"))),
        reward_ask((1, ("a", "b", "c", "d", "e"))),
    ),
    ("questions are rows of the set", "candidates of no row", GRPO, reward_ask((9, ("a",))), reward_ask((10, ("a",)))),
    (
        "questions are rows of the set",
        "a question twice",
        GRPO,
        reward_ask((9, ("a",))),
        reward_ask((9, ("a",)), (9, ("b",))),
    ),
    (
        "questions are rows of the set",
        "exemplars of no row",
        GRPO,
        competence_ask((1, (5, 6, 7, 8, 9))),
        competence_ask((1, (6, 7, 8, 9, 10))),
    ),
    (
        "questions are rows of the set",
        "an exemplar twice",
        GRPO,
        competence_ask((1, (5, 6, 7, 8, 9))),
        competence_ask((1, (5, 6, 7, 8, 9, 9))),
    ),
    ("candidates differ", "twice", GRPO, reward_ask((1, ("a", "b"))), reward_ask((1, ("a", "a")))),
    (
        "questions asked",
        "candidates",
        GRPO,
        reward_ask(*((n, ()) for n in range(3))),
        reward_ask(*((n, ()) for n in range(4))),
    ),
    (
        "questions asked",
        "exemplars",
        GRPO,
        competence_ask(*((n, tuple(range(5))) for n in range(3))),
        competence_ask(*((n, tuple(range(5))) for n in range(4))),
    ),
    ("bytes of one candidate", "one more", GRPO, reward_ask((1, (Y,))), reward_ask((1, (Y + "y",)))),
]
KNOWLEDGE: list[Bound] = [
    ("profile shape", "a figure more", KNEXA, profile(), profile(dynamic=(0.25,) * 13)),
    ("profile shape", "a figure less", KNEXA, profile(), profile(dynamic=(0.25,) * 11)),
    ("profile shape", "a bin more", KNEXA, profile(), profile(histogram=(50, *(0,) * 11, 50))),
    ("profile shape", "a bin less", KNEXA, profile(), profile(histogram=(100, *(0,) * 10))),
    ("profile shape", "family", KNEXA, profile(family=7), profile(family=8)),
    (
        "profile shape",
        "no family told",
        HEURISTIC,
        profile(family=0, dynamic=(0.5,)),
        profile(family=1, dynamic=(0.5,)),
    ),
    ("profile range", "above", KNEXA, profile(dynamic=(1.0,) * 12), profile(dynamic=(1.01,) * 12)),
    ("profile range", "below", KNEXA, profile(dynamic=(-1.0,) * 12), profile(dynamic=(-1.01,) * 12)),
    ("profile grid", "between", KNEXA, profile(dynamic=(0.33,) * 12), profile(dynamic=(0.333,) * 12)),
    ("profile grid", "negative zero", KNEXA, profile(dynamic=(0.0,) * 12), profile(dynamic=(-0.0,) * 12)),
    (
        "histogram adds up",
        "one part more",
        KNEXA,
        profile(histogram=(100, *(0,) * 11)),
        profile(histogram=(100, *(0,) * 10, 1)),
    ),
    (
        "histogram adds up",
        "counts of records",
        KNEXA,
        profile(histogram=(100, *(0,) * 11)),
        profile(histogram=(12, 30, *(0,) * 10)),
    ),
    ("records behind the profile", "one less", KNEXA, profile(), profile().but(usable_records=9)),
    ("records behind the profile", "not known", KNEXA, profile(), profile().but(usable_records=None)),
    ("match goes forward", "without a part", KNEXA, directive(), directive(part="")),
    ("match goes forward", "an earlier one", KNEXA, directive(match=4), directive(match=2)),
    (
        "match goes forward",
        "the same with another peer",
        KNEXA,
        directive(match=3, peer="hospital_b"),
        directive(match=3),
    ),
    ("match goes forward", "none", KNEXA, directive(match=1, asked=Asked()), directive(match=0, asked=Asked())),
    (
        "match is with a peer",
        "not of the plan",
        KNEXA,
        directive(),
        directive(plan=PLAN.model_copy(update={"silos": ("hospital_a", "hospital_b"), "method": "probe"})),
    ),
    (
        "match is with a peer",
        "not of the policy",
        KNEXA,
        directive(),
        directive(
            peer="hospital_z", plan=PLAN.model_copy(update={"silos": ("hospital_a", "hospital_z"), "method": "probe"})
        ),
    ),
    ("reward of the open match", "another match", KNEXA, worth(match=3), worth(match=2)),
    ("reward of the open match", "the giver's", KNEXA, worth(), worth(asked=ASKED)),
    ("reward of the open match", "no match", KNEXA, worth(), worth(match=0, asked=Asked())),
    ("worth of a match", "above", KNEXA, worth(10.0), worth(10.001)),
    ("worth of a match", "below", KNEXA, worth(-10.0), worth(-10.001)),
    ("worth of a match", "infinite", KNEXA, worth(10.0), worth(math.inf)),
    ("worth on the grid", "between", KNEXA, worth(0.001), worth(0.0011)),
    ("worth on the grid", "negative zero", KNEXA, worth(0.0), worth(-0.0)),
    ("rewards per match", "a second", KNEXA, worth(), worth().but(history=History(messages_in_match=1))),
    ("package of the open match", "another match", KNEXA, package(match=3), package(match=2)),
    ("package of the open match", "the taker's", KNEXA, package(), package().but(asked=TAKES)),
    (
        "package of the open match",
        "no match",
        KNEXA,
        package(),
        package(match=0).but(asked=Asked(peer="hospital_b", part="give")),
    ),
    ("package of the open match", "to the coordinator", CENTRAL, package(to="", match=0), package(to="", match=3)),
    (
        "package of the open match",
        "in, of the giver",
        KNEXA,
        package(inbound=True),
        package(inbound=True).but(asked=ASKED),
    ),
    ("package of the open match", "in, of another match", KNEXA, package(inbound=True), package(inbound=True, match=4)),
    (
        "package of the open match",
        "in, from the coordinator",
        CENTRAL,
        package(to="", match=0, inbound=True),
        package(to="", match=3, inbound=True),
    ),
    ("package to or from the matched peer", "another peer", KNEXA, package(), package(to="hospital_c")),
    ("package to or from the matched peer", "nobody", KNEXA, package(), package(to="")),
    (
        "package to or from the matched peer",
        "a peer instead of the coordinator",
        CENTRAL,
        package(to="", match=0),
        package(match=0),
    ),
    (
        "package to or from the matched peer",
        "in, another peer",
        KNEXA,
        package(inbound=True),
        package(inbound=True, to="hospital_c"),
    ),
    ("package prompts", "no row", KNEXA, package((9, "")), package((10, ""))),
    ("package prompts", "a row twice", KNEXA, package((9, "")), package((9, ""), (9, ""))),
    ("package prompts", "in, no row", KNEXA, package((9, ""), inbound=True), package((10, ""), inbound=True)),
    ("package in order", "the other way round", KNEXA, package((0, ""), (9, "")), package((9, ""), (0, ""))),
    ("entries of a package", "one more", SMALL, package((0, ""), (1, "")), package((0, ""), (1, ""), (2, ""))),
    (
        "entries of a package",
        "in, one more",
        IN_SMALL,
        package((0, ""), (1, ""), inbound=True),
        package((0, ""), (1, ""), (2, ""), inbound=True),
    ),
    ("bytes of a package", "one more", TIGHT, package(), package((0, "def f(): pass!"), (9, ""))),
    (
        "bytes of a package",
        "in, one more",
        IN_TIGHT,
        package(inbound=True),
        package((0, "def f(): pass!"), (9, ""), inbound=True),
    ),
    ("bytes of one answer", "package", KNEXA, package((0, X)), package((0, X + "x"))),
    ("bytes of one answer", "in, package", KNEXA, package((0, X), inbound=True), package((0, X + "x"), inbound=True)),
    ("package confidence", "where none may be told", KNEXA, package(), package(confidence=0.0)),
    (
        "package confidence",
        "above",
        CENTRAL,
        package(to="", match=0, confidence=1.0),
        package(to="", match=0, confidence=1.01),
    ),
    (
        "package confidence",
        "between",
        CENTRAL,
        package(to="", match=0, confidence=0.33),
        package(to="", match=0, confidence=0.333),
    ),
    (
        "package confidence",
        "negative zero",
        CENTRAL,
        package(to="", match=0, confidence=0.0),
        package(to="", match=0, confidence=-0.0),
    ),
]
R = "layers.0.prefix.R"
TENSORS: list[Bound] = [
    (
        "interventions",
        "a layer more",
        REFT,
        reft(),
        changed_reft(
            lambda t: t.update(
                {f"layers.2.{g}.{p}": t[f"layers.1.{g}.{p}"] for g in ("prefix", "suffix") for p in "RWb"}
            )
        ),
    ),
    (
        "interventions",
        "a layer less",
        REFT,
        reft(),
        changed_reft(lambda t: [t.pop(name) for name in list(t) if "layers.1" in name]),
    ),
    (
        "interventions",
        "another group",
        REFT,
        reft(),
        changed_reft(lambda t: t.update({f"layers.0.tied.{p}": t[f"layers.0.prefix.{p}"] for p in "RWb"})),
    ),
    ("interventions", "a part missing", REFT, reft(), changed_reft(lambda t: t.pop("layers.0.prefix.b"))),
    (
        "interventions",
        "a name of no form",
        REFT,
        reft(),
        changed_reft(lambda t: t.update({"mr-smith": t["layers.0.prefix.b"]})),
    ),
    (
        "interventions",
        "leading zero",
        REFT,
        reft(),
        changed_reft(lambda t: t.update({"layers.00.prefix.b": t.pop("layers.0.prefix.b")})),
    ),
    ("interventions", "values not given", REFT, reft(), reft().but(tensors=None)),
    (
        "interventions",
        "in, a part missing",
        REFT,
        reft("reft.aggregate"),
        changed_reft(lambda t: t.pop("layers.0.prefix.b"), "reft.aggregate"),
    ),
    (
        "intervention shapes",
        "rank",
        REFT,
        reft(),
        changed_reft(lambda t: t.update({name: v[:7] for name, v in t.items()})),
    ),
    (
        "intervention shapes",
        "width",
        REFT,
        reft(),
        changed_reft(lambda t: t.update({name: v[:, :15] for name, v in t.items() if v.ndim == 2})),
    ),
    (
        "intervention shapes",
        "one W transposed",
        REFT,
        reft(),
        changed_reft(lambda t: t.update({"layers.0.prefix.W": t["layers.0.prefix.W"].T.copy()})),
    ),
    (
        "intervention shapes",
        "b is a matrix",
        REFT,
        reft(),
        changed_reft(lambda t: t.update({"layers.0.prefix.b": np.zeros((8, 1), np.float32)})),
    ),
    (
        "intervention shapes",
        "values of another shape than the header says",
        REFT,
        reft(),
        reft().but(tensors={**reft_tensors(), "layers.0.prefix.W": np.zeros((16, 8), np.float32)}),
    ),
    ("intervention header", "dtype", REFT, reft(), reft(dtype="bfloat16")),
    ("intervention header", "rank", REFT, reft(), reft(rank=7)),
    ("intervention header", "scale", REFT, reft(), reft(scale=1.5)),
    ("intervention header", "base", REFT, reft(), reft(base_digest=OTHER)),
    ("intervention header", "schema", REFT, reft(), reft(schema_sha256=OTHER)),
    ("finite interventions", "not a number", REFT, reft(), changed_reft(_put("layers.0.prefix.W", math.nan))),
    ("finite interventions", "infinite R", REFT, reft(), changed_reft(_put(R, math.inf))),
    (
        "finite interventions",
        "in, infinite",
        REFT,
        reft("reft.aggregate"),
        changed_reft(_put("layers.0.prefix.b", math.inf), "reft.aggregate"),
    ),
    ("canonical interventions", "negative zero", REFT, _raw(R, 1.0), _raw("layers.0.prefix.W", -0.0)),
    ("canonical interventions", "denormal", REFT, _raw(R, 1.0), _raw("layers.0.prefix.W", 1e-40)),
    (
        "intervention grid",
        "off bfloat16",
        BF16,
        reft(dtype="bfloat16"),
        reft(dtype="bfloat16").but(tensors={**reft_tensors(), "layers.0.prefix.b": np.full(8, 0.1, np.float32)}),
    ),
    (
        "L2 of one intervention tensor",
        "one ulp",
        REFT,
        _w(LARGEST),
        _w(float(np.nextafter(np.float32(LARGEST), np.float32(np.inf)))),
    ),
    ("L2 of the interventions", "twice", REFT, _all_w(REFT_L2.max_l2 / 2.001), _all_w(REFT_L2.max_l2 / 1.999)),
    (
        "L2 of the interventions",
        "in, twice",
        REFT,
        reft("reft.aggregate"),
        Case(
            with_changes(
                _all_w(REFT_L2.max_l2 / 1.999).message, kind="reft.aggregate", direction="ingress", sender=COORDINATOR
            )
        ),
    ),
    ("rows of R orthonormal", "tilted", REFT, tilted(0.9e-4), tilted(1.1e-4)),
    ("rows of R orthonormal", "a row of length 0", REFT, reft(), changed_reft(_put(R, 0.0))),
    (
        "rows of R orthonormal",
        "twice a row",
        REFT,
        reft(),
        changed_reft(setting(R, np.vstack([np.eye(7, 16), np.eye(1, 16)]))),
    ),
]
BOUNDS = [*SETS, *OWN_SETS, *STEPS, *ROUNDS, *PLACES, *SCORES, *KNOWLEDGE, *TENSORS]
