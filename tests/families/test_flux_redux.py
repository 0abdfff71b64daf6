"""FLUX.1 Redux as files, with its image encoder, as stages of a run, and on the command line."""

from __future__ import annotations

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
from support.controlled_runs import with_nets
from support.file_mutants import assert_line, damaged
from support.relative import relative
from support.tiny_flux import write_tiny_flux
from support.tiny_ip_adapter import tiny_image_encoder, write_adapter
from support.tiny_redux import TOKENS, encoder_file, tiny_redux, tiny_siglip, write_comfy, write_redux
from support.tiny_sd import write_tiny_sd

import qwenimg
from qwenimg.cli.serve.offered import Offer, search
from qwenimg.common.base import hf_cache
from qwenimg.common.base.errors import ModelError, QwenimgError, UsageError
from qwenimg.common.families import registry
from qwenimg.common.families.flux import redux
from qwenimg.common.families.flux.known import REDUX
from qwenimg.common.hub import listing
from qwenimg.common.networks.encoders import redux as network
from qwenimg.common.networks.encoders import siglip_vision
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.runtime.residents import Residents
from qwenimg.common.runtime.stages import Stage

BACKENDS = ("cpu", "mlx")
PICTURE, OTHER = np.random.default_rng(2).integers(0, 256, (2, 40, 60, 3), np.uint8)
ASKED: dict[str, Any] = {"width": 64, "height": 48, "steps": 2, "seed": 3}
Shapes = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_redux(tmp_path_factory.mktemp("redux") / "FLUX.1-Redux-dev")


