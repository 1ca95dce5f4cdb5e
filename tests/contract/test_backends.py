"""What every backend promises (tinsmith.engine.protocol), run against each of them."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import pytest
from support.backends import HARNESSES, ONE, Harness, is_alive
from support.jobs import Jobs, datum

from tinsmith.engine.protocol import (
    AnyJob,
    BackendLostError,
    Done,
    JobCancelledError,
    JobFailedError,
    SavedFiles,
    TokenEvent,
)
from tinsmith.wire.codecs import json_codec
from tinsmith.wire.codecs.proto_outputs import decode_output
from tinsmith.wire.codecs.proto_sampling import decode_response
from tinsmith.wire.messages.training import OptimStepResponse

Scenario: TypeAlias = Callable[[Harness], Awaitable[None]]
Run: TypeAlias = Callable[[Scenario], None]


@pytest.fixture(scope="module", params=HARNESSES)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Runs scenarios against one backend, which is opened anew when a scenario has closed it."""
    directory = tmp_path_factory.mktemp("backend")
    harnesses: list[Harness] = []

    async def scene(scenario: Scenario) -> None:
        async with asyncio.timeout(120):
            if not harnesses or harnesses[-1].backend.status.reason == "closed":
                harnesses.append(HARNESSES[request.param](directory))
                await harnesses[-1].backend.open()
            await scenario(harnesses[-1])

    with asyncio.Runner() as runner:
        yield lambda scenario: runner.run(scene(scenario))
        for harness in harnesses:
            runner.run(harness.backend.close(grace_s=0))


async def results(harness: Harness, jobs: Sequence[AnyJob]) -> list[Done]:
    """Submit all at once, wait for all."""
    return await asyncio.gather(*(harness.backend.submit(job) for job in jobs))


def digest(done: Sequence[Done]) -> str:
    return hashlib.sha256(b"|".join(item.body for item in done)).hexdigest()


def loss(done: Done) -> float:
    return decode_output(done.body).metrics["loss:sum"]


PROBE = [5, 9, 2, 33, 7]


def test_the_cards_name_what_is_served(run: Run) -> None:
    async def scenario(harness: Harness) -> None:
        assert [card.name for card in harness.backend.cards()] == list(harness.models)
        assert all(card.vocab_size > 60 and card.max_context_length >= 64 for card in harness.backend.cards())
        assert harness.backend.status.state in ("ready", "starting")

    run(scenario)


def test_a_pass_gives_logprobs_in_the_shape_of_its_targets_and_their_loss(run: Run) -> None:
    async def scenario(harness: Harness) -> None:
        jobs = Jobs(harness.models[0])
        data = [datum(PROBE, 0.5), datum(PROBE[:2], 2.0)]
        _, done = await results(harness, [jobs.create(), jobs.forward_backward(*data)])
        assert done.encoding == "protobuf"
        assert done.usage.training == 7
        output = decode_output(done.body)
        rows = [row["logprobs"].to_numpy() for row in output.loss_fn_outputs]
        assert [row.shape for row in rows] == [(5,), (2,)]
        assert all((row < 0).all() for row in rows)
        assert output.metrics["loss:sum"] == pytest.approx(-0.5 * rows[0].sum() - 2.0 * rows[1].sum(), rel=1e-5)

    run(scenario)


def test_both_encodings_mean_the_same(run: Run) -> None:
    async def scenario(harness: Harness) -> None:
        jobs = Jobs(harness.models[0])
        await results(harness, [jobs.create(), *jobs.steps(1)])
        forwards = await results(harness, [jobs.forward(datum(PROBE), encoding=e) for e in ("protobuf", "json")])
        assert forwards[0].body == forwards[1].body
        backward = await results(
            harness, [jobs.forward_backward(datum(PROBE), encoding=e) for e in ("protobuf", "json")]
        )
        assert backward[0].body == backward[1].body == forwards[0].body

    run(scenario)


def test_training_lowers_the_loss_and_a_forward_pass_leaves_no_trace(run: Run) -> None:
    async def scenario(harness: Harness) -> None:
        jobs = Jobs(harness.models[0])
        before = (await results(harness, [jobs.create(), jobs.forward(datum(PROBE))]))[1]
        zero = json_codec.decode((await results(harness, [jobs.optim_step(0.0)]))[0].body, OptimStepResponse)
        assert zero.metrics is not None
        again = (await results(harness, [jobs.forward(datum(PROBE))]))[0]
        assert again.body == before.body
        for _ in range(3):
            await results(harness, [jobs.forward_backward(datum(PROBE)), jobs.optim_step(0.01)])
        after = (await results(harness, [jobs.forward(datum(PROBE))]))[0]
        assert loss(after) < loss(before)

    run(scenario)


