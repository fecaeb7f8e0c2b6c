"""The CLI twins of the console's screens: real gate, log and files behind a real control socket, answers as JSON."""

from __future__ import annotations

import json
import time
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.release_cases import site as made
from console.sharing import SILO
from fedsilo.audit.segments import segments
from fedsilo.cli import daemons
from fedsilo.cli import silo as cli_silo
from fedsilo.control.answers import to_json
from silo.guard.messages import Denied
from tests.console.commands import Site, failed, printed, run
from tests.console.states import unclassified
from tests.policies import setting
from tests.simulated.policy_site import PolicySite, text_of
from tests.simulated.queries import as_json, poll, queries_of, same, slow
from tests.world import Bench

WAIT_SECONDS = 30


@pytest.fixture
def place(tmp_path: Path) -> PolicySite:
    made = PolicySite(tmp_path / "site", now=datetime.fromtimestamp(int(setting.NOW), UTC))
    made.policy_is(text_of())
    for name in ("hospital_a.crt", "federation_ca.crt"):
        (made.folder / "id" / name).write_bytes(made.authority.certificate_pem)
    return made


@pytest.fixture
def bench(bench: Bench) -> Bench:
    poll(bench)
    bench.gate.transmit(bench.responses())
    assert isinstance(bench.responses(), Denied)
    return bench


@pytest.fixture
def ask(site: Site, bench: Bench, place: PolicySite, monkeypatch: pytest.MonkeyPatch) -> Any:
    parts = place.site()
    parts.identity = SimpleNamespace(peer=SimpleNamespace(fingerprint="0" * 64), not_after=place.now)
    for name, answer in queries_of(bench, parts).items():
        site.answer(**{name.replace(".", "_"): answer})
    site.configure(monkeypatch, daemons)

    def asked(*words: str, text: bool = False) -> tuple[int, Any]:
        return printed(cli_silo.app, *words) if text else run(cli_silo.app, *words)

    return asked


def test_outbox_and_inbox_say_what_the_log_says(bench: Bench, ask: Any) -> None:
    def rows(*words: str) -> list[dict[str, Any]]:
        status, told = ask(*words)
        assert status == 0 and told["command"] == f"silo {' '.join(words[:2])}"
        return list(told["data"]["messages"])

    listed = rows("outbox", "list")
    assert same(listed, slow(bench.audit, "egress"))
    newest, _ = listed
    first = ask("outbox", "list", "--limit", "1")[1]["data"]
    rest = ask("outbox", "list", "--before", str(first["next"]))[1]["data"]
    assert first["messages"] + rest["messages"] == listed and (first["total"], rest["next"]) == (2, None)
    assert rows("outbox", "list", "--verdict", "deny", "--kind", "public.responses") == [newest]
    assert len(rows("outbox", "list", "--control")) == 3
    assert same(rows("inbox", "list", "--control"), slow(bench.audit, "ingress", control=True))
    (sentence,) = ask("outbox", "show", str(newest["seq"]))[1]["data"]["would_pass"]
    assert "at most 1 pass, it had 2" in sentence
    assert "DENY one message per step: at most 1 pass" in ask("outbox", "show", str(newest["seq"]), text=True)[1]
    assert "2 messages, 0 held, 1 denied" in ask("outbox", "list", text=True)[1]
    assert failed(cli_silo.app, "inbox", "show", newest["seq"]) == (8, "NOT_FOUND")
    assert failed(cli_silo.app, "outbox", "list", "--verdict", "perhaps") == (2, "INVALID_INPUT")
    status, told = ask("audit", "show", "9" * 30)  # the argument is named as the person gave it
    assert status == 2 and told["error"]["message"].startswith("SEQ 999")


def test_ledger_limits_and_forecast(ask: Any) -> None:
    code, limits = ask("ledger", "limits")
    assert code == 0 and limits["data"]["dp"] == "off"
    assert {"limit", "kind", "used", "max", "unit", "window", "line"} == limits["data"]["rows"][0].keys()
    code, forecast = ask("ledger", "forecast")
    assert code == 0 and forecast["data"]["forecast"]["rounds_left"] > 0
    code, text = ask("ledger", "forecast", text=True)
    assert code == 0 and "day_bytes of this UTC day (policy.yaml:" in text and "DP off" in text
    shown = ask("ledger", "show")[1]["data"]
    assert shown["dp"].startswith("off") and len(shown["content"]) == shown["total"] == 1
    assert ask("ledger", "show", "--before", "0")[1]["data"]["content"] == []


def test_the_daemon_verifies_its_own_log_and_a_break_is_exit_status_7(bench: Bench, ask: Any) -> None:
    bench.audit.checkpoint()
    assert ask("audit", "status")[1]["data"]["verified_to"] is None
    code, verified = ask("audit", "verify")
    assert code == 0 and verified["data"]["verified_to"] == bench.audit.size and not verified["data"]["verifying"]

    def ended() -> Any:
        deadline = time.monotonic() + WAIT_SECONDS
        while (answer := ask("audit", "status"))[1]["data"]["verifying"]:
            assert time.monotonic() < deadline
        return answer

    code, status = ended()
    assert (code, status["data"]["verified_to"]) == (0, bench.audit.size)
    (_, path), *_ = segments(bench.audit.directory)
    lines = path.read_bytes().splitlines(keepends=True)
    changed = next(number for number, line in enumerate(lines) if b'"round":1' in line)
    lines[changed] = lines[changed].replace(b'"round":1', b'"round":2', 1)
    path.write_bytes(b"".join(lines))
    assert ask("audit", "verify")[0] == 7  # at once, not only when it is asked again
    code, status = ended()
    assert (code, status["error"]["code"]) == (7, "VERIFICATION_FAILED") and status["data"]["broken"]["seq"] == changed


