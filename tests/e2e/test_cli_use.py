"""`tinsmith sample`, `chat` and `eval` on a tiny model and a real server."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from support.terminal import CTRL_C, CTRL_D, PROMPT, Terminal
from support.tiny_server import TINSMITH, tiny_server

import tinsmith
from tinsmith.cli.dataset import read_examples
from tinsmith.cli.main import main

CHATS = [
    {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
    for question, answer in (("one", "uno"), ("two", "dos"), ("three", "tres"))
]


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with tiny_server(tmp_path_factory.mktemp("tiny"), context=4096) as environment:
        yield environment


@pytest.fixture(scope="module")
def tuned(env: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint that knows the chats by heart."""
    place = tmp_path_factory.mktemp("tuned")
    data = place / "chats.jsonl"
    data.write_text("".join(json.dumps(chat) + "\n" for chat in CHATS))
    options = ("--out", str(place / "run"), "--epochs", "60", "--lr", "0.02", "--rank", "8", "--format", "json")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in env.items():
            patch.setenv(name, value)
        result = run("train", str(data), *options)
    assert result.exit_code == 0, result.output
    found: str = json.loads(result.stdout)["sampler"]
    return found


@pytest.fixture(autouse=True)
def inside(tmp_path: Path, env: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in env.items():
        monkeypatch.setenv(name, value)


def run(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(main, arguments, prog_name="tinsmith", input=stdin)


def sampled(*arguments: str, stdin: str | None = None) -> dict[str, Any]:
    result = run("sample", *arguments, "--format", "json", stdin=stdin)
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_a_prompt_comes_from_an_argument_a_file_or_standard_input(tuned: str) -> None:
    Path("prompt.txt").write_text("two\n")
    options = ("--checkpoint", tuned, "--temperature", "0")
    assert run("sample", "two", *options).stdout == "dos\n"
    assert run("sample", "--file", "prompt.txt", *options).stdout == "dos\n"
    assert run("sample", *options, stdin="two\n").stdout == "dos\n"
    several = run("sample", "two", *options, "-n", "2").stdout
    assert several == "--- 1 of 2 ---\ndos\n\n--- 2 of 2 ---\ndos\n"


def test_json_tells_tokens_logprobs_and_why_it_ended(tuned: str) -> None:
    found = sampled("two", "--checkpoint", tuned, "--temperature", "0")
    (sample,) = found["samples"]
    assert (sample["text"], sample["stop_reason"]) == ("dos", "stop")
    assert len(sample["tokens"]) == len(sample["logprobs"]) == 4
    assert found["model"] == tuned


def test_a_seed_repeats_and_a_stop_text_ends() -> None:
    options = ("two", "--model", "tiny", "-n", "2", "--max-tokens", "8")
    first = sampled(*options, "--seed", "3")
    assert sampled(*options, "--seed", "3")["samples"] == first["samples"]
    assert sampled(*options, "--seed", "4")["samples"] != first["samples"]
    assert first["samples"][0]["tokens"] != first["samples"][1]["tokens"]
    one = sampled("two", "--raw", "--temperature", "0", "--max-tokens", "6")
    assert one["prompt_tokens"] == [ord(letter) - ord("a") + 100 for letter in "two"]
    (sample,) = sampled("two", "--raw", "--temperature", "0", "--max-tokens", "6", "--top-k", "5")["samples"]
    assert sample["tokens"] == one["samples"][0]["tokens"]
    ends = [text for text in one["samples"][0]["text"] if text.isascii() and text.isprintable()]
    if ends:
        stopped = sampled("two", "--raw", "--temperature", "0", "--max-tokens", "6", "--stop", ends[0])["samples"][0]
        assert stopped["stop_reason"] == "stop"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("x", "--model", "tiny", "--checkpoint", "tinker://a/weights/c"),
            "use either --model or --checkpoint, not both",
        ),
        (("x", "--raw", "--system", "y"), "--system cannot be used with --raw"),
        ((" ",), "the prompt is empty"),
        (("x", "--model", "huge"), "the server has no sampleable model 'huge' (available: tiny)"),
        (("x", "--checkpoint", "nowhere"), "must start with tinker://"),
    ],
    ids=["both", "raw", "empty", "unknown", "path"],
)
def test_what_cannot_be_sampled_is_said(arguments: tuple[str, ...], message: str) -> None:
    result = run("sample", *arguments)
    assert result.exit_code in (1, 2)
    assert message in result.stderr


