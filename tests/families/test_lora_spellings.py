"""LoRAs in spellings that mean one layer without a doubt: each is the same change, and draws the picture of the folder
that has the change in its own weights."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support import lora_cases as cases
from support import lora_spellings as spellings
from support.family_cases import BACKENDS, opener
from support.lora_cases import Arrays
from support.lora_spellings import SPELLINGS, TEXTS, Modules, Tensors, denoiser, flat, half_flat, joined, spelled
from support.refusals import refused

from qwenimg.common.families import registry
from qwenimg.common.families.load_options import LoadOptions
from qwenimg.common.hub.describe import describe, layers_of_known
from qwenimg.common.networks import denoisers
from qwenimg.common.networks.encoders import clip
from qwenimg.common.networks.layout import Layouts
from qwenimg.common.parts.layouts import LAYOUTS
from qwenimg.common.parts.texts.text_lora_names import clip_names
from qwenimg.common.weights.loras import lora as loras
from qwenimg.common.weights.loras.lora_names import Names, find

LIMIT = 2  # of 255, between a LoRA and the folder with the same change
LAYERS = 12  # of the denoiser
ASKED: dict[str, Any] = {"width": 48, "height": 32, "steps": 2, "guidance": 3.0, "seed": 5}
PROMPT = "a red ring"


@pytest.fixture(scope="module", params=TEXTS)
def model(request: pytest.FixtureRequest, tiny: dict[str, Path]) -> Iterator[tuple[str, Path, Names]]:
    kind = request.param
    opened = registry.open_model(tiny[kind])
    opened.checkpoint.close()
    yield kind, tiny[kind], opened.family.lora_names(opened.checkpoint)


def known(names: Names, component: str, path: str) -> bool:
    return [target.component for target in find(names, path)] == [component]


def of_denoiser(model: tuple[str, Path, Names], count: int = LAYERS) -> Modules:
    kind, folder, names = model
    return spellings.layers(folder, denoiser(kind), lambda path: known(names, denoiser(kind), path), count)


def changes(file: Path, names: Names) -> dict[tuple[str, str], np.ndarray]:
    """What a LoRA adds to each weight, here of random numbers."""
    lora = loras.read_lora(file)
    found = {}
    for component, by_name in loras.fit(lora, names).items():
        for name, deltas in by_name.items():
            [target] = [one for table in names for one in _all(table) if (one.component, one.name) == (component, name)]
            weight = cases.rng(len(name)).standard_normal(target.shape).astype(np.float32)
            found[component, name] = deltas[0].added(weight)
    lora.close()
    return found


def _all(table: Any) -> set[Any]:
    return {one._replace(rows=(0, 1, 1), swapped=False) for targets in table.names.values() for one in targets}


def same(tensors: Tensors, usual: Tensors, names: Names, folder: Path) -> int:
    """Check that both files make the same changes, bit for bit, and return their number."""
    for name, what in (("a", tensors), ("b", usual)):
        save_file(what, folder / f"{name}.safetensors")
    mine, expected = (changes(folder / f"{name}.safetensors", names) for name in "ab")
    assert mine.keys() == expected.keys()
    for key, value in expected.items():
        assert np.array_equal(mine[key], value), key
    return len(expected)


def usual(kind: str, modules: Modules) -> Tensors:
    """As diffusers writes them."""
    return spelled(modules, lambda path, role: f"{denoiser(kind)}.{path}")


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.sample(7)
def test_a_spelling_of_the_denoisers_layers(model: tuple[str, Path, Names], spelling: str, tmp_path: Path) -> None:
    kind, _, names = model
    modules, name = of_denoiser(model), SPELLINGS[spelling]
    tensors = spelled(modules, lambda path, role: name(denoiser(kind), path, role))
    assert same(tensors, usual(kind, modules), names, tmp_path) == len(modules)


def test_comfyuis_names_of_the_text_encoders(model: tuple[str, Path, Names], tmp_path: Path) -> None:
    kind, folder, names = model
    tensors, expected, count = Tensors(), Tensors(), 0
    for component, prefix in TEXTS[kind].items():
        modules = spellings.layers(folder, component, lambda path: bool(find(names, f"{component}.{path}")), 6)  # noqa: B023
        used = {path: arrays for path, arrays in modules.items() if find(names, f"{component}.{path}")[0].used}
        count += len(used)
        bare = prefix.removesuffix("text_model.")
        tensors |= spelled(modules, lambda p, role: f"{bare if p == 'text_projection' else prefix}{p}")  # noqa: B023
        expected |= spelled(used, lambda path, role: f"{component}.{path}")  # noqa: B023
    print(f"{kind}: {count} layers")
    assert same(tensors, expected, names, tmp_path) == count


def test_zeros_change_nothing(model: tuple[str, Path, Names], tmp_path: Path) -> None:
    kind, _, names = model
    modules = of_denoiser(model, 4)
    plain = usual(kind, modules)
    zeros = dict(plain)
    for path in modules:
        zeros[f"{denoiser(kind)}.{path}.diff_b"] = torch.zeros(7, dtype=torch.float16)
        zeros[f"{denoiser(kind)}.{path}.lora_B.bias"] = -torch.zeros(5)
    zeros["lora_te_text_model_embeddings_position_embedding.diff"] = torch.zeros(77, 8, dtype=torch.bfloat16)
    zeros[f"{denoiser(kind)}.norm_out.norm.w_norm"] = torch.zeros(8)
    assert same(zeros, plain, names, tmp_path) == len(modules)


def test_dora_in_mixed_names(model: tuple[str, Path, Names], tmp_path: Path) -> None:
    """kohya's halves, and magnitudes with a dot before the last part of a layer, as diffusers converts them."""
    kind, _, names = model
    modules = of_denoiser(model)
    for i, arrays in enumerate(modules.values()):
        arrays["magnitude"] = 1 + cases.rng(i).rand(len(arrays["up"])).astype(np.float32)

    tensors = spelled(modules, lambda path, role: f"lora_unet_{half_flat(path) if role == 'magnitude' else flat(path)}")
    assert any(".lora_down" in key for key in tensors) and any(key.count(".") > 1 for key in tensors)
    assert same(tensors, usual(kind, modules), names, tmp_path) == len(modules)


