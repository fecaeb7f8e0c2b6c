"""Names of fields, a template and a load type that a site's configuration names reach the trainer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from silo.link import Link
from silo.trainer.data import read_fields
from silo.trainer.quantised import QuantisedLinear
from silo.trainer.worker import Configuration, load_model
from tests.algorithms.test_worker import ask, configuration, folder, guard_end, make_model
from tests.algorithms.tiny import make_plan, make_rows, make_shape, start_payload

pytestmark = pytest.mark.torch
__all__ = ["folder", "guard_end"]


@pytest.mark.slow
@pytest.mark.exhaustive(keep=1)
@pytest.mark.parametrize("load", ["fp32", "nf4", "fp8"])
def test_a_step_over_the_link_with_names_template_and_load(folder: Path, guard_end: Link, load: str) -> None:
    fields = configuration(folder) | {
        "model": {"path": str(folder / "model"), "load": load},
        "fields": {"prompt": "question", "id": "case"},
        "template": "{{ messages[0]['content'] }}" + "=" * 12,
    }
    rows = [
        {"case": row.id, "question": row.prompt, "answer": row.answer, "topic": row.topic} for row in make_rows(40, "p")
    ]
    (folder / "private.jsonl").write_text("\n".join(map(json.dumps, rows)))
    ready, _ = ask(guard_end, "configure", **fields)
    assert (ready.type, ready.fields.get("private_rows")) == ("ready", 40), ready.fields
    # prompts of the tests' rows are the same in all three files
    said = ready.fields["found_twice"]
    assert any(text.startswith("private files: 40 prompts are the same as one in the held-out set") for text in said)
    assert not any(row["question"] in text or row["case"] in text for row in rows for text in said)
    shape = make_shape(make_model())
    schema = {
        "rank": shape.rank, "alpha": shape.alpha, "freeze": "none",
        "tensors": [{"name": name, "shape": list(sides)} for name, sides in shape.shapes.items()],
    }  # fmt: skip
    planned, _ = ask(guard_end, "plan", canonical_json=make_plan().canonical(), lora_schema=schema)
    # the template makes prompts of more than two characters too long for the plan's 16 tokens, so it was used
    longer = sum(len(row["question"]) + 12 > 16 for row in rows)
    assert 0 < longer < 40 and planned.fields["overlong"]["private"] == longer
    payload, digest = start_payload(shape)
    ask(guard_end, "task", payload, task="LoadAdapter", round=1, digest=digest)
    stepped, _ = ask(guard_end, "task", task="PrivateStep", round=1, step=1, rows=[0, 1])
    assert stepped.type == "done", stepped.fields


def test_every_load_type_is_loaded_as_it_says(folder: Path) -> None:
    def kind(load: str) -> Any:
        layer = load_model(folder / "model", load).model.layers[0].mlp.up_proj
        return layer.stored.load if isinstance(layer, QuantisedLinear) else layer.weight.dtype

    assert [kind(load) for load in ("fp32", "bf16", "nf4", "fp8")] == [torch.float32, torch.bfloat16, "nf4", "fp8"]


def test_a_message_without_names_means_the_standard_ones(folder: Path) -> None:
    found = read_fields(Configuration, configuration(folder), "it")
    assert (found.fields.prompt, found.template) == ("prompt", None)
