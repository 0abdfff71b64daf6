"""Features that users of other programs look for and that are not built yet: the one list of them.

Every message about such a feature names it by its title here, and a test compares the words with the commands and
options that there are, so that no message outlives its truth.
"""

from __future__ import annotations

NOT_BUILT: dict[str, tuple[str, ...]] = {
    "upscaling": ("upscale", "upscaler", "hires", "hires-fix", "hr-scale", "enlarge", "esrgan", "enhance"),
    "outpainting": ("outpaint", "outpainting", "uncrop"),
    "textual inversion": ("textual-inversion", "embedding", "embeddings", "ti"),
    "the IP-adapter": ("ip-adapter", "ip-adapter-image"),
    "a hypernetwork": ("hypernetwork", "hypernet"),
    "restoration of faces": ("face-restore", "restore-faces", "face-fix", "codeformer", "gfpgan"),
    "rewriting of prompts": ("enhance-prompt", "improve", "improve-prompt", "prompt-upsampling", "upsample-prompt"),
    "variation of a seed": ("variation", "subseed", "subseed-strength", "variation-seed", "variation-strength",
                            "seed-resize"),
    "training": ("train", "finetune", "fine-tune", "dreambooth", "train-lora"),
    "removal of models": ("rm", "remove", "delete", "prune", "uninstall"),
    "a grid from the command line": ("grid", "compare", "xyz", "xy-plot"),
    "video": ("video", "animate", "img2vid", "txt2vid"),
    "a server for assistants (MCP)": ("mcp",),
}  # fmt: skip
"""By title: words of commands, and of options without their dashes."""


INSTEAD = {
    "removal of models": "delete its folder in the Hugging Face cache, which `qwenimg models --json` names",
    "a grid from the command line": "the page of `qwenimg serve` draws grids, and -s 1-4 -o out/ single files",
    "variation of a seed": "-s 1-4 draws with several seeds",
    "outpainting": "-i PICTURE with --mask draws a part of a picture anew",
}
"""By title: what helps until then."""


def sentence(word: str) -> str | None:
    """Return the sentence about the feature that `word` stands for; None for a word of no such feature."""
    plain = word.lower().lstrip("-").replace("_", "-")
    title = next((title for title, words in NOT_BUILT.items() if plain in words), None)
    if title is None:
        return None
    return f"{title} is not built yet" + (f"; {INSTEAD[title]}" if title in INSTEAD else "")
