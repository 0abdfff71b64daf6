"""ControlNets for Flux.1 as files, as components of a model, and on the command line."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from math import prod
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
from support.flux_loras import control_lora
from support.refusals import refused
from support.relative import relative
from support.tiny_control import tiny_controlnet as tiny_qwen_controlnet
from support.tiny_flux_control import tiny_controlnet, write_controlnet
from support.tiny_redux import write_redux

import qwenimg
from qwenimg import Pipeline
from qwenimg.common.base.errors import ModelError, UsageError
from qwenimg.common.families.flux.checkpoint import OPENING
from qwenimg.common.families.flux.control import open_control
from qwenimg.common.families.flux.controlnet import published
from qwenimg.common.families.flux.known import CONTROL_LAYERS, CONTROLS
from qwenimg.common.families.load_options import LoadOptions
from qwenimg.common.networks.denoisers.flux_controlnet import KINDS
from qwenimg.common.pipeline import fit_options
from qwenimg.common.pipeline.start import latent_shape
from qwenimg.common.request.control_text import Control
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.runtime.runtime import Change, limit_for

BACKENDS = ("cpu", "mlx")
RNG = np.random.default_rng(2)
PICTURE, SECOND = (RNG.integers(0, 256, (48, 80, 3), np.uint8) for _ in range(2))
BANDS = 1e-5  # relative L2: sums of a convolution in float32, in blocks of other sizes
ASKED: dict[str, Any] = {"width": 80, "height": 48, "steps": 3, "guidance": 2.0, "seed": 3}
GUIDED = ASKED | {"true_cfg": 2.0, "negative_prompt": "blue"}
FILE = "diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def nets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("nets")
    return {name: write_controlnet(folder / name, name) for name in ("pro-2", "union", "canny")}


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model whose heads are as published, and a Union for it: its axes of positions, which no file shows, are too."""
    from support.tiny_flux import SINGLE, SINGLE_CLIP, write_tiny_flux

    folder = tmp_path_factory.mktemp("single")
    write_tiny_flux(folder / "model", "dev", single=True)
    net = write_controlnet(folder / "union", "union", **SINGLE, pooled_projection_dim=SINGLE_CLIP["hidden_size"])
    return folder / "model", net


@pytest.fixture
def model(tiny_flux: dict[str, Path]) -> Iterator[Checkpoint]:
    with closing(OPENING.open(tiny_flux["dev"], LoadOptions())) as checkpoint:
        yield checkpoint


def use(net: Path, kind: str = "", picture: np.ndarray = PICTURE, **numbers: float) -> Control:
    return Control(str(net), "a", kind, picture=picture, **numbers)


# Files


@pytest.mark.parametrize("name", ["pro-2", "union", "canny"])
def test_a_file_alone_is_opened_as_its_folder(nets: dict[str, Path], model: Checkpoint, name: str) -> None:
    with closing(open_control(nets[name], model)) as a, closing(open_control(nets[name] / FILE, model)) as b:
        assert a.component.config == b.component.config and a.kinds == b.kinds and a.samples and b.samples
        assert a.kinds == (tuple(KINDS) if name == "union" else ())


def test_a_folder_without_a_configuration(tmp_path: Path, nets: dict[str, Path], model: Checkpoint) -> None:
    shutil.copy(nets["union"] / FILE, tmp_path / FILE)
    with closing(open_control(tmp_path, model)) as a, closing(open_control(nets["union"], model)) as b:
        assert a.component.config == b.component.config


