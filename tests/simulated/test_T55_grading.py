"""T55 at a silo: nothing is graded for a message that a rule refuses, an answer that is not graded in time is dropped
and decides nothing, and people's orders wait for no grading."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from fedsilo.grading.verdict import CRASHED, TIMEOUT, Verdict, judged
from fedsilo.protocol import codec
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.place import Place
from policies.replay import replay
from silo.guard.gate import Allowed
from silo.guard.ledger import Release
from silo.guard.messages import Denied, Held, IngressDenied
from tests.policies import setting
from tests.simulated import screening as site
from tests.world import ADAPTER, Bench, Loop, command

TEXT = setting.policy_text()
POLICY = setting.policy_of(TEXT)
LATE = {"slow": TIMEOUT, "deadly": CRASHED}


class Grader:
    """Right when the texts are equal. Counts what it is asked; on "slow" its time runs out, on "deadly" it dies."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def grade_many(self, pairs: Sequence[tuple[str, str]], budget_seconds: float | None = None) -> list[Verdict]:
        self.asked += [response for response, _ in pairs]
        return [LATE.get(response, judged(response == reference)) for response, reference in pairs]


@pytest.fixture
def grader() -> Grader:
    return Grader()


@pytest.fixture
def bench(tmp_path: Path, grader: Grader) -> Iterator[Bench]:
    with closing(Bench(tmp_path / "a", POLICY, grader=grader)) as made:
        yield made


def let_in(bench: Bench, *donors: tuple[int, str, str | None]) -> list[tuple[int, str, str]]:
    """What of the donors reaches the trainer: (row, whose, text)."""
    body = bench.poll("public.donors", setting.donors_message(*donors).body, step=2)
    return [
        (prompt.prompt_index, donor.origin, donor.response.text) for prompt in body.prompts for donor in prompt.donors
    ]


def last(bench: Bench, event: str) -> dict[str, Any]:
    record = bench.events(event)[-1]
    assert not any(each.changed for each in replay(bench.audit.records(), bench.policy))
    return record


# ---- what a rule refuses is not graded ---------------------------------------------------------------


@pytest.mark.parametrize(
    "donors",
    [
        [(1, "hospital_z", "12")],  # no peer
        [(2, "hospital_b", "12")],  # a row that the step does not ask for
        [(1, "hospital_b", "12" * 40_000)],  # too long
        [(1, "hospital_b", "12")] * 400,  # too many for one prompt
    ],
    ids=["stranger", "other row", "too long", "too many"],
)
def test_T55_donors_that_a_rule_refuses_are_never_graded(
    bench: Bench, grader: Grader, donors: list[tuple[int, str, str]]
) -> None:
    with pytest.raises(IngressDenied):
        let_in(bench, *donors)
    record = last(bench, "ingress.decision")
    assert grader.asked == [] and record["decision"] == "deny"
    assert not {"NOT_VERIFIED", "SCREEN_FAILED"} & set(record["reasons"])  # what was not looked at is no reason
    assert let_in(bench, (1, "hospital_b", "12")) == [(1, "hospital_b", "12")]
    assert grader.asked == ["12"]


@pytest.mark.parametrize("screened", [False, True])
def test_T55_answers_of_its_own_that_a_rule_refuses_are_never_graded(
    tmp_path: Path, grader: Grader, screened: bool
) -> None:
    of = site.bench if screened else Bench
    with closing(of(tmp_path / "a", site.policy() if screened else POLICY, grader=grader)) as made:
        refused = made.responses((1, ("12",) * 5), (4, ()), (7, ()))  # more than the samples that were asked for
        assert isinstance(refused, Denied) and grader.asked == []
        assert "NOT_VERIFIED" not in last(made, "egress.decision")["reasons"]
        assert isinstance(made.responses((1, ("12",)), (4, ()), (7, ())), Allowed)
        assert grader.asked == ["12"]


def test_T55_what_was_not_graded_is_let_through_by_no_rule() -> None:
    """An offer is judged without verdicts; what is final without them is refused, also where the offer was not."""
    for message in (setting.donors_message((1, "hospital_b", "12")), setting.responses_message()):
        changes = setting.FROM_COORDINATOR if message.direction == "ingress" else {}
        assert "NOT_VERIFIED" in setting.judged(message, POLICY, **changes).reasons


# ---- what was not graded in time ---------------------------------------------------------------------


