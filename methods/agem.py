"""Averaged gradient episodic memory (A-GEM): no step may, to first order, raise the loss on the memory.

    g ← g − (g·r / r·r) r   if g·r < 0        g: gradient of the current batch, r: of images from the memory

g and r are one flat vector each over all weights of the phase. r is taken anew at each step, from as many images as
ER replays (--replay_size), drawn from a memory of --memory_size.

Chaudhry et al., Efficient Lifelong Learning with A-GEM, 2019 (arXiv:1812.00420), equation 11.
Paper: CLoG, section 3.2 (11).

The memory is ER's reservoir. The log counts the steps that were projected, in the column `projected`. Clipping comes
after the projection. The released code of the benchmark fills no memory, and adds r to g before it compares them.
"""

from common import Reservoir
from methods.ncl import NCL


class AGEM(NCL):
    def __init__(self, args, learner):
        super().__init__(args, learner)
        self.memory = Reservoir(args.memory_size, learner.data)

    def mix(self, batch, key):
        images, labels = self.memory.draw(self.args.replay_size, (*key, "memory"))
        self.reference = self.learner.draw(images, labels, (*key, "replay"))
        return batch

    def after_backward(self, phase, batch):
        if not phase.main or not len(self.reference["labels"]):
            return {"projected": 0.0}
        import torch

        params = self.learner.params(phase).values()
        loss = self.learner.loss(phase, self.reference)
        reference = torch.autograd.grad(loss, list(params), allow_unused=True)
        pairs = [(p.grad, r) for p, r in zip(params, reference, strict=True) if p.grad is not None and r is not None]
        dot = sum((g * r).sum() for g, r in pairs)
        square = sum((r * r).sum() for _, r in pairs)
        conflict = dot < 0
        factor = torch.where(conflict, dot / square, 0)
        for g, r in pairs:
            g.sub_(r * factor)
        return {"projected": conflict}

    def end_task(self, task):
        self.memory.add(task.indices, (self.args.seed, task.number, "reservoir"))

    def state_dict(self):
        return self.memory.state_dict()

    def load_state_dict(self, state):
        self.memory.load_state_dict(state)

    def stored(self, parameters, task):
        return parameters + self.memory.images.size
