"""The commands ``dispersion inspect law``, ``sublayers``, ``condensation`` and ``clusters``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from lmeval_dispersion.installation import cache_folder
from lmeval_dispersion.options import (
    Command,
    add_column,
    add_examples,
    add_layers,
    add_model_args,
    add_output,
    add_seed,
)
from lmeval_dispersion.output import Output


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",") if part)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected whole numbers with commas, got {text!r}") from None


def _number(default: int, about: str, metavar: str = "N") -> dict[str, Any]:
    return {"type": int, "default": default, "metavar": metavar, "help": f"{about} (default: {default})"}


def _several(default: tuple[int, ...], about: str) -> dict[str, Any]:
    shown = ",".join(map(str, default))
    return {"type": _numbers, "default": default, "metavar": "N,N", "help": f"{about} (default: {shown})"}


_CONTROL = {
    "action": "append",
    "choices": ("untrained", "shuffled"),
    "help": "also run the model with random weights, or each text's tokens in random order; may be repeated "
    "(default: none)",
}
_HELD_OUT = {"metavar": "FILE|HUB_ID", "help": "a second text, binned separately (default: none)"}


class _Analysis(NamedTuple):
    """An analysis on the command line: options for its function's parameters, and other help."""

    options: Mapping[str, dict[str, Any]]
    layers: tuple[str, ...]  # default; empty if it always takes every depth
    examples: tuple[str, ...]
    several_models: bool = False


_ANALYSES = {
    "law": _Analysis(
        {
            "--segment": _number(512, "tokens of a segment", "TOKENS"),
            "--segments": _number(100_000, "segments to draw"),
            "--bins": _number(50, "bins that algorithm 1 chooses"),
            "--bin-size": _number(100, "segments a bin"),
            "--contexts": _several((16, 64, 128, 256), "context lengths of the last-token variant"),
            "--held-out": _HELD_OUT,
            "--control": _CONTROL,
        },
        ("last",),
        ("MODEL --data texts.txt -o law.html", "MODEL --data texts.txt --layer layer.3 --layer last"),
    ),
    "sublayers": _Analysis(
        {
            "--segment": _number(512, "tokens of a segment", "TOKENS"),
            "--sizes": _several((10, 50, 100), "segments a draw"),
        },
        ("layer.-1.attn", "layer.-1.ffn"),
        (
            "MODEL --data texts.txt",
            "MODEL --data texts.txt --layer layer.3.attn --layer layer.3.ffn -o sublayers.html",
        ),
    ),
    "condensation": _Analysis(
        {
            "--segment": _number(512, "tokens of a segment", "TOKENS"),
            "--segments": _number(100, "segments to draw"),
            "--control": _CONTROL,
        },
        (),
        ("MODEL --data texts.txt -o condensation.html", "gpt2 gpt2-medium --data texts.txt --segments 200"),
        several_models=True,
    ),
    "clusters": _Analysis(
        {
            "--segment": _number(100, "length of a context", "TOKENS"),
            "--ngram": _number(10, "tokens of an n-gram"),
            "--occurrences": _number(100, "times that an n-gram must occur, and contexts of a cluster"),
            "--clusters": _number(500, "clusters at most"),
        },
        ("last",),
        ("MODEL --data texts.txt -o clusters.html", "MODEL --data texts.txt --layer all"),
        several_models=True,
    ),
}


def _add_arguments(kind: str, parser: argparse.ArgumentParser) -> None:
    analysis = _ANALYSES[kind]
    about = "Hub id or folder, with @REVISION where it is not the main one"
    parser.add_argument("model", nargs="+" if analysis.several_models else 1, metavar="MODEL", help=about)
    model, text, protocol, study = map(parser.add_argument_group, ("model", "text", "protocol", "study"))
    add_model_args(model)
    for option, settings in analysis.options.items():
        protocol.add_argument(option, **settings)
    about = ".txt, .jsonl, .jsonl.gz or .parquet, or a Hub data set, ID[:CONFIGURATION][@SPLIT]"
    text.add_argument("--data", required=True, metavar="FILE|HUB_ID", help=about)
    add_column(text)
    text.add_argument("--pack", action="store_true", help="join all texts into one stream (.txt always is)")
    if analysis.layers:
        about = "last, all, or a name such as layer.3 or layer.-1.attn"
        add_layers(protocol, what=about, default=" and ".join(analysis.layers))
    about = "folder of the study; the same command resumes it (default: in the user's cache)"
    study.add_argument("--study", type=Path, metavar="FOLDER", help=about)
    add_seed(study)
    add_output(study)
    add_examples(parser, *analysis.examples)


def _run(kind: str, args: argparse.Namespace) -> int:
    """Run an analysis; 3 if the text was too short for some draws."""
    output = Output.of(args)
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    import lmeval_dispersion
    from lmeval_dispersion.laboratory.study import StudyRoot
    from lmeval_dispersion.model.loading import chosen_model
    from lmeval_dispersion.model.texts import Texts

    analysis = _ANALYSES[kind]
    names = (option[2:].replace("-", "_") for option in analysis.options)
    options = {name: getattr(args, name) for name in names}
    if options.get("held_out") is not None:
        options["held_out"] = Texts(args.held_out, column=args.column)
    if analysis.layers:
        # In the form of a study's settings, so that one started from Python can be resumed.
        options["layers"] = ",".join(args.layer or analysis.layers)
    models = [chosen_model(text, args.model_args, args.device) for text in args.model]
    result = getattr(lmeval_dispersion, kind)(
        models if analysis.several_models else models[0],
        Texts(args.data, column=args.column),
        pack=args.pack,
        seed=args.seed,
        folder=args.study or StudyRoot(cache_folder("dispersion-runs")),
        quiet=args.quiet,
        **options,
    )
    left_out = result.manifest.get("left_out_sizes")
    output.write(result.document())
    if left_out:
        print(
            f"dispersion inspect {kind}: the text has {result.manifest['pool']} segments, too few for draws "
            f"of {', '.join(map(str, left_out))}; pass more text or a smaller --segment",
            file=sys.stderr,
        )
    return 3 if left_out else 0


COMMANDS: dict[str, Command] = {
    kind: (partial(_add_arguments, kind), partial(_run, kind)) for kind in _ANALYSES
}
