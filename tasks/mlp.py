"""A multilayer perceptron for images."""

from torch import nn


class MLP(nn.Sequential):
    """Two hidden layers of ``width`` with ReLU: at 200 the "2NN" of McMahan et al. 2017, arXiv:1602.05629.

    Images of ``inputs`` numbers each, of any shape (batch, ...), to logits of shape (batch, classes).
    """

    def __init__(self, inputs: int, classes: int, width: int) -> None:
        super().__init__(
            nn.Flatten(),
            nn.Linear(inputs, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, classes),
        )
