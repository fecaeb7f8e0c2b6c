"""T34, T36, T41: what is in force at a site, and what it takes to loosen it: at a start, with real ledger, log and
signatures, and by `silo reload` on a running guard.
"""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fedsilo.audit.log import AuditLog
from fedsilo.cli.silo import status_text
from fedsilo.control.server import ControlServer, raise_for_reply
from fedsilo.files.site_policy import read_effective
from fedsilo.protocol.errors import ConflictError, NotAllowedError, UsageError
from fedsilo.views.state import SiloState, state_of
from policies.engine import History, decide
from policies.model import PolicyFile
from policies.rules import RULES
from silo.config import load_config
from silo.guard import policy_change, signed_files
from silo.guard.ledger import Ledger, Release
from silo.guard.messages import Allowed, Denied
from silo.guard.policy_change import Seen, step_to
from tests.policies import setting
from tests.policies.test_compare import MESSAGES
from tests.policies.test_compare import policies as some_policies
from tests.simulated.policy_site import PolicySite, text_of
from tests.world import Bench, Killed, Loop, command, failing

TIGHTER, LOOSER = ("min_peers: 2", "min_peers: 3"), ("min_peers: 2", "min_peers: 1")
TWO = ("policy_change: 1", "policy_change: 2")


@pytest.fixture
def place(tmp_path: Path) -> PolicySite:
    """A site that was started once; a looser policy takes two approvers."""
    made = PolicySite(tmp_path / "site")
    made.policy_is(text_of(TWO))
    assert made.start().how == "first"
    return made


# ---- at a start ----------------------------------------------------------------------------------------


def test_T34_a_start_records_what_is_in_force_and_takes_what_is_tighter(place: PolicySite) -> None:
    assert place.start().how == "same"
    place.policy_is(text_of(TWO, TIGHTER))
    step = place.start()
    assert step.how == "tighter" and [change.name for change in step.changes] == ["federation.min_peers"]
    loads = place.records("policy.load")
    assert [load["detail"]["change"] for load in loads] == ["first", "same", "tighter"]
    assert loads[2]["detail"]["fields"] == ["federation.min_peers"]
    assert loads[2]["policy"]["effective"] == place.in_force() == place.site().policy.digest
    assert loads[2]["policy"]["file"] == place.site().policy.file_sha256


def test_T34_a_looser_file_does_not_start_and_the_refusal_names_field_and_command(place: PolicySite) -> None:
    before = place.in_force()
    place.policy_is(text_of(TWO, LOOSER))
    with pytest.raises(NotAllowedError, match=r"federation\.min_peers") as refused:
        place.start()
    assert refused.value.code == "POLICY_LOOSER"
    assert f"fedsilo policy propose {place.folder / 'policy.yaml'}" in refused.value.hint
    assert place.in_force() == before
    assert len(place.records("start")) == 1  # of the fixture: this one never began
    assert place.records("policy.reload_refused")[0]["reasons"] == ["POLICY_LOOSER"]
    place.policy_is(text_of(TWO))
    assert place.start().how == "same"


def test_T34_what_cannot_be_compared_counts_as_looser(place: PolicySite) -> None:
    place.policy_is(text_of(TWO).replace(setting.HASH["template"], "e" * 64))
    with pytest.raises(NotAllowedError, match=r"model\.template_sha256"):
        place.start()


def test_T34_who_approves_and_how_long_is_the_old_policys_to_say(place: PolicySite) -> None:
    """Else a policy that asks for one person would be approved by one."""
    lone = text_of(LOOSER)
    place.policy_is(lone)
    path, proposal = place.propose(lone)
    place.approve(path, proposal, "bob")
    assert "1 of 2 approvals" in refused_start(place)
    place.approve(path, proposal, "carol")
    assert place.start().how == "approved"


# ---- proposals -----------------------------------------------------------------------------------------


def looser(place: PolicySite, *approvers: str, **changes: Any) -> tuple[Path, policy_change.Proposal]:
    """The looser file stands in place, its proposal is signed, and these have approved it."""
    text = text_of(TWO, LOOSER)
    place.policy_is(text)
    path, proposal = place.propose(text, **changes)
    for person in approvers:
        place.approve(path, proposal, person)
    return path, proposal


