"""Tokens drawn in C++ are those of plain torch, whatever is asked; they depend on their row alone."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from intarsia.kernels.sampling import Changes, Draw, NativeSampling, TorchSampling
from intarsia.tests.kernels.sampling.scenes import assert_as_told, some_changes, some_draw, some_logits

pytestmark = pytest.mark.skipif(NativeSampling.lacks() is not None, reason="there is no C++ compiler")

NATIVE, TORCH = NativeSampling(), TorchSampling()
VOCABULARIES = [1, 2, 17, 63, 64, 65, 1000, 4097, 16_387, 40_000]


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("seed", range(12))
def test_random_draws_are_those_of_torch_and_of_each_row_alone(seed: int):
    print(f"seed {seed}")
    choose = random.Random(seed)
    for _ in range(20):
        vocab, rows = choose.choice(VOCABULARIES), choose.choice([1, 2, 5])
        logits = some_logits(choose, rows, vocab)
        draws = [some_draw(choose) for _ in range(rows)]
        changes = [some_changes(choose, vocab) for _ in range(rows)]
        positions = [choose.randrange(9999) for _ in range(rows)]
        tokens, tell = NATIVE.draw(logits, draws, positions, changes)
        about = tell()
        wanted, tell_wanted = TORCH.draw(logits, draws, positions, changes)
        about_wanted = tell_wanted()
        assert tokens.tolist() == wanted.tolist(), (draws, logits.dtype, vocab)
        assert_as_told(about, about_wanted)
        alone = [
            NATIVE.draw(logits[n : n + 1], draws[n : n + 1], positions[n : n + 1], changes[n : n + 1])[0].item()
            for n in range(rows)
        ]
        assert alone == tokens.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 70])
def test_results_do_not_depend_on_threads(dtype: torch.dtype, rows: int):
    choose = random.Random(rows)
    logits = torch.randn(rows, 50_003, generator=torch.Generator().manual_seed(rows)).to(dtype)
    for draw in (Draw(), Draw(1.0), Draw(1.0, 50), Draw(1.0, 0, 0.9), Draw(1.0, 0, 1.0, 0.1), Draw(1.0, 30, 0.9)):
        draws = [draw._replace(seed=row, logprobs=2 if row % 9 == 0 else -1) for row in range(rows)]
        changes = [some_changes(choose, 50_003) for _ in range(rows)]
        results = []
        for count in (1, 2):
            with threads(count):
                tokens, tell = NATIVE.draw(logits, draws, range(rows), changes)
                about = tell()
                results.append((tokens.tolist(), about, NATIVE.logprobs(logits, tokens, 3)))
        assert results[0] == results[1]


@pytest.mark.parametrize("top_k, top_p", [(7, 1.0), (500, 1.0), (3000, 1.0), (0, 0.3), (0, 0.95), (2000, 0.5)])
def test_no_token_is_ever_drawn_that_the_sort_leaves_out(top_k: int, top_p: float):
    """Many equal chances across the border; of one logit in eight thousand, every token is drawn that is kept."""
    generator = torch.Generator().manual_seed(top_k)
    logits = (torch.randn(1, 8001, generator=generator) * 0.4).bfloat16()
    chances, order = torch.softmax(logits.float(), -1)[0].sort(descending=True, stable=True)
    is_kept = chances.double().cumsum(0) - chances < top_p if top_p < 1 else torch.ones(8001, dtype=torch.bool)
    is_kept[top_k or 8001 :] = False
    kept = set(order[is_kept].tolist())
    biases = [(int(token), 0.0) for token in order[:3]]
    draws = [Draw(1.0, top_k, top_p, seed=seed) for seed in range(4000)]
    tokens = NATIVE.draw(logits.expand(4000, -1), draws, range(4000), [Changes(biases=biases)] * 4000)[0]
    assert set(tokens.tolist()) <= kept
    if len(kept) < 10:
        assert set(tokens.tolist()) == kept
