"""T38: what is handed out as proved holds by RFC 6962 alone, and a log that was tampered with yields no proof."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from typer.testing import CliRunner

from fedsilo.audit import proofs as audit_proofs
from fedsilo.audit.record import link_of, record_line
from fedsilo.cli.audit import app
from tests.protocol.audit_parties import (
    COORDINATOR,
    KEYS,
    OTHER_KEY,
    SILO,
    append_send,
    copied,
    open_log,
    segment,
    two_witnessed_logs,
)

KEY = KEYS[SILO].public_key().public_bytes_raw().hex()


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return two_witnessed_logs(tmp_path_factory.mktemp("honest"))[0]


def invoke(*words: str | Path) -> Any:
    return CliRunner().invoke(app, list(map(str, words)))


def exported(log: Path, out: Path, *words: str) -> Path:
    made = invoke("export", "--log", log, "--out", out, *words)
    assert made.exit_code == 0, made.output
    return out


# ---- RFC 6962 and signed notes by hand: nothing of the project --------------------------------------------


def root_of(leaf: bytes, index: int, size: int, path: list[bytes]) -> bytes:
    """RFC 6962 2.1.1 read backwards: halve the tree at the largest power of two below its size, root side last."""
    if size == 1:
        assert index == 0 and not path
        return leaf
    half = 1 << (size - 1).bit_length() - 1
    *rest, sibling = path
    if index < half:
        return hashlib.sha256(b"\x01" + root_of(leaf, index, half, rest) + sibling).digest()
    return hashlib.sha256(b"\x01" + sibling + root_of(leaf, index - half, size - half, rest)).digest()


def signed_checkpoint(note: str, key: str) -> tuple[str, int, bytes]:
    """(origin, size, root) of a note that carries the signature of `key`, 64 hex digits."""
    body, _, tail = note.rpartition("\n\n")
    origin, size, root = body.split("\n")
    _, name, signature = tail.split("\n")[0].split(" ")
    Ed25519PublicKey.from_public_bytes(bytes.fromhex(key)).verify(
        base64.b64decode(signature)[4:], f"{body}\n".encode()
    )  # raises
    assert name == origin
    return origin, int(size), base64.b64decode(root)


def holds(line: bytes, seq: int, inclusion: list[str], note: str) -> bool:
    _, size, root = signed_checkpoint(note, KEY)
    leaf = hashlib.sha256(b"\x00" + line).digest()
    return root_of(leaf, seq, size, [bytes.fromhex(part) for part in inclusion]) == root


@pytest.mark.parametrize("last", [9, 4])
def test_T38_every_exported_proof_holds_by_the_rfc_alone(honest: Path, tmp_path: Path, last: int) -> None:
    out = exported(honest, tmp_path / "out", "--first", "2", "--last", str(last))
    bundle = json.loads((out / "proofs.json").read_bytes())
    lines = (out / "records.jsonl").read_bytes().splitlines()
    assert (bundle["log"], bundle["key"]) == (SILO, KEY)
    assert lines == segment(honest).read_bytes().splitlines()[2 : last + 1]
    assert [item["seq"] for item in bundle["proofs"]] == list(range(2, last + 1))
    for line, item in zip(lines, bundle["proofs"], strict=True):
        assert holds(line, item["seq"], item["inclusion"], bundle["note"])
        assert not holds(line + b" ", item["seq"], item["inclusion"], bundle["note"])


# ---- a tampered log proves nothing ------------------------------------------------------------------------


def changed(folder: Path, change: Callable[[list[bytes]], list[bytes]]) -> None:
    lines = segment(folder).read_bytes().splitlines(keepends=True)
    segment(folder).write_bytes(b"".join(change(lines)))


TAMPERED: dict[str, Callable[[Path], object]] = {
    "one byte": lambda folder: changed(
        folder, lambda lines: [*lines[:4], lines[4].replace(b'"round":1', b'"round":2'), *lines[5:]]
    ),
    "allow to deny": lambda folder: changed(
        folder, lambda lines: [lines[0], lines[1].replace(b'"allow"', b'"deny"'), *lines[2:]]
    ),
    "swapped": lambda folder: changed(folder, lambda lines: [*lines[:3], lines[4], lines[3], *lines[5:]]),
    "left out": lambda folder: changed(folder, lambda lines: [*lines[:5], *lines[6:]]),
    "junk appended": lambda folder: changed(folder, lambda lines: [*lines, b"hello\n"]),
    "end cut": lambda folder: changed(folder, lambda lines: lines[:-1]),
    "torn end": lambda folder: changed(folder, lambda lines: [*lines[:-1], lines[-1][:-9]]),
    "no key": lambda folder: (folder / "keys" / "log.vkey").unlink(),
    "no checkpoints": lambda folder: [path.unlink() for path in (folder / "checkpoints").iterdir()],
}


@pytest.mark.parametrize("what", TAMPERED)
def test_T38_a_tampered_log_is_not_exported_with_proofs(honest: Path, tmp_path: Path, what: str) -> None:
    """Also a range that the change is not in: a log is handed out as a whole that verifies, or not at all."""
    folder, out = copied(honest, tmp_path / "log"), tmp_path / "out"
    TAMPERED[what](folder)
    for words in ((), ("--first", "0", "--last", "0"), ("--json",)):
        refused = invoke("export", "--log", folder, "--out", out, *words)
        assert refused.exit_code == 7 and not out.exists()
        assert "does not verify: " in refused.output and "proved against" not in refused.output


def test_T38_an_export_leaves_out_what_was_appended_after_the_log_was_verified(
    honest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copied(honest, tmp_path / "log")
    verify = audit_proofs.verify_logs

    def verify_then_append(paths: list[Path]) -> list[dict[str, Any]]:
        results = verify(paths)
        with segment(paths[0]).open("ab") as stream:
            stream.write(b'{"seq":10}\n')
        return results

    monkeypatch.setattr(audit_proofs, "verify_logs", verify_then_append)
    for name, words in (("all", ()), ("range", ("--last", "99"))):
        (tmp_path / name).mkdir()
        out = exported(copied(folder, tmp_path / name / "log"), tmp_path / name / "out", *words)
        assert len((out / "records.jsonl").read_bytes().splitlines()) == 10


def test_T38_a_log_that_is_changed_after_it_was_verified_is_not_exported(
    honest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copied(honest, tmp_path / "log")
    verify = audit_proofs.verify_logs

    def verify_then_change(paths: list[Path]) -> list[dict[str, Any]]:
        results = verify(paths)
        TAMPERED["allow to deny"](folder)
        return results

    monkeypatch.setattr(audit_proofs, "verify_logs", verify_then_change)
    refused = invoke("export", "--log", folder, "--out", tmp_path / "out")
    assert refused.exit_code == 7 and "was changed while it was read" in refused.output
    assert not (tmp_path / "out").exists()


# ---- checking without the log -----------------------------------------------------------------------------


def test_T38_an_export_and_a_proof_are_checked_without_the_log(honest: Path, tmp_path: Path) -> None:
    out = exported(honest, tmp_path / "out")
    texts = {
        "plain": invoke("prove", "3", "--log", honest),
        "envelope": invoke("prove", "3", "--log", honest, "--json"),
    }
    for name, made in texts.items():
        (tmp_path / name).write_text(made.stdout, encoding="utf-8")
    for path, records in ((out, 10), (tmp_path / "plain", 1), (tmp_path / "envelope", 1)):
        found = invoke("prove", "--check", path, "--key", KEY, "--json")
        answer = json.loads(found.stdout)
        assert found.exit_code == 0 and answer["warnings"] == []
        data = answer["data"]
        assert (data["verified"], data["records"], data["proved"], data["log"]) == (True, records, records, SILO)
        assert data["cosigned"] == [COORDINATOR]
        unknown = invoke("prove", "--check", path)
        assert unknown.exit_code == 0 and "compare it with the one" in unknown.stderr and KEY in unknown.stdout


def rewritten(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    bundle = json.loads(path.read_bytes())
    change(bundle)
    path.write_text(json.dumps(bundle), encoding="utf-8")


def lines_of(folder: Path, change: Callable[[list[bytes]], list[bytes]]) -> None:
    path = folder / "records.jsonl"
    path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))


def one_record(out: Path, change: tuple[bytes, bytes], *, signed: bool) -> None:
    """An export of one changed record whose root is right; the checkpoint keeps the old signature, or gets one."""
    line = (out / "records.jsonl").read_bytes().splitlines()[0].replace(*change)
    leaf = hashlib.sha256(b"\x00" + line).digest()
    (out / "records.jsonl").write_bytes(line + b"\n")

    def change_note(bundle: dict[str, Any]) -> None:
        text = f"{SILO}\n1\n{base64.b64encode(leaf).decode()}\n"
        tail = bundle["note"].rpartition("\n\n")[2].split("\n")[0]
        if signed:
            old = base64.b64decode(tail.split(" ")[2])
            tail = f"— {SILO} {base64.b64encode(old[:4] + KEYS[SILO].sign(text.encode())).decode()}"
        bundle.update(note=f"{text}\n{tail}\n", size=1, proofs=[{"seq": 0, "inclusion": []}])

    rewritten(out / "proofs.json", change_note)


FORGED: dict[str, Callable[[Path], object]] = {
    "a checkpoint that nobody signed": lambda out: one_record(out, (b'"start"', b'"stop"'), signed=False),
    "a byte of a record": lambda out: lines_of(
        out, lambda lines: [*lines[:4], lines[4].replace(b'"round":1', b'"round":2'), *lines[5:]]
    ),
    "two records swapped": lambda out: lines_of(out, lambda lines: [*lines[:3], lines[4], lines[3], *lines[5:]]),
    "a record left out": lambda out: lines_of(out, lambda lines: [*lines[:5], *lines[6:]]),
    "the last record left out": lambda out: lines_of(out, lambda lines: lines[:-1]),
    "the end of the last line cut": lambda out: lines_of(out, lambda lines: [*lines[:-1], lines[-1][:-1]]),
    "a record added": lambda out: lines_of(out, lambda lines: [*lines, lines[-1]]),
    "no records": lambda out: (out / "records.jsonl").write_bytes(b""),
    "a hash of a path": lambda out: rewritten(
        out / "proofs.json", lambda bundle: bundle["proofs"][2]["inclusion"].__setitem__(0, "00" * 32)
    ),
    "a proof left out": lambda out: rewritten(out / "proofs.json", lambda bundle: bundle["proofs"].pop(3)),
    "a proof twice": lambda out: rewritten(
        out / "proofs.json", lambda bundle: bundle["proofs"].append(bundle["proofs"][3])
    ),
    "another size": lambda out: rewritten(out / "proofs.json", lambda bundle: bundle.update(size=9)),
    "another name": lambda out: rewritten(out / "proofs.json", lambda bundle: bundle.update(log=COORDINATOR)),
    "another key beside it": lambda out: rewritten(out / "proofs.json", lambda bundle: bundle.update(key="ab" * 32)),
    "no keys": lambda out: rewritten(out / "proofs.json", lambda bundle: bundle.update(keys=[])),
    "no checkpoint": lambda out: rewritten(out / "proofs.json", lambda bundle: bundle.update(note="", proofs=[])),
    "a signature": lambda out: rewritten(
        out / "proofs.json", lambda bundle: bundle.update(note=bundle["note"].replace("\n10\n", "\n11\n"))
    ),
    "no note": lambda out: rewritten(out / "proofs.json", lambda bundle: bundle.pop("note")),
    "a note of no text": lambda out: rewritten(out / "proofs.json", lambda bundle: bundle.update(note="\ud800\n\n")),
    "a size beyond all numbers": lambda out: rewritten(
        out / "proofs.json", lambda bundle: bundle.update(size=float("inf"))
    ),
    "a list": lambda out: (out / "proofs.json").write_text("[]"),
    "no JSON": lambda out: (out / "proofs.json").write_bytes(b"\xff"),
}


@pytest.mark.parametrize("what", FORGED)
def test_T38_a_forged_export_does_not_hold(honest: Path, tmp_path: Path, what: str) -> None:
    out = exported(honest, tmp_path / "out")
    FORGED[what](out)
    found = invoke("prove", "--check", out)
    assert found.exit_code == 7, found.output
    assert "\nproved" not in f"\n{found.stdout}"


def test_T38_a_record_that_its_owner_signed_under_another_number_does_not_hold(honest: Path, tmp_path: Path) -> None:
    for name, number in (("right", b"0"), ("wrong", b"7")):
        out = exported(honest, tmp_path / name)
        one_record(out, (b'"seq":0', b'"seq":' + number), signed=True)
        bundle = json.loads((out / "proofs.json").read_bytes())
        line = (out / "records.jsonl").read_bytes().rstrip(b"\n")
        proof = tmp_path / f"{name}.json"
        proof.write_text(json.dumps({**bundle, "seq": 0, "record": line.decode(), "inclusion": []}), encoding="utf-8")
        assert holds(line, 0, [], bundle["note"])
        found = invoke("prove", "--check", proof)
        assert found.exit_code == (0 if name == "right" else 7), found.output
        assert name == "right" or "record 0 carries number 7" in found.output


def test_T38_a_whole_log_of_another_key_holds_only_until_the_key_is_compared(tmp_path: Path) -> None:
    """A forger can sign anything with a key of its own, under the site's name: only the published key tells."""
    with open_log(tmp_path / "forged", key=OTHER_KEY) as log:
        append_send(log, 1)
    out = exported(tmp_path / "forged", tmp_path / "out")
    assert invoke("prove", "--check", out).exit_code == 0
    compared = invoke("prove", "--check", out, "--key", KEY)
    assert compared.exit_code == 7 and "not with the one given" in compared.output
    with pytest.raises(InvalidSignature):
        signed_checkpoint(json.loads((out / "proofs.json").read_bytes())["note"], KEY)


