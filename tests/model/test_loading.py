"""Loading: what works is ready to run, what cannot work says in one sentence why and what to do."""

from __future__ import annotations

import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
from typing import ClassVar

import pytest
import tiny_models
import torch

from lmeval_dispersion.errors import DispersionError, MissingExtraError, UsageError
from lmeval_dispersion.model.loading import load_model


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


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is:FutureWarning")  # peft asks for it
def test_an_adapter_changes_the_output(folder, tmp_path):
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    wrapped = peft.get_peft_model(
        tiny_models.llama(), peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    )
    wrapped.save_pretrained(tmp_path / "adapter")
    ids = torch.tensor([[5, 6, 7]])
    loaded = load_model(folder, adapter=tmp_path / "adapter")
    assert torch.allclose(loaded.model(ids).logits, wrapped.eval()(ids).logits, atol=1e-5)
    assert not torch.allclose(loaded.model(ids).logits, load_model(folder).model(ids).logits, atol=1e-3)
    with pytest.raises(UsageError, match="is a PEFT adapter; name its base model"):
        load_model(tmp_path / "adapter")
    with pytest.raises(UsageError, match=r"the adapter .* does not fit or cannot be loaded"):
        load_model(folder, adapter=tmp_path / "none")


def test_what_is_no_decoder_is_refused(tmp_path):
    from transformers import BertConfig, BertForMaskedLM, T5Config

    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    BertForMaskedLM(BertConfig(vocab_size=50, **small)).save_pretrained(tmp_path / "bert")
    T5Config().save_pretrained(tmp_path / "t5")
    for name in ("bert", "t5"):
        with pytest.raises(UsageError, match="expected a decoder-only language model"):
            load_model(tmp_path / name)


def test_missing_models_name_the_nearest(folder):
    with pytest.raises(UsageError, match=r"did you mean .*tiny-llama"):
        load_model(folder.parent / "tiny-lama")
    with pytest.raises(UsageError, match="it holds the models tiny-llama"):
        load_model(folder.parent)
    with pytest.raises(UsageError, match=r"got the file .*config.json; name its folder"):
        load_model(folder / "config.json")


def test_damaged_folders_are_one_sentence(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "no-weights")
    (tmp_path / "no-weights" / "model.safetensors").unlink()
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "config.json").write_text(json.dumps({"model_type": "no-such"}))
    for name in ("no-weights", "odd"):
        with pytest.raises(DispersionError, match=f"{name} cannot be loaded: "):
            load_model(tmp_path / name)


def test_dtypes_missing_extras_and_devices(folder, monkeypatch):
    assert load_model(folder, dtype="bfloat16").model.dtype == torch.bfloat16
    with pytest.raises(UsageError, match="dtype of auto, float32, float16, bfloat16, got 'int3'"):
        load_model(folder, dtype="int3")
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "bitsandbytes", None)
        with pytest.raises(MissingExtraError, match=r"pip install 'lmeval-dispersion\[quantized\]'"):
            load_model(folder, quantize="4bit")
    if not torch.cuda.is_available():
        with pytest.raises(UsageError, match="the device 'cuda:0' cannot be used"):
            load_model(folder, device="cuda:0")


_ASK = """
from lmeval_dispersion.errors import DispersionError
from lmeval_dispersion.model.loading import load_model
for name in ("org/missing", "org/gated", "org/old"):
    try:
        load_model(name, revision="v9" if name == "org/old" else None)
    except DispersionError as error:
        print(error.exit_code, error)
"""


class _Hub(http.server.BaseHTTPRequestHandler):
    """Answers as the Hub does for a missing model, a gated one and a missing revision."""

    ANSWERS: ClassVar = {
        "missing": (401, "RepoNotFound"),
        "gated": (403, "GatedRepo"),
        "old": (404, "RevisionNotFound"),
    }

    def do_GET(self):
        status, code = self.ANSWERS.get(self.path.split("/")[2], (404, "EntryNotFound"))
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, *args):
        pass


def test_refusals_of_the_hub_have_their_own_sentences(tmp_path):
    (tmp_path / "hub" / "models--org--missinf").mkdir(parents=True)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "TRANSFORMERS_"))}
    environment["HF_ENDPOINT"] = f"http://127.0.0.1:{server.server_port}"
    environment |= {"HF_HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", _ASK]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    server.shutdown()
    server.server_close()
    missing, gated, old = done.stdout.splitlines()
    assert missing.startswith("2 there is no model org/missing on the Hub")
    assert missing.endswith("did you mean org/missinf?")
    assert gated.startswith("2 org/gated is gated: accept its terms")
    assert old.startswith("2 org/old has no revision 'v9'")
