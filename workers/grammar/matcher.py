"""Structured output: which tokens may come next.

llguidance (https://github.com/guidance-ai/llguidance) parses the answer so far and tells the tokens that can follow;
nothing is computed over the vocabulary beforehand. A grammar is compiled before its request is queued, in a thread of
its own and without Python's lock, so that no step waits for it, and only when that is known to end (`sandbox.py`).
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import InvalidRequest
from .sandbox import GrammarSandbox, complaint_about, one_line, source_of

REMEMBERED, REMEMBERED_CHARS = 128, 1 << 19
"""Compiled grammars that are kept, and characters of them all: one can take 500 bytes for each."""

MAX_STATES = 2**15
"""Of one grammar, 400 bytes each; they come with the answers and stay with the grammar. `.{0,5000}` has one for each
character, `(a|b)*a(a|b){20}` a new one for almost every token: with llguidance's own limit of 250,000, each such one
took 100 MB of a worker within 500 tokens."""


@dataclass(slots=True)
class _Grammar:
    """One that is compiled. Its states are shared by all its answers, so when one has taken too many, all have."""

    matcher: Any
    is_spent: bool = False


class Grammars:
    """The grammars of one model's answers. `prepare` may run while steps do."""

    def __init__(self, model_dir: str, trust_remote_code: bool, vocab_size: int, eos_token_ids: Sequence[int]):
        self._model_dir = Path(model_dir)
        self._trust_remote_code = trust_remote_code
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._tokenizer: Any = None
        self._compiled: OrderedDict[tuple[str, str], _Grammar] = OrderedDict()
        self._lock = threading.Lock()
        self._sandbox = GrammarSandbox()

    def prepare(self, kind: str, text: str) -> None:
        """Compile a grammar, or find it compiled. Raises `InvalidRequest`, naming the field, when it is none."""
        self._find(kind, text)

    def matcher(self, kind: str, text: str, answer: Sequence[int]) -> "Matcher":
        """What may follow, for one answer that begins with these tokens."""
        matcher = Matcher(self._find(kind, text), self._eos_token_ids)
        for token in answer:
            matcher.take(token)
        return matcher

    def _find(self, kind: str, text: str) -> _Grammar:
        key = kind, text
        with self._lock:
            known = self._compiled.get(key)
            if known is not None and not known.is_spent:
                self._compiled.move_to_end(key)
                return known
        compiled = _Grammar(self._compile(kind, text))
        with self._lock:
            self._compiled[key] = compiled
            while len(self._compiled) > REMEMBERED or sum(len(text) for _, text in self._compiled) > REMEMBERED_CHARS:
                self._compiled.popitem(last=False)
        return compiled

    def _compile(self, kind: str, text: str) -> Any:
        from llguidance import LLMatcher, LLParserLimits

        tokens = self._tokens(kind)
        self._sandbox.run(kind, text)
        limits = LLParserLimits(max_lexer_states=MAX_STATES)
        matcher = LLMatcher(tokens, source_of(kind, text), log_level=0, limits=limits)
        matcher.compute_bitmask()  # what it computes when it is needed first would be computed within a step
        if complaint := complaint_about(matcher, kind):
            raise InvalidRequest(complaint, field=kind)
        return matcher

    def _tokens(self, kind: str) -> Any:
        if self._tokenizer is None:
            from llguidance.hf import from_tokenizer
            from transformers import AutoTokenizer

            try:
                fast = AutoTokenizer.from_pretrained(
                    self._model_dir, local_files_only=True, trust_remote_code=self._trust_remote_code
                )
                self._tokenizer = from_tokenizer(fast, n_vocab=self._vocab_size, eos_token=self._eos_token_ids)
            except Exception as error:  # of any kind: the model has no tokenizer that can be used
                raise InvalidRequest(
                    f"structured output needs the model's tokenizer, which cannot be used for it: "
                    f"{one_line(str(error))}",
                    field=kind,
                ) from error
        return self._tokenizer


class Matcher:
    """The grammar of one answer, as far as that has come."""

    def __init__(self, grammar: _Grammar, eos_token_ids: Sequence[int]):
        self._grammar = grammar
        self._matcher = grammar.matcher.deep_copy()
        self._eos_token_ids = eos_token_ids

    @property
    def is_complete(self) -> bool:
        """Nothing can follow but the end, or nothing is known any more."""
        return self._matcher.is_stopped()

    @property
    def failure(self) -> str | None:
        """Why it is not known what may follow: answers by this grammar have taken more states than it may have."""
        if not self._matcher.is_error():
            return None
        self._grammar.is_spent = True
        return one_line(self._matcher.get_error().partition("<state>")[0])

    def allowed(self) -> bytes:
        """Tokens that may follow: a bit each, lowest first, as many as it takes."""
        if not self.is_complete:
            return self._matcher.compute_bitmask()
        bits = bytearray(max(self._eos_token_ids, default=0) // 8 + 1)
        for token in self._eos_token_ids:
            bits[token // 8] |= 1 << token % 8
        return bytes(bits)

    def take(self, token: int) -> None:
        """It was drawn. One too many, after the end, changes nothing."""
        if not self.is_complete:
            self._matcher.consume_token(token)
