"""Scores run folders and sums them up: quality matrix → AQ, AIQ, AFQ, forgetting rate; tables, figures, costs.

    python eval_metrics.py runs --out results

Every finished task checkpoint (trained to task t, asked for each task i ≤ t) that has no score yet is sampled and
compared with the whole training set of task i. Scores go to <run>/quality.csv, so a second call only sums up.

    AQ(t) = mean of m(t, i) over i ≤ t      AIQ = mean of AQ(t) over t      AFQ = AQ(T)
    FR    = mean over t < T of how much worse task t became since it was learnt; positive = forgotten

Heusel et al., GANs Trained by a Two Time-Scale Update Rule, 2017 (FID); CLoG, section 3.3 (AIQ, AFQ, FR).

From top to bottom: Fréchet distance · feature extractors · scoring · summary · tables · figures.
"""

import argparse
import functools
import hashlib
import importlib
import io
import json
import math
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np

import common
import runfolder
import streams

LARGER_IS_BETTER = {"FID": False, "accuracy": True}
TABLE_ORDER = ["noncl", "ensemble", "ncl", "er", "gr", "kd", "l2", "ewc", "si", "mas", "agem", "clora"]
INCEPTION_FILE = "pt_inception-2015-12-05-6726825d.pth"
INCEPTION_URL = f"https://github.com/mseitzer/pytorch-fid/releases/download/fid_weights/{INCEPTION_FILE}"
PROTOCOL = ("extractor", "generated", "reference", "sampler_steps", "sampling_seed")  # scores meet only within one
COLUMNS = ("trained_to", "task", "metric", "value", *PROTOCOL, "reference_images", "checkpoint")  # of quality.csv
SHOWN = 16  # images of a cell that are kept for the sample grids


# --------------------------------------------------------------------------------------- Fréchet distance


def statistics(features):
    """Mean (D,) and covariance (D, D) of features (N, D); float64."""
    features = np.asarray(features, np.float64)
    if len(features) < 2:
        common.fail(f"{len(features)} image(s) have no covariance; at least 2 are needed on each side")
    if not np.isfinite(features).all():
        common.fail("the features of an image are not finite: are the weights?", code=1)
    mean = features.mean(0)
    centred = features - mean
    return mean, centred.T @ centred / (len(features) - 1)


def with_root(statistics):
    """(mean, covariance, square root of the covariance): the reference side, computed once."""
    mean, covariance = statistics
    values, vectors = np.linalg.eigh(covariance)
    return mean, covariance, (vectors * np.sqrt(values.clip(0))) @ vectors.T


def frechet_distance(generated, reference):
    """|μ₁−μ₂|² + tr(C₁ + C₂ − 2 (C₁C₂)^½) of `statistics` and a reference `with_root`; smaller is better, ≥ 0.

    tr (C₁C₂)^½ is the sum of the square roots of the eigenvalues of C₂^½ C₁ C₂^½, which is symmetric: no square
    root of a non-symmetric matrix that could turn complex.
    """
    (mean_1, cov_1), (mean_2, cov_2, root_2) = generated, reference
    shared = np.linalg.eigvalsh(root_2 @ cov_1 @ root_2)
    distance = np.square(mean_1 - mean_2).sum() + np.trace(cov_1) + np.trace(cov_2)
    return max(0.0, float(distance - 2 * np.sqrt(shared.clip(0)).sum()))


# --------------------------------------------------------------------------------------------- extractors


