"""Every published data set on a miniature in its published layout, bit for bit where the layout loses nothing."""

import gzip
import hashlib
import io
import json
import os
import pickle
import signal
import struct
import subprocess
import sys
import tarfile
import time
import tracemalloc
import urllib.error
import urllib.request

import numpy as np
import pytest
import torchvision
from conftest import ROOT
from PIL import Image
from scipy.io import savemat

import common
import readers
import streams
import train_ddim

NAMES = [name for name in readers.DATASETS if name != "digits"]
rng = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def network(monkeypatch):
    """{url: bytes} is all that can be downloaded; `network.asked` are the urls that were."""

    class Network(dict):
        asked = []

        def open(self, request, timeout):
            assert 1 <= timeout <= 60
            self.asked.append(request.full_url)
            if request.full_url not in self:
                raise urllib.error.URLError("no network")
            response = io.BytesIO(self[request.full_url])
            response.length = len(self[request.full_url])
            return response

    network = Network()
    network.asked = []
    monkeypatch.setattr(urllib.request, "urlopen", network.open)
    return network


@pytest.fixture
def facts(monkeypatch):
    """facts("cub", images=9, …): what the table says of the miniature."""

    def change(name, **what):
        monkeypatch.setitem(readers.DATASETS, name, {**readers.DATASETS[name], **what})

    return change


def load(name, size, data):
    return streams.load_data(streams.scenario(name), size, data)


def refused(call, *words):
    with pytest.raises(common.UserError) as end:
        call()
    for word in words:
        assert str(word) in str(end.value), end.value
    assert "\n" not in str(end.value)


def md5(content):
    return hashlib.md5(content).hexdigest()


def class_after_class(images, labels):
    order = np.argsort(labels, kind="stable")
    return images[order], labels[order]


def equal(data, images, labels):
    images, labels = class_after_class(images, labels)
    assert data.images.dtype == np.uint8 and data.labels.dtype == np.int64
    return data.images.shape == images.shape and (data.images == images).all() and (data.labels == labels).all()


# ------------------------------------------------------------------------------------------ MNIST, Fashion

IDX = {"mnist": ("MNIST", "MNIST/raw"), "fashion": ("FashionMNIST", "FashionMNIST/raw")}
IMAGES, LABELS = "train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"


@pytest.fixture
def idx(tmp_path, facts, monkeypatch):
    """idx("mnist") → ({file: content}, images, labels): 50 pictures; the checksums are known, no file is written."""

    def make(name):
        images, labels = rng.integers(0, 256, (50, 28, 28), np.uint8), np.arange(50, dtype=np.uint8)[::-1] % 10
        files = {
            IMAGES: gzip.compress(struct.pack(">IIII", 2051, 50, 28, 28) + images.tobytes()),
            LABELS: gzip.compress(struct.pack(">II", 2049, 50) + labels.tobytes()),
        }
        published = getattr(torchvision.datasets, IDX[name][0])
        monkeypatch.setattr(published, "resources", [(file, md5(content)) for file, content in files.items()])
        facts(name, images=50)
        (tmp_path / IDX[name][1]).mkdir(parents=True)
        return files, images, labels

    return make


@pytest.mark.parametrize("name", IDX)
@pytest.mark.parametrize("packed", [True, False])
def test_mnist_and_fashion(name, packed, idx, tmp_path, network):
    files, images, labels = idx(name)
    for file, content in files.items():
        path = tmp_path / IDX[name][1] / file
        path.write_bytes(content) if packed else path.with_suffix("").write_bytes(gzip.decompress(content))
    rgb = images[:, None].repeat(3, axis=1)
    assert equal(load(name, 28, tmp_path), rgb, labels)
    data = load(name, 32, tmp_path)
    bigger = [np.asarray(Image.fromarray(i).resize((32, 32), Image.Resampling.BICUBIC)) for i in images]
    assert equal(data, np.stack(bigger)[:, None].repeat(3, axis=1), labels)
    assert data.classes[9] == {"mnist": "9", "fashion": "Ankle boot"}[name] and not network.asked


def test_test_splits(idx, cifar, tmp_path, facts, monkeypatch):
    """Apart from the training set, under a folder of their own; what has none says who has."""
    files, *_ = idx("mnist")
    images, labels = rng.integers(0, 256, (20, 28, 28), np.uint8), np.arange(20, dtype=np.uint8) % 10
    test = {
        "t10k-images-idx3-ubyte.gz": gzip.compress(struct.pack(">IIII", 2051, 20, 28, 28) + images.tobytes()),
        "t10k-labels-idx1-ubyte.gz": gzip.compress(struct.pack(">II", 2049, 20) + labels.tobytes()),
    }
    resources = [(file, md5(content)) for file, content in (files | test).items()]
    monkeypatch.setattr(torchvision.datasets.MNIST, "resources", resources)
    for file, content in (files | test).items():
        (tmp_path / "MNIST" / "raw" / file).write_bytes(content)
    facts("mnist", images=50, test=20)

    def load_test(name, size=28):
        return streams.load_data(streams.scenario(name), size, tmp_path, split="test")

    assert equal(load_test("mnist"), images[:, None].repeat(3, axis=1), labels)
    assert len(load("mnist", 28, tmp_path).labels) == 50 and len(load_test("mnist:0-4").labels) == 10
    facts("mnist", images=50, test=21)
    refused(lambda: load_test("mnist", 32), "20 images", "test split has 21")
    files, _, images, labels = cifar
    published = torchvision.datasets.CIFAR10
    monkeypatch.setattr(published, "test_list", published.train_list[3:])
    (tmp_path / "cifar-10-batches-py").mkdir()
    for file in ("batches.meta", "data_batch_4", "data_batch_5"):
        (tmp_path / "cifar-10-batches-py" / file).write_bytes(files[file])
    facts("cifar10", images=40, test=16)
    assert equal(load_test("cifar10", 32), images[24:], labels[24:])
    refused(lambda: load_test("cub"), "cub has no test split", "mnist, fashion, cifar10", "--reference train")


