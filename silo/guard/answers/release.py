"""Answers about a held release that people see before they answer: facts and digests, never content.

Everything is set beside the last release of the same kind that left: where it went and whose certificate was there, the
policy it left under, its form, its size and its norm; where none has left, beside the last one that did not. What is
unusual is a finding (`silo.guard.findings`) with outcome `look`; findings come first among
the rules. Policy allowed all of it: a finding asks a person to look, and denies nothing.

What of it a person signs is decided below (`silo.guard.shown`); this lays it out. The comparison has all figures of
both for whoever wants more than one line. Tensors are compared by their norms, one by one where both
messages are still here, the largest change first; a value of a tensor, an answer or a prompt is never shown.

Does not show: what is in it; what changed inside of equal norms, and nothing of a message that was not archived. A
figure that is usual says nothing of what a model has learnt by heart.

Does not stop: a change that is small enough each time, since each release is compared with one before it; and what
happened before the ledger began; an approver who reads it and says yes all the same. The far end's certificate is the
one that was seen when the guard last looked.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from certs.roles import may
from fedsilo.control import answers
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.clocks import utc
from fedsilo.protocol.codec import Array
from fedsilo.protocol.envelope import parsed
from fedsilo.protocol.errors import FedSiloError
from fedsilo.protocol.kinds import OUTBOUND_KINDS
from policies.model import Policy
from silo.guard.findings import (
    COUNTED,
    KEPT_IN,
    SIZES,
    Against,
    Before,
    apart,
    before_of,
    counting,
    counts,
    ends_of,
    rejected_text,
)
from silo.guard.ledger import Approval, Ledger, OutboxItem, Release
from silo.guard.shown import STAYS, KeptPolicy, Shown, shown_of

USED_SHARE_SHOWN = 0.25  # of a counting limit; less of it says nothing
EARLIER_MAX = 8  # releases of a kind that a figure is set beside
_NO_USUAL = frozenset({"approvals", "messages per minute", "screen hits", *COUNTED})  # they grow with what was sent
_BYTES = frozenset({"round bytes", "day bytes"})
_LIMITS_IN_WORDS = {
    "day bytes": "day",
    "round bytes": "round",
    "factor sets per round": "sets",
    "responses per round": "answers",
    "tokens per round": "tokens",
}


@dataclass(frozen=True)
class _Inside:
    """Comparison of the bytes of two messages.

    Attributes:
        cosine: of both updates, in words; or why there is none.
        rows: figures of the answers in them.
        tensors: all, the largest change first.
        notes: why something is not compared.
    """

    cosine: str
    rows: tuple[answers.ComparedFact, ...] = ()
    tensors: tuple[answers.ComparedTensor, ...] = ()
    notes: tuple[str, ...] = ()


class ReleaseView:
    """Builds what people are shown of a held release, beside the last one of its kind.

    Args:
        ledger: what left, and what was kept of it. One that is opened for reading has no payloads.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._compared: dict[tuple[str, str], _Inside] = {}  # of those that were asked for last

    def view(
        self,
        release: Release,
        policy: Policy | KeptPolicy,
        *,
        destination: Mapping[str, str],
        people: Mapping[str, Iterable[str]] = MappingProxyType({}),
    ) -> answers.HeldRelease:
        """Return everything a person must see before answering.

        Args:
            release: held, or over.
            policy: in force.
            destination: address, certificate and not_after (UTC, ISO 8601) of the far end.
            people: of the site with their roles, where they are known.

        Raises:
            DeniedError: the policy asks nobody about its kind.
        """
        shown = shown_of(self._ledger, release, policy, destination)
        release, facts, sentences = shown.release, release.facts, shown.sentences
        context, last = shown.before.kept, shown.before.last
        since = self._used_since(release, destination)
        earlier = self._ledger.releases_before(release, EARLIER_MAX)
        given = given_of(
            item
            for item in self._ledger.approvals(release.id)
            if release.state != "held" or item.verdict != "approve" or counts(item, shown.noticed)
        )
        # Who said yes since the rules were judged belongs to what is shown.
        count = sum(item.verdict == "approve" for item in given)
        rules = [
            replace(rule, measured=count, outcome="ok" if count >= release.persons else "hold")
            if rule.rule == "approvals" and rule.outcome == "hold"
            else rule
            for rule in release.rules
        ]
        looks = [
            answers.JudgedRule(
                rule=one.code.lower().replace("_", " "), reason=one.code, outcome=one.outcome, measured=one.says,
                limit=None, file="", line=0, usual=None, absent=frozenset({"usual"}),
            )
            for one in shown.noticed
        ]  # fmt: skip
        rules = with_usual([*looks, *rules], [one.rules for one in earlier if one.state == "approved"])
        outcomes = [rule.outcome for rule in rules]
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
            shown=shown.digest,
            shown_facts=shown.facts,
            revision=release.revision,
            state=release.state,
            run=release.run,
            round=release.round,
            step=release.step,
            held_since=release.requested_at,
            expires_at=release.expires_at,
            asked_by=sentences["asked_by"],
            approvers=answers.Approvers(
                needed=release.persons,
                roles=shown.roles,
                people=tuple(who_may_approve(people, shown.roles)),
                given=given,
            ),
            leaves=answers.Leaves(
                destination=answers.read(answers.Destination, {"name": sentences["to"], **destination, **since}),
                kinds=(leaving,),
                bytes=release.payload_bytes,
                stays=STAYS,
            ),
            policy=answers.JudgedBy(
                name=policy.file.name,
                digest=policy.digest,
                before=last.policy_digest if last else "",
                counts={name: outcomes.count(name) for name in ("ok", "look", "hold", "deny")},
                rules=tuple(rule for rule in rules if rule.outcome != "n.a."),
            ),
            budget=sentences["budget"],
            uses="; ".join(_used(facts, rules)),
            noticed=shown.noticed,
            unscreened=facts.get("screens") == {},
            findings=sentences["findings"],
            difference=self._difference(shown, policy.digest, destination.get("not_after", ""), since),
            norm=facts.get("l2"),
            base={"now": context.get("base", ""), "before": context.get("ended_in", "")},
            consequences=answers.Consequences(
                approve=sentences["approve"],
                later=sentences["later"],
                later_rounds=shown.later,
                reject=sentences["reject"],
            ),
            deferred=self._ledger.deferred(release.id),
        )

    def _used_since(self, release: Release, destination: Mapping[str, str]) -> dict[str, Any]:
        """Since which round this address and this certificate are used without a break, over all kinds."""
        known = self._ledger.far_end
        # nothing was sent yet, or it went elsewhere
        if known is None or ends_of(known.destination) != ends_of(destination):
            return {}
        if known.release == release.id or known.at > release.requested_at:
            return {}
        return {"since_round": known.round, "since_run": known.run, "since": known.at}

    def _difference(self, shown: Shown, policy_digest: str, not_after: str, since: Mapping[str, Any]) -> str:
        release, context = shown.release, shown.before.kept
        until = [f"cert to {not_after[:10]}"] if not_after else []
        last, kept_in = beside(self._ledger, release, shown.before)
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
            words.append(self._inside(release, last).cosine)
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

    # ---- comparison ----------------------------------------------------------------------------------

    def comparison(self, release: Release, *, policy_digest: str, destination: Mapping[str, str]) -> answers.Comparison:
        """Return a release beside the last one of its kind.

        Args:
            release: held, or over.
            policy_digest: of the policy in force.
            destination: address and certificate of the far end.
        """
        known = before_of(self._ledger, release)
        last, notes = beside(self._ledger, release, known)
        if last is None:
            note = "first release, nothing to compare"
            return answers.filled(answers.Comparison, release=release.id, kind=release.kind, note=note)
        context, inside = known.kept, self._inside(release, last)
        rows = [*_identity(release, last, context, policy_digest, destination), *_figures(release.facts, last.facts)]
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

    def _inside(self, release: Release, last: Against) -> _Inside:
        # The loop asks in its turns, and people's questions in threads of their own: each reads one dict to its end.
        key, compared = (release.digest, last.item.digest), self._compared
        if key not in compared:
            newest = [*compared.items(), (key, self._measured(release, last))][-COMPARED_MAX:]
            self._compared = compared = dict(newest)
        return compared[key]

    def _measured(self, release: Release, last: Against) -> _Inside:
        payloads = getattr(self._ledger, "payloads", None)
        if payloads is None or last.item.digest not in payloads or release.digest not in payloads:
            note = "the bytes of both are not here, so nothing inside of them is compared"
            return _Inside("cosine unknown: not archived", notes=(note,))
        if release.payload_bytes + last.item.payload_bytes > BYTES_MAX:
            return _Inside("cosine not computed: too big", notes=("too big to compare what lies inside",))
        try:
            (body, now), (body_before, before) = (
                parsed(release.kind, payloads.read(digest), OUTBOUND_KINDS)
                for digest in (release.digest, last.item.digest)
            )
        except FedSiloError:
            return _Inside("cosine unknown: not readable", notes=("one of both cannot be read",))
        cosine = _cosine(now or {}, before or {})
        if now is not None and before is not None:
            return _Inside(cosine, tensors=_tensors(now, before))
        if isinstance(body, pb.PublicResponses) and isinstance(body_before, pb.PublicResponses):
            prompts_now = {prompt.prompt_index for prompt in body.prompts}
            earlier = {prompt.prompt_index for prompt in body_before.prompts}
            row = _row("public prompts, of them not in that one", 0, len(prompts_now - earlier))
            return _Inside(cosine, rows=(row,))
        return _Inside(cosine)


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


