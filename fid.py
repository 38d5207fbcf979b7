"""Distances between sets of images, the features they are measured on, and the reference features on the disk.

    FID = |μ₁ − μ₂|² + tr(C₁ + C₂ − 2 (C₁C₂)^½)        of the features' means and covariances
    KID = unbiased MMD² with the kernel (x·y / D + 1)³  of the features themselves, as it is: not times 100 or 1000

Heusel et al., GANs Trained by a Two Time-Scale Update Rule, 2017 (FID); Bińkowski et al., Demystifying MMD GANs, 2018,
section 4 (KID). All sums are float64. FID of few images is too large by an amount that depends on their number; KID
is not, and can fall a little below 0.

What stands beside them is in measures.py.

From top to bottom: distances · feature extractors · the reference · the judges of a run and of --select best.
"""

import contextlib
import functools
import hashlib
import math
from pathlib import Path

import numpy as np

import common
import measures
import runfolder

INCEPTION_FILE = "pt_inception-2015-12-05-6726825d.pth"  # the last part is the beginning of its SHA-256
INCEPTION_URL = f"https://github.com/mseitzer/pytorch-fid/releases/download/fid_weights/{INCEPTION_FILE}"
KID_IMAGES = 5000  # of a larger reference KID takes as many, drawn once: its cost grows with their square
REFERENCES = 8  # kept in memory, at 33 MB for the root, 41 MB for KID, 49 MB for MIND and the balls
SHOWN = 16  # images of a cell that are kept for the sample grids
BALLS = ("precision", "recall", "density", "coverage")
METRICS = ("FID", "KID", "MIND", *BALLS, "authentic", "floor", "accuracy", "CAS")  # of label-conditioned runs
CAS_STEPS = 400


# ---------------------------------------------------------------------------------------------- distances


def statistics(features):
    """(mean, spread) of features (N, D), or of a list of such arrays; float64.

    The spread is the covariance (D, D). Of fewer images than dimensions it is the smaller matrix of their centred
    features (N, D) over √(N−1): then spread.T @ spread is the covariance.
    """
    parts = features if isinstance(features, list) else [features]
    count = sum(map(len, parts))
    if count < 2:
        common.fail(f"{count} image(s) have no covariance; at least 2 are needed on each side")
    mean = sum(part.sum(0, dtype=np.float64) for part in parts) / count
    if not np.isfinite(mean).all():
        common.fail("the features of an image are not finite: are the weights?", code=1)
    # the mean goes first, so nothing cancels; in blocks, as the features may be larger than the memory
    blocks = (np.asarray(p[k : k + 4096], np.float64) - mean for p in parts for k in range(0, len(p), 4096))
    if count < len(mean):
        return mean, np.concatenate([*blocks]) / math.sqrt(count - 1)
    return mean, sum(block.T @ block for block in blocks) / (count - 1)


def with_root(statistics):
    """The reference side, computed once: (mean, trace of the covariance, root); root @ root.T is the covariance.

    The root is lower triangular, which spares the distance half of its products; a Cholesky root would be too, but
    exists only where the covariance is not singular.
    """
    mean, spread = statistics
    if len(spread) < len(mean):
        trace, any_root = np.square(spread).sum(), spread
    else:
        values, vectors = np.linalg.eigh(spread)
        trace, any_root = np.trace(spread), (vectors * np.sqrt(values.clip(0))).T
    return mean, trace, np.linalg.qr(any_root, mode="r").T


