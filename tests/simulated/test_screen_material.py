"""What screens need: canaries, an index, and patterns of the site's own."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from coordinator import main
from fedsilo.cli import audit as cli_audit
from fedsilo.cli.policy import app
from fedsilo.files.durable import write_private
from fedsilo.files.site_policy import read_policy
from fedsilo.protocol import codec
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.errors import NotAllowedError, NotFoundError, UsageError
from policies.load import custom_of, load_policy
from silo.guard import policy_change, signed_files
from silo.guard import screens as guard_screens
from silo.guard.checks import check_site
from silo.guard.messages import Allowed
from silo.guard.screens import COMMAND, Rescreening, Screens, check_screens, index_key, read_canaries, site_canaries
from tests.policies import own_patterns as own
from tests.policies import setting
from tests.simulated import screening
from tests.simulated import screening as site
from tests.simulated.policy_site import PolicySite, text_of
from tests.simulated.test_policy_in_force import Running, running_on
from tests.world import Bench, command


def canaries_file(folder: Path, content: str) -> Path:
    path = folder / "canaries.txt"
    path.unlink(missing_ok=True)
    write_private(path, content.encode())
    return path


def test_canaries_are_lines_bare_or_json(tmp_path: Path) -> None:
    path = canaries_file(tmp_path, 'plain canary one\n\n"quoted canary"\n{"canary": "object canary", "set": 3}\n')
    assert read_canaries(path) == ("plain canary one", "quoted canary", "object canary")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("good canary\nshort\n", "canaries.txt:2: a canary is a text of 8 to 1024"),
        ("good canary\n{broken\n", "canaries.txt:2: not JSON"),
        ('{"text": "good canary"}\n', "canaries.txt:1: a canary is a text"),
        ('["good canary"]x' + "y" * 1024, "canaries.txt:1: a canary is a text"),
        ("\n \n", "holds no canary"),
        ("\n".join(f"canary number {number}" for number in range(10_001)), "10001 canaries"),
    ],
)
def test_a_line_that_is_no_canary_is_refused_with_its_number(tmp_path: Path, content: str, said: str) -> None:
    with pytest.raises(UsageError, match="canar") as refused:
        read_canaries(canaries_file(tmp_path, content))
    assert said in refused.value.message


def test_T15_canaries_that_others_may_read_are_refused(tmp_path: Path) -> None:
    path = canaries_file(tmp_path, "good canary\n")
    assert read_canaries(path) == ("good canary",)
    path.chmod(0o640)
    with pytest.raises(NotAllowedError):
        read_canaries(path)
    with pytest.raises(NotFoundError):
        read_canaries(tmp_path / "none")


def test_the_trainer_is_told_to_build_what_the_policy_screens_for() -> None:
    screens = Screens(key=index_key(site.SITE_SECRET), public_sha256=setting.HASH["public"])
    wanted = screens.index_wanted(site.policy(["overlap"]).file)
    assert wanted == {
        "key": index_key(site.SITE_SECRET).hex(), "n": 8, "false_positive_rate": 1e-6, "background": True,
    }  # fmt: skip
    assert site.SITE_SECRET.hex() not in str(wanted)
    # Another public set than the one whose passages the policy lets through is no background.
    other = Screens(public_sha256="0" * 64).index_wanted(site.policy(["overlap"]).file)
    assert other is not None and other["background"] is False
    assert screens.index_wanted(site.policy(["canary"]).file) is None
    inbound = site.policy([], max_hits_per_day=None, donor_screens=["overlap"])
    assert screens.index_wanted(inbound.file) == wanted
    assert index_key(site.SITE_SECRET) != index_key(bytes(32))


def test_T23_an_index_beyond_the_bound_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = site.policy(["overlap"])
    assert site.screens(tmp_path / "within").troubles(policy) == []
    (path,) = (tmp_path / "within").iterdir()
    monkeypatch.setattr(guard_screens, "INDEX_BYTES_MAX", path.stat().st_size - 1)
    (trouble,) = site.screens(tmp_path / "beyond").troubles(policy)
    assert "more than" in trouble


@pytest.mark.parametrize(
    "told", [None, {}, {"file": 3}, {"file": "/etc/passwd"}, {"why": "no scratch\n\x1b folder"}, []]
)
def test_what_a_trainer_says_of_no_index_comes_to_none_with_a_reason(tmp_path: Path, told: Any) -> None:
    screens = Screens(key=index_key(site.SITE_SECRET))
    screens.take_index(tmp_path, told)
    (trouble,) = screens.troubles(site.policy(["overlap"]))
    assert trouble.startswith("policy.yaml:") and "overlap" in trouble and trouble.isprintable()
    # its own words stand in the guard's log file alone (T08)
    assert "no scratch" not in trouble and ("log says why" in trouble) is (isinstance(told, dict) and "why" in told)


def test_an_index_taken_before_is_gone_when_the_next_trainer_has_none(tmp_path: Path) -> None:
    screens = site.screens(tmp_path)
    assert screens.troubles(site.policy(["overlap"])) == []
    screens.take_index(tmp_path, {})
    assert len(screens.troubles(site.policy(["overlap"]))) == 1


def config(folder: Path, *, launch: str = "child", scratch: Path | None = None, canaries: bool = True) -> Any:
    path = canaries_file(folder, f"{site.CANARY}\n") if canaries else None
    source = folder / "silo.yaml"
    source.write_text("silo: hospital_a\ndata:\n  collection: c\n  canaries: canaries.txt\n")
    return SimpleNamespace(
        data=SimpleNamespace(canaries=path), trainer=SimpleNamespace(launch=launch, scratch=scratch), source=source
    )


def test_silo_check_says_why_a_screen_cannot_run_here(tmp_path: Path) -> None:
    policy = site.policy()
    assert check_screens(config(tmp_path), policy) == "canary, charset, overlap, pii_basic; 1 canaries"
    assert check_screens(config(tmp_path, launch="external", scratch=tmp_path), policy).startswith("canary")
    for wrong, said in (
        (config(tmp_path, canaries=False), "data.canaries"),
        (config(tmp_path, launch="external"), "trainer.scratch"),
    ):
        with pytest.raises(UsageError) as refused:
            check_screens(wrong, policy)
        assert said in refused.value.message and refused.value.code == "SCREEN_FAILED"
        assert refused.value.message.startswith("policy.yaml:")
    assert check_screens(config(tmp_path, canaries=False), site.policy(["charset"])) == "charset; 0 canaries"
    plain = setting.policy_of(setting.policy_text())
    assert check_screens(config(tmp_path, launch="external", canaries=False), plain) == "the policy names none"


def test_canaries_that_are_gone_are_named_with_both_lines_before_the_start(tmp_path: Path) -> None:
    policy, given = site.policy(["canary"]), config(tmp_path)
    assert site_canaries(given, policy) == (site.CANARY,)
    given.data.canaries.unlink()
    asks = next(
        number for number, line in enumerate(site.policy_text(["canary"]).splitlines(), 1) if "screens:" in line
    )
    for refuse in (site_canaries, check_screens):
        with pytest.raises(NotFoundError) as gone:
            refuse(given, policy)
        assert gone.value.message.startswith(f"{tmp_path / 'silo.yaml'}:4: data.canaries: {given.data.canaries}")
        assert f"policy.yaml:{asks}: public.responses is screened for canaries" in gone.value.message
        assert "silo init" in gone.value.hint
    # A policy that does not ask for them is not blamed, and where no file is named there is none to miss.
    with pytest.raises(NotFoundError) as gone:
        site_canaries(given, site.policy(["charset"]))
    assert "policy.yaml" not in gone.value.message
    assert site_canaries(config(tmp_path, canaries=False), site.policy(["charset"])) == ()
    with pytest.raises(UsageError, match=r"data\.canaries names no file") as unnamed:
        site_canaries(config(tmp_path, canaries=False), policy)
    assert unnamed.value.code == "SCREEN_FAILED" and f"{tmp_path / 'silo.yaml'}:4" in unnamed.value.message


SCREENS = f"text_screens:\n  pii_basic: {{patterns: [email], custom_file: {own.NAME}}}\n"
TWO = ("policy_change: 1", "policy_change: 2")
KEY = "text_screens.pii_basic.custom_file"


def texts_of(payload: bytes) -> list[str]:
    return [
        response.text for prompt in codec.decode(pb.PublicResponses, payload).prompts for response in prompt.responses
    ]


def site_text() -> str:
    return f"{text_of(TWO)}\n{SCREENS}"


@pytest.fixture
def place(tmp_path: Path) -> PolicySite:
    """A site that was started once with two own patterns."""
    made = PolicySite(tmp_path / "site")
    patterns_are(made, own.PATTERNS)
    made.policy_is(site_text())
    assert made.start().how == "first"
    return made


def patterns_are(place: PolicySite, text: str) -> None:
    (place.folder / own.NAME).write_text(text)


# ---- the gate ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", own.FOUND)
def test_T15_an_answer_with_an_own_pattern_is_withheld_and_leaves_without_that_pattern(
    tmp_path: Path, name: str
) -> None:
    planted = own.FOUND[name]
    with closing(screening.bench(tmp_path / "with", own.policy())) as bench:
        offered = bench.responses((1, ("12", planted)), (4, ()), (7, ("it is 12",)))
        assert isinstance(offered, Allowed) and texts_of(offered.payload) == ["12", "it is 12"]
        record = bench.events("egress.decision")[0]
        assert record["facts"]["offered"]["screen_hits"] == {f"pii_basic/{name}": 1}
        assert record["policy"]["effective"] == own.policy().digest
        assert planted[:14] not in json.dumps(list(bench.audit.records()))
    other = own.PATTERNS.replace("HX-", "HY-").replace("[a-d]", "[e-f]")
    with closing(screening.bench(tmp_path / "without", own.policy(other))) as bench:
        offered = bench.responses((1, ("12", planted)), (4, ()), (7, ("it is 12",)))
        assert isinstance(offered, Allowed) and texts_of(offered.payload) == ["12", planted, "it is 12"]


def test_silo_check_says_how_many_own_patterns_there_are(tmp_path: Path) -> None:
    config: Any = SimpleNamespace(
        data=SimpleNamespace(canaries=None), trainer=SimpleNamespace(launch="child", scratch=None),
        source=tmp_path / "silo.yaml",
    )  # fmt: skip
    config.source.write_text("silo: hospital_a\ndata:\n  collection: c\n")
    assert check_screens(config, own.policy()) == f"pii_basic; 0 canaries; 2 own patterns of {own.NAME}"
    assert check_screens(config, own.policy(own.FEWER)).endswith(f"; 1 own pattern of {own.NAME}")
    assert check_screens(config, screening.policy(["pii_basic"])) == "pii_basic; 0 canaries"
    assert check_screens(config, own.policy(text=own.policy_text(("charset",)))) == "charset; 0 canaries"


# ---- in force ------------------------------------------------------------------------------------------


def test_T34_more_patterns_come_in_at_a_start_and_fewer_do_not(place: PolicySite) -> None:
    assert place.start().how == "same"
    patterns_are(place, own.MORE)
    step = place.start()
    assert (step.how, [change.name for change in step.changes]) == ("tighter", [f"{KEY}.patterns"])
    assert place.in_force() == place.site().policy.digest
    for fewer in (own.PATTERNS, own.MORE.replace("{4}", "{5}")):
        patterns_are(place, fewer)
        with pytest.raises(NotAllowedError, match=rf"looser than .*{KEY}\.patterns"):
            place.start()
    (place.folder / own.NAME).unlink()
    with pytest.raises(UsageError, match="is not there, as far as this program can see") as refused:
        place.start()
    assert refused.value.code == "NO_CUSTOM_FILE" and "in a container" in refused.value.hint
    row = check_site(place.config, reach_coordinator=False)[0]
    assert any(each["check"] == "policy" and not each["ok"] and own.NAME in each["found"] for each in row)
    patterns_are(place, own.MORE)
    assert place.start().how == "same"


def test_T34_a_reload_reads_the_file_again_and_only_tightens(tmp_path: Path) -> None:
    text = f"{text_of()}\n{SCREENS}"
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / own.NAME).write_text(own.PATTERNS)
    running: Running = running_on(tmp_path, text)
    before = running.bench.judge.policy.digest
    patterns_are(running.place, own.MORE)
    told = running.reload()
    assert (told["change"], told["fields"]) == ("tighter", [f"{KEY}.patterns"])
    assert told["policy"] == running.bench.judge.policy.digest != before
    custom = custom_of(running.bench.judge.policy.file)
    assert custom is not None and len(custom.patterns) == 3
    for worse, said in ((own.PATTERNS, "looser"), ("patterns: 7\n", f"{own.NAME}:1: patterns: must be a list")):
        patterns_are(running.place, worse)
        with pytest.raises((NotAllowedError, UsageError), match=said):
            running.reload()
        assert running.bench.judge.policy.digest == told["policy"]
    patterns_are(running.place, own.MORE)
    assert running.reload()["change"] == "same"
    running.loop.close()


# ---- a looser file, proposed ---------------------------------------------------------------------------


def run(*arguments: object) -> tuple[int, Any]:
    done = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    return done.exit_code, json.loads(done.stdout)


def test_T34_a_looser_file_is_proposed_approved_and_put_in_place_with_its_policy(place: PolicySite) -> None:
    draft, config = place.folder / "draft" / "new.yaml", place.folder / "silo.yaml"
    draft.parent.mkdir()
    draft.write_text(site_text())
    draft.with_name(own.NAME).write_text(own.FEWER)
    code, answer = run("propose", draft, "--config", config, "--operator", "alice")
    assert code == 0 and answer["data"]["looser"] == [f"{KEY}.patterns"], answer
    path, after = answer["data"]["proposal"], answer["data"]["after"]
    draft.with_name(own.NAME).write_text("patterns: 7\n")  # what was signed is in the proposal
    for person, expected in (("bob", 9), ("carol", 0)):  # one of two is accepted and waits
        code, answer = run("activate", path, "--config", config, "--operator", person, "--expect-digest", after)
        assert code == expected, answer
    assert answer["data"]["in_place"] and (place.folder / own.NAME).read_text() == own.FEWER
    (kept,) = (place.folder / "proposals").glob("*.patterns.replaced.yaml")
    assert kept.read_text() == own.PATTERNS
    assert place.start().how == "approved" and place.in_force() == after


def test_T36_another_file_than_the_one_that_was_signed_is_refused(place: PolicySite) -> None:
    policy = load_policy(site_text().encode(), "new", own.beside(own.FEWER))
    texts = policy_change.Texts(site_text(), custom_file=own.FEWER)
    arguments = policy_change.proposal_arguments(texts, place.in_force(), policy.digest)
    people = place.people()
    signed = place.signs("alice", signed_files.PROPOSE, arguments, place.now + timedelta(hours=4))
    path, proposal = policy_change.write_proposal(place.folder / signed_files.PROPOSALS, texts, signed, people)
    assert proposal.policy(None).digest == policy.digest
    good = path.read_bytes()
    for changed in (good.replace(b"{4}", b"{9}"), good.replace(json.dumps(own.FEWER).encode(), b"null")):
        assert changed != good
        path.write_bytes(changed)
        with pytest.raises(NotAllowedError, match="signed another text"):
            policy_change.read_proposal(path, people)
    path.write_bytes(good)
    assert policy_change.read_proposal(path, people) == proposal


# ---- the commands on files -----------------------------------------------------------------------------


def test_the_policy_commands_know_the_file(place: PolicySite) -> None:
    policy = place.folder / "policy.yaml"
    code, answer = run("show", policy)
    assert code == 0 and answer["data"]["policy"]["text_screens"]["pii_basic"]["custom_file"]["file"] == own.NAME
    shown = CliRunner().invoke(app, ["show", str(policy)]).stdout
    assert f"pii_basic: 2 own patterns of {own.NAME}: study_number, ward" in shown
    digest = run("hash", policy)[1]["data"]["policy_sha256"]
    assert digest == read_policy(policy).digest
    other = place.folder / "other"
    other.mkdir()
    (other / "policy.yaml").write_text(site_text())
    code, answer = run("diff", policy, other / "policy.yaml")
    assert (code, answer["error"]["code"]) == (2, "NO_CUSTOM_FILE")
    (other / own.NAME).write_text(own.FEWER)
    code, answer = run("diff", policy, other / "policy.yaml", "--fail-on", "looser")
    assert (code, answer["error"]["code"]) == (1, "LOOSER")
    assert [(row["field"], row["direction"]) for row in answer["data"]["changes"]] == [(f"{KEY}.patterns", "looser")]
    (other / own.NAME).write_text(own.MORE)
    assert run("diff", policy, other / "policy.yaml", "--fail-on", "looser")[0] == 0


# ---- archived texts ------------------------------------------------------------------------------------


def test_T15_archived_texts_are_screened_again_with_own_patterns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loose = screening.policy_text(["charset"])
    draft = tmp_path / "new.yaml"
    draft.write_text(own.policy_text(("charset", "pii_basic")))
    draft.with_name(own.NAME).write_text(own.PATTERNS)
    with closing(screening.bench(tmp_path / "bench", setting.policy_of(loose))) as bench:
        for step, text in ((2, own.FOUND["study_number"]), (4, "ten and two make 12")):
            bench.judge.view = replace(bench.judge.view, open_step=step)
            rows = {2: (1, 4, 7), 4: (0, 2, 3)}[step]
            offered = bench.responses((rows[0], (text, "12")), (rows[1], ()), (rows[2], ()), step=step)
            assert isinstance(offered, Allowed)
            bench.gate.transmit(offered)
        first, second = (record["seq"] for record in bench.events("egress.decision"))
        given = {"policy": draft.read_text(), "charter": "", "since": 0}
        with pytest.raises(UsageError, match="cannot be read"):
            rescreened(bench, given)
        with pytest.raises(UsageError, match="is the text of a file"):
            rescreened(bench, given | {"custom_file": 7})
        answer = rescreened(bench, given | {"custom_file": own.PATTERNS})
        assert answer["policy"] == read_policy(draft).digest
        found = {row["seq"]: row["facts"]["screen_hits"] for row in answer["rows"]}
        assert found == {first: {"pii_basic/study_number": 1}, second: {}}

        # and by the command, which sends the file along
        monkeypatch.setattr(cli_audit, "load_site", lambda path: SimpleNamespace(state_dir=bench.folder))
        monkeypatch.setattr(
            cli_audit, "silo_command", lambda config, person, name, arguments, _: rescreened(bench, dict(arguments))
        )
        words = ["replay", "--policy", str(draft), "--rescreen", "--operator", "carol", "--json"]
        data = json.loads(CliRunner().invoke(cli_audit.app, words).stdout)["data"]
        assert [(row["seq"], row["replayed"]) for row in data["changed"]] == [(first, "deny")]
        # what was found once with these very patterns needs no text; with others it does
        draft.with_name(own.NAME).write_text(own.MORE)
        data = json.loads(CliRunner().invoke(cli_audit.app, words).stdout)["data"]
        assert data["rescreened"] == 2


def rescreened(bench: Bench, arguments: dict[str, Any]) -> dict[str, Any]:
    asked = command(COMMAND, arguments, person="carol", roles=("auditor",))
    return Rescreening(bench.ledger, bench.audit, bench.screens).rescreen(asked)


# ---- the other end -------------------------------------------------------------------------------------


def test_T34_a_coordinator_takes_no_charter_with_own_patterns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sites have its text alone: with a file beside its copy, it would judge by what no site saw."""
    monkeypatch.setattr(main, "load_identity", lambda *_, **__: SimpleNamespace(spiffe_id="it"))
    monkeypatch.setattr(main, "load_site", lambda *_, **__: None)
    monkeypatch.setattr(main, "require_authority", lambda *_, **__: None)
    (tmp_path / "charter.yaml").write_text(own.policy_text())
    (tmp_path / own.NAME).write_text(own.PATTERNS)
    files = SimpleNamespace(
        certificate=None, key=None, signing_key=None, federation_ca=None, site_ca=None, operators=None
    )
    config: Any = SimpleNamespace(
        identity=files, spiffe_id="it", site="main", source=tmp_path / "coordinator.yaml",
        charter=tmp_path / "charter.yaml", silos=(),
        expected=SimpleNamespace(lora_schema=tmp_path / "no_schema.json", models={}),
    )  # fmt: skip
    with pytest.raises(UsageError, match=rf"charter\.yaml:[0-9]+: {KEY}: .* as a charter is"):
        main.check(config)
    (tmp_path / "charter.yaml").write_text(own.policy_text().replace(own.NAME, "null"))
    with pytest.raises(Exception, match="no_schema"):  # the next thing that a start reads
        main.check(config)
