"""Pictures of an assistant in base64, and the names of its new files."""

from __future__ import annotations

import base64
import binascii
import re

from qwenimg.common.base.errors import UsageError
from qwenimg.common.base.safe_files import OpenFile, in_memory
from qwenimg.common.base.text import clean

MOST_BYTES = 32 << 20  # of a picture in base64
MOST_NAME = 100  # bytes of the name of a new file, without number and ending
_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9_-]{{0,{MOST_NAME - 1}}}", re.ASCII)
_DATA_URL = re.compile(r"data:image/[a-z0-9.+-]{1,40};base64,", re.ASCII)


def decoded(value: object, field: str) -> OpenFile:
    """Return the file in base64, with or without the head of a data URL. Raises UsageError."""
    if not isinstance(value, str) or not value:
        raise UsageError(f"{field} is no text in base64")
    if len(value) > MOST_BYTES * 4 // 3 + 100:
        raise UsageError(f"{field} has more than {MOST_BYTES >> 20} MB; put the picture into the folder and name it")
    head = _DATA_URL.match(value)
    try:
        data = base64.b64decode(value[head.end() :] if head else value, validate=True)
    except (binascii.Error, ValueError):
        raise UsageError(f"{field} is no picture in base64; addresses are not fetched") from None
    return in_memory(field, data)


def stem_of(name: object, prompt: str) -> str:
    """Return the name of new files, without ending: the one that a client gives, or words of the prompt. Raises
    UsageError."""
    from qwenimg.common.jobs.naming import slug

    if name is None:
        return slug(prompt, 60)
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UsageError(f"name is {clean(name, 40)!r}; give letters, digits, - and _, without a folder or an ending")
    return name
