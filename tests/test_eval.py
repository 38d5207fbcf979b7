"""Scores against hand-made matrices; the script twice over."""

import shutil

import numpy as np
import pytest
import torch
from conftest import SMALL

import common
import eval_metrics as em
import fid
import streams
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
