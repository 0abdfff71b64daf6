"""One part of a family's models in a file of its own, as a row: its signs in a header, and its description."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qwenimg.common.base.errors import ModelError
from qwenimg.common.families.description import Description, of_file, summary
from qwenimg.common.formats import gguf
from qwenimg.common.formats.stored import Header
from qwenimg.common.networks.encoders import qwen3
from qwenimg.common.networks.layout import Layouts
from qwenimg.common.networks.network import Network
from qwenimg.common.networks.vaes import kl_vae, kl_vae_names
from qwenimg.common.parts import vae_files
from qwenimg.common.parts.components import renaming
from qwenimg.common.parts.open_file import open_part

_ALL = "--transformer FILE --text-encoder FILE --vae FILE"


@dataclass(frozen=True, kw_only=True)
class PartFile:
    """One part in a file of its own. It has `layouts`, or `is_in`, or both."""

    title: Callable[[Header], str] | str  # for `info`
    network: Network
    use: str = _ALL  # the options that `info` names, with which a picture is drawn
    layouts: Layouts | None = None  # `info` opens the part by them, and names its faults
    is_in: Callable[[Header], bool] | None = None  # whether a file has the part; None: whether the layouts find it
    like: Callable[[], Any] | None = None  # the configuration for what no tensor shows; None: the network's defaults
    # From the path and the configuration, the variant of the model, for `info`
    variant: Callable[[Path, Any], str] | None = None

    def reads(self, header: Header) -> bool:
        """Return whether a file with this header has the part."""
        if self.is_in is not None:
            return self.is_in(header)
        return self.layouts is not None and self.layouts.find_in(header) is not None

    def describe(self, header: Header, part: str) -> Description:
        """Return the description of the `part` in a file with this header: its layout, its weights and its faults."""
        rename = renaming(self.network, self.network.config())
        whole = of_file(self._layout(header), header, lambda key: rename(key) in self.network.tables)
        if self.layouts is not None:
            try:
                like = self.like() if self.like else self.network.config()
                opened = open_part(self.layouts, header.file.path, like, part)
            except ModelError as error:
                whole.faults.append(str(error))
                return whole
            opened.plan.close()
            if self.variant is not None:
                whole.lines.insert(1, f"type: {self.variant(header.file.path, opened.config)}")
        whole.lines.append(f"use it: qwenimg PROMPT {self.use}")
        return whole

    def describe_similar(self, header: Header) -> Description | None:
        """Return the description of the similar model in a file with this header, which is not drawn with; or None."""
        other = self.layouts.similar_model(header.tensors) if self.layouts else None
        if other is None:
            return None
        return Description(lines=[f"layout: {other}", summary("file", header.tensors)], faults=[f"is {other}"])

    def _layout(self, header: Header) -> str:
        """Return the part and the layout of its names."""
        title = self.title if isinstance(self.title, str) else self.title(header)
        naming = self.layouts.find(header.tensors) if self.layouts else None
        names = f", {naming.layout.names}" if naming else ""
        prefix = f", behind {naming.prefix}" if naming and naming.prefix else ""
        return f"{'GGUF, ' if header.format == 'GGUF' else ''}{title}{names}{prefix}"


def part_of(files: Mapping[str, PartFile], header: Header) -> str | None:
    """Return the part of one of `files` in a file with this header; None for another file."""
    return next((part for part, file in files.items() if file.reads(header)), None)


# Parts that several families have

KL_VAE = PartFile(
    title=f"a VAE for latents of {kl_vae.FLUX_1.latent_channels} channels",
    network=kl_vae.NETWORK,
    use="-m MODEL --vae FILE",
    layouts=kl_vae_names.LAYOUTS,
    is_in=lambda header: vae_files.latent_channels(header.tensors) == kl_vae.FLUX_1.latent_channels,
    like=lambda: kl_vae.FLUX_1,
)
QWEN3 = PartFile(
    title="Qwen3, a text encoder",
    network=qwen3.NETWORK,
    use="-m MODEL --text-encoder FILE",
    is_in=lambda header: gguf.may_be(header, qwen3.NETWORK.architectures) and qwen3.is_in(header.tensors),
)
