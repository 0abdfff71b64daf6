"""FLUX.1 Kontext and Fill in every way that dev has: which of them a file is, conversion, fewer bits, GGUF, streaming,
the step cache, plans, and the command line."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from support import mutants_flux as faults
from support import passport_runs
from support.cli_runner import cli
from support.crossed import crossed
from support.gguf_files import fitting, write
from support.mflux_folders import save_as_mflux
from support.mutant import Patch, Plant, side
from support.mutants_shared import reference_a_sample
from support.opened_parts import network_of, stream_half
from support.relative import relative
from support.tiny_flux import transformer_file, write_tiny_flux

import qwenimg
from qwenimg import ModelError, Pipeline, UsageError
from qwenimg.common.conversion.convert import convert
from qwenimg.common.families.flux import mflux, references, variants
from qwenimg.common.families.load_options import VARIANTS, LoadOptions
from qwenimg.common.hub.describe import describe
from qwenimg.common.numbers.latent_shape import LatentShape
from qwenimg.common.pipeline import fit_options, start
from qwenimg.common.pipeline.models.inputs import PictureInputs
from qwenimg.common.runtime.residents import Residents

BACKENDS = ("cpu", "mlx")
KINDS = ("kontext", "fill")
RNG = np.random.default_rng(7)
PICTURE = RNG.integers(0, 256, (52, 70, 3), np.uint8)
HOLE = np.zeros((52, 70), np.uint8)
HOLE[5:31, 18:] = 255
ASKED: dict[str, Any] = {"width": 64, "height": 48, "steps": 2, "seed": 5, "image": PICTURE}
GIVEN: dict[str, dict[str, Any]] = {"kontext": ASKED, "fill": ASKED | {"mask": HOLE}}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """References of few pixels: a megapixel takes a tiny model seconds."""
    monkeypatch.setattr(references, "SIZES", ((48, 96), (64, 80), (64, 64), (80, 64), (96, 48)))


def opened(folder: Path, backend: str = "cpu", **more: Any) -> Pipeline:
    return qwenimg.load(folder, backend=backend, **({"precision": "fp32"} | more))


def drawn(kind: str, folder: Path, backend: str = "cpu", *, asked: dict[str, Any] | None = None, **more: Any) -> Any:
    with opened(folder, backend, **more) as pipe:
        return pipe("a ring", **GIVEN[kind], **(asked or {})).latents


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny folders whose rows are whole blocks of codes."""
    place = tmp_path_factory.mktemp("flux")
    for kind in (*KINDS, "dev"):
        write_tiny_flux(place / kind, kind, wide=True)
    return {kind: place / kind for kind in (*KINDS, "dev")}


def quick(kind: str) -> list[Any]:
    """Both kinds, the other one as a slow test."""
    return [kind, *(pytest.param(one, marks=pytest.mark.slow) for one in KINDS if one != kind)]


def authors(folder: Path, out: Path) -> Path:
    """The transformer of a folder in one file, in its authors' names."""
    from diffusers import FluxTransformer2DModel

    save_file(transformer_file(FluxTransformer2DModel.from_pretrained(folder / "transformer")), out)
    return out


# Which model a file is


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("flux1-kontext-dev.safetensors", variants.KONTEXT),
        ("flux1-dev-kontext_fp8_scaled.safetensors", variants.KONTEXT),
        ("FLUX.1-Kontext-dev", variants.KONTEXT),
        ("flux1-dev.safetensors", None),
        ("flux1-fill-dev.safetensors", None),  # its channels say it
    ],
)
def test_names(name: str, expected: variants.FluxVariant | None) -> None:
    assert variants.of_name(name) is expected


