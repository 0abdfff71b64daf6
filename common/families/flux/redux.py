"""FLUX.1 Redux: its files, its stages in a run, and the pictures of a request as text tokens.

As diffusers' FluxPriorReduxPipeline does it, with FLUX.1's own number of text tokens:
- a picture's 729 tokens follow those of the prompt. With its scale (`prompt_embeds_scale`) both are multiplied, the
  prompt's states too; the pooled text has a scale of its own (`pooled_prompt_embeds_scale`), 1 unless it is given;
- several pictures do not follow each other: their texts are added up, so that a prompt counts once for each;
- without a prompt the states and the pooled text are zeros, and no text encoder is needed;
- the negative prompt sees no picture.

Encoder and Redux are computed once for a picture, before the text encoders, and freed. The tokens of the last pictures
are kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.base.config import read_json
from qwenimg.common.base.errors import UsageError
from qwenimg.common.base.latest import drop_oldest
from qwenimg.common.base.safe_files import bad, closed_on_error, is_file, is_folder
from qwenimg.common.base.shape import Shape
from qwenimg.common.families.flux.known import REDUX
from qwenimg.common.formats.files import first
from qwenimg.common.formats.headers import open_weights
from qwenimg.common.formats.stored import Header
from qwenimg.common.networks.encoders import redux, siglip_vision
from qwenimg.common.networks.encoders.redux import WIDER, ReduxConfig
from qwenimg.common.networks.encoders.siglip_vision import SO400M, SiglipVisionConfig
from qwenimg.common.numbers.noise import sha256
from qwenimg.common.parts import image_encoders
from qwenimg.common.parts.components import component, on_paper, read_config
from qwenimg.common.parts.control_net import Controller, Encoders, PictureAdapter, Redux, check_sizes
from qwenimg.common.parts.image_encoders import NeededEncoder
from qwenimg.common.pictures import patches, preprocessors
from qwenimg.common.pictures.pixels import Uint8
from qwenimg.common.pipeline.adapter_uses import adapter_uses
from qwenimg.common.request.control_text import Control
from qwenimg.common.request.request import Request
from qwenimg.common.runtime.checkpoint import Checkpoint, Component
from qwenimg.common.runtime.residents import Residents
from qwenimg.common.runtime.stages import Split, Stage
from qwenimg.common.weights.keys import Place, plan_places

FILE = "flux1-redux-dev.safetensors"
ENCODER = "SigLIP so400m (sigclip_vision_patch14_384)"
EMBEDDER = "image_embedder"  # the folder of a Redux in that of its pipeline
KEPT = 16  # pictures whose tokens are kept, 12 MB each
_TITLE = "FLUX.1 Redux"
Float32 = NDArray[np.float32]
Key: TypeAlias = tuple[str, Shape, str]  # the name of a Redux, the shape and the hash of a picture


# Files


def is_in(header: Header) -> bool:
    """Return whether a file is a Redux."""
    return header.format != "GGUF" and redux.is_in(header.tensors)


def is_encoder(header: Header) -> bool:
    """Return whether a file has the image encoder of a Redux."""
    return header.format == "safetensors" and siglip_vision.is_in(header.tensors)


def is_at(path: Path) -> bool:
    """Return whether a Redux is at `path`: in the file, the folder or that of its pipeline. Raises ModelError."""
    if is_folder(path):
        return is_folder(path / EMBEDDER) or is_file(path / FILE) or _is_embedder(path / "config.json")
    header = open_weights(path)
    header.file.close()
    return is_in(header)


def _is_embedder(config: Path) -> bool:
    return is_file(config) and read_json(config).get("_class_name") == redux.CLASS_NAME


def open_redux(path: Path, checkpoint: Checkpoint) -> Controller:
    """Open the Redux in the file or folder `path`, or in the folder of its pipeline, for a model. Its encoder is found
    later. Raises ModelError."""
    part = open_file(path)
    with closed_on_error(part.plan):
        wide = checkpoint["transformer"].config.joint_attention_dim
        check_sizes(path, "transformer", {"channels in a text": (part.config.txt_in_features, wide)})
    return Redux(name="", component=part, encoder=None)


def open_file(path: Path) -> Component:
    """Open the Redux in the file or folder `path`, or in the folder of its pipeline. Raises ModelError."""
    file, config = _found(path)
    header = open_weights(file)
    with closed_on_error(header.file):
        if not is_in(header):
            raise bad(path, f"has no tensors of {_TITLE} (redux_up, redux_down), by which FLUX.1 takes pictures")
        shown = image_encoders.config_shown(header, file, redux.config_of)
        manifest = redux.manifest(config or shown)
        if unknown := sorted(header.tensors.keys() - manifest.keys()):
            raise bad(file, f"holds unknown tensor {first(unknown)}: it is no {_TITLE} as it is published")
        places = {name: Place(name) for name in manifest}
        plan = plan_places(header, _TITLE, places, manifest, redux.NETWORK.uses(config or shown))
        return component(redux.NETWORK, config or shown, plan)


def weights(path: Path) -> Path:
    """Return the folder or file of the Redux in the folder `path` of its pipeline, any other path unchanged."""
    folder = path / EMBEDDER if is_folder(path / EMBEDDER) else path
    return path / FILE if not is_file(folder / "config.json") and is_file(path / FILE) else folder


def _found(path: Path) -> tuple[Path, ReduxConfig | None]:
    """Return the file of the Redux at `path`, and its configuration if it has one. Raises ModelError."""
    if not is_folder(path):
        return path, None
    folder = weights(path)
    if folder == path / FILE:
        return folder, None
    if not is_file(folder / "config.json"):
        raise bad(path, f"is no folder of {_TITLE}: it has neither {EMBEDDER} nor {FILE}")
    config: ReduxConfig = read_config(redux.NETWORK, folder)
    return folder / "diffusion_pytorch_model.safetensors", config


def published(name: str) -> Controller | None:
    """Return the Redux known as `name` with its image encoder, without their files; None for another name."""
    if name != REDUX.name:
        return None
    adapter, encoder = (
        on_paper(network, config, "bfloat16")
        for network, config in ((redux.NETWORK, ReduxConfig()), (siglip_vision.NETWORK, SO400M))
    )
    return Redux(name="", component=adapter, encoder=encoder)


def check_published(name: str, net: Controller, checkpoint: Checkpoint) -> None:
    """Raise ModelError for the Redux known as `name` if it was made for another transformer."""
    if isinstance(net, Redux):
        wide = checkpoint["transformer"].config.joint_attention_dim
        check_sizes(Path(name), "transformer", {"channels in a text": (net.component.config.txt_in_features, wide)})


def with_encoder(net: PictureAdapter, encoders: Encoders) -> PictureAdapter:
    """Return a Redux with the first of `encoders` that is its own. Raises ModelError."""
    needed = NeededEncoder(
        title=ENCODER,
        result="states",
        size=net.component.config.redux_dim,
        of=lambda encoder: encoder.hidden_size,
        open=open_encoder,
    )
    return image_encoders.with_encoder(net, encoders, needed)


def open_encoder(path: Path) -> Component:
    """Open the image encoder in a folder, or in a file alone, as ComfyUI has it. Raises ModelError."""
    return image_encoders.open_encoder(siglip_vision.NETWORK, path, siglip_vision.config_of)


# For `info`


def about(config: ReduxConfig) -> list[str]:
    """Return the lines of a Redux: its model and its encoder."""
    return [
        f"type: for FLUX.1, with {config.txt_in_features} channels in a text",
        f"image encoder: {ENCODER}, states of {config.redux_dim} numbers",
    ]


def about_encoder(config: SiglipVisionConfig) -> list[str]:
    """Return the line of an image encoder: its type and size."""
    known = "so400m-patch14-384, of FLUX.1 Redux" if config == SO400M else "of another size"
    return [f"type: SigLIP {known}, states of {config.hidden_size} numbers"]


# In a run


@dataclass(frozen=True)
class SeenPicture:
    """A picture of a request that is text."""

    net: Redux
    control: Control
    scale: float  # of its tokens and of the prompt's states
    pooled: float  # of the pooled text

    @cached_property
    def picture(self) -> Uint8:
        """The picture [H, W, 3] after its preprocessor."""
        assert self.control.picture is not None
        preprocess = preprocessors.PREPROCESSORS.get(self.control.preprocessor)
        return self.control.picture if preprocess is None else preprocess(self.control.picture)

    @cached_property
    def key(self) -> Key:
        """The key of its tokens, which depend on nothing else."""
        return self.net.name, self.picture.shape, sha256(self.picture)

    @property
    def count(self) -> int:
        """The number of its tokens."""
        assert self.net.encoder is not None
        config: SiglipVisionConfig = self.net.encoder.config
        return config.patches


class PictureTexts:
    """The pictures of requests as text tokens, of one model."""

    def __init__(self, residents: Residents):
        self.residents, self.runtime = residents, residents.runtime
        self._kept: dict[Key, Float32] = {}

    def seen(self, request: Request, nets: Mapping[str, Controller]) -> list[SeenPicture]:
        """Return the pictures of a request that are text. Raises UsageError for encoders that do not go together."""
        controls = [one for one in request.controls if isinstance(nets[one.network], Redux)]
        seen = []
        for use in adapter_uses(controls, nets):
            net = nets[use.control.network]
            assert isinstance(net, Redux)
            scale, pooled = net.scales(use.control.scale, use.control.parts)
            for control in (controls[number] for number in use.pictures):
                seen.append(SeenPicture(net, control, scale, pooled))
        if len({one.count for one in seen}) > 1:
            raise UsageError("--ip-adapter: the image encoders make different numbers of tokens; give one for all")
        return seen

    def stages(self, seen: Sequence[SeenPicture]) -> list[Stage]:
        """Return the stages that make the tokens of pictures, but for those that are kept."""
        return [stage for net, missing in self._missing(seen) for stage in self._stages_of(net, len(missing))]

    def tokens(self, seen: Sequence[SeenPicture]) -> Float32:
        """Return the sum of the pictures' tokens [1 T C], each times its scale."""
        for net, missing in self._missing(seen):
            encoding, embedding = self._stages_of(net, len(missing))
            assert net.encoder is not None
            config: SiglipVisionConfig = net.encoder.config
            squares = [patches.stretched_square(one.picture, config.image_size) for one in missing]
            values = np.concatenate([patches.in_patches(one, config.patch_size) for one in squares])
            states = self._computed(encoding, "image encoder", lambda encoder, v=values: encoder.encode(v))
            made = self._computed(embedding, _TITLE, lambda network, s=states: network.tokens(s))
            self._kept |= {one.key: rows[None] for one, rows in zip(missing, made, strict=True)}
        self._kept |= {key: self._kept.pop(key) for key in {one.key: None for one in seen}}  # the last used last
        drop_oldest(self._kept, KEPT)
        first, *more = (np.float32(one.scale) * self._kept[one.key] for one in seen)
        return np.asarray(sum(more, start=first), np.float32)

    def forget(self) -> None:
        """Drop the kept tokens."""
        self._kept.clear()

    def _missing(self, seen: Sequence[SeenPicture]) -> list[tuple[Redux, list[SeenPicture]]]:
        """Return the pictures whose tokens are not kept, each once, by their Redux."""
        new = {one.key: one for one in seen if one.key not in self._kept}
        nets = dict.fromkeys(one.net for one in new.values())
        return [(net, [one for one in new.values() if one.net is net]) for net in nets]

    def _computed(self, stage: Stage, title: str, compute: Any) -> Float32:
        """Return the result of `compute` for the network of `stage`, which is freed."""
        network, _ = self.residents.acquire(stage)
        with self.runtime.clock.timed("encode"):
            made = compute(network)
            self.runtime.check_finite(made, title, "text", partial(compute, network))
            values = self.runtime.engine.numpy(made).astype(np.float32)
        del network, made
        self.runtime.engine.release()
        return values

    def _stages_of(self, net: Redux, count: int) -> list[Stage]:
        """Return the stages that encode `count` pictures at once and make tokens of them."""
        assert net.encoder is not None
        config, tokens = net.component.config, count * net.encoder.config.patches
        widths = config.redux_dim + 2 * WIDER * config.txt_in_features + config.txt_in_features
        embedding = Stage(
            name="adapter",
            resident=net.name,
            component=net.component,
            splits=(Split(activations=self.runtime.call_bytes(net.component, tokens * widths * 4)),),
            keeps=False,
        )
        return [image_encoders.encoding(self.runtime, net, count, net.encoder.config.patches, keeps=False), embedding]
