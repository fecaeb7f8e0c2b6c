"""The embedded rollout engine: batched sampling with a static key-value cache.

Each answer draws from its own keyed generator by inverse CDF, so its random numbers depend on the key only: the plan's
seed, round, step, sample, and the prompt's place in the step (of a public prompt its row and the silo). What they pick
is independent of who else is in the batch in float32 (0 of 128 answers differed on a random model), not in bfloat16 (45
of 128): a product with another number of rows rounds otherwise, and a draw near an edge flips. The prompt is computed
once for the answers of a batch; rows that finished leave it. The log-probabilities that it returns are those that each
token was drawn with. The proof of agreement, the importance correction and the denominator of donors' tokens take them;
for everything else the trainer computes its own, as the engine's numerics differ.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fedsilo.protocol.errors import OperationError
from silo.budgets import CACHE_BYTES
from silo.trainer.decoder import Decoder, prefixes_of
from silo.trainer.rollout.engine import PromptSource, Question, Rollout

# Rows are dropped from the cache once this share of those held has finished: dropping copies the cache.
FINISHED_SHARE_DROPPED = 0.25
# Uniform numbers are drawn ahead in blocks of this many tokens; the stream of a generator does not depend on it.
UNIFORMS_BLOCK = 32
# On an accelerator the host asks this often, in tokens, who still runs: asking waits for all that was queued. On a CPU
# nothing is queued, and it asks at every token.
TOKENS_BETWEEN_LOOKS = 8
# Probabilities are summed by so many words at a time, and one such sum is opened for a draw.
WORDS_TOGETHER = 512


def draw_tokens(logits: Tensor, uniforms: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Inverse CDF: the first token whose cumulative probability exceeds u.

    Args:
        logits: [R, V].
        uniforms: [R] float64 in [0, 1).
        temperature: divides the logits.

    Returns:
        The tokens; whether each row's logits made a distribution, without which its token means nothing; and the
        log-probability that each token was drawn with, float32. All [R].
    """
    probabilities = (logits.float() / temperature).softmax(-1)  # [R, V]
    words = probabilities.shape[1]
    together = min(words, WORDS_TOGETHER)
    if words % together:
        probabilities = functional.pad(probabilities, (0, -words % together))
    by_block = probabilities.view(len(logits), -1, together)  # [R, blocks, together]
    cumulative = by_block.sum(-1, dtype=torch.float64).cumsum(-1)  # [R, blocks]
    total = cumulative[:, -1]
    # rounding leaves the last value a little off 1; just below it keeps the index in range
    target = (uniforms * total * (1 - 2.0**-52)).unsqueeze(1)  # [R, 1]
    block = torch.searchsorted(cumulative, target, right=True).clamp(max=cumulative.shape[1] - 1)  # [R, 1]
    before = torch.where(block > 0, cumulative.gather(1, (block - 1).clamp(min=0)), 0.0)  # [R, 1]
    opened = by_block.gather(1, block.unsqueeze(2).expand(-1, -1, together)).squeeze(1)  # [R, together]
    inside = opened.double().cumsum(-1)
    within = torch.minimum(target - before, inside[:, -1:] * (1 - 2.0**-52))  # the two sums round otherwise
    token = block * together + torch.searchsorted(inside, within, right=True)  # [R, 1]
    token = token.clamp(max=words - 1)
    logp = (probabilities.gather(1, token).squeeze(1) / total.float()).log()
    return token.squeeze(1), total.isfinite(), logp


