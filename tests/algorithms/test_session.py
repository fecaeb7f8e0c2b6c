"""A silo's trainer end to end in one process: tasks in, messages out."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.codec import decode, decode_factors, encode_factors
from fedsilo.protocol.errors import FedSiloError, OperationError, PeerError, UsageError
from fedsilo.protocol.factors import mean_delta
from fedsilo.protocol.methods import METHODS
from fedsilo.protocol.plan import Plan
from fedsilo.protocol.tasks import (
    AnswerAhead,
    Evaluate,
    EvaluateOwn,
    ExportDelta,
    GeneratePublic,
    LikelihoodStep,
    LoadAdapter,
    LoadOwn,
    LoadReference,
    PrivateStep,
    PublicStep,
    TrainerTask,
)
from silo.measuring import MeasureHoldout
from silo.sampling import PrivateSampler
from silo.trainer.adapters.lora import LoraShape
from silo.trainer.agreement import Limits
from silo.trainer.data import grade_distinct
from silo.trainer.session import Session
from silo.trainer.tasks import CARRIED_OUT, task_from_fields
from silo.trainer.tasks.evaluate import DONORS_TRAINED
from tests.algorithms.tiny import ZERO_DIGEST, Row, make_plan, make_session, payload_of, random_factors, start_payload

pytestmark = pytest.mark.torch


def begun(silo: str = "a", plan: Plan | None = None, **changes: Any) -> tuple[Session, LoraShape]:
    session, shape = make_session(silo, plan, **changes)
    payload, digest = start_payload(shape)
    session.carry_out(LoadAdapter(1, digest), payload)
    return session, shape


def delta_of(session: Session) -> dict[str, np.ndarray[Any, Any]]:
    return dict(decode_factors(session.carry_out(ExportDelta(1)).body).tensors)


def generated(session: Session, step: int = 2, offer: str = "correct") -> pb.PublicResponses:
    return decode(pb.PublicResponses, session.carry_out(GeneratePublic(1, step, (4, 0, 9), offer)).body)


def test_answers_ahead_are_the_right_ones_of_the_trained_policy_and_train_nothing() -> None:
    """`exchange: round_end`."""
    session, _ = begun()
    asked = (4, 0, 9)
    own = generated(session)
    first = session.carry_out(AnswerAhead(1, 2, asked))
    assert decode(pb.PublicResponses, first.body) != own, "of the same policy, and another draw"
    session.carry_out(PublicStep(1, 2, "none", pb.PublicDonors()))  # its own answers still wait for it
    before = delta_of(session)
    body = decode(pb.PublicResponses, session.carry_out(AnswerAhead(1, 2, asked)).body)
    after = delta_of(session)
    assert all((before[name] == after[name]).all() for name in before)
    assert [row.prompt_index for row in body.prompts] == list(asked)
    assert [row.samples for row in body.prompts] == [
        len(row.responses) for row in generated(session, offer="all").prompts
    ]
    material = session._material
    pairs = [
        (response.text, material.public[row.prompt_index].answer) for row in body.prompts for response in row.responses
    ]
    assert pairs and all(mark.correct for mark in grade_distinct(material.public_grader, pairs))
    assert set(first.metrics) == {
        "rollout_seconds",
        "grade_seconds",
        "agreement_seconds",
        "seconds",
        "reencoding_mismatches",
        "extra_tokens",
    }
    again = decode(pb.PublicResponses, session.carry_out(AnswerAhead(1, 2, asked)).body)
    other_step = decode(pb.PublicResponses, session.carry_out(AnswerAhead(1, 4, asked)).body)
    assert again == body != other_step, "drawn by round, step, row and sample"


def test_what_a_session_trained_can_be_loaded_by_another() -> None:
    session, shape = begun()
    session.carry_out(PrivateStep(1, 1, (0, 1, 2)))
    trained = session.values()
    other, _ = begun()
    assert any((trained[name] != values).any() for name, values in other.values().items())
    other.carry_out(LoadAdapter(2, "d"), payload_of(shape, trained))
    loaded = other.values()
    assert loaded.keys() == shape.shapes.keys() and all((loaded[name] == trained[name]).all() for name in loaded)
    for name in trained:
        trained[name] += 1.0
    assert all((loaded[name] == values).all() for name, values in session.values().items()), "copies"


def test_answers_ahead_report_every_token_that_was_sampled() -> None:
    session, _ = begun(public_grader=lambda pairs: [True] * len(pairs))
    done = session.carry_out(AnswerAhead(1, 2, (1, 2, 3)))  # whose texts all encode to the tokens they were of
    codec = session._material.codec
    lengths = [
        len(codec.answer_ids(response.text, finished=response.finish == pb.FINISH_STOP))
        for row in decode(pb.PublicResponses, done.body).prompts
        for response in row.responses
    ]
    assert len(lengths) == 3 * make_plan().samples_per_prompt and done.metrics["reencoding_mismatches"] == 0
    assert done.metrics["extra_tokens"] == sum(lengths)


def test_export_names_the_base_and_holds_every_tensor() -> None:
    session, shape = begun()
    metrics = session.carry_out(PrivateStep(1, 1)).metrics
    factors = decode_factors(session.carry_out(ExportDelta(1)).body)
    assert factors.header.base_digest == start_payload(shape)[1]
    assert factors.header.scale == shape.scale
    assert {name: array.shape for name, array in factors.tensors.items()} == dict(shape.shapes)
    norm = float(np.sqrt(sum(np.square(array).sum() for array in factors.tensors.values())))
    assert metrics["drift"] == pytest.approx(norm, rel=1e-5)
    assert norm > 0


def test_one_silo_new_global_is_base_plus_its_delta() -> None:
    session, shape = begun()
    session.carry_out(PrivateStep(1, 1))
    for name, delta in delta_of(session).items():
        start = random_factors(shape)[name]
        assert (start.ravel() + mean_delta([delta.ravel()]) == (start + delta).ravel()).all()


def test_same_tasks_same_bits() -> None:
    deltas = []
    for _ in range(2):
        session, _ = begun()
        session.carry_out(PrivateStep(1, 1))
        generated(session)
        session.carry_out(PublicStep(1, 2, "none", pb.PublicDonors()))
        deltas.append(delta_of(session))
    assert all((deltas[0][name] == deltas[1][name]).all() for name in deltas[0])


def test_swap_off_is_fedavg_grpo_bit_for_bit() -> None:
    """A swap period beyond tau leaves private steps only, as the FedAvg-GRPO method does."""
    deltas = []
    for plan in (make_plan(swap_period=99), make_plan(method="fedavg-grpo", swap_period=2)):
        session, _ = begun(plan=plan)
        for step in (1, 2, 3):
            session.carry_out(PrivateStep(1, step))
        deltas.append(delta_of(session))
    assert all((deltas[0][name] == deltas[1][name]).all() for name in deltas[0])


def test_public_step_without_donors_is_public_no_swap_bit_for_bit() -> None:
    deltas = []
    for swap in ("replace", "none"):
        session, _ = begun()
        generated(session)
        session.carry_out(PublicStep(1, 2, swap, pb.PublicDonors()))
        deltas.append(delta_of(session))
    assert all((deltas[0][name] == deltas[1][name]).all() for name in deltas[0])


def test_random_with_one_responder_is_a_permutation_of_own_answers() -> None:
    deltas = []
    for swap, order in (("none", None), ("pool", (2, 0, 3, 1))):
        session, _ = begun()
        message = generated(session, offer="all")
        donors = pb.PublicDonors()
        for row in message.prompts if order else ():
            donors.prompts.add(
                prompt_index=row.prompt_index, donors=[pb.Donor(origin="a", position=place) for place in order or ()]
            )
        session.carry_out(PublicStep(1, 2, swap, donors))
        deltas.append(delta_of(session))
    scale = max(float(np.abs(delta).max()) for delta in deltas[0].values())
    assert all(np.allclose(deltas[0][name], deltas[1][name], atol=0.02 * scale) for name in deltas[0])


def test_donors_cross_from_one_silo_to_another_and_are_trained_on() -> None:
    giver, _ = begun("b")
    receiver, _ = begun("a", public_grader=lambda pairs: [text.startswith("7") for text, _ in pairs])
    generated(receiver)
    sent = generated(giver)
    good = pb.Response(text="7a", finish=pb.FINISH_STOP)
    donors = pb.PublicDonors()
    for row in sent.prompts:
        wrong = next((response for response in row.responses if not response.text.startswith("7")), good)
        donors.prompts.add(
            prompt_index=row.prompt_index,
            donors=[
                pb.Donor(origin="b", position=0, response=good),
                pb.Donor(origin="b", position=1, response=wrong),
            ],
        )
    metrics = receiver.carry_out(PublicStep(1, 2, "replace", donors)).metrics
    assert metrics["donors_found"] == 6
    assert metrics["donors_used"] >= 1
    assert metrics["donors_rejected"].get("b", 0) >= 1
    assert metrics["zero_variance_share"] <= metrics["zero_variance_share_before"]
    assert metrics["alpha_mean"] == pytest.approx(metrics["donors_used"] / 12)
    assert metrics["ratio_deviation_first"] == 0.0


def test_own_answers_differ_between_silos_steps_and_rounds_but_not_between_runs() -> None:
    texts = {}
    for silo in ("a", "b"):
        for step in (2, 4):
            message = generated(begun(silo)[0], step, "all")
            texts[silo, step] = [response.text for row in message.prompts for response in row.responses]
    assert len({tuple(value) for value in texts.values()}) == 4
    again = generated(begun("a")[0], 2, "all")
    assert [response.text for row in again.prompts for response in row.responses] == texts["a", 2]


def drawn_by(session: Session) -> list[tuple[Any, ...]]:
    """Filled with the tokens of whatever the session's engine answers from here on."""
    assert session._run is not None
    engine, seen = session._run.engine, []
    plain = engine.generate

    def spy(questions: Any, **settings: Any) -> Any:
        answers = plain(questions, **settings)
        seen.append(tuple(one.ids for row in answers for one in row))
        return answers

    engine.generate = spy  # type: ignore[method-assign]
    return seen


