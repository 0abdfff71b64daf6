"""LoRAs with which FLUX.1 dev sees a control picture, as FLUX.1 Canny and Depth do.

They widen `x_embedder` to twice the channels: the image's, and behind them those of the picture, for which the model's
own weight is zero. They have biases, and weights of the norms of queries and keys, which take the place of the model's.
"""

from __future__ import annotations

from pathlib import Path

from qwenimg.common.base.errors import UsageError
from qwenimg.common.base.safe_files import bad, closed_on_error
from qwenimg.common.families.flux import known
from qwenimg.common.families.flux.variants import TEXT, VARIANTS
from qwenimg.common.formats.files import find_files
from qwenimg.common.parts import lora_layers
from qwenimg.common.parts.control_net import Controller, ControlLora
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.weights.loras.lora import fit, read_lora, widened


def published(name: str) -> Controller | None:
    """Return the LoRA known as `name`, without its file; None for another name."""
    return ControlLora(name="", file=None, samples=True) if name in {one.name for one in known.CONTROL_LORAS} else None


def check_model(name: str, lora: Controller | None, checkpoint: Checkpoint) -> None:
    """Raise UsageError for a model that takes no such LoRA."""
    if checkpoint.variant != TEXT.name:
        title = VARIANTS[checkpoint.variant].title
        raise UsageError(f"--control FILE=PICTURE is for FLUX.1 dev; FLUX.1 {title} has inputs of its own")


def open_control(path: Path, checkpoint: Checkpoint) -> Controller:
    """Open the LoRA in the folder or file `path` for a model. Raises ModelError and UsageError."""
    check_model(path.name, None, checkpoint)
    lora = read_lora(find_files(path).files[0])
    with closed_on_error(lora):
        names = lora_layers.names(checkpoint)
        if not widened(fit(lora, names), names):
            raise bad(lora.file.path, "is a LoRA that sees no picture: give it with --lora")
        return ControlLora(name="", file=lora.file, samples=True)
