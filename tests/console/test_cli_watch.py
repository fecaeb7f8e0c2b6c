"""`fedsilo watch` and `fedsilo bundle` against a real desk: both parties, gaps, the last line, and nothing private."""

from __future__ import annotations

import json
import stat
import tarfile
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from certs.roles import Roles, load_roles
from fedsilo.cli import bundle as cli_bundle
from fedsilo.cli import fedsilo as cli_fedsilo
from fedsilo.cli.bundle import SHOWN_TEXTS, collected, shareable
from fedsilo.cli.coordinator import seen_text
from fedsilo.cli.daemons import Daemon
from fedsilo.cli.output import waiting
from fedsilo.cli.watch import EVENTS_A_LIFE, gaps_told
from fedsilo.control import server as control_desk
from fedsilo.control.client import ControlClient, Event
from fedsilo.control.server import EVENTS_KEPT_MAX, ControlServer
from fedsilo.protocol.errors import UnreachableError
from tests.console.commands import WAIT_SECONDS, Site
from tests.console.states import POLICY_DIGEST, coordinator
from tests.simulated.policy_site import PolicySite, text_of


def watch(*arguments: object) -> tuple[int, list[str], str]:
    answer = CliRunner().invoke(cli_fedsilo.app, ["watch", *map(str, arguments)])
    return answer.exit_code, answer.stdout.splitlines(), answer.stderr


@pytest.fixture
def happened(site: Site) -> Site:
    for number in range(3):
        site.desk.publish("message.decided", {"seq": number, "kind": "lora.factors", "decision": "allow"})
    return site


def test_both_parties_are_told_line_by_line_and_a_silo_that_is_down_by_name(happened: Site) -> None:
    happened.desk.publish("message.decided", {"kind": "x\x1b[2J\nfake line"})  # T37
    status, lines, _ = watch("--socket", happened.socket, "--once")
    assert status == 0 and len(lines) == 5 and " silo hospital_a: " in lines[0] and "message.decided" in lines[3]
    assert r"\u001b" in lines[4] and not any(character in "".join(lines) for character in "│─╭╰\x1b")
    state = coordinator()
    down = [row | {"state": "silent"} for row in state["silos"][:1]] + state["silos"][1:2]
    for silos, told in ((state["silos"], " silos here"), (down, "1 of 2 silos here (hospital_a silent), ")):
        happened.desk.set_state(state | {"silos": silos}, policy_digest=POLICY_DIGEST)
        assert told in watch("--socket", happened.socket, "--once")[1][0]


def test_it_ends_so_when_it_fails_too(happened: Site, tmp_path: Path) -> None:
    for socket, more, why, events in (
        (tmp_path / "nobody", (), "UNREACHABLE", 0),
        (happened.socket, ("--timeout", "0.2"), "TIMEOUT", 3),  # until the time is over
    ):
        status, lines, _ = watch("--socket", socket, "--jsonl", *more)
        assert status == 3
        assert {"terminal": True, "why": why, "events": events}.items() <= json.loads(lines[-1]).items()
    status, _, told = watch("--socket", happened.socket, "--timeout", "0.2")
    assert status == 3 and "[TIMEOUT]" in told


def test_how_long_ago_a_silo_was_heard() -> None:
    at = "2027-01-01T12:00:00Z"
    assert [seen_text(seen, at) for seen in ("", "2027-01-01T11:59:48Z", "2027-01-01T11:57:30Z", "no time")] == [
        "-",
        "12 s ago",
        "2 min ago",
        "no time",
    ]


@pytest.mark.slow
def test_a_gap_is_told_with_its_number(site: Site) -> None:
    for number in range(EVENTS_KEPT_MAX + 3):
        site.desk.publish("message.decided", {"seq": number})
    status, lines, _ = watch("--socket", site.socket, "--once", "--jsonl")
    first, last = json.loads(lines[1]), json.loads(lines[-1])
    assert status == 0 and (first["name"], first["fields"]["missed"]) == ("events.missed", 3)
    assert (last["missed"], last["events"]) == (3, EVENTS_KEPT_MAX)


