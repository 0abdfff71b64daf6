"""The output of `qwenimg info` for a model's folder or file, broken or not, from configurations and headers alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from qwenimg.common.base.amounts import counted, size_text
from qwenimg.common.base.config import has_index, read_json
from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.safe_files import bad, is_file, is_folder
from qwenimg.common.base.shape import Manifest
from qwenimg.common.base.text import clean, shell_path, shown_path
from qwenimg.common.families import registry, repository
from qwenimg.common.families.description import Description, in_memory, kinds, listed, summary, weights_summary
from qwenimg.common.families.file_kind import FLAGS, is_lora
from qwenimg.common.families.load_options import Prediction
from qwenimg.common.families.part_file import tiny_vae_description
from qwenimg.common.families.registry import OpenModel
from qwenimg.common.formats import gguf
from qwenimg.common.formats.files import find_files
from qwenimg.common.formats.headers import open_weights
from qwenimg.common.formats.stored import Header
from qwenimg.common.hub import other_files
from qwenimg.common.hub.describe_lora import Layers, describe_lora
from qwenimg.common.hub.lora_models import known_models
from qwenimg.common.networks.network import Network
from qwenimg.common.parts import tiny_vae
from qwenimg.common.parts.components import read_config
from qwenimg.common.parts.texts import embedding_file
from qwenimg.common.precision import precision
from qwenimg.common.quant.gguf_blocks import GGUFBlocks
from qwenimg.common.request.parts import PARTS
from qwenimg.common.upscaling import network_file
from qwenimg.common.weights import keys, left_out, quantize
from qwenimg.common.weights.loras.peft_config import ADAPTER
from qwenimg.common.weights.plan import Source

UNUSABLE = other_files.NO_USE
_ANSWERS = (other_files.USE, UNUSABLE)
_PICTURED: Mapping[str | None, str] = {
    "control": "--control {}=PICTURE",
    "ip_adapter": "--ip-adapter {} --ip-image PICTURE",
    "ip_encoder": "--ip-adapter ADAPTER --ip-image PICTURE --ip-encoder {}",
}
"""The options with a picture that take a file or a component's folder."""


def describe(path: Path, prediction: Prediction | None = None) -> Description:
    """Describe a model's folder, one component's folder, or one file: what it is, and the command that uses it or why
    none does. `prediction` overrides the detected one of a Stable Diffusion file. Raises ModelError if nothing can be
    said at all."""
    try:
        description = _known(path, prediction)
    except ModelError:
        if is_folder(path):
            registry.check_not_modular(path)  # it has an error of its own
        other = None if is_file(path / "config.json") else other_files.describe(path)
        if other is None:
            raise
        return other
    if not any(line.startswith(_ANSWERS) for line in description.lines):
        if description.faults:
            description.lines.append(f"{UNUSABLE}see its faults")
        else:
            lacks = any(line.startswith("lacks: ") for line in description.lines)
            description.lines.append(f"{_use(path)}{', with what it lacks' if lacks else ''}")
    return description


def _use(path: Path) -> str:
    """Return the line with the command that uses a model, one of its parts or a control network."""
    shown = shell_path(path)
    if is_folder(path) and (has_index(path) or not is_file(path / "config.json")):
        return f"{other_files.USE}qwenimg PROMPT -m {shown}"
    option = _part_of(path)
    if option in _PICTURED:
        return f"{other_files.USE}qwenimg PROMPT -m MODEL {_PICTURED[option].format(shown)}"
    if option not in FLAGS:
        return f"{UNUSABLE}it is a part of a model; give the model's folder"
    model = "" if option == "model" else "-m MODEL "
    return f"{other_files.USE}qwenimg PROMPT {model}{FLAGS[option]} {shown}"


def _part_of(path: Path) -> str | None:
    """Return the option that takes a file or a component's folder; None for a component that none takes."""
    if is_folder(path):
        network, _ = _expected(path, "")
        for family in registry.FAMILIES:
            if family.control is not None and network in family.control_networks:
                adapters, encoders = family.control.adapters, family.control.encoders
                return "ip_adapter" if network in adapters else "ip_encoder" if network in encoders else "control"
            option = next((name for name, one in family.parts.items() if one is network), None)
            if option is not None:
                option = PARTS[option].again or option if option in PARTS else option
                return "transformer" if option == family.denoiser else option
        return None
    with _opened([path]) as headers:
        kind = registry.identify(headers[0])
    return None if kind is None else kind.option


def _known(path: Path, prediction: Prediction | None) -> Description:
    if is_folder(path):
        registry.check_not_modular(path)
    if is_folder(path) and has_index(path):
        return _adapter(path) or _folder(path)
    if tiny_vae.is_tiny_at(path):
        return tiny_vae_description(path)
    if is_folder(path) and is_file(path / "config.json"):
        return _component(path)
    if is_folder(path) and (foreign := registry.foreign_folder(path)) is not None:
        family, layout = foreign
        description = Description(lines=[f"layout: {layout}", f"pipeline: {family.described(path)}"])
        _open(path, description, parts=True)
        return description
    return _upscaler(path) or _embedding(path) or _file(path, prediction)


