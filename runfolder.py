"""A training run: its flags, its folder, its state inside a task, its log.

runs/<dataset>/<backbone>/<method>/order<k>-seed<s>-<hash>/
    config.json   what made it     log.csv   a row every LOG_EVERY steps     task1/ …   what was learnt
    resume/       the newest state inside a task     DONE   when there is nothing left to do
"""

import contextlib
import copy
import csv
import hashlib
import importlib
import importlib.metadata
import json
import math
import re
import shlex
import shutil
import sys
import time
from pathlib import Path

import numpy as np

from common import (
    ROOT,
    Parser,
    batch_positions,
    fail,
    is_sound,
    load_tensors,
    locked,
    new_folder,
    on_gpu,
    output_folder,
    peak_memory,
    picture_grid,
    positive,
    progress,
    read_csv,
    read_json,
    sampling_seeds,
    save_tensors,
    whole,
    write_csv,
    write_file,
)
from streams import DATASETS, picture_size, scenario

LOG_EVERY = 10  # steps between two rows of log.csv; a row averages over them, so the device is asked once
# Flags without influence on the result; order and seed stand in the folder's name. --inception_weights says where a
# file lies; what is in it, if it is not the published one, stands in config.json as the name of the judge.
UNHASHED = ("out", "data", "device", "inception_weights", "save_every", "dry_run", "order", "seed")


def training_parser(description, dataset, names):
    """The flags that every training script has; where a default is the preset's, it is None here.

    dataset: default of --dataset; names: those that it takes beside a folder.
    """
    p = Parser(description=description)
    add = p.add_argument
    add(
        "--dataset",
        default=dataset,
        help="NAME, NAME:FIRST-LAST (those classes only), or a folder with one sub-folder of pictures a class; names: "
        f"{', '.join(names)} (default: {dataset})",
    )
    add("--method", default="ncl", help="a file of methods/ (default: ncl)")
    add("--order", type=whole(1, 5), default=1, help="class order, 1-5; 1 is that of the data set (default: 1)")
    add("--seed", type=whole(0), default=1, help="seed of weights, batches, noise and memory (default: 1)")
    add(
        "--tasks",
        type=whole(1),
        help="number of tasks, a divisor of the number of classes (default: the data set's; of a "
        "folder or a range: 5 if that divides, else one class a task)",
    )
    add("--preset", help="network and training sizes (default: the data set's; a folder's by the picture size)")
    length = p.add_mutually_exclusive_group()
    length.add_argument(
        "--steps",
        type=whole(1),
        help="training steps a task; noncl: times images so far / images of the task (default: the preset's)",
    )
    add("--batch_size", type=whole(1), help="images of the current task a step (default: the preset's)")
    add("--lr", type=positive, help="learning rate; ddim: at its peak (default: the preset's)")
    add("--device", default="auto", help="cpu, cuda or cuda:N (default: cuda if there is one)")
    add(
        "--precision",
        choices=("fp32", "bf16"),
        default="fp32",
        help="arithmetic of the network; weights and losses stay fp32 (default: fp32)",
    )
    add(
        "--compile",
        action="store_true",
        help="compile the networks with torch.compile; the first steps take minutes (default: no)",
    )
    add("--out", default="runs", help="folder of the run folders (default: runs)")
    add("--data", default="data", help="folder of data sets and caches (default: data)")
    add("--memory_size", type=whole(0), help="images of past tasks that replay may keep (default: the preset's)")
    add("--replay_size", type=whole(0), help="replayed images a step (default: the preset's)")
    add("--save_every", type=whole(1), default=500, help="steps between two saves inside a task (default: 500)")
    add("--dry_run", action="store_true", help="print configuration, tasks and parameter count; write nothing")
    return p, length


