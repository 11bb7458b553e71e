"""Random crops and flips, drawn from torch's generator, which the DataLoader seeds apart in every worker."""

import math

import torch

_AREA = (0.08, 1.0)  # share of the picture that a crop covers, uniform (Szegedy et al. 2014)
_LOG_RATIO = math.log(4 / 3)  # width over height from 3/4 to 4/3, uniform in its logarithm
_TRIES = 10

Box = tuple[int, int, int, int]
"""left, top, right, bottom in pixels."""


def random_box(width: int, height: int) -> Box:
    """Return a random part of a width x height picture, to be scaled to the crop's size."""
    for _ in range(_TRIES):
        area_draw, ratio_draw, x_draw, y_draw = torch.rand(4).tolist()
        area = width * height * (_AREA[0] + (_AREA[1] - _AREA[0]) * area_draw)
        ratio = math.exp(_LOG_RATIO * (2 * ratio_draw - 1))
        box_width, box_height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < box_width <= width and 0 < box_height <= height:
            left, top = int(x_draw * (width - box_width + 1)), int(y_draw * (height - box_height + 1))
            return left, top, left + box_width, top + box_height
    return central_box(width, height)


def central_box(width: int, height: int) -> Box:
    """Return the largest centred part whose ratio is within 3/4 to 4/3: what is left when no draw fitted."""
    box_width = min(width, round(height * 4 / 3))
    box_height = min(height, round(width * 4 / 3))
    left, top = (width - box_width) // 2, (height - box_height) // 2
    return left, top, left + box_width, top + box_height


def random_offsets(room: int) -> tuple[int, int, bool]:
    """Return two shifts from 0 to `room` pixels and whether to mirror, for a crop out of padded images."""
    y_draw, x_draw, mirror_draw = torch.rand(3).tolist()
    return int(y_draw * (room + 1)), int(x_draw * (room + 1)), mirror_draw < 0.5
