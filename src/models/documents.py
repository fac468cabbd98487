"""Documents in packed sequences: which positions see each other, and how far a head looks ahead.

Documents are packed one after the other, each with an end-of-text token E before it, and the stream is cut into
sequences at any point. Here E *begins* the next document: its first word is predicted from it. The document of a token
is the number of E up to and including it:

    tokens      d  d  E  a  a  a  E  b  b  E        d: the end of a document that began in the sequence before
    documents   0  0  1  1  1  1  2  2  2  3

So each token is a target once, and only its own document predicts it: the first `a` from E alone, the E after it from E
a a a. Attention reaches from a position back to the start of its document. Everything else in the model treats tokens
independently. RoPE positions count on along the sequence: only their differences enter the scores.

Multi-token prediction at depth k reads the token k positions ahead. If that belongs to another document, the input is
the E at which its own document ends, as at the end of a sequence it is the last token; and there is no target.

Documents are derived from the tokens, on their device: no extra data travels with a batch.

Legend: B batch, S sequence.
"""

import torch
from torch import Tensor

from models.mtp import tokens_ahead


def documents_of(tokens: Tensor, end_of_text: int) -> Tensor:
    """Return the document index of each token within its sequence, [B, S] int32, non-decreasing, for tokens [B, S]."""
    return (tokens == end_of_text).cumsum(1, dtype=torch.int32)


def bounds_of(documents_BS: Tensor) -> Tensor:
    """Return the first position of each position's document and the one after its last, [2, B, S] int32, as
    `precision.document_mask` takes them."""
    numbers = documents_BS.contiguous()
    sides = (torch.searchsorted(numbers, numbers, right=right, out_int32=True) for right in (False, True))
    return torch.stack(list(sides))


def beyond(documents: Tensor, k: int, length: int) -> Tensor:
    """Return whether the token k positions ahead belongs to another document, [B, S] bool, for documents [B, S + 1]."""
    return tokens_ahead(documents, k, length) != documents[:, :length]
