"""Files of `torch.save`: read as torch itself reads them, and never run."""

from __future__ import annotations

import io
import os
import pickle
import pickletools
import struct
import time
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.safe_files import closed_on_error, open_regular
from qwenimg.common.formats import pth_file, tensor_pickle
from qwenimg.common.formats.stored import Header, Stored, TensorSlice, raw


def open_pth(path: Path) -> Header:
    file = open_regular(path)
    with closed_on_error(file):
        return pth_file.parse(file)


def saved(path: Path, value: Any, *, old: bool = False) -> Path:
    torch.save(value, path, _use_new_zipfile_serialization=not old)
    return path


def tensors() -> OrderedDict[str, Any]:
    table = OrderedDict((f"body.{i}.weight", torch.randn(2, 3, i + 1)) for i in range(3))
    table["half"] = torch.randn(5).half()
    table["bf16"] = torch.randn(5).bfloat16()
    table["parameter"] = torch.nn.Parameter(torch.ones(2))
    table["scalar"], table["empty"] = torch.tensor(3.0), torch.zeros(0, 4)
    table["part"] = torch.arange(10.0)[3:7]
    table["shared"] = table["body.0.weight"]
    table["double"], table["whole"] = torch.ones(2, dtype=torch.float64), torch.tensor([1, 2])
    return table


@pytest.mark.parametrize("old", [False, True])
def test_tensors_are_those_that_torch_reads(tmp_path: Path, old: bool) -> None:
    table = tensors()
    table._metadata = OrderedDict(version=1)  # type: ignore[attr-defined]
    path = saved(tmp_path / "u.pth", {"params_ema": table, "iter": 5, "lr": [1e-4, None, True]}, old=old)
    header = open_pth(path)
    theirs = torch.load(path, weights_only=True)["params_ema"]
    assert header.format == "PyTorch" and header.tensors.keys() == {f"params_ema.{name}" for name in theirs}
    for name, stored in header.tensors.items():
        wanted = theirs[name.removeprefix("params_ema.")].detach()
        assert stored.shape == tuple(wanted.shape)
        bits = header.file.read(stored.begin, stored.end - stored.begin)
        assert bits == wanted.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(), name
    first = header.tensors["params_ema.body.2.weight"]
    assert np.array_equal(raw(TensorSlice("x", header.file, *first)), theirs["body.2.weight"].numpy())
    header.file.close()


def test_files_of_python_2_have_their_texts(tmp_path: Path) -> None:
    """In protocol 2 of Python 2 names are byte strings."""
    data = b"\x80\x02}q\x00U\x01aK\x05s."
    assert tensor_pickle.read(data) == ({"a": 5}, len(data))


class Evil:
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, ("/tmp/evil-was-here",)


def archive(path: Path, data: bytes, method: int = zipfile.ZIP_STORED, name: str = "archive/data.pkl") -> Path:
    with zipfile.ZipFile(path, "w", method) as made:
        made.writestr(name, data)
    return path


def hostile() -> dict[str, tuple[bytes, str]]:
    """Pickles, and what is said of each."""
    deep = b"\x80\x02" + b")" + b"\x85" * 200_000 + b"K\x01s."
    nested = b"\x80\x02}q\x00" + b"".join(
        b"}q" + bytes([i + 1]) + b"h" + bytes([i + 1]) + b"X\x01\0\0\0ah" + bytes([i])
        + b"sX\x01\0\0\0bh" + bytes([i]) + b"s" for i in range(60)
    ) + b"."  # fmt: skip
    itself = b"\x80\x02}q\x00X\x01\0\0\0ah\x00s."
    return {
        "a call": (pickle.dumps({"a": Evil()}, 2), "mkdir"),
        "a call, protocol 4": (pickle.dumps({"a": Evil()}, 4), "mkdir"),
        "builtins": (b"\x80\x02c__builtin__\neval\nX\x01\0\0\x001\x85R.", "eval"),
        "a module": (pickle.dumps(torch.nn.Linear(1, 1), 2), "calls torch.nn.modules.linear.Linear"),
        "numpy": (pickle.dumps({"a": np.ones(3)}, 2), "calls _codecs.encode"),
        "no table": (pickle.dumps([1, 2], 2), "no table"),
        "nothing": (b"", "cut short"),
        "no stop": (b"\x80\x02}", "cut short"),
        "a large text": (b"\x80\x02X\xff\xff\xff\x7f.", "at most"),
        "a negative text": (b"\x80\x02T\xff\xff\xff\xff.", "at most"),
        "a memo that is not there": (b"\x80\x02h\x05.", "broken"),
        "an item of a number": (b"\x80\x02K\x01K\x01K\x01s.", "broken"),
        "a key that is a list": (b"\x80\x02}]K\x01s.", "no names"),
        "a deep key": (b"\x80\x02}" + b")" + b"\x85" * 200_000 + b"K\x01s.", "no names"),
        "deep": (deep, "broken"),
        "itself": (itself, "printable characters"),
        "doubled sixty times": (nested, ""),
        "an attribute of a tensor": (b"\x80\x02K\x01Nb.", "broken"),
        "a storage of text": (b"\x80\x02X\x07\0\0\0storageX\x01\0\0\0aX\x01\0\0\x000NK\x05tQ.", "broken"),
        "a mark alone": (b"\x80\x02(.", "broken"),
        "no mark": (b"\x80\x02t.", "broken"),
        "not UTF-8": (b"\x80\x02X\x02\0\0\0\xff\xfe.", "UTF-8"),
        "many opcodes": (b"\x80\x02" + b"N0" * 600_000 + b".", "opcode"),
        "many values": (b"\x80\x02" + b"N" * 1_200_000 + b".", "more than"),
    }


