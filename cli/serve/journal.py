"""The server's memory on the disk: the gallery, and the jobs that outlive their clients and the server."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import sqlite3
import time
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from qwenimg.cli.serve.messages import PictureDrawn
from qwenimg.cli.serve.orders import PictureOrder
from qwenimg.common.base import atomic_files
from qwenimg.common.base.errors import UsageError
from qwenimg.common.base.text import clean, shown_path

FORMAT = 3  # of the database
_IMAGES = ("images", "control_images")  # the fields of an order with files of pictures
_TABLES = """
create table jobs (
    number integer primary key, id text unique not null, state text not null, model text not null,
    request text not null, mask blob, mask_alpha integer not null, deadline real not null,
    created real not null, ended real, error text
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
    created: float

    def described(self) -> dict[str, Any]:
        """Return what clients are told."""
        names = ("id", "job", "recipe", "created")
        return {name: getattr(self, name) for name in names}


class Journal:
    """A folder with pictures, and the SQLite database beside them. One server uses it at a time.

    A change is on the disk when its call returns. A picture's file is written before its row, under a name that follows
    from its job: a server that was killed between the two writes the same file again."""

    def __init__(self, folder: Path) -> None:
        """Open the journal in `folder`, which is made if it is missing. Raises UsageError."""
        self.folder = folder
        atomic_files.make_folder(folder, parents=True)
        folder.chmod(0o700)
        atomic_files.sweep(folder)
        self._lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise UsageError(
                f"{shown_path(folder)}: another server keeps its pictures there; give another -o"
            ) from None
        try:
            self._base = _opened(folder / "gallery.sqlite3")
        except sqlite3.Error as error:
            os.close(self._lock)
            raise UsageError(
                f"{shown_path(folder)}: gallery.sqlite3 cannot be used: {clean(error, 80)}; move it away, or give "
                "another -o"
            ) from None

    def close(self) -> None:
        self._base.close()
        os.close(self._lock)

    # Jobs

    def add(self, order: PictureOrder) -> None:
        """Keep a new job."""
        asked = order.fields | {"seeds": list(order.seeds)}
        if "aspect" in asked:
            asked["aspect"] = str(asked["aspect"])
        with self._base:
            self._base.execute(
                "insert into jobs (id, state, model, request, mask, mask_alpha, deadline, created)"
                " values (?, 'waiting', ?, ?, ?, ?, ?, ?)",
                (order.id, order.model, json.dumps(asked), order.mask, order.mask_alpha, order.deadline, order.created),
            )
            rows = [
                (order.id, field, place, data) for field in _IMAGES for place, data in enumerate(getattr(order, field))
            ]
            self._base.executemany("insert into images (job, field, place, data) values (?, ?, ?, ?)", rows)

    def end(self, order: PictureOrder) -> None:
        """Note the last state of a job, and drop its inputs."""
        with self._base:
            self._base.execute(
                "update jobs set state = ?, error = ?, ended = ?, mask = null where id = ?",
                (order.state, None if order.fault is None else order.fault.text, time.time(), order.id),
            )
            self._base.execute("delete from images where job = ?", (order.id,))

    def unfinished(self) -> list[PictureOrder]:
        """Return the jobs that have no last state, the oldest first."""
        rows = self._base.execute(
            "select id, model, request, mask, mask_alpha, deadline, created,"
            " (select coalesce(max(place) + 1, 0) from pictures where job = jobs.id) as first"
            " from jobs where ended is null order by number"
        ).fetchall()
        return [_order(row, {field: self._images(row["id"], field) for field in _IMAGES}) for row in rows]

    def _images(self, job: str, field: str) -> tuple[bytes, ...]:
        find = "select data from images where job = ? and field = ? order by place"
        return tuple(data for (data,) in self._base.execute(find, (job, field)))

    def jobs(self, limit: int) -> list[dict[str, Any]]:
        """Return the newest jobs, described for clients."""
        rows = self._base.execute("select * from jobs order by number desc limit ?", (limit,)).fetchall()
        return [self._described(row) for row in rows]

    def job(self, name: str) -> dict[str, Any] | None:
        """Return a job, described for clients; None if there is none of that id."""
        row = self._base.execute("select * from jobs where id = ?", (name,)).fetchone()
        return None if row is None else self._described(row)

    def _described(self, row: sqlite3.Row) -> dict[str, Any]:
        names = self._base.execute("select id from pictures where job = ? order by place", (row["id"],)).fetchall()
        about = {name: row[name] for name in ("id", "state", "model", "created", "ended", "error")}
        return about | {"request": json.loads(row["request"]), "pictures": [name["id"] for name in names]}

    # Pictures

    def keep(self, order: PictureOrder, drawn: PictureDrawn) -> GalleryPicture:
        """Write the file of a picture, and its row. Raises QwenimgError."""
        name = f"{order.id}-{drawn.index}"
        file = f"{name}{order.suffix}"
        atomic_files.write_atomic(self.folder / file, drawn.data, overwrite=True)
        sha256 = hashlib.sha256(drawn.data).hexdigest()
        row = (name, order.id, drawn.index, file, sha256, json.dumps(drawn.recipe), drawn.seconds, time.time(),
               drawn.thumbnail)  # fmt: skip
        with self._base:
            self._base.execute(
                "insert into pictures (id, job, place, name, sha256, recipe, seconds, created, thumbnail)"
                " values (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                row,
            )
        kept = self.picture(name)
        assert kept is not None
        return kept

    def pictures(self, before: int | None, limit: int) -> list[GalleryPicture]:
        """Return pictures, the newest first; with `before`, those whose number is smaller."""
        rows = self._base.execute(
            "select * from pictures where number < ? order by number desc limit ?", (before or 2**62, limit)
        ).fetchall()
        return [_kept(row) for row in rows]

    def picture(self, name: str) -> GalleryPicture | None:
        row = self._base.execute("select * from pictures where id = ?", (name,)).fetchone()
        return None if row is None else _kept(row)

    def thumbnail(self, kept: GalleryPicture) -> bytes:
        """Return a small JPEG of a picture, empty if there is none."""
        row = self._base.execute("select thumbnail from pictures where id = ?", (kept.id,)).fetchone()
        return b"" if row is None else bytes(row["thumbnail"])

    def remove(self, kept: GalleryPicture) -> None:
        """Remove a picture's row, then its file."""
        with self._base:
            self._base.execute("delete from pictures where id = ?", (kept.id,))
        (self.folder / kept.name).unlink(missing_ok=True)


def _opened(file: Path) -> sqlite3.Connection:
    base = sqlite3.connect(file, check_same_thread=False)
    base.row_factory = sqlite3.Row
    try:
        base.execute("pragma journal_mode = wal")
        base.execute("pragma synchronous = full")
        [version] = base.execute("pragma user_version").fetchone()
        if version == 0:
            base.executescript(f"begin; {_TABLES} pragma user_version = {FORMAT}; commit;")
        elif version != FORMAT:
            raise sqlite3.DatabaseError(f"it has format {version}, and this version reads {FORMAT}")
    except sqlite3.Error:
        base.close()
        raise
    file.chmod(0o600)
    return base


def _order(row: Mapping[str, Any], images: Mapping[str, tuple[bytes, ...]]) -> PictureOrder:
    asked = json.loads(row["request"])
    seeds = tuple(asked.pop("seeds"))
    if "aspect" in asked:
        asked["aspect"] = Fraction(asked["aspect"])
    return PictureOrder(
        id=row["id"],
        model=row["model"],
        fields=asked,
        seeds=seeds,
        first=row["first"],
        images=images["images"],
        control_images=images["control_images"],
        preview_suffix=".jpg",
        mask=row["mask"],
        mask_alpha=bool(row["mask_alpha"]),
        deadline=row["deadline"],
        created=row["created"],
        kind="job",
    )


def _kept(row: sqlite3.Row) -> GalleryPicture:
    recipe = json.loads(row["recipe"])
    return GalleryPicture(row["number"], row["id"], row["job"], row["name"], recipe, row["created"])
