"""What several methods share: replayed rows, the reservoir, importance, quadratic penalties. No method itself.

PyTorch is imported inside the functions that need it: a finished run is answered before it is loaded.
"""

import numpy as np
from tqdm import tqdm

from common import hash32, numpy_rng


def append(batch, more):
    """The rows of `more` behind those of `batch`, for every entry of the batch."""
    import torch

    return {name: torch.cat([rows, more[name]]) for name, rows in batch.items()}


class Reservoir:
    """Memory of `size` images in which each of the n images seen so far is kept with probability size/n.

    Algorithm R (Vitter, Random Sampling with a Reservoir, 1985). Labels travel with their images.
    """

    def __init__(self, size, data):
        self.data = data
        self.seen = 0
        self.size = size
        self.images = data.images[:0]
        self.labels = data.labels[:0]

    def add(self, indices, key):
        """Shows the images `indices` of the data set, each once."""
        slots = np.full(min(self.size, self.seen + len(indices)), -1)  # which of the new images a slot ends up with
        draws = numpy_rng(key).random(len(indices))
        for index, draw in zip(indices, draws, strict=True):
            slot = self.seen if self.seen < self.size else int(draw * (self.seen + 1))
            if slot < self.size:
                slots[slot] = index
            self.seen += 1
        filled = min(self.seen, self.size)
        fresh = np.flatnonzero(slots >= 0)
        images = np.zeros((filled, *self.data.images.shape[1:]), np.uint8)
        labels = np.zeros(filled, np.int64)
        images[: len(self.images)], labels[: len(self.labels)] = self.images, self.labels
        images[fresh], labels[fresh] = self.data.images[slots[fresh]], self.data.labels[slots[fresh]]
        self.images, self.labels = images, labels

    def draw(self, count, key):
        """`count` images and labels, no slot twice until all were drawn; none while the memory is empty."""
        rng, n = numpy_rng(key), len(self.labels)
        rounds = -(-count // n) if n else 0
        slots = np.concatenate([np.zeros(0, int), *(rng.permutation(n) for _ in range(rounds))])[:count]
        return self.images[slots], self.labels[slots]

    def state_dict(self):
        import torch

        # np.array copies: the state must not change with the memory
        images, labels = torch.from_numpy(np.array(self.images)), torch.from_numpy(np.array(self.labels))
        return {"images": images, "labels": labels, "seen": self.seen}

    def load_state_dict(self, state):
        self.images, self.labels, self.seen = state["images"].numpy(), state["labels"].numpy(), state["seen"]


def parameters(learner):
    """{name: parameter} of all that the learner trains."""
    return {name: p for phase in learner.phases(0) for name, p in learner.params(phase).items()}


def importance(learner, task, count, seed, objective, add):
    """Importance of each parameter, a mean over single images of the task → {name: tensor like the parameter}.

    learner, task: as a method gets them. count: images at most, each once, or as often as the learner says
    (`draws_an_image`: where a task has a handful of pictures, each is taken with many time steps and noises).
    objective(phase, batch): scalar of a batch of one image, or a tuple of independent ones, each differentiated in eval
    mode for each main phase.
    add(total, gradient): adds what one gradient contributes to its running total, in place.
    """
    import torch

    images, labels = learner.data.images, learner.data.labels
    shuffled = numpy_rng((seed, task.number, "importance")).permutation(task.indices)
    pick = np.tile(shuffled, learner.draws_an_image)[:count]
    phases = [phase for phase in learner.phases(0) if phase.main]
    totals = {name: torch.zeros_like(p) for name, p in parameters(learner).items()}
    training = {name: net.training for name, net in learner.nets.items()}
    for net in learner.nets.values():
        net.eval()
    usual = np.resize(shuffled, learner.args.batch_size)  # of a small task every image several times, as in training
    learner.hold(usual, (seed, task.number, "usual batch"))
    for k, index in enumerate(tqdm(pick, f"importance of task {task.number}", unit="img", disable=None, leave=False)):
        key = (seed, task.number, k, "importance")
        batch = learner.draw(images[[index]], labels[[index]], key)
        for phase in phases:
            torch.manual_seed(hash32((*key, phase.name)))
            params = learner.params(phase)
            terms = objective(phase, batch)
            for term in terms if isinstance(terms, tuple) else (terms,):
                gradients = torch.autograd.grad(term, list(params.values()), allow_unused=True)
                for name, gradient in zip(params, gradients, strict=True):
                    if gradient is not None:
                        add(totals[name], gradient)
    learner.hold(None)
    for name, net in learner.nets.items():
        net.train(training[name])
    return {name: total.div_(len(pick)) for name, total in totals.items()}


def quadratic_penalty(params, anchor, importance, strength):
    """strength · Σ Ω (θ − θ*)²: adds its gradient 2 · strength · Ω (θ − θ*) to `.grad` and returns its value.

    params, anchor, importance: {name: tensor}, Ω ≥ 0 and broadcast over θ. Parameters without a gradient are skipped.
    """
    import torch

    terms = [(p.detach(), p.grad, anchor[n], importance[n]) for n, p in params.items() if p.grad is not None]
    # A GPU prefers few launches, but all at once would take two more copies of the weights. On a CPU one tensor at a
    # time stays in the cache: 0.4 of the time.
    together = 64 if terms and terms[0][0].is_cuda else 1
    values = []
    for k in range(0, len(terms), together):
        theta, gradient, start, omega = map(list, zip(*terms[k : k + together], strict=True))
        difference = torch._foreach_sub(theta, start)
        weighted = torch._foreach_mul(difference, omega)
        torch._foreach_add_(gradient, weighted, alpha=2 * strength)
        torch._foreach_mul_(weighted, difference)
        values += torch._foreach_norm(weighted, 1)  # of what is not negative: the sum
    return strength * torch.stack(values).sum() if values else 0.0


def with_prefix(prefix, tensors):
    """{name: tensor} → {"prefix/name": clone}, for a flat state."""
    return {f"{prefix}/{name}": tensor.clone() for name, tensor in tensors.items()}


def without_prefix(prefix, state, device):
    """The tensors of a state that were stored `with_prefix`."""
    start = len(prefix) + 1
    return {k[start:]: v.to(device, copy=True) for k, v in state.items() if k.startswith(prefix + "/")}
