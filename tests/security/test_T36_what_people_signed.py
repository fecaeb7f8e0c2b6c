"""What a person signed is kept with the record of it and checked offline, against whoever writes the log (T36).

A log's owner has its key: each hostile record here is signed into a log that verifies in every other way."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from certs.authority import create_ca
from certs.commands import VerifiedCommand, sign_command, verify_command
from certs.roles import Roles, load_roles, render_roles
from fedsilo.audit.audit_verify import verify_logs
from fedsilo.audit.checkpoint import cosign, parse_checkpoint
from fedsilo.audit.log import AuditLog
from fedsilo.audit.orders import check_orders
from fedsilo.audit.proofs import check
from fedsilo.cli.audit import app
from fedsilo.cli.audit_report import audit_report, page
from fedsilo.protocol.codec import sha256_hex
from fedsilo.protocol.errors import ConflictError, NotAllowedError, UsageError
from silo.guard.ledger import Release
from silo.guard.messages import Held
from silo.guard.shown import shown_facts
from tests.policies import setting
from tests.protocol.audit_parties import COORDINATOR, OTHER_KEY, SILO, Clock, exchange, introduce, open_log
from tests.security.people import new_keys
from tests.simulated.policy_site import PolicySite, text_of
from tests.world import OUR_KEY, Bench, command

NOW = datetime.fromtimestamp(setting.NOW, UTC)
HOUR, HOURS = 3600.0, timedelta(hours=1)
NOTE = "ask the ward first"
ROLES = load_roles(render_roles("hospital_a", {"alice": ["approver"], "bob": ["approver"]}).encode(), "roles.yaml")
POLICY, PAYLOAD = "cd" * 32, "ab" * 32


class World:
    """The people of one site, under its CA; certificates of eight hours from `NOW` on."""

    def __init__(self, site: str = "hospital_a", roles: Roles = ROLES) -> None:
        self.site, self.roles = site, roles
        self.ca = create_ca(site, kind="site", not_before=NOW - timedelta(days=1), days=365)
        self.keys = {name: new_keys(signing=False) for name in ("alice", "bob")}
        self.people = {
            name: self.ca.issue(keys[2], "operator", name, now=NOW).certificate_pem for name, keys in self.keys.items()
        }

    def command(self, name: str, arguments: dict[str, Any], person: str = "alice", at: float = 0.0) -> VerifiedCommand:
        """Signed by the person, and verified as the desk verifies it."""
        now = NOW + timedelta(seconds=at)
        signed = sign_command(
            site=self.site, name=name, arguments=arguments, request_id=f"request-{person}-{at:.0f}",
            expires=now + timedelta(minutes=5), operator_certificate_pem=self.people[person],
            operator_key=self.keys[person][0],
        )  # fmt: skip
        return verify_command(
            signed, site=self.site, site_ca_pem=self.ca.certificate_pem, roles=self.roles,
            now=min(now, NOW + 7 * HOURS), lifetime_max=24 * HOURS,
        )  # fmt: skip


WORLD = World()


def judged(log: Path, *site_cas: bytes) -> tuple[dict[str, int], list[str]]:
    """Verdicts of the people's orders in a log, and its problems, by the command that an auditor gives."""
    results = verify_logs([log])
    assert results[0]["verified"], results[0]["problems"]
    check_orders(results, [log], site_cas)
    return {name: count for name, count in results[0]["orders"].items() if count}, results[0]["problems"]


# ---- a guard keeps what was signed ---------------------------------------------------------------------


@pytest.fixture
def answered(tmp_path: Path) -> Path:
    """The log of a silo whose people deferred, approved and rejected."""
    with closing(Bench(tmp_path / "silo", setting.policy_of(setting.policy_text(first_rounds=3)))) as bench:
        for number, name in enumerate(("approvals.defer", "approvals.reject", "approvals.approve")):
            if name != "approvals.reject":
                offered = bench.factors()
                assert isinstance(offered, Held)
                release = bench.releases.hold(offered, deadline_seconds=None)
            shown = {"release": release.id, "digest": release.digest, "policy_digest": bench.judge.policy.digest}
            shown |= bench.opened(release.id)
            more = {
                "approvals.defer": {"until_seconds": setting.NOW + 60}, "approvals.approve": {},
                "approvals.reject": {"reason_code": "CONTENT", "reason": NOTE},
            }  # fmt: skip
            command = WORLD.command(name, shown | more[name], at=number)
            getattr(bench.releases, name.removeprefix("approvals."))(command)
        bench.audit.checkpoint()
    return tmp_path / "silo" / "audit"


