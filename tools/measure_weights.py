"""What keeping weights in codes costs: size of the published model, difference of pictures, verdicts of the self-test.

    python tools/measure_weights.py      # writes the table of docs/weights.md again

The self-test's 40 prompts are drawn by the built-in model in float32 on torch, from the same noise: with its weights as
they are, and by each policy.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable

import numpy as np
from doc_tables import table, write

import qwenimg
from qwenimg.common.networks import qwen_dit, qwen_vl
from qwenimg.common.networks.qwen_dit import QwenDiTConfig
from qwenimg.common.networks.qwen_vl import QwenVLConfig
from qwenimg.common.shapes import selftest
from qwenimg.common.shapes.gate import selftest_prompts
from qwenimg.common.weights import on_paper, quantise
from qwenimg.common.weights.residency import ALWAYS

POLICIES = ("8", "6", "4")


def sizes(policy: str | None) -> list[str]:
    """GB of the transformer's weights that stay in memory, of all of them, and of the text encoder's."""
    found: list[str] = []
    for network, config in ((qwen_dit.NETWORK, QwenDiTConfig()), (qwen_vl.NETWORK, QwenVLConfig())):
        plan = on_paper.plan(network.name, network.uses(network.manifest(config)))
        if policy is not None and network.blocks is not None:
            plan = quantise.quantised(plan, quantise.parse(policy)[network.role], network.blocks)
        counts = [plan.when(ALWAYS).nbytes, plan.nbytes] if network.role == "transformer" else [plan.nbytes]
        found += [f"{count / 1e9:.1f}" for count in counts]
    return found


def drawn(policy: str | None) -> tuple[list[np.ndarray], int]:
    pipe = qwenimg.load("shapes", "cpu", "fp32", quantize=policy)
    made, right = [], 0
    for event in selftest.draw(pipe, selftest_prompts()):
        if isinstance(event, selftest.Answer):
            made.append(event.pixels.astype(np.float64))
            right += not event.wrong
    pipe.close()
    return made, right


def decibels(pictures: Iterable[np.ndarray], exact: Iterable[np.ndarray]) -> list[float]:
    return [
        10 * np.log10(255**2 / max(float(np.mean((a - b) ** 2)), 1e-6)) for a, b in zip(pictures, exact, strict=True)
    ]


def main() -> None:
    exact, right = drawn(None)
    rows = [["as they are (bf16)", *sizes(None), "", "", f"{right} of {len(exact)}"]]
    for policy in POLICIES:
        made, right = drawn(policy)
        found = decibels(made, exact)
        figures = [f"{statistics.median(found):.1f} dB", f"{min(found):.1f} dB"]
        rows.append([f"`-q {policy}`", *sizes(policy), *figures, f"{right} of {len(made)}"])
        print(rows[-1])
    head = ["weights", "transformer, GB in memory", "GB in all", "text encoder, GB", "median PSNR", "worst", "right"]
    write("weights.md", "codes", table(head, rows))


if __name__ == "__main__":
    main()
