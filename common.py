"""What the training and evaluation scripts share, from flags to files.

Sections: errors · randomness · data sets and tasks · flags · run folders and atomic saves · reservoir · log · cost.

PyTorch is imported inside the functions that need it: `--help`, a typing error and a finished run are
answered before it is loaded.
"""

import argparse
import contextlib
import csv
import functools
import hashlib
import importlib
import importlib.metadata
import json
import os
import re
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None
    import msvcrt

ROOT = Path(__file__).resolve().parent
LOG_EVERY = 10  # steps between two rows of log.csv; a row averages over them, so the device is asked once


# ------------------------------------------------------------------------------------------------- errors


def fail(message, code=2):
    """Ends the program with one line on stderr. Exit code 2: bad input; 1: it broke while running."""
    print(f"error: {message}", file=sys.stderr, flush=True)
    raise SystemExit(code)


class InUse(Exception):
    """Another process works in this folder."""


@contextlib.contextmanager
def one_line_errors():
    """Turns what the user's machine does to us (a full disk, Ctrl-C) into one line."""
    try:
        yield
    except InUse as error:
        fail(error)
    except OSError as error:
        fail(f"{error.filename or 'input/output'}: {error.strerror or error}", code=1)
    except KeyboardInterrupt:
        fail("interrupted; the same command again goes on from the last saved state", code=130)


# --------------------------------------------------------------------------------------------- randomness
# Every random number is a pure function of a key, a tuple such as (seed, task, step, "noise"). The name of
# the method is never part of it, so all methods see the same images and the same noise, and a resumed run
# needs no stored generator state.


def hash32(key):
    """The key as an int in [0, 2**32): torch's CPU generator ignores higher bits."""
    return int.from_bytes(hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=4).digest(), "little")


def torch_rng(key, device="cpu"):
    import torch

    return torch.Generator(device).manual_seed(hash32(key))


def numpy_rng(key):
    return np.random.Generator(np.random.PCG64(hash32(key)))


def sampling_seeds(key, count):
    """One seed an image: image k depends on (key, k) alone, whatever the batch size."""
    return [hash32((*key, k)) for k in range(count)]


def sampling_noise(seeds, shape):
    """Standard normal noise (len(seeds), *shape), float32, drawn on the CPU image by image."""
    import torch

    generator = torch.Generator()
    return torch.stack([torch.randn(shape, generator=generator.manual_seed(seed)) for seed in seeds])


# ------------------------------------------------------------------------------------- data sets and tasks

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
    digest: str  # short hash of the content


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
    match = re.fullmatch(r"(.+):(\d+)-(\d+)", text)
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
    found, skipped = [], 0
    for sub in sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith(".")):
        files = sorted(p for p in sub.iterdir() if not p.name.startswith("."))
        pictures = [p for p in files if p.suffix.lower() in PICTURES and p.is_file()]
        skipped += len(files) - len(pictures)
        if not pictures:
            fail(f"class folder {sub} holds no picture ({', '.join(sorted(PICTURES))}); fill or remove it")
        found.append((sub.name, pictures))
    if not found:
        fail(f"{folder} has no class folders: expected one sub-folder of pictures a class")
    if skipped:
        print(f"note: {skipped} entries in {folder} are no pictures and are left out", file=sys.stderr)
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
                values = values / 257 if values.max() > 255 or image.mode.startswith("I;16") else values
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
    listing = [f"{p.relative_to(folder)} {p.stat().st_size} {p.stat().st_mtime_ns}" for p in pictures]
    digest = hashlib.sha256("\n".join([f"squash bicubic {size}", *listing]).encode()).hexdigest()[:12]
    ready = Path(cache) / "prepared" / f"{folder.name}-{size}-{digest}"
    images = None
    if read:
        with locked(ready.parent, wait=True):
            if not ready.exists():
                with new_folder(ready) as target:
                    shape = (len(pictures), 3, size, size)
                    images = np.lib.format.open_memmap(target / "images.npy", "w+", np.uint8, shape)
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
    return [Task(t, group, np.flatnonzero(np.isin(data.labels, group))) for t, group in enumerate(groups, 1)]


