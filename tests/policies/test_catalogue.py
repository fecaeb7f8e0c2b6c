"""Every field of every message that crosses has a class; a field without one is refused (threats T3, T8)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from fedsilo.treaty.wire._generated import federation_pb2 as pb
from policies import catalogue
from policies.catalogue import CATALOGUE, KINDS, field_class, fields_at_fault
from tests.policies.setting import judged, policy_of, policy_text, small_message


def _fields(descriptor: Descriptor) -> Iterator[tuple[str, FieldDescriptor]]:
    for field in descriptor.fields:
        if field.message_type is not None:
            yield from _fields(field.message_type)
        else:
            yield descriptor.name, field


def _unclassified() -> set[str]:
    return {
        f"{name}.{field.name}"
        for message in KINDS.values()
        for name, field in _fields(message.DESCRIPTOR)
        if field_class(name, field.name) is None
    }


def test_every_field_of_every_kind_has_a_class() -> None:
    assert _unclassified() == set()


def test_no_class_without_a_field() -> None:
    known = {(name, field.name) for message in KINDS.values() for name, field in _fields(message.DESCRIPTOR)}
    assert {(name, field) for name, fields in CATALOGUE.items() for field in fields} == known


def test_only_answers_to_public_prompts_are_free_text() -> None:
    text = {(name, field) for name, fields in CATALOGUE.items() for field, kind in fields.items() if kind == "text"}
    assert text == {("Response", "text")}


def test_a_field_without_a_class_is_noticed_and_denied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(catalogue.CATALOGUE["Progress"], "step")
    assert _unclassified() == {"Progress.step"}
    message = small_message("control.progress", pb.Progress(round=1, step=2), round_number=1, step=2)
    decision = judged(message, policy_of(policy_text()))
    assert decision.verdict == "deny" and decision.reasons == ("FIELD_NOT_ALLOWED",)


NOTE = "audit/hospital_a\n12\n" + "A" * 43 + "=\n\n\u2014 hospital_a AAAA\n"


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        (pb.Hello(role="member"), pb.Hello(role="Mr Smith, born 1962")),
        (pb.Hello(isolation="user"), pb.Hello(isolation="none")),
        (pb.Fetch(digest="ab" * 32), pb.Fetch(digest="ab" * 32 + "\n")),
        (pb.ErrorReport(code="INTERNAL"), pb.ErrorReport(code="KeyError: 'patient 17'")),
        (pb.Declined(kind="lora.factors"), pb.Declined(kind="lora.factors ")),
        (pb.Checkpoint(note=NOTE), pb.Checkpoint(note=NOTE + "free text")),
        (pb.Checkpoint(consistency=[b"x" * 32]), pb.Checkpoint(consistency=[b"x" * 33])),
        (pb.Metric(name="pass_at_1"), pb.Metric(name="Pass at 1")),
        (pb.Metric(value=0.5), pb.Metric(value=float("nan"))),
        (pb.Response(finish=pb.FINISH_STOP), pb.Response(finish=7)),  # type: ignore[arg-type]
        (pb.Refusal(expected="fp32"), pb.Refusal(expected="\x1b[31m")),
    ],
)
def test_T08_a_value_must_fit_its_class(good: pb.Hello, bad: pb.Hello) -> None:
    assert fields_at_fault(good) == {}
    assert sum(fields_at_fault(bad).values()) == 1
