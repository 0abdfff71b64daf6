"""The models that are known by name: where they are, and what to use where a call does not say.

A model without a recipe (a folder, another hub id) takes `pipeline.Defaults` and nothing from here.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One published model. Sizes, steps, guidance and negative prompt are those of its model card."""

    name: str
    repo: str  # hub id, owner/name
    title: str
    bytes: int  # of the files that are used, about; for messages
    width: int  # pixels
    height: int
    steps: int
    guidance: float
    negative_prompt: str
    family: str


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            name="qwen-image",
            repo="Qwen/Qwen-Image",
            title="Qwen-Image, 20B",
            bytes=57_700_000_000,
            width=1328,
            height=1328,
            steps=50,
            guidance=4.0,
            negative_prompt=" ",
            family="qwen-image",
        ),
        Recipe(
            name="qwen-image-2512",
            repo="Qwen/Qwen-Image-2512",
            title="Qwen-Image, 20B, of December 2025",
            bytes=57_700_000_000,
            width=1328,
            height=1328,
            steps=50,
            guidance=4.0,
            negative_prompt=" ",
            family="qwen-image",
        ),
    )
}
DEFAULT = "qwen-image"

_EDITS = "edits images; this version makes images from text"
_STABLE_DIFFUSION = "Stable Diffusion is not built yet"
REFUSED = {
    "qwen-image-edit": _EDITS,
    "qwen-image-edit-2509": _EDITS,
    "qwen-image-edit-2511": _EDITS,
    "qwen-image-layered": "makes the layers of an image; this version makes images from text",
    "qwen-image-2.1": "a different architecture that this version does not support",
    "sd15": _STABLE_DIFFUSION,
    "sd1.5": _STABLE_DIFFUSION,
    "sd-1.5": _STABLE_DIFFUSION,
    "sd21": _STABLE_DIFFUSION,
    "sd2.1": _STABLE_DIFFUSION,
    "sd-2.1": _STABLE_DIFFUSION,
    "sdxl": _STABLE_DIFFUSION,
    "sdxl-base": _STABLE_DIFFUSION,
    "sdxl-turbo": _STABLE_DIFFUSION,
}


def find(name: str) -> Recipe | None:
    """The recipe called `name`, or whose hub id is `name`; upper and lower case are the same."""
    lower = name.lower()
    return RECIPES.get(lower) or next((r for r in RECIPES.values() if r.repo.lower() == lower), None)


def refusal(name: str) -> str | None:
    """Why the model `name`, a name or a hub id, is known and cannot be used; None where nothing is known."""
    last = name.lower().rpartition("/")[2]
    if last.startswith("stable-diffusion-"):
        return _STABLE_DIFFUSION
    return REFUSED.get(last)
