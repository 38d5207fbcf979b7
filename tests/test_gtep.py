"""gtep.py with stubs in place of the training script and of eval_metrics.py: what it starts, chooses and reports."""

import collections
import csv
import errno
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
import time

import pytest
from conftest import ROOT
from test_bad_input import one_line
from test_methods import METHODS

import common
import gtep
import gtep_report
from gtep_report import number

# The flags of the real scripts that matter here; plan.py says what a run scores. No import that takes time.
TRAIN = """
import fcntl, hashlib, json, sys, time
from pathlib import Path
import plan
words = sys.argv[1:]
flags = {w[2:]: v for w, v in zip(words, [*words[1:], ""]) if w.startswith("--")}
name, _, span = flags["dataset"].partition(":")
first, last = map(int, span.split("-")) if span else (0, sum(p.is_dir() for p in Path(name).iterdir()) - 1)
if name.startswith(("/", ".")):
    flags["dataset"] = str(Path(name).resolve())
classes = last - first + 1
about = {"dataset": flags["dataset"], "classes": classes, "tasks": int(flags.get("tasks", classes)), "size": 8,
         "preset": "tiny", "lr": float(flags.get("lr", 0.003)), "batch_size": int(flags.get("batch_size", 64)),
         "steps": int(flags.get("steps", 300)), "epochs": None}
if "dry_run" in flags:
    if message := plan.refused(flags):
        sys.exit("error: " + message)
    print(json.dumps(about, indent=1), "task 1: classes [0]", sep="\\n")
    sys.exit()
folder = Path(flags["out"]) / "scene" / "ddim" / flags["method"] / f"order{flags['order']}-seed{flags['seed']}-0"
folder.mkdir(parents=True, exist_ok=True)
lock = open(folder / ".lock", "a")
try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
except OSError:
    with open(Path(__file__).parent / "ledger", "a") as ledger:
        ledger.write(json.dumps(["refused", flags]) + "\\n")
    sys.exit("error: in use by another process")
if (folder / "DONE").exists():
    sys.exit()
with open(Path(__file__).parent / "ledger", "a") as ledger:
    ledger.write(json.dumps(["begin", flags]) + "\\n")
code = {"train_ddim.py": hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]}
(folder / "config.json").write_text(json.dumps({"flags": flags, "code": code,
    "data": {"name": name, "digest": span or "f"}}))
(folder / "DIVERGED").unlink(missing_ok=True)
time.sleep(plan.seconds)
plan.folder = folder
message = plan.wrong(flags)
if message:
    (folder / "log.csv").write_text("task,seconds\\n1,100\\n1,900\\n2,900\\n2")
    print("error: " * bool(message[1]) + message[1], end="", file=sys.stderr)
    sys.exit(message[0])
with open(Path(__file__).parent / "ledger", "a") as ledger:
    ledger.write(json.dumps(["end", flags]) + "\\n")
(folder / "DONE").touch()
"""
SCORE = """
import json, sys
from pathlib import Path
import plan
out, seed = Path(sys.argv[3]), sys.argv[sys.argv.index("--sampling_seed") + 1]
count = sys.argv[sys.argv.index("--num_samples") + 1]
(config,) = Path(sys.argv[1]).glob("*/*/*/*/config.json")
config = json.loads(config.read_text())
if getattr(plan, "broken", lambda: False)():
    next(Path(sys.argv[1]).glob("*/*/*/*/DONE")).unlink()
    sys.exit("error: task1 is broken: start its training command again")
if getattr(plan, "unscored", lambda: False)():
    sys.exit("error: cannot score this")
afq = plan.afq(config["flags"])
assert seed == ("1000" if int(config["flags"]["seed"]) > 1000 else "0")
out.mkdir(exist_ok=True)
head, summary = "metric,generated,extractor,reference,sampling_seed,AIQ,AFQ,FR", out / "summary.csv"
rows = summary.read_text().splitlines()[1:] if summary.exists() else []
name = getattr(plan, "features", f"classifier-{config['data']['digest']}")
for reference in getattr(plan, "references", ["train"]):
    about = f"{count},{name},{reference},{seed}"
    rows += [f"FID,{about},{afq + 1},{afq},{afq - 5}", f"accuracy,{about},1.5,0.5,-4.5"]
summary.write_text("\\n".join([head, *dict.fromkeys(rows)]) + "\\n")
(out / "cost.csv").write_text("train_seconds,replay_seconds\\n1500,300\\n")
"""


class Bench:
    """A copy of the project in which nothing is trained."""

    def __init__(self, folder):
        self.folder = folder
        for name in ("gtep.py", "gtep_report.py", "common.py", "runfolder.py", "streams.py", "readers.py", "fid.py",
                     "measures.py", "tables.py", "alignment.py", "concepts.py", "tiny_world.py"):  # fmt: skip
            shutil.copy(ROOT / name, folder)
        for name in ("methods", "reference"):
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        (folder / "train_ddim.py").write_text(TRAIN)
        (folder / "eval_metrics.py").write_text(SCORE)
        self.plan("afq = lambda flags: 10 + float(flags.get('l2_weight', 5)) + int(flags['order'])")

    def plan(self, text):
        start = "import os\nseconds = 0\nwrong = refused = lambda flags: None\n"
        (self.folder / "plan.py").write_text(start + textwrap.dedent(text))

    def command(self, *flags):
        return [sys.executable, str(self.folder / "gtep.py"), *map(str, flags)]

    def run(self, *flags):
        return subprocess.run(self.command(*flags), cwd=self.folder, capture_output=True, text=True, timeout=120)

    def ledger(self):
        lines = (self.folder / "ledger").read_text().splitlines() if (self.folder / "ledger").exists() else []
        return [json.loads(line) for line in lines]

    def rows(self, name, out="results/gtep"):
        with open(self.folder / out / name, newline="") as file:
            return list(csv.DictReader(file))


