"""The verifier `code`: programs in a sandbox, a verdict that they cannot forge, and a refusal without one."""

from __future__ import annotations

import ast
import json
import os
import platform
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from fedsilo.grading import VerdictCode, check_reference, code, code_sandbox, require_verifier
from fedsilo.grading.code_roles import decode
from fedsilo.grading.code_sandbox import LEVELS, CodeSandbox
from fedsilo.grading.worker import GradingProcess
from fedsilo.protocol.errors import UsageError
from fedsilo.sandbox.filters import program_filter
from tests.algorithms.hostile_programs import CHEATS, FORGED, GOOD, HARMFUL, REFUSED, TEST
from tests.algorithms.sets_folder import set_file

DEADLINE_SECONDS = 2.0
HARM_SECONDS = 1.0  # long enough for each of those to get at what it wants; most of them compute until it is over
ENDED_SECONDS = DEADLINE_SECONDS + 2.0  # two processes are ended and waited for, on a machine that does other work too
REFERENCE_SECONDS = 60.0  # one reference solution computes for four seconds where nothing else runs
ROOT = Path(__file__).parents[2]


def start(arguments: Sequence[str], standard_input: int, handed_on: Sequence[int]) -> subprocess.Popen[bytes]:
    null = subprocess.DEVNULL
    return subprocess.Popen(
        arguments, stdin=standard_input, stdout=null, stderr=null, pass_fds=tuple(handed_on), env={}
    )


@pytest.fixture(scope="module", params=LEVELS)
def sandbox(request: pytest.FixtureRequest) -> Iterator[CodeSandbox]:
    try:
        yield CodeSandbox(start, deadline_seconds=DEADLINE_SECONDS, levels=[request.param])
    except UsageError as error:
        pytest.skip(f"this machine cannot build the isolation level: {error.message}")


@pytest.fixture(scope="module")
def impatient(sandbox: CodeSandbox) -> CodeSandbox:
    """For programs that compute until they are ended."""
    return CodeSandbox(start, deadline_seconds=HARM_SECONDS, levels=[sandbox.level])


def indented(program: str) -> str:
    return "".join(f"    {line}\n" for line in program.splitlines())


@pytest.mark.quick(keep=1)
def test_a_right_program_passes_and_a_wrong_one_does_not(sandbox: CodeSandbox) -> None:
    assert sandbox.grade(GOOD, TEST).code is VerdictCode.CORRECT
    assert sandbox.grade(GOOD.replace("+ 1", "+ 2"), TEST).code is VerdictCode.WRONG
    assert sandbox.grade(f"Here:\n```python\n{GOOD}```\nIt adds one.", TEST).correct
    assert sandbox.grade(GOOD, "assert f(1) == ").code is VerdictCode.BAD_REFERENCE
    assert sandbox.grade("```python\n" + GOOD, TEST).code is VerdictCode.NO_ANSWER


@pytest.mark.quick(keep=5)
@pytest.mark.exhaustive(keep=12)
@pytest.mark.parametrize("name", REFUSED)
def test_T22_the_sandbox_refuses_and_the_program_goes_on(sandbox: CodeSandbox, name: str) -> None:
    reached = "\nelse:\n    raise SystemExit('it was let through')\n"
    caught = f"try:\n{indented(REFUSED[name])}except (OSError, ValueError, MemoryError):\n    pass{reached}"
    assert sandbox.grade(caught + GOOD, TEST).correct
    assert not sandbox.grade(REFUSED[name] + "\n" + GOOD, TEST).correct


@pytest.mark.quick(keep=4)
@pytest.mark.exhaustive(keep=10)
@pytest.mark.parametrize("name", HARMFUL)
def test_T22_harmful_programs_end_in_time_and_earn_nothing(impatient: CodeSandbox, name: str) -> None:
    began = time.monotonic()
    program = HARMFUL[name] if "def f" in HARMFUL[name] else f"{HARMFUL[name]}\n{GOOD}"
    assert not impatient.grade(program, TEST).correct
    assert time.monotonic() - began < ENDED_SECONDS


@pytest.mark.quick(keep=5)
@pytest.mark.exhaustive(keep=12)
@pytest.mark.parametrize("name", FORGED)
def test_T22_success_cannot_be_forged(sandbox: CodeSandbox, name: str) -> None:
    began = time.monotonic()
    assert not sandbox.grade(FORGED[name], TEST).correct
    assert time.monotonic() - began < ENDED_SECONDS


