"""The two programs inside the sandbox: one process defines the solution and answers calls, another runs the test
program.

They share two pipes and nothing else. The solution's process never holds the test program, the verdict's pipe or the
reference; the examiner never runs a line of the solution: names of the solution stand in its place, and each call goes
over the pipe. Values cross as plain data of exact built-in types, so that an object with an `__eq__` of its own is no
answer. What is no plain data stays in the solution's process; the examiner holds a `Remote`, and no two of those are
equal, whatever the solution replies. Executed from its text inside `code_bootstrap.py`: standard library only, no
import of the project.

What is tested was decided from the test program alone (`fedsilo.grading.code.subject`): those names, all of
them, are asked of the solution, every other one is Python's own. The test has passed when

- it ran to its end, and the solution still answers then;
- each of its `assert`s held at least once, and none failed or was left by an exception, be that caught or not;
- no `all` or `any` in an `assert` was empty each time.

An iterator that runs out ends the loop over it, and no `map` or `filter` whose function asks it for more.

    frame      4-byte little-endian length, JSON
    request    [operation, handle, encoded arguments]
    reply      ["ok", encoded result, encoded arguments afterwards] | ["error", [exception names], message]
               | ["back", callback, encoded arguments]   a call of a function that the test program passed in; the
                 examiner answers it with ["ok", encoded result] or ["error", ...], after any requests of its own
"""

from __future__ import annotations

import array
import ast
import builtins
import datetime
import itertools
import json
import operator
import os
import struct
import sys
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from types import ModuleType
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
_MUTABLE = (list, dict, set, bytearray, deque, Counter, OrderedDict, defaultdict)
_VIEWS: dict[str, Any] = {
    "dict_keys": type({}.keys()),
    "dict_values": type({}.values()),
    "dict_items": type({}.items()),
}
# values of Python's own library that are fully said by some plain values: how to say them, and to make them again.
# What makes one raises what its class raises.
_STATED: dict[str, tuple[Callable[[Any], list[Any]], Callable[..., Any]]] = {
    "datetime.datetime": (
        lambda each: [each.isoformat(), each.fold],
        lambda text, fold: datetime.datetime.fromisoformat(text).replace(fold=fold),
    ),
    "datetime.date": (lambda each: [each.isoformat()], datetime.date.fromisoformat),
    "datetime.time": (
        lambda each: [each.isoformat(), each.fold],
        lambda text, fold: datetime.time.fromisoformat(text).replace(fold=fold),
    ),
    "datetime.timedelta": (lambda each: [each.days, each.seconds, each.microseconds], datetime.timedelta),
    "datetime.timezone": (
        lambda each: [each.utcoffset(None).total_seconds()],
        lambda seconds: datetime.timezone(datetime.timedelta(seconds=seconds)),
    ),
    "uuid.UUID": (lambda each: [str(each)], lambda text: __import__("uuid").UUID(text)),
    "pathlib.PurePosixPath": (lambda each: [str(each)], lambda text: __import__("pathlib").PurePosixPath(text)),
    "pathlib.PosixPath": (lambda each: [str(each)], lambda text: __import__("pathlib").PosixPath(text)),
    "array.array": (
        lambda each: [each.typecode, each.tobytes().hex()],
        lambda code, digits: array.array(code, bytes.fromhex(digits)),
    ),
}
_FIELDS_MAX = 100


