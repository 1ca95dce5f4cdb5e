"""For the API reference: show `create = blocking(_create)` as the method it is, not as an attribute.

The site generator reads the source without importing it, so it cannot see that `blocking` makes a method that waits.
This extension of griffe, its parser, puts a function with the signature and docstring of the wrapped method in the
attribute's place.
"""

from __future__ import annotations

from typing import Any

import griffe


class Twins(griffe.Extension):
    """Replaces attributes made by `blocking` with functions."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        self._walk(pkg)

    def _walk(self, owner: griffe.Module | griffe.Class) -> None:
        for name, member in list(owner.members.items()):
            if member.is_alias:
                continue
            if member.is_module or member.is_class:
                self._walk(member)
            elif member.is_attribute and owner.is_class:
                wrapped = _wrapped(member.value)
                if wrapped in owner.members and owner.members[wrapped].is_function:
                    owner.set_member(name, _waiting(name, owner.members[wrapped], member))


def _wrapped(value: Any) -> str | None:
    """The name of the method in `blocking(method)`."""
    if isinstance(value, griffe.ExprCall) and str(value.function) == "blocking":
        return str(value.arguments[0])
    return None


def _waiting(name: str, method: griffe.Function, member: griffe.Attribute) -> griffe.Function:
    """The method as its waiting twin: what `Future[T]` holds is what it returns."""
    returns = method.returns
    if isinstance(returns, griffe.ExprSubscript):
        returns = returns.slice
    return griffe.Function(
        name,
        lineno=member.lineno,
        endlineno=member.endlineno,
        parameters=method.parameters,
        returns=returns,
        docstring=method.docstring,
    )
