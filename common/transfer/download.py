"""Download of one file of a hub: it continues where an earlier process stopped, and is verified before it is named.

Received bytes stay in `<blob>.qwenimg.part` with a note about the file, so that not even kill -9 loses more than the
bytes in flight.
"""

from __future__ import annotations

import hashlib
import http.client
import io
import json
import os
import re
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from qwenimg.common.base.errors import DoesNotFit, ModelError, QwenimgError, UsageError, disk_full
from qwenimg.common.base.hf_cache import append, create, own_size, read_small
from qwenimg.common.base.text import clean
from qwenimg.common.formats.file_hash import PIECE
from qwenimg.common.transfer.http import Echo, Interrupted, Server, number, open_url, persist, pieces

PROGRESS = 1 << 20  # bytes; a connection that brought as many does not count as a failure in a row
PART, NOTE = ".qwenimg.part", ".qwenimg.part.json"

_RANGE = re.compile(r"bytes (\d{1,18})-\d{1,18}/(\d{1,18}|\*)")


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A file of a repository. `digest` is the SHA-256 of a file in LFS, else git's SHA-1 of a blob, in hexadecimal: the
    hub's etag, and the name of the blob in the cache."""

    path: str
    size: int  # bytes
    digest: str


def bytes_kept(wanted: Wanted, blob: Path) -> int:
    """Return the bytes of `wanted` that an earlier process has left beside `blob`."""
    size = own_size(_beside(blob, PART))
    try:
        note = json.loads(read_small(_beside(blob, NOTE)))
    except (ValueError, RecursionError):
        return 0
    fits = isinstance(note, dict) and note.get("etag") == wanted.digest and note.get("size") == wanted.size
    return size if size is not None and fits and size <= wanted.size else 0


def fetch(
    server: Server, url: str, wanted: Wanted, blob: Path, *, commit: str, echo: Echo, progress: Callable[[int], None]
) -> None:
    """Download `url` to `blob`, from where an earlier call stopped. `progress` gets the number of bytes so far.

    `blob` appears complete and verified, or not at all. Only one process at a time may write beside `blob`. Raises
    ModelError (server or hash at fault), DoesNotFit (disk full) and UsageError (no permission)."""
    part, note = _beside(blob, PART), _beside(blob, NOTE)
    received = bytes_kept(wanted, blob)
    try:
        if not received:
            create(part).close()
            with create(note) as file:
                file.write(json.dumps({"etag": wanted.digest, "commit": commit, "size": wanted.size}).encode())
        _fill(server, url, wanted, part, echo, progress)
        if digest(part, wanted) == wanted.digest:
            part.replace(blob)
            note.unlink(missing_ok=True)
            return
        part.unlink()
    except OSError as error:
        raise _disk_error(wanted, blob, error) from None
    if not received:
        raise ModelError(
            f"{wanted.path}: what came has another hash than the hub lists, and was deleted; "
            f"pull again, and if it stays so, check HF_ENDPOINT and the proxy"
        )
    echo(f"{wanted.path}: the part from an earlier run is damaged; starting over")
    fetch(server, url, wanted, blob, commit=commit, echo=echo, progress=progress)


def _fill(server: Server, url: str, wanted: Wanted, part: Path, echo: Echo, progress: Callable[[int], None]) -> None:
    """Append to `part` until it has all bytes, and sync it."""
    with append(part) as file:
        file.seek(0, os.SEEK_END)

        def attempt() -> None:
            before = file.tell()
            progress(before)
            try:
                if before < wanted.size:
                    _append(server, url, wanted, file, progress)
            except Interrupted as error:
                error.moved = file.tell() - before >= PROGRESS
                raise

        persist(attempt, wanted.path, echo)
        os.fsync(file.fileno())


def _append(server: Server, url: str, wanted: Wanted, file: io.FileIO, progress: Callable[[int], None]) -> None:
    """Append the bytes of one connection. A server that starts at an earlier byte than requested only costs time."""
    have = file.tell()
    response, etag = open_url(server, url, wanted.path, first=have)
    with closing(response):
        _check_etag(etag, wanted)
        skip = have - _first_byte(response, wanted)
        if skip < 0:
            raise Interrupted("the server sent another range than asked")
        for piece in pieces(response, skip + wanted.size - have):
            rest = memoryview(piece)[skip:]
            skip -= len(piece) - len(rest)
            while rest:
                rest = rest[file.write(rest) :]
            progress(file.tell())
    if file.tell() < wanted.size:
        raise Interrupted(f"cut at {file.tell():,} of {wanted.size:,} bytes")


def _first_byte(response: http.client.HTTPResponse, wanted: Wanted) -> int:
    """Return the position in the file where the answer begins. Raises ModelError if its size is not the listed one."""
    start, total = 0, number(response.headers.get("Content-Length"))
    if response.status == 206:
        match = _RANGE.fullmatch(response.headers.get("Content-Range", ""))
        if match is None:
            raise Interrupted("the server sent a part without saying which")
        start, total = int(match[1]), number(match[2])
    if total is not None and total != wanted.size:
        raise ModelError(f"{wanted.path}: the server has {total:,} bytes, the hub lists {wanted.size:,}; pull again")
    return start


def _check_etag(etag: str | None, wanted: Wanted) -> None:
    if etag is not None and etag != wanted.digest:
        theirs, listed = clean(etag, 12), wanted.digest[:12]
        raise ModelError(
            f"{wanted.path}: the server has another file ({theirs}) than the hub lists ({listed}); "
            f"pull again later, or check HF_ENDPOINT"
        )


def digest(path: Path, wanted: Wanted, progress: Callable[[int], None] = lambda done: None) -> str:
    """Return the hash of the file at `path`, by the method of `wanted.digest`. `progress` gets the number of bytes read
    so far. Raises OSError."""
    if len(wanted.digest) == 64:
        hasher = hashlib.sha256()
    else:
        hasher = hashlib.sha1(b"blob %d\0" % wanted.size, usedforsecurity=False)
    with path.open("rb", buffering=0) as file:
        while piece := file.read(PIECE):
            hasher.update(piece)
            progress(file.tell())
    return hasher.hexdigest()


def _beside(blob: Path, suffix: str) -> Path:
    return blob.with_name(blob.name + suffix)


def _disk_error(wanted: Wanted, blob: Path, error: OSError) -> QwenimgError:
    where, reason = clean(blob.parent, 120), clean(error.strerror or error, 60)
    if disk_full(error):
        return DoesNotFit(f"{wanted.path}: {reason} in {where}; what came is kept: free space and pull again")
    return UsageError(f"{wanted.path}: cannot be written in {where}: {reason}")
