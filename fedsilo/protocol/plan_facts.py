"""What a signed plan says, in the words in which people are told. Pure."""

from __future__ import annotations

from typing import Any

from fedsilo.protocol.plan import Plan


def parameters_of(plan: Plan) -> dict[str, Any]:
    """What the run is done with, as the signed plan says."""
    return {
        "method": plan.method, "exchange": plan.exchange, "rounds": plan.rounds, "local_steps": plan.local_steps,
        **_fewer_steps(plan), **_aggregate(plan),
        "swap_period": plan.swap_period, "prompts_per_step": plan.prompts_per_step,
        "samples_per_prompt": plan.samples_per_prompt, "seed": plan.seed, "quorum": plan.quorum,
        "learning_rate": plan.optimiser.learning_rate, "kl_coefficient": plan.objective.kl_coefficient,
        "temperature": plan.rollout.temperature, "max_new_tokens": plan.rollout.max_new_tokens,
        "lora_rank": plan.lora.rank, "lora_alpha": plan.lora.alpha, "lora_freeze": plan.lora.freeze,
        "load": plan.load, "wire_dtype": plan.wire_dtype, "evaluation_prompts": plan.evaluation.prompts,
        "evaluation_samples": plan.evaluation.samples,
    }  # fmt: skip


def _fewer_steps(plan: Plan) -> dict[str, str]:
    if not plan.silo_steps:
        return {}
    steps = ", ".join(f"{silo} {steps}" for silo, steps in plan.silo_steps.items())
    return {"silo_steps": steps, "silo_weights": plan.silo_weights}


def _aggregate(plan: Plan) -> dict[str, str | int]:
    if plan.aggregate == "mean":
        return {}
    return {"aggregate": plan.aggregate, **({"trim": plan.trim} if plan.trim else {})}


def digests_of(plan: Plan) -> dict[str, str]:
    """What the plan pins, by its place in it."""
    return {
        "plan": plan.digest, "base_model": plan.base_model_sha256, "tokenizer": plan.tokenizer_sha256,
        "template": plan.template_sha256, "lora_schema": plan.lora.schema_sha256,
        "public_set": plan.public_set_sha256, "held_out": plan.held_out_sha256,
    }  # fmt: skip
