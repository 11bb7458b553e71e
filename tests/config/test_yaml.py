"""The YAML door: what it refuses, where it says so, and that what it writes comes back."""

import errno
import math
import os
from enum import StrEnum
from pathlib import Path

import numpy as np
import pytest
import yaml as pyyaml
from hypothesis import given
from hypothesis import strategies as st

from pipetune.config import yaml
from pipetune.errors import ConfigError, InputError


class Colour(StrEnum):
    RED = "red"


def file_with(folder: Path, content: str | bytes) -> Path:
    path = folder / "study.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def problems_of(folder: Path, content: str | bytes) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        yaml.read(file_with(folder, content))
    return list(caught.value.problems)


def test_lines_are_known_for_keys_and_list_items(tmp_path):
    # GIVEN nested keys, a block list, and a flow list over two lines
    path = file_with(tmp_path, "# top\na:\n  b: 1\n  c:\n    - x\n    - y\nd: [1,\n  2]\n")

    # WHEN it is read
    document = yaml.read(path)

    # THEN each has its line, and an unknown key has that of the nearest known one
    assert document.data == {"a": {"b": 1, "c": ["x", "y"]}, "d": [1, 2]}
    assert [document.line(p) for p in [("a",), ("a", "b"), ("a", "c", 1), ("d", 1)]] == [2, 3, 6, 8]
    assert document.line(("a", "missing", "deep")) == 2
    assert document.line(("missing",)) is None


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("64", 64),
        ("-3", -3),
        ("1_000", 1000),
        ("0x10", 16),
        ("1e3", 1000.0),
        ("1e-3", 0.001),
        ("1.5E+2", 150.0),
        (".5", 0.5),
        ("-.inf", -math.inf),
        ("12:30", "12:30"),
        ("010", "010"),
        ("1__0", "1__0"),
        ("2024-01-01", "2024-01-01"),
        ("9" * 5000, "9" * 5000),
        ("off", False),
        ("yes", True),
        ("~", None),
        ("", None),
        ("<<", "<<"),
        ("'64'", "64"),
    ],
)
def test_scalars_have_one_meaning(text, value):
    found = yaml.parse(text, "here").data

    assert found == value
    assert type(found) is type(value)


def test_a_byte_order_mark_is_no_part_of_the_first_key(tmp_path):
    assert yaml.read(file_with(tmp_path, b"\xef\xbb\xbfa: 1\n")).data == {"a": 1}


def test_all_duplicate_keys_are_reported(tmp_path):
    text = "a: 1\nb:\n  c: 1\n  d: 2\n  c: 3\na: 4\na: 5\n"

    assert problems_of(tmp_path, text) == [
        "line 5: b.c: the key is already on line 3; keep one of them",
        "line 6: a: the key is already on line 1; keep one of them",
        "line 7: a: the key is already on line 1; keep one of them",
    ]


def test_all_tabs_up_to_the_error_are_reported(tmp_path):
    assert problems_of(tmp_path, "a:\n  b: 1\n\tc: 2\n") == ["line 3: a tab in the indentation; use spaces"]
    assert problems_of(tmp_path, "a: x\n\tb: 1\n \tc: 2\nd: [\n") == ["line 2: a tab in the indentation; use spaces"]
    assert problems_of(tmp_path, "a:\t1\n") == ["line 1: a tab between key and value; use a space"]


def test_a_tab_inside_a_text_block_is_content(tmp_path):
    assert yaml.read(file_with(tmp_path, "a: |\n  \tx\n")).data == {"a": "\tx\n"}


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "the file is empty; expected keys with values"),
        (b"# nothing\n---\n", "the file is empty; expected keys with values"),
        (b"- a\n- b\n", 'line 1: found ["a", "b"]; expected keys with values'),
        (b"just text", 'line 1: found "just text"; expected keys with values'),
        (b"a: 1\nb: \xe4\n", "line 2: byte 0xe4 is not UTF-8; save the file as UTF-8"),
        (b"\xef\xbb\xbfa: 1\nb: \xe4\n", "line 2: byte 0xe4 is not UTF-8; save the file as UTF-8"),
        ("a: 1".encode("utf-16"), "line 1: binary data or UTF-16; expected text saved as UTF-8"),
        (b"\x7fELF\n\0", "line 2: binary data or UTF-16; expected text saved as UTF-8"),
        (b"a: 1\nb: \x07\n", "line 2: control character 7; expected text"),
        (b"a: &x [1]\nb: *x\n", "line 2: aliases (*x) are not supported; write the value out"),
        (b"a: &x [*x]\n", "line 1: aliases (*x) are not supported; write the value out"),
        (b"a:\n  b: !!python/name:os.system\n", None),
        (b"a: !!int 3\n", "line 1: tags (tag:yaml.org,2002:int) are not supported; write the plain value"),
        (b"a: " + b"[" * 100, "line 1: nested deeper than 50 levels"),
        (b"a: 1\n? [b]\n: 2\n", "line 2: a key must be text, not a list or a mapping"),
        (b"a: 1\nb: [1, 2\n", "line 3: not valid YAML: expected ',' or ']', but got '<stream end>'"),
        (b"a: 1\n---\nb: 1\n", "line 2: not valid YAML: but found another document"),
        (b"a: #" + b"x" * (1 << 20), "the file is larger than 1 MiB"),
    ],
)
def test_refusals_name_the_line(tmp_path, content, problem):
    if problem is None:
        problem = "line 2: tags (tag:yaml.org,2002:python/name:os.system) are not supported; write the plain value"

    assert problems_of(tmp_path, content) == [problem]