def _used(facts: Mapping[str, Any], rules: Iterable[answers.JudgedRule]) -> list[str]:
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


def beside(ledger: Ledger, release: Release, known: Before) -> tuple[Against | None, list[str]]:
    """Return what a release is compared with, and notes on that: the last one of its kind that people let out; without
    one, the last that left, of which only the size is known; where none has left, the last one that did not, whose
    `item.state` then is one of `KEPT_IN`."""
    last, earlier = known.last, ledger.releases_before(release, 1)
    notes = [rejected_text(*one) for one in known.rejected[:1]]
    notes += [f"that of {_place(one, release.run)} was {one.state}" for one in earlier if one.state in KEPT_IN]
    newest = ledger.outbox_before(release, 1)
    if last is not None and newest and newest[0].id != last.item.id:
        notes.append(f"{Against(newest[0]).place(release.run)} left after that one, and no person was asked")
    if last is None and notes:
        return _as_if_sent(ledger, earlier[0]), ["none of this kind has left yet", *notes]
    return last, notes


def _as_if_sent(ledger: Ledger, release: Release) -> Against:
    """Return a release that did not leave in the form used for comparison."""
    item = OutboxItem(
        0, release.place, release.digest, release.payload_bytes, 0, release.requested_at, release.state, 0,
        archived=False,
    )  # fmt: skip
    return Against(item, release.facts, release.policy_digest, ledger.kept_of_release(release.id), release.id)


