"""Answers about a held release that people see before they answer: facts and digests, never content.

Everything is set beside the last release of the same kind that left: where it went and whose certificate was there, the
policy it left under, its form, its size and its norm; where none has left, beside the last one that did not. What is
unusual is a finding (`findings.py`) with outcome `look`; findings come first among the rules. Policy allowed all of it:
a finding asks a person to look, and denies nothing.

Sentences say what it is made of and who can read it to somebody who does not know what a tensor is. The comparison has
all figures of both for whoever wants more than one line. Tensors are compared by their norms, one by one where both
messages are still here, the largest change first; a value of a tensor, an answer or a prompt is never shown.

What a yes leaves to the policy, which later rounds leave without anybody being asked, is counted as the rule counts: by
the rounds that this site released, as if every later round released one. Nobody is promised that there will be so many.

Does not show: what is in it; what changed inside of equal norms, and nothing of a message that was not archived. A
figure that is usual says nothing of what a model has learnt by heart.

Does not stop: a change that is small enough each time, since each release is compared with one before it; and what
happened before the ledger began; an approver who reads it and says yes all the same. The far end's certificate is the
one that was seen when the guard last looked.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf.message import Message as ProtobufMessage

from certs.roles import may
from fedsilo.audit.record import shown_digest
from fedsilo.control import answers
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.clocks import utc
from fedsilo.protocol.codec import Array, canonical_json, sha256_hex
from fedsilo.protocol.envelope import parsed
from fedsilo.protocol.errors import FedSiloError
from fedsilo.protocol.kinds import OUTBOUND_KINDS, TENSOR_KINDS, UPDATE_KINDS
from policies.fields import Approvals
from policies.model import Policy, PolicyFile
from policies.rules import asked
from policies.screens import hits_in_words
from silo.guard.answers.findings import (
    COUNTED,
    EVIDENCE_MAX,
    KEPT_IN,
    SIZES,
    Against,
    Before,
    apart,
    counting,
    counts,
    ends_of,
    findings,
    rejected_text,
)
from silo.guard.ledger import Approval, Ledger, OutboxItem, PolicyInForce, Release

STAYS = ("prompts", "answers", "per-sample rewards", "gradients", "optimiser", "rollouts")
BUDGET = "DP off"
ON_APPROVE = "these bytes are sent once; sending cannot be called back"
ON_APPROVE_PLAN = "this silo takes part in the run"
ON_REJECT = "only that this silo declined is told; the round needs its quorum"  # where the run is not known
USED_SHARE_SHOWN = 0.25  # of a counting limit; less of it says nothing
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
    """Builds what people are shown of a held release, beside the last one of its kind.

    Args:
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
        later: Sequence[Later] = (),
    ) -> answers.HeldRelease:
        """Return everything a person must see before answering.

        Args:
            release: held, or over.
            policy_name: of the policy in force.
            policy_digest: of the same.
            policy: the same; None where this version cannot read it.
            destination: address, certificate and not_after (UTC, ISO 8601) of the far end.
            roles: who may answer.
            people: names of those, where they are known.
            later: of a held one, what a yes leaves to the policy in later rounds.
        """
        facts = release.facts
        context = self._ledger.kept_of_release(release.id)
        last, since = self._last(release), self._used_since(release, destination)
        sentences = {
            "asked_by": f"round {release.round} of run {release.run}",
            "to": party_of(policy.federation.coordinator) if policy else "",
            "says": says(release.kind, facts, int(context.get("private_records", 0))),
            "items": items_of(facts),
            "stays": "; ".join(STAYS),
            "budget": BUDGET,
            "findings": hits_in_words(facts) if "screens" in facts else "no text in this message",
            "approve": on_approve(release.kind, policy),
            "later": "; ".join(one["says"] for one in later),
            "reject": on_reject(self._ledger.plan_of(release.run)),
        }
        told_facts = shown_facts(
            release,
            name=policy_name,
            roles=roles,
            address=destination.get("address", ""),
            base=context.get("base", ""),
            sentences=sentences,
        )
        earlier = self._ledger.releases_before(release, EARLIER_MAX)
        noticed = findings(
            release, self._before(release, context, last), key=self._ledger.finding_key(), rules=release.rules,
            policy=policy, policy_digest=policy_digest, destination=destination,
        )  # fmt: skip
        given = given_of(
            item
            for item in self._ledger.approvals(release.id)
            if release.state != "held" or item.verdict != "approve" or counts(item, noticed)
        )
        # Who said yes since the rules were judged belongs to what is shown.
        count = sum(item.verdict == "approve" for item in given)
        rules = [
            {**rule, "measured": count, "outcome": "ok" if count >= release.persons else "hold"}
            if rule["rule"] == "approvals" and rule["outcome"] == "hold"
            else rule
            for rule in release.rules
        ]
        looks = [
            {
                "rule": one.code.lower().replace("_", " "), "reason": one.code, "outcome": one.outcome,
                "measured": one.says, "limit": None, "file": "", "line": 0,
            }
            for one in noticed
        ]  # fmt: skip
        rules = with_usual([*looks, *rules], [one.rules for one in earlier if one.state == "approved"])
        outcomes = [str(rule["outcome"]) for rule in rules]
        leaving = answers.LeavingKind(
            kind=release.kind,
            says=sentences["says"],
            items=sentences["items"],
            bytes=release.payload_bytes,
            covered_by_epsilon="NO",
        )
        return answers.HeldRelease(
            id=release.id,
            digest=release.digest,
            shown=shown_digest(release.id, release.recorded, policy_digest, told_facts),
            shown_facts=told_facts,
            revision=release.revision,
            state=release.state,
            run=release.run,
            round=release.round,
            step=release.step,
            held_since=release.requested_at,
            expires_at=release.expires_at,
            asked_by=sentences["asked_by"],
            approvers=answers.Approvers(needed=release.persons, roles=tuple(roles), people=tuple(people), given=given),
            leaves=answers.Leaves(
                destination=answers.read(answers.Destination, {"name": sentences["to"], **destination, **since}),
                kinds=(leaving,),
                bytes=release.payload_bytes,
                stays=STAYS,
            ),
            policy=answers.JudgedBy(
                name=policy_name,
                digest=policy_digest,
                before=last.policy_digest if last else "",
                counts={name: outcomes.count(name) for name in ("ok", "look", "hold", "deny")},
                rules=answers.read_rows(answers.JudgedRule, [rule for rule in rules if rule["outcome"] != "n.a."]),
            ),
            budget=sentences["budget"],
            uses="; ".join(_used(facts, rules)),
            noticed=tuple(noticed),
            unscreened=facts.get("screens") == {},
            findings=sentences["findings"],
            difference=self._difference(release, context, policy_digest, destination.get("not_after", ""), since),
            norm=facts.get("l2"),
            base={"now": context.get("base", ""), "before": context.get("ended_in", "")},
            consequences=answers.Consequences(
                approve=sentences["approve"],
                later=sentences["later"],
                later_rounds=tuple(later),
                reject=sentences["reject"],
            ),
            deferred=self._ledger.deferred(release.id),
        )

    # ---- what was before ---------------------------------------------------------------------------

    def beside(self, release: Release) -> tuple[Against | None, list[str]]:
        """Return what a release is compared with, and what people are told of that: the last one of its kind that
        people let out; without one, the last that left, of which only the size is known; where none has left, the last
        one that did not, whose `item.state` then is one of `KEPT_IN`."""
        last = self._last(release)
        earlier = self._ledger.releases_before(release, 1)
        rejected = [rejected_text(*one) for one in self._rejected(release)[:1]]
        rejected += [f"that of {_place(one, release.run)} was {one.state}" for one in earlier if one.state in KEPT_IN]
        newest = self._ledger.outbox_before(release, 1)
        if last is not None and newest and newest[0].id != last.item.id:
            rejected.append(f"{Against(newest[0]).place(release.run)} left after that one, and no person was asked")
        if last is None and rejected:
            return self._as_if_sent(earlier[0]), ["none of this kind has left yet", *rejected]
        return last, rejected

    def _before(self, release: Release, context: Mapping[str, Any], last: Against | None) -> Before:
        same = self._ledger.outbox_before(release, EVIDENCE_MAX, same_place=True)
        return Before(context, last, self._rejected(release), same, self._ledger.policy_of_sent(release.kind))

    def _rejected(self, release: Release) -> list[tuple[Release, list[str]]]:
        """Releases of the same bytes that were rejected, newest first, each with who said no."""
        return [
            (one, [answer.person for answer in self._ledger.approvals(one.id) if answer.verdict == "reject"])
            for one in self._ledger.rejected_before(release, EVIDENCE_MAX)
        ]

    def _last(self, release: Release) -> Against | None:
        approved = self._ledger.outbox_before(release, 1, approved=True)
        items = approved or self._ledger.outbox_before(release, 1)
        if not items:
            return None
        item = items[0]
        held = self._ledger.approved_release(item)
        if held is None:
            return Against(item)
        return Against(item, held.facts, held.policy_digest, self._ledger.kept_of_release(held.id), held.id)

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
        self, release: Release, context: Mapping[str, Any], policy_digest: str, not_after: str, since: Mapping[str, Any]
    ) -> str:
        until = [f"cert to {not_after[:10]}"] if not_after else []
        last, kept_in = self.beside(release)
        if last is None:
            return "; ".join(["first release, nothing to compare", *until])
        of_run = "this run" if last.item.run == release.run else f"the earlier run {last.item.run}"
        more = release.payload_bytes - last.item.payload_bytes
        words = [*kept_in, f"{more:+d} bytes against round {last.item.round} of {of_run}"]
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
        if context.get("base"):
            if context.get("ended_in"):
                same.append(("base", context["ended_in"] == context["base"]))
            elif release.round > 1:
                words.append("last base unknown")
        same.append(("policy", last.policy_digest == policy_digest))
        for word, is_so in (("same", True), ("DIFFERS", False)):
            if names := [name for name, found in same if found is is_so]:
                words.append(f"{', '.join(names)} {word}")
        if since:
            until.insert(0, f"far end since round {since['since_round']}")
        return "; ".join([*words, *until])

    def _as_if_sent(self, release: Release) -> Against:
        """Return a release that did not leave in the form used for comparison."""
        item = OutboxItem(
            0, release.place, release.digest, release.payload_bytes, 0, release.requested_at, release.state, 0,
            archived=False,
        )  # fmt: skip
        context = self._ledger.kept_of_release(release.id)
        return Against(item, release.facts, release.policy_digest, context, release.id)

    def _cosine(self, release: Release, last: Against) -> str:
        """Return the cosine of both updates in words, where both still lie here."""
        key = release.digest, last.item.digest
        if key not in self._cosines:
            self._cosines = {key: self._measured_cosine(release, last)}
        cosine = self._cosines[key]
        return cosine if isinstance(cosine, str) else f"cosine {cosine:.2f}"

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


