"""Last-used times and telemetry that the sweeper will write.

Every request shows that its session is in use, but writing a row for each would cost too much. The times are kept in
memory, and the sweeper writes the latest ones every few seconds; a crash loses at most these.
"""

from __future__ import annotations

from tinsmith.store.base import Statement, statement
from tinsmith.store.rows import TelemetryRow

MAX_UNWRITTEN = 100
"""Telemetry batches of one organisation that wait to be written; the oldest are dropped."""


class Activity:
    """When sessions and models were last used, and telemetry, that the store does not have yet."""

    def __init__(self, max_telemetry_rows: int) -> None:
        self._max_rows = max_telemetry_rows
        self.heartbeats: dict[str, float] = {}
        """When each active session was last heard from."""
        self._used: dict[str, float] = {}
        self.telemetry: list[TelemetryRow] = []

    def use_model(self, model_id: str, now: float) -> None:
        self._used[model_id] = now

    def model_used_at(self, model_id: str) -> float:
        """Return when a model was last asked for something; 0 if the store knows."""
        return self._used.get(model_id, 0.0)

    def add_telemetry(self, row: TelemetryRow) -> None:
        """Keep a batch; an organisation that sends many loses its own oldest one."""
        mine = [index for index, kept in enumerate(self.telemetry) if kept.org_id == row.org_id]
        if len(mine) >= min(self._max_rows, MAX_UNWRITTEN):
            del self.telemetry[mine[0]]
        self.telemetry.append(row)

    def take_statements(self) -> list[Statement]:
        """Return what is to be written, and forget what need not be kept after that."""
        statements = [
            statement("set_session_heartbeat", session_id=session_id, heartbeat_at=at)
            for session_id, at in self.heartbeats.items()
        ]
        used, self._used = self._used, {}
        statements += [statement("set_model_used", model_id=model_id, used_at=at) for model_id, at in used.items()]
        rows, self.telemetry = self.telemetry, []
        statements += [statement("insert_telemetry", row) for row in rows]
        if rows:
            statements.append(statement("prune_telemetry", keep=self._max_rows))
        return statements
