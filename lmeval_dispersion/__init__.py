"""Representation dispersion for language models: screening, audit, laboratory, training.

The names of ``__init__.pyi`` are the public ones; each is loaded on first use, so that importing the
package loads next to nothing::

    from lmeval_dispersion import screen, dispersion

Its modules are private: they may move, and the names stay. A name that needs a missing extra raises
:class:`~lmeval_dispersion.errors.MissingExtraError`, which says what to install.
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
        imports = [node for node in ast.parse(stub.read()).body if isinstance(node, ast.ImportFrom)]
    return {
        str(name.asname): (str(node.module), name.name) for node in imports for name in node.names
    }


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return __dir__()
    if name.startswith("_") or name not in (public := _public()):
        from difflib import get_close_matches

        near = [] if name.startswith("_") else get_close_matches(name, __dir__())
        hint = f"; did you mean {', '.join(near)}?" if near else ""
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
        rooms = ("lmeval_dispersion.auditing", "lmeval_dispersion.store")
        extra = "audit" if module.startswith(rooms) else "models"
        raise MissingExtraError(
            f"{name} needs {library}, which is not installed; run: pip install 'lmeval-dispersion[{extra}]'"
        ) from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(name for name in _public() if not name.startswith("_"))
