"""Recognition of a one-word prompt that is rather a command: a misspelled one, or a command of other programs.

Real prompts of one word (cat, rain, plane) pass, so a short name is recognized only by its own letters.
"""

from __future__ import annotations

from difflib import get_close_matches

LONG = ("generate", "devices", "selftest", "samplers")  # so unlike other words that a similar one is no accident
LIKE = 0.85  # difflib's similarity: one wrong letter in seven
# Commands of other programs, and the nearest here.
OTHERS = {
    **dict.fromkeys(("list", "ls", "model"), "models"),
    **dict.fromkeys(("download", "install", "fetch"), "pull"),
    **dict.fromkeys(("txt2img", "text2img", "t2i", "imagine"), "generate"),
    **dict.fromkeys(("img2img", "i2i", "inpaint"), "generate PROMPT -i PICTURE"),
    **dict.fromkeys(("gpu", "gpus", "backends", "hardware"), "devices"),
    **dict.fromkeys(("schedules", "schedulers"), "samplers"),
    **dict.fromkeys(("metadata", "inspect"), "info"),
    **dict.fromkeys(("complete", "completions"), "completion"),
    **dict.fromkeys(("benchmark",), "bench"),
    **dict.fromkeys(("server", "api"), "serve"),
    **dict.fromkeys(("usage", "commands"), "--help"),
    **dict.fromkeys(("version",), "--version"),
}
NOT_BUILT = ("web", "webui", "gui", "upscale", "quantize", "controlnet", "caption", "edit")


def meant(word: str, commands: tuple[str, ...]) -> str | None:
    """Return the command that `word` probably stands for, to be put behind `qwenimg`; None for a prompt."""
    if not word.isascii() or len(word) > 20 or " " in word:
        return None
    plain = word.lower().replace("_", "-")
    if plain in OTHERS:
        return OTHERS[plain]
    if plain.replace("-", "") in LONG and plain not in LONG:
        return plain.replace("-", "")
    like = get_close_matches(plain, [name for name in LONG if name[0] == plain[:1]], 1, LIKE)
    mixed = [name for name in commands if name[0] == plain[:1] and sorted(name) == sorted(plain)]
    matches = [name for name in (*like, *mixed) if name != plain]
    return matches[0] if matches else None
