"""Distances against closed forms, plain lines and pytorch-fid; the extractors; the reference on the disk."""

import math
import shutil
import time

import numpy as np
import pytest
import torch
from conftest import SMALL
from PIL import Image

import common
import eval_metrics
import fid
import streams
import train_ddim
from tables import number


def distance(x, y):
    return fid.frechet_distance(fid.statistics(x), fid.with_root(fid.statistics(y)))


def test_frechet_distance_closed_forms():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(500, 6))
    assert 0 <= distance(x, x) < 1e-9
    assert distance(x + 3, x) == pytest.approx(6 * 9)
    doubled = np.square(x.mean(0)).sum() + np.trace(np.cov(x.T))  # (2-1)²|μ|² + (2-1)² tr C
    assert distance(2 * x, x) == pytest.approx(doubled)
    a, b = ((np.zeros(3), np.diag(v)) for v in ([1.0, 4, 9], [4.0, 4, 1]))
    assert fid.frechet_distance(a, fid.with_root(b)) == pytest.approx((1 - 2) ** 2 + 0 + (3 - 1) ** 2)


def test_frechet_distance_is_that_of_pytorch_fid():
    from pytorch_fid.fid_score import calculate_frechet_distance

    rng = np.random.default_rng(1)
    mix = rng.normal(size=(20, 20))
    x, y = rng.normal(size=(300, 20)), rng.normal(size=(400, 20)) @ mix + 1
    theirs = calculate_frechet_distance(x.mean(0), np.cov(x.T), y.mean(0), np.cov(y.T))
    assert distance(x, y) == pytest.approx(theirs, rel=1e-6)
    assert distance(x, y) == pytest.approx(distance(y, x), rel=1e-9)


@pytest.mark.parametrize("n, m, D", [(12, 9, 64), (12, 12, 2048), (50, 50, 2048), (12, 50, 2048), (50, 200, 64),
                                     (200, 50, 64)])  # fmt: skip
def test_fewer_images_than_dimensions(n, m, D):
    """The exact value from the singular values of the product of the centred features."""
    rng = np.random.default_rng(2)
    scale = np.geomspace(1, 1e-3, D)
    x, y = rng.normal(size=(n, D)) * scale, (rng.normal(size=(m, D)) + 0.2) * scale
    u, v = x - x.mean(0), y - y.mean(0)
    product = np.linalg.svd(u @ v.T, compute_uv=False).sum() / math.sqrt((n - 1) * (m - 1))
    exact = ((x.mean(0) - y.mean(0)) ** 2).sum() + (u**2).sum() / (n - 1) + (v**2).sum() / (m - 1) - 2 * product
    assert distance(x, y) == pytest.approx(exact, rel=1e-6)
    for same in (x, y):
        assert 0 <= distance(same, same) < 1e-6


def test_what_is_no_sample():
    x = np.random.default_rng(0).normal(size=(12, 64))
    for few in (x[:1], x[:0]):
        with pytest.raises(common.UserError, match=rf"{len(few)} image\(s\).*at least 2"):
            fid.statistics(few)
        with pytest.raises(common.UserError, match=rf"{len(few)} image\(s\).*at least 2"):
            fid.kernel_reference(few)
    with pytest.raises(common.UserError, match="not finite"):  # and never a perfect score
        fid.statistics(x * np.nan)
    assert number(-0.0) == "0" and number(-1e-30 + 0.0) == "-1e-30"


def test_kernel_distance_is_the_unbiased_estimator():
    rng = np.random.default_rng(3)
    x, y = rng.normal(size=(23, 5)), rng.normal(size=(31, 5)) * 1.5 + 0.3

    def k(a, b):
        return (a @ b / 5 + 1) ** 3

    within = [sum(k(s[i], s[j]) for i in range(len(s)) for j in range(len(s)) if i != j) / (len(s) * (len(s) - 1))
              for s in (x, y)]  # fmt: skip
    plain = sum(within) - 2 * sum(k(a, b) for a in x for b in y) / (23 * 31)
    assert fid.kernel_distance(x, fid.kernel_reference(y)) == pytest.approx(plain, rel=1e-12)
    assert fid.kernel_distance(x, fid.kernel_reference([y[:7], y[7:]])) == pytest.approx(plain, rel=1e-12)
    many = rng.normal(size=(2500, 5))  # more than one block
    assert fid.kernel_mean(many) == pytest.approx(((many @ many.T / 5 + 1) ** 3)[~np.eye(2500, dtype=bool)].mean())
    # unbiased: around 0 for two samples of one distribution, on either side of it, however few they are
    pairs = [fid.kernel_distance(a, fid.kernel_reference(b)) for a, b in rng.normal(size=(400, 2, 8, 5))]
    assert min(pairs) < 0 < max(pairs) and abs(np.mean(pairs)) < 4 * np.std(pairs) / 20


