"""Make the pictures of the page in the README and in docs/server.md, with Debian's Chromium.

    apt-get install chromium; pip install playwright
    python tools/screenshots.py [--output docs/pictures]

It starts `qwenimg serve` with the built-in model and an empty gallery, draws, and takes the page at 1200 and 360 pixels
in both themes.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PROMPTS = (
    "a red circle", "a blue star above a green square", "a ring", "three yellow triangles on purple", "a purple star",
    "two blue circles", "an orange triangle below a white star", "a green ring left of a red square",
    "a yellow square on blue", "a white circle on black", "a red triangle", "a blue ring above a yellow star",
)  # fmt: skip
SIZES = {"wide": (1200, 1000), "narrow": (360, 740)}
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("docs/pictures"))
    output = parser.parse_args().output
    with tempfile.TemporaryDirectory() as folder, serving(folder) as address, browser() as chromium:
        fill(chromium, address)
        for name, (width, height) in SIZES.items():
            for theme in ("light", "dark"):
                shot(chromium, address, output / f"page-{name}-{theme}.png", width, height, theme)


@contextlib.contextmanager
def serving(folder: str) -> Iterator[str]:
    """Start a server and yield its address."""
    command = [sys.executable, "-c", "import sys; from qwenimg.cli.main import run; sys.exit(run())", "serve"]
    more = ["-m", "shapes", "--backend", "cpu", "--port", "0", "-o", folder]
    process = subprocess.Popen([*command, *more], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stderr is not None
        address = process.stdout.readline().strip()
        next(line for line in process.stderr if "ready" in line and "then" not in line)
        yield address
    finally:
        process.kill()


@contextlib.contextmanager
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        raise SystemExit("no Chromium here; apt-get install chromium")
    with sync_playwright() as play:
        args = ["--no-sandbox"] if os.geteuid() == 0 else []
        chromium = play.chromium.launch(executable_path=path, args=args)
        yield chromium
        chromium.close()


def fill(chromium: Any, address: str) -> None:
    """Draw a picture of each prompt."""
    page = chromium.new_page()
    page.goto(address)
    for i, prompt in enumerate(PROMPTS):
        body = {"prompt": prompt, "seed": i + 3}
        answer = page.request.post(f"{address}/api/jobs", data=body)
        while answer.status == 429:
            time.sleep(1)
            answer = page.request.post(f"{address}/api/jobs", data=body)
    while len(page.request.get(f"{address}/api/pictures").json()["pictures"]) < len(PROMPTS):
        time.sleep(0.5)
    page.close()


def shot(chromium: Any, address: str, file: Path, width: int, height: int, theme: str) -> None:
    """Take the page while it draws, its preview shown."""
    page = chromium.new_page(viewport={"width": width, "height": height}, color_scheme=theme, device_scale_factor=1)
    page.goto(address)
    page.get_by_label("Prompt", exact=True).fill("a red circle above a blue star")
    page.locator("#gallery img").last.wait_for()
    jobs = [page.request.post(f"{address}/api/jobs", data={"prompt": prompt, "steps": 60, "seed": 5}).json()["id"]
            for prompt in ("a red circle above a blue star", "a green ring and a yellow square")]  # fmt: skip
    page.locator("#told").filter(has_text=re.compile("step (2[5-9]|[34][0-9])")).wait_for()
    page.screenshot(path=file)
    for job in jobs:
        page.request.delete(f"{address}/api/jobs/{job}")
    page.close()
    print(file)


if __name__ == "__main__":
    main()