def test_draws_are_keyed_by_round_and_those_of_an_evaluation_by_silo() -> None:
    """The same adapter and prompts each time, so that nothing but the key can tell the answers apart."""
    off = Limits(share=0.0)  # the marker would ask the engine too
    evaluated = []
    for silo in ("a", "b"):
        session, shape = begun(silo, agreement=off)
        payload, digest = start_payload(shape)
        seen = drawn_by(session)
        for number in (1, 2):
            session.carry_out(LoadAdapter(number, digest), payload)
            session.carry_out(GeneratePublic(number, 2, (4, 0, 9), "all"))
            Session.carry_out(session, PrivateStep(number, 1, (0, 1, 2)))  # these rows, and not a sampler's
        assert len(set(seen)) == len(seen) == 4
        session.carry_out(Evaluate(2, digest), payload)
        evaluated.append(seen[4:])
    assert evaluated[0] != evaluated[1]
    session, shape = begun("a", agreement=off)
    again = drawn_by(session)
    session.carry_out(Evaluate(1, digest), payload)
    assert again == evaluated[0]  # by silo, and not by round


def test_the_engine_rests_while_the_update_is_made() -> None:
    session, _ = begun()
    assert session._run is not None
    told: list[str] = []
    run, engine = session._run, session._run.engine
    generate, rest, update = engine.generate, engine.rest, run.learner.update
    engine.generate = lambda *a, **b: (told.append("generate"), generate(*a, **b))[1]  # type: ignore[method-assign,func-returns-value]
    engine.rest = lambda: (told.append("rest"), rest())[1]  # type: ignore[method-assign,func-returns-value]
    run.learner.update = lambda groups, **how: (told.append("update"), update(groups, **how))[1]  # type: ignore[method-assign,func-returns-value]
    session.carry_out(PrivateStep(1, 1))
    generated(session)
    session.carry_out(PublicStep(1, 2, "none", pb.PublicDonors()))
    assert [one for one in told if one != "generate"] == ["rest", "update", "rest", "update"]
    assert told[-3:] == ["generate", "rest", "update"]


