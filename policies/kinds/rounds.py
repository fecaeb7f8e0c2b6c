"""The coordinator's messages about a round and about the end of a run: `round.open`, `round.agreed`, `round.result` and
`run.end` (threats T12, T20). Prompts come by index; silos are named, each once."""

from __future__ import annotations

from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.plan import Plan
from fedsilo.protocol.strict_yaml import Path
from fedsilo.protocol.transcript import SIGNATURE_BYTES
from policies import kind as k
from policies.fields import Closed, Limit, PinnedText
from policies.history import History
from policies.message import Context, Facts, Message
from policies.model import Policy

_F = k.FieldClass
FIELDS: k.FieldTable = {
    "PublicStep": {"step": _F.NUMBER, "prompt_indices": _F.NUMBER},
    "RoundOpen": {"base_digest": _F.DIGEST, "transcript": _F.TRANSCRIPT, "transcript_signature": _F.SIGNATURE},
    "Countersignature": {
        "silo": _F.NAME,
        "transcript_sha256": _F.DIGEST,
        "signature": _F.SIGNATURE,
        "certificate_pem": _F.CERTIFICATE,
    },
    "RoundAgreed": {"transcript_sha256": _F.DIGEST},
    "RoundResult": {
        "committed": _F.NUMBER,
        "adapter_digest": _F.DIGEST,
        "participants": _F.NAME,
        "transcript_sha256": _F.DIGEST,
        "result_signature": _F.SIGNATURE,
        "closed": _F.NUMBER,
    },
    "ResultOfSilo": {"receiver": _F.NAME, "adapter_digest": _F.DIGEST, "participants": _F.NAME},
    "SiloVerdict": {"silo": _F.NAME, "verdict": frozenset({"accepted", "left_out", "absent"})},
    "RunEnd": {"outcome": frozenset({"finished", "failed", "aborted"}), "adapter_digest": _F.DIGEST},
}


class RoundOpen(Closed):
    set: PinnedText
    max_prompts_per_step: Limit


class Announcement(Closed):
    """round.agreed, round.result and run.end carry digests, names and signatures only; naming the kind is all there is
    to say."""


def _opened(body: pb.RoundOpen, message: Message, context: Context) -> Facts:
    plan, round_number = context.plan, message.place.round
    steps = [step.step for step in body.public_steps]
    indices = [index for step in body.public_steps for index in step.prompt_indices]
    return {
        "base_digest_empty": body.base_digest == "",
        "round_in_plan": plan is not None and 1 <= round_number <= plan.rounds,
        "starts_as_planned": plan is None or round_number != 1 or plan.start_adapter_sha256 in ("", body.base_digest),
        "repeats_open_round": round_number == context.open_round
        and body.base_digest == context.base_digest
        and {step.step: tuple(step.prompt_indices) for step in body.public_steps} == dict(context.open_steps),
        "steps_repeated": len(steps) - len(set(steps)),
        "steps_not_in_plan": sum(plan is None or step not in plan.public_steps() for step in steps),
        "prompts": len(indices),
        "prompts_not_in_set": sum(index >= context.public_set_rows for index in indices),
        "prompts_repeated": sum(len(step.prompt_indices) - len(set(step.prompt_indices)) for step in body.public_steps),
        "prompts_per_step_max": max((len(step.prompt_indices) for step in body.public_steps), default=0),
        "plan_prompts_per_step": plan.prompts_per_step if plan else 0,
        "public_set_sha256": context.public_set_sha256,
        "witnesses": context.witnesses,
    }


def _roster_facts(*lists: list[str], plan: Plan | None) -> Facts:
    """Silos that a message lists, one row for each of them in each list."""
    distinct = [set(each) for each in lists]
    named = set().union(*distinct)
    names, at_fault = k.names_of(named)
    return {
        "names": names,
        "names_at_fault": at_fault,
        "names_repeated": sum(map(len, lists)) - sum(map(len, distinct)),
        "names_not_in_plan": len(named.difference(plan.silos if plan else ())),
    }


def _agreed(body: pb.RoundAgreed, message: Message, context: Context) -> Facts:
    return _roster_facts([row.silo for row in body.countersignatures], plan=context.plan)


def _result(body: pb.RoundResult, message: Message, context: Context) -> Facts:
    lists = [list(body.participants), [row.silo for row in body.verdicts], [row.receiver for row in body.results]]
    names = _roster_facts(*lists, *(list(row.participants) for row in body.results), plan=context.plan)
    return {**names, "committed_and_closed": body.committed and body.closed}


