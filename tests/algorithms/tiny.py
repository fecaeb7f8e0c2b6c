"""A random Qwen3 of a few thousand numbers, a character tokenizer, and a plan: what the trainer's tests run on."""

from __future__ import annotations

import itertools
import math
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from fedsilo.protocol.codec import encode_factors, sha256_hex
from fedsilo.protocol.factors import Freeze
from fedsilo.protocol.plan import Plan
from fedsilo.protocol.tasks import TrainerTask
from silo.measuring import MeasureHoldout
from silo.sampling import TaskGiver
from silo.trainer.adapters.lora import LoraAdapter, LoraShape
from silo.trainer.data import TextCodec
from silo.trainer.run import Done, Material
from silo.trainer.session import Session

ALPHABET = "0123456789abcdefghi=?"
ZERO_DIGEST = "0" * 64
RANK = 4
ALPHA = 8.0


@dataclass(frozen=True)
class Row:
    id: str
    prompt: str
    answer: str
    topic: str = "all"
    group: str = ""
    solution: str = ""


def make_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {token: place for place, token in enumerate(["<pad>", "<end>", "<unknown>", *ALPHABET])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<pad>", "<end>", "<unknown>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<end>",
        unk_token="<unknown>",
        clean_up_tokenization_spaces=False,
    )


def make_codec() -> TextCodec:
    return TextCodec(make_tokenizer())


def make_model(seed: int = 0) -> Any:
    config = Qwen3Config(
        vocab_size=len(ALPHABET) + 3,
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        initializer_range=0.4,  # flat distributions would hide mistakes
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        attn_implementation="sdpa",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config).float().eval()


def make_shape(model: Any, rank: int = RANK, alpha: float = ALPHA, freeze: Freeze = "none") -> LoraShape:
    shapes: dict[str, tuple[int, ...]] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            shapes[f"{name}.lora_A"] = (rank, module.in_features)
            shapes[f"{name}.lora_B"] = (module.out_features, rank)
            if freeze == "AB":
                shapes[f"{name}.lora_R"] = (rank, rank)
    return LoraShape(rank, alpha, shapes, freeze)


def random_factors(shape: LoraShape, seed: int = 0, b_scale: float = 0.0) -> dict[str, np.ndarray[Any, Any]]:
    """A as peft draws it; B zero, or random where a test wants the adapter to matter."""
    draws = np.random.default_rng(seed)
    return {
        name: (
            draws.uniform(-1, 1, sides) / math.sqrt(sides[1])
            if name.endswith("lora_A")
            else b_scale * draws.standard_normal(sides)
        ).astype(np.float32)
        for name, sides in sorted(shape.shapes.items())
    }


def payload_of(shape: LoraShape, factors: dict[str, np.ndarray[Any, Any]]) -> bytes:
    return encode_factors(
        factors, base_digest="", schema_sha256=ZERO_DIGEST, rank=shape.rank, scale=shape.scale, dtype="float32"
    )


def make_adapter(seed: int = 0, b_scale: float = 0.3) -> LoraAdapter:
    model = make_model(seed)
    shape = make_shape(model)
    adapter = LoraAdapter(model, shape)
    adapter.load(random_factors(shape, seed, b_scale))
    return adapter


def peft_twin(adapter: LoraAdapter, seed: int = 0) -> Any:
    """The same model by transformers and peft, whose LoRA layers hold this adapter's own factors: gradients meet there.

    `twin.disable_adapter()` computes the base.
    """
    from peft import LoraConfig, get_peft_model  # it takes seconds to load, and most processes need none

    shape = adapter.shape
    config = LoraConfig(r=shape.rank, lora_alpha=shape.alpha, target_modules=list(shape.modules), task_type="CAUSAL_LM")
    with warnings.catch_warnings():
        # peft 0.21 asks for a name that transformers 5.23 has renamed
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)
        twin = get_peft_model(make_model(seed), config).eval()
    for module in shape.modules:
        layer = twin.get_base_model().get_submodule(module)
        layer.lora_A["default"].weight = adapter.factors[f"{module}.lora_A"]
        layer.lora_B["default"].weight = adapter.factors[f"{module}.lora_B"]
    return twin


