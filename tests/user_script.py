"""What a user writes: mypy checks it with the types of the public names, and a test runs it."""

from typing import assert_type

from meshwright import (
    Comparison,
    ResolvedPlan,
    StepResult,
    SweepResult,
    TrainingJob,
    load_cluster,
    load_model,
    load_stack,
    search,
    simulate,
    sweep,
)

model, cluster, stack = load_model("gpt2"), load_cluster("dgx-a100"), load_stack("megatron-core")
job = TrainingJob(model=model, global_batch_size=64, seq_len=model.seq_len)
step = simulate(job, ResolvedPlan(tp=2, pp=2, dp=4), cluster, stack)
best = search(job, cluster, stack, 16, top=1).plans[0]
assert_type(best, StepResult)
assert step.plan.stages == (6, 6)
assert best.step_time_s <= step.step_time_s
assert best.to_dict()["plan"]["tp"] == best.to_frame()["tp"][0] == best.plan.tp
both = Comparison(names=("as told", "best"), steps=(step, best))
assert set(both.to_frame()["plan"]) == {"as told", "best"}
swept = sweep({"tp": [1, 2]}, model="gpt2", cluster="dgx-a100", gpus=16, global_batch=64, pp=2)
assert_type(swept, SweepResult)
assert list(swept.to_frame()["tp"]) == [1, 2]
print(best)  # noqa: T201
