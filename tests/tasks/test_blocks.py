"""The blocks of a model's parameters: query, key and value of each head; all else is one."""

from torch import nn

from tasks import TASKS
from tasks.blocks import parameter_blocks


def test_a_vit_splits_query_key_and_value_by_head() -> None:
    model = TASKS["digits"].make_model(0)
    blocks = parameter_blocks(model)
    assert blocks == {
        f"blocks.{i}.self_attn.in_proj_{part}": 12 for i in (0, 1) for part in ("weight", "bias")
    }  # 3 x 4 heads; output, MLP, embedding, norms and head are one block each


def test_attention_with_keys_of_another_width() -> None:
    attention = nn.MultiheadAttention(8, 2, kdim=6, vdim=4)
    assert parameter_blocks(attention) == {
        "q_proj_weight": 2, "k_proj_weight": 2, "v_proj_weight": 2, "in_proj_bias": 6,
    }  # fmt: skip


def test_llama_splits_by_head_also_where_keys_have_fewer() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=16, hidden_size=24, intermediate_size=20, num_hidden_layers=1,
        num_attention_heads=6, num_key_value_heads=3,
    )  # fmt: skip
    prefix = "model.layers.0.self_attn."
    assert parameter_blocks(LlamaForCausalLM(config)) == {
        f"{prefix}q_proj.weight": 6, f"{prefix}k_proj.weight": 3, f"{prefix}v_proj.weight": 3,
    }  # fmt: skip


def test_a_transformers_vit() -> None:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        image_size=8, patch_size=4, hidden_size=12, intermediate_size=16, num_hidden_layers=1, num_attention_heads=3
    )
    blocks = parameter_blocks(ViTForImageClassification(config))
    assert len(blocks) == 6  # weight and bias of query, key and value
    assert set(blocks.values()) == {3}


class Window(nn.Module):
    """Attention as torchvision's Swin and timm's ViT have it."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 2
        self.qkv = nn.Linear(8, 24)
        self.proj = nn.Linear(8, 8)


def test_joint_projections() -> None:
    assert parameter_blocks(nn.Sequential(nn.Conv2d(1, 8, 2), Window())) == {"1.qkv.weight": 6, "1.qkv.bias": 6}


def test_gpt_2_keeps_its_blocks_whole() -> None:
    """Its joint projection has inputs for rows, so rows are no heads."""
    from transformers import GPT2Config, GPT2LMHeadModel

    assert parameter_blocks(GPT2LMHeadModel(GPT2Config(vocab_size=16, n_embd=24, n_layer=1, n_head=3))) == {}


def test_a_cnn_has_one_block_for_each_convolution() -> None:
    assert parameter_blocks(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 2))) == {}
