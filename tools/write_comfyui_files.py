"""Which of the model files that ComfyUI's image templates name are read here, and as what.

    python tools/write_comfyui_files.py      # writes the table of docs/weights.md again

`comfyui_files.txt` has the names of all model files in the templates "Image" and "Image Tools" of the package
comfyui-workflow-templates-json 0.1.123 (October 2026), by the folder that each belongs in. The first rule that fits a
name counts, and a name that none fits is an error. Formats that a name tells (`FORMATS`) must be read.
"""

from __future__ import annotations

import re
from pathlib import Path

from doc_tables import table, write

LIST = Path(__file__).with_name("comfyui_files.txt")
# Formats that end a name, as they are in the files. All others are bf16 or fp16.
FORMATS = {
    "int8_convrot": True, "int8-convrot": True, "int8": True, "fp8_scaled": True, "fp8_e4m3fn": True,
    "fp8_e4m3fn_scaled": True, "fp8mixed": True, "fp8_mixed": True, "fp8": True, "w4a8": True, "nvfp4": False,
    "nvfp4_awq": False, "w4a8_gptq": True,
}  # fmt: skip
T, E, V, L = "`--transformer`", "`--text-encoder`", "`--vae`", "`--lora`"
# What is read: folder and name, and how it is used.
READ = (
    (r"checkpoints/sd_xl_.*refiner.*", "`--refiner`: SDXL's refiner"),
    (r"checkpoints/sd_xl_.*", "`-m`: Stable Diffusion XL"),
    (r"checkpoints/sd3\.5_large_fp8_scaled", "`-m`: Stable Diffusion 3.5"),
    (r"checkpoints/flux1-(dev|schnell)-fp8", "`-m`: FLUX.1"),
    (r"diffusion_models/qwen_image_2\.1_.*", f"{T}: Qwen-Image-2.1"),
    (r"diffusion_models/qwen_image_edit_.*", f"{T}: Qwen-Image-Edit, -2509, -2511"),
    (r"diffusion_models/qwen_image_layered_bf16", f"{T}: Qwen-Image-Layered"),
    (r"diffusion_models/qwen_image_(2512_)?fp8_e4m3fn", f"{T}: Qwen-Image, -2512"),
    (r"diffusion_models/z_image_.*", f"{T}: Z-Image, Z-Image-Turbo"),
    (r"diffusion_models/flux-2-klein-(base-)?[49]b(-fp8)?", f"{T}: FLUX.2 klein"),
    (r"diffusion_models/flux-2-klein-9b-kv-fp8", f"{T}: FLUX.2 klein KV"),
    (
        r"diffusion_models/flux3-image-klein.*",
        f"{T}: FLUX.3 klein, with its authors' names of layers; the files were not seen",
    ),
    (r"diffusion_models/flux2_dev_fp8mixed", f"{T}: FLUX.2 dev"),
    (r"text_encoders/mistral_3_small_flux2_(bf16|fp8)", f"{E}: FLUX.2 dev"),
    (r"loras/(Flux2Turbo|Flux_2-Turbo).*", f"{L}: FLUX.2 dev"),
    (r"diffusion_models/flux1-(dev|schnell)(-fp8)?", f"{T}: FLUX.1"),
    (r"diffusion_models/flux1-(krea-dev|dev-kontext)_fp8_scaled", f"{T}: FLUX.1 dev's architecture, Kontext"),
    (r"diffusion_models/(flux1-fill-dev|flux\.1-fill-dev-OneReward-transformer_fp8)", f"{T}: FLUX.1 Fill"),
    (r"diffusion_models/flux1-canny-dev", f"{T}: FLUX.1 Canny"),
    (r"diffusion_models/[Cc]hroma1-HD.*", f"{T}: Chroma1-HD"),
    (r"diffusion_models/longcat_image_(edit_)?bf16", f"{T}: LongCat-Image, -Edit"),
    (r"diffusion_models/ernie-image(-turbo)?", f"{T}: ERNIE-Image, -Turbo"),
    (r"diffusion_models/ovis_image_bf16", f"{T}: Ovis-Image"),
    (r"text_encoders/ovis_2\.5", f"{E}: Ovis-Image"),
    (r"diffusion_models/krea2_turbo_(fp8_scaled|int8_convrot)", f"{T}: Krea 2"),
    (r"loras/krea2_darkbrush", f"{L}: Krea 2"),
    (r"diffusion_models/anima-(base|preview).*", f"{T}: Anima, its text conditioner too"),
    (r"checkpoints/NetaYume.*_all_in_one", "`-m`: NetaYume Lumina, whole"),
    (r"loras/anima-turbo-lora-v0\.2", f"{L}: Anima"),
    (r"text_encoders/qwen_3_06b_base", f"{E}: Anima"),
    (r"text_encoders/ministral-3-3b", f"{E}: ERNIE-Image"),
    (r"text_encoders/ernie-image-prompt-enhancer", "`--rewrite-with`: ERNIE-Image's prompt enhancer"),
    (r"loras/flux1-depth-dev-lora", "`--control`: FLUX.1 dev"),
    (r"text_encoders/qwen_2\.5_vl_7b(_fp8_scaled)?", f"{E}: Qwen-Image, -Edit, -Layered, LongCat-Image"),
    (r"text_encoders/qwen3vl_8b_(bf16|fp8_scaled|int8_convrot)", f"{E}: Qwen-Image-2.1"),
    (r"text_encoders/qwen3vl_4b.*", f"{E}: FLUX.3 klein, Krea 2"),
    (r"text_encoders/qwen_3_4b(_fp8_mixed)?", f"{E}: Z-Image, FLUX.2 klein 4B"),
    (r"text_encoders/qwen_3_8b_fp8mixed", f"{E}: FLUX.2 klein 9B"),
    (r"text_encoders/(clip_l|t5xxl_fp16|t5xxl_fp8_e4m3fn_scaled)", f"{E}: FLUX.1, Stable Diffusion 3"),
    (r"vae/qwen_image_2\.1_vae_bf16", f"{V}: Qwen-Image-2.1"),
    (r"vae/qwen_image_vae", f"{V}: Qwen-Image, -Edit, Krea 2, Anima"),
    (r"vae/qwen_image_layered_vae", f"{V}: Qwen-Image-Layered"),
    (r"vae/ae", f"{V}: FLUX.1, Z-Image, Lumina-Image 2.0, LongCat-Image, Ovis-Image"),
    (r"vae/full_encoder_small_decoder", f"{V}: FLUX.2, with a narrower decoder"),
    (r"vae/flux2-vae", f"{V}: FLUX.2, FLUX.3 klein, ERNIE-Image"),
    (r"vae/vae-ft-mse-840000-ema-pruned", f"{V}: Stable Diffusion 1"),
    (r"controlnet/Qwen-Image-InstantX-ControlNet-(Union|Inpainting)", "`--control`: Qwen-Image"),
    (r"controlnet/Qwen-Image-2512-Fun-Controlnet-Union-2602", "`--control`: Qwen-Image-2512"),
    (r"model_patches/qwen_image_canny_diffsynth_controlnet", "`--control`: Qwen-Image"),
    (r"loras/qwen_image_union_diffsynth_lora", "`--control`: Qwen-Image"),
    (r"model_patches/Z-Image-Turbo-Fun-Controlnet-Union", "`--control`: Z-Image"),
    (r"style_models/flux1-redux-dev|clip_vision/sigclip_vision_patch14_384", "`--ip-adapter` and its encoder: FLUX.1"),
    (
        r"(loras|other)/(Qwen-Image|QWEN_EDIT|Qwen_Image|qwen-image|qwen-360|Wuli-Qwen|gummycandy_qwen|"
        r"illustration-1\.0-qwen|SYSTMS_INFL8_LoRA_Qwen).*",
        f"{L}: Qwen-Image, -Edit",
    ),
)
# What is not, and why.
NOT = (
    (r"diffusion_models/qwen_image_layered_control_bf16", "Qwen-Image-Layered with a control picture, not tried"),
    (r".*/chroma-radiance.*", "Chroma1-Radiance, which draws pixels without a VAE"),
    (r"controlnet/sd3\.5_large_controlnet_.*", "control networks of Stable Diffusion 3.5"),
    (r"(loras|model_patches)/uso-flux1-.*", "USO for FLUX.1"),
    (r"loras/removal_timestep_alpha-.*", "a LoRA for FLUX.1 Fill of an unknown kind, not tried"),
    (r"(loras|diffusion_models)/FireRed-.*", "FireRed-Image-Edit: of Qwen-Image-Edit's shapes, not tried"),
    (r"model_patches/anima-lllite-.*", "control networks of Anima"),
    (r"loras/krea2_style_reference", "Krea 2 with pictures of a style, which its text encoder sees"),
    (r"text_encoders/qwen3\.5_9b_flux3.*", "the model that writes prompts of FLUX.3 klein"),
    (r"text_encoders/qwen3\.5_9b_qwen_image_2\.1_pe.*", "Qwen-Image-2.1's writer of prompts"),
)
OTHERS = "other models, or no model that draws"


