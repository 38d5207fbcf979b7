"""The tables of eval_metrics.py: summary.csv, methods × data sets, costs; with --paper, the paper beside them.

reference/paper_tables.csv holds tables 2–15 of CLoG, *Benchmarking Continual Learning of Image Generation Models*.
Some of its cells cannot be true, which follows from the paper's own numbers and definitions; `doubt` says which and
why, and the tables mark them.
"""

import math
from collections import defaultdict
from pathlib import Path

import numpy as np

import common

OF_CONCEPTS = ("CLIP", "DINO", "CLIP-I", "CLIP-T", "DINO-I", "drift CLIP-I", "drift DINO", "pair DINO")
LARGER_IS_BETTER = {
    **dict.fromkeys(("FID", "KID", "MIND", "floor"), False),
    **dict.fromkeys(("precision", "recall", "density", "coverage", "authentic", "accuracy", "CAS"), True),
    **dict.fromkeys(OF_CONCEPTS, True),
}
OF_THE_LAST = ("pair DINO",)  # of the final model alone: an AFQ, no AIQ and FR
PROTOCOL = ("extractor", "generated", "reference", "sampler_steps", "sampling_seed")  # scores meet only within one
# What the paper has scores of: (metric, features, reference), the second of images and the others of concepts.
IN_PAPER = {("FID", "inception", "train"), ("CLIP", "clip-vit-base-patch32+dino-vits16", "train"),
            ("DINO", "clip-vit-base-patch32+dino-vits16", "train")}  # fmt: skip
METHODS = {  # in the order of the tables, with the paper's names
    "noncl": "Non-CL", "ensemble": "Ensemble", "ncl": "NCL", "er": "ER", "gr": "GR", "kd": "KD", "l2": "L2",
    "ewc": "EWC", "si": "SI", "mas": "MAS", "agem": "A-GEM", "clora": "C-LoRA",
}  # fmt: skip
PAPER_DATASETS = {  # the paper's names and numbers of tasks
    "mnist": ("MNIST", 5), "fashion": ("Fashion-MNIST", 5), "cifar10": ("CIFAR-10", 5), "cub": ("CUB-Birds", 10),
    "flowers": ("Oxford-Flowers", 5), "cars": ("Stanford-Cars", 14), "imagenet64": ("ImageNet-1k", 20),
    "objects": ("Custom-Objects", 5),
}  # fmt: skip


def method_rank(method):
    return ([*METHODS].index(method) if method in METHODS else len(METHODS), method)


def number(value):
    return "" if value is None else f"{value + 0.0:.6g}"  # + 0.0: never -0


def feature_kind(extractor):
    """Each data set has a classifier of its own, and they share a table; other features are what they are called."""
    return "classifier" if extractor.startswith("classifier-") else extractor


def write_summary(records, out):
    keys = ("dataset", "backbone", "variant", "order", "seed", "metric", *PROTOCOL, "kept_steps")
    rows = [
        {"run": r["run"].as_posix(), **{k: r[k] for k in keys}, "tasks": len(r["AQ"])}
        | {k: number(r[k]) for k in ("AIQ", "AFQ", "FR")}
        for r in records
    ]
    common.write_csv(out / "summary.csv", rows)


