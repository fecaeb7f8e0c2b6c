"""`silo report benefit` on real processes: what it says, and that not a byte of it leaves the site.

It runs in a network namespace without any interface, and an audit hook writes down every address it binds or connects.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fedsilo.demo.wire_recorder import Recording, recordings
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.errors import FedSiloError
from silo.config import SiloConfig, load_config
from silo.report.measure import report_benefit
from tests.loopback.federation import ENVIRONMENT, LIMIT_SECONDS, Federation, Reply, command, records

pytestmark = pytest.mark.slow

SILO, RUN = "hospital_c", "reported"
ARMS = {"base", "local_only", "federated"}
# What Python itself is told of each socket; the trainer's own are inside its sandbox.
WATCHED = """
import json, runpy, socket, sys
out, sys.argv = sys.argv[1], ["fedsilo.cli", *sys.argv[2:]]
def hook(event, arguments):
    if event in ("socket.bind", "socket.connect", "socket.sendto", "socket.getaddrinfo", "socket.gethostbyname"):
        with open(out, "a") as file:
            file.write(json.dumps([event, str(arguments[1:])]) + "\\n")
sys.addaudithook(hook)
runpy.run_module("fedsilo.cli", run_name="__main__")
"""


def report_without_network(config: Path, sockets: Path, *options: str) -> Reply:
    """The command where there is no network at all; root makes the namespace by itself, others inside a user's."""
    unshare = ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "--net", "--map-root-user"]
    done = subprocess.run(
        [*unshare, sys.executable, "-c", WATCHED, str(sockets), "silo", "report", "benefit", "--config", str(config),
         *options],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False,
        env={**os.environ, **ENVIRONMENT},
    )  # fmt: skip
    return Reply(done.returncode, json.loads(done.stdout) if "--json" in options else {}, done.stdout, done.stderr)


