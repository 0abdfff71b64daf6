"""Our own API: jobs with events, and the gallery."""

from __future__ import annotations

import base64
import io
import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from PIL import Image
from support.drawing_here import drawing
from support.fake_worker import image_job
from support.processes import pixels, qwenimg
from support.servers import LONG, RunningServer, events, until_end

from qwenimg.cli.serve.journal import Journal
from qwenimg.cli.workers.messages import Draw, Finished, PictureDrawn
from qwenimg.common.base.errors import UsageError
from qwenimg.common.jobs.job import InputFiles, Job
from qwenimg.common.jobs.schema import request_schema
from qwenimg.common.pictures import input as pictures_input
from qwenimg.common.pipeline.controls import Controls

FEW = {"steps": 2, "size": "64x64"}


@pytest.fixture
def http(server: RunningServer) -> Iterator[httpx2.Client]:
    with server.http as http:
        yield http


@pytest.mark.sample(0)
def test_a_job_from_its_order_to_its_pictures(http: httpx2.Client, tmp_path: Path) -> None:
    answer = http.post("/api/jobs", json={"prompt": "a red circle", "seed": "7-8", **FEW})
    assert answer.status_code == 202
    job = answer.json()
    assert answer.headers["location"] == f"/api/jobs/{job['id']}" and job["request"]["seeds"] == [7, 8]
    with http.stream("GET", f"/api/jobs/{job['id']}/events") as response:
        news = list(events(response))
    names = [name for name, _ in news]
    assert names[0] == "job" and names[-1] == "end" and news[-1][1] == {"state": "done"}
    assert until_end(http, job["id"])["pictures"] == [f"{job['id']}-0", f"{job['id']}-1"]
    for i, seed in enumerate((7, 8)):
        answer = http.get(f"/api/pictures/{job['id']}-{i}")
        assert answer.headers["content-type"] == "image/png" and "immutable" in answer.headers["cache-control"]
        (tmp_path / f"ours-{seed}.png").write_bytes(answer.content)
        assert http.get(f"/api/pictures/{job['id']}-{i}/recipe").json()["seed"] == seed
    code, _, err = qwenimg("--from", "ours-7.png", "-s", "7-8", "-o", "{seed}.png", cwd=tmp_path)
    assert code == 0, err
    for seed in (7, 8):
        assert (pixels(tmp_path / f"{seed}.png") == pixels(tmp_path / f"ours-{seed}.png")).all()


def test_previews_of_a_job(http: httpx2.Client) -> None:
    """In its events, and in what is said of it to those who come later."""
    job = http.post("/api/jobs", json={"prompt": "a red circle", "size": "64x64", "steps": LONG}).json()["id"]
    with http.stream("GET", f"/api/jobs/{job}/events") as response:
        seen = next(data["preview"] for name, data in events(response) if name == "step" and "preview" in data)
    later = http.get(f"/api/jobs/{job}").json()["preview"]
    for data in (seen, later):
        image = Image.open(io.BytesIO(base64.b64decode(data)))
        assert (image.format, image.size) == ("JPEG", (8, 8))
    http.delete(f"/api/jobs/{job}")
    assert "preview" not in http.get(f"/api/jobs/{job}").json()


def test_the_news_of_all_jobs(http: httpx2.Client) -> None:
    """Who waits and in which job, steps and pictures with the ids of their jobs, and how each ended."""
    with http.stream("GET", "/api/events") as response:
        news = events(response)
        assert next(news) == ("jobs", {"jobs": []})
        ids = [http.post("/api/jobs", json={"prompt": str(i), "seed": i, **FEW}).json()["id"] for i in range(2)]
        ended, told = list[dict[str, Any]](), list[tuple[str, Any]]()
        while len(ended) < 2:
            name, data = next(news)
            told.append((name, data))
            ended += [data["ended"]] if "ended" in data else []
    assert [job["id"] for job in ended] == ids and [job["state"] for job in ended] == ["done", "done"]
    assert [job["id"] for job in told[-1][1]["jobs"]] == []
    assert {(name, data["id"]) for name, data in told if name == "step"} == {("step", one) for one in ids}
    assert [data["id"] for name, data in told if name == "picture"] == [f"{one}-0" for one in ids]
    both = [[job["id"] for job in data["jobs"]] for name, data in told if name == "jobs"]
    assert ids in both and all(one in (ids, ids[:1], ids[1:], []) for one in both)


