"""The rows that a trainer works on: encodes and decodes them, sets the holdout aside, and reports counts to the guard.

Which rows a step uses is drawn by the guard (silo/sampling.py), which knows their number and nothing else of them. In
order: the tokenizer (`TextCodec`), the private holdout (`split_holdout`), prompts as tokens, the overlap index for the
guard's screen (`provide_index`), and the preview that `silo check` shows. Free of torch.

Text becomes tokens the same way at every silo: a prompt goes through the folder's chat template where it has one, else
in as it is; a site may name another template, or none. Templates are rendered by transformers in its own sandbox, never
as code (T22). An answer's tokens are its text encoded without added special tokens, and the end-of-sequence token where
the answer finished. A donor's text that encodes to special tokens is refused: it would train control tokens that its
author never emitted.

`python -P -m silo.trainer.data` is the preview: a request as JSON on standard input, an answer as JSON on standard
output. It is a process of its own in the trainer's sandbox, because a model folder's chat template is rendered in it
(T22). It does not load the model. Prompts go back to the guard that asked, and from there to a terminal or nowhere.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

from pydantic import BeforeValidator, TypeAdapter, ValidationError

from fedsilo.files.extras import need
from fedsilo.files.model_folder import ending_ids, vocabulary_rows
from fedsilo.files.task_files import CLOSED, PUBLIC, FieldNames, Task, TaskFile, read_tasks, read_usable
from fedsilo.grading.exact import normalise
from fedsilo.grading.worker import full_check
from fedsilo.protocol.codec import canonical_json
from fedsilo.protocol.errors import FedSiloError, UsageError
from policies.screens.overlap import OverlapIndex, build_index

# What Python raises for what a template asks of it: a sum of a text and none, a key that is not there, a text of a
# gigabyte. A template is data, so none of them is a fault of ours.
_OF_TEMPLATES = (
    TypeError, ValueError, LookupError, AttributeError, ArithmeticError, AssertionError, RuntimeError, MemoryError,
)  # fmt: skip


T = TypeVar("T")


def _bytes_of(value: object) -> bytes:
    if not isinstance(value, str):
        raise ValueError("not a hexadecimal text")
    return bytes.fromhex(value)


Hex = Annotated[bytes, BeforeValidator(_bytes_of)]


def read_fields(kind: type[T], fields: object, what: str) -> T:
    """Read a message of the guard, as JSON brought it, into its dataclass, which is `CLOSED`.

    Raises:
        UsageError: a field is missing, unknown or of another type; no value is shown, since some are secret.
    """
    try:
        return TypeAdapter(kind).validate_python(fields)
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
    raise UsageError(f"{what} lacks or misstates {place!r}: {first['msg']}")


class TextCodec:
    """A tokenizer with the template and the tokens that end an answer.

    Args:
        tokenizer: a Hugging Face tokenizer.
        stop_ids: tokens that end an answer; the tokenizer's own end-of-sequence token if there is one.
        template: chat template in place of the tokenizer's own; empty: none; None: the tokenizer's own.
    """

    def __init__(self, tokenizer: Any, stop_ids: Iterable[int] = (), template: str | None = None) -> None:
        self._tokenizer = tokenizer
        self._template = tokenizer.chat_template if template is None else template
        end = tokenizer.eos_token_id
        self.stop_ids = frozenset(stop_ids) | ({int(end)} if end is not None else frozenset())
        if not self.stop_ids:
            raise UsageError("neither the model nor the tokenizer names an end-of-sequence token")
        self.end_id = int(end) if end is not None else min(self.stop_ids)
        self._special = frozenset(tokenizer.all_special_ids) | self.stop_ids

    def prompt_ids(self, prompt: str) -> tuple[int, ...]:
        """Never empty: an empty prompt without a template becomes the end-of-sequence token.

        Raises:
            UsageError: the template cannot be rendered.
        """
        ids = self._rendered(prompt, tokenize=True) if self._template else self._tokenizer(prompt)["input_ids"]
        return tuple(ids) or (self.end_id,)

    def rendered(self, prompt: str) -> str:
        """Return what the template makes of a prompt. Raises UsageError: the template cannot be rendered."""
        return str(self._rendered(prompt, tokenize=False)) if self._template else prompt

    def read_back(self, prompt: str) -> str:
        """Return the model's input as text, with the tokens that the tokenizer puts around a prompt by itself."""
        if self._template:
            return self.rendered(prompt)
        own = self._tokenizer(prompt, add_special_tokens=False)["input_ids"]
        whole = self._tokenizer(prompt)["input_ids"]
        start = next((at for at in range(len(whole) - len(own) + 1) if whole[at : at + len(own)] == own), 0)
        return self._control_text(whole[:start]) + prompt + self._control_text(whole[start + len(own) :])

    def _control_text(self, ids: Iterable[int]) -> str:
        return "".join(self._tokenizer.convert_ids_to_tokens(list(ids)))

    def is_ended(self, ids: Iterable[int]) -> bool:
        """Return True if a prompt ends with a token that ends an answer, so that the answer is over before it begins.
        Blanks after that token change nothing."""
        for token in reversed(tuple(ids)):
            if token in self.stop_ids:
                return True
            if self._tokenizer.decode([token]).strip():
                return False
        return False

    def _rendered(self, prompt: str, *, tokenize: bool) -> Any:
        import jinja2

        # A folder may name several templates; transformers then chooses among its own.
        options = {"chat_template": self._template} if isinstance(self._template, str) else {}
        try:
            return self._tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}],
                add_generation_prompt=True,
                tokenize=tokenize,
                return_dict=False,
                **options,
            )
        except (jinja2.TemplateError, *_OF_TEMPLATES) as error:
            place = f" at line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
            raise UsageError(f"the chat template cannot be rendered{place}: {type(error).__name__}") from error

    def text_of(self, ids: Iterable[int]) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def answer_ids(self, text: str, *, finished: bool) -> tuple[int, ...]:
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return (*ids, self.end_id) if finished else tuple(ids)

    def has_special(self, ids: Iterable[int], *, finished: bool) -> bool:
        """Return True if a token is special, other than the end-of-sequence token a finished answer closes with."""
        body = list(ids)[:-1] if finished else list(ids)
        return any(token in self._special for token in body)


