"""An update whose bytes are already what the gate would rebuild leaves as it came, measured once; anything else is
rebuilt (threat model B4, T3, T4)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsilo.protocol import codec
from fedsilo.protocol.errors import PeerError
from policies.grids import BitPatterns
from policies.kinds import adapters
from policies.model import Policy
from silo.guard.gate import is_rebuilt
from silo.guard.messages import Allowed, Denied
from tests.policies import setting
from tests.world import Bench, small_factors

FLOAT32 = setting.policy_of(setting.policy_text())
BFLOAT16 = setting.edited('grid: "float32"', 'grid: "bfloat16"')
Tensors = dict[str, np.ndarray[Any, Any]]


def drawn(scale: float = 1e-3) -> Tensors:
    draws = np.random.default_rng(3)
    return {name: (scale * draws.standard_normal(shape)).astype(np.float32) for name, shape in setting.SCHEMA.tensors}


def body_of(tensors: Tensors, **changes: Any) -> bytes:
    """As a trainer writes it."""
    schema = setting.SCHEMA
    header: dict[str, Any] = {
        "base_digest": setting.BASE_DIGEST, "schema_sha256": schema.digest, "rank": schema.rank, "scale": schema.scale,
        "dtype": schema.dtype,
    }  # fmt: skip
    return codec.encode_factors(tensors, **header | changes)


def offered(folder: Path, policy: Policy, body: bytes, read_from: bytes | None) -> tuple[Any, dict[str, Any]]:
    """What became of it, and its record without what each record has of its own."""
    bench = Bench(folder, policy)
    try:
        factors = codec.decode_factors(body)
        made = bench.gate.offer(
            bench.gate.view.place("lora.factors", 1), factors.header, tensors=factors.tensors,
            read_from=factors.payload if read_from is None else read_from,
        )  # fmt: skip
        record = bench.events("egress.decision")[0]
    finally:
        bench.close()
    return made, {name: value for name, value in record.items() if name not in ("ledger", "mono", "salt", "time")}


def test_T03_canonical_bytes_leave_as_they_came_and_the_record_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = []
    add = BitPatterns.add
    monkeypatch.setattr(
        adapters.BitPatterns, "add", lambda self, values, **known: passes.append(add(self, values, **known))
    )
    body = body_of(drawn())
    once, record = offered(tmp_path / "once", FLOAT32, body, None)
    measured_once = len(passes)
    again, rebuilt = offered(tmp_path / "again", FLOAT32, body, b"")
    assert isinstance(once, Allowed) and isinstance(again, Allowed)
    assert once.payload is body and again.payload is not body
    assert (bytes(again.payload), again.digest) == (body, once.digest)
    assert record == rebuilt
    assert len(passes) - measured_once == 2 * measured_once > 0


def minus_zero(tensors: Tensors) -> Tensors:
    next(iter(tensors.values())).flat[0] = -0.0
    return tensors


def denormal(tensors: Tensors) -> Tensors:
    list(tensors.values())[-1].flat[-1] = np.float32(1e-40)
    return tensors


def raw(tensors: Tensors, **changes: Any) -> bytes:
    """The same with values as they are: `encode_factors` would make them canonical."""
    placeholder = codec.decode_factors(body_of(small_factors(), **changes))
    return codec.factors_start(placeholder.header) + b"".join(tensors[name].tobytes() for name in sorted(tensors))


@pytest.mark.parametrize(
    ("policy", "body"),
    [
        (FLOAT32, raw(minus_zero(drawn()))),
        (FLOAT32, raw(denormal(drawn()))),
        (FLOAT32, body_of(drawn(10.0))),  # clipped
        (BFLOAT16, body_of(drawn())),  # rounded
        (FLOAT32, body_of(drawn(), schema_sha256="")),  # of the header only what the rules judge is taken over
        (FLOAT32, body_of(drawn(), scale=setting.SCHEMA.scale * 2)),
    ],
    ids=["T04-minus-zero", "T04-denormal", "clipped", "rounded", "schema", "scale"],
)
def test_T03_T04_anything_else_is_rebuilt(tmp_path: Path, policy: Policy, body: bytes) -> None:
    made, record = offered(tmp_path / "offered", policy, body, None)
    again, rebuilt = offered(tmp_path / "again", policy, body, b"")
    assert isinstance(made, Allowed) and isinstance(again, Allowed)
    assert record == rebuilt
    assert made.payload is not body and bytes(made.payload) == bytes(again.payload) != body


@pytest.mark.parametrize("change", [lambda body: body + b"\0", lambda body: body[:-1]], ids=["longer", "shorter"])
def test_T03_what_is_no_payload_is_not_sent(tmp_path: Path, change: Callable[[bytes], bytes]) -> None:
    body = body_of(drawn())
    with pytest.raises(PeerError, match="its header says"):
        offered(tmp_path / "offered", FLOAT32, body, change(body))


def test_T04_what_is_judged_is_what_the_bytes_hold_and_nothing_that_is_said_of_them(tmp_path: Path) -> None:
    """Other values than were named beside the bytes are those that are judged."""
    tensors = drawn()
    tensors[min(tensors)].flat[1] = np.nan
    made, record = offered(tmp_path / "offered", FLOAT32, body_of(drawn()), raw(tensors))
    assert isinstance(made, Denied)
    assert any("FINITE" in reason for reason in record["reasons"])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_T04_what_is_not_finite_is_denied_as_before(tmp_path: Path, value: float) -> None:
    tensors = drawn()
    tensors[min(tensors)].flat[1] = value
    made, record = offered(tmp_path / "offered", FLOAT32, raw(tensors), None)
    again, rebuilt = offered(tmp_path / "again", FLOAT32, raw(tensors), b"")
    assert isinstance(made, Denied) and isinstance(again, Denied)
    assert record == rebuilt


@pytest.mark.parametrize("change", [lambda row: row | {"elements": row["elements"] - 1}, lambda row: {}])
def test_facts_that_do_not_cover_each_value_let_nothing_leave_as_it_came(
    change: Callable[[dict[str, Any]], dict[str, Any]],
) -> None:
    body = body_of(drawn())
    header = codec.decode_factors(body).header
    facts = {"values_not_canonical": 0, "elements": sum(array.size for array in drawn().values())}
    assert is_rebuilt(body, header, len(body), facts)
    assert not is_rebuilt(body, header, len(body), change(facts))
