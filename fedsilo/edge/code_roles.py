"""What runs inside the walls: one process defines the solution and answers calls, another runs the test program.

They share two pipes and nothing else. The solution's process never holds the test program, the verdict's pipe or the
reference; the examiner never runs a line of the solution: names of the solution stand in its place, and each call goes
over the pipe. Values cross as plain data of exact built-in types, so that an object with an `__eq__` of its own is no
answer. What is no plain data stays in the solution's process; the examiner holds a `Remote`, which is equal only to
itself. Executed from its text inside `code_walls.py`: standard library only, no import of the project.

    frame      4-byte little-endian length, JSON
    request    [operation, handle, encoded arguments]
    reply      ["ok", encoded result, encoded arguments afterwards] | ["error", [exception names], message]
               | ["back", callback, encoded arguments]   a call of a function that the test program passed in
"""

from __future__ import annotations

import ast
import builtins
import json
import operator
import os
import struct
import sys
from collections import deque
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any

FRAME_BYTES_MAX = 16 << 20
_LENGTH = struct.Struct("<I")
_SMALL = 1 << 53
_SEQUENCES: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque}
_OPERATIONS: dict[str, Callable[..., Any]] = {
    "iter": iter,
    "getattr": getattr,
    "setattr": setattr,
    "len": len,
    "bool": bool,
    "str": str,
    "repr": repr,
    "getitem": operator.getitem,
    "contains": operator.contains,
    "setitem": operator.setitem,
}
_MUTABLE = (list, dict, set, bytearray, deque)


class Gone(Exception):
    """The other process ended, or spoke nonsense."""


class Wire:
    """Frames over a pair of pipes."""

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write = read, write

    def send(self, message: Any) -> None:
        body = json.dumps(message).encode()
        if len(body) > FRAME_BYTES_MAX:
            raise ValueError("too large for the pipe")
        rest = memoryview(_LENGTH.pack(len(body)) + body)
        while rest:
            rest = rest[os.write(self._write, rest) :]

    def receive(self) -> Any:
        """Raises Gone."""
        size = _LENGTH.unpack(self._exactly(_LENGTH.size))[0]
        if size > FRAME_BYTES_MAX:
            raise Gone
        try:
            return json.loads(self._exactly(size))
        except (ValueError, RecursionError) as error:
            raise Gone from error

    def _exactly(self, size: int) -> bytes:
        parts = []
        while size:
            part = os.read(self._read, min(size, 1 << 20))
            if not part:
                raise Gone
            parts.append(part)
            size -= len(part)
        return b"".join(parts)


def encode(value: Any, other: Callable[[Any], Any]) -> Any:
    """Plain data as JSON; `other` encodes what is none. A subclass of a built-in type crosses as that type."""
    if value is None or value is True or value is False:
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        number = int.__index__(value)
        return number if -_SMALL < number < _SMALL else ["int", hex(number)]
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, dict):
        return ["dict", [[encode(key, other), encode(each, other)] for key, each in dict.items(value)]]
    for name, kind in _SEQUENCES.items():
        if isinstance(value, kind):
            return [name, [encode(each, other) for each in kind.__iter__(value)]]
    if isinstance(value, bytes | bytearray):
        return ["bytes" if isinstance(value, bytes) else "bytearray", bytes(value).hex()]
    if isinstance(value, complex):
        return ["complex", value.real, value.imag]
    if isinstance(value, range):
        return ["range", value.start, value.stop, value.step]
    if isinstance(value, Fraction | Decimal):
        return [type(value).__name__, str(value)]
    if isinstance(value, type):
        name = value.__name__
        return ["type", name] if getattr(builtins, name, None) is value else other(value)
    return other(value)


