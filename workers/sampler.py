"""From logits to tokens. Sampling is keyed by (seed, position), so a replayed request draws the same tokens."""

from collections import deque
from collections.abc import Sequence
from hashlib import blake2b

import torch
from torch import Tensor

from ..proto.step import MAX_BAD_TOKENS, Logprobs, Sampling
from .grammar.matcher import Matcher

# What a request may ask for is wider than float32: outside of these a chance would be infinity divided by infinity.
HIGHEST_LOGIT = 1e30
TEMPERATURES = 1e-6, 1e30


class History:
    """The tokens of a request, and which of them it generated: for penalties and forbidden rows of tokens."""

    def __init__(self, tokens: Sequence[int], prompt_tokens: int):
        self._prompt = set(tokens[:prompt_tokens])
        self._counts: dict[int, int] = {}
        self._last: deque[int] = deque(maxlen=MAX_BAD_TOKENS)  # of the answer
        for token in tokens[prompt_tokens:]:
            self.add(token)

    def add(self, token: int) -> None:
        self._counts[token] = self._counts.get(token, 0) + 1
        self._last.append(token)

    def penalize(self, logits_V: Tensor, sampling: Sampling) -> None:
        """In place. Repetition weighs on prompt and answer, presence and frequency on the answer alone."""
        if sampling.repetition_penalty != 1.0:
            # A prompt may have tokens that can be read and never said (images): they have no logit.
            known = [token for token in self._prompt | self._counts.keys() if token < len(logits_V)]
            seen = torch.tensor(known, dtype=torch.int64, device=logits_V.device)
            values = logits_V[seen]
            weight = sampling.repetition_penalty
            logits_V[seen] = torch.where(values > 0, values / weight, values * weight).clamp(
                -HIGHEST_LOGIT, HIGHEST_LOGIT
            )
        if self._counts and (sampling.presence_penalty or sampling.frequency_penalty):
            said = torch.tensor(list(self._counts), device=logits_V.device)
            counts = torch.tensor(list(self._counts.values()), dtype=torch.float32, device=logits_V.device)
            logits_V[said] -= sampling.presence_penalty + sampling.frequency_penalty * counts

    def forbid(self, logits_V: Tensor, sampling: Sampling) -> None:
        """Take away, in place, each token that would complete a forbidden row. Such a token stays possible where no
        other is, as where the grammar demands it."""
        last = list(self._last) if sampling.bad_token_ids else []
        for *first, token in sampling.bad_token_ids:
            if token < len(logits_V) and len(first) <= len(last) and last[len(last) - len(first) :] == first:
                logits_V[token] = -HIGHEST_LOGIT


def sample(
    logits_RV: Tensor,
    samplings: Sequence[Sampling],
    positions: Sequence[int],
    histories: Sequence[History | None] | None = None,
    matchers: Sequence[Matcher | None] | None = None,
) -> tuple[Tensor, list[tuple[int, Logprobs]]]:
    """One token per row [R], and the log-probabilities of the rows that want them.

    Shapes  R rows, V vocabulary; logits [R, V] in any float dtype
    positions: of the token to be drawn, in its sequence
    histories: of the rows whose sampling needs one
    matchers: of the rows whose answer has a grammar
    """
    logits_RV = logits_RV.float()
    nothing = [None] * len(samplings)
    wanted_RV = _adjusted(logits_RV, samplings, positions, histories or nothing, matchers or nothing)
    tokens = wanted_RV.argmax(dim=-1)
    random_rows = [row for row, sampling in enumerate(samplings) if sampling.temperature > 0]
    if random_rows:
        chances_RV = _chances(wanted_RV[random_rows], [samplings[row] for row in random_rows])
        keys = [_key(samplings[row].seed, positions[row]) for row in random_rows]
        tokens[random_rows] = _race(chances_RV, keys)
    asked = [(row, sampling.logprobs) for row, sampling in enumerate(samplings) if sampling.logprobs >= 0]
    return tokens, [(row, logprobs(logits_RV[row : row + 1], tokens[row : row + 1], count)[0]) for row, count in asked]


def logprobs(logits_RV: Tensor, tokens_R: Tensor, count: int) -> list[Logprobs]:
    """Of one token per row, and of the `count` most probable ones."""
    logprobs_RV = torch.log_softmax(logits_RV.float(), dim=-1)
    chosen_R1 = logprobs_RV.gather(1, tokens_R.unsqueeze(1))
    ranks = ((logprobs_RV > chosen_R1).sum(dim=-1) + 1).tolist()
    chosen = chosen_R1.squeeze(1).tolist()
    if not count:
        return [Logprobs(value, (), rank) for value, rank in zip(chosen, ranks, strict=True)]
    top = logprobs_RV.topk(min(count, logprobs_RV.shape[1]), dim=-1)
    rows = zip(chosen, top.indices.tolist(), top.values.tolist(), ranks, strict=True)
    return [Logprobs(value, tuple(zip(indices, values, strict=True)), rank) for value, indices, values, rank in rows]


