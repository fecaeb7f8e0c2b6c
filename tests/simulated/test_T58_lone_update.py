"""T58: no global adapter is a single silo's update. The coordinator commits no round with fewer updates than the
largest `min_updates` of its silos' policies; a silo looks at each signed result before it fetches the adapter. Each
refusal stands beside what is let through.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coordinator import runs
from coordinator.runs import Agreements
from fedsilo.protocol import codec
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.errors import ConflictError
from fedsilo.protocol.transcript import Transcript, transcript_from_canonical
from policies.model import Policy
from tests.policies import setting
from tests.simulated.coordinator_parts import RUN_YAML, House, SimulatedSilo, federation, until_quiet
from tests.world import ADAPTER, Loop, World, small_factors

NEXT = codec.encode_factors(
    small_factors(), base_digest="ab" * 32, schema_sha256=setting.SCHEMA.digest, rank=2, scale=2.0, dtype="float32"
)
NEXT_DIGEST = codec.sha256_hex(NEXT)


def asks_for(count: int) -> Policy:
    """A site's policy with another `min_updates` than the two of the example."""
    return setting.edited("min_updates: 2", f"min_updates: {count}")


def without_the_key(text: str) -> str:
    """As policies were before there was `min_updates`."""
    return "".join(line for line in text.splitlines(keepends=True) if "min_updates" not in line)


# ---- at the coordinator --------------------------------------------------------------------------------------------


def begun(folder: Path, *said: int, text: str = RUN_YAML) -> tuple[House, list[SimulatedSilo]]:
    """A run in which each silo's hello says its `min_updates`."""
    house, silos = federation(folder)
    house.submit(text)
    for silo, least in zip(silos, said, strict=True):
        silo.join(min_updates=least)
    return house, silos


@pytest.mark.parametrize(
    ("asked", "said", "quorum", "signed"),
    [(1, (2, 2, 2, 2), 2, 2), (2, (2, 3, 2, 2), 3, 3), (4, (2, 2, 2, 2), 4, 4)],
    ids=["every policy's", "the largest", "the request's own"],
)
def test_T58_plan_and_transcript_carry_the_largest_of_request_and_policies(
    tmp_path: Path, asked: int, said: tuple[int, ...], quorum: int, signed: int
) -> None:
    house, silos = begun(tmp_path, *said, text=RUN_YAML.replace("quorum: 2", f"quorum: {asked}"))
    for silo in silos:
        silo.mute = {"lora.factors"}
    until_quiet(silos)
    assert house.driver.runs["run-1"].plan.quorum == quorum
    opened = next(body for _, body in silos[0].heard if isinstance(body, pb.RoundOpen))
    assert transcript_from_canonical(opened.transcript).min_updates == signed


@pytest.mark.parametrize(("given", "state"), [(2, "abandoned"), (3, "committed")])
def test_T58_a_round_with_fewer_updates_than_a_policy_asks_for_is_not_committed(
    tmp_path: Path, given: int, state: str
) -> None:
    house, silos = begun(tmp_path, 2, 3, 2, 2, text=RUN_YAML.replace("rounds: 2", "rounds: 1"))
    for silo in silos[given:]:
        silo.mute = {"lora.factors"}
    until_quiet(silos)
    house.advance(2000.0)
    until_quiet(silos)
    (row,) = house.record()["rounds"]
    assert row["state"] == state and len(row["participants"]) == (given if state == "committed" else 0)


@pytest.mark.slow
@pytest.mark.parametrize(("given", "came_to"), [(2, ("failed", "MIN_UPDATES")), (3, ("finished", ""))])
def test_T58_a_policy_that_is_tightened_in_the_middle_of_a_run_counts_from_the_next_round(
    tmp_path: Path, given: int, came_to: tuple[str, str]
) -> None:
    house, silos = begun(tmp_path, 2, 2, 2, 2)
    for silo in silos:
        silo.mute = {"lora.factors"}
    until_quiet(silos)
    silos[0].join(min_updates=3)
    for silo in silos:
        silo.say("lora.factors", silo.delta_payload(1), run="run-1", number=1)
    for silo in silos[:given]:
        silo.mute = set()
    until_quiet(silos)
    house.advance(2000.0)
    until_quiet(silos)
    assert (house.run().state, house.run().reason) == came_to
    assert [row["state"] for row in house.record()["rounds"]] == [
        "committed", "committed" if given == 3 else "abandoned",
    ]  # fmt: skip


