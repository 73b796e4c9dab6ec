"""Reading of YAML and ``--set`` overrides, error texts, and display of types and defaults."""

import difflib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import ValidationError


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader that refuses duplicate keys instead of keeping the last value."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for i, key in enumerate(keys):
            if key in keys[:i]:
                line = node.value[i][0].start_mark.line + 1
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} occurs twice, the second time in line {line}"
                )
        return super().construct_mapping(node, deep)


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file; an empty file is an empty mapping.

    Raises ValueError if the file cannot be read, cannot be parsed, or holds something else.
    """
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), Loader=_StrictLoader)
    except OSError as error:
        raise ValueError(f"config file {str(path)!r} cannot be read: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ValueError(f"config file {str(path)!r} is not YAML: {error}") from error
    if tree is None:
        return {}
    if not isinstance(tree, dict) or not all(isinstance(key, str) for key in tree):
        raise ValueError(f"config file {str(path)!r} must hold a mapping of sections, got {tree!r}")
    return tree


def apply_override(tree: dict[str, Any], item: str) -> None:
    """Apply one ``a.b=c`` to ``tree`` in place. Raises ValueError if ``item`` is malformed."""
    path, equals, text = item.partition("=")
    names = path.strip().split(".")
    if not equals or not all(names):
        raise ValueError(f"--set {item!r}: write it as key=value, such as decode.max_num_seqs=32")
    try:
        value = yaml.load(text, Loader=_StrictLoader)
    except yaml.YAMLError as error:
        raise ValueError(f"--set {item!r}: the value is not YAML: {error}") from error
    for depth, name in enumerate(names[:-1]):
        if tree.get(name) is None:
            tree[name] = {}
        tree = tree[name]
        if not isinstance(tree, dict):
            where = ".".join(names[: depth + 1])
            raise ValueError(f"--set {item!r}: {where} is a value ({tree!r}), not a section")
    tree[names[-1]] = value


def explain_errors(error: ValidationError, fields: Mapping[str, str]) -> str:
    """Return one line per problem in ``error``.

    ``fields`` maps the names of all keys to their help texts.
    """
    return "\n".join(_problem(dict(detail), fields) for detail in error.errors())


def _problem(detail: dict[str, Any], fields: Mapping[str, str]) -> str:
    path = ".".join(map(str, detail["loc"]))
    if detail["type"] == "extra_forbidden":
        return f"unknown key {path!r}{_suggestion(path, fields)}"
    if detail["type"] == "value_error":
        return str(detail["ctx"]["error"])
    if path not in fields:
        return f"{path or 'config'}={detail['input']!r}: a section of keys is expected"
    message = detail["msg"][0].lower() + detail["msg"][1:]
    return f"{path}={detail['input']!r}: {message} ({fields[path]})"


def _suggestion(path: str, fields: Iterable[str]) -> str:
    keys = list(fields)
    sections = {key.partition(".")[0] for key in keys}
    near = difflib.get_close_matches(path, [*keys, *sections], n=1, cutoff=0.6)
    if not near:
        leaf = path.rpartition(".")[2]
        near = [key for key in keys if key.rpartition(".")[2] == leaf]
    return f"; did you mean {near[0]!r}?" if near else f"; sections are {sorted(sections)}"


def format_value(value: Any) -> str:
    """Return a default value as it is written in YAML. Paths are cut to their last two parts."""
    if isinstance(value, Path):
        return "/".join(value.parts[-2:])
    return value if isinstance(value, str) else json.dumps(value)


def format_type(annotation: Any) -> str:
    """Return a type as written in help texts: ``int|null``, ``[int, ...]``, ``auto|cpu|cuda``."""
    if annotation is Ellipsis:
        return "..."
    if get_origin(annotation) is Annotated:
        return format_type(get_args(annotation)[0])
    if get_origin(annotation) is Literal:
        return "|".join(map(str, get_args(annotation)))
    if get_origin(annotation) is tuple:
        return f"[{', '.join(map(format_type, get_args(annotation)))}]"
    if get_origin(annotation) in (Union, UnionType):
        return "|".join(map(format_type, get_args(annotation)))
    return "null" if annotation is type(None) else annotation.__name__.lower()
