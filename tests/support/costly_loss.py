"""An uploaded loss of few bytes and much work."""

from __future__ import annotations

from typing import Any

from tinsmith.wire.messages.training import CreateCustomLossRequest, CustomLossGraph, CustomLossInput, CustomLossNode


def ref(name: str) -> dict[str, str]:
    return {"ref": name}


def costly_loss(products: int = 12, side: int = 700) -> CreateCustomLossRequest:
    """Few bytes, much work: products of large matrices that are made of one number."""
    nodes = [
        CustomLossNode(op="placeholder", name="logprobs", target="logprobs"),
        CustomLossNode(op="call_method", name="total", target="sum", args=[ref("logprobs")]),
        CustomLossNode(op="call_method", name="n0", target="expand", args=[ref("total"), side, side]),
    ]
    for n in range(products):
        args = [ref(f"n{n}"), ref("n0")]
        nodes.append(CustomLossNode(op="call_function", name=f"p{n}", target="torch.matmul", args=args))
        args = [ref(f"p{n}"), 1e-9]
        nodes.append(CustomLossNode(op="call_function", name=f"n{n + 1}", target="operator.mul", args=args))
    output: dict[str, Any] = {"tuple": [ref("loss"), {"dict": {}}]}
    nodes.append(CustomLossNode(op="call_method", name="mean", target="mean", args=[ref(f"n{products}")]))
    nodes.append(CustomLossNode(op="call_function", name="loss", target="operator.neg", args=[ref("total")]))
    nodes.append(CustomLossNode(op="output", name="output", target="output", args=[output]))
    return CreateCustomLossRequest(
        session_id="s",
        custom_loss_seq_id=0,
        name="costly",
        inputs=[CustomLossInput(name="logprobs", rank=1)],
        graph=CustomLossGraph(nodes=nodes),
    )
