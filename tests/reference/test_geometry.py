"""Sizes, packing, time features, rotary tables and tiles against diffusers, transformers and torch."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from diffusers import QwenImagePipeline
from diffusers.models.embeddings import get_timestep_embedding
from diffusers.models.transformers.transformer_qwenimage import QwenEmbedLayer3DRope, QwenEmbedRope
from hypothesis import given, settings
from hypothesis import strategies as st

from qwenimg.common.base.errors import UsageError
from qwenimg.common.families.qwen_image.family import SIZES
from qwenimg.common.networks.encoders import decoder
from qwenimg.common.networks.encoders.qwen import QwenVLConfig
from qwenimg.common.numbers import packing, rope, tiles, timesteps
from qwenimg.common.numbers import sizes as g
from qwenimg.common.request.request import Defaults

AXES = (16, 56, 56)

# The reference forms 1000 t f in float32: three roundings of 2^-24 each (t f, the product, and f itself) of an
# angle of up to 1000 radians.
FEATURE_TOLERANCE = 3 * 1000 * 2.0**-24
# The reference multiplies a float32 frequency (an error of some 2^-23 of it, from pow) by a position and rounds.
ROPE_TOLERANCE_PER_POSITION = 3 * 2.0**-24
# float64 against float64.
FLOAT64_TOLERANCE = 1e-12


# Sizes


@pytest.mark.parametrize(
    ("size", "expected"), [((1, 1), (16, 16)), ((1664, 928), (1664, 928)), ((1920, 1080), (1920, 1088))]
)
def test_render_size(size, expected):
    assert g.render_size(*size) == expected


def test_render_size_for_another_multiple():
    assert g.render_size(513, 512, 8) == (520, 512)


@given(st.integers(1, 16384), st.integers(1, 16384), st.sampled_from([8, 16, 32]))
def test_render_size_covers_the_request(width, height, multiple):
    for side, rendered in zip((width, height), g.render_size(width, height, multiple), strict=True):
        assert side <= rendered < side + multiple and rendered % multiple == 0 and rendered <= 16384


@pytest.mark.parametrize("size", [(0, 16), (16, 0), (-5, 5), (16385, 16), (16, 10**9)])
def test_sizes_out_of_range(size):
    with pytest.raises(UsageError, match="outside 1 to 16384"):
        g.render_size(*size)


def test_parse_size():
    assert g.parse_size("1664x928") == (1664, 928)
    assert g.parse_size(" 7X16384 ") == (7, 16384)
    assert g.parse_size("512") == (512, 512)  # a square


@pytest.mark.parametrize(
    "text",
    ["", "16385", "1664x", "x928", "-1x5", "1.5x5", "1e3x5", "٣x٣", "0x5", "16385x1", "9" * 5000 + "x1", "1x1\n1x1"],
)
def test_bad_sizes(text):
    with pytest.raises(UsageError) as caught:
        g.parse_size(text)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 200


def test_aspects_of_qwen_image():
    """The sizes of its model card, whatever the model's usual size is; another aspect between their areas."""
    qwen = Defaults(trained=SIZES)
    for text in ("1:1", "16:9", "9:16", "4:3", "3:4", "3:2", "2:3"):
        w, h = map(int, text.split(":"))
        width, height = qwen.size(g.parse_aspect(text))
        assert width % 16 == height % 16 == 0 and width / height == pytest.approx(w / h, rel=0.01)
        assert 1328 * 1328 * 0.85 < width * height <= 1328 * 1328
        assert qwen.size(g.parse_aspect(f"{h}:{w}")) == (height, width)
    assert qwen.size(g.parse_aspect("32:18")) == (1664, 928) and qwen.size(g.parse_aspect("1.5:1")) == (1584, 1056)
    areas = sorted(width * height for width, height in SIZES.values())
    for text in ("1.78:1", "17:9", "21:9", "5:4", "1:3"):
        width, height = qwen.size(g.parse_aspect(text))
        print(f"{text}: {width}x{height}")
        assert areas[0] < width * height < areas[-1]
    assert qwen.size(g.parse_aspect("1.78:1")) == Defaults(width=1472, height=1104).size(g.parse_aspect("1.78:1"))


