"""The families of models, and which one a model on disk belongs to. A new family is its folder and a line here."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from itertools import islice
from pathlib import Path

from qwenimg.common.base.config import MODULAR_INDEX, model_index, read_json
from qwenimg.common.base.errors import ModelError, UsageError
from qwenimg.common.base.safe_files import bad, closed_on_error, is_file, is_folder
from qwenimg.common.base.text import clean
from qwenimg.common.families import catalog, file_kind, fits
from qwenimg.common.families.description import listed
from qwenimg.common.families.family import Family
from qwenimg.common.families.file_kind import FileKind
from qwenimg.common.families.known_model import KnownModel, ModelPath
from qwenimg.common.families.load_options import LoadOptions
from qwenimg.common.formats import gguf
from qwenimg.common.formats.files import PICKLES, find_files
from qwenimg.common.formats.headers import open_weights, peek
from qwenimg.common.formats.stored import Header
from qwenimg.common.networks.network import Network
from qwenimg.common.parts import known_configs, mflux, tiny_vae
from qwenimg.common.request.request import Defaults
from qwenimg.common.runtime.checkpoint import Checkpoint, Reports
from qwenimg.common.weights import left_out

_ROWS = (
    ("qwen_image", "FAMILY"),
    ("qwen_image_21", "FAMILY"),
    ("stable_diffusion", "FAMILY"),
    ("sd3", "FAMILY"),
    ("z_image", "FAMILY"),
    ("lumina", "FAMILY"),
    ("sana", "FAMILY"),
    ("flux", "FAMILY"),
    ("flux2", "FAMILY"),
    ("flux2", "DEV"),
    ("flux3", "FAMILY"),
    ("longcat", "FAMILY"),
    ("chroma", "FAMILY"),
    ("auraflow", "FAMILY"),
    ("ernie", "FAMILY"),
    ("krea2", "FAMILY"),
    ("anima", "FAMILY"),
    ("ovis", "FAMILY"),
    ("pixart", "FAMILY"),
    ("hunyuan", "FAMILY"),
    ("cascade", "FAMILY"),
)


class _Families(Collection[Family]):
    """The rows of `_ROWS`, in their order. A family is imported when it is reached, since all of them take as long as a
    third of torch: a model of the first ones, found by its index, needs no other."""

    def __len__(self) -> int:
        return len(_ROWS)

    def __iter__(self) -> Iterator[Family]:
        for folder, row in _ROWS:
            yield getattr(import_module(f"qwenimg.common.families.{folder}.family"), row)

    def __contains__(self, family: object) -> bool:
        return any(one is family for one in self)


FAMILIES: Collection[Family] = _Families()
"""In the order in which messages name them. It decides nothing else: each family knows its own files exactly."""
_KNOWN = "`qwenimg models` lists what is known"
MAX_PARTS = 1000  # entries of a folder that are looked at
NOTE = "qwenimg.json"
"""The file in which `convert` notes the model of which a folder is made. It also marks an unfinished folder."""


def networks() -> tuple[Network, ...]:
    """Return every network that a model may have: of the families, of their control files, and tiny VAEs."""
    of_families = (row for family in FAMILIES for row in (*family.networks, *family.control_networks))
    return tuple(dict.fromkeys((*of_families, *tiny_vae.NETWORKS)))


@dataclass(frozen=True, kw_only=True)
class OpenModel:
    """A model on disk, checked, and its family. Its files are open until `close`."""

    family: Family
    checkpoint: Checkpoint  # with the refiner's
    path: ModelPath
    options: LoadOptions = field(default_factory=LoadOptions)
    refiner: ModelPath | None = None
    made_of: KnownModel | None = None  # the known model that it was converted from
    on_paper: bool = False  # a known model by its published configurations, whose files are not here

    def defaults(self) -> Defaults:
        """Return the defaults of the known model that it is, or was converted from, else of its family."""
        defaults, known = self.family.defaults(self.checkpoint), self.path.known or self.made_of
        return defaults if known is None else replace(defaults, **known.usual)

    @property
    def reports(self) -> Reports:
        """The messages on its files, and on the refiner's."""
        refiner = self.checkpoint.refiner
        return self.checkpoint.reports + (() if refiner is None else refiner.reports)

    def close(self) -> None:
        self.checkpoint.close()


