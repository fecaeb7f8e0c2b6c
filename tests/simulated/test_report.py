"""Which run `silo report benefit` is about, and why it refuses: each refusal beside the case that passes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedsilo.launch.silo_text import private_text
from fedsilo.treaty.errors import ConflictError, FedSiloError, NotFoundError, OperationError, UsageError
from fedsilo.treaty.wire.codec import encode_factors, sha256_hex
from policies.catalogue import KINDS
from silo.config import load_config
from silo.guard.adapters import AdapterStore
from silo.guard.ledger import Ledger
from silo.guard.service import LEDGER
from silo.report.measure import _check_split, _initial_adapter, _kept, find_run, report_benefit
from tests.policies import setting

SPLIT, FINAL, START = "5" * 64, "f" * 64, "a" * 64


def config_of(folder: Path, share: float = 0.1) -> Any:
    return SimpleNamespace(
        state_dir=folder, source=folder / "silo.yaml", data=SimpleNamespace(holdout_share=share), silo="hospital_a"
    )


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    """Three runs: one finished, one aborted by its outcome, one under way; one plan was declined."""
    ledger = Ledger(tmp_path / LEDGER)
    for run, state in (("good", "finished"), ("bad", "failed"), ("open", "")):
        ledger.start_run(run, setting.PLAN.model_copy(update={"run": run}).canonical())
        ledger.remember_of_run(run, "split", SPLIT)
        ledger.remember_of_run(run, "start_adapter", START)
        if state:
            ledger.remember_of_run(run, "final_adapter", FINAL)
            ledger.end_run(run, state)
    ledger.decline_run("declined")
    return ledger


@pytest.mark.parametrize("name", ["", "good"])
def test_the_latest_finished_run_or_the_named_one(tmp_path: Path, ledger: Ledger, name: str) -> None:
    found = find_run(config_of(tmp_path), name)
    assert (found.plan.run, found.split, found.start_digest, found.final_digest) == ("good", SPLIT, START, FINAL)
    assert ledger.run_state("open") == "running"  # the daemon's own connection goes on


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("nobody", NotFoundError, "knows no run 'nobody'"),
        ("bad", NotFoundError, "no adapter here: failed"),
        ("declined", NotFoundError, "no adapter here: declined"),
        ("open", ConflictError, "has not ended"),
    ],
)
def test_other_runs_are_refused(
    tmp_path: Path, ledger: Ledger, name: str, error: type[FedSiloError], words: str
) -> None:
    with pytest.raises(error, match=words) as caught:
        find_run(config_of(tmp_path), name)
    assert "good" in caught.value.hint or name == "open"


def test_a_site_that_took_part_in_nothing_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no run"):
        find_run(config_of(tmp_path), "")
    assert not list(tmp_path.iterdir())
    Ledger(tmp_path / LEDGER).close()
    with pytest.raises(NotFoundError, match="no run has finished"):
        find_run(config_of(tmp_path), "")


def test_rows_that_changed_during_the_run_spoil_its_holdout(tmp_path: Path, ledger: Ledger) -> None:
    ledger.remember_of_run("good", "split", SPLIT)  # a restart with the same rows
    assert find_run(config_of(tmp_path), "good").split == SPLIT
    ledger.remember_of_run("good", "split", "6" * 64)
    with pytest.raises(UsageError, match="under way") as caught:
        find_run(config_of(tmp_path), "good")
    assert caught.value.code == "HOLDOUT_CHANGED"


def test_rows_that_changed_since_the_run_are_refused(tmp_path: Path, ledger: Ledger) -> None:
    finished = find_run(config_of(tmp_path), "good")
    ready = {"split": SPLIT, "holdout_rows": 3, "private_rows": 30}
    _check_split(ready, finished)
    for change, code in (({"split": "7" * 64}, "HOLDOUT_CHANGED"), ({"holdout_rows": 0}, "NO_HOLDOUT")):
        with pytest.raises(UsageError) as caught:
            _check_split({**ready, **change}, finished)
        assert caught.value.code == code


def test_without_a_share_nothing_is_asked_of_anybody(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holdout_share is 0") as caught:
        report_benefit(config_of(tmp_path, share=0.0), run="", samples=None, say=lambda line: None)
    assert caught.value.code == "NO_HOLDOUT"
    assert not list(tmp_path.iterdir())


def test_the_initial_adapter_is_kept_or_drawn_again_and_never_another_one(tmp_path: Path, ledger: Ledger) -> None:
    from dataclasses import replace

    from coordinator.aggregate import initial_adapter

    finished = find_run(config_of(tmp_path), "good")
    store = AdapterStore(tmp_path / "adapters")
    drawn = initial_adapter(setting.SCHEMA, finished.plan.seed)
    for digest in ("", sha256_hex(drawn)):
        assert _initial_adapter(replace(finished, start_digest=digest), setting.SCHEMA, store) == drawn
    with pytest.raises(NotFoundError, match="which its seed does not give"):
        _initial_adapter(finished, setting.SCHEMA, store)
    other = encode_factors({}, base_digest="", schema_sha256=START, rank=2, scale=1.0, dtype="float32")
    store.keep(sha256_hex(other), other, None)
    assert _initial_adapter(replace(finished, start_digest=sha256_hex(other)), setting.SCHEMA, store) == other


def test_a_kept_adapter_is_taken_whole_or_not_at_all(tmp_path: Path) -> None:
    assert _kept(tmp_path, "in") is None
    path = tmp_path / f"in-{sha256_hex(b'factors')}"
    path.write_bytes(b"factors")
    assert _kept(tmp_path, "in") == b"factors"
    assert _kept(tmp_path, "other") is None
    path.write_bytes(b"factor")
    assert _kept(tmp_path, "in") is None


def test_a_reading_ledger_cannot_write(tmp_path: Path, ledger: Ledger) -> None:
    reading = Ledger(tmp_path / LEDGER, read_only=True)
    assert reading.run_state("good") == "finished"
    with pytest.raises(OperationError, match="readonly"):
        reading.end_run("good", "failed")
    assert ledger.run_state("good") == "finished"
    reading.close()


def test_no_message_kind_exists_for_it() -> None:
    assert "metrics.eval" in KINDS  # a silo's share of the federation's own evaluation
    assert not [kind for kind in KINDS if any(word in kind for word in ("holdout", "benefit", "private", "local"))]


def test_the_share_is_a_number_up_to_a_half_and_nothing_where_it_is_not_written(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "examples" / "hospital_a.yaml").read_text()
    assert "  holdout_share: 0.1\n" in text

    def share_of(line: str) -> float:
        path = tmp_path / "silo.yaml"
        path.write_text(text.replace("  holdout_share: 0.1\n", line))
        return load_config(path).data.holdout_share

    assert (share_of("  holdout_share: 0.5\n"), share_of("")) == (0.5, 0.0)
    for wrong in ("0.51", "-0.1", "some"):
        with pytest.raises(UsageError, match=r"silo\.yaml:\d+: .*holdout_share"):
            share_of(f"  holdout_share: {wrong}\n")


def test_status_says_how_many_rows_are_set_aside() -> None:
    assert private_text({"private_rows": 360, "holdout_rows": 40}) == "360 rows to train on, 40 set aside"
    assert private_text({"private_rows": 400, "holdout_rows": 0}) == "400 rows"
