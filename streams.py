"""The streams of tasks made of data sets.

`--dataset` → Scenario (what is known before anything is read) → Data (images at training size) → list of Task.
A task is its classes and an index array: pooling tasks pools indices, never images.

From top to bottom: scenarios · pictures · loading · preparing · tasks. What is published where is in readers.py.
"""

import contextlib
import functools
import hashlib
import json
import multiprocessing
import os
import re
import signal
import sys
import threading
import types
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from common import ROOT, cpu_count, fail, hash32, locked, new_folder
from readers import CONCEPTS, DATASETS, Source, frozen_names

PICTURES = {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
RULE = "squash, reducing_gap 1, bicubic"  # part of the name of what is prepared: a change of `resized` changes it
TOYS = ("toys", "more_toys")  # the concepts of tiny_world.py
CHUNK = 64  # pictures that a process prepares at a time
FEW = 512  # pictures up to which further processes are not worth starting


@dataclass
class Data:
    """A data set at its training resolution."""

    name: str  # as run folders and tables call it
    images: np.ndarray  # uint8 (N, 3, H, W); memory-mapped where it comes from pictures; None in a dry run
    labels: np.ndarray  # int64 (N,), 0-based
    classes: list  # class names, index = label
    digest: str | None  # short hash of the content; of a user's folder: of names, sizes and times; None if not known

    def names(self, classes):
        """The names of these class ids, for a line of text."""
        return " ".join(self.classes[c] for c in classes)


@dataclass
class Task:
    number: int  # from 1
    classes: list  # class ids in the order of the stream
    indices: np.ndarray  # rows of Data that belong to it


@dataclass
class Scenario:
    """What `--dataset` says: a data set, or a range of its classes as a scenario of its own.

    Classes of a range are numbered from 0 again, so two halves of a data set have the same configuration.
    """

    name: str
    dataset: str | None  # of readers.DATASETS; None for a user's own pictures
    folder: Path | None  # of their class folders
    first: int
    last: int
    total: int  # classes of the whole data set
    tasks: int
    preset: str | None  # None: by the size of the pictures
    orders: str | None  # the entry of reference/class_orders.json

    @property
    def classes(self):
        return self.last - self.first + 1

    def order(self, number):
        """Class order `number` (1–5) as a list of class ids; 1 is the identity.

        Orders that nobody published are drawn by sorting hashes, which no library version can change. A
        range of classes keeps their relative order.
        """
        if self.orders:
            whole = json.loads((ROOT / "reference" / "class_orders.json").read_text())[self.orders][number - 1]
        else:
            whole = list(range(self.total))
            if number > 1:
                whole.sort(key=lambda c: hash32(("class order", self.total, number, c)))
        return [c - self.first for c in whole if self.first <= c <= self.last]


def scenario(text):
    """Reads `NAME`, `NAME:FIRST-LAST` or a path to class folders (with or without a range)."""
    if not text:
        fail("--dataset is empty: name a data set or a folder")
    match = None if Path(text).is_dir() else re.fullmatch(r"(.+):(\d+)-(\d+)", text)
    name = match[1] if match else text
    published = DATASETS | CONCEPTS
    if name in published:
        known, dataset, folder, short = published[name], name, None, name
    else:
        dataset, folder = None, Path(os.path.expanduser(name))  # that of Path raises if there is no such user
        if not folder.is_dir():
            fail(f"unknown data set '{name}': neither a folder nor one of {', '.join(published)}")
        folder = folder.resolve()
        known = dict(classes=len(class_folders(folder)), tasks=5, preset=None, orders=None)
        short = re.sub(r"[^\w.-]", "_", folder.name) or "pictures"
        if short in published:  # a folder called like a data set must not share its column in the tables
            short += "_folder"
    first, last = (int(match[2]), int(match[3])) if match else (0, known["classes"] - 1)
    if not first <= last < known["classes"]:
        fail(f"class range {first}-{last} of '{name}' is not within 0-{known['classes'] - 1}")
    if match:
        short += f"_{first}-{last}"
    count = last - first + 1
    tasks = known["tasks"] if count % known["tasks"] == 0 else count
    about = known["classes"], tasks, known["preset"], known["orders"]
    return Scenario(short, dataset, folder, first, last, *about)


@functools.lru_cache  # read once a process, which also says the note once
def class_folders(folder):
    """[(class name, [picture paths])], sorted by name; hidden entries and what is no picture are left out."""
    found = []
    skipped = sum(p.suffix.lower() in PICTURES for p in folder.iterdir())  # beside the class folders
    for sub in sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith(".")):
        files = sorted(p for p in sub.iterdir() if not p.name.startswith("."))
        pictures = [p for p in files if p.suffix.lower() in PICTURES and not p.is_dir()]
        skipped += len(files) - len(pictures)
        if not pictures:
            fail(f"class folder {sub} holds no picture ({', '.join(sorted(PICTURES))}); fill or remove it")
        found.append((sub.name.encode("utf-8", "replace").decode(), pictures))
    if not found:
        fail(f"{folder} has no class folders: expected one sub-folder of pictures a class")
    if skipped:
        print(f"note: {skipped} entries in {folder} are no pictures of a class and are left out", file=sys.stderr)
    return found


