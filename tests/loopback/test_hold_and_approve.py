"""A site that wants a person's yes: nothing of its update leaves before it, and a no costs the federation only it.

hospital_a holds the first factor release of every run; hospital_b holds nothing.
"""

from __future__ import annotations

import json
import operator
from typing import Any

import pytest

from fedsilo.demo.sites import Site
from tests.loopback.conftest import HOLDS
from tests.loopback.federation import Federation, Reply, command, counted, records

pytestmark = pytest.mark.slow

TAKES_PART = ["hospital_a", "hospital_b"]
ALL = [*TAKES_PART, "hospital_c"]  # without the one that is refused, two are left: one update alone is none (T58)


def approvals(sites: Federation, *arguments: object) -> Reply:
    return command("silo", "approvals", *arguments, "--config", sites.site(HOLDS).config)


def held_release(sites: Federation, *, number: int = 1) -> dict[str, Any]:
    """What `approvals list` and then `approvals show` say once something of round `number` is held."""
    sites.until_state(HOLDS, lambda state: state["held"])
    listed = approvals(sites, "list").data["releases"]
    assert [(row["kind"], row["round"], row["state"]) for row in listed] == [("lora.factors", number, "held")]
    shown: dict[str, Any] = approvals(sites, "show", listed[0]["id"]).data
    assert shown["digest"] == listed[0]["digest"]
    return shown


def answer(sites: Federation, verb: str, shown: dict[str, Any], person: str, **instead: str) -> Reply:
    digests = {"digest": shown["digest"], "policy": shown["policy"]["digest"], **instead}
    opened = [word for one in shown["noticed"] for word in ("--ack-finding", one["id"])]
    more = (
        ["--reason", "CONTENT", "--text", "the norm looks odd to me"]
        if verb == "reject"
        else [*opened, "--expect-shown", shown["shown"]]
    )
    return approvals(
        sites, verb, shown["id"], "--operator", person, "--expect-digest", digests["digest"],
        "--expect-policy", digests["policy"], *more,
    )  # fmt: skip


def factors_sent(sites: Federation, silo: str, run: str) -> list[dict[str, Any]]:
    return [
        line
        for line in records(sites.site(silo).audit_log)
        if line["event"] == "egress.sent" and line["kind"] == "lora.factors" and line["run"] == run
    ]


def test_a_release_leaves_only_after_the_right_person_approved_exactly_its_bytes(sites: Federation) -> None:
    assert sites.submit("approved", silos=TAKES_PART).exit_code == 0
    shown = held_release(sites)
    assert shown["policy"]["counts"]["deny"] == 0 and shown["leaves"]["kinds"][0]["kind"] == "lora.factors"
    assert shown["approvers"] == {"needed": 1, "roles": ["approver"], "people": ["alice", "bob"], "given": []}
    assert factors_sent(sites, HOLDS, "approved") == []

    wrong_bytes = answer(sites, "approve", shown, "alice", digest="0" * 64)
    assert (wrong_bytes.exit_code, wrong_bytes.envelope["error"]["code"]) == (6, "STALE_VIEW")
    wrong_policy = answer(sites, "approve", shown, "alice", policy="0" * 64)
    assert (wrong_policy.exit_code, wrong_policy.envelope["error"]["code"]) == (6, "STALE_VIEW")
    assert answer(sites, "approve", shown, "dave").exit_code == 4  # may look, may not approve
    # another site's person, with a certificate that is valid there
    stranger = sites.site("hospital_b").folder / "id"
    for suffix in (".crt", ".key"):
        copy = sites.site(HOLDS).folder / "id" / f"mallory{suffix}"
        copy.write_bytes((stranger / f"alice{suffix}").read_bytes())
        copy.chmod(0o600)
    assert answer(sites, "approve", shown, "mallory").exit_code == 4
    assert factors_sent(sites, HOLDS, "approved") == []

    given = answer(sites, "approve", shown, "bob").data
    assert given["release"] == shown["id"] and len(given["given"]) == given["needed"] == 1
    record = sites.ended("approved")
    assert record["state"] == "finished"
    assert [row["participants"] for row in record["rounds"]] == [TAKES_PART]
    sent = factors_sent(sites, HOLDS, "approved")
    assert [line["payload"]["sha256"] for line in sent] == [shown["digest"]]
    uploads = [row["sha256"] for row in record["rounds"][0]["uploads"] if row["kind"] == "lora.factors"]
    assert len(uploads) == 2 and shown["digest"] in uploads
    assert answer(sites, "approve", shown, "alice").exit_code == 6  # no longer held
    grants = [line for line in records(sites.site(HOLDS).audit_log) if line["event"] == "approval.grant"]
    assert [(line["detail"]["person"], line["payload"]["sha256"]) for line in grants] == [("bob", shown["digest"])]


def test_T36_what_people_signed_verifies_by_the_site_s_CA_while_its_silo_runs(sites: Federation) -> None:
    site, other = sites.site(HOLDS), sites.site("hospital_b")
    ordered = [line for line in records(site.audit_log) if "orders" in line]
    assert "approval.grant" in {line["event"] for line in ordered}  # the tests above gave them

    def verified(of: str) -> dict[str, int]:
        told = command(
            "fedsilo", "audit", "verify", site.audit_log, "--site-ca", sites.site(of).folder / "id/site_ca.crt"
        )
        (result,) = told.data
        assert result["verified"], result["problems"]
        return {name: count for name, count in result["orders"].items() if count}

    assert verified(site.name) == {"anchored": len(ordered)}
    assert verified(other.name) == {"signed": len(ordered)}  # whose CA certifies nobody here


