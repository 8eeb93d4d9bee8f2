"""``dispersion tokens``: a task's answer tokens, as a set for the screen.

Counted in the task's documents, or predicted by a base model where answers begin (`--base`).
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.options import add_column, add_examples, add_quiet, add_tasks
from lmeval_dispersion.output import Output
from lmeval_dispersion.store.identity import SUFFIX

QUESTIONS = 100
_SHOWN = 12


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("task", nargs="?", metavar="NAME", help="lm-eval's task or group, or NAME,NAME")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="file to write (default: standard output)"
    )
    parser.add_argument(
        "--tokenizer", metavar="MODEL", help="list the tokens of MODEL's tokenizer (default: the base's)"
    )
    parser.add_argument(
        "--include_path", metavar="FOLDER", help="as for lm-eval: a folder of more tasks (default: none)"
    )
    parser.set_defaults(format="table")
    add_quiet(parser)
    base = parser.add_argument_group(f"from a base model, run on {QUESTIONS} questions without answers")
    base.add_argument("--base", metavar="MODEL", help="Hub id or folder (default: count the task's answers)")
    add_tasks(base, "as NAME above (default: --questions)")
    base.add_argument(
        "--questions", metavar="FILE", help="prompts: text, JSONL or parquet (default: the task's)"
    )
    add_column(base)
    base.add_argument("--revision", metavar="REVISION", help="branch, tag or commit (default: the main one)")
    base.add_argument(
        "--device", metavar="DEVICE", help="cpu, cuda, … (default: the first GPU, else the CPU)"
    )
    base.add_argument("--num_fewshot", type=int, metavar="N", help="as for lm-eval (default: the task's)")
    base.add_argument(
        "--apply_chat_template", action="store_true", help="as for lm-eval: the tokenizer's chat template"
    )
    add_examples(
        parser,
        "gsm8k --tokenizer Qwen/Qwen2.5-0.5B",
        "my_task --include_path tasks -o my_task.yaml",
        "--base Qwen/Qwen2.5-0.5B --task gsm8k -o gsm8k.yaml",
    )


def _run(args: argparse.Namespace) -> int:
    task = args.task or args.tasks
    if bool(task) == bool(args.questions) or (args.questions and not args.base) or (args.task and args.tasks):
        raise UsageError("expected the NAME of a task, or a base with a task or a file of questions")
    output = Output.of(args)
    if task:
        output.say(f"dispersion tokens: asking lm-eval for {task} and its documents …")
        logging.getLogger("lm_eval").setLevel(logging.ERROR)  # hints at options that count for no answer
    head, text, note = answer_file(*(_found(args, task) if args.base else _counted(args, task)))
    output.write_text(text)
    if note:
        output.say(f"note: {note}")
    if output.path:
        print(head)
        output.say(f"next: `screen-checkpoints CHECKPOINT… --task {output.path}`")
    return 0


def counted_set(name: str, tasks: list[Any]) -> dict[str, Any]:
    """The fields of a set with the tasks' answers, most frequent first.

    Raises:
        ScreeningError: The answers are running text.
        UsageError: The tasks have no answers.
    """
    from importlib.metadata import version

    from lmeval_screener.tokens.answers import check_answers

    from lmeval_dispersion.harness.answers import counted_answers

    answers, documents = counted_answers(tasks)
    check_answers(name, answers)
    config, task_version = tasks[0].config, tasks[0].VERSION
    known = f"task version {task_version}, " if task_version != "Yaml" else ""  # lm-eval's word for none
    parts = (config.dataset_path, config.dataset_name if len(tasks) == 1 else None)
    return {
        "name": name,
        "tasks": list(dict.fromkeys([name, *(task.task_name for task in tasks)])),
        "documents": documents,
        "source": " ".join(str(part) for part in parts if part),
        "revision": f"{known}lm-eval {version('lm_eval')}",
        "answers": dict(sorted(answers.items(), key=lambda item: (-item[1], item[0]))),
    }


def _counted(args: argparse.Namespace, task: str) -> tuple[dict[str, Any], Any]:
    from lmeval_dispersion.harness.answers import tokenizer_of
    from lmeval_dispersion.harness.seams import loaded_tasks

    tasks = [*loaded_tasks(task, include_path=args.include_path).values()]
    fields = counted_set(task.removesuffix(SUFFIX), tasks)
    return fields, None if args.tokenizer is None else tokenizer_of(args.tokenizer)


def _found(args: argparse.Namespace, task: str | None) -> tuple[dict[str, Any], Any]:
    """The fields of a set from a base model, and its tokenizer."""
    from lmeval_screener.tokens.answers import COVERED, LEAST
    from lmeval_screener.tokens.sets import MOST

    from lmeval_dispersion.harness.answers import around, mean_next, prompts_of
    from lmeval_dispersion.harness.seams import loaded_tasks
    from lmeval_dispersion.model.loading import load_model
    from lmeval_dispersion.model.texts import Texts

    if task:
        tasks = [*loaded_tasks(task, include_path=args.include_path).values()]
        name, source = task.removesuffix(SUFFIX), f"questions of {task}"
    else:
        texts = [text.text for text in Texts(args.questions, column=args.column)][:QUESTIONS]
        if not texts:
            raise UsageError(f"{args.questions} holds no text; check the file and its column")
        name = Path(args.questions).name.split(".")[0]
        tasks, source = [], f"questions of {Path(args.questions).name}"
    loaded = load_model(args.base, revision=args.revision, device=args.device)
    lm, chat = around(loaded), args.apply_chat_template
    if task:
        shots = args.num_fewshot
        prompts = prompts_of(lm, tasks, QUESTIONS, num_fewshot=shots, apply_chat_template=chat)
        source += f", {tasks[0].config.num_fewshot or 0} examples"
    else:
        if chat:
            texts = [lm.apply_chat_template([{"role": "user", "content": text}]) for text in texts]
        prompts = [lm.tok_encode(text) for text in texts]
    mean = mean_next(lm, prompts)
    ordered = np.argsort(-mean, kind="stable")
    count = int((np.cumsum(mean[ordered]) < COVERED).sum()) + 1
    ids = ordered[: max(LEAST, min(MOST, count))]
    pieces = loaded.tokenizer.convert_ids_to_tokens(ids.tolist())
    fields = {
        "name": name,
        "tasks": [name],
        "documents": len(prompts),
        "source": source + (", chat template" if chat else ""),
        "base": str(loaded.choice),
        "revision": loaded.identity.get("weights"),
        "tokenizer": vocabulary_of(loaded.tokenizer).digest,
        "coverage": round(float(mean[ids].sum()), 4),
        "pieces": [piece for piece in pieces if piece is not None],  # padding rows have no piece
    }
    return fields, loaded.tokenizer


def vocabulary_of(tokenizer: Any) -> Any:
    """The screener's vocabulary for a transformers tokenizer."""
    from lmeval_screener.tokens.vocabulary import Vocabulary

    if not getattr(tokenizer, "is_fast", False):
        raise UsageError("expected a tokenizer with a tokenizer.json; save it again with transformers")
    return Vocabulary.from_tokenizer_json(tokenizer.backend_tokenizer.to_str().encode())


