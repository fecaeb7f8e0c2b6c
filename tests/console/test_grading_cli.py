"""`fedsilo grade` as a program: order, streams, lines that cannot be read, limits on time and memory."""

from __future__ import annotations

import json
import os
import resource
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "tests" / "vectors" / "math_grading_examples.jsonl"
CASE_SECONDS_MAX = 5.0
ANSWER_SECONDS_MAX = 60.0  # for a start on a machine that does other work
WHOLE_SECONDS_MAX = 30.0
ENTRY = "from fedsilo.cli.main import fedsilo_main\nfedsilo_main()"


DOSE = """
def amount(text):
    return float(text)

def grade(response, reference):
    if response == "half":
        return 0.7
    if response == "memory":
        bytearray(64 << 30)
    if response == "leave":
        import os
        os.write(2, b"\\x1b[2J")
        os._exit(3)
    if response == "loud":
        print("\\x1b[2J" * 100_000)
        return True
    return amount(response) == amount(reference)
"""


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-c", ENTRY, "grade", *arguments]


def graded(text: str | bytes, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    data = text.encode() if isinstance(text, str) else text
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command(*arguments), input=data, capture_output=True, env=environment, check=False)


def rows(output: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.splitlines()]


@pytest.mark.slow
def test_T22_the_example_file_is_graded_in_seconds_in_its_order() -> None:
    began = time.monotonic()
    examples = rows(EXAMPLES.read_bytes())
    for verifier in ("math", "choice"):
        told = rows(graded(b"", "--verifier", verifier, str(EXAMPLES)).stdout)
        assert [row["id"] for row in told] == [row["id"] for row in examples]
        for row, example in zip(told, examples, strict=True):
            assert row.items() >= example.items()
            if (example["category"] == "choice") == (verifier == "choice"):
                assert row["correct"] is example["expected_correct"], row
    assert time.monotonic() - began < WHOLE_SECONDS_MAX


GOOD = {"id": 7, "gold": "5", "response": "5"}


BAD = [
    (b"not JSON", "not JSON"),
    (b"", "empty"),
    (b"[" * 100_000, "not JSON"),
    (b"[1]", "not a JSON object"),
    (b"\xff\xfe", "not UTF-8"),
    (b'{"response": "5"}', '"gold"'),
    (b'{"gold": 5, "response": "5"}', '"gold"'),
    (b'{"gold": "5"}', '"response"'),
    (b'{"gold": "5", "response": null}', '"response"'),
    (b'{"gold": "5", "response_parts": [["5"]]}', "[text, count]"),
    (b'{"gold": "5", "response_parts": [["5", true]]}', "[text, count]"),
    (b'{"gold": "5", "response_parts": [["5", -1]]}', "negative"),
    (b'{"gold": "5", "response": "' + b"5" * (9 << 20) + b'"}', "longer than"),
]


def test_lines_that_cannot_be_read_stay_in_their_place() -> None:
    text = b"".join(line + b"\n" + json.dumps(GOOD).encode() + b"\n" for line, _ in BAD)
    ended = graded(text + b"\n\n", "--verifier", "exact")  # empty lines at the end are none
    told = rows(ended.stdout)
    assert ended.returncode == 0 and len(told) == 2 * len(BAD)
    for (_, why), unread, read in zip(BAD, told[::2], told[1::2], strict=True):
        assert unread["correct"] is False and why in unread["error"]
        assert read == GOOD | {"correct": True, "code": "correct"}
    assert told[0] == {"line": 1, "correct": False, "error": "not JSON"}
    assert f"{len(BAD)} lines could not be read".encode() in ended.stderr


def test_numbers_come_back_as_they_were_and_what_is_no_number_is_refused() -> None:
    digits = "7" * 5000
    fields = f'"gold": "5", "response": "5", "long": {digits}, "exact": 1.10, "huge": 1e999, "zero": -0.0'
    kept, *unread = graded(
        f'{{{fields}}}\n{{"gold": {digits}, "response": "5"}}\n{{"gold": "5", "response": 1e999}}\n'
        '{"gold": "5", "response": "5", "n": NaN}\n{"gold": "5", "response": "5", "n": -Infinity}',
        "--verifier", "exact",
    ).stdout.decode().splitlines()  # fmt: skip
    assert kept == f'{{{fields}, "correct": true, "code": "correct"}}'
    errors = [json.loads(line, parse_int=str)["error"] for line in unread]
    assert 'the text "gold"' in errors[0] and 'the text "response"' in errors[1]
    assert [error.split(" is no number")[0] for error in errors[2:]] == ["not JSON: NaN", "not JSON: -Infinity"]