def test_a_gap_on_the_way_is_told_where_it_is_and_a_watch_goes_on_after_what_it_knows(site: Site) -> None:
    for number in range(6):
        site.desk.publish("message.decided", {"seq": number})
    with ControlClient(site.socket) as client:
        all_of_them = [event for _, event in zip(range(6), client.watch(0), strict=False)]
        after = [event for _, event in zip(range(2), gaps_told(client.watch(4), 4), strict=False)]
    assert [event.sequence for event in after] == [5, 6]  # nothing is missing, and nothing comes twice
    whole = list(gaps_told(all_of_them, 0))
    assert whole == all_of_them
    for lost in range(6):
        kept = [event for event in all_of_them if event.sequence != lost + 1]
        told = list(gaps_told(kept, 0))
        missed = [(event.sequence, event.fields) for event in told if event.name == "events.missed"]
        assert missed == ([(lost + 1, {"missed": 1})] if lost < 5 else [])  # what comes last shows with the next one
        assert [event for event in told if event.name != "events.missed"] == kept
    twice = [*all_of_them[:3], *all_of_them[1:]]
    assert list(gaps_told(twice, 0)) == all_of_them
    site.desk.publish("message.decided", {"seq": 6})
    with ControlClient(site.socket) as client:
        [anew, first] = [event for _, event in zip(range(2), gaps_told(client.watch(90), 90), strict=False)]
    assert (anew.name, anew.fields, first.sequence) == ("events.missed", {"missed": -1}, 1)


def test_what_a_daemon_told_before_it_was_started_anew_is_said_to_be_missing_however_much_it_has_told_since(
    tmp_path: Path,
) -> None:
    """Else who goes on after the fifth event is told of the sixth of another life, and takes it for what came next."""
    assert EVENTS_A_LIFE == control_desk.EVENTS_A_LIFE

    def life(events: int) -> ControlServer:
        roles = Roles("hospital_a", {})
        desk = ControlServer("hospital_a", b"", roles, lambda: datetime.now(UTC), journal=tmp_path / "requests.jsonl")
        for _ in range(events):
            desk.publish("message.decided", {})
        return desk

    def told(desk: ControlServer, since: int) -> list[tuple[int, Any]]:
        rows = [Event(each.sequence, each.time, each.name, json.loads(each.fields_json))
                for each in desk.events_since(since, 0.0)]  # fmt: skip
        return [(each.sequence, each.fields.get("missed")) for each in gaps_told(iter(rows), since)]

    first = life(5)
    assert told(first, 0) == [(number, None) for number in range(1, 6)] and told(first, 5) == []
    second, base = life(9), EVENTS_A_LIFE
    anew = [(base + number, None) for number in range(1, 10)]
    assert told(second, 0) == anew, "who knows of nothing misses nothing"
    assert told(second, 5) == [(base, -1), *anew] and told(second, base + 7) == anew[7:]
    assert told(life(1), base + 9) == [(2 * base, -1), (2 * base + 1, None)]
    (tmp_path / "lives").write_text("no number")
    assert told(life(1), base + 9) == [(0, -1), (1, None)]


def of_run(site: Site, since: int) -> list[tuple[str, Any]]:
    words = ["run", "watch", "r", "--socket", str(site.socket), "--since", str(since), "--json"]
    answer = CliRunner().invoke(cli_fedsilo.app, words)
    assert answer.exit_code == 0, answer.output
    rows = [json.loads(line)["data"] for line in answer.stdout.splitlines()]
    return [(row["name"], row["fields"].get("round", row["fields"].get("missed"))) for row in rows]


@pytest.mark.slow
def test_a_watch_goes_on_after_what_it_knows_also_of_a_run_that_ended_meanwhile(site: Site) -> None:
    ended = {"run": "r", "state": "finished", "reason": "", "ended_at": "2027-01-15T08:00:00Z"}
    site.answer(run=ended | {"silo_errors": {}, "rounds": []})
    end, anew = ("run.ended", None), ("events.missed", -1)
    assert of_run(site, 0) == [end], "of a daemon that has told nothing since its start"
    assert of_run(site, 7) == [anew, end], "nor has one that was started anew"
    for name, run, number in (("opened", "r", 1), ("opened", "s", 1), ("committed", "r", 1), ("opened", "r", 2)):
        site.desk.publish(f"round.{name}", {"run": run, "round": number})
    site.desk.publish("run.ended", {"run": "r", "outcome": "finished"})
    site.desk.publish("round.opened", {"run": "s", "round": 2})
    after = [("round.opened", 1), ("round.committed", 1), ("round.opened", 2), end]
    for since, told in (
        (0, [end]),
        (1, after[1:]),
        (2, after[1:]),
        (3, after[2:]),
        (4, after[3:]),
        (5, [end]),  # its end stands in its record, too
        (6, [end]),
        (99, [anew, *after]),  # of a daemon that was started anew, what it has
    ):
        assert of_run(site, since) == told, since


