"""IP-Adapters of Stable Diffusion as files, with their image encoders, as stages of a run, and on the command line."""

from __future__ import annotations

import base64
import json
import os
import pickle
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub import constants
from PIL import Image
from safetensors.torch import save_file
from support.cli_runner import cli
from support.controlled_runs import drawn, planned, with_nets
from support.file_mutants import assert_line, damaged
from support.relative import relative
from support.tiny_controlnet import write_controlnet
from support.tiny_ip_adapter import KINDS, nested, tensors, tiny_image_encoder, write_adapter
from support.tiny_sd import _SMALL, UNETS, write_tiny_sd

import qwenimg
from qwenimg.common.base import hf_cache
from qwenimg.common.base.errors import ModelError, QwenimgError, UsageError
from qwenimg.common.families import registry
from qwenimg.common.families.stable_diffusion import ip_adapter
from qwenimg.common.families.stable_diffusion import known as known_files
from qwenimg.common.families.stable_diffusion.control import open_control
from qwenimg.common.hub import listing, network_search, pull
from qwenimg.common.networks.denoisers import unet
from qwenimg.common.networks.encoders import clip_vision
from qwenimg.common.networks.encoders import ip_adapter as network
from qwenimg.common.parts.downloads import Download
from qwenimg.common.pipeline import fit_options
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.runtime.residents import Residents
from qwenimg.common.runtime.runtime import Change, limit_for
from qwenimg.common.runtime.stages import Stage