def load_codec(folder: Path, template: str | None = None) -> TextCodec:
    """The tokenizer of a model folder, from disk only, and the tokens that end an answer of its model.

    Args:
        folder: of the model.
        template: as in `TextCodec`.

    Raises:
        UsageError: the folder holds no tokenizer, or a file of it is unreadable.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise UsageError(f"no tokenizer can be loaded from {folder}: {str(error).splitlines()[0][:200]}") from error
    # Tokens that a settings file names get ids only when transformers loads it.
    largest, rows = max(tokenizer.get_vocab().values(), default=0), vocabulary_rows(folder)
    if rows is not None and largest >= rows:
        raise UsageError(
            f"{folder}: the tokenizer has token {largest}, but the embedding has {rows} rows (tokens 0 to {rows - 1})",
            hint="take the tokenizer that was made with these weights, or remove the token that was added to it",
            code="MODEL_NOT_SUPPORTED",
        )
    return TextCodec(tokenizer, ending_ids(folder), template)


@dataclass(frozen=True)
class Split:
    """Private rows in file order. `digest` names both sides and every row's content; keyed by the site secret, so it
    tells nobody else anything."""

    training: tuple[Task, ...]
    holdout: tuple[Task, ...]
    digest: str


def clusters_of(rows: Sequence[Task]) -> list[tuple[str, str]]:
    """Name of each row's cluster: rows of one group belong together, and so do rows with one prompt.

    Prompts are compared as the `exact` verifier compares answers: Unicode forms, letter case and white space aside.
    A cluster is named after its first group by name, or after its prompt where no row has a group; so its name hangs
    neither on the order of the rows nor on ids.
    """
    above: dict[tuple[str, str], tuple[str, str]] = {}  # towards the smallest name; "group" comes before "prompt"

    def top(name: tuple[str, str]) -> tuple[str, str]:
        while (further := above.setdefault(name, name)) != name:
            above[name] = above[further]
            name = further
        return name

    names = [("prompt", normalise(row.prompt)) for row in rows]
    for row, name in zip(rows, names, strict=True):
        if row.group:
            one, other = sorted((top(("group", row.group)), top(name)))
            above[other] = one
    return [top(name) for name in names]


def split_holdout(rows: Sequence[Task], share: float, site_secret: bytes) -> Split:
    """Set rows aside that are never trained on, to measure on.

    A row's side hangs on the site secret and on its cluster (`clusters_of`), on nothing else: neither a group nor the
    rows with one prompt are ever divided, and file order moves no row. Further rows move one only where they join its
    cluster to another group. So the share is met on average over clusters.

    Args:
        rows: private rows, ids unique.
        share: of the clusters to set aside, 0 to 0.5.
        site_secret: key of the choice.

    Raises:
        UsageError: nothing would be left to train on.
    """

    def is_held_out(cluster: tuple[str, str]) -> bool:
        key = canonical_json(["fedsilo", "private-holdout", *cluster])
        return int.from_bytes(hmac.new(site_secret, key, hashlib.sha256).digest()[:8], "big") < share * 2**64

    sides = [is_held_out(cluster) for cluster in clusters_of(rows)]
    training = tuple(row for row, held_out in zip(rows, sides, strict=True) if not held_out)
    holdout = tuple(row for row, held_out in zip(rows, sides, strict=True) if held_out)
    if not training:
        raise UsageError(
            f"data.holdout_share {share} sets all {len(rows)} private rows aside, since they belong to too few groups",
            hint="set it to 0, or give more rows",
        )
    digest = hmac.new(site_secret, b"fedsilo private-split", hashlib.sha256)
    for row, held_out in sorted(zip(rows, sides, strict=True), key=lambda pair: pair[0].id):
        digest.update(canonical_json([row.id, row.group, row.topic, row.prompt, row.answer, held_out]) + b"\n")
    return Split(training, holdout, digest.hexdigest())


@dataclass(frozen=True)
class Prompt:
    """An encoded prompt. row: its place in the file, by which public prompts are named on the wire."""

    row: int
    id: str
    ids: tuple[int, ...]
    reference: str
    topic: str
    solution: str = ""


@dataclass(frozen=True)
class PromptSet:
    """Prompts short enough to be used, by row; `overlong` counts the rest."""

    by_row: dict[int, Prompt]
    overlong: int

    @property
    def prompts(self) -> list[Prompt]:
        return list(self.by_row.values())


def encode_prompts(rows: Sequence[Task], codec: TextCodec, max_prompt_tokens: int) -> PromptSet:
    """Rows whose prompt has more tokens than the plan allows are counted and left out."""
    by_row = {}
    overlong = 0
    for place, row in enumerate(rows):
        ids = codec.prompt_ids(row.prompt)
        if len(ids) > max_prompt_tokens:
            overlong += 1
        else:
            by_row[place] = Prompt(place, row.id, ids, row.answer, row.topic, row.solution)
    return PromptSet(by_row, overlong)


_PREFIX, _SUFFIX = "overlap-", ".index"


@dataclass(frozen=True)
class IndexSettings:
    """Settings of the overlap index that the guard asks for. background: leave out n-grams of the public set."""

    __pydantic_config__ = CLOSED
    key: Hex = field(repr=False)
    n: int
    false_positive_rate: float
    background: bool


def provide_index(
    settings: IndexSettings | None, private: Sequence[Task], public: Sequence[Task], scratch: Path | None
) -> dict[str, Any]:
    """Find or build the index.

    Args:
        settings: None where no index is wanted.
        private: every private row.
        public: rows of the public set.
        scratch: where it is written.

    Returns:
        `screen_index` of the ready message: {"file": name, "records": rows, "built": whether it was not there yet};
        {"why": sentence} where there is none, empty where none is wanted.
    """
    if settings is None:
        return {}
    if scratch is None:
        return {"why": "the trainer has no scratch folder to write it into; start it with --scratch"}
    try:
        return _found_or_built(settings, private, public, scratch)
    except (OSError, FedSiloError) as error:
        return {"why": error.message if isinstance(error, FedSiloError) else f"it cannot be written: {error.strerror}"}


def _found_or_built(
    settings: IndexSettings, private: Sequence[Task], public: Sequence[Task], scratch: Path
) -> dict[str, Any]:
    name = f"{_PREFIX}{_digest(settings, private, public)}{_SUFFIX}"
    built = not _is_good(scratch / name, settings.key)
    if built:
        data = build_index(
            _texts(private),
            key=settings.key,
            n=settings.n,
            false_positive_rate=settings.false_positive_rate,
            background=_texts(public) if settings.background else (),
        )
        scratch.mkdir(parents=True, exist_ok=True)
        part = scratch / f"{name}.part"
        part.write_bytes(data)
        os.replace(part, scratch / name)  # noqa: PTH105  # one name for "atomic" throughout the project
    for old in scratch.glob(f"{_PREFIX}*"):
        if old.name != name:
            old.unlink(missing_ok=True)
    return {"file": name, "records": len(private), "built": built}


def _texts(rows: Sequence[Task]) -> Iterator[str]:
    for row in rows:
        yield row.prompt
        yield row.answer


def _digest(settings: IndexSettings, private: Sequence[Task], public: Sequence[Task]) -> str:
    """Names settings and corpus; keyed, so that the file's name tells nobody which records it is made of."""
    digest = hmac.new(settings.key, b"fedsilo overlap index file", hashlib.sha256)
    digest.update(canonical_json([settings.n, settings.false_positive_rate, settings.background]) + b"\n")
    for rows in (private, public if settings.background else ()):
        for row in rows:
            digest.update(canonical_json([row.prompt, row.answer]) + b"\n")
        digest.update(b"\n")
    return digest.hexdigest()


