"""The values that a step keeps for the gradients, by the layers of each block.

Only factors learn, so an operation keeps a value for one of four reasons: a layer with factors keeps its input; a norm
its input, in float32; attention its queries, keys and values; an activation what its derivative needs. `ROLES` says
which of these follow a layer, `Workspace.kept_values` how much a framework keeps of an activation and of attention.
Modulation takes part in no gradient, and its products keep nothing.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from qwenimg.common.memory.workspace import Kept, Workspace
from qwenimg.common.networks.denoisers.cascade_unet import WIDER, CascadeConfig
from qwenimg.common.networks.denoisers.unet import UNetConfig
from qwenimg.common.prompts.weighted import LENGTH

Layers = Mapping[str, tuple[int, int]]  # outputs and inputs, by path
WIDE = 4  # bytes of a value in float32, which the stream is
_ERF = 3  # values that a GELU by its definition keeps at most, measured,
_RESPONSE = 3  # and arrays in float32 on the way back through a response norm


@dataclass(frozen=True, kw_only=True)
class Role:
    """The copies of a layer's input and result that are kept after it."""

    inputs: float = 1  # of its input; 0: the layer before has the same
    normed: float = 0  # of its result in float32, by norms: of heads, or of the stream
    attended: float = 0  # of its result, by attention
    plain: float = 0  # of its result as it is
    activation: str = ""  # of its result: a field of `Kept`


# Of a path, the first that matches
ROLES: Mapping[re.Pattern[str], Role] = {
    # No norm of heads in Stable Cascade's prior
    re.compile(r"(?:down|up)_blocks\.\d+\.\d+\.attention\.to_q"): Role(attended=1),
    re.compile(r"(?:down|up)_blocks\.\d+\.\d+\.attention\.to_[kv]"): Role(inputs=0, attended=1),
    # A UNet's queries and keys have no norm
    re.compile(r".*\.attentions\..+\.(attn1\.to_q|attn2\.to_[qkv])"): Role(attended=1),
    re.compile(r".*\.attentions\..+\.attn1\.to_[kv]"): Role(inputs=0, attended=1),
    re.compile(r".*\.attentions\..+\.ff\.net\.0\.proj"): Role(activation="gated"),
    re.compile(r".*\.attentions\.\d+\.proj_(in|out)"): Role(),
    re.compile(r".*\.(to_q|add_q_proj)"): Role(normed=1, attended=1),
    re.compile(r".*\.(to_k|add_k_proj)"): Role(inputs=0, normed=1, attended=1),
    re.compile(r".*\.(to_v|add_v_proj)"): Role(inputs=0, attended=1),
    re.compile(r".*\.to_gate"): Role(inputs=0, plain=2),  # a sigmoid, and what it is multiplied with
    re.compile(r".*\.proj_mlp"): Role(inputs=0, activation="gelu"),
    re.compile(r".*\.net\.0\.proj"): Role(activation="gelu"),
    re.compile(r"(.*mode_blocks|single_transformer_blocks).+\.ff\.linear_in"): Role(inputs=0, activation="gated"),
    re.compile(r".*\.(linear_in|w1|gate_proj|gate_layer|ff\.gate)"): Role(activation="gated"),
    re.compile(r".*\.(w3|up_proj|img_mlp\.proj|ff\.up)"): Role(inputs=0, activation="gated"),
    # A SiLU, a convolution over the image, and a gate
    re.compile(r".*\.ff\.conv_inverted"): Role(plain=2, activation="gated"),
    # FLUX.3's attention and feed-forward have one input, and their results are added
    re.compile(r"(.*mode_blocks|single_.+)\.attn\.to_out\.0"): Role(),
    # Attention and feed-forward side by side: their joined results are its input, and attention keeps its own
    re.compile(r"single_.+\.(proj_out|attn\.to_out)"): Role(normed=1, plain=1),
    # Normed before it joins the stream, which is normed again
    re.compile(r"layers\.\d+\.(attention\.to_out\.0|feed_forward\.w2)"): Role(normed=2),
    re.compile(r".*"): Role(normed=1),
}
_OF_TEXT = re.compile(r".*\.(add_[qkv]_proj|to_add_out|txt_mlp\..+|ff_context\..+)|txt_mode_blocks\..+")
_ONE_STREAM = "txt_mode_blocks"
_OF_IMAGE = re.compile(r"mode_blocks\..+")
_OF_CLIP = re.compile(r"attn2\.to_[kv]")
_VALUES = re.compile(r".*\.(to_v|to_qkv_mlp_proj)")
_PARALLEL = ".to_qkv_mlp_proj"
_PLACE = re.compile(r"(?:(down|up)_blocks\.(\d+)|mid_block)\.(\w+)\.(\d+)\.")
_ORDER = {"down": 0, None: 1, "up": 2}


