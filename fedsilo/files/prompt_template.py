"""Which template turns a prompt into what the model reads, and the hash that all silos must share (methods 2.3).

`chat` is the model folder's own, `plain` is none at all (the prompt goes in as it is), anything else is a file. The
hash is the SHA-256 of the template's bytes, so a file with the folder's template counts as the same; of plain it is
that of no bytes. It takes the place of the folder's own in the model's fingerprints, and so the policy's pin, the
hello, the plan and the run record name it. Nothing is rendered here: that is the trainer's, in transformers' own
sandbox (threat T22).

What the hash does not cover: what a template reads besides the prompt. Some read the date (`reads_clock`); then silos
train on prompts of other days under one hash, and a run cannot be repeated exactly. That is a warning of `silo check`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from fedsilo.protocol.codec import sha256_hex
from fedsilo.protocol.errors import NotFoundError, UsageError

TEMPLATE_BYTES_MAX = 1 << 18  # it goes to the trainer in one message of at most 1 MiB
_CLOCK = "strftime_now"  # the one function of transformers' templates that reads anything but its arguments


@dataclass(frozen=True)
class Template:
    """`text` None: as the tokenizer of the model folder has it; empty: plain. `sha256` None with it: the folder's."""

    text: str | None
    sha256: str | None
    source: str
    reads_clock: bool = False


def choice_of(text: str) -> str | Path | None:
    """Of an option on the command line: empty, `chat`, `plain` or the path of a file."""
    return text if text in ("chat", "plain") else Path(text) if text else None


def read_template(choice: str | Path | None, folder: Path) -> Template:
    """Args:
        choice: `data.template`: None, "chat", "plain" or a file.
        folder: of the model.

    Raises:
        NotFoundError: there is no such file.
        UsageError: `chat` where the folder has no chat template; a file that is empty, too large or no UTF-8.
    """
    if choice == "plain":
        return Template("", sha256_hex(b""), "plain")
    if isinstance(choice, Path):
        try:
            content = choice.read_bytes()
        except FileNotFoundError as error:
            raise NotFoundError(
                f"template {choice} does not exist", hint="data.template: chat, plain or a file"
            ) from error
        except OSError as error:
            raise UsageError(f"template {choice} cannot be read: {error.strerror}") from error
        if not content or len(content) > TEMPLATE_BYTES_MAX:
            raise UsageError(f"template {choice} has {len(content)} bytes; 1 to {TEMPLATE_BYTES_MAX} are right")
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError as error:
            raise UsageError(f"template {choice} is not UTF-8") from error
        return Template(text, sha256_hex(content), str(choice), _CLOCK in text)
    own = _own_template(folder)
    if choice == "chat" and not own:
        raise UsageError(f"{folder} has no chat template", hint="data.template: plain, or a file with a template")
    return Template(None, None, "chat" if own else "plain", _CLOCK in own)


def _own_template(folder: Path) -> str:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8", errors="replace")
    try:
        inside = json.loads((folder / "tokenizer_config.json").read_bytes()).get("chat_template", "")
    except (OSError, ValueError, AttributeError, RecursionError):
        return ""  # a folder without a tokenizer is refused where the tokenizer is read
    return inside if isinstance(inside, str) else json.dumps(inside)
