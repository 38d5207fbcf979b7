"""What only a GPU can tell, within eight minutes: equality with the CPU, speed, memory. One table at the end.

    python tests/gpu_check.py > table.md            presets S and L on the GPU; the table is for docs/performance.md
    python tests/gpu_check.py --device cpu --tiny   the same checks in small, to see that they run

    equality     tiny, S: same weights and batch on CPU and device, TF32 off: loss, gradient, four samples; bf16 loss
    whole run    train of both scripts with --method er, stopped and resumed against unbroken: difference of the weights
    rates        S, L: images/s of one denoising step (forward), of a training step and of sampling, in fp32 (on CUDA:
                 TF32) and bf16, weights contiguous and channels_last; × is against the preset's first row
    stylegan2    tiny, S: losses and gradients on CPU and device; S, L: a training step, R1 included, sampling, and G
                 forward and backward beside grouped convolutions, the published formulation
    methods      S: a training step of task 2 against one of NCL, taking turns; importance of EWC and MAS
    compiled     S, L: the rates with --compile and an empty cache; "compiling" is the first training step and the first
                 denoising step; left out where too little time remains

Times are medians of calls after warm-up, the device synchronised before and after each. A step of DDIM is that of
train_ddim.train without its log: batch, replay, loss, penalty, backward, clipping, fused Adam. Data are scikit-learn's
digits, enlarged. Each row goes to stderr once known, the table to stdout. Exit code 1 if a row says FAIL.
"""

import argparse
import contextlib
import datetime
import gc
import itertools
import os
import statistics
import sys
import tempfile
import time
import traceback
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from safetensors.torch import load_file

import common
import runfolder
import streams
import train_ddim
import train_stylegan2

LIMIT, COMPILING = 480, 150  # seconds: of the whole script; that must be left of them to begin a compiled row
START = time.perf_counter()


def prepared(options, preset, name, *flags):
    """A method and its learner in task 1 → (method, tasks)."""
    args = train_ddim.parse_args(["--preset", preset, "--method", name, "--device", options.device, *flags])
    args.importance_samples = options.images  # a flag of two methods; the others do not look at it
    scene = streams.scenario(args.dataset)
    data = streams.load_data(scene, args.size, args.data)
    method = runfolder.method_class(name)(args, train_ddim.DDIM(args, data, options.device))
    tasks = streams.split(data, scene.order(args.order), args.tasks)
    method.start_task(tasks[0], [])
    return method, tasks


def training_steps(method, task, past):
    """A generator that takes one step of train_ddim.train each time it is asked."""
    args, learner, data = method.args, method.learner, method.learner.data
    indices = method.training_data(task, past)
    params = {phase.name: learner.params(phase) for phase in learner.phases(0)}
    optimisers = {name: torch.optim.Adam(p.values(), args.lr, fused=True) for name, p in params.items()}
    resident = common.on_gpu(data.images, indices, learner.device)
    for step in itertools.count():
        key = (args.seed, task.number, step)
        learner.unet.train()
        pick = common.batch_positions(len(indices), step, args.batch_size, args.seed, task.number)
        images = data.images[indices[pick]] if resident is None else resident[pick]
        batch = method.mix(learner.draw(images, data.labels[indices[pick]], key), key)
        for phase in learner.phases(step):
            optimisers[phase.name].zero_grad()
            torch.manual_seed(common.hash32((*key, phase.name)))
            loss = learner.loss(phase, batch)
            (loss + (method.penalty(phase, batch) if phase.main else 0.0)).backward()
            method.after_backward(phase, batch)
            torch.nn.utils.clip_grad_norm_(params[phase.name].values(), 1.0)
            optimisers[phase.name].step()
            method.after_step(phase)
        yield


def gan_steps(learner, batch, number=1, optimisers=None):
    """A generator that trains on one batch each time it is asked: phases G and D, and R1 if `number` is 0."""
    optimisers = optimisers or train_stylegan2.build_optimisers(learner, learner.args.lr)
    while True:
        for phase in learner.phases(number):
            (net,) = phase.nets
            optimisers[net].zero_grad()
            learner.loss(phase, batch).backward()
            optimisers[net].step()
        yield


def seconds(call, device):
    synchronise = torch.cuda.synchronize if device.startswith("cuda") else lambda device: None
    synchronise(device)
    start = time.perf_counter()
    call()
    synchronise(device)
    return time.perf_counter() - start