@given(st.integers(1, 40), st.integers(1, 40), st.sampled_from([512, 768, 1024, 1328]))
def test_other_aspects(w, h, side):
    """Multiples of 16, of the aspect as nearly as they can, and of about the model's usual area."""
    model = Defaults(width=side, height=side)
    width, height = model.size(g.parse_aspect(f"{w}:{h}"))
    assert width % 16 == 0 and height % 16 == 0
    assert model.size(g.parse_aspect(f"{h}:{w}")) == (height, width)
    shorter = side * math.sqrt(min(w, h) / max(w, h))
    assert abs(width * height / side**2 - 1) < (1 + 16 / shorter) ** 2 - 1
    assert abs(math.log(width / height * h / w)) < 16 / min(width, height)


UNREADABLE = ["", "16", "16:", ":9", "0:1", "1:0", "0.0:1", "-1:1", "1:1:1", "1e9:1", "nan:1", "1/2:1"]


@pytest.mark.parametrize("text", [*UNREADABLE, "9999:1", "101:1", "1:101"])
def test_bad_aspects(text):
    with pytest.raises(UsageError):
        g.parse_aspect(text)


def test_the_longest_aspects():
    assert g.parse_aspect("100:1") == 100 and g.parse_aspect("1:100") == Fraction(1, 100)


@pytest.mark.parametrize(
    ("width", "height", "expected"),
    [
        (None, None, (1600, 900)),
        (800, None, (800, 450)),
        (None, 300, (533, 300)),
        (64, 64, (64, 64)),
        (1, None, (1, 1)),
    ],
)
def test_a_side_that_is_not_said_follows_the_picture(width, height, expected):
    model = Defaults(width=512, height=768)
    assert model.sides(width, height, [np.zeros((900, 1600, 3), np.uint8)]) == expected
    assert model.sides(width, height) == (width or 512, height or 768)


# Packing


