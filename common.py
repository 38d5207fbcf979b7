"""What everything here shares: errors, flags, random numbers, atomic files, batches, phases.

Sections: errors · flags · randomness · files · batches · hardware · showing.

PyTorch is imported inside the functions that need it: `--help`, a typing error and a finished run are
answered before it is loaded.
"""

import argparse
import contextlib
import csv
import functools
import hashlib
import io
import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None
    import msvcrt

ROOT = Path(__file__).resolve().parent


# ------------------------------------------------------------------------------------------------- errors


INTERRUPTED = "interrupted; the same command again goes on from the last saved state"


class UserError(Exception):
    """One line for the user. Exit code 2: bad input; 1: it broke while running."""

    def __init__(self, message, code=2):
        super().__init__(message)
        self.code = code


def fail(message, code=2):
    raise UserError(message, code)


@functools.cache  # each note once
def note(text):
    print(f"note: {text}", file=sys.stderr, flush=True)


def say_interrupted(kind, error, trace):
    """sys.excepthook: Ctrl-C outside of `one_line_errors`, while a script loads PyTorch, is one line too."""
    if kind is not KeyboardInterrupt:
        return sys.__excepthook__(kind, error, trace)
    print(f"error: {INTERRUPTED}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def one_line_errors():
    """Around a script: ends it with one line for a user's mistake, a full disk or Ctrl-C."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # a terminal that knows no ± still shows the table
    sys.excepthook = say_interrupted
    try:
        yield
    except UserError as error:
        message, code = error, error.code
    except OSError as error:
        message, code = f"{error.filename or 'input/output'}: {error.strerror or error}", 1
    except KeyboardInterrupt:
        message, code = INTERRUPTED, 130
    else:
        return
    print(f"error: {message}", file=sys.stderr, flush=True)
    raise SystemExit(code)


# -------------------------------------------------------------------------------------------------- flags


class Parser(argparse.ArgumentParser):
    def __init__(self, **options):
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def error(self, message):
        fail(f"{message} (--help lists the flags)")


def whole(low, high=10**7):
    """argparse type: an int from `low` to `high`."""

    def read(text):
        value = int(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{value} must be between {low} and {high}")
        return value

    read.__name__ = "whole number"
    return read


def divisor(n):
    """argparse type: an int that divides n."""

    def read(text):
        value = int(text)
        if value < 1 or n % value:
            raise argparse.ArgumentTypeError(f"{value} must be a divisor of {n}")
        return value

    read.__name__ = "whole number"
    return read


def positive(text):
    """argparse type: a float above 0 that float32 can still multiply and divide by."""
    value = float(text)
    if not 1e-30 <= value <= 1e30:
        raise argparse.ArgumentTypeError(f"{value} must be above 0 and finite (1e-30 to 1e30)")
    return value


def non_negative(text):
    """argparse type: a float of at least 0 that float32 can still multiply."""
    value = float(text)
    if not 0 <= value <= 1e30:
        raise argparse.ArgumentTypeError(f"{value} must be at least 0 and at most 1e30")
    return value


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


# -------------------------------------------------------------------------------------------------- files


def read_json(path):
    try:
        return json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        fail(f"cannot read {path}: {error}")


def output_folder(path):
    """The folder to write into, which need not exist yet; a file of that name is refused before any work."""
    if Path(path).exists() and not Path(path).is_dir():
        fail(f"--out {path} is a file: name a folder")
    return Path(path)


def read_csv(path):
    """Rows as dicts of strings; none if the file does not exist."""
    if not Path(path).is_file():
        return []
    with open(path, newline="", errors="replace") as file:
        return list(csv.DictReader(file))


def write_csv(path, rows):
    """Rows (dicts with the same keys) to a CSV file, atomically."""
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0].keys(), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_file(path, text.getvalue().encode())


def write_file(path, content):
    """Temporary name, flush, rename: the file is whole or not there."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")  # two processes may write the same summary
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
        reason = getattr(error, "strerror", None)
        if type(error).__name__ == "SafetensorError" or "inline_container" in str(error):
            reason = "no space left, or a limit on the size of a file"  # as torch and safetensors say it
        if reason:
            fail(f"cannot write {path}: {reason}; what was saved before is intact; free space and start again", code=1)
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
        lines, broken = True, [str(error)]
    if not lines:
        broken = ["SHA256SUMS is empty"]
    if broken:
        print(f"note: {folder} is broken ({broken[0]}) and is not used", file=sys.stderr)
    return not broken


