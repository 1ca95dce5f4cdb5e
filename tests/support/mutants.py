"""Mutants: small mistakes, made on purpose, in what must never be wrong; each has tests that must fail.

    make mutants                          # all of them; prints a table, fails if one survives
    python -m support.mutants packing     # those whose area or file contains a word

Each mistake is made in a copy of the tree, never in the tree itself, and the tests named beside it run there. A mistake
whose text is no longer in its file is an error: `tests/unit/test_mutants.py` finds that at once.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = "src/tinsmith"
COPIED = ("src", "tests", "docs", "tools", "pyproject.toml", "README.md", "Makefile", "CHANGELOG.md")
LIMIT_S = 300.0
"""A mutant that makes its tests wait for ever is killed, too."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One mistake."""

    area: str
    file: str
    right: str
    wrong: str
    tests: tuple[str, ...]

    @property
    def path(self) -> str:
        return f"{SOURCE}/{self.file}"

    def made_in(self, text: str) -> str:
        """The file with the mistake."""
        count = text.count(self.right)
        if count != 1:
            raise ValueError(f"{self.path}: {self.right!r} is there {count} times, not once")
        return text.replace(self.right, self.wrong)


def mutants(area: str, file: str, tests: str, *changes: tuple[str, str]) -> list[Mutant]:
    named = tuple(f"tests/{test}" for test in tests.split())
    return [Mutant(area, file, right, wrong, named) for right, wrong in changes]


LOSSES = "unit/engine/training/losses/test_losses.py"
OPTIM = "unit/engine/training/test_adamw.py"
DRAWING = "unit/engine/sampling/test_draw.py"
RUNS = "unit/server/runs/test_runs.py"
KEYS = "unit/server/auth/test_keys.py"
RETRY = "unit/transport/test_transport_retry.py"
EPOCH = "                epoch = self._runs.backend.epoch_of(self.row.base_model)\n"
REBUILD = "                await self._rebuild()\n"

