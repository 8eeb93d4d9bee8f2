"""Models, runs and references that several tests of the harness share."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import transformers
from datasets_layout import DATA, FACTS
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from lmeval_dispersion.geometry import dispersion_estimate
from lmeval_dispersion.harness import install
from lmeval_dispersion.harness.records import DocRecord
from lmeval_dispersion.store import Store, read_store

ROOT = Path(install.__file__).resolve().parents[2]
# A folder with lm-eval 0.5; empty without one.
NEXT = os.environ.get("LM_EVAL_NEXT", "")
ARC = "arc_easy_dispersion"
# lm-eval reads all of its 10,000 task files each time: in tests it has none of its own.
# Nor does it describe the machine, for which it asks pip and others for seconds.
NONE = """
import sys, lm_eval.evaluator, lm_eval.tasks.manager
lm_eval.evaluator.add_env_info = lambda results: None
lm_eval.tasks.manager.__file__ = "/none/manager.py"
"""
COMMAND = f"{NONE}from lmeval_dispersion.cli import main\nsys.exit(main(sys.argv[1:]))"
LM_EVAL = f"{NONE}from lm_eval.__main__ import cli_evaluate\ncli_evaluate()"
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 2048,
}
CHAT = (
    "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def trained_tokenizer() -> Any:
    """A byte-level BPE of 600 tokens trained on the excerpts, with a chat template."""
    texts = json.dumps(json.loads((DATA / "excerpts.json").read_text("utf-8"))).split("\\n")
    texts += [f"{q} {' '.join(c)}" for q, c, _ in FACTS] * 20
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|pad|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"]
    core.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=600,
            special_tokens=[
                "!",
                *special,
            ],  # token 0 is a real one, as in GPT-2: lm-eval pads with it
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|endoftext|>", pad_token="<|pad|>"
    )
    wrapped.chat_template = CHAT
    return wrapped


def tiny_llama(tokenizer: Any, **settings: Any) -> Any:
    """A random Llama whose states differ enough from text to text."""
    torch.manual_seed(0)
    special = {"vocab_size": len(tokenizer), "eos_token_id": 1, "pad_token_id": 2}
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SIZES | special | settings)
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.2)
    return model


def hflm(model: Any, tokenizer: Any, **settings: Any) -> Any:
    """lm-eval's model around ours."""
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=model, tokenizer=tokenizer, **{"batch_size": 7, **settings})


def from_folder(folder: Path) -> Any:
    """lm-eval's model around the one in a folder."""
    return hflm(str(folder), None, batch_size=3, max_length=512, device="cpu", dtype="float32")


def evaluate(lm: Any, tasks: list[str], manager: Any, **settings: Any) -> Any:
    """lm-eval's simple_evaluate, without the examples that tasks may bring."""
    import lm_eval

    options = {"num_fewshot": 0, **settings}
    return lm_eval.simple_evaluate(model=lm, tasks=tasks, task_manager=manager, **options)


@dataclass(frozen=True)
class World:
    """Runs of the dispersion tasks in this process, on the small data sets."""

    tokenizer: Any
    manager: Callable[..., Any]

    def lm(self, model: Any = None, **settings: Any) -> Any:
        return hflm(
            tiny_llama(self.tokenizer) if model is None else model, self.tokenizer, **settings
        )

    def run(
        self,
        lm: Any,
        *tasks: str,
        families: tuple[str, ...] = (),
        store: Path | None = None,
        layers: str = "last",
        correct: str | None = None,
        **settings: Any,
    ) -> Any:
        """The results of ``tasks`` (arc_easy where none is named); ``families`` are those of stock tasks."""
        metadata = {"store": store and str(store), "layers": layers, "correct": correct}
        given = {f"dispersion_{key}": value for key, value in metadata.items() if value}
        return evaluate(lm, list(tasks or [ARC]), self.manager(*families, **given), **settings)


