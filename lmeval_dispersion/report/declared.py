"""The base of every result: rows with their display, and one template for the sentences.

A result is a dataclass that derives from `Report`. Its tables are rows of dataclasses whose fields
carry a `Col`, its charts are Vega-Lite specifications, and its sentences are in a Jinja template
next to the module of its class. Every format of the report is made of these three.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from lmeval_dispersion.errors import (
    MissingExtraError,
    UnknownNameError,
    UsageError,
    count,
    shortened,
)
from lmeval_dispersion.layouts import nearest
from lmeval_dispersion.report.cells import json_value, public_fields, shown
from lmeval_dispersion.report.document import (
    LIMITS,
    Chart,
    Document,
    Facts,
    Note,
    Part,
    Row,
    Section,
    Table,
    Text,
    fields_of,
)
from lmeval_dispersion.report.forms import file_bytes, form_of, json_lines, render

if TYPE_CHECKING:
    import jinja2
    import pandas as pd

_LINE = 160  # characters of a sentence in a repr
_MARK = "\ue000"  # around a part's number, its placeholder in a rendered template
# Signs that would be markup inside a value -> placeholders until the template is parsed.
_HIDE = str.maketrans("#>`", "\ue001\ue002\ue003")
_REVEAL = str.maketrans("\ue001\ue002\ue003", "#>`")
# Control characters, separators of lines, placeholders of this module, and signs that change the direction of
# writing.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ue000-\ue003]+")
_HEADING = re.compile(r"## (?P<heading>.*?)(?: \[(?P<name>[\w-]+)\])?(?P<details> \(details\))?")


class Report:
    """A result that can be rendered as a report, in every format of the commands.

    The template (:attr:`template`, next to the class's module) is written line by line::

        # Title
        A sentence of the answer, and another on the next line.
        ## Heading [anchor] (details)
        A paragraph; an empty line ends it.
        > warning: A caveat, in a highlighted paragraph.
        > note: A remark, in a highlighted paragraph.
        {{ tables.ranking }}
        {{ charts.ranking }}
        ## Limits
        One sentence per line on what the numbers do not support.

    In the template, ``r`` is the result, ``tables`` and ``charts`` are what the methods of these
    names return, and each key of :meth:`context` is a variable. ``facts(name=value)`` inserts a
    list of names and values, ``warning(text)`` a warning. Filters are ``x | shown(".3f")`` (a value
    as text), ``names | listed`` ("a, b and c") and ``n | count("text")`` ("1 text", "2 texts").

    Attributes:
        template: File name of the template.
        schema: Name and version of the JSON's schema, such as ``screen-checkpoints/3``.
        libraries: Packages whose versions affect the numbers; the report names their versions.
        guide: The documentation page that explains the report, such as
            ``docs/reference/screening.md``.
        each: Name of the field whose items ``len()``, indexing and iteration use; if empty, they
            use :meth:`rows`.
    """

    template: ClassVar[str]
    schema: ClassVar[str] = ""
    libraries: ClassVar[Sequence[str]] = ()
    guide: ClassVar[str] = ""
    each: ClassVar[str] = ""

    #: Names that only the making of reports needs: `dir` of a result leaves them out.
    _INNER: ClassVar[Set[str]] = {
        "template",
        "schema",
        "libraries",
        "guide",
        "each",
        "context",
        "document",
    }

    def __dir__(self) -> list[str]:
        return sorted(set(super().__dir__()) - self._INNER)

    def __len__(self) -> int:
        return len(self._items())

    def __bool__(self) -> bool:
        return True  # a result without items is true as well

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items())

    def __contains__(self, name: object) -> bool:
        return name in [_name(item) for item in self]

    def __getitem__(self, name: str | int) -> Any:
        """An item by its name, its label, slice or first text, or by its place."""
        items = self._items()
        if isinstance(name, int):
            return items[name]
        names = [_name(item) for item in items]
        if name not in names:
            expected = "no name, as this result is empty"
            if names:
                expected = f"a name such as {', '.join(names[:5])}"
            raise UnknownNameError(f"expected {expected}, got {name!r}{nearest(name, names)}")
        return items[names.index(name)]

    def _items(self) -> Sequence[Any]:
        if self.each:
            items: Sequence[Any] = getattr(self, self.each)
            return items
        return self.rows()

    def tables(self) -> Mapping[str, Table]:
        """Return the tables by name.

        CSV and the data frame hold the rows of the first one, unless :meth:`rows` is overridden.
        """
        return {}

    def charts(self) -> Mapping[str, Chart]:
        """Return the charts by name; :meth:`plot` and pictures show the first one."""
        return {}

    def context(self) -> Mapping[str, Any]:
        """Return further values for the template, by name."""
        return {}

    def rows(self) -> Sequence[Row]:
        """Return the rows of CSV and of the data frame, by default those of the first table."""
        return next((table.rows for table in self.tables().values()), ())

    def to_dict(self) -> dict[str, Any]:
        """Return the content of the report's JSON: schema, answer, and the result's public fields.

        NaN and infinity become None.
        """
        content = json_value(public_fields(self))
        return {"schema": self.schema, "answer": self.answer(), **content}

    def answer(self) -> list[str]:
        """Return the report's answer: the paragraphs at its top, of one or two sentences each."""
        return list(self.document().answer)

    def document(self) -> Document:
        """Return the report as a `Document`, from which every format is made."""
        charts = self.charts()
        written = _written(self, charts)
        return replace(
            written,
            rows=self.rows(),
            contract=lambda: json_lines(self.to_dict()),
            libraries=self.libraries,
            guide=self.guide,
            short=True,
            figure=next(iter(charts.values()), None),
        )

    def to_frame(self) -> pd.DataFrame:
        """Return the rows of CSV as a data frame with pandas' nullable types.

        Raises:
            MissingExtraError: pandas is not installed.
        """
        try:
            import pandas as pd
        except ImportError as error:
            raise MissingExtraError(
                "a data frame needs pandas, which is not installed; run: pip install "
                "'lmeval-dispersion[audit]' (or: pip install pandas)"
            ) from error
        return nullable(pd.DataFrame(list(self.rows())))

    def to_markdown(self) -> str:
        """Return the report as Markdown, as ``--format markdown`` prints it."""
        return render(self.document(), "markdown")

    def to_html(self) -> str:
        """Return the report as a self-contained page with charts, as ``--format html`` prints it.

        Raises:
            MissingExtraError: A library that pages need is not installed.
        """
        return render(self.document(), "html")

    def save(self, path: str | Path) -> None:
        """Write the report to a file, in the format of its suffix: .txt, .md, .csv, .json or .html.

        With .svg, .png or .pdf only the first chart is written, as a picture.

        Raises:
            UsageError: The suffix is unknown, or it is that of a picture and the report has no
                chart.
            MissingExtraError: The format needs a library that is not installed.
            DispersionError: The file cannot be written.
        """
        from lmeval_dispersion.files import write_whole

        write_whole(Path(path), file_bytes(self.document(), form_of(Path(path))))

    def plot(self) -> VegaLite:
        """Return the report's first chart, which notebooks draw; :meth:`charts` has all of them.

        Raises:
            UsageError: The report has no chart.
        """
        charts = self.charts()
        if not charts:
            raise UsageError(
                f"expected a result with a chart, but {type(self).__name__} has none; use "
                "to_markdown() or to_frame()"
            )
        return VegaLite(next(iter(charts.values())).specification())

    def _repr_html_(self) -> str:
        from lmeval_dispersion.report.html_page import html_fragment

        return html_fragment(self.document())

    def __repr__(self) -> str:
        document = self.document()
        lines = [f"<{type(self).__name__}> {document.title}"]
        lines += [shortened(sentence, _LINE) for sentence in document.answer]
        return "\n  ".join(lines)


def _name(item: Any) -> str:
    """The name of an item: its label, its slice, or its first text."""
    values = item
    if not isinstance(item, Mapping):
        values = {"label": getattr(item, "label", ""), **fields_of(item)}
    texts = (value for value in values.values() if value and isinstance(value, str))
    return str(values.get("label") or values.get("slice") or next(texts, ""))


class VegaLite(dict[str, Any]):
    """A dictionary with a Vega-Lite specification; Jupyter, VS Code and Colab show it as a chart."""

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, Any]:
        return {"application/vnd.vegalite.v5+json": dict(self), "text/plain": "<a Vega-Lite chart>"}


