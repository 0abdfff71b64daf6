"""The control networks and LoRAs of requests: found, opened once, and kept for later images."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path, PurePath
from typing import Literal

from qwenimg.common.base.errors import UsageError
from qwenimg.common.base.hf_cache import REPO
from qwenimg.common.base.latest import drop_oldest
from qwenimg.common.base.text import clean
from qwenimg.common.formats.fingerprint import fingerprint
from qwenimg.common.numbers.noise import sha256
from qwenimg.common.parts.control_net import Controller, ControlLora, OwnInput, PictureAdapter, Redux, is_seen
from qwenimg.common.pipeline.adapter_uses import adapter_uses
from qwenimg.common.pipeline.models.diffusion_model import DiffusionModel
from qwenimg.common.request import control_text
from qwenimg.common.request.control_text import Control
from qwenimg.common.request.lora_text import Lora
from qwenimg.common.request.request import Request

KEPT = 2 * control_text.MOST  # networks and LoRAs
INPAINT = "inpaint"  # the kind of a picture that is painted within a mask
OpenNet = Callable[[Path], Controller]
_WHOLE = "leave out START-END and masks"


class Controls:
    """The control networks of one model, and the LoRAs by which it keeps to a picture."""

    def __init__(
        self,
        open_net: OpenNet | None = None,
        find: Callable[[str], Path] = Path,
        refusal: Callable[[], str] = lambda: "",
        own: bool = False,
    ) -> None:
        """Set the parts. open_net: None for a model of a family without control networks; `refusal` says so. find:
        returns the folder or file of a network by the user's name for it. own: the model itself sees a picture."""
        self._open_net, self._find, self._refusal = open_net, find, refusal
        self._own = OwnInput() if own else None
        self._opened: dict[str, tuple[Path, Controller]] = {}  # by their names in requests, the last used last
        self._taken: set[str] = set()  # names of components that were opened

    @property
    def are_taken(self) -> bool:
        """True for a model of a family with control networks."""
        return self._open_net is not None

    def nets(self, request: Request) -> dict[str, Controller]:
        """Return the networks and LoRAs of a request by their names in it. Only headers are read. Raises ModelError and
        UsageError."""
        return {one.network: self._open(one.network) for one in request.controls}

    def loras(self, request: Request) -> tuple[tuple[Lora, ...], str]:
        """Return a request's LoRAs and those by which it is controlled, at the scales of their controls, and its
        `lora_mode`. Raises ModelError and UsageError."""
        nets = self.nets(request)
        named = ((nets[one.network], one.scale) for one in request.controls)
        more = (Lora(str(net.path), scale) for net, scale in named if isinstance(net, ControlLora) and net.path)
        return (*request.loras, *more), request.lora_mode

    def prompt(self, text: str, controls: Sequence[Control]) -> str:
        """Return a prompt with the start that the LoRAs of `controls` expect, unless it begins so. Raises ModelError
        and UsageError."""
        for one in controls:
            net = self._open(one.network)
            if one.scale and not text.startswith(net.prompt):
                text = net.prompt + text
        return text

    def prompted(self, request: Request) -> Request:
        """Return `request` with the start of its prompt that its LoRAs expect. Raises ModelError and UsageError."""
        return replace(request, prompt=self.prompt(request.prompt, request.controls)) if request.controls else request

    def placed(self, request: Request) -> Request:
        """Return `request` with a note on each control whose network sees its picture apart from the image. Raises
        ModelError and UsageError."""
        if not request.controls:
            return request
        nets = self.nets(request)
        apart = [(one, isinstance(nets[one.network], PictureAdapter)) for one in request.controls]
        placed = (replace(one, whole=whole and one.preprocessor != "mask") for one, whole in apart)
        return replace(request, controls=tuple(placed))

    def give(self, model: DiffusionModel, request: Request) -> None:
        """Open the control networks of a request and set them on `model`, in place of earlier ones. Raises ModelError
        and UsageError."""
        if not self.are_given(model, request):
            model.control(self.nets(request))

    def are_given(self, model: DiffusionModel, request: Request) -> bool:
        """Return whether `model` has the networks of a request, and no others. Raises ModelError and UsageError."""
        return _names(self.nets(request)) == _names(model.nets)

    def has_text(self, request: Request) -> bool:
        """Return whether a picture of a request is text, so that it needs no prompt. Raises ModelError and
        UsageError."""
        return any(isinstance(net, Redux) for net in self.nets(request).values())

    def check(self, request: Request) -> None:
        """Raise UsageError and ModelError for controls that the model does not take."""
        nets = self.nets(request)
        _check_adapters(request.controls, nets)
        _check_seen([one for one in request.controls if is_seen(nets[one.network])], nets)
        for one in request.controls:
            net = nets[one.network]
            check_kind(net, one)
            if mask_of(net, one) == "needed" and request.mask is None:
                raise UsageError(f"{_told(one)} paints within a mask: give it with --mask")
            if net.fills and request.mask is not None and request.image is None:
                raise UsageError(f"{_told(one)} sees the picture to paint in beside its own: give it with -i too")
        masked = any(mask_of(nets[one.network], one) != "none" for one in request.controls)
        if request.mask is not None and request.image is None and not masked:
            raise UsageError(
                "a mask needs the image that it belongs to: give it with -i, or to an inpainting ControlNet"
            )

    def warnings(self, request: Request, steps: int) -> list[str]:
        """Return a line for each control that changes nothing."""
        lines = []
        for one in request.controls:
            first, last = one.steps(steps)
            why = "at scale 0" if one.scale == 0 else f"no whole step of {steps} lies in {one.start:g}-{one.end:g}"
            if first == last or (one.scale == 0 and not isinstance(self._open(one.network), Redux)):
                lines.append(f"{_told(one)} has no effect: {why}")
        return lines

    def recorded(self, request: Request) -> dict[str, object]:
        """Return the entries of a recipe: names without folders, fingerprints of the networks' files, hashes of the
        pictures."""
        if not request.controls:
            return {}
        asked = request.controls
        names = [
            f"{f'{label(one.network)}=' * bool(one.network)}{f'{one.preprocessor}@' * bool(one.preprocessor)}"
            f"{PurePath(one.file).name}{one.numbers}"
            for one in asked
        ]
        return {
            "control": "; ".join(names),
            "control_fingerprints": [self.fingerprint(one.network) for one in asked],
            "control_sha256": [sha256(picture) for picture in request.control_pictures],
        }

    def fingerprint(self, name: str) -> str:
        """Return the fingerprint of the files of the network or LoRA `name`. Raises ModelError and UsageError."""
        return fingerprint(self._open(name).files)

    def hashes(self, request: Request) -> dict[str, object]:
        """Return the fingerprint of each control network's files, by its name in messages. Raises ModelError and
        UsageError."""
        return {f"--control {clean(name, 60)}": self.fingerprint(name) for name in self.nets(request)}

    def close(self) -> None:
        for _, net in self._opened.values():
            net.close()
        self._opened.clear()

    def check_taken(self, name: str) -> None:
        """Raise UsageError for the control `name` of a model that takes none."""
        if not name and self._own is not None:
            return
        if not name:
            raise UsageError("--control PICTURE is for a model that sees one itself; here write NETWORK=PICTURE")
        if self._open_net is None:
            raise UsageError(f"--control {clean(name, 60)}: {self._refusal()}")

    def _open(self, name: str) -> Controller:
        self.check_taken(name)
        if not name and self._own is not None:
            return self._own
        assert self._open_net is not None
        path = self._find(name)
        before = self._opened.pop(name, None)
        if before is None or before[0] != path or any(file.is_replaced() for file in before[1].files):
            before = path, self._named(self._open_net(path), name)
        self._opened[name] = before
        drop_oldest(self._opened, KEPT)  # not closed here: weights may be read from it again
        return before[1]

    def _named(self, net: Controller, name: str) -> Controller:
        """Return `net` with a name that no other network has or had, as it may still be in memory."""
        kind = "ip-adapter" if isinstance(net, PictureAdapter) else "controlnet"
        plain = f"{kind} {PurePath(label(name)).name.removesuffix('.safetensors')}"
        unique = next(each for i in count(1) if (each := _numbered(plain, i)) not in self._taken)
        self._taken.add(unique)
        return replace(net, name=unique)


