"""The commands ``dispersion inspect law``, ``sublayers``, ``condensation`` and ``clusters``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lmeval_dispersion.options import (
    Output,
    add_column,
    add_examples,
    add_layers,
    add_metrics,
    add_output,
    add_seed,
)

_STUDIES = "dispersion-runs"
_LAYERS = "last, all, or a name such as layer.3 or layer.-1.attn"


def add_law_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``dispersion inspect law``."""
    _add_model(parser, several=False)
    _add_data(parser, segment=512)
    how = parser.add_argument_group("protocol")
    how.add_argument("--segments", type=int, default=100_000, metavar="N", help="to draw (default: 100000)")
    add_layers(how, what=_LAYERS, default="last")
    how.add_argument(
        "--bins", type=int, default=50, metavar="N", help="bins that algorithm 1 chooses (default: 50)"
    )
    how.add_argument("--bin-size", type=int, default=100, metavar="N", help="segments a bin (default: 100)")
    how.add_argument(
        "--contexts",
        type=_numbers,
        default=(16, 64, 128, 256),
        metavar="N,N",
        help="context lengths of the last-token variant (default: 16,64,128,256)",
    )
    how.add_argument(
        "--held-out", metavar="FILE|HUB_ID", help="a second text, binned by itself (default: none)"
    )
    how.add_argument("--diff-erank", action="store_true", help="also the effective rank at random weights")
    add_metrics(how)
    _add_controls(how)
    how.add_argument(
        "--keep",
        type=_names,
        metavar="NAME,NAME",
        help="keep in the study's folder: segments (a table), vectors (safetensors), or both (default: none)",
    )
    _add_study(parser)
    add_examples(
        parser, "MODEL --data texts.txt -o law.html", "MODEL --data texts.txt --layer layer.3 --layer last"
    )


def run_law(args: argparse.Namespace) -> int:
    """Run ``dispersion inspect law``."""
    from lmeval_dispersion.laboratory.inputs import as_texts

    held_out = None if args.held_out is None else as_texts(args.held_out, args.column)
    names = ("segments", "bins", "bin_size", "contexts", "diff_erank", "metrics", "control", "keep")
    options = {name: getattr(args, name) for name in names}
    return _analyse(args, "law", held_out=held_out, layers=_layers(args, "last"), **options)


def add_sublayers_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``dispersion inspect sublayers``."""
    _add_model(parser, several=False)
    _add_data(parser, segment=512)
    how = parser.add_argument_group("protocol")
    add_layers(how, what="a candidate, such as layer.3.attn", default="layer.-1.attn and layer.-1.ffn")
    how.add_argument(
        "--sizes",
        type=_numbers,
        default=(10, 50, 100),
        metavar="N,N",
        help="segments a draw (default: 10,50,100)",
    )
    how.add_argument("--repeats", type=int, default=10, metavar="N", help="draws of each size (default: 10)")
    how.add_argument("--knn", action="store_true", help="build a kNN-LM from each candidate and measure it")
    how.add_argument(
        "--knn-tokens", type=int, default=100_000, metavar="N", help="of the datastore (default: 100000)"
    )
    _add_study(parser)
    add_examples(
        parser,
        "MODEL --data texts.txt",
        "MODEL --data texts.txt --layer layer.3.attn --layer layer.3.ffn --knn -o sublayers.html",
    )


def run_sublayers(args: argparse.Namespace) -> int:
    """Run ``dispersion inspect sublayers``; 3 where the text was too short for the largest draws."""
    names = ("sizes", "repeats", "knn", "knn_tokens")
    layers = _layers(args, "layer.-1.attn", "layer.-1.ffn")
    return _analyse(args, "sublayers", layers=layers, **{name: getattr(args, name) for name in names})


def add_condensation_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``dispersion inspect condensation``."""
    _add_model(parser, several=True)
    _add_data(parser, segment=512)
    how = parser.add_argument_group("protocol")
    how.add_argument("--texts", type=int, default=100, metavar="N", help="texts to draw (default: 100)")
    how.add_argument(
        "--tokens", type=int, default=512, metavar="N", help="tokens compared of a text (default: 512)"
    )
    how.add_argument(
        "--last", type=int, default=3, metavar="N", help="last depths that the summary averages (default: 3)"
    )
    how.add_argument("--released", action="store_true", help="also the released code's numbers")
    _add_controls(how)
    _add_study(parser)
    add_examples(
        parser, "MODEL --data texts.txt -o condensation.html", "gpt2 gpt2-medium --data texts.txt --texts 200"
    )


def run_condensation(args: argparse.Namespace) -> int:
    """Run ``dispersion inspect condensation``."""
    names = ("texts", "tokens", "last", "released", "control")
    return _analyse(args, "condensation", **{name: getattr(args, name) for name in names})


