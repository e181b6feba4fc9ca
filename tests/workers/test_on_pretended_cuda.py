"""Whole engines on a pretended CUDA device (`tests/pretended_cuda`): what a GPU would refuse is refused, and what would
cost time on it is counted. Each runs in a process of its own, because torch is changed there for good."""

import asyncio
import re
from collections.abc import Callable, Set
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from intarsia.kernels.toolchain import triton as gpu
from intarsia.tests.conftest import TinyModel
from intarsia.tests.least_memory import least_memory
from intarsia.tests.local import complete, make_engine
from intarsia.tests.models import FAMILIES, STATES_ALONE, behind_best, load_oracle
from intarsia.tests.pretended_cuda.child import pretend
from intarsia.tests.pretended_cuda.guard import compiler
from intarsia.tests.pretended_cuda.scenes import VARIED

pytestmark = [
    pytest.mark.skipif(gpu.missing() is not None, reason=str(gpu.missing())),
    pytest.mark.skipif(compiler() is None, reason="there is no C++ compiler"),
]

SLOW = pytest.mark.slow
PLANTED = pytest.mark.xdist_group("pretended-mistakes")
TOKENS = 6
PROMPTS = 3

QUICK = {"gemma3", "qwen3_next"}
"""Families whose tests are not slow: windows; a gated delta net and experts."""


def families(quick: Set[str], but: Set[str] = frozenset()) -> list[Any]:
    """All of them, as parameters. Tests of a family that share a run share a process of pytest's."""
    return [
        pytest.param(name, marks=[pytest.mark.xdist_group(f"pretended-{name}"), *([] if name in quick else [SLOW])])
        for name in FAMILIES
        if name not in but
    ]


Pretended = Callable[..., dict[str, Any]]


class Budget(NamedTuple):
    """Of a decode step of three greedy requests, filled up to four rows and replayed. True figures, which only fall."""

    uploads: int
    kernels_outside: int  # of torch, beside the graph: uploads are put into their frame, what was drawn is kept
    kernels: int  # of torch, inside the graph
    launches: int  # of Triton kernels, inside the graph


SYNCS = 1
"""The tokens are read. Nothing else is waited for."""

GREEDY_LAUNCHES = 2
"""Outside the graph: tokens are chosen."""

VARIED_SYNCS, VARIED_LAUNCHES = 2, 5
"""Of three requests whose tokens are drawn in every way that there is. Log-probabilities are read beside the tokens."""

