"""The guard's supervision of rollout servers, with small servers in vLLM's place; `tests/vllm` has the real one."""

from __future__ import annotations

import itertools
import logging
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fedsilo.protocol.errors import OperationError, UsageError
from silo.config import Model, Rollout, SiloConfig, Trainer, load_config
from silo.guard.trainer_process import probing, rollout_server
from silo.guard.trainer_process.rollout_server import RolloutServers, check, command_of, environment_of
from silo.unix_http import ask
from tests.security.link_harness import EXAMPLE, write_config

DEADLINE_SECONDS = 60.0
# /health says 200, and 503 once a file called `ill` lies beside the socket; it is well again when it was started again
SERVER = """
import http.server, os, socketserver, sys
ill = os.path.join(os.path.dirname(sys.argv[1]), "ill")
born_ill = os.path.exists(ill)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(503 if os.path.exists(ill) and not born_ill else 200)
        self.send_header("Content-Length", "0")
        self.end_headers()
    def log_message(self, *words): ...
    def address_string(self): return "unix"
print("a line in the log", flush=True)
socketserver.ThreadingUnixStreamServer(sys.argv[1], Handler).serve_forever()
"""
LEVEL = probing.best_level() if probing.best_level() == "namespaces" else "waived"


def wait_until(is_so: Callable[[], object]) -> None:
    end = time.monotonic() + DEADLINE_SECONDS
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture
def tmp_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Not named after the test: a socket's path has at most 107 bytes."""
    return tmp_path_factory.mktemp("t")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_server, "LOOK_SECONDS", 0.05)


@pytest.fixture
def home() -> Iterator[Path]:
    """A short folder, since a unix socket's path is."""
    with tempfile.TemporaryDirectory(prefix="rollout-") as folder:
        (Path(folder) / "model").mkdir()
        yield Path(folder)


def config_of(home: Path, script: str = SERVER, **changes: Any) -> SiloConfig:
    command = ("-c", script.replace("{", "{{").replace("}", "}}"), "{socket}")
    return SiloConfig.model_construct(
        state_dir=home,
        model=Model(path=home / "model"),
        trainer=Trainer(devices="cpu", threads=1),
        rollout=Rollout(**{"engine": "vllm", "command": command, "start_timeout_seconds": 30.0, **changes}),
        silos_on_this_host=1,
    )


@pytest.fixture
def started(home: Path) -> Iterator[Callable[..., RolloutServers]]:
    running: list[RolloutServers] = []

    def start(script: str = SERVER, **changes: Any) -> RolloutServers:
        servers = RolloutServers(
            config_of(home, script, **changes),
            level=LEVEL,
            never=[],
        )
        running.append(servers)
        servers.start()
        return servers

    yield start
    for servers in running:
        servers.stop()


def process_ids(servers: RolloutServers) -> dict[str, int]:
    """By a server's name, the id of its process, which leads its group."""
    return {each.name: each.process.pid for each in servers.servers if each.process is not None}


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_T14_private_and_public_prompts_have_a_server_each(started: Callable[..., RolloutServers], home: Path) -> None:
    servers = started()
    servers.wait_ready()
    assert list(servers.sockets) == ["private", "public"]
    fields = servers.trainer_fields()
    assert fields["private"] != fields["public"]
    assert len(set(process_ids(servers).values())) == 2
    for path in (fields["private"], fields["public"]):
        assert ask(Path(path), "/health", timeout_seconds=10).status == 200
        assert Path(path).parent.stat().st_mode & 0o777 == 0o700
    assert (home / "logs" / "rollout_private.log").read_text() == "a line in the log\n"


def test_T10_each_server_is_in_a_sandbox_of_its_own(started: Callable[..., RolloutServers]) -> None:
    servers = started()
    servers.wait_ready()
    if LEVEL != "namespaces":
        pytest.skip("this machine builds no namespaces")
    networks = set()
    for keeper in process_ids(servers).values():
        (first,) = Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()
        networks.add(Path(f"/proc/{first}/ns/net").readlink())
    assert len(networks) == 2 and Path("/proc/self/ns/net").readlink() not in networks


def test_a_server_that_is_killed_is_started_again(started: Callable[..., RolloutServers]) -> None:
    servers = started()
    servers.wait_ready()
    before = process_ids(servers)
    os.killpg(before["private"], signal.SIGKILL)
    wait_until(lambda: servers.restarts == 1)
    servers.wait_ready()
    assert process_ids(servers)["private"] != before["private"]
    assert process_ids(servers)["public"] == before["public"]  # the other one stays
    assert not is_alive(before["private"])


