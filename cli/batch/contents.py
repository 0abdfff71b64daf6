"""Hashes of the files that requests name: LoRAs, embeddings, control networks and their pictures, upscalers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from functools import cache
from pathlib import Path
from typing import Any

from qwenimg.common.base.arguments import home
from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.safe_files import is_file, open_regular
from qwenimg.common.formats.file_hash import hashed, sha256
from qwenimg.common.formats.files import find_files
from qwenimg.common.formats.fingerprint import fingerprint
from qwenimg.common.hub.model_folders import ModelFolders
from qwenimg.common.hub.network_search import embeddings as embeddings_in
from qwenimg.common.hub.network_search import find_control, find_embedding, find_upscaler
from qwenimg.common.jobs.image_options import Options, is_enlarged
from qwenimg.common.pictures.input import check_bytes
from qwenimg.common.prompts.wildcards import TEMPLATES
from qwenimg.common.request.loras import find_file
from qwenimg.common.weights.loras.peft_config import ADAPTER_CONFIG

Contents = Callable[[Options], dict[str, Any]]
"""Returns the options that name files, with hashes in place of the names."""


def contents(folders: ModelFolders) -> Contents:
    """Return the function that hashes files, which may have names in `folders`, each once. The hash of a large LoRA is
    kept on the disk; of a network a few pieces are read, as of a model. It raises ModelError for a file that is not
    there."""

    @cache
    def lora(source: str) -> list[str]:
        path = find_file(folders.locate(source, "lora"))
        with closing(open_regular(path)) as file:
            return [sha256(file), *_config(path.with_name(ADAPTER_CONFIG))]

    @cache
    def network(name: str) -> list[str]:
        path = find_control(name, folders)
        with ExitStack() as stack:
            files = [stack.enter_context(closing(open_regular(file))) for file in find_files(path).files]
            return [fingerprint(files), *_config(path / "config.json")]

    @cache
    def picture(name: str) -> str:
        with closing(open_regular(Path(home(name)))) as file:
            check_bytes(file)
            return hashed(file)

    @cache
    def listed() -> dict[str, Path]:
        return embeddings_in(folders)

    def in_prompts(options: Options) -> list[list[str]]:
        """Return the hashes and names of embeddings in the folders that a prompt may name; one that cannot be read is a
        word, or refused when it is drawn."""
        text, found = "\n".join(options.get(name) or "" for name in TEMPLATES).lower(), []
        for name in (name for name in listed() if name.lower() in text):
            with suppress(ModelError):
                found.append([embedding(str(listed()[name])), name])
        return found

    @cache
    def embedding(source: str) -> str:
        with closing(open_regular(find_embedding(source, folders))) as file:
            return sha256(file)

    @cache
    def upscaler(name: str | None) -> str:
        with closing(open_regular(find_upscaler(name, folders, "--upscale-with"))) as file:
            return sha256(file)

    def hashes(options: Options) -> dict[str, Any]:
        values: dict[str, Any] = {}
        if loras := options.get("lora"):
            values["lora"] = [[lora(one.source), one.scale] for one in loras]
        given = [[embedding(one.source), one.name or Path(one.source).stem] for one in options.get("embedding", ())]
        if named := [*given, *in_prompts(options)]:
            values["embedding"] = named
        if controls := options.get("control"):
            values["control"] = [
                [network(one.network), picture(one.file), one.preprocessor, one.scale, one.start, one.end]
                for one in controls
            ]
        if is_enlarged(options):
            values["upscale_with"] = upscaler(options.get("upscale_with"))
        return values

    return hashes


def _config(path: Path) -> list[str]:
    """Return the hash of the configuration of weights, if there is one."""
    if not is_file(path):
        return []
    with closing(open_regular(path)) as file:
        return [sha256(file)]
