"""Files that a person names wrongly: each is wrong usage (exit 2) that names the file, in one sentence of our own."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from typer.testing import CliRunner

from certs.encoding import public_key_pem
from fedsilo.cli import console as cli_serve
from fedsilo.cli import fedsilo as cli_fedsilo
from fedsilo.files.durable import read_regular, removed_on_failure
from fedsilo.files.site_policy import read_bundle
from fedsilo.protocol import strict_yaml
from fedsilo.protocol.errors import ConflictError, NotFoundError, OperationError, UsageError
from tests.console.commands import run
from tests.simulated.policy_site import PolicySite, text_of

PYTHON_WORDS = ("Error:", "Errno", "codec", "recursion", "int_max_str_digits", "Traceback")
LARGE_BYTES, DISK_BYTES = 1 << 19, 1 << 18  # of one file, and what the tried disk takes of it


def fedsilo(*words: object) -> tuple[int, dict[str, Any]]:
    return run(cli_fedsilo.app, *words)


def made(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


# ---- reading ---------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """Files and what is none, by what they are."""
    place = PolicySite(tmp_path / "site")
    key = public_key_pem(Ed25519PrivateKey.generate().public_key())
    contents = {
        "binary": b"method: \xff\x00\n" * 9,
        "wide": "method: pubswap\n".encode("utf-16"),
        "run": b"method: pubswap\n",
        "certificate": place.authority.certificate_pem,
        "text": b"no certificate\n",
        "key": key,
        "rows": b'{"response": "4", "answer": "4"}\n',
        "long": f"silo: a\nrounds: {'9' * 10_000}\n".encode(),
    }
    found = {name: made(tmp_path / f"{name}.yaml", content) for name, content in contents.items()}
    os.mkfifo(tmp_path / "pipe")
    return {**found, "pipe": tmp_path / "pipe", "folder": tmp_path, "none": tmp_path / "none.yaml"}


def test_a_pipe_that_nobody_writes_into_is_not_waited_for(files: dict[str, Path], tmp_path: Path) -> None:
    for name, refusal in (("pipe", UsageError), ("folder", UsageError), ("none", NotFoundError)):
        with pytest.raises(refusal):
            read_regular(files[name])
    (tmp_path / "link").symlink_to(made(tmp_path / "file", b"12345"))
    assert read_regular(tmp_path / "link", bytes_max=5) == b"12345"
    with pytest.raises(UsageError, match="larger than 4 bytes"):
        read_regular(tmp_path / "file", bytes_max=4)


def test_a_number_of_ten_thousand_digits_is_refused_with_its_line() -> None:
    digits = "9" * 10_000
    for number in (digits, f"-{digits}", f"{digits}.0", f"1e{digits}", f"0x{digits}"):
        with pytest.raises(UsageError, match=r"run\.yaml:2: a number of \d+ characters"):
            strict_yaml.load(f"method: pubswap\nrounds: {number}\n".encode(), "run.yaml")
    assert strict_yaml.load(f"name: '{digits}'\nrounds: {'9' * 100}\n".encode(), "x").value["name"] == digits


DEEP = "[" * 5_000 + "]" * 5_000


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (f'{{"federation": {DEEP}}}', "nested too deep"),
        (f'{{"federation": {"9" * 10_000}}}', "too long a number"),
        ('{"federation": \n oops}', ":2: not a federation bundle, it is not JSON"),
        ("[1]", "no block of keys"),
        ('{"federation": 7}', "'federation' is no text"),
        ("{}", "'federation' is missing"),
        (
            '{"federation": "a", "coordinator_spiffe_id": "b", "coordinator_signing_key_hex": "zz", "peers": [1]}',
            "not hexadecimal",
        ),
    ],
)
def test_a_broken_bundle_is_one_sentence(tmp_path: Path, content: str, why: str) -> None:
    path = made(tmp_path / "federation.json", content.encode())
    with pytest.raises(UsageError) as found:
        read_bundle(path)
    assert why in found.value.message and str(path) in found.value.message
    assert not any(word in found.value.message for word in PYTHON_WORDS)
    bundle = {"federation": "a", "coordinator_spiffe_id": "b", "coordinator_signing_key_hex": "00", "peers": [1]}
    assert read_bundle(made(path, json.dumps(bundle).encode())) == bundle


# ---- writing ---------------------------------------------------------------------------------------


@contextmanager
def full_after(size_bytes: int) -> Iterator[None]:
    """No file may grow beyond that, as on a full disk: the kernel refuses the write."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def copied(source: Path, out: Path) -> None:
    import shutil

    with removed_on_failure(out):
        shutil.copytree(source, out, dirs_exist_ok=True)


