"""All rules, in the order in which they judge, and those that are not of one kind alone; a kind's own are in its file.

An empty list would deny; the engine sees to that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from fedsilo.protocol.kinds import FURTHER, KINDS, OFFERED_KINDS, OUTBOUND_KINDS, TEXT_KINDS_OUT, of_place
from fedsilo.protocol.strict_yaml import Path
from fedsilo.protocol.transcript import SIGNATURE_BYTES
from policies import kind as k
from policies import screens
from policies.fields import Approvals
from policies.history import History, bucket_of
from policies.kinds import KINDS as OF_KINDS
from policies.message import OFFERED, Facts
from policies.model import Policy

# ---- every message: is its kind named, its sender listed, the policy in force, its round open -----

# Where in a run a message belongs is in its row. What may be late belongs to any round until now, of those that its
# sender's book still counts (`policies.history.ROUNDS_KEPT`).
_PLACED = of_place("round", "open step", "named step", "asked step", "past round", "past round or base")
_CONTROL_SENT = tuple(name for name in OUTBOUND_KINDS if KINDS[name].is_control)


@k.rule("measured", "NOT_MEASURED")
def measured(facts: Facts, policy: Policy, history: History) -> k.Judgement:
    """Facts that could not be taken whole are no ground for anything."""
    good = facts["measured"] is True and "measure_error" not in facts
    return k.holds(good, (), measured=facts.get("measure_error", good))


@k.rule("kind", "KIND_NOT_ALLOWED")
def kind(facts: Facts, policy: Policy, history: History) -> k.Judgement:
    """A kind that the policy does not name is denied, in either direction."""
    block, path = k.block_of(facts, policy)
    name = facts["kind"]
    allowed = name in KINDS and facts["direction"] in ("egress", "ingress") and block is not None
    if allowed and name.startswith("control."):
        allowed = name.removeprefix("control.") in block.kinds
        path = (*path, "kinds")
    return k.holds(allowed, path, measured=name, limit="a kind that the policy names")


@k.facts_rule("fields", "FIELD_NOT_ALLOWED")
def fields(facts: Facts, path: Path) -> k.Judgement:
    """Each field has a class in the catalogue and holds what its class allows (T3, T8)."""
    return k.none_of(sum(facts["fields_at_fault"].values()), path)


@k.rule("sender", "SENDER")
def sender(facts: Facts, policy: Policy, history: History) -> k.Judgement:
    """The sender is the certificate's identity and stands in the policy."""
    federation = policy.file.federation
    listed = facts["sender"] in policy.peers or facts["sender"] == federation.coordinator
    return k.holds(
        listed and facts["sender_expected"] is True,
        ("federation", "peers" if k.side_of(facts, policy) == "egress" else "coordinator"),
        measured=facts["sender"],
        limit="the expected party, listed in the policy",
    )


@k.rule("valid", "POLICY_NOT_VALID_NOW")
def valid(facts: Facts, policy: Policy, history: History) -> k.Judgement:
    """Seconds UTC; an expired policy lets nothing out."""
    # The last moment is exclusive: one second before `until` is the last that counts.
    return k.within(facts["now"], (policy.valid_from_seconds, policy.valid_until_seconds - 1), ("valid",))


@k.facts_rule("run", "RUN_NOT_OPEN", *_PLACED, *of_place("run"))
def run(facts: Facts, path: Path) -> k.Judgement:
    return k.holds(facts["run_is_open"], path)


@k.rule("kind of the method", "METHOD_KIND", *OFFERED_KINDS)
def kind_of_method(facts: Facts, policy: Policy, history: History) -> k.Judgement:
    """The running method offers this kind: what a policy names for one method is not open to another."""
    _, path = k.block_of(facts, policy)
    if k.side_of(facts, policy) == "ingress":
        return k.not_applicable()  # knowledge.package comes in, too
    return k.holds(facts["kind_of_method"], path)


@k.facts_rule("round", "ROUND_NOT_OPEN", *_PLACED)
def round_and_step(facts: Facts, path: Path) -> k.Judgement:
    """The message belongs to the open round, and to its open step where it has a step."""
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
    return k.holds(fits, path, measured=f"{number}.{step}", limit=f"round.step {open_at}")