BACKENDS = ("cpu", "mlx")
PICTURE = np.random.default_rng(2).integers(0, 256, (40, 60, 3), np.uint8)
ASKED: dict[str, Any] = {"width": 64, "height": 48, "steps": 3, "guidance": 4.0, "seed": 3, "sampler": "euler"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "sd15"
    write_tiny_sd(path, "sd15")
    return path


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapter(tmp_path_factory.mktemp("adapters"), "sd15")


@pytest.fixture
def model(folder: Path) -> Iterator[Checkpoint]:
    with closing(registry.open_model(folder).checkpoint) as checkpoint:
        yield checkpoint


# Files


def test_the_published_sizes() -> None:
    """The parameters of published adapters and encoders, in millions, as diffusers and transformers count them."""
    sd, sdxl = unet.UNetConfig(cross_attention_dim=768), unet.UNetConfig(
        block_out_channels=(320, 640, 1280), cross_attention_dim=2048, attention_head_dim=(5, 10, 20),
        layers_per_block=(2, 2, 2), transformer_layers_per_block=(1, 2, 10),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip

    def millions(base: unet.UNetConfig, **sizes: Any) -> float:
        widths = tuple(one.width for one in unet.cross_attentions(base))
        config = network.IPAdapterConfig(text=base.cross_attention_dim, widths=widths, **sizes)
        return round(sum(int(np.prod(shape)) for shape in network.manifest(config).values()) / 1e6, 2)

    plus = {"kind": "plus", "features": 1280, "tokens": 16, "depth": 4}
    assert len(unet.cross_attentions(sd)) == 16 and len(unet.cross_attentions(sdxl)) == 70
    assert millions(sd) == 22.32
    assert millions(sd, **plus, inner=768, attention=768, feed_forward=3072) == 49.09
    assert millions(sd, kind="full-face", features=1280, tokens=0, inner=1280) == 21.79
    assert millions(sdxl, features=1280) == 351.29 and millions(sdxl) == 349.19
    assert millions(sdxl, **plus, inner=1280, attention=1280, feed_forward=5120) == 423.75
    encoders = [
        sum(int(np.prod(shape)) for shape in clip_vision.manifest(config).values()) / 1e6
        for config in (clip_vision.VIT_H, clip_vision.VIT_BIG_G)
    ]
    assert [round(one, 2) for one in encoders] == [632.08, 1844.91]
    assert [len(clip_vision.manifest(one)) for one in (clip_vision.VIT_H, clip_vision.VIT_BIG_G)] == [520, 776]


@pytest.mark.parametrize("known", known_files.ADAPTERS, ids=lambda known: known.name)
def test_the_known_adapters(known: Download) -> None:
    """Their sizes in the listing of their repository, and the networks that `plan` takes for them without files."""
    net = ip_adapter.published(known.name)
    assert net is not None and net.encoder is not None
    size = net.component.plan.nbytes + net.encoder.plan.nbytes
    print(f"{known.name}: {size / 1e6:.1f} MB, listed {known.bytes / 1e6:.1f} MB")
    assert abs(size / known.bytes - 1) < 0.002
    config, encoder = net.component.config, net.encoder.config
    assert config.features == (encoder.hidden_size if config.sees_states else encoder.projection_dim)
    assert ip_adapter.encoder_of(config) == ip_adapter.title_of(encoder)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with two adapters of h94's repository, tiny ones, and the encoder that they share."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hf"))
    place = hf_cache.storage_folder(known_files.ADAPTERS[0].repo) / "snapshots" / ("ab" * 20) / "models"
    for kind, name in (("base", "ip-adapter_sd15"), ("plus", "ip-adapter-plus_sd15")):
        write_adapter(place, "sd15", kind).rename(place / f"{name}.safetensors")
    return place


def test_a_known_name_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path, folder: Path, adapter: Path
) -> None:
    """Drawn with, repeated from a recipe, described, and removed without the encoder that another one needs."""
    monkeypatch.chdir(tmp_path)
    Image.fromarray(PICTURE).save("p.png")
    with closing(qwenimg.load(folder, backend="cpu", precision="fp32")) as pipe:
        made = [pipe("a circle", control=(net, PICTURE), **ASKED) for net in ("ip-adapter_sd15", adapter)]
        assert (made[0].latents == made[1].latents).all()
        with pytest.raises(ModelError, match=r"\(2\.6 GB, Apache-2\.0\).* by: qwenimg pull ip-"):
            pipe.check("x", control=("ip-adapter-full-face_sd15", PICTURE))
        with pytest.raises(ModelError, match="no such file or folder; give --ip-adapter ip-adapter_sd15 --ip-image"):
            pipe.check("x", control=("ip-adapter_sd14", PICTURE))
    assert network_search.named_control("ip-adapter_sd15") == cache / "ip-adapter_sd15.safetensors"
    here = {one.name: one.here for one in listing.entries() if one.name.startswith("ip-adapter")}
    assert [name for name, state in here.items() if state == "yes"] == ["ip-adapter_sd15", "ip-adapter-plus_sd15"]
    assert "an IP-Adapter" in cli("info", "ip-adapter_sd15").out.decode()
    cli("info", "ip-adapter_sdxl").refused(5, "qwenimg pull ip-adapter_sdxl")
    with pytest.raises(ModelError, match="pull one of them by its name, such as ip-adapter_sd15"):
        pull.pull("h94/IP-Adapter", echo=print, progress=lambda *told: None)
    assert cli("rm", "ip-adapter_sd15", "--yes").code == 0
    assert not (cache / "ip-adapter_sd15.safetensors").exists() and (cache / "image_encoder/model.safetensors").exists()
    assert cli("rm", "ip-adapter-plus_sd15", "--yes").code == 0
    assert not (cache / "image_encoder" / "model.safetensors").exists()


def test_a_known_name_that_is_not_here_is_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Image.fromarray(PICTURE).save(tmp_path / "p.png")
    words = ["plan", "-m", "sd15", "--ip-image", str(tmp_path / "p.png"), "--ip-adapter"]
    told = cli(*words, "ip-adapter-plus_sd15")
    print(told.out.decode())
    assert told.code == 0 and "pictures" in told.out.decode() and "adapter" in told.out.decode()
    cli(*words, "ip-adapter_sdxl").refused(5, "is an IP-Adapter for SDXL; the model is Stable Diffusion 1.x")


def broken_files() -> dict[str, tuple[dict[str, torch.Tensor], str]]:
    base = tensors("sd15")
    lora = {"ip_adapter.0.to_q_lora.down.weight": torch.ones(4, 4)}
    without = {key: one for key, one in base.items() if key != "ip_adapter.3.to_v_ip.weight"}
    narrow = {key: one[:, :30].contiguous() if key.startswith("ip_adapter.") else one for key, one in base.items()}
    face = {"image_proj.proj.0.weight": torch.ones(8, 512), "image_proj.proj.2.bias": torch.ones(8)}
    return {
        "a tensor is missing": (without, "lacks tensor"),
        "a tensor too many": (base | {"image_proj.more": torch.ones(3)}, "holds unknown tensor"),
        "another shape": (base | {"image_proj.norm.bias": torch.ones(7)}, "shape"),
        "another rank": (base | {"image_proj.proj.weight": torch.ones(7)}, "has not 2 dimensions in tensor"),
        "of SDXL": (tensors("sdxl"), "is an IP-Adapter for a model with 140 channels in a text; the model is"),
        "fewer cross attentions": (
            {key: one for key, one in base.items() if not key.startswith("ip_adapter.13.")}, "cross attentions with"),
        "a number that none has": (base | {"ip_adapter.2.to_k_ip.weight": torch.ones(3, 3)}, "unknown tensor"),
        "narrow keys": (narrow, "has shape"),
        "FaceID": (base | lora, "is a FaceID adapter, which needs a network that recognizes faces"),
        "FaceID, base": (face | {"ip_adapter.1.to_k_ip.weight": torch.ones(3, 3)}, "is a FaceID adapter"),
        "whole numbers": ({key: one.to(torch.int64) for key, one in base.items()}, "I64"),
    }  # fmt: skip


@pytest.mark.parametrize("name", broken_files())
@pytest.mark.sample(2)
def test_broken_files_are_refused(tmp_path: Path, model: Checkpoint, name: str) -> None:
    broken, said = broken_files()[name]
    file = tmp_path / "adapter.safetensors"
    save_file(broken, file)
    with pytest.raises(ModelError) as error:
        open_control(file, model).close()
    assert_line(str(error.value), file.name)
    assert said in str(error.value)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sample(0)
def test_a_pickle_draws_what_safetensors_draw(tmp_path: Path, folder: Path, kind: str) -> None:
    file = write_adapter(tmp_path, "sd15", kind)
    torch.save(nested(tensors("sd15", kind)), tmp_path / "old.bin")
    with closing(qwenimg.load(folder, backend="cpu", precision="fp32")) as pipe:
        made = [pipe("a circle", control=(one, PICTURE), **ASKED) for one in (file, tmp_path / "old.bin")]
    assert (made[0].latents == made[1].latents).all()


@pytest.mark.sample(0)
def test_mutants_are_refused_in_one_line_or_read(tmp_path: Path, adapter: Path, model: Checkpoint) -> None:
    """500 damaged files, 200 of them pickles, and some that would run a program if they were run."""
    chance, verdicts = random.Random(12), {"read": 0, "refused": 0}
    whole = adapter.read_bytes()
    torch.save(nested(tensors("sd15")), tmp_path / "new.bin")
    torch.save(nested(tensors("sd15")), tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    pickles = [(tmp_path / name).read_bytes() for name in ("new.bin", "old.bin")]
    canary = tmp_path / "canary"

    class Runs:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {canary}",)

    evil = [pickle.dumps({"image_proj": Runs(), "ip_adapter": {}}, protocol=protocol) for protocol in (0, 1, 2, 3, 4)]
    torch.save({"image_proj": Runs(), "ip_adapter": {"1.to_k_ip.weight": torch.ones(3, 3)}}, tmp_path / "evil.bin")
    evil.append((tmp_path / "evil.bin").read_bytes())

    def attack(name: str, data: bytes) -> None:
        path = tmp_path / name
        path.write_bytes(data)
        try:
            open_control(path, model).close()
            verdicts["read"] += 1
        except QwenimgError as error:
            assert_line(str(error), path.name)
            verdicts["refused"] += 1

    header = 8 + int.from_bytes(whole[:8], "little")
    for _ in range(300):
        attack("net.safetensors", damaged(whole, header, chance))
    for number in range(200):
        data = pickles[number % 2]
        attack("net.bin", damaged(data, min(len(data), 6000), chance))
    for data in evil:
        attack("net.bin", data)
    print(verdicts)
    assert verdicts["refused"] > 200 and sum(verdicts.values()) == 506 and not canary.exists()


def test_links_folders_and_pipes(tmp_path: Path, adapter: Path, model: Checkpoint) -> None:
    (tmp_path / "loop.bin").symlink_to(tmp_path / "loop.bin")
    (tmp_path / "nowhere.safetensors").symlink_to(tmp_path / "gone")
    os.mkfifo(tmp_path / "pipe.bin")
    (tmp_path / "empty").mkdir()
    for name in ("loop.bin", "nowhere.safetensors", "pipe.bin", "empty", "gone.bin"):
        with pytest.raises(ModelError):
            open_control(tmp_path / name, model)
    (tmp_path / "good.safetensors").symlink_to(adapter)
    open_control(tmp_path / "good.safetensors", model).close()


# The image encoder


@pytest.mark.sample(0)
def test_the_encoder_is_found_by_its_sizes(tmp_path: Path, folder: Path) -> None:
    """In the folders of --models-dir, in one file as ComfyUI has it, among others; one of other sizes is not taken."""
    models = tmp_path / "ComfyUI" / "models"
    file = write_adapter(models / "ipadapter", "sd15")
    near = file.parent / "image_encoder"
    (models / "clip_vision").mkdir()
    for name, encoder in {"a-bigG": tiny_image_encoder(projection_dim=52), "b-ViT-H": tiny_image_encoder()}.items():
        encoder.save_pretrained(tmp_path / name)
        shutil.copy(tmp_path / name / "model.safetensors", models / "clip_vision" / f"{name}.safetensors")
    (models / "clip_vision" / "c.safetensors").write_bytes(b"broken")
    load: Callable[..., qwenimg.Pipeline] = lambda **more: qwenimg.load(  # noqa: E731
        folder, backend="cpu", precision="fp32", **more
    )
    with closing(load()) as pipe:
        beside = pipe("a circle", control=(file, PICTURE), **ASKED).latents
    shutil.rmtree(near)
    with closing(load(models_dir=tmp_path / "ComfyUI")) as pipe:
        made = pipe("a circle", control=(file.name, PICTURE), **ASKED)
        assert (made.latents == beside).all()
    given = models / "clip_vision" / "b-ViT-H.safetensors"
    with closing(load(ip_encoder=given)) as pipe:
        assert (pipe("a circle", control=(file, PICTURE), **ASKED).latents == beside).all()
    with closing(load()) as pipe, pytest.raises(ModelError, match="needs its image encoder") as lacks:
        pipe.check("x", control=(file, PICTURE))
    assert_line(str(lacks.value), file.name)
    wrong = models / "clip_vision" / "a-bigG.safetensors"
    with closing(load(ip_encoder=wrong)) as pipe, pytest.raises(ModelError, match="embeddings of 52") as other:
        pipe.check("x", control=(file, PICTURE))
    assert_line(str(other.value), file.name)


# In a run


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(0)
def test_a_run_does_what_its_plan_says(folder: Path, adapter: Path, backend: str) -> None:
    """Each stage of the pictures is planned, and entered in that order; what they keep is counted."""
    asked = ASKED | {"control": [(adapter, [PICTURE, PICTURE[::-1]], 0.5)]}
    with closing(qwenimg.load(folder, backend=backend, precision="fp32")) as pipe:
        plan, entered = with_nets(pipe, asked), list[str]()
        planned = [one.name for one in plan.stages]
        acquire = Residents.acquire

        def noted(residents: Residents, stage: Stage) -> Any:
            entered.append(stage.name)
            return acquire(residents, stage)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Residents, "acquire", noted)
            pipe("a circle", **asked)
    print(planned, entered)
    assert planned == entered and planned[1:3] == ["pictures", "adapter"]


def test_one_branch_at_a_time_draws_the_same(folder: Path, adapter: Path) -> None:
    from dataclasses import replace

    asked = ASKED | {"control": (adapter, PICTURE)}
    with closing(qwenimg.load(folder, backend="cpu", precision="fp32")) as pipe:
        usual = pipe("a circle", **asked).latents
        steps = pipe.model.base.steps
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                pipe.model.base, "steps",
                lambda *given, **more: replace((stage := steps(*given, **more)), splits=stage.splits[-1:]),
            )  # fmt: skip
            single = pipe("a circle", **asked).latents
    assert relative(single, usual) <= 1e-5


