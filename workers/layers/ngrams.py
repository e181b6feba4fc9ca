"""Features of a token and those just before it, from a large table: Qwen4-Exp.

Suffixes: T packed tokens    S residual streams    D hidden size    C = S * D    G tokens of the longest n-gram
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import UnsupportedModel
from ...kernels.state import CONVOLUTION, SILU_CONVOLUTION, Recurrence
from ..tensor_parallel import Section, TensorParallel
from .states import Mixer, PagedStates

CONVOLVED, IDS = 2, 3
"""Places of its tensors in the state of a layer, behind those of the layer's delta net."""

MOST_IDS = 1 << 24
"""The state keeps ids of tokens as float32, which has each number up to here."""


class NGramFeatures(Mixer):
    """What such a layer adds to each residual stream: values of the n-grams that end with a token, gated by the stream,
    and a convolution of them with gaps, in which every G-th token before counts.

    All ranks compute all of it; of the table each has some rows. The state keeps what the convolution reads, and the
    ids of the last G - 1 tokens, less the id that ends texts: before a text's first token there is nothing but that.
    """

    def __init__(self, module: Any, states: PagedStates, parallel: TensorParallel):
        super().__init__(module, states, parallel)
        table = module.ple_embedding
        if table.unigram_vocab_size > MOST_IDS:
            raise UnsupportedModel(
                f"layer {self._layer} keeps ids of tokens, of which there are {table.unigram_vocab_size}; up to "
                f"{MOST_IDS} are known to be kept exactly",
                field="model",
            )
        self._table = table
        # Weights of the tokens between those that count are zero.
        weight_C1W = module.conv1d.weight
        gap, kernel = table.ngram_size, weight_C1W.shape[2]
        self._weight = weight_C1W.new_zeros(len(weight_C1W), (kernel - 1) * gap + 1)
        self._weight[:, ::gap] = weight_C1W[:, 0]
        self._bias = weight_C1W.new_zeros(len(weight_C1W))
        # A channel for each earlier token: the first of them gives the token before, the next the one before that.
        earlier = table.ngram_size - 1
        self._shifts = torch.zeros(earlier, earlier + 1, device=weight_C1W.device)
        self._shifts[range(earlier), range(earlier - 1, -1, -1)] = 1.0
        self._nothing = torch.zeros(earlier, device=weight_C1W.device)

    @staticmethod
    def sections(module: Any, ranks: int) -> dict[str, Sequence[Section]]:
        return {}

    def __call__(self, hidden_states: Tensor, input_ids: Tensor, *_: Any, **__: Any) -> Tensor:
        module = self._module
        streams = (module.hc_count, module.hidden_size)
        features = self._features(input_ids[0])
        key_TSD = module.norm_key(module.key_proj(features)).unflatten(-1, streams)
        query_TSD = module.norm_query(hidden_states[0]).unflatten(-1, streams)
        gate = (key_TSD * query_TSD).sum(dim=-1, keepdim=True) / math.sqrt(module.hidden_size)
        gate = gate.abs().clamp_min(1e-6).sqrt() * gate.sign()
        value_TC = (torch.sigmoid(gate) * module.value_proj(features).unsqueeze(-2)).flatten(-2)
        normed_TC = module.norm_conv(value_TC)
        return (value_TC + self._scan(CONVOLVED, SILU_CONVOLUTION, self._weight, self._bias, normed_TC)).unsqueeze(0)

    def _features(self, ids_T: Tensor) -> Tensor:
        """[T,..]: of the n-grams that end with each token, side by side."""
        table, seen = self._table, self._before(ids_T)
        mixed_T, rows = ids_T * table.layer_multipliers[0], []
        for length, id_T in enumerate(seen, start=2):
            mixed_T = mixed_T ^ (id_T * table.layer_multipliers[length - 1])
            own = slice((length - 2) * table.heads_per_ngram, (length - 1) * table.heads_per_ngram)
            sizes, offsets = table.ngram_heads_vocab_sizes[own], table.ngram_heads_offsets[own]
            rows.append(torch.remainder(mixed_T.unsqueeze(-1), sizes) + offsets)
        return table.ngram_embedding(torch.cat(rows, dim=-1)).flatten(-2)

    def _before(self, ids_T: Tensor) -> list[Tensor]:
        """Ids of the token before each, the one before that, and so on. Beyond the end of a text there is nothing else:
        the id that ends it stands for all that came before."""
        end = self._table.eos_token_id
        less_T1 = (ids_T - end).float().unsqueeze(-1)
        earlier = len(self._nothing)
        before_TG = self._scan(IDS, CONVOLUTION, self._shifts, self._nothing, less_T1.expand(-1, earlier).contiguous())
        has_begun, found = torch.ones_like(ids_T, dtype=torch.bool), []
        for less_T in before_TG.round().long().unbind(-1):
            has_begun = has_begun & (less_T != 0)
            found.append(torch.where(has_begun, less_T + end, end))
        return found

    def _scan(self, which: int, recurrence: Recurrence, weight: Tensor, bias: Tensor, x_TC: Tensor) -> Tensor:
        return self._states.scan(self._layer, which, recurrence, (weight, bias), (x_TC,))
