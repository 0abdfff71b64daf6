"""The configurations of known models as they are published.

They ship in `common/data`, one folder in diffusers layout for each model, without weights and tokenizers. A folder is
read for a model whose weights are not here, for a part without a configuration of its own, and for the small files of a
converted model.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qwenimg.common.base.config import data_folder, model_index, read_json
from qwenimg.common.base.errors import ModelError
from qwenimg.common.networks.network import Network
from qwenimg.common.parts.components import on_paper, read_config
from qwenimg.common.runtime.checkpoint import Checkpoint, TokenizerFiles
from qwenimg.common.sampling import flow_solvers, wuerstchen
from qwenimg.common.sampling.discrete import parse_diffusion

_SCHEDULER = "scheduler/scheduler_config.json"


def read(model: str, part: str, network: Network) -> Any:
    """Return the configuration of `network`, the `part` of a known model."""
    return read_config(network, data_folder(model) / part)


def scheduler(model: str) -> Any:
    """Return the noise levels of a known model."""
    path = data_folder(model) / _SCHEDULER
    data = read_json(path)
    if data.get("_class_name") == wuerstchen.CLASS_NAME:
        return wuerstchen.parse_cosine(data, path)
    return flow_solvers.read_config(data, path) if flow_solvers.is_flow(data) else parse_diffusion(data, path)


def small_files(model: str, **levels: object) -> dict[str, dict[str, object]]:
    """Return the model's index and the scheduler's configuration, this with other `levels`, by path: the files that a
    folder of such a model lacks."""
    index, scheduler = model_index(data_folder(model)), data_folder(model) / _SCHEDULER
    return {index.name: read_json(index), _SCHEDULER: read_json(scheduler) | levels}


def checkpoint(
    name: str,
    folder: Path,
    networks: Mapping[str, Network],
    dtype: str,
    denoiser_dtype: str | None,
    folders: Mapping[str, str] = {},
) -> Checkpoint:
    """Return the model `name`, whose configurations are in `folder`, without its files. networks: of the parts that it
    may have. dtype: of the published weights; denoiser_dtype: of the denoiser's, if another; folders: of parts whose
    folder has another name."""
    places = {part: folder / folders.get(part, part) for part in networks}
    parts = {part: network for part, network in networks.items() if places[part].is_dir()}
    return Checkpoint(
        source=Path(name),
        components={
            part: on_paper(
                network,
                read_config(network, places[part]),
                denoiser_dtype if denoiser_dtype and network.role == "transformer" else dtype,
            )
            for part, network in parts.items()
        },
        tokenizers={part: _absent_tokenizer(name) for part, network in parts.items() if network.role == "text"},
        scheduler=scheduler(folder.name),
    )


def _absent_tokenizer(name: str) -> TokenizerFiles:
    """Return a tokenizer for the model `name` that raises ModelError when it is read, as its files are not here."""

    def read(path: Path) -> Any:
        raise ModelError(f"{name}: its tokenizer is not here; get it by: qwenimg pull {name}")

    return TokenizerFiles(path=Path(name), read=read)