def test_T58_a_run_of_fewer_silos_than_a_policy_asks_for_is_refused_when_it_is_submitted(tmp_path: Path) -> None:
    house, silos = federation(tmp_path)
    for silo in silos:
        silo.join(min_updates=3)
    with pytest.raises(ConflictError) as refused:
        house.submit(RUN_YAML + "silos: [hospital_a, hospital_b]\n")
    assert refused.value.code == "MIN_UPDATES"
    house.submit(RUN_YAML + "silos: [hospital_a, hospital_b, hospital_c]\n")
    assert house.driver.runs["run-1"].plan.quorum == 3


@pytest.mark.parametrize(("said", "joins"), [(0, False), (1, False), (2, True), (3, True)])
def test_T58_a_hello_that_asks_for_one_update_or_none_among_several_silos_is_refused(
    tmp_path: Path, said: int, joins: bool
) -> None:
    _, silos = federation(tmp_path)
    answer = silos[0].join(min_updates=said)
    assert isinstance(answer, pb.Ack if joins else pb.Refusal)
    if not joins:
        assert (answer.field, answer.got) == ("min_updates", str(said))


# ---- at the silo ---------------------------------------------------------------------------------------------------


def say_ended(loop: Loop, *participants: str, number: int = 1, adapter: bytes = NEXT) -> None:
    body = loop.ended(committed=True, adapter_digest=codec.sha256_hex(adapter), participants=participants)
    loop.coordinator.says("control.poll", "round.result", body, run="run-1", round=number)
    loop.turn(2)


def fetched(loop: Loop) -> list[str]:
    return [pb.Fetch.FromString(raw).digest for _, raw in loop.coordinator.bodies("control.fetch")]


def goodbyes(loop: Loop) -> list[int]:
    return [pb.Abstain.FromString(raw).round for _, raw in loop.coordinator.bodies("control.abstain")]


def refusals(loop: Loop) -> list[tuple[str, list[str]]]:
    decisions = loop.bench.events("ingress.decision")
    return [(row["kind"], row["reasons"]) for row in decisions if row["decision"] == "deny"]


def awaiting_result(loop: Loop) -> None:
    """Round 1 has begun here, and its adapter is there already, so that the next fetch is of another one."""
    loop.offer_plan()
    loop.open_round()
    assert loop.guard.runs.run is not None


@pytest.mark.parametrize("alone", ["hospital_b", "hospital_a"], ids=["another silo's", "its own"])
def test_T58_a_silo_leaves_a_run_whose_round_was_committed_with_one_update(loop: Loop, alone: str) -> None:
    awaiting_result(loop)
    say_ended(loop, alone)
    assert loop.guard.runs.run is None and loop.bench.ledger.run_state("run-1") == "left"
    assert refusals(loop) == [("round.result", ["MIN_UPDATES"])] and NEXT_DIGEST not in fetched(loop)
    (evidence,) = loop.bench.events("round.result")  # signed by the coordinator: it proves what was done
    assert evidence["detail"]["survivors"] == [alone] and evidence["detail"]["signature"]
    loop.turn()
    assert goodbyes(loop) == [0]
    loop.restart()
    loop.turn(2)
    assert loop.guard.runs.run is None and loop.bench.ledger.run_state("run-1") == "left"


def test_T58_a_silo_goes_on_after_a_round_that_was_committed_with_two_updates(loop: Loop) -> None:
    awaiting_result(loop)
    say_ended(loop, "hospital_b", "hospital_c")
    assert loop.guard.runs.run is not None and refusals(loop) == [] and goodbyes(loop) == []
    loop.open_round(2, NEXT, told=False)
    assert loop.bench.judge.view.round == 2


@pytest.mark.parametrize(("participants", "stays"), [(("hospital_b", "hospital_c"), False), (setting.PLAN.silos, True)])
def test_T58_a_site_that_asks_for_three_is_content_with_no_two(
    tmp_path: Path, participants: tuple[str, ...], stays: bool
) -> None:
    loop = Loop(tmp_path / "a", asks_for(3))
    loop.offer_plan(setting.PLAN.model_copy(update={"quorum": 3}))
    loop.open_round(plan=setting.PLAN.model_copy(update={"quorum": 3}))
    say_ended(loop, *participants)
    assert (loop.guard.runs.run is not None) is stays
    loop.close()


