"""A federation whose answers to public prompts are programs (docs/decisions/0016): graded by the silo whose model wrote
them, and again by the one that they come to, each time in a sandbox."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from fedsilo.demo.data import DataFolder, Lengths, make_digit_set, write_data_folder
from fedsilo.demo.digit_tasks import OPERATIONS, TOPICS, answer, digit_strings, question
from fedsilo.demo.sites import Site
from fedsilo.demo.tiny_model import cached_model, recipe_for
from silo.guard.trainer_process import probing
from tests.loopback.federation import federation, records

SILOS = ["hospital_a", "hospital_b"]
STEPS, PROMPTS, SAMPLES = 2, 4, 4
TRAINING_STEPS = 150  # after 60 some of what it writes is no program yet
SUBJECT = "a"  # the name that a program defines and its test asks for; one of the 24 characters that the model knows
PROGRAM_LENGTHS = Lengths(max_prompt_tokens=8, max_new_tokens=8)  # `a=1257` and the end mark


def program(digits: str) -> str:
    """A whole solution. One whose digits begin with a zero is no Python, and whoever runs it learns that."""
    return f"{SUBJECT}={digits}"


def model_that_writes_programs(folder: Path) -> Path:
    """The demo's base model after some supervised steps more: of two programs it writes, one or the other is right."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    base = cached_model(recipe_for("digits"))
    model, tokenizer = (each.from_pretrained(base) for each in (AutoModelForCausalLM, AutoTokenizer))
    torch.manual_seed(7)
    draws = random.Random(7)
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(TRAINING_STEPS):
        rows = []
        for _ in range(96):
            topic, digits = draws.choice(TOPICS), draws.choice(digit_strings(held_out=False))
            told = topic if draws.random() < 0.5 else OPERATIONS[topic].opposite
            asked = tokenizer(question(topic, digits))["input_ids"]
            said = [*tokenizer(program(answer(told, digits)))["input_ids"], tokenizer.eos_token_id]
            rows.append((asked, said))
        longest = max(len(asked) + len(said) for asked, said in rows)
        tokens = torch.tensor([asked + said + [tokenizer.pad_token_id] * (longest - len(asked) - len(said))
                               for asked, said in rows])  # fmt: skip
        labels = torch.tensor([[-100] * len(asked) + said + [-100] * (longest - len(asked) - len(said))
                               for asked, said in rows])  # fmt: skip
        loss = model(input_ids=tokens, labels=labels).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def code_folder(root: Path, seed: int, *, silos: int, rows_per_silo: int) -> DataFolder:
    """Questions on digits whose answer is a program; a public row's test asks for what the program defines."""
    made = make_digit_set(seed, silos=silos, rows_per_silo=rows_per_silo, further_rows=8)

    def tested(row: dict[str, Any]) -> dict[str, Any]:
        return {**row, "answer": f"assert str({SUBJECT}) == '{row['answer']}'"}

    def wanted(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{**row, "answer": program(row["answer"])} for row in rows]

    return write_data_folder(
        root,
        name="programs",
        tokenizer="digits",
        lengths=PROGRAM_LENGTHS,
        private={silo: ("exact", wanted(rows)) for silo, rows in made.private.items()},
        public=("code", [tested(row) for row in made.public]),
        held_out=("exact", wanted(made.held_out)),
    )


def let_programs_in(site: Site) -> None:
    """What the people of a site write to agree; no release waits for one of them."""
    policy, config = site.folder / "policy.yaml", site.config
    head, mark, tail = policy.read_text().partition("public_sets:\n  public:\n")
    assert mark
    policy.write_text(head + mark + "    programs: sandbox\n" + tail.replace("first_rounds: 1\n", "first_rounds: 0\n"))
    # The charter that was made with the sites lets no programs in, and binds whoever names it.
    lines = config.read_text().splitlines()
    kept = ["charter: null" if line.startswith("charter:") else line for line in lines]
    config.write_text("\n".join(line for line in kept if not line.startswith("charter_sha256:")) + "\n")


@pytest.mark.slow
@pytest.mark.skipif(probing.sandbox_trial("namespaces") != "", reason="no namespaces on this machine")
def test_T14_T22_programs_of_models_are_graded_where_they_are_written_and_where_they_arrive(tmp_path: Path) -> None:
    with federation(
        tmp_path, silos=2, ruleset="pubswap-random", holds=SILOS[0], viewer="dave", write_data=code_folder,
        before_start=let_programs_in, model=model_that_writes_programs(tmp_path / "model"),
    ) as sites:  # fmt: skip
        record = sites.run(
            "programs", silos=SILOS, local_steps=STEPS, swap_period=1, prompts_per_step=PROMPTS,
            samples_per_prompt=SAMPLES,
            rollout={"temperature": 1.0, "max_prompt_tokens": 8, "max_new_tokens": PROGRAM_LENGTHS.max_new_tokens},
        )  # fmt: skip
        assert (record["state"], [row["participants"] for row in record["rounds"]]) == ("finished", [SILOS])
        donors = record["rounds"][0]["donors_sent"]
        for silo in SILOS:
            lines = records(sites.site(silo).audit_log)
            judged = [line for line in lines if line["event"].endswith(".decision") and line.get("run") == "programs"]
            sent, come = (
                [line["facts"]["final"] for line in judged if line["kind"] == kind]
                for kind in ("public.responses", "public.donors")
            )
            assert [len(sent), len(come)] == [STEPS, STEPS]
            for facts in (*sent, *come):
                assert facts["graded"] and facts["responses_correct"] == facts["responses"]
            # programs that fail their test stayed: half of what is written solves the opposite task
            assert 0 < sum(facts["responses"] for facts in sent) < STEPS * PROMPTS * SAMPLES
            assert sum(facts["donors"] for facts in come) == donors[silo] > 0
