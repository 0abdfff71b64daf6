"""One server for all tests that leave it as it was."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.servers import RunningServer, serving


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """The built-in model, with a further name, and a queue of four."""
    with serving(tmp_path_factory.mktemp("gallery") / "g", "--served-name", "dall-e-2", "--queue", "4") as running:
        yield running
