"""Long runs of the server: many kills, many pictures, many clients. `test_process` and `test_openai` have short."""

from __future__ import annotations

import base64
import hashlib
import io
import random
import signal
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import openai
import psutil
import pytest
from PIL import Image
from support.servers import RunningServer, events, serving, until_end

pytestmark = pytest.mark.slow
KILLS, PICTURES, CLIENTS = 20, 500, 200
FRONT_MB = 60
SLOPE_MB = 1.0  # of memory for each 100 pictures
FEW: dict[str, Any] = {"steps": 2, "size": "64x64"}


def test_twenty_kills_at_random_moments(tmp_path: Path) -> None:
    """Nothing is lost, nothing is there twice, nothing is half-written, and no worker is left."""
    chance = random.Random(7)
    gallery = tmp_path / "g"
    wanted: dict[str, list[int]] = {}
    for kill in range(KILLS):
        server = RunningServer(gallery, "--queue", "1000")
        try:
            if kill % 5 == 4:
                server.http.get("/health")  # while the model is loading
            else:
                server.says("ready:")
                with server.http as http, http.stream("GET", "/api/events") as response:
                    for i in range(2):
                        seeds = [chance.randrange(2**31) for _ in range(3)]
                        body = {
                            "prompt": f"job {kill} {i}",
                            "steps": 12,
                            "size": "64x64",
                            "seed": ",".join(map(str, seeds)),
                        }
                        wanted[http.post("/api/jobs", json=body).json()["id"]] = seeds
                    news = events(response)
                    for _ in range(chance.randrange(2, 60)):
                        next(news)
            workers = server.workers
            server.send(signal.SIGKILL)
            server.process.wait()
            psutil.wait_procs([psutil.Process(pid) for pid in workers if psutil.pid_exists(pid)])
        finally:
            server.close()
    with serving(gallery, "--queue", "1000") as server, server.http as http:
        for name, seeds in wanted.items():
            job = until_end(http, name)
            assert (job["state"], len(job["pictures"])) == ("done", len(seeds)), job
            recipes = [http.get(f"/api/pictures/{one}/recipe").json()["seed"] for one in job["pictures"]]
            assert recipes == seeds, "each seed once, in its order"
        rows, before = list[dict[str, Any]](), ""
        while part := http.get(f"/api/pictures?limit=100{before}").json():
            rows += part["pictures"]
            if part["next"] is None:
                break
            before = f"&before={part['next']}"
        for row in rows:
            Image.open(io.BytesIO(http.get(f"/api/pictures/{row['id']}").content)).load()
    files = {path.name for path in gallery.iterdir()}
    assert {f"{row['id']}.png" for row in rows} == {name for name in files if name.endswith(".png")}
    assert len(rows) == sum(map(len, wanted.values())) and not [name for name in files if name.endswith(".part")]
    print(f"{KILLS} kills, {len(wanted)} jobs, {len(rows)} pictures")


def test_many_pictures_in_a_row(tmp_path: Path) -> None:
    """Memory and descriptors stay what they are, of the front and of the worker."""
    with serving(tmp_path / "g") as server, server.http as http:
        front, [worker] = psutil.Process(server.process.pid), map(psutil.Process, server.workers)
        notes = []
        for i in range(PICTURES):
            if i % 2:
                done = until_end(http, http.post("/api/jobs", json={"prompt": "a ring", "seed": i, **FEW}).json()["id"])
                assert done["state"] == "done"
            else:
                http.post("/v1/images/generations", json={"prompt": "a ring", "seed": i, **FEW}).raise_for_status()
            if i % 50 == 49:
                sizes = [one.memory_info().rss / 2**20 for one in (front, worker)]
                notes.append((i + 1, *sizes, front.num_fds(), worker.num_fds()))
                print("{} pictures: front {:.1f} MB, worker {:.1f} MB, {} and {} descriptors".format(*notes[-1]))
    table = np.array([note for note in notes if note[0] > 100])
    slopes = [float(np.polyfit(table[:, 0] / 100, table[:, column], 1)[0]) for column in (1, 2)]
    print(f"MB for each 100 pictures: front {slopes[0]:.2f}, worker {slopes[1]:.2f}")
    assert table[:, 1].max() < FRONT_MB and max(slopes) < SLOPE_MB
    assert np.ptp(table[:, 3]) <= 2 and np.ptp(table[:, 4]) == 0


def test_two_hundred_clients_at_once(tmp_path: Path) -> None:
    """Each gets its own picture, after as many refusals as it takes; none hangs."""
    with serving(tmp_path / "g") as server:

        def ask(seed: int) -> tuple[str, int]:
            with openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0, timeout=600) as client:
                refusals = 0
                while True:
                    try:
                        prompt = f"a ring {seed}"
                        answer = client.images.generate(prompt=prompt, extra_body={"seed": seed, **FEW})
                    except openai.RateLimitError:
                        refusals += 1
                        continue
                    data = base64.b64decode(answer.data[0].b64_json)
                    text = Image.open(io.BytesIO(data)).text["parameters"]
                    assert text.startswith(prompt + "\n") and f"Seed: {seed}," in text
                    return hashlib.sha256(data).hexdigest(), refusals

        with ThreadPoolExecutor(CLIENTS) as pool:
            results = list(pool.map(ask, range(CLIENTS)))
        assert len(Counter(name for name, _ in results)) == CLIENTS, "two got one picture"
        metrics = httpx2.get(f"{server.address}/metrics").text
        assert "qwenimg_waiting 0.0" in metrics and 'qwenimg_requests_total{outcome="done"} 200.0' in metrics
    print(f"{CLIENTS} clients were served after {sum(count for _, count in results)} refusals")