def _is_good(path: Path, key: bytes) -> bool:
    """Return whether the file is there and whole, as the guard will read it."""
    try:
        OverlapIndex.from_bytes(path.read_bytes(), key=key)
    except (OSError, FedSiloError):
        return False
    return True


PROMPT_CHARACTERS_MAX = 2000
TEXTS_TRIED = 100
QUANTILES = (0.0, 0.5, 0.9, 0.99, 1.0)


@dataclass(frozen=True)
class PreviewRequest:
    """A request of `silo check`. `template` as in `TextCodec`; `show`: so many prompts as text."""

    __pydantic_config__ = CLOSED
    model: Path
    template: str | None
    private: tuple[Path, ...]
    fields: FieldNames
    verifier: str
    public: Path
    held_out: Path
    max_prompt_tokens: int
    show: int


def preview(request: PreviewRequest) -> dict[str, Any]:
    """{"sets": {name: {"rows", "prompt_tokens": [quantiles], "answer_tokens": [...], "overlong", "topics": {topic:
    rows}, "ended", "alike", "without_text"}}, "prompts": [{"id", "file", "line", "tokens", "text"}]}, sets by name:
    private | public | held_out. `ended`: prompts that close with the token that ends an answer; `alike`: different
    prompts beyond the first that become the same tokens; `without_text`: of `TEXTS_TRIED` prompts, those whose text
    does not stand in what the template makes of them.

    Raises:
        UsageError, NotFoundError: a file, the tokenizer or the template cannot be used.
    """
    codec = load_codec(request.model, template=request.template)
    with full_check(request.verifier) as is_readable:
        private = read_usable(request.private, is_readable, request.fields)
    files = {
        "private": private,
        "public": (read_tasks(request.public, PUBLIC),),
        "held_out": (read_tasks(request.held_out),),
    }
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
            "id": task.id,
            "file": str(file.path),
            "line": task.line,
            "tokens": length,
            "text": codec.read_back(task.prompt)[:PROMPT_CHARACTERS_MAX],
        }
        for length, file, task in shown
    ]
    return {"sets": sets, "prompts": prompts}


