"""A federation in one process, against the one over daemons, and by what it leaves behind."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedsilo.audit.audit_verify import verify_logs
from fedsilo.demo.data import write_digit_folder
from fedsilo.demo.run import ALPHA, LEARNING_RATE, RANK
from fedsilo.demo.sites import DemoSettings, Sites, make_sites, run_text
from fedsilo.demo.tiny_model import cached_model, recipe_for
from fedsilo.experiment.cell import CellResult, Figure, run_cell
from fedsilo.experiment.design import Cell, Experiment, cells_of, digest_of, read_experiment
from fedsilo.experiment.perform import perform
from fedsilo.experiment.results import EQUAL_OVER_ROWS, Line, of_experiment, trials_of, unequal
from fedsilo.protocol import strict_yaml
from fedsilo.protocol.codec import sha256_hex
from fedsilo.protocol.errors import UsageError
from fedsilo.protocol.methods import method_named
from tests.loopback.federation import command

pytestmark = pytest.mark.torch
SEED, SILOS, STEPS = 5, 2, 4


def sites_in(folder: Path, method: str = "pubswap") -> Sites:
    """The demo's own sites, without its processes."""
    data = write_digit_folder(folder / "data", SEED, silos=SILOS)
    return make_sites(
        DemoSettings(
            out=folder, model=cached_model(recipe_for("digits")), data=data, ruleset=method_named(method).ruleset,
            seed=SEED, rank=RANK, alpha=ALPHA, holds="", local_steps=STEPS, swap_period=2, prompts_per_step=8,
            samples_per_prompt=8, learning_rate=LEARNING_RATE,
        )
    )  # fmt: skip


def plan(**changes: Any) -> dict[str, Any]:
    return {
        "run": "run-1", "method": "pubswap", "rounds": 1, "local_steps": STEPS, "swap_period": 2, "prompts_per_step": 8,
        "samples_per_prompt": 8, "seed": SEED, "objective": {"kl_coefficient": 0.0},
        "optimiser": {"learning_rate": LEARNING_RATE},
        "rollout": {"temperature": 1.0, "max_prompt_tokens": 8, "max_new_tokens": 6},
        "evaluation": {"prompts": 64, "samples": 2}, **changes,
    }  # fmt: skip


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> tuple[Sites, CellResult]:
    sites = sites_in(tmp_path_factory.mktemp("cell"))
    return sites, run_cell(sites, plan())


@pytest.mark.slow
def test_it_finishes_and_every_log_verifies(played: tuple[Sites, CellResult]) -> None:
    sites, result = played
    assert (result.record["state"], result.record["reason"]) == ("finished", "")
    verdicts = verify_logs([site.audit_log for site in sites.all()])
    assert [row.get("problems") for row in verdicts if not row["verified"]] == []


@pytest.mark.slow
def test_only_what_the_ruleset_names_left_and_nothing_was_refused(played: tuple[Sites, CellResult]) -> None:
    _, result = played
    kinds = {kind for _, kind in result.traffic if not kind.startswith("control.")}
    assert kinds == {"lora.factors", "public.responses", "metrics.eval"}
    assert not result.refused


@pytest.mark.slow
def test_each_silo_took_every_step(played: tuple[Sites, CellResult]) -> None:
    _, result = played
    for figures in result.figures.values():
        steps = [(each.task, each.step) for each in figures if each.task in ("PrivateStep", "PublicStep")]
        assert steps == [("PrivateStep", 1), ("PublicStep", 2), ("PrivateStep", 3), ("PublicStep", 4)]


@pytest.mark.slow
def test_it_ends_with_the_adapter_of_the_run_over_daemons(
    played: tuple[Sites, CellResult], tmp_path_factory: pytest.TempPathFactory
) -> None:
    out = tmp_path_factory.mktemp("demo") / "out"  # a socket's path has room for 107 bytes
    options = ("--silos", SILOS, "--seed", SEED, "--rounds", 1, "--local-steps", STEPS, "--out", out)
    over_daemons = command("fedsilo", "demo", "--no-console", *map(str, options), "--json")
    assert over_daemons.exit_code == 0, over_daemons.stderr
    adapter = Path(over_daemons.data["adapter"]) / "adapter_model.safetensors"
    assert played[1].adapter_sha256 == sha256_hex(adapter.read_bytes())