@pytest.mark.sample(0)
def test_a_file_is_what_its_channels_its_name_or_the_user_says(wide: dict[str, Path], tmp_path: Path) -> None:
    """In whatever folder: the file of Kontext has the tensors of dev's."""
    names = {"kontext": "flux1-kontext-dev.safetensors", "fill": "any.safetensors"}
    files = {kind: authors(wide[kind], tmp_path / name) for kind, name in names.items()}
    unnamed = Path(shutil.copy(files["kontext"], tmp_path / "unnamed.safetensors"))
    for kind, file in files.items():
        assert np.array_equal(drawn(kind, wide["dev"], transformer=file), drawn(kind, wide[kind])), kind
    said = opened(wide["dev"], transformer=unnamed, variant="kontext")
    result = said("a ring", **ASKED)
    assert np.array_equal(result.latents, drawn("kontext", wide["kontext"])) and result.recipe["variant"] == "kontext"
    ways: tuple[tuple[str, str, dict[str, Any]], ...] = (
        ("dev", "text", {"transformer": unnamed}),
        ("kontext", "kontext", {"transformer": unnamed}),
        ("fill", "text", {"transformer": unnamed}),  # a folder of Fill with the transformer of another
        ("kontext", "text", {"variant": "text"}),
        ("dev", "kontext", {"variant": "kontext"}),
    )
    for folder, kind, more in ways:
        with opened(wide[folder], **more) as pipe:
            assert pipe.checkpoint is not None and pipe.checkpoint.variant == kind, (folder, more)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("flux1-schnell-Q4_0.gguf", True),
        ("FLUX.1-schnell", True),
        ("flux1-dev-schnell-merged.safetensors", True),
        ("flux1-dev-dedistilled-fp8.safetensors", False),
        ("nyanko7/flux-dev-de-distill/consolidated_s6700.safetensors", False),
        ("flux-schnell-undistilled", False),
        ("ostris/OpenFLUX.1", False),
        ("fluxDev_v2.safetensors", False),
        ("model.safetensors", None),
        ("devoted.safetensors", None),
    ],
)
def test_names_of_schnell(name: str, expected: bool | None) -> None:
    assert variants.is_schnell(name) is expected


@pytest.mark.sample(0)
def test_schnell_is_what_its_scheduler_its_name_or_the_user_says(tmp_path: Path) -> None:
    """A de-distilled dev has no embedding of its guidance either; it takes 512 tokens of T5, and dev's noise levels."""
    for kind in ("schnell", "undistilled"):
        write_tiny_flux(tmp_path / kind, kind, wide=True)
    made = authors(tmp_path / "undistilled", tmp_path / "a.safetensors")
    named = Path(shutil.copy(made, tmp_path / "flux1-dev-de-distilled.safetensors"))
    as_mflux = save_as_mflux(tmp_path / "undistilled", tmp_path / "my-flux", "flux", None)
    dev_mflux = save_as_mflux(tmp_path / "undistilled", tmp_path / "flux-dev-de-distill", "flux", None)
    values = {key: value.numpy() for key, value in load_file(made).items()}
    write(tmp_path / "flux1-schnell.gguf", {key: (value, "F32") for key, value in values.items()}, "flux")
    ways: tuple[tuple[Path, dict[str, Any], bool], ...] = (
        (tmp_path / "schnell", {}, True),
        (tmp_path / "undistilled", {}, False),
        (tmp_path / "undistilled", {"variant": "schnell"}, True),
        (tmp_path / "undistilled", {"transformer": made}, False),
        (tmp_path / "undistilled", {"transformer": tmp_path / "flux1-schnell.gguf"}, True),
        (tmp_path / "schnell", {"transformer": made}, True),
        (tmp_path / "schnell", {"transformer": named}, False),
        (tmp_path / "schnell", {"transformer": made, "variant": "dev"}, False),
        (as_mflux, {}, True),
        (as_mflux, {"variant": "dev"}, False),
        (dev_mflux, {}, False),
    )
    for place, more, distilled in ways:
        with opened(place, **more) as pipe:
            assert pipe.checkpoint is not None and pipe.checkpoint.distilled is distilled, (place, more)
            assert pipe.model.texts.t5.length == (256 if distilled else 512)  # type: ignore[attr-defined]
            assert pipe.defaults.steps == (4 if distilled else 28)
            if not (place / "scheduler").exists():
                assert pipe.checkpoint.scheduler.use_dynamic_shifting is not distilled
    for place, words in ((tmp_path / "undistilled", "Flux.1 dev"), (tmp_path / "schnell", "Flux.1 schnell")):
        assert words in describe(place).lines[1]
    write_tiny_flux(tmp_path / "dev", "dev", wide=True)
    with pytest.raises(UsageError, match=r"--variant schnell: the transformer is guidance-distilled, so it is FLUX\.1"):
        opened(tmp_path / "dev", variant="schnell")


