"""What huggingface_hub's download keeps of the promises in docs/models.md, against a hub on this machine.

python tools/measure_hub_library.py
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from support.fake_hub import COMMIT, REPO, SHARDS, FakeHub, noise, running

LARGE = 64_000_000  # bytes
SMALL, FILE = "model_index.json", f"transformer/{next(iter(SHARDS))}"
GET = f"import sys; from huggingface_hub import hf_hub_download; hf_hub_download({REPO!r}, sys.argv[1])"
NO_SPACE = "import shutil, types; shutil.disk_usage = lambda path: types.SimpleNamespace(free=1000)\n"
FULL = (
    "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
    "resource.setrlimit(resource.RLIMIT_FSIZE, (30_000_000, 30_000_000))\n"
)


class Case:
    """An empty cache, and processes that download into it."""

    def __init__(self, hub: FakeHub, address: str) -> None:
        self.cache = Path(tempfile.mkdtemp())
        self.storage = self.cache / f"models--{REPO.replace('/', '--')}"
        self.env = os.environ | {"HF_HUB_CACHE": str(self.cache), "HF_ENDPOINT": address, "HF_HUB_OFFLINE": "0"}
        self.hub = hub
        hub.faults.clear()
        hub.sent.clear()

    def start(self, path: str, before: str = "") -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", before + GET, path], env=self.env, stderr=subprocess.DEVNULL)

    def run(self, path: str, before: str = "") -> str:
        process = self.start(path, before)
        try:
            return f"exit {process.wait(10)}"
        except subprocess.TimeoutExpired:
            process.kill()
            return "waits for ever"

    def kept(self) -> int:
        return sum(file.stat().st_size for file in self.cache.rglob("*.incomplete"))

    def sent(self) -> str:
        return f"{sum(self.hub.sent.values()) / 1e6:.1f} MB sent"


def main() -> None:
    with running({FILE: noise(LARGE, 1), SMALL: b"{}"}) as (hub, address):
        case = Case(hub, address)
        hub.faults[FILE] = [("stall", 0.5)]
        process = case.start(FILE)
        end = time.monotonic() + 60
        while case.kept() < LARGE * 0.4 and time.monotonic() < end:
            time.sleep(0.05)
        process.kill()
        process.wait()
        hub.sent.clear()
        print("kill -9 at half:", case.run(FILE), case.sent(), f"{case.kept() / 1e6:.1f} MB left over")
        case = Case(hub, address)
        hub.faults[FILE] = ["hash"]
        shown = case.run(FILE)
        wrong = [blob.name != hashlib.sha256(blob.read_bytes()).hexdigest() for blob in case.cache.rglob("blobs/*")]
        print("wrong bytes:", shown, "named" if any(wrong) else "refused")
        case = Case(hub, address)
        print("1 kB free:", case.run(FILE, NO_SPACE), case.sent())
        case = Case(hub, address)
        print("disk full at 30 MB:", case.run(FILE, FULL), f"{case.kept() / 1e6:.1f} MB kept")
        for title, faults in (("503 from the data's host", [503]), ("cut, then no ranges", [("cut", 0.5), "whole"])):
            case = Case(hub, address)
            hub.faults[FILE] = faults
            print(f"{title}:", case.run(FILE), case.sent())
        case, outside = Case(hub, address), Path(tempfile.mkdtemp())
        (case.storage / "snapshots").mkdir(parents=True)
        (case.storage / "snapshots" / COMMIT).symlink_to(outside)
        print("snapshot is a link:", case.run(SMALL), f"{len(list(outside.iterdir()))} names written outside")
        case = Case(hub, address)
        (case.storage / "refs").mkdir(parents=True)
        os.mkfifo(case.storage / "refs" / "main")
        print("refs/main is a pipe:", case.run(SMALL))


if __name__ == "__main__":
    main()
