"""DTensor's cache of shardings, which outlives the process groups that it names."""

from torch.distributed.tensor import debug


def clear_sharding_cache() -> None:
    """Forget all shardings: the meshes of the next cluster may equal those of this one."""
    clear = getattr(debug, "_clear_sharding_prop_cache", None)
    if clear is not None:
        clear()
