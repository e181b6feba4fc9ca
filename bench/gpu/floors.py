"""What a step of an engine has to read, and a prompt has to multiply, at least."""

from collections.abc import Sequence
from typing import Any, Protocol

from .device import Bench


class Loaded(Protocol):
    """What is asked of a session: the model's config.json, its module, and workers that know its facts."""

    config: dict[str, Any]
    workers: Any

    @property
    def module(self) -> Any: ...


def step_floor_us(session: Loaded, lengths: Sequence[int], bench: Bench) -> float | None:
    """Of reading all weights that a step needs, and what each row keeps."""
    return bench.floor_us(weight_bytes(session, len(lengths)) + kept_bytes(session, lengths))


def kept_bytes(session: Loaded, lengths: Sequence[int]) -> int:
    """Keys and values that a step reads, states that it reads and writes."""
    kept = 0
    for layer in session.workers.facts.layers:
        if layer.reach.keeps_tokens:
            kept += sum(length - layer.reach.oldest_needed(length) for length in lengths) * layer.token_bytes
        else:
            kept += 2 * layer.state_bytes * len(lengths)
    return kept


def expert_share(config: dict[str, Any], tokens: int) -> float:
    """Of all experts, that so many tokens choose at random."""
    experts, chosen = config.get("num_local_experts", 0), config.get("num_experts_per_tok", 0)
    return 1 - (1 - chosen / experts) ** tokens if experts else 1.0


def weight_bytes(session: Loaded, tokens: int) -> float:
    """Of the parameters that so many tokens read. A table of embeddings is not read as a whole, unless it is the last
    product's, too. Of experts, as many as so many tokens choose at random."""
    module, share = session.module, expert_share(session.config, tokens)
    embeddings = module.get_input_embeddings().weight
    head = module.get_output_embeddings().weight
    total = 0.0
    for name, parameter in module.named_parameters():
        if parameter is embeddings and parameter is not head:
            continue
        size = parameter.numel() * parameter.element_size()
        total += size * share if ".experts." in name else size
    return total


def prompt_flops(session: Loaded, length: int) -> float:
    """Two for each parameter that a token is multiplied with, and attention's products. The logits are of one token."""
    config = session.config
    experts, chosen = config.get("num_local_experts", 0), config.get("num_experts_per_tok", 0)
    tables = {id(session.module.get_input_embeddings().weight), id(session.module.get_output_embeddings().weight)}
    flops = 0.0
    for name, parameter in session.module.named_parameters():
        if id(parameter) not in tables:
            share = chosen / experts if ".experts." in name else 1.0
            flops += 2.0 * parameter.numel() * share * length
    group = config["num_attention_heads"] // config["num_key_value_heads"]
    for layer in session.workers.facts.layers:
        if layer.reach.keeps_tokens:
            window = min(layer.reach.max_lookback(length) + 1, length)
            pairs = window * length - window * (window - 1) / 2
            flops += 2.0 * pairs * layer.kv_heads * group * (layer.key_dim + layer.value_dim)
    return flops
