"""The LoRAs of a pipeline by the names that diffusers gives them, with their weights."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from qwenimg.common.base.arguments import path_text
from qwenimg.common.base.errors import UsageError
from qwenimg.common.base.text import clean
from qwenimg.common.request.embedding_text import Embedding
from qwenimg.common.request.lora_text import Lora
from qwenimg.common.request.option import as_number

# Keywords that change nothing here: a file is found and checked when a picture is drawn
_PARTS_OF_INVERSION = ("tokenizer", "text_encoder")  # the file says for which text encoder its vectors are
_WITHOUT_EFFECT = ("low_cpu_mem_usage", "hotswap", "use_safetensors", "prefix", "local_files_only")


@dataclass(kw_only=True)
class Adapters:
    """The LoRAs that were loaded, those that are active, and those that were fused."""

    files: dict[str, str] = field(default_factory=dict)  # by the adapter's name
    weights: dict[str, float] = field(default_factory=dict)  # of the active ones
    fused: list[Lora] = field(default_factory=list)
    embeddings: list[Embedding] = field(default_factory=list)
    enabled: bool = True

    def load(self, source: object, options: Mapping[str, object]) -> None:
        """Add a LoRA, which is then the only active one until `set`. Raises UsageError."""
        if isinstance(source, Mapping):
            raise UsageError("load_lora_weights: a state dict is not taken; give the safetensors file, or owner/name")
        place = path_text(source)
        if not place:
            raise UsageError(f"load_lora_weights: {clean(source, 40)}; give a safetensors file, a folder or owner/name")
        for name, value in options.items():
            if name not in ("weight_name", "adapter_name", *_WITHOUT_EFFECT) and value is not None:
                raise UsageError(f"load_lora_weights takes no {clean(name, 40)} here; get a file by: qwenimg pull")
        file, named = options.get("weight_name"), options.get("adapter_name")
        for name, value in {"weight_name": file, "adapter_name": named}.items():
            if value is not None and not isinstance(value, str):
                raise UsageError(f"{name} is {clean(value, 40)}; expected a text")
        if file:
            place = os.path.join(place, str(file)) if os.path.isdir(place) else f"{place}/{file}"  # noqa: PTH112, PTH118
        adapter = str(named) if named else f"default_{len(self.files)}"
        if adapter in self.files:
            raise UsageError(f"adapter {clean(adapter, 60)} is loaded already; give another adapter_name")
        Lora(place)  # for its errors
        self.files[adapter] = place
        self.weights = {adapter: 1.0}

    def load_embedding(self, source: object, token: object, options: Mapping[str, object]) -> list[Embedding]:
        """Return the embeddings of files, one or several, each with its token. Raises UsageError."""
        sources = list(source) if isinstance(source, list | tuple) else [source]
        tokens = list(token) if isinstance(token, list | tuple) else [token] * len(sources)
        if len(tokens) != len(sources) or (len(sources) > 1 and isinstance(token, str)):
            raise UsageError(
                f"load_textual_inversion: {len(tokens)} tokens for {len(sources)} files; give one for each"
            )
        file = options.get("weight_name")
        for name, value in options.items():
            if name not in ("weight_name", *_PARTS_OF_INVERSION, *_WITHOUT_EFFECT) and value is not None:
                raise UsageError(f"load_textual_inversion takes no {clean(name, 40)} here; give the path of the file")
        made = []
        for one, named in zip(sources, tokens, strict=True):
            place = path_text(one)
            if not place or not isinstance(named, str | None):
                shown = clean(type(one).__name__ if place is None else named, 40)
                raise UsageError(f"load_textual_inversion: {shown}; give a file, a folder or owner/name, and a token")
            if file:
                place = os.path.join(place, str(file)) if os.path.isdir(place) else f"{place}/{file}"  # noqa: PTH112, PTH118
            made.append(Embedding(place, named or ""))
        return made

    def set(self, names: object, weights: object = None) -> None:
        """Make adapters active, each with its weight. Raises UsageError."""
        several = [names] if isinstance(names, str) else names
        if not isinstance(several, Sequence):
            raise UsageError(f"set_adapters: {clean(names, 40)}; give the names of adapters")
        self.check(several)
        scales = list(weights) if isinstance(weights, list | tuple) else [weights] * len(several)
        if len(scales) != len(several):
            raise UsageError(f"set_adapters: {len(scales)} weights for {len(several)} adapters; give one for each")
        if any(isinstance(one, Mapping) for one in scales):
            raise UsageError("adapter_weights: a weight for each block is not built; give one number for an adapter")
        scaled = zip(several, scales, strict=True)
        self.weights = {name: 1.0 if one is None else as_number(f"the weight of {name}", one) for name, one in scaled}

    def check(self, names: Sequence[object]) -> None:
        """Raise UsageError for a name that no loaded adapter has."""
        for name in names:
            if name not in self.files:
                loaded = ", ".join(clean(one, 40) for one in self.files) or "none"
                raise UsageError(f"no adapter {clean(name, 60)!r} is loaded; loaded are: {loaded}")

    def delete(self, names: object) -> None:
        several = [names] if isinstance(names, str) else names
        if not isinstance(several, Sequence):
            raise UsageError(f"delete_adapters: {clean(names, 40)}; give the names of adapters")
        self.check(several)
        for name in several:
            del self.files[name]
            self.weights.pop(name, None)

    def fuse(self, scale: object = 1.0) -> None:
        """Keep the active LoRAs at `scale` times their weights, also when they are unloaded."""
        times = as_number("lora_scale", scale)
        self.fused += [Lora(one.source, one.scale * times) for one in self.active()]
        self.weights = {}

    def unload(self) -> None:
        """Forget all but the fused LoRAs."""
        self.files, self.weights = {}, {}

    def active(self, scale: float = 1.0) -> list[Lora]:
        """Return the LoRAs that are not fused and active, at `scale` times their weights."""
        return [Lora(self.files[name], weight * scale) for name, weight in self.weights.items()] if self.enabled else []

    def loras(self, scale: float = 1.0) -> list[Lora]:
        """Return all LoRAs of a picture."""
        return [*self.fused, *self.active(scale)]
