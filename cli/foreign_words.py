"""Words of other programs, and what to type here instead: for messages about unknown options, and about a prompt of one
word that is rather a command. Real prompts of one word (cat, rain, plane) pass, so a short command's name is
recognized only by its own letters.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable

from qwenimg.common.base.addresses import address_advice
from qwenimg.common.base.errors import not_built
from qwenimg.common.base.text import by_name

# In each table: what to type here, and other programs' words for it.
OPTIONS = by_name({
    "give -n, --negative-prompt": "--neg --negative --neg-prompt --uc --negprompt --no --exclude",
    "give --precision":
        "--dtype --torch-dtype --fp16 --bf16 --half --type --no-half --float32 --float16 --bfloat16 --fp32",
    "give it with --precision, as auto,vae=fp32 or auto,unet=bf16":
        "--fp16-vae --bf16-vae --fp32-vae --unet-precision --vae-precision --clip-precision",
    "give --precision auto,attention=fp32": "--upcast-attention --force-upcast-attention",
    "give --precision auto,attention=fused": "--dont-upcast-attention",
    "give --precision auto,matmul=fp32": "--upcast-matmul",
    "give --backend auto, mlx, cuda or cpu; qwenimg plan --on 3060 plans for another machine":
        "--device --gpu --cpu --cuda --mps --metal --gpu-id",
    "give --max-memory, as 8GB, or -q 8; qwenimg plan, or plan --memory 12GB, says what fits":
        "--low-vram --lowvram --medvram --low-ram --cpu-offload --offload --offload-to-cpu "
        "--mlx-cache-limit-gb --novram --highvram --vram",
    "give --aspect, as 16:9": "--ar --aspect-ratio --ratio",
    "the VAE takes tiles where memory asks for them; --max-memory sets a limit":
        "--tiling --vae-tiling --vae-slicing --tiled --tiled-vae --vae-on-cpu --tile --tile-size",
    "a LoRA and its strength go together, as --lora FILE:SCALE, once for each":
        "--loras --lora-paths --lora-scale --lora-scales --lora-style",
    "give --lora-mode side or --lora-mode fuse": "--lora-side --lora-fuse",
    "give --few-steps lightning, or lightning:STEPS": "--lightning",
    "give --few-steps turbo, or turbo:STEPS": "--turbo",
    "give --few-steps lcm, or lcm:STEPS": "--lcm",
    "give --few-steps hyper, or hyper:STEPS": "--hyper",
    "the solver is --sampler and the noise levels are --schedule; qwenimg samplers lists both": "--scheduler",
    "noise is the same on every machine, that of torch's CPU generator; --latents gives another":
        "--rng --sampler-rng --generator",
    "the ending of -o decides, as -o picture.webp": "--format --image-format --output-format --ext",
    "--quiet leaves out progress, --json prints events": "--progress --no-progress",
    "--debug timing,shapes prints more, --json prints events": "--verbose --log-level --log",
    "--json prints an event for each step; in Python: pipe.stream": "--callback --callback-steps",
    "give -N, --num-images, or several seeds, as -s 1-4; --variation SEED:0.2 for pictures alike": "--variations --n",
    "give the second seed and its strength together, as --variation 7:0.2":
        "--subseed --subseed-strength --variation-seed --variation-strength --variation-amount",
    "give --guidance 1 (0 in Z-Image), which turns guidance off": "--no-cfg --disable-cfg",
    "give --hires 2, by how much the picture is made larger": "--hires-fix --enable-hr --hires-upscale --hr",
    "give -q 8": "--8bit",
    "give -q 6": "--6bit",
    "give -q 4": "--4bit",
    "give --size, as 1024x768": "--res",
    "Ctrl-C ends a run after its step; qwenimg serve takes --deadline": "--timeout",
    "set OMP_NUM_THREADS in the environment, as OMP_NUM_THREADS=4": "--threads",
    "there is none; leave it out": "--safety-checker --no-safety-checker --disable-safety-checker --nsfw",
    "a run asks at most whether to get a model; --overwrite replaces files": "--yes --force",
    "that is the server's page: qwenimg serve": "--webui --web --gui --ui --share",
    "give --step-cache, as 0.1": "--cache --cache-mode --teacache --fbcache --step-cache-ratio",
    "give -N, --num-images": "--batch-size --batch-count --count --num --batch --n-iter --n-samples",
    "give -o, as -o folder/": "--outdir --out-dir --output-dir --out",
    "give --prompt-file": "--prompts --from-file",
    "give --text-encoder": "--clip-l --clip-g --t5xxl --llm --qwen2vl --clip",
    "give -m, or --transformer for that part": "--diffusion-model --ckpt --checkpoint",
    "the shift is the model's own; --schedule has other noise levels": "--flow-shift --shift",
    "give --strength": "--denoise --denoising-strength",
    "give --strength, which in mflux runs backwards": "--image-strength --init-image-strength",
    "give -o, as -o name-{seed}.png": "--filename-prefix --prefix --name --outfile --filename",
    "give --preset fast or quality; --few-steps and --steps save most": "--fast --quality --draft",
    "the fastest attention is chosen by itself":
        "--xformers --flash-attn --flash-attention --sage-attention --opt-sdp-attention --fa",
    "give -q 8, 6 or 4": "--q --bits --quant --load-in-8bit --load-in-4bit",
    "give --models-dir": "--comfy --comfyui --lora-dir --lora-model-dir --ckpt-dir",
    "give --from, with a picture that has it, or ComfyUI's workflow.json": "--workflow --recipe --metadata",
    "the path that is printed is for a viewer, as open $(qwenimg ...)": "--open --show --view",
    "plan takes --on, as in: qwenimg plan --on 3060": "--on --mac --machine",
    "give --save-latents for latents; the recipe is in the picture, and qwenimg info prints it": "--sidecar",
    "a network, its picture and its strength go together, as --control MODEL=PICTURE:SCALE":
        "--controlnet --control-net --control-image --controlnet-image-path --controlnet-strength",
    "give --size; a model that makes layers names the sizes that it was trained with": "--resolution",
    "give --upscale 4 --upscale-with FILE, or: qwenimg upscale PICTURE --with FILE":
        "--upscaler --upscale-by --upscale-model --esrgan --enlarge",
    'give the picture as -i PICTURE, or: qwenimg edit PICTURE "TEXT"': "--edit",
    'give -i PICTURE --mask MASK, or: qwenimg inpaint PICTURE MASK "TEXT"': "--inpaint",
    "that is for the server: qwenimg serve --port 7860, for other machines --host 0.0.0.0 --token-file FILE":
        "--listen --port --host",
    "that is a command: qwenimg grid PROMPT --x steps=4,8,20":
        "--grid --compare --xyz --xyz-plot --xy-plot --xy-grid --x-axis --y-axis",
    "give --sampler; qwenimg samplers lists them": "--sampling-method",
    "-m chooses the model, and -i PICTURE starts from a picture": "--mode --task",
    "give -m MODEL": "--base-model --model-path --repo --model-id",
    "give --models-dir, as --models-dir ComfyUI":
        "--models-path --model-dir --extra-model-paths-config --base-directory --input-directory",
    "give --lora FILE:SCALE, or --lora owner/name": "--lora-name --lora-names --lora-repo-id --lora-file",
    "give -i PICTURE, once for each": "--masked-image-path --images --reference --ref-image",
    "give --ip-adapter flux-redux:SCALE --ip-image PICTURE": "--redux-image-paths --redux-image-strengths",
    "give --control depth=PICTURE or --control NETWORK=PICTURE": "--depth-image-path --canny --pose --openpose",
    "give -N, --num-images, or several seeds, as -s 1-4; without -s a seed is random":
        "--auto-seeds --seed-range --repeat --loop --random-seed",
    "files from a hub come by qwenimg pull; set HF_TOKEN or HF_HUB_CACHE in the environment":
        "--hf-token --token --cache-dir --revision --trust-remote-code --local-files-only --hf-cache",
    "qwenimg plan has the same options, and draws nothing": "--dry-run --plan --estimate",
    "give --schedule karras": "--karras",
    "give --max-memory for a limit; parts that do not fit are streamed":
        "--reserve-vram --medium-vram --normalvram --always-gpu --gpu-only --cuda-malloc --clip-on-cpu",
    "the same seed gives the same picture already": "--deterministic --no-deterministic",
    "give -q 8, or text=8 for the text encoder alone": "--text-encoder-quant --fp8-e4m3fn-unet --fp8 --weight-dtype",
    "give --no-metadata": "--disable-metadata --no-exif",
    "the words of a style belong in the prompt": "--style --styles --style-preset",
    "-m qwen-image-layered -i PICTURE takes a picture apart":
        "--remove-background --transparent --transparent-background --rembg",
    "--preview shows the picture while it is drawn":
        "--stepwise-image-output-dir --preview-dir --preview-method --preview-path",
})  # fmt: skip
# Of `qwenimg upscale`, which takes a factor
SIZES = ("--width", "--height", "--size", "--scale", "--factor", "--times", "--dpi", "--max-size", "-W", "-H", "--res")
BACKENDS = by_name({"mlx": "metal mps apple", "auto": "gpu", "cuda": "nvidia torch rocm"})
SIMILAR_OPTION = 0.78  # difflib's similarity of an option with a known one, from which on that is suggested


def unknown_option(option: str, known: Iterable[str], help: str = "--help-all") -> str:
    """Return the message for an unknown `option`. known: the options there are. help: the arguments that list them."""
    if (advice := OPTIONS.get(option)) is not None:
        return f"{option} is no option here: {advice}"
    if (missing := not_built(option)) is not None:
        return f"{option} is no option here: {missing}"
    if option in SIZES and "--by" in (known := [*known]):
        return f"{option} is no option here: give --by, how many times as wide and high, as --by 2"
    near = difflib.get_close_matches(option, list(known), n=2, cutoff=SIMILAR_OPTION)
    if near:
        return f"{option} is no option here; did you mean {' or '.join(near)}?"
    return f"{option} is no option here; qwenimg {help} lists all"


def similar_backend(name: str) -> str:
    """Suggest a backend for another program's name of one; "" if there is none."""
    plain = name.strip().lower().partition(":")[0]
    suggestion = plain if plain in BACKENDS.values() else BACKENDS.get(plain)
    return f" Did you mean {suggestion}?" if suggestion else ""


