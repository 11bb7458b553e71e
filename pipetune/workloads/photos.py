"""Photo-like JPEG files made from random numbers: smooth at several scales, with edges and grain."""

from pathlib import Path

import numpy as np
from PIL import Image, ImageChops, ImageDraw

FORMAT_VERSION = 1
"""Raised whenever the same arguments give other files; part of the cache folder's name."""

CLASSES = 10
_BASES = 300  # more pictures than these are variations: encoding one is cheaper than painting one
_QUALITY = 90
_SCALES = (3, 9, 27, 81)  # blobs across the long side, coarse to fine


def write_photos(folder: Path, *, images: int, width: int, height: int, seed: int) -> None:
    """Write `images` JPEG files of width x height pixels into class folders, from the seed."""
    for label in range(CLASSES):
        (folder / f"class_{label:02d}").mkdir()
    bases = min(images, _BASES)
    for base in range(bases):
        rng = np.random.default_rng([seed, base])
        picture = _paint(rng, width, height)
        for index in range(base, images, bases):
            path = folder / f"class_{index % CLASSES:02d}" / f"{index:06d}.jpg"
            _varied(picture, rng).save(path, quality=_QUALITY)


def _paint(rng: np.random.Generator, width: int, height: int) -> Image.Image:
    picture = _noise(rng, _SCALES[0], width, height)
    for scale in _SCALES[1:]:
        _draw_edges(rng, picture)
        picture = Image.blend(picture, _noise(rng, scale, width, height), rng.uniform(0.15, 0.35))
    # Grain decides how large the file gets; photographs differ in it, so these do.
    return Image.blend(picture, _noise(rng, max(width, height), width, height), rng.uniform(0.0, 0.25))


def _noise(rng: np.random.Generator, scale: int, width: int, height: int) -> Image.Image:
    """Return random colours, `scale` blobs along the long side, grown smoothly to the full size."""
    long_side = max(width, height)
    rows = max(2, scale * height // long_side)
    columns = max(2, scale * width // long_side)
    pixels = rng.integers(0, 256, size=(rows, columns, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC)


def _draw_edges(rng: np.random.Generator, picture: Image.Image) -> None:
    draw = ImageDraw.Draw(picture)
    for _ in range(4):
        colour = tuple(int(c) for c in rng.integers(0, 256, size=3))
        corners = rng.uniform(0, 1, size=(3, 2)) * picture.size
        draw.polygon([(float(x), float(y)) for x, y in corners], fill=colour)


def _varied(picture: Image.Image, rng: np.random.Generator) -> Image.Image:
    """Return the picture shifted around its borders and perhaps mirrored: other bytes, the same character."""
    shifted = ImageChops.offset(picture, int(rng.integers(picture.width)), int(rng.integers(picture.height)))
    return shifted.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if rng.random() < 0.5 else shifted
