"""Naive continual learning (NCL): fine-tune on each task, do nothing against forgetting.

This is also the interface of a method: every hook below does nothing, and the other files override a few.
A training script calls them in this order (see its loop):

    start_task → training_data
    each step: mix → for each phase: loss → penalty → backward → after_backward → clipping → optimiser step → after_step
    end_task → state_dict → save

A resumed run calls load_state_dict with the state of the task before, then start_task, then load_state_dict with the
state of the step at which it goes on. With `--select best` the state goes back to the best step before end_task.

A method may touch `learner` alone (class DDIM in train_ddim.py, StyleGAN2 in train_stylegan2.py): `nets`, `phases`,
`params`, `draw`, `loss` (which leaves the network's answer in batch["out"]), `outputs`, `nll`, `hold`, `sample`,
`fresh`, `frozen_copy`, `class_rows`, and `data` (images uint8 (N, 3, H, W) and labels (N,)). A task has `number` (from
1), `classes` and `indices` (rows of the data). A phase is one update within a step: the diffusion model has one, a GAN
one for G, one for D, and now and then R1, which is not `main`; each must keep a weight that trains. A key is a tuple
(seed, task, step): add a purpose of your own and hand it to what draws random numbers. Where a file needs torch itself,
it imports it in the hook: --help and a finished run are answered before it is loaded.
"""


class NCL:
    search = {}  # flag -> the values worth trying when the method is tuned
    isolated = False  # True: task i is always sampled from task i's own weights

    @staticmethod
    def add_args(parser):
        """The method's own flags."""

    def __init__(self, args, learner):
        self.args, self.learner = args, learner

    def start_task(self, task, past):
        """Before the optimisers are built, and again on a resume: teacher, anchor, adapter, fresh weights.

        The weights are those that were kept of the task before; `past` is the list of the earlier tasks.
        """

    def training_data(self, task, past):
        """Index array of the images to train on."""
        return task.indices

    def mix(self, batch, key):
        """The batch of a step: replay adds rows to that of the current task. The hook that gets the key."""
        return batch

    def penalty(self, phase, batch):
        """Scalar added to the loss before backward; main phases only (a GAN has two, and R1 beside them)."""
        return 0.0

    def after_backward(self, phase, batch):
        """`.grad` holds the gradient: read or change it. Returns {column: value} for the log, on every step or never.

        A penalty whose gradient is added here in closed form is logged as "penalty".
        """

    def after_step(self, phase):
        """The optimiser has moved the weights."""

    def end_task(self, task):
        """Once a task, at the weights that are kept: importance, memory."""

    def state_dict(self):
        """All that a resumed run needs beside the weights: a flat dict of cloned tensors and numbers."""
        return {}

    def load_state_dict(self, state):
        pass

    def stored(self, sizes, task):
        """Numbers held while a task after `task` is learnt, by a model of these common.Sizes.

        Counted as in CLoG, tables 12 and 13: weights and their copies, importance, images; no optimiser, no labels.
        """
        return sizes.model

    def save(self, folder):
        self.learner.save(folder)

    def load(self, run, trained_to, task):
        """Puts the weights in place that sample `task` (a number) after `trained_to` tasks."""
        self.learner.load(run / f"task{trained_to}")