def most_likely(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The most likely tokens, and whether the largest logit of each row is finite. logits: [R, V]; both [R]."""
    largest, tokens = logits.max(-1)
    return tokens, largest.isfinite()


class EmbeddedEngine:
    """The rollout engine in the trainer's own process.

    Args:
        decoder: the policy, as it is whenever something is generated.
        stop_ids: tokens that end an answer.
        cache_bytes: budget of a batch's keys and values, `CACHE_BYTES` unless stated. A question whose answers do not
            fit together is asked in several batches; a single answer that does not fit is a batch of its own.
        name: says which adapter the decoder computes with; every answer carries what it says when its batch is done.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        stop_ids: Collection[int],
        cache_bytes: int = CACHE_BYTES,
        name: Callable[[], str] = lambda: "",
    ) -> None:
        self._decoder = decoder
        self._name = name
        self._device = decoder.device
        self._stop_ids = torch.tensor(sorted(stop_ids), dtype=torch.long, device=self._device)
        numbers = 2 * len(decoder.layers) * decoder.key_value_heads * decoder.head_width
        self._columns_max = cache_bytes // (numbers * decoder.embedding.element_size())
        self._tokens_between_looks = 1 if self._device.type == "cpu" else TOKENS_BETWEEN_LOOKS

    def use(self, source: PromptSource) -> None:
        """Change nothing: the engine computes with the live adapter, and a call's batches and caches end with the
        call."""

    def rest(self) -> None:
        """Free nothing, for the same reason."""

    def close(self) -> None:
        """Take nothing back, for the same reason."""

    def generate(
        self, questions: Sequence[Question], *, temperature: float, max_new_tokens: int
    ) -> list[tuple[Rollout, ...]]:
        """Answers in the order of `questions`, for each as many as it has draws. No prompt may be empty.

        Raises:
            OperationError: logits are not finite.
        """
        answers: list[tuple[Rollout, ...]] = [() for _ in questions]
        for batch in self._batches(questions, max_new_tokens):
            rollouts = self._generate_batch([piece for _, piece in batch], temperature, max_new_tokens)
            for (place, _), more in zip(batch, rollouts, strict=True):
                answers[place] += more
        return answers

    def _batches(self, questions: Sequence[Question], max_new_tokens: int) -> Iterator[list[tuple[int, Question]]]:
        """Questions, or pieces of one, with their places: rows x (longest prompt + new tokens) fit the cache."""
        batch: list[tuple[int, Question]] = []
        rows = longest = 0
        for place, question in enumerate(questions):
            columns = len(question.prompt_ids) + max_new_tokens
            most = max(1, self._columns_max // columns)
            for start in range(0, len(question.draws), most):
                piece = Question(question.prompt_ids, question.draws[start : start + most])
                if batch and (rows + len(piece.draws)) * max(longest, columns) > self._columns_max:
                    yield batch
                    batch, rows, longest = [], 0, 0
                batch.append((place, piece))
                rows, longest = rows + len(piece.draws), max(longest, columns)
        if batch:
            yield batch

    @torch.inference_mode()
    def _generate_batch(
        self, questions: Sequence[Question], temperature: float, max_new_tokens: int
    ) -> list[tuple[Rollout, ...]]:
        draws = [draw for question in questions for draw in question.draws]
        cache = _Cache(self._decoder, questions, max_new_tokens)
        row = torch.arange(len(draws), device=self._device)  # [R] place of each held row among all
        running = torch.ones(len(draws), dtype=torch.bool, device=self._device)  # [R] of the held rows
        tokens = torch.zeros(len(draws), max_new_tokens, dtype=torch.long, device=self._device)
        drawn = torch.zeros(len(draws), max_new_tokens, device=self._device)  # log-probability of each token
        lengths = torch.full((len(draws),), max_new_tokens, device=self._device)
        finished = torch.zeros(len(draws), dtype=torch.bool, device=self._device)
        is_greedy = [draw is None for draw in draws]
        greedy = torch.tensor(is_greedy, device=self._device)  # [all rows]
        broken = torch.zeros((), dtype=torch.bool, device=self._device)
        uniforms = torch.empty(0)
        current = cache.last_of_prompt  # [R] the token fed next
        for place in range(max_new_tokens):
            if place % UNIFORMS_BLOCK == 0:
                _refuse_broken(broken)
                uniforms = self._uniforms(draws)  # [all rows, block]
            logits = cache.logits_after(current)  # [R, V]
            if all(is_greedy):
                current, sound = most_likely(logits)
            else:
                current, sound, drawn[row, place] = draw_tokens(
                    logits, uniforms[row, place % UNIFORMS_BLOCK], temperature
                )
                if any(is_greedy):
                    current = torch.where(greedy[row], most_likely(logits)[0], current)
            broken |= (running & ~sound).any()
            tokens[row, place] = current
            stopped = running & torch.isin(current, self._stop_ids)  # [R]
            lengths[row] = torch.where(stopped, place + 1, lengths[row])
            finished[row] |= stopped
            running = running & ~stopped
            if (place + 1) % self._tokens_between_looks:
                continue
            still = int(running.sum())
            if still == 0:
                break
            if still <= (1 - FINISHED_SHARE_DROPPED) * len(row):
                remaining = running.nonzero().squeeze(-1)  # [still]
                cache.keep(remaining)
                current, row, running = current[remaining], row[remaining], running[remaining]
        _refuse_broken(broken)
        name = self._name()
        flat = [
            Rollout(tuple(ids[:length]), done, () if greedily else tuple(logp[:length]), name)
            for ids, length, done, logp, greedily in zip(
                tokens.tolist(), lengths.tolist(), finished.tolist(), drawn.tolist(), is_greedy, strict=True
            )
        ]
        answers, start = [], 0
        for question in questions:
            answers.append(tuple(flat[start : start + len(question.draws)]))
            start += len(question.draws)
        return answers

    def _uniforms(self, draws: Sequence[np.random.Generator | None]) -> Tensor:
        block = np.zeros((len(draws), UNIFORMS_BLOCK))
        for place, draw in enumerate(draws):
            if draw is not None:
                block[place] = draw.random(UNIFORMS_BLOCK)
        return torch.from_numpy(block).to(self._device)  # [R, block] float64


def _refuse_broken(broken: Tensor) -> None:
    if bool(broken):
        raise OperationError("the model's logits are not finite; nothing was sampled", code="NOT_FINITE")


class _Cache:
    """Keys and values of every row, in place from the first token to the last: each prompt is computed once, given to
    its rows at the right end of L columns, and a token's column is the same in every row.

    Axes as in `decoder`; W = L + new tokens columns.
    """

    def __init__(self, decoder: Decoder, questions: Sequence[Question], new_tokens: int) -> None:
        self._decoder, self._layers = decoder, decoder.layers_for_sampling()
        device, layers = decoder.device, len(decoder.layers)
        prefixes = prefixes_of([question.prompt_ids for question in questions], device)
        owner = torch.tensor([place for place, question in enumerate(questions) for _ in question.draws], device=device)
        self.last_of_prompt = torch.tensor([question.prompt_ids[-1] for question in questions], device=device)[owner]
        self._position = prefixes.lengths[owner]  # [R] of the token fed next
        longest = prefixes.places.shape[1]
        self._filled = longest
        shape = (len(owner), decoder.key_value_heads, longest + new_tokens, decoder.head_width)
        self._keys = [torch.empty(shape, dtype=decoder.embedding.dtype, device=device) for _ in range(layers)]
        self._values = [torch.empty_like(keys) for keys in self._keys]
        self._angles = decoder.angles(torch.arange(longest + new_tokens, device=device))
        column = torch.arange(longest, device=device)
        behind = column - (longest - prefixes.lengths).unsqueeze(1)  # [P, L] place in the prompt; negative: padding
        at_the_end = torch.where(behind >= 0, prefixes.starts.unsqueeze(1) + behind, 0)[owner]  # [R, L]
        self._mask: Tensor | None = None  # [R, 1, 1, W], added to the scores
        if not bool((behind >= 0).all()):
            self._mask = torch.zeros(len(owner), 1, 1, shape[2], dtype=decoder.embedding.dtype, device=device)
            self._mask[:, 0, 0, :longest].masked_fill_((behind < 0)[owner], -torch.inf)
        if not longest:
            return
        x, angles = decoder.embedding[prefixes.ids], decoder.angles(prefixes.positions)
        for place, layer in enumerate(self._layers):
            query, key, value = decoder.heads_of(x, layer, angles)
            self._keys[place][:, :, :longest] = key[at_the_end].transpose(1, 2)
            self._values[place][:, :, :longest] = value[at_the_end].transpose(1, 2)
            if place < layers - 1:  # of the last layer nobody reads more than keys and values
                attended = decoder.attend_within(query, key, value, prefixes.places, prefixes.inside)
                x = decoder.after_attention(x, attended, layer)

    def logits_after(self, tokens: Tensor) -> Tensor:
        """Feed one token to every row. tokens: [R]; returns [R, V]."""
        decoder = self._decoder
        x = decoder.embedding[tokens]  # [R, D]
        cosine, sine = self._angles
        angles = cosine[self._position], sine[self._position]
        self._position = self._position + 1
        self._filled += 1
        columns = slice(0, self._filled)
        mask = None if self._mask is None else self._mask[..., columns]
        for layer, keys, values in zip(self._layers, self._keys, self._values, strict=True):
            query, keys[:, :, self._filled - 1], values[:, :, self._filled - 1] = decoder.heads_of(x, layer, angles)
            attended = functional.scaled_dot_product_attention(
                # the queries that share keys stand where a longer text would have its places
                query.view(len(x), decoder.key_value_heads, -1, decoder.head_width),
                keys[:, :, columns],
                values[:, :, columns],
                attn_mask=mask,
            )
            x = decoder.after_attention(x, attended.reshape(len(x), -1), layer)
        return decoder.final(x) @ decoder.head.T

    def keep(self, rows: Tensor) -> None:
        """Drop all rows but these. rows: indices among those held."""
        for tensors in (self._keys, self._values):
            for place, each in enumerate(tensors):  # one after the other: a whole second cache never exists
                tensors[place] = each[rows]
        self._position = self._position[rows]
        self._mask = None if self._mask is None else self._mask[rows]
