"""Which mutants there are: mutmut's operators, applied to every node of a file by libcst.

Left out by rule, and nothing else: type annotations, docstrings, decorators and imports; `len` and
`isinstance` (as mutmut does); and texts for people. A text is a string literal with a blank in it,
or any string inside a `raise`: another wording, or None in its place, is no other behaviour.
Removing an argument from a call is kept, whatever it says.

And what no run can tell from the original, whatever the tests:
- the names of types: an alias (`X = Literal["a"]`), a TypeVar, the type in `cast(type, value)`;
- `__all__`, which only a star import reads, and there is none;
- what stands in a Protocol: nothing inherits from one, and its methods are never called;
- `strict` of a `zip` whose sides are as long as each other by construction, as all of ours are:
  it asserts, and its assertion never fails.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import libcst as cst
from libcst.metadata import (
    MetadataWrapper,
    PositionProvider,
    WhitespaceInclusivePositionProvider,
)
from mutmut.mutation.mutators import mutation_operators, operator_assignment, operator_string

_NEVER = (cst.Annotation, cst.Decorator, cst.Import, cst.ImportFrom)
_NEVER_CALLS = ("len", "isinstance")
_TEXTS = (cst.SimpleString, cst.ConcatenatedString, cst.FormattedString)
_GENERIC = ("Callable", "Literal", "Mapping", "NDArray", "Sequence", "dict", "list", "tuple")
"""What an alias of a type begins with."""


@dataclass(frozen=True)
class Mutant:
    """One change to one file. `lines` are those of the statement it is in."""

    file: str
    line: int
    lines: tuple[int, int]
    function: str
    """The outermost function whose body it is in; empty for what runs on import."""
    into: int
    """Lines from where that begins, or the file."""
    before: str
    after: str
    text: str
    """The whole file, mutated."""

    @property
    def name(self) -> str:
        """Stays the same while the function moves: a survivor's reason is found by it."""
        where = f"{self.file}::{self.function or '(module)'}+{self.into}"
        return f"{where}: {self.before} → {self.after}"


@dataclass(frozen=True)
class _Place:
    """Where in a file the walk is."""

    scope: tuple[str, ...] = ()
    function: str = ""
    begins: int = 1
    """The line of that function."""
    lines: tuple[int, int] = (0, 0)
    raises: bool = False
    in_text: bool = False
    """Part of a literal that is a text for people."""


class Mutants:
    """All mutants of a file, in its order; each is written out when it is asked for."""

    def __init__(self, file: str, source: str) -> None:
        self._file, self._source = file, source
        wrapper = MetadataWrapper(cst.parse_module(source), unsafe_skip_copy=True)
        self._module = wrapper.module
        self._positions: Mapping[cst.CSTNode, Any] = wrapper.resolve(PositionProvider)
        self._spans: Mapping[cst.CSTNode, Any] = wrapper.resolve(
            WhitespaceInclusivePositionProvider
        )
        lengths = (len(line) for line in source.splitlines(keepends=True))
        self._starts = [0, *itertools.accumulate(lengths)]
        self._found = [
            (node, mutated, place)
            for node, place in _walk(wrapper.module, _Place(), self._positions)
            for mutated in _mutations(node, place)
        ]

    def __len__(self) -> int:
        return len(self._found)

    def __getitem__(self, number: int) -> Mutant:
        node, mutated, place = self._found[number]
        before, after = map(self._module.code_for_node, (node, mutated))
        if isinstance(node, cst.BaseCompoundStatement):  # its blocks have to be indented
            text = self._module.deep_replace(node, mutated).code
        else:
            start, end = map(self._offset, (self._spans[node].start, self._spans[node].end))
            text = self._source[:start] + after + self._source[end:]
        where = self._positions.get(node)
        line = where.start.line if where else place.lines[0]
        before, after = (" ".join(code.split()) for code in (before, after))
        into = line - place.begins
        return Mutant(self._file, line, place.lines, place.function, into, before, after, text)

    def _offset(self, position: Any) -> int:
        return int(self._starts[position.line - 1] + position.column)


