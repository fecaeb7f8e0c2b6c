"""What the trainer will make of a site's rows: token lengths, and a few prompts as the model reads them (`silo check`).

`python -P -m silo.trainer.preview`: a request as JSON on standard input, an answer as JSON on standard output. It is a
process of its own in the trainer's sandbox, because a model folder's chat template is rendered in it (threat T22).
It does not load the model. Prompts go back to the guard that asked, and from there to a terminal or nowhere.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedsilo.files.extras import need
from fedsilo.files.task_files import FieldNames, Task, TaskFile, read_tasks, read_usable
from fedsilo.grading.reference_checks import full_check
from fedsilo.protocol.errors import FedSiloError, UsageError

PROMPT_CHARACTERS_MAX = 2000
TEXTS_TRIED = 100
QUANTILES = (0.0, 0.5, 0.9, 0.99, 1.0)


@dataclass(frozen=True)
class Request:
    """What `silo check` asks. `template` as in `TextCodec`; `show`: so many prompts as text."""

    model: Path
    template: str | None
    private: tuple[Path, ...]
    fields: FieldNames
    verifier: str
    public: Path
    held_out: Path
    max_prompt_tokens: int
    show: int


def request_from(fields: dict[str, Any]) -> Request:
    """Raises UsageError: a field is missing or of another type."""
    try:
        template = fields["template"]
        return Request(
            model=Path(fields["model"]),
            template=None if template is None else str(template),
            private=tuple(Path(path) for path in fields["private"]),
            fields=FieldNames(**fields["fields"]),
            verifier=str(fields["verifier"]),
            public=Path(fields["public"]),
            held_out=Path(fields["held_out"]),
            max_prompt_tokens=int(fields["max_prompt_tokens"]),
            show=int(fields["show"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"the request for a preview lacks or misstates {error}") from error


def preview(request: Request) -> dict[str, Any]:
    """{"sets": {name: {"rows", "prompt_tokens": [quantiles], "answer_tokens": [...], "overlong", "topics": {topic:
    rows}, "ended", "alike", "without_text"}}, "prompts": [{"id", "file", "line", "tokens", "text"}]}, sets by name:
    private | public | held_out. `ended`: prompts that close with the token that ends an answer; `alike`: different
    prompts beyond the first that become the same tokens; `without_text`: of `TEXTS_TRIED` prompts, those whose text
    does not stand in what the template makes of them.

    Raises:
        UsageError, NotFoundError: a file, the tokenizer or the template cannot be used.
    """
    from silo.trainer.text import load_codec

    codec = load_codec(request.model, template=request.template)
    with full_check(request.verifier) as is_readable:
        private = read_usable(request.private, is_readable, request.fields)
    files = {"private": private, "public": (read_tasks(request.public),), "held_out": (read_tasks(request.held_out),)}
    sets, places = {}, list[tuple[int, TaskFile, Task]]()
    for name, group in files.items():
        rows = [(file, task) for file in group for task in file.rows]
        ids = [codec.prompt_ids(task.prompt) for _, task in rows]
        lengths = [len(each) for each in ids]
        texts = {task.prompt.strip(): each for (_, task), each in zip(rows, ids, strict=True)}
        if len(texts) > 1 and len(set(texts.values())) == 1:
            raise UsageError(
                f"{len(texts)} different {name} prompts all become the same {lengths[0]} tokens: their text is lost",
                hint="the chat template or the tokenizer drops it; data.template: plain, or a file with a template "
                "that reads messages[0]['content'] as a text",
                code="TEMPLATE_DROPS_PROMPT",
            )
        topics: dict[str, int] = {}
        for _, task in rows:
            topics[task.topic] = topics.get(task.topic, 0) + 1
        sets[name] = {
            "rows": len(rows),
            "prompt_tokens": quantiles(lengths),
            "answer_tokens": quantiles([len(codec.answer_ids(task.answer, finished=True)) for _, task in rows]),
            "overlong": sum(length > request.max_prompt_tokens for length in lengths),
            "ended": sum(codec.is_ended(each) for each in ids),
            "alike": len(texts) - len(set(texts.values())),
            "without_text": sum(text not in codec.rendered(text) for text in spread_texts(texts)),
            "topics": topics,
        }
        if name == "private":
            places = [(length, file, task) for length, (file, task) in zip(lengths, rows, strict=True)]
    shown = spread([each for each in places if each[0] <= request.max_prompt_tokens], request.show)
    prompts = [
        {
            "id": task.id, "file": str(file.path), "line": task.line, "tokens": length,
            "text": codec.read_back(task.prompt)[:PROMPT_CHARACTERS_MAX],
        }
        for length, file, task in shown
    ]  # fmt: skip
    return {"sets": sets, "prompts": prompts}


def spread_texts(texts: Iterable[str]) -> list[str]:
    """At most `TEXTS_TRIED` of them, at even distances."""
    every = list(texts)
    return every[:: max(len(every) // TEXTS_TRIED, 1)][:TEXTS_TRIED]


def quantiles(lengths: Sequence[int]) -> list[int]:
    """The smallest, the median, and what 90 %, 99 % and all stay within (`QUANTILES`, nearest rank)."""
    ordered = sorted(lengths)
    return [ordered[min(int(share * len(ordered)), len(ordered) - 1)] for share in QUANTILES] if ordered else []


def spread(places: Sequence[tuple[int, TaskFile, Task]], count: int) -> list[tuple[int, TaskFile, Task]]:
    """`count` rows from the shortest to the longest, at even distances; fewer where there are fewer."""
    ordered = sorted(places, key=lambda each: (each[0], str(each[1].path), each[2].line))
    if count < 2 or len(ordered) <= count:
        return ordered[: max(count, 0)]
    return [ordered[round(place * (len(ordered) - 1) / (count - 1))] for place in range(count)]


def main() -> int:
    # Tokenizers need no torch, which would take most of the time until the first prompt is read.
    try:
        need("torch", "transformers")
        sys.modules["torch"] = None  # type: ignore[assignment]
        os.environ["TRANSFORMERS_VERBOSITY"] = "error"  # it would complain that torch is not there
        answer = preview(request_from(json.load(sys.stdin)))
    except FedSiloError as error:
        answer = {"error": {"message": error.message, "hint": error.hint, "code": error.code}}
    json.dump(answer, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
