"""Small decoder-only transformers in plain PyTorch, stored so that transformers loads them as Llama.

RMS norm, rotary positions, SwiGLU: `tests/validity` holds its logits to transformers'. It is written out
because the population trains some hundred of them on one core, where the general class costs as much as its
arithmetic.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.functional import embedding, linear, scaled_dot_product_attention, silu

EPS, THETA, POSITIONS = 1e-6, 10000.0, 256


class Decoder(nn.Module):
    """Decoders of one shape side by side: what each computes is its own, and one loop serves all of them.

    ``named`` holds each parameter of all members, their number in front, by its name in the file.
    """

    def __init__(
        self,
        vocabulary: int,
        width: int,
        mlp: int,
        layers: int,
        heads: int,
        *,
        seeds: Sequence[int] = (0,),
    ) -> None:
        super().__init__()
        self.shape = {
            "vocabulary": vocabulary,
            "width": width,
            "mlp": mlp,
            "layers": layers,
            "heads": heads,
        }
        members = [self._drawn(torch.Generator().manual_seed(seed)) for seed in seeds]
        self.named = nn.ParameterDict(
            {
                name.replace(".", "/"): nn.Parameter(
                    torch.stack([member[name] for member in members])
                )
                for name in members[0]
            }
        )
        half = width // heads // 2
        angles = torch.outer(
            torch.arange(POSITIONS).float(), THETA ** (-torch.arange(half).float() / half)
        )
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def _drawn(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        """Initial weights of one member."""

        def normal(*shape: int, sd: float = 0.02) -> torch.Tensor:
            return torch.randn(shape, generator=generator) * sd

        vocabulary, width, mlp, layers, _ = self.shape.values()
        named = {"model.embed_tokens.weight": normal(vocabulary, width)}
        inner = 0.02 / math.sqrt(2 * layers)
        for layer in range(layers):
            at = f"model.layers.{layer}."
            named[at + "input_layernorm.weight"] = torch.ones(width)
            named[at + "post_attention_layernorm.weight"] = torch.ones(width)
            for part in "qkv":
                named[f"{at}self_attn.{part}_proj.weight"] = normal(
                    width, width, sd=width**-0.5 / 2
                )
            named[at + "self_attn.o_proj.weight"] = normal(width, width, sd=inner)
            named[at + "mlp.gate_proj.weight"] = normal(mlp, width, sd=width**-0.5 / 2)
            named[at + "mlp.up_proj.weight"] = normal(mlp, width, sd=width**-0.5 / 2)
            named[at + "mlp.down_proj.weight"] = normal(width, mlp, sd=inner)
        named["model.norm.weight"] = torch.ones(width)
        named["lm_head.weight"] = normal(vocabulary, width)
        return named

    def weight(self, name: str) -> torch.Tensor:
        """A parameter of all members, by the name that it has in the file."""
        return self.named[name.replace(".", "/")]

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return torch.bmm(x, self.weight(name).transpose(1, 2))

    def _normed(self, x: torch.Tensor, name: str) -> torch.Tensor:
        # The weights come after the norm: each member has its own.
        return nn.functional.rms_norm(x, x.shape[-1:], eps=EPS) * self.weight(name)[:, None]

    def _turned(self, x: torch.Tensor) -> torch.Tensor:
        cos, sin = self.cos[: x.shape[-2]], self.sin[: x.shape[-2]]
        first, second = x.chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    def states(self, ids: torch.Tensor) -> torch.Tensor:
        """Final states (members, batch * length, width) of ids (members, batch, length)."""
        members, batch, length = ids.shape
        table = self.weight("model.embed_tokens.weight")
        offsets = torch.arange(members)[:, None, None] * table.shape[1]
        x = embedding((ids + offsets).flatten(), table.flatten(0, 1)).view(
            members, batch * length, -1
        )
        for layer in range(self.shape["layers"]):
            at = f"model.layers.{layer}."
            h = self._normed(x, at + "input_layernorm.weight")
            q, k, v = (
                self._linear(h, f"{at}self_attn.{part}_proj.weight")
                .view(members * batch, length, self.shape["heads"], -1)
                .transpose(1, 2)
                for part in "qkv"
            )
            mixed = scaled_dot_product_attention(
                self._turned(q), self._turned(k), v, is_causal=True
            )
            mixed = mixed.transpose(1, 2).reshape(members, batch * length, -1)
            x = x + self._linear(mixed, at + "self_attn.o_proj.weight")
            h = self._normed(x, at + "post_attention_layernorm.weight")
            gate = silu(self._linear(h, at + "mlp.gate_proj.weight"))
            x = x + self._linear(
                gate * self._linear(h, at + "mlp.up_proj.weight"), at + "mlp.down_proj.weight"
            )
        return self._normed(x, "model.norm.weight")

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits (members, batch * length, vocabulary) of ids (members, batch, length)."""
        return self._linear(self.states(ids), "lm_head.weight")

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Final states (batch, length, width) of the only member, of ids (batch, length)."""
        return self.states(ids[None]).view(*ids.shape, -1)

    @property
    def rows(self) -> torch.Tensor:
        """The output projection of the first member, (vocabulary, width)."""
        return self.weight("lm_head.weight")[0]

    def head(self, states: torch.Tensor) -> torch.Tensor:
        """Logits of final states of the only member."""
        return linear(states, self.rows)

    def member(self, number: int) -> dict[str, torch.Tensor]:
        """The stored form of one member: BF16 tensors by name."""
        tensors = {
            name.replace("/", "."): p.detach()[number].clone() for name, p in self.named.items()
        }
        return {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in tensors.items()}

    def clip(self, limit: float) -> None:
        """Scale each member's gradient down to a norm of ``limit``."""
        squares = sum(
            p.grad.flatten(1).square().sum(1) for p in self.named.values() if p.grad is not None
        )
        factor = (limit / (squares.sqrt() + 1e-6)).clamp(max=1.0)
        for p in self.named.values():
            if p.grad is not None:
                p.grad.mul_(factor.view(-1, *[1] * (p.dim() - 1)))


