"""The console on a real terminal (tmux): keys, sizes, a daemon that dies, and the terminal as it was before, however
the console ends."""

from __future__ import annotations

import os
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from console.lock import BURST_SECONDS, INERT_SECONDS
from tests.loopback.conftest import HOLDS
from tests.loopback.federation import Federation, command
from tests.loopback.test_hold_and_approve import TAKES_PART, held_release

pytestmark = [
    pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed: no real terminal to test"),
    pytest.mark.slow,
]

WAIT_SECONDS = 25.0
PROMPT = "ready-for-a-command"
SMALL, WIDE = (80, 24), (140, 42)
COLOUR = re.compile(r"\x1b\[(?:[0-9;]*;)?(?:3[0-8]|4[0-8]|9[0-7]|10[0-7])[;m]")
# What a broken console raises in its own drawing; the text must not reach the terminal.
BROKEN = """
import sys
from console.screens.audit import AuditScreen

def draw(self):
    private = "PRIVATE-VALUE-7f3a"
    raise LookupError("planted: a mistake in drawing")

AuditScreen.draw = draw
from fedsilo.cli.__main__ import main

sys.argv[1:1] = ["fedconsole"]
main()
"""


class Terminal:
    """A shell in a terminal of its own."""

    def __init__(self, environment: dict[str, str], term: str, size: tuple[int, int]) -> None:
        self._server = ["tmux", "-L", f"fedsilo-{secrets.token_hex(6)}", "-f", "/dev/null"]
        inherited = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "TMUX")}
        shell = ["env", f"TERM={term}", f"PS1={PROMPT}$ ", "bash", "--norc", "--noprofile", "-i"]
        self.tmux(
            "new-session", "-d", "-x", str(size[0]), "-y", str(size[1]), shlex.join(shell),
            environment={**inherited, **environment, "LC_ALL": "C.UTF-8"},
        )  # fmt: skip
        self.tmux("set-option", "-g", "window-size", "manual")
        self.until(lambda text: PROMPT in text)

    def tmux(self, *arguments: str, environment: dict[str, str] | None = None) -> str:
        done = subprocess.run(
            [*self._server, *arguments], capture_output=True, text=True, check=True, timeout=WAIT_SECONDS,
            env=environment,
        )  # fmt: skip
        return done.stdout

    def text(self, *options: str) -> str:
        return self.tmux("capture-pane", "-p", *options)

    def type(self, command: str) -> None:
        self.tmux("send-keys", "-l", command)
        self.press("Enter")

    def press(self, *keys: str) -> None:
        for key in keys:
            self.tmux("send-keys", key)

    def press_changing(self, key: str, answer: str) -> None:
        """A key that changes something: it rests for a moment after each change of the screen."""
        self.press(key)
        again = time.monotonic() + INERT_SECONDS + BURST_SECONDS
        while answer not in self.text():
            if time.monotonic() > again:  # it was pressed while the key rested
                self.press(key)
                again = time.monotonic() + WAIT_SECONDS
            time.sleep(0.05)

    def resize(self, size: tuple[int, int]) -> None:
        self.tmux("resize-window", "-x", str(size[0]), "-y", str(size[1]))

    def until(self, holds: Callable[[str], object]) -> str:
        """Wait until what stands there holds, and give it. Raises AssertionError: it never did; with all that stood."""
        deadline, stood = time.monotonic() + WAIT_SECONDS, dict[str, None]()
        while not holds(text := self.text()):
            stood |= dict.fromkeys(text.splitlines())
            assert time.monotonic() < deadline, "\n".join(stood)
            time.sleep(0.05)
        return text

    def flags(self) -> str:
        """Alternate screen, cursor shown, mouse, bracketed or application keypad."""
        names = ["alternate_on", "cursor_flag", "mouse_any_flag", "keypad_flag"]
        return self.tmux("display-message", "-p", " ".join(f"#{{{name}}}" for name in names)).strip()

    def is_as_before(self) -> None:
        """The shell's own screen with its cursor; what is typed is shown and carried out; line by line again."""
        assert self.flags() == "0 1 0 0"
        self.type("stty -a; echo sum $((20+22))")
        text = self.until(lambda text: "sum 42" in text)
        assert "echo sum $((20+22))" in text  # echoed as it was typed
        assert not {"-echo", "-icanon", "-isig", "-opost", "-icrnl"} & set(re.findall(r"-\w+", text)), text

    def close(self) -> None:
        self.tmux("kill-server")


@contextmanager
def terminal(
    size: tuple[int, int] = SMALL, *, term: str = "tmux-256color", environment: dict[str, str] | None = None
) -> Iterator[Terminal]:
    made = Terminal(environment or {}, term, size)
    try:
        yield made
    finally:
        made.close()


def console(sites: Federation, *options: str) -> str:
    """The command line, and after it what it ended with."""
    socket = sites.site(HOLDS).control_socket
    words = [sys.executable, "-m", "fedsilo.cli", "fedconsole", "--socket", str(socket), *options]
    return f"clear; {shlex.join(words)}; echo ended with $?."


