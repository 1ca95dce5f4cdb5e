"""Buffers for large bodies are reused, but never while one is being read."""

from __future__ import annotations

import threading

import numpy as np

from tinsmith.client.submit.body_buffers import KEPT, MAX_BYTES, MIN_BYTES, BodyBuffers, RequestBody
from tinsmith.wire.codecs.protobuf import MessageWriter


def message(fill: int, size: int = MIN_BYTES) -> MessageWriter:
    made = MessageWriter()
    made.blob(1, bytes([fill]) * size)
    made.number(2, fill)
    return made


def place(body: RequestBody) -> int:
    """Where a body lies."""
    return int(np.frombuffer(body.content, np.uint8).ctypes.data)


def test_a_body_is_the_encoded_message_whatever_was_in_its_buffer() -> None:
    buffers = BodyBuffers()
    for fill, size in ((1, 3 * MIN_BYTES), (2, MIN_BYTES), (3, 2 * MIN_BYTES), (4, 5 * MIN_BYTES), (5, 10)):
        body = buffers.write(message(fill, size))
        assert bytes(body.content) == message(fill, size).encode()
        buffers.give_back(body)


def test_memory_is_used_again() -> None:
    buffers = BodyBuffers()
    first = buffers.write(message(1))
    where = place(first)
    buffers.give_back(first)
    assert place(buffers.write(message(2))) == where


def test_bodies_under_way_do_not_share_memory() -> None:
    buffers = BodyBuffers()
    bodies = [buffers.write(message(fill)) for fill in range(5)]
    assert len({place(body) for body in bodies}) == 5
    assert [bytes(body.content) for body in bodies] == [message(fill).encode() for fill in range(5)]
    for body in bodies:
        buffers.give_back(body)
    assert len(buffers._free) == KEPT, "what is kept is bounded"


def test_memory_that_somebody_still_reads_is_left_alone() -> None:
    buffers = BodyBuffers()
    first = buffers.write(message(1))
    held = first.content[10:20]  # a transport that has not sent it all
    buffers.give_back(first)
    second = buffers.write(message(2))
    assert bytes(held) == b"\1" * 10
    assert bytes(second.content) == message(2).encode()


def test_a_body_that_was_given_back_twice_is_one_buffer() -> None:
    buffers = BodyBuffers()
    body = buffers.write(message(1))
    buffers.give_back(body)
    buffers.give_back(body)
    assert len(buffers._free) == 1


def test_small_and_huge_bodies_are_plain_bytes() -> None:
    buffers = BodyBuffers()
    for size in (10, MAX_BYTES + 1):
        body = buffers.write(message(1, size))
        assert type(body.content) is bytes
        buffers.give_back(body)
        assert body.content, "it can still be used"
    assert not buffers._free


def test_many_threads_get_bodies_of_their_own() -> None:
    buffers, wrong = BodyBuffers(), []

    def work(fill: int) -> None:
        expected = message(fill).encode()
        for _ in range(20):
            body = buffers.write(message(fill))
            if bytes(body.content) != expected:
                wrong.append(fill)
            buffers.give_back(body)

    threads = [threading.Thread(target=work, args=(fill,)) for fill in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
