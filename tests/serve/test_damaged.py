"""Galleries that are damaged, or made by somebody else: one line, exit code 2, or the rest of the gallery is shown."""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import struct
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from support.fake_worker import SETTINGS, dispatching, image_job
from support.processes import qwenimg

from qwenimg.cli.serve.apis.jobs_api import JobsApi
from qwenimg.cli.serve.journal import NAME, Journal
from qwenimg.cli.serve.json_answer import JsonAnswer
from qwenimg.cli.workers.messages import PictureDrawn
from qwenimg.common.base.errors import UsageError

Damage = Callable[[Path], object]


@pytest.fixture
def gallery(tmp_path: Path) -> Path:
    """A gallery with two jobs, of which one has ended, and three pictures."""
    journal = Journal(tmp_path / "g")
    for count in (2, 1):
        job = image_job(f"job of {count}", kind="job", seeds=tuple(range(count)))
        journal.add(job)
        for index in range(count):
            recipe = {"prompt": f"job of {count}", "seed": index}
            journal.keep(job, PictureDrawn(id=job.id, index=index, data=b"x", recipe=recipe, seconds=0.1))
    job.end("done")
    journal.end(job)
    journal.close()
    return tmp_path / "g"


def sql(text: str, *values: object) -> Damage:
    def change(folder: Path) -> None:
        with closing(sqlite3.connect(folder / NAME)) as base:
            base.execute(text, values)
            base.commit()

    return change


def written(offset: int, data: bytes) -> Damage:
    def change(folder: Path) -> None:
        with (folder / NAME).open("r+b") as file:
            file.seek(offset)
            file.write(data)

    return change


UNUSABLE: dict[str, Damage] = {
    "empty tables of another program": lambda folder: _replaced(folder, "create table notes (text)"),
    "a table is missing": sql("drop table images"),
    "a column is missing": sql("alter table pictures drop column thumbnail"),
    "a column of another kind": sql("alter table jobs add column more text"),
    "a table of somebody else": sql("create table notes (text)"),
    "a trigger": sql("create trigger t after insert on jobs begin delete from pictures; end"),
    "an older format": sql("pragma user_version = 3"),
    "a newer format": sql("pragma user_version = 5"),
    "text": lambda folder: (folder / NAME).write_text("hello " * 1000),
    "cut short": lambda folder: os.truncate(folder / NAME, 5000),
    "half a page": lambda folder: os.truncate(folder / NAME, 100),
    "another page size": written(16, struct.pack(">H", 12345)),
    "a broken schema": written(100, b"\xff" * 200),
    "a folder": lambda folder: [(folder / NAME).unlink(), (folder / NAME).mkdir()],
    "a link": lambda folder: [(folder / NAME).rename(folder.parent / "other"), (folder / NAME).symlink_to("../other")],
    "a link to nothing": lambda folder: [(folder / NAME).unlink(), (folder / NAME).symlink_to("../made")],
    "a pipe": lambda folder: [(folder / NAME).unlink(), os.mkfifo(folder / NAME)],
    "a log that is a link": lambda folder: (folder / f"{NAME}-wal").symlink_to("../made"),
    "a log that is a pipe": lambda folder: os.mkfifo(folder / f"{NAME}-journal"),
    "a lock that is a link": lambda folder: [(folder / ".lock").unlink(), (folder / ".lock").symlink_to("../made")],
    "a lock that is a pipe": lambda folder: [(folder / ".lock").unlink(), os.mkfifo(folder / ".lock")],
    "a lock that is a folder": lambda folder: [(folder / ".lock").unlink(), (folder / ".lock").mkdir()],
}


def _replaced(folder: Path, text: str) -> None:
    (folder / NAME).unlink()
    sql(text)(folder)


@pytest.mark.parametrize("name", UNUSABLE)
def test_a_gallery_that_cannot_be_used_is_named(gallery: Path, name: str) -> None:
    UNUSABLE[name](gallery)
    for _ in range(2):  # and leaves nothing locked
        with pytest.raises(UsageError) as caught, closing(Journal(gallery)) as journal:
            journal.unfinished()
        print(caught.value)
        assert str(gallery) in str(caught.value) and "-o" in str(caught.value) and str(caught.value).isprintable()
    assert not (gallery.parent / "made").exists(), "no link is followed"


def test_a_lock_that_is_a_link_empties_no_file(gallery: Path) -> None:
    (gallery / ".lock").unlink()
    (gallery.parent / "mine").write_text("kept")
    (gallery / ".lock").symlink_to("../mine")
    with pytest.raises(UsageError, match="is a link"):
        Journal(gallery)
    assert (gallery.parent / "mine").read_text() == "kept"


@pytest.mark.sample(0)
def test_the_command_ends_with_that_line(gallery: Path) -> None:
    UNUSABLE["cut short"](gallery)
    code, _, err = qwenimg("serve", "-m", "shapes", "--port", "0", "-o", gallery, cwd=gallery.parent)
    assert code == 2 and NAME in err and "bug" not in err and "Traceback" not in err, err