def label_parser(description):
    """The flags of the label-conditioned scripts."""
    p, length = training_parser(description, "digits", DATASETS)
    add = p.add_argument
    length.add_argument("--epochs", type=whole(1), help="passes over the task's images (default: the preset's)")
    add(
        "--select",
        choices=("best", "last"),
        help="keep a task's best checkpoint or its last one (default: best; tiny: last)",
    )
    add(
        "--inception_weights",
        help="pytorch-fid's weights file, by which --select best judges all but digits (default: where pytorch-fid "
        "keeps it)",
    )
    add("--eval_every", type=whole(1), default=500, help="steps between two scores of --select best (default: 500)")
    add("--val_samples", type=whole(2), help="images sampled for such a score (default: the preset's)")
    return p


def method_class(name):
    """The class of methods/NAME.py: the last method that the file defines."""
    if not re.fullmatch(r"[^\W_]\w*", name) or not (ROOT / "methods" / f"{name}.py").exists():
        names = sorted(p.stem for p in (ROOT / "methods").glob("[!_]*.py") if p.stem.isidentifier())
        fail(f"unknown method '{name}': methods/ has {', '.join(names)} (names of letters, digits and _)")
    module = importlib.import_module(f"methods.{name}")
    defined = [c for c in vars(module).values() if isinstance(c, type) and c.__module__ == module.__name__]
    methods = [c for c in defined if hasattr(c, "training_data")]
    return methods[-1] if methods else fail(f"methods/{name}.py defines no subclass of NCL")


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
        asked = f"--preset {args.preset}" if args.preset != scene.preset else f"{args.preset}, that of {args.dataset},"
        fail(f"{asked} is no preset of {parser.prog}: choose --preset from {', '.join(presets)}")
    preset = dict(presets[args.preset])
    if args.steps or getattr(args, "epochs", None):
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
    # one spelling a scenario: it is part of the run's identity, for a folder by its whole path
    args.dataset = str(scene.folder) if scene.folder else args.dataset.split(":")[0]
    if scene.classes < scene.total:
        args.dataset += f":{scene.first}-{scene.last}"
    return args


# ------------------------------------------------------------------------------------------------- folder


def run_folder(args, backbone):
    """runs/<dataset>/<backbone>/<method>/order<k>-seed<s>-<hash of the flags that change the result>"""
    flags = {k: v for k, v in vars(args).items() if k not in UNHASHED}
    if args.select == "last":
        flags.update(eval_every=None, val_samples=None)
    digest = hashlib.blake2b(json.dumps(flags, sort_keys=True).encode(), digest_size=4).hexdigest()
    name = scenario(args.dataset).name
    return output_folder(args.out) / name / backbone / args.method / f"order{args.order}-seed{args.seed}-{digest}"


def code_hashes(script, method):
    """{file: short hash} of all code that a run's result can depend on."""
    modules = [c.__module__ for c in method_class(method).__mro__ if c.__module__.startswith("methods.")]
    files = [
        Path(script).name,
        *(["concepts.py", "tiny_world.py"] if Path(script).name == "train_concepts.py" else []),
        "common.py",
        "fid.py",
        "readers.py",
        "runfolder.py",
        "streams.py",
    ]
    files += [module.replace(".", "/") + ".py" for module in [*modules, "methods._shared"]]
    return {f: hashlib.sha256((ROOT / f).read_bytes()).hexdigest()[:12] for f in files}


def read_config(run):
    """config.json, with all in it that the other scripts rely on."""
    config = read_json(run / "config.json")
    try:
        flags, data = config["flags"], config["data"]
        _ = [flags[k] for k in ("dataset", "size", "method", "order", "seed", "preset", "select")]
        _ = data["name"], data["digest"], data["classes"], config["backbone"], config["isolated"], config["device"]
        _ = config["code"].values(), [c for task in config["tasks"] for c in task]
    except (KeyError, TypeError, AttributeError):
        fail(f"{run}/config.json is damaged, or of another program: restore it or move {run} away")
    return config


def note_changed_code(run, args, script):
    """Says so if the code is not the one that this run was started with."""
    config = read_config(run)
    now = code_hashes(script, args.method)
    changed = [f for f, digest in now.items() if config["code"].get(f) != digest]
    if changed:
        print(f"note: {', '.join(changed)} changed since {run} was started; remove the folder to run it anew")
    return config


