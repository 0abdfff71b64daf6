"""JSON from untrusted files: no duplicate names, no NaN, bounded depth, length and digits."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from itertools import accumulate
from pathlib import Path
from typing import NoReturn

from qwenimg.common.base.safe_files import bad
from qwenimg.common.base.text import clean

MAX_DIGITS = 20  # the digits of 2**64
MAX_FLOAT = 400  # characters of a number with a fraction or an exponent
_PAIR = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def strict_json(
    raw: bytes, path: Path | str, *, depth: int, values: int, infinities: bool = False, halves: bool = True
) -> object:
    """Parse `raw` as JSON: UTF-8 without byte order mark, no duplicate key, no NaN, no infinity unless `infinities`,
    integers of at most 20 digits, nested at most `depth` deep, at most about `values` values. Without `halves`, no half
    of a surrogate pair, which is no character; recipes have some, for names of files. Raises ModelError."""
    if raw.startswith((b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")):
        raise bad(path, "starts with a byte order mark: save it as UTF-8 without one")
    unescaped = raw.replace(b"\\\\", b"  ").replace(b'\\"', b"  ")
    if not halves and b"\\u" in unescaped and _SURROGATE.search(_PAIR.sub(b"", unescaped)):
        raise bad(path, "has half of a surrogate pair (\\ud800 to \\udfff), which is no character; leave it out")
    _check_structure(unescaped, path, depth, values)
    try:
        data: object = json.loads(
            raw.decode("utf-8"),
            object_pairs_hook=_no_duplicates,
            parse_int=_int,
            parse_float=_float,
            parse_constant=_infinity if infinities else _constant,
        )
    except UnicodeDecodeError as error:
        raise bad(path, f"is not UTF-8 (byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise bad(path, f"is not JSON ({error.msg}, character {error.pos})") from None
    except ValueError as error:
        raise bad(path, f"is not JSON as expected: {error}") from None
    return data


def _check_structure(unescaped: bytes, path: Path | str, depth: int, values: int) -> None:
    """Check depth and number of values before the parser, which recurses and allocates."""
    crowded = unescaped.count(b'"') > values
    structure = b"" if crowded else re.sub(rb'"[^"]*"', b"", unescaped).translate(None, _NOT_STRUCTURE)
    if crowded or len(structure) > 2 * values:
        raise bad(path, f"holds more values than are allowed (about {values})")
    brackets = structure.translate(None, b",")
    deepest = max(accumulate(1 if b in b"[{" else -1 for b in brackets), default=0)
    if deepest > depth:
        raise bad(path, f"is JSON nested {deepest} deep; at most {depth} is allowed")


_NOT_STRUCTURE = bytes(set(range(256)) - set(b",[]{}"))


def _no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    data = dict(pairs)
    if len(data) < len(pairs):
        [(twice, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"key '{clean(twice, 80)}' occurs twice")
    return data


def _int(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"an integer has {len(digits)} digits")
    if digits == "-0":
        raise ValueError("-0 is not an integer")
    return int(digits)


def _float(digits: str) -> float:
    if len(digits) > MAX_FLOAT:
        raise ValueError(f"a number has {len(digits)} characters")
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"{clean(digits, 30)} is too large")
    return value


def _infinity(name: str) -> float:
    if name == "NaN":
        _constant(name)
    return float(name)


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not allowed")
