"""The package's exceptions: a message for users, and an exit code for commands.

A message says what was expected, what was given and what to do next. It names arguments as Python
does; a command replaces the name by that of the option.
"""

from __future__ import annotations

import importlib.util
import re
import reprlib
from collections.abc import Sequence

# Extra of the package -> libraries that it installs; they show whether it is installed.
LIBRARIES = {
    "html": ("vl_convert",),
    "audit": ("pandas", "pyarrow", "safetensors", "scipy", "sklearn"),
    "models": ("torch", "transformers", "accelerate", "datasets", "lm_eval", "peft"),
    "quantized": ("bitsandbytes",),
    "inspect": ("inspect_ai",),
    "ray": ("ray", "pydantic"),
}


#: Characters of one name or value in a message, and of a whole message.
LONGEST_VALUE = 300
LONGEST_MESSAGE = 4_000
#: Characters of a file's value in a message that names its place.
LONGEST_BRIEF = 60
_FIRST_NAMES = 5
#: Characters in which addresses are looked for: a search of longer texts would take long.
_LOOKED_AT = 20_000
#: A text in quotes, a list, or a name without spaces, if it is longer than a value in a message may be.
_LONG_VALUE = (
    rf"(?<!\w)'[^']{{{LONGEST_VALUE},}}'(?!\w)"
    rf'|"[^"]{{{LONGEST_VALUE},}}"'
    rf"|\([^()]{{{LONGEST_VALUE},}}\)"
    rf"|\[[^\[\]]{{{LONGEST_VALUE},}}\]"
    rf"|\S{{{LONGEST_VALUE},}}"
)
#: Schemes in whose addresses the part before an ``@`` is a container, and no secret.
_CONTAINERS = ("abfs", "abfss", "az", "azure", "wasb", "wasbs")
_USER = r"(\w[\w+.-]{0,30})://[^/\s?#]*@"
#: The query or fragment of a web address; in a storage's address, whose ``?`` may be a pattern, ``?name=…``.
_QUERY = (
    r"(?i:(?P<place>https?://[^\s?#]*)[?#]\S*?(?P<end>[)\]}'\",;:.]{0,4})(?=\s|$)"
    r"|(?P<other>\w[\w+.-]{0,30}://[^\s?]*)\?[^\s/=?&]{1,100}=\S*?(?P<close>[)\]}'\",;:.]{0,4})(?=\s|$))"
)


def printable(text: str, keep: str = "") -> str:
    """Return ``text`` with unprintable characters escaped, except for those in ``keep``."""
    if text.isprintable():
        return text
    shown = [sign if sign.isprintable() or sign in keep else ascii(sign)[1:-1] for sign in text]
    return "".join(shown)


def without_secrets(text: str) -> str:
    """Return ``text`` with the parts of its addresses removed that may be secret.

    Removed are a user name and a password before the host; the query and the fragment of a web
    address; and a query ``?name=…`` of another address. The container of an Azure address stays.

    >>> without_secrets("https://me:word@host/m?sig=x, sftp://me@host/m")
    'https://host/m, sftp://host/m'
    """
    if "://" not in text:
        return text
    # Patterns are compiled for the first message that needs them: it takes two milliseconds.
    return re.sub(_QUERY, _without_query, re.sub(_USER, _without_user, text))


def _without_user(match: re.Match[str]) -> str:
    scheme = match[1]
    if scheme.lower() in _CONTAINERS:
        return match[0]
    return f"{scheme}://"


def _without_query(match: re.Match[str]) -> str:
    if match["place"] is not None:
        return f"{match['place']}{match['end']}"
    return f"{match['other']}{match['close']}"


def sentence(text: str, keep: str = "") -> str:
    """Return a message as it is shown and stored: printable, without secrets, and shortened.

    Names and values of 300 characters or more lose their middle, and so does a message of more than
    4,000 characters: its beginning (the cause) and its end (the next step) stay.

    Args:
        text: The message.
        keep: Unprintable characters that are not escaped, such as a line feed.
    """
    if len(text) > _LOOKED_AT:
        text = _middle_cut(re.sub(_LONG_VALUE, _cut_value, text), _LOOKED_AT)
    text = without_secrets(text)
    if len(text) > LONGEST_VALUE:
        text = _middle_cut(re.sub(_LONG_VALUE, _cut_value, text), LONGEST_MESSAGE)
    return printable(text, keep)


