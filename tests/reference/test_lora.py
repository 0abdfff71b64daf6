"""LoRA files against diffusers with PEFT, where it loads them right; and the names of Stable Diffusion's layers."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support import lora_cases as cases
from support import tiny_ldm, tiny_qwen21
from support.tiny_model import tiny_dit

from qwenimg.common.families.stable_diffusion import single_file
from qwenimg.common.parts import lora_layers
from qwenimg.common.weights.loras import lora as loras
from qwenimg.common.weights.loras.lora_names import DENOISER, Names, component_names, find

TOLERANCE = 1e-6  # of the largest weight: float32 sums in another order
KINDS = ("sd1", "sd2", "sdxl")


@pytest.fixture(scope="module")
def models() -> dict[str, dict[str, torch.nn.Module]]:
    return {kind: tiny_ldm.models_of(kind) for kind in KINDS}


@pytest.fixture(scope="module")
def names(models: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Names]:
    """Of each kind, opened from one file."""
    found = {}
    for kind in KINDS:
        path = tmp_path_factory.mktemp("lora") / f"{kind}.safetensors"
        save_file(tiny_ldm.one_file(kind, models[kind]), path)
        opened = single_file.open_file(path)
        parts = {"unet": opened.unet} | opened.texts
        components = {name: _part(name, c, opened.components[name].plan) for name, c in parts.items()}
        texts = {name: components[name] for name in opened.texts}
        found[kind] = lora_layers.names(_Checkpoint(components, texts))  # type: ignore[arg-type]
    return found


def _part(name: str, config: Any, plan: Any) -> SimpleNamespace:
    network, role = ("unet", "transformer") if name == "unet" else ("clip", "text")
    return SimpleNamespace(network=network, role=role, config=config, plan=plan)


class _Checkpoint(SimpleNamespace):
    def __init__(self, components: dict[str, Any], texts: dict[str, Any]):
        super().__init__(components=components, texts=texts)

    def __getitem__(self, name: str) -> Any:
        return self.components[name]


def modules(model: torch.nn.Module) -> list[str]:
    return [name for name, layer in model.named_modules() if isinstance(layer, (torch.nn.Linear, torch.nn.Conv2d))]


def sgm(model: torch.nn.Module) -> dict[str, str]:
    """Of each layer its path in one file."""
    keys = list(model.state_dict())
    theirs = dict(zip(keys, tiny_ldm.unet_file(model), strict=True))
    return {path: theirs[f"{path}.weight"].removesuffix(".weight") for path in modules(model)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sample(1)
def test_every_layer_of_a_unet_has_all_of_its_names(kind: str, models: dict[str, Any], names: dict[str, Names]) -> None:
    paths = sgm(models[kind]["unet"])
    assert len(paths) > 60
    for path, other in paths.items():
        flat, other_flat = path.replace(".", "_"), other.replace(".", "_")
        written = [path, f"unet.{path}", f"lora_unet_{flat}", f"lycoris_{flat}", f"lora_unet_{other_flat}"]
        written += [f"diffusion_model.{other}", f"model.diffusion_model.{other}", f"base_model.model.{path}"]
        if match := re.fullmatch(r"(.+attn\d)\.(to_\w+)(\.0)?", path):
            written.append(f"unet.{match[1]}.processor.{match[2]}")
        for called in written:
            [target] = find(names[kind], called)
            assert (target.component, target.name) == ("unet", f"{path}.weight"), called


@pytest.mark.parametrize("kind", KINDS)
def test_every_layer_of_the_text_encoders_has_all_of_its_names(
    kind: str, models: dict[str, Any], names: dict[str, Names]
) -> None:
    prefixes = {"text_encoder": ["text_encoder.", "lora_te1_"], "text_encoder_2": ["text_encoder_2.", "lora_te2_"]}
    if kind != "sdxl":
        prefixes["text_encoder"].append("lora_te_")
    for component in (name for name in models[kind] if "text" in name):
        for path in modules(models[kind][component]):
            plain = path.removeprefix("text_model.")
            for prefix in prefixes[component]:
                ours = {path, plain} if plain.startswith("text_projection") else {f"text_model.{plain}", plain}
                for called in ours:
                    called = prefix + (called.replace(".", "_") if prefix.endswith("_") else called)
                    [target] = find(names[kind], called)
                    assert (target.component, target.name) == (component, f"{plain}.weight")


# diffusers with PEFT

# Those that it reads rightly; on the others it raises, matches nothing, or ignores alpha.
RIGHT = (
    "diffusers", "diffusers, alpha in the header", "diffusers, rank-stabilised", "diffusers of 2023", "Lightning",
    "kohya, musubi", "ai-toolkit", "ai-toolkit, alpha", "DiffSynth",
)  # fmt: skip


def fused_by_diffusers(model: torch.nn.Module, load: Any) -> dict[str, np.ndarray]:
    """Every weight after `load` gave the model its LoRA."""
    load()
    model.fuse_lora()
    model.unload_lora()
    return {name: value.detach().numpy() for name, value in model.named_parameters()}


def compare(deltas: dict[str, Any], before: dict[str, np.ndarray], after: dict[str, np.ndarray]) -> None:
    worst, changed = 0.0, 0
    for name, weight in before.items():
        ours = weight + deltas[name][0].added(weight) if name in deltas else weight
        changed += not np.array_equal(weight, after[name])
        worst = max(worst, float(np.abs(ours - after[name]).max() / np.abs(after[name]).max()))
    print(f"{changed} weights, error {worst:.1e}")
    assert changed == len(deltas) and worst < TOLERANCE


@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.sample(3)
def test_qwen_image_against_diffusers(name: str, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    from diffusers import QwenImagePipeline

    model = tiny_dit()
    before = {name: value.detach().numpy().copy() for name, value in model.named_parameters()}
    shapes = {name: value.shape for name, value in before.items()}
    layers = [path for path in modules(model) if path.startswith("transformer_blocks.")]
    made = {path: cases.lora(shapes[f"{path}.weight"], i) for i, path in enumerate(layers)}
    file = cases.written(tmp_path / "a.safetensors", made, cases.QWEN[name])
    found = loras.fit(loras.read_lora(file), (component_names("transformer", shapes, DENOISER),))["transformer"]
    pipe = QwenImagePipeline(transformer=model, vae=None, text_encoder=None, tokenizer=None, scheduler=None)
    compare(found, before, fused_by_diffusers(model, lambda: pipe.load_lora_weights(file)))


class _Processor:
    """A stand-in, of which the pipeline asks how long its own words are."""

    tokenizer = SimpleNamespace(encode=lambda text: [0])

    def apply_chat_template(self, *given: Any, **named: Any) -> list[list[int]]:
        return [[0]]


# diffusers parses kohya's flat names by those of Qwen-Image 1, and raises.
@pytest.mark.parametrize("name", [name for name in RIGHT if name != "kohya, musubi"])
@pytest.mark.sample(2)
def test_qwen_image_21_against_diffusers(name: str, tmp_path: Path) -> None:
    """Every layer of its transformer, by diffusers' own loader of its pipeline."""
    pytest.importorskip("peft")
    from diffusers import QwenImage21Pipeline

    model = tiny_qwen21.tiny_dit()
    before = {name: value.detach().numpy().copy() for name, value in model.named_parameters()}
    shapes = {name: value.shape for name, value in before.items()}
    plan = SimpleNamespace(shapes=shapes)
    parts = {"transformer": SimpleNamespace(network="qwen21_dit", role="transformer", config=None, plan=plan)}
    made = {path: cases.lora(shapes[f"{path}.weight"], i) for i, path in enumerate(modules(model))}
    file = cases.written(tmp_path / "a.safetensors", made, cases.QWEN[name])
    names = lora_layers.names(_Checkpoint(parts, {}))  # type: ignore[arg-type]
    found = loras.fit(loras.read_lora(file), names)["transformer"]
    pipe = QwenImage21Pipeline(transformer=model, vae=None, text_encoder=None, processor=_Processor(), scheduler=None)
    compare(found, before, fused_by_diffusers(model, lambda: pipe.load_lora_weights(file)))


