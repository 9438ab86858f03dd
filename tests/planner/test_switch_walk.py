"""No switch that `simulate` has beats the proven best of a search: each is tried at every value."""

from dataclasses import replace

import pytest

from meshwright.hwprofiles import Offload, Precision, Recompute, RecomputeModule
from meshwright.simulator import ParallelPlan, ResolvedPlan, TrainingJob, load_model, simulate
from meshwright.simulator.layout import PLAN_FIELDS
from walking.run import run, walk_lines
from walking.searches import SEARCHES, Search
from walking.switches import LEFT_OUT, TURNS, turned, turns
from walking.walk import walk

# Of experts a part of the space, in which each switch of theirs is.
PINS: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("tp", "cp", "pp"), (1,)),
    "ep": (8,),
    "microbatch_size": (1, 2),
}


# What the host keeps is searched on fsdp and deepspeed: here it would take twice as long again.
ON_DEVICES: dict[str, tuple[object, ...]] = {"offload": (Offload.NONE,)}
SMALL = {
    "torchtitan": Search("llama3-70b", "dgx-h100", 32, 32, 8192, "torchtitan", limits=ON_DEVICES),
    "torchtitan in two replicas": Search(
        "llama3-8b", "dgx-h100", 16, 64, 4096, "torchtitan", limits=ON_DEVICES
    ),
    "fsdp": Search("gpt2-xl", "dgx-a100", 16, 64, 1024, stack="fsdp"),
    "ddp": Search("gpt2", "a100-4xhdr200", 16, 256, 1024, stack="ddp"),
    "deepspeed": Search("gpt2-xl", "dgx-a100", 16, 64, 1024, stack="deepspeed"),
    "megatron-core": Search("llama3-8b", "dgx-h100", 32, 64, 8192),
    "megatron-core with experts": Search("qwen3-30b-a3b", "dgx-h100", 16, 32, 4096, limits=PINS),
    "megatron-lm-2021": Search(
        "gpt2-xl", "dgx-a100", 16, 32, 1024, stack="megatron-lm-2021", precision=Precision.FP16
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_no_switch_beats_the_proven_best(name: str) -> None:
    walked = walk(SMALL[name].run(also_all=True))
    assert walked.result.optimal
    assert walked.faults == []
    assert walked.num_simulated > 5


def test_what_is_faster_and_was_searched_is_at_fault() -> None:
    result = SMALL["fsdp"].run()
    (best,) = result.plans
    slower = replace(best.plan, recompute=Recompute.FULL)
    worse = simulate(result.job, slower, result.cluster, result.stack)
    walked = walk(replace(result, plans=(worse,)))
    assert walked.faults == walked.faster
    assert {"recompute": best.plan.recompute} in [each.change.fields for each in walked.faults]
    assert walked.faster[0].change.slower_fraction < 0
    fastest = walked.faults[0].change
    more = f", {len(walked.faults) - 1} more" if len(walked.faults) > 1 else ""
    said = f"{fastest.slower_fraction:+.2%} `{fastest.options}`{more} (FAULT)"
    assert walk_lines(walked) == [said]


def test_every_field_of_a_plan_is_turned_or_left_out_with_a_reason() -> None:
    job = TrainingJob(model=load_model("gpt2"), global_batch_size=8, seq_len=1024)
    plan = ResolvedPlan(cp=2, dp=4, stages=(12,))
    for name, field in PLAN_FIELDS.items():
        if name in LEFT_OUT:
            assert name not in TURNS
            assert LEFT_OUT[name]
        else:
            assert len([*turns(field, plan, job)]) > 1
    new = PLAN_FIELDS["cp_inner"]._replace(name="number_of_a_new_field")
    with pytest.raises(KeyError, match=new.name):
        turns(new, plan, job)


def test_a_turned_plan_differs_in_what_is_said_of_it() -> None:
    job = TrainingJob(model=load_model("gpt2"), global_batch_size=8, seq_len=1024)
    step = simulate(job, ParallelPlan(pp=2, dp=4), "dgx-a100")
    plan, found = step.plan, list(turned(step))
    assert plan not in [other for _, other in found]
    modules = ({"recompute", "recompute_modules"}, 2 ** len(RecomputeModule) - 1)
    for fields, number in (({"dp", "tp"}, 2), ({"offload"}, 2), ({"microbatch_size"}, 1), modules):
        assert sum(set(each) == fields for each, _ in found) == number, fields
    for fields, other in found:
        for name, value in fields.items():
            # Of the stack's own value, None, the plan has what that is.
            assert name == "stages" or value is None or getattr(other, name) == value


def test_the_script_says_what_is_faster(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["llama3-8b"]) == 0
    found, last = capsys.readouterr().out.splitlines()
    assert found.startswith("llama3-8b: 4.736 s proven, ")
    assert " switched, 0 faster, 0 at fault; " in found
    assert last == "0 at fault"
    with pytest.raises(SystemExit):
        run(["gpt2"])
    assert f"known: {', '.join(SEARCHES)}" in capsys.readouterr().err
