"""Every route that our server answers: the protocol's, our own, and those of other services' clients."""

from __future__ import annotations

from collections.abc import Mapping

from tinsmith.wire.routes.anthropic import ANTHROPIC_ROUTES
from tinsmith.wire.routes.openai import OPENAI_ROUTES
from tinsmith.wire.routes.own import OWN_ROUTES
from tinsmith.wire.routes.table import ROUTES, Route

SERVED_ROUTES: tuple[Route, ...] = (*ROUTES, *OWN_ROUTES, *OPENAI_ROUTES, *ANTHROPIC_ROUTES)
SERVED_BY_NAME: Mapping[str, Route] = {route.name: route for route in SERVED_ROUTES}
