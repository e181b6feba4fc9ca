"""All layers of a model run in one list, and what lies between two of them has its numbers whenever it is read."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from intarsia.kernels.products import NativeLinear
from intarsia.kernels.tokenwise import cpu as native
from intarsia.tests.models import make_checkpoint
from intarsia.tests.workers.cpu.test_decoder_layer import answers, set_most_rows
from intarsia.workers.cpu.decoder_layer import MOST_FEW_ROWS, Buffers, LayerOfCalls
from intarsia.workers.cpu.fused_modules import FusedLayer
from intarsia.workers.cpu.stack import Pending, Stack

pytestmark = pytest.mark.skipif(not native.is_available(), reason="there is no C++ compiler")


def stack_of(some: list[LayerOfCalls]) -> Stack:
    assert isinstance(some[0].stack, Stack)
    return some[0].stack


@pytest.mark.parametrize("family", ["gemma3", "llama", "qwen3", "olmo3", "exaone4", "glm4_moe", "jamba"])
def test_a_step_of_few_rows_calls_no_layer_by_itself(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path, runs = make_checkpoint(family, tmp_path / family), []
    run_layer, run_stack = FusedLayer.forward, Stack._run
    monkeypatch.setattr(FusedLayer, "forward", lambda *a, **given: (runs.append("layer"), run_layer(*a, **given))[1])
    monkeypatch.setattr(Stack, "_run", lambda *given: (runs.append("stack"), run_stack(*given))[1])

    def begin(some: list[LayerOfCalls]) -> None:
        set_most_rows(some, MOST_FEW_ROWS)  # whichever way products of many rows go here
        runs.clear()

    answers(path, begin, max_num_batched_tokens=MOST_FEW_ROWS)
    assert set(runs) == {"stack"}


def test_layers_whose_parts_are_all_ours_are_one_list_of_calls(tmp_path: Path):
    path, stacks = make_checkpoint("gemma3", tmp_path / "gemma3"), []
    answers(path, lambda some: stacks.append(stack_of(some)))
    assert len(stacks[0].segments) == 1


def test_layers_with_parts_that_are_not_ours_are_called_from_python_for_these_alone(tmp_path: Path):
    path, stacks = make_checkpoint("jamba", tmp_path / "jamba"), []
    answers(path, lambda some: stacks.append(stack_of(some)))
    assert 1 < len(stacks[0].segments) <= 3 * 4 + 1  # of each of four layers: calls, its mixer, its experts


def test_what_is_read_between_two_layers_has_its_numbers(tmp_path: Path):
    path, seen = make_checkpoint("llama", tmp_path / "llama"), []

    def read(some: list[LayerOfCalls]) -> None:
        layer = some[1]
        set_most_rows(some, 64)

        def forward(hidden_states: Tensor, **given: Any) -> Any:
            seen.append((type(hidden_states), float(hidden_states.abs().max())))
            return LayerOfCalls.forward(layer, hidden_states, **given)

        layer.forward = forward  # type: ignore[method-assign]

    assert answers(path, read) == answers(path)
    assert {kind for kind, _ in seen} == {Pending, Tensor}  # steps of few rows, and the longest prompt's
    assert all(greatest > 0 for _, greatest in seen)


def test_what_is_changed_between_two_layers_is_what_the_next_one_gets(tmp_path: Path):
    path = make_checkpoint("llama", tmp_path / "llama")

    def double(some: list[LayerOfCalls], most: int) -> None:
        layer = some[1]
        set_most_rows(some, most)
        layer.forward = lambda hidden_states, **given: LayerOfCalls.forward(layer, hidden_states * 2, **given)  # type: ignore[method-assign]

    doubled = answers(path, lambda some: double(some, stack_of(some).most))
    assert doubled == answers(path, lambda some: double(some, 0)) != answers(path)


def test_what_lay_between_two_layers_cannot_be_read_once_all_have_run(tmp_path: Path):
    path, kept = make_checkpoint("llama", tmp_path / "llama"), []

    def keep(some: list[LayerOfCalls]) -> None:
        layer = some[1]

        def forward(hidden_states: Tensor, **given: Any) -> Any:
            kept.append(hidden_states)
            return LayerOfCalls.forward(layer, hidden_states, **given)

        layer.forward = forward  # type: ignore[method-assign]

    answers(path, keep)
    assert isinstance(kept[-1], Pending)
    assert kept[-1].shape[0] == 1  # its shape is known still
    with pytest.raises(AssertionError, match="is not kept"):
        kept[-1].sum()


def test_a_step_of_many_rows_goes_from_layer_to_layer(tmp_path: Path):
    path, kinds = make_checkpoint("llama", tmp_path / "llama"), set()

    def watch(some: list[LayerOfCalls]) -> None:
        layer = some[1]
        set_most_rows(some, 0)

        def forward(hidden_states: Tensor, **given: Any) -> Any:
            kinds.add(type(hidden_states))
            return LayerOfCalls.forward(layer, hidden_states, **given)

        layer.forward = forward  # type: ignore[method-assign]

    assert answers(path, watch) == answers(path)
    assert kinds == {Tensor}


def test_layers_on_both_sides_of_one_that_is_not_ours_are_stacks_of_their_own(tmp_path: Path):
    path, found = make_checkpoint("mllama", tmp_path / "mllama"), []
    assert answers(path, found.extend) == answers(path, lambda some: set_most_rows(some, 0))
    assert len(found) > 1 and len({id(layer.stack) for layer in found}) > 1


def test_steps_whose_products_go_torchs_way_are_not_of_few_rows(tmp_path: Path):
    path, found = make_checkpoint("llama", tmp_path / "llama"), []
    answers(path, found.extend)
    attention = stack_of(found)._attention
    linears = [module for layer in found for module in layer.modules() if isinstance(module, NativeLinear)]
    for torch_from_rows, most in ((MOST_FEW_ROWS + 1, MOST_FEW_ROWS), (9, 8)):
        for linear in linears:
            linear.torch_from_rows = torch_from_rows
        assert Stack(found, Buffers(torch.float32), attention, 64).most == most


def test_angles_that_each_layer_is_given_anew_are_kept_until_they_are_read(tmp_path: Path):
    path = make_checkpoint("gemma3", tmp_path / "gemma3")

    def copy_angles(some: list[LayerOfCalls]) -> None:
        for layer in some:

            def forward(hidden_states: Tensor, *, layer: LayerOfCalls = layer, **given: Any) -> Any:
                angles = given.pop("position_embeddings")
                apart = tuple(each.repeat_interleave(2, dim=-1)[..., ::2] for each in angles)
                return LayerOfCalls.forward(layer, hidden_states, position_embeddings=apart, **given)

            layer.forward = forward  # type: ignore[method-assign]

    assert answers(path, copy_angles) == answers(path)
