"""The control pictures, the embeddings and the mask of a recorded run: read from the user's files, kept in a passport,
pictures at the size at which the run sees them, and given to a run of another machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from qwenimg.common.base.errors import UsageError
from qwenimg.common.base.text import clean
from qwenimg.common.formats.fingerprint import fingerprint
from qwenimg.common.parity.passport.passport import RecordedControl, RecordedImage
from qwenimg.common.parity.sample import called
from qwenimg.common.parts.control_net import IPAdapter, PictureAdapter, Redux, networks
from qwenimg.common.pictures import input, pixels
from qwenimg.common.pipeline.controls import label
from qwenimg.common.pipeline.models.diffusion_model import DiffusionModel
from qwenimg.common.pipeline.pipeline import Pipeline
from qwenimg.common.request import coerce
from qwenimg.common.request.control_text import Control
from qwenimg.common.request.embedding_text import Embedding
from qwenimg.common.request.lora_text import Lora
from qwenimg.common.request.request import Request, request_of
from qwenimg.common.runtime.checkpoint import Checkpoint, Component

CONTROL, MASK, EMBEDDING = "control", "mask", "embedding"
FILES = ("lora", CONTROL, MASK, EMBEDDING)
"""The keywords of a call that are not among the numbers of a passport."""
_NAMED = "picture"  # the file that a control of a call names: its pixels are given beside it


def read(controls: Sequence[Control], mask: Path | None, width: int, height: int) -> tuple[dict[str, Any], list[str]]:
    """Return the keywords of a call of width x height for `controls` and the file `mask`, and a line for each
    conversion of a picture. Without a control, the mask belongs to a picture of `sample`. Raises UsageError, and
    ModelError for a file."""
    asked, notes = dict[str, Any](), list[str]()
    if controls:
        pictured, notes = coerce.controls(tuple(controls))
        fitted = (pixels.fit(one.picture, width, height) for one in pictured)  # type: ignore[arg-type]
        asked = {CONTROL: tuple(replace(one, picture=fit) for one, fit in zip(pictured, fitted, strict=True))}
    if mask is not None:
        asked |= {} if controls else {"pictures": 1}
        like = asked[CONTROL][0].picture if controls else called(asked)["image"][0]
        asked[MASK], lines = input.read_mask(mask, like)
        notes += lines
    return asked, notes


def weights(pipe: Pipeline, asked: Mapping[str, Any]) -> Checkpoint:
    """Return the weights of `pipe` with the LoRAs and the control networks of the call `asked`, which has no prompt in
    a trace of another program. Raises QwenimgError."""
    assert pipe.checkpoint is not None
    if "prompt" not in asked:
        return pipe.checkpoint.with_deltas(pipe.loras.deltas(asked.get("lora", ())))
    request = pipe.check(**called(asked))
    pipe.controls.give(pipe.model, request)
    deltas = pipe.loras.deltas(*pipe.controls.loras(request))
    return pipe.checkpoint.with_deltas(deltas).with_nets(control_networks(pipe.model))


def control_networks(model: DiffusionModel) -> dict[str, Component]:
    """Return the control networks of the model's present request, and its IP-Adapters or Reduxes with their image
    encoders, by their names in a passport."""
    adapters = [net for net in model.nets.values() if isinstance(net, PictureAdapter)]
    kinds = {
        "controlnet": [net.component for net in networks(model.nets.values())],
        "ip-adapter": [net.component for net in adapters if isinstance(net, IPAdapter)],
        "redux": [net.component for net in adapters if isinstance(net, Redux)],
        "image encoder": [net.encoder for net in adapters if net.encoder is not None],
    }
    different = {kind: {fingerprint(one.plan.files): one for one in some} for kind, some in kinds.items()}
    return {f"{kind} {i}": one for kind, some in different.items() for i, one in enumerate(some.values(), 1)}


def recorded_controls(pipe: Pipeline, asked: Mapping[str, Any]) -> tuple[RecordedControl, ...]:
    """Return the controls of the call `asked` of `pipe`."""
    request = pipe.check(**called(asked))
    return tuple(
        RecordedControl(
            name=label(one.network),
            fingerprint=pipe.controls.fingerprint(one.network),
            preprocessor=one.preprocessor,
            scale=one.scale,
            start=one.start,
            end=one.end,
            picture=picture,
            parts=dict(one.parts),
        )
        for one, picture in zip(request.controls, request.control_pictures, strict=True)
    )


def recorded_embeddings(request: Request, pipe: Pipeline) -> dict[str, str]:
    """Return the SHA-256 of the file of each embedding that the prompts of `request` name, by its name."""
    recorded: Any = pipe.embeddings.recorded(request, guided=True)
    names = (name.strip() for name in recorded.get(EMBEDDING, "").split(";"))
    return dict(zip(names, recorded.get("embedding_sha256", ()), strict=False))


def keywords(
    recorded: RecordedImage, loras: tuple[Lora, ...], networks: Sequence[str], embeddings: tuple[Embedding, ...] = ()
) -> dict[str, Any]:
    """Return the keywords of the recorded call. loras, networks, embeddings: its LoRAs, the name of the network of each
    of its controls, and its embeddings here."""
    asked = called(recorded.asked) | {"lora": loras, EMBEDDING: embeddings}
    if recorded.controls:
        asked[CONTROL] = tuple(
            Control(
                name,
                _NAMED,
                one.preprocessor,
                one.scale,
                one.start,
                one.end,
                tuple(one.parts.items()),
                picture=one.picture,
            )
            for name, one in zip(networks, recorded.controls, strict=True)
        )
    return asked if recorded.mask is None else asked | {MASK: recorded.mask}


def check_call(recorded: RecordedImage) -> None:
    """Raise UsageError if the pictures do not go together with the recorded call, or with each other."""
    asked = keywords(recorded, (), ["x"] * len(recorded.controls))
    size = (recorded.asked["height"], recorded.asked["width"])
    for one in recorded.controls:
        if one.picture.shape != (*size, 3):
            shown = f"{list(one.picture.shape)}, expected {[*size, 3]}"
            raise UsageError(f"the picture of control {clean(one.name, 40)!r} is {shown}")
    request_of(asked | ({"image": tuple(asked["image"])} if "image" in asked else {}))
