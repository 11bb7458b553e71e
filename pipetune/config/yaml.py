"""The one door for YAML: files come in as plain data with line numbers, and go out whole or not at all."""

import contextlib
import json
import os
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import yaml

from pipetune.errors import ConfigError, InputError

MAX_BYTES = 1 << 20
MAX_DEPTH = 50
MAX_NUMBER_BITS = 300
MAX_FLOW_WIDTH = 120

KeyPath = tuple[Any, ...]
"""Keys and list positions from the top of a file to one value."""

_TAG = "tag:yaml.org,2002:"
# Numbers as YAML 1.2 and Python read them. YAML 1.1, PyYAML's own, takes 12:30 for 750, 010 for 8 and 1e3 for
# text. The length keeps a page of digits text, which Python would refuse to convert.
_INT = re.compile(r"(?=.{1,100}\Z)[-+]?(?:0|[1-9][0-9]*(?:_[0-9]+)*|0x[0-9a-fA-F]+)\Z")
_FLOAT = re.compile(
    r"""(?=.{1,400}\Z)[-+]?(?:
        [0-9]+(?:_[0-9]+)*(?:\.[0-9]*(?:[eE][-+]?[0-9]+)?|[eE][-+]?[0-9]+)
        |\.[0-9]+(?:[eE][-+]?[0-9]+)?
        |\.(?:inf|Inf|INF)
    )\Z|\.(?:nan|NaN|NAN)\Z""",
    re.VERBOSE,
)
_BOOL = re.compile(r"(?:yes|Yes|YES|no|No|NO|true|True|TRUE|false|False|FALSE|on|On|ON|off|Off|OFF)\Z")
_NULL = re.compile(r"(?:~|null|Null|NULL|)\Z")
_TAB_INDENT = re.compile(r" *\t[ \t]*\S")
_BARE_KEY = re.compile(r"[\w/-]+")
_PLAIN_TYPES: tuple[tuple[tuple[type, ...], type], ...] = (
    ((bool, np.bool_), bool),
    ((int, np.integer), int),
    ((float, np.floating), float),
    ((str, PurePath), str),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """Plain data, and on which line each key and list item of it stands."""

    source: str
    data: Any
    lines: Mapping[KeyPath, int]

    def line(self, path: KeyPath) -> int | None:
        """Line of a key, or of the nearest key above it; None at the top."""
        known = (self.lines[path[:n]] for n in range(len(path), 0, -1) if path[:n] in self.lines)
        return next(known, None)


def read(path: Path | str) -> Document:
    """Read a file whose top level is a mapping.

    Raises ConfigError, with line numbers, for anything that is not plain YAML in UTF-8 of at most MAX_BYTES.
    """
    document = parse(_text(path), str(path))
    if document.data is None:
        raise ConfigError(str(path), ["the file is empty; expected keys with values"])
    if not isinstance(document.data, dict):
        raise ConfigError(str(path), [f"line 1: found {shown(document.data)}; expected keys with values"])
    return document


def parse(text: str, source: str) -> Document:
    """Read YAML text of any shape; `source` is what problems are reported against. Raises ConfigError.

    Aliases are refused, since a few of them expand to gigabytes, and so are tags, since they make objects.
    """
    node = _composed(text, source)
    builder = _Builder()
    data = None if node is None else builder.value(node, ())
    if builder.problems:
        raise ConfigError(source, builder.problems)
    return Document(source=source, data=data, lines=builder.lines)


def number(text: str) -> int | float | None:
    """Return the number that a text spells (64, 1_000, 0x10, 1e3, .5), None for others (010, 12:30)."""
    if _INT.match(text):
        return int(text, 0)
    if _FLOAT.match(text):
        return float(re.sub(r"\.(?=[inIN])", "", text))
    return None


def write(path: Path | str, data: Mapping[str, Any], header_comment_lines: Sequence[str] = ()) -> None:
    """Write a mapping under comment lines, keys in their order, short inner collections on one line.

    The text is written beside the target, read back, compared, and only then takes the target's place: on any
    error an older file stays as it was. Raises InputError with the path and the reason.
    """
    target = Path(path)
    content = plain(data)
    temporary = target.parent / f".{secrets.token_hex(8)}.tmp"
    try:
        _write_synced(temporary, rendered(content, header_comment_lines))
        _compare(temporary, content, target)
        temporary.replace(target)
    except OSError as error:
        raise InputError(f"{target}: cannot be written: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def plain(value: Any, path: KeyPath = ()) -> Any:
    """Return the same value in YAML's own types: numpy scalars, enums, paths and tuples are converted.

    Raises InputError naming the key for anything else, for nesting beyond MAX_DEPTH and for giant numbers.
    """
    if len(path) > MAX_DEPTH:
        raise InputError(f"{shown_path(path[:3])}: nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, Enum):
        return plain(value.value, path)
    if isinstance(value, Mapping):
        return {_plain_key(key, path): plain(inner, (*path, key)) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner, (*path, index)) for index, inner in enumerate(value)]
    return _plain_scalar(value, path)


def shown(value: Any) -> str:
    """Return a value as messages show it: one line, in the notation of JSON and YAML, cut when long."""
    text = _printable(json.dumps(value, ensure_ascii=False, default=str))
    return text if len(text) <= 60 else f"{text[:57]}..."


def shown_path(path: KeyPath) -> str:
    """Return a key path as messages show it: `search.num_workers[1]`."""
    parts = []
    for key in path:
        if isinstance(key, int) and not isinstance(key, bool):
            parts.append(f"[{key}]")
        else:
            name = key if isinstance(key, str) and _BARE_KEY.fullmatch(key) else shown(key)
            parts.append(f".{name}" if parts else name)
    return "".join(parts)


class _RefusedError(Exception):
    """Valid YAML of a kind that is not taken."""

    def __init__(self, event: yaml.Event, problem: str) -> None:
        self.line = event.start_mark.line + 1 if event.start_mark else 1
        super().__init__(problem)


class _Loader(yaml.SafeLoader):
    """Composes nodes and constructs nothing: no aliases, no tags, no deep nesting."""

    # Empty, so that none of YAML 1.1's readings is inherited.
    yaml_implicit_resolvers = {}  # noqa: RUF012 - PyYAML's own attribute
    level = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent):
            raise _RefusedError(event, f"aliases (*{event.anchor}) are not supported; write the value out")
        if getattr(event, "tag", None) is not None:
            raise _RefusedError(event, f"tags ({event.tag}) are not supported; write the plain value")
        if self.level > MAX_DEPTH:
            raise _RefusedError(event, f"nested deeper than {MAX_DEPTH} levels")
        self.level += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self.level -= 1


class _Dumper(yaml.SafeDumper):
    """Writes every value out where it stands, and short collections on one line."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 - PyYAML's signature
        return True

    def represent(self, data: Any) -> None:
        node = self.represent_data(data)
        if isinstance(node, yaml.CollectionNode):
            node.flow_style = False
        self.serialize(node)

    def represent_mapping(self, tag: str, mapping: Any, flow_style: bool | None = None) -> yaml.MappingNode:
        node = super().represent_mapping(tag, mapping, flow_style)
        node.flow_style = _fits_a_line([child for pair in node.value for child in pair])
        return node

    def represent_sequence(self, tag: str, sequence: Any, flow_style: bool | None = None) -> yaml.SequenceNode:
        node = super().represent_sequence(tag, sequence, flow_style)
        node.flow_style = _fits_a_line(node.value)
        return node

    def represent_text(self, text: str) -> yaml.ScalarNode:
        # PyYAML folds some line breaks (U+0085, U+2028) in its other styles, and they come back as spaces.
        return self.represent_scalar(_TAG + "str", text, style=None if text.isprintable() else '"')


_Dumper.add_representer(str, _Dumper.represent_text)
for _name, _pattern in {"null": _NULL, "bool": _BOOL, "int": _INT, "float": _FLOAT}.items():
    _Loader.add_implicit_resolver(_TAG + _name, _pattern, None)
# The dumper keeps YAML 1.1's readings beside ours: text is quoted wherever any reader would see a number.
_Dumper.add_implicit_resolver(_TAG + "float", _FLOAT, None)


class _Builder:
    """Turns nodes into plain data, noting lines and problems on the way."""

    def __init__(self) -> None:
        self.lines: dict[KeyPath, int] = {}
        self.problems: list[str] = []

    def value(self, node: yaml.Node, path: KeyPath) -> Any:
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self._item(child, (*path, index)) for index, child in enumerate(node.value)]
        return _scalar(node)

    def _item(self, node: yaml.Node, path: KeyPath) -> Any:
        self.lines[path] = _line(node)
        return self.value(node, path)

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[Any, Any]:
        data: dict[Any, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                self.problems.append(f"line {_line(key_node)}: a key must be text, not a list or a mapping")
                continue
            key = _scalar(key_node)
            inner = (*path, key)
            if key in data:
                self.problems.append(
                    f"line {_line(key_node)}: {shown_path(inner)}: "
                    f"the key is already on line {self.lines[inner]}; keep one of them"
                )
                continue
            self.lines[inner] = _line(key_node)
            data[key] = self.value(value_node, inner)
        return data


def _text(path: Path | str) -> str:
    content = _content(path)
    if len(content) > MAX_BYTES:
        raise ConfigError(str(path), [f"the file is larger than {MAX_BYTES >> 20} MiB"])
    if b"\0" in content:
        line = content[: content.index(b"\0")].count(b"\n") + 1
        raise ConfigError(str(path), [f"line {line}: binary data or UTF-16; expected text saved as UTF-8"])
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        # The position counts from after a byte order mark, which holds no line break.
        line = error.object[: error.start].count(b"\n") + 1
        found = error.object[error.start]
        raise ConfigError(
            str(path), [f"line {line}: byte 0x{found:02x} is not UTF-8; save the file as UTF-8"]
        ) from error


def _content(path: Path | str) -> bytes:
    try:
        with Path(path).open("rb") as file:
            return file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(str(path), [f"cannot be read: {reason}"]) from error


def _composed(text: str, source: str) -> yaml.Node | None:
    loader = None
    try:
        loader = _Loader(text)
        return loader.get_single_node()
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(source, [f"line {line}: control character {error.character!r}; expected text"]) from error
    except _RefusedError as error:
        raise ConfigError(source, [f"line {error.line}: {error}"]) from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = error.problem or error.context or "unreadable"
        raise ConfigError(source, _syntax_problems(text, problem, mark.line + 1 if mark else 1)) from error
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        # PyYAML lets an escape beyond Unicode ("\UFFFFFFFF") and a giant %YAML version through to Python.
        line = loader.line + 1 if loader else 1
        raise ConfigError(source, [f"line {line}: not valid YAML: {error}"]) from error


def _syntax_problems(text: str, problem: str, line: int) -> list[str]:
    """All tabs up to the error, since any of them caused it; else PyYAML's own words."""
    tabs = [n for n, row in enumerate(text.splitlines()[:line], 1) if _TAB_INDENT.match(row)]
    if tabs:
        return [f"line {n}: a tab in the indentation; use spaces" for n in tabs]
    if "'\\t'" in problem:
        return [f"line {line}: a tab between key and value; use a space"]
    return [f"line {line}: not valid YAML: {problem}"]


def _line(node: yaml.Node) -> int:
    return node.start_mark.line + 1


def _scalar(node: yaml.Node) -> Any:
    if node.tag == _TAG + "null":
        return None
    if node.tag == _TAG + "bool":
        return yaml.SafeLoader.bool_values[node.value.lower()]
    return node.value if node.tag == _TAG + "str" else number(node.value)


def _plain_key(key: Any, path: KeyPath) -> Any:
    if isinstance(key, (Mapping, list, tuple)):
        raise InputError(f"{shown_path((*path, key))}: a key must be text or a number")
    return plain(key, (*path, key))


def _plain_scalar(value: Any, path: KeyPath) -> Any:
    if isinstance(value, int) and value.bit_length() > MAX_NUMBER_BITS:
        raise InputError(f"{shown_path(path)}: a number of more than {MAX_NUMBER_BITS} bits")
    if value is None:
        return None
    for kinds, convert in _PLAIN_TYPES:
        if isinstance(value, kinds):
            return convert(value)
    raise InputError(
        f"{shown_path(path)}: {type(value).__name__} is no plain value; use text, numbers, booleans, lists or mappings"
    )


def _printable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def rendered(content: Any, header_comment_lines: Sequence[str] = ()) -> str:
    """Return plain data as YAML text that `parse` reads back as it was."""
    header = "".join(f"# {line}".rstrip() + "\n" for line in _comment_lines(header_comment_lines))
    return header + yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1 << 30)


def _comment_lines(lines: Sequence[str]) -> Iterator[str]:
    """Rows that cannot leave the comment: a line break in a path would."""
    for line in lines:
        for row in line.splitlines() or [""]:
            yield "".join(character if character.isprintable() else "?" for character in row)


def _fits_a_line(children: Sequence[yaml.Node]) -> bool:
    leaves = all(isinstance(child, yaml.ScalarNode) or not child.value for child in children)
    return leaves and sum(len(child.value) + 2 for child in children) <= MAX_FLOW_WIDTH


def _write_synced(path: Path, text: str) -> None:
    with path.open("x", encoding="utf-8", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _compare(temporary: Path, content: Any, target: Path) -> None:
    try:
        found = read(temporary).data
    except ConfigError as error:
        raise InputError(f"{target}: what was written cannot be read back: {error.problems[0]}") from error
    # repr tells 1 from 1.0 and True, sees the order of keys, and finds NaN equal to itself.
    if repr(found) != repr(content):
        raise InputError(f"{target}: what was written reads back as something else; the file is not kept")