@pytest.fixture
def bench(tmp_path):
    return Bench(tmp_path)


DIGITS = ("--tune", "digits:0-4", "--eval", "digits:5-9")

# ------------------------------------------------------------------------------------------- what is tried

FROZEN = {  # in the order of the lists: the method's own, then lr, batch_size and length as factors
    ("ncl", "method"): [(), (), ()],
    ("ncl", "full"): [(8, 1, 2), (0.5, 0.5, 0.5), (4, 4, 1)],
    ("noncl", "method"): [(), (), ()],
    ("noncl", "full"): [(2, 2, 2), (1, 1, 1), (0.5, 0.5, 0.5)],
    ("ensemble", "method"): [(), (), ()],
    ("ensemble", "full"): [(0.125, 2, 0.5), (0.5, 0.25, 1), (1, 0.5, 2)],
    ("er", "method"): [(), (), ()],
    ("er", "full"): [(1, 1, 1), (0.5, 4, 0.5), (4, 0.25, 2)],
    ("gr", "method"): [(), (), ()],
    ("gr", "full"): [(4, 1, 0.5), (0.125, 0.5, 1), (0.25, 2, 2)],
    ("kd", "method"): [(0.01,), (1000.0,), (10000.0,)],
    ("kd", "full"): [(0.01, 4, 0.5, 1), (1000.0, 0.5, 0.25, 0.5), (10000.0, 8, 2, 2)],
    ("l2", "method"): [(1e-05,), (10.0,), (1e-06,)],
    ("l2", "full"): [(1e-06, 0.125, 2, 1), (0.0001, 1, 0.25, 2), (0.01, 8, 1, 0.5)],
    ("ewc", "method"): [(1000.0,), (0.1,), (100.0,)],
    ("ewc", "full"): [(0.1, 4, 4, 1), (1000.0, 0.5, 0.5, 2), (10.0, 1, 1, 0.5)],
    ("si", "method"): [(1.0,), (100.0,), (1000.0,)],
    ("si", "full"): [(10000.0, 4, 2, 2), (1000.0, 0.125, 0.5, 0.5), (1.0, 8, 4, 1)],
    ("mas", "method"): [(0.001,), (100.0,), (0.01,)],
    ("mas", "full"): [(0.001, 1, 0.25, 1), (0.1, 0.25, 2, 0.5), (1.0, 8, 0.5, 2)],
    ("agem", "method"): [(), (), ()],
    ("agem", "full"): [(4, 1, 0.5), (1, 0.5, 1), (0.125, 0.25, 2)],
    ("clora", "method"): [(), (), ()],
    ("clora", "full"): [(8, 2, 2), (2, 0.5, 1), (0.125, 4, 0.5)],
}


def test_first_trials_are_frozen():
    """A change of a `search` or of COMMON changes what all published tunings mean: say so, then change these."""
    for method in METHODS:
        for space in ("method", "full"):
            found = [tuple(gtep.trial_values(method, space, i).values()) for i in (1, 2, 3)]
            assert found == FROZEN[method, space], (method, space)


def test_no_value_twice_before_its_list_is_through(monkeypatch):
    lists = {"a": [1, 2, 3, 4], "b": [1, 2, 3, 4, 5, 6], "c": [1, 2, 3], "d": [1, 2, 3, 4]}
    monkeypatch.setattr(gtep, "search_space", lambda method, space: lists)
    drawn = [gtep.trial_values("x", "method", i) for i in range(1, 4 * 6 * 3 * 4 + 1)]
    assert len({tuple(d.values()) for d in drawn}) == 4 * 6 * 3 * 4  # every combination, none twice
    for flag, listed in lists.items():
        for k in range(0, len(drawn), len(listed)):
            assert sorted(d[flag] for d in drawn[k : k + len(listed)]) == listed
    assert gtep.trial_values("x", "method", 289) == drawn[0]
    assert [gtep.trial_values(m, "method", 1) for m in "xyzuvw"].count(drawn[0]) < 6  # and not the same for all


def test_full_space_scales_the_training_flags():
    base = {"lr": 2e-4, "batch_size": 6, "steps": None, "epochs": 50}
    values = {"l2_weight": 0.1, "lr": 4, "batch_size": 1 / 4, "length": 1 / 2}
    flags = gtep.training_flags(values, base)
    assert flags == (("l2_weight", 0.1), ("lr", 8e-4), ("batch_size", 2), ("epochs", 25))
    flags = dict(
        gtep.training_flags({"lr": 1 / 8, "batch_size": 2, "length": 2}, base | {"epochs": None, "steps": 300})
    )
    assert flags == {"lr": 2.5e-5, "batch_size": 12, "steps": 600}
    assert gtep.at_the_edge("l2", "full", values | {"l2_weight": 1e-6}) == ["l2_weight", "batch_size", "length"]
    assert gtep.at_the_edge("l2", "full", {"l2_weight": 10.0, "lr": 8}) == ["l2_weight", "lr"]


# ------------------------------------------------------------------------------- selection and statistics


def test_statistics_by_hand():
    mean, spread, low, high = gtep_report.interval([1, 2, 3, 4, 5])
    assert (mean, spread) == (3, pytest.approx(1.5811388))
    assert (low, high) == (pytest.approx(3 - 2.776445 * 0.7071068), pytest.approx(3 + 2.776445 * 0.7071068))
    assert gtep_report.interval([7.0]) == (7.0, None, None, None) and gtep_report.interval([])[0] is None
    assert gtep_report.sign_flip([1, 2, 3, 4, 5]) == 0.0625  # of five orders the least there is
    assert gtep_report.sign_flip([3, -1, 2]) == 0.5  # sums ±6, ±4 (the one seen), ±2, 0: four of eight reach 4
    assert gtep_report.sign_flip([0.0, 0.0]) == 1
    inf = float("inf")
    assert gtep_report.ranks([2, 1, inf, 2, inf]) == [2, 1, 4, 2, 4]
    assert gtep_report.correlation("kendalltau", [1, 2, 3, 4], [2, 1, 3, inf]) == pytest.approx(4 / 6)
    assert gtep_report.correlation("spearmanr", [1, 2, 3, inf], [2, 1, 3, inf]) == pytest.approx(1 - 6 * 2 / 60)
    assert gtep_report.correlation("spearmanr", [1, 1], [1, 2]) is None


