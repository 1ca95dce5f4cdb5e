"""The scheduler as a simulation: device time is counted, no clock runs."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from tinsmith.engine.worker.scheduler import QueuedJob, Scheduler, Turn


@dataclass
class Device:
    """Runs turns and keeps the books: training jobs of many slices, samples of many tokens."""

    scheduler: Scheduler
    slices: dict[str, list[float]] = field(default_factory=dict)
    samples: dict[str, int] = field(default_factory=dict)
    jobs: dict[str, QueuedJob] = field(default_factory=dict)
    now: float = 0.0
    used: Counter[str] = field(default_factory=Counter)
    done: dict[str, float] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)

    def train(self, name: str, tenant: str, slices: list[float]) -> None:
        self.slices[name] = list(slices)
        self._add(QueuedJob(id=name, tenant=tenant, kind="train"))

    def sample(self, name: str, tenant: str, tokens: int) -> None:
        self.samples[name] = tokens
        self._add(QueuedJob(id=name, tenant=tenant, kind="sample"))

    def _add(self, job: QueuedJob) -> None:
        self.jobs[job.id] = job
        self.scheduler.add(job)

    def run(self, until: float) -> None:
        while self.now < until and (turn := self.scheduler.next()):
            if turn.kind == "train":
                self._train(turn)
            else:
                self._sample(turn)

    def _train(self, turn: Turn) -> None:
        assert turn.job_id is not None
        cost = self.slices[turn.job_id].pop(0)
        self.order.append(turn.job_id)
        self._spend("train", dict.fromkeys(turn.tenants, cost))
        if not self.slices[turn.job_id]:
            self._finish(turn.job_id)

    def _sample(self, turn: Turn) -> None:
        """A step costs 20 ms and 2 ms per sample, shared out by samples."""
        running = [
            name for name, tokens in self.samples.items() if tokens > 0 and self.jobs[name].tenant in turn.tenants
        ]
        tenants = Counter(self.jobs[name].tenant for name in running)
        cost = 0.02 + 0.002 * len(running)
        self._spend("sample", {tenant: cost * count / len(running) for tenant, count in tenants.items()})
        for name in running:
            self.samples[name] -= 1
            if self.samples[name] == 0:
                self._finish(name)

    def _spend(self, kind: str, costs: dict[str, float]) -> None:
        self.scheduler.charge(kind, costs)  # type: ignore[arg-type]
        self.used.update(costs)
        self.now += sum(costs.values())

    def _finish(self, name: str) -> None:
        self.scheduler.remove(name)
        self.done[name] = self.now


@pytest.fixture
def device() -> Device:
    return Device(Scheduler(quantum_s=0.1))


def is_fair(device: Device, tenants: list[str]) -> bool:
    shares = [device.used[tenant] for tenant in tenants]
    return max(shares) <= 1.1 * min(shares)


def test_two_trainers_get_equal_time_whatever_their_slices(device: Device) -> None:
    chance = random.Random(1)
    device.train("short", "a", [chance.uniform(0.005, 0.05) for _ in range(10000)])
    device.train("long", "b", [chance.uniform(0.3, 0.9) for _ in range(1000)])
    device.run(60)
    assert is_fair(device, ["a", "b"])


def test_many_jobs_win_no_more_time(device: Device) -> None:
    for number in range(20):
        device.train(f"many{number}", "a", [0.1] * 1000)
    device.train("one", "b", [0.1] * 1000)
    device.run(60)
    assert is_fair(device, ["a", "b"])


def test_a_sampling_and_a_training_tenant_get_equal_time(device: Device) -> None:
    for number in range(8):
        device.sample(f"s{number}", "a", 10**6)
    device.train("t", "b", [0.25] * 10**4)
    device.run(60)
    assert is_fair(device, ["a", "b"])


def test_one_who_samples_little_does_not_pull_a_heavy_one_past_a_trainer(device: Device) -> None:
    for number in range(30):
        device.sample(f"a{number}", "a", 10**6)
    device.sample("b0", "b", 10**6)
    device.train("c0", "c", [0.2] * 10**4)
    device.run(60)
    assert is_fair(device, ["a", "b", "c"])


def test_samples_alone_run_together_and_leave_no_debt(device: Device) -> None:
    for number in range(30):
        device.sample(f"a{number}", "a", 10**6)
    device.sample("b0", "b", 10**6)
    device.run(30)
    assert device.samples["b0"] == device.samples["a0"]
    device.used.clear()
    device.train("c0", "c", [0.2] * 10**4)
    device.run(device.now + 10)
    assert is_fair(device, ["a", "b", "c"])


def test_one_tenant_alone_trains_and_samples_half_and_half(device: Device) -> None:
    device.train("t", "a", [0.2] * 10**4)
    device.sample("s", "a", 10**6)
    device.run(60)
    trained = 0.2 * device.order.count("t")
    assert trained == pytest.approx(30, rel=0.1)


@pytest.mark.parametrize("same_tenant", [False, True])
def test_a_one_token_sample_waits_for_one_slice_at_most(device: Device, same_tenant: bool) -> None:
    device.train("t", "a", [0.5] * 10**4)
    for number in range(20):
        device.run(device.now + 3)
        asked = device.now
        device.sample(f"s{number}", "a" if same_tenant else "b", 1)
        device.run(device.now + 3)
        assert device.done[f"s{number}"] - asked <= 0.5 + 0.03


def test_with_many_training_tenants_the_bound_is_one_slice_of_each(device: Device) -> None:
    for number in range(5):
        device.train(f"t{number}", f"busy{number}", [0.5] * 10**4)
    device.run(20)
    for number in range(10):
        asked = device.now
        device.sample(f"s{number}", "guest", 1)
        device.run(device.now + 5)
        assert device.done[f"s{number}"] - asked <= 5 * 0.5 + 0.03


def test_an_idle_tenant_saves_up_nothing(device: Device) -> None:
    device.train("first", "b", [0.1])
    device.train("t", "a", [0.1] * 10**4)
    device.run(50)
    device.used.clear()
    device.train("again", "b", [0.1] * 10**4)
    device.run(device.now + 10)
    assert is_fair(device, ["a", "b"])


def test_a_burst_leaves_a_debt(device: Device) -> None:
    device.train("steady", "a", [0.1] * 10**4)
    for number in range(10):
        device.train(f"burst{number}", "b", [2.0])
        device.run(device.now + 2.1)
    assert device.used["b"] <= device.used["a"] + 2.0 + 0.2


def test_training_jobs_of_a_tenant_run_in_order_and_are_not_interleaved(device: Device) -> None:
    device.train("m1", "a", [0.1] * 3)
    device.run(0.05)
    device.train("n1", "a", [0.1] * 2)
    device.train("m2", "a", [0.1])
    device.run(10)
    assert device.order == ["m1", "m1", "m1", "n1", "n1", "m2"]


def test_cancelled_and_finished_work_is_forgotten(device: Device) -> None:
    device.train("m1", "a", [0.1])
    device.scheduler.remove("m1")
    device.scheduler.remove("m1")
    assert device.scheduler.next() is None


@pytest.mark.parametrize("quantum_s", [0.1, 0.3, 1 / 3, 0.01])
def test_a_debt_of_whole_quanta_is_paid_off_whatever_the_rounding(quantum_s: float) -> None:
    """0.9 // 0.1 is 8: nine quanta bring a debt of 0.9 to 0 and not above, and somebody must be next."""
    scheduler = Scheduler(quantum_s)
    scheduler.add(QueuedJob(id="one", tenant="only", kind="train"))
    for number in range(1, 400):
        assert scheduler.next() is not None
        scheduler.charge("train", {"only": number * quantum_s})