def test_eval_measures_what_training_does_and_sees_exact_answers(tuned: str, env: dict[str, str]) -> None:
    data = Path("chats.jsonl")
    data.write_text("".join(json.dumps(chat) + "\n" for chat in CHATS))
    result = run("eval", "chats.jsonl", "--model", "tiny", "--checkpoint", tuned, "--format", "json")
    assert result.exit_code == 0, result.output
    base, after = json.loads(result.stdout)["scores"]
    with tinsmith.ServiceClient(base_url=env["TINKER_BASE_URL"], api_key=env["TINKER_API_KEY"]) as service:
        training = service.create_lora_training_client("tiny", rank=4)  # a new adapter changes nothing
        examples = read_examples(data, training.get_tokenizer(), None)
        passed = training.forward([example.datum() for example in examples], "cross_entropy").result()
    counted = sum(example.counted for example in examples)
    assert base["tokens"] == counted
    assert base["loss"] == pytest.approx(passed.metrics["loss:sum"] / counted, abs=1e-4)
    assert base["perplexity"] == pytest.approx(math.exp(base["loss"]))
    assert base["exact_match"] == 0.0
    assert after["exact_match"] == 1.0
    assert after["loss"] < 0.1

    table = run("eval", "chats.jsonl", "--checkpoint", tuned, "--limit", "1")
    assert "100%" in table.stdout
    data.write_text("{}\n")
    assert "chats.jsonl:1: needs 'messages'" in run("eval", "chats.jsonl").stderr


def test_a_chat_in_a_terminal(tuned: str, env: dict[str, str]) -> None:
    with Terminal([*TINSMITH, "chat", "--checkpoint", tuned, "--temperature", "0"], env) as terminal:
        terminal.wait_for(PROMPT)
        terminal.type("two\n")
        terminal.wait_for("dos")
        terminal.wait_for(PROMPT)
        terminal.type(f"/compare tiny {tuned}\n")
        terminal.wait_for("tiny and tinker")
        terminal.wait_for(PROMPT)
        terminal.type("/save said.jsonl\n")
        terminal.wait_for("nothing to save yet")
        terminal.wait_for(PROMPT)
        terminal.type("/compare\n")
        terminal.wait_for("back to tinker://")
        terminal.wait_for(PROMPT)
        terminal.type("/save said.jsonl\n")
        terminal.wait_for("1 chat saved to said.jsonl")
        terminal.wait_for(PROMPT)
        terminal.type("/reset\n")
        terminal.wait_for("conversation cleared")
        terminal.wait_for(PROMPT)
        terminal.type("three\n")
        terminal.wait_for("tres")
        terminal.wait_for(PROMPT)
        terminal.type(CTRL_C)
        terminal.wait_for("Ctrl-D or /quit to quit")
        terminal.wait_for(PROMPT)
        terminal.paste("one\ntwo\nthree")
        terminal.wait_for("three")
        terminal.type("\n")
        terminal.wait_for(PROMPT)
        terminal.type("/save pasted.jsonl\n")
        terminal.wait_for("1 chat saved")
        terminal.wait_for(PROMPT)
        terminal.type("/nonsense\n")
        terminal.wait_for("unknown command")
        terminal.wait_for(PROMPT)
        terminal.type(CTRL_D)
        assert terminal.end() == 0
    (saved,) = [json.loads(line) for line in Path("said.jsonl").read_text().splitlines()]
    assert [message["content"] for message in saved["messages"]] == ["two", "dos"]
    assert saved["model"] == tuned
    (pasted,) = [json.loads(line) for line in Path("pasted.jsonl").read_text().splitlines()]
    assert [message["content"] for message in pasted["messages"] if message["role"] == "user"] == [
        "three",
        "one\ntwo\nthree",
    ]