def test_jobs_of_a_model_run_and_end_in_the_order_of_submission(run: Run) -> None:
    async def scenario(harness: Harness) -> None:
        alone, together = Jobs(harness.models[0], "alone"), Jobs(harness.models[0], "together")
        one_by_one = [(await results(harness, [job]))[0] for job in [alone.create(), *alone.steps(4)]]
        ended: list[str] = []
        queued = [together.create(), *together.steps(4)]
        futures = []
        for job in queued:
            future = harness.backend.submit(job)
            future.add_done_callback(lambda _, job_id=job.job_id: ended.append(job_id))
            futures.append(future)
        at_once = await asyncio.gather(*futures)
        await asyncio.sleep(0)
        assert digest(at_once) == digest(one_by_one)
        assert ended == [job.job_id for job in queued]

    run(scenario)


def test_models_side_by_side_do_not_touch_each_other(run: Run) -> None:
    async def scenario(harness: Harness) -> None:
        alone = {}
        for number, name in enumerate(harness.models):
            jobs = Jobs(name, "alone")
            alone[name] = digest(await results(harness, [jobs.create(seed=number), *jobs.steps(3, seed=number)]))
        lists = {}
        for number, name in enumerate(harness.models):
            jobs = Jobs(name, "beside")
            lists[name] = [jobs.create(seed=number), *jobs.steps(3, seed=number)]
        other = Jobs(harness.models[0], "third")
        lists["third"] = [other.create(seed=99), *other.steps(3, seed=99)]
        mixed = [job for row in zip(*lists.values(), strict=True) for job in row]
        done = dict(zip((job.job_id for job in mixed), await results(harness, mixed), strict=True))
        for name in harness.models:
            assert digest([done[job.job_id] for job in lists[name]]) == alone[name]

    run(scenario)


def test_a_job_that_fails_says_why_and_leaves_the_state_as_it_was(run: Run) -> None:
    async def scenario(harness: Harness) -> None:
        vocabulary = harness.backend.cards()[0].vocab_size
        good, hurt = Jobs(harness.models[0], "good"), Jobs(harness.models[0], "hurt")
        expected = await results(harness, [good.create(), *good.steps(1), good.forward(datum(PROBE))])
        bad = hurt.forward_backward(datum(PROBE), datum([3, vocabulary, 4]))
        jobs = [hurt.create(), *hurt.steps(1)]
        jobs[2:2] = [bad]
        jobs.append(hurt.forward(datum(PROBE)))
        futures = [harness.backend.submit(job) for job in jobs]
        with pytest.raises(JobFailedError, match=rf"data\[1\].*{vocabulary}") as caught:
            await futures[2]
        assert caught.value.category == "user"
        assert digest([await future for i, future in enumerate(futures) if i != 2]) == digest(expected)

    run(scenario)


def test_unknown_models_are_refused(run: Run) -> None:
    async def scenario(harness: Harness) -> None:
        jobs = Jobs(harness.models[0], "never-made")
        with pytest.raises(JobFailedError, match="never-made"):
            await harness.backend.submit(jobs.forward(datum(PROBE)))
        strange = Jobs("nobody/serves-this")
        with pytest.raises(JobFailedError, match="nobody/serves-this"):
            await harness.backend.submit(strange.create())
        await results(harness, [jobs.create(), jobs.unload()])
        with pytest.raises(JobFailedError, match="never-made"):
            await harness.backend.submit(jobs.forward(datum(PROBE)))

    run(scenario)


@pytest.mark.parametrize("optimizer", [True, False])
def test_a_saved_model_goes_on_exactly(run: Run, tmp_path: Path, optimizer: bool) -> None:
    async def scenario(harness: Harness) -> None:
        saved = tmp_path / "deep" / "saved"
        jobs = Jobs(harness.models[0], "saved")
        done = await results(harness, [jobs.create(), *jobs.steps(2), jobs.save(saved)])
        files = msgspec.json.decode(done[-1].body, type=SavedFiles)
        assert files.size_bytes == sum(path.stat().st_size for path in saved.iterdir())
        assert {"adapter_config.json", "adapter_model.safetensors"} <= {path.name for path in saved.iterdir()}
        assert [path.name for path in saved.parent.iterdir()] == ["saved"]
        onward = digest(await results(harness, jobs.steps(2, seed=5)))
        made = Jobs(harness.models[0], "made")
        await results(harness, [made.create(directory=saved, optimizer=optimizer)])
        assert (digest(await results(harness, made.steps(2, seed=5))) == onward) == optimizer
        loaded = Jobs(harness.models[0], "loaded")
        await results(harness, [loaded.create(), *loaded.steps(1, seed=8), loaded.load(saved, optimizer)])
        assert (digest(await results(harness, loaded.steps(2, seed=5))) == onward) == optimizer

    run(scenario)


