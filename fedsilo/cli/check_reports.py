"""Results of checks in the two forms that build servers and code hosts read: JUnit XML and SARIF 2.1.0.

JUnit has no standard; what is written here is the part that Jenkins, GitLab and pytest agree on. SARIF lists what is
wrong, JUnit every check. Text from outside loses its control characters first: XML cannot carry them (T37).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import PurePath
from typing import Any
from urllib.parse import quote
from xml.etree import ElementTree

import fedsilo
from fedsilo.cli.output import running
from fedsilo.protocol.errors import UsageError
from fedsilo.protocol.text import harmless

FORMATS = ("text", "json", "junit", "sarif")
SARIF_SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"


@dataclass(frozen=True)
class Check:
    """A check and its result.

    Attributes:
        group: checks of a kind belong together: a case file, a log.
        code: what it is, from a closed list of the command.
        message: what is wrong; empty: nothing is.
        file, line: where to look; line 0 where a file has none.
    """

    group: str
    name: str
    code: str
    message: str
    file: str
    line: int = 0

    @property
    def passed(self) -> bool:
        return not self.message


def output_format(output: str) -> str:
    """The form asked for. Raises UsageError: none of them, or --json beside another one."""
    if output not in FORMATS:
        raise UsageError(f"--output {output!r} is not known", hint=f"one of: {', '.join(FORMATS)}")
    if running().json_output and output not in ("text", "json"):
        raise UsageError(f"--json and --output {output} are two forms", hint="say one of them")
    return "json" if running().json_output else output


def written(form: str, tool: str, checks: Sequence[Check], codes: dict[str, str]) -> str:
    """The checks as junit or sarif."""
    return junit(tool, checks) if form == "junit" else sarif(tool, checks, codes)


def junit(tool: str, checks: Iterable[Check]) -> str:
    """A <testsuites> document: a suite per group, a test case per check."""
    listed = sorted(checks, key=lambda check: check.group)
    counts = {"tests": str(len(listed)), "failures": str(sum(not check.passed for check in listed)), "errors": "0"}
    root = ElementTree.Element("testsuites", {"name": _xml(tool), **counts})
    for group, members in groupby(listed, key=lambda check: check.group):
        of_group = list(members)
        wrong = sum(not check.passed for check in of_group)
        suite = ElementTree.SubElement(
            root, "testsuite", name=_xml(group), tests=str(len(of_group)), failures=str(wrong), errors="0", skipped="0"
        )
        for check in of_group:
            place = f"{check.file}:{check.line}" if check.line else check.file
            case = ElementTree.SubElement(suite, "testcase", classname=_xml(group), name=_xml(check.name))
            if not check.passed:
                failure = ElementTree.SubElement(case, "failure", type=check.code, message=_xml(_first(check.message)))
                failure.text = _xml(f"{place}: {check.message}")
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def sarif(tool: str, checks: Iterable[Check], codes: dict[str, str]) -> str:
    """A SARIF log with one run: a result for each check that did not pass.

    Args:
        tool: the command, such as "fedsilo policy test".
        checks: all of them.
        codes: each code and what it means; every code of a check is among them.
    """
    names = list(codes)
    results = [_result(check, names.index(check.code)) for check in checks if not check.passed]
    driver = {
        "name": tool,
        "version": fedsilo.__version__,
        "rules": [{"id": code, "shortDescription": {"text": text}} for code, text in codes.items()],
    }
    run = {"tool": {"driver": driver}, "columnKind": "unicodeCodePoints", "results": results}
    return json.dumps({"$schema": SARIF_SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2) + "\n"


def _result(check: Check, rule_index: int) -> dict[str, Any]:
    where: dict[str, Any] = {"artifactLocation": {"uri": _uri(check.file)}}
    if check.line:
        where["region"] = {"startLine": check.line}
    return {
        "ruleId": check.code,
        "ruleIndex": rule_index,
        "level": "error",
        "message": {"text": harmless(f"{check.name}: {check.message}", lines=True)},
        "locations": [{"physicalLocation": where}],
    }


def _uri(file: str) -> str:
    """A path as SARIF wants it: a relative one as a reference, an absolute one with its scheme."""
    path = PurePath(file)
    return path.as_uri() if path.is_absolute() else quote(os.fsencode(path.as_posix()))


def _first(message: str) -> str:
    return message.partition("\n")[0]


def _xml(text: str) -> str:
    # what XML 1.0 cannot carry is not printable either
    return harmless(text, lines=True)