class Gone(BaseException):
    """The other process ended, wants to end, or spoke nonsense; `except Exception` in a test does not catch it."""


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
        """Receive one value. Raises Gone."""
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
        name, more = "dict", []
        if isinstance(value, Counter | OrderedDict):
            name = "Counter" if isinstance(value, Counter) else "OrderedDict"
        elif isinstance(value, defaultdict):
            made = value.default_factory
            known = isinstance(made, type) and getattr(builtins, made.__name__, None) is made
            name, more = "defaultdict", [made.__name__ if isinstance(made, type) and known else None]
        return [name, [[encode(key, other), encode(each, other)] for key, each in dict.items(value)], *more]
    for name, kind in _VIEWS.items():
        if isinstance(value, kind):
            return [name, [encode(each, other) for each in value]]
    if isinstance(value, tuple) and isinstance(fields := getattr(type(value), "_fields", None), tuple):
        values = [encode(each, other) for each in tuple.__iter__(value)]
        if len(fields) == len(values) and all(type(field) is str for field in fields):
            return ["namedtuple", type(value).__name__, list(fields), values]
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
        return ["Fraction" if isinstance(value, Fraction) else "Decimal", str(value)]
    if isinstance(value, memoryview):
        return ["memoryview", value.tobytes().hex()]
    if isinstance(value, slice):
        return ["slice", [encode(each, other) for each in (value.start, value.stop, value.step)]]
    if value is ... or value is NotImplemented:
        return ["constant", "Ellipsis" if value is ... else "NotImplemented"]
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if kind in _STATED:
        return [kind, _STATED[kind][0](value)]
    if isinstance(value, type):
        name = value.__name__
        return ["type", name] if getattr(builtins, name, None) is value else other(value)
    return other(value)


def decode(value: Any, other: Callable[[list[Any]], Any]) -> Any:
    """Return what `encode` made; of exact built-in types. Raises Gone: it made no such thing."""
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
            case ["Counter" | "OrderedDict" as name, list(items)]:
                pairs = {decode(key, other): decode(each, other) for key, each in items}
                return Counter(pairs) if name == "Counter" else OrderedDict(pairs)
            case ["defaultdict", list(items), made]:
                factory = getattr(builtins, made, None) if isinstance(made, str) else None
                pairs = {decode(key, other): decode(each, other) for key, each in items}
                return defaultdict(factory if isinstance(factory, type) else None, pairs)
            case [str(name), list(items)] if name in _VIEWS:
                return _view(name, [decode(each, other) for each in items])
            case ["namedtuple", str(name), list(fields), list(items)] if len(fields) == len(items) <= _FIELDS_MAX:
                return namedtuple(name, [str(field) for field in fields])(*(decode(each, other) for each in items))
            case ["memoryview", str(digits)]:
                return memoryview(bytes.fromhex(digits))
            case ["slice", [start, stop, step]]:
                return slice(decode(start, other), decode(stop, other), decode(step, other))
            case ["constant", "Ellipsis" | "NotImplemented" as name]:
                return getattr(builtins, name)
            case [str(name), list(stated)] if name in _STATED:
                return _STATED[name][1](*stated)
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
    except (ValueError, TypeError, ArithmeticError, AttributeError) as error:
        raise Gone from error
    return other(value)


def _view(name: str, members: list[Any]) -> Any:
    if name == "dict_values":
        return dict(enumerate(members)).values()
    return dict.fromkeys(members).keys() if name == "dict_keys" else dict(members).items()


def error_reply(error: BaseException) -> list[Any]:
    """Encode an exception by the names of its classes and its text."""
    return ["error", [kind.__name__ for kind in type(error).__mro__], str(error)[:2000]]


def built_in_exception(names: list[Any], message: str) -> Exception:
    """Return an exception of the first of these classes that is a built-in one."""
    for name in names:
        kind = getattr(builtins, str(name), None)
        if isinstance(kind, type) and issubclass(kind, Exception) and kind is not UnicodeError:
            try:
                return kind(message)
            except TypeError:
                continue
    return Exception(message)


# ---- the solution ------------------------------------------------------------------------------------


