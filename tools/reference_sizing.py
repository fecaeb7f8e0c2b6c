"""Memory and upload for dense models of common sizes, as `silo check` estimates them: the page `sizing.md`."""

from __future__ import annotations

from fedsilo.files.model_facts import ModelFacts
from silo.memory_estimate import Settings, Shapes, estimate, size_text

# From the models' own config.json: layers, hidden, intermediate, heads, heads of keys and values, vocabulary, tied
# head, biases of queries, keys and values.
MODELS = {
    "Qwen2.5 0.5B": (24, 896, 4864, 14, 2, 151936, True, True),
    "Llama 3.2 1B": (16, 2048, 8192, 32, 8, 128256, True, False),
    "Qwen2.5 1.5B": (28, 1536, 8960, 12, 2, 151936, True, True),
    "Qwen2.5 3B": (36, 2048, 11008, 16, 2, 151936, True, True),
    "Qwen2.5 7B": (28, 3584, 18944, 28, 4, 152064, False, True),
    "Llama 3.1 8B": (32, 4096, 14336, 32, 8, 128256, False, False),
    "Qwen2.5 14B": (48, 5120, 13824, 40, 8, 152064, False, True),
    "Qwen2.5 32B": (64, 5120, 27648, 40, 8, 152064, False, True),
}
COLUMNS = {
    "`bf16`, card": Settings(load="bf16", on_cuda=True),
    "`bf16`, card, `checkpointing`": Settings(load="bf16", on_cuda=True, checkpointing=True),
    "`nf4`, card, `checkpointing`": Settings(load="nf4", on_cuda=True, checkpointing=True),
    "`fp32`, no card": Settings(load="fp32"),
}
BFLOAT16_BYTES, FLOAT32_BYTES = 2, 4

TEXT = """# Sizing by model

What a silo's trainer needs at its peak, and what it uploads in a round, for dense models of common sizes. It is the
estimate of `silo check`, which prints the one for your model, your run and your machine, and refuses what cannot fit:

```console
$ silo check --config silo.yaml --offline
```

The run is that of a plan's defaults: {prompts} prompts a step with {samples} answers each, {prompt_tokens} tokens of
prompt and {new_tokens} of answer, LoRA of rank {rank}, answers sampled by the trainer itself.

{table}

For small processes on a CPU the estimate was within 0.75 and 1.35 times the measured peak. **On a card nothing was
measured, and no model of this table was**: take the figures as arithmetic, and leave room.

- `trainer.checkpointing: true` keeps each layer's input alone and computes the layer a second time.
- `model.load: nf4` keeps the base model's layers in four bits. All silos load it alike, unless the coordinator's file
  says `mixed_base: allow`.
- `trainer.microbatch_tokens` bounds what one pass holds, `trainer.cache_bytes` the keys and values of answers that are
  sampled together.
- Rollout servers ([vLLM](../how-to/vllm.md)) have a copy of the model and a cache of their own.
- The coordinator needs no card and loads no model: it averages tile by tile. Its disk takes every silo's upload and one
  adapter a round.
- An upload grows with the rank: with rank 8 it is a quarter of the last column.
"""


def facts(name: str) -> ModelFacts:
    layers, hidden, intermediate, heads, key_value_heads, vocabulary, tied, biased = MODELS[name]
    width = hidden // heads
    keys = key_value_heads * width
    tensors: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocabulary, hidden),
        "model.norm.weight": (hidden,),
    }
    if not tied:
        tensors["lm_head.weight"] = (vocabulary, hidden)
    for layer in range(layers):
        at = f"model.layers.{layer}"
        sides = {
            "q_proj": (hidden, hidden),
            "k_proj": (keys, hidden),
            "v_proj": (keys, hidden),
            "o_proj": (hidden, hidden),
        }
        tensors |= {f"{at}.self_attn.{part}.weight": shape for part, shape in sides.items()}
        if biased:
            tensors |= {f"{at}.self_attn.{part}.bias": (sides[part][0],) for part in ("q_proj", "k_proj", "v_proj")}
        tensors |= {f"{at}.mlp.{part}.weight": (intermediate, hidden) for part in ("gate_proj", "up_proj")}
        tensors[f"{at}.mlp.down_proj.weight"] = (hidden, intermediate)
        tensors |= {f"{at}.{part}.weight": (hidden,) for part in ("input_layernorm", "post_attention_layernorm")}
    numbers = sum(shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in tensors.values())
    return ModelFacts(
        architecture="Qwen2ForCausalLM" if biased else "LlamaForCausalLM", layers=layers, hidden=hidden,
        intermediate=intermediate, heads=heads, key_value_heads=key_value_heads, head_width=width,
        vocabulary=vocabulary, context_tokens=32768, tied=tied, tensors=tensors, stored_bytes=numbers * BFLOAT16_BYTES,
    )  # fmt: skip


def upload_bytes(model: ModelFacts, rank: int) -> int:
    """Of a silo's update of both factors, as float32."""
    D, wide, keys = model.hidden, model.intermediate, model.key_value_heads * model.head_width
    return FLOAT32_BYTES * rank * model.layers * (2 * (D + D) + 2 * (keys + D) + 3 * (wide + D))


def sizing_page() -> str:
    from tools.reference import markdown_table

    shapes, rows = Shapes(), []
    for name in MODELS:
        model = facts(name)
        peaks = [size_text(estimate(model, settings, shapes).peak_bytes) for settings in COLUMNS.values()]
        rows.append(
            (name, f"{model.parameters / 1e9:.2f} B", *peaks, f"{upload_bytes(model, shapes.rank) / 1e6:.0f} MB")
        )
    return TEXT.format(
        prompts=shapes.prompts_per_step, samples=shapes.samples_per_prompt, prompt_tokens=shapes.max_prompt_tokens,
        new_tokens=shapes.max_new_tokens, rank=shapes.rank,
        table=markdown_table(("model", "parameters", *COLUMNS, "upload a round"), rows),
    )  # fmt: skip
