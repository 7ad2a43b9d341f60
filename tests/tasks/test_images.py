"""Each format that images are read from, on small files in the true format."""

import contextlib
import gzip
import io
import pickle
import struct
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset, DatasetDict
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from tasks.images import ImageSpec, load_images
from tasks.task import BadData
from tasks.vision import Cifar10, Cifar100, FashionMnist, TinyImageNet

GENERATOR = np.random.default_rng(0)
SMALL = ImageSpec("nobody/small", "image", "label", ("train", "test"), (3, 4, 6), 3)


def colour(n: int, spec: ImageSpec = SMALL) -> NDArray:
    return GENERATOR.integers(0, 256, (n, *spec.shape), np.uint8)


def png(image: NDArray) -> bytes:
    """A (channels, height, width) image as a PNG file."""
    pixels = image.transpose(1, 2, 0)
    buffer = io.BytesIO()
    Image.fromarray(pixels if len(image) == 3 else pixels[..., 0]).save(buffer, "PNG")
    return buffer.getvalue()


def assert_reads(spec: ImageSpec, path: Path, train: bool, images: NDArray, labels: list[int]) -> None:
    read = load_images(spec, str(path), train)
    assert read.labels.tolist() == labels
    assert read.labels.dtype == np.int64
    np.testing.assert_array_equal(read.read(np.arange(len(labels))), images)
    some = np.array([len(labels) - 1, 0])
    np.testing.assert_array_equal(read.read(some), images[some])


# ---- what `datasets` writes


def table(images: NDArray, labels: list[int], spec: ImageSpec = SMALL) -> Any:
    from datasets import Features, Value
    from datasets import Image as ImageColumn

    columns = {spec.image: [{"bytes": png(i), "path": None} for i in images], spec.label: labels}
    return Dataset.from_dict(columns, Features({spec.image: ImageColumn(), spec.label: Value("int64")}))


def save_to_disk(folder: Path, train: Any, test: Any) -> None:
    DatasetDict({"train": train, "test": test}).save_to_disk(str(folder))


def save_as_parquet(folder: Path, train: Any, test: Any) -> None:
    """As the hub keeps it, in two shards."""
    half = len(train) // 2
    (folder / "data").mkdir(parents=True)
    train.select(range(half)).to_parquet(folder / "data" / "train-00000-of-00002.parquet")
    train.select(range(half, len(train))).to_parquet(folder / "data" / "train-00001-of-00002.parquet")
    test.to_parquet(folder / "data" / "test-00000-of-00001.parquet")


@pytest.mark.parametrize("save", [save_to_disk, save_as_parquet])
def test_datasets(save: Callable, tmp_path: Path) -> None:
    train, test = colour(5), colour(2)
    save(tmp_path / "data", table(train, [0, 1, 2, 1, 0]), table(test, [2, 2]))
    assert_reads(SMALL, tmp_path / "data", True, train, [0, 1, 2, 1, 0])
    assert_reads(SMALL, tmp_path / "data", False, test, [2, 2])


# ---- folders


def write_folders(root: Path, images: dict[str, NDArray]) -> None:
    for name, group in images.items():
        (root / name).mkdir(parents=True)
        for i, image in enumerate(group):
            (root / name / f"{i:03}.png").write_bytes(png(image))


def test_images_in_folders_by_class(tmp_path: Path) -> None:
    images = {"train/cat": colour(2), "train/ant": colour(1), "train/dog": colour(2), "test/dog": colour(1)}
    write_folders(tmp_path, images)
    expected = np.concatenate([images["train/ant"], images["train/cat"], images["train/dog"]])
    assert_reads(SMALL, tmp_path, True, expected, [0, 1, 1, 2, 2])
    assert_reads(SMALL, tmp_path, False, images["test/dog"], [2])
    write_folders(tmp_path, {"test/eel": colour(1)})
    load_images.cache_clear()
    with pytest.raises(BadData, match=r"test/eel is a class that .*train does not have"):
        load_images(SMALL, str(tmp_path), False)


def test_tiny_imagenet_as_it_is_unpacked(tmp_path: Path) -> None:
    spec = TinyImageNet.spec
    root = tmp_path / "tiny-imagenet-200"
    train = {name: colour(2, spec) for name in ("n01443537", "n01629819")}
    write_folders(root, {f"train/{name}/images": images for name, images in train.items()})
    test = colour(2, spec)
    write_folders(root, {"val/images": test})
    lines = ["000.png\tn01629819\t0\t32\t44\t62", "001.png\tn01443537\t52\t55\t57\t59"]
    (root / "val" / "val_annotations.txt").write_text("\n".join(lines) + "\n")
    assert_reads(spec, root, True, np.concatenate(list(train.values())), [0, 0, 1, 1])
    assert_reads(spec, root, False, test, [1, 0])


