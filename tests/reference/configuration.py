"""Generate docs/reference/configuration.md from the configuration's models."""

from itertools import groupby

from pydantic.fields import FieldInfo

from tandem.core.config import iter_keys
from tandem.core.config_source import format_value
from tests.reference.values import bounds, code, prose, table, values


def describe_configuration() -> str:
    """Return a section for each section of the configuration."""
    parts = []
    for section, keys in groupby(iter_keys(), key=lambda item: item[0].rpartition(".")[0]):
        rows = [_row(name, field) for name, field in keys]
        title = f"{section}.*" if section else "Top level"
        parts += [f"## {title}", table(("key", "value", "default", "meaning"), rows)]
    return "\n\n".join(parts)


def _row(name: str, field: FieldInfo) -> tuple[str, str, str, str]:
    found = {
        bound: getattr(item, bound)
        for item in field.metadata
        for bound in ("ge", "gt", "le")
        if hasattr(item, bound)
    }
    span = bounds(found.get("ge"), found.get("le"), found.get("gt"))
    allowed = values(field.annotation) + (f", {span}" if span else "")
    default = code(format_value(field.default))
    return code(name), allowed, default, prose(field.description or "")
