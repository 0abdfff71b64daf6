"""Control networks for Qwen-Image as files, as components of a model, and on the command line."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from support.cli_runner import cli
from support.controlled_runs import drawn, planned, with_nets
from support.file_mutants import assert_line, damaged
from support.refusals import refused
from support.relative import relative
from support.tiny_control import CONTROL, tiny_controlnet, tiny_patches, write_controlnet, write_patches

import qwenimg
from qwenimg import Pipeline
from qwenimg.common.base.errors import DoesNotFit, ModelError, UsageError
from qwenimg.common.families.qwen_image.checkpoint import open_folder
from qwenimg.common.families.qwen_image.control_files import open_control
from qwenimg.common.pictures import canny, pixels
from qwenimg.common.pipeline import fit_options
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.runtime.runtime import Change, limit_for

BACKENDS = ("cpu", "mlx")
PICTURE = np.random.default_rng(2).integers(0, 256, (40, 60, 3), np.uint8)
BANDS = 1e-5  # relative L2: sums of a convolution in float32, in blocks of other sizes
ASKED: dict[str, Any] = {"width": 80, "height": 48, "steps": 3, "guidance": 4.0, "seed": 3}


@pytest.fixture(scope="module")
def nets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("nets")
    return {
        "union": write_controlnet(folder / "union"),
        "inpainting": write_controlnet(folder / "inpainting", 12, extra=4),
        "patches": write_patches(folder / "patches.safetensors"),
    }


@pytest.fixture
def model(tiny_folder: Path) -> Any:
    with closing(open_folder(tiny_folder)) as checkpoint:
        yield checkpoint


# Files


def test_a_file_without_its_configuration(tmp_path: Path, nets: dict[str, Path], model: Checkpoint) -> None:
    """As ComfyUI has them: sizes are those of the tensors."""
    for name, mask in (("union", "none"), ("inpainting", "needed")):
        alone = tmp_path / f"{name}.safetensors"
        shutil.copy(nets[name] / "diffusion_pytorch_model.safetensors", alone)
        with_config, without = (open_control(path, model) for path in (nets[name], alone))
        assert with_config.component.config == without.component.config and without.mask == mask
        assert with_config.samples and without.samples
        for net in (with_config, without):
            net.component.plan.close()
    patches = open_control(nets["patches"], model)
    assert (patches.mask, patches.samples) == ("none", False) and patches.component.config.num_layers == 3
    patches.component.plan.close()


def renamed(tensors: dict[str, torch.Tensor], old: str, new: str) -> dict[str, torch.Tensor]:
    return {key.replace(old, new): value for key, value in tensors.items()}


def broken_files() -> dict[str, tuple[Callable[[], dict[str, torch.Tensor]], str]]:
    union, patches = tiny_controlnet().state_dict(), tiny_patches()
    wide = {key: torch.zeros(8, 8) for key in union}
    return {
        "a tensor is missing": (
            lambda: {k: v for k, v in union.items() if k != "controlnet_blocks.1.bias"}, "lacks tensor"),
        "a tensor too many": (lambda: union | {"norm_out.linear.weight": torch.ones(3)}, "norm_out.linear.weight"),
        "another shape": (lambda: union | {"txt_norm.weight": torch.ones(61)}, "txt_norm.weight"),
        "no sizes": (
            lambda: {"controlnet_x_embedder.weight": torch.ones(3), "txt_norm.weight": torch.ones(3)}, "img_in"),
        "all of another shape": (lambda: wide, "attn.norm_q.weight"),
        "a channel too many": (
            lambda: union | {"controlnet_x_embedder.weight": torch.zeros(66, 65)}, "takes 1 channels beside"),
        "fewer channels": (lambda: union | {"controlnet_x_embedder.weight": torch.zeros(66, 60)}, "extra_condition"),
        "a patch is missing": (
            lambda: {k: v for k, v in patches.items() if k != "controlnet_blocks.2.x_rms.weight"}, "lacks tensor"),
        "too few patches": (lambda: tiny_patches(layers=2), "a transformer with 2 blocks; the model's has 3"),
        "patches of odd channels": (lambda: tiny_patches(extra=3), "pictures of 67 channels"),
        "infinite": (lambda: union | {"img_in.bias": torch.full((66,), torch.inf)}, ""),
        "of FLUX.1": (lambda: renamed(union, "txt_norm", "context"), "is a control network of FLUX.1"),
        "of Stable Diffusion": (lambda: {"controlnet_mid_block.weight": torch.ones(3)}, "of Stable Diffusion, and"),
        "an old one": (lambda: {"control_model.middle_block_out.0.weight": torch.ones(3)}, "of Stable Diffusion, and"),
        "no control network": (lambda: {"a": torch.ones(3)}, "is no control network of Qwen-Image; it begins with a"),
        "empty": (dict, "is no control network"),
    }  # fmt: skip


@pytest.mark.parametrize("fault", broken_files())
@pytest.mark.sample(5)
def test_broken_files_are_refused(tmp_path: Path, model: Checkpoint, fault: str) -> None:
    make, said = broken_files()[fault]
    path = tmp_path / "net.safetensors"
    save_file(make(), path)
    if not said:  # values are read later, and then refused
        with closing(qwenimg.load(model.source, backend="cpu", precision="fp32")) as pipe, pytest.raises(ModelError):
            pipe("x", control=(path, PICTURE), **ASKED)
        return
    text = refused(open_control, path, model)
    assert said in text and str(path.name) in text


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"_class_name": "ControlNetModel"}, "is a ControlNet of Stable Diffusion, and the model is Qwen-Image"),
        ({"_class_name": "FluxControlNetModel"}, "is a ControlNet of FLUX.1"),
        ({"_class_name": "SD3ControlNetModel"}, "is a ControlNet of Stable Diffusion 3"),
        ({"_class_name": "UNet2DConditionModel"}, "expected 'QwenImageControlNetModel'"),
        ({"num_layers": 0}, "num_layers"), ({"num_layers": 10**7}, "num_layers"), ({"num_layers": 3}, "lacks tensor"),
        ({"extra_condition_channels": -1}, "extra_condition_channels"), ({"extra_condition_channels": 4}, "shape"),
        ({"extra_condition_channels": 8}, "takes 8 channels beside the picture's; a mask has 4"),
        ({"attention_head_dim": float("nan")}, "config.json"), ({"guidance_embeds": True}, "guidance_embeds"),
        ({"use_layer3d_rope": True}, "use_layer3d_rope is true"), ({"something_new": 1}, "something_new"),
        ({"joint_attention_dim": 64}, "shape"),
    ],
)  # fmt: skip
def test_broken_configurations_are_refused(
    tmp_path: Path, nets: dict[str, Path], model: Checkpoint, changes: dict[str, Any], said: str
) -> None:
    folder = tmp_path / "net"
    shutil.copytree(nets["union"], folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    assert said in refused(open_control, folder, model)


@pytest.mark.parametrize("kind", ["union", "patches"])
def test_mutants_are_refused_in_one_line_or_read(
    tmp_path: Path, nets: dict[str, Path], model: Checkpoint, kind: str
) -> None:
    source = nets[kind] if kind == "patches" else nets[kind] / "diffusion_pytorch_model.safetensors"
    whole, path, verdicts = source.read_bytes(), tmp_path / "net.safetensors", set[str]()
    header = 8 + int.from_bytes(whole[:8], "little")
    chance = random.Random(11)
    for _ in range(60):
        path.write_bytes(damaged(whole, header, chance))
        try:
            open_control(path, model).component.plan.close()
            verdicts.add("read")
        except ModelError as error:
            assert_line(str(error), path.name)
            verdicts.add("refused")
    assert "refused" in verdicts


def test_links_and_folders(tmp_path: Path, nets: dict[str, Path], model: Checkpoint) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    (tmp_path / "empty").mkdir()
    (tmp_path / "good").symlink_to(nets["union"])
    for name in ("loop", "nowhere", "empty", "gone"):
        refused(open_control, tmp_path / name, model)
    open_control(tmp_path / "good", model).component.plan.close()


def test_a_network_of_another_width(tmp_path: Path, tiny_folder: Path) -> None:
    from diffusers import QwenImageControlNetModel

    wide = QwenImageControlNetModel(**CONTROL | {"num_attention_heads": 4}, num_layers=1)
    wide.save_pretrained(tmp_path / "net")
    with closing(open_folder(tiny_folder)) as checkpoint:
        text = refused(open_control, tmp_path / "net", checkpoint)
    assert "is made for a transformer with 88 channels in its streams; the model's has 66" in text


# A component of the model


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(0)
def test_a_run_does_what_its_plan_says(tiny_folder: Path, nets: dict[str, Path], backend: str) -> None:
    """At limits from the least on: networks, transformer and what is streamed of each are as planned."""
    controls = [(nets["union"], PICTURE), (nets["patches"], PICTURE, 0.5), (nets["union"], PICTURE, 0.3)]
    asked = ASKED | {"control": controls}

    def load(limit: int) -> Pipeline:
        return qwenimg.load(tiny_folder, backend=backend, precision="fp32", max_memory=limit)

    with closing(load(10**12)) as pipe:
        with_nets(pipe, asked)
        tight = pipe.model.variant(Change(max_memory=1))
        least = limit_for(fit_options.plan_memory(tight, pipe.check("a circle", **asked)).largest.peak)
        usual = pipe("a circle", **asked).latents
    seen = set[tuple[str, int]]()
    for share in (1.0, 1.15, 1.4, 3.0):
        with closing(load(int(share * least))) as pipe:
            for _ in range(2):
                plan = planned(pipe, asked)
                rows, latents = drawn(pipe, asked)
                assert rows == plan, share
                assert {name for name, _, _, _ in rows} >= {"control", "denoise"}
                assert relative(latents, usual) <= BANDS, "all but the bands in which a picture is encoded is exact"
                seen |= {(resident, held) for _, resident, _, held in rows}
    print(f"{backend}: from {least:,} bytes on, {sorted(seen)}")
    assert len(seen) > 4 or backend == "mlx", "some are streamed (on MLX the VAE takes more than the least of these)"


def test_too_little_memory_is_one_line(tiny_folder: Path, nets: dict[str, Path]) -> None:
    with (
        closing(qwenimg.load(tiny_folder, backend="cpu", precision="fp32", max_memory=2 * 10**6)) as pipe,
        pytest.raises(DoesNotFit),
    ):
        pipe("a circle", control=(nets["union"], PICTURE), **ASKED)


@pytest.mark.parametrize("backend", BACKENDS)
def test_quantized_with_the_model(tiny_folder: Path, tmp_path: Path, backend: str) -> None:
    """-q has the network's blocks in fewer bits too, and the picture stays near."""
    from random_model import write_random_model  # wide enough for groups of 64

    folder = tmp_path / "model"
    write_random_model(folder)
    pytest.importorskip("numpy")
    with closing(open_folder(folder)) as checkpoint:
        config = checkpoint["transformer"].config
    from diffusers import QwenImageControlNetModel

    names = ("attention_head_dim", "num_attention_heads", "joint_attention_dim", "axes_dims_rope", "in_channels")
    net = QwenImageControlNetModel(**{name: getattr(config, name) for name in names}, num_layers=1)
    net.save_pretrained(tmp_path / "net")
    control = (tmp_path / "net", PICTURE)
    sizes = {}
    for bits in (None, 8):
        with closing(qwenimg.load(folder, backend=backend, precision="fp32", quantize=bits)) as pipe:
            with_nets(pipe, ASKED | {"control": control})
            [component] = [net.component for net in pipe.model.nets.values()]
            sizes[bits] = pipe.runtime.weight_bytes(component)
    print(sizes)
    assert sizes[8] < 0.6 * sizes[None]