@pytest.mark.parametrize(("participants", "stays"), [(("hospital_b",), False), (("hospital_b", "hospital_c"), True)])
def test_T58_a_round_that_this_silo_sat_out_is_looked_at_all_the_same(
    loop: Loop, participants: tuple[str, ...], stays: bool
) -> None:
    loop.offer_plan()
    loop.show_round(1, NEXT_DIGEST, schema_sha256="0" * 64)  # the transcript names another schema: refused
    loop.turn()
    assert goodbyes(loop) == [1] and loop.guard.runs.run is not None
    say_ended(loop, *participants)
    assert (loop.guard.runs.run is not None) is stays
    if not stays:
        assert ("round.result", ["MIN_UPDATES"]) in refusals(loop)


# What the coordinator tells of a round's end, and what the next one may begin with then.
TOLD = {
    "nothing": (None, ADAPTER, NEXT),
    "no adapter": ({"committed": False, "adapter_digest": codec.sha256_hex(ADAPTER)}, ADAPTER, NEXT),
    "no adapter, and the name of one": ({"committed": False, "adapter_digest": NEXT_DIGEST}, ADAPTER, NEXT),
    "an adapter": ({"committed": True, "adapter_digest": NEXT_DIGEST}, NEXT, ADAPTER),
}


@pytest.mark.quick(keep=12)
@pytest.mark.parametrize("told", TOLD)
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("sat_out", [False, True])
@pytest.mark.parametrize("restarted", [False, True])
def test_T58_a_round_begins_with_the_adapter_that_was_told_of_and_with_no_other(
    loop: Loop, told: str, known: bool, sat_out: bool, restarted: bool
) -> None:
    result, right, wrong = TOLD[told]
    loop.offer_plan()
    loop.open_round()
    number = 1
    if sat_out:
        say_ended(loop, "hospital_b", "hospital_c", adapter=ADAPTER)
        number = 2
        loop.show_round(2, codec.sha256_hex(ADAPTER), schema_sha256="0" * 64, told=False)  # which is refused
        loop.turn()
    if result is not None:
        body = loop.ended(**result)
        loop.coordinator.says("control.poll", "round.result", body, run="run-1", round=number)
        loop.turn(2)
    if restarted:
        loop.restart()
        loop.turn(2)
    loop.open_round(number + 1, right if known else wrong, told=False)
    assert (loop.bench.judge.view.round == number + 1) is known
    named = [row["detail"]["fields"] for row in loop.bench.events("ingress.decision") if "fields" in row["detail"]]
    assert (["base_digest"] in named) is not known and loop.guard.runs.run is not None
    if wrong is NEXT and not known:
        assert NEXT_DIGEST not in fetched(loop)


def sees(loop: Loop, number: int, base: str, **changes: str) -> None:
    """A round opens that does not begin here."""
    loop.show_round(number, base, told=False, **changes)
    loop.turn()


# What became of the round that was shown last, before its end is told of; round 1 has begun.
SHOWN: dict[str, Callable[[Loop], object]] = {
    "it began": lambda loop: None,
    "it began, and was left": lambda loop: loop.guard.runs.abandon_round(),
    "it began, and the silo was started again": lambda loop: loop.restart(),
    "the next was refused": lambda loop: sees(loop, 2, codec.sha256_hex(ADAPTER), schema_sha256="0" * 64),
    "the next was refused before a restart": lambda loop: (
        sees(loop, 2, codec.sha256_hex(ADAPTER), schema_sha256="0" * 64),
        loop.restart(),
    ),
    "the policy denied the next": lambda loop: sees(loop, 2, ""),
}


def say_end(loop: Loop, number: int, adapter: str, *, signed: bool = True, of: Transcript | None = None) -> None:
    loop.shown = of or loop.shown
    body = loop.ended(committed=True, adapter_digest=adapter)
    if not signed:
        body.result_signature = b""
    loop.coordinator.says("control.poll", "round.result", body, run="run-1", round=number)
    loop.turn(2)


def refused_ends(loop: Loop) -> list[str]:
    return [reasons[0] for kind, reasons in refusals(loop) if kind == "round.result"]


