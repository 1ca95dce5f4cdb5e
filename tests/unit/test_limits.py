"""Budgets that clients share: first come, first served, nothing lost, whoever gives up."""

from __future__ import annotations

import asyncio
import threading

from tinsmith.client.limits import NEW_INCIDENT_S, Budget, Limits, LimitsByServer


def test_a_budget_lets_in_while_it_is_above_zero_and_then_in_order() -> None:
    async def scenario() -> None:
        budget, order = Budget(10), []

        async def hold(name: str, units: int, until: asyncio.Event) -> None:
            async with budget.hold(units):
                order.append(name)
                await until.wait()

        opened = [asyncio.Event() for _ in range(4)]
        tasks = [
            asyncio.create_task(hold(name, units, until))
            for (name, units), until in zip((("a", 6), ("b", 100), ("c", 1), ("d", 1)), opened, strict=True)
        ]
        await asyncio.sleep(0)
        assert order == ["a", "b"], "a single one larger than the budget still goes"
        opened[0].set()
        await asyncio.sleep(0.01)
        assert order == ["a", "b"]
        opened[1].set()
        await asyncio.sleep(0.01)
        assert order == ["a", "b", "c", "d"]
        for event in opened:
            event.set()
        await asyncio.gather(*tasks)
        assert budget._free == 10

    asyncio.run(scenario())


def test_who_gives_up_takes_nothing_along() -> None:
    async def scenario() -> None:
        budget = Budget(1)
        await budget.acquire(1)
        waiting = [asyncio.create_task(budget.acquire(1)) for _ in range(3)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        await asyncio.sleep(0)
        budget.release(1)
        waiting[1].cancel()  # its grant is on the way
        await asyncio.wait_for(waiting[2], 5)
        budget.release(1)
        assert budget._free == 1

    asyncio.run(scenario())


def test_loops_of_several_threads_share_a_budget() -> None:
    budget, done = Budget(1), []

    async def work(name: int) -> None:
        for _ in range(50):
            async with budget.hold(1):
                await asyncio.sleep(0)
        done.append(name)

    threads = [threading.Thread(target=lambda name=i: asyncio.run(work(name))) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(done) == [0, 1, 2, 3]
    assert budget._free == 1


def test_who_waits_in_a_loop_that_is_gone_is_passed_over() -> None:
    async def scenario() -> None:
        budget, gone = Budget(1), asyncio.new_event_loop()
        await budget.acquire(1)
        budget._waiting.append((1, gone, gone.create_future()))
        gone.close()
        waiting = asyncio.create_task(budget.acquire(1))
        await asyncio.sleep(0)
        budget.release(1)
        await asyncio.wait_for(waiting, 5)
        budget.release(1)
        assert budget._free == 1

    asyncio.run(scenario())


def test_a_pause_is_a_new_incident_only_after_a_while() -> None:
    now = [100.0]
    limits = Limits(lambda: now[0])
    assert limits.pause(5)
    now[0] += 5
    assert not limits.pause(1), "the same incident"
    now[0] += 1 + NEW_INCIDENT_S + 0.1
    assert limits.pause(1)


def test_address_and_key_decide_who_shares() -> None:
    table = LimitsByServer()
    one = table.find("http://a", "tml-1")
    assert table.find("http://a", "tml-1") is one
    assert table.find("http://a", "tml-2") is not one
    assert table.find("http://b", "tml-1") is not one
    assert "tml-1" not in repr(table.__dict__), "keys are not kept"
