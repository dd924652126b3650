import pytest

from segcal.calibrators import CALIBRATORS
from segcal.synthetic import Temperature, scenes


@pytest.fixture(scope="session")
def cases():
    return scenes(3, size=(32, 40), plant=[Temperature(1.7)], ignored=0.05)


@pytest.fixture(scope="session", params=CALIBRATORS)
def fitted(request, cases):
    """Each calibrator, fitted to scenes of six classes; tests leave it as it is."""
    return CALIBRATORS[request.param]().fit(cases)