def content_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture(scope="module")
def reported(sites: Federation, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A finished run of two silos, and the report of one of them while its daemon is down."""
    record = sites.run(RUN, silos=["hospital_b", SILO], rounds=2)
    assert record["state"] == "finished"
    site = sites.site(SILO)
    trainer = command("silo", "status", "--config", site.config).data["trainer"]
    sockets = tmp_path_factory.mktemp("report") / "sockets.jsonl"
    # Nothing else writes to the log of a daemon that is down, so that it can be compared byte by byte.
    sites.kill(SILO)
    before = content_of(site.audit_log)
    try:
        reply = report_without_network(site.config, sockets, "--json")
        after = content_of(site.audit_log)
    finally:
        sites.start(SILO)
    return {
        "rows": sum(len(path.read_text().splitlines()) for path in load_config(site.config).data.private),
        "record": record, "trainer": trainer, "reply": reply, "before": before, "after": after,
        "sockets": [json.loads(line) for line in sockets.read_text().splitlines()],
    }  # fmt: skip


def test_without_a_network_it_is_made_and_the_audit_log_stays_byte_for_byte(reported: dict[str, Any]) -> None:
    found, trainer = reported["reply"].data, reported["trainer"]
    assert reported["before"] and reported["after"] == reported["before"]
    # the way to its own trainer, and the decoys of the isolation trial; no connection, no name looked up
    assert reported["sockets"] and {event for event, _ in reported["sockets"]} == {"socket.bind"}
    assert all(".sock" in address for _, address in reported["sockets"])

    assert (found["run"], found["method"], found["isolation"]) == (RUN, "pubswap", trainer["isolation"])
    assert found["adapter"] == reported["record"]["rounds"][-1]["adapter_sha256"]
    rows = trainer["ready"]
    assert rows["private_rows"] + rows["holdout_rows"] + sum(rows["dropped"].values()) == reported["rows"]
    assert found["holdout"]["prompts"] == found["holdout"]["groups"] == rows["holdout_rows"] > 1
    assert set(found["arms"]) == set(found["definition"]) - {"pass_at_1", "interval", "detectable"} == ARMS
    assert found["local_only"]["kept"] is False
    assert found["local_only"]["adapter"] not in {found["adapter"], reported["record"]["base_adapter_sha256"]}
    for arm in found["arms"].values():
        assert (
            0.0 <= arm["interval"][0] <= arm["pass_at_1"] <= arm["interval"][1] <= 1.0 and 0.0 <= arm["greedy"] <= 1.0
        )
    assert sum(part["prompts"] for part in found["per_topic"].values()) == rows["holdout_rows"]
    assert "round 2 of 2, step 4 of 4" in reported["reply"].stderr


def test_the_case_mix_that_the_first_update_shows_is_measured_on_the_very_bytes_that_left(
    sites: Federation, reported: dict[str, Any]
) -> None:
    site = sites.site(SILO)
    before = records(site.audit_log)
    found = command("silo", "report", "case-mix", "--config", site.config, "--run", RUN, "--samples", "4").data
    sent = [line for line in before if line["event"] == "egress.sent" and line.get("kind") == "lora.factors"]
    assert (found["run"], found["round"]) == (RUN, 1)
    assert found["update"] == next(line["payload"]["sha256"] for line in sent if line["run"] == RUN)
    assert 0 < sum(row["private_rows"] for row in found["topics"]) <= reported["rows"] and len(found["topics"]) > 3
    assert 0 <= found["found"] <= len(found["main_topics"]) == len(found["guessed"]) == 3
    unknown = command("silo", "report", "case-mix", "--config", site.config, "--run", "no-such-run")
    assert unknown.exit_code != 0 and "no-such-run" in unknown.envelope["error"]["message"]


def figures_of(found: Any) -> set[float]:
    """Every number of a report that is on no grid of four digits, which the federation's own evaluation is on."""
    if isinstance(found, dict | list):
        parts = found.values() if isinstance(found, dict) else found
        return {figure for part in parts for figure in figures_of(part)}
    return {found} if isinstance(found, float) and round(found, 4) != found else set()


def ways_to_write(texts: set[str], figures: set[float]) -> dict[str, list[bytes]]:
    """Each text and number in the forms that a message has for it."""
    written = {text: [text.encode(), bytes.fromhex(text)] for text in texts}
    return written | {
        str(figure): [str(figure).encode(), struct.pack("<d", figure), struct.pack(">d", figure)] for figure in figures
    }


def sent_by(silo: str, wire: Path) -> list[Recording]:
    """What a silo let out over its whole life, as the recorder in front of the coordinator saw it."""
    return [each for each in recordings(wire) if each.upward and each.silo == silo]


def found_in(sent: list[Recording], wanted: dict[str, list[bytes]]) -> set[str]:
    views = [view for each in sent for view, _ in each.views()]
    return {name for name, forms in wanted.items() if any(form in view for form in forms for view in views)}


def test_beside_the_running_daemon_it_says_the_same_from_the_kept_adapter_and_nothing_of_it_leaves(
    sites: Federation, reported: dict[str, Any]
) -> None:
    site, first = sites.site(SILO), reported["reply"].data
    before = records(site.audit_log)
    again = command("silo", "report", "benefit", "--config", site.config, "--run", RUN).data
    assert again["local_only"] == {**first["local_only"], "kept": True}
    assert again == {**first, "local_only": again["local_only"]}

    # A daemon that starts after it says hello, polls, and sends whatever it may have put by.
    sites.kill(SILO)
    sites.start(SILO)
    sites.until_state(SILO, lambda state: state["coordinator"]["last_contact"] > 0.0)
    since = [line for line in records(site.audit_log)[len(before) :] if line["event"].startswith("egress.")]
    known: dict[tuple[str, str], set[str]] = {}
    for line in before:
        known.setdefault((line["event"], line.get("kind", "")), set()).update(line)
    assert {line["kind"] for line in since} >= {"control.hello"}
    for line in since:
        assert line["kind"].startswith("control.")
        assert line.keys() <= known[line["event"], line["kind"]]  # no field that such a record had not before

    sent = sent_by(SILO, sites.root / "wire")
    digests, figures = {again["local_only"]["adapter"]}, figures_of(again)
    assert len(figures) > 4
    assert found_in(sent, ways_to_write(digests, figures)) == set()
    # The search sees what was sent: the digest of the adapter that the silo fetched, and scores that it evaluated.
    scores = {
        metric.value
        for each in sent for message in each.messages if message.envelope.kind == "metrics.eval"
        for metric in pb.MetricsEval.FromString(message.payload).metrics if metric.value not in (0.0, 1.0)
    }  # fmt: skip
    control = ways_to_write({again["adapter"]}, scores)
    assert scores and found_in(sent, control) == control.keys()


def test_what_cannot_be_reported_is_refused_with_its_cause(sites: Federation, reported: dict[str, Any]) -> None:
    config = load_config(sites.site(SILO).config)

    def refusal(config: SiloConfig, run: str = RUN) -> str:
        with pytest.raises(FedSiloError) as caught:
            report_benefit(config, run=run, samples=None, say=lambda line: None)
        return caught.value.code

    def with_share(share: float) -> SiloConfig:
        return config.model_copy(update={"data": config.data.model_copy(update={"holdout_share": share})})

    assert command("silo", "report", "benefit", "--config", config.source, "--run", "nobody").exit_code == 8
    assert refusal(with_share(0.0)) == "NO_HOLDOUT"
    assert refusal(with_share(0.4)) == "HOLDOUT_CHANGED"  # said by a trainer that split the rows anew
    graded_otherwise = config.data.model_copy(update={"verifier": "choice"})
    assert refusal(config.model_copy(update={"data": graded_otherwise})) == "INPUTS_CHANGED"
    external = config.trainer.model_copy(update={"launch": "external"})
    with pytest.raises(FedSiloError, match="daemon runs and waits"):
        report_benefit(config.model_copy(update={"trainer": external}), run=RUN, samples=None, say=lambda line: None)
    final = config.state_dir / "adapters" / reported["reply"].data["adapter"]
    final.rename(final.with_name("away"))
    try:
        assert refusal(config) == "ADAPTER_GONE"
    finally:
        final.with_name("away").rename(final)
