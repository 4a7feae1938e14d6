"""The page of data_prep.check: everything on it, nothing broken by odd names."""

import base64
import re
import shutil
import subprocess
from html import escape
from html.parser import HTMLParser

import numpy as np
import pytest

from data_prep import check_figures
from data_prep.check_kinds import KINDS, explain
from data_prep.check_outliers import measures, outlier_problems
from data_prep.check_page import page
from segspeed.data.thumbnail import save_thumbnail
from segspeed.types import Case, CaseFacts, Cohort, Problem

ODD = ["<script>alert(1)</script>", "Größe 'x' & \"y\"", "$a_b$ {c} %s", "汉字 \u202e"]
VOID = {"meta", "img", "br", "path", "use", "input", "hr"}
BROWSER = next((b for b in map(shutil.which, ("chromium", "chromium-browser", "google-chrome")) if b), None)


class Parsed(HTMLParser):
    """Tags with their attributes and all text; fails where tags do not nest."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.text = [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)

    def of(self, tag):
        return [a for t, a in self.tags if t == tag]


def fact(case, n=0, spacing=(3.0, 1.0, 1.0)):
    rng = np.random.default_rng(n)
    values = tuple(float(v) for v in rng.normal(100, 10, 40))
    return CaseFacts(case, f"{n:064d}", (20, 30, 30 + n % 3), spacing, "RAS" if n % 4 else "LPS", (20, 30, 30),
                     {"liver <b>": 1000 + n, "tumour": n % 2 * 40}, (values,))  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(cohort, facts, problems, measures, pictures) of 24 cases, four of them with odd names."""
    ids = [*ODD, *(f"case_{n:02d}" for n in range(20))]
    cases = tuple(Case(i, (), None, patient=f"Mustermann {i}") for i in ids)
    cohort = Cohort("a <b> & c", cases, {"liver <b>": (1,), "tumour": (2,)}, ("MRI $x$",))
    facts = [fact(i, n) for n, i in enumerate(ids)]
    facts[6] = fact(ids[6], 6, spacing=(30.0, 1.0, 1.0))
    facts[0] = fact(ids[0], 0, spacing=(3.0, 9.0, 1.0))
    found = measures(cohort, facts)
    problems = [
        *(Problem(i, f"imagesTr/{i}.nii.gz", "error", "nan", f"12 voxels of <{n}> are NaN") for n, i in enumerate(ids[:14])),
        Problem(ids[3], "labelsTr/x.nii.gz", "warning", "kind-of-tomorrow", "something <new>"),
        Problem("", "", "error", "split", "the split & nothing else"),
        *outlier_problems(found),
    ]  # fmt: skip
    path = tmp_path_factory.mktemp("p") / "x.png"
    label = np.zeros((9, 9, 9), np.uint8)
    label[3:6, 3:6, 3:6] = 1
    save_thumbnail(path, np.arange(729, dtype=np.float32).reshape(9, 9, 9), label, (1.0, 1.0, 1.0))
    data = base64.b64encode(path.read_bytes()).decode()
    return cohort, facts, problems, found, dict.fromkeys(ids[:-1], data)


@pytest.fixture(scope="module")
def html(made):
    return page(*made, {"case_19": "cannot be read <at all>"}, 23)


@pytest.fixture
def no_figures(monkeypatch):
    """Pages without histograms, which take most of their time."""
    for name in ("histograms", "intensities"):
        monkeypatch.setattr(check_figures, name, lambda *_: None)


def test_it_parses_and_holds_every_problem_and_every_case(made, html):
    cohort, _, problems, _, pictures = made
    parsed = Parsed(html)
    text = "".join(parsed.text)
    for p in problems:
        assert p.message in text
        assert p.file in text
        assert explain(p.kind).title in text
    for case in cohort.cases:
        assert case.id in text
    captions = re.findall(r"<figcaption><b>", html)
    assert len(captions) == len(pictures) == 23
    assert "1 case without a picture" in text
    assert "cannot be read <at all>" in text
    assert "15 errors" not in text, "the number stands on a card"
    assert "15 of" not in text
    assert "24 of 24" in text


def test_names_cannot_break_out(made, html):
    parsed = Parsed(html)
    assert parsed.of("script") == []
    assert "<script" not in html.lower()
    allowed = {"alt", "src", "width", "height", "loading", "decoding"}
    assert {key for image in parsed.of("img") for key in image} == allowed
    alts = [image["alt"] for image in parsed.of("img")]
    for name in ODD:
        assert any(alt.startswith(f"{name}: axial, coronal and sagittal slice; nan") for alt in alts), name


def test_patients_are_counted_and_not_named(html):
    assert "24 cases of 24 patients" in html
    assert "Mustermann" not in html


