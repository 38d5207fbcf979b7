"""The report of gtep.py: selection, statistics, tables and the figure.

A score is a FID, smaller is better, or of concepts the DINO average, larger is better; infinite, on the bad side, is
worst: a run that failed. With sign 1 where smaller is better, else −1, sign · score is to be small. Handed in are:

    outcome   {"failed": why or "", "AFQ": …, "AIQ": …, "FR": …, "read": images, "features": …, "hours": …,
              "changed": {file of code that is another since, …}} of one run
    trial     {"values": text, "edge": [flag, …], "of": combinations there are, "runs": [run, …], "outcomes": [an order
              each], "folders": [path, …], "score": mean AFQ}
    tuned     {(dataset, method): [trial, …]}, D^HT first
    winners   {(dataset, method): trial, or None if all failed}
    finals    {(tuned on, judged on, method): [outcome of an order, …]}; empty before phase 2
"""

import io
import math
import shlex
from itertools import product

import numpy as np

import common
import streams
from tables import LARGER_IS_BETTER

MEASURES = ("AFQ", "AIQ", "FR")
LOST = {"failed": "no trial to choose", "read": "", "features": "", "changed": set(), "hours": 0}
LOST |= dict.fromkeys(MEASURES, math.inf)


# ------------------------------------------------------------------------------- selection and statistics


def better(metric):
    return "larger" if LARGER_IS_BETTER[metric] else "smaller"


def sign_of(metric):
    return -1 if LARGER_IS_BETTER[metric] else 1


def mean_score(outcomes, metric):
    """Mean AFQ over the orders; infinite, on the bad side, if one of them failed or is no number."""
    values = [o["AFQ"] for o in outcomes]
    return float(np.mean(values)) if np.isfinite(values).all() else sign_of(metric) * math.inf


def best_trial(trials, metric):
    """The one with the best score, of equal ones the first; None if all are infinite."""
    best = min(trials, key=lambda trial: sign_of(metric) * trial["score"])
    return best if math.isfinite(best["score"]) else None


def interval(values):
    """mean, sample standard deviation, ends of the 95 % t-interval; None where there are too few finite values."""
    values = [v for v in values if math.isfinite(v)]
    if len(values) < 2:
        return (values[0] if values else None, None, None, None)
    from scipy.stats import t

    mean, spread = float(np.mean(values)), float(np.std(values, ddof=1))
    half = float(t.ppf(0.975, len(values) - 1)) * spread / math.sqrt(len(values))
    return mean, spread, mean - half, mean + half


def sign_flip(differences):
    """Exact two-sided p: the share of all choices of signs whose sum is at least as far from 0 as the one seen."""
    seen = abs(sum(differences)) * (1 - 1e-12)
    flips = product((1, -1), repeat=len(differences))
    sums = [abs(sum(s * d for s, d in zip(signs, differences, strict=True))) for signs in flips]
    return sum(s >= seen for s in sums) / len(sums)


def ranks(scores, sign=1):
    """1 = smallest, with sign −1 largest; equal scores share the better rank."""
    return [1 + sum(sign * other < sign * score for other in scores) for score in scores]


def correlation(kind, a, b):
    """kendalltau (τ-b) or spearmanr of two lists of scores; None where one of them is constant."""
    from scipy import stats

    if min(len(set(a)), len(set(b))) < 2:
        return None
    return float(getattr(stats, kind)(a, b).statistic)


# ------------------------------------------------------------------------------------------------- report


def number(value):
    return "" if value is None or not math.isfinite(value) else f"{value + 0.0:.6g}"  # + 0.0: never -0


def short(value, spread=None, digits=2):
    if value is None or not math.isfinite(value):
        return "–"
    return f"{round(value, digits) + 0.0:.{digits}f}" + (f" ± {spread:.{digits}f}" if spread is not None else "")


def span(low, high, n, orders):
    return "–" if low is None else f"{low:.2f} to {high:.2f}" + (f" (n = {n})" if n < orders else "")


def failed(outcomes):
    """How many of how many runs failed; where no trial could be chosen none was run."""
    ran = [o for o in outcomes if o is not LOST]
    return sum(bool(o["failed"]) for o in ran), len(ran)


