"""Scores run folders and sums them up: quality matrix → AQ, AIQ, AFQ, forgetting rate; tables, figures, costs.

    python eval_metrics.py runs --out results
    python eval_metrics.py runs --out results --paper          the paper's numbers beside one's own

Every finished task checkpoint (trained to task t, asked for each task i ≤ t) that has no score yet is sampled and
compared with the whole training set of task i: fid.py says how, and of concepts alignment.py. Scores go to
<run>/quality.csv, so a second call only sums up (tables.py, figures.py).

    AQ(t) = mean of m(t, i) over i ≤ t      AIQ = mean of AQ(t) over t      AFQ = AQ(T)
    FR    = mean over t < T of how much worse task t became since it was learnt; positive = forgotten

CLoG, *Benchmarking Continual Learning of Image Generation Models*, section 3.3.

From top to bottom: scoring · summary · flags.
"""

import argparse
import importlib
import io
import json
import math
from collections import defaultdict
from pathlib import Path

import numpy as np

import alignment
import common
import fid
import figures
import runfolder
import streams
import tables
from common import note
from tables import LARGER_IS_BETTER, PROTOCOL

COLUMNS = ("trained_to", "task", "metric", "value", *PROTOCOL, "reference_images", "checkpoint")  # of quality.csv
SCRIPTS = {"dreambooth": "train_concepts", "custom_diffusion": "train_concepts"}  # of the others: train_<backbone>


# ------------------------------------------------------------------------------------------------ scoring


def find_runs(roots):
    """{run folder: its config} below the given folders; the same flags, order and seed count once."""
    runs, seen = {}, {}
    for root in map(Path, roots):
        if not root.is_dir():
            common.fail(f"no such folder: {root}")
        for path in sorted(root.rglob("config.json")):
            run = path.parent
            if not (run / "task1").is_dir() and (run / "DONE").exists():
                note(f"{run} has lost its task1 and is left out: start its training command again, which repairs it")
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


def cells(run, config):
    """[(trained_to, task)] of the finished tasks that have a model of their own to score."""
    done = [t for t in range(1, len(config["tasks"]) + 1) if (run / f"task{t}" / "SHA256SUMS").exists()]
    return [(t, i) for t in done for i in range(1, t + 1) if i == t or not config["isolated"]]


def judge_of(config, args):
    """What scores this run: says its name and its metrics, and turns a cell into their values."""
    return (alignment.Alignment if config["backbone"] in SCRIPTS else fid.Distances)(config, args)


def protocol_of(config, args, judge):
    """How a run is scored: the values of PROTOCOL, as text."""
    flags = config["flags"]
    count = args.num_samples or judge.samples
    steps = flags.get("sampling_steps", "")  # of concepts; a GAN has none
    if "ddim_steps" in flags:
        steps = args.ddim_steps or flags["ddim_steps"]
    return dict(zip(PROTOCOL, map(str, (judge.name, count, args.reference, steps, args.sampling_seed)), strict=True))


def missing_cells(run, config, judge, protocol):
    """Cells that lack one of the metrics under this protocol."""
    have = {(int(r["trained_to"]), int(r["task"]), r["metric"]) for r in valid_rows(run) if is_of(r, protocol)}
    return [cell for cell in cells(run, config)
            if any((*cell, metric) not in have for metric in judge.metrics(config, cell[0]))]  # fmt: skip


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
            int(row["trained_to"]) >= int(row["task"])
            and math.isfinite(float(row["value"]))
            and row["metric"] in LARGER_IS_BETTER
            and set(row) == {*COLUMNS}
        )
    except (KeyError, TypeError, ValueError):
        return False


