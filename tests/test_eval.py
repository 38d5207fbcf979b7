"""Scores against hand-made matrices; the script twice over."""

import math
import shutil
import types

import numpy as np
import pytest
import torch
from conftest import SMALL
from PIL import Image

import common
import eval_metrics as em
import fid
import figures
import streams
import tables
import train_ddim


def test_continual_metrics_by_hand():
    rows = [[10], [20, 12], [40, 18, 11]]
    aq, aiq, afq, fr = em.continual_metrics(rows, larger_is_better=False)
    assert (aq, afq, fr) == ([10, 16, 23], 23, 18) and aiq == pytest.approx(16.333, abs=1e-3)
    negated = em.continual_metrics([[-v for v in row] for row in rows], larger_is_better=True)
    assert negated[3] == 18 and negated[2] == -23
    assert em.continual_metrics([[5]], larger_is_better=False) == ([5], 5, 5, None)


# ---------------------------------------------------------------------------------------------- the script


@pytest.fixture
def evaluate(tmp_path, cache, capsys):
    def run(*flags):
        em.main([str(tmp_path / "a"), "--out", str(tmp_path / "results"), "--data", str(cache), "--num_samples", "16",
                 *flags])  # fmt: skip
        return common.read_csv(tmp_path / "results" / "summary.csv"), capsys.readouterr().out

    return run


def test_other_measures_stand_beside_the_first(train, evaluate):
    """A second call with --metrics scores what is asked for and loses nothing; nearest training images are drawn."""
    run = train("a", "--method", "er")
    evaluate()
    first = {(r["trained_to"], r["task"], r["metric"]): r["value"] for r in common.read_csv(run / "quality.csv")}
    wanted = ("MIND", *fid.BALLS, "authentic", "floor", "CAS")
    summary, _ = evaluate("--metrics", *wanted)
    both = {(r["trained_to"], r["task"], r["metric"]): float(r["value"]) for r in common.read_csv(run / "quality.csv")}
    assert all(both[key] == float(value) for key, value in first.items())
    assert {m for _, _, m in both} == {"FID", "KID", "accuracy", *wanted} and len(both) == 3 * 11
    assert all(0 <= both[*cell, m] <= 1 for cell in (("1", "1"), ("2", "1"), ("2", "2"))
               for m in ("precision", "recall", "coverage", "authentic", "CAS"))  # fmt: skip
    assert both["1", "1", "floor"] == both["2", "1", "floor"] < both["1", "1", "FID"] and both["1", "1", "MIND"] > 0
    assert {r["metric"] for r in summary} == {m for _, _, m in both}
    assert [float(r["FR"]) for r in summary if r["metric"] == "floor"] == [0]
    shown = [Image.open(next(run.glob(f"{kind}_task1_*.png"))) for kind in ("final", "nearest")]
    assert shown[0].size == shown[1].size and shown[0].tobytes() != shown[1].tobytes()


def test_evaluation_twice(train, evaluate, tmp_path, monkeypatch):
    runs = [train("a", "--method", m) for m in ("ncl", "er", "ensemble")]
    first, shown = evaluate()
    for name in ("table_AFQ.md", "table_AIQ.csv", "table_FR.md", "cost.csv", "AQ_digits_0-3_ddim.png",
                 "quality_matrix_digits_0-3_ddim.png", "samples_digits_0-3_ddim.png"):  # fmt: skip
        assert (tmp_path / "results" / name).stat().st_size > 0
    assert len(first) == 9 and {r["variant"] for r in first} == {"ncl", "er", "ensemble"}
    assert all(float(r["FR"]) == 0 for r in first if r["variant"] == "ensemble")
    assert (tmp_path / "results" / "table_AFQ.md").read_text().strip() in shown
    scores = common.read_csv(runs[0] / "quality.csv")
    assert [(r["trained_to"], r["task"]) for r in scores if r["metric"] == "FID"] == [
        ("1", "1"),
        ("2", "1"),
        ("2", "2"),
    ]
    m = {(r["trained_to"], r["task"]): float(r["value"]) for r in scores if r["metric"] == "FID"}
    row = next(r for r in first if r["variant"] == "ncl" and r["metric"] == "FID")
    assert float(row["AFQ"]) == pytest.approx((m["2", "1"] + m["2", "2"]) / 2, rel=1e-4)
    assert float(row["FR"]) == pytest.approx(m["2", "1"] - m["1", "1"], rel=1e-3)
    assert [r["task"] for r in common.read_csv(runs[2] / "quality.csv")] == [
        "1",
        "1",
        "1",
        "2",
        "2",
        "2",
    ]  # once a task

    with monkeypatch.context() as patch:  # the second time nothing is sampled
        patch.setattr(em, "score", None)
        assert evaluate()[0] == first
    # a lost row comes back with the same value; the others are not touched
    common.write_csv(runs[0] / "quality.csv", scores[:-1])
    assert evaluate()[0] == first