def test_T36_what_an_approver_signed_is_in_the_log_and_verifies_offline(answered: Path, tmp_path: Path) -> None:
    assert judged(answered, WORLD.ca.certificate_pem) == ({"anchored": 3}, [])
    assert judged(answered) == ({"signed": 3}, [])  # by whom, only the site's CA says
    (tmp_path / "ca.crt").write_bytes(WORLD.ca.certificate_pem)
    told = CliRunner().invoke(app, ["verify", str(answered), "--site-ca", str(tmp_path / "ca.crt"), "--json"])
    assert told.exit_code == 0 and json.loads(told.stdout)["data"][0]["orders"]["anchored"] == 3
    made = audit_report([answered], site_cas=[WORLD.ca.certificate_pem])
    answers = [each for item in made["approvals"] for each in item["answers"] if each["answer"] in ("grant", "deny")]
    assert [each["order"] for each in answers] == ["anchored", "anchored"] and page(made)


def test_T36_a_record_names_the_roles_and_the_site_CA_that_judged(answered: Path) -> None:
    orders = [order for record in records(answered) for order in record.get("orders", ())]
    roles = sha256_hex(render_roles("hospital_a", {"alice": ["approver"], "bob": ["approver"]}).encode())
    assert {(order["roles"], order["site_ca"]) for order in orders} == {(roles, WORLD.ca.fingerprint)}


def test_T36_T40_what_is_kept_holds_neither_the_note_nor_a_digest_by_which_it_is_guessed(answered: Path) -> None:
    kept = b"".join(
        base64.b64decode(order["signed"]) for record in records(answered) for order in record.get("orders", ())
    )
    assert NOTE.encode() not in kept and sha256_hex(NOTE.encode()).encode() not in kept
    assert b"reason_code" in kept  # the counterpart: what is not confidential is there
    held = [record["payload"]["sha256"] for record in records(answered) if record["event"] == "approval.grant"]
    assert held[0].encode() not in kept  # the plain digest of an answer would confirm guesses of it


def test_T36_T40_a_note_within_what_is_signed_is_refused() -> None:
    """So that no other client puts into the log what this one keeps out of it."""
    key, certificate = WORLD.keys["alice"][0], WORLD.people["alice"]
    command = sign_command(
        site="hospital_a", name="anything", arguments={"reason": NOTE}, request_id="request-1", expires=NOW + HOURS / 2,
        operator_certificate_pem=certificate, operator_key=key,
    )  # fmt: skip
    given: dict[str, Any] = {"site": "hospital_a", "site_ca_pem": WORLD.ca.certificate_pem, "roles": ROLES, "now": NOW}
    assert verify_command(command, **given).arguments == {"reason": NOTE}
    beside = WORLD.command("approvals.reject", {"reason_code": "OTHER", "reason": NOTE})
    assert beside.arguments == {"reason_code": "OTHER", "reason": NOTE}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("certs.commands.BESIDE", {})
        inside = sign_command(
            site="hospital_a", name="approvals.reject", arguments={"reason": NOTE}, request_id="request-1",
            expires=NOW + HOURS / 2, operator_certificate_pem=certificate, operator_key=key,
        )  # fmt: skip
    with pytest.raises(NotAllowedError, match="reason"):
        verify_command(inside, **given)


def test_T36_what_travels_beside_an_order_cannot_be_exchanged() -> None:
    command = sign_command(
        site="hospital_a", name="approvals.reject", arguments={"release": "r1", "reason": NOTE}, request_id="request-1",
        expires=NOW + HOURS / 2, operator_certificate_pem=WORLD.people["alice"], operator_key=WORLD.keys["alice"][0],
    )  # fmt: skip
    given: dict[str, Any] = {"site": "hospital_a", "site_ca_pem": WORLD.ca.certificate_pem, "roles": ROLES, "now": NOW}
    assert verify_command(command, **given).arguments["reason"] == NOTE
    for sealed in (command.sealed.replace(b"first", b"later"), b"", command.sealed.replace(b'"reason"', b'"release"')):
        command.sealed = sealed
        with pytest.raises(NotAllowedError):
            verify_command(command, **given)


# ---- a log's owner writes what nobody signed -------------------------------------------------------------


def grant(order: VerifiedCommand, **changes: Any) -> dict[str, Any]:
    """The fields of the record that a guard writes for it."""
    detail = {"release": "r1/hospital_a/0", "person": order.person, "certificate": order.certificate_fingerprint}
    return {
        "kind": "lora.factors", "run": "run-1", "round": 1, "step": 0, "payload": {"bytes": 5, "sha256": PAYLOAD},
        "policy": {"effective": POLICY}, "detail": detail, "orders": [dict(order.order)],
    } | changes  # fmt: skip