# ---- original archives


def cifar_bytes(images: NDArray, labels: list[int], coarse: bool) -> bytes:
    records = [(bytes([7]) if coarse else b"") + bytes([y]) + x.tobytes() for x, y in zip(images, labels, strict=True)]
    return b"".join(records)


def python2_pickle(pixels: NDArray, key: bytes, labels: list[int]) -> bytes:
    """{"batch_label": "one", "data": pixels, key: labels} as Python 2 and its NumPy pickled it: strings, not bytes."""

    def string(text: bytes) -> bytes:
        return b"T" + struct.pack("<i", len(text)) + text

    def integer(i: int) -> bytes:
        return b"J" + struct.pack("<i", i)

    dtype = (
        b"cnumpy\ndtype\n" + string(b"u1") + b"K\0K\x01\x87R(K\x03" + string(b"|") + b"NNN" + integer(-1) * 2 + b"K\0tb"
    )
    empty = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\0\x85" + string(b"b") + b"\x87R"
    shape = integer(pixels.shape[0]) + integer(pixels.shape[1]) + b"\x86"
    array = empty + b"(K\x01" + shape + dtype + b"\x89" + string(pixels.tobytes()) + b"tb"
    numbers = b"](" + b"".join(integer(y) for y in labels) + b"e"
    items = string(b"batch_label") + string(b"one") + string(b"data") + array + string(key) + numbers
    return b"\x80\x02}(" + items + b"u."


def add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    archive.addfile(info, io.BytesIO(data))


def write_cifar(path: Path, spec: ImageSpec, files: dict[str, tuple[NDArray, list[int]]], python: bool) -> None:
    hundred = spec.classes == 100
    with tarfile.open(path, "w:gz") as archive:
        for name, (images, labels) in files.items():
            if python:
                key = b"fine_labels" if hundred else b"labels"
                add(
                    archive,
                    f"cifar-{spec.classes}/{name}",
                    python2_pickle(images.reshape(len(images), -1), key, labels),
                )
            else:
                add(archive, f"cifar-{spec.classes}/{name}.bin", cifar_bytes(images, labels, hundred))


@pytest.mark.parametrize("unpacked", [False, True])
@pytest.mark.parametrize("python", [False, True])
@pytest.mark.parametrize("task", [Cifar10, Cifar100])
def test_cifar_archives(task: Any, python: bool, unpacked: bool, tmp_path: Path) -> None:
    spec, path = task.spec, tmp_path / "cifar.tar.gz"
    names = [f"data_batch_{i}" for i in range(1, 6)] if task is Cifar10 else ["train"]
    files = {name: (colour(2, spec), [i, 9 - i]) for i, name in enumerate(names)}
    test = {"test_batch" if task is Cifar10 else "test": (colour(3, spec), [1, 0, 4])}
    write_cifar(path, spec, files | test, python)
    if unpacked:
        with tarfile.open(path) as archive:
            archive.extractall(tmp_path / "unpacked", filter="data")
        path = tmp_path / "unpacked"
    expected = np.concatenate([images for images, _ in files.values()])
    assert_reads(spec, path, True, expected, [y for _, labels in files.values() for y in labels])
    assert_reads(spec, path, False, *next(iter(test.values())))


class Bomb:
    def __reduce__(self) -> Any:
        return (print, ("boom",))


def test_a_pickle_that_would_run_something_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cifar.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for i in range(1, 6):
            add(archive, f"cifar-10-batches-py/data_batch_{i}", pickle.dumps({b"data": Bomb(), b"labels": []}))
    with pytest.raises(
        BadData, match=r"data_batch_1 is damaged: it holds builtins\.print, which no CIFAR archive does"
    ):
        load_images(Cifar10.spec, str(path), True)
    assert capsys.readouterr().out == ""


def idx(array: NDArray) -> bytes:
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


@pytest.mark.parametrize("compress", [False, True])
def test_fashion_mnists_idx_files(compress: bool, tmp_path: Path) -> None:
    images, labels = colour(3, FashionMnist.spec), np.array([4, 9, 0], np.uint8)
    for stem, n in (("train", 3), ("t10k", 2)):
        for kind, array in (("images-idx3", images[:n, 0]), ("labels-idx1", labels[:n])):
            data = idx(array)
            name = f"{stem}-{kind}-ubyte"
            (tmp_path / (name + ".gz" if compress else name)).write_bytes(gzip.compress(data) if compress else data)
    assert_reads(FashionMnist.spec, tmp_path, True, images, [4, 9, 0])
    assert_reads(FashionMnist.spec, tmp_path, False, images[:2], [4, 9])


