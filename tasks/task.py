"""What a task offers: data, a model, a loss and metrics. Write one as a class with these members and name it in
`tasks.TASKS`; docs/add-a-task.md shows one in full."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, Protocol, TypedDict

from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, PositiveInt
from torch import Tensor, nn

# Tensors by name, e.g. {"image": (n, 1, 8, 8), "label": (n,)}; their first dimension counts the examples.
Examples = Mapping[str, Tensor]


# Families of local optimizers: decoupled decay, coupled decay, SGD.
Family = Literal["adamw", "adam", "sgd"]


class Defaults(TypedDict, total=False):
    """Values of settings that stand at "auto"."""

    lr: float
    weight_decay: float
    beta1: float
    beta2: float
    server_lr: float


class TaskSettings(BaseModel):
    """The settings that a task reads; pyproject.toml explains each."""

    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False)

    data: str
    model: str
    augment: bool
    vit_depth: PositiveInt
    swin_width: Annotated[int, Field(gt=0, multiple_of=16)]
    swin_depths: Annotated[str, Field(pattern=r"^[1-9]\d*(,[1-9]\d*)*$")]


class Task(Protocol):
    """One data set with the model that learns it. Everything here is a pure function of its arguments."""

    summary: str  # one line for people
    target: str  # the metric that ranks models, e.g. "accuracy"; higher is better
    requires: Sequence[str]  # packages that it imports and not every installation has
    models: Sequence[str]  # the names that the setting ``model`` allows; "auto" is the first
    defaults: Mapping[str, Defaults]  # by family of the local optimizer, all three; a method's name goes before it

    def configured(self, settings: TaskSettings) -> "Task":
        """This task as the settings say; itself where none concerns it."""

    def train_labels(self) -> NDArray:
        """The class of each training example, shape (n,), int64: what a split goes by."""

    def train_examples(self, indices: NDArray) -> Examples:
        """The training examples at ``indices``, on the CPU."""

    def test_examples(self) -> Examples:
        """The held-out examples of the global evaluation, on the CPU."""

    def make_model(self, seed: int) -> nn.Module:
        """A freshly initialised model, float32 on the CPU."""

    def loss(self, model: nn.Module, batch: Examples) -> Tensor:
        """The mean training loss over the batch, a scalar."""

    def evaluate(self, model: nn.Module, examples: Examples) -> dict[str, float]:
        """Means over all examples: ``loss`` and further metrics, ``target`` among them. Model in eval mode."""
