import pickle

import pytest

from segcal.errors import DataError, MissingExtraError, SegcalError, WorkerError


def family(cls):
    """A class of errors and those derived from it that are built alike."""
    derived = [other for sub in cls.__subclasses__() for other in family(sub)]
    return [cls, *derived] if cls.__init__ is SegcalError.__init__ else derived


def test_message_says_where_what_expected_and_fix():
    error = DataError("label 9", expected="0..5", fix="map the labels", case="p1", where="labels/p1.png")
    assert str(error) == "case 'p1', labels/p1.png: label 9; expected 0..5. To fix: map the labels."


def test_place_is_filled_in_once():
    error = DataError("broken", case="inner").at(case="outer", where="file")
    assert (error.case, error.where) == ("inner", "file")


def test_missing_extra_names_the_extra_and_is_an_import_error():
    error = MissingExtraError("nibabel", "nifti", "reading NIfTI")
    assert isinstance(error, ImportError)
    assert isinstance(error, SegcalError)
    assert "pip install 'segcal[nifti]'" in str(error)


@pytest.mark.parametrize(
    "error",
    [
        *(cls("label 9", expected="0..5", fix="map", case="p1", where="a.png") for cls in family(SegcalError)),
        WorkerError(),
        MissingExtraError("nibabel", "nifti", "reading NIfTI"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_survive_the_way_back_from_a_worker_process(error):
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)