@dataclass(frozen=True, kw_only=True)
class Total:
    """The bytes that are kept of each block, by its path, and of its inputs; "" has those outside of blocks. `arrays`:
    bytes beside them on the way back, of which the largest counts."""

    blocks: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    inputs: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    arrays: list[float] = field(default_factory=lambda: [0.0])

    def peak(self, checkpointing: bool) -> tuple[float, float]:
        """Return the bytes of all blocks' inputs and of blocks: with checkpointing of one, else of all, which have the
        inputs in them."""
        outside = self.blocks[""]
        if not checkpointing:
            return 0.0, sum(self.blocks.values())
        return sum(self.inputs.values()) + outside, max(self.blocks.values())


@dataclass(frozen=True, kw_only=True)
class Count:
    """A count of a step of one picture. compiled: the paths of blocks, which checkpointing computes again; width:
    bytes of a value of products; quantized: whether weights are decoded."""

    layers: Layers
    workspace: Workspace
    compiled: re.Pattern[str]
    width: int
    rank: int
    quantized: bool

    @property
    def kept(self) -> Kept:
        return self.workspace.kept_values

    def transformer(self, image: int, text: int, heads: int) -> Total:
        """Count a transformer with so many tokens and heads. Less is kept of the last block's text, which has no use,
        and of the first block's inputs, which have no gradient: that is not counted."""
        total = Total()
        pairs = {self._block(path) for path in self.layers if _OF_TEXT.fullmatch(path)}
        for path, shape in self.layers.items():
            block, of_text = self._block(path), bool(_OF_TEXT.fullmatch(path))
            apart = bool(_OF_IMAGE.fullmatch(path)) or (of_text and path.startswith(_ONE_STREAM))
            tokens = text if of_text else image if apart or block in pairs else image + text
            self._add(total, path, shape, tokens)
            attended = tokens if apart else image + text
            total.inputs[block] = attended * min(shape) * WIDE
            if _VALUES.fullmatch(path):
                total.blocks[block] += self.kept.scores * heads * attended**2 * WIDE
        return total

    def unet(self, config: UNetConfig, kernels: Mapping[str, tuple[int, ...]], pixels: int) -> Total:
        """Count a UNet for latents of so many `pixels`. kernels: the shapes of its convolutions. Those before the first
        layer that learns keep nothing."""
        total, depth = Total(), len(config.block_out_channels)
        first = min(_place(path) for path in self.layers)
        for path, shape in self.layers.items():
            level = _level(path, depth)
            tokens = LENGTH if _OF_CLIP.search(path) else pixels >> 2 * level
            self._add(total, path, shape, tokens)
            if path.endswith("proj_in"):
                norm = path.replace("proj_in", "norm")
                total.blocks[norm] = total.inputs[norm] = tokens * shape[1] * WIDE
            elif path.endswith("to_out.0"):
                total.inputs[self._block(path)] = tokens * shape[0] * WIDE
            elif path.endswith("to_v"):
                pairs = config.attention_head_dim[level] * (pixels >> 2 * level) * tokens
                total.blocks[self._block(path)] += self.kept.scores * pairs * WIDE
        for path, (outputs, inputs, *_) in kernels.items():
            if not _PLACE.match(path) or _place(path) < first:
                continue
            values, kept = inputs * (pixels >> 2 * _level(path, depth)), self.kept
            size = kept.convolved.bytes(self.width)
            if "resnets" in path:
                size += kept.silu.bytes(self.width)
                size += WIDE if "conv1" in path else kept.normed.bytes(self.width)
            if "conv1" in path:
                total.inputs[self._block(path)] = values * WIDE
            total.blocks[self._block(path)] += values * size
            convolved = self.workspace.inputs(self.width) + self.workspace.conv_outputs * outputs / inputs
            total.arrays.append(values * convolved * self.width)
        return total

    def prior(self, config: CascadeConfig, image: int, text: int) -> Total:
        """Count Stable Cascade's prior, whose attention learns, for `image` values of an embedding that see `text`
        tokens of the condition. What a convolution, a GELU and a response norm keep is most of it."""
        total, kept = Total(), self.kept
        for way, levels in (("down", config.down), ("up", config.up)):
            for place, level in enumerate(levels):
                C = level.width
                convolved = C * (kept.convolved.bytes(self.width) + WIDE)
                forward = WIDER * C * (min(kept.gelu.bytes(self.width), _ERF * WIDE) + WIDE)
                for i in range(level.layers):
                    blocks = [f"{way}_blocks.{place}.{3 * i + j}" for j in range(3)]
                    total.blocks[blocks[0]] += image * (convolved + forward)
                    for block in blocks:
                        total.inputs[block] = image * C * WIDE
        arrays = max(kept.arrays.bytes(self.width), 2 * self.width + _RESPONSE * WIDE)
        total.arrays.append(image * WIDER * max(config.block_out_channels) * arrays)
        for path, shape in self.layers.items():
            self._add(total, path, shape, image + (0 if path.endswith(("to_q", "to_out.0")) else text))
            if path.endswith("to_v"):
                scores = config.num_attention_heads[0] * image * (image + text)
                total.blocks[self._block(path)] += self.kept.scores * scores * WIDE
        return total

    def _add(self, total: Total, path: str, shape: tuple[int, int], tokens: int) -> None:
        """Add a layer."""
        outputs, inputs = shape
        parts = {path: shape}
        if path.endswith(_PARALLEL):
            parts = {f"{path}.{name}": (inputs, inputs) for name in ("to_q", "to_k", "to_v")}
            parts[f"{path}.up_proj"] = outputs - 3 * inputs, inputs
        size = tokens * (sum(self._of_layer(*part) for part in parts.items()) + self.rank * self.width)
        size += self.kept.decoded * self.quantized * outputs * inputs * self.width
        total.blocks[self._block(path)] += size
        total.arrays.append(tokens * max(shape) * self.kept.arrays.bytes(self.width))

    def _of_layer(self, path: str, shape: tuple[int, int]) -> float:
        """Return the bytes of a token that are kept around a layer."""
        role = next(role for pattern, role in ROLES.items() if pattern.fullmatch(path))
        outputs, inputs = shape
        result = WIDE * role.normed + self.width * role.plain + role.attended * self.kept.attended.bytes(self.width)
        result += getattr(self.kept, role.activation).bytes(self.width) if role.activation else 0
        return self.width * role.inputs * inputs + result * outputs

    def _block(self, path: str) -> str:
        match = self.compiled.match(path)
        return match[0] if match else ""


def _place(path: str) -> tuple[int, int, int, bool]:
    """Return the place of a part of a UNet in the order in which they compute."""
    match = _PLACE.match(path)
    assert match, path
    last = "samplers" in match[3]
    return _ORDER[match[1]], int(match[2] or 0), 99 if last else int(match[4]), match[3] == "attentions"


def _level(path: str, depth: int) -> int:
    """Return how often the pixels that a part of a UNet takes are halved in both directions."""
    stage, block, *_ = _place(path)
    level = {0: block, 1: depth - 1, 2: depth - 1 - block}[stage]
    return level - 1 if "upsamplers" in path else level