def shown_facts(
    release: Release, *, name: str, roles: Sequence[str], address: str, base: str, sentences: Mapping[str, str]
) -> str:
    """Digest of what people are shown of a held release and what does not move while it waits: no age, no expiry, not
    who answered, not what others left meanwhile. What may come since they looked is a finding, signed by its id.

    Args:
        release: held.
        name: of the policy in force.
        roles: who may answer.
        address: of the far end.
        base: that the update is on top of.
        sentences: every one that is shown and does not move, by where it is shown.
    """
    return sha256_hex(
        canonical_json(
            {
                "revision": release.revision, "run": release.run, "round": release.round, "step": release.step,
                "kind": release.kind, "bytes": release.payload_bytes, "held_since": release.requested_at,
                "needed": release.persons, "roles": list(roles), "policy": name, "address": address, "base": base,
                "sentences": dict(sentences), "facts": dict(release.facts),
            }
        )
    )  # fmt: skip


def given_of(approvals: Iterable[Approval]) -> tuple[answers.Given, ...]:
    """Return who answered what, when and why."""
    return tuple(
        answers.Given(
            person=item.person,
            verdict=item.verdict,
            at=item.at,
            time=utc(item.at),
            reason=item.reason_code,
            note=item.reason,
        )
        for item in approvals
    )


