"""Parts of a model from other files, in the names of several programs: --transformer, --text-encoder and --vae."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from support.cli_runner import cli
from support.comfy_files import LAYOUTS, ROTATED, comfy
from support.crossed import crossed
from support.folder_tensors import tensors
from support.recipe_cases import recipe_from_png
from support.sparse_files import sparse
from support.tiny_ldm import behind
from support.tiny_model import VAE, tiny_vae

import qwenimg
from qwenimg.cli import config
from qwenimg.common.base.errors import ModelError
from qwenimg.common.families import registry
from qwenimg.common.families.load_options import LoadOptions
from qwenimg.common.hub.describe import describe
from qwenimg.common.networks.denoisers import qwen_dit
from qwenimg.common.networks.denoisers.qwen_dit import QwenDiTConfig
from qwenimg.common.networks.vaes import qwen_vae, qwen_vae_names
from qwenimg.common.networks.vaes.qwen_vae import QwenVAEConfig
from qwenimg.common.parts.components import renaming

BACKENDS = ("cpu", "mlx")
PARTS = ("transformer", "text_encoder", "vae")
ASKED = {"width": 48, "height": 32, "steps": 2, "seed": 4}


def wan_names(config: QwenVAEConfig) -> dict[str, str]:
    """{the manifest's name: Wan's}, of the rule under test turned around."""
    manifest = qwen_vae.manifest(config)
    layers = config.num_res_blocks + 1
    return {name: qwen_vae_names._wan(name, layers) for name in manifest}


@pytest.fixture(scope="session")
def files(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The parts of the tiny model, each in one file as ComfyUI has it, and `model`: its folder without any weights."""
    place = tmp_path_factory.mktemp("parts")
    parts = {part: tensors(tiny_folder / part) for part in PARTS}
    wan = wan_names(QwenVAEConfig(**VAE))
    text = {
        name.replace("model.language_model.", "model.").replace("model.visual.", "visual."): value
        for name, value in parts["text_encoder"].items()
    }
    assert "model.layers.0.self_attn.k_proj.bias" in text and any(name.startswith("visual.") for name in text)
    save_file(behind("model.diffusion_model.", parts["transformer"]), place / "dit.safetensors")
    save_file(text, place / "qwen.safetensors")
    save_file({wan[name]: value for name, value in parts["vae"].items()}, place / "wan.safetensors")
    skip = shutil.ignore_patterns("*.safetensors", "*.index.json")
    shutil.copytree(tiny_folder, place / "bare", ignore=skip)
    names = dict(zip(PARTS, ("dit.safetensors", "qwen.safetensors", "wan.safetensors"), strict=True))
    return {"model": place / "bare"} | {part: place / name for part, name in names.items()}


def test_wan_names_are_those_that_diffusers_reads() -> None:
    """Every tensor of a VAE of the published depth, through diffusers' own converter and back."""
    from diffusers.loaders.single_file_utils import convert_wan_vae_to_diffusers

    model = tiny_vae(num_res_blocks=2).state_dict()
    names = wan_names(QwenVAEConfig(**(VAE | {"num_res_blocks": 2})))
    assert names.keys() == model.keys() and len(set(names.values())) == len(names) == 194
    back = convert_wan_vae_to_diffusers({names[name]: value for name, value in model.items()})
    assert back.keys() == model.keys() and all(torch.equal(back[name], model[name]) for name in model)


@pytest.mark.parametrize("prefix", ["", "vae.", "first_stage_model."])
def test_every_name_of_a_vae_is_found(prefix: str) -> None:
    manifest = qwen_vae.manifest(QwenVAEConfig())
    rename = renaming(qwen_vae.NETWORK, QwenVAEConfig())
    assert all(rename(prefix + name) == name for name in manifest)
    assert all(rename(prefix + wan) == name for name, wan in wan_names(QwenVAEConfig()).items())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(1)