def mask_of(net: Controller, control: Control) -> Literal["none", "optional", "needed"]:
    """Return whether a control by `net` takes a mask of its picture."""
    return "needed" if net.kinds and control.kind == INPAINT else net.mask


def check_kind(net: Controller, control: Control) -> None:
    """Raise UsageError for a control whose kind of picture its network does not know, or that lacks one."""
    told = _told(control)
    if net.kinds and control.kind_among(net.kinds) not in net.kinds:
        what = f"{control.preprocessor}@ is none" if control.preprocessor else "its picture has none"
        raise UsageError(f"{told} needs a kind of picture, and {what}: write KIND@PICTURE, of {', '.join(net.kinds)}")
    if not net.kinds and control.preprocessor in control_text.KINDS:
        kind = control.preprocessor
        raise UsageError(f"{told} is for pictures of one kind: make that of {kind} elsewhere, and leave out {kind}@")


def _check_seen(controls: Sequence[Control], nets: Mapping[str, Controller]) -> None:
    """Raise UsageError for `controls` whose pictures the denoiser itself sees that cannot go together, or that hold for
    a part of the steps, or in part where the model was not changed by a LoRA."""
    if len(controls) > 1:
        raise UsageError(
            f"--control: the model itself sees the pictures of {len(controls)} controls (by a LoRA, or as its own "
            "input); one is taken, beside networks"
        )
    for one in controls:
        what = "is a LoRA, which" if isinstance(nets[one.network], ControlLora) else "is the model's own input, which"
        if (one.start, one.end) != (0, 1):
            raise UsageError(f"{_told(one)} {what} holds for all steps: leave out START-END")
        if one.scale != 1 and not isinstance(nets[one.network], ControlLora):
            raise UsageError(f"{_told(one)} {what} has no scale: leave out :{one.scale:g}")


