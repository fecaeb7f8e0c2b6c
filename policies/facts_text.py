"""Facts of answers to public prompts: which prompts, how many answers, how long, how graded. Never the text."""

from __future__ import annotations

import itertools
from collections import Counter

from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.plan import Plan
from policies.catalogue import digest_of, names_of
from policies.message import Context, Facts
from policies.screening import screen_facts


def text_facts(responses: list[pb.Response], context: Context) -> Facts:
    """Counts over responses in message order."""
    sizes = [len(response.text.encode()) for response in responses]
    counts, verdicts = context.token_counts, context.verdicts
    counted = counts is not None and len(counts) == len(responses)
    # A byte-level tokenizer makes at least one byte of each token, so bytes bound tokens where nobody has counted.
    tokens = list(counts) if counts is not None and counted else sizes
    graded = verdicts is not None and len(verdicts) == len(responses)
    correct = sum(bool(verdict) for verdict in verdicts) if verdicts is not None and graded else 0
    return {
        "responses": len(responses),
        "text_bytes": sum(sizes),
        "text_bytes_max": max(sizes, default=0),
        "tokens": int(sum(tokens)),
        "tokens_max": int(max(tokens, default=0)),
        "tokens_counted": counted,
        "graded": graded,
        "responses_correct": correct,
        "responses_wrong": len(responses) - correct,
        "finish_unspecified": sum(response.finish == pb.FINISH_UNSPECIFIED for response in responses),
        **screen_facts(context.screened, len(responses)),
    }


def index_facts(indices: list[int], context: Context) -> Facts:
    return {
        "prompts": len(indices),
        "prompts_repeated": len(indices) - len(set(indices)),
        "prompts_not_of_step": sum(index not in context.public_prompt_indices for index in indices),
        "prompts_out_of_order": _out_of_order(indices, context.public_prompt_indices),
        "prompts_not_in_set": sum(index >= context.public_set_rows for index in indices),
        "public_set_sha256": context.public_set_sha256,
    }


def _out_of_order(indices: list[int], order: tuple[int, ...]) -> int:
    """How often a row comes after one that the order has behind it. Rows that it has not are counted elsewhere."""
    place = {index: position for position, index in enumerate(order)}
    places = [place[index] for index in indices if index in place]
    return sum(later < earlier for earlier, later in itertools.pairwise(places))


def response_facts(body: pb.PublicResponses, context: Context) -> Facts:
    plan = context.plan
    return {
        **text_facts([response for prompt in body.prompts for response in prompt.responses], context),
        **index_facts([prompt.prompt_index for prompt in body.prompts], context),
        "header_set_sha256": digest_of(body.public_set_sha256),
        "samples_max": max((prompt.samples for prompt in body.prompts), default=0),
        "responses_per_prompt_max": max((len(prompt.responses) for prompt in body.prompts), default=0),
        "prompts_over_samples": sum(len(prompt.responses) > prompt.samples for prompt in body.prompts),
        "plan_prompts_per_step": plan.prompts_per_step if plan else 0,
        "plan_samples_per_prompt": plan.samples_per_prompt if plan else 0,
        "plan_max_new_tokens": plan.rollout.max_new_tokens if plan else 0,
        "step_is_public": plan is not None and context.open_step in plan.public_steps(),
    }


def answers_of_step(body: pb.PublicDonors, plan: Plan | None) -> int:
    """How many answers the public step trains on, own and donated ones: each of its prompts has K."""
    return len(body.prompts) * plan.samples_per_prompt if plan is not None else 0


def donor_facts(body: pb.PublicDonors, context: Context) -> Facts:
    donors = [donor for prompt in body.prompts for donor in prompt.donors]
    written = [donor for donor in donors if donor.HasField("response")]
    names, at_fault = names_of(donor.origin for donor in donors)
    own = {donor.origin for donor in donors if not donor.HasField("response")}
    return {
        **text_facts([donor.response for donor in written], context),
        **index_facts([prompt.prompt_index for prompt in body.prompts], context),
        "donors": len(donors),
        "donors_per_prompt_max": max((len(prompt.donors) for prompt in body.prompts), default=0),
        "origins_without_response": len(own),
        "donors_of_one_peer_max": max(Counter(donor.origin for donor in written).values(), default=0),
        "answers_of_step": answers_of_step(body, context.plan),
        "names": names,
        "names_at_fault": at_fault,
    }
