"""The description of a Stable Diffusion model in one file, of an IP-Adapter and of its image encoder."""

from __future__ import annotations

from dataclasses import dataclass

from qwenimg.common.base.amounts import counted
from qwenimg.common.base.errors import ModelError
from qwenimg.common.families.description import TYPE, Description, component_line, of_file
from qwenimg.common.families.load_options import Prediction
from qwenimg.common.families.part_file import AdapterFile
from qwenimg.common.families.stable_diffusion import ip_adapter as adapters
from qwenimg.common.families.stable_diffusion import single_file
from qwenimg.common.formats.stored import Header
from qwenimg.common.networks.denoisers import (
    t2i_adapter_names,
    unet_controlnet_names,
    unet_controlnet_union_names,
    unet_names,
)
from qwenimg.common.networks.encoders import clip_vision, ip_adapter
from qwenimg.common.networks.encoders.ip_adapter import IPAdapterConfig
from qwenimg.common.parts.vae_files import latent_channels


def is_control(header: Header) -> bool:
    """Return whether a file with this header is a ControlNet, and no model that has one too."""
    layouts, model = unet_controlnet_names.LAYOUTS, f"model.diffusion_model.{unet_names.SIGN}"
    found = layouts.find(header.tensors) is not None and layouts.similar_model(header.tensors) is None
    return header.format != "GGUF" and found and model not in header.tensors and not is_union(header)


def is_union(header: Header) -> bool:
    """Return whether a file with this header is a ControlNet Union."""
    return header.format != "GGUF" and unet_controlnet_union_names.LAYOUTS.find(header.tensors) is not None


def is_adapter(header: Header) -> bool:
    """Return whether a file with this header is a T2I-Adapter."""
    return header.format != "GGUF" and t2i_adapter_names.LAYOUTS.find(header.tensors) is not None


def is_unet(header: Header) -> bool:
    """Return whether a file with this header has a UNet with diffusers' names."""
    has_unet = header.format != "GGUF" and "time_embedding.linear_1.weight" in header.tensors
    return has_unet and not is_control(header) and not is_union(header)


def is_vae(header: Header) -> bool:
    """Return whether a file with this header is a VAE, with diffusers' names, for latents of these models."""
    return header.format != "GGUF" and latent_channels(header.tensors) == single_file.LATENTS


@dataclass(frozen=True, kw_only=True)
class LdmFile:
    """A file with ldm names, by what is in it: a model, a UNet or a VAE."""

    option: str

    def reads(self, header: Header) -> bool:
        if not self.opens(header):
            return False
        unet, vae = single_file.prefixes(header.tensors)
        return self.option == (
            "model" if unet is not None and vae is not None else "vae" if unet is None else "transformer"
        )

    def opens(self, header: Header) -> bool:
        return single_file.reads(header) and not is_control(header)

    def describe(self, header: Header, prediction: Prediction | None) -> Description:
        return describe_file(header, prediction)

    def describe_similar(self, header: Header) -> Description | None:
        return None


def _about(config: IPAdapterConfig) -> list[str]:
    model, encoder = adapters.model_of(config.text), adapters.encoder_of(config)
    return [f"{TYPE}{config.kind}, for {model}", f"image encoder: {encoder}"]


ADAPTER = AdapterFile(
    option="ip_adapter",
    title="an IP-Adapter",
    is_in=lambda header: header.format != "GGUF" and ip_adapter.is_in(header.tensors),
    open=adapters.open_file,
    about=_about,
    use="-m MODEL --ip-adapter FILE --ip-image PICTURE",
)
ENCODER = AdapterFile(
    option="ip_encoder",
    title="an image encoder (CLIP vision)",
    is_in=lambda header: header.format == "safetensors" and clip_vision.is_in(header.tensors),
    open=adapters.open_encoder,
    about=lambda config: [f"{TYPE}{adapters.title_of(config)}"],
    use="-m MODEL --ip-adapter ADAPTER --ip-image PICTURE --ip-encoder FILE",
)


def describe_file(header: Header, prediction: Prediction | None) -> Description:
    """Describe a file with ldm names: its type and the reasons for it, its parts, and its faults."""
    form = "GGUF, " if header.format == "GGUF" else ""
    layout = f"{form}Stable Diffusion, single file"
    description = of_file(layout, header, lambda name: name.endswith("token_embedding.weight"))
    try:
        detected = single_file.detect(header, prediction)
        description.lines[1:1] = [*detected.reasons, *(f"warning: {line}" for line in detected.warnings)]
        opened = single_file.open_file(header.file.path, prediction)
    except ModelError as error:
        description.faults.append(str(error))
        return description
    opened.close()
    for name, part in opened.components.items():
        description.lines.append(component_line(name, part.plan))
    if opened.ignored:
        description.lines.append(f"known and not needed: {counted(opened.ignored, 'tensor')}")
    return description
