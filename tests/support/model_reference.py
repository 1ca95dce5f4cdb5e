"""A decoder with LoRA in plain float64, one sequence at a time, nothing fused: what the engine is compared with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from tinsmith.engine.lora import LoraAdapter, peft_name
from tinsmith.engine.models.attention import frequencies
from tinsmith.engine.models.config import ModelConfig
from tinsmith.engine.models.hf_directory import read_config


@dataclass
class Reference:
    """Weights and LoRA parameters in float64; the parameters are leaves of autograd."""

    config: ModelConfig
    weights: Mapping[str, Tensor]
    parameters: Mapping[str, Tensor]
    scale: float

    @classmethod
    def of(cls, directory: Path, adapter: LoraAdapter | None = None) -> Reference:
        weights = {name: tensor.double() for name, tensor in load_file(directory / "model.safetensors").items()}
        given = {} if adapter is None else adapter.parameters()
        leaves = {name: tensor.detach().clone().double().requires_grad_() for name, tensor in given.items()}
        return cls(read_config(directory), weights, leaves, adapter.scale if adapter is not None else 1.0)

    def logprobs(self, tokens: Tensor) -> Tensor:
        """[N, V], differentiable in the parameters."""
        return torch.log_softmax(self._linear(None, "lm_head", self.hidden(tokens)), dim=-1)

    def hidden(self, tokens: Tensor) -> Tensor:
        x = self.weights["model.embed_tokens.weight"][tokens]
        for layer in range(self.config.num_layers):
            prefix = f"model.layers.{layer}"
            x = x + self._attention(layer, self._norm(x, f"{prefix}.input_layernorm.weight"))
            normed = self._norm(x, f"{prefix}.post_attention_layernorm.weight")
            gate = self._linear(layer, "gate_proj", normed)
            x = x + self._linear(
                layer, "down_proj", gate * torch.sigmoid(gate) * self._linear(layer, "up_proj", normed)
            )
        return self._norm(x, "model.norm.weight")

    def gradients(self, loss: Tensor) -> dict[str, Tensor]:
        """dloss/dparameter by name; zeros where the loss does not depend on it."""
        found = torch.autograd.grad(loss, list(self.parameters.values()), allow_unused=True)
        pairs = zip(self.parameters.items(), found, strict=True)
        return {name: torch.zeros_like(leaf) if grad is None else grad for (name, leaf), grad in pairs}

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + self.config.norm_eps) * self.weights[name]

    def _linear(self, layer: int | None, module: str, x: Tensor) -> Tensor:
        path = peft_name(layer, module).removeprefix("base_model.model.")
        weight = self.weights.get(f"{path}.weight")
        if weight is None:
            weight = self.weights["model.embed_tokens.weight"]
        y = x @ weight.T
        if f"{path}.bias" in self.weights:
            y = y + self.weights[f"{path}.bias"]
        down = self.parameters.get(f"base_model.model.{path}.lora_A.weight")
        up = self.parameters.get(f"base_model.model.{path}.lora_B.weight")
        return y if down is None or up is None else y + self.scale * (x @ down.T) @ up.T

    def _attention(self, layer: int, x: Tensor) -> Tensor:
        config, length = self.config, len(x)
        q = self._linear(layer, "q_proj", x).view(length, config.num_heads, config.head_dim)
        k = self._linear(layer, "k_proj", x).view(length, config.num_kv_heads, config.head_dim)
        v = self._linear(layer, "v_proj", x).view(length, config.num_kv_heads, config.head_dim)
        if config.has_qk_norm:
            q = self._norm(q, f"model.layers.{layer}.self_attn.q_norm.weight")
            k = self._norm(k, f"model.layers.{layer}.self_attn.k_norm.weight")
        if config.has_rope(layer):
            q, k = self._rotated(q), self._rotated(k)
        outputs = []
        for head in range(config.num_heads):
            shared = head * config.num_kv_heads // config.num_heads
            scores = q[:, head] @ k[:, shared].T / config.head_dim**0.5
            distance = torch.arange(length)[:, None] - torch.arange(length)[None, :]
            hidden = (distance < 0) | (distance >= (config.sliding_window(layer) or length))
            outputs.append(torch.softmax(scores.masked_fill(hidden, -torch.inf), -1) @ v[:, shared])
        return self._linear(layer, "o_proj", torch.cat(outputs, dim=-1))

    def _rotated(self, x: Tensor) -> Tensor:
        per_position, scale = frequencies(self.config.rope, self.config.head_dim)
        angles = torch.arange(len(x))[:, None, None] * per_position.double()
        cos, sin = angles.cos() * scale, angles.sin() * scale
        first, second = x.chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def randomized(adapter: LoraAdapter, seed: int = 1, size: float = 0.5) -> LoraAdapter:
    """The adapter with B no longer zero, so that every gradient counts; the rank does not change how much it adds."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in adapter.parameters().items():
        if "lora_B" in name:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * size / adapter.scale)
    return adapter
