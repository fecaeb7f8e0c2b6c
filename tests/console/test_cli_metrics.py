"""`fedsilo metrics` against a real desk: values by another reader of the text format, loopback alone, no login hole."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from fedsilo import __version__
from fedsilo.cli import fedsilo as cli_fedsilo
from fedsilo.cli import metrics as cli_metrics
from fedsilo.cli import metrics_page
from fedsilo.cli.daemons import Daemon
from fedsilo.cli.metrics_page import seconds_of
from fedsilo.protocol.errors import UsageError
from tests.console.commands import Site
from tests.console.states import POLICY_DIGEST, coordinator, release, silo

LIMITS = [{"limit": "day_bytes", "kind": "all", "used": 12, "max": 100, "unit": "bytes", "window": "day", "line": 3}]
TRAFFIC = [{"silo": "hospital_a", "direction": "in", "kind": "lora.factors", "messages": 2, "bytes": 4096}]
CURVES = {
    "run": "r", "series": [
        {"name": "reward_mean", "silo": "hospital_a", "points": [{"value": 0.25}, {"value": 0.5}]},
        {"name": "kl", "silo": "hospital_a", "points": []},
    ],
}  # fmt: skip

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def samples_of(text: str) -> Samples:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text) for sample in family.samples
    }  # fmt: skip


def printed(*arguments: object) -> tuple[int, str, str]:
    answer = CliRunner().invoke(cli_fedsilo.app, ["metrics", *map(str, arguments)])
    return answer.exit_code, answer.stdout, answer.stderr


@pytest.fixture
def desk(site: Site) -> Site:
    site.answer(limits={"rows": LIMITS})
    site.answer(traffic=TRAFFIC)
    site.answer(curves=CURVES)
    return site


def test_a_silo_by_the_library_s_own_reader(desk: Site) -> None:
    state = silo(release())
    code, text, _ = printed("--socket", desk.socket)
    found = samples_of(text)
    assert code == 0 and found["fedsilo_up", ()] == 1 and found["fedsilo_held_releases", ()] == 1
    for row in state["left"]:
        assert found["fedsilo_sent_payload_bytes_total", (("kind", row["kind"]),)] == row["bytes"]
        assert found["fedsilo_sent_messages_total", (("kind", row["kind"]),)] == row["messages"]
    labels = (("kind", "all"), ("limit", "day_bytes"), ("unit", "bytes"), ("window", "day"))
    assert (found["fedsilo_limit_used", labels], found["fedsilo_limit_max", labels]) == (12, 100)
    info = [dict(labels) for name, labels in found if name == "fedsilo_info"]
    assert info == [{"party": "silo", "name": "hospital_a", "federation": state["federation"], "version": __version__}]
    assert not [name for name, _ in found if name == "fedsilo_figure"]  # private until asked for


def test_figures_of_training_only_where_asked_for(desk: Site) -> None:
    _, text, _ = printed("--socket", desk.socket, "--figures")
    figures = {labels: value for (name, labels), value in samples_of(text).items() if name == "fedsilo_figure"}
    assert figures == {(("figure", "reward_mean"), ("run", "r"), ("silo", "hospital_a")): 0.5}  # the newest value


def test_a_coordinator(desk: Site) -> None:
    state = coordinator()
    desk.desk.set_state(state, policy_digest=POLICY_DIGEST)
    code, text, _ = printed("--socket", desk.socket)
    found = samples_of(text)
    labels = (("direction", "in"), ("kind", "lora.factors"), ("silo", "hospital_a"))
    assert code == 0 and found["fedsilo_payload_bytes_total", labels] == 4096
    assert sum(value for (name, _), value in found.items() if name == "fedsilo_runs") == len(state["runs"])
    shown = {labels for name, labels in found if name == "fedsilo_silo_state"}
    assert shown == {(("silo", row["silo"]), ("state", row["state"])) for row in state["silos"]}


def test_T37_a_label_holds_no_control_character(desk: Site) -> None:
    desk.desk.set_state(silo(phase='x"\x1b[2J\nfedsilo_up 7'), policy_digest=POLICY_DIGEST)
    _, text, _ = printed("--socket", desk.socket)
    assert "\x1b" not in text and samples_of(text)["fedsilo_up", ()] == 1


def test_one_envelope_with_json_and_unreachable_is_3(desk: Site) -> None:
    code, text, _ = printed("--socket", desk.socket, "--json")
    rows = json.loads(text)["data"]
    assert code == 0 and {"name": "fedsilo_up", "labels": {}, "value": 1.0} in rows
    code, _, told = printed("--socket", desk.folder / "nobody.sock")
    assert code == 3 and "UNREACHABLE" in told


@pytest.mark.parametrize(
    ("listen", "says"),
    [("0.0.0.0:9464", "not this machine alone"), ("192.0.2.1:9464", "not this machine alone"),
     ("9464", "ADDRESS:PORT"), ("localhost:9464", "ADDRESS:PORT"), ("127.0.0.1:70000", "no port")],
)  # fmt: skip
def test_only_loopback_is_listened_on(listen: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        cli_metrics.loopback_of(listen)
    assert cli_metrics.loopback_of("127.0.0.1:9464") == ("127.0.0.1", 9464)
    assert cli_metrics.loopback_of("[::1]:0") == ("::1", 0)


@contextmanager
def served(daemon: Daemon) -> Iterator[int]:
    with metrics_page.serving(daemon, "127.0.0.1", 0, figures=False) as (url, _):
        yield int(url.removesuffix("/metrics").rpartition(":")[2])


def fetched(port: int, path: str = "/metrics", *, method: str = "GET", host: str = "") -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request(method, path, headers={"Host": host} if host else {})
    reply = connection.getresponse()
    read = reply.status, reply.read().decode()
    connection.close()
    return read


def test_a_scrape_and_one_after_the_daemon_has_gone(desk: Site) -> None:
    with served(Daemon(desk.socket)) as port:
        status, text = fetched(port)
        assert status == 200 and samples_of(text)["fedsilo_held_releases", ()] == 1
        assert fetched(port, host=f"localhost:{port}")[0] == fetched(port, host=f"[::1]:{port}")[0] == 200
    with served(Daemon(desk.folder / "nobody.sock")) as port:
        status, text = fetched(port)
        assert status == 200 and samples_of(text) == {("fedsilo_up", ()): 0.0}


def test_a_page_of_another_name_and_other_paths_are_refused(desk: Site) -> None:
    with served(Daemon(desk.socket)) as port:
        for host in ("evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80", "192.0.2.1"):
            assert fetched(port, host=host)[0] == 421  # DNS rebinding
        assert fetched(port, "/")[0] == fetched(port, method="POST")[0] == 404


def test_a_port_in_use_is_said(desk: Site) -> None:
    with served(Daemon(desk.socket)) as port:
        code, _, told = printed("--socket", desk.socket, "--listen", f"127.0.0.1:{port}")
        assert code == 6 and f"127.0.0.1:{port} cannot be listened on" in told


def test_times_are_read_with_their_zone_or_not_at_all() -> None:
    assert seconds_of("1970-01-01T01:00:00+01:00") == 0.0 and seconds_of("1970-01-01T00:00:10Z") == 10.0
    assert seconds_of(12.5) == 12.5
    assert [seconds_of(each) for each in ("", None, "yesterday", "1970-01-01T00:00:00", 0.0)] == [None] * 5