def test_protocols_and_variants_never_meet(train, evaluate, tmp_path):
    for order in (1, 2):
        train("a", "--method", "er", "--order", str(order))
    train("a", "--method", "er", "--memory_size", "3")
    evaluate()
    rows, _ = evaluate("--num_samples", "8", "--sampling_seed", "3")
    assert {(r["generated"], r["sampling_seed"]) for r in rows} == {("16", "0"), ("8", "3")}
    table = [r for r in common.read_csv(tmp_path / "results" / "table_AFQ.csv") if r["metric"] == "FID"]
    assert len(table) == 4 and {r["method"] for r in table} == {"er (memory_size=5)", "er (memory_size=3)"}
    both = next(r for r in table if r["method"] == "er (memory_size=5)" and r["generated"] == "16")
    values = [float(r["AFQ"]) for r in rows
              if r["variant"] == "er (memory_size=5)" and r["generated"] == "16" and r["metric"] == "FID"]  # fmt: skip
    assert both["n"] == "2" and float(both["mean"]) == pytest.approx(np.mean(values), rel=1e-4)
    assert float(both["std"]) == pytest.approx(np.std(values, ddof=1), rel=1e-3)


def test_scores_of_a_retrained_task_are_not_used(train, evaluate):
    run = train("a")
    first, _ = evaluate()
    rows = common.read_csv(run / "quality.csv")
    common.write_csv(run / "quality.csv", [{**r, "checkpoint": "other", "value": "1"} for r in rows])
    assert evaluate()[0] == first


def test_unfinished_runs_are_scored_but_stay_out_of_the_tables(train, evaluate, capsys):
    run, other = train("a"), train("a", "--method", "er")
    (run / "DONE").unlink()
    rows, _ = evaluate()
    assert {r["variant"] for r in rows} == {"er"} and len(common.read_csv(run / "quality.csv")) == 9
    assert other


def test_pictures_without_inception_weights(train, tmp_path, cache, monkeypatch, capsys):
    train("a")
    monkeypatch.setattr(torch.hub, "_hub_dir", str(tmp_path))
    with pytest.raises(common.UserError, match=r"could not be scored.*https://github\.com/mseitzer") as end:
        em.main([str(tmp_path / "a"), "--data", str(cache), "--extractor", "inception", "--out", str(tmp_path / "r")])
    assert end.value.code == 2 and fid.INCEPTION_URL in capsys.readouterr().err and not (tmp_path / "r").exists()


def test_a_cell_is_the_model_after_t_asked_for_the_classes_of_i(train, evaluate, cache):
    run = train("a")
    evaluate()
    args = train_ddim.parse_args([*SMALL])
    data = streams.load_data(streams.scenario(args.dataset), 8, cache)
    learner, judge = train_ddim.DDIM(args, data, "cpu"), fid.Classifier(data, cache, "cpu")
    learner.load(run / "task2")
    images = learner.sample([0, 1] * 8, common.sampling_seeds((0, 1, "report"), 16))
    reference = fid.with_root(fid.statistics(judge.features(data.images[data.labels < 2])))
    expected = fid.frechet_distance(fid.statistics(judge.features(images)), reference)
    found = {(r["trained_to"], r["task"]): float(r["value"]) for r in common.read_csv(run / "quality.csv")
             if r["metric"] == "FID"}  # fmt: skip
    assert found["2", "1"] == pytest.approx(expected, rel=1e-4) and found["1", "1"] != found["2", "1"]