BUDGETS: dict[str, Budget] = {
    "gemma3": Budget(1, 2, 43, 38),
    "gemma2": Budget(1, 2, 31, 27),
    "ministral": Budget(1, 2, 27, 26),
    "gpt_oss": Budget(1, 2, 22, 47),
    "llama": Budget(1, 2, 23, 22),
    "qwen3": Budget(1, 2, 23, 22),
    "smollm3": Budget(1, 2, 27, 29),
    "cohere2": Budget(1, 2, 36, 18),
    "olmo3": Budget(1, 2, 34, 22),
    "exaone4": Budget(1, 2, 27, 22),
    "llama4": Budget(1, 2, 97, 34),
    "bamba": Budget(1, 2, 29, 33),
    "granite4": Budget(1, 2, 50, 55),
    "nemotron_h": Budget(1, 2, 27, 24),
    "falcon_h1": Budget(1, 2, 106, 34),
    "zamba2": Budget(1, 2, 126, 55),
    "jamba": Budget(1, 2, 24, 54),
    "minimax": Budget(1, 2, 50, 48),
    "lfm2": Budget(1, 2, 36, 26),
    "qwen3_next": Budget(1, 2, 91, 61),
    "qwen3_5": Budget(1, 2, 59, 37),
    "gemma3n": Budget(1, 2, 392, 85),
    "gemma4_e": Budget(1, 2, 169, 67),
    "gemma4": Budget(1, 2, 150, 74),
    "deepseek_v3": Budget(1, 2, 90, 40),
    "mistral": Budget(1, 2, 23, 19),
    "ministral3": Budget(1, 2, 29, 22),
    "lfm2_moe": Budget(1, 2, 39, 38),
    "qwen3_5_moe": Budget(1, 2, 79, 61),
    "mllama": Budget(1, 3, 41, 25),
    "mamba": Budget(1, 1, 19, 19),
    "kimi_linear": Budget(1, 2, 59, 54),
    "ling3": Budget(1, 2, 79, 54),
    "recurrent_gemma": Budget(1, 2, 119, 43),
    "zaya": Budget(1, 2, 286, 59),
    "qwen2": Budget(1, 2, 27, 27),
    "qwen3_moe": Budget(1, 2, 21, 32),
    "mixtral": Budget(1, 2, 20, 37),
    "phi3": Budget(1, 2, 23, 22),
    "olmo2": Budget(1, 2, 23, 19),
    "glm4_moe": Budget(1, 2, 27, 34),
    "minimax_m2": Budget(1, 2, 20, 37),
    "mimo_v2_flash": Budget(1, 2, 91, 42),
    "step3p7": Budget(1, 2, 111, 53),
    "lfm3": Budget(1, 2, 108, 47),
    "olmo_hybrid": Budget(1, 2, 51, 34),
    "afmoe": Budget(1, 2, 84, 52),
    "muse_glimmer": Budget(1, 2, 135, 26),
    "mistral4": Budget(1, 2, 113, 46),
    "deepseek_v32": Budget(1, 2, 150, 46),
    "glm_moe_dsa": Budget(1, 2, 199, 57),
    "mistral_large4": Budget(1, 2, 206, 51),
    "minimax_m3": Budget(1, 2, 96, 61),
    "glm5_next": Budget(1, 2, 150, 69),
    "deepseek_v4": Budget(1, 2, 444, 82),
}


@pytest.fixture(scope="module")
def pretended(tiny: Callable) -> Pretended:
    """Runs a family once per module and set of flags."""
    answers: dict[tuple[str, ...], dict[str, Any]] = {}

    def run(family: str, *flags: str) -> dict[str, Any]:
        if (family, *flags) not in answers:
            asked = (f"--tokens={TOKENS}", f"--prompts={PROMPTS}", *flags)
            answers[family, *flags] = pretend(family, tiny(family).path, *asked)
        return answers[family, *flags]

    return run


def expected(model: Any, prompts: int = PROMPTS, tokens: int = TOKENS) -> list[list[int]]:
    return [answer[:tokens] for answer in model.expected[:prompts]]


MOST_BEHIND = 0.75
"""How far behind the best logit tokens in bfloat16 may be on average, in standard deviations. With most families it is
less than 0.05, of transformers' own tokens 0.4 with Zamba 2, and of tokens drawn at random 2.4."""


def behind_oracle(model: Any, answers: list[list[int]]) -> list[float]:
    """Of each token, by how much its logit is less than the best one in float32, in standard deviations."""
    found = []
    for prompt, images, answer in zip(model.prompts, model.images, answers, strict=False):
        behind, spread = behind_best(load_oracle(model.path, images), prompt, answer)
        found += (behind / spread).tolist()
    return found


@pytest.mark.parametrize("family", families(QUICK))
def test_tokens_of_recorded_steps_are_those_of_the_oracle(family: str, tiny: Callable, pretended: Pretended):
    """Prompts in chunks, decode steps recorded and replayed, then all of it again out of the prefix cache."""
    answer = pretended(family)
    assert answer["tokens"] == answer["again"] == expected(tiny(family))
    assert all(cached > 0 for cached in answer["cached"][1:]), "repeated prompts of 33 tokens and more must hit"
    assert answer["is_all_free"]
    assert answer["refusal"] is None, answer["refusal"]
    assert answer["costs"]["replayed"]["steps"] > 3