def score_what_is_missing(run, config, args, datas, judges):
    """datas, judges: caches, shared by the runs on the same images; the judges of one set of images at a time."""
    flags = config["flags"]
    key = (flags["dataset"], flags["size"], config["data"]["digest"], flags.get("model"))
    if key not in judges:
        judges.clear()
        judges[key] = judge_of(config, args)
    judge = judges[key]
    if not missing_cells(run, config, judge, protocol_of(config, args, judge)):
        return
    judge.check()  # ends here if its weights are missing, before pictures are prepared
    for split in {args.reference, "train"}:
        if (scene := (flags["dataset"], flags["size"], split)) not in datas:
            datas[scene] = streams.load_data(streams.scenario(scene[0]), scene[1], args.data, split=split)
    data, reference = (datas[flags["dataset"], flags["size"], split] for split in ("train", args.reference))
    if config["data"]["digest"] != data.digest or reference.classes != data.classes:
        common.fail(f"{run} was trained on other pictures than {flags['dataset']} holds now")
    judge.load(config, data, reference, common.pick_device(args.device))
    protocol = protocol_of(config, args, judge)
    with common.locked(run):
        score(run, config, args, data, missing_cells(run, config, judge, protocol), judge, protocol)
    sizes = [int(np.isin(reference.labels, classes).sum()) for classes in config["tasks"]]
    about = f"{min(sizes)} to {max(sizes)}" if min(sizes) < max(sizes) else sizes[0]
    print(f"scored {run}: {protocol['generated']} generated images a task against {about}", flush=True)


def score(run, config, args, data, missing, judge, protocol):
    """Samples and scores the missing cells of one run; a row is on the disk before the next cell begins.

    data: what the run was trained on.
    """
    flags = argparse.Namespace(**config["flags"])
    flags.data = args.data  # where it lies now, with the small world in it
    if args.ddim_steps and "ddim_steps" in flags:
        flags.ddim_steps = args.ddim_steps
    module = importlib.import_module(SCRIPTS.get(config["backbone"], f"train_{config['backbone']}"))
    learner = module.Learner(flags, data, common.pick_device(args.device))
    for key, value in learner.identity().items() if config["backbone"] in SCRIPTS else ():
        if config.get(key) != value:
            common.fail(f"{run} was trained with other {key} than {flags.model} and {flags.dataset} hold now")
    learner.sample_batch = args.batch_size or learner.sample_batch
    method = runfolder.method_class(flags.method)(flags, learner)
    missing = sorted(missing, key=lambda cell: cell[::-1])  # task by task, which needs few references at a time
    bar = common.tqdm(missing, f"scoring {config['data']['name']} {flags.method} {run.name}", disable=None, leave=False)
    sound = set()
    for trained_to, i in bar:
        folder = run / f"task{trained_to}"
        for needed in {run / "task1", folder} - sound:  # C-LoRA's adapters need the network of task 1
            if not common.is_sound(needed):
                (run / "DONE").unlink(missing_ok=True)  # so that the training command takes it up again
                common.fail(f"{needed} is broken: start its training command again, which repairs it", code=1)
            sound.add(needed)
        method.load(run, trained_to, i)
        values, reference_images, pictures, nearest = judge.score(learner, config, trained_to, i, protocol)
        is_final = trained_to == (i if config["isolated"] else len(config["tasks"]))
        if is_final or config["backbone"] in SCRIPTS:
            name = figures.picture_name(i, protocol, None if is_final else trained_to)
            write_pictures(run / name, pictures)
            if nearest is not None:
                write_pictures(run / name.replace("final", "nearest"), nearest)
        rows = [
            {
                "trained_to": trained_to,
                "task": i,
                "metric": metric,
                "value": tables.number(value),
                **protocol,
                "reference_images": reference_images,
                "checkpoint": runfolder.checkpoint_hash(folder),
            }
            for metric, value in values.items()
        ]
        cell = {**protocol, "trained_to": str(trained_to), "task": str(i)}
        rows += [r for r in valid_rows(run) if not (is_of(r, cell) and r["metric"] in values)]
        rows.sort(key=lambda r: (*(str(r[k]) for k in PROTOCOL), int(r["trained_to"]), int(r["task"])))
        common.write_csv(run / "quality.csv", rows)


def write_pictures(path, pictures):
    png = io.BytesIO()
    common.picture_grid(pictures).save(png, "PNG")
    common.write_file(path, png.getvalue())


# ------------------------------------------------------------------------------------------------ summary


def continual_metrics(matrix, larger_is_better):
    """AQ curve, AIQ, AFQ and FR of m[t][i], i ≤ t (lower triangle, from 0). FR is None with one task.

    Of a metric that the final model alone has, the rows before are empty: it has an AFQ, and nothing else.
    """
    T = len(matrix)
    aq = [float(np.mean(row)) if row else None for row in matrix]
    if None in aq:
        return aq, None, aq[-1], None
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
        if key[-1] in tables.OF_THE_LAST:
            rows[:-1] = [[] for _ in rows[:-1]]
        if all(v is not None for row in rows for v in row):
            complete[key] = rows
    return complete