@pytest.mark.parametrize("name", hostile())
@pytest.mark.sample(8)
def test_hostile_pickles_are_refused_in_a_line(tmp_path: Path, name: str) -> None:
    data, said = hostile()[name]
    path = archive(tmp_path / "u.pth", data)
    start = time.process_time()
    with pytest.raises(ModelError) as caught:
        header = open_pth(path)
        header.file.close()
        raise ModelError(f"{path.name}: no tensors") if not header.tensors else AssertionError(header.tensors)
    assert time.process_time() - start < 3
    text = str(caught.value)
    assert said in text and "u.pth" in text and len(text) <= 300 and text.isprintable()
    assert not Path("/tmp/evil-was-here").exists()


def test_archives_that_are_none_of_torch(tmp_path: Path) -> None:
    good = pickle.dumps({}, 2)
    cases = {
        "compressed": (archive(tmp_path / "a.pth", good, zipfile.ZIP_DEFLATED), "compressed"),
        "other": (archive(tmp_path / "b.zip", good, name="word/document.xml"), "none of PyTorch"),
        "bare": (archive(tmp_path / "c.pth", good, name="data.pkl"), "none of PyTorch"),
        "large": (archive(tmp_path / "d.pth", bytes(pth_file.MAX_PICKLE + 1)), "at most"),
    }
    for path, said in cases.values():
        with pytest.raises(ModelError, match=said):
            open_pth(path)
    whole = saved(tmp_path / "whole.pth", tensors()).read_bytes()
    for cut in (5, 30, 100, len(whole) // 2, len(whole) - 1, len(whole) - 30):
        (tmp_path / "cut.pth").write_bytes(whole[:cut])
        with pytest.raises(ModelError, match=r"cut\.pth"):
            open_pth(tmp_path / "cut.pth")
    whole = saved(tmp_path / "old.pth", tensors(), old=True).read_bytes()
    for cut in (2, 30, 300, len(whole) // 2, len(whole) - 1):
        (tmp_path / "cut.pth").write_bytes(whole[:cut])
        with pytest.raises(ModelError, match=r"cut\.pth"):
            open_pth(tmp_path / "cut.pth")


def test_tensors_that_are_not_in_their_own_order_are_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "u.pth", {"a": torch.ones(3, 4).t()})
    with pytest.raises(ModelError, match="own order"):
        open_pth(path)
    path = saved(tmp_path / "u.pth", {"a": torch.ones(4)})
    data = path.read_bytes()
    place = data.index(b"K\x04\x85")  # the shape
    path.write_bytes(data[:place] + b"K\x05" + data[place + 2 :])
    with pytest.raises(ModelError, match="does not fit into its values"):
        open_pth(path)


def test_large_archives_have_their_sizes_in_another_field(tmp_path: Path) -> None:
    """Sizes of more than 32 bits: the numbers of a directory with zip64 fields are taken."""
    path = saved(tmp_path / "u.pth", {"a": torch.ones(4)})
    data = bytearray(path.read_bytes())
    place = data.index(b"PK\x01\x02")
    stop = data.index(b"PK\x06\x06") if b"PK\x06\x06" in data else data.index(b"PK\x05\x06")
    entries = zipfile.ZipFile(io.BytesIO(data)).infolist()
    directory = b""
    for _ in entries:
        fields = list(struct.unpack_from("<4s6H3I5H2I", data, place))
        name = data[place + 46 : place + 46 + fields[10]]
        place += 46 + fields[10] + fields[11] + fields[12]
        extra = struct.pack("<HHQQQ", 1, 24, fields[9], fields[8], fields[16])
        fields[8] = fields[9] = fields[16] = 0xFFFFFFFF
        fields[11], fields[12] = len(extra), 0
        directory += struct.pack("<4s6H3I5H2I", *fields) + name + extra
    start = data.index(b"PK\x01\x02")
    assert stop >= place
    end = struct.pack("<4sQ2H2I4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, len(entries), len(entries), len(directory), start)
    locator = struct.pack("<4sIQI", b"PK\x06\x07", 0, start + len(directory), 1)
    last = struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    path.write_bytes(data[:start] + directory + end + locator + last)
    header = open_pth(path)
    assert header.tensors["a"].shape == (4,)
    header.file.close()


def test_only_regular_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.pth")
    for path in (tmp_path / "pipe.pth", tmp_path, tmp_path / "none.pth"):
        with pytest.raises(ModelError):
            open_pth(path)


def test_the_opcodes_are_those_that_torch_writes(tmp_path: Path) -> None:
    """Every opcode in a file of torch is read, and what is read has no meaning but Python's."""
    with zipfile.ZipFile(saved(tmp_path / "u.pth", {"params": tensors()})) as made:
        data = made.read("u/data.pkl")
    written = {opcode.name for opcode, _, _ in pickletools.genops(data)}
    assert written <= {
        "PROTO", "EMPTY_DICT", "BINPUT", "LONG_BINPUT", "MARK", "BINUNICODE", "GLOBAL", "EMPTY_TUPLE", "REDUCE",
        "TUPLE", "BINPERSID", "BININT1", "BININT2", "BININT", "TUPLE1", "TUPLE2", "TUPLE3", "NEWFALSE", "NEWTRUE",
        "BINGET", "LONG_BINGET", "SETITEM", "SETITEMS", "STOP",
    }, written  # fmt: skip
    assert Stored._fields == ("dtype", "shape", "begin", "end")
