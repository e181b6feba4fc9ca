"""What weights of known models take: as they are released, in other formats, and by the names of releases."""

import pytest

from intarsia.deploy.checkpoints.known_models import known_model, known_models
from intarsia.deploy.checkpoints.known_weights import IN_LINEAR, known_release, known_weights, usual_parts
from intarsia.deploy.checkpoints.weights_as import RECIPES, Mix
from intarsia.errors import InvalidSetting

NANO = "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B"
COUNTED = [model for model in known_models() if "linear" in model.entry.get("params", {})]


@pytest.mark.parametrize("model", COUNTED, ids=lambda model: model.id.split("/")[-1])
def test_parts_of_a_model_are_nearly_all_of_it(model):
    params = model.entry["params"]
    parts = sum(params.get(part, 0) for part in ("linear", "experts", "embedding", "output"))
    assert 0.985 * params["total"] < parts <= params["total"]
    assert sum(params.get(part, 0) for part in IN_LINEAR) <= params["linear"]
    assert params["second_of_mlp"] + params.get("values", 0) <= params["linear"] + params.get("experts", 0)


@pytest.mark.parametrize("model", COUNTED, ids=lambda model: model.id.split("/")[-1])
def test_every_model_is_smaller_in_every_format_and_expands_to_all_its_numbers(model):
    whole = 2 * model.entry["params"]["total"]
    for form in RECIPES:
        weights = known_weights(model, usual_parts(form))
        if weights is None:
            assert isinstance(RECIPES[form], Mix) and model.entry["params"]["odd_columns"]
            continue
        assert weights.total(expands=True) == whole
        assert weights.total(expands=False) <= weights.with_triton() <= whole
        assert weights.total(expands=False) < 0.9 * whole, form


def test_a_model_takes_what_its_files_take():
    def gigabytes(name: str, form: str | None = None) -> float:
        release = known_release(name)
        packed = usual_parts(form) if form else release and release.packed
        weights = known_weights(known_model(name) if release is None else release.model, packed)
        assert weights is not None
        return weights.total(expands=False) / 1e9

    assert gigabytes("openai/gpt-oss-20b") == pytest.approx(13.76, abs=0.01)
    assert gigabytes("google/gemma-3-27b-it") == pytest.approx(54.02, abs=0.01)
    assert gigabytes("maker/gemma-3-27b-it-GGUF:Q4_K_M") == pytest.approx(16.5, abs=0.1)
    assert gigabytes("maker/gemma-3-27b-it-GGUF") == gigabytes("google/gemma-3-27b-it", "q4_k_m")


@pytest.mark.parametrize(
    ("name", "model", "packed"),
    [
        ("Qwen/Qwen3.5-27B-FP8", "Qwen/Qwen3.5-27B", {"linear": "fp8-blocks", "experts": "fp8-blocks"}),
        ("Qwen/Qwen3.5-27B-GPTQ-Int4", "Qwen/Qwen3.5-27B", {"mlp": "gptq"}),
        ("nvidia/Qwen3.5-122B-A10B-NVFP4", "Qwen/Qwen3.5-122B-A10B", {"experts": "nvfp4"}),
        ("redhatai/qwen3.5-9b-fp8-dynamic", "Qwen/Qwen3.5-9B", {"linear": "fp8", "delta_nets": None}),
        ("RedHatAI/gemma-3-27b-it-FP8-dynamic", "google/gemma-3-27b-it", {"linear": "fp8", "experts": "fp8"}),
        ("RedHatAI/Qwen3.5-9B-quantized.w4a16", "Qwen/Qwen3.5-9B", {"linear": "w4a16", "experts": "w4a16"}),
        ("tiiuae/Falcon-H1-34B-Instruct-GPTQ-Int4", "tiiuae/Falcon-H1-34B-Instruct", usual_parts("gptq")),
        (f"{NANO}-NVFP4", f"{NANO}-BF16", usual_parts("nvfp4")),
        ("maker/Qwen3.5-4B-GGUF:Q8_0", "Qwen/Qwen3.5-4B", usual_parts("q8_0")),
        ("maker/Qwen3.5-4B-GGUF", "Qwen/Qwen3.5-4B", usual_parts("q4_k_m")),
        ("maker/Qwen3.5-4B-GGUF:BF16", "Qwen/Qwen3.5-4B", {}),
    ],
)  # fmt: skip
def test_a_release_is_known_by_its_name(name: str, model: str, packed: dict[str, str | None]):
    release = known_release(name)
    assert release is not None and release.model.id == model and release.packed == packed
    assert known_weights(release.model, release.packed) is not None


@pytest.mark.parametrize(
    "name", ["Qwen/Qwen3.5-27B", "nvidia/Qwen3.6-27B-NVFP4", "maker/Other-FP8", "gemma-3-27b", "a:b"]
)
def test_other_names_are_no_releases(name: str):
    assert known_release(name) is None


@pytest.mark.parametrize("kind", ["IQ1_S", "UD-Q4_K_XL"])
def test_a_gguf_file_of_a_kind_that_is_not_known_is_refused(kind: str):
    name = f"maker/gemma-3-27b-it-GGUF:{kind}"
    with pytest.raises(InvalidSetting, match=rf"kind '{kind}' gives .* FILE\.gguf.* as Q8_0, .*, F16\.$") as refused:
        known_release(name)
    assert refused.value.field == "model" and name in str(refused.value)


def test_parts_of_a_release_are_counted_once():
    model = known_model("Qwen/Qwen3.5-9B")
    whole, without = (known_weights(model, {"linear": "fp8", **more}) for more in ({}, {"delta_nets": None}))
    assert whole is not None and without is not None
    assert whole.packed["fp8"] - without.packed["fp8"] == model.entry["params"]["delta_nets"]
    assert without.plain - whole.plain == 2 * model.entry["params"]["delta_nets"]
