"""Follows one parameter from function to function; ``tests/walks.py`` says by which rules."""

import ast
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tests.sources import Class, Function, Index, Scope, assigned, reads_of_self

FORMS = {
    *("aclosing", "bytearray", "bytes", "create_task", "dict", "enumerate", "frombuffer", "gather"),
    *("enter_async_context", "enter_context", "iter", "list", "next", "partial", "replace"),
    *("reversed", "set", "shield", "sorted", "to_thread", "tuple", "zip"),
}
"""Functions of others that give the value, or what holds it, in another form."""
PUTS = {"add", "append", "appendleft", "extend", "put_nowait", "update"}
"""Methods of others after which their object holds the value."""


@dataclass(frozen=True)
class Value:
    """The value itself or, ``holder`` given, an object of that class that may hold it; or no value
    but a ``function`` that is handed on, to be called with it perhaps."""

    holder: Class | None = None
    function: Function | None = None


ITSELF = Value()
Values = dict[str, Value]
Given = Mapping[str, Value | None]


@dataclass(frozen=True)
class Entry:
    """``names`` are the parameters as which the value came in."""

    function: Function
    depth: int
    names: tuple[str, ...]
    is_again: bool


@dataclass
class Body(Scope):
    """A function while it is read: what its names are, and what it gives back."""

    values: Values = field(default_factory=dict)
    result: Value | None = None
    depth: int = 0


