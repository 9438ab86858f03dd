"""The searches whose best plans are walked: at the sizes that people train."""

from dataclasses import dataclass, field

from meshwright.hwprofiles import Precision, load_cluster, load_stack
from meshwright.planner import SearchResult, SpaceLimits, search
from meshwright.planner.space import askable_values
from meshwright.simulator import TrainingJob, load_model
from meshwright.simulator.layout import PLAN_FIELDS


@dataclass(frozen=True, slots=True)
class Search:
    """A search: of what, on what, and within which limits."""

    model: str
    cluster: str
    num_gpus: int
    global_batch: int
    seq_len: int
    stack: str = "megatron-core"
    precision: Precision = Precision.BF16
    limits: dict[str, tuple[object, ...]] = field(default_factory=dict)

    def run(self, *, also_all: bool = False) -> SearchResult:
        """Return what the search finds, of all fields that can be asked for with *also_all*."""
        cluster, stack = load_cluster(self.cluster), load_stack(self.stack)
        job = TrainingJob(
            model=load_model(self.model),
            global_batch_size=self.global_batch,
            seq_len=self.seq_len,
            precision=self.precision,
        )
        asked = {
            each.name: known
            for each in PLAN_FIELDS.values()
            if also_all and len(known := askable_values(each, job, stack)) > 1
        }
        limits = SpaceLimits(**asked | self.limits)
        return search(job, cluster, stack, self.num_gpus, limits=limits, top=1)


SEARCHES = {
    "llama3-70b": Search("llama3-70b", "dgx-h100", 256, 512, 8192, stack="torchtitan"),
    "llama3-8b": Search("llama3-8b", "dgx-h100", 64, 256, 8192, stack="fsdp"),
    "gpt3-175b": Search("gpt3-175b", "dgx-a100", 3072, 1536, 2048),
    "llama3-405b": Search("llama3-405b", "dgx-h100", 1024, 512, 8192, precision=Precision.FP8),
    "mixtral-8x7b": Search("mixtral-8x7b", "dgx-h100", 128, 256, 4096),
    "deepseek-v3": Search("deepseek-v3", "dgx-h100", 2048, 15360, 4096),
}
