"""The names that LoRA files give the layers of a model, by its networks: the checkpoint's, and those of each layout.
And the names that a LoRA is written with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from qwenimg.common.networks.encoders import clip, t5
from qwenimg.common.networks.encoders.decoder import DecoderConfig
from qwenimg.common.networks.layout import Layouts
from qwenimg.common.networks.network import NETWORKS, Network, import_network
from qwenimg.common.parts.texts.text_lora_names import clip_names, language_model_names, t5_names
from qwenimg.common.runtime.checkpoint import Checkpoint, Component
from qwenimg.common.weights.keys import Place
from qwenimg.common.weights.loras.lora_names import DENOISER, ComponentNames, Names, component_names
from qwenimg.common.weights.loras.lora_writing import LayerName


def names(checkpoint: Checkpoint, networks: Mapping[str, Network] | None = None) -> Names:
    """Return the names of the layers of the denoiser and of the text encoders. networks: of the family, by the folders
    of the parts, so that those of a T5 that is left out are known."""
    networks = networks or {}
    denoisers = [(name, part) for name, part in checkpoint.components.items() if part.role == "transformer"]
    # Of two denoisers, which Stable Cascade has, LoRAs are made for the first
    named = (denoiser_names(name, part, networks.get(name)) for name, part in denoisers[:1])
    left_out = [name for name, network in networks.items() if network is t5.NETWORK and name not in checkpoint.texts]
    absent = (t5_names(name, {}, unused=t5.manifest(t5.T5Config())) for name in left_out)
    return (*named, *_texts(checkpoint), *absent)


def denoiser_names(name: str, part: Component, network: Network | None = None) -> ComponentNames:
    """Return the names of the layers of the denoiser `name`. network: its row; the default is that of its name."""
    from qwenimg.common.parts.layouts import LAYOUTS  # of every family, which only a LoRA needs

    network = network or import_network(NETWORKS, part.network).NETWORK
    weights = {key: shape for key, shape in part.plan.shapes.items() if key not in network.tables}
    layouts = next((one for one in LAYOUTS if one.network is network), None)
    lacking = network.lacking(weights)
    paths = [key.removesuffix(".weight") for key in (*weights, *lacking) if key.endswith(".weight")]
    others = {path: [network.published(f"{path}.weight").removesuffix(".weight")] for path in paths}
    places = {path: list(_places(layouts, path, part.config)) for path in paths} if layouts else None
    return component_names(name, weights, DENOISER, others, places, lacking, network.lora_widths(weights))


def _places(layouts: Layouts, path: str, config: object) -> Iterator[Place]:
    """Yield the places of a layer in the layouts of files, and those that only LoRAs have."""
    for row in layouts.rows:
        if row.place is not None:
            there = row.place(f"{path}.weight", config)
            yield there._replace(key=there.key.removesuffix(".weight").removesuffix(".scale"))
    yield from layouts.in_loras(path)


def _texts(checkpoint: Checkpoint) -> Iterator[ComponentNames]:
    clips = [name for name, part in checkpoint.texts.items() if part.network == clip.NETWORK.name]
    several = len(checkpoint.texts) > 1
    for name, part in checkpoint.texts.items():
        weights = part.plan.shapes
        if name in clips:
            # kohya gives the only CLIP beside a T5 no number
            yield clip_names(name, weights, *(["lora_te_"] if several and len(clips) == 1 else []), two=several)
        elif part.network == t5.NETWORK.name:
            yield t5_names(name, weights)
        elif isinstance(part.config, DecoderConfig):
            network = import_network(NETWORKS, part.network).NETWORK
            yield language_model_names(weights, network.manifest(part.config))
        else:  # in the file of the denoiser, under a name of its own there
            network = import_network(NETWORKS, part.network).NETWORK
            layers = {key: shape for key, shape in weights.items() if key not in network.tables}
            paths = [key.removesuffix(".weight") for key in layers if key.endswith(".weight")]
            alone = {path: [f"{name}.{network.published(path)}"] for path in paths}
            yield component_names(name, layers, DENOISER, alone)


# Writing


def layer_names(
    checkpoint: Checkpoint, networks: Mapping[str, Network] | None = None
) -> Callable[[str, str], LayerName]:
    """Return the function from a component and its parameter to the name of that layer in a LoRA that is written."""
    parts, networks = checkpoint.components, networks or {}
    denoisers = {name: part for name, part in parts.items() if part.role == "transformer"}
    rows = {
        name: networks.get(name) or import_network(NETWORKS, part.network).NETWORK for name, part in denoisers.items()
    }
    stored = {name: network.manifest(denoisers[name].config) for name, network in rows.items()}
    kohya = any(network.lora_prefix.endswith("_") for network in rows.values())

    def named(component: str, parameter: str) -> LayerName:
        path = parameter.rpartition(".")[0]
        if component in rows:
            published = rows[component].published(f"{path}.weight").removesuffix(".weight")
            shape = denoisers[component].plan.shapes.get(parameter, ())
            is_kernel = len(stored[component].get(parameter, shape)) > len(shape)
            return LayerName(prefix=rows[component].lora_prefix, path=published, is_kernel=is_kernel)
        is_clip = parts[component].network == clip.NETWORK.name and not path.startswith("text_projection")
        path = f"text_model.{path}" if is_clip else path
        if not kohya:
            return LayerName(prefix=f"{component}.", path=path)
        number = "" if len(checkpoint.texts) == 1 else component.removeprefix("text_encoder").removeprefix("_") or "1"
        return LayerName(prefix=f"lora_te{number}_", path=path)

    return named