def test_one_broken_run_does_not_keep_the_others_from_the_table(train, evaluate, tmp_path, cache, capsys):
    good, torn, odd = train("a"), train("a", "--method", "er"), train("a", "--method", "ensemble")
    rows, _ = evaluate()
    path = torn / "task2" / "unet" / "diffusion_pytorch_model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    (torn / "quality.csv").write_text("what;is;this\n1;2;3\n")
    (odd / "config.json").write_text("{}")
    (good / "task1" / "cost.json").write_text("{}")
    shutil.copytree(good, tmp_path / "a" / "copy")
    with pytest.raises(common.UserError, match="1 of 2 runs could not be scored"):  # said, after all else was done
        em.main([str(tmp_path / "a"), str(tmp_path / "a" / "digits_0-3"), "--out", str(tmp_path / "results"), "--data",
                 str(cache), "--num_samples", "16"])  # fmt: skip
    after = common.read_csv(tmp_path / "results" / "summary.csv")
    assert [r["AFQ"] for r in after] == [
        r["AFQ"] for r in rows if r["variant"] == "ncl"
    ]  # and only once, though it is reached by two ways
    error = capsys.readouterr().err
    assert "task2 is broken" in error and "config.json is damaged" in error and "is the same run as" in error
    shutil.rmtree(tmp_path / "a" / "copy")
    assert not (torn / "DONE").exists() and (good / "DONE").exists()
    train("a", "--method", "er")  # the training command repairs it
    (odd / "config.json").unlink()
    rows, after = (
        [r | {"kept_steps": ""} for r in some if r["variant"] != "ensemble"] for some in (rows, evaluate()[0])
    )  # which stood in the cost.json that was damaged
    assert after == rows


def test_a_damaged_classifier_is_trained_again(train, evaluate, cache, tmp_path, monkeypatch):
    run = train("a")
    first, _ = evaluate()
    copy = tmp_path / "data"
    shutil.copytree(cache, copy)
    for path in copy.rglob("classifier.safetensors"):
        content = bytearray(path.read_bytes())
        content[30000:30004] = b"\xff" * 4
        path.write_bytes(content)
    em.main([str(tmp_path / "a"), "--out", str(tmp_path / "results"), "--data", str(copy), "--num_samples", "16"])
    rows = common.read_csv(tmp_path / "results" / "summary.csv")
    assert float(rows[0]["AFQ"]) == pytest.approx(float(first[0]["AFQ"]), rel=1e-3)
    assert run


@pytest.mark.parametrize("value", ["nan", "inf", "abc", ""])
def test_a_damaged_score_is_computed_anew(train, evaluate, value):
    run = train("a")
    first, _ = evaluate()
    rows = common.read_csv(run / "quality.csv")
    common.write_csv(run / "quality.csv", [rows[0] | {"value": value}, rows[1] | {"task": "z"}, *rows[2:]])
    assert evaluate()[0] == first


def test_two_names_for_the_same_images_share_a_classifier(train, evaluate, tmp_path, capsys):
    for name in ("digits:0-9", "digits"):
        train("a", "--dataset", name, "--tasks", "2", "--steps", "2")
    rows, _ = evaluate()
    assert {r["dataset"] for r in rows} == {"digits"} and len(rows) == 3  # one spelling, one run


# -------------------------------------------------------------------------------- tables, from made-up records


def record(**changes):
    """What `summarise` says of a run, with an AFQ of 10."""
    name, method = changes.get("dataset", "cifar10"), changes.get("method", "ncl")
    flags = {"method": method, "memory_size": 200, "select": "last", "dataset": name, "order": 1, "seed": 1}
    flags |= changes.pop("flags", {})
    config = {"flags": flags, "data": {"name": name}, "tasks": [[0]] * changes.pop("tasks", 5), "backbone": "ddim"}
    config["backbone"] = changes.get("backbone", "ddim")
    made = {"config": config, "dataset": name, "backbone": "ddim", "method": method, "variant": method, "metric": "FID"}
    made |= {"extractor": "inception", "generated": "2048", "reference": "train", "sampler_steps": "50"}
    return made | {"sampling_seed": "0", "AFQ": 10.0, "AIQ": 20.0, "FR": None} | changes


def test_five_orders_and_one_task(tmp_path):
    values = [10.0, 12.0, 11.0, 15.0, 17.0]
    records = [record(AFQ=v) for v in values]
    texts = tables.write_tables(records, tmp_path)
    (row,) = common.read_csv(tmp_path / "table_AFQ.csv")
    assert float(row["mean"]) == 13 and row["n"] == "5"
    assert float(row["std"]) == pytest.approx(math.sqrt(sum((v - 13) ** 2 for v in values) / 4), rel=1e-5)
    assert "| ncl | 13.00 ± 2.92 (5) |" in texts["AFQ"] and not any("paper" in key for key in row)
    (row,) = common.read_csv(tmp_path / "table_FR.csv")  # of one task there is none
    assert (row["mean"], row["std"], row["n"]) == ("", "", "0") and "| ncl | – |" in texts["FR"]