def decode(value: Any, other: Callable[[list[Any]], Any]) -> Any:
    """What `encode` made; of exact built-in types. Raises Gone: it made no such thing."""
    if not isinstance(value, list):
        if isinstance(value, dict):
            raise Gone
        return value
    try:
        match value:
            case ["int", str(digits)]:
                return int(digits, 16)
            case ["dict", list(items)]:
                return {decode(key, other): decode(each, other) for key, each in items}
            case [str(name), list(items)] if name in _SEQUENCES:
                return _SEQUENCES[name](decode(each, other) for each in items)
            case ["bytes" | "bytearray" as name, str(digits)]:
                return (bytes if name == "bytes" else bytearray).fromhex(digits)
            case ["complex", real, imaginary]:
                return complex(real, imaginary)
            case ["range", int(start), int(stop), int(step)]:
                return range(start, stop, step)
            case ["type", str(name)] if isinstance(getattr(builtins, name, None), type):
                return getattr(builtins, name)
            case ["Fraction", str(text)]:
                return Fraction(text)
            case ["Decimal", str(text)]:
                return Decimal(text)
    except (ValueError, TypeError, ArithmeticError) as error:
        raise Gone from error
    return other(value)


# ---- the solution ------------------------------------------------------------------------------------


class Solution:
    """Defines the program's names and carries out what the examiner asks for."""

    def __init__(self, wire: Wire, program: str) -> None:
        self._wire = wire
        self._objects: list[Any] = []
        self.names: dict[str, Any] = {"__name__": "solution", "__builtins__": builtins}
        exec(compile(program, "<solution>", "exec"), self.names)  # noqa: S102  # this is what the walls are for

    def serve(self) -> None:
        while True:
            operation, handle, arguments = self._wire.receive()
            values = decode(arguments, self._known)
            try:
                result = self._carry_out(operation, handle, values)
                reply = ["ok", self._encode(result), self._encode(values) if operation == "call" else None]
            except BaseException as error:  # noqa: BLE001  # of any kind: the examiner raises its like
                reply = ["error", [kind.__name__ for kind in type(error).__mro__], str(error)[:2000]]
            self._wire.send(reply)

    def _carry_out(self, operation: str, handle: int, values: Any) -> Any:
        if operation == "names":
            found = {name: self.names[name] for name in values if name in self.names}
            modules = {name: _Module(each.__name__) for name, each in found.items() if isinstance(each, type(sys))}
            return found | modules
        subject = self._objects[handle]
        if operation == "call":
            positional, named = values
            return subject(*positional, **named)
        if operation == "next":
            return next(subject)
        return _OPERATIONS[operation](subject, *values)

    def _encode(self, value: Any) -> Any:
        return encode(value, self._kept)

    def _kept(self, value: Any) -> Any:
        if isinstance(value, _Module):
            return ["module", value.name]
        self._objects.append(value)
        return ["object", len(self._objects) - 1]

    def _known(self, value: list[Any]) -> Any:
        kind, number = value
        return self._objects[number] if kind == "object" else lambda *arguments: self._back(number, arguments)

    def _back(self, callback: int, arguments: tuple[Any, ...]) -> Any:
        self._wire.send(["back", callback, self._encode(list(arguments))])
        return decode(self._wire.receive(), self._known)


class _Module:
    def __init__(self, name: str) -> None:
        self.name = name


# ---- the examiner ------------------------------------------------------------------------------------


class SolutionError(Exception):
    """The solution raised something that is no built-in exception."""