def frechet_distance(generated, reference):
    """FID of `statistics` and a reference `with_root`; smaller is better, ≥ 0.

    With C₂ = R Rᵀ, tr (C₁C₂)^½ is the sum of the square roots of the eigenvalues of Rᵀ C₁ R, which is symmetric: no
    square root of a non-symmetric matrix that could turn complex. With C₁ = SᵀS they are those of SR (SR)ᵀ too, which
    is small where S has few rows.
    """
    (mean_1, spread), (mean_2, trace_2, root) = generated, reference
    columns = range(0, root.shape[1], 128)  # root is 0 above its diagonal: block by block that is left out
    product = np.concatenate([spread[:, k:] @ root[k:, k : k + 128] for k in columns], axis=1)
    if len(spread) == len(mean_1):
        trace_1, symmetric = np.trace(spread), np.zeros((product.shape[1],) * 2)
        for k in columns:  # root.T @ product, but only the lower half, all that eigvalsh reads
            symmetric[k : k + 128, : k + 128] = root[k:, k : k + 128].T @ product[k:, : k + 128]
    else:
        few = len(product) < product.shape[1]
        trace_1, symmetric = np.square(spread).sum(), product @ product.T if few else product.T @ product
    # an eigenvalue 0 more: rows that lie 2048 numbers apart share their places in the cache, which takes twice the time
    shared = np.sqrt(np.linalg.eigvalsh(np.pad(symmetric, (0, 1))).clip(0)).sum()
    return max(0.0, float(np.square(mean_1 - mean_2).sum() + trace_1 + trace_2 - 2 * shared))


def kernel_mean(x, y=None):
    """Mean of (x·y / D + 1)³ over all pairs of a row of x and one of y; without y, over the pairs of two rows of x."""
    x = np.asarray(x, np.float64)
    other = x if y is None else np.asarray(y, np.float64)
    total = 0.0
    for k in range(0, len(x), 1000):
        kernel = x[k : k + 1000] @ other.T / x.shape[1] + 1
        total += (kernel * kernel * kernel).sum()
    if y is not None:
        return float(total / (len(x) * len(y)))
    if len(x) < 2:
        common.fail(f"{len(x)} image(s) have no kernel distance; at least 2 are needed on each side")
    itself = ((np.square(x).sum(1) / x.shape[1] + 1) ** 3).sum()
    return float((total - itself) / (len(x) * (len(x) - 1)))


def kernel_reference(features):
    """The reference side of KID, computed once: (features of KID_IMAGES at most, mean kernel among them)."""
    rows = drawn(features, KID_IMAGES, "KID")
    return rows, kernel_mean(rows)


def drawn(features, most, purpose):
    """As many rows as `most` of features (N, D), or of a list of such arrays, in their order; drawn by `purpose`."""
    parts = features if isinstance(features, list) else [features]
    if not (count := sum(map(len, parts))):
        return parts[0]
    chosen = np.sort(common.numpy_rng((purpose, count)).permutation(count)[:most])
    return measures.take(parts, chosen)


def kernel_distance(generated, reference):
    """KID of features (N, D) and a `kernel_reference`; smaller is better, around 0 for the same distribution."""
    rows, among_reference = reference
    return kernel_mean(generated) + among_reference - 2 * kernel_mean(generated, rows)


# --------------------------------------------------------------------------------------------- extractors


def extractor_kind(dataset, wanted="auto"):
    """`auto`: Inception, which cannot read the 8 × 8 digits; for them the classifier."""
    if wanted != "auto":
        return wanted
    return "classifier" if dataset.split(":")[0] == "digits" else "inception"


def extractor(kind, data, cache, device, weights=None):
    return Classifier(data, cache, device) if kind == "classifier" else Inception(device, weights)