@k.rule("round is of the plan", "ROUND_NOT_OPEN")
def round_of_plan(facts: Facts, policy: Policy, history: History) -> k.Judgement:
    """The round exists in the plan, and names the adapter it starts from where the policy takes one in."""
    _, path = k.block_of(facts, policy)
    named = facts["base_digest_empty"] is (policy.file.ingress.global_adapter is None)
    return k.holds(facts["round_in_plan"] is True and named, path)


@k.facts_rule("first round starts from the plan's adapter", "ROUND_START")
def round_start(facts: Facts, path: Path) -> k.Judgement:
    """Where the signed plan names the adapter that the run starts from, the first round opens on no other (T20)."""
    if "starts_as_planned" not in facts:
        return k.not_applicable(path)  # measured by a version that did not look at it
    return k.holds(facts["starts_as_planned"], path)


@k.facts_rule("rounds go forward", "ROUND_NOT_OPEN")
def round_forward(facts: Facts, path: Path) -> k.Judgement:
    """A round opens once. The same round.open again is its redelivery and changes nothing."""
    fits = facts["round"] > facts["open_round"] or facts["repeats_open_round"] is True
    return k.holds(fits, path, measured=facts["round"], limit=f"above the open round {facts['open_round']}")


@k.facts_rule("public steps of the plan", "PUBLIC_STEPS")
def round_steps(facts: Facts, path: Path) -> k.Judgement:
    return k.none_of(facts["steps_repeated"] + facts["steps_not_in_plan"], path)


@k.block_rule("prompts per public step", "PROMPTS")
def round_prompts(facts: Facts, block: RoundOpen, path: Path) -> k.Judgement:
    if facts["prompts_per_step_max"] > facts["plan_prompts_per_step"]:
        return k.at_most(facts["prompts_per_step_max"], facts["plan_prompts_per_step"], path)
    return k.at_most(facts["prompts_per_step_max"], block.max_prompts_per_step, (*path, "max_prompts_per_step"))


@k.facts_rule("silos of the plan, each once", "ROSTER")
def roster(facts: Facts, path: Path) -> k.Judgement:
    """A list of silos names each at most once, and none that the plan does not name: what is recorded of it is bounded,
    and says one thing of each (T20)."""
    return k.none_of(facts["names_repeated"] + facts["names_not_in_plan"], path)


@k.facts_rule("a round ends in one way", "ROUND_END")
def one_end(facts: Facts, path: Path) -> k.Judgement:
    """A round is committed, or closed, or neither: an end that says both can be read in two ways (T20)."""
    if "committed_and_closed" not in facts:
        return k.not_applicable(path)  # measured by a version that did not look at it
    return k.holds(facts["committed_and_closed"] is False, path)


def _opening(at: k.Around) -> k.Example:
    base = "" if at.policy.file.ingress.global_adapter is None else k.BASE_DIGEST
    steps = [pb.PublicStep(step=step, prompt_indices=at.rows) for step in at.plan.public_steps()]
    return k.Example(pb.RoundOpen(base_digest=base, public_steps=steps))


def _signed(at: k.Around) -> k.Example:
    signed = pb.Countersignature(silo=at.plan.silos[0], signature=bytes(SIGNATURE_BYTES))
    return k.Example(pb.RoundAgreed(countersignatures=[signed]))


def _committed(at: k.Around) -> k.Example:
    return k.Example(pb.RoundResult(committed=True, adapter_digest=k.BASE_DIGEST, participants=at.plan.silos[:1]))


def _ended(at: k.Around) -> k.Example:
    return k.Example(pb.RunEnd(outcome="finished", adapter_digest=k.BASE_DIGEST))


KINDS = (
    k.PolicyKind(
        "round.open",
        _opening,
        taken=RoundOpen,
        measure=_opened,
        rules=(round_of_plan, round_start, round_forward, round_steps, k.rows_of_set, round_prompts),
    ),
    k.PolicyKind("round.agreed", _signed, taken=Announcement, measure=_agreed, rules=(k.silos_are_peers, roster)),
    k.PolicyKind(
        "round.result", _committed, taken=Announcement, measure=_result, rules=(k.silos_are_peers, roster, one_end)
    ),
    k.PolicyKind("run.end", _ended, taken=Announcement),
)