def test_a_model_saved_beside_its_next_jobs_is_as_it_was_before_them(run: Run, tmp_path: Path) -> None:
    async def scenario(harness: Harness) -> None:
        jobs = Jobs(harness.models[0])
        save = [jobs.save(tmp_path / "plain"), *(jobs.save(tmp_path / f"beside-{n}", beside=True) for n in range(2))]
        done = await results(harness, [jobs.create(), *jobs.steps(2), *save, *jobs.steps(2, seed=5)])
        plain, *beside = done[-len(save) - 4 : -4]
        assert plain.body == beside[0].body == beside[1].body
        for path in (tmp_path / "plain").iterdir():
            for n in range(2):
                assert (tmp_path / f"beside-{n}" / path.name).read_bytes() == path.read_bytes()
        made = Jobs(harness.models[0])
        again = await results(
            harness, [made.create(directory=tmp_path / "beside-0", optimizer=True), *made.steps(2, seed=5)]
        )
        assert digest(again[1:]) == digest(done[-4:])

    run(scenario)


def test_weights_without_optimizer_state_start_afresh(run: Run, tmp_path: Path) -> None:
    async def scenario(harness: Harness) -> None:
        bare = tmp_path / "bare"
        jobs = Jobs(harness.models[0], "first")
        await results(harness, [jobs.create(), *jobs.steps(2), jobs.save(bare, optimizer=False)])
        with pytest.raises(JobFailedError, match="optimizer") as caught:
            await harness.backend.submit(jobs.load(bare, optimizer=True))
        assert caught.value.category == "user"
        digests = set()
        for name in ("second", "third"):
            made = Jobs(harness.models[0], name)
            await results(harness, [made.create(directory=bare)])
            digests.add(digest(await results(harness, made.steps(2, seed=5))))
        assert len(digests) == 1

    run(scenario)


def test_saving_never_overwrites_and_a_missing_checkpoint_is_named(run: Run, tmp_path: Path) -> None:
    async def scenario(harness: Harness) -> None:
        jobs = Jobs(harness.models[0])
        await results(harness, [jobs.create(), jobs.save(tmp_path / "once")])
        with pytest.raises(JobFailedError, match="once"):
            await harness.backend.submit(jobs.save(tmp_path / "once"))
        before = await results(harness, [jobs.forward(datum(PROBE))])
        with pytest.raises(JobFailedError, match="nowhere"):
            await harness.backend.submit(jobs.load(tmp_path / "nowhere"))
        assert digest(await results(harness, [jobs.forward(datum(PROBE))])) == digest(before)

    run(scenario)


def test_samples_are_the_same_for_the_same_seed_and_differ_for_others(run: Run) -> None:
    async def scenario(harness: Harness) -> None:
        jobs = Jobs(harness.models[0])
        asked = {"max_tokens": 12, "stop": [], "num_samples": 3}
        first, again, other = await results(harness, [jobs.sample(PROBE, seed=seed, **asked) for seed in (1, 1, 2)])
        assert first.body == again.body
        assert first.body != other.body
        response = decode_response(first.body)
        assert [(len(row.tokens), row.stop_reason) for row in response.sequences] == [(12, "length")] * 3
        assert len({tuple(row.tokens) for row in response.sequences}) == 3
        assert (first.usage.prefill + first.usage.prefill_cached, first.usage.sampled) == (5, 36)

    run(scenario)


def test_greedy_samples_do_not_depend_on_the_seed(run: Run) -> None:
    async def scenario(harness: Harness) -> None:
        jobs = Jobs(harness.models[0])
        sampled = await results(
            harness,
            [jobs.sample(PROBE, seed=seed, temperature=0.0, max_tokens=6, stop=[], num_samples=2) for seed in (1, 2)],
        )
        rows = [row.tokens for done in sampled for row in decode_response(done.body).sequences]
        assert rows == [rows[0]] * 4

    run(scenario)


