"""Public answers that are programs come from other silos' models: graded in a process of its own in two sandboxes, and
never where the guard's keys are. Each refusal stands beside the same program outside, which does get there."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedsilo.grading import VerdictCode
from fedsilo.grading.answers import AnswerGrading
from fedsilo.grading.worker import GradingProcess
from fedsilo.protocol.errors import UsageError
from silo.guard import checks
from silo.guard.decisions import Answer, PublicView
from silo.guard.site import AUDIT, LEDGER
from silo.guard.trainer_process import probing, sandbox, supervisor
from tests.algorithms.hostile_programs import GOOD, HARMFUL, TEST

SECRET = "the key of this silo"
needs_sandbox = pytest.mark.skipif(probing.sandbox_trial("namespaces") != "", reason="no namespaces on this machine")


def site(folder: Path, verifier: str = "code") -> Any:
    """A site's folder with keys, as far as `never_shown` asks for it."""
    (folder / "id").mkdir()
    names = ("key", "signing_key", "operators")
    files = {name: folder / "id" / name for name in names}
    for path in files.values():
        path.write_text(SECRET)
    state = folder / "state"
    (state / AUDIT).mkdir(parents=True)
    (state / LEDGER).write_text(SECRET)
    return SimpleNamespace(
        identity=SimpleNamespace(**files, link_key=None), state_dir=state, site_secret=folder / "id" / "key",
        control=SimpleNamespace(socket=state / "control.sock"), policy=folder / "policy.yaml", charter=None,
        data=SimpleNamespace(canaries=None, verifier="exact", public=SimpleNamespace(verifier=verifier)),
        held_out_verifier="exact", key_files=[files["key"], files["signing_key"]],
    )  # fmt: skip


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return site(tmp_path_factory.mktemp("site"))


@pytest.fixture(scope="module")
def grader(config: Any) -> Iterator[GradingProcess]:
    with supervisor.public_grader(config) as process:
        yield process


@contextmanager
def listening() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def programs(config: Any, port: int) -> dict[str, str]:
    """Right only if they get out: `f` is defined by what they reach."""
    key = str(config.identity.key)
    return {
        "key file": f"assert open({key!r}).read() == {SECRET!r}\n{GOOD}",
        "network": f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 2).close()\n{GOOD}",
        "new process": f"import os\nchild = os.fork()\nif not child:\n    os._exit(0)\nos.waitpid(child, 0)\n{GOOD}",
        "memory": f"kept = bytearray(1 << 30)\n{GOOD}",
        "file": f"import os, tempfile\nos.close(tempfile.mkstemp()[0])\n{GOOD}",
    }


@pytest.mark.slow
@needs_sandbox
def test_T14_T22_a_strangers_program_reaches_no_key_no_network_and_no_process(
    config: Any, grader: GradingProcess, tmp_path: Path
) -> None:
    with listening() as port:
        hostile = programs(config, port)
        for program in hostile.values():  # each of them is right where there are no sandbox
            subprocess.run([sys.executable, "-I", "-c", program + TEST], check=True, cwd=tmp_path)
        verdicts = grader.grade_many([(GOOD, TEST), *((text, TEST) for text in hostile.values()), (GOOD, TEST)])
        assert [verdict.correct for verdict in verdicts] == [True, *[False] * len(hostile), True]
        assert grader.process_id not in (None, os.getpid())


