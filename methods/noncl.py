"""Non-continual learning (Non-CL): joint training on all tasks so far, from scratch, for each t.

Not continual learning but a reference for it: what the same network reaches when no data are taken away.
Its steps grow with the pool: steps of the task × images so far / images of the task.

Paper: CLoG, section 3.2 (2). Deviations: the paper pools all tasks for one model; its released code, and this file,
train one for each t, which is what gives an AIQ and an FR. `--select best` scores the pool, not the current task.
Labels keep their class ids in every order (in the released code training and sampling disagree in orders 2-5).
"""

import numpy as np

from methods.ncl import NCL


class NonCL(NCL):
    def start_task(self, task, past):
        self.learner.fresh(self.args.seed)

    def training_data(self, task, past):
        return np.concatenate([t.indices for t in [*past, task]])