def broken_files() -> dict[str, tuple[Callable[[], dict[str, torch.Tensor]], str]]:
    whole = {key: value.contiguous() for key, value in tiny_controlnet("union").state_dict().items()}
    modes, embedder = "controlnet_mode_embedder.weight", "controlnet_x_embedder.weight"
    return {
        "a tensor is missing": (lambda: {k: v for k, v in whole.items() if k != "controlnet_blocks.1.bias"}, "lacks"),
        "a tensor too many": (lambda: whole | {"proj_out.weight": torch.ones(3)}, "unknown tensor 'proj_out.weight'"),
        "another shape": (lambda: whole | {"controlnet_blocks.1.bias": torch.ones(61)}, "controlnet_blocks.1.bias"),
        "a picture of other channels": (lambda: whole | {embedder: torch.zeros(66, 128)}, "controlnet_x_embedder"),
        "kinds of three axes": (lambda: whole | {modes: torch.ones(2, 3, 66)}, "controlnet_mode_embedder"),
        "a million kinds": (lambda: whole | {modes: torch.ones(1_000_000, 1)}, "num_mode"),
        "another text": (lambda: dict(tiny_controlnet(joint_attention_dim=64).state_dict()), "64 channels in a text"),
        "another pooled text": (
            lambda: dict(tiny_controlnet(pooled_projection_dim=24).state_dict()), "24 channels in a pooled text"),
        "wider": (lambda: dict(tiny_controlnet(num_attention_heads=4).state_dict()), "88 channels in its streams"),
        "infinite": (lambda: whole | {"controlnet_blocks.0.bias": torch.full((66,), torch.inf)}, "values"),
        "of XLabs": (lambda: {"input_hint_block.0.weight": torch.ones(3)}, "XLabs' ControlNets are not read"),
        "of Qwen-Image": (lambda: dict(tiny_qwen_controlnet().state_dict()), "is a ControlNet of Qwen-Image"),
        "of Stable Diffusion": (
            lambda: {"controlnet_mid_block.weight": torch.ones(3)}, "is a ControlNet of Stable Diffusion"),
        "no control network": (lambda: {"a": torch.ones(3)}, "holds no ControlNet of FLUX.1"),
        "empty": (dict, "ControlNet"),
    }  # fmt: skip