# ---- what goes wrong


@pytest.mark.parametrize("task", [Cifar10, Cifar100])
def test_an_archive_and_image_files_decode_to_the_same_pixels(task: Any, tmp_path: Path) -> None:
    """Red, green and blue lie one after another in the archive and beside each other in a PNG."""
    names = [f"data_batch_{i}" for i in range(1, 6)] if task is Cifar10 else ["train"]
    n = len(names)
    images = colour(2 * n + 2, task.spec)  # of each class n to train and one to test
    images[:, 0] = 200  # a red that no other order of channels keeps
    train, test, labels = images[:-2], images[-2:], [0] * n + [1] * n
    write_folders(tmp_path / "folder", {f"train/{y}": train[y * n : (y + 1) * n] for y in range(task.spec.classes)})
    write_folders(tmp_path / "folder", {f"test/{y}": test[y : y + 1] for y in (0, 1)})
    files = {name: (train[2 * i : 2 * i + 2], labels[2 * i : 2 * i + 2]) for i, name in enumerate(names)}
    files |= {"test_batch" if task is Cifar10 else "test": (test, [0, 1])}
    write_cifar(tmp_path / "cifar.tar.gz", task.spec, files, python=False)
    for is_train, expected in ((True, labels), (False, [0, 1])):
        ours, theirs = (load_images(task.spec, str(tmp_path / p), is_train) for p in ("cifar.tar.gz", "folder"))
        assert ours.labels.tolist() == theirs.labels.tolist() == expected
        every = np.arange(len(expected))
        np.testing.assert_array_equal(ours.read(every), theirs.read(every))


def refused(spec: ImageSpec, path: Path, message: str, train: bool = True) -> None:
    """The message is one line and says what is wrong and where."""

    def read() -> None:
        load_images.cache_clear()
        images = load_images(spec, str(path), train)
        images.read(np.arange(len(images.labels)))

    with pytest.raises(BadData, match=message) as caught:
        read()
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_path_that_is_not_there_or_holds_nothing_known(tmp_path: Path) -> None:
    refused(SMALL, tmp_path / "nowhere", "nowhere is not there")
    refused(SMALL, tmp_path, "holds no format known here: save_to_disk")


def test_a_damaged_archive(tmp_path: Path) -> None:
    path = tmp_path / "cifar.tar.gz"
    path.write_bytes(b"no archive at all")
    refused(Cifar10.spec, path, "damaged or no tar archive")
    images = {f"data_batch_{i}": (colour(2, Cifar10.spec), [0, 1]) for i in range(1, 6)}
    write_cifar(path, Cifar10.spec, images, python=False)
    refused(Cifar10.spec, path, "has no test_batch", train=False)
    path.write_bytes(path.read_bytes()[:-2000])
    refused(Cifar10.spec, path, "damaged|has no data_batch")
    write_cifar(path, Cifar10.spec, images, python=True)
    refused(Cifar100.spec, path, "has no train")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit_of_an_archive_is_noticed_or_harmless(where: float, bit: int, tmp_path: Path) -> None:
    """gzip's checksum is at the end, behind the last file that is looked for."""
    path = tmp_path / "cifar.tar.gz"
    if not path.exists():
        black = np.zeros((2, 3, 32, 32), np.uint8)
        write_cifar(path, Cifar100.spec, {"train": (black, [3, 5]), "test": (colour(2, Cifar100.spec), [1, 2])}, False)
    data = bytearray(path.read_bytes())
    data[int(where * len(data))] ^= 1 << bit
    damaged = tmp_path / "damaged.tar.gz"
    damaged.write_bytes(bytes(data))
    load_images.cache_clear()
    try:
        images = load_images(Cifar100.spec, str(damaged), True)
    except BadData:
        return
    assert images.labels.tolist() == [3, 5]
    assert not images.read(np.arange(2)).any()


def test_an_archives_checksum_is_looked_at(tmp_path: Path) -> None:
    """It stands behind a megabyte of zeros, with which an archive may end."""
    path = tmp_path / "cifar.tar.gz"
    write_cifar(path, Cifar100.spec, {"train": (colour(2, Cifar100.spec), [3, 5])}, python=False)
    data = bytearray(gzip.compress(gzip.decompress(path.read_bytes()) + bytes(1 << 20)))
    path.write_bytes(data)
    assert load_images(Cifar100.spec, str(path), True).labels.tolist() == [3, 5]
    data[-8] ^= 1
    path.write_bytes(data)
    refused(Cifar100.spec, path, "is damaged or no tar archive: CRC check failed")


