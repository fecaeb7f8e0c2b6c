"""How often a base model is right: what a split along success rate goes by, sampled once for a setting and seed.

What was sampled is kept in the cache beside the base models, under a digest of all that it follows from, so that it is
the same for every cell of a seed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from fedsilo.demo.tiny_model import cache_folder
from fedsilo.files.durable import write_durably
from fedsilo.files.model_folder import read_fingerprints
from fedsilo.grading import grade
from fedsilo.protocol.codec import canonical_json, sha256_hex
from fedsilo.protocol.errors import OperationError
from fedsilo.protocol.randomness import generator, seed_of
from silo.trainer.data import load_codec
from silo.trainer.decoder import Decoder
from silo.trainer.rollout.embedded import EmbeddedEngine
from silo.trainer.rollout.engine import Question
from silo.trainer.worker import load_model

SAMPLES = 8  # answers to each prompt


def success_rates(
    model: Path, load: str, rows: Sequence[Mapping[str, object]], verifier: str, longest: int, seed: int
) -> list[float]:
    """Return the share of right answers of a base model to each row's prompt, sampled at temperature 1 where no earlier
    call has.

    Args:
        model: folder of the base model.
        load: its number format.
        rows: of a task file.
        verifier: of their answers.
        longest: tokens of an answer, at most.
        seed: of the draws.

    Raises:
        UsageError: the model cannot be loaded.
        OperationError: the cache cannot be written.
    """
    pairs = [(str(row["prompt"]), str(row["answer"])) for row in rows]
    follows_from = [asdict(read_fingerprints(model)), load, pairs, verifier, longest, SAMPLES, seed]
    file = cache_folder() / "rates" / f"{sha256_hex(canonical_json(follows_from))}.json"
    if file.is_file():
        return [right / SAMPLES for right in json.loads(file.read_bytes())]
    right = _right_answers(model, load, pairs, verifier, longest, seed)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OperationError(f"cannot create {file.parent}: {error.strerror}") from error
    write_durably(file, canonical_json(right))
    return [each / SAMPLES for each in right]


def _right_answers(
    model: Path, load: str, pairs: Sequence[tuple[str, str]], verifier: str, longest: int, seed: int
) -> list[int]:
    """Return how many of `SAMPLES` answers to each prompt are right. pairs: (prompt, reference)."""
    codec = load_codec(model)
    engine = EmbeddedEngine(Decoder(load_model(model, load), {}, 1.0), stop_ids=codec.stop_ids)
    questions = [
        Question(
            codec.prompt_ids(prompt),
            tuple(generator(seed_of(seed, "success-rate", place, sample)) for sample in range(SAMPLES)),
        )
        for place, (prompt, _) in enumerate(pairs)
    ]
    answers = engine.generate(questions, temperature=1.0, max_new_tokens=longest)
    return [
        sum(grade(verifier, codec.text_of(each.ids), reference).correct for each in some)
        for (_, reference), some in zip(pairs, answers, strict=True)
    ]
