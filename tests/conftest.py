"""Before any test: fp32 means fp32, MLX compiles nothing on the CPU and finds a fast BLAS, and Ctrl-C is a signal."""

from __future__ import annotations

import gc
import os
import zlib
from collections import defaultdict

os.environ.setdefault("MLX_ENABLE_TF32", "0")
os.environ.setdefault("MLX_DISABLE_COMPILE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["XDG_CONFIG_HOME"] = os.devnull  # nobody's own configuration
os.environ.setdefault("HF_HOME", os.path.expanduser("~/.cache/huggingface"))  # noqa: PTH111
os.environ["XDG_CACHE_HOME"] = os.devnull  # nor what the program keeps

import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import filelock
import pytest
from hypothesis import HealthCheck, settings
from support import pretend_machine  # noqa: F401 (for what it sets up, before anything reads the machine)

settings.register_profile("any load", deadline=None, suppress_health_check=[HealthCheck.too_slow])  # both on the clock
settings.load_profile("any load")

pytest_plugins = ["support.cli_runner", "support.hub_cases", "support.processor"]  # fixtures of several rooms

# A background job of a script ignores Ctrl-C and hands that on; the tests send it to themselves and to what they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # as `nohup` does
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


# `make test` has a sample of what takes long, `make test-all` the rest too


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the cases that `sample(n)` leaves out as `rest`, and with `sample(n, rest=m)` all but m of these as `slow`.
    The test's name decides which stay, so that those of all tests have every family, policy and backend."""
    cases = defaultdict[str, list[pytest.Item]](list)
    for item in items:
        if item.get_closest_marker("sample") and not item.get_closest_marker("slow"):
            cases[item.nodeid.partition("[")[0]].append(item)
    for name, those in cases.items():
        mark = those[0].get_closest_marker("sample")
        assert mark is not None
        start = zlib.crc32(name.encode())
        others = unchosen(those, mark.args[0], start)
        slow = unchosen(others, mark.kwargs.get("rest", len(others)), start)
        for item in others:
            item.add_marker(pytest.mark.slow if item in slow else pytest.mark.rest)


def unchosen(items: list[pytest.Item], count: int, start: int) -> list[pytest.Item]:
    """What is left of `items` without `count` of them, which are spread evenly."""
    count = min(count, len(items))
    chosen = {(start + i * len(items) // count) % len(items) for i in range(count)}
    return [item for i, item in enumerate(items) if i not in chosen]


# `--minutes N`: what N minutes allow, beginning elsewhere for each `--begin`; what they do not allow is told as skipped

STARTED = time.monotonic()


class InTime:
    """Begins with another test for each number, and begins none once the minutes are over."""

    def __init__(self, minutes: float, begin: int) -> None:
        self.minutes, self.begin = minutes, begin

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        first = int(self.begin * 0.618034 % 1 * len(items))  # the golden ratio: a few runs reach all of them
        items[:] = items[first:] + items[:first]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        if time.monotonic() - STARTED > 60 * self.minutes:
            pytest.skip(f"the {self.minutes:g} minutes of this run were over")


def pytest_collection_finish() -> None:
    """What is imported by now stays, and Python looks for garbage less often: it took a sixth of the tests' time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


def pytest_unconfigure() -> None:
    if "triton" in sys.modules:  # which takes what is not freed at the end for leaks, and prints thirty lines of them
        gc.unfreeze()


# `pytest -m parity --backends mlx,cuda`: comparisons on the backends that are named


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--backends", metavar="A,B", help="of the comparisons marked parity: mlx, mlx:cpu, cuda, cpu")
    parser.addoption("--minutes", type=float, help="begin no test later than this; what is left is told as skipped")
    parser.addoption("--begin", type=int, default=0, help="with --minutes: another number begins with another test")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "there" in metafunc.fixturenames:
        named = metafunc.config.getoption("--backends") or "mlx"
        metafunc.parametrize("backend", [name.strip() for name in named.split(",")], scope="module")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--backends"):
        config.pluginmanager.register(Ran(), "parity-ran")
    if minutes := config.getoption("--minutes"):
        config.pluginmanager.register(InTime(minutes, config.getoption("--begin")), "in-time")


class Ran:
    """Fails a run for which backends were named and none of them was compared."""

    def __init__(self) -> None:
        self.compared = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.compared += report.when == "call" and "parity" in report.keywords and not report.skipped

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if not self.compared and not hasattr(session.config, "workerinput"):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self.compared:
            terminalreporter.write_line("no backend of --backends was compared: none of them is here", red=True)


@pytest.fixture(autouse=True, scope="session")
def short_estimates() -> None:
    """Measure the rate that a time is estimated with for a tenth of its time: it is one of each pipeline and plan."""
    from qwenimg.common.runtime import rates

    rates.SECONDS /= 10


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all workers of this run."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base


def written(folder: Path, write: Callable[..., object], *args: Any, **options: Any) -> Path:
    """The folder that write(folder, ...) makes, whichever worker comes first."""
    with filelock.FileLock(f"{folder}.lock"):
        if not any((folder / f"{kind}model_index.json").exists() for kind in ("", "modular_")):
            write(folder, *args, **options)
    return folder


@pytest.fixture(scope="session")
def tiny_folder(shared_folder: Path) -> Path:
    """A tiny Qwen-Image folder written by diffusers itself; see `tiny_model`."""
    from support.tiny_model import write_tiny_model

    return written(shared_folder / "tiny-qwen-image", write_tiny_model)


@pytest.fixture(scope="session")
def folders(shared_folder: Path) -> dict[str, Path]:
    """Tiny Stable Diffusion folders of every kind, written by diffusers; see `tiny_sd`."""
    from support.tiny_sd import TEXTS, write_tiny_sd

    return {name: written(shared_folder / f"tiny-{name}", write_tiny_sd, name) for name in TEXTS}


@pytest.fixture(scope="session")
def tiny_zimage(shared_folder: Path) -> Path:
    """A tiny Z-Image folder written by diffusers; see `tiny_zimage`."""
    from support.tiny_zimage import write_tiny_zimage

    return written(shared_folder / "tiny-z-image", write_tiny_zimage)


@pytest.fixture(scope="session")
def tiny_flux2(shared_folder: Path) -> dict[str, Path]:
    """Tiny FLUX.2 folders, klein distilled and not, klein KV and dev, written by diffusers; see `tiny_flux2`."""
    from support.tiny_flux2 import write_tiny_flux2
    from support.tiny_flux2_dev import write_tiny_flux2_dev

    kinds = {
        "flux2-klein": {"distilled": True},
        "flux2-base": {"distilled": False},
        "flux2-kv": {"distilled": True, "kv": True},
    }
    made = {name: written(shared_folder / f"tiny-{name}", write_tiny_flux2, **kind) for name, kind in kinds.items()}
    return made | {"flux2-dev": written(shared_folder / "tiny-flux2-dev", write_tiny_flux2_dev)}


@pytest.fixture(scope="session")
def tiny_flux(shared_folder: Path) -> dict[str, Path]:
    """Tiny Flux.1 folders of each variant, written by diffusers; see `tiny_flux`."""
    from support.tiny_flux import write_tiny_flux

    kinds = ("dev", "schnell", "undistilled", "kontext", "fill")
    return {name: written(shared_folder / f"tiny-flux-{name}", write_tiny_flux, name) for name in kinds}


@pytest.fixture(scope="session")
def tiny_longcat(shared_folder: Path) -> dict[str, Path]:
    """Tiny LongCat-Image folders, the plain one and Edit, written by diffusers; see `tiny_longcat`."""
    from support.tiny_longcat import write_tiny_longcat

    kinds = {"longcat": "text", "longcat-edit": "edit"}
    return {name: written(shared_folder / f"tiny-{name}", write_tiny_longcat, kind) for name, kind in kinds.items()}


@pytest.fixture(scope="session")
def tiny_chroma(shared_folder: Path) -> Path:
    """A tiny Chroma folder written by diffusers; see `tiny_chroma`."""
    from support.tiny_chroma import write_tiny_chroma

    return written(shared_folder / "tiny-chroma", write_tiny_chroma)


@pytest.fixture(scope="session")
def tiny_sd3(shared_folder: Path) -> dict[str, Path]:
    """Tiny Stable Diffusion 3 folders of every kind, written by diffusers; see `tiny_sd3`."""
    from support.tiny_sd3 import KINDS, write_tiny_sd3

    return {name: written(shared_folder / f"tiny-sd3-{name}", write_tiny_sd3, name) for name in KINDS}


@pytest.fixture(scope="session")
def tiny_edit(shared_folder: Path) -> dict[str, Path]:
    """Tiny Qwen-Image-Edit folders of each variant, written by diffusers; see `tiny_edit`."""
    from support.tiny_edit import write_tiny_edit

    kinds = ("edit", "2509", "2511")
    return {f"qwen-{name}": written(shared_folder / f"tiny-qwen-{name}", write_tiny_edit, name) for name in kinds}


@pytest.fixture(scope="session")
def tiny_qwen21(shared_folder: Path) -> Iterator[dict[str, Path]]:
    """Tiny Qwen-Image-2.1 folders, the plain one and Turbo; see `tiny_qwen21`. They see pictures in few pixels."""
    from support.tiny_qwen21 import TURBO, small_pictures, write_tiny_qwen21

    kinds: dict[str, Any] = {"qwen21": (), "qwen21-turbo": TURBO}
    with small_pictures():
        yield {name: written(shared_folder / f"tiny-{name}", write_tiny_qwen21, sig) for name, sig in kinds.items()}


@pytest.fixture(scope="session")
def tiny_layered(shared_folder: Path) -> Path:
    """A tiny Qwen-Image-Layered folder written by diffusers; see `tiny_layered`."""
    from support.tiny_layered import write_tiny_layered

    return written(shared_folder / "tiny-qwen-layered", write_tiny_layered)


@pytest.fixture(scope="session")
def tiny_flux3(shared_folder: Path) -> dict[str, Path]:
    """Tiny FLUX.3 Image Klein folders, distilled and not, written by diffusers; see `tiny_flux3`."""
    from support.tiny_flux3 import write_tiny_flux3

    kinds = {"flux3-klein": True, "flux3-base": False}
    return {name: written(shared_folder / f"tiny-{name}", write_tiny_flux3, distilled=d) for name, d in kinds.items()}


@pytest.fixture(scope="session")
def tiny_ernie(shared_folder: Path) -> dict[str, Path]:
    """Tiny ERNIE-Image folders, written by diffusers; see `tiny_ernie`."""
    from support.tiny_ernie import write_tiny_ernie

    kinds = {"ernie": False, "ernie-turbo": True}
    return {name: written(shared_folder / f"tiny-{name}", write_tiny_ernie, turbo=t) for name, t in kinds.items()}


@pytest.fixture(scope="session")
def tiny_krea2(shared_folder: Path) -> dict[str, Path]:
    """Tiny Krea 2 folders, of Raw and of Turbo, written by diffusers; see `tiny_krea2`."""
    from support.tiny_krea2 import write_tiny_krea2

    kinds = {"krea2": False, "krea2-turbo": True}
    return {name: written(shared_folder / f"tiny-{name}", write_tiny_krea2, turbo=t) for name, t in kinds.items()}


@pytest.fixture(scope="session")
def tiny_anima(shared_folder: Path) -> Path:
    """A tiny Anima folder, written by diffusers; see `tiny_anima`."""
    from support.tiny_anima import write_tiny_anima

    return written(shared_folder / "tiny-anima", write_tiny_anima)


@pytest.fixture(scope="session")
def tiny_auraflow(shared_folder: Path) -> Path:
    """A tiny AuraFlow folder, written by diffusers; see `tiny_auraflow`."""
    from support.tiny_auraflow import write_tiny_auraflow

    return written(shared_folder / "tiny-auraflow", write_tiny_auraflow)


@pytest.fixture(scope="session")
def tiny_lumina(shared_folder: Path) -> Path:
    """A tiny Lumina-Image 2.0 folder, written by diffusers; see `tiny_lumina`."""
    from support.tiny_lumina import write_tiny_lumina

    return written(shared_folder / "tiny-lumina", write_tiny_lumina)


@pytest.fixture(scope="session")
def tiny_sana(shared_folder: Path) -> dict[str, Path]:
    """Tiny SANA folders by their kind, written by diffusers; see `tiny_sana`."""
    from support.tiny_sana import KINDS, write_tiny_sana

    return {kind: written(shared_folder / f"tiny-{kind}", partial(write_tiny_sana, kind=kind)) for kind in KINDS}


@pytest.fixture(scope="session")
def tiny_ovis(shared_folder: Path) -> Path:
    """A tiny Ovis-Image folder, written by diffusers; see `tiny_ovis`."""
    from support.tiny_ovis import write_tiny_ovis

    return written(shared_folder / "tiny-ovis", write_tiny_ovis)


@pytest.fixture(scope="session")
def tiny_pixart(shared_folder: Path) -> dict[str, Path]:
    """Tiny PixArt folders, of Sigma, alpha and LCM, written by diffusers; see `tiny_pixart`."""
    from support.tiny_pixart import KINDS, write_tiny_pixart

    return {name: written(shared_folder / f"tiny-{name}", write_tiny_pixart, name) for name in KINDS}


@pytest.fixture(scope="session")
def tiny_hunyuan(shared_folder: Path) -> dict[str, Path]:
    """Tiny Hunyuan-DiT folders, of 1.2 and 1.1, written by diffusers; see `tiny_hunyuan`."""
    from support.tiny_hunyuan import KINDS, write_tiny_hunyuan

    return {name: written(shared_folder / f"tiny-{name}", write_tiny_hunyuan, name) for name in KINDS}


@pytest.fixture(scope="session")
def tiny_cascade(shared_folder: Path) -> Path:
    """A tiny Stable Cascade folder, with the prior in it, written by diffusers; see `tiny_cascade`."""
    from support.tiny_cascade import write_tiny_cascade

    return written(shared_folder / "tiny-cascade", write_tiny_cascade)


@pytest.fixture(scope="session")
def tiny(
    tiny_folder: Path,
    tiny_edit: dict[str, Path],
    tiny_layered: Path,
    tiny_qwen21: dict[str, Path],
    tiny_zimage: Path,
    tiny_flux: dict[str, Path],
    tiny_flux2: dict[str, Path],
    tiny_flux3: dict[str, Path],
    tiny_longcat: dict[str, Path],
    tiny_chroma: Path,
    tiny_ernie: dict[str, Path],
    tiny_krea2: dict[str, Path],
    tiny_anima: Path,
    tiny_auraflow: Path,
    tiny_lumina: Path,
    tiny_sana: dict[str, Path],
    tiny_ovis: Path,
    tiny_pixart: dict[str, Path],
    tiny_hunyuan: dict[str, Path],
    tiny_cascade: Path,
    tiny_sd3: dict[str, Path],
    folders: dict[str, Path],
) -> dict[str, Path]:
    """The tiny folders of all families that have files, by kind."""
    flux = {f"flux-{variant}": folder for variant, folder in tiny_flux.items()}
    qwen = {"qwen": tiny_folder, "qwen-layered": tiny_layered, "qwen21": tiny_qwen21["qwen21"]} | tiny_edit
    return (
        qwen
        | {
            "z-image": tiny_zimage,
            "chroma": tiny_chroma,
            "anima": tiny_anima,
            "auraflow": tiny_auraflow,
            "lumina": tiny_lumina,
            "ovis": tiny_ovis,
            "cascade": tiny_cascade,
            "sd3": tiny_sd3["medium"],
        }
        | flux
        | tiny_flux2
        | tiny_flux3
        | tiny_longcat
        | tiny_ernie
        | tiny_krea2
        | tiny_pixart
        | {kind: tiny_sana[kind] for kind in ("sana", "sana-sprint")}
        | tiny_hunyuan
        | folders
    )


@pytest.fixture(scope="session")
def overflowing(shared_folder: Path, tiny_folder: Path, folders: dict[str, Path]) -> Callable[[str], Path]:
    """The tiny folder of a case in `overflow_models`, which some dtype does not hold."""
    from support.overflow_models import CASES, changed

    def made(name: str) -> Path:
        kind, part, change = CASES[name]
        source = ({"qwen": tiny_folder} | folders)[kind]
        folder = shared_folder / f"overflow-{name}"
        return written(folder, lambda out: changed(source, out.with_suffix(".part"), part, change).rename(out))

    return made
