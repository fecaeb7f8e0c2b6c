"""T23: bytes that cost little to send and much to read. Each is refused, and the process that refused it has not grown.

Memory is measured from outside the parsers: by how much the peak of a process of its own rises above what it held
when the input stood ready (VmHWM). What this does not bound: the sum of what several silos may send at once.
"""

from __future__ import annotations

import io
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from fedsilo.protocol import codec
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.errors import FedSiloError
from fedsilo.protocol.plan import plan_from_canonical
from fedsilo.protocol.strict_yaml import load
from policies.load import load_policy
from silo.link import TRAINER_SAYS, Link

MEGABYTE = 1 << 20
ROOT = Path(__file__).parents[2]
MILLION = 1_000_000
DEPTH = 200
_PROGRAM = """
import json, sys
from pathlib import Path
from tests.security.test_T23_bombs import FEEDS, refusal

def memory(name):
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024

make = FEEDS[sys.argv[1]]
refusal(make(2))  # whatever is set up once
feed = make(int(sys.argv[2]))
Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
before = memory("VmRSS:")
said = refusal(feed)
print(json.dumps([said, memory("VmHWM:") - before]))
"""


def refusal(feed: Callable[[], object]) -> str:
    try:
        feed()
    except FedSiloError as error:
        return error.code
    return "taken"


# ---- what is fed -------------------------------------------------------------------------------------


def _many(opening: str, item: str, between: str, closing: str, count: int) -> str:
    """A text of many different items, built without holding them one by one."""
    text = io.StringIO()
    text.write(opening)
    for number in range(count):
        text.write(between * bool(number) + item.format(number))
    text.write(closing)
    return text.getvalue()


def _keys_in_plan(count: int) -> Callable[[], object]:
    text = _many("{", '"k{:07d}":0', ",", "}", count)
    return lambda: plan_from_canonical(text)


def _keys_in_policy(count: int) -> Callable[[], object]:
    text = _many("", "k{:07d}: 0", "\n", "\n", count).encode()
    return lambda: load_policy(text, "policy.yaml")


def _names_of_tensors(count: int) -> Callable[[], object]:
    """Of empty tensors, so that the header is all there is."""
    one, _, other = codec.encode(pb.Factors(tensors=[pb.TensorEntry(name="NNNNNNN", shape=[0])])).partition(b"NNNNNNN")
    head = io.BytesIO()
    head.write(codec.encode(pb.Factors(dtype="float32")))
    for number in range(count):
        head.write(b"%b%07d%b" % (one, number, other))
    payload = head.tell().to_bytes(8, "little") + head.getvalue()
    return lambda: codec.decode_factors(payload)


def _rows_of_answers(count: int) -> Callable[[], object]:
    """Canonical, and within the 16 MiB of a small message: it parses, and the rules deny it afterwards."""
    row = codec.encode(pb.PublicResponses(prompts=[pb.PromptResponses(prompt_index=1, samples=1)]))
    payload = row * count
    return lambda: codec.decode(pb.PublicResponses, payload)


def _keys_on_the_link(count: int) -> Callable[[], object]:
    header = _many('{"type": "step", ', '"k{:07d}": 0', ", ", "}", count).encode()
    frame = len(header).to_bytes(4, "big") + (0).to_bytes(8, "big") + header
    ours, theirs = socket.socketpair()

    def send() -> None:
        with suppress(OSError), theirs:  # the guard hangs up on it
            theirs.sendall(frame)

    def feed() -> None:
        sender = threading.Thread(target=send)
        sender.start()
        with ours:
            try:
                Link(ours, TRAINER_SAYS).receive()
            finally:
                ours.close()
                sender.join()

    return feed


FEEDS: dict[str, Callable[[int], Callable[[], object]]] = {
    "keys in a plan": _keys_in_plan,
    "keys in a policy": _keys_in_policy,
    "names of tensors": _names_of_tensors,
    "rows of answers": _rows_of_answers,
    "keys on the link": _keys_on_the_link,
}
# What comes of it, and by how many MB a process may grow: a parsed row of answers is some 100 bytes, and is encoded
# once more to be compared; of all others only the beginning is read.
EXPECTED = {
    "keys in a plan": ("TOO_LARGE", 8),
    "keys in a policy": ("INVALID_INPUT", 32),
    "names of tensors": ("MALFORMED", 8),
    "rows of answers": ("taken", 256),
    "keys on the link": ("LINK_BROKEN", 8),
}


@pytest.mark.quick(keep=2)
@pytest.mark.parametrize("name", FEEDS)
def test_T23_a_million_keys(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, name, str(MILLION)],
        capture_output=True, text=True, cwd=ROOT, timeout=120, check=True,
    )  # fmt: skip
    said, growth_bytes = json.loads(done.stdout)
    expected, growth_megabytes_max = EXPECTED[name]
    assert said == expected
    assert growth_bytes < growth_megabytes_max * MEGABYTE, growth_bytes / MEGABYTE


@pytest.mark.parametrize("name", ["keys in a plan", "names of tensors", "rows of answers", "keys on the link"])
def test_T23_a_few_are_not_refused_for_their_number(name: str) -> None:
    """The counterpart. A plan of two strange keys is refused for the keys."""
    assert refusal(FEEDS[name](2)) == ("MALFORMED" if name == "keys in a plan" else "taken")


# ---- depth -------------------------------------------------------------------------------------------


def _deep_link() -> None:
    header = b'{"type": "step", "x": ' + b"[" * DEPTH + b"]" * DEPTH + b"}"
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(len(header).to_bytes(4, "big") + (0).to_bytes(8, "big") + header)
        Link(ours, TRAINER_SAYS).receive()


NESTED = {
    # a group that nobody ends: field 15, wire type 3, again and again
    "protobuf": lambda: codec.decode(pb.RoundOpen, bytes([15 << 3 | 3]) * DEPTH),
    "protobuf, ended": lambda: codec.decode(pb.RoundOpen, bytes([15 << 3 | 3]) * DEPTH + bytes([15 << 3 | 4]) * DEPTH),
    "plan": lambda: plan_from_canonical("[" * DEPTH + "]" * DEPTH),
    "policy": lambda: load_policy(b"a: " + b"[" * DEPTH + b"]" * DEPTH, "policy.yaml"),
    "yaml": lambda: load(b"{a: " * DEPTH + b"1" + b"}" * DEPTH, "run.yaml"),
    "link": _deep_link,
}


@pytest.mark.parametrize("name", NESTED)
def test_T23_two_hundred_levels_are_refused_in_words_of_ours(name: str) -> None:
    assert refusal(NESTED[name]) in {"MALFORMED", "INVALID_INPUT", "LINK_BROKEN"}


@pytest.mark.parametrize(("levels", "code"), [(8, "taken"), (DEPTH, "LINK_BROKEN")])
def test_T23_a_few_levels_pass(levels: int, code: str) -> None:
    header = b'{"type": "step", "x": ' + b"[" * levels + b"]" * levels + b"}"
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(len(header).to_bytes(4, "big") + (0).to_bytes(8, "big") + header)
        assert refusal(Link(ours, TRAINER_SAYS).receive) == code
