"""`silo init` and `coordinator init`: template, names of fields and load, and the help that names every verifier."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from fedsilo.cli import coordinator as cli_coordinator
from fedsilo.cli import silo as cli_silo
from fedsilo.cli.options import VERIFIERS
from fedsilo.grading import VERIFIERS as BUILT_IN
from fedsilo.protocol.codec import sha256_hex
from policies.load import load_policy
from silo.config import load_config
from tests.policies.test_model_folder import whole_folder
from tests.policies.test_plan_size import SMALL, files, folder, invoke

__all__ = ["folder"]  # the fixture: what a site has before `silo init`


def coordinator(folder: Path, *words: object) -> Path:
    here = folder / "trial" / "coordinator"
    code, answer = invoke(
        cli_coordinator.app, "init", "--out", here, "--federation", "cardio-net", "--silos", "hospital_a,hospital_b",
        *files(folder), *SMALL, *words,
    )  # fmt: skip
    assert code == 0, answer
    return here


def silo(folder: Path, *words: object) -> tuple[int, Any]:
    return invoke(
        cli_silo.app, "init", "hospital_a", "--out", folder / "trial" / "hospital_a", "--private",
        folder / "private.jsonl", "--federation", folder / "trial" / "coordinator" / "federation.json",
        *files(folder), *words,
    )  # fmt: skip


def test_names_of_fields_stand_in_the_file_that_init_writes(folder: Path) -> None:
    coordinator(folder)
    code, answer = silo(folder, "--field", "prompt=the: question", "--field", "group=patient")
    assert code == 0, answer
    fields = load_config(Path(answer["data"]["config"])).data.fields
    assert (fields.prompt, fields.group, fields.answer) == ("the: question", "patient", "answer")


def test_a_wrong_field_is_refused_before_anything_is_written(folder: Path) -> None:
    coordinator(folder)
    for wrong in (("prompt",), ("prompt=",), ("prompt=a", "--field", "prompt=b"), ("question=prompt",)):
        code, answer = silo(folder, "--field", *wrong)
        assert code == 2 and wrong[0].partition("=")[0] in answer["error"]["message"]
    assert not (folder / "trial" / "hospital_a" / "silo.yaml").exists()


def test_a_template_is_pinned_by_its_own_hash_on_both_sides(folder: Path) -> None:
    template = folder / "own.jinja"
    template.write_text("{{ messages[0].content }}")
    here = coordinator(folder, "--template", template)
    pinned = sha256_hex(template.read_bytes())
    assert f'template_sha256: "{pinned}"' in (here / "coordinator.yaml").read_text()
    code, answer = silo(folder, "--template", template)
    assert code == 0, answer
    assert load_config(Path(answer["data"]["config"])).data.template == template
    policy = load_policy(Path(answer["data"]["policy"]).read_bytes(), "policy.yaml")
    assert policy.file.model.template_sha256 == pinned


def test_a_site_with_another_template_than_the_federations_is_refused(folder: Path) -> None:
    (folder / "model" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    coordinator(folder)
    code, answer = silo(folder, "--template", "plain")
    assert code == 2 and "template_sha256" in answer["error"]["message"]
    assert silo(folder, "--template", "chat")[0] == 0


def test_load_is_the_bundles_unless_the_site_says_another_and_is_told(folder: Path) -> None:
    coordinator(folder, "--load", "bf16")
    code, answer = silo(folder)
    assert code == 0 and load_config(Path(answer["data"]["config"])).model.load == "bf16"
    assert not any("load" in warning for warning in answer["warnings"])
    for each in ("config", "policy", "schema", "charter"):
        Path(answer["data"][each]).unlink()
    code, answer = silo(folder, "--load", "nf4")
    assert code == 0 and load_config(Path(answer["data"]["config"])).model.load == "nf4"
    assert [warning for warning in answer["warnings"] if "load: bf16" in warning and "coordinator compares" in warning]


def test_help_names_every_verifier_and_the_written_file_explains_it(folder: Path) -> None:
    assert all(name in VERIFIERS for name in BUILT_IN)
    coordinator(folder)
    code, answer = silo(folder)
    text = Path(answer["data"]["config"]).read_text()
    assert code == 0 and all(name in text.partition("  verifier:")[0] for name in BUILT_IN)


@pytest.mark.parametrize(
    "config", [{"architectures": [each]} for each in ("GemmaForCausalLM", "PhiForCausalLM", "GPT2LMHeadModel")]
)
def test_a_model_that_cannot_be_trained_is_refused_at_the_first_command_and_nothing_is_left(
    folder: Path, config: dict[str, Any]
) -> None:
    here = folder / "trial" / "coordinator"
    arguments = ("init", "--out", here, "--federation", "cardio-net", "--silos", "hospital_a,hospital_b",
                 "--person", "ann=operator", *files(folder), *SMALL)  # fmt: skip
    (here / "id" / "coordinator.pub").unlink()
    before = tree(here)
    for made in (cli_coordinator.app, cli_silo.app):
        shutil.move(folder / "model", folder / "right")
        whole_folder(folder / "model", **config)
        if made is cli_coordinator.app:
            code, answer = invoke(made, *arguments)
            assert tree(here) == before
        else:
            site = tree(folder / "trial" / "hospital_a")
            code, answer = silo(folder, "--person", "bea=approver")
            assert tree(folder / "trial" / "hospital_a") == site
        assert (code, answer["error"]["code"]) == (2, "MODEL_NOT_SUPPORTED")
        assert "Mistral without a sliding window" in answer["error"]["hint"]
        shutil.rmtree(folder / "model")
        shutil.move(folder / "right", folder / "model")
        # the next try with a right one stands in nobody's way
        code, answer = invoke(made, *arguments) if made is cli_coordinator.app else silo(folder)
        assert code == 0, answer


def test_an_init_that_fails_leaves_no_folder_that_it_made(folder: Path) -> None:
    coordinator(folder)
    (folder / "held_out.jsonl").write_text("")
    out = folder / "deep" / "new" / "hospital_a"
    code, _ = silo(folder, "--out", out)
    assert code == 2 and not (folder / "deep").exists()


def tree(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