def test_a_public_step_whose_update_fails_can_be_asked_for_again_and_its_donors_count_once() -> None:
    session, _ = begun("a", public_grader=lambda pairs: [text.startswith("7") for text, _ in pairs])
    message = generated(session)
    donors = pb.PublicDonors()
    for row in message.prompts:
        good = pb.Response(text="7a", finish=pb.FINISH_STOP)
        donors.prompts.add(prompt_index=row.prompt_index, donors=[pb.Donor(origin="b", position=0, response=good)])
    assert session._run is not None
    run, step = session._run, PublicStep(1, 2, "replace", donors)
    update = run.learner.update

    def failing(groups: Any, **_: Any) -> Any:
        raise OperationError("the gradient is not finite", code="NOT_FINITE")

    run.learner.update = failing  # type: ignore[method-assign]
    with pytest.raises(OperationError, match="not finite"):
        session.carry_out(step)
    assert run.donors_trained == 0
    run.learner.update = update  # type: ignore[method-assign]
    used = session.carry_out(step).metrics["donors_used"]
    assert used == run.donors_trained > 0
    with pytest.raises(OperationError, match="no public answers"):
        session.carry_out(step)


def test_overlong_public_prompt_is_listed_without_answers() -> None:
    rows = [Row(f"q{place}", "7" * (30 if place == 0 else 3), "0123456789") for place in range(10)]
    session, _ = begun(public=rows)
    message = generated(session, offer="all")
    assert [(row.prompt_index, row.samples) for row in message.prompts] == [(4, 4), (0, 0), (9, 4)]
    session.carry_out(PublicStep(1, 2, "none", pb.PublicDonors()))