@pytest.mark.quick(keep=6)
@pytest.mark.exhaustive(keep=16)
@pytest.mark.parametrize("name", CHEATS)
def test_T56_a_cheat_earns_nothing_where_a_solution_is_paid(sandbox: CodeSandbox, name: str) -> None:
    test, solved, cheat = CHEATS[name]
    assert sandbox.grade(solved, test).code is VerdictCode.CORRECT
    assert sandbox.grade(cheat, test).code is VerdictCode.WRONG


@pytest.mark.quick(keep=1)
def test_T22_nothing_is_left_running(sandbox: CodeSandbox) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def watched(arguments: Sequence[str], standard_input: int, handed_on: Sequence[int]) -> subprocess.Popen[bytes]:
        started.append(start(arguments, standard_input, handed_on))
        return started[-1]

    own = CodeSandbox(watched, deadline_seconds=DEADLINE_SECONDS, levels=[sandbox.level])
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    own.grade(HARMFUL["endless_loop"], TEST)
    assert len(started) >= 6 and all(process.returncode is not None for process in started)
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors


@pytest.mark.quick(keep=6)
@pytest.mark.exhaustive(keep=12)
@pytest.mark.parametrize(
    ("program", "test"),
    [
        ("def f(x):\n    x.append(1)\n", "a = []\nf(a)\nassert a == [1]"),
        ("def f(n):\n    yield from range(n)\n", "assert list(f(3)) == [0, 1, 2]"),
        ("class Node:\n    def __init__(self, v):\n        self.v = v\ndef total(n):\n    return n.v + n.left.v\n",
         "a = Node(1)\na.left = Node(2)\nassert total(a) == 3 and a.left.v == 2"),
        ("def f(g, x):\n    return g(x) + 1\n", "assert f(lambda x: 2 * x, 3) == 7"),
        ("def f(x):\n    raise ValueError('no')\n",
         "try:\n    f(1)\nexcept ValueError:\n    pass\nelse:\n    assert 0"),
        ("import collections\ndef f(x):\n    return collections.Counter(x)\n", "assert f('aab') == {'a': 2, 'b': 1}"),
        ("def f():\n    return {(1, 2): {3}, 'x': b'y', 'z': [1j, 2 ** 300, float('inf'), None]}\n",
         "assert f() == {(1, 2): {3}, 'x': b'y', 'z': [1j, 2 ** 300, float('inf'), None]}"),
        ("def f(kind, x):\n    return isinstance(x, kind)\n", "assert f(int, 3) and not f(str, 3)"),
        ("import enum\nclass Two(enum.IntEnum):\n    TWO = 2\ndef f():\n    return Two.TWO\n", "assert f() == 2"),
        ("import math\ndef f(x):\n    return math.sqrt(x)\n", "assert math.isclose(f(2), 2 ** 0.5)"),
        ("def sum(a, b):\n    return a * b\n", "assert sum(3, 4) == 12"),
        ("def sorted(x):\n    return x\n",
         "def check(candidate):\n    assert candidate([2, 1]) == [2, 1] and len([1]) == 1\ncheck(sorted)"),
        ("def bisect(x):\n    return 4\n", "assert bisect(3) == 4"),
        ("import collections\ndef f(x):\n    return collections.Counter(x)\n",
         "assert f('aab').most_common(1) == [('a', 2)] and f('aab')['z'] == 0"),
        ("import collections\ndef f(x):\n    x['n'] += 1\n    return x\n",
         "import collections\nd = collections.defaultdict(int)\nf(d)\nassert d['n'] == 1 and f(d)['z'] == 0"),
        ("import collections\ndef f():\n    return collections.OrderedDict([(1, 2), (3, 4)])\n",
         "import collections\nassert f() == collections.OrderedDict([(1, 2), (3, 4)])\n"
         "assert f() != collections.OrderedDict([(3, 4), (1, 2)])"),
        ("import datetime\ndef f(d, n):\n    return d + datetime.timedelta(days=n)\n",
         "import datetime\nassert f(datetime.date(2024, 2, 28), 2) == datetime.date(2024, 3, 1)"),
        ("import datetime as d\ndef f():\n    return [d.timedelta(1, 2, 3), d.time(4, 5), d.timezone.utc]\n",
         "import datetime as d\nassert f() == [d.timedelta(1, 2, 3), d.time(4, 5), d.timezone.utc]"),
        ("import datetime as d\ndef f():\n    return d.datetime(2024, 1, 2, tzinfo=d.timezone.utc)\n",
         "import datetime as d\nassert f() == d.datetime(2024, 1, 2, tzinfo=d.timezone.utc)"),
        ("import uuid, pathlib, array\ndef f():\n"
         "    path = pathlib.PurePosixPath('a/b')\n"
         "    return uuid.UUID(int=7), path, array.array('i', [1]), memoryview(b'x'), slice(1), ...\n",
         "import uuid, pathlib, array\nassert f() == "
         "(uuid.UUID(int=7), pathlib.PurePosixPath('a/b'), array.array('i', [1]), memoryview(b'x'), slice(1), ...)"),
        ("def f(d):\n    return d.keys(), d.values()\n",
         "k, v = f({'a': 1})\nassert k == {'a'} and list(v) == [1] and sorted(k) == ['a']"),
        ("from typing import NamedTuple\nclass P(NamedTuple):\n    x: int\n    y: int = 2\n"
         "def f(p):\n    return p.x + p.y\n",
         "p = P(1)\nassert p.y == 2 and p._replace(x=3) == (3, 2) and f(p) == 3"),
        ("def f():\n    yield from [1, 2]\n",
         "g = f()\nassert next(g) == 1 and next(g, None) == 2\n"
         "try:\n    next(g)\nexcept StopIteration:\n    pass\nelse:\n    assert False\nassert next(g, 7) == 7"),
        ("def f(x):\n    return x > 1\n",
         "assert list(map(f, [1, 2])) == [False, True] and list(filter(f, [1, 2])) == [2]\n"
         "assert list(map(lambda a, b: a + b, [1, 2], [3, 4])) == [4, 6] and list(filter(None, [0, 1])) == [1]"),
        ("def f(g, n):\n    for _ in range(n):\n        try:\n            return g()\n"
         "        except ValueError:\n            pass\n",
         "class Broken(Exception):\n    pass\ncalls = []\n"
         "def fails_twice():\n    calls.append(1)\n    if len(calls) < 3:\n        raise ValueError\n    return 7\n"
         "def breaks():\n    raise Broken\n"
         "assert f(fails_twice, 3) == 7 and len(calls) == 3\n"
         "try:\n    f(breaks, 2)\n    assert False\nexcept Broken:\n    pass"),
        ("def f(g, n):\n    return g(n)\ndef h(n):\n    return n + 1\n", "assert f(lambda n: h(n) * h(n + 1), 1) == 6"),
        ("def f(x):\n    return x\n", "assert True, 'first'\nfor x in (1, 2):\n    assert f(x) == x, f'{x} is wrong'"),
    ],
)  # fmt: skip
def test_what_tests_do_with_a_solution(sandbox: CodeSandbox, program: str, test: str) -> None:
    assert sandbox.grade(program, test).correct
    assert not sandbox.grade(program, test + "\nassert False").correct