def test_what_never_shares_a_table(tmp_path):
    plain = record()
    for key, value in (("generated", "256"), ("extractor", "inception-0a1b2c3d"), ("extractor", "classifier-0a1b2c3d"),
                       ("sampler_steps", "20"), ("sampling_seed", "1"), ("reference", "test"), ("metric", "KID"),
                       ("backbone", "stylegan2")):  # fmt: skip
        texts = tables.write_tables([plain, record(AFQ=30.0, **{key: value})], tmp_path)
        assert texts["AFQ"].count("| method |") == 2 and "20.00" not in texts["AFQ"], key
        assert [float(r["mean"]) for r in common.read_csv(tmp_path / "table_AFQ.csv")] in ([10, 30], [30, 10])
    # classifiers differ by data set; their columns stand side by side
    texts = tables.write_tables(
        [record(extractor="classifier-00000001"), record(extractor="classifier-00000002", dataset="mnist")], tmp_path
    )
    assert texts["AFQ"].count("| method |") == 1 and "| ncl | 10.00 (1) | 10.00 (1) |" in texts["AFQ"]


def test_two_strengths_are_two_rows(tmp_path):
    records = [record(method="ewc", flags={"ewc_weight": w, "order": o}) for w in (1.0, 10.0) for o in (1, 2)]
    em.name_variants(records)
    texts = tables.write_tables(records, tmp_path)
    assert "| ewc (ewc_weight=1.0) | 10.00 ± 0.00 (2) |" in texts["AFQ"]
    assert "| ewc (ewc_weight=10.0) | 10.00 ± 0.00 (2) |" in texts["AFQ"]


def test_the_papers_numbers(tmp_path):
    paper = tables.read_paper()
    records = [record(method="clora", AIQ=55.0), record(method="ncl"), record(method="noncl", dataset="digits")]
    records += [record(method="clora", dataset="mnist"), record(method="gr", dataset="imagenet64", tasks=20)]
    texts = tables.write_tables(records, tmp_path, paper)
    lines = {line.split(" | ")[0].strip("| "): line for line in texts["AIQ"].splitlines() if line.startswith("|")}
    assert lines["method"] == (
        "| method | cifar10 | cifar10, paper | digits | digits, paper | imagenet64 | imagenet64, paper | mnist | "
        "mnist, paper |"
    )
    assert lines["clora"].startswith("| clora | 55.00 (1) | 173.43 ± 45.28 †1 |")
    assert lines["clora"].endswith("| 20.00 (1) | 140.51 ± 4.74 †2 |")
    assert lines["ncl"].startswith("| ncl | 20.00 (1) | 108.19 ± 15.02 |") and "NA" not in lines["gr"]
    assert "†1 cannot be: with isolated weights AIQ is at most (1 + 1/2 + … + 1/5) · AFQ = 137.25" in texts["AIQ"]
    assert "= 21.58" in texts["AIQ"] and "†" not in texts["AFQ"]
    rows = {(r["method"], r["dataset"]): r for r in common.read_csv(tmp_path / "table_AIQ.csv")}
    assert rows["clora", "cifar10"]["paper_mean"] == "173.43" and rows["clora", "cifar10"]["paper_std"] == "45.28"
    assert "isolated" in rows["clora", "cifar10"]["paper_doubt"] and not rows["ncl", "cifar10"]["paper_doubt"]
    assert rows["noncl", "digits"]["paper_mean"] == "" == rows["ncl", "mnist"]["paper_mean"]
    # other features than the paper's: no number of it stands beside them
    texts = tables.write_tables([record(extractor="classifier-00000001")], tmp_path, paper)
    assert "cifar10, paper" not in texts["AFQ"] and "nothing for this" in texts["AFQ"]


