"""Tokens drawn by Triton's kernels, which its interpreter runs here: the same as plain torch's, in few launches."""

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from intarsia.kernels.sampling import Changes, Draw, Penalties, TorchSampling, TritonSampling
from intarsia.kernels.sampling import triton as sampling
from intarsia.kernels.toolchain import triton as gpu
from intarsia.kernels.transfer import Arrival
from intarsia.tests.kernels.sampling.scenes import assert_as_told, some_changes, some_draw, some_logits

pytestmark = [
    pytest.mark.skipif(gpu.missing() is not None, reason=str(gpu.missing())),
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),  # differences of infinite logits
]

TORCH = TorchSampling()
MOST_LAUNCHES = 6
VOCABULARIES = [1, 2, 17, 63, 64, 65, 300, 1000, 2049]


def cut(block: int, of_list: int) -> TritonSampling:
    """With blocks so small that little vocabularies have many parts."""
    backend = TritonSampling()
    backend.block_tokens, backend.list_tokens = block, of_list
    return backend


@pytest.mark.parametrize("seed", range(8))
def test_random_draws_are_those_of_torch(seed: int):
    print(f"seed {seed}")
    choose = random.Random(100 + seed)
    for _ in range(3):
        vocab, rows = choose.choice(VOCABULARIES), choose.choice([1, 2, 4])
        backend = cut(choose.choice([256, 2048]), choose.choice([64, 2048]))
        logits = some_logits(choose, rows, vocab)
        draws = [some_draw(choose) for _ in range(rows)]
        changes = [some_changes(choose, vocab) for _ in range(rows)]
        positions = [choose.randrange(9999) for _ in range(rows)]
        tokens, tell = backend.draw(logits, draws, positions, changes)
        about = tell()
        wanted, tell_wanted = TORCH.draw(logits, draws, positions, changes)
        about_wanted = tell_wanted()
        assert tokens.tolist() == wanted.tolist(), (draws, logits.dtype, vocab)
        assert_as_told(about, about_wanted)


CASES = [
    (Draw(), None),
    (Draw(1.0, seed=1), None),
    (Draw(0.7, 40, seed=2), None),
    (Draw(1.0, 0, 0.95, seed=3, logprobs=5), None),
    (
        Draw(2.0, 700, 0.999, 0.001, seed=4),
        Changes(Penalties(np.arange(0, 3000, 7), np.arange(429) % 3, 1.2, 0.1, 0.2)),
    ),
    (Draw(1.0, min_p=0.02, seed=5, logprobs=0), Changes(biases=[(2999, 4.0), (2999, 1.0), (0, 3.0)])),
    (Draw(1.0, 0, 0.5, seed=6), Changes(forbidden=[5], excluded=[2048, 1], allowed=b"\xa5" * 300)),
    (Draw(logprobs=3), Changes(biases=[(1000, 20.0)])),
]


@pytest.mark.parametrize("block", [64, 4096])
def test_a_row_is_drawn_alike_in_one_part_and_in_many(block: int):
    """Of 47 blocks, and one."""
    logits = torch.randn(len(CASES), 3001, generator=torch.Generator().manual_seed(3)) * 3
    draws, changes = zip(*CASES, strict=True)
    tokens, tell = cut(block, 64).draw(logits, draws, range(len(CASES)), changes)
    about = tell()
    wanted, tell_wanted = TORCH.draw(logits, draws, range(len(CASES)), changes)
    about_wanted = tell_wanted()
    assert tokens.tolist() == wanted.tolist()
    assert_as_told(about, about_wanted)


def test_log_probabilities_are_the_same_bits_whatever_the_parts():
    logits = torch.randn(1, 3001, generator=torch.Generator().manual_seed(3)) * 3
    assert len({tuple(cut(block, 64).logprobs(logits, torch.tensor([7]), 5)) for block in (16, 128, 4096)}) == 1


def test_many_rows_are_told_about_in_turns(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sampling, "LIST_BYTES", 3 * 8 * 100)  # three rows at once
    logits, tokens = torch.randn(7, 100, generator=torch.Generator().manual_seed(3)), torch.arange(7)
    for count in (0, 2, 90):
        told, wanted = (list(enumerate(each.logprobs(logits, tokens, count))) for each in (TritonSampling(), TORCH))
        assert_as_told(told, wanted)
    assert TritonSampling().logprobs(logits[:0], tokens[:0], 2) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_logits_may_lie_anywhere_and_stay_as_they_are(dtype: torch.dtype):
    numbers = torch.randn(200, 12, generator=torch.Generator().manual_seed(3)).to(dtype)
    before = numbers.clone()
    views = {
        "columns": numbers.T,
        "every other row": numbers.T.contiguous()[::2],
        "one row": numbers.T[:1].expand(3, -1),
    }
    for name, logits in views.items():
        draws = [Draw(1.0, (0, 5)[row % 2], seed=row, logprobs=1) for row in range(len(logits))]
        changes = [Changes(biases=[(3, 2.0)]) if row % 3 == 0 else None for row in range(len(logits))]
        tokens, tell = TritonSampling().draw(logits, draws, range(len(draws)), changes)
        about = tell()
        wanted, tell_wanted = TORCH.draw(logits, draws, range(len(draws)), changes)
        about_wanted = tell_wanted()
        assert tokens.tolist() == wanted.tolist(), name
        assert_as_told(about, about_wanted)
    assert torch.equal(numbers, before)


