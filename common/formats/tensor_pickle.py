"""PyTorch's pickles as data: the few opcodes that a table of tensors needs, and no call of anything.

`torch.save` writes the names and shapes of tensors as a pickle, a program of a small machine that may call any function
of Python. `read` runs no such program: it knows the opcodes of tables, lists, numbers and texts, and of calls only the
constructors of a tensor and an ordered table, which become data here. Any other name in the file is refused.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, NamedTuple

from qwenimg.common.base.shape import Shape
from qwenimg.common.base.text import clean

MAX_VALUES = 1_000_000  # opcodes of a pickle; a network of 700 tensors has 30,000
MAX_TEXT = 4096  # bytes of one text

STORAGES = {
    "FloatStorage": "F32", "HalfStorage": "F16", "BFloat16Storage": "BF16", "DoubleStorage": "F64",
    "LongStorage": "I64", "IntStorage": "I32", "ShortStorage": "I16", "CharStorage": "I8", "ByteStorage": "U8",
    "BoolStorage": "BOOL",
}  # fmt: skip
"""The dtype of each kind of storage, by the name of its class in torch."""
_PYTORCH = "torch"  # the name of its module in pickles
_CALLS = {
    ("collections", "OrderedDict"): "table",
    (f"{_PYTORCH}._utils", "_rebuild_tensor_v2"): "tensor",
    (f"{_PYTORCH}._utils", "_rebuild_tensor"): "tensor",
    (f"{_PYTORCH}._utils", "_rebuild_parameter"): "parameter",
    ("__builtin__", "set"): "set",  # among the attributes of a ParameterDict
}
_PARAMETERS = (f"{_PYTORCH}.nn.modules.container", "ParameterDict")  # a table, in older embeddings


class PickleFault(ValueError):
    """A fault of a pickle, for a message about its file."""


class Storage(NamedTuple):
    """A run of values of the file, by its key there."""

    dtype: str
    key: str
    values: int


@dataclass(frozen=True)
class TensorRecord:
    """A tensor as the pickle describes it: a storage, the first value of it, and the shape."""

    storage: Storage
    offset: int
    shape: Shape


class _Mark:
    """The place on the stack where the items of a collection begin."""


class _Name(NamedTuple):
    """A class or function that the pickle names."""

    module: str
    name: str


_INTEGERS = {b"K": ("<B", 1), b"M": ("<H", 2), b"J": ("<i", 4)}
_CONSTANTS = {b"N": None, b"\x88": True, b"\x89": False}
_TEXTS = {b"X": ("<I", 4), b"\x8c": ("<B", 1), b"U": ("<B", 1), b"T": ("<i", 4)}
_GETS = {b"h": ("<B", 1), b"j": ("<I", 4)}
_PUTS = {b"q": ("<B", 1), b"r": ("<I", 4)}
_SKIPPED = {b"\x80": 1, b"\x95": 8}  # the protocol, and the length of a frame
_TUPLES = {b"\x85": 1, b"\x86": 2, b"\x87": 3}


def read(data: bytes, start: int = 0) -> tuple[Any, int]:
    """Return the value of the pickle that begins at `start`, and the position after its end. A value is a table, list,
    tuple, text, number or `TensorRecord`. Raises PickleFault."""
    machine = _Machine(data, start)
    try:
        return machine.run(), machine.at
    except PickleFault:
        raise
    except (IndexError, struct.error):
        raise PickleFault("its pickle is cut short or broken") from None
    except (TypeError, KeyError, ValueError):  # a key that cannot be one, an item of what is no table
        raise PickleFault("its pickle is broken") from None


class _Machine:
    def __init__(self, data: bytes, start: int) -> None:
        self.data, self.at = data, start
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.count = 0

    def run(self) -> Any:
        while (code := self.take(1)) != b".":
            self.count += 1
            if self.count > MAX_VALUES:
                raise PickleFault(f"its pickle has more than {MAX_VALUES:,} values")
            self.step(code)
        if len(self.stack) != 1 or self.stack[0] is _Mark:
            raise PickleFault("its pickle is broken")
        return self.stack[0]

    def take(self, count: int) -> bytes:
        part = self.data[self.at : self.at + count]
        if len(part) != count:
            raise PickleFault("its pickle is cut short")
        self.at += count
        return part

    def number(self, form: str, size: int) -> int:
        value: int = struct.unpack(form, self.take(size))[0]
        return value

    def text(self, length: int) -> str:
        if not 0 <= length <= MAX_TEXT:
            raise PickleFault(f"its pickle has a text of {length:,} bytes; at most {MAX_TEXT:,} are read")
        try:
            return self.take(length).decode("utf-8")
        except UnicodeDecodeError:
            raise PickleFault("its pickle has a text that is not UTF-8") from None

    def line(self) -> str:
        end = self.data.find(b"\n", self.at, self.at + MAX_TEXT)
        if end < 0:
            raise PickleFault("its pickle is cut short or broken")
        text = self.text(end - self.at)
        self.at = end + 1
        return text

    def marked(self) -> list[Any]:
        """Take the values above the last mark."""
        place = len(self.stack) - 1
        while self.stack[place] is not _Mark:
            place -= 1
            if place < 0:
                raise PickleFault("its pickle is broken")
        values = self.stack[place + 1 :]
        del self.stack[place:]
        return values

    def step(self, code: bytes) -> None:
        push = self.stack.append
        if code in _INTEGERS:
            push(self.number(*_INTEGERS[code]))
        elif code in _TEXTS:
            push(self.text(self.number(*_TEXTS[code])))
        elif code in _GETS:
            push(self.memo[self.number(*_GETS[code])])
        elif code in _PUTS:
            self.memo[self.number(*_PUTS[code])] = self.stack[-1]
        elif code == b"\x94":  # MEMOIZE
            self.memo[len(self.memo)] = self.stack[-1]
        elif code in _CONSTANTS:
            push(_CONSTANTS[code])
        elif code in _SKIPPED:
            self.take(_SKIPPED[code])
        elif code == b"\x8a":  # LONG1
            push(int.from_bytes(self.take(self.number("<B", 1)), "little", signed=True))
        elif code == b"G":  # BINFLOAT
            push(struct.unpack(">d", self.take(8))[0])
        elif code == b"(":
            push(_Mark)
        else:
            self.build(code)

    def build(self, code: bytes) -> None:
        """Run an opcode that makes or changes a collection, or names something."""
        push, pop = self.stack.append, self.stack.pop
        if code == b"}":
            push({})
        elif code == b"]":
            push([])
        elif code == b")":
            push(())
        elif code == b"t":
            push(tuple(self.marked()))
        elif code in _TUPLES:
            values = [pop() for _ in range(_TUPLES[code])]
            push(tuple(values[::-1]))
        elif code == b"a":
            value = pop()
            _checked(self.stack[-1], list).append(value)
        elif code == b"e":
            values = self.marked()
            _checked(self.stack[-1], list).extend(values)
        elif code == b"s":
            value, key = pop(), pop()
            _put(self.stack[-1], [key], [value])
        elif code == b"u":
            values = self.marked()
            _put(self.stack[-1], values[::2], values[1::2])
        elif code == b"c":
            push(_Name(self.line(), self.line()))
        elif code == b"\x93":  # STACK_GLOBAL
            name, module = pop(), pop()
            push(_Name(_checked(module, str), _checked(name, str)))
        elif code == b"R":
            arguments, name = pop(), pop()
            push(_called(name, _checked(arguments, tuple)))
        elif code == b"\x81":  # NEWOBJ
            arguments, name = pop(), pop()
            if _checked(name, _Name) != _PARAMETERS or arguments != ():
                raise _no_tensor(name)
            push({})
        elif code == b"b":  # the attributes of an object: those of an ordered table say nothing here
            state, table = pop(), _checked(self.stack[-1], dict)
            parameters = state.get("_parameters") if isinstance(state, dict) else None
            if isinstance(parameters, dict) and not table:
                table.update(parameters)
        elif code == b"Q":
            push(_storage(_checked(pop(), tuple)))
        else:
            raise PickleFault(
                f"its pickle has opcode {code!r}, which no table of tensors needs: save the weights alone"
            )


def _checked(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise PickleFault("its pickle is broken")
    return value


def _put(table: Any, keys: list[Any], values: list[Any]) -> None:
    """Add items to a table. Python's own hash of a deep tuple as a key would overflow the stack of the process."""
    if not all(isinstance(key, str | int) for key in keys):
        raise PickleFault("its pickle has a table whose keys are no names")
    _checked(table, dict).update(zip(keys, values, strict=True))


