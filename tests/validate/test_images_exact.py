"""A residual network's parts beside PyTorch: every byte and every FLOP, in fp32 and cast."""

from itertools import product

import pytest

pytest.importorskip("torch")

import torch
from block_graph import GraphCase
from block_modules import BATCH, MODULES, Bottleneck, convolved
from block_witness import Given, measure_module
from image_graphs import IMAGE_GRAPHS, PARTS, RUNS, SMALL
from torch import Tensor, nn

from meshwright.simulator.graph import WeightGradients
from meshwright.simulator.model import parameter_tensors


class Stem(nn.Module):
    """What comes first; images have no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(
            convolved(SMALL.channels, SMALL.stem_channels, 7, 2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.first(images.detach())


class Classifier(nn.Module):
    """What comes last, but for the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SMALL.layers[-1].out_channels, SMALL.num_classes)

    def forward(self, values: Tensor) -> Tensor:
        return self.linear(values.mean((2, 3)))


def made(part: str) -> nn.Module:
    """Return the module of a part."""
    if part == "stem":
        return Stem()
    if part == "classifier":
        return Classifier()
    kind = SMALL.layers[list(PARTS).index(part) - 1]
    return Bottleneck(kind.in_channels, kind.inner_channels, kind.out_channels, kind.stride)


def given_to(part: str, *, casts: bool) -> Given:
    """Return the input of a part: what the one before it makes."""
    if part == "stem":
        return Given((BATCH, SMALL.channels, SMALL.image_size, SMALL.image_size), torch.float32)
    layers = SMALL.layers
    if part == "classifier":
        channels, side = layers[-1].out_channels, layers[-1].out_side
    else:
        kind = layers[list(PARTS).index(part) - 1]
        channels, side = kind.in_channels, kind.side
    return Given((BATCH, channels, side, side), torch.bfloat16 if casts else torch.float32)


@pytest.mark.parametrize("name", IMAGE_GRAPHS)
def test_an_operator_is_byte_exact(name: str) -> None:
    assert IMAGE_GRAPHS[name].derive() == MODULES[name].measure()


@pytest.mark.parametrize(("part", "run"), [*product(PARTS, RUNS)])
def test_a_part_of_a_residual_network_is_byte_exact(part: str, run: str) -> None:
    how = RUNS[run]
    measured = measure_module(
        lambda: made(part),
        given_to(part, casts=how.lowering.casts),
        dtype=torch.float32,
        keeps_gradients=how.lowering.weight_gradients is WeightGradients.KEPT,
        casts=how.lowering.casts,
    )
    graph = GraphCase(build=PARTS[part], width=how.width, lowering=how.lowering)
    assert graph.derive() == measured


def test_weights_are_those_of_the_modules() -> None:
    shapes = [tuple(each.shape) for part in PARTS for each in made(part).parameters()]
    tensors = [each.shape for each in parameter_tensors(SMALL)]
    assert sorted(shapes) == sorted(tensors)
