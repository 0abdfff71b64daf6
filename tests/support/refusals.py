"""What every refusal of a bad file has in common, and safetensors files made of raw bytes."""

import json
import struct
import time

import pytest

from qwenimg.common.base.errors import ModelError

SECONDS = 1.0  # processor time within which any file must be refused: the wall clock of a shared machine flakes


def refused(call, *args, **kwargs):
    """The text of the ModelError that `call` raises: one printable line, at most 300 characters, within a second."""
    start = time.process_time()
    with pytest.raises(ModelError) as caught:
        call(*args, **kwargs)
    seconds = time.process_time() - start
    text = str(caught.value)
    assert caught.value.exit_code == 5
    assert text.isprintable() and len(text) <= 300, text
    assert seconds < SECONDS, f"{seconds:.2f} s to refuse: {text}"
    print(f"{seconds * 1e3:.1f} ms: {text}")
    return text


def safetensors_bytes(header, data=b"", length=None):
    """A file of `header` (bytes, text, or a table to be written as JSON) and `data`, claiming `length` if given."""
    if not isinstance(header, (bytes, str)):
        header = json.dumps(header)
    raw = header if isinstance(header, bytes) else header.encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def tensor(shape, begin, end, dtype="F32"):
    """One entry of a header."""
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
