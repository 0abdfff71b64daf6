"""The models, LoRAs, control networks and upscalers that a server offers, by the names that requests may give.

They are found by a process that ends then: the descriptions of all families, which it reads, take 20 MB.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qwenimg.cli.lora_training import SUFFIX
from qwenimg.cli.workers import process
from qwenimg.cli.workers.process import Lost
from qwenimg.common.base import leftovers
from qwenimg.common.base.errors import ModelError, QwenimgError, UsageError
from qwenimg.common.base.text import clean, shown_path
from qwenimg.common.families.load_options import LoadOptions, load_options_of
from qwenimg.common.prompts.wildcards import Wildcards

if TYPE_CHECKING:
    from qwenimg.common.hub.model_folders import ModelFolders


@dataclass(frozen=True, kw_only=True)
class Offer:
    """The models, LoRAs and control networks that the command line names."""

    names: tuple[str | None, ...]  # of models
    options: Mapping[str, Any]  # of opening them all
    loras: tuple[str, ...] = ()
    controls: tuple[str, ...] = ()
    training: str = ""  # the real path of the folder of trained LoRAs


@dataclass(frozen=True, kw_only=True)
class Offered:
    """The models, LoRAs and control networks of a server, by the names that requests use."""

    models: Mapping[str, LoadOptions]
    loras: dict[str, str]  # files, or names in the cache
    controls: Mapping[str, str]  # folders, or files
    adapters: tuple[str, ...] = ()  # those of `controls` that are IP-Adapters
    upscalers: Mapping[str, str] = field(default_factory=dict)  # files
    embeddings: Mapping[str, str] = field(default_factory=dict)  # files
    embedding_sizes: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """The width and the number of the vectors of each that can be read, both CLIPs' widths added."""


def search_in_process(offer: Offer) -> Offered:
    """Call `search` in another process. Raises its errors."""
    child, pipe = process.start("qwenimg.cli.serve.offered", apart=True)
    with closing(pipe), child, leftovers.running(child):
        try:
            pipe.send(offer)
            result = pipe.recv()
        except (EOFError, OSError):
            lost = Lost(child.wait())
            raise QwenimgError(f"the search for the models has ended: {lost.reason}") from None
    if isinstance(result, QwenimgError):
        raise result
    assert isinstance(result, Offered)
    return result


def main(descriptor: int) -> None:
    """Search for the offer that comes through the pipe with this descriptor, and send the result."""
    pipe = Connection(descriptor)
    try:
        result: object = search(pipe.recv())
    except QwenimgError as error:
        result = error
    pipe.send(result)


def search(offer: Offer) -> Offered:
    """Find models, LoRAs and control networks. Raises UsageError, and ModelError for a model that is not here."""
    from qwenimg.common.hub.model_folders import read_folders

    base = load_options_of(offer.options)
    folders = read_folders(base.models_dir)
    Wildcards(base.wildcards)  # only for its errors
    embeddings = _embeddings(folders)
    controls, adapters = _controls(offer.controls, folders)
    return Offered(
        models=_models(offer.names, base),
        loras=_trained(offer.training) | _loras(offer.loras, folders),
        controls=controls,
        adapters=adapters,
        upscalers=_upscalers(folders),
        embeddings=embeddings,
        embedding_sizes=dict(_sizes(embeddings)),
    )


def _models(names: Sequence[str | None], base: LoadOptions) -> dict[str, LoadOptions]:
    from qwenimg.common.hub import part_files
    from qwenimg.common.hub.resolve import resolve

    if len(names) > 1 and (base.parts or base.refiner or base.tokenizer):
        raise UsageError("files of parts belong to one model; give one --model beside them")
    models: dict[str, LoadOptions] = {}
    for name in names:
        _, opening = part_files.located(replace(base, model=name))
        opening = part_files.completed(opening)
        resolved = resolve(opening.model, offline=opening.offline, without=opening.replaced)
        at_path = resolved.name.removesuffix(".safetensors").removesuffix(".gguf")
        served = at_path if resolved.from_path else name or resolved.name
        if served in models:
            raise UsageError(f"--model {clean(name, 80)}: another model is served as {clean(served, 60)} already")
        models[served] = opening
    return models


def _loras(loras: Sequence[str], folders: ModelFolders) -> dict[str, str]:
    from qwenimg.common.base.arguments import home
    from qwenimg.common.request.loras import in_cache
    from qwenimg.common.weights.loras.lora import read_lora

    files: dict[str, str] = {}
    for text in loras:
        file = folders.locate(text, "lora")
        file = file if in_cache(file) else home(file)
        if not in_cache(file):
            with _named("--lora"):
                _check_kind(Path(file), "lora")
                read_lora(Path(file)).close()
        name = Path(file).stem
        _check_name("--lora", text, name, files, ":;")
        files[name] = file if in_cache(file) else str(Path(file).absolute())
        if ";" in files[name]:
            raise UsageError(f"--lora {shown_path(text)}: its path has a semicolon; give another")
    return files