def test_what_left_can_be_read_by_an_approver_and_the_log_says_who_did(sites: Federation) -> None:
    site = sites.site(HOLDS)
    left = [line for line in records(site.audit_log) if line["event"] == "egress.sent"]
    sent = next(line for line in left if line["kind"] in ("public.responses", "metrics.eval"))

    def show(person: str) -> Reply:
        return command(
            "fedsilo", "audit", "show", sent["seq"], "--payload", "--config", site.config, "--operator", person
        )

    assert show("dave").exit_code == 4  # may look at the queue, not into what left
    assert [line for line in records(site.audit_log) if line["event"] == "payload.read"] == []
    shown = show("bob").data
    assert shown["kind"] == sent["kind"] and shown["bytes"] == sent["payload"]["bytes"] and shown["content"]
    (read,) = [line for line in records(site.audit_log) if line["event"] == "payload.read"]
    assert (read["detail"]["person"], read["link"]["decision"]) == ("bob", sent["link"]["decision"])
    journal = (site.folder / "state" / "requests.jsonl").read_text(encoding="utf-8")
    assert "payload.read" not in journal and json.dumps(shown["content"])[:40] not in journal


def test_a_rejected_release_never_leaves_and_the_round_goes_on_without_it(sites: Federation) -> None:
    assert sites.submit("rejected", silos=ALL).exit_code == 0
    shown = held_release(sites)
    # what would leave is read before the answer, by who may, and put off by one person, which stops nothing
    assert approvals(sites, "payload", shown["id"], "--operator", "dave").exit_code == 4
    read = approvals(sites, "payload", shown["id"], "--operator", "bob").data
    assert read["sha256"] == shown["digest"] and read["tensors"][0]["shape"] and "ticket" not in read
    newest = [line for line in records(sites.site(HOLDS).audit_log) if line["event"] == "payload.read"][-1]
    assert newest["detail"]["person"] == "bob" and newest["detail"]["release"] == shown["id"]
    digests = ("--expect-digest", shown["digest"], "--expect-policy", shown["policy"]["digest"])
    assert approvals(sites, "defer", shown["id"], "--operator", "bob", "--minutes", "5").exit_code == 2  # no proof
    too_late = approvals(sites, "defer", shown["id"], "--operator", "bob", "--minutes", "500000", *digests)
    assert too_late.exit_code == 6
    assert approvals(sites, "diff", shown["id"]).data["against"]["approved_by"] == ["bob"]
    assert [row["state"] for row in approvals(sites, "history").data["releases"]] == ["held", "approved"]
    assert answer(sites, "reject", shown, "dave").exit_code == 4
    assert answer(sites, "reject", shown, "alice").exit_code == 0
    record = sites.ended("rejected")
    assert record["state"] == "finished"
    assert [row["participants"] for row in record["rounds"]] == [["hospital_b", "hospital_c"]]
    # It trains on and measures the others' adapter; only its update is kept back.
    assert sorted(record["rounds"][0]["metrics"]) == ALL
    assert factors_sent(sites, HOLDS, "rejected") == []
    assert len(factors_sent(sites, "hospital_b", "rejected")) == 1

    # What the coordinator got of it: that this silo declined; neither reason nor digest nor person.
    arrived = [
        line
        for line in records(sites.sites.coordinator.audit_log)
        if line["event"] == "ingress.decision" and line["run"] == "rejected" and line["peer"].endswith(f"/{HOLDS}")
    ]
    kinds = {line["kind"] for line in arrived if line["round"] == 1}
    assert "control.declined" in kinds and "lora.factors" not in kinds
    said = json.dumps([line for line in arrived if line["kind"] == "control.declined"])
    for private in (shown["digest"], "CONTENT", "odd", "alice"):
        assert private not in said
    denied = [line for line in records(sites.site(HOLDS).audit_log) if line["event"] == "approval.deny"]
    assert [(line["detail"]["person"], line["reasons"]) for line in denied] == [("alice", ["CONTENT"])]


def test_after_that_both_sides_still_count_the_same_and_the_logs_verify(sites: Federation) -> None:
    def counts(site: Site) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
        sent = counted(records(site.audit_log), "egress.sent")
        got = counted(records(sites.sites.coordinator.audit_log), "ingress.decision", f"/silo/{site.name}")
        for each in (sent, got):  # a window of polls is counted by each side when that side ends it
            each.pop("control.poll", None)
            each.pop("control.heartbeat", None)
        return sent, got

    for site in sites.sites.silos:
        # a silo shows checkpoints of its log at any time, so the two logs may be read with one under way
        sites.until_state(site.name, lambda _, site=site: operator.eq(*counts(site)))
    verdicts = command("fedsilo", "audit", "verify", *(site.audit_log for site in sites.sites.all())).data
    assert [row["verified"] for row in verdicts] == [True] * 4