def _walk(
    node: cst.CSTNode, place: _Place, positions: Mapping[cst.CSTNode, Any]
) -> Iterator[tuple[cst.CSTNode, _Place]]:
    if _is_left_out(node, place):
        return
    if isinstance(node, cst.BaseSmallStatement | cst.BaseCompoundStatement):
        at, body = positions[node], getattr(node, "body", None)
        # of what has a body, only the line it begins with is its own
        end = at.end.line if body is None else positions[body].start.line
        place = replace(place, lines=(at.start.line, end))
    if isinstance(node, cst.Raise):
        place = replace(place, raises=True)
    if isinstance(node, cst.ConcatenatedString) and _is_for_people(node, place):
        place = replace(place, in_text=True)
    elif isinstance(node, cst.FormattedStringExpression):
        place = replace(place, in_text=False)
    yield node, place
    for child in _changeable(node):
        inner = place
        if isinstance(node, cst.FunctionDef | cst.ClassDef) and child is node.body:
            scope = (*place.scope, node.name.value)
            is_outermost = isinstance(node, cst.FunctionDef) and not place.function
            inner = _Place(scope, place.function, place.begins)
            if is_outermost:
                inner = _Place(scope, ".".join(scope), positions[node].start.line)
        yield from _walk(child, inner, positions)


def _is_left_out(node: cst.CSTNode, place: _Place) -> bool:
    is_never = isinstance(node, _NEVER) or _is_docstring(node) or _is_never_call(node)
    return is_never or _is_for_types(node, place)


def _changeable(node: cst.CSTNode) -> list[cst.CSTNode]:
    is_zip = isinstance(node, cst.Call) and _name_of(node.func) == "zip"
    return [child for child in node.children if not (is_zip and _is_strict(child))]


def _mutations(node: cst.CSTNode, place: _Place) -> Iterator[cst.CSTNode]:
    for kind, operator in mutation_operators:
        if not isinstance(node, kind):
            continue
        if operator is operator_string and _is_for_people(node, place):
            continue
        if operator is operator_assignment and _is_for_people(node.value, place):
            continue
        for mutated in operator(node):
            if isinstance(node, cst.Call) and (
                _only_a_text_less(node, mutated, place) or _only_for_types(node, mutated)
            ):
                continue
            yield mutated


def _only_a_text_less(call: cst.Call, mutated: cst.CSTNode, place: _Place) -> bool:
    """Whether all that changed is that one of its arguments, a text, became None."""
    if not isinstance(mutated, cst.Call) or len(mutated.args) != len(call.args):
        return False
    changed = [
        old.value for old, new in zip(call.args, mutated.args, strict=True) if old is not new
    ]
    return bool(changed) and all(_is_for_people(value, place) for value in changed)


def _is_for_people(node: cst.CSTNode | None, place: _Place) -> bool:
    if not isinstance(node, _TEXTS):
        return False
    return place.raises or place.in_text or any(" " in part for part in _parts(node))


def _parts(node: cst.CSTNode) -> Iterator[str]:
    if isinstance(node, cst.SimpleString | cst.FormattedStringText):
        yield node.value
    for child in node.children:
        if not isinstance(child, cst.FormattedStringExpression):
            yield from _parts(child)


def _is_for_types(node: cst.CSTNode, place: _Place) -> bool:
    """What only a type checker, or a star import, would look at."""
    if isinstance(node, cst.ClassDef):
        return any(_name_of(base.value) == "Protocol" for base in node.bases)
    if not isinstance(node, cst.Assign) or place.scope:
        return False
    if _name_of(node.targets[0].target) == "__all__":
        return True
    value = node.value
    is_alias = isinstance(value, cst.Subscript) and _name_of(value.value) in _GENERIC
    return is_alias or (isinstance(value, cst.Call) and _name_of(value.func) == "TypeVar")


def _only_for_types(call: cst.Call, mutated: cst.CSTNode) -> bool:
    """Whether all that changed is the type in a `cast`, or `strict` of a `zip`."""
    if not isinstance(mutated, cst.Call):
        return False
    if _name_of(call.func) == "cast":
        return len(mutated.args) == len(call.args) and mutated.args[0] is not call.args[0]
    if _name_of(call.func) != "zip":
        return False
    left = {id(arg) for arg in mutated.args}
    changed = [arg for arg in call.args if id(arg) not in left]
    return all(map(_is_strict, changed))


def _is_strict(node: cst.CSTNode) -> bool:
    return (
        isinstance(node, cst.Arg)
        and node.keyword is not None
        and _name_of(node.keyword) == "strict"
    )


def _name_of(node: cst.CSTNode) -> str:
    return node.value if isinstance(node, cst.Name) else ""


def _is_docstring(node: cst.CSTNode) -> bool:
    return isinstance(node, cst.Expr) and isinstance(node.value, _TEXTS)


def _is_never_call(node: cst.CSTNode) -> bool:
    return (
        isinstance(node, cst.Call)
        and isinstance(node.func, cst.Name)
        and node.func.value in _NEVER_CALLS
    )
