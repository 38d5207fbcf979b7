"""Memory aware synapses (MAS): a weight is held the harder, the more the network's output depends on it.

    loss = task loss + λ Σ Ω (θ − θ*)²        Ω = E[ |∂ m(f(x)) / ∂θ| ],  m the mean square of the output's numbers

Ω is summed over the past tasks, θ* are the weights after the last one, λ is --mas_weight. No loss enters Ω.

Aljundi et al., Memory Aware Synapses: Learning what (not) to forget, 2018 (arXiv:1711.09601), section 4.
Paper: CLoG, section 3.2 (10).

Deviations from the original: it takes the squared ℓ2 norm of the output, a handful of class scores; here that norm is
divided by the number of outputs, else Ω would grow with the resolution and no λ would serve two of them. The output is
the noise predicted in a noisy training image, at a random time step, given its class; of a GAN, G's image of a random
latent and D's logit of a training image. --importance_samples images are asked at most. Other than the released code of
the benchmark: the gradient is that of the whole output and of single images, its absolute value is taken before the
mean, and the penalty has no ½.
"""

from common import non_negative, whole
from methods._shared import importance, parameters, quadratic_penalty, with_prefix, without_prefix
from methods.ncl import NCL


class MAS(NCL):
    search = {"mas_weight": [1e-3, 1e-2, 0.1, 1.0, 10.0, 100.0, 1e3, 1e4]}

    @staticmethod
    def add_args(parser):
        parser.add_argument("--mas_weight", type=non_negative, default=10.0, help="strength λ (default: 10)")
        parser.add_argument("--importance_samples", type=whole(1), default=1000, help="images of a task that the "
                            "importance is measured on, at most (default: 1000)")  # fmt: skip

    def __init__(self, args, learner):
        super().__init__(args, learner)
        self.omega = {}

    def start_task(self, task, past):
        self.anchor = {name: p.detach().clone() for name, p in parameters(self.learner).items()} if past else {}

    def after_backward(self, phase, batch):
        if self.anchor and phase.main:
            params = self.learner.params(phase)
            return {"penalty": quadratic_penalty(params, self.anchor, self.omega, self.args.mas_weight)}

    def end_task(self, task):
        new = importance(
            self.learner, task, self.args.importance_samples, self.args.seed,
            lambda phase, batch: self.learner.outputs(phase, batch).square().mean(),
            lambda total, gradient: total.add_(gradient.abs()),
        )  # fmt: skip
        self.omega = {name: o + self.omega[name] if self.omega else o for name, o in new.items()}

    def state_dict(self):
        return with_prefix("omega", self.omega)

    def load_state_dict(self, state):
        self.omega = without_prefix("omega", state, self.learner.device)

    def stored(self, sizes, task):
        return sizes.model + 2 * sizes.trained