def _called(name: Any, arguments: tuple[Any, ...]) -> Any:
    """Return the data that a call stands for."""
    what = _CALLS.get(_checked(name, _Name))
    if what is None:
        raise _no_tensor(name)
    if what == "table" and not arguments:
        return {}
    if what == "set":
        return []
    if what == "parameter" and arguments:
        return _checked(arguments[0], TensorRecord)
    if what == "tensor" and len(arguments) >= 4:
        return _tensor(*arguments[:4])
    raise PickleFault("its pickle is broken")


def _no_tensor(name: _Name) -> PickleFault:
    shown = clean(f"{name.module}.{name.name}", 60)
    return PickleFault(f"its pickle calls {shown}, which is no tensor; save the weights alone, as safetensors")


def _tensor(storage: Any, offset: Any, shape: Any, strides: Any) -> TensorRecord:
    _checked(storage, Storage)
    numbers = (offset, *_checked(shape, tuple), *_checked(strides, tuple))
    if any(type(one) is not int or not 0 <= one < 2**62 for one in numbers) or len(shape) != len(strides):
        raise PickleFault("its pickle has a tensor whose shape is not of whole numbers")
    if len(shape) > 8:
        raise PickleFault("its pickle has a tensor of more than 8 dimensions")
    step = 1
    for size, stride in zip(shape[::-1], strides[::-1], strict=True):
        if stride != step and size > 1:
            raise PickleFault(f"a tensor of shape {list(shape)} is not stored in its own order (strides)")
        step *= size
    return TensorRecord(storage, offset, shape)


def _storage(identity: tuple[Any, ...]) -> Storage:
    """Return the storage that a persistent id names: ('storage', class, key, place, values), and in old files a
    view."""
    if len(identity) not in (5, 6) or identity[0] != "storage" or identity[5:] not in ((), (None,)):
        raise PickleFault("its pickle names something that is no storage of values")
    _, kind, key, _, values = identity[:5]
    _checked(kind, _Name)
    if kind.module != _PYTORCH or kind.name not in STORAGES:
        raise PickleFault(f"its pickle has {clean(f'{kind.module}.{kind.name}', 60)}, which is no storage of numbers")
    if type(values) is not int or not 0 <= values < 2**40:
        raise PickleFault("its pickle has a storage whose size is no number")
    return Storage(STORAGES[kind.name], _checked(key, str), values)