def _adjusted(
    logits_RV: Tensor,
    samplings: Sequence[Sampling],
    positions: Sequence[int],
    histories: Sequence[History | None],
    matchers: Sequence[Matcher | None],
) -> Tensor:
    """Logits with penalties and biases. Ends that come too early and tokens that the grammar excludes have none.

    The result is the very same tensor if no row asks for any of this.
    """
    changed_RV = logits_RV
    rows = zip(samplings, positions, histories, matchers, strict=True)
    for row, (sampling, position, history, matcher) in enumerate(rows):
        # Most rows want nothing of this. The first that does pays for a copy of the logits.
        is_early = bool(sampling.ends) and position < sampling.prompt_tokens + sampling.min_tokens
        if not (is_early or sampling.logit_bias or history is not None or matcher is not None):
            continue
        if changed_RV is logits_RV:
            changed_RV = logits_RV.clone()
        logits_V = changed_RV[row]
        # The grammar has the last word: biases and penalties may not bring back what it excludes.
        if history is not None:
            history.penalize(logits_V, sampling)
            history.forbid(logits_V, sampling)
        for token, bias in sampling.logit_bias:
            logits_V[token] += bias
        if is_early and not (matcher is not None and matcher.is_complete):
            logits_V[[token for token in sampling.ends if token < len(logits_V)]] = float("-inf")
        if matcher is not None:
            matcher.restrict(logits_V)
    return changed_RV


def _chances(logits_RV: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """How probable each token is [R, V], 0 where it is left out. Rows need not sum to one."""
    temperature = torch.tensor([s.temperature for s in samplings], dtype=torch.float64).clamp(*TEMPERATURES)
    chances_RV = torch.softmax(logits_RV / temperature.float().to(logits_RV.device).unsqueeze(1), dim=-1)
    rows = [row for row, s in enumerate(samplings) if s.top_k or s.top_p < 1 or s.min_p > 0]
    if rows:
        chances_RV[rows] = _cut(chances_RV[rows], [samplings[row] for row in rows])
    return chances_RV


def _cut(chances_RV: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """The same with 0 for the improbable tokens that each row leaves out."""
    vocab = chances_RV.shape[-1]
    column = {"dtype": torch.float32, "device": chances_RV.device}
    top_k = torch.tensor([s.top_k or vocab for s in samplings], **column).unsqueeze(1)
    top_p = torch.tensor([s.top_p for s in samplings], **column).unsqueeze(1)
    min_p = torch.tensor([s.min_p for s in samplings], **column).unsqueeze(1)
    sorted_RV, order = chances_RV.sort(dim=-1, descending=True, stable=True)
    before = sorted_RV.cumsum(dim=-1) - sorted_RV  # mass of the more probable tokens
    rank = torch.arange(vocab, device=chances_RV.device)
    dropped = (rank >= top_k) | ((before >= top_p) & (top_p < 1)) | (sorted_RV < min_p * sorted_RV[:, :1])
    dropped[:, 0] = False
    return chances_RV.masked_fill(dropped.scatter(-1, order, dropped), 0)


def _race(chances_RV: Tensor, keys: Sequence[tuple[int, int]]) -> Tensor:
    """Draw a token [R] from each row: every token runs for a time that is exponentially distributed, at a rate of its
    chance, and the first one wins (the Gumbel-max trick, arXiv 2110.01515, without its second logarithm).

    Sums in another order, as another batch or a prompt computed anew make them, change chances in their last bits. Here
    that can change the winner only if the second arrives within those bits, as with the greedy choice. A number looked
    up in the cumulative distribution is sensitive at the border of every token, and to the order of near-equal ones.
    """
    device = chances_RV.device
    vocab = chances_RV.shape[-1]
    # On a CPU a piece should stay in a core's cache from one operation to the next.
    at_once = max(1, (1 << 18 if device.type == "cpu" else 1 << 25) // vocab)
    winners = []
    for first in range(0, len(keys), at_once):
        these = torch.tensor(keys[first : first + at_once], dtype=torch.int32, device=device)
        uniform = _bits(these, vocab).float().mul_(2.0**-32).add_(0.5).clamp_(2.0**-33, 1 - 2.0**-24)
        times = uniform.neg_().log1p_().neg_()  # accurate for the short ones, which win
        winners.append((chances_RV[first : first + at_once] / times).argmax(dim=-1))
    return torch.cat(winners)


def _bits(keys_R2: Tensor, count: int) -> Tensor:
    """Random int32 [R, count], each of its row's keys and its place alone: the place is multiplied and shifted till
    every bit depends on all (constants of the best known function of this form, found by search:
    https://github.com/skeeto/hash-prospector), with one key added before and the other between."""
    bits = torch.arange(count, dtype=torch.int32, device=keys_R2.device) * _signed(0x9E3779B1) + keys_R2[:, :1]
    bits ^= (bits >> 16) & 0xFFFF
    bits *= _signed(0x21F0AAAD)
    bits += keys_R2[:, 1:]
    bits ^= (bits >> 15) & 0x1FFFF
    bits *= _signed(0xD35A2D97)
    bits ^= (bits >> 15) & 0x1FFFF
    return bits


def _key(seed: int, position: int) -> tuple[int, int]:
    """Two int32 that depend on nothing but the arguments."""
    digest = blake2b(seed.to_bytes(8) + position.to_bytes(8), digest_size=8).digest()
    return _signed(int.from_bytes(digest[:4])), _signed(int.from_bytes(digest[4:]))


def _signed(bits: int) -> int:
    """The int32 of the same 32 bits."""
    return bits - (1 << 32) if bits >> 31 else bits
