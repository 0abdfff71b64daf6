"""2,000 damaged files of what controls pictures of Stable Diffusion and FLUX.1, 500 of them pickles: each is read or
refused in one line, and nothing of a pickle runs."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.file_mutants import assert_line, damaged
from support.tiny_adapter import adapter_names, tiny_adapter
from support.tiny_controlnet import authors_names, tiny_controlnet, tiny_union
from support.tiny_flux import write_tiny_flux
from support.tiny_flux_control import tiny_controlnet as flux_controlnet
from support.tiny_ip_adapter import nested
from support.tiny_ip_adapter import tensors as ip_adapter_tensors
from support.tiny_sd import _SMALL, UNETS, write_tiny_sd

from qwenimg.common.base.errors import ModelError
from qwenimg.common.families import registry

MUTANTS, PICKLED = 2000, 500
UNET, XL = UNETS["sd15"] | _SMALL, UNETS["sdxl"] | _SMALL
Tensors = dict[str, torch.Tensor]


WRITERS: dict[str, Callable[[Path], None]] = {
    "sd15": lambda folder: write_tiny_sd(folder, "sd15"),
    "sdxl": lambda folder: write_tiny_sd(folder, "sdxl"),
    "flux": lambda folder: write_tiny_flux(folder, "dev"),
}
KINDS: dict[str, tuple[str, Callable[[], Tensors]]] = {
    "controlnet": ("sd15", lambda: dict(tiny_controlnet(UNET).state_dict())),
    "authors": ("sd15", lambda: authors_names(tiny_controlnet(UNET))),
    "difference": ("sd15", lambda: authors_names(tiny_controlnet(UNET)) | {"difference": torch.ones(1)}),
    "adapter": ("sd15", lambda: adapter_names(tiny_adapter(channels=(20, 40, 60)))),
    "union": ("sdxl", lambda: dict(tiny_union(XL, num_control_type=6).state_dict())),
    "control-lora": ("sdxl", lambda: control_lora(authors_names(tiny_controlnet(XL), ""))),
    "ip-adapter": ("sd15", lambda: ip_adapter_tensors("sd15", "plus")),
    "flux-union": ("flux", lambda: dict(flux_controlnet("union").state_dict())),
}
# The kinds that are published as files of PyTorch, and what such a file holds
PICKLES: dict[str, Callable[[Tensors], Any]] = {"authors": dict, "adapter": dict, "ip-adapter": nested}


def control_lora(whole: Tensors) -> Tensors:
    """A Control-LoRA of rank 2, with the biases and the picture's convolutions of the ControlNet `whole`."""
    made = {"lora_controlnet": torch.zeros(0)}
    for name, tensor in whole.items():
        if tensor.ndim == 1 or name.startswith(("input_hint_block", "zero_convs", "middle_block_out")):
            made |= {name: tensor} if tensor.ndim > 1 or name.endswith("bias") else {}
            continue
        outputs, inputs, *kernel = tensor.shape
        module, ones = name.removesuffix(".weight"), [1] * len(kernel)
        made |= {f"{module}.up": torch.ones(outputs, 2, *ones), f"{module}.down": torch.ones(2, inputs, *kernel)}
    return made


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_file_is_refused_in_one_line_or_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    base, make = KINDS[kind]
    WRITERS[base](tmp_path / base)
    tensors = {key: value.contiguous() for key, value in make().items()}
    ran: list[Any] = []
    monkeypatch.setattr("os.system", ran.append)
    each, pickled = -(-MUTANTS // len(KINDS)), 2 * -(-PICKLED // (2 * len(PICKLES))) * (kind in PICKLES)
    chance, verdicts = random.Random(kind), Counter[str]()
    opened = registry.open_model(tmp_path / base)
    assert opened.family.control is not None
    open_control = opened.family.control.open
    with closing(opened.checkpoint) as model:
        for form, count in (("safetensors", each - pickled), ("pth", pickled // 2), ("old pth", pickled // 2)):
            if not count:
                continue
            path = tmp_path / ("net.safetensors" if form == "safetensors" else "net.pth")
            if form == "safetensors":
                save_file(tensors, path)
            else:
                torch.save(PICKLES[kind](tensors), path, _use_new_zipfile_serialization=form == "pth")
            whole = path.read_bytes()
            open_control(path, model).close()
            header = 8 + int.from_bytes(whole[:8], "little") if form == "safetensors" else min(len(whole), 40_000)
            for _ in range(count):
                path.write_bytes(damaged(whole, header, chance))
                try:
                    open_control(path, model).close()
                    verdicts[f"{form}: read"] += 1
                except ModelError as error:
                    assert_line(str(error), path.name)
                    verdicts[f"{form}: refused"] += 1
    print(f"{kind}: {dict(verdicts)}")
    assert sum(verdicts.values()) == each and verdicts["safetensors: refused"] and not ran
