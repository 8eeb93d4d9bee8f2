"""GGUF files of `tiny`'s models, of adapters and of projectors, by the format's own writer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf import GGUFWriter
from tiny_checkpoints import SPECIALS, WIDTH, head_and_norm, tokenizer
from transformers import PreTrainedModel


def write_gguf(path: Path, model: PreTrainedModel) -> None:
    """A whole Llama, as convert_hf_to_gguf.py writes it, in F32."""
    vocabulary = tokenizer().get_vocab()
    pieces = sorted(vocabulary, key=lambda piece: vocabulary[piece])
    head, norm = head_and_norm(model)
    rows = head[: len(pieces)].astype(np.float32)
    writer = GGUFWriter(path, "llama")
    writer.add_type("model")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(pieces)
    writer.add_token_types([3 if piece in SPECIALS else 1 for piece in pieces])
    writer.add_token_merges(["a b"])
    writer.add_tensor("token_embd.weight", rows)
    writer.add_tensor("output.weight", rows)
    writer.add_tensor("output_norm.weight", norm.astype(np.float32))
    _finish(writer)


def write_gguf_adapter(path: Path) -> None:
    """A LoRA adapter, as convert_lora_to_gguf.py writes it, but for its pairs: they have no fixed order."""
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(
        128
    )  # some writers give the kind after the architecture's own entries
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 16.0)
    writer.add_tensor("blk.0.attn_q.weight.lora_a", np.ones((4, WIDTH), np.float32))
    writer.add_tensor("blk.0.attn_q.weight.lora_b", np.ones((WIDTH, 4), np.float32))
    _finish(writer)


def write_gguf_projector(path: Path) -> None:
    """The projector of a model's images, as convert_hf_to_gguf.py --mmproj writes it."""
    writer = GGUFWriter(path, "clip")
    writer.add_type("mmproj")
    writer.add_tensor("mm.0.weight", np.ones((WIDTH, WIDTH), np.float32))
    _finish(writer)


def _finish(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