def refused_start(place: PolicySite) -> str:
    """Why, of the proposals that lie there."""
    with pytest.raises(NotAllowedError) as refused:
        place.start()
    assert refused.value.code == "POLICY_LOOSER"
    return refused.value.hint


def test_T34_two_approvals_by_others_put_a_looser_policy_in_force(place: PolicySite) -> None:
    path, proposal = looser(place)
    assert "0 of 2 approvals" in refused_start(place)
    place.approve(path, proposal, "bob")
    assert "1 of 2 approvals" in refused_start(place)
    place.approve(path, proposal, "carol")
    step = place.start()
    assert step.how == "approved" and step.consent is not None
    (record,) = place.records("policy.load")[1:]
    assert record["detail"]["proposer"] == "alice" and record["detail"]["proposal"] == proposal.id
    assert record["link"]["approvals"] == ["bob", "carol"]
    assert place.in_force() == proposal.after == place.site().policy.digest


def test_T36_the_same_person_twice_is_one_person(place: PolicySite) -> None:
    path, proposal = looser(place, "bob")
    with pytest.raises(ConflictError, match="bob has approved"):
        place.approve(path, proposal, "bob")
    place.enrol("bob")  # bob with another certificate, under another name
    forced(place, path, proposal, "bob", "carol")
    assert "1 of 2 approvals" in refused_start(place)
    place.approve(path, proposal, "carol")
    assert place.start().how == "approved"


def forced(place: PolicySite, path: Path, proposal: policy_change.Proposal, person: str, under: str) -> None:
    """An approval by one person is put where that of another would lie."""
    signed = place.signs(person, signed_files.APPROVE, policy_change.approval_arguments(proposal), proposal.expires)
    signed_files.keep_signed(path.with_name(f"{path.stem}.{under}.approval"), signed)


def test_T36_the_proposer_is_no_approver(place: PolicySite) -> None:
    path, proposal = looser(place, "bob")
    with pytest.raises(NotAllowedError, match="another person"):
        place.approve(path, proposal, "alice")
    forced(place, path, proposal, "alice", "alice")
    assert "1 of 2 approvals" in refused_start(place)
    place.approve(path, proposal, "carol")
    assert place.start().how == "approved"


def test_T34_only_approvers_approve_and_only_who_may_propose_proposes(place: PolicySite) -> None:
    with pytest.raises(NotAllowedError, match=r"vera may not change\.propose"):
        looser(place, person="vera")
    path, proposal = looser(place, person="dave")  # an operator
    with pytest.raises(NotAllowedError, match=r"dave may not change\.approve"):
        place.approve(path, proposal, "dave")
    with pytest.raises(NotAllowedError, match=r"vera may not change\.approve"):
        place.approve(path, proposal, "vera")
    for person in ("alice", "bob"):
        place.approve(path, proposal, person)
    assert place.start().how == "approved"


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("approvals.approve", {}),
        (signed_files.APPROVE, {"proposal": "0" * 64}),
        (signed_files.APPROVE, {"after": "0" * 64}),
    ],
    ids=["other name", "other proposal", "other policy"],
)
def test_T36_a_signature_for_another_thing_counts_for_nothing(
    place: PolicySite, name: str, change: dict[str, str]
) -> None:
    path, proposal = looser(place, "bob")
    signed = place.signs("carol", name, policy_change.approval_arguments(proposal) | change, proposal.expires)
    with pytest.raises(NotAllowedError):
        policy_change.write_approval(path, proposal, signed, place.people())
    kept = path.with_name(f"{path.stem}.carol.approval")
    signed_files.keep_signed(kept, signed)
    assert "1 of 2 approvals" in refused_start(place)
    kept.unlink()
    place.approve(path, proposal, "carol")
    assert place.start().how == "approved"