def attentions(model: tuple[str, Path, Names]) -> Iterator[tuple[str, list[str]]]:
    """The fused names of attentions, and the layers that each has, of the same inputs."""
    kind, folder, _ = model
    there = cases.shapes(folder, denoiser(kind))
    for fused, parts in (
        ("to_qkv", ("to_q", "to_k", "to_v")),
        ("to_added_qkv", ("add_q_proj", "add_k_proj", "add_v_proj")),
        ("to_kv", ("to_k", "to_v")),
    ):
        for path in there:
            owner, _, last = path.rpartition(".")
            every = [f"{owner}.{part}" for part in parts]
            alike = last == parts[0] and len({there.get(part) for part in every}) == 1
            if alike and (fused != "to_kv" or "attn2" in owner):
                yield f"{owner}.{fused}", every


def parted(modules: list[Arrays]) -> list[Arrays]:
    """The modules with the factors of `joined`, whose sums then have the same bits."""
    whole, at, parts = joined(modules), 0, []
    for one in modules:
        parts.append({"down": whole["down"], "up": whole["up"][at : at + len(one["up"])]})
        at += len(one["up"])
    return parts


@pytest.mark.sample(2)
def test_layers_that_diffusers_fuses(model: tuple[str, Path, Names], tmp_path: Path) -> None:
    kind, folder, names = model
    there, fused, split = cases.shapes(folder, denoiser(kind)), Modules(), Modules()
    for i, (name, parts) in enumerate(attentions(model)):
        if name.endswith("to_kv") and parts[0] in split:
            continue
        modules = [cases.lora(there[part], 10 * i + j) for j, part in enumerate(parts)]
        fused[name] = joined(modules)
        split |= dict(zip(parts, parted(modules), strict=True))
    print(f"{kind}: {', '.join(sorted({name.rpartition('.')[2] for name in fused}))}")
    assert fused or kind == "krea2", "whose queries share keys: none are fused"
    if not fused:
        return
    for form in (lambda path, role: f"{denoiser(kind)}.{path}", lambda path, role: f"lora_unet_{flat(path)}"):
        assert same(spelled(fused, form), usual(kind, split), names, tmp_path) == len(split)


