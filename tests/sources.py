"""What a name in the source means: functions and classes of ours, found by ``ast`` alone.

The type of an expression is the last class of ours that its annotation names, so ``list[Rank]``,
``Rank | None`` and ``dict[str, Rank]`` are all a Rank: what is asked of it later tells them apart.
"""

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

Def = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, eq=False)
class Function:
    """``owner`` is its class, None of a function of a module."""

    file: str
    name: str
    node: Def
    owner: "Class | None" = None

    @property
    def label(self) -> str:
        return f"{self.owner.name}.{self.name}" if self.owner else self.name

    @cached_property
    def params(self) -> list[str]:
        args = self.node.args
        return [one.arg for one in (*args.posonlyargs, *args.args, *args.kwonlyargs)]

    @cached_property
    def decorators(self) -> set[str]:
        return {ast.unparse(one).rpartition(".")[2] for one in self.node.decorator_list}

    @property
    def is_bound(self) -> bool:
        """Its first parameter is its object, or its class."""
        return self.owner is not None and "staticmethod" not in self.decorators


@dataclass(eq=False)
class Class:
    """``fields`` are those that its body annotates, in their order."""

    file: str
    name: str
    node: ast.ClassDef
    methods: dict[str, Function] = field(default_factory=dict)
    fields: dict[str, ast.expr] = field(default_factory=dict)

    @property
    def is_protocol(self) -> bool:
        return any("Protocol" in ast.unparse(base) for base in self.node.bases)


Meant = Function | Class | str
"""A str is a module of ours, as its file."""


@dataclass
class Scope:
    """Names inside a function: ``types`` of parameters and of what was assigned so far."""

    function: Function
    types: dict[str, Class]