# Commands

# So unlike other words that a similar one is no accident.
LONG_COMMANDS = ("generate", "devices", "selftest", "samplers")
SIMILAR_COMMAND = 0.85  # difflib's similarity: one wrong letter in seven
# By the nearest command here.
COMMANDS = by_name({
    "models": "list ls model",
    "pull": "download install fetch",
    "rm NAME": "remove delete uninstall prune",
    "generate": "txt2img text2img t2i imagine",
    "generate PROMPT -i PICTURE": "img2img i2i",
    "devices": "gpu gpus backends hardware",
    "samplers": "schedules schedulers",
    "info": "metadata inspect pnginfo png-info identify",
    "describe PICTURE": "caption captions captioning interrogate interrogator tagger clip-interrogator",
    "rewrite PROMPT": "improve improve-prompt enhance enhance-prompt expand-prompt prompt-enhancer magic-prompt",
    "upscale PICTURE --with FILE": "enlarge upscaler upscalers upscaling esrgan superres super-resolution extras",
    "completion": "complete completions",
    "bench": "benchmark",
    "serve": "server api",
    "mcp -m MODEL --folder DIR": "assistant assistants",
    "doctor": "diagnose diagnostics sysinfo env status troubleshoot",
    "batch FILE": "bulk jobs",
    "convert MODEL FOLDER": "export quantization dequantize",
    'edit PICTURE "TEXT"': "edits editing kontext instruct-pix2pix",
    'inpaint PICTURE MASK "TEXT"': "inpainting",
    "--from PICTURE": "replay repeat redo reproduce regenerate",
    "plan": "vram estimate requirements",
    "--help": "usage commands",
    "--version": "version",
})  # fmt: skip
# Features that are options or a part of another command here.
FEATURES = by_name({
    "give `qwenimg serve`, which has a page for the browser": "gui web webui ui app page start open gradio",
    "give `qwenimg grid PROMPT --x steps=4,8,20 --y guidance=1,4`": "compare xyz xyz-plot xy-plot xy-grid matrix",
    "the page of `qwenimg serve` has the queue and the pictures drawn before": "queue gallery cancel",
    "give -N 4 for other seeds, or --variation SEED:0.2 for pictures alike": "variations variation seeds subseed",
    "`qwenimg --from workflow.json` draws with the settings of ComfyUI's workflow, or of a picture of ComfyUI":
        "workflow workflows comfyui ksampler",
    "give --few-steps lightning, turbo, lcm or hyper": "few-steps lcm dmd",
    "a file from a browser is given as -m FILE or --lora FILE; `qwenimg info FILE` says which":
        "civitai safetensors gguf checkpoint checkpoints ckpt",
    "`qwenimg pull NAME` gets a model of Hugging Face": "hf huggingface huggingface-cli hub",
    "`qwenimg pull NAME --verify` looks at each byte of a model": "verify checksum",
    "scripts call `import qwenimg`, or qwenimg.diffusers; see docs/python.md": "diffusers sdk",
    "give --control MODEL=PICTURE; see docs/control.md": "controlnets canny openpose depth2img",
    "`qwenimg -m qwen-image-layered -i PICTURE` takes a picture apart into layers":
        "rembg removebg remove-background layered",
    "give --debug timing,shapes, or --json for events": "logs verbose",
    "write the words of a style into the prompt": "styles",
    "the Dockerfile in the clone runs `qwenimg serve`; see docs/server.md": "docker podman",
    "give what to avoid as -n TEXT": "negative-prompt negative",
    "`qwenimg info PICTURE` prints how a picture was made, `qwenimg --from PICTURE` draws it again": "history",
    "give -q 8, 6 or 4; `qwenimg convert MODEL FOLDER -q 8` writes a folder": "quantize quantise",
    "`qwenimg convert MODEL FOLDER --lora FILE` writes a folder with LoRAs merged": "merge",
    "give --control MODEL=PICTURE; `qwenimg models` lists the control networks": "controlnet control",
    "give --embedding FILE, and its name in the prompt": "embedding embeddings textual-inversion ti",
    "give --lora FILE:SCALE; `qwenimg models --models-dir DIR` lists the LoRAs of a folder": "lora loras",
    "give a prompt with -i PICTURE --outpaint left=200,top=100": "outpaint outpainting uncrop extend",
    "give --hires 2 with a prompt": "hires hiresfix",
    "write __NAME__ or {a|b} in the prompt, and give the files' folder with --wildcards": "wildcards",
    "models are in the Hugging Face cache; `qwenimg models --json` names its folder": "cache",
    "`qwenimg models` has the bytes of each model that is here, and `qwenimg rm NAME` deletes one":
        "disk diskspace disk-space storage du cleanup",
    "defaults are in config.toml, with a line `option = value` for each; see docs/cli.md": "config settings",
    "models with a gate take a token: set HF_TOKEN in the environment, then `qwenimg pull NAME`": "login",
    "`qwenimg pull NAME` downloads a model, and completes one that is here in part": "update upgrade",
    "`qwenimg models` lists the models, `qwenimg info FILE` shows what a file is": "search show",
    'give a prompt, as in qwenimg "a red circle"; `qwenimg selftest` draws 40': "run demo examples",
    "a notebook calls the library: import qwenimg; see docs/notebook.ipynb": "notebook jupyter",
})  # fmt: skip
# Verbs before a prompt, as in `qwenimg draw "a cat"`; alone, each is a prompt.
VERBS = ("draw", "create", "make", "paint", "render", "image", "prompt", "txt2img", "t2i")
# Endings of a file's name in place of a prompt: the option that takes the file.
FILE_ENDINGS = by_name({
    "ComfyUI's workflow is given as --from FILE; `qwenimg info FILE` says what it needs": ".json",
    "give it as -m FILE or --lora FILE; or: qwenimg info FILE": ".safetensors .gguf .ckpt",
    'give it as -i FILE, or: qwenimg edit FILE "TEXT"': ".png .jpg .jpeg .webp .bmp .gif .tif .tiff",
    "give it as --prompt-file FILE": ".txt .jsonl .csv",
    "give an upscaler as --upscale-with FILE; or: qwenimg info FILE": ".pth",
    "qwenimg info FILE says what it is, and what uses it":
        ".pt .bin .onnx .zip .7z .rar .tar .gz .yaml .yml .toml .heic .avif .svg .pdf .mp4 .mov .webm",
})  # fmt: skip