@functools.lru_cache(maxsize=4)
def epoch_permutation(seed, task, epoch, n):
    return numpy_rng((seed, task, epoch, "epoch")).permutation(n)


def batch_positions(n, step, batch_size, seed, task):
    """Positions in [0, n) of the images of a step; epochs are laid end to end, so every batch is full."""
    at, parts = step * batch_size, []
    while sum(map(len, parts)) < batch_size:
        epoch, start = divmod(at, n)
        parts.append(epoch_permutation(seed, task, epoch, n)[start : start + batch_size - sum(map(len, parts))])
        at += len(parts[-1])
    return np.concatenate(parts)


def proportional_labels(labels, count):
    """`count` labels in the proportion of `labels`, interleaved so that every prefix keeps it too."""
    classes, sizes = np.unique(labels, return_counts=True)
    share = sizes / sizes.sum() * count
    take = np.floor(share).astype(int)
    take[np.argsort(take - share, kind="stable")[: count - take.sum()]] += 1
    place = np.concatenate([(np.arange(k) + 0.5) / max(k, 1) for k in take])
    return np.repeat(classes, take)[np.argsort(place, kind="stable")].tolist()


def append(batch, more):
    """The rows of `more` behind those of `batch`, for every entry of the batch."""
    import torch

    return {name: torch.cat([rows, more[name]]) for name, rows in batch.items()}


# -------------------------------------------------------------------------------------------------- flags


class Parser(argparse.ArgumentParser):
    def __init__(self, **options):
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def error(self, message):
        fail(f"{message} (--help lists the flags)")


def whole(low, high=None):
    """argparse type: an int from `low` (to `high`)."""

    def read(text):
        value = int(text)
        if value < low or (high is not None and value > high):
            bounds = f"at least {low}" if high is None else f"between {low} and {high}"
            raise argparse.ArgumentTypeError(f"{value} must be {bounds}")
        return value

    read.__name__ = "whole number"
    return read


def positive(text):
    """argparse type: a finite float above 0."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{value} must be above 0")
    return value


UNHASHED = ("out", "data", "device", "save_every", "dry_run", "order", "seed")  # no influence on, or beside, the hash


def training_parser(description):
    """The flags that every training script has; where a default is the preset's, it is None here."""
    p = Parser(description=description)
    add = p.add_argument
    add(
        "--dataset",
        default="digits",
        help="NAME, NAME:FIRST-LAST (those classes only), or a folder with one "
        f"sub-folder of pictures a class; names: {', '.join(DATASETS)} (default: digits)",
    )
    add("--method", default="ncl", help="a file of methods/ (default: ncl)")
    add("--order", type=whole(1, 5), default=1, help="class order, 1-5; 1 is that of the data set (default: 1)")
    add("--seed", type=whole(0), default=1, help="seed of weights, batches, noise and memory (default: 1)")
    add("--tasks", type=whole(1), help="number of tasks, a divisor of the number of classes (default: the data set's)")
    add("--preset", help="network and training sizes (default: the data set's; a folder's by the picture size)")
    length = p.add_mutually_exclusive_group()
    length.add_argument("--steps", type=whole(1), help="training steps a task (default: the preset's)")
    length.add_argument("--epochs", type=whole(1), help="passes over the task's images (default: the preset's)")
    add("--batch_size", type=whole(1), help="images of the current task a step (default: the preset's)")
    add("--lr", type=positive, help="peak learning rate (default: the preset's)")
    add("--device", default="auto", help="cpu, cuda or cuda:N (default: cuda if there is one)")
    add(
        "--precision",
        choices=("fp32", "bf16"),
        default="fp32",
        help="arithmetic of the network; weights and losses stay fp32 (default: fp32)",
    )
    add("--out", default="runs", help="folder of the run folders (default: runs)")
    add("--data", default="data", help="folder of data sets and caches (default: data)")
    add(
        "--select",
        choices=("best", "last"),
        help="keep a task's best checkpoint or its last one (default: best; tiny: last)",
    )
    add("--eval_every", type=whole(1), default=500, help="steps between two scores of --select best (default: 500)")
    add("--val_samples", type=whole(2), help="images sampled for such a score (default: the preset's)")
    add("--memory_size", type=whole(0), help="images of past tasks that replay may keep (default: the preset's)")
    add("--replay_size", type=whole(0), help="replayed images a step (default: the preset's)")
    add("--save_every", type=whole(1), default=500, help="steps between two saves inside a task (default: 500)")
    add("--dry_run", action="store_true", help="print configuration, tasks and parameter count; write nothing")
    return p


