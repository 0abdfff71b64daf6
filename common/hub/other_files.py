"""Files that people have and that are no model here: what they are, and what does their work, for `qwenimg info`.

Weights are told by the names of their tensors, other files by their first bytes, their JSON or their ending. No pickle
is run.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

from qwenimg.common.base.errors import ModelError, not_built
from qwenimg.common.base.safe_files import OpenFile, is_file, open_regular
from qwenimg.common.base.strict_json import strict_json
from qwenimg.common.base.text import clean, shell_path
from qwenimg.common.families import registry
from qwenimg.common.families.description import Description, listed
from qwenimg.common.formats import pth_file
from qwenimg.common.formats.files import PICKLES
from qwenimg.common.hub.network_search import needed_options
from qwenimg.common.jobs import foreign_comfyui, foreign_graph

USE, NO_USE = "use it: ", "not used here: "
MAX_JSON = 5 << 20  # bytes of a file whose JSON is looked at
MAX_SHOWN = 2_000  # characters of one setting
MAX_FILES = 1000  # of a folder, that are looked at
_SAFE = (
    "take the safetensors file of the same model, or convert this one (docs/trouble.md): of PyTorch's files only "
    "upscalers, embeddings, control networks and IP-Adapters are read"
)

# The sign in one tensor's name that none of our models has; the kind; the word of its feature, or what to do
_TENSORS: tuple[tuple[str, str, str], ...] = (
    (r"(ip_adapter|image_proj)\..*|.*\.(to_k_ip|to_v_ip)\..*", "an IP-Adapter of another kind",
     "--ip-adapter takes those of Stable Diffusion 1.x and SDXL as they are published, and FLUX.1 Redux"),
    (r"control_to_base_for_conv_in\..*", "a ControlNet-XS of Stable Diffusion", "--control takes ControlNets"),
    (r"(.*\.)?(control_model|input_hint_block|controlnet_cond_embedding|controlnet_down_blocks|controlnet_blocks"
     r"|controlnet_x_embedder|controlnet_mode_embedder)\..*", "a ControlNet that no model here takes", "control"),
    (r"adapter\.(body|conv_in)\..*|body\.\d+\.(in_conv|block1|resnets)\..*", "a T2I-Adapter", "control"),
    (r"(.*\.)?motion_modules\..*", "a motion module (AnimateDiff)", "video"),
    (r"(encoder|decoder)\.layers\.\d+\..*|\d+\.(conv\.\d+\.)?weight", "a tiny VAE of no model here",
     "qwenimg models lists those that --vae takes"),
    (r"(.*\.)?vision_model\.embeddings\..*|visual\.(conv1|transformer)\..*", "an image encoder (CLIP vision)",
     "--ip-encoder takes one with its projection, by transformers' names"),
    (r"(768|1280|640|320|1024)\.\d+\.linear.*", "a hypernetwork", "hypernetwork"),
    (r"blocks\.0\.self_attn\.q\.weight|.*\.temporal_transformer\..*|time_conv\..*", "a video model", "video"),
    (r"layers\.\d+\.residual_group\..*|params(_ema)?\..*|conv_first\.weight", "an upscaler of another family",
     "`qwenimg upscale --with FILE` reads those of the ESRGAN family"),
    (r"(model\.)?layers\.0\.self_attn\.q_proj\.weight|blk\.0\.attn_q\.weight", "a language model",
     "only the text encoders of the models here are used, by --text-encoder"),
    (r"first_stage_model\..*|(model\.)?diffusion_model\..*|cond_stage_model\..*", "a whole model of Stable Diffusion's "
     "layout", "its tensors are those of no model that this version knows"),
)  # fmt: skip
# The first bytes, an offset, the kind, and what to do
_BYTES: tuple[tuple[int, bytes, str, str], ...] = (
    (0, b"7z\xbc\xaf", "a 7z archive", "unpack it, and look at its files"),
    (0, b"Rar!", "a RAR archive", "unpack it, and look at its files"),
    (0, b"\x1f\x8b", "a gzip archive", "unpack it, and look at its files"),
    (0, b"BZh", "a bzip2 archive", "unpack it, and look at its files"),
    (0, b"\xfd7zXZ", "an xz archive", "unpack it, and look at its files"),
    (257, b"ustar", "a tar archive", "unpack it, and look at its files"),
    (0, b"%PDF", "a PDF document", "save its picture as PNG or JPEG"),
    (4, b"ftypheic", "a picture in HEIC", "export it as JPEG (on a Mac: sips -s format jpeg IN --out OUT)"),
    (4, b"ftypmif1", "a picture in HEIC", "export it as JPEG (on a Mac: sips -s format jpeg IN --out OUT)"),
    (4, b"ftypavif", "a picture in AVIF", "save it as PNG or JPEG"),
    (4, b"ftyp", "a film", "video"),
    (0, b"\x1aE\xdf\xa3", "a film", "video"),
    (0, b"\x89HDF", "an HDF5 file", "take the safetensors file of the same model"),
)  # fmt: skip
_ENDINGS: Mapping[str, tuple[str, str]] = {
    ".onnx": ("an ONNX network", "take the safetensors file of the same model"),
    ".engine": ("a TensorRT engine", "take the safetensors file of the same model"),
    ".plan": ("a TensorRT engine", "take the safetensors file of the same model"),
    ".mlmodel": ("a Core ML model", "take the safetensors files of the same model"),
    ".mlpackage": ("a Core ML model", "take the safetensors files of the same model"),
    ".mlmodelc": ("a Core ML model", "take the safetensors files of the same model"),
    ".tflite": ("a TensorFlow Lite network", "take the safetensors file of the same model"),
    ".msgpack": ("weights of Flax", "take the safetensors file of the same model"),
    ".param": ("a network of ncnn", "take the safetensors or .pth file of the same upscaler"),
    ".yaml": ("a configuration", "give the file of the weights; --models-dir finds ComfyUI's extra_model_paths.yaml"),
    ".yml": ("a configuration", "give the file of the weights"),
    ".toml": ("a configuration", "defaults of this program are in its own config.toml: docs/cli.md"),
    ".csv": ("a table, such as styles of the web UI", "write the words of a style into the prompt"),
    ".py": ("a program", "no code of a model is run here"),
    ".svg": ("a drawing in SVG", "save it as PNG"),
    ".psd": ("a picture of Photoshop", "save it as PNG"),
    ".exr": ("a picture in OpenEXR", "save it as PNG"),
}  # fmt: skip


def described_weights(names: Iterable[str]) -> tuple[str, str] | None:
    """Return the kind of a file with tensors of these `names`, and what to do; None for one that is not known."""
    every = list(names)
    for sign, title, does in _TENSORS:
        if any(re.fullmatch(sign, name, re.ASCII) for name in every):
            return title, _advice(does)
    return None


def describe(path: Path) -> Description | None:
    """Describe a file or a folder that is no model here; None for one without a sign of its kind, or that cannot be
    read."""
    if (ending := _ENDINGS.get(path.suffix.lower())) is not None and path.exists():
        return _lines(path, *ending)
    if not is_file(path):
        return _folder(path)
    try:
        with closing(open_regular(path)) as file:
            return _file(path, file)
    except ModelError:
        return None


def _file(path: Path, file: OpenFile) -> Description | None:
    if not file.size:
        return None
    first = file.read(0, min(file.size, 300))
    for offset, sign, title, does in _BYTES:
        if first[offset:].startswith(sign):
            return _lines(path, title, _advice(does))
    if pth_file.is_pth(file):
        return _pickle(path, file)
    if path.suffix.lower() == ".json" and file.size <= MAX_JSON:
        return _json(path, file.read(0, file.size))
    if path.suffix.lower() in (".txt", ".jsonl") and not first.startswith(b"version https://git-lfs"):
        return _lines(path, "a text", "", use=f"qwenimg --prompt-file {shell_path(path)} -o FOLDER/")
    return None


def _pickle(path: Path, file: OpenFile) -> Description:
    """Describe a file of `torch.save` or a zip archive by its tensors, of which nothing is run."""
    try:
        header = pth_file.parse(file)
    except ModelError:
        if path.suffix.lower() not in PICKLES:
            return _lines(path, "a zip archive or a pickle", "unpack an archive; pickles are not read")
        return _lines(path, "a PyTorch file or a pickle, whose tensors cannot be read without running code", _SAFE)
    kind = registry.identify(header)
    if kind is not None and kind.option == "ip_adapter":  # the only kind of these that is read here
        description = kind.families[0].describe(header, None)
        assert description is not None
        return description
    names = [name.removeprefix("state_dict.") for name in header.tensors]
    if not names:
        return _lines(path, "a PyTorch file without tensors", _SAFE)
    title, does = described_weights(names) or ("weights", _SAFE)
    if title.startswith(("a whole model", "weights")):
        does = _SAFE
    return _lines(path, f"{title}, as a PyTorch file", does, f"first tensors: {listed(names)}")


def _json(path: Path, raw: bytes) -> Description | None:
    try:
        data = strict_json(raw, path, depth=64, values=500_000)
    except ModelError:
        return _lines(path, "a text in JSON that is broken", "save it again")
    if not isinstance(data, dict):
        return _lines(path, "a text in JSON", "no model, recipe or workflow is in it")
    if foreign_graph.is_page_form(data) or foreign_graph.is_api_form(data):
        return _workflow(path, data)
    if "_class_name" in data or "model_type" in data or "architectures" in data:
        folder = shell_path(path.absolute().parent)
        return _lines(path, "the configuration of a model or a part", f"give the folder: qwenimg info {folder}")
    return _lines(path, "a text in JSON", "no model, recipe or workflow is in it")


def _workflow(path: Path, data: Mapping[str, Any]) -> Description:
    """Describe a workflow of ComfyUI: its nodes, the settings that are read, and the command that draws with them."""
    title = "a workflow of ComfyUI"
    try:
        recipe = foreign_comfyui.read(data, path)
    except ModelError as error:
        return _lines(path, title, str(error).partition(": ")[2])
    rows = data["nodes"] if foreign_graph.is_page_form(data) else data.values()
    nodes = f"nodes: {listed(dict.fromkeys(sorted(str(one.get('type', one.get('class_type'))) for one in rows)))}"
    if recipe.refused is not None:
        return _lines(path, title, f"not plain enough: {recipe.refused}", nodes)
    found = {**recipe.fields, **recipe.named()}
    settings = [f"{key}: {clean(value, MAX_SHOWN)}" for key, value in found.items()]
    command = " ".join(["qwenimg --from", shell_path(path), *needed_options(recipe)])
    return _lines(
        path, title, "", nodes, *settings, *(f"note: {line}" for line in recipe.messages()), use=clean(command, 4096)
    )


def _folder(path: Path) -> Description | None:
    """Describe a folder without a model of its own."""
    if not path.is_dir():
        return None
    found = []
    for one in islice(path.rglob("*"), MAX_FILES):
        if one.suffix.lower() in (".safetensors", ".gguf", *PICKLES):
            found.append(str(one.relative_to(path)))
    if not found:
        return None
    use = f"qwenimg models --models-dir {shell_path(path)}"
    return _lines(path, "a folder with files of models", "", f"files: {listed(sorted(found))}", use=use)


def _lines(path: Path, title: str, does: str, *more: str, use: str = "") -> Description:
    return Description(lines=[f"layout: {title}", *more, f"{USE}{use}" if use else f"{NO_USE}{does}"])


def _advice(does: str) -> str:
    """Return what to do: the sentence about a feature that is not built, or the text itself."""
    if does == "control":
        return (
            f"control networks are for {registry.titles(lambda family: family.control is not None)}: `qwenimg models`"
        )
    return not_built(does) or does
