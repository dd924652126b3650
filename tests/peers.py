"""Other libraries in tests: the real package, or a skip that says what is missing."""

import importlib
import warnings
from types import ModuleType

import pytest


def peer(name: str) -> ModuleType:
    """Import a package; what it warns of on import is not ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module(name)
        except ImportError as error:
            pytest.skip(f"{name} cannot be imported: {error}", allow_module_level=True)
