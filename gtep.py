"""The two-phase protocol: hyper-parameters are tuned on one scenario, the method is judged on another.

    python gtep.py --methods ewc er --tune digits:0-4 --eval digits:5-9 --trials 8 --orders 1 2 3
    python gtep.py --methods ewc er --tune cifar10:0-4 --eval cifar10:5-9 --space full --both -- --epochs 50
    python gtep.py --backbone concepts --methods ewc l2 --tune toys --eval more_toys -- --base custom_diffusion

Phase 1: N trials of each method on D^HT (--tune), in every class order; the best by mean AFQ wins: FID, smaller is
better, or with --backbone concepts the DINO average, larger is better (CLIP sees little more than the category, so a
concept that is forgotten for its category would cost next to nothing). A trial with a run that failed is worst; of
equal trials the first wins. Phase 2: the winner on D^E (--eval), which has as many tasks, classes and pixels but other
data, once an order and with fresh seeds: that is the result. With --both the same trials are run on D^E too, and the
winners of both in both scenarios:

    gap = (tuned on D^HT) − (tuned on D^E), both judged on D^E: how much the usual protocol flatters a method
          (with the other sign where larger is better)

Cha et al., *Hyperparameters in Continual Learning: A Reality Check*; docs/fidelity.md says where we differ.
What follows -- goes to the training script, the same for all runs. Each run is a run folder of that script below
OUT/runs; it is trained and scored by processes, as from the command line, with --select last: choosing checkpoints by
the reported metric would be tuning. The same command again goes on where it was stopped, and several processes may
share one OUT: none repeats what another has done or is doing.

From top to bottom: what is tried · scenarios · runs · flags · the two phases. gtep_report.py selects and reports.
"""

import contextlib
import json
import math
import os
import shlex
import subprocess
import sys
import time
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import NamedTuple

import alignment
import common
import concepts
import fid
import gtep_report
import runfolder
import streams

# Phase 2 repeats nothing of phase 1 but the class order: the best of N scores is lucky in its weights, its batches and
# its samples, and would be so again. Its seeds, of training (phase 1: the order) and of sampling (0), lie so far above.
FRESH = 1000
# What --space full tries beside a method's own `search`: factors of the training flags as they are in both scenarios.
COMMON = {"lr": [1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8], "batch_size": [1 / 4, 1 / 2, 1, 2, 4], "length": [1 / 2, 1, 2]}
# In the output of a training that failed: not the method's fault, so it stops everything and counts for nothing.
OF_THE_MACHINE = ("cannot write", "No space left", "out of memory", "allocate memory", "MemoryError", "CUDA error",
                  "ModuleNotFoundError")  # fmt: skip
OWN = ("dataset", "method", "order", "seed", "select", "out", "data", "device", "inception_weights", "dry_run")


# ------------------------------------------------------------------------------------------- what is tried


def search_space(method, space):
    """{flag: the values of its list}; of COMMON they are factors."""
    return runfolder.method_class(method).search | (COMMON if space == "full" else {})


def trial_values(method, space, i):
    """Values of trial i (from 1): a function of method, space and i alone, so the same in every scenario.

    Each list is shuffled once, and gone through again and again; where the lists would meet in the same way again,
    one is turned by one place. So no value comes twice before its list is through, and no combination before all are.
    """
    values, so_far = {}, 1  # so_far: combinations of the lists before this one
    for flag, listed in search_space(method, space).items():
        shuffled = sorted(listed, key=lambda value: common.hash32((method, space, flag, value)))
        turn = (i - 1) // math.lcm(so_far, len(listed)) % math.gcd(so_far, len(listed))
        values[flag] = shuffled[(i - 1 + turn) % len(listed)]
        so_far *= len(listed)
    return values


def combinations(method, space):
    return math.prod(map(len, search_space(method, space).values()))


def at_the_edge(method, space, values):
    """Flags whose value is the smallest or largest of its list: the optimum may lie beyond it."""
    lists = search_space(method, space)
    numbers = {flag: value for flag, value in values.items() if not isinstance(value, str)}
    return [flag for flag, value in numbers.items() if value in (min(lists[flag]), max(lists[flag]))]


