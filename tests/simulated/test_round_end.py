"""A run with `exchange: round_end`: the pool of each round at the real coordinator, whatever happens; and a round at
one site, with the real guard.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from coordinator import store as db
from coordinator.runs import stored_events
from fedsilo.audit.audit_verify import verify_logs
from fedsilo.protocol import codec, rounds
from fedsilo.protocol import method as events
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.codec import canonical_json, sha256_hex
from fedsilo.protocol.errors import FedSiloError, UnreachableError
from fedsilo.protocol.methods import METHODS
from fedsilo.protocol.plan import Plan, plan_from_canonical
from fedsilo.protocol.swap import public_batch, rows_ahead
from fedsilo.protocol.tasks import PublicStep
from silo.guard.round_agreement import Agreement
from tests.policies import setting
from tests.simulated.coordinator_parts import REFERENCES, RUN_YAML, SILOS, House, SimulatedSilo, federation, until_quiet
from tests.simulated.queries import as_json
from tests.simulated.test_coordinator_killed import Federation, Killer
from tests.world import ADAPTER, Loop, command, small_factors

ROUND_END = RUN_YAML.replace("rounds: 2", "rounds: 3") + "exchange: round_end\n"
RIGHT = {"hospital_a": 0, "hospital_b": 2, "hospital_c": 3, "hospital_d": 1}  # of 4, whatever the prompt


def play(folder: Path, text: str = ROUND_END, *, gone: dict[str, int] | None = None) -> tuple[House, Any]:
    """A whole run. gone: silos that say nothing any more from a round's opening on."""
    house, silos = federation(folder)
    house.submit(text)
    trained: dict[str, list[Any]] = {silo.name: [] for silo in silos}
    for silo in silos:
        watch(silo, trained[silo.name], (gone or {}).get(silo.name, 99))
        silo.join()
    until_quiet(silos)
    while house.run().state == "running":
        house.advance(200.0)
        until_quiet(silos)
    return house, trained


def watch(silo: SimulatedSilo, tasks: list[Any], last: int) -> None:
    work, react = silo.work, silo.react

    def noted(task: Any) -> Any:
        tasks.append(task)
        return work(task)

    def heard(envelope: pb.Envelope, body: Any) -> None:
        if envelope.round < last:
            react(envelope, body)

    silo.work, silo.react = noted, heard  # type: ignore[method-assign]


def public_steps(tasks: list[Any]) -> dict[tuple[int, int], PublicStep]:
    return {(task.round, task.step): task for task in tasks if isinstance(task, PublicStep)}


def origins(task: PublicStep) -> Counter[str]:
    return Counter(donor.origin for row in task.donors.prompts for donor in row.donors)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[House, Any]]:
    house, trained = play(tmp_path_factory.mktemp("whole"))
    yield house, trained
    house.close()