@pytest.mark.parametrize("late", list(LATE))
def test_T55_a_donor_that_is_not_graded_in_time_is_dropped_and_counted(bench: Bench, late: str) -> None:
    donors = [(1, "hospital_b", "12"), (1, "hospital_c", late), (4, "hospital_c", "12"), (4, "hospital_b", "13")]
    assert let_in(bench, *donors) == [(1, "hospital_b", "12"), (4, "hospital_c", "12")]
    record = last(bench, "ingress.decision")
    assert record["decision"] == "allow"
    assert record["facts"]["transform"]["donors_dropped"] == {"hospital_b": 1, "hospital_c": 1}
    assert record["facts"]["transform"]["donors_ungraded"] == 1


def test_T55_where_wrong_donors_are_wanted_one_without_a_verdict_is_not(tmp_path: Path, grader: Grader) -> None:
    policy = setting.policy_of(setting.policy_text("pubswap-random"))
    with closing(Bench(tmp_path / "a", policy, grader=grader)) as made:
        donors = [(1, "hospital_b", "13"), (1, "hospital_c", "slow"), (4, "hospital_c", "12")]
        assert let_in(made, *donors) == [(1, "hospital_b", "13"), (4, "hospital_c", "12")]


def test_T55_an_answer_of_its_own_that_is_not_graded_in_time_stays_here_and_the_others_leave(bench: Bench) -> None:
    allowed = bench.responses((1, ("12", "slow", "12")), (4, ("deadly",)), (7, ()))
    assert isinstance(allowed, Allowed)
    left = pb.PublicResponses.FromString(bytes(allowed.payload))
    assert [(row.prompt_index, [each.text for each in row.responses]) for row in left.prompts] == [
        (1, ["12", "12"]), (4, []), (7, []),
    ]  # fmt: skip
    record = last(bench, "egress.decision")
    assert record["facts"]["transform"] == {"responses_ungraded": 2} and record["facts"]["final"]["responses"] == 2
    assert place_of_own(bench, 1, 1) == 2  # the trainer still counts the one that stayed


def place_of_own(bench: Bench, row: int, position: int) -> int:
    """The trainer's number of the own answer that the coordinator names by its place in what was sent."""
    body = pb.PublicDonors()
    body.prompts.add(prompt_index=row).donors.add(origin="hospital_a", position=position)
    return int(bench.poll("public.donors", body, step=2).prompts[0].donors[0].position)


def test_T55_with_screens_what_is_late_and_what_has_a_hit_stay_here_and_each_is_counted(tmp_path: Path) -> None:
    with closing(site.bench(tmp_path, site.policy(), grader=_EndOrLate())) as made:
        texts = ("slow", "it is 12", site.PLANTED["canary"], "so 12")
        allowed = made.responses((1, texts), (4, ()), (7, ()))
        assert isinstance(allowed, Allowed)
        left = pb.PublicResponses.FromString(bytes(allowed.payload))
        assert [each.text for each in left.prompts[0].responses] == ["it is 12", "so 12"]
        transform = last(made, "egress.decision")["facts"]["transform"]
        assert transform == {"responses_ungraded": 1, "responses_withheld": 1}
        assert place_of_own(made, 1, 1) == 3


class _EndOrLate(site.EndGrader):
    def grade_many(self, pairs: Sequence[tuple[str, str]], budget_seconds: float | None = None) -> list[Verdict]:
        found = super().grade_many(pairs)
        return [LATE.get(text, verdict) for (text, _), verdict in zip(pairs, found, strict=True)]


# ---- people's orders ---------------------------------------------------------------------------------


