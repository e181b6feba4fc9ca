"""A model ready to run packed tokens: a module of transformers, and what its layers remember with."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ...errors import OutOfMemory
from ...kvcache.plan import MemoryPlan
from ...proto.worker import ModelFacts
from ..cpu.order import SumOrder
from ..layers.attention import PagedAttention
from ..layers.cross import CrossAttention
from ..layers.states import PagedStates
from ..memory import is_lack_of_memory
from ..pages import Pages

GIB = 2**30


class LoadedModel:
    """Life: `allocate` pages, then any number of forward passes. `begin_step` of its layers comes before each."""

    def __init__(
        self,
        module: nn.Module,
        attention: PagedAttention,
        states: PagedStates,
        cross: CrossAttention | None,
        facts: ModelFacts,
        device: torch.device,
        is_tested: bool,
        order: SumOrder,
    ):
        """is_tested: of a family that the tests know."""
        self.module = module
        self.attention = attention
        self.states = states
        self.cross = cross
        self.facts = facts
        self.device = device
        self.is_tested = is_tested
        self.order = order
        self.run: Callable[..., Any] = module  # one forward pass, as transformers' modules are called
        # transformers leaves cross layers out unless it sees an encoder's output; ours know theirs.
        self.extra_inputs = {"cross_attention_states": torch.empty(0)} if cross is not None else {}
        self._pages: Pages | None = None

    def compile(self) -> None:
        """Let torch compile what runs from now on. Attention is one opaque operator to it, states it leaves alone."""
        from torch._dynamo import config

        # Around states each layer is compiled by itself, and beyond this many torch would go on uncompiled, silently.
        config.recompile_limit = max(config.recompile_limit, 16 * len(self.facts.layers))
        self.run = torch.compile(self.module, dynamic=True)

    def allocate(self, plan: MemoryPlan, backend: str | None) -> None:
        """Pages as the plan lays them out. backend: by which states are computed; None: the fastest."""
        self._pages = None  # the old pages go before the new ones come
        self.attention.forget_pages()
        self.states.forget_pages()
        if self.cross is not None:
            self.cross.forget_pages()
        try:
            self._pages = Pages(plan, self.facts.layers, getattr(torch, self.facts.dtype), self.device)
        except Exception as error:
            if not is_lack_of_memory(error):
                raise
            raise OutOfMemory(  # which may pass: a process that was lost may still hold its own
                f"{plan.memory_bytes / GIB:.2f} GiB for keys and values (kv_cache_memory) do not fit on {self.device} "
                f"beside weights of {self.facts.weight_bytes / GIB:.2f} GiB. Lower kv_cache_memory.",
                field="kv_cache_memory",
            ) from None
        self.attention.use(self._pages, plan)
        self.states.use(self._pages, backend)
        if self.cross is not None:
            self.cross.use(self._pages, plan, backend)

    @property
    def pages(self) -> Pages:
        assert self._pages is not None, "allocate pages first"
        return self._pages
