"""SANA's parts from other files: of its authors, in 8 bits and in GGUF, and its converted folders."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.cli_runner import cli
from support.drawn_files import check_eight_bits, check_gguf, check_quantized, saved
from support.tiny_sana import KINDS, WIDE, tiny_dit, tiny_vae, transformer_file, vae_file, write_tiny_sana

import qwenimg
from qwenimg.common.families import catalog, registry
from qwenimg.common.hub.describe import describe
from qwenimg.common.networks.denoisers import sana_dit
from qwenimg.common.networks.denoisers.sana_names import LAYOUTS, _config, place
from qwenimg.common.networks.layout import StoredShapes
from qwenimg.common.networks.vaes import dc_vae
from qwenimg.common.parts.components import read_config
from qwenimg.common.weights.storage import Packed

BACKENDS = ("cpu", "mlx")
ASKED: dict[str, Any] = {"width": 96, "height": 64, "steps": 2, "seed": 4, "guidance": 2.0}
Tensors = dict[str, torch.Tensor]


def folders(place: Path) -> dict[str, Path]:
    made = {kind: place / kind for kind in ("sana", "sana-sprint")}
    for kind, folder in made.items():
        write_tiny_sana(folder, kind, "5GB", WIDE)
    return made


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return folders(tmp_path_factory.mktemp("sana"))


@pytest.fixture(scope="module")
def bare(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folders without the weights of transformer and VAE."""
    place, left = tmp_path_factory.mktemp("bare"), shutil.ignore_patterns("diffusion_pytorch_model*")
    return {kind: shutil.copytree(folder, place / kind, ignore=left) for kind, folder in models.items()}


@pytest.fixture(scope="module")
def drawn(models: dict[str, Path]) -> dict[tuple[str, str], Any]:
    return {
        (kind, backend): qwenimg.load(folder, backend, "fp32")("a red circle", **ASKED)
        for kind, folder in models.items()
        for backend in BACKENDS
    }


def dit(kind: str = "sana") -> Any:
    return tiny_dit(**{**KINDS[kind], **WIDE})