def test_a_stop_token_ends_a_sample_and_is_part_of_it(run: Run) -> None:
    async def scenario(harness: Harness) -> None:
        jobs = Jobs(harness.models[0])
        free = (await results(harness, [jobs.sample(PROBE, max_tokens=8, stop=[])]))[0]
        tokens = decode_response(free.body).sequences[0].tokens
        stopped = (await results(harness, [jobs.sample(PROBE, max_tokens=8, stop=[tokens[3]])]))[0]
        sequence = decode_response(stopped.body).sequences[0]
        assert sequence.stop_reason == "stop"
        assert sequence.tokens == tokens[: tokens.index(tokens[3]) + 1]

    run(scenario)


def test_what_is_asked_about_the_prompt_comes_in_its_shape(run: Run) -> None:
    async def scenario(harness: Harness) -> None:
        jobs = Jobs(harness.models[0])
        fields: dict[str, Any] = {
            "prompt_logprobs": True,
            "topk_prompt_logprobs": 3,
            "topk_sample_logprobs": 2,
            "prompt_alt_tokens_k": 4,
            "target_prompt_logprobs": {"data": [1, 2, 3, -1, 5, 6, 7, 8], "dtype": "int64", "shape": [4, 2]},
        }
        done = (await results(harness, [jobs.sample(PROBE, max_tokens=2, stop=[], fields=fields)]))[0]
        response = decode_response(done.body)
        logprobs = response.prompt_logprobs
        assert logprobs is not None
        assert logprobs[0] is None
        assert all(isinstance(value, float) for value in logprobs[1:])
        assert len(logprobs) == 5
        topk = response.topk_prompt_logprobs
        assert topk is not None
        assert [None if row is None else len(row) for row in topk] == [None, 3, 3, 3, 3]
        assert response.sequences[0].topk_logprobs_np is not None
        assert response.sequences[0].topk_logprobs_np.token_ids.shape == (2, 2)
        assert response.target_prompt_logprobs is not None
        assert response.target_prompt_logprobs.shape == [4, 2]
        assert response.prompt_alt_tokens is not None
        assert response.prompt_alt_tokens.tokens.shape == [4, 4]

    run(scenario)


def test_a_sampler_is_frozen_and_agrees_with_the_trainer(run: Run, tmp_path: Path) -> None:
    async def scenario(harness: Harness) -> None:
        jobs = Jobs(harness.models[0])
        saved = tmp_path / "sampler"
        await results(harness, [jobs.create(), *jobs.steps(2), jobs.save(saved, optimizer=False)])
        ask = {"directory": saved, "key": "weights-1", "max_tokens": 8, "stop": []}
        first = (await results(harness, [jobs.sample(PROBE, **ask)]))[0]
        sequence = decode_response(first.body).sequences[0]
        whole = [*PROBE, *sequence.tokens]
        forward = (await results(harness, [jobs.forward(datum(whole))]))[0]
        trained = decode_output(forward.body).loss_fn_outputs[0]["logprobs"].to_numpy()[4:-1]
        assert sequence.logprobs == pytest.approx(trained.tolist(), abs=1e-4)
        await results(harness, jobs.steps(2, seed=3))
        again = (await results(harness, [jobs.sample(PROBE, **ask)]))[0]
        assert decode_response(again.body).sequences[0].tokens == sequence.tokens

    run(scenario)


def test_streamed_tokens_add_up_to_the_result(run: Run) -> None:
    async def scenario(harness: Harness) -> None:
        jobs = Jobs(harness.models[0])
        events: list[TokenEvent] = []
        done = await harness.backend.submit(
            jobs.sample(PROBE, max_tokens=9, stop=[], num_samples=2), on_tokens=events.append
        )
        for index, row in enumerate(decode_response(done.body).sequences):
            mine = [event for event in events if event.sample == index]
            assert [token for event in mine for token in event.tokens] == row.tokens
            assert [value for event in mine for value in event.logprobs] == pytest.approx(row.logprobs)
            assert [event.stop_reason for event in mine] == [None] * (len(mine) - 1) + [row.stop_reason]

    run(scenario)