def test_an_escape_beyond_unicode_is_a_problem_not_a_crash(tmp_path):
    [problem] = problems_of(tmp_path, 'a: 1\nb: "\\UFFFFFFFF"\n')

    assert problem.startswith("line 2: not valid YAML: ")


def test_a_billion_laughs_costs_nothing(tmp_path):
    rows = ["a0: &a0 [x, x]"] + [f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 40)]

    assert problems_of(tmp_path, "\n".join(rows)) == ["line 2: aliases (*a0) are not supported; write the value out"]


def test_fifty_levels_are_read(tmp_path):
    text = "a: " + "[" * 49 + "1" + "]" * 49

    assert yaml.read(file_with(tmp_path, text)).line(("a", *[0] * 49)) == 1


@pytest.mark.parametrize(("name", "reason"), [("absent.yaml", "No such file"), (".", "Is a directory")])
def test_an_unreadable_file_is_named_with_the_reason(tmp_path, name, reason):
    with pytest.raises(ConfigError, match=f"cannot be read: {reason}") as caught:
        yaml.read(tmp_path / name)

    assert caught.value.source == str(tmp_path / name)


@given(content=st.binary())
def test_any_bytes_are_read_or_refused(tmp_path_factory, content):
    path = file_with(tmp_path_factory.getbasetemp(), content)

    try:
        data = yaml.read(path).data
    except ConfigError as error:
        assert error.problems  # noqa: PT017 - either outcome is right
    else:
        assert isinstance(data, dict)


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
# Numbers as text, dates, booleans as text: what a plain dump would turn into something else.
traps = st.sampled_from(["1e3", "12:30", "010", "off", "null", "~", "<<", "=", ".inf", "2024-01-01", "# x", "a: b"])
plain_data = st.recursive(
    scalars | traps,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text() | traps, inner, max_size=4),
    max_leaves=20,
)


@given(data=st.dictionaries(st.text() | traps, plain_data, max_size=5), header=st.lists(st.text(), max_size=3))
def test_what_is_written_comes_back(tmp_path_factory, data, header):
    path = tmp_path_factory.getbasetemp() / "round.yaml"

    yaml.write(path, data, header)

    # repr also compares types, key order and NaN
    assert repr(yaml.read(path).data) == repr(data)


@given(text=traps | st.from_regex(r"[-+]?[0-9._:exEoi]{1,8}", fullmatch=True))
def test_text_stays_text_for_a_yaml_1_1_reader(tmp_path_factory, text):
    path = tmp_path_factory.getbasetemp() / "other.yaml"

    yaml.write(path, {"key": text})

    assert pyyaml.safe_load(path.read_text()) == {"key": text}


def test_a_written_file_is_made_for_reading(tmp_path):
    # GIVEN data as the rest of the house holds it
    data = {
        "status": "certified",
        "dataloader": {"batch_size": np.int64(256), "pin_memory": np.bool_(True), "amp": Colour.RED},
        "changes_training": [],
        "measured": {
            "rate": {"value": np.float64(2404.0), "low": 2390.1},
            "speedup": np.float32(0.5),
            "shapes": (1, 2),
        },
        "notes": ["a long sentence " * 8, Path("data") / "räte"],
        "none": None,
    }

    # WHEN it is written with the command that makes it
    yaml.write(tmp_path / "best.yaml", data, ["pipetune tune study.yaml", "", "two\nrows\x07"])

    # THEN comments come first, keys keep their order, and short inner collections stand on one line
    assert (tmp_path / "best.yaml").read_text(encoding="utf-8") == (
        "# pipetune tune study.yaml\n"
        "#\n"
        "# two\n"
        "# rows?\n"
        "status: certified\n"
        "dataloader: {batch_size: 256, pin_memory: true, amp: red}\n"
        "changes_training: []\n"
        "measured:\n"
        "  rate: {value: 2404.0, low: 2390.1}\n"
        "  speedup: 0.5\n"
        "  shapes: [1, 2]\n"
        "notes:\n"
        f"- '{'a long sentence ' * 8}'\n"
        "- data/räte\n"
        "none: null\n"
    )


