"""What people are shown of a held release before they answer (console design 5): facts and digests, never content.

Everything is set beside the last release of the same kind that left: where it went and whose certificate was there, the
policy it left under, its form, its size and its norm. What is unusual is a finding (`release_findings`) with outcome
`look`; findings stand first among the rules. Policy allowed all of it: a finding asks a person to look, and denies
nothing.

Does not stop: a change that is small enough each time, since each release is compared with one before it; and what
happened before the ledger began. The far end's certificate is the one that was seen when the guard last looked.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from google.protobuf.message import Message as ProtobufMessage

from certs.roles import may
from fedsilo.edge.message_index import utc
from fedsilo.treaty.errors import FedSiloError
from fedsilo.treaty.wire._generated import federation_pb2 as pb
from fedsilo.treaty.wire.services import OUTBOUND_KINDS
from policies.model import PolicyFile
from policies.screening import hits_in_words
from silo.guard.ledger import Approval, Ledger, PolicyInForce, Release
from silo.guard.messages import parsed
from silo.guard.release_findings import (
    EVIDENCE_MAX,
    SIZES,
    Against,
    Before,
    apart,
    counting,
    counts,
    ends_of,
    findings,
)

STAYS = ("prompts", "answers", "per-sample rewards", "gradients", "optimiser", "rollouts")
ON_APPROVE = "these bytes are sent once; sending cannot be called back"
ON_REJECT = "only that this silo declined is told; the round needs its quorum"  # where the run is not known
COSINE_BYTES_MAX = 64 << 20  # a fraction of a second, once for each release
_BYTES = frozenset({"round bytes", "day bytes"})
_LIMITS_IN_WORDS = {
    "day bytes": "day",
    "round bytes": "round",
    "factor sets per round": "sets",
    "responses per round": "answers",
    "tokens per round": "tokens",
}


class ReleaseView:
    """Args:
    ledger: what left, and what was kept of it. One that is opened for reading has no payloads.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._cosines: dict[tuple[str, str], float | str] = {}

    def view(
        self,
        release: Release,
        *,
        policy_name: str,
        policy_digest: str,
        policy: PolicyFile | None,
        destination: Mapping[str, str],
        roles: list[str],
        people: Sequence[str] = (),
    ) -> dict[str, Any]:
        """Everything a person must see before answering.

        Args:
            release: held, or over.
            policy_name: of the policy in force.
            policy_digest: of the same.
            policy: the same; None where this version cannot read it.
            destination: address, certificate and not_after (UTC, ISO 8601) of the far end.
            roles: who may answer.
            people: names of those, where they are known.
        """
        facts = release.facts
        kept = self._ledger.kept_of_release(release.id)
        last, since = self._last(release), self._used_since(release, destination)
        noticed = findings(
            release, self._before(release, kept, last), key=self._ledger.finding_key(), rules=release.rules,
            policy=policy, policy_digest=policy_digest, destination=destination,
        )  # fmt: skip
        given = given_of(
            item
            for item in self._ledger.approvals(release.id)
            if release.state != "held" or item.verdict != "approve" or counts(item, noticed)
        )
        # Who said yes since the rules were judged belongs to what is shown.
        count = sum(item["verdict"] == "approve" for item in given)
        rules = [
            {**rule, "measured": count, "outcome": "ok" if count >= release.persons else "hold"}
            if rule["rule"] == "approvals" and rule["outcome"] == "hold"
            else rule
            for rule in release.rules
        ]
        looks = [
            {
                "rule": one["code"].lower().replace("_", " "), "reason": one["code"], "outcome": one["outcome"],
                "measured": one["says"], "limit": None, "file": "", "line": 0,
            }
            for one in noticed
        ]  # fmt: skip
        rules = [*looks, *rules]
        outcomes = [str(rule["outcome"]) for rule in rules]
        return {
            "id": release.id,
            "digest": release.digest,
            "revision": release.revision,
            "state": release.state,
            "run": release.run,
            "round": release.round,
            "step": release.step,
            "held_since": release.requested_at,
            "expires_at": release.expires_at,
            "asked_by": f"round {release.round} of run {release.run}",
            "approvers": {"needed": release.persons, "roles": roles, "people": list(people), "given": given},
            "leaves": {
                "destination": dict(destination) | since,
                "kinds": [
                    {
                        "kind": release.kind,
                        "items": items_of(facts),
                        "bytes": release.payload_bytes,
                        "covered_by_epsilon": "NO",
                    }
                ],
                "bytes": release.payload_bytes,
                "stays": list(STAYS),
            },
            "policy": {
                "name": policy_name,
                "digest": policy_digest,
                "before": last.policy_digest if last else "",
                "counts": {name: outcomes.count(name) for name in ("ok", "look", "hold", "deny")},
                "rules": [rule for rule in rules if rule["outcome"] != "n.a."],
            },
            "budget": "; ".join(["DP off", *_used(facts, rules)]),
            "noticed": noticed,
            "findings": hits_in_words(facts) if "screens" in facts else "no text in this message",
            "difference": self._difference(release, kept, last, policy_digest, destination.get("not_after", ""), since),
            "norm": facts.get("l2"),
            "base": {"now": kept.get("base", ""), "before": kept.get("ended_in", "")},
            "consequences": {
                "approve": ON_APPROVE,
                "reject": on_reject(self._ledger.plan_of(release.run)),
            },
            "deferred": self._ledger.deferred(release.id),
        }

    # ---- what was before ---------------------------------------------------------------------------

    def last(self, release: Release) -> Against | None:
        """The last one of its kind that left before it."""
        return self._last(release)

    def _before(self, release: Release, kept: Mapping[str, Any], last: Against | None) -> Before:
        same = self._ledger.outbox_before(release, EVIDENCE_MAX, same_place=True)
        return Before(kept, last, same, self._ledger.policy_of_sent(release.kind))

    def _last(self, release: Release) -> Against | None:
        items = self._ledger.outbox_before(release, 1)
        if not items:
            return None
        item = items[0]
        held = self._ledger.approved_release(item)
        if held is None:
            return Against(item)
        return Against(item, held.facts, held.policy_digest, self._ledger.kept_of_release(held.id))

    def _used_since(self, release: Release, destination: Mapping[str, str]) -> dict[str, Any]:
        """Since which round this address and this certificate are used without a break, over all kinds."""
        known = self._ledger.far_end
        # nothing was sent yet, or it went elsewhere
        if not known or ends_of(known["destination"]) != ends_of(destination):
            return {}
        if known["release"] == release.id or known["at"] > release.requested_at:
            return {}
        return {"since_round": known["round"], "since_run": known["run"], "since": known["at"]}

    def _difference(
        self, release: Release, kept: Mapping[str, Any], last: Against | None, policy_digest: str,
        not_after: str, since: Mapping[str, Any],
    ) -> str:  # fmt: skip
        until = [f"cert to {not_after[:10]}"] if not_after else []
        if last is None:
            return "; ".join(["first release, nothing to compare", *until])
        of_run = "this run" if last.item.run == release.run else f"the earlier run {last.item.run}"
        more = release.payload_bytes - last.item.payload_bytes
        words = [f"{more:+d} bytes against round {last.item.round} of {of_run}"]
        if not last.facts:
            return "; ".join([*words, "no person was asked for that one, so only its size is known", *until])
        now, before = release.facts, last.facts
        same = list[tuple[str, bool]]()
        if "l2" in now and before.get("l2"):
            words.append(f"L2 {before['l2']:.3g}->{now['l2']:.3g} {_percent(before['l2'], now['l2'])}")
            words.append(self._cosine(release, last))
            same.append(("form", not apart(now, before)))
        if "responses" in now and "responses" in before:
            for name in ("responses", "prompts", "tokens"):
                words.append(f"{SIZES.get(name, name)} {before.get(name)}->{now.get(name)}")
        if kept.get("base"):
            if kept.get("ended_in"):
                same.append(("base", kept["ended_in"] == kept["base"]))
            elif release.round > 1:
                words.append("last base unknown")
        same.append(("policy", last.policy_digest == policy_digest))
        for told, is_so in (("same", True), ("DIFFERS", False)):
            if names := [name for name, found in same if found is is_so]:
                words.append(f"{', '.join(names)} {told}")
        if since:
            until.insert(0, f"far end since round {since['since_round']}")
        return "; ".join([*words, *until])

    def _cosine(self, release: Release, last: Against) -> str:
        """Of both updates, in words; only of what still lies here."""
        key = release.digest, last.item.digest
        if key not in self._cosines:
            self._cosines = {key: self._measured_cosine(release, last)}
        found = self._cosines[key]
        return found if isinstance(found, str) else f"cosine {found:.2f}"

    def _measured_cosine(self, release: Release, last: Against) -> float | str:
        payloads = getattr(self._ledger, "payloads", None)
        if payloads is None or last.item.digest not in payloads or release.digest not in payloads:
            return "cosine unknown: not archived"
        if release.payload_bytes + last.item.payload_bytes > COSINE_BYTES_MAX:
            return "cosine not computed: too big"
        try:
            now, before = (
                parsed(release.kind, payloads.read(digest), OUTBOUND_KINDS)[1]
                for digest in (release.digest, last.item.digest)
            )
        except FedSiloError:
            return "cosine unknown: not readable"
        if not now or not before or {n: v.shape for n, v in now.items()} != {n: v.shape for n, v in before.items()}:
            return "no cosine: other shapes"
        product = squares = others = 0.0
        for name, values in now.items():
            ours, theirs = np.ravel(values).astype(np.float64), np.ravel(before[name]).astype(np.float64)
            product += float(ours @ theirs)
            squares += float(ours @ ours)
            others += float(theirs @ theirs)
        return product / (squares * others) ** 0.5 if squares and others else "no cosine: all zero"


