"""The server's storage: the gallery, and the jobs that outlive their clients and the server."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import json
import math
import os
import re
import sqlite3
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from qwenimg.cli.serve.http_error import HttpError
from qwenimg.cli.serve.image_job import ImageJob
from qwenimg.cli.serve.training_options import TRAINING, parse_training, training_job
from qwenimg.cli.workers.messages import PictureDrawn
from qwenimg.common.base import atomic_files
from qwenimg.common.base.errors import ModelError, UsageError
from qwenimg.common.base.strict_json import strict_json
from qwenimg.common.base.text import clean, shown_path
from qwenimg.common.jobs.image_options import check, parse_json, plain, typed
from qwenimg.common.jobs.job import InputFiles, Job
from qwenimg.common.numbers.seeds import MAX_SEED

_P = ParamSpec("_P")
_T = TypeVar("_T")

NAME = "gallery.sqlite3"
FORMAT = 4  # of the database
PATIENCE = 10.0  # seconds that one try waits for another program's lock on the database
_FILE = re.compile(r"[0-9a-f]{16}-[0-9]{1,6}(\.png|\.jpg|\.webp)")  # of a picture
_IMAGES = {"images": "images", "control_images": "controls"}  # the fields of a job's files, by their names in the table
_TABLES = """
create table jobs (
    number integer primary key, id text unique not null, state text not null, model text not null,
    request text not null, mask blob, mask_alpha integer not null, deadline real not null,
    created real not null, ended real, error text, drawn integer not null default 0
);
create table images (
    job text not null, field text not null, place integer not null, data blob not null, primary key (job, field, place)
);
create table pictures (
    number integer primary key, id text unique not null, job text not null, place integer not null, name text not null,
    sha256 text not null, recipe text not null, seconds real not null, created real not null, thumbnail blob not null
);
create index pictures_of_jobs on pictures (job, place);
"""


@dataclass(frozen=True)
class GalleryPicture:
    """A picture in the gallery."""

    number: int  # rises with each picture
    id: str
    job: str
    name: str  # of its file
    recipe: dict[str, Any]
    created: float | str | None

    def described(self) -> dict[str, Any]:
        """Return the fields for clients."""
        names = ("id", "job", "recipe", "created")
        return {name: getattr(self, name) for name in names}


class Journal:
    """A folder with pictures and an SQLite database. One server uses it at a time.

    A change is on the disk when its call returns. A picture's file is written before its row, under a name made of the
    job's id: a server that was killed between the two writes the same file again.

    One connection changes the database and another one reads it, each in a thread of its own once the server runs:
    `writing` and `reading`. A lock of another program delays changes only."""

    def __init__(self, folder: Path) -> None:
        """Open the journal in `folder`. A missing folder is made, readable by this user only. Raises UsageError."""
        self.folder = folder
        is_new = not os.path.lexists(folder)
        atomic_files.make_folder(folder, parents=True)
        if is_new:
            folder.chmod(0o700)
        atomic_files.sweep(folder)
        self._lock = _locked(folder)
        try:
            with _as_usage_error(folder):
                self._base = _opened(folder / NAME)
                self._view = _connected(folder / NAME)
        except BaseException:
            os.close(self._lock)
            raise
        self._writer, self._reader = ThreadPoolExecutor(1), ThreadPoolExecutor(1)

    def close(self) -> None:
        self._writer.shutdown()
        self._reader.shutdown()
        self._base.close()
        self._view.close()
        os.close(self._lock)

    async def writing(self, change: Callable[_P, _T], *given: _P.args, **named: _P.kwargs) -> _T:
        """Call a method that changes something, in its thread."""
        return await in_thread(self._writer, change, *given, **named)

    async def reading(self, look: Callable[_P, _T], *given: _P.args, **named: _P.kwargs) -> _T:
        """Call a method that changes nothing, in its thread."""
        return await in_thread(self._reader, look, *given, **named)

    # Jobs

    def add(self, job: ImageJob) -> None:
        """Store a new job."""
        spec, files = job.spec, job.spec.files
        if job.training is not None:
            request = {"kind": TRAINING, **job.training.options}
        else:
            request = plain(spec.options) | {"seeds": list(spec.seeds)}
        if "aspect" in request:
            request["aspect"] = str(request["aspect"])
        about = json.dumps(request), files.mask, files.mask_alpha
        with self._base:
            self._base.execute(
                "insert into jobs (id, state, model, request, mask, mask_alpha, deadline, created)"
                " values (?, 'waiting', ?, ?, ?, ?, ?, ?)",
                (job.id, job.model, *about, job.deadline, job.created),
            )
            rows = [
                (job.id, field, place, data)
                for field, ours in _IMAGES.items()
                for place, data in enumerate(getattr(files, ours))
            ]
            self._base.executemany("insert into images (job, field, place, data) values (?, ?, ?, ?)", rows)

    def end(self, job: ImageJob) -> None:
        """Store the last state of a job, and delete its inputs."""
        with self._base:
            self._base.execute(
                "update jobs set state = ?, error = ?, ended = ?, mask = null where id = ?",
                (job.state, None if job.error is None else job.error.text, job.finished, job.id),
            )
            self._base.execute("delete from images where job = ?", (job.id,))

    def unfinished(self) -> list[ImageJob]:
        """Return the jobs without a last state, the oldest first. A job with a damaged row fails. Raises UsageError."""
        jobs = list[ImageJob]()
        with _as_usage_error(self.folder):
            for row in self._base.execute("select * from jobs where ended is null order by number").fetchall():
                try:
                    images = {field: self._images(row["id"], field) for field in _IMAGES}
                    jobs.append(_job(row, images))
                except (ValueError, TypeError, KeyError, ArithmeticError) as error:
                    text = f"its row in the database is damaged: {clean(error, 80)}"
                    with self._base:
                        self._base.execute(
                            "update jobs set state = 'failed', error = ?, ended = ? where number = ?",
                            (text, time.time(), row["number"]),
                        )
        return jobs

    def _images(self, job: str, field: str) -> tuple[bytes, ...]:
        find = "select data from images where job = ? and field = ? order by place"
        return tuple(data for (data,) in self._base.execute(find, (job, field)))

    def jobs(self, limit: int) -> list[dict[str, Any]]:
        """Return the newest jobs, for clients."""
        rows = self._view.execute("select * from jobs order by number desc limit ?", (limit,)).fetchall()
        return [self._described(row) for row in rows]

    def job(self, name: str) -> dict[str, Any] | None:
        """Return a job, for clients; None for an unknown id."""
        row = self._view.execute("select * from jobs where id = ?", (name,)).fetchone()
        return None if row is None else self._described(row)

    def _described(self, row: sqlite3.Row) -> dict[str, Any]:
        names = self._view.execute("select id from pictures where job = ? order by place", (row["id"],)).fetchall()
        about = {name: _plain(row[name]) for name in ("id", "state", "model", "created", "ended", "error")}
        return about | {"request": _object(row["request"]), "pictures": [_plain(name["id"]) for name in names]}

    # Pictures

    def keep(self, job: ImageJob, drawn: PictureDrawn) -> GalleryPicture:
        """Write the file of a picture, and its row. Raises QwenimgError."""
        name = f"{job.id}-{drawn.index}"
        file = f"{name}{job.suffix}"
        atomic_files.write_atomic(self.folder / file, drawn.data, overwrite=True)
        sha256 = hashlib.sha256(drawn.data).hexdigest()
        row = (name, job.id, drawn.index, file, sha256, json.dumps(drawn.recipe), drawn.seconds, time.time(),
               drawn.thumbnail)  # fmt: skip
        with self._base:
            self._base.execute(
                "insert into pictures (id, job, place, name, sha256, recipe, seconds, created, thumbnail)"
                " values (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                row,
            )
            self._base.execute("update jobs set drawn = ? where id = ?", (drawn.index + 1, job.id))
            number = self._base.execute("select number from pictures where id = ?", (name,)).fetchone()[0]
        return GalleryPicture(number, name, job.id, file, dict(drawn.recipe), row[-2])

    def pictures(self, before: int | None, limit: int) -> tuple[list[GalleryPicture], int | None]:
        """Return the newest pictures, or those with a smaller number than `before`, and the number of the last one.
        Pictures with a damaged row are left out."""
        rows = self._view.execute(
            "select * from pictures where number < ? order by number desc limit ?", (before or 2**62, limit)
        ).fetchall()
        return [kept for kept in map(_kept, rows) if kept is not None], rows[-1]["number"] if rows else None

    def picture(self, name: str) -> GalleryPicture | None:
        row = self._view.execute("select * from pictures where id = ?", (name,)).fetchone()
        return None if row is None else _kept(row)

    def file(self, kept: GalleryPicture) -> Path | None:
        """Return the file of a picture; None if it is missing or no regular file."""
        file = self.folder / kept.name
        try:
            return file if stat.S_ISREG(file.lstat().st_mode) else None
        except OSError:
            return None

    def thumbnail(self, kept: GalleryPicture) -> bytes:
        """Return a small JPEG of a picture; b"" if there is none."""
        row = self._view.execute("select thumbnail from pictures where id = ?", (kept.id,)).fetchone()
        return row["thumbnail"] if row is not None and isinstance(row["thumbnail"], bytes) else b""

    def remove(self, kept: GalleryPicture) -> None:
        """Remove a picture's row, then its file."""
        with self._base:
            self._base.execute("delete from pictures where id = ?", (kept.id,))
        (self.folder / kept.name).unlink(missing_ok=True)


