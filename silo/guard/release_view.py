"""What people are shown of a held release before they answer (console design 5): facts and digests, never content.

Everything is set beside the last release of the same kind that left: where it went and whose certificate was there, the
policy it left under, its form, its size and its norm. What is unusual is a finding, `{"code", "outcome", "says"}` with
outcome `look`; findings stand first among the rules. Policy allowed all of it: a finding asks a person to look, and
denies nothing.

Does not stop: a change that is small enough each time, since each release is compared with one before it; and what
happened before the ledger began. The far end's certificate is the one that was seen when the guard last looked.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import numpy as np
from google.protobuf.message import Message as ProtobufMessage

from fedsilo.treaty.errors import FedSiloError
from fedsilo.treaty.wire._generated import federation_pb2 as pb
from fedsilo.treaty.wire.services import OUTBOUND_KINDS
from policies.compare import compare
from policies.model import PolicyFile
from policies.screening import hits_in_words
from silo.guard.ledger import Ledger, OutboxItem, PolicyInForce, Release
from silo.guard.messages import parsed

STAYS = ("prompts", "answers", "per-sample rewards", "gradients", "optimiser", "rollouts")
ON_APPROVE = "these bytes are sent once; sending cannot be called back"
ON_REJECT = "only that this silo declined is told; the round needs its quorum"
ENDS_SOON_SECONDS = 86_400.0  # daemons renew with two days and more left (T33), so this close nobody renewed
# An update of the same training varies by less than this from one round to the next.
NORM_TIMES_MAX = 1.5
# Answers of two rounds differ in number and in length, so their product differs by more.
SIZE_TIMES_MAX = 3.0
# Of what is left of a day: more than a third means that fewer than two more of this size fit.
DAY_SHARE_MAX = 1 / 3
COSINE_BYTES_MAX = 64 << 20  # a fraction of a second, once for each release
HITS_SHOWN = 4
_BYTES = frozenset({"round bytes", "day bytes"})
# A rule that counts over messages, by what of this message's facts it adds.
_COUNTED = {
    "day bytes": "payload_bytes",
    "round bytes": "payload_bytes",
    "factor sets per round": "",
    "responses per round": "responses",
    "tokens per round": "tokens",
}
_LIMITS_IN_WORDS = {
    "day bytes": "day",
    "round bytes": "round",
    "factor sets per round": "sets",
    "responses per round": "answers",
    "tokens per round": "tokens",
}
_SIZES = {"payload_bytes": "bytes", "responses": "answers", "tokens": "tokens"}
_FORM = ("tensors", "rank", "dtype", "elements")


@dataclass(frozen=True)
class Against:
    """The last release of a kind that left before another one.

    Attributes:
        item: as the outbox knows it.
        facts, policy_digest: as it was held; empty where no person was asked.
        kept: what `Releases` kept of it: base, destination.
    """

    item: OutboxItem
    facts: Mapping[str, Any] = field(default_factory=dict)
    policy_digest: str = ""
    kept: Mapping[str, Any] = field(default_factory=dict)

    def place(self, run: str) -> str:
        return f"round {self.item.round}" if self.item.run == run else f"round {self.item.round} of {self.item.run}"


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
    ) -> dict[str, Any]:
        """Everything a person must see before answering.

        Args:
            release: held, or over.
            policy_name: of the policy in force.
            policy_digest: of the same.
            policy: the same; None where this version cannot read it.
            destination: address, certificate and not_after (UTC, ISO 8601) of the far end.
            roles: who may answer.
        """
        facts = release.facts
        given = [
            {"person": item.person, "verdict": item.verdict, "at": item.at}
            for item in self._ledger.approvals(release.id)
        ]
        # The rules were judged when the hold began; who said yes since then belongs to what is shown.
        count = sum(item["verdict"] == "approve" for item in given)
        rules = [
            {**rule, "measured": count, "outcome": "ok" if count >= release.persons else "hold"}
            if rule["rule"] == "approvals" and rule["outcome"] == "hold"
            else rule
            for rule in release.rules
        ]
        kept = self._ledger.kept_of_release(release.id)
        last, since = self._last(release), self._used_since(release, destination)
        noticed = [
            *_far_end_noticed(release, destination, last),
            *_base_noticed(release, kept),
            *self._policy_noticed(release, policy_digest, policy, last),
            *_form_noticed(release, last),
            *_limits_noticed(release, rules),
            *self._second_noticed(release),
            *_screens_noticed(facts, kept),
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
            "approvers": {"needed": release.persons, "roles": roles, "given": given},
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
                "reject": ON_REJECT,
            },
        }

    # ---- what was before ---------------------------------------------------------------------------

    def _earlier(self, release: Release) -> list[OutboxItem]:
        """Messages of its kind that left before it; all of them while it is held."""
        items = (item for item in self._ledger.outbox() if item.kind == release.kind)
        if release.state == "held":
            return list(items)
        return [item for item in items if item.digest != release.digest and item.at <= release.requested_at]

    def _last(self, release: Release) -> Against | None:
        items = self._earlier(release)
        if not items:
            return None
        item = items[-1]
        held = [
            one
            for one in self._ledger.releases("approved")
            if (one.kind, one.digest, one.run) == (item.kind, item.digest, item.run)
        ]
        if not held:
            return Against(item)
        return Against(item, held[-1].facts, held[-1].policy_digest, self._ledger.kept_of_release(held[-1].id))

    def _used_since(self, release: Release, destination: Mapping[str, str]) -> dict[str, Any]:
        """Since which round this address and this certificate are used without a break, over all kinds."""
        since: dict[str, Any] = {}
        for one in reversed(self._ledger.releases("approved")):
            if one.requested_at > release.requested_at or one.id == release.id:
                continue
            went = self._ledger.kept_of_release(one.id).get("destination", {})
            if _ends(went) != _ends(destination):
                break
            since = {"since_round": one.round, "since_run": one.run, "since": one.requested_at}
        return since

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
            same.append(("form", not _apart(now, before)))
        if "responses" in now and "responses" in before:
            for name in ("responses", "prompts", "tokens"):
                words.append(f"{_SIZES.get(name, name)} {before.get(name)}->{now.get(name)}")
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

    # ---- what is unusual ---------------------------------------------------------------------------

    def _policy_noticed(
        self, release: Release, digest: str, policy: PolicyFile | None, last: Against | None
    ) -> Iterator[dict[str, str]]:
        if last is None or not last.policy_digest or last.policy_digest == digest:
            return
        then = self._ledger.policy_of_sent(release.kind)
        before = then.file if then is not None and then.digest == last.policy_digest else None
        told = f"{last.policy_digest[:4]}->{digest[:4]}"
        if before is not None and policy is not None:
            weight = {"looser": 0, "incomparable": 1, "tighter": 2, "cosmetic": 3}
            changes = sorted(compare(before, policy), key=lambda change: weight[change.direction])
            told += ": " + ", ".join(
                f"{change.path[-1]} {_short(change.before)}->{_short(change.after)} {change.direction}"
                for change in changes[:2]
            ) + (f", {len(changes) - 2} more" if len(changes) > 2 else "")  # fmt: skip
        yield _look("POLICY_CHANGED", f"policy CHANGED since {last.place(release.run)} {told}")

    def _second_noticed(self, release: Release) -> Iterator[dict[str, str]]:
        same = [
            item
            for item in self._earlier(release)
            if (item.run, item.round, item.step) == (release.run, release.round, release.step)
        ]
        if same:
            when = time.strftime("%H:%MZ", time.gmtime(same[-1].at))
            yield _look("SECOND_RELEASE", f"SECOND {release.kind} of round {release.round}: one left at {when}")


def _look(code: str, says: str) -> dict[str, str]:
    return {"code": code, "outcome": "look", "says": says}


def _ends(destination: Mapping[str, Any]) -> tuple[str, str]:
    return str(destination.get("address", "")), str(destination.get("certificate", ""))


def _far_end_noticed(
    release: Release, destination: Mapping[str, str], last: Against | None
) -> Iterator[dict[str, str]]:
    if moment := _moment(destination.get("not_after", "")):
        left = moment - release.requested_at
        if left <= 0:
            yield _look("FAR_END_EXPIRED", f"far end's certificate EXPIRED {destination['not_after'][:16]}Z")
        elif left <= ENDS_SOON_SECONDS:
            yield _look("FAR_END_EXPIRES", f"far end's certificate ends in {left / 3600:.0f} hours")
    went = last.kept.get("destination", {}) if last else {}
    if not went or last is None:
        return
    place = last.place(release.run)
    (address, certificate), (old_address, old_certificate) = _ends(destination), _ends(went)
    if address != old_address:
        yield _look("NEW_DESTINATION", f"NEW destination {address}; {place} went to {old_address}")
    if certificate and old_certificate and certificate != old_certificate:
        changed = f"{old_certificate[:4]}->{certificate[:4]}"
        yield _look("NEW_CERTIFICATE", f"far end's certificate CHANGED since {place}, {changed}")


def _base_noticed(release: Release, kept: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    base, ended = str(kept.get("base", "")), str(kept.get("ended_in", ""))
    if base and ended and base != ended:
        was = f"round {release.round - 1} ended in, {ended[:8]}"
        yield _look("BASE_DIFFERS", f"base {base[:8]} is NOT what {was}")


def _form_noticed(release: Release, last: Against | None) -> Iterator[dict[str, str]]:
    if last is None or not last.facts:
        return
    now, before, place = release.facts, last.facts, last.place(release.run)
    if apart := _apart(now, before):
        told = ", ".join(f"{name} {before.get(name)}->{now.get(name)}" for name in apart)
        yield _look("FORM_DIFFERS", f"form DIFFERS from {place}: {told}")
    norms = now.get("l2"), before.get("l2")
    if all(isinstance(norm, float) for norm in norms) and norms[1] and norms[0] > NORM_TIMES_MAX * norms[1]:
        times = f"{norms[0] / norms[1]:.1f} TIMES"
        yield _look("NORM_OUTLIER", f"L2 {norms[0]:.3g} is {times} that of {place}, {norms[1]:.3g}")
    jumps = [
        f"{words} {before[name]}->{now[name]}"
        for name, words in _SIZES.items()
        if isinstance(now.get(name), int) and before.get(name) and now[name] > SIZE_TIMES_MAX * before[name]
    ]
    if jumps:
        yield _look("SIZE_JUMP", f"over {SIZE_TIMES_MAX:g} TIMES {place}: {', '.join(jumps)}")


def _limits_noticed(release: Release, rules: list[dict[str, Any]]) -> Iterator[dict[str, str]]:
    for rule, added, used, most in _counting(release.facts, rules):
        left = most - (used - added)
        if rule == "day bytes" and left > 0 and added > DAY_SHARE_MAX * left:
            more = (most - used) // added
            taken = f"takes {100 * added / left:.0f} % of the day's bytes LEFT"
            yield _look("BUDGET", f"{taken}; room for {more} more like it")


def _screens_noticed(facts: Mapping[str, Any], kept: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    if not facts.get("responses_hit"):
        return
    hits = kept.get("hits", [])
    told = "; ".join(f"{', '.join(codes)}: {where}" for where, codes in hits[:HITS_SHOWN])
    more = f"; {len(hits) - HITS_SHOWN} more" if len(hits) > HITS_SHOWN else ""
    yield _look("SCREEN_HIT", f"HIT {told}{more}" if hits else hits_in_words(facts))


def _apart(now: Mapping[str, Any], before: Mapping[str, Any]) -> list[str]:
    return [name for name in _FORM if now.get(name) != before.get(name)]


def _counting(facts: Mapping[str, Any], rules: list[dict[str, Any]]) -> Iterator[tuple[str, int, int, int]]:
    """Rules that count over messages: name, what this one adds, the count with it, the limit."""
    for rule in rules:
        name, used, most = rule["rule"], rule["measured"], rule["limit"]
        if name in _COUNTED and isinstance(used, int) and isinstance(most, int):
            added = facts.get(_COUNTED[name]) if _COUNTED[name] else 1
            if isinstance(added, int) and added > 0:
                yield name, added, used, most


def _used(facts: Mapping[str, Any], rules: list[dict[str, Any]]) -> list[str]:
    """What of each counting limit this release uses: before and after of the limit."""
    return [
        f"{_LIMITS_IN_WORDS[name]} {_amount(name, used - added)}->{_amount(name, used)} of "
        f"{_amount(name, most)} {100 * used / most:.0f} %"
        for name, added, used, most in _counting(facts, rules)
        if most
    ]


def _amount(name: str, value: int) -> str:
    return str(value) if name not in _BYTES or value < 1024 else _bytes(value)


def _bytes(value: int) -> str:
    return f"{value / (1 << 20):.1f}M" if value >= 1 << 20 else f"{value / 1024:.0f}K"


def _percent(before: float, now: float) -> str:
    return f"{100 * (now / before - 1):+.0f} %"


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