def test_T36_approve_then_swap_is_refused(place: PolicySite) -> None:
    """Another text in the file, another text in the proposal, and another policy in force than the one it was for."""
    path, _ = looser(place, "bob", "carol")
    good = path.read_bytes()

    place.policy_is(text_of(TWO, LOOSER, ("    per_round: 1\n", "    per_round: 9\n")))
    assert "it is for another change" in refused_start(place)

    place.policy_is(text_of(TWO, LOOSER))
    path.write_bytes(good.replace(b"min_peers: 1", b"min_peers: 2"))
    assert "signed another text" in refused_start(place)
    path.write_bytes(good)

    place.policy_is(text_of(TWO, TIGHTER))
    assert place.start().how == "tighter"
    place.policy_is(text_of(TWO, LOOSER))
    assert "it is for another change" in refused_start(place)


def test_T36_a_proposal_is_used_once(place: PolicySite) -> None:
    looser(place, "bob", "carol")
    assert place.start().how == "approved"
    place.policy_is(text_of(TWO))
    assert place.start().how == "tighter"  # the very policy that the proposal was made against
    place.policy_is(text_of(TWO, LOOSER))
    assert "it was used already" in refused_start(place)
    looser(place, "bob", "carol")
    assert place.start().how == "approved"


def test_T41_an_expired_approval_stays_expired_when_the_clock_goes_back(place: PolicySite) -> None:
    looser(place, "bob", "carol", hours=4)
    begun, copy = place.now, place.folder.with_name("copy")
    shutil.copytree(place.folder, copy)

    for later in (timedelta(hours=4, seconds=1), timedelta(hours=1)):
        place.now = begun + later
        assert "expired" in refused_start(place)

    # The same files where no later time was ever seen.
    shutil.rmtree(place.folder)
    shutil.copytree(copy, place.folder)
    assert place.start().how == "approved"


def test_T36_a_signature_does_not_outlive_the_policys_hours(tmp_path: Path) -> None:
    place = PolicySite(tmp_path / "site")
    place.policy_is(text_of(("expiry_hours: 24", "expiry_hours: 2")))
    place.start()
    place.policy_is(text_of(LOOSER))
    path, proposal = place.propose(text_of(LOOSER, ("expiry_hours: 24", "expiry_hours: 2")), hours=3)
    place.policy_is(text_of(LOOSER, ("expiry_hours: 24", "expiry_hours: 2")))
    place.approve(path, proposal, "bob")
    assert "more than 2:00:00 ahead" in refused_start(place)
    path, proposal = place.propose((place.folder / "policy.yaml").read_text(), hours=2)
    place.approve(path, proposal, "bob")
    place.now += timedelta(hours=1)
    assert place.start().how == "approved"


def test_T36_a_signature_does_not_outlive_the_certificate(place: PolicySite) -> None:
    """Certificates of people last eight hours, the policy's hours are 24."""
    looser(place, "bob", "carol", hours=20)
    place.now += timedelta(hours=9)
    assert "alice" in refused_start(place)
    for person in ("alice", "bob", "carol"):
        place.enrol(person)
    looser(place, "bob", "carol", hours=4)
    assert place.start().how == "approved"


def test_T36_a_person_who_left_the_site_has_approved_nothing(place: PolicySite) -> None:
    looser(place, "bob", "carol")
    roles = place.folder / "id" / "roles.yaml"
    text = roles.read_text()
    roles.write_text(text.replace("  carol: [approver]\n", ""))
    assert "1 of 2 approvals" in refused_start(place)
    roles.write_text(text)
    assert place.start().how == "approved"


@pytest.mark.parametrize(
    "rubbish", [b"", b"{", b"[]", b'{"policy": 1, "charter": null, "custom_file": null, "command": ""}', b"\xff\xfe"]
)
def test_T35_rubbish_among_the_proposals_stops_nobody_and_helps_nobody(place: PolicySite, rubbish: bytes) -> None:
    path, proposal = looser(place)
    (path.parent / "0.json").write_bytes(rubbish)
    (path.parent / f"{path.stem}.eve.approval").write_bytes(rubbish)
    assert "0 of 2 approvals" in refused_start(place)
    for person in ("bob", "carol"):
        place.approve(path, proposal, person)
    assert place.start().how == "approved"