class Examiner:
    """Runs the test program with stand-ins for the solution's names."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._callbacks: list[Any] = []

    def run(self, program: str) -> None:
        """Raises whatever the test program raises, and Gone."""
        tree = ast.parse(program)
        loaded = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
        found = self.ask("names", 0, sorted(loaded))
        if type(found) is not dict:
            raise Gone
        # A solution must not lend the test its own `abs`, `sorted` or `math`, unless one of these is what is tested
        # (a task may be called `sum`): then it is the only name of the solution that the test uses.
        lent = {name for name in found if hasattr(builtins, name) or name in sys.stdlib_module_names}
        if set(found) - lent:
            found = {name: each for name, each in found.items() if name not in lent or type(each) is type(sys)}
        names = {name: each for name, each in found.items() if name in loaded}
        exec(compile(tree, "<test>", "exec"), {"__name__": "__main__", **names})  # noqa: S102

    def ask(self, operation: str, handle: int, values: list[Any]) -> Any:
        """One request. Raises what the solution raised, or Gone."""
        self._wire.send([operation, handle, encode(values, self._passed)])
        while True:
            reply = self._wire.receive()
            match reply:
                case ["back", int(callback), arguments] if 0 <= callback < len(self._callbacks):
                    result = self._callbacks[callback](*decode(arguments, self._stand_in))
                    self._wire.send(encode(result, self._passed))
                case ["ok", result, afterwards]:
                    if operation == "call":
                        self._write_back(values, decode(afterwards, self._stand_in))
                    return decode(result, self._stand_in)
                case ["error", list(names), str(message)]:
                    raise _exception(names, message)
                case _:
                    raise Gone

    def _passed(self, value: Any) -> Any:
        if type(value) is Remote:
            return ["object", value._handle]
        if not callable(value):
            raise TypeError(f"a {type(value).__name__} cannot be handed to the solution")
        self._callbacks.append(value)
        return ["callback", len(self._callbacks) - 1]

    def _stand_in(self, value: list[Any]) -> Any:
        match value:
            case ["object", int(handle)]:
                return Remote(self, handle)
            case ["module", str(name)] if name.partition(".")[0] in sys.stdlib_module_names:
                return __import__(name)
            case ["callback", int(callback)] if 0 <= callback < len(self._callbacks):
                return self._callbacks[callback]
        raise Gone

    @staticmethod
    def _write_back(values: list[Any], afterwards: Any) -> None:
        """What the solution did to the arguments that it was given, as far as the caller can see it."""
        if type(afterwards) is not list or len(afterwards) != 2:
            raise Gone
        (before, named), (after, _) = values, afterwards
        for one, other in zip([*before, *named.values()], [*after, *afterwards[1].values()], strict=False):
            if type(one) in _MUTABLE and type(other) is type(one) and one != other:
                if isinstance(one, list | bytearray):
                    one[:] = other
                else:
                    one.clear()
                    (one.extend if isinstance(one, deque) else one.update)(other)


def _exception(names: list[Any], message: str) -> Exception:
    for name in names:
        kind = getattr(builtins, str(name), None)
        if isinstance(kind, type) and issubclass(kind, Exception) and kind not in (Exception, UnicodeError):
            try:
                return kind(message)
            except TypeError:
                continue
    return Exception(message) if "Exception" in names else SolutionError(message)


class Remote:
    """An object that stays with the solution. It is equal to itself only, whatever its own class says."""

    def __init__(self, examiner: Examiner, handle: int) -> None:
        object.__setattr__(self, "_examiner", examiner)
        object.__setattr__(self, "_handle", handle)

    def _ask(self, operation: str, *values: Any) -> Any:
        return self._examiner.ask(operation, self._handle, list(values))

    def __call__(self, *positional: Any, **named: Any) -> Any:
        return self._ask("call", list(positional), named)

    def __getattr__(self, name: str) -> Any:
        return self._ask("getattr", name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._ask("setattr", name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._ask("getitem", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._ask("setitem", key, value)

    def __contains__(self, key: Any) -> bool:
        return bool(self._ask("contains", key))

    def __len__(self) -> int:
        return int(self._ask("len"))

    def __bool__(self) -> bool:
        return bool(self._ask("bool"))

    def __str__(self) -> str:
        return str(self._ask("str"))

    def __repr__(self) -> str:
        return str(self._ask("repr"))

    def __iter__(self) -> Iterator[Any]:
        iterator = self._ask("iter")
        while True:
            try:
                yield iterator._ask("next")
            except StopIteration:
                return

    def __next__(self) -> Any:
        return self._ask("next")

    def __eq__(self, other: object) -> bool:
        return type(other) is Remote and self._handle == other._handle

    def __hash__(self) -> int:
        return hash(self._handle)


def main(role: str, program: str, descriptors: dict[str, int]) -> None:
    """One of the two processes. The examiner says `1` when the test program ran to its end, else `0`."""
    wire = Wire(descriptors["read"], descriptors["write"])
    if role == "solution":
        try:
            Solution(wire, program).serve()
        except BaseException:  # noqa: BLE001  # the end of the pipe tells the examiner, and nobody else listens
            return
    passed = b"0"
    try:
        Examiner(wire).run(program)
        passed = b"1"
    except BaseException:  # noqa: BLE001  # SystemExit of a test program as well: it did not run to its end
        passed = b"0"
    os.write(descriptors["verdict"], passed)
