"""The options of the command line as records, and the words that they are read from."""

from meshwright.planner.options.claims import claim, release_claims
from meshwright.planner.options.plan_options import (
    LAYOUT,
    LIMITS,
    REPLICATION,
    check_given,
    option_of,
)
from meshwright.planner.options.records import (
    MAX_GPUS,
    ExportOptions,
    FileOptions,
    ImportOptions,
    JobOptions,
    MatmulOptions,
    MoneyOptions,
    NameOptions,
    OutputOptions,
    ProfileOptions,
    RankingOptions,
    check_counts,
    read_memory_limit,
    read_price,
    read_tokens,
)
from meshwright.planner.options.words import (
    Given,
    OptionGroup,
    as_command,
    option_name,
    run_command_line,
)

__all__ = [
    "LAYOUT",
    "LIMITS",
    "MAX_GPUS",
    "REPLICATION",
    "ExportOptions",
    "FileOptions",
    "Given",
    "ImportOptions",
    "JobOptions",
    "MatmulOptions",
    "MoneyOptions",
    "NameOptions",
    "OptionGroup",
    "OutputOptions",
    "ProfileOptions",
    "RankingOptions",
    "as_command",
    "check_counts",
    "check_given",
    "claim",
    "option_name",
    "option_of",
    "read_memory_limit",
    "read_price",
    "read_tokens",
    "release_claims",
    "run_command_line",
]
