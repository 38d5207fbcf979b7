"""C-LoRA: low-rank adapters beside frozen weights, one a task; isolated, or merged with its authors' penalty.

    h = W x + (α/r) B A x        W: frozen; A, B: the task's adapter of rank r = --clora_rank; B starts at 0

isolated (CLoG): a class or concept is drawn with the adapter of its task alone, so nothing is ever forgotten (FR = 0),
and the task must be known. A label-conditioned network, which starts from nothing, is trained whole in task 1; its
adapters go to the queries, keys, values and outputs of the attention and to both convolutions of each ResNet block, and
the task's own rows of the class table are trained with them. A text-to-image model comes trained: each task has an
adapter, on the attention of U-Net and text encoder.

merge (Smith et al.; on concepts): all adapters so far are part of W; each is kept off what the earlier ones changed,

    loss = task loss + λ Σ ( |Σ_{k<t} B_k A_k| ∘ B_t A_t )²        λ: --clora_weight

on the keys and values of the cross-attention alone. The penalty is also met by an adapter that shrinks to nothing
(Jha et al., 2024, arXiv:2410.00700): the log's column adapter_norm, ‖B_t A_t‖, shows whether it does.

Smith et al., Continual Diffusion: Continual Customization of Text-to-Image Diffusion with C-LoRA, 2024
(arXiv:2304.06027), equations 3 and 4; Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, 2022
(arXiv:2106.09685), equation 3. Paper: CLoG, section 3.2 (12).

Deviations: isolated is CLoG's adaptation, with a dropout of 0.1. Merged, a concept keeps its rare word and the noun of
its category, where the original trains a new word and leaves the noun out; of the text encoder nothing is trained. The
adapter is peft's: PeftModel reads that of a label-conditioned network (task2/adapter), a pipeline's load_lora_weights
that of a text-to-image model.
"""

from common import fail, hash32, non_negative, positive, whole
from methods.ncl import NCL


class CLoRA(NCL):
    isolated = True

    @staticmethod
    def add_args(parser):
        parser.add_argument("--clora_mode", choices=("isolated", "merge"), default="isolated", help="draw a task with "
                            "its own adapter, or with all so far (default: isolated)")  # fmt: skip
        parser.add_argument("--clora_rank", type=whole(1), help="rank r of an adapter (default: 8; of a text-to-image "
                            "model 40, merged 16)")  # fmt: skip
        parser.add_argument("--clora_alpha", type=positive, help="α, scales an adapter by α/r (default: r)")
        parser.add_argument("--clora_weight", type=non_negative, default=1e8, help="merge: strength λ of the penalty "
                            "(default: 1e8)")  # fmt: skip

    def __init__(self, args, learner):
        super().__init__(args, learner)
        self.isolated = args.clora_mode == "isolated"
        if not (self.isolated or learner.pretrained):
            fail("--clora_mode merge is for text-to-image models (train_concepts.py): leave it out here")
        self.adapted, self.past = {}, {}  # {network: peft model}, {layer: Σ B A of the earlier tasks}

    def attach(self, seed):
        """Puts a new adapter on each network that has one, and freezes all else."""
        import torch
        from peft import LoraConfig, get_peft_model

        layers, rank = self.learner.adapts(not self.isolated)
        rank = self.args.clora_rank or rank
        for net in self.learner.nets.values():
            net.requires_grad_(False)
            net.zero_grad()  # frees the gradients
        torch.manual_seed(seed)
        for name, targets in layers.items():
            config = LoraConfig(r=rank, lora_alpha=self.args.clora_alpha or rank, target_modules=targets,
                                lora_dropout=0.1 if self.isolated else 0.0)  # fmt: skip
            self.adapted[name] = get_peft_model(self.learner.nets[name], config)  # in place

    def detach(self):
        """Takes the adapter off; merged, its product becomes part of the weights first."""
        for name, change in {} if self.isolated else self.changes():
            self.past[name] = self.past.get(name, 0) + change.detach()
        for model in self.adapted.values():
            model.unload() if self.isolated else model.merge_and_unload()
        self.adapted = {}

    def changes(self):
        """(layer, (α/r) B A) of the adapter that is attached."""
        for name, model in self.adapted.items():
            for layer, module in model.named_modules():
                if hasattr(module, "lora_A") and len(module.lora_A):
                    yield f"{name}.{layer}", module.get_delta_weight("default")

    def class_tables(self):
        """{name: weight} of the tables that hold a row a class."""
        unet = self.learner.nets["unet"]
        return {name: unet.get_parameter(name.removeprefix("unet.")) for name in self.learner.class_rows()}

    def start_task(self, task, past):
        self.classes = task.classes
        self.detach()
        if past or self.learner.pretrained:
            tables = self.class_tables().values()
            self.attach(hash32((self.args.seed, task.number, "adapter")))
            for table in tables:
                table.requires_grad_(True)  # only the rows of the task's classes get a gradient

    def penalty(self, phase, batch):
        if self.isolated:
            return 0.0
        size, overlap = 0.0, 0.0
        for name, change in self.changes():
            size = size + change.detach().square().sum()
            if name in self.past:
                overlap = overlap + (self.past[name] * change).square().sum()
        self.norm = size.sqrt()
        return self.args.clora_weight * overlap

    def after_backward(self, phase, batch):
        return None if self.isolated else {"adapter_norm": self.norm}

    def save(self, folder):
        if not self.adapted:
            return super().save(folder)
        import torch
        from safetensors.torch import save_file

        self.learner.save_adapters(folder, self.adapted)
        rows = {name: table.detach()[self.classes] for name, table in self.class_tables().items()}
        if rows:
            save_file(rows | {"classes": torch.tensor(self.classes)}, folder / "class_rows.safetensors")

    def load(self, run, trained_to, task):
        for model in self.adapted.values():
            model.unload()
        self.adapted, self.past = {}, {}
        if not self.learner.pretrained:
            self.learner.load(run / "task1")
        elif not self.isolated:
            self.learner.fresh(self.args.seed)
        for t in [task] if self.isolated else range(1, trained_to + 1):
            if t > 1 or self.learner.pretrained:
                self.detach()
                self.attach(0)
                self.fill(run / f"task{t}")

    def fill(self, folder):
        """Fills the adapter that is attached from a task's folder, and the class rows."""
        from peft import get_peft_model_state_dict, set_peft_model_state_dict
        from safetensors.torch import load_file

        states = self.learner.adapter_states(folder)
        for name, model in self.adapted.items():
            if get_peft_model_state_dict(model).keys() != states.get(name, {}).keys():
                fail(f"the adapter in {folder} does not fit the network it was made for: other names of weights")
            set_peft_model_state_dict(model, states[name])
        rows = load_file(folder / "class_rows.safetensors") if self.class_tables() else {}
        for name, table in self.class_tables().items():
            table.data[rows["classes"]] = rows[name].to(table.device)

    def stored(self, sizes, task):
        named = [pair for model in self.adapted.values() for pair in model.named_parameters()]
        adapter = sum(p.numel() for name, p in named if "lora_" in name)
        return sizes.model + (task if self.learner.pretrained else task - 1) * adapter
