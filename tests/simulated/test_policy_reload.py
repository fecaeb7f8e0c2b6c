"""T34, T36: `silo reload` on a running guard: what tightens is adopted between two messages, all else is refused."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from fedsilo.cli.silo import status_text
from fedsilo.control.server import ControlServer, raise_for_reply
from fedsilo.protocol.errors import ConflictError, NotAllowedError, UsageError
from fedsilo.views.state import SiloState, state_of
from silo.guard.messages import Allowed, Denied, Held
from tests.policies import setting
from tests.simulated.policy_site import PolicySite, text_of
from tests.world import Bench, Loop, command

ROOT = Path(__file__).parents[2]
TIGHTER, LOOSER = ("max_total_l2: 5.5", "max_total_l2: 1.001"), ("max_total_l2: 5.5", "max_total_l2: 5.6")
TIGHTER_ELSEWHERE = ("min_peers: 2", "min_peers: 3")
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

    def hold(self) -> tuple[str, dict[str, Any]]:
        """A factor release that waits, and what a person who approves it was shown."""
        offered = self.bench.factors()
        assert isinstance(offered, Held)
        release = self.bench.releases.hold(offered, deadline_seconds=None)
        return release.id, {
            "release": release.id, "digest": release.digest, "policy_digest": self.bench.gate.policy.digest,
            **self.bench.shown(release),
        }  # fmt: skip


def running_on(folder: Path, text: str, charter: str | None = None) -> Running:
    place = PolicySite(folder / "site")
    place.policy_is(text)
    place.configure(charter=charter)
    site = place.site()
    loop = Loop(folder / "guard", site.policy)
    loop.guard.orders = replace(loop.guard.orders, site=site)
    scratch = Bench(folder / "scratch", site.policy)
    loop.bench.gate.view = scratch.gate.view  # an open round
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
    running.place.policy_is(wording(TIGHTER))
    told = running.reload()
    assert told["change"] == "tighter" and told["fields"] == ["egress.lora.factors.max_total_l2"]
    assert told["policy"] == running.bench.gate.policy.digest == running.place.site().policy.digest
    assert denied(running.bench.factors()) == ("TOTAL_L2",)
    record = running.bench.events("policy.load")[-1]
    assert record["detail"] | {"person": "dave", "change": "tighter"} == record["detail"]
    decided = running.bench.events("egress.decision")[-1]
    assert record["policy"]["effective"] == told["policy"] == decided["policy"]["effective"]
    assert ("policy.loaded", {key: told[key] for key in ("policy", "change", "fields")}) in running.loop.desk.published
    last = running.bench.ledger.policy_in_force
    assert last is not None and last.digest == told["policy"]


def test_T34_the_same_file_again_changes_nothing(running: Running) -> None:
    before = running.bench.gate.policy.digest
    running.place.policy_is(f"# a comment\n{wording()}")
    assert running.reload()["change"] == "same"
    assert running.bench.gate.policy.digest == before
    assert isinstance(running.bench.factors(), Allowed)


def test_T34_a_tightened_charter_is_adopted_too(tmp_path: Path) -> None:
    running = running_on(tmp_path, wording(), charter=wording())
    assert isinstance(running.bench.factors(), Allowed)
    running.place.configure(charter=wording(TIGHTER))
    assert running.reload()["change"] == "tighter"
    assert denied(running.bench.factors()) == ("TOTAL_L2",)
    running.place.configure(charter=wording())
    with pytest.raises(NotAllowedError, match=r"max_total_l2"):
        running.reload()
    running.loop.close()


def test_T34_the_status_says_what_is_in_force_and_what_it_is_made_of(tmp_path: Path) -> None:
    running = running_on(tmp_path, wording(), charter=wording(TIGHTER))
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
    before, sent = running.bench.gate.policy.digest, len(running.loop.coordinator.sent)
    running.place.policy_is(wording(LOOSER, ("min_peers: 2", "min_peers: 1")))
    with pytest.raises(NotAllowedError) as refused:
        running.reload()
    assert refused.value.code == "POLICY_LOOSER" and refused.value.exit_code == 4
    for field in ("egress.lora.factors.max_total_l2", "federation.min_peers"):
        assert field in refused.value.message
    assert "fedsilo policy propose" in refused.value.hint
    assert running.bench.gate.policy.digest == before and running.bench.ledger.policy_in_force is None
    record = running.bench.events("policy.reload_refused")[0]
    assert record["reasons"] == ["POLICY_LOOSER"] and record["detail"]["person"] == "dave"
    assert running.bench.events("policy.load") == [] and len(running.loop.coordinator.sent) == sent
    running.place.policy_is(wording(TIGHTER))
    assert running.reload()["change"] == "tighter"


def test_T34_approvals_do_not_help_a_running_silo(running: Running) -> None:
    """Loosening takes its approvals and a restart."""
    running.place.policy_is(wording(TIGHTER))
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
        (wording(TIGHTER, ("per_round: 9\n", "per_round: yes\n")), r"policy\.yaml:\d+: "),
    ],
)
def test_T34_a_broken_file_keeps_the_policy_in_force_and_says_so(running: Running, text: str, says: str) -> None:
    before = running.bench.gate.policy.digest
    running.place.policy_is(text)
    with pytest.raises((UsageError, NotAllowedError), match=says) as refused:
        running.reload()
    assert "stays in force" in refused.value.message and before[:12] in refused.value.message
    assert running.bench.gate.policy.digest == before
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
    place.policy_is(wording(TIGHTER))
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
    running.place.policy_is(wording(waived, TIGHTER))
    assert running.reload()["ends"] == ""
    running.place.policy_is(wording(TIGHTER))
    assert "isolation is waived" in running.reload()["ends"]
    assert running.loop.guard._failure is not None and running.loop.guard._failure.code == "ISOLATION"
    running.loop.close()


# ---- what is held --------------------------------------------------------------------------------------


def test_T36_approvals_given_before_a_reload_are_void(holding: Running) -> None:
    two = ("persons: 1", "persons: 2")
    holding.place.policy_is(wording(two, **HELD))
    holding.reload()
    name, shown = holding.hold()
    release, settled = holding.bench.releases.approve(command("approvals.approve", shown, person="alice"))
    assert settled is None and release.persons == 2
    holding.place.policy_is(wording(two, TIGHTER_ELSEWHERE, **HELD))
    holding.reload()
    with pytest.raises(ConflictError):  # what was shown is not what is in force
        holding.bench.releases.approve(command("approvals.approve", shown, person="bob"))
    again = shown | {"policy_digest": holding.bench.gate.policy.digest, **holding.bench.opened(name)}
    _, settled = holding.bench.releases.approve(command("approvals.approve", again, person="bob"))
    assert settled is None  # alice's yes was to the former policy
    _, settled = holding.bench.releases.approve(command("approvals.approve", again, person="alice"))
    assert settled is not None and settled.allowed is not None
    assert holding.bench.ledger.release(name).state == "approved"


def test_T36_persons_and_hours_of_a_held_release_follow_the_policy(holding: Running) -> None:
    name, shown = holding.hold()
    before = holding.bench.ledger.release(name)
    holding.place.policy_is(wording(("persons: 1", "persons: 2"), ("expiry_hours: 24", "expiry_hours: 2"), **HELD))
    holding.reload()
    after = holding.bench.ledger.release(name)
    assert (before.persons, after.persons) == (1, 2)
    assert before.expires_at - after.expires_at == 22 * 3600.0
    again = shown | {"policy_digest": holding.bench.gate.policy.digest, **holding.bench.opened(name)}
    _, settled = holding.bench.releases.approve(command("approvals.approve", again, person="alice"))
    assert settled is None
    _, settled = holding.bench.releases.approve(command("approvals.approve", again, person="bob"))
    assert settled is not None and settled.allowed is not None


def test_T36_what_the_tighter_policy_denies_is_held_no_longer(holding: Running) -> None:
    name, _ = holding.hold()
    holding.place.policy_is(wording(TIGHTER, **HELD))
    holding.reload()
    assert holding.bench.ledger.release(name).state == "expired"
    assert holding.bench.events("approval.expire")[0]["reasons"] == ["POLICY_CHANGED"]
    assert ("release.settled", {"release": name, "outcome": "denied"}) in holding.loop.desk.published
    assert holding.bench.releases.expire() == []


def test_T34_nothing_but_a_reload_changes_the_policy_of_a_running_guard() -> None:
    """A guard that is built with a policy has one way to another: `Gate.adopt`, called in one place."""
    places = {
        path.relative_to(ROOT).as_posix(): text.count(".adopt(") + len(re.findall(r"\.policy = ", text))
        for path in sorted((ROOT / "silo").rglob("*.py"))
        if (text := path.read_text())
    }
    assert {path: count for path, count in places.items() if count} == {
        "silo/guard/gate.py": 1,  # adopt itself
        "silo/guard/decisions.py": 1,  # __init__
        "silo/guard/commands.py": 1,
    }
