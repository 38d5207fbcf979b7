"""Averaged gradient episodic memory (A-GEM): no gradient may, to first order, raise the loss on the memory.

    g ← g − (g·r / r·r) r   if g·r < 0        g: gradient of the current batch, r: of images from the memory

g and r are one flat vector each over all weights of the phase. r is taken anew at each step, from as many images as
ER replays (--replay_size), drawn from ER's memory of --memory_size images.

Chaudhry et al., Efficient Lifelong Learning with A-GEM, 2019 (arXiv:1812.00420), equation 11.
Paper: CLoG, section 3.2 (11).

Deviations: the original takes a plain gradient step; here clipping and Adam follow the projection, as for all methods,
so the promise holds for the gradient and not for each update. The log counts the steps that were projected, in the
column `projected`. The released code of the benchmark fills no memory, and adds r to g before it compares them.
"""

from methods.er import ER


class AGEM(ER):
    def mix(self, batch, key):
        images, labels = self.memory.draw(self.args.replay_size, (*key, "memory"))
        self.reference = self.learner.draw(images, labels, (*key, "replay"))
        return batch

    def after_backward(self, phase, batch):
        if not phase.main:
            return None
        if not len(self.reference["labels"]):
            return {"projected": 0.0}
        import torch

        params = list(self.learner.params(phase).values())
        loss = self.learner.loss(phase, self.reference)
        reference = torch.autograd.grad(loss, params, allow_unused=True)
        pairs = [(p.grad, r) for p, r in zip(params, reference, strict=True) if p.grad is not None and r is not None]
        dot = sum((g * r).sum() for g, r in pairs)
        square = sum(r.square().sum() for _, r in pairs)
        conflict = dot < 0
        factor = torch.where(conflict, dot / square, 0)
        for g, r in pairs:
            g.addcmul_(r, -factor)
        return {"projected": conflict}
