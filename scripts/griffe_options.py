"""An extension of griffe, by which the page of the Python names shows a function's real parameters.

A function that takes an options object (`lmeval_dispersion.arguments.takes`) has the object's fields as its
parameters. griffe reads source, where these do not stand.
"""

from __future__ import annotations

import inspect
from typing import Any

import griffe


class TakesOptions(griffe.Extension):  # type: ignore[misc]
    """Gives such functions the signature and the docstring that they have when they run."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """Replace the parameters of a function with the decorator."""
        if not any(str(decorator.value).startswith("takes(") for decorator in func.decorators):
            return
        function = griffe.dynamic_import(func.path)
        parameters = list[griffe.Parameter]()
        for parameter in inspect.signature(function).parameters.values():
            kind = getattr(griffe.ParameterKind, parameter.kind.name.lower())
            annotation = griffe.safe_get_annotation(
                _parsed(parameter.annotation), parent=func.parent
            )
            default = repr(parameter.default)
            parameters.append(
                griffe.Parameter(parameter.name, annotation=annotation, kind=kind, default=default)
            )
        func.parameters = griffe.Parameters(*parameters)
        func.docstring = griffe.Docstring(inspect.getdoc(function) or "", parent=func)


def _parsed(annotation: str) -> Any:
    import ast

    return ast.parse(annotation, mode="eval").body