def stop_if_finished(run, args, script):
    """Ends the program with exit code 0 if this run is there already; needs no PyTorch."""
    tasks = [run / f"task{t}" / "SHA256SUMS" for t in range(1, args.tasks + 1)]
    if (run / "DONE").exists() and all(sums.exists() for sums in tasks) and not args.dry_run:
        note_changed_code(run, args, script)
        print(f"{run} is finished", flush=True)
        raise SystemExit(0)


def describe(args, script, data, tasks, device):
    """What made a run what it is, for its config.json; the script adds what it alone knows."""
    import torch

    packages = ("torch", "diffusers", "numpy", "safetensors", "peft", "scikit-learn", "pillow")
    return {
        "flags": vars(args),
        "command": shlex.join(["python", Path(script).name, *sys.argv[1:]]),
        "code": code_hashes(script, args.method),
        "versions": {p: importlib.metadata.version(p) for p in packages},
        "data": {"name": data.name, "digest": data.digest, "classes": data.classes},
        "tasks": [task.classes for task in tasks],
        "device": device,
        "threads": torch.get_num_threads(),
    }


def write_or_check_config(run, config, args, script):
    """First start: writes config.json. Later starts: the pictures must be the same, the rest is said."""
    (run / "DIVERGED").unlink(missing_ok=True)
    path = run / "config.json"
    if not path.exists():
        return write_file(path, json.dumps(config, indent=1).encode())
    old = note_changed_code(run, args, script)
    if old["data"] != config["data"]:
        fail(
            f"the pictures of {args.dataset} (names, sizes or times) changed since {run} was started; remove that "
            "folder to train anew"
        )
    for key, what in (("model", "the model"), ("concepts", "concepts.json, or what it stands for,")):
        if old.get(key) != config.get(key):
            fail(f"{what} is not what {run} was started with; remove that folder to train anew")
    for key in ("device", "threads", "judge"):
        if old.get(key) != config.get(key):
            print(f"note: {key} was {old.get(key)} at the start, is {config.get(key)}: not bit-equal", file=sys.stderr)


# -------------------------------------------------------------------------------------------------- state


def print_plan(args, backbone, data, tasks, parameters, lines=()):
    """What --dry_run says; parameters: {network: count}; lines: what else a script knows."""
    print(json.dumps(vars(args), indent=1))
    for task in tasks:
        print(f"task {task.number}: classes {task.classes} ({data.names(task.classes)}), {len(task.indices)} images")
    for network, count in parameters.items():
        print(f"{network}: {count:,} parameters")
    print(*lines, sep="\n", end="\n" if lines else "")
    print(f"run folder: {run_folder(args, backbone)}")


def finished_tasks(run, tasks):
    """How many tasks have a sound folder, counted from task 1.

    A broken one is set aside and trained again, and with it all that came after it.
    """
    done = 0
    while done < tasks and is_sound(run / f"task{done + 1}"):
        done += 1
    if any((run / f"task{t}").exists() for t in range(done + 1, tasks + 1)):
        later = [f"task{t}" for t in range(done + 1, tasks + 1)] + ["resume", "resume.old"]
        for folder in (run / name for name in later):
            aside = folder.with_name(folder.name + ".broken")
            if folder.exists():
                shutil.rmtree(aside, ignore_errors=True)
                folder.rename(aside)
    return done


def diverged(run, message):
    """Ends the program; leaves a file DIVERGED, by which gtep.py knows. The same command may try again."""
    write_file(run / "DIVERGED", f"{message}\n".encode())
    fail(f"{message}; try a lower --lr or strength of the method", code=1)


def save_state(run, state):
    """Replaces the newest state inside a task, whose number is state["task"]; never by weights that are not finite."""
    if not all(w.isfinite().all() for net in state["nets"].values() for w in net.values()):
        diverged(run, f"the weights after step {state['step']} of task {state['task']} are not finite and are not kept")
    with new_folder(run / "resume") as folder:
        save_tensors(state, folder / "state.pt")


