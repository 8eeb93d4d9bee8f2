"""A small decoder-only transformer in plain PyTorch, stored so that transformers loads it as Llama.

RMS norm, rotary positions, SwiGLU: `tests/validity` holds its logits to transformers'. It is written out
because
the population trains some hundred of them on one core, where the general class costs as much as its
arithmetic.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.functional import embedding, linear, scaled_dot_product_attention, silu

EPS, THETA, POSITIONS = 1e-6, 10000.0, 256


class Decoder(nn.Module):
    """Token ids (batch, length) to final states (batch, length, width); ``head`` makes logits of them.

    Attributes:
        scale: Factor on the logits; folded into the final norm when stored, so that the rows stay as trained.
    """

    def __init__(
        self, vocabulary: int, width: int, mlp: int, layers: int, heads: int, *, tied: bool = False,
        scale: float = 1.0, seed: int = 0,
    ) -> None:  # fmt: skip
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int, sd: float = 0.02) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=generator) * sd)

        self.shape = {"vocabulary": vocabulary, "width": width, "mlp": mlp, "layers": layers, "heads": heads}
        self.tied, self.scale, self.heads = tied, scale, heads
        named = {"model.embed_tokens.weight": normal(vocabulary, width)}
        inner = 0.02 / math.sqrt(2 * layers)
        for layer in range(layers):
            at = f"model.layers.{layer}."
            named[at + "input_layernorm.weight"] = nn.Parameter(torch.ones(width))
            named[at + "post_attention_layernorm.weight"] = nn.Parameter(torch.ones(width))
            for part in "qkv":
                named[f"{at}self_attn.{part}_proj.weight"] = normal(width, width, sd=width**-0.5 / 2)
            named[at + "self_attn.o_proj.weight"] = normal(width, width, sd=inner)
            named[at + "mlp.gate_proj.weight"] = normal(mlp, width, sd=width**-0.5 / 2)
            named[at + "mlp.up_proj.weight"] = normal(mlp, width, sd=width**-0.5 / 2)
            named[at + "mlp.down_proj.weight"] = normal(width, mlp, sd=inner)
        named["model.norm.weight"] = nn.Parameter(torch.ones(width))
        if not tied:
            named["lm_head.weight"] = normal(vocabulary, width)
        self.named = nn.ParameterDict({name.replace(".", "/"): p for name, p in named.items()})
        half = width // heads // 2
        angles = torch.outer(torch.arange(POSITIONS).float(), THETA ** (-torch.arange(half).float() / half))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def weight(self, name: str) -> torch.Tensor:
        """A parameter by the name that it has in the file."""
        return self.named[name.replace(".", "/")]

    @property
    def rows(self) -> torch.Tensor:
        """The output projection, (vocabulary, width)."""
        return self.weight("model.embed_tokens.weight" if self.tied else "lm_head.weight")

    def _turned(self, x: torch.Tensor) -> torch.Tensor:
        cos, sin = self.cos[: x.shape[-2]], self.sin[: x.shape[-2]]
        first, second = x.chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Final states after the last norm, (batch, length, width)."""
        x = embedding(ids, self.weight("model.embed_tokens.weight"))
        batch, length, width = x.shape
        for layer in range(self.shape["layers"]):
            at = f"model.layers.{layer}."
            h = nn.functional.rms_norm(x, (width,), self.weight(at + "input_layernorm.weight"), EPS)
            q, k, v = (
                linear(h, self.weight(f"{at}self_attn.{part}_proj.weight"))
                .view(batch, length, self.heads, -1)
                .transpose(1, 2)
                for part in "qkv"
            )
            mixed = scaled_dot_product_attention(self._turned(q), self._turned(k), v, is_causal=True)
            mixed = mixed.transpose(1, 2).reshape(batch, length, width)
            x = x + linear(mixed, self.weight(at + "self_attn.o_proj.weight"))
            h = nn.functional.rms_norm(x, (width,), self.weight(at + "post_attention_layernorm.weight"), EPS)
            gate = silu(linear(h, self.weight(at + "mlp.gate_proj.weight")))
            x = x + linear(
                gate * linear(h, self.weight(at + "mlp.up_proj.weight")),
                self.weight(at + "mlp.down_proj.weight"),
            )
        return nn.functional.rms_norm(x, (width,), self.weight("model.norm.weight"), EPS)

    def head(self, states: torch.Tensor) -> torch.Tensor:
        """Logits of final states."""
        return linear(states if self.scale == 1 else states * self.scale, self.rows)

    def tensors(self) -> dict[str, torch.Tensor]:
        """What is stored: BF16 tensors by name, the logits' factor folded into the final norm."""
        found = {name.replace("/", "."): p.detach().clone() for name, p in self.named.items()}
        found["model.norm.weight"] *= self.scale
        return {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in found.items()}