def test_which_setting_of_the_paper_a_run_is():
    def key(steps="50", **changes):
        return tables.paper_key(record(**changes)["config"], steps)

    assert key() == ("ddim", "CIFAR-10", "NCL") == key(steps="")
    assert key(tasks=10) == ("ddim", "CIFAR-10:tasks=10", "NCL") and key(steps="100")[1] == "CIFAR-10:ddim_steps=100"
    assert key(method="er", flags={"memory_size": 20})[1] == "CIFAR-10:memory=20"
    assert key(method="ncl", flags={"memory_size": 20})[1] == "CIFAR-10"  # has none
    assert key(method="er", dataset="imagenet64", tasks=20, flags={"memory_size": 5000})[1] == "ImageNet-1k"
    assert key(tasks=10, steps="100") not in {k[1:] for k in tables.read_paper()}
    assert key(dataset="digits") is None is key(method="mine")
    paper = tables.read_paper()
    assert paper["AFQ", *key(tasks=10)]["mean"] == "153.32"
    assert paper["FR", *key(method="er", flags={"memory_size": 20})]["mean"] == "96.58"


def test_cells_of_the_paper_that_cannot_be_true():
    paper = tables.read_paper()
    doubts = {key: cell["doubt"] for key, cell in paper.items() if cell["doubt"]}
    fid_cells = {key for key in doubts if key[0] in ("AFQ", "AIQ", "FR") and key[1] in ("ddim", "stylegan2")}
    lora = [("AIQ", "ddim", d, "C-LoRA") for d in ("MNIST", "Fashion-MNIST", "CIFAR-10", "Oxford-Flowers",
                                                   "CIFAR-10:ddim_steps=50", "CIFAR-10:tasks=5")]  # fmt: skip
    forgets = [("FR", "ddim", f"CIFAR-10:tasks={t}", "C-LoRA") for t in (2, 5, 10)]
    others = [("FR", "ddim", "MNIST", "A-GEM"), ("AIQ", "ddim", "ImageNet-1k", "A-GEM"),
              ("FR", "stylegan2", "ImageNet-1k", "Ensemble")]  # fmt: skip
    assert fid_cells == {*lora, *forgets, *others}
    assert "5/4 · AFQ = 107.85" in doubts["FR", "ddim", "MNIST", "A-GEM"]
    assert "repeats the FR" in doubts["AIQ", "ddim", "ImageNet-1k", "A-GEM"]
    zeros = {key for key in doubts if key[0] == "AIQ" and key[1] in ("dreambooth", "custom_diffusion")}
    assert len(zeros) == 6 and all(paper[key]["mean"] == "0" for key in zeros)
    assert doubts["FR", "custom_diffusion", "Custom-Objects:CLIP Avg", "C-LoRA"] == "there is no AFQ of it"
    assert "1197.14" in doubts["parameters", "ddim", "Stanford-Cars", "Ensemble"]
    stored = {key for key in doubts if key[0] == "parameters"}
    assert sum(key[2] == "ImageNet-1k" for key in stored) == 11 and not any(key[1] == "stylegan2" for key in stored)


def test_costs_beside_the_papers(train, evaluate, tmp_path, cache):
    run = train("a")
    config = common.read_json(run / "config.json")
    config["data"]["name"], config["tasks"] = "cifar10", [[0], [1]]
    tables.write_costs({run: config}, tmp_path, tables.read_paper())
    (row,) = common.read_csv(tmp_path / "cost.csv")
    assert row["paper_parameters_millions"] == ""  # CIFAR-10 in two tasks has no costs in the paper
    for t in (3, 4, 5):
        shutil.copytree(run / "task2", run / f"task{t}")
    config["tasks"] = [[c] for c in range(5)]
    tables.write_costs({run: config}, tmp_path, tables.read_paper())
    (row,) = common.read_csv(tmp_path / "cost.csv")
    assert row["paper_parameters_millions"] == "37.20" and row["paper_hours"] == "3.17"
    assert row["parameters_stored"] == str(config["parameters"])


# ----------------------------------------------------------------------------------- another reference, a GAN


def test_the_test_split_is_asked_for_only_if_wanted(train, evaluate, cache, monkeypatch):
    run = train("a")
    with pytest.raises(common.UserError, match="digits_0-3 has no test split here"):
        evaluate("--reference", "test")
    load = streams.load_data
    half = []

    def with_test(scenario, size, cache, read=True, split="train"):
        half.append(split)
        data = load(scenario, size, cache, read)
        if split == "test":  # a quarter of the images of class 1 and all of class 0
            keep = np.flatnonzero((data.labels != 1) | (np.cumsum(data.labels == 1) % 4 == 0))
            data.images, data.labels, data.digest = data.images[keep], data.labels[keep], "of the test"
        return data

    monkeypatch.setattr(streams, "load_data", with_test)
    first, _ = evaluate()
    assert "test" not in half and {r["reference"] for r in first} == {"train"}
    asked = []
    sample = train_ddim.DDIM.sample
    monkeypatch.setattr(
        train_ddim.DDIM, "sample", lambda self, labels, seeds: asked.append(labels) or sample(self, labels, seeds)
    )
    both, _ = evaluate("--reference", "test")
    assert [r["reference"] for r in both].count("test") == 3 and [r for r in both if r["reference"] == "train"] == first
    rows = [r for r in common.read_csv(run / "quality.csv") if r["reference"] == "test" and r["task"] == "1"]
    assert {r["reference_images"] for r in rows} == {"223"}  # 178 zeros and 45 ones
    assert asked[0].count(1) == 3 and len(asked[0]) == 16  # labels in the proportion of the reference


