"""Representation dispersion for language models: screening, audit, laboratory, training.

The names of ``__init__.pyi`` are the public ones; each is loaded on first use, so that importing the
package loads next to nothing::

    from lmeval_dispersion import screen, dispersion

The package's modules are private and may move; the public names stay. A name that needs a missing
extra raises :class:`~lmeval_dispersion.errors.MissingExtraError`, which says what to install.
"""

from __future__ import annotations

from lmeval_dispersion.installation import __version__ as __version__

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def _public() -> dict[str, tuple[str, str]]:
    """Name -> (module, name there), read from the type stub, the only list."""
    import ast

    with open(f"{__path__[0]}/__init__.pyi", encoding="utf-8") as stub:
        statements = ast.parse(stub.read()).body
    names = {}
    for statement in statements:
        if isinstance(statement, ast.ImportFrom):
            for name in statement.names:
                names[str(name.asname)] = (str(statement.module), name.name)
    return names


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return __dir__()
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    public = _public()
    if name not in public:
        from lmeval_dispersion.layouts import nearest

        hint = nearest(name, __dir__())
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
    from importlib import import_module

    module, there = public[name]
    try:
        try:
            value = getattr(import_module(module), there)
        except AttributeError:  # a module of that package
            value = import_module(f"{module}.{there}")
    except ModuleNotFoundError as error:
        from lmeval_dispersion.errors import MissingExtraError

        library = (error.name or "").partition(".")[0]
        if library.startswith("lmeval_"):
            raise
        extra = "models"
        if module.startswith(("lmeval_dispersion.auditing", "lmeval_dispersion.store")):
            extra = "audit"
        raise MissingExtraError(
            f"{name} needs {library}, which is not installed; run: pip install 'lmeval-dispersion[{extra}]'"
        ) from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(name for name in _public() if not name.startswith("_"))
