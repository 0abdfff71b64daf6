"""GGUF headers: what gguf writes is read, every malformed file is refused in one line."""

import os
import subprocess
import sys

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader
from support.gguf_files import array, info, key, random_blocks, raw, string, write
from support.refusals import refused

from qwenimg.common.formats.gguf import MAX_STRINGS
from qwenimg.common.formats.gguf_types import TYPES
from qwenimg.common.formats.headers import open_header

F32, Q8_0, Q4_K, U32, STRING, ARRAY = 0, 8, 12, 4, 8, 9
A = info("a", (4,), F32)


def aligned(value: int) -> bytes:
    return key("general.alignment", U32, value.to_bytes(4, "little"))


MALFORMED = {
    "magic alone": (b"GGUF", "cut short"),
    "version 1": (raw(version=1), "version 1"),
    "version 4": (raw(version=4), "version 4"),
    "big endian": (raw(version=3 << 24), "byte order"),
    "2^40 tensors": (raw(counts=(2**40, 0)), f"claims {2**40} tensors"),
    "2^40 keys": (raw(counts=(0, 2**40)), f"and {2**40} keys"),
    "a tensor that is not there": (raw(counts=(1, 0)), "cut short"),
    "an array of 2^40 in 100 bytes": (raw((array("a", 0, 2**40),)), "cut short"),
    "an array of 2^63 doubles": (raw((array("a", 12, 2**63),)), "cut short"),
    "an array of 2^40 strings": (raw((array("a", STRING, 2**40),)), f"more than {MAX_STRINGS} strings"),
    "an array of 10^6 strings, 3 of them there": (raw((array("a", STRING, 10**6, string("x") * 3),)), "cut short"),
    "an array of arrays": (raw((array("a", ARRAY, 1, bytes(20)),)), "an array of type 9"),
    "a key of 2^63": (raw(counts=(0, 1)) + (2**63).to_bytes(8, "little") + b"a", "a key of"),
    "a key of 3,000": (raw((key("k" * 3000, U32, bytes(4)),)), "a key of 3000 bytes"),
    "a value of 2 MiB": (raw((key("k", STRING, string(b"x" * (2 << 20))),)), "a value of 'k' of 2097152 bytes"),
    "a key twice": (raw((key("k", U32, bytes(4)),) * 2), "'k' twice"),
    "a key that is not UTF-8": (raw((key(b"\xff\xfe", U32, bytes(4)),)), "not UTF-8"),
    "a value of type 13": (raw((key("k", 13, bytes(8)),)), "unknown type 13"),
    "alignment 0": (raw((aligned(0),), (A,), bytes(16)), "alignment 0"),
    "alignment 24": (raw((aligned(24),), (A,), bytes(16)), "alignment 24"),
    "alignment 2^31": (raw((aligned(2**31),), (A,), bytes(16)), "alignment"),
    "alignment is a text": (raw((key("general.alignment", STRING, string("x")),), (A,), bytes(16)), "type 8"),
    "an empty name": (raw((), (info("", (4,), F32),), bytes(16)), "512"),
    "a name of 600": (raw((), (info("n" * 600, (4,), F32),), bytes(16)), "512"),
    "a name of 4,000": (raw((), (info("n" * 4000, (4,), F32),), bytes(16)), "4000 bytes"),
    "a name with escape codes": (raw((), (info("\x1b[2J", (4,), F32),), bytes(16)), r"\x1b[2J"),
    "a name twice": (raw((), (A, info("a", (4,), F32, 32)), bytes(48)), "'a' occurs twice"),
    "no dimension": (raw((), (info("a", (), F32),), bytes(4)), "0 dimensions"),
    "5 dimensions": (raw((), (info("a", (1,) * 5, F32),), bytes(4)), "5 dimensions"),
    "2^32 - 1 dimensions": (raw((), (string("a") + b"\xff" * 4,), bytes(99)), "dimensions"),
    "an empty dimension": (raw((), (info("a", (4, 0), F32),)), "shape"),
    "a dimension of 2^32": (raw((), (info("a", (2**32,), F32),), bytes(16)), "shape"),
    "a product of 2^64": (raw((), (info("a", (2**16,) * 4, F32),), bytes(16)), "too large"),
    "an offset of 2^63": (raw((), (info("a", (4,), F32, 2**63),), bytes(16)), "too large"),
    "type 4": (raw((), (info("a", (4,), 4),), bytes(16)), "unknown type 4"),
    "type 2^31": (raw((), (info("a", (4,), 2**31),), bytes(16)), "unknown type"),
    "rows of half a block": (raw((), (info("a", (48, 2), Q8_0),), bytes(102)), "no whole blocks of 32 (Q8_0)"),
    "rows of half a large block": (raw((), (info("a", (128, 2), Q4_K),), bytes(144)), "of 256 (Q4_K)"),
    "data cut short": (raw((), (A,), bytes(15)), "cut short"),
    "no data": (raw((), (A,)), "cut short"),
    "bytes after the data": (raw((), (A,), bytes(16 + 16 + 1)), "1 bytes after"),
    "overlap": (raw((), (A, info("b", (4,), F32, 0)), bytes(64)), "'b' overlaps"),
    "overlap by half": (raw((), (info("a", (16,), F32), info("b", (4,), F32, 32)), bytes(64)), "'b' overlaps"),
    "a hole": (raw((), (A, info("b", (4,), F32, 64)), bytes(80)), "'b' leaves a hole"),
    "a hole at the start": (raw((), (info("a", (4,), F32, 32),), bytes(48)), "hole"),
    "an offset that is not aligned": (raw((), (A, info("b", (4,), F32, 16)), bytes(64)), "'b' overlaps"),
    "a true shape of other size": (
        raw((array("comfy.gguf.orig_shape.a", 5, 2, np.array([2, 3], "<i4").tobytes()),), (A,), bytes(16)),
        "true shape [2, 3]",
    ),
    "a true shape below zero": (
        raw((array("comfy.gguf.orig_shape.a", 5, 2, np.array([-2, -2], "<i4").tobytes()),), (A,), bytes(16)),
        "true shape [-2, -2]",
    ),
    "one part of a split file": (raw((key("split.count", 2, b"\x02\0"),), (A,), bytes(16)), "split"),
}  # fmt: skip


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_is_refused(tmp_path, case):
    content, reason = MALFORMED[case]
    path = tmp_path / "weights.safetensors"  # its name says nothing
    path.write_bytes(content)
    text = refused(open_header, path)
    assert "weights.safetensors" in text and reason in text