def make_plan(**changes: Any) -> Plan:
    """Deep changes by double underscore: optimiser__learning_rate=1e-3."""
    fields: dict[str, Any] = {
        "run": "r",
        "federation": "f",
        "method": "pubswap",
        "silos": ("a", "b"),
        "rounds": 1,
        "local_steps": 4,
        "swap_period": 2,
        "prompts_per_step": 3,
        "samples_per_prompt": 4,
        "seed": 5,
        "objective": {"kl_coefficient": 0.0},
        "optimiser": {"learning_rate": 1e-3},
        "rollout": {"temperature": 1.0, "max_prompt_tokens": 16, "max_new_tokens": 5},
        "lora": {"rank": RANK, "alpha": ALPHA, "schema_sha256": ZERO_DIGEST},
        "evaluation": {"prompts": 6, "samples": 2},
        "base_model_sha256": ZERO_DIGEST,
        "tokenizer_sha256": ZERO_DIGEST,
        "template_sha256": ZERO_DIGEST,
        "public_set_sha256": ZERO_DIGEST,
        "public_set_rows": 10,
        "held_out_sha256": ZERO_DIGEST,
    }
    for name, value in changes.items():
        outer, _, inner = name.partition("__")
        if inner:
            fields[outer] = {**fields[outer], inner: value}
        else:
            fields[outer] = value
    return Plan.model_validate(fields)


def first_character_grader(pairs: Any) -> list[bool]:
    """A random model is right about half the time: the answer's first character is one of the reference's."""
    return [bool(text) and text[0] in reference for text, reference in pairs]


def make_rows(count: int, prefix: str) -> list[Row]:
    digits = itertools.cycle("0123456789")
    return [
        Row(f"{prefix}{place}", f"{next(digits)}{'abc'[place % 3] * (place % 4)}?", "0123456789", "xy"[place % 2])
        for place in range(count)
    ]


class GuidedSession(Session):
    """A session whose tasks come through the guard's `TaskGiver`, as they do in a silo: private steps get their rows.

    Attributes:
        state_path: where the giver keeps how far it has drawn.
    """

    state_path: Path | None = None

    def begin_run(self, plan: Plan, shape: LoraShape) -> dict[str, int]:
        overlong = super().begin_run(plan, shape)
        self.giver = TaskGiver(plan, self.private_prompts, self._material.site_secret, self.state_path)
        return overlong

    def carry_out(self, task: TrainerTask, body: bytes = b"") -> Done:
        return super().carry_out(task if isinstance(task, MeasureHoldout) else self.giver.with_rows_drawn(task), body)


def make_session(
    silo: str = "a",
    plan: Plan | None = None,
    *,
    state_path: Path | None = None,
    freeze: Freeze = "none",
    **changes: Any,
) -> tuple[GuidedSession, LoraShape]:
    model = make_model()
    shape = make_shape(model, freeze=freeze)
    fields: dict[str, Any] = {
        "silo": silo,
        "model": model,
        "codec": make_codec(),
        "private": make_rows(9, "p"),
        "public": make_rows(10, "q"),
        "held_out": make_rows(8, "h"),
        "private_grader": first_character_grader,
        "public_grader": first_character_grader,
        "held_out_grader": first_character_grader,
        "site_secret": f"secret of {silo}".encode(),
    }
    session = GuidedSession(Material(**{**fields, **changes}))
    session.state_path = state_path
    session.begin_run(plan or make_plan(), shape)
    return session, shape


def start_payload(shape: LoraShape, seed: int = 0) -> tuple[bytes, str]:
    payload = payload_of(shape, random_factors(shape, seed))
    return payload, sha256_hex(payload)
