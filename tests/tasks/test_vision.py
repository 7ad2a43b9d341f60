"""Vision tasks: augmentation, models, and a run on small files in the true format."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedact_flwr.client_app import app as client_app
from fedact_flwr.inprocess import run_inprocess
from fedact_flwr.server_app import app as server_app
from fedact_flwr.server_app import check
from fedact_flwr.settings import Settings, SettingsError, dump, parse, read_defaults
from tasks import TASKS
from tasks.augment import crop_and_flip
from tasks.images import load_images
from tasks.vision import ImageTask

VISION = [name for name, task in TASKS.items() if isinstance(task, ImageTask)]


def write_fashion(folder: Path, train: int = 120, test: int = 60, size: int = 28) -> Path:
    """Fashion-MNIST's files with images whose class is how bright their upper half is."""
    folder.mkdir(exist_ok=True)
    generator = np.random.default_rng(0)
    for stem, n in (("train", train), ("t10k", test)):
        labels = generator.integers(0, 10, n).astype(np.uint8)
        images = generator.integers(0, 60, (n, size, size)).astype(np.uint8)
        images[:, : size // 2] += (labels * 20)[:, None, None]
        for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
            header = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
            (folder / f"{stem}-{kind}-ubyte").write_bytes(header + array.tobytes())
    return folder


# ---- augmentation


def test_crops_shift_and_flips_mirror() -> None:
    """With 300 draws of one image, exactly the nine shifts of it and of its mirror image appear."""
    image = torch.arange(1, 13, dtype=torch.uint8).reshape(1, 1, 3, 4)
    torch.manual_seed(0)
    drawn = crop_and_flip(image.expand(300, -1, -1, -1), padding=1)
    padded = torch.nn.functional.pad(image, (1, 1, 1, 1))[0, 0]
    shifts = [padded[y : y + 3, x : x + 4] for y in range(3) for x in range(3)]
    allowed = {tuple(s.flatten().tolist()) for shift in shifts for s in (shift, shift.flip(1))}
    assert {tuple(d.flatten().tolist()) for d in drawn} == allowed
    assert len(allowed) == 18
    assert drawn.dtype == torch.uint8


def test_channels_move_together() -> None:
    image = torch.randint(0, 256, (1, 1, 8, 8), dtype=torch.uint8)
    drawn = crop_and_flip(torch.cat([image, 255 - image, image], dim=1).expand(20, -1, -1, -1), padding=2)
    assert (drawn[:, 0] == drawn[:, 2]).all()
    moved_in = drawn[:, 1] == 0
    assert ((drawn[:, 1] == 255 - drawn[:, 0]) | moved_in).all()


def test_augmentation_follows_the_seed() -> None:
    images = torch.randint(0, 256, (16, 3, 32, 32), dtype=torch.uint8)
    draws = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        draws.append(crop_and_flip(images, 4))
    assert (draws[0] == draws[1]).all()
    assert (draws[0] != draws[2]).any()


# ---- models


def settings_of(task: str, **own: Any) -> Settings:
    return parse(read_defaults() | {"task": task, "device": "cpu"} | own)


@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        # He et al. 2016: 11,689,512 with the ImageNet stem and head; here 3 x 3 x 3 x 64 and 512 x 10 + 10
        ("resnet18", 11_689_512 - 9_408 + 1_728 - 513_000 + 5_130),
        # 6 blocks of 12 w^2 + 13 w, w = 192; patches 4 x 4 x 3 x w + w, class token, 65 positions, norm, head
        ("vit_tiny", 6 * (12 * 192**2 + 13 * 192) + 49 * 192 + 192 + 65 * 192 + 2 * 192 + 1930),
        ("swin_lite", 2_159_260),
    ],
)
def test_models_have_the_shapes_of_the_paper(model: str, parameters: int) -> None:
    task = TASKS["cifar10"].configured(settings_of("cifar10", model=model))
    assert sum(p.numel() for p in task.make_model(0).parameters()) == parameters


def test_depths_and_widths_are_settings() -> None:
    def count(**own: Any) -> int:
        task = TASKS["cifar10"].configured(settings_of("cifar10", **own))
        return sum(p.numel() for p in task.make_model(0).parameters())

    assert count(vit_depth=12) - count(vit_depth=6) == 6 * (12 * 192**2 + 13 * 192)
    assert count(model="swin_lite", swin_width=96) > 3 * count(model="swin_lite")
    assert count(model="swin_lite", swin_depths="2,2") < count(model="swin_lite")
    convolutions = 9 * 3 * 64 + 9 * 64 * 128 + 2 * (64 + 128)
    assert count(model="small_cnn", cnn_width=64) == convolutions + 128 * 8**2 * 10 + 10
    assert count(model="mlp", mlp_width=30) == (3 * 32**2 + 1) * 30 + 31 * 30 + 31 * 10


