"""Scores against closed forms, pytorch-fid and hand-made matrices; the script twice over."""

import math
import shutil

import numpy as np
import pytest
import torch
from conftest import SMALL

import common
import eval_metrics as em
import streams
import train_ddim


def test_frechet_distance_closed_forms():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(500, 6))
    reference = em.with_root(em.statistics(x))
    assert 0 <= em.frechet_distance(em.statistics(x), reference) < 1e-9
    assert em.frechet_distance(em.statistics(x + 3), reference) == pytest.approx(6 * 9)
    doubled = np.square(x.mean(0)).sum() + np.trace(reference[1])  # (2-1)²|μ|² + (2-1)² tr C
    assert em.frechet_distance(em.statistics(2 * x), reference) == pytest.approx(doubled)
    a, b = ((np.zeros(3), np.diag(v)) for v in ([1.0, 4, 9], [4.0, 4, 1]))
    assert em.frechet_distance(a, em.with_root(b)) == pytest.approx((1 - 2) ** 2 + 0 + (3 - 1) ** 2)


def test_frechet_distance_is_that_of_pytorch_fid():
    from pytorch_fid.fid_score import calculate_frechet_distance

    rng = np.random.default_rng(1)
    mix = rng.normal(size=(20, 20))
    a, b = em.statistics(rng.normal(size=(300, 20))), em.statistics(rng.normal(size=(400, 20)) @ mix + 1)
    ours = em.frechet_distance(a, em.with_root(b))
    assert ours == pytest.approx(calculate_frechet_distance(*a, *b), rel=1e-6)
    assert ours == pytest.approx(em.frechet_distance(b, em.with_root(a)), rel=1e-9)


def test_fewer_images_than_dimensions():
    """The exact value from the singular values of the product of the centred features."""
    rng = np.random.default_rng(2)
    x, y = rng.normal(size=(12, 64)), rng.normal(size=(9, 64)) + 0.2
    u, v = x - x.mean(0), y - y.mean(0)
    product = np.linalg.svd(u @ v.T, compute_uv=False).sum() / math.sqrt(11 * 8)
    exact = ((x.mean(0) - y.mean(0)) ** 2).sum() + (u**2).sum() / 11 + (v**2).sum() / 8 - 2 * product
    assert em.frechet_distance(em.statistics(x), em.with_root(em.statistics(y))) == pytest.approx(exact, rel=1e-6)
    with pytest.raises(common.UserError, match="at least 2"):
        em.statistics(x[:1])
    with pytest.raises(common.UserError, match="not finite"):  # and never a perfect score
        em.statistics(x * np.nan)


def test_continual_metrics_by_hand():
    rows = [[10], [20, 12], [40, 18, 11]]
    aq, aiq, afq, fr = em.continual_metrics(rows, larger_is_better=False)
    assert (aq, afq, fr) == ([10, 16, 23], 23, 18) and aiq == pytest.approx(16.333, abs=1e-3)
    negated = em.continual_metrics([[-v for v in row] for row in rows], larger_is_better=True)
    assert negated[3] == 18 and negated[2] == -23
    assert em.continual_metrics([[5]], larger_is_better=False) == ([5], 5, 5, None)


def test_conditional_accuracy_and_pixel_ranges(cache):
    data = streams.load_data(streams.scenario("digits:0-3"), 8, cache)
    judge = em.Classifier(data, cache, "cpu")
    assert judge.held_out > 0.97
    assert judge.accuracy(data.images, data.labels) > 0.98
    assert judge.accuracy(data.images, (data.labels + 1) % 4) < 0.02  # swapped labels show
    features = judge.features(data.images)
    assert features.dtype == np.float64 and features.shape == (len(data.labels), 64)
    assert features.var(0).sum() == pytest.approx(100, rel=1e-4)
    assert abs(judge.features(data.images, batch=7) - features).max() < 1e-4
    with pytest.raises(TypeError, match="uint8"):
        judge.features(torch.rand(2, 3, 8, 8))
    again = em.Classifier(data, cache, "cpu")
    assert again.name == judge.name == em.Classifier.identity(cache, data.digest, data.classes)


def test_noise_is_far_and_the_data_are_near(cache):
    data = streams.load_data(streams.scenario("digits:0-3"), 8, cache)
    judge = em.Classifier(data, cache, "cpu")
    noise = np.random.default_rng(0).integers(0, 256, (200, 3, 8, 8), dtype=np.uint8)
    reference = em.with_root(em.statistics(judge.features(data.images)))
    assert em.frechet_distance(em.statistics(judge.features(noise)), reference) > 30
    assert em.frechet_distance(em.statistics(judge.features(data.images[::2])), reference) < 2