class Classifier:
    """Features of a small classifier trained on the scenario's own images and classes, with a fixed seed.

    For work offline and for images that Inception does not know. `features` are scaled so that their variance
    over the scenario, summed over the 64 dimensions, is 100. Trained once, kept in <cache>/classifiers/.
    """

    def __init__(self, data, cache, device):
        import torch
        from safetensors.torch import load_file, save_file

        self.device = device
        self.net = self.build(data.images.shape[-1], len(data.classes)).to(device)
        folder = self.folder(cache, data.digest, data.classes)
        with common.locked(folder.parent, wait=True):
            if not common.is_sound(folder):
                self.train(data)
                weights = {k: v.cpu().contiguous() for k, v in self.net.state_dict().items()}
                weights |= {"scale": torch.tensor(self.scale), "held_out": torch.tensor(self.held_out)}
                with common.new_folder(folder) as target:
                    save_file(weights, target / "classifier.safetensors")
        state = load_file(folder / "classifier.safetensors")
        self.scale, self.held_out = state.pop("scale").item(), state.pop("held_out").item()
        self.net.load_state_dict(state)
        self.net.eval()
        self.name = self.identity(cache, data.digest, data.classes)

    @staticmethod
    def folder(cache, digest, classes):
        recipe = hashlib.sha256(f"1 {digest} {len(classes)}".encode()).hexdigest()[:12]
        return Path(cache) / "classifiers" / recipe

    @classmethod
    def identity(cls, cache, digest, classes):
        """classifier-<hash of its weights>, or None if it is not trained yet."""
        folder = cls.folder(cache, digest, classes)
        return f"classifier-{runfolder.checkpoint_hash(folder)[:8]}" if common.is_sound(folder) else None

    @staticmethod
    def build(size, classes):
        """Convolutions down to 4 × 4, then 64 features, then logits."""
        from torch import nn

        layers, width = [nn.Conv2d(3, 32, 3, padding=1), nn.GroupNorm(8, 32), nn.SiLU()], 32
        while size > 4:
            wider, size = min(2 * width, 128), (size + 1) // 2
            layers += [nn.Conv2d(width, wider, 3, stride=2, padding=1), nn.GroupNorm(8, wider), nn.SiLU()]
            width = wider
        return nn.Sequential(
            *layers, nn.Flatten(), nn.Linear(width * size * size, 64), nn.SiLU(), nn.Linear(64, classes)
        )

    def train(self, data, steps=800, batch=128):
        """Adam on nine tenths of the images; a tenth is held out to say how far the judge can be trusted."""
        import torch

        order = common.numpy_rng(("classifier", "split")).permutation(len(data.labels))
        held, kept = order[: len(order) // 10], order[len(order) // 10 :]
        with torch.random.fork_rng():
            torch.manual_seed(0)
            fresh = self.build(data.images.shape[-1], len(data.classes))
        self.net.load_state_dict(fresh.state_dict())
        self.net.train()
        optimiser = torch.optim.Adam(self.net.parameters(), 2e-3)
        for step in common.tqdm(range(steps), f"classifier for {data.name}", disable=None, leave=False):
            pick = kept[common.batch_positions(len(kept), step, batch, "classifier", 0)]
            images = torch.as_tensor(data.images[pick]).to(self.device).float() / 127.5 - 1
            labels = torch.as_tensor(data.labels[pick]).to(self.device)
            loss = torch.nn.functional.cross_entropy(self.net(images), labels)
            optimiser.zero_grad()
            loss.backward()
            optimiser.param_groups[0]["lr"] = 2e-3 * 0.5 * (1 + math.cos(math.pi * step / steps))
            optimiser.step()
        self.net.eval()
        self.scale = 1.0
        self.held_out = self.accuracy(data.images[held], data.labels[held]) if len(held) else math.nan
        variance = self.features(data.images).var(0).sum()
        if not variance > 0:
            common.fail(f"the pictures of {data.name} are all alike: there is nothing to tell apart")
        self.scale = float(10 / np.sqrt(variance))
        read = f"reads {self.held_out:.1%} of {len(held)} held-out images" if len(held) else "no image held out"
        print(f"classifier for {data.name}: {read}")

    def features(self, images, batch=256):
        """uint8 images (N, 3, H, W) → float64 features (N, 64)."""
        return self.scale * in_batches(lambda x: self.net[:-1](x / 127.5 - 1), images, batch, self.device)

    def accuracy(self, images, labels, batch=256):
        """Share of the images that are read as the class that was asked for."""
        logits = in_batches(lambda x: self.net(x / 127.5 - 1), images, batch, self.device)
        return float((logits.argmax(1) == np.asarray(labels)).mean())


class Inception:
    """The 2048 pool features of pytorch-fid's network, from its own weights file; images 0..255 scaled to 0..1."""

    def __init__(self, device):
        self.check()
        from pytorch_fid.inception import InceptionV3

        self.device, self.name = device, "inception"
        self.net = InceptionV3([InceptionV3.BLOCK_INDEX_BY_DIM[2048]]).to(device).eval()

    @staticmethod
    def check():
        """Ends the program if the weights are not where pytorch-fid keeps them."""
        import torch

        path = Path(torch.hub.get_dir()) / "checkpoints" / INCEPTION_FILE
        if not path.exists():
            common.fail(f"no Inception weights: put {INCEPTION_URL} at {path}, or use --extractor classifier")

    def features(self, images, batch=64):
        """uint8 images (N, 3, H, W) → float64 features (N, 2048)."""
        return in_batches(lambda x: self.net(x / 255)[0].flatten(1), images, batch, self.device)


def in_batches(function, images, batch, device):
    """function(float32 images in 0..255) over batches of uint8 images → one float64 NumPy array; no gradients."""
    import torch

    parts = []
    with torch.no_grad():
        for k in range(0, len(images), batch):
            part = images[k : k + batch]
            if isinstance(part, np.ndarray):
                part = torch.from_numpy(part.copy())  # memory maps are read-only
            if part.dtype != torch.uint8:
                raise TypeError(f"images must be uint8 in 0..255, not {part.dtype}")
            parts.append(function(part.to(device).float()).double().cpu().numpy())
    return np.concatenate(parts)


# ------------------------------------------------------------------------------------------------ scoring


def find_runs(roots):
    """{run folder: its config} below the given folders; the same flags, order and seed count once."""
    runs, seen = {}, {}
    for root in map(Path, roots):
        if not root.is_dir():
            common.fail(f"no such folder: {root}")
        for path in sorted(root.rglob("config.json")):
            run = path.parent
            if not (run / "task1").is_dir() or any(run.resolve() == other.resolve() for other in runs):
                continue
            try:
                config = runfolder.read_config(run)
            except common.UserError as problem:
                note(f"{problem}; it is left out")
                continue
            flags = {k: v for k, v in config["flags"].items() if k in ("order", "seed") or k not in runfolder.UNHASHED}
            identity = json.dumps([config["backbone"], flags], sort_keys=True)
            if identity in seen:
                note(f"{run} is the same run as {seen[identity]} and is left out")
                continue
            seen[identity] = run
            runs[run] = config
    if not runs:
        common.fail(f"no run folder with a finished task below {', '.join(map(str, roots))}; train first")
    return runs


@functools.cache  # each note once
def note(text):
    print(f"note: {text}", file=sys.stderr, flush=True)


def cells(run, config):
    """[(trained_to, task)] of the finished tasks that have a model of their own to score."""
    done = [t for t in range(1, len(config["tasks"]) + 1) if (run / f"task{t}" / "SHA256SUMS").exists()]
    return [(t, i) for t in done for i in range(1, t + 1) if i == t or not config["isolated"]]


def protocol_of(config, args, name):
    """How a run is scored: the values of PROTOCOL, as text."""
    flags = config["flags"]
    count = args.num_samples or (256 if flags["preset"] == "tiny" else 2048)
    steps = args.ddim_steps or flags.get("ddim_steps", "")
    return dict(zip(PROTOCOL, map(str, (name, count, "train", steps, args.sampling_seed)), strict=True))


def missing_cells(run, config, protocol):
    """Cells that lack one of the metrics under this protocol."""
    have = {(int(r["trained_to"]), int(r["task"]), r["metric"]) for r in valid_rows(run) if is_of(r, protocol)}
    metrics = ("FID", "accuracy") if protocol["extractor"].startswith("classifier") else ("FID",)
    return [cell for cell in cells(run, config) if any((*cell, metric) not in have for metric in metrics)]


def is_of(row, protocol):
    return all(row[k] == v for k, v in protocol.items())


def valid_rows(run):
    """Rows of quality.csv that are whole and whose checkpoint is still the one on the disk."""
    hashes = {}
    for folder in run.glob("task*"):
        if (folder / "SHA256SUMS").exists():
            hashes[folder.name] = runfolder.checkpoint_hash(folder)
    rows = [r for r in common.read_csv(run / "quality.csv") if is_whole(r)]
    return [r for r in rows if hashes.get(f"task{r['trained_to']}") == r["checkpoint"]]


def is_whole(row):
    try:
        return (
            int(row["trained_to"]) >= int(row["task"]) and math.isfinite(float(row["value"])) and set(row) == {*COLUMNS}
        )
    except (KeyError, TypeError, ValueError):
        return False


def extractor_kind(config, wanted):
    if wanted != "auto":
        return wanted
    return "classifier" if config["flags"]["dataset"].split(":")[0] == "digits" else "inception"


def score_what_is_missing(run, config, args, datas, extractors, references):
    kind = extractor_kind(config, args.extractor)
    about = (args.data, config["data"]["digest"], config["data"]["classes"])
    protocol = protocol_of(config, args, (Classifier.identity(*about) or kind) if kind == "classifier" else kind)
    if not missing_cells(run, config, protocol):
        return
    scene = config["flags"]["dataset"], config["flags"]["size"]
    if scene not in datas:
        datas[scene] = streams.load_data(streams.scenario(scene[0]), scene[1], args.data)
    data = datas[scene]
    if config["data"]["digest"] != data.digest:
        common.fail(f"{run} was trained on other pictures than {scene[0]} holds now")
    if (kind, data.digest) not in extractors:
        device = common.pick_device(args.device)
        extractor = Classifier(data, args.data, device) if kind == "classifier" else Inception(device)
        extractors[kind, data.digest] = extractor
    extractor = extractors[kind, data.digest]
    protocol["extractor"] = extractor.name
    with common.locked(run):
        missing = missing_cells(run, config, protocol)
        score(run, config, args, data, missing, extractor, protocol, references)
    print(f"scored {run}", flush=True)


def score(run, config, args, data, missing, extractor, protocol, references):
    """Samples and scores the missing cells of one run; a row is on the disk before the next cell begins."""
    flags = argparse.Namespace(**config["flags"])
    flags.ddim_steps = args.ddim_steps or flags.ddim_steps
    module = importlib.import_module(f"train_{config['backbone']}")
    learner = module.Learner(flags, data, extractor.device)
    learner.sample_batch = args.batch_size
    method = runfolder.method_class(flags.method)(flags, learner)
    tasks = streams.split(data, [c for task in config["tasks"] for c in task], flags.tasks)
    bar = common.tqdm(missing, f"scoring {config['data']['name']} {flags.method} {run.name}", disable=None, leave=False)
    sound = set()
    for trained_to, i in bar:
        folder = run / f"task{trained_to}"
        if folder not in sound and not common.is_sound(folder):
            (run / "DONE").unlink(missing_ok=True)  # so that the training command takes it up again
            common.fail(f"{folder} is broken: start its training command again, which repairs it", code=1)
        sound.add(folder)
        method.load(run, trained_to, i)
        task = tasks[i - 1]
        count = int(protocol["generated"])
        labels = common.proportional_labels(data.labels[task.indices], count)
        images = learner.sample(labels, common.sampling_seeds((args.sampling_seed, i, "report"), count))
        if (key := (extractor.name, data.digest, *task.classes)) not in references:
            references[key] = with_root(statistics(extractor.features(data.images[task.indices])))
        values = {"FID": frechet_distance(statistics(extractor.features(images)), references[key])}
        if isinstance(extractor, Classifier):
            values["accuracy"] = extractor.accuracy(images, labels)
        if trained_to == (i if config["isolated"] else len(config["tasks"])):
            order = np.argsort(labels[:SHOWN], kind="stable")
            rows = images[order].unflatten(0, (2, -1)) if len(order) == SHOWN else [images[order]]
            png = io.BytesIO()
            common.picture_grid(rows).save(png, "PNG")
            common.write_file(run / picture_name(i, protocol), png.getvalue())
        rows = [
            {
                "trained_to": trained_to,
                "task": i,
                "metric": metric,
                "value": f"{value:.6g}",
                **protocol,
                "reference_images": len(task.indices),
                "checkpoint": runfolder.checkpoint_hash(folder),
            }
            for metric, value in values.items()
        ]
        cell = {**protocol, "trained_to": str(trained_to), "task": str(i)}
        others = [r for r in valid_rows(run) if not is_of(r, cell)]
        common.write_csv(run / "quality.csv", others + rows)


def picture_name(task, protocol):
    """The first images of a task from the final model, in class order, for the sample grids."""
    generated, steps, seed = (protocol[k] for k in ("generated", "sampler_steps", "sampling_seed"))
    return f"final_task{task}_n{generated}_steps{steps}_seed{seed}.png"


# ------------------------------------------------------------------------------------------------ summary


def continual_metrics(matrix, larger_is_better):
    """AQ curve, AIQ, AFQ and FR of m[t][i], i ≤ t (lower triangle, from 0). FR is None with one task."""
    T = len(matrix)
    aq = [float(np.mean(matrix[t][: t + 1])) for t in range(T)]
    sign = -1 if larger_is_better else 1
    worse = [sign * (matrix[T - 1][t] - matrix[t][t]) for t in range(T - 1)]
    return aq, float(np.mean(aq)), aq[-1], float(np.mean(worse)) if worse else None


def quality_matrices(run, config):
    """{(protocol values…, metric): T × T lower triangle} of a finished run; incomplete ones are left out."""
    found = defaultdict(dict)
    for r in valid_rows(run):
        found[(*(r[k] for k in PROTOCOL), r["metric"])][int(r["trained_to"]), int(r["task"])] = float(r["value"])
    T, complete = len(config["tasks"]), {}
    for key, values in found.items():
        if config["isolated"]:
            values = {(t, i): values.get((i, i)) for t in range(1, T + 1) for i in range(1, t + 1)}
        rows = [[values.get((t, i)) for i in range(1, t + 1)] for t in range(1, T + 1)]
        if all(v is not None for row in rows for v in row):
            complete[key] = rows
    return complete


def summarise(runs, cache):
    """One record a run and metric. Scores of a classifier that was trained anew since are left out."""
    records = []
    for run, config in runs.items():
        current = Classifier.identity(cache, config["data"]["digest"], config["data"]["classes"])
        for (*protocol, metric), matrix in quality_matrices(run, config).items():
            protocol = dict(zip(PROTOCOL, protocol, strict=True))
            if protocol["extractor"].startswith("classifier") and protocol["extractor"] != current:
                continue
            aq, aiq, afq, fr = continual_metrics(matrix, LARGER_IS_BETTER[metric])
            records.append(
                {
                    "run": run,
                    "config": config,
                    "dataset": config["data"]["name"],
                    "backbone": config["backbone"],
                    "method": config["flags"]["method"],
                    "order": config["flags"]["order"],
                    "seed": config["flags"]["seed"],
                    "metric": metric,
                    **protocol,
                    "matrix": matrix,
                    "AQ": aq,
                    "AIQ": aiq,
                    "AFQ": afq,
                    "FR": fr,
                }
            )
    name_variants(records)
    return sorted(records, key=lambda r: (r["dataset"], r["backbone"], method_rank(r["method"]), r["variant"],
                                          r["order"], r["seed"], r["metric"]))  # fmt: skip


def method_rank(method):
    return (TABLE_ORDER.index(method) if method in TABLE_ORDER else len(TABLE_ORDER), method)


def name_variants(records):
    """r["variant"]: the method, with the flags that differ between its runs on the same data set."""
    ignored = runfolder.UNHASHED
    for record in records:
        same = [r for r in records if all(r[k] == record[k] for k in ("dataset", "backbone", "method"))]
        flags = record["config"]["flags"]
        differ = [
            f for f in flags
            if f not in ignored and any(r["config"]["flags"].get(f) != flags[f] for r in same)
        ]  # fmt: skip
        if record["config"]["flags"]["select"] == "last" and "select" not in differ:
            differ = [f for f in differ if f not in ("eval_every", "val_samples")]
        named = ", ".join(f"{f}={flags[f]}" for f in differ if flags[f] is not None)
        record["variant"] = record["method"] + (f" ({named})" if named else "")


def number(value):
    return "" if value is None else f"{value + 0.0:.6g}"


def write_summary(records, out):
    keys = ("dataset", "backbone", "variant", "order", "seed", "metric", *PROTOCOL)
    rows = [
        {"run": r["run"].as_posix(), **{k: r[k] for k in keys}, "tasks": len(r["AQ"])}
        | {k: number(r[k]) for k in ("AIQ", "AFQ", "FR")}
        for r in records
    ]
    common.write_csv(out / "summary.csv", rows)


# ------------------------------------------------------------------------------------------------- tables


def write_tables(records, out):
    """table_{AFQ,AIQ,FR}.{csv,md}: methods × data sets, mean ± sample standard deviation over orders and seeds."""
    groups = defaultdict(lambda: defaultdict(list))  # (metric, protocol, backbone) → (variant, dataset) → records
    for r in records:
        kind = r["extractor"].split("-")[0]  # each data set has its own classifier
        groups[r["metric"], kind, *(r[k] for k in PROTOCOL[1:]), r["backbone"]][r["variant"], r["dataset"]].append(r)
    texts = {}
    for measure in ("AFQ", "AIQ", "FR"):
        rows, text = [], [f"# {measure}\n"]
        for (metric, kind, generated, reference, steps, seed, backbone), table in sorted(groups.items()):
            datasets = sorted({d for _, d in table})
            variants = sorted({v for v, _ in table}, key=lambda v: (*method_rank(v.split(" ")[0]), v))
            arrow = "smaller" if measure == "FR" or not LARGER_IS_BETTER[metric] else "larger"
            text.append(
                f"{backbone}, {metric} ({kind} features, {generated} images a task, {reference} images as reference"
                + (f", {steps} sampling steps" if steps else "")
                + f", sampling seed {seed}); {arrow} is better; mean ± standard deviation (runs)\n"
            )
            text.append("| method | " + " | ".join(datasets) + " |")
            text.append("|---" * (len(datasets) + 1) + "|")
            for variant in variants:
                row = {"backbone": backbone, "metric": metric, "extractor": kind, "generated": generated}
                row |= {"reference": reference, "sampler_steps": steps, "sampling_seed": seed, "method": variant}
                shown = []
                for dataset in datasets:
                    values = [r[measure] for r in table.get((variant, dataset), []) if r[measure] is not None]
                    mean = number(np.mean(values)) if values else ""
                    spread = number(np.std(values, ddof=1)) if len(values) > 1 else ""
                    rows.append(row | {"dataset": dataset, "mean": mean, "std": spread, "n": len(values)})
                    shown.append(cell_text(values))
                text.append(f"| {variant} | " + " | ".join(shown) + " |")
            text.append("")
        common.write_csv(out / f"table_{measure}.csv", rows)
        texts[measure] = "\n".join(text)
        common.write_file(out / f"table_{measure}.md", texts[measure].encode())
    return texts


def cell_text(values):
    if not values:
        return "–"
    spread = f" ± {np.std(values, ddof=1):.2f}" if len(values) > 1 else ""
    return f"{round(np.mean(values), 2) + 0.0:.2f}{spread} ({len(values)})"  # + 0.0: never -0.00


def write_costs(runs, out):
    """cost.csv: seconds by part, peak memory and parameters of each run, as CLoG's tables 12-15 count them."""
    rows = []
    for run, config in runs.items():
        flags = config["flags"]
        row = {"run": run.as_posix(), "dataset": config["data"]["name"], "backbone": config["backbone"]}
        row |= {k: flags[k] for k in ("method", "order", "seed")}
        try:
            costs = [common.read_json(run / f"task{t}" / "cost.json") for t in range(1, len(config["tasks"]) + 1)]
            row |= {"tasks": len(costs), "steps": sum(c["steps"] for c in costs)}
            for part in ("train", "replay", "importance", "selection"):
                row[f"{part}_seconds"] = f"{sum(c['seconds'][part] for c in costs):.1f}"
            row |= {k: max(c[k] for c in costs) for k in ("peak_memory_bytes", "parameters_trained")}
            rows.append(row | {"parameters_stored": costs[-1]["parameters_stored"], "device": config["device"]})
        except (common.UserError, KeyError, TypeError) as error:
            note(f"{run} is left out of cost.csv: {error}")
    if rows:
        common.write_csv(out / "cost.csv", rows)


# ------------------------------------------------------------------------------------------------ figures


def draw_figures(records, out):
    """AQ curves, quality matrices and sample grids, one of each a data set and backbone (FID of one protocol)."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"figure.dpi": 120, "font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    scenes = defaultdict(list)
    for r in records:
        if r["metric"] == "FID":
            scenes[r["dataset"], r["backbone"]].append(r)
    for (dataset, backbone), group in scenes.items():
        protocol = max({tuple(r[k] for k in PROTOCOL) for r in group}, key=lambda p: (int(p[1]), p))
        group = [r for r in group if tuple(r[k] for k in PROTOCOL) == protocol]
        steps = f", {protocol[3]} steps" if protocol[3] else ""
        caption = (
            f"{dataset}, {backbone}: FID, {protocol[0].split('-')[0]} features, {protocol[1]} images a task{steps}"
        )
        by_variant = defaultdict(list)
        for r in group:
            by_variant[r["variant"]].append(r)
        T = max(len(r["AQ"]) for r in group)
        by_variant = {v: [r for r in rs if len(r["AQ"]) == T] for v, rs in by_variant.items()}
        by_variant = {v: rs for v, rs in by_variant.items() if rs}
        name = f"{dataset}_{backbone}.png"
        draw_curves(plt, by_variant, T, caption, out / f"AQ_{name}")
        draw_matrices(plt, by_variant, T, caption, out / f"quality_matrix_{name}")
        draw_samples(plt, by_variant, T, dataset, out / f"samples_{name}")


def save_figure(plt, figure, path):
    picture = io.BytesIO()
    figure.savefig(picture, bbox_inches="tight")
    plt.close(figure)
    common.write_file(path, picture.getvalue())


def draw_curves(plt, by_variant, T, caption, path):
    figure, axes = plt.subplots(figsize=(5.5, 3.6))
    for variant, records in by_variant.items():
        curves = np.array([r["AQ"] for r in records])
        (line,) = axes.plot(range(1, T + 1), curves.mean(0), marker="o", markersize=3, label=variant)
        if len(curves) > 1:
            low, high = curves.mean(0) - curves.std(0, ddof=1), curves.mean(0) + curves.std(0, ddof=1)
            axes.fill_between(range(1, T + 1), low, high, alpha=0.15, color=line.get_color(), linewidth=0)
    axes.set(xlabel="tasks learnt", ylabel="AQ (smaller is better)", title=caption, xticks=range(1, T + 1))
    axes.set_ylim(0, axes.get_ylim()[1])
    axes.legend(frameon=False)
    save_figure(plt, figure, path)


def draw_matrices(plt, by_variant, T, caption, path):
    """Mean over the runs: row = trained to task t, column = task asked for; all panels share one colour scale."""
    means = {v: np.full((T, T), np.nan) for v in by_variant}
    for variant, records in by_variant.items():
        for t in range(T):
            for i in range(t + 1):
                means[variant][t, i] = np.mean([r["matrix"][t][i] for r in records])
    top = max(np.nanmax(m) for m in means.values())
    figure, panels = plt.subplots(1, len(means), figsize=(2.6 * len(means), 2.9), squeeze=False, sharey=True)
    for panel, (variant, mean) in zip(panels[0], means.items(), strict=True):
        panel.imshow(mean, vmin=0, vmax=top, cmap="viridis_r")
        for t, i in zip(*np.nonzero(~np.isnan(mean)), strict=True) if T <= 10 else ():
            dark = mean[t, i] > 0.55 * top
            panel.text(i, t, f"{mean[t, i]:.0f}", ha="center", va="center", color="white" if dark else "black",
                       fontsize=8)  # fmt: skip
        panel.set(title=variant, xlabel="task asked for")
        if T <= 10:
            panel.set(xticks=range(T), xticklabels=range(1, T + 1), yticks=range(T), yticklabels=range(1, T + 1))
    panels[0][0].set_ylabel("trained to task")
    figure.suptitle(caption, fontsize=9, y=1.02)
    save_figure(plt, figure, path)


def draw_samples(plt, by_variant, T, dataset, path):
    """Samples of every task from the final model; one row a method, the run with the lowest order and seed."""
    shown = {v: min(rs, key=lambda r: (r["order"], r["seed"])) for v, rs in by_variant.items()}
    columns = range(1, min(T, 10) + 1)
    figure, panels = plt.subplots(
        len(shown), len(columns), figsize=(2.1 * len(columns), 0.56 * len(shown)), squeeze=False,
        gridspec_kw={"wspace": 0.04, "hspace": 0.08},
    )  # fmt: skip
    for row, (variant, record) in zip(panels, shown.items(), strict=True):
        classes, tasks = record["config"]["data"]["classes"], record["config"]["tasks"]
        for panel, i in zip(row, columns, strict=True):
            picture = record["run"] / picture_name(i, record)
            try:
                panel.imshow(plt.imread(picture), interpolation="nearest")
            except (OSError, SyntaxError):  # not there any more, or damaged
                note(f"{picture} cannot be shown")
            panel.set(xticks=[], yticks=[])
            for spine in panel.spines.values():
                spine.set_visible(False)
            if panel in panels[0]:
                names = ", ".join(classes[c] for c in tasks[i - 1][:4]).replace("$", r"\$")
                panel.set_title(f"task {i}: {names}" + (" …" if len(tasks[i - 1]) > 4 else ""), fontsize=8)
        row[0].set_ylabel(variant, rotation=0, ha="right", va="center")
    figure.suptitle(f"{dataset}: samples of each task after the last one", fontsize=9, y=1.04 + 0.1 / len(shown))
    save_figure(plt, figure, path)


# --------------------------------------------------------------------------------------------------- main


def parse_args(argv=None):
    p = common.Parser(description=__doc__)
    add = p.add_argument
    add("runs", nargs="+", metavar="RUNS", help="folders with run folders below them")
    add("--out", default="results", help="folder of summary, tables and figures (default: results)")
    add("--num_samples", type=common.whole(2), help="images sampled a task (default: 2048; tiny: 256)")
    add(
        "--extractor",
        choices=("auto", "inception", "classifier"),
        default="auto",
        help="features of the FID (default: auto = classifier for digits, else inception)",
    )
    add(
        "--ddim_steps", type=common.divisor(1000), help="denoising steps, a divisor of 1000 (default: those of the run)"
    )
    add("--sampling_seed", type=common.whole(0), default=0, help="seed of the reported samples (default: 0)")
    add("--batch_size", type=common.whole(1), default=256, help="images sampled at once (default: 256)")
    add("--data", default="data", help="folder of data sets and caches (default: data)")
    add("--device", default="auto", help="cpu, cuda or cuda:N (default: cuda if there is one)")
    return p.parse_args(argv)


def main(argv=None):
    args = parse_args(argv)
    out = common.output_folder(args.out)
    runs = find_runs(args.runs)
    datas, extractors, references = {}, {}, {}  # shared by the runs on the same images
    problems = []
    for run, config in runs.items():
        try:  # what is wrong with one run must not keep the others from the table
            score_what_is_missing(run, config, args, datas, extractors, references)
        except (common.UserError, OSError) as error:
            problems.append(error)
            note(f"{error}; {run} is not scored")

    finished = {run: config for run, config in runs.items() if (run / "DONE").exists()}
    records = summarise(finished, args.data)
    for run in runs.keys() - {r["run"] for r in records}:
        note(f"{run} is not finished, or not scored to the end, and is left out of the tables")
    if records:
        write_summary(records, out)
        write_costs(finished, out)
        texts = write_tables(records, out)
        draw_figures(records, out)
        print("\n" + "\n".join(texts.values()))
        print(f"summary, tables and figures: {out}/", flush=True)
    if problems:
        code = getattr(problems[0], "code", 1)
        common.fail(f"{len(problems)} of {len(runs)} runs could not be scored, the first: {problems[0]}", code)
    if not records:
        common.fail("no finished run to sum up; train first")


if __name__ == "__main__":
    with common.one_line_errors():
        main()
