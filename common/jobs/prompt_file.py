"""Reading of prompt files: each line is a prompt, a JSON object of options, or a comment."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

from qwenimg.common.base.arguments import home
from qwenimg.common.base.errors import ModelError, UsageError
from qwenimg.common.base.safe_files import bad, kind, open_regular
from qwenimg.common.base.strict_json import strict_json
from qwenimg.common.base.text import clean
from qwenimg.common.jobs.image_options import MAX_PICTURES, Options, option_in, parse, parse_json
from qwenimg.common.prompts.check import MAX_CHARACTERS
from qwenimg.common.prompts.templates import begins_with_choice

MAX_PROMPT_FILE = 32 << 20  # bytes
MAX_LINE = 5_000_000  # bytes: two prompts of the largest size fit, \\u-escaped
_NOTHING = re.compile(rb"(?:\s++|#[^\n]*+)*+")  # blank lines and comments, from the start of a line

Line: TypeAlias = tuple[str, Options | ModelError]
"""The place of a line, `prompts.txt:3`, and its options or its fault."""


def read_prompts(source: str) -> list[Line]:
    """Read a prompt file (`-`: standard input). Return each line that is not blank.

    A line that starts with # is left out, one that starts with { is a JSON object unless that begins a choice such as
    {a|b}, any other a prompt. Raises ModelError if the file as a whole cannot be used."""
    name, raw = ("standard input", _read_input()) if source == "-" else (source, _read_file(Path(home(source))))
    lines: list[Line] = []
    for number, line in lines_with_text(raw.removeprefix(b"\xef\xbb\xbf")):
        where = f"{name}:{number}"
        if len(lines) > MAX_PICTURES:
            raise bad(where, f"more than {MAX_PICTURES} prompts; split the file")
        if len(line) > MAX_LINE:
            raise bad(where, f"has more than {MAX_LINE:,} bytes; a prompt has at most {MAX_CHARACTERS:,} characters")
        try:
            lines.append((where, _options_of(line, where)))
        except ModelError as error:
            lines.append((where, error))
    if not lines:
        raise bad(name, "has no prompts; give one on each line")
    return lines


def lines_with_text(raw: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the number, from 1, and the text of each line that is neither blank nor a comment, without leading blanks.

    Millions of blank lines take no memory. A line that is too long is cut to one byte more than MAX_LINE."""
    number = begin = 0
    while match := _NOTHING.match(raw, begin):
        start = match.end()
        if start == len(raw):
            return
        number += raw.count(b"\n", begin, start)
        end = raw.find(b"\n", start)
        begin = len(raw) if end < 0 else end
        yield number + 1, raw[start : min(begin, start + MAX_LINE + 1)]


def _options_of(line: bytes, where: str) -> Options:
    try:
        prompt = line.decode("utf-8").strip()
    except UnicodeDecodeError as error:
        raise bad(where, f"is not UTF-8 (byte {error.start})") from None
    if prompt.startswith("{") and not begins_with_choice(prompt[:MAX_CHARACTERS]):
        return _object(line.strip(), where)
    if option := option_in(prompt):
        example = '{"prompt": "a cat", "steps": 20}'
        raise bad(
            where, f"{option} is no option in a line of text; give it outside the file, or a line such as {example}"
        )
    return {"prompt": prompt}


def _object(line: bytes, where: str) -> Options:
    data = strict_json(line, where, depth=2, values=100)
    if not isinstance(data, dict):
        raise bad(where, "is not a JSON object")
    try:
        return parse(parse_json(data))
    except UsageError as error:
        raise bad(where, str(error)) from None


def _read_file(path: Path) -> bytes:
    if kind(path) == "other" and path.is_fifo():  # as `<(command)` gives
        raise bad(path, "is a pipe; send the prompts to standard input, with `command | qwenimg --prompt-file -`")
    with contextlib.closing(open_regular(path)) as file:
        if file.size > MAX_PROMPT_FILE:
            raise bad(path, f"has {file.size:,} bytes; a prompt file has at most {MAX_PROMPT_FILE:,}")
        return file.read(0, file.size)


def _read_input() -> bytes:
    if sys.stdin is None:
        raise ModelError("--prompt-file -: there is no standard input")
    try:
        raw = sys.stdin.buffer.read(MAX_PROMPT_FILE + 1)
    except OSError as error:  # it is a folder, or open for writing only
        raise ModelError(f"standard input: cannot be read: {clean(error.strerror or error, 80)}") from None
    if len(raw) > MAX_PROMPT_FILE:
        raise ModelError(f"standard input: more than {MAX_PROMPT_FILE:,} bytes of prompts")
    return raw