def test_three_rounds_swap_with_the_answers_of_the_round_before_and_nobody_waits(whole: tuple[House, Any]) -> None:
    house, trained = whole
    plan = plan_from_canonical(house.run().plan)
    assert (house.run().state, house.run().reason) == ("finished", "")
    for name in SILOS:
        steps = public_steps(trained[name])
        assert list(steps) == [(number, step) for number in (1, 2, 3) for step in (2, 4)]
        assert [origins(steps[1, step]) for step in (2, 4)] == [Counter()] * 2, "the first round has no donors"
        for number, step in list(steps)[2:]:
            task = steps[number, step]
            # two of K = 4 for each of three prompts, of the six right answers less its own: two where there are two
            assert [row.prompt_index for row in task.donors.prompts] == list(public_batch(plan, number, step))
            assert [len(row.donors) for row in task.donors.prompts] == [2] * 3
            assert set(origins(task)) <= {other for other in SILOS if RIGHT[other]} - {name}
            for row in task.donors.prompts:
                assert all(donor.response.text == REFERENCES[row.prompt_index] for donor in row.donors)
    stored = house.rows(lambda session: stored_events(session, "run-1"))
    assert not [each for each in stored if isinstance(each, events.StartDeadline) and each.name.startswith("public/")]
    uploads = house.rows(lambda session: list(session.scalars(select(db.Upload))))
    kinds = Counter((row.kind, row.round) for row in uploads)
    # four silos: two public steps of the next round, which the last round has not
    assert {key: count for key, count in kinds.items() if key[0] == "public.responses"} == {
        ("public.responses", 1): 8, ("public.responses", 2): 8,
    }  # fmt: skip
    assert kinds["lora.factors", 3] == kinds["metrics.eval", 3] == kinds["metrics.eval", 0] == 4
    transcripts = house.rows(lambda session: list(session.scalars(select(db.RoundTranscript))))
    assert [row.round for row in transcripts] == [1, 2, 3]
    for number, text in ((row.round, row.canonical) for row in transcripts):
        expected = {
            name: sha256_hex(canonical_json({
                str(row.step): row.digest for row in uploads
                if (row.silo, row.round, row.kind) == (name, number - 1, "public.responses")
            }))
            for name in SILOS
        }  # fmt: skip
        assert json.loads(text).get("pool") == (expected if number > 1 else None), "all sign which answers they are"
    record = house.record()
    assert [row["donors_sent"].get("hospital_b", 0) for row in record["rounds"]] == [0, 12, 12]


@pytest.mark.slow
def test_a_coordinator_killed_again_and_again_makes_the_same_run(tmp_path: Path, whole: tuple[House, Any]) -> None:
    house, trained = whole
    killer = Killer(3, 53)
    played = Federation(tmp_path, killer, plan=ROUND_END)
    kept: dict[str, list[Any]] = {silo.name: [] for silo in played.silos}
    for silo in played.silos:
        watch(silo, kept[silo.name], 99)
    played.play()
    assert min(killer.kills.values()) > 1 and set(killer.kills) == {"before", "after"}
    assert (played.house.run().state, played.house.run().adapter_digest) == ("finished", house.run().adapter_digest)
    for name in SILOS:
        assert public_steps(kept[name]) == public_steps(trained[name]), "the pool outlives the coordinator"
    stored = played.house.rows(lambda session: stored_events(session, "run-1"))
    told = Counter(each for each in stored if isinstance(each, rounds.Contribution))
    assert max(told.values()) == 1 and len(told) == len(SILOS) * (2 * 2 + 3 + 4)
    played.house.close()
    assert [result["problems"] for result in verify_logs([tmp_path / "audit"])] == [[]]


@pytest.mark.slow
def test_a_silo_that_dropped_out_donates_what_it_gave_and_no_more(tmp_path: Path) -> None:
    house, trained = play(tmp_path, gone={"hospital_c": 2})
    run = house.record()
    assert [row["participants"] for row in run["rounds"]] == [
        list(SILOS), *[[name for name in SILOS if name != "hospital_c"]] * 2,
    ]  # fmt: skip
    steps = public_steps(trained["hospital_a"])
    assert "hospital_c" in origins(steps[2, 2]) + origins(steps[2, 4]), "given in the first round, with its update"
    assert set(origins(steps[3, 2]) + origins(steps[3, 4])) == {"hospital_b", "hospital_d"}


