"""Four ways to lay a model's layers out in memory, and the choice between them.

    layered      m buffers; groups have equal layer counts, the i-th layer of every group living in buffer i. All groups
                 draw from the same block ids. Short groups are padded, and so are narrow layers.
    packed       one buffer; a block holds all layers of its group, so blocks of groups differ in size. Bytes move
                 between groups in large pages that hold a whole number of blocks of each.
    partitioned  a fixed share of the memory for each group, split for requests of the expected length.
    uniform      the hybrid manager switched off: every layer keeps every token.

`auto` takes the one with the fewest expected bytes per request: the memory divided by the requests it holds, for
requests of half, once and twice the expected length and of the greatest one.

    layered, 2 full and 4 sliding layers                        packed

                group 0      group 1      group 2                full     [L2 L5][L2 L5]|
    buffer 0    full L2      sliding L0   sliding L3             sliding  [L0 L1 L3 L4] |
    buffer 1    full L5      sliding L1   sliding L4                      large page    | large page ...
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from ..errors import InvalidSetting
from .plan import EXPECTED_TOKENS, MAX_BLOCKS, Arena, Group, MemoryPlan, Place, PlanSettings, StrategyCost
from .reach import Full, Keeps, Reach, moves_on
from .spec import PAGE_ALIGNMENT_BYTES, LayerSpec, check_layers

GROUP_PRICE = 0.01
"""What one more group costs, as a share of a request's bytes: every group needs its own tables, slots and metadata at
each step. It makes one group of 20 layers win over 20 groups of one, and never buys real padding."""

LARGE_PAGE_SEARCH = 64
"""The largest large page tried, in blocks of the group with the largest ones."""

MOST_SIZES = 20_000
"""Sizes of large pages tried, smallest first."""

FAR = 1 << 40
"""Farther than any window."""

LARGEST_SHARE = 1 / 32
"""Of the memory, in one large page: with larger ones, too few of them are left to move between groups."""

LEFT_BEHIND = 0.25
"""Of a large page, what the end of a cached window leaves unused. Half of it is blank on average; half of that is used
by other requests of the group."""

MAX_LAYERED_STRETCH = 4
"""Layers whose pages differ by more than this are not laid out in buffers of one page size."""


def plan_memory(layers: Sequence[LayerSpec], settings: PlanSettings, max_tokens: int | None = None) -> MemoryPlan:
    """The memory plan for `layers` within `settings.memory_bytes`.

    max_tokens: the longest a request can become, when that is known.

    Raises `InvalidSetting` when not even one block of every group fits, or the strategy asked for is not possible.
    """
    check_layers(layers)
    owners = [layer for layer in layers if layer.shares is None]
    expected = settings.expected_average_seq_len or min(EXPECTED_TOKENS, max_tokens or EXPECTED_TOKENS)
    # Every strategy makes its plan, or says why it cannot.
    plans: dict[str, MemoryPlan] = {}
    refusals: dict[str, InvalidSetting] = {}
    for name, make in _STRATEGIES.items():
        try:
            plans[name] = replace(make(owners, settings, expected), strategy=name, expected_tokens=expected)
        except InvalidSetting as refusal:
            refusals[name] = refusal
    # What requests of usual lengths would take under each.
    lengths = _typical_lengths(owners, expected, max_tokens)
    costs = {name: _bytes_per_request(plan, lengths) for name, plan in plans.items()}
    why = tuple(
        StrategyCost(name, round(costs[name])) if name in costs else StrategyCost(name, None, str(refusals[name]))
        for name in _STRATEGIES
    )
    # The cheapest one, unless one was asked for. Of two alike, the one with fewer groups: each costs time per step.
    wanted = settings.strategy
    if wanted == "auto":
        if not plans:
            raise refusals["packed"]
        priced = {name: cost * (1 + GROUP_PRICE * len(plans[name].groups)) for name, cost in costs.items()}
        wanted = min(plans, key=lambda name: priced[name])
    if wanted in refusals:
        raise refusals[wanted]
    return replace(plans[wanted], why=why).with_leases(settings.lease_share)


def _typical_lengths(layers: Sequence[LayerSpec], expected: int, max_tokens: int | None) -> list[int]:
    """Half, once and twice the expected length, and the longest: one at which every window has moved on."""
    limits = [layer.reach.max_lookback(FAR) for layer in layers if layer.reach.max_lookback(FAR) < FAR]
    longest = max_tokens or max(2 * expected, 4 * max(limits, default=0))
    return [max(1, min(length, longest)) for length in (expected // 2, expected, expected * 2, longest)]


def _bytes_per_request(plan: MemoryPlan, lengths: Sequence[int]) -> float:
    return sum(plan.memory_bytes / plan.concurrency(length) for length in lengths) / len(lengths)


# -- layered ---------------------------------------------------------------------------------------------------------


def plan_layered(layers: Sequence[LayerSpec], settings: PlanSettings, expected: int) -> MemoryPlan:
    alike = _alike(layers)
    pages = [layer.page_bytes(settings.block_tokens) for layer in layers]
    if max(pages) > MAX_LAYERED_STRETCH * min(pages):
        raise InvalidSetting(
            f"strategy layered needs layers of like page sizes; here they are {min(pages)} to {max(pages)} bytes, and "
            f"the small ones would be padded {max(pages) / min(pages):.0f} times. Use packed.",
            field="strategy",
        )
    size = _layers_per_group(alike, settings, expected)
    page_bytes, block_bytes = max(pages), max(pages) * size
    arena = _arena(settings, block_bytes, sum(-(-len(members) // size) for members in alike.values()), settings)
    groups = tuple(
        _group(key, members[start : start + size], settings, page_bytes, block_bytes, _one_buffer_each)
        for key, members in alike.items()
        for start in range(0, len(members), size)
    )
    return _plan(groups, (arena,), (arena.num_pages * page_bytes,) * size, expected)


def _layers_per_group(alike: "_Alike", settings: PlanSettings, expected: int) -> int:
    """Layers per group that make a request of the expected length cheapest, padding and group price included."""
    blocks = {key: _blocks(key[0], settings, expected) for key in alike}
    exact = sum(len(members) * blocks[key] for key, members in alike.items())

    def cost(size: int) -> float:
        groups = {key: -(-len(members) // size) for key, members in alike.items()}
        return sum(n * size * blocks[key] for key, n in groups.items()) / exact + GROUP_PRICE * sum(groups.values())

    return min(range(max(map(len, alike.values())), 0, -1), key=cost)


# -- packed ----------------------------------------------------------------------------------------------------------


def plan_packed(layers: Sequence[LayerSpec], settings: PlanSettings, expected: int) -> MemoryPlan:
    # One size of large page for all groups, and how many blocks of each it holds.
    alike = _alike(layers)
    contents = [_content(members, settings) for members in alike.values()]
    blocks = [_blocks(key[0], settings, expected) for key in alike]
    moving = [moves_on(key[0]) for key in alike]
    large_bytes, counts = _large_page(contents, blocks, moving, settings.memory_bytes)
    # All groups share one arena, so any large page can move between them.
    arena = _arena(settings, large_bytes, len(alike), settings)
    groups = tuple(
        replace(
            _group(key, members, settings, large_bytes // count, large_bytes // count, _one_after_the_other),
            pages_per_large=count,
        )
        for (key, members), count in zip(alike.items(), counts, strict=True)
    )
    plan = _plan(groups, (arena,), (arena.num_pages * large_bytes,), expected)
    # Padding is told.
    exact = math.lcm(*contents)
    if large_bytes == exact or len(contents) == 1:
        return plan
    return replace(
        plan,
        notes=(
            f"a large page without padding would take {exact} bytes (the least common multiple of blocks of "
            f"{', '.join(map(str, contents))} bytes), out of proportion to a memory of {settings.memory_bytes} bytes; "
            f"large pages of {large_bytes} bytes were chosen instead, padded by {plan.padding_fraction:.2%}.",
        ),
    )


def _large_page(
    contents: Sequence[int], blocks: Sequence[int], moving: Sequence[bool], memory_bytes: int
) -> tuple[int, tuple[int, ...]]:
    """Bytes of a large page, and how many blocks of each group it holds.

    Weighed are a request's bytes, padding included, and what large pages cost as such: one of them is the null page,
    in each group one is partly filled, and a window that moves on leaves part of one behind for every request.
    """
    # Sizes worth trying: multiples of a block of some group, from the widest block up.
    widest = max(contents)
    most = max(widest, int(memory_bytes * LARGEST_SHARE))
    sizes = {
        multiple * content
        for content in contents
        for multiple in range(-(-widest // content), -(-widest // content) * LARGE_PAGE_SEARCH + 1)
        if multiple * content <= most or content == widest == multiple * content
    }
    best: tuple[float, int, tuple[int, ...]] | None = None
    for size in sorted(sizes)[:MOST_SIZES]:
        counts = tuple(size // content for content in contents)
        unit = PAGE_ALIGNMENT_BYTES * math.lcm(*counts)
        filled = max(count * content for count, content in zip(counts, contents, strict=True))
        large_bytes = -(-filled // unit) * unit
        # What a request takes of them, with what its windows leave behind.
        request_bytes = sum(
            (n + (count - 1) * LEFT_BEHIND * moves) * large_bytes / count
            for n, count, moves in zip(blocks, counts, moving, strict=True)
        )
        cost = request_bytes * (1 + (1 + len(contents)) * large_bytes / memory_bytes)
        if best is None or cost < best[0]:
            best = cost, large_bytes, counts
    assert best is not None
    return best[1], best[2]


# -- partitioned -----------------------------------------------------------------------------------------------------


def plan_partitioned(layers: Sequence[LayerSpec], settings: PlanSettings, expected: int) -> MemoryPlan:
    alike = _alike(layers)
    if settings.expected_average_seq_len is None:
        expected = balanced_length(layers, expected)
    contents = [_content(members, settings) for members in alike.values()]
    wanted = [_blocks(key[0], settings, expected) * content for key, content in zip(alike, contents, strict=True)]
    groups, arenas, buffers = [], [], []
    for n, ((key, members), content) in enumerate(zip(alike.items(), contents, strict=True)):
        share = settings.memory_bytes * wanted[n] // sum(wanted)
        arena = _arena(replace(settings, memory_bytes=max(1, share)), content, 1, settings)
        group = _group(key, members, settings, content, content, _one_after_the_other)
        groups.append(replace(group, arena=n, places=tuple(Place(n, place.offset_bytes) for place in group.places)))
        arenas.append(arena)
        buffers.append(arena.num_pages * content)
    return _plan(tuple(groups), tuple(arenas), tuple(buffers), expected)


def balanced_length(layers: Sequence[LayerSpec], longest: int) -> int:
    """The length at which layers without a limit hold as many bytes as those with one: the model's own ratio."""
    unlimited = sum(layer.token_bytes for layer in layers if layer.reach.max_lookback(longest) == longest)
    if unlimited == 0:
        return longest
    limited = sum(
        layer.state_bytes
        if layer.reach.keeps is Keeps.STATE
        else layer.token_bytes * (layer.reach.max_lookback(longest) + 1)
        for layer in layers
        if layer.reach.max_lookback(longest) < longest
    )
    return min(longest, max(1, limited // unlimited)) if limited else longest


# -- uniform ---------------------------------------------------------------------------------------------------------


def plan_uniform(layers: Sequence[LayerSpec], settings: PlanSettings, expected: int) -> MemoryPlan:
    """Every layer keeps every token. Computation still looks through windows."""
    unlimited = [
        replace(layer, reach=Full()) if layer.reach.keeps is Keeps.TOKENS else layer
        for layer in layers
        if layer.token_bytes or layer.reach.keeps is Keeps.STATE
    ]
    merged: dict[tuple[int, Keeps], LayerSpec] = {}
    for layer in unlimited:  # compressed attention: a raw window and its entries become one layer
        key = (layer.index, layer.reach.keeps)
        if key in merged and layer.reach.keeps is Keeps.TOKENS:
            layer = replace(merged[key], extra_token_bytes=merged[key].extra_token_bytes + layer.token_bytes)
        elif key in merged:
            layer = replace(layer, state=merged[key].state + layer.state)
        merged[key] = layer
    plan = plan_packed(list(merged.values()), settings, expected)
    looks = {(layer.index, layer.reach.keeps): layer.reach for layer in layers}
    groups = [
        group
        if group.reach.keeps is not Keeps.TOKENS
        else replace(group, masks=tuple(looks.get((n, Keeps.TOKENS), group.reach) for n in group.layers))
        for group in plan.groups
    ]
    return replace(plan, groups=tuple(groups))


_Maker = Callable[[Sequence[LayerSpec], PlanSettings, int], MemoryPlan]
_STRATEGIES: dict[str, _Maker] = {
    "packed": plan_packed,
    "layered": plan_layered,
    "partitioned": plan_partitioned,
    "uniform": plan_uniform,
}

# -- what they share -------------------------------------------------------------------------------------------------

_Key = tuple[Reach, bool]  # and whether it is a drafter's
_Alike = dict[_Key, list[LayerSpec]]


def _alike(layers: Sequence[LayerSpec]) -> _Alike:
    """Layers that need the same tokens, in the order of the model."""
    found: _Alike = {}
    for layer in layers:
        found.setdefault((layer.reach, layer.is_draft), []).append(layer)
    return found


def _content(layers: Sequence[LayerSpec], settings: PlanSettings) -> int:
    return sum(layer.page_bytes(settings.block_tokens) for layer in layers)


def _blocks(reach: Reach, settings: PlanSettings, length: int) -> int:
    return Group(reach, (), settings.block_tokens, encoder_tokens=settings.encoder_tokens).blocks_spanning(length, 1)


def _one_buffer_each(layers: Sequence[LayerSpec], settings: PlanSettings) -> tuple[Place, ...]:
    return tuple(Place(n, 0) for n in range(len(layers)))


def _one_after_the_other(layers: Sequence[LayerSpec], settings: PlanSettings) -> tuple[Place, ...]:
    places, offset = [], 0
    for layer in layers:
        places.append(Place(0, offset))
        offset += layer.page_bytes(settings.block_tokens)
    return tuple(places)


def _group(
    key: _Key,
    layers: Sequence[LayerSpec],
    settings: PlanSettings,
    page_bytes: int,
    block_bytes: int,
    place: Callable[[Sequence[LayerSpec], PlanSettings], tuple[Place, ...]],
) -> Group:
    return Group(
        reach=key[0],
        layers=tuple(layer.index for layer in layers),
        block_tokens=settings.block_tokens,
        page_bytes=page_bytes,
        block_bytes=block_bytes,
        content_bytes=sum(layer.block_bytes(settings.block_tokens) for layer in layers),
        places=place(layers, settings),
        is_draft=key[1],
        encoder_tokens=settings.encoder_tokens,
    )


def _arena(settings: PlanSettings, page_bytes: int, groups: int, asked: PlanSettings) -> Arena:
    """As many large pages as fit. Raises `InvalidSetting` when that is not one for each group and the null page."""
    num_pages = settings.memory_bytes // page_bytes
    if num_pages < 1 + groups:
        raise InvalidSetting(
            f"kv_cache_memory of {settings.memory_bytes} bytes holds {num_pages} blocks of {page_bytes} bytes; "
            f"at least {1 + groups} are needed: one for each of {groups} groups and the null block. "
            "Give more memory or a smaller block_size.",
            field="kv_cache_memory",
            asked=asked.memory_bytes,
            needed=(1 + groups) * page_bytes,
        )
    return Arena(num_pages, page_bytes)


def _plan(groups: tuple[Group, ...], arenas: tuple[Arena, ...], buffers: tuple[int, ...], expected: int) -> MemoryPlan:
    held = sum(group.blocks_between(expected) * group.block_bytes for group in groups)
    used = sum(group.blocks_between(expected) * group.content_bytes for group in groups)
    plan = MemoryPlan("", groups, arenas, buffers, 1 - used / held if held else 0.0, expected)
    most = max(plan.blocks_of(group) for group in groups)
    if most > MAX_BLOCKS:
        raise InvalidSetting(
            f"kv_cache_memory of {sum(buffers)} bytes makes {most} blocks, more than the {MAX_BLOCKS} that block "
            "tables can name. Use a larger block_size.",
            field="block_size",
        )
    return plan
