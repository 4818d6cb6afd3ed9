"""Run tests against untrusted code that is in another process: functions are called by value.

The tester executes the tests. A function of the code is a proxy there: it sends its arguments to the process
of the code and gets the result as plain data. Comparisons happen in the tester, on exact built-in types, so
the code has no influence on them except through what it returns. `sandbox` starts both processes. This module
imports the standard library only, because the process of the code could use whatever else it imports.
"""

from __future__ import annotations

import ast
import builtins
import collections
import decimal
import fractions
import inspect
import itertools
import json
import math
import operator
import random
import signal
import socket
import struct
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

SIZE = struct.Struct("!Q")
MESSAGE_BYTES, MOST_ITEMS = 8 << 20, 100_000
TYPES = {
    kind.__name__: kind for kind in (bool, int, float, complex, str, bytes, list, tuple, set, frozenset, dict)
}
UNUSED = "the test does not call the code"
"""Why a test fails that any code would pass."""


@dataclass(frozen=True, slots=True)
class CodeReport:
    """The outcome of each test."""

    failures: tuple[str | None, ...]
    """Why each test failed; None if it passed."""

    @property
    def share(self) -> float:
        """The share of tests that passed."""
        return self.failures.count(None) / len(self.failures)


class Disconnected(BaseException):
    """The other side ended, or sent something that is not a message."""


class OutOfTime(BaseException):
    """The run has used up its time. A BaseException, so that tests do not catch it."""


def send(channel: socket.socket, message: Any) -> None:
    data = json.dumps(message).encode()
    if len(data) > MESSAGE_BYTES:
        raise ValueError("a value is too large")
    try:
        channel.sendall(SIZE.pack(len(data)) + data)
    except OSError:
        raise Disconnected from None


def receive(channel: socket.socket) -> dict[str, Any]:
    (size,) = SIZE.unpack(receive_exactly(channel, SIZE.size))
    if size > MESSAGE_BYTES:
        raise Disconnected
    try:
        message = json.loads(receive_exactly(channel, size))
    except (ValueError, RecursionError):
        raise Disconnected from None
    if not isinstance(message, dict):
        raise Disconnected
    return message


def receive_exactly(channel: socket.socket, size: int) -> bytes:
    parts = []
    while size:
        try:
            part = channel.recv(min(size, 1 << 20))
        except OSError:
            raise Disconnected from None
        if not part:
            raise Disconnected
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


class Codec:
    """Converts values to JSON data and back; other objects stay where they are and get a number."""

    def __init__(self) -> None:
        self.objects: list[Any] = []

    def encode(self, value: Any) -> Any:
        kind = type(value)
        if value is None or kind in (bool, str, float) or (kind is int and -(2**63) < value < 2**63):
            return value
        if isinstance(value, Remote):
            return {"t": "own", "v": value._number}
        if kind is type and (name := next((name for name, one in TYPES.items() if one is value), None)):
            return {"t": "type", "v": name}
        for base, name in BASES:
            if isinstance(value, base):
                return {"t": name, "v": self.parts(value, name)}
        if hasattr(value, "__next__"):
            return {"t": "iterator", "v": [self.encode(one) for one in itertools.islice(value, MOST_ITEMS)]}
        self.objects.append(value)
        return {"t": "object", "v": len(self.objects) - 1}

    def parts(self, value: Any, name: str) -> Any:
        if name in ("dict", "OrderedDict", "Counter"):
            return [[self.encode(key), self.encode(one)] for key, one in dict.items(value)]
        if name in ("list", "tuple", "set", "frozenset", "deque"):
            return [self.encode(one) for one in value]
        if name == "range":
            return [value.start, value.stop, value.step]
        if name in ("bytes", "bytearray"):
            return bytes(value).hex()
        if name == "complex":
            return [value.real, value.imag]
        if name == "Fraction":
            return [self.encode(value.numerator), self.encode(value.denominator)]
        return hex(value) if name == "int" else value if name == "bool" else str(value)

    def decode(self, data: Any, remote: Callable[[int], Any]) -> Any:
        """Return the value; `remote` makes a proxy of an object on the other side."""
        if isinstance(data, list):
            raise ValueError("not a value")
        if not isinstance(data, dict):
            return data
        name, value = data["t"], data["v"]
        if name == "own":
            return self.objects[value]
        if name == "object":
            return remote(int(value))
        if name == "type":
            return TYPES[value]
        if name in ("dict", "OrderedDict", "Counter"):
            pairs = {self.decode(key, remote): self.decode(one, remote) for key, one in value}
            return {"dict": dict, "OrderedDict": collections.OrderedDict, "Counter": collections.Counter}[
                name
            ](pairs)
        if name in SEQUENCES:
            return SEQUENCES[name](self.decode(one, remote) for one in value)
        return (
            SCALARS[name](value)
            if name != "Fraction"
            else fractions.Fraction(*(self.decode(one, remote) for one in value))
        )