def test_kernel_distance_of_a_large_reference(monkeypatch):
    rng = np.random.default_rng(4)
    x, y = rng.normal(size=(40, 6)) + 1, rng.normal(size=(3000, 6)).astype(np.float32)
    whole = fid.kernel_distance(x, fid.kernel_reference(y))
    monkeypatch.setattr(fid, "KID_IMAGES", 1000)
    rows, among = fid.kernel_reference([y[:1000], y[1000:]])
    assert len({*map(tuple, rows)}) == 1000 and 200 < len({*map(tuple, rows)} & {*map(tuple, y[:1000])}) < 500
    assert fid.kernel_distance(x, (rows, among)) == pytest.approx(whole, rel=0.1)


# --------------------------------------------------------------------------------------------- extractors


def test_which_features_are_the_default():
    assert fid.extractor_kind("digits:0-4") == fid.extractor_kind("digits") == "classifier"
    assert fid.extractor_kind("/pictures/digits_photos") == fid.extractor_kind("cifar10") == "inception"
    assert fid.extractor_kind("digits", "inception") == "inception"


def test_conditional_accuracy_and_pixel_ranges(cache):
    data = streams.load_data(streams.scenario("digits:0-3"), 8, cache)
    judge = fid.Classifier(data, cache, "cpu")
    assert judge.held_out > 0.97
    assert judge.accuracy(data.images, data.labels) > 0.98
    assert judge.accuracy(data.images, (data.labels + 1) % 4) < 0.02  # swapped labels show
    features = judge.features(data.images)
    assert features.dtype == np.float64 and features.shape == (len(data.labels), 64)
    assert features.var(0).sum() == pytest.approx(100, rel=1e-4)
    for batch in (1, 7, 12):
        assert abs(judge.features(data.images[:12], batch) - features[:12]).max() < 1e-4
    assert np.array_equal(judge.features(data.images[:, :1]), features)  # gray is three equal channels
    for images in (torch.rand(2, 3, 8, 8), torch.rand(2, 3, 8, 8) * 2 - 1, data.images[:2] / 255):
        with pytest.raises(TypeError, match="uint8"):
            judge.features(images)
    again = fid.Classifier(data, cache, "cpu")
    assert again.name == judge.name == fid.Classifier.identity(cache, data.digest, data.classes)


