"""One process of the collectives' benchmark, started as a module by `bench`.

Standard input is the job as JSON. PyTorch takes seconds to import, so that it comes last: the
process must be able to end before.
"""

import os
import sys

from meshwright.validate.calibration.collectives.job import CollectiveJob
from meshwright.validate.processes import end_without


def main() -> None:
    """Read the job and take part in it."""
    job = CollectiveJob.loads(sys.stdin.read())
    end_without(job.parent)
    from meshwright.validate.calibration.collectives.benchmark_rank import run_benchmark_rank  # noqa: PLC0415

    run_benchmark_rank(job, int(os.environ["RANK"]))


if __name__ == "__main__":
    main()
