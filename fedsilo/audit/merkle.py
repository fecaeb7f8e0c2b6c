"""The Merkle tree of RFC 6962 section 2.1: roots, inclusion proofs and consistency proofs, made and checked.

Leaves and inner nodes are hashed under different first bytes, so neither can be passed off as the other. A tree
keeps the hash of every complete subtree (64 bytes per leaf in all), so appending is O(log n) at worst and a proof
never needs the leaves again. Proof checking follows RFC 9162 sections 2.1.3.2 and 2.1.4.2 and shares no code with
proof making: each is tested against the other and against published vectors.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

HASH_BYTES = 32
EMPTY_ROOT = hashlib.sha256(b"").digest()


def leaf_hash(entry: bytes) -> bytes:
    """RFC 6962 2.1: SHA-256(0x00 || entry)."""
    return hashlib.sha256(b"\x00" + entry).digest()


def node_hash(left: bytes, right: bytes) -> bytes:
    """RFC 6962 2.1: SHA-256(0x01 || left || right)."""
    return hashlib.sha256(b"\x01" + left + right).digest()


class MerkleTree:
    """An append-only tree that can name its root, and prove things, at every size it has had."""

    def __init__(self) -> None:
        # _levels[h] holds, packed, the hashes of the complete subtrees of 2**h leaves, left to right.
        self._levels: list[bytearray] = [bytearray()]

    @property
    def size(self) -> int:
        return len(self._levels[0]) // HASH_BYTES

    def append(self, leaf: bytes) -> None:
        """Add one leaf *hash* (see `leaf_hash`)."""
        if len(leaf) != HASH_BYTES:
            raise ValueError(f"a leaf hash has {HASH_BYTES} bytes, not {len(leaf)}")
        self._levels[0] += leaf
        height, index = 0, self.size - 1
        while index % 2:  # the subtree just completed has a left sibling: their parent is complete too
            level = self._levels[height]
            parent = node_hash(bytes(level[-2 * HASH_BYTES : -HASH_BYTES]), bytes(level[-HASH_BYTES:]))
            height, index = height + 1, index // 2
            if height == len(self._levels):
                self._levels.append(bytearray())
            self._levels[height] += parent

    def leaf(self, index: int) -> bytes:
        """The hash of leaf `index`. Raises IndexError beyond the end."""
        if not 0 <= index < self.size:
            raise IndexError(f"leaf {index} of a tree of {self.size}")
        return self._complete(0, index)

    def root(self, size: int | None = None) -> bytes:
        """The root of the first `size` leaves (by default of all). Raises IndexError beyond the end."""
        size = self.size if size is None else size
        if not 0 <= size <= self.size:
            raise IndexError(f"root at size {size} of a tree of {self.size}")
        return self._range_root(0, size)

    def inclusion(self, index: int, size: int | None = None) -> list[bytes]:
        """PATH(index, D[size]) of RFC 6962 2.1.1. Raises IndexError unless 0 <= index < size <= own size."""
        size = self.size if size is None else size
        if not 0 <= index < size <= self.size:
            raise IndexError(f"inclusion of {index} at size {size} of a tree of {self.size}")
        start, end, path = 0, size, []
        while end - start > 1:
            middle = start + _split(end - start)
            if index < middle:
                path.append(self._range_root(middle, end))
                end = middle
            else:
                path.append(self._range_root(start, middle))
                start = middle
        return path[::-1]

    def consistency(self, old: int, new: int | None = None) -> list[bytes]:
        """PROOF(old, D[new]) of RFC 6962 2.1.2; empty from size 0 or to the same size. Raises IndexError."""
        new = self.size if new is None else new
        if not 0 <= old <= new <= self.size:
            raise IndexError(f"consistency from {old} to {new} of a tree of {self.size}")
        if old in (0, new):
            return []
        start, end, path, whole = 0, new, [], True
        while old != end:
            middle = start + _split(end - start)
            if old <= middle:
                path.append(self._range_root(middle, end))
                end = middle
            else:
                path.append(self._range_root(start, middle))
                start, whole = middle, False
        if not whole:  # the old tree ends in a subtree the checker cannot know from the old root
            path.append(self._range_root(start, end))
        return path[::-1]

    def _complete(self, height: int, position: int) -> bytes:
        offset = position * HASH_BYTES
        return bytes(self._levels[height][offset : offset + HASH_BYTES])

    def _range_root(self, start: int, end: int) -> bytes:
        """Root over leaves [start, end); `start` is a multiple of the largest power of two below the length."""
        if end == start:
            return EMPTY_ROOT
        parts: list[bytes] = []
        while start < end:  # complete subtrees, largest first
            height = (end - start).bit_length() - 1
            parts.append(self._complete(height, start >> height))
            start += 1 << height
        root = parts.pop()
        while parts:
            root = node_hash(parts.pop(), root)
        return root


def verify_inclusion(leaf: bytes, index: int, size: int, proof: Sequence[bytes], root: bytes) -> bool:
    """RFC 9162 2.1.3.2: is `leaf` (a leaf hash) number `index` of the tree of `size` leaves with this root?"""
    if not 0 <= index < size or any(len(part) != HASH_BYTES for part in proof):
        return False
    position, last, result = index, size - 1, leaf
    for part in proof:
        if last == 0:
            return False
        if position & 1 or position == last:
            result = node_hash(part, result)
            while not position & 1 and position:
                position, last = position >> 1, last >> 1
        else:
            result = node_hash(result, part)
        position, last = position >> 1, last >> 1
    return last == 0 and hmac.compare_digest(result, root)


def verify_consistency(old: int, new: int, proof: Sequence[bytes], old_root: bytes, new_root: bytes) -> bool:
    """RFC 9162 2.1.4.2: is the tree (old, old_root) a prefix of the tree (new, new_root)? Size 0 is one of all."""
    if not 0 <= old <= new or any(len(part) != HASH_BYTES for part in proof):
        return False
    if old == 0:
        return not proof and old_root == EMPTY_ROOT and (new > 0 or new_root == EMPTY_ROOT)
    if old == new:
        return not proof and hmac.compare_digest(old_root, new_root)
    parts = list(proof)
    if old & (old - 1) == 0:  # the old tree is one complete subtree: its root starts both computations
        parts.insert(0, old_root)
    if not parts:
        return False
    position, last = old - 1, new - 1
    while position & 1:
        position, last = position >> 1, last >> 1
    from_old = from_new = parts[0]
    for part in parts[1:]:
        if last == 0:
            return False
        if position & 1 or position == last:
            from_old, from_new = node_hash(part, from_old), node_hash(part, from_new)
            while not position & 1 and position:
                position, last = position >> 1, last >> 1
        else:
            from_new = node_hash(from_new, part)
        position, last = position >> 1, last >> 1
    return last == 0 and hmac.compare_digest(from_old, old_root) and hmac.compare_digest(from_new, new_root)


def _split(length: int) -> int:
    """The largest power of two below `length` (RFC 6962 2.1), length >= 2."""
    return 1 << ((length - 1).bit_length() - 1)
