"""The scheduler of the folders that are trained here."""

from __future__ import annotations

from qwenimg.common.families.qwen_image.small_files import SCHEDULER

# The built-in model's: flat shapes in a small picture show through much more noise than a photograph does, so what is
# where, and of which shape, is settled at levels above 0.85, of which Qwen-Image's own shift has few.
SHAPES_SCHEDULER: dict[str, object] = SCHEDULER | {"base_shift": 2.2, "max_shift": 2.6}
