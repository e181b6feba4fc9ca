"""What attention has to do with recorded steps, beside the metadata of its backend: usually nothing."""

from collections.abc import Sequence
from typing import Any

from ...kernels.paged_attention import GroupBatch
from ...kernels.transfer import Transfer


class Recordable:
    """Attention whose steps can be recorded, and need nothing more for that."""

    gathers = False
    """Whether what queries attend to is gathered anew in each step."""

    @property
    def has_frames(self) -> bool:
        """Whether steps can be recorded. Known once the layers' needs are learnt."""
        return not self.gathers

    def frame(self, rows: int, tokens: int) -> Any:
        """What such steps need, in tensors that stay where they are."""
        return None

    def refill(self, frame: Any, batches: Sequence[GroupBatch], transfer: Transfer) -> bool:
        """Have another step put into `frame`, whose rows are those of `batches`. False: it does not fit."""
        return True

    def go_by(self, frame: Any) -> None:
        """The next forward pass is one of a recorded step."""
