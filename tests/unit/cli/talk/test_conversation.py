"""Conversations with models that answer from a script."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tinsmith.cli.models import Speaker
from tinsmith.cli.talk.chat import _handle
from tinsmith.cli.talk.conversation import Conversation
from tinsmith.client.runtime.futures import Future
from tinsmith.client.submit.stream import SampledTokens
from tinsmith.errors import TinkerError
from tinsmith.text.printable import printable
from tinsmith.types import SamplingParams


class Letters:
    """A token per byte."""

    chat_template = "there is one"

    def apply_chat_template(self, messages: Any, **_: Any) -> list[int]:
        return list("|".join(f"{m['role']}:{m['content']}" for m in messages).encode())

    def decode(self, tokens: Any, skip_special_tokens: bool = False) -> str:
        return bytes(tokens).decode(errors="replace")


class Scripted:
    """A sampler with answers prepared; an exception is raised instead."""

    def __init__(self, *answers: str | BaseException) -> None:
        self.answers = list(answers)
        self.prompts: list[str] = []

    def sample(self, prompt: Any, count: int, params: Any) -> Any:
        self.prompts.append(bytes(prompt.to_ints()).decode())
        future: Future[Any] = Future()
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            future.set_exception(answer)
        else:
            future.set_result(SimpleNamespace(sequences=[SimpleNamespace(tokens=list(answer.encode()))]))
        return future

    async def sample_stream(self, prompt: Any, params: Any) -> Any:
        self.prompts.append(bytes(prompt.to_ints()).decode())
        for token in str(self.answers.pop(0)).encode():
            yield SampledTokens(0, [token], [0.0])


def conversation(*speakers: Speaker, streams: bool) -> Conversation:
    connection = SimpleNamespace(extensions={"sample_stream": True} if streams else {})
    service = SimpleNamespace(holder=SimpleNamespace(connection=connection))
    return Conversation(service, SamplingParams(max_tokens=9), speakers)


@pytest.mark.parametrize("streams", [True, False], ids=["streamed", "whole"])
def test_answers_come_in_pieces_or_whole(streams: bool, capsys: pytest.CaptureFixture[str]) -> None:
    sampler = Scripted(" grüß \x1b[2Jdich ", "ja")
    talk = conversation(Speaker("m", sampler, Letters()), streams=streams)
    talk.system("be kind")
    talk.ask("hallo")
    talk.ask("wirklich?")
    assert capsys.readouterr().out == "grüß \ufffd[2Jdich\nja\n".replace("dich\n", "dich \n" if streams else "dich\n")
    assert sampler.prompts[1] == "system:be kind|user:hallo|assistant:grüß \x1b[2Jdich|user:wirklich?"


def test_what_was_not_answered_was_not_asked(capsys: pytest.CaptureFixture[str]) -> None:
    sampler = Scripted(TinkerError("no"), "yes")
    talk = conversation(Speaker("m", sampler, Letters()), streams=False)
    with pytest.raises(TinkerError, match="no"):
        talk.ask("one")
    assert talk.chats() == []
    talk.ask("two")
    assert [message["content"] for message in talk.chats()[0]["messages"]] == ["two", "yes"]


def test_two_sides_have_histories_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    left, right = Scripted("l1", "l2"), Scripted("r1", "r2")
    talk = conversation(Speaker("left", left, Letters()), Speaker("right", right, Letters()), streams=True)
    talk.ask("a")
    talk.ask("b")
    assert right.prompts[1] == "user:a|assistant:r1|user:b"
    shown = capsys.readouterr().out
    assert "left" in shown
    assert "r2" in shown
    assert [chat["model"] for chat in talk.chats()] == ["left", "right"]
    talk.change(["right"])
    assert talk.title == "right"
    assert len(talk.chats()[0]["messages"]) == 4
    talk.reset()
    assert talk.chats() == []


def test_comparing_ends_where_it_began(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(_: Any, name: str) -> Speaker:
        if name == "nowhere":
            raise TinkerError("no such model")
        return Speaker(name, Scripted("other"), Letters())

    monkeypatch.setattr("tinsmith.cli.talk.conversation.named_speaker", opened)
    talk = conversation(Speaker("mine", Scripted("m1", "m2", "m3"), Letters()), streams=False)
    talk.ask("a")
    assert not talk.stop_comparing()
    talk.compare(["left", "mine"])
    talk.ask("b")
    talk.compare(["left", "right"])
    with pytest.raises(TinkerError):
        talk.compare(["left", "nowhere"])
    assert talk.names == ["left", "right"]
    assert talk.stop_comparing()
    assert talk.names == ["mine"]
    talk.ask("c")
    assert [message["content"] for message in talk.chats()[0]["messages"]] == ["a", "m1", "c", "m3"]
    assert not talk.stop_comparing()
    talk.compare(["left", "right"])
    talk.change(["right"])
    talk.compare(["left", "mine"])
    talk.stop_comparing()
    assert talk.names == ["right"], "the one chosen last"


@pytest.mark.parametrize(
    ("line", "asked"),
    [
        ("/usr/bin holds programs", ["/usr/bin holds programs"]),
        ("// a comment\nx = 1", ["// a comment\nx = 1"]),
        ("/* a\n comment */", ["/* a\n comment */"]),
        ("/halp", []),
        ("/halp me", []),
        ("/system be\nbrief", []),
    ],
)
def test_what_looks_like_a_command_and_is_none_is_sent(line: str, asked: list[str]) -> None:
    talk = SimpleNamespace(ask=(said := []).append, system=(systems := []).append)
    _handle(talk, line)
    assert said == asked
    assert systems == (["be\nbrief"] if line.startswith("/system") else [])


def test_a_conversation_that_no_longer_fits_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    talk = conversation(Speaker("m", Scripted("ok"), Letters(), context=20), streams=False)
    talk.ask("hi")
    with pytest.raises(TinkerError, match=r"fills the model's context of 20; use /reset"):
        talk.ask("again")
    assert len(talk.chats()[0]["messages"]) == 2


def test_a_model_without_a_chat_template_says_what_to_do() -> None:
    class Plain(Letters):
        chat_template = None  # type: ignore[assignment]

    with pytest.raises(TinkerError, match="m has no chat template; use --raw"):
        Speaker("m", Scripted(), Plain()).prompt([])


def test_what_would_control_the_terminal_is_not_printed() -> None:
    assert printable("a\tb\nc\x07\x1b[31m\x9b2J") == "a\tb\nc\ufffd\ufffd[31m\ufffd2J"