async def in_thread(thread: ThreadPoolExecutor, function: Callable[_P, _T], *given: _P.args, **named: _P.kwargs) -> _T:
    return await asyncio.get_running_loop().run_in_executor(thread, lambda: function(*given, **named))


# The files


def _locked(folder: Path) -> int:
    """Lock the folder, and return the descriptor of the lock."""
    file = folder / ".lock"
    try:
        lock = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    except OSError as error:
        what = "is a link" if file.is_symlink() else f"cannot be opened: {clean(error.strerror or error, 80)}"
        raise UsageError(f"{shown_path(file)}: {what}; remove it, or give another -o") from None
    try:
        if not stat.S_ISREG(os.fstat(lock).st_mode):
            raise UsageError(f"{shown_path(file)}: is no regular file; remove it, or give another -o")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise UsageError(f"{shown_path(folder)}: another server keeps its pictures there; give another -o") from None
    except OSError as error:
        os.close(lock)
        raise UsageError(f"{shown_path(file)}: {clean(error.strerror or error, 80)}; give another -o") from None
    except UsageError:
        os.close(lock)
        raise
    return lock


@contextlib.contextmanager
def _as_usage_error(folder: Path) -> Iterator[None]:
    """Turn an error of the database into a UsageError."""
    try:
        yield
    except sqlite3.Error as error:
        raise UsageError(
            f"{shown_path(folder)}: {NAME} cannot be used: {clean(error, 80)}; move it away, or give another -o"
        ) from None