@pytest.mark.parametrize("shown", SHOWN)
@pytest.mark.parametrize("signed", [True, False])
def test_T58_only_a_signed_end_says_what_the_next_round_begins_with(loop: Loop, shown: str, signed: bool) -> None:
    awaiting_result(loop)
    SHOWN[shown](loop)
    number = loop.shown.round
    say_end(loop, number, NEXT_DIGEST, signed=signed)
    view = loop.bench.judge.view
    assert view.told_adapter == (NEXT_DIGEST if signed else codec.sha256_hex(ADAPTER))
    in_it = shown in ("it began", "it began, and the silo was started again")
    assert view.evaluated == ({1: NEXT_DIGEST} if signed and in_it else {})
    assert refused_ends(loop) == ([] if signed else ["RESULT_UNSIGNED"])
    loop.open_round(number + 1, NEXT, told=False)
    assert (loop.bench.judge.view.round == number + 1) is signed and loop.guard.runs.run is not None
    if not signed:
        assert NEXT_DIGEST not in fetched(loop)


@pytest.mark.parametrize("seen", [True, False])
def test_T58_an_end_of_a_round_that_was_not_shown_says_nothing(loop: Loop, seen: bool) -> None:
    awaiting_result(loop)
    third = replace(loop.shown, round=3)
    if seen:
        sees(loop, 3, codec.sha256_hex(ADAPTER), schema_sha256="0" * 64)
        third = loop.shown
    say_end(loop, 3, NEXT_DIGEST, of=third)
    assert refused_ends(loop) == ([] if seen else ["ROUND_NOT_SHOWN"])
    assert (loop.bench.judge.view.told_adapter == NEXT_DIGEST) is seen
    loop.open_round(2, NEXT, told=False)
    assert loop.bench.judge.view.round == 1, "nor does a round open that an end says is past"


@pytest.mark.parametrize("looked_at", [True, False])
def test_T58_the_end_of_a_second_transcript_counts_once_people_have_looked_at_that(loop: Loop, looked_at: bool) -> None:
    awaiting_result(loop)
    sees(loop, 2, codec.sha256_hex(ADAPTER), schema_sha256="0" * 64)
    kept = loop.bench.ledger.transcript("run-1", 2)
    assert kept is not None
    second = replace(loop.shown, schema_sha256=setting.SCHEMA.digest)
    if looked_at:
        loop.bench.ledger.keep_transcript("run-1", 2, kept | {"others": {second.digest: ""}})
    say_end(loop, 2, NEXT_DIGEST, of=second)
    assert refused_ends(loop) == ([] if looked_at else ["TRANSCRIPT_DIFFERS"])
    loop.open_round(3, NEXT, told=False)
    assert (loop.bench.judge.view.round == 3) is looked_at


@pytest.mark.parametrize("adapter", [codec.sha256_hex(ADAPTER), "cd" * 32])
def test_T58_an_older_end_takes_no_later_one_back(loop: Loop, adapter: str) -> None:
    awaiting_result(loop)
    first = loop.shown
    say_end(loop, 1, codec.sha256_hex(ADAPTER))
    loop.open_round(2, ADAPTER, told=False)
    say_end(loop, 2, NEXT_DIGEST)
    loop.restart()
    say_end(loop, 1, adapter, of=first)
    assert refused_ends(loop) == ["ROUND_CLOSED"] and loop.bench.judge.view.told_adapter == NEXT_DIGEST
    loop.open_round(3, NEXT, told=False)
    assert loop.bench.judge.view.round == 3


@pytest.mark.parametrize("other", [False, True])
def test_T58_the_end_of_a_round_may_be_said_again_and_no_other(loop: Loop, other: bool) -> None:
    awaiting_result(loop)
    say_end(loop, 1, NEXT_DIGEST)
    loop.restart()
    say_end(loop, 1, "cd" * 32 if other else NEXT_DIGEST)
    assert refused_ends(loop) == (["ROUND_CLOSED"] if other else [])
    assert loop.bench.judge.view.told_adapter == NEXT_DIGEST
    ends = {row["detail"]["aggregate"] for row in loop.bench.events("round.result")}
    assert ends == {NEXT_DIGEST} | ({"cd" * 32} if other else set()), "whoever signed two is found out"


@pytest.mark.parametrize(("quorum", "taken"), [(1, False), (2, True)])
def test_T58_a_plan_that_is_content_with_one_update_is_declined(loop: Loop, quorum: int, taken: bool) -> None:
    loop.offer_plan(setting.PLAN.model_copy(update={"quorum": quorum}))
    assert (loop.guard.runs.run is not None) is taken
    assert refusals(loop) == ([] if taken else [("run.plan", ["MIN_UPDATES"])])