def answer_file(fields: Mapping[str, Any], tokenizer: Any = None) -> tuple[str, str, str]:
    """A set's summary in one line, its file, which begins with that line, and a warning or nothing.

    Raises:
        ScreeningError: The tokenizer splits the answers into too few or too many tokens.
    """
    import yaml
    from lmeval_screener.tokens.answers import left_out_note, resolve_answers
    from lmeval_screener.tokens.sets import AnswerSet, load_token_set

    name, answers, note = fields["name"], fields.get("answers") or {}, ""
    shown = [text.strip()[:24] for text in answers]
    head = f"answers of {name}: {len(answers):,} different ones in {fields.get('documents', 0):,} documents"
    if "refused" in fields:
        head = f"{name} has no answer tokens: {fields['refused']}"
    if tokenizer is not None:
        found = {key: fields[key] for key in ("answers", "pieces", "tokenizer", "base") if key in fields}
        everyday = load_token_set("reference", "reference")
        tokens, share = resolve_answers(AnswerSet(name, (), **found), vocabulary_of(tokenizer), everyday)
        note = left_out_note(name, share)
        shown = [token.text for token in tokens]
        head = f"T of {name}: {len(tokens)} tokens in {Path(tokenizer.name_or_path).name}'s tokenizer"
    if shown:
        more = ", …" if len(shown) > _SHOWN else ""
        texts = [" ".join(repr(text)[1:-1].split()).replace("\\\\", "\\") for text in shown[:_SHOWN]]
        head += f": {', '.join(texts)}{more}"
    content = {"schema": 1, "name": name, "role": "answers", **fields}
    body = yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=110, default_flow_style=None)
    return head, f"# {head}\n{body}", note


COMMANDS = {"tokens": (_add_arguments, _run)}