@pytest.mark.sample(3)
def test_split_layers_count_beside_a_fused_one(model: tuple[str, Path, Names], tmp_path: Path) -> None:
    kind, folder, names = model
    there, fused, split = cases.shapes(folder, denoiser(kind)), Modules(), Modules()
    for i, (name, parts) in enumerate(attentions(model)):
        outputs, inputs = there[parts[0]]
        fused[name] = cases.lora((outputs * len(parts), inputs), 1000 + i)
        split |= {part: cases.lora(there[part], 10 * i + j) for j, part in enumerate(parts)}
    if not fused and kind == "krea2":
        return
    expected = usual(kind, split)
    both = usual(kind, fused) | expected
    if kind == "z-image":  # the authors' layers too, all of an attention's
        for path in [path for path in there if path.endswith("attention.to_out.0")]:
            owner = f"diffusion_model.{path.removesuffix('.to_out.0')}"
            outputs, inputs = there[path]
            expected |= usual(kind, {path: cases.lora(there[path], 77)})
            again = {f"{owner}.qkv": cases.lora((3 * inputs, outputs), 5), f"{owner}.out": cases.lora(there[path], 6)}
            both |= spelled(again, lambda path, role: path)
        both |= expected
    count = same(both, expected, names, tmp_path)
    lora = loras.read_lora(tmp_path / "a.safetensors")
    told = loras.counts(lora, names)
    lora.close()
    print(f"{kind}: {told}")
    assert told.startswith(f"{count} of ") and told.endswith("are copies under other names)")
    [owner, first] = next(iter(fused)).rsplit(".", 1)
    wrong = cases.lora((3 * 7, 11), 3)
    save_file(both | usual(kind, {f"{owner}.{first}": wrong}), tmp_path / "wrong.safetensors")
    assert first in refused(changes, tmp_path / "wrong.safetensors", names)


# Text encoders


@pytest.mark.parametrize("kind", ["z-image", "flux2-klein"])
def test_layers_that_the_model_does_not_use(tiny: dict[str, Path], kind: str, tmp_path: Path) -> None:
    opened = registry.open_model(tiny[kind])
    opened.checkpoint.close()
    names = opened.family.lora_names(opened.checkpoint)
    there = {path: shape for path, shape in cases.shapes(tiny[kind], "text_encoder").items() if "_proj" in path}
    paths = {path.removeprefix("model."): shape for path, shape in there.items()}
    used = sum(find(names, f"text_encoder.{path}")[0].used for path in paths)
    file = tmp_path / "a.safetensors"

    def write(modules: Modules) -> Path:
        save_file(spelled(modules, lambda path, role: f"lora_te_{flat(path)}"), file)
        return file

    modules = {path: cases.lora(shape, i) for i, (path, shape) in enumerate(paths.items())}
    assert len(changes(write(modules), names)) == used < len(paths)
    lora = loras.read_lora(file)
    told = loras.counts(lora, names)
    lora.close()
    print(f"{kind}: {told}")
    assert told == f"{used} of {len(paths)} modules ({len(paths) - used} are of layers that this model does not use)"
    last = next(reversed(modules))
    assert "changes only layers that this model does not use" in refused(changes, write({last: modules[last]}), names)
    wrong = modules | {last: cases.lora((paths[last][0], paths[last][1] + 1), 1)}
    assert last.replace(".", "_") in refused(changes, write(wrong), names)
    more = modules | {f"layers.99.{last.split('.', 2)[2]}": modules[last]}
    assert "layers_99" in refused(changes, write(more), names)


def test_a_bare_name_of_one_text_encoder_and_not_of_two(tiny: dict[str, Path], tmp_path: Path) -> None:
    """As PEFT saves a text encoder for itself."""
    layer = "text_model.encoder.layers.0.self_attn.q_proj"
    for kind, count in (("sd15", 1), ("flux-dev", 1), ("sdxl", 0), ("sd3", 0)):
        opened = registry.open_model(tiny[kind])
        opened.checkpoint.close()
        assert len(find(opened.family.lora_names(opened.checkpoint), f"base_model.model.{layer}")) == count, kind


# Published models, without their files: layers that other programs have, and no image depends on
ELSEWHERE = {
    "lora_te_lm_head": {"z-image", "flux2-klein-4b", "qwen-image", "qwen-image-2.1"},
    "lora_te1_text_projection": {"sdxl", "sd15", "flux-dev"},
    "text_encoders.qwen3_4b.transformer.model.layers.35.mlp.up_proj": {"z-image", "flux2-klein-4b"},
}


def test_layers_of_other_programs() -> None:
    names = {name: names for name, (_, names) in layers_of_known().items()}
    for layer, models in ELSEWHERE.items():
        unused = {name for name in names if (targets := find(names[name], layer)) and not targets[0].used}
        print(layer, *sorted(unused))
        assert models <= unused, layer
    open_clip = (clip_names("text_encoder", clip.manifest(clip.OPEN_CLIP_H), two=False),)
    for layer, used in (("22.mlp.fc1", True), ("23.mlp.fc1", False)):
        [target] = find(open_clip, f"text_encoders.clip_h.transformer.text_model.encoder.layers.{layer}")
        assert (target.used, target.shape) == (used, (4096, 1024))
    assert find(names["flux-dev"], "lora_te_text_model_encoder_layers_0_mlp_fc1")
    assert not find(names["sdxl"], "lora_te_text_model_encoder_layers_0_mlp_fc1")


