"""What is unusual about a held release: findings that a person opens before a yes to it counts (threat T36).

The outcome of each is `look`: it denies nothing, a person is to look. The id names what it says of this release:
another place, another digest in it, another release is another id, so that having opened one says nothing of the next.
It is keyed with a secret of this ledger, for it is in the audit log, and what a finding says is short enough to guess
(T40).

Does not stop: a person who opens a finding and does not read it. The log shows that it was opened, by whom.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from fedsilo.control.answers import Evidence, Finding, JudgedRule, to_json
from fedsilo.protocol.errors import UsageError
from policies.compare import compare
from policies.model import PolicyFile
from policies.screens import hits_in_words
from silo.guard.ledger import Approval, Ledger, OutboxItem, PolicyInForce, Release

ENDS_SOON_SECONDS = 86_400.0  # daemons renew with two days and more left (T33), so this close nobody renewed
# An update of the same training varies by less than this from one round to the next.
NORM_TIMES_MAX = 1.5
# Answers of two rounds differ in number and in length, so their product differs by more.
SIZE_TIMES_MAX = 3.0
# Of what is left of a day: more than a third means that fewer than two more of this size fit.
DAY_SHARE_MAX = 1 / 3
HITS_SHOWN = 4
EVIDENCE_MAX = 64  # lines of one finding; of loosened limits there are as many as were loosened
ACKNOWLEDGED_MAX = 64
_ID_CHARACTERS = 8
# A rule that counts over messages, by what of this message's facts it adds.
COUNTED = {
    "day bytes": "payload_bytes",
    "round bytes": "payload_bytes",
    "factor sets per round": "",
    "responses per round": "responses",
    "tokens per round": "tokens",
}
SIZES = {"payload_bytes": "bytes", "responses": "answers", "tokens": "tokens"}
KEPT_IN = ("rejected", "expired", "missed", "denied")  # states of a release that did not leave
FORM = ("tensors", "rank", "dtype", "elements")


@dataclass(frozen=True)
class Against:
    """The last release of a kind that left before another one; where none has, one that did not.

    Attributes:
        item: as the outbox knows it; of one that did not leave, `state` is one of `KEPT_IN`.
        facts, policy_digest: as it was held; empty where no person was asked.
        kept: what `Releases` kept of it: base, destination.
        release: its id as it was held; empty where no person was asked.
    """

    item: OutboxItem
    facts: Mapping[str, Any] = field(default_factory=dict)
    policy_digest: str = ""
    kept: Mapping[str, Any] = field(default_factory=dict)
    release: str = ""

    def place(self, run: str) -> str:
        return f"round {self.item.round}" if self.item.run == run else f"round {self.item.round} of {self.item.run}"


@dataclass(frozen=True)
class Before:
    """What a release is compared with.

    Attributes:
        kept: of the release itself, when it was held: base, places of hits.
        last: the last one of its kind that left, if possible one that persons let go, for only its figures are known.
        rejected: releases of the very same bytes that were rejected, newest first, each with who said no.
        same_place: others of its kind that left for the same run, round and step.
        policy_then: by which policy the newest release of its kind left.
    """

    kept: Mapping[str, Any]
    last: Against | None
    rejected: Sequence[tuple[Release, Sequence[str]]]
    same_place: Sequence[OutboxItem]
    policy_then: PolicyInForce | None


def before_of(ledger: Ledger, release: Release) -> Before:
    """Return what a release is compared with, as the ledger has it."""
    rejected = [
        (one, [answer.person for answer in ledger.approvals(one.id) if answer.verdict == "reject"])
        for one in ledger.rejected_before(release, EVIDENCE_MAX)
    ]
    same = ledger.outbox_before(release, EVIDENCE_MAX, same_place=True)
    context = ledger.kept_of_release(release.id)
    return Before(context, _last(ledger, release), rejected, same, ledger.policy_of_sent(release.kind))


def _last(ledger: Ledger, release: Release) -> Against | None:
    items = ledger.outbox_before(release, 1, approved=True) or ledger.outbox_before(release, 1)
    if not items:
        return None
    held = ledger.approved_release(items[0])
    if held is None:
        return Against(items[0])
    return Against(items[0], held.facts, held.policy_digest, ledger.kept_of_release(held.id), held.id)


def findings(
    release: Release,
    before: Before,
    *,
    key: bytes,
    policy: PolicyFile | None,
    policy_digest: str,
    destination: Mapping[str, str],
) -> list[Finding]:
    """Return everything unusual about a release, in the order in which people see it.

    Args:
        release: held, or over.
        before: what it is looked at beside.
        key: of the ids; at least 32 bytes.
        policy: in force; None where this version cannot read it.
        policy_digest: of the same.
        destination: address, certificate and not_after (UTC, ISO 8601) of the far end.
    """
    noticed = [
        *_rejected_noticed(before.rejected),
        *_far_end_noticed(release, destination, before.last),
        *_base_noticed(release, before.kept),
        *_policy_noticed(release, policy_digest, policy, before),
        *_form_noticed(release, before.last),
        *_limits_noticed(release),
        *_second_noticed(release, before.same_place),
        *_screens_noticed(release.facts, before.kept),
    ]
    return [replace(one, id=finding_id(key, release, one)) for one in noticed]


def finding_id(key: bytes, release: Release, finding: Finding) -> str:
    """Return an id such as NEW_DESTINATION-3fa1c2d0, made of what the finding says with all its evidence, about this
    release."""
    content = json.dumps(
        [release.id, release.digest, finding.code, finding.says, to_json(finding.evidence)], sort_keys=True
    )
    return f"{finding.code}-{hmac.new(key, content.encode(), hashlib.sha256).hexdigest()[:_ID_CHARACTERS]}"


def acknowledged_in(arguments: Mapping[str, Any]) -> list[str]:
    """Ids of the findings that a person says to have opened. Raises UsageError: no list of them."""
    given = arguments.get("acknowledged") or []
    listed = isinstance(given, list) and len(given) <= ACKNOWLEDGED_MAX
    if not listed or not all(isinstance(one, str) for one in given):
        raise UsageError(f"acknowledged is a list of at most {ACKNOWLEDGED_MAX} ids of findings")
    return list(given)


def unread(noticed: Sequence[Finding], acknowledged: Collection[str]) -> list[Finding]:
    """Findings that nobody said to have opened."""
    return [one for one in noticed if one.id not in acknowledged]


def counts(approval: Approval, noticed: Sequence[Finding]) -> bool:
    """Return whether a yes counts beside these findings: it stands in the log, and its person opened each of them."""
    return approval.verdict == "approve" and approval.record >= 0 and not unread(noticed, approval.acknowledged)


def _look(code: str, says: str, *evidence: tuple[str, Any, Any]) -> Finding:
    """evidence: what was compared, how it was before, how it is now; whole, where the sentence is short."""
    rows = tuple(Evidence(what=what, before=str(before), now=str(now)) for what, before, now in evidence)
    return Finding(id="", code=code, outcome="look", says=says, evidence=rows)


def _policy_noticed(release: Release, digest: str, policy: PolicyFile | None, before: Before) -> Iterator[Finding]:
    last, then = before.last, before.policy_then
    if last is None or not last.policy_digest or last.policy_digest == digest:
        return
    file = then.file if then is not None and then.digest == last.policy_digest else None
    told, evidence = f"{last.policy_digest[:4]}->{digest[:4]}", [("policy", last.policy_digest, digest)]
    if file is not None and policy is not None:
        weight = {"looser": 0, "incomparable": 1, "tighter": 2, "cosmetic": 3}
        changes = sorted(compare(file, policy), key=lambda change: weight[change.direction])
        told += (
            ": "
            + ", ".join(
                f"{change.path[-1]} {_short(change.before)}->{_short(change.after)} {change.direction}"
                for change in changes[:2]
            )
            + (f", {len(changes) - 2} more" if len(changes) > 2 else "")
        )
        loosened = sum(weight[change.direction] < weight["tighter"] for change in changes)  # they stand first
        evidence += [
            (f"{'.'.join(map(str, change.path))} {change.direction}", change.before, change.after)
            for change in changes[: max(loosened, EVIDENCE_MAX)]
        ]
    advice = "reject or defer if nobody at your site announced it"
    yield _look("POLICY_CHANGED", f"policy CHANGED since {last.place(release.run)} {told}; {advice}", *evidence)


def _rejected_noticed(rejected: Sequence[tuple[Release, Sequence[str]]]) -> Iterator[Finding]:
    if rejected:
        evidence = ((f"sha256, of {one.id}", one.digest, one.digest) for one, _ in rejected)
        yield _look("REJECTED_BEFORE", rejected_text(*rejected[0]), *evidence)


def rejected_text(release: Release, people: Sequence[str]) -> str:
    """Say that another release had the same bytes, and who rejected it."""
    return f"same bytes as {release.id}, rejected by {', '.join(people)}"


def _second_noticed(release: Release, same: Sequence[OutboxItem]) -> Iterator[Finding]:
    if same:
        when = time.strftime("%H:%MZ", time.gmtime(same[-1].at))
        yield _look(
            "SECOND_RELEASE",
            f"SECOND {release.kind} of round {release.round}: one left at {when}",
            *(("sha256", one.digest, release.digest) for one in same[-EVIDENCE_MAX:]),
        )


def ends_of(destination: Mapping[str, Any]) -> tuple[str, str]:
    return str(destination.get("address", "")), str(destination.get("certificate", ""))


def _far_end_noticed(release: Release, destination: Mapping[str, str], last: Against | None) -> Iterator[Finding]:
    if moment := _moment(destination.get("not_after", "")):
        left, until = moment - release.requested_at, ("certificate ends", "", destination["not_after"])
        if left <= 0:
            yield _look("FAR_END_EXPIRED", f"far end's certificate EXPIRED {destination['not_after'][:16]}Z", until)
        elif left <= ENDS_SOON_SECONDS:
            yield _look("FAR_END_EXPIRES", f"far end's certificate ends in {left / 3600:.0f} hours", until)
    went = last.kept.get("destination", {}) if last else {}
    if not went or last is None:
        return
    place = last.place(release.run)
    (address, certificate), (old_address, old_certificate) = ends_of(destination), ends_of(went)
    if address != old_address:
        says = f"NEW destination {address}; {place} went to {old_address}"
        yield _look("NEW_DESTINATION", says, ("address", old_address, address))
    if certificate and old_certificate and certificate != old_certificate:
        changed = f"{old_certificate[:4]}->{certificate[:4]}"
        says = f"far end's certificate CHANGED since {place}, {changed}"
        yield _look("NEW_CERTIFICATE", says, ("certificate", old_certificate, certificate))


def _base_noticed(release: Release, kept: Mapping[str, Any]) -> Iterator[Finding]:
    base, ended = str(kept.get("base", "")), str(kept.get("ended_in", ""))
    if base and ended and base != ended:
        was = f"round {release.round - 1} ended in, {ended[:8]}"
        yield _look("BASE_DIFFERS", f"base {base[:8]} is NOT what {was}", ("base", ended, base))


def _form_noticed(release: Release, last: Against | None) -> Iterator[Finding]:
    if last is None or not last.facts:
        return
    now, before, place = release.facts, last.facts, last.place(release.run)
    if apart_in := apart(now, before):
        differences = ", ".join(f"{name} {before.get(name)}->{now.get(name)}" for name in apart_in)
        evidence = ((name, before.get(name), now.get(name)) for name in apart_in)
        advice = "reject unless another run or plan was announced"
        yield _look("FORM_DIFFERS", f"form DIFFERS from {place}: {differences}; {advice}", *evidence)
    norms = now.get("l2"), before.get("l2")
    if all(isinstance(norm, float) for norm in norms) and norms[1] and norms[0] > NORM_TIMES_MAX * norms[1]:
        times = f"{norms[0] / norms[1]:.1f} TIMES"
        says = f"L2 {norms[0]:.3g} is {times} that of {place}, {norms[1]:.3g}"
        yield _look("NORM_OUTLIER", says, ("L2", f"{norms[1]:.6g}", f"{norms[0]:.6g}"))
    jumps = [
        f"{words} {before[name]}->{now[name]}"
        for name, words in SIZES.items()
        if isinstance(now.get(name), int) and before.get(name) and now[name] > SIZE_TIMES_MAX * before[name]
    ]
    if jumps:
        says = f"over {SIZE_TIMES_MAX:g} TIMES {place}: {', '.join(jumps)}"
        yield _look("SIZE_JUMP", says, *((words, before.get(name), now.get(name)) for name, words in SIZES.items()))


def _limits_noticed(release: Release) -> Iterator[Finding]:
    for rule, added, used, most in counting(release.facts, release.rules):
        left = most - (used - added)
        if rule == "day bytes" and left > 0 and added > DAY_SHARE_MAX * left:
            more = (most - used) // added
            taken = (
                f"{100 * used / most:.0f} % of today's bytes would be USED, "
                f"this alone takes {100 * added / left:.0f} % of what is left"
            )
            # Two digits: each poll adds a few bytes, and would make another finding of the one that was opened.
            before, now = (f"{float(f'{count:.2g}'):,.0f}" for count in (used - added, used))
            evidence = "bytes of the day, about", before, now
            yield _look("BUDGET", f"{taken}; room for {more} more like it", evidence)


def _screens_noticed(facts: Mapping[str, Any], kept: Mapping[str, Any]) -> Iterator[Finding]:
    if not facts.get("responses_hit"):
        return
    hits = kept.get("hits", [])
    hits_shown = "; ".join(f"{', '.join(codes)}: {where}" for where, codes in hits[:HITS_SHOWN])
    more = f"; {len(hits) - HITS_SHOWN} more" if len(hits) > HITS_SHOWN else ""
    places = ((", ".join(codes), "", where) for where, codes in hits[:EVIDENCE_MAX])
    yield _look("SCREEN_HIT", f"HIT {hits_shown}{more}" if hits else hits_in_words(facts), *places)


def apart(now: Mapping[str, Any], before: Mapping[str, Any]) -> list[str]:
    return [name for name in FORM if now.get(name) != before.get(name)]


def counting(facts: Mapping[str, Any], rules: Iterable[JudgedRule]) -> Iterator[tuple[str, int, int, int]]:
    """Rules that count over messages: name, what this one adds, the count with it, the limit."""
    for rule in rules:
        name, used, most = rule.rule, rule.measured, rule.limit
        if name in COUNTED and isinstance(used, int) and isinstance(most, int):
            added = facts.get(COUNTED[name]) if COUNTED[name] else 1
            if isinstance(added, int) and added > 0:
                yield name, added, used, most


def _short(value: Any) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 16 else f"{text[:8]}…"


def _moment(text: str) -> float:
    """Seconds since 1970; 0 for what is no time."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return 0.0
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
