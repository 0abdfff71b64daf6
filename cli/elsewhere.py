"""Other programs' words, and the words here for them: tables for messages about unknown options, and about a prompt of
one word that is rather a command. Real prompts of one word (cat, rain, plane) pass, so a short command's name is
recognized only by its own letters.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from qwenimg.common.base.errors import not_built

_NEGATIVE = "give -n, --negative-prompt"
_DTYPE = "give --precision"
_PART = "give it with --precision, as auto,vae=fp32 or auto,unet=bf16"
_DEVICE = "give --backend auto, mlx, cuda or cpu; qwenimg plan --on 3060 plans for another machine"
_MEMORY = "give --max-memory, as 8GB, or -q 8; qwenimg plan, or plan --memory 12GB, says what fits"
_TILES = "the VAE takes tiles where memory asks for them; --max-memory sets a limit"
_LORA = "a LoRA and its strength go together, as --lora FILE:SCALE, once for each"
_SCHEDULER = "the solver is --sampler and the noise levels are --schedule; qwenimg samplers lists both"
_NOISE = "noise is the same on every machine, that of torch's CPU generator; --latents gives another"
_FORMAT = "the ending of -o decides, as -o picture.webp"
_LINES = "--quiet leaves out progress, --json prints events"
_SAFETY = "there is none; leave it out"
_BLOCKS = "give --step-cache, as 0.1"

_NAME = "give -o, as -o name-{seed}.png"
_PREVIEW = "--preview shows the picture while it is drawn"
_FAST = "give --preset fast or quality; --few-steps and --steps save most"

OPTIONS = {
    **dict.fromkeys(("--neg", "--negative", "--neg-prompt", "--uc", "--negprompt"), _NEGATIVE),
    **dict.fromkeys(("--dtype", "--torch-dtype", "--fp16", "--bf16", "--half", "--type", "--no-half",
                     "--float32", "--float16", "--bfloat16", "--fp32"), _DTYPE),
    **dict.fromkeys(
        ("--fp16-vae", "--bf16-vae", "--fp32-vae", "--unet-precision", "--vae-precision", "--clip-precision"), _PART
    ),
    **dict.fromkeys(("--upcast-attention", "--force-upcast-attention"), "give --precision auto,attention=fp32"),
    "--dont-upcast-attention": "give --precision auto,attention=fused",
    "--upcast-matmul": "give --precision auto,matmul=fp32",
    **dict.fromkeys(("--device", "--gpu", "--cpu", "--cuda", "--mps", "--metal", "--gpu-id"), _DEVICE),
    **dict.fromkeys(
        ("--low-vram", "--lowvram", "--medvram", "--low-ram", "--cpu-offload", "--offload", "--offload-to-cpu",
         "--mlx-cache-limit-gb", "--novram", "--highvram", "--vram"),
        _MEMORY,
    ),
    **dict.fromkeys(("--ar", "--aspect-ratio", "--ratio"), "give --aspect, as 16:9"),
    **dict.fromkeys(("--no", "--exclude"), _NEGATIVE),
    **dict.fromkeys(("--tiling", "--vae-tiling", "--vae-slicing", "--tiled", "--tiled-vae", "--vae-on-cpu",
                     "--tile", "--tile-size"), _TILES),
    **dict.fromkeys(("--loras", "--lora-paths", "--lora-scale", "--lora-scales", "--lora-style"), _LORA),
    **dict.fromkeys(("--lora-side", "--lora-fuse"), "give --lora-mode side or --lora-mode fuse"),
    "--lightning": "give --few-steps lightning, or lightning:STEPS",
    "--turbo": "give --few-steps turbo, or turbo:STEPS",
    "--lcm": "give --few-steps lcm, or lcm:STEPS",
    "--hyper": "give --few-steps hyper, or hyper:STEPS",
    **dict.fromkeys(("--scheduler",), _SCHEDULER),
    **dict.fromkeys(("--rng", "--sampler-rng", "--generator"), _NOISE),
    **dict.fromkeys(("--format", "--image-format", "--output-format", "--ext"), _FORMAT),
    **dict.fromkeys(("--progress", "--no-progress"), _LINES),
    **dict.fromkeys(("--verbose", "--log-level", "--log"), "--debug timing,shapes prints more, --json prints events"),
    **dict.fromkeys(("--callback", "--callback-steps"), "--json prints an event for each step; in Python: pipe.stream"),
    **dict.fromkeys(("--variations", "--n"), "give -N, --num-images, or several seeds, as -s 1-4"),
    **dict.fromkeys(("--no-cfg", "--disable-cfg"), "give --guidance 1 (0 in Z-Image), which turns guidance off"),
    "--8bit": "give -q 8",
    "--6bit": "give -q 6",
    "--4bit": "give -q 4",
    "--res": "give --size, as 1024x768",
    "--timeout": "Ctrl-C ends a run after its step; qwenimg serve takes --deadline",
    "--threads": "set OMP_NUM_THREADS in the environment, as OMP_NUM_THREADS=4",
    **dict.fromkeys(("--safety-checker", "--no-safety-checker", "--disable-safety-checker", "--nsfw"), _SAFETY),
    **dict.fromkeys(("--yes", "--force"), "a run asks nothing; --overwrite replaces files that exist"),
    **dict.fromkeys(("--webui", "--web", "--gui", "--ui", "--share"), "that is the server's page: qwenimg serve"),
    **dict.fromkeys(("--cache", "--cache-mode", "--teacache", "--fbcache", "--step-cache-ratio"), _BLOCKS),
    **dict.fromkeys(("--batch-size", "--batch-count", "--count", "--num"), "give -N, --num-images"),
    **dict.fromkeys(("--outdir", "--out-dir", "--output-dir", "--out"), "give -o, as -o folder/"),
    **dict.fromkeys(("--prompts", "--from-file"), "give --prompt-file"),
    **dict.fromkeys(("--clip-l", "--clip-g", "--t5xxl", "--llm", "--qwen2vl", "--clip"), "give --text-encoder"),
    **dict.fromkeys(("--diffusion-model", "--ckpt", "--checkpoint"), "give -m, or --transformer for that part"),
    **dict.fromkeys(("--flow-shift", "--shift"), "the shift is the model's own; --schedule has other noise levels"),
    **dict.fromkeys(("--batch", "--n-iter", "--n-samples"), "give -N, --num-images"),
    **dict.fromkeys(("--denoise", "--denoising-strength"), "give --strength"),
    **dict.fromkeys(("--image-strength", "--init-image-strength"), "give --strength, which in mflux runs backwards"),
    **dict.fromkeys(("--filename-prefix", "--prefix", "--name", "--outfile", "--filename"), _NAME),
    **dict.fromkeys(("--fast", "--quality", "--draft"), _FAST),
    **dict.fromkeys(
        ("--xformers", "--flash-attn", "--flash-attention", "--sage-attention", "--opt-sdp-attention", "--fa"),
        "the fastest attention is chosen by itself",
    ),
    **dict.fromkeys(("--q", "--bits", "--quant", "--load-in-8bit", "--load-in-4bit"), "give -q 8, 6 or 4"),
    **dict.fromkeys(("--comfy", "--comfyui", "--lora-dir", "--lora-model-dir", "--ckpt-dir"), "give --models-dir"),
    **dict.fromkeys(("--workflow", "--recipe", "--metadata"), "give --from, with a picture that has it"),
    **dict.fromkeys(("--open", "--show", "--view"), "the path that is printed is for a viewer, as open $(qwenimg ...)"),
    **dict.fromkeys(("--on", "--mac", "--machine"), "plan takes --on, as in: qwenimg plan --on 3060"),
    "--sidecar": "give --save-latents for latents; the recipe is in the picture, and qwenimg info prints it",
    **dict.fromkeys(
        ("--controlnet", "--control-net", "--control-image", "--controlnet-image-path", "--controlnet-strength"),
        "a network, its picture and its strength go together, as --control MODEL=PICTURE:SCALE",
    ),
    "--resolution": "give --size; a model that makes layers names the sizes that it was trained with",
    "--edit": 'give the picture as -i PICTURE, or: qwenimg edit PICTURE "TEXT"',
    "--inpaint": 'give -i PICTURE --mask MASK, or: qwenimg inpaint PICTURE MASK "TEXT"',
    **dict.fromkeys(("--listen", "--port", "--host"), "that is for the server: qwenimg serve"),
    **dict.fromkeys(("--stepwise-image-output-dir", "--preview-dir", "--preview-method", "--preview-path"), _PREVIEW),
}  # fmt: skip
BACKENDS = {
    "metal": "mlx",
    "mps": "mlx",
    "apple": "mlx",
    "gpu": "auto",
    "nvidia": "cuda",
    "torch": "cuda",
    "rocm": "cuda",
}
LIKE = 0.78  # difflib's similarity of an option with a known one, from which on that is suggested


def unknown(option: str, known: Iterable[str]) -> str:
    """Return the message for an `option` that is not among the `known` ones."""
    if (advice := OPTIONS.get(option)) is not None:
        return f"{option} is no option here: {advice}"
    if (missing := not_built(option)) is not None:
        return f"{option} is no option here: {missing}"
    near = difflib.get_close_matches(option, list(known), n=2, cutoff=LIKE)
    if near:
        return f"{option} is no option here; did you mean {' or '.join(near)}?"
    return f"{option} is no option here; qwenimg --help-all lists all"


def backend(name: str) -> str:
    """Return a suggestion for a `name` that is no backend, or ""."""
    plain = name.strip().lower().partition(":")[0]
    suggestion = plain if plain in BACKENDS.values() else BACKENDS.get(plain)
    return f" Did you mean {suggestion}?" if suggestion else ""


# Commands

LONG = ("generate", "devices", "selftest", "samplers")  # so unlike other words that a similar one is no accident
LIKE_COMMAND = 0.85  # difflib's similarity: one wrong letter in seven
# Commands of other programs, and the nearest here.
COMMANDS = {
    **dict.fromkeys(("list", "ls", "model"), "models"),
    **dict.fromkeys(("download", "install", "fetch"), "pull"),
    **dict.fromkeys(("txt2img", "text2img", "t2i", "imagine"), "generate"),
    **dict.fromkeys(("img2img", "i2i"), "generate PROMPT -i PICTURE"),
    **dict.fromkeys(("gpu", "gpus", "backends", "hardware"), "devices"),
    **dict.fromkeys(("schedules", "schedulers"), "samplers"),
    **dict.fromkeys(("metadata", "inspect"), "info"),
    **dict.fromkeys(("complete", "completions"), "completion"),
    **dict.fromkeys(("benchmark",), "bench"),
    **dict.fromkeys(("server", "api"), "serve"),
    **dict.fromkeys(("usage", "commands"), "--help"),
    **dict.fromkeys(("version",), "--version"),
}
# Words of features that are options or a part of another command here, each with what gives it.
_PAGE = "give `qwenimg serve`, which has a page for the browser"
_QUEUE = "the page of `qwenimg serve` has the queue and the pictures drawn before"
_RECIPE = "`qwenimg info PICTURE` prints how a picture was made, `qwenimg --from PICTURE` draws it again"
_CONTROL = "give --control MODEL=PICTURE; `qwenimg models` lists the control networks"
_LORAS = "give --lora FILE:SCALE; `qwenimg models --models-dir DIR` lists the LoRAs of a folder"
_CAPTION = "qwen-image-layered describes its picture: `qwenimg -m qwen-image-layered -i PICTURE --caption en`"
_SETTINGS = "defaults are in config.toml, with a line `option = value` for each; see docs/cli.md"
_PULL = "`qwenimg pull NAME` downloads a model, and completes one that is here in part"
WORDS = {
    **dict.fromkeys(("gui", "web", "webui", "ui", "app", "page", "start", "gradio"), _PAGE),
    **dict.fromkeys(("queue", "gallery", "cancel"), _QUEUE),
    "history": _RECIPE,
    **dict.fromkeys(("quantize", "quantise"), "give -q 8, 6 or 4; `qwenimg convert MODEL FOLDER -q 8` writes a folder"),
    "merge": "`qwenimg convert MODEL FOLDER --lora FILE` writes a folder with LoRAs merged",
    **dict.fromkeys(("controlnet", "control"), _CONTROL),
    **dict.fromkeys(("caption", "describe", "interrogate"), _CAPTION),
    **dict.fromkeys(("lora", "loras"), _LORAS),
    "wildcards": "write __NAME__ or {a|b} in the prompt, and give the files' folder with --wildcards",
    "cache": "models are in the Hugging Face cache; `qwenimg models --json` names its folder",
    **dict.fromkeys(("config", "settings"), _SETTINGS),
    "login": "models with a gate take a token: set HF_TOKEN in the environment, then `qwenimg pull NAME`",
    **dict.fromkeys(("update", "upgrade"), _PULL),
    **dict.fromkeys(("search", "show"), "`qwenimg models` lists the models, `qwenimg info FILE` shows what a file is"),
    **dict.fromkeys(
        ("run", "demo", "examples"), 'give a prompt, as in qwenimg "a red circle"; `qwenimg selftest` draws 40'
    ),
    **dict.fromkeys(("notebook", "jupyter"), "a notebook calls the library: import qwenimg; see docs/python.md"),
}
FILES = {
    **dict.fromkeys((".json",), "no workflow is run; --from repeats the recipe of a picture, also of ComfyUI's"),
    **dict.fromkeys((".safetensors", ".gguf", ".ckpt"), "give it as -m FILE or --lora FILE; or: qwenimg info FILE"),
    **dict.fromkeys((".png", ".jpg", ".jpeg", ".webp"), 'give it as -i FILE, or: qwenimg edit FILE "TEXT"'),
    **dict.fromkeys((".txt", ".jsonl", ".csv"), "give it as --prompt-file FILE"),
}
"""By the ending of a file's name in place of a prompt: the option that takes the file."""


