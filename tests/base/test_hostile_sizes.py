"""Limits come before the work: what a file of the largest size that is read, or one beyond it, takes of memory and
processor. Each in a process of its own, whose peak is not that of the tests before it."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from qwenimg.common.shapes import builtin

MB = 1 << 20
MOST = 310  # MB above the same process before the file is opened; the largest picture that is read takes 288
SECONDS = (
    4.0  # of processor time: the promise is one, and a machine at work takes up to three times as long for the same
)

MEASURE = """
import sys, time
from pathlib import Path
from qwenimg.cli import config
from qwenimg.common.base import config as config_file
from qwenimg.common.base.errors import QwenimgError
from qwenimg.common.jobs import prompt_file
from qwenimg.common.pictures import input as input_image
from qwenimg.common.prompts import vocabulary as tokenizer_files
from qwenimg.common.formats import files as component_files
from qwenimg.common.formats import safetensors as safetensors_header
from PIL import Image

def peak():
    return next(int(line.split()[1]) // 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))

path = Path(sys.argv[1])
config.path = lambda: path
before, begun = peak(), time.process_time()
try:
    {call}
    text = "read"
except QwenimgError as error:
    text = f"{{error.exit_code}} {{error}}"
print(peak() - before, time.process_time() - begun, text.encode("unicode_escape").decode(), sep="\\n")
"""

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of a process is read in /proc")


def measured(path: Path, call: str) -> str:
    """What became of `call` on the file at `path`: "read", or exit code and message; within the limits."""
    args = [sys.executable, "-c", MEASURE.format(call=call), str(path)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}  # the code that this test runs with
    ran = subprocess.run(args, capture_output=True, text=True, check=True, env=env)
    peak, seconds, text = ran.stdout.splitlines()
    print(f"{int(peak)} MB, {float(seconds):.2f} s: {text}")
    assert int(peak) < MOST and float(seconds) < SECONDS
    return text


def png(side: int, depth: int, colour: int, *, whole: bool) -> bytes:
    """A grey (0), RGB (2) or RGBA (6) PNG; without its pixels unless `whole`."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    row = b"\0" + b"\x55" * (side * depth * {0: 1, 2: 3, 6: 4}[colour] // 8)
    packed = zlib.compressobj(1)
    rows = [packed.compress(row) for _ in range(side if whole else 1)]
    head = struct.pack(">IIBBBBB", side, side, depth, colour, 0, 0, 0)
    body = chunk(b"IDAT", b"".join(rows) + packed.flush())
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + body + chunk(b"IEND", b"")


PROMPTS = "prompt_file.read_prompts(str(path))"
PICTURE = "input_image.read_image(path)"
JSON = "tokenizer_files.json_object(path)"
EMOJI = "\U0001f600"
CASES = {
    "60 MB of empty lines": ("p.txt", lambda: b"\n" * 60_000_000, PROMPTS, "at most 33,554,432"),
    "30 MB of empty lines": ("p.txt", lambda: b" \n" * 15_000_000, PROMPTS, "has no prompts"),
    "30 MB of comments": ("p.txt", lambda: b"#\n" * 15_000_000, PROMPTS, "has no prompts"),
    "30 MB of one comment": ("p.txt", lambda: b"#" * 30_000_000 + b"\na", PROMPTS, "read"),
    "one line": ("p.txt", lambda: b"a" * 30_000_000, PROMPTS, "p.txt:1: has more than 5,000,000 bytes"),
    "emoji in every prompt": ("p.txt", lambda: (EMOJI + "a" * 99_900 + "\n").encode() * 330, PROMPTS, "read"),
    "8000x8000": ("a.png", lambda: png(8000, 8, 2, whole=False), PICTURE, "8000x8000; at most 36 megapixels"),
    "64 MP of 16-bit grey": ("a.png", lambda: png(8000, 16, 0, whole=False), PICTURE, "at most 36 megapixels"),
    "36 MP of RGBA": ("a.png", lambda: png(6000, 8, 6, whole=True), PICTURE, "read"),
    "tokenizer with one emoji": (
        "tokenizer.json", lambda: b'{"a": "' + EMOJI.encode() + b"a" * (24 * MB - 20) + b'"}', JSON, "read"),
    "tokenizer of 60 MB": ("tokenizer.json", lambda: b" " * (60 * MB), JSON, "at most 25165824"),
    "tokenizer of many names": (
        "tokenizer.json",
        lambda: ("{" + ",".join(f'"{EMOJI}{i:x}":[1,2]' for i in range(400_000)) + "}").encode(), JSON, "read"),
    "vocabulary": (
        "vocab.json", lambda: json.dumps({f"é{i:x}": i for i in range(450_000)}).encode(), JSON, "at most 8388608"),
    "merges": (
        "merges.txt", lambda: b"a b\n" * (2 * MB - 1), "tokenizer_files._merges_txt(path)", "more than 524,288 lines"),
    "configuration": ("config.json", lambda: b'{"a":"' + EMOJI.encode() + b"a" * (8 * MB - 20) + b'"}',
                      "config_file.read_json(path)", "read"),
    "index of shards": ("m.index.json", lambda: b"{" + b" " * 31 * MB + b"}",
                        "component_files._read_weight_map(path)", "at most 8388608"),
    "header": (
        "m.safetensors",
        lambda: (24 * MB).to_bytes(8, "little") + b'{"a":"' + EMOJI.encode() + b"a" * (24 * MB - 12) + b'"}',
        "safetensors_header.read_header(path)", "5 "),
    "dotted key of 40 kB": ("config.toml", lambda: b"a" + b".a" * 20_000 + b"=1", "config.defaults()", "2 "),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@pytest.mark.sample(1)
def test_it_is_refused_or_read_within_the_limits(tmp_path: Path, case: str) -> None:
    name, make, call, expected = CASES[case]
    (tmp_path / name).write_bytes(make())
    assert expected in measured(tmp_path / name, call)


@pytest.mark.sample(0)
def test_a_tokenizer_is_read_before_a_framework_is(tmp_path: Path) -> None:
    """What a hostile one takes does not come on top of what a framework takes."""
    copied = shutil.copytree(builtin.folder(), tmp_path / "m")
    for name in ("tokenizer.json", "vocab.json"):
        (copied / "tokenizer" / name).write_bytes(b'{"a": "' + EMOJI.encode() + b"a" * (8 * MB - 20) + b'"}')
    text = measured(copied, "import qwenimg; qwenimg.load(path)")
    assert text.startswith("5 ") and "tokenizer" in text
