"""What is wrong in a site's configuration is told with its line, and the hint says what to write."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from coordinator import config as coordinator_config
from fedsilo.protocol.errors import UsageError
from silo.config import config_from
from silo.guard.site import thread_warning
from tests.coordinator_folder import write_coordinator

EXAMPLE = (Path(__file__).parents[2] / "examples" / "hospital_a.yaml").read_text()


@pytest.mark.parametrize("value", ["0", "-1", "many", "2.5", "true", "null", "[2]"])
def test_a_wrong_number_of_threads_says_what_is_right(value: str) -> None:
    text = EXAMPLE.replace("  threads: auto", f"  threads: {value}")
    line = text.splitlines().index(f"  threads: {value}") + 1
    with pytest.raises(UsageError, match=rf"^/site/silo\.yaml:{line}: trainer\.threads: .* is no number of") as told:
        config_from(text.encode(), Path("/site/silo.yaml"))
    assert told.value.hint == "a whole number from 1, or auto"


@pytest.mark.parametrize("value", ["1", "auto", "64"])
def test_a_right_one_is_taken(value: str) -> None:
    text = EXAMPLE.replace("  threads: auto", f"  threads: {value}")
    assert str(config_from(text.encode(), Path("/site/silo.yaml")).trainer.threads) == value


def test_an_unknown_verifier_leads_to_the_known_ones() -> None:
    text = EXAMPLE.replace("\n  verifier: choice\n", "\n  verifier: chioce\n", 1)
    with pytest.raises(UsageError, match=r":\d+: data\.verifier: unknown verifier 'chioce'$") as told:
        config_from(text.encode(), Path("/site/silo.yaml"))
    assert told.value.hint.startswith("one of math, choice, exact")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("  holdout_share: 0.1\n", ""), r"acceptance: no private rows are set aside to measure on"),
        (("  prompts: [private]\n", "  prompts: []\n"), r"acceptance\.prompts: "),
        (("  prompts: [private]\n", "  prompts: [public]\n"), r"acceptance\.prompts\.0: "),
        (("  drop_max: 0.05\n", "  drop_max: 1\n"), r"acceptance\.drop_max: "),
        (("  drop_max: 0.05\n", "  dropmax: 0.05\n"), r"unknown key"),
    ],
)
def test_T52_what_adapters_are_measured_on_is_checked_with_its_line(change: tuple[str, str], message: str) -> None:
    assert EXAMPLE.count(change[0]) == 1
    with pytest.raises(UsageError, match=rf"^/site/silo\.yaml:\d+: .*{message}"):
        config_from(EXAMPLE.replace(*change).encode(), Path("/site/silo.yaml"))


def test_T52_the_public_held_out_set_needs_no_private_rows_and_without_the_section_nothing_is_measured() -> None:
    text = EXAMPLE.replace("  holdout_share: 0.1\n", "").replace("  prompts: [private]\n", "  prompts: [held_out]\n")
    found = config_from(text.encode(), Path("/site/silo.yaml")).acceptance
    assert found is not None and found.prompts == ("held_out",)
    start, end = EXAMPLE.index("acceptance:"), EXAMPLE.index("\ntrainer:")
    assert config_from((EXAMPLE[:start] + EXAMPLE[end:]).encode(), Path("/site/silo.yaml")).acceptance is None


@pytest.mark.parametrize("port", [0, 65_536, 99_999])
def test_a_port_that_nobody_can_dial_is_named_with_its_line(port: int) -> None:
    text = EXAMPLE.replace("coordinator.example.org:8443", f"coordinator.example.org:{port}")
    assert text != EXAMPLE
    with pytest.raises(
        UsageError, match=r"^/site/silo\.yaml:\d+: coordinator\.address: .*a port to dial is 1 to 65535"
    ):
        config_from(text.encode(), Path("/site/silo.yaml"))
    last = EXAMPLE.replace("coordinator.example.org:8443", "coordinator.example.org:65535")
    assert config_from(last.encode(), Path("/site/silo.yaml")).coordinator.address.endswith(":65535")


def test_the_file_of_the_other_party_is_told_for_what_it_is(tmp_path: Path) -> None:
    own = write_coordinator(tmp_path, ["hospital_a"])
    with pytest.raises(UsageError, match=r"^/site/c\.yaml:\d+: this is a coordinator's configuration, not a silo's"):
        config_from(own.read_bytes(), Path("/site/c.yaml"))
    (tmp_path / "silo.yaml").write_text(EXAMPLE)
    with pytest.raises(UsageError, match=r"silo\.yaml:\d+: this is a silo's configuration, not a coordinator's"):
        coordinator_config.load_config(tmp_path / "silo.yaml")
    assert coordinator_config.load_config(own).silos == ("hospital_a",)  # the counterpart


@pytest.mark.parametrize(
    ("threads", "silos", "said"),
    [(1, 1, ""), (2, 3, "2 threads x 3 silos"), (1, 3, "1 thread x 3 silos")],
)
def test_the_warning_of_too_many_threads_says_what_can_be_set(
    monkeypatch: pytest.MonkeyPatch, threads: int, silos: int, said: str
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    text = EXAMPLE.replace("  threads: auto", f"  threads: {threads}")
    text = text.replace("silos_on_this_host: 1", f"silos_on_this_host: {silos}")
    warning = thread_warning(config_from(text.encode(), Path("/site/silo.yaml")))
    assert warning.startswith(said) and bool(warning) == bool(said)
    assert ("set trainer.threads lower" in warning) == (threads > 1)
