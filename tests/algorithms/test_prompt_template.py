"""Which template a prompt goes through, its hash, and that nothing but transformers' own sandbox renders it."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from fedsilo.files.model_folder import read_fingerprints, read_template
from fedsilo.protocol.errors import NotFoundError, UsageError
from silo.trainer.data import TextCodec, load_codec
from tests.algorithms.tiny import make_model, make_tokenizer

pytestmark = pytest.mark.torch
OWN = "{% for m in messages %}a{{ m['content'] }}{% endfor %}b"
OTHER = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}={% endif %}"


def folder_with(path: Path, template: str = "") -> Path:
    make_model().save_pretrained(path)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template or None
    tokenizer.save_pretrained(path)
    return path


def text_of(folder: Path, choice: str | Path | None, prompt: str = "12") -> str:
    codec = load_codec(folder, template=read_template(choice, folder).text)
    assert codec.text_of(codec.prompt_ids(prompt)) == codec.rendered(prompt)
    return codec.rendered(prompt)


def test_chat_plain_and_a_file(tmp_path: Path) -> None:
    folder, bare = folder_with(tmp_path / "chat", OWN), folder_with(tmp_path / "bare")
    file = tmp_path / "own.jinja"
    file.write_text(OTHER)
    assert [text_of(folder, choice) for choice in (None, "chat", "plain", file)] == ["a12b", "a12b", "12", "12="]
    assert [text_of(bare, choice) for choice in (None, "plain", file)] == ["12", "12", "12="]
    with pytest.raises(UsageError, match="has no chat template"):
        read_template("chat", bare)


def test_a_hash_names_what_is_rendered(tmp_path: Path) -> None:
    folder, bare = folder_with(tmp_path / "chat", OWN), folder_with(tmp_path / "bare")
    file = tmp_path / "copy.jinja"
    file.write_text(OWN)
    # the same bytes count as the same template, wherever they lie; and plain as a folder without one
    assert read_template(file, bare).sha256 == read_fingerprints(folder).template_sha256
    assert read_template("plain", folder).sha256 == read_fingerprints(bare).template_sha256
    file.write_text(OTHER)
    assert read_template(file, bare).sha256 == hashlib.sha256(OTHER.encode()).hexdigest()
    assert read_template(None, folder).sha256 is None  # the folder's own, which is among its fingerprints


def test_a_template_that_reads_the_date_is_told(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "chat", OWN)
    dated = folder_with(tmp_path / "dated", "{{ strftime_now('%d %b %Y') }}")
    assert [read_template(None, each).reads_clock for each in (folder, dated)] == [False, True]


def test_files_that_are_no_template_are_refused(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "chat", OWN)
    with pytest.raises(NotFoundError, match=r"none\.jinja does not exist"):
        read_template(tmp_path / "none.jinja", folder)
    for name, content, said in (("empty", b"", "0 bytes"), ("latin", b"\xe9", "not UTF-8")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UsageError, match=said):
            read_template(tmp_path / name, folder)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ messages", "at line 1: TemplateSyntaxError"),
        ("{{ raise_exception('the prompt is ' + messages[0]['content']) }}", "TemplateError"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
    ],
)
def test_T22_what_cannot_be_rendered_is_refused_without_the_prompt(template: str, said: str) -> None:
    assert TextCodec(make_tokenizer(), template=OTHER).rendered("12") == "12="
    codec = TextCodec(make_tokenizer(), template=template)
    with pytest.raises(UsageError, match=said) as raised:
        codec.prompt_ids("12")
    assert "12" not in raised.value.message
