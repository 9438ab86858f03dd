"""What this package raises when a file or a name is wrong."""


class ProfileError(ValueError):
    """A mistake in a profile file, or a name that no profile has.

    The message is one line: where, which value, and what is allowed.

    >>> str(ProfileError("unknown device 'a100'"))
    "unknown device 'a100'"
    """
