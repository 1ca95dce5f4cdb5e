"""Checkpoints are restored bit for bit, errors name what is damaged, and no failure leaves half of one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support.checkpoint_files import verify_checkpoint
from support.failing_disk import FailingDisk, FullDisk, ShortWrites
from torch import Tensor

from tinsmith.engine.checkpoints.durable_files import DISK, PARTIAL, REPLACED, DurableDisk, tidy, whole_directory
from tinsmith.engine.checkpoints.format import (
    ADAPTER,
    ADAPTER_CONFIG,
    MANIFEST,
    OPTIMIZER,
    CheckpointInfo,
    adapted_modules,
    read_checkpoint,
    read_manifest,
    write_checkpoint,
)
from tinsmith.engine.training.adamw import AdamW
from tinsmith.errors import DamagedCheckpointError, InvalidInputError, TinkerError
from tinsmith.wire.messages.training import AdamParams

INFO = CheckpointInfo(base_model="tiny/llama", rank=4, alpha=32.0, seed=7, train_unembed=False)


def adapter(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(2):
        for module in ("self_attn.q_proj", "mlp.down_proj"):
            name = f"base_model.model.model.layers.{layer}.{module}"
            weights[f"{name}.lora_A.weight"] = torch.randn(4, 6, generator=generator)
            weights[f"{name}.lora_B.weight"] = torch.randn(5, 4, generator=generator)
    return weights


def trained(seed: int = 0) -> tuple[dict[str, Tensor], AdamW]:
    weights = adapter(seed)
    optimizer = AdamW(weights)
    for step in range(3):
        optimizer.step(weights, adapter(seed + 10 + step), AdamParams())
    return weights, optimizer


def save(directory: Path, seed: int = 0, **options: object) -> None:
    weights, optimizer = trained(seed)
    write_checkpoint(directory, INFO, weights, optimizer.state(), **options)  # type: ignore[arg-type]


def replace(directory: Path, new: Path, disk: DurableDisk = DISK) -> None:
    """Put the files of one directory in place of another, as an export that may overwrite does."""
    with whole_directory(directory, overwrite=True, disk=disk) as partial:
        for path in sorted(new.iterdir()):
            disk.write_file(partial / path.name, path.read_bytes())


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)


def test_everything_comes_back_bit_for_bit(tmp_path: Path) -> None:
    weights, optimizer = trained()
    weights["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"][0, :3] = torch.tensor([-0.0, 1e-45, 3e38])
    written = write_checkpoint(tmp_path / "deep" / "er" / "one", INFO, weights, optimizer.state())
    read = read_checkpoint(tmp_path / "deep" / "er" / "one", with_optimizer=True)
    assert read.info == INFO
    assert same(read.weights, weights)
    for key, value in weights.items():  # torch.equal takes -0.0 for 0.0
        assert torch.equal(read.weights[key].view(torch.int32), value.view(torch.int32))
    assert read.optimizer is not None
    assert same(read.optimizer, optimizer.state())
    other = AdamW(read.weights)
    other.load_state(read.optimizer)
    optimizer.step(weights, adapter(99), AdamParams())
    other.step(read.weights, adapter(99), AdamParams())
    assert same(read.weights, weights)
    assert written == read_manifest(tmp_path / "deep" / "er" / "one")
    assert written.size_bytes == sum(
        path.stat().st_size for path in (tmp_path / "deep" / "er" / "one").iterdir() if path.name != MANIFEST
    )


def test_the_same_state_gives_the_same_bytes(tmp_path: Path) -> None:
    save(tmp_path / "a")
    save(tmp_path / "b")
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


def test_views_of_one_buffer_can_be_saved(tmp_path: Path) -> None:
    buffer = torch.arange(24.0)
    name = "base_model.model.lm_head"
    weights = {f"{name}.lora_A.weight": buffer[:12].view(4, 3), f"{name}.lora_B.weight": buffer[12:].view(3, 4)}
    write_checkpoint(tmp_path / "c", INFO, weights)
    read = read_checkpoint(tmp_path / "c", with_optimizer=False)
    assert same(read.weights, weights)
    read.weights[f"{name}.lora_A.weight"].zero_()  # their own memory, and writable
    assert buffer[1] == 1


def test_a_checkpoint_for_sampling_has_no_optimizer(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "s", INFO, adapter())
    assert sorted(path.name for path in (tmp_path / "s").iterdir()) == [ADAPTER_CONFIG, ADAPTER, MANIFEST]
    assert not read_manifest(tmp_path / "s").has_optimizer
    assert read_checkpoint(tmp_path / "s", with_optimizer=False).optimizer is None
    with pytest.raises(InvalidInputError, match="has no optimizer state"):
        read_checkpoint(tmp_path / "s", with_optimizer=True)


def test_damage_to_any_byte_is_noticed_and_the_file_named(tmp_path: Path) -> None:
    save(tmp_path / "c")
    for name in (ADAPTER, ADAPTER_CONFIG, OPTIMIZER, MANIFEST):
        path = tmp_path / "c" / name
        good = path.read_bytes()
        for position in (0, len(good) // 2, len(good) - 2):
            bad = bytearray(good)
            bad[position] ^= 1
            path.write_bytes(bad)
            with pytest.raises(DamagedCheckpointError, match=name):
                read_checkpoint(tmp_path / "c", with_optimizer=True)
            with pytest.raises(DamagedCheckpointError, match=name):
                verify_checkpoint(tmp_path / "c")
        for cut in (good[:-2], b""):
            path.write_bytes(cut)
            with pytest.raises(DamagedCheckpointError, match=name):
                read_checkpoint(tmp_path / "c", with_optimizer=True)
        path.unlink()
        with pytest.raises(DamagedCheckpointError, match=f"{name} is missing"):
            read_checkpoint(tmp_path / "c", with_optimizer=True)
        path.mkdir()
        with pytest.raises(DamagedCheckpointError, match=f"{name} cannot be read"):
            read_checkpoint(tmp_path / "c", with_optimizer=True)
        path.rmdir()
        path.write_bytes(good)
    verify_checkpoint(tmp_path / "c")


def test_a_manifest_with_other_numbers_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "c")
    path = tmp_path / "c" / MANIFEST
    good = json.loads(path.read_text())
    for change, text in (
        ({"info": good["info"] | {"alpha": 64.0}}, "its digest differs"),
        ({"files": {}}, "its digest differs"),
        ({"format": 2}, "a format other than 1"),
        ({"surprise": 1}, "cannot be read"),
    ):
        path.write_text(json.dumps(good | change))
        with pytest.raises(DamagedCheckpointError, match=text):
            read_checkpoint(tmp_path / "c", with_optimizer=False)
    path.write_text("[]")
    with pytest.raises(DamagedCheckpointError, match="cannot be read"):
        read_manifest(tmp_path / "c")


def test_names_that_peft_would_not_use_are_refused(tmp_path: Path) -> None:
    good = adapter()
    alone = {name: value for name, value in good.items() if "lora_A" in name}
    with pytest.raises(InvalidInputError, match="has no matching lora_B"):
        write_checkpoint(tmp_path / "c", INFO, alone)
    with pytest.raises(InvalidInputError, match=r"'q\.weight' is not a name"):
        write_checkpoint(tmp_path / "c", INFO, good | {"q.weight": torch.zeros(1)})
    assert list(tmp_path.iterdir()) == []
    assert sorted(adapted_modules(good))[0] == "model.layers.0.mlp.down_proj"


def test_existing_checkpoints_are_replaced_only_if_asked(tmp_path: Path) -> None:
    old, new = tmp_path / "all" / "c", tmp_path / "new"
    save(old, seed=0)
    with pytest.raises(InvalidInputError, match="'c' already exists; choose another name"):
        save(old, seed=1)
    assert same(read_checkpoint(old, with_optimizer=False).weights, trained(0)[0])
    save(new, seed=1)
    replace(old, new)
    assert same(read_checkpoint(old, with_optimizer=False).weights, trained(1)[0])
    assert [path.name for path in old.parent.iterdir()] == ["c"]


def test_short_writes_are_continued(tmp_path: Path) -> None:
    save(tmp_path / "c", disk=ShortWrites())
    verify_checkpoint(tmp_path / "c")
    with pytest.raises(TinkerError, match="accepts no more bytes"):
        save(tmp_path / "d", disk=FullDisk())
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


@pytest.mark.parametrize("exists_before", [False, True])
def test_whatever_step_fails_the_name_holds_a_whole_checkpoint_or_what_it_held(
    tmp_path: Path, exists_before: bool
) -> None:
    counting, new = FailingDisk(), tmp_path / "new"
    save(new, seed=1)
    save(tmp_path / "count" / "c", seed=0)
    replace(tmp_path / "count" / "c", new, counting)
    assert counting.steps == ["write", "fsync"] * 4 + ["fsync", "rename", "rename", "fsync", "remove"]
    expected = len(counting.steps) - (0 if exists_before else 2)
    for step in range(expected):
        parent = tmp_path / f"at{step}"
        parent.mkdir()
        if exists_before:
            save(parent / "c", seed=0)
        if exists_before and step == expected - 1:  # removing the old one can fail without harm
            replace(parent / "c", new, FailingDisk(step))
            assert same(read_checkpoint(parent / "c", with_optimizer=True).weights, trained(1)[0])
            assert len(tidy(parent)) == 1
        elif exists_before:
            with pytest.raises(OSError, match="ENOSPC"):
                replace(parent / "c", new, FailingDisk(step))
            assert same(read_checkpoint(parent / "c", with_optimizer=True).weights, trained(0)[0])
        else:
            with pytest.raises(TinkerError, match="was not saved, and no files were left behind"):
                save(parent / "c", seed=1, disk=FailingDisk(step))
        assert [path.name for path in parent.iterdir()] == (["c"] if exists_before else [])


class Crash(BaseException):
    """The process is gone: no handler of the code under test runs to its end."""


class CrashingDisk(FailingDisk):
    """From one step on, nothing works any more, clean-up included."""

    def _step(self, name: str) -> None:
        self.steps.append(name)
        if self._fails_at is not None and len(self.steps) > self._fails_at:
            raise Crash


def test_after_a_crash_at_any_step_tidying_gives_the_old_or_the_new(tmp_path: Path) -> None:
    outcomes, new = [], tmp_path / "new"
    save(new, seed=1)
    for step in range(13):
        parent = tmp_path / f"at{step}"
        save(parent / "c", seed=0)
        with pytest.raises(Crash):
            replace(parent / "c", new, CrashingDisk(step))
        assert all(path.name == "c" or path.name.endswith((PARTIAL, REPLACED)) for path in parent.iterdir())
        tidy(parent)
        assert [path.name for path in parent.iterdir()] == ["c"]
        weights = read_checkpoint(parent / "c", with_optimizer=True).weights
        outcomes.append("old" if same(weights, trained(0)[0]) else "new")
        assert same(weights, trained(0 if outcomes[-1] == "old" else 1)[0])
        assert tidy(parent) == []
    assert outcomes == ["old"] * 11 + ["new"] * 2
