"""Writes docs/results/on-paper.json, which compares kernels on paper: diffusers, ours, ours compiled, and ours on MLX.

python tools/write_on_paper.py [--out FILE]

A MODEL, not a measurement: `python tools/kernels_on_paper.py h100` says how.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import torch
from doc_tables import DOCS
from paper import on_paper
from paper.kernels import Case, Kernel
from paper.mlx_kernels import kernels as on_mlx
from paper.published import CLIP_TEXT, QWEN_TEXT, published
from paper.torch_kernels import Counter, kernels

from qwenimg.common.families.qwen_image.family import KIND as QWEN_IMAGE
from qwenimg.common.families.stable_diffusion.family import KIND as STABLE_DIFFUSION
from qwenimg.common.networks.denoisers.unet import UNetConfig
from qwenimg.common.precision.machines import MACHINES, Machine
from qwenimg.common.precision.precision import bases

MACHINE, APPLE = MACHINES["h100"], MACHINES["m4-max"]
SIDES, BRANCHES = (512, 1024, 1328), (1, 2)
RESULTS = DOCS / "results" / "on-paper.json"
LAYERS = 60


def without_dropout(model: Any) -> Any:
    """The dispatcher sees a copy where a forward that is not of a training has nothing."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, torch.nn.Dropout):
                setattr(module, name, torch.nn.Identity())
    return model.eval()


def diffusers_dit(case: Case) -> list[Kernel]:
    from diffusers import QwenImageTransformer2DModel

    rows, columns = case.height // 2, case.width // 2
    with torch.device("meta"):
        model = without_dropout(QwenImageTransformer2DModel().to(torch.bfloat16))

    class Rope(torch.nn.Module):
        """Its tables are kept from step to step."""

        def forward(self, *_: Any, **__: Any) -> tuple[torch.Tensor, ...]:
            return tuple(torch.empty(n, 64, dtype=torch.complex64, device="meta") for n in (rows * columns, case.text))

    model.pos_embed = Rope()

    def given(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=torch.bfloat16, device="meta")

    counter = Counter(list(model.transformer_blocks))
    with torch.inference_mode(), counter:
        model(
            hidden_states=given(case.branches, rows * columns, 64),
            encoder_hidden_states=given(case.branches, case.text, 3584),
            encoder_hidden_states_mask=None,
            timestep=given(case.branches),
            img_shapes=[[(1, rows, columns)]] * case.branches,
            return_dict=False,
        )
    return counter.kernels


def diffusers_unet(config: UNetConfig, case: Case) -> list[Kernel]:
    from diffusers import UNet2DConditionModel

    fields = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(config).items()}
    with torch.device("meta"):
        model = without_dropout(UNet2DConditionModel(**fields).to(torch.float16))

    def given(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=torch.float16, device="meta")

    B, more = case.branches, {}
    if config.addition_embed_type:
        more = {"added_cond_kwargs": {"text_embeds": given(B, 1280), "time_ids": given(B, 6)}}
    counter = Counter([model])
    latents, text = (
        given(B, config.in_channels, case.height, case.width),
        given(B, case.text, config.cross_attention_dim),
    )
    with torch.inference_mode(), counter:
        model(latents, torch.empty((), device="meta"), text, return_dict=False, **more)
    return counter.kernels


def rows() -> list[dict[str, Any]]:
    made = []
    dit, bf16 = published("qwen-image"), bases(QWEN_IMAGE)["bf16"]
    assert dit is not None
    for side, branches in product(SIDES, BRANCHES):
        case = Case(height=side // 8, width=side // 8, text=QWEN_TEXT, branches=branches)
        size = f"{side}x{side} x {branches}"
        arms = {"diffusers": diffusers_dit(case), "ours": kernels(*dit.denoiser, bf16, case)}
        made += row("Qwen-Image, bf16", size, arms, LAYERS)
        streams = (case.height * case.width // 4 + case.text) * dit.denoiser[1].dim * branches
        made += row("Qwen-Image, bf16", size, {"mlx": on_mlx(*dit.denoiser, bf16, case)}, LAYERS, APPLE, streams)
    policy = bases(STABLE_DIFFUSION)["fp16-plain"]
    for name, side, branches in product(("sd15", "sdxl"), SIDES, BRANCHES):
        unet = published(name)
        assert unet is not None
        case = Case(height=side // 8, width=side // 8, text=CLIP_TEXT, branches=branches)
        size = f"{side}x{side} x {branches}"
        arms = {"diffusers": diffusers_unet(unet.denoiser[1], case), "ours": kernels(*unet.denoiser, policy, case)}
        made += row(f"{name}, fp16-plain", size, arms, 1)
        made += row(f"{name}, fp16-plain", size, {"mlx": on_mlx(*unet.denoiser, policy, case)}, 1, APPLE)
    return made


def row(
    model: str, size: str, arms: dict[str, list[Kernel]], blocks: int, machine: Machine = MACHINE, streams: int = 0
) -> list[dict[str, Any]]:
    """streams: of one block, the numbers in what it reads and writes."""
    made = []
    for arm, counted in arms.items():
        stage = on_paper.stage("step", counted, machine, 1)
        print(model, size, arm, f"{stage.eager.seconds * 1e3:.1f} ms", flush=True)
        named = {"model": model, "size": size, "arm": arm, "machine": machine.name, "blocks": blocks}
        made.append({**named, "streams": streams, **asdict(stage)})
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.parse_args().out.write_text(json.dumps(rows(), indent=1) + "\n")


if __name__ == "__main__":
    main()
