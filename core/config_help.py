"""How configuration keys are shown: their types and defaults, as one would write them."""

from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, get_args, get_origin


def value_text(value: Any) -> str:
    """A default as YAML; of a path the two last parts."""
    if isinstance(value, Path):
        return "/".join(value.parts[-2:])
    if isinstance(value, tuple):
        return str(list(value))
    return "null" if value is None else str(value)


def type_text(annotation: Any) -> str:
    """``int|null``, ``[str, str]``, ``[int, ...]``, ``auto|cpu|cuda``."""
    if annotation is Ellipsis:
        return "..."
    if get_origin(annotation) is Annotated:
        return type_text(get_args(annotation)[0])
    if get_origin(annotation) is Literal:
        return "|".join(map(str, get_args(annotation)))
    if get_origin(annotation) is tuple:
        return f"[{', '.join(map(type_text, get_args(annotation)))}]"
    if isinstance(annotation, UnionType):
        return "|".join(map(type_text, get_args(annotation)))
    return "null" if annotation is type(None) else annotation.__name__.lower()
