"""Original archives of image data: CIFAR's, in both of its versions, and idx files. All raise `BadData`."""

import gzip
import io
import pickle
import tarfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.task import BadData, first_line

# ---- idx


IDX_TYPE_UINT8 = 8


def read_idx(folder: Path, name: str) -> NDArray:
    """An idx file of bytes, gzipped or not: http://yann.lecun.com/exdb/mnist describes the format."""
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
        raise BadData(f"{path} is damaged: {first_line(error)}") from error


# ---- CIFAR


CIFAR_SHAPE = (3, 32, 32)
CIFAR_FILES = {  # by number of classes: (training files, test file), of the binary and of the Python version
    10: ([f"data_batch_{i}" for i in range(1, 6)], "test_batch"),
    100: (["train"], "test"),
}


def read_cifar(path: Path, classes: int, train: bool) -> tuple[NDArray, NDArray]:
    """The binary or the Python version of CIFAR-10 or CIFAR-100, as its .tar.gz, unpacked, or in a folder.

    https://www.cs.toronto.edu/~kriz/cifar.html describes both. Records of the binary version are one label byte (of
    CIFAR-100 two, the second of which is the fine one), then 3,072 bytes of red, green and blue. Gives images, uint8
    of shape (n, 3, 32, 32), and labels.
    """
    training, test = CIFAR_FILES[classes]
    stems = training if train else [test]
    if path.is_dir() and (archives := sorted(path.glob("cifar*.tar.gz"))):
        path = archives[0]
    files = _files(path, stems) if path.is_dir() else _members(path, stems)
    images, labels = [], []
    for name, data in files:
        try:
            pixels, label = _binary(data, classes) if name.endswith(".bin") else _pickled(data, classes)
            images.append(pixels.reshape(-1, *CIFAR_SHAPE))
            labels.append(label)
            if len(images[-1]) != len(label):
                raise ValueError(f"{len(images[-1])} images and {len(label)} labels")
        except Exception as error:  # whatever damaged bytes make of a pickle
            raise BadData(f"{name} is damaged: {first_line(error)}") from error
        if not len(label) or len(label) != len(labels[0]):
            raise BadData(f"{name} is damaged: it has {len(label)} images, and {files[0][0]} has {len(labels[0])}")
    return np.concatenate(images), np.concatenate(labels)


def _binary(data: bytes, classes: int) -> tuple[NDArray, NDArray]:
    label_bytes = 1 if classes == 10 else 2
    records = np.frombuffer(data, np.uint8).reshape(-1, label_bytes + 3072)
    return records[:, label_bytes:], records[:, label_bytes - 1]


def _pickled(data: bytes, classes: int) -> tuple[NDArray, NDArray]:
    batch = _Unpickler(io.BytesIO(data), encoding="bytes").load()
    return batch[b"data"].values(), np.asarray(batch[b"labels" if classes == 10 else b"fine_labels"], np.int64)


def _files(folder: Path, stems: Sequence[str]) -> list[tuple[str, bytes]]:
    """Names for people, and bytes."""
    files = []
    for stem in stems:
        found = [p for p in sorted(folder.rglob(f"{stem}*")) if p.name in (stem, f"{stem}.bin")]
        if not found:
            raise BadData(f"{folder / stem}[.bin] is not there")
        files.append((str(found[0]), found[0].read_bytes()))
    return files


def _members(path: Path, stems: Sequence[str]) -> list[tuple[str, bytes]]:
    """Names for people, and bytes: read to the end of the archive, where its checksum is."""
    found = {}
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                name = Path(member.name).name
                if name.removesuffix(".bin") in stems and (file := archive.extractfile(member)):
                    found[name.removesuffix(".bin")] = (f"{path}: {member.name}", file.read())
            while archive.fileobj and archive.fileobj.read(1 << 20):
                pass
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        raise BadData(f"{path} is damaged or no tar archive: {first_line(error)}") from error
    if missing := [stem for stem in stems if stem not in found]:
        raise BadData(f"{path} has no {missing[0]} or {missing[0]}.bin")
    return [found[stem] for stem in stems]


class _Unpickler(pickle.Unpickler):
    """Reads CIFAR's Python version, which is pickled: numbers, bytes, containers and arrays of bytes, nothing else.

    Nothing of NumPy's is called while it reads: NumPy trusts what it is given, and a file can't be trusted.
    """

    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("numpy") and name in _STAND_INS:
            return _STAND_INS[name]
        raise pickle.UnpicklingError(f"it holds {module}.{name}, which no CIFAR archive does")


class _Dtype:
    """A pickled dtype: its code and no more."""

    def __init__(self, code: bytes | str, *_: object) -> None:
        self.code = code.decode() if isinstance(code, bytes) else code

    def __setstate__(self, state: object) -> None:
        """Byte order and the like, of which bytes have none."""


class _Array:
    """A pickled array: its state, looked at when all is read."""

    state: Any = None

    def __init__(self, *_: object) -> None:
        """NumPy's are made empty and then given their state."""

    def __setstate__(self, state: object) -> None:
        self.state = state

    def values(self) -> NDArray:
        _, shape, dtype, fortran_order, data = self.state
        if dtype.code not in ("u1", "uint8") or fortran_order or not isinstance(data, bytes):
            raise ValueError("its images are no array of bytes")
        return np.frombuffer(data, np.uint8).reshape(shape)


_STAND_INS = {"_reconstruct": _Array, "ndarray": _Array, "dtype": _Dtype}