def training_flags(values, base):
    """((flag, value), …) for the training script. base: its flags as they are without tuning."""
    flags = dict(values)
    if "length" in flags:
        for flag in ("lr", "batch_size", "epochs" if base.get("epochs") else "steps"):
            factor = flags.pop("length" if flag in ("epochs", "steps") else flag)
            flags[flag] = base[flag] * factor if flag == "lr" else max(1, round(base[flag] * factor))
    return tuple(flags.items())


def written(flags):
    texts = [f"{flag}={value if isinstance(value, str) else f'{value:.6g}'}" for flag, value in flags]
    return ", ".join(texts) or "–"


# ---------------------------------------------------------------------------------------------- scenarios


def described(args, dataset, method):
    """The training flags of a scenario as its script resolves them, which needs none of its data."""
    command = [sys.executable, script(args), "--dry_run", "--dataset", dataset, "--method", method]
    command += ["--select", "last", "--data", args.data, "--device", args.device, *args.training]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"{script(args)} --dry_run ended with {done.returncode}"]
        common.fail(f"{dataset} {method}: {lines[-1].removeprefix('error: ')}")
    return json.JSONDecoder().raw_decode(done.stdout[done.stdout.index("{") :])[0]


def is_away(dataset):
    """Whether it is a path at which nothing is: data of the user that are kept elsewhere until phase 2."""
    whole, folder = (Path(os.path.expanduser(text)) for text in (dataset, dataset.rpartition(":")[0] or dataset))
    return len(folder.parts) > 1 and not folder.exists() and not whole.exists()


def class_names(scene):
    if scene.folder:
        names = [name for name, _ in streams.class_folders(scene.folder)]
    else:
        names = streams.frozen_names(scene.dataset)
    return {name.lower() for name in names[scene.first : scene.last + 1] if not name.isdigit()}  # numbers tell nothing


def concept_names(scene, base, cache):
    """Names and categories: another dog is no unseen class to a model that has been tuned on a dog."""
    names = streams.load_data(scene, 1, cache, read=False).classes
    known = concepts.concepts(scene, names, base, cache)
    return {name.lower() for concept in known for name in (concept.name, concept.category)}


def check_pair(tune, judge):
    """Refuses two scenarios that differ in more than their data, or share classes. Both as `described`."""
    for flag, what in (("classes", "classes"), ("tasks", "tasks"), ("size", "pixels a side"), ("preset", "as preset")):
        if tune[flag] != judge[flag]:
            common.fail(f"{tune['dataset']} has {tune[flag]} {what}, {judge['dataset']} has {judge[flag]}: the two "
                        "scenarios must have the same configuration")  # fmt: skip
    a, b = streams.scenario(tune["dataset"]), streams.scenario(judge["dataset"])
    source = (a.dataset, a.folder) == (b.dataset, b.folder)
    if source and a.first <= b.last and b.first <= a.last:
        common.fail(f"{tune['dataset']} and {judge['dataset']} share the classes {max(a.first, b.first)} to "
                    f"{min(a.last, b.last)}: D^E must be unseen")  # fmt: skip
    if "base" in tune:
        shared = concept_names(a, tune["base"], tune["data"]) & concept_names(b, judge["base"], judge["data"])
    else:
        shared = set() if source else class_names(a) & class_names(b)
    if shared:
        common.fail(f"{tune['dataset']} and {judge['dataset']} share the class '{min(shared)}': D^E must be unseen")


# --------------------------------------------------------------------------------------------------- runs


class Run(NamedTuple):
    """One training run with its scores."""

    dataset: str
    method: str
    flags: tuple  # ((flag, value), …) that were chosen for it
    order: int
    seed: int


def script(args):
    return str(common.ROOT / f"train_{args.backbone}.py")


