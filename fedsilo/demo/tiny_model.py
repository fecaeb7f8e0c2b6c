"""The demo's base model: a real `Qwen3ForCausalLM` folder of about 0.3 M parameters, built from a seed and cached.

Two tokenizers. `digits` reads the demo's 24 characters and gets 300 supervised steps on mixed habits: for a question it
has seen the right answer (40 %), that of the opposite operation (20 %) and a copy of the digits (40 %), so sampled at
temperature 1 it is right about three times in ten, and reinforcement learning has something to choose from. `bytes`
reads any UTF-8 text with a longer context; its few supervised steps only teach it to answer with a letter or a small
number and to stop. torch and transformers are imported inside the functions.

A recipe may name another share of right answers, and questions of two or three steps. There the other habits are four
of equal weight: only the last operation, only the first, the first as if it were work and the end, and a copy of the
digits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fedsilo.demo import digit_tasks
from fedsilo.protocol.codec import canonical_json, sha256_hex
from fedsilo.protocol.errors import OperationError
from fedsilo.protocol.randomness import generator, seed_of

if TYPE_CHECKING:
    import torch

RIGHT_SHARE = 0.4
OPPOSITE_SHARE = 0.2  # as likely as the right one and GRPO stalls; the rest of the answers copy the digits
PADDING = "<|pad|>"
END = "<|end|>"
UNKNOWN = "<|unknown|>"
_IGNORED = -100  # the label torch's cross-entropy leaves out
_WARM_UP_STEPS = 20

Progress = Callable[[int, int], None]
Pair = tuple[str, str]


@dataclass(frozen=True)
class Recipe:
    """Everything that determines the model; its digest names the cache folder."""

    tokenizer: Literal["digits", "bytes"]
    seed: int = 0
    hidden: int = 96
    intermediate: int = 256
    layers: int = 3
    heads: int = 4
    context_tokens: int = 64
    initial_std: float = 0.15  # with transformers' 0.02 these tasks take about twice the steps at this width
    steps: int = 300
    batch: int = 192
    learning_rate: float = 8e-3
    version: int = 1
    questions: digit_tasks.Questions = "one-step"
    right_share: float = RIGHT_SHARE

    @property
    def digest(self) -> str:
        fields = dataclasses.asdict(self)
        if (self.questions, self.right_share) == ("one-step", RIGHT_SHARE):  # as before there was a choice
            del fields["questions"], fields["right_share"]
        return sha256_hex(canonical_json(fields))


def recipe_for(tokenizer: Literal["digits", "bytes"], *, seed: int = 0) -> Recipe:
    if tokenizer == "digits":
        return Recipe("digits", seed=seed)
    return Recipe("bytes", seed=seed, context_tokens=1024, steps=50, batch=8, initial_std=0.1, learning_rate=4e-3)


def cache_folder() -> Path:
    """$FEDSILO_CACHE, else the XDG cache of this user."""
    named = os.environ.get("FEDSILO_CACHE", "")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME", "") or Path.home() / ".cache") / "fedsilo"


def cached_model(recipe: Recipe, *, progress: Progress | None = None, threads: int = 1) -> Path:
    """The folder of a recipe's model, built on the first call.

    Args:
        recipe: what to build.
        progress: told (steps done, steps in all); not called when the model is cached.
        threads: torch threads while building. One by default: where anything else ran, two took 360 s instead of 35,
            because torch's threads wait for each other by spinning.

    Raises:
        OperationError: the cache cannot be written.
    """
    target = cache_folder() / "models" / f"{recipe.tokenizer}-{recipe.digest[:16]}"
    if not target.is_dir():
        build_model(recipe, target, progress=progress, threads=threads)
    return target


def build_model(recipe: Recipe, target: Path, *, progress: Progress | None = None, threads: int = 1) -> None:
    """Build a model folder beside `target` and move it there in one step: it is whole, or it is not there.

    When someone else finished the same folder meanwhile, theirs stays.

    Raises:
        OperationError: the disk refused, or `target` holds something else.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        try:
            _train_and_save(recipe, scratch, progress or _silent, threads)
            scratch.chmod(0o755)
            try:
                os.rename(scratch, target)  # noqa: PTH104  # must fail, not replace, when target is a full folder
            except OSError:
                if not (target / "config.json").is_file():
                    raise
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    except OSError as error:
        raise OperationError(f"cannot write the model folder {target}: {error.strerror}") from error