def picture_size(folder):
    """The shorter side in pixels of the first picture, by which a folder gets its preset."""
    from PIL import Image

    path = class_folders(folder)[0][1][0]
    try:
        with Image.open(path) as image:
            return min(image.size)
    except Exception as error:
        fail(f"cannot read picture {path}: {error}")


def read_picture(path, size):
    """One picture as uint8 (3, size, size): turned upright (EXIF), 8-bit, three channels, squashed.

    16-bit gray is scaled, not clipped; transparency is dropped; gray, palette, CMYK and 1-bit become RGB.
    UserError, with the path, if it cannot be read.
    """
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as image:
            ImageOps.exif_transpose(image, in_place=True)
            if image.mode.startswith("I") or image.mode == "F":
                values = np.asarray(image, np.float64)
                if image.mode.startswith("I;16") or values.max() > 255:
                    values = values / 257
                elif image.mode == "F" and values.max() <= 1:
                    values = values * 255
                image = Image.fromarray(values.round().clip(0, 255).astype(np.uint8))
            if image.mode != "RGB":
                image = image.convert("RGB")
            return resized(image, size).transpose(2, 0, 1)
    except Exception as error:  # PIL raises half a dozen kinds for a broken file
        fail(f"cannot read picture {path}: {error}; repair or remove it")


def resized(image, size):
    """A PIL image as uint8 (size, size) or (size, size, 3); proportions are not kept.

    Where a side is at least twice as long as wanted, whole blocks of pixels are averaged first (half the time of a
    bicubic filter over all of them, whatever the file format); the rest is bicubic.
    """
    from PIL import Image

    return np.asarray(image.resize((size, size), Image.Resampling.BICUBIC, reducing_gap=1.0))


def squash(images, size):
    """uint8 (n, 1 or 3, H, W) → (n, 3, size, size), by the rule of `read_picture`; of that size already: unchanged."""
    from PIL import Image

    if images.shape[2:] != (size, size):
        planes = [Image.fromarray(plane) for plane in images.reshape(-1, *images.shape[2:])]
        images = np.stack([resized(plane, size) for plane in planes]).reshape(len(images), -1, size, size)
    return np.ascontiguousarray(np.broadcast_to(images, (len(images), 3, size, size)))


# ------------------------------------------------------------------------------------------------ loading


def load_data(scenario, size, cache, read=True, split="train"):
    """The scenario's images at `size` × `size`; `read=False` leaves the images out (dry run).

    cache: the folder of --data. split: train, or test for those that have one apart from what is trained on.
    UserError if the data are neither there nor to be had.
    """
    if Path(cache).is_file():
        fail(f"--data {cache} is a file: name a folder")
    if split == "test" and "test" not in DATASETS.get(scenario.dataset, {}):
        tests = ", ".join(name for name, facts in DATASETS.items() if "test" in facts)
        fail(f"{scenario.name} has no test split here ({tests} have): use --reference train")
    if scenario.folder:
        images, labels, names, digest = load_folder(scenario.folder, size, cache, read)
    elif scenario.dataset == "digits" or scenario.dataset in TOYS:
        images, labels, names = load_digits(size) if scenario.dataset == "digits" else load_toys(scenario.dataset, size)
        digest = hashlib.sha256(images.tobytes() + labels.tobytes()).hexdigest()[:12]
    elif scenario.dataset == "objects":
        known = json.loads((ROOT / "reference" / "concepts.json").read_text())
        images, labels, names, digest = load_folder(Path(cache) / "objects", size, cache, read, [*known])
    else:
        images, labels, names, digest = load_published(scenario.dataset, size, cache, read, split)
    if scenario.classes < scenario.total:
        keep = np.flatnonzero((labels >= scenario.first) & (labels <= scenario.last))
        if keep[-1] - keep[0] + 1 == len(keep):  # one piece, as of all that is prepared: no copy in memory
            keep = slice(keep[0], keep[-1] + 1)
        images, labels = images[keep] if read else None, labels[keep] - scenario.first
        names = names[scenario.first : scenario.last + 1]
        digest = f"{digest}-{scenario.first}-{scenario.last}"
    return Data(scenario.name, images if read else None, labels, names, digest)