def open_model(path: Path, options: LoadOptions | None = None) -> OpenModel:
    """Open the model at `path`: check all about its files, and read no weight. Raises ModelError and UsageError."""
    options = options or LoadOptions()
    family = of_file(path) if is_file(path) else of_folder(path)
    if (foreign := next((name for name in options.of_files() if name not in family.load_options), None)) is not None:
        able, flag = titles(lambda other: foreign in other.load_options), foreign.replace("_", "-")
        raise UsageError(f"--{flag} is for {able}; {clean(path, 80)} is another model")
    made_of = None if "transformer" in options.parts else _made_of(path, family)
    if family.tiny_vae is None and (vae := options.part("vae")) is not None and tiny_vae.is_tiny_at(vae):
        raise bad(vae, f"is a tiny VAE, and none is known for {family.title}: leave --vae out")
    checkpoint = family.open(path, options)
    with closed_on_error(checkpoint):
        checkpoint = _with_tiny_vae(checkpoint, family, options)
        fits.check(path, checkpoint.components, family.fits)
    if options.quantize is not None:
        checkpoint = checkpoint.quantized(options.quantize)
    checkpoint = replace(checkpoint, reports=checkpoint.reports + _left_out([path, *options.parts.values()]))
    place = ModelPath(folder=path, name=clean(path.name or "model", 100))
    return OpenModel(family=family, checkpoint=checkpoint, path=place, options=options, made_of=made_of)


def _with_tiny_vae(checkpoint: Checkpoint, family: Family, options: LoadOptions) -> Checkpoint:
    """Return a checkpoint whose VAE is checked if it is a tiny one that was given, with what cannot be known of it.
    Raise ModelError."""
    part, path = checkpoint.components.get("vae"), options.part("vae")
    if part is None or path is None or family.tiny_vae is None or not tiny_vae.is_tiny(part):
        return checkpoint
    if options.for_rewrite:
        raise bad(path, "is a tiny VAE, which a converted model does not take in: give it with --vae when you draw")
    tiny_vae.check(path, part, family.tiny_vae(checkpoint))
    line = tiny_vae.note(path, part.config)
    return checkpoint if line is None else replace(checkpoint, reports=(*checkpoint.reports, ("notice", line)))


def _left_out(paths: Iterable[Path]) -> Reports:
    """Return the messages on what is left out of the files among `paths`, one for each file."""
    files = (path for path in dict.fromkeys(paths) if is_file(path) and path.suffix.lower() not in PICKLES)
    lines = ((path, left_out.line(peek(path))) for path in files)
    return tuple(("notice", f"{clean(path.name, 60)}: {line}") for path, line in lines if line)


@cache
def published(known: KnownModel) -> OpenModel | None:
    """Return a known model as it is published, without its files; None if its configurations are not known."""
    if known is catalog.BUILT_IN or (folder := catalog.configurations(known)) is None:
        return None
    family = next(family for family in FAMILIES if family.name == known.family)
    dtypes = known.dtype, known.denoiser_dtype
    checkpoint = known_configs.checkpoint(known.name, folder, family.parts, *dtypes, family.folders)
    return OpenModel(
        family=family,
        checkpoint=family.published(checkpoint, folder),
        path=ModelPath(folder=checkpoint.source, name=known.name, known=known),
        on_paper=True,
    )


def _made_of(path: Path, family: Family) -> KnownModel | None:
    """Return the known model that the folder `path` was converted from, or None. Raise ModelError."""
    note = path / NOTE
    name = read_json(note).get("model") if is_file(note) else None
    known = catalog.find(name) if isinstance(name, str) else None
    return known if known is not None and known.family == family.name else None


def model_of(transformer: Path, options: LoadOptions) -> str | None:
    """Return the name of the known model that the transformer in a folder or file is of, so that files of all parts are
    a model; None if its family's parts need a model's folder. Raises ModelError."""
    if is_folder(transformer):
        config = transformer / "config.json"
        kind = read_json(config).get("_class_name") if is_file(config) else None
        families = tuple(family for family in FAMILIES if kind in family.networks[0].kinds)
    else:
        part = identify_file(transformer) if is_file(transformer) else None
        families = part.families if part is not None and part.option in ("transformer", "model") else ()
    return next((family.model_of(transformer, options) for family in families if family.model_of), None)


def open_refiner(base: OpenModel, path: Path) -> Checkpoint:
    """Open the refiner at `path` for `base`, whose tokenizer serves for a file without one. Raises ModelError and
    UsageError."""
    refiners = base.family.refiner
    if refiners is None:
        able = " and ".join(family.refiner.title for family in FAMILIES if family.refiner is not None)
        raise UsageError(f"--refiner is for {able} only")
    refiners.check(base.checkpoint, None)
    opened = open_model(path, LoadOptions(refined_tokenizer=list(base.checkpoint.tokenizers.values())[-1].path))
    with closed_on_error(opened.checkpoint):
        if opened.family is not base.family:
            raise ModelError(f"{clean(path, 120)}: is no refiner for {base.family.title}")
        refiners.check(base.checkpoint, opened.checkpoint)
        opened.checkpoint.read_tokenizers()
    return opened.checkpoint


