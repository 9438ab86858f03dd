"""What counting raises."""


class UnsupportedTorchError(RuntimeError):
    """This release of PyTorch lacks an interface that counting needs."""
