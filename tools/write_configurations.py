"""Writes common/data/MODEL: configurations of known models, with which three files of weights are a model.

python tools/write_configurations.py
"""

from __future__ import annotations

import json
from pathlib import Path

from qwenimg.common.families import catalog, registry

DATA = Path(__file__).resolve().parent.parent / "common" / "data"
FAMILIES = ("z-image", "flux", "flux2", "sd3", "qwen-image-2.1")
MODELS = ("qwen-image", *(known.name for known in catalog.KNOWN.values() if known.family in FAMILIES))


def files(name: str) -> dict[str, str]:
    """{path in the folder of the known model: its JSON}."""
    opened = registry.published(catalog.KNOWN[name])
    assert opened is not None and opened.family.small_files is not None
    small = opened.family.small_files(opened.checkpoint)
    tables = {path: table for path, table in small.items() if not path.startswith("tokenizer")}
    networks = {network.name: network for network in opened.family.networks}
    for part, component in opened.checkpoint.components.items():
        tables[f"{part}/config.json"] = networks[component.network].written(component.config)
    return {path: json.dumps(table, indent=2) + "\n" for path, table in tables.items()}


if __name__ == "__main__":
    for name in MODELS:
        for path, text in files(name).items():
            (DATA / name / path).parent.mkdir(parents=True, exist_ok=True)
            (DATA / name / path).write_text(text, encoding="utf-8")
