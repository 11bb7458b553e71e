"""JPEG files and a ResNet: the user's own class folders, or photo-like files made once."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from pipetune.errors import InputError
from pipetune.training.workload import Workload
from pipetune.workloads import options, photos
from pipetune.workloads.augment import random_box
from pipetune.workloads.cache import made_once
from pipetune.workloads.resnet import BLOCKS, ResNet

_SUFFIXES = (".jpg", ".jpeg")
# ImageNet's channel means and deviations, on the 0..255 scale of the decoded pixels.
_MEAN = (123.675, 116.28, 103.53)
_DEVIATION = (58.395, 57.12, 57.375)

Sample = tuple[Tensor, int]


class JpegFolder(Dataset[Sample]):
    """Decoded, randomly cropped and mirrored JPEG files: (float32 [3, crop, crop], class index).

    `length` may exceed the number of files; an index beyond them starts over.
    """

    def __init__(self, paths: Sequence[str], labels: Sequence[int], *, crop: int, length: int) -> None:
        self._paths = list(paths)
        self._labels = np.asarray(labels, dtype=np.int64)  # one block: workers share it without copying
        self._crop = (crop, crop)
        self._length = length
        self._shift = torch.tensor(_MEAN).view(3, 1, 1)
        self._scale = torch.tensor(_DEVIATION).view(3, 1, 1).reciprocal()

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < self._length:
            raise IndexError(index)
        position = index % len(self._paths)
        pixels = torch.from_numpy(self._read(self._paths[position])).permute(2, 0, 1)
        if torch.rand(()).item() < 0.5:
            pixels = pixels.flip(2)
        image = pixels.to(torch.float32, memory_format=torch.contiguous_format)
        return image.sub_(self._shift).mul_(self._scale), int(self._labels[position])

    def _read(self, path: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Decode a file and scale a random part of it: uint8 [crop, crop, 3]."""
        try:
            with Image.open(path) as photo:
                rgb = photo if photo.mode == "RGB" else photo.convert("RGB")
                part = rgb.resize(self._crop, Image.Resampling.BILINEAR, box=random_box(*rgb.size))
        except OSError as error:
            raise InputError(f"{path}: cannot be read as a JPEG: {error}; repair or remove the file") from error
        return np.array(part)


def build(
    *,
    folder: str | None = None,
    crop: int = 224,
    depth: int = 18,
    width: int = 64,
    classes: int | None = None,
    small_stem: bool = False,
    images: int = 2000,
    image_size: Sequence[int] = (500, 375),
    virtual_length: int | None = None,
    cache_dir: str | None = None,
    seed: int = 0,
) -> Workload:
    """Return the workload; a batch is (float32 [n, 3, crop, crop], int64 [n]).

    folder          the user's own: a sub-folder a class, files in .jpg or .jpeg; otherwise files are made
    crop            pixels on a side of what the model sees
    depth, width    of the ResNet; `small_stem` is for crops of about 32 pixels
    images, image_size, cache_dir, seed
                    of the files that are made: how many, [width, height] in pixels, where, from which seed
    classes         outputs of the model; default as many as there are class folders
    virtual_length  length of the dataset where it is to be more than the files, which are then read again
    """
    options.whole("crop", crop, low=8)
    options.one_of("depth", depth, BLOCKS)
    options.whole("width", width)
    options.flag("small_stem", small_stem)
    root = (
        _made_folder(images, image_size, crop, seed, cache_dir)
        if folder is None
        else options.existing_folder("folder", folder)
    )
    paths, labels = _listed(root)
    model_classes = _classes(classes, found=max(labels) + 1)
    length = len(paths) if virtual_length is None else options.whole("virtual_length", virtual_length)
    return Workload(
        dataset=JpegFolder(paths, labels, crop=crop, length=length),
        model=ResNet(depth=depth, classes=model_classes, width=width, small_stem=small_stem),
        optimizer=make_optimizer,
        loss=cross_entropy,
        data_paths=paths,
    )


def cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean loss of a batch of images and their classes."""
    images, labels = batch
    return functional.cross_entropy(model(images), labels)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return plain SGD with momentum, the usual choice for residual networks."""
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)


def _made_folder(images: int, image_size: Sequence[int], crop: int, seed: int, cache_dir: str | None) -> Path:
    options.whole("images", images)
    options.whole("seed", seed, low=0)
    width, height = options.size("image_size", image_size, low=16)
    if crop > min(width, height):
        raise options.refuse(
            "crop", crop, f"it is larger than the {width}x{height} pictures; lower it or raise image_size"
        )

    def make(folder: Path) -> None:
        photos.write_photos(folder, images=images, width=width, height=height, seed=seed)

    name = f"images-v{photos.FORMAT_VERSION}-{images}x{width}x{height}-seed{seed}"
    return made_once(name, make, cache_dir=cache_dir)


def _listed(root: Path) -> tuple[list[str], list[int]]:
    """Return all JPEG files below the folder and the class of each, its first folder."""
    names = sorted(entry.name for entry in root.iterdir() if entry.is_dir())
    by_class = [(name, _jpegs(root / name)) for name in names]
    filled = [(name, paths) for name, paths in by_class if paths]
    if not filled:
        raise options.refuse("folder", str(root), _nothing_found(root))
    paths = [path for _, members in filled for path in members]
    labels = [label for label, (_, members) in enumerate(filled) for _ in members]
    return paths, labels


def _jpegs(folder: Path) -> list[str]:
    return sorted(
        os.path.join(where, name)  # noqa: PTH118 - a Path for each of a million files takes seconds
        for where, _, names in os.walk(folder, followlinks=True)
        for name in names
        if name.lower().endswith(_SUFFIXES)
    )


def _nothing_found(root: Path) -> str:
    looked = f"looked for {' and '.join(_SUFFIXES)} files in the sub-folders of {root}, one sub-folder a class"
    if any(entry.name.lower().endswith(_SUFFIXES) for entry in root.iterdir()):
        return f"{looked}, and found some beside them only: move those into a sub-folder"
    return f"{looked}, and found none: give the folder that holds the class folders"


def _classes(classes: int | None, *, found: int) -> int:
    if classes is None:
        return found
    options.whole("classes", classes)
    if classes < found:
        raise options.refuse("classes", classes, f"there are {found} class folders; give that many or more")
    return classes