def test_T56_a_default_is_made_by_a_type_alone() -> None:
    assert decode(["defaultdict", [], "list"], tuple)["x"] == []
    with pytest.raises(KeyError):
        decode(["defaultdict", [], "globals"], tuple)["x"]


def test_T22_a_solution_lends_the_test_no_builtin_of_its_own(sandbox: CodeSandbox) -> None:
    near = "assert abs(f(2) - 4) < 1"
    assert sandbox.grade("def f(x):\n    return x * x\ndef abs(x):\n    return 9\n", near).correct
    assert not sandbox.grade("def f(x):\n    return 0\ndef abs(x):\n    return 0\n", near).correct


def test_T22_a_test_program_that_leaves_early_is_no_success(sandbox: CodeSandbox) -> None:
    assert sandbox.grade(GOOD, TEST + "import os\n").correct
    assert sandbox.grade(GOOD, TEST + "import os\nos._exit(0)\n").code is VerdictCode.WRONG


CASES = Path(__file__).parents[1] / "vectors" / "grading_cases"


@pytest.mark.quick(keep=3)
@pytest.mark.parametrize("name", ["K1_code_module_missing", "K2_code_values_over_the_pipe", "K3_code_fences"])
def test_cases_of_other_people(sandbox: CodeSandbox, name: str) -> None:
    rows = [json.loads(line) for line in (CASES / f"{name}.jsonl").read_text("utf-8").splitlines() if line]
    verdicts = {row["id"]: sandbox.grade(row["response"], row["gold"]).correct for row in rows}
    assert rows and verdicts == {row["id"]: row["expected_correct"] for row in rows}