def _written(report: Report, charts: Mapping[str, Chart]) -> Document:
    """Title, answer, sections and limits from the template."""
    folder = Path(sys.modules[type(report).__module__].__file__ or "").parent
    template = _environment(folder).get_template(report.template)
    parts: list[Part] = []
    text = template.render(
        r=report, tables=report.tables(), charts=charts, _parts=parts, **report.context()
    )
    title = ""
    answer: list[str] = []
    limits: list[str] = []
    sections: list[Section] = []
    for heading, lines in _blocks(text):
        if heading is None or heading["heading"] == LIMITS:
            sentences = limits if heading else answer
            for line in filter(None, lines):
                if line.startswith("# "):
                    title = _revealed(line[2:])
                else:
                    sentences.append(_revealed(line))
            continue
        body = list(_body(lines, parts))
        if body:
            words = _revealed(heading["heading"])
            is_details = bool(heading["details"])
            sections.append(Section(words, body, heading["name"] or "", is_details))
    return Document(title, answer, sections, limits)


def _blocks(text: str) -> Iterator[tuple[re.Match[str] | None, list[str]]]:
    """The lines under each heading; under None those above the first heading."""
    heading = None
    lines: list[str] = []
    for line in map(str.strip, text.splitlines()):
        match = _HEADING.fullmatch(line)
        if match:
            yield heading, lines
            heading = match
            lines = []
        else:
            lines.append(line)
    yield heading, lines


