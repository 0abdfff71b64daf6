"""Addresses that people give in place of a file: none is opened, and a message says what gets the file."""

from __future__ import annotations

import re

# An address, also as the network of a control or after one
ADDRESS = re.compile(r"(?:[^\s=]{1,80}=)?https?://(?P<host>[^/\s]+)/?(?P<rest>[^\s=?#:;]*)")
HUBS = ("huggingface.co", "hf.co", "www.huggingface.co")
REPO_PAGE = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)/?(?:(?:resolve|blob|tree)/[^/]+/?(?P<file>\S+)?)?", re.ASCII)


def address_advice(text: str) -> str | None:
    """Return what to do in place of an address, which no option opens; None for another text."""
    if (match := ADDRESS.match(text)) is None or any(letter.isspace() for letter in text):  # a prompt has blanks
        return None
    name = REPO_PAGE.fullmatch(match["rest"]) if match["host"] in HUBS else None
    if name is None:
        return "no address is opened: download the file and give its path; `qwenimg info FILE` says what uses it"
    file = f"/{name['file']}" if name["file"] else ""
    return f"no address is opened: `qwenimg pull {name['repo']}{file}` gets it, and then that is its name"
