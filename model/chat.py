"""The checkpoint's own chat template, rendered in a sandbox: templates are foreign code."""

from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment


class ChatTemplate:
    """``source`` is Jinja text; ``special`` are the tokens it may name, such as bos_token."""

    def __init__(self, source: str, special: dict[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = _raise
        self._special = special
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ValueError(f"chat template: is not valid Jinja: {error}") from None

    @classmethod
    def from_dir(cls, path: Path, config: dict[str, Any]) -> "ChatTemplate | None":
        """From chat_template.jinja, else ``config`` (tokenizer_config.json); None without one."""
        file = path / "chat_template.jinja"
        source = file.read_text() if file.is_file() else _default(config.get("chat_template"))
        if not isinstance(source, str):
            return None
        tokens = {key: token for key, token in config.items() if key.endswith("_token")}
        special = {key: _content(token) for key, token in tokens.items() if token is not None}
        return cls(source, special)

    def render(self, messages: list[dict[str, str]]) -> str:
        """The prompt for ``messages`` ({role, content}), up to where the answer begins."""
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=True, **self._special
            )
        except Exception as error:  # foreign code may raise anything
            raise ValueError(f"chat: the template refuses these messages: {error}") from None


def _default(template: Any) -> Any:
    """The one named default where tokenizer_config.json lists several by name."""
    if not isinstance(template, list):
        return template
    named = {entry.get("name"): entry.get("template") for entry in template}
    return named.get("default")


def _content(token: Any) -> str:
    return str(token.get("content", "")) if isinstance(token, dict) else str(token)


def _raise(message: str) -> None:
    raise TemplateError(message)
