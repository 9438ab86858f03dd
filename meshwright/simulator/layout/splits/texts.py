"""Texts of stages: a rule's name, layer counts, or Megatron-Core's pipeline layout."""

import re

from meshwright.hwprofiles import StageSplit, counted, shown
from meshwright.simulator.errors import PlanError


def parse_stages(text: str) -> StageSplit | tuple[int, ...]:
    """Parse the value of ``--stages``: a rule's name, counts such as ``3,2,2,1``, or a layout.

    Raises:
        PlanError: If it is none of them.

    >>> parse_stages("3,2,1"), parse_stages("Et*3|(tt|)*2,L")
    ((3, 2, 1), (3, 2, 2, 0))
    """
    if text in list(StageSplit):
        return StageSplit(text)
    if LAYOUT_TEXT.fullmatch(text):
        return read_layout(text)
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        rules = ", ".join(StageSplit)
        raise PlanError(
            f"stages={shown(text)} is neither a rule ({rules}), nor layer counts such as 3,2,2,1, "
            "nor a layout such as Et*2|(t*3|)*2L"
        ) from None


# Alphabet of layouts, which no rule or list of numbers begins with.
LAYOUT_TEXT = re.compile(r"[E(][EtmL|()*,0-9]*")
REPEATED = re.compile(r"\(([^()]+)\)\*([0-9]{1,6})"), re.compile(r"([EtmL|])\*([0-9]{1,6})")
MAX_LAYOUT = 100_000  # letters: more than any model has layers and stages


def read_layout(text: str) -> tuple[int, ...]:
    """Return the layers of each virtual stage of a layout, in model order.

    It has a letter for the embedding (E), each layer (t), each MTP layer (m)
    and the loss (L), separates stages by ``|``, and repeats letters and groups, as ``t*4`` and
    ``(t|)*4``; commas are ignored (`PipelineParallelLayerLayout` of megatron/core/transformer, core
    0.16).  `check_mtp_layers` checks the number of m, `layout_mtp_stage` gives their stage.

    Raises:
        PlanError: If it is no such text, or has m ahead of layers or on several stages.

    >>> read_layout("E|(t|)*2,t*3L")
    (0, 1, 1, 3)
    """
    plain = _spelled_out(text)
    if re.fullmatch(r"E[tm|]*L", plain) and not re.fullmatch(r"E[t|]*m*\|*L", plain):
        raise PlanError(
            f"stages={shown(text)} has layers m that predict further tokens ahead of layers t or "
            "on several stages; allowed: all m on one stage, behind all t"
        )
    if not re.fullmatch(r"E[t|]*m*\|*L", plain):
        raise PlanError(
            f"stages={shown(text)} is no layout; allowed: E, layers t and stages | between them, "
            "layers m that predict further tokens, L"
        )
    return tuple(part.count("t") for part in plain.split("|"))


def check_mtp_layers(text: str, number: int) -> None:
    """Raise PlanError unless a layout has as many m as the model has MTP layers.

    Megatron-Core requires it (`validate_layer_layout` of its PipelineParallelLayerLayout).

    >>> check_mtp_layers("Et*3|t*2mL", 1), check_mtp_layers("3,2", 1)
    (None, None)
    """
    found = count_mtp_layers(text) if LAYOUT_TEXT.fullmatch(text) else number
    if found != number:
        said = f"stages={shown(text)} has {counted(found, 'layer')} m"
        raise PlanError(f"{said}; allowed: prediction_layers={number}")


def count_mtp_layers(text: str) -> int:
    """Return the number of MTP layers in a layout; 0 for a rule or counts.

    >>> count_mtp_layers("Et*3|t*2mL"), count_mtp_layers("3,2")
    (1, 0)
    """
    return _spelled_out(text).count("m") if LAYOUT_TEXT.fullmatch(text) else 0


def layout_mtp_stage(text: str, told: object = None) -> int | None:
    """Return the virtual stage of a layout's MTP layers, in model order; None if it is the loss's.

    Raises:
        PlanError: If ``prediction_stage``, *told*, is another one.

    >>> layout_mtp_stage("Et*3|t*2|m|L"), layout_mtp_stage("Et*3|t*2mL")
    (2, None)
    """
    is_layout = LAYOUT_TEXT.fullmatch(text) is not None
    ahead, m, behind = _spelled_out(text).partition("m") if is_layout else ("", "", "")
    found = ahead.count("|") if m and "|" in behind else None
    if told not in {None, found}:
        usual = "leave it out" if found is None else found
        raise PlanError(f"prediction_stage={told} is not that of stages={text}; allowed: {usual}")
    return found


def _spelled_out(text: str) -> str:
    """Return a layout with repetitions expanded; raises PlanError beyond `MAX_LAYOUT` letters."""
    plain = text.replace(",", "")
    for pattern in REPEATED:
        # Checked before expansion: a few nested repetitions would fill the memory.
        size = len(plain) + sum(len(each[1]) * int(each[2]) for each in pattern.finditer(plain))
        if size > MAX_LAYOUT:
            raise PlanError(f"stages={shown(text)} has more than {MAX_LAYOUT:,} letters")
        plain = pattern.sub(lambda match: match[1] * int(match[2]), plain)
    return plain
