"""What a user writes: mypy checks it with the types of the public names, and a test runs it."""

from typing import assert_type

from meshwright import (
    ParallelPlan,
    StepResult,
    TrainingJob,
    load_cluster,
    load_model,
    load_stack,
    search,
    simulate,
)

model, cluster, stack = load_model("gpt2"), load_cluster("dgx-a100"), load_stack("megatron-core")
job = TrainingJob(model=model, global_batch_size=64, seq_len=model.seq_len)
step = simulate(job, ParallelPlan(tp=2, pp=2, dp=4), cluster, stack)
best = search(job, cluster, stack, 16, top=1).plans[0]
assert_type(best, StepResult)
assert step.plan.stages == (6, 6)
assert best.step_time_s <= step.step_time_s
print(best)  # noqa: T201