# ---- ledger and log must agree -------------------------------------------------------------------------


def test_T39_killed_between_ledger_and_log_it_starts_again(place: PolicySite) -> None:
    """The ledger knows the tighter policy, the log does not yet: as often as it happens."""
    for least in (3, 4):
        place.policy_is(text_of(TWO, ("min_peers: 2", f"min_peers: {least}")))
        with failing(AuditLog, "append"), pytest.raises(Killed):
            place.start()
        assert len(place.records("policy.load")) == 1
    assert place.start().how == "same"


def test_T34_check_tells_beforehand_what_a_start_would_say(place: PolicySite) -> None:
    """`silo check` reads ledger and log of a silo that may be running."""
    with place.audit(), closing(Ledger(place.folder / "state" / "ledger.sqlite3", read_only=True)) as ledger:
        seen = Seen.in_folder(place.folder / "state" / "audit")
        site = place.site()
        people = (site.site_ca_pem, site.roles)
        assert step_to(site.policy, ledger, seen, site.config, people, place.now.timestamp()).how == "same"
        place.policy_is(text_of(TWO, LOOSER))
        with pytest.raises(NotAllowedError):
            step_to(place.site().policy, ledger, seen, site.config, people, place.now.timestamp())
    with place.audit() as audit:
        assert Seen.of(audit) == seen and seen.records == audit.size


# ---- the federation's charter --------------------------------------------------------------------------


def test_T34_a_charter_only_tightens_and_a_verdict_names_the_file_that_bound_it(tmp_path: Path) -> None:
    """One number each: tighter at the site, tighter in the charter, and the same in both."""
    place = PolicySite(tmp_path / "site")
    place.policy_is(text_of(("messages_per_minute: 600 ", "messages_per_minute: 500 ")))
    charter = text_of(("max_total_l2: 5.5", "max_total_l2: 1.001"))
    place.configure(charter=charter)
    assert place.start().how == "first"
    policy = place.site().policy
    bench = Bench(tmp_path / "bench", policy)
    denied, fine = bench.factors(), bench.responses()
    assert not isinstance(denied, Allowed) and denied.decision.reasons == ("TOTAL_L2",)
    assert isinstance(fine, Allowed)
    rules = {result.rule: result for result in denied.decision.results}

    def line(path: str, starts: str) -> tuple[str, int]:
        lines = (place.folder / path).read_text().splitlines()
        number = next(number for number, text in enumerate(lines, 1) if text.strip().startswith(starts))
        return str(place.folder / path), number

    assert (rules["L2 of base and delta"].file, rules["L2 of base and delta"].line) == line(
        "charter.yaml", "max_total_l2"
    )
    assert (rules["messages per minute"].file, rules["messages per minute"].line) == line(
        "policy.yaml", "messages_per_minute"
    )
    assert (rules["L2 of the delta"].file, rules["L2 of the delta"].line) == line("policy.yaml", "max_l2")
    record = bench.events("egress.decision")[0]
    assert record["policy"]["effective"] == policy.digest
    assert record["policy"]["file"] == policy.parts[0].file_sha256
    assert record["policy"]["charter"] == policy.parts[1].file_sha256
    recorded = {rule["rule"]: rule.get("file", "") for rule in record["rules"]}
    assert recorded["L2 of base and delta"] == "charter" and recorded["L2 of the delta"] == ""
    bench.close()
    # Without the charter the same bytes leave.
    place.configure()
    alone = Bench(tmp_path / "alone", place.site().policy)
    assert isinstance(alone.factors(), Allowed)
    assert "charter" not in alone.events("egress.decision")[0]["policy"]
    alone.close()


def test_T34_a_charter_taken_away_or_loosened_is_a_looser_policy(tmp_path: Path) -> None:
    place = PolicySite(tmp_path / "site")
    place.policy_is(text_of())
    place.configure(charter=text_of(TIGHTER))
    place.start()
    place.configure()
    with pytest.raises(NotAllowedError, match=r"federation\.min_peers"):
        place.start()
    place.configure(charter=text_of())
    with pytest.raises(NotAllowedError, match=r"federation\.min_peers"):
        place.start()
    # A proposal may bring the charter along.
    path, proposal = place.propose(text_of(), charter=text_of())
    place.approve(path, proposal, "bob")
    assert place.start().how == "approved"


