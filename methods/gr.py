"""Generative replay (GR): as ER, but the past is drawn by a frozen copy of the network itself.

    loss = mean over (current ∪ generated) rows of the network's own loss

At each step the copy, taken when the task starts, draws --replay_size fresh images of past classes in near-equal
number, by the same sampler as in the evaluation. From task 3 on it replays what it learnt from replayed images.

Shin et al., Continual Learning with Deep Generative Replay, 2017 (arXiv:1705.08690), section 3, without the solver:
the generator is what is learnt here. Paper: CLoG, section 3.2 (5).

Deviations: the original weighs new and replayed data by a ratio r; here, as in CLoG, each row weighs the same. The
copy is in eval mode (in the released code of the benchmark its dropout is on).
"""

import numpy as np

from common import numpy_rng, sampling_seeds
from methods._shared import append
from methods.ncl import NCL


class GR(NCL):
    def start_task(self, task, past):
        self.past = [c for t in past for c in t.classes]
        self.teacher = self.learner.frozen_copy() if past else None

    def mix(self, batch, key):
        if self.teacher is None:
            return batch
        rng, count = numpy_rng((*key, "classes")), self.args.replay_size
        rounds = [rng.permutation(self.past) for _ in range(-(-count // len(self.past)))]
        labels = np.concatenate([np.zeros(0, int), *rounds])[:count]
        images = self.teacher.sample(labels.tolist(), sampling_seeds((*key, "generated"), count))
        return append(batch, self.learner.draw(images, labels, (*key, "replay")))

    def stored(self, sizes, task):
        return sizes.model + sizes.copy