def test_evaluation_leaves_the_local_factors_alone_and_repeats() -> None:
    session, shape = begun()
    session.carry_out(PrivateStep(1, 1))
    before = delta_of(session)
    other = payload_of(shape, random_factors(shape, 3, b_scale=0.5))
    first = session.carry_out(Evaluate(1, "aa"), other).body
    assert session.carry_out(Evaluate(1, "aa"), other).body == first
    assert session.carry_out(Evaluate(0, "")).body != first
    after = delta_of(session)
    assert all((before[name] == after[name]).all() for name in before)


def test_base_evaluation_ignores_whatever_adapter_is_loaded() -> None:
    bodies = []
    for b_scale in (0.0, 0.7):
        session, shape = make_session()
        session.carry_out(LoadAdapter(1, "d"), payload_of(shape, random_factors(shape, 1, b_scale)))
        bodies.append(session.carry_out(Evaluate(0, "")).body)
    assert bodies[0] == bodies[1]


def test_evaluation_counts_by_hand() -> None:
    """Three prompts can be answered right by anything, three by nothing; topics split them."""
    rows = [Row(f"h{place}", "5?", "yes" if place < 3 else "no", "easy" if place < 4 else "hard") for place in range(8)]
    session, _ = begun(held_out=rows, held_out_grader=lambda pairs: [reference == "yes" for _, reference in pairs])
    message = decode(pb.MetricsEval, session.carry_out(Evaluate(0, "")).body)
    values = {(metric.name, metric.topic): metric.value for metric in message.metrics}
    for name in ("pass_at_1", "pass_at_1_greedy"):
        assert (values[name, ""], values[name, "easy"], values[name, "hard"]) == (0.5, 0.75, 0.0)
    assert len(values) == 6


