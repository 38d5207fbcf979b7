"""The figures of eval_metrics.py: AQ curves, quality matrices, sample grids."""

import io
from collections import defaultdict

import numpy as np

import common
from tables import PROTOCOL, feature_kind


def picture_name(task, protocol):
    """The first images of a task from the final model, in class order, for the sample grids."""
    generated, reference, steps, seed = (protocol[k] for k in PROTOCOL[1:])
    about = (f"_steps{steps}" if steps else "") + ("_test" if reference == "test" else "")  # the labels are those of it
    return f"final_task{task}_n{generated}{about}_seed{seed}.png"


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
            f"{dataset}, {backbone}: FID, {feature_kind(protocol[0])} features, {protocol[1]} images a task{steps}"
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
                common.note(f"{picture} cannot be shown")
            panel.set(xticks=[], yticks=[])
            for spine in panel.spines.values():
                spine.set_visible(False)
            if panel in panels[0]:
                names = ", ".join(classes[c] for c in tasks[i - 1][:4]).replace("$", r"\$")
                panel.set_title(f"task {i}: {names}" + (" …" if len(tasks[i - 1]) > 4 else ""), fontsize=8)
        row[0].set_ylabel(variant, rotation=0, ha="right", va="center")
    figure.suptitle(f"{dataset}: samples of each task after the last one", fontsize=9, y=1.04 + 0.1 / len(shown))
    save_figure(plt, figure, path)
