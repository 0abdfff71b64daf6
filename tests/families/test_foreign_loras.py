"""LoRAs that no layer of the later families has, and such that have one layer in two dialects: refused by name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import qwenimg
from qwenimg import ModelError
from qwenimg.common.families import registry

# One layer of each family, square, in two programs' names
TWICE = {
    "z-image": ("transformer.layers.0.attention.to_out.0", "diffusion_model.layers.0.attention.out"),
    "flux-dev": ("transformer.transformer_blocks.0.attn.to_out.0", "diffusion_model.double_blocks.0.img_attn.proj"),
    "flux2-klein": ("transformer.transformer_blocks.0.attn.to_out.0", "diffusion_model.double_blocks.0.img_attn.proj"),
    "sd3": ("transformer.transformer_blocks.0.attn.to_out.0", "diffusion_model.joint_blocks.0.x_block.attn.proj"),
}
ANIMA = ("diffusion_model.blocks.0.self_attn.q_proj", "lora_unet_blocks_0_self_attn_q_proj")


def write(path: Path, width: int, *modules: str) -> Path:
    down, up = np.ones((2, width), np.float32), np.ones((width, 2), np.float32)
    halves = {
        f"{module}.lora_{half}.weight": value
        for module in modules
        for half, value in (zip("AB" if "." in module else ("down", "up"), (down, up), strict=True))
    }
    save_file(halves, path)
    return path


@pytest.mark.parametrize("kind", TWICE)
def test_a_lora_that_does_not_fit_is_refused(tiny: dict[str, Path], tmp_path: Path, kind: str) -> None:
    opened = registry.open_model(tiny[kind])
    config = opened.checkpoint["transformer"].config
    width = config.dim if hasattr(config, "dim") else config.attention_head_dim * config.num_attention_heads
    opened.checkpoint.close()
    first, second = TWICE[kind]
    with qwenimg.load(tiny[kind], "cpu", "fp32") as pipe:
        alone = [write(tmp_path / f"{i}.safetensors", width, module) for i, module in enumerate(TWICE[kind])]
        for file in alone:  # each alone fits
            pipe.check("a ring", width=48, height=32, lora=str(file))
        both = write(tmp_path / "both.safetensors", width, first, second)
        with pytest.raises(ModelError, match=r"both\.safetensors: modules .* are of one weight|are the same") as caught:
            pipe.check("a ring", width=48, height=32, lora=str(both))
        print(caught.value)
        for module in ANIMA:
            file = write(tmp_path / "anima.safetensors", width, module)
            with pytest.raises(ModelError, match=r"anima\.safetensors: .*blocks") as caught:
                pipe.check("a ring", width=48, height=32, lora=str(file))
            print(caught.value)
            assert str(caught.value).isprintable() and len(str(caught.value)) < 300
