"""Draws the scores of two-task runs against the strength of their penalty: one panel a method, ncl as the reference.

    python docs/strengths.py runs/strengths --out docs/strengths.png

Reads config.json and quality.csv of the run folders below; `bash run_all.sh strengths` makes them, and this figure.
"""

import sys
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

import common
import runfolder

TITLES = {"kd": "KD", "l2": "L2", "ewc": "EWC", "si": "SI", "mas": "MAS"}


def main():
    p = common.Parser(description=__doc__)
    p.add_argument("runs", help="folder of run folders with two tasks each")
    p.add_argument("--out", default="results/strengths.png", help="picture to write (default: results/strengths.png)")
    args = p.parse_args()
    found = defaultdict(lambda: defaultdict(list))  # method → strength → FID of (old task, new task) after the second
    for path in sorted(Path(args.runs).rglob("quality.csv")):
        flags = runfolder.read_config(path.parent)["flags"]
        rows = [r for r in common.read_csv(path) if r["metric"] == "FID" and r["trained_to"] == "2"]
        if len(rows) == 2:
            fid = {r["task"]: float(r["value"]) for r in rows}
            found[flags["method"]][flags.get(f"{flags['method']}_weight")].append((fid["1"], fid["2"]))
        elif rows:
            common.fail(f"{path} holds scores of several protocols or of more than two tasks: show one at a time")
    scores = {m: {s: np.mean(fids, axis=0) for s, fids in found[m].items()} for m in found}  # over orders and seeds
    missing = [method for method in ("ncl", *TITLES) if method not in scores]
    if missing:
        common.fail(f"{args.runs} has no scored two-task run of {', '.join(missing)}; run: bash run_all.sh strengths")

    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, len(TITLES), figsize=(15, 3.2), sharey=True, constrained_layout=True)
    ((naive_old, naive_new),) = scores["ncl"].values()
    for panel, (method, title) in zip(panels, TITLES.items(), strict=True):
        strengths = sorted(scores[method])
        old, new = zip(*(scores[method][s] for s in strengths), strict=True)
        panel.axhline(naive_old, color="C3", lw=0.8, ls=":")
        panel.axhline(naive_new, color="C0", lw=0.8, ls=":")
        panel.plot(strengths, old, "C3o-", ms=3, label="old task")
        panel.plot(strengths, new, "C0o-", ms=3, label="new task")
        panel.plot(strengths, [(a + b) / 2 for a, b in zip(old, new, strict=True)], "k-", lw=2, label="AFQ")
        panel.set(title=title, xlabel=f"--{method}_weight", xscale="log")
    panels[0].set_ylabel("FID (classifier features)")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center", frameon=False)
    figure.suptitle("After the second of two tasks of digits; dotted: ncl. Smaller is better.", fontsize=9)
    Path(args.out).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.out, dpi=110)
    print(f"{args.out}")
    for method in TITLES:
        best = min(scores[method], key=lambda s: sum(scores[method][s]))
        print(f"{method}: best AFQ {sum(scores[method][best]) / 2:.1f} at {best:g}")


if __name__ == "__main__":
    with common.one_line_errors():
        main()
