"""A small trained Qwen3 with a chat template, text and chats: what notebooks and documented commands run on here."""

import json
import shutil
from pathlib import Path

import torch

from qat_lora.models.load import load_tokenizer, make_qwen3, make_tokenizer

ROOT = Path(__file__).resolve().parents[1]
VOCABULARY, LENGTH = 512, 32
WORDS = ("head", "tail", "scale", "code", "layer")
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_toy(folder: Path, steps: int) -> None:
    """Make text, held-out text, chats, and a teacher trained for some steps, each in its place below a folder."""
    text, held_out, teacher = folder / "text", folder / "held-out", folder / "teacher"
    for part, files in ((text, (ROOT / "docs").glob("*.md")), (held_out, ROOT.glob("*.md"))):
        part.mkdir(parents=True)
        for file in sorted(files):
            shutil.copyfile(file, part / file.name)
    whole = "\n".join(file.read_text(encoding="utf-8") for file in sorted(text.iterdir()))
    make_tokenizer([whole], VOCABULARY, teacher)
    (teacher / "chat_template.jinja").write_text(TEMPLATE)
    ids = torch.tensor(load_tokenizer(teacher)(whole)["input_ids"])
    torch.manual_seed(0)
    model = make_qwen3(
        teacher, VOCABULARY, hidden=64, layers=1, heads=2, kv_heads=1, mlp=128, max_position_embeddings=256
    ).module
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        starts = torch.randint(len(ids) - LENGTH, (16, 1))
        batch = ids[starts + torch.arange(LENGTH)]
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    model.save_pretrained(teacher)
    chats = [
        [{"from": "human", "value": f"what is row {i}"}, {"from": "gpt", "value": f"row {i} is a {WORDS[i % 5]}"}]
        for i in range(120)
    ]
    lines = [json.dumps({"conversations": turns}) + "\n" for turns in chats]
    (folder / "chats.jsonl").write_text("".join(lines), encoding="utf-8")
