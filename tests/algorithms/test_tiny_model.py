"""The tiny model's folder: a real one that transformers loads, atomic, cached, and a tokenizer that loses nothing."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsilo.demo import digit_tasks, tiny_model
from fedsilo.demo.tiny_model import Recipe, build_model, cached_model, make_tokenizer, recipe_for
from fedsilo.protocol.errors import OperationError

SHORT = dataclasses.replace(recipe_for("digits"), steps=2, batch=4)
BYTES = make_tokenizer("bytes")
DIGITS = make_tokenizer("digits")


@settings(max_examples=200)
@given(st.text(max_size=40))
def test_the_byte_tokenizer_gives_back_any_text(text: str) -> None:
    assert BYTES.decode(BYTES.encode(text).ids, skip_special_tokens=False) == text
    if "<|" not in text:
        assert len(BYTES.encode(text).ids) == len(text.encode())


def test_the_digit_tokenizer_has_24_entries_and_one_token_a_character() -> None:
    assert DIGITS.get_vocab_size() == 24
    text = digit_tasks.question("rotate", "5271") + digit_tasks.answer("rotate", "5271")
    assert len(DIGITS.encode(text).ids) == len(text)
    assert DIGITS.decode(DIGITS.encode(text).ids) == text


def test_recipes_are_told_apart_by_their_digest() -> None:
    recipes = [recipe_for("digits"), recipe_for("bytes"), recipe_for("digits", seed=1), SHORT]
    assert len({recipe.digest for recipe in recipes}) == 4
    assert recipe_for("digits").digest == recipe_for("digits").digest


def test_habits_have_the_stated_shares() -> None:
    from fedsilo.protocol.randomness import generator

    pairs = tiny_model._digit_pairs(generator(1), 20_000, tiny_model.RIGHT_SHARE)
    by_letter = {operation.letter: operation for operation in digit_tasks.OPERATIONS.values()}
    right = opposite = copied = 0
    for prompt, text in pairs:
        digits, operation = prompt[1:-1], by_letter[prompt[0]]
        assert not digit_tasks.is_held_out(digits)
        possible = [operation.apply(digits), digit_tasks.answer(operation.opposite, digits), digits]
        if len(set(possible)) == 3:
            right, opposite, copied = (
                n + (text == p) for n, p in zip((right, opposite, copied), possible, strict=True)
            )
    total = right + opposite + copied
    assert right / total == pytest.approx(0.4, abs=0.02)
    assert opposite / total == pytest.approx(0.2, abs=0.02)
    assert copied / total == pytest.approx(0.4, abs=0.02)


@pytest.mark.torch
@pytest.mark.parametrize("recipe", [SHORT, dataclasses.replace(recipe_for("bytes"), steps=1, batch=2)])
def test_the_folder_is_a_real_model(tmp_path: Path, recipe: Recipe) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    seen: list[tuple[int, int]] = []
    build_model(recipe, tmp_path / "model", progress=lambda done, total: seen.append((done, total)), threads=1)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert 300_000 <= sum(parameter.numel() for parameter in model.parameters()) <= 3_000_000
    assert seen == [(step + 1, recipe.steps) for step in range(recipe.steps)]
    text = "u5271=" if recipe.tokenizer == "digits" else "Gr\u00fc\u00dfe, \u65e5\u672c\n\n A. x?"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text
    assert tokenizer.eos_token_id == model.config.eos_token_id
    config = json.loads((tmp_path / "model" / "config.json").read_text("utf-8"))
    assert config["max_position_embeddings"] == recipe.context_tokens
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.torch
def test_same_seed_same_weights_and_the_callers_draws_are_left_alone(tmp_path: Path) -> None:
    import torch

    before = torch.random.get_rng_state()
    for name in ("a", "b"):
        build_model(SHORT, tmp_path / name, threads=1)
    assert torch.equal(before, torch.random.get_rng_state())
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("a", "b")]
    assert weights[0] == weights[1]


@pytest.mark.torch
def test_the_cache_is_used_and_a_failed_build_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSILO_CACHE", str(tmp_path))

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached_model(SHORT, progress=stop, threads=1)
    assert not list((tmp_path / "models").iterdir())
    folder = cached_model(SHORT, threads=1)
    assert cached_model(SHORT, progress=stop) == folder
    assert SHORT.digest.startswith(folder.name.removeprefix("digits-"))


def test_a_cache_that_cannot_be_written_is_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("FEDSILO_CACHE", str(tmp_path / "file"))
    with pytest.raises(OperationError, match="cannot write"):
        cached_model(SHORT)