class Walk:
    """``entries`` of the walks from ``places``, each FILE:FUNCTION:PARAM, one after the other.
    Raises ValueError for one that is not there."""

    def __init__(self, index: Index, *places: str) -> None:
        self._index = index
        self.entries: list[Entry] = []
        self._stored: dict[Class, Values] = {}
        self._results: dict[object, Value | None] = {}
        for place in places:
            name, _, param = place.rpartition(":")
            function = index.find(name)
            if param not in function.params:
                raise ValueError(f"{place}: it has no such parameter")
            self._enter(function, {param: ITSELF}, 0)

    def _enter(self, function: Function, given: Values, depth: int) -> Value | None:
        """What it gives back; it is read once for each way of being given the value."""
        names = tuple(name for name, value in given.items() if self._carries(value))
        is_again = any(entry.function is function for entry in self.entries)
        self.entries.append(Entry(function, depth, names, is_again))
        held = self._held(function.owner) if function.owner else {}
        key = function, frozenset(given.items()), frozenset(held)
        if key not in self._results:
            self._results[key] = None
            me = {function.params[0]: Value(function.owner)} if function.is_bound else {}
            body = Body(function, self._index.types(function), me | given, depth=depth)
            self._read(body, function.node.body)
            self._results[key] = body.result
        return self._results[key]

    def _held(self, cls: Class) -> Values:
        return self._stored.setdefault(cls, {})

    def _carries(self, value: Value | None) -> bool:
        if value is None or value.function:
            return False
        inside = self._held(value.holder).values() if value.holder else ()
        return value == ITSELF or any(one != value and self._carries(one) for one in inside)

    def _strongest(self, values: Iterable[Value | None]) -> Value | None:
        found = [value for value in values if self._carries(value)]
        return ITSELF if ITSELF in found else next(iter(found), None)

    def _read(self, body: Body, nodes: Iterable[ast.AST]) -> None:
        for node in nodes:
            match node:
                case ast.Assign() | ast.AnnAssign() | ast.AugAssign():
                    self._assign(body, node)
                case ast.For(target=target, iter=value) | ast.AsyncFor(target=target, iter=value):
                    self._put(body, target, value, self._value(body, value))
                    self._read(body, [*node.body, *node.orelse])
                case ast.withitem(context_expr=value, optional_vars=target):
                    found = self._value(body, value)
                    if target is not None:
                        self._put(body, target, value, found)
                case ast.Return(value=value) if value is not None:
                    body.result = self._strongest([body.result, self._value(body, value)])
                case ast.Match(subject=subject, cases=cases):
                    found = self._value(body, subject)
                    for part in (part for case in cases for part in ast.walk(case.pattern)):
                        if isinstance(part, ast.MatchAs) and part.name:
                            self._put(body, ast.Name(part.name), None, found)
                    self._read(body, [part for case in cases for part in case.body])
                case ast.expr():
                    self._value(body, node)
                case _:
                    self._read(body, ast.iter_child_nodes(node))

    def _assign(self, body: Body, node: ast.AST) -> None:
        found: dict[ast.expr | None, Value | None] = {None: None}
        for target, value, annotation in assigned(node):
            if value is not None and value not in found:
                found[value] = self._value(body, value)
            self._put(body, target, value, found[value])
            cls = self._index.class_in(body.function.file, annotation)
            if cls and isinstance(target, ast.Name):
                body.types[target.id] = cls

    def _put(
        self, body: Body, target: ast.expr, value: ast.expr | None, found: Value | None
    ) -> None:
        """``target`` is from now on what was ``found`` of the expression ``value``."""
        self._index.note(body, target, value)
        match target:
            case ast.Name(id=name):
                body.values.pop(name, None)
                body.values |= {name: found} if found else {}
            case ast.Tuple(elts=elts) | ast.List(elts=elts):
                for one in elts:
                    self._put(body, one, None, ITSELF if self._carries(found) else None)
            case ast.Starred(value=whole) | ast.Subscript(value=whole) if self._carries(found):
                self._put(body, whole, None, found)
            case ast.Attribute(value=whole, attr=attr) if found is not None:
                if owner := self._index.type_of(body, whole):
                    held = self._held(owner)
                    held[attr] = self._strongest([held.get(attr), found]) or found

    def _value(self, body: Body, expr: ast.expr) -> Value | None:
        """What an expression is; the functions in it are entered."""
        match expr:
            case ast.Name(id=name):
                return body.values.get(name) or self._handed(body, expr)
            case ast.Attribute(value=whole):
                return self._part(body, self._value(body, whole), expr)
            case ast.Subscript(value=whole, slice=at):
                self._value(body, at)
                return self._value(body, whole)
            case ast.Await(value=one) | ast.Starred(value=one):
                return self._value(body, one)
            case ast.Yield(value=ast.expr() as one) | ast.YieldFrom(value=one):
                body.result = self._strongest([body.result, self._value(body, one)])
            case ast.NamedExpr(target=target, value=one):
                self._put(body, target, one, self._value(body, one))
                return body.values.get(target.id)
            case ast.IfExp(test=test, body=one, orelse=other):
                self._value(body, test)
                return self._strongest([self._value(body, one), self._value(body, other)])
            case ast.Tuple() | ast.List() | ast.Set() | ast.Dict() | ast.BoolOp():
                parts = [part for part in ast.iter_child_nodes(expr) if isinstance(part, ast.expr)]
                return self._strongest([self._value(body, part) for part in parts])
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
                for part in expr.generators:
                    self._put(body, part.target, part.iter, self._value(body, part.iter))
                    self._read(body, part.ifs)
                last = expr.value if isinstance(expr, ast.DictComp) else expr.elt
                return self._value(body, last)
            case ast.Call():
                return self._call(body, expr)
            case _:
                self._read(body, ast.iter_child_nodes(expr))
        return None

    def _part(self, body: Body, whole: Value | None, expr: ast.Attribute) -> Value | None:
        if whole is not None and whole.holder:
            whole = self._held(whole.holder).get(expr.attr)
        return whole or self._handed(body, expr)

    def _handed(self, body: Body, expr: ast.expr) -> Value | None:
        """A function of ours by its name."""
        called = self._index.callee(body, expr)
        is_named = isinstance(called, Function) and called.name == ast.unparse(expr).split(".")[-1]
        return Value(function=called) if is_named and isinstance(called, Function) else None

    def _call(self, body: Body, call: ast.Call) -> Value | None:
        places = [self._value(body, arg) for arg in call.args]
        words = {str(one.arg): self._value(body, one.value) for one in call.keywords}
        called = self._index.callee(body, call.func)
        if isinstance(called, Class):
            return self._made(body, called, places, words)
        if isinstance(call.func, ast.Attribute):
            on = self._value(body, call.func.value)
            held = self._part(body, on, call.func)
        else:
            on, held = None, self._value(body, call.func)
        if called is not None:
            return self._called(body, called, on, places, words)
        of_others = [held, *places]
        for i, one in enumerate(of_others):
            if one is not None and one.function:
                return self._called(body, one.function, None, of_others[i + 1 :], words)
        name = ast.unparse(call.func).rpartition(".")[2]
        carried = self._strongest([*places, *words.values()])
        if carried and name in PUTS and isinstance(call.func, ast.Attribute):
            self._put(body, call.func.value, None, carried)
        if name in FORMS:
            return carried
        return on if on == ITSELF and not self._index.is_ours(body, call.func) else None

    def _called(
        self,
        body: Body,
        function: Function,
        on: Value | None,
        places: Iterable[Value | None],
        words: Given,
    ) -> Value | None:
        """Enter it if something that it is given, or reads of its object, is the value."""
        own = function.params[function.is_bound :]
        given = {**dict(zip(own, places, strict=False)), **words}
        if function.is_bound and on == ITSELF:
            given[function.params[0]] = ITSELF
        reads = (
            on is not None
            and function.owner
            and reads_of_self(function, self._held(function.owner))
        )
        if not reads and self._strongest(given.values()) is None:
            return None
        return self._enter(function, {k: v for k, v in given.items() if v}, body.depth + 1)

    def _made(
        self, body: Body, cls: Class, places: list[Value | None], words: Given
    ) -> Value | None:
        """An object of ours, which holds what it is made with."""
        if begin := self._index.method(cls, "__init__"):
            self._called(body, begin, None, places, words)
        else:
            fields = [name for one in self._index.bases(cls) for name in one.fields]
            given = {**dict(zip(fields, places, strict=False)), **words}
            self._held(cls).update({name: value for name, value in given.items() if value})
            if after := self._index.method(cls, "__post_init__"):
                self._called(body, after, Value(cls), [], {})
        return Value(cls)