@pytest.mark.parametrize(("silos", "taken"), [(("hospital_a",), True), (("hospital_a", "hospital_b"), False)])
def test_T58_a_silo_that_is_alone_in_its_policy_takes_a_plan_for_itself_without_a_word_about_updates(
    tmp_path: Path, silos: tuple[str, ...], taken: bool
) -> None:
    stated = setting.policy_text(peers=(setting.SILO,), min_peers=1)
    loop = Loop(tmp_path / "a", setting.policy_of(without_the_key(stated)))
    loop.offer_plan(setting.PLAN.model_copy(update={"silos": silos, "quorum": 1}))
    assert (loop.guard.runs.run is not None) is taken
    assert refusals(loop) == ([] if taken else [("run.plan", ["PLAN_PEERS"])])
    loop.close()


@pytest.mark.parametrize(("signed", "fields"), [(0, ["min_updates"]), (1, ["min_updates"]), (2, None)])
def test_T58_a_transcript_that_binds_fewer_updates_than_the_policy_is_not_signed(
    loop: Loop, signed: int, fields: list[str] | None
) -> None:
    loop.offer_plan()
    loop.show_round(1, NEXT_DIGEST, min_updates=signed)
    loop.turn()
    found = [row["detail"]["fields"] for row in loop.bench.events("ingress.decision") if "fields" in row["detail"]]
    assert found == ([fields] if fields else []) and bool(loop.bench.events("round.transcript")) is (fields is None)


@pytest.mark.parametrize("count", [2, 3])
def test_T58_hello_says_what_the_policy_in_force_asks_for(tmp_path: Path, count: int) -> None:
    loop = Loop(tmp_path / "a", asks_for(count))
    loop.guard._client.joined = False
    loop.turn()
    ((_, raw),) = loop.coordinator.bodies("control.hello")
    assert pb.Hello.FromString(raw).min_updates == count
    loop.close()


# ---- a real coordinator that keeps to its own rules no more --------------------------------------------------------


def hostile(patched: pytest.MonkeyPatch) -> None:
    """Of the updates that came it takes the last alone, and signs that this is what it did."""
    honest, end = runs.aggregate, Agreements.end

    def alone(blobs: Any, base: Any, uploads: list[Any], *rest: Any, **more: Any) -> Any:
        return honest(blobs, base, uploads[-1:], *rest, **more)

    def signed(self: Agreements, session: Any, plan: Any, number: int, body: pb.RoundResult) -> Any:
        lone = pb.RoundResult()
        lone.CopyFrom(body)
        lone.participants[:] = body.participants[-1:]
        return end(self, session, plan, number, lone)

    patched.setattr(runs, "aggregate", alone)
    patched.setattr(Agreements, "end", signed)


@pytest.mark.parametrize("is_hostile", [True, False])
def test_T58_a_coordinator_that_commits_one_update_alone_is_caught_by_the_silo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_hostile: bool
) -> None:
    if is_hostile:
        hostile(monkeypatch)
    attacked = World(tmp_path)
    state = attacked.run(rounds=2)
    ledger, records = attacked.loop.bench.ledger, attacked.records()
    caught = [row for row in records if row["decision"] == "deny"]
    adapters = {row["adapter_sha256"] for row in attacked.house.record()["rounds"]} - {""}
    asked = {pb.Fetch.FromString(raw).digest for _, raw in attacked.left("control.fetch")}
    if is_hostile:
        assert [(row["kind"], row["reasons"]) for row in caught] == [("round.result", ["MIN_UPDATES"])]
        assert ledger.run_state("run-1") == "left" and adapters and not adapters & asked
        given = [each.round for each, _ in attacked.channel.sent if each.kind == "lora.factors"]
        assert given == [1]  # the first, which nothing here can call back
    else:
        assert caught == [] and state == ledger.run_state("run-1") == "finished" and adapters <= asked
    attacked.close()


def test_T58_a_policy_that_does_not_state_the_key_has_the_digest_that_it_had() -> None:
    stated = setting.policy_text()
    silent = without_the_key(stated)
    assert silent != stated and setting.policy_of(silent).file.federation.min_updates == 2
    assert setting.policy_of(silent).digest == setting.policy_of(stated).digest != asks_for(3).digest
    assert "min_updates" not in str(setting.policy_of(stated).file.model_dump(mode="json"))
    assert "min_updates" in str(asks_for(3).file.model_dump(mode="json"))