def place(args, run):
    """The --out of its training, with nothing else in it; scores/ is what eval_metrics.py makes of it."""
    scene = streams.scenario(run.dataset).name
    preset = [args.base.get(flag) for flag in ("lr", "batch_size", "steps", "epochs")]  # another one: other runs
    key = f"{common.hash32((args.backbone, run.dataset, run.flags, *preset, *args.training)):08x}"
    return args.out / "runs" / scene / f"{run.method}-{key}-order{run.order}-seed{run.seed}"


def made(folder, name):
    """Files or folders of this name in the run folder that the training script has made below `folder`."""
    return list(folder.glob(f"*/*/*/*/{name}"))


def commands(args, run):
    """To train, and to score."""
    out = str(place(args, run))
    train = [sys.executable, script(args), "--dataset", run.dataset, "--method", run.method]
    train += ["--order", str(run.order), "--seed", str(run.seed), "--select", "last", "--out", out]
    train += ["--data", args.data, "--device", args.device, *args.training]
    train += [word for flag, value in run.flags for word in (f"--{flag}", str(value))]
    score = [sys.executable, str(common.ROOT / "eval_metrics.py"), out, "--out", f"{out}/scores", "--data", args.data]
    score += ["--device", args.device, "--extractor", args.extractor, "--num_samples", str(args.num_samples)]
    score += ["--sampling_seed", str(sampling_seed(run))]
    for flag in ("inception_weights", *alignment.KINDS):
        score += [f"--{flag}", getattr(args, flag)] if getattr(args, flag) else []
    return train, score


def features(args, dataset):
    """How the name of the features begins that score; those of the small world are known once it is built."""
    if args.backbone != "concepts":
        return fid.extractor_kind(dataset, args.extractor)
    return (
        "" if args.base["model"] == "tiny" else alignment.judges_name(alignment.wanted_models(args, args.base["model"]))
    )


def check_weights(args, datasets):
    """Ends here if the weights that score are missing, not after the first training."""
    if args.backbone == "concepts":
        if args.base["model"] != "tiny":
            alignment.check_models(alignment.wanted_models(args, args.base["model"]))
    elif "inception" in [fid.extractor_kind(dataset, args.extractor) for dataset in datasets]:
        fid.inception_weights(args.inception_weights)


def sampling_seed(run):
    return FRESH if run.seed >= FRESH else 0


def tried(args, dataset, method):
    """Its trials, as gtep_report.py takes them, still without outcomes; not more than there are combinations."""
    trials, of = [], combinations(method, args.space)
    for i in range(1, 1 + min(args.trials, of)):
        values = trial_values(method, args.space, i)
        flags = training_flags(values, args.base)
        runs = [Run(dataset, method, flags, order, order) for order in args.orders]
        edge = at_the_edge(method, args.space, values)
        folders = [place(args, run).relative_to(args.out).as_posix() for run in runs]
        trials.append({"values": written(flags), "edge": edge, "of": of, "runs": runs, "folders": folders})
    return trials


