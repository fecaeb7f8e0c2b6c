"""`public.responses`: answers of a silo's model to public prompts: which prompts, how many, how long, and graded again
(threats T9, T12, T13).

What the rules do not stop: private text memorised by the model and repeated in an answer; that is for the text screens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field

from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.strict_yaml import Path
from policies import kind as k
from policies import lattice
from policies.fields import Approvals, Closed, Demand, Limit, PinnedText
from policies.grids import Bits
from policies.message import OFFERED, Context, Facts, Message
from policies.model import UNLIMITED, HitsPerDay, ScreenNames

_F = k.FieldClass
FIELDS: k.FieldTable = {
    "Response": {"text": _F.TEXT, "finish": frozenset({pb.FINISH_STOP, pb.FINISH_LENGTH})},
    "PromptResponses": {"prompt_index": _F.NUMBER, "samples": _F.NUMBER},
    "PublicResponses": {"public_set_sha256": _F.DIGEST},
}


def is_unlimited(value: object) -> bool:
    return value == UNLIMITED


class Generation(Closed):
    max_new_tokens: Limit
    samples_per_prompt: Limit


class PublicResponses(Closed):
    set: PinnedText
    content: Annotated[Literal["full_text"], lattice.SAME]
    logprobs: Annotated[Literal["none"], lattice.SAME]
    generation: Generation
    max_prompts_per_step: Limit
    max_responses_per_step: Limit
    max_responses_per_round: Limit
    max_tokens_per_step: Limit
    max_tokens_per_round: Limit
    max_bytes_per_response: Limit
    max_bytes_per_step: Limit
    max_bytes_per_round: Limit
    max_bytes_per_day: Annotated[
        Limit,
        Field(
            description="absent: as many as the budgets let through",
            exclude_if=is_unlimited,  # a policy that never spoke of it keeps its digest
        ),
    ] = UNLIMITED
    send_only_verified: Demand
    screens: ScreenNames = ()
    on_hit: Annotated[Literal["withhold", "hold"], lattice.ladder("withhold", "hold")] = "withhold"
    max_hits_per_day: HitsPerDay = None
    approvals: Approvals


def measure(body: pb.PublicResponses, message: Message, context: Context) -> Facts:
    plan = context.plan
    return {
        **k.text_facts([response for prompt in body.prompts for response in prompt.responses], context),
        **k.index_facts([prompt.prompt_index for prompt in body.prompts], context),
        "header_set_sha256": k.digest_of(body.public_set_sha256),
        "samples_max": max((prompt.samples for prompt in body.prompts), default=0),
        "responses_per_prompt_max": max((len(prompt.responses) for prompt in body.prompts), default=0),
        "prompts_over_samples": sum(len(prompt.responses) > prompt.samples for prompt in body.prompts),
        "plan_prompts_per_step": plan.prompts_per_step if plan else 0,
        "plan_samples_per_prompt": plan.samples_per_prompt if plan else 0,
        "plan_max_new_tokens": plan.rollout.max_new_tokens if plan else 0,
        "step_is_public": plan is not None and context.open_step in plan.public_steps(),
    }


@k.block_rule("public prompts of the open step", "PROMPT_NOT_PUBLIC")
def prompts_of_step(facts: Facts, block: PublicResponses, path: Path) -> k.Judgement:
    """Rows of the public set that this step asks for, each once."""
    if facts["step_is_public"] is not True:
        return k.holds(False, (*path, "set"))
    wrong = facts["prompts_not_of_step"] + facts["prompts_not_in_set"] + facts["prompts_repeated"]
    return k.none_of(wrong, (*path, "set"))


PROMPT_ORDER = k.zero_rule(
    "prompts in the step's order",
    "PROMPT_ORDER",
    "prompts_out_of_order",
    why="The order of the rows is the coordinator's, so that none is left to say something with (T9).",
)


@k.block_rule("answers graded again", "NOT_VERIFIED")
def verified(facts: Facts, block: PublicResponses, path: Path) -> k.Judgement:
    """Judge verification: with send_only_verified, each response is one that this party's own grading calls correct."""
    if not block.send_only_verified:
        return k.not_applicable()
    if facts["graded"] is not True:
        return k.not_judged_yet(facts, (*path, "send_only_verified"))
    return k.none_of(facts["responses_wrong"], (*path, "send_only_verified"))


@k.facts_rule("as the plan asks", "PLAN_SIZE")
def plan_size(facts: Facts, path: Path) -> k.Judgement:
    """No more prompts and samples than the accepted plan has, and no more responses than samples stated."""
    if facts["prompts_over_samples"] != 0:
        return k.none_of(facts["prompts_over_samples"], path)
    if facts["prompts"] > facts["plan_prompts_per_step"]:
        return k.at_most(facts["prompts"], facts["plan_prompts_per_step"], path)
    if facts["tokens_counted"] is True and facts["tokens_max"] > facts["plan_max_new_tokens"]:
        return k.at_most(facts["tokens_max"], facts["plan_max_new_tokens"], path)
    return k.at_most(facts["samples_max"], facts["plan_samples_per_prompt"], path)


@k.block_rule("tokens of one response", "RESPONSE_TOKENS")
def response_tokens(facts: Facts, block: PublicResponses, path: Path) -> k.Judgement:
    """Without a tokenizer (the coordinator has none) the bytes of a response bound it instead."""
    if _nobody_counted(facts):
        return k.not_applicable()
    return k.at_most(facts["tokens_max"], block.generation.max_new_tokens, (*path, "generation", "max_new_tokens"))


