"""Measures beside FID: plain loops and closed forms, and a failing generator of each kind."""

import numpy as np
import pytest

import fid
import measures


def normal(n, d=8, seed=0, **about):
    return np.random.default_rng(seed).normal(size=(n, d), **about)


def whole(features, training=None):
    """All measures of features against real ones, as fid.Distances puts them together."""
    real = normal(300) if training is None else training
    return measures.balls(real, measures.radii(real), features) | {"authentic": measures.authentic(features, [real])}


def plain_balls(real, generated, k):
    """Naeem et al., equations 1 to 4 and 8, by loops over all pairs."""

    def radius(side, i):
        return sorted(np.linalg.norm(side[i] - other) for other in side)[k]  # the first is itself, at 0

    n = len(real)
    apart = [[np.linalg.norm(r - g) for g in generated] for r in real]
    real_radii, radii = ([radius(side, i) for i in range(n)] for side in (real, generated))
    return {
        "precision": np.mean([any(apart[i][j] < real_radii[i] for i in range(n)) for j in range(n)]),
        "recall": np.mean([any(apart[i][j] < radii[j] for j in range(n)) for i in range(n)]),
        "density": np.mean([sum(apart[i][j] < real_radii[i] for i in range(n)) for j in range(n)]) / k,
        "coverage": np.mean([min(apart[i]) < real_radii[i] for i in range(n)]),
    }


@pytest.mark.parametrize("n", [40, 4])
def test_balls_by_plain_loops(n):
    real, generated = normal(n), normal(n, seed=1, loc=0.5)
    expected = plain_balls(real, generated, min(5, n - 1))
    assert expected["recall"] > 0 and (n < 40 or expected["coverage"] < 1)
    assert measures.balls(real, measures.radii(real), generated) == pytest.approx(expected)


def test_monge_distance_by_plain_loops():
    a, b = normal(30), normal(30, seed=1, loc=1)
    u = measures.unit_directions(8)
    plain = 3 * 8 * np.mean([np.mean((np.sort(a @ row) - np.sort(b @ row)) ** 2) for row in u])
    assert measures.monge_distance(measures.projected(a), measures.projected(b), 8) == pytest.approx(plain)
    assert np.linalg.norm(u, axis=1) == pytest.approx(1) and len(u) == 1000


def test_monge_distance_of_a_shift_is_three_times_its_square():
    """E (u·v)² = |v|² / D of a random direction; within the error of 1000 of them."""
    a, shift = normal(50, 64), normal(1, 64, seed=2)
    found = measures.monge_distance(measures.projected(a), measures.projected(a + shift), 64)
    assert found == pytest.approx(3 * np.square(shift).sum(), rel=0.15)
    assert measures.monge_distance(measures.projected(a), measures.projected(a[::-1]), 64) == 0


def test_the_same_distribution_has_all():
    found = whole(normal(300, seed=1))
    assert found["precision"] > 0.8 and found["recall"] > 0.8 and found["coverage"] > 0.9
    assert found["density"] == pytest.approx(1, abs=0.1) and 0.3 < found["authentic"] < 0.7


def test_a_generator_that_repeats_twenty_images():
    real = normal(300)
    found = whole(real[np.arange(300) % 20], real)
    assert found["precision"] == 1 and found["recall"] == 0 and found["coverage"] < 0.35 and found["authentic"] == 0


def test_twenty_images_of_many_are_little_coverage():
    real = normal(2000, 2)
    found = measures.balls(real, measures.radii(real), real[np.arange(2000) % 20])
    assert found["precision"] == 1 and found["recall"] == 0 and found["coverage"] < 0.08


def test_noise_is_not_real():
    found = whole(normal(300, seed=1, scale=30))
    assert found["precision"] == 0 and found["density"] == 0 and found["coverage"] < 0.05 and found["authentic"] == 1


def test_the_training_images_are_no_work_of_ones_own():
    real = normal(300)
    found = whole(real[::-1], real)
    assert found["authentic"] == 0 and found["precision"] == found["coverage"] == 1


def test_nearest_by_plain_loops_over_parts_and_blocks(monkeypatch):
    monkeypatch.setattr(measures, "ROWS", 7)
    parts, rows = [normal(20), normal(1, seed=3), normal(33, seed=4)], normal(30, seed=5)
    whole = np.concatenate(parts)
    apart = np.linalg.norm(rows[:, None] - whole, axis=2)
    at, far = measures.nearest(rows, parts)
    assert (at == apart.argmin(1)).all() and far == pytest.approx(apart.min(1))
    assert (measures.take(parts, at) == whole[at]).all()
    among = np.linalg.norm(whole[:, None] - whole, axis=2)
    np.fill_diagonal(among, np.inf)
    at, far = measures.nearest(whole, parts, itself=np.arange(len(whole)))
    assert (at == among.argmin(1)).all() and far == pytest.approx(among.min(1))


def test_authentic_by_plain_loops():
    training, samples = normal(60).astype(np.float32), normal(50, seed=1).astype(np.float32)
    among = np.linalg.norm(training[:, None] - training, axis=2)
    np.fill_diagonal(among, np.inf)
    apart = np.linalg.norm(samples[:, None] - training, axis=2)
    plain = np.mean([apart[j].min() > among[apart[j].argmin()].min() for j in range(50)])
    assert measures.authentic(samples, [training[:25], training[25:]]) == plain and 0 < plain < 1


def test_equal_rows_lie_at_0():
    far = 1000 + normal(50, 512)
    assert (np.diag(measures.distances(far, far.copy())) == 0).all()


def test_a_classifier_of_samples_reads_what_they_teach():
    """Samples as the real images: all are read; of one class only: the other is not."""
    images = np.zeros((60, 3, 8, 8), np.uint8)
    labels = np.arange(60) % 2 + 3
    images[labels == 4, :, :4] = 200
    score = fid.classification_score(images, labels, images, labels, "cpu")
    assert score == 1
    assert fid.classification_score(images[labels == 4], labels[labels == 4], images, labels, "cpu") == 0.5
    assert fid.classification_score(images, 7 - labels, images, labels, "cpu") == 0
