"""Stable Diffusion 3 in files with its authors' names: the transformer alone, with the VAE, or with all parts."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from qwenimg.common.base.safe_files import bad, is_folder
from qwenimg.common.base.shape import Manifest
from qwenimg.common.families.sd3 import transformer_keys
from qwenimg.common.families.sd3.texts import T5
from qwenimg.common.formats import gguf
from qwenimg.common.formats.headers import open_header
from qwenimg.common.formats.stored import Header
from qwenimg.common.networks.denoisers import sd3_dit
from qwenimg.common.networks.denoisers.sd3_dit import TABLE, SD3Config
from qwenimg.common.networks.vaes import kl_vae
from qwenimg.common.parts import vae_files
from qwenimg.common.parts.authors_names import check_whole
from qwenimg.common.parts.components import component, open_component, read_config
from qwenimg.common.parts.ldm_configs import Text, behind
from qwenimg.common.parts.texts import clip_files, t5_files
from qwenimg.common.runtime.checkpoint import Component
from qwenimg.common.weights.keys import check_architecture, plan_places
from qwenimg.common.weights.part_names import VAES
from qwenimg.common.weights.plan import Uses
from qwenimg.common.weights.plan import whole as whole_uses

T5_PREFIX = "text_encoders.t5xxl.transformer."


def texts() -> tuple[Text, Text]:
    """Return both CLIPs as files have them."""
    first, second = (f"text_encoders.{name}.transformer." for name in ("clip_l", "clip_g"))
    return (
        Text(component="text_encoder", prefix=first, projected=True, renamed=True),
        Text(component="text_encoder_2", prefix=second, open_clip=True, projected=True, renamed=True),
    )


def parts_of(header: Header) -> list[str]:
    """Return the names of the components in a file of the authors' names; none of another file."""
    known = gguf.may_be(header, sd3_dit.NETWORK.architectures)
    if not known or transformer_keys.prefix_of(header.tensors) is None:
        return []
    encoders = [text.component for text in texts() if text.within(header.tensors)]
    encoders += [T5] if any(key.startswith(T5_PREFIX) for key in header.tensors) else []
    return ["transformer", *encoders, *(["vae"] if vae_files.prefix_of(header.tensors) else [])]


def open_file(path: Path, *, whole: bool = False) -> dict[str, Component]:
    """Open the components in the file of a model. Raises ModelError for a tensor that is missing, unknown, of another
    shape or in a dtype that is not read."""
    header = open_header(path)
    with ExitStack() as stack:
        stack.callback(header.file.close)
        check_architecture(header, sd3_dit.NETWORK.architectures, "Stable Diffusion 3 model")
        names = parts_of(header)
        if not names:
            raise bad(path, "is no Stable Diffusion 3 model in one file: give the folder of the model")
        components = {"transformer": _transformer(header, whole=whole)}
        for text in texts():
            if text.component in names:
                components[text.component] = clip_files.within(header, text, whole=whole)
        if T5 in names:
            components[T5] = t5_files.within(header, T5_PREFIX, T5, whole=whole)
        if prefix := vae_files.prefix_of(header.tensors):
            components["vae"] = vae_files.within(header, prefix, kl_vae.STABLE_DIFFUSION_3, whole=whole)
        _check_known(header, components)
        stack.pop_all()
        return components


def open_transformer(path: Path, like: SD3Config, *, whole: bool = False) -> Component:
    """Open the transformer in a folder, in a file of the authors' names, alone or with a whole model, or in a file of
    diffusers' names with the configuration `like`. Raises ModelError."""
    if is_folder(path):
        return open_component(sd3_dit.NETWORK, path, read_config(sd3_dit.NETWORK, path), "transformer", whole=whole)
    header = open_header(path)
    with ExitStack() as stack:
        stack.callback(header.file.close)
        if transformer_keys.prefix_of(header.tensors) is not None:
            check_architecture(header, sd3_dit.NETWORK.architectures, "transformer")
            opened = _transformer(header, whole=whole)
            _check_known(header, {"transformer": opened}, parts=parts_of(header))
            stack.pop_all()
            return opened
    return open_component(sd3_dit.NETWORK, path, like, "transformer", whole=whole)


def _transformer(header: Header, *, whole: bool) -> Component:
    prefix = transformer_keys.prefix_of(header.tensors)
    assert prefix is not None
    config = transformer_keys.config_of(header.file.path, behind(header, prefix))
    manifest = sd3_dit.manifest(config)
    if prefix + transformer_keys.TABLE_KEY not in header.tensors:
        del manifest[TABLE]
    places = transformer_keys.places(manifest, config, prefix)
    plan = plan_places(header, "transformer", places, manifest, _uses(manifest, whole=whole))
    return component(sd3_dit.NETWORK, config, plan, whole=whole)


def _uses(manifest: Manifest, *, whole: bool) -> Uses:
    uses = sd3_dit.uses(manifest)
    return whole_uses(manifest, uses) if whole else uses


def _check_known(header: Header, components: dict[str, Component], parts: list[str] | None = None) -> None:
    """Raise ModelError if the file holds a tensor that belongs neither to its `components` nor to other `parts`."""
    prefixes = {"vae": VAES, **{text.component: (text.prefix,) for text in texts()}, T5: (T5_PREFIX,)}
    others = [prefix for part in (parts or []) if part in prefixes for prefix in prefixes[part]]
    check_whole(header, components.values(), "Stable Diffusion 3", others)
