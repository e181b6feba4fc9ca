"""Paged attention, slow and obvious: token by token, straight from the definition. The oracle of the fast backends."""

import torch
from torch import Tensor

from .protocol import Capabilities, GroupBatch, LayerParams


class ReferenceBackend:
    """Loops over rows and queries, reads one token of one page at a time, computes in float64."""

    name = "reference"
    capabilities = Capabilities(
        devices=("cpu", "cuda"), dtypes=(torch.float32, torch.float64, torch.bfloat16, torch.float16)
    )

    def prepare(self, batch: GroupBatch, device: torch.device) -> GroupBatch:
        return batch

    def write(self, kv_view: Tensor, k_TKD: Tensor, v_TKD: Tensor, meta: GroupBatch) -> None:
        for t, (row, position) in enumerate(_queries(meta)):
            kv_view[_place(meta, row, position)] = torch.cat([k_TKD[t], v_TKD[t]], dim=-1)

    def attend(self, q_THD: Tensor, kv_view: Tensor, params: LayerParams, meta: GroupBatch, out_THD: Tensor) -> None:
        key_dim = q_THD.shape[-1]
        for t, (row, position) in enumerate(_queries(meta)):
            first = 0 if meta.window_tokens is None else max(0, position - meta.window_tokens + 1)
            kv_NKE = torch.stack([kv_view[_place(meta, row, key)] for key in range(first, position + 1)]).double()
            out_THD[t] = attend_one(q_THD[t].double(), kv_NKE[..., :key_dim], kv_NKE[..., key_dim:], params)


def attend_one(q_HD: Tensor, k_NKD: Tensor, v_NKD: Tensor, params: LayerParams) -> Tensor:
    """One query over the N keys it sees. Returns [H, Dv]."""
    queries_per_kv_head = q_HD.shape[0] // k_NKD.shape[1]
    k_NHD = k_NKD.repeat_interleave(queries_per_kv_head, dim=1)
    v_NHD = v_NKD.repeat_interleave(queries_per_kv_head, dim=1)
    scores_HN = torch.einsum("hd,nhd->hn", q_HD, k_NHD) * params.scale
    if params.softcap is not None:
        scores_HN = params.softcap * torch.tanh(scores_HN / params.softcap)
    if params.sinks is not None:
        scores_HN = torch.cat([scores_HN, params.sinks.to(scores_HN).unsqueeze(1)], dim=1)
    weights_HN = torch.softmax(scores_HN, dim=-1)[:, : k_NKD.shape[0]]  # what the sink takes goes nowhere
    return torch.einsum("hn,nhd->hd", weights_HN, v_NHD)


def _queries(batch: GroupBatch):
    """(row, position) of each packed token."""
    for row, (count, length) in enumerate(zip(batch.query_lens.tolist(), batch.kv_lens.tolist(), strict=True)):
        for position in range(length - count, length):
            yield row, position


def _place(batch: GroupBatch, row: int, position: int) -> tuple[int, int]:
    """(page, offset) of a token."""
    return int(batch.block_table[row, position // batch.block_tokens]), position % batch.block_tokens
