"""Library and command line mean the same plan: the same bytes, and the same words of refusals."""

import random
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest

from meshwright import ParallelPlan, main, simulate
from meshwright.hwprofiles import Strategy, list_stacks, load_cluster, load_stack
from meshwright.planner.changes import cheapest_changes
from meshwright.planner.options import option_of
from meshwright.planner.reports import json_text, step_document
from meshwright.planner.space import SpaceLimits, enumerate_space
from meshwright.planner.space.rules import lacks
from meshwright.simulator import PlanError, TrainingJob
from meshwright.simulator.layout import (
    PLAN_FIELDS,
    ParameterServer,
    PlanField,
    default_precision,
    minimal_options,
)

NUM_PLANS, GPUS, BATCH, SEQ_LEN = 200, 8, 32, 1024
LEAST_ACCEPTED = 150
CLUSTER = "dgx-h200"
MODELS = "gpt2", "mixtral-8x7b"
# Of integers, which a search has any of, those that are tried.
NUMBERS: dict[str, tuple[object, ...]] = {
    "zero_stage": (0, 1, 2, 3),
    "recompute_layers": (1, 2),
    "offload_layers": (1, 2),
    "offload_modules": ("core_attn", "core_attn,attn_proj"),
    "microbatch_group_size": (2, 4),
    "prediction_stage": (1,),
    "stages": ("even", "balanced", "3,3,3,3"),
    "recompute_modules": ("mlp", "core_attn,layernorm"),
    "parameter_server": ({"servers": "all"}, {"asynchronous": True}),
}


class Asked(NamedTuple):
    """A plan as somebody may ask for it."""

    model: str
    stack: str
    said: dict[str, Any]

    @property
    def words(self) -> list[str]:
        """The command that asks for it."""
        start = ["simulate", self.model, "--cluster", CLUSTER, "--gpus", str(GPUS)]
        job = ["--global-batch", str(BATCH), "--seq-len", str(SEQ_LEN), "--stack", self.stack]
        options = [word for name, value in self.said.items() for word in typed(name, value)]
        return [*start, *job, *options]


def typed(name: str, value: Any) -> Iterator[str]:
    """Yield the words of an option."""
    if isinstance(value, ParameterServer):
        value = {each: getattr(value, each) for each in ("servers", "asynchronous", "slow_worker")}
    if isinstance(value, dict):
        for each, one in value.items():
            yield from typed(each, one)
        return
    option = option_of(name)
    if isinstance(value, bool):
        yield option if value else f"--no-{option[2:]}"
        return
    yield option
    yield ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


@cache
def offered(model: str, stack_name: str) -> tuple[TrainingJob, list[Any]]:
    """Return a job, and layouts of it that a stack offers."""
    stack, cluster = load_stack(stack_name), load_cluster(CLUSTER)
    precision = default_precision(cluster.device, stack)
    job = TrainingJob(model=model, global_batch_size=BATCH, seq_len=SEQ_LEN, precision=precision)
    if stack.strategy is not Strategy.MESH:
        return job, []
    space = enumerate_space(job, stack, GPUS, SpaceLimits(max_microbatch_size=2))
    return job, [*map(space.plan, np.flatnonzero(~lacks(space)).tolist())]


def values_of(field: PlanField) -> tuple[object, ...]:
    return NUMBERS.get(field.name) or field.choices or (1, 2)


def asked_plans() -> Iterator[Asked]:
    """Yield plans: of a search, with some of their fields said, and every fifth with another."""
    draw, stacks, number = random.Random(32), list_stacks(), 0
    fields = [*PLAN_FIELDS.values()]
    while number < NUM_PLANS:
        stack, model = stacks[number % len(stacks)], draw.choice(MODELS)
        job, plans = offered(model, stack)
        if job.experts is not None and "experts" not in load_stack(stack).layer_facts:
            model, (job, plans) = MODELS[0], offered(MODELS[0], stack)
        said: dict[str, Any] = {}
        if plans:
            plan = draw.choice(plans)
            said = minimal_options(job, load_cluster(CLUSTER), load_stack(stack), plan)
            more = {each: getattr(plan, each) for each in draw.sample([*PLAN_FIELDS], 8)}
            said |= {name: each for name, each in more.items() if each is not None and each != ()}
        elif draw.random() < 0.5:
            said = {"microbatch_size": draw.choice((1, 2))}
        if number % 5 == 0:
            field = fields[number // 5 % len(fields)]
            said[field.name] = draw.choice(values_of(field))
        number += 1
        yield Asked(model, stack, said)


def of_library(asked: Asked) -> str:
    """Return the document, or the words of the refusal, in Python."""
    job, _ = offered(asked.model, asked.stack)
    try:
        plan = ParallelPlan(**asked.said)
        result = simulate(job, plan, CLUSTER, asked.stack, num_gpus=GPUS)
        return json_text(step_document(result, changes=cheapest_changes(result)))
    except PlanError as error:
        return f"error: {error}\n"


def test_library_and_command_mean_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    accepted, told = 0, set[str]()
    for asked in asked_plans():
        status = main([*asked.words, "--json", "-"])
        printed = capsys.readouterr()
        assert status in (0, 1, 2), asked
        said = printed.err if status == 2 else printed.out
        assert of_library(asked) == said, asked
        accepted += status < 2
        told |= asked.said.keys()
    assert accepted >= LEAST_ACCEPTED
    assert told == {*PLAN_FIELDS}