def _told(control: Control) -> str:
    return f"--control {clean(control.network or control.file, 60)}"


def _check_adapters(controls: Sequence[Control], nets: Mapping[str, Controller]) -> None:
    """Raise UsageError for controls that have what only IP-Adapters take, and for further pictures and masks that
    belong to none."""
    for one in controls:
        net, told = nets[one.network], _told(one)
        if isinstance(net, PictureAdapter):
            if isinstance(net, Redux) and ((one.start, one.end) != (0, 1) or one.preprocessor == "mask"):
                raise UsageError(f"{told} makes text of its picture, for all steps and the whole image: {_WHOLE}")
            try:
                net.scales(one.scale, one.parts)
            except UsageError as error:
                raise UsageError(f"{told}: {error}") from None
        elif one.parts or one.preprocessor in control_text.ROLES:
            raise UsageError(f"{told} is no IP-Adapter: it takes one picture without a mask, and one scale")
        if one.preprocessor in control_text.ROLES and (one.scale_text, one.start, one.end) != ("1", 0, 1):
            raise UsageError(f"{told}: the scale and the steps stand behind its first picture")
    for use in adapter_uses(controls, nets):
        if use.masks and len(use.masks) != len(use.pictures):
            raise UsageError(
                f"--control {clean(use.control.network, 60)}: {len(use.masks)} masks for {len(use.pictures)} pictures; "
                "give one for each, or none"
            )


def _names(nets: Mapping[str, Controller]) -> dict[str, str]:
    return {name: net.name for name, net in nets.items()}


def _numbered(name: str, number: int) -> str:
    return name if number == 1 else f"{name} ({number})"


def label(name: str) -> str:
    """Return a recipe's name for the network `name`: a hub id unchanged, or the last name of a path."""
    is_hub_id = re.fullmatch(REPO, name) is not None and not os.path.lexists(name)
    return clean(name if is_hub_id else PurePath(name).name, 100)
