"""Every field of every message that crosses has a class; a field without one is refused (threats T3, T8)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest
from google.protobuf import descriptor_pb2
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.descriptor_pool import DescriptorPool

from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.kinds import INBOUND_KINDS, MESSAGES, OUTBOUND_KINDS
from policies import kinds
from policies.kinds import CATALOGUE, field_class, fields_at_fault
from tests.policies.setting import judged, policy_of, policy_text, small_message

DESCRIPTORS = [message.DESCRIPTOR for message in MESSAGES.values()]

# What frames a message and is no payload: the gate fills it in, and codec.signing_bytes covers it.
GONE = {"PublicRewards", "DiagDrift", "CountExamples"}  # kinds that no method sends any more
FRAMING = {
    "Envelope": {
        "federation", "run", "round", "step", "attempt", "kind", "sender", "sequence", "payload_digest", "signature",
    },
    "Opening": {"envelope", "payload_bytes", "offset"},
    "Admitted": {"offset"},
    "Frame": {"opening", "chunk", "admitted"},
}  # fmt: skip


def _fields(descriptor: Descriptor) -> Iterator[tuple[str, FieldDescriptor]]:
    for field in descriptor.fields:
        if field.message_type is not None:
            yield from _fields(field.message_type)
        else:
            yield descriptor.name, field


def _unclassified(descriptors: Iterable[Descriptor] = DESCRIPTORS) -> set[str]:
    return {
        f"{name}.{field.name}"
        for descriptor in descriptors
        for name, field in _fields(descriptor)
        if field_class(name, field.name) is None
    }


def _with_field_remark(message_name: str) -> list[Descriptor]:
    """The kinds' descriptors of a federation.proto in which one message has a further field."""
    file = descriptor_pb2.FileDescriptorProto()
    pb.DESCRIPTOR.CopyToProto(file)
    message = next(each for each in file.message_type if each.name == message_name)
    message.field.add(name="remark", number=99, type=FieldDescriptor.TYPE_STRING, label=FieldDescriptor.LABEL_OPTIONAL)
    pool = DescriptorPool()
    pool.Add(file)
    return [pool.FindMessageTypeByName(descriptor.full_name) for descriptor in DESCRIPTORS]


def test_every_field_of_every_kind_has_a_class() -> None:
    assert {*OUTBOUND_KINDS, *INBOUND_KINDS} == MESSAGES.keys()
    assert _unclassified() == set()


def test_every_message_of_the_protocol_is_looked_at() -> None:
    def below(descriptor: Descriptor) -> set[str]:
        inner = (field.message_type for field in descriptor.fields if field.message_type is not None)
        return {descriptor.name}.union(*(below(each) for each in inner))

    looked_at = set().union(*(below(descriptor) for descriptor in DESCRIPTORS))
    defined = pb.DESCRIPTOR.message_types_by_name
    assert set(defined) - looked_at == FRAMING.keys() | GONE
    assert {name: {field.name for field in defined[name].fields} for name in FRAMING} == FRAMING
    assert not any(defined[name].fields for name in GONE)


@pytest.mark.parametrize(
    "message_name",
    [
        "Hello",
        "Heartbeat",
        "TensorEntry",
        "Response",
        "Metric",
        "PublicStep",
        "Donor",
        "PackageEntry",
        "QuestionRewards",
        "QuestionExemplars",
    ],
)
def test_a_field_added_to_the_protocol_is_noticed(message_name: str) -> None:
    assert _unclassified(_with_field_remark(message_name)) == {f"{message_name}.remark"}


def test_no_class_without_a_field() -> None:
    known = {(name, field.name) for message in MESSAGES.values() for name, field in _fields(message.DESCRIPTOR)}
    assert {(name, field) for name, fields in CATALOGUE.items() for field in fields} == known


def test_only_answers_to_public_prompts_are_free_text() -> None:
    text = {(name, field) for name, fields in CATALOGUE.items() for field, kind in fields.items() if kind == "text"}
    assert text == {("Response", "text")}


def test_a_field_without_a_class_is_noticed_and_denied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(kinds.CATALOGUE["Progress"], "step")
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
        (pb.KnowledgePackage(peer="hospital_b"), pb.KnowledgePackage(peer="Mr Smith")),
        (pb.MatchDirective(part="give"), pb.MatchDirective(part="gossip")),
        (pb.ProfileVector(dynamic=[0.5]), pb.ProfileVector(dynamic=[float("inf")])),
        (pb.CompetenceScore(exemplar_set_sha256="ab" * 32), pb.CompetenceScore(exemplar_set_sha256="patient 17")),
        (pb.Refusal(expected="fp32"), pb.Refusal(expected="\x1b[31m")),
    ],
)
def test_T08_a_value_must_fit_its_class(good: pb.Hello, bad: pb.Hello) -> None:
    assert fields_at_fault(good) == {}
    assert sum(fields_at_fault(bad).values()) == 1
