"""The image encoders of adapters: found among files by their sizes, and their stage in a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.safe_files import bad, is_folder
from qwenimg.common.base.shape import Shape
from qwenimg.common.base.text import clean
from qwenimg.common.formats.headers import open_header
from qwenimg.common.formats.stored import Header
from qwenimg.common.memory.memory import scores
from qwenimg.common.networks.network import Network
from qwenimg.common.parts.components import open_component, read_config
from qwenimg.common.parts.control_net import Encoders, PictureAdapter
from qwenimg.common.runtime.checkpoint import Component
from qwenimg.common.runtime.runtime import Runtime
from qwenimg.common.runtime.stages import Split, Stage

C = TypeVar("C")


@dataclass(frozen=True, kw_only=True)
class NeededEncoder:
    """The encoder that an adapter takes."""

    title: str
    result: str  # that the adapter takes of it, such as states
    size: int  # the numbers of one
    of: Callable[[Any], int]  # from an encoder's configuration, the numbers of its results
    open: Callable[[Path], Component]  # a folder or file. Raises ModelError


def with_encoder(net: PictureAdapter, encoders: Encoders, needed: NeededEncoder) -> PictureAdapter:
    """Return an adapter with the first of `encoders` that is its own. Raises ModelError."""
    needs, tried = clean(net.path), list[str]()
    for path in encoders.paths:
        try:
            part = needed.open(path)
        except ModelError:
            if encoders.given:
                raise
            continue
        if (has := needed.of(part.config)) == needed.size:
            return replace(net, encoder=part)
        part.plan.close()
        tried.append(f"{clean(path.name, 60)} has {needed.result} of {has}")
    if encoders.given:
        taken = f"{needed.result} of {needed.size} numbers, of {needed.title}"
        raise ModelError(f"{needs}: takes {taken}; --ip-encoder {tried[0]}")
    seen = f" ({clean('; '.join(tried), 100)})" if tried else ""
    raise ModelError(
        f"{needs}: needs its image encoder, {needed.title}, and none is beside it or in the folders of "
        f"--models-dir{seen}; give it as --ip-encoder FILE"
    )


def open_encoder(network: Network, path: Path, config_of: Callable[[dict[str, Shape]], Any]) -> Component:
    """Open the image encoder in a folder, or in a file alone, as ComfyUI has it. config_of: returns the configuration
    that the shapes of a file's tensors show. Raises ModelError."""
    if is_folder(path):
        config = read_config(network, path)
    else:
        header = open_header(path)
        header.file.close()
        config = config_shown(header, path, config_of)
    return open_component(network, path, config, "image encoder")


def config_shown(header: Header, path: Path, config_of: Callable[[dict[str, Shape]], C]) -> C:
    """Return the configuration that the shapes of the tensors in the file `path` show. Raises ModelError."""
    try:
        return config_of({key: tensor.shape for key, tensor in header.tensors.items()})
    except ModelError as error:
        raise bad(path, str(error)) from None


def encoding(runtime: Runtime, net: PictureAdapter, count: int, tokens: int, *, keeps: bool) -> Stage:
    """Return the stage that encodes `count` pictures of `tokens` states each at once. keeps: the encoder stays in
    memory for later stages."""
    assert net.encoder is not None
    config = net.encoder.config
    widths = 2 * config.intermediate_size + 8 * config.hidden_size
    limit = runtime.engine.workspace.score_bytes
    activations = count * tokens * widths * 4 + scores(config.num_attention_heads, count, tokens, limit)
    file = next(iter(net.encoder.plan.files), None)
    return Stage(
        name="pictures",
        resident=f"image encoder {clean(file.path.name, 60) if file else net.name}",
        component=net.encoder,
        splits=(Split(activations=runtime.call_bytes(net.encoder, activations)),),
        keeps=keeps,
    )
