"""Texts of matrix products, placements and bytes, for tables and pictures."""

from fractions import Fraction

from meshwright.hwprofiles import KIBI, format_bytes
from meshwright.planner.matmul.study import shape_text
from meshwright.simulator.matmul import Boxing, Chain, LocalRun


def chain_text(chain: Chain) -> str:
    """Return the signatures of a chain in one line."""
    return " -> ".join(step.run.name for step in chain.steps)


def product_text(run: LocalRun) -> str:
    """Return the product that one device computes.

    >>> from meshwright.hwprofiles import Precision, load_cluster
    >>> from meshwright.planner.matmul.study import study_matmul
    >>> study = study_matmul(((4, 5), (5, 8)), 2, load_cluster("dgx-a100"), Precision.FP32)
    >>> product_text(study.chains[0].steps[0].run)
    '2x5 x 5x8 = 2x8'
    """
    a, b = run.shapes.inputs
    return f"{shape_text(a)} x {shape_text(b)} = {shape_text(run.shapes.out)}"


def boxing_text(boxing: Boxing) -> str:
    """Return the collectives of a change of placement, ``-`` where nothing is sent."""
    return ", ".join(boxing.op_names) or "-"


def format_sent(sent_bytes: Fraction) -> str:
    """Return bytes that one device sends, which need not be whole.

    >>> format_sent(Fraction(128)), format_sent(Fraction(64, 3)), format_sent(Fraction(0))
    ('128 B', '21.3 B', '-')
    """
    if not sent_bytes:
        return "-"
    if sent_bytes < KIBI:
        return f"{float(sent_bytes):.3g} B" if sent_bytes.denominator > 1 else f"{sent_bytes} B"
    return format_bytes(float(sent_bytes))
