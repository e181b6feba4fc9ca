import pytest

from intarsia.deploy.checkpoints.real_models import REAL_MODELS

from .loading import Real, load


@pytest.fixture(scope="session", params=list(REAL_MODELS))
def real(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Real:
    return load(request.param, tmp_path_factory.mktemp(request.param))