def medians(calls, rounds, device, warm_up=3):
    """Median seconds of each call; they take turns, so that a machine that slows down slows them all."""
    rows = [[seconds(call, device) for call in calls] for _ in range(warm_up + rounds)]
    return [statistics.median(times) for times in zip(*rows[warm_up:], strict=True)]


def allocated(device):
    """Bytes in use now; the peak is counted anew from here."""
    if not device.startswith("cuda"):
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def peak(device, other=0):
    """The peak since `allocated`, less what others hold, in GiB."""
    return f"{(torch.cuda.max_memory_allocated(device) - other) / 2**30:.2f}" if device.startswith("cuda") else "-"


# -------------------------------------------------------------------------------------------------- checks
# Each is a generator of rows: what, measured, peak memory, verdict.


def equality(options, preset):
    phase, device, losses, gradients, samples = common.Phase("main", ("unet",)), options.device, [], [], []
    learners = [prepared(argparse.Namespace(device=d, images=1), preset, "ncl")[0].learner for d in ("cpu", device)]
    batch = learners[0].draw(learners[0].data.images[:4], learners[0].data.labels[:4], (0,))  # a GPU's noise is another
    tf32 = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    torch.set_float32_matmul_precision("highest")  # TF32 off here too, until the next learner on CUDA
    try:
        for learner in learners:
            learner.unet.eval()  # dropout is another on a GPU, too
            loss = learner.loss(phase, {name: rows.to(learner.device) for name, rows in batch.items()})
            loss.backward()
            losses.append(loss.item())
            gradients.append(torch.cat([p.grad.flatten() for p in learner.params(phase).values()]).cpu())
            samples.append(learner.sample([0, 1, 2, 3], common.sampling_seeds((0,), 4)).float())
    finally:
        torch.backends.cudnn.allow_tf32 = tf32
    learner.args.precision = "bf16"
    bf16 = learner.loss(phase, {name: rows.to(device) for name, rows in batch.items()}).item()
    gradient = ((gradients[1] - gradients[0]).norm() / gradients[0].norm()).item()
    levels = (samples[1] - samples[0]).abs().mean().item()
    for what, unit, error, limit in (
        (f"loss, {device} against cpu", "relative error", abs(losses[1] / losses[0] - 1), 1e-4),
        (f"gradient, {device} against cpu", "relative error", gradient, 1e-3),
        (f"4 samples, {device} against cpu", "mean error in uint8 levels", levels, 1),
        ("loss, bf16 against fp32", "relative error", abs(bf16 / losses[1] - 1), 0.02),
    ):
        verdict = f"{'ok' if error < limit else 'FAIL'}, wanted < {limit:g}"
        yield f"{preset}, {what}", f"{unit}: {error:.1e}", "-", verdict


def whole_run(options, module, backbone):
    learner = module.Learner
    draw = learner.draw

    def draw_until_stopped(self, images, labels, key):
        if key[1:] == (2, 5):  # task, step
            raise KeyboardInterrupt
        return draw(self, images, labels, key)

    def train(folder, out):  # scored at the last step alone: no rounding error can keep another step
        argv = ["--dataset", "digits:0-3", "--tasks", "2", "--method", "er", "--steps", "8", "--save_every", "2",
                "--select", "best", "--val_samples", "8", "--device", options.device, "--data", folder,
                "--out", f"{folder}/{out}", *(["--ddim_steps", "2"] if backbone == "ddim" else [])]  # fmt: skip
        args = module.parse_args(argv)
        with contextlib.redirect_stdout(sys.stderr):
            module.train(args)
        run = runfolder.run_folder(args, backbone)
        return [load_file(path) for path in sorted(run.glob("task*/**/*.safetensors"))]

    with tempfile.TemporaryDirectory() as folder:
        unbroken = train(folder, "unbroken")
        with mock.patch.object(learner, "draw", draw_until_stopped), contextlib.suppress(KeyboardInterrupt):
            train(folder, "stopped")
            raise RuntimeError("the run was not stopped")
        resumed = train(folder, "stopped")
    error = max((a[k] - b[k]).abs().max().item() for a, b in zip(unbroken, resumed, strict=True) for k in a)
    promised = "ok, wanted 0" if error == 0 else "FAIL, wanted 0"
    what = f"tiny, {backbone}, er, stopped and resumed against unbroken"
    yield what, f"largest difference of a weight {error:.1e}", "-", promised if options.device == "cpu" else ""


def rates(options, preset, precision, layout, first, compiled=False):
    device, what = options.device, f"{preset}, {precision}, {layout}{', compiled' if compiled else ''}"
    left = LIMIT - (time.perf_counter() - START)
    if compiled and left < COMPILING:
        yield what, f"left out: {left:.0f} s of {LIMIT} s were left", "-", ""
        return
    torch.compiler.reset()  # else the networks before count towards the limit of recompilations
    flags = ["--precision", precision, *(["--compile"] if compiled else [])]
    method, tasks = prepared(options, preset, "ncl", *flags)
    args, learner = method.args, method.learner
    learner.unet.to(memory_format=torch.channels_last if layout == "channels_last" else torch.contiguous_format)
    steps = training_steps(method, tasks[0], [])
    compiling = seconds(lambda: next(steps), device)
    allocated(device)
    (training,) = medians([lambda: next(steps)], options.rounds, device)
    memory = peak(device)
    steps.close()  # and with it the optimiser
    learner.unet.zero_grad()
    learner.unet.eval()

    n = args.batch_size
    labels, seeds = [k % args.classes for k in range(n)], common.sampling_seeds((0,), n)
    noise, classes = torch.randn(n, 3, args.size, args.size, device=device), torch.tensor(labels, device=device)
    allocated(device)
    with torch.no_grad():
        compiling += seconds(lambda: learner.predict(noise, torch.tensor(500), classes), device)
        (forward,) = medians([lambda: learner.predict(noise, torch.tensor(500), classes)], options.rounds, device)
    (sampling,) = medians([lambda: learner.sample(labels, seeds)], 2, device, warm_up=0)  # warm from the forward pass
    ratio = first.setdefault(preset, training) / training
    measured = f"forward {n / forward:.0f}, training {n / training:.1f} (× {ratio:.2f}), sampling {n / sampling:.2f}"
    measured += f" images/s in batches of {n}" + (f"; compiling {compiling:.0f} s" if compiled else "")
    yield what, measured, f"{memory} / {peak(device)}", ""


def gan_equality(options, preset):
    device = options.device
    args = train_stylegan2.parse_args(["--preset", preset])
    data = streams.load_data(streams.scenario(args.dataset), args.size, args.data)
    learners = [train_stylegan2.StyleGAN2(args, data, d) for d in ("cpu", device)]
    batch = learners[0].draw(data.images[:8], data.labels[:8], (0,))  # a GPU's noise is another
    tf32 = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    torch.set_float32_matmul_precision("highest")
    try:
        for phase in learners[0].phases(0):
            found = []
            for learner in learners:
                loss = learner.loss(phase, {name: rows.to(learner.device) for name, rows in batch.items()})
                params = [p for p in learner.params(phase).values()]
                gradients = torch.autograd.grad(loss, params, allow_unused=True)
                found.append((loss.item(), torch.cat([g.flatten().cpu() for g in gradients if g is not None])))
            (loss, gradient), (other, own) = found
            for what, error, limit in (
                ("loss", abs(other / loss - 1), 1e-3),
                ("gradient", ((own - gradient).norm() / gradient.norm()).item(), 1e-2),
            ):
                verdict = f"{'ok' if error < limit else 'FAIL'}, wanted < {limit:g}"
                yield f"{preset}, stylegan2, {what} of {phase.name}, {device} against cpu", f"{error:.1e}", "-", verdict
    finally:
        torch.backends.cudnn.allow_tf32 = tf32


def gan_rates(options, preset, precision):
    from bench import grouped_convolutions

    device, n = options.device, train_stylegan2.PRESETS[preset]["batch_size"]
    args = train_stylegan2.parse_args(["--preset", preset, "--precision", precision])
    data = streams.load_data(streams.scenario(args.dataset), args.size, args.data)
    learner = train_stylegan2.StyleGAN2(args, data, device)
    batch = learner.draw(data.images[:n], data.labels[:n], (0,))
    optimisers = train_stylegan2.build_optimisers(learner, args.lr)
    steps = [gan_steps(learner, batch, number, optimisers) for number in (1, 0)]
    allocated(device)
    plain, lazy = medians([lambda: next(steps[0]), lambda: next(steps[1])], options.rounds, device)
    step, memory = plain + (lazy - plain) / train_stylegan2.R1_EVERY, peak(device)
    labels, seeds = [k % args.classes for k in range(256)], common.sampling_seeds((0,), 256)
    allocated(device)
    (sampling,) = medians([lambda: learner.sample(labels, seeds)], 2, device, warm_up=1)
    yield (f"{preset}, stylegan2, {precision}", f"training {n / step:.1f} images/s in batches of {n} (R1 in one of 16 "
           f"steps), sampling {256 / sampling:.0f} images/s", f"{memory} / {peak(device)}", "")  # fmt: skip
    other = train_stylegan2.StyleGAN2(args, data, device)
    other.G.to(memory_format=torch.contiguous_format)
    grouped_convolutions(other.G)
    ours, theirs = medians([lambda x=x: x.generate(batch, 0).sum().backward() for x in (learner, other)],
                           options.rounds, device)  # fmt: skip
    yield f"{preset}, stylegan2, {precision}, G", f"{ours / theirs:.2f} of grouped convolutions", "-", ""