class Solution:
    """Defines the program's names and carries out what the examiner asks for."""

    def __init__(self, wire: Wire, program: str) -> None:
        self._wire = wire
        self._objects: list[Any] = []
        # a module like any other, which dataclasses, pickle and `sys.modules[__name__]` look for
        module = sys.modules["solution"] = ModuleType("solution")
        self.names: dict[str, Any] = vars(module)
        self.names["__builtins__"] = builtins
        exec(compile(program, "<solution>", "exec"), self.names)  # noqa: S102  # this is what the sandbox is for

    def serve(self) -> None:
        while True:
            self._answer(self._wire.receive())

    def _answer(self, request: Any) -> None:
        operation, handle, arguments = request
        values = decode(arguments, self._known)
        try:
            result = self._carry_out(operation, handle, values)
            reply = ["ok", self._encode(result), self._encode(values) if operation == "call" else None]
        except Exception as error:  # noqa: BLE001  # the examiner raises its like; SystemExit ends this process
            reply = error_reply(error)
        self._wire.send(reply)

    def _carry_out(self, operation: str, handle: int, values: Any) -> Any:
        if operation == "names":
            return {name: self.names[name] for name in values if name in self.names}
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
        self._objects.append(value)
        return ["object", len(self._objects) - 1]

    def _known(self, value: list[Any]) -> Any:
        kind, number = value
        return self._objects[number] if kind == "object" else lambda *arguments: self._back(number, arguments)

    def _back(self, callback: int, arguments: tuple[Any, ...]) -> Any:
        self._wire.send(["back", callback, self._encode(list(arguments))])
        while True:
            match self._wire.receive():
                case ["ok", result]:
                    return decode(result, self._known)
                case ["error", list(names), str(message)]:
                    raise built_in_exception(names, message)
                case request:  # the function that the test passed in calls the solution
                    self._answer(request)


# ---- the examiner ------------------------------------------------------------------------------------


class SolutionError(Exception):
    """The solution raised something that is no built-in exception, or one that is the test's own to raise."""


class _Assertions(ast.NodeTransformer):
    """Rewrites each `assert` so that it reports here, and says whether all of them held.

    `assert condition` becomes `begun()`, then `if condition: held(n)`, `else: failed()`; `all(members)` in a condition
    becomes `called(n, all, members)`.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._waiting: set[int] = set()  # asserts that have not held yet, and `all`s that had no member yet
        self._had_members: set[int] = set()
        self._unfinished = self._failures = 0
        # no names that a program could write
        self.names = {f"assert {each.__name__}": each for each in (self.begun, self.held, self.failed, self.called)}

    def visit_Assert(self, node: ast.Assert) -> list[ast.stmt]:
        for each in ast.walk(node.test):
            if isinstance(each, ast.Call) and isinstance(each.func, ast.Name) and each.func.id in ("all", "any"):
                each.args = [ast.Constant(next(self._numbers)), each.func, *each.args]
                each.func = ast.Name("assert called", ast.Load())
        if isinstance(node.test, ast.Constant) and not node.test.value:  # marks a line that a test must not come to
            return [ast.copy_location(ast.Expr(self._call(self.failed)), node)]
        self._waiting.add(number := next(self._numbers))
        held, failed = ast.Expr(self._call(self.held, ast.Constant(number))), ast.Expr(self._call(self.failed))
        statements = [ast.Expr(self._call(self.begun)), ast.If(node.test, [held], [failed])]
        return [ast.copy_location(each, node) for each in statements]

    @staticmethod
    def _call(function: Callable[..., Any], *arguments: ast.expr) -> ast.Call:
        return ast.Call(ast.Name(f"assert {function.__name__}", ast.Load()), list(arguments), [])

    def begun(self) -> None:
        self._unfinished += 1

    def held(self, number: int) -> None:
        self._unfinished -= 1
        self._waiting.discard(number)

    def failed(self) -> None:
        self._failures += 1
        raise AssertionError

    def called(self, number: int, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function that is `all` or `any` by its name, and note whether it had any member to look at."""
        if function not in (all, any) or len(arguments) != 1:
            return function(*arguments)
        if number not in self._had_members:
            self._waiting.add(number)
        return function(self._seen(number, arguments[0]))

    def _seen(self, number: int, members: Any) -> Iterator[Any]:
        for member in members:
            self._had_members.add(number)
            self._waiting.discard(number)
            yield member

    def all_held(self) -> bool:
        return not (self._waiting or self._unfinished or self._failures)


