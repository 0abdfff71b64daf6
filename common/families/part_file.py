"""The files that a family reads, as rows: their signs in a header, and their description for `info`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.text import shell_path
from qwenimg.common.families.description import TYPE, Description, component_line, of_file, summary
from qwenimg.common.families.fits import Fit, check
from qwenimg.common.families.load_options import Prediction
from qwenimg.common.families.opening import Opening
from qwenimg.common.formats import gguf
from qwenimg.common.formats.stored import Header
from qwenimg.common.networks.encoders import clip_names, language_names, qwen, t5_names
from qwenimg.common.networks.layout import Layouts
from qwenimg.common.networks.network import Network
from qwenimg.common.networks.vaes import flux2_vae_names, kl_vae, kl_vae_names, qwen_vae, tiny_vae_names
from qwenimg.common.parts import known_configs, merged_file, tiny_vae, vae_files
from qwenimg.common.parts.components import renaming
from qwenimg.common.parts.open_file import open_part
from qwenimg.common.parts.texts import clip_files
from qwenimg.common.runtime.checkpoint import Component

_ALL = "--transformer FILE --text-encoder FILE --vae FILE"
_OPTIONS = {"vae": "--vae", "transformer": "--transformer", "effnet": "--effnet"}  # all other parts are text encoders


class FamilyFile(Protocol):
    """One kind of file that a family reads."""

    @property
    def option(self) -> str:
        """The option that takes it, of `file_kind.FLAGS`."""

    def reads(self, header: Header) -> bool:
        """Return whether a file with this header is of this kind."""

    def opens(self, header: Header) -> bool:
        """Return whether such a file is opened as a model, perhaps with parts that are given."""

    def describe(self, header: Header, prediction: Prediction | None) -> Description | None:
        """Return the description of a file that it reads, or None for a general one. prediction: the user's."""

    def describe_similar(self, header: Header) -> Description | None:
        """Return the description of a similar model's file, which is not drawn with; or None."""


@dataclass(frozen=True, kw_only=True)
class PartFile:
    """One part in a file of its own. It has `layouts`, or `is_in` and a `network`."""

    option: str
    title: Callable[[Header], str] | str  # for `info`
    network: Network | None = None  # of a part without `layouts`
    use: str = _ALL  # the options that `info` names, with which a picture is drawn
    layouts: Layouts | None = None  # `info` opens the part by them, and names its faults
    is_in: Callable[[Header], bool] | None = None  # whether a file has the part; None: whether the layouts find it
    is_described: bool = True  # False: another family's row, or a general one, describes it
    is_alone: bool = False  # files with another part of its role are not of this kind
    like: Callable[[], Any] | None = None  # the configuration for what no tensor shows; None: the network's defaults
    # From the path and the configuration, the variant of the model, for `info`
    variant: Callable[[Path, Any], str] | None = None
    # The same of a part without `layouts`, from the header; "" if it does not tell
    type_of: Callable[[Header], str] = lambda header: ""

    def reads(self, header: Header) -> bool:
        if self.is_in is not None:
            return self.is_in(header)
        found = self.layouts is not None and self.layouts.find_in(header) is not None
        return found and not (self.is_alone and self.layouts and self.layouts.find_alone(header.tensors) is None)

    def opens(self, header: Header) -> bool:
        return False

    def describe(self, header: Header, prediction: Prediction | None) -> Description | None:
        """Return the layout of the part, its weights and its faults."""
        if not self.is_described:
            return None
        network = self.layouts.network if self.layouts else self.network
        assert network is not None
        like = self.like() if self.like else network.config()
        rename, tables = renaming(network, like), network.tables
        description = of_file(self._layout(header), header, lambda key: rename(key) in tables)
        if self.layouts is not None:
            try:
                opened = open_part(self.layouts, header.file.path, like, self.option)
            except ModelError as error:
                description.faults.append(str(error))
                return description
            opened.plan.close()
            if self.variant is not None:
                description.lines.insert(1, f"{TYPE}{self.variant(header.file.path, opened.config)}")
        if type_ := self.type_of(header):
            description.lines.insert(1, f"{TYPE}{type_}")
        description.lines.append(f"use it: qwenimg PROMPT {self.use}")
        return description

    def describe_similar(self, header: Header) -> Description | None:
        other = self.layouts.similar_model(header.tensors) if self.layouts else None
        if other is None:
            return None
        return Description(lines=[f"layout: {other}", summary("file", header.tensors)], faults=[f"is {other}"])

    def _layout(self, header: Header) -> str:
        """Return the part and the layout of its names."""
        title = self.title if isinstance(self.title, str) else self.title(header)
        naming = self.layouts.find(header.tensors) if self.layouts else None
        names = f", {self.layouts.title_of(naming, header.tensors)}" if self.layouts and naming else ""
        prefix = f", behind {naming.prefix}" if naming and naming.prefix else ""
        return f"{'GGUF, ' if header.format == 'GGUF' else ''}{title}{names}{prefix}"