@pytest.mark.parametrize("shape", [(1, 16, 2, 2), (2, 16, 6, 10), (3, 5, 14, 4)])
def test_packing_equals_the_pipeline(shape):
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    B, C, h, w = shape
    tokens = packing.pack(x)
    assert tokens.shape == (B, h * w // 4, 4 * C) and tokens.dtype == np.float32
    assert np.array_equal(tokens, QwenImagePipeline._pack_latents(torch.tensor(x), B, C, h, w).numpy())
    back = packing.unpack(tokens, h, w)
    reference = QwenImagePipeline._unpack_latents(torch.tensor(tokens), h * 8, w * 8, 8)
    assert np.array_equal(back, reference[:, :, 0].numpy())
    assert np.array_equal(back, x)


def test_channel_order_of_a_token():
    c, y, x = np.meshgrid(np.arange(3), np.arange(4), np.arange(6), indexing="ij")
    tokens = packing.pack((100 * c + 10 * y + x)[None])
    assert tokens[0, 1 * 3 + 2].tolist() == [24, 25, 34, 35, 124, 125, 134, 135, 224, 225, 234, 235]
    last = packing.pack((100 * c + 10 * y + x)[None], channels_last=True)
    assert last[0, 1 * 3 + 2].tolist() == [24, 124, 224, 25, 125, 225, 34, 134, 234, 35, 135, 235]


@pytest.mark.parametrize("channels_last", [False, True])
def test_unpacking_is_the_inverse(channels_last):
    x = np.random.default_rng(0).standard_normal((2, 3, 6, 10))
    tokens = packing.pack(x, channels_last=channels_last)
    assert np.array_equal(packing.unpack(tokens, 6, 10, channels_last=channels_last), x)


def test_odd_latents_are_refused():
    with pytest.raises(ValueError, match="even"):
        packing.pack(np.zeros((1, 16, 3, 4)))
    with pytest.raises(ValueError, match="not those of"):
        packing.unpack(np.zeros((1, 4, 64)), 4, 6)


# Time


@pytest.mark.parametrize("timestep", [1000.0, 951.3, 749.2680, 20.0, 0.5, 0.0])
def test_timestep_features(timestep):
    ours = timesteps.timestep_features(timestep)
    assert ours.shape == (256,) and ours.dtype == np.float64

    t = torch.tensor([timestep]) / 1000
    frequencies = torch.exp(-math.log(10000) * torch.arange(128, dtype=torch.float64) / 128)
    angles = 1000 * t.double() * frequencies
    exact = float((torch.tensor(ours) - torch.cat([angles.cos(), angles.sin()])).abs().max())
    theirs = get_timestep_embedding(t, 256, flip_sin_to_cos=True, downscale_freq_shift=0, scale=1000)[0]
    figure = float((torch.tensor(ours) - theirs.double()).abs().max())
    print(f"{timestep}: against float64 {exact:.2g}, against diffusers {figure:.2g}")
    assert exact < FLOAT64_TOLERANCE and figure < FEATURE_TOLERANCE


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_rounded_equals_torch(dtype):
    """Every number of four digits after the point would take long: a dense grid and ties of bfloat16."""
    grid = np.concatenate([np.linspace(0, 1000, 8001), np.arange(0, 1001) + 0.5, 256 + np.arange(1000) / 2])
    theirs = torch.tensor(grid, dtype=torch.float32).to(getattr(torch, dtype)) / 1000
    ours = [timesteps.rounded(float(np.float32(v)), dtype) for v in grid]
    assert ours == theirs.double().tolist()


def test_half_precision_time_is_what_the_reference_computes():
    timestep = torch.tensor([951.3]).to(torch.bfloat16) / 1000
    theirs = get_timestep_embedding(timestep, 256, flip_sin_to_cos=True, downscale_freq_shift=0, scale=1000)[0]
    ours = torch.tensor(timesteps.timestep_features(951.3, dtype="bfloat16"))
    assert timesteps.rounded(951.3, "bfloat16") == 0.953125
    assert float((ours - theirs.double()).abs().max()) < FEATURE_TOLERANCE


def test_bad_times():
    for timestep, channels in [(-1.0, 256), (math.nan, 256), (math.inf, 256), (1.0, 255)]:
        with pytest.raises(ValueError, match="features"):
            timesteps.timestep_features(timestep, channels)


# Rotary positions and tables

ONE = [(1, 4, 4)]
SHAPE_LISTS = [ONE, [(1, 7, 5)], [(1, 1, 1)], [(1, 58, 104)], [(1, 6, 9), (1, 3, 4), (1, 8, 2)], [(2, 5, 3), (3, 2, 7)]]
LAYERED_LISTS = [[(1, 7, 5)] * 4 + [(1, 9, 3)], [(1, 3, 2)] * 9, [(1, 4, 4), (1, 7, 5)]]


def assert_table_equals(positions, reference):
    cos, sin = rope.rope_table(positions, AXES)
    assert cos.shape == sin.shape == (len(positions), 64) and cos.dtype == np.float64
    theirs = reference.to(torch.complex128).numpy()
    figure = np.abs(cos + 1j * sin - theirs).max()
    tolerance = ROPE_TOLERANCE_PER_POSITION * max(2, np.abs(positions).max())
    print(f"{len(positions)} tokens, positions up to {np.abs(positions).max()}: {figure:.2g} of {tolerance:.2g}")
    assert figure < tolerance


@pytest.mark.parametrize("shapes", SHAPE_LISTS)
def test_rope_equals_diffusers(shapes):
    image, text = QwenEmbedRope(10000, list(AXES), scale_rope=True)([shapes], max_txt_seq_len=37)
    assert_table_equals(rope.image_positions(shapes), image)
    assert_table_equals(rope.text_positions(shapes, 37), text)


@pytest.mark.parametrize("shapes", LAYERED_LISTS)
def test_layered_rope_equals_diffusers(shapes):
    image, text = QwenEmbedLayer3DRope(10000, list(AXES), scale_rope=True)([shapes], max_txt_seq_len=19)
    assert_table_equals(rope.image_positions(shapes, layered=True), image)
    assert_table_equals(rope.text_positions(shapes, 19, layered=True), text)


def test_text_at_the_end_of_the_table_equals_diffusers():
    _, text = QwenEmbedRope(10000, list(AXES), scale_rope=True)([ONE], max_txt_seq_len=4093)
    assert_table_equals(rope.text_positions(ONE, 4093), text)


def test_positions_by_hand():
    positions = rope.image_positions([(1, 3, 2), (1, 1, 4)])
    assert positions.dtype == np.int64
    assert positions[:6].tolist() == [[0, -2, -1], [0, -2, 0], [0, -1, -1], [0, -1, 0], [0, 0, -1], [0, 0, 0]]
    assert positions[6:].tolist() == [[1, -1, -2], [1, -1, -1], [1, -1, 0], [1, -1, 1]]
    assert rope.text_positions([(1, 3, 2), (1, 1, 4)], 2).tolist() == [[2, 2, 2], [3, 3, 3]]
    assert rope.image_positions([(1, 1, 1), (1, 1, 1)], layered=True).tolist() == [[0, -1, -1], [-1, -1, -1]]
    assert rope.text_positions([(1, 1, 1)] * 6, 1, layered=True).tolist() == [[5, 5, 5]]


def test_text_past_the_table_is_a_usage_error():
    assert len(rope.text_positions(ONE, 4093)) == 4093
    with pytest.raises(UsageError, match="4094 text tokens after position 2"):
        rope.text_positions(ONE, 4094)


def test_a_condition_of_several_frames_is_refused():
    with pytest.raises(ValueError, match="2 frames"):
        rope.image_positions([(1, 2, 2), (2, 2, 2)], layered=True)


def test_angles_in_float64():
    positions = rope.image_positions([(1, 58, 104)])
    columns = []
    for axis, d in enumerate(AXES):
        frequencies = torch.pow(torch.tensor(10000.0, dtype=torch.float64), -torch.arange(0, d, 2).double() / d)
        columns.append(torch.outer(torch.tensor(positions[:, axis]).double(), frequencies))
    difference = np.abs(rope.rope_angles(positions, AXES) - torch.cat(columns, 1).numpy()).max()
    print(f"angles against torch float64: {difference:.2g}")
    assert difference < FLOAT64_TOLERANCE


def test_axes_must_match():
    with pytest.raises(ValueError, match="rotary axes"):
        rope.rope_angles(np.zeros((3, 2), np.int64), AXES)
    with pytest.raises(ValueError, match="rotary axes"):
        rope.rope_angles(np.zeros((3, 1), np.int64), (7,))


@pytest.mark.parametrize(("length", "head_dim", "theta"), [(37, 128, 1e6), (301, 12, 10000.0)])
def test_text_rope_equals_transformers(length, head_dim, theta):
    from transformers import Qwen2Config
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding

    config = Qwen2Config(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
    )
    their_cos, their_sin = Qwen2RotaryEmbedding(config)(torch.zeros(1), torch.arange(length)[None])
    ours = QwenVLConfig(hidden_size=4 * head_dim, num_attention_heads=4, rope_theta=theta)
    cos, sin = decoder.text_table(ours, length)
    assert cos.shape == sin.shape == (length, head_dim // 2)
    # transformers repeats the table for both halves of a head.
    figures = [
        np.abs(np.concatenate([ours, ours], 1) - theirs[0].double().numpy()).max()
        for ours, theirs in ((cos, their_cos), (sin, their_sin))
    ]
    print(f"{length} tokens: {max(figures):.2g}")
    assert max(figures) < ROPE_TOLERANCE_PER_POSITION * length


# Tiles


@settings(max_examples=300)
@given(st.integers(1, 700), st.integers(1, 300), st.integers(0, 90))
def test_tiles_partition(size, tile, halo):
    kept = []
    for part in tiles.tiles(size, tile, halo):
        assert 1 <= part.keep_stop - part.keep_start <= tile
        assert part.read_start == max(0, part.keep_start - halo)
        assert part.read_stop == min(size, part.keep_stop + halo)
        kept += range(part.keep_start, part.keep_stop)
    assert kept == list(range(size))


def test_tiles_by_hand():
    assert tiles.tiles(10, 4, 1) == [(0, 5, 0, 4), (3, 9, 4, 8), (7, 10, 8, 10)]
    assert tiles.tiles(4, 4, 9) == [(0, 4, 0, 4)]


def test_a_tiled_filter_equals_the_whole():
    """A filter that reaches 3 positions, computed by tiles with a halo of 3, is the filter of the whole."""
    signal, taps = np.random.default_rng(5).standard_normal(101), np.arange(1.0, 8.0)

    def filtered(x):
        return np.array(
            [sum(taps[k] * x[i + k - 3] for k in range(7) if 0 <= i + k - 3 < len(x)) for i in range(len(x))]
        )

    pieces = []
    for part in tiles.tiles(101, 16, 3):
        local = filtered(signal[part.read_start : part.read_stop])
        pieces.append(local[part.keep_start - part.read_start : part.keep_stop - part.read_start])
    assert np.array_equal(np.concatenate(pieces), filtered(signal))


@pytest.mark.parametrize("bad", [(0, 1, 0), (1, 0, 0), (1, 1, -1)])
def test_bad_tiles(bad):
    with pytest.raises(ValueError, match="no tiles"):
        tiles.tiles(*bad)
