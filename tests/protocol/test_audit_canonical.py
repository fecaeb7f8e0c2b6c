"""Records are written and read as RFC 8785 says, by the fast way as by the library's."""

from __future__ import annotations

import random
import struct
from typing import Any

import pytest
import rfc8785

from fedsilo.audit import record

VALUES = 5_000
CHARACTERS = 'aZ09 ~"\\/\u00e9\u20ac\u2603\U0001f600'
EDGES: list[dict[str, Any]] = [
    {"a": [1e-7, 1e21, 1e16, 123456789012345680.0, -0.0, 5e-324, 0.1, 3.0, 1e15]},
    {"a": 2**53 - 1, "b": -(2**53) + 1},
    {"a": 2**53},
    {"a": float(2**53)},
    {"a": float("nan")},
    {"a": float("-inf")},
    {"é": 1, "z": "\u2028 \U0001f600 \x7f"},
]


def text(source: random.Random) -> str:
    return "".join(source.choices(CHARACTERS, k=source.randrange(12)))


def value(source: random.Random, depth: int = 0) -> Any:
    match source.randrange(8 if depth < 3 else 6):
        case 0:
            return source.choice([None, True, False])
        case 1:
            return source.randrange(-(2**60), 2**60)
        case 2:
            return source.randrange(-1000, 1000)
        case 3:
            return struct.unpack("<d", source.randbytes(8))[0]  # any float there is
        case 4:
            return round(source.uniform(-1e6, 1e6), source.randrange(8))
        case 5:
            return text(source)
        case 6:
            return [value(source, depth + 1) for _ in range(source.randrange(4))]
        case _:
            return {text(source): value(source, depth + 1) for _ in range(source.randrange(4))}


def spelled(given: object, encode: object) -> bytes | str:
    try:
        return encode(given)  # type: ignore[operator,no-any-return]
    except (ValueError, TypeError):
        return "refused"


@pytest.mark.exhaustive(keep=1)
@pytest.mark.parametrize("seed", range(4))
def test_X08_both_encoders_write_the_same_bytes_or_refuse_alike(seed: int) -> None:
    source, outcomes = random.Random(seed), set()
    for given in [*EDGES, *({text(source): value(source) for _ in range(source.randrange(6))} for _ in range(VALUES))]:
        written = spelled(given, record._canonical)
        assert written == spelled(given, rfc8785.dumps), given
        outcomes.add(written == "refused")
    assert outcomes == {True, False}
