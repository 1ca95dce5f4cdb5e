"""The timings in /metrics: buckets that add up, in the format that Prometheus reads."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from tinsmith.server.ops.metrics import BUCKETS, Metrics


def test_times_are_counted_in_every_bucket_that_holds_them() -> None:
    metrics = Metrics()
    for seconds in (0.001, 0.0011, 4.0, 31.0):
        metrics.request("asample", 200, seconds)
    metrics.request("healthz", 200, 0.5)
    metrics.job("sample", "done", 0.5, 2.0)
    metrics.job("sample", "failed", 0.5, 2.0)
    families = {family.name: family for family in text_string_to_metric_families(metrics.text().decode())}
    times = families["tinsmith_request_seconds"]
    assert times.type == "histogram"
    found = {
        sample.labels["le"]: sample.value
        for sample in times.samples
        if sample.name.endswith("_bucket") and sample.labels["route"] == "asample"
    }
    assert list(found) == [*map(str, BUCKETS), "+Inf"]
    assert (found["0.001"], found["0.0025"], found["1.0"], found["5.0"], found["30.0"], found["+Inf"]) == (
        1,
        2,
        2,
        3,
        3,
        4,
    )
    values = {(sample.name, *sample.labels.values()): sample.value for sample in times.samples}
    assert values["tinsmith_request_seconds_count", "asample"] == 4
    assert values["tinsmith_request_seconds_sum", "asample"] == 0.001 + 0.0011 + 4.0 + 31.0
    stages = {
        (sample.labels["kind"], sample.labels["stage"]): sample.value
        for sample in families["tinsmith_job_seconds"].samples
        if sample.name.endswith("_sum")
    }
    assert stages == {("sample", "waiting"): 1.0, ("sample", "running"): 4.0}
    ended = {
        sample.labels["state"]: sample.value
        for sample in families["tinsmith_jobs"].samples
        if sample.name.endswith("_total")
    }
    assert ended == {"done": 1, "failed": 1}


def test_percentiles_are_the_upper_edges_of_their_buckets() -> None:
    metrics = Metrics()
    for seconds in [0.09] * 50 + [0.9] * 45 + [31.0] * 5:
        metrics.request("asample", 200, seconds)
    metrics.job("sample", "done", 0.5, 31.0)
    found = [(each.stage, each.name, each.count, each.p50_s, each.p95_s) for each in metrics.timings()]
    assert found == [
        ("waiting", "sample", 1, 0.5, 0.5),
        ("running", "sample", 1, None, None),
        ("answering", "asample", 100, 0.1, 1.0),
    ]
    assert Metrics().timings() == []