def test_ctrl_c_stops_an_answer_and_not_the_chat(env: dict[str, str]) -> None:
    options = ("--max-tokens", "3900", "--seed", "1", "--temperature", "1")
    with Terminal([*TINSMITH, "chat", *options], env) as terminal:
        terminal.wait_for(PROMPT)
        terminal.type("go\n")
        terminal.wait_for(r"go\s+\S.*\S")  # some of the answer
        terminal.type(CTRL_C)
        terminal.wait_for(r"\[stopped\]")
        terminal.wait_for(PROMPT)
        terminal.type("/save cut.jsonl\n")
        terminal.wait_for("1 chat saved")
        terminal.wait_for(PROMPT)
        terminal.type("/reset\n")
        terminal.wait_for("conversation cleared")
        terminal.wait_for(PROMPT)
        terminal.type("/quit\n")
        assert terminal.end() == 0
    (saved,) = [json.loads(line) for line in Path("cut.jsonl").read_text().splitlines()]
    assert saved["messages"][1]["content"]


def test_a_chat_from_a_pipe(tuned: str) -> None:
    result = run("chat", "--checkpoint", tuned, "--temperature", "0", stdin="two\n/system brief\nthree\n")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("dos\n")
    compared = run(
        "chat", "--checkpoint", tuned, "--temperature", "0", "--max-tokens", "5", stdin=f"/compare tiny {tuned}\ntwo\n"
    )
    assert "┃ tiny" in compared.stdout
    back = run(
        "chat", "--checkpoint", tuned, "--temperature", "0", stdin="/compare tiny tiny\n/compare\n/compare\ntwo\n"
    )
    assert f"back to {tuned}\nthere is one model only: {tuned}\n" in back.stderr
    assert back.stdout == "dos\n"
    assert "dos" in compared.stdout


def test_the_demo_in_small() -> None:
    Path("chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in CHATS))
    done = run("demo", "--data", "chats.jsonl", "--epochs", "2", "--rank", "4", "--out", "demo")
    assert done.exit_code == 0, done.output
    page = Path("demo/report.html").read_text()
    assert "<svg" in page
    assert "What is the capital of Italy?" in page
    assert Path("demo/adapter/adapter_model.safetensors").stat().st_size > 0
    assert "tinsmith chat --checkpoint tinker://" in done.stdout
    for option in (("--epochs", "1"), ("--quick",)):
        assert "--data, --epochs and --quick cannot be used with --rl" in run("demo", "--rl", *option).stderr


def test_the_quick_demo_is_the_demo_with_fewer_chats() -> None:
    done = run("demo", "--quick", "--model", "tiny", "--rank", "4", "--out", "demo")
    assert done.exit_code == 0, done.output
    assert "Training on 8 chats (" in done.output
    assert "step 6/6" in done.output
    page = Path("demo/report.html").read_text()
    assert "6 steps of 4 chats" in page
    assert page.count("<tr><td>") == 3
    assert Path("demo/adapter/adapter_model.safetensors").stat().st_size > 0


def test_the_demo_by_reward_in_small() -> None:
    """A tiny model knows no words, so there is nothing to learn; that it does learn is seen on the real one."""
    done = run("demo", "--rl", "--steps", "2", "--rank", "4", "--out", "demo")
    assert done.exit_code == 0, done.output
    assert "step 2/2" in done.stdout
    assert 'aria-label="Reward over steps"' in Path("demo/report.html").read_text()


def test_a_chat_goes_on_after_an_error(tuned: str) -> None:
    said = "/model nowhere\n/compare tinker://x/sampler_weights/y tiny\ntwo\n"
    result = run("chat", "--checkpoint", tuned, "--temperature", "0", stdin=said)
    assert result.exit_code == 0
    assert result.stderr.count("Error: ") == 2
    assert result.stdout == "dos\n"