@settings(max_examples=300, deadline=None)
@given(where=st.floats(0, 1, exclude_max=True), byte=st.integers(0, 255))
def test_a_damaged_pickle_never_does_more_than_be_refused(where: float, byte: int) -> None:
    data = bytearray(python2_pickle(np.zeros((2, 8), np.uint8), b"labels", [3, 5]))
    data[int(where * len(data))] = byte
    with tempfile.TemporaryDirectory() as folder:
        for i in range(1, 6):
            (Path(folder) / f"data_batch_{i}").write_bytes(bytes(data))
        load_images.cache_clear()
        with contextlib.suppress(BadData):
            load_images(Cifar10.spec, folder, True)


def test_an_array_of_objects_is_refused(tmp_path: Path) -> None:
    """Its bytes would be taken for addresses."""
    data = python2_pickle(np.full((1, 3072), 65, np.uint8), b"labels", [0]).replace(b"u1", b"O8")
    for i in range(1, 6):
        (tmp_path / f"data_batch_{i}").write_bytes(data)
    refused(Cifar10.spec, tmp_path, "data_batch_1 is damaged: its images are no array of bytes")


def test_batches_of_other_sizes(tmp_path: Path) -> None:
    for i, n in enumerate((2, 2, 0, 2, 2), 1):
        (tmp_path / f"data_batch_{i}.bin").write_bytes(bytes(3073 * n))
    refused(Cifar10.spec, tmp_path, r"data_batch_3\.bin is damaged: it has 0 images, and .*data_batch_1\.bin has 2")
    (tmp_path / "data_batch_1.bin").write_bytes(b"")
    refused(Cifar10.spec, tmp_path, r"data_batch_1\.bin is damaged: it has 0 images")


def test_files_of_another_task(tmp_path: Path) -> None:
    (tmp_path / "tiny-imagenet-200.zip").write_bytes(b"PK")
    refused(TinyImageNet.spec, tmp_path / "tiny-imagenet-200.zip", "is a zip archive; unpack it")
    (tmp_path / "cifar.tar.gz").write_bytes(b"")
    refused(FashionMnist.spec, tmp_path / "cifar.tar.gz", "10 classes and 28 x 28 images of 1 channel.*tasks cifar10")
    refused(TinyImageNet.spec, tmp_path / "cifar.tar.gz", "200 classes and 64 x 64 images")
    (tmp_path / "cifar.tar.gz").unlink()
    (tmp_path / "val").mkdir()
    (tmp_path / "val" / "val_annotations.txt").write_text("")
    refused(TinyImageNet.spec, tmp_path, "train is not there")


@pytest.mark.parametrize("labels", [[0, None], ["a", "b"], [0.5, 1.0]])
def test_labels_that_are_no_whole_numbers(labels: list[Any], tmp_path: Path) -> None:
    rows = Dataset.from_dict({"image": [{"bytes": png(x), "path": None} for x in colour(2)], "label": labels})
    DatasetDict(train=rows, test=rows).save_to_disk(tmp_path / "data")
    refused(SMALL, tmp_path / "data", "the column 'label' does not hold whole numbers alone")


def test_an_image_that_is_missing(tmp_path: Path) -> None:
    rows = Dataset.from_dict({"image": [{"bytes": png(colour(1)[0]), "path": None}, None], "label": [0, 1]})
    DatasetDict(train=rows, test=rows).save_to_disk(tmp_path / "data")
    refused(SMALL, tmp_path / "data", "the image of example 1 can't be decoded")


def test_which_split_tests(tmp_path: Path) -> None:
    """The one that the hub's copy uses, where a data set has several."""
    rows = {name: table(colour(1), [y]) for y, name in enumerate(("train", "test", "valid"))}
    DatasetDict(rows).save_to_disk(tmp_path / "data")
    for split, label in (("test", 1), ("valid", 2)):
        spec = ImageSpec("nobody/small", "image", "label", ("train", split), (3, 4, 6), 3)
        assert load_images(spec, str(tmp_path / "data"), False).labels.tolist() == [label]


