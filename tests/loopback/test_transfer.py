"""A silo in a network namespace without a single interface takes part in a run: people carry its files. The other two
silos dial as ever."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.loopback.federation import (
    ENVIRONMENT,
    LIMIT_SECONDS,
    Federation,
    Reply,
    command,
    federation,
    records,
)

pytestmark = pytest.mark.slow

WITH_LINES, WITHOUT = ["hospital_a", "hospital_b"], "hospital_c"
RUN = "by-files"


def takes_its_line_away(site: Any) -> None:
    if site.name == WITHOUT:
        text = site.config.read_text(encoding="utf-8")
        changed, edits = re.subn(r"(?m)^(\s*coordinator:\s*\{?\s*address:) *[^\s,}]+", r"\1 files", text)
        assert edits == 1, text
        site.config.write_text(changed, encoding="utf-8")


@contextlib.contextmanager
def in_a_namespace_of_its_own(sites: Federation) -> Iterator[None]:
    """The silo's daemon again, where there is no network at all."""
    sites.kill(WITHOUT)
    unshare = ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "--net", "--map-root-user"]
    with (sites.root / "logs" / f"{WITHOUT}.log").open("ab") as log:
        process = subprocess.Popen(
            [*unshare, sys.executable, "-P", "-m", "fedsilo.cli.ends_with_parent", "fedsilo.cli", "silo", "start",
             "--config", str(sites.site(WITHOUT).config), "--json"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env={**os.environ, **ENVIRONMENT},
            start_new_session=True,
        )  # fmt: skip
    try:
        assert process.stdout is not None
        assert '"ready"' in (line := process.stdout.readline()) or '"silo"' in line, line + sites.log_of(WITHOUT)
        interfaces = Path(f"/proc/{process.pid}/net/dev").read_text().splitlines()[2:]
        assert [line.split(":")[0].strip() for line in interfaces] == ["lo"]
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(LIMIT_SECONDS)
        assert process.stdin is not None and process.stdout is not None
        process.stdin.close()
        process.stdout.close()


def eventually(look: Callable[[], Any]) -> Any:
    """What `look` gives once it is something. The daemons are asked as their people ask them."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while not (found := look()):
        assert time.monotonic() < deadline, "it never came to that"
    return found


class Courier:
    def __init__(self, sites: Federation, folder: Path) -> None:
        self.sites, self.folder, self.written = sites, folder, list[Path]()

    def _file(self, name: str) -> Path:
        self.written.append(self.folder / f"{len(self.written)}_{name}.zip")
        return self.written[-1]

    def at_the_coordinator(self, verb: str, *words: object) -> Reply:
        return command("coordinator", verb, *words, "--operator", "carol", *self.sites.coordinator_config)

    def at_the_silo(self, verb: str, *words: object) -> Reply:
        return command("silo", verb, *words, "--operator", "alice", "--config", self.sites.site(WITHOUT).config)

    def there(self, *needed: str) -> list[str]:
        """Carry to the silo a file that holds messages of these kinds; the kinds of all that it held."""

        def written() -> list[str]:
            path = self._file("plan")
            told = self.at_the_coordinator("export-plan", "--silo", WITHOUT, "--out", path).data
            kinds = [row["kind"] for row in told["messages"]]
            return kinds if set(needed) <= set(kinds) else []

        kinds: list[str] = eventually(written)
        assert self.at_the_silo("import-plan", self.written[-1]).exit_code == 0
        return kinds

    def back(self) -> list[dict[str, Any]]:
        """Carry to the coordinator what the silo may say by now; its rows, each with what was answered."""
        path = self._file("release")
        assert self.at_the_silo("export-release", "--out", path).exit_code == 0
        rows: list[dict[str, Any]] = self.at_the_coordinator("import-release", path).data["messages"]
        return rows

    def waits_in_the_outbox(self, kind: str, number: int) -> bool:
        rows = command("silo", "outbox", "list", "--config", self.sites.site(WITHOUT).config).data["messages"]
        return any((row["kind"], row["round"]) == (kind, number) for row in rows)


@pytest.fixture(scope="module")
def carried(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Federation, Courier, dict[str, Any]]]:
    """A run of two rounds that has ended, and the files that were carried for it."""
    root = tmp_path_factory.mktemp("f")
    with (
        federation(
            root, silos=3, ruleset="pubswap", holds=WITHOUT, viewer="dave", before_start=takes_its_line_away
        ) as sites,
        in_a_namespace_of_its_own(sites),
    ):
        (root / "carried").mkdir()
        courier = Courier(sites, root / "carried")
        assert [row["answer"] for row in courier.back()] == ["taken"] * 3
        submitted = sites.submit(
            RUN, exchange="round_end", rounds=2, local_steps=2, quorum=2, silos=[*WITH_LINES, WITHOUT],
            round_deadline_seconds=86_400.0,
        )  # fmt: skip
        assert submitted.exit_code == 0, submitted.stdout
        courier.there("run.plan")
        sites.until_state(WITHOUT, lambda state: state["run"] == RUN)
        courier.back()
        for number in (1, 2):
            courier.there("round.open", "round.agreed", "global.adapter")
            if number == 1:  # this site's people look at the first one
                sites.until_state(WITHOUT, lambda state: state["held"])
                shown = approvals_of(sites)
                assert answer_at(sites, shown).exit_code == 0
            eventually(lambda number=number: courier.waits_in_the_outbox("lora.factors", number))
            rows = courier.back()
            assert ("lora.factors", "taken") in {(row["kind"], row["answer"]) for row in rows}
        courier.there("round.result")
        eventually(lambda: courier.waits_in_the_outbox("metrics.eval", 2))
        courier.back()
        courier.there("run.end")
        sites.until_state(WITHOUT, lambda state: not state["run"])
        yield sites, courier, sites.record(RUN)


def approvals_of(sites: Federation) -> dict[str, Any]:
    config = sites.site(WITHOUT).config
    listed = command("silo", "approvals", "list", "--config", config).data["releases"]
    shown: dict[str, Any] = command("silo", "approvals", "show", listed[0]["id"], "--config", config).data
    return shown


def answer_at(sites: Federation, shown: dict[str, Any]) -> Reply:
    opened = [word for one in shown["noticed"] for word in ("--ack-finding", one["id"])]
    return command(
        "silo", "approvals", "approve", shown["id"], "--operator", "bob", "--expect-digest", shown["digest"],
        "--expect-policy", shown["policy"]["digest"], "--expect-shown", shown["shown"], *opened,
        "--config", sites.site(WITHOUT).config,
    )  # fmt: skip


def test_a_silo_without_a_network_takes_part_in_every_round(carried: Any) -> None:
    _, _, record = carried
    everybody = [*WITH_LINES, WITHOUT]
    assert record["state"] == "finished"
    assert [row["participants"] for row in record["rounds"]] == [everybody] * 2
    for row in record["rounds"]:
        assert set(row["transcript"]["countersignatures"]) == set(everybody)


def test_what_it_recorded_as_sent_is_what_the_coordinator_recorded_as_taken(carried: Any) -> None:
    sites, _, _ = carried
    ours = [line for line in records(sites.site(WITHOUT).audit_log) if line.get("run") == RUN]
    content = {"lora.factors", "public.responses", "metrics.eval"}
    acked = {(line["kind"], line["round"], line["step"], line["sequence"], line["link"]["peer_event"])
             for line in ours if line["event"] == "egress.acked"}  # fmt: skip
    theirs = {
        (line["kind"], line["round"], line["step"], line["sequence"], line["seq"])
        for line in records(sites.sites.coordinator.audit_log)
        if line["event"] == "ingress.decision" and line.get("run") == RUN and line["decision"] == "allow"
        and str(line.get("peer", "")).endswith(WITHOUT) and line["kind"] in content
    }  # fmt: skip
    assert {(kind, number) for kind, number, *_ in acked} >= {
        ("lora.factors", 1), ("lora.factors", 2), ("public.responses", 1), ("metrics.eval", 0), ("metrics.eval", 1),
    }  # fmt: skip
    assert acked <= theirs
    verified = command("fedsilo", "audit", "verify", sites.site(WITHOUT).audit_log)
    assert verified.exit_code == 0, verified.stdout


def test_nothing_planted_is_in_the_files_and_what_may_leave_is(carried: Any) -> None:
    sites, courier, _ = carried
    files = [path.read_bytes() for path in courier.written if path.exists()]
    planted = [each.text.encode() for each in sites.witness.planted.canaries if each.silo == WITHOUT]
    assert len(planted) > 20 and all(text not in data for text in planted for data in files)
    assert any(sites.witness.planted.control.encode() in data or RUN.encode() in data for data in files)