# In a generator, a `StopIteration` of the function is a RuntimeError (PEP 479). Python's own would end without a word.


def _map(function: Callable[..., Any], *iterables: Any) -> Iterator[Any]:
    for arguments in zip(*iterables, strict=False):
        yield function(*arguments)


def _filter(function: Callable[..., Any] | None, iterable: Any) -> Iterator[Any]:
    for each in iterable:
        if function(each) if function is not None else each:
            yield each


class Examiner:
    """Runs the test program with stand-ins for what it tests."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._callbacks: list[Any] = []

    def run(self, task: str) -> None:
        """Run the test program. Raises whatever it raises, Gone, and AssertionError where not every assertion held."""
        given = json.loads(task)
        assertions = _Assertions()
        tree = ast.fix_missing_locations(assertions.visit(ast.parse(given["test"])))
        solution = self.ask("names", 0, given["names"])
        if type(solution) is not dict or set(solution) != set(given["names"]):
            raise Gone
        names = {name: __import__(name) for name in given["modules"]} | {"map": _map, "filter": _filter} | solution
        exec(compile(tree, "<test>", "exec"), {"__name__": "__main__", **names, **assertions.names})  # noqa: S102
        self.ask("names", 0, [])  # still there
        if not assertions.all_held():
            raise AssertionError

    def ask(self, operation: str, handle: int, values: list[Any]) -> Any:
        """One request. Raises what the solution raised, or Gone."""
        self._wire.send([operation, handle, encode(values, self._passed)])
        raised: dict[str, Exception] = {}  # of classes of the test's own, by functions that it passed in
        while True:
            reply = self._wire.receive()
            match reply:
                case ["back", int(callback), arguments] if 0 <= callback < len(self._callbacks):
                    try:
                        result = self._callbacks[callback](*decode(arguments, self._stand_in))
                        answer = ["ok", encode(result, self._passed)]
                    except Exception as error:  # noqa: BLE001  # the solution may catch it
                        answer = error_reply(error)
                        like = built_in_exception(answer[1], answer[2])  # what the solution sees of it
                        if type(like) is not type(error):
                            raised[type(like).__name__] = error
                    self._wire.send(answer)
                case ["ok", result, afterwards]:
                    if operation == "call":
                        self._write_back(values, decode(afterwards, self._stand_in))
                    return decode(result, self._stand_in)
                case ["error", list(names), str(message)]:
                    raise raised.get(str(names[0] if names else "")) or _exception(names, message, operation)
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
            case ["callback", int(callback)] if 0 <= callback < len(self._callbacks):
                return self._callbacks[callback]
        raise Gone

    @staticmethod
    def _write_back(values: list[Any], afterwards: Any) -> None:
        """Apply what the solution did to the arguments that it was given, as far as the caller can see it."""
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


def _exception(names: list[Any], message: str, operation: str) -> BaseException:
    """Its like, but for those by which the test's own loops end and its assertions fail."""
    if "Exception" not in names:  # SystemExit and its like
        return Gone()
    if "StopIteration" in names and operation == "next":
        return StopIteration()
    like = built_in_exception(names, message)
    return SolutionError(message) if isinstance(like, StopIteration | StopAsyncIteration | AssertionError) else like


class Remote:
    # An object that stays with the solution. No two are equal: the number of one is what the solution said it is.

    __doc__ = property(lambda self: self._ask("getattr", "__doc__"))

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
        """Return by the members where they can be seen, since an object may say that it holds everything."""
        try:
            members = iter(self)
            first = next(members, self)
        except TypeError:
            return bool(self._ask("contains", key))
        return first is not self and (first == key or any(each == key for each in members))

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