TABLE = """
import sys, json
trials = json.loads(TRIALS)
tuning = {
    "digits:0-4": {"l2": [(10, 14), (8, 12), (9, 11)], "si": [(None, 1), (20, 30), (20, 22)], "er": [(15, 17)],
                   "mas": [(None, 3), (3, None), (None, None)]},
    "digits:5-9": {"l2": [(10, 12), (18, 22), (40, 40)], "si": [(5, 5), (6, 6), (7, 7)], "er": [(1, 1)],
                   "mas": [(50, 50), (49, 51), (90, 90)]},
}
fresh = {  # trial → (order 1, order 2)
    "digits:0-4": {"l2": {2: (11, 13), 1: (15, 17)}, "si": {3: (1, 3), 1: (5, 7)}, "er": {1: (8, 8)},
                   "mas": {1: (70, 72)}},
    "digits:5-9": {"l2": {2: (22, 26), 1: (20, 20)}, "si": {3: (30, 34), 1: (33, 35)}, "er": {1: (21, 23)},
                   "mas": {1: (60, None)}},
}
def afq(flags):
    method, order, seed = flags["method"], int(flags["order"]), int(flags["seed"])
    trial = trials[method].index(flags.get(f"{method}_weight"))
    assert flags["select"] == "last" and seed in (order, order + 1000)
    if seed == order:
        return tuning[flags["dataset"]][method][trial][order - 1]
    return fresh[flags["dataset"]][method][trial + 1][order - 1]
def wrong(flags):
    if afq(flags) is None:
        (folder / "DIVERGED").touch()
        return 1, "loss_main of task 2 is nan at step 3"
"""


def test_selection_matrix_gap_and_ranks_by_hand(bench):
    values = {m: [gtep.trial_values(m, "method", i)[f"{m}_weight"] for i in (1, 2, 3)] for m in ("l2", "si", "mas")}
    trials = {m: [str(v) for v in listed] for m, listed in values.items()} | {"er": [None]}
    bench.plan(TABLE.replace("TRIALS", repr(json.dumps(trials))))
    done = bench.run("--methods", "l2", "si", "er", "mas", *DIGITS, "--trials", 3, "--orders", 1, 2, "--both")
    assert done.returncode == 0, done.stderr
    text = (bench.folder / "results/gtep/report.md").read_text()
    by = {m: [f"{m}_weight={v:.6g}" for v in listed] for m, listed in values.items()}

    # phase 1: of l2's trials 2 and 3, both 10.00, the first; si's first lost order 1; mas has none that is whole
    rows = bench.rows("trials.csv")
    assert len(rows) == 40 and sum(r["failed"] == "diverged" for r in rows) == 5
    section = text.split("## Phase 2")[0]
    (line,) = (line for line in section.splitlines() if line.startswith("| digits_0-4 | l2 | 3 of 8 | 0 of 6 |"))
    assert line.endswith(f"| {by['l2'][1]} | l2_weight | 10.00 |")  # 10 is the last of its list
    assert f"| digits_0-4 | si | 3 of 8 | 1 of 6 | {by['si'][2]} |" in section
    assert "| digits_0-4 | er | 1 of 1 | 0 of 2 | – | – | 16.00 |" in section
    assert "| digits_0-4 | mas | 3 of 8 | 4 of 6 | none: all trials failed | – | – |" in section
    assert f"| digits_5-9 | mas | 3 of 8 | 0 of 6 | {by['mas'][0]} |" in section

    # phase 2: every cell anew
    cells = {(r["tuned_on"], r["judged_on"], r["method"]): r for r in bench.rows("results.csv")}
    a, b = "digits_0-4", "digits_5-9"
    matrix = [[float(cells[s, j, "l2"]["AFQ_mean"]) for j in (a, b)] for s in (a, b)]
    assert matrix == [[12, 24], [16, 20]]
    assert (
        f"| l2 | {a} | 12.00 ± 1.41 | 24.00 ± 2.83 |" in text and f"| l2 | {b} | 16.00 ± 1.41 | 20.00 ± 0.00 |" in text
    )
    head = cells[a, b, "l2"]
    assert head["values"] == by["l2"][1] and (head["AIQ_mean"], head["FR_mean"]) == ("25", "19")
    assert float(head["AFQ_low"]) == pytest.approx(24 - 12.7062047 * 2, rel=1e-5)  # 2.83 / √2 = 2
    assert float(head["AFQ_high"]) == pytest.approx(24 + 12.7062047 * 2, rel=1e-5)
    assert (cells[b, b, "mas"]["AFQ_mean"], cells[b, b, "mas"]["failed"]) == ("60", "1")
    assert (cells[a, b, "mas"]["AFQ_mean"], cells[a, b, "mas"]["failed"]) == ("", "0")  # nothing to run
    assert cells[a, b, "mas"]["runs"] == "0" and "| mas | none: all trials failed | – | – | – | – | 0 of 0 |" in text

    # gap on D^E: l2 (22-20, 26-20), si (30-33, 34-35); with an order or all trials lost there is none to pair
    gaps = {r["method"]: r for r in bench.rows("protocols.csv")}
    assert [gaps[m]["gap"] for m in ("l2", "si", "er", "mas")] == ["4", "-2", "0", ""]
    assert [gaps[m]["gap_percent"] for m in ("l2", "si", "er", "mas")] == ["20", "-5.88235", "0", ""]
    assert [gaps[m]["p"] for m in ("l2", "si", "er", "mas")] == ["0.5", "0.5", "", ""]
    assert float(gaps["l2"]["gap_high"]) == pytest.approx(4 + 12.7062047 * 2, rel=1e-5)
    assert "| er | 22.00 | 22.00 | 0.00 | 0.0 | same values | – | – | 2 | 1 |" in text  # no test of a run with itself
    # ρ: (12, 10, 10) against (11, 20, 40): ranks 3 1.5 1.5 and 1 2 3; (∞, 25, 21) against (5, 6, 7); all ∞
    assert float(gaps["l2"]["spearman"]) == pytest.approx(-1.5 / 3**0.5, rel=1e-5)
    assert [gaps[m]["spearman"] for m in ("si", "er", "mas")] == ["-1", "", ""]
    # 20 22 34 ∞ against 24 22 32 ∞: of six pairs one turns round
    assert [gaps[m]["rank_conventional"] for m in ("l2", "er", "si", "mas")] == ["1", "2", "3", "4"]
    assert [gaps[m]["rank_gtep"] for m in ("l2", "er", "si", "mas")] == ["2", "1", "3", "4"]
    assert float(gaps["l2"]["kendall"]) == pytest.approx((5 - 1) / 6, rel=1e-5)
    assert "cannot go under p = 0.5" in text  # two orders

    # hours: 1800 s a run; of a failed one the last second of each task, 900 + 900
    hours = {(r["tuned_on"], r["method"]): r["hours"] for r in bench.rows("cost.csv")}
    assert hours[a, "l2"] == "3.0000" and hours[a, "mas"] == "3.0000" and hours[b, "er"] == "1.0000"
    assert (bench.folder / "results/gtep/protocols.png").stat().st_size > 5000
    assert f"| 1, on {a} | digits (0-4) | classifier-0-4 |" in text and f"| 2, on {b} | digits (5-9) |" in text
    # a failed run is not tried again, nor a finished one
    before = len(bench.ledger())
    again = bench.run("--methods", "l2", "si", "er", "mas", *DIGITS, "--trials", 3, "--orders", 1, 2, "--both")
    assert (again.returncode, again.stderr) == (0, "") and len(bench.ledger()) == before
    assert (bench.folder / "results/gtep/report.md").read_text() == text