def test_parquet_as_the_hub_converts_it(tmp_path: Path) -> None:
    for y, split in enumerate(("train", "test")):
        (tmp_path / "default" / split).mkdir(parents=True)
        table(colour(1), [y]).to_parquet(tmp_path / "default" / split / "0000.parquet")
    assert load_images(SMALL, str(tmp_path), True).labels.tolist() == [0]
    assert load_images(SMALL, str(tmp_path), False).labels.tolist() == [1]


def test_a_damaged_batch(tmp_path: Path) -> None:
    for i in range(1, 6):
        (tmp_path / f"data_batch_{i}.bin").write_bytes(bytes(3073 + 100 * (i == 1)))
    refused(Cifar10.spec, tmp_path, r"data_batch_1\.bin is damaged")
    (tmp_path / "data_batch_1.bin").unlink()
    (tmp_path / "data_batch_1").write_bytes(b"\x80\x02}q\x00.")
    refused(Cifar10.spec, tmp_path, r"data_batch_1 is damaged: b'data'")


def test_damaged_idx_files(tmp_path: Path) -> None:
    spec, images = FashionMnist.spec, idx(colour(2, FashionMnist.spec)[:, 0])
    for kind, data in (("images-idx3", images), ("labels-idx1", idx(np.zeros(3, np.uint8)))):
        (tmp_path / f"train-{kind}-ubyte").write_bytes(data)
    refused(spec, tmp_path, r"train has images of shape \[2, 28, 28\] and labels \[3\]")
    refused(spec, tmp_path, r"t10k-images-idx3-ubyte\[\.gz\] is not there", train=False)
    (tmp_path / "train-images-idx3-ubyte").write_bytes(images[:-5])
    refused(spec, tmp_path, "train-images-idx3-ubyte is damaged")
    (tmp_path / "train-images-idx3-ubyte").unlink()
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(images)[:-9])
    refused(spec, tmp_path, r"train-images-idx3-ubyte\.gz is damaged")


def test_images_of_another_size_and_no_images(tmp_path: Path) -> None:
    write_folders(tmp_path, {"train/a": colour(1), "train/b": colour(1)[..., :5], "test/a": colour(1)})
    refused(SMALL, tmp_path, "train has 2 classes, not 3; where a class has no images, let its folder be empty")
    (tmp_path / "train" / "c").mkdir()
    refused(SMALL, tmp_path, r"train/b/000\.png has 5 x 4 pixels, not 6 x 4")
    (tmp_path / "train/b/000.png").write_bytes(png(colour(1)[0])[:40])
    refused(SMALL, tmp_path, r"train/b/000\.png can't be decoded")
    (tmp_path / "train/b/000.png").write_text("text")
    refused(SMALL, tmp_path, r"train/b/000\.png can't be decoded")


def test_a_node_may_have_one_split_alone(tmp_path: Path) -> None:
    train = colour(4)
    table(train, [0, 1, 2, 1]).save_to_disk(str(tmp_path / "disk"))
    table(train, [0, 1, 2, 1]).to_parquet(tmp_path / "file.parquet")
    for name in ("disk", "file.parquet"):
        assert_reads(SMALL, tmp_path / name, True, train, [0, 1, 2, 1])
        refused(SMALL, tmp_path / name, "has no split test or .*, but train", train=False)


def test_tables_that_do_not_fit(tmp_path: Path) -> None:
    other = ImageSpec("nobody/small", "img", "label", ("train", "test"), (3, 4, 6), 3)
    save_to_disk(tmp_path / "a", table(colour(2), [0, 3]), table(colour(1), [0]))
    refused(SMALL, tmp_path / "a", "the label of example 1 is 3, not 0 to 2")
    refused(other, tmp_path / "a", r"has no column 'img', but image, label")
    save_as_parquet(tmp_path / "b", table(colour(2)[..., :3], [0, 1]), table(colour(1), [0]))
    refused(SMALL, tmp_path / "b", "the image of example 0 has 3 x 4 pixels, not 6 x 4")
    for path in (tmp_path / "b").rglob("train*"):
        path.write_bytes(b"no parquet")
    refused(SMALL, tmp_path / "b", r"train\*\.parquet can't be read")
    for path in (tmp_path / "b").rglob("train*"):
        path.unlink()
    refused(SMALL, tmp_path / "b", "has no split train, but test")


def test_without_network_and_path_it_says_what_to_download() -> None:
    load_images.cache_clear()
    with pytest.raises(
        BadData, match=r"uoft-cs/cifar10 can't be loaded.*download it .* set data to its folder"
    ) as caught:
        load_images(Cifar10.spec, "auto", True)
    assert "\n" not in str(caught.value)
