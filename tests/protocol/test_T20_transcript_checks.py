"""T20, pure part of what is checked afterwards: how many signatures a round needs, in whose record, with whose keys."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedsilo.protocol.transcript import (
    Keys,
    KnownKey,
    Results,
    RoundCheck,
    RoundEnd,
    Transcript,
    check_record,
    results_digest,
    sign_end,
    sign_transcript,
    silo_id,
)

COORDINATOR = "spiffe://cardio-net/coordinator/main"
SILOS = ("hospital_a", "hospital_b", "hospital_c", "hospital_d")


def key_of(name: str) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(hashlib.sha256(name.encode()).digest())


def raw(name: str) -> bytes:
    return key_of(name).public_key().public_bytes_raw()


KEYS: Keys = {
    COORDINATOR: KnownKey(raw("main")),
    **{silo_id("cardio-net", name): KnownKey(raw(name)) for name in SILOS},
}


def told(
    signers: int,
    survivors: int,
    *,
    roster: int = 4,
    owner: str = COORDINATOR,
    keys: Keys = KEYS,
    least: int = 0,
    closed: bool = False,
    results: Results | None = None,
    **asked: Any,
) -> tuple[RoundCheck, list[str]]:
    """A round of the first `roster` silos, signed by the first `signers`, committed with the first `survivors`.

    least: the `min_updates` of its transcript. closed: in the place of committed. results: its table, of which the
    end names the digest.
    """
    silos = SILOS[:roster]
    transcript = Transcript(
        "cardio-net", "run-1", 1, silos, "1" * 64, dict.fromkeys(silos, ""), "", "2" * 64, "3" * 64, min_updates=least
    )
    check = RoundCheck("run-1", 1, owner=owner, keys=keys)
    signature = sign_transcript(transcript, COORDINATOR, key_of("main")).hex()
    opened = {"transcript": transcript.to_json(), "sha256": transcript.digest, "party": COORDINATOR}
    problems = check.opened(opened | {"signature": signature})
    names = SILOS[:signers]
    if names:
        signatures = {
            name: sign_transcript(transcript, silo_id("cardio-net", name), key_of(name)).hex() for name in names
        }
        stated = {name: raw(name).hex() for name in names}
        problems += check.agreed({"sha256": transcript.digest, "signatures": signatures, "keys": stated})
    end = RoundEnd(
        "cardio-net",
        "run-1",
        1,
        transcript.digest,
        survivors > 0 and not closed,
        results_digest(results) if results else "",
        SILOS[:survivors],
        dict.fromkeys(silos, "absent"),
        closed,
    )
    problems += check.result(sign_end(end, COORDINATOR, key_of("main")).to_detail(results))
    return check, problems + check.missing(**asked)


@pytest.mark.parametrize("roster", [1, 2, 4])
@pytest.mark.parametrize("planned", [1, 4])
@pytest.mark.parametrize("quorum", [1, 2, 3, 4])
def test_T20_so_many_signatures_as_the_plan_asks_for_and_never_ones_own_alone(
    roster: int, planned: int, quorum: int
) -> None:
    for signers in range(roster + 1):
        enough = signers >= quorum and (signers > 1 or (signers == 1 and roster == planned == 1))
        _, problems = told(signers, min(signers, 1), roster=roster, planned=planned, quorum=quorum)
        if signers == 0:
            assert problems == []  # it was not committed: nobody trained
        else:
            assert any("signatures of silos verify" in problem for problem in problems) is not enough


def test_T20_in_the_coordinators_record_each_survivor_signed_and_in_a_silos_the_silo_itself() -> None:
    check, problems = told(2, 4)
    assert problems == ["no signature of hospital_c, hospital_d, who took part"]
    assert check.unsigned_survivors == {"hospital_c", "hospital_d"}
    assert told(2, 4, owner=silo_id("cardio-net", "hospital_b"))[1] == []
    assert told(2, 4, owner=silo_id("cardio-net", "hospital_d"))[1] == ["no signature of hospital_d, who took part"]
    assert told(0, 2, owner=silo_id("cardio-net", "hospital_d"))[1] == []  # it began without this one
    assert told(0, 4, owner=silo_id("cardio-net", "hospital_d"))[1] == [
        "0 signatures of silos verify, needed: 2", "no signature of hospital_d, who took part",
    ]  # fmt: skip
    assert "1 signatures" in told(1, 0, owner=silo_id("cardio-net", "hospital_a"))[1][0]  # it began with too few


def test_T20_a_closed_round_is_held_to_the_signatures_of_its_participants_as_a_committed_one_is() -> None:
    check, problems = told(2, 4, closed=True)
    assert problems == ["no signature of hospital_c, hospital_d, who took part"]
    assert check.unsigned_survivors == {"hospital_c", "hospital_d"}
    assert "1 signatures" in told(1, 1, closed=True)[1][0]
    assert told(4, 4, closed=True)[1] == [] and told(4, 2, closed=True, least=3)[1] == [], "no update is in it"


def results_of(*participants: tuple[str, ...]) -> Results:
    rows = zip(SILOS, participants, strict=False)
    return {silo: {"sha256": hashlib.sha256(silo.encode()).hexdigest(), "participants": list(p)} for silo, p in rows}


def test_T58_one_result_of_too_few_updates_is_shown_by_the_table_in_the_log() -> None:
    enough = results_of(SILOS[1:3], SILOS[:2])
    assert told(4, 3, least=2, results=enough)[1] == []
    few = results_of(SILOS[1:3], SILOS[:1])
    assert told(4, 3, least=2, results=few)[1] == ["it is committed with 1 updates, needed: 2"]
    for owner in SILOS[:2]:
        assert told(4, 3, least=2, results=few, owner=silo_id("cardio-net", owner))[1]


def test_T20_a_table_of_results_is_the_one_that_the_end_names_and_of_the_roster() -> None:
    stranger = results_of(SILOS[1:3], (SILOS[3],))
    assert told(3, 3, roster=3, results=stranger)[1] == ["its table of results names hospital_d, not of its roster"]
    assert told(3, 3, roster=3, results=results_of(SILOS[1:3]))[1] == []
    check, _ = told(3, 3, results=results_of(SILOS[1:3]))
    detail = check.signed_end.to_detail(results_of(SILOS[:2])) if check.signed_end else {}
    assert check.result(detail) == ["its table of results is not the one that its result names"]
    assert check.result({**detail, "results": [1]}) == ["its round.result is malformed"]


@pytest.mark.parametrize("row", [{}, {"participants": ["hospital_a", "hospital_b"]}])
@pytest.mark.parametrize("state", ["abandoned", "committed", "closed"])
def test_T20_a_round_of_a_run_record_that_is_done_has_a_transcript(state: str, row: dict[str, Any]) -> None:
    empty = {"base_sha256": "", "adapter_sha256": "", "participants": [], "transcript": None}
    record = {"run": "run-1", "plan": {"silos": list(SILOS), "quorum": 2}, "base_adapter_sha256": "",
              "adapter_sha256": "", "rounds": [{"round": 1, "state": state, **empty, **row}]}  # fmt: skip
    problems = check_record(record, signer=COORDINATOR, public_key=key_of("main").public_key(), keys={}).problems
    expected = () if state == "abandoned" and not row else (f"round 1: it is {state} without a transcript",)
    assert problems == expected


@pytest.mark.parametrize("owner", ["", COORDINATOR, silo_id("cardio-net", "hospital_a")])
@pytest.mark.parametrize("quorum", [0, 2])
@pytest.mark.parametrize("least", [0, 2, 3])
def test_T58_a_round_is_committed_with_as_many_updates_as_its_transcript_asks_for(
    owner: str, quorum: int, least: int
) -> None:
    """One of protocol 1 asks for none (`least` 0), and is held against the plan's quorum alone."""
    for survivors in range(1, 5):
        enough = survivors >= max(least, quorum)
        assert (told(4, survivors, owner=owner, least=least, quorum=quorum)[1] == []) is enough
    assert told(4, 0, owner=owner, least=least, quorum=quorum)[1] == []  # not committed


