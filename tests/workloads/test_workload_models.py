import pytest
import torch
from torch import nn

from pipetune.workloads.gpt import SIZES, Gpt
from pipetune.workloads.resnet import ResNet


def parameters(model):
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("depth", "expected"),
    [(18, 11_689_512), (34, 21_797_672), (50, 25_557_032)],  # as published for 1,000 classes
)
def test_resnet_parameters(depth, expected):
    with torch.device("meta"):
        assert parameters(ResNet(depth=depth, classes=1000)) == expected


@pytest.mark.parametrize(("small_stem", "side"), [(False, 1), (True, 4)])
def test_the_small_stem_keeps_small_images_large_enough(small_stem, side):
    model = ResNet(depth=10, classes=5, width=4, small_stem=small_stem)
    features = model.stages(model.stem(torch.zeros(2, 3, 32, 32)))
    assert features.shape == (2, 32, side, side)
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 5)


def test_gpt_small_has_124_million_parameters():
    with torch.device("meta"):
        model = Gpt(SIZES["small"], vocabulary=50304, block_size=1024)
        layer = nn.TransformerEncoderLayer(768, 12, dim_feedforward=4 * 768)
    outside = 50304 * 768 + 1024 * 768 + 2 * 768  # ids, positions, last norm; the output layer is the first
    assert parameters(model) == 12 * parameters(layer) + outside == 124_475_904


def test_gpt_sees_no_later_token():
    model = Gpt(SIZES["nano"], vocabulary=50, block_size=8)
    ids = torch.randint(50, (1, 8))
    changed = ids.clone()
    changed[0, 5] = (ids[0, 5] + 1) % 50
    before, after = model(ids), model(changed)
    assert torch.allclose(before[:, :5], after[:, :5], atol=1e-6)
    assert not torch.allclose(before[:, 5:], after[:, 5:])


def test_gpt_begins_with_the_loss_of_a_guess():
    model = Gpt(SIZES["nano"], vocabulary=1000, block_size=8)
    logits = model(torch.randint(1000, (4, 8)))
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), torch.randint(1000, (32,)))
    assert loss.item() == pytest.approx(torch.tensor(1000.0).log().item(), abs=0.3)