def _opened(file: Path) -> sqlite3.Connection:
    for path in (file, *(file.with_name(f"{file.name}{end}") for end in ("-wal", "-shm", "-journal"))):
        if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):
            raise sqlite3.DatabaseError(f"{path.name} is no regular file")
    base = _connected(file)
    try:
        base.execute("pragma journal_mode = wal")
        base.execute("pragma synchronous = full")
        [version] = base.execute("pragma user_version").fetchone()
        tables = _tables(base)
        if version == 0 and not tables:
            base.executescript(f"begin; {_TABLES} pragma user_version = {FORMAT}; commit;")
        elif version != FORMAT:
            raise sqlite3.DatabaseError(f"it has format {version}, and this version reads {FORMAT}")
        elif tables != _expected():
            raise sqlite3.DatabaseError("its tables are not those of a gallery")
        file.chmod(0o600)
    except sqlite3.Error:
        base.close()
        raise
    return base


def _connected(file: Path) -> sqlite3.Connection:
    base = sqlite3.connect(file, check_same_thread=False, timeout=PATIENCE)
    base.row_factory = sqlite3.Row
    return base


def _expected() -> set[tuple[str, str]]:
    with contextlib.closing(sqlite3.connect(":memory:")) as base:
        base.executescript(_TABLES)
        return _tables(base)


