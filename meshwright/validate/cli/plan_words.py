"""Plan from the options of ``meshwright simulate``, as a user types them."""

import shlex

from meshwright.hwprofiles import shown
from meshwright.planner.cli import read_setting, resolve_plan, with_bucket_size
from meshwright.planner.options import (
    LAYOUT,
    REPLICATION,
    Given,
    JobOptions,
    as_command,
)
from meshwright.planner.reports import SavedPlan
from meshwright.simulator import PlanError


def plan_of_options(options: str, cluster_name: str) -> SavedPlan:
    """Return the plan that ``simulate OPTIONS --cluster CLUSTER`` writes with ``--out``.

    Raises:
        PlanError: If no plan can be so.
        ProfileError: If there is no such cluster or stack.

    >>> plan_of_options("gpt2 --gpus 8 --global-batch 8 --stack ddp", "dgx-h200").plan.dp
    8
    """
    plans: list[SavedPlan] = []

    # The parsed command calls this with its options; it keeps the plan.
    def keep(job: JobOptions, layout: Given, replication: Given) -> int:
        setting = with_bucket_size(read_setting(job), replication)
        plan = resolve_plan(setting, {**layout, **replication})
        cluster, stack = setting.cluster, setting.stack
        plans.append(SavedPlan(job=setting.job, plan=plan, cluster=cluster, stack=stack))
        return 0

    read = as_command(keep, JobOptions, LAYOUT, REPLICATION)
    typed = read.typed([*shlex.split(options), "--cluster", cluster_name])
    if typed is None:
        raise PlanError(f"{shown(options)} is not what simulate takes")
    read(typed)
    return plans[0]
