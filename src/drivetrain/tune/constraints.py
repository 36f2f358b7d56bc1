"""Constraints between parameters: comparisons in Python syntax, evaluated without running code."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

_BINARY: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}


def keys_of(text: str) -> set[str]:
    """The keys that a constraint names; ValueError if it is not a valid constraint."""
    return set(_keys(_parsed(text)))


def holds(text: str, values: Mapping[str, Any]) -> bool:
    """Whether the values satisfy it; true if it names a key that this trial does not have."""
    if not keys_of(text) <= values.keys():
        return True
    try:
        return bool(_value(_parsed(text), values))
    except ZeroDivisionError:
        return False


def _parsed(text: str) -> ast.expr:
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"not an expression ({error})") from None


def _keys(node: ast.expr) -> Iterator[str]:
    """The keys of an expression; ValueError for a node that `_value` does not evaluate."""
    match node:
        case ast.Constant(value=int() | float() | str()):
            return
        case ast.Name() | ast.Attribute():
            yield _dotted(node)
        case ast.UnaryOp(op=ast.USub() | ast.Not(), operand=operand):
            yield from _keys(operand)
        case ast.BoolOp(values=parts):
            for part in parts:
                yield from _keys(part)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            yield from (*_keys(left), *_keys(right))
        case ast.Compare(left=left, ops=ops, comparators=others) if _known(ops):
            for part in (left, *others):
                yield from _keys(part)
        case _:
            words = "not allowed; only keys, numbers, + - * / // %, comparisons, and/or/not are"
            raise ValueError(f"{ast.unparse(node)}: {words}")


def _known(ops: list[ast.cmpop]) -> bool:
    return all(type(op) in _BINARY for op in ops)


def _value(node: ast.expr, values: Mapping[str, Any]) -> Any:
    """The value of an expression that `_keys` has checked, so there is no other kind of node."""
    result: Any = None
    match node:
        case ast.Constant(value=constant):
            result = constant
        case ast.Name() | ast.Attribute():
            result = values[_dotted(node)]
        case ast.UnaryOp(op=op, operand=operand):
            inner = _value(operand, values)
            result = not inner if isinstance(op, ast.Not) else -inner
        case ast.BoolOp(op=op, values=parts):
            every = all if isinstance(op, ast.And) else any
            result = every(_value(part, values) for part in parts)
        case ast.BinOp(left=left, op=op, right=right):
            result = _BINARY[type(op)](_value(left, values), _value(right, values))
        case ast.Compare(left=left, ops=ops, comparators=others):
            found = [_value(part, values) for part in (left, *others)]
            pairs = zip(ops, found, found[1:], strict=False)
            result = all(_BINARY[type(op)](one, two) for op, one, two in pairs)
    return result


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    if isinstance(node, ast.Name):
        return node.id
    raise ValueError(f"{ast.unparse(node)}: not a config key")
