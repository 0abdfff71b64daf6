"""One transformer block at Qwen-Image's full width, 24 heads of 128, on both backends against diffusers' block."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from diffusers.models.transformers.transformer_qwenimage import QwenEmbedRope, QwenImageTransformerBlock
from random_model import write
from support.parity_cases import MLX, TORCH, Twin
from support.policies import FP32

from qwenimg.common.networks.denoisers import qwen_conditioning, qwen_dit
from qwenimg.common.weights import keys
from qwenimg.common.weights.plan import LoadPlan

# Of the outputs, and of what the block adds to its inputs: sums over 12288 products, some ten roundings in a row.
LIMIT = 1e-5

CONFIG = qwen_dit.QwenDiTConfig(num_layers=1)
BLOCK = "transformer_blocks.0."
SHAPE = (1, 5, 3)  # image tokens: few, as it is the width that is tested here
WORDS = 4  # text tokens


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadPlan]:
    """The weights of one block, 0.7 GB in bfloat16."""
    manifest = {key: shape for key, shape in qwen_dit.manifest(CONFIG).items() if key.startswith(BLOCK)}
    path = write(tmp_path_factory.mktemp("full-width") / "block.safetensors", manifest)
    made = keys.plan(path, "transformer", manifest)
    yield made
    made.close()
    path.unlink()


def inputs() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    shapes = {"img": (1, SHAPE[1] * SHAPE[2], CONFIG.dim), "txt": (1, WORDS, CONFIG.dim), "temb": (1, CONFIG.dim)}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def ours(twin: Twin, plan: LoadPlan) -> tuple[torch.nn.Module, list[np.ndarray]]:
    """Our model with the block's weights, and the block's image and text streams."""
    dtype = twin.nn.DTYPES["float32"]
    model = twin.load.empty(lambda: twin.dit.QwenImageTransformer(CONFIG, dtype))
    device = [torch.device("cpu")] if twin.name == "torch" else []
    twin.load.fill(model, plan.stored(FP32), *device)
    img, txt, temb = (twin.array(values, "float32") for values in inputs().values())
    tables = qwen_conditioning.image_and_text_rope(CONFIG, [SHAPE], WORDS)
    rope = tuple(twin.nn.rope_freqs(*(twin.array(table, "float32") for table in pair)) for pair in tables)
    block = model.transformer_blocks[0]
    with torch.inference_mode():
        made = block(img, txt, block.modulation(temb), rope, None, None)
        return model, [twin.engine.numpy(stream) for stream in made]


@pytest.fixture(scope="module")
def torch_model_and_streams(plan: LoadPlan) -> tuple[torch.nn.Module, list[np.ndarray]]:
    return ours(TORCH(), plan)


@pytest.fixture(scope="module")
def expected(torch_model_and_streams: tuple[torch.nn.Module, list[np.ndarray]]) -> list[np.ndarray]:
    """The image and text streams of diffusers' block, on the very same weights and tables of its own."""
    weights = torch_model_and_streams[0].transformer_blocks[0].state_dict()
    with torch.device("meta"):
        block = QwenImageTransformerBlock(
            CONFIG.dim, CONFIG.num_attention_heads, CONFIG.attention_head_dim, eps=qwen_dit.NORM_EPS
        )
    block.load_state_dict(weights, assign=True)
    tables = QwenEmbedRope(theta=10000, axes_dim=list(CONFIG.axes_dims_rope), scale_rope=True)
    img, txt, temb = (torch.from_numpy(values) for values in inputs().values())
    with torch.inference_mode():
        rope = tables([SHAPE], device=img.device, max_txt_seq_len=WORDS)
        made_txt, made_img = block.eval()(img, txt, None, temb, rope)
    return [made_img.numpy(), made_txt.numpy()]


def check(name: str, made: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for stream, ours, theirs in zip(("img", "txt"), made, expected, strict=True):
        start = inputs()[stream].astype(np.float64)
        assert ours.dtype == np.float32 and ours.shape == theirs.shape == start.shape
        update = theirs - start
        assert update.std() > 0.1 * start.std(), "a block that does nothing would prove nothing"
        difference = np.linalg.norm(ours.astype(np.float64) - theirs)
        of_output, of_update = difference / np.linalg.norm(theirs), difference / np.linalg.norm(update)
        worst = np.abs(ours - theirs).max() / np.abs(theirs).max()
        print(f"{name} {stream}: {of_output:.1e} of the output, {of_update:.1e} of the update, worst {worst:.1e}")
        assert max(of_output, of_update, worst) <= LIMIT


@pytest.mark.sample(0)
def test_torch(torch_model_and_streams: tuple[torch.nn.Module, list[np.ndarray]], expected: list[np.ndarray]) -> None:
    check("torch", torch_model_and_streams[1], expected)


@pytest.mark.sample(0)
def test_mlx(plan: LoadPlan, expected: list[np.ndarray]) -> None:
    check("MLX", ours(MLX(), plan)[1], expected)
