"""Paged attention, slow and obvious: one query at a time. The oracle of every fast backend.

A query's result depends on that query and the keys it sees alone. The same bits come out in any batch and however a
prompt was cut into chunks. Suffixes are explained in `protocol.py`; L counts the keys one query sees.
"""

from typing import ClassVar

import torch
from torch import Tensor

from ..transfer import Transfer
from .biases import sinks_of
from .capabilities import Capabilities
from .protocol import GroupBatch, GroupMeta, LayerParams, values_of


class ReferenceBackend:
    """Every feature, every dtype, no speed. `compute_dtype` may be float64 to judge others."""

    name: ClassVar[str] = "reference"
    by_name_only: ClassVar[bool] = False
    capabilities: ClassVar[Capabilities] = Capabilities(
        devices=frozenset({"cpu", "cuda"}),
        dtypes=frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16}),
        slopes=True,
        biases=True,
    )

    @classmethod
    def lacks(cls) -> str | None:
        return None

    def __init__(self, compute_dtype: torch.dtype = torch.float32):
        self.compute_dtype = compute_dtype

    def prepare(self, batch: GroupBatch, device: torch.device) -> GroupMeta:
        page, offset = (torch.from_numpy(place).to(device) for place in batch.token_places())
        return GroupMeta(page, offset, plan=batch)

    def frame(self, batch: GroupBatch, device: torch.device) -> None:
        return None

    def narrow(self, frame: GroupMeta, rows: int, tokens: int | None = None) -> GroupMeta:
        raise AssertionError("there are no wide frames")

    def refill(self, frame: GroupMeta, batch: GroupBatch, transfer: Transfer) -> bool:
        raise AssertionError("there are no frames")

    def write(self, kv_view: Tensor, k_TKD: Tensor, v_TKD: Tensor, meta: GroupMeta) -> None:
        key_dim = k_TKD.shape[-1]
        for token, (page, offset) in enumerate(zip(meta.token_page.tolist(), meta.token_offset.tolist())):
            kv_view[page, offset, :, :key_dim] = k_TKD[token]
            kv_view[page, offset, :, key_dim:] = v_TKD[token]

    def attend(self, q_THD: Tensor, kv_view: Tensor, params: LayerParams, meta: GroupMeta, out_THD: Tensor) -> None:
        batch: GroupBatch = meta.plan
        token = 0
        for row, (query_len, kv_len) in enumerate(zip(batch.query_lens.tolist(), batch.kv_lens.tolist())):
            for position in range(kv_len - query_len, kv_len):
                seen = range(batch.oldest_visible(position), position + 1) if batch.is_causal else range(kv_len)
                kv_LKC = torch.stack([kv_view[_place(batch, row, key)] for key in seen])
                far_L = position - torch.tensor(seen, device=q_THD.device)
                bias_HL = self._bias(far_L, token, params)
                sinks_H = sinks_of(params.sinks, params.biases, token)
                out_THD[token] = self._one_query(q_THD[token], kv_LKC, bias_HL, sinks_H, params)
                token += 1

    def _bias(self, far_L: Tensor, token: int, params: LayerParams) -> Tensor | None:
        """[H,L], by how far the keys are."""
        if params.slopes is not None:
            return -params.slopes.to(self.compute_dtype)[:, None] * far_L
        if params.biases is None:
            return None
        bias_HE = params.biases.of(token).to(self.compute_dtype)
        extent = bias_HE.shape[1]
        return torch.where(far_L < extent, bias_HE[:, far_L.clamp(max=extent - 1)], 0.0)

    def _one_query(
        self, q_HD: Tensor, kv_LKC: Tensor, bias_HL: Tensor | None, sinks_H: Tensor | None, params: LayerParams
    ) -> Tensor:
        """[H,Dv]: what one query reads from the L keys it sees."""
        heads, key_dim = q_HD.shape
        kv_LHC = kv_LKC.to(self.compute_dtype).repeat_interleave(heads // kv_LKC.shape[1], dim=1)
        keys, values = kv_LHC[..., :key_dim], values_of(kv_LHC, key_dim, params)
        logits_HL = torch.einsum("hd,lhd->hl", q_HD.to(self.compute_dtype), keys) * params.scale
        if params.softcap is not None:
            logits_HL = params.softcap * torch.tanh(logits_HL / params.softcap)
        if bias_HL is not None:
            logits_HL = logits_HL + bias_HL
        if sinks_H is None:
            weights_HL = torch.softmax(logits_HL, dim=-1)
        else:  # the sink takes its share of the weight and gives nothing back
            sink_H1 = sinks_H.to(self.compute_dtype)[:, None]
            weights_HL = torch.softmax(torch.cat((logits_HL, sink_H1), dim=-1), dim=-1)[:, :-1]
        return torch.einsum("hl,lhd->hd", weights_HL, values)


def _place(batch: GroupBatch, row: int, position: int) -> tuple[int, int]:
    """Page and offset in that page of one token."""
    block, offset = divmod(position, batch.block_tokens)
    return int(batch.block_table[row, block]), offset