def test_T20_a_key_that_only_its_own_writer_vouches_for_is_named() -> None:
    assert told(2, 2)[0].unvouched == set()
    assert told(2, 2, keys={})[0].unvouched == {"coordinator/main", "hospital_a", "hospital_b"}
    half = {**KEYS, silo_id("cardio-net", "hospital_b"): KnownKey(raw("hospital_b"), vouched=False)}
    check, problems = told(2, 2, keys=half)
    assert (check.unvouched, check.signed, problems) == ({"hospital_b"}, {"hospital_a", "hospital_b"}, [])


@pytest.mark.parametrize("party", [silo_id("cardio-net", "hospital_a"), "spiffe://other-net/coordinator/main", "main"])
def test_T20_nobody_but_a_coordinator_of_the_federation_signs_as_one_even_where_none_is_known(party: str) -> None:
    silos = SILOS[:2]
    transcript = Transcript("cardio-net", "run-1", 1, silos, "1" * 64, dict.fromkeys(silos, ""), "", "2" * 64, "3" * 64)
    opened = {"transcript": transcript.to_json(), "sha256": transcript.digest, "party": party}
    opened["signature"] = sign_transcript(transcript, party, key_of("main")).hex()
    check = RoundCheck("run-1", 1, owner=silo_id("cardio-net", "hospital_b"), keys={})
    (problem,) = check.opened(opened)
    assert "who is not known as the coordinator of cardio-net" in problem and not check.sound


@pytest.mark.parametrize("record", [{}, {"run": 5}, {"run": "run-1", "plan": [], "rounds": 5}])
def test_T20_a_record_of_another_shape_is_a_problem(record: dict[str, Any]) -> None:
    found = check_record(record, signer=COORDINATOR, public_key=key_of("main").public_key(), keys={})
    assert found.problems == ("the run record is malformed",) and found.rounds == 0


def test_T20_a_run_that_never_began_has_nothing_to_check_and_another_coordinators_key_is_a_problem() -> None:
    record: dict[str, Any] = {
        "run": "run-1",
        "plan": None,
        "base_adapter_sha256": "",
        "adapter_sha256": "",
        "rounds": [],
    }
    key = key_of("main").public_key()
    assert check_record(record, signer=COORDINATOR, public_key=key, keys={}).problems == ()
    other = {COORDINATOR: KnownKey(raw("another"))}
    (problem,) = check_record(record, signer=COORDINATOR, public_key=key, keys=other).problems
    assert problem == f"the key of {COORDINATOR} is not the one given"