def on_approve(kind: str, policy: PolicyFile | None) -> str:
    """Say what follows from a yes.

    Args:
        kind: of the release.
        policy: in force; None where this version cannot read it.
    """
    if kind == "run.plan":
        return ON_APPROVE_PLAN
    if kind not in UPDATE_KINDS or policy is None:
        return ON_APPROVE
    least = policy.federation.min_updates
    # one line of the smallest terminal
    given = f"others get a mean of {least} or more" if least > 1 else "others get it alone"
    return f"sent once, cannot be called back; {given}"


def on_reject(plan: str) -> str:
    """Say what follows from a no.

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


def _place(release: Release, run: str) -> str:
    return f"round {release.round}" if release.run == run else f"round {release.round} of {release.run}"


def _used(facts: Mapping[str, Any], rules: list[dict[str, Any]]) -> list[str]:
    """Return the use of each counting limit by this release, before and after, where that is a large part of the limit.
    That a round has one factor set of one is normal."""
    return [
        f"{_LIMITS_IN_WORDS[name]} {_amount(name, used - added, most)}->{_amount(name, used, most)} of "
        f"{_amount(name, most, most)} {100 * used / most:.0f} %"
        for name, added, used, most in counting(facts, rules)
        if most and used / most >= USED_SHARE_SHOWN and name != "factor sets per round"
    ]


def _amount(name: str, value: int, most: int) -> str:
    """A count in the unit of its limit, so that it can be compared with it."""
    if name not in _BYTES or most < 1024 or not value:
        return str(value)
    unit, letter = (1 << 20, "M") if most >= 1 << 20 else (1024, "K")
    tenths = letter == "M" or value < 10 * unit
    return f"{value / unit:.{int(tenths)}f}{letter}"


def _percent(before: float, now: float) -> str:
    return f"{100 * (now / before - 1):+.0f} %"


def items_of(facts: Mapping[str, Any]) -> str:
    """Return what a release is made of, in words."""
    if "tensors" in facts:
        shape = f"rank {facts.get('rank')}, {facts.get('dtype')}, {facts.get('elements')} values"
        return f"{facts['tensors']} tensors, {shape}"
    if "responses" in facts:
        return f"{facts['responses']} responses to {facts.get('prompts')} public prompts, {facts.get('tokens')} tokens"
    if "metrics" in facts:
        return f"{len(facts['metrics'])} metrics"
    return "1 message"


def hit_places(body: ProtobufMessage, hits: Sequence[Mapping[str, int]]) -> list[tuple[str, list[str]]]:
    """Return where in a message its screens found something, and which screens; never a text.

    Args:
        body: of the message.
        hits: for each text, in the order of `policies.screens.texts_of`.
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