def add_clusters_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``dispersion inspect clusters``."""
    _add_model(parser, several=True)
    _add_data(parser, segment=None)
    how = parser.add_argument_group("protocol")
    how.add_argument("--ngram", type=int, default=10, metavar="N", help="tokens of an n-gram (default: 10)")
    how.add_argument(
        "--occurrences", type=int, default=100, metavar="N", help="that it must have (default: 100)"
    )
    how.add_argument("--contexts", type=int, default=100, metavar="N", help="a cluster (default: 100)")
    how.add_argument(
        "--context", type=int, default=100, metavar="N", help="tokens of a context (default: 100)"
    )
    how.add_argument("--clusters", type=int, default=500, metavar="N", help="the most (default: 500)")
    add_layers(how, what=_LAYERS, default="last")
    _add_study(parser)
    add_examples(parser, "MODEL --data texts.txt -o clusters.html", "MODEL --data texts.txt --layer all")


def run_clusters(args: argparse.Namespace) -> int:
    """Run ``dispersion inspect clusters``."""
    names = ("ngram", "occurrences", "contexts", "context", "clusters")
    options = {name: getattr(args, name) for name in names}
    return _analyse(args, "clusters", layers=_layers(args, "last"), **options)


def _layers(args: argparse.Namespace, *default: str) -> str:
    """The layers as a study's settings keep them, so that a study started from Python can be resumed."""
    return ",".join(args.layer or default)


def _analyse(args: argparse.Namespace, kind: str, **options: Any) -> int:
    output = Output.of(args)
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from lmeval_dispersion import laboratory
    from lmeval_dispersion.laboratory.inputs import as_texts
    from lmeval_dispersion.laboratory.reports.documents import result_document
    from lmeval_dispersion.laboratory.study import Processes, Under

    if hasattr(args, "segment"):
        options["segment"] = args.segment
    result = getattr(laboratory, kind)(
        _models(args),
        as_texts(args.data, args.column),
        pack=args.pack,
        seed=args.seed,
        batch=args.batch_size,
        folder=args.study or Under(Path(_STUDIES)),
        quiet=args.quiet,
        **options,
    )
    if Processes().first:
        output.write(result_document(result))
    if result.manifest.get("left_out_sizes"):
        left_out = ", ".join(map(str, result.manifest["left_out_sizes"]))
        print(
            f"dispersion {kind}: the text has {result.manifest['pool']} segments, too few for draws of "
            f"{left_out}; pass more text or a smaller --segment",
            file=sys.stderr,
        )
        return 3
    return 0


def _models(args: argparse.Namespace) -> Any:
    from lmeval_dispersion.model.loading import ModelChoice

    choices = []
    for text in args.model if isinstance(args.model, list) else [args.model]:
        name, _, revision = text.partition("@") if not Path(text).exists() else (text, "", "")
        choices.append(
            ModelChoice(
                name,
                revision or None,
                args.dtype,
                args.quantize,
                args.adapter,
                args.device,
                args.trust_remote_code,
            )
        )
    return choices if isinstance(args.model, list) else choices[0]


def _numbers(text: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in text.split(",") if part)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected whole numbers with commas, got {text!r}") from None
    return numbers


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _add_controls(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--control",
        action="append",
        choices=("untrained", "shuffled"),
        help="also run the model at random weights, or each text's tokens in random order; may be repeated "
        "(default: none)",
    )


def _add_model(parser: argparse.ArgumentParser, several: bool) -> None:
    what = "Hub id or folder, with @REVISION where it is not the main one"
    if several:
        parser.add_argument("model", nargs="+", metavar="MODEL", help=what)
    else:
        parser.add_argument("model", metavar="MODEL", help=what)
    group = parser.add_argument_group("model")
    group.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "float16", "bfloat16"),
        help="of the weights (default: the checkpoint's own)",
    )
    group.add_argument(
        "--quantize", choices=("4bit", "8bit"), help="through bitsandbytes (default: not at all)"
    )
    group.add_argument(
        "--adapter", metavar="HUB_ID|FOLDER", help="a PEFT adapter to put on it (default: none)"
    )
    group.add_argument(
        "--device",
        metavar="DEVICE",
        help="cpu, cuda:1, …; auto spreads the model (default: the first GPU, else the CPU)",
    )
    group.add_argument("--trust-remote-code", action="store_true", help="run the checkpoint's own code")


def _add_data(parser: argparse.ArgumentParser, segment: int | None) -> None:
    group = parser.add_argument_group("text")
    group.add_argument(
        "--data",
        required=True,
        metavar="FILE|HUB_ID",
        help=".txt, .jsonl, .jsonl.gz or .parquet, or a Hub data set, ID[:CONFIGURATION][@SPLIT]",
    )
    add_column(group)
    group.add_argument("--pack", action="store_true", help="join all texts to one stream (.txt always is)")
    if segment is not None:
        group.add_argument(
            "--segment",
            type=int,
            default=segment,
            metavar="TOKENS",
            help=f"length of one (default: {segment})",
        )


def _add_study(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("study")
    group.add_argument(
        "--study",
        type=Path,
        metavar="FOLDER",
        help=f"where it is kept; the same command resumes it (default: a folder in {_STUDIES}/)",
    )
    group.add_argument(
        "--batch-size", type=int, metavar="N", help="segments a forward pass (default: by memory)"
    )
    add_seed(group)
    add_output(group)


Command = tuple[Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int]]

COMMANDS: dict[str, Command] = {
    "law": (add_law_arguments, run_law),
    "sublayers": (add_sublayers_arguments, run_sublayers),
    "condensation": (add_condensation_arguments, run_condensation),
    "clusters": (add_clusters_arguments, run_clusters),
}
