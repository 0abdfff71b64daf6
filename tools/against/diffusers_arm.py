"""The peer's arm of `tools/bench_against.py diffusers`, a process of its own: diffusers' pipeline on the same folder,
noise, prompt, steps and dtypes, timed as ours is."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from slopes import steady_step

from qwenimg.backends.torch import ops
from qwenimg.common.memory.memory import ram_peak
from qwenimg.common.numbers.packing import pack, unpack

_STATES = ("prompt_embeds", "negative_prompt_embeds", "pooled_prompt_embeds", "negative_pooled_prompt_embeds")


def run(job: dict[str, Any]) -> dict[str, Any]:
    """The job's arm as `measure.bench.Timings` has it; its final latents are written to `latents`."""
    begun = time.perf_counter()
    import diffusers

    imported = time.perf_counter() - begun
    diffusers.utils.logging.set_verbosity_error()
    pipe = _opened(diffusers, job)
    loaded = time.perf_counter() - begun - imported
    text = _encoded(pipe, job)
    noise = np.load(job["noise"])
    first, _ = _steps(pipe, job, noise, text, job["few"])
    decoding = _decoding(pipe, noise)
    total = time.perf_counter() - begun
    slope, processor, final = steady_step(lambda steps: _steps(pipe, job, noise, text, steps), job)
    np.save(job["latents"], final)
    stages = {"import": imported, "load": loaded, "text": text["seconds"], "first step": first[0]}
    stages |= {"steady step": slope, "decode": decoding, "total": total}
    versions = {"python": platform.python_version(), "torch": torch.__version__, "diffusers": diffusers.__version__}
    return {
        "arm": "diffusers",
        "device": job["device"],
        "precision": job["dtype"],
        "stages": stages,
        "processor_step": processor,
        "peak": torch.cuda.max_memory_allocated() if job["device"] == "cuda" else ram_peak(),
        "versions": versions,
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0,
    }


def _opened(diffusers: Any, job: dict[str, Any]) -> Any:
    """The folder's own pipeline; the VAE in the dtype that ours has for it."""
    index = json.loads((Path(job["folder"]) / "model_index.json").read_text(encoding="utf-8"))
    placed = {"local_files_only": True} | ({"device_map": "cuda"} if job["device"] == "cuda" else {})
    dtype, vae_dtype = (getattr(torch, job[name]) for name in ("dtype", "vae_dtype"))
    cls = getattr(diffusers, index["vae"][1])
    vae = cls.from_pretrained(job["folder"], subfolder="vae", torch_dtype=vae_dtype, local_files_only=True)
    pipe = getattr(diffusers, index["_class_name"])
    absent = {name: None for name, kind in index.items() if kind == [None, None]}  # such as SD 3's T5
    made = pipe.from_pretrained(job["folder"], vae=vae, torch_dtype=dtype, **absent, **placed)
    made.set_progress_bar_config(disable=True)
    return made


def _encoded(pipe: Any, job: dict[str, Any]) -> dict[str, Any]:
    """What the steps take of both prompts, made once, and the seconds that it took."""
    start = time.perf_counter()
    made: dict[str, Any] = {}
    with torch.inference_mode():
        if _is_qwen(pipe):
            for name, prompt in (("", job["prompt"]), ("negative_", job["negative_prompt"])):
                if not name or job["guidance"] > 1:
                    states, mask = pipe.encode_prompt(prompt=prompt)
                    made |= {f"{name}prompt_embeds": states, f"{name}prompt_embeds_mask": mask}
        elif _is_z_image(pipe):
            states, negative = pipe.encode_prompt(
                prompt=job["prompt"],
                negative_prompt=job["negative_prompt"],
                do_classifier_free_guidance=job["guidance"] > 0,
            )
            made = {"prompt_embeds": states, "negative_prompt_embeds": negative}
        elif _is_flux(pipe):
            length = 512 if pipe.transformer.config.guidance_embeds else 256  # as its card has it
            states, pooled, _ = pipe.encode_prompt(job["prompt"], None, max_sequence_length=length)
            made = {"prompt_embeds": states, "pooled_prompt_embeds": pooled}
        elif _is_flux2(pipe):
            made = {"prompt_embeds": pipe.encode_prompt(job["prompt"])[0]}
            if job["guidance"] > 1 and not pipe.config.is_distilled:
                made["negative_prompt_embeds"] = pipe.encode_prompt("")[0]
        elif _is_sd3(pipe):
            guided = job["guidance"] > 1
            found = pipe.encode_prompt(
                job["prompt"], None, None, negative_prompt=job["negative_prompt"], do_classifier_free_guidance=guided
            )
            made = {name: states for name, states in zip(_STATES, found, strict=True) if states is not None}
        else:
            found = pipe.encode_prompt(
                prompt=job["prompt"],
                negative_prompt=job["negative_prompt"] or None,
                device=torch.device(job["device"]),
                num_images_per_prompt=1,
                do_classifier_free_guidance=job["guidance"] > 1,
            )
            made = {name: states for name, states in zip(_STATES, found, strict=False) if states is not None}
    return {"states": made, "seconds": time.perf_counter() - start}


