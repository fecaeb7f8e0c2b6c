"""What each shipped ruleset lets a hostile trainer get out in a round of the demo: a part of `rulesets.md`."""

from __future__ import annotations

from fedsilo.demo import data as demo_data
from fedsilo.demo import digit_tasks
from fedsilo.demo import run as demo
from fedsilo.demo.tiny_model import Recipe
from fedsilo.files.site_policy import read_ruleset
from fedsilo.protocol.factors import freeze_named
from fedsilo.protocol.strict_yaml import load
from policies.capacity import ROUND_SECONDS, capacities
from policies.load import load_policy
from policies.model import Policy
from policies.render import RULESETS, PlanSize, SiteFacts, render_policy
from policies.schema import LoraSchema


def capacity_parts() -> list[str]:
    """The section's heading, what it says, and a row for each ruleset that lets anything out."""
    size = PlanSize(
        rounds=demo.ROUNDS, local_steps=demo.LOCAL_STEPS, swap_period=demo.SWAP_PERIOD,
        prompts_per_step=demo.PROMPTS_PER_STEP, samples_per_prompt=demo.SAMPLES_PER_PROMPT,
        max_new_tokens=demo_data.DIGIT_LENGTHS.max_new_tokens, learning_rate=demo.LEARNING_RATE,
    )  # fmt: skip
    from tools.reference import markdown_table

    rows, silent = [], []
    for name in RULESETS:
        found = capacities(*demo_policy(name, size))
        if not found:
            silent.append(f"`{name}`")
            continue
        kinds = "; ".join(f"`{row.kind}` {_information(row.bits)}" for row in found)
        planted = "; ".join(
            f"`{row.kind}` {_information(row.planted_bits)}" for row in found if row.planted_bits is not None
        )
        rows.append((f"`{name}`", _information(sum(row.bits for row in found)), kinds, planted))
    return [
        "## How much one round can let out",
        "At most so much, under each ruleset, for somebody who owns the trainer and chooses every value that the rules "
        "leave free: an upper bound, from arithmetic. Beside it, what planted schemes got through where one was run: "
        "the low bits of an update (T5), figures on their grid (T9), the number of progress messages (T11). Both are "
        f"for the demo: its model, LoRA of rank {demo.RANK}, {size.local_steps} steps a round of which "
        f"{size.public_steps} are public, {size.prompts_per_step} prompts a step, {size.samples_per_prompt} answers of "
        f"{size.max_new_tokens} tokens to each; a round of {ROUND_SECONDS:g} s. Not counted: when messages are sent. "
        "For a policy and schema of your own: `fedsilo policy check`.",
        markdown_table(("ruleset", "in all, at most", "by kind, at most", "got through by planted schemes"), rows),
        f"Nothing leaves under {', '.join(silent)}. `bandit.reward` is counted for one match.",
    ]


def demo_policy(ruleset: str, size: PlanSize) -> tuple[Policy, LoraSchema]:
    """(policy, schema) that a ruleset makes for a silo of the demo; hashes and names count for nothing here."""
    text, recipe, none = read_ruleset(ruleset), Recipe("digits"), "0" * 64
    wide, narrow = recipe.intermediate, recipe.hidden
    matrices = {f"{part}_proj": (narrow, narrow) for part in "qkvo"}
    matrices |= {"gate_proj": (wide, narrow), "up_proj": (wide, narrow), "down_proj": (narrow, wide)}
    pin: dict[str, object] = next(iter(load(text.encode(), ruleset).value["lora_schemas"].values()), {})
    freeze = freeze_named(str(pin.get("freeze", "none")))
    tensors = []
    for layer in range(recipe.layers):
        for name, (outputs, inputs) in matrices.items():
            shapes = {"A": (demo.RANK, inputs), "B": (outputs, demo.RANK)}
            shapes |= {"R": (demo.RANK, demo.RANK)} if freeze == "AB" else {}
            tensors += [(f"model.layers.{layer}.{name}.lora_{half}", shape) for half, shape in shapes.items()]
    dtype = str(pin.get("dtype", "$dtype")).replace("$dtype", "float32")
    schema = LoraSchema(none, demo.RANK, demo.ALPHA, dtype, "all-linear", tuple(sorted(tensors)), freeze)
    facts = SiteFacts(
        site="hospital_a", federation="demo", coordinator="spiffe://demo/coordinator/main",
        coordinator_key_sha256=none, peers=tuple(f"spiffe://demo/silo/hospital_{letter}" for letter in "abcd"),
        schema=schema, schema_file="lora_schema.json", tokenizer_sha256=none, template_sha256=none,
        public_file="public.jsonl", public_sha256=none, public_rows=demo_data.PUBLIC_ROWS,
        valid_from="2026-12-01T00:00:00Z", valid_until="2027-12-01T00:00:00Z", held_out_file="held_out.jsonl",
        held_out_sha256=none, held_out_rows=demo_data.HELD_OUT_ROWS, topics=digit_tasks.TOPICS,
        hidden_shape=(recipe.layers, narrow), size=size,
    )  # fmt: skip
    return load_policy(render_policy(text, facts).encode(), ruleset), schema


def _information(bits: float) -> str:
    """Up to one KiB in bits, above it in KiB."""
    return f"{bits:,.0f} bits" if bits < 8192 else f"{bits / 8192:,.1f} KiB"
