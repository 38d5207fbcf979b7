"""Data sets and the streams of tasks made of them.

`--dataset` → Scenario (what is known before anything is read) → Data (images at training size) → list of Task.
A task is its classes and an index array: pooling tasks pools indices, never images.
"""

import functools
import hashlib
import json
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from common import ROOT, fail, hash32, locked, new_folder

DATASETS = {  # name -> what is known before anything is read
    "digits": dict(classes=10, tasks=5, preset="tiny", orders="ten"),
}
PICTURES = {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}


@dataclass
class Data:
    """A data set at its training resolution."""

    name: str  # as run folders and tables call it
    images: np.ndarray  # uint8 (N, 3, H, W); memory-mapped where it comes from pictures; None in a dry run
    labels: np.ndarray  # int64 (N,), 0-based
    classes: list  # class names, index = label
    digest: str  # short hash of the content; of pictures in a folder: of their names, sizes and times


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
    folder: Path | None  # of class folders, for a user's own pictures
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
    if name in DATASETS:
        known, folder, short = DATASETS[name], None, name
    else:
        folder = Path(name).expanduser()
        if not folder.is_dir():
            fail(f"unknown data set '{name}': neither a folder nor one of {', '.join(DATASETS)}")
        folder = folder.resolve()
        known = dict(classes=len(class_folders(folder)), tasks=5, preset=None, orders=None)
        short = re.sub(r"[^\w.-]", "_", folder.name) or "pictures"
        if short in DATASETS:  # a folder called like a data set must not share its column in the tables
            short += "_folder"
    first, last = (int(match[2]), int(match[3])) if match else (0, known["classes"] - 1)
    if not first <= last < known["classes"]:
        fail(f"class range {first}-{last} of '{name}' is not within 0-{known['classes'] - 1}")
    if match:
        short += f"_{first}-{last}"
    count = last - first + 1
    tasks = known["tasks"] if count % known["tasks"] == 0 else count
    return Scenario(short, folder, first, last, known["classes"], tasks, known["preset"], known["orders"])


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
    """
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as image:
            image = ImageOps.exif_transpose(image)
            if image.mode.startswith("I") or image.mode == "F":
                values = np.asarray(image, np.float64)
                if image.mode.startswith("I;16") or values.max() > 255:
                    values = values / 257
                elif image.mode == "F" and values.max() <= 1:
                    values = values * 255
                image = Image.fromarray(values.round().clip(0, 255).astype(np.uint8))
            image = image.convert("RGB").resize((size, size), Image.Resampling.BICUBIC)
            return np.asarray(image).transpose(2, 0, 1)
    except Exception as error:  # PIL raises half a dozen kinds for a broken file
        fail(f"cannot read picture {path}: {error}; repair or remove it")


def load_data(scenario, size, cache, read=True):
    """The scenario's images at `size` × `size`; `read=False` leaves the images out (dry run)."""
    if scenario.folder:
        images, labels, names, digest = load_folder(scenario.folder, size, cache, read)
    else:
        images, labels, names = load_digits(size)
        digest = hashlib.sha256(images.tobytes() + labels.tobytes()).hexdigest()[:12]
    if scenario.classes < scenario.total:
        keep = np.flatnonzero((labels >= scenario.first) & (labels <= scenario.last))
        images, labels = images[keep] if read else None, labels[keep] - scenario.first
        names = names[scenario.first : scenario.last + 1]
        digest = f"{digest}-{scenario.first}-{scenario.last}"
    return Data(scenario.name, images if read else None, labels, names, digest)


def load_digits(size):
    """scikit-learn's embedded 1797 hand-written digits of 8 × 8 pixels, 17 levels of gray."""
    from PIL import Image
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = (digits.images * 255 / 16).round().astype(np.uint8)
    if size != images.shape[-1]:
        bigger = [Image.fromarray(image).resize((size, size), Image.Resampling.BICUBIC) for image in images]
        images = np.stack([np.asarray(image) for image in bigger])
    return images[:, None].repeat(3, axis=1), digits.target.astype(np.int64), [str(c) for c in range(10)]


def load_folder(folder, size, cache, read):
    """A user's pictures, prepared once to `<cache>/prepared/…/images.npy` and memory-mapped from there."""
    classes = class_folders(folder)
    pictures = [path for _, paths in classes for path in paths]
    labels = np.repeat(np.arange(len(classes)), [len(paths) for _, paths in classes])
    listing = []
    for path in pictures:
        try:
            about = path.stat()
        except OSError as error:  # a link to nowhere
            fail(f"cannot read picture {path}: {error.strerror}; repair or remove it")
        listing.append(f"{path.relative_to(folder)} {about.st_size} {about.st_mtime_ns}")
    digest = hashlib.sha256("\n".join([f"squash bicubic {size}", *listing]).encode("utf-8", "replace")).hexdigest()[:12]
    ready = Path(cache) / "prepared" / f"{folder.name}-{size}-{digest}"
    images = None
    if read:
        with locked(ready.parent, wait=True):
            if not ready.exists():
                with new_folder(ready) as target:
                    shape = (len(pictures), 3, size, size)
                    images = np.lib.format.open_memmap(target / "images.npy", "w+", np.uint8, shape)
                    if hasattr(os, "posix_fallocate"):  # else a full disk kills the process in the middle
                        with open(target / "images.npy", "r+b") as file:
                            os.posix_fallocate(file.fileno(), 0, os.path.getsize(target / "images.npy"))
                    for row, path in enumerate(tqdm(pictures, f"preparing {folder.name}", unit="img", disable=None)):
                        images[row] = read_picture(path, size)
                    images.flush()
        try:
            images = np.load(ready / "images.npy", mmap_mode="r")
        except (OSError, ValueError) as error:
            fail(f"the prepared pictures {ready} are broken ({error}); remove that folder")
    return images, labels.astype(np.int64), [name for name, _ in classes], digest


def split(data, order, tasks):
    """The stream: task t gets the classes order[t*n:(t+1)*n] and an index array of their images."""
    per_task = len(order) // tasks
    groups = [order[t * per_task : (t + 1) * per_task] for t in range(tasks)]
    stream = [Task(t, group, np.flatnonzero(np.isin(data.labels, group))) for t, group in enumerate(groups, 1)]
    for task in stream:
        if len(task.indices) < 2:
            names = ", ".join(data.classes[c] for c in task.classes)
            fail(f"task {task.number} ({names}) has {len(task.indices)} picture; a score needs at least 2")
    return stream
