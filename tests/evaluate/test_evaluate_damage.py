"""How damage is spread, against float64 loops that follow the definitions of llama.cpp's report."""

import json
import math

import numpy as np
import pytest
import torch
from test_evaluate_score import VOCABULARY, Table

from qat_lora.data.packing import Encoder, pack_rows
from qat_lora.data.sources import Document
from qat_lora.evaluate.damage import PERCENTILES, WORST, Damage, damage_report
from qat_lora.evaluate.protocols import sliding_rows
from qat_lora.evaluate.score import measure
from qat_lora.setup.common import batches_of

LENGTH, SIZES = 9, [4, 30, 1, 13, 9, 9, 2, 21]  # tokens of the documents, of which some go on over rows
TOKENS = [np.random.default_rng(size).integers(0, VOCABULARY, size).astype(np.int32) for size in SIZES]
PAIRS = {"near": Table(1, spread=1.7), "far": Table(2)}


def damage_of(kind, teacher, students):
    """The rows of all documents by packing or windows, scored by the package."""
    names = []

    def noted():
        for i, size in enumerate(SIZES):
            names.append(f"document {i}")
            yield Document(str(size), None, names[-1])

    @Encoder
    def encode(document):
        ids = TOKENS[int(document.name.split()[1])]
        return [(part, np.ones(len(part), np.uint8)) for part in np.array_split(ids, min(2, len(ids)))]

    rows = pack_rows(noted(), encode, LENGTH) if kind == "packed" else sliding_rows(noted(), encode, LENGTH, 4)
    damage = Damage(rows, names)
    numpy_batches = batches_of(iter(damage.rows), LENGTH, 3)
    batches = ({name: torch.from_numpy(value) for name, value in batch.items()} for batch in numpy_batches)
    measure(teacher, students, batches, quiet=True, observe=damage.observe)
    return damage


def log_probs(model, token):
    logits = model.output.astype(np.float64) @ model.embed[token].astype(np.float64)
    return logits - np.logaddexp.reduce(logits)


def numbers_of(kind, teacher, student):
    """KL, Δp, changed top-1 and document of every counted token, by a loop over the documents."""
    found = []
    place = 0  # in packed rows, whose first token nothing predicts
    for number, ids in enumerate(TOKENS):
        for i, token in enumerate(ids):
            if i and (kind == "sliding" or place % LENGTH):
                t, s = log_probs(teacher, ids[i - 1]), log_probs(student, ids[i - 1])
                kl = math.fsum(math.exp(a) * (a - b) for a, b in zip(t, s, strict=True))
                change = math.exp(s[token]) - math.exp(t[token])
                found.append((kl, change, float(t.argmax() != s.argmax()), number, ids[i - 1], token, t, s))
            place += 1
    return found


def percentile(values, fraction):
    """llama.cpp's: between the two sorted values at fraction · (n - 1)."""
    values, at = sorted(values), fraction * (len(values) - 1)
    low = int(at)
    return values[low] + (at - low) * (values[min(low + 1, len(values) - 1)] - values[low])


def decode(ids):
    return " ".join(map(str, ids)) + " "


@pytest.mark.parametrize("kind", ["packed", "sliding"])
def test_figures_are_those_of_the_definitions(kind):
    teacher = Table(1)
    report = damage_report(list(PAIRS), {"text": damage_of(kind, teacher, PAIRS)}, decode)
    assert list(report) == list(PAIRS)
    json.dumps(report)
    for name, student in PAIRS.items():
        numbers, found = numbers_of(kind, teacher, student), report[name]
        kl, change, changed, documents = map(list, zip(*(line[:4] for line in numbers), strict=True))
        for values, of in ((kl, found["kl"]), (change, found["delta_p"])):
            for point, percent in PERCENTILES.items():
                assert of[point] == pytest.approx(percentile(values, percent / 100), abs=1e-5), point
            assert [of["smallest"], of["largest"]] == pytest.approx([min(values), max(values)], abs=1e-5)
        assert found["delta_p"]["mean"] == pytest.approx(math.fsum(change) / len(change), abs=1e-6)
        rms = math.sqrt(math.fsum(x * x for x in change) / len(change))
        assert found["delta_p"]["rms"] == pytest.approx(rms, abs=1e-6)
        assert found["changed_top1"] == pytest.approx(sum(changed) / len(changed), abs=1e-9)
        means = {n: np.mean([k for k, of in zip(kl, documents, strict=True) if of == n]) for n in set(documents)}
        assert found["documents"]["count"] == len(means)
        assert found["documents"]["kl"]["median"] == pytest.approx(percentile(means.values(), 0.5), abs=1e-5)
        order = sorted(means, key=means.get, reverse=True)
        for line, n in zip(found["documents"]["worst"], order, strict=True):
            assert line["text"] == "text" and line["document"] == f"document {n}"
            assert line["tokens"] == documents.count(n) and line["kl"] == pytest.approx(means[n], abs=1e-5)
        assert len(found["worst_tokens"]) == WORST
        worst = sorted(numbers, key=lambda line: -line[0])[:WORST]
        assert [of["kl"] for of in found["worst_tokens"]] == pytest.approx([line[0] for line in worst], abs=2e-5)
        of, ties = found["worst_tokens"][0], [line for line in numbers if line[0] > worst[0][0] - 1e-6]
        said = {(f"document {n}", *map(str, (token, t.argmax(), s.argmax()))) for *_, n, _, token, t, s in ties}
        assert (of["document"], *(of[key].strip() for key in ("token", "teacher", "student"))) in said
        _, _, _, _, before, _, t, s = worst[0]  # all ties follow one token
        assert of["before"].split()[-1] == str(before)
        assert [of["teacher_p"], of["student_p"]] == pytest.approx([np.exp(t.max()), np.exp(s.max())], abs=1e-5)


def test_texts_are_joined_and_rows_without_documents_have_none():
    teacher = Table(1)
    both = {name: damage_of(name, teacher, PAIRS) for name in ("packed", "sliding")}
    report = damage_report(list(PAIRS), both, decode)["far"]
    alone = [damage_report(list(PAIRS), {name: of}, decode)["far"] for name, of in both.items()]
    assert report["kl"]["largest"] == max(of["kl"]["largest"] for of in alone)
    assert report["documents"]["count"] == sum(of["documents"]["count"] for of in alone)
    both["packed"].names = []
    blocks = damage_report(list(PAIRS), {"blocks": both["packed"]}, decode)["far"]
    assert blocks["documents"] == {"count": 0, "kl": None, "worst": []}
    assert blocks["worst_tokens"][0]["document"] is None
    assert damage_report([], {"alone": damage_of("packed", teacher, {})}, decode) == {}
