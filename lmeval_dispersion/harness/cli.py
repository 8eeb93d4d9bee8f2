"""``dispersion enable``, ``run`` and ``embed``."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Callable, Sequence

from lmeval_dispersion.errors import DispersionError, MissingExtraError, UsageError
from lmeval_dispersion.harness import install
from lmeval_dispersion.options import add_examples

Command = tuple[Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int]]


def _enable_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_mutually_exclusive_group()
    actions.add_argument("--undo", action="store_true", help="remove what `dispersion enable` wrote")
    actions.add_argument("--status", action="store_true", help="whether the stock lm_eval finds the tasks")
    actions.add_argument(
        "--path", action="store_true", help="write nothing there, print a folder for lm_eval's --include_path"
    )
    add_examples(
        parser,
        "&& lm_eval --model hf --model_args pretrained=gpt2 --tasks mmlu_dispersion",
        "--undo && pip uninstall lmeval-dispersion",
        "--path | xargs -I{} lm_eval --include_path {} --tasks arc_easy_dispersion --model hf",
    )


def _enable(args: argparse.Namespace) -> int:
    if args.undo:
        return _undo()
    if args.status:
        return _status()
    if args.path:
        print(install.tasks_path())
        return 0
    before = install.status().state
    now = install.enable()
    what = "already enabled" if before == "enabled" else "enabled"
    print(f"{what}: {now.files} task files in {now.folder}")
    if now.editable:
        print(
            "lm-eval is an editable checkout: its git status shows this folder as untracked until "
            "`dispersion enable --undo`",
            file=sys.stderr,
        )
    print("before uninstalling: dispersion enable --undo", file=sys.stderr)
    print("try: lm_eval --model hf --model_args pretrained=... --tasks mmlu_dispersion", file=sys.stderr)
    return 0


def _undo() -> int:
    before = install.disable()
    print("already disabled" if before.state == "disabled" else f"disabled: removed {before.folder}")
    return 0


def _status() -> int:
    now = install.status()
    there = {
        "enabled": f"enabled: {now.files} task files in {now.folder}",
        "out of date": f"out of date: {now.folder} was written by another version; run `dispersion enable`",
        "disabled": f"disabled: `dispersion enable` would write {now.files} task files to {now.folder}",
    }
    print(there[now.state])
    return 0


def _run_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "dispersion run [lm-eval's own arguments]"
    parser.prefix_chars = "\0"  # every argument belongs to lm-eval, also those with dashes
    parser.add_argument("arguments", nargs="*", metavar="ARGUMENT", help="as for `lm_eval run`")
    add_examples(
        parser,
        "--model hf --model_args pretrained=gpt2 --tasks mmlu_dispersion --output_path results",
        "ls tasks",
        more="`lm_eval run --help` lists the arguments.",
    )
    parser.set_defaults(show_help=parser.print_help)


def _run(args: argparse.Namespace) -> int:
    arguments: list[str] = list(args.arguments)
    if not arguments or arguments[0] in ("-h", "--help"):
        args.show_help()
        return 0 if arguments else 2
    if arguments[0] not in ("run", "ls", "validate"):
        arguments.insert(0, "run")
    if not any(a == "--include_path" or a.startswith("--include_path=") for a in arguments):
        _check_tasks(arguments)  # a user's own tasks may be called anything
    return _harness(arguments)


def _check_tasks(arguments: Sequence[str]) -> None:
    """Refuse misspelt names of ours with the nearest ones, before lm-eval loads a model."""
    ours = install.task_names()
    for i, argument in enumerate(arguments):
        if argument not in ("--tasks", "-t"):
            continue
        for value in arguments[i + 1 :]:
            if value.startswith("-"):
                break
            for name in value.split(","):
                if "dispersion" not in name or name in ours or "*" in name or os.path.exists(name):
                    continue
                near = difflib.get_close_matches(name, ours, n=3)
                hint = f"did you mean {', '.join(near)}?" if near else "`dispersion run ls tasks` lists them"
                raise UsageError(f"there is no task {name!r}; {hint}")


def _harness(arguments: list[str]) -> int:
    try:
        from lm_eval.__main__ import cli_evaluate

        from lmeval_dispersion.harness import saving
        from lmeval_dispersion.harness.seams import more_tasks
    except ImportError as error:
        raise MissingExtraError(
            "lm-eval cannot be loaded; pip install 'lmeval-dispersion[models]'"
        ) from error
    before = sys.argv
    sys.argv = ["lm-eval", *arguments]
    ours = None if install.status().state == "enabled" else install.tasks_path()
    try:
        with more_tasks(ours):
            cli_evaluate()
    except DispersionError:
        raise
    except Exception as error:
        sentence = failure_sentence(error)
        if sentence is None or os.environ.get("DISPERSION_DEBUG"):
            raise
        raise DispersionError(sentence) from error
    finally:
        sys.argv = before
    return 3 if saving.failures else 0


def _embed_arguments(parser: argparse.ArgumentParser) -> None:
    from lmeval_dispersion.text_run import add_embed_arguments

    add_embed_arguments(parser)
    group = parser.add_argument_group("from samples of lm-eval, whatever backend ran it")
    group.add_argument(
        "--from-samples", metavar="RESULTS", help="results of a run with --log_samples (default: none)"
    )
    group.add_argument(
        "--model",
        dest="samples_model",
        metavar="MODEL",
        help="the model that answered, Hub id or folder (default: none)",
    )
    group.add_argument("--adapter", metavar="ID|FOLDER", help="its PEFT adapter (default: none)")
    group.add_argument(
        "--model-args",
        metavar="K=V,K=V",
        default="",
        help="more arguments of lm-eval's hf model (default: none)",
    )
    group.add_argument(
        "--batch-size", metavar="N", default="8", help="prompts at a time, or auto (default: 8)"
    )
    group.add_argument("--tasks", metavar="NAME,NAME", help="only these tasks (default: all that were run)")
    group.add_argument(
        "--correct", metavar="[FILTER/]METRIC", help="what tells correct answers (default: the task's own)"
    )
    group.add_argument(
        "--backend",
        choices=("hf", "vllm"),
        default="hf",
        help="what runs the prompts (default: hf, in this process)",
    )
    group.add_argument("--base-url", metavar="URL", help="address of the vLLM server (default: none)")
    group.add_argument(
        "--force", action="store_true", help="go on where documents are missing or answers disagree"
    )


def _embed(args: argparse.Namespace) -> int:
    if args.from_samples is None:
        from lmeval_dispersion.text_run import run_embed

        return run_embed(args)
    model = args.samples_model or args.model
    if model is None:
        raise UsageError("expected --model MODEL beside --from-samples: the model that gave the answers")
    from lmeval_dispersion.harness.from_samples import stores_from_samples

    options = {"revision": args.revision, "peft": args.adapter, "device": args.device}
    arguments = {key: value for key, value in options.items() if value is not None}
    arguments |= {"pretrained": model, "dtype": args.dtype}
    for pair in filter(None, args.model_args.split(",")):
        key, equals, value = pair.partition("=")
        if not equals:
            raise UsageError(f"expected --model-args key=value,..., got {pair!r}")
        arguments[key.strip()] = value.strip()
    folder = stores_from_samples(
        args.from_samples,
        arguments,
        args.output,
        layers="+".join(args.layer or []),
        tasks=args.tasks.split(",") if args.tasks else None,
        judge=args.correct,
        batch_size=args.batch_size,
        force=args.force,
        backend=args.backend,
        base_url=args.base_url,
    )
    print(folder)
    print(f"next: dispersion audit {folder}", file=sys.stderr)
    return 0


def failure_sentence(error: Exception) -> str | None:
    """One sentence for what users meet; None for what is a defect and deserves its traceback."""
    text = str(error).strip()
    first = text.splitlines()[0].rstrip(".") if text else type(error).__name__
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if "OutOfMemoryError" in kinds or "out of memory" in text.lower() or isinstance(error, MemoryError):
        return f"out of memory: {first}; lower --batch_size, or try --batch_size auto"
    if text.startswith("Tasks not found"):
        missing = first.partition(": ")[2].split(",")
        near = [n for name in missing for n in difflib.get_close_matches(name.strip(), install.task_names())]
        hint = (
            f"did you mean {', '.join(near[:3])}?"
            if near
            else "`dispersion run ls tasks` lists what there is"
        )
        return f"{first}; {hint}"
    if "chat_template" in text or "chat template" in text:
        return f"{first}; leave --apply_chat_template out, or use a model whose tokenizer has a template"
    if isinstance(error, OSError):
        return f"{first}; check the name of the model or data set, and the network"
    return None


COMMANDS: dict[str, Command] = {
    "enable": (_enable_arguments, _enable),
    "run": (_run_arguments, _run),
    "embed": (_embed_arguments, _embed),
}