@needs_sandbox
def test_T22_the_process_that_grades_is_itself_behind_sandbox(config: Any) -> None:
    """Should a program leave its sandbox, it stands where there is no key, no file of the site and no network."""
    with listening() as port:
        tries = {
            "key": f"open({str(config.identity.key)!r}).read()",
            "state": f"os.listdir({str(config.state_dir)!r})",
            "network": f"socket.create_connection(('127.0.0.1', {port}), 2)",
            "guard": f"os.kill({os.getpid()}, 0)",
        }
        code = "import json, os, socket\ngot = {}\n" + "".join(
            f"try:\n    {text}\n    got[{name!r}] = True\nexcept OSError:\n    got[{name!r}] = False\n"
            for name, text in tries.items()
        )
        arguments = [sys.executable, "-P", "-c", code + "print(json.dumps(got))\n"]
        free = subprocess.run(arguments, capture_output=True, check=True)
        assert json.loads(free.stdout) == dict.fromkeys(tries, True)
        sandboxed = sandbox.launch_over_pipes(arguments, env={}, never=[config.identity.key])
        said, _ = sandboxed.communicate(timeout=60)
        assert json.loads(said) == dict.fromkeys(tries, False)


@pytest.mark.slow
@needs_sandbox
def test_T22_bombs_and_a_killed_process_are_wrong_answers_and_no_pass(grader: GradingProcess) -> None:
    bombs = [HARMFUL[name] + GOOD for name in ("fork_bomb", "thread_bomb")]
    assert not any(verdict.correct for verdict in grader.grade_many([(bomb, TEST) for bomb in bombs]))
    tasks: Any = SimpleNamespace(rows=(SimpleNamespace(answer=TEST),))
    view = PublicView(tasks, AnswerGrading([grader], grader.budget_seconds), len)

    def judged(*texts: str) -> tuple[bool | None, ...]:
        return view.judge([Answer(0, text, "hospital_b") for text in texts], ("run-1", 1, 2))[0]

    assert judged(GOOD, "") == (True, False)
    assert grader.process_id is not None
    os.kill(grader.process_id, signal.SIGKILL)
    # the answer at which it was gone has no verdict; it is started again, in the same sandbox, for the next one
    assert judged(GOOD, GOOD) == (None, True)


@pytest.mark.slow
@needs_sandbox
def test_T23_programs_that_take_all_the_time_there_is_hold_the_guard_no_longer_than_the_budget(
    grader: GradingProcess,
) -> None:
    begun = time.monotonic()
    verdicts = grader.grade_many([(GOOD, TEST), *[(HARMFUL["endless_loop"], TEST)] * 5], budget_seconds=2.0)
    assert [verdict.correct for verdict in verdicts] == [True, *[False] * 5]
    assert {verdict.code for verdict in verdicts[1:]} == {VerdictCode.TIMEOUT}
    assert time.monotonic() - begun < 20  # of the 100 s of five deadlines; ending a process may take a few
    assert grader.budget_seconds(512) < 1200  # the largest step of the shipped rulesets


@needs_sandbox
def test_silo_check_tries_the_sandbox_and_names_what_grades(config: Any) -> None:
    told = checks.verifiers(checks.Look(config))
    assert told == "private exact, public code, held-out exact; public answers run as programs in a sandbox"


def test_T22_without_a_sandbox_the_silo_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = site(tmp_path)
    monkeypatch.setattr(probing, "sandbox_trial", lambda level: "no user namespaces")
    with pytest.raises(
        UsageError, match="builds no sandbox of isolation level namespaces for them: no user namespaces"
    ) as caught:
        supervisor.public_grader(config)
    assert caught.value.code == "NO_SANDBOX"
    with pytest.raises(UsageError, match="no user namespaces"):
        checks.verifiers(checks.Look(config))
    config.data.public.verifier = "choice"
    assert checks.verifiers(checks.Look(config)) == "private exact, public choice, held-out exact"


@needs_sandbox
def test_T31_a_sandbox_that_would_show_a_key_is_not_built(tmp_path: Path) -> None:
    config = site(tmp_path)
    config.key_files.append(Path(probing.__file__))
    with pytest.raises(UsageError, match="would show"):
        supervisor.public_grader(config)


def test_text_is_graded_in_a_plain_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "sandbox_trial", lambda level: "no user namespaces")
    with supervisor.public_grader(site(tmp_path, "exact")) as grader:
        assert isinstance(grader, GradingProcess) and grader.grade("a", "a").correct
