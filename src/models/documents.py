"""Documents in packed sequences: which positions may see each other, and how far a head may look ahead.

Documents are packed one behind the other, an end-of-text token E before each of them, and the stream is cut into
sequences wherever they end. Here E *begins* the document behind it: it is the token that its first word is predicted
from. Each number below is the document of a token, the number of E up to it,

    tokens      d  d  E  a  a  a  E  b  b  E        d: the end of a document that began in the sequence before
    documents   0  0  1  1  1  1  2  2  2  3

so that each token is a target once, and is predicted by nothing but its own document: `a` from E alone, the E behind it
from E a a a. Attention goes from a position back to the start of its document. Everything else in the model treats
tokens one by one. Positions for RoPE count on along the sequence: only their differences enter the scores.

Multi-token prediction at depth k looks at the token k places on. Where that belongs to another document, it is given
the E at which its own one ends, as at the end of a sequence it is given the last token; and it has no target there.

Documents come from the tokens, on their device: nothing travels with a batch.

Legend: B batch, S sequence.
"""

import torch
from torch import Tensor

from models.mtp import tokens_ahead


def documents_of(tokens: Tensor, end_of_text: int) -> Tensor:
    """tokens [B, S] -> the number of each token's document in its sequence, [B, S] int32, never falling."""
    return (tokens == end_of_text).cumsum(1, dtype=torch.int32)


def bounds_of(documents_BS: Tensor) -> Tensor:
    """Numbers of documents -> first position of each position's document, and the one behind its last: [2, B, S] int32,
    as `precision.document_mask` takes them."""
    numbers = documents_BS.contiguous()
    sides = (torch.searchsorted(numbers, numbers, right=right, out_int32=True) for right in (False, True))
    return torch.stack(list(sides))


def beyond(documents: Tensor, k: int, length: int) -> Tensor:
    """documents [B, S + 1] -> [B, S] bool: whether the token k places on is another document's."""
    return tokens_ahead(documents, k, length) != documents[:, :length]