def test_links_have_targets_and_nothing_comes_from_outside(html):
    parsed = Parsed(html)
    ids = [a["id"] for _, a in parsed.tags if "id" in a]
    links = [a["href"] for a in parsed.of("a")]
    assert links
    assert {link[1:] for link in links} <= set(ids)
    sources = [a.get("src") or a.get("href") or a.get("xlink:href") for _, a in parsed.tags]
    assert all(s.startswith(("#", "data:image/png;base64,")) for s in sources if s)
    assert not re.search(r"url\((?!['\"]?#)", html)
    for image in [*parsed.of("img"), *parsed.of("svg")]:
        assert image.get("alt") or image.get("aria-label")


def test_flagged_cases_are_marked_and_outliers_named_in_their_histogram(html):
    parsed = Parsed(html)
    classes = [a.get("class") for a in parsed.of("figure") if "id" in a]
    assert classes.count("error") == 14
    assert classes.count("warning") == classes.count("outlier") == 0, "their cases have errors too"
    svgs = re.findall(r"<svg.*?</svg>", html, re.S)
    assert len(svgs) == 5
    assert "case_02" in svgs[0]
    assert "&lt;script&gt;" in svgs[0], "text stays text in the pictures"
    captions = re.findall(r"<figcaption>([^<]*)</figcaption>", html)
    ends = [c[c.index("Outliers: ") :] if "Outliers: " in c else c[-12:] for c in captions]
    both = f"Outliers: {escape(ODD[0])}, case_02."
    # both cases are outliers in volume too, as their voxels are larger
    assert ends == [both, "No outliers.", ends[2], both, "No outliers."]


def test_many_cases_of_a_kind_unfold_and_the_smallest_detail_stays(made, html):
    assert "<summary>6 more</summary>" in html
    assert "<summary>All 24 cases in a table</summary>" in html
    assert "kind-of-tomorrow" in html
    assert "Kind of tomorrow" in html
    assert "What an outlier is" in html


def test_the_same_data_give_the_same_page(made, html):
    assert page(*made, {"case_19": "cannot be read <at all>"}, 23) == html


def test_a_sheet_that_is_a_sample_says_so(made, no_figures):
    cohort, facts, problems, found, pictures = made
    few = dict(list(pictures.items())[:5])
    assert "5 of 23 cases are shown" in page(cohort, facts, problems, found, few, {}, 23)
    assert "are shown" not in page(cohort, facts, problems, found, pictures, {}, 23)


def test_a_good_cohort_and_one_without_any_readable_case(made, no_figures):
    cohort, facts, _, _, pictures = made
    good = page(cohort, facts[7:9], [], measures(cohort, facts[7:9]), dict(list(pictures.items())[7:9]), {}, 2)
    Parsed(good)
    assert "Nothing stands against training" in good
    assert "class='bad'" not in good
    errors = [Problem(c.id, "", "error", "unreadable", "cut short") for c in cohort.cases if c.id.startswith("case_")]
    bad = page(cohort, [], errors, [], {}, {}, 0)
    Parsed(bad)
    assert "Training is refused" in bad
    assert "data.exclude=[case_00,case_01," in bad
    assert "<svg" not in bad


def test_of_many_classes_those_with_outliers_are_drawn(monkeypatch):
    names = [f"organ {n}" for n in range(100)]
    counts = [dict.fromkeys(names, 1000) for _ in range(12)]
    counts[4]["organ 90"] = 50_000
    facts = [CaseFacts(f"c{n}", "", (9, 9, 9), (1.0, 1.0, 1.0), "RAS", (9, 9, 9), c) for n, c in enumerate(counts)]
    cohort = Cohort("many", (), {name: (n + 1,) for n, name in enumerate(names)}, ("CT",))
    drawn = []
    monkeypatch.setattr(
        check_figures, "histograms", lambda found, *_: drawn.append([m.name for m in found]) or "<svg/>"
    )
    text = check_figures.sections(cohort, facts, measures(cohort, facts))
    assert drawn[-1] == [f"volume of organ {n}" for n in (90, *range(23))]
    assert "24 of 100 classes are drawn, those with outliers first. Outliers: c4." in text


def test_a_note_on_most_cases_sets_none_apart(made, no_figures):
    cohort, facts, _, found, pictures = made
    notes = [Problem(c.id, "", "info", "squeezed", "x") for c in cohort.cases]
    assert "<span class='flag" not in page(cohort, facts, notes, found, pictures, {}, 23)
    assert page(cohort, facts, notes[:3], found, pictures, {}, 23).count("<span class='flag info'>") == 3


def test_every_explanation_is_a_sentence():
    for kind, about in KINDS.items():
        assert about.title, kind
        assert about.meaning.endswith((".", "?")), kind
        assert not about.action or about.action.endswith((".", "?")), kind
    assert explain("new_kind-of").title == "New kind of"


@pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome on this machine")
def test_a_browser_shows_it(html, tmp_path):
    path = tmp_path / "check.html"
    path.write_text(html, encoding="utf-8")
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
        f"--user-data-dir={tmp_path / 'profile'}", "--window-size=390,2400", "--dump-dom", path.as_uri(),
    ]  # fmt: skip
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert shown.returncode == 0, shown.stderr
    assert "&lt;script&gt;alert(1)" in shown.stdout
    assert shown.stdout.count("data:image/png") == 23
