"""What `benchmarks.transport` makes of what it measured: payloads, means and figures against numbers by hand."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.transport import runners
from benchmarks.transport_flower import check_mean as check_flower
from benchmarks.transport_flower import seconds_of_rounds as seconds_of_marks
from benchmarks.transport_nvflare import check_mean as check_nvflare
from benchmarks.transport_nvflare import seconds_of_rounds as seconds_of_log
from benchmarks.transport_ours import seconds_of_rounds
from benchmarks.transport_payload import SHAPES, constant_of, mean_of, write_model_folder
from benchmarks.transport_process import Watched, cpu_seconds
from benchmarks.transport_report import Job, Place, figures_of, kept_of, least_seconds, memory_of
from benchmarks.transport_trainer import ConstantTrainer, measured
from fedsilo.files.model_facts import read_model_facts
from fedsilo.protocol.codec import decode_factors, encode_factors, sha256_hex
from fedsilo.protocol.errors import OperationError
from silo.link import LinkClosed, LinkMessage

MIB = 1 << 20


def job(*seconds: float, cpu: float = 1.0, crossed: float = 1e9, base: int = 100 * MIB, peak: int = 200 * MIB) -> Job:
    return Job(seconds, cpu, crossed, base, peak)


# ---- payload -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("megabytes", "arrays"), [(69.6, 392), (6.96, 392), (323.0, 392), (1660.0, 1120)])
def test_a_payload_has_the_arrays_and_the_bytes_it_is_named_after(megabytes: float, arrays: int) -> None:
    shape = SHAPES[megabytes]
    sides = shape.arrays()
    assert len(sides) == arrays
    assert shape.payload_bytes == sum(np.broadcast_to(np.float32(0), each).nbytes for each in sides.values())
    assert float(f"{shape.payload_bytes / 1e6:.3g}") == megabytes


def test_the_mean_of_the_silos_constants_is_the_number_by_hand() -> None:
    for silos, by_hand in ((4, 2.5 / 16384), (16, 8.5 / 16384)):
        values = [np.float32(constant_of(silo)) for silo in range(silos)]
        total = np.float32(0)
        for value in values:
            total += value
        assert total / np.float32(silos) == np.float32(by_hand) == mean_of(silos)  # exact: no tolerance


def test_the_model_folder_is_one_that_a_site_accepts(tmp_path: Path) -> None:
    shape = SHAPES[0.0]
    facts = read_model_facts(write_model_folder(tmp_path / "model", shape))
    assert (facts.layers, facts.hidden, facts.intermediate) == (shape.layers, shape.hidden, shape.intermediate)


# ---- the trainer -------------------------------------------------------------------------------------


class Script:
    """A guard that says what is in a list and keeps the answers."""

    def __init__(self, *says: LinkMessage) -> None:
        self._says = list(says)
        self.heard: list[LinkMessage] = []

    def receive(self) -> LinkMessage:
        if not self._says:
            raise LinkClosed("the script is over")
        return self._says.pop(0)

    def send(self, message: LinkMessage) -> None:
        self.heard.append(message)


def test_its_update_is_the_constant_against_the_adapter_it_was_given() -> None:
    tensors = {"x.lora_A": np.ones((2, 3), np.float32), "x.lora_B": np.zeros((4, 2), np.float32)}
    body = encode_factors(tensors, base_digest="", schema_sha256="5" * 64, rank=2, scale=2.0, dtype="float32")
    digest = sha256_hex(body)
    schema = {
        "rank": 2, "alpha": 4.0,
        "tensors": [{"name": name, "shape": list(each.shape)} for name, each in tensors.items()],
    }  # fmt: skip
    link = Script(
        LinkMessage(
            "plan", {"canonical_json": f'{{"lora": {{"schema_sha256": "{"5" * 64}"}}}}', "lora_schema": schema}
        ),
        LinkMessage("task", {"task": "LoadAdapter", "round": 1, "digest": digest}, body),
        LinkMessage("task", {"task": "ExportDelta", "round": 1}),
        LinkMessage("stop"),
    )
    ConstantTrainer(link, 0.25).run()
    planned, loaded, exported = link.heard
    assert planned.type == "planned" and loaded.fields["task"] == "LoadAdapter"
    factors = decode_factors(exported.body)
    assert factors.header.base_digest == digest and factors.header.scale == 2.0
    assert all(np.array_equal(values, np.full(values.shape, 0.25, np.float32)) for values in factors.tensors.values())


def test_only_a_round_s_evaluation_says_how_many_donors_were_trained_on() -> None:
    assert [metric.name for metric in measured("d", 0).metrics] == ["pass_at_1", "pass_at_1_greedy"]
    assert [metric.name for metric in measured("d", 2).metrics] == ["donors_trained", "pass_at_1", "pass_at_1_greedy"]


# ---- seconds -----------------------------------------------------------------------------------------


def test_a_round_lasts_to_the_next_one_s_opening_and_the_last_to_its_commit() -> None:
    marks = [
        (10.0, "round.opened", 1), (11.0, "round.committed", 1), (11.5, "round.opened", 2), (13.0, "upload", 2),
        (14.5, "round.committed", 2), (99.0, "run.ended", 0),
    ]  # fmt: skip
    assert seconds_of_rounds(marks, 2) == [1.5, 3.0]


LOG = """\
2026-11-22 10:00:00,500 - ConstantFedAvg - INFO - [wf=controller] - Start FedAvg.
2026-11-22 10:00:01,000 - ConstantFedAvg - INFO - [wf=controller] - \n---
      Round 0 started.