def spread_texts(texts: Iterable[str]) -> list[str]:
    """Return at most `TEXTS_TRIED` of the texts, at even distances."""
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
        answer = preview(read_fields(PreviewRequest, json.load(sys.stdin), "the request for a preview"))
    except FedSiloError as error:
        answer = {"error": {"message": error.message, "hint": error.hint, "code": error.code}}
    json.dump(answer, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())


# ---- verdicts: whoever grades is a callable, so that a killable child process or a plain function may answer ----


class Mark(NamedTuple):
    """The mark of one answer.

    Attributes:
        correct: counts, donors and pass@1 go by this.
        reward: 0 to 1; what the learner gets. Only a mixture of verifiers gives others than 0 and 1.
    """

    correct: bool
    reward: float


# (text of an answer, reference) pairs -> what each got, in order. A plain bool is a mark whose reward is 0 or 1.
Grader = Callable[[Sequence[tuple[str, str]]], Sequence[Mark | bool]]


def mark_of(verdict: Mark | bool) -> Mark:
    return verdict if isinstance(verdict, Mark) else Mark(bool(verdict), float(verdict))


def grade_distinct(grader: Grader, pairs: Sequence[tuple[str, str]]) -> list[Mark]:
    """Mark of every pair; equal pairs, common among K answers to one prompt, are graded once."""
    distinct = list(dict.fromkeys(pairs))
    marks = dict(zip(distinct, map(mark_of, grader(distinct)), strict=True)) if distinct else {}
    return [marks[pair] for pair in pairs]
