"""Labelled images from the Hugging Face hub or from a local path, as uint8 arrays.

A local path may be what `datasets` saves (``save_to_disk`` or parquet), a folder of images by class, the original
archive of CIFAR, the idx files of Fashion-MNIST, or the unpacked original of Tiny ImageNet.
"""

import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.archives import CIFAR_FILES, CIFAR_SHAPE, read_cifar, read_idx
from tasks.hub import load_from_hub
from tasks.task import BadData, first_line

SPLITS = ("train", "test", "valid", "validation", "val")


@dataclass(frozen=True)
class ImageSpec:
    """What a data set of images is.

    Attributes
    ----------
    hub : str
        Its name on the Hugging Face hub.
    image, label : str
        Names of the columns there.
    splits : (str, str)
        Names of the training and of the test split there.
    shape : (int, int, int)
        Of an image: channels, height, width.
    classes : int
    """

    hub: str
    image: str
    label: str
    splits: tuple[str, str]
    shape: tuple[int, int, int]
    classes: int


@dataclass(frozen=True)
class Images:
    """One split. ``read(indices)`` gives their images, uint8 of shape (len(indices), channels, height, width).

    Only what is asked for is decoded. ``labels`` are int64 of shape (n,).
    """

    labels: NDArray
    read: Callable[[NDArray], NDArray]


@lru_cache(maxsize=4)
def load_images(spec: ImageSpec, data: str, train: bool) -> Images:
    """The training or test split from ``data``, a local path, or "auto" for the hub. Raises `BadData`."""
    if data == "auto":
        return _checked(spec, f"{spec.hub}", _from_hub(spec, train))
    path = Path(data).expanduser()
    if not path.exists():
        raise BadData(f"{path} is not there")
    try:
        return _checked(spec, str(path), _reader(path)(spec, path, train))
    except OSError as error:  # a file that this user may not read
        raise BadData(f"{error.filename or path}: {error.strerror or error}") from error


def _reader(path: Path) -> Callable[[ImageSpec, Path, bool], Images]:
    """Which format lies at ``path``."""
    if path.suffix == ".zip":
        raise BadData(f"{path} is a zip archive; unpack it and set data to its folder")
    if path.is_file():
        return _from_parquet if path.suffix == ".parquet" else _from_cifar
    formats: list[tuple[Callable[[ImageSpec, Path, bool], Images], str]] = [
        (_from_disk, "dataset_dict.json"),
        (_from_disk, "dataset_info.json"),
        (_from_parquet, "**/*.parquet"),
        (_from_cifar, "**/*_batch*"),
        (_from_cifar, "**/train.bin"),
        (_from_cifar, "**/train"),
        (_from_cifar, "cifar*.tar.gz"),
        (_from_idx, "train-images-idx3-ubyte*"),
        (_from_tiny_imagenet, "val/val_annotations.txt"),
        (_from_folder, "train/*/"),
    ]
    for reader, sign in formats:
        if any(found.is_dir() == sign.endswith("/") for found in path.glob(sign)):
            return reader
    raise BadData(
        f"{path} holds no format known here: save_to_disk, parquet, a CIFAR archive, idx files, "
        f"tiny-imagenet-200, or images in train/CLASS/ and test/CLASS/"
    )


def _checked(spec: ImageSpec, source: str, images: Images) -> Images:
    """Labels are in range, and there are any."""
    if not len(images.labels):
        raise BadData(f"{source} has no examples")
    odd = np.flatnonzero((images.labels < 0) | (images.labels >= spec.classes))
    if len(odd):
        raise BadData(
            f"{source}: the label of example {odd[0]} is {images.labels[odd[0]]}, not 0 to {spec.classes - 1}"
        )
    return images


# ---- what `datasets` reads


def _from_hub(spec: ImageSpec, train: bool) -> Images:
    return _from_table(spec, spec.hub, load_from_hub(spec.hub, split=spec.splits[not train]))


def _from_disk(spec: ImageSpec, path: Path, train: bool) -> Images:
    from datasets import DatasetDict, load_from_disk

    try:
        tables = load_from_disk(str(path))
    except Exception as error:
        raise BadData(f"{path} can't be read as a saved data set: {first_line(error)}") from error
    if not isinstance(tables, DatasetDict):
        tables = DatasetDict({"train": tables})
    split = _test_or_train(spec, list(tables), train, path)
    return _from_table(spec, f"{path}/{split}", tables[split])


def _from_parquet(spec: ImageSpec, path: Path, train: bool) -> Images:
    from datasets import load_dataset

    files: dict[str, list[str]] = {"train": [str(path)]} if path.is_file() else {}
    for file in sorted(path.glob("**/*.parquet")):
        # train-00000-of-00001.parquet, or as the hub converts a data set train/0000.parquet
        name = file.name.split("-")[0].removesuffix(".parquet")
        files.setdefault(file.parent.name if name not in SPLITS and file.parent != path else name, []).append(str(file))
    split = _test_or_train(spec, list(files), train, path)
    try:
        table = load_dataset("parquet", data_files=files[split], split="train")
    except Exception as error:
        raise BadData(f"{path}: {split}*.parquet can't be read: {first_line(error.__cause__ or error)}") from error
    return _from_table(spec, f"{path}/{split}", table)


def _test_or_train(spec: ImageSpec, names: Sequence[str], train: bool, path: Path) -> str:
    """Which of ``names`` it is; of several that test, the one that the hub's copy calls so, or is named like it."""
    wanted = SPLITS[:1] if train else SPLITS[1:] if spec.splits[1] == "test" else (*SPLITS[2:], "test")
    for name in wanted:
        if name in names:
            return name
    raise BadData(f"{path} has no split {' or '.join(wanted)}, but {', '.join(sorted(names)) or 'none'}")


