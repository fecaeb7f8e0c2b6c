"""The proof of agreement on a real model in bfloat16 at lr 1e-5, with an engine that goes wrong in each way in turn.

The faulty engine says the right adapter's name, so identity sees nothing and the figures alone must tell. Only
`test_an_answer_that_names_another_adapter...` and those of the marker let it say its own.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from fedsilo.protocol.errors import OperationError
from fedsilo.protocol.tasks import LoadAdapter, PrivateStep
from silo.trainer import agreement
from silo.trainer.agreement import AgreementWatch, AnswerFigures, Limits, divergence
from silo.trainer.rollout.embedded import EmbeddedEngine
from silo.trainer.rollout.engine import Question, Rollout
from tests.algorithms.agreement_rig import TEMPERATURE, Fault, Rig, held, put
from tests.algorithms.tiny import make_plan, make_session, start_payload

pytestmark = [pytest.mark.torch, pytest.mark.slow]
# Every answer is looked at: the tokens a test needs are then drawn in the fewest steps.
ALL = Limits(share=1.0, marker_pushes=0)
LEARNED = 0.02  # of B: an adapter that changes answers by about a tenth of a nat, as after some rounds


@pytest.fixture(scope="module")
def rig() -> Rig:
    return Rig(b_scale=LEARNED, pushes=14)


@pytest.fixture(scope="module")
def exact_rig() -> Rig:
    return Rig(b_scale=LEARNED, pushes=4, dtype=torch.float32)


def stopped_by(rig: Rig, fault: Fault, steps: Sequence[int]) -> OperationError | None:
    watch = rig.watch(ALL)
    for at in steps:
        try:
            rig.check(watch, at, fault)
        except OperationError as error:
            return error
    return None


def test_a_fresh_engine_is_never_stopped_and_says_what_it_could_have_told(rig: Rig) -> None:
    watch = rig.watch(dataclasses.replace(ALL, marker_pushes=3))
    figures: dict[str, float] = {}
    for at in (9, 10, 11, 12, 13, 14):
        figures = rig.check(watch, at, Fault())
        assert all((one == other).all() for one, other in zip(held(rig.trainer), rig.history[at], strict=True))
    assert figures["rollout_kl"] < 1e-4 < figures["rollout_kl_limit"]
    assert abs(figures["stale_base"]) < 0.05
    # One step at lr 1e-5 among rounding a hundred times as large: 18 000 tokens tell some steps, not one.
    assert 1 < figures["stale_detectable_steps"] < 20
    assert figures["adapter_visible_share"] > 0.9
    assert figures["marker_contrast"] > 0.2 > 4 * figures["marker_distance"]


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        (Fault(scale=0.5), "STALE_ROLLOUT"),
        (Fault(scale=2.0), "STALE_ROLLOUT"),
        (Fault(base_share=1.0), "STALE_ROLLOUT"),
        (Fault(base_share=0.5), "STALE_ROLLOUT"),
        (Fault(base_seed=1), "ROLLOUT_DISAGREES"),
        (Fault(base_noise=0.01), "ROLLOUT_DISAGREES"),
    ],
    ids=[
        "half the scale",
        "twice the scale",
        "no adapter",
        "half base",
        "another base",
        "rounded base",
    ],
)
def test_a_fault_stops_the_step(rig: Rig, fault: Fault, code: str) -> None:
    """Either proof may be the first to see a large one: of a wrong scale the divergence is beyond its limit too."""
    error = stopped_by(rig, fault, [14] * 8)
    assert error is not None
    assert error.code in ({code} if code == "ROLLOUT_DISAGREES" else {"STALE_ROLLOUT", "ROLLOUT_DISAGREES"})


@pytest.mark.parametrize(
    ("fault", "other", "about"),
    [
        (Fault(scale=0.5), "base", 0.5),
        (Fault(scale=2.0), "base", -0.9),
        (Fault(base_share=0.5), "base", 0.5),
        (Fault(base_share=1.0), "base", 1.0),
    ],
    ids=["half the scale", "twice the scale", "half base", "no adapter"],
)
def test_the_coefficient_says_what_is_wrong(rig: Rig, fault: Fault, other: str, about: float) -> None:
    from silo.trainer.agreement import Window

    window = Window()
    for at in (12, 13, 14, 14):
        window.add(rig.figures(at, fault))
    [finding] = [each for each in window.findings() if each.other == other]
    assert finding.is_alarm
    # 4 errors; an effect of a tenth of a nat is not quite linear in the scale, which is worth up to 0.1
    assert finding.coefficient == pytest.approx(about, abs=4 * finding.error + 0.1)


def test_one_step_of_staleness_is_caught_in_float32_and_said_to_be_too_small_in_bfloat16(
    rig: Rig, exact_rig: Rig
) -> None:
    error = stopped_by(exact_rig, Fault(lag=1), [3, 4, 3, 4])
    assert error is not None and error.code == "STALE_ROLLOUT" and "rollout before" in error.message
    assert stopped_by(exact_rig, Fault(), [3, 4, 3, 4]) is None
    watch = rig.watch(ALL)
    for at in (12, 13, 14):
        figures = rig.check(watch, at, Fault(lag=1))
    assert figures["stale_detectable_steps"] > 1


@pytest.fixture(scope="module")
def first_rig() -> Rig:
    """In a run's first round: B was zero, and each of its numbers has moved by some 1e-4 at most."""
    return Rig(pushes=14)


