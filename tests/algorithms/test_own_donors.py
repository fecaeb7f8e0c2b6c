"""The controls of swapping: donors that nobody sent, from the silo's own further answers or the public file."""

from __future__ import annotations

import dataclasses

import pytest

from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.plan import Plan
from fedsilo.protocol.swap import donors_wanted
from fedsilo.protocol.tasks import Evaluate, ExportDelta, GeneratePublic, LoadAdapter, PublicStep
from silo.trainer.run import Done
from tests.algorithms.tiny import make_plan, make_rows, make_session, start_payload

pytestmark = pytest.mark.torch
PROMPTS = (4, 0, 9)
KEY = "7"  # the file's answer to every public prompt here, which a random model seldom gives
WORK = "7ab"  # the same with its work
PUBLIC = [dataclasses.replace(row, answer=KEY, solution=WORK) for row in make_rows(10, "q")]


def stepped(swap: str, donors: pb.PublicDonors | None = None, plan: Plan | None = None) -> tuple[Done, bytes]:
    """The first public step of a round with this swap, and the update after it."""
    session, shape = make_session(plan=plan or make_plan(), public=PUBLIC)
    payload, digest = start_payload(shape)
    session.carry_out(LoadAdapter(1, digest), payload)
    session.carry_out(GeneratePublic(1, 2, PROMPTS, "none"))
    done = session.carry_out(PublicStep(1, 2, swap, donors or pb.PublicDonors()))
    return done, bytes(session.carry_out(ExportDelta(1)).body)


@pytest.mark.parametrize(("swap", "text"), [("key", KEY), ("worked-key", WORK)])
def test_key_swap_is_a_swap_of_the_files_answers_or_solutions(swap: str, text: str) -> None:
    """The same donors, handed over as if another silo had sent them, give the same update, bit for bit."""
    wanted = donors_wanted(0, make_plan().samples_per_prompt)
    answer = pb.Response(text=text, finish=pb.FINISH_STOP)
    sent = pb.PublicDonors()
    for index in PROMPTS:
        donors = [pb.Donor(origin="b", position=place, response=answer) for place in range(wanted)]
        sent.prompts.add(prompt_index=index, donors=donors)
    expected, update = stepped("replace", sent)
    found, own_update = stepped(swap)
    assert own_update == update != stepped("none")[1]
    assert found.metrics["donors_used"] == expected.metrics["donors_used"] > 0
    assert found.metrics["alpha_max"] <= 0.5, "never more than up to half of a group"


def test_self_swap_of_a_silo_that_is_alone_is_a_step_without_a_swap() -> None:
    alone = make_plan(silos=("a",))
    done, update = stepped("self", plan=alone)
    assert update == stepped("none", plan=alone)[1]
    assert "extra_tokens" not in done.metrics and done.metrics["donors_used"] == 0


def test_self_swap_draws_as_many_answers_as_the_others_would_have_given() -> None:
    plan = make_plan(silos=("a", "b", "c"), samples_per_prompt=16)
    done, update = stepped("self", plan=plan)
    answers = 2 * len(PROMPTS) * plan.samples_per_prompt
    assert answers <= done.metrics["extra_tokens"] <= answers * plan.rollout.max_new_tokens
    assert 0 < done.metrics["donors_used"] <= done.metrics["donors_wanted"]
    assert done.metrics["zero_variance_share"] <= done.metrics["zero_variance_share_before"]
    assert (done.metrics["extra_tokens"], update) == (stepped("self", plan=plan)[0].metrics["extra_tokens"], update)


def test_self_swap_draws_as_many_further_answers_as_its_option_says() -> None:
    """As many as two other silos would give, whoever else is in the run; none of them is no swap."""
    alone = make_plan(silos=("a",), samples_per_prompt=16, options={"further": 2})
    three = make_plan(silos=("a", "b", "c"), samples_per_prompt=16)
    assert stepped("self", plan=alone)[1] == stepped("self", plan=three)[1]
    none = make_plan(silos=("a", "b", "c"), samples_per_prompt=16, options={"further": 0})
    assert stepped("self", plan=none)[1] == stepped("none", plan=none)[1]


def test_the_run_record_counts_only_donors_that_were_sent() -> None:
    """Rulesets of methods under which nobody's answers come in let no other figure than 0 out."""
    session, shape = make_session(plan=make_plan(), public=PUBLIC)
    payload, digest = start_payload(shape)
    sent = pb.PublicDonors()
    answer = pb.Response(text=KEY, finish=pb.FINISH_STOP)
    for index in PROMPTS:
        sent.prompts.add(prompt_index=index, donors=[pb.Donor(origin="b", position=0, response=answer)])
    counts = {}
    for number, (swap, donors) in enumerate((("key", pb.PublicDonors()), ("replace", sent)), 1):
        session.carry_out(LoadAdapter(number, digest), payload)
        session.carry_out(GeneratePublic(number, 2, PROMPTS, "none"))
        used = session.carry_out(PublicStep(number, 2, swap, donors)).metrics["donors_used"]
        assert used > 0
        done = session.carry_out(Evaluate(number, digest), payload)
        metrics = pb.MetricsEval.FromString(bytes(done.body)).metrics
        (counts[swap],) = (metric.value for metric in metrics if metric.name == "donors_trained")
    assert counts["key"] == 0 < counts["replace"]


@pytest.mark.parametrize("swap", ["key", "worked-key", "self"])
def test_nothing_of_either_leaves(swap: str) -> None:
    from fedsilo.protocol.methods import method_named

    method = method_named(f"{swap}-swap")
    assert "public.responses" not in method.kinds and method.ruleset == "fedavg"