def given_of(answers: Iterable[Approval]) -> list[dict[str, Any]]:
    """Who answered what, when and why."""
    return [
        {
            "person": item.person,
            "verdict": item.verdict,
            "at": item.at,
            "time": utc(item.at),
            "reason": item.reason_code,
            "note": item.reason,
        }
        for item in answers
    ]


def on_reject(plan: str) -> str:
    """What comes of a no.

    Args:
        plan: canonical, of the run; empty for one that this silo has not joined, such as one whose plan is held.
    """
    if not plan:
        return ON_REJECT
    fields = json.loads(plan)
    return f"{ON_REJECT}: {fields['quorum']} of {len(fields['silos'])} silos"


def who_may_approve(people: Mapping[str, Iterable[str]], roles: Iterable[str]) -> list[str]:
    """Names of the people whose yes counts.

    Args:
        people: of the site, with their roles.
        roles: that the policy asks for.
    """
    wanted = set(roles)
    return sorted(person for person, held in people.items() if wanted & set(held) and may(held, "release.approve"))


def _used(facts: Mapping[str, Any], rules: list[dict[str, Any]]) -> list[str]:
    """What of each counting limit this release uses: before and after of the limit."""
    return [
        f"{_LIMITS_IN_WORDS[name]} {_amount(name, used - added)}->{_amount(name, used)} of "
        f"{_amount(name, most)} {100 * used / most:.0f} %"
        for name, added, used, most in counting(facts, rules)
        if most
    ]