def test_a_network_is_opened_once_and_again_when_it_changes(
    tmp_path: Path, tiny_folder: Path, nets: dict[str, Path]
) -> None:
    path = tmp_path / "net.safetensors"
    shutil.copy(nets["patches"], path)
    with closing(qwenimg.load(tiny_folder, backend="cpu", precision="fp32")) as pipe:
        asked = ASKED | {"control": [(path, PICTURE)]}
        first = pipe("a circle", **asked)
        assert pipe("a circle", **asked).timing.keys() & {"load controlnet net"} == set()
        write_patches(path, 99)
        second = pipe("a circle", **asked)
        assert not np.array_equal(first.latents, second.latents)
        assert first.recipe["control_fingerprints"] != second.recipe["control_fingerprints"]
        assert "load controlnet net (2)" in second.timing
        shutil.copy(nets["patches"], path)
        assert np.array_equal(pipe("a circle", **asked).latents, first.latents)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(0)
def test_step_cache_beside_control(tiny_folder: Path, nets: dict[str, Path], backend: str) -> None:
    """A call whose deep blocks are skipped adds no change twice: with every call computed the bits are those without a
    cache, and a skipped one moves the picture a little."""
    controls = [(nets["union"], PICTURE, 0.5), (nets["patches"], PICTURE, 0.2)]
    asked = ASKED | {"control": controls, "steps": 12}
    with closing(qwenimg.load(tiny_folder, backend=backend, precision="fp32")) as pipe:
        plain = pipe("a circle", **asked).latents
        whole = pipe("a circle", **asked, step_cache=1e-9)
        assert np.array_equal(whole.latents, plain)
        cached = pipe("a circle", **asked, cached_calls="12")
    moved = float(np.linalg.norm(cached.latents - plain) / np.linalg.norm(plain))
    print(f"{backend}: the last call of 12 skipped moves the latents by {moved:.3f}")
    assert cached.recipe["cached_calls"] == "12" and 0 < moved < 0.1


