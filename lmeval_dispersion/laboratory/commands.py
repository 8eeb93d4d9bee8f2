"""The command ``dispersion inspect``: one measure of a model's states."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import fields
from typing import Any

from lmeval_dispersion.arguments import add_options, shown_default, texts_of
from lmeval_dispersion.asking import Loading, TextColumn
from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.installation import cache_folder
from lmeval_dispersion.laboratory.arguments import (
    Clusters,
    Condensation,
    Law,
    StudyOptions,
    Sublayers,
)
from lmeval_dispersion.options import Command, add_examples, add_output
from lmeval_dispersion.output import Output

MEASURES: dict[str, type[StudyOptions]] = {
    "law": Law,
    "sublayers": Sublayers,
    "condensation": Condensation,
    "clusters": Clusters,
}
_SETTLED = ("batch", "quiet")  # by memory, and by --quiet


def _takers() -> dict[str, list[str]]:
    """The measures that take each option, by the option's name in Python."""
    takers: dict[str, list[str]] = {}
    for measure, declared in MEASURES.items():
        for field in fields(declared):
            if field.kw_only and field.name not in _SETTLED:
                takers.setdefault(field.name, []).append(measure)
    return takers


def _about(measure: str) -> str:
    """What a measure is, by the first line of its declaration."""
    line = (MEASURES[measure].__doc__ or "").partition(".")[0]
    return f"{measure}: {line[0].lower()}{line[1:]}"


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    about = "; ".join(map(_about, MEASURES))
    parser.add_argument("measure", choices=tuple(MEASURES), metavar="MEASURE", help=about)
    add_options(parser, Law, "models", nargs="+")
    add_options(parser, Loading, "model_args", "device", dashed=False)
    add_options(parser, Law, "data", nargs="+", action="extend")
    add_options(parser, TextColumn)
    add_output(parser)
    groups: dict[str, argparse._ArgumentGroup] = {}
    for name, measures in _takers().items():
        title = "every measure" if len(measures) == len(MEASURES) else ", ".join(measures)
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        declared = MEASURES[measures[0]]
        text = texts_of(declared)[name]
        if "Default: " not in text:
            text += f" Default: {_default(name, measures)}."
        add_options(groups[title], declared, name, default=None, help=text)
    add_examples(
        parser,
        "law MODEL --data texts.txt --layer all --control untrained -o law.html",
        "law gpt2 gpt2-medium --data wiki.txt news.txt -o law.svg",
        "sublayers MODEL --data texts.txt --knn",
        "condensation gpt2 gpt2-medium --data texts.txt --segments 200",
        "clusters MODEL --data texts.txt",
    )


def _default(name: str, measures: list[str]) -> str:
    """An option's default in words, with those of the measures where another holds."""
    defaults = [shown_default(getattr(MEASURES[measure], name)) or "none" for measure in measures]
    words = defaults[0]
    for measure, default in zip(measures, defaults, strict=True):
        if default != defaults[0]:
            words += f", for {measure} {default}"
    return words


def _given(args: argparse.Namespace) -> dict[str, Any]:
    """The parameters of the measure that the command gives; one of another measure is refused."""
    given = {}
    for name, measures in _takers().items():
        value = getattr(args, name)
        if value is None:
            continue
        if args.measure not in measures:
            raise UsageError(
                f"expected an option that {args.measure} takes, got one that belongs to "
                f"{', '.join(measures)}; leave this option out",
                argument=name,
            )
        given[name] = value
    return given


def _run(args: argparse.Namespace) -> int:
    """Run a measure; 3 if the text was too short for some draws."""
    output = Output.of(args)
    given = _given(args)
    declared = {field.name for field in fields(MEASURES[args.measure])}
    is_of_several = "models" in declared
    if len(args.models) > 1 and not is_of_several:
        raise UsageError(
            f"expected one model for {args.measure}, got {', '.join(args.models)}; "
            "run the command once for each model"
        )
    if len(args.data) > 1 and args.measure != "law":
        raise UsageError(
            f"expected one text for {args.measure}, got {', '.join(args.data)}; "
            "run the command once for each text",
            argument="data",
        )
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    import lmeval_dispersion
    from lmeval_dispersion.errors import count
    from lmeval_dispersion.model.loading import chosen_model
    from lmeval_dispersion.model.texts import Texts

    for name in ("held_out", "datastore", "tune", "test"):
        if isinstance(given.get(name), str):
            given[name] = Texts(given[name], column=args.column)
    if "layers" in given:
        given["layers"] = ",".join(args.layers)
    if "teacher" in given:
        given["teacher"] = chosen_model(args.teacher, args.model_args, args.device)
    given.setdefault("folder", cache_folder("dispersion-runs"))
    models = [chosen_model(text, args.model_args, args.device) for text in args.models]
    texts = [Texts(source, column=args.column) for source in args.data]
    result = getattr(lmeval_dispersion, args.measure)(
        models if is_of_several else models[0],
        texts if args.measure == "law" else texts[0],
        quiet=args.quiet,
        **given,
    )
    facts = result.manifest["models"][0]
    left_out = facts.get("left_out_sizes")
    output.write(result.document())
    if left_out:
        print(
            f"dispersion inspect: the text has {count(facts['pool'], 'segment')}, too few for "
            f"draws of {' or '.join(map(str, left_out))}; pass more text or a smaller --segment",
            file=sys.stderr,
        )
    return 3 if left_out else 0


COMMANDS: dict[str, Command] = {"inspect": (_add_arguments, _run)}
