"""Kohya's files for the text encoders of Stable Diffusion, by a reference of our own.

Kohya's rule: a module is called `lora_te_`, of two `lora_te1_` and `lora_te2_`, and then transformers' path with
`text_model.`, dots as underscores; its weight changes by alpha / rank * up @ down. So the reference takes the layers by
that rule, adds the products in float64, and runs transformers' CLIP. diffusers' loader is held against it too.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support import lora_cases as cases
from support import oracle_sd, tiny_ldm
from support.clip_models import BACKENDS, FLOAT32, opened, relative, run
from support.policies import FP32

from qwenimg.common.parts.texts import text_lora_names
from qwenimg.common.weights.loras import lora as loras

PREFIXES = {
    "sd1": [{"text_encoder": "lora_te_"}, {"text_encoder": "lora_te1_"}],
    "sdxl": [{"text_encoder": "lora_te1_", "text_encoder_2": "lora_te2_"}],
}
CASES = [(kind, prefixes) for kind, several in PREFIXES.items() for prefixes in several]
ALPHAS = (1.0, 2.0, 0.5)  # of modules in turn, so that no one number stands for all


def layers(model: torch.nn.Module) -> dict[str, torch.nn.Linear]:
    """Return the linear layers that kohya trains, by their published path."""
    return {
        f"text_model.{path.removeprefix('text_model.')}": layer
        for path, layer in model.named_modules()
        if isinstance(layer, torch.nn.Linear) and "text_projection" not in path
    }


def kohya(models: dict[str, torch.nn.Module], prefixes: dict[str, str], path: Path) -> dict[str, dict[str, np.ndarray]]:
    """Write a file with a module for each layer, and return what each adds in float64, by component and layer."""
    tensors: dict[str, torch.Tensor] = {}
    added: dict[str, dict[str, np.ndarray]] = {}
    for component, prefix in prefixes.items():
        added[component] = {}
        for index, (layer, module) in enumerate(layers(models[component]).items()):
            arrays = cases.lora(tuple(module.weight.shape), 100 * len(added) + index)
            alpha = ALPHAS[index % len(ALPHAS)]
            key = prefix + layer.replace(".", "_")
            tensors[f"{key}.lora_down.weight"] = torch.from_numpy(arrays["down"])
            tensors[f"{key}.lora_up.weight"] = torch.from_numpy(arrays["up"])
            tensors[f"{key}.alpha"] = torch.tensor(alpha)
            up, down = (arrays[role].astype(np.float64) for role in ("up", "down"))
            added[component][layer] = alpha / len(down) * (up @ down)
    save_file(tensors, path)
    return added


def merge(model: torch.nn.Module, added: dict[str, np.ndarray]) -> None:
    for layer, module in layers(model).items():
        module.weight.data = (module.weight.detach().double() + torch.from_numpy(added[layer])).float()


def states(model: torch.nn.Module, ids: np.ndarray) -> list[torch.Tensor]:
    with torch.no_grad():
        made = model(torch.from_numpy(ids), output_hidden_states=True)
    return [made.hidden_states[-2], made.text_embeds if hasattr(made, "text_embeds") else made.pooler_output]


def prompt(config: Any) -> np.ndarray:
    ids = np.random.default_rng(1).integers(1, config.vocab_size - 1, (2, 17))
    ids[:, 11] = config.vocab_size - 1  # the end token
    return ids


def ours_on(twin: Any, folder: Path, deltas: dict[str, tuple[loras.LowRank, ...]], config: Any) -> Any:
    """Return our model with the folder's weights and a LoRA in them."""
    import importlib

    module = importlib.import_module(f"qwenimg.backends.{twin.name}.networks.encoders.clip")
    model = twin.load.empty(lambda: module.CLIPTextEncoder(config, twin.nn.DTYPES["float32"]))
    device = [torch.device("cpu")] if twin.name == "torch" else []
    _, plan = opened(folder)
    twin.load.fill(model, plan.with_deltas(deltas).stored(FP32), *device)
    plan.close()
    return model


@pytest.mark.parametrize(("kind", "prefixes"), CASES, ids=["sd1", "sd1, te1", "sdxl"])
@pytest.mark.sample(1)
def test_text_encoders_of_a_kohya_file(kind: str, prefixes: dict[str, str], tmp_path: Path) -> None:
    """On both backends, and diffusers' loader as its defect is worked around."""
    models = tiny_ldm.models_of(kind)
    added = kohya(models, prefixes, tmp_path / "a.safetensors")
    folders = {name: tmp_path / name for name in prefixes}
    for name, folder in folders.items():
        models[name].save_pretrained(folder)
    parts = {name: SimpleNamespace(config=(one := opened(folder))[0], plan=one[1]) for name, folder in folders.items()}
    parts["unet"] = SimpleNamespace(config=None, plan=SimpleNamespace(shapes={}))
    names = tuple(_names(parts, name) for name in prefixes)
    found = loras.fit(loras.read_lora(tmp_path / "a.safetensors"), names)
    assert {component: len(deltas) for component, deltas in found.items()} == {
        component: len(deltas) for component, deltas in added.items()
    }
    pipe = tiny_ldm.pipeline(tmp_path, kind, tiny_ldm.models_of(kind))
    oracle_sd.load_lora(pipe, tmp_path / "a.safetensors", tmp_path / "folded.safetensors")
    for name in prefixes:
        config = parts[name].config
        ids = prompt(config)
        plain = states(models[name], ids)
        merge(models[name], added[name])
        expected = states(models[name], ids)
        assert relative(expected[0].numpy(), plain[0]) > 0.2, "the LoRA changes what is encoded"
        for backend, twin in BACKENDS.items():
            made = run(twin(), ours_on(twin(), folders[name], found[name], config), config, ids, 1, False)
            errors = [relative(part.values, state) for part, state in zip(made, expected, strict=True)]
            print(f"{kind} {name} {backend}: {max(errors):.1e}")
            assert max(errors) <= FLOAT32
        theirs = [relative(a.numpy(), b) for a, b in zip(states(getattr(pipe, name), ids), expected, strict=True)]
        print(f"{kind} {name} diffusers: {max(theirs):.1e}")
        assert max(theirs) <= FLOAT32
    for part in parts.values():
        if part.config is not None:
            part.plan.close()


def _names(parts: dict[str, Any], name: str) -> Any:
    """Return the table of one text encoder, as the family makes it."""
    texts = {other: part for other, part in parts.items() if other.startswith("text_encoder")}
    return text_lora_names.clip_names(name, parts[name].plan.shapes, two=len(texts) > 1)
