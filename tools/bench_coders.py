"""Times the VAEs and the text encoders at full width against diffusers and transformers, in processor time of one
thread, in one process, with the correctness beside the time.

    python tools/bench_coders.py                   # writes docs/results/coders-cpu.json
    python tools/bench_coders.py clip qwen-vl      # only these, in place of the same ones there

The weights are random, of unit gain. Of Qwen2.5-VL's language part two layers of 28 are run, and 8,192 rows of its
vocabulary. The VAEs are in float32 in every policy. The arms take turns, in an order that is reversed each time. The
result is compared with the peer's own in float32; a row whose result is not equal says INVALID instead of a ratio.
diffusers clamps what Qwen-Image's VAE decodes to -1 to 1; here that is done where pixels become 8 bit, so ours is
clipped for the comparison.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import bench
import numpy as np
import torch
from bench import DTYPES, Arm, exact
from doc_tables import DOCS
from random_model import write

import qwenimg.backends
from qwenimg.common.base.shape import Manifest
from qwenimg.common.families.qwen_image.family import KIND
from qwenimg.common.networks.encoders import clip, qwen, qwen_vl_vision, vision_tower
from qwenimg.common.networks.encoders.qwen_vl_vision import QwenVLVisionConfig
from qwenimg.common.networks.network import Network
from qwenimg.common.networks.vaes import kl_vae, qwen_vae
from qwenimg.common.precision.precision import bases
from qwenimg.common.weights import keys

BASES = bases(KIND)
POLICIES = {"fp32": (BASES["fp32"],), "bf16": (BASES["bf16"], BASES["bf16-plain"])}
SD_VAE = kl_vae.KLVAEConfig(block_out_channels=(128, 256, 512, 512), layers_per_block=2)
TWO_LAYERS = qwen.QwenVLConfig(num_hidden_layers=2, vocab_size=8192)
TWO_VISION_LAYERS = QwenVLVisionConfig(vision_depth=2, full_layers=(1,), num_hidden_layers=1, vocab_size=64)
SEEN = 392  # pixels of a side of a picture for the vision tower
TOKENS, CHUNKS = 128, 2  # of the prompt's template and words; CLIP's two branches of 77 each


@dataclass(frozen=True)
class Case:
    """One network and one of its passes, ours and the peer's."""

    title: str
    size: str
    network: Network
    config: Any
    given: np.ndarray
    peer: Callable[[], torch.nn.Module]  # with any weights, and its buffers made
    theirs: Callable[[Any, torch.Tensor], torch.Tensor]
    ours: Callable[[Any, np.ndarray], Any]
    dtypes: tuple[str, ...] = tuple(POLICIES)
    wanted: Callable[[str], bool] = lambda name: True  # of our parameters
    clip: bool = False


def cases(side: int) -> dict[str, Case]:
    """`side`: pixels of the pictures."""
    return {
        **_vae("qwen-vae", "Qwen-Image's VAE", side, qwen_vae.QwenVAEConfig()),
        **_vae("sd-vae", "Stable Diffusion's VAE", side, SD_VAE),
        "qwen-vl": _text(TWO_LAYERS),
        "qwen-vision": _vision(TWO_VISION_LAYERS),
        "clip": _clip(clip.VIT_L),
    }


