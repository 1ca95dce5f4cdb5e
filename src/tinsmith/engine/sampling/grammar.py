"""Grammars of constrained samples: compiled once per request, followed token by token.

Compiling a grammar and finding the tokens that may come next can both take long, so a thread does them while the model
computes; llguidance releases Python's lock for the work. Tenants take turns in that thread, and the sampler takes a
sample into a step only when the mask of its next token is ready: a difficult grammar delays its own request, and the
constrained samples of others by one mask at a time.

A mask depends on the grammar and the tokens drawn so far. So a sample that was preempted gets a new matcher from its
tokens, and one that is drawn again after a crash has the same masks.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from tinsmith.engine.sampling.logit_changes import Mask
from tinsmith.errors import InvalidInputError
from tinsmith.wire.messages.sampling import OutputFormat
from tinsmith.wire.rules.grammar_rules import FIELD, make_tokenizer, refuse_errors, start_matcher

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

T = TypeVar("T")


class FairThread:
    """Runs functions in one thread, in which tenants take turns. The thread ends when there is nothing left to do."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lines: dict[str, deque[tuple[Future[Any], Callable[[], Any]]]] = {}
        self._is_running = False

    def submit(self, tenant: str, work: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        with self._lock:
            self._lines.setdefault(tenant, deque()).append((future, work))
            is_new, self._is_running = not self._is_running, True
        if is_new:
            threading.Thread(target=self._run, name="tinsmith-grammar", daemon=True).start()
        return future

    def _run(self) -> None:
        while (task := self._next()) is not None:
            future, work = task
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)

    def _next(self) -> tuple[Future[Any], Callable[[], Any]] | None:
        """Return the next work of the tenant that has waited longest."""
        with self._lock:
            if not self._lines:
                self._is_running = False
                return None
            tenant = next(iter(self._lines))
            line = self._lines.pop(tenant)
            task = line.popleft()
            if line:
                self._lines[tenant] = line
            return task


class Grammars:
    """Compiles grammars for one model."""

    def __init__(
        self, token_bytes: Sequence[bytes], special_tokens: frozenset[int], eos_tokens: Sequence[int], vocab_size: int
    ) -> None:
        self._token_bytes = token_bytes
        self._special = special_tokens
        self._eos_tokens = list(eos_tokens)
        self.vocab_size = vocab_size
        self._tokenizer: LLTokenizer | None = None
        self._thread = FairThread()

    def compile(self, output: OutputFormat, stop_tokens: frozenset[int], tenant: str) -> Future[Grammar]:
        """Start to compile a format. The future raises InvalidInputError if no sample can have it."""

        def compiled() -> Grammar:
            if self._tokenizer is None:
                self._tokenizer = self._make_tokenizer()
            matcher = start_matcher(output, self._tokenizer)
            return Grammar(matcher, self.vocab_size, stop_tokens, lambda work: self._thread.submit(tenant, work))

        return self._thread.submit(tenant, compiled)

    def _make_tokenizer(self) -> LLTokenizer:
        """Special tokens have no bytes: their names are not text that a model writes.

        One more token than the model has stands for the end in models without an end-of-sequence token.
        """
        tokens = [b""] * (self.vocab_size + 1)
        tokens[: len(self._token_bytes)] = self._token_bytes[: self.vocab_size]
        for token in self._special.union(self._eos_tokens):
            tokens[token] = b""
        return make_tokenizer(tokens, self._eos_tokens or [self.vocab_size])


class Grammar:
    """A compiled format, and the mask of the first token."""

    def __init__(
        self,
        matcher: LLMatcher,
        vocab_size: int,
        stop_tokens: frozenset[int],
        in_thread: Callable[[Callable[[], Mask]], Future[Mask]],
    ) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._ends = np.array(sorted(stop_tokens), np.int64)
        self.in_thread = in_thread
        self.first_mask_V = self.mask_of(matcher)

    def start(self) -> GrammarState:
        """Return the state of a sample before its first token."""
        return GrammarState(self, self._matcher.deep_copy())

    def resume(self, drawn: Sequence[int]) -> GrammarState:
        """Return the state of a sample after these tokens, which the thread follows."""
        return GrammarState(self, self._matcher.deep_copy(), tuple(drawn))

    def mask_of(self, matcher: LLMatcher) -> Mask:
        """Return mask_V of the next token. Where the text may end, the request's stop tokens may be drawn, too."""
        packed = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        refuse_errors(matcher)
        mask_V = np.unpackbits(packed, bitorder="little")[: self._vocab_size].astype(np.bool_)
        if matcher.is_accepting():
            mask_V[self._ends] = True
        if not mask_V.any():
            raise InvalidInputError(f"{FIELD}: no token of this model continues the text as it must", field=FIELD)
        return mask_V


class GrammarState:
    """Where one sample is in its grammar."""

    __slots__ = ("_grammar", "_matcher", "mask")

    def __init__(self, grammar: Grammar, matcher: LLMatcher, drawn: tuple[int, ...] | None = None) -> None:
        self._grammar = grammar
        self._matcher = matcher
        self.mask: Future[Mask] = Future() if drawn is None else grammar.in_thread(lambda: self._follow(drawn))
        """The mask of the next token; its exception belongs to the request."""
        if drawn is None:
            self.mask.set_result(grammar.first_mask_V)

    def push(self, token: int) -> bool:
        """Follow a drawn token, once its mask is ready; return whether the text is complete."""
        self._matcher.consume_token(token)
        refuse_errors(self._matcher)
        if self._matcher.is_stopped():
            return True
        self.mask = self._grammar.in_thread(lambda: self._grammar.mask_of(self._matcher))
        return False

    def _follow(self, drawn: tuple[int, ...]) -> Mask:
        self._matcher.consume_tokens(list(drawn))
        refuse_errors(self._matcher)
        return self._grammar.mask_of(self._matcher)