def method_class(name):
    """The class of methods/NAME.py: the last one that the file defines."""
    if not re.fullmatch(r"\w+", name) or not (ROOT / "methods" / f"{name}.py").exists():
        names = sorted(p.stem for p in (ROOT / "methods").glob("[!_]*.py"))
        fail(f"unknown method '{name}': methods/ has {', '.join(names)}")
    module = importlib.import_module(f"methods.{name}")
    return [c for c in vars(module).values() if isinstance(c, type) and c.__module__ == module.__name__][-1]


def resolve(parser, argv, presets):
    """Parses the flags with the method's own among them, and fills what is left open from the preset."""
    peek = Parser(add_help=False)
    peek.add_argument("--method", default="ncl")
    name = peek.parse_known_args(argv)[0].method
    method_class(name).add_args(parser.add_argument_group(f"flags of {name}"))
    args = parser.parse_args(argv)
    scene = scenario(args.dataset)
    if args.preset is None:
        side = None if scene.preset else picture_size(scene.folder)
        args.preset = scene.preset or min(presets, key=lambda p: abs(np.log(presets[p]["size"] / side)))
    if args.preset not in presets:
        fail(f"unknown preset '{args.preset}': choose from {', '.join(presets)}")
    preset = dict(presets[args.preset])
    if args.steps or args.epochs:
        preset.update(steps=None, epochs=None)
    for flag, value in preset.items():
        if getattr(args, flag, None) is None:
            setattr(args, flag, value)
    args.tasks = args.tasks or scene.tasks
    if args.tasks > scene.classes:
        fail(f"--tasks {args.tasks} is more than the {scene.classes} classes of {args.dataset}")
    if scene.classes % args.tasks:
        fail(f"--tasks {args.tasks} does not divide the {scene.classes} classes of {args.dataset}")
    args.classes = scene.classes
    if scene.folder:  # the path is part of the run's identity
        args.dataset = str(scene.folder) + (f":{scene.first}-{scene.last}" if scene.classes < scene.total else "")
    return args


# ------------------------------------------------------------------------------ run folders, atomic saves


def run_folder(args, backbone):
    """runs/<dataset>/<backbone>/<method>/order<k>-seed<s>-<hash of the flags that change the result>"""
    flags = {k: v for k, v in vars(args).items() if k not in UNHASHED}
    if args.select == "last":
        flags.update(eval_every=None, val_samples=None)
    digest = hashlib.blake2b(json.dumps(flags, sort_keys=True).encode(), digest_size=4).hexdigest()
    name = scenario(args.dataset).name
    return Path(args.out) / name / backbone / args.method / f"order{args.order}-seed{args.seed}-{digest}"


def code_hashes(script, method):
    files = [Path(script).name, f"methods/{method}.py", "common.py"]
    return {f: hashlib.sha256((ROOT / f).read_bytes()).hexdigest()[:12] for f in files}


def note_changed_code(run, args, script):
    """Says so if the code is not the one that this run was started with."""
    config = read_json(run / "config.json")
    now = code_hashes(script, args.method)
    changed = [f for f, digest in now.items() if config["code"].get(f) != digest]
    if changed:
        print(f"note: {', '.join(changed)} changed since {run} was started; remove the folder to run it anew")
    return config


