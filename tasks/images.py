"""Labelled images from the Hugging Face hub or from a local path, as uint8 arrays.

A local path may be what `datasets` saves (``save_to_disk`` or parquet), a folder of images by class, the original
archive of CIFAR, the idx files of Fashion-MNIST, or the unpacked original of Tiny ImageNet.
"""

import gzip
import io
import pickle
import tarfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.task import BadData

IDX_TYPE_UINT8 = 8


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
    return _checked(spec, str(path), _reader(path)(spec, path, train))


def _reader(path: Path) -> Callable[[ImageSpec, Path, bool], Images]:
    """Which format lies at ``path``."""
    if path.is_file():
        return _from_parquet if path.suffix == ".parquet" else _from_cifar
    formats: list[tuple[Callable[[ImageSpec, Path, bool], Images], str]] = [
        (_from_disk, "dataset_dict.json"),
        (_from_parquet, "**/*.parquet"),
        (_from_cifar, "**/*_batch*"),
        (_from_cifar, "**/train.bin"),
        (_from_cifar, "**/train"),
        (_from_idx, "train-images-idx3-ubyte*"),
        (_from_tiny_imagenet, "val/val_annotations.txt"),
        (_from_folder, "train/*/"),
    ]
    for reader, sign in formats:
        if any(found.is_dir() == sign.endswith("/") for found in path.glob(sign)):
            return reader
    raise BadData(
        f"{path} holds no format known here: save_to_disk (dataset_dict.json), parquet, a CIFAR archive, idx files, "
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
    from datasets import load_dataset

    try:
        table = load_dataset(spec.hub, split=spec.splits[not train])
    except Exception as error:  # no network, no such data set, no space: many kinds of many libraries
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise BadData(
            f"{spec.hub} can't be loaded from the Hugging Face hub ({reason}); download it where there is a network "
            f"and set data to its folder"
        ) from error
    return _from_table(spec, spec.hub, table)


def _from_disk(spec: ImageSpec, path: Path, train: bool) -> Images:
    from datasets import DatasetDict, load_from_disk

    try:
        tables = load_from_disk(str(path))
    except Exception as error:
        raise BadData(f"{path} can't be read as a saved data set: {_first_line(error)}") from error
    if not isinstance(tables, DatasetDict):
        raise BadData(f"{path} is one split; save a data set with the splits {' and '.join(spec.splits)}")
    split = _test_or_train(list(tables), train, path)
    return _from_table(spec, f"{path}/{split}", tables[split])


def _from_parquet(spec: ImageSpec, path: Path, train: bool) -> Images:
    from datasets import load_dataset

    if path.is_file():
        raise BadData(f"{path} is one file; set data to the folder with the parquet files of both splits")
    files: dict[str, list[str]] = {}
    for file in sorted(path.glob("**/*.parquet")):
        files.setdefault(file.name.split("-")[0].removesuffix(".parquet"), []).append(str(file))
    split = _test_or_train(list(files), train, path)
    try:
        table = load_dataset("parquet", data_files=files[split], split="train")
    except Exception as error:
        raise BadData(f"{path}: {split}*.parquet can't be read: {_first_line(error.__cause__ or error)}") from error
    return _from_table(spec, f"{path}/{split}", table)


def _test_or_train(names: Sequence[str], train: bool, path: Path) -> str:
    wanted = ("train",) if train else ("test", "valid", "validation", "val")
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
        return _decode(
            spec,
            (
                (f"{source}: the image of example {i}", row["bytes"] or Path(row["path"]))
                for i, row in zip(indices, rows, strict=True)
            ),
            len(indices),
        )

    return Images(np.asarray(table[spec.label], np.int64), read)


# ---- image files


def _from_folder(spec: ImageSpec, path: Path, train: bool) -> Images:
    """train/CLASS/*.png and the like; classes are numbered in the order of their names."""
    split = path / _test_or_train([p.name for p in path.iterdir() if p.is_dir()], train, path)
    classes = sorted(p.name for p in (path / "train").iterdir() if p.is_dir())
    unknown = [p.name for p in split.iterdir() if p.is_dir() and p.name not in classes]
    if unknown:
        raise BadData(f"{split / unknown[0]} is a class that {path / 'train'} does not have")
    files = [(file, label) for label, name in enumerate(classes) for file in _image_files(split / name)]
    return _from_files(spec, files)


def _from_tiny_imagenet(spec: ImageSpec, path: Path, train: bool) -> Images:
    """train/WNID/images/*.JPEG, and val/images with val_annotations.txt; wnids.txt or the names give the order."""
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


def _decode(spec: ImageSpec, encoded: Iterator[tuple[str, bytes | Path]], n: int) -> NDArray:
    """Decode n images, each given with the words that name it in an error."""
    from PIL import Image

    channels, height, width = spec.shape
    decoded = np.empty((n, *spec.shape), np.uint8)
    for i, (name, data) in enumerate(encoded):
        try:
            with Image.open(io.BytesIO(data) if isinstance(data, bytes) else data) as image:
                pixels = np.asarray(image.convert("RGB" if channels == 3 else "L"))
        except (OSError, ValueError, SyntaxError) as error:
            raise BadData(f"{name} can't be decoded: {_first_line(error)}") from error
        if pixels.shape[:2] != (height, width):
            raise BadData(f"{name} has {pixels.shape[1]} x {pixels.shape[0]} pixels, not {width} x {height}")
        decoded[i] = pixels.reshape(height, width, channels).transpose(2, 0, 1)
    return decoded


# ---- original archives


def _from_idx(spec: ImageSpec, path: Path, train: bool) -> Images:
    """Fashion-MNIST's and MNIST's files, gzipped or not: http://yann.lecun.com/exdb/mnist describes the format."""
    stem = "train" if train else "t10k"
    images, labels = (_read_idx(path, f"{stem}-{kind}") for kind in ("images-idx3-ubyte", "labels-idx1-ubyte"))
    if images.shape[1:] != spec.shape[1:] or labels.shape != images.shape[:1]:
        raise BadData(
            f"{path}: {stem} has images of shape {list(images.shape)} and labels {list(labels.shape)}, "
            f"not [n, {spec.shape[1]}, {spec.shape[2]}] and [n]"
        )
    return _in_memory(images[:, None], labels)


def _read_idx(folder: Path, name: str) -> NDArray:
    path = next((p for p in (folder / name, folder / f"{name}.gz") if p.exists()), None)
    if path is None:
        raise BadData(f"{folder / name}[.gz] is not there")
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        if data[:2] != b"\0\0" or data[2] != IDX_TYPE_UINT8:
            raise ValueError("no idx file of bytes")
        shape = np.frombuffer(data, ">i4", data[3], 4)
        return np.frombuffer(data, np.uint8, offset=4 + 4 * data[3]).reshape(shape)
    except (OSError, EOFError, zlib.error, ValueError, IndexError) as error:
        raise BadData(f"{path} is damaged: {_first_line(error)}") from error


CIFAR_FILES = {  # by number of classes: (training files, test file), of the binary and of the Python version
    10: (([f"data_batch_{i}" for i in range(1, 6)], "test_batch"), 1),
    100: ((["train"], "test"), 2),
}


def _from_cifar(spec: ImageSpec, path: Path, train: bool) -> Images:
    """The binary or the Python version of CIFAR-10 or CIFAR-100, as its .tar.gz or unpacked.

    https://www.cs.toronto.edu/~kriz/cifar.html describes both. Records of the binary version are one label byte (of
    CIFAR-100 two, the second of which is the fine one), then 3,072 bytes of red, green and blue.
    """
    (training, test), label_bytes = CIFAR_FILES[spec.classes]
    images, labels = [], []
    for stem in training if train else [test]:
        name, data = _cifar_file(path, stem)
        try:
            if name.endswith(".bin"):
                records = np.frombuffer(data, np.uint8).reshape(-1, label_bytes + 3072)
                pixels, label = records[:, label_bytes:], records[:, label_bytes - 1]
            else:
                batch = _Unpickler(io.BytesIO(data), encoding="bytes").load()
                pixels, label = batch[b"data"], np.asarray(batch[b"labels" if spec.classes == 10 else b"fine_labels"])
            images.append(np.asarray(pixels, np.uint8).reshape(-1, *spec.shape))
            labels.append(label)
            if len(images[-1]) != len(label):
                raise ValueError(f"{len(images[-1])} images and {len(label)} labels")
        except (ValueError, KeyError, TypeError, EOFError, IndexError, AttributeError, pickle.UnpicklingError) as error:
            raise BadData(f"{name} is damaged: {_first_line(error)}") from error
    return _in_memory(np.concatenate(images), np.concatenate(labels))


def _cifar_file(path: Path, stem: str) -> tuple[str, bytes]:
    """The batch ``stem`` or ``stem.bin``, from an archive or a folder: its name for people, and its bytes."""
    if path.is_dir():
        found = [p for p in sorted(path.rglob(f"{stem}*")) if p.name in (stem, f"{stem}.bin")]
        if not found:
            raise BadData(f"{path / stem}[.bin] is not there")
        return str(found[0]), found[0].read_bytes()
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                if Path(member.name).name in (stem, f"{stem}.bin") and (file := archive.extractfile(member)):
                    return f"{path}: {member.name}", file.read()
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        raise BadData(f"{path} is damaged or no tar archive: {_first_line(error)}") from error
    raise BadData(f"{path} has no {stem} or {stem}.bin")


class _Unpickler(pickle.Unpickler):
    """Reads CIFAR's Python version, which is pickled: numbers, bytes, containers and arrays, and nothing that runs."""

    ALLOWED = ("_reconstruct", "ndarray", "dtype")

    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("numpy") and name in self.ALLOWED:
            return np.ndarray if name == "ndarray" else np.dtype if name == "dtype" else _reconstruct
        raise pickle.UnpicklingError(f"it holds {module}.{name}, which no CIFAR archive does")


def _reconstruct(kind: type, shape: tuple[int, ...], dtype: bytes) -> NDArray:
    """What NumPy pickles an array as, before its state is set."""
    return np.ndarray(shape, dtype.decode())


def _in_memory(images: NDArray, labels: NDArray) -> Images:
    return Images(labels.astype(np.int64), lambda indices: images[indices])


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