@k.rule("place of a control message", "CONTROL_PLACE", *_CONTROL_SENT)
def control_place(facts: Facts, policy: Policy, history: History) -> k.Judgement:
    """Round and step carry nothing but where the run stands (T9): none outside a run, and in a run only with the kinds
    that say it, at most the open round (an offer may settle after its round) and the plan's last step, as in the body.
    """
    _, path = k.block_of(facts, policy)
    if k.side_of(facts, policy) == "ingress":
        return k.not_applicable()  # the coordinator's answers take nothing out of a site
    place = (facts["round"], facts["step"])
    latest = last_step = 0
    if facts["place_in_body"] and facts["run_is_open"] is True:
        latest, last_step = facts["open_round"], facts["plan_local_steps"]
    within_run = 0 <= place[0] <= latest and 0 <= place[1] <= (last_step if place[0] else 0)
    refused = facts["kind"] == "control.abstain" and place == (facts["refused_round"], 0)
    # The sender's own gate knew a run that is over at the receiver; the news of its end may be on the way.
    over = facts["direction"] == "ingress" and facts["run_is_open"] is False and facts["run"] != ""
    return k.holds(
        facts["place_of_body"] is True and (within_run or refused or (over and facts["place_in_body"])),
        path,
        measured=f"{place[0]}.{place[1]}",
        limit=f"at most round.step {latest}.{last_step}, the same in envelope and body",
    )


_ENVELOPE = (measured, kind, fields, sender, valid, run, kind_of_method, round_and_step, control_place)


# ---- budgets --------------------------------------------------------------------------------------
# Budgets: bytes of a message, a round and a day, and messages a minute (threat T11).
#
# Bytes are payload bytes. Round, day and minute budgets bind what silos send; what the coordinator sends a silo is an
# answer to the silo's own request, so there only the size of a message is limited.


@k.rule("message bytes", "MESSAGE_BYTES")
def message_bytes(facts: Facts, policy: Policy, history: History) -> k.Judgement:
    key = "control_message_bytes" if facts["kind"].startswith("control.") else "message_bytes"
    return k.at_most(facts["payload_bytes"], getattr(policy.file.budgets, key), ("budgets", key))


@k.rule("round bytes", "ROUND_BYTES")
def round_bytes(facts: Facts, policy: Policy, history: History) -> k.Judgement:
    """Bytes of one round of one run. Control messages and those of round 0 draw on the day's budget only."""
    if k.side_of(facts, policy) == "ingress" or facts["round"] == 0 or facts["kind"].startswith("control."):
        return k.not_applicable()
    total = history.round_bytes + facts["payload_bytes"]
    return k.at_most(total, policy.file.budgets.round_bytes, ("budgets", "round_bytes"))


@k.rule("day bytes", "DAY_BYTES")
def day_bytes(facts: Facts, policy: Policy, history: History) -> k.Judgement:
    if k.side_of(facts, policy) == "ingress":
        return k.not_applicable()
    total = history.day_bytes + facts["payload_bytes"]
    return k.at_most(total, policy.file.budgets.day_bytes, ("budgets", "day_bytes"))


_RATE_KEYS = {
    "poll": "polls_per_minute",
    "control": "control_messages_per_minute",
    "content": "messages_per_minute",
}


@k.rule("messages per minute", "MESSAGE_RATE")
def rate(facts: Facts, policy: Policy, history: History) -> k.Judgement:
    """Polls, other control messages and everything else have a bucket each."""
    if k.side_of(facts, policy) == "ingress":
        return k.not_applicable()
    key = _RATE_KEYS[bucket_of(facts["kind"])]
    return k.at_most(history.messages_in_minute + 1, getattr(policy.file.budgets, key), ("budgets", key))


_VOLUME = (message_bytes, round_bytes, day_bytes, rate)


# ---- what silos sign for each other ---------------------------------------------------------------
# Rules on what silos sign for each other: what a silo says of others' logs, who has witnessed its own (T38), and its
# signature under the transcript of a round (T20).


