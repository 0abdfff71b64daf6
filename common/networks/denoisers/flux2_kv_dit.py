"""FLUX.2 klein KV's transformer: configuration and manifest.

It is FLUX.2's (`flux2_dit`), with the same tensors. What is unusual about it:
- tokens of reference images are modulated for time 0 and see each other alone. They do not depend on the step, so their
  keys and values are made once and kept (`--step-cache` is something else);
- text and image see them behind themselves; diffusers has them between the two, and no attention depends on the order.

Source: the reference class of diffusers, which makes them in the first step.
"""

from __future__ import annotations

import re
from dataclasses import replace

from qwenimg.common.base.block import Block
from qwenimg.common.networks.denoisers import flux2_dit

_DOUBLE, _SINGLE = re.compile(r"transformer_blocks\.\d+"), re.compile(r"single_transformer_blocks\.\d+")
_OWN = (
    Block(name="references", paths=_DOUBLE, method="run_references", streams=1),
    Block(name="single_references", paths=_SINGLE, method="run_references", streams=1),
)

NETWORK = replace(flux2_dit.NETWORK, name="flux2_kv_dit", traced=(*_OWN, *flux2_dit.NETWORK.traced))
