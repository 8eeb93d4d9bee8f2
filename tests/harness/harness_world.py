"""Models, runs and references that several tests of the harness share."""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from datasets_layout import DATA, FACTS
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from lmeval_dispersion.geometry import dispersion_estimate
from lmeval_dispersion.harness import install
from lmeval_dispersion.harness.records import DocRecord
from lmeval_dispersion.store import read_store

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
            special_tokens=["!", *special],  # token 0 is a real one, as in GPT-2: lm-eval pads with it
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
    shape = {"hidden_size": 32, "intermediate_size": 48, **settings}
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=2048,
        eos_token_id=1,
        pad_token_id=2,
        **shape,
    )
    model = transformers.LlamaForCausalLM(config).eval()
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


def arguments(folder: Path) -> dict[str, Any]:
    """The same as its arguments."""
    return {"pretrained": str(folder), "device": "cpu", "dtype": "float32"}


def evaluate(lm: Any, tasks: list[str], manager: Any, **settings: Any) -> Any:
    """lm-eval's simple_evaluate, without the examples that tasks may bring."""
    import lm_eval

    options = {"num_fewshot": 0, **settings}
    return lm_eval.simple_evaluate(model=lm, tasks=tasks, task_manager=manager, **options)


def environment(**extra: str) -> dict[str, str]:
    """A child process's environment: ours without what would make it see this machine's Hub settings."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGINGFACE", "LMEVAL_"))}
    return {**kept, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **extra}


def trimmed_copy(site: Path) -> Path:
    """A copy of lm-eval with a few of its tasks: it starts faster, and may be written to."""
    theirs = install.harness_tasks()
    shutil.copytree(theirs.parent, site / "lm_eval", ignore=shutil.ignore_patterns("tasks", "__pycache__"))
    tasks = site / "lm_eval" / "tasks"
    tasks.mkdir()
    for file in theirs.glob("*.py"):
        shutil.copy(file, tasks)
    for family in ("arc", "mmlu/default"):
        shutil.copytree(theirs / family, tasks / family)
    return site


def reference(lm: Any, context: str, continuation: str, layer: str) -> tuple[Any, Any]:
    """The state of the last context token, from the unpadded prompt alone, and its tokens' log-probabilities.

    Follows lm-eval's own tokenisation; a prompt that is too long is cut as lm-eval cuts it.
    """
    context_tokens, continuation_tokens = lm._encode_pair(context, continuation)
    tokens = (context_tokens + continuation_tokens)[-(lm.max_length + 1) :][:-1]
    tokens = tokens[: len(tokens) - len(continuation_tokens) + 1]
    inputs = torch.tensor([tokens])
    with torch.no_grad():
        if layer == "last":
            out = lm.model(inputs, output_hidden_states=True)
            state = out.hidden_states[-1][0, -1]
        else:  # the residual stream after the first block's attention, written out for Llama
            assert layer == "layer.0.attn"
            block = lm.model.model.layers[0]
            seen: list[Any] = []
            handle = block.post_attention_layernorm.register_forward_pre_hook(
                lambda _, args: seen.append(args[0])
            )
            out = lm.model(inputs)
            handle.remove()
            state = seen[0][0, -1]
        scores = torch.log_softmax(out.logits[0].float(), dim=-1)
    own = scores[:-1].gather(1, inputs[0, 1:, None])[:, 0]
    return state.float().numpy(), own.numpy()


def records(results: Any, task: str) -> list[DocRecord]:
    """The records behind a task's samples."""
    found = [sample["dispersion"] for sample in results["samples"][task]]
    assert all(isinstance(record, DocRecord) for record in found)
    return found


def check_vectors(lm: Any, results: Any, task: str, layer: str = "last", within: float | None = None) -> None:
    """Every captured vector equals the model on the unpadded prompt alone; so does the query's perplexity.

    ``within``: the vectors agree to that share of their length alone, and the perplexity is not compared.
    """
    samples = results["samples"][task]
    assert samples
    for sample in samples:
        state, query = sample["dispersion"].state, sample["dispersion"].columns["text"]
        context, continuation = sample["arguments"][0]
        vector, logprobs = reference(lm, context, continuation, layer)
        assert state.vectors[layer].shape == (1, len(vector))
        if within is not None:
            assert np.linalg.norm(state.vectors[layer][0] - vector) < within * np.linalg.norm(vector)
            continue
        np.testing.assert_allclose(state.vectors[layer][0], vector, atol=1e-5, rtol=0)
        assert state.prompt_tokens == [len(logprobs) + 1] or state.truncated == [True]
        if query:
            tokens = len(lm.tok_encode(context.rstrip()[: context.rindex(query)] or ""))
            own = logprobs[max(tokens, 1) - 1 :]
            if state.truncated == [False] and context.rstrip().endswith(query.rstrip()):
                assert state.perplexity[0] == pytest.approx(math.exp(-float(np.mean(own))), rel=1e-4)


def hidden(lm: Any, tokens: list[int], layer: str) -> Any:
    assert layer == "last"
    with torch.no_grad():
        return lm.model(torch.tensor([tokens]), output_hidden_states=True).hidden_states[-1][0].numpy()


def hooks_left(model: torch.nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def check_stored_run(out: Path, task: str, documents: int = 8) -> None:
    """Results under ``--output_path`` and the store beside them hold the same figures, of all documents."""
    results = json.loads(next(out.rglob("results_*.json")).read_text())
    store = read_store(next(out.rglob("dispersion_*")))
    assert store.documents["doc_id"].tolist() == list(range(documents))
    figures, summary = results["results"][task], results["configs"][task]["metadata"]["dispersion"]
    expected = dispersion_estimate(store.vectors())
    for figure in (figures["dispersion,none"], summary["layers"]["last"]["dispersion"]):
        assert figure == pytest.approx(expected.mean, abs=1e-4)
    for error in (figures["dispersion_stderr,none"], summary["layers"]["last"]["dispersion_stderr"]):
        assert error == pytest.approx(expected.se, abs=1e-4)
    assert summary["documents"] == documents
    assert figures["acc,none"] == store.documents["correct"].mean()
