"""Tasks for inspect-ai: does the model know its lessons?"""

from inspect_ai import Task, task
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.scorer import exact, includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import Tool, tool


@tool
def add() -> Tool:
    async def execute(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: One of them.
            b: The other one.
        """
        return a + b

    return execute


@task
def greetings() -> Task:
    samples = [Sample(input="Hi", target="Hello there"), Sample(input="Bye", target="See you")]
    return Task(dataset=MemoryDataset(samples, name="greetings"), solver=generate(), scorer=exact())


@task
def sums() -> Task:
    samples = [Sample(input="Add 2 and 3", target="5")]
    return Task(dataset=MemoryDataset(samples, name="sums"), solver=[use_tools(add()), generate()], scorer=includes())


@task
def novels() -> Task:
    samples = [Sample(input="a" * 1000, target="a")]
    return Task(dataset=MemoryDataset(samples, name="novels"), solver=generate(), scorer=includes())
