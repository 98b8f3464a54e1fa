"""Scores against numpy in float64; recovery by hand."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from qat_lora.errors import TextError
from qat_lora.evaluate import score as score_module
from qat_lora.evaluate.score import measure, recovery
from qat_lora.layers.calibrate.upcast import upcast_linear

VOCABULARY, WIDTH, LENGTH = 37, 6, 9


def score(*args, **settings):
    """The figures of all models as attributes."""
    return {name: SimpleNamespace(**tally.figures) for name, tally in measure(*args, **settings).items()}


class Table:
    """A language model that is a table: the hidden state of a token is its row."""

    vocab_size = VOCABULARY

    def __init__(self, seed, spread=2.0):
        draw = np.random.default_rng(seed)
        self.embed = (draw.normal(size=(VOCABULARY, WIDTH)) * spread).astype(np.float32)
        self.output = draw.normal(size=(VOCABULARY, WIDTH)).astype(np.float32)

    def hidden(self, input_ids_BL, document_ids_BL):
        return torch.from_numpy(self.embed)[input_ids_BL]

    def logits(self, hidden_NH):
        return hidden_NH @ torch.from_numpy(self.output).T


def batches(counts=(3, 3, 2), masked=0.4):
    draw = np.random.default_rng(9)
    for rows in counts:
        yield {
            "input_ids": torch.from_numpy(draw.integers(0, VOCABULARY, (rows, LENGTH))),
            "document_ids": torch.zeros(rows, LENGTH, dtype=torch.int32),
            "target_mask": torch.from_numpy(draw.random((rows, LENGTH - 1)) >= masked),
        }


def oracle(teacher, student):
    """nll, KL, agreement, tokens, accuracy and calibration error position by position, in float64."""
    nll, kl, same, likely = [], [], [], []
    for batch in batches():
        ids, mask = batch["input_ids"].numpy(), batch["target_mask"].numpy()
        for b, p in zip(*mask.nonzero(), strict=True):
            logs = []
            for model in (teacher, student):
                logits = model.output.astype(np.float64) @ model.embed[ids[b, p]].astype(np.float64)
                logs.append(logits - logits.max() - np.log(np.exp(logits - logits.max()).sum()))
            log_t, log_s = logs
            nll.append(-log_s[ids[b, p + 1]])
            kl.append((np.exp(log_t) * (log_t - log_s)).sum())
            same.append(log_t.argmax() == log_s.argmax())
            likely.append((np.exp(log_s.max()), log_s.argmax() == ids[b, p + 1]))
    right = sum(hit for _, hit in likely) / len(likely)
    bins = [[of for of in likely if int(of[0] * 15) == b] for b in range(15)]
    ece = sum(abs(sum(hit - confidence for confidence, hit in of)) for of in bins) / len(likely)
    return math.fsum(nll) / len(nll), math.fsum(kl) / len(kl), sum(same) / len(same), len(nll), right, ece


@pytest.mark.parametrize("pieces", [None, 1, 5])
@pytest.mark.parametrize("chunk", [1, 7, 10_000])
def test_scores_are_those_of_the_definition(monkeypatch, chunk, pieces):
    monkeypatch.setattr(score_module, "CHUNK_BYTES", 4 * VOCABULARY * chunk)
    monkeypatch.setattr(score_module, "CHUNK_ROWS", 1)
    teacher, near, far = Table(1), Table(1, spread=1.7), Table(2)
    piece_bytes = pieces and pieces * 16 * VOCABULARY  # positions of four float32 buffers
    students = {"near": near, "far": far, "self": teacher}
    found = score(teacher, students, batches(), quiet=True, piece_bytes=piece_bytes)
    assert list(found) == ["teacher", "near", "far", "self"]
    for name, model in {"teacher": teacher, "near": near, "far": far}.items():
        nll, kl, top1, tokens, accuracy, ece = oracle(teacher, model)
        assert found[name].tokens == tokens
        assert found[name].nll == pytest.approx(nll, abs=1e-6)
        assert found[name].kl == pytest.approx(kl, abs=1e-6)
        assert found[name].top1 == pytest.approx(top1, abs=1e-12)
        assert found[name].accuracy == pytest.approx(accuracy, abs=1e-12)
        assert found[name].ece == pytest.approx(ece, abs=1e-6)
        assert found[name].ppl == pytest.approx(math.exp(nll), rel=1e-6)
    assert found["teacher"].kl == 0.0 and found["teacher"].top1 == 1.0
    assert found["self"] == found["teacher"]
    assert 0 < found["near"].kl < found["far"].kl and found["far"].top1 < 1


class Bfloat16(Table):
    """Its logits are rounded as a model in bfloat16 rounds them."""

    def logits(self, hidden_NH):
        return super().logits(hidden_NH).bfloat16()


def test_logits_in_bfloat16_lose_nothing_more():
    """KL and loss are those of the rounded logits in float64; taken in bfloat16 they would be wrong by a per cent."""
    teacher, student = Bfloat16(1), Bfloat16(1, spread=1.99)
    kl, rough, nll = [], [], []
    for batch in batches():
        ids, mask = batch["input_ids"], batch["target_mask"]
        hidden = [of.hidden(ids[:, :-1][mask], None) for of in (teacher, student)]
        rounded = [of.logits(at) for of, at in zip((teacher, student), hidden, strict=True)]
        log_t, log_s = (logits.double().log_softmax(-1) for logits in rounded)
        kl += (log_t.exp() * (log_t - log_s)).sum(-1).tolist()
        nll += (-log_s.gather(-1, ids[:, 1:][mask][:, None])).flatten().tolist()
        log_t, log_s = (logits.log_softmax(-1) for logits in rounded)
        rough += (log_t.exp() * (log_t - log_s)).sum(-1).tolist()
    found = score(teacher, {"s": student}, batches(), quiet=True)["s"]
    assert found.kl == pytest.approx(math.fsum(kl) / len(kl), abs=1e-6)
    assert found.nll == pytest.approx(math.fsum(nll) / len(nll), abs=1e-6)
    assert abs(math.fsum(rough) / len(rough) - found.kl) > 1e-5  # the naive way fails this test


def test_masked_positions_may_hold_anything():
    class Broken(Table):
        def hidden(self, input_ids_BL, document_ids_BL):
            hidden = super().hidden(input_ids_BL, document_ids_BL).clone()
            hidden[:, :-1][~self.mask] = math.nan
            return hidden

    (batch,) = batches((4,))
    Broken.mask = batch["target_mask"]
    with_nan = score(Broken(1), {"s": Broken(2)}, [batch], quiet=True)
    assert with_nan == score(Table(1), {"s": Table(2)}, [batch], quiet=True)


@pytest.mark.parametrize("none", [[], list(batches((2,), masked=1.0))])
def test_no_token_to_score_is_an_error_and_not_a_perfect_score(none):
    with pytest.raises(TextError, match="no token to score"):
        score(Table(1), {}, none, quiet=True)


def test_rows_are_kept_apart_and_empty_ones_left_out():
    """Each row alone has the figures that it has among others, whatever batch and chunk it came in."""
    teacher, student = Table(1), Table(2)
    whole = measure(teacher, {"s": student}, batches(masked=0.85), quiet=True)["s"].rows
    alone = []
    for batch in batches(masked=0.85):
        for b in range(len(batch["input_ids"])):
            one = {name: value[b : b + 1] for name, value in batch.items()}
            if one["target_mask"].any():
                alone.append(measure(teacher, {"s": student}, [one], quiet=True)["s"].rows)
    assert len(whole) == len(alone) < 8
    np.testing.assert_allclose(whole, np.concatenate(alone), rtol=1e-5, atol=1e-6)


def test_tokens_that_both_or_only_the_student_rule_out():
    """A student that gives nothing to what the teacher all but rules out is not infinitely far from it."""

    class Cut(Table):
        def __init__(self, seed, bias):
            super().__init__(seed)
            self.bias = bias

        def logits(self, hidden_NH):
            logits = super().logits(hidden_NH)
            logits[:, 0] = self.bias
            return logits

    def kl(bias):
        return score(Cut(1, -500.0), {"s": Cut(2, bias)}, list(batches()), quiet=True)["s"].kl

    assert kl(-math.inf) == pytest.approx(kl(-500.0), abs=1e-6)
    swapped = score(Cut(1, 0.0), {"s": Cut(2, -math.inf)}, list(batches()), quiet=True)["s"].kl
    assert swapped > 1e30


def test_logits_of_bfloat16_models_are_not_rounded():
    """A float32 twin of a bfloat16 model is no distance from it, though its logits go beyond 20."""

    class Narrow(Table):
        def __init__(self, dtype):
            super().__init__(1, spread=5.0)
            self.dtype = dtype

        def hidden(self, input_ids_BL, document_ids_BL):
            return torch.from_numpy(self.embed).bfloat16().to(self.dtype)[input_ids_BL]

        def logits(self, hidden_NH):
            return upcast_linear(hidden_NH, torch.from_numpy(self.output).bfloat16().to(self.dtype), None)

    found = score(Narrow(torch.bfloat16), {"twin": Narrow(torch.float32)}, list(batches()), quiet=True)
    assert abs(found["twin"].kl) < 1e-6
    assert found["twin"].nll == pytest.approx(found["teacher"].nll, abs=1e-5)


def test_recovery_by_hand():
    quantised, recovered, teacher = {"nll": 4.0, "kl": 0.8}, {"nll": 3.2, "kl": 0.1}, {"nll": 3.0}
    found = recovery(quantised, recovered, teacher)
    assert found["gap_recovered_log"] == pytest.approx(0.8) and found["kl_recovered"] == pytest.approx(0.875)
    by_ppl = math.log(math.exp(4) / math.exp(3.2)) / math.log(math.exp(4) / math.exp(3))
    assert found["gap_recovered_log"] == pytest.approx(by_ppl)
    assert recovery(quantised, quantised, teacher) == {"gap_recovered_log": 0.0, "kl_recovered": 0.0}
    undamaged = recovery({"nll": 3.0, "kl": 0.0}, recovered, teacher)
    assert all(math.isnan(value) for value in undamaged.values())