class Classifier:
    """Features of a small classifier trained on the scenario's own images and classes, with a fixed seed.

    For work offline and for images that Inception does not know. `features` are scaled so that their variance
    over the scenario, summed over the 64 dimensions, is 100. Trained once, kept in <cache>/classifiers/.
    """

    def __init__(self, data, cache, device):
        import torch
        from safetensors.torch import load_file, save_file

        self.device = device
        self.net = self.build(data.images.shape[-1], len(data.classes)).to(device)
        folder = self.folder(cache, data.digest, data.classes)
        with common.locked(folder.parent, wait=True):
            if not common.is_sound(folder):
                self.train(data)
                weights = {k: v.cpu().contiguous() for k, v in self.net.state_dict().items()}
                weights |= {"scale": torch.tensor(self.scale), "held_out": torch.tensor(self.held_out)}
                with common.new_folder(folder) as target:
                    save_file(weights, target / "classifier.safetensors")
        state = load_file(folder / "classifier.safetensors")
        self.scale, self.held_out = state.pop("scale").item(), state.pop("held_out").item()
        self.net.load_state_dict(state)
        self.net.eval()
        self.name = self.identity(cache, data.digest, data.classes)

    @staticmethod
    def folder(cache, digest, classes):
        recipe = hashlib.sha256(f"1 {digest} {len(classes)}".encode()).hexdigest()[:12]
        return Path(cache) / "classifiers" / recipe

    @classmethod
    def identity(cls, cache, digest, classes):
        """classifier-<hash of its weights>, or None if it is not trained yet."""
        folder = cls.folder(cache, digest, classes)
        return f"classifier-{runfolder.checkpoint_hash(folder)[:8]}" if common.is_sound(folder) else None

    @staticmethod
    def build(size, classes):
        """Convolutions down to 4 × 4, then 64 features, then logits."""
        from torch import nn

        layers, width = [nn.Conv2d(3, 32, 3, padding=1), nn.GroupNorm(8, 32), nn.SiLU()], 32
        while size > 4:
            wider, size = min(2 * width, 128), (size + 1) // 2
            layers += [nn.Conv2d(width, wider, 3, stride=2, padding=1), nn.GroupNorm(8, wider), nn.SiLU()]
            width = wider
        return nn.Sequential(
            *layers, nn.Flatten(), nn.Linear(width * size * size, 64), nn.SiLU(), nn.Linear(64, classes)
        )

    def train(self, data):
        """On nine tenths of the images; a tenth is held out to say how far the judge can be trusted."""
        import torch

        order = common.numpy_rng(("classifier", "split")).permutation(len(data.labels))
        held, kept = order[: len(order) // 10], order[len(order) // 10 :]
        with torch.random.fork_rng():
            torch.manual_seed(0)
            fresh = self.build(data.images.shape[-1], len(data.classes))
        self.net.load_state_dict(fresh.state_dict())
        fit(self.net, data.images, data.labels, kept, self.device, f"classifier for {data.name}")
        self.scale = 1.0
        self.held_out = self.accuracy(data.images[held], data.labels[held]) if len(held) else math.nan
        variance = self.features(data.images).var(0).sum()
        if not variance > 0:
            common.fail(f"the pictures of {data.name} are all alike: there is nothing to tell apart")
        self.scale = float(10 / np.sqrt(variance))
        read = f"reads {self.held_out:.1%} of {len(held)} held-out images" if len(held) else "no image held out"
        print(f"classifier for {data.name}: {read}")

    def features(self, images, batch=256):
        """uint8 images (N, 3, H, W) → float64 features (N, 64)."""
        return self.scale * in_batches(lambda x: self.net[:-1](x / 127.5 - 1), images, batch, self.device)

    def accuracy(self, images, labels, batch=256):
        """Share of the images that are read as the class that was asked for."""
        logits = in_batches(lambda x: self.net(x / 127.5 - 1), images, batch, self.device)
        return float((logits.argmax(1) == np.asarray(labels)).mean())


def fit(net, images, labels, rows, device, title, steps=800, batch=128):
    """Trains a classifier on these rows of uint8 images (N, 3, H, W) and labels (N,): Adam, lr 2e-3 falling to 0."""
    import torch

    net.train()
    optimiser = torch.optim.Adam(net.parameters(), 2e-3)
    for step in common.tqdm(range(steps), title, disable=None, leave=False):
        pick = rows[common.batch_positions(len(rows), step, batch, "classifier", 0)]
        x = torch.as_tensor(images[pick]).to(device).float() / 127.5 - 1
        loss = torch.nn.functional.cross_entropy(net(x), torch.as_tensor(labels[pick]).to(device))
        optimiser.zero_grad()
        loss.backward()
        optimiser.param_groups[0]["lr"] = 2e-3 * 0.5 * (1 + math.cos(math.pi * step / steps))
        optimiser.step()
    net.eval()


def classification_score(images, labels, real, real_labels, device):
    """CAS: accuracy in 0..1 on the real images of a classifier that has seen the samples alone (Ravuri and Vinyals)."""
    import torch

    classes, positions = np.unique(labels, return_inverse=True)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = Classifier.build(images.shape[-1], len(classes)).to(device)
    fit(net, images, positions, np.arange(len(images)), device, "classifier of samples", steps=CAS_STEPS)
    logits = in_batches(lambda x: net(x / 127.5 - 1), real, 256, device)
    return float((classes[logits.argmax(1)] == real_labels).mean())


class Inception:
    """The 2048 pool features of pytorch-fid's network and weights; images 0..255 scaled to 0..1, then to 299 × 299."""

    def __init__(self, device, weights=None):
        from unittest.mock import patch

        from pytorch_fid import inception

        path = inception_weights(weights)
        try:
            state = common.load_tensors(path)
            # pytorch-fid's constructor would download its weights: it gets those of the file
            with patch.object(inception, "load_state_dict_from_url", lambda *a, **k: state):
                net = inception.InceptionV3([inception.InceptionV3.BLOCK_INDEX_BY_DIM[2048]])
        except Exception as error:  # a torn zip, another network, no weights at all: half a dozen kinds
            reason = (str(error).splitlines() or [type(error).__name__])[0][:100].rstrip(".: ")
            common.fail(f"{path} is damaged, or not pytorch-fid's Inception weights ({reason}); fetch {INCEPTION_URL}")
        self.device, self.net = device, net.to(device).eval()
        self.name = inception_name(weights)
        if self.name != "inception":
            common.note(f"{path} is not the published {INCEPTION_FILE}: its scores are those of '{self.name}'")

    def features(self, images, batch=64):
        """uint8 images (N, 3, H, W) → float64 features (N, 2048)."""
        with full_float32():
            return in_batches(lambda x: self.net(x / 255)[0].flatten(1), images, batch, self.device)


def inception_weights(weights=None):
    """Path of the weights file, or the end of the program: it comes before any work."""
    import torch

    path = Path(weights) if weights else Path(torch.hub.get_dir()) / "checkpoints" / INCEPTION_FILE
    if not path.is_file():
        common.fail(
            f"no Inception weights: {path} is missing; download {INCEPTION_URL} and put it there, or name the file "
            "with --inception_weights (without it: --select last trains, --extractor classifier scores)"
        )
    return path


def inception_name(weights=None):
    """inception, or for another file than pytorch-fid's inception-<its hash>: their scores must not meet."""
    path = inception_weights(weights)
    digest = sum_of(path, path.stat().st_size, path.stat().st_mtime_ns)
    return "inception" if digest.startswith(Path(INCEPTION_FILE).stem[-8:]) else f"inception-{digest[:8]}"


@functools.lru_cache  # once a process, as long as the file is the same
def sum_of(path, size, time):
    return common.file_sum(path)


@contextlib.contextmanager
def full_float32():
    """No TF32: features from a GPU and a CPU meet in one cache."""
    import torch

    before = torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()
    torch.backends.cudnn.allow_tf32 = False
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before[0]
        torch.set_float32_matmul_precision(before[1])


def in_batches(function, images, batch, device):
    """function(float32 images in 0..255) over batches of uint8 images → one float64 NumPy array; no gradients."""
    import torch

    parts = []
    with torch.no_grad():
        for k in range(0, len(images), batch):
            part = images[k : k + batch]
            if isinstance(part, np.ndarray):
                part = torch.from_numpy(part.copy())  # memory maps are read-only
            if part.dtype != torch.uint8:
                raise TypeError(f"images must be uint8 in 0..255, not {part.dtype}")
            part = part.expand(-1, 3, -1, -1)  # gray counts as three equal channels
            parts.append(function(part.to(device).float()).double().cpu().numpy())
    return np.concatenate(parts)


# ---------------------------------------------------------------------------------------------- reference


def reference_features(extractor, data, classes, cache, split="train"):
    """[float32 features (n, D), one array a class] of all images of the classes; memory-mapped.

    Each class is computed once and kept in <cache>/features/<extractor>-<digest of the images>-<size>-<split>/, so the
    reference of any task is put together from the disk, in every class order and for every run. A class that is there
    is not computed again after a stop; several processes wait for each other. Images, not sums: 8 KB an image (10 GB
    for ImageNet) is less than the 17 MB a class that covariances would take, and KID needs them.
    """
    folder = Path(cache) / "features" / f"{extractor.name}-{data.digest}-{data.images.shape[-1]}-{split}"
    missing = [c for c in classes if not (folder / f"class{c}").is_dir()]
    bar = common.tqdm(total=int(np.isin(data.labels, missing).sum()), desc=f"{extractor.name} of {data.name}",
                      unit="img", disable=None if missing else True, leave=False)  # fmt: skip
    features = []
    for c in classes:
        rows, target = np.flatnonzero(data.labels == c), folder / f"class{c}"
        if not len(rows):
            continue
        with common.locked(folder, wait=True):
            if not common.is_sound(target):
                parts = []
                for k in range(0, len(rows), 1024):
                    some = rows[k : k + 1024]
                    parts.append(extractor.features(data.images[some]).astype(np.float32))
                    bar.update(len(some))
                with common.new_folder(target) as new:
                    np.save(new / "features.npy", np.concatenate(parts))
        features.append(np.load(target / "features.npy", mmap_mode="r"))
    bar.close()
    return features


# ------------------------------------------------------------------------------------------------- judges


class Distances:
    """What scores a run of a label-conditioned model; of concepts it is alignment.Alignment, with the same methods."""

    def __init__(self, config, args):
        """Nothing is loaded: runs that are scored already need no weights."""
        self.args, self.extractor, self.references = args, None, {}
        self.kind, self.samples = (
            extractor_kind(config["flags"]["dataset"], args.extractor),
            samples(config["flags"]["preset"]),
        )
        self.name = self.named(config)

    def named(self, config):
        """What the extractor is called."""
        if self.kind == "classifier":
            about = self.args.data, config["data"]["digest"], config["data"]["classes"]
            return Classifier.identity(*about) or self.kind
        try:
            return inception_name(self.args.inception_weights)
        except common.UserError:  # said when there is something to score
            return self.kind

    def metrics(self, config, trained_to):
        """Those that a cell of the quality matrix has."""
        wanted = self.args.metrics or ("FID", "KID", "accuracy")
        return [name for name in wanted if name != "accuracy" or self.kind == "classifier"]

    def check(self):
        """Ends the program if the weights are not there."""
        if self.kind == "inception":
            inception_weights(self.args.inception_weights)

    def load(self, config, data, reference, device):
        """data: what the run was trained on; reference: what its samples are compared with, that or the test split."""
        self.data, self.reference, self.device = data, reference, device
        if self.extractor is None:
            self.extractor = extractor(self.kind, data, self.args.data, device, self.args.inception_weights)
            self.name = self.extractor.name
        if self.kind == "inception":
            sizes = [int(np.isin(reference.labels, classes).sum()) for classes in config["tasks"]]
            warn_of_few(self.args.num_samples or self.samples, f"generated images a task of {config['data']['name']}")
            warn_of_few(min(sizes), f"reference images in the smallest task of {config['data']['name']}")

    def score(self, learner, config, trained_to, task, protocol):
        """One cell: ({metric: value}, number of reference images, rows of samples, of real ones nearest to them)."""
        classes, count = sorted(config["tasks"][task - 1]), int(protocol["generated"])
        reference_labels = self.reference.labels[np.isin(self.reference.labels, classes)]
        labels = common.proportional_labels(reference_labels, count)
        seeds = common.sampling_seeds((int(protocol["sampling_seed"]), task, "report"), count)
        images = learner.sample(labels, seeds)
        if (key := (self.reference.digest, count, *classes)) not in self.references:
            if len(self.references) >= REFERENCES:
                self.references.pop(next(iter(self.references)))  # the oldest
            self.references[key] = Reference(self, classes, count)
        known, features = self.references[key], self.extractor.features(images)
        values, wanted = {}, self.metrics(config, trained_to)
        if "FID" in wanted:
            values["FID"] = frechet_distance(statistics(features), known.moments)
        if "KID" in wanted:
            values["KID"] = kernel_distance(features, known.kernel)
        if "accuracy" in wanted:
            values["accuracy"] = self.extractor.accuracy(images, labels)
        few = drawn(features, len(known.rows), "generated") if {"MIND", *BALLS} & {*wanted} else None  # equal counts
        if "MIND" in wanted:
            values["MIND"] = measures.monge_distance(measures.projected(few), known.projected, features.shape[1])
        if {*BALLS} & {*wanted}:
            values |= measures.balls(known.rows, known.radii, few)
        if "authentic" in wanted:
            values["authentic"] = measures.authentic(features, known.training)
        if "floor" in wanted:
            values["floor"] = known.floor
        if "CAS" in wanted:
            rows = np.flatnonzero(np.isin(self.reference.labels, classes))
            real = self.reference.images[rows], self.reference.labels[rows]
            values["CAS"] = classification_score(images, np.asarray(labels), *real, self.device)
        order = np.argsort(labels[:SHOWN], kind="stable")
        near = None
        if "authentic" in wanted:
            at, _ = measures.nearest(features[order], known.training)
            places = np.concatenate([np.flatnonzero(self.data.labels == c) for c in classes])  # as the features lie
            near = in_rows(self.data.images[places[at]])
        return {name: values[name] for name in wanted}, len(reference_labels), in_rows(images[order].numpy()), near


def in_rows(images):
    """(n, C, H, W) as rows of pictures to show: two of SHOWN / 2, of fewer images one."""
    return images.reshape(2, -1, *images.shape[1:]) if len(images) == SHOWN else images[None]


class Reference:
    """The real side of one task, each part computed once, when it is asked for."""

    def __init__(self, judge, classes, generated):
        about = judge.extractor, judge.reference, classes, judge.args.data, judge.args.reference
        self.judge, self.classes, self.generated, self.features = judge, classes, generated, reference_features(*about)

    @functools.cached_property
    def moments(self):
        return with_root(statistics(self.features))

    @functools.cached_property
    def kernel(self):
        return kernel_reference(self.features)

    @functools.cached_property
    def rows(self):
        """As many as there are generated ones, if there are."""
        return drawn(self.features, self.generated, "real").astype(np.float64)

    @functools.cached_property
    def projected(self):
        return measures.projected(self.rows)

    @functools.cached_property
    def radii(self):
        return measures.radii(self.rows)

    @functools.cached_property
    def floor(self):
        """FID of one half, or as many as are generated, against the other half."""
        count = sum(map(len, self.features))
        order = common.numpy_rng(("floor", count)).permutation(count)
        one, other = order[: min(count // 2, self.generated)], order[count // 2 :]
        halves = [statistics(measures.take(self.features, np.sort(rows))) for rows in (one, other)]
        return frechet_distance(halves[0], with_root(halves[1]))

    @functools.cached_property
    def training(self):
        """What may have been copied: features of the training images, whatever the reference is."""
        if self.judge.args.reference == "train":
            return self.features
        return reference_features(self.judge.extractor, self.judge.data, self.classes, self.judge.args.data)


def samples(preset):
    """Images of a task by default."""
    return 256 if preset == "tiny" else 2048


def warn_of_few(count, what):
    if count < 2048:
        common.note(f"{count} {what}, under 2048: their Inception covariance is singular and FID is too large; compare "
                    "it only between equal counts, or read KID")  # fmt: skip


class Selection:
    """The judge of --select best: FID of a few samples against all images that a task trains on."""

    def __init__(self, args, data, device):
        kind = extractor_kind(args.dataset)
        self.args, self.data = args, data
        self.extractor = extractor(kind, data, args.data, device, args.inception_weights)
        self.name = self.extractor.name

    def begin(self, task, indices):
        """Labels, seeds and reference of a task that trains on the images `indices`."""
        labels, count = self.data.labels[indices], self.args.val_samples
        self.labels = common.proportional_labels(labels, count)
        self.seeds = common.sampling_seeds((self.args.seed, task.number, "selection"), count)
        known = reference_features(self.extractor, self.data, np.unique(labels), self.args.data)
        self.reference = with_root(statistics(known))

    def score(self, learner):
        """FID, smaller is better."""
        features = self.extractor.features(learner.sample(self.labels, self.seeds))
        return frechet_distance(statistics(features), self.reference)