def test_files_in_other_names_draw_what_the_folder_draws(
    tiny_folder: Path, files: dict[str, Path], backend: str
) -> None:
    """The folder of -m has no weights at all, so that none of its own can be meant."""
    whole = qwenimg.load(tiny_folder, backend, "fp32")("a red circle", **ASKED)
    given = {part: files[part] for part in PARTS}
    made = qwenimg.load(files["model"], backend, "fp32", **given)("a red circle", **ASKED)
    assert np.array_equal(made.latents, whole.latents) and np.array_equal(made.pixels, whole.pixels)
    assert made.pixels.std() > 10
    assert [made.recipe[part] for part in PARTS] == ["dit.safetensors", "qwen.safetensors", "wan.safetensors"]
    assert made.recipe["fingerprints"].keys() == set(PARTS)  # the model's would be that of its transformer
    assert str(files["vae"].parent).encode() not in made.png()


CODED = [*(("transformer", layout) for layout in LAYOUTS), ("text_encoder", "older")]


@pytest.mark.parametrize(("case", "backend"), crossed(CODED, BACKENDS))
@pytest.mark.sample(1)
def test_eight_bits_draw_what_their_values_draw(
    files: dict[str, Path], case: tuple[str, str], backend: str, tmp_path: Path
) -> None:
    """The same bits as from a file of the values in float32; a rotated input is summed in another order."""
    part, layout = case
    made = comfy(load_file(files[part]), layout, lambda name: ".norm" not in name)
    codes = sum(value.element_size() == 1 for value in made.tensors.values())
    assert codes > (0 if layout in ROTATED else 20)  # groups divide few of the tiny widths
    save_file(made.tensors, tmp_path / "codes.safetensors", made.notes)
    save_file(made.values, tmp_path / "values.safetensors")
    pictures = []
    for name in ("codes.safetensors", "values.safetensors"):
        given = {other: files[other] for other in PARTS} | {part: tmp_path / name}
        pictures.append(qwenimg.load(files["model"], backend, "fp32", **given)("a red circle", **ASKED))
    print(f"{backend} {layout}: {codes} tensors of 8 bits, deviation {pictures[0].pixels.std():.0f}")
    ours, expected = (picture.latents for picture in pictures)
    error = np.linalg.norm(ours - expected) / np.linalg.norm(expected)
    print(f"relative error {error:.1e}")
    assert error <= (1e-5 if layout in ROTATED else 0)
    assert pictures[0].pixels.std() > 10


def test_a_folder_in_a_parts_place_has_its_own_configuration(tiny_folder: Path, files: dict[str, Path]) -> None:
    given = {part: tiny_folder / part for part in PARTS}
    opened = registry.open_model(files["model"], LoadOptions(parts=given))
    assert all(opened.checkpoint[part].plan.files[0].path.parent == tiny_folder / part for part in PARTS)
    opened.checkpoint.close()


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("fault", ["missing", "unknown", "shape", "twice", "another part", "absent", "cut"])
def test_a_file_that_is_not_that_part_is_refused(
    files: dict[str, Path], tiny_folder: Path, part: str, fault: str, tmp_path: Path
) -> None:
    weights, path = load_file(files[part]), tmp_path / "given.safetensors"
    name = next(iter(sorted(name for name in weights if not name.startswith(("visual.", "lm_head.")))))
    words = {
        "missing": "lacks tensor",
        "unknown": "unknown tensor 'strange'",
        "shape": "has shape" if part == "vae" else "dimensions in tensor",
    }
    if fault == "missing":
        del weights[name]
    elif fault == "unknown":
        weights["strange"] = torch.zeros(2)
    elif fault == "shape":
        weights[name] = torch.zeros(*weights[name].shape, 3)
    elif fault == "twice":  # under two names that mean one tensor
        plain = {"transformer": "model.diffusion_model.", "text_encoder": "model.", "vae": ""}[part]
        again = {"transformer": "", "text_encoder": "model.language_model.", "vae": "vae."}[part]
        weights[again + name.removeprefix(plain)] = weights[name].clone()
        words["twice"] = "are the same"
    elif fault == "another part":
        weights = load_file(files[PARTS[PARTS.index(part) - 1]])
        words["another part"] = "lacks tensor" if part == "vae" else f"holds no {part} of Qwen"
    save_file(weights, path)
    if fault == "absent":
        path.unlink()
    elif fault == "cut":
        path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ModelError) as caught:
        registry.open_model(tiny_folder, LoadOptions(parts={part: path}))
    said = str(caught.value)
    print(said)
    assert words.get(fault, "") in said and "given.safetensors" in said and said.isprintable() and len(said) < 300


