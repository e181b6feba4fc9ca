"""What a layer needs of an attention backend."""

import torch

from ...kernels.paged_attention import LayerParams, Needs
from ...kvcache.spec import LayerSpec


def needs_of(
    layer: LayerSpec, heads: int, params: LayerParams, dtype: torch.dtype, block_tokens: int, any_bytes: bool
) -> Needs:
    """heads: of queries, on this rank
    any_bytes: pages may hold what layers of another kind left behind"""
    return Needs(
        dtype=dtype,
        heads=heads,
        kv_heads=layer.kv_heads,
        key_dim=layer.key_dim,
        value_dim=params.latent_values or layer.value_dim,
        latent=params.latent_values is not None,
        window=layer.reach.window_tokens is not None,
        chunk=layer.reach.chunk_tokens is not None,
        softcap=params.softcap is not None,
        sinks=params.sinks is not None,
        slopes=params.slopes is not None,
        biases=params.biases is not None,
        block_tokens=block_tokens,
        any_bytes=any_bytes,
    )
