"""What is released says the same version everywhere."""

from pathlib import Path

import segcal

ROOT = Path(__file__).parents[1]


def test_the_version_is_that_of_the_package():
    assert f"\nversion: {segcal.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {segcal.__version__}\n" in (ROOT / "CHANGELOG.md").read_text()
    assert 'dynamic = ["version"]' in (ROOT / "pyproject.toml").read_text()  # Read from the package, too.


def test_it_says_that_it_is_typed():
    assert (Path(segcal.__file__).parent / "py.typed").is_file()
