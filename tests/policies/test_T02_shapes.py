"""A tensor is let through only in the shape and the type that the schema says (threat T2): sides and types are free
numbers otherwise, and an empty tensor carries its name."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.place import Place
from policies.engine import Message, decide, measure
from policies.history import History
from tests.policies.setting import BASE_DIGEST, COORDINATOR, SCHEMA, SILO, context, policy_of, policy_text

POLICY = policy_of(policy_text())
RIGHT = dict(SCHEMA.tensors)
A, B = sorted(RIGHT)
# What numpy can hold and a sloppy reader might take for float32, beside what may stand in a header.
HELD = ("float32", "float64", "float16", "int32", "uint8", "bool")
SAID = ("float32", "bfloat16", "float16", "float64", "int8", "")
SIDES = st.lists(st.integers(0, 7), max_size=4).map(tuple)


def _shapes(right: tuple[int, ...]) -> st.SearchStrategy[tuple[int, ...]]:
    """The right one, what lies next to it, and anything else."""
    near = [right[::-1], (*right, 1), (1, *right), (right[0] * right[1],), (right[0] + 1, right[1]), (0, right[1]), ()]
    return st.one_of(st.just(right), st.sampled_from(near), SIDES)


SHAPES = st.fixed_dictionaries({name: _shapes(shape) for name, shape in SCHEMA.tensors})


def _message(kind: str, said: str, shapes: dict[str, Any], held: dict[str, Any], dtypes: dict[str, str]) -> Message:
    header = pb.Factors(
        base_digest=BASE_DIGEST if kind == "lora.factors" else "", schema_sha256=SCHEMA.digest, rank=SCHEMA.rank,
        scale=SCHEMA.scale, dtype=said, tensors=[pb.TensorEntry(name=name, shape=shapes[name]) for name in (A, B)],
    )  # fmt: skip
    tensors: Any = {name: np.zeros(held[name], dtypes[name]) for name in (A, B)}
    ours = kind == "lora.factors"
    return Message(
        "egress" if ours else "ingress", Place("run-1", 1, 0, kind), SILO if ours else COORDINATOR, SCHEMA.update_bytes,
        header, tensors,
    )  # fmt: skip


@given(
    kind=st.sampled_from(["lora.factors", "global.adapter"]),
    said=st.one_of(st.just(SCHEMA.dtype), st.sampled_from(SAID)),
    shapes=SHAPES,
    held=st.one_of(st.none(), SHAPES),
    dtypes=st.fixed_dictionaries(dict.fromkeys((A, B), st.one_of(st.just("float32"), st.sampled_from(HELD)))),
)
@example("lora.factors", "float32", RIGHT, None, {A: "float32", B: "float32"})
@example("global.adapter", "float32", RIGHT, None, {A: "float32", B: "float32"})
@example("lora.factors", "float32", {A: (6, 2), B: (4, 2)}, None, {A: "float32", B: "float32"})
@example("lora.factors", "float32", {A: (2, 6), B: (0, 2)}, None, {A: "float32", B: "float32"})
@example("lora.factors", "float32", RIGHT, {A: (12,), B: (4, 2)}, {A: "float32", B: "float32"})
@example("lora.factors", "bfloat16", RIGHT, None, {A: "float32", B: "float32"})
@example("global.adapter", "bfloat16", RIGHT, None, {A: "float32", B: "float32"})
@example("lora.factors", "float32", RIGHT, None, {A: "float32", B: "float64"})
@settings(max_examples=400, deadline=None)
def test_T02_a_tensor_is_let_through_only_in_the_schemas_shape_and_type(
    kind: str, said: str, shapes: dict[str, Any], held: dict[str, Any] | None, dtypes: dict[str, str]
) -> None:
    """`held` is what lies behind the header, by default what it says; each of the two must be the schema's."""
    held = shapes if held is None else held
    message = _message(kind, said, shapes, held, dtypes)
    known = {"last_adapter_first": True, "expected_sender": message.sender}
    decision = decide(measure(message, context(**known)), POLICY, History())
    of_schema = said == SCHEMA.dtype and shapes == held == RIGHT and set(dtypes.values()) == {"float32"}
    assert (decision.verdict == "allow") is of_schema, decision.explain()
    if not of_schema:
        assert {"TENSOR_SHAPE", "TENSOR_DTYPE"} & set(decision.reasons)


@given(names=st.lists(st.text(min_size=1, max_size=20), min_size=1, max_size=40, unique=True))
@settings(max_examples=50, deadline=None)
def test_T02_an_empty_tensor_of_any_name_is_refused(names: list[str]) -> None:
    message = _message("lora.factors", SCHEMA.dtype, RIGHT, RIGHT, {A: "float32", B: "float32"})
    more = sorted(set(names) - set(RIGHT))
    body = pb.Factors()
    body.CopyFrom(message.body)
    body.tensors.extend(pb.TensorEntry(name=name, shape=(0,)) for name in more)
    tensors: Any = {**dict(message.tensors or {}), **{name: np.zeros(0, np.float32) for name in more}}
    with_more = Message(
        message.direction, Place("run-1", 1, 0, message.kind), SILO, message.payload_bytes, body,
        {name: tensors[name] for name in sorted(tensors)},
    )  # fmt: skip
    assert decide(measure(message, context()), POLICY, History()).verdict == "allow"
    assert "TENSOR_SET" in decide(measure(with_more, context()), POLICY, History()).reasons