BASES: tuple[tuple[type, str], ...] = (
    *((bool, "bool"), (int, "int"), (float, "float"), (complex, "complex"), (str, "str")),
    *((bytes, "bytes"), (bytearray, "bytearray"), (collections.Counter, "Counter")),
    *((collections.OrderedDict, "OrderedDict"), (dict, "dict"), (list, "list"), (tuple, "tuple")),
    *((set, "set"), (frozenset, "frozenset"), (collections.deque, "deque"), (range, "range")),
    *((fractions.Fraction, "Fraction"), (decimal.Decimal, "Decimal")),
)
SEQUENCES: dict[str, Callable[[Any], Any]] = {
    **{"list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "deque": collections.deque},
    "iterator": lambda values: iter(list(values)),
}
SCALARS: dict[str, Callable[[Any], Any]] = {
    **{"bool": bool, "int": lambda text: int(text, 16), "float": float, "str": str},
    **{"complex": lambda pair: complex(*pair), "bytes": bytes.fromhex, "bytearray": bytearray.fromhex},
    **{"range": lambda parts: range(*parts), "Decimal": decimal.Decimal},
}
MUTABLE = (list, dict, set, bytearray, collections.deque)
OPERATIONS: dict[str, Callable[..., Any]] = {
    **{"call": lambda function, *arguments, **named: function(*arguments, **named), "attr": getattr},
    **{"item": operator.getitem, "len": len, "iter": list, "bool": bool, "str": str, "in": operator.contains},
}


class Remote:
    """An object on the other side. Two are equal only if they are the same: `__eq__` is not called there."""

    def __init__(self, peer: Peer, number: int) -> None:
        self._peer, self._number = peer, number

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._peer.ask("call", self, *arguments, **named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._peer.ask("attr", self, name)

    def __getitem__(self, key: Any) -> Any:
        return self._peer.ask("item", self, key)

    def __len__(self) -> int:
        return int(self._peer.ask("len", self))

    def __iter__(self) -> Any:
        return iter(self._peer.ask("iter", self))

    def __bool__(self) -> bool:
        return self._peer.ask("bool", self) is True

    def __contains__(self, value: Any) -> bool:
        return self._peer.ask("in", self, value) is True

    def __str__(self) -> str:
        return str(self._peer.ask("str", self))


class Peer:
    """One end of the channel between tester and candidate. Each waits for the other, calls nest."""

    def __init__(self, channel: socket.socket, *, allows: tuple[str, ...]) -> None:
        self.channel, self.codec, self.allows = channel, Codec(), allows
        self.asked = 0
        """Number of operations on the other side."""

    def ask(self, operation: str, *arguments: Any, **named: Any) -> Any:
        """Apply an operation on the other side, and return the result or raise its exception."""
        self.asked += 1
        given = [self.codec.encode(one) for one in arguments]
        named_data = {name: self.codec.encode(one) for name, one in named.items()}
        send(self.channel, {"do": operation, "with": given, "named": named_data})
        while "do" in (reply := receive(self.channel)):  # it calls a function that it was given
            self.answer(reply)
        for index, data in reply.get("changed", {}).items():
            if type(value := arguments[int(index)]) in MUTABLE:
                change(value, self.decode(data))
        if "error" in reply:
            raise exception_named(*map(str, reply["error"]))
        return self.decode(reply["value"])

    def decode(self, data: Any) -> Any:
        return self.codec.decode(data, lambda number: Remote(self, number))

    def answer(self, request: dict[str, Any]) -> None:
        """Apply an operation here, and send the result with the arguments that it changed."""
        try:
            send(self.channel, self.result_of(request))
        except (Disconnected, OutOfTime):
            raise
        except BaseException as error:
            send(self.channel, {"error": described(error)})

    def result_of(self, request: dict[str, Any]) -> dict[str, Any]:
        if request["do"] not in self.allows:
            raise TypeError(f"{request['do']} is not possible here")
        arguments = [self.decode(one) for one in request["with"]]
        named = {name: self.decode(one) for name, one in request["named"].items()}
        before = {n: self.codec.encode(one) for n, one in enumerate(arguments) if type(one) in MUTABLE}
        value = self.codec.encode(OPERATIONS[request["do"]](*arguments, **named))
        after = {n: self.codec.encode(arguments[n]) for n in before}
        return {"value": value, "changed": {n: data for n, data in after.items() if data != before[n]}}


def change(value: Any, new: Any) -> None:
    """Give a mutable argument the content that the other side left in it."""
    if type(value) is type(new):
        value.clear()
        value.extend(new) if hasattr(value, "extend") else value.update(new)


def described(error: BaseException) -> list[str]:
    try:
        return [type(error).__name__, str(error)[:500]]
    except BaseException:
        return [type(error).__name__, ""]


class CandidateError(Exception):
    """The code raised an exception that is not a built-in one."""


def exception_named(name: str, message: str) -> Exception:
    """Return an exception of the other side; one that would end a loop of the test is a CandidateError."""
    kind = getattr(builtins, name, None)
    ends_loops = name in ("StopIteration", "StopAsyncIteration")
    if not ends_loops and isinstance(kind, type) and issubclass(kind, Exception):
        with suppress(TypeError):  # some need more than a message
            return kind(message)
    return CandidateError(f"{name}: {message}")


def run_code(channel: socket.socket, limits: Callable[[dict[str, Any]], None]) -> None:
    """Execute the code of a job, then answer calls. Nothing that this process does then is trusted."""
    send(channel, {"ready": True})
    job = receive(channel)
    limits(job)
    module = types.ModuleType("answer")
    sys.modules.update({"__main__": module, "answer": module})
    sys.argv, sys.dont_write_bytecode = ["answer"], True
    random.seed(0)
    peer = Peer(channel, allows=tuple(OPERATIONS))
    try:
        exec(compile(job["setup"], "setup", "exec", dont_inherit=True), module.__dict__)
        exec(compile(job["code"], "answer", "exec", dont_inherit=True), module.__dict__)
        peer.codec.objects.append(module)
    except BaseException as error:
        send(channel, {"error": described(error)})
        return
    send(channel, {"value": None})
    while True:
        peer.answer(receive(channel))


def verdict_of(job: dict[str, Any], channel: socket.socket) -> dict[str, Any]:
    """Run the tests one after the other. Those that were not run have failed for the reason of the end."""
    failures: list[str | None] = []
    signal.signal(signal.SIGALRM, raise_out_of_time)
    try:
        signal.setitimer(signal.ITIMER_REAL, job["seconds"], 0.5)  # again, if a test catches it
        run_tests(job, Peer(channel, allows=("call",)), failures)
        reason = ""
    except OutOfTime:
        reason = f"took longer than {job['seconds']:g} s"
    except Disconnected:
        reason = "the code ended its process, used too much memory, or sent something that is not a value"
    except BaseException as error:
        reason = ": ".join(described(error))
    signal.setitimer(signal.ITIMER_REAL, 0)
    return {"failures": [*failures, *(reason for _ in job["tests"][len(failures) :])]}


def raise_out_of_time(number: int, frame: types.FrameType | None) -> None:
    raise OutOfTime


def run_tests(job: dict[str, Any], peer: Peer, failures: list[str | None]) -> None:
    """Start the code and add the outcome of each test to the list."""
    send(peer.channel, {name: job[name] for name in ("code", "setup", "seconds", "memory")})
    started = receive(peer.channel)
    if "error" in started:
        raise exception_named(*map(str, started["error"]))
    base: dict[str, Any] = {"__name__": "tests", "__builtins__": builtins}
    sys.modules["tests"] = types.ModuleType("tests")  # dataclasses look up the module of a class
    exec(compile(job["setup"], "setup", "exec", dont_inherit=True), base)
    for test in job["tests"]:
        failures.append(failure_of(test, peer, dict(base), job["entry_point"]))


def failure_of(test: Any, peer: Peer, namespace: dict[str, Any], entry_point: str | None) -> str | None:
    """Run one test: a call with its expected result, or code. Return why it failed, or None."""
    try:
        if not isinstance(test, str):
            function = of_answer(peer, entry_point or "")
            result = function(*test["args"], **test.get("kwargs", {}))
            return None if same(result, test["expected"]) else f"returned {result!r:.200}"
        values = bind_names(test, peer, namespace, entry_point)
        asked = peer.asked
        exec(compile(test, "test", "exec", dont_inherit=True), namespace)
        if entry_point and callable(check := namespace.get("check")):
            check(namespace["candidate"])
        run_defined(namespace)
        return None if peer.asked > asked or values else UNUSED
    except (Disconnected, OutOfTime):
        raise
    except BaseException as error:
        return ": ".join(described(error)) or "failed"


def run_defined(namespace: dict[str, Any]) -> None:
    """Run what a test defines and pytest would collect: functions, classes and test cases of unittest."""
    for name, value in list(namespace.items()):
        with skippable():
            if isinstance(value, types.FunctionType) and is_test(name, value):
                finish(value())
            elif isinstance(value, type) and value.__module__ == namespace["__name__"]:
                if is_unittest(value):
                    run_unittest(value)
                elif name.startswith("Test") and not has_constructor(value):
                    run_class(value)


@contextmanager
def skippable() -> Iterator[None]:
    """Go on after a test that skips itself, as if it were not there."""
    try:
        yield
    except Exception as error:
        if not ("unittest" in sys.modules and isinstance(error, sys.modules["unittest"].SkipTest)):
            raise


def is_test(name: str, value: Any) -> bool:
    """Whether this is a test of pytest: a function `test_…` that needs no arguments."""
    if not name.startswith("test_") or not callable(value):
        return False
    parameters = inspect.signature(value).parameters.values()
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return all(one.default is not one.empty or one.kind in optional for one in parameters)


def has_constructor(kind: Any) -> bool:
    return kind.__init__ is not object.__init__ or kind.__new__ is not object.__new__


def run_class(kind: type) -> None:
    """Run the test methods of a class, each on an object of its own."""
    run_hook(kind, "setup_class", kind)
    for name in dir(kind):
        if name.startswith("test_") and is_test(name, method := getattr(one := kind(), name)):
            with skippable():
                run_hook(one, "setup_method", method)
                finish(method())
                run_hook(one, "teardown_method", method)
    run_hook(kind, "teardown_class", kind)


def run_hook(owner: Any, name: str, argument: Any) -> None:
    """Call what a class runs before or after its tests, if it is there; it may take the argument."""
    hook = getattr(owner, name, None)
    if hook is not None:
        hook(*[argument][: len(inspect.signature(hook).parameters)])


def run_unittest(kind: Any) -> None:
    """Run the test methods of a test case of unittest."""
    if getattr(kind, "__unittest_skip__", False):
        return
    kind.setUpClass()
    for name in dir(kind):
        if name.startswith("test") and callable(getattr(kind, name)):
            with skippable():
                kind(name).debug()
    kind.tearDownClass()


def is_unittest(kind: type) -> bool:
    return "unittest" in sys.modules and issubclass(kind, sys.modules["unittest"].TestCase)


def finish(returned: Any) -> None:
    """Run a test to its end if it is a coroutine."""
    if isinstance(returned, types.CoroutineType):
        import asyncio

        asyncio.run(returned)


def bind_names(test: str, peer: Peer, namespace: dict[str, Any], entry_point: str | None) -> bool:
    """Bind the names that a test uses and does not define: standard modules, and functions of the code.

    The code never provides a built-in name or a module, so it cannot replace `all` or `math`. Only its entry
    point may have such a name. Return whether the test uses a plain value of the code.
    """
    names: set[str] = set()
    own: set[str] = {*namespace, *dir(builtins)}
    for node in ast.walk(ast.parse(test)):
        if isinstance(node, ast.Name):
            (names if isinstance(node.ctx, ast.Load) else own).add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.arg):
            own.add(node.arg)
        elif isinstance(node, ast.alias):
            own.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            own.add(node.name)
    if entry_point:
        own.add(entry_point)
        namespace["candidate"] = namespace[entry_point] = of_answer(peer, entry_point)
    values = False
    for name in sorted(names - own):
        if name in sys.stdlib_module_names:
            namespace[name] = __import__(name)
        elif name not in namespace:
            with suppress(AttributeError):  # the test then fails with a NameError
                namespace[name] = of_answer(peer, name)
                values |= not isinstance(namespace[name], Remote)
    return values


def of_answer(peer: Peer, name: str) -> Any:
    """Return a function or value that the code defines."""
    return peer.ask("attr", Remote(peer, 0), name)


def same(result: Any, expected: Any) -> bool:
    """Whether a result is the expected one: sequences of any kind, floats up to rounding."""
    if isinstance(expected, list | tuple) and isinstance(result, list | tuple):
        return len(result) == len(expected) and all(map(same, result, expected))
    if isinstance(expected, dict) and isinstance(result, dict):
        return result.keys() == expected.keys() and all(same(result[key], expected[key]) for key in expected)
    if isinstance(expected, float) and isinstance(result, float | int) and not isinstance(result, bool):
        return math.isclose(result, expected, rel_tol=1e-9, abs_tol=1e-9)
    return isinstance(result, bool) == isinstance(expected, bool) and bool(result == expected)
