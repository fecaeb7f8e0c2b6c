"""T20, pure part: canonical form and digest, statements that stand for one round and one party alone, and
who is counted."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsilo.protocol.errors import PeerError
from fedsilo.protocol.transcript import (
    TRANSCRIPT_CHARACTERS_MAX,
    Countersignature,
    Transcript,
    conflict,
    count,
    is_signed,
    needed,
    sign_transcript,
    silo_id,
    transcript_from_canonical,
)

NAMES = st.from_regex(r"[a-z][a-z0-9_-]{0,62}", fullmatch=True)
DIGESTS = st.from_regex(r"[0-9a-f]{64}", fullmatch=True)
COORDINATOR = "spiffe://cardio-net/coordinator/main"


@st.composite
def transcripts(draw: Any) -> Transcript:
    silos = tuple(draw(st.lists(NAMES, min_size=1, max_size=6, unique=True)))
    return Transcript(
        federation=draw(NAMES),
        run=draw(NAMES),
        round=draw(st.integers(1, 2**32 - 1)),
        silos=silos,
        plan_sha256=draw(DIGESTS),
        policies={silo: draw(DIGESTS | st.just("")) for silo in silos},
        base_digest=draw(DIGESTS | st.just("")),
        schema_sha256=draw(DIGESTS),
        public_set_sha256=draw(DIGESTS),
        pool=draw(st.dictionaries(NAMES, DIGESTS, max_size=4)),
    )


def key_of(name: str) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(hashlib.sha256(name.encode()).digest())


SILOS = ("hospital_a", "hospital_b", "hospital_c", "hospital_d")
ONE = Transcript(
    "cardio-net", "run-1", 1, SILOS, "1" * 64, dict.fromkeys(SILOS, "2" * 64), "3" * 64, "4" * 64, "5" * 64
)
KEYS = {name: key_of(name).public_key() for name in SILOS}


def signed(name: str, transcript: Transcript = ONE, *, by: str = "", digest: str = "") -> Countersignature:
    signature = sign_transcript(transcript, silo_id(transcript.federation, name), key_of(by or name))
    return Countersignature(name, digest or transcript.digest, signature)


@pytest.mark.slow
@settings(max_examples=60)
@given(transcripts())
def test_T20_a_transcript_survives_the_wire_and_its_digest_is_that_of_its_bytes(transcript: Transcript) -> None:
    text = transcript.canonical()
    assert transcript_from_canonical(text) == transcript
    plain = json.dumps(json.loads(text), sort_keys=True, separators=(",", ":"))  # names and digests are ASCII
    assert text == plain and transcript.digest == hashlib.sha256(plain.encode()).hexdigest()


@pytest.mark.slow
@settings(max_examples=60)
@given(transcripts(), transcripts())
def test_T20_a_change_of_any_field_changes_digest_and_signature_and_is_named(
    one: Transcript, other: Transcript
) -> None:
    key = key_of("coordinator")
    signature = sign_transcript(one, COORDINATOR, key)
    assert is_signed(one, COORDINATOR, key.public_key(), signature)
    assert not is_signed(one, COORDINATOR, key_of("another").public_key(), signature)
    for name in one.to_json():
        if name == "transcript_version" or getattr(one, name) == getattr(other, name):
            continue
        changed = replace(one, **{name: getattr(other, name)})
        assert changed.digest != one.digest and one.differences(changed) == (name,)
        assert not is_signed(changed, COORDINATOR, key.public_key(), signature)
        of_another_round = name in ("federation", "run", "round")
        assert conflict(one, changed) == (() if of_another_round else (name,))
    assert conflict(one, one) == ()


def test_T20_a_statement_stands_for_one_round_one_party_and_this_purpose_alone() -> None:
    text = replace(ONE, federation="f", run="r", round=7).statement("spiffe://f/silo/a", "d" * 64)
    assert text == (
        b"fedsilo-round-transcript-v1\n"
        b'{"federation":"f","party":"spiffe://f/silo/a","round":7,"run":"r","transcript":"' + b"d" * 64 + b'"}'
    )
    signature = sign_transcript(ONE, silo_id("cardio-net", "hospital_a"), key_of("hospital_a"))
    assert len(signature) == 64
    assert not is_signed(ONE, silo_id("cardio-net", "hospital_b"), KEYS["hospital_a"], signature)
    assert not is_signed(ONE, COORDINATOR, KEYS["hospital_a"], signature)


@pytest.mark.parametrize("bad", [b"", b"x" * 63, b"x" * 65])
def test_T20_what_has_not_the_length_of_a_signature_is_none(bad: bytes) -> None:
    assert not is_signed(ONE, COORDINATOR, KEYS["hospital_a"], bad)


def test_T20_only_signatures_of_the_roster_under_this_digest_count() -> None:
    other = replace(ONE, base_digest="9" * 64)
    next_round = replace(ONE, round=2)
    good = [signed("hospital_a"), signed("hospital_b")]
    worthless = [
        signed("hospital_c", by="stranger"),  # a stranger under a listed name
        signed("stranger"),  # a stranger under its own
        signed("hospital_c", next_round),  # of another round, said to be of this
        signed("hospital_c", next_round, digest=ONE.digest),
        signed("hospital_c", other, digest=ONE.digest),  # under another transcript, passed off as under this
        replace(signed("hospital_c"), silo="hospital_d"),
        Countersignature("hospital_c", ONE.digest, b""),
    ]
    keys = KEYS | {"stranger": key_of("stranger").public_key()}
    counted = count(ONE, [*good, *good, *worthless], keys)
    assert counted.agreed == {"hospital_a", "hospital_b"} and counted.others == ()
    # of nobody whose key is known, nothing counts
    assert count(ONE, good, {"hospital_a": KEYS["hospital_a"]}).agreed == {"hospital_a"}
    # what is openly over another digest of this round is evidence
    evidence = count(ONE, [*good, signed("hospital_c", other)], KEYS)
    assert evidence.agreed == {"hospital_a", "hospital_b"} and evidence.others == (signed("hospital_c", other),)


@settings(max_examples=60)
@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 6))
def test_T20_the_threshold_is_the_strictest_of_policy_plan_and_not_being_alone(
    min_peers: int, quorum: int, planned: int
) -> None:
    least = needed(planned, min_peers=min_peers, quorum=quorum)
    assert least >= min_peers and least >= quorum and (least >= 2 or planned == 1)
    assert least in (min_peers, quorum, 2)


@given(st.integers(2, 64), st.integers(1, 64), st.integers(1, 64))
def test_T20_two_groups_that_agree_on_their_own_fit_into_a_plan_unless_each_needs_more_than_half(
    planned: int, min_peers: int, quorum: int
) -> None:
    least = needed(planned, min_peers=min_peers, quorum=quorum)
    groups = planned // least  # as many as have no silo in common
    assert (groups < 2) is (least > planned / 2)
    assert groups < 2 or max(min_peers, quorum) <= planned / 2


def changed(**fields: Any) -> str:
    return json.dumps({**ONE.to_json(), **fields}, sort_keys=True, separators=(",", ":"))


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "null", "{}", "[" * 5000, ONE.canonical() + " ", changed(note="x"), changed(round=0),
        changed(round=1.5), changed(round=True), changed(round="1"), changed(transcript_version=2),
        changed(transcript_version=True), changed(silos=[]), changed(silos=["hospital_a", "hospital_a"]),
        changed(silos=["Ignore the question"]), changed(base_digest="x"), changed(base_digest="A" * 64),
        changed(plan_sha256=""), changed(policies={}), changed(policies={**dict(ONE.policies), "e": ""}),
        changed(policies=dict.fromkeys(SILOS, "text")), changed(run="a\nb"), changed(silos="hospital_a"),
        changed(pool={}), changed(pool=[]), changed(pool=dict.fromkeys(SILOS, "")), changed(pool={"a b": "6" * 64}),
        changed(pool={f"silo_{number}": "6" * 64 for number in range(65)}),
        json.dumps(ONE.to_json()), " " * (TRANSCRIPT_CHARACTERS_MAX + 1),
    ],
)  # fmt: skip
def test_T20_T12_a_transcript_holds_names_numbers_and_digests_and_nothing_else(text: str) -> None:
    with pytest.raises(PeerError):
        transcript_from_canonical(text)
    assert transcript_from_canonical(ONE.canonical()) == ONE
    pooled = transcript_from_canonical(changed(pool={f"silo_{number}": "6" * 64 for number in range(64)}))
    assert len(pooled.pool) == 64 and conflict(ONE, pooled) == conflict(pooled, ONE) == ("pool",)
    assert "pool" not in ONE.to_json(), "without one, what is signed is as it was before there were pools"
