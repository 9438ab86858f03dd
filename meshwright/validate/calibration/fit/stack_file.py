"""A software stack as this processor runs it: a stack's file with measured values put in.

Ranks on a processor compute with the cores that also copy their messages, so that nothing is
overlapped; and the attention kernel is PyTorch's own, which was measured.
"""

from collections.abc import Iterable
from pathlib import Path

from meshwright.hwprofiles import (
    MEGA,
    Source,
    list_stacks,
    load_stack,
    parse_time,
    profile_toml,
    stack_frameworks,
)
from meshwright.planner.reports import write_output
from meshwright.simulator import PlanError
from meshwright.validate.calibration.fit.cost_fit import FLASH_KERNEL
from meshwright.validate.calibration.rows import Accelerator, CaseGroup, Row, median

SERIAL = {
    "overlap_gradient_reduce": False,
    "overlap_parameter_gather": False,
    "overlap_p2p": False,
    "tp_overlap_fraction": 0.0,
}


def check_stacks(names: Iterable[str], accelerator: Accelerator | None) -> tuple[str, ...]:
    """Return the stacks of ``--stack``, checked.

    Raises:
        PlanError: If the device is no processor, or a name repeats or is a file.
        ProfileError: If there is no such stack.
    """
    chosen = tuple(names)
    if chosen and accelerator is not Accelerator.CPU:
        raise PlanError(f"--stack {chosen[0]} has no effect without --device cpu")
    for index, name in enumerate(chosen):
        load_stack(name)
        if name.partition("@")[0] not in {*stack_frameworks(), *list_stacks()}:
            raise PlanError(f"--stack {name} is a file; allowed: a built-in stack")
        if name in chosen[:index]:
            raise PlanError(f"--stack {name} stands twice; allowed: each stack once")
    return chosen


def stack_toml(name: str, rows: Iterable[Row], source: str) -> str:
    """Return the built-in stack *name* as TOML, with facts measured on a processor put in.

    The name stays: reference programs are found by it.

    Args:
        name: Of the built-in stack.
        rows: Of this machine.
        source: When and on what they were measured.
    """
    stack, rows = load_stack(name), list(rows)
    launches_s = [row.median_s for row in rows if row.case.group is CaseGroup.LAUNCH]
    facts: dict[str, object] = dict(SERIAL)
    statements = [f"{', '.join(SERIAL)}: cores copy the messages of the ranks that compute on them"]
    if launches_s:
        facts["kernel_gap_s"] = parse_time(f"{median(launches_s) * MEGA:.4g} us")
        statements.insert(0, f"kernel_gap: an add of one element, {Source.MEASURED} by {source}")
    if any(row.case.group is CaseGroup.ATTENTION for row in rows) and stack.flash_kernel:
        facts["flash_kernel"] = FLASH_KERNEL
        statements.append(f"flash_kernel: PyTorch's own, {Source.MEASURED}")
    statements.append(f"all else as {name}: {stack.fitted_source}")
    facts["title"] = f"{stack.title}, on a processor"
    facts["fitted_source"] = "; ".join(statements)
    return profile_toml(stack.model_copy(update=facts))


def write_stacks(
    folder: Path, name: str, stacks: Iterable[str], rows: Iterable[Row], source: str
) -> list[Path]:
    """Write a file for each of *stacks*, read each again, and return the files."""
    rows, written = list(rows), []
    for stack in stacks:
        path = folder / f"{name}-{stack}.toml"
        write_output(path, stack_toml(stack, rows, source))
        # Loaded again: a wrong file fails here, not in a later simulation.
        load_stack(path)
        written.append(path)
    return written
