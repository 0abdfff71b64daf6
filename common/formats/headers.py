"""The header of a weight file. The format is recognised by the first bytes, never by the name."""

from __future__ import annotations

from pathlib import Path

from qwenimg.common.base.safe_files import closed_on_error, open_regular
from qwenimg.common.formats import gguf, pth_file, safetensors
from qwenimg.common.formats.stored import Header


def open_header(path: Path) -> Header:
    """Return the header of the safetensors or GGUF file `path`. Raises ModelError. The caller closes `Header.file`."""
    file = open_regular(path)
    with closed_on_error(file):
        first = file.read(0, min(file.size, len(gguf.MAGIC)))
        return gguf.parse(file) if first == gguf.MAGIC else safetensors.parse(file)


def open_weights(path: Path) -> Header:
    """Return the header of a file of weights, also of one that `torch.save` wrote. Raises ModelError. The caller closes
    `Header.file`."""
    file = open_regular(path)
    with closed_on_error(file):
        if pth_file.is_pth(file):
            return pth_file.parse(file)
    file.close()
    return open_header(path)


def peek(path: Path) -> Header:
    """Return the header of the file `path`, which is closed again. Raises ModelError."""
    header = open_header(path)
    header.file.close()
    return header
