"""Training one model: forward and backward passes, optimizer steps, saving and loading, in the order of the calls.

`submit.in_order` keeps that order.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from tinsmith.client.connection.official_options import RetryConfig
from tinsmith.client.connection.operations import Operations
from tinsmith.client.find_tokenizer import tokenizer_of
from tinsmith.client.losses import custom_loss
from tinsmith.client.losses.custom_loss import LossFn
from tinsmith.client.losses.loss_graph import LossHandle
from tinsmith.client.runtime.futures import Future, awaited, blocking, submitted
from tinsmith.client.sampling import SamplingClient
from tinsmith.client.submit.in_order import OrderedOperations
from tinsmith.errors import InvalidInputError, MissingArgumentError
from tinsmith.transport.base import Purpose
from tinsmith.wire.losses import LossFnType
from tinsmith.wire.message import NOT_GIVEN
from tinsmith.wire.messages.training import (
    AdamParams,
    ForwardBackwardOutput,
    GetInfoRequest,
    GetInfoResponse,
    OptimParams,
    OptimStepRequest,
    OptimStepResponse,
)
from tinsmith.wire.messages.weights import (
    LoadWeightsRequest,
    LoadWeightsResponse,
    SaveWeightsExternalRequest,
    SaveWeightsExternalResponse,
    SaveWeightsForSamplerRequest,
    SaveWeightsForSamplerResponse,
    SaveWeightsRequest,
    SaveWeightsResponse,
    with_console,
)
from tinsmith.wire.routes.table import (
    GET_INFO,
    LOAD_WEIGHTS,
    OPTIM_STEP,
    SAVE_WEIGHTS,
    SAVE_WEIGHTS_EXTERNAL,
    SAVE_WEIGHTS_FOR_SAMPLER,
)
from tinsmith.wire.values.inputs import Datum

logger = logging.getLogger(__name__)

T = TypeVar("T")


class TrainingClient:
    """Trains one model. Created by `ServiceClient.create_lora_training_client` and its siblings."""

    def __init__(self, holder: Operations, model_seq_id: int, model_id: str) -> None:
        self.holder = holder
        self.model_seq_id = model_seq_id
        self.model_id = model_id
        self._order = OrderedOperations(holder, model_id)

    def forward(
        self, data: list[Datum], loss_fn: LossFnType, loss_fn_config: Mapping[str, float | str] | None = None
    ) -> Future[ForwardBackwardOutput]:
        """Compute the loss and its outputs without gradients; the model does not change."""
        return self._order.submit_pass("forward", data, loss_fn, loss_fn_config, forward_only=True)

    forward_async = submitted(forward)

    def forward_backward(
        self, data: list[Datum], loss_fn: LossFnType, loss_fn_config: Mapping[str, float | str] | None = None
    ) -> Future[ForwardBackwardOutput]:
        """Compute the loss and add its gradients to those that the next `optim_step` applies."""
        return self._order.submit_pass("forward_backward", data, loss_fn, loss_fn_config, forward_only=False)

    forward_backward_async = submitted(forward_backward)

    def forward_backward_custom(
        self,
        data: list[Datum],
        loss_fn: LossFn | LossHandle,
        *,
        loss_type_input: Literal["logprobs"] | None = None,
    ) -> Future[ForwardBackwardOutput]:
        """Train with your own loss: a callable over logprobs (its gradients are computed here, with torch), or an
        uploaded loss from `ServiceClient.create_custom_loss`."""
        if loss_type_input not in (None, "logprobs"):
            raise InvalidInputError(f"loss_type_input: only 'logprobs' is supported, got {loss_type_input!r}")
        if isinstance(loss_fn, LossHandle):
            custom_loss.check_inputs(loss_fn, data)
            if loss_fn.loss_id is not None:
                return self._order.submit_pass(
                    "forward_backward", data, "custom", {"loss_id": loss_fn.loss_id}, forward_only=False
                )
            loss_fn = custom_loss.loss_of_handle(
                loss_fn
            )  # the server does not run custom losses, so the graph runs in this process
        return self._order.submit_custom(data, loss_fn)

    forward_backward_custom_async = submitted(forward_backward_custom)

    def optim_step(
        self, optim_params: OptimParams | None = None, *, adam_params: AdamParams | None = None
    ) -> Future[OptimStepResponse]:
        """Apply the accumulated gradients and clear them."""
        params = optim_params if optim_params is not None else adam_params
        if params is None:
            raise MissingArgumentError("optim_step needs its parameters, for example AdamParams(learning_rate=1e-4)")
        return self._order.submit(
            "optim_step",
            OPTIM_STEP,
            OptimStepRequest(model_id=self.model_id, optim_params=params),
        )

    optim_step_async = submitted(optim_step)

    def save_state(
        self,
        name: str,
        ttl_seconds: int | None = None,
        overwrite: bool = False,
        user_metadata: dict[str, str] | None = None,
    ) -> Future[SaveWeightsResponse]:
        """Save weights and optimizer state under a name, to resume from later."""
        return self._order.submit(
            "save_state",
            SAVE_WEIGHTS,
            SaveWeightsRequest(
                model_id=self.model_id,
                path=name,
                ttl_seconds=_given(ttl_seconds),
                overwrite=overwrite,
                user_metadata=_given(user_metadata),
            ),
            lambda answer: with_console(answer, self.holder.console),
        )

    save_state_async = submitted(save_state)

    def load_state(self, path: str, weights_access_token: str | None = None) -> Future[LoadWeightsResponse]:
        """Load weights only. Prefer `ServiceClient.create_training_client_from_state`."""
        return self._load(path, weights_access_token, optimizer=False)

    load_state_async = submitted(load_state)

    def load_state_with_optimizer(
        self, path: str, weights_access_token: str | None = None
    ) -> Future[LoadWeightsResponse]:
        """Load weights and optimizer state."""
        return self._load(path, weights_access_token, optimizer=True)

    load_state_with_optimizer_async = submitted(load_state_with_optimizer)

    def save_weights_for_sampler(
        self, name: str, ttl_seconds: int | None = None, user_metadata: dict[str, str] | None = None
    ) -> Future[SaveWeightsForSamplerResponse]:
        """Save a copy of the weights to sample from."""
        return self._order.submit(
            "save_weights_for_sampler",
            SAVE_WEIGHTS_FOR_SAMPLER,
            SaveWeightsForSamplerRequest(
                model_id=self.model_id,
                path=name,
                ttl_seconds=_given(ttl_seconds),
                user_metadata=_given(user_metadata),
            ),
            lambda answer: with_console(SaveWeightsForSamplerResponse(path=answer.path), self.holder.console),
        )

    save_weights_for_sampler_async = submitted(save_weights_for_sampler)

    def save_weights_external(
        self, name: str, ttl_seconds: int | None = None, age_encryption_recipients: list[str] | None = None
    ) -> Future[SaveWeightsExternalResponse]:
        """Export the weights as files to download, encrypted for the recipients if any are given."""
        return self._order.submit(
            "save_weights_external",
            SAVE_WEIGHTS_EXTERNAL,
            SaveWeightsExternalRequest(
                model_id=self.model_id,
                path=name,
                ttl_seconds=_given(ttl_seconds),
                age_encryption_recipients=_given(age_encryption_recipients),
            ),
            lambda answer: SaveWeightsExternalResponse(path=answer.path),
        )

    save_weights_external_async = submitted(save_weights_external)

    def _create_sampler(
        self, name: str | None = None, retry_config: RetryConfig | None = None, record_stability_info: bool = False
    ) -> Future[SamplingClient]:
        """Freeze the current weights and return a client that samples from them."""
        if name is not None:
            logger.warning(
                "save_weights_and_get_sampling_client ignores its name; use save_weights_for_sampler to keep one"
            )
        sampler_number = self.holder.session.samplers.take()
        saved = self._order.submit(
            "save_weights_for_sampler",
            SAVE_WEIGHTS_FOR_SAMPLER,
            SaveWeightsForSamplerRequest(model_id=self.model_id, sampling_session_seq_id=sampler_number),
        )
        return self.holder.submit(
            "create_sampling_client", self._sampler_of(saved, retry_config, record_stability_info)
        )

    save_weights_and_get_sampling_client = blocking(_create_sampler)
    save_weights_and_get_sampling_client_async = awaited(_create_sampler)

    def _create_sampling_client(
        self, model_path: str, retry_config: RetryConfig | None = None, record_stability_info: bool = False
    ) -> Future[SamplingClient]:
        """Create a client that samples from saved weights."""
        return SamplingClient.create(
            self.holder, model_path=model_path, retry_config=retry_config, record_stability_info=record_stability_info
        )

    create_sampling_client = blocking(_create_sampling_client)
    create_sampling_client_async = awaited(_create_sampling_client)

    def _get_info(self) -> Future[GetInfoResponse]:
        """Return what the server knows about this model."""
        call = self.holder.connection.call(GET_INFO, GetInfoRequest(model_id=self.model_id), purpose=Purpose.TRAIN)
        return self.holder.submit("get_info", call)

    get_info = blocking(_get_info)
    get_info_async = awaited(_get_info)

    def get_tokenizer(self) -> Any:
        """Return the model's tokenizer: the server's if it has one, else from a directory or the Hugging Face hub."""
        info = self.get_info()
        return tokenizer_of(self.holder, info.model_data.model_name or info.model_name, info.model_data.tokenizer_id)

    def get_console_url(self) -> str:
        """Return the URL of this run in the console."""
        return f"{self.holder.console}/training_runs/{self.model_id}"

    def get_telemetry(self) -> Any:
        return self.holder.telemetry

    def _load(self, path: str, token: str | None, *, optimizer: bool) -> Future[LoadWeightsResponse]:
        return self._order.submit(
            "load_state",
            LOAD_WEIGHTS,
            LoadWeightsRequest(
                model_id=self.model_id,
                path=path,
                optimizer=optimizer,
                weights_access_token=_given(token),
            ),
        )

    async def _sampler_of(
        self, saved: Future[Any], retry_config: RetryConfig | None, record_stability_info: bool
    ) -> SamplingClient:
        answer = await saved
        if answer.sampling_session_id is None:
            return await SamplingClient.create(
                self.holder,
                model_path=answer.path,
                retry_config=retry_config,
                record_stability_info=record_stability_info,
            )
        return SamplingClient(
            self.holder,
            sampling_session_id=answer.sampling_session_id,
            retry_config=retry_config,
            record_stability_info=record_stability_info,
        )


def _given(value: T | None) -> Any:
    """Map None to "not given", as the official client does."""
    return NOT_GIVEN if value is None else value
