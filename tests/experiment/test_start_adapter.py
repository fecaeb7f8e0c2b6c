"""Two runs of one federation, the second from the last adapter of the first: real halves, gates and trainers."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.config import load_config
from fedsilo.experiment.cell import run_cell
from fedsilo.files.site_policy import read_charter
from fedsilo.protocol.errors import FedSiloError
from tests.experiment.test_cell import plan, sites_in


def rewrite(folder: Path, old: str, new: str) -> None:
    """In policies, charters and configurations of every site."""
    for path in folder.rglob("*.yaml"):
        path.write_text(path.read_text().replace(old, new))


@pytest.mark.slow
def test_the_first_rounds_base_is_the_earlier_runs_last_adapter_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder_of_other = tmp_path_factory.mktemp("b")  # short, as sockets' paths are
    one, other = sites_in(tmp_path_factory.mktemp("a")), sites_in(folder_of_other)
    first = run_cell(one, plan(run="first")).record
    folder = load_config(one.coordinator.config).state_dir / "runs" / "first" / "adapter"
    objective = {"kl_coefficient": 0.1, "kl_reference": "start_adapter"}
    again = plan(run="second", start_adapter=str(folder), objective=objective)
    with pytest.raises(FedSiloError, match="the charter allows none"):
        run_cell(one, again)
    charter = next(folder_of_other.rglob("charter.yaml"))
    before = read_charter(charter).digest
    rewrite(folder_of_other, "    learning_rate: [", "    start_adapter: [any]\n    learning_rate: [")
    rewrite(folder_of_other, before, read_charter(charter).digest)
    result = run_cell(other, again)
    record = result.record
    assert (record["state"], record["reason"], result.refused) == ("finished", "", {})
    assert record["plan"]["start_adapter_sha256"] == first["adapter_sha256"]
    assert record["rounds"][0]["base_sha256"] == first["rounds"][-1]["adapter_sha256"] == first["adapter_sha256"]
    assert record["adapter_sha256"] not in ("", first["adapter_sha256"])
    for figures in result.figures.values():
        assert [figure.task for figure in figures].count("LoadReference") == 1
        pulls = [figure.metrics["kl"] for figure in figures if figure.task == "PrivateStep"]
        assert abs(pulls[0]) < 1e-9 < pulls[-1]