def test_image_and_mask_beside_control(tiny_folder: Path, nets: dict[str, Path]) -> None:
    """With -i too, the run starts from the picture and keeps its latents outside the mask."""
    picture = pixels.fit(PICTURE, 80, 48)
    mask = np.zeros((48, 80), np.uint8)
    mask[16:32, 16:48] = 255
    with closing(qwenimg.load(tiny_folder, backend="cpu", precision="fp32")) as pipe:
        asked = ASKED | {"image": picture, "mask": mask, "strength": 0.7}
        plain = pipe("a circle", **asked)
        both = pipe("a circle", control=(nets["inpainting"], picture), **asked)
        outside = np.ones((6, 10), bool)
        outside[2:4, 2:6] = False
        # Only the samples of the two pictures differ outside, whose noise is drawn in another order.
        assert not np.array_equal(plain.latents[..., ~outside], both.latents[..., ~outside])
        alone = pipe("a circle", control=(nets["inpainting"], picture), mask=mask, **ASKED)
        assert alone.recipe["mask_sha256"] == both.recipe["mask_sha256"] and "image_sha256" not in alone.recipe


# What a model takes


@pytest.mark.parametrize("kind", ["sd3", "flux2"])
def test_families_without_control_say_so(tiny: dict[str, Path], nets: dict[str, Path], kind: str) -> None:
    folder = next(path for name, path in tiny.items() if name.startswith(kind))
    with closing(qwenimg.load(folder, backend="cpu", precision="fp32")) as pipe, pytest.raises(UsageError) as error:
        pipe.check("x", control=(nets["union"], PICTURE), width=64, height=64)
    text = str(error.value)
    assert "control networks are for" in text and "\n" not in text
    print(text)