def child(*words: object, path: str = "", cwd: Path | None = None, **variables: str) -> Any:
    """Run a command to its good end; see :func:`environment`."""
    done = subprocess.run(
        [*map(str, words)],
        env=environment(path, **variables),
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def environment(path: str = "", **variables: str) -> dict[str, str]:
    """Ours without this machine's Hub settings; ``path`` comes before our own modules and tests."""
    import datasets

    folders = [path, str(Path(__file__).parent), str(ROOT), str(ROOT / "screener")]
    kept = {
        k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGINGFACE", "LMEVAL_"))
    }
    cache = str(datasets.config.HF_DATASETS_CACHE)
    return {
        **kept,
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join(filter(None, folders)),
        "HF_DATASETS_CACHE": cache,
        "HF_DATASETS_OFFLINE": "1",
        "XDG_CACHE_HOME": f"{cache}/xdg",
        **variables,
    }


def trimmed_copy(site: Path) -> Path:
    """A copy of lm-eval with a few of its tasks: it starts faster, and may be written to."""
    theirs = install.harness_tasks()
    shutil.copytree(
        theirs.parent, site / "lm_eval", ignore=shutil.ignore_patterns("tasks", "__pycache__")
    )
    tasks = site / "lm_eval" / "tasks"
    tasks.mkdir()
    for file in theirs.glob("*.py"):
        shutil.copy(file, tasks)
    for family in ("arc", "mmlu/default"):
        shutil.copytree(theirs / family, tasks / family)
    return site


def alone(lm: Any, tokens: list[int], layer: str = "last") -> tuple[Any, Any]:
    """The last state (d,) of tokens run alone, unpadded, and the log-probability of each after the first."""
    inputs, seen = torch.tensor([tokens]), []
    with torch.no_grad():
        if layer == "last":
            out = lm.model(inputs, output_hidden_states=True)
            seen.append(out.hidden_states[-1])
        else:  # the residual stream after a block's attention, written out for Llama
            block = lm.model.model.layers[int(layer.removeprefix("layer.").removesuffix(".attn"))]
            norm = block.post_attention_layernorm
            handle = norm.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
            out = lm.model(inputs)
            handle.remove()
        scores = torch.log_softmax(out.logits[0, -len(tokens) :].float(), dim=-1)
    logprobs = scores[:-1].gather(1, inputs[0, 1:, None])[:, 0]
    return seen[0][0, -1].float().numpy(), logprobs.numpy()


def records(results: Any, task: str) -> list[DocRecord]:
    """The records behind a task's samples."""
    return [sample["dispersion"] for sample in results["samples"][task]]


def check_vectors(
    lm: Any, results: Any, task: str = ARC, layer: str = "last", within: float | None = None
) -> None:
    """Every captured vector equals the model on the unpadded prompt alone; so does the query's perplexity.

    A prompt is made of tokens, and cut, as lm-eval does it. ``within``: the vectors agree to that share of
    their length alone, and the perplexity is not compared.
    """
    samples = results["samples"][task]
    assert samples
    for sample in samples:
        state, query = sample["dispersion"].state, sample["dispersion"].columns["text"]
        context, continuation = sample["arguments"][0]
        context_tokens, continuation_tokens = lm._encode_pair(context, continuation)
        tokens = (context_tokens + continuation_tokens)[-(lm.max_length + 1) :][
            : -len(continuation_tokens)
        ]
        vector, logprobs = alone(lm, tokens, layer)
        assert state.vectors[layer].shape == (1, len(vector))
        if within is not None:
            assert np.linalg.norm(state.vectors[layer][0] - vector) < within * np.linalg.norm(
                vector
            )
            continue
        np.testing.assert_allclose(state.vectors[layer][0], vector, atol=1e-5, rtol=0)
        assert (state.prompt_tokens, state.truncated) == (
            [len(context_tokens)],
            [len(tokens) < len(context_tokens)],
        )
        if query and not state.truncated[0] and context.rstrip().endswith(query.rstrip()):
            before = len(lm.tok_encode(context.rstrip()[: context.rindex(query)] or ""))
            mean = float(np.mean(logprobs[max(before, 1) - 1 :]))
            assert state.perplexity[0] == pytest.approx(math.exp(-mean), rel=1e-4)


def check_same_store(store: Store, expected: Store) -> None:
    """The same documents, but for the query's perplexity, and in the layers of ``store`` the same vectors."""
    documents = [s.documents.drop(columns="query_perplexity") for s in (store, expected)]
    pd.testing.assert_frame_equal(*documents, rtol=1e-12)
    for layer in store.layers:
        np.testing.assert_allclose(
            store.vectors(layer), expected.vectors(layer), atol=1e-3
        )  # float16
        np.testing.assert_allclose(store.norms(layer), expected.norms(layer), rtol=1e-4)
    assert store.manifest["identity"] == expected.manifest["identity"]


def hooks_left(model: torch.nn.Module) -> set[str]:
    """The modules whose hooks are on ``model``."""
    kinds = ("_forward_hooks", "_forward_pre_hooks")
    parts = [getattr(part, kind) for part in model.modules() for kind in kinds]
    return {hook.__module__ for hooks in parts for hook in hooks.values()}


def check_stored_run(out: Path, task: str, documents: int = 8) -> None:
    """Results under ``--output_path`` and the store beside them hold the same figures, of all documents."""
    results = json.loads(next(out.rglob("results_*.json")).read_text())
    store = read_store(next(out.rglob("dispersion_*")))
    assert store.documents["doc_id"].tolist() == list(range(documents))
    figures, summary = results["results"][task], results["configs"][task]["metadata"]["dispersion"]
    expected = dispersion_estimate(store.vectors())
    for figure in (figures["dispersion,none"], summary["layers"]["last"]["dispersion"]):
        assert figure == pytest.approx(expected.mean, abs=1e-4)
    for error in (
        figures["dispersion_stderr,none"],
        summary["layers"]["last"]["dispersion_stderr"],
    ):
        assert error == pytest.approx(expected.se, abs=1e-4)
    assert summary["documents"] == documents
    assert figures["acc,none"] == store.documents["correct"].mean()