@pytest.mark.parametrize(
    ("control", "said"),
    [
        ("{a}=also@p.png", "comes after a picture of the same adapter"),
        ("{a}=p.png; {a}=also@p.png; {a}=mask@p.png", "1 masks for 2 pictures"),
        ("{a}=p.png:up_blocks.0=1", "is no part of this model with a cross attention; choose style, layout"),
        ("{a}=p.png; {a}=also@p.png:0.5", "stand behind its first picture"),
    ],
)
def test_wrong_uses_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Path, adapter: Path, control: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Image.fromarray(PICTURE).save("p.png")
    with closing(qwenimg.load(folder, backend="cpu", precision="fp32")) as pipe, pytest.raises(UsageError) as error:
        pipe.check("x", control=control.format(a=adapter))
    assert said in str(error.value) and len(str(error.value)) <= 300


# On the command line


@pytest.mark.sample(0)
def test_on_the_command_line(tmp_path: Path, folder: Path, adapter: Path) -> None:
    Image.fromarray(PICTURE).save(tmp_path / "photo.png")
    Image.fromarray(PICTURE[::-1]).save(tmp_path / "second.png")
    words = ["-m", str(folder), "--backend", "cpu", "a circle", "--size", "64x48", "--steps", "2", "-s", "3"]
    given = ["--ip-adapter", f"{adapter}:style=0.8,mid_block=0.5:0-0.9", "--ip-image", str(tmp_path / "photo.png")]
    given += ["--ip-image", str(tmp_path / "second.png")]
    first, second = tmp_path / "a.png", tmp_path / "b.png"
    assert cli(*words, *given, "-o", str(first)).code == 0
    recipe = json.loads(Image.open(first).text["qwenimg"])
    assert recipe["control"].endswith("=photo.png:style=0.8,mid_block=0.5:0-0.9; " + recipe["control"].split("; ")[1])
    assert "=also@second.png" in recipe["control"] and str(tmp_path) not in recipe["control"]
    cli("--from", str(first), "--backend", "cpu", "-m", str(folder), "-o", str(second)).refused(2, "--control")
    again = cli("--from", str(first), *given, "--backend", "cpu", "-m", str(folder), "-o", str(second))
    assert again.code == 0 and "not that of" not in again.err
    assert (np.asarray(Image.open(first)) == np.asarray(Image.open(second))).all()
    lines = tmp_path / "lines.jsonl"
    line = {"prompt": "a circle", "ip_adapter": str(adapter), "ip_image": str(tmp_path / "photo.png"), "steps": 1}
    lines.write_text(json.dumps(line) + "\n")
    batch = ["--prompt-file", str(lines), "-m", str(folder), "--backend", "cpu", "--size", "64x48"]
    assert cli(*batch, "-o", str(tmp_path / "c.png")).code == 0
    cli(*words, "--ip-adapter", str(adapter)).refused(2, "give its picture with --ip-image PICTURE")
    cli("info", str(adapter)).out.decode().index("type: base, for a model with 60 channels in a text")