def hint(word: str) -> str | None:
    """Return the answer to `word` in place of a prompt: what does it here, or that it is not built; None for a
    prompt."""
    if (advice := WORDS.get(word)) is not None:
        return f"{word} is no command: {advice}"
    ending = next((one for one in FILES if word.lower().endswith(one)), None)
    if ending is not None and not any(letter.isspace() for letter in word):
        return f"that is a file and no prompt: {FILES[ending]}"
    missing = not_built(word) if word.islower() and not word.startswith("-") else None
    return None if missing is None else f"`qwenimg {word}`: {missing}"


def meant(word: str, commands: tuple[str, ...]) -> str | None:
    """Return the command that `word` probably stands for, to be put behind `qwenimg`; None for a prompt."""
    if not word.isascii() or len(word) > 20 or " " in word:
        return None
    plain = word.lower().replace("_", "-")
    if plain in COMMANDS:
        return COMMANDS[plain]
    if plain.replace("-", "") in LONG and plain not in LONG:
        return plain.replace("-", "")
    like = difflib.get_close_matches(plain, [name for name in LONG if name[0] == plain[:1]], 1, LIKE_COMMAND)
    mixed = [name for name in commands if name[0] == plain[:1] and sorted(name) == sorted(plain)]
    matches = [name for name in (*like, *mixed) if name != plain]
    return matches[0] if matches else None
