"""What may be in an audit record, and what may not (T40)."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsilo.audit.merkle import leaf_hash
from fedsilo.audit.record import EVENTS, NO_PREVIOUS, RecordError, keyed_digest, link_of, parse_record, record_line
from fedsilo.protocol.errors import VerificationError
from fedsilo.protocol.text import harmless

DIGEST = "ab" * 32


def line_of(event: str = "screen.hit", salt: bytes = b"\x01" * 16, **fields: Any) -> bytes:
    return record_line(
        seq=3,
        salt=salt,
        t=1_800_000_000_000,
        boot="b",
        mono=17,
        actor="spiffe://net/silo/a",
        event=event,
        previous=DIGEST,
        fields=fields,
    )


FULL: dict[str, Any] = {
    "run": "r1",
    "round": 2,
    "step": 5,
    "attempt": 1,
    "kind": "lora.factors",
    "sequence": 9,
    "peer": "spiffe://net/coordinator/main",
    "direction": "egress",
    "decision": "deny",
    "reasons": ["TENSOR_SET"],
    "rules": [{"rule": "max_l2", "outcome": "deny", "measured": 1.5, "limit": 1.0, "line": 12}],
    "facts": {"before": {"l2": 1.5, "names": ["model.layers.0.q_proj.lora_A"]}, "after": {"l2": 1.0}},
    "policy": {"effective": DIGEST, "file": DIGEST, "code": "0.1", "schema": DIGEST},
    "payload": {"bytes": 10, "sha256": DIGEST, "bytes_before": 11, "sha256_before": DIGEST, "archived": False},
    "link": {"decision": 2, "approvals": ["a1"], "peer_event": 7},
    "detail": {"note": "short"},
}


def test_a_full_record_reads_back_and_its_bytes_are_canonical() -> None:
    line = line_of("egress.decision", **FULL)
    record = parse_record(line)
    assert {key: record[key] for key in FULL if key != "link"} == {key: FULL[key] for key in FULL if key != "link"}
    assert record["link"] == FULL["link"] | {"previous": DIGEST}
    assert line == json.dumps(record, sort_keys=True, separators=(",", ":")).encode()
    assert (record["v"], record["seq"], record["salt"]) == (1, 3, "01" * 16)
    assert link_of(line) == leaf_hash(line).hex() == hashlib.sha256(b"\x00" + line).hexdigest()
    assert len(NO_PREVIOUS) == 64


def test_none_means_absent() -> None:
    assert line_of(run=None, detail=None) == line_of()


@pytest.mark.parametrize("event", sorted(EVENTS))
def test_every_listed_event_and_no_other(event: str) -> None:
    fields = {"kind": "k", "decision": "allow", "payload": {"bytes": 1}, "link": {"decision": 0}}
    assert parse_record(line_of(event, **fields))["event"] == event
    with pytest.raises(RecordError):
        line_of(event + "x", **fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "x"},
        {"payload": {"text": "x"}},
        {"policy": {"text": "x"}},
        {"rules": [{"rule": "r", "matched": "x"}]},
        {"link": {"previous": DIGEST}},
        {"link": "x"},
        *({"link": {"peer_event": number}} for number in ("7", -1, 1 << 53, True)),
        *({"link": {"approvals": given}} for given in ("alice", [1, "alice"], [-1], [[1]])),
        {"detail": {"reason": "y" * 129}},
        {"detail": {"reason": "line\nbreak"}},
        {"detail": {"reason": "escape\x1b[31m"}},
        {"detail": {"reason": "\u202eright to left"}},
        {"detail": {"a key with spaces": 1}},
        *({part: {name: 1}} for part in ("detail", "facts") for name in ("seq", "link", "previous")),
        {"detail": {"pem": "-----BEGIN PRIVATE KEY-----"}},
        {"detail": {"value": b"bytes"}},
        {"detail": {"value": float("nan")}},
        {"detail": {"value": float("inf")}},
        {"detail": {"value": 1 << 60}},
        {"detail": {"value": [0] * 4097}},
        {"detail": {"a": {"b": {"c": {"d": {"e": {"f": 1}}}}}}},
        {"payload": {"sha256": "AB" * 32}},
        {"payload": {"bytes": -1}},
        {"payload": {"bytes": True}},
        {"decision": "maybe"},
        {"direction": "sideways"},
        {"reasons": ["a whole sentence"]},
        {"round": "1"},
        {"run": 1},
    ],
)
def test_T40_what_may_not_be_recorded_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(RecordError):
        line_of(**fields)


def test_T40_the_longest_text_that_is_allowed() -> None:
    assert parse_record(line_of(detail={"reason": "y" * 128}))["detail"]["reason"] == "y" * 128
    assert harmless("a\x1b[2J\u202e" + "b" * 500, 128) == r"a\u001b[2J\u202e" + "b" * 112


def test_what_left_must_say_how_much() -> None:
    with pytest.raises(RecordError, match=r"payload\.bytes"):
        line_of("egress.sent", kind="k", payload={"sha256": DIGEST})
    with pytest.raises(RecordError, match=r"payload\.bytes"):
        line_of("egress.sent", payload={"bytes": 1})
    with pytest.raises(RecordError, match="decision"):
        line_of("egress.decision", kind="k")


def test_T40_leaf_hashes_cannot_be_guessed_from_a_dictionary() -> None:
    """Same content under two salts: an outsider who has the leaf hash and all other fields learns nothing."""
    assert leaf_hash(line_of(salt=b"\x01" * 16)) != leaf_hash(line_of(salt=b"\x02" * 16))
    guesses = {hashlib.sha256(word).hexdigest() for word in (b"yes", b"no")}
    assert keyed_digest(b"site key", b"yes") not in guesses
    assert keyed_digest(b"site key", b"yes") != keyed_digest(b"another site", b"yes")


@given(place=st.integers(0, 10_000), change=st.integers(1, 255))
def test_a_changed_byte_changes_the_leaf_or_is_no_record(place: int, change: int) -> None:
    line = bytearray(line_of("egress.decision", **FULL))
    before = leaf_hash(bytes(line))
    line[place % len(line)] ^= change
    assert leaf_hash(bytes(line)) != before


@given(st.binary(max_size=300))
def test_X04_the_record_parser_returns_or_refuses(data: bytes) -> None:
    with pytest.raises(VerificationError):
        parse_record(data)


@pytest.mark.parametrize("change", [lambda s: " " + s, lambda s: s.replace('"seq":3', '"seq":3.0'), lambda s: s + "\n"])
def test_a_record_not_in_canonical_form_is_refused(change: Any) -> None:
    with pytest.raises(VerificationError):
        parse_record(change(line_of().decode()).encode())
    with pytest.raises(VerificationError):
        parse_record(line_of()[:-1] + b',"seq":3}')
    with pytest.raises(VerificationError):
        parse_record(b"[" * 100_000)
