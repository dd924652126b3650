import sys

import pytest


@pytest.fixture(scope="session", autouse=True)
def _device_functions_are_prepared_once():
    """Triton's interpreter looks through its whole language at every call of a device function, which takes as long as
    the function itself; after the first call it finds nothing to do."""
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None:
        return
    call, prepared = interpreter.InterpretedFunction.__call__, set()

    def call_again(self, *args, **options):
        if self.fn in prepared:
            return self.rewrite()(*args, **options)
        prepared.add(self.fn)
        return call(self, *args, **options)

    interpreter.InterpretedFunction.__call__ = call_again
