"""The model that LoRA files are for: the one that the user names, else the first known model that takes them all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.safe_files import bad
from qwenimg.common.base.text import clean
from qwenimg.common.families import catalog, registry
from qwenimg.common.families.load_options import LoadOptions
from qwenimg.common.families.registry import OpenModel
from qwenimg.common.hub.open_model import open_files
from qwenimg.common.shapes import builtin
from qwenimg.common.weights.loras.lora import LoraFile, fit
from qwenimg.common.weights.loras.lora_names import Names


def known_models() -> Iterator[tuple[str, OpenModel]]:
    """Yield the known models by their names, as they are published, and the built-in one if it is here."""
    for name, known in catalog.KNOWN.items():
        if (model := registry.published(known)) is not None:
            yield name, model
    if builtin.present():
        yield builtin.NAME, registry.open_model(builtin.folder())


def model_for(loras: Sequence[LoraFile], options: LoadOptions) -> OpenModel:
    """Return the model of `options`, or the first known model that takes all of `loras`. Raises ModelError for LoRAs of
    different models, and of none that is known."""
    if options.model is not None:
        return open_files(options, planned=True)
    takers: list[dict[str, None]] = [{} for _ in loras]
    for name, model in known_models():
        names = model.family.lora_names(model.checkpoint)
        for lora, takes in zip(loras, takers, strict=True):
            if _fits(lora, names):
                takes[name] = None
        if all(name in takes for takes in takers):
            return model
        if not model.on_paper:
            model.close()
    for lora, takes in zip(loras, takers, strict=True):
        if not takes:
            raise bad(lora.file.path, "is a LoRA for none of the known models: name its model by -m MODEL")
    titles = (
        f"{clean(lora.file.path.name, 40)} is for {' or '.join(takes)}"
        for lora, takes in zip(loras, takers, strict=True)
    )
    raise ModelError(f"{'; '.join(titles)}: only LoRAs of one model are added up")


def _fits(lora: LoraFile, names: Names) -> bool:
    try:
        fit(lora, names)
    except ModelError:
        return False
    return True