def _vae(name: str, title: str, side: int, config: Any) -> dict[str, Case]:
    import diffusers

    qwen, rng = isinstance(config, qwen_vae.QwenVAEConfig), np.random.default_rng(7)
    latents = exact(rng.standard_normal((1, config.z_dim if qwen else config.latent_channels, side // 8, side // 8)))
    pixels = exact(rng.uniform(-1, 1, (1, 3, side, side)))
    made = {} if qwen else vars(config) | kl_vae.NETWORK.described(config)  # the peer's own defaults are published ones
    both = {
        "size": f"{side}x{side}",
        "network": qwen_vae.NETWORK if qwen else kl_vae.NETWORK,
        "config": config,
        "dtypes": ("fp32",),
        "peer": lambda: (diffusers.AutoencoderKLQwenImage if qwen else diffusers.AutoencoderKL)(**made),
    }

    def image(x: torch.Tensor) -> torch.Tensor:
        return x[:, :, None] if qwen else x  # of a video its one frame

    def decodes(parameter: str) -> bool:
        return parameter.startswith(("decoder.", "post_quant_conv."))

    decode = Case(
        title=f"{title}, decoding",
        given=latents,
        theirs=lambda model, z: model.decode(image(z)).sample.reshape(1, 3, side, side),
        ours=lambda vae, z: vae.decode(z),
        wanted=decodes,
        clip=qwen,
        **both,
    )
    encode = Case(
        title=f"{title}, encoding",
        given=pixels,
        theirs=lambda model, x: model.encode(image(x)).latent_dist.parameters.reshape(1, -1, side // 8, side // 8),
        ours=lambda vae, x: vae.encode(x),
        wanted=lambda parameter: not decodes(parameter),
        **both,
    )
    return {f"{name}-decode": decode, f"{name}-encode": encode}


def _text(config: qwen.QwenVLConfig) -> Case:
    from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as theirs

    rope = {"rope_type": "default", "rope_theta": config.rope_theta, "mrope_section": [16, 24, 24]}
    given = theirs.Qwen2_5_VLTextConfig(**vars(config), rope_parameters=rope, bos_token_id=0, eos_token_id=1)
    return Case(
        title="Qwen2.5-VL, two layers",
        size=f"{TOKENS} tokens",
        network=qwen.QWEN2_5_VL,
        config=config,
        given=np.random.default_rng(7).integers(0, config.vocab_size, (1, TOKENS)),
        peer=lambda: theirs.Qwen2_5_VLTextModel(given),
        theirs=lambda model, ids: model(input_ids=ids, use_cache=False).last_hidden_state,
        ours=lambda encoder, ids: encoder.encode(ids[0].tolist()),
    )


def _vision(config: QwenVLVisionConfig) -> Case:
    """The vision tower alone, of two layers: one attends within windows."""
    from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as theirs

    vision = qwen_vl_vision.described(config)["vision_config"]
    side = SEEN // config.patch_size
    tower = replace(qwen_vl_vision.NETWORK, manifest=_tower)
    return Case(
        title="Qwen2.5-VL's vision tower, two layers",
        size=f"{SEEN}x{SEEN}",
        network=tower,
        config=config,
        given=exact(np.random.default_rng(7).standard_normal((side**2, config.patch_values))),
        peer=lambda: theirs.Qwen2_5_VisionTransformerPretrainedModel._from_config(
            theirs.Qwen2_5_VLVisionConfig(**vision)
        ),
        theirs=lambda model, x: model(x, grid_thw=torch.tensor([[1, side, side]])).pooler_output[None],
        ours=lambda encoder, x: encoder.slots(x, side, side),
    )


def _tower(config: QwenVLVisionConfig) -> Manifest:
    manifest = qwen_vl_vision.manifest(config)
    return {name: shape for name, shape in manifest.items() if name.startswith(vision_tower.PREFIX)}


def _clip(config: clip.CLIPConfig) -> Case:
    import transformers

    fields = {name: value for name, value in vars(config).items() if name != "projection_dim"}
    ids = np.random.default_rng(7).integers(0, config.vocab_size - 1, (CHUNKS, config.max_position_embeddings))
    ids[:, -1] = config.vocab_size - 1  # the end token
    return Case(
        title="CLIP ViT-L",
        size=f"{CHUNKS} x {config.max_position_embeddings} tokens",
        network=clip.NETWORK,
        config=config,
        given=ids,
        peer=lambda: transformers.CLIPTextModel(transformers.CLIPTextConfig(**fields)),
        theirs=lambda model, ids: model(input_ids=ids).last_hidden_state,
        ours=lambda encoder, ids: encoder.encode(ids.tolist(), 0, True)[0],
    )


# Arms


def peer_arm(case: Case, file: Path, dtype: torch.dtype) -> Arm:
    """The peer's model with the weights of `file`; its buffers stay as it makes them."""
    with torch.device("meta" if "VAE" in case.title else "cpu"):  # without first values, where no buffer is made
        model = case.peer().requires_grad_(False)
    prefix = "text_model." if any(name.startswith("text_model.") for name in model.state_dict()) else ""
    bench.stored(model, file, dtype, name=lambda key: prefix + key.removeprefix(vision_tower.PREFIX))
    given = torch.from_numpy(case.given)
    given = given.to(dtype) if given.is_floating_point() else given
    name = "diffusers" if "VAE" in case.title else "transformers"
    return bench.peer_arm(name, model, lambda: case.theirs(model, given))


def our_arm(engine: Any, case: Case, file: Path, policy: Any) -> Arm:
    network = case.network
    plan = keys.plan(file, network.role, network.manifest(case.config), uses=lambda stored: network.uses(case.config))
    opened = engine.open(network.name, case.config, plan.stored(policy).only(case.wanted), policy)
    plan.close()

    def numpy(x: Any) -> np.ndarray:
        made = x if isinstance(x, np.ndarray) else engine.numpy(x)
        return made.clip(-1, 1) if case.clip else made

    size = sum(bench.parameter_bytes(opened.model))
    return Arm(bench.our_name(engine, policy.name), lambda: case.ours(opened, case.given), numpy, size)


def measure(case: Case, options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    file, engine, tables = (
        write(folder / "model.safetensors", case.network.manifest(case.config)),
        qwenimg.backends.load("cpu"),
        [],
    )
    peer = peer_arm(case, file, torch.float32)
    reference = peer.numpy(peer.step())
    for dtype in case.dtypes:
        peer = peer if dtype == "fp32" else peer_arm(case, file, DTYPES[dtype])
        arms = [peer, *(our_arm(engine, case, file, policy) for policy in POLICIES[dtype])]
        rows = bench.rows_of(arms, dtype, reference, options.runs)
        tables.append({"what": case.title, "size": case.size, "dtype": dtype, "rows": rows})
        bench.show(f"{case.title}, {case.size}, {dtype}", rows)
        del arms
        gc.collect()
    return tables


def main() -> None:
    parser = bench.options(__doc__)
    parser.add_argument(
        "chosen",
        nargs="*",
        default=[""],
        help="starts of names: qwen-vae, qwen-vae-decode, sd-vae, qwen-vl, qwen-vision, clip",
    )
    parser.add_argument("--side", type=int, default=512, help="pixels of a side of the pictures")
    parser.set_defaults(out=DOCS / "results" / "coders-cpu.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    old = json.loads(options.out.read_text())["tables"] if options.out.exists() else []
    known = cases(options.side)
    for case in (known[name] for start in options.chosen for name in known if name.startswith(start)):
        head = bench.header(options.runs, layers="all", step="one pass")
        with tempfile.TemporaryDirectory(prefix="bench-coders-") as folder:
            tables = measure(case, options, Path(folder))
        own = {name: head.pop(name) for name in ("command", "runs", "load_average")}
        keep = {(table["what"], table["dtype"]): table for table in [*old, *(table | own for table in tables)]}
        old = list(keep.values())
        head["versions"]["transformers"] = version("transformers")
        options.out.write_text(json.dumps(head | {"tables": old}, indent=1) + "\n")


if __name__ == "__main__":
    main()
