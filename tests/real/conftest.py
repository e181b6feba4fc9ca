import pytest

from intarsia.deploy.checkpoints.real_models import REAL_MODELS

from .loading import Real, load

SMALLEST = "smollm2-135m-instruct"
"""The others are slow, but where a test names them."""

BY_DEFAULT = [name if name == SMALLEST else pytest.param(name, marks=pytest.mark.slow) for name in REAL_MODELS]


@pytest.fixture(scope="session", params=BY_DEFAULT)
def real(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Real:
    return load(request.param, tmp_path_factory.mktemp(request.param))