class Ensemble(nn.Module):
    """Several decoders of one shape, trained side by side: what they compute is theirs alone.

    One loop and one optimiser serve all of them; a member's gradient, clipping and texts are its own.
    """

    def __init__(self, members: list[Decoder]) -> None:
        super().__init__()
        self.members = members[:1]  # for the shape and the rotary tables
        self.shape, self.tied, self.scale = members[0].shape, members[0].tied, members[0].scale
        self.count = len(members)
        self.named = nn.ParameterDict(
            {
                name: nn.Parameter(torch.stack([m.named[name].detach() for m in members]))
                for name in members[0].named
            }
        )

    def weight(self, name: str) -> torch.Tensor:
        """A parameter of all members, with their number in front."""
        return self.named[name.replace(".", "/")]

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return torch.bmm(x, self.weight(name).transpose(1, 2))

    def _normed(self, x: torch.Tensor, name: str) -> torch.Tensor:
        # One vector of ones here and the weights after: the members' weights differ.
        return nn.functional.rms_norm(x, x.shape[-1:], eps=EPS) * self.weight(name)[:, None]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits (members, batch * length, vocabulary) of ids (members, batch, length)."""
        members, batch, length = ids.shape
        table = self.weight("model.embed_tokens.weight")
        offsets = torch.arange(members)[:, None, None] * table.shape[1]
        x = embedding((ids + offsets).flatten(), table.flatten(0, 1)).view(members, batch * length, -1)
        one = self.members[0]
        heads = self.shape["heads"]
        for layer in range(self.shape["layers"]):
            at = f"model.layers.{layer}."
            h = self._normed(x, at + "input_layernorm.weight")
            q, k, v = (
                self._linear(h, f"{at}self_attn.{part}_proj.weight")
                .view(members * batch, length, heads, -1)
                .transpose(1, 2)
                for part in "qkv"
            )
            mixed = scaled_dot_product_attention(one._turned(q), one._turned(k), v, is_causal=True)
            mixed = mixed.transpose(1, 2).reshape(members, batch * length, -1)
            x = x + self._linear(mixed, at + "self_attn.o_proj.weight")
            h = self._normed(x, at + "post_attention_layernorm.weight")
            gate = silu(self._linear(h, at + "mlp.gate_proj.weight"))
            x = x + self._linear(
                gate * self._linear(h, at + "mlp.up_proj.weight"), at + "mlp.down_proj.weight"
            )
        x = self._normed(x, "model.norm.weight") * self.scale
        return self._linear(x, "model.embed_tokens.weight" if self.tied else "lm_head.weight")

    def member(self, number: int) -> dict[str, torch.Tensor]:
        """What is stored of one member."""
        found = {name.replace("/", "."): p.detach()[number].clone() for name, p in self.named.items()}
        found["model.norm.weight"] *= self.scale
        return {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in found.items()}

    def clip(self, limit: float) -> None:
        """Scale each member's gradient down to a norm of ``limit``."""
        squares = sum(p.grad.flatten(1).square().sum(1) for p in self.named.values() if p.grad is not None)
        factor = (limit / (squares.sqrt() + 1e-6)).clamp(max=1.0)
        for p in self.named.values():
            p.grad.mul_(factor.view(-1, *[1] * (p.dim() - 1)))


def write(folder: Path, tensors: dict[str, torch.Tensor], shape: dict[str, Any], tokenizer: str) -> None:
    """A checkpoint's folder in transformers' layout."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(tensors["model.embed_tokens.weight"]),
        "hidden_size": shape["width"],
        "intermediate_size": shape["mlp"],
        "num_hidden_layers": shape["layers"],
        "num_attention_heads": shape["heads"],
        "num_key_value_heads": shape["heads"],
        "max_position_embeddings": POSITIONS,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    (folder / "tokenizer.json").write_text(tokenizer, "utf-8")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def stored_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """A checkpoint's tensors in float32."""
    return {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}


def built(tensors: dict[str, torch.Tensor], shape: dict[str, int]) -> Decoder:
    """A decoder of stored tensors."""
    vocabulary = len(tensors["model.embed_tokens.weight"])
    model = Decoder(**{**shape, "vocabulary": vocabulary}, tied="lm_head.weight" not in tensors)
    with torch.no_grad():
        for name, tensor in tensors.items():
            model.weight(name).copy_(tensor)
    return model.eval()
