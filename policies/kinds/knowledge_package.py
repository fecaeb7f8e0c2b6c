"""`knowledge.package`: answers to a public transfer set, from silo to silo or to the coordinator's model.

What the rules do not stop: private text that the model repeats in an answer (N2), where no text screen is named.
"""

from __future__ import annotations

import itertools
import math
from typing import Annotated, Literal

from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.strict_yaml import Path
from policies import kind as k
from policies import lattice
from policies.fields import Approvals, Closed, Grid, Limit, PinnedText
from policies.grids import Bits, answer_bits, lowest, points_of, text_in_words
from policies.message import Context, Facts, Message, Requests
from policies.model import HitsPerDay, ScreenNames, TextOnlyNames

_F = k.FieldClass
FIELDS: k.FieldTable = {
    "PackageEntry": {"prompt_index": _F.NUMBER, "confidence": _F.NUMBER},
    "KnowledgePackage": {"transfer_set_sha256": _F.DIGEST, "match": _F.NUMBER, "peer": _F.NAME_OR_NONE},
}


class KnowledgePackage(Closed):
    """Answers to the prompts of a public transfer set.

    A screen's hit refuses the message whole, and counts for the day.

    Attributes:
        receiver: the matched peer, or the coordinator.
        confidence: of an answer; absent: none is told.
    """

    set: PinnedText
    receiver: Annotated[Literal["peer", "coordinator"], lattice.SAME]
    max_entries: Limit
    max_bytes_per_answer: Limit
    max_bytes: Limit
    confidence: Grid | None = None
    per_round: Limit
    screens: ScreenNames = ()
    max_hits_per_day: HitsPerDay = None
    approvals: Approvals


class PackageIn(Closed):
    """A knowledge package: the matched peer's, or what the coordinator's model answers."""

    set: PinnedText
    origin: Annotated[Literal["peer", "coordinator"], lattice.SAME]
    max_entries: Limit
    max_bytes_per_answer: Limit
    max_bytes: Limit
    screens: TextOnlyNames = ()


def measure(body: pb.KnowledgePackage, message: Message, context: Context) -> Facts:
    asked, rows = context.asked, [entry.prompt_index for entry in body.entries]
    names, at_fault = k.names_of([body.peer] if body.peer else [])
    confidences = [entry.confidence for entry in body.entries if entry.HasField("confidence")]
    return {
        **k.set_facts(body.transfer_set_sha256, context),
        **k.text_facts([entry.answer for entry in body.entries], context),
        **k.value_facts(confidences),
        "confidences": len(confidences),
        "match": body.match,
        "match_is_open": asked.match > 0 and body.match == asked.match,
        "part": asked.part,
        "peer_is_matched": bool(asked.peer) and body.peer == asked.peer,
        "names": names,
        "names_at_fault": at_fault,
        "prompts": len(rows),
        "prompts_repeated": len(rows) - len(set(rows)),
        "prompts_out_of_order": sum(later < earlier for earlier, later in itertools.pairwise(rows)),
        "prompts_not_in_set": sum(row >= context.public_set_rows for row in rows),
    }


def _with_a_peer(block: KnowledgePackage | PackageIn) -> tuple[bool, str, str]:
    """(whether a peer is at the other end, the key that says so, the part that this silo has in the match)."""
    if isinstance(block, PackageIn):
        return block.origin == "peer", "origin", "take"
    return block.receiver == "peer", "receiver", "give"


@k.block_rule("package of the open match", "MATCH", "knowledge.package")
def package_match(facts: Facts, block: KnowledgePackage | PackageIn, path: Path) -> k.Judgement:
    """The last match, in the part this silo has in it; none where the coordinator is at the other end."""
    matched, key, part = _with_a_peer(block)
    if not matched:
        return k.equal(facts["match"], 0, (*path, key))
    return k.holds(facts["match_is_open"] is True and facts["part"] == part, (*path, key), measured=facts["match"])


@k.block_rule("package to or from the matched peer", "NOT_A_PEER", "knowledge.package")
def package_peer(facts: Facts, block: KnowledgePackage | PackageIn, path: Path) -> k.Judgement:
    """The matched peer and no other; nobody is named where the coordinator is at the other end."""
    matched, key, _ = _with_a_peer(block)
    if not matched:
        return k.none_of(len(facts["names"]) + facts["names_at_fault"], (*path, key))
    return k.holds(facts["peer_is_matched"], (*path, key))


@k.facts_rule("package prompts", "PROMPT_NOT_PUBLIC", "knowledge.package")
def package_prompts(facts: Facts, path: Path) -> k.Judgement:
    """Rows of the transfer set, each once."""
    return k.none_of(facts["prompts_not_in_set"] + facts["prompts_repeated"], (*path, "set"))


@k.block_rule("package confidence", "CONFIDENCE", "knowledge.package")
def confidence(facts: Facts, block: KnowledgePackage | PackageIn, path: Path) -> k.Judgement:
    """In range and on the grid; none at all where the policy has no grid for it."""
    if isinstance(block, PackageIn):
        return k.not_applicable()
    path = (*path, "confidence")
    if block.confidence is None:
        return k.none_of(facts["confidences"], path)
    wrong = k.out_of_range(facts["values"], block.confidence) + k.off_grid(facts["values"], block.confidence)
    return k.none_of(wrong + facts["values_at_fault"], path)


PACKAGE_ORDER = k.zero_rule(
    "package in order", "PROMPT_ORDER", "prompts_out_of_order", why="By row, so that the order says nothing (T9)."
)
ENTRIES = k.limit_rule("entries of a package", "ENTRIES", "max_entries", k.fact("prompts"))
PACKAGE_BYTES = k.limit_rule("bytes of a package", "RESPONSE_BYTES", "max_bytes", k.fact("payload_bytes"))


def text_bytes(block: KnowledgePackage) -> tuple[str, int, int]:
    return "max_bytes", block.per_round * block.max_bytes, block.max_bytes


def largest(block: KnowledgePackage, at: k.Figures) -> tuple[int, int]:
    return block.per_round, block.per_round * block.max_bytes


def bits(block: KnowledgePackage, at: k.Figures) -> Bits:
    sizes = block.max_entries, block.max_bytes_per_answer, block.max_bytes
    confidences = 1 + (points_of(block.confidence) if block.confidence else 0)
    one = answer_bits(*sizes) + block.max_entries * math.log2(confidences)
    return Bits(block.per_round * one, f"{block.per_round} x {text_in_words(*sizes)}")


def example(at: k.Around) -> k.Example:
    block = at.block
    matched, _, part = _with_a_peer(block)
    peer = at.plan.silos[-1] if matched else ""
    confidence = lowest(block.confidence) if at.sent and block.confidence is not None else None
    entry = pb.PackageEntry(prompt_index=0, answer=at.answer(block.max_bytes_per_answer), confidence=confidence)
    body = pb.KnowledgePackage(transfer_set_sha256=at.set_sha256, match=int(matched), peer=peer, entries=[entry])
    return k.Example(body, {"asked": Requests(match=1, peer=peer, part=part)} if matched else {})


KINDS = (
    k.PolicyKind(
        "knowledge.package",
        example,
        sent=KnowledgePackage,
        taken=PackageIn,
        measure=measure,
        rules=(
            k.pinned_set,
            k.some_per_round,
            k.TEXT_BYTES,
            k.FINISHES,
            package_match,
            package_peer,
            package_prompts,
            PACKAGE_ORDER,
            ENTRIES,
            PACKAGE_BYTES,
            confidence,
        ),
        largest=largest,
        bits=bits,
        text_bytes=text_bytes,
    ),
)
