"""Options of ``meshwright validate`` as records, and their allowed combinations."""

from dataclasses import dataclass
from enum import StrEnum
from math import isfinite

from meshwright.planner.options import OutputOptions, argument, option, option_name
from meshwright.simulator import PlanError
from meshwright.validate.launch import Launcher
from meshwright.validate.ranks import Backend

MAX_STEPS = 1_000
MAX_TIMEOUT_S = 1e5
DEFAULT_STEPS = 5
DEFAULT_TIMEOUT_S = 60.0


class Mode(StrEnum):
    """Mode of the command, by the option that selects it."""

    FAKE = "--backend fake"
    RUN = "--backend gloo|nccl"
    PROBE = "--backend probe"
    EMIT = "--emit"
    COLLECT = "--collect"


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidateOptions:
    """Plan to check, and how to run it."""

    plan: str | None = argument(None, "PLAN", "A plan.json of search or simulate.")
    backend: Backend | None = option(
        None,
        "|".join(Backend),
        "One rank without data, all on CPUs or GPUs, one really computed [fake].",
    )
    rank: int | None = option(None, "R", "Only this rank [fake: one of each kind, probe: 0].")
    device: str | None = option(None, "cpu|cuda", "Probe: where it computes [cuda if there].")
    ranks: int | None = option(None, "N", "Processes on this machine [the plan's].")
    steps: int | None = option(None, "N", f"Steps to time [{DEFAULT_STEPS}].")
    timeout: float | None = option(
        None, "S", f"Longest timed step, seconds [{DEFAULT_TIMEOUT_S:g}]."
    )
    emit: Launcher | None = option(
        None,
        "|".join(Launcher),
        "Write into --out what runs the plan on a cluster, with nccl unless told.",
    )
    collect: str | None = option(None, "DIR", "Compare with the results of such a run.")


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidateOutput(OutputOptions):
    """Files of the report besides the terminal."""

    out: str | None = option(None, "DIR", "Write the report, its data and each rank's.")


# Where an option means something; elsewhere it is refused.
_MODES: dict[str, tuple[Mode, ...]] = {
    "rank": (Mode.FAKE, Mode.PROBE),
    "device": (Mode.PROBE,),
    "ranks": (Mode.RUN,),
    "steps": (Mode.RUN, Mode.PROBE, Mode.EMIT),
    "timeout": (Mode.RUN, Mode.EMIT),
}


def mode_of(options: ValidateOptions, output: OutputOptions) -> Mode:
    """Return the mode that the options select.

    Raises:
        PlanError: If they contradict each other, or a number is out of range.
    """
    mode = _mode(options)
    for name, modes in _MODES.items():
        value = getattr(options, name)
        if value is not None and mode not in modes:
            raise PlanError(
                f"{option_name(name)} {value} has no effect with {mode}; allowed with: "
                + ", ".join(modes)
            )
    if mode is Mode.EMIT and output.json is not None:
        raise PlanError(f"--json {output.json} has no effect with --emit; allowed: --out DIR")
    if mode is Mode.EMIT and output.out is None:
        raise PlanError("--emit needs a folder to write; allowed: --out DIR")
    check_range("--steps", options.steps, MAX_STEPS)
    seconds = options.timeout
    if seconds is not None and not (isfinite(seconds) and 1 <= seconds <= MAX_TIMEOUT_S):
        raise PlanError(
            f"--timeout {seconds:g} is out of range; allowed 1 to {MAX_TIMEOUT_S:g} seconds"
        )
    return mode


def _mode(options: ValidateOptions) -> Mode:
    if options.emit is not None and options.collect is not None:
        raise PlanError("--emit and --collect are two commands; allowed: one at a time")
    if options.collect is not None:
        return Mode.COLLECT
    if options.emit is not None:
        if options.backend in (Backend.FAKE, Backend.PROBE):
            raise PlanError(
                f"--emit with --backend {options.backend} has nothing to run; allowed: gloo, nccl"
            )
        return Mode.EMIT
    if options.backend is Backend.PROBE:
        return Mode.PROBE
    return Mode.FAKE if options.backend in (None, Backend.FAKE) else Mode.RUN


def check_range(option: str, value: int | None, most: int) -> None:
    """Raise PlanError unless a number that was given is 1 to *most*."""
    if value is not None and not 1 <= value <= most:
        raise PlanError(f"{option} {value} is out of range; allowed 1 to {most}")
