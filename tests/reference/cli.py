"""Generate docs/reference/cli.md from the functions of the commands."""

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from textwrap import dedent
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from typer.models import ArgumentInfo, OptionInfo

from tandem.cluster.cli import app
from tests.reference.values import bounds, code, prose, table, values


@dataclass(frozen=True)
class _Option:
    """An option or argument of a command: its name on the command line, type and settings."""

    name: str
    annotation: Any
    default: Any
    info: OptionInfo | ArgumentInfo


def describe_commands() -> str:
    """Return a section for each command."""
    commands = [info.callback for info in app.registered_commands]
    return "\n\n".join(_describe(command) for command in commands if command is not None)


def _describe(command: Callable[..., Any]) -> str:
    options = [
        _read_option(name, annotation, inspect.signature(command).parameters[name].default)
        for name, annotation in get_type_hints(command, include_extras=True).items()
        if name != "return"
    ]
    arguments = "".join(
        f" [{option.name}]" for option in options if isinstance(option.info, ArgumentInfo)
    )
    name = command.__name__
    parts = [f"## tandem {name}", *_describe_help(inspect.getdoc(command) or "")]
    parts.append(f"Usage: `tandem {name} [OPTIONS]{arguments}`")
    panels = list(dict.fromkeys(option.info.rich_help_panel for option in options))
    for panel in panels:
        if len(panels) > 1:
            title = f"{panel} options" if panel else "Common options"
            parts.append(f"**{title}**")
        rows = [_row(option) for option in options if option.info.rich_help_panel == panel]
        parts.append(table(("option", "value", "default", "meaning"), rows))
    return "\n\n".join(parts)


def _describe_help(text: str) -> list[str]:
    """Return the paragraphs of a help text. A block after ``\\b`` is a title and lines of code."""
    found = []
    for paragraph in re.split(r"\n\n|\n(?=\s*\x08)", text):
        lines = paragraph.strip("\n ").splitlines()
        if not lines:
            continue
        if lines[0].strip() != "\x08":
            found.append(prose(" ".join(lines)))
            continue
        block = dedent("\n".join(lines[2:]))
        words = [re.sub(" {2,}", " ", line) for line in block.splitlines()]
        kind = "json" if words[0].startswith("{") else "bash"
        found += [lines[1].strip(), "\n".join((f"```{kind}", *words, "```"))]
    return found


def _read_option(name: str, annotation: Any, default: Any) -> _Option:
    if isinstance(default, OptionInfo):  # typer's older spelling, as the default of a parameter
        return _Option(_spell(name, annotation, default), annotation, default.default, default)
    assert get_origin(annotation) is Annotated, name
    kind, info = get_args(annotation)
    return _Option(_spell(name, kind, info), kind, default, info)


def _spell(name: str, kind: Any, info: OptionInfo | ArgumentInfo) -> str:
    if isinstance(info, ArgumentInfo):
        return name.upper()
    # Within Annotated, typer keeps the first name as the default.
    for text in (info.default, *(info.param_decls or ())):
        if isinstance(text, str) and text.startswith("--"):
            return text
    flag = name.replace("_", "-")
    return f"--{flag} / --no-{flag}" if kind is bool else f"--{flag}"


def _row(option: _Option) -> tuple[str, str, str, str]:
    info = option.info
    kind = _without_none(option.annotation)
    is_flag = kind is bool
    allowed = "" if is_flag else code(info.metavar or "") or values(kind)
    if span := bounds(info.min, info.max):
        allowed = f"{allowed}, {span}"
    is_plain = option.default is None or option.default is False
    default = "" if is_plain else code(str(option.default))
    if is_flag and option.default:
        default = code(option.name.split(" / ")[0])
    return code(option.name), allowed, default, prose(info.help or "")


def _without_none(annotation: Any) -> Any:
    """Return the type of an option that may be absent. Repeatable options are lists."""
    kinds = [kind for kind in get_args(annotation) if kind is not type(None)]
    if type(None) not in get_args(annotation):
        return annotation
    return kinds[0]