@pytest.mark.parametrize("family", families(QUICK))
def test_a_decode_step_costs_no_more_than_its_budget_and_a_mixed_one_waits_once(family: str, pretended: Pretended):
    answer = pretended(family)
    most = answer["costs"]["replayed"]["most"]
    cost = Budget(
        most.get("upload, pinned", 0) + most.get("upload, pageable", 0),
        most["torch kernel"],
        most["recorded torch kernel"],
        most["recorded launch"],
    )
    layers = answer["layers"]
    print(f"{family}: {cost}, {cost.kernels / layers:.1f} kernels of torch for each of {layers} layers")
    assert most["sync"] == SYNCS, answer["costs"]["replayed"]["places"]["sync"]
    assert most["launch"] == GREEDY_LAUNCHES, answer["costs"]["replayed"]["places"]["kernel"]
    mixed = answer["costs"]["mixed"]
    assert mixed["replays"] == mixed["steps"], "steps with prompts, and those that save states, are recorded too"
    assert answer["costs"]["unrecorded"]["steps"] == 0
    assert mixed["most"]["sync"] == SYNCS, mixed["places"]["sync"]
    assert most["syncs of launch"] == mixed["most"]["syncs of launch"] == 0, "the next step is launched before that"
    over = [name for name, value, most in zip(cost._fields, cost, BUDGETS[family], strict=True) if value > most]
    assert not over, f"{cost} is more than {BUDGETS[family]}: {answer['costs']['replayed']['places']}"


@pytest.mark.parametrize("family", families({"gemma3"}, STATES_ALONE))
def test_what_a_quiet_step_uploads_does_not_depend_on_the_tokens_that_a_request_has(family: str, pretended: Pretended):
    """Block tables stay on the device. Here a request grows by four blocks, within one cut of its keys."""
    answer = pretended(family, "--prompts=1", "--once", "--tokens=20", "--block-size=5")
    assert answer["costs"]["replayed"]["steps"] > 15
    assert len(answer["quiet bytes"]["1"]) == 1, answer["quiet bytes"]
    most = answer["costs"]["replayed"]["most"]
    assert most["bytes uploaded"] > answer["quiet bytes"]["1"][0], "a new block is told"
    assert most["upload, pinned"] == 1, "by the same upload"


@pytest.mark.parametrize("family", families({"mistral"}, STATES_ALONE))
def test_tokens_are_those_of_the_oracle_after_preemption(family: str, tiny: Callable, pretended: Pretended):
    """A pool in which the longest request fits alone. Blocks of 5 tokens, so that each answer needs one more."""
    model, tokens = tiny(family), 10
    longest = max(len(prompt) for prompt in model.prompts[:PROMPTS]) + tokens
    little = f"--kv-cache-memory={least_memory(model, 5, longest)}"
    answer = pretended(family, little, "--block-size=5", f"--tokens={tokens}", "--once")
    assert answer["preemptions"] > 0
    assert answer["tokens"] == expected(model, tokens=tokens)
    assert answer["is_all_free"]


@pytest.mark.parametrize("family", families({"bamba"}, STATES_ALONE))
def test_tokens_are_those_of_the_oracle_when_blocks_have_waited_in_host_memory(
    family: str, tiny: Callable, pretended: Pretended
):
    """Copies to and from the host are done by a stream of their own."""
    model, tokens = tiny(family), 8
    longest = max(len(prompt) for prompt in model.prompts[:PROMPTS]) + tokens
    little = f"--kv-cache-memory={least_memory(model, 5, longest)}"
    answer = pretended(family, little, "--swap", f"--tokens={tokens}", "--once")
    assert answer["swaps"] > 0
    assert answer["tokens"] == expected(model, tokens=tokens)
    assert answer["is_all_free"]


def test_tokens_drawn_in_every_way_are_those_drawn_on_a_cpu(tiny: Callable, pretended: Pretended):
    model = tiny("mistral")

    async def on_a_cpu() -> list[list[int]]:
        engine = await make_engine(model.path)
        params = [replace(each, max_tokens=TOKENS) for each in VARIED]
        return [answer.token_ids for answer in await complete(engine, model.prompts[:PROMPTS], params)]

    answer = pretended("mistral", "--varied", "--once")
    assert answer["tokens"] == asyncio.run(on_a_cpu())
    step = answer["costs"]["replayed"]
    assert step["most"]["sync"] == VARIED_SYNCS, step["places"]["sync"]
    assert step["most"]["launch"] == VARIED_LAUNCHES, step["places"]["kernel"]