def _silent(done: int, total: int) -> None:
    """Progress nobody asked for."""


def make_tokenizer(kind: Literal["digits", "bytes"]) -> Any:
    """A `tokenizers.Tokenizer`; the bytes one encodes any UTF-8 text and gives it back unchanged."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    marks = [PADDING, END, UNKNOWN]
    if kind == "digits":
        vocabulary = {token: index for index, token in enumerate([*marks, *digit_tasks.ALPHABET])}
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        tokenizer.decoder = decoders.Fuse()
    else:
        vocabulary = {
            token: index for index, token in enumerate([*marks, *sorted(pre_tokenizers.ByteLevel.alphabet())])
        }
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    return tokenizer


def _train_and_save(recipe: Recipe, folder: Path, progress: Progress, threads: int) -> None:
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    tokenizer = make_tokenizer(recipe.tokenizer)
    config = Qwen3Config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=recipe.hidden,
        intermediate_size=recipe.intermediate,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.heads,
        head_dim=recipe.hidden // recipe.heads,
        max_position_embeddings=recipe.context_tokens,
        initializer_range=recipe.initial_std,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.token_to_id(PADDING),
        eos_token_id=tokenizer.token_to_id(END),
        bos_token_id=None,
        dtype="float32",
    )
    with _torch_state(torch, recipe.seed, threads):
        model = Qwen3ForCausalLM(config).float()
        _train(model, tokenizer, recipe, progress)
    logging.disable_progress_bar()
    model.save_pretrained(folder)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PADDING,
        eos_token=END,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
        model_max_length=recipe.context_tokens,
    ).save_pretrained(folder)


@contextlib.contextmanager
def _torch_state(torch: Any, seed: int, threads: int) -> Iterator[None]:
    """Seeded draws and a fixed number of threads inside; the caller's state again outside."""
    threads_before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            yield
    finally:
        torch.set_num_threads(threads_before)


def _train(model: Any, tokenizer: Any, recipe: Recipe, progress: Progress) -> None:
    import torch

    draws = generator(seed_of(recipe.seed, "tiny-model", recipe.tokenizer))
    pairs_of = _pairs_of(recipe)
    optimiser = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    model.train()
    for step in range(recipe.steps):
        for group in optimiser.param_groups:
            group["lr"] = recipe.learning_rate * _learning_rate_share(step, recipe.steps)
        tokens, labels = _batch(tokenizer, pairs_of(draws, recipe.batch))
        logits = model(input_ids=tokens).logits  # [rows, length, vocabulary]
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=_IGNORED
        )
        optimiser.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        progress(step + 1, recipe.steps)
    model.eval()


def _learning_rate_share(step: int, steps: int) -> float:
    """A short rise, then half a cosine down to a twentieth."""
    rise = min(1.0, (step + 1) / _WARM_UP_STEPS)
    return rise * (0.05 + 0.95 * 0.5 * (1 + float(np.cos(np.pi * step / steps))))