@pytest.mark.parametrize("fault", broken_files())
@pytest.mark.sample(4)
def test_broken_files_are_refused(tmp_path: Path, model: Checkpoint, fault: str) -> None:
    make, said = broken_files()[fault]
    path = tmp_path / "net.safetensors"
    save_file({key: value.contiguous() for key, value in make().items()}, path)
    if said == "values":  # they are read later, and then refused
        with closing(qwenimg.load(model.source, backend="cpu", precision="fp32")) as pipe, pytest.raises(ModelError):
            pipe("x", control=use(path, "depth"), **ASKED)
        return
    text = refused(open_control, path, model)
    print(text)
    assert said in text and path.name in text


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"_class_name": "ControlNetModel"}, "is a ControlNet of Stable Diffusion, and the model is FLUX.1"),
        ({"_class_name": "QwenImageControlNetModel"}, "is a ControlNet of Qwen-Image"),
        ({"_class_name": "ZImageControlNetModel"}, "is a ControlNet of Z-Image"),
        ({"_class_name": "FluxTransformer2DModel"}, "expected 'FluxControlNetModel'"),
        ({"num_layers": 3}, "lacks tensor"), ({"num_layers": 1}, "unknown tensor"), ({"num_layers": 0}, "num_layers"),
        ({"num_single_layers": -1}, "num_single_layers"), ({"num_single_layers": 10**7}, "num_single_layers"),
        ({"num_mode": 8}, "shape"), ({"num_mode": None}, "unknown tensor"), ({"num_mode": 10**9}, "num_mode"),
        ({"num_mode": True}, "num_mode"), ({"num_mode": float("nan")}, "config.json"),
        ({"conditioning_embedding_channels": 16}, "XLabs' ControlNets are not read"),
        ({"guidance_embeds": False}, "unknown tensor"), ({"patch_size": 2}, "patch_size is 2"),
        ({"axes_dims_rope": [2, 2]}, "axes_dims_rope"), ({"something_new": 1}, "something_new"),
        ({"out_channels": 128}, "out_channels is 128"),
    ],
)  # fmt: skip
@pytest.mark.sample(4)
def test_broken_configurations_are_refused(
    tmp_path: Path, nets: dict[str, Path], model: Checkpoint, changes: dict[str, Any], said: str
) -> None:
    folder = tmp_path / "net"
    shutil.copytree(nets["union"], folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    text = refused(open_control, folder, model)
    print(text)
    assert said in text


def test_mutants_are_refused_in_one_line_or_read(tmp_path: Path, nets: dict[str, Path], model: Checkpoint) -> None:
    path, verdicts, chance = tmp_path / "net.safetensors", set[str](), random.Random(11)
    for net in nets.values():
        whole = (net / FILE).read_bytes()
        header = 8 + int.from_bytes(whole[:8], "little")
        for _ in range(80):
            path.write_bytes(damaged(whole, header, chance))
            try:
                open_control(path, model).close()
                verdicts.add("read")
            except ModelError as error:
                assert_line(str(error), path.name)
                verdicts.add("refused")
    assert verdicts == {"read", "refused"}


def test_links_pipes_and_folders(tmp_path: Path, nets: dict[str, Path], model: Checkpoint) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    (tmp_path / "empty").mkdir()
    (tmp_path / "good").symlink_to(nets["pro-2"])
    os.mkfifo(tmp_path / "pipe.safetensors")
    for name in ("loop", "nowhere", "empty", "gone", "pipe.safetensors"):
        refused(open_control, tmp_path / name, model)
    open_control(tmp_path / "good", model).close()


@pytest.mark.parametrize("variant", ["kontext", "fill"])
def test_models_that_diffusers_does_not_control_are_refused(
    tiny_flux: dict[str, Path], nets: dict[str, Path], tmp_path: Path, variant: str
) -> None:
    Image.fromarray(PICTURE).save(tmp_path / "a.png")
    words = ["x", "-m", str(tiny_flux[variant]), "--control", f"{nets['canny']}={tmp_path / 'a.png'}", "-i"]
    cli(*words, str(tmp_path / "a.png")).refused(2, f"FLUX.1 {variant.title()} has inputs of its own")


def test_a_controlnet_is_no_transformer(tiny_flux: dict[str, Path], nets: dict[str, Path]) -> None:
    """Nor a model; and `info` says what it is, and how it is given."""
    for name, told in (("union", "a ControlNet Union for FLUX.1"), ("pro-2", "a ControlNet for FLUX.1")):
        file = str(nets[name] / FILE)
        ran = cli("info", file)
        kind = "KIND@" * (name == "union")
        assert ran.code == 0 and told in ran.out.decode(), ran.out
        assert f"-m flux-dev --control FILE={kind}PICTURE" in ran.out.decode()
        assert cli("x", "-m", file).code != 0
        assert "--control" in cli("x", "-m", file).err
        assert cli("x", "-m", str(tiny_flux["dev"]), "--transformer", file).code in (2, 5)


def test_a_model_of_another_family_is_refused(tiny: dict[str, Path], nets: dict[str, Path], tmp_path: Path) -> None:
    """Before a weight is read: in a plan too."""
    Image.fromarray(PICTURE).save(tmp_path / "a.png")
    for name in ("qwen", "z-image", "sd15"):
        for path in (nets["pro-2"], nets["union"] / FILE):
            ran = cli("plan", str(tiny[name]), "--control", f"{path}=depth@{tmp_path / 'a.png'}")
            assert ran.code == 5 and len(ran.err.splitlines()) == 1, ran.err
            assert "FLUX.1" in ran.err or "holds no ControlNet of Stable Diffusion" in ran.err, ran.err


# Kinds


def test_kinds_that_are_not_there(tiny_flux: dict[str, Path], nets: dict[str, Path]) -> None:
    with closing(qwenimg.load(tiny_flux["dev"], backend="cpu", precision="fp32")) as pipe:
        for kind, words in {
            "": "its picture has none",
            "normal": "normal@ is none",
            "colour": "colour@ is none",
        }.items():
            with pytest.raises(UsageError, match=f"needs a kind of picture, and {words}: write KIND@PICTURE, of canny"):
                pipe.check("x", control=use(nets["union"], kind))
        with pytest.raises(UsageError, match="make that of depth elsewhere, and leave out depth@"):
            pipe.check("x", control=use(nets["pro-2"], "depth"))
        pipe.check("x", control=use(nets["pro-2"], "canny"))
        for kind in KINDS:
            pipe.check("x", control=use(nets["union"], kind))


def test_each_kind_draws_another_picture(tiny_flux: dict[str, Path], nets: dict[str, Path]) -> None:
    """Lines that were made elsewhere are of the kind of canny edges."""
    asked = ASKED | {"steps": 1}
    flat = np.full((48, 80, 3), 128, np.uint8)  # blurred and grey it is the same, and without edges black
    with closing(qwenimg.load(tiny_flux["dev"], backend="cpu", precision="fp32")) as pipe:
        made = {kind: pipe("x", control=use(nets["union"], kind, flat), **asked).latents for kind in KINDS}
        black = use(nets["union"], "lineart", np.zeros_like(flat))
        assert np.array_equal(pipe("x", control=black, **asked).latents, made["canny"])
    names = [name for name in KINDS if name != "canny"]
    apart = [relative(made[a], made[b]) for i, a in enumerate(names) for b in names[:i]]
    print(f"kinds are {min(apart):.3f} apart")
    assert min(apart) > 1e-3


# A component of the model


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(0)
def test_a_run_does_what_its_plan_says(tiny_flux: dict[str, Path], nets: dict[str, Path], backend: str) -> None:
    """At limits from the least on: networks, transformer and what is streamed of each are as planned."""
    controls = [
        use(nets["union"], "depth"),
        use(nets["pro-2"], scale=0.5),
        use(nets["union"], "tile", SECOND, scale=0.3),
    ]
    asked = GUIDED | {"control": controls}

    def load(limit: int) -> Pipeline:
        return qwenimg.load(tiny_flux["dev"], backend=backend, precision="fp32", max_memory=limit)

    with closing(load(10**12)) as pipe:
        with_nets(pipe, asked)
        tight = pipe.model.variant(Change(max_memory=1))
        least = limit_for(fit_options.plan_memory(tight, pipe.check("a circle", **asked)).largest.peak)
        usual = pipe("a circle", **asked).latents
    seen = set[tuple[str, int]]()
    for share in (1.0, 1.4, 3.0):
        with closing(load(int(share * least))) as pipe:
            for _ in range(2):
                plan = planned(pipe, asked)
                rows, latents = drawn(pipe, asked)
                assert rows == plan, share
                assert {name for name, _, _, _ in rows} >= {"control", "denoise"}
                assert relative(latents, usual) <= BANDS, "all but the bands in which a picture is encoded is exact"
                seen |= {(resident, held) for _, resident, _, held in rows}
    print(f"{backend}: from {least:,} bytes on, {sorted(seen)}")


def test_the_stages_of_a_window(tiny_flux: dict[str, Path], nets: dict[str, Path]) -> None:
    """A network is called once for each evaluation of its steps, and not for each branch of guidance."""
    with closing(qwenimg.load(tiny_flux["dev"], backend="cpu", precision="fp32")) as pipe:
        asked = GUIDED | {"steps": 4, "control": [use(nets["union"], "depth", end=0.5), use(nets["union"], "tile")]}
        with_nets(pipe, asked)
        request = pipe.check("x", **asked)
        stages = pipe.model.stages(request, pipe.model.plan(request), latent_shape(pipe.model, request))
        calls = [one.splits[0].passes for one in stages if one.name == "control" and one.operations]
    assert calls == [2 + 4]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(0)
def test_step_cache_beside_control(tiny_flux: dict[str, Path], nets: dict[str, Path], backend: str) -> None:
    """A call whose deep blocks are skipped adds no change twice: with every call computed the bits are those without a
    cache, and a skipped one moves the picture a little."""
    asked = ASKED | {"control": use(nets["union"], "depth", scale=0.3), "steps": 12}
    with closing(qwenimg.load(tiny_flux["dev"], backend=backend, precision="fp32")) as pipe:
        plain = pipe("a circle", **asked).latents
        assert np.array_equal(pipe("a circle", **asked, step_cache=1e-9).latents, plain)
        cached = pipe("a circle", **asked, cached_calls="12").latents
    moved = relative(cached, plain)
    print(f"{backend}: the last call of 12 skipped moves the latents by {moved:.3f}")
    assert 0 < moved < 0.2


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(1)
def test_windows_and_sums(tiny_flux: dict[str, Path], nets: dict[str, Path], backend: str) -> None:
    """A control in no step changes nothing but the noise, which is drawn after a sample of its picture, and nothing is
    left of one."""
    with closing(qwenimg.load(tiny_flux["dev"], backend=backend, precision="fp32")) as pipe:

        def latents(*controls: Control) -> np.ndarray:
            return pipe("a circle", control=list(controls), **ASKED).latents

        plain, net = latents(), nets["pro-2"]
        none, off = use(net, scale=0.0), use(net, start=0.1, end=0.3)
        assert np.array_equal(latents(none), latents(off)) and relative(latents(none), plain) > 0.1
        whole, last = latents(use(net, scale=0.6)), latents(use(net, scale=0.6, start=1 / 3))
        assert relative(last, latents(none)) > 1e-3 and relative(last, whole) > 1e-3
        assert np.array_equal(latents(use(net, scale=0.6, start=0.0, end=1.0), none), latents(use(net, scale=0.6), off))
        assert np.array_equal(latents(), plain)


@pytest.mark.sample(0)
def test_what_a_network_keeps_for_the_next_image(tiny_flux: dict[str, Path], nets: dict[str, Path]) -> None:
    """Its modulation is of one prompt, one guidance and one schedule: a fresh model draws the same."""
    asked = [("a circle", {}), ("a square", {}), ("a square", {"guidance": 6.0}), ("a circle", {"steps": 2})]

    def drawn_by(pipe: Pipeline, text: str, more: dict[str, Any]) -> np.ndarray:
        return pipe(text, control=use(nets["pro-2"]), **(ASKED | more)).latents

    def opened() -> Pipeline:
        return qwenimg.load(tiny_flux["schnell"], backend="cpu", precision="fp32")

    with closing(opened()) as pipe:
        kept = [drawn_by(pipe, *one) for one in asked]
    for one, ours in zip(asked, kept, strict=True):
        with closing(opened()) as pipe:
            assert np.array_equal(drawn_by(pipe, *one), ours)
    assert relative(kept[1], kept[2]) > 1e-3, "the network sees the guidance that schnell does not"


def test_guidance_beside_schnell(tiny_flux: dict[str, Path], nets: dict[str, Path]) -> None:
    """A network made for dev sees dev's guidance there, unless the user gives one, which is no vain option then."""
    with closing(qwenimg.load(tiny_flux["schnell"], backend="cpu", precision="fp32")) as pipe:
        asked = {**ASKED, "control": use(nets["pro-2"])}
        own = pipe("x", **(asked | {"guidance": 0.0}))
        same = pipe("x", **(asked | {"guidance": 3.5}))
        assert np.array_equal(own.latents, same.latents) and not own.warnings and not same.warnings
        assert "guidance has no effect" in pipe("x", **(ASKED | {"guidance": 3.5})).warnings[0]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(0)
def test_fewer_bits(single: tuple[Path, Path], backend: str) -> None:
    """The network is quantized as the transformer is, but for its table of kinds; 8 bits move the picture little."""
    folder, net = single
    asked = ASKED | {"control": use(net, "depth", scale=0.5)}
    with closing(qwenimg.load(folder, backend=backend, precision="fp32")) as pipe:
        plain = pipe("a circle", **asked).latents
    with closing(qwenimg.load(folder, backend=backend, precision="fp32", quantize="8")) as pipe:
        eight = pipe("a circle", **asked).latents
        [part] = [one.component for one in pipe.model.nets.values()]
        kept = {
            type(entry.storage).__name__ for name, entry in part.plan.entries.items() if ".attn.to_q.weight" in name
        }
        table = type(part.plan.entries["controlnet_mode_embedder.weight"].storage).__name__
    print(f"{backend}: 8 bits move the latents by {relative(eight, plain):.3f}; {kept}, the table {table}")
    assert "Packed" not in table and kept == {"Packed"} and 0 < relative(eight, plain) < 0.1


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp16-plain"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(0)
def test_16_bits(tiny_flux: dict[str, Path], nets: dict[str, Path], backend: str, precision: str) -> None:
    asked = ASKED | {"control": use(nets["union"], "depth", scale=0.5)}
    with closing(qwenimg.load(tiny_flux["dev"], backend=backend, precision="fp32")) as pipe:
        plain = pipe("a circle", **asked).latents
    with closing(qwenimg.load(tiny_flux["dev"], backend=backend, precision=precision)) as pipe:
        less = pipe("a circle", **asked).latents
    print(f"{backend} {precision}: {relative(less, plain):.3f}")
    assert 0 < relative(less, plain) < 0.05


@pytest.mark.parametrize("name", CONTROL_LAYERS)
@pytest.mark.sample(1)
def test_a_published_one_is_planned_without_its_files(tmp_path: Path, name: str) -> None:
    """Beside dev's transformer; its download has the bytes of its parameters in 16 bits."""
    Image.fromarray(PICTURE).save(tmp_path / "picture.png")
    [known], net = [one for one in CONTROLS if one.name == name], published(name)
    assert net is not None
    held = 2 * sum(prod(shape) for shape in net.component.plan.shapes.values())
    words = ["plan", "flux-dev", "--backend", "cpu", "--precision", "bf16", "--size", "1024x1024", "--json"]
    kind = "depth@" * bool(net.kinds)
    ran, plain = cli(*words, "--control", f"{name}={kind}{tmp_path / 'picture.png'}"), cli(*words)
    assert ran.code == 0, ran.err
    with_net, without = (
        {stage["name"]: stage["weights_bytes"] for stage in json.loads(one.out)["stages"]} for one in (ran, plain)
    )
    added = with_net["denoise"] - without["denoise"]
    print(f"{name}: {known.bytes:,}, {held:,}; {with_net}, without {without}")
    assert abs(known.bytes - held) <= 0.005 * held and 0.5 * held <= added <= 1.1 * held
    assert known.license == "FLUX.1 dev Non-Commercial" and "control" not in without


@pytest.mark.sample(0)
def test_on_the_command_line(tiny_flux: dict[str, Path], nets: dict[str, Path], tmp_path: Path) -> None:
    Image.fromarray(PICTURE).save(tmp_path / "photo.png")
    controls = ["--control", f"{nets['union']}=canny@{tmp_path / 'photo.png'}:0.7:0-0.7"]
    controls += ["--control", f"{nets['pro-2'] / FILE}={tmp_path / 'photo.png'}:0.5"]
    words = ["a circle", "-m", str(tiny_flux["dev"]), "--size", "80x48", "--steps", "3", "-s", "3"]
    pictures = []
    for backend in BACKENDS:
        out = tmp_path / f"{backend}.png"
        options = ["--precision", "fp32", "--backend", backend, "--keep-control", "-o", str(out)]
        ran = cli(*words, *controls, *options)
        assert ran.code == 0, ran.err
        assert (tmp_path / f"{backend}.canny.png").exists()
        pictures.append(np.asarray(Image.open(out)).astype(int))
    assert np.abs(pictures[0] - pictures[1]).max() <= 2
    recipe = json.loads(Image.open(tmp_path / "cpu.png").text["qwenimg"])
    assert recipe["control"] == f"union=canny@photo.png:0.7:0-0.7; {FILE}=photo.png:0.5"
    again = tmp_path / "again.png"
    options = ["-m", str(tiny_flux["dev"]), "--backend", "cpu", *controls, "-o", str(again)]
    ran = cli("--from", str(tmp_path / "cpu.png"), *options)
    assert ran.code == 0, ran.err
    assert np.array_equal(np.asarray(Image.open(again)), pictures[0])
    cli(*words, "--control", f"{nets['union']}={tmp_path / 'photo.png'}").refused(2, "needs a kind of picture")


@pytest.mark.sample(0)
def test_beside_redux_and_a_lora_for_a_picture(
    tiny_flux: dict[str, Path], nets: dict[str, Path], tmp_path: Path
) -> None:
    """Each moves the picture, and both backends draw the same."""
    redux = write_redux(tmp_path / "FLUX.1-Redux-dev")
    save_file(control_lora(pooled_projection_dim=60), tmp_path / "lora.safetensors")
    net, picture, lora = (
        use(nets["union"], "depth", scale=0.6), use(redux, picture=SECOND), use(tmp_path / "lora.safetensors")
    )  # fmt: skip
    made: dict[str, list[np.ndarray]] = {}
    for backend in BACKENDS:
        with closing(qwenimg.load(tiny_flux["dev"], backend=backend, precision="fp32")) as pipe:
            runs = ([net], [picture], [net, picture], [lora, net], [lora, net, picture])
            made[backend] = [pipe("a circle", control=one, **ASKED).latents for one in runs]
    apart = [relative(a, b) for a, b in zip(made["cpu"], made["mlx"], strict=True)]
    moved = [relative(a, b) for i, a in enumerate(made["cpu"]) for b in made["cpu"][:i]]
    print(f"backends differ by at most {max(apart):.1e}; runs by {min(moved):.3f} at least")
    assert max(apart) <= 1e-4 and min(moved) > 1e-3
