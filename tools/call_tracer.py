"""Which functions of the product run between two moments, in the order in which each of them first runs."""

from __future__ import annotations

import ast
import functools
import itertools
import sys
import threading
from collections import defaultdict
from pathlib import Path
from types import FrameType
from typing import Any

from tools.source_counts import product_files


class Tracer:
    """Notes every function of the product that is called, on this thread and on all that start while it traces.

    Comprehensions, lambdas and the bodies of modules and classes are no functions here: they are lines of what they
    stand in, and Python 3.12 no longer calls the first of them.
    """

    def __init__(self) -> None:
        self._product = {str(path) for path in product_files()}
        # By thread, as the order between threads is another each time.
        self._called: dict[int, dict[tuple[str, int, str], None]] = defaultdict(dict)

    def start(self) -> None:
        """Begin to note what is called; functions that run already are noted when they are called again."""
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def stop(self) -> None:
        """Note no more. May be called again."""
        sys.setprofile(None)
        threading.setprofile(None)

    def figures(self) -> dict[str, int]:
        """Return what somebody goes through who reads each function once, in the order in which it first ran; what a
        thread of its own does, after what the thread did that began it.

        Returns:
            files: that hold one of the functions.
            functions: that ran.
            lines: of these, from `def` to the end; a function within another is not counted twice.
            changes: how often the next function is in another file than the last.
        """
        lines: dict[str, set[int]] = defaultdict(set)
        called = dict.fromkeys(function for thread in self._called.values() for function in thread)
        for file, first_line, name in called:
            lines[file] |= _functions(file)[first_line, name]
        files = [file for file, _, _ in called]
        return {
            "files": len(lines),
            "functions": len(files),
            "lines": sum(len(numbers) for numbers in lines.values()),
            "changes": sum(file != following for file, following in itertools.pairwise(files)),
        }

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event != "call" or code.co_filename not in self._product:
            return
        # Bodies of classes, lambdas and comprehensions are called too.
        if (code.co_firstlineno, code.co_name) in _functions(code.co_filename):
            function = (code.co_filename, code.co_firstlineno, code.co_name)
            self._called[threading.get_ident()].setdefault(function)


@functools.cache
def _functions(file: str) -> dict[tuple[int, str], set[int]]:
    """Return the line numbers of each function of a file, by its first line, decorators included, and its name."""
    found = {}
    for node in ast.walk(ast.parse(Path(file).read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
            first_line = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            found[first_line, node.name] = set(range(node.lineno, node.end_lineno + 1))
    return found