def _middle_cut(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    return f"{text[: most // 2]} … {text[-most // 2 :]}"


def _cut_value(match: re.Match[str]) -> str:
    value = match[0]
    return f"{value[: LONGEST_VALUE // 2]}… {len(value)} characters …{value[-20:]}"


def brief(value: object) -> str:
    """Return a text of at most 60 characters that shows a value from a file, for a message.

    This takes little time, however large or deeply nested the value is.
    """
    shortened = reprlib.Repr()
    shortened.maxlevel = 3
    shortened.maxstring = 2 * LONGEST_BRIEF
    shortened.maxother = 2 * LONGEST_BRIEF
    try:
        # A number in full: `reprlib` leaves out its middle.
        shown = repr(value) if isinstance(value, float) else shortened.repr(value)
    except ValueError:  # Python writes no integer of more than 4,300 digits
        return "of thousands of digits"
    return beginning(shown)


def beginning(text: str) -> str:
    """Return a text; if it has more than 60 characters, its first 57 and "...".

    >>> beginning("a" * 100)[-5:]
    'aa...'
    """
    return text if len(text) <= LONGEST_BRIEF else f"{text[: LONGEST_BRIEF - 3]}..."


def shortened(text: object, length: int) -> str:
    """Return ``text`` on one line, cut to ``length`` characters; "" if ``text`` is not a string."""
    line = " ".join(text.split()) if isinstance(text, str) else ""
    return line if len(line) <= length else f"{line[: length - 1]}…"


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message, without a full stop at its end.

    For an exception without a message it is the name of the exception's type.

    >>> first_line(ValueError("No such model.")), first_line(ValueError())
    ('No such model', 'ValueError')
    """
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


def listed_names(names: Sequence[str]) -> str:
    """Join the first five names with commas, for a message; "…" marks that there are more.

    >>> listed_names(["a", "b", "c", "d", "e", "f"])
    'a, b, c, d, e, …'
    """
    first = ", ".join(names[:_FIRST_NAMES])
    return f"{first}, …" if len(names) > _FIRST_NAMES else first


def count(number: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun, in the singular or the plural.

    >>> count(1, "text"), count(1200, "text"), count(2, "query", "queries")
    ('1 text', '1,200 texts', '2 queries')
    """
    if number != 1:
        noun = plural or f"{noun}s"
    return f"{number:,} {noun}"


class DispersionError(Exception):
    """Base class of all errors of this package.

    Attributes:
        exit_code: Exit code of a command that ends with this error.
        argument: Name of the wrong argument, which begins the message; "" if the error concerns no
            single argument.
    """

    exit_code = 1

    def __init__(self, message: str = "", *, argument: str = "") -> None:
        super().__init__(message)
        self.argument = argument

    def __str__(self) -> str:
        return self.naming(self.argument)

    def naming(self, argument: str) -> str:
        """Return the message, beginning with ``argument`` as the name of the wrong argument.

        A command passes its option, such as ``--limit``; "" gives the message alone.
        """
        text = sentence(super().__str__(), keep="\n")
        return f"{argument}: {text}" if argument else text


class UsageError(DispersionError):
    """An argument, a name or a file cannot be used."""

    exit_code = 2


class UnknownNameError(UsageError, LookupError):
    """A result has no item with the given name, such as a checkpoint with this label."""


class NothingScreenedError(DispersionError, IndexError):
    """A screening has no best checkpoint, and the message says why.

    For example, all checkpoints failed, or only the base was screened.
    """


class StoreError(UsageError):
    """The folder of a run cannot be read or written as a store."""


class PartialStoreError(StoreError):
    """A store is incomplete: its run did not finish, or a file is missing."""


class StoreVersionError(StoreError):
    """The store was written in another version of the store format."""


class MixedStoresError(StoreError):
    """Runs cannot be read or compared together.

    For example, they share no documents or layers, their models, prompts or targets differ, or a
    task occurs twice.
    """


class GeometryError(DispersionError, ValueError):
    """A quantity, such as a mean distance or a correlation, is not defined for these arrays.

    For example, numbers are not finite, an array is constant, or shapes do not fit.
    """


class TooFewVectorsError(GeometryError):
    """There are fewer vectors than the quantity needs."""


class NoDirectionError(GeometryError):
    """Some vectors are zero or not finite, so they have no direction.

    Attributes:
        rows: Indices of these vectors, ascending.
    """

    def __init__(self, message: str, rows: list[int]) -> None:
        super().__init__(message)
        self.rows = rows


class CaptureError(DispersionError):
    """A model's hidden states cannot be captured.

    For example, the model has no decoder blocks, its forward pass never reached a layer, or the
    model runs in evaluation mode during training.
    """


class HarnessError(DispersionError):
    """lm-eval cannot load a model or run a task, or a log of an evaluation cannot be read."""


class TrainingError(DispersionError):
    """Base class of errors that stop a training run, such as a non-finite dispersion loss."""


class NonFiniteLossError(TrainingError):
    """A dispersion loss is NaN or infinite.

    Attributes:
        layer: The layer, such as ``layer.3``.
        step: Number of the forward pass in training, from 0.
    """

    def __init__(self, layer: str, step: int) -> None:
        super().__init__(
            f"expected a finite dispersion loss, got a non-finite one at {layer}, forward pass {step}; "
            "lower the learning rate or the weight, or look for NaN in the model's own loss"
        )
        self.layer = layer
        self.step = step


class NonFiniteStateError(DispersionError):
    """A model's hidden states or log-probabilities are NaN or infinite."""


class MissingExtraError(DispersionError, ImportError):
    """An optional dependency is not installed; the message says how to install it."""


def require_extra(extra: str, what: str) -> None:
    """Check that the libraries of an extra of this package are installed.

    Args:
        extra: Name of the extra, a key of ``LIBRARIES``, such as ``audit``.
        what: What needs the libraries, such as "a store"; begins the message.

    Raises:
        MissingExtraError: A library is not installed.
    """
    missing = [name for name in LIBRARIES[extra] if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingExtraError(
            f"{what} needs {', '.join(missing)}, which {'are' if missing[1:] else 'is'} not installed; "
            f"run: pip install 'lmeval-dispersion[{extra}]'"
        )