def test_a_part_of_another_kind_of_model(folders: dict[str, Path], tiny_folder: Path, files: dict[str, Path]) -> None:
    with pytest.raises(ModelError, match="holds no CLIP text encoder"):
        registry.open_model(folders["sd15"], LoadOptions(parts={"text_encoder": files["text_encoder"]}))
    with pytest.raises(ModelError, match=r"dit\.safetensors"):
        registry.open_model(folders["sd15"], LoadOptions(parts={"transformer": files["transformer"]}))
    with pytest.raises(ModelError):
        registry.open_model(folders["sd15"], LoadOptions(parts={"transformer": folders["sdxl"] / "unet"}))


@pytest.mark.parametrize(
    ("part", "words"), [("transformer", "transformer"), ("text_encoder", "text encoder"), ("vae", "Wan's names")]
)
def test_info_says_what_a_file_is_for(files: dict[str, Path], part: str, words: str) -> None:
    said = describe(files[part]).lines
    print("\n".join(said))
    assert words in said[0]


@pytest.mark.sample(0)
def test_info_of_a_published_size_names_codes_and_faults(tmp_path: Path) -> None:
    """The published transformer with its first layer in 8 bits, all tensors but headers empty of data on disk."""
    manifest = qwen_dit.manifest(QwenDiTConfig())
    prefix, layer = "model.diffusion_model.", "transformer_blocks.0.attn.to_q"
    entries = {prefix + name: ("BF16", shape, 2) for name, shape in manifest.items()}
    entries[f"{prefix}{layer}.weight"] = ("F8_E4M3", manifest[f"{layer}.weight"], 1)
    entries |= {f"{prefix}{layer}.scale_weight": ("F32", (), 4), f"{prefix}scaled_fp8": ("F8_E4M3", (0,), 1)}
    said = describe(sparse(tmp_path / "a.safetensors", entries))
    print("\n".join(said.lines))
    names = "diffusers' names behind model.diffusion_model."
    assert said.lines[0] == f"layout: Qwen-Image's transformer, {names}"
    assert "1932 BF16, 1 F8_E4M3 with scales" in said.lines[1] and "20,430.4 M parameters" in said.lines[1]
    use = "use it: qwenimg PROMPT --transformer FILE"
    assert said.lines[2:] == ["known and not needed: 1 tensor", use, "quantized: 1 F8_E4M3 with scales"]
    assert said.faults == []
    del entries[f"{prefix}{layer}.bias"]
    entries[f"{prefix}strange"] = ("F32", (1,), 4)
    said = describe(sparse(tmp_path / "b.safetensors", entries))
    assert said.faults == [f"1 missing: {layer}.bias", "1 unknown: strange"]
    assert not [line for line in said.lines if line.startswith("use it")]
    entries[f"{prefix}{layer}.scale_weight"] = ("F32", (5,), 4)
    (fault,) = describe(sparse(tmp_path / "c.safetensors", entries)).faults
    assert "scale_weight' is F32 [5]" in fault


@pytest.mark.parametrize("layout", ["older", "newer"])
def test_info_of_a_folder_in_eight_bits_has_no_faults(tiny_folder: Path, layout: str, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_folder, tmp_path / "model")
    made = comfy(tensors(tiny_folder / "transformer"), layout, lambda name: ".norm" not in name)
    for path in (folder / "transformer").glob("*.safetensors*"):
        path.unlink()
    save_file(made.tensors, folder / "transformer" / "diffusion_pytorch_model.safetensors")
    said = describe(folder)
    print("\n".join(said.lines))
    assert said.faults == [] and "F8_E4M3 with scales" in "".join(said.lines)