class WaitingGrader(Grader):
    """Grades only when it may, as one does whose answers take long."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.may, self.waited, self.graded = threading.Event(), threading.Event(), True, 0

    def grade_many(self, pairs: Sequence[tuple[str, str]], budget_seconds: float | None = None) -> list[Verdict]:
        self.begun.set()
        self.waited = self.may.wait(20)
        self.graded += 1
        return super().grade_many(pairs)


@pytest.fixture
def waiting(tmp_path: Path) -> Iterator[tuple[Loop, WaitingGrader]]:
    """A silo in round 1 whose trainer writes answers to public prompts."""
    grader = WaitingGrader()
    loop = Loop(tmp_path / "a", POLICY, grader=grader)
    loop.offer_plan()
    loop.open_round(adapter=ADAPTER)
    loop.coordinator.says("control.fetch", "global.adapter", ADAPTER, run="run-1", round=1)
    loop.base_evaluated()
    loop.trainer_says("done", task="LoadAdapter", round=1, metrics={})
    loop.trainer_says("done", task="PrivateStep", round=1, metrics={})
    assert loop.trainer.tasks()[-1] == "GeneratePublic"
    yield loop, grader
    loop.close()


def while_graded(loop: Loop, grader: WaitingGrader, watch: Callable[[], object], come: Callable[[Loop], None]) -> None:
    """What comes is graded, for as long as `watch` runs beside."""

    def beside() -> None:
        grader.begun.wait(20)
        try:
            watch()
        finally:
            grader.may.set()

    person = threading.Thread(target=beside)
    person.start()
    come(loop)
    person.join(20)


def answers_come(loop: Loop) -> None:
    rows = loop.bench.judge.view.steps[2]
    body = setting.responses_body((rows[0], ("12",)), *((row, ()) for row in rows[1:]))
    loop.trainer_says("done", codec.encode(body), task="GeneratePublic", round=1, metrics={})


def meanwhile(loop: Loop, grader: WaitingGrader, name: str) -> list[Any]:
    """Give an order while answers are graded, which go on only when it was answered. What came of it."""
    answered: list[Any] = []

    def order() -> None:
        work = getattr(loop.guard.orders, name)
        answered.append(loop.guard.on_loop(lambda: work(command(f"silo.{name}", {}, roles=("operator",)))))

    while_graded(loop, grader, order, answers_come)
    return answered


def test_T55_a_pause_is_answered_while_answers_are_graded_and_these_leave_all_the_same(
    waiting: tuple[Loop, WaitingGrader],
) -> None:
    loop, grader = waiting
    (answer,) = meanwhile(loop, grader, "pause")
    assert grader.waited and answer["paused"] is True, "the order did not wait for grading"
    assert [pb.PublicResponses.FromString(raw).prompts[0].responses[0].text
            for _, raw in loop.coordinator.bodies("public.responses")] == ["12"]  # fmt: skip
    assert loop.guard.runs.run is not None and loop.guard.runs.run.paused


def test_T55_who_leaves_while_answers_are_graded_sends_none_and_begins_nothing(
    waiting: tuple[Loop, WaitingGrader],
) -> None:
    loop, grader = waiting
    given = list(loop.trainer.tasks())
    (answer,) = meanwhile(loop, grader, "leave")
    assert grader.waited and answer["left"] is True
    assert loop.coordinator.bodies("public.responses") == [] and loop.guard.runs.run is None
    loop.turn(3)
    assert loop.trainer.tasks() == given


# ---- what is due by the clock ------------------------------------------------------------------------


def after(loop: Loop, seconds: float) -> None:
    """So much time passes while answers are graded; whatever is due then is done when this returns."""

    def passes() -> None:
        loop.clock += seconds
        loop.bench.clock_now += seconds

    loop.guard.on_loop(passes)
    loop.guard.on_loop(lambda: None)


def test_T55_a_silo_shows_that_it_is_there_while_answers_are_graded(waiting: tuple[Loop, WaitingGrader]) -> None:
    loop, grader = waiting
    beats: list[int] = []

    def watch() -> None:
        for _ in range(30):
            after(loop, 2.0)
            beats.append(len(loop.coordinator.bodies("control.heartbeat")))

    while_graded(loop, grader, watch, answers_come)
    assert len(beats) == 30 and beats[-1] - beats[0] in (9, 10, 11)  # one each 6 s, since it looks every 2 s
    assert len(loop.coordinator.bodies("public.responses")) == 1 and loop.guard.failure is None


def test_T55_what_waits_for_people_expires_while_answers_are_graded(waiting: tuple[Loop, WaitingGrader]) -> None:
    loop, grader = waiting
    ledger, states = loop.bench.ledger, list[str]()
    now = loop.bench.clock_now
    release = Release(
        id="r1/hospital_a/9", digest="d" * 64, place=Place("run-1", 1, 0, "lora.factors"), policy_digest="",
        payload_bytes=1, recorded={}, facts={}, rules=(), persons=1, requested_at=now, expires_at=now + 60.0,
        expiry_outcome="denied", state="held", revision=0,
    )  # fmt: skip
    ledger.hold(release, b"x")

    def watch() -> None:
        for seconds in (50.0, 20.0):
            after(loop, seconds)
            states.append(ledger.release(release.id).state)

    while_graded(loop, grader, watch, answers_come)
    assert states == ["held", "expired"]


def test_T55_a_deadline_passes_while_donors_are_graded_and_the_step_goes_on_without_them(
    waiting: tuple[Loop, WaitingGrader],
) -> None:
    loop, grader = waiting
    grader.may.set()
    loop.turn_seconds = 2.0
    answers_come(loop)
    assert len(loop.coordinator.bodies("public.responses")) == 1
    ((at, _),) = loop.guard.runs.deadlines
    grader.begun.clear()
    grader.may.clear()
    given: list[list[str]] = []

    def watch() -> None:
        for seconds in (1.0, at - loop.clock):
            after(loop, seconds)
            given.append(loop.trainer.tasks())

    donors = setting.donors_message((loop.bench.judge.view.steps[2][0], "hospital_b", "12")).body
    loop.coordinator.says("control.poll", "public.donors", donors, run="run-1", round=1, step=2)
    while_graded(loop, grader, watch, Loop.turn)
    assert [tasks[-1] for tasks in given] == ["GeneratePublic", "PublicStep"]
    assert loop.guard.failure is None and loop.trainer.tasks().count("PublicStep") == 1


def test_T55_a_silo_that_is_stopped_does_not_wait_for_what_it_grades(waiting: tuple[Loop, WaitingGrader]) -> None:
    loop, grader = waiting

    def beside() -> None:
        grader.begun.wait(20)
        loop.guard.stop()

    signal = threading.Thread(target=beside)
    signal.start()
    answers_come(loop)
    ended_first = not grader.may.is_set() and grader.graded == 0
    grader.may.set()
    signal.join(20)
    assert ended_first and loop.guard.stopping and loop.coordinator.bodies("public.responses") == []


def test_T55_donors_are_judged_by_the_policy_that_is_in_force_once_they_are_graded(
    tmp_path: Path, grader: Grader
) -> None:
    stricter = setting.policy_of(re.sub(r"max_bytes_per_response: \d+", "max_bytes_per_response: 1", TEXT))
    made = Bench(tmp_path / "a", POLICY, grader=grader)
    with closing(made):

        def aside(work: Any) -> Any:
            done = work()
            made.judge.policy = stricter  # as a person's reload does meanwhile
            return done

        made.judge.aside = aside
        with pytest.raises(IngressDenied, match="RESPONSE_BYTES"):
            let_in(made, (1, "hospital_b", "12"))
        assert grader.asked == ["12"]


def test_T55_an_approval_waits_for_no_grading(tmp_path: Path) -> None:
    asked = site.policy(on_hit="hold")
    grader = _CountingEnd()
    with closing(site.bench(tmp_path, asked, grader=grader)) as made:
        held = made.responses((1, (site.PLANTED["canary"], "so 12")), (4, ()), (7, ()))
        assert isinstance(held, Held) and grader.batches == 1
        release = made.releases.hold(held, deadline_seconds=None)
        shown = {"release": release.id, "digest": release.digest, "policy_digest": asked.digest}
        _, settled = made.releases.approve(command("approvals.approve", shown | made.opened(release.id)))
        assert settled is not None and settled.outcome == "allowed" and grader.batches == 1
        final = last(made, "egress.decision")["facts"]["final"]
        assert (final["graded"], final["responses_correct"], final["responses_wrong"]) == (True, 2, 0)


class _CountingEnd(site.EndGrader):
    batches = 0

    def grade_many(self, pairs: Sequence[tuple[str, str]], budget_seconds: float | None = None) -> list[Verdict]:
        self.batches += 1
        return super().grade_many(pairs)


def test_T55_answers_of_which_one_is_graded_wrong_are_refused_before_any_screen_reads_them(tmp_path: Path) -> None:
    with closing(site.bench(tmp_path, site.policy())) as made:
        assert isinstance(made.responses((1, ("it is 13", site.PLANTED["canary"])), (4, ()), (7, ())), Denied)
        record = last(made, "egress.decision")
        assert (record["reasons"], record["facts"]["final"]["stage"]) == (["NOT_VERIFIED"], "offered")
        assert made.events("screen.hit") == []
        made.responses((1, ("it is 12", site.PLANTED["canary"])), (4, ()), (7, ()))
        assert len(made.events("screen.hit")) == 1