def test_an_adapter_that_was_never_pushed_is_caught_in_the_first_round_in_bfloat16(first_rig: Rig) -> None:
    """18 000 to 31 000 tokens, as the processor rounds bfloat16: an effect of one is then six to ten standard errors.
    It looks at 74 000 at most. Of the adapter between .58 and .94 is visible, by the processor too."""
    error = stopped_by(first_rig, Fault(lag=14), [14] * 24)
    assert error is not None and error.code == "STALE_ROLLOUT" and "round's start" in error.message
    watch = first_rig.watch(ALL)
    for _ in range(8):
        figures = first_rig.check(watch, 14, Fault())
    assert figures["adapter_visible_share"] > 0.5


def test_a_server_that_rounds_the_adapter_away_is_not_taken_for_one_that_never_got_it(first_rig: Rig) -> None:
    """vLLM rounds a layer before it adds the factors' part. Beside a trainer that looks as it does, nothing differs;
    beside one that rounds once, it would be stopped in the first round of every run in bfloat16."""
    server = first_rig.engine(Fault()).decoder
    alike = AgreementWatch(first_rig.trainer, TEMPERATURE, first_rig.draw, ALL, rounds_once=False)
    with server.rounding_apart():
        for _ in range(8):
            figures = first_rig.check(alike, 14, Fault())
        assert figures["adapter_visible_share"] < 0.4
        error = stopped_by(first_rig, Fault(), [14] * 8)
    assert error is not None and error.code == "STALE_ROLLOUT"


def test_an_answer_that_names_another_adapter_stops_the_step_whatever_its_figures(rig: Rig) -> None:
    put(rig.trainer, rig.history[13])
    old = rig.trainer.name()
    rig.check(rig.watch(ALL), 14, Fault())
    for limits in (ALL, Limits(share=0.0)):
        with pytest.raises(OperationError, match=old[:12]) as caught:
            rig.check(rig.watch(limits), 14, Fault(), name=old)
        assert caught.value.code == "STALE_ROLLOUT"
    with pytest.raises(OperationError, match="no name"):
        rig.check(rig.watch(ALL), 14, Fault(), name="")