def outcome(args, run):
    """{"failed": why, or "", AFQ, AIQ, FR, what was read, hours of training}; None while something is left to do."""
    folder = place(args, run)
    config = next((common.read_json(path) for path in made(folder, "config.json")), {"code": {}})
    now = runfolder.code_hashes(script(args), run.method).items()
    if changed := {file for file, _ in config["code"].items() - now}:
        common.note(f"code has changed since some runs in {args.out} were trained; they are taken as they are")
    failed = (folder / "FAILED").exists()
    if failed or made(folder, "DIVERGED"):
        spent = {}  # seconds by task
        for row in (row for log in made(folder, "log.csv") for row in common.read_csv(log)):
            with contextlib.suppress(KeyError, TypeError, ValueError):  # a torn last line
                spent[row["task"]] = float(row["seconds"])
        why = (folder / "FAILED").read_text().strip() or "failed" if failed else "diverged"
        return gtep_report.LOST | {"failed": why, "changed": changed, "hours": sum(spent.values()) / 3600}
    # only scores of this call's features, images and reference: others may lie beside them
    wanted = {"metric": args.metric, "generated": str(args.num_samples), "reference": "train"}
    wanted |= {"sampling_seed": str(sampling_seed(run))}
    kind = features(args, run.dataset)
    rows = [row for row in common.read_csv(folder / "scores" / "summary.csv")
            if wanted.items() <= row.items() and row["extractor"].startswith(kind)]  # fmt: skip
    if not rows or not made(folder, "DONE"):
        return None
    if len(rows) > 1:
        common.fail(
            f"{folder} holds scores of several {kind or 'judges and'} features: remove its scores/ and its quality.csv"
        )
    costs = common.read_csv(folder / "scores" / "cost.csv")
    spent = [float(value) for row in costs for name, value in row.items() if name.endswith("_seconds")]
    scores = {measure: float(rows[0][measure] or "nan") for measure in gtep_report.MEASURES}  # one task: no FR
    about = {"read": f"{config['data']['name']} ({config['data']['digest']})", "features": rows[0]["extractor"]}
    return {"failed": "", **scores, **about, "changed": changed, "hours": sum(spent) / 3600}


def check_alike(found):
    """Refuses scores of one scenario that do not compare. found: {run: its outcome}."""
    seen = {}
    for run, about in found.items():
        pair = about["read"], about["features"]
        if not about["failed"] and (first := seen.setdefault(run.dataset, pair)) != pair:
            common.fail(f"scores on {run.dataset} do not compare: {' '.join(first)} and {' '.join(pair)}; choose "
                        "another --out, or, if the features alone differ, remove the scores/ of its runs")  # fmt: skip


def is_in_use(folder):
    """Whether a process trains or scores in it, be it one that a gtep.py left behind when it was killed."""
    for lock in made(folder, ".lock"):
        try:
            with common.locked(lock.parent):
                pass
        except common.UserError:
            return True
    return False


def do(args, run, children):
    """Trains and scores a run. True: it has an outcome; False: another process is at it; None: to be taken up again."""
    folder = place(args, run)
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(common.locked(folder))
        except common.UserError:
            return False
        if outcome(args, run):
            return True
        if is_in_use(folder):  # asked here, as the script could say so only after it has loaded PyTorch
            return False
        began = time.monotonic()
        train, score = commands(args, run)
        for command in (train, score):
            with open(folder / "output.txt", "ab+") as log:
                start = log.seek(0, 2)
                child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
                children.append(child)
                code = child.wait()
                log.seek(max(start, log.seek(0, 2) - 5000))  # what this command has said, not one before it
                said = log.read().decode(errors="replace").strip().splitlines()
            if not code:
                continue
            said = [line.removeprefix("error: ") for line in said]
            why = f"was killed by signal {-code}" if code < 0 else said[-1] if said else f"ended with {code}"
            if "in use by another process" in why:  # since it was asked
                return False
            if command is score and not made(folder, "DONE"):  # a checkpoint was found broken: it is trained again
                return None
            if outcome(args, run):  # it diverged
                break
            not_its_fault = next((line for line in said[::-1] if any(words in line for words in OF_THE_MACHINE)), "")
            if command is score or not_its_fault or code in (2, 130, -2, -15):  # a wrong flag, no data; told to end
                common.fail(f"{not_its_fault or why} ({folder}/output.txt)", 2 if code == 2 else 1)
            if code < 0:  # by a person, or for its memory: it counts if it comes again before one more task is learnt
                why, killed = f"{why}, twice", folder / "KILLED"
                tasks = str(len(made(folder, "task*[0-9]/SHA256SUMS")))
                if not killed.exists() or killed.read_text() != tasks:
                    common.write_file(killed, tasks.encode())
                    return None
            common.write_file(folder / "FAILED", f"{why}\n".encode())
            break
        found = outcome(args, run)
        if not found:
            common.fail(f"{folder} was trained, but not scored: see its output.txt", 1)
        told = f"failed: {found['failed']}" if found["failed"] else f"AFQ {found['AFQ']:.2f}"
        about = f"{run.dataset} {run.method} ({written(run.flags)}) order {run.order} seed {run.seed}"
        print(f"{about}: {told}, {time.monotonic() - began:.0f} s", flush=True)
        return True