def test_inception_features_are_those_of_pytorch_fid(tmp_path, monkeypatch):
    """Random weights in pytorch-fid's file format, found where pytorch-fid keeps its own."""
    from pytorch_fid import fid_score, inception

    monkeypatch.setattr(torch.hub, "_hub_dir", str(tmp_path))
    with pytest.raises(common.UserError, match="no Inception weights"):
        em.Inception("cpu")
    torch.manual_seed(0)
    monkeypatch.setattr(inception, "load_state_dict_from_url", lambda *a, **k: net.state_dict())
    net = inception._inception_v3(num_classes=1008, aux_logits=False, weights=None)
    for block, name in (("A", "Mixed_5b"), ("A", "Mixed_5c"), ("A", "Mixed_5d")):
        setattr(net, name, inception.FIDInceptionA({"Mixed_5b": 192, "Mixed_5c": 256, "Mixed_5d": 288}[name],
                                                   pool_features=32 if name == "Mixed_5b" else 64))  # fmt: skip
        assert block
    for name, channels in (("Mixed_6b", 128), ("Mixed_6c", 160), ("Mixed_6d", 160), ("Mixed_6e", 192)):
        setattr(net, name, inception.FIDInceptionC(768, channels_7x7=channels))
    net.Mixed_7b, net.Mixed_7c = inception.FIDInceptionE_1(1280), inception.FIDInceptionE_2(2048)
    (tmp_path / "checkpoints").mkdir()
    torch.save(net.state_dict(), tmp_path / "checkpoints" / em.INCEPTION_FILE)
    monkeypatch.undo()
    monkeypatch.setattr(torch.hub, "_hub_dir", str(tmp_path))

    from PIL import Image

    images = np.random.default_rng(0).integers(0, 256, (6, 3, 32, 32), dtype=np.uint8)
    paths = []
    for k, image in enumerate(images):
        Image.fromarray(image.transpose(1, 2, 0)).save(tmp_path / f"{k}.png")
        paths.append(tmp_path / f"{k}.png")
    ours = em.Inception("cpu")
    theirs = fid_score.get_activations(paths, ours.net, batch_size=6, dims=2048, device="cpu", num_workers=0)
    assert abs(ours.features(images, batch=4) - theirs).max() < 1e-5


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
    assert len(first) == 6 and {r["variant"] for r in first} == {"ncl", "er", "ensemble"}
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
    assert [r["task"] for r in common.read_csv(runs[2] / "quality.csv")] == ["1", "1", "2", "2"]  # once a task

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
    assert {r["variant"] for r in rows} == {"er"} and len(common.read_csv(run / "quality.csv")) == 6
    assert other


def test_pictures_without_inception_weights(train, tmp_path, cache, monkeypatch, capsys):
    train("a")
    monkeypatch.setattr(torch.hub, "_hub_dir", str(tmp_path))
    with pytest.raises(common.UserError, match=r"could not be scored.*put https://github\.com/mseitzer") as end:
        em.main([str(tmp_path / "a"), "--data", str(cache), "--extractor", "inception", "--out", str(tmp_path / "r")])
    assert end.value.code == 2 and em.INCEPTION_URL in capsys.readouterr().err and not (tmp_path / "r").exists()


def test_a_cell_is_the_model_after_t_asked_for_the_classes_of_i(train, evaluate, cache):
    run = train("a")
    evaluate()
    args = train_ddim.parse_args([*SMALL])
    data = streams.load_data(streams.scenario(args.dataset), 8, cache)
    learner, judge = train_ddim.DDIM(args, data, "cpu"), em.Classifier(data, cache, "cpu")
    learner.load(run / "task2")
    images = learner.sample([0, 1] * 8, common.sampling_seeds((0, 1, "report"), 16))
    reference = em.with_root(em.statistics(judge.features(data.images[data.labels < 2])))
    expected = em.frechet_distance(em.statistics(judge.features(images)), reference)
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
    assert [r for r in evaluate()[0] if r["variant"] != "ensemble"] == [r for r in rows if r["variant"] != "ensemble"]


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
    assert {r["dataset"] for r in rows} == {"digits"} and len(rows) == 2  # one spelling, one run


def test_which_features_are_the_default():
    def config(dataset):
        return {"flags": {"dataset": dataset}}

    assert (
        em.extractor_kind(config("digits:0-4"), "auto") == em.extractor_kind(config("digits"), "auto") == "classifier"
    )
    assert em.extractor_kind(config("/pictures/digits_photos"), "auto") == "inception"
    assert em.extractor_kind(config("digits"), "inception") == "inception"
