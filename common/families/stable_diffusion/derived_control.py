"""ControlNets whose files hold changes of the base model's UNet: differences of all its weights up to the mid block,
and Control-LoRAs, whose matrices are products of two factors. Either has the parts that the UNet lacks whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from qwenimg.common.base.safe_files import OpenFile, bad
from qwenimg.common.base.shape import Shape
from qwenimg.common.base.text import clean
from qwenimg.common.formats.files import first
from qwenimg.common.formats.stored import Header, TensorSlice
from qwenimg.common.networks.denoisers import unet_controlnet_names
from qwenimg.common.networks.denoisers.unet_controlnet import UNetControlNetConfig
from qwenimg.common.parts.components import component
from qwenimg.common.parts.open_file import check_known
from qwenimg.common.quant.bits import widened
from qwenimg.common.runtime.checkpoint import Component
from qwenimg.common.weights import values
from qwenimg.common.weights.keys import Place, plan_places
from qwenimg.common.weights.loras import delta
from qwenimg.common.weights.loras.delta import LORA, LowRank
from qwenimg.common.weights.plan import Delta, Entry, LoadPlan, Mode, ParamUses
from qwenimg.common.weights.storage import Dense

if TYPE_CHECKING:
    import numpy as np

DIFFERENCE, CONTROL_LORA = "difference", "lora_controlnet"  # tensors that such files have beside their weights
_LAYOUTS = unet_controlnet_names.LAYOUTS


@dataclass(frozen=True, eq=False)
class Difference:
    """The difference of a ControlNet's weight from the base's."""

    entry: Entry
    strength: ClassVar[float] = 1.0
    mode: ClassVar[Mode] = "fuse"
    is_product: ClassVar[bool] = False
    rank: ClassVar[None] = None
    inputs: ClassVar[None] = None

    def factors(self, inputs: int = 0) -> tuple[np.ndarray, np.ndarray]:
        raise AssertionError("a difference is no product")

    def added(self, weight: np.ndarray) -> np.ndarray:
        """Return the difference, float32, in the shape of `weight`. Raises ModelError for values that are not
        finite."""
        import numpy as np

        change = widened(values.read(self.entry)).reshape(weight.shape)
        if not np.isfinite(change).all():
            piece = self.entry.source.first
            raise bad(
                piece.file.path, f"tensor '{clean(piece.key, 80)}' has values that are not finite: fetch it again"
            )
        return change


def is_derived(names: Mapping[str, object]) -> bool:
    """Return whether a file with these tensors is such a ControlNet."""
    return _LAYOUTS.find(names) is not None and (DIFFERENCE in names or CONTROL_LORA in names)


def title(header: Header) -> str:
    """Return the kind of a ControlNet in a file, for `info`."""
    if CONTROL_LORA in header.tensors:
        return "a Control-LoRA for Stable Diffusion (of the base's UNet)"
    return f"a ControlNet for Stable Diffusion{' (a difference from the base)' * (DIFFERENCE in header.tensors)}"


def text_factor(header: Header) -> Shape | None:
    """Return the shape of the factor of a Control-LoRA that a text is multiplied by; None without it."""
    factor = header.tensors.get("middle_block.1.transformer_blocks.0.attn2.to_k.down")
    return None if factor is None else factor.shape


def open_derived(header: Header, like: UNetControlNetConfig, base: Component) -> Component:
    """Open such a ControlNet in the open file for a model, whose UNet is `base`. The caller closes the file. Raises
    ModelError."""
    naming = _LAYOUTS.find(header.tensors)
    assert naming is not None
    network, path = _LAYOUTS.network, header.file.path
    config = unet_controlnet_names.picture_widths(_LAYOUTS.shapes(header, naming, like), like)
    manifest = network.manifest(config)
    places, used = _LAYOUTS.places(naming, manifest, config), network.used(config, manifest)
    factors = _factors(header, places) if CONTROL_LORA in header.tensors else {}
    stored = {name: place for name, place in places.items() if place.key in header.tensors and name not in factors}
    lacking = [place.key for name, place in places.items() if name not in stored and name not in base.plan.entries]
    if lacking:
        raise bad(path, f"lacks tensor {first(lacking)} of its ControlNet")
    shapes, uses = {name: manifest[name] for name in stored}, {name: used[name] for name in stored}
    own = plan_places(header, "ControlNet", stored, shapes, uses)
    entries = {}
    for name in manifest:
        changes: tuple[Delta, ...] = ()
        if name in factors:
            changes = (_low_rank(header.file, name, factors[name], manifest[name]),)
        elif name in stored and (CONTROL_LORA in header.tensors or name not in base.plan.entries):
            entries[name] = own.entries[name]
            continue
        elif name in stored:
            changes = (Difference(own.entries[name]),)
        entries[name] = _changed(header.file, base.plan.entries[name], used, changes)
    known = {DIFFERENCE, CONTROL_LORA, *own.known, *(piece.key for one in factors.values() for piece in one.values())}
    check_known(path, [key for key in header.tensors if key not in known], _LAYOUTS.title)
    plan = LoadPlan(component="ControlNet", entries=entries, files=(header.file,), known=frozenset(known))
    return component(network, config, plan)


def _changed(file: OpenFile, of_base: Entry, used: ParamUses, changes: tuple[Delta, ...]) -> Entry:
    """Return the base's parameter with `changes`. Quantized weights of the base are decoded."""
    use = used[of_base.name]
    if of_base.shape != use.shape:
        raise bad(
            file.path,
            f"is of a UNet with {list(use.shape)} in '{clean(of_base.name, 60)}'; the model's has "
            f"{list(of_base.shape)}",
        )
    source = of_base.source
    return Entry(
        name=of_base.name,
        shape=use.shape,
        source=source,
        storage=Dense(source.dtype),
        deltas=changes,
        residency=use.residency,
    )


def _factors(header: Header, places: Mapping[str, Place]) -> dict[str, dict[str, TensorSlice]]:
    """Return the factors of each matrix of a Control-LoRA: its `up` and `down`."""
    found = {}
    for name, place in places.items():
        module = place.key.removesuffix(".weight")
        keys = {role: f"{module}.{role}" for role in ("up", "down")}
        missing = [key for key in keys.values() if key not in header.tensors]
        if not name.endswith(".weight") or len(missing) == len(keys):
            continue
        if missing:
            raise bad(header.file.path, f"lacks tensor {first(missing)} of its ControlNet")
        found[name] = {role: TensorSlice(key, header.file, *header.tensors[key]) for role, key in keys.items()}
    return found


def _low_rank(file: OpenFile, name: str, pieces: Mapping[str, TensorSlice], weight: Shape) -> LowRank:
    module = pieces["up"].key.removesuffix(".up")
    try:
        rank = delta.check(LORA, pieces, weight)
    except ValueError as error:
        raise bad(file.path, f"module {first([module])}: {error}: not a Control-LoRA for this model") from None
    return LowRank(module=module, kind=LORA, parts=pieces, rank=rank, scale=1.0, mode="fuse")
