"""A federation whose answers to public prompts are programs (docs/decisions/0016): graded by the silo whose model wrote
them, and again by the one that they come to, each time behind walls."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedsilo.launch.data_folder import DataFolder, write_data_folder
from fedsilo.launch.demo_data import DIGIT_LENGTHS, make_digit_set
from fedsilo.launch.demo_sites import Site
from silo.guard import isolation
from tests.loopback.federation import federation, records

SILOS = ["hospital_a", "hospital_b"]
STEPS, PROMPTS, SAMPLES = 2, 4, 4


def code_folder(root: Path, seed: int, *, silos: int, rows_per_silo: int) -> DataFolder:
    """Digits that the model writes are a program: right, but for those that begin with a zero or hold other signs."""
    made = make_digit_set(seed, silos=silos, rows_per_silo=rows_per_silo, further_rows=8)
    return write_data_folder(
        root,
        name="programs",
        tokenizer="digits",
        lengths=DIGIT_LENGTHS,
        private={silo: ("exact", rows) for silo, rows in made.private.items()},
        public=("code", [{**row, "answer": "assert True"} for row in made.public]),
        held_out=("exact", made.held_out),
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
@pytest.mark.skipif(isolation.rung_trial("namespaces") != "", reason="no namespaces on this machine")
def test_T14_T22_programs_of_models_are_graded_where_they_are_written_and_where_they_arrive(tmp_path: Path) -> None:
    with federation(
        tmp_path, silos=2, ruleset="pubswap-random", holds=SILOS[0], viewer="dave", write_data=code_folder,
        before_start=let_programs_in,
    ) as sites:  # fmt: skip
        record = sites.run(
            "programs", silos=SILOS, local_steps=STEPS, swap_period=1, prompts_per_step=PROMPTS,
            samples_per_prompt=SAMPLES,
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
            # some were wrong, and stayed
            assert 0 < sum(facts["responses"] for facts in sent) < STEPS * PROMPTS * SAMPLES
            assert sum(facts["donors"] for facts in come) == donors[silo] > 0
