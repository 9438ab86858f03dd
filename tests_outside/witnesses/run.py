import sys, time
from dataclasses import replace
sys.path.insert(0, "tests_outside")
import torch
from meshwright.validate.cli import plan_of_words
from meshwright.validate.counting import RankOracle, fake_cluster
from meshwright.validate.ranks import RankMeasurement, predict_members, capped, usual_members
from meshwright.validate.runs.fake import run_counted, NUM_STEPS
from meshwright.validate.comparison import compare_rank, CheckVerdict
from witnesses.boundary import values_answered, objects_shared, modules_converted, gpu_answers
from contextlib import nullcontext

def named(calls):
    # Between two ranks Megatron-Core receives over the world's group (p2p_communication.py).
    return tuple(c._replace(axis="pp") if c.op in ("send","recv") else c for c in calls)

def count(saved, rank, make):
    with fake_cluster(rank, saved.plan.world_size), values_answered(), objects_shared(), modules_converted(), (gpu_answers() if sys.argv[1]=='megatron' else nullcontext()):
        program = make(saved)
        oracle = RankOracle(program.groups)
        with oracle:
            for _ in run_counted(program, oracle, NUM_STEPS): pass
        m = RankMeasurement(rank=rank, world_size=saved.plan.world_size, backend="fake", flops=oracle.flops,
            collectives=named(oracle.collectives), peak_bytes=oracle.peak_bytes, bytes_at_peak=oracle.bytes_at_peak)
        return m, oracle.largest_at_peak(40), oracle.flops_by_operator

if __name__ == "__main__":
    kind, words = sys.argv[1], sys.argv[2]
    if kind == "titan":
        from witnesses.torchtitan_job import TorchtitanJob as make
    elif kind == "megatron":
        from witnesses.megatron_job import MegatronJob as make
    else:
        from witnesses.huggingface_job import HuggingFaceJob as make
    saved = capped(plan_of_words(words, "dgx-a100"))
    print(words)
    ranks = [int(r) for r in sys.argv[3].split()] if len(sys.argv) > 3 and sys.argv[3] != "-v" else usual_members(saved)
    pred = predict_members(saved, ranks)
    for r in ranks:
        t = time.time()
        m, largest, ops = count(saved, r, make)
        print(f"rank {r}  {time.time()-t:.1f}s")
        for c in compare_rank(pred[r], m):
            if c.verdict is not CheckVerdict.PASSED:
                print(f"   {c.verdict} {c.quantity}: predicted {c.predicted:,} counted {c.measured:,} {(c.difference_fraction or 0):+.3%}")
        if "-v" in sys.argv:
            for g in largest: print(f"     {g.kind[:5]} {g.num_storages:4d} x {g.size_bytes:>12,} {g.where_made}")
            print(ops)
