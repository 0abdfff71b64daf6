"""PEFT's configuration of each module of a LoRA, from the file's header or from `adapter_config.json` in its folder."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from qwenimg.common.base.safe_files import bad, is_file, open_regular
from qwenimg.common.base.strict_json import strict_json
from qwenimg.common.base.text import clean
from qwenimg.common.weights.loras.module_patterns import first_matches

ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"  # PEFT's own names
MAX_CONFIG = 1 << 20  # bytes
_METADATA = "lora_adapter_metadata"  # under this key diffusers writes PEFT's configuration into the header
# Components that a configuration may belong to
_COMPONENTS = ("transformer.", "unet.", "text_encoder.", "text_encoder_2.", "text_encoder_3.")
_BEFORE = ("base_model.model.", "model.diffusion_model.", "diffusion_model.", *_COMPONENTS)
"""Prefixes in a file before the name that PEFT knows a module by; several may follow each other."""
_DEFAULT_ALPHA = 8  # PEFT's, where a configuration has none
_CHANGED_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")  # beginnings of `init_lora_weights`


class ModuleConfig(NamedTuple):
    """PEFT's configuration of one module."""

    alpha: float
    rank: int | None
    rslora: bool

    def scale(self, rank: int | None) -> float:
        """Return alpha / rank, or alpha / √rank, for factors of `rank` (None: whole factors of LoKr, which take the
        configuration's rank). Raises ValueError if the configuration names another rank."""
        if rank is not None and self.rank not in (None, rank):
            raise ValueError(
                f"its factors have rank {rank}, PEFT's configuration says {self.rank}: it is of another LoRA"
            )
        rank = rank or self.rank
        if rank is None:
            return 1.0
        return self.alpha / (math.sqrt(rank) if self.rslora else rank)


def read_config(path: Path, metadata: Mapping[str, str], modules: Iterable[str]) -> dict[str, ModuleConfig]:
    """Return PEFT's configuration of the LoRA file `path` for each of its `modules` that it gives an alpha. Raises
    ModelError."""
    data, where = _read_json(path, metadata)
    prefixes = [prefix for prefix in _COMPONENTS if any(key.startswith(prefix) for key in data)]
    members: dict[str, list[str]] = {prefix: [] for prefix in (*prefixes, "")}
    for module in modules:
        members[_component(module, prefixes)].append(module)
    configs = {}
    for prefix, names in members.items():
        settings = {
            key.removeprefix(prefix): value
            for key, value in data.items()
            if (key.startswith(prefix) if prefix else not key.startswith(_COMPONENTS))
        }
        try:
            configs.update(_of_modules(settings, names))
        except ValueError as error:
            raise bad(where, str(error)) from None
    return configs


def _read_json(path: Path, metadata: Mapping[str, str]) -> tuple[dict[str, Any], str]:
    """Return the configuration from the header, else from the file that PEFT saved in the same folder, and its place
    for messages."""
    beside = path.with_name(ADAPTER_CONFIG)
    if _METADATA in metadata:
        raw, where = metadata[_METADATA].encode(), f"{path} ({_METADATA})"
    elif path.name == ADAPTER and is_file(beside):
        file = open_regular(beside)
        try:
            if file.size > MAX_CONFIG:
                raise bad(beside, f"has {file.size} bytes; at most {MAX_CONFIG} are read")
            raw, where = file.read(0, file.size), str(beside)
        finally:
            file.close()
    else:
        return {}, str(path)
    data = strict_json(raw, where, depth=4, values=20_000)
    if not isinstance(data, dict):
        raise bad(where, "is not a JSON object")
    return data, where


def _component(module: str, prefixes: list[str]) -> str:
    """Return the prefix of the `prefixes` that covers `module`: its own, or the only one for a bare name."""
    prefix_of_module = next((prefix for prefix in _COMPONENTS if module.startswith(prefix)), "")
    if prefix_of_module in prefixes:
        return prefix_of_module
    return prefixes[0] if not prefix_of_module and len(prefixes) == 1 else ""


def _of_modules(config: Mapping[str, Any], modules: list[str]) -> dict[str, ModuleConfig]:
    """Return the configuration of each module. Raises ValueError for values of another kind, and for patterns that
    match no module."""
    names = {module: _name(module) for module in modules}
    alphas = _matched(config, "alpha_pattern", names.values())
    ranks = _matched(config, "rank_pattern", names.values())
    default = _DEFAULT_ALPHA if config else None
    alpha = config.get("lora_alpha", config.get("alpha", default))  # `alpha` in LoHa and LoKr
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGED_BASE):
        raise ValueError(
            f"has init_lora_weights '{clean(start, 30)}', which changes the model's own weights too: save the LoRA "
            "converted, with PEFT's path_initial_model_for_weight_conversion"
        )
    rslora = config.get("use_rslora") or False
    if not isinstance(rslora, bool):
        raise ValueError(f"use_rslora is {clean(rslora, 30)!r}, not true or false")
    configs = {}
    for module, name in names.items():
        module_alpha, rank = alphas.get(name, alpha), ranks.get(name, config.get("r"))
        if module_alpha is not None or name in alphas:
            configs[module] = ModuleConfig(_alpha(module_alpha), _rank(rank), rslora)
    return configs


def _name(module: str) -> str:
    """Return PEFT's name of a module, within the model that PEFT was given."""
    while before := next((prefix for prefix in _BEFORE if module.startswith(prefix)), None):
        module = module.removeprefix(before)
    return module


def _matched(config: Mapping[str, Any], key: str, names: Iterable[str]) -> dict[str, object]:
    """Return for each of `names` the value of the first pattern that matches it."""
    patterns = config.get(key) or {}
    if not isinstance(patterns, dict):
        raise ValueError(f"{key} is {clean(patterns, 30)!r}, not an object of patterns")
    try:
        return {name: patterns[pattern] for name, pattern in first_matches(patterns, names).items()}
    except ValueError as error:
        raise ValueError(f"{key} {error}") from None


def _alpha(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"lora_alpha is {clean(value, 30)!r}, not a number")
    return float(value)


def _rank(value: object) -> int | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ValueError(f"r is {clean(value, 30)!r}, not a whole number from 1")
    return value
