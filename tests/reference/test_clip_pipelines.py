"""From a prompt to text states and pooled vector: as the pipelines of diffusers give them to their UNet."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from support import tiny_ldm
from support.clip_models import BACKENDS, FLOAT32, model_on, opened, relative, run

from qwenimg.common.networks.encoders import clip
from qwenimg.common.prompts import clip as clip_tokenizer
from qwenimg.common.prompts import weighted

PROMPTS = ("", "a photo of a Red Circle!! and 红色", "red " * 100)  # the reference cuts the last one off


class Reference:
    """diffusers' pipeline of a type, and its folder of text encoders and tokenizers."""

    def __init__(self, folder: Path, kind: str):
        self.folder, self.sdxl = folder, "xl" in kind
        models = tiny_ldm.models_of(kind)
        self.parts = [name for name in models if "text" in name]
        tiny_ldm.write_folder(folder, {name: models[name] for name in self.parts})
        self.pipe = tiny_ldm.pipeline(folder, kind, models)
        if not self.sdxl:
            # The class lost this attribute in transformers 5, and clip_skip needs it. Not by assignment, which would
            # make the model a part of itself.
            self.pipe.text_encoder.__dict__["text_model"] = self.pipe.text_encoder

    def tokenizer(self, part: str) -> Path:
        return self.folder / part.replace("text_encoder", "tokenizer")

    def states(self, prompt: str, clip_skip: int | None) -> list[torch.Tensor]:
        with torch.no_grad():
            if self.sdxl:
                found = self.pipe.encode_prompt(prompt, do_classifier_free_guidance=False, clip_skip=clip_skip)
                return [found[0], found[2]]
            return [self.pipe.encode_prompt(prompt, "cpu", 1, False, clip_skip=clip_skip)[0]]


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reference]:
    root = tmp_path_factory.mktemp("clip-pipelines")
    return {kind: Reference(root / kind, kind) for kind in tiny_ldm.UNETS}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", tiny_ldm.UNETS)
@pytest.mark.sample(1)
def test_states_are_the_references(references: dict[str, Reference], kind: str, backend: str) -> None:
    reference, twin = references[kind], BACKENDS[backend]()
    worst = 0.0
    for clip_skip in (0, 1):
        for prompt in PROMPTS:
            states, pooled = [], np.zeros(0)
            for part in reference.parts:
                folder = reference.folder / part
                config, plan = opened(folder)
                plan.close()
                tokenizer = clip_tokenizer.load(reference.tokenizer(part))
                ids = np.array([weighted.chunks(tokenizer, prompt)[0].ids])
                how = clip.used_states(config, reference.sdxl, clip_skip)
                made = run(twin, model_on(twin, folder, "float32", "float32"), config, ids, *how)
                states.append(made[0].values)
                pooled = made[1].values
            expected = reference.states(prompt, clip_skip or None)
            for ours, theirs in zip((np.concatenate(states, axis=-1), pooled), expected, strict=False):
                worst = max(worst, relative(ours, theirs))
    print(f"{kind} on {backend}: {worst:.1e}")
    assert worst <= FLOAT32