def summarise(runs, cache):
    """One record a run and metric. Scores of a classifier that was trained anew since are left out."""
    records = []
    for run, config in runs.items():
        current = fid.Classifier.identity(cache, config["data"]["digest"], config["data"]["classes"])
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
                    "kept_steps": kept_steps(run, config),
                    "matrix": matrix,
                    "AQ": aq,
                    "AIQ": aiq,
                    "AFQ": afq,
                    "FR": fr,
                }
            )
    name_variants(records)
    return sorted(records, key=lambda r: (r["dataset"], r["backbone"], tables.method_rank(r["method"]), r["variant"],
                                          r["order"], r["seed"], r["metric"]))  # fmt: skip


def kept_steps(run, config):
    """Which step of each task the weights are from, as --select chose it; without a look at these scores."""
    try:
        costs = [common.read_json(run / f"task{t}" / "cost.json") for t in range(1, len(config["tasks"]) + 1)]
        return " ".join(str(cost["kept_step"]) for cost in costs)
    except (common.UserError, KeyError, TypeError):
        return ""


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


# -------------------------------------------------------------------------------------------------- flags


def parse_args(argv=None):
    p = common.Parser(description=__doc__)
    add = p.add_argument
    add("runs", nargs="+", metavar="RUNS", help="folders with run folders below them")
    add("--out", default="results", help="folder of summary, tables and figures (default: results)")
    add("--paper", action="store_true", help="the paper's numbers beside one's own in the tables")
    add("--num_samples", type=common.whole(2), help="images sampled a task (default: 2048; tiny: 256; of "
        "concepts: 1000; tiny: 20)")  # fmt: skip
    add(
        "--extractor",
        choices=("auto", "inception", "classifier"),
        default="auto",
        help="features of FID and KID (default: auto = classifier for digits, else inception)",
    )
    add("--metrics", nargs="+", choices=fid.METRICS, metavar="METRIC", help="what to score of label-conditioned runs, "
        f"some of {', '.join(fid.METRICS)} (default: FID KID, and accuracy of classifier features; CAS trains a "
        "classifier a cell; with authentic, the nearest training images are drawn too)")  # fmt: skip
    add("--inception_weights", help="pytorch-fid's weights file (default: where pytorch-fid keeps it)")
    alignment.add_flags(p)
    add(
        "--reference",
        choices=("train", "test"),
        default="train",
        help="compare with the training images of a task or with its test images (default: train, as in the paper)",
    )
    add(
        "--ddim_steps", type=common.divisor(1000), help="denoising steps, a divisor of 1000 (default: those of the run)"
    )
    add("--sampling_seed", type=common.whole(0), default=0, help="seed of the reported samples (default: 0)")
    add(
        "--batch_size",
        type=common.whole(1),
        help="images sampled at once (default: 256, on a CPU 2^16 / side^2 at most)",
    )
    add("--data", default="data", help="folder of data sets and caches (default: data)")
    add("--device", default="auto", help="cpu, cuda or cuda:N (default: cuda if there is one)")
    return p.parse_args(argv)


def main(argv=None):
    args = parse_args(argv)
    out = common.output_folder(args.out)
    if args.inception_weights:
        fid.inception_weights(args.inception_weights)
    alignment.check_models({kind: name for kind in alignment.KINDS if (name := getattr(args, kind))})
    runs = find_runs(args.runs)
    datas, judges = {}, {}
    problems = []
    for run, config in runs.items():
        try:  # what is wrong with one run must not keep the others from the table
            score_what_is_missing(run, config, args, datas, judges)
        except (common.UserError, OSError) as error:
            problems.append(error)
            note(f"{error}; {run} is not scored")

    finished = {run: config for run, config in runs.items() if (run / "DONE").exists()}
    records = summarise(finished, args.data)
    for run in runs.keys() - {r["run"] for r in records}:
        note(f"{run} is not finished, or not scored to the end, and is left out of the tables")
    if records:
        paper = tables.read_paper() if args.paper else None
        tables.write_summary(records, out)
        tables.write_costs(finished, out, paper)
        texts = tables.write_tables(records, out, paper)
        figures.draw_figures(records, out)
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