def resume_state(run, task):
    """The newest sound state inside this task, or None to start the task."""
    for folder in (run / "resume", run / "resume.old"):
        if is_sound(folder):
            state = load_tensors(folder / "state.pt")
            if state["task"] == task:
                return state
    return None


def keep_task(run, method, tasks, task, best, steps, cost, trained):
    """Ends a task at the weights that are kept, and writes its folder.

    best: what --select best chose, or None; cost: seconds by part; trained: how many numbers this task has trained.
    """
    args, learner = method.args, method.learner
    if not all(p.isfinite().all() for net in learner.nets.values() for p in net.parameters()):
        diverged(run, f"the weights after task {task.number} are not finite; it is not kept")
    clock = time.perf_counter()
    method.end_task(task)
    cost["importance"] = time.perf_counter() - clock
    shown = task.classes if method.isolated else [c for t in tasks[: task.number] for c in t.classes]
    shown = shown[-20:]
    seeds = sampling_seeds((args.seed, "samples"), 8 * len(shown))
    images = learner.sample([c for c in shown for _ in range(8)], seeds)
    about = {
        "kept_step": best["step"] if best else steps,
        "selection_score": best["score"] if best else None,
        "steps": steps,
        "seconds": cost | {"train": cost["train"] - cost["replay"]},
        "peak_memory_bytes": peak_memory(learner.device),
        "parameters_trained": trained,
        "parameters_stored": method.stored(learner.sizes, task.number),
    }
    with new_folder(run / f"task{task.number}") as folder:
        method.save(folder)
        save_tensors(method.state_dict(), folder / "method.pt")
        picture_grid(images.unflatten(0, (len(shown), 8))).save(folder / "samples.png")
        (folder / "cost.json").write_text(json.dumps(about, indent=1))


def finish(run):
    """Marks a run as done; the state inside tasks is needed no more."""
    for folder in (run / "resume", run / "resume.old"):
        shutil.rmtree(folder, ignore_errors=True)
    write_file(run / "DONE", b"")


def checkpoint_hash(folder):
    """Short hash of the weights in a task folder: equal weights, equal hash."""
    lines = (folder / "SHA256SUMS").read_text(errors="replace").splitlines()
    weights = "\n".join(line for line in lines if line.endswith(".safetensors"))
    return hashlib.sha256(weights.encode()).hexdigest()[:12]


# --------------------------------------------------------------------------------------------------- run


def trained_state(modules):
    """{name: state} of what training changes: all of a state but the frozen weights, which are where they came from."""
    states = {}
    for name, module in modules.items():
        frozen = {key for key, p in module.named_parameters() if not p.requires_grad}
        states[name] = {key: value for key, value in module.state_dict().items() if key not in frozen}
    return states


def load_trained(modules, states):
    for name, module in modules.items():
        missing, unexpected = module.load_state_dict(states[name], strict=False)
        frozen = {key for key, p in module.named_parameters() if not p.requires_grad}
        if unexpected or {*missing} - frozen:
            fail(f"the saved state does not fit {name}: {[*unexpected, *({*missing} - frozen)][0]}; start anew", 1)


