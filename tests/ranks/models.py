"""The models of the parity matrix: small, without dropout, every sample of one shape."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from drivetrain.config.schema import Optimization
from drivetrain.train.optimization.optimizers import Optimizers, from_config
from drivetrain.train.task import Task, Total
from tests.gpt_task import GPT, VOCABULARY

NUM_SAMPLES, LENGTH, LAYERS, WIDTH = 44, 16, 4, 32


def sequences() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    start, pace = torch.randint(1, VOCABULARY, (2, NUM_SAMPLES, 1), generator=generator)
    tokens = (start + pace * torch.arange(LENGTH + 1)) % VOCABULARY
    return TensorDataset(tokens[:, :-1], tokens[:, 1:])


def images() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 10, (NUM_SAMPLES,), generator=generator)
    noise = torch.randn(NUM_SAMPLES, 3, 12, 12, generator=generator)
    return TensorDataset(noise + labels[:, None, None, None] / 5, labels)


def _next_token(logits: torch.Tensor, targets: torch.Tensor) -> Total:
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return Total(total, targets.numel())


def gpt_loss(model: nn.Module, batch: Any) -> Total:
    return _next_token(model(batch[0]), batch[1])


def hugging_face_loss(model: nn.Module, batch: Any) -> Total:
    return _next_token(model(input_ids=batch[0], use_cache=False).logits, batch[1])


def image_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


class Residual(nn.Module):
    """Smooth, unlike with ReLU, whose slope jumps at 0.

    There, one process adding the same gradients in another order parts from itself by 3e-4 within
    20 steps: an activation of 1e-9 is -1e-9 then.
    """

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(after)
        self.skip = nn.Identity() if before == after else nn.Conv2d(before, after, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm2(self.conv2(F.silu(self.norm1(self.conv1(x)))))
        return F.silu(y + self.skip(x))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8))
        shapes = [(8, 8, 1), (8, 16, 2), (16, 16, 1), (16, 16, 1)]
        self.blocks = nn.ModuleList(Residual(*shape) for shape in shapes)
        self.head = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.silu(self.stem(x))
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(x.mean((-2, -1)))
        return logits


def gpt2(**changes: Any) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    make: Callable[[Any], nn.Module] = GPT2LMHeadModel
    settings: dict[str, Any] = {
        "n_layer": LAYERS,
        "n_embd": WIDTH,
        "n_head": 4,
        "vocab_size": VOCABULARY,
        "n_positions": LENGTH,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return make(GPT2Config(**{**settings, **changes}))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    make: Callable[[Any], nn.Module] = LlamaForCausalLM
    return make(
        LlamaConfig(
            num_hidden_layers=LAYERS,
            hidden_size=WIDTH,
            intermediate_size=2 * WIDTH,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=VOCABULARY,
            max_position_embeddings=LENGTH,
            tie_word_embeddings=False,
        )
    )


@cache
def _example(name: str) -> ModuleType:
    path = Path(__file__).parents[2] / "examples" / f"{name}.py"
    spec = spec_from_file_location(f"example_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def moe(**changes: Any) -> nn.Module:
    made: nn.Module = _example("moe").GPT(
        **{"width": WIDTH, "layers": LAYERS, "vocabulary": VOCABULARY, **changes}
    )
    return made


def mixtral(**changes: Any) -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    make: Callable[[Any], nn.Module] = MixtralForCausalLM
    return make(MixtralConfig(**{**_with_experts(), "num_local_experts": 4, **changes}))


def qwen_moe(**changes: Any) -> nn.Module:
    """With an expert that every token goes to beside those that are chosen."""
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    make: Callable[[Any], nn.Module] = Qwen2MoeForCausalLM
    own = {
        "num_experts": 4,
        "moe_intermediate_size": WIDTH,
        "shared_expert_intermediate_size": WIDTH,
        "decoder_sparse_step": 1,
    }
    return make(Qwen2MoeConfig(**{**_with_experts(), **own, **changes}))


def _with_experts() -> dict[str, Any]:
    return {
        "num_hidden_layers": LAYERS,
        "hidden_size": WIDTH,
        "intermediate_size": WIDTH,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_experts_per_tok": 2,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": LENGTH,
        "tie_word_embeddings": False,
        "attention_dropout": 0.0,
    }


def lora() -> nn.Module:
    import peft

    adapter = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
    adapted: nn.Module = peft.get_peft_model(llama(), adapter)
    return adapted


def balanced_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """Hugging Face's own, with its balance loss over the routers of all layers."""
    out = model(input_ids=batch[0], use_cache=False, output_router_logits=True)
    balance: torch.Tensor = out.aux_loss
    return F.cross_entropy(out.logits.flatten(0, 1), batch[1].flatten()) + 0.02 * balance


MODELS: dict[str, tuple[Callable[[], nn.Module], Any, Callable[[], TensorDataset]]] = {
    "gpt": (lambda: GPT(WIDTH, LAYERS, dropout=0.0), gpt_loss, sequences),
    "resnet": (ResNet, image_loss, images),
    "hf_gpt2": (gpt2, hugging_face_loss, sequences),
    "hf_llama": (llama, hugging_face_loss, sequences),
    "moe": (moe, gpt_loss, sequences),
    "hf_mixtral": (mixtral, balanced_loss, sequences),
    "hf_qwen_moe": (qwen_moe, hugging_face_loss, sequences),
    "gpt_muon": (lambda: GPT(WIDTH, LAYERS, dropout=0.0), gpt_loss, sequences),
    "gpt_float8": (lambda: GPT(WIDTH, LAYERS, dropout=0.0), gpt_loss, sequences),
    "llama_lora": (lora, hugging_face_loss, sequences),
}


def muon(model: nn.Module, optimization: Optimization) -> Optimizers:
    return from_config(model, optimization.model_copy(update={"optimizer": "muon"}))


def task_of(name: str) -> tuple[Task, TensorDataset]:
    model, loss, data = MODELS[name]
    return Task(model, loss, muon if name == "gpt_muon" else from_config), data()
