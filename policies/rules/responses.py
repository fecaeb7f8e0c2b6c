"""Rules on answers to public prompts: which prompts, how many, how long, and graded again (threats T9, T12, T13).

What they do not stop: private text memorised by the model and repeated in an answer; that is for rules/screens.py.
"""

from __future__ import annotations

from collections.abc import Callable

from policies.history import History
from policies.load import Policy
from policies.message import OFFERED, Facts
from policies.rules.base import (
    Judgement,
    Rule,
    at_most,
    block_of,
    holds,
    names_pinned_set,
    none_of,
    not_applicable,
    not_judged_yet,
    rule,
)

_KIND = "public.responses"


@rule("public set", "PUBLIC_SET", _KIND)
def public_set(facts: Facts, policy: Policy, history: History) -> Judgement:
    """The message names the pinned set, and so does the party's own copy."""
    return names_pinned_set(facts, policy)


@rule("public prompts of the open step", "PROMPT_NOT_PUBLIC", _KIND)
def prompts_of_step(facts: Facts, policy: Policy, history: History) -> Judgement:
    """Rows of the public set that this step asks for, each once."""
    block, path = block_of(facts, policy)
    if block is None:
        return not_applicable()
    if facts["step_is_public"] is not True:
        return holds(False, (*path, "set"))
    wrong = facts["prompts_not_of_step"] + facts["prompts_not_in_set"] + facts["prompts_repeated"]
    return none_of(wrong, (*path, "set"))


@rule("prompts in the step's order", "PROMPT_ORDER", _KIND)
def prompt_order(facts: Facts, policy: Policy, history: History) -> Judgement:
    """The order of the rows is the coordinator's, so that none is left to say something with (T9)."""
    _, path = block_of(facts, policy)
    return none_of(facts["prompts_out_of_order"], path)


@rule("answers graded again", "NOT_VERIFIED", _KIND)
def verified(facts: Facts, policy: Policy, history: History) -> Judgement:
    """With send_only_verified, each response is one that this party's own grading calls correct."""
    block, path = block_of(facts, policy)
    if block is None or not block.send_only_verified:
        return not_applicable()
    if facts["graded"] is not True:
        return not_judged_yet(facts, (*path, "send_only_verified"))
    return none_of(facts["responses_wrong"], (*path, "send_only_verified"))


@rule("finish reasons", "FINISH", _KIND)
def finish(facts: Facts, policy: Policy, history: History) -> Judgement:
    _, path = block_of(facts, policy)
    return none_of(facts["finish_unspecified"], path)


@rule("one message per step", "PER_STEP", _KIND)
def per_step(facts: Facts, policy: Policy, history: History) -> Judgement:
    _, path = block_of(facts, policy)
    return at_most(history.messages_in_step + 1, 1, path)


@rule("as the plan asks", "PLAN_SIZE", _KIND)
def plan_size(facts: Facts, policy: Policy, history: History) -> Judgement:
    """No more prompts and samples than the accepted plan has, and no more responses than samples stated."""
    _, path = block_of(facts, policy)
    if facts["prompts_over_samples"] != 0:
        return none_of(facts["prompts_over_samples"], path)
    if facts["prompts"] > facts["plan_prompts_per_step"]:
        return at_most(facts["prompts"], facts["plan_prompts_per_step"], path)
    if facts["tokens_counted"] is True and facts["tokens_max"] > facts["plan_max_new_tokens"]:
        return at_most(facts["tokens_max"], facts["plan_max_new_tokens"], path)
    return at_most(facts["samples_max"], facts["plan_samples_per_prompt"], path)


@rule("tokens of one response", "RESPONSE_TOKENS", _KIND)
def response_tokens(facts: Facts, policy: Policy, history: History) -> Judgement:
    """Without a tokenizer (the coordinator has none) the bytes of a response bound it instead."""
    block, path = block_of(facts, policy)
    if block is None or _nobody_counted(facts):
        return not_applicable()
    return at_most(facts["tokens_max"], block.generation.max_new_tokens, (*path, "generation", "max_new_tokens"))


@rule("samples per prompt", "SAMPLES", _KIND)
def samples(facts: Facts, policy: Policy, history: History) -> Judgement:
    block, path = block_of(facts, policy)
    if block is None:
        return not_applicable()
    most = max(facts["samples_max"], facts["responses_per_prompt_max"])
    return at_most(most, block.generation.samples_per_prompt, (*path, "generation", "samples_per_prompt"))


def _nobody_counted(facts: Facts) -> bool:
    """A receiver without a tokenizer has the byte limits; a sender without one counts each byte as a token, but for an
    offer whose texts nobody has read yet."""
    return facts["tokens_counted"] is not True and (facts["direction"] == "ingress" or facts["stage"] == OFFERED)


def _limit(name: str, reason: str, key: str, measured: Callable[[Facts, History], int]) -> Rule:
    """A rule that compares one number with one key of the block."""

    @rule(name, reason, _KIND)
    def check(facts: Facts, policy: Policy, history: History) -> Judgement:
        block, path = block_of(facts, policy)
        if block is None or ("tokens" in key and _nobody_counted(facts)):
            return not_applicable()
        return at_most(measured(facts, history), getattr(block, key), (*path, key))

    return check


RULES = (
    public_set,
    prompts_of_step,
    prompt_order,
    verified,
    finish,
    per_step,
    plan_size,
    response_tokens,
    samples,
    _limit("prompts per step", "PROMPTS", "max_prompts_per_step", lambda facts, _: facts["prompts"]),
    _limit("responses per step", "RESPONSES", "max_responses_per_step", lambda facts, _: facts["responses"]),
    _limit(
        "responses per round",
        "RESPONSES",
        "max_responses_per_round",
        lambda facts, history: history.responses + facts["responses"],
    ),
    _limit("tokens per step", "TOKENS", "max_tokens_per_step", lambda facts, _: facts["tokens"]),
    _limit(
        "tokens per round",
        "TOKENS",
        "max_tokens_per_round",
        lambda facts, history: history.tokens + facts["tokens"],
    ),
    _limit(
        "bytes of one response", "RESPONSE_BYTES", "max_bytes_per_response", lambda facts, _: facts["text_bytes_max"]
    ),
    _limit("bytes per step", "RESPONSE_BYTES", "max_bytes_per_step", lambda facts, _: facts["payload_bytes"]),
    _limit(
        "bytes of responses per round",
        "RESPONSE_BYTES",
        "max_bytes_per_round",
        lambda facts, history: history.text_bytes + facts["text_bytes"],
    ),
    _limit(
        "bytes of responses per day",
        "RESPONSE_BYTES",
        "max_bytes_per_day",
        lambda facts, history: history.units_in_day + facts["text_bytes"],
    ),
)