def test_answers_are_taken_to_the_next_rounds_prompts_and_to_no_others(tmp_path: Path) -> None:
    house, silos = federation(tmp_path)
    house.submit(ROUND_END.replace("rounds: 3", "rounds: 2"))
    silo = silos[0]
    silo.mute |= {"lora.factors", "public.responses"}
    for each in silos:
        each.join()
    until_quiet(silos)

    def answered(step: int, rows: tuple[int, ...], text: str = "") -> bool:
        number, body = house.driver.runs["run-1"].life.open_round, silo.answers(rows)
        if text:
            body.prompts[0].responses.add(text=text, finish=pb.FINISH_STOP)
        return isinstance(silo.say("public.responses", body, run="run-1", number=number, step=step), pb.Ack)

    assert silo.plan is not None and house.driver.runs["run-1"].life.open_round == 1
    rows, this_round = rows_ahead(silo.plan, 1), public_batch(silo.plan, 1, 2)
    assert set(this_round) != set(rows[2])
    assert not answered(2, this_round), "each silo answers this round's for itself"
    assert not answered(3, rows[2]), "no public step"
    assert not answered(2, rows[2], "wrong"), "the coordinator grades them too"
    assert answered(2, rows[2], REFERENCES[rows[2][0]])
    silo.mute.clear()
    silo.offer("lora.factors", 1, 0, None)
    until_quiet(silos[1:])
    assert house.driver.runs["run-1"].life.open_round == 2
    assert not answered(2, public_batch(silo.plan, 2, 2)), "after the last round there is none to answer for"


@pytest.mark.parametrize("name", sorted(METHODS))
def test_only_balanced_exchanges_at_the_rounds_end(tmp_path: Path, name: str) -> None:
    house, _ = federation(tmp_path)
    text = ROUND_END.replace("method: pubswap", f"method: {name}")
    if name == "pubswap":
        house.submit(text)
    else:
        with pytest.raises(FedSiloError, match=f"{name} has no exchange 'round_end'"):
            house.submit(text)


PLAN = setting.PLAN.model_copy(update={"exchange": "round_end"})  # of three rounds
POOL = dict.fromkeys(("hospital_b", "hospital_c"), "ab" * 32)
AHEAD = rows_ahead(PLAN, 1)
UPDATE, ANSWERS = "lora.factors", "public.responses"


def policy(**first_rounds: int) -> Any:
    """The shipped ruleset; people look at that many first rounds of a kind."""
    text = setting.policy_text()
    for kind, count in first_rounds.items():
        place = text.index(f"  {kind.replace('_', '.')}:")
        text = text[:place] + text[place:].replace("first_rounds: 0", f"first_rounds: {count}", 1)
    return setting.policy_of(text)


class KilledError(BaseException):
    """The process is gone: nothing in it may catch this and go on."""


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[Loop]:
    made = Loop(tmp_path / "a", policy())
    yield made
    made.close()


class Work:
    """Answers each task that the trainer is given. right: texts by (for_step, row) of answers ahead."""

    def __init__(self, loop: Loop, **wrong: Any) -> None:
        self.loop, self.wrong, self.done = loop, wrong, 0

    def until(self, kind: str = "") -> dict[str, Any]:
        """Answer tasks up to the first of that kind, which is left open; its fields."""
        while self.done < len(self.tasks):
            fields = self.tasks[self.done]
            if fields["task"] == kind:
                return fields
            self.done += 1
            place = {name: fields[name] for name in ("task", "round")}
            self.loop.trainer_says("done", self.body(fields), **place, metrics={})
        return {}

    @property
    def tasks(self) -> list[dict[str, Any]]:
        return [message.fields for message in self.loop.trainer.told if message.type == "task"]

    def body(self, fields: dict[str, Any]) -> bytes:
        match fields["task"]:
            case "Evaluate":
                body = pb.MetricsEval(split="held_out", adapter_digest=fields["digest"])
                body.metrics.add(name="pass_at_1", value=0.25)
                return codec.encode(body)
            case "AnswerAhead":
                text = self.wrong.get("text", "12") if fields["for_step"] == 4 else "12"
                rows = self.wrong.get("rows", fields["prompt_indices"])
                return codec.encode(setting.responses_body(*((row, (text, text)) for row in rows)))
            case "GeneratePublic":
                return codec.encode(setting.responses_body(*((row, ()) for row in fields["prompt_indices"])))
            case "ExportDelta":
                return codec.encode_factors(
                    small_factors(), base_digest=codec.sha256_hex(ADAPTER), schema_sha256=setting.SCHEMA.digest, rank=2,
                    scale=2.0, dtype="float32",
                )  # fmt: skip
        return b""


