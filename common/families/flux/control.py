"""The files by which FLUX.1 sees a picture: Redux, and LoRAs for a control picture."""

from __future__ import annotations

from pathlib import Path

from qwenimg.common.families.flux import control_lora, redux
from qwenimg.common.parts.control_net import Controller, Redux
from qwenimg.common.runtime.checkpoint import Checkpoint


def open_control(path: Path, checkpoint: Checkpoint) -> Controller:
    """Open the Redux or the LoRA in the folder or file `path` for a model. Raises ModelError and UsageError."""
    return (redux.open_redux if redux.is_at(path) else control_lora.open_control)(path, checkpoint)


def published(name: str) -> Controller | None:
    """Return the Redux or the LoRA known as `name`, without its files; None for another name."""
    return redux.published(name) or control_lora.published(name)


def check_published(name: str, net: Controller, checkpoint: Checkpoint) -> None:
    """Raise ModelError or UsageError for a Redux or a LoRA known as `name` that the model does not take."""
    check = redux.check_published if isinstance(net, Redux) else control_lora.check_model
    check(name, net, checkpoint)