def stop_if_finished(run, args, script):
    """Ends the program with exit code 0 if this run is there already; needs no PyTorch."""
    if (run / "DONE").exists() and not args.dry_run:
        note_changed_code(run, args, script)
        print(f"{run} is finished", flush=True)
        raise SystemExit(0)


def describe(args, run, script, backbone, method, data, tasks, device, parameters, **more):
    """config.json: all that made this run what it is."""
    import torch

    packages = ("torch", "diffusers", "numpy", "safetensors", "scikit-learn", "pillow")
    return {
        "backbone": backbone,
        "flags": vars(args),
        "isolated": method.isolated,
        "command": " ".join(["python", Path(script).name, *sys.argv[1:]]),
        "code": code_hashes(script, args.method),
        "versions": {p: importlib.metadata.version(p) for p in packages},
        "data": {"name": data.name, "digest": data.digest, "classes": data.classes},
        "tasks": [task.classes for task in tasks],
        "device": device,
        "threads": torch.get_num_threads(),
        "parameters": parameters,
        **more,
    }


def write_or_check_config(run, config, args, script):
    """First start: writes config.json. Later starts: the pictures must be the same, the rest is said."""
    path = run / "config.json"
    if not path.exists():
        return write_file(path, json.dumps(config, indent=1).encode())
    old = note_changed_code(run, args, script)
    if old["data"] != config["data"]:
        fail(f"the pictures of {args.dataset} changed since {run} was started; remove that folder to train anew")
    for key in ("device", "threads"):
        if old[key] != config[key]:
            print(f"note: started with {key} {old[key]}, goes on with {config[key]}: not bit-equal", file=sys.stderr)


def read_json(path):
    try:
        return json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        fail(f"cannot read {path}: {error}")


def read_csv(path):
    """Rows as dicts of strings; none if the file does not exist."""
    if not Path(path).exists():
        return []
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def write_csv(path, rows):
    """Rows (dicts with the same keys) to a CSV file, atomically."""
    import io

    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0].keys(), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_file(path, text.getvalue().encode())


def write_file(path, content):
    """Temporary name, flush, rename: the file is whole or not there."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        fail(f"cannot write {path}: {error.strerror}; free space or choose another folder", code=1)


@contextlib.contextmanager
def new_folder(path):
    """Yields a temporary folder to fill; sums, flushes and renames it to `path`. An older one becomes `.old`."""
    temporary, old = path.with_name(path.name + ".tmp"), path.with_name(path.name + ".old")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        yield temporary
        files = sorted(p for p in temporary.rglob("*") if p.is_file())
        sums = "".join(f"{file_sum(p)}  {p.relative_to(temporary).as_posix()}\n" for p in files)
        (temporary / "SHA256SUMS").write_text(sums)
        for p in [*files, temporary / "SHA256SUMS"]:
            with open(p, "rb") as file:
                os.fsync(file.fileno())
        if path.exists():
            shutil.rmtree(old, ignore_errors=True)
            path.rename(old)
        temporary.rename(path)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        # a full disk is an OSError, but torch and safetensors wrap it in errors of their own
        if isinstance(error, OSError) or type(error).__name__ in ("SafetensorError", "RuntimeError"):
            fail(f"cannot write {path}: {error}; what was saved before is intact; free space and start again", code=1)
        raise


def file_sum(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_sound(folder):
    """Whether a saved folder is complete and unchanged. A broken one is reported."""
    if not folder.is_dir():
        return False
    try:
        lines = [line.split("  ", 1) for line in (folder / "SHA256SUMS").read_text().splitlines()]
        broken = [name for digest, name in lines if file_sum(folder / name) != digest]
    except (OSError, ValueError) as error:
        broken = [str(error)]
    if broken:
        print(f"note: {folder} is broken ({broken[0]}) and is not used", file=sys.stderr)
    return not broken


def checkpoint_hash(folder):
    """Short hash of the weights in a task folder: equal weights, equal hash."""
    lines = (folder / "SHA256SUMS").read_text().splitlines()
    weights = "\n".join(line for line in lines if line.endswith(".safetensors"))
    return hashlib.sha256(weights.encode()).hexdigest()[:12]


def save_tensors(state, path):
    import torch

    torch.save(state, path)


def load_tensors(path):
    """A dict of tensors and numbers; `weights_only` refuses anything that could run code."""
    import torch

    return torch.load(path, map_location="cpu", weights_only=True)


def finished_tasks(run, tasks):
    """How many tasks have a sound folder, counted from task 1. A broken one is set aside and trained again."""
    for t in range(1, tasks + 1):
        folder = run / f"task{t}"
        if not is_sound(folder):
            if folder.exists():
                shutil.rmtree(folder.with_name(folder.name + ".broken"), ignore_errors=True)
                folder.rename(folder.with_name(folder.name + ".broken"))
            return t - 1
    return tasks


def resume_state(run, task):
    """The newest sound state inside this task, or None to start the task."""
    for folder in (run / "resume", run / "resume.old"):
        if is_sound(folder):
            state = load_tensors(folder / "state.pt")
            if state["task"] == task:
                return state
    return None


@contextlib.contextmanager
def locked(folder, wait=False):
    """One process a folder; the system frees the lock when the process ends, however it ends."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "a") as handle:
        try:
            if fcntl:
                fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            else:
                msvcrt.locking(handle.fileno(), msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK, 1)
        except OSError:
            raise InUse(f"{folder} is in use by another process; wait for it, or choose another --out") from None
        yield