FIRST = "number = (select min(number) from %s)"
JOB, PICTURE = FIRST % "jobs", FIRST % "pictures"
ROWS: dict[str, Damage] = {
    "a request that is no JSON": sql(f"update jobs set request = '{{' where {JOB}"),
    "a request that is a list": sql(f"update jobs set request = '[]' where {JOB}"),
    "a request without seeds": sql(f"""update jobs set request = '{{"prompt": "x"}}' where {JOB}"""),
    "seeds that are words": sql(f"""update jobs set request = '{{"prompt": "x", "seeds": ["a"]}}' where {JOB}"""),
    "no prompt": sql(f"""update jobs set request = '{{"seeds": [1]}}' where {JOB}"""),
    "an unknown option": sql(f"""update jobs set request = '{{"prompt": "x", "y": 1, "seeds": [1]}}' where {JOB}"""),
    "a broken aspect": sql(
        f"""update jobs set request = '{{"prompt": "x", "aspect": "1/0", "seeds": [1]}}' where {JOB}"""
    ),
    "a lora that is a number": sql(f"""update jobs set request = '{{"lora": 3, "seeds": [1]}}' where {JOB}"""),
    "a deep request": sql(f"update jobs set request = ? where {JOB}", "[" * 100_000),
    "a request of bytes": sql(f"update jobs set request = x'ff00' where {JOB}"),
    "a deadline that is a word": sql(f"update jobs set deadline = 'soon' where {JOB}"),
    "a deadline without an end": sql(f"update jobs set deadline = 9e999 where {JOB}"),
    "a time that is bytes": sql(f"update jobs set created = x'00' where {JOB}"),
    "a mask that is a number": sql(f"update jobs set mask = 3 where {JOB}"),
    "a count below 0": sql(f"update jobs set drawn = -1 where {JOB}"),
    "an id that is a number": sql(f"update jobs set id = 7 where {JOB}"),
    "a model of bytes": sql(f"update jobs set model = x'ff' where {JOB}"),
    "a picture of a job that is a word": sql("insert into images select id, 'images', 0, 'x' from jobs"),
    "a recipe that is no JSON": sql(f"update pictures set recipe = 'x' where {PICTURE}"),
    "a recipe that is a number": sql(f"update pictures set recipe = 3 where {PICTURE}"),
    "a recipe with NaN": sql(f"""update pictures set recipe = '{{"prompt": "x", "a": NaN}}' where {PICTURE}"""),
    "a recipe without a prompt": sql(f"""update pictures set recipe = '{{"prompt": 3}}' where {PICTURE}"""),
    "a deep recipe": sql(f"update pictures set recipe = ? where {PICTURE}", "[" * 100_000),
    "half of a surrogate pair": sql(f"""update pictures set recipe = '{{"prompt": "\\ud800"}}' where {PICTURE}"""),
    "a name that leads out": sql(f"update pictures set name = '../other.png' where {PICTURE}"),
    "a name of another picture": sql(f"update pictures set name = ? where {PICTURE}", "0" * 16 + "-0.png"),
    "a suffix that is none": sql(f"update pictures set name = id || '.exe' where {PICTURE}"),
    "a time that is not finite": sql(f"update pictures set created = 9e999 where {PICTURE}"),
    "a thumbnail that is a word": sql(f"update pictures set thumbnail = 'x' where {PICTURE}"),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_damaged_row_takes_nothing_else_with_it(gallery: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """All is listed and sent as JSON, the other pictures with their recipes; the other job and its pictures are
    whole."""
    ROWS[name](gallery)

    async def whole() -> None:
        async with dispatching(gallery, monkeypatch) as (dispatcher, _):
            journal = dispatcher.journal
            api = JobsApi(dispatcher, journal, SETTINGS)
            rows = [api._live(row) for row in journal.jobs(9)]
            pictures, last = journal.pictures(None, 9)
            print(name, [row["state"] for row in rows], [kept.recipe for kept in pictures])
            about: Any = {"rows": rows, "pictures": [kept.described() for kept in pictures], "next": last}
            assert json.loads(JsonAnswer(about).body)
            assert len(rows) == 2 and 2 <= len(pictures) <= 3
            assert [kept.recipe for kept in pictures][:2] == [
                {"prompt": "job of 1", "seed": 0}, {"prompt": "job of 2", "seed": 1},
            ]  # fmt: skip
            for kept in pictures:
                assert isinstance(journal.thumbnail(kept), bytes) and journal.file(kept) is not None

    asyncio.run(whole())


def test_a_picture_that_is_a_link_is_not_sent(gallery: Path) -> None:
    with closing(Journal(gallery)) as journal:
        (gallery.parent / "secret").write_text("secret")
        for kept, make in zip(journal.pictures(None, 9)[0], (os.symlink, None, "folder"), strict=True):
            file = gallery / kept.name
            file.unlink()
            if make is None:
                os.mkfifo(file)
            elif make == "folder":
                file.mkdir()
            else:
                file.symlink_to("../secret")
            assert journal.file(kept) is None


def test_a_folder_that_was_there_keeps_its_mode(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir(mode=0o755)
    (tmp_path / "mine").chmod(0o755)
    Journal(tmp_path / "mine").close()
    assert (tmp_path / "mine").stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "mine" / NAME).stat().st_mode & 0o077 == 0
    Journal(tmp_path / "ours" / "g").close()
    assert (tmp_path / "ours" / "g").stat().st_mode & 0o777 == 0o700