@pytest.mark.parametrize(
    ("charter", "code", "says"),
    [
        (None, "NO_CHARTER", "there is no such charter"),
        ("", "NO_POLICY", r"charter\.yaml: the policy file is empty"),
        ("mode: [", "INVALID_INPUT", r"charter\.yaml:\d+: "),
        (
            text_of(("per_round: 1\n", "per_round: 1\n    surprise: 1\n")), "INVALID_INPUT",
            r"charter\.yaml:\d+: .*surprise",
        ),
        (
            text_of().replace("cardio-net", "other-net"), "NO_MEET",
            r"policy\.yaml:\d+ and .*charter\.yaml:\d+ .*federation\.id",
        ),
        (text_of().replace(setting.HASH["base"], "e" * 64), "NO_MEET", r"model\.base_model_sha256"),
        (text_of().replace("2026-12-01", "2027-12-02").replace("2027-12-01", "2028-01-01"), "NO_MEET", "same time"),
    ],
)  # fmt: skip
def test_T34_a_charter_that_is_not_there_or_fits_nothing_starts_no_silo(
    tmp_path: Path, charter: str | None, code: str, says: str
) -> None:
    place = PolicySite(tmp_path / "site")
    place.policy_is(text_of())
    place.configure(charter=charter or "")
    if charter is None:
        (place.folder / "charter.yaml").unlink()
    with pytest.raises(UsageError, match=says) as refused:
        place.site()
    assert refused.value.code == code
    assert refused.value.exit_code == 2 and not place.in_force()
    place.configure(charter=text_of())
    assert place.start().how == "first"


def test_T34_the_charter_is_the_agreed_one(tmp_path: Path) -> None:
    place = PolicySite(tmp_path / "site")
    place.policy_is(text_of())
    agreed = setting.policy_of(text_of()).digest
    place.configure(charter=text_of(TIGHTER), pinned=agreed)
    with pytest.raises(UsageError) as refused:
        place.site()
    assert refused.value.code == "CHARTER_MISMATCH"
    place.configure(charter=f"# another comment\n{text_of()}", pinned=agreed)
    assert place.start().how == "first"
    place.configure(pinned=agreed)
    with pytest.raises(UsageError, match=r"silo\.yaml:\d+: charter_sha256"):
        load_config(place.folder / "silo.yaml")


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(some_policies(), some_policies(), st.sampled_from(MESSAGES), st.integers(0, 4))
def test_T34_what_two_files_allow_together_both_allow(
    tmp_path_factory: pytest.TempPathFactory, one: PolicyFile, two: PolicyFile, facts: dict[str, Any], released: int
) -> None:
    """From the files that a start reads; and the file a verdict names says the same by itself."""
    folder = tmp_path_factory.mktemp("two")
    for name, file in (("policy", one), ("charter", two)):
        content = file.model_dump(mode="json", by_alias=True)
        screen = content["text_screens"]["pii_basic"] or {}
        custom = screen.pop("custom_file", None)
        if custom is not None and custom["patterns"] and name == "policy":  # a charter is one text
            (folder / custom["file"]).write_text(yaml.safe_dump({"patterns": custom["patterns"]}))
            screen["custom_file"] = custom["file"]
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(content))
    try:
        policy = read_effective(folder / "policy.yaml", folder / "charter.yaml")
    except UsageError:
        assume(False)
        raise
    history = History(rounds_released=released)
    together, *alone = (decide(facts, each, history) for each in (policy, *policy.parts))
    if together.verdict == "allow":
        assert [decision.verdict for decision in alone] == ["allow", "allow"]
    for rule, result, *parts in zip(RULES, together.results, *(decision.results for decision in alone), strict=True):
        named = [part for part in parts if part.file == result.file]
        if result.outcome != "n.a." and any(part.outcome == result.outcome for part in parts):
            assert named[0].outcome == result.outcome, rule.name
            if any(part.limit == result.limit and part.outcome == result.outcome for part in parts):
                assert named[0].limit == result.limit, rule.name


