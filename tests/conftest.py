"""For all tests: an example may take as long as it takes. How fast the machine is decides no result."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("fedsilo", deadline=None)
settings.load_profile("fedsilo")
