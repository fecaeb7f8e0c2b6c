"""Lengths and the prompts to be shown, as `silo check` asks for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fedsilo.files.task_files import STANDARD, Task, TaskFile
from fedsilo.protocol.errors import UsageError
from silo.config import SiloConfig, load_config
from silo.guard import checks
from silo.trainer.data import PROMPT_CHARACTERS_MAX, PreviewRequest, preview, quantiles, read_fields, spread
from tests.algorithms.tiny import make_model, make_tokenizer

pytestmark = pytest.mark.torch


def write(path: Path, prompts: list[str]) -> str:
    rows = [
        {"id": f"{place}", "prompt": each, "answer": "12", "topic": "ab"[place % 2]}
        for place, each in enumerate(prompts)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def request(folder: Path, **changes: Any) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    make_tokenizer().save_pretrained(folder / "model")
    make_model().config.save_pretrained(folder / "model")
    return {
        "model": str(folder / "model"),
        "template": "{{ messages[0]['content'] }}=",
        "private": [write(folder / "private.jsonl", ["1" * length for length in range(1, 31)])],
        "fields": vars(STANDARD),
        "verifier": "exact",
        "public": write(folder / "public.jsonl", ["abc"]),
        "held_out": write(folder / "held_out.jsonl", ["abcd", "ab"]),
        "max_prompt_tokens": 20,
        "show": 3,
        **changes,
    }


def asked(fields: dict[str, Any]) -> PreviewRequest:
    return read_fields(PreviewRequest, fields, "the request")


def test_lengths_are_counted_with_the_template_and_the_tokenizer(tmp_path: Path) -> None:
    found = preview(asked(request(tmp_path)))
    private = found["sets"]["private"]
    assert private["prompt_tokens"] == [2, 17, 29, 31, 31]  # a character is a token, and = is one more
    assert private["answer_tokens"] == [3] * 5  # two digits and the end
    assert (private["rows"], private["overlong"], private["topics"]) == (30, 11, {"a": 15, "b": 15})
    assert found["sets"]["held_out"]["prompt_tokens"] == [3, 5, 5, 5, 5]
    # the shortest, the middle one and the longest of those that are used
    assert [(each["tokens"], each["text"]) for each in found["prompts"]] == [
        (length + 1, "1" * length + "=") for length in (1, 10, 19)
    ]
    assert preview(asked(request(tmp_path, show=0)))["prompts"] == []


@pytest.mark.parametrize("lengths", [[], [2, 17, 29, 31, 31], [2], [2, 17, 29, 31], [2, 17, 29, 31, 31, 31]])
def test_a_report_with_another_number_of_quantiles_is_none(tmp_path: Path, lengths: list[int]) -> None:
    report = preview(asked(request(tmp_path)))
    report["sets"]["private"]["prompt_tokens"] = lengths
    if len(lengths) in (0, 5):
        assert checks.Preview.model_validate(report).sets["private"].prompt_tokens == tuple(lengths)
    else:
        with pytest.raises(ValueError, match="prompt_tokens"):
            checks.Preview.model_validate(report)


def test_a_long_prompt_is_cut_where_it_is_shown(tmp_path: Path) -> None:
    long = write(tmp_path / "long.jsonl", ["1" * (PROMPT_CHARACTERS_MAX + 50)])
    (shown,) = preview(asked(request(tmp_path, private=[long], max_prompt_tokens=10_000)))["prompts"]
    assert shown["tokens"] == PROMPT_CHARACTERS_MAX + 51 and shown["text"] == "1" * PROMPT_CHARACTERS_MAX


def after_each(folder: Path, *around: str) -> None:
    """Let the tokenizer put these around a text, as add_eos_token and its like do."""
    path = folder / "tokenizer.json"
    tokens = {"<end>": {"id": "<end>", "ids": [1], "tokens": ["<end>"]}}
    single = [
        {"Sequence": {"id": "A", "type_id": 0}} if each == "$A" else {"SpecialToken": {"id": each, "type_id": 0}}
        for each in around
    ]
    processor = {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": tokens}
    processor["pair"] = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"post_processor": processor}))


def test_M2_prompts_that_end_with_the_end_of_an_answer_are_counted_and_shown_with_it(tmp_path: Path) -> None:
    fields = request(tmp_path, template="")
    after_each(tmp_path / "model", "$A", "<end>")
    found = preview(asked(fields))
    assert [each["ended"] for each in found["sets"].values()] == [30, 1, 2]
    assert found["prompts"][0]["text"] == "1<end>"
    # at its beginning it ends nothing, and a template does not get what the tokenizer adds
    after_each(tmp_path / "model", "<end>", "$A")
    found = preview(asked(fields))
    assert found["sets"]["private"]["ended"] == 0 and found["prompts"][0]["text"] == "<end>1"
    closed = asked(request(tmp_path, template="{{ messages[0]['content'] }}<end>"))
    assert preview(closed)["sets"]["private"]["ended"] == 30
    assert preview(asked(request(tmp_path)))["sets"]["private"]["ended"] == 0


PARTS = "{% for p in messages[0]['content'] %}{{ p['text'] }}{% endfor %}"


@pytest.mark.parametrize("template", [PARTS, "a=", "{{ messages[1] }}=", "{{ messages[0]['contents'] }}="])
def test_M3_a_template_that_drops_the_prompt_is_refused(tmp_path: Path, template: str) -> None:
    with pytest.raises(UsageError) as raised:
        preview(asked(request(tmp_path, template=template)))
    assert raised.value.code == "TEMPLATE_DROPS_PROMPT"
    preview(asked(request(tmp_path)))


def test_M3_a_template_that_drops_a_part_is_told(tmp_path: Path) -> None:
    found = preview(asked(request(tmp_path, template="{{ messages[0]['content'][:3] }}=")))["sets"]["private"]
    assert (found["without_text"], found["alike"]) == (27, 27)
    found = preview(asked(request(tmp_path)))["sets"]["private"]
    assert (found["without_text"], found["alike"]) == (0, 0)


@pytest.mark.parametrize(
    ("template", "kind"),
    [
        ("{{ messages[0]['content'] + none }}", "TypeError"), ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ '{3}'.format() }}", "IndexError"), ("{{ '{a}'.format() }}", "KeyError"),
        ("{{ 'x'.encode('no-such') }}", "LookupError"),
        ("{{ range(10 ** 9) | list }}", "OverflowError"), ("{{ '%d' % 'x' }}", "TypeError"),
        ("{{ 'x'.index('y') }}", "ValueError"), ("{{ messages[0].content.a.b }}", "UndefinedError"),
        ("{{ raise_exception('no') }}", "TemplateError"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
    ],
)  # fmt: skip
def test_M4_whatever_a_template_raises_is_the_templates_fault(tmp_path: Path, template: str, kind: str) -> None:
    with pytest.raises(UsageError, match=f"the chat template cannot be rendered.*: {kind}"):
        preview(asked(request(tmp_path, template=template)))


def test_a_request_that_lacks_something_is_refused(tmp_path: Path) -> None:
    fields = request(tmp_path)
    del fields["verifier"]
    with pytest.raises(UsageError, match="'verifier'"):
        asked(fields)


def test_quantiles_and_spread_of_few() -> None:
    assert quantiles([]) == [] and quantiles([7]) == [7] * 5
    file = TaskFile(Path("f"), (), "", 0, ())
    places = [(length, file, Task(str(length), "p", "a", "t")) for length in (5, 3)]
    assert [each[0] for each in spread(places, 3)] == [3, 5]
    assert [each[0] for each in spread(places, 1)] == [3]


SITE = """\
silo: hospital_a
federation: cardio-net
coordinator: {{address: "host:1"}}
state_dir: state
identity: {{certificate: a, key: a, signing_key: a, federation_ca: a, site_ca: a, operators: a}}
policy: policy.yaml
data:
  collection: c
  private: ["{data}/private.jsonl"]
  verifier: exact
  template: plain
  public: {{path: "{data}/public.jsonl", sha256: "{sha256}", verifier: exact}}
  held_out: {{path: "{data}/held_out.jsonl", sha256: "{sha256}"}}