ROOT = Path(__file__).parents[2]
LESS_L2, MORE_L2 = ("max_total_l2: 5.5", "max_total_l2: 1.001"), ("max_total_l2: 5.5", "max_total_l2: 5.6")
MANY = ("    per_round: 1\n", "    per_round: 9\n")  # so that the same factors may be offered again
HELD: dict[str, Any] = {"first_rounds": 1}


def wording(*edits: tuple[str, str], **facts: Any) -> str:
    return text_of(MANY, *edits, **facts)


def denied(offered: object) -> tuple[str, ...]:
    assert isinstance(offered, Denied)
    return offered.decision.reasons


@dataclass
class Running:
    place: PolicySite
    loop: Loop

    @property
    def bench(self) -> Bench:
        return self.loop.bench

    def reload(self, person: str = "dave", role: str = "operator") -> dict[str, Any]:
        asked = command("policy.reload", {}, person=person, roles=(role,))
        return self.loop.guard.orders.reload(asked)

    def hold(self) -> Release:
        """A factor release that waits."""
        return self.bench.hold(self.bench.factors())


def running_on(folder: Path, text: str, charter: str | None = None) -> Running:
    place = PolicySite(folder / "site")
    place.policy_is(text)
    place.configure(charter=charter)
    site = place.site()
    loop = Loop(folder / "guard", site.policy)
    loop.guard.orders = replace(loop.guard.orders, site=site)
    scratch = Bench(folder / "scratch", site.policy)
    loop.bench.judge.view = scratch.judge.view  # an open round
    scratch.close()
    return Running(place, loop)


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    made = running_on(tmp_path, wording())
    yield made
    made.loop.close()


@pytest.fixture
def holding(tmp_path: Path) -> Iterator[Running]:
    made = running_on(tmp_path, wording(**HELD))
    yield made
    made.loop.close()


# ---- adopted -------------------------------------------------------------------------------------------


def test_T34_a_tightened_file_decides_from_the_next_message_on(running: Running) -> None:
    assert isinstance(running.bench.factors(), Allowed)
    running.place.policy_is(wording(LESS_L2))
    told = running.reload()
    assert told["change"] == "tighter" and told["fields"] == ["egress.lora.factors.max_total_l2"]
    assert told["policy"] == running.bench.judge.policy.digest == running.place.site().policy.digest
    assert denied(running.bench.factors()) == ("TOTAL_L2",)
    record = running.bench.events("policy.load")[-1]
    assert record["detail"] | {"person": "dave", "change": "tighter"} == record["detail"]
    decided = running.bench.events("egress.decision")[-1]
    assert record["policy"]["effective"] == told["policy"] == decided["policy"]["effective"]
    assert ("policy.loaded", {key: told[key] for key in ("policy", "change", "fields")}) in running.loop.desk.published
    last = running.bench.ledger.policy_in_force
    assert last is not None and last.digest == told["policy"]


def test_T34_a_tightened_charter_is_adopted_too(tmp_path: Path) -> None:
    running = running_on(tmp_path, wording(), charter=wording())
    assert isinstance(running.bench.factors(), Allowed)
    running.place.configure(charter=wording(LESS_L2))
    assert running.reload()["change"] == "tighter"
    assert denied(running.bench.factors()) == ("TOTAL_L2",)
    running.place.configure(charter=wording())
    with pytest.raises(NotAllowedError, match=r"max_total_l2"):
        running.reload()
    running.loop.close()


def test_T34_the_status_says_what_is_in_force_and_what_it_is_made_of(tmp_path: Path) -> None:
    running = running_on(tmp_path, wording(), charter=wording(LESS_L2))
    shown = running.loop.state()["policy"]
    policy = running.place.site().policy
    assert shown["digest"] == policy.digest
    assert [Path(part["file"]).name for part in shown["made_of"]] == ["policy.yaml", "charter.yaml"]
    assert [part["digest"] for part in shown["made_of"]] == [part.digest for part in policy.parts]
    state = running.loop.state()
    assert f"charter.yaml {policy.parts[1].digest[:12]}" in status_text(state)
    console = state_of(state, {})
    assert isinstance(console, SiloState) and len(console.policy.made_of) == 2
    running.loop.close()


