"""Files of FLUX.1 Redux and of its image encoder, by their signs, and their description."""

from __future__ import annotations

from dataclasses import dataclass

from qwenimg.common.base.errors import ModelError
from qwenimg.common.families.description import Description, of_file
from qwenimg.common.families.flux import redux
from qwenimg.common.families.load_options import Prediction
from qwenimg.common.formats.stored import Header
from qwenimg.common.networks.encoders.siglip_vision import SO400M


@dataclass(frozen=True)
class ReduxFile:
    """A Redux in a file."""

    option: str = "ip_adapter"

    def reads(self, header: Header) -> bool:
        return redux.is_in(header)

    def opens(self, header: Header) -> bool:
        return False

    def describe(self, header: Header, prediction: Prediction | None) -> Description:
        form = "PyTorch, " if header.format == "PyTorch" else ""
        description = of_file(f"{form}FLUX.1 Redux, which makes text tokens of pictures", header)
        try:
            part = redux.open_file(header.file.path)
        except ModelError as error:
            description.faults.append(str(error))
            return description
        part.plan.close()
        description.lines[1:1] = [
            f"type: for FLUX.1, with {part.config.txt_in_features} channels in a text",
            f"image encoder: {redux.ENCODER}, states of {part.config.redux_dim} numbers",
        ]
        description.lines.append("use it: qwenimg PROMPT -m flux-dev --ip-adapter FILE --ip-image PICTURE")
        return description

    def describe_similar(self, header: Header) -> Description | None:
        return None


@dataclass(frozen=True)
class EncoderFile:
    """The image encoder of a Redux in a file."""

    option: str = "ip_encoder"

    def reads(self, header: Header) -> bool:
        return redux.is_encoder(header)

    def opens(self, header: Header) -> bool:
        return False

    def describe(self, header: Header, prediction: Prediction | None) -> Description:
        description = of_file("an image encoder (SigLIP)", header)
        try:
            part = redux.open_encoder(header.file.path)
        except ModelError as error:
            description.faults.append(str(error))
            return description
        part.plan.close()
        known = "so400m-patch14-384, of FLUX.1 Redux" if part.config == SO400M else "of another size"
        description.lines.insert(1, f"type: SigLIP {known}, states of {part.config.hidden_size} numbers")
        use = "qwenimg PROMPT -m flux-dev --ip-adapter REDUX --ip-image PICTURE --ip-encoder FILE"
        description.lines.append(f"use it: {use}")
        return description

    def describe_similar(self, header: Header) -> Description | None:
        return None
