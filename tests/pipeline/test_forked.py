"""A forked child has none of its parent's threads: what waits for them waits for ever, so it is refused in one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes import ENVIRONMENT

HANGS = 300  # seconds after which a child that should have answered is taken for stuck; no test waits for them
SCRIPT = """
import json, multiprocessing, sys
import qwenimg

backend, hangs = sys.argv[1], float(sys.argv[2])
small = {"width": 64, "height": 64, "steps": 2}
fork = multiprocessing.get_context("fork")
load = lambda: qwenimg.load("shapes", backend)

def answer(call):
    try:
        call()
        return "done"
    except qwenimg.UsageError as error:
        return str(error)

def in_child(*calls):
    ours, theirs = fork.Pipe()
    child = fork.Process(target=lambda: theirs.send([answer(call) for call in calls]), daemon=True)
    child.start()
    return ours.recv() if ours.poll(hangs) else ["hangs"]

before = in_child(lambda: load()("a red circle", **small))
pipe = load()
stream = pipe.stream("a red circle", **small)
next(stream)
after = in_child(
    lambda: next(stream),
    lambda: pipe("a red circle", **small),
    lambda: pipe.estimate("a red circle", **small),
    lambda: pipe.prepare(["a red circle"]),
    pipe.free_transformer,
    load,
)
*_, result = stream
print(json.dumps([before, after, list(result.pixels.shape)]))
"""


@pytest.mark.parametrize("backend", ["cpu", "mlx"])
@pytest.mark.sample(0)
def test_a_forked_child_is_refused_and_the_parent_goes_on(tmp_path: Path, backend: str) -> None:
    command = [sys.executable, "-c", SCRIPT, backend, str(HANGS)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=ENVIRONMENT, timeout=2 * HANGS)
    assert done.returncode == 0, done.stderr[-2000:]
    before, after, shape = json.loads(done.stdout)
    assert before == ["done"], "one that loads the model itself draws"
    print(after[0])
    assert len(after) == 6 and all('get_context("spawn")' in text and "\n" not in text for text in after), after
    assert shape == [64, 64, 3]
