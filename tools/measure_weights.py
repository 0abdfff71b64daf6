"""What keeping weights in codes costs: size of the published model, difference of pictures, verdicts of the self-test.

    python tools/measure_weights.py      # writes the table of docs/weights.md again

The self-test's 40 prompts are drawn by the built-in model in float32 on torch, from the same noise: with its weights as
they are, and by each policy.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from doc_tables import table, write

import qwenimg
from qwenimg.common.base.safe_files import open_regular
from qwenimg.common.networks import qwen_dit, qwen_vl
from qwenimg.common.networks.network import Network
from qwenimg.common.networks.qwen_dit import QwenDiTConfig
from qwenimg.common.networks.qwen_vl import QwenVLConfig
from qwenimg.common.shapes import selftest
from qwenimg.common.shapes.gate import selftest_prompts
from qwenimg.common.weights import quantise
from qwenimg.common.weights.plan import Entry, LoadPlan, Piece, Source
from qwenimg.common.weights.residency import ALWAYS
from qwenimg.common.weights.storage import Dense

POLICIES = ("8", "6", "4")


def published(network: Network, config: object) -> LoadPlan:
    """A plan of the published model in bfloat16, of no file."""
    uses = network.uses(network.manifest(config))
    with contextlib.closing(open_regular(Path(__file__))) as nothing:
        entries = {
            name: Entry(
                name=name,
                shape=use.shape,
                source=Source((Piece(name, nothing, "BF16", use.shape, 0, 2 * prod(use.shape)),)),
                storage=Dense("bfloat16"),
                residency=use.residency,
            )
            for name, use in uses.items()
        }
    return LoadPlan(component=network.name, entries=entries, files=())


def sizes(policy: str | None) -> list[str]:
    """GB of the transformer's weights that stay in memory, of all of them, and of the text encoder's."""
    found: list[str] = []
    for network, config in ((qwen_dit.NETWORK, QwenDiTConfig()), (qwen_vl.NETWORK, QwenVLConfig())):
        plan = published(network, config)
        if policy is not None and network.blocks is not None:
            plan = quantise.quantised(plan, quantise.parse(policy)[network.role], network.blocks)
        counts = [plan.when(ALWAYS).nbytes, plan.nbytes] if network.role == "transformer" else [plan.nbytes]
        found += [f"{count / 1e9:.1f}" for count in counts]
    return found


def drawn(**options: Any) -> tuple[list[np.ndarray], int]:
    """The self-test's pictures by the built-in model with `options`, and how many are right."""
    pipe = qwenimg.load("shapes", "cpu", "fp32", **options)
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
    exact, right = drawn()
    rows = [["as they are (bf16)", *sizes(None), "", "", f"{right} of {len(exact)}"]]
    for policy in POLICIES:
        made, right = drawn(quantize=policy)
        found = decibels(made, exact)
        figures = [f"{statistics.median(found):.1f} dB", f"{min(found):.1f} dB"]
        rows.append([f"`-q {policy}`", *sizes(policy), *figures, f"{right} of {len(made)}"])
        print(rows[-1])
    head = ["weights", "transformer, GB in memory", "GB in all", "text encoder, GB", "median PSNR", "worst", "right"]
    write("weights.md", "codes", table(head, rows))


if __name__ == "__main__":
    main()