class Adapted(Decoder):
    """A base under several LoRA adapters side by side; alpha is twice the rank.

    ``named`` holds their factors A (members, RANK, in) and B (members, out, RANK); what an adapter leaves
    alone, or has of a lower rank, is 0 and stays so.

    Args:
        base: The base's tensors.
        shape: Its shape, without the vocabulary.
        adapters: ``rank`` and ``modules`` (``all``, ``attention``) of each.
        seeds: Of A, one an adapter.
    """

    RANK = 8

    def __init__(
        self,
        base: Mapping[str, torch.Tensor],
        shape: Mapping[str, int],
        adapters: Sequence[Mapping[str, Any]],
        seeds: Sequence[int],
    ) -> None:
        super().__init__(len(base["model.embed_tokens.weight"]), **shape)
        self.base, self.members, self.named = base, len(adapters), nn.ParameterDict()
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        for name, tensor in base.items():
            if not name.endswith("_proj.weight"):
                continue
            out, width = tensor.shape
            a = torch.stack([torch.rand(self.RANK, width, generator=g) * 2 - 1 for g in generators])
            for factors, adapter in zip(a, adapters, strict=True):
                on = adapter["modules"] == "all" or "self_attn" in name
                factors[adapter["rank"] if on else 0 :] = 0
            at = name.replace(".", "/")
            self.named[f"{at}/A"] = nn.Parameter(a / math.sqrt(width))
            self.named[f"{at}/B"] = nn.Parameter(torch.zeros(len(adapters), out, self.RANK))

    def weight(self, name: str) -> torch.Tensor:
        """A tensor of the base, for each member."""
        return self.base[name].expand(self.members, *self.base[name].shape)

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        y, at = linear(x, self.base[name]), name.replace(".", "/")
        if f"{at}/A" not in self.named:
            return y
        a, b = (self.named[f"{at}/{factor}"].transpose(1, 2) for factor in "AB")
        return y + 2 * torch.bmm(torch.bmm(x, a), b)

    def member(self, number: int) -> dict[str, torch.Tensor]:
        """The factors of one member, as PEFT names and stores them."""
        found = {}
        for name, factors in self.named.items():
            if self.named[f"{name[:-1]}A"][number].any():
                rank = int(self.named[f"{name[:-1]}A"][number].any(1).sum())
                own = factors.detach()[number]
                own = own[:rank] if name.endswith("A") else own[:, :rank]
                place = name[:-2].replace("/", ".").removesuffix(".weight")
                found[f"base_model.model.{place}.lora_{name[-1]}.weight"] = own.clone().contiguous()
        return found


def write_adapter(folder: Path, factors: dict[str, torch.Tensor], base: Path) -> None:
    """An adapter's folder in PEFT's layout, of the base in another folder."""
    folder.mkdir(parents=True, exist_ok=True)
    rank = len(next(t for name, t in factors.items() if "lora_A" in name))
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base.resolve()),
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
        "target_modules": sorted({name.split(".")[-3] for name in factors}),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    save_file(factors, folder / "adapter_model.safetensors", {"format": "pt"})


def write(
    folder: Path, tensors: dict[str, torch.Tensor], shape: dict[str, Any], tokenizer: str
) -> None:
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
        "tie_word_embeddings": False,
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
    """A checkpoint's tensors in float32; an adapter's are its base's with the adapter added."""
    if (folder / "adapter_config.json").exists():
        config = json.loads((folder / "adapter_config.json").read_text("utf-8"))
        tensors = stored_tensors(Path(config["base_model_name_or_path"]))
        factors = load_file(folder / "adapter_model.safetensors")
        for name, a in factors.items():
            if ".lora_A." in name:
                place = name.removeprefix("base_model.model.").replace(".lora_A", "")
                tensors[place] = tensors[place] + 2 * factors[name.replace("lora_A", "lora_B")] @ a
        return tensors
    return {
        name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()
    }


def built(members: Sequence[Mapping[str, torch.Tensor]], shape: Mapping[str, int]) -> Decoder:
    """Decoders of stored tensors, side by side."""
    size = {**shape, "vocabulary": len(members[0]["model.embed_tokens.weight"])}
    model = Decoder(**size, seeds=range(len(members)))
    with torch.no_grad():
        for name in members[0]:
            model.weight(name).copy_(torch.stack([tensors[name] for tensors in members]))
    return model.eval()
