"""In plain torch: what the fast ones must equal."""

import torch
from torch import Tensor
from torch.nn import functional as F

from .protocol import Mixing, check


def collapse(streams_TNC: Tensor, mixing: Mixing) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Returns [T,C] in the streams' dtype, which goes into a block; and in float32 [T,N], how much of the block's
    output each stream gets, and [T,N,N], how they are mixed: stream n becomes the sum over m of [m,n] times stream m.
    The last two are None where the streams become one for good."""
    check(streams_TNC, mixing)
    streams, eps = streams_TNC.shape[1], mixing.eps
    flat_TD = streams_TNC.flatten(1).float()
    flat_TD = flat_TD * torch.rsqrt(flat_TD.square().mean(-1, keepdim=True) + mixing.norm_eps)
    logits_TM = F.linear(flat_TD, mixing.product_MD)
    # How they become one.
    first, base = logits_TM[:, :streams] * mixing.scale[0], mixing.base_M
    before_TN = torch.sigmoid(first + base[:streams]) + eps
    collapsed_TC = (before_TN.unsqueeze(-1) * streams_TNC).sum(1).to(streams_TNC.dtype)
    if mixing.parts == 1:
        return collapsed_TC, None, None
    # What comes back, and to which.
    second = logits_TM[:, streams : 2 * streams] * mixing.scale[1]
    after_TN = 2 * torch.sigmoid(second + base[streams : 2 * streams])
    third = (logits_TM[:, 2 * streams :] * mixing.scale[2] + base[2 * streams :]).unflatten(1, (streams, streams))
    mixed_TNN = third.softmax(-1) + eps
    mixed_TNN = mixed_TNN / (mixed_TNN.sum(-2, keepdim=True) + eps)
    for _ in range(mixing.rounds - 1):
        mixed_TNN = mixed_TNN / (mixed_TNN.sum(-1, keepdim=True) + eps)
        mixed_TNN = mixed_TNN / (mixed_TNN.sum(-2, keepdim=True) + eps)
    return collapsed_TC, after_TN, mixed_TNN