def test_edit_models_take_such_pictures_as_they_are(tiny_edit: dict[str, Path], nets: dict[str, Path]) -> None:
    said = "takes a picture of edges, depth or a pose as it is: give it with -i"
    with (
        closing(qwenimg.load(tiny_edit["qwen-2511"], backend="cpu", precision="fp32")) as pipe,
        pytest.raises(UsageError, match=said),
    ):
        pipe.check("x", image=PICTURE, control=(nets["union"], PICTURE))


def test_layered_takes_a_picture_apart(tiny_layered: Path, nets: dict[str, Path]) -> None:
    with (
        closing(qwenimg.load(tiny_layered, backend="cpu", precision="fp32")) as pipe,
        pytest.raises(UsageError, match="takes a picture apart"),
    ):
        pipe.check("x", image=PICTURE, control=(nets["union"], PICTURE))


def test_masks_and_networks_that_go_together(tiny_folder: Path, nets: dict[str, Path]) -> None:
    mask = np.zeros(PICTURE.shape[:2], np.uint8)
    with closing(qwenimg.load(tiny_folder, backend="cpu", precision="fp32")) as pipe:
        with pytest.raises(UsageError, match="paints within a mask: give it with --mask"):
            pipe.check("x", control=(nets["inpainting"], PICTURE))
        with pytest.raises(UsageError, match="with -i, or to an inpainting ControlNet"):
            pipe.check("x", control=(nets["union"], PICTURE), mask=mask)
        with pytest.raises(ModelError, match="no-such-net: no such file or folder; known by name are qwen-image-cont"):
            pipe.check("x", control=("no-such-net", PICTURE))
        with pytest.raises(
            ModelError, match=r"get it \(3.5 GB, Apache-2.0\) .*qwenimg pull qwen-image-controlnet-union"
        ):
            pipe.check("x", control=("qwen-image-controlnet-union", PICTURE))


