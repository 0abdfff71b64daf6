"""Writes common/data/qwen-image: Qwen-Image's configurations, with which three files of weights are a model.

python tools/write_configurations.py
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from qwenimg.common.families.qwen_image.small_files import INDEX, SCHEDULER
from qwenimg.common.networks import qwen_dit, qwen_vae, qwen_vl

FOLDER = Path(__file__).resolve().parent.parent / "common" / "data" / "qwen-image"


def files() -> dict[str, str]:
    """{path in the folder: its JSON}; the defaults of each configuration are the published model's."""
    tables: dict[str, dict[str, object]] = {
        "model_index.json": INDEX,
        "scheduler/scheduler_config.json": SCHEDULER,
        "transformer/config.json": {"_class_name": qwen_dit.CLASS_NAME, **asdict(qwen_dit.QwenDiTConfig())},
        "text_encoder/config.json": {"model_type": "qwen2_5_vl", **asdict(qwen_vl.QwenVLConfig())},
        "vae/config.json": {"_class_name": qwen_vae.CLASS_NAME, **asdict(qwen_vae.QwenVAEConfig())},
    }
    return {path: json.dumps(table, indent=2) + "\n" for path, table in tables.items()}


if __name__ == "__main__":
    for path, text in files().items():
        (FOLDER / path).parent.mkdir(parents=True, exist_ok=True)
        (FOLDER / path).write_text(text, encoding="utf-8")
