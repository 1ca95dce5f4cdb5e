"""Rows with every field set, for tests of the stores."""

from __future__ import annotations

from typing import Any

from tinsmith.store import rows


def org(org_id: str = "org-1", **fields: Any) -> rows.OrgRow:
    return rows.OrgRow(**{"org_id": org_id, "name": "Tin & Söhne", "created_at": 1.5} | fields)


def user(user_id: str = "user-1", **fields: Any) -> rows.UserRow:
    values = {"user_id": user_id, "org_id": "org-1", "name": "Ada", "email": "ada@example.org", "created_at": 2.5}
    return rows.UserRow(**values | fields)


def project(project_id: str = "project-1", **fields: Any) -> rows.ProjectRow:
    return rows.ProjectRow(**{"project_id": project_id, "org_id": "org-1", "name": "P", "created_at": 3.5} | fields)


def key(key_id: int = 1, **fields: Any) -> rows.KeyRow:
    values = {
        "key_id": key_id,
        "digest": f"digest-{key_id}",
        "hint": "tml-ab",
        "org_id": "org-1",
        "user_id": "user-1",
        "project_id": "project-1",
        "name": "laptop",
        "note": "for trying",
        "scopes": '["sample"]',
        "created_at": 4.0,
        "expires_at": 4e9,
        "revoked_at": None,
        "requests_per_minute": 60,
        "tokens_per_day": 2**40,
    }
    return rows.KeyRow(**values | fields)


def session(session_id: str = "session-1", **fields: Any) -> rows.SessionRow:
    values = {
        "session_id": session_id,
        "org_id": "org-1",
        "user_id": "user-1",
        "project_id": "project-1",
        "display_name": "first try",
        "tags": '["a"]',
        "user_metadata": '{"k": "v"}',
        "sdk_version": "0.36.0",
        "created_at": 5.0,
        "heartbeat_at": 6.0,
        "status_detail": "success",
        "detail": "all went well",
    }
    return rows.SessionRow(**values | fields)


def model(model_id: str = "model-1", **fields: Any) -> rows.ModelRow:
    values = {
        "model_id": model_id,
        "session_id": "session-1",
        "org_id": "org-1",
        "user_id": "user-1",
        "project_id": "project-1",
        "base_model": "stub/model",
        "lora": '{"rank": 8}',
        "optimizer": "adamw",
        "user_metadata": "{}",
        "created_at": 7.0,
        "used_at": 8.0,
    }
    return rows.ModelRow(**values | fields)


def sampler(sampler_id: str = "sampler-1", **fields: Any) -> rows.SamplerRow:
    values = {
        "sampler_id": sampler_id,
        "session_id": "session-1",
        "org_id": "org-1",
        "user_id": "user-1",
        "base_model": "stub/model",
        "model_path": "tinker://model-1/sampler_weights/a",
        "directory": "/data/a",
        "adapter_key": "key-a",
        "created_at": 9.0,
    }
    return rows.SamplerRow(**values | fields)


def job(lane: str = "model-1", seq: int = 1, **fields: Any) -> rows.JobRow:
    values = {
        "request_id": f"{lane}:{seq}",
        "lane": lane,
        "seq": seq,
        "kind": "forward_backward",
        "session_id": "session-1",
        "org_id": "org-1",
        "user_id": "user-1",
        "digest": "d",
        "job": bytes(range(256)),
        "created_at": 10.0 + seq,
    }
    return rows.JobRow(**values | fields)


def result(request_id: str = "model-1:1", **fields: Any) -> rows.ResultRow:
    values = {
        "request_id": request_id,
        "body": b"\x00result\xff",
        "encoding": "protobuf",
        "digest": "d",
        "started_at": 11.0,
        "finished_at": 12.0,
    }
    return rows.ResultRow(**values | fields)


def checkpoint(name: str = "a", **fields: Any) -> rows.CheckpointRow:
    values = {
        "path": f"tinker://model-1/weights/{name}",
        "model_id": "model-1",
        "kind": "weights",
        "name": name,
        "session_id": "session-1",
        "org_id": "org-1",
        "user_id": "user-1",
        "project_id": "project-1",
        "base_model": "stub/model",
        "lora": "{}",
        "optimizer": "adamw",
        "directory": f"/data/{name}",
        "size_bytes": 2**33,
        "digest": "d",
        "public": False,
        "user_metadata": "{}",
        "created_at": 13.0,
        "expires_at": 14.0,
    }
    return rows.CheckpointRow(**values | fields)


def custom_loss(loss_id: str = "loss-1", **fields: Any) -> rows.CustomLossRow:
    values = {
        "loss_id": loss_id,
        "session_id": "session-1",
        "org_id": "org-1",
        "user_id": "user-1",
        "name": "mine",
        "request": b"{}",
        "created_at": 15.0,
    }
    return rows.CustomLossRow(**values | fields)


def usage(hour: int = 100, **fields: Any) -> rows.UsageRow:
    values = {
        "hour": hour,
        "org_id": "org-1",
        "user_id": "user-1",
        "project_id": "project-1",
        "session_id": "session-1",
        "base_model": "stub/model",
        "run_id": "",
        "training": 7,
    }
    return rows.UsageRow(**values | fields)


def step(seq: int = 2, step: int = 1, **fields: Any) -> rows.StepRow:
    values = {
        "model_id": "model-1",
        "seq": seq,
        "step": step,
        "datums": 3,
        "seconds": 0.25,
        "finished_at": 12.5,
        "metrics": '{"loss:sum": 0.5}',
    }
    return rows.StepRow(**values | fields)


def audit(at: float = 16.0, **fields: Any) -> rows.AuditRow:
    values = {
        "at": at,
        "org_id": "org-1",
        "user_id": "user-1",
        "event": "checkpoint.deleted",
        "group_name": "checkpoints",
        "details": '{"by": "hand"}',
        "model_id": "model-1",
        "tinker_path": "tinker://model-1/weights/a",
        "purpose": "tidying",
    }
    return rows.AuditRow(**values | fields)


def telemetry(at: float = 17.0, **fields: Any) -> rows.TelemetryRow:
    return rows.TelemetryRow(**{"at": at, "org_id": "org-1", "session_id": "session-1", "body": "{}"} | fields)