model: {{path: "{data}/model"}}
"""


def site(folder: Path, data: str) -> SiloConfig:
    path = folder / "silo.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(SITE.format(data=data, sha256="0" * 64))
    return load_config(path)


@pytest.mark.slow
def test_dots_in_paths(tmp_path: Path) -> None:  # short: the kernel takes 107 bytes of a socket's path
    request(tmp_path / "data" / "sets")
    (tmp_path / "s" / "a").mkdir(parents=True)
    dotted = site(tmp_path / "s" / "a", "../../s/../data/sets")
    plain = site(tmp_path / "s" / "a", str(tmp_path / "data" / "sets"))
    assert dotted.data == plain.data and dotted.model == plain.model
    found = checks.preview(dotted, max_prompt_tokens=20, show=1)
    assert found.sets["private"].rows == 30 and found == checks.preview(plain, max_prompt_tokens=20, show=1)


def test_two_dots_after_a_link_mean_what_the_system_takes_them_for(tmp_path: Path) -> None:
    request(tmp_path / "far" / "data")
    (tmp_path / "far" / "below").mkdir()
    (tmp_path / "near").symlink_to(tmp_path / "far" / "below")
    config = site(tmp_path, "near/../data")
    assert config.data.private == (tmp_path / "far" / "data" / "private.jsonl",)
    assert config.data.private[0].is_file()
