"""The entry point: one `ServiceClient` per program creates the clients for training, sampling and everything else."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future as PlainFuture
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tinsmith.client.connection.connection import Connection
from tinsmith.client.connection.local_engine import client_config, local_server
from tinsmith.client.connection.official_options import RetryConfig
from tinsmith.client.connection.operations import Operations
from tinsmith.client.connection.polling import QueueStateObserver
from tinsmith.client.connection.session import EndStatus, Session
from tinsmith.client.losses.loss_graph import LossHandle, trace
from tinsmith.client.recovery import RecoveringTrainingClient, RecoveryEvent
from tinsmith.client.rest import RestClient, copy_weights
from tinsmith.client.runtime.futures import Future, awaited, blocking
from tinsmith.client.runtime.metrics import OperationMetrics
from tinsmith.client.sampling import SamplingClient
from tinsmith.client.training import TrainingClient
from tinsmith.config import ClientConfig
from tinsmith.errors import InvalidInputError, TinkerError
from tinsmith.transport.base import Transport
from tinsmith.wire.message import NOT_GIVEN
from tinsmith.wire.messages.service import GetServerCapabilitiesResponse
from tinsmith.wire.messages.training import (
    CreateCustomLossRequest,
    CreateModelRequest,
    CustomLossInputRank,
    LoraConfig,
    OptimizerConfig,
)
from tinsmith.wire.messages.weights import CopyWeightsRequest, LoadWeightsRequest
from tinsmith.wire.routes.table import (
    CREATE_CUSTOM_LOSS,
    CREATE_MODEL,
    GET_SERVER_CAPABILITIES,
    LOAD_WEIGHTS,
)

logger = logging.getLogger(__name__)


class ServiceClient:
    """A program's connection to a server; a context manager. Makes no request until one is needed.

    `config` passes a whole ClientConfig; the other arguments are its most common fields.
    """

    def __init__(
        self,
        user_metadata: dict[str, str] | None = None,
        project_id: str | None = None,
        *,
        display_name: str | None = None,
        base_url: str | None = None,
        api_key: str | None = None,
        default_headers_overrides: Mapping[str, str] | None = None,
        config: ClientConfig | None = None,
        transport: Transport | None = None,
        **kwargs: Any,
    ) -> None:
        for name in kwargs:
            warnings.warn(f"ServiceClient ignores the argument {name!r}", UserWarning, stacklevel=2)
        arguments: dict[str, Any] = {
            "base_url": base_url,
            "api_key": api_key,
            "project_id": project_id,
            "default_headers": dict(default_headers_overrides) if default_headers_overrides else None,
        }
        if config is None:
            config = client_config(**arguments)
        else:
            given = {name: value for name, value in arguments.items() if value is not None}
            config = dataclasses.replace(config, **given)
        connection = Connection(config, transport=transport)
        session = Session(
            connection,
            user_metadata=user_metadata,
            project_id=project_id or config.project_id,
            display_name=display_name,
        )
        self._holder = Operations(connection, session)

    @property
    def holder(self) -> Operations:
        return self._holder

    def _get_capabilities(self) -> Future[GetServerCapabilitiesResponse]:
        """Return the models that the server offers."""
        return self._holder.submit("get_server_capabilities", self._holder.connection.call(GET_SERVER_CAPABILITIES))

    get_server_capabilities = blocking(_get_capabilities)
    get_server_capabilities_async = awaited(_get_capabilities)

    def _create_lora(
        self,
        base_model: str,
        rank: int = 32,
        seed: int | None = None,
        train_mlp: bool = True,
        train_attn: bool = True,
        train_unembed: bool = True,
        user_metadata: dict[str, str] | None = None,
        optimizer: OptimizerConfig | None = None,
    ) -> Future[TrainingClient]:
        """Create a LoRA adapter of a base model and return the client that trains it."""
        if not (train_mlp or train_attn or train_unembed):
            raise InvalidInputError(
                "nothing to train: at least one of train_mlp, train_attn and train_unembed must be True"
            )
        lora = LoraConfig(
            rank=rank,
            seed=NOT_GIVEN if seed is None else seed,
            train_mlp=train_mlp,
            train_attn=train_attn,
            train_unembed=train_unembed,
        )
        return self._holder.submit(
            "create_model",
            self._create_model(base_model, lora, user_metadata, optimizer, self._holder.session.models.take()),
            limit=self._holder.limit("create_model", base_model),
        )

    create_lora_training_client = blocking(_create_lora)
    create_lora_training_client_async = awaited(_create_lora)

    def _from_state(
        self,
        path: str,
        base_model: str | None = None,
        user_metadata: dict[str, str] | None = None,
        weights_access_token: str | None = None,
        optimizer: OptimizerConfig | None = None,
    ) -> Future[TrainingClient]:
        """Create a run that starts with a checkpoint's weights and a fresh optimizer."""
        return self._resume(path, base_model, user_metadata, weights_access_token, optimizer, with_optimizer=False)

    create_training_client_from_state = blocking(_from_state)
    create_training_client_from_state_async = awaited(_from_state)

    def _from_state_with_optimizer(
        self,
        path: str,
        base_model: str | None = None,
        user_metadata: dict[str, str] | None = None,
        weights_access_token: str | None = None,
    ) -> Future[TrainingClient]:
        """Create a run that resumes exactly where a checkpoint was saved, optimizer included."""
        return self._resume(path, base_model, user_metadata, weights_access_token, None, with_optimizer=True)

    create_training_client_from_state_with_optimizer = blocking(_from_state_with_optimizer)
    create_training_client_from_state_with_optimizer_async = awaited(_from_state_with_optimizer)

    def _create_sampler(
        self,
        model_path: str | None = None,
        base_model: str | None = None,
        retry_config: RetryConfig | None = None,
        record_stability_info: bool = False,
    ) -> Future[SamplingClient]:
        """Create a client that samples from saved weights or from a base model.

        With both, the saved weights are used, and `base_model` must be the model that they belong to.
        """
        return SamplingClient.create(
            self._holder,
            model_path=model_path,
            base_model=base_model,
            retry_config=retry_config,
            record_stability_info=record_stability_info,
        )

    create_sampling_client = blocking(_create_sampler)
    create_sampling_client_async = awaited(_create_sampler)

    def create_custom_loss(
        self, fn: Callable[..., Any], input_ranks: Mapping[str, CustomLossInputRank]
    ) -> Future[LossHandle]:
        """Trace a loss and upload it, if the server runs custom losses; otherwise it runs in this process."""
        traced = trace(fn, input_ranks)
        number = self._holder.session.losses.take()

        async def run() -> LossHandle:
            connection = self._holder.connection
            await connection.ready()
            session_id = await self._holder.session.id()
            handle = LossHandle(traced.name, tuple(traced.inputs), session_id, traced.module)
            if not connection.server.custom_loss_server_side:
                return handle  # forward_backward_custom then runs it in this process
            request = CreateCustomLossRequest(
                session_id=session_id,
                custom_loss_seq_id=number,
                name=traced.name,
                inputs=traced.inputs,
                graph=traced.graph,
            )
            answer = await self._holder.run(CREATE_CUSTOM_LOSS, request, what=f"create_custom_loss {traced.name}")
            return dataclasses.replace(handle, loss_id=answer.loss_id)

        return self._holder.submit(
            "create_custom_loss", run(), limit=self._holder.limit("create_custom_loss", traced.name)
        )

    def copy_weights(
        self, path: str, *, ttl_seconds: int | None = None, weights_access_token: str | None = None
    ) -> Future[str]:
        """Copy a checkpoint into this client's project and return the path of the copy."""
        holder = self._holder
        number = holder.session.models.take()
        project = holder.connection.config.project_id

        async def in_session() -> dict[str, Any]:
            return {"session_id": await holder.session.id(), "model_seq_id": number}

        async def run() -> str:
            request = CopyWeightsRequest(
                source_path=path,
                **({"destination_project_id": project} if project else await in_session()),
                ttl_seconds=NOT_GIVEN if ttl_seconds is None else ttl_seconds,
            )
            return await copy_weights(holder, request, weights_access_token)

        return holder.submit("copy_weights", run())

    def with_recovery(
        self,
        client: TrainingClient,
        on_recovery: Callable[[RecoveryEvent], None] | None = None,
        *,
        checkpoint: str | None = None,
        max_recoveries: int = 3,
    ) -> RecoveringTrainingClient:
        """Wrap a training client so that a run that the server loses is resumed from its latest checkpoint."""
        return RecoveringTrainingClient(
            client,
            self._from_state_with_optimizer,
            on_recovery=on_recovery,
            checkpoint=checkpoint,
            max_recoveries=max_recoveries,
        )

    def create_rest_client(self) -> RestClient:
        """Create a client for runs and checkpoints that shares this client's connection."""
        return RestClient(self._holder)

    def get_console_url(self) -> str:
        """Return the URL of the console's list of sessions."""
        return f"{self._holder.console}/sessions"

    def get_telemetry(self) -> Any:
        return self._holder.telemetry

    def metrics(self) -> Mapping[str, OperationMetrics]:
        """Return counts and percentiles of this client's operations so far."""
        return self._holder.metrics.snapshot()

    def set_queue_observer(self, make: Callable[[str], QueueStateObserver] | None) -> None:
        """Report operations that wait to your own observer; `make` creates one from an operation's description."""
        self._holder.queue_observer = make

    def close(self, status: EndStatus = "success", detail: str | None = None) -> PlainFuture[None]:
        """Finish the session, close all connections and stop the thread. Everything is closed when this returns."""
        done: Future[None] = Future()
        runner = self._holder.connection.runner
        if not runner.is_closed and not runner.is_inherited:
            try:
                runner.submit(self._holder.session.finish(status, detail)).result(1.0)
            except TimeoutError:
                logger.warning("finishing the session timed out")
            finally:
                self._holder.close()
        done.set_result(None)
        return done

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close("success")
        else:
            self.close("errored" if isinstance(error, Exception) else "interrupted", f"{type(error).__name__}: {error}")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.__exit__, kind, error, trace)

    async def _create_model(
        self,
        base_model: str,
        lora: LoraConfig,
        user_metadata: dict[str, str] | None,
        optimizer: OptimizerConfig | None,
        number: int,
    ) -> TrainingClient:
        holder = self._holder
        values: dict[str, Any] = {} if optimizer is None else {"optimizer_config": optimizer}
        request = CreateModelRequest(
            session_id=await holder.session.id(),
            model_seq_id=number,
            base_model=base_model,
            user_metadata=NOT_GIVEN if user_metadata is None else user_metadata,
            lora_config=lora,
            **values,
        )
        answer = await holder.run(CREATE_MODEL, request, what=f"create_model {base_model}")
        return TrainingClient(holder, number, answer.model_id)

    def _resume(
        self,
        path: str,
        base_model: str | None,
        user_metadata: dict[str, str] | None,
        token: str | None,
        optimizer: OptimizerConfig | None,
        *,
        with_optimizer: bool,
    ) -> Future[TrainingClient]:
        number = self._holder.session.models.take()
        access = NOT_GIVEN if token is None else token

        async def create_by_loading() -> TrainingClient:
            session_id = await self._holder.session.id()
            request = LoadWeightsRequest(
                session_id=session_id,
                model_seq_id=number,
                path=path,
                optimizer=with_optimizer,
                base_model=NOT_GIVEN if base_model is None else base_model,
                user_metadata=NOT_GIVEN if user_metadata is None else user_metadata,
                optimizer_config=NOT_GIVEN if optimizer is None else optimizer,
                weights_access_token=access,
            )
            await self._holder.run(LOAD_WEIGHTS, request, what=f"load_weights {path}")
            return TrainingClient(self._holder, number, f"{session_id}:train:{number}")

        async def create_then_load() -> TrainingClient:
            info = await self._holder.weights_info(path)
            if not info.is_lora or info.lora_rank is None:
                raise TinkerError(f"{path} contains no LoRA adapter; only LoRA checkpoints can be trained")
            lora = LoraConfig(
                rank=info.lora_rank,
                train_mlp=True if info.train_mlp is None else info.train_mlp,
                train_attn=True if info.train_attn is None else info.train_attn,
                train_unembed=True if info.train_unembed is None else info.train_unembed,
            )
            model = await self._create_model(base_model or info.base_model, lora, user_metadata, optimizer, number)
            load = model.load_state_with_optimizer if with_optimizer else model.load_state
            await load(path, token)
            return model

        async def run() -> TrainingClient:
            await self._holder.connection.ready()
            if self._holder.connection.server.create_model_via_load_weights:
                return await create_by_loading()
            return await create_then_load()

        name = "create_training_client_from_state"
        return self._holder.submit(name, run(), limit=self._holder.limit(name, path))


@contextlib.contextmanager
def local(
    models: Mapping[str, str] | None = None,
    *,
    data_dir: str | Path | None = None,
    settings: Mapping[str, object] | None = None,
    **service: Any,
) -> Iterator[ServiceClient]:
    """Start a private server for the duration of a `with` block and return a client connected to it.

    `models` maps names to sources (a directory, a GGUF file, a hub id); without it the server offers the default model.
    Without `data_dir` the server's data is deleted at the end; downloaded models stay in the user's data directory.
    `settings` are server settings by name, such as `{"dtype": "float32"}`. All other arguments go to `ServiceClient`.
    """
    with (
        local_server(models, data_dir, settings) as address,
        ServiceClient(base_url=address.url, api_key=address.key, **service) as client,
    ):
        yield client