def _upscaler(path: Path) -> Description | None:
    """Describe an upscaler; None for another file."""
    try:
        title = network_file.described(path) if is_file(path) else None
    except ModelError:
        return None
    use = f"qwenimg upscale PICTURE --with {shell_path(path)}"
    return None if title is None else Description(lines=[f"layout: an upscaler, {title}", f"use it: {use}"])


def _embedding(path: Path) -> Description | None:
    """Describe an embedding; None for another file."""
    try:
        if not is_file(path) or not embedding_file.named_embedding(path):
            return None
    except ModelError:
        return None
    layout = "layout: an embedding (textual inversion)"
    try:
        file = embedding_file.read_embedding(path)
    except ModelError as error:
        return Description(lines=[layout], faults=[str(error)])
    lines = [f"{layout}, {file.sizes}", f"for: {file.base}"]
    lines += [f"token: {clean(file.token, 80)}"] if file.token else []
    name = clean(file.token, 40) or f"embedding:{shown_path(path.stem, 40)}"
    use = f'qwenimg "PROMPT, {name}" -m MODEL --embedding {shell_path(path)}'
    return Description(lines=[*lines, f"{other_files.USE}{use}"])


def _folder(folder: Path) -> Description:
    description = Description(lines=["layout: diffusers folder"])
    try:
        family = registry.of_folder(folder)
        description.lines.append(f"pipeline: {family.described(folder)}")
    except ModelError as error:
        description.faults.append(str(error))
        return description
    networks = _networks(folder)
    for name in repository.components(lambda name: is_file(folder / name)):
        try:
            part = _component(folder / name, networks.get(name, ""))
        except ModelError as error:
            description.faults.append(str(error))
            continue
        description.lines.extend(part.lines)
        description.faults.extend(part.faults)
    if not description.faults:
        _open(folder, description)
    return description


def _adapter(folder: Path) -> Description | None:
    """Describe the folder of an adapter and its image encoder; None for another one. Raises ModelError."""
    if (family := registry.adapter_family(folder)) is None:
        return None
    description = Description(lines=["layout: diffusers folder", f"type: an adapter for {family.title}"])
    for part in registry.components(folder):
        described = _component(part)
        description.lines.extend(described.lines)
        description.faults.extend(described.faults)
    if not description.faults:
        use = _PICTURED["ip_adapter"].format(shell_path(folder))
        description.lines.append(f"{other_files.USE}qwenimg PROMPT -m MODEL {use}")
    return description


def _networks(folder: Path) -> dict[str, str]:
    """Return the names of the model's networks by their folders, of which several may have one kind of configuration;
    nothing for a model that cannot be opened."""
    try:
        opened = registry.open_model(folder)
    except ModelError:
        return {}
    opened.close()
    names = opened.family.folders
    return {names.get(name, name): part.network for name, part in opened.checkpoint.components.items()}


def _open(folder: Path, description: Description, *, parts: bool = False) -> None:
    """Open the model and add to its description: its memory, or the fault of components that do not fit, of the
    tokenizer or the scheduler; with `parts`, a line for each component, if they have no configurations."""
    try:
        opened = registry.open_model(folder)
        opened.checkpoint.close()
        for name, part in opened.checkpoint.components.items() if parts else ():
            description.lines.append(weights_summary(name, [entry.source for entry in part.plan.entries.values()]))
        opened.family.check(opened.checkpoint)
        opened.checkpoint.read_tokenizers()
    except ModelError as error:
        description.faults.append(str(error))
    else:
        description.lines.append(_resident(opened))


def _resident(opened: OpenModel) -> str:
    """Return the size of the files, and of the weights that must be in memory at once: those of the largest part, in
    16 bit and, if that is less, with -q."""
    checkpoint = opened.checkpoint
    policy = precision.parse("bf16", on_gpu=False, kind=opened.family.precision)
    plain = checkpoint.largest(policy)
    quantized = {bits: checkpoint.quantized(bits).largest(policy) for bits in quantize.POLICIES}
    alternatives = [f"with -q {bits} {size_text(size)}" for bits, size in quantized.items() if size < plain]
    least = ", ".join([size_text(plain), *alternatives])
    return f"weights: {size_text(checkpoint.file_bytes)} in files; in memory at once {least}"


def _component(folder: Path, wanted: str = "") -> Description:
    """Compare one component with the manifest of its configuration, for the network `wanted` if several have such a
    one."""
    network, config = _expected(folder, wanted)
    manifest, rename = network.manifest(config), network.rename_for(config)
    with _opened(find_files(folder).files) as headers:
        named, _ = keys.named_weights(headers, rename, manifest, copies=network.copies)
        unused = sum(rename(key) is None for header in headers for key in header.tensors)
    part = Description(lines=[weights_summary(folder.name, named.values())])
    if unused:
        part.lines.append(f"{folder.name}: known and not needed: {counted(unused, 'tensor')}")
    needed = {name: shape for name, shape in manifest.items() if name in named or name not in network.optional}
    for kind, names in _differences(named, needed):
        part.faults.append(f"{folder.name}: {len(names)} {kind}: {listed(names)}")
    return part