def test_one_daemon_has_to_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, happened: Site) -> None:
    monkeypatch.chdir(tmp_path / "..")
    monkeypatch.setenv("FEDSILO_CONTEXTS", str(tmp_path / "contexts.yaml"))
    code, _, told = watch("--once")
    assert code == 2 and "which daemon?" in told
    assert watch("--once", "--socket", happened.socket, "--context", "silo:a=b")[0] == 2
    run = CliRunner().invoke
    added = run(cli_fedsilo.app, ["context", "add", "a", "--socket", str(happened.socket), "--silo", "hospital_a"])
    assert added.exit_code == 0, added.output
    assert watch("--once")[0] == 0  # the first one kept is the current one
    assert watch("--once", "--context", "a")[0] == 0
    assert watch("--once", "--context", "b")[0] == 8


# ---- bundle ----------------------------------------------------------------------------------------


PRIVATE = "Anna Beispiel"
LINES_GIVEN = [
    "2026 INFO read /srv/anna.jsonl", "2026 INFO ALICE approved r1, spiffe://a/operator/alice, of alicex",
]  # fmt: skip


@pytest.fixture
def bundled(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Site, PolicySite]]:
    monkeypatch.setenv("HOME", "/home/anna")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home"))
    place = PolicySite(tmp_path / "place")
    place.policy_is(text_of())
    site.desk.register_query("logs", lambda arguments: {"lines": LINES_GIVEN, "left_out": 1})
    site.desk.register_query("audit.status", lambda arguments: {"size": 12, "path": "/var/lib/x", "note": PRIVATE})
    yield site, place