@pytest.mark.parametrize("names", ["authors", "diffusers"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["sana", "sana-sprint"])
@pytest.mark.sample(2)
def test_files_draw_what_the_folder_draws(
    bare: dict[str, Path], drawn: dict[tuple[str, str], Any], tmp_path: Path, kind: str, names: str, backend: str
) -> None:
    own = {"transformer": transformer_file(dit(kind)), "vae": vae_file(tiny_vae())}
    if names == "diffusers":
        own = {"transformer": dict(dit(kind).state_dict()), "vae": dict(tiny_vae().state_dict())}
    given = {part: saved(tmp_path / f"{part}.safetensors", tensors) for part, tensors in own.items()}
    made = qwenimg.load(bare[kind], backend, "fp32", **given)("a red circle", **ASKED)  # type: ignore[arg-type]
    expected = drawn[kind, backend]
    assert np.array_equal(made.latents, expected.latents) and np.array_equal(made.pixels, expected.pixels)
    assert made.pixels.std() > 10 and made.recipe["transformer"] == given["transformer"].name


def test_info(tmp_path: Path) -> None:
    for kind, title in (("sana", "SANA 1.5"), ("sana-sprint", "SANA-Sprint"), ("sana-1.0", "SANA 1.0")):
        for names, tensors in (
            ("its authors' names", transformer_file(dit(kind))),
            ("diffusers'", tiny_dit(**{**KINDS[kind], **WIDE, "caption_channels": 2304}).state_dict()),
        ):
            lines = describe(saved(tmp_path / "a.safetensors", tensors)).lines
            print(*lines, sep="\n")
            assert f"SANA's transformer, {names}" in lines[0] and any(title in line for line in lines)
    for tensors in (vae_file(tiny_vae()), tiny_vae().state_dict()):
        lines = describe(saved(tmp_path / "v.safetensors", tensors)).lines
        assert "SANA's VAE" in lines[0]  # of other sizes than the published one's, which no file shows


@pytest.mark.parametrize("layout", ["older", "newer", "int8_convrot"])
@pytest.mark.sample(1)
def test_eight_bits_draw_what_their_values_draw(models: dict[str, Path], tmp_path: Path, layout: str) -> None:
    """As ComfyUI writes them; 1x1 kernels are coded as kernels, q, k and v as rows of one tensor."""
    check_eight_bits(
        tmp_path,
        transformer_file(dit()),
        layout,
        lambda name: ".attn." in name or "_attn." in name or "ed_conv" in name,
        lambda file: qwenimg.load(models["sana"], "cpu", "fp32", transformer=file)("a ring", **ASKED),
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("type", ["F32", "Q8_0"])
def test_gguf(
    models: dict[str, Path], drawn: dict[tuple[str, str], Any], tmp_path: Path, type: str, backend: str
) -> None:
    def draw(file: Path) -> Any:
        return qwenimg.load(models["sana"], backend, "fp32", transformer=file)("a red circle", **ASKED)

    check_gguf(tmp_path / "a.gguf", transformer_file(dit()), "sana", type, draw, drawn["sana", backend], "sana")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(0)
def test_in_8_bits(models: dict[str, Path], drawn: dict[tuple[str, str], Any], tmp_path: Path, backend: str) -> None:
    """The feed-forward's kernels are quantized too, and those over the image are not."""

    def draw(folder: Path, **options: Any) -> Any:
        pipe = qwenimg.load(folder, backend, "fp32", **options)
        entries = pipe.model.checkpoint["transformer"].plan.entries
        codes = {name for name, entry in entries.items() if isinstance(entry.storage, Packed)}
        assert any("conv_inverted" in name for name in codes) and not any("conv_depth" in name for name in codes)
        return pipe("a red circle", **ASKED)

    check_quantized(models["sana"], tmp_path / "q", draw, drawn["sana", backend], "transformer=8")


@pytest.mark.parametrize("kind", ["sana", "sana-sprint"])
def test_a_converted_model_draws_the_same(
    bare: dict[str, Path], drawn: dict[tuple[str, str], Any], tmp_path: Path, kind: str
) -> None:
    """In diffusers' folders, which diffusers reads."""
    from diffusers import AutoencoderDC, SanaTransformer2DModel

    own = {"transformer": transformer_file(dit(kind)), "vae": vae_file(tiny_vae())}
    given = [
        word for part, one in own.items() for word in (f"--{part}", str(saved(tmp_path / f"{part}.safetensors", one)))
    ]
    assert cli("convert", str(bare[kind]), str(tmp_path / "o"), *given, "--quiet").code == 0
    made = qwenimg.load(tmp_path / "o", "cpu", "fp32")("a red circle", **ASKED)
    assert np.array_equal(made.latents, drawn[kind, "cpu"].latents)
    for cls, part, one in ((SanaTransformer2DModel, "transformer", dit(kind)), (AutoencoderDC, "vae", tiny_vae())):
        again, state = cls.from_pretrained(tmp_path / "o" / part).state_dict(), one.state_dict()
        assert again.keys() == state.keys() and all(torch.equal(value, state[key]) for key, value in again.items())


def test_configurations_are_written_as_they_are_read(tmp_path: Path) -> None:
    """Those of the published models, for a file without one; diffusers makes its classes of them."""
    from diffusers import AutoencoderDC, SanaTransformer2DModel

    for name in ("sana-1.5", "sana-4k", "sana-sprint-0.6b"):
        model = registry.published(catalog.KNOWN[name])
        assert model is not None
        for part, network, cls in (
            ("transformer", sana_dit.NETWORK, SanaTransformer2DModel),
            ("vae", dc_vae.NETWORK, AutoencoderDC),
        ):
            component, folder = model.checkpoint[part], tmp_path / name / part
            folder.mkdir(parents=True)
            (folder / "config.json").write_text(json.dumps(network.written(component.config)))
            assert read_config(network, folder) == component.config
            with torch.device("meta"):
                theirs = cls.from_config(cls.load_config(folder))
            shapes = {network.rename(key): tuple(value.shape) for key, value in theirs.state_dict().items()}
            assert shapes == network.manifest(component.config)


def test_files_of_published_sizes(tmp_path: Path) -> None:
    """Heads, layers and positions follow from the shapes."""
    for name in ("sana-1.5", "sana-1.5-4.8b", "sana-1.6b", "sana-0.6b", "sana-4k", "sana-sprint", "sana-sprint-0.6b"):
        model = registry.published(catalog.KNOWN[name])
        assert model is not None
        config = model.checkpoint["transformer"].config
        shapes: dict[str, tuple[int, ...]] = {}
        for key, shape in sana_dit.manifest(config).items():
            there = place(key, config)
            shapes[there.key] = (shape[0] * there.rows.of, *shape[1:])
        shapes["pos_embed"] = (1, config.sample_size**2, config.dim)
        stored = StoredShapes(tmp_path, shapes, lambda key, config=config: place(key, config).key)
        assert LAYOUTS.find(shapes) is not None
        assert _config(stored, sana_dit.SanaConfig(qk_norm=config.qk_norm)) == config, name


@pytest.mark.parametrize("backend", BACKENDS)
def test_4096_pixels_are_decoded_in_bands(backend: str) -> None:
    """As a whole an image would have more values than an index of 32 bits counts."""
    ran = cli("plan", "sana-4k", "--backend", backend, "--memory", "200GB")
    lines = ran.out.decode().splitlines()
    [decoding] = [line for line in lines if line.startswith("decode ")]
    print(decoding)
    assert "4096x4096" in lines[0] and decoding.endswith("in bands of 64 rows")