# ---- in words ----------------------------------------------------------------------------------------------------

EARLIER_MAX = 8  # releases of a kind that a figure is set beside
_READS = "the coordinator can read {}"
_NO_USUAL = frozenset({"approvals", "messages per minute", "screen hits", *COUNTED})  # they grow with what was sent


def says(kind: str, facts: Mapping[str, Any], private_records: int) -> str:
    """Return what leaves, and who can read it, in one sentence.

    Args:
        kind: of the message.
        facts: that the gate measured.
        private_records: that the trainer has in all; 0 where nobody kept that.
    """
    if kind == "run.plan":
        return "with a yes nothing leaves yet: this silo takes part in the run, and is asked again as its policy says"
    if kind in TENSOR_KINDS:
        made_of = f"changes to the model{_trained_on(facts, private_records)}"
        return f"{made_of}; {_READS.format('them')} and tell your main topics"  # N7; `silo report case-mix` measures it
    if "responses" in facts:
        answers = _many(facts["responses"], "answer")
        what = f"{answers} that this silo's model wrote to {_many(facts.get('prompts'), 'public prompt')}"
        return f"{what}; the coordinator and the other silos can read them"
    if "metrics" in facts:
        return f"{_many(len(facts['metrics']), 'figure')} measured here; {_READS.format('them')}"
    return f"one message; {_READS.format('it')}"


