"""A process that is called as a worker is, draws nothing and answers at once: for `measure_batch.py`."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection

import numpy as np

from qwenimg.cli.workers.channel import FollowerChannel
from qwenimg.cli.workers.messages import Draw, Finished, PictureDrawn, Ready
from qwenimg.common.pictures.png import encode_png

SIZE = "MEASURE_BATCH_BYTES"


def picture(size: int) -> bytes:
    """Return a PNG of about `size` bytes."""
    return encode_png(np.zeros((2, 2, 3), np.uint8), {"text": "x" * size}, None)


def main(descriptor: int) -> None:
    channel, data = FollowerChannel(Connection(descriptor)), picture(int(os.environ[SIZE]))
    channel.receive()
    channel.send(Ready())
    while isinstance(task := channel.receive(), Draw):
        channel.send(PictureDrawn(id=task.id, index=0, data=data, recipe={}, seconds=0.1))
        channel.send(Finished(id=task.id))
