"""The report's page: whole by itself, safe with any text, and with every part that the report has."""

import math
import re
from html.parser import HTMLParser

import pytest
from test_evaluate_report_card import FULL, REPORTS, report

from qat_lora.evaluate.report import WIDTH, _sizes, html_report


class Tags(HTMLParser):
    """Counts tags; notes those that were closed without being open."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        if tag not in ("meta", "img", "html", "circle", "path"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in ("circle", "path"):
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


@pytest.mark.parametrize("name", REPORTS)
def test_every_report_makes_a_page_that_needs_nothing_else(tmp_path, name):
    (tmp_path / "s.png").write_bytes(b"\x89PNG")
    page = html_report(REPORTS[name], "a <b> title", tmp_path / "s.png")
    tags = Tags(page)
    assert tags.open == [] and "b" not in tags.seen and "script" not in tags.seen and "a <b> title" in tags.text
    assert "data:image/png;base64,iVBORw==" in page and not re.search(r"https?://|url\(|<link|href=", page)
    assert "img" not in Tags(html_report(REPORTS[name], "t", tmp_path / "none.png")).seen
    assert tags.text.count("Worst tokens of") == len(REPORTS[name]["damage"])


def test_samples_stand_beside_each_other(tmp_path):
    page = html_report(FULL | {"samples": {"teacher": ["a < b"], "student 1 <b>": ["a > b"]}}, "t", tmp_path / "none")
    tags = Tags(page)
    assert tags.seen.count("pre") == 2 and "a < b" in tags.text and "a > b" in tags.text


def sized(**points):
    found = report(students=2)
    for (bits, kl), name in zip(points.values(), ("student 1 <b>", "student 2 <b>"), strict=True):
        found["models"][name] |= {"bits_over_all_weights": bits, "kl": kl}
    return found


def test_the_picture_has_a_point_for_each_student_with_both_figures(tmp_path):
    for points, count in (
        ({"a": (3.0, 0.1), "b": (6.0, 0.001)}, 2),
        ({"a": (3.0, 0.1), "b": (3.0, 0.1)}, 2),
        ({"a": (3.0, 1.0), "b": (None, 0.1)}, 1),
        ({"a": (3.0, math.nan), "b": (3.0, 0.0)}, 0),
    ):
        page = html_report(sized(**points), "t", tmp_path / "none")
        assert page.count("<circle") == count and ("<svg" in page) == (count > 0)
        for x, y in re.findall(r"<circle cx='(\d+)' cy='(\d+)'", page):
            assert 44 <= int(x) < 360 and 15 <= int(y) <= 205
    page = html_report(sized(a=(3.0, 0.1), b=(3.0, 0.1)), "t", tmp_path / "none")
    labels = re.findall(r"y='(\d+)' text-anchor=end>student", page)
    assert abs(int(labels[0]) - int(labels[1])) >= 12, "two equal students' labels cover each other"


def test_labels_of_the_picture_end_inside_it():
    """At 11 px a character takes some 6; the naive label, to the right of every point, was cut."""
    names = ["a-student-with-a-long-name", "another-with-a-long-name"]
    models = {name: {"bits_over_all_weights": bits, "kl": 0.01} for name, bits in zip(names, (2.2, 16.0), strict=True)}
    labels = re.findall(r"<text x='(\d+)' y='\d+' text-anchor=(\w+)>([^<]*with[^<]*)<", _sizes(models))
    assert len(labels) == 2
    for x, anchor, shown in labels:
        width = 6 * len(shown)
        assert int(x) - width >= 0 if anchor == "end" else int(x) + width <= WIDTH, shown
