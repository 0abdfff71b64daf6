"""Ranks that meet: what launchers say in the environment, and torch's store, without a process."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.cli_runner import cli

from qwenimg.backends import ranks
from qwenimg.backends.torch import group as module
from qwenimg.common.base.errors import UsageError
from qwenimg.common.runtime.group import RankLost, RankPlace

TORCH = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Any:
    def sets(**values: str) -> None:
        for name in (*TORCH, "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MLX_RANK", "MLX_HOSTFILE"):
            monkeypatch.delenv(name, raising=False)
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    sets()
    return sets


def test_the_place_that_a_launcher_gives(environment: Any, tmp_path: Path) -> None:
    assert ranks.place(2) is None
    environment(**TORCH)
    assert ranks.place(4) == RankPlace(rank=1, size=4, local=1, neighbours=4, host="node0", port=29500)
    environment(**TORCH, LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    assert ranks.place(4) == RankPlace(rank=1, size=4, local=0, neighbours=1, host="node0", port=29500)
    (tmp_path / "hosts").write_text(json.dumps([["10.0.0.1:5000"], ["10.0.0.2:5000"]]))
    environment(MLX_RANK="1", MLX_HOSTFILE=str(tmp_path / "hosts"))
    assert ranks.by_mlx() and ranks.place(2) == RankPlace(rank=1, size=2, host="10.0.0.1")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"WORLD_SIZE": "2"}, "--devices 4: the launcher has started 2 ranks"),
        ({"RANK": "4"}, "rank 4 of 4"),
        ({"RANK": "-1"}, "RANK is '-1'"),
        ({"RANK": "one"}, "RANK is 'one'"),
        ({"WORLD_SIZE": "0"}, "0 ranks"),
        ({"WORLD_SIZE": "999"}, "999 ranks; 1 to 64"),
        ({"WORLD_SIZE": "9" * 30}, "WORLD_SIZE is '999"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT is 0"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT is 70000"),
        ({"LOCAL_RANK": "x"}, "LOCAL_RANK is 'x'"),
        ({"LOCAL_WORLD_SIZE": ""}, "LOCAL_WORLD_SIZE is ''"),
    ],
)
def test_wrong_environments(environment: Any, changed: dict[str, str], words: str) -> None:
    environment(**TORCH | changed)
    cli("a red circle", "-m", "shapes", "--devices", "4").refused(2, words)


@pytest.mark.parametrize("text", ["", "{", "[]", "[1]", '["a"]', '{"a": 1}', "[[]]", "\xff", "null", '[[""]]'])
def test_wrong_host_files(environment: Any, tmp_path: Path, text: str) -> None:
    (tmp_path / "hosts").write_text(text, encoding="latin-1")
    environment(MLX_RANK="1", MLX_HOSTFILE=str(tmp_path / "hosts"))
    cli("a red circle", "-m", "shapes", "--devices", "2").refused(2)
    environment(MLX_RANK="1", MLX_HOSTFILE=str(tmp_path / "missing"))
    cli("a red circle", "-m", "shapes", "--devices", "2").refused(2, "MLX_HOSTFILE", "missing")


def test_options_that_devices_do_not_have(environment: Any) -> None:
    drawn = ("a red circle", "-m", "shapes", "--devices", "2", "--backend")
    cli(*drawn, "mlx").refused(2, "start a rank on each Mac with mlx.launch")
    cli(*drawn, "cuda:1").refused(2, "rank i takes GPU i")
    if not torch.cuda.is_available():
        cli(*drawn, "cuda").refused(3, "--backend cuda: torch sees no NVIDIA GPU here")
    cli(*drawn, "cpu", "--fallback").refused(2, "--fallback works on one device", "--precision")
    cli(*drawn[:-2], "0").refused(2, "--devices")
    assert ranks.check_backend("auto", launched_by_mlx=True) == "mlx"
    with pytest.raises(UsageError, match="launch started compute with mlx"):
        ranks.check_backend("cuda", launched_by_mlx=True)


# Torch's store


def test_two_processes_of_one_rank_and_other_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE", 0.2)
    store = dist.HashStore()
    store.add("rank 0", 1)
    store.set("size", "2")
    module._check(store, RankPlace(rank=1, size=2))
    with pytest.raises(UsageError, match="two processes are rank 1"):
        module._check(store, RankPlace(rank=1, size=2))
    with pytest.raises(UsageError, match="rank 2 is one of 3 ranks, rank 0 one of 2"):
        module._check(store, RankPlace(rank=2, size=3))
    with pytest.raises(RankLost, match="not all 2 ranks have come within 0 s"):
        module._check(dist.HashStore(), RankPlace(rank=0, size=2))
    with pytest.raises(RankLost, match="not all 2 ranks"):
        module._check(dist.HashStore(), RankPlace(rank=1, size=2))


def test_a_port_that_is_taken_and_one_that_nobody_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(UsageError, match=f"port {port} is in use: give another one as MASTER_PORT"):
            module.open_store(RankPlace(rank=0, size=2, port=port))
    with pytest.raises(RankLost, match=f"rank 0 does not answer at 127.0.0.1:{port}"):
        module.open_store(RankPlace(rank=1, size=2, port=port))


def test_a_restart_of_torchrun_does_not_meet_the_ranks_before(monkeypatch: pytest.MonkeyPatch) -> None:
    store, _ = module.local_store()
    module._check(store, RankPlace(rank=0, size=1))
    with pytest.raises(UsageError, match="two processes are rank 0"):
        module._check(store, RankPlace(rank=0, size=1))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    module._check(module._of_this_start(store.underlying_store), RankPlace(rank=0, size=1))
