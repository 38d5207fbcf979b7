"""The published data sets: one function each that says what to read, and one table of facts about them.

A reader gets the folder of its data set and returns a Source. Nothing here resizes, sorts or keeps anything:
streams.py does, once. Called readers.py because a datasets.py beside the scripts would be taken for the package of
that name by transformers and accelerate.

From top to bottom: downloads · pickles · one reader a data set · the table.
"""

import gzip
import hashlib
import http.client
import itertools
import json
import math
import os
import pickle
import queue
import re
import shutil
import struct
import tarfile
import threading
import urllib.request
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from common import ROOT, UserError, fail

PATIENCE = 5  # seconds until a server must have answered, its mirrors included
STALL = 30  # seconds without a byte after which a download is given up


@dataclass
class Source:
    """What a data set consists of, before it is resized: either `pictures` or `blocks`."""

    labels: np.ndarray  # int64 (N,), 0-based, whatever the files count from
    names: list  # class names, index = label
    pictures: list | None = None  # N paths
    blocks: Iterable | None = None  # uint8 arrays (n, C, H, W), N rows in all; C is 1 or 3; one is in memory at a time


def frozen_names(name):
    """Class names of a data set whose files do not carry them; numbers where we do not know any."""
    known = json.loads((ROOT / "reference" / "class_names.json").read_text())
    facts = DATASETS[name]
    return known.get(name) or [str(c) for c in range(facts.get("published", facts["classes"]))]


# ---------------------------------------------------------------------------------------------- downloads


def is_whole(path, md5):
    """Whether the file is there with this checksum."""
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest() == md5


def fetch(folder, files, damaged=None):
    """Makes sure that `files`, {name: (md5, [urls])}, lie in `folder`: downloads what is missing or damaged.

    damaged: a file made from these that turned out to be broken, for the message. Good files need no network;
    without one this ends in a UserError after at most PATIENCE seconds, which says what goes where.
    """
    for name, (md5, urls) in files.items():
        path = folder / name
        if is_whole(path, md5):
            continue
        broken = path if path.exists() else damaged
        for url in urls:
            try:
                download(url, path, md5, PATIENCE / len(urls))
                break
            except (OSError, http.client.HTTPException) as error:
                reason = getattr(error, "reason", None) or error
        else:
            lacking = ", ".join(urls[0] for file, (md5, urls) in files.items() if not is_whole(folder / file, md5))
            what, advice = (f"{broken} is damaged", "remove it and ") if broken else (f"{path} is not there", "")
            fail(f"{what} and cannot be downloaded ({url}: {reason}); {advice}put into {folder}: {lacking}")


def download(url, path, md5, patience):
    """The file at `url` under a temporary name, checked, then renamed to `path`; OSError if that fails."""
    answer = queue.SimpleQueue()

    def ask():  # in a thread of its own, since looking up a name has no time limit
        try:
            request = urllib.request.Request(url, headers={"User-Agent": "Mozilla/5.0"})
            answer.put(urllib.request.urlopen(request, timeout=STALL))
        except Exception as error:
            answer.put(error)

    threading.Thread(target=ask, daemon=True).start()
    try:
        response = answer.get(timeout=patience)
    except queue.Empty:
        raise TimeoutError(f"no answer within {patience:g} s") from None
    if isinstance(response, Exception):
        raise response if isinstance(response, OSError) else OSError(str(response))
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary, digest = path.with_name(f"{path.name}.{os.getpid()}.tmp"), hashlib.md5(usedforsecurity=False)
    bar = tqdm(total=response.length, desc=f"downloading {path.name}", unit="B", unit_scale=True, disable=None)
    try:
        with response, bar, open(temporary, "wb") as file:
            while piece := response.read(1 << 16):
                file.write(piece)
                digest.update(piece)
                bar.update(len(piece))
        if digest.hexdigest() != md5:
            raise OSError("what arrived has the wrong checksum")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def unpack(archive, folder):
    """Replaces `folder` by the folder of that name in a tar archive; whole or not at all."""
    temporary = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        with tarfile.open(archive) as tar:
            tar.extraction_filter = getattr(tarfile, "data_filter", None)  # Python before 3.11.4 has none
            for member in tqdm(tar, f"unpacking {archive.name}", unit="files", disable=None):
                tar.extract(member, temporary)
        shutil.rmtree(folder, ignore_errors=True)
        (temporary / folder.name).rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def need(name, folder, entries, origin):
    """A user's copy: ends with what is missing, what belongs there, and where it comes from."""
    missing = [entry for entry in entries if not (folder / entry).exists()]
    if missing:
        fail(f"{name}: missing {', '.join(missing)} in {folder}; it needs {', '.join(entries)}, from {origin}")