class Run:
    """What a training script does beside the experiment: it goes on where it was stopped, logs, selects, saves, keeps.

        with Run(__file__, "ddim", method, tasks, judge) as run:
            for task, past in run.tasks_left():
                …                                           # the method's start, the optimisers
                for step in run.steps(task, indices, optimisers):
                    images, labels = run.batch(step)
                    …                                       # the step itself
                    run.log(step, lr, record)
                run.keep()

    judge: a fid.Selection for --select best, or None. about: what else config.json should hold. prepare: a function to
    call before a run that goes on loads what it has learnt. Only what is trained goes into the state inside a task.
    """

    def __init__(self, script, backbone, method, tasks, judge=None, about=None, prepare=lambda: None):
        self.args, self.method, self.learner = method.args, method, method.learner
        self.script, self.tasks, self.judge, self.prepare = script, tasks, judge, prepare
        self.folder = run_folder(self.args, backbone)
        self.config = describe(self.args, script, self.learner.data, tasks, self.learner.device)
        self.config |= {"backbone": backbone, "isolated": method.isolated, **(about or {})}
        self.config |= {"parameters": self.learner.sizes.model, "judge": judge and judge.name}

    def __enter__(self):
        with contextlib.ExitStack() as held:
            held.enter_context(locked(self.folder))
            write_or_check_config(self.folder, self.config, self.args, self.script)
            self.prepare()
            self.done = finished_tasks(self.folder, len(self.tasks))
            if self.done:
                self.method.load(self.folder, self.done, self.done)
                self.method.load_state_dict(load_tensors(self.folder / f"task{self.done}" / "method.pt"))
            self.held = held.pop_all()  # until __exit__
        return self

    def __exit__(self, kind, *rest):
        with self.held:
            if kind is None:
                finish(self.folder)
                print(f"{self.folder} is finished")

    def tasks_left(self):
        """(task, the tasks before it) of each that is not finished."""
        for task in self.tasks[self.done :]:
            yield task, self.tasks[: task.number - 1]

    def steps(self, task, indices, optimisers):
        """The steps that are left of a task which trains on the images `indices`; their number in all is `length`.

        Between two steps: a row of log.csv, a score of --select best, a save, each when it is due.
        """
        args, method, learner = self.args, self.method, self.learner
        own = args.steps or math.ceil(args.epochs * len(task.indices) / args.batch_size)
        self.length = round(own * len(indices) / len(task.indices))  # Non-CL: as the pool grows
        self.task, self.indices = task, indices
        self.trained = sum({n: p.numel() for k in learner.phases(0) for n, p in learner.params(k).items()}.values())
        self.best, self.cost = None, {"train": 0.0, "replay": 0.0, "importance": 0.0, "selection": 0.0}
        if self.judge:
            self.judge.begin(task, indices)
        start, state = 0, resume_state(self.folder, task.number)
        if state:
            start, self.best, self.cost = state["step"], state["best"], state["cost"]
            load_trained(learner.nets, state["nets"])
            for name, optimiser in optimisers.items():
                optimiser.load_state_dict(state["optimisers"][name])
            method.load_state_dict(state["method"])
            print(f"task {task.number}: goes on from step {start} of {self.length}")
        self.csv = Log(self.folder / "log.csv", task.number, start)
        bar = progress(self.length * args.batch_size, f"{args.method} task {task.number}/{len(self.tasks)}")
        bar.update(start * args.batch_size)
        self.resident = on_gpu(learner.data.images, indices, learner.device)
        clock, seen = time.perf_counter(), 0
        for step in range(start, self.length):
            yield step
            bar.update(args.batch_size)
            seen += args.batch_size
            last = step + 1 == self.length
            score_now = self.judge and ((step + 1) % args.eval_every == 0 or last)
            save_now = (step + 1) % args.save_every == 0 and not last
            if (step + 1) % LOG_EVERY == 0 or last or score_now or save_now:
                self.cost["train"] += time.perf_counter() - clock
                clock = time.perf_counter()
                self.row = self.csv.flush(seen, self.lr, self.cost["train"])
                seen = 0
                bar.set_postfix(self.losses(), refresh=False)
            if score_now:
                score = self.judge.score(learner)
                if self.best is None or score < self.best["score"]:
                    self.best = {"score": score, "step": step + 1, "method": method.state_dict()}
                    self.best["nets"] = copy.deepcopy(trained_state(learner.nets))
                self.cost["selection"] += time.perf_counter() - clock
            if save_now:
                state = {"task": task.number, "step": step + 1, "best": self.best, "cost": self.cost}
                state |= {"nets": trained_state(learner.nets), "method": method.state_dict()}
                state["optimisers"] = {name: optimiser.state_dict() for name, optimiser in optimisers.items()}
                save_state(self.folder, state)
            if score_now or save_now:
                clock = self.csv.clock = time.perf_counter()
        bar.close()

    def batch(self, step):
        """uint8 images (batch_size, 3, H, W) and labels (batch_size,) of a step, the same for every method."""
        data, args = self.learner.data, self.args
        pick = batch_positions(len(self.indices), step, args.batch_size, args.seed, self.task.number)
        images = data.images[self.indices[pick]] if self.resident is None else self.resident[pick]
        return images, data.labels[self.indices[pick]]

    @contextlib.contextmanager
    def clocked(self, part):
        """Counts the seconds of a part of the step in cost.json."""
        start = time.perf_counter()
        yield
        self.cost[part] += time.perf_counter() - start

    def log(self, step, lr, record):
        """record: {column of log.csv: 0-d tensor or number}."""
        self.lr = lr
        self.csv.add(step, record)

    def losses(self):
        return {name: value for name, value in self.row.items() if name.startswith("loss")}

    def keep(self):
        """Goes back to the best weights, if --select best chose any, ends the task there, and writes its folder."""
        task, names = self.task, self.learner.data.names(self.task.classes)
        if self.best:
            load_trained(self.learner.nets, self.best["nets"])
            self.method.load_state_dict(self.best["method"])
        keep_task(self.folder, self.method, self.tasks, task, self.best, self.length, self.cost, self.trained)
        losses = ", ".join(f"{name} {value}" for name, value in self.losses().items())
        print(
            f"{self.args.method} task {task.number}/{len(self.tasks)} ({names}): {losses}, {self.length} steps in "
            f"{self.cost['train']:.0f} s",
            flush=True,
        )