def _from_table(spec: ImageSpec, source: str, table: Any) -> Images:
    """A table of `datasets` with a column of encoded images and one of labels."""
    from datasets import Image

    for column in (spec.image, spec.label):
        if column not in table.column_names:
            raise BadData(f"{source} has no column {column!r}, but {', '.join(table.column_names)}")
    table = table.cast_column(spec.image, Image(decode=False))

    def read(indices: NDArray) -> NDArray:
        rows = table.select(indices)[spec.image]
        encoded = ((row and (row["bytes"] or row["path"])) or b"" for row in rows)
        names = (f"{source}: the image of example {i}" for i in indices)
        return _decode(spec, zip(names, encoded, strict=True), len(indices))

    labels = np.asarray(table.select_columns([spec.label]).with_format("numpy")[:][spec.label])
    if labels.dtype.kind not in "iu":
        raise BadData(f"{source}: the column {spec.label!r} does not hold whole numbers alone")
    return Images(labels.astype(np.int64), read)


# ---- image files


def _from_folder(spec: ImageSpec, path: Path, train: bool) -> Images:
    """train/CLASS/*.png and the like; classes are numbered in the order of their names."""
    split = path / _test_or_train(spec, [p.name for p in path.iterdir() if p.is_dir()], train, path)
    classes = sorted(p.name for p in (path / "train").iterdir() if p.is_dir())
    if len(classes) != spec.classes:  # else a class that is missing here would number the others anew
        raise BadData(
            f"{path / 'train'} has {len(classes)} classes, not {spec.classes}; where a class has no images, let its "
            f"folder be empty"
        )
    unknown = [p.name for p in split.iterdir() if p.is_dir() and p.name not in classes]
    if unknown:
        raise BadData(f"{split / unknown[0]} is a class that {path / 'train'} does not have")
    files = [(file, label) for label, name in enumerate(classes) for file in _image_files(split / name)]
    return _from_files(spec, files)


def _from_tiny_imagenet(spec: ImageSpec, path: Path, train: bool) -> Images:
    """train/WNID/images/*.JPEG, and val/images with val_annotations.txt; classes in the order of their names."""
    if not (path / "train").is_dir():
        raise BadData(f"{path / 'train'} is not there")
    classes = sorted(p.name for p in (path / "train").iterdir() if p.is_dir())
    if train:
        files = [
            (file, label)
            for label, name in enumerate(classes)
            for file in _image_files(path / "train" / name / "images")
        ]
    else:
        annotations = path / "val" / "val_annotations.txt"
        files = []
        for number, line in enumerate(annotations.read_text().splitlines(), 1):
            name, _, rest = line.partition("\t")
            wnid = rest.partition("\t")[0]
            if wnid not in classes:
                raise BadData(f"{annotations}, line {number}: {wnid!r} is no class of {path / 'train'}")
            files.append((path / "val" / "images" / name, classes.index(wnid)))
    return _from_files(spec, files)


def _image_files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.glob("*") if p.suffix.lower() in (".png", ".jpg", ".jpeg", ".bmp", ".webp"))


def _from_files(spec: ImageSpec, files: Sequence[tuple[Path, int]]) -> Images:
    def read(indices: NDArray) -> NDArray:
        chosen = [files[i][0] for i in indices]
        return _decode(spec, ((str(path), path) for path in chosen), len(chosen))

    return Images(np.asarray([label for _, label in files], np.int64), read)


def _decode(spec: ImageSpec, encoded: Iterator[tuple[str, bytes | str | Path]], n: int) -> NDArray:
    """Decode n images, each given with the words that name it in an error."""
    from PIL import Image

    channels, height, width = spec.shape
    decoded = np.empty((n, *spec.shape), np.uint8)
    for i, (name, data) in enumerate(encoded):
        try:
            with Image.open(io.BytesIO(data) if isinstance(data, bytes) else data) as image:
                pixels = np.asarray(image.convert("RGB" if channels == 3 else "L"))
        except Exception as error:  # Pillow raises many kinds
            raise BadData(f"{name} can't be decoded: {first_line(error)}") from error
        if pixels.shape[:2] != (height, width):
            raise BadData(f"{name} has {pixels.shape[1]} x {pixels.shape[0]} pixels, not {width} x {height}")
        decoded[i] = pixels.reshape(height, width, channels).transpose(2, 0, 1)
    return decoded


# ---- original archives


def _from_idx(spec: ImageSpec, path: Path, train: bool) -> Images:
    stem = "train" if train else "t10k"
    images, labels = (read_idx(path, f"{stem}-{kind}") for kind in ("images-idx3-ubyte", "labels-idx1-ubyte"))
    if images.shape[1:] != spec.shape[1:] or labels.shape != images.shape[:1]:
        raise BadData(
            f"{path}: {stem} has images of shape {list(images.shape)} and labels {list(labels.shape)}, "
            f"not [n, {spec.shape[1]}, {spec.shape[2]}] and [n]"
        )
    return _in_memory(images[:, None], labels)


def _from_cifar(spec: ImageSpec, path: Path, train: bool) -> Images:
    if spec.shape != CIFAR_SHAPE or spec.classes not in CIFAR_FILES:
        channels, height, width = spec.shape
        raise BadData(
            f"{path} is no data of this task's {spec.classes} classes and {width} x {height} images of {channels} "
            f"channel(s): a single file, and CIFAR's files, are read by the tasks cifar10 and cifar100 alone"
        )
    return _in_memory(*read_cifar(path, spec.classes, train))


def _in_memory(images: NDArray, labels: NDArray) -> Images:
    return Images(labels.astype(np.int64), lambda indices: images[indices])
