"""The tables of faults by family: what is planted, and what holds a model with a fault against one without."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from qwenimg.common.hub.resolve import resolve
from support import (
    mutants_anima,
    mutants_auraflow,
    mutants_cascade,
    mutants_chroma,
    mutants_ernie,
    mutants_flux,
    mutants_flux2,
    mutants_flux2_dev,
    mutants_flux2_kv,
    mutants_flux3,
    mutants_hunyuan,
    mutants_krea2,
    mutants_longcat,
    mutants_lumina,
    mutants_ovis,
    mutants_pixart,
    mutants_qwen,
    mutants_qwen21,
    mutants_qwen_control,
    mutants_qwen_edit,
    mutants_qwen_layered,
    mutants_sana,
    mutants_sd,
    mutants_sd3,
    mutants_zimage,
)
from support.lora_cases import write_lora
from support.mutant import Judge, Judged, Mutant


class Table(NamedTuple):
    """The faults of a family. `judge` takes the tiny folders by kind, and a folder for files of its own."""

    mutants: tuple[Mutant, ...]
    judge: Callable[[Mapping[str, Path], Path], Judged]


def _qwen(tiny: Mapping[str, Path], scratch: Path) -> Judge:
    lora = write_lora(resolve("shapes").folder, "qwen", scratch / "qwen.safetensors")
    return Judge("shapes", mutants_qwen.prepare, lora)


def _sd(tiny: Mapping[str, Path], scratch: Path) -> Judge:
    return Judge(tiny["sdxl"], lora=write_lora(tiny["sdxl"], "sdxl", scratch / "sdxl.safetensors"))


TABLES: Mapping[str, Table] = {
    "qwen": Table(mutants_qwen.MUTANTS, _qwen),
    "sd": Table(mutants_sd.MUTANTS, _sd),
    "z-image": Table(mutants_zimage.MUTANTS, lambda tiny, scratch: Judge(tiny["z-image"])),
    "sd3": Table(mutants_sd3.MUTANTS, lambda tiny, scratch: Judge(tiny["sd3"])),
    "flux": Table(mutants_flux.MUTANTS, mutants_flux.judge),
    "flux2": Table(mutants_flux2.MUTANTS, mutants_flux2.judge),
    "flux2-dev": Table(mutants_flux2_dev.MUTANTS, mutants_flux2_dev.judge),
    "flux2-kv": Table(mutants_flux2_kv.MUTANTS, mutants_flux2_kv.judge),
    "flux3": Table(mutants_flux3.MUTANTS, mutants_flux3.judge),
    "chroma": Table(mutants_chroma.MUTANTS, mutants_chroma.judge),
    "ernie": Table(mutants_ernie.MUTANTS, mutants_ernie.judge),
    "krea2": Table(mutants_krea2.MUTANTS, mutants_krea2.judge),
    "anima": Table(mutants_anima.MUTANTS, mutants_anima.judge),
    "cascade": Table(mutants_cascade.MUTANTS, mutants_cascade.judge),
    "auraflow": Table(mutants_auraflow.MUTANTS, lambda tiny, scratch: Judge(tiny["auraflow"])),
    "lumina": Table(mutants_lumina.MUTANTS, lambda tiny, scratch: Judge(tiny["lumina"])),
    "sana": Table(mutants_sana.MUTANTS, lambda tiny, scratch: Judge(tiny["sana"])),
    "sana-sprint": Table(mutants_sana.SPRINT, lambda tiny, scratch: Judge(tiny["sana-sprint"])),
    "ovis": Table(mutants_ovis.MUTANTS, mutants_ovis.judge),
    "pixart": Table(mutants_pixart.MUTANTS, mutants_pixart.judge),
    "hunyuan": Table(mutants_hunyuan.MUTANTS, mutants_hunyuan.judge),
    "longcat": Table(mutants_longcat.MUTANTS, mutants_longcat.judge),
    "qwen-edit": Table(mutants_qwen_edit.MUTANTS, mutants_qwen_edit.judge),
    "qwen-layered": Table(mutants_qwen_layered.MUTANTS, mutants_qwen_layered.judge),
    "qwen21": Table(mutants_qwen21.MUTANTS, mutants_qwen21.judge),
    "qwen-control": Table(mutants_qwen_control.MUTANTS, mutants_qwen_control.judge),
}