def test_a_list_that_occurs_twice_is_written_twice(tmp_path):
    shared = [1, 2]

    yaml.write(tmp_path / "best.yaml", {"a": shared, "b": shared})

    assert (tmp_path / "best.yaml").read_text() == "a: [1, 2]\nb: [1, 2]\n"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (object(), "a.b[1]: object is no plain value; use text, numbers, booleans, lists or mappings"),
        ({1, 2}, "a.b[1]: set is no plain value; use text, numbers, booleans, lists or mappings"),
        (b"x", "a.b[1]: bytes is no plain value; use text, numbers, booleans, lists or mappings"),
        (np.arange(3), "a.b[1]: ndarray is no plain value; use text, numbers, booleans, lists or mappings"),
        (1 << 400, "a.b[1]: a number of more than 300 bits"),
        ({(1, 2): 3}, "a.b[1].[1, 2]: a key must be text or a number"),
    ],
)
def test_what_is_not_plain_is_refused_with_its_key(tmp_path, value, message):
    with pytest.raises(InputError) as caught:
        yaml.write(tmp_path / "best.yaml", {"a": {"b": [0, value]}})

    assert str(caught.value) == message
    assert list(tmp_path.iterdir()) == []


def test_a_value_that_holds_itself_is_refused(tmp_path):
    loop: dict[str, object] = {}
    loop["again"] = loop

    with pytest.raises(InputError, match="nested deeper than 50 levels"):
        yaml.write(tmp_path / "best.yaml", loop)


def full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def no_permission(*_: object) -> None:
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


@pytest.mark.parametrize(
    ("place", "failure", "reason"),
    [
        ((os, "fsync"), full_disk, "No space left on device"),
        ((Path, "replace"), no_permission, "Permission denied"),
    ],
)
def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, place, failure, reason):
    # GIVEN an older file and a disk that fails
    path = tmp_path / "best.yaml"
    yaml.write(path, {"old": 1})
    monkeypatch.setattr(*place, failure)

    # WHEN it is to be replaced
    with pytest.raises(InputError) as caught:
        yaml.write(path, {"new": 2})

    # THEN the message has path and reason, the old file stands, no temporary file is left
    assert str(caught.value) == f"{path}: cannot be written: {reason}"
    assert yaml.read(path).data == {"old": 1}
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", ["absent/best.yaml", "file/best.yaml", "folder"])
def test_a_place_that_cannot_hold_a_file_is_named(tmp_path, name):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()

    with pytest.raises(InputError) as caught:
        yaml.write(tmp_path / name, {"a": 1})

    assert str(caught.value).startswith(f"{tmp_path / name}: cannot be written: ")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder"]


def test_a_file_that_would_not_read_back_does_not_replace_the_old_one(tmp_path):
    path = tmp_path / "best.yaml"
    yaml.write(path, {"old": 1})

    with pytest.raises(InputError, match="cannot be read back: the file is larger than 1 MiB"):
        yaml.write(path, {"new": "x" * yaml.MAX_BYTES})

    assert yaml.read(path).data == {"old": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_reads_back_differently_does_not_replace_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "best.yaml"
    yaml.write(path, {"old": 1})
    monkeypatch.setattr(yaml, "rendered", lambda *_: "new: 2.0\n")

    with pytest.raises(InputError, match="reads back as something else"):
        yaml.write(path, {"new": 2})

    assert yaml.read(path).data == {"old": 1}


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (("search", "num_workers", 1), "search.num_workers[1]"),
        (("a b", "c.d"), '"a b"."c.d"'),
        ((True, None), "true.null"),
        (("x\n", "\udcff"), '"x\\n"."\\udcff"'),
    ],
)
def test_paths_are_shown_on_one_line(path, text):
    assert yaml.shown_path(path) == text


def test_long_values_are_cut():
    assert yaml.shown("x" * 1000) == '"' + "x" * 56 + "..."