@dataclass(frozen=True, kw_only=True)
class ModelFile:
    """A model in one file, which may lack parts."""

    title: str  # of the family
    parts: tuple[str, ...]  # that a model has, by their folders
    is_in: Callable[[Header], bool]
    is_opened: Callable[[Header], bool] | None = None  # for `opens`; None: files with `is_in` alone
    open: Callable[[Path], Mapping[str, Component]]  # the parts that are in the file
    variant: Callable[[Path, Mapping[str, Component]], str] | None = None  # for `info`
    fits: Iterable[Fit] = ()
    option: str = "model"

    def reads(self, header: Header) -> bool:
        return self.is_in(header)

    def opens(self, header: Header) -> bool:
        return (self.is_opened or self.is_in)(header)

    def describe(self, header: Header, prediction: Prediction | None) -> Description:
        """Return the parts in the file, those that it lacks, and their faults."""
        path, form = header.file.path, "GGUF, " if header.format == "GGUF" else ""
        description = of_file(f"{form}{self.title}, single file", header)
        lacking = []
        try:
            opened = self.open(path)
            for part in opened.values():
                part.plan.close()
            lacking = [name for name in self.parts if name not in opened]
            check(path, opened, () if lacking else self.fits)
        except ModelError as error:
            description.faults.append(str(error))
            return description
        if self.variant is not None:
            description.lines.insert(1, f"{TYPE}{self.variant(path, opened)}")
        description.lines.extend(component_line(name, part.plan) for name, part in opened.items())
        if lacking:
            options = dict.fromkeys(_OPTIONS.get(name, "--text-encoder") for name in lacking)
            description.lines.append(f"lacks: {', '.join(lacking)}; add them by {' and '.join(options)}, once for each")
        return description

    def describe_similar(self, header: Header) -> Description | None:
        return None


def whole_model(title: str, opening: Opening, fits: Iterable[Fit], *, lacks: bool = False) -> ModelFile:
    """Return the row of a model in one file, by the layouts of its transformer. lacks: True if a file is described that
    lacks parts; else it is refused."""
    return ModelFile(
        title=title,
        parts=(*opening.networks,),
        is_in=lambda header: merged_file.is_model(header, opening.layouts["transformer"]),
        open=opening.open_inside if lacks else opening.open_parts,
        fits=fits,
    )


def tiny_vae_description(path: Path) -> Description:
    """Return the description of the tiny VAE in a folder or file."""
    found = tiny_vae.described(path)
    description = Description(lines=[f"layout: {found.title}", *found.lines])
    if found.fault is not None:
        description.faults.append(found.fault)
        return description
    shown = shell_path(path)
    description.lines.extend(
        [
            f"use it: qwenimg PROMPT -m MODEL --vae {shown}",
            f"or for previews alone: qwenimg PROMPT -m MODEL --preview --preview-with {shown}",
        ]
    )
    return description


@dataclass(frozen=True, kw_only=True)
class TinyVAEFile:
    """A tiny VAE for the latents of a family, in a file of its own, or a half of one."""

    names: tuple[str, ...]  # of the published ones
    option: str = "vae"

    def reads(self, header: Header) -> bool:
        config = tiny_vae.config_in(header)
        return config is not None and any(one.name in self.names for one in tiny_vae_names.models_of(config))

    def opens(self, header: Header) -> bool:
        return False

    def describe(self, header: Header, prediction: Prediction | None) -> Description:
        return tiny_vae_description(header.file.path)

    def describe_similar(self, header: Header) -> Description | None:
        return None


@dataclass(frozen=True, kw_only=True)
class AdapterFile:
    """An adapter by which pictures are prompts, or its image encoder, in a file of its own. No drawing opens it as a
    part of a model."""

    option: str
    title: str  # for `info`
    is_in: Callable[[Header], bool]
    open: Callable[[Path], Component]
    about: Callable[[Any], list[str]]  # from its configuration, the lines that `info` has of it
    use: str  # the options that `info` names

    def reads(self, header: Header) -> bool:
        return self.is_in(header)

    def opens(self, header: Header) -> bool:
        return False

    def describe(self, header: Header, prediction: Prediction | None) -> Description:
        form = "PyTorch, " if header.format == "PyTorch" else ""
        description = of_file(f"{form}{self.title}", header)
        try:
            part = self.open(header.file.path)
        except ModelError as error:
            description.faults.append(str(error))
            return description
        part.plan.close()
        description.lines[1:1] = self.about(part.config)
        description.lines.append(f"use it: qwenimg PROMPT {self.use}")
        return description

    def describe_similar(self, header: Header) -> Description | None:
        return None


