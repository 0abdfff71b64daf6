"""Other programs' names for the tensors of Qwen-Image's VAE: strings only.

ComfyUI has Wan's names of its video VAE, mflux names of its own. Each follows from a name of the manifest, so that
missing and unknown tensors both show. No name has two meanings, so a file may have any of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from qwenimg.common.base.shape import Manifest
from qwenimg.common.networks.vaes import wan_names

_ENDS, _RESIDUAL, _OUTSIDE = (  # Wan's names by those of diffusers
    {ours: theirs for theirs, ours in table.items()}
    for table in (wan_names.ENDS, wan_names.RESIDUAL, wan_names.OUTSIDE)
)
_UP = re.compile(r"up_blocks\.(?P<block>\d+)\.(?:resnets\.(?P<layer>\d+)|upsamplers\.0)\.(?P<rest>.+)")
_DOWN = re.compile(r"encoder\.down_blocks\.(?P<index>\d+)")


def renaming(manifest: Manifest, layers: int) -> Callable[[str], str]:
    """Return the function from a name in a file to the manifest's; `layers`: resnets in each of the decoder's
    blocks."""
    names = {_wan(name, layers): name for name in manifest}
    names |= {_mflux(name, manifest, layers): name for name in manifest}
    return lambda key: names.get(key, key)


def _mflux(name: str, manifest: Manifest, layers: int) -> str:
    """Return mflux's name of a tensor of the VAE; `layers`: resnets in each of the decoder's blocks."""
    owner, _, leaf = name.rpartition(".")
    owner = owner.replace("conv_shortcut", "skip_conv").replace("resample.1", "resample_conv")
    owner = owner.replace("decoder.up_blocks.", "decoder.up_block")
    if down := _DOWN.match(owner):
        block, layer = divmod(int(down["index"]), layers)
        inner = "downsamplers.0" if layer == layers - 1 else f"resnets.{layer}"
        owner = f"encoder.down_blocks.{block}.{inner}{owner[down.end() :]}"
    if leaf == "gamma":
        return f"{owner}.weight"
    kernel = manifest[f"{name.rpartition('.')[0]}.weight"]
    return f"{owner}.conv3d.{leaf}" if len(kernel) == 5 else f"{owner}.{leaf}"


def _wan(name: str, layers: int) -> str:
    """Return Wan's name of a tensor; `layers`: resnets in each of the decoder's blocks."""
    side, _, rest = name.partition(".")
    if side not in ("encoder", "decoder"):
        return f"{_OUTSIDE[side]}.{rest}"
    if up := _UP.fullmatch(rest):
        layer = layers if up["layer"] is None else int(up["layer"])  # an upsampler counts as the last layer
        return f"{side}.upsamples.{int(up['block']) * (layers + 1) + layer}.{_residual(up['rest'])}"
    for part, wan in _ENDS.items():
        if rest.startswith(f"{part}."):
            return f"{side}.{wan}.{_residual(rest.removeprefix(f'{part}.'))}"
    block, index, inner = rest.split(".", 2)
    assert block == "down_blocks", name
    return f"{side}.downsamples.{index}.{_residual(inner)}"


def _residual(rest: str) -> str:
    """Return Wan's name for a part of a layer: of a residual block `conv1.weight` changes, else `resample.1.weight`
    does not."""
    part, _, leaf = rest.partition(".")
    return f"{_RESIDUAL[part]}.{leaf}" if part in _RESIDUAL else rest
