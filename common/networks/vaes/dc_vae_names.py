"""SANA's VAE in files: its authors' names and diffusers'.

Unusual about its authors' names: q, k and v are rows of one tensor, and all matrices are 1x1 kernels; a layer that has
a shortcut around it is within `main`.
"""

from __future__ import annotations

import re

from qwenimg.common.networks.layout import Layout, Layouts
from qwenimg.common.networks.vaes import dc_vae
from qwenimg.common.networks.vaes.dc_vae import DCVAEConfig
from qwenimg.common.weights.keys import Place, Rows

_ENDS = {
    "encoder.conv_in.": "encoder.project_in.conv.",
    "encoder.conv_out.": "encoder.project_out.main.op_list.0.conv.",
    "decoder.conv_in.": "decoder.project_in.main.conv.",
    "decoder.norm_out.": "decoder.project_out.op_list.0.",
    "decoder.conv_out.": "decoder.project_out.op_list.2.conv.",
}
_LAYER = re.compile(r"(?P<way>en|de)coder\.(?:down|up)_blocks\.(?P<place>\d+\.\d+)\.(?P<rest>.+)")
_PARTS = {
    "conv1.": "main.conv1.conv.",
    "conv2.": "main.conv2.conv.",
    "norm.": "main.conv2.norm.",
    "attn.to_out.": "context_module.main.proj.conv.",
    "attn.norm_out.": "context_module.main.proj.norm.",
    "attn.to_qkv_multiscale.0.proj_in.": "context_module.main.aggreg.0.0.",
    "attn.to_qkv_multiscale.0.proj_out.": "context_module.main.aggreg.0.1.",
    "conv_out.conv_inverted.": "local_module.main.inverted_conv.conv.",
    "conv_out.conv_depth.": "local_module.main.depth_conv.conv.",
    "conv_out.conv_point.": "local_module.main.point_conv.conv.",
    "conv_out.norm.": "local_module.main.point_conv.norm.",
}
_QKV = {
    "attn.to_q.weight": Rows(0, 1, 3),
    "attn.to_k.weight": Rows(1, 2, 3),
    "attn.to_v.weight": Rows(2, 3, 3),
}


def place(name: str, config: DCVAEConfig) -> Place:
    """Return the place of a parameter in a file with its authors' names."""
    for ours, theirs in _ENDS.items():
        if name.startswith(ours):
            return Place(theirs + name.removeprefix(ours))
    found = _LAYER.fullmatch(name)
    assert found is not None, name
    level, _, layer = found["place"].partition(".")
    start, rest = f"{found['way']}coder.stages.{level}.op_list.{layer}.", found["rest"]
    if (rows := _QKV.get(rest)) is not None:
        return Place(f"{start}context_module.main.qkv.conv.weight", rows)
    for ours, theirs in _PARTS.items():
        if rest.startswith(ours):
            return Place(start + theirs + rest.removeprefix(ours))
    # one layer down, one behind an enlargement up
    return Place(f"{start}main.{'conv.' if found['way'] == 'de' else ''}{rest}")


LAYOUTS = Layouts(
    network=dc_vae.NETWORK,
    title="SANA's VAE",
    rows=(
        Layout(
            names="its authors' names",
            signs=("encoder.project_in.conv.weight", "decoder.project_in.main.conv.weight"),
            place=place,
            kernels=re.compile(r".*\.attn\.to_(?:[qkv]|out)\.weight"),
        ),
        Layout(names="diffusers' names", signs=("decoder.up_blocks.0.0.conv.weight", "encoder.conv_in.weight")),
    ),
    foreign={
        "encoder.project_in.conv.conv.weight": "another deep compression autoencoder than SANA's",
        "encoder.conv_in.conv.weight": "another deep compression autoencoder than SANA's",
    },
)