def approval(person: str = "alice", world: World = WORLD, at: float = 0.0, **changes: Any) -> VerifiedCommand:
    shown = {"release": "r1/hospital_a/0", "digest": PAYLOAD, "policy_digest": POLICY, "revision": 1}
    return world.command("approvals.approve", shown | changes, person, at)


def logged(folder: Path, *fields: dict[str, Any], event: str = "approval.grant", at: float = 0.0) -> Path:
    clock = Clock(setting.NOW + at)
    with open_log(folder / "silo", SILO, clock=clock) as log:
        log.append("start")
        for each in fields:
            log.append(event, **each)
        log.checkpoint()
    return folder / "silo"


def with_order(fields: dict[str, Any], **changes: str) -> dict[str, Any]:
    return fields | {"orders": [fields["orders"][0] | changes]}


def with_detail(fields: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return fields | {"detail": fields["detail"] | changes}


def altered(text: str, old: bytes, new: bytes) -> str:
    raw = base64.b64decode(text)
    assert old in raw
    return base64.b64encode(raw.replace(old, new)).decode()


def forged() -> dict[str, Any]:
    """By a CA of the same name that the log's owner made."""
    return grant(approval(world=World()))


HOSTILE: dict[str, Callable[[], dict[str, Any]]] = {
    "another person's certificate": lambda: with_order(
        grant(approval()), certificate=approval("bob").order["certificate"]
    ),
    "another person's order": lambda: with_detail(grant(approval("bob")), person="alice"),
    "another certificate of the person": lambda: with_detail(grant(approval()), certificate="0" * 64),
    "bytes that were changed": lambda: with_order(
        grant(approval()), signed=altered(approval().order["signed"], b"r1/hospital_a/0", b"r2/hospital_a/0")
    ),
    "an order for another release": lambda: grant(approval(release="r2/hospital_a/0")),
    "an order under another policy": lambda: grant(approval(policy_digest="ee" * 32)),
    "an order to do something else": lambda: grant(
        WORLD.command("approvals.defer", {"release": "r1/hospital_a/0", "policy_digest": POLICY, "until_seconds": 5.0})
    ),
    "an order to another site": lambda: grant(approval(world=World("hospital_b", Roles("hospital_b", {})))),
    "a finding that was not opened": lambda: with_detail(grant(approval()), acknowledged=["f-1"]),
    "a CA of its own": forged,
    "a CA of its own under the name of the right one": lambda: with_order(forged(), site_ca=WORLD.ca.fingerprint),
    "no signature": lambda: with_order(grant(approval()), signature=base64.b64encode(b"\0" * 70).decode()),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_T36_a_grant_that_nobody_signed_does_not_verify(tmp_path: Path, name: str) -> None:
    honest = approval("bob")
    sound = with_detail(grant(honest), person="bob")
    counts, problems = judged(logged(tmp_path, sound, HOSTILE[name]()), WORLD.ca.certificate_pem)
    assert counts == {"anchored": 1, "broken": 1} and len(problems) == 1 and "record 2" in problems[0]


def test_T36_the_counterpart_two_people_who_signed(tmp_path: Path) -> None:
    log = logged(tmp_path, grant(approval()), grant(approval("bob"), run="run-1"))
    assert judged(log, WORLD.ca.certificate_pem) == ({"anchored": 2}, [])
    # whose CA is not given: signed, by whom is not certain
    assert judged(log, World("hospital_b").ca.certificate_pem) == ({"signed": 2}, [])


def test_T36_an_order_that_had_expired_long_before_its_record_is_none(tmp_path: Path) -> None:
    for minutes, verdict in ((30, "anchored"), (120, "broken")):
        log = logged(tmp_path / verdict, grant(approval()), at=minutes * 60)
        assert judged(log, WORLD.ca.certificate_pem)[0] == {verdict: 1}


def test_T36_an_order_counts_once(tmp_path: Path) -> None:
    counts, problems = judged(logged(tmp_path, *[grant(approval())] * 2), WORLD.ca.certificate_pem)
    assert counts == {"anchored": 1, "broken": 1} and len(problems) == 1


def test_T36_a_log_that_keeps_orders_keeps_one_for_each_answer_and_an_older_log_none(tmp_path: Path) -> None:
    bare = {name: value for name, value in grant(approval("bob")).items() if name != "orders"}
    assert judged(logged(tmp_path / "old", bare, bare), WORLD.ca.certificate_pem) == ({"unsigned": 2}, [])
    assert judged(logged(tmp_path / "upgraded", bare, grant(approval())))[1] == []
    counts, problems = judged(logged(tmp_path / "stripped", grant(approval()), bare), WORLD.ca.certificate_pem)
    assert counts == {"anchored": 1, "broken": 1} and len(problems) == 1


BY_NOBODY: dict[str, tuple[str, dict[str, Any], bool]] = {
    # event, its fields, and whether a person's order is behind every such record
    "a grant": ("approval.grant", {"release": "r1/hospital_a/0"}, True),
    "a grant that ends a halt": ("approval.grant", {"since": 5}, True),
    "a deferral": ("release.defer", {"release": "r1/hospital_a/0", "until": 9}, True),
    "an order to resume": ("silo.resume", {}, True),
    "an accepted clock": ("clock.accept", {"halt": PAYLOAD}, True),
    "an accepted adapter": ("adapter.accept", {"adapter": PAYLOAD}, True),
    "the end of a hold whose bytes were changed": ("approval.deny", {"release": "r1/hospital_a/0"}, False),
    "a start": ("policy.load", {"name": "pubswap"}, False),
    "a ledger that was refused": ("ledger.check", {"ledger_groups": 1, "log_groups": 2}, False),
}


@pytest.mark.parametrize("name", BY_NOBODY)
def test_T36_what_only_a_person_orders_is_never_recorded_without_the_order(tmp_path: Path, name: str) -> None:
    event, detail, ordered = BY_NOBODY[name]
    for keeps in (True, False):  # a log of an earlier version keeps none
        folder = tmp_path / str(keeps)
        with open_log(folder, SILO, clock=Clock(setting.NOW)) as log:
            log.append("start")
            if keeps:
                log.append("approval.grant", **grant(approval()))
            log.append(event, kind="lora.factors", detail=detail)
            log.checkpoint()
        counts, problems = judged(folder, WORLD.ca.certificate_pem)
        expected = {"anchored": 1} if keeps else {}
        assert counts == expected | ({"broken": 1} if keeps and ordered else {})
        assert [problem.partition(":")[0] for problem in problems] == ["record 2"] * (keeps and ordered)


@pytest.mark.parametrize(("event", "broken"), [("approval.grant", True), ("approval.deny", False)])
def test_T36_only_a_no_was_ever_interrupted(tmp_path: Path, event: str, broken: bool) -> None:
    """An earlier version may have kept a no without what was signed, before a kill; a yes it recorded first."""
    bare = {name: value for name, value in grant(approval("bob")).items() if name != "orders"}
    with open_log(tmp_path / "log", SILO, clock=Clock(setting.NOW)) as log:
        log.append("approval.grant", **grant(approval()))
        log.append(event, **bare, reasons=["INTERRUPTED"])
        log.checkpoint()
    counts, problems = judged(tmp_path / "log")
    assert counts == {"signed": 1, "broken" if broken else "unsigned": 1} and bool(problems) == broken


def test_T36_the_report_counts_no_grant_that_nobody_signed(tmp_path: Path) -> None:
    nobody = grant(approval(), detail={"release": "r2/hospital_a/0"})
    del nobody["orders"]
    made = audit_report([logged(tmp_path, grant(approval()), nobody)])
    assert {item["release"]: item["given"] for item in made["approvals"]} == {
        "r1/hospital_a/0": 1, "r2/hospital_a/0": 0,
    }  # fmt: skip
    assert [each["order"] for item in made["approvals"] for each in item["answers"]] == ["signed", "broken"]
    assert "what was signed does not hold" in page(made)


@pytest.mark.parametrize("changed", [{"note": "ab" * 32}, {"reason": "TIMING"}, {}])
def test_T36_a_no_is_bound_to_its_note_and_reason(tmp_path: Path, changed: dict[str, str]) -> None:
    shown = {"release": "r1/hospital_a/0", "digest": PAYLOAD, "policy_digest": POLICY}
    order = WORLD.command("approvals.reject", shown | {"reason_code": "CONTENT", "reason": NOTE})
    detail = {"note": changed.get("note", sha256_hex(order.sealed))}
    record = with_detail(grant(order, reasons=[changed.get("reason", "CONTENT")]), **detail)
    counts, problems = judged(logged(tmp_path, record, event="approval.deny"), WORLD.ca.certificate_pem)
    assert (counts, len(problems)) == (({"broken": 1}, 1) if changed else ({"anchored": 1}, 0))


GIVEN: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    # event: the command and its arguments; what a record says of it, and what one says that fits no more
    "silo.resume": ("resume", {"run": "run-1"}, {"run": "run-1"}, {"run": "run-2"}),
    "silo.stop": ("stop", {"run": ""}, {}, {"detail": {"request": "request-of-another"}}),
    "run.abort": ("run.abort", {"run": "run-1", "round": 1}, {"run": "run-1"}, {"run": "run-2"}),
    "run.submit": ("run.submit", {"text": "run: run-1", "source": "x"}, {"run": "run-1"}, {"event": "run.start"}),
    "adapter.accept": (
        "adapter.accept", {"run": "run-1", "digest": PAYLOAD}, {"run": "run-1", "detail": {"adapter": PAYLOAD}},
        {"detail": {"adapter": POLICY}},
    ),
    "release.defer": (
        "approvals.defer", {"release": "r1", "digest": PAYLOAD, "policy_digest": POLICY, "until_seconds": 9.5},
        {"detail": {"release": "r1", "until": 9}}, {"detail": {"release": "r1", "until": 8}},
    ),
    "approval.grant": (
        "approvals.release", {"kind": "public.responses", "digest": PAYLOAD}, {"kind": "public.responses"},
        {"kind": "lora.factors"},
    ),
    "clock.accept": (
        "clock.accept", {"halt": PAYLOAD}, {"detail": {"halt": PAYLOAD}}, {"detail": {"halt": POLICY}},
    ),
    "policy.load": ("policy.reload", {}, {}, {"event": "policy.reload_refused", "detail": {"person": "bob"}}),
    "transfer.import": ("transfer.import", {"path": "/home/alice/mail/plan.fsx"}, {}, {"event": "transfer.export"}),
}  # fmt: skip


@pytest.mark.parametrize("event", GIVEN)
def test_T36_every_order_of_a_person_is_bound_to_its_record(tmp_path: Path, event: str) -> None:
    name, arguments, told, changed = GIVEN[event]
    order = WORLD.command(name, arguments)
    detail = {"person": "alice", "certificate": order.certificate_fingerprint, "request": order.request_id}
    base = {"policy": {"effective": POLICY}, "orders": [dict(order.order)]}
    for say, count in ((told, "anchored"), (told | changed, "broken")):
        fields = {name: value for name, value in say.items() if name not in ("event", "detail")}
        fields |= {"detail": detail | say.get("detail", {})}
        log = logged(tmp_path / count, base | fields, event=say.get("event", event))
        assert judged(log, WORLD.ca.certificate_pem)[0] == {count: 1}
    assert b"/home" not in base64.b64decode(order.order["signed"])


# ---- when a certificate was valid ------------------------------------------------------------------------


def test_T36_a_certificate_that_had_ended_signs_nothing(tmp_path: Path) -> None:
    """By the time that the record tells, where nobody countersigned it; a certificate lasts eight hours here."""
    for hours, count in ((7, {"anchored": 1}), (9, {"broken": 1})):
        log = logged(tmp_path / str(hours), grant(approval(at=hours * HOUR)), at=hours * HOUR)
        assert judged(log, WORLD.ca.certificate_pem)[0] == count
        assert judged(log)[0] == {"signed": 1}  # without the CA nothing is said of the certificate


@pytest.mark.parametrize(
    ("hours", "verdict"), [(1, "anchored"), (20, "late"), (24 * 3, "broken")], ids=["at once", "next day", "days later"]
)
def test_T36_a_certificate_is_judged_at_the_first_countersignature(tmp_path: Path, hours: int, verdict: str) -> None:
    """The log's owner dates a record as he likes; a witness of it does not."""
    clock = Clock(setting.NOW)
    silo, coordinator = (
        open_log(tmp_path / "silo", SILO, clock=clock),
        open_log(tmp_path / "c", COORDINATOR, clock=clock),
    )
    with silo, coordinator:
        introduce(silo, coordinator)
        silo.append("start")
        coordinator.append("start")
        silo.append("approval.grant", **grant(approval()))
        for after in (hours, 24 * 300):  # later ones change nothing
            clock.now = setting.NOW + after * HOUR
            exchange(silo, coordinator)
            exchange(silo, coordinator)
    counts, problems = judged(tmp_path / "silo", WORLD.ca.certificate_pem)
    assert counts == {verdict: 1} and bool(problems) == (verdict == "broken")


@pytest.mark.parametrize("hours", [1, 24 * 3])
def test_T36_an_invented_countersignature_dates_no_record_where_another_party_s_log_is_given(
    tmp_path: Path, hours: int
) -> None:
    clock, ghost = Clock(setting.NOW), "spiffe://net/silo/ghost"
    with open_log(tmp_path / "silo", clock=clock) as silo, open_log(tmp_path / "c", COORDINATOR, clock=clock) as other:
        introduce(silo, other)
        other.append("start")
        silo.append("approval.grant", **grant(approval()))
        clock.now += hours * HOUR
        exchange(silo, other)
        exchange(silo, other)
        silo.trust_peer(ghost, OTHER_KEY.public_key())
    logs = [tmp_path / "silo", tmp_path / "c"]

    def verdicts(*logs: Path) -> dict[str, int]:
        results = verify_logs(list(logs))
        check_orders(results, logs, [WORLD.ca.certificate_pem])
        return {name: count for name, count in results[0]["orders"].items() if count}

    honest = {"anchored" if hours == 1 else "broken": 1}
    assert verdicts(*logs) == verdicts(logs[0]) == honest
    for note in (logs[0] / "checkpoints").iterdir():
        note.write_text(cosign(note.read_text(), ghost, OTHER_KEY, int(setting.NOW)))
    assert verdicts(logs[0]) == {"anchored": 1}  # alone a log shows who vouches for it, and no more
    assert verdicts(*logs) == honest


def test_T36_a_reduced_log_and_an_export_keep_what_was_signed(tmp_path: Path) -> None:
    """Retention takes whole records away; what is left, and what is handed out, verifies as it did."""
    clock = Clock(setting.NOW)
    with open_log(tmp_path / "silo", SILO, clock=clock, segment_bytes_max=6000) as log:
        for number in range(8):
            clock.now = setting.NOW + number * 60
            order = approval(("alice", "bob")[number % 2], at=number * 60.0)
            log.append("approval.grant", **with_detail(grant(order), person=order.person))
        clock.now += HOUR
        log.append("stop")
        assert log.remove_old(int((setting.NOW + 200) * 1000)) > 0
        log.checkpoint()
    counts, problems = judged(tmp_path / "silo", WORLD.ca.certificate_pem)
    assert problems == [] and 0 < counts["anchored"] < 8
    left = [record for record in records(tmp_path / "silo") if record["event"] == "approval.grant"]
    out = CliRunner().invoke(app, ["export", "--log", str(tmp_path / "silo"), "--out", str(tmp_path / "export")])
    assert out.exit_code == 0 and check(tmp_path / "export", "")["verified"]
    lines = (tmp_path / "export" / "records.jsonl").read_bytes().splitlines()
    handed_out = [record for record in map(json.loads, lines) if record["event"] == "approval.grant"]
    assert [record["orders"] for record in handed_out] == [record["orders"] for record in left] and left


def test_T36_a_CA_of_a_federation_certifies_no_person(tmp_path: Path) -> None:
    federation = create_ca("net", kind="federation", not_before=NOW - timedelta(days=1), days=30)
    with pytest.raises(UsageError, match="federation"):
        judged(logged(tmp_path, grant(approval())), federation.certificate_pem)


# ---- policies, and the coordinator -----------------------------------------------------------------------


def test_T36_a_looser_policy_keeps_what_its_proposer_and_its_approvers_signed(tmp_path: Path) -> None:
    two = ("policy_change: 1", "policy_change: 2")
    place = PolicySite(tmp_path / "site")
    place.policy_is(text_of(two))
    place.start()
    looser = text_of(two, ("min_peers: 2", "min_peers: 1"))
    place.policy_is(looser)
    path, proposal = place.propose(looser)
    for person in ("bob", "carol"):
        place.approve(path, proposal, person)
    place.start()
    log, pem = tmp_path / "site" / "state" / "audit", place.authority.certificate_pem
    with place.audit() as audit:
        audit.checkpoint()
    assert judged(log, pem) == ({"anchored": 1}, [])
    (record,) = [each for each in records(log) if each.get("orders")]
    assert len(record["orders"]) == 3

    def told(**changes: Any) -> tuple[dict[str, int], list[str]]:
        folder = tmp_path / f"forged-{len(list(tmp_path.iterdir()))}"
        fields = {name: record[name] for name in ("policy", "detail", "orders")}
        link = {"approvals": record["link"]["approvals"]}
        with AuditLog(
            folder, origin=setting.SILO, key=OUR_KEY, actor=setting.SILO, clock=Clock(record["t"] / 1000),
            reserve_bytes=0,
        ) as forgery:  # fmt: skip
            forgery.append("policy.load", **(fields | {"link": link} | changes))
            forgery.checkpoint()
        return judged(folder, pem)

    assert told() == ({"anchored": 1}, [])
    for wrong in (
        {"policy": {"effective": "0" * 64}}, {"link": {"approvals": ["bob", "dave"]}},
        {"orders": record["orders"][:2]}, {"orders": [*record["orders"][:2], record["orders"][1]]},
        {"detail": record["detail"] | {"proposal": "0" * 64}}, {"detail": record["detail"] | {"proposer": "bob"}},
    ):  # fmt: skip
        assert told(**wrong)[0] == {"broken": 1}, wrong


def records(log: Path) -> list[dict[str, Any]]:
    lines = [line for path in sorted(log.glob("*.jsonl")) for line in path.read_bytes().splitlines()]
    assert parse_checkpoint((sorted((log / "checkpoints").glob("*.note"))[-1]).read_text().partition("\n\n")[0] + "\n")
    return [json.loads(line) for line in lines]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """Two persons approve each update."""
    text = setting.policy_text(first_rounds=2)
    place = text.index("  lora.factors:")
    text = text[:place] + text[place:].replace("persons: 1", "persons: 2", 1)
    with closing(Bench(tmp_path / "silo", setting.policy_of(text))) as made:
        yield made


def held(bench: Bench, value: str = "factors") -> Release:
    offered = bench.factors() if value == "factors" else bench.responses()
    assert isinstance(offered, Held)
    return bench.releases.hold(offered, deadline_seconds=None)


def arguments(bench: Bench, release: Release) -> dict[str, Any]:
    return {
        "release": release.id, "digest": release.digest, "policy_digest": bench.judge.policy.digest,
        **bench.opened(release.id),
    }  # fmt: skip


def shown(bench: Bench, release: Release) -> str:
    return str(bench.view(bench.ledger.release(release.id))["shown"])


def test_T36_a_client_that_did_not_fetch_the_facts_cannot_approve(bench: Bench) -> None:
    release = held(bench)
    right = arguments(bench, release)
    for signed, code in ((None, "NOT_SHOWN"), ("", "NOT_SHOWN"), ("0" * 64, "STALE_VIEW"), (7, "STALE_VIEW")):
        with pytest.raises(ConflictError) as refused:
            bench.releases.approve(command("approvals.approve", right | {"shown": signed}))
        assert refused.value.code == code
    assert bench.ledger.approvals(release.id) == [] and bench.events("approval.grant") == []
    assert bench.releases.approve(command("approvals.approve", right))[1] is None  # the counterpart: it counts
    assert len(bench.ledger.approvals(release.id)) == 1


def test_T36_a_no_needs_nothing_shown(bench: Bench) -> None:
    release = held(bench)
    no = {name: value for name, value in arguments(bench, release).items() if name != "shown"}
    bench.releases.reject(command("approvals.reject", no | {"reason_code": "OTHER"}))
    assert bench.ledger.release(release.id).state == "rejected"


def test_T36_what_moves_while_a_release_waits_is_not_in_what_is_signed(bench: Bench) -> None:
    """Else a person who read for a minute could not answer, nor a second one after the first."""
    release = held(bench)
    before = shown(bench, release)
    bench.clock_now += 3600
    bench.releases.defer(
        command("approvals.defer", arguments(bench, release) | {"until_seconds": bench.clock_now + 60}, person="carol")
    )
    bench.releases.approve(command("approvals.approve", arguments(bench, release), person="alice"))
    assert shown(bench, release) == before
    with closing(bench.restart()) as again:
        assert shown(again, release) == before


def test_T36_what_a_person_decides_by_is_in_what_is_signed(bench: Bench) -> None:
    release = held(bench)
    before = shown(bench, release)
    for changed in (
        replace(release, facts={**release.facts, "records": 7}), replace(release, persons=1),
        replace(release, revision=2), replace(release, payload_bytes=release.payload_bytes + 1),
        replace(release, recorded={**release.recorded, "sha256": "0" * 64}), replace(release, id="r1/hospital_a/7"),
    ):  # fmt: skip
        assert bench.view(changed)["shown"] != before
    assert bench.view(replace(release, expires_at=release.expires_at + 60))["shown"] == before
    bench.releases.destination["address"] = "elsewhere:1"
    assert bench.view(release)["shown"] != before


def facts_shown(bench: Bench, release: Release) -> str:
    return str(bench.view(bench.ledger.release(release.id))["shown_facts"])


def test_T36_how_many_of_a_site_s_records_are_behind_an_update_is_in_what_is_signed(bench: Bench) -> None:
    release = held(bench)
    kept, before = bench.ledger.kept_of_release(release.id), facts_shown(bench, release)
    found = {before}
    for records in (78, 7800):
        bench.ledger.keep_of_release(release.id, kept | {"private_records": records})
        found.add(facts_shown(bench, release))
    assert len(found) == 3
    bench.ledger.keep_of_release(release.id, kept)
    assert facts_shown(bench, release) == before


def test_T36_what_a_yes_leaves_to_the_policy_is_in_what_is_signed(tmp_path: Path) -> None:
    """Also where the digest of the policy is the same, as of a guard that says another thing of the same policy."""
    policy = setting.policy_of(setting.policy_text(first_rounds=2))
    block = policy.file.egress.lora_factors
    assert block is not None
    found: dict[str, str] = {}
    for name, asked in {"once": (1, 0), "always": (1, 1), "again": (1, 1)}.items():
        asks = block.approvals.model_copy(update=dict(zip(("first_rounds", "then"), asked, strict=True)))
        egress = policy.file.egress.model_copy(update={"lora_factors": block.model_copy(update={"approvals": asks})})
        said = replace(policy, file=policy.file.model_copy(update={"egress": egress}))
        with closing(Bench(tmp_path / name, said)) as made:
            release = held(made)
            plan = setting.PLAN.model_copy(update={"silos": setting.PLAN.silos[:2], "quorum": 2, "rounds": 4})
            made.ledger.start_run(release.run, plan.canonical())
            consequences = made.view(release)["consequences"]
            assert ("UNASKED" in consequences["later"]) is (name == "once") and "2 of 2" in consequences["reject"]
            found[name] = facts_shown(made, release)
    assert found["always"] == found["again"] != found["once"]


@pytest.mark.parametrize("kind", ["factors", "responses"])
def test_T36_every_sentence_that_does_not_move_is_in_what_is_signed(tmp_path: Path, kind: str) -> None:
    """Whoever has the release finds the digest by what the screen said, and no other by another sentence."""
    with closing(Bench(tmp_path / "silo", asking_for_answers())) as bench:
        release = held(bench, kind)
        view = bench.view(release)
        (leaves,), consequences = view["leaves"]["kinds"], view["consequences"]
        sentences = {
            "asked_by": view["asked_by"], "to": view["leaves"]["destination"]["name"], "says": leaves["says"],
            "items": leaves["items"], "stays": "; ".join(view["leaves"]["stays"]), "budget": view["budget"],
            "findings": view["findings"], "approve": consequences["approve"], "later": consequences["later"],
            "reject": consequences["reject"],
        }  # fmt: skip

        def digest(**changes: str) -> str:
            return shown_facts(
                release, name=view["policy"]["name"], roles=view["approvers"]["roles"],
                address=view["leaves"]["destination"]["address"], base=view["base"]["now"],
                sentences=sentences | changes,
            )  # fmt: skip

        assert digest() == view["shown_facts"]
        others = {digest(**{name: f"{said} or not"}) for name, said in sentences.items()}
        assert len(others) == len(sentences) and view["shown_facts"] not in others


def test_T36_T40_the_digest_of_what_was_shown_confirms_no_guess_of_an_answer(bench: Bench) -> None:
    """It is in the log: the site's key is in it, by the keyed digest that the log names."""
    with closing(Bench(bench.folder.with_name("other"), asking_for_answers())) as first:
        release = held(first, "responses")
        assert set(release.recorded) == {"bytes", "hmac_sha256"}
        other_key = replace(release, recorded={**release.recorded, "hmac_sha256": "0" * 64})
        assert first.view(release)["shown"] != first.view(other_key)["shown"]
        same_facts = replace(release, digest="0" * 64)  # the plain digest alone changes nothing
        assert first.view(release)["shown"] == first.view(same_facts)["shown"]


def asking_for_answers() -> Any:
    text = setting.policy_text(first_rounds=2)
    place = text.index("  public.responses:")
    return setting.policy_of(text[:place] + text[place:].replace("first_rounds: 0", "first_rounds: 1", 1))


@pytest.mark.parametrize("changed", ["", "facts", "payload", "nothing shown"])
def test_T36_a_verifier_finds_the_digest_of_what_was_shown(bench: Bench, tmp_path: Path, changed: str) -> None:
    release = held(bench)
    bench.releases.approve(WORLD.command("approvals.approve", arguments(bench, release)))
    (record,) = bench.events("approval.grant")
    fields = {
        name: record[name] for name in ("kind", "run", "round", "step", "payload", "policy", "detail", "orders")
    }  # fmt: skip
    match changed:
        case "facts":
            fields["detail"] = fields["detail"] | {"facts": "0" * 64}
        case "payload":
            fields["payload"] = fields["payload"] | {"sha256": "0" * 64}
        case "nothing shown":
            fields["detail"] = {name: value for name, value in fields["detail"].items() if name != "facts"}
    with AuditLog(
        tmp_path / "log", origin=setting.SILO, key=OUR_KEY, actor=setting.SILO, clock=Clock(record["t"] / 1000),
        reserve_bytes=0,
    ) as log:  # fmt: skip
        log.append("approval.grant", **fields)
        log.checkpoint()
    results = verify_logs([tmp_path / "log"])
    check_orders(results, [tmp_path / "log"], [WORLD.ca.certificate_pem])
    assert results[0]["verified"] is not bool(changed)
