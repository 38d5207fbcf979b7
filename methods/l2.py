"""L2: each weight is drawn back to where it was after the last task, all weights alike.

    loss = task loss + λ Σ (θ − θ*)²

θ* are the weights that were kept of the task before, λ is --l2_weight.

Smith et al., A Closer Look at Rehearsal-Free Continual Learning, 2023 (arXiv:2203.17269), L2 in parameter space.
Paper: CLoG, section 3.2 (7).

Deviations: the sum runs over all weights; the released code of the benchmark sums the mean of each tensor, which
pulls hardest at the smallest tensors. In the class tables only the rows of past classes are drawn back: the others
hold nothing worth keeping. The gradient is added in closed form.
"""

from common import non_negative
from methods._shared import parameters, quadratic_penalty
from methods.ncl import NCL


class L2(NCL):
    search = {"l2_weight": [1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1.0, 10.0]}

    @staticmethod
    def add_args(parser):
        parser.add_argument("--l2_weight", type=non_negative, default=1e-3, help="strength λ (default: 0.001)")

    def start_task(self, task, past):
        self.anchor, self.importance = {}, {}
        if not past:
            return
        seen, tables = [c for t in past for c in t.classes], self.learner.class_rows()
        for name, p in parameters(self.learner).items():
            self.anchor[name], self.importance[name] = p.detach().clone(), p.new_ones(())
            if name in tables:
                rows = p.new_zeros(p.shape[tables[name]])
                rows[seen] = 1
                self.importance[name] = rows.view([-1 if d == tables[name] else 1 for d in range(p.dim())])

    def after_backward(self, phase, batch):
        if self.anchor and phase.main:
            params = self.learner.params(phase)
            return {"penalty": quadratic_penalty(params, self.anchor, self.importance, self.args.l2_weight)}

    def stored(self, sizes, task):
        return sizes.model + sizes.trained
