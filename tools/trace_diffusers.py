"""Writes a parity passport of what diffusers computes, block by block, under the paths that its modules have here.

python tools/trace_diffusers.py FOLDER -o PASSPORT [--size 64x64] [--steps 2]
qwenimg parity check PASSPORT FOLDER

Of Qwen-Image the transformer and the VAE's decoder, of Stable Diffusion the UNet and the VAE's decoder, in float32 on
the CPU. The arguments of each call are put into the form that our blocks take, from what diffusers itself made of them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import torch
import torch.nn.functional as F

from qwenimg import backends
from qwenimg.backends.torch.ops import crossing
from qwenimg.common.base.block import Block
from qwenimg.common.base.version import __version__
from qwenimg.common.families import registry
from qwenimg.common.formats.fingerprint import fingerprint
from qwenimg.common.numbers.sizes import parse_size
from qwenimg.common.parity import record
from qwenimg.common.parity.blocks import ComponentPolicy, parts, shapes_sum
from qwenimg.common.parity.judged import figures
from qwenimg.common.parity.passport import passport_file
from qwenimg.common.parity.passport.passport import Model, Passport, Side
from qwenimg.common.precision.precision import bases
from qwenimg.common.runtime.traced import Call

PROMPT = "a large blue star"
Given = tuple[Any, ...]
Form = Callable[[Any, dict[str, Any], Any], tuple[Given, Any]]

# Of each kind of block: from a module of diffusers, its arguments by name and what it gave, our arguments and result


def one(module: Any, given: dict[str, Any], made: Any) -> tuple[Given, Any]:
    """A tensor in and a tensor out; of frames only one."""
    x = next(value for value in given.values() if isinstance(value, torch.Tensor))
    y = made if isinstance(made, torch.Tensor) else made[0]
    return (x[:, :, 0] if x.ndim == 5 else x,), y[:, :, 0] if y.ndim == 5 else y


def joint_block(module: Any, given: dict[str, Any], made: Any) -> tuple[Given, Any]:
    temb, rope = given["temb"], given["image_rotary_emb"]
    mods = (module.img_mod(temb), module.txt_mod(temb))
    tables = tuple(torch.view_as_real(table)[:, None].contiguous() for table in rope)
    return (given["hidden_states"], given["encoder_hidden_states"], mods, tables, None, None), (made[1], made[0])


def head(module: Any, given: dict[str, Any], made: Any) -> tuple[Given, Any]:
    if not hasattr(module, "linear"):
        return one(module, given, made)
    x, temb = given["0"], given["1"]
    return (x, module.linear(F.silu(temb)), torch.float32), made


def time(module: Any, given: dict[str, Any], made: Any) -> tuple[Given, Any]:
    return (module.time_proj(given["0"]), torch.zeros(1, dtype=torch.int64)), made


def residual(module: Any, given: dict[str, Any], made: Any) -> tuple[Given, Any]:
    return (given["0"], F.silu(given["1"])), made


def pair(block: Any, text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys and values of the text, by heads."""
    attend = block.attn2
    k, v = (layer(text).unflatten(-1, (attend.heads, -1)) for layer in (attend.to_k, attend.to_v))
    return k, v


def tokens(module: Any, given: dict[str, Any], made: Any) -> tuple[Given, Any]:
    return (given["0"], pair(module, given["encoder_hidden_states"])), made


def attention(module: Any, given: dict[str, Any], made: Any) -> tuple[Given, Any]:
    text = given["encoder_hidden_states"]
    return (given["0"], tuple(pair(block, text) for block in module.transformer_blocks)), made[0]


def resampled(module: Any, given: dict[str, Any], made: Any) -> tuple[Given, Any]:
    """Our sampler of the UNet takes what was enlarged already."""
    x = given["0"]
    return (F.interpolate(x, made.shape[2:], mode="nearest") if made.shape[2] > x.shape[2] else x,), made