# Parts that several families have

KL_VAE = PartFile(
    option="vae",
    title=f"a VAE for latents of {kl_vae.FLUX_1.latent_channels} channels",
    use="-m MODEL --vae FILE",
    layouts=kl_vae_names.LAYOUTS,
    is_in=lambda header: vae_files.latent_channels(header.tensors) == kl_vae.FLUX_1.latent_channels,
    like=lambda: kl_vae.FLUX_1,
)
KL_VAE_4 = PartFile(
    option="vae",
    title="a VAE for latents of 4 channels",
    network=kl_vae.NETWORK,
    is_in=lambda header: header.format != "GGUF" and vae_files.latent_channels(header.tensors) == 4,
    is_described=False,  # by Stable Diffusion's row
)
_TEXT = "-m MODEL --text-encoder FILE"
QWEN3 = PartFile(
    option="text_encoder",
    title="Qwen3, a text encoder",
    use=_TEXT,
    layouts=language_names.QWEN3,
    # Qwen3-VL's language model has its names too
    is_in=lambda header: (
        language_names.QWEN3.find_in(header) is not None and language_names.QWEN3_VL.find_in(header) is None
    ),
)
QWEN3_VL = PartFile(
    option="text_encoder",
    title=lambda header: (
        "Qwen3-VL, a text encoder, "
        f"{'with' if any(key.startswith(qwen.TOWER) for key in header.tensors) else 'without'} its vision tower"
    ),
    layouts=language_names.QWEN3_VL,
)


def _is_mistral(header: Header, layouts: Layouts, foreign: int) -> bool:
    """Return whether a file with this header may be a language model of Mistral's: no name tells one from another, so
    it is not if it is `foreign` wide, as the other is. Of GGUF files that are called LLaMA's those are that have as
    many tokens as Mistral."""
    naming = layouts.find_in(header)
    if naming is None or (gguf.architecture(header) == "llama" and TOKENS not in header.tensors[EMBEDDING].shape):
        return False
    norm = layouts.place(naming.layout, "layers.0.input_layernorm.weight", None).key
    stored = header.tensors.get(naming.prefix + norm)
    return stored is None or stored.shape != (foreign,)


EMBEDDING, TOKENS = "token_embd.weight", 131_072
_mistral = partial(PartFile, option="text_encoder", use=_TEXT)
MINISTRAL_3 = _mistral(
    title="Ministral 3, a text encoder",
    layouts=language_names.MINISTRAL_3,
    is_in=lambda header: _is_mistral(header, language_names.MINISTRAL_3, 5120),
    like=lambda: known_configs.read("ernie-image", "text_encoder", language_names.MINISTRAL_3.network),
)
MISTRAL_SMALL_3 = _mistral(
    title="Mistral Small 3, a text encoder",
    layouts=language_names.MISTRAL_SMALL_3,
    is_in=lambda header: _is_mistral(header, language_names.MISTRAL_SMALL_3, 3072),
    like=lambda: known_configs.read("flux2-dev", "text_encoder", language_names.MISTRAL_SMALL_3.network),
)
GEMMA_2 = PartFile(
    option="text_encoder",
    title="Gemma 2, a text encoder",
    use=_TEXT,
    layouts=language_names.GEMMA_2,
    like=lambda: known_configs.read("lumina", "text_encoder", language_names.GEMMA_2.network),
)
FLUX_2_VAE = PartFile(option="vae", title="FLUX.2's VAE", use="-m MODEL --vae FILE", layouts=flux2_vae_names.LAYOUTS)
QWEN_VAE = PartFile(
    option="vae", title="Qwen-Image's VAE", network=qwen_vae.NETWORK, is_in=vae_files.is_qwen_vae, is_described=False
)
T5 = PartFile(option="text_encoder", title="T5, a text encoder", use=_TEXT, layouts=t5_names.LAYOUTS, is_alone=True)
UMT5 = PartFile(
    option="text_encoder",
    title="UMT5, a text encoder",
    use=_TEXT,
    layouts=t5_names.UMT5,
    like=lambda: known_configs.read("auraflow", "text_encoder", t5_names.UMT5.network),
)


_CLIP = partial(PartFile, option="text_encoder", title=clip_files.title, use=_TEXT, layouts=clip_names.LAYOUTS)
CLIP = _CLIP(is_alone=True)
CLIP_L = _CLIP(is_in=lambda header: clip_files.width_alone(header.tensors) == 768)
CLIP_G = _CLIP(is_in=lambda header: clip_files.width_alone(header.tensors) == 1280)
