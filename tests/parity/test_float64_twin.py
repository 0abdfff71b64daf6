"""The reference of all parity tests: the torch twin, run whole in float64, is diffusers in double precision.

diffusers makes its sinusoid in float32 even in double, worth 8e-6 here, so both get the same time features. It also
rotates, takes the variance of its RMSNorm, and upsamples in float32, which is what the measured differences are.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from support.exact_times import ExactTimes
from support.parity_cases import TORCH
from support.policies import FP64
from support.tiny_model import DIT, TEXT, VAE, tiny_dit, tiny_text_encoder, tiny_vae
from torch.utils._python_dispatch import TorchDispatchMode

from qwenimg.backends.torch.ops import layers
from qwenimg.common.networks.denoisers import qwen_conditioning, qwen_dit
from qwenimg.common.networks.encoders import decoder, qwen
from qwenimg.common.networks.vaes import qwen_vae
from qwenimg.common.numbers import timesteps
from qwenimg.common.weights import keys
from qwenimg.common.weights.plan import LoadPlan

# Relative L2 between the float64 twin and diffusers in double. Measured: see each test's output.
LIMIT = 1e-6

TIMES = (913.7, 400.25)
TARGET = [(1, 5, 3)]
EDIT = [(1, 5, 3), (1, 2, 4), (1, 3, 3)]
LAYERS = [(1, 5, 3), (1, 5, 3), (1, 5, 3), (1, 4, 2)]  # two layers, the whole, and the condition
ZERO, ADD, LAYERED = {"zero_cond_t": True}, {"use_additional_t_cond": True}, {"use_layer3d_rope": True}

CASES = {
    "plain": ({}, TARGET, (7,), 0),
    "one token": ({}, [(1, 1, 1)], (1,), 0),
    "several images": ({}, EDIT, (7,), 0),
    "padded batch": ({}, TARGET, (7, 4, 11), 0),
    "zero_cond_t, target only": (ZERO, TARGET, (7,), 0),
    "zero_cond_t, one condition": (ZERO, EDIT[:2], (7,), 0),
    "zero_cond_t, two conditions": (ZERO, EDIT, (7,), 0),
    "zero_cond_t, padded batch": (ZERO, EDIT, (9, 2), 0),
    "additional 0": (ADD, TARGET, (7,), 0),
    "additional 1": (ADD, TARGET, (7,), 1),
    "layered": (LAYERED, LAYERS, (7,), 0),
    "layered, more layers than tokens a side": (LAYERED, [(1, 2, 2)] * 4, (7,), 0),
    "layered, additional 1": (LAYERED | ADD, LAYERS, (7,), 1),
    "layered, padded batch": (LAYERED | ADD, LAYERS, (3, 8), 0),
    "zero_cond_t, additional 1": (ZERO | ADD, EDIT, (7,), 1),
}


# Weights are stored in float32 and widened when they are read.
READS = ("lift_fresh.default", "view.dtype", "to.device", "to.dtype_layout", "to.dtype")
STORED = {f"aten.{name} torch.float32" for name in READS}


def transformer_plan(folder: Path, config: qwen_dit.QwenDiTConfig) -> LoadPlan:
    return keys.plan(folder, "transformer", qwen_dit.manifest(config), uses=qwen_dit.uses).stored(FP64)


class NarrowTensors(TorchDispatchMode):
    """Notes every operation with a floating tensor, in or out, that is not float64."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves((args, kwargs, result)):
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                self.count += 1
                if tensor.dtype != torch.float64:
                    self.found.add(f"{function} {tensor.dtype}")
        return result


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype == torch.float64
    assert ours.isfinite().all() and theirs.std() > 0.1, "zeros would prove nothing"
    return float((ours - theirs).norm() / theirs.norm())


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.sample(3)
def test_transformer(tmp_path: Path, case: str) -> None:
    changes, shapes, lengths, addition = CASES[case]
    theirs = tiny_dit(**changes)
    theirs.save_pretrained(tmp_path)
    theirs = theirs.double()
    theirs.time_text_embed.time_proj = ExactTimes()
    config = qwen_dit.QwenDiTConfig(**(DIT | changes))
    ours = TORCH().engine.open("qwen_dit", config, transformer_plan(tmp_path, config), FP64)

    B, S, L = len(lengths), max(lengths), sum(math.prod(shape) for shape in shapes)
    latents = normal(1, B, L, 64)
    texts = [normal(10 + i, 1, length, 60) for i, length in enumerate(lengths)]
    with NarrowTensors() as loading:
        modulation = ours.modulate(qwen_conditioning.time_rows(config, TIMES, "float32"), addition)
    with NarrowTensors() as narrow:
        condition = ours.condition(texts, shapes)
        made = [ours.predict(latents, (modulation, step), condition) for step in range(len(TIMES))]
    assert not narrow.found and narrow.count > 500
    assert loading.found <= STORED

    padded = torch.cat([torch.nn.functional.pad(text, (0, 0, 0, S - text.shape[1])) for text in texts])
    # With zero_cond_t diffusers doubles the batch of timesteps but not what is added to them.
    chosen = torch.full((2 * B if config.zero_cond_t else B,), addition)
    mask = torch.arange(S)[None] < torch.tensor(lengths)[:, None]
    for step, time in enumerate(TIMES):
        with torch.no_grad():
            expected = theirs(
                hidden_states=latents,
                encoder_hidden_states=padded,
                encoder_hidden_states_mask=mask if B > 1 else None,
                timestep=torch.full((B,), timesteps.rounded(time, "float32"), dtype=torch.float64),
                img_shapes=[shapes] * B,
                additional_t_cond=chosen if ours.config.use_additional_t_cond else None,
                return_dict=False,
            )[0]
        error = relative(made[step], expected)
        print(f"{case}, time {time}: {error:.1e}")
        assert error <= LIMIT