def load_weights(net, path):
    """Fills a network from a safetensors file of exactly its names and shapes."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        net.load_state_dict(load_file(path))
    except (OSError, RuntimeError, SafetensorError) as error:
        fail(f"{path} does not fit this network ({str(error).split(chr(10))[0]}); remove its folder and start again", 1)


def save_tensors(state, path):
    import torch

    torch.save(state, path)


def load_tensors(path):
    """A dict of tensors and numbers; `weights_only` refuses anything that could run code."""
    import torch

    return torch.load(path, map_location="cpu", weights_only=True)


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
        except (BlockingIOError, PermissionError):  # others, such as a disk without locks, are not "in use"
            raise UserError(f"{folder} is in use by another process; wait for it, or choose another --out") from None
        yield


# ------------------------------------------------------------------------------------------------ batches


class Sizes(NamedTuple):
    """How many numbers a learner holds, as the paper's tables 12 and 13 count them."""

    model: int  # of the whole model
    trained: int  # of what a task trains
    copy: int  # of a frozen copy that teaches


class Phase(NamedTuple):
    """One update within a step. Diffusion has a single one; a GAN has G, D and its lazy regulariser (not main)."""

    name: str
    nets: tuple  # names of the networks that it trains
    main: bool = True  # penalties and projections belong to main phases alone
    generator: bool = True  # distillation belongs to the phase that trains what makes the images


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


# ----------------------------------------------------------------------------------------------- hardware


def cpu_count():
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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
    if len(indices) * images[:1].nbytes >= torch.cuda.mem_get_info(device)[0] / 2:
        return None
    resident = torch.empty((len(indices), *images.shape[1:]), dtype=torch.uint8, device=device)
    for k in range(0, len(indices), 4096):  # block by block: the host need not hold them all
        resident[k : k + 4096] = torch.from_numpy(images[indices[k : k + 4096]])
    return resident


def images_at_once(device, side):
    """Images to sample at once, `side` pixels wide: 256, fewer of the large (DDIM: 37 MB for one of 64²)."""
    return max(1, min(256, 2 ** (20 if device.startswith("cuda") else 16) // side**2))


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


# ------------------------------------------------------------------------------------------------ showing


def progress(total, description):
    """A bar in images: loss, images a second, time left. Silent where there is no terminal."""
    return tqdm(total=total, desc=description, unit="img", unit_scale=True, disable=None, leave=False)


def write_picture(path, image):
    """One uint8 image (3, H, W) as PNG, atomically."""
    from PIL import Image

    png = io.BytesIO()
    Image.fromarray(np.asarray(image).transpose(1, 2, 0)).save(png, "PNG")
    write_file(path, png.getvalue())


def picture_grid(rows):
    """uint8 image rows [(n, 3, H, W), …] → one PIL image, small ones enlarged without smoothing."""
    from PIL import Image

    size = rows[0].shape[-1]
    width = max(len(row) for row in rows)
    sheet = np.full((len(rows) * (size + 1) - 1, width * (size + 1) - 1, 3), 255, np.uint8)
    for r, row in enumerate(rows):
        for c, image in enumerate(row):
            sheet[r * (size + 1) :, c * (size + 1) :][:size, :size] = np.asarray(image).transpose(1, 2, 0)
    scale = max(1, 32 // size)
    return Image.fromarray(sheet).resize((sheet.shape[1] * scale, sheet.shape[0] * scale), Image.Resampling.NEAREST)
