"""What all tests share: Hypothesis measures no time."""

from hypothesis import settings

# A machine that others use stalls for longer than the 200 ms that an example may take by default.
settings.register_profile("shared machine", deadline=None)
settings.load_profile("shared machine")
