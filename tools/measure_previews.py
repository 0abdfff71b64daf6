"""Measure previews: their error by the number of pictures that the map has learned, and their share of a step's time.

    python tools/measure_previews.py [-m MODEL] [--backend BACKEND] [--pictures N]

It draws pictures of the built-in model's prompts, and compares the preview of the last step with the picture. A model
of your own is measured likewise; the kept map of its VAE is neither read nor changed.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np

import qwenimg
from qwenimg.common.pictures.pixels import from_uint8
from qwenimg.common.pipeline import preview

PROMPTS = (
    "a red circle", "a blue star above a green square", "a ring", "three yellow triangles", "a purple square",
    "a green star left of a red ring", "two blue circles", "an orange triangle below a white star",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", default="shapes")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--pictures", type=int, default=len(PROMPTS))
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, qwenimg.load(given.model, given.backend) as pipe:
        preview.folder = lambda: Path(folder)
        begun = time.perf_counter()
        pipe.fit_preview()
        print(f"{pipe.headline()}\nfitted to noise in {time.perf_counter() - begun:.2f} s, with the loading of the VAE")
        print("learned  RMS of 255  of one grey  ms a preview  share of a step")
        for i in range(given.pictures):
            measure(pipe, i)


def measure(pipe: qwenimg.Pipeline, number: int) -> None:
    """Draw picture `number`, and print a line about its previews."""
    costs, steps, seen = list[float](), list[float](), None
    for event in pipe.stream(PROMPTS[number % len(PROMPTS)], seed=number):
        if isinstance(event, qwenimg.Step):
            begun = time.perf_counter()
            seen = event.preview()
            costs.append(time.perf_counter() - begun)
            steps.append(event.seconds)
        else:
            assert seen is not None
            whole = 127.5 * (preview.means(event.latents, from_uint8(event.pixels)).transpose(1, 2, 0) + 1)
            error, grey = (np.sqrt(np.mean((one - whole) ** 2)) for one in (seen, whole.mean((0, 1))))
            cost, step = np.median(costs), np.median(steps)
            print(f"{number:7}  {error:10.1f}  {grey:11.1f}  {1000 * cost:12.2f}  {cost / step:15.2%}")


if __name__ == "__main__":
    main()
