"""Loading: what works is ready to run, what cannot work says in one sentence why and what to do."""

from __future__ import annotations

import http.server
import json
import os
import shutil
import subprocess
import sys
import threading

import pytest
import tiny_models
import torch

from lmeval_dispersion.errors import DispersionError, MissingExtraError, UsageError
from lmeval_dispersion.model.loading import load_model

CONFIGS = {
    "adapter": {"base_model_name_or_path": "org/base"},
    "bert": {"model_type": "bert", "architectures": ["BertForMaskedLM"]},
    "t5": {"model_type": "t5"},
    "odd": {"model_type": "no-such"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_models.saved(tmp_path_factory.mktemp("models") / "tiny-llama", tiny_models.llama())


def test_a_folder_loads_ready_to_run(folder):
    loaded = load_model(folder)
    assert not loaded.model.training
    assert not any(p.requires_grad for p in loaded.model.parameters())
    assert loaded.tokenizer.pad_token_id == loaded.tokenizer.eos_token_id  # it was saved without one
    ids = torch.tensor([loaded.tokenizer("w1 w2").input_ids], device=loaded.device)
    expected = tiny_models.llama()(ids).logits
    assert torch.allclose(loaded.model(ids).logits, expected, atol=1e-5)
    assert load_model(folder, dtype="bfloat16").model.dtype == torch.bfloat16


NO_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        ("tiny-llama", {"dtype": "int3"}, UsageError, "auto, float32, float16, bfloat16, got 'int3'"),
        ("tiny-llama", {"adapter": "none"}, UsageError, "the adapter none does not fit or cannot be loaded"),
        ("tiny-llama", {"quantize": "4bit"}, MissingExtraError, r"'lmeval-dispersion\[quantized\]'"),
        pytest.param(
            *("tiny-llama", {"device": "cuda:0"}, UsageError, "'cuda:0' cannot be used"), marks=NO_CUDA
        ),
        ("tiny-lama", {}, UsageError, "did you mean .*tiny-llama"),
        (".", {}, UsageError, "it holds the models .*tiny-llama"),
        ("tiny-llama/config.json", {}, UsageError, "got the file .*config.json; name its folder"),
        ("adapter", {}, UsageError, "is a PEFT adapter; name its base model"),
        ("bert", {}, UsageError, "expected a decoder-only language model"),
        ("t5", {}, UsageError, "expected a decoder-only language model"),
        ("no-weights", {}, DispersionError, "no-weights cannot be loaded: "),
        ("odd", {}, DispersionError, "odd cannot be loaded: "),
    ],
)
def test_what_cannot_be_loaded_is_one_sentence(folder, monkeypatch, name, options, error, message):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    place = folder.parent
    if name == "no-weights":
        shutil.copytree(folder, place / name)
        (place / name / "model.safetensors").unlink()
    elif name in CONFIGS:
        (place / name).mkdir()
        file = "adapter_config.json" if name == "adapter" else "config.json"
        (place / name / file).write_text(json.dumps(CONFIGS[name]))
    with pytest.raises(error, match=message):
        load_model(place / name, **options)


# peft asks transformers for it.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is:FutureWarning")
def test_an_adapter_changes_the_output(folder, tmp_path):
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    wrapped = peft.get_peft_model(tiny_models.llama(), config)
    wrapped.save_pretrained(tmp_path / "adapter")
    ids = torch.tensor([[5, 6, 7]])
    loaded = load_model(folder, adapter=tmp_path / "adapter")
    assert torch.allclose(loaded.model(ids).logits, wrapped.eval()(ids).logits, atol=1e-5)
    assert not torch.allclose(loaded.model(ids).logits, load_model(folder).model(ids).logits, atol=1e-3)


_ANSWERS = {"missing": (401, "RepoNotFound"), "gated": (403, "GatedRepo"), "old": (404, "RevisionNotFound")}


class _Hub(http.server.BaseHTTPRequestHandler):
    """Answers as the Hub does for a missing model, a gated one and a missing revision."""

    def do_GET(self):
        name = self.path.partition("/org/")[2].partition("/")[0]
        status, code = _ANSWERS.get(name, (404, "EntryNotFound"))
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, *args):
        pass


_ASK = """
from lmeval_dispersion.errors import DispersionError
from lmeval_dispersion.model.loading import load_model
for name in ("org/missing", "org/gated", "org/old"):
    try:
        load_model(name, revision="v9" if name == "org/old" else None)
    except DispersionError as error:
        print(error.exit_code, error)
"""


def test_what_the_hub_refuses_is_told_apart(tmp_path):
    (tmp_path / "hub" / "models--org--missinf").mkdir(parents=True)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "TRANSFORMERS_"))}
    hub = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path)}
    environment = {**clean, **hub, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", _ASK], env=environment, capture_output=True, text=True)
    server.shutdown()
    server.server_close()
    missing, gated, old = done.stdout.splitlines()
    assert missing.startswith("2 there is no model org/missing on the Hub")
    assert missing.endswith("did you mean org/missinf?")
    assert gated.startswith("2 org/gated is gated: accept its terms")
    assert old.startswith("2 org/old has no revision 'v9'")