@k.block_rule("samples per prompt", "SAMPLES")
def samples(facts: Facts, block: PublicResponses, path: Path) -> k.Judgement:
    most = max(facts["samples_max"], facts["responses_per_prompt_max"])
    return k.at_most(most, block.generation.samples_per_prompt, (*path, "generation", "samples_per_prompt"))


def _nobody_counted(facts: Facts) -> bool:
    """A receiver without a tokenizer has the byte limits; a sender without one counts each byte as a token, but for an
    offer whose texts nobody has read yet."""
    return facts["tokens_counted"] is not True and (facts["direction"] == "ingress" or facts["stage"] == OFFERED)


# ---- what is done to answers before they leave ----------------------------------------


def withhold_responses(body: pb.PublicResponses, hits: Sequence[bool]) -> tuple[pb.PublicResponses, list[int]]:
    """Remove the responses in which a screen found something; each prompt keeps its place and number of samples.

    What is left are the bytes of a message in which those responses had been graded wrong and never offered (T18).

    Args:
        body: the message as offered.
        hits: one for each response, in message order.

    Returns:
        the remaining message, and the positions of its responses in the one offered.

    Raises:
        ValueError: the number of hits differs from the number of responses.
    """
    left, places, position = pb.PublicResponses(public_set_sha256=body.public_set_sha256), list[int](), 0
    if len(hits) != sum(len(prompt.responses) for prompt in body.prompts):
        raise ValueError("there is not one verdict for each response")
    for prompt in body.prompts:
        target = left.prompts.add(prompt_index=prompt.prompt_index, samples=prompt.samples)
        for response in prompt.responses:
            if not hits[position]:
                target.responses.add().CopyFrom(response)
                places.append(position)
            position += 1
    return left, places


def blank_responses(body: pb.PublicResponses, places: Sequence[int]) -> pb.PublicResponses:
    """Return the message with nothing in place of some responses, so that the others keep their numbers. Nobody else
    sends such a one: a response says how it ended, or is refused."""
    blank, position = pb.PublicResponses(), 0
    blank.CopyFrom(body)
    for prompt in blank.prompts:
        for response in prompt.responses:
            if position in places:
                response.Clear()
            position += 1
    return blank


# ---- figures --------------------------------------------------------------------------------


def text_bytes(block: PublicResponses) -> tuple[str, int, int]:
    return "max_bytes_per_round", block.max_bytes_per_round, block.max_bytes_per_step


def largest(block: PublicResponses, at: k.Figures) -> tuple[int, int]:
    return _steps(block), block.max_bytes_per_round


def bits(block: PublicResponses, at: k.Figures) -> Bits:
    steps = _steps(block)
    text_bytes = min(block.max_bytes_per_round, block.max_responses_per_round * block.max_bytes_per_response)
    # where one answer ends and the next begins, which prompts got how many, and how each finished
    frames = block.max_responses_per_round * (math.log2(block.max_bytes_per_response + 1) + 1)
    because = f"{text_bytes} bytes of text in at most {block.max_responses_per_round} answers over {steps} steps"
    return Bits(8 * text_bytes + frames, because)


def _steps(block: PublicResponses) -> int:
    return math.ceil(block.max_responses_per_round / max(1, block.max_responses_per_step))


def example(at: k.Around) -> k.Example:
    prompts = [
        pb.PromptResponses(
            prompt_index=row,
            samples=at.plan.samples_per_prompt,
            responses=[at.answer(at.block.max_bytes_per_response)],
        )
        for row in at.rows
    ]
    body = pb.PublicResponses(public_set_sha256=at.set_sha256, prompts=prompts)
    return k.Example(body, {"public_prompt_indices": tuple(at.rows)})


KINDS = (
    k.PolicyKind(
        "public.responses",
        example,
        sent=PublicResponses,
        measure=measure,
        rules=(
            replace(k.pinned_set, name="public set"),
            prompts_of_step,
            PROMPT_ORDER,
            verified,
            k.zero_rule("finish reasons", "FINISH", "finish_unspecified"),
            replace(k.one_per_step, name="one message per step"),
            plan_size,
            response_tokens,
            samples,
            k.limit_rule("prompts per step", "PROMPTS", "max_prompts_per_step", k.fact("prompts")),
            k.limit_rule("responses per step", "RESPONSES", "max_responses_per_step", k.fact("responses")),
            k.limit_rule(
                "responses per round",
                "RESPONSES",
                "max_responses_per_round",
                lambda facts, history: history.responses + facts["responses"],
            ),
            k.limit_rule("tokens per step", "TOKENS", "max_tokens_per_step", k.fact("tokens"), unless=_nobody_counted),
            k.limit_rule(
                "tokens per round",
                "TOKENS",
                "max_tokens_per_round",
                lambda facts, history: history.tokens + facts["tokens"],
                unless=_nobody_counted,
            ),
            k.limit_rule(
                "bytes of one response",
                "RESPONSE_BYTES",
                "max_bytes_per_response",
                k.fact("text_bytes_max"),
            ),
            k.limit_rule("bytes per step", "RESPONSE_BYTES", "max_bytes_per_step", k.fact("payload_bytes")),
            k.limit_rule(
                "bytes of responses per round",
                "RESPONSE_BYTES",
                "max_bytes_per_round",
                lambda facts, history: history.text_bytes + facts["text_bytes"],
            ),
            k.limit_rule(
                "bytes of responses per day",
                "RESPONSE_BYTES",
                "max_bytes_per_day",
                lambda facts, history: history.units_in_day + facts["text_bytes"],
            ),
        ),
        largest=largest,
        bits=bits,
        text_bytes=text_bytes,
    ),
)
