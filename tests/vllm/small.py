"""A random Qwen3 whose heads are wide enough for vLLM's attention on a CPU, in a folder with a tokenizer.

Head sizes that vLLM computes on a CPU begin at 32; the trainer's other tests use 8, which it refuses.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.algorithms.tiny import ALPHABET, make_tokenizer

CONTEXT_TOKENS = 512
VOCABULARY = len(ALPHABET) + 3


def make_model(seed: int = 0) -> Any:
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT_TOKENS,
        initializer_range=0.25,  # flat distributions would hide mistakes
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        attn_implementation="sdpa",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config).float().eval()


def write_model(folder: Path, seed: int = 0) -> Path:
    make_model(seed).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder
