"""What the benchmark's loop costs beside a plain one: both in this process, taking turns, ratio of medians.

    python tests/bench.py                       preset S, batch 8, fp32, on the CPU
    python tests/bench.py --precision bf16      the same in bf16, also against fp32
    python tests/bench.py --methods             a step of each method in its second task beside one of ncl
    python tests/bench.py --stylegan2           StyleGAN2 beside itself with a convolution of its own for each image
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
import types
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
from gpu_check import gan_steps, medians, prepared, seconds, training_steps

import fid
import streams
import train_ddim
import train_stylegan2

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


def grouped_convolutions(generator):
    """Changes a generator to the published formulation: modulated weights for each image, one group an image."""
    F = torch.nn.functional

    def style_layer(self, x, w, noise):
        (n, inputs, height, width), outputs = x.shape, len(self.weight)
        kernel = self.weight * self.affine(w)[:, None, :, None, None]
        kernel = kernel * (kernel.square().sum((2, 3, 4), keepdim=True) + 1e-8).rsqrt()
        x = x.reshape(1, n * inputs, height, width)
        if self.up:
            x = F.conv_transpose2d(x, kernel.transpose(1, 2).reshape(n * inputs, outputs, 3, 3), stride=2, groups=n)
            x = train_stylegan2.blur(x.unflatten(1, (n, outputs))[0], 4 * self.resample_filter, padding=1)
        else:
            x = F.conv2d(x, kernel.reshape(n * outputs, inputs, 3, 3), padding=1, groups=n)
            x = x.unflatten(1, (n, outputs))[0]
        return train_stylegan2.leaky(x + noise * self.noise_strength + self.bias[:, None, None])

    def to_rgb(self, x, w):
        n, inputs = x.shape[:2]
        kernel = self.weight * (self.affine(w) / inputs**0.5)[:, None, :, None, None]
        x = F.conv2d(x.reshape(1, n * inputs, *x.shape[2:]), kernel.reshape(n * 3, inputs, 1, 1), groups=n)
        return x.unflatten(1, (n, 3))[0] + self.bias[:, None, None]

    for module in generator.modules():
        if isinstance(module, train_stylegan2.StyleLayer):
            module.forward = types.MethodType(style_layer, module)
        elif isinstance(module, train_stylegan2.ToRGB):
            module.forward = types.MethodType(to_rgb, module)
    return generator


def measure_stylegan2(bench, folder):
    """G forward and backward, a step without and with R1, and their mean; both formulations take turns."""
    args = train_stylegan2.parse_args(["--preset", bench.preset, "--precision", bench.precision])
    data = streams.load_data(streams.scenario(args.dataset), args.size, folder)
    learners = [train_stylegan2.StyleGAN2(args, data, bench.device) for _ in range(2)]
    if bench.device == "cpu":
        learners[1].G.to(memory_format=torch.contiguous_format)  # which groups are faster with
    grouped_convolutions(learners[1].G)
    batch = learners[0].draw(data.images[: bench.batch_size], data.labels[: bench.batch_size], (1,))
    slope = torch.randn_like(batch["images"])

    def generate(learner):
        learner.G.zero_grad()
        (learner.generate(batch, 0) * slope).sum().backward()
        return [p.grad.clone() for p in learner.G.parameters()]

    with torch.no_grad():
        images = [learner.generate(batch, 0) for learner in learners]
    apart = [(a - b).abs().max() / b.abs().max() for a, b in zip(*map(generate, learners), strict=True) if b.any()]
    print(f"images differ by {(images[0] - images[1]).abs().max() / images[1].abs().max():.1e} of the largest number, "
          f"gradients by {max(apart):.1e}")  # fmt: skip
    loops = [gan_steps(learner, batch) for learner in learners]
    r1 = [gan_steps(learner, batch, number=0) for learner in learners]
    measured = []
    for name, calls in (
        ("G, forward and backward", [lambda i=i: generate(learners[i]) for i in (0, 1)]),
        ("phases G and D", [lambda i=i: next(loops[i]) for i in (0, 1)]),
        ("phases G, D and R1", [lambda i=i: next(r1[i]) for i in (0, 1)]),
    ):
        measured.append(medians(calls, bench.rounds, bench.device, warm_up=1))
        ours, theirs = measured[-1]
        print(f"{name:24} {1000 * ours:8.1f} ms, grouped {1000 * theirs:8.1f} ms: {ours / theirs:.3f}", flush=True)
    (plain, lazy), every = measured[1:], train_stylegan2.R1_EVERY
    ours, theirs = (p + (r - p) / every for p, r in zip(plain, lazy, strict=True))
    print(f"{'a step in the mean':24} {1000 * ours:8.1f} ms, grouped {1000 * theirs:8.1f} ms: {ours / theirs:.3f}")


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
    p.add_argument("--stylegan2", action="store_true", help="compare StyleGAN2 with grouped convolutions (default: no)")
    bench = p.parse_args()
    if bench.frechet:
        return measure_frechet()
    if bench.stylegan2:
        with tempfile.TemporaryDirectory() as folder:
            return measure_stylegan2(bench, folder)
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