MUTANTS: Sequence[Mutant] = [
    *mutants(
        "losses", "engine/training/losses/cross_entropy.py", LOSSES,
        ("-weights_N * logprobs_N", "weights_N * logprobs_N"),
        ("weights_N != 0", "weights_N > 0"),
    ),
    *mutants(
        "losses", "engine/training/losses/ratios.py", LOSSES,
        ("torch.minimum(ratio_N * advantages_N", "torch.maximum(ratio_N * advantages_N"),
        ("logprobs_N - inputs[\"logprobs\"], torch", "inputs[\"logprobs\"] - logprobs_N, torch"),
        ("(ratio_N < low_N) & (advantages_N < 0)", "(ratio_N < low_N) & (advantages_N > 0)"),
    ),
    *mutants("losses", "engine/training/losses/dro.py", LOSSES, ("0.5 * options", "1.0 * options")),
    *mutants(
        "losses", "engine/training/losses/cispo.py", LOSSES, ("log_ratio_N.detach().exp()", "log_ratio_N.exp()")
    ),
    *mutants("losses", "engine/training/losses/gspo.py", LOSSES, (".mean()", ".sum()")),
    *mutants("losses", "engine/training/losses/base.py", LOSSES, ('"min": torch.minimum', '"min": torch.maximum')),
    *mutants(
        "optimizer", "engine/training/adamw.py", OPTIM,
        ("limit / norm if 0 < limit < norm", "limit / (norm + 1e-6) if 0 < limit < norm"),
        ("1 - rate * settings.weight_decay", "1 - settings.weight_decay"),
        ("settings.beta1**steps", "settings.beta2**steps"),
        (".add_(settings.eps)", ".add_(settings.eps * correction)"),
        ("_update(after, m, v, planned.gradient(name), settings, self.steps + 1)",
         "_update(after, m, v, self._m[name], settings, self.steps + 1)"),
        ("        self.steps += 1\n", "        self.steps += 0\n"),
    ),
    *mutants(
        "LoRA", "engine/lora.py", "unit/engine/test_lora.py",
        ("return self.alpha / self.rank", "return self.alpha"),
        ("group.A_GRD.add_(grads[key].A_GRD)", "group.A_GRD.copy_(grads[key].A_GRD)"),
        ("torch.Generator().manual_seed(seed % 2**64)", "torch.Generator().manual_seed(0)"),
    ),
    *mutants(
        "packing", "engine/training/trainer.py", "unit/engine/training/test_packing.py",
        ("tokens + length > budget", "tokens + length >= budget"),
        ("start, tokens = index, 0", "start, tokens = index, length"),
        ("kinds[index] != kinds[start]", "kinds[index] != kinds[0]"),
    ),
    *mutants(
        "drawing", "engine/sampling/draw.py", DRAWING,
        ("searchsorted(cumulative_SN, limits_S1).clamp_", "searchsorted(cumulative_SN, limits_S1, right=True).clamp_"),
        ("targets_S1, right=True)", "targets_S1)"),
        ("shifted_SV.div_(temperatures_S1)", "shifted_SV.mul_(temperatures_S1)"),
    ),
    *mutants(
        "drawing", "engine/sampling/draw.py", "unit/engine/sampling/test_draw_random.py",
        ("_ROUNDS = 10", "_ROUNDS = 9"),
        ("index_words & _LOW,", "index_words & np.uint64(0),"),
    ),
    *mutants(
        "order", "server/runs/order.py", "unit/server/runs/test_order.py",
        ("for number in sorted(self._waiting)", "for number in self._waiting"),
        ("number >= self.next and number not in self._waiting", "number >= self.next"),
        ("return number < self.next or number in", "return number <= self.next or number in"),
    ),
    *mutants(
        "order", "client/runtime/sequence.py", "sdk/test_sdk_training_order.py",
        ("if number <= self._next:", "if number <= self._next + 1:"),
    ),
    *mutants(
        "order", "client/submit/in_order.py", "sdk/test_sdk_custom_loss.py",
        ("        self._give_up(spare[len(parts) :])\n", ""),
        ("chunking.split(custom_loss.largest_backward_data(data))", "chunking.split(custom_loss.forward_data(data))"),
    ),
    *mutants(
        "order", "server/runs/run.py", RUNS,
        ("= list(self._under_way), deque()", "= list(self._under_way)[::-1], deque()"),
        (f"{EPOCH}{REBUILD}", f"{REBUILD}{EPOCH}"),
    ),
    *mutants(
        "replay", "server/runs/replay.py", RUNS,
        ("isinstance(job, (OptimStep, LoadState))", "isinstance(job, OptimStep)"),
        ("            after = page[-1].seq\n", "            after = page[0].seq\n"),
    ),
    *mutants(
        "journal", "server/jobs/lifecycle.py", "unit/server/jobs/test_lifecycle.py",
        ("            await self._write_for_sure(*self._statements([meaning]))\n",
         "            self._tell(meaning)\n            await self._write_for_sure(*self._statements([meaning]))\n"),
        ("is_same and not is_known", "is_same"),
    ),
    *mutants(
        "journal", "store/sqlite.py", "contract/test_store_sqlite.py",
        ('"PRAGMA synchronous = FULL"', '"PRAGMA synchronous = NORMAL"'),
    ),
    *mutants(
        "journal", "engine/checkpoints/format.py", "unit/engine/checkpoints/test_format.py",
        ("if hashlib.sha256(data).hexdigest() != record.sha256:", "if len(data) != record.bytes:"),
        ("if manifest.digest != manifest.own_digest():", "if not manifest.digest:"),
    ),
    *mutants(
        "access", "server/auth/identity.py", f"{KEYS} unit/server/auth/test_access.py attacks/test_projects.py",
        ("return org_id == self.org_id and self.project_id in (None, project_id)", "return org_id == self.org_id"),
        ("(user_id == self.user_id or \"admin\" in self.scopes)", "True"),
        ('(scope != "admin" and "all" in self.scopes)', '"all" in self.scopes'),
    ),
    *mutants(
        "access", "server/auth/access.py", "unit/server/auth/test_access.py",
        ("        if to_change:\n            return False\n", ""),
        ("row.expires_at <= self._clock()", "row.expires_at <= 0"),
        ('row.state == "refused" or not', "not"),
    ),
    *mutants(
        "keys", "server/auth/keys.py", KEYS,
        ("return row.revoked_at is None and", "return"),
        ("row.expires_at > now", "row.expires_at >= now"),
    ),
    *mutants(
        "keys", "server/auth/authenticator.py", f"{KEYS} unit/server/auth/test_token_cache.py attacks/test_clock.py",
        ("        if expires_at <= self._clock():\n", "        if False:\n"),
        ("if known.until <= self._ticks():", "if known.until <= self._clock() - 1e10:"),
        ('"verify_exp": False', '"verify_exp": False, "verify_signature": False'),
    ),
    *mutants(
        "keys", "server/auth/start_keys.py", "attacks/test_keys_at_start.py",
        ("row.name == GIVEN and row.digest != but", "row.name == GIVEN and row.digest == but"),
    ),
    *mutants("keys", "server/ops/clock.py", "attacks/test_clock.py", ("max(self._wall(), ", "min(self._wall(), ")),
    *mutants(
        "keys", "config.py", "attacks/test_credentials.py",
        ("stored is not None and is_same_server(stored.base_url, values[\"base_url\"])", "stored is not None"),
    ),
    *mutants(
        "keys", "transport/base.py", "unit/transport/test_transport_base.py attacks/test_credentials.py",
        ("return old.hostname == new.hostname and", "return"),
    ),
    *mutants(
        "retry", "transport/retry.py", RETRY,
        ("return fixed_s if fixed_s <= left_s else None", "return fixed_s"),
        ("min(self.backoff_s(attempt, random), left_s)", "self.backoff_s(attempt, random)"),
        ("attempt >= self.max_attempts", "attempt > self.max_attempts"),
        ("conflicts > self.max_conflicts", "conflicts > self.max_conflicts + 1"),
        ("0 < asked_s <= self.max_server_wait_s", "0 < asked_s"),
    ),
    *mutants(
        "retry", "transport/gate.py", "unit/transport/test_transport_breaker.py",
        ("if sent_at is None or sent_at >= known.failed_at:", "if True:"),
        ("error.retryable = known.last is None or known.last.retryable", "error.retryable = True"),
    ),
    *mutants(
        "retry", "wire/rules/faults.py", "unit/wire/rules/test_faults.py",
        ("return milliseconds / 1000", "return milliseconds"),
    ),
    *mutants(
        "codecs", "wire/codecs/protobuf.py", "unit/wire/codecs/test_codecs.py unit/wire/codecs/test_hostile.py",
        ("encoded.append(value & 0x7F | 0x80)", "encoded.append(value & 0x7F)"),
    ),
    *mutants(
        "codecs", "wire/codecs/proto_training.py", "unit/wire/codecs/test_codecs.py",
        ("        message.number(6, 1)\n", "        message.number(6, 0)\n"),
    ),
    *mutants(
        "codecs", "wire/rules/split_join.py", "unit/wire/rules/test_split_join.py",
        ("return sum(value * weight for value, weight in zip(values, weights, strict=True)) / total",
         "return sum(values) / len(values)"),
        ("max(values) - _mean(values, weights)", "max(values) - min(values)"),
    ),
    *mutants(
        "codecs", "wire/rules/split_join.py", "unit/wire/rules/test_split_join.py",
        ("filled + size > limits.max_bytes", "filled + size >= limits.max_bytes"),
    ),
    *mutants(
        "codecs", "wire/codecs/zstd.py", "unit/wire/codecs/test_zstd.py",
        ("        if announced > max_bytes:\n", "        if False:\n"),
        ("if frame.unused_data or position < len(body):", "if False:"),
    ),
]  # fmt: skip