def load_digits(size):
    """scikit-learn's embedded 1797 hand-written digits of 8 × 8 pixels, 17 levels of gray."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = (digits.images * 255 / 16).round().astype(np.uint8)
    return squash(images[:, None], size), digits.target.astype(np.int64), [str(c) for c in range(10)]


def load_toys(name, size):
    """The concepts of the small world that needs no download, 32 × 32."""
    import tiny_world

    images, labels, names, _ = tiny_world.concept_pictures(name)
    return squash(images, size), labels, names


def load_folder(folder, size, cache, read, names=None):
    """A user's pictures, one sub-folder a class; `names`: those sub-folders, in this order, instead of all by name."""
    if names and (missing := [name for name in names if not (folder / name).is_dir()]):
        fail(
            f"{folder / missing[0]} is missing: a folder of pictures each is wanted in {folder} for {', '.join(names)}"
        )
    classes = class_folders(folder)
    if names:
        classes = [(name, dict(classes)[name]) for name in names]
    pictures = [path for _, paths in classes for path in paths]
    labels = np.repeat(np.arange(len(classes)), [len(paths) for _, paths in classes]).astype(np.int64)
    names = [name for name, _ in classes]
    listing = []
    for path in pictures:
        try:
            about = path.stat()
        except OSError as error:  # a link to nowhere
            fail(f"cannot read picture {path}: {error.strerror}; repair or remove it")
        listing.append(f"{path.relative_to(folder)} {about.st_size} {about.st_mtime_ns}")
    digest = hashlib.sha256("\n".join([f"{RULE} {size}", *listing]).encode("utf-8", "replace")).hexdigest()[:12]
    if not read:
        return None, labels, names, digest
    ready = Path(cache) / "prepared" / f"{folder.name}-{size}-{digest}"
    images, _ = prepared(ready, size, lambda: Source(labels, names, pictures))
    return images, labels, names, digest


def load_published(name, size, cache, read, split):
    """A data set of readers.py. Once it is prepared, its own files are needed no more."""
    facts, short = DATASETS[name], name if split == "train" else f"{name}-test"
    ready = Path(cache) / "prepared" / f"{short}-{size}-{hash32((RULE,)):08x}"
    if not (read or ready.exists()):
        published = facts.get("published", facts["classes"])
        labels = np.arange(facts["images"]) * published // facts["images"]
        print(f"note: {name} is not prepared yet; classes and total are known, the images of a task are equal shares "
              f"of the {facts['images']:,}", file=sys.stderr)  # fmt: skip
        return None, labels[labels < facts["classes"]], frozen_names(name)[: facts["classes"]], None
    images, labels = prepared(ready, size, lambda: read_published(name, Path(cache) / facts["folder"], split))
    try:
        names = json.loads((ready / "classes.json").read_text())
        sums = (ready / "SHA256SUMS").read_bytes()
    except (OSError, ValueError) as error:
        fail(f"the prepared pictures {ready} are broken ({error}); remove that folder")
    return images, labels, names, hashlib.sha256(sums).hexdigest()[:12]


def read_published(name, folder, split):
    """The Source of a data set, held against what is known of it, without the classes that the benchmark drops."""
    facts = DATASETS[name]
    published = facts.get("published", facts["classes"])
    try:
        source = facts["read"](folder) if split == "train" else facts["read"](folder, split)
    except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
        fail(f"{name}: the files in {folder} are not those that were published ({error!r}); get the published copy")
    found, low, high = len(source.labels), source.labels.min(initial=0), source.labels.max(initial=0)
    if found != (size := facts["images" if split == "train" else "test"]):
        fail(f"{name}: {found:,} images in {folder}, but the {split} split has {size:,}; get a whole copy")
    if (low, high) != (0, published - 1) or len(source.names) != published:
        fail(f"{name}: classes {low}-{high} and {len(source.names)} names in {folder}, counted from 0, but there are "
             f"{published}; get the published copy")  # fmt: skip
    if published > facts["classes"]:
        keep = np.flatnonzero(source.labels < facts["classes"])
        pictures = [source.pictures[k] for k in keep]
        source = Source(source.labels[keep], source.names[: facts["classes"]], pictures)
    return source


# ---------------------------------------------------------------------------------------------- preparing


