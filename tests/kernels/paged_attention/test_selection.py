"""Which backend a layer gets, and what is said when there is none."""

from dataclasses import replace
from typing import ClassVar

import pytest
import torch

from intarsia.errors import InvalidSetting, UnsupportedModel
from intarsia.kernels.paged_attention import (
    Capabilities,
    FlashBackend,
    NativeBackend,
    Needs,
    ReferenceBackend,
    TorchBackend,
    select_backend,
)
from intarsia.kernels.paged_attention.flash import Flash, find_flash

CPU = torch.device("cpu")
PLAIN = Needs(torch.bfloat16, heads=8, kv_heads=2, key_dim=64, value_dim=64)


class NarrowBackend(TorchBackend):
    """As a hand-written GPU kernel may be: fast, and good for few layers."""

    name: ClassVar[str] = "narrow"
    capabilities: ClassVar[Capabilities] = Capabilities(
        devices=frozenset({"cpu"}),
        dtypes=frozenset({torch.bfloat16, torch.float16}),
        head_sizes=frozenset({(64, 64), (128, 128)}),
        window=False,
        softcap=False,
        sinks=False,
    )


@pytest.mark.parametrize(
    "needs, chosen",
    [
        (PLAIN, NarrowBackend),
        (replace(PLAIN, dtype=torch.float32), TorchBackend),
        (replace(PLAIN, key_dim=192, value_dim=128), TorchBackend),
        (replace(PLAIN, window=True), TorchBackend),
        (replace(PLAIN, softcap=True), TorchBackend),
        (replace(PLAIN, sinks=True), TorchBackend),
        (replace(PLAIN, dtype=torch.float64), ReferenceBackend),
    ],
)
def test_the_first_backend_that_covers_the_layer_is_chosen(needs, chosen):
    backend = select_backend([needs], CPU, backends=(NarrowBackend, TorchBackend, ReferenceBackend))
    assert type(backend) is chosen


def test_the_default_on_a_cpu_is_native_where_there_is_a_compiler_and_a_name_forces_another():
    assert select_backend([PLAIN], CPU).name == ("torch" if NativeBackend.lacks() else "native")
    assert select_backend([PLAIN], CPU, "torch").name == "torch"
    assert select_backend([PLAIN], CPU, "reference").name == "reference"


@pytest.mark.parametrize(
    "needs, device, reason",
    [
        (replace(PLAIN, dtype=torch.float32), "cpu", "computes in torch.bfloat16, torch.float16, not in torch.float32"),
        (replace(PLAIN, key_dim=80), "cpu", "has no kernel for head sizes (80, 64)"),
        (replace(PLAIN, window=True), "cpu", "has no sliding window"),
        (replace(PLAIN, softcap=True), "cpu", "has no softcap"),
        (replace(PLAIN, sinks=True), "cpu", "has no attention sinks"),
        (replace(PLAIN, heads=7), "cpu", "cannot share 2 kv heads among 7 heads"),
        (PLAIN, "meta", "runs on cpu, not on meta"),
    ],
)
def test_a_refusal_says_what_is_missing(needs, device, reason):
    assert NarrowBackend.capabilities.refusal(needs, torch.device(device)) == reason


def test_no_backend_at_all_names_each_and_its_reasons():
    needs = replace(PLAIN, dtype=torch.int8, sinks=True)
    with pytest.raises(UnsupportedModel) as refused:
        select_backend([needs], CPU, backends=(NarrowBackend, TorchBackend, ReferenceBackend))
    message = str(refused.value)
    assert "'narrow' computes in torch.bfloat16, torch.float16, not in torch.int8; has no attention sinks" in message
    assert "'torch' computes in" in message and "'reference' computes in" in message


def test_a_forced_backend_that_cannot_is_refused_without_a_fallback():
    with pytest.raises(UnsupportedModel, match="'torch' computes in") as refused:
        select_backend([replace(PLAIN, dtype=torch.float64)], CPU, "torch")
    assert "'reference'" not in str(refused.value)


def test_a_model_gets_one_backend_that_covers_all_its_layers():
    kinds = (NarrowBackend, TorchBackend, ReferenceBackend)
    assert select_backend([PLAIN, replace(PLAIN, heads=4)], CPU, backends=kinds).name == "narrow"
    assert select_backend([PLAIN, replace(PLAIN, window=True)], CPU, backends=kinds).name == "torch"


def test_a_layer_that_no_backend_covers_is_named_with_each_backend_and_its_reason():
    uncovered = replace(PLAIN, dtype=torch.float64, key_dim=99)
    with pytest.raises(UnsupportedModel) as refused:
        select_backend([PLAIN, uncovered], torch.device("cuda"), backends=(NativeBackend, NarrowBackend))
    assert str(uncovered) in str(refused.value) and str(PLAIN) in str(refused.value)
    with pytest.raises(UnsupportedModel) as refused:
        select_backend([replace(PLAIN, dtype=torch.float32), uncovered], CPU, "torch")
    assert str(uncovered) in str(refused.value)
    assert str(replace(PLAIN, dtype=torch.float32)) not in str(refused.value), "that one could have been run"


@pytest.mark.parametrize(
    ("needs", "reason"),
    [
        (replace(PLAIN, block_tokens=20), "takes pages of a multiple of 16 tokens, not of 20"),
        (replace(PLAIN, any_bytes=True), "reads past the tokens of a page, where layers of another kind may have left"),
        (replace(PLAIN, latent=True), "has no multi-head latent attention"),
        (replace(PLAIN, key_dim=192, value_dim=128), "has no kernel for head sizes (192, 128)"),
    ],
)
def test_flash_attention_says_what_it_does_not_take(needs, reason):
    refusal = FlashBackend.capabilities.refusal(needs, torch.device("cuda"))
    assert refusal is not None and reason in refusal


def test_flash_attention_is_never_chosen_unasked():
    class Here(FlashBackend):
        capabilities: ClassVar[Capabilities] = replace(FlashBackend.capabilities, devices=frozenset({"cpu"}))

        @classmethod
        def lacks(cls) -> None:
            return None

        def __init__(self) -> None:
            super().__init__(Flash(print, None))

    assert select_backend([PLAIN], CPU, backends=(Here, TorchBackend)).name == "torch"
    assert select_backend([PLAIN], CPU, "flash", backends=(Here, TorchBackend)).name == "flash"


def test_flash_attention_that_is_not_installed_says_what_was_tried():
    assert find_flash("no_where.to_be_found") == (
        "needs the package no-where, which cannot be loaded: No module named 'no_where'"
    )


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(
        InvalidSetting, match="no attention backend 'cutlass'; choose one of: native, flash, flash-legacy, triton"
    ):
        select_backend([PLAIN], CPU, "cutlass")