def need_pictures(name, pictures):
    missing = [path for path in pictures if not path.is_file()]
    if missing:
        fail(f"{name}: {len(missing)} of {len(pictures)} pictures are missing, the first is {missing[0]}; complete the "
             "copy")  # fmt: skip


# ------------------------------------------------------------------------------------------------ pickles


class ArrayUnpickler(pickle.Unpickler):
    """Builds NumPy arrays, containers, numbers and strings; refuses any other class or function."""

    def find_class(self, module, name):
        if module == "numpy" and name in ("ndarray", "dtype"):
            return getattr(np, name)
        core = module.replace("numpy.core.", "numpy._core.")  # its name before NumPy 2
        if core == "numpy._core.multiarray" and name in ("_reconstruct", "scalar"):
            return getattr(np._core.multiarray, name)
        if (core, name) == ("numpy._core.numeric", "_frombuffer"):
            return np._core.numeric._frombuffer
        if (module, name) == ("_codecs", "encode"):  # how protocol 2 writes bytes
            return lambda text, encoding: text.encode("latin1")
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no data set needs")


def unpickle(path):
    """The dict in a pickle file, of Python 2 or 3; keys are strings."""
    try:
        with open(path, "rb") as file:
            content = ArrayUnpickler(file, encoding="bytes").load()
        return {key.decode() if isinstance(key, bytes) else key: value for key, value in content.items()}
    except Exception as error:  # a damaged pickle raises a dozen kinds
        fail(f"cannot read {path}: {error}; put a good copy in its place")


def load_mat(path):
    from scipy.io import loadmat

    try:
        return loadmat(path, squeeze_me=True)
    except Exception as error:
        fail(f"cannot read {path}: {error}; put a good copy in its place")


# ------------------------------------------------------------------------------------------------ readers


def mnist(folder, split="train"):
    """60,000 hand-written digits, 28², gray (test: 10,000): two idx files, unpacked or not, as torchvision has them."""
    return idx_files("mnist", folder, "MNIST", split)


def fashion(folder, split="train"):
    """60,000 products, 28², gray (test: 10,000); the format of MNIST."""
    return idx_files("fashion", folder, "FashionMNIST", split)


def idx_files(name, folder, published, split):
    import torchvision

    published = getattr(torchvision.datasets, published)
    files = dict(published.resources[:2] if split == "train" else published.resources[2:])  # images, labels
    arrays, damaged = {}, None
    for file in files:
        unpacked = folder / file.removesuffix(".gz")
        if unpacked.is_file():  # has no published checksum, but says how long it is
            arrays[file] = idx_array(unpacked.read_bytes())
            damaged = unpacked if arrays[file] is None else damaged
    wanted = [file for file in files if arrays.get(file) is None]
    fetch(folder, {file: (files[file], [m + file for m in published.mirrors]) for file in wanted}, damaged)
    for file in wanted:
        arrays[file] = idx_array(gzip.decompress((folder / file).read_bytes()))
    images, labels = (arrays[file] for file in files)
    if labels.ndim != 1 or images.shape != (len(labels), 28, 28):
        fail(f"{name}: {folder} holds images of {images.shape} and labels of {labels.shape}, not of (n, 28, 28) and "
             "(n,); put a good copy there")  # fmt: skip
    return Source(labels.astype(np.int64), frozen_names(name), blocks=[images[:, None]])


def idx_array(content):
    """The uint8 array of an idx file (0 0 8 rank, sizes as big-endian int32, values); None if it is not whole."""
    if len(content) < 16 or content[:3] != b"\0\0\x08" or not 1 <= content[3] <= 3:
        return None
    shape = struct.unpack_from(f">{content[3]}I", content, 4)
    values = np.frombuffer(content, np.uint8, offset=4 + 4 * len(shape))
    return values.reshape(shape) if values.size == math.prod(shape) else None


def cifar10(folder, split="train"):
    """50,000 photographs, 32², RGB in planes: five pickles of Python 2 (test: one, 10,000), and batches.meta."""
    from torchvision.datasets import CIFAR10

    parts = CIFAR10.train_list if split == "train" else CIFAR10.test_list
    files = dict([*parts, (CIFAR10.meta["filename"], CIFAR10.meta["md5"])])
    broken = [folder / file for file, md5 in files.items() if not is_whole(folder / file, md5)]
    if broken:
        damaged = next((path for path in broken if path.exists()), None)
        fetch(folder.parent, {CIFAR10.filename: (CIFAR10.tgz_md5, [CIFAR10.url])}, damaged)
        unpack(folder.parent / CIFAR10.filename, folder)
    batches = [unpickle(folder / file) for file, _ in parts]
    images = np.concatenate([batch["data"] for batch in batches]).reshape(-1, 3, 32, 32)
    labels = np.concatenate([batch["labels"] for batch in batches]).astype(np.int64)
    names = [name.decode() for name in unpickle(folder / CIFAR10.meta["filename"])["label_names"]]
    return Source(labels, names, blocks=[images])