def test_streamed_tables_are_those_of_the_result(run: Run) -> None:
    async def scenario(harness: Harness) -> None:
        jobs = Jobs(harness.models[0])
        events: list[TokenEvent] = []
        asked = jobs.sample(PROBE, max_tokens=5, stop=[], num_samples=2, fields={"topk_sample_logprobs": 3})
        done = await harness.backend.submit(asked, on_tokens=events.append)
        for index, row in enumerate(decode_response(done.body).sequences):
            assert row.topk_logprobs_np is not None
            mine = [event for event in events if event.sample == index]
            assert [
                token for event in mine for token in event.topk_tokens
            ] == row.topk_logprobs_np.token_ids.ravel().tolist()
            listed = [value for event in mine for value in event.topk_logprobs]
            assert listed == pytest.approx(row.topk_logprobs_np.logprobs.ravel().tolist())

    run(scenario)


def test_a_prompt_is_scored_without_a_sample(run: Run) -> None:
    async def scenario(harness: Harness) -> None:
        jobs = Jobs(harness.models[0])
        scored, drawn = await results(
            harness,
            [jobs.sample(PROBE, max_tokens=count, stop=[], fields={"prompt_logprobs": True}) for count in (0, 1)],
        )
        response = decode_response(scored.body)
        assert [(row.tokens, row.stop_reason) for row in response.sequences] == [([], "length")]
        assert response.prompt_logprobs == decode_response(drawn.body).prompt_logprobs
        assert scored.usage.sampled == 0

    run(scenario)


def test_stop_token_ids_end_a_sample_besides_its_stop_strings(run: Run) -> None:
    async def scenario(harness: Harness) -> None:
        jobs = Jobs(harness.models[0])
        free = (await results(harness, [jobs.sample(PROBE, max_tokens=8, stop=[])]))[0]
        tokens = decode_response(free.body).sequences[0].tokens
        for stop in ([], ["never in it"]):
            asked = jobs.sample(PROBE, max_tokens=8, stop=stop, stop_token_ids=[tokens[3]])
            sequence = decode_response((await results(harness, [asked]))[0].body).sequences[0]
            assert sequence.tokens == tokens[: tokens.index(tokens[3]) + 1]
            assert sequence.stop_reason == "stop"

    run(scenario)


OWN_OPTIONS: dict[str, Any] = {
    "min_p": 1.0,
    "frequency_penalty": 2.0,
    "presence_penalty": 2.0,
    "repetition_penalty": 10.0,
    "logit_bias": {66: 100.0},
    "output_format": {"type": "regex", "schema": "[a-c]{3}"},
}


@pytest.mark.parametrize("option", OWN_OPTIONS)
def test_an_option_of_our_own_has_an_effect_or_is_refused(run: Run, option: str) -> None:
    async def scenario(harness: Harness) -> None:
        jobs = Jobs(harness.models[0])
        asked = {"max_tokens": 12, "stop": [], "seed": 3}
        plain = (await results(harness, [jobs.sample(PROBE, **asked)]))[0]
        changed = [jobs.sample(PROBE, **asked, **{option: OWN_OPTIONS[option]}) for _ in range(2)]
        if harness.models[0] == ONE.name:  # the arithmetic of the tests has no distribution to change
            with pytest.raises(JobFailedError, match=rf"^sampling_params\.{option}: ") as caught:
                await results(harness, changed)
            assert caught.value.category == "user"
            return
        first, again = await results(harness, changed)
        assert first.body == again.body
        assert decode_response(first.body).sequences[0].tokens != decode_response(plain.body).sequences[0].tokens

    run(scenario)


@pytest.mark.parametrize(
    "option", [{"min_p": 0.0}, {"frequency_penalty": 0.0, "presence_penalty": 0.0}, {"repetition_penalty": 1.0}]
)
def test_an_option_without_effect_changes_nothing(run: Run, option: dict[str, Any]) -> None:
    async def scenario(harness: Harness) -> None:
        jobs = Jobs(harness.models[0])
        plain, same = await results(
            harness, [jobs.sample(PROBE, max_tokens=6, stop=[], **params) for params in ({}, option)]
        )
        assert plain.body == same.body

    run(scenario)


def test_a_cancelled_job_never_happened(run: Run) -> None:
    async def scenario(harness: Harness) -> None:
        spared, cut = Jobs(harness.models[0], "spared"), Jobs(harness.models[0], "cut")
        expected = await results(harness, [spared.create(), *spared.steps(3), *spared.steps(1, seed=4)])
        unwanted = cut.forward_backward(datum([3, 1, 4]))
        jobs = [cut.create(), *cut.steps(3), unwanted, *cut.steps(1, seed=4)]
        futures = [harness.backend.submit(job) for job in jobs]
        harness.backend.cancel(unwanted.job_id)
        with pytest.raises(JobCancelledError):
            await futures[-3]
        del futures[-3]
        assert digest(await asyncio.gather(*futures)) == digest(expected)
        harness.backend.cancel(unwanted.job_id)
        harness.backend.cancel("unknown")

    run(scenario)