@pytest.fixture(scope="module")
def sd15(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "sd15"
    write_tiny_sd(path, "sd15")
    return path


@pytest.fixture
def dev(tiny_flux: dict[str, Path]) -> Path:
    return tiny_flux["dev"]


@pytest.fixture
def model(dev: Path) -> Iterator[Checkpoint]:
    with closing(registry.open_model(dev).checkpoint) as checkpoint:
        yield checkpoint


def loaded(dev: Path, backend: str = "cpu", **more: Any) -> Any:
    return closing(qwenimg.load(dev, backend=backend, precision="fp32", **more))


# Files


def test_the_published_sizes() -> None:
    """The parameters of the published files, in millions, and the tokens of a picture."""
    parts = network.manifest(network.ReduxConfig()), siglip_vision.manifest(siglip_vision.SO400M)
    millions = [round(sum(int(np.prod(shape)) for shape in part.values()) / 1e6, 2) for part in parts]
    print(millions)
    assert millions == [64.5, 412.99] and siglip_vision.SO400M.patches == 729
    net = redux.published(REDUX.name)
    assert net is not None and net.encoder is not None
    head = 2 * (1152 + 4 * 1152 * 1153 + 2 * 1152 + 1152 * 4304 * 2 + 4304 + 1152)  # bytes of what is not read
    assert abs((net.component.plan.nbytes + net.encoder.plan.nbytes + head) / REDUX.bytes - 1) < 0.002


def test_a_file_alone_is_told_by_its_shapes() -> None:
    shapes = siglip_vision.manifest(siglip_vision.SO400M)
    named = {siglip_vision.published(name): shape for name, shape in shapes.items()}
    assert siglip_vision.config_of(named) == siglip_vision.SO400M
    assert network.config_of(network.manifest(network.ReduxConfig())) == network.ReduxConfig()


def test_a_known_name_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Path, dev: Path, sd15: Path
) -> None:
    """Drawn with, served, described and removed; another model refuses it also where it is not here."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hf"))
    Image.fromarray(PICTURE).save(tmp_path / "p.png")
    words = ["plan", "flux-dev", "--ip-image", str(tmp_path / "p.png"), "--ip-adapter", "flux-redux"]
    told = cli(*words).out.decode()
    print(told)
    assert "pictures" in told and "adapter" in told
    with loaded(dev) as pipe, pytest.raises(ModelError, match=r"\(985\.6 MB, FLUX\.1 dev Non-Commercial\).* by: qwen"):
        pipe.check("", control=("flux-redux", PICTURE))
    with loaded(sd15) as pipe, pytest.raises(ModelError, match=r"is for Flux\.1; the model is Stable"):
        pipe.check("x", control=("flux-redux", PICTURE))
    place = hf_cache.storage_folder(REDUX.repo) / "snapshots" / ("ab" * 20)
    shutil.copytree(folder, place)
    with loaded(dev) as pipe:
        made = [pipe("", control=(net, PICTURE), **ASKED).latents for net in ("flux-redux", folder)]
    assert (made[0] == made[1]).all()
    offered = search(Offer(names=("shapes",), options={}, controls=("flux-redux",)))
    assert offered.controls == {"flux-redux": "flux-redux"} and offered.adapters == ("flux-redux",)
    assert next(one.here for one in listing.entries() if one.name == "flux-redux") == "yes"
    assert "FLUX.1 Redux" in cli("info", "flux-redux").out.decode()
    assert cli("rm", "flux-redux", "--yes").code == 0
    assert not (place / REDUX.files[0]).exists() and not (place / REDUX.files[1]).exists()


def broken_files() -> dict[str, tuple[Shapes, str]]:
    base = dict(tiny_redux().state_dict())
    without = {key: one for key, one in base.items() if key != "redux_down.bias"}
    return {
        "a tensor is missing": (without, "lacks tensor"),
        "a tensor too many": (base | {"redux_more.weight": torch.ones(3)}, "holds unknown tensor"),
        "another shape": (base | {"redux_down.bias": torch.ones(7)}, "shape"),
        "another rank": (base | {"redux_up.weight": torch.ones(7)}, "lacks the matrices redux_up and redux_down"),
        "empty": (base | {"redux_up.weight": torch.ones(0, 4)}, "lacks the matrices redux_up and redux_down"),
        "not three times as wide": (base | {"redux_up.weight": torch.ones(90, 48)}, "has shape"),
        "for another text": (dict(tiny_redux(txt_in_features=52).state_dict()), "with 52 channels in a text"),
        "whole numbers": ({key: one.to(torch.int64) for key, one in base.items()}, "I64"),
        "another file": ({"some.weight": torch.ones(3, 3)}, "has no tensors of FLUX.1 Redux"),
    }  # fmt: skip


@pytest.mark.parametrize("name", broken_files())
def test_broken_files_are_refused(tmp_path: Path, model: Checkpoint, name: str) -> None:
    broken, said = broken_files()[name]
    file = tmp_path / "redux.safetensors"
    save_file(broken, file)
    with pytest.raises(ModelError) as error:
        redux.open_redux(file, model).close()
    assert_line(str(error.value), file.name)
    assert said in str(error.value)


def broken_encoders() -> dict[str, tuple[Shapes, str]]:
    base = {key: one for key, one in encoder_file(tiny_siglip()).items() if ".head." not in key}
    kernel, positions = "vision_model.embeddings.patch_embedding.weight", "embeddings.position_embedding.weight"
    without = {key: one for key, one in base.items() if key != "vision_model.encoder.layers.1.mlp.fc1.bias"}
    odd = tiny_siglip(hidden_size=52, num_attention_heads=4)
    return {
        "a tensor is missing": (without, "lacks"),
        "no patches": ({key: one for key, one in base.items() if key != kernel}, "it is no image encoder of SigLIP"),
        "empty patches": (base | {kernel: torch.ones(48, 3, 0, 0)}, "it is no image encoder of SigLIP"),
        "no square": (base | {f"vision_model.{positions}": torch.ones(17, 48)}, "shape"),
        "heads that do not divide": (
            encoder_file(odd),
            "is not a multiple of num_attention",
        ),
        "CLIP's": (dict(tiny_image_encoder().state_dict()), "it is no image encoder of SigLIP"),
    }


@pytest.mark.parametrize("name", broken_encoders())
def test_broken_encoders_are_refused(tmp_path: Path, folder: Path, dev: Path, name: str) -> None:
    broken, said = broken_encoders()[name]
    file = tmp_path / "encoder.safetensors"
    save_file({key: value.contiguous() for key, value in broken.items()}, file)
    with loaded(dev, ip_encoder=file) as pipe, pytest.raises(ModelError) as error:
        pipe.check("", control=(folder, PICTURE))
    assert_line(str(error.value), file.name)
    assert said in str(error.value)


CONFIGS = [
    ("image_encoder", {"model_type": "clip_vision_model"}), ("image_encoder", {"hidden_act": "gelu"}),
    ("image_encoder", {"num_attention_heads": 5}), ("image_encoder", {"num_attention_heads": 0}),
    ("image_encoder", {"image_size": 3}), ("image_encoder", {"image_size": [33, 33]}),
    ("image_encoder", {"patch_size": 0}), ("image_encoder", {"patch_size": 2**70}),
    ("image_encoder", {"num_channels": 1}), ("image_encoder", {"layer_norm_eps": float("nan")}),
    ("image_encoder", {"hidden_size": "48"}), ("image_encoder", {"num_hidden_layers": 10**6}),
    ("image_embedder", {"redux_dim": 49}), ("image_embedder", {"redux_dim": 0}),
    ("image_embedder", {"txt_in_features": None}), ("image_embedder", {"_class_name": "FluxTransformer2DModel"}),
    ("image_embedder", {"txt_in_features": 10**9}), ("image_embedder", {"more": 1}),
]  # fmt: skip


@pytest.mark.parametrize(("part", "change"), CONFIGS, ids=str)
def test_broken_configurations_are_refused(
    tmp_path: Path, folder: Path, dev: Path, part: str, change: dict[str, Any]
) -> None:
    place = tmp_path / "Redux"
    shutil.copytree(folder, place)
    config = place / part / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | change))
    with loaded(dev, ip_encoder=place / "image_encoder") as pipe, pytest.raises(ModelError) as error:
        pipe.check("", control=(place, PICTURE))
    assert len(str(error.value)) <= 300 and str(error.value).isprintable()
    print(error.value)


def test_mutants_are_refused_in_one_line_or_read(tmp_path: Path, folder: Path, dev: Path, model: Checkpoint) -> None:
    """600 damaged files of both kinds, 150 of them pickles, and some that would run a program if they were run."""
    chance, verdicts = random.Random(12), {"read": 0, "refused": 0}
    tensors, canary = dict(tiny_redux().state_dict()), tmp_path / "canary"

    class Runs:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {canary}",)

    torch.save(tensors, tmp_path / "new.pt")
    torch.save(tensors | {"redux_up.bias": Runs()}, tmp_path / "evil.pt")
    save_file(encoder_file(tiny_siglip()), tmp_path / "encoder")
    evil = [pickle.dumps({"redux_up.weight": Runs()}, protocol=protocol) for protocol in range(5)]

    def attack(name: str, data: bytes, opens: Callable[[Path], Any]) -> None:
        path = tmp_path / name
        path.write_bytes(data)
        try:
            opens(path)
            verdicts["read"] += 1
        except QwenimgError as error:
            assert_line(str(error), path.name)
            verdicts["refused"] += 1

    opened: Callable[[Path], Any] = lambda path: redux.open_redux(path, model).close()  # noqa: E731
    encoder: Callable[[Path], Any] = lambda path: redux.open_encoder(path).plan.close()  # noqa: E731
    for source, name, count, opens in (
        (folder / "flux1-redux-dev.safetensors", "net.safetensors", 225, opened),
        (tmp_path / "encoder", "encoder.safetensors", 225, encoder), (tmp_path / "new.pt", "net.bin", 150, opened),
    ):  # fmt: skip
        whole = source.read_bytes()
        header = 8 + int.from_bytes(whole[:8], "little") if name.endswith("s") else 4000
        for _ in range(count):
            attack(name, damaged(whole, min(header, len(whole)), chance), opens)
    for data in (*evil, (tmp_path / "evil.pt").read_bytes()):
        attack("net.bin", data, opened)
    print(verdicts)
    assert verdicts["refused"] > 250 and sum(verdicts.values()) == 606 and not canary.exists()


def test_links_folders_and_pipes(tmp_path: Path, folder: Path, model: Checkpoint) -> None:
    (tmp_path / "loop.safetensors").symlink_to(tmp_path / "loop.safetensors")
    (tmp_path / "nowhere.safetensors").symlink_to(tmp_path / "gone")
    os.mkfifo(tmp_path / "pipe.safetensors")
    (tmp_path / "empty").mkdir()
    for name in ("loop.safetensors", "nowhere.safetensors", "pipe.safetensors", "empty", "gone.safetensors"):
        for opens in (lambda path: redux.open_redux(path, model), redux.open_encoder):
            with pytest.raises(ModelError) as error:
                opens(tmp_path / name)
            assert_line(str(error.value), name.partition(".")[0])
    (tmp_path / "good.safetensors").symlink_to(folder / "flux1-redux-dev.safetensors")
    redux.open_redux(tmp_path / "good.safetensors", model).close()


@pytest.mark.sample(0)
def test_a_pickle_and_each_place_draw_the_same(tmp_path: Path, folder: Path, dev: Path) -> None:
    """The folder, its part, the authors' file, ComfyUI's two files by their names, and a file of torch.save."""
    torch.save(dict(tiny_redux().state_dict()), tmp_path / "redux.pt")
    file = write_comfy(tmp_path / "ComfyUI" / "models")
    tiny_siglip(image_size=28).save_pretrained(tmp_path / "encoder")
    places = [folder, folder / "image_embedder", folder / "flux1-redux-dev.safetensors", tmp_path / "redux.pt"]
    with loaded(dev, ip_encoder=tmp_path / "encoder") as pipe:
        made = [pipe("a circle", control=(place, PICTURE), **ASKED).latents for place in places]
    with loaded(dev, models_dir=tmp_path / "ComfyUI") as pipe:
        made += [pipe("a circle", control=(name, PICTURE), **ASKED).latents for name in (file.name, file.stem)]
    assert all((one == made[0]).all() for one in made)


def test_the_encoder_is_found_by_its_sizes(tmp_path: Path, dev: Path) -> None:
    models = tmp_path / "ComfyUI" / "models"
    file, own = write_comfy(models), models / "clip_vision" / "sigclip_vision_patch14_384.safetensors"
    save_file(encoder_file(tiny_siglip(hidden_size=64)), own.with_name("a.safetensors"))
    save_file({k: v.contiguous() for k, v in tiny_image_encoder().state_dict().items()}, own.with_name("b.safetensors"))
    own.with_name("c.safetensors").write_bytes(b"broken")
    with loaded(dev, models_dir=tmp_path / "ComfyUI") as pipe:
        pipe.check("", control=("flux1-redux-dev", PICTURE))
    with loaded(dev, ip_encoder=own) as pipe:
        pipe.check("", control=(file, PICTURE))
    with loaded(dev) as pipe, pytest.raises(ModelError, match="needs its image encoder, SigLIP so400m") as lacks:
        pipe.check("", control=(file, PICTURE))
    assert_line(str(lacks.value), file.name)
    with (
        loaded(dev, ip_encoder=own.with_name("a.safetensors")) as pipe,
        pytest.raises(ModelError, match=r"takes states of 48 numbers.*a\.safetensors has states of 64") as other,
    ):
        pipe.check("", control=(file, PICTURE))
    assert_line(str(other.value), file.name)


def test_files_are_told(tmp_path: Path, folder: Path) -> None:
    torch.save(dict(tiny_redux().state_dict()), tmp_path / "old.bin")
    file = write_comfy(tmp_path / "models")
    said = {
        tmp_path / "old.bin": ("PyTorch, FLUX.1 Redux", "--ip-adapter FILE --ip-image PICTURE"),
        file: ("type: for FLUX.1, with 60 channels in a text", "states of 48 numbers"),
        file.parents[1] / "clip_vision" / "sigclip_vision_patch14_384.safetensors": ("(SigLIP)", "--ip-encoder FILE"),
        folder: ("type: an adapter for Flux.1", "--ip-adapter"),
        folder / "image_embedder": ("image_embedder: 4 tensors", "--ip-adapter"),
        folder / "image_encoder": ("known and not needed: 11 tensors", "--ip-encoder"),
    }
    for path, words in said.items():
        told = cli("info", str(path))
        print(told.out.decode())
        assert told.code == 0 and all(word in told.out.decode() for word in words)
    rows = cli("models", "--models-dir", str(tmp_path)).out.decode()
    assert "--ip-adapter flux1-redux-dev.safetensors" in rows and "--ip-encoder sigclip_vision" in rows
    cli("-m", str(folder), "x").refused(5, "is FLUX.1 Redux, which goes beside a model")


def test_another_model_refuses_it(tmp_path: Path, folder: Path, dev: Path, sd15: Path) -> None:
    for net in (folder, folder / "image_embedder", folder / "flux1-redux-dev.safetensors"):
        with loaded(sd15) as pipe, pytest.raises(ModelError) as error:
            pipe.check("x", control=(net, PICTURE))
        assert_line(str(error.value), net.name)
        assert "is an IP-Adapter for Flux.1; the model is Stable Diffusion" in str(error.value)
    adapter = write_adapter(tmp_path, "sd15")
    with loaded(dev) as pipe, pytest.raises(ModelError, match=r"for Stable Diffusion; the model is Flux\.1"):
        pipe.check("x", control=(adapter, PICTURE))


# In a run


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(0)
def test_a_run_does_what_its_plan_says(folder: Path, dev: Path, backend: str) -> None:
    """Encoder and Redux are computed before the text encoders, and freed; the next image has the tokens already. The
    text is longer by them."""
    asked = ASKED | {"control": [(folder, [PICTURE, OTHER], 0.5)]}
    with loaded(dev, backend) as pipe:
        plan, entered = with_nets(pipe, asked), list[str]()
        planned = [one.name for one in plan.stages]
        lengths = pipe.model.lengths(pipe.check("a circle", **asked), True)
        acquire = Residents.acquire

        def noted(residents: Residents, stage: Stage) -> Any:
            entered.append(stage.name)
            return acquire(residents, stage)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Residents, "acquire", noted)
            first = pipe("a circle", **asked)
            opened, before = pipe.model.residents.opened, [*entered]
            again = pipe("a circle", **asked)
            alone = [one.name for one in with_nets(pipe, asked).stages]
            pipe("a circle", **ASKED | {"control": [(folder, [OTHER, PICTURE[::-1]], 0.7)]})
        print(planned, before, entered[len(before) :])
    before = list(dict.fromkeys(before))  # a plan has both text encoders in one stage
    assert planned == before and planned[:3] == ["pictures", "adapter", "text"] and lengths == [512 + TOKENS]
    assert not any("image" in name or "adapter" in name for name in opened)
    assert "pictures" not in alone and entered.count("pictures") == 2
    assert (first.latents == again.latents).all()


@pytest.mark.sample(0)
def test_without_a_prompt_no_text_encoder_is_read(folder: Path, dev: Path) -> None:
    with loaded(dev) as pipe:
        stages = [one.name for one in with_nets_of(pipe, "", {"control": (folder, PICTURE)}).stages]
        pipe.prepare([""])
        pipe("", control=(folder, PICTURE), **ASKED)
        assert "text" not in stages and not pipe.model.texts.t5._kept
        both = with_nets_of(pipe, "", {"control": (folder, PICTURE), "negative_prompt": "x", "true_cfg": 2.0})
        assert "text" in [one.name for one in both.stages]
        with pytest.raises(UsageError, match="the prompt is empty"):
            pipe.check("")


def with_nets_of(pipe: Any, prompt: str, asked: dict[str, Any]) -> Any:
    from qwenimg.common.pipeline import fit_options

    request = pipe.check(prompt, **ASKED | asked)
    pipe.controls.give(pipe.model, request)
    return fit_options.plan_memory(pipe.model, request)


@pytest.mark.parametrize(
    ("control", "said"),
    [
        ("{a}=p.png:1:0-0.5", "makes text of its picture, for all steps and the whole image: leave out START-END"),
        ("{a}=p.png; {a}=mask@p.png", "leave out START-END and masks"),
        ("{a}=p.png:style=1", "style is no part of a text with pictures; its parts are tokens and pooled"),
        ("{a}=p.png:tokens=0.5,pooled=11", "the scale of a part is a number from 0 to 10"),
        ("{a}=also@p.png", "comes after a picture of the same adapter"),
    ],
)
def test_wrong_uses_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Path, dev: Path, control: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Image.fromarray(PICTURE).save("p.png")
    with loaded(dev) as pipe, pytest.raises(UsageError) as error:
        pipe.check("x", control=control.format(a=folder))
    assert said in str(error.value) and len(str(error.value)) <= 300


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(0)
def test_in_16_bits(folder: Path, dev: Path, backend: str) -> None:
    made = {}
    for precision in ("fp32", "bf16"):
        with closing(qwenimg.load(dev, backend=backend, precision=precision)) as pipe:
            made[precision] = pipe("a circle", control=(folder, PICTURE), **ASKED).latents
    error = relative(made["bf16"], made["fp32"])
    print(f"{backend}: bf16 {error:.1e} from float32")
    assert np.isfinite(made["bf16"]).all() and 0 < error < 0.03


@pytest.mark.sample(0)
def test_with_quantized_weights(tmp_path: Path) -> None:
    """By -q 8 the model is read in 8 bits, the encoder and Redux are not: the tokens are the same."""
    write_tiny_flux(tmp_path / "dev", "dev", wide=True)
    tiny_siglip(hidden_size=64, intermediate_size=96).save_pretrained(tmp_path / "net" / "image_encoder")
    tiny_redux(redux_dim=64, txt_in_features=64).save_pretrained(tmp_path / "net" / "image_embedder")
    asked, made = {"control": (tmp_path / "net", PICTURE)}, {}
    for backend in BACKENDS:
        tokens, weights = [], []
        for bits in (None, "8"):
            with loaded(tmp_path / "dev", backend, quantize=bits) as pipe:
                stages = with_nets_of(pipe, "a circle", asked).stages
                weights.append({one.name: one.weights for one in stages})
                made[backend, bits] = pipe("a circle", **asked, **ASKED).latents
                plain = pipe("a circle", **ASKED).latents
                tokens += pipe.model.pictures._kept.values()
            assert relative(made[backend, bits], plain) > 1e-3, "the picture counts"
        assert (tokens[0] == tokens[1]).all()
        same = {name for name, count in weights[0].items() if weights[1][name] == count}
        print(backend, weights, same)
        assert {"pictures", "adapter"} <= same and "denoise" not in same
        error = relative(made[backend, "8"], made[backend, None])
        print(f"{backend}: latents in 8 bits {error:.1e} from float32")
        assert 1e-5 < error < 0.05
    between = relative(made["mlx", "8"], made["cpu", "8"])
    print(f"latents of both backends in 8 bits: {between:.1e}")
    assert between < 1e-4


# On the command line


@pytest.mark.sample(0)
def test_on_the_command_line(tmp_path: Path, folder: Path, dev: Path) -> None:
    Image.fromarray(PICTURE).save(tmp_path / "photo.png")
    Image.fromarray(OTHER).save(tmp_path / "second.png")
    words = ["-m", str(dev), "--backend", "cpu"]
    drawn = ["--size", "64x48", "--steps", "2", "-s", "3"]
    given = ["--ip-adapter", f"{folder}:tokens=0.7,pooled=0.5", "--ip-image", str(tmp_path / "photo.png")]
    given += ["--ip-image", str(tmp_path / "second.png")]
    first, second = tmp_path / "a.png", tmp_path / "b.png"
    assert cli(*words, *drawn, *given, "-o", str(first)).code == 0  # without a prompt
    recipe = json.loads(Image.open(first).text["qwenimg"])
    assert recipe["control"] == ("FLUX.1-Redux-dev=photo.png:tokens=0.7,pooled=0.5; FLUX.1-Redux-dev=also@second.png:1")
    assert len(recipe["control_fingerprints"]) == len(recipe["control_sha256"]) == 2
    cli("--from", str(first), *words, "-o", str(second)).refused(2, "--control")
    again = cli("--from", str(first), *given, *words, "-o", str(second))
    assert again.code == 0 and "not that of" not in again.err
    assert (np.asarray(Image.open(first)) == np.asarray(Image.open(second))).all()
    lines = tmp_path / "lines.jsonl"
    line = {"prompt": "a circle", "ip_adapter": str(folder), "ip_image": str(tmp_path / "photo.png"), "steps": 1}
    lines.write_text(json.dumps(line) + "\n")
    batch = ["--prompt-file", str(lines), *words, "--size", "64x48"]
    assert cli(*batch, "-o", str(tmp_path / "c.png")).code == 0
    cli(*words, *drawn, "--ip-adapter", str(folder)).refused(2, "no prompt")
    cli(*words, *drawn).refused(2, "no prompt")
