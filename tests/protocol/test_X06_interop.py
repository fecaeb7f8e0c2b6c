"""X6: what we prove and hash, checked by implementations that are not ours.

pymerkle grows its own tree over the same entries, works out for itself which hashes an inclusion proof must have, and
has proofs of its own for consistency; canonical JSON is checked by the published vectors of RFC 8785. sigstore's Merkle
code checks inclusion only and brings thirteen packages, an HTTP client among them; pymerkle brings one.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import rfc8785
from pymerkle import InmemoryTree, InvalidProof, verify_consistency, verify_inclusion

from fedsilo.audit.merkle import EMPTY_ROOT, MerkleTree, leaf_hash
from fedsilo.audit.record import NO_PREVIOUS, parse_record, record_line
from fedsilo.protocol.codec import canonical_json
from fedsilo.protocol.errors import VerificationError

SIZE_MAX = 130
SIZES = 40  # of them, where not all are asked for
Sampled = Callable[[Sequence[int], int], list[int]]
ENTRIES = [b"record %d" % number for number in range(SIZE_MAX)]


@pytest.fixture(scope="module")
def ours() -> MerkleTree:
    tree = MerkleTree()
    for entry in ENTRIES:
        tree.append(leaf_hash(entry))
    return tree


@pytest.fixture(scope="module")
def theirs() -> InmemoryTree:
    tree = InmemoryTree(algorithm="sha256")
    for entry in ENTRIES:
        tree.append_entry(entry)
    return tree


def refused(check: Any, *arguments: Any, **expected: Any) -> bool:
    try:
        check(*arguments, **expected)
    except InvalidProof:
        return True
    return False


def test_X06_the_other_tree_has_our_roots(ours: MerkleTree, theirs: InmemoryTree) -> None:
    assert theirs.get_root(0) == EMPTY_ROOT
    for size in range(1, SIZE_MAX + 1):
        assert theirs.get_root(size) == ours.root(size)


def test_X06_inclusion_proofs_verify_elsewhere(ours: MerkleTree, theirs: InmemoryTree, sampled: Sampled) -> None:
    """Every leaf at sizes to 130. Their path begins with the leaf, which RFC 6962 2.1.1 leaves out."""
    for size in sampled(range(1, SIZE_MAX + 1), SIZES):
        root = ours.root(size)
        for index in range(size):
            leaf, proof = ours.leaf(index), theirs.prove_inclusion(index + 1, size)
            proof.path = [leaf, *ours.inclusion(index, size)]
            verify_inclusion(leaf, root, proof, index=index + 1, size=size, algorithm="sha256")
        # the counterpart, once for each size: the same proof of another leaf, and with one hash changed
        assert refused(verify_inclusion, leaf_hash(b"another"), root, proof, index=size, size=size)
        proof.path = [*proof.path[:-1], bytes(32)]
        assert refused(verify_inclusion, leaf, root, proof, index=size, size=size)


def test_X06_our_roots_are_consistent_to_them(ours: MerkleTree, theirs: InmemoryTree, sampled: Sampled) -> None:
    """Sizes to 130, each with every smaller one, by their own proofs, whose form is not the RFC's."""
    for new in sampled(range(1, SIZE_MAX + 1), SIZES):
        for old in range(1, new + 1):
            proof = theirs.prove_consistency(old, new)
            verify_consistency(
                ours.root(old), ours.root(new), proof, prior_size=old, later_size=new, algorithm="sha256"
            )
        assert refused(verify_consistency, bytes(32), ours.root(new), proof, prior_size=new, later_size=new)


@cache
def their_root(start: int, end: int) -> bytes:
    """MTH(D[start:end]) by their tree."""
    tree = InmemoryTree(algorithm="sha256")
    tree.append_entries(ENTRIES[start:end])
    return bytes(tree.get_root())


def subproof(old: int, start: int, end: int, known: bool) -> list[bytes]:
    """SUBPROOF(old, D[start:end], known) of RFC 6962 2.1.2, word for word, with hashes by them."""
    length = end - start
    if old == length:
        return [] if known else [their_root(start, end)]
    split = 1 << (length - 1).bit_length() - 1
    if old <= split:
        return [*subproof(old, start, start + split, known), their_root(start + split, end)]
    return [*subproof(old - split, start + split, end, False), their_root(start, start + split)]


def test_X06_consistency_proofs_are_those_of_the_definition(ours: MerkleTree, sampled: Sampled) -> None:
    """Sizes to 130, each with every smaller one: the hashes that RFC 6962 2.1.2 asks for, each computed by them."""
    for new in sampled(range(1, SIZE_MAX + 1), SIZES):
        for old in range(1, new + 1):
            assert ours.consistency(old, new) == subproof(old, 0, new, True), (old, new)