def process_of(sites: Federation, inside: Terminal) -> int:
    """The console's pid: the child of the terminal's shell."""
    shell = inside.tmux("display-message", "-p", "#{pane_pid}").strip()
    (child,) = Path(f"/proc/{shell}/task/{shell}/children").read_text().split()
    return int(child)


def live(text: str) -> bool:
    return HOLDS in text and " live" in text


def test_keys_sizes_and_a_daemon_that_is_killed(sites: Federation) -> None:
    """The daemon holds a release, and dies while somebody who could answer it looks at it."""
    assert sites.submit("terminal", silos=TAKES_PART).exit_code == 0
    shown = held_release(sites)
    person = [str(sites.site(HOLDS).folder / "id" / f"alice{suffix}") for suffix in (".crt", ".key")]
    with terminal() as there:
        there.type(console(sites, "--operator-certificate", person[0], "--operator-key", person[1]))
        overview = there.until(live)
        assert len(overview.splitlines()) <= 24 and there.flags().startswith("1 ")
        there.press("6")
        there.until(lambda text: "verified" in text or "not verified" in text)
        there.press("?")
        there.until(lambda text: "Help, audit" in text)
        there.press("Escape")
        there.until(lambda text: "Help, audit" not in text)

        there.resize(WIDE)
        there.until(lambda text: live(text) and max(map(len, text.splitlines())) > SMALL[0])
        there.press("1")
        wide = there.until(lambda text: "Needs you" in text)
        assert max(map(len, wide.splitlines())) == WIDE[0]
        there.resize(SMALL)
        small = there.until(lambda text: live(text) and "Needs you" not in text)
        assert max(map(len, small.splitlines())) <= SMALL[0]

        there.press("a")
        there.until(lambda text: shown["id"] in text and "leaves" in text)
        there.press_changing("L", "alice UNLOCKED")
        sites.kill(HOLDS)
        banner = there.until(lambda text: "DISCONNECTED" in text)
        words = " ".join(banner.split())
        # what was last known stays readable
        assert "below as of" in words and "r tries now" in words and shown["digest"][-4:] in words, banner
        for key, name in (("A", "approve"), ("R", "reject")):
            there.press_changing(key, f"{name}: disconnected: nothing can be changed")
        sites.start(HOLDS)
        there.press("r")
        there.until(live)
        sites.kill(HOLDS)
        there.until(lambda text: "DISCONNECTED" in text)
        there.press("C-q")
        there.until(lambda text: "ended with 0." in text)
        there.is_as_before()
    sites.start(HOLDS)
    held_release(sites)  # as it was, after two deaths
    # by its name, as a person would: what a silo that died twice has to make up for would take minutes
    words = ("run", "abort", "terminal", "--confirm", "terminal", "--as", "carol", *sites.coordinator_config)
    assert command("fedsilo", *words).data["state"] == "aborted"
    sites.ended("terminal")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_console_that_is_told_to_end_leaves_the_terminal_as_it_was(sites: Federation, number: signal.Signals) -> None:
    with terminal() as there:
        there.type(console(sites))
        there.until(live)
        os.kill(process_of(sites, there), number)
        there.until(lambda text: "ended with 130." in text)
        there.is_as_before()


def test_a_mistake_of_ours_leaves_the_terminal_as_it_was_and_a_report(sites: Federation, tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text(BROKEN, encoding="utf-8")
    command = [sys.executable, str(script), "--socket", str(sites.site(HOLDS).control_socket)]
    with terminal(WIDE, environment={"XDG_STATE_HOME": str(tmp_path)}) as there:
        there.type(f"clear; cd {shlex.quote(str(tmp_path))}; {shlex.join(command)}; echo ended with $?.")
        there.until(live)
        there.press("6")
        text = there.until(lambda text: "ended with" in text)
        assert "ended with 70." in text and "PRIVATE-VALUE" not in text, text
        (report,) = (tmp_path / "fedsilo" / "crashes").glob("*.json")
        told = report.read_text(encoding="utf-8")
        assert report.name in "".join(text.split()) and "LookupError" in told and "PRIVATE-VALUE" not in told
        there.is_as_before()


@pytest.mark.parametrize(
    ("term", "environment"),
    [("xterm", {}), ("screen-256color", {}), ("tmux-256color", {"NO_COLOR": "1"})],
    ids=["xterm", "screen-256color", "NO_COLOR"],
)
def test_other_terminals(sites: Federation, term: str, environment: dict[str, str]) -> None:
    with terminal(term=term, environment=environment) as there:
        there.type(console(sites))
        there.until(live)
        coloured = bool(COLOUR.search(there.text("-e")))
        assert coloured == ("NO_COLOR" not in environment)
        there.press("5")
        there.until(lambda text: "[outbound]" in text and "left since the start" in text)
        there.press("C-q")
        there.until(lambda text: "ended with 0." in text)
        there.is_as_before()