def table(head, rows):
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(map(str, line)) + " |" for line in lines] + [""]


def write(args, tuned, winners, finals):
    """report.md, protocols.png and trials.csv, results.csv, protocols.csv, cost.csv in --out."""
    sides = list(dict.fromkeys(dataset for dataset, _ in tuned))
    names = {d: streams.scenario(d).name for d in [*sides, *(judged for _, judged, _ in finals)]}
    if len(set(names.values())) < len(names):  # folders of the same name
        names = {d: d for d in names}
    tune, judge = sides[0], args.judge["dataset"] if args.judge else None
    cells = {key: {m: interval([o[m] for o in orders]) for m in MEASURES} for key, orders in finals.items()}
    write_trials(args, names, tuned)
    text = [
        f"# Tuned on {names[tune]}, judged on {names.get(judge, args.eval)}\n",
        f"{args.backbone}, space `{args.space}`, class orders {' '.join(map(str, args.orders))}, training flags "
        f"`{shlex.join(args.training) or 'none'}`. {args.metric} of {args.num_samples} images a task, "
        f"{better(args.metric)} is better; mean ± "
        "sample standard deviation over the orders.\n",
        *phase_1(args, names, tuned, winners),
    ]
    if finals:
        write_results(args, names, winners, finals, cells)
        text += phase_2(args, names, tune, judge, winners, finals, cells)
        text += compared(args, names, tune, judge, tuned, winners, finals, cells)
    else:
        for name in ("results.csv", "protocols.csv"):  # of an earlier report
            (args.out / name).unlink(missing_ok=True)
    text += what_was_read(args, names, tuned, finals) + hours(args, names, tuned)
    common.write_file(args.out / "report.md", "\n".join(text).encode())
    draw(args, names, tune, judge, tuned, cells)
    print(f"report, tables and figure: {args.out}/", flush=True)


def write_trials(args, names, tuned):
    rows = [
        {"tuned_on": names[dataset], "method": method, "trial": i, "values": trial["values"], "order": run.order}
        | {"seed": run.seed, **{m: number(found[m]) for m in MEASURES}, "failed": found["failed"], "folder": folder}
        for (dataset, method), trials in tuned.items()
        for i, trial in enumerate(trials, 1)
        for run, found, folder in zip(trial["runs"], trial["outcomes"], trial["folders"], strict=True)
    ]
    common.write_csv(args.out / "trials.csv", rows)


def phase_1(args, names, tuned, winners):
    rows = []
    for (dataset, method), best in winners.items():
        trials = tuned[dataset, method]
        runs = [found for trial in trials for found in trial["outcomes"]]
        row = [names[dataset], method, f"{len(trials)} of {trials[0]['of']}", "{} of {}".format(*failed(runs))]
        if best:
            row += [best["values"], ", ".join(best["edge"]) or "–", short(best["score"])]
        rows.append(row if best else [*row, "none: all trials failed", "–", "–"])
    head = ["tuned on", "method", "trials", "failed runs", "chosen", "at the edge of its list", "AFQ in tuning"]
    return [
        "## Phase 1: what was chosen\n",
        *table(head, rows),
        "Best mean AFQ over the orders; a trial with a failed run is worst, of equal ones the first is taken. An "
        "optimum at the edge of its list may lie beyond it. AFQ in tuning is a winner's score, and no result.\n",
    ]


def write_results(args, names, winners, finals, cells):
    rows = []
    for key, orders in finals.items():
        source, judged, method = key
        row = {"judged_on": names[judged], "tuned_on": names[source], "method": method}
        row |= {"values": (winners[source, method] or {"values": ""})["values"]}
        row |= dict(zip(("failed", "runs"), failed(orders), strict=True))
        for measure, about in cells[key].items():
            row |= {f"{measure}_{k}": number(v) for k, v in zip(("mean", "std", "low", "high"), about, strict=True)}
        rows.append(row)
    common.write_csv(args.out / "results.csv", rows)