def opened(loop: Loop, number: int = 1, *donors: tuple[int, pb.PublicDonors], **of_work: Any) -> Work:
    """In round `number`, with these donors behind its opening (step, body), and the base evaluated."""
    loop.offer_plan(PLAN)
    loop.show_round(number, codec.sha256_hex(ADAPTER), plan=PLAN, pool=POOL if number > 1 else {})
    for step, body in donors:
        loop.coordinator.says("control.poll", "public.donors", body, run="run-1", round=number, step=step)
    agreed = loop.signed_by("hospital_b", "hospital_c", "hospital_d")
    loop.coordinator.says("control.poll", "round.agreed", agreed, run="run-1", round=number)
    loop.turn(2 + len(donors))
    loop.coordinator.says("control.fetch", "global.adapter", ADAPTER, run="run-1", round=number)
    loop.base_evaluated()
    work = Work(loop, **of_work)
    work.done = 1
    return work


def told_of_a_pool(loop: Loop, number: int, pool: dict[str, str], plan: Plan = PLAN) -> list[str]:
    """What this site has against a transcript that names this pool."""
    loop.show_round(number, codec.sha256_hex(ADAPTER), plan=plan, pool=pool)
    loop.turn(2)
    return [field for each in loop.bench.events("ingress.decision") for field in each["detail"].get("fields", [])]


@pytest.mark.parametrize(
    ("number", "pool", "exchange", "against"),
    [
        (2, POOL, "round_end", []),
        (2, {}, "round_end", []),
        (1, POOL, "round_end", ["pool"]),
        (2, POOL, "step", ["pool"]),
        (2, {**POOL, "hospital_z": "ab" * 32}, "round_end", ["pool"]),
        (2, {**POOL, "hospital_a": "ab" * 32}, "round_end", ["pool"]),
    ],
    ids=["of others", "nobody's", "first round", "step", "a stranger's", "answers that this site never gave"],
)
def test_a_pool_that_cannot_be_is_not_signed(
    loop: Loop, number: int, pool: dict[str, str], exchange: str, against: list[str]
) -> None:
    plan = PLAN.model_copy(update={"exchange": exchange})
    loop.offer_plan(plan)
    assert told_of_a_pool(loop, number, pool, plan) == against


def test_the_pool_must_name_this_sites_own_answers_as_it_gave_them(loop: Loop) -> None:
    opened(loop).until()
    digests = {step: codec.sha256_hex(bytes(payload)) for kind, step, payload in crossed(loop) if kind == ANSWERS}
    assert list(digests) == [2, 4]
    text = json.dumps({str(step): digest for step, digest in digests.items()}, separators=(",", ":"))
    own = {"hospital_a": codec.sha256_hex(text.encode())}
    assert told_of_a_pool(loop, 2, {"hospital_a": codec.sha256_hex(b"other answers")}) == ["pool"]
    assert told_of_a_pool(loop, 3, own) == ["pool", "pool"], "those are of another round"


def test_the_pool_with_this_sites_own_answers_is_signed_also_after_a_kill(loop: Loop) -> None:
    opened(loop).until()
    digests = {str(step): codec.sha256_hex(bytes(payload)) for kind, step, payload in crossed(loop) if kind == ANSWERS}
    loop.restart()
    loop.guard._client.joined = True
    own = {"hospital_a": codec.sha256_hex(json.dumps(digests, separators=(",", ":")).encode())}
    assert told_of_a_pool(loop, 2, own) == []
    assert loop.guard._agreement.waiting is not None


def sent(loop: Loop) -> list[tuple[str, int, int]]:
    content = [envelope for envelope, _ in loop.coordinator.sent if not envelope.kind.startswith("control.")]
    return [(envelope.kind, envelope.round, envelope.step) for envelope in content]