@pytest.mark.sample(0)
def test_the_command_line_and_a_picture_made_again(
    tiny_folder: Path, files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(files["transformer"], "dit.safetensors")
    small = ("--size", "48x32", "--steps", "1", "--backend", "cpu", "--quiet")
    model = ("-m", str(tiny_folder))
    ran = cli("a red circle", *model, "--transformer", "dit.safetensors", *small, "-o", "a.png")
    assert ran.code == 0, ran.err
    recipe = recipe_from_png(Path("a.png"))
    assert recipe["transformer"] == "dit.safetensors" and recipe["fingerprints"].keys() == {"transformer"}
    cli("--from", "a.png", *model, *small, "-o", "b.png").refused(2, "--transformer (dit.safetensors)")
    again = cli("--from", "a.png", *model, "--unet", "dit.safetensors", *small, "-o", "b.png")
    assert again.code == 0 and "warning" not in again.err, again.err
    other = load_file("dit.safetensors")
    save_file({name: value * 0.9 for name, value in other.items()}, "dit.safetensors")
    other_run = cli("--from", "a.png", *model, "--transformer", "dit.safetensors", *small, "-o", "c.png")
    assert other_run.code == 0 and "the weights given to --transformer are not those" in other_run.err


def test_parts_in_the_configuration_file_belong_to_its_model(
    library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "config.toml"
    monkeypatch.setattr(config, "path", lambda: file)
    file.write_text('model = "qwen-image"\ntransformer = "~/a.safetensors"\n')
    assert cli("a ring", "-o", "a.png").code == 0
    assert cli("a ring", "-m", "shapes", "-o", "b.png").code == 0
    assert cli("a ring", "--transformer", "x.safetensors", "-o", "c.png").code == 0
    path = Path("~/a.safetensors").expanduser()
    assert [(one.model, one.parts) for one in library.openings] == [
        ("qwen-image", {"transformer": path}), ("shapes", {}), ("qwen-image", {"transformer": Path("x.safetensors")}),
    ]  # fmt: skip


# Without a model's folder, or with one whose weights were not pulled


@pytest.fixture
def pulled(cache: Path, files: dict[str, Path]) -> Path:
    """The cache with the small files of Qwen-Image, and with the parts as files of other repositories."""
    shutil.copytree(files["model"], snapshot(cache, "Qwen/Qwen-Image"))
    for part in PARTS:
        place = snapshot(cache, "someone/split_files") / part
        place.mkdir(parents=True)
        shutil.copy(files[part], place / "weights.safetensors")
    return cache


def snapshot(cache: Path, repo: str) -> Path:
    return cache / f"models--{repo.replace('/', '--')}" / "snapshots" / ("0" * 40)


@pytest.mark.sample(0)
def test_parts_alone_take_the_small_files_of_the_cache(pulled: Path, tiny_folder: Path, files: dict[str, Path]) -> None:
    """By path and by the hub's names, with -m or without."""
    whole = qwenimg.load(tiny_folder, "cpu", "fp32")("a red circle", **ASKED)
    given: list[dict] = [{part: files[part] for part in PARTS}]
    given.append({part: f"someone/split_files/{part}/weights.safetensors" for part in PARTS})
    for parts in given:
        for model in (None, "qwen-image"):
            pipe = qwenimg.load(model, "cpu", "fp32", **parts)
            assert (pipe.model_name, pipe.defaults.width) == ("qwen-image", 1328)
            made = pipe("a red circle", **ASKED)
            assert np.array_equal(made.latents, whole.latents)
            assert [made.recipe[part] for part in PARTS] == [
                path.name if isinstance(path, Path) else path for path in parts.values()
            ]


@pytest.mark.sample(0)
def test_a_picture_of_cached_parts_is_made_again_by_itself(pulled: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = [f"someone/split_files/{part}/weights.safetensors" for part in PARTS]
    options = [word for part, name in zip(PARTS, names, strict=True) for word in (f"--{part.replace('_', '-')}", name)]
    small = ("--size", "48x32", "--steps", "1", "--backend", "cpu", "--quiet")
    ran = cli("a lighthouse", *options, *small, "-s", "3", "-o", "a.png")
    assert ran.code == 0, ran.err
    recipe = recipe_from_png(Path("a.png"))
    assert [recipe[part] for part in PARTS] == names and recipe["model"] == "qwen-image"
    again = cli("--from", "a.png", *small, "-o", "b.png")
    assert again.code == 0 and "warning" not in again.err, again.err
    assert np.array_equal(*(np.asarray(Image.open(name)) for name in ("a.png", "b.png")))
    Path("someone/split_files/vae").mkdir(parents=True)  # a path of that name is not what the picture means
    Path(names[2]).write_bytes(b"?")
    cli("--from", "a.png", *small, "-o", "c.png").refused(2, "--vae (someone/split_files/vae/weights.safetensors)")


@pytest.mark.parametrize("model", [None, "qwen-image"])
def test_what_is_missing_is_said_with_what_gets_it(cache: Path, files: dict[str, Path], model: str | None) -> None:
    given = {part: files[part] for part in PARTS}
    with pytest.raises(ModelError, match=r"get its tokenizer \(4\.7 MB\) .*by: qwenimg pull qwen-image-files"):
        qwenimg.load(model, "cpu", **given)
    del given["vae"]
    with pytest.raises(
        ModelError, match=r"beside --transformer and --text-encoder, give --vae FILE, and get its tokenizer"
    ):
        qwenimg.load(model, "cpu", **given)
    shutil.copytree(files["model"], snapshot(cache, "Qwen/Qwen-Image"))
    with pytest.raises(ModelError, match=r"beside --transformer and --text-encoder, give --vae FILE$"):
        qwenimg.load(model, "cpu", **given)
    weights = snapshot(cache, "Qwen/Qwen-Image") / "text_encoder" / "model.safetensors"
    shutil.copy(files["text_encoder"], weights)  # a pull that was broken off
    with pytest.raises(ModelError, match=r"it lacks vae/.*qwenimg pull qwen-image. resumes"):
        qwenimg.load(model, "cpu", **given)
    with pytest.raises(ModelError, match=r"get it by: qwenimg pull a/b/c\.safetensors"):
        qwenimg.load(model, "cpu", vae="a/b/c.safetensors")


def test_small_files_alone_are_no_model_that_was_asked_for(pulled: Path) -> None:
    """Without options the built-in model draws, as before they were fetched."""
    from qwenimg.common.families import catalog
    from qwenimg.common.hub import resolve

    assert resolve.resolve(None).known is catalog.BUILT_IN


def test_the_small_files_are_what_a_published_folder_has() -> None:
    from qwenimg.common.families import catalog, repository
    from qwenimg.common.families.qwen_image.known import SMALL_FILES

    piece = SMALL_FILES
    assert all(repository.needed(name) and not name.endswith(".safetensors") for name in piece.files)
    assert catalog.find_download("Qwen-Image-Files") is piece
    have = set(piece.files) - {"tokenizer/tokenizer.json"}  # the published one has vocab.json and merges.txt
    assert set(repository.required(have.__contains__)) <= have


@pytest.mark.parametrize("given", ["~nobody/x", "no/such.safetensors", "a\0b", "x" * 5000, "\udcff"])
def test_a_path_of_nothing_is_one_line(tiny_folder: Path, given: str) -> None:
    for part in PARTS:
        with pytest.raises(ModelError) as caught:
            qwenimg.load(tiny_folder, "cpu", **{part: given})
        assert str(caught.value).isprintable() and len(str(caught.value)) <= 300


def test_the_small_files_are_pulled_without_weights(fake, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    from support.fake_hub import REPO

    from qwenimg.common.families import catalog, repository
    from qwenimg.common.families.qwen_image.known import SMALL_FILES
    from qwenimg.common.hub.pull import pull

    monkeypatch.setattr(catalog, "NAMED", (replace(SMALL_FILES, repo=REPO),))
    folder = pull("qwen-image-files", echo=print, progress=lambda *told: None)
    here = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert here == set(SMALL_FILES.files) & fake.files.keys() and "vae/config.json" in here
    assert repository.lacks(folder, frozenset(PARTS)) is None and repository.lacks(folder) is not None
    assert not repository.has_weights(folder)