def test_without_both_the_tuned_score_is_the_conventional_one(bench):
    done = bench.run("--methods", "l2", "ncl", *DIGITS, "--trials", 2, "--orders", 3, "--out", "o", "--space", "full",
                     "--", "--steps", 100)  # fmt: skip
    assert done.returncode == 0, done.stderr
    begun = [flags for what, flags in bench.ledger() if what == "begin"]
    assert collections.Counter((f["dataset"], f["method"]) for f in begun) == {
        ("digits:0-4", "l2"): 2, ("digits:0-4", "ncl"): 2, ("digits:5-9", "l2"): 1, ("digits:5-9", "ncl"): 1,
    }  # fmt: skip
    first = gtep.trial_values("ncl", "full", 1)
    ncl = next(f for f in begun if f["method"] == "ncl")
    assert (float(ncl["lr"]), int(ncl["batch_size"]), int(ncl["steps"])) == (
        0.003 * first["lr"], round(64 * first["batch_size"]), round(100 * first["length"]))  # fmt: skip
    rows = {r["method"]: r for r in bench.rows("protocols.csv", "o")}
    assert rows["ncl"]["conventional"] == "18" and rows["ncl"]["gap"] == ""
    text = (bench.folder / "o/report.md").read_text()
    assert "The interval is Student's t over 1 order." in text
    assert "training flags `--steps 100`. FID of 256 images a task" in text


def test_concepts_are_chosen_by_the_larger_dino_average(bench):
    """A failed run is worst, though its score is infinite; the gap is positive where the usual protocol flatters."""
    train = TRAIN.replace('"epochs": None}', '"base": flags.get("base", "dreambooth"), "model": "tiny", "data": "d"}')
    (bench.folder / "train_ddim.py").unlink()
    (bench.folder / "train_concepts.py").write_text(train.replace('/ "ddim" /', '/ "dreambooth" /'))
    score = SCORE.replace('f"accuracy,{about},1.5,0.5,-4.5"', 'f"CLIP,{about},1,1,1"').replace("FID,", "DINO,")
    (bench.folder / "eval_metrics.py").write_text(score)
    values = [gtep.trial_values("l2", "method", i)["l2_weight"] for i in (1, 2, 3)]
    bench.plan(f"""
    import json
    weights = {values!r}
    tuning = {{"a": [60, 70, 90], "b": [75, 65, 50]}}
    fresh = {{"a": [61, 71, 91], "b": [74, 66, 51]}}
    def afq(flags):
        score = (fresh if int(flags["seed"]) > 1000 else tuning)[flags["dataset"][-1]]
        return score[weights.index(float(flags["l2_weight"]))] + int(flags["order"]) if "l2_weight" in flags else 72
    def wrong(flags):
        if flags["order"] == "2" and flags.get("l2_weight") == str(weights[2]) and flags["dataset"][-1] == "a":
            return 1, "loss is nan"
    """)
    a, b = pictures(bench.folder / "p/a", "my_dog", "my_cup"), pictures(bench.folder / "p/b", "cat", "hat")
    plan = ("--backbone", "concepts", "--methods", "l2", "er", "--tune", a, "--eval", b, "--trials", 3, "--orders", 1,
            2, "--both")  # fmt: skip
    done = bench.run(*plan, "--", "--base", "custom_diffusion")
    assert done.returncode == 0, done.stderr
    flags = [f for what, f in bench.ledger() if what == "begin"]
    assert {f["base"] for f in flags} == {"custom_diffusion"} and {f["select"] for f in flags} == {"last"}
    text = (bench.folder / "results/gtep/report.md").read_text()
    assert "concepts, space `method`" in text and "DINO of 256 images a task, larger is better" not in text
    assert "DINO of 20 images a task, larger is better" in text
    won = {r["tuned_on"]: r for r in bench.rows("results.csv") if (r["method"], r["judged_on"]) == ("l2", "b")}
    assert won["a"]["values"] == f"l2_weight={values[1]:.6g}"  # 70: the 90 lost an order
    assert won["b"]["values"] == f"l2_weight={values[0]:.6g}"
    gaps = {r["method"]: r for r in bench.rows("protocols.csv")}
    assert gaps["l2"]["gap"] == "8" and gaps["l2"]["gap_percent"] == number(100 * 8 / 75.5)
    assert (gaps["l2"]["rank_conventional"], gaps["l2"]["rank_gtep"]) == ("1", "2")  # 75.5 and 67.5 against 72
    assert "gap = conventional − GTEP" in text and (bench.folder / "results/gtep/protocols.png").stat().st_size > 5000
    # the same category under other names, and flags that are gtep's own
    (b / "concepts.json").write_text(json.dumps({"cat": {"category": "Dog"}}))
    (a / "concepts.json").write_text(json.dumps({"my_dog": {"category": "dog"}}))
    one_line(bench.run(*plan), 2, "share the class 'dog'")
    one_line(bench.run(*plan[:-1], "--out", "o", "--", "--seed", 3), 2, "--seed after --")