# ---------------------------------------------------------------------------------------------------- log


class Log:
    """log.csv. Values stay on the device until `flush`, so that a step does not wait for the host.

    `flush` averages over the steps since the last one, appends a row, and ends the program at the first
    step whose loss, penalty or gradient norm is not finite.
    """

    def __init__(self, path, task, step):
        self.path, self.task, self.pending = path, task, []
        try:
            rows = [r for r in read_csv(path) if r["images_per_second"]]  # a torn last line lacks its end
            kept = [r for r in rows if (int(r["task"]), int(r["step"])) <= (task, step)]
        except (KeyError, ValueError):
            path.replace(path.with_name("log.csv.broken"))
            print(f"note: {path} was damaged, is now log.csv.broken, and is begun anew", file=sys.stderr)
            kept = []
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
        """images: of the task, trained on since the last flush. Returns the row."""
        import torch

        names = list(dict.fromkeys(name for _, values in self.pending for name in values))
        means = {}
        for name in names:
            steps, column = zip(*((s, v[name]) for s, v in self.pending if name in v), strict=True)
            column = torch.stack([torch.as_tensor(c, dtype=torch.float32).detach() for c in column]).cpu()
            bad = (~column.isfinite()).nonzero()
            if len(bad) and name.startswith(("loss", "penalty", "gradient")):
                diverged(
                    self.path.parent,
                    f"{name} of task {self.task} is {column[bad[0, 0]].item()} at step {steps[bad[0, 0]]}; nothing "
                    "was saved since it was last finite",
                )
            means[name] = column.mean().item()
        step = self.pending[-1][0] + 1
        now = time.perf_counter()
        speed, self.clock, self.pending = images / (now - self.clock), now, []
        row = {"task": self.task, "step": step, **{k: f"{v:.6g}" for k, v in means.items()}, "lr": f"{lr:.6g}"}
        row |= {"seconds": f"{seconds:.2f}", "images_per_second": f"{speed:.1f}"}
        new = self.header is None
        self.header = self.header or list(row)
        if more := [name for name in row if name not in self.header]:  # a lazy phase, first met after the log was lost
            self.header += more
            write_csv(self.path, [dict.fromkeys(self.header, "") | old for old in read_csv(self.path)])
        with open(self.path, "a", newline="") as file:
            writer = csv.DictWriter(file, self.header, restval="", lineterminator="\n")
            if new:
                writer.writeheader()
            writer.writerow(row)
        return row
