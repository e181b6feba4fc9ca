"""What a layer needs of an attention backend, and what a backend offers: compared once, when a backend is chosen."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Needs:
    """What a layer asks of a backend."""

    dtype: torch.dtype
    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    window: bool = False
    chunk: bool = False
    softcap: bool = False
    sinks: bool = False
    latent: bool = False
    slopes: bool = False
    biases: bool = False
    block_tokens: int = 16
    any_bytes: bool = False
    """Pages may hold what layers of another kind left behind: any bytes, NaN among them."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend offers. `head_sizes` are (key, value) pairs, None takes any; tokens of a page are a multiple of
    `page_multiple`; `any_bytes`: what is no live token of a row may be NaN."""

    devices: frozenset[str]
    dtypes: frozenset[torch.dtype]
    head_sizes: frozenset[tuple[int, int]] | None = None
    window: bool = True
    chunk: bool = True
    softcap: bool = True
    sinks: bool = True
    latent: bool = True
    slopes: bool = False
    biases: bool = False
    page_multiple: int = 1
    any_bytes: bool = True
    wide_frames: bool = False
    """A frame for the widest block table costs a step no more than a narrow one."""
    mixed_frames: bool = False
    """Rows of a frame may have any number of queries, as long as all together fit."""
    held_tables: bool = False
    """It takes `GroupBatch.held`: block tables that stay on the device."""
    one_order: bool = True
    """How a row is summed does not depend on the other rows of a step."""
    merge_bytes: int = 0
    """Memory that long rows take beyond what their queries take, at most."""

    def refusal(self, needs: Needs, device: torch.device) -> str | None:
        """Why this layer cannot run here, in words; None if it can."""
        head_size = (needs.key_dim, needs.value_dim)
        checks = (
            (device.type in self.devices, f"runs on {_names(self.devices)}, not on {device.type}"),
            (needs.dtype in self.dtypes, f"computes in {_names(self.dtypes)}, not in {needs.dtype}"),
            (self.head_sizes is None or head_size in self.head_sizes, f"has no kernel for head sizes {head_size}"),
            (needs.heads % needs.kv_heads == 0, f"cannot share {needs.kv_heads} kv heads among {needs.heads} heads"),
            (self.window or not needs.window, "has no sliding window"),
            (self.chunk or not needs.chunk, "has no chunked attention"),
            (self.softcap or not needs.softcap, "has no softcap"),
            (self.sinks or not needs.sinks, "has no attention sinks"),
            (self.latent or not needs.latent, "has no multi-head latent attention"),
            (self.slopes or not needs.slopes, "has no slopes by distance (ALiBi)"),
            (self.biases or not needs.biases, "has no learnt biases by distance"),
            (
                needs.block_tokens % self.page_multiple == 0,
                f"takes pages of a multiple of {self.page_multiple} tokens, not of {needs.block_tokens}",
            ),
            (
                self.any_bytes or not needs.any_bytes,
                "reads past the tokens of a page, where layers of another kind may have left NaN",
            ),
        )
        return "; ".join(reason for passed, reason in checks if not passed) or None


def _names(values: frozenset) -> str:
    return ", ".join(sorted(map(str, values)))
