"""A launch script without the options that its import refused: a second look at the rest of it."""

import re
from collections.abc import Sequence

NAMED = re.compile(
    r"'([a-z][\w-]+)' of megatron-lm is unknown"
    r"|(?:^|\s)([a-z][\w-]*)=[^\n]* of megatron-lm is in no plan"
    r"|--([a-z][\w-]+) has no value"
)
OTHER_MODEL = "the model of the file is not"
VOCABULARY = "--tokenizer-type NullTokenizer --vocab-size 51199"
# What decides a layout stays, even if it is refused.
KEPT = {
    "tensor-model-parallel-size",
    "pipeline-model-parallel-size",
    "micro-batch-size",
    "global-batch-size",
    "num-layers",
    "hidden-size",
    "bf16",
    "fp16",
}
# Up to the next option, the end of the line, or a variable with further options.
WORDS = r"""([ =]+(?!--|\\|\n|"|$|\$\{\w*(?:ARGS|options|OPTIONS)|'?\))(?:"[^"\n]*"|[^\s"\\]+))*"""


def refused_options(refusal: str) -> list[str]:
    """Return the options that a refusal names as of no plan.

    >>> refused_options("'tp-comm-x' of megatron-lm is unknown; --save has no value")
    ['tp-comm-x', 'save']
    """
    found = (name for names in NAMED.findall(refusal) for name in names if name)
    return [name for name in dict.fromkeys(found) if name not in KEPT]


def without(text: str, options: Sequence[str]) -> str:
    r"""Return a script without options and their words.

    >>> without("  --moe-x 1 2 \\\n  --bf16 --moe_x=3", ["moe-x"])
    '   \\\n  --bf16 '
    """
    for name in options:
        spelled = name.replace("-", "[-_]")
        text = re.sub(rf"(?<![\w-])--{spelled}(?![\w-]){WORDS}", "", text)
    return text


def left_out(text: str, refusal: str) -> str:
    """Return a script without what a refusal names, and with a vocabulary where it has none."""
    found = without(text, refused_options(refusal))
    if OTHER_MODEL in refusal and VOCABULARY not in found:
        found = without(found, ["tokenizer-type"])
        found = found.replace("--num-layers", f"{VOCABULARY} --num-layers")
    return found