def reference_rows() -> list[tuple[str, str, str]]:
    solutions = {
        row["id"]: row["solution"]
        for row in map(json.loads, set_file("code_reference_solutions.jsonl").read_text("utf-8").splitlines())
    }
    rows = []
    for name in ("humaneval.jsonl", "mbpp.jsonl"):
        for row in map(json.loads, set_file(name).read_text("utf-8").splitlines()):
            rows.append((row["id"], solutions[row["id"]], row["answer"]))
    return rows


def failing(rows: Sequence[tuple[str, str, str]]) -> list[str]:
    sandbox = CodeSandbox(start, deadline_seconds=REFERENCE_SECONDS)
    return [name for name, solution, test in rows if not sandbox.grade(solution, test).correct]


def test_some_reference_solutions_pass() -> None:
    """All 976: `python -m benchmarks.code_sandbox`."""
    rows = reference_rows()[::48]
    assert len(rows) >= 20 and failing(rows) == []


def test_T22_programs_are_run_where_it_was_said_that_they_may() -> None:
    with pytest.raises(UsageError, match="runs a program"):
        GradingProcess("code")
    with pytest.raises(UsageError, match="runs a program"):
        GradingProcess("code*0.9+format*0.1")
    with GradingProcess("code", runs_programs=True) as process:
        codes = [verdict.code for verdict in process.grade_many([(GOOD, TEST), (FORGED["wrong"], TEST), ("", TEST)])]
        assert codes == [VerdictCode.CORRECT, VerdictCode.WRONG, VerdictCode.NO_ANSWER]
    with GradingProcess("code*0.75+exact*0.25", runs_programs=True) as process:
        assert process.grade(GOOD, TEST).reward == 0.75
    with GradingProcess("code", runs_programs=True, deadline_seconds=DEADLINE_SECONDS) as process:
        codes = [each.code for each in process.grade_many([(HARMFUL["endless_loop"], TEST), (GOOD, TEST)])]
        assert codes == [VerdictCode.TIMEOUT, VerdictCode.CORRECT] and process.counts.timeouts == 1


def test_T22_the_coordinator_never_runs_programs() -> None:
    """It skips verifiers that execute, and nothing in it could say that they may run."""
    assert require_verifier("code").executes and require_verifier("code*0.5+exact*0.5").executes
    assert not require_verifier("math*0.5+exact*0.5").executes
    for path in sorted((ROOT / "coordinator").rglob("*.py")):
        tree = ast.parse(path.read_text("utf-8"))
        keywords = {node.arg for node in ast.walk(tree) if isinstance(node, ast.keyword)}
        modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert "runs_programs" not in keywords and "fedsilo.grading.code_sandbox" not in modules, path


