"""Every example of docs/reference/training.md runs, and every variant of examples/train_variants.py."""

import re
import runpy
from pathlib import Path

import pytest
import torch
from tiny_decoders import tiny_gpt2, tokens, word_tokenizer

from lmeval_dispersion.installation import data_folder

ROOT = Path(__file__).parents[2]
VARIANTS = runpy.run_path(str(ROOT / "examples" / "train_variants.py"))
PAGE = ROOT / "docs" / "reference" / "training.md"
EXAMPLES = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def one_rank(tmp_path):
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def cases():
    """Every example; those that compile, wrap a process group or need TRL are long."""
    for number, code in enumerate(EXAMPLES):
        long = re.search(r"torch\.compile|DistributedDataParallel|fully_shard|from trl ", code)
        yield pytest.param(code, id=str(number), marks=[pytest.mark.slow] if long else [])


@pytest.mark.parametrize("code", [*cases()])
def test_example_runs(code, request, tmp_path, monkeypatch):
    from datasets import Dataset
    from transformers import TrainingArguments

    from lmeval_dispersion import DispersionRegularizer

    for library in ("peft", "trl"):
        if f"from {library} " in code:
            pytest.importorskip(library)
    monkeypatch.chdir(tmp_path)
    if "DistributedDataParallel" in code or "fully_shard" in code:
        request.getfixturevalue("one_rank")
    # The examples leave the place to the library; a test machine may have no compiler and wants no logger.
    code = code.replace("torch.compile(model)", "torch.compile(model, backend='aot_eager')")
    code = code.replace('("out", ', '("out", use_cpu=True, report_to="none", disable_tqdm=True, bf16=False, ')
    ids = tokens(4, 12)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    model = tiny_gpt2()
    rows = [{"input_ids": row.tolist()} for row in tokens(8, 12)]
    space = {
        "torch": torch,
        "model": model,
        "batch": batch,
        "batches": [batch, batch],
        "data": Dataset.from_list(
            rows if "SFT" in code else [row | {"labels": row["input_ids"]} for row in rows]
        ),
        "tokenizer": word_tokenizer(),
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "DispersionRegularizer": DispersionRegularizer,
        "TrainingArguments": TrainingArguments,
    }
    exec(compile(code, str(PAGE), "exec"), space)
    if "trainer" in space or "optimizer.step" in code:
        pairs = zip(model.parameters(), tiny_gpt2().parameters(), strict=True)
        assert any(not torch.equal(trained, fresh) for trained, fresh in pairs)
    elif "backward" in code:
        assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
    else:
        assert space["loss"] < 0 < space["dispersion"]


@pytest.mark.parametrize("variant", ["lora", "noise", "forgetting"])
def test_a_variant_trains_and_saves(variant, tmp_path, capsys):
    if variant == "lora":
        pytest.importorskip("peft")
    (tmp_path / "texts.txt").write_text("12 + 30 = 42, and 42 - 7 = 35.\n\nIt was late in the day.\n")
    VARIANTS["main"](
        variant, data_folder("demo") / "sums-20", tmp_path / "texts.txt", str(tmp_path / "out"), steps=2
    )
    assert "'dispersion_loss': -" in capsys.readouterr().out
    saved = "adapter_model.safetensors" if variant == "lora" else "model.safetensors"
    assert (tmp_path / "out" / saved).is_file()
