"""Gradient bucket size, from an option to the stack."""

from meshwright.hwprofiles import ProfileError, parse_bytes
from meshwright.planner.cli.request import Setting
from meshwright.planner.options import Given
from meshwright.simulator import PlanError
from meshwright.simulator.replication import WireBytes


def with_bucket_size(setting: Setting, given: Given) -> Setting:
    """Return *setting* with a stack of the given gradient bucket size, if one is given.

    Raises:
        PlanError: If the size is no size, or the stack does not reduce bucket by bucket.
    """
    size = given.get("bucket_size")
    if size is None:
        return setting
    stack = setting.stack
    # Buckets exist to reduce gradients while backward goes on.
    if not stack.overlap_gradient_reduce:
        raise PlanError(
            f"--bucket-size is not offered by stack {stack.name}, which reduces all gradients "
            "at once; allowed: with a stack that overlaps their reduction"
        )
    try:
        size_bytes = parse_bytes(str(size))
    except ProfileError as error:
        raise PlanError(f"--bucket-size: {error}") from None
    # A stack counts a bucket in parameters, of the format in which gradients are reduced.
    width = WireBytes.of(stack, setting.job.precision).reduce_bytes
    if size_bytes < width:
        raise PlanError(f"--bucket-size {size} holds no gradient of {width} bytes")
    update = {
        "gradient_bucket_parameters": size_bytes // width,
        # A size that is given no longer grows with the data-parallel ranks.
        "gradient_bucket_parameters_per_replica": 0,
    }
    return setting._replace(stack=stack.model_copy(update=update))
