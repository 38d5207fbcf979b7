"""Non-continual learning (Non-CL): joint training on all tasks so far, from scratch, for each t.

Not continual learning but a reference for it: what the same network reaches when no data are taken away.
Its steps grow with the pool, so every image is seen as often as in the other methods.

Paper: CLoG, section 3.2 (2). Deviation from its released code: labels keep their class ids in every order
(there, training labels and sampled labels disagree in orders 2-5).
"""

import numpy as np

from methods.ncl import NCL


class NonCL(NCL):
    def start_task(self, task):
        self.learner.fresh(self.args.seed)

    def training_data(self, task, past):
        return np.concatenate([t.indices for t in [*past, task]])