def test_recipes_that_are_sent(http: httpx2.Client) -> None:
    """Ours gives what draws the same; a file without one, a broken one and a bomb are refused with no path."""
    done = until_end(http, http.post("/api/jobs", json={"prompt": "a ring", "seed": 2**40, **FEW}).json()["id"])
    kept = f"/api/pictures/{done['pictures'][0]}"
    file = http.get(kept).content

    def sent(data: bytes) -> httpx2.Response:
        return http.post("/api/recipe", json={"image": base64.b64encode(data).decode()})

    read = sent(file).json()
    assert read == http.get(f"{kept}/options").json() and read["options"]["seed"] == str(2**40)
    again = http.post("/api/jobs", json={**read["options"], "image": []}).json()
    same = until_end(http, again["id"])["pictures"][0]
    names = (same, done["pictures"][0])
    one, two = (Image.open(io.BytesIO(http.get(f"/api/pictures/{name}").content)).tobytes() for name in names)
    assert one == two
    plain = io.BytesIO()
    Image.new("RGB", (8, 8)).save(plain, "PNG")
    for data in (plain.getvalue(), b"x", file[:200], file[:60] + b"\xff" * 50, b"\x89PNG\r\n\x1a\n" + b"\xff" * 64):
        answer = sent(data)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "image", answer.text
        assert "/tmp" not in answer.text and len(answer.text) < 500
    for body in ({}, {"image": 3}, {"image": "http://127.0.0.1/x"}, {"image": "file:///etc/passwd"}):
        assert http.post("/api/recipe", json=body).status_code == 400


@pytest.mark.parametrize("part", ["", "/recipe", "/options", "/thumbnail"])
def test_pictures_that_are_not_there(http: httpx2.Client, part: str) -> None:
    for name in ("nope", "%2e%2e%2fgallery.sqlite3", "x" * 2000):
        assert http.get(f"/api/pictures/{name}{part}").status_code == 404


def test_the_events_of_a_job_that_is_drawn(http: httpx2.Client) -> None:
    job = http.post("/api/jobs", json={"prompt": "x", "steps": LONG}).json()["id"]
    with http.stream("GET", f"/api/jobs/{job}/events") as response:
        news = events(response)
        assert next(news)[1]["state"] in ("waiting", "drawing")
        step = next(data for name, data in news if name == "step")
        assert step["steps"] == LONG and step["picture"] == 0
        waits = http.post("/api/jobs", json={"prompt": "y", **FEW}).json()
        assert (waits["state"], waits["position"]) == ("waiting", 1)
        assert http.delete(f"/api/jobs/{waits['id']}").json()["state"] == "cancelled"
        http.delete(f"/api/jobs/{job}")
        assert next(data for name, data in news if name == "end") == {"state": "cancelled"}
    assert http.get(f"/api/jobs/{job}").json()["state"] == "cancelled"
    assert [row["state"] for row in http.get("/api/jobs?limit=2").json()["jobs"]] == ["cancelled"] * 2


def test_a_job_with_a_picture_and_a_mask(http: httpx2.Client) -> None:
    grey, mask = np.full((64, 64, 3), 128, np.uint8), np.zeros((64, 64), np.uint8)
    files = {}
    for name, array in (("image", grey), ("mask", mask)):
        out = io.BytesIO()
        Image.fromarray(array).save(out, "PNG")
        files[name] = f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}"
    job = http.post("/api/jobs", json={"prompt": "a red circle", "steps": 2, **files}).json()
    done = until_end(http, job["id"])
    there = np.asarray(Image.open(io.BytesIO(http.get(f"/api/pictures/{done['pictures'][0]}").content)))
    difference = float(np.abs(there.astype(int) - 128).mean())
    print(f"a black mask keeps the picture: mean difference {difference:.1f}")
    assert there.shape == (64, 64, 3) and difference < 12
    answer = http.post("/api/jobs", json={"prompt": "x", "mask": files["mask"]})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "mask"