@k.rule("checkpoints of others", "CHECKPOINTS_OF_OTHERS", "control.checkpoint")
def others(facts: Facts, policy: Policy, history: History) -> k.Judgement:
    """A silo shows no log but its own, and countersigns at most one checkpoint of each other silo at a time."""
    shown, signed = facts["peer_logs"], facts["countersigned"]
    # the coordinator carries for every silo; this site looks only at those that its policy lists
    outward = k.side_of(facts, policy) == "egress"
    logs, most = (0, len(policy.peers) - 1) if outward else (k.NAMES_MAX, k.NAMES_MAX)
    return k.holds(
        0 <= shown <= logs and 0 <= signed <= most,
        ("federation", "peers"),
        measured=f"{shown} logs, {signed} cosignatures",
        limit=f"at most {logs} logs, {most} cosignatures",
    )


@k.rule("witnesses", "TOO_FEW_WITNESSES", "round.open")
def witnesses(facts: Facts, policy: Policy, history: History) -> k.Judgement:
    """A further round opens once enough parties have countersigned this site's log as it was after the last one."""
    _, path = k.block_of(facts, policy)
    if facts["direction"] != "ingress" or facts["round"] <= 1:
        return k.not_applicable(path)
    return k.at_least(facts["witnesses"], policy.file.audit.min_witnesses, ("audit", "min_witnesses"))


@k.facts_rule("countersignature", "COUNTERSIGNATURE", "control.poll")
def countersignature(facts: Facts, path: Path) -> k.Judgement:
    """A poll carries a signature of exactly its length while a round waits for it, and nothing at any other time (T9).
    Whether it verifies, its receiver looks; there it may also come late."""
    size = facts["countersignature_bytes"]
    most = SIGNATURE_BYTES if facts["countersigns"] is True or facts["direction"] == "ingress" else 0
    return k.holds(size in (0, most), path, measured=size, limit=f"0 or {most} bytes")


_AUDIT = (others, witnesses, countersignature)


# ---- what text screens found ----------------------------------------------------------------------
# Rules on what text screens found in the texts of a message (threats T14 to T18, T21).
#
# A screen's hit is counted, never quoted: a fact is a code of a closed list and a number. What they do not stop:
# private text in words that no screen knows (N3), and a trainer that lies about the corpus its overlap index is made
# of (N1).


@k.rule("screens ran", "SCREEN_FAILED", *screens.TEXT_KINDS)
def screens_ran(facts: Facts, policy: Policy, history: History) -> k.Judgement:
    """Each screen that the policy names ran over every text, with the settings that stand in this very policy."""
    block, path = k.block_of(facts, policy)
    names = screens.asked(block, facts["kind"], facts["direction"])
    if not names or facts["stage"] == OFFERED:
        return k.not_applicable()
    settings = {name: screens.settings_of(policy.file, name) for name in names}
    lacking = sum(not digest or facts["screens"].get(name) != digest for name, digest in settings.items())
    return k.none_of(lacking, (*path, "screens"))


@k.rule("screen hits", "SCREEN_HIT", *screens.TEXT_KINDS)
def screen_hits(facts: Facts, policy: Policy, history: History) -> k.Judgement:
    """No hit in what goes out or is let in, or, with on_hit hold, persons who have approved exactly these bytes.

    Only responses can be held: of them a hit can be one of many, and a person can look at it.
    """
    block, path = k.block_of(facts, policy)
    if not screens.asked(block, facts["kind"], facts["direction"]) or facts["stage"] == OFFERED:
        return k.not_applicable()
    hits = facts["responses_hit"]
    if facts["direction"] == "ingress" or getattr(block, "on_hit", "withhold") == "withhold":
        return k.none_of(hits, (*path, "screens"))
    if hits == 0:
        return k.Judgement("ok", 0, 0, (*path, "on_hit"))
    asked = block.approvals
    people = {approval.person for approval in history.approvals if set(approval.roles) & set(asked.roles)}
    outcome: k.Outcome = "ok" if len(people) >= asked.persons else "hold"
    return k.Judgement(outcome, len(people), asked.persons, (*path, "on_hit"), least=True)


