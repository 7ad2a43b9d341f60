"""Which runs of rows of a model's parameters are blocks of their own: the query, key and value of each head."""

from torch import nn

SEPARATE = ("q_proj", "k_proj", "v_proj", "query", "key", "value")  # one matrix for each
JOINT = ("qkv",)  # one matrix with query, key and value below each other


def parameter_blocks(model: nn.Module) -> dict[str, int]:
    """How many blocks a parameter has, for those that have more than one: n equal runs of its rows.

    The rows of the query, key and value projections are split by head in attention modules of PyTorch
    (`nn.MultiheadAttention`), torchvision and timm (``qkv``), and Transformers' ViT, BERT, Llama and the like. Every
    other parameter (attention output, each matrix of an MLP, embedding, head, a convolution, a norm, a bias) is one
    block. The division follows the Hessian's, after Zhang et al. 2024, "Adam-mini", arXiv:2406.16793, as FedAdamW does
    (Liu et al. 2025, arXiv:2510.27486).
    """
    blocks = {}
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(prefix, recurse=False):
            count = _torch_blocks(module, name.rpartition(".")[2]) if isinstance(module, nn.MultiheadAttention) else 1
            parent_name, _, own_name = prefix.rpartition(".")
            if own_name in SEPARATE + JOINT:
                count = _head_count(model.get_submodule(parent_name), own_name, len(parameter))
            if count > 1 and len(parameter) % count == 0:
                blocks[name] = count
    return blocks


def _torch_blocks(attention: nn.MultiheadAttention, name: str) -> int:
    if name.startswith("in_proj"):
        return 3 * attention.num_heads
    return attention.num_heads if name in ("q_proj_weight", "k_proj_weight", "v_proj_weight") else 1


def _head_count(attention: nn.Module, projection: str, rows: int) -> int:
    """How many heads the rows of a projection have, from what attention modules say of themselves."""
    for key in ("head_dim", "attention_head_size"):
        if isinstance(size := getattr(attention, key, None), int):
            return rows // size if rows % size == 0 else 1
    for key in ("num_heads", "num_attention_heads"):
        if isinstance(heads := getattr(attention, key, None), int):
            return heads * (3 if projection in JOINT else 1)
    return 1