def test_figures_answers_and_update_leave_together_at_the_end_of_the_round(loop: Loop) -> None:
    work = opened(loop)
    work.until("ExportDelta")
    assert [fields["task"] for fields in work.tasks[1:]] == [
        "LoadAdapter", "PrivateStep", "GeneratePublic", "PublicStep", "PrivateStep", "GeneratePublic", "PublicStep",
        "AnswerAhead", "AnswerAhead", "ExportDelta",
    ]  # fmt: skip
    own = [fields["prompt_indices"] for fields in work.tasks if fields["task"] == "GeneratePublic"]
    assert own == [[1, 4, 7], [0, 2, 3]], "of this round, as its opening says"
    ahead = [(fields["for_step"], fields["prompt_indices"]) for fields in work.tasks if fields["task"] == "AnswerAhead"]
    assert ahead == [(step, list(public_batch(PLAN, 2, step))) for step in (2, 4)]
    assert sent(loop) == [], "nothing has left before"
    before = len(loop.coordinator.sent)
    work.until()
    group = [("metrics.eval", 0, 0), (ANSWERS, 1, 2), (ANSWERS, 1, 4), (UPDATE, 1, 0)]
    assert sent(loop) == group
    assert [envelope.kind for envelope, _ in loop.coordinator.sent[before : before + 4]] == [kind for kind, *_ in group]
    mine = next(row for row in as_json(loop.guard.queries)["round"]({})["silos"] if row["own"])
    assert [each["phase"] for each in mine["phases"]] == ["sign", "update", "others"], "no step of it ended on its own"
    body = pb.PublicResponses.FromString(loop.coordinator.bodies(ANSWERS)[1][1])
    assert [(row.prompt_index, [each.text for each in row.responses]) for row in body.prompts] == [
        (row, ["12", "12"]) for row in AHEAD[4]
    ]


@pytest.mark.parametrize(
    ("wrong", "rule"),
    [({"text": "13"}, "NOT_VERIFIED"), ({"rows": (1, 4, 7)}, "PROMPT_NOT_PUBLIC")],
    ids=["a wrong answer", "prompts of this round"],
)
def test_answers_that_the_gate_denies_stay_and_the_update_goes(loop: Loop, wrong: dict[str, Any], rule: str) -> None:
    work = opened(loop, **wrong)
    work.until()
    left = [(kind, step) for kind, _, step in sent(loop)]
    assert left == [("metrics.eval", 0), *([(ANSWERS, 2)] if "text" in wrong else []), (UPDATE, 0)]
    denied = [each for each in loop.bench.events("egress.decision") if each["decision"] == "deny"]
    assert denied and all(each["kind"] == ANSWERS and rule in each["reasons"] for each in denied)
    declined = [pb.Declined.FromString(raw) for _, raw in loop.coordinator.bodies("control.declined")]
    assert {(each.kind, each.round, each.step) for each in declined} >= {(ANSWERS, 1, 4)}


def donors(step: int, **texts: str) -> pb.PublicDonors:
    """Of the opening's rows: of each silo one answer to each."""
    body = pb.PublicDonors()
    for row in {2: (1, 4, 7), 4: (0, 2, 3)}[step]:
        of_row = body.prompts.add(prompt_index=row)
        for silo, text in texts.items():
            of_row.donors.add(origin=silo, response=pb.Response(text=text, finish=pb.FINISH_STOP))
    return body


