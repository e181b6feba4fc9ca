"""From logits to tokens. Sampling is keyed by (seed, position), so a replayed request draws the same tokens."""

from collections.abc import Sequence
from hashlib import blake2b

import torch
from torch import Tensor

from ..proto.step import Logprobs, Sampling
from .grammars import Matcher


class History:
    """Which tokens a request has and which of them it generated, for penalties."""

    def __init__(self, tokens: Sequence[int], prompt_tokens: int):
        self._prompt = set(tokens[:prompt_tokens])
        self._counts: dict[int, int] = {}
        for token in tokens[prompt_tokens:]:
            self.add(token)

    def add(self, token: int) -> None:
        self._counts[token] = self._counts.get(token, 0) + 1

    def penalize(self, logits_V: Tensor, sampling: Sampling) -> None:
        """In place. Repetition weighs on prompt and answer, presence and frequency on the answer alone."""
        if sampling.repetition_penalty != 1.0:
            # A prompt may have tokens that can be read and never said (images): they have no logit.
            known = [token for token in self._prompt | self._counts.keys() if token < len(logits_V)]
            seen = torch.tensor(known, dtype=torch.int64, device=logits_V.device)
            values = logits_V[seen]
            weight = sampling.repetition_penalty
            logits_V[seen] = torch.where(values > 0, values / weight, values * weight)
        if self._counts and (sampling.presence_penalty or sampling.frequency_penalty):
            said = torch.tensor(list(self._counts), device=logits_V.device)
            counts = torch.tensor(list(self._counts.values()), dtype=torch.float32, device=logits_V.device)
            logits_V[said] -= sampling.presence_penalty + sampling.frequency_penalty * counts


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
    histories: of the rows whose sampling has penalties
    matchers: of the rows whose answer has a form
    """
    logits_RV = logits_RV.float()
    nothing = [None] * len(samplings)
    wanted_RV = _adjusted(logits_RV, samplings, positions, histories or nothing, matchers or nothing)
    tokens = wanted_RV.argmax(dim=-1)
    random_rows = [row for row, sampling in enumerate(samplings) if sampling.temperature > 0]
    # By themselves, since those that cut the distribution draw from it in another order: what a row draws must not
    # depend on who is beside it.
    for cuts in (False, True):
        rows = [row for row in random_rows if _cuts(samplings[row]) is cuts]
        if rows:
            tokens[rows] = _draw(
                wanted_RV[rows],
                [samplings[row] for row in rows],
                [_uniform(samplings[row].seed, positions[row]) for row in rows],
                cuts,
            )
    asked = [(row, sampling.logprobs) for row, sampling in enumerate(samplings) if sampling.logprobs >= 0]
    return tokens, [(row, logprobs(logits_RV[row : row + 1], tokens[row : row + 1], count)[0]) for row, count in asked]


def logprobs(logits_RV: Tensor, tokens_R: Tensor, count: int) -> list[Logprobs]:
    """Of one token per row, and of the `count` most probable ones."""
    logprobs_RV = torch.log_softmax(logits_RV.float(), dim=-1)
    chosen = logprobs_RV.gather(1, tokens_R.unsqueeze(1)).squeeze(1).tolist()
    if not count:
        return [Logprobs(value, ()) for value in chosen]
    top = logprobs_RV.topk(min(count, logprobs_RV.shape[1]), dim=-1)
    pairs = zip(chosen, top.indices.tolist(), top.values.tolist(), strict=True)
    return [Logprobs(value, tuple(zip(indices, values, strict=True))) for value, indices, values in pairs]


def _adjusted(
    logits_RV: Tensor,
    samplings: Sequence[Sampling],
    positions: Sequence[int],
    histories: Sequence[History | None],
    matchers: Sequence[Matcher | None],
) -> Tensor:
    """Logits with penalties and biases, without ends that come too early and what the form of the answer excludes; the
    very same tensor if nobody wants any of it."""
    changed_RV = logits_RV
    rows = zip(samplings, positions, histories, matchers, strict=True)
    for row, (sampling, position, history, matcher) in enumerate(rows):
        is_early = bool(sampling.ends) and position < sampling.prompt_tokens + sampling.min_tokens
        if not (is_early or sampling.logit_bias or history is not None or matcher is not None):
            continue
        if changed_RV is logits_RV:
            changed_RV = logits_RV.clone()
        logits_V = changed_RV[row]
        if history is not None:
            history.penalize(logits_V, sampling)
        for token, bias in sampling.logit_bias:
            logits_V[token] += bias
        if is_early and not (matcher is not None and matcher.is_complete):
            logits_V[[token for token in sampling.ends if token < len(logits_V)]] = float("-inf")
        if matcher is not None:
            matcher.restrict(logits_V)
    return changed_RV


def _cuts(sampling: Sampling) -> bool:
    """Whether improbable tokens are left out."""
    return bool(sampling.top_k or sampling.top_p < 1 or sampling.min_p > 0)


def _draw(logits_RV: Tensor, samplings: Sequence[Sampling], uniforms: Sequence[float], cuts: bool) -> Tensor:
    """Tokens [R] by inverting the cumulative distribution at one uniform number per row. cuts: all rows do, or none."""
    column = {"dtype": torch.float32, "device": logits_RV.device}
    temperature = torch.tensor([s.temperature for s in samplings], **column).unsqueeze(1)
    probabilities = torch.softmax(logits_RV / temperature, dim=-1)
    order = None
    if cuts:
        probabilities, order = probabilities.sort(dim=-1, descending=True, stable=True)
        vocab = probabilities.shape[-1]
        top_k = torch.tensor([s.top_k or vocab for s in samplings], **column).unsqueeze(1)
        top_p = torch.tensor([s.top_p for s in samplings], **column).unsqueeze(1)
        min_p = torch.tensor([s.min_p for s in samplings], **column).unsqueeze(1)
        before = probabilities.cumsum(dim=-1) - probabilities  # mass of the more probable tokens
        rank = torch.arange(vocab, device=logits_RV.device)
        dropped = (rank >= top_k) | ((before >= top_p) & (top_p < 1)) | (probabilities < min_p * probabilities[:, :1])
        dropped[:, 0] = False
        probabilities = probabilities.masked_fill(dropped, 0)
    cumulative = probabilities.double().cumsum(dim=-1)
    target = torch.tensor(uniforms, dtype=torch.float64, device=logits_RV.device).unsqueeze(1) * cumulative[:, -1:]
    picked = torch.searchsorted(cumulative, target, right=True)
    last_kept = (probabilities > 0).long().cumsum(dim=-1).argmax(dim=-1, keepdim=True)
    picked = torch.minimum(picked, last_kept)  # a product that rounds up to the whole mass still picks a kept token
    return (picked if order is None else order.gather(-1, picked)).squeeze(-1)


def _uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on nothing but its arguments."""
    digest = blake2b(seed.to_bytes(8) + position.to_bytes(8), digest_size=8).digest()
    return (int.from_bytes(digest) >> 11) * 2.0**-53