def of_folder(folder: Path) -> Family:
    """Return the family of a folder, by its index or by the names of its weights. Raises ModelError."""
    index = model_index(folder)
    if not is_file(index):
        if (foreign := foreign_folder(folder)) is not None:
            return foreign[0]
        raise ModelError(
            f"{clean(folder)}: no model_index.json here; expected a folder in diffusers layout, or a file, of a known "
            f"model: {_KNOWN}"
        )
    name = str(read_json(index).get("_class_name"))
    for family in FAMILIES:
        if name in family.pipelines:
            return family
    check_not_modular(folder)
    refused = {start: reason for family in FAMILIES for start, reason in family.refused.items()}
    if starts := [start for start in refused if name.startswith(start)]:
        raise ModelError(f"{clean(folder)}: {refused[max(starts, key=len)]}")
    raise ModelError(f"{clean(index)}: pipeline {clean(name, 60)!r} is not supported; {_KNOWN}")


def check_not_modular(folder: Path) -> None:
    """Raise ModelError for the folder of a modular pipeline of diffusers, unless a family has its class."""
    index = model_index(folder)
    if index.name != MODULAR_INDEX:
        return
    name = clean(str(read_json(index).get("_class_name")), 60)
    if all(name not in family.pipelines for family in FAMILIES):
        raise bad(
            folder,
            f"is a modular pipeline of diffusers ({index.name}: {name}), which this version does not open: give a "
            "folder with model_index.json, or the files of its parts",
        )


def foreign_folder(folder: Path) -> tuple[Family, str] | None:
    """Return the family and the layout of a folder in another program's layout; else None. Raises ModelError."""
    for family in FAMILIES:
        if (signs := family.networks[0].mflux_signs) and (layout := mflux.layout(folder, signs)) is not None:
            return family, layout
    return None


def check_names(folder: Path) -> None:
    """Check that a family reads the names in an index of shards in another program's layout, that of a component's
    `folder`, before a shard is downloaded. Raises ModelError."""
    names = find_files(folder).weight_map
    families = [family for family in FAMILIES if family.networks[0].mflux_signs and family.denoiser == folder.name]
    if families and not any(name.startswith(family.networks[0].mflux_signs) for family in families for name in names):
        raise bad(folder, f"is of no known model as another program saves it; it begins with {listed(names)}")


def identify(header: Header) -> FileKind | None:
    """Return the kind of the file with this header: a model, a part of one, or a LoRA; None for any other."""
    return file_kind.identify(header, FAMILIES)


def identify_file(path: Path) -> FileKind | None:
    """Return the kind of the file at `path`, as `identify` does. Raises ModelError for one that cannot be read."""
    header = peek(path)
    return identify(header)


def components(folder: Path) -> list[Path]:
    """Return the folders with a configuration in `folder`, by name."""
    return [path for path in sorted(islice(folder.iterdir(), MAX_PARTS)) if is_file(path / "config.json")]


def adapter_family(path: Path) -> Family | None:
    """Return the family whose pictures are prompts by the adapter at `path`, a file, its folder or that of its
    pipeline; None for another one. Raises ModelError for one that cannot be read."""
    if not is_folder(path):
        header = open_weights(path)
        header.file.close()
        part = identify(header)
        return part.families[0] if part is not None and part.option == "ip_adapter" else None
    folders = [path] if is_file(path / "config.json") else components(path)
    kinds = {read_json(folder / "config.json").get("_class_name") for folder in folders}
    adapters = ((family, one) for family in FAMILIES if family.control for one in family.control.adapters)
    return next((family for family, network in adapters if network.kind in kinds), None)


def of_file(path: Path) -> Family:
    """Return the family that reads one file, by its header. Raises ModelError that says what another file is."""
    header = peek(path)
    for family in FAMILIES:
        if family.opens(header):
            return family
    kind = identify(header)
    if kind is not None:
        beside = ", beside the model that it belongs to (-m)"
        raise bad(path, f"is {kind.title} and no whole model: give it with {kind.flag}{beside}")
    if architecture := gguf.architecture(header):
        beside = "a part goes beside -m, with --transformer, --unet or --text-encoder"
        raise bad(path, f"is a GGUF file of '{clean(architecture, 40)}' and no whole model: {beside}")
    raise bad(path, f"is no checkpoint of a whole model that is known; it begins with {listed(header.tensors)}")


def titles(chosen: Callable[[Family], bool]) -> str:
    """Return the names of the families that are `chosen`, for a message."""
    return file_kind.listed_titles([family for family in FAMILIES if chosen(family)])
