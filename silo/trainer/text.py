"""Text to tokens and back, the same way at every silo (methods 2.3, "ids or text").

A prompt goes through the folder's chat template where it has one, else in as it is; a site may name another template,
or none. Templates are rendered by transformers in its own sandbox, never as code (T22). An answer's tokens are its text
encoded without added special tokens, and the end-of-sequence token where the answer finished. A donor's text that
encodes to special tokens is refused: it would train control tokens that its author never emitted.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fedsilo.files.model_folder import ending_ids, vocabulary_rows
from fedsilo.protocol.errors import UsageError

# What Python raises for what a template asks of it: a sum of a text and none, a key that is not there, a text of a
# gigabyte. A template is data, so none of them is a fault of ours.
_OF_TEMPLATES = (
    TypeError, ValueError, LookupError, AttributeError, ArithmeticError, AssertionError, RuntimeError, MemoryError,
)  # fmt: skip


class TextCodec:
    """Args:
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
        """What the template makes of a prompt. Raises UsageError: the template cannot be rendered."""
        return str(self._rendered(prompt, tokenize=False)) if self._template else prompt

    def read_back(self, prompt: str) -> str:
        """What the model reads, as text, with the tokens that the tokenizer puts around a prompt by itself."""
        if self._template:
            return self.rendered(prompt)
        own = self._tokenizer(prompt, add_special_tokens=False)["input_ids"]
        whole = self._tokenizer(prompt)["input_ids"]
        start = next((at for at in range(len(whole) - len(own) + 1) if whole[at : at + len(own)] == own), 0)
        return self._control_text(whole[:start]) + prompt + self._control_text(whole[start + len(own) :])

    def _control_text(self, ids: Iterable[int]) -> str:
        return "".join(self._tokenizer.convert_ids_to_tokens(list(ids)))

    def is_ended(self, ids: Iterable[int]) -> bool:
        """True if a prompt ends with a token that ends an answer, so that the answer is over before it begins. Blanks
        after that token change nothing."""
        for token in reversed(tuple(ids)):
            if token in self.stop_ids:
                return True
            if self._tokenizer.decode([token]).strip():
                return False
        return False

    def _rendered(self, prompt: str, *, tokenize: bool) -> Any:
        import jinja2

        # A folder may name several templates; transformers then chooses among its own.
        given = {"chat_template": self._template} if isinstance(self._template, str) else {}
        try:
            return self._tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}],
                add_generation_prompt=True,
                tokenize=tokenize,
                return_dict=False,
                **given,
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
        """True if a token is special, other than the end-of-sequence token a finished answer closes with."""
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
