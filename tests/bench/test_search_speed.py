"""How fast commands start, a step is simulated, and a search is, which grows with the space alone.

Times of CPU are in *loops*: a loop is ten million additions in a plain Python function, timed in
the same run, so that a slower machine has slower loops, too.
"""

import os
import re
import resource
import subprocess
import sys
import time
from typing import Any, NamedTuple

import pytest

from meshwright.hwprofiles import load_cluster, load_stack
from meshwright.planner.search import search
from meshwright.simulator import ResolvedPlan, TrainingJob, load_model, simulate


class Job(NamedTuple):
    """A search, and the loops that it may take: a third more than on an idle machine."""

    model: str
    cluster: str
    num_gpus: int
    batch: int
    more: str
    most_loops: float


# The main jobs, of which the curve down to the least memory takes three loops, and large spaces.
JOBS = [
    Job("gpt3-175b", "dgx-a100", 3072, 1536, "", 14.0),
    Job("megatron-1t", "dgx-a100", 16_384, 4096, "", 10.0),
    Job("megatron-1t", "dgx-a100", 98_304, 12_288, "", 10.0),
    Job("llama3-70b", "dgx-h100", 256, 1024, "--stack torchtitan@0.2", 45.0),
    Job("llama4-maverick", "dgx-h100", 512, 512, "", 45.0),
    Job("deepseek-v3", "dgx-h100", 2048, 15_360, "--seq-len 4096", 35.0),
]
# What starting takes, of which Python's own start is 0.1 loops; a half of what is allowed.
STARTS = {
    "--version": 0.25,
    "--help": 0.5,
    "search gpt2 --cluster dgx-a100 --gpus 8 --global-batch 64": 4.5,
}
SPACE_SIZE = re.compile(rb"over ([\d,]+) layouts")
LAID_OUT = re.compile(rb"([\d,]+)\s+laid\s+out")
# The main job with two GPUs a sequence, on ever more GPUs: thousandfold, and much the same space.
GPU_COUNTS = [768, 3072, 12_288, 49_152, 196_608, 786_432]
# The high-water mark of the process itself; rusage would hold that of this one before the fork.
PROGRAM = """
import sys, meshwright
status = meshwright.main()
marks = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]
print(marks[0].split()[1], file=sys.stderr)
sys.exit(status)
"""


def add_up() -> int:
    total = 0
    for number in range(10**7):
        total += number
    return total


def loop_s() -> float:
    """Return the CPU seconds of a loop."""
    start_s = time.process_time()
    add_up()
    return time.process_time() - start_s


def search_command(job: Job) -> list[str]:
    words = f"--cluster {job.cluster} --gpus {job.num_gpus} --global-batch {job.batch} {job.more}"
    return [sys.executable, "-c", PROGRAM, "search", job.model, *words.split()]


def process_cpu_s(command: list[str]) -> float:
    """Return the CPU seconds of a whole process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


@pytest.mark.parametrize("words", STARTS)
def test_a_command_starts_in_few_loops(words: str) -> None:
    command = [sys.executable, "-m", "meshwright", *words.split()]
    most_s = STARTS[words] * loop_s()
    assert any(process_cpu_s(command) <= most_s for _ in range(5))


@pytest.mark.parametrize("job", JOBS, ids=str)
def test_a_whole_search_takes_few_loops(job: Job) -> None:
    command = search_command(job)
    assert any(process_cpu_s(command) / loop_s() <= job.most_loops for _ in range(2))


@pytest.mark.parametrize(
    ("model_name", "pp", "num_microbatches", "most_loops"),
    [("gpt3-175b", 32, 128, 0.06), ("megatron-1t", 64, 4096, 0.7)],
)
def test_a_simulation_takes_few_loops(
    model_name: str, pp: int, num_microbatches: int, most_loops: float
) -> None:
    """They take 0.03 loops, a half of that in the engine, if no rank is nearly full, and 0.35.

    Of 4,096 microbatches some 250 are run, as 64 go round the pipeline before it is as it was.
    """
    model = load_model(model_name)
    job = TrainingJob(model=model, global_batch_size=num_microbatches, seq_len=model.seq_len)
    stack = load_stack("megatron-core@0.12")
    step = job, ResolvedPlan(tp=8, pp=pp), load_cluster("dgx-a100"), stack
    times_s = []
    for _ in range(5):
        start_s = time.process_time()
        simulate(*step)
        times_s.append(time.process_time() - start_s)
    assert min(times_s) <= most_loops * loop_s()


@pytest.mark.bench
@pytest.mark.parametrize("words", STARTS)
def test_a_start(benchmark: Any, words: str) -> None:
    command = [sys.executable, "-m", "meshwright", *words.split()]
    times_s = [process_cpu_s(command) for _ in range(7)]
    benchmark.pedantic(process_cpu_s, args=(command,), rounds=1)
    benchmark.extra_info["least_cpu_s"] = min(times_s)
    benchmark.extra_info["loops"] = min(times_s) / min(loop_s() for _ in range(5))


@pytest.mark.bench
@pytest.mark.parametrize("job", JOBS, ids=str)
def test_a_whole_search_process(benchmark: Any, job: Job) -> None:
    command = search_command(job)
    usage: list[tuple[float, float]] = []
    sizes: set[tuple[int, ...]] = set()

    def run() -> None:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stderr is not None
        with process.stdout as document, process.stderr as stream:
            report = document.read()
            size = SPACE_SIZE.search(report)
            assert size is not None
            laid_out = LAID_OUT.search(report) or size
            sizes.add(tuple(int(each[1].replace(b",", b"")) for each in (size, laid_out)))
            errors = stream.read()
        _, status, spent = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == 0
        usage.append((spent.ru_utime + spent.ru_stime, int(errors.split()[-1]) / 1024))

    benchmark.pedantic(run, rounds=3, warmup_rounds=1)
    benchmark.extra_info["least_cpu_s"] = min(cpu for cpu, _ in usage)
    benchmark.extra_info["most_cpu_s"] = max(cpu for cpu, _ in usage)
    benchmark.extra_info["loops"] = min(cpu for cpu, _ in usage) / min(loop_s() for _ in range(3))
    benchmark.extra_info |= {"model": job.model, "num_gpus": job.num_gpus}
    (known,) = sizes
    benchmark.extra_info["space_size"], benchmark.extra_info["laid_out"] = known
    benchmark.extra_info["peak_mebi"] = max(memory for _, memory in usage)


@pytest.mark.bench
@pytest.mark.parametrize("num_gpus", GPU_COUNTS)
def test_search_time_against_gpus(benchmark: Any, num_gpus: int) -> None:
    model = load_model("gpt3-175b")
    job = TrainingJob(model=model, global_batch_size=num_gpus // 2, seq_len=model.seq_len)
    cluster, stack = load_cluster("dgx-a100"), load_stack("megatron-core")
    found = benchmark.pedantic(search, (job, cluster, stack, num_gpus), rounds=1)
    benchmark.extra_info["space_size"] = found.space_size