def phase_2(args, names, tune, judge, winners, finals, cells):
    rows = []
    for method in args.methods:
        key, best = (tune, judge, method), winners[tune, method]
        row = [method, best["values"] if best else "none: all trials failed"]
        row += [short(*cells[key][m][:2]) for m in MEASURES]
        bad, ran = failed(finals[key])
        rows.append([*row, span(*cells[key]["AFQ"][2:], ran - bad, ran), f"{bad} of {ran}"])
    n = len(args.orders)
    over = f"{n} order{'s' * (n > 1)}"
    return [
        f"## Phase 2: the result on {names[judge]}\n",
        *table(["method", "values", *MEASURES, "95 % interval of AFQ", "failed runs"], rows),
        f"The interval is Student's t over {over}. Means are of the runs that did not fail; in ranks a method with "
        f"a failed run is worst. With {over} an exact sign-flip test cannot go under p = {2 / 2**n:.4g}.\n",
    ]


def compared(args, names, tune, judge, tuned, winners, finals, cells):
    """Ranks under both protocols and, with --both, the 2×2 matrix and the gap; protocols.csv."""
    both = (judge, judge, args.methods[0]) in finals
    sign = sign_of(args.metric)
    gtep = [mean_score(finals[tune, judge, method], args.metric) for method in args.methods]
    if both:
        usual = [mean_score(finals[judge, judge, method], args.metric) for method in args.methods]
        where = f"tuned and judged on {names[judge]}, with fresh seeds"
    else:
        best = [winners[tune, method] for method in args.methods]
        usual = [b["score"] if b else sign * math.inf for b in best]
        where = f"the score of tuning on {names[tune]} itself (with --both: on {names[judge]}, with fresh seeds)"
    tau = correlation("kendalltau", usual, gtep)
    rows, lines, matrix = [], [], []
    for k, method in enumerate(args.methods):
        row = {"method": method, "conventional": number(usual[k]), "gtep": number(gtep[k])}
        line = [method, short(usual[k]), short(gtep[k])]
        row |= dict.fromkeys(("gap", "gap_percent", "gap_low", "gap_high", "p", "spearman"), "")
        if both:
            pairs = zip(finals[tune, judge, method], finals[judge, judge, method], strict=True)
            pairs = [(a["AFQ"], b["AFQ"]) for a, b in pairs if not (a["failed"] or b["failed"])]
            gap, _, low, high = interval([sign * (a - b) for a, b in pairs])
            percent = 100 * gap / np.mean([b for _, b in pairs]) if pairs else None
            p = sign_flip([a - b for a, b in pairs]) if pairs else None
            about = span(low, high, len(pairs), len(args.orders))
            if pairs and winners[tune, method]["values"] == winners[judge, method]["values"]:  # the same runs: no test
                about, low, high, p = "same values", None, None, None
            rho = correlation("spearmanr", *([t["score"] for t in tuned[side, method]] for side in (tune, judge)))
            row |= {"gap": number(gap), "gap_percent": number(percent), "gap_low": number(low)}
            row |= {"gap_high": number(high), "p": number(p), "spearman": number(rho)}
            line += [short(gap), short(percent, digits=1), about, short(p, digits=4), short(rho)]
            for source in (tune, judge):
                of = [short(*cells[source, judged, method]["AFQ"][:2]) for judged in (tune, judge)]
                matrix.append([method, names[source], *of])
        rows.append(
            row
            | {"rank_conventional": ranks(usual, sign)[k], "rank_gtep": ranks(gtep, sign)[k], "kendall": number(tau)}
        )
        lines.append([*line, ranks(usual, sign)[k], ranks(gtep, sign)[k]])
    common.write_csv(args.out / "protocols.csv", rows)
    text = []
    if both:
        text += ["## AFQ by what it was tuned and judged on\n"]
        text += table(["method", "tuned on", f"judged on {names[tune]}", f"judged on {names[judge]}"], matrix)
        text += ["All with fresh seeds. A column compares, a row does not: scores of other data have another scale.\n"]
    more = ["gap", "gap, %", "95 % interval of gap", "p, sign flip", "ρ of trials"] if both else []
    text += [
        "## The conventional protocol and this one\n",
        f"Conventional: {where}. GTEP: tuned on {names[tune]}, judged on {names[judge]}.\n",
        *table(["method", "conventional", "GTEP", *more, "rank, conventional", "rank, GTEP"], lines),
        f"Kendall's τ-b of the two rankings: {short(tau)}.\n",
    ]
    if both:
        text.append(
            f"gap = {'GTEP − conventional' if sign == 1 else 'conventional − GTEP'}, positive where tuning on the "
            "scenario itself flatters; interval and p are of the orders in pairs. ρ is Spearman's, of the scores of "
            "the same trials on both.\n"
        )
    return text


