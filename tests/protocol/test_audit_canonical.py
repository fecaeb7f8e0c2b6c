"""Records are written and read as RFC 8785 says, by the fast way as by the library's."""

from __future__ import annotations

import rfc8785
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fedsilo.treaty.audit import record

KEYS = st.from_regex(r"[A-Za-z0-9_.:/-]{1,8}", fullmatch=True)
TEXTS = st.text('aZ09 ~"\\/\u00e9\u20ac\u2603\U0001f600', max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats() | TEXTS,
    lambda children: st.lists(children, max_size=4) | st.dictionaries(KEYS, children, max_size=4),
    max_leaves=8,
)


def spelled(value: object, encode: object) -> bytes | str:
    try:
        return encode(value)  # type: ignore[operator,no-any-return]
    except (ValueError, TypeError):
        return "refused"


@given(st.dictionaries(KEYS, VALUES, max_size=6))
@settings(max_examples=500, deadline=None)
@example({"a": [1e-7, 1e21, 1e16, 123456789012345680.0, -0.0, 5e-324, 0.1, 3.0, 1e15]})
@example({"a": 2**53 - 1, "b": -(2**53) + 1})
@example({"a": 2**53})
@example({"a": float(2**53)})
@example({"é": 1, "z": "\u2028 \U0001f600 \x7f"})
def test_X08_both_encoders_write_the_same_bytes_or_refuse_alike(value: dict[str, object]) -> None:
    assert spelled(value, record._canonical) == spelled(value, rfc8785.dumps)
