"""What a model's name stands for: a base model, a checkpoint by its path, `<base>;<path>`, or the operator's alias.

The checkpoint is looked up for every request, with the caller's own rights: one that was deleted, replaced, unpublished
or never was the caller's is noticed at once. It is never answered by another model.
"""

from __future__ import annotations

from dataclasses import dataclass

from tinsmith.engine.protocol import ModelCard
from tinsmith.errors import InvalidInputError
from tinsmith.server.auth.identity import Caller
from tinsmith.server.jobs.accept_sample import new_sampler
from tinsmith.server.jobs.job import digest_of
from tinsmith.server.refusals import UnknownModelError, UnknownResourceError
from tinsmith.server.runs.model_spec import card_of
from tinsmith.server.services import Services
from tinsmith.store.base import statement
from tinsmith.store.rows import CheckpointRow, SamplerRow
from tinsmith.wire.messages.openai import ListedModel

SCHEME = "tinker://"
MAX_LISTED = 1000
"""Checkpoints in one list of models."""
NUMBER_DIGITS = 15
"""Hexadecimal digits of a sampler's number: fewer than 63 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleTarget:
    """What is sampled."""

    name: str
    """As the client wrote it."""
    card: ModelCard
    checkpoint: CheckpointRow | None = None

    @property
    def path(self) -> str | None:
        return self.checkpoint.path if self.checkpoint is not None else None

    @property
    def number(self) -> int:
        """Return a number for the sampler: equal for the same weights, and different if a name was saved again."""
        parts = (
            ["base", self.card.name] if self.checkpoint is None else [self.checkpoint.path, self.checkpoint.directory]
        )
        return int(digest_of(*(part.encode() for part in parts))[:NUMBER_DIGITS], 16)


async def find_target(services: Services, caller: Caller, name: str) -> SampleTarget:
    """Return what a name stands for; raise UnknownResourceError if it is nothing that the caller may sample."""
    meant = services.config.aliases.get(name, name)
    base, _, path = meant.rpartition(";") if SCHEME in meant else (meant, "", "")
    if not path:
        card = next((card for card in services.backend.cards() if card.name == base), None)
        if card is None or not card.sampleable:
            raise UnknownModelError(f"model {name!r} does not exist or is not yours to use; list those that are")
        return SampleTarget(name=name, card=card)
    try:
        row = await services.access.checkpoint(caller, path)
    except (InvalidInputError, UnknownResourceError) as error:  # not a path, or a path to nothing
        raise UnknownModelError(str(error)) from None
    if base and base != row.base_model:
        raise InvalidInputError(
            f"model: {base!r} is not the base model of {path}, which is {row.base_model!r}", field="model"
        )
    return SampleTarget(name=name, card=card_of(services.backend, row.base_model), checkpoint=row)


async def sampler_of(services: Services, caller: Caller, session_id: str, target: SampleTarget) -> str:
    """Return the id of the session's sampler for a target; make it if this is its first request."""
    sampler_id = f"{session_id}:sample:{target.number}"
    if sampler_id in services.access.samplers:
        return sampler_id
    if not await services.store.read(SamplerRow, "sampler", sampler_id=sampler_id):
        base = target.card.name if target.path is None else None
        row = await new_sampler(services, caller, sampler_id, session_id, base, target.path)
        await services.store.write(statement("insert_sampler_if_absent", row))
    return sampler_id


def template_of(services: Services, target: SampleTarget) -> str | None:
    """Return the file of the chat template that the operator chose for a model or a checkpoint."""
    chosen = services.config.chat_templates
    names = (target.name, target.path, target.card.name, "")
    return next((str(chosen[name]) for name in names if name is not None and name in chosen), None)


async def list_models(services: Services, caller: Caller) -> list[ListedModel]:
    """Return the base models, the caller's sampler checkpoints and those that the organisation published, and aliases
    of what the caller may use."""
    rows = await services.store.read(
        CheckpointRow,
        "checkpoints_to_sample",
        org_id=caller.org_id,
        user_id=caller.user_id,
        project_id=caller.project_id,
        after=services.clock(),
        limit=MAX_LISTED,
    )
    models = [base_model(card) for card in services.backend.cards() if card.sampleable]
    models += [checkpoint_model(row) for row in rows]
    for name in services.config.aliases:
        try:
            found = await find_target(services, caller, name)
        except (UnknownResourceError, InvalidInputError):
            continue
        models.append(described(services, found))
    return models


def described(services: Services, target: SampleTarget) -> ListedModel:
    """Return a target as an entry of the list."""
    model = base_model(target.card) if target.checkpoint is None else checkpoint_model(target.checkpoint)
    root = services.config.aliases.get(target.name, model.root)
    return ListedModel(id=target.name, created=model.created, owned_by=model.owned_by, root=root)


def base_model(card: ModelCard) -> ListedModel:
    return ListedModel(id=card.name, created=0, owned_by="tinsmith")


def checkpoint_model(row: CheckpointRow) -> ListedModel:
    return ListedModel(id=row.path, created=int(row.created_at), owned_by=row.user_id, root=row.base_model)
