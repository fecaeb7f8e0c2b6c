"""The pages a newcomer types from, typed: every `sh` block runs as it stands, in order, in an empty folder.

Words after `sh` say what a person would do with the block:

    sh              run it; it ends with exit status 0
    sh daemon       keep it running in a terminal of its own; go on when it says that it is ready
    sh until=TEXT   look again until TEXT shows
    sh terminal     run it on a terminal and type the digest's last four characters when asked

Only the port is changed, so that two suites on one machine do not meet; and before a silo is started, texts are planted
at each site and a recorder is put in front of the coordinator (threat X1).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pty  # noqa: TID251  # a person's terminal
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from fedsilo.demo.data import read_data_folder
from fedsilo.demo.sites import Site, Sites, free_port
from fedsilo.demo.wire import Witness
from tests.loopback.federation import ENVIRONMENT, LIMIT_SECONDS, nothing_planted_crossed

DOCS = Path(__file__).resolve().parents[2] / "docs"
PORT = "8443"  # as the pages write it
FENCE = re.compile(r"^```sh(?: (\S+))?\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
QUESTION = b"type its last 4 characters: "


@dataclass
class Typist:
    """Somebody with a shell in `folder`, who types what a page says."""

    folder: Path
    port: str = field(default_factory=lambda: str(free_port()))
    daemons: list[subprocess.Popen[str]] = field(default_factory=list)
    witness: Witness | None = None
    _behind: str = ""  # where the coordinator really listens

    def type(self, page: str) -> None:
        blocks = FENCE.findall((DOCS / page).read_text(encoding="utf-8"))
        assert blocks, f"{page} has nothing to type"
        for how, block in blocks:
            text = block.replace(PORT, self.port)
            kind, _, wanted = how.partition("=")
            {"": self.run, "daemon": self.keep, "until": self.look, "terminal": self.answer}[kind](text, wanted)

    def run(self, block: str, _: str = "") -> str:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block], cwd=self.folder, env=self._environment(),
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            timeout=LIMIT_SECONDS, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{block}\n{done.stdout}"
        return done.stdout

    def keep(self, block: str, _: str) -> None:
        if block.startswith("coordinator start"):
            self._step_behind()
        elif block.startswith("silo start") and self.witness is None:
            self._record()
        process = subprocess.Popen(
            ["bash", "-c", f"exec {block}"], cwd=self.folder, env=self._environment(), stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip
        self.daemons.append(process)
        assert process.stdout is not None
        said = ""
        for line in process.stdout:
            said += line
            if "ready" in line:
                # somebody reads a terminal; unread, a daemon that says much would wait for ever
                threading.Thread(target=process.stdout.read, daemon=True).start()
                return
        raise AssertionError(f"{block} ended before it was ready:\n{said}")

    def _step_behind(self) -> None:
        """Let the coordinator listen elsewhere, so that the recorder can stand where the sites dial."""
        self._behind = f"127.0.0.1:{free_port()}"
        for config in self.folder.glob("**/coordinator.yaml"):
            text = config.read_text()
            listen = f'listen: "127.0.0.1:{self.port}"'
            assert text.count(listen) == 1
            config.write_text(text.replace(listen, f'listen: "{self._behind}"'))

    def _record(self) -> None:
        def site(config: Path) -> Site:
            state = config.parent / "state"
            return Site(config.parent.name, config.parent, config, state / "control.sock", state / "audit")

        (coordinator,) = self.folder.glob("**/coordinator.yaml")
        here = dataclasses.replace(site(coordinator), name="main")
        silos = tuple(site(config) for config in sorted(self.folder.glob("**/silo.yaml")))
        data = read_data_folder(self.folder / "data")
        self.witness = Witness(
            Sites(here, silos, self._behind), data, 1, self.folder / "wire", port=int(self.port),
            federation="cardio-net",
        )  # fmt: skip
        self.witness.start()

    def nothing_crossed(self) -> None:
        """After the daemons ended: none of what was planted is on the wire, and the names of the silos are."""
        assert self.witness is not None
        self.witness.stop()
        nothing_planted_crossed(self.witness.search(["spiffe://cardio-net/silo/"]))

    def look(self, block: str, wanted: str) -> None:
        deadline = time.monotonic() + LIMIT_SECONDS
        while wanted not in (shown := self.run(block)):
            assert time.monotonic() < deadline, f"{block} never showed {wanted}, but:\n{shown}"
            time.sleep(1.0)  # between two looks; each is a whole command, which the silos' cores would feel

    def answer(self, block: str, _: str) -> None:
        pid, terminal = pty.fork()
        if pid == 0:
            os.chdir(self.folder)
            os.execvpe("bash", ["bash", "-c", block], self._environment())  # noqa: S606  # a person's shell
        shown, asked = b"", False
        with contextlib.suppress(OSError):  # Linux ends a terminal that nobody holds open with EIO
            while part := os.read(terminal, 4096):
                shown += part
                if not asked and shown.endswith(QUESTION):
                    asked = True
                    digest = re.findall(rb"sha256:([0-9a-f]{64})", shown)[-1]  # the policy's stands above it
                    os.write(terminal, digest[-4:] + b"\n")
        os.close(terminal)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert asked and status == 0, f"{block} ended with {status}:\n{shown.decode()}"

    def exit_statuses(self) -> list[int]:
        return [process.wait(LIMIT_SECONDS) for process in self.daemons]

    def _environment(self) -> dict[str, str]:
        programs = Path(sys.executable).parent
        planted = self.witness.planted.environment("hospital_a") if self.witness else {}
        return {**os.environ, **ENVIRONMENT, **planted, "PATH": f"{programs}:{os.environ['PATH']}"}


@pytest.fixture
def typist(tmp_path: Path) -> Iterator[Typist]:
    made = Typist(tmp_path)
    try:
        yield made
    finally:
        for process in made.daemons:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if made.witness is not None:
            made.witness.stop()


@pytest.mark.slow
def test_the_first_federation_and_what_an_auditor_does_with_its_logs(typist: Typist) -> None:
    typist.type("start/first-federation.md")
    assert typist.exit_statuses() == [0, 0, 0]  # coordinator and silos ended because they were asked to
    typist.nothing_crossed()
    typist.type("for-auditors.md")
    typist.type("operate/runbooks.md")


@pytest.mark.slow
def test_joining_with_keys_made_on_site_and_a_policy_of_ones_own(typist: Typist) -> None:
    typist.type("how-to/join-as-a-silo.md")
    typist.type("how-to/write-a-policy.md")


@pytest.mark.slow
def test_a_page_whose_command_fails_fails(typist: Typist) -> None:
    with pytest.raises(AssertionError, match="NOT_FOUND"):
        typist.run("silo status --config nowhere.yaml")
    with pytest.raises(AssertionError, match="before it was ready"):
        typist.keep("coordinator start --config nowhere.yaml", "")
