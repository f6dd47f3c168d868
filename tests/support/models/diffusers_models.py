"""Tiny models of diffusers with random weights, and its flash_attn backends over flashtune as a program.

    python -m tests.support.models.diffusers_models cuda

`flashtune.integrations.flash_attn.patch()` must precede the import of diffusers, so each run has a process.
"""

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flashtune.integrations import flash_attn
from flashtune.integrations.flash_attn import flash_attn_3

ROOT = Path(__file__).parents[3]
HEADS, WIDTH = 2, 32
CHANNELS = HEADS * WIDTH
BATCH, SIDE, TEXT = 2, 8, 7
# Tokens of the second text that are padding.
PADDING = 3
# diffusers' names of the functions of flash_attn 2 and 3.
BACKENDS = ("flash", "flash_varlen", "_flash_3", "_flash_varlen_3")


def unet(diffusers: Any) -> Any:
    """A model that calls `scaled_dot_product_attention`: latents, and latents on a text."""
    torch.manual_seed(0)
    return diffusers.UNet2DConditionModel(
        sample_size=SIDE,
        block_out_channels=(CHANNELS, CHANNELS),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=CHANNELS,
        # Diffusers reads this as the number of heads.
        attention_head_dim=HEADS,
    )


def transformer(diffusers: Any) -> Any:
    """A model that calls `dispatch_attention_fn`, on a text and latents together."""
    torch.manual_seed(0)
    return diffusers.FluxTransformer2DModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=WIDTH,
        num_attention_heads=HEADS,
        joint_attention_dim=CHANNELS,
        pooled_projection_dim=CHANNELS,
        axes_dims_rope=(8, 12, 12),
    )


def pipeline(diffusers: Any) -> Any:
    """A pipeline of two steps without texts."""
    torch.manual_seed(0)
    model = diffusers.UNet2DModel(
        sample_size=SIDE,
        block_out_channels=(CHANNELS, CHANNELS),
        layers_per_block=1,
        down_block_types=("AttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "AttnUpBlock2D"),
        attention_head_dim=WIDTH,
    )
    built = diffusers.DDPMPipeline(model, diffusers.DDPMScheduler())
    built.set_progress_bar_config(disable=True)
    return built


def output(model: Any, masked: bool = True) -> Tensor:
    """The output of a model or of a pipeline for fixed inputs; `masked` hides padding of the text."""
    if hasattr(model, "scheduler"):
        generator = torch.Generator().manual_seed(1)
        images = model(batch_size=BATCH, generator=generator, num_inference_steps=2, output_type="np").images
        return torch.from_numpy(images)
    device, dtype = model.device, model.dtype
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    step = torch.full((BATCH,), 10, device=device)
    text = draw(BATCH, TEXT, CHANNELS)
    with torch.no_grad():
        if "UNet" in type(model).__name__:
            seen = None
            if masked:
                seen = torch.ones(BATCH, TEXT, device=device)
                seen[1, -PADDING:] = 0
            latents = draw(BATCH, 4, SIDE, SIDE)
            sample = model(latents, step, text, encoder_attention_mask=seen, return_dict=False)[0]
        else:
            sample = model(
                hidden_states=draw(BATCH, SIDE * SIDE, 4),
                encoder_hidden_states=text,
                pooled_projections=draw(BATCH, CHANNELS),
                timestep=step.to(dtype) / 1000,
                img_ids=torch.zeros(SIDE * SIDE, 3, device=device),
                txt_ids=torch.zeros(TEXT, 3, device=device),
                return_dict=False,
            )[0]
    result: Tensor = sample.float().cpu()
    return result


def run_program(device: str) -> None:
    """Runs this module as a program."""
    paths = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))
    command = [sys.executable, "-m", "tests.support.models.diffusers_models", device]
    environment = {**os.environ, "PYTHONPATH": paths}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=1200)


def compare_backends(device: str) -> None:
    """Compares each flash_attn backend of diffusers with torch's attention in float32.

    Raises:
        AssertionError: A backend does not call flashtune, or its output differs.
    """
    dispatch = importlib.import_module("diffusers.models.attention_dispatch")
    model = transformer(importlib.import_module("diffusers")).to(device)
    want = output(model)
    forward_3 = dispatch._wrapped_flash_attn_3
    if device == "cpu":
        # diffusers registers it for GPUs only.
        forward_3.register_kernel("cpu", forward_3._init_fn)
    else:
        model = model.bfloat16()
    bound = 2 * largest(output(model) - want) + (1e-5 if device == "cpu" else 1e-2)
    assert dispatch.flash_attn_func is flash_attn.flash_attn_func
    assert dispatch.flash_attn_3_func is flash_attn_3.flash_attn_func
    torch.nn.functional.__dict__["scaled_dot_product_attention"] = None
    for backend in BACKENDS:
        with dispatch.attention_backend(backend):
            error = largest(output(model) - want)
        assert error <= bound, f"{backend}: {error} > {bound}"


def largest(difference: Tensor) -> float:
    """The largest absolute value."""
    return float(difference.abs().max())


if __name__ == "__main__":
    flash_attn.patch()
    compare_backends(sys.argv[1])