def test_files_are_told(tmp_path: Path, adapter: Path) -> None:
    torch.save(nested(tensors("sd15", "plus")), tmp_path / "old.bin")
    lines = cli("info", str(tmp_path / "old.bin")).out.decode()
    print(lines)
    assert "type: plus, for" in lines and "use it: qwenimg PROMPT -m MODEL --ip-adapter FILE" in lines
    lines = cli("info", str(adapter.parent / "image_encoder" / "model.safetensors")).out.decode()
    print(lines)
    assert "an image encoder (CLIP vision)" in lines and "--ip-encoder FILE" in lines


def test_the_names_of_parts_are_those_of_instant_style() -> None:
    assert ip_adapter._SDXL == {"style": ("up_blocks.0.attentions.1",), "layout": ("down_blocks.2.attentions.1",)}


def test_units_of_the_web_uis_api() -> None:
    from qwenimg.cli.serve.apis import sd_control

    picture = base64.b64encode(b"a picture").decode()
    unit = {"image": picture, "model": "plus [0123abcd]", "module": "ip-adapter_clip_sd15", "weight": 0.6}
    made = sd_control.units({"ControlNet": {"args": [unit | {"effective_region_mask": picture}]}}, [])
    assert [str(one) for one in made.controls] == ["plus=1:0.6", "plus=mask@2"] and len(made.pictures) == 2


