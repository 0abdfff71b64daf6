"""The file `spiece.model` of a SentencePiece tokenizer, read without a library: a message of protocol buffers.

A message is a list of fields, each its number with the kind of its value, and the value: a number in 7 bits a byte, 4
or 8 bytes, or a length and as many bytes, which may be a message. Of this one, field 1 is a piece (its text, score and
type), 2 the options of its training and 3 those of its normalizer, with the table of characters.

Source: `sentencepiece_model.proto` of SentencePiece.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from struct import unpack
from typing import TypeAlias

from qwenimg.common.base.text import clean
from qwenimg.common.prompts.unigram import MAX_PIECES, Pieces, checked, checked_table
from qwenimg.common.prompts.vocabulary import read_file, refuse

Value: TypeAlias = int | bytes

_PIECE, _TRAINER, _NORMALIZER = 1, 2, 3
_TEXT, _SCORE, _TYPE = 1, 2, 3
_NORMAL, _UNKNOWN, _CONTROL = 1, 2, 3
_CHARSMAP = 2
_UNIGRAM = 1
# Options that would change ids: their numbers, names, defaults, and the only values that are read.
_TRAINER_OPTIONS = {
    3: ("model_type", 1, _UNIGRAM),
    24: ("treat_whitespace_as_suffix", 0, 0),
    35: ("byte_fallback", 0, 0),
}
_NORMALIZER_OPTIONS = {
    3: ("add_dummy_prefix", 1, 1),
    4: ("remove_extra_whitespaces", 1, 1),
    5: ("escape_whitespaces", 1, 1),
}
_MAX_VARINT = 10  # bytes


class DamagedMessage(ValueError):
    """The fault of a message, as the end of a sentence."""


def read_pieces(file: Path) -> Pieces:
    """Read the pieces of `file`. Raises ModelError if it is damaged, or of another form than T5's."""
    try:
        return _pieces(file, read_file(file))
    except DamagedMessage as error:
        refuse(file, str(error))


def _pieces(file: Path, raw: bytes) -> Pieces:
    entries: list[tuple[object, object]] = []
    types: list[Value] = []
    charsmap = b""
    for number, value in _fields(raw):
        if number == _PIECE:
            if len(entries) == MAX_PIECES:
                refuse(file, f"has more than {MAX_PIECES} pieces")
            piece = dict(_fields(_message(value)))
            entries.append((_text(piece.get(_TEXT, b"")), _float(piece.get(_SCORE, bytes(4)))))
            types.append(piece.get(_TYPE, _NORMAL))
        elif number == _TRAINER:
            _check_options(file, _message(value), _TRAINER_OPTIONS)
        elif number == _NORMALIZER:
            charsmap = _message(_check_options(file, _message(value), _NORMALIZER_OPTIONS).get(_CHARSMAP, b""))
    texts = checked(file, entries)
    if types.count(_UNKNOWN) != 1 or _NORMAL not in types or not set(types) <= {_NORMAL, _UNKNOWN, _CONTROL}:
        refuse(file, "its pieces are not of types 1 and 3, and one of type 2, as those of T5")
    return Pieces(
        file=file,
        scores=texts,
        unknown=types.index(_UNKNOWN),
        special={text: id for id, (text, _) in enumerate(texts) if types[id] != _NORMAL},
        charsmap=checked_table(file, charsmap) if charsmap else b"",
    )


def _check_options(file: Path, raw: bytes, options: dict[int, tuple[str, int, int]]) -> dict[int, Value]:
    """Return the fields of `raw`. Raises ModelError if an option has a value that this reader does not support."""
    fields = dict(_fields(raw))
    for number, (name, default, expected) in options.items():
        if fields.get(number, default) != expected:
            refuse(file, f"its option {name} is {clean(fields[number], 40)}, not {expected}")
    return fields


# Messages


def _fields(raw: bytes) -> Iterator[tuple[int, Value]]:
    """Yield the number and the value of each field. Raise DamagedMessage."""
    at = 0
    while at < len(raw):
        tag, at = _varint(raw, at)
        kind = tag & 7
        if kind == 0:
            value, at = _varint(raw, at)
            yield tag >> 3, value
            continue
        if kind == 2:
            size, at = _varint(raw, at)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise DamagedMessage(f"has a field of kind {kind}: it is damaged")
        if size > len(raw) - at:
            raise DamagedMessage(f"claims a field of {size} bytes, {len(raw) - at} follow: it is cut short or damaged")
        yield tag >> 3, raw[at : at + size]
        at += size


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    """Return the number at `at`, and where it ends."""
    value = 0
    for i, byte in enumerate(raw[at : at + _MAX_VARINT]):
        value |= (byte & 127) << 7 * i
        if byte < 128:
            return value, at + i + 1
    raise DamagedMessage(f"has a number at byte {at} that does not end: it is cut short or damaged")


def _message(value: Value) -> bytes:
    if not isinstance(value, bytes):
        raise DamagedMessage(f"has the number {value} where a message belongs: it is damaged")
    return value


def _text(value: Value) -> str:
    try:
        return _message(value).decode()
    except UnicodeDecodeError:
        raise DamagedMessage("has a piece that is not UTF-8: it is damaged") from None


def _float(value: Value) -> float:
    raw = _message(value)
    if len(raw) != 4:
        raise DamagedMessage(f"has a score of {len(raw)} bytes: it is damaged")
    score: float = unpack("<f", raw)[0]
    return score
