"""Measures beside FID, on the same features: what a distance between two Gaussians does not see.

    MIND        3D · mean over 1000 random unit directions u of mean (sort Xu − sort Yu)²; smaller is better
    precision   share of the generated images that lie in the ball of a real one: are they real?
    recall      share of the real images that lie in the ball of a generated one: is nothing missing?
    density     precision that counts the balls: mean number of real balls around a generated image, over k
    coverage    share of the real images with a generated one in their ball
    authentic   share of the generated images that are no copies: farther from their nearest training image than that
                one is from its own nearest
    floor       FID of one half of the real images against the other: what no generator can be expected to beat
    CAS         classification accuracy score: a classifier trained on the samples of a task, tested on its real images

A ball reaches to the 5th nearest image of the same side. Both sides have equal counts: of the larger as many as the
smaller has, drawn once; of unequal ones all of these are biased.

Berthet et al., MIND: Monge Inception Distance, 2026; Kynkäänniemi et al., Improved Precision and Recall Metric, 2019;
Naeem et al., Reliable Fidelity and Diversity Metrics, 2020 (density, coverage, k = 5); Alaa et al., How Faithful is
your Synthetic Data?, 2022, section 3.3 (authenticity); Ravuri and Vinyals, Classification Accuracy Score, 2019.
"""

import functools

import numpy as np

import common

DIRECTIONS = 1000
NEAREST = 5  # k
ROWS = 1024  # of a block of distances: 1024 × 65,000 training images are 270 MB


@functools.cache
def unit_directions(dimensions):
    """(DIRECTIONS, dimensions), the same in every run."""
    u = common.numpy_rng(("MIND", dimensions)).standard_normal((DIRECTIONS, dimensions))
    return u / np.linalg.norm(u, axis=1, keepdims=True)


def projected(features):
    """Features (N, D) on each direction, sorted: (N, DIRECTIONS)."""
    return np.sort(np.asarray(features, np.float64) @ unit_directions(features.shape[1]).T, axis=0)


def monge_distance(a, b, dimensions):
    """MIND of two sides that are `projected`, with equal counts; 0 for equal sets, in units of a squared distance."""
    return 3 * dimensions * float(np.square(a - b).mean())


def distances(a, b):
    """Euclidean distances (len(a), len(b)) of rows, float64; of equal rows exactly 0, which products do not give."""
    squares = np.square(a).sum(1)[:, None] + np.square(b).sum(1)
    found = squares - 2 * (a @ b.T)
    return np.sqrt(np.where(found < 1e-12 * squares, 0, found))


def radii(features):
    """(N,): of each row the distance to the 5th nearest other one; with fewer than 6 rows to the farthest."""
    k = min(NEAREST, len(features) - 1)
    return np.partition(distances(features, features), k, axis=1)[:, k]  # the nearest of all is itself


def balls(real, real_radii, generated):
    """{precision, recall, density, coverage} of features (N, D) and as many generated ones; 0..1, density 0..N/5."""
    apart = distances(real, generated)
    in_real = apart < real_radii[:, None]
    in_generated = apart < radii(generated)
    return {
        "precision": float(in_real.any(0).mean()),
        "recall": float(in_generated.any(1).mean()),
        "density": float(in_real.sum(0).mean() / min(NEAREST, len(real) - 1)),
        "coverage": float(in_real.any(1).mean()),
    }


def nearest(features, parts, itself=None):
    """Of each row its nearest among the rows of `parts`, a list of arrays: (indices, distances float64).

    itself: indices of the rows among them, which are passed over. The search is in float32, which may take the wrong
    one of two at the same distance; the distance is exact.
    """
    best, at = np.full(len(features), np.inf), np.zeros(len(features), int)
    rows, start = np.asarray(features, np.float32), 0
    for part in parts:
        for k in range(0, len(part), 65536):
            some = np.asarray(part[k : k + 65536], np.float32)
            for r in range(0, len(rows), ROWS):
                block = slice(r, r + ROWS)
                close = np.square(some).sum(1) - 2 * (rows[block] @ some.T)
                if itself is not None:
                    column = itself[block] - start - k
                    here = np.flatnonzero((column >= 0) & (column < len(some)))
                    close[here, column[here]] = np.inf
                column = close.argmin(1)
                found = close[np.arange(len(column)), column]
                better = found < best[block]
                best[block][better], at[block][better] = found[better], (start + k + column)[better]
        start += len(part)
    return at, np.linalg.norm(np.asarray(features, np.float64) - take(parts, at), axis=1)


def take(parts, indices):
    """Rows of a list of arrays, as if they were one: (len(indices), D)."""
    starts = np.cumsum([0, *map(len, parts)])
    which = np.searchsorted(starts, indices, side="right") - 1
    return np.stack([parts[p][i - starts[p]] for p, i in zip(which, indices, strict=True)])


def authentic(generated, training):
    """Share of the generated features (N, D) that copy none of the training ones, a list of arrays (n, D), in 0..1."""
    at, apart = nearest(np.asarray(generated, np.float32), training)  # the training features are float32
    chosen, back = np.unique(at, return_inverse=True)
    _, own = nearest(take(training, chosen), training, itself=chosen)
    return float((apart > own[back]).mean())
