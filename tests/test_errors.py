from segcal.errors import DataError, MissingExtraError, SegcalError


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
