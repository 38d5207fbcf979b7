"""Times the preparation of JPEGs beside a plain PIL loop over the same files, taking turns.

    python tests/bench_pictures.py            10,000 JPEGs of 256², prepared at 128²

The loop resizes with PIL's bicubic filter alone; the difference of the two results is printed, and whether ours is
that of the same loop with our rule, to the bit. Use taskset to say on which cores.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import common
import streams


def make(folder, count):
    """Smooth pictures with some noise, ten classes."""
    rng = np.random.default_rng(0)
    y, x = np.mgrid[:256, :256] / 256
    for k in range(count):
        a, b, c = rng.uniform(1, 12, 3)
        planes = [np.sin(a * x + b * y), np.cos(b * c * x * y), np.sin(9 * c * (x - 0.5) ** 2 + a * y)]
        pixels = 128 + 90 * np.stack(planes, -1) + rng.normal(0, 8, (256, 256, 3))
        path = folder / str(k % 10) / f"{k:05d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(path, quality=90)


def plain(paths, size, **rule):
    images = np.empty((len(paths), 3, size, size), np.uint8)
    for image, path in zip(images, paths, strict=True):
        picture = Image.open(path).convert("RGB").resize((size, size), Image.Resampling.BICUBIC, **rule)
        image[:] = np.asarray(picture).transpose(2, 0, 1)
    return images


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000, help="pictures (default: 10000)")
    parser.add_argument("--size", type=int, default=128, help="side that they are prepared at (default: 128)")
    parser.add_argument("--rounds", type=int, default=3, help="times that each is done (default: 3)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work) / "pictures"
        make(folder, args.count)
        paths, ratios = [path for _, paths in streams.class_folders(folder) for path in paths], []
        for turn in range(args.rounds):
            start = time.perf_counter()
            bicubic = plain(paths, args.size)
            loop = time.perf_counter() - start
            start = time.perf_counter()
            data = streams.load_data(streams.scenario(str(folder)), args.size, Path(work) / str(turn))
            ours = time.perf_counter() - start
            ratios.append(loop / ours)
            print(f"plain loop {loop:.2f} s, prepared in {ours:.2f} s: {ratios[-1]:.2f} times as fast", flush=True)
        difference = np.abs(data.images.astype(np.int16) - bicubic)
        same = (data.images == plain(paths, args.size, reducing_gap=1.0)).all()
        print(f"equal by the same rule: {bool(same)}")
        print(f"from bicubic alone: {difference.mean():.2f} levels in the mean, at most {difference.max()}")
    print(f"median {np.median(ratios):.2f}, {common.cpu_count()} cores")


if __name__ == "__main__":
    main()