def test_every_cut_is_refused(tmp_path):
    """A small file ended after each of its bytes, but for those in the padding behind its last tensor."""
    path = tmp_path / "a.gguf"
    write(path, {"a": (np.ones((3, 32), np.float32), "Q8_0"), "b": (np.ones(5, np.float32), "F32")}, "sd1")
    whole = path.read_bytes()
    end = max(stored.end for stored in open_header(path).tensors.values())
    for size in range(4, len(whole)):
        path.write_bytes(whole[:size])
        if size < end:
            assert "cut short" in refused(open_header, path)
        else:
            open_header(path).file.close()


def test_files_that_are_not_regular(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    assert "pipe" in refused(open_header, tmp_path / "fifo")
    assert "folder" in refused(open_header, tmp_path)
    assert "does not exist" in refused(open_header, tmp_path / "a.gguf")


LARGE = {
    "names with one emoji each": lambda: raw(
        (), tuple(info(f"{i:06}😀" + "n" * 450, (32,), F32, i * 128) for i in range(20_000))
    ),
    "keys with one emoji each": lambda: raw(
        tuple(key(f"{i:06}😀" + "k" * 2000, STRING, string("v" * 1000)) for i in range(10_000)), counts=(1, 10_000)
    ),
    "10^6 strings in arrays": lambda: raw((array("t", STRING, 10**6, string("ab") * 10**6),), counts=(1, 1)),
    "a header without end": lambda: raw((array("t", 0, 2**36),)) + bytes(34 << 20),
}


MEASURED = """
import resource, sys, time
from pathlib import Path
from qwenimg.common.base.errors import ModelError
from qwenimg.common.formats.headers import open_header

def peak():
    if sys.platform == "linux":  # where ru_maxrss begins with that of the parent
        return 1024 * int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

start, before = time.process_time(), peak()
try:
    open_header(Path(sys.argv[1]))
except ModelError as error:
    print(error)
print(time.process_time() - start, peak() - before)
"""


@pytest.mark.parametrize("case", LARGE)
@pytest.mark.sample(1)
def test_largest_headers_are_refused_in_time_and_memory(tmp_path, case):
    """In a process of its own, for its peak: a second and 300 MB above an idle start, as for any file."""
    path = tmp_path / "a.gguf"
    path.write_bytes(LARGE[case]())
    done = subprocess.run([sys.executable, "-c", MEASURED, str(path)], capture_output=True, text=True, check=True)
    *said, figures = done.stdout.splitlines()
    seconds, size = map(float, figures.split())
    print(f"{case}: {seconds:.2f} s, {size / 1e6:.0f} MB: {said}")
    assert len(said) == 1 and "a.gguf" in said[0]
    assert seconds < 1 and size < 300e6


# What gguf writes


def test_types_are_those_of_the_reference():
    theirs = {int(kind): (kind.name, *size) for kind, size in GGML_QUANT_SIZES.items()}
    assert {number: tuple(type) for number, type in TYPES.items()} == theirs


@pytest.mark.parametrize("alignment", [32, 64, 1024])
def test_files_of_the_package_are_read(tmp_path, alignment):
    rng = np.random.default_rng(1)
    tensors = {
        "blk.0.a.weight": (rng.standard_normal((3, 64)).astype(np.float32), "Q8_0"),
        "blk.0.k.weight": (random_blocks("Q4_K", 5, 512, 2), "Q4_K"),
        "conv.weight": (rng.standard_normal((4, 3, 2, 5)).astype(np.float32), "F16"),
        "bias": (rng.standard_normal(7).astype(np.float32), "BF16"),
        "odd": (rng.standard_normal((3, 5)).astype(np.float32), "F32"),
    }
    path = tmp_path / "x.safetensors"
    write(path, tensors, "qwen2vl", general__alignment=alignment, general__name="naïve 😀", qwen2vl__block_count=28)
    header = open_header(path)
    content = path.read_bytes()
    assert header.format == "GGUF" and header.metadata["general.architecture"] == "qwen2vl"
    assert header.metadata["general.name"] == "naïve 😀" and header.metadata["qwen2vl.block_count"] == "28"
    theirs = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
    assert list(header.tensors) == list(theirs) == list(tensors)
    for name, stored in header.tensors.items():
        assert stored.dtype == GGMLQuantizationType(theirs[name].tensor_type).name == tensors[name][1]
        assert stored.shape == tuple(int(size) for size in reversed(theirs[name].shape))
        assert content[stored.begin : stored.end] == theirs[name].data.tobytes()
        assert stored.begin % alignment == 0
    header.file.close()


def test_a_true_shape_and_a_vocabulary(tmp_path):
    """As ComfyUI's converter and llama.cpp's write them."""
    values = np.random.default_rng(2).standard_normal((9, 256)).astype(np.float32)
    path = tmp_path / "x.gguf"
    write(path, {"conv": (values, "Q8_0")}, "sd1", {"conv": (16, 16, 3, 3)})
    header = open_header(path)
    assert header.tensors["conv"].shape == (16, 16, 3, 3)
    header.file.close()
    words = array("tokenizer.ggml.tokens", STRING, 3, b"".join(string(word) for word in ("a", "", "é" * 40_000)))
    numbers = array("tokenizer.ggml.scores", 6, 3, bytes(12))
    path.write_bytes(raw((words, numbers, key("last", U32, b"\x05\0\0\0")), (A,), bytes(16)))
    header = open_header(path)
    assert header.metadata == {"last": "5"} and header.tensors["a"].shape == (4,)
    header.file.close()