def _is_qwen(pipe: Any) -> bool:
    return type(pipe).__name__.startswith("QwenImage")


def _is_z_image(pipe: Any) -> bool:
    return type(pipe).__name__.startswith("ZImage")


def _is_flux(pipe: Any) -> bool:
    return type(pipe).__name__ == "FluxPipeline"


def _is_flux2(pipe: Any) -> bool:
    return type(pipe).__name__.startswith("Flux2")


def _is_sd3(pipe: Any) -> bool:
    return type(pipe).__name__.startswith("StableDiffusion3")


def _steps(
    pipe: Any, job: dict[str, Any], noise: np.ndarray, text: dict[str, Any], steps: int
) -> tuple[list[float], np.ndarray]:
    """Seconds of each step, and the final latents [1, C, h, w]."""
    ended: list[float] = []

    def at_end(pipe: Any, index: int, timestep: Any, kept: dict[str, Any]) -> dict[str, Any]:
        if job["device"] == "cuda":
            torch.cuda.synchronize()
        ended.append(time.perf_counter())
        return kept

    start = time.perf_counter()
    device = torch.device(job["device"])
    dtype = torch.float32 if _is_z_image(pipe) else getattr(torch, job["dtype"])  # of the latents
    is_packed = _is_qwen(pipe) or _is_flux(pipe)
    packed = pack(noise) if is_packed else noise
    final = pipe(
        **text["states"],
        **{"true_cfg_scale" if _is_qwen(pipe) else "guidance_scale": job["guidance"]},
        width=noise.shape[3] * job["scale"],
        height=noise.shape[2] * job["scale"],
        num_inference_steps=steps,
        latents=ops.stream(ops.table(packed, dtype, device), dtype),
        output_type="latent",
        callback_on_step_end=at_end,
    ).images
    seconds = [b - a for a, b in zip([start, *ended[:-1]], ended, strict=True)]
    made = ops.numpy(_standardized(pipe, final) if _is_flux2(pipe) else final)
    return seconds, unpack(made, *noise.shape[2:]) if is_packed else made


def _standardized(pipe: Any, final: torch.Tensor) -> torch.Tensor:
    """FLUX.2's latents in patches, as the sampler has them, of those that its pipeline returns."""
    norm = pipe.vae.bn
    mean, deviation = norm.running_mean[:, None, None], torch.sqrt(norm.running_var[:, None, None] + norm.eps)
    return (pipe._patchify_latents(final) - mean) / deviation


def _decoding(pipe: Any, latents: np.ndarray) -> float:
    z = ops.stream(ops.table(latents, torch.float32, pipe.vae.device), pipe.vae.dtype)
    z = z[:, :, None] if _is_qwen(pipe) else pipe._unpatchify_latents(z) if _is_flux2(pipe) else z
    start = time.perf_counter()
    with torch.inference_mode():
        ops.numpy(pipe.vae.decode(z, return_dict=False)[0])
    return time.perf_counter() - start


if __name__ == "__main__":
    print(json.dumps(run(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))))
