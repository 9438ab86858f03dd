"""Single faults put into a copy of the code on purpose: which of them the tests find."""