def test_T22_without_a_sandbox_nothing_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_sandbox, "readable_paths", lambda: [str(tmp_path / "nowhere")])
    with pytest.raises(UsageError, match="no sandbox can be built here") as raised:
        CodeSandbox(start)
    assert raised.value.code == "NO_SANDBOX" and all(level in raised.value.message for level in LEVELS)
    (tmp_path / "sitecustomize.py").write_text(
        "import fedsilo.grading.code_sandbox as sandbox\nsandbox.readable_paths = lambda: ['/nowhere/at/all']\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    with GradingProcess("code", runs_programs=True) as process, pytest.raises(UsageError, match="no sandbox"):
        process.grade(GOOD, TEST)


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_has_no_call_twice_and_ends_with_a_refusal(machine: str) -> None:
    program = program_filter(machine)
    steps = [program[place : place + 8] for place in range(0, len(program), 8)]
    compared = [step for step in steps if step[:2] == b"\x15\x00"][1:]  # the first compares the architecture
    assert len(compared) == len(set(compared)) > 40
    assert steps[-1] == bytes.fromhex("0600000001000500")


def test_a_machine_whose_calls_are_not_known_runs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(UsageError, match="riscv64") as refused:
        CodeSandbox(start)
    assert refused.value.code == "NO_SANDBOX"


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("x = 1\n", "x = 1\n"),
        ("```python\nx = 1\n```", "x = 1\n"),
        ("```py\ndef f(): pass\n```\nRun it:\n```python\nf()\n```", "def f(): pass\n"),
        ("```bash\nls\n```\n```\nx = 1\n```", "x = 1\n"),
        ("<think>```python\nx = 2\n```</think>```python\nx = 1\n```", "x = 1\n"),
        ("```python\nx = 1", None),
        ("```bash\nls\n```", None),
        ("<think>x = 1", None),
        ("  ", None),
        ("~~~python\nx = 1\n~~~", "x = 1\n"),
        ("~~~~\n~~~\n~~~~\n~~~py\nx = 1\n~~~", "x = 1\n"),
        ("````python\nx = 'a'\n```\ny = 1\n````", "x = 'a'\n```\ny = 1\n"),
        ("1. So:\n\n   ```python\n   def f():\n       return 1\n   ```", "def f():\n    return 1\n"),
        ("- ```python\n  x = 1\n  ```", "x = 1\n"),
        ("> ```python\n> def f():\n>     return 1\n> ```", "def f():\n    return 1\n"),
        ("\t```python\n\tdef f():\n\t    return 1\n\t```", "def f():\n    return 1\n"),
        ("```{.python .numberLines}\nx = 1\n```", "x = 1\n"),
        ('```python title="a.py"\nx = 1\n```', "x = 1\n"),
        ("~~~python\nx = 1", None),
        ("~~~bash\nls\n~~~", None),
        ("x = '~~~'\n", "x = '~~~'\n"),
    ],
)
def test_which_block_is_the_program(response: str, program: str | None) -> None:
    assert code.extract(response) == program


@pytest.mark.parametrize(
    ("reference", "usable"),
    [
        (TEST, True),
        ("", False),
        ("# no test\n", False),
        ("assert (", False),
        ("f(1)\n", False),  # asserts nothing
        ("assert 1 + 1 == 2\n", False),  # tests nothing
        ("assert sum([1]) == 1\n", True),
        ("assert sum([1]) == max([1])\n", False),  # which of the two is tested?
        ("def check(c):\n    assert abs(c([1]) - 1) < 1\ncheck(sum)\n", True),
        ("assert math.floor(2.5) == 2\n", False),
        ("assert math(2.5) == 2\n", True),
        ("def check(c):\n    assert c([1]) == sum([1])\ncheck(sum)\n", False),  # the solution's own would be the answer
        ("assert f(2)\n", True),
        ("assert f(1) == 2\nassert True\n", True),
        ("f(1)\nassert True\n", False),  # none of these asks anything
        ("f(1)\nassert 'ok'\n", False),
        ("f(1)\nassert 1 + 1 == 2\n", False),
        ("assert f\n", False),
        ("assert (f(2) == 4, 'no')\n", False),
        ("assert f(1) == 2\nassert (f(2) == 4, 'no')\n", False),
        ("assert [f(2) == 4]\n", False),
        ("assert {'four': f(2)}\n", False),
        ("assert (f(x) == 4 for x in [2])\n", False),
        ("assert lambda: f(2) == 4\n", False),
        ("assert f'it is {f(2)}'\n", False),
        ("assert f(2) == 4 or True\n", False),
        ("assert not (f(2) == 4 and False)\n", False),
        ("def f_is_right():\n    assert f(2) == 4\nassert f_is_right\n", False),
        ("assert [*f(2)]\n", True),
        ("r = f(2)\nassert r\n", True),
        ("def test_f():\n    assert f(2) == 4\n", False),  # nothing calls it
        ("def test_f():\n    assert f(2) == 4\ntest_f()\n", True),
        (
            "def test_f():\n    assert f(2) == 4\nfor test in list(vars().values()):\n    callable(test) and test()\n",
            True,
        ),
        ("class Cases:\n    def check(self):\n        assert f(2) == 4\nCases().check()\n", True),
    ],
)
def test_T56_which_reference_is_a_test_program(reference: str, usable: bool) -> None:
    assert check_reference("code", reference) is usable
