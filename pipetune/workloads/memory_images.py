"""Small images that are in memory already, and a ResNet: the loader's own overhead is what counts."""

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import Dataset

from pipetune.training.workload import Workload
from pipetune.workloads import options
from pipetune.workloads.augment import random_offsets
from pipetune.workloads.images import Sample, cross_entropy, make_optimizer
from pipetune.workloads.resnet import BLOCKS, ResNet

_PADDING = 4


class MemoryImages(Dataset[Sample]):
    """Randomly shifted and mirrored images: (float32 [3, side, side] within -1..1, class index).

    `images` is uint8 [n, 3, side, side], `labels` holds n class indices.
    """

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self._side = images.shape[-1]
        self._padded = functional.pad(images, [_PADDING] * 4)  # once, rather than for every sample
        self._labels: list[int] = labels.tolist()

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> Sample:
        if index < 0:
            raise IndexError(index)
        label = self._labels[index]
        top, left, mirrored = random_offsets(2 * _PADDING)
        crop = self._padded[index, :, top : top + self._side, left : left + self._side]
        image = crop.flip(2) if mirrored else crop
        scaled = image.to(torch.float32, memory_format=torch.contiguous_format)
        return scaled.sub_(127.5).mul_(1 / 127.5), label


def build(
    *,
    images: int = 50_000,
    side: int = 32,
    classes: int = 10,
    depth: int = 18,
    width: int = 64,
    seed: int = 0,
) -> Workload:
    """Return the workload; a batch is (float32 [n, 3, side, side], int64 [n]), random from the seed.

    images, side, classes   how many there are, their pixels on a side, and their classes
    depth, width            of the ResNet, whose stem is the one for small images
    """
    options.whole("images", images)
    options.whole("side", side, low=8)
    options.whole("classes", classes)
    options.one_of("depth", depth, BLOCKS)
    options.whole("width", width)
    options.whole("seed", seed, low=0)
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(256, (images, 3, side, side), dtype=torch.uint8, generator=generator)
    labels = torch.randint(classes, (images,), generator=generator)
    return Workload(
        dataset=MemoryImages(pixels, labels),
        model=ResNet(depth=depth, classes=classes, width=width, small_stem=True),
        optimizer=make_optimizer,
        loss=cross_entropy,
    )
