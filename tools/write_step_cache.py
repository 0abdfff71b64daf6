"""Measures what `--step-cache` changes and saves on the built-in model, and writes the table of docs/memory.md.

python tools/write_step_cache.py
"""

from __future__ import annotations

import time
from statistics import mean

from doc_tables import table, write

import qwenimg
from qwenimg.common.pictures.pixels import psnr
from qwenimg.common.request import cached_calls

SHARES = (0.05, 0.1, 0.15, 0.2, 0.3)
PROMPTS = ("a red circle left of a blue square", "two green triangles above a yellow circle", "a blue square")
STEPS, SEED = 30, 3


def drawn(pipe: qwenimg.Pipeline, share: float) -> tuple[list[qwenimg.Result], float]:
    """And the seconds of the processor."""
    begun = time.process_time()
    return [pipe(prompt, seed=SEED, steps=STEPS, step_cache=share) for prompt in PROMPTS], time.process_time() - begun


def main() -> None:
    pipe = qwenimg.load("shapes", backend="cpu", precision="fp32")
    pipe(PROMPTS[0])  # loads
    whole, all_seconds = drawn(pipe, 0.0)
    rows = [("off", f"0 of {STEPS}", "1.00", "")]
    for share in SHARES:
        made, seconds = drawn(pipe, share)
        count = mean(len(cached_calls.parse(dict(one.recipe)["cached_calls"])) for one in made)
        ratios = [psnr(one.pixels, other.pixels) for one, other in zip(made, whole, strict=True)]
        rows.append((f"{share}", f"{count:.1f} of {STEPS}", f"{seconds / all_seconds:.2f}", f"{mean(ratios):.1f} dB"))
        print(*rows[-1])
    write("memory.md", "cache", table(("X", "calls cached", "processor time", "PSNR"), rows))


if __name__ == "__main__":
    main()
