from pathlib import Path

import pytest
from PIL import Image

from pipetune.errors import InputError
from pipetune.workloads import images
from pipetune.workloads.augment import central_box, random_box


def save(path, *, mode="RGB", size=(40, 30)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size).save(path, format="JPEG")
    return str(path)


def build(folder, **options):
    return images.build(folder=str(folder), crop=16, depth=10, width=4, **options)


def test_own_folder_with_every_spelling_of_the_suffix(tmp_path):
    paths = [
        save(tmp_path / "cat" / "a.jpg"),
        save(tmp_path / "cat" / "deeper" / "b.JPEG"),
        save(tmp_path / "dog" / "c.jpeg", mode="L"),
        save(tmp_path / "eel" / "d.JPG", mode="CMYK"),
    ]
    (tmp_path / "dog" / "notes.txt").write_text("no picture")
    (tmp_path / "an empty class").mkdir()
    workload = build(tmp_path)
    assert list(workload.data_paths) == paths
    assert [label for _, label in workload.dataset] == [0, 0, 1, 2]
    assert {tuple(image.shape) for image, _ in workload.dataset} == {(3, 16, 16)}
    assert workload.model.head.out_features == 3


def test_classes_may_be_more_than_the_folders_and_no_fewer(tmp_path):
    save(tmp_path / "cat" / "a.jpg")
    save(tmp_path / "dog" / "a.jpg")
    assert build(tmp_path, classes=1000).model.head.out_features == 1000
    with pytest.raises(InputError, match=r"classes: 1 .* there are 2 class folders"):
        build(tmp_path, classes=1)


def test_a_folder_without_jpegs_says_what_was_looked_for_and_where(tmp_path):
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "a.png").write_bytes(b"")
    with pytest.raises(InputError) as refusal:
        build(tmp_path)
    message = str(refusal.value)
    assert "looked for .jpg and .jpeg files in the sub-folders of" in message
    assert str(tmp_path) in message


def test_jpegs_outside_of_a_class_folder_are_told(tmp_path):
    save(tmp_path / "a.jpg")
    with pytest.raises(InputError, match="move those into a sub-folder"):
        build(tmp_path)


def test_a_damaged_file_is_named_when_it_is_read(tmp_path):
    path = tmp_path / "cat" / "a.jpg"
    save(path)
    path.write_bytes(path.read_bytes()[:300])
    dataset = build(tmp_path).dataset
    with pytest.raises(InputError, match=r"cat/a\.jpg: cannot be read as a JPEG"):
        dataset[0]


def test_pixels_are_normalised(tmp_path):
    path = tmp_path / "cat" / "a.png"
    path.parent.mkdir()
    Image.new("RGB", (40, 30), (124, 116, 104)).save(path.with_suffix(".jpg"), quality=100)
    image, _ = build(tmp_path).dataset[0]
    assert image.is_contiguous()
    assert image.abs().max() < 0.05


def test_made_files_have_the_size_of_photographs(tmp_path):
    workload = images.build(images=10, image_size=[500, 375], depth=10, width=4, cache_dir=str(tmp_path))
    sizes = [Path(path).stat().st_size for path in workload.data_paths]
    assert all(30_000 < size < 110_000 for size in sizes)
    with Image.open(workload.data_paths[0]) as photo:
        assert photo.size == (500, 375)


@pytest.mark.parametrize("size", [(500, 375), (10, 1000), (1, 1), (1000, 10)])
def test_boxes_stay_within_the_picture(size):
    for _ in range(200):
        left, top, right, bottom = random_box(*size)
        assert 0 <= left < right <= size[0]
        assert 0 <= top < bottom <= size[1]


def test_the_central_box_keeps_its_ratio_within_three_quarters_and_four_thirds():
    assert central_box(1000, 30) == (480, 0, 520, 30)
    assert central_box(30, 1000) == (0, 480, 30, 520)
    assert central_box(40, 40) == (0, 0, 40, 40)