def test_a_cancelled_sample_ends_at_once(run: Run) -> None:
    async def scenario(harness: Harness) -> None:
        jobs = Jobs(harness.models[0])
        await results(harness, [jobs.sample(PROBE, max_tokens=1)])
        long = jobs.sample(PROBE, max_tokens=50, stop=[], num_samples=4)
        future = harness.backend.submit(long)
        harness.backend.cancel(long.job_id)
        with pytest.raises(JobCancelledError):
            await future
        assert (await results(harness, [jobs.sample(PROBE, max_tokens=1, stop=[])]))[0].usage.sampled == 1

    run(scenario)


def test_positions_count_what_is_ahead_in_the_same_model(run: Run) -> None:
    async def scenario(harness: Harness) -> None:
        jobs = Jobs(harness.models[0])
        queued = [jobs.create(), *jobs.steps(3)]
        futures = [harness.backend.submit(job) for job in queued]
        positions = [harness.backend.position(job.job_id) for job in queued]
        assert [position.ahead for position in positions] == list(range(7))
        assert all(position.reason for position in positions)
        await asyncio.gather(*futures)
        assert harness.backend.position(queued[0].job_id).ahead == 0

    run(scenario)


def test_lost_state_fails_what_was_under_way_and_counts_the_epoch(run: Run) -> None:
    async def scenario(harness: Harness) -> None:
        lost, other = Jobs(harness.models[0]), Jobs(harness.models[1])
        first = await results(harness, [lost.create(), *lost.steps(2)])
        await results(harness, [other.create(), *other.steps(1)])
        epochs = [harness.backend.epoch_of(name) for name in harness.models]
        futures = [harness.backend.submit(job) for job in lost.steps(20)]
        await harness.lose(harness.models[0])
        ends = await asyncio.gather(*futures, return_exceptions=True)
        assert isinstance(ends[-1], BackendLostError)
        assert all(isinstance(end, (Done, BackendLostError)) for end in ends)
        assert harness.backend.epoch_of(harness.models[0]) == epochs[0] + 1
        assert harness.backend.epoch_of(harness.models[1]) == epochs[1]
        await results(harness, other.steps(1))
        with pytest.raises(JobFailedError):
            await harness.backend.submit(lost.forward(datum(PROBE)))
        again = Jobs(harness.models[0], prefix="again-")
        assert digest(await results(harness, [again.create(), *again.steps(2)])) == digest(first)

    run(scenario)


def test_replay_from_a_snapshot_gives_the_same_bytes(run: Run, tmp_path: Path) -> None:
    async def scenario(harness: Harness) -> None:
        jobs = Jobs(harness.models[0])
        snapshot = tmp_path / "snapshot"
        await results(harness, [jobs.create(), *jobs.steps(2), jobs.save(snapshot)])
        tail = await results(harness, jobs.steps(2, seed=9))
        saved = await results(harness, [jobs.save(tmp_path / "end")])
        await harness.lose(harness.models[0])
        again = Jobs(harness.models[0], prefix="again-")
        await results(harness, [again.create(directory=snapshot, optimizer=True)])
        assert digest(await results(harness, again.steps(2, seed=9))) == digest(tail)
        assert digest(await results(harness, [again.save(tmp_path / "again")])) == digest(saved)
        for path in (tmp_path / "end").iterdir():
            assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes()

    run(scenario)


def test_close_ends_what_is_left_and_leaves_nothing_behind(run: Run) -> None:
    async def scenario(harness: Harness) -> None:
        jobs = Jobs(harness.models[0])
        await results(harness, [jobs.create()])
        left = harness.leftovers()
        futures = [harness.backend.submit(job) for job in jobs.steps(10)]
        await harness.backend.close(grace_s=0.5)
        ends = await asyncio.gather(*futures, return_exceptions=True)
        assert isinstance(ends[-1], BackendLostError)
        assert all(isinstance(end, (Done, BackendLostError)) for end in ends)
        assert [process for process in left if is_alive(process)] == []
        with pytest.raises(BackendLostError, match="closed"):
            await harness.backend.submit(jobs.forward(datum(PROBE)))

    run(scenario)
