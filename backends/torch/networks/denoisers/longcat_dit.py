"""LongCat-Image's transformer: Flux.1's. What is unusual about it:
`qwenimg.common.networks.denoisers.longcat_dit`.
"""

from __future__ import annotations

from qwenimg.backends.torch.networks.denoisers.flux_dit import Runner as Runner