def test_T38_an_export_ends_where_the_newest_checkpoint_ends(tmp_path: Path) -> None:
    log = open_log(tmp_path / "log")
    log.append("start")
    append_send(log, 1)
    for name, words in (("all", ()), ("to the end", ("--last", "2"))):
        made = invoke("export", "--log", tmp_path / "log", "--out", tmp_path / name, *words, "--json")
        answer = json.loads(made.stdout)
        assert made.exit_code == 0
        assert [answer["data"][key] for key in ("records", "proved", "left_out", "checkpoint_size")] == [1, 1, 2, 1]
        assert "without the 2 newest records: no signed checkpoint covers them yet" in answer["warnings"][0]
        found = invoke("prove", "--check", tmp_path / name, "--key", KEY)
        assert found.exit_code == 0 and found.stdout.startswith("proved: 1 of 1 records (0 to 0)") and not found.stderr
    nothing = invoke("export", "--log", tmp_path / "log", "--out", tmp_path / "tail", "--first", "1")
    assert nothing.exit_code == 8 and "no signed checkpoint covers record 1 yet" in nothing.stderr
    assert not (tmp_path / "tail").exists()
    log.checkpoint()
    whole = json.loads(invoke("export", "--log", tmp_path / "log", "--out", tmp_path / "whole", "--json").stdout)
    assert (whole["data"]["records"], whole["data"]["left_out"], whole["warnings"]) == (3, 0, [])
    log.close()


