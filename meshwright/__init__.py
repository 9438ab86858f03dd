"""The front door: the command ``meshwright``, and the public names of the packages behind it.

Imports are local: ``--version`` must not wait for anything, nor a library user for typer and rich.

>>> from meshwright import load_model
>>> load_model("gpt3-175b").num_layers
96
"""
# ruff: noqa: PLC0415

import gc
import os
import sys

TYPE_CHECKING = False  # as type checkers see it; `typing` itself takes as long as Python's start
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from meshwright.hwprofiles import (
        Attention,
        Cluster,
        Precision,
        ProfileError,
        Recompute,
        StackProfile,
        StageSplit,
        list_clusters,
        list_stacks,
        load_cluster,
        load_stack,
    )
    from meshwright.planner import Change, SearchResult, SpaceLimits, cheapest_changes
    from meshwright.planner.cli.importer import import_plan
    from meshwright.planner.compare import Comparison, compare
    from meshwright.planner.explain import explain
    from meshwright.planner.export import export
    from meshwright.planner.options import Command, OptionGroup
    from meshwright.planner.search import search
    from meshwright.planner.sweep import SweepResult, sweep
    from meshwright.simulator import (
        ModelSpec,
        ParallelPlan,
        PlanError,
        ResolvedPlan,
        StepResult,
        TrainingJob,
        list_models,
        load_model,
        resolve,
        resolve_stages,
        simulate,
    )
    from meshwright.validate.agreement import validate_plan
    from meshwright.validate.scripts import count

__all__ = [
    "Attention",
    "Change",
    "Cluster",
    "Comparison",
    "ModelSpec",
    "ParallelPlan",
    "PlanError",
    "Precision",
    "ProfileError",
    "Recompute",
    "ResolvedPlan",
    "SearchResult",
    "SpaceLimits",
    "StackProfile",
    "StageSplit",
    "StepResult",
    "SweepResult",
    "TrainingJob",
    "cheapest_changes",
    "compare",
    "count",
    "explain",
    "export",
    "import_plan",
    "list_clusters",
    "list_models",
    "list_stacks",
    "load_cluster",
    "load_model",
    "load_stack",
    "main",
    "resolve",
    "resolve_stages",
    "search",
    "simulate",
    "sweep",
    "validate_plan",
]

__version__ = "0.1.0"  # of the distribution, kept in one place; pyproject.toml reads it here

# What help says of each command; a command is imported when it is run.
COMMANDS = {
    "search": "Find the fastest layouts of a model on a cluster, with a proof.",
    "simulate": "Simulate one training step of a layout.",
    "explain": "Explain the time and the memory of a plan: causes, resources, neighbours.",
    "compare": "Compare plans, or a model's best plans on several stacks, term by term.",
    "sweep": "Find the best layout of every combination of options and facts.",
    "matmul": "Multiply matrices on several devices: every signature, its bytes and its time.",
    "validate": "Compare what a plan is predicted to do with what its ranks do.",
    "count": "Count what one rank of a training script computes, sends and holds, without GPUs.",
    "calibrate": "Measure this machine, or read what was measured, and write profiles of it.",
    "export": "Write a plan as the configuration of a framework.",
    "import": "Read a framework's configuration as a plan.",
    "models": "List the built-in models, or show one.",
    "clusters": "List the built-in clusters, or show one with its device, links and sources.",
    "stacks": "List the built-in software stacks, or show one with its sources.",
    "schedules": "List the pipeline schedules, or show one.",
}
USER_MISTAKE = 2
# Where public names are looked for, those that import least first.
PACKAGES = (
    *("hwprofiles", "simulator", "planner", "planner.compare", "planner.sweep"),
    *("planner.explain", "planner.export", "planner.cli.importer"),
    *("validate.agreement", "validate.scripts"),
)