2026-11-22 10:00:02,000 - ConstantFedAvg - INFO - sent
2026-11-22 10:00:03,250 - ConstantFedAvg - INFO - [wf=controller] - \n---
      Round 1 started.
2026-11-22 10:00:05,250 - ConstantFedAvg - INFO - [wf=controller] - \n---
      Finished FedAvg.
"""


def test_nvflare_s_log_is_read_by_the_stamp_before_a_framed_line() -> None:
    assert seconds_of_log(LOG, 2) == [2.25, 2.0]
    with pytest.raises(OperationError, match="3 moments, 4 are expected"):
        seconds_of_log(LOG, 3)


# ---- figures -----------------------------------------------------------------------------------------


def test_figures_are_medians_and_ratios_of_pairs() -> None:
    jobs = {
        Place("ours", 69.6, 4): [job(1.0, 2.0, 3.0, cpu=6.0, crossed=2e9), job(4.0, cpu=1.0)],
        Place("nvflare", 69.6, 4): [job(8.0), job(8.0)],
        Place("ours", 69.6, 16): [job(5.0, cpu=4.0, peak=300 * MIB)],
        Place("ours", 0.0, 4): [job(0.1, 0.2, 0.3)],
    }
    figures = figures_of(jobs)
    assert figures["n4_seconds"] == 2.5  # of 1, 2, 3, 4
    assert figures["ratio_nvflare_n4"] == 3.0  # of 8/2 and 8/4
    assert figures["cpu_seconds_per_gb"] == 4.0  # the worst of 3, 1 and 4
    assert (figures["base_mib"], figures["peak_mib_n4"], figures["peak_mib_n16"]) == (100.0, 200.0, 300.0)
    assert figures["empty_round_seconds"] == 0.2
    assert figures["ratio_flower_n4"] is None and figures["ratio_nvflare_n16"] is None


def test_a_goal_is_kept_at_its_limit_missed_beyond_it_and_not_judged_without_a_figure() -> None:
    payload = 10 * MIB
    at_limit = {"n4_seconds": 2.0, "ratio_nvflare_n4": 3.0, "base_mib": 100.0, "peak_mib_n4": 140.0}
    assert kept_of(at_limit, payload) == {"n4_seconds": True, "ratio_nvflare_n4": True, "peak_mib_n4": True}
    beyond = {"n4_seconds": 2.001, "ratio_nvflare_n4": 2.999, "base_mib": 100.0, "peak_mib_n4": 140.1}
    assert kept_of(beyond, payload) == {"n4_seconds": False, "ratio_nvflare_n4": False, "peak_mib_n4": False}
    assert kept_of({"n4_seconds": None}, payload) == {}


# ---- processes ---------------------------------------------------------------------------------------


def test_a_process_s_children_count_for_cpu_and_peak_also_once_they_have_ended() -> None:
    import subprocess
    import sys

    child = "import time; held = bytearray(b'1') * (96 << 20)\nend = time.process_time() + 0.3\n"
    child += "while time.process_time() < end: pass"
    parent = f"import subprocess, sys; sys.stdin.readline(); subprocess.run([sys.executable, '-c', {child!r}]);"
    parent += "print('done', flush=True); sys.stdin.readline()"
    process = subprocess.Popen([sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    try:
        with Watched(process.pid) as watched:
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.stdout.readline() == "done\n"
        assert watched.cpu_seconds >= 0.29  # 0.3 less what a tick of 10 ms may hide
        assert watched.peak_bytes - watched.base_bytes >= 96 * MIB
        assert cpu_seconds(process.pid) >= watched.cpu_seconds
    finally:
        process.stdin.close()
        process.stdout.close()
        process.wait()


# ---- peers' means ------------------------------------------------------------------------------------


def test_a_peer_s_model_that_is_not_the_mean_in_one_array_is_refused(tmp_path: Path) -> None:
    wanted = 3 * 2.5 / 16384  # three rounds of four silos
    names = list(SHAPES[0.0].arrays())
    ranges = tmp_path / "ranges.json"
    ranges.write_text(json.dumps({name: [wanted, wanted] for name in names}))
    check_nvflare(ranges, SHAPES[0.0], 4, 3)
    ranges.write_text(json.dumps({name: [wanted, wanted * (1 + (name == names[-1]) * 1e-3)] for name in names}))
    with pytest.raises(OperationError, match=names[-1]):
        check_nvflare(ranges, SHAPES[0.0], 4, 3)
    row = {"round": 3, "arrays": 14, "least": wanted, "most": wanted}
    check_flower(row, 14, 4, 3)
    for wrong in ({"least": wanted * (1 - 1e-3)}, {"arrays": 13}):
        with pytest.raises(OperationError):
            check_flower({**row, **wrong}, 14, 4, 3)


def test_flower_s_first_round_begins_with_the_strategy() -> None:
    assert seconds_of_marks([{"at": 10.0}, {"at": 11.5}, {"at": 14.0}]) == [1.5, 2.5]


def test_a_peer_without_its_environment_is_said_to_be_absent_and_not_run(tmp_path: Path) -> None:
    given = argparse.Namespace(sides=["ours", "nvflare", "flower"], venv_nvflare=None, venv_flower=tmp_path, rounds=3)
    found, absent = runners(given)
    assert list(found) == ["ours"] and set(absent) == {"nvflare", "flower"}
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "flower-superlink").touch()
    found, absent = runners(given)
    assert list(found) == ["ours", "flower", "flower_one_array"] and set(absent) == {"nvflare"}


def test_memory_is_told_of_each_large_job_of_ours_beside_its_bound() -> None:
    jobs = {
        Place("ours", 323.0, 4): [job(9.0, peak=900 * MIB)],
        Place("ours", 6.96, 4): [job(1.0)],
        Place("nvflare", 69.6, 4): [job(9.0)],
    }
    assert memory_of(jobs, {323.0: 300 * MIB, 69.6: 70 * MIB}) == {
        "ours_323mb_n4": {"peak_mib": 900.0, "bound_mib": 1300.0}
    }


def test_the_light_round_is_the_empty_one_of_so_many_silos() -> None:
    jobs = {Place("ours", 0.0, 4): [job(0.5)], Place("ours", 0.0, 64): [job(4.0, 5.0, 6.0)]}
    figures = figures_of(jobs, light=64)
    assert (figures["empty_round_seconds"], figures["light_seconds"]) == (0.5, 5.0)
    assert figures_of(jobs)["light_seconds"] is None


def test_the_least_that_a_round_takes_is_its_streams_and_hashes_on_all_cores() -> None:
    machine = {
        "raw_grpc_receiver_cpu_seconds_per_gb": 1.0, "raw_grpc_sender_cpu_seconds_per_gb": 0.5,
        "sha256_gb_per_second": 2.0,
    }  # fmt: skip
    # 4 silos, 0.1 GB: 8 crossings of 0.15 s each; 12 hashes at the silos' lines and one of the new adapter, 0.05 s each
    assert least_seconds(machine, 10**8, 4, 2) == pytest.approx((8 * 0.15 + 13 * 0.05) / 2)
    assert least_seconds(machine, 10**8, 4, 1) == pytest.approx(2 * least_seconds(machine, 10**8, 4, 2))