def test_a_variant_is_for_these_models(wide: dict[str, Path], tiny_folder: Path) -> None:
    assert set(variants.ASKED) < set(VARIANTS)
    with pytest.raises(UsageError, match=r"--variant kontext is no Qwen-Image; choose one of text, edit, 2509, 2511"):
        opened(tiny_folder, variant="kontext")
    with pytest.raises(UsageError, match=r"--variant 2511 is no FLUX\.1; choose one of text, kontext, dev, schnell"):
        opened(wide["dev"], variant="2511")
    with pytest.raises(UsageError, match=r"--variant kontext: the transformer has the mask as an input, so .*Fill"):
        opened(wide["fill"], variant="kontext")


def test_a_folder_whose_parts_do_not_go_together(wide: dict[str, Path], tmp_path: Path) -> None:
    mixed = shutil.copytree(wide["dev"], tmp_path / "mixed")
    index = json.loads((mixed / "model_index.json").read_text())
    (mixed / "model_index.json").write_text(json.dumps(index | {"_class_name": "FluxFillPipeline"}))
    with pytest.raises(ModelError, match="is of class FluxFillPipeline, but its transformer does not take a mask"):
        opened(mixed)


@pytest.mark.parametrize("channels", [192, 320, 385])
def test_transformers_of_other_channels_are_refused(wide: dict[str, Path], tmp_path: Path, channels: int) -> None:
    file = authors(wide["fill"], tmp_path / "a.safetensors")
    values = load_file(file)
    values["img_in.weight"] = torch.ones(len(values["img_in.weight"]), channels)
    save_file(values, file)
    told = rf"takes {channels} channels, .* or with FLUX\.1 Fill's mask, have 64 or 128 or 384"
    with pytest.raises(ModelError, match=told) as caught:
        opened(wide["fill"], transformer=file)
    assert "\n" not in str(caught.value)


def test_info(wide: dict[str, Path], tmp_path: Path) -> None:
    for kind, words in (("kontext", "Flux.1 Kontext, edits a picture"), ("fill", "Flux.1 Fill, draws the masked part")):
        about = describe(wide[kind])
        assert not about.faults and words in about.lines[1]
    sizes = {"attention_head_dim": 128, "num_attention_heads": 1, "axes_dims_rope": [16, 56, 56]}
    from support.tiny_flux import FILL, tiny_dit

    one = {"num_layers": 1, "num_single_layers": 1}
    save_file(transformer_file(tiny_dit(**sizes, **one, **FILL)), tmp_path / "a.safetensors")
    save_file(transformer_file(tiny_dit(**sizes, **one)), tmp_path / "my-kontext.safetensors")
    for name, words in (("a", "type: Fill: it has a mask as an input"), ("my-kontext", "type: Kontext, by its name")):
        about = describe(tmp_path / f"{name}.safetensors")
        assert about.lines[1].startswith(words) and not about.faults


# Each way to draw


@pytest.mark.parametrize("kind", quick("kontext"))
@pytest.mark.sample(0)
def test_streamed_is_the_same(wide: dict[str, Path], kind: str) -> None:
    for backend in BACKENDS:
        expected = drawn(kind, wide[kind], backend)
        with opened(wide[kind], backend) as pipe:
            stream_half(pipe)
            assert np.array_equal(pipe("a ring", **GIVEN[kind]).latents, expected), backend
            assert len(network_of(pipe, "transformer").streamed.blocks) >= 3


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "backend"), crossed(KINDS, BACKENDS))
def test_16_bits(wide: dict[str, Path], kind: str, backend: str) -> None:
    exact = drawn(kind, wide[kind], backend)
    for precision in ("bf16", "fp16"):
        error = relative(drawn(kind, wide[kind], backend, precision=precision), exact)
        print(f"{backend} {precision}: {error:.1e}")
        assert 0 < error < 0.15


@pytest.mark.parametrize("kind", quick("kontext"))
@pytest.mark.sample(0)
def test_step_cache(wide: dict[str, Path], kind: str) -> None:
    """Both backends reuse a call of a run with references or with a mask, which changes something; not one that is
    never reused."""
    changes = []
    for backend in BACKENDS:
        plain, none, some = (
            drawn(kind, wide[kind], backend, asked=asked) for asked in ({}, {"step_cache": 1e-9}, {"cached_calls": "2"})
        )
        assert relative(none, plain) < 1e-6 < relative(some, plain)
        changes.append(some)
    assert relative(changes[1], changes[0]) < 1e-5


