"""A random text-to-image model in the real folder format, small enough for tests."""

import torch
from diffusers import AutoencoderKL, PNDMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

# words that are one token each; all else falls apart into letters
WORDS = """photo of a sks phol oxi mth nigh pll ucd dog duck toy cat backpack bear plushie ball box star ring cross moon
tree on grass""".split()  # noqa: SIM905


def tokenizer(length=77, words=WORDS):
    """CLIP's byte-pair encoding with a vocabulary of letters and WORDS; `ktn` exists within words alone, as in CLIP."""
    letters = [chr(c) for c in range(33, 127)]
    vocabulary, merges = [*letters, *(letter + "</w>" for letter in letters)], []
    for word, end in [*((word, "</w>") for word in words), ("ktn", "")]:
        parts = [*word[:-1], word[-1] + end]
        while len(parts) > 1:
            if tuple(parts[:2]) not in merges:
                merges.append(tuple(parts[:2]))
                vocabulary.append(parts[0] + parts[1])
            parts[:2] = [parts[0] + parts[1]]
    vocabulary = list(dict.fromkeys([*vocabulary, "<|startoftext|>", "<|endoftext|>"]))
    return CLIPTokenizer(vocab={t: k for k, t in enumerate(vocabulary)}, merges=merges, model_max_length=length)


def write(folder, side=4, widths=(8, 16), vae_widths=(8, 8, 8, 8), seed=0, length=77):
    """Writes the model; pictures are side × 2^(len(vae_widths) − 1) pixels wide."""
    torch.manual_seed(seed)
    words = tokenizer(length)
    text = CLIPTextModel(CLIPTextConfig(
        vocab_size=len(words), hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        projection_dim=16, max_position_embeddings=length, bos_token_id=words.bos_token_id,
        eos_token_id=words.eos_token_id))  # fmt: skip
    unet = UNet2DConditionModel(
        sample_size=side, in_channels=4, out_channels=4, block_out_channels=widths, layers_per_block=1,
        down_block_types=[*["CrossAttnDownBlock2D"] * (len(widths) - 1), "DownBlock2D"],
        up_block_types=["UpBlock2D", *["CrossAttnUpBlock2D"] * (len(widths) - 1)],
        cross_attention_dim=16, attention_head_dim=2, norm_num_groups=4)  # fmt: skip
    vae = AutoencoderKL(
        latent_channels=4, block_out_channels=vae_widths, layers_per_block=1, norm_num_groups=4,
        down_block_types=["DownEncoderBlock2D"] * len(vae_widths),
        up_block_types=["UpDecoderBlock2D"] * len(vae_widths),
        sample_size=side * 2 ** (len(vae_widths) - 1))  # fmt: skip
    scheduler = PNDMScheduler(beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012, skip_prk_steps=True,
                              steps_offset=1)  # fmt: skip
    pipeline = StableDiffusionPipeline(vae=vae, text_encoder=text, tokenizer=words, unet=unet, scheduler=scheduler,
                                       safety_checker=None, feature_extractor=None,
                                       requires_safety_checker=False)  # fmt: skip
    pipeline.save_pretrained(folder)
    return folder