def test_larger_is_better_by_hand():
    inf = float("inf")
    trials = [{"score": s} for s in (1, 3, 3, 2)]
    assert gtep_report.best_trial(trials, "DINO") is trials[1] and gtep_report.best_trial(trials, "FID") is trials[0]
    assert gtep_report.mean_score([{"AFQ": 1}, {"AFQ": inf}], "DINO") == -inf
    assert gtep_report.best_trial([{"score": -inf}], "DINO") is None
    assert gtep_report.ranks([2, 1, -inf, 2], -1) == [1, 3, 4, 1]


# --------------------------------------------------------------------------------- killed, shared, stopped


def test_killed_then_shared_by_two_processes(bench):
    plan = ("--methods", "l2", "er", *DIGITS, "--trials", 3, "--orders", 1, 2)
    assert bench.run(*plan, "--out", "unbroken").returncode == 0
    whole = bench.ledger()
    assert len(whole) == 2 * (3 * 2 + 2 + 2 * 2)
    (bench.folder / "ledger").unlink()
    with open(bench.folder / "plan.py", "a") as file:  # the third takes longer than two programs take to start
        file.write("\nbegun = open('ledger').read().count('begin') if __import__('os').path.exists('ledger') else 0\n"
                   "seconds = 3 if begun == 2 else 0.1\n")  # fmt: skip
    first = subprocess.Popen(bench.command(*plan, "--out", "o"), cwd=bench.folder, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while sum(what == "begin" for what, _ in bench.ledger()) < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    first.send_signal(signal.SIGKILL)  # the training that it started goes on without it
    first.wait()
    assert len(bench.ledger()) < len(whole)
    both = [subprocess.Popen(bench.command(*plan, "--out", "o"), cwd=bench.folder, stdout=subprocess.PIPE, text=True)
            for _ in range(2)]  # fmt: skip
    shown = [process.communicate(timeout=120)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert all(re.search(r"order \d seed \d+: AFQ", text) for text in shown)  # each did something
    key = lambda entry: json.dumps([entry[0], {k: v for k, v in entry[1].items() if k != "out"}])  # noqa: E731
    assert sorted(map(key, bench.ledger())) == sorted(map(key, whole))  # each run begun once, and ended once
    for name in ("report.md", "trials.csv", "results.csv", "protocols.csv", "cost.csv"):
        assert (bench.folder / "o" / name).read_bytes() == (bench.folder / "unbroken" / name).read_bytes()


def test_what_is_not_the_methods_fault_stops_everything(bench):
    bench.plan("afq = lambda flags: 1\nwrong = lambda flags: (2, 'no data: get them')")
    done = bench.run("--methods", "l2", *DIGITS, "--trials", 2, "--orders", 1)
    one_line(done, 2, "no data: get them", "output.txt")
    assert not list(bench.folder.rglob("FAILED"))
    bench.plan("afq = lambda flags: 1\nwrong = lambda flags: (2, 'no data') if '5-9' in flags['dataset'] else None")
    one_line(bench.run("--methods", "er", *DIGITS, "--orders", 1), 2, "no data")
    assert "| digits_0-4 | er | 1 of 1 |" in (bench.folder / "results/gtep/report.md").read_text()
    for code, said, shown in (
        (1, "OSError: [Errno 28] No space left on device", "No space left"),
        (1, "RuntimeError: CUDA error: unspecified\\nCompile with TORCH_USE_CUDA_DSA", "CUDA error: unspecified"),
        (130, "interrupted", "interrupted"),
    ):
        bench.plan(f"afq = lambda flags: 1\nwrong = lambda flags: ({code}, {said!r})".replace("\\\\n", "\\n"))
        one_line(bench.run("--methods", "l2", *DIGITS, "--trials", 2, "--orders", 1), 1, shown, "output.txt")
    bench.plan("afq = lambda flags: 1\nunscored = lambda: True")
    one_line(bench.run("--methods", "l2", *DIGITS, "--trials", 2, "--orders", 1), 1, "cannot score this", "output.txt")
    assert not list(bench.folder.rglob("FAILED"))
    bench.plan("afq = lambda flags: 3")
    assert bench.run("--methods", "l2", *DIGITS, "--trials", 2, "--orders", 1).returncode == 0


def test_a_method_of_which_all_fails_is_reported(bench):
    bench.plan("wrong = lambda flags: (1, 'loss is nan')")
    done = bench.run("--methods", "ncl", *DIGITS, "--orders", 1)
    assert (done.returncode, done.stderr) == (0, "")
    assert "| digits_0-4 | ncl | 1 of 1 | 1 of 1 | none: all trials failed | – | – |" in done.stdout
    assert bench.rows("results.csv")[0]["runs"] == "0" and len(bench.ledger()) == 1
    # code that changed since is said, once, and in the report
    with open(bench.folder / "train_ddim.py", "a") as file:
        file.write("# other\n")
    again = bench.run("--methods", "ncl", *DIGITS, "--orders", 1)
    assert again.returncode == 0 and len(bench.ledger()) == 1
    assert again.stderr.startswith("note: code has changed since") and again.stderr.count("\n") == 1
    assert "trained before the code changed: train_ddim.py." in again.stdout


def test_a_training_that_is_killed_is_taken_up_while_it_gets_on(bench):
    bench.plan("""
    def wrong(flags):
        tasks = len(list(folder.glob("task*")))
        if flags["method"] == "si" or (flags["method"] == "l2" and tasks < 3):
            (folder / f"task{tasks + 1 if flags['method'] == 'l2' else 1}").mkdir(exist_ok=True)
            (folder / f"task{tasks + 1}" / "SHA256SUMS").touch() if flags["method"] == "l2" else None
            os.kill(os.getpid(), 9)
    afq = lambda flags: 3
    """)
    done = bench.run("--methods", "l2", "si", *DIGITS, "--trials", 1, "--orders", 1)
    assert (done.returncode, done.stderr) == (0, "")
    found = {r["method"]: (r["AFQ"], r["failed"]) for r in bench.rows("trials.csv")}
    assert found == {"l2": ("3", ""), "si": ("", "was killed by signal 9, twice")}
    assert sum(what == "begin" and f["method"] == "si" for what, f in bench.ledger()) == 2


def test_a_broken_checkpoint_is_trained_again_and_a_run_in_use_is_waited_for(bench):
    bench.plan("""
    def once(name):
        if not os.path.exists(name):
            open(name, "w").close()
            return True
    broken = lambda: once("a")
    wrong = lambda flags: (2, "x is in use by another process; wait") if once("b") else None
    afq = lambda flags: 3
    """)
    done = bench.run("--methods", "er", *DIGITS, "--orders", 1)
    assert (done.returncode, done.stderr) == (0, "note: waiting for 1 runs that other processes do\n")
    ends = [(what, flags["dataset"]) for what, flags in bench.ledger() if what == "end"]
    assert ends == [("end", "digits:0-4"), ("end", "digits:0-4"), ("end", "digits:5-9")]
    assert not list(bench.folder.rglob("FAILED"))


def test_only_what_this_command_said_counts(bench):
    """The first is refused, the next dies without a word: what the first said is not the reason of the next."""
    bench.plan("""
    def wrong(flags):
        begun = open("ledger").read().count("begin")
        return (2, "x is in use by another process; wait") if begun == 1 else (1, "")
    """)
    done = bench.run("--methods", "ncl", *DIGITS, "--orders", 1)
    assert done.returncode == 0, done.stderr
    assert [r["failed"] for r in bench.rows("trials.csv")] == ["ended with 1"]


def test_interrupted(bench):
    """Ctrl-C reaches all processes of a terminal: one line, nothing counted as failed, and it can go on."""
    bench.plan("afq = lambda flags: 3\nseconds = 30")
    flags = ("--methods", "l2", *DIGITS, "--trials", 2, "--orders", 1, "--jobs", 2)
    process = subprocess.Popen(bench.command(*flags), cwd=bench.folder, stderr=subprocess.PIPE, text=True,
                               start_new_session=True)  # fmt: skip
    deadline = time.monotonic() + 60
    while len(bench.ledger()) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    assert process.communicate(timeout=20)[1].splitlines()[-1].startswith("error: ") and process.returncode in (1, 130)
    assert not list(bench.folder.rglob("FAILED")) and not list(bench.folder.rglob("KILLED"))


def test_other_scores_in_the_same_folder(bench):
    """--num_samples scores anew and trains nothing again; scores that do not compare never meet."""
    plan = ("--methods", "l2", *DIGITS, "--orders", 1)
    bench.plan("afq = lambda flags: float(flags['l2_weight'])\nreferences = ['test', 'train']")
    assert bench.run(*plan, "--trials", 2, "--num_samples", 64).returncode == 0
    count = len(bench.ledger())
    assert bench.run(*plan, "--trials", 2, "--list").stdout.count("--num_samples 256") == 2
    assert bench.run(*plan, "--trials", 3).returncode == 0  # back and forth
    assert len(bench.ledger()) - count in (2, 4)  # the third trial, and its winner if it is another
    summaries = [p.read_text() for p in bench.folder.glob("results/gtep/runs/digits_0-4/*/scores/summary.csv")]
    assert len(summaries) == 3 and all("FID,256," in text for text in summaries)
    assert not bench.run(*plan, "--trials", 2, "--num_samples", 64, "--list").stdout
    bench.plan("afq = lambda flags: 3\nfeatures = 'classifier-other'")  # trained anew, in another --data
    refused = bench.run(*plan, "--trials", 4)
    one_line(refused, 2, "digits:0-4 do not compare", "classifier-0-4", "classifier-other")
    assert "4 of 8" not in (bench.folder / "results/gtep/report.md").read_text()


def test_listed_commands_reach_phase_2_though_one_diverges(bench):
    """Through bash, with a space in --out; without --list in between."""
    bench.plan("""
    def wrong(flags):
        if flags["method"] == "l2" and flags["order"] == "1" and flags["seed"] == "1":
            (folder / "DIVERGED").touch()
            return 1, "loss is nan"
    afq = lambda flags: 3
    """)
    plan = ("--methods", "l2", "er", *DIGITS, "--trials", 2, "--orders", 1, 2, "--out", "a b")
    todo = []
    for _ in range(3):
        listed = bench.run(*plan, "--list")
        assert listed.returncode == 0
        todo.append(len(listed.stdout.splitlines()))
        for line in listed.stdout.splitlines():
            subprocess.run(["bash", "-c", line], cwd=bench.folder, capture_output=True)
    assert todo == [6, 2, 0]  # l2 has no trial that is whole
    assert not (bench.folder / "a b/report.md").exists() and bench.run(*plan).returncode == 0
    failed = [(r["method"], r["order"], r["failed"]) for r in bench.rows("trials.csv", "a b") if r["failed"]]
    assert failed == [("l2", "1", "diverged")] * 2 and not list(bench.folder.rglob("FAILED"))


# ----------------------------------------------------------------------------------------- guards and input


def pictures(folder, *classes):
    from PIL import Image

    for c in classes:
        (folder / c).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(folder / c / "1.png")
    return folder


def test_tuning_works_with_the_other_data_away(bench):
    plan = ("--methods", "l2", "--tune", "digits:0-4", "--eval", "./pics/birds", "--trials", 2, "--orders", 1, "--both",
            "--extractor", "classifier")  # fmt: skip
    away = bench.run(*plan)
    assert away.returncode == 2 and "phase 1 is done, phase 2 needs ./pics/birds" in away.stderr
    assert "Traceback" not in away.stderr and away.stderr.count("\n") == 2  # a note, and the error
    assert {f["dataset"] for _, f in bench.ledger()} == {"digits:0-4"} and len(bench.ledger()) == 4
    report = (bench.folder / "results/gtep/report.md").read_text()
    assert "| digits_0-4 | l2 | 2 of 8 | 0 of 2 |" in report and "## Phase 2" not in report
    (bench.folder / "results/gtep/report.md").unlink()
    assert bench.run(*plan, "--list").returncode == 2 and not (bench.folder / "results/gtep/report.md").exists()
    pictures(bench.folder / "pics/birds", *"vwxyz")
    done = bench.run(*plan)
    assert done.returncode == 0, done.stderr
    assert len(bench.ledger()) == 4 + 4 + 2 * len({r["values"] for r in bench.rows("results.csv")}) * 2
    # data that are there to be described, but cannot be read: what is done is reported, and nothing older beside it
    bench.plan("afq = lambda flags: 1\nwrong = lambda flags: (2, 'no data') if 'pics' in flags['dataset'] else None")
    one_line(bench.run(*plan[:7], 3, *plan[8:]), 2, "no data")
    report = (bench.folder / "results/gtep/report.md").read_text()
    assert "| digits_0-4 | l2 | 3 of 8 | 0 of 3 |" in report and "| birds" not in report
    assert not list(bench.folder.glob("results/gtep/results.csv")) + list(bench.folder.glob("results/gtep/protoc*.csv"))


def test_folders_of_one_name_and_what_a_method_refuses(bench):
    a, b = pictures(bench.folder / "p/x", *"vw"), pictures(bench.folder / "q/x", *"mn")
    plan = ("--methods", "er", "l2", "--tune", a, "--eval", b, "--trials", 1, "--orders", 1, "--extractor")
    bench.plan("refused = lambda flags: 'not with l2' if flags['method'] == 'l2' else None")
    one_line(bench.run(*plan, "classifier"), 2, "l2: not with l2")
    assert not bench.ledger()  # before any training
    bench.plan("afq = lambda flags: 3")
    done = bench.run(*plan, "classifier")
    assert done.returncode == 0, done.stderr
    assert f"# Tuned on {a}, judged on {b}\n" in done.stdout and f"| 2, on {b} | " in done.stdout


def test_weights_that_only_the_other_scenario_needs(monkeypatch, tmp_path):
    alike = {"classes": 5, "tasks": 5, "size": 8, "preset": "tiny"}
    monkeypatch.setattr(gtep, "described", lambda args, dataset, method: alike | {"dataset": dataset})
    monkeypatch.setattr(gtep, "do_all", lambda *_: pytest.fail("training"))
    with pytest.raises(common.UserError, match="no Inception weights: none"):
        gtep.main(["--methods", "er", *DIGITS[:2], "--eval", "cifar10:0-4", "--inception_weights", "none",
                   "--out", str(tmp_path)])  # fmt: skip


def test_other_errors_than_a_held_lock_are_not_in_use(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(common.fcntl, "flock", flock)
    with pytest.raises(OSError, match="No locks"), common.locked(tmp_path):
        pass


def test_scenarios_that_share_or_differ_are_refused(bench, monkeypatch):
    def refused(tune, judge, *words):
        one_line(bench.run("--methods", "l2", "--tune", tune, "--eval", judge), 2, *words)
        assert not (bench.folder / "results").exists()

    refused("digits:0-5", "digits:4-9", "share the classes 4 to 5")
    refused("digits:0-4", "digits:4-8", "share the classes 4 to 4")
    refused("digits:0-4", "digits:5-8", "5 classes", "has 4")
    a, b = (pictures(bench.folder / "p" / name, *names) for name, names in (("a", "vwxyz"), ("b", "mnopV")))
    refused(a, b, "share the class 'v'")
    refused(a, f"{bench.folder}/p/../p/a", "share the classes 0 to 4")
    assert [gtep.is_away(d) for d in ("birds", "x/birds", "x/birds:0-4", str(a), f"{a}:0-4")] == [0, 1, 1, 0, 0]
    monkeypatch.setenv("HOME", str(bench.folder))
    assert [gtep.is_away(d) for d in ("~/p/a", "~/p/a:0-1", "~/p/none")] == [0, 0, 1]
    first, second = (gtep.class_names(gtep.streams.scenario(f"cifar10:{span}")) for span in ("0-1", "2-9"))
    assert first == {"airplane", "automobile"} and len(second) == 8 and not first & second
    alike = {"dataset": "digits:0-4", "classes": 5, "tasks": 5, "size": 8, "preset": "tiny"}
    for flag, value in (("tasks", 1), ("size", 32), ("classes", 10), ("preset", "S")):
        with pytest.raises(common.UserError, match="the same configuration"):
            gtep.check_pair(alike, alike | {"dataset": "digits:5-9", flag: value})
    gtep.check_pair(alike, alike | {"dataset": "digits:5-9"})


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--methods", "nonsense"], ["unknown method 'nonsense'"]),
        (["--trials", "0"], ["--trials", "between 1"]),
        (["--orders", "6"], ["--orders", "between 1 and 5"]),
        (["--space", "all"], ["--space", "method", "full"]),
        (["--space", "full", "--trials", "106"], ["--trials 106", "105 settings"]),
        (["--out", __file__], ["--out", "is a file"]),
        (["--", "--seed", "3"], ["--seed after --"]),
        (["--", "--select=best"], ["--select after --"]),
        (["--", "--l2_weight", "3"], ["--l2_weight after --"]),
        (["--steps", "3"], ["unrecognized", "--steps"]),
    ],
)
def test_bad_flags(flags, words, capsys):
    with pytest.raises(SystemExit) as end, common.one_line_errors():
        gtep.parse_args(["--methods", "l2", *DIGITS, *flags])
    error = capsys.readouterr().err
    assert end.value.code == 2 and error.count("\n") == 1
    assert all(word in error for word in words), error


def test_help_comes_before_torch():
    shown = subprocess.run([sys.executable, ROOT / "gtep.py", "--help"], capture_output=True, text=True,
                           env={**os.environ, "PYTHONPROFILEIMPORTTIME": "1"})  # fmt: skip
    assert shown.returncode == 0 and "torch" not in shown.stderr.split() and "scipy.stats" not in shown.stderr
    options = re.split(r"\n  --", shown.stdout.split("options:")[1])[1:]
    assert len(options) == 18 and all("default" in option for option in options), options


# -------------------------------------------------------------------------------------------- the commands


@pytest.mark.parametrize("backbone, own", [("ddim", "ddim_steps"), ("stylegan2", "r1_gamma")])
def test_the_real_scripts_say_what_is_needed_of_them(backbone, own):
    flags = ("--backbone", backbone, "--methods", "er", *DIGITS, "--data", "d", "--extractor", "inception")
    args = gtep.parse_args([*flags, "--inception_weights", "w", "--num_samples", "64", "--", "--epochs", "7"])
    args.base = gtep.described(args, "digits:0-4", "er")
    about = {flag: args.base[flag] for flag in ("dataset", "classes", "tasks", "size", "preset", "steps", "epochs")}
    assert list(about.values()) == ["digits:0-4", 5, 5, 8, "tiny", None, 7] and own in args.base
    run = gtep.tried(args, "digits:0-4", "er")[0]["runs"][0]
    train, score = (" ".join(command[1:]) for command in gtep.commands(args, run))
    assert train.startswith(f"{ROOT}/train_{backbone}.py --dataset digits:0-4 ") and " --data d " in train
    assert train.endswith("--epochs 7") and " --data d " in score
    assert "--extractor inception --num_samples 64 --sampling_seed 0 --inception_weights w" in score
    before = gtep.place(args, run)
    args.base["lr"] *= 2  # another preset: another run
    assert gtep.place(args, run) != before


def test_readme_commands_run_as_they_stand(bench):
    """GNU parallel and sbatch are stood in for by a few lines each: what is tested is what they are handed."""
    section = (ROOT / "README.md").read_text().split("## Tune on one scenario")[1].split("\n## ")[0]
    block = re.findall(r"```bash\n(.*?)```", section, re.S)[0]
    setting, *lines = [line for line in block.splitlines() if "gtep.py" in line or line.startswith("plan=")]
    assert setting.startswith("plan=") and len(lines) == 4
    tools = bench.folder / "tools"
    tools.mkdir()
    fakes = {
        "python": f'exec {shlex.quote(sys.executable)} "$@"',
        "parallel": 'while IFS= read -r line; do bash -c "$line" </dev/null; done',
        "sbatch": 'n=${1#--array=1-}; for k in $(seq "$n"); do SLURM_ARRAY_TASK_ID=$k bash -c "$3"; done',
    }
    for name, code in fakes.items():
        (tools / name).write_text(f"#!/bin/bash\n{code}\n")
        (tools / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"}

    def shell(line):
        done = subprocess.run(["bash", "-euo", "pipefail", "-c", f"{setting}\n{line}"], cwd=bench.folder, text=True,
                              capture_output=True, env=environment)  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done

    shell(lines[0])
    whole, report = len(bench.ledger()), (bench.folder / "results/gtep/report.md").read_text()
    for line, tool in zip(lines[1:], ("xargs", "parallel", "sbatch"), strict=True):
        shutil.rmtree(bench.folder / "results")
        (bench.folder / "ledger").unlink()
        assert tool in line
        shell(line)  # phase 1
        shell(line)  # phase 2
        assert len(bench.ledger()) == whole
    shell(lines[0])
    assert len(bench.ledger()) == whole and (bench.folder / "results/gtep/report.md").read_text() == report


def test_run_all_demo(bench):
    shutil.copy(ROOT / "run_all.sh", bench.folder)
    environment = {**os.environ, "PYTHON": sys.executable, "JOBS": "2"}

    def demo(*flags):
        done = subprocess.run(["bash", "run_all.sh", *flags, "gtep_demo"], cwd=bench.folder, text=True,
                              capture_output=True, env=environment)  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    listed = demo("--list").splitlines()
    assert len(listed) == 20 and all("train_ddim.py" in line for line in listed)
    assert "Kendall" in demo() and len(bench.rows("protocols.csv", "results/gtep_demo")) == 4
