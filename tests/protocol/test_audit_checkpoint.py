"""Signed notes against the published examples, checkpoints, cosignatures and the witness's judgement."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from fedsilo.audit import audit_verify
from fedsilo.audit.checkpoint import (
    Checkpoint,
    cosign,
    cosigned_at,
    cosigner_key,
    judge,
    log_key,
    merge_signatures,
    open_checkpoint,
    open_note,
    parse_checkpoint,
    parse_note,
    parse_verifier_key,
    sign_checkpoint,
    sign_note,
)
from fedsilo.audit.merkle import EMPTY_ROOT, MerkleTree, leaf_hash
from fedsilo.protocol.errors import VerificationError

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "signed_note.json").read_text(encoding="utf-8"))
KEY = Ed25519PrivateKey.from_private_bytes(b"\x01" * 32)
WITNESS = Ed25519PrivateKey.from_private_bytes(b"\x02" * 32)
ORIGIN, WITNESS_NAME = "spiffe://net/silo/a", "spiffe://net/coordinator/main"


def head(count: int, prefix: bytes = b"") -> tuple[MerkleTree, str]:
    tree = MerkleTree()
    for index in range(count):
        tree.append(leaf_hash(prefix + b"%d" % index))
    return tree, sign_checkpoint(Checkpoint(ORIGIN, count, tree.root()), KEY)


def test_the_note_of_the_specification_verifies() -> None:
    key = parse_verifier_key(VECTORS["spec_vkey"])
    assert open_note(VECTORS["spec_note"], key).text == "This is an example message.\n"
    with pytest.raises(VerificationError):
        open_note(VECTORS["spec_note"].replace("example message", "Example message"), key)


def test_the_reference_implementations_example_is_reproduced_byte_for_byte() -> None:
    private = Ed25519PrivateKey.from_private_bytes(base64.b64decode(VECTORS["go_private_key_base64"])[1:])
    assert log_key("PeterNeumann", private.public_key()).text == VECTORS["go_vkey"]
    signed = VECTORS["go_text"] + "\n" + VECTORS["go_signature"]
    assert sign_note(VECTORS["go_text"], "PeterNeumann", private) == signed
    both = signed + VECTORS["enoch_signature"]
    for name in ("go_vkey", "enoch_vkey"):
        assert open_note(both, parse_verifier_key(VECTORS[name])).text == VECTORS["go_text"]
    with pytest.raises(VerificationError, match="no signature"):
        open_note(signed, parse_verifier_key(VECTORS["enoch_vkey"]))
    assert merge_signatures(signed, both) == both


@pytest.mark.parametrize(
    "text",
    [
        "PeterNeumann+c74f20a4+ARpc2QcUPDhMQegwxbzhKqiBfsVkmqq/LDE4izWy10TW",  # key id of another key
        "Peter Neumann+c74f20a3+ARpc2QcUPDhMQegwxbzhKqiBfsVkmqq/LDE4izWy10TW",
        "PeterNeumann+C74F20A3+ARpc2QcUPDhMQegwxbzhKqiBfsVkmqq/LDE4izWy10TW",
        "PeterNeumann+c74f20a3+!Rpc2QcUPDhMQegwxbzhKqiBfsVkmqq/LDE4izWy10TW",
        "PeterNeumann+c74f20a3",
        "",
    ],
)
def test_a_malformed_verifier_key_is_refused(text: str) -> None:
    with pytest.raises(VerificationError):
        parse_verifier_key(text)


def test_checkpoint_text_is_the_specified_one() -> None:
    tree, note = head(7)
    lines = note.split("\n")
    assert lines[:2] == [ORIGIN, "7"]
    assert base64.b64decode(lines[2]) == tree.root()
    assert lines[3] == "" and lines[4].startswith(f"— {ORIGIN} ") and lines[5] == ""
    assert open_checkpoint(note, log_key(ORIGIN, KEY.public_key())) == Checkpoint(ORIGIN, 7, tree.root())


@pytest.mark.parametrize(
    "text",
    [
        "o\n07\n{root}\n",
        "o\n-1\n{root}\n",
        "o\n\u0667\n{root}\n",
        "o\n7\n",
        "o\n7\nAAAA\n",
        "o\n7\n{root}\nextension\n",
        "o\n7\n{root}",
        "\n7\n{root}\n",
        "o o\n7\n{root}\n",
    ],
)
def test_a_malformed_checkpoint_is_refused(text: str) -> None:
    root = base64.b64encode(EMPTY_ROOT).decode()
    assert parse_checkpoint(f"o\n7\n{root}\n").size == 7
    with pytest.raises(VerificationError):
        parse_checkpoint(text.format(root=root))


def test_a_checkpoint_of_another_origin_is_refused() -> None:
    _, note = head(3)
    stolen = note.replace(f"{ORIGIN}\n", "spiffe://net/silo/b\n", 1)
    with pytest.raises(VerificationError):
        open_checkpoint(stolen, log_key(ORIGIN, KEY.public_key()))
    signed_elsewhere = sign_note("spiffe://net/silo/b\n0\n" + base64.b64encode(EMPTY_ROOT).decode() + "\n", ORIGIN, KEY)
    with pytest.raises(VerificationError, match="a checkpoint of"):
        open_checkpoint(signed_elsewhere, log_key(ORIGIN, KEY.public_key()))


def test_a_cosignature_is_timed_and_never_a_logs_own_signature() -> None:
    _, note = head(3)
    key = cosigner_key(WITNESS_NAME, WITNESS.public_key())
    assert cosigned_at(note, key) is None
    cosigned = cosign(note, WITNESS_NAME, WITNESS, 1_800_000_000)
    assert cosigned_at(cosigned, key) == 1_800_000_000
    assert open_checkpoint(cosigned, log_key(ORIGIN, KEY.public_key())).size == 3
    assert cosigned_at(cosign(cosigned, WITNESS_NAME, WITNESS, 1_800_000_009), key) == 1_800_000_009
    with pytest.raises(VerificationError):
        open_note(cosigned, log_key(WITNESS_NAME, WITNESS.public_key()))
    line = next(item for item in parse_note(cosigned).signatures if item.name == WITNESS_NAME)
    later = (1_800_000_001).to_bytes(8, "big") + line.signature[8:]
    forged = cosigned.replace(
        base64.b64encode(line.key_id + line.signature).decode(), base64.b64encode(line.key_id + later).decode()
    )
    with pytest.raises(VerificationError, match="not valid"):
        cosigned_at(forged, key)


@given(st.text(max_size=200))
def test_X04_the_note_parsers_return_or_refuse(text: str) -> None:
    for candidate in (text, f"o\n1\n{text}\n", f"{text}\n\n— a {text}\n"):
        for parser in (parse_note, parse_checkpoint, parse_verifier_key):
            try:
                parser(candidate)
            except VerificationError:
                continue


@given(st.integers(0, 10_000), st.integers(1, 255))
def test_X06_any_changed_byte_of_a_note_is_refused_by_both_readers(place: int, change: int) -> None:
    data = bytearray(head(5)[1].encode())
    data[place % len(data)] ^= change
    with pytest.raises((VerificationError, UnicodeDecodeError)):
        open_checkpoint(data.decode(), log_key(ORIGIN, KEY.public_key()))
    try:
        note = audit_verify.Note(bytes(data))
        accepted = note.origin == ORIGIN and note.signed_by(audit_verify.Key(log_key(ORIGIN, KEY.public_key()).text))
    except audit_verify._DAMAGED:
        accepted = False
    assert not accepted


def test_T38_witness_accepts_growth_and_only_growth() -> None:
    tree, note = head(9)
    public = KEY.public_key()
    previous = Checkpoint(ORIGIN, 4, tree.root(4))
    assert judge(None, note, [], origin=ORIGIN, public_key=public).size == 9
    assert judge(previous, note, tree.consistency(4), origin=ORIGIN, public_key=public).root == tree.root()
    assert judge(Checkpoint(ORIGIN, 9, tree.root()), note, [], origin=ORIGIN, public_key=public).size == 9
    with pytest.raises(VerificationError, match="dropped"):
        judge(Checkpoint(ORIGIN, 10, tree.root()), note, [], origin=ORIGIN, public_key=public)
    _, fork = head(9, b"other")
    for bad_note, proof in ((fork, tree.consistency(4)), (note, tree.consistency(5)), (note, [])):
        with pytest.raises(VerificationError, match="does not extend"):
            judge(previous, bad_note, proof, origin=ORIGIN, public_key=public)
    with pytest.raises(VerificationError, match="does not extend"):
        judge(Checkpoint(ORIGIN, 9, tree.root()), fork, [], origin=ORIGIN, public_key=public)
    with pytest.raises(VerificationError):
        judge(None, note, [], origin=ORIGIN, public_key=WITNESS.public_key())
    with pytest.raises(VerificationError):
        judge(None, note, [], origin="spiffe://net/silo/b", public_key=public)