@pytest.mark.parametrize("kind", quick("fill"))
@pytest.mark.sample(0)
def test_fewer_bits_and_converted(wide: dict[str, Path], tmp_path: Path, kind: str) -> None:
    """Quantized while loading, and converted, is the same; so is a file that the user says the kind of."""
    plain, coded = drawn(kind, wide[kind]), drawn(kind, wide[kind], quantize="8")
    assert 0 < relative(coded, plain) < 0.1
    convert(wide[kind], tmp_path / "8", LoadOptions(quantize="8"), Mock())
    assert np.array_equal(drawn(kind, tmp_path / "8"), coded)
    choices = LoadOptions(
        variant="kontext" if kind == "kontext" else None, parts={"transformer": wide[kind] / "transformer"}
    )
    convert(wide["dev"], tmp_path / "said", choices, Mock())
    assert np.array_equal(drawn(kind, tmp_path / "said"), plain)
    index = json.loads((tmp_path / "said" / "model_index.json").read_text())
    assert index["_class_name"] == {"kontext": "FluxKontextPipeline", "fill": "FluxFillPipeline"}[kind]


@pytest.mark.parametrize("kind", quick("fill"))
@pytest.mark.sample(0)
def test_gguf(wide: dict[str, Path], tmp_path: Path, kind: str) -> None:
    values = {key: value.numpy() for key, value in load_file(authors(wide[kind], tmp_path / "a.safetensors")).items()}
    file = tmp_path / f"flux1-{kind}-dev-Q8_0.gguf"
    write(file, {key: (value, fitting(value, "Q8_0")) for key, value in values.items()}, "flux")
    error = relative(drawn(kind, wide["dev"], transformer=file), drawn(kind, wide[kind]))
    print(f"{kind}: {error:.1e}")
    assert 0 < error < 0.05


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_of_mflux(wide: dict[str, Path], tmp_path: Path, kind: str) -> None:
    """Its channels say Fill, quantized or not; the name of the folder says Kontext."""
    for bits in (None, 8):
        place = save_as_mflux(wide[kind], tmp_path / f"my-{kind}-{bits}", "flux", bits)
        error = relative(drawn(kind, place), drawn(kind, wide[kind]))
        print(f"{kind} {bits}: {error:.1e}")
        assert error < 1e-6 if bits is None else 0 < error < 0.1  # kernels with channels last round in another order
        channels = 384 if kind == "fill" else 64
        assert mflux.sizes(place) == {"guidance_embeds": True, "in_channels": channels, "out_channels": 64}
    with opened(tmp_path / f"my-{kind}-8") as pipe:
        assert pipe.checkpoint is not None and pipe.checkpoint.variant == kind


@pytest.mark.slow
def test_loras_and_few_steps(wide: dict[str, Path], tmp_path: Path) -> None:
    """A LoRA of dev changes both; the few-step LoRAs were made for dev."""
    torch.manual_seed(1)
    path = "transformer.transformer_blocks.1.attn.to_q"
    pair = {f"{path}.lora_A.weight": torch.randn(4, 96), f"{path}.lora_B.weight": torch.randn(96, 4)}
    save_file(pair, tmp_path / "a.safetensors")
    for kind in KINDS:
        moved = drawn(kind, wide[kind], asked={"lora": str(tmp_path / "a.safetensors")})
        assert relative(moved, drawn(kind, wide[kind])) > 1e-3
        with opened(wide[kind]) as pipe, pytest.raises(UsageError, match="few"):
            pipe.check("x", few_steps="turbo")


# Plans


@pytest.mark.parametrize(
    ("kind", "more", "stages"),
    [
        ("kontext", {}, ["encode", "text", "text", "modulation", "denoise", "decode"]),
        ("kontext", {"mask": HOLE, "strength": 0.9},
         ["encode", "encode", "text", "text", "modulation", "denoise", "decode"]),
        ("fill", {}, ["encode", "text", "text", "modulation", "denoise", "decode"]),
        ("fill", {"image": None, "mask": None}, ["encode", "text", "text", "modulation", "denoise", "decode"]),
        ("fill", {"mask": None, "strength": 0.6},
         ["encode", "encode", "text", "text", "modulation", "denoise", "decode"]),
    ],
)  # fmt: skip
@pytest.mark.sample(1)
def test_plan_is_run(wide: dict[str, Path], kind: str, more: dict[str, Any], stages: list[str]) -> None:
    pipe, entered = opened(wide[kind]), list[str]()
    asked = GIVEN[kind] | more
    request = pipe.check("a ring", **asked)
    planned = [stage.name for stage in pipe.model.stages(request, pipe.model.plan(request), LatentShape(1, 6, 8))]
    enter = Residents.acquire
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Residents, "acquire", lambda self, stage: (entered.append(stage.name), enter(self, stage))[1])
        pipe("a ring", **asked)
    assert planned == entered == stages