# Rules of `alpha_pattern` and `rank_pattern`, in the order in which they stand in the file.
PATTERNS: dict[str, tuple[dict[str, float], dict[str, int]]] = {
    "literal": ({"blocks.0.attn.to_q": 3, "to_v": 5}, {"mlp": 2}),
    "the first wins, not the longest": ({"to_q": 3, "blocks.1.attn.to_q": 7}, {"to_k": 2, "attn.to_k": 3}),
    "expressions": ({r"blocks\.[12]\.attn\.to_(q|k)": 3, r".*\.10\..*": 5}, {r"attn\.to_\w": 3}),
    "a point is any character": ({"blocks.1.attn.to.q": 3}, {}),
    "from the start": ({"^blocks.1.attn.to_q": 3, "^head": 2}, {}),
    "a whole name and no part of one": ({"mlp": 3}, {"head": 2}),
    "a choice": ({"to_q|to_v": 3}, {"mlp|head": 2}),
    "lazy, counted and classes": ({r"blocks.[^.]+?.attn.to_[k-q]": 3, r"blocks\.\d{2}\.mlp": 4}, {}),
}


class Patterned(torch.nn.Module):
    """Blocks 0, 1, 2 and 10, a head, and a layer whose name ends in another's."""

    def __init__(self) -> None:
        super().__init__()
        layers = torch.nn.ModuleDict({name: torch.nn.Linear(8, 8) for name in ("to_q", "to_k", "to_v")})
        block = {"attn": layers, "mlp": torch.nn.Linear(8, 8)}
        self.blocks = torch.nn.ModuleDict({i: torch.nn.ModuleDict(copy.deepcopy(block)) for i in ("0", "1", "2", "10")})
        self.head = torch.nn.Linear(8, 8)
        self.ahead = torch.nn.Linear(8, 8)


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.sample(5)
def test_scales_by_patterns_are_those_of_a_model_that_peft_loads(name: str, rslora: bool, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    alphas, ranks = PATTERNS[name]
    config = peft.LoraConfig(
        r=4, lora_alpha=2, alpha_pattern=alphas, rank_pattern=ranks, target_modules="all-linear", use_rslora=rslora
    )
    peft.get_peft_model(Patterned(), config).save_pretrained(tmp_path)  # sorts the patterns
    file = tmp_path / "adapter_config.json"
    saved = json.loads(file.read_text()) | {"alpha_pattern": alphas, "rank_pattern": ranks}
    file.write_text(json.dumps(saved))
    loaded = peft.PeftModel.from_pretrained(Patterned(), tmp_path)
    expected = {path: layer.scaling["default"] for path, layer in loaded.named_modules() if hasattr(layer, "scaling")}
    lora = loras.read_lora(tmp_path)
    scales = {module: loras.scale_of(lora, module, _rank(lora, module)) for module in lora.modules}
    assert scales == expected and len(set(scales.values())) > 1
    lora.close()


@pytest.mark.parametrize("kind", ["LoraConfig", "LoHaConfig", "LoKrConfig"])
def test_an_alpha_that_a_configuration_leaves_out_is_pefts_own(kind: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = getattr(peft, kind)(r=4, target_modules=["to_q", "mlp"])
    peft.get_peft_model(Patterned(), config).save_pretrained(tmp_path)
    file = tmp_path / "adapter_config.json"
    saved = json.loads(file.read_text())
    del saved["lora_alpha" if kind == "LoraConfig" else "alpha"]
    file.write_text(json.dumps(saved))
    loaded = peft.PeftModel.from_pretrained(Patterned(), tmp_path)
    expected = {path: layer.scaling["default"] for path, layer in loaded.named_modules() if hasattr(layer, "scaling")}
    lora = loras.read_lora(tmp_path)
    scales = {module: loras.scale_of(lora, module, 4) for module in lora.modules}
    lora.close()
    print(scales)
    assert scales == expected and set(scales.values()) == {2.0}


def test_an_alpha_is_left_out_of_a_header_as_diffusers_reads_it(tmp_path: Path) -> None:
    """Of one component's configuration; the other component has none, and so the scale 1."""
    shape = (8, 8)
    modules = {f"{part}.blocks.0.mlp": cases.lora(shape, i) for i, part in enumerate(("transformer", "text_encoder"))}
    for metadata, scales in (
        ({"transformer.r": 4}, (2.0, 1.0)),
        ({"transformer.r": 4, "transformer.lora_alpha": 4}, (1.0, 1.0)),
        ({"r": 4}, (2.0, 2.0)),
        ({}, (1.0, 1.0)),
    ):
        dialect = cases.Dialect("", cases.PEFT_HALVES, metadata={"lora_adapter_metadata": json.dumps(metadata)})
        lora = loras.read_lora(cases.written(tmp_path / "a.safetensors", modules, dialect))
        assert tuple(loras.scale_of(lora, module, 4) for module in modules) == scales, metadata
        lora.close()


@pytest.mark.parametrize("kind", ["LoHaConfig", "LoKrConfig", "LoKrConfig, whole"])
def test_loha_and_lokr_that_peft_saved(kind: str, tmp_path: Path) -> None:
    """By its `alpha`, also of LoKr's whole factors, which other programs give none."""
    peft = pytest.importorskip("peft")
    rank = 64 if "whole" in kind else 2
    config = getattr(peft, kind.split(",")[0])(
        r=rank, alpha=3, alpha_pattern={r"blocks\.1\..*": 5}, target_modules=["to_q", "mlp"], init_weights=False
    )
    model = Patterned()
    before = {name: value.detach().numpy().copy() for name, value in model.named_parameters()}
    with_peft = peft.get_peft_model(model, config)
    with_peft.save_pretrained(tmp_path)
    after = dict(with_peft.merge_and_unload().named_parameters())
    shapes = {name: value.shape for name, value in before.items()}
    found = loras.fit(loras.read_lora(tmp_path), (component_names("transformer", shapes, DENOISER),))["transformer"]
    compare(found, before, {name: after[name].detach().numpy() for name in before})


def test_dora_at_a_strength_is_a_share_of_the_change_and_not_pefts(tmp_path: Path) -> None:
    """At strength 1 the weight is PEFT's; at s it is W + s (W' - W), as in ComfyUI, where PEFT scales the product alone
    and keeps the magnitude whole."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, lora_alpha=8, use_dora=True, target_modules="all-linear", init_lora_weights=False)
    model = Patterned()
    with_peft = peft.get_peft_model(model, config)
    for name, parameter in with_peft.named_parameters():
        if "magnitude" in name:
            parameter.data *= 1 + 0.3 * torch.rand(parameter.shape, generator=torch.Generator().manual_seed(len(name)))
    with_peft.save_pretrained(tmp_path)
    layers = {name: layer for name, layer in with_peft.base_model.model.named_modules() if hasattr(layer, "lora_A")}
    before = {f"{name}.weight": layer.base_layer.weight.detach().numpy().copy() for name, layer in layers.items()}
    changed: dict[float, dict[str, np.ndarray]] = {}
    for strength in (1.0, 0.5):
        copied = copy.deepcopy(with_peft)
        for layer in copied.modules():
            if hasattr(layer, "set_scale"):
                layer.set_scale("default", strength)
        merged = dict(copied.merge_and_unload().named_parameters())
        changed[strength] = {name: merged[name].detach().numpy() for name in before}
    found = loras.fit(
        loras.read_lora(tmp_path), (component_names("t", {n: w.shape for n, w in before.items()}, DENOISER),)
    )["t"]
    half = loras.strengthened({"t": found}, 0.5)["t"]
    away = []
    for name, weight in before.items():
        whole = weight + found[name][0].added(weight)
        assert np.abs(whole - changed[1.0][name]).max() < TOLERANCE * np.abs(whole).max()
        ours = weight + half[name][0].added(weight)
        exact = weight.astype(np.float64) + 0.5 * (changed[1.0][name].astype(np.float64) - weight)
        assert np.abs(ours - exact).max() < TOLERANCE * np.abs(exact).max()
        away.append(np.linalg.norm(ours - changed[0.5][name]) / np.linalg.norm(changed[0.5][name] - weight))
    print(f"of the change that PEFT makes at 0.5, ours is {min(away):.2f} to {max(away):.2f} away")
    assert min(away) > 0.05


def _rank(lora: loras.LoraFile, module: str) -> int:
    return lora.modules[module].parts["down"].shape[0]


SD = {
    "kohya": cases.Dialect("lora_unet_", cases.KOHYA_HALVES, flat=True, alpha=True, scale=cases.Q),
    "kohya, sgm": cases.Dialect("lora_unet_", cases.KOHYA_HALVES, flat=True, alpha=True, scale=cases.Q),
    "PEFT": cases.Dialect("unet.", cases.PEFT_HALVES),
}


@pytest.mark.parametrize(
    ("kind", "name"), [("sd1", "kohya"), ("sd1", "PEFT"), ("sdxl", "kohya, sgm"), ("sdxl", "PEFT")]
)
@pytest.mark.sample(1)
def test_stable_diffusion_against_diffusers(
    kind: str, name: str, models: dict[str, Any], names: dict[str, Names], tmp_path: Path
) -> None:
    pytest.importorskip("peft")
    model = tiny_ldm.tiny_unet(kind)
    before = {name: value.detach().numpy().copy() for name, value in model.named_parameters()}
    paths = sgm(model)
    layers = [path for path in paths if ".transformer_blocks." in path or name == "kohya, sgm"]
    made = {path: cases.lora(before[f"{path}.weight"].shape, i) for i, path in enumerate(layers)}
    called = paths.__getitem__ if "sgm" in name else str
    file = cases.written(tmp_path / "a.safetensors", made, SD[name], name=called)
    found = loras.fit(loras.read_lora(file), names[kind])["unet"]
    models = models[kind] | {"unet": model}
    pipe = tiny_ldm.pipeline(tmp_path, kind, models)
    compare(found, before, fused_by_diffusers(model, lambda: pipe.load_lora_weights(file)))