# Beside others


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(0)
def test_beside_a_controlnet_in_little_memory(tmp_path: Path, folder: Path, adapter: Path, backend: str) -> None:
    """At limits from the least on: what is streamed is as planned, and draws what a run without a limit draws."""
    net = write_controlnet(tmp_path / "canny", UNETS["sd15"] | _SMALL)
    asked = ASKED | {"control": [(net, PICTURE, 0.1), (adapter, [PICTURE, PICTURE[::-1]], 1.5)]}
    with closing(qwenimg.load(folder, backend=backend, precision="fp32", max_memory=10**12)) as pipe:
        with_nets(pipe, asked)
        tight = pipe.model.variant(Change(max_memory=1))
        least = limit_for(fit_options.plan_memory(tight, pipe.check("a circle", **asked)).largest.peak)
        usual = pipe("a circle", **asked).latents
        plain = pipe("a circle", **ASKED).latents
        apart = [relative(pipe("a circle", **asked | {"control": one}).latents, usual) for one in asked["control"]]
    assert relative(plain, usual) > 1e-2 and min(apart) > 1e-2, "each of both counts"
    held: dict[str, set[int]] = {}
    for share in (1.0, 1.5, 4.0):
        with closing(qwenimg.load(folder, backend=backend, precision="fp32", max_memory=int(share * least))) as pipe:
            plan = planned(pipe, asked)
            rows, latents = drawn(pipe, asked)
            error = relative(latents, usual)
            print(f"{backend}, {share:g} of {least:,} bytes: {error:.1e}, {rows}")
            assert rows == plan and error <= 1e-5
            for name, _, _, size in rows:
                held.setdefault(name, set()).add(size)
    assert held.keys() >= {"control", "denoise"} and len(held["denoise"]) > 1, "the UNet is streamed at some"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(0)
