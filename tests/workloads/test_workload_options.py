"""Options that make no sense are refused with their name, value and remedy."""

import numpy as np
import pytest

from pipetune.errors import InputError
from pipetune.workloads import images, memory_images, synthetic, tabular, tokens


@pytest.mark.parametrize(
    ("build", "given", "parts"),
    [
        (images, {"depth": 17}, ("depth: 17", "10, 18, 34, 50")),
        (images, {"depth": True}, ("depth: True", "10, 18, 34, 50")),
        (images, {"depth": [18]}, ("depth: [18]", "10, 18, 34, 50")),
        (images, {"crop": 0}, ("crop: 0", "8 or more")),
        (images, {"crop": 400}, ("crop: 400", "500x375", "raise image_size")),
        (images, {"width": "64"}, ("width: '64'", "whole number")),
        (images, {"image_size": "500x375"}, ("image_size: '500x375'", "[500, 375]")),
        (images, {"image_size": [500, 8]}, ("image_size: 8", "16 or more")),
        (images, {"images": 0}, ("images: 0", "1 or more")),
        (images, {"small_stem": "yes"}, ("small_stem: 'yes'", "true or false")),
        (images, {"folder": "/no/such/folder"}, ("folder", "there is no folder /no/such/folder")),
        (images, {"folder": 3}, ("folder: 3", "give a path")),
        (tokens, {"preset": "huge"}, ("preset: 'huge'", "nano, small")),
        (tokens, {"preset": "nano", "heads": 5}, ("width: 48", "multiple of the 5 heads")),
        (tokens, {"vocabulary": 70000}, ("vocabulary: 70000", "65536")),
        (tokens, {"block_size": -1}, ("block_size: -1", "1 or more")),
        (tokens, {"preset": "nano", "tokens": 10, "block_size": 10}, ("10 ids", "lower block_size")),
        (tokens, {"path": "/no/such.bin"}, ("path", "there is no file /no/such.bin")),
        (memory_images, {"depth": 12}, ("depth: 12", "10, 18, 34, 50")),
        (memory_images, {"images": 1.5}, ("images: 1.5", "whole number")),
        (tabular, {"rows": 0}, ("rows: 0", "1 or more")),
        (tabular, {"path": "/no/such.npy"}, ("path", "there is no file")),
        (synthetic, {"cpu_ms": -1}, ("cpu_ms: -1", "0 or more")),
        (synthetic, {"wait_ms": float("nan")}, ("wait_ms: nan", "a number")),
        (synthetic, {"wait_ms": 5, "wait_ms_max": 2}, ("wait_ms_max: 2", "which is 5, or more")),
        (synthetic, {"heavy_share": 2, "heavy_ms": 1}, ("heavy_share: 2", "from 0 to 1")),
        (synthetic, {"heavy_share": 0.1}, ("heavy_share: 0.1", "give both")),
        (synthetic, {"payload_bytes": 1}, ("payload_bytes: 1", "4 or more")),
    ],
)
def test_nonsense_is_refused(build, given, parts):
    with pytest.raises(InputError) as refusal:
        build.build(**given)
    message = str(refusal.value)
    assert message.startswith("workload.options.")
    assert all(part in message for part in parts), message


def test_an_unknown_option_is_a_type_error():
    with pytest.raises(TypeError, match="colour"):
        images.build(colour="red")


def test_a_file_of_another_tokenizer_is_refused(tmp_path):
    path = tmp_path / "train.bin"
    np.array([1, 2, 60000, 4, 5], dtype="<u2").tofile(path)
    with pytest.raises(InputError, match=r"vocabulary: 50304 .* holds the id 60000"):
        tokens.build(path=str(path), block_size=2, preset="nano")


def test_a_token_file_of_odd_length_is_refused(tmp_path):
    path = tmp_path / "train.bin"
    path.write_bytes(b"12345")
    with pytest.raises(InputError, match="even number of bytes"):
        tokens.build(path=str(path), block_size=1, preset="nano")


def test_own_token_file(tmp_path):
    path = tmp_path / "train.bin"
    np.arange(10, dtype="<u2").tofile(path)
    workload = tokens.build(path=str(path), block_size=3, preset="nano", vocabulary=10)
    assert [row.tolist() for row in workload.dataset] == [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9]]
    assert list(workload.data_paths) == [path]


@pytest.mark.parametrize("array", [np.zeros((4, 3)), np.zeros(4, np.float32), np.zeros((0, 3), np.float32)])
def test_a_table_of_another_kind_is_refused(tmp_path, array):
    np.save(tmp_path / "table.npy", array)
    with pytest.raises(InputError, match=r"it holds float\d\d \[.*the target in the last column"):
        tabular.build(path=str(tmp_path / "table.npy"))


def test_a_file_that_is_no_table_is_refused(tmp_path):
    (tmp_path / "table.npy").write_text("a,b\n1,2\n")
    with pytest.raises(InputError, match=r"give a \.npy file"):
        tabular.build(path=str(tmp_path / "table.npy"))


def test_own_table(tmp_path):
    table = np.arange(12, dtype=np.float32).reshape(3, 4)
    np.save(tmp_path / "table.npy", table)
    features, target = tabular.build(path=str(tmp_path / "table.npy")).dataset[1]
    assert features.tolist() == [4, 5, 6]
    assert target.item() == 7
