"""What a task offers: data, a model, a loss and metrics.

Write one as a subclass of `Task` and name it in `tasks.TASKS`; docs/add-a-task.md shows one in full.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, Self, TypedDict

from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt
from safetensors.torch import save_model
from torch import Tensor, nn

MODEL_FILE = "model.safetensors"

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
    cnn_width: PositiveInt
    mlp_width: PositiveInt
    swin_depths: Annotated[
        str, Field(pattern=r"^[1-9]\d*(,[1-9]\d*)*$", description="whole numbers above 0 with commas between")
    ]
    partition_column: str
    max_train_rows: NonNegativeInt
    max_test_rows: NonNegativeInt
    tokenizer: str
    max_length: Annotated[int, Field(ge=2)] | None
    gradient_checkpointing: bool
    base_precision: Literal["float32", "bfloat16", "int8", "nf4"]
    lora_r: PositiveInt | None
    lora_alpha: PositiveInt | None
    lora_dropout: Annotated[float, Field(ge=0, lt=1)]
    lora_targets: Annotated[str, Field(pattern=r"^\w+(,\w+)*$", description="names of modules with commas between")]
    dpo_beta: PositiveFloat


class BadData(ValueError):
    """The data, or a file beside it, can't be read as what it should be.

    The message says what is wrong, and where; ``key`` is the setting that names it.
    """

    def __init__(self, message: str, key: str = "data") -> None:
        super().__init__(message)
        self.key = key


def first_line(error: BaseException) -> str:
    """What a library's error says, for a message of one line."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


# As the last of `Task.models`: any folder or name on the Hugging Face hub is a model too.
ANY_MODEL = "a folder or hub name"


class Task(ABC):
    """One data set with the model that learns it. Everything here is a pure function of its arguments."""

    summary: str  # one line for people
    target: str = "accuracy"  # the metric that ranks models
    higher_is_better: bool = True  # of the target
    requires: Sequence[str] = ()  # packages that it imports and not every installation has
    settings_used: Sequence[str] = ()  # those of `TaskSettings`, but for model, that concern it
    models: Sequence[str]  # the names that the setting ``model`` allows; "auto" is the first
    defaults: Mapping[str, Defaults]  # by family of the local optimizer, all three; a method's name goes before it

    def configured(self, settings: TaskSettings) -> Self:
        """This task as the settings say; itself where none concerns it."""
        return self

    def check(self, train: bool = True, test: bool = True) -> None:
        """Raise `BadData` for what would fail in a run: wrong training or test data, and more in a task's own check."""
        if train:
            self.train_labels()
        if test:
            self.test_examples()

    @abstractmethod
    def train_labels(self) -> NDArray:
        """The class of each training example, shape (n,), int64: what a split goes by."""

    @abstractmethod
    def train_examples(self, indices: NDArray) -> Examples:
        """The training examples at ``indices``, on the CPU."""

    @abstractmethod
    def test_examples(self) -> Examples:
        """The held-out examples of the global evaluation, on the CPU."""

    @abstractmethod
    def make_model(self, seed: int) -> nn.Module:
        """A freshly initialised model on the CPU; what trains is float32.

        It may be an object that was returned before: whoever uses one loads its state first.
        """

    @abstractmethod
    def loss(self, model: nn.Module, batch: Examples) -> Tensor:
        """The mean training loss over the batch, a scalar."""

    def terms(self, batch: Examples) -> int:
        """How many terms the mean of ``loss`` has; the examples, unless it is over something else, such as tokens."""
        return len(next(iter(batch.values())))

    @abstractmethod
    def evaluate(self, model: nn.Module, examples: Examples) -> dict[str, float]:
        """Means over all examples: ``loss`` and further metrics, ``target`` among them. Model in eval mode."""

    def save(self, model: nn.Module, folder: Path) -> None:
        """Write the final model to ``folder``, a run's record, for others to load."""
        save_model(model, str(folder / MODEL_FILE))