def fits(rules: tuple[tuple[str, str], ...], name: str) -> str | None:
    stem = re.sub(r"\.(safetensors|pth|pt|ckpt|gguf)$", "", name)
    return next((verdict for pattern, verdict in rules if re.fullmatch(pattern, stem)), None)


def format_of(name: str) -> str:
    """The format that a name ends in, or nothing."""
    stem = name.removesuffix(".safetensors")
    return next((end for end in sorted(FORMATS, key=len, reverse=True) if re.search(rf"[._-]{end}$", stem)), "")


def verdicts() -> dict[str, list[str]]:
    """The names of the files by what becomes of them, in the order of the rules."""
    found: dict[str, list[str]] = {verdict: [] for _, verdict in (*READ, *NOT)} | {OTHERS: []}
    for name in LIST.read_text(encoding="utf-8").split():
        verdict = fits(READ, name)
        assert verdict is None or FORMATS.get(format_of(name), True), name
        found[verdict or fits(NOT, name) or OTHERS].append(name)
    return found


def rows() -> list[list[str]]:
    read = {verdict for _, verdict in READ}
    made = []
    for verdict, names in verdicts().items():
        shown = ", ".join(f"`{name.partition('/')[2].removesuffix('.safetensors')}`" for name in sorted(names))
        shown = f"{len(names)} files" if verdict == OTHERS else shown
        made.append([verdict if verdict in read else f"not read: {verdict}", shown])
    return made


def main() -> None:
    write("weights.md", "comfyui", table(["read as", "files"], rows()))


if __name__ == "__main__":
    main()