def invented(out: Path, whole: Path, first: int) -> None:
    """Records that nobody recorded, chained to each other, in an export with a genuine checkpoint: no key is needed."""
    bundle = json.loads((whole / "proofs.json").read_bytes())
    genuine = (whole / "records.jsonl").read_bytes().splitlines()[first : bundle["size"]]
    previous, lines = link_of(genuine[-1]) if genuine else "ab" * 32, []
    for seq in range(bundle["size"], bundle["size"] + 3):
        line = record_line(
            seq=seq, salt=bytes(16), t=1, boot="b", mono=1, actor=SILO, event="egress.decision", previous=previous,
            fields={"kind": "lora.factors", "decision": "deny", "reasons": ["INVENTED"]},
        )  # fmt: skip
        lines.append(line)
        previous = link_of(line)
    out.mkdir()
    (out / "records.jsonl").write_bytes(b"".join(line + b"\n" for line in [*genuine, *lines]))
    kept = [item for item in bundle["proofs"] if item["seq"] >= first]
    (out / "proofs.json").write_text(json.dumps({**bundle, "proofs": kept}), encoding="utf-8")


@pytest.mark.parametrize("first", [0, 9, 10], ids=["behind all", "behind one", "alone"])
def test_T38_records_without_a_proof_are_never_called_proved(honest: Path, tmp_path: Path, first: int) -> None:
    """Behind the checkpoint of a genuine proof anybody can write what they like; the right key does not help them."""
    out = exported(honest, tmp_path / "out")
    invented(tmp_path / "forged", out, first)
    records = 13 - first
    for words in ((), ("--key", KEY)):
        told = invoke("prove", "--check", tmp_path / "forged", *words)
        assert told.exit_code == 7, told.output
        assert told.stdout.startswith(f"unproved: 3 of {records} records ({first} to 12)")
        assert f"unproved: 3 of {records} records" in told.stderr
        data = json.loads(invoke("prove", "--check", tmp_path / "forged", *words, "--json").stdout)["data"]
        assert (data["verified"], data["records"], data["proved"]) == (False, records, records - 3)
    good = invoke("prove", "--check", out, "--key", KEY)
    assert good.exit_code == 0 and good.stdout.startswith("proved: 10 of 10 records (0 to 9)")