def _body(lines: list[str], parts: list[Part]) -> Iterator[Part]:
    """The parts of a section; lines up to an empty line are a paragraph."""
    paragraph: list[str] = []
    for line in [*lines, ""]:
        note = re.match(r"> (?P<kind>note|warning): (?P<text>.*)", line)
        mark = re.fullmatch(f"{_MARK}(\\d+){_MARK}", line)
        if line and not note and not mark:
            paragraph.append(line)
            continue
        if paragraph:
            yield Text(_revealed(" ".join(paragraph)))
            paragraph = []
        if note:
            yield Note(
                _revealed(note["text"]), kind="note" if note["kind"] == "note" else "warning"
            )
        elif mark:
            yield parts[int(mark[1])]


def _revealed(text: str) -> str:
    return text.translate(_REVEAL)


def _finalized(context: jinja2.runtime.Context, value: Any) -> Any:
    """A value as one line of text without control characters; a part as its placeholder."""
    if isinstance(value, (Table, Chart, Text, Note, Facts)):
        parts: list[Part] = context["_parts"]
        parts.append(value)
        return f"\n{_MARK}{len(parts) - 1}{_MARK}\n"
    return _CONTROL.sub(" ", shown(value)).translate(_HIDE)


@functools.cache
def _environment(folder: Path) -> jinja2.Environment:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=jinja2.pass_context(_finalized),
        autoescape=False,
    )
    environment.filters.update(shown=shown, listed=listed, count=count)
    environment.globals.update(facts=_facts, warning=functools.partial(Note, kind="warning"))
    return environment


def _facts(**values: object) -> Facts:
    """Named values of a template, without those that are None."""
    facts = {}
    for name, value in values.items():
        if value is not None:
            facts[name.replace("_", " ")] = value
    return Facts(facts)


def listed(items: Sequence[Any], last: str = "and") -> str:
    """Join items as in a sentence: with commas, and the word ``last`` before the last item.

    >>> listed(["a"]), listed(["a", "b"]), listed(["a", "b", "c"])
    ('a', 'a and b', 'a, b and c')
    """
    words = [shown(item) for item in items]
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} {last} {words[-1]}"


def some(names: Sequence[str], most: int = 5) -> str:
    """Join names as in a sentence: the first ``most``, then the number of the remaining names.

    >>> some(["a", "b", "c"], 2), some(["a", "b"])
    ('a, b and 1 other', 'a and b')
    """
    if len(names) > most:
        names = [*names[:most], count(len(names) - most, "other")]
    return listed(names)


def nullable(frame: pd.DataFrame) -> pd.DataFrame:
    """Return a data frame with pandas' nullable types ``Int64``, ``boolean`` and ``string``.

    Columns of floats stay as they are, with NaN.
    """
    import pandas as pd

    types = {"integer": "Int64", "boolean": "boolean", "string": "string", "empty": "string"}
    changed = {}
    for name, column in frame.items():
        kind = pd.api.types.infer_dtype(column, skipna=True)
        if kind in types:
            changed[name] = types[kind]
    return frame.astype(changed)
