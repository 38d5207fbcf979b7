"""Synaptic intelligence (SI): a weight is held the harder, the more of the past tasks' loss it has taken away.

    ω = − Σ over the steps of a task  g Δθ         (path integral of the task's gradient over the actual update)
    Ω ← ReLU(Ω + ω / ((θ_end − θ_start)² + ξ))     when a task ends; ω starts again at 0
    loss = task loss + c Σ Ω (θ − θ*)²             θ* the weights after the last task

c is --si_weight, ξ is --si_damping.

Zenke, Poole and Ganguli, Continual Learning Through Synaptic Intelligence, 2017 (arXiv:1703.04200), equations 3 to 5;
the ReLU stands in the authors' code, not in their paper. Paper: CLoG, section 3.2 (9).

g is the gradient of the task's own loss, before the penalty and before clipping, as the authors have it; Δθ is what
the optimiser does in the end. The released code of the benchmark integrates the clipped gradient of loss and penalty,
and has no ReLU. With `--select best`, ω is that of the step whose weights are kept.
"""

from common import non_negative, positive
from methods._shared import parameters, quadratic_penalty, with_prefix, without_prefix
from methods.ncl import NCL


class SI(NCL):
    search = {"si_weight": [1e-3, 1e-2, 0.1, 1.0, 10.0, 100.0, 1e3, 1e4]}

    @staticmethod
    def add_args(parser):
        parser.add_argument("--si_weight", type=non_negative, default=1.0, help="strength c (default: 1)")
        parser.add_argument("--si_damping", type=positive, default=1e-3, help="ξ, keeps the importance of weights that "
                            "hardly moved finite; the authors use 0.001 and 0.1 (default: 0.001)")  # fmt: skip

    def __init__(self, args, learner):
        super().__init__(args, learner)
        self.omega = {}

    def start_task(self, task, past):
        self.anchor = {name: p.detach().clone() for name, p in parameters(self.learner).items()}
        self.path = {name: p.new_zeros(p.shape) for name, p in self.anchor.items()}
        self.gradient = {name: p.clone() for name, p in self.anchor.items()}  # buffers of a step
        self.before = {name: p.clone() for name, p in self.anchor.items()}

    def after_backward(self, phase, batch):
        params = self.learner.params(phase)
        for name, p in params.items():
            if p.grad is not None:
                self.gradient[name].copy_(p.grad)
                self.before[name].copy_(p.detach())
        if self.omega and phase.main:
            return {"penalty": quadratic_penalty(params, self.anchor, self.omega, self.args.si_weight)}

    def after_step(self, phase):
        for name, p in self.learner.params(phase).items():
            if p.grad is not None:
                self.path[name].addcmul_(self.gradient[name], self.before[name].sub_(p.detach()))  # −g Δθ

    def end_task(self, task):
        for name, p in parameters(self.learner).items():
            new = self.path[name] / ((p.detach() - self.anchor[name]).square() + self.args.si_damping)
            self.omega[name] = (self.omega.get(name, 0) + new).relu()
            self.path[name].zero_()

    def state_dict(self):
        return with_prefix("omega", self.omega) | with_prefix("path", self.path)

    def load_state_dict(self, state):
        self.omega = without_prefix("omega", state, self.learner.device)
        self.path = without_prefix("path", state, self.learner.device)

    def stored(self, sizes, task):
        return sizes.model + 2 * sizes.trained
