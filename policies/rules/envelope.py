"""Rules on every message: is its kind named, its sender listed, the policy in force, its round open."""

from __future__ import annotations

from fedsilo.protocol.kinds import KINDS, OFFERED_KINDS, OUTBOUND_KINDS, of_place
from policies.history import History
from policies.load import Policy
from policies.message import Facts
from policies.rules.base import Judgement, block_of, holds, none_of, not_applicable, rule, side_of, within

# Where in a run a message belongs is in its row. What may be late belongs to any round until now, of those that its
# sender's book still counts (`policies.history.ROUNDS_KEPT`).
_PLACED = of_place("round", "open step", "named step", "asked step", "past round", "past round or base")
_CONTROL_SENT = tuple(name for name in OUTBOUND_KINDS if KINDS[name].is_control)


@rule("measured", "NOT_MEASURED")
def measured(facts: Facts, policy: Policy, history: History) -> Judgement:
    """Facts that could not be taken whole are no ground for anything."""
    good = facts["measured"] is True and "measure_error" not in facts
    return holds(good, (), measured=facts.get("measure_error", good))


@rule("kind", "KIND_NOT_ALLOWED")
def kind(facts: Facts, policy: Policy, history: History) -> Judgement:
    """A kind that the policy does not name is denied, in either direction."""
    block, path = block_of(facts, policy)
    name = facts["kind"]
    allowed = name in KINDS and facts["direction"] in ("egress", "ingress") and block is not None
    if allowed and name.startswith("control."):
        allowed = name.removeprefix("control.") in block.kinds
        path = (*path, "kinds")
    return holds(allowed, path, measured=name, limit="a kind that the policy names")


@rule("fields", "FIELD_NOT_ALLOWED")
def fields(facts: Facts, policy: Policy, history: History) -> Judgement:
    """Each field has a class in the catalogue and holds what its class allows (T3, T8)."""
    _, path = block_of(facts, policy)
    return none_of(sum(facts["fields_at_fault"].values()), path)


@rule("sender", "SENDER")
def sender(facts: Facts, policy: Policy, history: History) -> Judgement:
    """The sender is the certificate's identity and stands in the policy."""
    federation = policy.file.federation
    listed = facts["sender"] in policy.peers or facts["sender"] == federation.coordinator
    return holds(
        listed and facts["sender_expected"] is True,
        ("federation", "peers" if side_of(facts, policy) == "egress" else "coordinator"),
        measured=facts["sender"],
        limit="the expected party, listed in the policy",
    )


@rule("valid", "POLICY_NOT_VALID_NOW")
def valid(facts: Facts, policy: Policy, history: History) -> Judgement:
    """Seconds UTC; an expired policy lets nothing out."""
    # The last moment is exclusive: one second before `until` is the last that counts.
    return within(facts["now"], (policy.valid_from_seconds, policy.valid_until_seconds - 1), ("valid",))


@rule("run", "RUN_NOT_OPEN", *_PLACED, *of_place("run"))
def run(facts: Facts, policy: Policy, history: History) -> Judgement:
    _, path = block_of(facts, policy)
    return holds(facts["run_is_open"], path)


@rule("kind of the method", "METHOD_KIND", *OFFERED_KINDS)
def kind_of_method(facts: Facts, policy: Policy, history: History) -> Judgement:
    """The running method offers this kind: what a policy names for one method is not open to another."""
    _, path = block_of(facts, policy)
    if side_of(facts, policy) == "ingress":
        return not_applicable()  # knowledge.package comes in, too
    return holds(facts["kind_of_method"], path)


@rule("round", "ROUND_NOT_OPEN", *_PLACED)
def round_and_step(facts: Facts, policy: Policy, history: History) -> Judgement:
    """The message belongs to the open round, and to its open step where it has a step."""
    _, path = block_of(facts, policy)
    name, number, step = facts["kind"], facts["round"], facts["step"]
    match KINDS[name].place:
        case "past round" | "past round or base" as place:
            fits = (place == "past round") <= number <= facts["open_round"] and step == 0
        case "named step":
            fits = number == facts["open_round"] >= 1 and 1 <= step <= facts["plan_local_steps"]
        case "asked step":
            fits = number == facts["open_round"] >= 1 and step == facts["asked_step"] >= 1
        case "round":
            fits = number == facts["open_round"] >= 1 and step == 0
        case _:
            fits = number == facts["open_round"] >= 1 and step == facts["open_step"] >= 1
    open_at = f"{facts['open_round']}.{facts['open_step']}"
    return holds(fits, path, measured=f"{number}.{step}", limit=f"round.step {open_at}")


@rule("place of a control message", "CONTROL_PLACE", *_CONTROL_SENT)
def control_place(facts: Facts, policy: Policy, history: History) -> Judgement:
    """Round and step carry nothing but where the run stands (T9): none outside a run, and in a run only with the kinds
    that say it, at most the open round (an offer may settle after its round) and the plan's last step, as in the body.
    """
    _, path = block_of(facts, policy)
    if side_of(facts, policy) == "ingress":
        return not_applicable()  # the coordinator's answers take nothing out of a site
    place = (facts["round"], facts["step"])
    latest = last_step = 0
    if facts["place_in_body"] and facts["run_is_open"] is True:
        latest, last_step = facts["open_round"], facts["plan_local_steps"]
    within_run = 0 <= place[0] <= latest and 0 <= place[1] <= (last_step if place[0] else 0)
    refused = facts["kind"] == "control.abstain" and place == (facts["refused_round"], 0)
    # The sender's own gate knew a run that is over at the receiver; the news of its end may be on the way.
    over = facts["direction"] == "ingress" and facts["run_is_open"] is False and facts["run"] != ""
    return holds(
        facts["place_of_body"] is True and (within_run or refused or (over and facts["place_in_body"])),
        path,
        measured=f"{place[0]}.{place[1]}",
        limit=f"at most round.step {latest}.{last_step}, the same in envelope and body",
    )


RULES = (measured, kind, fields, sender, valid, run, kind_of_method, round_and_step, control_place)
