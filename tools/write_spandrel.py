"""Record what spandrel, the library that reads most upscalers, makes of random ones: tests/data/spandrel.json.

python tools/write_spandrel.py        # where spandrel is installed, which needs the torchvision of its torch
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support import upscalers  # noqa: E402

DATA = ROOT / "tests" / "data" / "spandrel.json"
WIDTH, HEIGHT = 19, 15
# spandrel takes 32 channels of growth, whatever the file has
CASES = {
    "rrdbnet x4": lambda: upscalers.rrdbnet(growth=32),
    "rrdbnet x4, first names": lambda: upscalers.first_names(upscalers.rrdbnet(growth=32)),
    "rrdbnet x4, places": lambda: upscalers.places(upscalers.rrdbnet(growth=32)),
    "rrdbnet x2, patches": lambda: upscalers.rrdbnet(growth=32, patch=2),
    "rrdbnet x1, patches": lambda: upscalers.rrdbnet(growth=32, patch=4),
    "rrdbnet x2, places": lambda: upscalers.places(upscalers.rrdbnet(growth=32, enlarged=1)),
    "rrdbnet x8": lambda: upscalers.rrdbnet(growth=32, enlarged=3, blocks=3),
    "srvgg x4": lambda: upscalers.srvgg(),
    "srvgg x3": lambda: upscalers.srvgg(scale=3),
    "srvgg x2": lambda: upscalers.srvgg(scale=2, convs=5),
}


def picture() -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8)


def sampled(values: np.ndarray) -> list[float]:
    """The mean, and values at even distances."""
    flat = values.reshape(-1)
    return [float(flat.mean()), *map(float, flat[:: -(-len(flat) // 20)])]


def main() -> None:
    import torch
    from spandrel import ModelLoader

    x = torch.from_numpy(picture()).double().permute(2, 0, 1)[None] / 255
    records = {}
    for name, make in CASES.items():
        tensors = {key: torch.from_numpy(values) for key, values in make().items()}
        model = ModelLoader().load_from_state_dict(tensors)
        with torch.inference_mode():
            result = model.model.double().eval()(x).numpy()
        records[name] = {"scale": model.scale, "shape": list(result.shape), "values": sampled(result)}
    DATA.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
    print(f"written: {DATA.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