def test_what_a_full_disk_cut_short_is_taken_away(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    made(tmp_path / "run" / "a.json", b"{}")
    made(tmp_path / "run" / "z.safetensors", bytes(LARGE_BYTES))
    (tmp_path / "empty").mkdir()
    for out in (tmp_path / "fresh", tmp_path / "empty"):
        with full_after(DISK_BYTES), pytest.raises(OperationError) as found:
            copied(tmp_path / "run", out)
        assert str(out) in found.value.message and "[(" not in found.value.message
        assert not any(word in found.value.message for word in PYTHON_WORDS), found.value.message
    assert not (tmp_path / "fresh").exists() and list((tmp_path / "empty").iterdir()) == []
    copied(tmp_path / "run", tmp_path / "fresh")
    assert sorted(path.name for path in (tmp_path / "fresh").iterdir()) == ["a.json", "z.safetensors"]
    with pytest.raises(ConflictError), removed_on_failure(tmp_path / "fresh"):  # what was there is not touched
        raise ConflictError("exists")
    assert (tmp_path / "fresh" / "a.json").exists()


@pytest.mark.parametrize("command", ["report", "export"])
def test_an_audit_folder_that_could_not_be_written_whole_is_not_left(tmp_path: Path, command: str) -> None:
    place = PolicySite(tmp_path / "site")
    place.policy_is(text_of())
    place.start()
    log, out = place.folder / "state", tmp_path / "out"
    asked: Callable[[Path], list[object]] = lambda to: (  # noqa: E731
        ["audit", "report", log, "--out", to] if command == "report" else ["audit", "export", "--log", log, "--out", to]
    )
    with full_after(100):
        code, told = fedsilo(*asked(out))
    assert code == 1 and not out.exists(), told
    assert fedsilo(*asked(tmp_path / "good"))[0] == 0 and any((tmp_path / "good").iterdir())


# ---- pipes, folders, and the hint that each refusal has ------------------------------------------------


@pytest.mark.parametrize("words", [
    ("audit", "tail", "--log", "nowhere", "-n", "99999999999999999999"), ("watch", "--timeout", "1e400"),
    ("certs", "invite", "operator/alice", "--ca", "nowhere", "--hours", "1e300"),
    ("certs", "invite", "operator/alice", "--ca", "nowhere", "--hours", "nan"),
])  # fmt: skip
def test_a_number_beyond_any_use_is_wrong_usage(words: tuple[str, ...]) -> None:
    answer = CliRunner().invoke(cli_fedsilo.app, words)
    assert answer.exit_code == 2 and "Invalid value" in answer.stderr
    within = [{"99999999999999999999": "5", "1e400": "1", "1e300": "8", "nan": "8"}.get(word, word) for word in words]
    assert "Invalid value" not in CliRunner().invoke(cli_fedsilo.app, within).stderr


SUBMIT = ("run", "submit", "{}", "--as", "carol.crt", "--socket", "nobody.sock")

GRADE = ("grade", "--verifier", "exact", "{}")


@pytest.mark.quick(keep=8)
@pytest.mark.parametrize(
    ("words", "name", "status", "says"),
    [
        (SUBMIT, "binary", 2, ":1: not UTF-8"),
        (SUBMIT, "wide", 2, ""),
        (SUBMIT, "folder", 2, "a folder"),
        (SUBMIT, "run", 3, ""),  # read; the coordinator is not there
        (SUBMIT, "none", 8, ""),
        (("certs", "show", "{}"), "pipe", 2, "a pipe"),
        (("certs", "show", "{}"), "certificate", 0, ""),
        (("certs", "show", "{}"), "text", 2, ""),
        (("config", "show", "{}"), "pipe", 2, "a pipe"),
        (("config", "show", "{}"), "none", 8, "what it takes: fedsilo config show --help"),
        (("config", "show", "{}"), "folder", 2, "what it takes: fedsilo config show --help"),
        (("policy", "show", "{}"), "folder", 2, "name a file, such as policy.yaml"),
        (("config", "validate", "{}"), "folder", 2, "a folder"),
        (("config", "validate", "{}"), "long", 2, ""),
        (("run", "verify", "{}", "--key", "{}"), "text", 2, ""),
        (GRADE, "pipe", 2, "it is a pipe"),
        (GRADE, "folder", 2, "it is a folder"),
        (GRADE, "none", 8, ""),
        (GRADE, "rows", 0, ""),
    ],
)
def test_a_file_that_is_named_wrongly_is_wrong_usage(
    files: dict[str, Path], words: tuple[str, ...], name: str, status: int, says: str
) -> None:
    path = files[name]
    code, told = fedsilo(*(word.format(path) for word in words))
    assert code == status and says in json.dumps(told["error"])
    if status == 2:
        message = told["error"]["message"]
        assert str(path) in message and (told["error"]["hint"] or "validate" in words)
        assert not any(word in message for word in PYTHON_WORDS), message


def test_a_record_that_is_none_is_told_from_a_key_that_is_none(files: dict[str, Path]) -> None:
    assert fedsilo("run", "verify", files["text"], "--key", files["key"])[0] == 7
    for name in ("pipe", "folder"):
        answer = CliRunner().invoke(cli_serve.program, ["--once", "--replay", str(files[name])])
        assert answer.exit_code == 2 and f"it is a {name}" in answer.stderr