@pytest.mark.parametrize(("wire_dtype", "limit"), [("float32", 1e-6), ("bfloat16", 0.01)])
def test_wire_round_trip_of_a_small_update_loses_little(wire_dtype: str, limit: float) -> None:
    """At lr 1e-5 the difference survives bfloat16; a bfloat16 copy of the whole factors would not."""
    session, shape = begun(plan=make_plan(optimiser__learning_rate=1e-5))
    session.carry_out(PrivateStep(1, 1))
    delta = delta_of(session)
    start = random_factors(shape)

    def through_the_wire(tensors: dict[str, np.ndarray[Any, Any]]) -> dict[str, np.ndarray[Any, Any]]:
        sent = encode_factors(
            tensors, base_digest="", schema_sha256=ZERO_DIGEST, rank=shape.rank, scale=shape.scale, dtype=wire_dtype
        )
        return dict(decode_factors(sent).tensors)

    def loss_of(got: dict[str, np.ndarray[Any, Any]]) -> float:
        error = sum(float(np.square(got[name] - delta[name]).sum()) for name in delta)
        return float(np.sqrt(error / sum(float(np.square(array).sum()) for array in delta.values())))

    assert loss_of(through_the_wire(delta)) <= limit
    if wire_dtype == "bfloat16":
        whole = through_the_wire({name: start[name] + delta[name] for name in delta})
        assert loss_of({name: whole[name] - start[name] for name in delta}) > 0.1


@pytest.mark.slow
def test_private_batches_pass_over_every_row_before_any_returns_and_a_restart_repeats_them(tmp_path: Path) -> None:
    seen: list[str] = []

    def spy(pairs: Any) -> list[bool]:
        seen.append(",".join(sorted({reference for _, reference in pairs})))
        return [False for _ in pairs]

    rows = [Row(f"p{place}", f"{place}?", str(place)) for place in range(6)]

    def run(rounds: tuple[int, ...]) -> list[str]:
        session, shape = make_session(private=rows, private_grader=spy, state_path=tmp_path / "sampler.json")
        payload, digest = start_payload(shape)
        seen.clear()
        for number in rounds:
            session.carry_out(LoadAdapter(number, digest), payload)
            session.carry_out(PrivateStep(number, 1))
            session.carry_out(PrivateStep(number, 2))
        return list(seen)

    whole = run((1, 2, 3))
    assert set(",".join(whole[:2]).split(",")) == set("012345")
    assert set(",".join(whole[2:4]).split(",")) == set("012345")
    shutil.rmtree(tmp_path)
    assert run((1, 2)) == whole[:4]
    assert run((2,)) == whole[2:4], "a restart repeats the round it was in"
    assert run((3,)) == whole[4:], "and goes on after it"


def test_a_sampler_that_is_started_again_goes_on_where_it_stood(tmp_path: Path) -> None:
    def sampler(folder: str) -> PrivateSampler:
        return PrivateSampler(100, b"secret", 1, tmp_path / folder / "sampler.json")

    undisturbed = sampler("whole")
    batches: dict[int, list[list[int]]] = {}
    for number in (1, 2, 3):
        undisturbed.start_round(number)
        batches[number] = [undisturbed.draw(8) for _ in range(5)]
    for number, expected in batches.items():
        again = sampler("restarted")  # a new process each round
        again.start_round(number)
        assert [again.draw(8) for _ in range(5)] == expected
    torn = sampler("restarted")
    torn.start_round(3)
    assert torn.draw(8) == batches[3][0]
    repeated = sampler("restarted")
    repeated.start_round(3)
    assert [repeated.draw(8) for _ in range(5)] == batches[3]
    rows = [row for drawn in batches.values() for batch in drawn for row in batch]
    assert sorted(rows[:100]) == list(range(100)), "a restart draws no row twice before all were drawn"


@pytest.mark.parametrize("abandoned", [False, True])
def test_donors_of_an_abandoned_round_are_not_counted_in_the_next(abandoned: bool) -> None:
    session, shape = make_session("a", public_grader=lambda pairs: [text.startswith("7") for text, _ in pairs])
    payload, digest = start_payload(shape)
    counted: list[float] = []
    used: list[int] = []
    for number in (1, 2):
        session.carry_out(LoadAdapter(number, digest), payload)
        body = session.carry_out(GeneratePublic(number, 2, (4, 0, 9), "correct")).body
        donors = pb.PublicDonors()
        for row in decode(pb.PublicResponses, body).prompts:
            good = pb.Response(text="7a", finish=pb.FINISH_STOP)
            donors.prompts.add(prompt_index=row.prompt_index, donors=[pb.Donor(origin="b", position=0, response=good)])
        used.append(session.carry_out(PublicStep(number, 2, "replace", donors)).metrics["donors_used"])
        if number == 2 or not abandoned:
            evaluated = session.carry_out(Evaluate(number, digest), payload).body
            [figure] = [metric for metric in decode(pb.MetricsEval, evaluated).metrics if metric.name == DONORS_TRAINED]
            counted.append(figure.value)
    assert min(used) > 0
    assert counted == (used[1:] if abandoned else used)


