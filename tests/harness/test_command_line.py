"""The stock `lm_eval` command against an olah server that serves MMLU's layout and a trained model."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness_world import environment, evaluate, hflm, trimmed_copy

from lmeval_dispersion.errors import PartialStoreError
from lmeval_dispersion.geometry import dispersion
from lmeval_dispersion.harness import install
from lmeval_dispersion.paths import data_folder
from lmeval_dispersion.store import read_store

pytestmark = pytest.mark.slow

OURS = Path(install.__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
DISPERSION = [
    sys.executable,
    "-W",
    "ignore",
    "-c",
    "from lmeval_dispersion.cli import main; raise SystemExit(main())",
]


def olah_command() -> str | None:
    """The server: beside this Python, on the PATH, or where OLAH_CLI says."""
    return os.environ.get("OLAH_CLI") or shutil.which("olah-cli", path=str(BIN)) or shutil.which("olah-cli")


@pytest.fixture(scope="module")
def hub(datasets_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Environment variables of a process that uses an olah server as its Hub."""
    command = olah_command()
    if command is None:
        pytest.skip("olah is not installed; pip install olah==0.5.4, or set OLAH_CLI to its olah-cli")
    root = tmp_path_factory.mktemp("olah")
    for source, name in (
        (datasets_root / "cais/mmlu", "datasets/cais/mmlu"),
        (datasets_root / "allenai/ai2_arc", "datasets/allenai/ai2_arc"),
        (data_folder("demo") / "sums-20", "models/demo/sums-20"),
    ):
        repository = root / "mirror" / name
        shutil.copytree(source, repository)
        if name.startswith("models"):  # olah answers 401 for a missing folder, as for a missing repository
            (repository / "additional_chat_templates").mkdir()
            (repository / "additional_chat_templates" / "README.md").write_text("none\n")
        git = ["git", "-c", "user.name=t", "-c", "user.email=t@localhost", "-C", str(repository)]
        for step in (["init", "-q", "-b", "main"], ["add", "-A"], ["commit", "-q", "-m", "all"]):
            subprocess.run([*git, *step], check=True, timeout=60)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (root / "olah.toml").write_text(
        f'[basic]\nhost = "127.0.0.1"\nport = {port}\nrepos-path = "{root}/repos"\n'
        f'mirrors-path = ["{root}/mirror"]\n[accessibility]\noffline = true\n'
    )
    with (root / "olah.log").open("w") as log:
        server = subprocess.Popen([command, "-c", str(root / "olah.toml")], cwd=root, stdout=log, stderr=log)
    try:
        for _ in range(200):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        else:
            pytest.fail(f"olah did not start: {(root / 'olah.log').read_text()[-2000:]}")
        yield environment(
            HF_ENDPOINT=f"http://127.0.0.1:{port}",
            HF_HOME=str(root / "home"),
            HF_HUB_DISABLE_XET="1",
            HF_HUB_DISABLE_TELEMETRY="1",
            XDG_CACHE_HOME=str(root / "cache"),
        )
    finally:
        server.terminate()
        server.wait(timeout=20)


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A lm-eval in which the dispersion tasks are enabled."""
    site = trimmed_copy(tmp_path_factory.mktemp("site"))
    done = run([*DISPERSION, "enable"], site, environment())
    assert done.returncode == 0, done.stderr
    return site


def run(command: list[str], site: Path, hub: dict[str, str]) -> subprocess.CompletedProcess[str]:
    path = f"{site}:{OURS}"
    return subprocess.run(
        command, env={**hub, "PYTHONPATH": path}, capture_output=True, text=True, timeout=240
    )


def test_the_stock_command_runs_mmlu(hub: dict[str, str], installation: Path, tmp_path: Path) -> None:
    # Categories rather than all 57 subjects, for time; test_task_metrics.py runs the whole group.
    arguments = ["--model_args", "pretrained=demo/sums-20,dtype=float32", "--device", "cpu", "--log_samples"]
    arguments += ["--tasks", "mmlu_stem_dispersion", "--limit", "3", "--num_fewshot", "1"]
    arguments += ["--batch_size", "16", "--output_path", str(tmp_path)]
    arguments += ["--metadata", "dispersion_layers=last+layer.-1.attn"]
    done = run([str(BIN / "lm_eval"), "--model", "hf", *arguments], installation, hub)
    assert done.returncode == 0, done.stderr[-3000:]
    folder = tmp_path / "demo__sums-20"
    stores = next(folder.glob("dispersion_*"))
    last = done.stderr.splitlines()[-2:]
    assert last == [f"vectors of 19 tasks: {stores}", f"next: dispersion audit {stores}"]
    results = json.loads(next(folder.glob("results_*.json")).read_text())
    group = results["groups"]["mmlu_stem_dispersion"]
    rows = [line for line in done.stdout.splitlines() if "|dispersion " in line]
    assert f"|{group['dispersion,none']:.4f}|±  |{group['dispersion_stderr,none']:.4f}|" in rows[-1]
    store = read_store(stores)
    assert store.manifest["identity"]["weights"] == f"demo/sums-20@{store.manifest['revision']}"
    assert store.manifest["identity"]["fewshot_seed"] == "1234"
    assert not store.manifest["identity"]["prompt_template"].startswith("several:")
    assert len(store.documents) == 19 * 3 == group["sample_len"]
    assert set(store.documents["category"]) == {"stem"}
    assert store.layers == ["last", "layer.2.attn"]
    assert store.model == "demo/sums-20"
    assert len(str(store.manifest["revision"])) == 40
    assert store.manifest["versions"]["lm_eval"]
    assert group["dispersion,none"] == pytest.approx(dispersion(store.vectors()), abs=2e-5)
    noted = results["configs"]["mmlu_anatomy_dispersion"]["metadata"]["dispersion"]
    assert Path(noted["store"]).is_dir()
    assert noted["layers"]["layer.2.attn"]["dispersion_n"] == 3
    samples = next(folder.glob("samples_mmlu_anatomy_dispersion_*.jsonl")).read_text().splitlines()
    assert len(samples) == 3
    assert json.loads(samples[0])["dispersion"] == "<state of document 0>"
    assert max(map(len, samples)) < 8000


def test_a_killed_run_leaves_a_store_that_is_refused(
    hub: dict[str, str], installation: Path, tmp_path: Path
) -> None:
    arguments = ["--model_args", "pretrained=demo/sums-20,dtype=float32", "--device", "cpu"]
    arguments += ["--tasks", "mmlu_stem_dispersion", "--output_path", str(tmp_path)]
    process = subprocess.Popen(
        [str(BIN / "lm_eval"), "--model", "hf", *arguments],
        env={**hub, "PYTHONPATH": f"{installation}:{OURS}"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        end = time.monotonic() + 120
        while not list(tmp_path.glob("*/dispersion_*/*/documents.parquet")):
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.005)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=30)
    with pytest.raises(PartialStoreError, match="its run did not finish"):
        read_store(next(tmp_path.glob("*/dispersion_*")))


TWO = """
import json, sys
import torch
from accelerate import Accelerator
from harness_world import evaluate, hflm
from lm_eval.tasks import TaskManager
from lmeval_dispersion.harness import install
from lmeval_dispersion.paths import data_folder
import transformers

