"""The figures of eval_metrics.py: AQ curves, quality matrices, sample grids."""

import io
import re
from collections import defaultdict

import numpy as np

import common
from tables import LARGER_IS_BETTER, PROTOCOL, feature_kind

DRAWN = ("FID", "DINO")  # of a run the one that it has
PANEL = {"FID": (2.1, 0.56), "DINO": (2.9, 0.6)}  # inches of a picture in the sample grids

REAL = "; the last picture of a row is real"


def picture_name(task, protocol, trained_to=None):
    """The first images of a task in class order, for the sample grids; from the final model, or after `trained_to`."""
    generated, reference, steps, seed = (protocol[k] for k in PROTOCOL[1:])
    about = (f"_steps{steps}" if steps else "") + ("_test" if reference == "test" else "")  # the labels are those of it
    model = f"after{trained_to}" if trained_to else "final"
    return f"{model}_task{task}_n{generated}{about}_seed{seed}.png"


def draw_figures(records, out):
    """AQ curves, quality matrices and sample grids, one of each a data set and backbone (FID of one protocol; of
    concepts the DINO average, and a grid of its own for each method, of all concepts after each task).
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"figure.dpi": 120, "font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    scenes = defaultdict(list)
    for r in records:
        if r["metric"] in DRAWN:
            scenes[r["dataset"], r["backbone"]].append(r)
    for (dataset, backbone), group in scenes.items():
        protocol = max({tuple(r[k] for k in PROTOCOL) for r in group}, key=lambda p: (int(p[1]), p))
        group = [r for r in group if tuple(r[k] for k in PROTOCOL) == protocol]
        steps = f", {protocol[3]} steps" if protocol[3] else ""
        metric = group[0]["metric"]
        caption = (
            f"{dataset}, {backbone}: {metric}, {feature_kind(protocol[0])} features, {protocol[1]} images a task{steps}"
        )
        by_variant = defaultdict(list)
        for r in group:
            by_variant[r["variant"]].append(r)
        T = max(len(r["AQ"]) for r in group)
        by_variant = {v: [r for r in rs if len(r["AQ"]) == T] for v, rs in by_variant.items()}
        by_variant = {v: rs for v, rs in by_variant.items() if rs}
        name = f"{dataset}_{backbone}.png"
        draw_curves(plt, by_variant, T, caption, metric, out / f"AQ_{name}")
        draw_matrices(plt, by_variant, T, caption, metric, out / f"quality_matrix_{name}")
        draw_samples(plt, by_variant, T, dataset, metric, out / f"samples_{name}")
        for variant, runs in by_variant.items() if metric == "DINO" else ():
            safe = re.sub(r"[^\w.=,-]+", "_", variant).strip("_")
            draw_concepts(plt, first_run(runs), variant, T, out / f"concepts_{dataset}_{backbone}_{safe}.png")


def save_figure(plt, figure, path):
    picture = io.BytesIO()
    figure.savefig(picture, bbox_inches="tight")
    plt.close(figure)
    common.write_file(path, picture.getvalue())


def first_run(records):
    return min(records, key=lambda r: (r["order"], r["seed"]))


def draw_curves(plt, by_variant, T, caption, metric, path):
    figure, axes = plt.subplots(figsize=(5.5, 3.6))
    for variant, records in by_variant.items():
        curves = np.array([r["AQ"] for r in records])
        (line,) = axes.plot(range(1, T + 1), curves.mean(0), marker="o", markersize=3, label=variant)
        if len(curves) > 1:
            low, high = curves.mean(0) - curves.std(0, ddof=1), curves.mean(0) + curves.std(0, ddof=1)
            axes.fill_between(range(1, T + 1), low, high, alpha=0.15, color=line.get_color(), linewidth=0)
    better = "larger" if LARGER_IS_BETTER[metric] else "smaller"
    axes.set(xlabel="tasks learnt", ylabel=f"AQ ({better} is better)", title=caption, xticks=range(1, T + 1))
    if not LARGER_IS_BETTER[metric]:  # a distance begins at 0; what differs between similarities lies far above it
        axes.set_ylim(0, axes.get_ylim()[1])
    axes.legend(frameon=False)
    save_figure(plt, figure, path)


def draw_matrices(plt, by_variant, T, caption, metric, path):
    """Mean over the runs: row = trained to task t, column = task asked for; all panels share one colour scale."""
    means = {v: np.full((T, T), np.nan) for v in by_variant}
    for variant, records in by_variant.items():
        for t in range(T):
            for i in range(t + 1):
                means[variant][t, i] = np.mean([r["matrix"][t][i] for r in records])
    top, larger = max(np.nanmax(m) for m in means.values()), LARGER_IS_BETTER[metric]
    low, digits = (min(np.nanmin(m) for m in means.values()), 1) if larger else (0, 0)
    figure, panels = plt.subplots(1, len(means), figsize=(2.6 * len(means), 2.9), squeeze=False, sharey=True)
    for panel, (variant, mean) in zip(panels[0], means.items(), strict=True):
        panel.imshow(mean, vmin=low, vmax=top, cmap="viridis" if larger else "viridis_r")  # dark is bad
        for t, i in zip(*np.nonzero(~np.isnan(mean)), strict=True) if T <= 10 else ():
            dark = (mean[t, i] - low > 0.55 * (top - low)) != larger
            panel.text(i, t, f"{mean[t, i]:.{digits}f}", ha="center", va="center", color="white" if dark else "black",
                       fontsize=8)  # fmt: skip
        panel.set(title=variant, xlabel="task asked for")
        if T <= 10:
            panel.set(xticks=range(T), xticklabels=range(1, T + 1), yticks=range(T), yticklabels=range(1, T + 1))
    panels[0][0].set_ylabel("trained to task")
    figure.suptitle(caption, fontsize=9, y=1.02)
    save_figure(plt, figure, path)


def draw_samples(plt, by_variant, T, dataset, metric, path):
    """Samples of every task from the final model; one row a method, the run with the lowest order and seed."""
    shown = {v: first_run(rs) for v, rs in by_variant.items()}
    columns, (width, height) = range(1, min(T, 10) + 1), PANEL[metric]
    figure, panels = plt.subplots(
        len(shown), len(columns), figsize=(width * len(columns), height * len(shown)), squeeze=False,
        gridspec_kw={"wspace": 0.04, "hspace": 0.08},
    )  # fmt: skip
    for row, (variant, record) in zip(panels, shown.items(), strict=True):
        for panel, i in zip(row, columns, strict=True):
            show_picture(plt, panel, record["run"] / picture_name(i, record))
            if panel in panels[0]:
                panel.set_title(task_title(record, i), fontsize=8)
        row[0].set_ylabel(variant, rotation=0, ha="right", va="center")
    about = "samples of each task after the last one" + REAL * (metric == "DINO")
    set_title(figure, f"{dataset}: {about}")
    save_figure(plt, figure, path)


def draw_concepts(plt, record, variant, T, path):
    """One run: what each concept (column) looks like after each task (row), by its first prompts."""
    side = range(1, min(T, 10) + 1)
    width, height = PANEL["DINO"]
    figure, panels = plt.subplots(
        len(side), len(side), figsize=(width * len(side), height * len(side)), squeeze=False,
        gridspec_kw={"wspace": 0.04, "hspace": 0.08},
    )  # fmt: skip
    isolated = record["config"]["isolated"]  # then a concept looks as it did when it was learnt
    for t, row in zip(side, panels, strict=True):
        for i, panel in zip(side, row, strict=True):
            if i <= t:
                is_final = isolated or t == T
                show_picture(plt, panel, record["run"] / picture_name(i, record, None if is_final else t))
            else:
                panel.set_axis_off()
            if t == 1:
                panel.set_title(task_title(record, i), fontsize=8)
        row[0].set_ylabel(f"after task {t}", rotation=0, ha="right", va="center")
    about = f"{record['dataset']}, {record['backbone']}, {variant}, order {record['order']}, seed {record['seed']}"
    set_title(figure, f"{about}: the same prompts and noise after each task{REAL}")
    save_figure(plt, figure, path)


def set_title(figure, text):
    """Just above the panels' own titles, however many rows there are."""
    figure.suptitle(text, fontsize=9, y=figure.subplotpars.top + 0.25 / figure.get_figheight(), va="bottom")


def show_picture(plt, panel, path):
    try:
        panel.imshow(plt.imread(path), interpolation="nearest")
    except (OSError, SyntaxError):  # not there any more, or damaged
        common.note(f"{path} cannot be shown")
    panel.set(xticks=[], yticks=[])
    for spine in panel.spines.values():
        spine.set_visible(False)


def task_title(record, i):
    classes, ids = record["config"]["data"]["classes"], record["config"]["tasks"][i - 1]
    names = ", ".join(classes[c] for c in ids[:4]).replace("$", r"\$")
    return f"task {i}: {names}" + (" …" if len(ids) > 4 else "")