# Commands of other programs, which people paste: the first word, and what does the same here.
PROGRAMS = by_name({
    "`qwenimg upscale PICTURE --with FILE`": "mflux-upscale mflux-upscale-seedvr2",
    "`qwenimg convert MODEL FOLDER -q 8`": "mflux-save",
    "`qwenimg info PICTURE`": "mflux-info",
    "`qwenimg serve`": "sd-server comfy-cli",
    'qwenimg "TEXT" -m MODEL --steps 4; `qwenimg models` lists the models': "mflux sd-cli sdcpp stable-diffusion",
})  # fmt: skip
MFLUX = "mflux-"  # how its other commands begin, which draw


def advice(word: str) -> str | None:
    """Return the message for a word of another program: what to type here, or that there is no such thing; None for a
    prompt."""
    if (does := PROGRAMS.get(word) or (PROGRAMS["mflux"] if word.startswith(MFLUX) else None)) is not None:
        return f"{word} is a command of another program; here: {does}"
    if (text := FEATURES.get(word)) is not None:
        return f"{word} is no command: {text}"
    if (text := address_advice(word)) is not None:
        return text
    ending = next((one for one in FILE_ENDINGS if word.lower().endswith(one)), None)
    if ending is not None and not any(letter.isspace() for letter in word):
        return f"that is a file and no prompt: {FILE_ENDINGS[ending]}"
    if os.sep in word and not any(letter.isspace() for letter in word) and os.path.lexists(word):
        return "that is a file or a folder and no prompt: qwenimg info PATH says what it is, and what uses it"
    missing = not_built(word) if word.islower() and not word.startswith("-") else None
    return None if missing is None else f"`qwenimg {word}`: {missing}"


def similar_command(word: str, commands: tuple[str, ...]) -> str | None:
    """Return the command that a misspelled word stands for, to be typed after `qwenimg`; None for a prompt."""
    if not word.isascii() or len(word) > 20 or " " in word:
        return None
    plain = word.lower().replace("_", "-")
    if plain in COMMANDS:
        return COMMANDS[plain]
    if plain.replace("-", "") in LONG_COMMANDS and plain not in LONG_COMMANDS:
        return plain.replace("-", "")
    long = [name for name in LONG_COMMANDS if name[0] == plain[:1]]
    like = difflib.get_close_matches(plain, long, 1, SIMILAR_COMMAND)
    mixed = [name for name in commands if name[0] == plain[:1] and sorted(name) == sorted(plain)]
    matches = [name for name in (*like, *mixed) if name != plain]
    return matches[0] if matches else None
