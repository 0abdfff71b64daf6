"""The controls of a request that belong to one use of an IP-Adapter or a Redux: its pictures, and their masks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from qwenimg.common.base.errors import UsageError
from qwenimg.common.base.text import clean
from qwenimg.common.parts.control_net import Controller, PictureAdapter
from qwenimg.common.request import control_text
from qwenimg.common.request.control_text import Control


@dataclass(frozen=True)
class AdapterUse:
    """One use of an adapter. `pictures` and `masks`: their numbers among the controls of the request."""

    control: Control  # with the scale and the steps
    pictures: list[int]
    masks: list[int]  # one for each picture, or none


def adapter_uses(controls: Sequence[Control], nets: Mapping[str, Controller]) -> list[AdapterUse]:
    """Return the uses of adapters among `controls`: a control, and the further pictures and masks after it. Raises
    UsageError."""
    uses: list[AdapterUse] = []
    for number, one in enumerate(controls):
        if not isinstance(nets[one.network], PictureAdapter):
            continue
        if one.preprocessor not in control_text.ROLES:
            uses.append(AdapterUse(one, [number], []))
        elif not uses or uses[-1].control.network != one.network:
            raise UsageError(
                f"--control {clean(one.network, 60)}: {one.preprocessor}@ comes after a picture of the same adapter"
            )
        else:
            (uses[-1].masks if one.preprocessor == "mask" else uses[-1].pictures).append(number)
    return uses