# The command line


@pytest.mark.sample(0)
def test_from_a_photograph_on_the_command_line(
    tmp_path: Path, tiny_folder: Path, nets: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Image.fromarray(PICTURE).save("photo.png")
    base = [
        "-m",
        str(tiny_folder),
        "--backend",
        "cpu",
        "--precision",
        "fp32",
        "--steps",
        "2",
        "-s",
        "4",
        "--size",
        "80x48",
    ]
    control = [
        "--control",
        f"{nets['union']}=canny@photo.png:0.7",
        "--control",
        f"{nets['patches']}=photo.png:0.5:0-0.6",
    ]
    done = cli("a circle", *base, *control, "--keep-control", "-o", "a.png")
    assert done.code == 0, done.err
    edges = np.asarray(Image.open("a.canny.png"))
    assert np.array_equal(edges, canny.edges(pixels.fit(PICTURE, 80, 48))) and edges.any()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.canny.png", "a.png", "photo.png"]
    recipe = qwenimg_recipe(Path("a.png"))
    assert recipe["control"] == "union=canny@photo.png:0.7; patches.safetensors=photo.png:0.5:0-0.6"
    assert len(recipe["control_fingerprints"]) == len(recipe["control_sha256"]) == 2

    cli("a circle", *base, *control, "--keep-control", "-o", "b.png", "-o", "a.png").refused(2, "a.png")
    Path("a.png").rename("c.png")
    cli("a circle", *base, *control, "--keep-control", "-o", "a.png").refused(2, "a.canny.png")

    again = cli("--from", "c.png", "-m", str(tiny_folder), "--backend", "cpu", *control, "-o", "d.png")
    assert again.code == 0 and np.array_equal(np.asarray(Image.open("d.png")), np.asarray(Image.open("c.png")))
    cli("--from", "c.png", "-m", str(tiny_folder), "-o", "e.png").refused(2, "was made with --control", "give the same")
    other = cli("--from", "c.png", "-m", str(tiny_folder), "--backend", "cpu", *control[:2], "-o", "f.png")
    assert other.code == 0 and "what --control has is not that of the picture" in other.err


def qwenimg_recipe(path: Path) -> dict[str, Any]:
    from qwenimg.common.pictures.texts import read_texts
    from qwenimg.common.request.recipe import recipe_from_texts

    return dict(recipe_from_texts(read_texts(path), path))
