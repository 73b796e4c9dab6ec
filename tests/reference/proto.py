"""Generate docs/reference/grpc.md from cluster/proto/tandem.proto with its comments."""

import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)
from grpc_tools import protoc

from tests.reference.values import code, prose, table

SOURCE = Path(__file__).parents[2] / "src"
_PROTO = "tandem/cluster/proto/tandem.proto"
_Path = tuple[int, ...]


def describe_interface() -> str:
    """Return sections for errors, the service, messages and enumerations."""
    return _Page(_compile()).text()


def _compile() -> FileDescriptorProto:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "set"
        options = ["protoc", f"-I{SOURCE}", "--include_source_info", f"--descriptor_set_out={out}"]
        status = protoc.main([*options, _PROTO])
        assert status == 0, f"protoc exited with {status}"
        [file] = FileDescriptorSet.FromString(out.read_bytes()).file
        return file


class _Page:
    def __init__(self, file: FileDescriptorProto) -> None:
        self._file = file
        locations = file.source_code_info.location
        self._comments = {tuple(one.path): one.leading_comments for one in locations}

    def text(self) -> str:
        parts = list(self._header())
        for i, service in enumerate(self._file.service):
            parts += self._service(service, (6, i))
        for i, message in enumerate(self._file.message_type):
            parts += self._message(message, (4, i), message.name)
        for i, enum in enumerate(self._file.enum_type):
            parts += self._enum(enum, (5, i), enum.name)
        return "\n\n".join(parts)

    def _header(self) -> Iterator[str]:
        """Yield the comment at the top of the file, whose last part lists the errors."""
        _, _, errors = self._comments[(12,)].partition("Errors:\n")
        yield "## Errors"
        rows = [
            (", ".join(code(name) for name in codes.split(", ")), prose(text))
            for codes, text in re.findall(
                r"^ {3}([A-Z_, ]+): (.+?)(?=^ {3}\S|\Z)", errors, flags=re.MULTILINE | re.DOTALL
            )
        ]
        yield table(("code", "meaning"), rows)

    def _service(self, service: ServiceDescriptorProto, path: _Path) -> Iterator[str]:
        yield f"## Service {self._file.package}.{service.name}"
        rows = [
            (
                code(method.name),
                self._link(method.input_type),
                ("stream of " if method.server_streaming else "") + self._link(method.output_type),
                self._comment((*path, 2, i)),
            )
            for i, method in enumerate(service.method)
        ]
        yield table(("method", "request", "response", "meaning"), rows)

    def _message(self, message: DescriptorProto, path: _Path, name: str) -> Iterator[str]:
        entries = {inner.name for inner in message.nested_type if inner.options.map_entry}
        assert len(entries) == len(message.nested_type), f"{name}: describe nested messages"
        yield f"## {name}"
        if comment := self._comment(path):
            yield comment
        if not message.field:
            yield "No fields."
        else:
            rows = [
                (str(field.number), code(field.name), self._type(field, message), comment)
                for i, field in enumerate(message.field)
                for comment in [self._comment((*path, 2, i))]
            ]
            yield table(("number", "field", "type", "meaning"), rows)
        for i, enum in enumerate(message.enum_type):
            yield from self._enum(enum, (*path, 4, i), f"{name}.{enum.name}")

    def _enum(self, enum: EnumDescriptorProto, path: _Path, name: str) -> Iterator[str]:
        yield f"## {name}"
        if comment := self._comment(path):
            yield comment
        rows = [
            (str(value.number), code(value.name), self._comment((*path, 2, i)))
            for i, value in enumerate(enum.value)
        ]
        yield table(("number", "value", "meaning"), rows)

    def _type(self, field: FieldDescriptorProto, message: DescriptorProto) -> str:
        kind = self._kind(field)
        nested = {inner.name: inner for inner in message.nested_type}
        if field.type_name.rpartition(".")[2] in nested:
            key, value = nested[field.type_name.rpartition(".")[2]].field
            return f"map from {self._kind(key)} to {self._kind(value)}"
        if field.label == FieldDescriptorProto.LABEL_REPEATED:
            return f"list of {kind}"
        if field.proto3_optional:
            return f"{kind}, optional"
        if field.HasField("oneof_index"):
            return f"{kind}, one of `{message.oneof_decl[field.oneof_index].name}`"
        return kind

    def _kind(self, field: FieldDescriptorProto) -> str:
        if field.type_name:
            return self._link(field.type_name)
        return FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()

    def _link(self, type_name: str) -> str:
        name = type_name.removeprefix(f".{self._file.package}.")
        return f"[{name}](#{name.lower().replace('.', '')})"

    def _comment(self, path: Sequence[int]) -> str:
        return prose(self._comments.get(tuple(path), ""))