def test_sd3_without_t5(tiny_sd3: dict[str, Path]) -> None:
    opened = registry.open_model(tiny_sd3["medium"], LoadOptions(parts={"text_encoder_3": Path("none")}))
    opened.checkpoint.close()
    [target] = find(opened.family.lora_names(opened.checkpoint), "lora_te3_encoder_block_23_layer_0_SelfAttention_q")
    assert not target.used and target.shape == (4096, 4096)


# Pictures


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(1)
def test_the_picture_is_that_of_the_folder_with_the_change(
    model: tuple[str, Path, Names], tiny: dict[str, Path], backend: str, tmp_path: Path
) -> None:
    """Of one file whose layers are spelled in all ways in turn, with zeros and a fused copy in it."""
    kind, folder, names = model
    modules = of_denoiser(model, 30)
    ways = list(SPELLINGS.values())
    tensors = Tensors()
    for i, (path, arrays) in enumerate(modules.items()):
        arrays["up"] *= np.float32(0.3)
        name = ways[i % len(ways)]
        tensors |= spelled({path: arrays}, lambda path, role: name(denoiser(kind), path, role))  # noqa: B023
    written: dict[str, Modules] = {denoiser(kind): modules}
    for component, prefix in TEXTS[kind].items():
        every = {p: s for p, s in cases.shapes(folder, component).items() if find(names, f"{component}.{p}")}
        some = {p: cases.lora(s, i) for i, (p, s) in enumerate(every.items()) if "embed" not in p and len(s) == 2}
        bare = prefix.removesuffix("text_model.").removesuffix("model.")
        written[component] = some
        tensors |= spelled(
            {p.removeprefix("model."): arrays for p, arrays in some.items()},
            lambda p, role: f"{bare if p == 'text_projection' else prefix}{p}",  # noqa: B023
        )
    taken = {part for _, parts in attentions(model) for part in parts} & modules.keys()
    for fused, parts in attentions(model):
        if set(parts) <= taken:
            shape = cases.shapes(folder, denoiser(kind))[parts[0]]
            tensors |= usual(kind, {fused: cases.lora((len(parts) * shape[0], shape[1]), 3)})
    tensors[f"{denoiser(kind)}.norm_out.norm.diff_b"] = torch.zeros(9)
    save_file(tensors, tmp_path / "a.safetensors")
    target = spellings.write_changed(folder, tmp_path / "changed", written)
    with opener(kind, folder, tiny)(backend) as pipe:
        plain, with_lora = (
            np.asarray(pipe(PROMPT, **ASKED, **more).image).astype(int)
            for more in ({}, {"lora": str(tmp_path / "a.safetensors")})
        )
    with opener(kind, target, tiny)(backend) as pipe:
        expected = np.asarray(pipe(PROMPT, **ASKED).image).astype(int)
    away, change = (int(np.abs(one - expected).max()) for one in (with_lora, plain))
    print(f"{kind} on {backend}: {len(tensors)} tensors, {away} of 255 away (limit {LIMIT}), {change} without the LoRA")
    assert away <= LIMIT < 10 < change


def test_loras_know_the_layouts_of_every_denoiser() -> None:
    """A row of `LAYOUTS` that LoRAs did not know was noticed by nobody."""
    rooms = (Path(denoisers.__file__).parent).glob("*_names.py")
    found = (vars(import_module(f"{denoisers.__name__}.{path.stem}")).values() for path in rooms)
    rows = {one.network.name for values in found for one in values if isinstance(one, Layouts)}
    expected = rows & {family.networks[0].name for family in registry.FAMILIES}
    print(len(expected), "denoisers:", *sorted(expected))
    assert {one.network.name for one in LAYOUTS} == expected, "name it in common/parts/layouts.py"


def test_info_says_what_is_left_out(tmp_path: Path) -> None:
    """Of Z-Image's text encoder by its published sizes: 252 modules."""
    sizes = {"self_attn.q_proj": (4096, 2560), "self_attn.o_proj": (2560, 4096), "mlp.down_proj": (2560, 9728)}
    tensors = {
        f"text_encoders.qwen3_4b.transformer.model.layers.{i}.{layer}.lora_{half}.weight": torch.ones(shape)
        for i in range(36)
        for layer, (outputs, inputs) in sizes.items()
        for half, shape in (("down", (1, inputs)), ("up", (outputs, 1)))
    }
    save_file(tensors, tmp_path / "a.safetensors")
    lines = describe(tmp_path / "a.safetensors").lines
    print(*lines, sep="\n")
    [used] = [
        line for line in lines if line.startswith("used: 105 of 108 modules (3 are of layers that this model does")
    ]
    assert "not use) by z-image-turbo or z-image or krea-2-turbo or krea-2-raw; " in used
    assert "; 81 of 108 modules (27 are" in used