# ---- refused -------------------------------------------------------------------------------------------


def test_T34_a_loosened_file_is_refused_and_nobody_outside_hears_of_it(running: Running) -> None:
    before, sent = running.bench.judge.policy.digest, len(running.loop.coordinator.sent)
    running.place.policy_is(wording(MORE_L2, ("min_peers: 2", "min_peers: 1")))
    with pytest.raises(NotAllowedError) as refused:
        running.reload()
    assert refused.value.code == "POLICY_LOOSER" and refused.value.exit_code == 4
    for field in ("egress.lora.factors.max_total_l2", "federation.min_peers"):
        assert field in refused.value.message
    assert "fedsilo policy propose" in refused.value.hint
    assert running.bench.judge.policy.digest == before and running.bench.ledger.policy_in_force is None
    record = running.bench.events("policy.reload_refused")[0]
    assert record["reasons"] == ["POLICY_LOOSER"] and record["detail"]["person"] == "dave"
    assert running.bench.events("policy.load") == [] and len(running.loop.coordinator.sent) == sent
    running.place.policy_is(wording(LESS_L2))
    assert running.reload()["change"] == "tighter"


def test_T34_approvals_do_not_help_a_running_silo(running: Running) -> None:
    """Loosening takes its approvals and a restart."""
    running.place.policy_is(wording(LESS_L2))
    running.place.start()
    running.reload()
    path, proposal = running.place.propose(wording())
    running.place.approve(path, proposal, "bob")
    running.place.policy_is(wording())
    with pytest.raises(NotAllowedError):
        running.reload()
    assert running.place.start().how == "approved"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "the policy file is empty"),
        ("mode: [", r"policy\.yaml:\d+: "),
        (wording(LESS_L2, ("per_round: 9\n", "per_round: yes\n")), r"policy\.yaml:\d+: "),
    ],
)
def test_T34_a_broken_file_keeps_the_policy_in_force_and_says_so(running: Running, text: str, says: str) -> None:
    before = running.bench.judge.policy.digest
    running.place.policy_is(text)
    with pytest.raises((UsageError, NotAllowedError), match=says) as refused:
        running.reload()
    assert "stays in force" in refused.value.message and before[:12] in refused.value.message
    assert running.bench.judge.policy.digest == before
    assert running.bench.events("policy.reload_refused")[0]["reasons"] == [refused.value.code]
    assert isinstance(running.bench.factors(), Allowed)


def test_T34_a_tighter_policy_that_this_silo_was_not_started_with_is_refused(tmp_path: Path) -> None:
    """It pins a held-out set where any would do, and another than the one that is open here."""
    lines = [line for line in wording().splitlines() if not line.startswith("held_out:")]
    running = running_on(tmp_path, "\n".join(lines))
    pin = 'held_out: {{file: h.jsonl, sha256: "{}", rows: 8}}'
    running.place.policy_is("\n".join([*lines, pin.format("e" * 64)]))
    with pytest.raises(UsageError) as refused:
        running.reload()
    assert refused.value.code == "HELD_OUT_MISMATCH" and "stays in force" in refused.value.message
    running.place.policy_is("\n".join([*lines, pin.format(setting.HASH["held"])]))
    assert running.reload()["change"] == "tighter"
    running.loop.close()