@pytest.mark.parametrize("family", families({"mistral"}))
def test_two_ranks_give_the_tokens_of_the_oracle(family: str, tiny: Callable, pretended: Pretended):
    """Each rank in a thread with a device of its own; what they do together is part of the recording."""
    answer = pretended(family, "--ranks=2", "--once")
    assert answer["tokens"] == expected(tiny(family))
    assert answer["refusal"] is None, answer["refusal"]
    assert answer["costs"]["replayed"]["most"]["recorded collective"] > answer["layers"]


def test_ranks_that_meet_anew_record_their_steps_anew(tiny: Callable, pretended: Pretended):
    """What was recorded holds the communicator that `join` destroys."""
    answer = pretended("mistral", "--ranks=2", "--meet-anew")
    assert answer["again"] == expected(tiny("mistral"))


@pytest.mark.parametrize("family", families(set()))
def test_steps_in_bfloat16_mix_no_kinds_of_numbers_and_are_recorded(family: str, tiny: Callable, pretended: Pretended):
    """In fewer bits another token may come, but most are about as probable as the best."""
    answer = pretended(family, "--dtype=bfloat16", "--once")
    assert answer["refusal"] is None, answer["refusal"]
    assert answer["costs"]["replayed"]["most"]["sync"] == SYNCS
    behind = behind_oracle(tiny(family), answer["tokens"])
    assert sum(behind) / len(behind) <= MOST_BEHIND, behind


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=SLOW) for name in ("llama", "gemma3", "qwen3")] + ["gpt_oss"]
)
def test_with_same_bits_nothing_is_summed_by_torch(family: str, tiny: Callable, pretended: Pretended):
    """Else the start is refused. Experts and their router go through our products, too."""
    answer = pretended(family, "--same-bits", "--once")
    assert answer["refusal"] is None, answer["refusal"]
    assert answer["tokens"] == expected(tiny(family))
    assert answer["costs"]["replayed"]["most"]["sync"] == SYNCS


def test_sparse_layers_of_gemma_3n_are_recorded(tiny: Callable, pretended: Pretended):
    """transformers makes the quantile of their cutoff out of a number, in each layer and step."""
    answer = pretended("gemma3n", "--prompts=1", "--once")
    assert answer["refusal"] is None, answer["refusal"]
    assert answer["tokens"] == expected(tiny("gemma3n"), prompts=1)


def test_rows_that_see_an_image_are_recorded_beside_rows_that_see_none(tiny: Callable, pretended: Pretended):
    """The image is encoded in a step with prompts. That step is replayed, too, and waits for the tokens alone."""
    answer = pretended("mllama", "--prompts=2", "--once")
    assert answer["refusal"] is None, answer["refusal"]
    assert answer["tokens"] == expected(tiny("mllama"), prompts=2)
    costs = answer["costs"]
    assert costs["unrecorded"]["steps"] == 0
    assert costs["replayed"]["steps"] > 3
    assert costs["mixed"]["replays"] == costs["mixed"]["steps"]
    assert costs["replayed"]["most"]["sync"] == costs["mixed"]["most"]["sync"] == SYNCS
    assert costs["replayed"]["most"]["upload, pinned"] == 1


HERE = "tests/pretended_cuda/planted.py:"
ATTEND = "the launch of 'attend' at kernels/paged_attention/triton.py:"
WAITS, COPIES = "the host waits for the device", "the host's memory is copied to the device"
REFUSED = "could not be recorded: operation not permitted when stream is capturing: "