def write_tables(records, out, paper=None):
    """table_{AFQ,AIQ,FR}.{csv,md}: methods × data sets, mean ± sample standard deviation over orders and seeds.

    paper: what `read_paper` returns, to stand beside what it has (IN_PAPER).
    """
    groups = defaultdict(lambda: defaultdict(list))  # (metric, protocol, backbone) → (variant, dataset) → records
    for r in records:
        key = r["metric"], feature_kind(r["extractor"]), *(r[k] for k in PROTOCOL[1:]), r["backbone"]
        groups[key][r["variant"], r["dataset"]].append(r)
    texts = {}
    for measure in ("AFQ", "AIQ", "FR"):
        rows, text = [], [f"# {measure}\n"]
        for (metric, kind, generated, reference, steps, seed, backbone), table in sorted(groups.items()):
            if measure != "AFQ" and metric in OF_THE_LAST:
                continue
            datasets = sorted({d for _, d in table})
            variants = sorted({v for v, _ in table}, key=lambda v: (*method_rank(v.split(" ")[0]), v))
            arrow = "smaller" if measure == "FR" or not LARGER_IS_BETTER[metric] else "larger"
            text.append(
                f"{backbone}, {metric} ({kind} features, {generated} images a task, {reference} images as reference"
                + (f", {steps} sampling steps" if steps else "")
                + f", sampling seed {seed}); {arrow} is better; mean ± standard deviation (runs)\n"
            )
            beside = paper is not None and (metric, kind, reference) in IN_PAPER
            heads = [name for d in datasets for name in ((d, f"{d}, paper") if beside else (d,))]
            text += ["| method | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
            doubts = []
            for variant in variants:
                row = {"backbone": backbone, "metric": metric, "extractor": kind, "generated": generated}
                row |= {"reference": reference, "sampler_steps": steps, "sampling_seed": seed, "method": variant}
                shown = []
                for dataset in datasets:
                    own = table.get((variant, dataset), [])
                    values = [r[measure] for r in own if r[measure] is not None]
                    mean = number(np.mean(values)) if values else ""
                    spread = number(np.std(values, ddof=1)) if len(values) > 1 else ""
                    cell = {"dataset": dataset, "mean": mean, "std": spread, "n": len(values)}
                    shown.append(cell_text(values, 4 if metric == "KID" else 2))
                    if paper is not None:
                        key = paper_key(own[0]["config"], steps, metric) if beside and own else None
                        theirs = paper.get((measure, *key), NOTHING) if key else NOTHING
                        cell |= {f"paper_{k}": theirs[k] for k in ("mean", "std", "doubt")}
                        if beside:
                            shown.append(paper_text(theirs, doubts))
                    rows.append(row | cell)
                text.append(f"| {variant} | " + " | ".join(shown) + " |")
            text += ["", *(f"†{k} cannot be: {why}\n" for k, why in enumerate(doubts, 1))]
            if paper is not None and not beside:
                has = "CLIP and DINO by ViT-B/32 and ViT-S/16" if metric in OF_CONCEPTS else (
                    "FID on Inception features against the training set")  # fmt: skip
                text.append(f"The paper has {has}, and nothing for this.\n")
        common.write_csv(out / f"table_{measure}.csv", rows)
        texts[measure] = "\n".join(text)
        common.write_file(out / f"table_{measure}.md", texts[measure].encode())
    return texts


def cell_text(values, digits=2):
    if not values:
        return "–"
    spread = f" ± {np.std(values, ddof=1):.{digits}f}" if len(values) > 1 else ""
    return f"{round(np.mean(values), digits) + 0.0:.{digits}f}{spread} ({len(values)})"  # + 0.0: never -0.00


def write_costs(runs, out, paper=None):
    """cost.csv: seconds by part, peak memory and parameters of each run, as the paper's tables 12 to 15 count them."""
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
            row |= {"parameters_stored": costs[-1]["parameters_stored"], "device": config["device"]}
        except (common.UserError, KeyError, TypeError) as error:
            common.note(f"{run} is left out of cost.csv: {error}")
            continue
        if paper is not None:
            row |= paper_costs(config, paper)
        rows.append(row)
    if rows:
        columns = dict.fromkeys(column for row in rows for column in row)
        common.write_csv(out / "cost.csv", [dict.fromkeys(columns, "") | row for row in rows])


def paper_costs(config, paper):
    """The paper's millions of parameters and hours, beside a row of cost.csv; of concepts also what a task trains.

    Table 13 counts in units of 2²⁰ and table 15 in minutes; here they are in millions and hours, as all else.
    """
    key, row = paper_key(config), {}
    wanted = [("parameters", "parameters_millions", 1), ("training_time", "hours", 1)]
    parts = [key, key]
    if key and "Custom-Objects" in key[1]:
        parts = [(key[0], dataset, key[2]) for dataset in ("Custom-Objects:All Params", "Custom-Objects")]
        parts.append((key[0], "Custom-Objects:Train Params", key[2]))
        wanted = [("parameters", "parameters_millions", 2**20 / 10**6), ("training_time", "hours", 1 / 60),
                  ("parameters", "trained_millions", 2**20 / 10**6)]  # fmt: skip
    for (name, column, unit), part in zip(wanted, parts, strict=True):
        theirs = paper.get((name, *part), NOTHING) if part else NOTHING
        mean = f"{float(theirs['mean']) * unit:.2f}" if theirs["mean"] and unit != 1 else theirs["mean"]
        row |= {f"paper_{column}": mean, f"paper_{column}_doubt": theirs["doubt"]}
    return row


# -------------------------------------------------------------------------------------------- the paper's numbers

NOTHING = {"mean": "", "std": "", "doubt": ""}


def read_paper():
    """{(measure, backbone, dataset, method): {mean, std, doubt}}, all as text; datasets and methods as in the paper."""
    rows = common.read_csv(common.ROOT / "reference" / "paper_tables.csv")
    cells = {(r["metric"], r["backbone"], r["dataset"], r["method"]): r for r in rows}
    return {
        key: {"mean": r["value"] if r["value"] not in ("NA", "-") else "", "std": r["std"], "doubt": doubt(key, cells)}
        for key, r in cells.items()
    }


def paper_key(config, steps="50", metric="FID"):
    """(backbone, dataset, method) of a run in the paper; None if it has no such run.

    CIFAR-10 was also run with other sampler steps, numbers of tasks and sizes of the memory, one at a time. Concepts
    were learnt by Stable Diffusion v1-4; their scores stand under "Custom-Objects:CLIP Avg" and "… DINO Avg".
    """
    flags = config["flags"]
    dataset, tasks = PAPER_DATASETS.get(config["data"]["name"], (None, None))
    method = METHODS.get(flags["method"])
    if not dataset or not method:
        return None
    if dataset == "Custom-Objects":
        if Path(flags.get("model", "")).name != "stable-diffusion-v1-4" or len(config["tasks"]) != tasks or (
            str(steps or 50) != "50"):  # fmt: skip
            return None
        return (config["backbone"], f"{dataset}:{metric} Avg", method)
    changes = []
    if len(config["tasks"]) != tasks:
        changes.append(f":tasks={len(config['tasks'])}")
    if str(steps or 50) != "50":
        changes.append(f":ddim_steps={steps}")
    if method in ("ER", "A-GEM") and flags.get("memory_size") not in (None, 5000 if tasks == 20 else 200):
        changes.append(f":memory={flags['memory_size']}")
    return (config["backbone"], dataset + "".join(changes), method)


def doubt(key, cells):
    """Why a cell of the paper cannot be true; empty if it can. cells: {key: row of paper_tables.csv}."""

    def value(measure):
        try:
            return float(cells[measure, *key[1:]]["value"])
        except (KeyError, ValueError):
            return None

    measure, backbone, dataset, method = key
    here, afq, unit = value(measure), value("AFQ"), cells[key]["unit"]
    name, _, change = dataset.partition(":")
    T = int(change[6:]) if change.startswith("tasks=") else dict(PAPER_DATASETS.values()).get(name)
    if here is None:
        return ""
    if measure in ("AIQ", "FR") and afq is None:
        return "there is no AFQ of it"
    if measure == "AIQ" and unit == "score" and here == 0:
        return "larger is better and the AFQ is not 0; it was not computed"
    isolated = method in ("Ensemble", "C-LoRA")  # task i keeps its weights: m(t, i) = m(i, i)
    if unit == "FID" and measure == "AIQ":
        most = afq * sum(1 / t for t in range(1, T + 1))
        if isolated and here > most:
            return f"with isolated weights AIQ is at most (1 + 1/2 + … + 1/{T}) · AFQ = {most:.2f}"
        if here == value("FR"):
            return "it repeats the FR of the same method"
    if unit == "FID" and measure == "FR":
        if isolated and here != 0:
            return "isolated weights forget nothing: FR is 0"
        if here > T / (T - 1) * afq:
            return f"FID is not negative, so FR is at most {T}/{T - 1} · AFQ = {T / (T - 1) * afq:.2f}"
    if measure == "parameters" and name in dict(PAPER_DATASETS.values()):
        one = float(cells[measure, backbone, dataset, "NCL"]["value"])
        if name == "ImageNet-1k":
            return "the column is in megabytes of float32, not in millions of parameters"
        if backbone == "ddim" and method in ("ER", "A-GEM"):
            return "the images in the memory are counted with one channel of three"
        if method == "Ensemble" and not math.isclose(here, T * one, abs_tol=0.005 * (T + 1)):
            return f"{T} networks of {one} are {T * one:.2f}"
    return ""


def paper_text(cell, doubts):
    """A cell of the paper for Markdown; a doubt gets a number and is added to `doubts`."""
    if not cell["mean"]:
        return "–"
    mark = ""
    if cell["doubt"]:
        if cell["doubt"] not in doubts:
            doubts.append(cell["doubt"])
        mark = f" †{doubts.index(cell['doubt']) + 1}"
    return cell["mean"] + (f" ± {cell['std']}" if cell["std"] else "") + mark