@k.rule("screen hits per day", "SCREEN_HALT", *TEXT_KINDS_OUT)
def hits_per_day(facts: Facts, policy: Policy, history: History) -> k.Judgement:
    """Beyond the day's hits the kind is halted, so that nobody asks the screens about the private corpus (T18)."""
    block, path = k.block_of(facts, policy)
    if facts["direction"] != "egress" or not screens.asked(block, facts["kind"], facts["direction"]):
        return k.not_applicable()
    path = (*path, "max_hits_per_day")
    if history.screen_halted is not False:
        return k.holds(False, path, measured="halted", limit="released by persons")
    return k.at_most(history.screen_hits_in_day, block.max_hits_per_day, path)


SCREENS = (screens_ran, screen_hits, hits_per_day)


# ---- approvals ------------------------------------------------------------------------------------
# Approvals: in the rounds the policy names, a message waits until enough people have approved its bytes (T36).
#
# Rounds are counted by what this party has released, not by the number in the envelope, which the coordinator chooses.


def asked(block: Approvals, ordinal: int) -> bool:
    """Return whether the message of the run's `ordinal`-th round with such a message waits for people; counted from
    1."""
    return ordinal <= block.first_rounds or (block.then > 0 and ordinal % block.then == 0)


@k.rule("approvals", "APPROVAL", *(name for name, kind in KINDS.items() if kind.held))
def approvals(facts: Facts, policy: Policy, history: History) -> k.Judgement:
    """Distinct people in a named role who approved exactly this payload. The coordinator approves for nobody."""
    block, path = k.block_of(facts, policy)
    releasing = facts["direction"] == ("ingress" if facts["kind"] == "run.plan" else "egress")
    if block is None or not releasing or facts["stage"] == OFFERED:
        return k.not_applicable()
    path = (*path, "approvals")
    rules: Approvals = block.approvals
    if facts["kind"] == "run.plan":
        # One plan stands for all rounds of its run.
        waits = rules.first_rounds > 0 or rules.then > 0
    else:
        waits = asked(rules, history.rounds_released + 1)
    if not waits:
        return k.Judgement("ok", 0, 0, path)
    people = {approval.person for approval in history.approvals if set(approval.roles) & set(rules.roles)}
    return k.Judgement("ok" if len(people) >= rules.persons else "hold", len(people), rules.persons, path, least=True)


_APPROVALS = (approvals,)


# ---- all of them --------------------------------------------------------------------------------


def _place(kind: k.PolicyKind) -> int:
    """Return where the rules of a kind come: kinds of the further methods one by one, the others file by file."""
    row, names = KINDS[kind.name], list(KINDS)
    alike = row if row in FURTHER else next(each for each in KINDS.values() if each.module == row.module)
    return names.index(alike.name)


_OF_POLICIES: tuple[k.PolicyKind, ...] = tuple(sorted(OF_KINDS.values(), key=_place))


def _lists() -> Iterator[Sequence[k.Rule]]:
    yield (*_ENVELOPE, *_VOLUME)
    for kind in _OF_POLICIES:
        if set(k.SHARED) & set(kind.rules):
            yield k.SHARED
        yield kind.rules
    yield (*_AUDIT, *SCREENS, *_APPROVALS)


def in_order(lists: Iterable[Sequence[k.Rule]]) -> list[k.Rule]:
    """Return the rules of all lists, each once. The order of each list is kept; what a list has between two rules that
    are placed already comes before the second."""
    placed: list[k.Rule] = []
    for rules in lists:
        at = len(placed)
        for each in reversed(rules):
            if each in placed:
                at = placed.index(each)
            else:
                placed.insert(at, each)
    return placed


def _with_kinds(made: k.Rule) -> k.Rule:
    """A kind's rule that names no kinds judges those that list it."""
    listed = frozenset(kind.name for kind in _OF_POLICIES if made in kind.rules)
    return made if made.kinds else replace(made, kinds=listed)


RULES: tuple[k.Rule, ...] = tuple(map(_with_kinds, in_order(_lists())))
