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
from tests.simulated.policy_site import PolicySite, text_of

PYTHON_WORDS = ("Error:", "Errno", "codec", "recursion", "int_max_str_digits", "Traceback")
LARGE_BYTES, DISK_BYTES = 1 << 19, 1 << 18  # of one file, and what the tried disk takes of it


def fedsilo(*arguments: object) -> tuple[int, dict[str, Any]]:
    answer = CliRunner().invoke(cli_fedsilo.app, [*map(str, arguments), "--json"])
    return answer.exit_code, json.loads(answer.stdout)


def refused(path: Path, *arguments: object) -> str:
    code, told = fedsilo(*arguments)
    message = told["error"]["message"]
    assert code == 2 and str(path) in message and not any(word in message for word in PYTHON_WORDS), message
    return str(message)


def made(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


# ---- reading ---------------------------------------------------------------------------------------


def test_a_run_file_that_is_no_text_is_wrong_usage(tmp_path: Path) -> None:
    def submit(path: Path) -> tuple[object, ...]:
        return "run", "submit", path, "--as", tmp_path / "carol.crt", "--socket", tmp_path / "nobody.sock"

    binary = made(tmp_path / "run.bin", b"method: \xff\x00\n" * 9)
    assert f"{binary}:1: not UTF-8" in refused(binary, *submit(binary))
    wide = made(tmp_path / "wide.yaml", "method: pubswap\n".encode("utf-16"))
    refused(wide, *submit(wide))
    assert "a folder" in refused(tmp_path, *submit(tmp_path))
    good = made(tmp_path / "run.yaml", b"method: pubswap\n")
    assert fedsilo(*submit(good))[0] == 3  # read; the coordinator is not there
    assert fedsilo(*submit(tmp_path / "none.yaml"))[0] == 8


def test_a_pipe_that_nobody_writes_into_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="pipe: it is a pipe"):
        read_regular(tmp_path / "pipe")
    assert "a pipe" in refused(tmp_path / "pipe", "certs", "show", tmp_path / "pipe")
    assert "a pipe" in refused(tmp_path / "pipe", "config", "show", tmp_path / "pipe")
    assert "a folder" in refused(tmp_path, "config", "validate", tmp_path)
    with pytest.raises(UsageError, match="a folder, not a file"):
        read_regular(tmp_path)
    with pytest.raises(NotFoundError):
        read_regular(tmp_path / "none")
    (tmp_path / "link").symlink_to(made(tmp_path / "file", b"12345"))
    assert read_regular(tmp_path / "link", bytes_max=5) == b"12345"
    with pytest.raises(UsageError, match="larger than 4 bytes"):
        read_regular(tmp_path / "file", bytes_max=4)


def test_a_file_of_another_type_is_no_missing_right(tmp_path: Path) -> None:
    place = PolicySite(tmp_path / "site")
    certificate = made(tmp_path / "ca.crt", place.authority.certificate_pem)
    assert fedsilo("certs", "show", certificate)[0] == 0
    text = made(tmp_path / "notes.txt", b"no certificate\n")
    refused(text, "certs", "show", text)
    refused(text, "run", "verify", text, "--key", text)
    key = made(tmp_path / "coordinator.pub", public_key_pem(Ed25519PrivateKey.generate().public_key()))
    assert fedsilo("run", "verify", text, "--key", key)[0] == 7  # the key is one; the record is none


def test_a_number_of_ten_thousand_digits_is_refused_with_its_line(tmp_path: Path) -> None:
    digits = "9" * 10_000
    for number in (digits, f"-{digits}", f"{digits}.0", f"1e{digits}", f"0x{digits}"):
        with pytest.raises(UsageError, match=r"run\.yaml:2: a number of \d+ characters"):
            strict_yaml.load(f"method: pubswap\nrounds: {number}\n".encode(), "run.yaml")
    assert strict_yaml.load(f"name: '{digits}'\nrounds: {'9' * 100}\n".encode(), "x").value["name"] == digits
    for name in ("silo.yaml", "coordinator.yaml", "policy.yaml"):
        path = made(tmp_path / name, f"silo: a\nrounds: {digits}\n".encode())
        refused(path, "config", "validate", path)


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


def test_a_sound_bundle_is_read(tmp_path: Path) -> None:
    bundle = {"federation": "a", "coordinator_spiffe_id": "b", "coordinator_signing_key_hex": "00", "peers": [1]}
    assert read_bundle(made(tmp_path / "federation.json", json.dumps(bundle).encode())) == bundle


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


@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_what_would_be_waited_for_is_refused_before_it_is_opened(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "named"
    path.mkdir() if kind == "folder" else os.mkfifo(path)
    for program, words in ((cli_fedsilo.app, ("grade", "--verifier", "exact", path)),
                           (cli_serve.program, ("--once", "--replay", path))):  # fmt: skip
        answer = CliRunner().invoke(program, [str(word) for word in words])
        assert answer.exit_code == 2, answer.output
        assert f"cannot read {path}: it is a {kind}" in answer.stderr and "\nhint: " in answer.stderr
        path.rmdir() if kind == "folder" else path.unlink()
        assert CliRunner().invoke(program, [str(word) for word in words]).exit_code == 8
        path.mkdir() if kind == "folder" else os.mkfifo(path)
    rows = made(tmp_path / "rows.jsonl", b'{"response": "4", "answer": "4"}\n')
    answer = CliRunner().invoke(cli_fedsilo.app, ["grade", "--verifier", "exact", str(rows)])
    assert answer.exit_code == 0 and json.loads(answer.stdout)["correct"] is True


def test_a_refusal_that_has_no_hint_of_its_own_names_the_help(tmp_path: Path) -> None:
    code, told = fedsilo("config", "show", tmp_path / "none.yaml")
    assert (code, told["error"]["hint"]) == (8, "what it takes: fedsilo config show --help")
    code, told = fedsilo("config", "show", tmp_path)
    assert (code, told["error"]["hint"]) == (2, "what it takes: fedsilo config show --help")
    code, told = fedsilo("policy", "show", tmp_path)  # which has one
    assert (code, told["error"]["hint"]) == (2, "name a file in it, such as policy.yaml")


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
