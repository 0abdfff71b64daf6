"""A picture of a run's loss, for the model card."""

from __future__ import annotations

import io
import math

from PIL import Image, ImageDraw


def curve(points: list[tuple[float, float]], width: int, height: int) -> bytes:
    """Return a PNG of the loss over steps, on a logarithmic axis with its ends labelled."""
    image = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(image)
    left, right, top, bottom = 70, width - 20, 20, height - 40
    steps = [step for step, _ in points]
    levels = [math.log(max(loss, 1e-12)) for _, loss in points]
    low, high = min(levels), max(max(levels), min(levels) + 1e-6)
    last = max(steps[-1], 1)

    def place(step: float, level: float) -> tuple[float, float]:
        return left + (right - left) * step / last, bottom - (bottom - top) * (level - low) / (high - low)

    draw.rectangle((left, top, right, bottom), outline="gray")
    draw.line([place(step, level) for step, level in zip(steps, levels, strict=True)], fill=(30, 70, 220), width=2)
    for level in (low, (low + high) / 2, high):
        draw.text((8, place(0, level)[1] - 6), f"{math.exp(level):.4g}", fill="black")
    draw.text((left, bottom + 10), "0", fill="black")
    draw.text((right - 60, bottom + 10), f"step {int(last)}", fill="black")
    draw.text((left + 8, top + 4), "loss, logarithmic", fill="black")
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()
