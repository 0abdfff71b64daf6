"""The file `spiece.model` of a SentencePiece tokenizer, read without a library: a message of protocol buffers.

A message is a list of fields, each its number with the kind of its value, and the value: a number in 7 bits a byte, 4
or 8 bytes, or a length and as many bytes, which may be a message. Of this one, field 1 is a piece (its text, score and
type), 2 the options of its training and 3 those of its normalizer, with the table of characters.

Source: `sentencepiece_model.proto` of SentencePiece.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from struct import unpack
from typing import NamedTuple, TypeAlias

from qwenimg.common.base.text import clean
from qwenimg.common.prompts.unigram import MAX_PIECES, Pieces, checked, checked_table
from qwenimg.common.prompts.vocabulary import read_file, refuse

Value: TypeAlias = int | bytes
_Options: TypeAlias = Mapping[int, tuple[str, Value, Value]]

_PIECE, _TRAINER, _NORMALIZER = 1, 2, 3
_TEXT, _SCORE, _TYPE = 1, 2, 3
NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Types of pieces, of GGUF files too. USER: matched before a text is split."""
_CHARSMAP = 2
_BYTE_FALLBACK = 35
_UNIGRAM, _BPE = 1, 2
# Options that would change ids: their numbers, names, defaults, and the only values that are read.
_TRAINER_OPTIONS: _Options = {
    3: ("model_type", 1, _UNIGRAM),
    24: ("treat_whitespace_as_suffix", 0, 0),
}
_NORMALIZER_OPTIONS: _Options = {
    3: ("add_dummy_prefix", 1, 1),
    4: ("remove_extra_whitespaces", 1, 1),
    5: ("escape_whitespaces", 1, 1),
}
# The same of a language model. A space before a text is its chat template's.
_LANGUAGE_TRAINER: _Options = {
    3: ("model_type", _UNIGRAM, _BPE),
    24: ("treat_whitespace_as_suffix", 0, 0),
    _BYTE_FALLBACK: ("byte_fallback", 0, 1),
}
_LANGUAGE_NORMALIZER: _Options = {
    2: ("precompiled_charsmap", b"", b""),
    4: ("remove_extra_whitespaces", 1, 0),
    5: ("escape_whitespaces", 1, 1),
}
_MAX_VARINT = 10  # bytes


class DamagedMessage(ValueError):
    """The fault of a message, as the end of a sentence."""


def read_pieces(file: Path) -> Pieces:
    """Read the pieces of `file`. Raises ModelError if it is damaged, or of another form than T5's or mT5's, which has
    pieces for bytes."""
    try:
        return _pieces(file, read_file(file))
    except DamagedMessage as error:
        refuse(file, str(error))


def read_typed_pieces(file: Path) -> tuple[list[str], list[float], list[int]]:
    """Read the texts, scores and types of the pieces of a language model's `file`. Raises ModelError if it is damaged,
    or no BPE with tokens for bytes."""
    try:
        message = _read(file, read_file(file), _LANGUAGE_TRAINER, _LANGUAGE_NORMALIZER)
    except DamagedMessage as error:
        refuse(file, str(error))
    types = [type if isinstance(type, int) else 0 for type in message.types]
    return [text for text, _ in message.pieces], [score for _, score in message.pieces], types


class _Message(NamedTuple):
    pieces: list[tuple[str, float]]
    types: list[Value]
    charsmap: bytes
    has_bytes: bool = False  # whether an unknown character is the pieces of its bytes


def _read(file: Path, raw: bytes, trainer: _Options, normalizer: _Options) -> _Message:
    """Read the pieces of a file with these options."""
    message = _Message([], [], b"")
    for number, value in _fields(raw):
        if number == _PIECE:
            if len(message.pieces) == MAX_PIECES:
                refuse(file, f"has more than {MAX_PIECES} pieces")
            piece = dict(_fields(_message(value)))
            message.pieces.append((_text(piece.get(_TEXT, b"")), _float(piece.get(_SCORE, bytes(4)))))
            message.types.append(piece.get(_TYPE, NORMAL))
        elif number == _TRAINER:
            has_bytes = _check_options(file, _message(value), trainer).get(_BYTE_FALLBACK, 0) == 1
            message = message._replace(has_bytes=has_bytes)
        elif number == _NORMALIZER:
            charsmap = _message(_check_options(file, _message(value), normalizer).get(_CHARSMAP, b""))
            message = message._replace(charsmap=charsmap)
    return message


def _pieces(file: Path, raw: bytes) -> Pieces:
    pieces, types, charsmap, has_bytes = _read(file, raw, _TRAINER_OPTIONS, _NORMALIZER_OPTIONS)
    texts = checked(file, pieces)
    # The user's pieces, mT5's <extra_id_0>, have the score 0, by which they are chosen as plain pieces too
    plain = {NORMAL, USER, BYTE} if has_bytes else {NORMAL}
    if types.count(UNKNOWN) != 1 or NORMAL not in types or not set(types) <= plain | {UNKNOWN, CONTROL}:
        refuse(file, "its pieces are not of types 1 and 3, and one of type 2, as those of T5")
    if has_bytes and types.count(BYTE) != 256:
        refuse(file, f"its option byte_fallback is 1, and it has pieces for {types.count(BYTE)} of the 256 bytes")
    return Pieces(
        file=file,
        scores=texts,
        unknown=types.index(UNKNOWN),
        special={text: id for id, (text, _) in enumerate(texts) if types[id] not in plain},
        charsmap=checked_table(file, charsmap) if charsmap else b"",
        bytes=has_bytes,
    )


def _check_options(file: Path, raw: bytes, options: _Options) -> dict[int, Value]:
    """Return the fields of `raw`. Raises ModelError if an option has a value that this reader does not support."""
    fields = dict(_fields(raw))
    for number, (name, default, expected) in options.items():
        if fields.get(number, default) != expected:
            refuse(file, f"its option {name} is {clean(fields[number], 40)}, not {clean(expected, 40)}")
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