def flowers(folder):
    """Oxford Flowers: the 7,169 photographs of its training and test split; its lists count classes from 1."""
    from torchvision.datasets import Flowers102 as Published

    files = {f: (md5, [Published._download_url_prefix + f]) for f, md5 in Published._file_dict.values()}
    archive, label_file, split_file = (Published._file_dict[key][0] for key in ("image", "label", "setid"))
    jpg = folder / "jpg"
    fetch(folder, {f: files[f] for f in files if f != archive or not jpg.is_dir()})
    splits = load_mat(folder / split_file)
    ids = np.sort(np.concatenate([splits["trnid"], splits["tstid"]])).astype(int)
    labels = load_mat(folder / label_file)["labels"].astype(np.int64)[ids - 1] - 1
    pictures = [jpg / f"image_{i:05d}.jpg" for i in ids]
    if not all(path.is_file() for path in pictures):
        fetch(folder, {archive: files[archive]})
        unpack(folder / archive, jpg)
        need_pictures("flowers", pictures)
    return Source(labels, frozen_names("flowers"), pictures)


def cub(folder):
    """Caltech-UCSD Birds 200-2011, all 11,788 photographs: three lists, `<image id> <value>` a line, any order."""
    lists = ["images.txt", "image_class_labels.txt", "train_test_split.txt"]
    origin = "CUB_200_2011.tgz (https://www.vision.caltech.edu/datasets/cub_200_2011/)"
    need("cub", folder, [*lists, "images"], origin)

    def read(file):
        lines = (folder / file).read_text(errors="replace").splitlines()
        pairs = [line.split(maxsplit=1) for line in lines if line.strip()]
        if any(len(pair) < 2 or not pair[0].isdigit() for pair in pairs):
            fail(f"{folder / file} is damaged: each line should be a number and a value; put a good copy in its place")
        found = {int(number): value.strip() for number, value in pairs}
        if len(found) < len(pairs):
            fail(f"{folder / file} is damaged: a number stands there twice; put a good copy in its place")
        return found

    paths, labels, split = map(read, lists)
    if not paths.keys() == labels.keys() == split.keys():
        odd = min((paths.keys() ^ labels.keys()) | (paths.keys() ^ split.keys()))
        fail(f"cub: image {odd} does not stand in all of {', '.join(lists)} in {folder}; put a good copy there")
    ids = sorted(paths)
    for i in ids:  # 001.Black_footed_Albatross/Black_Footed_Albatross_0046_18.jpg
        if not paths[i].startswith(f"{int(labels[i]):03d}."):
            fail(f"cub: image {i} is {paths[i]} in images.txt, but of class {labels[i]} in image_class_labels.txt in "
                 f"{folder}; put a good copy there")  # fmt: skip
    pictures = [folder / "images" / paths[i] for i in ids]
    need_pictures("cub", pictures)
    names = frozen_names("cub")
    if (folder / "classes.txt").is_file():  # 1 001.Black_footed_Albatross
        names = [re.sub(r"^\d+\.", "", name).replace("_", " ") for _, name in sorted(read("classes.txt").items())]
    return Source(np.array([int(labels[i]) - 1 for i in ids], np.int64), names, pictures)


def cars(folder):
    """Stanford Cars, the 8,144 training photographs: the devkit's .mat files, classes from 1."""
    annotations, meta = "devkit/cars_train_annos.mat", "devkit/cars_meta.mat"
    origin = "cars_train.tgz and car_devkit.tgz of your own copy of Stanford Cars (its site is gone)"
    need("cars", folder, ["cars_train", annotations, meta], origin)
    rows = load_mat(folder / annotations)["annotations"]
    pictures = [folder / "cars_train" / Path(str(file)).name for file in rows["fname"]]
    need_pictures("cars", pictures)
    names = [str(name) for name in load_mat(folder / meta)["class_names"]]
    return Source(rows["class"].astype(np.int64) - 1, names, pictures)


