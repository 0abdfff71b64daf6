"""Canny's edges in a picture (J. Canny, "A Computational Approach to Edge Detection", 1986), with the same pixels as
OpenCV's function, from which ControlNets learned: integers, Sobel's gradients without smoothing, the sum of absolute
values as length."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.pictures.pixels import Uint8

LOW, HIGH = 100, 200  # lengths of gradients: an edge has some above HIGH, and goes on above LOW
TAN_22 = 13_573  # tan(22.5 degrees) in units of 2**-15

Ints = NDArray[np.int32]


def edges(picture: Uint8) -> Uint8:
    """Return the edges in a picture [H, W, 3], white on black, as [H, W, 3]."""
    dx, dy = _gradients(picture)
    length = np.pad(np.abs(dx) + np.abs(dy), 1)
    thin = _is_crest(length, dx, dy)
    inside = length[1:-1, 1:-1]
    connected = _connected(strong=thin & (inside > HIGH), candidates=thin & (inside > LOW))
    return np.repeat(np.where(connected, np.uint8(255), np.uint8(0))[:, :, None], 3, axis=2)


def _gradients(picture: Uint8) -> tuple[Ints, Ints]:
    """Return Sobel's gradients [H, W] along columns and rows, each of the channel in which both together are longest.
    Beyond its border a picture goes on as it is there."""
    wide = np.pad(picture.astype(np.int32), ((1, 1), (1, 1), (0, 0)), mode="edge")
    smooth_rows = wide[:-2] + 2 * wide[1:-1] + wide[2:]
    smooth_columns = wide[:, :-2] + 2 * wide[:, 1:-1] + wide[:, 2:]
    dx = smooth_rows[:, 2:] - smooth_rows[:, :-2]
    dy = smooth_columns[2:] - smooth_columns[:-2]
    longest = np.argmax(np.abs(dx) + np.abs(dy), axis=2)[:, :, None]
    return np.take_along_axis(dx, longest, 2)[:, :, 0], np.take_along_axis(dy, longest, 2)[:, :, 0]


def _is_crest(length: Ints, dx: Ints, dy: Ints) -> NDArray[np.bool_]:
    """Return where the `length` [H+2, W+2], bordered by zeros, has a maximum along the gradient. Of two equal
    horizontal or vertical neighbours the first counts; of two diagonal ones, neither."""
    height, width = dx.shape

    def neighbour(down: int, right: int) -> Ints:
        return length[1 + down : 1 + down + height, 1 + right : 1 + right + width]

    here = neighbour(0, 0)
    rise, run = np.abs(dy).astype(np.int64) << 15, np.abs(dx).astype(np.int64)
    across = rise < run * TAN_22
    along = rise > run * TAN_22 + (run << 16)
    falls = (dx ^ dy) < 0  # along the diagonal from the top right
    first = np.where(falls, neighbour(-1, 1), neighbour(-1, -1))
    last = np.where(falls, neighbour(1, -1), neighbour(1, 1))
    diagonal = (here > first) & (here > last)
    horizontal = (here > neighbour(0, -1)) & (here >= neighbour(0, 1))
    vertical = (here > neighbour(-1, 0)) & (here >= neighbour(1, 0))
    return np.where(across, horizontal, np.where(along, vertical, diagonal))


def _connected(*, strong: NDArray[np.bool_], candidates: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return the `strong` pixels and all `candidates` that lead to one by neighbours, also on a diagonal."""
    height, width = strong.shape
    left = np.pad(candidates & ~strong, 1).ravel()  # not reached yet
    edge = np.pad(strong, 1).ravel()
    steps = np.array([down * (width + 2) + right for down in (-1, 0, 1) for right in (-1, 0, 1) if down or right])
    reached = np.flatnonzero(edge)
    while reached.size:
        near = (reached[:, None] + steps).ravel()
        reached = np.unique(near[left[near]])
        left[reached], edge[reached] = False, True
    return edge.reshape(height + 2, width + 2)[1:-1, 1:-1]