def test_a_reference_costs_tokens(wide: dict[str, Path]) -> None:
    pipe = opened(wide["kontext"])
    without, with_one = (
        next(
            one
            for one in fit_options.plan_memory(pipe.model, pipe.check("a ring", **asked)).stages
            if one.name == "denoise"
        )
        for asked in (ASKED | {"image": None}, ASKED)
    )
    assert without.peak < with_one.peak


# Faults


def no_reference(patch: Patch) -> None:
    patch.set(PictureInputs, "seen", lambda self, request: [])


def no_numbers_drawn_for_the_picture(patch: Patch) -> None:
    """The noise is the seed's first draw."""
    draw = start.initial_state

    def drew(model: Any, request: Any, generator: Any) -> Any:
        normal, generator.normal = generator.normal, lambda shape: np.zeros(shape, np.float32)
        try:
            made = draw(model, request, generator)
        finally:
            generator.normal = normal
        return replace(made, noise=generator.normal(made.noise.shape))

    patch.set(start, "initial_state", drew)


FAULTS: dict[str, tuple[Plant, ...]] = {
    "kontext": (faults.reference_in_the_frame_of_the_image, no_reference, reference_a_sample),
    "fill": (
        faults.mask_before_the_picture,
        faults.mask_of_whole_latents,
        faults.mask_columns_first,
        no_numbers_drawn_for_the_picture,
    ),
}


@pytest.mark.parametrize(
    ("kind", "fault"), [pytest.param(kind, one, id=one.__name__) for kind, some in FAULTS.items() for one in some]
)
@pytest.mark.sample(0)
def test_faults_are_seen(wide: dict[str, Path], kind: str, fault: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each moves the latents by a hundred times what diffusers' may differ."""
    right = drawn(kind, wide[kind])
    fault(Patch(monkeypatch, side("cpu")))
    error = relative(drawn(kind, wide[kind]), right)
    print(f"{fault.__name__}: {error:.1e}")
    assert error > 1e-3


# Passports


@pytest.mark.parametrize("hole", ["all by default", "a part", "all", "nothing"])
@pytest.mark.parametrize("source", BACKENDS)
@pytest.mark.sample(0, rest=3)
def test_a_passport_of_fill(wide: dict[str, Path], tmp_path: Path, source: str, hole: str) -> None:
    """It passes on both backends. Where all is hole, the encoder sees one grey, so that some groups of channels are
    nearly flat."""
    mask, passport = tmp_path / "mask.png", tmp_path / "fill.safetensors"
    values = {"a part": HOLE, "all": np.full_like(HOLE, 255), "nothing": np.zeros_like(HOLE)}
    more: tuple[str, ...] = ()
    if hole in values:
        Image.fromarray(values[hole]).save(mask)
        more = ("--mask", str(mask))
    passport_runs.record(wide["fill"], passport, source, "--size", "64x48", *more)
    for backend in BACKENDS:
        passport_runs.check(wide["fill"], passport, backend)


# The command line


@pytest.mark.sample(0)
def test_the_command(wide: dict[str, Path], tmp_path: Path) -> None:
    picture, mask, out = (tmp_path / f"{name}.png" for name in ("picture", "mask", "out"))
    Image.fromarray(PICTURE).save(picture)
    Image.fromarray(HOLE).save(mask)
    short = ("--size", "48x48", "--steps", "1", "--seed", "3", "--backend", "cpu", "--overwrite", "-o", str(out))
    ran = cli("a hat", "-m", str(wide["kontext"]), "-i", str(picture), *short)
    assert ran.code == 0 and "the picture is seen at 80x64, whatever the size of the result" in ran.err
    with_two = cli("a hat", "-m", str(wide["kontext"]), "-i", str(picture), "-i", str(picture), *short)
    with_two.refused(2, "takes one")
    ran = cli("a hat", "-m", str(wide["fill"]), "-i", str(picture), "--mask", str(mask), *short)
    assert ran.code == 0, ran.err
    assert cli("plan", str(wide["fill"]), "--backend", "cpu", "-i", str(picture), "--mask", str(mask)).code == 0