def test_rows_may_lie_further_apart_than_an_int32_counts():
    """In memory of which next to nothing is ever touched."""
    far = 2**31 + 16
    logits = torch.empty(far + 64, dtype=torch.bfloat16).as_strided((2, 50), (far, 1))
    logits.copy_(torch.randn(2, 50, generator=torch.Generator().manual_seed(3)))
    draws, changes = [Draw(1.0, 5, seed=3, logprobs=2)] * 2, [None, Changes(biases=[(3, 2.0)])]
    for some in (changes, None):
        tokens, tell = TritonSampling().draw(logits, draws, range(2), some)
        about = tell()
        wanted, tell_wanted = TORCH.draw(logits, draws, range(2), some)
        about_wanted = tell_wanted()
        assert tokens.tolist() == wanted.tolist()
        assert_as_told(about, about_wanted)


# -- budgets -----------------------------------------------------------------------------------------------------------

NO_WORK = {"empty", "new_empty", "view", "slice", "detach", "alias", "select", "as_strided", "_to_copy", "lift_fresh"}
"""What takes no launch. A copy to the host is counted by itself."""


class Ledger(TorchDispatchMode):
    """Counts what a step asks of the device: launches of kernels, whatever else torch would launch, and transfers."""

    def __init__(self, backend: TritonSampling, monkeypatch: pytest.MonkeyPatch):
        super().__init__()
        self.counts: Counter[str] = Counter()
        kernels, upload = backend._kernels, sampling.upload
        monkeypatch.setattr(backend, "_kernels", _Counted(kernels, self.counts))

        def uploaded(array: np.ndarray, device: torch.device) -> Tensor:
            self.counts["uploads"] += 1
            with _disable_current_modes():
                return upload(array, device)

        def arriving(words: Tensor) -> Arrival:
            self.counts["downloads"] += 1
            return Arrival(words)

        monkeypatch.setattr(sampling, "upload", uploaded)
        monkeypatch.setattr(sampling, "Arrival", arriving)

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence = (), kwargs: dict | None = None) -> Any:
        if func.overloadpacket.__name__ not in NO_WORK:
            self.counts[f"torch {func.overloadpacket.__name__}"] += 1
        return func(*args, **(kwargs or {}))


class _Counted:
    """The kernels, each of whose launches is counted."""

    def __init__(self, kernels: Any, counts: Counter):
        self._kernels, self._counts = kernels, counts

    def __getattr__(self, name: str) -> Any:
        kernel, counts = getattr(self._kernels, name), self._counts

        class Launcher:
            def __getitem__(self, grid: tuple) -> Any:
                def launch(*args: Any, **options: Any) -> None:
                    counts[name] += 1
                    with _disable_current_modes():
                        kernel[grid](*args, **options)

                return launch

        return Launcher()


@pytest.mark.parametrize(
    ("cases", "launches", "downloads"),
    [
        ([0, 0, 0], {"scan", "choose"}, 0),
        ([0, 1, 1], {"scan", "weigh", "choose"}, 0),
        ([1, 2, 2], {"scan", "weigh", "choose"}, 0),
        ([0, 1, 6, 6], {"change", "scan", "weigh", "choose"}, 0),
        ([7, 7], {"change", "scan", "weigh", "choose", "describe"}, 1),
        (range(8), {"change", "scan", "weigh", "choose", "describe"}, 1),
    ],
    ids=["greedy", "random", "cut", "changed", "told", "mixed"],
)
def test_a_step_is_at_most_one_upload_and_few_launches(
    cases: Sequence[int], launches: set[str], downloads: int, monkeypatch: pytest.MonkeyPatch
):
    """And nothing else: torch launches nothing, and no result is read, which would wait for the device. What greedy
    rows are drawn with was uploaded by the step before."""
    draws, changes = zip(*(CASES[case] for case in cases), strict=True)
    backend = TritonSampling()
    logits = torch.randn(len(draws), 300, generator=torch.Generator().manual_seed(3))
    backend.draw(logits, [CASES[0][0]] * len(draws), range(len(draws)))
    ledger = Ledger(backend, monkeypatch)
    with ledger:
        backend.draw(logits, draws, range(len(draws)), changes)
    uploads = int(any(cases))
    expected = Counter({"uploads": uploads, "downloads": downloads, **dict.fromkeys(launches, 1)})
    assert +ledger.counts == +expected
    assert len(launches) <= MOST_LAUNCHES
