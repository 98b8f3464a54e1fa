"""Names and shapes that all rooms share.

Shape letters, used as suffixes of variable names everywhere:
`B` rows of a micro-batch, `L` tokens of a row, `N` positions (usually B·(L-1), flattened), `K` head entries of a
position, `V` vocabulary, `H` hidden width, `R` adapter rank, `O`/`I` output/input features, `G` groups.

A *position* p of a row sees tokens 0..p and predicts token p+1, so a row of L tokens has L-1 positions. The
teacher's *head* at a position is its K likeliest tokens, in rank order; the *tail* is everything else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch

    Tensor = torch.Tensor


Batch = dict[str, Any]
"""One micro-batch; numpy arrays from the cache, tensors after `Runtime.feed`. Keys:

* `input_ids` i32 [B, L]
* `document_ids` i32 [B, L]: which document of the row a token belongs to; attention never crosses it
* `target_mask` bool [B, L-1]: 1 where the prediction of token p+1 counts
* `head_ids` i32 [B, L-1, K], `head_logits` f32 [B, L-1, K]: the head, logit minus the position's largest logit
* `lse`, `log_tail` f32 [B, L-1]: log of the sum of exp(logit - max) over the vocabulary, and the log
  probability of the tail; for a temperature T other than 1 under `temperature_key("lse", T)`

and, where the cache was built with them:

* `tail_draw_ids` i32 [B, L-1, D] (`--tail-draws D`): tokens drawn from the teacher's tail at T = 1, with repetition;
  all 0 where the tail is empty (`log_tail` is -inf), where they must get weight 0
* `tail_entropy` f32 [B, 1], with these: a row's mean of -m/D Σ log t(d) over its D draws d at a position, m the tail's
  mass, weighted as its positions; by it the draws' cross-entropy exceeds their part of the KL
* `draw_ids` i32 [B, L-1, D] (`--draws D`): tokens drawn from the whole teacher at T = 1, with repetition
* `weights` f32 [B, L-1]: how much each position counts in the loss, 0 or more; 1 where there are none
* `entropy` f32 [B, 1] (`--row-codec lzma --top-k 0`): the teacher's mean entropy in a row, weighted as its positions
* `teacher_hidden` f16 (float32 after `Runtime.feed`) [B, L-1, H] (`--hidden`): the teacher's last hidden states; its
  output head comes from `KDCacheDataset.teacher_lm_head`. With `--top-k 0` there is no head, `lse` or `log_tail`

Rows of padding have `target_mask` 0 everywhere, a uniform teacher, draws of 0 and hidden states of 0.
"""


# How attention keeps no scores for the backward pass (`layers/attention.py`): in `tiled` form on CPUs, `blocked` for a
# compiler, by the `library`'s kernels where they keep none themselves, `flex` where layers are compiled.
AttentionForm = Literal["tiled", "blocked", "library", "flex"]
VerifyRows = Literal["all", "sampled", "off"]  # rows of a KD cache that are compared with their CRC-32 as they are read
# How the loss walks through logits: `positions` serves every case, `vocabulary` is faster on CPUs, `kernel` on CUDA.
LossWalk = Literal["positions", "vocabulary", "kernel"]


def temperature_key(name: str, temperature: float) -> str:
    """Return the array name of `lse` or `log_tail` at a temperature: `lse` at 1, `lse@2` at 2."""
    return name if temperature == 1.0 else f"{name}@{temperature:g}"


class SparseTeacher(NamedTuple):
    """What a loss needs of the teacher at N positions and one temperature."""

    ids_NK: Tensor  # int64 token ids of the head
    log_probs_NK: Tensor  # float32 log t of the head at `temperature`, normalised over the whole vocabulary
    log_tail_N: Tensor  # float32 log of the mass outside the head, -inf where the head is the whole vocabulary
    temperature: float = 1.0


@dataclass(frozen=True)
class LMHead:
    """The last linear map of a causal language model, and what is done to its logits.

    logits = softcap · tanh(logit_scale · (h Wᵀ + b) / softcap), the tanh only where `softcap` is set. Rows of
    `weight_VH` from `vocab_size` on are padding: their logits count as -inf.
    """

    weight_VH: Tensor
    vocab_size: int
    bias_V: Tensor | None = None
    logit_scale: float = 1.0
    softcap: float | None = None


class LanguageModel(Protocol):
    """A causal language model cut where the loss needs it: before the output head."""

    @property
    def vocab_size(self) -> int:
        """Rows of the output head that are real tokens or trained rows; padding is not counted."""

    def hidden(self, input_ids_BL: Tensor, document_ids_BL: Tensor) -> Tensor:
        """Return the last hidden states [B, L, H]; attention stays inside a document."""

    def lm_head(self) -> LMHead:
        """Return the output head as it is now."""

    def logits(self, hidden_NH: Tensor) -> Tensor:
        """Return logits [N, vocab_size] in the type of the hidden states, which may be wider than the model's."""


class Scores(NamedTuple):
    """How scores follow from the products of queries and keys."""

    scale: float
    window: int | None = None  # positions that each sees at most, with its own
    softcap: float | None = None  # Gemma 2's: softcap · tanh(score / softcap)

    def of(self, products: Tensor) -> Tensor:
        """Return the scores, in the products' place."""
        score = products.mul_(self.scale)
        return score if self.softcap is None else score.div_(self.softcap).tanh_().mul_(self.softcap)

    def slope(self, score: Tensor) -> Tensor | float:
        """Return the derivative of scores by products; masked ones get no gradient, so any finite number will do."""
        cap = self.softcap
        return self.scale if cap is None else self.scale * (1 - (score / cap).clamp(-1, 1).square())
