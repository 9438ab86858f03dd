"""Conditions of stacks' files: what they say of one plan and of many, and what is none."""

from typing import Any

import numpy as np
import pytest

from meshwright.hwprofiles import ProfileError
from meshwright.hwprofiles.conditions import Condition

WORDS: dict[object, int] = {"none": 0, "full": 2, True: 1, False: 0, None: 0}


class Numbers(dict[str, Any]):
    def number(self, name: str) -> Any:
        return self[name]

    def code(self, _name: str, value: object) -> int:
        return WORDS[value]


@pytest.mark.parametrize(
    ("text", "numbers", "holds"),
    [
        ("tp > 1 and not sequence_parallel", {"tp": 2, "sequence_parallel": 0}, True),
        ("tp > 1 and not sequence_parallel", {"tp": 2, "sequence_parallel": 1}, False),
        ("recompute in ['none', 'full']", {"recompute": 1}, False),
        ("recompute not in ['none', 'full']", {"recompute": 1}, True),
        ("recompute == 'full' or pp * vpp >= 4", {"recompute": 0, "pp": 2, "vpp": 2}, True),
        ("model.num_heads % tp != 0", {"model.num_heads": 12, "tp": 8}, True),
        ("etp != None", {"etp": 2}, True),
        ("model.experts", {"model.experts": False}, False),
    ],
)
def test_a_condition_holds_of_one_plan(text: str, numbers: dict[str, Any], holds: bool) -> None:  # noqa: FBT001
    assert bool(Condition(text).holds(Numbers(numbers))) is holds


def test_a_condition_holds_of_columns_of_plans() -> None:
    numbers = Numbers(tp=np.array([1, 2, 4]), cp=np.array([1, 1, 2]), shards=np.array([2, 3, 8]))
    found = Condition("tp > 1 and not cp > 1 or 16 % shards != 0").holds(numbers)
    assert found.tolist() == [False, True, False]
    assert Condition("tp > cp").names == {"tp", "cp"}


@pytest.mark.parametrize(
    "text",
    [
        *("__import__('os').system('x')", "a.b()", "[x for x in y]", "lambda: 1", "a[0]", "a := 1"),
        *("1 < a < 3", "a in b", "a == [1]", "a in []", "'s' * 9", "a > 2.5", "True", "tp and 's'"),
        *("a @ b", "a ** 9 > 1", "", "a >", "(" * 500, "a > 1 and " * 60 + "b", "f'{a}' == 'b'"),
    ],
)
def test_what_is_no_condition_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(ProfileError, match="is no condition; allowed: comparisons") as caught:
        Condition(text)
    assert "\n" not in str(caught.value)