def test_private_order_hangs_on_the_site_secret() -> None:
    deltas = []
    for secret in (b"one", b"two"):
        session, _ = begun(site_secret=secret)
        session.carry_out(PrivateStep(1, 1))
        deltas.append(delta_of(session))
    assert any((deltas[0][name] != deltas[1][name]).any() for name in deltas[0])


@pytest.mark.parametrize(
    ("breach", "expected"),
    [
        (lambda session: session.carry_out(PublicStep(1, 2, "none", pb.PublicDonors())), OperationError),
        (lambda session: session.carry_out(LoadAdapter(1, "d"), payload_of(LoraShape(4, 8.0, {}), {})), PeerError),
        (lambda session: session.begin_run(make_plan(), LoraShape(4, 8.0, {})), UsageError),
    ],
)
def test_what_does_not_fit_is_refused(breach: Any, expected: type[FedSiloError]) -> None:
    session, _ = begun()
    with pytest.raises(expected):
        breach(session)


def test_export_before_anything_was_loaded_is_refused() -> None:
    session, _ = make_session()
    with pytest.raises(OperationError):
        session.carry_out(ExportDelta(1))


@pytest.mark.parametrize(
    "changes", [{"rollout__max_prompt_tokens": 1}, {"rollout__max_new_tokens": 60}], ids=["no prompt", "context"]
)
def test_a_plan_the_model_cannot_serve_is_refused(changes: dict[str, int]) -> None:
    with pytest.raises(UsageError):
        make_session(plan=make_plan(**changes))


def test_schema_of_another_model_is_refused() -> None:
    session, shape = make_session()
    del session
    from silo.trainer.adapters.lora import LoraAdapter
    from tests.algorithms.tiny import make_model

    with pytest.raises(UsageError):
        LoraAdapter(make_model(), LoraShape(shape.rank + 1, shape.alpha, shape.shapes))
    with pytest.raises(UsageError):
        LoraAdapter(make_model(), LoraShape(4, 8.0, {"model.norm.lora_A": (4, 24), "model.norm.lora_B": (24, 4)}))


TASKS = (
    LoadAdapter(2, "d"), PrivateStep(2, 3, (4, 0)), GeneratePublic(1, 2, (3, 1), "all"), AnswerAhead(1, 2, (3, 1)),
    PublicStep(1, 2, "pool", pb.PublicDonors(prompts=[pb.PromptDonors(prompt_index=3)])), ExportDelta(2),
    Evaluate(0, ""), MeasureHoldout(2, 3, "held_out"), LoadOwn(2), EvaluateOwn(1),
    LikelihoodStep(1, 2, (3, 1)), LoadReference(1, "d"),
)  # fmt: skip


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_a_task_is_read_as_it_was_written(task: TrainerTask) -> None:
    assert task_from_fields(json.loads(json.dumps(task.fields())), task.body()) == task


def test_every_task_is_carried_out() -> None:
    assert (
        {type(task) for task in TASKS}
        == set(CARRIED_OUT)
        >= {task for method in METHODS.values() for task in method.tasks}
    )
    assert PrivateStep(2, 3, (4, 0)).fields() == {"task": "PrivateStep", "round": 2, "step": 3, "rows": [4, 0]}


@pytest.mark.parametrize(
    "fields", [{"task": "Delete", "round": 1}, {"round": 1}, {"task": "PrivateStep", "round": "x"}]
)
def test_other_tasks_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(OperationError):
        task_from_fields(fields, b"")
