"""Embeddings and heads of 8 bits, made of those of a loaded model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kvconvert.errors import UnsupportedModelError
from kvconvert.kernels.vocabulary import VocabularyRows

SCALE = "embed_scale"  # by which embeddings of Gemma and others are multiplied


class _Rows(nn.Module):
    """Holds the rows: buffers, which move with the model."""

    def __init__(self, rows: VocabularyRows):
        super().__init__()
        self.register_buffer("codes", rows.codes)
        self.register_buffer("scales", rows.scales)

    def _apply(self, fn: Any, recurse: bool = True) -> _Rows:
        scales = self.scales
        super()._apply(fn, recurse)
        self.scales = scales.to(self.codes.device)  # in float32, whatever the model is cast to
        return self

    def rows(self) -> VocabularyRows:
        """The codes and scales."""
        return VocabularyRows(self.codes, self.scales)


def _first_of(weight: Tensor, rows: int = 0) -> Tensor:
    """The first rows of weights [V, D], for models that ask for their dtype or device."""
    return weight[:rows].detach().clone()


class NarrowEmbedding(nn.Module):
    """An embedding of 8 bits.

    Args:
        rows: the quantized rows of the vocabulary.
        like: the embedding that is replaced; if it multiplies by `embed_scale` (Gemma), so does this one.
        kept: the number of first rows that stay in `weight`, where the model reads them directly.
    """

    def __init__(self, rows: _Rows, like: nn.Embedding, kept: int = 0):
        super().__init__()
        self.table, self.num_embeddings, self.embedding_dim = rows, like.num_embeddings, like.embedding_dim
        scale = getattr(like, SCALE, None)  # a number in XGLM
        self.register_buffer(SCALE, None if scale is None else torch.as_tensor(scale), persistent=False)
        self.register_buffer("weight", _first_of(like.weight, kept), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        """[*ids.shape, D]."""
        found = self.table.rows().embeddings(ids, self.weight.dtype)
        return found if self.embed_scale is None else found * self.embed_scale.to(found.dtype)


class NarrowHead(nn.Module):
    """A head of 8 bits, with the bias of the head that it is made of."""

    def __init__(self, rows: _Rows, like: nn.Linear):
        super().__init__()
        self.table, self.bias, self.out_features = rows, like.bias, like.out_features
        self.register_buffer("weight", _first_of(like.weight), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Logits [..., V] of hidden states [..., D]."""
        found = self.table.rows().logits(x)
        return found if self.bias is None else found + self.bias


@torch.no_grad()
def narrow_vocabulary(model: Any) -> None:
    """Round a model's embedding and head to 8 bits, a scale for each token; where they are one tensor, they stay one.

    Raises:
        UnsupportedModelError: the model has none, or of another kind than a table and a Linear.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    plain = type(embedding) is nn.Embedding or (isinstance(embedding, nn.Embedding) and hasattr(embedding, SCALE))
    if not plain or not isinstance(head, nn.Linear):
        raise UnsupportedModelError(
            f"`head_bits` = 8 is for models with an embedding and a head of the usual kinds, and this "
            f"{model.config.model_type} model has {type(embedding).__name__} and {type(head).__name__}; leave it out."
        )
    if len({*map(str, getattr(model, "hf_device_map", {}).values())}) > 1:
        raise UnsupportedModelError("`head_bits` = 8 is for models on one device; leave it out, or `device_map`.")
    rows = _Rows(VocabularyRows.of(embedding.weight))
    own = rows if head.weight is embedding.weight else _Rows(VocabularyRows.of(head.weight))
    text, kept = model.config.get_text_config(decoder=True), 0
    if getattr(text, "hidden_size_per_layer_input", None) and text.pad_token_id is not None:
        kept = text.pad_token_id + 1  # Gemma 4 takes the padding token's row from `weight`
    model.set_input_embeddings(NarrowEmbedding(rows, embedding, kept))
    model.set_output_embeddings(NarrowHead(own, head))
