"""Random rows of a step, their settings and their changes."""

import random
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from intarsia.kernels.sampling import About, Changes, Draw, Penalties


def some_logits(choose: random.Random, rows: int, vocab: int) -> Tensor:
    generator = torch.Generator().manual_seed(choose.randrange(1 << 30))
    logits = torch.randn(rows, vocab + 3, generator=generator)[:, 1 : vocab + 1] * choose.choice([0.1, 1, 4, 10])
    if choose.random() < 0.1:
        logits = logits.round()  # many are equal
    if choose.random() < 0.2:
        logits[torch.rand(rows, vocab, generator=generator) < 0.3] = float("-inf")
    if choose.random() < 0.05:
        logits[0, choose.randrange(vocab)] = choose.choice([float("nan"), float("inf")])
    return logits.to(choose.choice([torch.float32, torch.bfloat16, torch.float16]))


def some_draw(choose: random.Random) -> Draw:
    return Draw(
        temperature=choose.choice([0, 0.5, 1, 1.5, 1e-9]),
        top_k=choose.choice([0, 0, 1, 2, 50, 300, 5000]),
        top_p=choose.choice([1, 1, 0.9, 0.5, 0.1, 0.999]),
        min_p=choose.choice([0, 0, 0.01, 0.3]),
        seed=choose.randrange(1 << 62),
        logprobs=choose.choice([-1, -1, 0, 3, 2**31 - 1]),
    )


def some_changes(choose: random.Random, vocab: int) -> Changes | None:
    if choose.random() < 0.5:
        return None
    tokens = np.array(sorted({choose.randrange(vocab + 5) for _ in range(choose.choice([0, 1, 10, 200]))}), dtype=int)
    counts = np.array([choose.choice([0, 0, 1, 3]) for _ in tokens], dtype=int)
    weights = choose.choice([1.0, 1.3, 0.5]), choose.choice([0, 0.5]), choose.choice([0, 0.3])
    return Changes(
        Penalties(tokens, counts, *weights) if choose.random() < 0.6 else None,
        [choose.randrange(vocab + 3) for _ in range(choose.choice([0, 2]))],
        [(choose.randrange(vocab), choose.uniform(-9, 9)) for _ in range(choose.choice([0, 3]))],
        [choose.randrange(vocab + 3) for _ in range(choose.choice([0, 2]))],
        choose.choice([None, None, choose.randbytes(vocab // 8 + 1), choose.randbytes(vocab // 16)]),
    )


def assert_as_told(about: Sequence[tuple[int, About]], wanted: Sequence[tuple[int, About]]) -> None:
    """Equal but for the last bits. Of tokens of one chance, any may be told."""
    for (row, found), (other_row, expected) in zip(about, wanted, strict=True):
        assert (row, found.rank, len(found.top)) == (other_row, expected.rank, len(expected.top))
        values, others = ([each.logprob, *(value for _, value in each.top)] for each in (found, expected))
        np.testing.assert_allclose(values, others, rtol=3e-5, atol=5e-5)