def against_ncl(options, preset, name):
    device, steps = options.device, []
    for one in ("ncl", name):
        others = allocated(device)
        method, tasks = prepared(options, preset, one)
        method.end_task(tasks[0])
        if one in ("ewc", "mas"):  # the first time warmed up
            importance = seconds(lambda method=method, task=tasks[0]: method.end_task(task), device) / options.images
            yield f"{preset}, {name}, importance", f"{1000 * importance:.1f} s per 1000 images", "-", ""
        method.start_task(tasks[1], tasks[:1])
        steps.append(training_steps(method, tasks[1], tasks[:1]))
        next(steps[-1])
    ncl, own = medians([lambda: next(steps[0]), lambda: next(steps[1])], options.rounds, device)
    allocated(device)
    next(steps[1])
    yield f"{preset}, {name}, step", f"{1000 * own:.1f} ms, {own / ncl:.2f} of ncl's", peak(device, others), ""


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--device", default="cuda", help="cpu, cuda or cuda:N (default: cuda)")
    p.add_argument("--tiny", action="store_true", help="the preset tiny alone, few rounds (default: S and L)")
    options = p.parse_args()
    device = common.pick_device(options.device)
    options.rounds, options.images = (3, 4) if options.tiny else (10, 20)  # images: of the importance
    presets, lines, first = (["tiny"] if options.tiny else ["S", "L"]), [], {}
    methods = sorted(path.stem for path in (common.ROOT / "methods").glob("[!_]*.py") if path.stem != "ncl")

    checks = [(f"equality {p}", equality(options, p)) for p in dict.fromkeys(["tiny", presets[0]])]
    for module, backbone in ((train_ddim, "ddim"), (train_stylegan2, "stylegan2")):
        checks.append((f"whole run, {backbone}", whole_run(options, module, backbone)))
    for variant in itertools.product(presets, ("fp32", "bf16"), ("contiguous", "channels_last")):
        checks.append((", ".join(variant), rates(options, *variant, first)))
    checks += [(f"stylegan2 equality {p}", gan_equality(options, p)) for p in dict.fromkeys(["tiny", presets[0]])]
    for preset, precision in itertools.product(presets, ("fp32", "bf16")):
        checks.append((f"{preset}, stylegan2, {precision}", gan_rates(options, preset, precision)))
    checks += [(f"{presets[0]}, {name}", against_ncl(options, presets[0], name)) for name in methods]
    for precision, preset in itertools.product(("bf16", "fp32"), presets):  # the slowest last
        variant = (preset, precision, "channels_last")
        checks.append((f"{', '.join(variant)}, compiled", rates(options, *variant, first, compiled=True)))

    def report(*row):
        lines.append(f"| {' | '.join(row)} |")
        print(f"[{time.perf_counter() - START:4.0f} s] {lines[-1]}", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache  # compiling as in a first run
        for what, rows in checks:
            try:
                for row in rows:
                    report(*row)
            except Exception as error:  # the other rows are still wanted
                traceback.print_exc()
                report(what, f"{type(error).__name__}: {error}".splitlines()[0][:150].replace("|", "/"), "-", "FAIL")
            gc.collect()

    name = f"CPU, {torch.get_num_threads()} threads" if device == "cpu" else torch.cuda.get_device_name(device)
    print(f"{datetime.date.today()}, {name}, PyTorch {torch.__version__}, {time.perf_counter() - START:.0f} s in all\n")
    print("| what | measured | peak memory, GiB (training / sampling) | verdict |\n|---|---|---|---|")
    print("\n".join(lines))
    raise SystemExit(any("| FAIL" in line for line in lines))


if __name__ == "__main__":
    with common.one_line_errors():
        main()