def test_within_a_mask(folder: Path, adapter: Path, backend: str) -> None:
    """The picture counts where a mask is painted anew, and the rest stays as it is without it."""
    mask = np.zeros((48, 64), np.uint8)
    mask[:, 32:] = 255
    start = np.random.default_rng(9).integers(0, 256, (48, 64, 3), np.uint8)
    asked = ASKED | {"image": start, "mask": mask, "strength": 1.0}
    with closing(qwenimg.load(folder, backend=backend, precision="fp32")) as pipe:
        plain, made = (pipe("a circle", **asked, **more) for more in ({}, {"control": (adapter, PICTURE)}))
    kept, painted = (relative(made.latents[..., part], plain.latents[..., part]) for part in (slice(3), slice(5, 8)))
    print(f"{backend}: painted {painted:.1e}, kept {kept:.1e}")
    assert painted > 1e-2 and kept <= 1e-6


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(0)
def test_in_16_bits(folder: Path, adapter: Path, backend: str) -> None:
    asked = ASKED | {"control": (adapter, PICTURE)}
    made = {}
    for precision in ("fp32", "bf16"):
        with closing(qwenimg.load(folder, backend=backend, precision=precision)) as pipe:
            made[precision] = pipe("a circle", **asked).latents
    error = relative(made["bf16"], made["fp32"])
    print(f"{backend}: bf16 {error:.1e} from float32")
    assert np.isfinite(made["bf16"]).all() and 0 < error < 0.03  # both have 1.5e-2 at most