def test_a_job_that_fails_says_why(http: httpx2.Client) -> None:
    image = base64.b64encode(b"no picture").decode()
    done = until_end(http, http.post("/api/jobs", json={"prompt": "x", "image": image, **FEW}).json()["id"])
    assert done["state"] == "failed" and done["error"].startswith("image: is no PNG") and done["pictures"] == []


def test_the_deadline_of_a_job(http: httpx2.Client) -> None:
    done = until_end(http, http.post("/api/jobs", json={"prompt": "x", "steps": LONG, "deadline": 0.01}).json()["id"])
    assert done["state"] == "failed" and "not done within 0.01 seconds" in done["error"]


def test_the_gallery_is_read_in_pages_and_a_picture_is_removed(http: httpx2.Client) -> None:
    done = until_end(http, http.post("/api/jobs", json={"prompt": "x", "num_images": 3, **FEW}).json()["id"])
    first = http.get("/api/pictures?limit=2").json()
    assert [row["id"] for row in first["pictures"]] == [f"{done['id']}-2", f"{done['id']}-1"]
    second = http.get(f"/api/pictures?limit=1&before={first['next']}").json()
    assert [row["id"] for row in second["pictures"]] == [f"{done['id']}-0"]
    assert http.delete(f"/api/pictures/{done['id']}-1").status_code == 204
    assert http.get(f"/api/pictures/{done['id']}-1").status_code == 404
    assert http.get(f"/api/jobs/{done['id']}").json()["pictures"] == [f"{done['id']}-0", f"{done['id']}-2"]


@pytest.mark.parametrize(
    "name",
    ["..%2f..%2fetc%2fpasswd", "../../etc/passwd", "%2e%2e", "x", "gallery.sqlite3", "%00", "' or 1=1 --", "a" * 5000],
)
def test_ids_are_no_paths(http: httpx2.Client, name: str) -> None:
    for path in (
        f"/api/pictures/{name}",
        f"/api/pictures/{name}/recipe",
        f"/api/jobs/{name}",
        f"/api/jobs/{name}/events",
    ):
        answer = http.get(path)
        assert answer.status_code == 404 and "sqlite" not in answer.text and "root:" not in answer.text


@pytest.mark.parametrize(
    "query", ["limit=0", "limit=101", "limit=-1", "limit=x", "before=0", f"before={'9' * 30}", "limit=²"]
)
def test_wrong_pages(http: httpx2.Client, query: str) -> None:
    answer = http.get(f"/api/pictures?{query}")
    assert answer.status_code == 400 and answer.json()["error"]["param"] in ("limit", "before")


def test_what_a_page_needs_for_its_form(http: httpx2.Client) -> None:
    assert http.get("/api/schema").json() == json.loads(json.dumps(request_schema()))
    [model] = http.get("/api/models").json()["models"]
    assert (model["id"], model["family"]) == ("shapes", "qwen-image")
    assert model["defaults"]["steps"] >= 1 and "step_cache" in model["options"]


def test_other_paths_and_methods(http: httpx2.Client) -> None:
    assert http.get("/nothing").status_code == 404 and http.get("/page.html").status_code == 404
    assert http.put("/api/jobs").status_code == 405 and http.get("/v1/images/generations").status_code == 405
    assert http.post("/v1/images/variations").status_code == 404
    assert http.get("/health").json() == {"status": "ok"} and http.get("/ready").status_code == 200


