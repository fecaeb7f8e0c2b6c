"""What is kept of a release beside its facts: its base, where its screens found something, where it went (threat T36);
and at a start the noes that stand in the log alone.

Texts are screened again before each yes, since a canary file or an index may say more by now than when the hold began.
Does not stop: what the site's screens learn after the yes. The decision that lets the release go screens once more, and
by a policy that withholds or refuses it denies what it finds then.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from fedsilo.protocol.codec import Buffer
from fedsilo.protocol.services import OUTBOUND_KINDS, TENSOR_KINDS
from policies import engine
from policies.load import Policy
from policies.screening import Screened, screen_facts, texts_of
from silo.guard.gate import Gate
from silo.guard.ledger import Approval, Ledger, Release
from silo.guard.release_findings import ends_of
from silo.guard.release_view import hit_places, policy_content


class ReleaseKeeping:
    """Args:
    gate: runs the screens, and knows where the run stands.
    ledger: keeps it.
    """

    def __init__(self, gate: Gate, ledger: Ledger) -> None:
        self._gate = gate
        self._ledger = ledger

    def keep_beside(self, release: Release, payload: Buffer) -> None:
        """What a later look at this release is compared with, and where its screens found something."""
        view = self._gate.view
        kept: dict[str, Any] = {}
        if release.kind in TENSOR_KINDS and view.round == release.round and view.base_digest:
            kept = {"base": view.base_digest, "ended_in": view.evaluated.get(release.round - 1, "")}
        if view.training is not None and view.training.of:
            kept["private_records"] = view.training.of
        if release.facts.get("responses_hit"):
            kept["hits"] = self._screened(release, payload)[1]
        self._ledger.keep_of_release(release.id, kept)

    def found_since(self, release: Release, payload: Buffer) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """What the screens find in a held release at this moment, where that is not what people were shown.

        Returns:
            Its facts and what is kept beside them, as they are now; None where nothing changed.
        """
        if "screens" not in release.facts or release.kind not in OUTBOUND_KINDS:
            return None
        found, places = self._screened(release, payload)
        kept = self._ledger.kept_of_release(release.id)
        facts, beside = {**release.facts, **found}, {**kept, "hits": places}
        if facts == release.facts and places == kept.get("hits", []):
            return None
        return facts, beside

    def _screened(self, release: Release, payload: Buffer) -> tuple[dict[str, Any], list[Any]]:
        """Facts of one run of the screens, for a held message only, whose time nobody outside can tell from a person's
        (T18); and which answers they found something in, with the screens, as the ledger gives them back."""
        message, read = self._gate.found_again(release.kind, release.run, release.round, release.step, payload)
        screened: Screened | None = read.screened
        facts = screen_facts(screened, len(list(texts_of(message.body))))
        places = [] if screened is None or screened.failed else hit_places(message.body, screened.hits)
        told: tuple[dict[str, Any], list[Any]] = tuple(json.loads(json.dumps([facts, places])))
        return told

    def keep_sent(self, release: Release, destination: Mapping[str, str]) -> None:
        """Where it goes and by which policy, for the next release of its kind.

        Args:
            release: that the gate has let go.
            destination: as it was when the last person's findings were looked at.
        """
        kept = self._ledger.kept_of_release(release.id) | {"destination": dict(destination)}
        policy = self._gate.policy
        self._ledger.keep_of_release(release.id, kept)
        self._ledger.keep_policy_of_sent(release.kind, policy_content(policy.file, policy.digest))
        if ends_of(self._ledger.far_end.get("destination", {})) != ends_of(destination):
            self._ledger.keep_far_end(
                {
                    "destination": dict(destination), "release": release.id, "run": release.run,
                    "round": release.round, "at": release.requested_at,
                }
            )  # fmt: skip


def keep_recorded_noes(ledger: Ledger, newest: Iterable[Mapping[str, Any]]) -> None:
    """At a start, before anybody answers: a no that a kill kept from the ledger stands in the log, and counts (T36).
    The text that came with it is lost.

    Args:
        ledger: of this site.
        newest: records of our log. Nothing else is recorded between a no and its keeping, so it is among them.

    Raises:
        OperationError: it cannot be written yet.
    """
    noes = [record for record in newest if record["event"] == "approval.deny" and record["detail"].get("person")]
    if not noes:
        return
    held = {release.id: release for release in ledger.releases("held")}
    for record in noes:
        detail = record["detail"]
        release = held.get(str(detail.get("release", "")))
        if release is None or record["payload"] != dict(release.recorded):
            continue
        if any(one.verdict == "reject" and one.record >= 0 for one in ledger.approvals(release.id)):
            continue
        no = Approval(
            release.id, detail["person"], detail["certificate"], release.digest, "reject", "", record["t"] / 1000,
            record=record["seq"], reason_code=record["reasons"][0],
        )  # fmt: skip
        ledger.approve(no, again=True)


def judged_by_now(ledger: Ledger, release: Release, policy: Policy) -> list[dict[str, Any]]:
    """Verdict of each rule, by the facts of the hold and the counts of this moment, as the ledger has them."""
    return [
        result.to_json() for result in engine.decide(dict(release.facts), policy, _history(ledger, release)).results
    ]


def rounds_released(ledger: Ledger, release: Release) -> int:
    """In how many other rounds of its run a message of its kind was allowed, as the rule on approvals counts them."""
    return _history(ledger, release).rounds_released


def _history(ledger: Ledger, release: Release) -> engine.History:
    now = max(ledger.latest_time, float(release.facts["now"]))
    return engine.HistoryBook.from_json(ledger.book or {}).view({**release.facts, "now": now})
