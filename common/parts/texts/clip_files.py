"""CLIP text encoders in a folder or file of their own: which one of a model it is, and where its tensors are.

SDXL has two text encoders of different widths, so the width of a file says which one it is. The tensors have the names
of transformers or of OpenCLIP, with or without a prefix. What shapes do not show is taken from the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.safe_files import bad, closed_on_error, is_folder
from qwenimg.common.base.text import clean
from qwenimg.common.formats.files import first
from qwenimg.common.formats.headers import open_header, peek
from qwenimg.common.formats.stored import Header, Stored
from qwenimg.common.networks.encoders import clip
from qwenimg.common.parts import ldm_keys
from qwenimg.common.parts.components import component, is_absent, open_component, read_config
from qwenimg.common.parts.ldm_configs import Text, clip_config
from qwenimg.common.runtime.checkpoint import Checkpoint, Component
from qwenimg.common.weights import keys, part_names
from qwenimg.common.weights.plan import stored_uses

NO_CLIP = "holds no CLIP text encoder: no encoder.layers or transformer.resblocks"
WIDTHS = {768: "CLIP-L (ViT-L/14)", 1024: "OpenCLIP-H", 1280: "CLIP-G (OpenCLIP bigG)"}
_TOKENS = "embeddings.token_embedding.weight"  # in transformers' names, behind `text_model.` or not
_OPEN_TOKENS = "token_embedding.weight"  # in OpenCLIP's
_PROJECTION = "text_projection.weight"
_NOT_NEEDED = ("logit_scale", "text_model.embeddings.position_ids", "text_projection.weight")
_OPEN_NOT_NEEDED = ("logit_scale", "attn_mask", "text_projection")


def find(tensors: Mapping[str, Stored]) -> tuple[str, bool, int] | None:
    """Find the prefix of a text encoder's names, whether they are OpenCLIP's, and its width; None in another file."""
    for sign, open_clip in ((_TOKENS, False), (_OPEN_TOKENS, True)):
        key = next((name for name in tensors if name == sign or name.endswith(f".{sign}")), None)
        if key is not None and len(tensors[key].shape) == 2:
            prefix = key.removesuffix(sign)
            blocks = f"{prefix}{'transformer.resblocks.0.' if open_clip else 'encoder.layers.0.'}"
            if any(name.startswith(blocks) for name in tensors):
                return prefix.removesuffix("text_model."), open_clip, tensors[key].shape[1]
    return None


def width_alone(tensors: Mapping[str, Stored]) -> int | None:
    """Return the width of a text encoder that is alone in its file; None for another file."""
    layout = find(tensors)
    others = (name for name in tensors if part_names.plain("text", name) is not None)
    return None if layout is None or any(not name.startswith(layout[0]) for name in others) else layout[2]


def title(header: Header) -> str:
    """Return the title of the text encoder in a file with this header, and the layout of its names."""
    layout = find(header.tensors)
    assert layout is not None
    prefix, open_clip, width = layout
    names = "OpenCLIP's names" if open_clip else "transformers' names"
    after = f" behind {clean(prefix, 60)}" if prefix else ""
    return f"{WIDTHS.get(width, 'a CLIP text encoder')}, {names}{after} (width {width})"


def open_text(checkpoint: Checkpoint, path: Path) -> tuple[str, Component]:
    """Open the text encoder in the folder or file `path`. Return its name in the model, and itself. Raises
    ModelError."""
    name = name_of(path, {name: part.config for name, part in checkpoint.texts.items()}, checkpoint.source)
    if is_folder(path):
        return name, open_component(clip.NETWORK, path, read_config(clip.NETWORK, path), name)
    return name, open_file(path, name, checkpoint[name].config, is_known=not is_absent(checkpoint[name]))


def name_of(path: Path, configs: Mapping[str, clip.CLIPConfig], source: Path) -> str:
    """Return the name of the text encoder in the folder or file `path`: the one of its width among `configs`, those of
    the model in `source`. Raises ModelError."""
    if is_folder(path):
        return _slot(configs, read_config(clip.NETWORK, path).hidden_size, path, source)
    layout = find(peek(path).tensors)
    if layout is None:
        raise bad(path, NO_CLIP)
    return _slot(configs, layout[2], path, source)


def open_file(path: Path, name: str, config: clip.CLIPConfig, *, is_known: bool) -> Component:
    """Open the text encoder `name` in the file `path`. is_known: `config` describes this file; otherwise it gives
    only the type, and the sizes are read from the file. Raises ModelError."""
    header = open_header(path)
    with closed_on_error(header.file):
        layout = find(header.tensors)
        if layout is None:
            raise bad(path, NO_CLIP)
        prefix, open_clip, _ = layout
        if not is_known:
            config = _own_config(header, prefix, open_clip, name, config)
        if open_clip:
            return _open_clip(header, prefix, name, config)
    header.file.close()

    start = (part_names.plain("text", prefix + _TOKENS) or "").removesuffix(_TOKENS)

    def rename(key: str) -> str | None:
        plain = key.removeprefix(start)
        if plain in _NOT_NEEDED and not (config.projection_dim and plain.startswith("text_projection")):
            return None
        return clip.rename(plain) if key.startswith(start) else key

    return open_component(clip.NETWORK, path, config, name, rename)


def within(header: Header, text: Text, *, for_rewrite: bool = False) -> Component:
    """Open the text encoder `text` in the file of a whole model, which has transformers' names. The caller closes the
    file. Raises ModelError."""
    prefix, config = clip_config(header.file.path, header, text)
    manifest = clip.manifest(config)
    places = ldm_keys.clip_places(manifest, prefix)
    if _PROJECTION in places:
        places[_PROJECTION] = places[_PROJECTION]._replace(key=text.prefix + _PROJECTION)
    plan = keys.plan_places(header, text.component, places, manifest, stored_uses(manifest))
    return component(clip.NETWORK, config, plan, for_rewrite=for_rewrite)


def _slot(configs: Mapping[str, clip.CLIPConfig], width: int, path: Path, source: Path) -> str:
    name = next((name for name, config in configs.items() if config.hidden_size == width), None)
    if name is None:
        widths = " and ".join(str(config.hidden_size) for config in configs.values())
        title = WIDTHS.get(width, f"a text encoder of width {width}")
        raise ModelError(
            f"{clean(path, 120)}: is {title}; {clean(source.name, 60)} takes width {widths} ({width} found)"
        )
    return name


def _own_config(header: Header, prefix: str, open_clip: bool, name: str, published: clip.CLIPConfig) -> clip.CLIPConfig:
    """Return the configuration of a text encoder that the model lacks, from its shapes; they do not show its
    activation and projection, which its `published` type has. Raise ModelError."""
    of_open_clip, projected = published.hidden_act == "gelu", published.projection_dim is not None
    text = Text(
        component=name, prefix=prefix, open_clip=of_open_clip or open_clip, projected=projected, renamed=not open_clip
    )
    return replace(clip_config(header.file.path, header, text)[1], hidden_act=published.hidden_act)


def _open_clip(header: Header, prefix: str, name: str, config: clip.CLIPConfig) -> Component:
    manifest = clip.manifest(config)
    plan = keys.plan_places(header, name, ldm_keys.open_clip_places(manifest, prefix), manifest, stored_uses(manifest))
    spare = tuple(f"{prefix}transformer.resblocks.{layer}." for layer in _spare_layers(config))
    needless = {f"{prefix}{name}" for name in _OPEN_NOT_NEEDED}
    unknown = header.tensors.keys() - plan.known - needless
    others = (*spare, f"{prefix}visual.")  # the tower for pictures of a whole CLIP
    unknown = {name for name in unknown if not name.startswith(others) and part_names.plain("text", name) is not None}
    if unknown:
        raise bad(header.file.path, f"holds unknown tensor {first(sorted(unknown))}: not a {name} like the model's")
    return component(clip.NETWORK, config, plan)


def _spare_layers(config: clip.CLIPConfig) -> range:
    """Return the layers of OpenCLIP-H that Stable Diffusion 2 never uses."""
    return range(config.num_hidden_layers, ldm_keys.CLIP_H_LAYERS + 1 if config.projection_dim is None else 0)
