"""Names of diffusers that neither the module nor a pipeline has, and what does it here: for messages."""

from __future__ import annotations

from qwenimg.common.base.errors import not_built
from qwenimg.common.base.text import by_name, clean

_FOREIGN = by_name({
    "qwenimg.load(MODEL) opens a model; qwenimg.diffusers has diffusers' classes":
        "from_pretrained from_single_file from_pipe AutoPipelineForText2Image AutoPipelineForImage2Image "
        "AutoPipelineForInpainting DiffusionPipeline",
    "give backend= and precision= to qwenimg.load": "to cuda cpu device dtype half float mps",
    "give lora= to a call, as lora=('style.safetensors', 0.8)":
        "load_lora_weights set_adapters fuse_lora unfuse_lora unload_lora_weights load_lora add_lora disable_lora "
        "enable_lora delete_adapters",
    "weights are freed and streamed as memory asks; max_memory= of qwenimg.load sets a limit":
        "enable_model_cpu_offload enable_sequential_cpu_offload enable_group_offload free_memory",
    "the fastest attention is chosen by itself":
        "enable_attention_slicing enable_xformers_memory_efficient_attention set_attention_backend",
    "the VAE takes tiles where memory asks for them":
        "enable_vae_tiling enable_vae_slicing enable_tiling enable_slicing",
    "give sampler= and schedule= to a call": "scheduler",
    "an IP-Adapter is control=(file, picture, scale) of a call": "load_ip_adapter set_ip_adapter_scale "
        "unload_ip_adapter ip_adapter_image ip_adapter_image_embeds",
    "pipe = qwenimg.load(MODEL) opens a model, and a call returns the picture: pipe(prompt, seed=7).image":
        "generate generate_image txt2img text2img imagine run",
    "give embedding= to a call": "load_textual_inversion unload_textual_inversion",
    "give image= to a call": "img2img inpaint edit",
    "stream(...) yields the steps": "set_progress_bar_config callback",
    "`qwenimg convert MODEL FOLDER` writes a model": "save_pretrained",
    "`qwenimg models --json` lists the models": "list_models models available_models",
    "qwenimg.QwenimgError is the base of all errors here": "Error QwenImgError QwenError exceptions errors",
    "models are fetched by `qwenimg pull NAME`": "download pull",
    "pass it to qwenimg.load: transformer=, text_encoder=, vae=": "unet transformer vae text_encoder components",
})  # fmt: skip


def no_attribute(owner: str, name: str) -> str:
    """Return the message for an attribute that `owner` has not, with what does it here if `name` is of diffusers."""
    advice = _FOREIGN.get(name) or not_built(name)
    if advice is None and name.endswith("Pipeline"):
        advice = f"qwenimg.diffusers has diffusers' classes: from qwenimg.diffusers import {clean(name, 60)}"
    return f"{owner} has no attribute {clean(name, 60)!r}" + (f": {advice}" if advice else "")