@pytest.mark.quick(keep=2)
@pytest.mark.parametrize(
    ("bad", "good", "why"),
    [
        ('"gold": "5", "gold": "6"', '"gold": "5", "Gold": "6"', "'gold' twice"),
        ('"gold": "5", "x": {"y": 1, "y": 2}', '"gold": "5", "x": [{"y": 1}, {"y": 2}]', "'y' twice"),
        ('"gold": "5", "answer": "6"', '"gold": "5", "answer": "5"', "differ"),
        ('"gold": "5", "answer": 5', '"gold": "5", "answer_text": 5', "differ"),
        ('"gold": "5", "response_parts": [["5", 1]]', '"gold": "5", "response_parts": null', "both"),
    ],
)
def test_a_line_that_says_two_things_is_not_judged(bad: str, good: str, why: str) -> None:
    wrong, right = judged(f'{{{bad}, "response": "5"}}', f'{{{good}, "response": "5"}}')
    assert (wrong["correct"], right["correct"]) == (False, True) and why in wrong["error"]


@pytest.mark.slow
def test_the_author_of_a_verifier_learns_on_which_line_and_where_it_fails(tmp_path: Path) -> None:
    (tmp_path / "dose.py").write_text(DOSE)
    facts = tmp_path / "dose-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: dose\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text("[fedsilo.verifiers]\ndose = dose\n")
    responses = ["1", "x", "half", "memory", "leave", "loud", "1"]
    lines = "\n".join(json.dumps({"gold": "1", "response": each}) for each in responses)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    ended, enveloped = (
        subprocess.run(
            command("--verifier", "dose", *more),
            input=lines.encode(),
            capture_output=True,
            env=environment,
            check=False,
        )
        for more in ([], ["--json"])
    )
    codes = [row["code"] for row in rows(ended.stdout)]
    assert codes == ["correct", "error", "error", "error", "crashed", "correct", "correct"]
    told = ended.stderr.decode().splitlines()
    assert told[0].startswith(
        "line 2: the verifier 'dose' raised ValueError: could not convert string to float: 'x', at "
    )
    assert told[0].endswith("dose.py:3 in amount")
    assert told[1] == "line 3: the verifier 'dose' returned 0.7 of type float: not True, False or a Verdict"
    assert told[2].startswith("line 4: the verifier 'dose' raised MemoryError: out of memory, of 4096 MiB, at ")
    assert told[3:] == ["line 5: the process that graded it ended"]
    [envelope] = rows(enveloped.stdout)
    assert envelope["warnings"] == told and enveloped.stderr == b""


