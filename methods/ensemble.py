"""Ensemble: one network a task, trained from scratch, chosen by the task of the asked class.

Forgets nothing by construction (FR = 0), shares nothing between tasks, and stores T networks.
Each network starts from the same weights; with the batches and the noise of the same seed, task 1 is that of NCL.

Paper: CLoG, section 3.2 (3).
"""

from methods.ncl import NCL


class Ensemble(NCL):
    isolated = True

    def start_task(self, task, past):
        self.learner.fresh(self.args.seed)

    def stored(self, sizes, task):
        return task * sizes.model

    def load(self, run, trained_to, task):
        self.learner.load(run / f"task{task}")
