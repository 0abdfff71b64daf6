"""Damaged files by the thousand: each is refused in one line or read, with the same verdict and the same bits on both
backends, in little time and memory."""

from __future__ import annotations

import random
import time
import tracemalloc
import warnings
from collections import Counter
from collections.abc import Callable, Iterable

import mlx.core as mx
import numpy as np
import torch

from qwenimg.backends.mlx import load as mlx_load
from qwenimg.backends.torch import load as torch_load
from qwenimg.common.base.errors import ModelError
from qwenimg.common.weights.plan import Entry, LoadPlan
from qwenimg.common.weights.storage import Packed
from qwenimg.common.weights.values import read_quantized

# Of processor time while memory is traced, which costs a whole file's tokenizer 0.8 on a machine without other work
SECONDS, MEMORY = 3.0, 50e6
EXTREMES = (0, 1, 2, 3, 8, 9, 31, 32, 2**16, 2**20, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1)


def damaged(whole: bytes, header: int, chance: random.Random) -> bytes:
    """One to three changes, nine in ten of them in the header."""
    changed = bytearray(whole)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        at = chance.randrange(min(header, len(changed)) if chance.random() < 0.9 else len(changed))
        kind = chance.randrange(6)
        if kind == 0:
            changed[at] ^= 1 << chance.randrange(8)
        elif kind == 1:
            changed[at] = chance.randrange(256)
        elif kind == 2:
            size = chance.choice((4, 8))
            changed[at : at + size] = (chance.choice(EXTREMES) % 2 ** (8 * size)).to_bytes(size, "little")
        elif kind == 3:
            del changed[at : at + chance.randrange(1, 40)]
        elif kind == 4:
            changed[at:at] = changed[max(0, at - chance.randrange(1, 40)) : at]
        else:
            del changed[at:]
        if not changed:
            break
    return bytes(changed)


def _on_torch(entry: Entry) -> np.ndarray:
    return torch_load.tensor(entry, torch.device("cpu")).float().numpy()


def _on_mlx(entry: Entry) -> np.ndarray:
    made = np.array(mlx_load.tensor(entry).astype(mx.float32))
    return made.transpose(0, 3, 1, 2) if made.ndim == 4 else made


def _verdict(plan: LoadPlan, load: Callable[[Entry], np.ndarray]) -> str | list[bytes]:
    """Of the whole file: its bits, or the line that refuses it."""
    try:
        return [
            b"".join(part.tobytes() for part in read_quantized(entry) if part is not None)
            if isinstance(entry.storage, Packed)
            else load(entry).tobytes()
            for entry in plan.entries.values()
        ]
    except ModelError as error:
        return str(error)


def read_alike(plan: LoadPlan, name: str) -> str:
    """`read`, or `values` where both backends refuse them in the same line."""
    first, second = _verdict(plan, _on_torch), _verdict(plan, _on_mlx)
    plan.close()
    assert first == second
    if isinstance(first, str):
        assert_line(first, name)
        return "values"
    return "read"


def assert_line(text: str, name: str) -> None:
    assert text.isprintable() and name in text and len(text) <= 300, text


def campaign(mutants: Iterable[Callable[[], str]], seed: int) -> Counter[str]:
    """What becomes of each mutant, by a call that writes it and says so."""
    found: Counter[str] = Counter()
    tracemalloc.start()
    for number, outcome in enumerate(mutants):
        start = time.process_time()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # numpy's would be lines beside the one that refuses
                found[outcome()] += 1
        except Exception as error:
            raise AssertionError(f"mutant {number} of seed {seed}") from error
        assert time.process_time() - start < SECONDS, number
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    print(f"{sum(found.values())} mutants: {dict(found)}, {peak / 1e6:.1f} MB at most")
    assert peak < MEMORY
    return found
