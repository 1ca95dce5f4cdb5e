"""Turns in an engine process, as a simulation."""

from __future__ import annotations

from support.jobs import Jobs

from tinsmith.engine.turns import Operation, Turns


def test_training_and_sampling_alternate_and_neither_waits_alone() -> None:
    turns = Turns()
    assert not turns.takes_training(has_samples=True)
    turns.add(Operation(Jobs("base").create()))
    assert [turns.takes_training(has_samples=False) for _ in range(2)] == [True, True]
    assert sum(turns.takes_training(has_samples=True) for _ in range(10)) == 5


def test_tenants_get_equal_time_whatever_their_steps_cost_and_however_much_they_queue() -> None:
    turns, spent = Turns(), {"cheap": 0.0, "dear": 0.0}
    for number in range(50):
        jobs = Jobs("base", f"cheap-{number}", tenant="cheap")
        for _ in range(40):
            turns.add(Operation(jobs.optim_step()))
    dear = Jobs("base", "dear", tenant="dear")
    for _ in range(100):
        turns.add(Operation(dear.optim_step()))
    for _ in range(300):
        operation = turns.next()
        cost = {"cheap": 1.0, "dear": 7.0}[operation.job.tenant]
        turns.spend(operation, cost)
        spent[operation.job.tenant] += cost
        turns.end(operation)
    assert abs(spent["cheap"] - spent["dear"]) <= 7.0


def test_a_newcomer_starts_level_with_the_others() -> None:
    turns = Turns()
    old = Jobs("base", "old", tenant="old")
    for _ in range(10):
        turns.add(Operation(old.optim_step()))
    for _ in range(5):
        operation = turns.next()
        turns.spend(operation, 100.0)
        turns.end(operation)
    new = Jobs("base", "new", tenant="new")
    for _ in range(5):
        turns.add(Operation(new.optim_step()))
    order = []
    for _ in range(4):
        operation = turns.next()
        turns.spend(operation, 100.0)
        turns.end(operation)
        order.append(operation.job.tenant)
    assert sorted(order) == ["new", "new", "old", "old"]


def test_jobs_of_a_model_keep_their_order_and_only_waiting_ones_are_dropped() -> None:
    turns = Turns()
    jobs = Jobs("base")
    operations = [Operation(job) for job in [jobs.create(), *jobs.steps(1)]]
    for operation in operations:
        turns.add(operation)
    assert turns.next() is operations[0]
    dropped = turns.drop(lambda operation: operation is not operations[1])
    assert dropped == [operations[1]]
    turns.end(turns.next())
    assert turns.next() is operations[2]
