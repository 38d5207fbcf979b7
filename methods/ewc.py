"""Elastic weight consolidation (EWC): a weight is held the harder, the more the old tasks' likelihood depends on it.

    loss = task loss + λ/2 Σ F (θ − θ*)²        F = E[(∂ log p / ∂θ)²], the diagonal of the Fisher information

F is summed over the past tasks, θ* are the weights after the last one, λ is --ewc_weight.

Kirkpatrick et al., Overcoming catastrophic forgetting in neural networks, 2017 (arXiv:1612.00796), equation 3.
Paper: CLoG, section 3.2 (8), which speaks of the "overlap" of two Fisher matrices; the original has none.

Deviations from the original: one quadratic around the newest weights instead of one for each past task (Huszár, 2018,
shows why; it keeps 3 numbers a weight instead of 1 + 2 T). F is the empirical Fisher, of the data's own labels and
noise. The log-likelihood of an image is divided by √D, D its numbers (`learner.nll`), so that one λ serves every
resolution. From the released code of the benchmark: F is the mean of the squared gradients of single images, not the
square of a batch's mean gradient, is measured once, when the task ends, and the ½ is there.
"""

from common import importance, non_negative, quadratic_penalty, whole, with_prefix, without_prefix
from methods.ncl import NCL


class EWC(NCL):
    search = {"ewc_weight": [0.1, 1.0, 10.0, 100.0, 1e3, 1e4, 1e5, 1e6]}

    @staticmethod
    def add_args(parser):
        parser.add_argument("--ewc_weight", type=non_negative, default=1e4, help="strength λ (default: 10000)")
        parser.add_argument("--importance_samples", type=whole(1), default=1000, help="images of a task that its "
                            "Fisher information is measured on, at most (default: 1000)")  # fmt: skip

    def __init__(self, args, learner):
        super().__init__(args, learner)
        self.fisher = {}

    def start_task(self, task, past):
        params = [self.learner.params(phase) for phase in self.learner.phases(0)] if past else []
        self.anchor = {name: p.detach().clone() for some in params for name, p in some.items()}

    def after_backward(self, phase, batch):
        if self.anchor and phase.main:
            params = self.learner.params(phase)
            return {"penalty": quadratic_penalty(params, self.anchor, self.fisher, self.args.ewc_weight / 2)}

    def end_task(self, task):
        new = importance(
            self.learner, task, self.args.importance_samples, self.args.seed,
            self.learner.nll, lambda total, gradient: total.addcmul_(gradient, gradient),
        )  # fmt: skip
        self.fisher = {name: f + self.fisher[name] if self.fisher else f for name, f in new.items()}

    def state_dict(self):
        return with_prefix("fisher", self.fisher)

    def load_state_dict(self, state):
        self.fisher = without_prefix("fisher", state, self.learner.device)

    def stored(self, parameters, task):
        return 3 * parameters
