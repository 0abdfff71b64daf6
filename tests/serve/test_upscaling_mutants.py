"""Bodies and pictures that ask for upscaling, changed by the thousand: each is done, or refused in one line."""

from __future__ import annotations

import io
import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from support import frameworks, upscalers  # noqa: F401
from support.file_mutants import damaged
from support.upscalers import as_torch

from qwenimg import backends
from qwenimg.cli.commands import upscale
from qwenimg.cli.serve.apis import sd_extras, sd_fields
from qwenimg.cli.serve.http_error import HttpError
from qwenimg.cli.serve.settings import Settings
from qwenimg.cli.workers import enlarging
from qwenimg.cli.workers.messages import Draw, Enlarging
from qwenimg.common.base.errors import QwenimgError
from qwenimg.common.families.load_options import LoadOptions
from qwenimg.common.hub.network_search import read_upscaler, upscaling
from qwenimg.common.jobs.job import InputFiles, Job

VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, 2, -1, 3, 8, 9, 10**30, -(10**30), 0.5, 1e-320, 1e308, float("nan"), float("inf"), 2.0, "",
    "0", "2", " ", "None", "Latent", "Lanczos", "x4", "../x4", "/etc/passwd", "\0", "\ud800", "\x1b[2J", "x" * 5_000,
    [], [1], {}, {"a": 1}, [[[]]], "R-ESRGAN 4x+", "x4.pth", 4096, 65536, 2**63,
)  # fmt: skip
EXTRAS = (
    "resize_mode", "upscaling_resize", "upscaling_resize_w", "upscaling_resize_h", "upscaling_crop", "upscaler_1",
    "upscaler_2", "gfpgan_visibility", "codeformer_visibility", "codeformer_weight", "extras_upscaler_2_visibility",
    "upscaling_max_side_length", "show_extras_results", "upscale_first",
)  # fmt: skip
SECOND = (
    "enable_hr", "hr_scale", "hr_upscaler", "hr_second_pass_steps", "hr_resize_x", "hr_resize_y", "denoising_strength",
    "hr_checkpoint_name", "hr_sampler_name", "hr_scheduler", "hr_prompt", "hr_negative_prompt", "width", "height",
    "steps", "firstphase_width", "firstphase_height",
)  # fmt: skip


def body(names: tuple[str, ...], base: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    changed = {name: chance.choice(VALUES) for name in chance.sample(names, chance.randrange(1, 5))}
    return base | changed


@pytest.mark.parametrize("count", [200, pytest.param(2_000, marks=pytest.mark.slow)])
def test_bodies(count: int) -> None:
    """The fields of extra-single-image and of txt2img's second pass."""
    settings = Settings(models={"shapes": LoadOptions()}, upscalers={"x4": "/models/x4.pth"})
    reads: tuple[tuple[Callable[[dict[str, Any]], object], tuple[str, ...], dict[str, Any]], ...] = (
        (lambda data: sd_extras.enlarging(data, settings), EXTRAS, {"upscaler_1": "x4"}),
        (sd_fields.second_pass, SECOND, {"enable_hr": True}),
    )
    for index, (read, names, base) in enumerate(reads):
        chance, found = random.Random(index), Counter[str]()
        for _ in range(count):
            data = body(names, base, chance)
            try:
                read(data)
                found["taken"] += 1
            except HttpError as error:
                found["refused"] += 1
                text = str(error)
                assert error.status == 400 or error.status == 404, data
                assert len(text) <= 300 and "\n" not in text and "\x1b" not in text and text.isprintable(), data
                json.dumps(text).encode()
        print(f"{names[0]}: {dict(found)}")
        assert found["taken"] and found["refused"]


def picture() -> bytes:
    file, info = io.BytesIO(), PngInfo()
    info.add_text("parameters", "a cat\nSteps: 1")
    info.add_itxt("qwenimg", json.dumps({"seed": 1}))
    info.add_text("qwenimg-upscaling", "{}")
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (6, 5, 4), np.uint8)).save(file, "PNG", pnginfo=info)
    return file.getvalue()


@pytest.mark.parametrize(
    "count", [10, pytest.param(60, marks=pytest.mark.rest), pytest.param(1_000, marks=pytest.mark.slow)]
)
def test_pictures(count: int, tmp_path: Path) -> None:
    """Of `qwenimg upscale PICTURE`, on a backend, and of a client, by resampling."""
    as_torch(tmp_path / "x4.pth", upscalers.rrdbnet(blocks=1, features=8, growth=4))
    network = read_upscaler(tmp_path / "x4.pth")
    ready = upscaling(network, backends.load("cpu"), "fp32", None, lambda kind, text: None)
    whole, chance = picture(), random.Random(7)
    nothing: Any = None  # resampling uses no model

    def by_command(data: bytes) -> None:
        (tmp_path / "mutant.png").write_bytes(data)
        upscale.enlarged(ready, tmp_path / "mutant.png", 2, ".png", True, lambda kind, text: None)

    def by_server(data: bytes) -> None:
        job = Job(options={"prompt": ""}, seeds=(0,), files=InputFiles(images=(data,)))
        task = Draw(id="a", model="shapes", job=job)
        enlarging.enlarged(nothing, task, Enlarging(upscaler=chance.choice(("lanczos", "nearest")), by=2))

    for name, make in (("upscale", by_command), ("extra-single-image", by_server)):
        found = Counter[str]()
        for index in range(count):
            data = damaged(whole, len(whole), chance) if index else whole
            try:
                make(data)
                found["made"] += 1
            except QwenimgError as error:
                found["refused"] += 1
                assert len(str(error)) <= 300 and str(error).isprintable(), error
        print(f"{name}: {dict(found)}")
        assert found["made"] and found["refused"]
    ready.close()
