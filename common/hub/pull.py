"""Download of a model from the hub into the Hugging Face cache, in its layout, so that other programs share the files;
and its removal.

The layout: blobs/<hash> holds the bytes, snapshots/<commit>/<path> links to them, refs/main holds the commit. A file
gets its name when it is complete and verified, and refs/main is written last, so that an update that stops half way
leaves the previous revision in use.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import os
import shutil
import time
import urllib.parse
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from qwenimg.common.base import amounts, hf_cache
from qwenimg.common.base.arguments import home
from qwenimg.common.base.config import INDEX, MODULAR_INDEX, has_index
from qwenimg.common.base.errors import DoesNotFit, ModelError, UsageError
from qwenimg.common.base.text import clean
from qwenimg.common.families import catalog, registry, repository
from qwenimg.common.families.known_model import KnownModel
from qwenimg.common.hub import listing, requirements, resolve
from qwenimg.common.hub.verify import HASH, Progress, damaged, report, right, verify_offline
from qwenimg.common.parts.downloads import Download
from qwenimg.common.transfer.download import NOTE, PART, Wanted, bytes_kept, fetch
from qwenimg.common.transfer.http import Echo, Server, check_endpoint, connect, get_json
from qwenimg.common.transfer.removal import Removal, of_files, of_repository

_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)


def pull(name: str, *, echo: Echo, progress: Progress, verify: bool = False) -> Path:
    """Download the files that are used of `name`, a known model, a download or a hub id, and return its folder in the
    cache.

    Files that are here are not fetched again, and unfinished ones are continued. `verify`: hash the files that are
    here, and fetch those again whose hash is wrong; offline, name the wrong file. `echo` gets lines to print;
    `progress` gets the file, the bytes that are here and all bytes of this call. Raises ModelError (offline, not there,
    server or hash at fault, not a supported model), DoesNotFit and UsageError (no permission)."""
    download = catalog.find_download(name)
    repo = download.repo if download else resolve.find_repo(name)[0]
    if hf_cache.is_offline():
        if verify and download is None:
            return verify_offline(repo, echo, progress)
        raise ModelError(f"{repo}: cannot be pulled offline; unset HF_HUB_OFFLINE and TRANSFORMERS_OFFLINE")
    endpoint = hf_cache.settings().ENDPOINT
    check_endpoint(endpoint)  # the library's search for a token fails at some of these
    server = connect(endpoint, hf_cache.token())
    try:
        commit, files = _listing(server, repo, download, echo)
    except ModelError as error:
        near = catalog.nearest(name)
        raise ModelError(f"{error}; did you mean {near}?") if near else error from None
    work = _Work(
        download=download, server=server, repo=repo, commit=commit, storage=hf_cache.storage_folder(repo), echo=echo
    )
    try:
        with locked(work.storage, partial(echo, f"{repo}: another process is pulling it; waiting")):
            if verify:
                _drop_damaged(work, files, progress)
            _download(work, files, progress)
            _finish(work)
    except OSError as error:
        where, reason = clean(work.storage, 120), clean(error.strerror or error, 60)
        raise UsageError(f"{repo}: cannot be written in {where}: {reason}") from None
    return work.snapshot


@dataclass(frozen=True, kw_only=True)
class _Work:
    """One commit of one repository, and its place in the cache."""

    download: Download | None  # None: a model
    server: Server
    repo: str
    commit: str
    storage: Path
    echo: Echo

    @property
    def cache(self) -> Path:
        return self.storage.parent

    @property
    def snapshot(self) -> Path:
        return self.storage / "snapshots" / self.commit

    def blob(self, wanted: Wanted) -> Path:
        return self.storage / "blobs" / wanted.digest

    def pointer(self, wanted: Wanted) -> Path:
        return self.snapshot / wanted.path

    def url(self, wanted: Wanted) -> str:
        return f"{self.server.endpoint}/{self.repo}/resolve/{self.commit}/{urllib.parse.quote(wanted.path)}"


# Listing


def _listing(server: Server, repo: str, download: Download | None, echo: Echo) -> tuple[str, list[Wanted]]:
    """Return the commit of `main` and its files that are used, the small ones first. Raises ModelError."""
    data = get_json(server, f"{server.endpoint}/api/models/{repo}/revision/main?blobs=true", repo, echo)
    commit = data.get("sha") if isinstance(data, dict) else None
    entries = data.get("siblings") if isinstance(data, dict) else None
    if not isinstance(commit, str) or not hf_cache.COMMIT.fullmatch(commit) or not isinstance(entries, list):
        raise ModelError(f"{repo}: {clean(server.endpoint, 80)} does not answer as a hub does: check HF_ENDPOINT")
    names = {e["rfilename"]: e for e in entries if isinstance(e, dict) and isinstance(e.get("rfilename"), str)}
    is_used = repository.needed if download is None else download.files.__contains__
    files = [_wanted(repo, path, entry) for path, entry in names.items() if is_used(path)]
    required = repository.required(names.__contains__) if download is None else download.files[:2]
    absent = [path for path in required if path not in names]
    if absent and download is not None:
        raise ModelError(f"{repo}: has no {absent[0]}: check HF_ENDPOINT")
    if absent:
        raise ModelError(f"{repo}: has no {absent[0]}: not a model in diffusers layout{_one_of(repo, names)}")
    return commit, sorted(files, key=lambda f: (f.path not in (INDEX, MODULAR_INDEX), f.size, f.path))


def _one_of(repo: str, names: Iterable[str]) -> str:
    """Return how to fetch a file of a repository that is no model, for a message."""
    files = [name for name in names if name.endswith(".safetensors") and "/" not in name]
    return f"; a LoRA of it: qwenimg pull {repo}/{clean(files[0], 80)}" if files else " that this program draws with"


def _wanted(repo: str, path: str, entry: dict[str, object]) -> Wanted:
    lfs = entry.get("lfs")
    if isinstance(lfs, dict):
        size, digest = lfs.get("size"), lfs.get("sha256")
    else:
        size, digest = entry.get("size"), entry.get("blobId")
    if type(size) is not int or not 0 <= size < 2**50 or not isinstance(digest, str) or not HASH.fullmatch(digest):
        raise ModelError(f"{repo}: the hub lists no size and hash for {path}: check HF_ENDPOINT")
    return Wanted(path=path, size=size, digest=digest)


# Downloading


def _download(work: _Work, files: list[Wanted], progress: Progress) -> None:
    """Bring every file into the snapshot. The lock must be held."""
    absent = {f.digest: f for f in files if not _is_here(work, f)}
    total = sum(f.size for f in absent.values())
    received = sum(bytes_kept(f, work.blob(f)) for f in absent.values())
    _tell(work, len(absent), total, received)
    if total - received >= requirements.LARGE:
        sizes = Counter[str]()
        for f in files:
            sizes[f.path.partition("/")[0]] += f.size
        work.echo(requirements.machine_text(catalog.find(work.repo), max(sizes.values())))
    hf_cache.make_folder(work.cache, work.blob(files[0]).parent)
    begin = time.monotonic()
    done = 0  # bytes of the files that are complete
    ahead = received  # bytes received earlier of the files that are still to come
    for wanted in files:
        if wanted.digest in absent and not _is_here(work, wanted):
            blob = work.blob(wanted)
            ahead -= bytes_kept(wanted, blob)
            tell = functools.partial(report, progress, wanted.path, done + ahead, total)
            fetch(work.server, work.url(wanted), wanted, blob, commit=work.commit, echo=work.echo, progress=tell)
            done += wanted.size
        _link(work, wanted)
        _check_kind(work, wanted.path)
    requirements.keep_speed(total - received, time.monotonic() - begin)


def _check_kind(work: _Work, path: str) -> None:
    """Raise ModelError for an unsupported kind of model once its small files show it, before gigabytes are fetched."""
    if path in (INDEX, MODULAR_INDEX):
        registry.of_folder(work.snapshot)
    elif work.download is None and path.endswith(".index.json") and not has_index(work.snapshot):
        registry.check_names((work.snapshot / path).parent)


def _drop_damaged(work: _Work, files: list[Wanted], progress: Progress) -> None:
    """Remove the names of files whose bytes are not those that the hub lists, so that they are fetched again."""
    paths = ((wanted, work.pointer(wanted), work.blob(wanted)) for wanted in files)
    here = [
        (pointer if hf_cache.is_inside(work.cache, pointer, wanted.size) else blob, wanted)
        for wanted, pointer, blob in paths
        if _is_here(work, wanted)
    ]
    wrong = damaged(here, progress)
    for _, wanted in wrong:
        work.echo(f"{wanted.path}: its bytes are not those that the hub lists; fetching it again")
        for place in (work.pointer(wanted), work.blob(wanted)):
            hf_cache.make_folder(work.cache, place.parent)
            place.unlink(missing_ok=True)
    if not wrong:
        work.echo(f"{work.repo}: {right(here)}")


def _is_here(work: _Work, wanted: Wanted) -> bool:
    paths = (work.pointer(wanted), work.blob(wanted))
    return any(hf_cache.is_inside(work.cache, path, wanted.size) for path in paths)


def _tell(work: _Work, count: int, total: int, received: int) -> None:
    """Announce the files that will be fetched. Raises DoesNotFit if the disk has too little space."""
    head = f"{work.repo} at commit {work.commit[:12]}"
    if not count:
        work.echo(f"{head} is complete in the cache already")
        return
    free = shutil.disk_usage(work.storage).free
    have = f", {amounts.size_text(received)} of them kept from before" if received else ""
    if total - received > free:
        raise DoesNotFit(
            f"{head}: {amounts.size_text(total - received)} to fetch, {amounts.size_text(free)} free in "
            f"{clean(work.storage.parent, 100)}: free some, or set HF_HUB_CACHE to a folder on another disk"
        )
    files = amounts.counted(count, "file")
    size = amounts.size_text(total)
    work.echo(
        f"{head}: {files}, {size}{have}{requirements.time_text(total - received)}; {amounts.size_text(free)} free"
    )


def _link(work: _Work, wanted: Wanted) -> None:
    """Make the name in the snapshot: a relative link to the blob, or the blob itself on a file system without links."""
    blob, pointer = work.blob(wanted), work.pointer(wanted)
    hf_cache.make_folder(work.cache, pointer.parent)
    if hf_cache.is_inside(work.cache, pointer, wanted.size):
        return
    pointer.unlink(missing_ok=True)
    try:
        pointer.symlink_to(os.path.relpath(blob, pointer.parent))
    except OSError:
        blob.replace(pointer)


def _finish(work: _Work) -> None:
    """Write the commit to refs/main and remove unfinished downloads. Raises ModelError for an incomplete model."""
    lack = repository.lacks(work.snapshot) if work.download is None else None
    if lack:
        raise ModelError(f"{work.repo}: has no {lack}: not a whole model in diffusers layout")
    if work.download is None:
        registry.of_folder(work.snapshot)  # without model_index.json, the names of the weights show its family
    refs = hf_cache.make_folder(work.cache, work.storage / "refs")
    temp = refs / f".main.{os.getpid()}"
    with hf_cache.create(temp) as file:
        file.write(work.commit.encode())
    temp.replace(refs / "main")
    for suffix in (PART, NOTE):
        for leftover in (work.storage / "blobs").glob(f"*{suffix}"):
            with suppress(OSError):  # a folder of that name is not ours
                leftover.unlink()


@contextmanager
def locked(storage: Path, busy: Callable[[], None]) -> Iterator[None]:
    """Lock the repository in the folder `storage`: if another process has it, call `busy` and wait. The system releases
    the lock of a process that dies."""
    cache = storage.parent
    hf_cache.make_folder(cache, storage)
    locks = hf_cache.make_folder(cache, cache / ".locks" / storage.name)
    with hf_cache.open_lock(locks / "qwenimg.lock") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            busy()
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in _NO_LOCKS:  # some network disks have no locks
                raise
        yield


# Removal


def removal(name: str) -> tuple[Removal, list[str]]:
    """Return what `rm` deletes of `name`, a known model or download, a hub id or a file of one, and lines about what
    else uses it. Raises ModelError for what is not in the cache, and UsageError for what is not ours to delete."""
    if os.path.lexists(Path(home(name))):
        raise UsageError(
            f"{clean(name, 100)}: is a file or folder of that name here, and rm deletes only from the cache; "
            f"delete it yourself, or run rm in another folder"
        )
    download = catalog.find_download(name)
    repo = download.repo if download else resolve.find_repo(name)[0]
    storage = hf_cache.storage_folder(repo)
    if not os.path.lexists(storage):
        raise ModelError(f"{clean(name, 100)}: nothing of it is in the cache {clean(storage.parent, 120)}")
    rows: tuple[KnownModel | Download, ...] = (*catalog.KNOWN.values(), *catalog.NAMED)
    asked = (name.lower(), repo.lower())
    titles = {one.name: one.purpose for one in rows if one.repo == repo and one.name not in asked}
    if download is None:
        return of_repository(storage), [f"{other} goes with it: {purpose}" for other, purpose in titles.items()]
    model = next((one for one in catalog.KNOWN.values() if one.repo == repo), None)
    if model is not None and any(map(_is_whole, hf_cache.snapshots(storage))):
        raise UsageError(f"{name}: its files belong to {model.name}, which is here: qwenimg rm {model.name}")
    others = [one for one in catalog.ADAPTERS if download.is_ip_adapter and one is not download and one.repo == repo]
    shared = {file for one in others if listing.has_all(one) for file in one.files}  # an image encoder
    return of_files(storage, [file for file in download.files if file not in shared]), [download.purpose]


def removing(what: Removal) -> None:
    """Delete what `removal` has found. Raises UsageError, also while another process pulls it."""

    def busy() -> None:
        raise UsageError(f"{what.storage.name}: another process is pulling it; wait for it or stop it")

    try:
        with locked(what.storage, busy):
            what.run()
    except OSError as error:
        where, reason = clean(what.storage, 120), clean(error.strerror or error, 60)
        raise UsageError(f"{where}: cannot be deleted: {reason}") from None


def _is_whole(folder: Path) -> bool:
    try:
        return repository.lacks(folder) is None
    except ModelError:
        return False
