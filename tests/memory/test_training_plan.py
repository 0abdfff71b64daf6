"""The memory of a step of `train lora` against its plan: what the allocator counts, of torch on the pretend accelerator
and of MLX on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import random_folders as folders
from support.tiny_cascade import write_tiny_cascade

REST = pytest.mark.rest
NEAR = 0.10  # of what is measured
SIDES = {"cascade": 1024}  # of an embedding of 24 x 24; all others 256
MODELS: dict[str, dict[str, Any]] = {
    "flux": {
        "transformer": replace(folders.FLUX, num_layers=3, num_single_layers=4, num_attention_heads=2),
        "text_encoder_2": replace(folders.FLUX_T5, num_layers=1),
    },
    "z-image": {
        "transformer": replace(folders.ZIMAGE, dim=256, n_heads=2, n_kv_heads=2, n_layers=7),
        "text_encoder": replace(folders.ZIMAGE_TEXT, vocab_size=640),
    },
    "sd15": {"unet": replace(folders.SD15, block_out_channels=(32, 64, 64, 64))},
    "cascade": {
        "prior": {
            "block_out_channels": (256, 256), "num_attention_heads": (4, 4), "conditioning_dim": 256,
            "down_num_layers_per_block": (2, 3), "up_num_layers_per_block": (3, 2),
        },
    },
}  # fmt: skip
BITS = (None, "8", "4")  # of the base; a base in 4 bits has 8 in its first and last blocks

MEASURE = """
import gc, json, sys
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

from support import frameworks  # MLX's products are torch's
import numpy as np
import qwenimg
from qwenimg import backends
from qwenimg.common.training import plan
from qwenimg.common.training.config import LoraConfig
from qwenimg.common.training.encoded import encode_texts
from qwenimg.common.training.example import Example
from qwenimg.common.training.lora import LoraRun
from qwenimg.common.training.session import free_others, training_of

folder, backend, side, bits, checkpointing, dtype = json.loads(sys.argv[1])
stack = ExitStack()
if backend == "mlx":
    import mlx.core as mx
    now, forget, most = mx.get_active_memory, mx.reset_peak_memory, mx.get_peak_memory
else:
    from support.flash_attention import flash_attention
    from support.pretend_device import MEMORY, pretend_engine, pretending
    stack.enter_context(pretending())
    stack.enter_context(flash_attention())
    stack.enter_context(patch.object(backends, "load", lambda name: pretend_engine()))
    now, most = (lambda: MEMORY.now), (lambda: MEMORY.peak)
    def forget(): MEMORY.peak = MEMORY.now


class Pictures(list):
    def example(self, index, generator):
        return self[index]


idle, rank = now(), 16
precision = {"float32": "fp32", "bfloat16": "bf16"}[dtype]
pipe = qwenimg.load(folder, backend=backend, precision=precision, quantize=bits)
model, row = pipe.model, training_of(pipe)[1]
request = pipe.check("a red circle", width=side, height=side)
latents = np.zeros((1, model.channels, *model.vae.sides(side, side)), np.float32)
made = plan.plan(
    pipe, row, side=side, rank=rank, batch=1, checkpointing=checkpointing, caption=request.prompt,
    dtype=dtype, bits=bits,
)
config = LoraConfig(
    stem=Path(stack.enter_context(TemporaryDirectory())) / "run" / "lora", steps=3, rank=rank, rate=1e-4, batch=1,
    checkpointing=checkpointing, precision=precision, save_every=3,
)
run = LoraRun(config, model, row, Pictures([Example(latents=latents, request=request)]), None, lambda line: None)
encode_texts(model, [request], run.learner.training.request)
free_others(model, run.learner.training.parts.values())
steps = run.steps()
next(steps)
gc.collect()
forget()
next(steps)
print(json.dumps([made.peak, made.parts["weights of the base"], most() - idle]))
stack.close()
"""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("training")


SAMPLE = ("z-image", "mlx", "8", True, "float32")
HALF = ("z-image", "mlx", "8", True, "bfloat16")


def cases() -> list[object]:
    """All; one of them in the sample, and in the rest those of a model of one stream, which is fast. Many processors
    multiply in bfloat16 a hundred times slower: one of these is in the rest."""
    made = []
    for case in product(MODELS, ("cpu", "mlx"), BITS, (False, True), ("float32", "bfloat16")):
        rest = case == HALF or (case[0] == "z-image" and case[-1] == "float32")
        made.append(pytest.param(*case, marks=[] if case == SAMPLE else [REST if rest else pytest.mark.slow]))
    return made


@pytest.mark.parametrize(("model", "backend", "bits", "checkpointing", "dtype"), cases())
def test_a_step_takes_what_is_planned(
    model: str, backend: str, bits: str | None, checkpointing: bool, dtype: str, written: Path
) -> None:
    if not (written / model / "model_index.json").exists():
        if model == "cascade":
            write_tiny_cascade(written / model, **MODELS[model])
        else:
            folders.write_folder(written / model, model, **MODELS[model])
    asked = json.dumps([str(written / model), backend, SIDES.get(model, 256), bits, checkpointing, dtype])
    paths = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, asked], capture_output=True, text=True, check=False, env=os.environ | paths
    )
    assert done.returncode == 0, done.stderr
    planned, base, measured = json.loads(done.stdout)
    beside = (planned - base) / (measured - base)
    print(f"planned {planned / 1e6:.1f} MB, measured {measured / 1e6:.1f} ({planned / measured:.3f}); ", end="")
    print(f"without the base's {base / 1e6:.1f}: {beside:.3f}")
    assert abs(planned / measured - 1) <= NEAR