def test_a_server_whose_engine_is_dead_is_started_again(started: Callable[..., RolloutServers]) -> None:
    servers = started()
    servers.wait_ready()
    before = process_ids(servers)
    (servers.sockets["public"].parent / "ill").touch()
    wait_until(lambda: servers.restarts == 1)
    servers.wait_ready()
    assert process_ids(servers)["public"] != before["public"]
    assert process_ids(servers)["private"] == before["private"]


def test_a_server_that_dies_over_and_over_is_left_alone(
    started: Callable[..., RolloutServers], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout_server, "RESTARTS_MAX", 2)
    servers = started()
    servers.wait_ready()
    with caplog.at_level(logging.WARNING, "fedsilo.silo.rollout"):
        for count in (1, 2, 3):
            servers.wait_ready()
            os.killpg(process_ids(servers)["private"], signal.SIGKILL)
            wait_until(lambda count=count: servers.restarts == count or "private" not in process_ids(servers))
        wait_until(lambda: "not started again" in caplog.text)
    with pytest.raises(OperationError, match="ended with status") as refused:
        servers.wait_ready()
    assert refused.value.code == "ROLLOUT_START"


@pytest.mark.parametrize(
    ("script", "cause"),
    [
        ("raise SystemExit(3)", "ended with status 3"),
        ("import time; time.sleep(600)", "was not ready within 1 s"),
    ],
)
def test_a_server_that_never_answers_is_named_with_its_log(
    started: Callable[..., RolloutServers], home: Path, script: str, cause: str
) -> None:
    servers = started(script, start_timeout_seconds=30.0 if "SystemExit" in script else 1.0)
    with pytest.raises(OperationError) as refused:
        servers.wait_ready()
    assert cause in refused.value.message or "does not answer" in refused.value.message
    assert refused.value.hint == f"see {home / 'logs' / 'rollout_private.log'}"
    assert servers.restarts == 0


def test_the_end_leaves_no_process_and_no_socket(started: Callable[..., RolloutServers]) -> None:
    servers = started()
    servers.wait_ready()
    keepers = list(process_ids(servers).values())
    (servers.adapters / "private").mkdir()
    (servers.adapters / "private" / "push-000001-0").touch()
    servers.stop()
    servers.stop()
    assert not any(map(is_alive, keepers)) and not any(each.exists() for each in servers.sockets.values())
    assert not servers.adapters.exists()


def test_the_socket_of_a_killed_server_gives_way_and_a_file_does_not(
    started: Callable[..., RolloutServers], home: Path
) -> None:
    servers = started()
    servers.wait_ready()
    os.killpg(process_ids(servers)["private"], signal.SIGKILL)  # it leaves its socket
    wait_until(lambda: servers.restarts == 1)
    servers.wait_ready()
    servers.stop()
    servers.sockets["private"].write_text("precious")
    with pytest.raises(OperationError, match="is no socket"):
        started()
    assert servers.sockets["private"].read_text() == "precious"


def test_one_that_somebody_else_starts_is_only_waited_for(started: Callable[..., RolloutServers], home: Path) -> None:
    servers = started()
    servers.wait_ready()
    url = f"unix:{servers.sockets['private']}"
    other = {"url": url, "public_url": url, "launch": "external", "command": None, "start_timeout_seconds": 0.1}
    watched = started(**other)
    watched.wait_ready()
    assert not process_ids(watched)
    watched.stop()
    assert servers.sockets["private"].exists()
    absent = started(**{**other, "url": f"unix:{home}/absent", "public_url": f"unix:{home}/absent"})
    with pytest.raises(OperationError, match="does not answer"):
        absent.wait_ready()


# ---- how it is started -------------------------------------------------------------------------------


