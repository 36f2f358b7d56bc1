"""Which mutants there are: mutmut's operators, applied to every node of a file by libcst.

Left out by rule, and nothing else: type annotations, docstrings, decorators and imports; `len` and
`isinstance` (as mutmut does); and texts for people. A text is a string literal with a blank in it,
or any string inside a `raise`: another wording, or None in its place, is no other behaviour.
Removing an argument from a call is kept, whatever it says.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import libcst as cst
from libcst.metadata import (
    MetadataWrapper,
    PositionProvider,
    WhitespaceInclusivePositionProvider,
)
from mutmut.mutation.mutators import mutation_operators, operator_string

_NEVER = (cst.Annotation, cst.Decorator, cst.Import, cst.ImportFrom)
_NEVER_CALLS = ("len", "isinstance")
_TEXTS = (cst.SimpleString, cst.ConcatenatedString, cst.FormattedString)


@dataclass(frozen=True)
class Mutant:
    """One change to one file. `lines` are those of the statement it is in."""

    file: str
    line: int
    lines: tuple[int, int]
    function: str
    """The outermost function whose body it is in; empty for what runs on import."""
    before: str
    after: str
    text: str
    """The whole file, mutated."""
    again: int = 0
    """How many of its name came before it."""

    @property
    def name(self) -> str:
        """Stays the same while lines move: a reason given for a survivor is found by it."""
        again = f" #{self.again + 1}" if self.again else ""
        where = f"{self.file}::{self.function or '(module)'}"
        return f"{where}: {self.before} → {self.after}{again}"


@dataclass(frozen=True)
class _Place:
    """Where in a file the walk is."""

    scope: tuple[str, ...] = ()
    function: str = ""
    lines: tuple[int, int] = (0, 0)
    raises: bool = False


def mutants_of(file: str, source: str) -> list[Mutant]:
    """All mutants of a file, in its order."""
    wrapper = MetadataWrapper(cst.parse_module(source))
    positions: Mapping[cst.CSTNode, Any] = wrapper.resolve(PositionProvider)
    spans: Mapping[cst.CSTNode, Any] = wrapper.resolve(WhitespaceInclusivePositionProvider)
    starts = [0, *itertools.accumulate(len(line) for line in source.splitlines(keepends=True))]

    def offset(position: Any) -> int:
        return starts[position.line - 1] + int(position.column)

    found: dict[str, Mutant] = {}
    names: Counter[tuple[str, str, str]] = Counter()
    for node, place in _walk(wrapper.module, _Place(), positions):
        for mutated in _mutations(node, place):
            before, after = map(wrapper.module.code_for_node, (node, mutated))
            if isinstance(node, cst.BaseCompoundStatement):  # its blocks have to be indented
                text = wrapper.module.deep_replace(node, mutated).code
            else:
                text = source[: offset(spans[node].start)] + after + source[offset(spans[node].end) :]
            if text == source or text in found:
                continue
            where = positions.get(node)
            key = (place.function, _shown(before), _shown(after))
            names[key] += 1
            found[text] = Mutant(
                file=file,
                line=where.start.line if where else place.lines[0],
                lines=place.lines,
                function=place.function,
                before=_shown(before),
                after=_shown(after),
                text=text,
                again=names[key] - 1,
            )
    return list(found.values())


def _walk(
    node: cst.CSTNode, place: _Place, positions: Mapping[cst.CSTNode, Any]
) -> Iterator[tuple[cst.CSTNode, _Place]]:
    if isinstance(node, _NEVER) or _is_docstring(node) or _is_never_call(node):
        return
    if isinstance(node, cst.BaseSmallStatement | cst.BaseCompoundStatement):
        at = positions[node]
        end = at.end.line
        if isinstance(node, cst.BaseCompoundStatement):
            end = positions[node.body].start.line if node.body.children else at.start.line
        place = _Place(place.scope, place.function, (at.start.line, end), place.raises)
    if isinstance(node, cst.Raise):
        place = _Place(place.scope, place.function, place.lines, raises=True)
    yield node, place
    for child in node.children:
        inner = place
        if isinstance(node, cst.FunctionDef | cst.ClassDef) and child is node.body:
            scope = (*place.scope, node.name.value)
            is_outermost = isinstance(node, cst.FunctionDef) and not place.function
            inner = _Place(scope, ".".join(scope) if is_outermost else place.function)
        yield from _walk(child, inner, positions)


def _mutations(node: cst.CSTNode, place: _Place) -> Iterator[cst.CSTNode]:
    for kind, operator in mutation_operators:
        if not isinstance(node, kind):
            continue
        if operator is operator_string and _is_for_people(node, place):
            continue
        for mutated in operator(node):
            if not (isinstance(node, cst.Call) and _only_a_text_less(node, mutated, place)):
                yield mutated


def _only_a_text_less(call: cst.Call, mutated: cst.CSTNode, place: _Place) -> bool:
    """Whether all that changed is that one of its arguments, a text, became None."""
    if not isinstance(mutated, cst.Call) or len(mutated.args) != len(call.args):
        return False
    changed = [
        old.value for old, new in zip(call.args, mutated.args, strict=True) if old is not new
    ]
    return bool(changed) and all(_is_for_people(value, place) for value in changed)


def _is_for_people(node: cst.CSTNode, place: _Place) -> bool:
    if not isinstance(node, _TEXTS):
        return False
    return place.raises or any(" " in part for part in _parts(node))


def _parts(node: cst.CSTNode) -> Iterator[str]:
    if isinstance(node, cst.SimpleString | cst.FormattedStringText):
        yield node.value
    for child in node.children:
        if not isinstance(child, cst.FormattedStringExpression):
            yield from _parts(child)


def _is_docstring(node: cst.CSTNode) -> bool:
    return isinstance(node, cst.Expr) and isinstance(node.value, _TEXTS)


def _is_never_call(node: cst.CSTNode) -> bool:
    return (
        isinstance(node, cst.Call)
        and isinstance(node.func, cst.Name)
        and node.func.value in _NEVER_CALLS
    )


def _shown(code: str) -> str:
    return " ".join(code.split())
