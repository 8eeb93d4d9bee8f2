"""The command ``dispersion inspect``: one measure of a model's states."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.installation import cache_folder
from lmeval_dispersion.options import (
    Command,
    add_data,
    add_examples,
    add_model_args,
    add_output,
    add_seed,
)
from lmeval_dispersion.output import Output

MEASURES = {
    "law": "correlate perplexity and dispersion, layer by layer",
    "sublayers": "find the most dispersed layer, to key a kNN-LM",
    "condensation": "measure how similar a text's tokens are, by layer",
    "clusters": "measure distances within and between groups of contexts",
}
_OF_SEVERAL_MODELS = ("law", "condensation", "clusters")


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",") if part)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected whole numbers separated by commas, such as 16,64, got {text!r}"
        ) from None


def _number(about: str, metavar: str = "N") -> dict[str, Any]:
    return {"type": int, "metavar": metavar, "help": about}


def _several(about: str) -> dict[str, Any]:
    return {"type": _numbers, "metavar": "N,N", "help": about}


def _part(about: str, share: float) -> dict[str, Any]:
    text = f"{about}: a file, a Hub data set, or a share of --data (default: {share})"
    return {"metavar": "FILE|HUB_ID", "help": text}


# Measures -> the options that only they take, each a parameter of their functions, which hold the defaults.
_OPTIONS: dict[tuple[str, ...], dict[str, dict[str, Any]]] = {
    tuple(MEASURES): {
        "--segment": _number(
            "number of tokens in a segment or context (default: 512; for clusters 100)", "TOKENS"
        ),
    },
    ("law", "sublayers", "clusters"): {
        "--layer": {
            "action": "append",
            "dest": "layers",
            "metavar": "LAYER",
            "help": "layer to measure: last, all, or a name such as layer.3 or layer.-1.attn; may be "
            "repeated (default: last; for sublayers layer.-1.attn and layer.-1.ffn)",
        },
    },
    ("law", "condensation", "sublayers"): {
        "--segments": _number(
            "number of segments to draw, at most (default: 100000; for condensation 100; for a "
            "kNN-LM 1000)"
        ),
    },
    ("law", "condensation"): {
        "--control": {
            "action": "append",
            "choices": ("untrained", "shuffled"),
            "help": "also measure the model with random weights (untrained), or on tokens in random order "
            "(shuffled); may be repeated (default: none)",
        },
    },
    ("law",): {
        "--bins": _number("number of bins that algorithm 1 of the paper chooses (default: 50)"),
        "--bin-size": _number("number of segments in a bin (default: 100)"),
        "--contexts": _several(
            "numbers of tokens after which the perplexity of a single token is measured (default: "
            "16,64,128,256)"
        ),
        "--held-out": {
            "metavar": "FILE|HUB_ID",
            "help": "a second text, to test the line fitted on --data (default: none)",
        },
    },
    ("sublayers",): {
        "--sizes": _several("numbers of segments in a draw (default: 10,50,100)"),
        "--knn": {
            "action": "store_true",
            "default": None,
            "help": "also compare the perplexity of a kNN-LM keyed by each candidate layer, and by last "
            "(default: false)",
        },
        "--datastore": _part("text from which a kNN-LM takes its neighbours", 0.8),
        "--tune": _part("text on which a kNN-LM's weight and temperature are chosen", 0.1),
        "--test": _part("text on which the perplexity of a kNN-LM is measured", 0.1),
        "--neighbours": _number(
            "number of neighbours that predict a token in a kNN-LM (default: 1024)"
        ),
    },
    ("condensation",): {
        "--last": _number("number of last layers over which models are compared (default: 3)"),
        "--teacher": {
            "metavar": "MODEL",
            "help": "the model from which the others were distilled, to compare them with it "
            "(default: none)",
        },
    },
    ("clusters",): {
        "--ngram": _number("number of tokens in an n-gram (default: 10)"),
        "--occurrences": _number(
            "how often an n-gram must occur; also the number of contexts in its cluster (default: "
            "100)"
        ),
        "--clusters": _number("number of clusters, at most (default: 500)"),
    },
}


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    about = "; ".join(f"{name}: {what}" for name, what in MEASURES.items())
    parser.add_argument("measure", choices=tuple(MEASURES), metavar="MEASURE", help=about)
    about = (
        "Hub id or folder, with @REVISION for another revision than main; sublayers takes one model"
    )
    parser.add_argument("model", nargs="+", metavar="MODEL", help=about)
    add_model_args(parser)
    about = (
        "text: a .txt, .jsonl, .jsonl.gz or .parquet file, or a Hub data set as "
        "ID[:CONFIGURATION][@SPLIT]; law takes several"
    )
    add_data(parser, about, required=True, nargs="+")
    parser.add_argument(
        "--pack",
        action="store_true",
        help="join all texts into one before cutting segments (a .txt file is always one text)",
    )
    about = "folder for finished work, from which the same command resumes (default: in the user's cache)"
    parser.add_argument("--study", type=Path, metavar="FOLDER", help=about)
    add_seed(parser)
    add_output(parser)
    for measures, options in _OPTIONS.items():
        title = "every measure" if len(measures) == len(MEASURES) else ", ".join(measures)
        group = parser.add_argument_group(title)
        for option, settings in options.items():
            group.add_argument(option, **settings)
    add_examples(
        parser,
        "law MODEL --data texts.txt --layer all --control untrained -o law.html",
        "law gpt2 gpt2-medium --data wiki.txt news.txt -o law.svg",
        "sublayers MODEL --data texts.txt --knn",
        "condensation gpt2 gpt2-medium --data texts.txt --segments 200",
        "clusters MODEL --data texts.txt",
    )


def _given(args: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    """The parameters of the measure that the command gives; one of another measure is refused."""
    for measures, options in _OPTIONS.items():
        for option, settings in options.items():
            name = settings.get("dest", option[2:].replace("-", "_"))
            if (value := getattr(args, name)) is None:
                continue
            if args.measure not in measures:
                raise UsageError(
                    f"expected an option that {args.measure} takes, got one of "
                    f"{', '.join(measures)}; leave it out",
                    argument=name,
                )
            yield name, value
    if len(args.model) > 1 and args.measure not in _OF_SEVERAL_MODELS:
        raise UsageError(
            f"expected one model for {args.measure}, got {', '.join(args.model)}; "
            "run the command once for each"
        )
    if len(args.data) > 1 and args.measure != "law":
        raise UsageError(
            f"expected one text for {args.measure}, got {', '.join(args.data)}; "
            "run the command once for each",
            argument="data",
        )


def _share(text: str) -> float | None:
    """A share such as 0.2; None for the name of a text."""
    try:
        return float(text)
    except ValueError:
        return None


def _run(args: argparse.Namespace) -> int:
    """Run a measure; 3 if the text was too short for some draws."""
    output = Output.of(args)
    given = dict(_given(args))
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    import lmeval_dispersion
    from lmeval_dispersion.model.loading import chosen_model
    from lmeval_dispersion.model.texts import Texts

    for name in ("held_out", "datastore", "tune", "test"):
        if name in given:
            given[name] = _share(given[name]) or Texts(given[name], column=args.column)
    if "layers" in given:
        given["layers"] = ",".join(args.layers)
    if "teacher" in given:
        given["teacher"] = chosen_model(args.teacher, args.model_args, args.device)
    models = [chosen_model(text, args.model_args, args.device) for text in args.model]
    texts = [Texts(source, column=args.column) for source in args.data]
    result = getattr(lmeval_dispersion, args.measure)(
        models if args.measure in _OF_SEVERAL_MODELS else models[0],
        texts if args.measure == "law" else texts[0],
        pack=args.pack,
        seed=args.seed,
        folder=args.study or cache_folder("dispersion-runs"),
        quiet=args.quiet,
        **given,
    )
    facts = result.manifest["models"][0]
    left_out = facts.get("left_out_sizes")
    output.write(result.document())
    if left_out:
        print(
            f"dispersion inspect: the text has {facts['pool']} segments, too few for draws of "
            f"{', '.join(map(str, left_out))}; pass more text or a smaller --segment",
            file=sys.stderr,
        )
    return 3 if left_out else 0


COMMANDS: dict[str, Command] = {"inspect": (_add_arguments, _run)}
