"""Parts that the generated pages have in common: tables, and the values of an option or a key."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

_NAMES = {int: "integer", float: "number", str: "text", Path: "path"}


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table. Cells are Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def code(text: str) -> str:
    """Return ``text`` as code, or nothing for an empty text."""
    return f"`{text}`" if text else ""


def prose(text: str) -> str:
    """Return plain text as one line of Markdown. Code in backticks stays code."""
    parts = re.split(r"(`[^`]+`)", " ".join(text.split()))
    return "".join(part if part.startswith("`") else _escape(part) for part in parts)


def _escape(text: str) -> str:
    text = text.replace("&", "&amp;").replace("<", "&lt;")
    return re.sub(r"([*|\[\]])", r"\\\1", text)


def values(annotation: Any) -> str:
    """Return the values that a type allows, such as "`auto`, `cpu`" or "integer or `null`"."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return values(get_args(annotation)[0])
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in get_args(annotation))
    if origin in (tuple, list):
        inner = [argument for argument in get_args(annotation) if argument is not Ellipsis]
        is_fixed = origin is tuple and Ellipsis not in get_args(annotation)
        size = f"{len(inner)} x " if is_fixed else ""
        return f"list of {size}{values(inner[0])}"
    if origin in (Union, UnionType):
        kinds = [kind for kind in get_args(annotation) if kind is not type(None)]
        text = ", ".join(values(kind) for kind in kinds)
        return f"{text} or `null`" if type(None) in get_args(annotation) else text
    if annotation is bool:
        return "`true`, `false`"
    return _NAMES[annotation]


def bounds(at_least: float | None, at_most: float | None, above: float | None = None) -> str:
    """Return a range such as "1 to 16" or "above 0, at most 60"; empty if there is none."""
    if at_least is not None and at_most is not None:
        return f"{_number(at_least)} to {_number(at_most)}"
    parts = [("at least", at_least), ("above", above), ("at most", at_most)]
    return ", ".join(f"{word} {_number(bound)}" for word, bound in parts if bound is not None)


def _number(value: float) -> str:
    if float(value).is_integer() and value < 1e15:
        return f"{int(value):,}"
    return f"{value:g}"