def _amount(name: str, value: int) -> str:
    return str(value) if name not in _BYTES or value < 1024 else _bytes(value)


def _bytes(value: int) -> str:
    return f"{value / (1 << 20):.1f}M" if value >= 1 << 20 else f"{value / 1024:.0f}K"


def _percent(before: float, now: float) -> str:
    return f"{100 * (now / before - 1):+.0f} %"


def items_of(facts: Mapping[str, Any]) -> str:
    """What a release is made of, in words."""
    if "tensors" in facts:
        shape = f"rank {facts.get('rank')}, {facts.get('dtype')}, {facts.get('elements')} values"
        return f"{facts['tensors']} tensors, {shape}"
    if "responses" in facts:
        return f"{facts['responses']} responses to {facts.get('prompts')} public prompts, {facts.get('tokens')} tokens"
    if "metrics" in facts:
        return f"{len(facts['metrics'])} metrics"
    return "1 message"


def hit_places(body: ProtobufMessage, hits: Sequence[Mapping[str, int]]) -> list[tuple[str, list[str]]]:
    """Where in a message its screens found something, and the screens; never a text.

    Args:
        body: of the message.
        hits: for each text, in the order of `policies.screening.texts_of`.
    """
    if isinstance(body, pb.PublicResponses):
        places = [
            f"row {prompt.prompt_index} answer {number}"
            for prompt in body.prompts
            for number in range(1, len(prompt.responses) + 1)
        ]
    else:
        places = [f"text {number}" for number in range(1, len(hits) + 1)]
    return [(place, sorted(found)) for place, found in zip(places, hits, strict=True) if found]


def policy_content(policy: PolicyFile, digest: str) -> PolicyInForce:
    return PolicyInForce(digest, policy.model_dump(mode="json", by_alias=True), "")