@pytest.mark.slow
@pytest.mark.parametrize("exchange", ["step", "round_end"])
def test_silos_in_one_process_know_with_what_probability_a_donor_was_written(
    exchange: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """No message carries it. At a common start of equal silos every ratio of a donor's token is near 1."""
    rounds = {"step": 1, "round_end": 2}[exchange]
    result = run_cell(
        sites_in(tmp_path_factory.mktemp("donor")),
        plan(donor_denominator="donor", exchange=exchange, rounds=rounds),
    )
    assert (result.record["state"], result.refused) == ("finished", Counter())
    steps = [each.metrics for silo in result.figures.values() for each in silo if each.task == "PublicStep"]
    assert sum(each["donors_used"] for each in steps) > 0
    assert all(not each["donors_rejected"] for each in steps)
    swapped = [each["ratio_deviation_first"] for each in steps if each["donors_used"]]
    assert all(each > 0 for each in swapped)
    assert result.adapter_sha256 != ""


@pytest.mark.slow
def test_what_a_site_does_not_allow_is_refused_as_over_daemons(tmp_path_factory: pytest.TempPathFactory) -> None:
    sites = sites_in(tmp_path_factory.mktemp("few"))  # a socket's path has room for 107 bytes
    with pytest.raises(UsageError, match="local_steps"):
        run_cell(sites, plan(local_steps=STEPS + 1))


def test_numbers_of_a_plan_are_numbers_in_run_yaml() -> None:
    """A learning rate of the papers, 1e-5, is a text to YAML as JSON writes it."""
    fields = {"rate": 1e-5, "more": {"values": [1e-30, 2, 0.5, 1e22, -3e-7], "text": "1e-5"}, "silos": ["a"]}
    assert strict_yaml.load(run_text(fields).encode(), "run.yaml").value == fields


@pytest.mark.slow
def test_an_adapter_that_a_round_left_as_it_was_is_measured_again(tmp_path_factory: pytest.TempPathFactory) -> None:
    """With a rate too small for float32 and no decay, both rounds end with the adapter that the first began with."""
    still = {"learning_rate": 1e-60, "weight_decay": 0.0}
    result = run_cell(sites_in(tmp_path_factory.mktemp("still")), plan(rounds=2, local_steps=2, optimiser=still))
    assert result.record["state"] == "finished"
    first, second = (row for row in result.record["rounds"])
    assert first["adapter_sha256"] == second["adapter_sha256"] and first["metrics"] == second["metrics"] != {}


# ---- a cell of a file ----------------------------------------------------------------------------------

TEXT = """\
experiment: tiny
settings:
  W: {questions: two-step, split: one-topic, base: {right_share: 0.9, steps: 60}, rounds: 2, local_steps: 2,
    private_rows: 20, public_rows: 20, held_out_rows: 16, evaluation_samples: 1, prompts_per_step: 2,
    samples_per_prompt: 4, tuning_rows: 8}
seeds: [3]
rows:
  own: {method: self-swap}
  swap: {method: pubswap}
  private: {method: fedavg-grpo}
  pooled: {method: fedavg-grpo, pooled: true}
  base: {method: base}
  local: {method: local-only}
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Experiment, dict[Cell, Line]]]:
    """The cells of a file, carried out."""
    folder = tmp_path_factory.mktemp("tiny")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDSILO_CACHE", str(folder / "cache"))
        path = folder / "tiny.yaml"
        path.write_text(TEXT)
        experiment = read_experiment(path)
        lines = [json.loads(json.dumps(perform(experiment, cell, folder))) for cell in cells_of(experiment)]
        yield experiment, of_experiment(experiment, lines)


@pytest.mark.slow
def test_rows_of_one_seed_share_all_but_the_method(tiny: tuple[Experiment, dict[Cell, Line]]) -> None:
    _, known = tiny
    own, swap, private, base, pooled = (
        known[Cell("W", row, 3)] for row in ("own", "swap", "private", "base", "pooled")
    )
    assert unequal(known) == []
    for line in (own, private, base, pooled):
        for name in EQUAL_OVER_ROWS:
            assert line[name] == swap[name] != "", name
    assert own["rounds"][0] == swap["rounds"][0] == base["rounds"][-1], "the base model is measured on the same draws"
    assert (own["steps"], private["steps"], base["steps"], pooled["steps"]) == (4, 4, 0, 4)
    assert {"lora.factors"} == {kind for kind in pooled["bytes"]["up"] if kind.startswith("lora")}
    assert pooled["generated_tokens"] > private["generated_tokens"] / 2, "one silo, with the prompts of four"
    assert "public.responses" in swap["bytes"]["up"] and "public.responses" not in own["bytes"]["up"]
    # three others' worth of answers to each public prompt, and as many private ones as the other row's
    assert own["generated_tokens"] > swap["generated_tokens"]


@pytest.mark.slow
def test_where_silos_keep_their_own_a_line_has_means_over_them(tiny: tuple[Experiment, dict[Cell, Line]]) -> None:
    _, known = tiny
    line, base = known[Cell("W", "local", 3)], known[Cell("W", "base", 3)]
    assert (line["state"], line["steps"], line["adapter_sha256"]) == ("finished", 4, "")
    assert line["rounds"][0] == base["rounds"][-1] and len(line["rounds"]) == 3
    assert not any(kind.startswith(("lora", "global")) for way in line["bytes"].values() for kind in way)
    for row in line["rounds"][1:]:
        # every silo answers every topic, each of which has as many rows as any other
        assert row["pass_at_1"] == pytest.approx(sum(row["topics"].values()) / 4, abs=1e-4)
        assert row["worst_silo"] <= row["own_task"] and row["apart"] is None
    assert line["best"]["pass_at_1"] == line["rounds"][line["best"]["round"]]["pass_at_1"]


@pytest.mark.slow
def test_a_line_has_the_figures_of_each_step(tiny: tuple[Experiment, dict[Cell, Line]]) -> None:
    _, known = tiny
    swap, private = known[Cell("W", "swap", 3)], known[Cell("W", "private", 3)]
    public = swap["curves"]["PublicStep"]
    assert len(public["alpha_mean"]) == len(swap["curves"]["PrivateStep"]["drift"]) == 2
    assert sum(public["alpha_mean"]) / 2 == pytest.approx(swap["alpha_mean"], abs=1e-4)
    assert sum(swap["alpha_histogram"].values()) == 4 * 2 * 2, "silos, steps and prompts a step"
    assert private["curves"]["PublicStep"] == {} and len(private["curves"]["PrivateStep"]["drift"]) == 4
    assert swap["steps_at"] == {"PrivateStep": [[1, 1], [2, 1]], "PublicStep": [[1, 2], [2, 2]], "LikelihoodStep": []}
    assert (swap["public_steps"], private["public_steps"]) == (2, 0)
    assert (swap["rounds_planned"], swap["rounds_finished"]) == (2, 2)
    assert swap["program"] == private["program"] and {"sha256", "torch", "transformers"} == swap["program"].keys()
    for line in (swap, private):  # what a policy lets out is counted, by kind
        sent = {kind for kind in line["bytes"]["up"] if not kind.startswith("control.")}
        assert sent <= line["capacity_bits"].keys() and min(line["capacity_bits"].values()) > 0
    # each silo owns one topic, so what is measured on it is the silo's own task
    last = swap["rounds"][-1]
    assert last["worst_silo"] == min(last["topics"].values())
    assert last["own_task"] == pytest.approx(sum(last["topics"].values()) / 4, abs=1e-6)
    assert last["apart"]["factors"] > 0


@pytest.mark.slow
def test_the_best_checkpoint_is_chosen_on_strings_that_nothing_else_reads(
    tiny: tuple[Experiment, dict[Cell, Line]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    experiment, known = tiny
    for row in ("swap", "pooled"):
        line = known[Cell("W", row, 3)]
        assert line["best"]["round"] in (1, 2)
        assert line["best"]["pass_at_1"] == line["rounds"][line["best"]["round"]]["pass_at_1"]
    trial = Cell("W", "swap", 3, (("optimiser.learning_rate", 0.002),), trial=True)
    tried = perform(experiment, trial, tmp_path_factory.mktemp("t"))
    assert tried["held_out_sha256"] != known[Cell("W", "swap", 3)]["held_out_sha256"] and tried["best"] is None
    assert trials_of(experiment, [tried]) == {digest_of(experiment, trial): tried["rounds"][-1]["pass_at_1"]}


@pytest.mark.slow
def test_private_rows_are_drawn_by_seed_and_silo_and_not_by_method(
    played: tuple[Sites, CellResult], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """PubSwap takes every other step in public, so its n-th private step has the rows of the n-th step without."""
    _, swapped = played
    private = run_cell(sites_in(tmp_path_factory.mktemp("fedavg"), "fedavg-grpo"), plan(method="fedavg-grpo"))
    for silo in swapped.figures:
        some, more = ([figure.rows for figure in _private(result.figures[silo])] for result in (swapped, private))
        assert len(some) == STEPS // 2 and len(more) == STEPS
        assert some == more[: len(some)]
    drawn = [figures[0].rows for figures in map(_private, private.figures.values())]
    assert len(set(drawn)) == len(drawn), "each silo draws its own"


def _private(figures: list[Figure]) -> list[Figure]:
    return [figure for figure in figures if figure.task == "PrivateStep"]
