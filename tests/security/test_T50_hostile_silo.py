"""T50: a silo whose guard is hostile too. Whatever a trainer can forge, signed by its silo and sent past any gate, is
refused again by the coordinator, with the same rules; nothing of it is kept, and the honest message still counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from coordinator import store as db
from fedsilo.protocol import codec
from fedsilo.protocol._generated import federation_pb2 as pb
from silo.link import LinkMessage
from tests.hostile.attacks import ATTACKS
from tests.hostile.trainer import FORGERIES
from tests.simulated.coordinator_parts import House, SimulatedSilo
from tests.simulated.test_coordinator_ingress import in_open_round
from tests.world import PROMPTS

FACTORS = [name for name, attack in ATTACKS.items() if name in FORGERIES and attack.kind == "lora.factors"]
# of one message, and of its bytes; `second_update` and `one_record` are about more, `low_bits` is the documented limit
SINGLE = [name for name in FACTORS if name not in ("second_update", "one_record", "low_bits")]
# what does not parse, what is larger than the schema, and what a rule denies
CODES = {
    "unknown_dtype": "MALFORMED", "duplicate_tensor": "TOO_LARGE", "unknown_field": "TOO_LARGE",
    "padded_payload": "TOO_LARGE", "extra_tensor": "TOO_LARGE", "empty_tensors": "TOO_LARGE",
    "header_of_its_own": "TOO_LARGE",
}  # fmt: skip


@pytest.fixture(scope="module")
def open_round(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[House, SimulatedSilo]]:
    house, (silo, *_) = in_open_round(tmp_path_factory.mktemp("T50"))
    yield house, silo
    house.close()


def forged(silo: SimulatedSilo, name: str) -> bytes:
    said = LinkMessage("done", {"task": "ExportDelta", "round": 1, "step": 0}, silo.delta_payload(1))
    (made,) = FORGERIES[name].forge(said, PROMPTS)
    assert made.body != said.body
    return made.body


def uploads(house: House, silo: str) -> list[str]:
    def read(session: Any) -> list[str]:
        rows = session.scalars(select(db.Upload).where(db.Upload.kind == "lora.factors", db.Upload.silo == silo))
        return [row.digest for row in rows]

    found: list[str] = house.rows(read)
    return found


@pytest.mark.parametrize("name", SINGLE)
def test_T50_what_a_trainer_forges_is_refused_at_the_coordinator_too(
    open_round: tuple[House, SimulatedSilo], name: str
) -> None:
    house, silo = open_round
    reply = silo.say("lora.factors", forged(silo, name), run="run-1", number=1)
    assert isinstance(reply, pb.Refusal) and reply.code == CODES.get(name, "INGRESS_DENIED"), (name, reply.code)
    assert not reply.field and not reply.expected and not reply.got  # the reason stays here (B6)
    assert uploads(house, silo.name) == []
    last = list(house.audit.records())[-1]
    assert (last["event"], last["decision"]) == ("ingress.decision", "deny")
    if reply.code == "INGRESS_DENIED":
        assert last["reasons"]


def test_T50_values_within_every_limit_are_taken_whatever_they_spell(tmp_path: Path) -> None:
    """The documented limit (N1), and the counterpart of all the others: the same update, honestly made."""
    house, (first, second, *_) = in_open_round(tmp_path)
    assert isinstance(first.say("lora.factors", forged(first, "low_bits"), run="run-1", number=1), pb.Ack)
    honest = second.delta_payload(1)
    assert isinstance(second.say("lora.factors", honest, run="run-1", number=1), pb.Ack)
    assert uploads(house, second.name) == [codec.sha256_hex(honest)]


def test_T50_an_honest_update_after_all_of_it_counts(open_round: tuple[House, SimulatedSilo]) -> None:
    house, silo = open_round
    honest = silo.delta_payload(1)
    assert isinstance(silo.say("lora.factors", honest, run="run-1", number=1), pb.Ack)
    assert uploads(house, silo.name) == [codec.sha256_hex(honest)]
    # and a second one of that round does not
    (_, other) = FORGERIES["second_update"].forge(LinkMessage("done", {}, honest), PROMPTS)
    assert other.body == honest
    changed = forged(silo, "low_bits")
    assert isinstance(silo.say("lora.factors", changed, run="run-1", number=1), pb.Refusal)
    assert uploads(house, silo.name) == [codec.sha256_hex(honest)]
