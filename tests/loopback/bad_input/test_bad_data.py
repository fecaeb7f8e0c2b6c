"""`silo check` on rows, template, model and memory: what is wrong is named before anything is started."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from fedsilo.protocol.codec import sha256_hex
from tests.loopback.bad_input.place import Done, Place, command, edit

CHECK = ("silo", "check", "--offline", "--config")


def checked(place: Place, *options: str) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """(each check by name, the envelope)."""
    answer = json.loads(command(*CHECK, place.config, "--json", *options).stdout)
    return {each["check"]: each for each in answer["data"]["checks"]}, answer


def rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_a_sound_site_is_told_about_its_prompts_and_shows_none_unasked(place: Place) -> None:
    checks, answer = checked(place)
    assert answer["ok"] and not answer["warnings"]
    private = rows(place.private)
    assert answer["data"]["data"]["sets"]["private"]["rows"] == len(private)
    topics = {row["topic"] for row in private}
    assert answer["data"]["data"]["sets"]["private"]["topics"] == {
        topic: sum(row["topic"] == topic for row in private) for topic in topics
    }
    # the tiny tokenizer reads a character as a token
    assert answer["data"]["data"]["sets"]["private"]["prompt_tokens"][4] == max(len(row["prompt"]) for row in private)
    assert "Qwen3ForCausalLM" in checks["base model"]["found"] and "MiB" in checks["memory"]["found"]
    told = command(*CHECK, place.config)
    for text in (json.dumps(answer), told.stdout):  # a pipe is no terminal
        assert not any(row["prompt"] in text for row in private)
    shown = command(*CHECK, place.config, "--prompts", "3").stdout
    assert shown.count("as the model reads it") == 3
    assert sum(f"\n| {row['prompt']}\n" in f"{shown}\n" for row in private) >= 3
    asked = checked(place, "--prompts", "2")[1]["data"]["data"]["prompts"]
    assert len(asked) == 2 and all(each["text"] in {row["prompt"] for row in private} for each in asked)


@pytest.mark.slow
def test_a_held_out_prompt_among_the_private_ones_is_a_warning(place: Place) -> None:
    held_out = rows(place.root / "data" / "held_out.jsonl")[7]
    with place.private.open("a") as file:
        file.write(json.dumps({**held_out, "id": "leaked"}) + "\n")
    done: Done = command(*CHECK, place.config)
    assert done.exit_code == 0
    line = len(rows(place.private))
    said = rf"private files: 1 prompt is the same as one in the held-out set: 'leaked' {place.private.name}:{line} = "
    assert re.search(said + rf"'{held_out['id']}' held_out\.jsonl:8", done.stderr)
    assert held_out["prompt"] not in done.stdout + done.stderr
    assert "1 private prompts are held-out ones" in done.stdout


@pytest.mark.slow
def test_other_forms_and_names_are_read(place: Place) -> None:
    path = place.private.with_suffix(".json")
    path.write_text(
        json.dumps(
            [
                {"case": row["id"], "question": row["prompt"], "answer": row["answer"], "topic": row["topic"]}
                for row in rows(place.private)
            ]
        )
    )
    edit(place.config, rf"^(  private: .*){re.escape(place.private.name)}", rf"\1{path.name}")
    done = command(*CHECK, place.config)
    assert done.exit_code == 2 and "missing field 'id'" in done.stdout
    edit(place.config, "^  verifier: (.*)", r"  fields: {id: case, prompt: question}\n  verifier: \1")
    checks, answer = checked(place)
    assert (
        answer["ok"]
        and f"{len(rows(place.private))} rows, 0 rows left out" in checks[f"private data {path.name}"]["found"]
    )


@pytest.mark.slow
def test_a_model_of_another_kind_is_refused_with_a_reason(place: Place) -> None:
    path = place.root / "model" / "config.json"
    path.write_text(path.read_text().replace("Qwen3ForCausalLM", "GemmaForCausalLM"))
    checks, answer = checked(place)
    assert not answer["ok"] and checks["base model"]["code"] == "MODEL_NOT_SUPPORTED"
    assert "architecture 'GemmaForCausalLM' is not known" in checks["base model"]["found"]
    assert checks["memory"]["ok"] is None and "it needs base model" in checks["memory"]["found"]


@pytest.mark.slow
def test_what_cannot_fit_into_memory_is_refused(place: Place) -> None:
    edit(place.config, "^silos_on_this_host: .*", "silos_on_this_host: 1000000")
    edit(place.config, "^  threads: .*", "  threads: 1")
    checks, _ = checked(place)
    assert (checks["memory"]["ok"], checks["memory"]["code"]) == (False, "MEMORY_TOO_SMALL")
    assert "for 1000000 processes; this machine has" in checks["memory"]["found"]
    assert "lower" in checks["memory"]["hint"]
    assert command(*CHECK, place.config).exit_code == 2


@pytest.mark.slow
@pytest.mark.parametrize(("text", "said"), [("{{ messages", "cannot be rendered"), (None, "does not exist")])
def test_a_template_that_cannot_be_used_is_named(place: Place, text: str | None, said: str) -> None:
    path = place.config.parent / "own.jinja"
    path.write_text("{{ messages[0]['content'] }}")
    edit(place.config, "^  verifier: (.*)", r"  template: own.jinja\n  verifier: \1")
    edit(place.policy, "template_sha256: .*", f"template_sha256: {sha256_hex(path.read_bytes())}")
    first = checked(place)[0]
    assert first["prompts"]["ok"], [each for each in first.values() if not each["ok"]]
    if text is None:
        path.unlink()
    else:
        path.write_text(text)
        edit(place.policy, "template_sha256: .*", f"template_sha256: {sha256_hex(path.read_bytes())}")
    checks, answer = checked(place)
    assert not answer["ok"] and any(said in each["found"] for each in checks.values() if each["ok"] is False)