FORMS: dict[str, Form] = {
    "qwen_dit.block": joint_block,
    "qwen_dit.head": head,
    "qwen_dit.time": time,
    "qwen_dit.start": one,
    "unet.resnet": residual,
    "unet.tokens": tokens,
    "unet.attention": attention,
    "unet.sampler": resampled,
    "unet.time": one,
    "unet.end": one,
    **{f"{vae}.{kind}": one for vae in ("kl_vae", "qwen_vae") for kind in ("resnet", "attention", "sampler", "end")},
}


class Trace:
    """The first call of every block of one component."""

    def __init__(self, part: ComponentPolicy, module: torch.nn.Module):
        self.part = part
        self.calls: dict[str, Call] = {}
        for path, child in module.named_modules():
            for block in part.network.traced:
                form = FORMS.get(f"{part.component.network}.{block.name}")
                if form and path and not block.method and part.block(block.name, path) is block:
                    child.register_forward_hook(partial(self.take, path, block, form), with_kwargs=True)

    def take(self, path: str, block: Block, form: Form, module: Any, args: Given, named: Any, made: Any) -> None:
        if path in self.calls:
            return
        self.calls[path] = None  # type: ignore[assignment]  # the form may call parts of the module again
        given = {str(i): value for i, value in enumerate(args)} | named
        arguments, result = form(module, given, made)
        crossed = tuple(crossing.outward(x, block.image and i == 0) for i, x in enumerate(arguments))
        results = crossing.outward(result, block.image)
        self.calls[path] = Call(path=path, block=block, arguments=crossed, results=results)

    def found(self) -> list[tuple[str, str, Call]]:
        name = self.part.name
        return [(name, f"{name}.{call.block.called(path)}", call) for path, call in self.calls.items()]


def trace(folder: Path, size: tuple[int, int], steps: int) -> Passport:
    """Of one picture that diffusers draws. Raises ModelError for a folder that we cannot open."""
    opened = registry.open_model(folder)
    precision = bases(opened.family.precision)["fp32"]
    found = parts(opened.checkpoint, precision)
    diffusers.utils.logging.set_verbosity_error()
    pipe = diffusers.DiffusionPipeline.from_pretrained(folder, torch_dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    traces = [Trace(found[name], getattr(pipe, name)) for name in ("transformer", "unet", "vae") if name in found]
    generator = torch.Generator().manual_seed(0)
    pipe(PROMPT, width=size[0], height=size[1], num_inference_steps=steps, generator=generator)
    engine = backends.load("cpu")
    recorder = record.Recorder(found, dict.fromkeys(found, True), None, engine, lambda text: None)
    with torch.inference_mode():
        blocks = recorder.blocks(call for one in traces for call in one.found())
    side = Side(
        backend="diffusers",
        device=engine.device,
        versions={"diffusers": diffusers.__version__, "torch": torch.__version__},
        tf32=False,
        figures=tuple(figures(found[block.component], block) for block in blocks),
    )
    if any(figure.error != figure.error for block in side.figures for figure in block):
        raise SystemExit(f"{folder}: diffusers computes values that are not finite here; try other --steps")
    components = opened.checkpoint.components.items()
    return Passport(
        version=__version__,
        created=datetime.now(UTC).replace(microsecond=0).isoformat(),
        model=Model(
            name=folder.resolve().name,
            family=opened.family.name,
            quantize="",
            fingerprints={name: fingerprint(part.plan.files) for name, part in components},
            shapes={name: shapes_sum(part.plan) for name, part in components},
        ),
        precision=precision.name,
        places=precision.places(),
        picture=None,
        blocks=tuple(blocks),
        sides=(side,),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--size", type=parse_size, default=(64, 64))
    parser.add_argument("--steps", type=int, default=2)
    options = parser.parse_args()
    made = trace(options.folder, options.size, options.steps)
    passport_file.write(options.output, made, overwrite=True)
    worst = max(figure.error / figure.allowed for block in made.sides[0].figures for figure in block)
    print(f"{len(made.blocks)} blocks; diffusers' largest error is {worst:.2f} of what is allowed")


if __name__ == "__main__":
    main()