def test_T34_only_a_signed_command_of_who_may_propose_reloads(running: Running) -> None:
    """Through the desk that stands behind the control socket, with real signatures."""
    place = running.place
    desk = ControlServer("hospital_a", place.authority.certificate_pem, place.site().roles, lambda: place.now)
    running.loop.guard.register(desk)
    place.policy_is(wording(LESS_L2))
    expires = place.now + timedelta(minutes=5)
    reply = desk.execute(place.signs("vera", "policy.reload", {}, expires))
    with pytest.raises(NotAllowedError, match=r"vera \(viewer\) may not change\.propose"):
        raise_for_reply(reply)
    forged = place.signs("dave", "policy.reload", {}, expires)
    forged.signature = place.signs("dave", "pause", {}, expires).signature
    with pytest.raises(NotAllowedError, match="signature"):
        raise_for_reply(desk.execute(forged))
    assert isinstance(running.bench.factors(), Allowed)

    replies = []
    signed = place.signs("dave", "policy.reload", {}, expires)
    asking = threading.Thread(target=lambda: replies.append(desk.execute(signed)))
    asking.start()
    running.loop.guard._handle(running.loop.events.get(timeout=30))
    asking.join()
    raise_for_reply(replies[0])
    assert denied(running.bench.factors()) == ("TOTAL_L2",)


def test_T34_a_trainer_behind_thinner_walls_than_the_new_policy_accepts_ends_the_silo(tmp_path: Path) -> None:
    waived = ('least_isolation: "namespaces"', 'least_isolation: "waived"')
    running = running_on(tmp_path, wording(waived))
    running.loop.trainer.got = "waived"
    running.place.policy_is(wording(waived, LESS_L2))
    assert running.reload()["ends"] == ""
    running.place.policy_is(wording(LESS_L2))
    assert "isolation is waived" in running.reload()["ends"]
    assert running.loop.guard.failure is not None and running.loop.guard.failure.code == "ISOLATION"
    running.loop.close()


# ---- what is held --------------------------------------------------------------------------------------


def test_T36_approvals_given_before_a_reload_are_void(holding: Running) -> None:
    two, bench = ("persons: 1", "persons: 2"), holding.bench
    holding.place.policy_is(wording(two, **HELD))
    holding.reload()
    release = holding.hold()
    assert bench.approve(release, "alice") is None and bench.ledger.release(release.id).persons == 2
    of_bob = bench.answer(release, person="bob")
    holding.place.policy_is(wording(two, TIGHTER, **HELD))
    holding.reload()
    with pytest.raises(ConflictError):  # what was shown is not what is in force
        bench.releases.approve(of_bob)
    assert bench.approve(release, "bob") is None  # alice's yes was to the former policy
    settled = bench.approve(release, "alice")
    assert settled is not None and settled.allowed is not None
    assert bench.ledger.release(release.id).state == "approved"


def test_T36_persons_and_hours_of_a_held_release_follow_the_policy(holding: Running) -> None:
    before, bench = holding.hold(), holding.bench
    holding.place.policy_is(wording(("persons: 1", "persons: 2"), ("expiry_hours: 24", "expiry_hours: 2"), **HELD))
    holding.reload()
    after = bench.ledger.release(before.id)
    assert (before.persons, after.persons) == (1, 2)
    assert before.expires_at - after.expires_at == 22 * 3600.0
    assert bench.approve(after, "alice") is None
    settled = bench.approve(after, "bob")
    assert settled is not None and settled.allowed is not None


def test_T36_what_the_tighter_policy_denies_is_held_no_longer(holding: Running) -> None:
    release = holding.hold()
    holding.place.policy_is(wording(LESS_L2, **HELD))
    holding.reload()
    assert holding.bench.ledger.release(release.id).state == "expired"
    assert holding.bench.events("approval.expire")[0]["reasons"] == ["POLICY_CHANGED"]
    assert ("release.settled", {"release": release.id, "outcome": "denied"}) in holding.loop.desk.published
    assert holding.bench.releases.expire() == []


def test_T34_nothing_but_a_reload_changes_the_policy_of_a_running_guard() -> None:
    """A guard that is built with a policy gets another in one place: where people's orders are carried out."""
    places = {
        path.relative_to(ROOT).as_posix(): len(re.findall(r"\.policy = ", text))
        for path in sorted((ROOT / "silo").rglob("*.py"))
        if (text := path.read_text())
    }
    assert {path: count for path, count in places.items() if count} == {
        "silo/guard/decisions.py": 1,  # __init__
        "silo/guard/commands.py": 1,
    }
