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
from tinsmith.engine.models.config import ModelConfig, RopeConfig
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
        logits = self._linear(None, "lm_head", self.hidden(tokens)) * self.config.logit_scale
        return torch.log_softmax(_bounded(logits, self.config.logit_softcap), dim=-1)

    def hidden(self, tokens: Tensor) -> Tensor:
        config = self.config
        x = self.weights["model.embed_tokens.weight"][tokens] * config.embedding_scale
        before, after = config.has_input_norms, config.has_output_norms
        for layer in range(config.num_layers):
            prefix = f"model.layers.{layer}"
            added = self._attention(layer, self._norm(x, f"{prefix}.input_layernorm.weight") if before else x)
            added = self._norm(added, f"{prefix}.post_attention_layernorm.weight") if after else added
            x = x + config.residual_scale * added
            name = "pre_feedforward" if after else "post_attention"
            added = self._mlp(layer, self._norm(x, f"{prefix}.{name}_layernorm.weight") if before else x)
            added = self._norm(added, f"{prefix}.post_feedforward_layernorm.weight") if after else added
            x = x + config.residual_scale * added
        return self._norm(x, "model.norm.weight")

    def _mlp(self, layer: int, x: Tensor) -> Tensor:
        if self.config.has_fused_linears:
            gate, up = self._linear(layer, "gate_up_proj", x).chunk(2, -1)
        else:
            gate, up = (self._linear(layer, module, x) for module in ("gate_proj", "up_proj"))
        if self.config.activation == "silu":
            active = gate * torch.sigmoid(gate)
        else:
            active = gate / 2 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)))
        return self._linear(layer, "down_proj", active * up)

    def gradients(self, loss: Tensor) -> dict[str, Tensor]:
        """dloss/dparameter by name; zeros where the loss does not depend on it."""
        found = torch.autograd.grad(loss, list(self.parameters.values()), allow_unused=True)
        pairs = zip(self.parameters.items(), found, strict=True)
        return {name: torch.zeros_like(leaf) if grad is None else grad for (name, leaf), grad in pairs}

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight = self.weights[name] + (1 if self.config.has_offset_norms else 0)
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + self.config.norm_eps) * weight

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
        if config.has_fused_linears:
            sizes = [config.query_size, config.kv_size, config.kv_size]
            q, k, v = self._linear(layer, "qkv_proj", x).split(sizes, -1)
        else:
            q, k, v = (self._linear(layer, module, x) for module in ("q_proj", "k_proj", "v_proj"))
        if config.is_qk_norm_wide:
            q, k = self._head_norms(layer, q, k)
        q, k, v = (part.reshape(length, -1, config.head_dim) for part in (q, k, v))
        if config.has_qk_norm and not config.is_qk_norm_wide:
            q, k = self._head_norms(layer, q, k)
        rope = config.rope_index(layer)
        if rope is not None:
            q, k = self._rotated(q, config.ropes[rope]), self._rotated(k, config.ropes[rope])
        outputs = []
        for head in range(config.num_heads):
            shared = head * config.num_kv_heads // config.num_heads
            scale = config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale
            scores = _bounded(q[:, head] @ k[:, shared].T * scale, config.attention_softcap)
            distance = torch.arange(length)[:, None] - torch.arange(length)[None, :]
            hidden = (distance < 0) | (distance >= (config.sliding_window(layer) or length))
            outputs.append(torch.softmax(scores.masked_fill(hidden, -torch.inf), -1) @ v[:, shared])
        return self._linear(layer, "o_proj", torch.cat(outputs, dim=-1))

    def _head_norms(self, layer: int, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        prefix = f"model.layers.{layer}.self_attn"
        return self._norm(q, f"{prefix}.q_norm.weight"), self._norm(k, f"{prefix}.k_norm.weight")

    def _rotated(self, x: Tensor, rope: RopeConfig) -> Tensor:
        per_position, scale = frequencies(rope, self.config.head_dim)
        angles = torch.arange(len(x))[:, None, None] * per_position.double()
        cos, sin = angles.cos() * scale, angles.sin() * scale
        pairs = len(per_position)
        first, second, rest = x[..., :pairs], x[..., pairs : 2 * pairs], x[..., 2 * pairs :]
        return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)


def _bounded(x: Tensor, cap: float) -> Tensor:
    return cap * torch.tanh(x / cap) if cap else x


def randomized(adapter: LoraAdapter, seed: int = 1, size: float = 0.5) -> LoraAdapter:
    """The adapter with B no longer zero, so that every gradient counts; the rank does not change how much it adds."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in adapter.parameters().items():
        if "lora_B" in name:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * size / adapter.scale)
    return adapter