def _expected(folder: Path, wanted: str) -> tuple[Network, Any]:
    """Return the network of the component in `folder`, and its configuration. Raise ModelError."""
    path = folder / "config.json"
    data = read_json(path)
    networks = sorted(registry.networks(), key=lambda network: network.name != wanted)
    refusals = []
    for network in networks:  # several models take parts of one kind, some only larger ones
        if data.get(network.key) in network.kinds:
            try:
                return network, read_config(network, folder)
            except ModelError as error:
                refusals.append(error)
    if refusals:
        raise refusals[0]
    if folder.name == "text_encoder":  # some are stored without a type
        network = next(network for network in networks if network.role == "text")
        return network, read_config(network, folder)
    kind = data.get("_class_name", data.get("model_type"))
    raise ModelError(f"{clean(path)}: a {clean(kind, 60)!r} is not a component that this version knows")


def _file(path: Path, prediction: Prediction | None) -> Description:
    """Describe a file or a LoRA's folder. Where no model can be drawn with it, a line says why."""
    if is_file(path / ADAPTER):
        return describe_lora(path, layers_of_known())
    with _opened(find_files(path).files) as headers:
        if is_file(path) and is_lora(headers[0]):
            return describe_lora(path, layers_of_known())
        kind = registry.identify(headers[0])
        if kind is None and headers[0].format == "PyTorch":
            raise bad(path, "is a PyTorch file of none of the networks here")  # others are named by their first bytes
        own = kind.families if kind else ()  # a whole model's first: others may have one of its parts
        for family in (*own, *registry.FAMILIES) if is_file(path) else ():
            if description := family.describe(headers[0], prediction):
                if kind is not None and len(kind.families) > 1:
                    description.lines.insert(1, f"for: {kind.models}")
                if line := left_out.line(headers[0]):
                    description.lines.append(line)
                told = any(line.startswith("use it:") for line in description.lines)
                lines = _formats(headers)
                description.lines.extend(line for line in lines if not (told and line.startswith(UNUSABLE)))
                return description
        tensors = {name: stored for header in headers for name, stored in header.tensors.items()}
        layout = f"{kind.title} ({kind.flag})" if kind else "unknown"
        lines = [f"layout: {layout}", summary("file", tensors), f"first tensors: {listed(tensors)}"]
        if headers[0].format == "GGUF":
            lines[0:2] = [f"layout: GGUF, {layout}", *_gguf(headers[0])]
        lines += _formats(headers)
        if kind is None and (other := other_files.described_weights(tensors)) is not None:
            title, does = other
            lines = [line for line in lines if not line.startswith(UNUSABLE)]
            lines[0] = lines[0].replace(layout, title)
            lines.append(f"{UNUSABLE}{does}")
        elif kind is None and not lines[-1].startswith(UNUSABLE):
            lines.append(f"{UNUSABLE}its tensors are those of no model that this version knows")
        return Description(lines=lines)


def _formats(headers: Iterable[Header]) -> list[str]:
    """Return a line on the weights of open files if some are quantized, or why they cannot be read."""
    weights: list[Source] = []
    for header in headers:
        try:
            weights += keys.weights_of(header).values()
        except ModelError as error:
            reason = str(error).removeprefix(f"{shown_path(header.file.path)}: ")
            return [f"{UNUSABLE}{reason}"]
    quantized = [source for source in weights if source.code and not isinstance(source.code, GGUFBlocks)]
    return [f"quantized: {kinds(quantized)}"] if quantized else []


def layers_of_known() -> Layers:
    """Return each known model's family, and the names that LoRAs give its layers."""
    return {name: (model.family, model.family.lora_names(model.checkpoint)) for name, model in known_models()}


def _gguf(header: Header) -> list[str]:
    """Return lines on a GGUF file: its architecture, its tensors, and their size in memory."""
    name = header.metadata.get(gguf.ARCHITECTURE, "")
    networks = [network for family in registry.FAMILIES for network in family.networks]
    networks = [network for network in networks if name in network.architectures]

    def looked_up(key: str) -> bool:
        return any(network.rename(key) in network.tables for network in networks)

    shown = f"'{clean(name, 60)}'" if name else "not said"
    note = "" if networks or name in gguf.UNSPECIFIC else ", which this version does not draw with"
    return [f"architecture: {shown}{note}", summary("file", header.tensors), in_memory(header.tensors, looked_up)]


@contextmanager
def _opened(files: Iterable[Path]) -> Iterator[list[Header]]:
    """Open the headers of `files`, and close them at the end."""
    with ExitStack() as stack:
        headers = []
        for path in files:
            headers.append(open_weights(path))
            stack.callback(headers[-1].file.close)
        yield headers


def _differences(weights: Mapping[str, Source], expected: Manifest) -> list[tuple[str, list[str]]]:
    common = weights.keys() & expected.keys()
    kinds = (
        ("missing", sorted(expected.keys() - weights.keys())),
        ("extra", sorted(weights.keys() - expected.keys())),
        ("of another shape", sorted(name for name in common if not keys.has_shape(weights[name], expected[name]))),
    )
    return [(kind, names) for kind, names in kinds if names]
