"""Six rings around the one way out, and for each a breach that it alone notices (B1, B4, T10).

    import contracts    a module takes the channel that only the gate may hold
    banned names        a module reads a format that runs code on load
    types               a held message is handed to `transmit`, which takes allowed ones
    field catalogue     a protobuf field that nobody classed leaves inside an allowed message
    audit hook          the trainer starts a program under a name put together at run time
    network namespace   the trainer connects through the C library, past Python

All six stand in one copy of the product. The three static rings look at the whole copy; each must report its own
breach and none of the others. The last three are run. What six rings do not stop: values that the policy allows (N1).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from silo.guard.trainer_process import probing
from tests.house.tree import Tree, copy_product
from tests.security.sandbox_harness import reachable_site, run_inside

CONTRACT = "import silo.guard.channel"
BANNED = "import pickle\nLOADS = pickle.loads"
TYPES = """
from silo.guard.gate import Gate
from silo.guard.messages import Held


def send_without_asking(gate: Gate, held: Held) -> None:
    gate.transmit(held)
"""
FORK = "import os\n\n\ndef start() -> int:\n    return int(getattr(os, 'fo' + 'rk')())\n"
CONNECT = """
import ctypes
import struct


def dial(host: str, port: int) -> int:
    library = ctypes.CDLL(None, use_errno=True)
    number = library.socket(2, 1, 0)
    address = struct.pack('=HH4s8x', 2, struct.unpack('=H', struct.pack('!H', port))[0],
                          bytes(int(part) for part in host.split('.')))
    return int(library.connect(number, address, len(address)))
"""
FIELD = "string note = 63;"

STATIC = {
    "import contracts": ("silo.guard.answers.state", CONTRACT),
    "banned names": ("silo.guard.planted_format", BANNED),
    "types": ("silo.guard.planted_call", TYPES),
}
DYNAMIC = {
    "audit hook": ("silo.trainer.planted_start", FORK),
    "network namespace": ("silo.trainer.planted_dial", CONNECT),
}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    """The product with all six breaches in it."""
    root = tmp_path_factory.mktemp("rings")
    copy_product(root)
    planted = Tree(root)
    for module, code in (*STATIC.values(), *DYNAMIC.values()):
        planted.plant(module, code)
    wire = root / "fedsilo" / "protocol"
    proto = wire / "federation.proto"
    text = proto.read_text()
    assert text.count("message Hello {") == 1
    proto.write_text(text.replace("message Hello {", f"message Hello {{ {FIELD}"))
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", "-I.", "--python_out=_generated", "--pyi_out=_generated",
         "federation.proto"],
        cwd=wire, check=True,
    )  # fmt: skip
    return planted


def places() -> dict[str, str]:
    """ring -> file of its breach, for reports that name files."""
    return {ring: module.replace(".", "/") + ".py" for ring, (module, _) in (STATIC | DYNAMIC).items()} | {
        "field catalogue": "fedsilo/protocol/_generated/federation_pb2.py"
    }


def rings_named_in(report: str) -> set[str]:
    return {ring for ring, place in places().items() if place in report or place[:-3].replace("/", ".") in report}


def test_only_the_import_contracts_see_a_second_holder_of_the_channel(tree: Tree) -> None:
    report = "\n".join(tree.broken_contracts().values())
    assert "silo.guard.answers.state -> silo.guard.channel" in report
    assert rings_named_in(report) == {"import contracts"}


def test_only_the_banned_names_see_a_format_that_runs_code(tree: Tree) -> None:
    findings = [each for each in tree.lint_findings() if each["code"] == "TID251" or each["code"].startswith("S")]
    assert {each["code"] for each in findings} == {"TID251"}
    assert rings_named_in(json.dumps(findings)) == {"banned names"}


@pytest.mark.slow
def test_only_the_types_see_a_message_that_nobody_allowed(tree: Tree) -> None:
    files = [place for ring, place in places().items() if ring != "field catalogue"]
    done = tree.run("mypy", "--no-error-summary", "--hide-error-context", *files)
    errors = [line for line in done.stdout.splitlines() if ": error:" in line]
    assert len(errors) == 1, done.stdout
    assert 'Argument 1 to "transmit" of "Gate" has incompatible type "Held"; expected "Allowed"' in errors[0]
    assert rings_named_in(errors[0]) == {"types"}


CATALOGUE_PROGRAM = """
import json
from fedsilo.protocol._generated import federation_pb2 as pb
from policies import kinds
hello = pb.Hello(role="member", note="a private prompt")
before = kinds.fields_at_fault(hello)
kinds.CATALOGUE["Hello"]["note"] = kinds.FieldClass.TEXT
print(json.dumps([before, kinds.fields_at_fault(hello)]))
"""


@pytest.mark.slow
def test_only_the_field_catalogue_sees_a_field_that_nobody_classed(tree: Tree) -> None:
    (line,) = tree.loaded_after(CATALOGUE_PROGRAM)
    without, with_class = json.loads(line)
    assert without == {"Hello.note": 1}
    assert with_class == {}


def program_of(ring: str, call: str, *, hook: bool) -> str:
    """A child that carries out a breach and prints what came of it, or `PermissionError` when Python refused."""
    _, code = DYNAMIC[ring]
    return f"""
{"from silo.trainer.worker import Refusals; Refusals().install()" if hook else ""}
{code}
import os
try:
    result = {call}
except PermissionError:
    result = "PermissionError"
if {call == "start()"} and result == 0:
    os._exit(0)  # the second process
print(result)
"""


def outside(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.strip()


@pytest.fixture(scope="module")
def sandboxed() -> str:
    if reason := probing.sandbox_trial("namespaces"):
        pytest.skip(f"this machine cannot build namespaces: {reason}")
    return "namespaces"


def test_only_the_audit_hook_sees_a_program_started_by_another_name(sandboxed: str) -> None:
    hooked, bare = (program_of("audit hook", "start()", hook=hook) for hook in (True, False))
    assert outside(hooked) == "PermissionError"
    assert int(outside(bare)) > 0  # without it a second process exists
    assert int(run_inside(sandboxed, "-c", bare).strip()) > 0  # and so it does in a sandbox


def test_only_the_namespace_sees_a_connection_past_python(tmp_path: Path, sandboxed: str) -> None:
    with reachable_site(tmp_path / "r") as site:
        host, port = site.fields["tcp"][0]
        bare, hooked = (program_of("network namespace", f"dial({host!r}, {port})", hook=hook) for hook in (False, True))
        assert outside(bare) == "0"
        assert outside(hooked) == "0"  # the hook hears of sockets that Python makes
        assert run_inside(sandboxed, "-c", bare).strip() == "-1"