def test_a_running_guards_state_tells_a_break_that_its_verification_found(tmp_path: Path) -> None:
    with closing(made(tmp_path, "run-1", 1)) as site:
        site.let_go(site.hold_responses(6, 9))
        guard, log = site.guard, site.bench.audit.directory

        def broken() -> Any:
            verify, status = as_json(guard.queries)["audit.verify"], as_json(guard.queries)["audit.status"]
            verify({})
            deadline = time.monotonic() + WAIT_SECONDS
            while status({})["verifying"]:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            state = to_json(guard.status.state(guard.moment()))
            assert list(unclassified(state, SILO)) == []
            return state["audit"]["broken"]

        assert broken() is None
        segment = next(log.glob("*.jsonl"))
        segment.write_bytes(segment.read_bytes().replace(b'"round":1', b'"round":2', 1))
        assert isinstance(broken()["seq"], int)


def test_a_verification_that_goes_on_is_no_pass(site: Site, ask: Any) -> None:
    status = ask("audit", "status")[1]["data"]
    for name in ("audit.verify", "audit.status"):
        # in place of the log's own answer: a log of some gigabytes takes that long
        site.answer(**{name.replace(".", "_"): status | {"verifying": True, "looked_at": 2, "of": 9}})
    for given in (["--no-wait"], ["--timeout", "0.3"]):
        code, told = ask("audit", "verify", *given)
        assert (code, told["ok"], told["error"]["code"]) == (3, False, "NOT_VERIFIED_YET")
        assert "2 of 9 records" in told["error"]["message"] and told["data"]["verifying"]


@pytest.mark.parametrize(
    ("words", "rows", "cells"),
    [
        (("outbox", "list"), "messages", ("record", "kind", "verdict", "rule")),
        (("inbox", "list", "--control"), "messages", ("record", "kind", "verdict", "peer")),
        (("audit", "list"), "records", ("seq", "event", "decision", "reasons")),
        (("ledger", "limits"), "rows", ("limit", "kind", "share", "policy")),
        (("ledger", "show"), "content", ("kind", "run", "state")),
        (("certs",), "", ("whose", "state", "role", "fingerprint")),
        (("settings",), "", ("key", "value", "origin")),
    ],
)
def test_a_list_has_the_screens_columns_and_a_line_for_each_row(
    ask: Any, words: tuple[str, ...], rows: str, cells: tuple[str, ...]
) -> None:
    data = ask(*words)[1]["data"]
    code, text = ask(*words, text=True)
    header, *lines = text.splitlines()[bool(rows) :]
    assert code == 0 and [name for name in header.split() if name in cells] == list(cells)
    assert len(lines) == len(data[rows] if rows else data) > 0


def test_audit_records_of_a_running_silo(bench: Bench, ask: Any) -> None:
    def records(*words: str) -> list[dict[str, Any]]:
        return list(ask("audit", "list", *words)[1]["data"]["records"])

    whole = list(bench.audit.records())[::-1]
    loud = [row for row in whole if not str(row.get("kind", "")).startswith("control.")]
    assert records() == whole and records("--no-control") == loud and 0 < len(loud) < len(whole)
    assert {row["event"] for row in records("--event", "egress.dec")} == {"egress.decision"}
    assert records("--no-control", "--limit", "1") == loud[:1]
    assert ask("audit", "show", "1")[1]["data"] == whole[-2]
    assert ask("audit", "show", str(bench.audit.size))[0] == 8


def test_certificates_say_whose_they_are_and_when_they_end(place: PolicySite, ask: Any) -> None:
    code, listed = ask("certs")
    rows = {row["whose"]: row for row in listed["data"]}
    assert code == 0 and rows["the site CA"]["days_left"] == 364 and rows["the site CA"]["role"] == "CA"
    assert rows["the operator alice"]["role"] == "operator" and rows["the operator alice"]["days_left"] == 0
    assert rows["the operator alice"]["names"] == ["spiffe://hospital_a/operator/alice"]
    assert rows["the site CA"]["pinned"] and not rows["the operator alice"]["pinned"]
    assert "PRIVATE" not in json.dumps(listed) and rows["this silo"]["in_use"] is False  # another fingerprint runs
    (place.folder / "id" / "bob.crt").write_text("nothing")
    faulty = {row["whose"]: row for row in ask("certs")[1]["data"]}["the operator bob"]
    assert faulty["fault"] and faulty["subject"] == ""


def test_settings_name_their_line_and_never_a_secret(place: PolicySite, ask: Any) -> None:
    code, listed = ask("settings")
    rows = {row["key"]: row for row in listed["data"]}
    lines = (place.folder / "silo.yaml").read_text().splitlines()
    assert code == 0 and rows["silo"]["value"] == "hospital_a" and rows["silo"]["origin"] == "silo.yaml:1"
    assert rows["rollout.engine"] == {"key": "rollout.engine", "value": "auto", "origin": "default"}
    assert rows["identity.key"]["value"].endswith("id/hospital_a.key")
    for key, row in rows.items():
        if row["origin"] != "default":
            assert lines[int(row["origin"].partition(":")[2]) - 1].strip().startswith(f"{key.rpartition('.')[2]}:") or (
                key.rpartition(".")[2] in lines[int(row["origin"].partition(":")[2]) - 1]
            )
    assert "PRIVATE KEY" not in json.dumps(listed)