FOUND = {
    "lengths_stay_on_the_host": f"{ATTEND}…, kv_len_ptr, lies in host memory",
    "attention_reads_a_number": f"{REFUSED}{WAITS} at {HERE}",
    "attention_makes_a_tensor_of_a_number": f"{REFUSED}{COPIES} at {HERE}",
    "attention_has_a_shape_of_its_numbers": f"{REFUSED}{WAITS} at {HERE}",
    "attention_allocates_by_a_length": f"{REFUSED}{WAITS} at {HERE}",
    "queries_are_of_another_kind": ATTEND,
    "pages_are_read_behind_their_end": "reads memory outside of its tensors",
    "one_pinned_buffer_for_all_uploads": f"the pinned buffer that {HERE}",
    "tokens_are_read_before_they_arrive": "reads what kernels/transfer.py:",
    "sampler_adds_a_host_tensor": f"aten.add.Tensor at {HERE}",
    "gathered_pages_are_copied_before_they_are_there": "kernels/transfer.py:",
    "pages_are_put_back_before_they_have_come": "kernels/pages.py:",
    "pages_are_swapped_by_another_stream_than_they_are_written": "kernels/pages.py:",
    "one_rank_leaves_out_a_collective": "not all ranks came to the collective at workers/collectives.py:",
    "ranks_that_meet_anew_replay_what_they_recorded": "uses a communicator that was destroyed",
}
"""Mistake -> what is said of it. "…" stands for the number of the line."""

UNSEEN = (
    "recorded_steps_keep_their_lengths",
    "drawn_tokens_are_not_kept_for_the_next_step",
    "replayed_steps_pick_the_tokens_of_their_recording",
    "blocks_that_a_request_grows_by_are_lost",
    "changes_of_tables_do_not_reach_the_device",
    "window_is_off_by_one",
    "sums_of_ranks_are_left_out",
)
"""Mistakes that a GPU would make without a word. Their names say the place."""


class TriedOnce(dict[str, Any]):
    """Mistake -> what became of it. Each is tried when it is first asked for, in a run of its own."""

    def __init__(self, model: TinyModel):
        super().__init__()
        self._path = model.path
        self._memory = least_memory(model, 5, max(len(prompt) for prompt in model.prompts[:2]) + 14)

    def __missing__(self, mistake: str) -> Any:
        answer = pretend("mistral", self._path, "--planted", mistake, f"--kv-cache-memory={self._memory}")
        return self.setdefault(mistake, answer[mistake])


@pytest.fixture(scope="module")
def planted(tiny: Callable) -> TriedOnce:
    return TriedOnce(tiny("mistral"))


@PLANTED
@pytest.mark.parametrize("mistake", FOUND)
def test_a_planted_mistake_is_refused_and_its_place_is_named(mistake: str, planted: TriedOnce):
    said = str(planted[mistake]["said"])
    assert re.search(re.escape(FOUND[mistake]).replace("…", "[0-9]+"), said), said


@PLANTED
def test_a_planted_wait_is_counted_at_its_place(planted: TriedOnce):
    waits = planted["sampler_waits_once_more"]["waits"]
    assert sum(waits.values()) == SYNCS + 1
    assert any(place.startswith(HERE) for place in waits)


@PLANTED
@pytest.mark.parametrize("mistake", UNSEEN)
def test_a_planted_mistake_that_no_rule_forbids_gives_other_tokens(mistake: str, tiny: Callable, planted: TriedOnce):
    right, wrong = planted["sampler_waits_once_more"], planted[mistake]
    assert right["tokens"] == expected(tiny("mistral"), 1, 4)
    assert wrong["said"] is None
    assert wrong["tokens"] != expected(tiny("mistral"), 1, len(wrong["tokens"][0]))


@PLANTED
def test_every_planted_mistake_is_looked_for(tiny: Callable):
    there_are = pretend("mistral", tiny("mistral").path, "--planted", "--names")["names"]
    assert {*there_are} == {*FOUND, *UNSEEN, "sampler_waits_once_more"}


@pytest.mark.xdist_group("pretended-mistakes-about-images")
def test_a_planted_mistake_about_images_gives_other_tokens(tiny: Callable):
    model = tiny("mllama")
    answers = pretend("mllama", model.path, "--planted")
    assert answers.keys() == {"rows_see_as_much_of_images_as_when_recorded", "rows_see_an_image_as_when_recorded"}
    for mistake, wrong in answers.items():
        assert wrong["said"] is None, mistake
        assert wrong["tokens"] != expected(model, 2, 4), mistake