def test_T38_nothing_counts_as_proved_under_another_key_than_the_one_compared(honest: Path, tmp_path: Path) -> None:
    out = exported(honest, tmp_path / "out")
    for key, proved in ((KEY, 10), ("ab" * 32, 0)):
        data = json.loads(invoke("prove", "--check", out, "--key", key, "--json").stdout)["data"]
        assert (data["proved"], data["verified"]) == (proved, proved == 10)


WRONG_BESIDE: dict[str, Any] = {
    "leaf": ["00" * 32, "", None, 7, "x"],
    "key": ["ab" * 32, "", None, f"{KEY}\nproved: 1 of 1 records"],
    "log": [COORDINATOR, "", None, "a\nproved: 9 of 9 records (0 to 8) of spiffe://net/silo/hospital_a"],
    "size": [8, "", None],
    "seq": [4, -1, "", None],
}


@pytest.mark.parametrize("field", WRONG_BESIDE)
def test_T37_T38_what_stands_beside_a_proof_is_compared(honest: Path, tmp_path: Path, field: str) -> None:
    """With its checkpoint, and without: then nothing is proved, and what is printed has no lines of its own."""
    proof = json.loads(invoke("prove", "3", "--log", honest).stdout)
    path = tmp_path / "proof.json"
    path.write_text(json.dumps(proof), encoding="utf-8")
    assert invoke("prove", "--check", path).exit_code == 0
    for value in WRONG_BESIDE[field]:
        for note in (proof["note"], ""):
            path.write_text(json.dumps({**proof, field: value, "note": note}), encoding="utf-8")
            told = invoke("prove", "--check", path)
            assert told.exit_code == 7, (value, told.output)
            assert "\nproved" not in f"\n{told.output}"


