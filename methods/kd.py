"""Knowledge distillation (KD): the network should still answer as it did before the task.

    loss = task loss + λ mean (f(x, y) − f_old(x, y))²

f_old is a frozen copy of the weights that were kept of the task before; both see the same noisy image, time and class.
Of a GAN, f is the generator: the same latent, class and noise should give the same image; D has no such term.
λ is --kd_weight.

Hinton, Vinyals and Dean, Distilling the Knowledge in a Neural Network, 2015 (arXiv:1503.02531); against forgetting:
Li and Hoiem, Learning without Forgetting, 2016 (arXiv:1606.09282). Paper: CLoG, section 3.2 (6).

Distilled on the current images and their own labels, as CLoG's released code does (the paper names none): the teacher
has not learnt these classes, so it hands on what it knows of images and noise, not of classes. --kd_labels past asks
both for random past classes instead, which is Learning without Forgetting's use of old heads on new data, at the price
of a second forward pass. The student trains with dropout, the teacher is in eval mode (in the released code its
dropout is on, too), so the penalty is above 0 even while the weights are equal.
"""

from common import non_negative, numpy_rng
from methods.ncl import NCL


class KD(NCL):
    search = {"kd_weight": [1e-3, 1e-2, 0.1, 1.0, 10.0, 100.0, 1e3, 1e4]}

    @staticmethod
    def add_args(parser):
        parser.add_argument("--kd_weight", type=non_negative, default=1.0, help="strength λ (default: 1)")
        parser.add_argument("--kd_labels", choices=("current", "past"), default="current", help="classes that teacher "
                            "and student are asked for (default: current)")  # fmt: skip

    def start_task(self, task, past):
        self.past = [c for t in past for c in t.classes]
        self.teacher = self.learner.frozen_copy() if past else None

    def mix(self, batch, key):
        if self.past and self.args.kd_labels == "past":
            labels = numpy_rng((*key, "distilled")).choice(self.past, len(batch["labels"]))
            self.asked = batch["labels"].new_tensor(labels)
        return batch

    def penalty(self, phase, batch):
        if self.teacher is None or not phase.generator:
            return 0.0
        if self.args.kd_labels == "past":
            batch = batch | {"labels": self.asked}
            batch["out"] = self.learner.outputs(phase, batch)
        return self.args.kd_weight * (batch["out"] - self.teacher.outputs(phase, batch)).square().mean()

    def stored(self, sizes, task):
        return sizes.model + sizes.copy
