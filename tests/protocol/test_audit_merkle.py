"""The Merkle tree against published vectors, against the recursive definition, and against a second implementation."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsilo.audit import audit_verify
from fedsilo.audit.merkle import (
    EMPTY_ROOT,
    MerkleTree,
    leaf_hash,
    verify_consistency,
    verify_inclusion,
)

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "rfc6962.json").read_text(encoding="utf-8"))
SIZE_MAX = 130
SIZES = 40  # of them, where not all are asked for
Sampled = Callable[[Sequence[int], int], list[int]]
LEAVES = [leaf_hash(b"record %d" % index) for index in range(SIZE_MAX)]


def tree_of(leaves: list[bytes]) -> MerkleTree:
    tree = MerkleTree()
    for leaf in leaves:
        tree.append(leaf)
    return tree


def defined_root(leaves: list[bytes]) -> bytes:
    """MTH of RFC 6962 2.1, word for word, over leaf hashes."""
    if not leaves:
        return hashlib.sha256(b"").digest()
    if len(leaves) == 1:
        return leaves[0]
    split = 1
    while split * 2 < len(leaves):
        split *= 2
    return hashlib.sha256(b"\x01" + defined_root(leaves[:split]) + defined_root(leaves[split:])).digest()


def published_tree(size: int) -> MerkleTree:
    return tree_of([leaf_hash(bytes.fromhex(leaf)) for leaf in VECTORS["leaves"][:size]])


def test_X06_published_roots() -> None:
    assert EMPTY_ROOT.hex() == VECTORS["empty_root"] == MerkleTree().root().hex()
    for size, root in enumerate(VECTORS["roots"], start=1):
        assert published_tree(size).root().hex() == root
        assert published_tree(8).root(size).hex() == root  # also as the past of a longer log


@pytest.mark.parametrize("vector", VECTORS["inclusion"])
def test_X06_published_inclusion_proofs(vector: dict[str, object]) -> None:
    index, size = vector["index"], vector["size"]
    tree = published_tree(8)
    proof = tree.inclusion(index, size)
    assert [part.hex() for part in proof] == vector["proof"]
    assert verify_inclusion(tree.leaf(index), index, size, proof, bytes.fromhex(VECTORS["roots"][size - 1]))


@pytest.mark.parametrize("vector", VECTORS["consistency"])
def test_X06_published_consistency_proofs(vector: dict[str, object]) -> None:
    old, new = vector["old"], vector["new"]
    proof = published_tree(8).consistency(old, new)
    assert [part.hex() for part in proof] == vector["proof"]
    roots = [bytes.fromhex(root) for root in VECTORS["roots"]]
    assert verify_consistency(old, new, proof, roots[old - 1], roots[new - 1])


def test_X06_roots_of_all_sizes_by_three_computations() -> None:
    tree = tree_of(LEAVES)
    sizes = set(range(SIZE_MAX + 1))
    by_auditor = audit_verify.roots_at(b"".join(LEAVES), sizes)
    for size in sizes:
        assert tree.root(size) == defined_root(LEAVES[:size]) == by_auditor[size]


def test_X06_inclusion_of_every_leaf_at_each_size(sampled: Sampled) -> None:
    tree = tree_of(LEAVES)
    for size in sampled(range(1, SIZE_MAX + 1), SIZES):
        root = tree.root(size)
        for index in range(size):
            proof = tree.inclusion(index, size)
            assert verify_inclusion(LEAVES[index], index, size, proof, root)
            assert not verify_inclusion(LEAVES[(index + 1) % SIZE_MAX], index, size, proof, root)
            assert not verify_inclusion(LEAVES[index], index, size, [*proof, root], root)
            if proof:
                assert not verify_inclusion(LEAVES[index], index, size, proof[:-1], root)


def test_X06_consistency_of_each_size_with_all_smaller_ones(sampled: Sampled) -> None:
    tree = tree_of(LEAVES)
    roots = [tree.root(size) for size in range(SIZE_MAX + 1)]
    for new in sampled(range(SIZE_MAX + 1), SIZES):
        for old in range(new + 1):
            proof = tree.consistency(old, new)
            assert verify_consistency(old, new, proof, roots[old], roots[new])
            if old:
                assert not verify_consistency(old, new, proof, roots[old - 1], roots[new])
            if 0 < old < new:
                assert not verify_consistency(old, new, proof, roots[old], roots[new - 1])
                assert not verify_consistency(old, new, proof[:-1], roots[old], roots[new])
                assert not verify_consistency(old, new, [*proof, roots[1]], roots[old], roots[new])


@given(size=st.integers(1, 70), data=st.data())
def test_X06_a_changed_proof_or_place_is_refused(size: int, data: st.DataObject) -> None:
    tree = tree_of(LEAVES[:size])
    index = data.draw(st.integers(0, size - 1))
    old = data.draw(st.integers(1, size))
    proof, growth = tree.inclusion(index), tree.consistency(old)
    other = data.draw(st.integers(0, size - 1).filter(lambda value: value != index)) if size > 1 else size
    assert not verify_inclusion(LEAVES[index], other, size, proof, tree.root())
    for parts, check in (
        (proof, lambda changed: verify_inclusion(LEAVES[index], index, size, changed, tree.root())),
        (growth, lambda changed: verify_consistency(old, size, changed, tree.root(old), tree.root())),
    ):
        assert check(parts)
        if parts:
            place = data.draw(st.integers(0, len(parts) - 1))
            bit = data.draw(st.integers(0, 255))
            changed = list(parts)
            changed[place] = (int.from_bytes(parts[place], "big") ^ (1 << bit)).to_bytes(32, "big")
            assert not check(changed)
            assert not check([part[:-1] for part in parts])


def test_X06_out_of_range_questions_are_errors() -> None:
    tree = tree_of(LEAVES[:5])
    for call in (
        lambda: tree.root(6),
        lambda: tree.inclusion(5, 5),
        lambda: tree.inclusion(0, 6),
        lambda: tree.inclusion(-1, 5),
        lambda: tree.consistency(4, 6),
        lambda: tree.consistency(5, 4),
        lambda: tree.leaf(5),
    ):
        with pytest.raises(IndexError):
            call()
    with pytest.raises(ValueError, match="32 bytes"):
        tree.append(b"short")
    assert not verify_inclusion(LEAVES[0], 5, 5, [], tree.root())
    assert not verify_consistency(0, 5, [], LEAVES[0], tree.root())  # only the empty root is the empty log's