def prepared(ready, size, source):
    """images (memory-mapped, uint8 (N, 3, size, size)) and labels of the folder `ready`, filled once.

    source: function that returns a Source, called if the folder is not there yet. Classes lie one behind the
    other, so a range of classes is one piece, and a task a few. What was interrupted is begun anew.
    """
    if not ready.exists():
        with locked(ready.parent, wait=True):
            if not ready.exists():
                fill(ready, size, source())
    try:
        return np.load(ready / "images.npy", mmap_mode="r"), np.load(ready / "labels.npy")
    except (OSError, ValueError, EOFError) as error:
        fail(f"the prepared pictures {ready} are broken ({error}); remove that folder")


def fill(ready, size, source):
    """Writes images.npy, labels.npy and classes.json. Never holds more than a block of the source in memory."""
    order, shape = np.argsort(source.labels, kind="stable"), (len(source.labels), 3, size, size)
    with new_folder(ready) as folder:
        with open(folder / "images.npy", "wb") as file:
            np.lib.format.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": shape})
            begin, end = file.tell(), file.tell() + int(np.prod(shape))
            if hasattr(os, "posix_fallocate"):  # a full disk ends it here, not after an hour
                os.posix_fallocate(file.fileno(), 0, end)
            file.truncate(end)
        with tqdm(total=len(order), desc=f"preparing {ready.name}", unit="img", disable=None) as bar:
            work = write_pictures if source.pictures else write_blocks
            work(source, order, size, folder / "images.npy", begin, bar)
        np.save(folder / "labels.npy", source.labels[order])
        (folder / "classes.json").write_text(json.dumps(source.names))
    print(
        f"{len(order):,} pictures of {len(source.names)} classes are prepared at {size} × {size} in {ready}", flush=True
    )


def write_blocks(source, order, size, path, begin, bar):
    place = np.empty_like(order)  # of a row of the source
    place[order] = np.arange(len(order))
    done, bytes_each = 0, 3 * size * size
    with open(path, "r+b") as file:
        for block in source.blocks:
            to = place[done : done + len(block)]
            by_place = np.argsort(to)
            for run in np.split(by_place, np.flatnonzero(np.diff(to[by_place]) != 1) + 1):
                for rows in np.split(run, range(1024, len(run), 1024)):
                    file.seek(begin + int(to[rows[0]]) * bytes_each)
                    file.write(squash(block[rows], size))
                    bar.update(len(rows))
            done += len(block)
            del block  # before the next one is read
    if done != len(order):
        fail(f"{done} images, but {len(order)} labels: get a whole copy of the data set")


def write_pictures(source, order, size, path, begin, bar):
    pictures = [source.pictures[k] for k in order]
    jobs = [(path, begin + k * 3 * size * size, pictures[k : k + CHUNK], size) for k in range(0, len(pictures), CHUNK)]
    if len(pictures) <= FEW or cpu_count() == 1:
        for job in jobs:
            bar.update(write_chunk(job))
        return
    try:
        with ProcessPoolExecutor(min(cpu_count(), 16), multiprocessing.get_context("spawn"), follow_parent) as pool:
            with without_main():
                counts = pool.map(write_chunk, jobs)
            for count in counts:
                bar.update(count)
    except BrokenProcessPool:
        fail("a process that prepares pictures was ended from outside (out of memory?); start again", code=1)


def write_chunk(job):
    path, offset, pictures, size = job
    images = np.empty((len(pictures), 3, size, size), np.uint8)
    for image, picture in zip(images, pictures, strict=True):
        image[:] = read_picture(picture, size)
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(images)
    return len(pictures)


@contextlib.contextmanager
def without_main():
    """Processes that are started in here import this file only, not the script that runs, with PyTorch and all."""
    main, sys.modules["__main__"] = sys.modules["__main__"], types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def follow_parent():
    """In a new process: Ctrl-C is the parent's business, and when the parent is gone so is this."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def wait():
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


# -------------------------------------------------------------------------------------------------- tasks


def split(data, order, tasks, least=2):
    """The stream: task t gets the classes order[t*n:(t+1)*n] and an index array of their images, `least` at least."""
    per_task = len(order) // tasks
    groups = [order[t * per_task : (t + 1) * per_task] for t in range(tasks)]
    stream = [Task(t, group, np.flatnonzero(np.isin(data.labels, group))) for t, group in enumerate(groups, 1)]
    for task in stream:
        if len(task.indices) < least:
            names = ", ".join(data.classes[c] for c in task.classes)
            fail(f"task {task.number} ({names}) has {len(task.indices)} picture; a score needs at least {least}")
    return stream