@pytest.mark.slow
def test_a_bundle_may_be_shared_and_names_nobody_of_the_site(
    bundled: tuple[Site, PolicySite], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk, place = bundled
    config, roles = place.folder / "silo.yaml", place.folder / "id" / "roles.yaml"
    assert "alice" in load_roles(roles.read_bytes(), "").people
    daemon = Daemon(desk.socket, "silo", "hospital_a", config)
    parts = collected(daemon)
    whole = "".join(parts.values())
    for private in (PRIVATE, "anna", str(tmp_path), str(place.folder), "BEGIN"):
        assert private not in whole
    assert json.loads(parts["log.json"])["lines"] == [
        "2026 INFO read (left out)", "2026 INFO (person) approved r1, spiffe://a/operator/(person), of alicex",
    ]  # fmt: skip
    settings = {row["key"]: row for row in json.loads(parts["settings.json"])["settings"]}
    assert settings["data.private"]["value"] == "(set)" and settings["silo"]["value"] == "hospital_a"
    assert settings["data.private"]["origin"].startswith("silo.yaml:") and "held" in parts["status.json"]
    roles.unlink()
    for unknown in (daemon, Daemon(desk.socket)):
        assert "roles.yaml" in json.loads(collected(unknown)["log.json"])["not_told"]
    parts = collected(Daemon(tmp_path / "nobody.sock"))
    assert json.loads(parts["status.json"]) == {"not_told": "UNREACHABLE"}
    assert json.loads(parts["versions.json"])["python"]
    out = tmp_path / "b.tar.gz"  # and what is in it is listed before it is written
    line = ["bundle", "--out", str(out), "--socket", str(desk.socket)]
    answer = CliRunner().invoke(cli_fedsilo.app, line)
    assert answer.exit_code == 0 and str(out) in answer.stdout and stat.S_IMODE(out.stat().st_mode) == 0o600
    with tarfile.open(out) as archive:
        names = {entry.name.removeprefix("fedsilo-bundle/"): entry for entry in archive.getmembers()}
    listed = {row.split()[-1] for row in answer.stderr.splitlines()}
    assert names.keys() == listed >= {"README", "versions.json", "doctor.json", "log.json", "audit_status.json"}
    assert {entry.uname for entry in names.values()} == {""}
    assert CliRunner().invoke(cli_fedsilo.app, line).exit_code == 6  # an existing file stays

    def fails(*arguments: Any) -> None:
        raise OSError(28, "No space left on device", str(out))

    monkeypatch.setattr(cli_bundle, "write_private", fails)
    answer = CliRunner().invoke(cli_fedsilo.app, [*line[:2], str(tmp_path / "c"), *line[3:]])
    assert answer.exit_code == 1 and "status.json" in answer.stderr  # listed although nothing could be written


def test_paths_are_left_out_and_other_slashes_stay() -> None:
    kept = ["r1/hospital_a/0", "spiffe://x/silo/a", "fedsilo/cli/main.py:41 main", "2 of 3 / 4", "https://x.org/y"]
    assert shareable(kept) == kept
    cut = {"a": "see /srv/x.yaml: no", "b": ["~/.config/x", "file:///home/a b"], "/etc/key": 1}
    left_out = "(left out)"
    assert shareable(cut) == {"a": "see (left out)", "b": [left_out, left_out], left_out: 1}
    assert shareable({"/srv/a": 1, "/srv/b": 2, "(left out)+": 3}) == {
        left_out: 1,
        f"{left_out}+": 2,
        f"{left_out}++": 3,
    }


@pytest.mark.parametrize(
    ("text", "shared"),
    [
        ("read /srv/Anna Beispiel/a.jsonl", "read (left out)"),
        ("cannot open '/srv/Anna Beispiel/a.jsonl': refused", "cannot open (left out)"),
        ("cannot open '/srv/O'Brien/a.jsonl': refused", "cannot open (left out)"),
        ('the site\'s "see ~anna/My Files/x" and "../anna b/x" end', "the site's (left out)"),
        ("key 'anna' is unknown", "key (left out)"), ("key `anna` is unknown", "key (left out)"),
        ("in ~anna/x, or ../y", "in (left out)"), ("./anna/x", "(left out)"), ("~anna", "(left out)"),
        ("~/x", "(left out)"), ("(/srv/anna)", "((left out)"), ("of file:/srv/anna", "of (left out)"),
        ("one /a/b c\ntwo", "one (left out)\ntwo"), ("1\n'anna\nb", "1\n(left out)\nb"),
        ("within ~3 s of 1/2, and 3 ~ 4", "within ~3 s of 1/2, and 3 ~ 4"),
        ("/srv/state: no daemon is running", "(left out)"), ("/srv/state Anna/x: no", "(left out)"),
        ("C:\\Users\\anna", "(left out)"),
        ("got b'anna'", "got b(left out)"), ('f"anna"', "f(left out)"), ("3'anna'", "3(left out)"),
        ("rb's anna'", "rb(left out)"), ("name's'anna'", "name(left out)"), ("a \u201eanna\u201c", "a (left out)"),
        ("x\u2018anna\u2019", "x(left out)"), ("the silo\u2019s \u00abanna\u00bb", "the silo\u2019s (left out)"),
    ],
)  # fmt: skip
def test_a_line_is_cut_where_a_path_or_a_quotation_begins(text: str, shared: str) -> None:
    assert shareable(text) == shared


def test_settings_tell_numbers_and_fixed_words_only(bundled: tuple[Site, PolicySite]) -> None:
    desk, place = bundled
    config = place.folder / "anna.yaml"
    text = (place.folder / "silo.yaml").read_text()
    trainer = "trainer:\n  user: anna\n  launch: external\n  must_not_reach: ['tcp:192.0.2.7:22']\n  threads: 3\n"
    assert "trainer:" not in text
    config.write_text(f"{text}{trainer}  scratch: ../anna x/y\n")
    parts = collected(Daemon(desk.socket, "silo", "hospital_a", config))
    rows = {row["key"]: row for row in json.loads(parts["settings.json"])["settings"]}
    for key in ("trainer.user", "trainer.must_not_reach", "trainer.scratch", "coordinator.address", "policy",
                "state_dir", "data.private", "identity.key", "control.socket", "trainer.address"):  # fmt: skip
        assert rows[key]["value"] == "(set)", key
    assert rows["trainer.threads"]["value"] == 3 and rows["trainer.launch"]["value"] == "external"
    assert rows["trainer.user"]["origin"].startswith("silo.yaml:") and "anna" not in "".join(parts.values()).lower()
    assert "192.0.2.7" not in "".join(parts.values())
    config.write_text(config.read_text().replace("tcp:192", "192"))
    refused = collected(Daemon(desk.socket, "silo", "hospital_a", config))
    assert json.loads(refused["settings.json"])["not_told"] and "192.0.2.7" not in "".join(refused.values())
    (wrong,) = [row for row in json.loads(refused["doctor.json"]) if row["check"] == "configuration"]
    assert wrong["ok"] is False
    texts = {key for key, row in rows.items() if isinstance(row["value"], str | list) and row["value"] != "(set)"}
    assert {key for key in texts if rows[key]["value"]} <= SHOWN_TEXTS


def test_a_configuration_that_is_wrong_is_named_in_a_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("FEDSILO_CONTEXTS", str(tmp_path / "contexts.yaml"))
    wrong, out = tmp_path / "silo.yaml", tmp_path / "b.tar.gz"
    wrong.write_text("silo: hospital_a\nsate_dir: x\n")
    answer = CliRunner().invoke(cli_fedsilo.app, ["bundle", "--out", str(out), "--config", str(wrong), "--json"])
    told = json.loads(answer.stdout)
    assert answer.exit_code == 0 and any("sate_dir" in each for each in told["warnings"])
    with tarfile.open(out) as archive:
        files = {each.name.partition("/")[2]: archive.extractfile(each) for each in archive.getmembers()}
        parts = {name: file.read().decode() for name, file in files.items() if file is not None}
    assert json.loads(parts["settings.json"])["not_told"] == "INVALID_INPUT"
    (found,) = [row for row in json.loads(parts["doctor.json"]) if row["check"] == "configuration"]
    assert (found["ok"], found["found"]) == (False, "(left out)")
    whole = "".join(parts.values())
    assert "sate_dir" not in whole and str(tmp_path) not in whole  # what is quoted may be anything
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ward_7").mkdir()
    wrong.rename("ward_7/silo.yaml").write_text("silo: a\nx: 1\nstate_dir: anna\npolicy: a b/c.yaml\n")
    report = tmp_path / "fedsilo/crashes/crash-1.json"
    report.parent.mkdir(parents=True)
    report.write_text('["in ward_7/silo.yaml:2", "in anna/audit", "in a b/c.yaml:3", "annals/x"]')
    parts = collected(None, Path("ward_7/silo.yaml"))
    assert "ward_7" not in "".join(parts.values())
    assert json.loads(parts["crashes/crash-1.json"]) == [*["in (left out)"] * 3, "annals/x"]
    missing = CliRunner().invoke(cli_fedsilo.app, ["bundle", "--out", str(tmp_path / "c"), "--config", "none.yaml"])
    assert missing.exit_code == 8 and not (tmp_path / "c").exists()
    both = ["bundle", "--out", str(tmp_path / "c"), "--config", str(wrong), "--socket", "x"]
    assert CliRunner().invoke(cli_fedsilo.app, both).exit_code == 2


# ---- --timeout -------------------------------------------------------------------------------------


def test_an_answer_is_waited_for_as_long_as_was_said(site: Site) -> None:
    held = threading.Event()
    site.desk.register_query("slow", lambda arguments: held.wait(WAIT_SECONDS))
    try:
        told = pytest.raises(UnreachableError, match=r"did not answer within 0\.2 s")
        with waiting(0.2), ControlClient(site.socket) as client, told:
            client.query("slow")
    finally:
        held.set()
    with ControlClient(site.socket) as client:  # as long as ever
        assert client.query("slow") is True


def test_jsonl_ends_with_a_terminal_line_and_json_is_one_envelope(happened: Site) -> None:
    status, lines, _ = watch("--socket", happened.socket, "--once", "--jsonl")
    rows = [json.loads(line) for line in lines]
    assert status == 0 and [row["terminal"] for row in rows] == [False] * 4 + [True]
    assert rows[0]["name"] == "state" and rows[1]["fields"]["seq"] == 0
    assert rows[-1] == {"terminal": True, "why": "END", "message": "", "events": 3, "missed": 0, "sequence": 3}
    status, lines, _ = watch("--socket", happened.socket, "--once", "--json")
    (told,) = map(json.loads, lines)
    assert status == 0 and told["ok"] and told["data"]["state"]["name"] == "state" and told["data"]["missed"] == 0
    assert [event["fields"]["seq"] for event in told["data"]["events"]] == [0, 1, 2]
    assert len(watch("--socket", happened.socket, "--json", "--timeout", "0.2")[1]) == 5  # a stream: a line each
