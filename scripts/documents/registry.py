"""Every made region by its name, and which of them take long."""

from collections.abc import Callable
from difflib import get_close_matches
from typing import NamedTuple

from documents.makers import (
    accuracy,
    agreement,
    clusters,
    fits,
    gallery,
    layouts,
    matrices,
    models,
    peaks,
    plans,
    speed,
)
from documents.pages import DocumentError


class Place(NamedTuple):
    """Where a made region stands.

    Args:
        page: The whole page, with the regions made before it.
        text: What stands in the region; what is written by hand there is kept.
    """

    page: str
    text: str


Maker = Callable[[Place], str]


def _alone(make: Callable[[], str]) -> Maker:
    """Return the maker of what depends on nothing that is on the page."""
    return lambda _: make()


# A region that reads what another one of its page shows comes after it.
MAKERS: dict[str, Maker] = {
    "published layouts": _alone(layouts.published_layouts),
    "table 1": _alone(accuracy.narayanan_table),
    "gpt-3 days": _alone(layouts.gpt3_days),
    "walked searches": _alone(layouts.walked_searches),
    "errors by source": _alone(accuracy.errors_by_source),
    "every row": _alone(accuracy.every_row),
    "published peaks": _alone(peaks.published_peaks),
    "excluded peaks": _alone(peaks.excluded_peaks),
    "reserves": _alone(peaks.reserves),
    "acceptance": _alone(peaks.acceptance),
    "refused runs": _alone(peaks.refused_runs),
    "memory by kind": _alone(peaks.kinds),
    "bert times": _alone(accuracy.bert_times),
    "bert rates": _alone(accuracy.bert_rates),
    "bert adam": _alone(accuracy.bert_adam_efficiency),
    "sharded now": lambda place: accuracy.sharded_now(place.text),
    "experts now": lambda place: accuracy.experts_now(place.text),
    "hosts left out": _alone(fits.hosts_left_out),
    "waits left out": _alone(fits.waits_left_out),
    "mxfp8 left out": _alone(fits.mxfp8_left_out),
    "fp8 left out": _alone(fits.fp8_left_out),
    "torchtitan now": lambda place: accuracy.torchtitan_now(place.text),
    "times now": lambda place: accuracy.times_now(place.text),
    "memory now": lambda place: accuracy.memory_now(place.text),
    "strategies": lambda place: gallery.strategies(place.page),
    "bucket sizes": _alone(gallery.bucket_sizes),
    "offloaded fsdp2": _alone(gallery.offloaded_fsdp2),
    "largest models": _alone(gallery.largest_models),
    "plan fields": _alone(plans.plan_fields),
    "mesh axes": _alone(plans.axes),
    "signatures": _alone(matrices.signatures),
    "published stacks": _alone(clusters.published_stacks),
    "releases": _alone(clusters.releases),
    "stack defaults": _alone(clusters.stack_defaults),
    "silent hosts": _alone(clusters.silent_hosts),
    "cluster mistake": lambda place: clusters.mistake(place.page),
    "slurm script": _alone(clusters.slurm_script),
    "torchrun script": _alone(clusters.torchrun_script),
    "models and strategies": _alone(models.models_and_strategies),
    "resnet throughput": _alone(models.resnet_throughput),
    "four message": _alone(models.four_message),
    "four layouts": _alone(models.four_layouts),
    "textbook stages": _alone(models.textbook_stages),
    "agreement plans": _alone(agreement.plan_table),
    "agreement ranks": _alone(agreement.rank_table),
    "agreement hosts": _alone(agreement.host_table),
    "agreement outside": _alone(agreement.outside_table),
    "agreement farthest": lambda place: agreement.farthest(place.page),
    "search speed": _alone(speed.processes),
    "search growth": _alone(speed.growth),
    "starts": _alone(speed.starts),
}
SLOW = {
    "hosts left out": "ten minutes of fits",
    "waits left out": "four minutes of fits",
    "mxfp8 left out": "six minutes of fits",
    "fp8 left out": "half a minute of fits",
    "walked searches": "40 s; tests/planner/test_switch_walk.py walks small ones",
    "agreement ranks": "20 to 55 s a large plan; the gate compares a sample",
    "agreement hosts": "with the ranks; the gate compares all, which are small",
    "search speed": "times, which differ from run to run: never compared",
    "search growth": "times, which differ from run to run: never compared",
    "starts": "times, which differ from run to run: never compared",
}


def maker(name: str) -> Maker:
    """Return the function of a made region.

    Raises:
        DocumentError: If there is none of this name.
    """
    if name not in MAKERS:
        near = ", ".join(get_close_matches(name, MAKERS)) or ", ".join(MAKERS)
        raise DocumentError(f"unknown region {name!r}; nearest: {near}")
    return MAKERS[name]
