"""A small world for the harness: data sets in their layouts, a tiny model with a tokenizer of its own."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers
from datasets_layout import DATA, FACTS, write_all
from harness_world import tiny_llama
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

CHAT = (
    "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


@pytest.fixture(scope="session")
def datasets_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ORG/NAME folders of data sets."""
    root = tmp_path_factory.mktemp("datasets")
    write_all(root)
    return root


@pytest.fixture(scope="session")
def tokenizer() -> Any:
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


@pytest.fixture(scope="session")
def model_folder(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama and its tokenizer as a folder."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny_llama(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "README.md").write_text("none\n")
    return folder


@pytest.fixture
def in_world(
    datasets_root: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """Run in the folder of the data sets: `datasets` takes "cais/mmlu" for the folder of that name."""
    import datasets
    import nltk

    cache = datasets_root.parent / "datasets-cache"
    monkeypatch.chdir(datasets_root)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    monkeypatch.setattr(datasets.config, "HF_MODULES_CACHE", str(cache / "modules"))
    # IFEval's checks look for this resource at import; the instructions used here do without it.
    (cache / "nltk/tokenizers/punkt_tab/english").mkdir(parents=True, exist_ok=True)
    monkeypatch.setattr(nltk.data, "path", [str(cache / "nltk")])
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.delenv("LMEVAL_DISPERSION_STORE", raising=False)
    datasets.disable_progress_bars()
    yield datasets_root
    datasets.enable_progress_bars()


@pytest.fixture(scope="session")
def task_manager() -> Callable[..., Any]:
    """Makes task managers that know our tasks and, of lm-eval's, those that a test names."""
    from lm_eval.tasks import TaskManager

    from lmeval_dispersion.harness import enabling

    theirs = enabling.harness_tasks()

    def make(*families: str, **metadata: Any) -> Any:
        paths = [str(theirs / family) for family in families]
        return TaskManager(
            include_path=[*paths, str(enabling.tasks_path())], include_defaults=False, metadata=metadata
        )

    return make