class Index:
    """All definitions of ``sources``, which are texts by file."""

    def __init__(self, sources: Mapping[str, str]) -> None:
        self._names: dict[str, dict[str, Meant | tuple[str, str]]] = {}
        self._attributes: dict[tuple[Class, str], Class | None] = {}
        self.classes: list[Class] = []
        for file, text in sources.items():
            self._names[file] = dict(self._defined(file, ast.parse(text)))

    def _defined(self, file: str, tree: ast.Module) -> Iterator[tuple[str, Meant | tuple]]:
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    yield alias.asname or alias.name, (str(node.module), alias.name)
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    yield alias.asname or alias.name, (alias.name, "")
        for node in tree.body:
            if isinstance(node, Def):
                yield node.name, Function(file, node.name, node)
            elif isinstance(node, ast.ClassDef):
                yield node.name, self._class(file, node)

    def _class(self, file: str, node: ast.ClassDef) -> Class:
        made = Class(file, node.name, node)
        for part in node.body:
            if isinstance(part, Def):
                made.methods[part.name] = Function(file, part.name, part, made)
            elif isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                made.fields[part.target.id] = part.annotation
        self.classes.append(made)
        return made

    def find(self, place: str) -> Function:
        """FILE:FUNCTION or FILE:CLASS.METHOD. Raises ValueError when there is none."""
        file, _, name = place.partition(":")
        first, _, method = name.partition(".")
        found = self._names.get(file, {}).get(first)
        if isinstance(found, Class):
            found = found.methods.get(method)
        if not isinstance(found, Function):
            raise ValueError(f"{place!r}: there is no such function")
        return found

    def meant(self, file: str, expr: ast.expr) -> Meant | None:
        """What a name, or one in a module of ours, stands for in ``file``."""
        if isinstance(expr, ast.Name):
            return self._named(file, expr.id)
        if isinstance(expr, ast.Attribute) and isinstance(
            module := self.meant(file, expr.value), str
        ):
            return self._named(module, expr.attr)
        return None

    def _named(self, file: str, name: str) -> Meant | None:
        found = self._names[file].get(name)
        if not isinstance(found, tuple):
            return found
        module, part = found
        if inside := self._file(module):
            return self._named(inside, part) if part else inside
        return self._file(f"{module}.{part}")

    def _file(self, module: str) -> str | None:
        path = module.replace(".", "/")
        both = f"{path}.py", f"{path}/__init__.py"
        return next((file for file in both if file in self._names), None)

    def class_in(self, file: str, annotation: ast.AST | None) -> Class | None:
        """The last class of ours that is named there."""
        found = None
        for node in ast.walk(annotation) if annotation else ():
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                node = ast.parse(node.value, mode="eval").body
                found = self.class_in(file, node) or found
            elif isinstance(node, ast.Name | ast.Attribute):
                one = self.meant(file, node)
                found = one if isinstance(one, Class) else found
        return found

    def bases(self, cls: Class) -> Iterator[Class]:
        """It and what it derives from."""
        yield cls
        for base in cls.node.bases:
            one = self.class_in(cls.file, base)
            if one is not None and one is not cls:
                yield from self.bases(one)

    def method(self, cls: Class, name: str) -> Function | None:
        """Of a Protocol that of the one class that has all of it, None if several have."""
        if cls.is_protocol and name in cls.methods:
            able = [one for one in self.classes if self._has_all(one, cls)]
            return self.method(able[0], name) if len(able) == 1 else None
        return next((one.methods[name] for one in self.bases(cls) if name in one.methods), None)

    def _has_all(self, cls: Class, protocol: Class) -> bool:
        """Of its own, or from what it inherits."""
        methods = {name for one in self.bases(cls) for name in one.methods}
        return not cls.is_protocol and protocol.methods.keys() <= methods

    def is_ours(self, scope: Scope, func: ast.expr) -> bool:
        """Whether a class of ours has that method, be it without saying what it does."""
        if not isinstance(func, ast.Attribute):
            return False
        cls = self.type_of(scope, func.value)
        return cls is not None and any(func.attr in one.methods for one in self.bases(cls))

    def types(self, function: Function) -> dict[str, Class]:
        """Of its parameters."""
        args = function.node.args
        found = {
            arg.arg: self.class_in(function.file, arg.annotation)
            for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs)
        }
        if function.is_bound:
            found[function.params[0]] = function.owner
        return {name: cls for name, cls in found.items() if cls}

    def type_of(self, scope: Scope, expr: ast.expr | None) -> Class | None:
        match expr:
            case ast.Name(id=name):
                return scope.types.get(name)
            case ast.Attribute(value=value, attr=attr):
                owner = self.type_of(scope, value)
                return self._attribute(owner, attr) if owner else None
            case ast.Call(func=func):
                called = self.callee(scope, func)
                if isinstance(called, Function):
                    return self.class_in(called.file, called.node.returns)
                return called
            case ast.Await(value=value) | ast.Subscript(value=value) | ast.NamedExpr(value=value):
                return self.type_of(scope, value)
            case ast.BoolOp(values=some):
                return next(filter(None, (self.type_of(scope, one) for one in some)), None)
            case ast.IfExp(body=one, orelse=other):
                return self.type_of(scope, one) or self.type_of(scope, other)
        return None

    def _attribute(self, owner: Class, attr: str) -> Class | None:
        if (owner, attr) not in self._attributes:
            self._attributes[owner, attr] = None
            found = (self._attribute_of(one, attr) for one in self.bases(owner))
            self._attributes[owner, attr] = next(filter(None, found), None)
        return self._attributes[owner, attr]

    def _attribute_of(self, cls: Class, attr: str) -> Class | None:
        if attr in cls.fields:
            return self.class_in(cls.file, cls.fields[attr])
        if attr in cls.methods:
            return self.class_in(cls.file, cls.methods[attr].node.returns)
        for method in cls.methods.values():
            scope = Scope(method, self.types(method))
            for node in ast.walk(method.node):
                for target, value, annotation in assigned(node):
                    if ast.unparse(target) == f"self.{attr}":
                        return self.class_in(cls.file, annotation) or self.type_of(scope, value)
                    self.note(scope, target, value)
        return None

    def note(self, scope: Scope, target: ast.expr, value: ast.expr | None) -> None:
        """A name has the type of what it is given."""
        if isinstance(target, ast.Name) and value is not None:
            if found := self.type_of(scope, value):
                scope.types[target.id] = found
            else:
                scope.types.pop(target.id, None)

    def callee(self, scope: Scope, func: ast.expr) -> Function | Class | None:
        """What a call of ``func`` enters; an object is called by ``__call__`` or ``forward``."""
        file = scope.function.file
        if isinstance(func, ast.Name) and func.id in scope.types:
            cls = scope.types[func.id]
            if func.id == "cls":
                return cls
            return self.method(cls, "__call__") or self.method(cls, "forward")
        if (found := self.meant(file, func)) or not isinstance(func, ast.Attribute):
            return None if isinstance(found, str) else found
        if ast.unparse(func.value) == "super()" and scope.function.owner:
            _, *others = self.bases(scope.function.owner)
            return next(
                (one.methods[func.attr] for one in others if func.attr in one.methods), None
            )
        whole = self.meant(file, func.value)
        owner = whole if isinstance(whole, Class) else self.type_of(scope, func.value)
        if owner and (method := self.method(owner, func.attr)):
            return None if "property" in method.decorators else method
        held = self.type_of(scope, func)
        return self.method(held, "forward") if held else None


def assigned(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr | None, ast.expr | None]]:
    """(target, value, annotation) of an assignment; tuples on both sides are taken apart."""
    match node:
        case ast.Assign(targets=targets, value=value):
            for target in targets:
                if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                    pairs = zip(target.elts, value.elts, strict=False)
                    yield from ((one, other, None) for one, other in pairs)
                else:
                    yield target, value, None
        case ast.AnnAssign(target=target, value=value, annotation=annotation):
            yield target, value, annotation
        case ast.NamedExpr(target=target, value=value) | ast.AugAssign(target=target, value=value):
            yield target, value, None


def reads_of_self(function: Function, attributes: Iterable[str]) -> bool:
    """Whether it names one of these ``attributes`` of its object."""
    wanted = {f"{function.params[0]}.{name}" for name in attributes} if function.is_bound else ()
    nodes = (node for node in ast.walk(function.node) if isinstance(node, ast.Attribute))
    return any(ast.unparse(node) in wanted for node in nodes)