def test_noise_is_far_and_the_data_are_near(cache):
    data = streams.load_data(streams.scenario("digits:0-3"), 8, cache)
    judge = fid.Classifier(data, cache, "cpu")
    noise = judge.features(np.random.default_rng(0).integers(0, 256, (200, 3, 8, 8), dtype=np.uint8))
    known = judge.features(data.images)
    kernel = fid.kernel_reference(known)
    assert distance(noise, known) > 30
    assert distance(judge.features(data.images[::2]), known) < 2
    near = fid.kernel_distance(known[::2], fid.kernel_reference(known[1::2]))
    assert fid.kernel_distance(noise, kernel) > 20 * abs(near)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Two folders of 6 pictures, and their arrays."""
    folder, rng, arrays = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0), {}
    for name, high in (("a", 256), ("b", 160)):
        arrays[name] = rng.integers(0, high, (6, 3, 32, 32), dtype=np.uint8)
        (folder / name).mkdir()
        for k, image in enumerate(arrays[name]):
            Image.fromarray(image.transpose(1, 2, 0)).save(folder / name / f"{k:03}.png")
    return folder, arrays


@pytest.fixture(scope="module")
def inception(inception_file):
    return fid.Inception("cpu", inception_file)


def test_inception_features_and_fid_are_those_of_pytorch_fid(inception, inception_file, pictures, monkeypatch):
    from pytorch_fid import fid_score
    from pytorch_fid import inception as published

    monkeypatch.setattr(published, "load_state_dict_from_url", lambda *a, **k: torch.load(inception_file))
    net = fid_score.InceptionV3([3])
    folder, arrays = pictures
    theirs = [fid_score.get_activations(sorted((folder / name).iterdir()), net, 4, 2048, "cpu", 0) for name in "ab"]
    monkeypatch.setattr(fid_score, "get_activations", lambda files, *a: theirs["ab".index(files[0].parent.name)])
    score = fid_score.calculate_fid_given_paths([str(folder / "a"), str(folder / "b")], 5, "cpu", 2048, 0)
    for batch in (4, 6):
        ours = [inception.features(arrays[name], batch) for name in "ab"]
        assert ours[0].dtype == np.float64 and ours[0].shape == (6, 2048)
        assert max(abs(o - t).max() for o, t in zip(ours, theirs, strict=True)) < 1e-5
        assert distance(*ours) == pytest.approx(score, abs=1e-3)
    assert score > 0.1


def test_where_the_inception_weights_are(inception, inception_file, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.hub, "_hub_dir", str(tmp_path))
    place = tmp_path / "checkpoints" / fid.INCEPTION_FILE
    for missing in (None, tmp_path / "mine.pth"):
        with pytest.raises(common.UserError) as end:
            fid.Inception("cpu", missing)
        assert end.value.code == 2
        for word in (str(missing or place), fid.INCEPTION_URL, "--inception_weights"):
            assert word in str(end.value)
    place.parent.mkdir()
    shutil.copy(inception_file, place)
    assert fid.inception_name() == fid.inception_name(inception_file) == inception.name  # by content
    assert inception.name.startswith("inception-") and len(inception.name) == len("inception-") + 8
    monkeypatch.setattr(common, "file_sum", lambda path: "6726825d" + 56 * "0")
    place.touch()  # another time: read again
    assert fid.inception_name() == "inception"


def test_weights_that_are_none(inception_file, tmp_path, capsys):
    content = inception_file.read_bytes()
    (tmp_path / "torn.pth").write_bytes(content[: len(content) // 2])
    (tmp_path / "text.pth").write_text("404: not found")
    torch.save({"a": torch.zeros(2)}, tmp_path / "other.pth")
    torch.save([1, 2], tmp_path / "list.pth")
    for name in ("torn", "text", "other", "list"):
        with pytest.raises(SystemExit) as end, common.one_line_errors():
            fid.Inception("cpu", tmp_path / f"{name}.pth")
        error = capsys.readouterr().err
        assert end.value.code == 2 and error.count("\n") == 1, error
        assert error.startswith(f"error: {tmp_path / name}.pth is"), error
        assert "Inception" in error and fid.INCEPTION_URL in error


# ---------------------------------------------------------------------------------------------- reference


class Counting:
    """An extractor that counts the images it sees: 3 features of each."""

    name = "counting"

    def __init__(self):
        self.seen = 0

    def features(self, images):
        self.seen += len(images)
        return images.reshape(len(images), -1)[:, :3].astype(np.float64) + 0.1


def test_reference_features_are_computed_once(tmp_path):
    data = streams.load_data(streams.scenario("digits"), 8, tmp_path)
    counting = Counting()

    def reference(*classes, digest=data.digest, split="train"):
        data.digest = digest
        return fid.reference_features(counting, data, classes, tmp_path, split)

    first = reference(3, 9)
    count = int(np.isin(data.labels, [3, 9]).sum())
    assert counting.seen == count == sum(map(len, first)) and len(first[0]) == (data.labels == 3).sum()
    direct = Counting().features(data.images[data.labels == 9])
    assert np.array_equal(first[1], direct.astype(np.float32))
    assert np.array_equal(reference(9, 3)[0], first[1]) and counting.seen == count  # any order, any split of classes
    reference(9, 4)
    assert counting.seen == count + (data.labels == 4).sum()
    # statistics of a task from its classes on the disk, and of its images at once
    images = data.images[np.isin(data.labels, [3, 4, 9])]
    mean, covariance = fid.statistics(reference(3, 4, 9))
    mine = Counting().features(images)
    assert mean == pytest.approx(mine.mean(0), rel=1e-6) and covariance == pytest.approx(np.cov(mine.T), rel=1e-6)
    # other images, another split or another extractor are something else
    seen = counting.seen
    for change in ({"digest": "other"}, {"digest": data.digest, "split": "test"}):
        reference(4, **change)
        assert counting.seen == seen + (data.labels == 4).sum()
        seen = counting.seen
    counting.name = "another"
    reference(4)
    assert counting.seen > seen


def test_a_stop_and_a_broken_file_cost_one_class(tmp_path, capsys):
    data = streams.load_data(streams.scenario("digits"), 8, tmp_path)
    counting = Counting()
    plain, features = counting.features, []

    def torn(images):
        if features:
            raise KeyboardInterrupt
        features.append(plain(images))
        return features[-1]

    counting.features = torn
    with pytest.raises(KeyboardInterrupt):
        fid.reference_features(counting, data, [0, 1], tmp_path)
    counting.features = plain
    fid.reference_features(counting, data, [0, 1], tmp_path)
    assert counting.seen == (data.labels <= 1).sum()  # class 0 once
    (path,) = tmp_path.glob("features/*/class1/features.npy")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    again = fid.reference_features(counting, data, [0, 1], tmp_path)
    assert counting.seen == (data.labels <= 1).sum() + (data.labels == 1).sum()
    assert "class1 is broken" in capsys.readouterr().err
    assert np.array_equal(again[1], plain(data.images[data.labels == 1]).astype(np.float32))


def test_two_processes_compute_a_reference_once(tmp_path):
    import threading

    data = streams.load_data(streams.scenario("digits"), 8, tmp_path)
    counting = [Counting(), Counting()]
    for one in counting:
        plain = one.features
        one.features = lambda images, plain=plain: time.sleep(0.05) or plain(images)
    about = data, range(4), tmp_path
    threads = [threading.Thread(target=fid.reference_features, args=(one, *about)) for one in counting]
    for thread in threads:  # a lock of a file is held by the open file, so threads stand for processes
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(one.seen for one in counting) == (data.labels < 4).sum()


def test_a_set_against_itself_through_the_cache(cache):
    data = streams.load_data(streams.scenario("digits:0-3"), 8, cache)
    judge = fid.Classifier(data, cache, "cpu")
    cached = fid.reference_features(judge, data, range(4), cache)
    for side in (cached, np.concatenate(cached)):
        value = distance(judge.features(data.images), side)
        assert 0 <= value < 1e-3 and not number(value).startswith("-")


# ------------------------------------------------------------------------------ in training and in evaluation


def test_best_checkpoint_by_inception_and_its_evaluation(train, inception, inception_file, tmp_path, cache, capsys):
    rng = np.random.default_rng(0)
    for name in "ab":
        (tmp_path / "birds" / name).mkdir(parents=True)
        for k in range(3):
            image = rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)
            Image.fromarray(image).save(tmp_path / "birds" / name / f"{k}.png")
    flags = ["--dataset", str(tmp_path / "birds"), "--select", "best", "--val_samples", "2", "--eval_every", "3"]
    run = train("a", *flags, "--inception_weights", str(inception_file))
    assert common.read_json(run / "config.json")["judge"] == inception.name
    about = common.read_json(run / "task1" / "cost.json")
    assert about["kept_step"] in (3, 6) and about["selection_score"] > 0
    assert len([*cache.glob(f"features/{inception.name}-*-8-train/class*")]) == 2  # a class, for the task that has it
    flags = ["--out", str(tmp_path / "results"), "--data", str(cache), "--num_samples", "3"]
    with pytest.MonkeyPatch.context() as patch:
        seen, features = [], fid.Inception.features
        patch.setattr(fid.Inception, "features", lambda self, x: seen.append(len(x)) or features(self, x))
        eval_metrics.main([str(tmp_path / "a"), *flags, "--inception_weights", str(inception_file)])
    assert seen == [3, 3, 3]  # the generated ones of three cells: the reference is there already
    rows = common.read_csv(run / "quality.csv")
    assert [r["metric"] for r in rows] == ["FID", "KID"] * 3 and {r["extractor"] for r in rows} == {inception.name}
    error = capsys.readouterr().err
    assert "3 generated images a task of birds, under 2048" in error and "3 reference images in the smallest" in error
    eval_metrics.main([str(tmp_path / "a"), *flags, "--inception_weights", str(inception_file), "--paper"])
    # and by hand
    args = train_ddim.parse_args([*SMALL, "--dataset", str(tmp_path / "birds")])
    data = streams.load_data(streams.scenario(args.dataset), 8, cache)
    learner = train_ddim.DDIM(args, data, "cpu")
    learner.load(run / "task2")
    images = learner.sample([1] * 3, common.sampling_seeds((0, 2, "report"), 3))
    expected = distance(inception.features(images), inception.features(data.images[data.labels == 1]))
    assert float(rows[-2]["value"]) == pytest.approx(expected, rel=1e-4)


def test_without_weights_nothing_is_begun(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.hub, "_hub_dir", str(tmp_path / "hub"))
    for name in "ab":
        (tmp_path / "birds" / name).mkdir(parents=True)
        for k in range(2):
            Image.new("RGB", (8, 8), (k, 0, 0)).save(tmp_path / "birds" / name / f"{k}.png")
    flags = ["--dataset", str(tmp_path / "birds"), "--select", "best", "--out", str(tmp_path / "runs"), "--data",
             str(tmp_path / "data")]  # fmt: skip
    with pytest.raises(SystemExit) as end, common.one_line_errors():
        train_ddim.train(train_ddim.parse_args(flags))
    error = capsys.readouterr().err
    assert end.value.code == 2 and error.count("\n") == 1
    for word in (str(tmp_path / "hub" / "checkpoints" / fid.INCEPTION_FILE), fid.INCEPTION_URL, "--select last"):
        assert word in error
    assert sorted(p.name for p in tmp_path.iterdir()) == ["birds", "data"]  # no run is begun
    train_ddim.train(train_ddim.parse_args([*flags, "--dry_run"]))