def test_T10_the_built_in_command_and_its_environment(home: Path) -> None:
    config = config_of(home, command=None, python=Path(sys.executable), max_lora_rank=16, max_model_tokens=512)
    words = command_of(config, Path("/run/it.sock"))
    assert words[:4] == [sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server"]
    pairs = dict(itertools.pairwise(words))
    assert pairs["--uds"] == "/run/it.sock" and pairs["--dtype"] == "float32"
    assert (pairs["--max-lora-rank"], pairs["--max-model-len"], pairs["--max-loras"]) == ("16", "512", "2")
    assert pairs["--logprobs-mode"] == "processed_logprobs" and pairs["--generation-config"] == "vllm"
    assert "--enforce-eager" in words and "--enable-sleep-mode" not in words  # no GPU
    environment = environment_of(config, home)
    for name in ("VLLM_NO_USAGE_STATS", "DO_NOT_TRACK", "HF_HUB_OFFLINE", "HF_HUB_DISABLE_TELEMETRY"):
        assert environment[name] == "1"
    assert environment["VLLM_SERVER_DEV_MODE"] == "0"  # calls that two servers do not need
    shared = config_of(home, url="unix:/run/it.sock", public_url="unix:/run/it.sock")
    assert environment_of(shared, home)["VLLM_SERVER_DEV_MODE"] == "1"


def test_a_command_of_the_sites_own(home: Path) -> None:
    own = config_of(home, command=("-m", "own", "--model={model}", "{socket}", "{{x}}"))
    assert command_of(own, Path("/s"))[1:] == ["-m", "own", f"--model={home}/model", "/s", "{x}"]
    with pytest.raises(UsageError, match="'other' stands for nothing"):
        command_of(config_of(home, command=("{other}",)), Path("/s"))


def test_walls_without_a_way_to_a_server_are_refused(home: Path) -> None:
    with pytest.raises(UsageError, match="isolation level user"):
        RolloutServers(
            config_of(home),
            level="user",
            never=[],
        )
    assert (
        RolloutServers(
            config_of(home),
            level="container",
            never=[],
        )._level
        == "namespaces"
    )


# ---- configuration -----------------------------------------------------------------------------------


def rollout(*lines: str) -> tuple[str, str]:
    """The example's whole section, and another one."""
    found = re.search(r"rollout:\n(?:  .*\n)+", EXAMPLE.read_text())
    assert found is not None
    return found[0], "".join(f"{line}\n" for line in ["rollout:", *(f"  {line}" for line in lines)])


ADDRESS = "url: unix:/run/a/s"
BOTH = ("url: unix:/run/a/s", "public_url: unix:/run/b/s")


@pytest.mark.parametrize(
    ("lines", "chosen"),
    [
        (("engine: auto",), "embedded"),
        (("engine: auto", ADDRESS), "vllm"),
        (("engine: vllm",), "vllm"),
        (("engine: vllm", *BOTH, "launch: external"), "vllm"),
        (("engine: vllm", ADDRESS, "public_url: unix:/run/a/s"), "vllm"),
    ],
)
def test_which_engine_is_chosen(lines: tuple[str, ...], chosen: str, tmp_path: Path) -> None:
    config = load_config(write_config(tmp_path, rollout(*lines)))
    assert config.rollout.chosen == chosen


@pytest.mark.parametrize(
    ("lines", "key", "cause"),
    [
        (("engine: embedded", ADDRESS), "url", "without effect"),
        (("engine: embedded", "public_url: unix:/run/b/s"), "public_url", "without effect"),
        (("engine: vllm", "launch: external", ADDRESS), "launch", "needs url and public_url"),
        (("engine: vllm", "launch: external", *BOTH, 'command: ["x"]'), "command", "launch: child"),
        (("engine: vllm", "launch: external", *BOTH, "python: /x"), "python", "launch: child"),
        (("engine: vllm", ADDRESS, "public_url: unix:/run/a/t"), "public_url", "folder of its own"),
        (("engine: vllm", f"url: unix:/{'x' * 120}/s"), "url", "longer than 107 bytes"),
    ],
)
def test_keys_that_contradict_each_other_are_named_with_their_line(
    lines: tuple[str, ...], key: str, cause: str, tmp_path: Path
) -> None:
    path = write_config(tmp_path, rollout(*lines))
    with pytest.raises(UsageError, match=cause) as caught:
        load_config(path)
    line = int(caught.value.message.removeprefix(f"{path}:").partition(":")[0])
    assert path.read_text().splitlines()[line - 1].strip().startswith(key)


def test_silo_check_says_what_was_chosen(tmp_path: Path) -> None:
    embedded = load_config(write_config(tmp_path, rollout("engine: auto")))
    assert check(embedded) == "embedded, in the trainer (auto: there is no rollout.url)"
    chosen = check(load_config(write_config(tmp_path, rollout("engine: auto", *BOTH, "launch: external"))))
    assert (
        chosen
        == "vllm (auto: rollout.url is given) at unix:/run/a/s, public prompts unix:/run/b/s; started by somebody else"
    )
    with pytest.raises(UsageError, match=r"rollout\.python: /nowhere/python cannot be executed"):
        check(load_config(write_config(tmp_path, rollout("engine: vllm", *BOTH, "python: /nowhere/python"))))