def _batch(tokenizer: Any, pairs: list[Pair]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [rows, length], padded on the right, and the labels: the answer and its end mark, nothing else."""
    import torch

    padding, end = tokenizer.token_to_id(PADDING), tokenizer.token_to_id(END)
    prompts = [encoded.ids for encoded in tokenizer.encode_batch([prompt for prompt, _ in pairs])]
    answers = [[*encoded.ids, end] for encoded in tokenizer.encode_batch([text for _, text in pairs])]
    length = max(len(prompt) + len(text) for prompt, text in zip(prompts, answers, strict=True))
    tokens = torch.full((len(pairs), length), padding)
    labels = torch.full((len(pairs), length), _IGNORED)
    for row, (prompt, text) in enumerate(zip(prompts, answers, strict=True)):
        tokens[row, : len(prompt) + len(text)] = torch.tensor(prompt + text)
        labels[row, len(prompt) : len(prompt) + len(text)] = torch.tensor(text)
    return tokens, labels


def _pairs_of(recipe: Recipe) -> Callable[[np.random.Generator, int], list[Pair]]:
    if recipe.tokenizer == "bytes":
        return _text_pairs
    if recipe.questions == "one-step":
        return lambda draws, rows: _digit_pairs(draws, rows, recipe.right_share)
    topics = digit_tasks.topics_of(recipe.questions)
    return lambda draws, rows: _pairs_with_work(draws, rows, recipe.right_share, topics)


def _pairs_with_work(draws: np.random.Generator, rows: int, right_share: float, topics: Sequence[str]) -> list[Pair]:
    """Questions of several steps on strings that are not held out, answered right with the work shown, or by one of
    four wrong habits."""
    strings = digit_tasks.digit_strings(held_out=False)
    pairs = []
    for _ in range(rows):
        topic, digits = topics[int(draws.integers(len(topics)))], strings[int(draws.integers(len(strings)))]
        steps = digit_tasks.steps_of(topic)
        after_first = steps[0].apply(digits)
        wrong = (steps[-1].apply(digits), after_first, "-".join([after_first] * len(steps)), digits)
        right = draws.random() < right_share
        habit = int(draws.integers(len(wrong)))
        text = digit_tasks.work(topic, digits) if right else wrong[habit]
        pairs.append((digit_tasks.question(topic, digits), text))
    return pairs


def _digit_pairs(draws: np.random.Generator, rows: int, right_share: float) -> list[Pair]:
    """Questions on strings that are not held out, answered by one of the three habits."""
    strings = digit_tasks.digit_strings(held_out=False)
    topics = draws.integers(len(digit_tasks.TOPICS), size=rows)
    picks = draws.integers(len(strings), size=rows)
    habits = draws.random(rows)
    pairs = []
    for topic_index, pick, habit in zip(topics, picks, habits, strict=True):
        topic, digits = digit_tasks.TOPICS[int(topic_index)], strings[int(pick)]
        if habit < right_share:
            text = digit_tasks.answer(topic, digits)
        elif habit < right_share + OPPOSITE_SHARE:
            text = digit_tasks.answer(digit_tasks.OPERATIONS[topic].opposite, digits)
        else:
            text = digits
        pairs.append((digit_tasks.question(topic, digits), text))
    return pairs


_WORDS = (
    *("a", "the", "of", "in", "to", "and", "is", "was", "has", "he", "she", "they", "it", "his", "her", "for", "with"),
    *("patient", "year", "old", "man", "woman", "comes", "after", "most", "likely", "shows", "day", "week", "dollars"),
    *("How", "many", "much", "What", "Which", "does", "each", "more", "less", "than", "total", "left", "next", "cause"),
    *("Solve", "Suppose", "Calculate", "let", "be", "value", "x", "y", "+", "-", "*", "/", "=", "2", "3", "5", "10"),
)


def _text_pairs(draws: np.random.Generator, rows: int) -> list[Pair]:
    """Made-up text of 30 to 300 bytes; with lettered choices the answer is a letter, without a small number."""
    pairs = []
    for _ in range(rows):
        words = draws.choice(_WORDS, size=int(draws.integers(8, 50)))
        text = " ".join(str(word) for word in words) + "?"
        if draws.random() < 0.5:
            choices = [f"{letter}. {' '.join(str(word) for word in draws.choice(_WORDS, size=3))}" for letter in "ABCD"]
            pairs.append((text + "\n\n" + "\n".join(choices), "ABCD"[int(draws.integers(4))]))
        else:
            pairs.append((text, str(int(draws.geometric(0.06)))))
    return pairs
