"""What is counted for a GGUF kind is what a real file of that kind holds, number of bytes by number of bytes."""

import pytest

from intarsia.deploy.checkpoints.real_models import REAL_MODELS, installed_files, real_checkpoint
from intarsia.deploy.checkpoints.weights import shapes_of, weigh
from intarsia.deploy.checkpoints.weights_as import recipe_of, weights_as
from intarsia.workers.checkpoint.files import Checkpoint


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), [("gemma-3-270m", "q4_k_m"), ("smollm2-135m-instruct", "q4_1")])
def test_counted_bytes_of_a_kind_are_those_of_a_real_file(name: str, kind: str):
    if installed_files(name) is None:
        pytest.skip(f"{name} is not installed: {REAL_MODELS[name].install}")
    found = real_checkpoint(name)
    assert found is not None
    checkpoint = Checkpoint(found.folder)
    assert weights_as(shapes_of(checkpoint), recipe_of(kind), "bfloat16") == weigh(checkpoint, "bfloat16")