def test_donors_come_with_the_opening_are_graded_here_and_nobody_is_asked_for_them(loop: Loop) -> None:
    given = donors(2, hospital_b="12", hospital_c="13", hospital_d="12")
    work = opened(loop, 3, (2, given))
    for step, swap in ((2, "replace"), (4, "none")):
        polls = len(loop.coordinator.bodies("control.poll"))
        work.until("PublicStep")
        told = loop.trainer.told[-1]
        assert (told.fields["step"], told.fields["swap"]) == (step, swap)
        body = pb.PublicDonors.FromString(told.body)
        texts = [donor.response.text for row in body.prompts for donor in row.donors]
        assert texts == (["12"] * 3 if step == 2 else []), (
            "dropped: wrong ones, and those of a silo that is not of the pool"
        )
        assert len(loop.coordinator.bodies("control.poll")) >= polls
        work.done += 1
        loop.trainer_says("done", task="PublicStep", round=3, metrics={})
    dropped = [each["facts"]["transform"]["donors_dropped"] for each in loop.bench.events("ingress.decision")
               if each["kind"] == "public.donors"]  # fmt: skip
    assert dropped == [{"hospital_c": 3, "hospital_d": 3}]
    work.until()
    assert sent(loop) == [("metrics.eval", 0, 0), (UPDATE, 3, 0)], "nobody uses answers after the last round"


def test_donors_to_other_prompts_are_denied_and_the_step_goes_on_without(loop: Loop) -> None:
    work = opened(loop, 2, (2, donors(4, hospital_b="12")))
    work.until("PublicStep")
    assert loop.trainer.told[-1].fields["swap"] == "none"
    denied = [each for each in loop.bench.events("ingress.decision") if each["decision"] == "deny"]
    assert [(each["kind"], each["reasons"]) for each in denied] == [("public.donors", ["PROMPT_NOT_PUBLIC"])]


def approve(loop: Loop, kind: str, step: int = 0) -> None:
    (release,) = [each for each in loop.bench.ledger.releases("held") if (each.kind, each.step) == (kind, step)]
    shown = {"release": release.id, "digest": release.digest, "policy_digest": loop.policy.digest}
    loop.guard.orders.approve(command("approvals.approve", shown | loop.bench.opened(release.id)))


def test_what_people_must_see_is_held_together_and_has_the_rounds_time(tmp_path: Path) -> None:
    loop = Loop(tmp_path / "a", policy(lora_factors=1, public_responses=1))
    work = opened(loop)
    work.until()
    held = loop.bench.ledger.releases("held")
    assert sorted((each.kind, each.step) for each in held) == [(UPDATE, 0), (ANSWERS, 2), (ANSWERS, 4)]
    assert {each.expires_at - each.requested_at for each in held} == {PLAN.round_deadline_seconds}
    assert sent(loop) == [("metrics.eval", 0, 0)]
    approve(loop, ANSWERS, 2)
    approve(loop, UPDATE)
    loop.turn()
    assert sent(loop)[1:] == [(ANSWERS, 1, 2), (UPDATE, 1, 0)]
    # the round ends: what nobody has looked at is missed
    digest = "cd" * 32
    ended = loop.ended(committed=True, adapter_digest=digest, participants=["hospital_a", "hospital_b"])
    loop.coordinator.says("control.poll", "round.result", ended, run="run-1", round=1)
    loop.turn()
    assert not loop.bench.ledger.releases("held")
    assert loop.bench.ledger.release(next(each.id for each in held if each.step == 4)).state == "missed"
    loop.close()


def test_a_killed_guard_sends_what_it_had_decided_and_nothing_twice(loop: Loop) -> None:
    work = opened(loop)
    work.until("ExportDelta")
    for kind in (ANSWERS, ANSWERS, UPDATE):
        loop.coordinator.fails_at(kind, UnreachableError("the line is down"))
    work.until()
    assert [item.kind for item in loop.bench.ledger.outbox("allowed")] == [ANSWERS, ANSWERS, UPDATE]
    loop.restart()
    loop.guard._client.joined = True
    loop.turn(6)
    assert sent(loop) == [(ANSWERS, 1, 2), (ANSWERS, 1, 4), (UPDATE, 1, 0)], "the update last, again"
    assert loop.bench.ledger.outbox("allowed") == []


def crossed(loop: Loop) -> list[tuple[str, int, bytes]]:
    """Content that left: kind, step, payload."""
    return [(envelope.kind, envelope.step, bytes(payload)) for envelope, payload in loop.coordinator.sent
            if not envelope.kind.startswith("control.")]  # fmt: skip


