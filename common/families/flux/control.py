"""The files by which FLUX.1 sees a picture: ControlNets, Redux, and LoRAs for a control picture."""

from __future__ import annotations

from pathlib import Path

from qwenimg.common.base.safe_files import is_file
from qwenimg.common.families.file_kind import is_lora
from qwenimg.common.families.flux import control_lora, controlnet, redux
from qwenimg.common.formats.files import find_files
from qwenimg.common.formats.headers import peek
from qwenimg.common.parts.control_net import Controller, Redux
from qwenimg.common.runtime.checkpoint import Checkpoint


def open_control(path: Path, checkpoint: Checkpoint) -> Controller:
    """Open the ControlNet, the Redux or the LoRA in the folder or file `path` for a model. Raises ModelError and
    UsageError."""
    if redux.is_at(path):
        return redux.open_redux(path, checkpoint)
    control_lora.check_model(path.name, None, checkpoint)
    is_lora_at = not is_file(path / "config.json") and is_lora(peek(find_files(path).files[0]))
    return (control_lora.open_control if is_lora_at else controlnet.open_control)(path, checkpoint)


def published(name: str) -> Controller | None:
    """Return what is known as `name`, without its files; None for another name."""
    return redux.published(name) or controlnet.published(name) or control_lora.published(name)


def check_published(name: str, net: Controller, checkpoint: Checkpoint) -> None:
    """Raise ModelError or UsageError for what is known as `name` and the model does not take."""
    check = redux.check_published if isinstance(net, Redux) else control_lora.check_model
    check(name, net, checkpoint)