def test_a_marker_too_weak_to_show_is_followed_by_a_stronger_one(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """How strong one must be hangs on the model: in a nearly uniform one little shows."""
    monkeypatch.setattr(agreement, "MARKER_STRENGTHS", (1e-4, 4.0))
    figures = rig.check(rig.watch(dataclasses.replace(ALL, marker_pushes=1)), 12, Fault())
    assert figures["marker_contrast"] > 0.2 > 4 * figures["marker_distance"]


def test_a_marker_that_the_engine_ignores_stops_the_step(rig: Rig) -> None:
    """The engine keeps the adapter it has and calls it what it is asked to: of the marker nothing shows."""
    limits = Limits(share=0.1, marker_pushes=2)
    fresh, deaf = rig.watch(limits), rig.watch(limits)
    for at in (12, 13, 14):
        assert "marker_contrast" in rig.check(fresh, at, Fault())
    with pytest.raises(OperationError, match="marker") as caught:
        rig.check(deaf, 14, Fault(lag=1))
    assert caught.value.code == "STALE_ROLLOUT"


def test_the_marker_goes_out_again_and_again(rig: Rig) -> None:
    """The third rollout's, not the first's alone: the engine was fine until then."""
    watch = rig.watch(Limits(share=0.1, marker_pushes=2))
    rig.check(watch, 12, Fault())
    rig.check(watch, 13, Fault())
    with pytest.raises(OperationError, match="marker"):
        rig.check(watch, 14, Fault(lag=1))


@pytest.mark.parametrize("apart", [True, False])
def test_each_server_gets_a_marker_of_its_own(rig: Rig, apart: bool) -> None:
    """Of 50 rollouts and public ones in between, the marker would go with private ones for ever. One server that
    answers both needs it once."""
    limits = Limits(share=0.1, marker_pushes=50)
    watch = AgreementWatch(rig.trainer, TEMPERATURE, rig.draw, limits, servers_apart=apart)
    rig.check(watch, 13, Fault(), source="private")
    if not apart:
        rig.check(watch, 14, Fault(lag=1), source="public")
        return
    with pytest.raises(OperationError, match="marker"):
        rig.check(watch, 14, Fault(lag=1), source="public")


@pytest.mark.quick(keep=1)
@pytest.mark.parametrize(("apart", "expected"), [(True, {"private": 13, "public": 14}), (False, {"one": 14})])
def test_the_rollout_before_is_that_of_the_same_server(rig: Rig, apart: bool, expected: dict[str, int]) -> None:
    """A push that does not arrive leaves a server with what it had, not with what another one had."""
    watch = AgreementWatch(rig.trainer, TEMPERATURE, rig.draw, Limits(marker_pushes=0), servers_apart=apart)
    for at, rows in ((11, "private"), (12, "public"), (13, "private"), (14, "public")):
        rig.check(watch, at, Fault(), source="private" if rows == "private" else "public")
    facts, tensors = watch.state()
    assert facts["previous"] == sorted(expected)
    for server, at in expected.items():
        for name, factor in zip(rig.trainer.trained_names, rig.history[at], strict=True):
            assert torch.equal(tensors[f"agreement.previous.{server}.{name}"], factor.to(torch.bfloat16))
    again = AgreementWatch(rig.trainer, TEMPERATURE, rig.draw, Limits(marker_pushes=0), servers_apart=apart)
    again.ready_to_restore(facts, tensors)()
    assert again.state()[0] == facts


def unlike(*nats: float) -> list[AnswerFigures]:
    """Answers of 50 tokens each, whose figures are all so many nats from the trainer's, up and down in turn."""
    trainer, sign = np.full(50, -2.0), np.tile([1.0, -1.0], 25)
    return [AnswerFigures(trainer + sign * each, trainer, trainer, trainer) for each in nats]


@pytest.mark.parametrize(("nats", "stopped"), [((0.1, 0.5), True), ((0.01, 0.03), False)])
def test_two_answers_a_step_that_are_not_alike_stop_it_after_some_steps(
    rig: Rig, nats: tuple[float, float], stopped: bool
) -> None:
    """Of two that differ by more than twice, the error of their mean is as large as the mean: no step by itself says
    anything. The second pair is below the limit, and stays there."""
    [alone] = {divergence([each.engine for each in unlike(*nats)], [each.trainer for each in unlike(*nats)])}
    assert not alone.exceeds(Limits().kl_floor)
    watch, kept_at = rig.watch(Limits()), 4
    steps, code = 0, ""
    while steps < 40 and not code:
        steps += 1
        if steps == kept_at:  # what was found so far outlives a kill
            facts, tensors = watch.state()
            watch = rig.watch(Limits())
            watch.ready_to_restore(json.loads(json.dumps(facts)), tensors)()
        try:
            watch._judged(unlike(*nats))
        except OperationError as error:
            code = error.code
    assert (code, steps < 12) == (("ROLLOUT_DISAGREES", True) if stopped else ("", False))


def test_what_was_seen_before_the_last_judgement_no_longer_dilutes(rig: Rig) -> None:
    """4,000 tokens that agree, and then an engine that does not."""
    watch = rig.watch(Limits(window_tokens=4_000))
    for _ in range(40):
        watch._judged(unlike(0.0, 0.0))
    found, _ = watch._watch.differ(unlike(0.1, 0.5))
    [alone] = {divergence([each.engine for each in unlike(0.1, 0.5)], [each.trainer for each in unlike(0.1, 0.5)])}
    assert found == alone


@pytest.mark.parametrize("logp", ["none", "short", "nan", "infinite"])
def test_an_engine_that_does_not_say_what_it_drew_proves_nothing(rig: Rig, logp: str) -> None:
    put(rig.trainer, rig.history[14])
    questions = rig.questions(2)

    def told(rollout: Rollout) -> Rollout:
        figures = {
            "none": (),
            "short": rollout.logp[:-1],
            "nan": (float("nan"), *rollout.logp[1:]),
            "infinite": (float("-inf"), *rollout.logp[1:]),
        }
        return dataclasses.replace(rollout, logp=figures[logp])

    answers = [tuple(told(each) for each in row) for row in rig.answered(14, Fault(), questions)]
    prompts = [each.prompt_ids for each in questions]
    with pytest.raises(OperationError) as caught:
        rig.watch(ALL).check((1, 1), prompts, answers, lambda asked, tokens: [])
    assert caught.value.code == "ROLLOUT_NOT_PROVEN"
    rig.watch(ALL).check((1, 1), prompts, rig.answered(14, Fault(), questions), lambda asked, tokens: [])


def test_as_much_is_looked_at_as_may_be(rig: Rig) -> None:
    """A tenth of a step's 3 500 tokens is some 6 answers; never fewer than two."""
    put(rig.trainer, rig.history[14])
    questions = rig.questions()
    prompts, answers = [each.prompt_ids for each in questions], rig.answered(14, Fault(), questions)
    for share, most in ((0.1, 6), (1e-9, 2), (1.0, 64)):
        rows = rig.watch(Limits(share=share))._chosen((1, 1), prompts, answers)
        assert len(rows) == most
    one, again, other = (
        rig.watch(Limits(share=0.1))._chosen(key, prompts, answers) for key in ((1, 1), (1, 1), (1, 2))
    )
    assert one == again != other


# ---- in a session -----------------------------------------------------------------------------------


class StaleEngine:
    """Computes the adapter it was made with, under the name of the one in use."""

    def __init__(self, session: Any) -> None:
        run = session._run
        self._adapter, self._old = run.adapter, held(run.adapter)
        self._inner = EmbeddedEngine(run.adapter.decoder, stop_ids=[1], name=lambda: self._told)

    def use(self, source: str) -> None:
        """As the embedded engine's."""

    def rest(self) -> None:
        """As the embedded engine's."""

    def close(self) -> None:
        """As the embedded engine's."""

    def generate(self, questions: Sequence[Question], **settings: Any) -> list[tuple[Rollout, ...]]:
        live = held(self._adapter)
        self._told = self._adapter.name()
        put(self._adapter, self._old)
        try:
            return self._inner.generate(questions, **settings)
        finally:
            put(self._adapter, live)


def test_a_session_says_how_well_its_engine_agrees() -> None:
    session, shape = make_session(plan=make_plan(swap_period=99), agreement=Limits(share=1.0, window_tokens=1))
    payload, digest = start_payload(shape)
    session.carry_out(LoadAdapter(1, digest), payload)
    first, _, third = (session.carry_out(PrivateStep(1, step)).metrics for step in (1, 2, 3))
    assert first["marker_contrast"] > 0.2 and first["rollout_kl"] < 1e-8
    assert {"rollout_kl", "stale_previous", "stale_base", "agreement_seconds"} <= third.keys()
    assert abs(third["stale_previous"]) < 0.01  # float32: an engine in the same process is the trainer


@pytest.mark.parametrize("stale", [False, True])
def test_a_session_with_a_stale_engine_stops_and_changes_nothing(stale: bool) -> None:
    limits = Limits(share=1.0, window_tokens=1, marker_pushes=0)
    session, shape = make_session(plan=make_plan(swap_period=99, optimiser__learning_rate=1e-2), agreement=limits)
    payload, digest = start_payload(shape)
    session.carry_out(LoadAdapter(1, digest), payload)
    assert session._run is not None
    if stale:
        session._run.engine = StaleEngine(session)
    session.carry_out(PrivateStep(1, 1))
    session.carry_out(PrivateStep(1, 2))  # the first has no signal
    before = held(session._run.adapter)
    if not stale:
        session.carry_out(PrivateStep(1, 3))
        assert any((one != other).any() for one, other in zip(held(session._run.adapter), before, strict=True))
        return
    with pytest.raises(OperationError) as caught:
        session.carry_out(PrivateStep(1, 3))
    assert caught.value.code in (agreement.STALE, agreement.DISAGREES)
    assert all((one == other).all() for one, other in zip(held(session._run.adapter), before, strict=True))


def test_training_has_the_same_bits_whether_or_not_it_is_looked_at() -> None:
    """Neither the checks nor the marker touch the draws, the factors or the optimiser."""
    deltas = []
    for limits in (Limits(share=0.0), Limits(share=1.0, marker_pushes=1)):
        session, shape = make_session(agreement=limits)
        payload, digest = start_payload(shape)
        session.carry_out(LoadAdapter(1, digest), payload)
        for step in (1, 3):
            session.carry_out(PrivateStep(1, step))
        assert session._run is not None
        deltas.append(session._run.adapter.delta())
    assert all(np.array_equal(deltas[0][name], deltas[1][name]) for name in deltas[0])