def test_a_cast_to_float32_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An FP32 place is float32 at least: one that narrows float64 must not pass unseen."""
    tiny_dit().save_pretrained(tmp_path)
    config = qwen_dit.QwenDiTConfig(**DIT)
    ours = TORCH().engine.open("qwen_dit", config, transformer_plan(tmp_path, config), FP64)
    monkeypatch.setattr(layers, "at_least_float32", lambda x: x.float())
    with NarrowTensors() as narrow:
        ours.condition([normal(3, 1, 5, 60)], TARGET)
    print(narrow.found)
    assert any("rms_norm" in name for name in narrow.found)


def test_text_encoder(tmp_path: Path) -> None:
    theirs = tiny_text_encoder()
    theirs.save_pretrained(tmp_path)
    theirs = theirs.double()
    fields = {"hidden_size": 60, "rope_theta": 1e6, "vocab_size": theirs.config.text_config.vocab_size}
    config = qwen.QwenVLConfig(**({key: TEXT[key] for key in TEXT if "num" in key or "size" in key} | fields))
    loaded = keys.plan(tmp_path, "text_encoder", decoder.manifest(config), rename=qwen.QWEN2_5_VL.rename)
    ours = TORCH().engine.open("decoder", config, loaded.stored(FP64), FP64)
    for length in (1, 53):
        ids = np.random.default_rng(length).integers(0, config.vocab_size, length).tolist()
        with NarrowTensors() as narrow:
            made = ours.encode(ids)
        assert not narrow.found and narrow.count > 100
        with torch.no_grad():
            expected = theirs.model.language_model(input_ids=torch.tensor([ids])).last_hidden_state
        error = relative(made, expected)
        print(f"text encoder, {length} tokens: {error:.1e}")
        assert error <= LIMIT


@pytest.mark.parametrize("blocks", [1, 2])
def test_vae(tmp_path: Path, blocks: int) -> None:
    theirs = tiny_vae(num_res_blocks=blocks)
    theirs.save_pretrained(tmp_path)
    theirs = theirs.double()
    config = qwen_vae.QwenVAEConfig(**(VAE | {"num_res_blocks": blocks}))
    loaded = keys.plan(tmp_path, "vae", qwen_vae.manifest(config), uses=qwen_vae.uses)
    ours = TORCH().engine.open("qwen_vae", config, loaded.stored(FP64), FP64)
    latents, pixels = normal(1, 2, 16, 5, 3), normal(2, 2, 3, 24, 40).clamp(-1, 1)
    with NarrowTensors() as narrow:
        decoded, encoded = ours.decode(latents.numpy()), ours.encode(pixels.numpy())
    assert not narrow.found and narrow.count > 500
    with torch.no_grad():
        # Not through `decode`, which clamps.
        images = theirs.decoder(theirs.post_quant_conv(latents[:, :, None]))[:, :, 0]
        moments = theirs.encode(pixels[:, :, None]).latent_dist.parameters[:, :, 0]
    errors = {
        "decoder": relative(torch.from_numpy(decoded), images),
        "encoder": relative(torch.from_numpy(encoded), moments),
    }
    print(f"vae, {blocks} residual blocks: {errors}")
    assert max(errors.values()) <= LIMIT