def test_damaged_mnist_offline_is_named(idx, tmp_path, network):
    files, *_ = idx("mnist")
    raw = tmp_path / "MNIST" / "raw"
    (raw / IMAGES).write_bytes(files[IMAGES][: len(files[IMAGES]) // 2])
    (raw / LABELS).write_bytes(files[LABELS])
    mirror = torchvision.datasets.MNIST.mirrors[0]
    refused(lambda: load("mnist", 32, tmp_path), raw / IMAGES, "damaged", "remove", mirror + IMAGES, "no network")
    assert len(network.asked) == len(torchvision.datasets.MNIST.mirrors)
    (raw / IMAGES).unlink()
    (raw / IMAGES).with_suffix("").write_bytes(gzip.decompress(files[IMAGES])[:-1])  # unpacked, one byte short
    refused(lambda: load("mnist", 32, tmp_path), (raw / IMAGES).with_suffix(""), "damaged", mirror + IMAGES)
    more = struct.pack(">IIII", 2051, 51, 28, 28) + bytes(51 * 784)  # whole, but not of these labels
    (raw / IMAGES).with_suffix("").write_bytes(more)
    refused(lambda: load("mnist", 32, tmp_path), raw, "(51, 28, 28) and labels of (50,)")
    (raw / IMAGES).with_suffix("").write_bytes(gzip.decompress(files[LABELS]))
    refused(lambda: load("mnist", 32, tmp_path), raw, "images of (50,)")
    assert not list(tmp_path.rglob("*.npy"))


def test_mnist_is_downloaded_checked_and_replaced(idx, tmp_path, network):
    files, images, labels = idx("mnist")
    first, second = torchvision.datasets.MNIST.mirrors
    raw = tmp_path / "MNIST" / "raw"
    (raw / IMAGES).write_bytes(b"half")
    network[first + IMAGES] = files[IMAGES][:-9]  # breaks off
    network[second + IMAGES] = files[IMAGES]
    refused(lambda: load("mnist", 28, tmp_path), raw / LABELS, "not there", first + LABELS)
    assert {p.name for p in raw.iterdir()} == {IMAGES} and (raw / IMAGES).read_bytes() == files[IMAGES]
    network[first + LABELS] = files[LABELS]
    assert equal(load("mnist", 28, tmp_path), images[:, None].repeat(3, axis=1), labels)
    assert network.asked.count(first + IMAGES) == 1


def test_a_cut_off_download_leaves_the_old_file(idx, tmp_path, network):
    files, *_ = idx("mnist")
    raw = tmp_path / "MNIST" / "raw"
    (raw / IMAGES).write_bytes(b"half")
    for mirror in torchvision.datasets.MNIST.mirrors:
        network[mirror + IMAGES] = files[IMAGES][:-9]
    refused(lambda: load("mnist", 28, tmp_path), raw / IMAGES, "wrong checksum")
    assert [p.name for p in raw.iterdir()] == [IMAGES] and (raw / IMAGES).read_bytes() == b"half"


def test_a_silent_server_is_left_in_time(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "PATIENCE", 0.4)
    monkeypatch.setattr(urllib.request, "urlopen", lambda *_, **__: time.sleep(20))
    for name in ("mnist", "fashion", "cifar10", "flowers"):
        start = time.monotonic()
        refused(lambda name=name: load(name, 32, tmp_path), "no answer within", tmp_path)
        assert time.monotonic() - start < 2
    assert readers.PATIENCE <= 5


# ------------------------------------------------------------------------------------------------- pickles


class Python2(pickle._Pickler):
    """Writes bytes and text as a str of Python 2, and the NumPy of its time."""

    dispatch = dict(pickle._Pickler.dispatch)

    def save_str(self, text):
        text = text if isinstance(text, bytes) else text.encode("latin1")
        self.write(b"T" + struct.pack("<i", len(text)) + text)
        self.memoize(text)

    dispatch[bytes] = dispatch[str] = save_str


def python2(content):
    file = io.BytesIO()
    Python2(file, 2).dump(content)
    return file.getvalue().replace(b"cnumpy._core.", b"cnumpy.core.")


WRITERS = {
    "python2": python2,
    "protocol2": lambda content: pickle.dumps(content, 2),
    "protocol4": lambda content: pickle.dumps(content, 4),
    "protocol5": lambda content: pickle.dumps(content, 5),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_pickles_of_every_age(writer, tmp_path):
    content = {"data": rng.integers(0, 256, (3, 40), np.uint8), "labels": [3, 1, 2], "mean": np.ones(4), "x": b"\xff"}
    (tmp_path / "batch").write_bytes(WRITERS[writer](content))
    found = readers.unpickle(tmp_path / "batch")
    assert found.keys() == content.keys() and found["labels"] == [3, 1, 2] and found["x"] == b"\xff"
    assert (found["data"] == content["data"]).all() and found["data"].dtype == np.uint8


class Attack:
    def __init__(self, *call):
        self.call = call

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize(
    "call",
    [(os.mkdir, ("owned",)), (eval, ("open('owned', 'w')",)), (getattr, ("", "join")), (np.fromfile, ("owned",))],
)
def test_a_pickle_that_would_run_code_is_refused(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for protocol in (0, 2, 5):
        (tmp_path / "batch").write_bytes(pickle.dumps({"data": Attack(*call)}, protocol))
        refused(lambda: readers.unpickle(tmp_path / "batch"), tmp_path / "batch", "it asks for")
    assert [p.name for p in tmp_path.iterdir()] == ["batch"]


def test_a_broken_pickle_is_named(tmp_path):
    (tmp_path / "batch").write_bytes(pickle.dumps({"data": np.zeros(1000)})[:-20])
    refused(lambda: readers.unpickle(tmp_path / "batch"), tmp_path / "batch", "good copy")


# ------------------------------------------------------------------------------------------------ CIFAR-10


@pytest.fixture
def cifar(tmp_path, facts, monkeypatch):
    """({file: content}, archive, images, labels): five batches of eight, as published."""
    images, labels = rng.integers(0, 256, (40, 3, 32, 32), np.uint8), np.arange(40)[::-1] * 3 % 10
    files = {"batches.meta": python2({"label_names": [f"kind {c}" for c in range(10)], "num_vis": 3072})}
    for k in range(5):
        rows = slice(8 * k, 8 * k + 8)
        batch = {"data": images[rows].reshape(8, -1), "labels": labels[rows].tolist(), "batch_label": "training"}
        files[f"data_batch_{k + 1}"] = python2(batch)
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for file, content in files.items():
            about = tarfile.TarInfo(f"cifar-10-batches-py/{file}")
            about.size = len(content)
            tar.addfile(about, io.BytesIO(content))
    published = torchvision.datasets.CIFAR10
    sums = [[file, md5(content)] for file, content in files.items()]
    monkeypatch.setattr(published, "train_list", sums[1:])
    monkeypatch.setattr(published, "meta", {**published.meta, "md5": sums[0][1]})
    monkeypatch.setattr(published, "tgz_md5", md5(packed.getvalue()))
    facts("cifar10", images=40)
    return files, packed.getvalue(), images, labels


def test_cifar10(cifar, tmp_path, network):
    files, _, images, labels = cifar
    (tmp_path / "cifar-10-batches-py").mkdir()
    for file, content in files.items():
        (tmp_path / "cifar-10-batches-py" / file).write_bytes(content)
    data = load("cifar10", 32, tmp_path)
    assert equal(data, images, labels) and data.classes[3] == "kind 3" and not network.asked
    part = load("cifar10:4-6", 32, tmp_path)
    keep = (labels >= 4) & (labels <= 6)
    assert equal(part, images[keep], labels[keep] - 4) and part.classes == ["kind 4", "kind 5", "kind 6"]
    smaller, blocks = load("cifar10", 16, tmp_path), data.images.reshape(-1, 3, 16, 2, 16, 2).astype(int)
    assert (smaller.images == (blocks.sum((3, 5)) + 2) // 4).all()  # half the size: the mean of four pixels


def test_cifar10_from_its_archive(cifar, tmp_path, network):
    files, archive, images, labels = cifar
    url, folder = torchvision.datasets.CIFAR10.url, tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    (folder / "data_batch_1").write_bytes(files["data_batch_1"][:-5])
    refused(lambda: load("cifar10", 32, tmp_path), folder / "data_batch_1", "damaged", url)
    assert (folder / "data_batch_1").exists()
    network[url] = archive
    assert equal(load("cifar10", 32, tmp_path), images, labels)
    assert not list(tmp_path.glob("*.tmp"))


# ------------------------------------------------------------------------------------------------ ImageNet


def imagenet(folder, writer, rows=7, classes=5):
    """Ten parts in sub-folders, of different sizes, with what is found beside them. → images, labels from 0"""
    count = rows * 10 + 45
    images = rng.integers(0, 256, (count, 3, 64, 64), np.uint8)
    labels = rng.permutation(np.arange(count) % classes)
    start = 0
    for k in range(1, 11):
        take = slice(start, start := start + rows + k - 1)
        part = {"data": images[take].reshape(-1, 12288), "labels": (labels[take] + 1).tolist(), "mean": np.ones(12288)}
        sub = folder / f"part {1 + k // 6}"
        sub.mkdir(parents=True, exist_ok=True)
        if writer == "npz":
            with open(sub / f"train_data_batch_{k}{'.npz' * (k % 2)}", "wb") as file:  # the content decides
                np.savez(file, data=part["data"], labels=np.array(part["labels"]))
        else:
            (sub / f"train_data_batch_{k}").write_bytes(WRITERS[writer](part))
        (sub / f"._train_data_batch_{k}").write_bytes(b"junk of another system")
    (folder / "val_data").write_bytes(b"not for training")
    return images, labels


@pytest.mark.parametrize("writer", [*WRITERS, "npz"])
def test_imagenet(writer, tmp_path, facts):
    images, labels = imagenet(tmp_path / "imagenet64", writer)
    facts("imagenet64", images=len(labels), classes=5, tasks=5)
    data = load("imagenet64", 64, tmp_path)
    assert equal(data, images, labels) and data.classes == ["0", "1", "2", "3", "4"]
    part = load("imagenet64:1-3", 64, tmp_path)
    keep = (labels >= 1) & (labels <= 3)
    assert equal(part, images[keep], labels[keep] - 1)
    assert isinstance(part.images, np.memmap)  # of sixteen gigabytes, a range is no copy in memory


def test_an_npz_that_would_run_code_is_refused(tmp_path):
    with open(tmp_path / "train_data_batch_1", "wb") as file:
        np.savez(file, data=np.array([{}], object))
    refused(lambda: readers.part_of_imagenet(tmp_path / "train_data_batch_1", "data"), "train_data_batch_1", "pickle")


def test_imagenet_names_and_faults(tmp_path, facts):
    folder = tmp_path / "imagenet64"
    _, labels = imagenet(folder, "protocol4")
    facts("imagenet64", images=len(labels), classes=5)
    lines = [f"n0{c} {c} kind_{c}" for c in (3, 1, 5, 2, 4)]
    (folder / "map_clsloc.txt").write_text("\n".join(lines) + "\n")
    assert readers.imagenet64(folder).names == ["kind 1", "kind 2", "kind 3", "kind 4", "kind 5"]
    last = folder / "part 2" / "train_data_batch_10"
    content = last.read_bytes()
    last.rename(tmp_path / "away")
    refused(lambda: load("imagenet64", 64, tmp_path), "missing train_data_batch_10 in", folder)
    last.write_bytes(content[:-100])
    refused(lambda: load("imagenet64", 64, tmp_path), last, "good copy")
    last.write_bytes(pickle.dumps({"data": np.zeros((1, 3072), np.uint8), "labels": [1]}))
    facts("imagenet64", images=len(labels) - 15, classes=5)
    refused(lambda: load("imagenet64", 64, tmp_path), last, "12288")
    last.write_bytes(content)
    refused(lambda: load("imagenet64", 64, tmp_path), f"{len(labels)} images", f"has {len(labels) - 15}", folder)
    (folder / "map_clsloc.txt").unlink()
    facts("imagenet64", images=len(labels), classes=6)
    refused(lambda: load("imagenet64", 64, tmp_path), "classes 0-4", "there are 6")
    (folder / "train_data_batch_10").write_bytes(content)
    refused(lambda: load("imagenet64", 64, tmp_path), "same part", last)
    assert not list(tmp_path.rglob("*.npy"))


@pytest.mark.parametrize("writer", ["protocol4", "npz"])
def test_imagenet_parts_that_would_give_wrong_labels(writer, tmp_path, facts):
    """The count of the whole is right each time."""
    folder = tmp_path / "imagenet64"
    _, labels = imagenet(folder, writer)
    facts("imagenet64", images=len(labels), classes=5)

    def write(path, rows, labels):
        with open(path, "wb") as file:
            part = {"data": np.zeros((rows, 12288), np.uint8), "labels": np.array(labels)}
            np.savez(file, **part) if writer == "npz" else pickle.dump(part, file)

    third, fourth = sorted(folder.rglob("train_data_batch_[34]*"))  # 9 and 10 images
    good = fourth.read_bytes()
    write(third, 8, labels[:9] + 1)  # an image less, and one more in the next part
    write(fourth, 11, labels[9:19] + 1)
    refused(lambda: load("imagenet64", 64, tmp_path), third, "8 images, but 9 labels")
    third.write_bytes(good)  # one part under two names
    fourth.write_bytes(good)
    facts("imagenet64", images=len(labels) + 1, classes=5)
    refused(lambda: load("imagenet64", 64, tmp_path), third, fourth, "the same labels")
    if writer != "npz":
        third.write_bytes(pickle.dumps({"data": [[0] * 12288], "labels": [[1], [2]]}))
        assert readers.part_of_imagenet(third, "labels").tolist() == [1, 2]
        refused(lambda: readers.part_of_imagenet(third, "data"), third, "int64")
    assert not list(tmp_path.rglob("*.npy"))


def test_imagenet_in_linked_folders(tmp_path, facts):
    images, labels = imagenet(tmp_path / "elsewhere", "protocol4")
    (tmp_path / "elsewhere" / "map_clsloc.txt").write_text("".join(f"n{c} {c + 1} kind_{c}\n" for c in range(5)))
    (tmp_path / "imagenet64").mkdir()
    (tmp_path / "imagenet64" / "64x64").symlink_to(tmp_path / "elsewhere")
    facts("imagenet64", images=len(labels), classes=5)
    data = load("imagenet64", 64, tmp_path)
    assert equal(data, images, labels) and data.classes[4] == "kind 4"


@pytest.mark.parametrize("writer", ["protocol4", "npz"])
def test_imagenet_takes_one_part_at_a_time(writer, tmp_path, facts):
    _, labels = imagenet(tmp_path / "imagenet64", writer, rows=200)
    facts("imagenet64", images=len(labels), classes=5)
    part = 209 * 12288
    tracemalloc.start()
    try:
        load("imagenet64", 64, tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 1.8 * part
    finally:
        tracemalloc.stop()


# -------------------------------------------------------------------------------------- Flowers, CUB, Cars


def plain(path, red, size=(20, 16)):
    """A JPEG of one colour, which survives the format."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (red, 0, 0)).save(path, quality=100, subsampling=0)


@pytest.fixture
def flower_files(tmp_path, monkeypatch, facts):
    folder, labels = tmp_path / "flowers-102", np.arange(204) % 102 + 1
    for k, label in enumerate(labels, 1):
        plain(folder / "jpg" / f"image_{k:05d}.jpg", 2 * (label - 1), (16, 16))
    ids = np.arange(1, 205)
    savemat(folder / "imagelabels.mat", {"labels": labels[None].astype(np.uint8)})
    splits = {"trnid": ids[None, :102], "valid": ids[None, 102:153], "tstid": ids[None, 153:]}
    savemat(folder / "setid.mat", splits)
    known = {"image": ("102flowers.tgz", "")}
    for key, file in (("label", "imagelabels.mat"), ("setid", "setid.mat")):
        known[key] = (file, md5((folder / file).read_bytes()))
    monkeypatch.setattr(torchvision.datasets.Flowers102, "_file_dict", known)
    facts("flowers", images=153)
    return folder


def test_flowers(flower_files, tmp_path, network):
    source = readers.flowers(flower_files)
    assert len(source.labels) == 153 and (source.labels.min(), source.labels.max()) == (0, 101)
    numbers = [int(path.stem[-5:]) for path in source.pictures]
    assert len({*numbers}) == 153 and not {*numbers} & {*range(103, 154)}  # training and test, not validation
    data = load("flowers", 16, tmp_path)
    assert len(data.labels) == 153 - 4 and set(data.labels) == set(range(100)) and len(data.classes) == 100
    assert abs(data.images[:, 0].astype(int) - 2 * data.labels[:, None, None]).max() <= 1
    assert data.classes[0] == "pink primrose" and data.classes[99] == "blanket flower" and not network.asked
    scene = streams.scenario("flowers")
    assert sorted(scene.order(2)) == list(range(100)) and len(streams.split(data, scene.order(2), 5)) == 5


def test_flowers_from_the_archive(flower_files, tmp_path, network, monkeypatch):
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        tar.add(flower_files / "jpg", "jpg")
    published = torchvision.datasets.Flowers102
    known = {**published._file_dict, "image": ("102flowers.tgz", md5(packed.getvalue()))}
    monkeypatch.setattr(published, "_file_dict", known)
    (flower_files / "jpg" / "image_00200.jpg").unlink()
    url = published._download_url_prefix + "102flowers.tgz"
    refused(lambda: load("flowers", 16, tmp_path), url, flower_files)
    network[url] = packed.getvalue()
    assert len(load("flowers", 16, tmp_path).labels) == 149
    (flower_files / "setid.mat").write_bytes(b"damaged")
    refused(lambda: load("flowers", 8, tmp_path), flower_files / "setid.mat", "damaged")


def cub(data, classes=6):
    """Twelve birds; lists in different orders, with the line ends of another system; a gray one among them."""
    folder = data / "CUB_200_2011"
    paths, labels = {}, {}
    for i in range(1, 13):
        labels[i] = (i * 5) % classes + 1
        paths[i] = f"{labels[i]:03d}.Some_Bird_{labels[i]}/Some_Bird_{i:04d}_{i * 7}.jpg"
        plain(folder / "images" / paths[i], 20 * labels[i])
    Image.new("L", (30, 20), 20 * labels[4]).save(folder / "images" / paths[4], quality=100)

    def write(file, values, order):
        (folder / file).write_text("".join(f"{i} {values[i]}\r\n" for i in order))

    write("images.txt", paths, range(1, 13))
    write("image_class_labels.txt", labels, range(12, 0, -1))
    write("train_test_split.txt", {i: i % 2 for i in paths}, rng.permutation(12) + 1)
    write("classes.txt", {c: f"{c:03d}.Some_Bird_{c}" for c in range(1, classes + 1)}, range(classes, 0, -1))
    return folder, paths, labels


def test_cub(tmp_path, facts):
    folder, paths, labels = cub(tmp_path)
    facts("cub", images=12, classes=6, tasks=3)
    data = load("cub", 8, tmp_path)
    assert sorted(data.labels) == sorted(label - 1 for label in labels.values())  # both splits
    assert abs(data.images[:, 0].astype(int) - 20 * (data.labels[:, None, None] + 1)).max() <= 1
    assert data.classes == [f"Some Bird {c}" for c in range(1, 7)]
    assert (data.images[:, 1].max(axis=(1, 2)) > 10).sum() == 1  # the gray one
    (folder / "images" / paths[7]).unlink()
    assert (load("cub", 8, tmp_path).images == data.images).all()  # prepared once, its files are not needed again
    refused(lambda: load("cub", 9, tmp_path), "1 of 12 pictures", folder / "images" / paths[7])
    (folder / "image_class_labels.txt").write_text("".join(f"{i} x\n" for i in range(1, 13)))
    plain(folder / "images" / paths[7], 9)
    refused(lambda: load("cub", 9, tmp_path), "not those that were published", folder)
    (folder / "image_class_labels.txt").write_text("".join(f"{i} {labels[13 - i]}\n" for i in range(1, 13)))
    refused(lambda: load("cub", 9, tmp_path), f"image 1 is {paths[1]}", f"of class {labels[12]}", folder)
    (folder / "image_class_labels.txt").write_text("1 1\n")
    refused(lambda: load("cub", 9, tmp_path), "image 2 ", "image_class_labels.txt")
    (folder / "image_class_labels.txt").write_text("".join(f"{i} 1\n" for i in range(1, 13)) + "1 2\n")
    refused(lambda: load("cub", 9, tmp_path), folder / "image_class_labels.txt", "twice")
    (folder / "train_test_split.txt").unlink()
    refused(lambda: load("cub", 9, tmp_path), "missing train_test_split.txt", folder)


def cars(data):
    folder = data / "stanford_cars"
    fields = ["bbox_x1", "bbox_y1", "bbox_x2", "bbox_y2", "class", "fname"]
    rows = np.zeros((1, 9), [(field, "O") for field in fields])
    for k in range(9):
        label = k * 2 % 3 + 1
        rows[0, k] = (*(np.array([[v]], np.uint8) for v in (1, 2, 9, 9, label)), f"{k + 1:05d}.jpg")
        plain(folder / "cars_train" / f"{k + 1:05d}.jpg", 60 * label)
    (folder / "devkit").mkdir()
    savemat(folder / "devkit" / "cars_train_annos.mat", {"annotations": rows})
    names = np.array([["AM General Hummer SUV 2000", "Acura RL Sedan 2012", "Ram C/V Minivan"]], object)
    savemat(folder / "devkit" / "cars_meta.mat", {"class_names": names})
    return folder


def test_cars(tmp_path, facts):
    folder = cars(tmp_path)
    facts("cars", images=9, classes=3, tasks=3, orders=None)
    data = load("cars", 8, tmp_path)
    assert data.labels.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert abs(data.images[:, 0].astype(int) - 60 * (data.labels[:, None, None] + 1)).max() <= 1
    assert data.classes == ["AM General Hummer SUV 2000", "Acura RL Sedan 2012", "Ram C/V Minivan"]
    facts("cars", images=10)
    refused(lambda: load("cars", 9, tmp_path), "9 images", "has 10")
    annotations = folder / "devkit" / "cars_train_annos.mat"
    content = annotations.read_bytes()
    savemat(annotations, {"annotations": np.arange(3)})
    refused(lambda: load("cars", 9, tmp_path), "not those that were published", folder)
    annotations.write_bytes(content)
    (folder / "devkit" / "cars_meta.mat").write_bytes(b"MATLAB")
    refused(lambda: load("cars", 9, tmp_path), folder / "devkit" / "cars_meta.mat", "good copy")
    (folder / "cars_train" / "00003.jpg").unlink()
    refused(lambda: load("cars", 9, tmp_path), "1 of 9 pictures", folder / "cars_train" / "00003.jpg")


# --------------------------------------------------------------------------------------------- preparation


@pytest.fixture
def many(tmp_path):
    """1040 small pictures in two classes; above streams.FEW, so several processes work."""
    for c, count in (("a", 1000), ("b", 40)):
        (tmp_path / "many" / c).mkdir(parents=True)
        for k in range(count):
            Image.fromarray(rng.integers(0, 256, (5, 4, 3), np.uint8)).save(tmp_path / "many" / c / f"{k:04d}.png")
    return tmp_path / "many"


def test_one_process_or_several(many, tmp_path, monkeypatch):
    monkeypatch.setattr(streams, "cpu_count", lambda: 2)
    data = load(str(many), 8, tmp_path / "two")
    assert data.images.shape == (1040, 3, 8, 8)
    for row, path in ((0, "a/0000.png"), (700, "a/0700.png"), (1039, "b/0039.png")):
        assert (data.images[row] == streams.read_picture(many / path, 8)).all()
    monkeypatch.setattr(streams, "cpu_count", lambda: 1)
    assert (load(str(many), 8, tmp_path / "one").images == data.images).all()
    monkeypatch.setattr(streams, "cpu_count", lambda: 2)
    (many / "a" / "0900.png").write_bytes(b"\x89PNG damaged")
    streams.class_folders.cache_clear()
    refused(lambda: load(str(many), 8, tmp_path / "two"), many / "a" / "0900.png", "cannot read picture")
    assert len(list((tmp_path / "two" / "prepared").glob("many*"))) == 1


def test_other_processes_do_not_run_the_script_again(many, tmp_path):
    script = "print('once'); import streams; streams.cpu_count = lambda: 2\n"
    script += f"data = streams.load_data(streams.scenario({str(many)!r}), 8, 'data')\nprint(len(data.images))\n"
    (tmp_path / "script.py").write_text(script)
    result = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60,
                            env={**os.environ, "PYTHONPATH": str(ROOT)})  # fmt: skip
    assert result.stdout.count("once") == 1 and result.stdout.endswith("1040\n"), result.stderr


def test_killed_and_started_again(many, tmp_path):
    """SIGKILL in the middle: nothing half-done is ever taken for whole, and no process is left behind."""
    code = f"import streams; streams.load_data(streams.scenario({str(many)!r}), 8, {str(tmp_path / 'data')!r})"
    child = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE)
    prepared = tmp_path / "data" / "prepared"
    while child.poll() is None and not list(prepared.glob("*.tmp/images.npy")):
        time.sleep(0.002)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    left = [p.suffix for p in prepared.iterdir() if p.is_dir()]
    assert left == [".tmp"]
    data = load(str(many), 8, tmp_path / "data")
    assert (data.images[1039] == streams.read_picture(many / "b/0039.png", 8)).all() and data.images[0].any()
    assert [p.suffix for p in prepared.iterdir() if p.is_dir()] != [".tmp"]
    child.communicate(timeout=30)  # ends when the last process that holds its output has ended


def test_interrupted_and_started_again(tmp_path, facts, monkeypatch):
    cub(tmp_path)
    facts("cub", images=12, classes=6, tasks=3)
    original = streams.read_picture
    calls = []

    def interrupted(path, size):
        calls.append(path)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return original(path, size)

    monkeypatch.setattr(streams, "read_picture", interrupted)
    with pytest.raises(KeyboardInterrupt):
        load("cub", 8, tmp_path)
    assert [p for p in (tmp_path / "prepared").iterdir() if p.is_dir()] == []
    assert len(load("cub", 8, tmp_path).labels) == 12
    assert len(calls) == 5 + 12
    load("cub", 8, tmp_path)
    assert len(calls) == 5 + 12


def test_a_broken_preparation_is_named(tmp_path, facts):
    cub(tmp_path)
    facts("cub", images=12, classes=6, tasks=3)
    load("cub", 8, tmp_path)
    images = next((tmp_path / "prepared").glob("cub-8*")) / "images.npy"
    images.write_bytes(images.read_bytes()[:-1])
    refused(lambda: load("cub", 8, tmp_path), images.parent, "remove that folder")
    images.write_bytes(b"")
    refused(lambda: load("cub", 8, tmp_path), images.parent, "remove that folder")


def test_the_digest_is_of_the_content(tmp_path, facts):
    facts("cub", images=12, classes=6, tasks=3)
    digests = []
    for folder in ("a", "b", "c"):
        where, paths, labels = cub(tmp_path / folder)
        if folder == "c":
            plain(where / "images" / paths[1], 20 * labels[1] + 10)
        digests.append(load("cub", 8, tmp_path / folder).digest)
    assert digests[0] == digests[1] != digests[2] and len(digests[0]) == 12


def test_what_lies_about_in_a_folder(tmp_path, capsys):
    folder = tmp_path / "pictures" / "junk"
    (folder / ".ipynb_checkpoints").mkdir(parents=True)
    for junk in (".DS_Store", "Thumbs.db", "notes.txt", ".ipynb_checkpoints/old.png"):
        (folder / junk).write_bytes(b"not an image")
    picture = Image.fromarray(rng.integers(0, 256, (40, 40, 3), np.uint8))
    picture.save(folder / "ok.png")
    assert len(load(str(tmp_path / "pictures"), 8, tmp_path).labels) == 1
    assert capsys.readouterr().err.count("2 entries") == 1
    jpeg = io.BytesIO()
    picture.save(jpeg, "JPEG")
    (folder / "half.jpg").write_bytes(jpeg.getvalue()[: len(jpeg.getvalue()) // 2])
    streams.class_folders.cache_clear()
    refused(lambda: load(str(tmp_path / "pictures"), 8, tmp_path), "half.jpg")


def test_every_kind_of_picture_becomes_rgb(tmp_path):
    picture = Image.fromarray(rng.integers(0, 256, (40, 40, 3), np.uint8))
    clear = picture.copy()
    clear.putalpha(128)
    ramp = np.linspace(0, 65535, 1600).reshape(40, 40).astype(np.uint16)
    kinds = {"rgb.png": picture, "gray.png": picture.convert("L"), "palette.png": picture.convert("P"),
             "rgba.png": clear, "cmyk.jpg": picture.convert("CMYK"), "onebit.png": picture.convert("1"),
             "la.png": picture.convert("LA"), "gray16.png": Image.fromarray(ramp)}  # fmt: skip
    for file, image in kinds.items():
        image.save(tmp_path / file)
    read = {file: streams.read_picture(tmp_path / file, 40) for file in kinds}
    whole = np.asarray(picture).transpose(2, 0, 1)
    assert (read["rgb.png"] == whole).all() and (read["rgba.png"] == whole).all()
    assert set(np.unique(read["onebit.png"])) == {0, 255}
    assert (read["gray16.png"] == np.round(ramp / 257)).all() and abs(read["gray16.png"].mean() - 127.5) < 1
    for file in ("gray.png", "la.png", "onebit.png", "gray16.png"):
        assert (read[file] == read[file][:1]).all()
    assert abs(read["cmyk.jpg"].astype(int) - whole).mean() < 40 and read["palette.png"].std() > 40


def test_one_rule_for_arrays_and_files_of_every_format(tmp_path):
    pixels = rng.integers(0, 256, (70, 40, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    Image.fromarray(pixels).save(tmp_path / "a.jpg", quality=100, subsampling=0)
    Image.fromarray(np.asarray(Image.open(tmp_path / "a.jpg"))).save(tmp_path / "b.png")
    for size in (12, 16, 30, 40, 64):
        array = streams.squash(pixels.transpose(2, 0, 1)[None], size)[0]
        assert (streams.read_picture(tmp_path / "a.png", size) == array).all()
        jpeg = streams.read_picture(tmp_path / "a.jpg", size)
        assert (streams.read_picture(tmp_path / "b.png", size) == jpeg).all()
    fair = np.asarray(Image.fromarray(pixels[:40]).resize((30, 30), Image.Resampling.BICUBIC)).transpose(2, 0, 1)
    assert (streams.squash(pixels[:40].transpose(2, 0, 1)[None], 30)[0] == fair).all()  # less than half: bicubic alone


def test_gray_is_repeated_before_or_after():
    gray = rng.integers(0, 256, (3, 1, 28, 28), np.uint8)
    assert (streams.squash(gray, 32) == streams.squash(gray.repeat(3, axis=1), 32)).all()
    assert streams.squash(gray, 28).shape == (3, 3, 28, 28) and (streams.squash(gray, 28) == gray).all()


def test_cores_are_counted_everywhere(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert common.cpu_count() == os.cpu_count()


# -------------------------------------------------------------------------------------- names, orders, runs


def test_what_is_known_of_every_data_set():
    """CLoG, table 1."""
    known = {name: (f["images"], f["classes"], f["tasks"], f["preset"]) for name, f in readers.DATASETS.items()
             if name != "digits"}  # fmt: skip
    assert known == {
        "mnist": (60_000, 10, 5, "S"),
        "fashion": (60_000, 10, 5, "S"),
        "cifar10": (50_000, 10, 5, "S"),
        "imagenet64": (1_281_167, 1000, 20, "M"),
        "flowers": (7_169, 100, 5, "L"),
        "cub": (11_788, 200, 10, "L"),
        "cars": (8_144, 196, 14, "L"),
    }
    names = json.loads((ROOT / "reference" / "class_names.json").read_text())
    assert [len(names[n]) for n in ("mnist", "fashion", "cifar10", "flowers")] == [10, 10, 10, 102]
    assert names["flowers"] == torchvision.datasets.Flowers102.classes
    assert names["fashion"] == torchvision.datasets.FashionMNIST.classes


@pytest.mark.parametrize("name", NAMES)
def test_five_orders_of_every_data_set(name):
    scene = streams.scenario(name)
    orders = [scene.order(k) for k in range(1, 6)]
    assert orders[0] == list(range(scene.classes)) and len({*map(tuple, orders)}) == 5
    assert all(sorted(order) == orders[0] for order in orders)
    half = streams.scenario(f"{name}:3-7")
    assert half.order(2) == [c - 3 for c in orders[1] if 3 <= c <= 7] and half.name == f"{name}_3-7"


def test_orders_that_nobody_published_are_drawn_by_the_rule():
    frozen = json.loads((ROOT / "reference" / "class_orders.json").read_text())
    for name, classes, drawn in (("cars", 196, range(2, 6)), ("imagenet", 1000, (4, 5))):
        for k in drawn:
            rule = sorted(range(classes), key=lambda c, n=classes, k=k: common.hash32(("class order", n, k, c)))
            assert frozen[name][k - 1] == rule
    assert streams.scenario("cars").order(2)[:4] == frozen["cars"][1][:4]


@pytest.mark.parametrize("name", NAMES)
def test_dry_run_without_data(name, tmp_path, capsys, network):
    flags = ["--dry_run", "--out", str(tmp_path / "runs"), "--data", str(tmp_path / "data")]
    train_ddim.train(train_ddim.parse_args(["--dataset", name, *flags]))
    out, err = capsys.readouterr()
    facts = readers.DATASETS[name]
    assert out.count("\ntask ") == facts["tasks"] and f'"classes": {facts["classes"]}' in out
    assert f'"preset": "{facts["preset"]}"' in out and f"{facts['images']:,}" in err and err.count("\n") == 1
    train_ddim.train(train_ddim.parse_args(["--dataset", f"{name}:0-3", "--tasks", "2", "--order", "5", *flags]))
    assert capsys.readouterr().out.count("\ntask ") == 2
    assert not list(tmp_path.iterdir()) and not network.asked


@pytest.mark.parametrize("name", NAMES)
def test_without_network_and_without_data(name, tmp_path, capsys):
    """One line, which says what goes where."""
    start = time.monotonic()
    with pytest.raises(SystemExit) as end, common.one_line_errors():
        train_ddim.train(train_ddim.parse_args(["--dataset", name, "--data", str(tmp_path), "--out", str(tmp_path)]))
    error = capsys.readouterr().err
    assert end.value.code == 2 and error.startswith("error: ") and error.count("\n") == 1
    for word in {
        "mnist": [f"into {tmp_path / 'MNIST' / 'raw'}: https", IMAGES, LABELS],
        "fashion": [f"into {tmp_path / 'FashionMNIST' / 'raw'}: http", IMAGES, LABELS],
        "cifar10": [f"into {tmp_path}: https", "cifar-10-python.tar.gz"],
        "flowers": [f"into {tmp_path / 'flowers-102'}: https", "102flowers.tgz", "imagelabels.mat", "setid.mat"],
        "cub": [
            f"{tmp_path / 'CUB_200_2011'}",
            "images.txt",
            "image_class_labels.txt",
            "train_test_split.txt",
            "https",
        ],
        "cars": [f"{tmp_path / 'stanford_cars'}", "cars_train", "devkit/cars_train_annos.mat", "devkit/cars_meta.mat"],
        "imagenet64": [f"{tmp_path / 'imagenet64'}", "train_data_batch_1 ", "https://image-net.org"],
    }[name]:
        assert word in error, error
    assert time.monotonic() - start < 10 and not list(tmp_path.rglob("*.npy"))


def test_missing_data_are_said_before_pytorch_is_loaded(script, tmp_path):
    (tmp_path / "torch.py").write_text("raise SystemExit('PyTorch was loaded')")
    result = script("train_ddim.py", "--dataset", "cars", env={"PYTHONPATH": str(tmp_path)})
    assert result.returncode == 2 and result.stderr.startswith("error: cars: missing cars_train"), result.stderr
    assert result.stderr.count("\n") == 1


def test_places_that_are_none(tmp_path):
    refused(lambda: streams.scenario("~no-such-user/birds"), "~no-such-user/birds", "neither a folder nor")
    (tmp_path / "data").write_text("")
    refused(lambda: load("digits", 8, tmp_path / "data"), f"--data {tmp_path / 'data'} is a file")


def test_half_a_copy_of_cars_is_refused(tmp_path):
    plain(tmp_path / "stanford_cars" / "cars_train" / "00001.jpg", 9)
    with pytest.raises(common.UserError) as end:
        load("cars", 8, tmp_path)
    missing = str(end.value).split(";")[0]
    assert "devkit/cars_train_annos.mat, devkit/cars_meta.mat" in missing and "cars_train," not in missing


def test_a_run_on_28_pixels(idx, tmp_path):
    files, *_ = idx("mnist")
    for file, content in files.items():
        (tmp_path / "MNIST" / "raw" / file).write_bytes(content)
    assert train_ddim.parse_args(["--dataset", "mnist"]).size == 32
    args = train_ddim.parse_args(["--dataset", "mnist:2-5", "--tasks", "2", "--preset", "tiny", "--steps", "2",
                                  "--ddim_steps", "2", "--data", str(tmp_path), "--out", str(tmp_path)])  # fmt: skip
    train_ddim.train(args)
    config = json.loads(next(tmp_path.glob("mnist_2-5/ddim/ncl/*/config.json")).read_text())
    assert config["data"]["classes"] == ["2", "3", "4", "5"] and config["data"]["digest"].endswith("-2-5")
    assert list(tmp_path.glob("mnist_2-5/ddim/ncl/*/DONE"))
