"""What a person is shown of a held release and signs with a yes: facts and digests, never content (threat T36).

Sentences say what it is made of and who can read it to somebody who does not know what a tensor is. What is unusual is
a finding (`findings.py`). A yes signs the digest of all of it, so that it counts for nothing beside other sentences.

What a yes leaves to the policy, which later rounds leave without anybody being asked, is counted as the rule counts: by
the rounds that this site released, as if every later round released one. Nobody is promised that there will be so many.

Does not stop: a person who signs without reading.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedsilo.audit.record import shown_digest
from fedsilo.control.answers import Finding, JudgedRule, LaterRounds, read_rows
from fedsilo.protocol.codec import canonical_json, sha256_hex
from fedsilo.protocol.errors import DeniedError
from fedsilo.protocol.kinds import TENSOR_KINDS, UPDATE_KINDS
from fedsilo.protocol.methods import method_named
from fedsilo.protocol.plan import Plan, plan_from_canonical
from policies import engine
from policies.fields import Approvals
from policies.model import Policy, PolicyFile
from policies.rules import asked
from policies.screens import hits_in_words
from silo.guard.findings import Before, before_of, findings
from silo.guard.ledger import Ledger, Release

STAYS = ("prompts", "answers", "per-sample rewards", "gradients", "optimiser", "rollouts")
BUDGET = "DP off"
ON_APPROVE = "these bytes are sent once; sending cannot be called back"
ON_APPROVE_PLAN = "this silo takes part in the run"
ON_REJECT = "only that this silo declined is told; the round needs its quorum"  # where the run is not known
_READS = "the coordinator can read {}"


@dataclass(frozen=True)
class KeptPolicy:
    """The policy in force as the ledger has it: its content, without the lines of its file."""

    file: PolicyFile
    digest: str


@dataclass(frozen=True)
class Shown:
    """What people are shown of a release, and sign.

    Attributes:
        release: of a held one, its rules are judged by now.
        before: what it is compared with.
        roles: whose yes the policy asks for.
        later: what a yes leaves to the policy; nothing where the release is over.
        sentences: every one that does not move while it waits, by where it is shown.
        facts: digest of the sentences and of what the release is made of.
        digest: what a person signs with a yes.
        noticed: what is unusual about it.
    """

    release: Release
    before: Before
    roles: tuple[str, ...]
    later: tuple[LaterRounds, ...]
    sentences: Mapping[str, str]
    facts: str
    digest: str
    noticed: tuple[Finding, ...]


def shown_of(ledger: Ledger, release: Release, policy: Policy | KeptPolicy, destination: Mapping[str, str]) -> Shown:
    """Return what people are shown of a release.

    Args:
        ledger: what left, and what was kept of it.
        release: held, or over.
        policy: in force. By one without its file's lines, no rule is judged anew.
        destination: address, certificate and not_after (UTC, ISO 8601) of the far end.

    Raises:
        DeniedError: the policy asks nobody about its kind.
    """
    held, known, facts = release.state == "held", before_of(ledger, release), release.facts
    if held and isinstance(policy, Policy):
        release = replace(release, rules=judged_by_now(ledger, release, policy))
    roles, plan = tuple(asked_for(release.kind, policy.file).roles), ledger.plan_of(release.run)
    later: tuple[LaterRounds, ...] = ()
    if held:
        released = _history(ledger, release).rounds_released  # as the rule on approvals counts them
        later = tuple(later_rounds(release, policy, released=released, plan=plan))
    sentences = {
        "asked_by": f"round {release.round} of run {release.run}",
        "to": party_of(policy.file.federation.coordinator),
        "says": says(release.kind, facts, int(known.kept.get("private_records", 0))),
        "items": items_of(facts),
        "stays": "; ".join(STAYS),
        "budget": BUDGET,
        "findings": hits_in_words(facts) if "screens" in facts else "no text in this message",
        "approve": on_approve(release.kind, policy.file),
        "later": "; ".join(one.says for one in later),
        "reject": on_reject(plan),
    }
    digest = shown_facts(
        release,
        name=policy.file.name,
        roles=roles,
        address=destination.get("address", ""),
        base=known.kept.get("base", ""),
        sentences=sentences,
    )
    noticed = findings(
        release,
        known,
        key=ledger.finding_key(),
        policy=policy.file,
        policy_digest=policy.digest,
        destination=destination,
    )
    signed = shown_digest(release.id, release.recorded, policy.digest, digest)
    return Shown(release, known, roles, later, sentences, digest, signed, tuple(noticed))


def asked_for(kind: str, policy: PolicyFile) -> Approvals:
    """Return what a policy asks of people about a kind. Raises DeniedError: nothing."""
    block = getattr(policy.ingress if kind == "run.plan" else policy.egress, kind.replace(".", "_"), None)
    approvals = getattr(block, "approvals", None)
    if not isinstance(approvals, Approvals):
        raise DeniedError(f"this site's policy has no approvals for {kind}")
    return approvals


def judged_by_now(ledger: Ledger, release: Release, policy: Policy) -> tuple[JudgedRule, ...]:
    """Verdict of each rule, by the facts of the hold and the counts of this moment, as the ledger has them."""
    return rows_of(engine.decide(dict(release.facts), policy, _history(ledger, release)))


def rows_of(decision: engine.Decision) -> tuple[JudgedRule, ...]:
    """Return the verdict of each rule as people are shown it."""
    return read_rows(JudgedRule, [result.to_json() for result in decision.results])


def _history(ledger: Ledger, release: Release) -> engine.History:
    now = max(ledger.latest_time, float(release.facts["now"]))
    return engine.HistoryBook.from_json(ledger.book or {}).view({**release.facts, "now": now})


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


# ---- in words ----------------------------------------------------------------------------------------------------


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


def on_approve(kind: str, policy: PolicyFile) -> str:
    """Say what follows from a yes.

    Args:
        kind: of the release.
        policy: in force.
    """
    if kind == "run.plan":
        return ON_APPROVE_PLAN
    if kind not in UPDATE_KINDS:
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


# ---- what a yes leaves to the policy -----------------------------------------------------------------------------


def later_rounds(release: Release, policy: Policy | KeptPolicy, *, released: int, plan: str) -> Iterator[LaterRounds]:
    """Yield a row for each kind that the yes is about.

    Args:
        release: held. Of a plan it is every kind that the policy asks people about, or never asks.
        policy: in force; without the lines of its file, only the release's own line is known.
        released: other rounds of the run in which a message of this kind was allowed.
        plan: canonical, of the run; empty where it is not known, and then no round is named: `asked` and `unasked` are
            None.
    """
    if release.kind == "run.plan":
        for name, field in type(policy.file.egress).model_fields.items():
            block = getattr(getattr(policy.file.egress, name), "approvals", None)
            kind = field.alias or name
            if isinstance(block, Approvals):
                place = (
                    (policy.source, policy.line_of(("egress", kind, "approvals")))
                    if isinstance(policy, Policy)
                    else ("", 0)
                )
                yield _left_to_policy(kind, block, place, None)
        return
    block = getattr(getattr(policy.file.egress, release.kind.replace(".", "_"), None), "approvals", None)
    if isinstance(block, Approvals):
        rule = next((one for one in release.rules if one.rule == "approvals"), None)
        place = (rule.file, rule.line) if rule is not None else ("", 0)
        later = _rounds_with(release.kind, plan_from_canonical(plan), after=release.round) if plan else None
        # this release is the (released + 1)-th, so the round after it brings the (released + 2)-th
        named = None if later is None else {each: released + 2 + index for index, each in enumerate(later)}
        yield _left_to_policy(release.kind, block, place, named)


def _rounds_with(kind: str, plan: Plan, *, after: int) -> list[int]:
    """Return the rounds after one in which messages of this kind may leave: kinds of updates take turns."""
    method, later = method_named(plan.method), range(after + 1, plan.rounds + 1)
    return [
        number for number in later if kind not in method.update_kinds(plan) or method.update_kind(plan, number) == kind
    ]


def _left_to_policy(
    kind: str, block: Approvals, place: tuple[Any, Any], rounds: Mapping[int, int] | None
) -> LaterRounds:
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
    return LaterRounds(
        kind=kind,
        asked=tuple(again) if known else None,
        unasked=tuple(unasked) if known else None,
        file=str(place[0]),
        line=place[1],
        says=says,
    )


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