def survivors(chosen: Sequence[Mutant]) -> list[Mutant]:
    """Make each mistake in turn, print what became of it, and return those that nobody noticed."""
    found = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as place:
        tree = Path(place)
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy2(ROOT / name, tree / name)
        for name in (".venv", ".official"):
            if (ROOT / name).exists():
                (tree / name).symlink_to(ROOT / name)
        for tests in dict.fromkeys(mutant.tests for mutant in chosen):
            if _fail(tree, tests):
                raise SystemExit(f"{' '.join(tests)} fail without any mistake; mutants say nothing then")
        print("| Area | File | Mistake | Tests | |\n| --- | --- | --- | --- | --- |")
        for mutant in chosen:
            began, path = time.monotonic(), tree / mutant.path
            right = path.read_text()
            path.write_text(mutant.made_in(right))
            is_killed = _fail(tree, mutant.tests)
            path.write_text(right)
            print(f"{time.monotonic() - began:.0f} s", file=sys.stderr)
            print(table_row(mutant, is_killed), flush=True)
            if not is_killed:
                found.append(mutant)
    return found


def _fail(tree: Path, tests: Sequence[str]) -> bool:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    known = os.environ | {
        "PYTHONPATH": f"{tree / 'src'}{os.pathsep}{tree / 'tests'}",
        "PYTHONDONTWRITEBYTECODE": "1",  # a file changed twice within a second would be taken for the same
        "HYPOTHESIS_STORAGE_DIRECTORY": str(tree / ".hypothesis"),
    }
    try:
        done = subprocess.run(command, cwd=tree, env=known, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return True
    if done.returncode not in (0, 1, 2):  # 2: a mistake may break an import
        raise SystemExit(f"{' '.join(command)} could not run:\n{done.stdout}{done.stderr}")
    return done.returncode != 0


def table_row(mutant: Mutant, is_killed: bool) -> str:
    """One line of the table in the documents."""
    right, wrong = _short(mutant.right), _short(mutant.wrong)
    change = f"`{right}` → `{wrong}`" if wrong else f"without `{right}`"
    tests = ", ".join(f"`{test.removeprefix('tests/')}`" for test in mutant.tests)
    return f"| {mutant.area} | `{mutant.file}` | {change} | {tests} | {'killed' if is_killed else '**survived**'} |"


def _short(text: str) -> str:
    line = " ".join(text.split()).replace("|", "\\|")
    return line if len(line) <= 70 else line[:67] + "..."


def main() -> None:
    parser = argparse.ArgumentParser(description="Make mistakes on purpose and see whether the tests notice.")
    parser.add_argument("words", nargs="*", help="only mutants whose area or file contains one of these")
    words = parser.parse_args().words
    chosen = [m for m in MUTANTS if not words or any(word in m.area or word in m.file for word in words)]
    found = survivors(chosen)
    print(f"\n{len(chosen) - len(found)} of {len(chosen)} killed")
    if found:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