@pytest.mark.slow
def test_T22_a_line_is_answered_as_it_comes_and_a_case_that_hangs_takes_five_seconds_at_most(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import fedsilo.grading.math as math\nreal = math.grade\n"
        "def grade(response, reference):\n    while response == 'hang':\n        pass\n"
        "    return real(response, reference)\nmath.grade = grade\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    with subprocess.Popen(
        command("--verifier", "math"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, bufsize=0
    ) as process:
        stdin, stdout = process.stdin, process.stdout
        assert stdin is not None and stdout is not None

        def answer(response: str) -> dict[str, Any]:
            stdin.write(json.dumps({"gold": "x+1", "response": response}).encode() + b"\n")
            assert select.select([stdout], [], [], ANSWER_SECONDS_MAX)[0], "no answer while the input is open"
            return dict(json.loads(stdout.readline()))

        assert answer("1+x")["correct"]
        began = time.monotonic()
        assert answer("hang")["code"] == "timeout"
        assert time.monotonic() - began < CASE_SECONDS_MAX
        assert answer("1+x")["correct"]
        stdin.close()
        assert process.wait(ANSWER_SECONDS_MAX) == 0


def test_a_huge_response_is_never_put_together(tmp_path: Path) -> None:
    """Also a count of 10**15 costs no memory: the command runs with 1 GiB of address space, and the grading child
    takes its own."""
    lines = [
        {"gold": "8", "response_parts": [["8", 10**15]]},
        {"gold": "8", "response_parts": [["\\boxed{", 1], ["8", 1], ["}", 1]]},
    ]
    limit = 1 << 30
    ended = subprocess.run(
        command("--verifier", "numeric"), input="\n".join(map(json.dumps, lines)).encode(), capture_output=True,
        cwd=ROOT, check=False, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
    )  # fmt: skip
    assert [row["correct"] for row in rows(ended.stdout)] == [False, True]
    assert rows(ended.stdout)[0]["code"] == "too_costly"


def test_json_is_one_envelope_with_counts() -> None:
    lines = [
        {"gold": "5", "response": "<think>a</think><answer>5</answer>"},
        {"gold": "5", "response": "5"},
        {"gold": "5", "response": "6"},
    ]
    text = "\n".join([*map(json.dumps, lines), "x"])
    ended = graded(text, "--verifier", "math*0.9+format*0.1", "--json")
    [envelope] = rows(ended.stdout)
    assert envelope["ok"] and envelope["command"] == "grade" and len(envelope["warnings"]) == 1
    data = envelope["data"]
    assert data["verifier"] == "math*0.9+format*0.1"
    assert (data["cases"], data["correct"]) == (4, 2)
    assert data["codes"] == {"correct": 2, "unreadable": 1, "wrong": 1}
    assert data["reward_mean"] == pytest.approx(1.9 / 4, abs=1e-12)  # float sums
    told = rows(graded(text, "--verifier", "math*0.9+format*0.1").stdout)
    assert [row.get("reward") for row in told] == [None, 0.9, None, None]


@pytest.mark.quick(keep=2)
@pytest.mark.parametrize(
    ("arguments", "status", "code"),
    [
        (["--verifier", "guess"], 2, "INVALID_INPUT"),
        (["--verifier", "math*2"], 2, "INVALID_INPUT"),
        (["--verifier", "exact", "nowhere.jsonl"], 8, "NOT_FOUND"),
        (["--verifier", "exact", "."], 2, "INVALID_INPUT"),
        (["--verifier", "exact"], 0, None),
    ],
)
def test_exit_statuses(arguments: list[str], status: int, code: str | None) -> None:
    ended = graded("", *arguments, "--json")
    assert ended.returncode == status
    [envelope] = rows(ended.stdout)
    assert (envelope["error"] or {}).get("code") == code


@pytest.mark.slow
def test_T22_programs_are_graded_in_a_sandbox() -> None:
    test = "assert f(1) == 2"
    lines = [
        {"gold": test, "response": "def f(x):\n    return x + 1\n"},
        {"gold": test, "response": "import os\nos._exit(0)\n"},
        {"gold": test, "response": "while True:\n    pass\n"},
        {"gold": test, "response": "```python\ndef f(x):\n    return 2\n```"},
    ]
    began = time.monotonic()
    ended = graded("\n".join(map(json.dumps, lines)), "--verifier", "code")
    if b"NO_SANDBOX" in ended.stderr:
        pytest.skip("this machine cannot build a sandbox")
    assert [row["correct"] for row in rows(ended.stdout)] == [True, False, False, True]
    assert time.monotonic() - began < WHOLE_SECONDS_MAX


def judged(*lines: dict[str, Any] | str) -> list[dict[str, Any]]:
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    return rows(graded(text, "--verifier", "exact", "-").stdout)


def test_odd_texts_cross_and_what_a_line_says_of_itself_gives_way_to_the_verdict() -> None:
    text = "\u65e5\u672c \u2028\u0000 \ud83d"
    said = {"id": 1, "correct": True, "code": "correct", "reward": 7, "error": "old", "note": "kept"}
    taken, odd, wrong, told, unread = judged(
        {"answer": "B", "response": "B"}, {"gold": text, "response": text}, {"gold": "x", "response": text},
        {**said, "gold": "5", "response": "6"}, {**said, "gold": 5, "response": "5"},
    )  # fmt: skip
    assert [row["correct"] for row in (taken, odd, wrong)] == [True, True, False] and odd["response"] == text
    assert told == {"id": 1, "note": "kept", "gold": "5", "response": "6", "correct": False, "code": "wrong"}
    assert set(unread) == {"id", "note", "gold", "response", "correct", "error"}
