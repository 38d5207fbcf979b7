"""Elastic weight consolidation (EWC): a weight is held the harder, the more the old tasks' likelihood depends on it.

    loss = task loss + λ/2 Σ F (θ − θ*)²        F = E[(∂ log p / ∂θ)²], the diagonal of the Fisher information

F is summed over the past tasks, θ* are the weights after the last one, λ is --ewc_weight.

Kirkpatrick et al., Overcoming catastrophic forgetting in neural networks, 2017 (arXiv:1612.00796), equation 3.
Paper: CLoG, section 3.2 (8), which weighs by "the degree of overlap between the two tasks' Fisher matrices"; in the
original that overlap is an analysis, and the penalty is the one above.

Deviations from the original: the quadratics of all past tasks are centred at the newest weights (as Huszár, 2018,
argues; 3 numbers a weight however many tasks). p is that of the noise in one noisy version of an image, at a random
time step, N(ε; ε̂, I); F is empirical, of the data's own labels and noise, on --importance_samples images at most. −log
p is divided by √D, D the numbers of an image (`learner.nll`), so that one λ serves every resolution. Of a GAN, p is
what its logistic loss is the −log of: for D that a real image is real and a fake one fake (each an observation of its
own), for G, with D fixed, that its image is taken for real.

Other than the released code of the benchmark: F is the mean of the squared gradients of single images, not the square
of a batch's mean gradient; it is measured once, when the task ends; and the ½ is there.
"""

from common import non_negative, whole
from methods._shared import importance, parameters, quadratic_penalty, with_prefix, without_prefix
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
        self.anchor = {name: p.detach().clone() for name, p in parameters(self.learner).items()} if past else {}

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

    def stored(self, sizes, task):
        return sizes.model + 2 * sizes.trained