def with_usual(
    rules: Iterable[answers.JudgedRule], earlier: Sequence[Sequence[answers.JudgedRule]]
) -> list[answers.JudgedRule]:
    """Rules, those that measure a size with `usual`: {least, most, releases} of the same rule over earlier releases.

    Args:
        rules: as judged.
        earlier: of each earlier release of the kind that left, its rules.
    """
    rules_shown = []
    for rule in rules:
        sizes = [each.measured for one in earlier for each in one if each.rule == rule.rule and _is_size(each)]
        usual = {"least": min(sizes), "most": max(sizes), "releases": len(sizes)} if sizes else None
        rules_shown.append(replace(rule, usual=usual, absent=frozenset()) if _is_size(rule) else rule)
    return rules_shown


def _is_size(rule: answers.JudgedRule) -> bool:
    pair = rule.measured, rule.limit
    numbers = all(isinstance(each, int | float) and not isinstance(each, bool) for each in pair)
    return numbers and rule.rule not in _NO_USUAL and pair[1] != 0


# ---- comparison --------------------------------------------------------------------------------------------------

TENSORS_SHOWN = 12
BYTES_MAX = 64 << 20  # of both messages; a fraction of a second, once for each release
COMPARED_MAX = 8  # of which the answers are remembered: that people look at others costs the loop nothing (T55)
FIGURES_MAX = 80
# Facts that are of the one message by their nature, and so always differ or are shown elsewhere.
_OWN = frozenset({"now", "round", "step", "run", "kind", "direction", "sequence", "history", "sender", "peer"})


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


def _cosine(now: Mapping[str, Array], before: Mapping[str, Array]) -> str:
    """Return the cosine of two updates in words."""
    if not now or {n: v.shape for n, v in now.items()} != {n: v.shape for n, v in before.items()}:
        return "no cosine: other shapes"
    product = squares = others = 0.0
    for name, values in now.items():
        ours, theirs = np.ravel(values).astype(np.float64), np.ravel(before[name]).astype(np.float64)
        product += float(ours @ theirs)
        squares += float(ours @ ours)
        others += float(theirs @ theirs)
    return f"cosine {product / (squares * others) ** 0.5:.2f}" if squares and others else "no cosine: all zero"


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
