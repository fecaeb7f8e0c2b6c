"""Memory that is used again: never while somebody looks at what was in it."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from silo.reusable_buffer import ReusableBuffer

PAGE_BYTES = 4096


def address_of(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def test_the_same_pages_are_taken_again_once_nobody_looks() -> None:
    buffer = ReusableBuffer()
    first = buffer.take(1 << 20)
    at = address_of(first)
    first[:] = b"1" * len(first)
    assert at % PAGE_BYTES == 0
    first.release()
    second = buffer.take(1 << 20)
    assert address_of(second) == at


@pytest.mark.parametrize(
    "look", [lambda view: view, lambda view: view[5:9], lambda view: np.frombuffer(view, np.uint8)]
)
def test_what_somebody_looks_at_stays_as_it_is(look: object) -> None:
    buffer = ReusableBuffer()
    first = buffer.take(1 << 20)
    first[:] = b"1" * len(first)
    kept = look(first)  # type: ignore[operator]
    del first
    second = buffer.take(1 << 20)
    second[:] = b"2" * len(second)
    assert set(bytes(kept)) == {ord("1")}
    del kept
    third = buffer.take(1 << 20)  # the second is looked at still
    third[:] = b"3" * len(third)
    assert set(bytes(second)) == {ord("2")}


@given(st.lists(st.tuples(st.integers(1, 5 * PAGE_BYTES), st.booleans()), min_size=1, max_size=8))
def test_each_buffer_has_its_size_and_holds_what_was_written(takings: list[tuple[int, bool]]) -> None:
    buffer, held = ReusableBuffer(), list[tuple[memoryview, int]]()
    for number, (size_bytes, is_held) in enumerate(takings, 1):
        view = buffer.take(size_bytes)
        assert len(view) == size_bytes
        view[:] = bytes([number]) * size_bytes
        if is_held:
            held.append((view, number))
        del view
        assert all(set(bytes(each)) == {value} for each, value in held)
