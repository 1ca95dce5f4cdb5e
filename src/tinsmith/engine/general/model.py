"""A model on transformers' own forward pass, with one adapter at a time on its linears.

The adapter is applied by hooks: while `adapted` is active, each linear that it covers adds its low-rank part. Before
a model is served, a trial finds out how it behaves, because neither configuration nor class says: whether a later token
changes earlier outputs (then it is not causal, and refused), whether the unembedding is a plain product (then logits
are computed in chunks, from hidden states), and whether its cache continues a sequence as a pass over all of it does.

Shapes: T tokens, D hidden, V vocabulary; Y outputs of `forward`, which are hidden states or logits.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch.nn.functional import linear

from tinsmith.engine.cpu.linear import PlainProduct
from tinsmith.engine.general.architecture import GeneralConfig, parameter_count, transformers_version
from tinsmith.engine.general.modules import AdaptedModules, find_modules, linears, shape_of
from tinsmith.engine.lora import LoraAdapter, with_lora
from tinsmith.engine.models.config import LM_HEAD
from tinsmith.engine.models.decoder import Adapter, Linear
from tinsmith.engine.models.load import check_free
from tinsmith.errors import InvalidInputError, TinkerError

logger = logging.getLogger(__name__)

Pairs: TypeAlias = Mapping[str, tuple[torch.Tensor, torch.Tensor]]
"""A and B by the key of their module."""

TRIAL_TOKENS, TRIAL_PREFIX, LONGER_TRIAL = 8, 5, 64
TOLERANCE = 2e-4
"""Largest difference, relative to the largest output, between two ways to compute the same in float32."""
COARSE_TOLERANCE = 5e-2
"""The same in bfloat16."""
CAUSAL_ROUNDINGS = 40
"""By how many roundings of the largest output earlier outputs may differ when later tokens do."""
CACHE_NAMES = ("past_key_values", "cache_params", "state")
"""What classes call their cache, as an argument and in their output."""
PLANTED = 1e4
"""Size of the numbers that the trial puts in place of logits, to see whether the model changes them afterwards."""


@dataclass(frozen=True, slots=True)
class ActiveAdapter:
    """An adapter while it is applied."""

    pairs: Pairs
    scale: float

    def apply(self, layer: int | None, module: str, x_TD: torch.Tensor, y_TE: torch.Tensor) -> torch.Tensor:
        """Return y_TE plus this adapter's part for a module, by its key; `layer` is always None."""
        pair = self.pairs.get(module)
        return y_TE if pair is None else with_lora(pair, self.scale, x_TD, y_TE)


def pairs_of(adapter: LoraAdapter) -> Pairs:
    """Return A and B of each module; they are the adapter's own tensors."""
    return {key: (group.A_GRD, group.Bs_ER[0]) for (_, key), group in adapter.groups.items()}