def _tables(base: sqlite3.Connection) -> set[tuple[str, str]]:
    """Return each table with its definition."""
    rows = base.execute("select name, sql from sqlite_master where name not like 'sqlite_%'")
    return {(str(name), str(sql)) for name, sql in rows}


# Rows, which a damaged database may hold anything in


def _job(row: Mapping[str, Any], images: Mapping[str, tuple[bytes, ...]]) -> ImageJob:
    """Convert a row. Raises ValueError, TypeError, KeyError or ArithmeticError if it is damaged."""
    request = _object(row["request"])
    if request.get("kind") == TRAINING:
        return _training(row, request)
    seeds = request.pop("seeds")
    if not seeds or not all(type(seed) is int and 0 <= seed <= MAX_SEED for seed in seeds):
        raise ValueError("seeds")
    options = typed(parse_json(request), files=False)
    check(options)
    if "aspect" in options:
        options["aspect"] = Fraction(options["aspect"])
    files = (*images["images"], *images["control_images"], *([] if row["mask"] is None else [row["mask"]]))
    if not all(isinstance(file, bytes) for file in files) or not isinstance(options["prompt"], str):
        raise TypeError("a picture, or the prompt")
    deadline, created, drawn = float(row["deadline"]), float(row["created"]), int(row["drawn"])
    if not (0 < deadline < math.inf and math.isfinite(created) and 0 <= drawn <= 10**6):
        raise ValueError("a time")
    return ImageJob(
        id=str(row["id"]),
        model=str(row["model"]),
        spec=Job(
            options=options,
            seeds=tuple(seeds),
            files=InputFiles(
                images=images["images"],
                mask=row["mask"],
                mask_alpha=bool(row["mask_alpha"]),
                controls=images["control_images"],
            ),
        ),
        first=drawn,
        preview_suffix=".jpg",
        deadline=deadline,
        created=created,
        kind="job",
    )


def _training(row: Mapping[str, Any], request: dict[str, Any]) -> ImageJob:
    """Convert the row of a training. Raises ValueError or TypeError if it is damaged."""
    try:
        options = parse_training({name: value for name, value in request.items() if name != "kind"})
    except HttpError as error:
        raise ValueError(error.text) from None
    if not math.isfinite(created := float(row["created"])):
        raise ValueError("a time")
    return training_job(str(row["model"]), options, id=str(row["id"]), created=created)


def _kept(row: sqlite3.Row) -> GalleryPicture | None:
    name, created = _plain(row["name"]), _plain(row["created"])
    if not isinstance(name, str) or not _FILE.fullmatch(name) or name.partition(".")[0] != row["id"]:
        return None
    recipe = _object(row["recipe"])
    if not isinstance(recipe.get("prompt"), str):
        recipe["prompt"] = ""
    return GalleryPicture(row["number"], row["id"], str(row["job"]), name, recipe, created)


def _object(text: object) -> dict[str, Any]:
    """Parse a JSON object; {} if the text is none."""
    try:
        data = strict_json(text.encode(), NAME, depth=8, values=10_000) if isinstance(text, str) else {}
    except (ModelError, UnicodeEncodeError):
        return {}
    return data if isinstance(data, dict) else {}


def _plain(value: object) -> str | float | None:
    """Return a text or a finite number; None for anything else."""
    is_plain = isinstance(value, (str, int)) or (isinstance(value, float) and math.isfinite(value))
    return value if is_plain else None  # type: ignore[return-value]
