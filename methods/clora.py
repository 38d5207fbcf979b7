"""C-LoRA, isolated: task 1 trains the whole network, each later task a low-rank adapter of its own beside it.

    h = W x + (α/r) B A x        W: weights after task 1, frozen; A, B: the task's adapter; B starts at 0

An adapter of rank r = --clora_rank sits on the queries, keys, values and outputs of the attention and on both
convolutions of each ResNet block; the task's own rows of the class table are trained with it. A class is drawn with
the adapter of its task, so nothing is ever forgotten (FR = 0), and the task must be known (the class tells it).

Smith et al., Continual Diffusion: Continual Customization of Text-to-Image Diffusion with C-LoRA, 2024
(arXiv:2304.06027); Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, 2022 (arXiv:2106.09685), equation 3.
Paper: CLoG, section 3.2 (12).

Deviations: this is CLoG's adaptation. The original starts from a pre-trained network, adapts the cross-attention's
keys and values alone, sums the adapters of all tasks, and regularises each by the ones before. An adapter has a
dropout of 0.1. It is peft's: on the unet of task1/, PeftModel.from_pretrained(unet, "task2/adapter") reads it; the
class rows of the task are in task2/class_rows.safetensors.
"""

from common import fail, hash32, positive, whole
from methods.ncl import NCL

TARGETS = ["to_q", "to_k", "to_v", "to_out.0", "conv1", "conv2"]  # names in diffusers' U-Nets
ADAPTER_FILE = "adapter_model.safetensors"


class CLoRA(NCL):
    isolated = True

    @staticmethod
    def add_args(parser):
        parser.add_argument("--clora_rank", type=whole(1), default=8, help="rank r of an adapter (default: 8)")
        parser.add_argument(
            "--clora_alpha", type=positive, default=8.0, help="α, scales an adapter by α/r (default: 8)"
        )

    def __init__(self, args, learner):
        super().__init__(args, learner)
        self.adapted = None

    def remove_adapter(self):
        if self.adapted:
            self.adapted.unload()
        self.adapted = None

    def class_tables(self):
        """{name: weight} of the tables that hold a row a class."""
        unet = self.learner.nets["unet"]
        return {name: unet.get_parameter(name.removeprefix("unet.")) for name in self.learner.class_rows()}

    def start_task(self, task, past):
        self.classes = task.classes
        self.remove_adapter()
        if not past:
            return
        import torch
        from peft import LoraConfig, get_peft_model

        unet = self.learner.nets["unet"]
        unet.zero_grad()  # the base is not trained any more: frees its gradients
        config = LoraConfig(r=self.args.clora_rank, lora_alpha=self.args.clora_alpha, lora_dropout=0.1,
                            target_modules=TARGETS)  # fmt: skip
        torch.manual_seed(hash32((self.args.seed, task.number, "adapter")))
        self.adapted = get_peft_model(unet, config)  # in place; freezes all but the adapter
        for table in self.class_tables().values():
            table.requires_grad_(True)  # only the rows of the task's classes get a gradient

    def save(self, folder):
        if self.adapted is None:
            return super().save(folder)
        import torch
        from safetensors.torch import save_file

        self.adapted.save_pretrained(folder / "adapter")
        (folder / "adapter" / "README.md").unlink(missing_ok=True)  # a form to fill in
        rows = {name: table.detach()[self.classes] for name, table in self.class_tables().items()}
        save_file(rows | {"classes": torch.tensor(self.classes)}, folder / "class_rows.safetensors")

    def load(self, run, trained_to, task):
        self.remove_adapter()
        self.learner.load(run / "task1")
        if task == 1:
            return
        from peft import PeftModel, get_peft_model_state_dict
        from safetensors.torch import load_file

        folder, device = run / f"task{task}", str(self.learner.device)
        self.adapted = PeftModel.from_pretrained(self.learner.nets["unet"], folder / "adapter", torch_device=device)
        if get_peft_model_state_dict(self.adapted).keys() != load_file(folder / "adapter" / ADAPTER_FILE).keys():
            fail(f"{folder}/adapter does not fit the network of {run}/task1: other names of weights")
        rows = load_file(folder / "class_rows.safetensors")
        for name, table in self.class_tables().items():
            table.data[rows["classes"]] = rows[name].to(table.device)

    def stored(self, sizes, task):
        if self.adapted is None:
            return sizes.model
        adapter = sum(p.numel() for name, p in self.adapted.named_parameters() if "lora_" in name)
        return sizes.model + (task - 1) * adapter