@pytest.mark.parametrize("number", [2.0**53, -(2.0**53), 1e16, 2.5e20, 1e21, 1.7e308, 2**53 - 1, 12345.0, 5e-324])
def test_X08_a_record_is_read_back_whatever_its_numbers(number: float) -> None:
    """A norm that a hostile trainer offers may be any; its refusal must not make the log unreadable."""
    line = record("egress.decision", {"kind": "lora.factors", "decision": "deny", "facts": {"final": {"l2": number}}})
    assert parse_record(line)["facts"]["final"]["l2"] == number
    assert canonical_json(number) == rfc8785.dumps(number)


def test_X08_an_integer_that_no_double_is_stays_refused() -> None:
    line = record("start", {})
    assert parse_record(line)["t"] == 1
    for digits in (b"9007199254740993", b"1" * 400, b"1" * 5000):
        with pytest.raises(VerificationError):
            parse_record(line.replace(b'"t":1,', b'"t":' + digits + b","))


def record(event: str, fields: dict[str, Any]) -> bytes:
    return record_line(
        seq=0, salt=bytes(16), t=1, boot="b", mono=1, actor="a", event=event, previous=NO_PREVIOUS, fields=fields
    )


# RFC 8785 3.2.3 and appendix B: the IEEE 754 bits of a number and the text that it must have.
NUMBERS = [
    ("0000000000000000", "0"),
    ("8000000000000000", "0"),
    ("0000000000000001", "5e-324"),
    ("8000000000000001", "-5e-324"),
    ("7fefffffffffffff", "1.7976931348623157e+308"),
    ("ffefffffffffffff", "-1.7976931348623157e+308"),
    ("4340000000000000", "9007199254740992"),
    ("c340000000000000", "-9007199254740992"),
    ("4430000000000000", "295147905179352830000"),
    ("44b52d02c7e14af5", "9.999999999999997e+22"),
    ("44b52d02c7e14af6", "1e+23"),
    ("44b52d02c7e14af7", "1.0000000000000001e+23"),
    ("444b1ae4d6e2ef4e", "999999999999999700000"),
    ("444b1ae4d6e2ef4f", "999999999999999900000"),
    ("444b1ae4d6e2ef50", "1e+21"),
    ("3eb0c6f7a0b5ed8c", "9.999999999999997e-7"),
    ("3eb0c6f7a0b5ed8d", "0.000001"),
    ("41b3de4355555553", "333333333.3333332"),
    ("41b3de4355555554", "333333333.33333325"),
    ("41b3de4355555555", "333333333.3333333"),
    ("41b3de4355555556", "333333333.3333334"),
    ("41b3de4355555557", "333333333.33333343"),
    ("becbf647612f3696", "-0.0000033333333333333333"),
    ("43143ff3c1cb0959", "1424953923781206.2"),
]


@pytest.mark.parametrize(("bits", "text"), NUMBERS)
def test_X08_numbers_of_RFC_8785(bits: str, text: str) -> None:
    (number,) = struct.unpack(">d", bytes.fromhex(bits))
    assert canonical_json(number) == rfc8785.dumps(number) == text.encode()


@pytest.mark.parametrize("bits", ["7fffffffffffffff", "7ff0000000000000", "fff0000000000000"])
def test_X08_numbers_that_RFC_8785_forbids(bits: str) -> None:
    (number,) = struct.unpack(">d", bytes.fromhex(bits))
    with pytest.raises(ValueError, match=r"NaN|Infinity|inf|nan"):
        canonical_json(number)


def test_X08_the_example_and_the_key_order_of_RFC_8785() -> None:
    """Sections 3.2.2 and 3.2.3, with the expected bytes as section 3.2.4 prints them."""
    example = {
        "numbers": [333333333.33333329, 1e30, 4.50, 2e-3, 0.000000000000000000000000001],
        "string": '\u20ac$\u000f\nA\'B"\\\\"/',
        "literals": [None, True, False],
    }
    expected = bytes.fromhex(
        "7b226c69746572616c73223a5b6e756c6c2c747275652c66616c73655d2c226e756d62657273223a5b3333333333333333332e3333333333"
        "33332c31652b33302c342e352c302e3030322c31652d32375d2c22737472696e67223a22e282ac245c75303030665c6e4127425c225c5c5c"
        "5c5c222f227d"
    )
    assert canonical_json(example) == expected
    keys = ["\r", "1", "\u0080", "\u00f6", "\u20ac", "\U0001f600", "\ufb33"]
    written = canonical_json({key: key for key in reversed(keys)}).decode()
    assert [written.index(f":{canonical_json(key).decode()}") for key in keys] == sorted(
        written.index(f":{canonical_json(key).decode()}") for key in keys
    )
