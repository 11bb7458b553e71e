"""Files as nvidia-smi writes them, in its variants, and what is none."""

import pytest

from pipetune.core.curve import Shape
from pipetune.errors import InputError
from pipetune.storage.gpu_csv import read_gpu_csv

HEADER = "timestamp, index, utilization.gpu [%], memory.used [MiB]"


def read(tmp_path, *lines, **given):
    path = tmp_path / "gpu.csv"
    path.write_text("\n".join(lines) + "\n")
    return read_gpu_csv(path, **given)


def test_two_gpus_with_units(tmp_path):
    found = read(
        tmp_path,
        HEADER,
        "2026/12/01 03:16:59.500, 0, 97 %, 1024 MiB",
        "2026/12/01 03:16:59.500, 1, 3 %, 1024 MiB",
        "2026/12/01 03:17:00.500, 0, 98 %, 1024 MiB",
        "2026/12/01 03:17:00.500, 1, [N/A], 1024 MiB",
    )
    assert found.curves["0"].percents == [97, 98]
    assert found.curves["0"].times_s == pytest.approx([0, 1])
    assert found.curves["1"].percents == [3]
    assert found.skipped == ()


def test_without_units_index_and_timestamps(tmp_path):
    found = read(tmp_path, "utilization.gpu [%]", "50", "60", "", "70", interval_s=0.5).curves
    assert (found["0"].times_s, found["0"].percents) == ([0, 0.5, 1.0], [50, 60, 70])


def test_a_file_that_was_appended_to_and_is_still_written(tmp_path):
    row = "2026/12/01 03:16:59, 0, 97 %, 1024 MiB"
    found = read(tmp_path, HEADER, row, HEADER, row, "2026/12/01 03:1")
    assert (found.curves["0"].percents, found.skipped) == ([97, 97], ())


@pytest.mark.parametrize(("line", "words"), [
    ("NVRM: something happened", "line 3: 1 column where the first line has 4"),
    ("yesterday, 0, 97 %, 1 MiB", "line 3: 'yesterday' is no timestamp of nvidia-smi"),
    ("2026/12/01 03:16:59, 0, 970 %, 1 MiB", "line 3: utilization.gpu is '970 %'"),
])  # fmt: skip
def test_a_line_of_something_else_is_left_out_and_told(tmp_path, line, words):
    row = "2026/12/01 03:16:59, 0, 97 %, 1024 MiB"
    found = read(tmp_path, HEADER, row, line, row)
    assert (found.curves["0"].percents, found.skipped) == ([97, 97], (words,))


@pytest.mark.parametrize(("lines", "words"), [
    ([], "names no column utilization.gpu"),
    (["97 %", "98 %"], "names no column utilization.gpu"),
    ([HEADER], "too little in it"),
    ([HEADER, "2026/12/01 03:16:59, 0, [N/A], 1 MiB"], "too little in it"),
    ([HEADER, "a, b", "c", "2026/12/01 03:16:59, 0, 97 %, 1 MiB"], "line 2: 2 columns where the first line has 4"),
])  # fmt: skip
def test_what_is_no_such_file_is_bad_input(tmp_path, lines, words):
    with pytest.raises(InputError) as caught:
        read(tmp_path, *lines)
    assert words in str(caught.value)


@pytest.mark.parametrize(("content", "words"), [(None, "there is no file"), (b"\xff\xfe\x00bad", "UTF-16")])
def test_what_cannot_be_read_is_bad_input(tmp_path, content, words):
    path = tmp_path / "gpu.csv"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=words):
        read_gpu_csv(path)


def test_the_command_draws_and_names_it(tmp_path, capsys, monkeypatch):
    from pipetune.cli.main import app

    rows = [f"2026/12/01 03:{16 + i // 60:02}:{i % 60:02}, 0, {95 if i % 10 < 5 else 4} %, 1 MiB" for i in range(120)]
    path = tmp_path / "gpu.csv"
    path.write_text("\n".join([HEADER, *rows]))
    monkeypatch.setenv("COLUMNS", "80")
    app(["monitor", "--read", str(path), "--epoch-seconds", "10"], standalone_mode=False)
    text = capsys.readouterr().out
    assert "a saw-tooth" in text
    assert "every 10 s, which is the epoch" in " ".join(text.split())
    assert "█" in text
    app(["monitor", "--read", str(path), "--json"], standalone_mode=False)
    assert f'"shape": "{Shape.SAW_TOOTH.value}"' in capsys.readouterr().out
