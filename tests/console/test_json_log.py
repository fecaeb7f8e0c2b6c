"""Logs as JSON: every line parses, says what it is about, and holds nothing private and nothing that acts."""

from __future__ import annotations

import io
import json
import logging
import re
import threading
from types import SimpleNamespace
from typing import Any

from fedsilo.files.logs import FIELDS, JsonLines, about, about_its_message, shape

PRIVATE = "patient 4711 has a fever"
HOSTILE = 'run\n{"level": "info", "message": "all is well"}\x1b[31m\u202e\x00\ud800 [link] </script>'
WHOSE = {"party": "silo", "federation": "cardio-net", "name": "hospital_a"}


def made(**options: Any) -> tuple[logging.Logger, io.StringIO]:
    logger, out = logging.Logger("fedsilo.test"), io.StringIO()
    handler = logging.StreamHandler(out)
    handler.setFormatter(JsonLines(WHOSE, **options))
    logger.addHandler(handler)
    return logger, out


def lines(out: io.StringIO) -> list[dict[str, Any]]:
    text = out.getvalue()
    assert text.isascii() and text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def test_T37_hostile_text_ends_no_line_adds_no_field_and_is_printable_when_decoded() -> None:
    logger, out = made()
    with about(run=HOSTILE, silo=HOSTILE, round=3):
        logger.warning("refused %s", HOSTILE)
    logger.warning("next", extra={"run": "run-1", "person": "alice"})
    first, second = lines(out)
    assert set(first) == {"time", "level", "logger", *WHOSE, "run", "round", "silo", "message"}
    assert first["level"] == "warning" and all(str(value).isprintable() for value in first.values())
    assert r"run\n{" in first["message"] and r"\u001b[31m\u202e\u0000\ud800 [link]" in first["run"]
    assert second["run"] == "run-1" and "silo" not in second and "person" not in second
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", first["time"])


def test_T08_no_words_of_an_exception_and_none_that_the_trainer_said() -> None:
    logger, out = made(quoted=re.compile(r"(the trainer reports).+"))
    try:
        raise ValueError(PRIVATE)
    except ValueError:
        logger.exception("a call failed")
    logger.error("the trainer reports X: %s", PRIVATE)
    logger.error("the link is down: %s", "no answer")
    failed, said, other = lines(out)
    assert PRIVATE not in out.getvalue()
    assert failed["exception"] == "ValueError" and "test_json_log.py" in failed["at"][0]
    assert said["message"] == "the trainer reports (left out)"
    assert other["message"] == "the link is down: no answer"


def test_what_a_line_is_about_is_its_threads_own_and_ends_with_the_block() -> None:
    def current() -> dict[str, Any]:
        return {"run": "run-2", "round": 1, "step": 0}

    logger, out = made(current=current)
    with about(round=4, request="0b1d", kind=""):
        other = threading.Thread(target=logger.info, args=("elsewhere",))
        other.start()
        other.join()
        with about(step=2):
            logger.info("inner")
        logger.info("outer")
    logger.info("after")
    elsewhere, inner, outer, after = lines(out)

    def ids(line: dict[str, Any]) -> dict[str, Any]:
        return {name: line[name] for name in FIELDS if name in line}

    assert ids(elsewhere) == {"run": "run-2", "round": 1}
    assert ids(inner) == {"run": "run-2", "round": 4, "step": 2, "request": "0b1d"}
    assert ids(outer) == {"run": "run-2", "round": 4, "request": "0b1d"} and ids(after) == ids(elsewhere)


def test_what_a_method_says_is_about_the_message_that_it_is_given() -> None:
    logger, out = made()

    class Taker:
        @about_its_message
        def take(self, item: Any, answer: str = "") -> str:
            logger.info("taken")
            return answer

    item = SimpleNamespace(run="run-2", round=3, step=0, kind="round.open", sequence=7, digest="ab")
    assert Taker().take(item, answer="yes") == "yes"
    logger.info("after")
    taken, after = lines(out)
    assert {name: taken[name] for name in FIELDS if name in taken} == {
        "run": "run-2", "round": 3, "kind": "round.open", "sequence": 7,
    }  # fmt: skip
    assert not set(FIELDS) & set(after)


def test_a_fault_in_what_is_told_costs_the_fields_alone_and_text_stays_text() -> None:
    def current() -> dict[str, Any]:
        raise RuntimeError(PRIVATE)

    logger, out = made(current=current)
    logger.info("still said %s", "x" * 20_000)
    for level in ("debug", "warning", "error", "critical"):
        getattr(logger, level)("x")
    first, *more = lines(out)
    assert len(first["message"]) == 8192 and "run" not in first
    assert [line["level"] for line in more] == ["debug", "warning", "error", "critical"]
    logger, out = made()
    logger.handlers[0].setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    for form, told in (("text", "WARNING two\\nlines"), ("json", "")):
        shape(logger, form, WHOSE)
        logger.warning("two\nlines")
        line = out.getvalue().splitlines()[-1]
        assert line == told or json.loads(line)["party"] == "silo"
