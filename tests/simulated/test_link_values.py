"""The guard's end of the trainer link against bytes that a trainer in other hands may send."""

from __future__ import annotations

import itertools
import json
import math
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from silo.guard.trainer_process.sandbox import trainer_environment
from silo.link import GUARD_SAYS, LARGE_BODY_BYTES, TRAINER_SAYS, Link, LinkBroken, LinkMessage
from silo.trainer import worker


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
    worker.verify_offline(given)
    assert {"VLLM_NO_USAGE_STATS", "WANDB_MODE", "DISABLE_TELEMETRY"} <= worker.OFFLINE.keys() <= given.keys()


class Counting:
    """A guard's socket that counts what it is given to send."""

    def __init__(self, inner: socket.socket) -> None:
        self.inner = inner
        self.bytes = 0

    def sendall(self, data: bytes | memoryview) -> None:
        self.bytes += len(data)
        self.inner.sendall(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@pytest.fixture
def pair() -> Iterator[tuple[Counting, Link, Link]]:
    """(the guard's socket, the guard's end, the trainer's end)"""
    guard, trainer = socket.socketpair()
    counting = Counting(guard)
    near, far = Link(counting, TRAINER_SAYS), Link(trainer, GUARD_SAYS)
    yield counting, near, far
    near.close()
    far.close()


def given(near: Link, far: Link, name: str, body: bytes, task: str = "LoadAdapter") -> bytes:
    """What the trainer has as a task's body."""
    thread = threading.Thread(target=near.send, args=(LinkMessage("task", {"task": task}, body, name),), daemon=True)
    thread.start()
    message = far.receive()
    thread.join()
    assert message.fields == {"task": task}
    return bytes(message.body)


def test_a_named_body_crosses_once_and_is_there_again_until_another_comes(pair: tuple[Counting, Link, Link]) -> None:
    counting, near, far = pair
    one, two = b"1" * LARGE_BODY_BYTES, b"2" * LARGE_BODY_BYTES
    assert given(near, far, "one", one, "Evaluate") == one
    before = counting.bytes
    assert given(near, far, "", b"donors") == b"donors"  # in between, and no reason to forget
    assert given(near, far, "one", one) == one
    assert counting.bytes - before < 1000
    assert [given(near, far, name, body) for name, body in (("two", two), ("one", one))] == [two, one]
    assert counting.bytes - before > 2 * LARGE_BODY_BYTES
    # a small one, and one without a name, cross each time
    for name, body in (("three", b"3" * 100), ("", two)):
        before = counting.bytes
        assert [given(near, far, name, body) for _ in range(2)] == [body, body]
        assert counting.bytes - before > 2 * len(body)


def test_a_large_body_that_is_held_stays_and_one_that_is_not_makes_room(pair: tuple[Counting, Link, Link]) -> None:
    """Memory is used again for the next body only where nobody looks at the last one."""
    _, near, far = pair
    held: list[memoryview] = []
    places: list[int] = []
    for number in range(6):
        body = bytes([number]) * (LARGE_BODY_BYTES + 7)
        thread = threading.Thread(
            target=near.send, args=(LinkMessage("task", {"task": "Evaluate"}, body),), daemon=True
        )
        thread.start()
        came = far.receive().body
        thread.join()
        assert isinstance(came, memoryview) and came.readonly and came == body
        places.append(int(np.frombuffer(came, np.uint8).__array_interface__["data"][0]))
        if number % 2:
            held.append(came[3:])
        del came
    assert [set(bytes(each)) for each in held] == [{1}, {3}, {5}]
    assert [one == two for one, two in itertools.pairwise(places)] == [True, False, True, False, True]


def test_a_trainer_that_comes_anew_is_given_the_body_again(pair: tuple[Counting, Link, Link]) -> None:
    _, near, far = pair
    body = b"1" * LARGE_BODY_BYTES
    assert given(near, far, "one", body) == body
    guard, trainer = socket.socketpair()
    assert given(Link(guard, TRAINER_SAYS), Link(trainer, GUARD_SAYS), "one", body) == body


def test_a_body_that_is_left_out_and_not_here_breaks_the_trainers_end(ends: tuple[socket.socket, Link]) -> None:
    guard, trainer = socket.socketpair()
    guard.sendall(frame(b'{"type":"again","body_digest":"ab"}'))
    with pytest.raises(LinkBroken, match="leaves out a body"):
        Link(trainer, GUARD_SAYS).receive()
    # an end that keeps no bodies does not take it for a task without one
    guard.sendall(frame(b'{"type":"again","body_digest":"ab"}'))
    with pytest.raises(LinkBroken, match="does not belong"):
        Link(trainer, GUARD_SAYS - {"again"}).receive()
    # a trainer has the guard keep nothing: to it the name is a field like any other
    sent(ends[0], frame(b'{"type":"done","body_digest":"ab"}'))
    assert ends[1].receive() == LinkMessage("done", {"body_digest": "ab"})