@pytest.mark.parametrize(("task", "model"), [(task, model) for task in VISION for model in TASKS[task].models])
def test_every_model_takes_every_tasks_images(task: str, model: str) -> None:
    """Forward, backward and evaluation on three random images; the same seed gives the same model."""
    settings = settings_of(task, model=model, vit_depth=1)
    configured = TASKS[task].configured(settings)
    spec = configured.spec  # type: ignore[attr-defined]
    labels = torch.tensor([0, spec.classes - 1, 1])
    batch = {"image": torch.randint(0, 256, (3, *spec.shape), dtype=torch.uint8), "label": labels}
    net, same = configured.make_model(3), configured.make_model(3)
    assert all((a == b).all() for a, b in zip(net.parameters(), same.parameters(), strict=True))
    configured.loss(net, batch).backward()
    assert all(p.grad is not None for p in net.parameters())
    metrics = configured.evaluate(net, batch)
    assert metrics == configured.evaluate(net, batch)  # nothing random in the test transform
    assert 0 <= metrics["accuracy"] <= 1
    assert metrics["loss"] > 0


def test_models_that_a_task_does_not_have_are_refused() -> None:
    with pytest.raises(
        SettingsError, match=r"model = 'vit_tiny': allowed with task = 'digits' is one of vit, small_cnn$"
    ):
        settings_of("digits", model="vit_tiny")
    with pytest.raises(SettingsError, match=r"swin_width = 50: allowed is a .* above 0 and a multiple of 16$"):
        settings_of("cifar10", swin_width=50)
    with pytest.raises(SettingsError, match=r"swin_depths = '2;2': allowed is whole numbers above 0 with commas"):
        settings_of("cifar10", swin_depths="2;2")


# ---- runs


def test_a_run_on_fashion_mnists_files(tmp_path: Path, make_settings: Callable[..., Settings]) -> None:
    data = write_fashion(tmp_path / "fashion", train=400)
    settings = make_settings(
        task="fashion_mnist", model="small_cnn", data=str(data), clients=4, clients_per_round=4, split="iid",
        rounds=4, local_steps=15, lr=0.01, augment=False, name="run",
    )  # fmt: skip
    run_inprocess(server_app, client_app, 4, dump(settings))
    lines = (Path(settings.output) / "run" / "rounds.jsonl").read_text().splitlines()
    rounds = [json.loads(line) for line in lines]
    assert all(line["failures"] == 0 for line in rounds[1:])
    assert rounds[-1]["loss"] < 0.8 * rounds[1]["loss"]


def test_a_client_decodes_its_partition_once(
    tmp_path: Path, make_settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    original = ImageTask.train_examples

    def watched(self: ImageTask, indices: Any) -> Any:
        asked.append(len(indices))
        examples = original(self, indices)
        assert examples["image"].dtype == torch.uint8
        return examples

    monkeypatch.setattr(ImageTask, "train_examples", watched)
    data = write_fashion(tmp_path / "fashion")
    settings = make_settings(
        task="fashion_mnist", data=str(data), clients=3, clients_per_round=3, split="iid", rounds=3, local_steps=1,
        name="run",
    )  # fmt: skip
    run_inprocess(server_app, client_app, 3, dump(settings))
    assert asked == [40, 40, 40]


def test_packages_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ImageTask, "requires", ("PIL", "no_such_package"))
    with pytest.raises(SettingsError, match=r"task = 'cifar10': it needs .* not installed, no_such_package;"):
        check(settings_of("cifar10"))


def test_wrong_data_is_said_in_one_line_before_the_start(tmp_path: Path) -> None:
    load_images.cache_clear()
    for data, message in (
        (tmp_path / "none", r"data = '.*none': .*none is not there"),
        (write_fashion(tmp_path / "other", size=20), r"data = '.*other': .*images of shape \[120, 20, 20\]"),
    ):
        with pytest.raises(SettingsError, match=message) as caught:
            check(settings_of("fashion_mnist", data=str(data)))
        assert "\n" not in str(caught.value)
    few = write_fashion(tmp_path / "few", train=30)
    with pytest.raises(SettingsError, match=r"min_samples = 10: clients = 10 of that size need 100 .* there are 30"):
        check(settings_of("fashion_mnist", data=str(few)))


def test_what_is_wrong_with_the_test_data_is_said_before_the_start_too(tmp_path: Path) -> None:
    data = write_fashion(tmp_path / "fashion")
    (data / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(SettingsError, match=r"data = .*t10k-labels-idx1-ubyte\[\.gz\] is not there"):
        check(settings_of("fashion_mnist", data=str(data)))


def test_settings_of_another_task_are_refused() -> None:
    with pytest.raises(SettingsError, match=r"vit_depth = 12: digits has no such .* tasks with it: fashion_mnist, "):
        check(settings_of("digits", vit_depth=12))
