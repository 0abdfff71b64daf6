"""Qwen3-VL's language model as a text encoder: Qwen3's with all of its layers. What is unusual about it:
`qwenimg.common.networks.encoders.qwen3_vl`.
"""

from __future__ import annotations

from qwenimg.backends.torch.networks.encoders.qwen3 import Runner as Runner