def what_was_read(args, names, tuned, finals):
    phases = [(f"1, on {names[d]}", trial["outcomes"]) for (d, _), trials in tuned.items() for trial in trials]
    phases += [(f"2, on {names[judged]}", orders) for (_, judged, _), orders in finals.items()]
    rows = sorted({(phase, o["read"], o["features"]) for phase, outcomes in phases for o in outcomes if o["read"]})
    scores = ", and a classifier-… has learnt the classes of its own scenario alone" * (args.metric == "FID")
    changed = sorted({file for _, outcomes in phases for o in outcomes for file in o["changed"]})
    return [
        "## What was read\n",
        *table(["phase", "images (digest)", "features of the scores"], rows),
        f"Tuning on {names[next(iter(tuned))[0]]} used no picture of {args.eval}{scores}. "
        "To refuse a pair that overlaps or differs, class names are read on both "
        "sides; of a folder also names, sizes and times of its files and the size of one picture.\n",
        *([f"Some of the runs were trained before the code changed: {', '.join(changed)}.\n"] * bool(changed)),
    ]


def hours(args, names, tuned):
    rows = []
    for (dataset, method), trials in tuned.items():
        spent = sum(o["hours"] for trial in trials for o in trial["outcomes"])
        rows.append({"tuned_on": names[dataset], "method": method, "trials": len(trials), "hours": f"{spent:.4f}"})
    common.write_csv(args.out / "cost.csv", rows)
    return [
        "## Hours of tuning\n",
        *table(["tuned on", "method", "trials", "hours"], [row.values() for row in rows]),
        "Training time of all trials and orders, failed ones included; scoring is not in it.\n",
    ]


def draw(args, names, tune, judge, tuned, cells):
    """Left: the best score so far against trials. Right, after phase 2: AFQ on D^E by what it was tuned on."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"figure.dpi": 120, "font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), constrained_layout=True)
    colours = {method: f"C{k % 10}" for k, method in enumerate(args.methods)}
    for (dataset, method), trials in tuned.items():
        sign = sign_of(args.metric)
        best = sign * np.minimum.accumulate([sign * trial["score"] for trial in trials])
        left.plot(range(1, 1 + len(best)), np.where(np.isfinite(best), best, np.nan), color=colours[method], ms=3,
                  marker="o", ls="-" if dataset == tune else "--", label=f"{method}, {names[dataset]}")  # fmt: skip
    left.set(xlabel="trials", ylabel="best mean AFQ so far", title="Phase 1")
    left.xaxis.get_major_locator().set_params(integer=True)
    left.legend(frameon=False, fontsize=7)
    for method in args.methods if cells else ():
        points = [(k, *cells[source, judge, method]["AFQ"][:2])
                  for k, source in enumerate((judge, tune)) if (source, judge, method) in cells]  # fmt: skip
        points = [(k, mean, spread or 0) for k, mean, spread in points if mean is not None]
        if points:
            right.errorbar(*zip(*points, strict=True), marker="o", ms=3, capsize=2, color=colours[method], label=method)
    if cells:
        right.set(xticks=[0, 1], xticklabels=[f"tuned on {names[judge]}", f"tuned on {names[tune]}"], xlim=(-0.3, 1.3),
                  ylabel="AFQ", title=f"Phase 2: judged on {names[judge]}")  # fmt: skip
        if right.get_legend_handles_labels()[0]:
            right.legend(frameon=False, fontsize=7)
    else:
        right.set_axis_off()
    picture = io.BytesIO()
    figure.savefig(picture)
    plt.close(figure)
    common.write_file(args.out / "protocols.png", picture.getvalue())