def imagenet64(folder):
    """Down-sampled ImageNet (Chrabaszcz et al., 2017): ten parts, 64², RGB in planes, classes from 1.

    A part is a dict with `data` uint8 (n, 12288) and `labels`, as a pickle or an npz, in any sub-folder. The
    classes have an order of their own; map_clsloc.txt, published beside the data, has their names.
    """
    found = {}
    # rglob would not enter a linked folder
    below = sorted(Path(root, file) for root, _, files in os.walk(folder, followlinks=True) for file in files)
    for path in below:
        match = re.fullmatch(r"train_data_batch_(\d+)(\.\w+)?", path.name)
        if match and path.is_file():
            found.setdefault(int(match[1]), []).append(path)
    missing = [f"train_data_batch_{k}" for k in range(1, 11) if k not in found]
    if missing:
        fail(
            f"imagenet64: missing {', '.join(missing)} in {folder} and below; it needs train_data_batch_1 to _10, "
            "pickled or as npz, from https://image-net.org/download-images.php (down-sampled ImageNet, 64 × 64, train)"
        )
    twice = next((paths for paths in found.values() if len(paths) > 1), None)
    if twice:
        fail(f"imagenet64: {twice[0]} and {twice[1]} are the same part; keep one of them in {folder}")
    parts = [found[k][0] for k in range(1, 11)]
    labels = [part_of_imagenet(p, "labels") for p in tqdm(parts, "reading labels", unit="part", disable=None)]
    for k, j in itertools.combinations(range(10), 2):
        if np.array_equal(labels[k], labels[j]):  # the images are in random order
            fail(f"imagenet64: {parts[k]} and {parts[j]} hold the same labels; put a good copy of part {j + 1} there")
    names, file = frozen_names("imagenet64"), next((p for p in below if p.name == "map_clsloc.txt"), None)
    if file:  # n02119789 1 kit_fox
        rows = [line.split() for line in file.read_text().splitlines() if line.strip()]
        names = [row[2].replace("_", " ") for row in sorted(rows, key=lambda row: int(row[1]))]
    blocks = (part_of_imagenet(path, "data") for path in parts)
    return Source(np.concatenate(labels) - 1, names, blocks=blocks)


def part_of_imagenet(path, key):
    """`labels` as int64 (n,), counted from 1, or `data` as uint8 (n, 3, 64, 64), of a part in either format."""
    with open(path, "rb") as file:
        packed = file.read(2) == b"PK"
    try:
        if packed:
            with np.load(path, allow_pickle=False) as part:
                values, count = part[key], part["labels"].size
        else:
            part = unpickle(path)
            values, count = part[key], len(part["labels"])
        values = np.asarray(values, np.int64).ravel() if key == "labels" else np.asarray(values)
    except UserError:
        raise
    except Exception as error:  # a damaged file raises a dozen kinds
        fail(f"cannot read {key} of {path}: {error}; put a good copy in its place")
    if key == "labels":
        return values
    if values.dtype != np.uint8 or values.ndim != 2 or values.shape[1] != 3 * 64 * 64:
        fail(f"{path} holds {values.dtype} rows of {values.shape[1:]}, not uint8 of 12288: is it the 64 × 64 version?")
    if len(values) != count:  # the pictures of all later parts would get each other's labels
        fail(f"{path} holds {len(values):,} images, but {count:,} labels; put a good copy in its place")
    return values.reshape(-1, 3, 64, 64)


# -------------------------------------------------------------------------------------------------- table

# name -> what is known before anything is read.
#   classes, tasks, preset (of the training scripts), orders (entry of reference/class_orders.json)
#   images (test): size of the training set as CLoG's table 1 counts it, which the files must have
#   published: classes in the files, where the benchmark drops the last ones
#   folder: where the files lie within --data
DATASETS = {
    "digits": dict(classes=10, tasks=5, preset="tiny", orders="ten"),  # embedded in scikit-learn
    "mnist": dict(classes=10, tasks=5, preset="S", orders="ten", images=60_000, test=10_000,
                  folder="MNIST/raw", read=mnist),
    "fashion": dict(classes=10, tasks=5, preset="S", orders="ten", images=60_000, test=10_000,
                    folder="FashionMNIST/raw", read=fashion),
    "cifar10": dict(classes=10, tasks=5, preset="S", orders="ten", images=50_000, test=10_000,
                    folder="cifar-10-batches-py", read=cifar10),
    "imagenet64": dict(classes=1000, tasks=20, preset="M", orders="imagenet", images=1_281_167, folder="imagenet64",
                       read=imagenet64),
    "flowers": dict(classes=100, published=102, tasks=5, preset="L", orders="flowers", images=7_169,
                    folder="flowers-102", read=flowers),
    "cub": dict(classes=200, tasks=10, preset="L", orders="classes200", images=11_788, folder="CUB_200_2011",
                read=cub),
    "cars": dict(classes=196, tasks=14, preset="L", orders="cars", images=8_144, folder="stanford_cars", read=cars),
}  # fmt: skip

# Concepts, for train_concepts.py: a few pictures each. toys and more_toys are those of tiny_world.py; objects is the
# paper's, one folder of pictures a concept, in <data>/objects/.
CONCEPTS = {
    "toys": dict(classes=5, tasks=5, preset="concepts", orders="objects"),
    "more_toys": dict(classes=5, tasks=5, preset="concepts", orders="objects"),
    "objects": dict(classes=5, tasks=5, preset="concepts", orders="objects"),
}
