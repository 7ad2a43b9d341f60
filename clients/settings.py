"""The settings that the client half reads."""

from typing import Annotated, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)

from clients.pflalign import Realign
from strategies.codecs import WireSettings


class LocalSettings(WireSettings):
    """Local training; pyproject.toml explains each setting. The learning rate comes with each round's message."""

    method: str
    local_optimizer: Literal["auto", "sgd", "adam", "adamw", "mgup_adamw", "cautious_adamw"]
    mu: NonNegativeFloat
    local_steps: PositiveInt
    local_epochs: NonNegativeInt
    batch_size: PositiveInt
    micro_batch_size: NonNegativeInt
    weight_decay: NonNegativeFloat
    momentum: Annotated[float, Field(ge=0, lt=1)]
    beta1: Annotated[float, Field(ge=0, lt=1)]
    beta2: Annotated[float, Field(ge=0, lt=1)]
    eps: PositiveFloat
    align_eps: PositiveFloat
    shrinkage: Literal["on", "off"]
    realign: Realign
    personal_delta: bool
    personal_layers: Annotated[
        str, Field(pattern=r"^[\w.]+(, *[\w.]+)*$", description='"auto" or names of layers with commas between')
    ]
    clip_norm: NonNegativeFloat
    precision: Literal["float32", "bfloat16"]
    compile: bool
    rho: Annotated[float, Field(ge=0, le=1)]
    tau: Annotated[float, Field(gt=0, le=1)]
    alpha: NonNegativeFloat | None
    gamma: NonNegativeFloat | None
    scope: Literal["global", "tensor"]
    diagnostics: bool
    top_p: Annotated[float, Field(gt=0, le=1)]
    device: Literal["auto", "cpu", "cuda", "mps"]
    threads: Annotated[int, Field(gt=0, le=1024)]