def _trained_on(facts: Mapping[str, Any], private_records: int) -> str:
    records, steps, epochs = facts.get("records"), facts.get("steps"), facts.get("epochs") or 0
    if not isinstance(records, int):
        return ""
    of = f"{records} of your {private_records}" if private_records else f"{records} of your"
    used = f", some used {epochs} times" if epochs > 1 else ""
    return f", trained on {of} private records in {_many(steps, 'step')}{used}"


def _many(number: Any, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def party_of(spiffe_id: str) -> str:
    """Return a SPIFFE id in words: `coordinator main of cardio-net`; any other id unchanged."""
    scheme, _, rest = spiffe_id.partition("://")
    federation, _, place = rest.partition("/")
    role, _, name = place.partition("/")
    return f"{role} {name} of {federation}" if scheme == "spiffe" and name else spiffe_id


def with_usual(rules: Iterable[Mapping[str, Any]], earlier: Sequence[Sequence[Mapping[str, Any]]]) -> list[Any]:
    """Rules, those that measure a size with `usual`: {least, most, releases} of the same rule over earlier releases.

    Args:
        rules: as judged.
        earlier: of each earlier release of the kind that left, its rules.
    """
    rules_shown: list[Any] = []
    for rule in rules:
        name = rule["rule"]
        sizes = [each["measured"] for one in earlier for each in one if each["rule"] == name and _is_size(each)]
        usual = {"least": min(sizes), "most": max(sizes), "releases": len(sizes)} if sizes else None
        rules_shown.append({**rule, "usual": usual} if _is_size(rule) else rule)
    return rules_shown


def _is_size(rule: Mapping[str, Any]) -> bool:
    pair = rule.get("measured"), rule.get("limit")
    numbers = all(isinstance(each, int | float) and not isinstance(each, bool) for each in pair)
    return numbers and rule["rule"] not in _NO_USUAL and pair[1] != 0


# ---- comparison --------------------------------------------------------------------------------------------------

TENSORS_SHOWN = 12
BYTES_MAX = 64 << 20  # of both messages; a fraction of a second, once for each release
FIGURES_MAX = 80
# Facts that are of the one message by their nature, and so always differ or are shown elsewhere.
_OWN = frozenset({"now", "round", "step", "run", "kind", "direction", "sequence", "history", "sender", "peer"})


@dataclass(frozen=True)
class _Inside:
    """What a comparison of the bytes of two messages comes to; all tensors, the largest change first."""

    rows: tuple[answers.ComparedFact, ...] = ()
    tensors: tuple[answers.ComparedTensor, ...] = ()
    notes: tuple[str, ...] = ()


class ReleaseComparison:
    """Answers the query `approval.comparison`: all figures of a held release and of the last one.

    Args:
        ledger: what left, and the bytes of what still lies here. One that is opened for reading has no bytes.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._compared: dict[tuple[str, str], _Inside] = {}  # of the two that were asked for last

    def comparison(
        self,
        release: Release,
        last: Against | None,
        *,
        policy_digest: str,
        destination: Mapping[str, str],
        told: Sequence[str] = (),
    ) -> answers.Comparison:
        """Return a release beside another one.

        Args:
            release: held, or over.
            last: the one it is compared with, as of `ReleaseView.beside`.
            policy_digest: of the policy in force.
            destination: address and certificate of the far end.
            told: what is said of `last`.
        """
        if last is None:
            note = "first release, nothing to compare"
            return answers.filled(answers.Comparison, release=release.id, kind=release.kind, note=note)
        context = self._ledger.kept_of_release(release.id)
        inside = self._inside(release, last)
        rows = [*_identity(release, last, context, policy_digest, destination), *_figures(release.facts, last.facts)]
        notes = [*told]
        if not last.facts:
            notes.append("no person was asked for that one, so of its figures only the size is known")
        if context.get("base") and not context.get("ended_in") and release.round > 1:
            notes.append("what the round before ended in is not known, so the base is compared with nothing")
        item, given = last.item, self._ledger.approvals(last.release) if last.release else []
        return answers.Comparison(
            release=release.id,
            kind=release.kind,
            against=answers.ComparedWith(
                run=item.run,
                round=item.round,
                step=item.step,
                digest=item.digest,
                at=utc(item.at),
                state=item.state if item.state in KEPT_IN else "left",
                approved_by=tuple(one.person for one in given if one.verdict == "approve"),
                rejected_by=tuple(one.person for one in given if one.verdict == "reject"),
            ),
            rows=(*rows, *inside.rows),
            tensors=inside.tensors[:TENSORS_SHOWN],
            tensors_total=len(inside.tensors),
            note="; ".join([*notes, *inside.notes]),
        )

    # ---- what lies in both messages ----------------------------------------------------------------

    def _inside(self, release: Release, last: Against) -> _Inside:
        key = release.digest, last.item.digest
        if key not in self._compared:
            self._compared = {key: self._measured(release, last)}
        return self._compared[key]

    def _measured(self, release: Release, last: Against) -> _Inside:
        payloads = getattr(self._ledger, "payloads", None)
        if payloads is None or last.item.digest not in payloads or release.digest not in payloads:
            return _Inside(notes=("the bytes of both are not here, so nothing inside of them is compared",))
        if release.payload_bytes + last.item.payload_bytes > BYTES_MAX:
            return _Inside(notes=("too big to compare what lies inside",))
        try:
            (body, now), (body_before, before) = (
                parsed(release.kind, payloads.read(digest), OUTBOUND_KINDS)
                for digest in (release.digest, last.item.digest)
            )
        except FedSiloError:
            return _Inside(notes=("one of both cannot be read",))
        if now is not None and before is not None:
            return _Inside(tensors=_tensors(now, before))
        if isinstance(body, pb.PublicResponses) and isinstance(body_before, pb.PublicResponses):
            prompts_now = {prompt.prompt_index for prompt in body.prompts}
            earlier = {prompt.prompt_index for prompt in body_before.prompts}
            return _Inside(rows=(_row("public prompts, of them not in that one", 0, len(prompts_now - earlier)),))
        return _Inside()


def _row(what: str, before: Any, now: Any) -> answers.ComparedFact:
    return answers.ComparedFact(what=what, before=before, now=now, differs=before != now)


def _identity(
    release: Release, last: Against, context: Mapping[str, Any], policy_digest: str, destination: Mapping[str, str]
) -> Iterator[answers.ComparedFact]:
    yield _row("bytes", last.item.payload_bytes, release.payload_bytes)
    yield _row("sha256", last.item.digest, release.digest)
    if last.policy_digest:
        yield _row("policy", last.policy_digest, policy_digest)
    went = last.kept.get("destination", {})
    if went:
        for what, before, now in zip(("address", "certificate"), ends_of(went), ends_of(destination), strict=True):
            yield _row(what, before, now)
    if context.get("base") and context.get("ended_in"):
        yield _row("base, and what the last round ended in", str(context["ended_in"]), str(context["base"]))


def _figures(now: Mapping[str, Any], before: Mapping[str, Any]) -> list[answers.ComparedFact]:
    """Facts that are one number or word, and numbers by name one level down; those that differ first."""
    ours, theirs = dict(_flat(now)), dict(_flat(before))
    names = [name for name in ours if name in theirs] if theirs else []
    rows = [_row(name, theirs[name], ours[name]) for name in names]
    return sorted(rows, key=lambda row: not row.differs)[:FIGURES_MAX]


def _flat(facts: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in facts.items():
        if name in _OWN:
            continue
        if isinstance(value, str | int | float):
            yield name, value
        elif isinstance(value, Mapping):
            yield from ((f"{name}.{key}", one) for key, one in value.items() if isinstance(one, int | float))


def _tensors(now: Mapping[str, Array], before: Mapping[str, Array]) -> tuple[answers.ComparedTensor, ...]:
    """Yield the change of each norm, in either direction; a tensor that only one of both has comes first."""
    rows = []
    for name in {**now, **before}:
        ours, theirs = _norm(now.get(name)), _norm(before.get(name))
        times = ours / theirs if ours and theirs else None
        rows.append(answers.ComparedTensor(name=name, before=theirs, now=ours, times=times))
    return tuple(sorted(rows, key=lambda row: -math.inf if row.times is None else -abs(math.log(row.times))))


def _norm(values: Array | None) -> float | None:
    return None if values is None else float(np.linalg.norm(np.ravel(values).astype(np.float64)))


# ---- what a yes leaves to the policy -----------------------------------------------------------------------------

Later = dict[str, Any]


def later_rounds(
    release: Release, policy: Policy | None, file: PolicyFile, *, released: int, plan: str
) -> Iterator[Later]:
    """Yield a row for each kind that the yes is about: {kind, asked, unasked, file, line, says}.

    Args:
        release: held. Of a plan it is every kind that the policy asks people about, or never asks.
        policy: in force, with the lines of its file; None beside a daemon, where only the release's own line is known.
        file: the same policy.
        released: other rounds of the run in which a message of this kind was allowed.
        plan: canonical, of the run; empty where it is not known, and then no round is named: `asked` and `unasked` are
            None.
    """
    if release.kind == "run.plan":
        for name, field in type(file.egress).model_fields.items():
            block = getattr(getattr(file.egress, name), "approvals", None)
            kind = field.alias or name
            if isinstance(block, Approvals):
                place = (policy.source, policy.line_of(("egress", kind, "approvals"))) if policy else ("", 0)
                yield _told(kind, block, place, None)
        return
    block = getattr(getattr(file.egress, release.kind.replace(".", "_"), None), "approvals", None)
    if isinstance(block, Approvals):
        rule = next((one for one in release.rules if one["rule"] == "approvals"), {})
        place = rule.get("file", ""), rule.get("line", 0)
        rounds = json.loads(plan).get("rounds") if plan else None
        later = range(release.round + 1, rounds + 1) if isinstance(rounds, int) else None
        # this release is the (released + 1)-th, so the round after it brings the (released + 2)-th
        named = None if later is None else {each: released + 2 + index for index, each in enumerate(later)}
        yield _told(release.kind, block, place, named)


def _told(kind: str, block: Approvals, place: tuple[Any, Any], rounds: Mapping[int, int] | None) -> Later:
    """rounds: ordinal of each later round's release, by the round's number; None where they are not known."""
    known = rounds is not None
    unasked = [number for number, ordinal in (rounds or {}).items() if not asked(block, ordinal)]
    again = [number for number, ordinal in (rounds or {}).items() if asked(block, ordinal)]
    where = f" ({Path(str(place[0])).name}:{place[1]})" if place[0] else ""
    if not known:
        says = f"{kind} {_rhythm(block)}{where}"
    elif not unasked:
        says = f"{kind} of {_numbers(again)} is asked again{where}" if again else "this is the run's last round"
    else:
        then = f"; {_numbers(again)} is asked again" if again else ""
        says = f"{kind} of {_numbers(unasked)} LEAVES UNASKED{where}{then}"
    return {
        "kind": kind,
        "asked": again if known else None,
        "unasked": unasked if known else None,
        "file": str(place[0]),
        "line": place[1],
        "says": says,
    }


def _rhythm(block: Approvals) -> str:
    """Return how often the policy asks people, in words, of a run whose rounds are not known."""
    first, then = block.first_rounds, block.then
    if then == 1:
        return "is asked in each round"
    regular = f"in every {then}th one" if then else ""
    if not first:
        return f"is asked {regular} and LEAVES UNASKED in all others" if then else "LEAVES UNASKED in each round"
    early = "in the first round" if first == 1 else f"in the first {first} rounds"
    return f"is asked {early}{f' and {regular}' if regular else ''}, and LEAVES UNASKED in all others"


def _numbers(rounds: Sequence[int]) -> str:
    """Return words such as "rounds 2 to 4, 6"."""
    spans: list[list[int]] = []
    for number in rounds:
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    shown = ", ".join(str(low) if low == high else f"{low} to {high}" for low, high in spans[:8])
    more = f" and {sum(high - low + 1 for low, high in spans[8:])} more" if len(spans) > 8 else ""
    return f"round{'s' if len(rounds) > 1 else ''} {shown}{more}"
