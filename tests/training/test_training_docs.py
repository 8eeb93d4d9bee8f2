"""Every example of docs/reference/training.md runs, and so does examples/midtrain.py."""

import json
import math
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_decoders import tiny_gpt2, tokens, word_tokenizer

from lmeval_dispersion.installation import data_folder

ROOT = Path(__file__).parents[2]
EXAMPLE = str(ROOT / "examples" / "midtrain.py")
MIDTRAIN = runpy.run_path(EXAMPLE)
PAGE = ROOT / "docs" / "reference" / "training.md"
EXAMPLES = re.findall(
    r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
)

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
    code = code.replace(
        '("out", ', '("out", use_cpu=True, report_to="none", disable_tqdm=True, bf16=False, '
    )
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


@pytest.mark.parametrize("arm", ["push_away", "noise", "forgetting"])
def test_midtrain_compares_with_base_and_goes_on(arm, tmp_path, capsys):
    (tmp_path / "a.txt").write_text(
        "\n\n".join(f"{i} + {i + 1} = {2 * i + 1}." for i in range(150))
    )
    words = [
        str(data_folder("demo") / "sums-20"),
        str(tmp_path / "a.txt"),
        str(tmp_path / "out"),
        "--arm",
        arm,
    ]
    words += ["--block=16", "--steps=4", "--lr=0.001", "--seed=0", "--seed=1"]
    MIDTRAIN["main"](words)
    said = capsys.readouterr().out
    base, other = said.splitlines()
    assert base.startswith("base on a.txt: perplexity ")
    assert re.fullmatch(
        rf"{arm} on a.txt: perplexity \S+, dispersion \S+, [+-]\S+ ± \S+ % against base", other
    )
    results = {
        path.parent.name: json.loads(path.read_text())
        for path in tmp_path.glob("out/*/result.json")
    }
    assert len({result["before"]["eval_domain0_loss"] for result in results.values()}) == 1
    losses = {k: math.log(v["after"]["eval_domain0_loss"]) for k, v in results.items()}
    assert losses["base-0"] != losses[f"{arm}-0"]
    # What is finished is not trained again; what is not goes on from its last whole checkpoint.
    trained = (tmp_path / "out" / "base-1" / "model" / "model.safetensors").stat().st_mtime_ns
    (tmp_path / "out" / f"{arm}-1" / "result.json").unlink()
    (tmp_path / "out" / f"{arm}-1" / "checkpoint-3").mkdir()
    MIDTRAIN["main"](words)
    assert capsys.readouterr().out == said
    assert (
        tmp_path / "out" / "base-1" / "model" / "model.safetensors"
    ).stat().st_mtime_ns == trained
    with pytest.raises(SystemExit):
        MIDTRAIN["main"]([*words, "--lr=0.1"])
    assert "models of other settings" in capsys.readouterr().err


@pytest.mark.slow
def test_a_killed_midtraining_ends_as_an_uninterrupted_one(tmp_path):
    """Stopped after its second step, with a checkpoint at the first and second of four."""
    (tmp_path / "a.txt").write_text(
        "\n\n".join(f"{i} + {i + 1} = {2 * i + 1}." for i in range(150))
    )

    def run(out, code=""):
        words = [str(data_folder("demo") / "sums-20"), str(tmp_path / "a.txt"), str(tmp_path / out)]
        words += ["--arm=push_away", "--block=16", "--steps=4", "--lr=0.001"]
        program = f"import runpy; {code}runpy.run_path({EXAMPLE!r})['main']({words!r})"
        return subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=300
        )

    killed = "import os, transformers; old = transformers.Trainer._save_checkpoint; "
    killed += "transformers.Trainer._save_checkpoint = lambda self, *a, **k: "
    killed += "(old(self, *a, **k), self.state.global_step == 2 and os._exit(9)); "
    assert run("out", killed).returncode == 9
    whole, again = run("whole"), run("out")
    assert whole.returncode == again.returncode == 0
    assert again.stdout == whole.stdout