def _trained(folder: str) -> dict[str, str]:
    """Return the LoRAs in the folder of trained ones, by their names without suffixes; a damaged one is left out."""
    from qwenimg.common.weights.loras.lora import read_lora

    files = dict[str, str]()
    for file in sorted(Path(folder).glob(f"*{SUFFIX}")) if folder else ():
        if file.is_file() and not file.is_symlink() and not {*":;"} & {*str(file)}:
            with suppress(ModelError):
                read_lora(file).close()
                files[file.stem] = str(file)
    return files


def _controls(controls: Sequence[str], folders: ModelFolders) -> tuple[dict[str, str], tuple[str, ...]]:
    """Name each network: a known name, or the name of its file or folder without suffix. Return the names of
    IP-Adapters too."""
    from qwenimg.common.families.registry import FAMILIES
    from qwenimg.common.formats.files import find_files
    from qwenimg.common.hub.network_search import find_control

    networks, adapters = dict[str, str](), list[str]()
    for text in controls:
        with _named(""):
            path = find_control(text, folders)
        with _named("--control"):
            places = (family.control.weights(path) for family in FAMILIES if family.control)
            place = next((one for one in places if one != path), path)
            options = [_check_kind(file, "control") for file in find_files(place).files]
        by_path = path.name == Path(text).name
        name = Path(text).name.removesuffix(".safetensors")
        _check_name("--control", text, name, networks, ":;=")
        networks[name] = str(path.absolute()) if by_path else text
        if {*"=;"} & {*networks[name]}:
            raise UsageError(f"--control {shown_path(text)}: its path has an equals sign or a semicolon; give another")
        adapters += [name] if "ip_adapter" in options else []
    return networks, tuple(adapters)


def _embeddings(folders: ModelFolders) -> dict[str, str]:
    """Return the files in the folders of embeddings by their names without suffixes."""
    from qwenimg.common.hub.network_search import embeddings

    return {name: str(path.absolute()) for name, path in embeddings(folders).items()}


def _sizes(embeddings: Mapping[str, str]) -> Iterator[tuple[str, tuple[int, int]]]:
    from qwenimg.common.parts.texts.embedding_file import read_embedding

    for name, path in embeddings.items():
        with suppress(ModelError):
            file = read_embedding(Path(path))
            yield name, (sum(part.shape[1] for part in file.parts.values()), file.count)


def _upscalers(folders: ModelFolders) -> dict[str, str]:
    """Return the files in the folders of upscalers by their names without suffixes, the first of each name."""
    from qwenimg.common.hub.network_search import upscalers
    from qwenimg.common.request.names import is_upscaler

    files: dict[str, str] = {}
    for path in upscalers(folders):
        if is_upscaler(path.stem):
            files.setdefault(path.stem, str(path.absolute()))
    return files


def _check_kind(file: Path, option: str) -> str | None:
    """Check that the header of `file` is that of a LoRA or of a control network, which may be a LoRA too, or an
    IP-Adapter, and return the option that takes it, if that is known. Whether it fits a model is seen when a request
    uses it. Raises ModelError."""
    from qwenimg.common.base.safe_files import bad
    from qwenimg.common.families.file_kind import identify
    from qwenimg.common.families.registry import FAMILIES
    from qwenimg.common.formats.headers import open_weights, peek

    header = open_weights(file) if option == "control" else peek(file)
    header.file.close()
    kind = identify(header, FAMILIES)
    adapter = kind is not None and kind.option == "ip_adapter" and option == "control"
    if header.format == "PyTorch" and not adapter:
        peek(file)  # for its message on a pickle
    if kind is not None and not adapter and kind.option not in (option, "lora"):
        raise bad(file, f"is {kind.title}: give it with {kind.flag}")
    if kind is None and option == "control":
        raise bad(file, "is no control network that is read; `qwenimg info` says what it is")
    return None if kind is None else kind.option


@contextmanager
def _named(option: str) -> Iterator[None]:
    """Convert a ModelError in this context to a UsageError that names `option`."""
    try:
        yield
    except ModelError as error:
        raise UsageError(f"{option} {error}".strip()) from None


def _check_name(option: str, text: str, name: str, taken: Mapping[str, str], apart: str) -> None:
    """Raise UsageError for a name that is empty, taken, or has one of the separators in `apart`."""
    if name in taken or not name or {*apart} & {*name}:
        raise UsageError(f"{option} {shown_path(text)}: its name is taken already, or has one of {' '.join(apart)}")