def test_a_run_without_sampler_steps():
    args = em.parse_args(["runs", "--ddim_steps", "20", "--num_samples", "64"])
    gan, ddim = ({"flags": {"preset": "S", **flags}} for flags in ({}, {"ddim_steps": 50}))
    judge = types.SimpleNamespace(name="inception", samples=2048)
    assert em.protocol_of(gan, args, judge) == {
        "extractor": "inception", "generated": "64", "reference": "train", "sampler_steps": "", "sampling_seed": "0",
    }  # fmt: skip
    assert em.protocol_of(ddim, args, judge)["sampler_steps"] == "20"
    assert em.protocol_of(ddim, em.parse_args(["runs"]), judge)["sampler_steps"] == "50"
    assert figures.picture_name(1, em.protocol_of(gan, args, judge)) == "final_task1_n64_seed0.png"


def test_a_score_says_how_it_was_made(train, evaluate, cache):
    """The same seed gives the same rows, another one others; with and without the cached reference."""
    run = train("a")
    first, _ = evaluate()
    scores = common.read_csv(run / "quality.csv")
    (run / "quality.csv").unlink()
    for folder in cache.glob("features/*"):
        shutil.rmtree(folder)
    assert evaluate()[0] == first and common.read_csv(run / "quality.csv") == scores
    assert {r["metric"] for r in scores} == {"FID", "KID", "accuracy"} and len(scores) == 9
    for key, value in {"generated": "16", "sampler_steps": "2", "sampling_seed": "0", "kept_steps": "6 6"}.items():
        assert {r[key] for r in first} == {value}
    evaluate("--sampling_seed", "5")
    other = [r for r in common.read_csv(run / "quality.csv") if r["sampling_seed"] == "5"]
    assert len(other) == 9
    pairs = [(a["value"], b["value"]) for a, b in zip(other, scores, strict=True) if a["metric"] != "accuracy"]
    assert all(a != b for a, b in pairs)


def test_a_finished_run_that_lost_task_1_is_said(train, capsys):
    run = train("a")
    shutil.rmtree(run / "task1")
    with pytest.raises(common.UserError, match="no run folder"):
        em.find_runs([run.parent])
    assert f"{run} has lost its task1" in capsys.readouterr().err


def test_kid_is_that_of_the_samples(train, evaluate, cache):
    run = train("a")
    evaluate()
    args = train_ddim.parse_args([*SMALL])
    data = streams.load_data(streams.scenario(args.dataset), 8, cache)
    learner, judge = train_ddim.DDIM(args, data, "cpu"), fid.Classifier(data, cache, "cpu")
    learner.load(run / "task2")
    x = judge.features(learner.sample([0, 1] * 8, common.sampling_seeds((0, 1, "report"), 16)))
    y = judge.features(data.images[data.labels < 2])
    k = [(a @ b.T / 64 + 1) ** 3 for a, b in ((x, x), (y, y), (x, y))]
    n, m = len(x), len(y)
    plain = (k[0].sum() - k[0].trace()) / n / (n - 1) + (k[1].sum() - k[1].trace()) / m / (m - 1) - 2 * k[2].mean()
    found = [r["value"] for r in common.read_csv(run / "quality.csv")
             if (r["metric"], r["trained_to"], r["task"]) == ("KID", "2", "1")]  # fmt: skip
    assert float(found[0]) == pytest.approx(plain, rel=1e-4)


def test_few_images_are_named(capsys):
    common.note.cache_clear()
    fid.warn_of_few(2048, "generated images a task of cub")
    assert capsys.readouterr().err == ""
    fid.warn_of_few(1198, "reference images in the smallest task of cub")
    error = capsys.readouterr().err
    assert "1198 reference images" in error and "2048" in error and "cub" in error
