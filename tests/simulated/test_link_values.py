"""The guard's end of the trainer link against bytes that a trainer in other hands may send."""

from __future__ import annotations

import json
import math
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from silo.guard.trainer_environment import trainer_environment
from silo.link import TRAINER_SAYS, Link, LinkBroken, LinkMessage
from silo.trainer import fences


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, Link]]:
    """(what the trainer writes into, the guard's end)"""
    trainer, guard = socket.socketpair()
    link = Link(guard, TRAINER_SAYS, body_bytes_max=1000)
    yield trainer, link
    trainer.close()
    link.close()


def frame(header: bytes, body_bytes: int = 0) -> bytes:
    return struct.pack(">IQ", len(header), body_bytes) + header


def sent(trainer: socket.socket, data: bytes) -> None:
    """From another thread: a socket's buffer is small."""
    threading.Thread(target=trainer.sendall, args=(data,), daemon=True).start()


@pytest.mark.parametrize(
    "header",
    [
        b'{"type":"step","x":' + b"[" * 200_000 + b"]" * 200_000 + b"}",
        b'{"type":"step","x":' + b"[" * 40 + b"]" * 40 + b"}",
        b'{"type":"step","x":"\\ud800"}',
        b'{"type":"step","x":' + b"9" * 5000 + b"}",
        b'{"type":["step"]}',
        b'"step"',
        b"[]",
        b"\xff",
        b"{",
        b'{"type":"stop"}',
    ],
    ids=["deep", "too-deep", "half-character", "long-number", "type", "text", "list", "bytes", "torn", "guard-says"],
)
def test_a_header_that_is_no_message_breaks_the_link_and_nothing_else(
    ends: tuple[socket.socket, Link], header: bytes
) -> None:
    trainer, link = ends
    sent(trainer, frame(header))
    with pytest.raises(LinkBroken):
        link.receive()


def test_numbers_that_json_lacks_come_as_none(ends: tuple[socket.socket, Link]) -> None:
    trainer, link = ends
    fields = {"type": "done", "metrics": {"kl": math.nan, "loss": math.inf, "reward": 0.5, "tokens": 3}}
    sent(trainer, frame(json.dumps(fields).replace("0.5", "5e-1").encode()[:-1] + b',"x":1e999}'))
    message = link.receive()
    assert message.fields == {"metrics": {"kl": None, "loss": None, "reward": 0.5, "tokens": 3}, "x": None}


def test_T23_a_body_over_the_guards_bound_is_not_read(ends: tuple[socket.socket, Link]) -> None:
    trainer, link = ends
    Link(trainer, TRAINER_SAYS).send(LinkMessage("done", {}, b"x" * 1000))
    assert link.receive().body == b"x" * 1000
    sent(trainer, frame(b'{"type":"done"}', 1001))
    with pytest.raises(LinkBroken, match="1001 bytes"):
        link.receive()


def test_T10_both_sides_of_the_link_switch_off_the_same_things() -> None:
    given = trainer_environment({}, threads=1, scratch=Path("/scratch"))
    fences.verify_offline(given)
    assert {"VLLM_NO_USAGE_STATS", "WANDB_MODE", "DISABLE_TELEMETRY"} <= fences.OFFLINE.keys() <= given.keys()
