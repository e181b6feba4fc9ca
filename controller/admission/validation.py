"""Requests that can never be served are refused here, before anything is done for them.

Pure functions of a request, of what the engine is (`EngineInfo`) and of its memory plan. A request that could be
served, but not in time, is the business of `overload.py`.
"""

from collections.abc import Sequence
from itertools import chain

from ...errors import ContextTooLong, InvalidRequest, RequestTooLarge
from ...kvcache.plan import MemoryPlan
from ...proto.request import Image, SamplingParams
from ...proto.status import EngineInfo
from ..images import Gallery, lay_out


def check(
    tokens: Sequence[int], prompt_tokens: int, sampling: SamplingParams, info: EngineInfo, plan: MemoryPlan
) -> int:
    """Returns the length, in tokens, at which the sequence ends at the latest.

    tokens: the prompt, and what is known of an answer that began elsewhere
    prompt_tokens: how many of them are the prompt

    Raises `InvalidRequest` or `RequestTooLarge`, naming the field, if the request can never be served.
    """
    check_tokens(tokens, info)
    _check_sampling(sampling, info)
    sampling.check_all_logprobs(prompt_tokens, info.vocab_size)
    # An answer that began elsewhere must not be finished yet.
    total_tokens = min(prompt_tokens + sampling.max_tokens, info.max_model_len)
    if not 0 < prompt_tokens <= len(tokens) < max(total_tokens, prompt_tokens + 1):
        raise InvalidRequest(
            f"an answer to a prompt of {prompt_tokens} tokens cannot go on from {len(tokens)} of {total_tokens} tokens",
            field="prompt",
        )
    # It must fit alone in an empty pool, or it would wait for ever.
    if not plan.fits(total_tokens):
        raise RequestTooLarge(
            f"{prompt_tokens} prompt tokens + {sampling.max_tokens} new ones need "
            f"{plan.blocks_alone(total_tokens)} blocks; the whole pool has {info.num_blocks}"
            f"{f', of which leases may hold {plan.leasable_blocks}' if plan.leasable_blocks else ''}. "
            "Ask for fewer tokens, or start the engine with a larger kv_cache_memory.",
            field="max_tokens",
            asked=plan.blocks_alone(total_tokens),
            limit=info.num_blocks - plan.leasable_blocks,
        )
    return total_tokens


def check_tokens(tokens: Sequence[int], info: EngineInfo) -> None:
    """Raises `InvalidRequest` for what is no prompt of the model."""
    # There is at least one token, and room for one more.
    if len(tokens) == 0:
        raise InvalidRequest("the prompt is empty; it needs at least 1 token", field="prompt")
    if len(tokens) >= info.max_model_len:
        what, limit = f"it has {len(tokens)} tokens", info.max_model_len - 1
        raise ContextTooLong.of(what, info.max_model_len, field="prompt", asked=len(tokens), limit=limit)
    # Each of them is a whole number (a bool is none) of the vocabulary.
    if set(map(type, tokens)) != {int}:
        position, token = next((n, t) for n, t in enumerate(tokens) if type(t) is not int)
        raise InvalidRequest(f"prompt token {token!r} at position {position} is no whole number", field="prompt")
    if min(tokens) < 0 or max(tokens) >= info.vocab_size:
        position, token = next((n, t) for n, t in enumerate(tokens) if not 0 <= t < info.vocab_size)
        raise InvalidRequest(
            f"prompt token {token} at position {position} is not in the vocabulary of {info.vocab_size} tokens",
            field="prompt",
            asked=token,
            limit=info.vocab_size - 1,
        )


def _check_sampling(sampling: SamplingParams, info: EngineInfo) -> None:
    """What depends on the model; `SamplingParams` has checked the rest."""
    if sampling.form is not None and not info.eos_token_ids:
        kind, _ = sampling.form
        raise InvalidRequest(f"{info.model} has no end token, so an answer of a given form could not end", field=kind)
    for field, named in (("logit_bias", dict(sampling.biases)), ("bad_token_ids", chain(*sampling.bad_token_ids))):
        strange = next((token for token in named if token >= info.vocab_size), None)
        if strange is not None:
            raise InvalidRequest(
                f"{field} names token {strange}, which is not in the vocabulary of {info.vocab_size} tokens",
                field=field,
                asked=strange,
                limit=info.vocab_size - 1,
            )


def lay_out_images(
    prompt: Sequence[int], images: Sequence[Image], info: EngineInfo, plan: MemoryPlan
) -> Gallery | None:
    """Where the images of a request lie; None: it has none. Raises `InvalidRequest` if they do not match the prompt."""
    image_token = info.image_token_id
    if not images and (image_token is None or image_token not in prompt):
        return None
    # The model takes images, and not fewer than these.
    if image_token is None:
        raise InvalidRequest(f"{info.model} takes no images, and the request has {len(images)}", field="images")
    if len(images) > info.max_images_per_request:
        raise InvalidRequest(
            f"the request has {len(images)} images; max_images_per_request is {info.max_images_per_request}. Send "
            "fewer, or start the engine with a larger one.",
            field="images",
            asked=len(images),
            limit=info.max_images_per_request,
        )
    # Each image has its place in the prompt.
    places = prompt.count(image_token)
    if places != len(images):
        raise InvalidRequest(
            f"the prompt has {places} image tokens (id {image_token}) and the request {len(images)} "
            "images. Put one image token where each image belongs.",
            field="images",
            asked=len(images),
            limit=places,
        )
    return lay_out(prompt, image_token, images, plan.block_tokens)