def do_all(args, runs, phase):
    """Gives every run an outcome; goes on with others while one is in use, and waits for those at the end.

    With --list it prints the commands instead, and ends the program.
    """
    runs = list(dict.fromkeys(runs))
    left = [run for run in runs if not outcome(args, run)]
    about = f"phase {phase}: {len(left)} of {len(runs)} runs to do"
    if args.list and left:
        print(about, file=sys.stderr)
        for run in left:
            print(" && ".join(map(shlex.join, commands(args, run))))
        raise SystemExit(0)
    if left:
        print(about, flush=True)
    children = []
    with ThreadPoolExecutor(args.jobs) as pool:
        try:
            while left:
                futures = [pool.submit(do, args, run, children) for run in left]
                wait(futures, return_when=FIRST_EXCEPTION)
                failed = [f for f in futures if f.done() and f.exception()]
                if failed:
                    raise failed[0].exception()
                over = [f.result() for f in futures]
                left = [run for run, is_over in zip(left, over, strict=True) if not is_over]
                if not any(over) and False in over:
                    common.note(f"waiting for {over.count(False)} runs that other processes do")
                    time.sleep(1)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for child in children:
                child.terminate()
            raise


# -------------------------------------------------------------------------------------------------- flags


def parse_args(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    cut = argv.index("--") if "--" in argv else len(argv)
    p = common.Parser(description=__doc__)
    add = p.add_argument
    add(
        "--backbone",
        choices=("ddim", "stylegan2", "concepts"),
        default="ddim",
        help="which train_….py trains (default: ddim)",
    )
    add("--methods", nargs="+", required=True, metavar="METHOD", help="files of methods/ (no default)")
    add("--tune", required=True, metavar="SCENARIO", help="D^HT, as --dataset takes it (no default)")
    add("--eval", required=True, metavar="SCENARIO", help="D^E, as --dataset takes it (no default)")
    add("--trials", type=common.whole(1), default=8, help="trials of a method; methods with fewer values have as many "
        "trials as values, those with none one (default: 8)")  # fmt: skip
    add("--orders", type=common.whole(1, 5), nargs="+", default=[1, 2, 3], metavar="ORDER",
        help="class orders, 1-5 (default: 1 2 3)")  # fmt: skip
    add("--space", choices=("method", "full"), default="method", help="tune a method's own flags, or learning rate, "
        "batch size and training length too, of every method (default: method)")  # fmt: skip
    add("--both", action="store_true", help="tune on D^E too and judge all four pairs (default: no)")
    add("--out", default="results/gtep", help="folder of runs and report (default: results/gtep)")
    add("--jobs", type=common.whole(1, 1000), default=1, help="runs at once (default: 1)")
    add("--list", action="store_true", help="print the commands of the phase that are left to do, one a line, and run "
        "nothing (default: no)")  # fmt: skip
    add("--num_samples", type=common.whole(2), help="images sampled a task to score (default: that of eval_metrics.py)")
    add("--extractor", choices=("auto", "inception", "classifier"), default="auto", help="features of FID (default: "
        "auto = classifier for digits, else inception)")  # fmt: skip
    add("--inception_weights", help="pytorch-fid's weights file (default: where pytorch-fid keeps it)")
    alignment.add_flags(p)
    add("--data", default="data", help="folder of data sets and caches (default: data)")
    add("--device", default="auto", help="cpu, cuda or cuda:N (default: cuda if there is one)")
    args = p.parse_args(argv[:cut])
    args.training, args.out = argv[cut + 1 :], common.output_folder(args.out)
    args.metric = "DINO" if args.backbone == "concepts" else "FID"  # by which trials are chosen and methods judged
    args.methods, args.orders = list(dict.fromkeys(args.methods)), list(dict.fromkeys(args.orders))
    tuned = {flag for method in args.methods for flag in search_space(method, "method")}
    for word in args.training:
        flag = word.split("=")[0].removeprefix("--")
        if word in ("-h", "--help"):
            common.fail(
                f"{word} after --: python {Path(script(args)).name} --help lists the flags of the training script"
            )
        if word.startswith("--") and flag in {*OWN, *tuned}:
            common.fail(f"--{flag} after -- is not yours to set: gtep.py sets it")
    most = math.prod(map(len, COMMON.values()))
    if args.space == "full" and args.trials > most:
        common.fail(f"--trials {args.trials}: --space full has {most} settings of a method without flags of its own")
    return args


# ------------------------------------------------------------------------------------------- the two phases


def settle(args, tuned):
    """Winners in the scenarios in which all runs have an outcome; fills in outcomes and scores of their trials."""
    found = {run: outcome(args, run) for trials in tuned.values() for trial in trials for run in trial["runs"]}
    left = {run.dataset for run, about in found.items() if not about}
    check_alike({run: about for run, about in found.items() if about})
    winners = {}
    for (dataset, method), trials in tuned.items():
        if dataset not in left:
            for trial in trials:
                trial["outcomes"] = [found[run] for run in trial["runs"]]
                trial["score"] = gtep_report.mean_score(trial["outcomes"], args.metric)
            winners[dataset, method] = gtep_report.best_trial(trials, args.metric)
    return winners


def main(argv=None):
    args = parse_args(argv)
    args.base = described(args, args.tune, args.methods[0])
    args.judge = None if is_away(args.eval) else described(args, args.eval, args.methods[0])
    judge = alignment if args.backbone == "concepts" else fid
    args.num_samples = args.num_samples or judge.samples(args.base["preset"])  # as eval_metrics.py
    if args.judge:
        check_pair(args.base, args.judge)
    else:
        common.note(f"{args.eval} is not there: phase 1 needs nothing of it; that it fits is checked in phase 2")
    there = [about["dataset"] for about in (args.base, args.judge) if about]
    check_weights(args, there)
    tune, sides = there[0], there if args.both else there[:1]
    tuned = {(dataset, method): tried(args, dataset, method) for dataset in sides for method in args.methods}
    for method in args.methods[1:]:
        if not place(args, tuned[tune, method][0]["runs"][0]).exists():
            described(args, tune, method)  # ends here if it refuses the flags, or the backbone the method

    try:
        # ---- phase 1: a trial of every method before the second of any, so what cannot run shows early
        do_all(args, [run for side in sides for i in range(args.trials) for method in args.methods
                      for trial in tuned[side, method][i : i + 1] for run in trial["runs"]], 1)  # fmt: skip
        winners = settle(args, tuned)
        if not args.judge:
            common.fail(f"phase 1 is done, phase 2 needs {args.eval}: put it there and start again")

        # ---- phase 2: the headline first
        finals = {}
        for judged in reversed(sides) if args.both else there[1:]:
            for (source, method), best in winners.items():
                again = [run._replace(dataset=judged, seed=run.order + FRESH) for run in best["runs"]] if best else []
                finals[source, judged, method] = again
        do_all(args, [run for runs in finals.values() for run in runs], 2)
    except common.UserError:  # such as data of D^E that are not there: the scenarios that are done are reported
        winners = settle(args, tuned)
        if not args.list and (tune, args.methods[0]) in winners:
            gtep_report.write(args, {key: tuned[key] for key in winners}, winners, {})
        raise
    found = {run: outcome(args, run) for runs in finals.values() for run in runs}
    check_alike(found)
    if args.list:
        return common.note("nothing is left to do; without --list the report is written")
    lost = [gtep_report.LOST] * len(args.orders)
    finals = {key: [found[run] for run in runs] or lost for key, runs in finals.items()}
    gtep_report.write(args, tuned, winners, finals)
    print("\n" + (args.out / "report.md").read_text())


if __name__ == "__main__":
    with common.one_line_errors():
        main()
