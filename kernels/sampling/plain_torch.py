"""Tokens drawn in plain torch: runs anywhere, and is what the fast ways must equal."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from .cpu import about_drawn, race_keys
from .protocol import HIGHEST_LOGIT, TEMPERATURES, About, Changes, Draw, Penalties, SamplingBackend, Tell


class TorchSampling(SamplingBackend):
    """The default where nothing can be compiled."""

    name: ClassVar[str] = "torch"
    devices: ClassVar[frozenset[str]] = frozenset({"cpu", "cuda"})

    def draw(
        self,
        logits_RV: Tensor,
        draws: Sequence[Draw],
        positions: Sequence[int],
        changes: Sequence[Changes | None] | None = None,
    ) -> tuple[Tensor, Tell]:
        logits_RV = logits_RV.float()
        wanted_RV = _changed(logits_RV, changes or ())
        tokens_R = wanted_RV.argmax(dim=-1)
        random_rows = [row for row, draw in enumerate(draws) if draw.temperature > 0]
        if random_rows:
            chances_RV = _chances(wanted_RV[random_rows], [draws[row] for row in random_rows])
            keys_R2 = torch.from_numpy(race_keys(draws, positions)[random_rows])
            tokens_R[random_rows] = _race(chances_RV, keys_R2.to(logits_RV.device))
        return tokens_R, about_drawn(self, logits_RV, tokens_R, draws)

    def logprobs(self, logits_RV: Tensor, tokens_R: Tensor, count: int) -> list[About]:
        logprobs_RV = torch.log_softmax(logits_RV.float(), dim=-1)
        chosen_R1 = logprobs_RV.gather(1, tokens_R.unsqueeze(1))
        ranks = ((logprobs_RV > chosen_R1).sum(dim=-1) + 1).tolist()
        chosen = chosen_R1.squeeze(1).tolist()
        if not count:
            return [About(value, (), rank) for value, rank in zip(chosen, ranks, strict=True)]
        top = logprobs_RV.topk(min(count, logprobs_RV.shape[1]), dim=-1)
        rows = zip(chosen, top.indices.tolist(), top.values.tolist(), ranks, strict=True)
        return [About(value, tuple(zip(indices, values, strict=True)), rank) for value, indices, values, rank in rows]


# -- logits ------------------------------------------------------------------------------------------------------------


def _changed(logits_RV: Tensor, changes: Sequence[Changes | None]) -> Tensor:
    """The very same tensor if no row has any. The first row that does pays for a copy of the logits."""
    changed_RV = logits_RV
    for row, change in enumerate(changes):
        if change is not None:
            if changed_RV is logits_RV:
                changed_RV = logits_RV.clone()
            _change(changed_RV[row], change)
    return changed_RV


def _change(logits_V: Tensor, changes: Changes) -> None:
    """In place."""
    penalties, forbidden, biases, excluded, allowed = changes
    vocab = len(logits_V)
    if penalties is not None:
        _penalize(logits_V, penalties)
    logits_V[[token for token in forbidden if token < vocab]] = -HIGHEST_LOGIT
    for token, bias in biases:
        if token < vocab:
            logits_V[token] += bias
    logits_V[[token for token in excluded if token < vocab]] = float("-inf")
    if allowed is not None:
        logits_V.masked_fill_(~_spread(allowed, vocab).to(logits_V.device), float("-inf"))


def _penalize(logits_V: Tensor, penalties: Penalties) -> None:
    tokens, counts = (torch.from_numpy(array).to(logits_V.device) for array in penalties[:2])
    # A prompt may have tokens that can be read and never said (images): they have no logit.
    tokens, counts = tokens[tokens < len(logits_V)], counts[tokens < len(logits_V)]
    if penalties.repetition != 1.0:
        values, weight = logits_V[tokens], penalties.repetition
        values = torch.where(values > 0, values / weight, values * weight)
        logits_V[tokens] = values.clamp(-HIGHEST_LOGIT, HIGHEST_LOGIT)
    said, counts = tokens[counts > 0], counts[counts > 0]
    logits_V[said] -= penalties.presence + penalties.frequency * counts.float()


def _spread(bits: bytes, count: int) -> Tensor:
    """The first `count` of them [count] bool; those that are missing are false."""
    spread = torch.zeros(count, dtype=torch.bool)
    if bits:
        found = torch.frombuffer(bytearray(bits), dtype=torch.uint8).unsqueeze(1) >> torch.arange(8, dtype=torch.uint8)
        found = (found & 1).bool().flatten()[:count]
        spread[: len(found)] = found
    return spread


# -- chances -----------------------------------------------------------------------------------------------------------


def _chances(logits_RV: Tensor, draws: Sequence[Draw]) -> Tensor:
    """How probable each token is [R, V], 0 where it is left out. Rows need not sum to one."""
    temperature = torch.tensor([draw.temperature for draw in draws], dtype=torch.float64).clamp(*TEMPERATURES)
    chances_RV = torch.softmax(logits_RV / temperature.float().to(logits_RV.device).unsqueeze(1), dim=-1)
    rows = [row for row, draw in enumerate(draws) if draw.top_k or draw.top_p < 1 or draw.min_p > 0]
    if rows:
        chances_RV[rows] = _cut(chances_RV[rows], [draws[row] for row in rows])
    return chances_RV


def _cut(chances_RV: Tensor, draws: Sequence[Draw]) -> Tensor:
    """The same with 0 for the improbable tokens that each row leaves out."""
    vocab = chances_RV.shape[-1]
    column = {"dtype": torch.float32, "device": chances_RV.device}
    top_k = torch.tensor([draw.top_k or vocab for draw in draws], **column).unsqueeze(1)
    top_p = torch.tensor([draw.top_p for draw in draws], **column).unsqueeze(1)
    min_p = torch.tensor([draw.min_p for draw in draws], **column).unsqueeze(1)
    sorted_RV, order = chances_RV.sort(dim=-1, descending=True, stable=True)
    before = sorted_RV.cumsum(dim=-1) - sorted_RV  # mass of the more probable tokens
    rank = torch.arange(vocab, device=chances_RV.device)
    dropped = (rank >= top_k) | ((before >= top_p) & (top_p < 1)) | (sorted_RV < min_p * sorted_RV[:, :1])
    dropped[:, 0] = False
    return chances_RV.masked_fill(dropped.scatter(-1, order, dropped), 0)


def _race(chances_RV: Tensor, keys_R2: Tensor) -> Tensor:
    """Draw a token [R] from each row: every token runs for a time that is exponentially distributed, at a rate of its
    chance, and the first one wins (the Gumbel-max trick, arXiv 2110.01515, without its second logarithm).

    Sums in another order, as another batch or a prompt computed anew make them, change chances in their last bits. Here
    that can change the winner only if the second arrives within those bits, as with the greedy choice. A number looked
    up in the cumulative distribution is sensitive at the border of every token, and to the order of near-equal ones.
    """
    vocab = chances_RV.shape[-1]
    # On a CPU a piece should stay in a core's cache from one operation to the next.
    at_once = max(1, (1 << 18 if keys_R2.device.type == "cpu" else 1 << 25) // vocab)
    winners = []
    for first in range(0, len(keys_R2), at_once):
        bits = _bits(keys_R2[first : first + at_once], vocab)
        uniform = bits.float().mul_(2.0**-32).add_(0.5).clamp_(2.0**-33, 1 - 2.0**-24)
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


def _signed(bits: int) -> int:
    """The int32 of the same 32 bits."""
    return bits - (1 << 32) if bits >> 31 else bits