class GeneralModel:
    """A causal LM of transformers."""

    def __init__(self, directory: Path, config: GeneralConfig, device: str, dtype: torch.dtype) -> None:
        self.config = config
        self.dtype = dtype
        self.device = torch.device(device)
        self.parameters = parameter_count(directory)
        check_free(self.parameters, self.parameters * dtype.itemsize, device, dtype)
        self._model = _loaded(directory, config, dtype).to(self.device)
        self._active: ActiveAdapter | None = None
        self._head = self._model.get_output_embeddings()
        self._cache_name: str | None = None
        self.has_plain_head = False
        self.cache_token_bytes, self.cache_fixed_bytes = 0, 0
        """What the cache of a sequence takes for each token, and for a sequence of any length."""
        with self._refusing():
            self.modules = self._tried()

    @property
    def has_cache(self) -> bool:
        return self._cache_name is not None

    @property
    def kind(self) -> str:
        """Return what the bits of results depend on besides the weights."""
        return f"transformers {transformers_version()} {self._model.config._attn_implementation}"

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def unembedding(self) -> Linear:
        """The unembedding of a model with a plain head."""
        return Linear(PlainProduct(self._head.weight, None))

    @contextmanager
    def adapted(self, adapter: ActiveAdapter | None) -> Iterator[None]:
        """Apply an adapter within the block."""
        assert self._active is None, "only one adapter is active at a time"
        self._active = adapter
        try:
            yield
        finally:
            self._active = None

    def forward(
        self, tokens_T: torch.Tensor, cache: Any = None, *, is_cached: bool = False
    ) -> tuple[torch.Tensor, Any]:
        """Return output_TY (hidden states if the head is plain, else logits in float32) and the cache.

        With `is_cached`, the tokens continue the cache (None: an empty one), which is changed in place.
        """
        wanted: dict[str, Any] = {"use_cache": is_cached}
        if is_cached:
            assert self._cache_name is not None
            wanted[self._cache_name] = cache
        ran = self._base if self.has_plain_head else self._model
        found = ran(input_ids=tokens_T.unsqueeze(0), **wanted)
        output: torch.Tensor = found.last_hidden_state[0] if self.has_plain_head else found.logits[0].float()
        return output, getattr(found, self._cache_name) if is_cached and self._cache_name is not None else None

    def logits(self, hidden_TD: torch.Tensor, adapter: Adapter | None = None) -> torch.Tensor:
        """Return logits_TV in float32 from the hidden states of a model with a plain head."""
        logits_TV = linear(hidden_TD, self._head.weight).float()
        return logits_TV if adapter is None else adapter.apply(None, LM_HEAD, hidden_TD, logits_TV)

    def slopes(self, logits_TV: torch.Tensor) -> float:
        """Return 1: the logits of a plain head are the product, and others are not computed here."""
        return 1.0

    @property
    def _base(self) -> Any:
        return self._model.base_model

    def _hook(self, key: str) -> Callable[[Any, tuple[torch.Tensor, ...], torch.Tensor], torch.Tensor | None]:
        def added(module: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor | None:
            active = self._active
            if active is None or key not in active.pairs:
                return None
            x_TD, y_TE = inputs[0].reshape(-1, inputs[0].shape[-1]), output.reshape(-1, output.shape[-1])
            return active.apply(None, key, x_TD, y_TE).view(output.shape)

        return added

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """Turn what a trial raises into a refusal of the architecture."""
        try:
            yield
        except TinkerError:
            raise
        except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
            raise InvalidInputError(
                f"architecture {self.config.architecture} does not run through transformers {transformers_version()} "
                f"here: {type(error).__name__}: {error}"[:500],
                field="architectures",
            ) from error

    @torch.no_grad()
    def _tried(self) -> AdaptedModules:
        """Find out how the model behaves, and register the hooks."""
        count = min(TRIAL_TOKENS, self.config.max_context_length)
        tokens_T = torch.arange(count, device=self.device) * max(1, self.vocab_size // (count + 1)) % self.vocab_size
        called = self._called(tokens_T)
        modules = find_modules(self._model, self.config.architecture, called)
        self.has_plain_head = self._is_head_plain(tokens_T)
        by_path = dict(linears(self._model))
        for module in modules.all():
            if module.key != LM_HEAD or not self.has_plain_head:
                by_path[module.path].register_forward_hook(self._hook(module.key))
        whole_TY, _ = self.forward(tokens_T)
        self._check_causal(tokens_T, whole_TY)
        self._cache_name = self._working_cache(tokens_T, whole_TY)
        return modules

    def _called(self, tokens_T: torch.Tensor) -> frozenset[str]:
        """Return the linears that a forward pass calls."""
        called: set[str] = set()

        def note(path: str, module: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            outputs, width = shape_of(module)
            if len(inputs) == 1 and inputs[0].shape[-1] == width and output.shape == (*inputs[0].shape[:-1], outputs):
                called.add(path)  # a product as `_hook` expects it, and not one in groups, for example

        hooks = [
            module.register_forward_hook(lambda *called_with, path=path: note(path, *called_with))
            for path, module in linears(self._model)
        ]
        logits = self._model(input_ids=tokens_T.unsqueeze(0), use_cache=False).logits
        for hook in hooks:
            hook.remove()
        if logits.shape[-1] != self.vocab_size:
            raise ValueError(
                f"its logits have {logits.shape[-1]} columns, but config.json has {self.vocab_size} tokens"
            )
        return frozenset(called)

    def _is_head_plain(self, tokens_T: torch.Tensor) -> bool:
        """Return whether logits are the product of the last hidden states with the head's matrix and nothing else.

        The trial replaces the head's output: a model that scales or caps its logits returns other numbers.
        """
        head, base = self._head, self._base
        if base is self._model or not isinstance(head, torch.nn.Linear) or getattr(head, "bias", None) is not None:
            return False
        seen: list[torch.Tensor] = []
        shape = (1, len(tokens_T), self.vocab_size)
        drawn = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * PLANTED
        planted = drawn.to(self.device, head.weight.dtype)

        def plant(module: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
            seen.append(inputs[0])
            return planted

        hook = head.register_forward_hook(plant)
        try:
            logits = self._model(input_ids=tokens_T.unsqueeze(0), use_cache=False).logits
        finally:
            hook.remove()
        hidden = getattr(base(input_ids=tokens_T.unsqueeze(0), use_cache=False), "last_hidden_state", None)
        if hidden is None or len(seen) != 1:
            return False
        return torch.equal(logits.float(), planted.float()) and torch.equal(seen[0], hidden)

    def _check_causal(self, tokens_T: torch.Tensor, whole_TY: torch.Tensor) -> None:
        """Raise if a token changes earlier outputs by more than rounding, which experts cause by other batches."""
        place = min(TRIAL_PREFIX, len(tokens_T) - 1)
        other_T = torch.cat((tokens_T[:place], (tokens_T[place:] + 1) % self.vocab_size))
        output_TY, _ = self.forward(other_T)
        limit = CAUSAL_ROUNDINGS * torch.finfo(self.dtype).eps * float(whole_TY.abs().max())
        if float((output_TY[:place] - whole_TY[:place]).abs().amax()) > limit:
            raise ValueError("a later token changes the outputs for earlier ones, so it is not a causal model")

    def _working_cache(self, tokens_T: torch.Tensor, whole_TY: torch.Tensor) -> str | None:
        """Return the name of the cache if it continues a sequence correctly, and measure its size; else None."""
        names = inspect.signature((self._base if self.has_plain_head else self._model).forward).parameters
        for name in CACHE_NAMES:
            if name not in names or len(tokens_T) <= TRIAL_PREFIX:
                continue
            self._cache_name = name
            try:
                output_TY, cache = self.forward(tokens_T[:TRIAL_PREFIX], is_cached=True)
                first_bytes, parts = tensor_bytes(cache), [output_TY]
                for place in range(TRIAL_PREFIX, len(tokens_T)):
                    output_TY, cache = self.forward(tokens_T[place : place + 1], cache, is_cached=True)
                    parts.append(output_TY)
            except Exception as error:  # whatever it is, the model works without a cache
                logger.info("the cache of %s does not work: %s", self.config.architecture, error)
                continue
            if cache is not None and self._is_close(torch.cat(parts), whole_TY):
                self._measure_cache(first_bytes)
                return name
        return None

    def _measure_cache(self, first_bytes: int) -> None:
        """Measure how the cache grows from that of the trial's prefix to that of a longer sequence."""
        count = min(LONGER_TRIAL, self.config.max_context_length)
        _, cache = self.forward(torch.arange(count, device=self.device) % self.vocab_size, is_cached=True)
        longer_bytes = tensor_bytes(cache)
        self.cache_token_bytes = max(math.ceil((longer_bytes - first_bytes) / (count - TRIAL_PREFIX)), 0)
        self.cache_fixed_bytes = max(longer_bytes - count * self.cache_token_bytes, 0)

    def _is_close(self, found_TY: torch.Tensor, wanted_TY: torch.Tensor) -> bool:
        limit = TOLERANCE if self.dtype == torch.float32 else COARSE_TOLERANCE
        return float((found_TY - wanted_TY).abs().max()) <= limit * max(1.0, float(wanted_TY.abs().max()))


def tensor_bytes(value: Any, seen: set[int] | None = None) -> int:
    """Return the size of all tensors that an object holds, each counted once."""
    seen = set() if seen is None else seen
    if id(value) in seen or isinstance(value, (str, int, float, type(None), torch.dtype, torch.device)):
        return 0
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, Mapping):
        return sum(tensor_bytes(part, seen) for part in value.values())
    if isinstance(value, (list, tuple)):
        return sum(tensor_bytes(part, seen) for part in value)
    return tensor_bytes(getattr(value, "__dict__", None), seen)


def _loaded(directory: Path, config: GeneralConfig, dtype: torch.dtype) -> Any:
    """Return the model, frozen. Weights that are missing would be random numbers, so they are refused."""
    import transformers

    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    kind: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config.values)]
    try:
        model, report = kind.from_pretrained(
            directory,
            config=config.values,
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            attn_implementation="sdpa" if kind._supports_sdpa else "eager",
            output_loading_info=True,
        )
    except Exception as error:  # transformers does not document all that it raises
        raise InvalidInputError(
            f"{directory}: transformers {transformers_version()} cannot load {config.architecture}: {error}"[:500]
        ) from error
    lost = sorted(report["missing_keys"]) + sorted(str(key) for key in report["mismatched_keys"])
    if lost:
        raise InvalidInputError(
            f"{directory}: weight {lost[0]} of {config.architecture} is missing or has another shape "
            f"({len(lost)} such weights in all)"
        )
    return model.eval().requires_grad_(False)