def __getattr__(name: str) -> object:
    """Return a public name of one of the packages, imported when first asked for."""
    if name in __all__:
        from meshwright.faces import lazy_name

        return lazy_name(__name__, PACKAGES, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the public names, imported or not."""
    return __all__


def main(arguments: "Sequence[str] | None" = None) -> int:
    """Run the command line and return its exit status.

    Args:
        arguments: The words after ``meshwright``; by default those of the process.

    >>> main(["--version"])
    meshwright 0.1.0
    0
    """
    from meshwright import ending

    argv = list(sys.argv[1:] if arguments is None else arguments)
    # Streams and signals belong to the process's own command: a caller of main(words) keeps his.
    if arguments is None and not ending.begin():
        return ending.print_error("standard output is closed", USER_MISTAKE)
    if arguments is None and argv[:1] != ["--version"]:
        ending.catch_signals()
        # These run PyTorch programs: BLAS threads and pydantic's plug-ins are theirs to choose.
        if argv[:1] not in (["validate"], ["count"], ["calibrate"]):
            _hasten_start()
    try:
        status = _run(argv)
        ending.write_output()
        if arguments is None:
            gc.freeze()  # what is left ends with the process: no need to look for garbage in it
    except KeyboardInterrupt:
        return ending.interrupted()
    except OSError as error:
        return ending.refused(error)
    except Exception as error:
        return ending.fault(error, argv)
    return status


def _hasten_start() -> None:
    """Skip start-up work that a process of one command does not need."""
    # Imports make many objects and hardly any garbage, and so does a search.
    gc.set_threshold(1_000_000, 20, 20)
    # Threads for products of matrices, which are none of ours; plug-ins of any package there is.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")


def _run(argv: list[str]) -> int:
    from meshwright.ending import print_error, write_output

    # Before any import of the command line: the version is asked for by scripts, often.
    if argv[:1] == ["--version"]:
        write_output(f"meshwright {__version__}\n")
        return 0
    from meshwright.command_line import run_command_line

    try:
        return run_command_line(COMMANDS, _command, argv)
    except ValueError as error:
        messages = _mistakes(error)
        if not messages:
            raise
        for message in messages:
            print_error(message, USER_MISTAKE)
        return USER_MISTAKE


def _mistakes(error: ValueError) -> "Sequence[str]":
    """Return the messages of a user's mistakes; none for a fault of ours."""
    from meshwright.command_line import UsageError

    if isinstance(error, UsageError):
        return [str(error)]
    from meshwright.hwprofiles import ProfileError
    from meshwright.simulator import MistakesError, PlanError

    if isinstance(error, MistakesError):
        return error.messages
    return [str(error)] if isinstance(error, PlanError | ProfileError) else []


def _command(name: str) -> "Command":
    """Return one of `COMMANDS`, with no more imported than it needs."""
    from meshwright.planner.options import as_command

    if name in {"validate", "count", "calibrate"}:
        from meshwright.validate import cli
        from meshwright.validate.calibration import CalibrateOptions, run_calibrate

        if name == "calibrate":
            return as_command(run_calibrate, CalibrateOptions)
        if name == "count":
            records = cli.CountOptions, cli.ValidateOutput
            return as_command(cli.run_count, *records, ends_in_words=True)
        return as_command(cli.run_validate, cli.ValidateOptions, cli.ValidateOutput)
    run, groups = _planning(name)
    return as_command(run, *groups)


def _planning(name: str) -> "tuple[Callable[..., int], tuple[type | OptionGroup, ...]]":
    """Return a command that needs no PyTorch, and its options."""
    from importlib import import_module

    from meshwright.planner import options

    job, layout, limits = options.JobOptions, options.LAYOUT, options.LIMITS
    money, output = options.MoneyOptions, options.OutputOptions
    replication, files = options.REPLICATION, options.FileOptions
    ranking, shared = options.RankingOptions, options.SHARED_JOB
    commands: dict[str, tuple[str, tuple[type | OptionGroup, ...]]] = {
        "search": ("cli.commands", (job, layout, limits, ranking, money, output)),
        "simulate": ("cli.commands", (job, layout, replication, files, money, output)),
        "explain": (
            "cli.explanations",
            (job, layout, replication, options.PlanOptions, options.JsonOptions),
        ),
        "compare": ("cli.explanations", (options.WordOptions, shared, layout, limits, output)),
        "sweep": ("sweep", (job, options.SweepOptions, options.SWEPT, money, output)),
        "export": ("cli.handover", (options.ExportOptions,)),
        "import": ("cli.importer", (options.ImportOptions, layout, replication)),
        "matmul": ("cli.commands", (options.MatmulOptions, output)),
        "models": ("cli.commands", (options.NameOptions,)),
        "clusters": ("cli.commands", (options.ProfileOptions,)),
        "stacks": ("cli.commands", (options.ProfileOptions,)),
        "schedules": ("cli.commands", (options.NameOptions,)),
    }
    module, groups = commands[name]
    return getattr(import_module(f"meshwright.planner.{module}"), f"run_{name}"), groups