folder, out = sys.argv[1:]
accelerator = Accelerator(cpu=True)
tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
lm = hflm(transformers.AutoModelForCausalLM.from_pretrained(folder).float(), tokenizer, batch_size=3)
lm.accelerator, lm._rank, lm._world_size = accelerator, accelerator.process_index, accelerator.num_processes
assert lm.world_size == 2
manager = TaskManager(include_path=str(install.tasks_path()), include_defaults=False,
                      metadata={"dispersion_store": out + "/store"})
tasks = ["arc_easy_dispersion", "mmlu_astronomy_dispersion", "wikitext_dispersion", "ifeval_dispersion"]
results = evaluate(lm, tasks, manager, gen_kwargs={"max_gen_toks": 4}, limit=7)
if lm.rank == 0:
    open(out + "/results.json", "w").write(json.dumps(results["results"]))
torch.distributed.barrier()
torch.distributed.destroy_process_group()
"""


def test_two_processes_give_the_figures_of_one(
    in_world: Path,
    model_folder: Path,
    tokenizer: Any,
    task_manager: Callable[..., Any],
    tmp_path: Path,
) -> None:
    import datasets
    import nltk
    import transformers

    (tmp_path / "two.py").write_text(TWO)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    done = subprocess.run(
        [
            *(sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nproc-per-node", "2"),
            *("--master-port", str(port), str(tmp_path / "two.py"), str(model_folder), str(tmp_path)),
        ],
        env=environment(
            PYTHONPATH=f"{Path(__file__).parent}:{OURS}",
            HF_DATASETS_CACHE=str(datasets.config.HF_DATASETS_CACHE),
            HF_DATASETS_OFFLINE="1",
            NLTK_DATA=str(nltk.data.path[0]),
        ),
        cwd=in_world,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    two = json.loads((tmp_path / "results.json").read_text())
    model = transformers.AutoModelForCausalLM.from_pretrained(model_folder).float()
    lm = hflm(model, tokenizer, batch_size=3)
    manager = task_manager(dispersion_store=str(tmp_path / "one"))
    one = evaluate(lm, list(two), manager, gen_kwargs={"max_gen_toks": 4}, limit=7)["results"]
    for task, figures in one.items():
        for key, value in figures.items():
            if isinstance(value, float) and not math.isnan(value):
                assert two[task][key] == pytest.approx(value, rel=1e-6), (task, key)
    first, second = read_store(tmp_path / "one"), read_store(tmp_path / "store")
    key = ["task", "doc_id"]
    a, b = (s.documents.sort_values(key).reset_index() for s in (first, second))
    assert a[[*key, "doc_hash", "prompt_hash"]].equals(b[[*key, "doc_hash", "prompt_hash"]])
    np.testing.assert_allclose(first.vectors()[a["index"]], second.vectors()[b["index"]], atol=2e-3)