def given(work: Work) -> list[tuple[dict[str, Any], bytes]]:
    told = [message for message in work.loop.trainer.told if message.type == "task"]
    return [(message.fields, message.body) for message in told if message.fields["task"] != "Evaluate"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    loop = Loop(tmp_path_factory.mktemp("whole") / "a", policy())
    work = opened(loop, 2, (2, donors(2, hospital_b="12")))
    work.until()
    loop.close()
    return given(work), crossed(loop)


@pytest.mark.quick(keep=3)
@pytest.mark.parametrize("killed_at", [*range(2, 12, 2), 12, 13])
def test_a_guard_that_was_killed_gives_the_round_again_with_its_donors_and_sends_everything(
    loop: Loop, undisturbed: tuple[Any, Any], killed_at: int
) -> None:
    """killed_at: so many tasks were given; at 13, while a message of the group went out."""
    work = opened(loop, 2, (2, donors(2, hospital_b="12")))
    if killed_at == 13:
        loop.coordinator.fails_at(ANSWERS, KilledError())
        with pytest.raises(KilledError):
            work.until()
    while len(work.tasks) < min(killed_at, 12):
        work.done += 1
        place = {name: work.tasks[-1][name] for name in ("task", "round")}
        loop.trainer_says("done", work.body(work.tasks[-1]), **place, metrics={})
    before = crossed(loop)
    loop.restart()
    (plan,) = [message for message in loop.trainer.told if message.type == "plan"]
    assert plan.fields["resume"] is True
    loop.trainer_says("planned", overlong={}, private_prompts=40, resumed=None)
    again = Work(loop)
    again.until()
    assert given(again) == undisturbed[0]
    left = before + crossed(loop)
    assert sorted(set(left)) == sorted(undisturbed[1]) and crossed(loop)[-1][0] == UPDATE
    # what went out as it was killed is sent again: nobody had said that it arrived
    assert len(left) - len(set(left)) == (killed_at == 13)
    assert not loop.coordinator.bodies("control.abstain")


def killed(**_: object) -> None:
    raise KilledError


def shown_with_donors(loop: Loop) -> None:
    """Round 2 waits for signatures, its donors behind its opening."""
    loop.offer_plan(PLAN)
    loop.show_round(2, codec.sha256_hex(ADAPTER), plan=PLAN, pool=POOL)
    loop.coordinator.says(
        "control.poll", "public.donors", donors(2, hospital_b="12"), run="run-1", round=2, step=2
    )  # fmt: skip
    loop.turn(3)


def killed_as_it_is_agreed_on(loop: Loop) -> None:
    agreed = loop.signed_by("hospital_b", "hospital_c", "hospital_d")
    loop.coordinator.says("control.poll", "round.agreed", agreed, run="run-1", round=2)
    loop.guard.runs.agreement._close = killed  # type: ignore[method-assign]
    with pytest.raises(KilledError):
        loop.turn(2)


@pytest.mark.parametrize("times", [0, 1, 2])
def test_a_guard_that_was_killed_before_the_round_was_agreed_on_still_has_its_donors(loop: Loop, times: int) -> None:
    """times: it was killed so often while it took the agreement in, which therefore comes again; the donors do not."""
    shown_with_donors(loop)
    shown = loop.shown
    for _ in range(times):
        killed_as_it_is_agreed_on(loop)
        loop.restart()
        loop.trainer_says("planned", overlong={}, private_prompts=40)
        loop.shown = shown
    loop.restart()
    (plan,) = [message for message in loop.trainer.told if message.type == "plan"]
    assert "resume" not in plan.fields
    loop.trainer_says("planned", overlong={}, private_prompts=40)
    loop.shown = shown
    agreed = loop.signed_by("hospital_b", "hospital_c", "hospital_d")
    loop.coordinator.says("control.poll", "round.agreed", agreed, run="run-1", round=2)
    loop.turn(2)
    loop.coordinator.says("control.fetch", "global.adapter", ADAPTER, run="run-1", round=2)
    work = Work(loop)
    work.until("PublicStep")
    body = pb.PublicDonors.FromString(loop.trainer.told[-1].body)
    assert [donor.origin for row in body.prompts for donor in row.donors] == ["hospital_b"] * 3


def test_donors_of_a_round_that_is_not_gone_on_with_are_given_up(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed as the round was agreed on, and after the restart this site differs with its transcript."""
    shown_with_donors(loop)
    killed_as_it_is_agreed_on(loop)
    kinds = [one["kind"] for one in loop.bench.ledger.kept_of_round("run-1", 2)]
    assert sorted(kinds) == ["public.donors", "round.open"]
    monkeypatch.setattr(Agreement, "resume", lambda *_: False)
    loop.restart()
    assert not loop.bench.ledger.kept_of_round("run-1", 2) and not loop.guard.runs.resume.waiting
    loop.trainer_says("planned", overlong={}, private_prompts=40)
    assert not [message for message in loop.trainer.told if message.type == "task"]


def test_what_a_trainer_has_behind_it_is_not_given_again_and_its_answers_still_leave(loop: Loop) -> None:
    work = opened(loop, 2, (2, donors(2, hospital_b="12")))
    work.until("AnswerAhead")
    loop.restart()
    resumed = {"task": "PublicStep", "round": 2, "step": 4, "exact": True}
    loop.trainer_says("planned", overlong={}, private_prompts=40, resumed=resumed)
    again = Work(loop)
    again.until()
    assert [fields["task"] for fields, _ in given(again)] == ["AnswerAhead", "AnswerAhead", "ExportDelta"]
    assert [(kind, step) for kind, step, _ in crossed(loop)][-3:] == [(ANSWERS, 2), (ANSWERS, 4), (UPDATE, 0)]


def test_figures_of_the_round_before_are_sent_once_over_a_kill(loop: Loop) -> None:
    work, digest = opened(loop), codec.sha256_hex(ADAPTER)
    work.until()
    ended = loop.ended(committed=True, adapter_digest=digest, participants=["hospital_a", "hospital_b"])
    loop.coordinator.says("control.poll", "round.result", ended, run="run-1", round=1)
    loop.turn()
    loop.show_round(2, digest, plan=PLAN, pool=POOL)
    agreed = loop.signed_by("hospital_b", "hospital_c", "hospital_d")
    loop.coordinator.says("control.poll", "round.agreed", agreed, run="run-1", round=2)
    loop.turn(3)
    assert (work.tasks[-1]["task"], work.tasks[-1]["digest"]) == ("Evaluate", digest)
    loop.coordinator.fails_at(ANSWERS, KilledError())
    with pytest.raises(KilledError):
        work.until()
    figures = [(kind, number) for kind, number, _ in sent(loop) if kind == "metrics.eval"]
    assert figures == [("metrics.eval", 0), ("metrics.eval", 1)]
    loop.restart()
    loop.trainer_says("planned", overlong={}, private_prompts=40, resumed=None)
    Work(loop).until()
    assert {kind for kind, _, _ in sent(loop)} == {ANSWERS, UPDATE}, "the figures had left"


def test_what_follows_on_a_message_that_waits_does_not_overtake_it(loop: Loop) -> None:
    """The update closes the round: answers that come behind it are refused, and missing in the next round's pool."""
    work = opened(loop)
    work.until("AnswerAhead")
    loop.coordinator.fails_at(ANSWERS, UnreachableError("cut"))
    work.until()
    loop.turn()
    order = [(kind, step) for kind, step, _ in crossed(loop) if kind in (ANSWERS, UPDATE)]
    assert order == [(ANSWERS, 2), (ANSWERS, 2), (ANSWERS, 4), (UPDATE, 0)]  # the first try was cut