def finish(run):
    """Marks a run as done; the state inside tasks is needed no more."""
    write_file(run / "DONE", b"")
    for folder in (run / "resume", run / "resume.old"):
        shutil.rmtree(folder, ignore_errors=True)


# ----------------------------------------------------------------------------------------------- hardware


def pick_device(name):
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        fail(f"unknown device '{name}': choose cpu, cuda or cuda:N")
    if name != "cpu" and int(name[5:] or 0) >= torch.cuda.device_count():
        fail(f"device '{name}' is not there: PyTorch sees {torch.cuda.device_count()} GPUs")
    return name


def on_gpu(images, indices, device):
    """The images `indices` as one uint8 tensor on the GPU; None on a CPU, or if they take over half its free memory."""
    import torch

    if not device.startswith("cuda"):
        return None
    size = len(indices) * images[:1].nbytes
    return torch.from_numpy(images[indices]).to(device) if size < torch.cuda.mem_get_info(device)[0] / 2 else None


# ---------------------------------------------------------------------------------------------- reservoir


class Reservoir:
    """Memory of `size` images in which each of the n images seen so far is kept with probability size/n.

    Algorithm R (Vitter, Random Sampling with a Reservoir, 1985). Labels travel with their images.
    """

    def __init__(self, size, data):
        self.data = data
        self.seen = 0
        self.size = size
        self.images = data.images[:0]
        self.labels = data.labels[:0]

    def add(self, indices, key):
        """Shows the images `indices` of the data set, each once."""
        slots = np.full(self.size, -1)  # which of the new images a slot ends up with
        draws = numpy_rng(key).random(len(indices))
        for index, draw in zip(indices, draws, strict=True):
            slot = self.seen if self.seen < self.size else int(draw * (self.seen + 1))
            if slot < self.size:
                slots[slot] = index
            self.seen += 1
        filled = min(self.seen, self.size)
        fresh = np.flatnonzero(slots >= 0)
        images = np.zeros((filled, *self.data.images.shape[1:]), np.uint8)
        labels = np.zeros(filled, np.int64)
        images[: len(self.images)], labels[: len(self.labels)] = self.images, self.labels
        images[fresh], labels[fresh] = self.data.images[slots[fresh]], self.data.labels[slots[fresh]]
        self.images, self.labels = images, labels

    def draw(self, count, key):
        """`count` images and labels, no slot twice until all were drawn; none while the memory is empty."""
        rng, n = numpy_rng(key), len(self.labels)
        rounds = -(-count // n) if n else 0
        slots = np.concatenate([np.zeros(0, int), *(rng.permutation(n) for _ in range(rounds))])[:count]
        return self.images[slots], self.labels[slots]

    def state_dict(self):
        import torch

        # np.array copies: the state must not change with the memory
        images, labels = torch.from_numpy(np.array(self.images)), torch.from_numpy(np.array(self.labels))
        return {"images": images, "labels": labels, "seen": self.seen}

    def load_state_dict(self, state):
        self.images, self.labels, self.seen = state["images"].numpy(), state["labels"].numpy(), state["seen"]


# ---------------------------------------------------------------------------------------------- log, cost


class Log:
    """log.csv. Values stay on the device until `flush`, so that a step does not wait for the host.

    `flush` averages over the steps since the last one, appends a row, and ends the program at the first
    step whose loss or penalty is not finite.
    """

    def __init__(self, path, task, step):
        self.path, self.task, self.pending = path, task, []
        rows = [r for r in read_csv(path) if r["images_per_second"]]  # a torn last line lacks its end
        kept = [r for r in rows if (int(r["task"]), int(r["step"])) <= (task, step)]
        if kept:
            write_csv(path, kept)
        else:
            path.unlink(missing_ok=True)
        self.header = list(kept[0]) if kept else None
        self.clock = time.perf_counter()

    def add(self, step, values):
        """values: {column: 0-d tensor or number}; lazy phases may leave their columns out."""
        self.pending.append((step, values))

    def flush(self, images, lr, seconds):
        """images: trained on since the last flush. Returns the row, or None if there is nothing new."""
        import torch

        if not self.pending:
            return None
        names = list(dict.fromkeys(name for _, values in self.pending for name in values))
        means = {}
        for name in names:
            steps, column = zip(*((s, v[name]) for s, v in self.pending if name in v), strict=True)
            column = torch.stack([torch.as_tensor(c, dtype=torch.float32).detach() for c in column]).cpu()
            bad = (~column.isfinite()).nonzero()
            if len(bad) and name.startswith(("loss", "penalty")):
                fail(
                    f"{name} of task {self.task} is {column[bad[0, 0]].item()} at step {steps[bad[0, 0]]}; nothing "
                    "was saved since it was last finite; try a lower --lr",
                    code=1,
                )
            means[name] = column.mean().item()
        step = self.pending[-1][0] + 1
        now = time.perf_counter()
        speed, self.clock, self.pending = images / (now - self.clock), now, []
        row = {"task": self.task, "step": step, **{k: f"{v:.6g}" for k, v in means.items()}, "lr": f"{lr:.6g}"}
        row |= {"seconds": f"{seconds:.2f}", "images_per_second": f"{speed:.1f}"}
        new = self.header is None
        self.header = self.header or list(row)
        with open(self.path, "a", newline="") as file:
            writer = csv.DictWriter(file, self.header, restval="", lineterminator="\n")
            if new:
                writer.writeheader()
            writer.writerow(row)
        return row


def progress(total, description):
    """A bar in images: loss, images a second, time left. Silent where there is no terminal."""
    return tqdm(total=total, desc=description, unit="img", unit_scale=True, disable=None, leave=False)


def peak_memory(device):
    """Bytes: of the GPU's allocator, or the resident set of this process."""
    import torch

    if torch.device(device).type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Windows
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def picture_grid(rows, path):
    """Writes uint8 image rows [(n, 3, H, W), …] as one PNG, small images enlarged without smoothing."""
    from PIL import Image

    size = rows[0].shape[-1]
    width = max(len(row) for row in rows)
    sheet = np.full((len(rows) * (size + 1) - 1, width * (size + 1) - 1, 3), 255, np.uint8)
    for r, row in enumerate(rows):
        for c, image in enumerate(row):
            sheet[r * (size + 1) :, c * (size + 1) :][:size, :size] = np.asarray(image).transpose(1, 2, 0)
    scale = max(1, 32 // size)
    Image.fromarray(sheet).resize((sheet.shape[1] * scale, sheet.shape[0] * scale), Image.Resampling.NEAREST).save(path)
