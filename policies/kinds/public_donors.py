"""`public.donors`: answers of other silos' models, checked again before they are trained on (threats T12, T21)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.plan import Plan
from fedsilo.protocol.strict_yaml import Path
from policies import kind as k
from policies.fields import Closed, Demand, Limit, PinnedText, ShareLimit
from policies.message import OFFERED, Context, Facts, Message
from policies.model import ScreenNames

_F = k.FieldClass
FIELDS: k.FieldTable = {
    "Donor": {"origin": _F.NAME, "position": _F.NUMBER},
    "PromptDonors": {"prompt_index": _F.NUMBER},
    "PublicDonors": {},
}


class PublicDonors(Closed):
    set: PinnedText
    verify_locally: Demand
    max_donors_per_prompt: Limit
    max_bytes_per_response: Limit
    max_share_per_peer: ShareLimit = 1.0  # of all answers that a public step trains on; absent: no peer is limited
    screens: ScreenNames = ()


def answers_of_step(body: pb.PublicDonors, plan: Plan | None) -> int:
    """Return how many answers the public step trains on, own and donated ones: each of its prompts has K."""
    return len(body.prompts) * plan.samples_per_prompt if plan is not None else 0


def measure(body: pb.PublicDonors, message: Message, context: Context) -> Facts:
    donors = [donor for prompt in body.prompts for donor in prompt.donors]
    written = [donor for donor in donors if donor.HasField("response")]
    names, at_fault = k.names_of(donor.origin for donor in donors)
    own = {donor.origin for donor in donors if not donor.HasField("response")}
    return {
        **k.text_facts([donor.response for donor in written], context),
        **k.index_facts([prompt.prompt_index for prompt in body.prompts], context),
        "donors": len(donors),
        "donors_per_prompt_max": max((len(prompt.donors) for prompt in body.prompts), default=0),
        "origins_without_response": len(own),
        "donors_of_one_peer_max": max(Counter(donor.origin for donor in written).values(), default=0),
        "answers_of_step": answers_of_step(body, context.plan),
        "names": names,
        "names_at_fault": at_fault,
    }


DONORS_OF_STEP = k.zero_rule("donors of the open step", "PROMPT_NOT_PUBLIC", "prompts_not_of_step")


@k.block_rule("donors graded here", "NOT_VERIFIED")
def donors_verified(facts: Facts, block: PublicDonors, path: Path) -> k.Judgement:
    """Wrong donors are dropped by `drop_wrong_donors`; before that they are only looked at."""
    if not block.verify_locally:
        return k.not_applicable()
    path = (*path, "verify_locally")
    if facts["graded"] is not True:
        return k.not_judged_yet(facts, path)
    if facts["stage"] == OFFERED and facts["responses_wrong"] > 0:
        return k.Judgement("look", facts["responses_wrong"], 0, path)
    return k.none_of(facts["responses_wrong"], path)


@k.block_rule("donors per prompt", "DONORS")
def donors_per_prompt(facts: Facts, block: PublicDonors, path: Path) -> k.Judgement:
    return k.at_most(facts["donors_per_prompt_max"], block.max_donors_per_prompt, (*path, "max_donors_per_prompt"))


@k.block_rule("donors of one peer", "DONOR_SHARE")
def donors_of_one_peer(facts: Facts, block: PublicDonors, path: Path) -> k.Judgement:
    """Of all answers that the step trains on, one peer gives its share at most; the surplus was dropped (T21)."""
    path, most = (*path, "max_share_per_peer"), donors_of_one_peer_most(block, facts["answers_of_step"])
    if facts["stage"] == OFFERED and facts["donors_of_one_peer_max"] > most:
        return k.Judgement("look", facts["donors_of_one_peer_max"], most, path)
    return k.at_most(facts["donors_of_one_peer_max"], most, path)


@k.block_rule("bytes of one donor", "RESPONSE_BYTES")
def donor_bytes(facts: Facts, block: PublicDonors, path: Path) -> k.Judgement:
    return k.at_most(facts["text_bytes_max"], block.max_bytes_per_response, (*path, "max_bytes_per_response"))


def donors_of_one_peer_most(block: PublicDonors, answers_of_step: int) -> int:
    """The largest number of donors of one peer in a step that trains on so many answers."""
    return math.floor(block.max_share_per_peer * answers_of_step)


# ---- what is done to donors before they are let in ----------------------------------------


def drop_wrong_donors(body: pb.PublicDonors, verdicts: Sequence[bool]) -> tuple[pb.PublicDonors, dict[str, int]]:
    """Remove the donors that the receiver's own grading calls wrong; donors without a response stay.

    Args:
        body: the message as it came.
        verdicts: one for each donor that carries a response, in message order.

    Returns:
        the remaining donors and how many were dropped, by origin.

    Raises:
        ValueError: the number of verdicts differs from the number of responses.
    """
    filtered, dropped = pb.PublicDonors(), dict[str, int]()
    position = 0
    for prompt in body.prompts:
        target = filtered.prompts.add(prompt_index=prompt.prompt_index)
        for donor in prompt.donors:
            if donor.HasField("response"):
                if position >= len(verdicts):
                    raise ValueError("there are fewer verdicts than responses")
                position += 1
                if not verdicts[position - 1]:
                    dropped[donor.origin] = dropped.get(donor.origin, 0) + 1
                    continue
            target.donors.add().CopyFrom(donor)
    if position != len(verdicts):
        raise ValueError("there are more verdicts than responses")
    return filtered, dropped


def within_share(body: pb.PublicDonors, keep: Sequence[bool], most: int) -> list[bool]:
    """Keep, of the donors so far, the first `most` of each peer, in message order (T21).

    Args:
        body: the message as it came.
        keep: one for each donor that carries a response.
        most: the largest number of one peer's.
    """
    origins = [donor.origin for prompt in body.prompts for donor in prompt.donors if donor.HasField("response")]
    counts: dict[str, int] = {}
    within = []
    for origin, is_within in zip(origins, keep, strict=True):
        counts[origin] = counts.get(origin, 0) + is_within
        within.append(is_within and counts[origin] <= most)
    return within


def example(at: k.Around) -> k.Example:
    donor = pb.Donor(origin=at.plan.silos[-1], response=at.answer(at.block.max_bytes_per_response))
    body = pb.PublicDonors(prompts=[pb.PromptDonors(prompt_index=row, donors=[donor]) for row in at.rows])
    return k.Example(body, {"public_prompt_indices": tuple(at.rows)})


KINDS = (
    k.PolicyKind(
        "public.donors",
        example,
        taken=PublicDonors,
        measure=measure,
        rules=(
            k.rows_of_set,
            DONORS_OF_STEP,
            k.silos_are_peers,
            donors_verified,
            donors_per_prompt,
            donors_of_one_peer,
            donor_bytes,
        ),
    ),
)