# ---- a daemon that writes meanwhile -----------------------------------------------------------------------


def test_T38_an_export_of_a_log_that_its_daemon_goes_on_writing_is_sound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint that is signed between the reading of the notes and of the tree, or the other way round."""
    log = open_log(tmp_path / "log")
    log.append("start")
    append_send(log, 1)

    def going_on(patch: pytest.MonkeyPatch, name: str, *, first: bool) -> None:
        real = getattr(audit_proofs, name)

        def slow(*arguments: Any, **options: Any) -> Any:
            made = None if first else real(*arguments, **options)
            append_send(log, log.size)
            log.checkpoint()
            return real(*arguments, **options) if first else made

        patch.setattr(audit_proofs, name, slow)

    for number, (name, first) in enumerate(
        (name, first) for name in ("leaf_hashes", "covering_note") for first in (0, 1)
    ):
        with monkeypatch.context() as patch:
            going_on(patch, name, first=bool(first))
            out = exported(tmp_path / "log", tmp_path / f"out{number}")
        assert invoke("prove", "--check", out, "--key", KEY).exit_code == 0
    log.close()


def test_T38_a_checkpoint_beyond_the_records_ends_an_export_with_a_clear_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_log(tmp_path / "log") as log:
        append_send(log, 1)
        append_send(log, 2)
    verify = audit_proofs.verify_logs

    def verify_then_cut(paths: list[Path]) -> list[dict[str, Any]]:
        results = verify(paths)
        changed(paths[0], lambda lines: lines[:3])
        for path in sorted((paths[0] / "checkpoints").iterdir())[:-1]:
            path.unlink()
        return results

    monkeypatch.setattr(audit_proofs, "verify_logs", verify_then_cut)
    refused = invoke("export", "--log", tmp_path / "log", "--out", tmp_path / "out")
    assert refused.exit_code == 7 and "was changed while it was read: its checkpoint at 4" in refused.stderr
    assert not (tmp_path / "out").exists()


# ---- one record -------------------------------------------------------------------------------------------


def test_T38_a_proof_out_of_a_log_that_does_not_verify_comes_with_a_warning(honest: Path, tmp_path: Path) -> None:
    good = invoke("prove", "3", "--log", honest, "--json")
    assert good.exit_code == 0 and json.loads(good.stdout)["warnings"] == []
    folder = copied(honest, tmp_path / "log")
    changed(folder, lambda lines: [*lines[:-1], lines[-1].replace(b'"stop"', b'"halt"')])
    told = invoke("prove", "3", "--log", folder)
    assert told.exit_code == 0 and "this log does not verify" in told.stderr
    proof = tmp_path / "proof.json"
    proof.write_text(told.stdout, encoding="utf-8")
    assert (
        invoke("prove", "--check", proof, "--key", KEY).exit_code == 0
    )  # the record is under the checkpoint all the same


@pytest.mark.parametrize(
    ("position", "damage", "told"),
    [
        (0, "torn", "does not hold whole leaf hashes"),
        (0, "empty", "does not hold whole leaf hashes"),
        (0, "gone", ": records 0 to "),
        (0, "too many", " stands there twice"),
        (-1, "gone", " are gone"),
        (-1, "too many", " stands there twice"),
    ],
)
def test_T38_damaged_leaf_hashes_prove_nothing(tmp_path: Path, position: int, damage: str, told: str) -> None:
    with open_log(tmp_path / "log", segment_bytes_max=900) as log:
        for number in range(10):
            append_send(log, number)
        log.remove_old(2**52)
        newest = str(log.size - 1)
    assert invoke("prove", newest, "--log", tmp_path / "log").exit_code == 0
    files = sorted((tmp_path / "log").glob("*.leaves"))
    assert len(files) > 1
    leaves = files[position]
    whole = leaves.read_bytes()
    leaves.write_bytes({"torn": whole[:-5], "empty": b"", "gone": b"", "too many": whole + bytes(32)}[damage])
    if damage == "gone":
        leaves.unlink()
    refused = invoke("prove", newest, "--log", tmp_path / "log")
    assert refused.exit_code == 7 and told in refused.stderr.splitlines()[0], refused.output


def test_an_export_given_as_a_log_says_how_to_check_it(honest: Path, tmp_path: Path) -> None:
    out = exported(honest, tmp_path / "out")
    told = invoke("verify", out)
    assert told.exit_code == 8 and f"fedsilo audit prove --check {out}" in told.output


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ((), 2),
        (("1",), 2),
        (("--key", KEY), 2),
        (("1", "--check", "x"), 2),
        (("--check", "x", "--log", "y"), 2),
        (("--check", "x", "--key", "6acf"), 2),
        (("--check", "nowhere"), 8),
    ],
)
def test_options_of_prove_that_do_not_go_together(words: tuple[str, ...], code: int) -> None:
    assert invoke("prove", *words).exit_code == code
