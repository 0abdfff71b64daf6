"""What fits is read once for all pictures of a pipeline; what the preset `memory` does where little fits."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import qwenimg
from qwenimg.common.base.safe_files import OpenFile
from qwenimg.common.parts import vae
from qwenimg.common.pipeline import fit_options

ASKED: dict[str, Any] = {"width": 48, "height": 32, "steps": 2, "guidance": 3.0, "seed": 0}


@pytest.mark.parametrize("kind", ["qwen", "sd15"])
@pytest.mark.parametrize("backend", ["cpu", "mlx"])
@pytest.mark.sample(1)
def test_between_pictures_nothing_is_read_that_fits(
    tiny_folder: Path, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, backend: str, kind: str
) -> None:
    """Another seed or size reads nothing, another prompt the text encoder, which is not kept."""
    reads: Counter[str] = Counter()
    fill = OpenFile.fill

    def counted(self: OpenFile, view: memoryview, begin: int) -> None:
        reads[self.path.parent.name] += 1
        fill(self, view, begin)

    monkeypatch.setattr(OpenFile, "fill", counted)
    pipe = qwenimg.load(tiny_folder if kind == "qwen" else folders[kind], backend=backend, precision="fp32")
    found = []
    for prompt, changes in (
        ("a red circle", {"seed": 1}),
        ("a red circle", {"seed": 2}),
        ("a red circle", {"seed": 3, "width": 32, "height": 48}),
        ("a blue square", {"seed": 1}),
    ):
        reads.clear()
        pipe(prompt, **(ASKED | changes))
        found.append(dict(reads))
    pipe.close()
    print(f"{backend} {kind}: reads of each picture {found}")
    denoiser = "transformer" if kind == "qwen" else "unet"
    assert found[0].keys() >= {"text_encoder", denoiser, "vae"}
    assert found[1:] == [{}, {}, {"text_encoder": found[0]["text_encoder"]}]


@pytest.mark.parametrize("kind", ["qwen", "sd15"])
@pytest.mark.sample(1)
def test_what_the_preset_memory_does(
    tiny_folder: Path, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """It decodes in bands and frees or streams what does not fit in what is free, which is planned too; the latents are
    those of the same weights with room for all."""
    path = tiny_folder if kind == "qwen" else folders[kind]
    monkeypatch.setattr(vae, "LARGE", 2)
    asked = ASKED | {"seed": 5}
    roomy = qwenimg.load(path, backend="cpu", precision="fp32")
    latents = roomy("a red circle", **asked).latents.tobytes()
    roomy.close()
    pipe = qwenimg.load(path, backend="cpu", preset="memory", precision="fp32")
    request = pipe.check("a red circle", **asked)
    weights = next(
        stage.weights for stage in fit_options.plan_memory(pipe.model, request).stages if stage.name == "denoise"
    )
    told: list[str] = []
    pipe.runtime.notify = lambda stage, text: told.append(text)
    free = fit_options.plan_memory(pipe.model, request).largest.peak - weights // 4
    monkeypatch.setattr(pipe.engine, "free_memory", lambda: free)
    planned = fit_options.plan_memory(pipe.model, request)
    made = pipe("a red circle", **asked)
    pipe.close()
    print(f"{kind}: {planned.largest.peak} bytes planned of {free}; {told}")
    assert planned.largest.peak <= free and any(line.startswith("decoding in bands of") for line in told)
    assert made.latents.tobytes() == latents