def test_the_figures(http: httpx2.Client) -> None:
    until_end(http, http.post("/api/jobs", json={"prompt": "x", **FEW}).json()["id"])
    text = http.get("/metrics").text
    figures = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in text.splitlines() if line[0] != "#"}
    assert figures["qwenimg_pictures_total"] >= 1 and figures['qwenimg_worker_up{worker="0"}'] == 1
    assert figures['qwenimg_worker_peak_bytes{worker="0"}'] > 50e6 and figures["qwenimg_worker_restarts_total"] == 0


# The journal alone


def drawn(of: Any, index: int, data: bytes = b"PNG") -> PictureDrawn:
    return PictureDrawn(id=of.id, index=index, data=data, recipe={"seed": index}, seconds=0.1)


def test_the_journal_is_used_by_one_server(tmp_path: Path) -> None:
    first = Journal(tmp_path)
    with pytest.raises(UsageError, match="another server"):
        Journal(tmp_path)
    first.close()
    Journal(tmp_path).close()
    assert (tmp_path / "gallery.sqlite3").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("content", [b"no database", b"SQLite format 3\0" + bytes(100)])
def test_a_broken_journal_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "gallery.sqlite3").write_bytes(content)
    for _ in range(2):  # and leaves nothing locked
        with pytest.raises(UsageError, match=r"gallery\.sqlite3 cannot be used"):
            Journal(tmp_path)


def test_a_journal_of_another_version_is_named(tmp_path: Path) -> None:
    Journal(tmp_path).close()
    with sqlite3.connect(tmp_path / "gallery.sqlite3") as base:
        base.execute("pragma user_version = 9")
    base.close()
    with pytest.raises(UsageError, match="format 9"):
        Journal(tmp_path)


def test_the_pictures_of_a_job_are_kept_until_its_end(tmp_path: Path) -> None:
    """Each in its field and in its order, also for the next server."""
    journal = Journal(tmp_path)
    job = image_job(kind="job", images=(b"a", b"b"), controls=(b"c", b"d", b"c"), mask=b"e")
    journal.add(job)
    journal.close()
    journal = Journal(tmp_path)
    [kept] = journal.unfinished()
    assert kept.spec == job.spec
    assert kept.fingerprint == job.fingerprint
    job.end("done")
    journal.end(job)
    journal.close()
    with sqlite3.connect(tmp_path / "gallery.sqlite3") as base:
        assert base.execute("select count(*) from images").fetchone() == (0,)
    base.close()


def test_a_picture_whose_row_was_lost_is_written_again(tmp_path: Path) -> None:
    """As after kill -9 between the file and its row."""
    journal = Journal(tmp_path)
    job = image_job(kind="job", seeds=(1, 2))
    journal.add(job)
    (tmp_path / f"{job.id}-0.png").write_bytes(b"of the killed server")
    journal.keep(job, drawn(job, 0, b"again"))
    assert (tmp_path / f"{job.id}-0.png").read_bytes() == b"again"
    [unfinished] = journal.unfinished()
    assert (unfinished.id, unfinished.first, unfinished.spec.seeds) == (job.id, 1, (1, 2))
    job.end("done")
    journal.end(job)
    assert journal.unfinished() == [] and len(journal.pictures(None, 9)[0]) == 1
    journal.close()


def test_pictures_that_the_model_does_not_take_are_refused_before_one_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 of 36 megapixels took 1.46 GB before the refusal."""

    def reads(*_: object) -> None:
        raise AssertionError("a picture was read")

    monkeypatch.setattr(pictures_input, "read_image", reads)
    worker, sent = drawing(Path("shapes"))
    job = Job(options={"prompt": "x"}, seeds=(1,), files=InputFiles(images=(b"",) * 16))
    worker.draw(Draw(id="o", model="tiny", job=job))
    ended = sent[-1]
    assert isinstance(ended, Finished) and ended.refused and "16 pictures" in ended.error, ended
    with pytest.raises(UsageError, match="no control"):
        Controls(refusal=lambda: "this family has no control networks").check_taken("net")
