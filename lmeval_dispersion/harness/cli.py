"""The commands ``dispersion enable``, ``run``, ``embed`` and ``tokens``."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from lmeval_dispersion.arguments import add_options, given_of
from lmeval_dispersion.asking import Judge
from lmeval_dispersion.errors import MissingExtraError, UsageError
from lmeval_dispersion.harness import install
from lmeval_dispersion.harness.arguments import AnswerTokens, Embedding
from lmeval_dispersion.harness.failures import sentences
from lmeval_dispersion.model_args import key_values
from lmeval_dispersion.options import Command, add_examples, add_quiet
from lmeval_dispersion.output import Output


def _enable_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action",
        nargs="?",
        default="on",
        choices=("on", "off", "status", "path"),
        help="on (the default): write the tasks into lm-eval's folder; off: remove them; status: say whether "
        "lm_eval finds them; path: write nothing into lm-eval, and print a folder for lm_eval's "
        "--include_path",
    )
    add_examples(
        parser,
        "&& lm_eval --model hf --model_args pretrained=gpt2 --tasks mmlu_dispersion",
        "off && pip uninstall lmeval-dispersion",
        "path | xargs -I{} lm_eval --include_path {} --tasks arc_easy_dispersion --model hf",
    )


def _enable(args: argparse.Namespace) -> int:
    if args.action == "path":
        print(install.tasks_path())
        return 0
    before = install.status()
    if args.action == "status":
        print(_state(before))
    elif args.action == "off":
        install.disable()
        was_off = before.state == "disabled"
        print("already disabled" if was_off else f"disabled: removed {before.folder}")
    else:
        install.enable()
        done = "already enabled" if before.state == "enabled" else "enabled"
        print(f"{done}: {before.files} task files in {before.folder}")
        print(
            "before uninstalling, run: dispersion enable off\n"
            "try: lm_eval --model hf --model_args pretrained=... --tasks mmlu_dispersion",
            file=sys.stderr,
        )
    return 0


def _state(status: install.Status) -> str:
    """Whether the stock lm_eval finds the tasks, in a sentence."""
    if status.state == "enabled":
        return f"enabled: {status.files} task files in {status.folder}"
    if status.state == "out of date":
        return (
            f"out of date: {status.folder} was written by another version; run `dispersion enable`"
        )
    return f"disabled: `dispersion enable` would write {status.files} task files to {status.folder}"


def _run_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "dispersion run [lm-eval's own arguments]"
    parser.prefix_chars = "\0"  # every argument, options included, belongs to lm-eval
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
    try:
        from lm_eval.__main__ import cli_evaluate

        from lmeval_dispersion.harness import recording, saving
        from lmeval_dispersion.harness.records import METRICS
        from lmeval_dispersion.harness.seams import before_weights, folded_tables, more_tasks
        from lmeval_dispersion.model.load_report import warned_loads
    except ImportError as error:
        raise MissingExtraError(
            f"lm-eval cannot be loaded ({error}); run: pip install 'lmeval-dispersion[models]'"
        ) from error
    before = sys.argv
    sys.argv = ["lm-eval", *arguments]
    ours = None if install.status().state == "enabled" else install.tasks_path()
    adapter = any(
        "peft" in argument or argument.startswith(("--config", "-C")) for argument in arguments
    )
    try:
        with (
            sentences(),
            more_tasks(ours),
            warned_loads(adapter=adapter),
            before_weights(recording.check_choice),
            folded_tables(tuple(METRICS)),
        ):
            cli_evaluate()
    finally:
        sys.argv = before
    return 3 if saving.failures else 0


def _embed_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, Embedding, "model")
    add_options(parser, Embedding, "texts", nargs="?")
    names = ("output", "layer", "tasks", "column", "model_args", "device")
    add_options(parser, Embedding, *names, dashed=False)
    add_quiet(parser)
    group = parser.add_argument_group("from the samples of a finished lm-eval run, on any backend")
    group.add_argument(
        "--from-samples",
        metavar="RESULTS",
        help="results of MODEL from lm-eval with --log_samples, in place of a file of texts (default: none)",
    )
    add_options(group, Judge)
    group.add_argument(
        "--force",
        action="store_true",
        help="continue even if documents are missing or MODEL's answers differ from the logged ones",
    )
    add_examples(
        parser,
        "Qwen/Qwen2.5-0.5B questions.jsonl --column question -o store",
        "./my-model texts.txt --layer last --layer layer.-2 -o store",
        "Qwen/Qwen2.5-0.5B --from-samples results -o stores",
    )


def _embed(args: argparse.Namespace) -> int:
    if (args.texts is None) == (args.from_samples is None):
        raise UsageError(
            "expected either a file of texts or --from-samples RESULTS, got "
            f"{'neither' if args.texts is None else 'both'}; see `dispersion embed --help`"
        )
    if args.from_samples is None:
        from lmeval_dispersion.harness.embedding.texts import embed

        folder = embed(**given_of(Embedding, args))
    else:
        from lmeval_dispersion.harness.embedding.samples import stores_from_samples

        arguments = {"pretrained": args.model, "dtype": "auto", **key_values(args.model_args)}
        if args.device is not None:
            arguments.setdefault("device", args.device)
        folder = stores_from_samples(
            args.from_samples,
            arguments,
            args.output,
            layers=args.layer,
            tasks=args.tasks.split(",") if args.tasks else None,
            judge=args.metric,
            force=args.force,
        )
    print(folder)
    if not args.quiet:
        print(f"next: dispersion audit {folder}", file=sys.stderr)
    return 0


def _tokens_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, AnswerTokens, "tasks")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="file to write (default: standard output)"
    )
    add_options(parser, AnswerTokens, "tokenizer")
    parser.set_defaults(format="table")
    add_quiet(parser)
    base = parser.add_argument_group(
        "from a base model, which is run on up to 100 prompts without answers"
    )
    add_options(base, AnswerTokens, "base", "data", "column", "device")
    prompts = parser.add_argument_group("as for lm_eval")
    names = ("num_fewshot", "include_path", "apply_chat_template")
    add_options(prompts, AnswerTokens, *names, dashed=False)
    add_examples(
        parser,
        "gsm8k --tokenizer Qwen/Qwen2.5-0.5B",
        "my_task --include_path tasks -o my_task.yaml",
        "gsm8k --base Qwen/Qwen2.5-0.5B -o gsm8k.yaml",
    )


def _tokens(args: argparse.Namespace) -> int:
    output = Output.of(args)
    if args.tasks:
        output.say(f"dispersion tokens: loading the documents of {args.tasks} with lm-eval …")
        # It hints at options that count for no answer.
        logging.getLogger("lm_eval").setLevel(logging.ERROR)
    from lmeval_dispersion.harness.answers import tokens

    answer_tokens = tokens(**given_of(AnswerTokens, args))
    output.write_text(answer_tokens.text)
    if answer_tokens.note:
        output.say(f"note: {answer_tokens.note}")
    if args.output:
        print(answer_tokens.head)
        output.say(f"next: `screen-checkpoints CHECKPOINT… --task {args.output}`")
    return 0


COMMANDS: dict[str, Command] = {
    "enable": (_enable_arguments, _enable),
    "run": (_run_arguments, _run),
    "embed": (_embed_arguments, _embed),
    "tokens": (_tokens_arguments, _tokens),
}
