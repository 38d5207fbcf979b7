"""What the benchmark's loop costs beside a plain one: both in this process, taking turns, ratio of medians.

    python tests/bench.py                       preset S, batch 8, fp32, on the CPU
    python tests/bench.py --precision bf16      the same in bf16, also against fp32
    python tests/bench.py --methods             a step of each method in its second task beside one of ncl
    python tests/bench.py --frechet             the Fréchet distance beside pytorch-fid's, in seconds of CPU

The plain loop is what one would write without a benchmark: the same U-Net, scheduler, batch, precision, optimiser
and clipping, and nothing else. Ours also draws its randomness from keys, asks the method's hooks, and logs.
With --methods each replays a quarter of the batch, as preset S does, and the last lines compare the importance of
EWC and MAS with an epoch of ncl over the same images.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
from gpu_check import medians, prepared, seconds, training_steps

import fid
import streams
import train_ddim

# name → flags beyond those of all
VARIANTS = {"ncl": "", "l2": "", "ewc": "", "si": "", "mas": "", "kd": "", "kd, past labels": "--kd_labels past",
            "er": "", "agem": "", "clora": "", "gr": ""}  # fmt: skip


def plain_loop(args, data, precision):
    """A generator that trains one step each time it is asked."""
    net = train_ddim.build_unet(args).to(args.device).train()
    scheduler = train_ddim.DDIMScheduler(num_train_timesteps=1000)
    optimiser = torch.optim.Adam(net.parameters(), args.lr, fused=True)
    images = torch.from_numpy(data.images).to(args.device)
    labels = torch.from_numpy(data.labels).to(args.device)
    while True:
        pick = torch.randint(len(images), (args.batch_size,), device=args.device)
        x = images[pick].float() / 127.5 - 1
        noise, t = torch.randn_like(x), torch.randint(1000, (len(x),), device=args.device)
        with torch.autocast(args.device, torch.bfloat16, enabled=precision == "bf16"):
            out = net(scheduler.add_noise(x, noise, t), t, labels[pick]).sample
        loss = torch.nn.functional.mse_loss(out.float(), noise)
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimiser.step()
        yield


def measure_methods(bench, folder):
    """Prints the table of --methods."""
    flags = ["--batch_size", str(bench.batch_size), "--replay_size", str(max(1, bench.batch_size // 4)),
             "--memory_size", "20", "--precision", bench.precision, "--data", folder]  # fmt: skip
    options = argparse.Namespace(device=bench.device, images=2)

    def second_task(name, *more):
        method, tasks = prepared(options, bench.preset, name, *flags, *more)
        method.end_task(tasks[0])
        method.start_task(tasks[1], tasks[:1])
        return method, tasks[0], training_steps(method, tasks[1], tasks[:1])

    reference = second_task("ncl")[2]
    for variant, more in VARIANTS.items():  # each takes turns with ncl, so a drift of the machine does not matter
        name = variant.split(",")[0]
        method, task, steps = second_task(name, *more.split())
        base, own = medians([lambda: next(reference), lambda s=steps: next(s)], 4 if name == "gr" else bench.rounds,
                            bench.device)  # fmt: skip
        print(f"{variant:16} {1000 * own:8.1f} ms a step   {own / base:.3f} of ncl", flush=True)
        if name in ("ewc", "mas"):
            method.args.importance_samples = images = 8 * bench.batch_size
            epoch = sum(seconds(lambda: next(reference), bench.device) for _ in range(8))
            cost = seconds(lambda m=method, t=task: m.end_task(t), bench.device)
            print(f"{'':16} importance of {images} images: {cost / epoch:.2f} of an epoch of ncl", flush=True)


def measure_frechet():
    """2048 dimensions, correlated as features are, 5000 images a side; the reference side is there, as in a run."""
    from pytorch_fid.fid_score import calculate_frechet_distance

    rng = np.random.default_rng(0)
    mix = rng.normal(size=(2048, 2048)) * np.geomspace(1, 1e-2, 2048) / 30
    x, y = (np.maximum(rng.normal(size=(5000, 2048)) @ mix + shift, 0) for shift in (0.3, 0.35))
    generated, real, few = (fid.statistics(features) for features in (x, y, x[:512]))
    start = time.process_time()
    reference = fid.with_root(real)
    print(f"root of the reference, once a task: {time.process_time() - start:.2f} s")
    times = {"pytorch-fid": [], "fid.py": [], "fid.py, 512 images": []}
    for _ in range(3):
        start = time.process_time()
        theirs = calculate_frechet_distance(*generated, *real)
        times["pytorch-fid"].append(time.process_time() - start)
        start = time.process_time()
        ours = fid.frechet_distance(generated, reference)
        times["fid.py"].append(time.process_time() - start)
        start = time.process_time()
        fid.frechet_distance(few, reference)
        times["fid.py, 512 images"].append(time.process_time() - start)
    for name, values in times.items():
        best = min(values)
        print(f"{name:20} {best:6.2f} s   {best / min(times['pytorch-fid']):.3f} of pytorch-fid")
    print(f"{ours:.10g} and {theirs:.10g}: they differ by {abs(ours - theirs) / theirs:.1e} of it")


class Enough(Exception):
    pass


def measure(bench, folder):
    """{loop: [seconds of a step]}. train_ddim.train runs as it is; before each of its steps the others take one."""
    argv = ["--preset", bench.preset, "--batch_size", str(bench.batch_size), "--device", bench.device, "--precision",
            bench.precision, "--select", "last", "--steps", "100000", "--save_every", "100000", "--out", folder,
            "--data", folder]  # fmt: skip
    args = train_ddim.parse_args(argv)
    data = streams.load_data(streams.scenario(args.dataset), args.size, folder)
    others = {f"plain loop, {bench.precision}": plain_loop(args, data, bench.precision)}
    if bench.precision == "bf16":
        others["plain loop, fp32"] = plain_loop(args, data, "fp32")
    ours = f"train_ddim.py, {bench.precision}"
    times, started, draw = {name: [] for name in [*others, ours]}, None, train_ddim.DDIM.draw

    def now():
        if bench.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def draw_after_the_others(self, *rest):
        nonlocal started
        if started is not None:
            times[ours].append(now() - started)
        if len(times[ours]) == bench.rounds + 3:
            raise Enough
        for name, loop in others.items():
            started = now()
            next(loop)
            times[name].append(now() - started)
        started = now()
        return draw(self, *rest)

    train_ddim.DDIM.draw = draw_after_the_others
    try:
        train_ddim.train(args)
    except Enough:
        return {name: values[3:] for name, values in times.items()}  # the first three warm up


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--preset", default="S", help="network size (default: S)")
    p.add_argument("--batch_size", type=int, default=8, help="images a step (default: 8)")
    p.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="(default: fp32)")
    p.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="(default: cpu)")
    p.add_argument("--rounds", type=int, default=20, help="timed steps of each loop (default: 20)")
    p.add_argument("--methods", action="store_true", help="compare the methods with ncl (default: no)")
    p.add_argument("--frechet", action="store_true", help="compare the Fréchet distance with pytorch-fid (default: no)")
    bench = p.parse_args()
    if bench.frechet:
        return measure_frechet()
    if bench.methods:
        with tempfile.TemporaryDirectory() as folder:
            return measure_methods(bench, folder)
    with tempfile.TemporaryDirectory() as folder:
        times = measure(bench, folder)
    print(f"preset {bench.preset}, batch {bench.batch_size}, {bench.device}, {torch.get_num_threads()} threads")
    first = statistics.median(next(iter(times.values())))
    for name, values in times.items():
        median = statistics.median(values)
        print(f"{name:22} {1000 * median:8.1f} ms a step   {median / first:.3f} of the first line")


if __name__ == "__main__":
    main()
